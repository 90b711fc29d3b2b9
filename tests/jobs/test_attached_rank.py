"""A job's process as a rank, without a session: what it sends, waits for, keeps and closes."""

from __future__ import annotations

import mmap
import os
import queue
import socket
import stat
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from kit.deadline import DEADLINE
from kit.refusals import exactly

import graftlab as gl
from graftlab.base import shipping
from graftlab.base.world import Place, RunInfo
from graftlab.config import GraftConfig
from graftlab.errors import SessionError
from graftlab.exchange.channel import SocketChannel
from graftlab.jobs.attached_rank import AttachedRank
from graftlab.jobs.world_setup import World
from graftlab.lines.traces import TraceRequest
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire, to_wire
from graftlab.ranks.messages import (
    Acknowledgement,
    AskLineTraces,
    AskMatch,
    AskSelfGraft,
    AskStacks,
    AskWaitReason,
    Contacts,
    FallbackPlan,
    Hello,
    JobCode,
    LinkReport,
    Output,
    PlanUpdate,
    Query,
    RecordStep,
    Reply,
    RunDone,
    RunRequest,
    RunSelfGraft,
    RunSettled,
    TraceSteps,
    WaitReason,
    WorldRequest,
    WorldStart,
    WorldSwitch,
    pack,
)

RUN = RunInfo(3, 2, (0, 1, 2))
PLAN = GraftPlan(t2b="True", compare=None, version=4)
WORLD_REQUEST = WorldRequest(2, RUN, to_wire(PLAN))


class Connection:
    """A connection whose other end is in this process; ``sent`` are the messages."""

    def __init__(self) -> None:
        mine, other = socket.socketpair()
        self.channel, self.other = SocketChannel(mine), SocketChannel(other)
        self.sent: list[Any] = []
        self.send = self.sent.append
        self.taps = [{"name": "x"}]
        self.statuses: dict[str, int] = {}
        self.last_errors: dict[str, str] = {}
        self.lost_rows = 5
        self.generation = 0
        self.reconnect = Mock()


def attached(**parts: Any) -> Any:
    """A rank in run 3 whose next step is 7, with nothing but what a test needs."""
    rank: Any = AttachedRank.__new__(AttachedRank)
    grafter = Mock(next_step=7, newest_plan=PLAN, plan=PLAN)
    grafter.exchange.settle.return_value = True
    rank._grafter, rank._connection, rank._client, rank._proxy = grafter, Connection(), Mock(), None
    rank._config = GraftConfig(role="target", timeout=3.0)
    rank._join = Mock(answer=Mock(session="a", address=""))
    rank._run, rank._world, rank._setup, rank._fallback_plan = RUN, world(), None, None
    rank.place, rank.folder = Place("target", 1, 2, 1), Path("/runs/one")
    rank._setup_lock, rank._ending, rank._over = threading.Lock(), threading.Lock(), threading.Event()
    rank._worlds = queue.SimpleQueue()
    for name, part in parts.items():
        setattr(rank, name, part)
    return rank


def world(number: int = 1, connector: Any = None) -> Any:
    parts = {"number": number, "run": RUN, "plan": PLAN, "connector": connector, "segment": None}
    return Mock(spec=World, exchange=Mock(), page=mmap.mmap(-1, mmap.PAGESIZE), **parts)


# ---- joining ---------------------------------------------------------------------------------------------------------


def test_a_run_begins_with_its_request_its_world_and_what_followed() -> None:
    rank, found = attached(_run=None), world()
    rank._client.remaining.return_value = 9.0
    rank._set_up_world = Mock()
    # The world is complete once the setup has been told to finish.
    rank._setup = Mock(finish=Mock(side_effect=lambda: rank._worlds.put(found)))
    request = RunRequest(RUN, to_wire(PLAN), JobCode())
    question, fallback = Query(1, AskStacks()), FallbackPlan(None, 3)
    outdated = PlanUpdate(to_wire(PLAN))
    for message in (question, outdated, WORLD_REQUEST, fallback, request, outdated, WORLD_REQUEST):
        rank._connection.other.send(pack(message))
    assert rank._await_request() == (
        request,
        found,
        [pack(each) for each in (question, fallback, outdated, WORLD_REQUEST)],
    )
    # What arrives after the request is for the control thread.
    assert rank._set_up_world.mock_calls == [call(WORLD_REQUEST)]


