"""What a session server answers to the processes that join it, and what it keeps of them; in one process."""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.deadline import DEADLINE
from kit.processes import descriptors

from graftlab.base.world import Place, RunInfo
from graftlab.config import Endpoint, GraftConfig
from graftlab.errors import LaunchError
from graftlab.exchange.keys import new_token
from graftlab.jobs import session_server
from graftlab.jobs.handshake import (
    JoinRequest,
    RejoinState,
    RequestRefused,
    WorldShareRequest,
    receive_handshake,
    send_handshake,
)
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.jobs.session_client import JoinResult, SessionClient
from graftlab.jobs.session_server import SessionServer, open_session_server
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire, to_wire
from graftlab.ranks.descriptors import send_descriptors
from graftlab.ranks.messages import AskWaitReason, Hello, PlanUpdate, WaitReason, pack, unpack_to_rank
from graftlab.ranks.options import LaunchOptions
from graftlab.session import Session

OPTIONS = LaunchOptions(1, 2, buffer_budget=1 << 20, keep_budget=1 << 21, tap_timeout=7.0)
TOKEN = new_token()


def opened(folder: Path, plan: GraftPlan | None = None, **more: Any) -> tuple[Session, SessionServer]:
    return open_session_server(Session, OPTIONS, plan or GraftPlan(), folder, Rendezvous(folder), **more)


@pytest.fixture
def far(tmp_path: Path) -> Iterator[tuple[Session, SessionServer]]:
    """A session that jobs of other machines can join."""
    session, server = opened(tmp_path, listen_at=(Endpoint("127.0.0.1", 0), TOKEN))
    with session:
        yield session, server


def joins(side: str, rank: int, pid: int = 4321, **more: Any) -> Any:
    sizes = (1, 2) if side == "baseline" else (2, 1)
    return JoinRequest(side, rank, *sizes, pid, "cpu", "gloo", more.pop("plan", None), more.pop("rejoin", None), **more)  # type: ignore[arg-type]


def resumes(plan: GraftPlan, generations: tuple[int, int] = (1, 1), **more: Any) -> RejoinState:
    """The state of a rank in run 7 of another session."""
    return RejoinState(RunInfo(7, 30, (0, 1, 2), generations), to_wire(plan), lost_rows=0, session="earlier", **more)


def client(address: object, token: str | None = None, rank: int = 1) -> SessionClient:
    sizes = {"baseline_world_size": 1, "target_world_size": 2}
    config = GraftConfig(role="target", address=str(address), token=token, timeout=DEADLINE, **sizes)  # type: ignore[arg-type]
    return SessionClient(Place("target", rank, 2, 1), config)


def heard(joined: JoinResult, kind: type) -> Any:
    """The next message of this kind at a job's end of its connection."""
    poller = select.poll()
    poller.register(joined.channel.fileno(), select.POLLIN)
    while poller.poll(DEADLINE * 1000):
        for frame in joined.channel.receive():
            if isinstance(found := unpack_to_rank(frame), kind):
                return found
        assert not joined.channel.closed
    raise AssertionError(f"no {kind.__name__} came")


def leave(joined: JoinResult) -> None:
    joined.channel.close()
    joined.wake.close()
    if joined.proxy is not None:
        joined.proxy.close()