def test_a_rank_that_cannot_begin_names_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = attached(_run=None)
    rank._client.remaining.return_value = 9.0
    rank._worlds.put(OSError("no memory"))
    rank._connection.other.send(pack(PlanUpdate(to_wire(PLAN))))
    with pytest.raises(OSError, match="no memory"):
        rank._await_request()
    rank._client.remaining.return_value = 0.001
    rank._connection.other.send(pack(PlanUpdate(to_wire(PLAN))))
    rank._connection.other.send(pack(WaitReason("baseline[0] had not joined")))
    with pytest.raises(
        SessionError,
        match=exactly("baseline[0] had not joined within 3 s; a larger timeout (GRAFTLAB_TIMEOUT) waits longer"),
    ):
        rank._await_request()
    assert rank._connection.sent == [AskWaitReason()]
    rank._setup = Mock(missing=Mock(return_value=["target[0]", "baseline[0]"]))
    with pytest.raises(
        SessionError,
        match=exactly(
            "target[0], baseline[0] had not joined within 3 s; a larger timeout (GRAFTLAB_TIMEOUT) waits longer"
        ),
    ):
        rank._await_request()
    assert rank._connection.sent == [AskWaitReason()]
    rank._connection.other.close()
    rank._client.remaining.return_value = 9.0
    poller = Mock()
    monkeypatch.setattr("graftlab.jobs.attached_rank.select", Mock(poll=Mock(return_value=poller)))
    with pytest.raises(SessionError, match="the session ended before all ranks had joined"):
        rank._await_request()
    # In milliseconds: it looks at its time limit twice a second.
    poller.poll.assert_called_once_with(500)
    rank._setup.missing.return_value = []
    assert rank._what_is_missing() == "some of the other ranks had not joined"


def test_a_rank_that_cannot_begin_closes_what_it_has_opened() -> None:
    setup, proxy = Mock(missing=Mock(return_value=["baseline[0]"])), Mock()
    rank = attached(_run=None, _setup=setup, _proxy=proxy)
    rank._client.remaining.return_value = 0.001
    with pytest.raises(SessionError):
        rank.begin()
    assert rank._connection.sent == [Hello(os.getpid())]
    assert rank._connection.channel.closed
    setup.abandon.assert_called_once_with()
    proxy.close.assert_called_once_with(when_done=True)


# ---- other worlds ----------------------------------------------------------------------------------------------------


def test_a_new_world_is_offered_only_while_it_is_wanted() -> None:
    rank, late, wanted = attached(), world(1), world(2)
    rank._setup = Mock(world=2)
    rank._on_world(late)
    late.close.assert_called_once_with()
    rank._grafter.offer.assert_not_called()
    rank._on_world(wanted)
    wanted.close.assert_not_called()
    offer = rank._grafter.offer.call_args.args[0]
    assert (offer.exchange, offer.run, offer.plan, offer.close) == (wanted.exchange, RUN, PLAN, wanted.close)
    before = rank._world
    rank._connection.generations = (1, 1)
    moved = RunInfo(4, 8, (0, 1, 2), (1, 2))
    offer.on_moved(moved)
    assert (rank._world, rank._run, rank._connection.generations) == (wanted, moved, (1, 2))
    before.close_connections.assert_called_once_with()
    assert rank._connection.sent == [WorldSwitch(2, 8)]
    # It is in that world already.
    offer.on_moved(moved)
    wanted.close_connections.assert_not_called()
    rank._over.set()
    rank._on_world(world(2))
    assert rank._grafter.offer.call_args.args[0] is None


def test_a_rank_sends_its_status_while_it_is_in_a_world_that_it_has_linked(monkeypatch: pytest.MonkeyPatch) -> None:
    beats, rank, linked = Mock(), attached(), world(2, Mock())
    monkeypatch.setattr("graftlab.jobs.attached_rank.Heartbeat", beats)
    rank._connection.send_status = Mock()
    rank._enter(linked, RUN)
    beats.return_value.start.assert_called_once_with()
    _, send, generation, is_over = beats.call_args.args
    rank._connection.generation = 3
    assert (send, generation(), is_over()) == (rank._connection.send_status, 3, False)
    rank._enter(world(3), RUN)
    assert is_over()
    # The session server reads that world's memory.
    assert beats.call_count == 1
    rank._enter(linked, RUN)
    rank._over.set()
    assert beats.call_args.args[3]()