def test_the_invitation_names_the_tokens_file_once_and_its_text(far: tuple[Session, SessionServer]) -> None:
    session, server = far
    (address,) = {server.environment(side)["GRAFTLAB_ADDRESS"] for side in ("baseline", "target")}
    token_file = session.folder / ".rendezvous" / "token"
    assert server.environment("target") == {
        "GRAFTLAB_ENABLE": "1",
        "GRAFTLAB_ROLE": "target",
        "GRAFTLAB_ADDRESS": address,
        "GRAFTLAB_BASELINE_WORLD_SIZE": "1",
        "GRAFTLAB_TARGET_WORLD_SIZE": "2",
        "GRAFTLAB_TOKEN_FILE": str(token_file),
    }
    sizes = "GRAFTLAB_BASELINE_WORLD_SIZE=1 GRAFTLAB_TARGET_WORLD_SIZE=2"
    assert server.invitation.splitlines() == [
        f"  baseline: GRAFTLAB_ENABLE=1 GRAFTLAB_ROLE=baseline GRAFTLAB_ADDRESS={address} {sizes}",
        f"  target: GRAFTLAB_ENABLE=1 GRAFTLAB_ROLE=target GRAFTLAB_ADDRESS={address} {sizes}",
        f"and this token in GRAFTLAB_TOKEN, or in a file of mode 0600 that GRAFTLAB_TOKEN_FILE names ({token_file} is "
        f"one):",
        f"  {TOKEN}",
    ]


def test_a_job_gets_the_sessions_limits_and_over_tcp_no_token(far: tuple[Session, SessionServer]) -> None:
    session, server = far
    port = server.environment("target")["GRAFTLAB_ADDRESS"]
    for rank, address, token in ((0, session.folder, TOKEN), (1, port, "")):
        joined = client(address, TOKEN, rank).join()
        answer = joined.answer
        limits = (answer.tap_timeout, answer.buffer_budget, answer.keep_budget)
        assert limits == (OPTIONS.tap_limit, OPTIONS.buffer_budget, OPTIONS.keep_budget)
        assert (answer.folder, Path(answer.log).name) == (str(session.folder), f"target-{rank}.log")
        # Its process may be on this machine, and its peers on others.
        assert (answer.address, answer.token, joined.token) == ("127.0.0.1", token, TOKEN)
        leave(joined)


def test_a_job_that_returns_over_tcp_gets_the_plan_in_force(far: tuple[Session, SessionServer]) -> None:
    session, server = far
    mine = session.edit(b2t="layer == 9")
    job = client(server.environment("target")["GRAFTLAB_ADDRESS"], TOKEN)
    leave(job.join())
    assert server.over.wait(DEADLINE)
    joined = job.rejoin(resumes(GraftPlan(b2t="layer == 4", version=5), linked=True), None)
    assert joined is not None
    plan = from_wire(heard(joined, PlanUpdate).plan)
    # Published before any job came, so it holds for jobs of an earlier session, too.
    assert (plan.b2t, plan.version) == (mine.b2t, 6)
    assert (session.plan.b2t, session.plan.version) == (mine.b2t, 6)
    leave(joined)


def test_a_process_that_replaces_another_is_heard(tmp_path: Path) -> None:
    session, server = opened(tmp_path)
    with session:
        job = client(tmp_path)
        # One that was in its run, and is gone.
        before = job.rejoin(resumes(GraftPlan(), linked=True), None)
        assert before is not None
        leave(before)
        assert server.over.wait(DEADLINE)
        again = job.join()
        again.channel.send(pack(Hello(os.getpid())))
        again.channel.send(pack(AskWaitReason()))
        assert heard(again, WaitReason).what == "baseline[0], target[0] had not joined"
        [rank] = session.select("target[1]")
        assert rank.alive
        leave(again)


def test_ranks_of_an_earlier_session_keep_their_links_and_generations(tmp_path: Path) -> None:
    session, server = opened(tmp_path)
    with session:
        for side, rank, linked in (("baseline", 0, False), ("target", 1, True)):
            state = resumes(GraftPlan(), (1, 3), linked=linked)
            found, _ = server._admit(joins(side, rank, rejoin=state), None)
            expected = ("", 3) if linked else ("shared memory", 1)
            assert (found.links, found.generation) == expected
            found.close_rank_ends()