def test_only_messages_on_the_newest_world_reach_its_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    made = Mock(world=2)
    setups = Mock(return_value=made)
    monkeypatch.setattr("graftlab.jobs.attached_rank.WorldSetup", setups)
    before = Mock()
    rank = attached(_setup=before)
    rank._set_up_world(WORLD_REQUEST)
    before.abandon.assert_called_once_with()
    # The world that was offered before is none that anybody enters.
    rank._grafter.offer.assert_called_once_with(None)
    context, message, report = setups.call_args.args
    assert (context.make_connector, context.fetch_share, message) == (None, rank._client.fetch_share, WORLD_REQUEST)
    assert report == rank._on_world
    for number in (1, 2):
        rank._set_up_world(WorldStart(number))
    made.finish.assert_called_once_with()
    contacts = Contacts(())
    rank._set_up_world(contacts)
    made.add_contacts.assert_called_once_with(contacts)


def test_a_world_that_cannot_be_set_up_ends_no_job() -> None:
    rank = attached()
    rank._fail = Mock()
    with pytest.warns(gl.GraftWarning, match=r"^target\[1\]: .* missing here: refused; the job continues"):
        rank._on_world(SessionError("refused"))
    assert "missing here: refused" in rank._connection.sent[0].text
    rank._fail.assert_not_called()
    rank._on_world(error := KeyError("a mistake in graftlab"))
    rank._fail.assert_called_once_with(error)


# ---- without a session -----------------------------------------------------------------------------------------------


def test_after_a_verdict_ranks_no_longer_keep_step() -> None:
    rank = attached()
    rank._on_fallback_plan(FallbackPlan(to_wire(PLAN), 5))
    assert (rank._grafter.keeps_step, rank._fallback_plan) == (True, PLAN)
    rank._grafter.forget_orders.assert_not_called()
    rank._on_fallback_plan(FallbackPlan(None, 6))
    assert (rank._grafter.keeps_step, rank._fallback_plan) == (False, None)
    rank._grafter.forget_orders.assert_called_once_with(6)


@pytest.mark.parametrize("without", ["keep", "nothing"])
def test_without_its_session_a_job_restores_the_users_plan_or_compares_nothing(without: str) -> None:
    users, setup = GraftPlan(b2t="layer == 3", version=2), Mock()
    rank = attached(_fallback_plan=users, _setup=setup)
    rank._config = GraftConfig(role="target", without_session=without, run_dir="/runs/one")
    rank._grafter.keeps_step = True
    rank._grafter.newest_plan = GraftPlan(t2b="True", compare="True", keep="True", version=4)
    rank._rejoin = Mock(side_effect=[False, SessionError("busy"), ConnectionRefusedError("gone"), True])
    rank._over = Mock(is_set=Mock(return_value=False), wait=Mock(return_value=False))
    rank._on_server_gone()
    plans = [each.args[0] for each in rank._grafter.offer_plan.call_args_list]
    assert (plans[0].b2t, plans[0].version) == ("layer == 3", 5)
    filters = [(plan.b2t, plan.t2b, plan.compare, plan.keep, plan.version) for plan in plans[1:]]
    assert filters == ([(None, None, None, None, 5)] if without == "nothing" else [])
    assert rank._grafter.keeps_step is False
    rank._grafter.forget_orders.assert_called_once_with(4)
    setup.abandon.assert_called_once_with()
    assert rank._connection.channel.closed
    # After a refusal, ten times as long.
    assert rank._over.wait.mock_calls == [call(0.5), call(0.5), call(5.0), call(0.5), call(5.0), call(0.5)]


def test_a_job_that_is_over_joins_no_other_session() -> None:
    rank = attached()
    rank._over.set()
    rank._on_server_gone()
    rank._grafter.offer_plan.assert_not_called()
    assert rank._connection.channel.closed