def test_a_plan_on_which_jobs_agreed_stays_once_it_was_edited(tmp_path: Path) -> None:
    agreed = GraftPlan(b2t="layer == 3")
    session, server = opened(tmp_path, agreed, agreed=True)
    path = "graftlab.transforms.default_transform"
    with session:
        first, _ = server._admit(joins("baseline", 0, plan=to_wire(agreed)), None)
        assert session.plan.transform is None
        second, _ = server._admit(joins("target", 0, plan=to_wire(agreed.edit(transform=path))), None)
        assert [each.text for each in session.plan.transforms] == [path]
        edited = session.edit(transform=None)
        third, _ = server._admit(joins("target", 1, plan=to_wire(agreed.edit(transform=path))), None)
        assert session.plan is edited
        for rank in (first, second, third):
            rank.close_rank_ends()


def test_a_waiting_rank_reads_of_a_refusal_until_that_rank_has_joined(tmp_path: Path) -> None:
    session, server = opened(tmp_path)
    said: list[str] = []
    waits: Any = SimpleNamespace(channel=SimpleNamespace(send=lambda frame: said.append(unpack_to_rank(frame).what)))
    wrong = JoinRequest("target", 1, 3, 1, 4321, "cpu", "gloo", None, None)
    with session:
        assert server._refusal(wrong) is not None
        for side, rank in (("target", 0), ("target", 1)):
            found, _ = server._admit(joins(side, rank), None)
            server._on_ask_missing(waits)
            found.close_rank_ends()
    assert ["was refused" in each for each in said] == [True, False]


def test_a_request_that_is_refused_leaves_no_memory_open(tmp_path: Path) -> None:
    session, server = opened(tmp_path)
    wrong = JoinRequest("target", 1, 3, 1, 4321, "cpu", "gloo", None, resumes(GraftPlan()))

    def asked() -> Any:
        ours, theirs = socket.socketpair()
        with ours, theirs:
            send_handshake(theirs, wrong)
            segment = os.memfd_create("of-a-refused-rank")
            send_descriptors(theirs, [segment])
            os.close(segment)
            server._accept(ours)
            ours.close()
            return receive_handshake(theirs)

    with session:
        refused = asked()
        assert isinstance(refused, RequestRefused)
        assert "target_world_size is 3" in refused.error
    # A session that has closed leaves the process to the next one.
    assert asked() is None
    assert not [link for _, link in descriptors() if "of-a-refused-rank" in link]
    assert not (tmp_path / ".rendezvous" / "socket").exists()


def test_a_session_without_its_port_is_not_opened_and_leaves_nothing(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, Rendezvous(tmp_path) as place:
        where = Endpoint("127.0.0.1", taken.getsockname()[1])
        before = descriptors()
        with pytest.raises(LaunchError, match="; give an address of this machine and a free port") as failed:
            open_session_server(Session, OPTIONS, GraftPlan(), tmp_path, place, listen_at=(where, TOKEN))
        assert failed.value.__traceback__ is not None
        assert descriptors() <= before


def test_a_session_of_jobs_keeps_as_many_rows_as_its_options_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def note(folder: Path, **more: Any) -> Any:
        raise OSError(f"{folder}: {more}")

    monkeypatch.setattr(session_server, "RowStore", note)
    options = replace(OPTIONS, keep_rows=5)
    with Rendezvous(tmp_path) as place, pytest.raises(LaunchError, match=r"{'append': True, 'keep_rows': 5}"):
        open_session_server(Session, options, GraftPlan(), tmp_path, place, append=True)


def test_a_share_of_a_world_is_for_the_ranks_own_process(tmp_path: Path) -> None:
    session, server = opened(tmp_path)
    with session:
        rank, _ = server._admit(joins("target", 1), None)
        for pid, why in (
            (4322, "target[1] is pid 4321, not 4322"),
            (4321, "this world has started without this process, or was abandoned because a rank is gone"),
        ):
            ours, theirs = socket.socketpair()
            with ours, theirs:
                send_handshake(theirs, WorldShareRequest(1, "target", 1, 2, 1, pid))
                server._accept(ours)
                assert receive_handshake(theirs) == RequestRefused(why, settings=False)
        rank.close_rank_ends()