def test_a_job_that_joins_again_brings_its_next_step_and_its_lost_rows() -> None:
    rank, proxy = attached(_world=world(2, Mock())), Mock()
    rank._proxy, rank._open_control_thread = proxy, Mock()
    rank._client.rejoin.return_value = None
    assert not rank._rejoin()
    state, segment = rank._client.rejoin.call_args.args
    assert (state.run, from_wire(state.plan), state.lost_rows) == (RunInfo(3, 7, (0, 1, 2)), PLAN, 5)
    assert (state.linked, state.session, segment) == (True, "a", None)
    proxy.close.assert_called_once_with(when_done=True)
    assert rank._connection.lost_rows == 5
    joined = rank._client.rejoin.return_value = Mock(answer=Mock(session="b"))
    rank._world.connector.linked.side_effect = lambda number: LinkReport(number, (0,), ())
    assert rank._rejoin()
    rank._connection.reconnect.assert_called_once_with(joined.channel, joined.wake)
    assert (rank._connection.lost_rows, rank._proxy) == (0, joined.proxy)
    assert rank._connection.sent == [LinkReport(2, (0,), ()), Hello(os.getpid())]
    rank._open_control_thread.assert_called_once_with()
    rank._rejoin()
    assert rank._client.rejoin.call_args.args[0].session == "b"


# ---- the end ---------------------------------------------------------------------------------------------------------


def test_a_job_that_ends_reports_its_step_and_what_no_rank_received() -> None:
    rank = attached(place=Place("target", 0, 2, 1))
    rank._connection.taps = []
    with pytest.warns(gl.GraftWarning, match=r"^target\[0\]: no tap was reached here"):
        rank._end_run()
    assert rank._connection.sent == [RunDone(3, None, None), RunSettled(3, 7)]
    assert [each[0] for each in rank._grafter.mock_calls] == ["end_run", "exchange.settle", "close_run"]
    # One rank of a side is enough for the warning.
    rank = attached()
    rank._connection.taps = []
    rank._grafter.exchange.settle.return_value = False
    rank._end_run()
    assert [type(message) for message in rank._connection.sent] == [RunDone, Output, RunSettled]
    assert "after it had waited 3 s" in rank._connection.sent[1].text
    attached(_run=None, _grafter=None)._end_run()


def test_a_job_waits_for_the_others_until_its_timeout_without_a_thread() -> None:
    # Python 3.12.1 starts none while the interpreter ends.
    rank = attached()
    rank._end_run()
    rank._grafter.exchange.settle.assert_called_once_with(timeout=rank._config.timeout)


def test_leaving_closes_everything_once_whatever_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    deactivate = Mock()
    monkeypatch.setattr("graftlab.grafting.active.deactivate", deactivate)
    setup, proxy = Mock(), Mock()
    rank = attached(_setup=setup, _proxy=proxy)
    rank._grafter.end_run.side_effect = RuntimeError("a thread is in a tap")
    rank.leave()
    rank.leave()
    assert rank._connection.channel.closed
    for closed in (deactivate, setup.abandon, proxy.close, rank._world.close_connections, rank._grafter.end_run):
        closed.assert_called_once()


def test_a_mistake_of_graftlabs_ends_the_taps_and_not_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    deactivate = Mock()
    monkeypatch.setattr("graftlab.grafting.active.deactivate", deactivate)
    rank = attached()
    waited: list[Any] = []
    drain = SocketChannel.drain

    def noted(channel: SocketChannel, timeout: float) -> bool:
        waited.append((timeout, channel.closed, len(rank._connection.sent)))
        return drain(channel, timeout)

    monkeypatch.setattr(SocketChannel, "drain", noted)
    rank._grafter.end_run.side_effect = RuntimeError("again")
    with pytest.warns(gl.GraftWarning, match=r"failed on target\[1\] and stopped taking taps; .* continues \(oops\)"):
        rank._fail(ValueError("oops"))
    rank._fail(ValueError("once more"))
    assert [each.text for each in rank._connection.sent] == [
        "graftlab failed and stopped taking taps here: ValueError: oops\n"
    ]
    assert waited == [(1.0, False, 1)], "the session learns of it before the connection is closed"
    assert rank._connection.channel.closed
    rank._grafter.end_run.assert_called_once_with()
    deactivate.assert_called_once_with()
    # The script's end finds nothing left to do.
    rank.leave()
    deactivate.assert_called_once_with()


def test_a_job_on_another_machine_logs_into_its_own_folder(tmp_path: Path) -> None:
    rank = attached()
    rank._join.answer = SimpleNamespace(log="/session/logs/target-1.log", address="10.0.0.1")
    assert rank._own_log() == Path("/session/logs/target-1.log")
    rank._proxy = Mock()
    rank._config = GraftConfig(role="target", run_dir=str(tmp_path / "run"))
    assert rank._own_log() == tmp_path / "run" / "logs" / "target-1.log"
    assert stat.S_IMODE((tmp_path / "run" / "logs").stat().st_mode) == 0o700
    assert rank._own_log().parent.is_dir()
    # Or, without such a folder, beside its rendezvous.
    rank._config = GraftConfig(role="target", address=str(tmp_path / "rendezvous"))
    assert rank._own_log() == tmp_path / "rendezvous" / "logs" / "target-1.log"
    # Without an endpoint of its own, it is reached where the session is.
    assert rank._own_address() == "10.0.0.1"
    rank._config = GraftConfig(role="target", address="127.0.0.1:29400")
    assert rank._own_address() == "127.0.0.1"


# ---- in the run ------------------------------------------------------------------------------------------------------


def test_a_rank_in_its_run_follows_the_session_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its control thread takes the messages that came early, and answers and reports like any rank's."""
    rank, found, grafter = attached(_run=None), world(), Mock()
    parts = {name: Mock() for name in ("active", "log_to", "Finalize", "JobGrafter")}
    parts["JobGrafter"].return_value = grafter
    for name, part in parts.items():
        monkeypatch.setattr(f"graftlab.jobs.attached_rank.{name}", part)
    early = FallbackPlan(to_wire(PLAN), 4)
    rank._await_request = Mock(return_value=(RunRequest(RUN, to_wire(PLAN), JobCode()), found, [pack(early)]))
    rank._join.answer = SimpleNamespace(keep_budget=1 << 20, log="/session/logs/target-1.log", session="a")
    gone = threading.Event()
    rank._on_server_gone, rank._set_up_world = gone.set, Mock()
    rank._own_log = Mock(return_value=Path("/own/logs/target-1.log"))
    rank.begin()
    grafter.begin_run.assert_called_once_with(RUN, PLAN)
    assert (rank._world, rank._run, rank._fallback_plan, grafter.keeps_step) == (found, RUN, PLAN, True)
    assert grafter.on_failure == rank._fail
    assert parts["log_to"].call_args.args == (Path("/own/logs/target-1.log"),)
    here = parts["active"].activate.call_args.args[1]
    assert (here.side, here.rank, here.world_size) == ("target", 1, 2)
    parts["Finalize"].assert_called_once_with(rank, rank.leave, exitpriority=100)
    grafter.self_graft_result.return_value, grafter.line_traces.return_value = "a result", (["a trace"], "an obstacle")
    grafter.match_result.side_effect = lambda value: f"of {value}"
    orders = {
        "run_self_graft": RunSelfGraft(5, ("record",)),
        "record_step": RecordStep(5, ("x",), 1, 1),
        "trace_steps": TraceSteps(5, TraceRequest([], frozenset())),
    }
    questions = [*orders.values(), AskSelfGraft(), AskMatch("x"), AskLineTraces()]
    worlds = [WORLD_REQUEST, WorldStart(2), Contacts(())]
    for message in [*(Query(number, each) for number, each in enumerate(questions)), *worlds]:
        rank._connection.other.send(pack(message))
    rank._connection.other.close()
    assert gone.wait(DEADLINE)
    answers = [each.answer for each in rank._connection.sent if isinstance(each, Reply)]
    assert answers[:3] == [Acknowledgement()] * 3
    assert [shipping.unpack_result(each.packed) for each in answers[3:]] == ["a result", "of x", ["a trace"]]
    assert answers[5].obstacle == "an obstacle"
    for name, order in orders.items():
        getattr(grafter, name).assert_called_once_with(order)
    assert rank._set_up_world.mock_calls == [call(each) for each in worlds]
