"""Which calls and updates of a script are held, with what they are counted, and how a script becomes a rank."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch
from torch import nn

from graftlab.base.world import Place
from graftlab.errors import ConfigError
from graftlab.jobs import handshake, held_script, script_rank
from graftlab.jobs.handshake import HoldAccepted, RequestRefused, StatusQuery
from graftlab.jobs.held_script import HeldScript
from graftlab.jobs.script_launcher import ScriptRankHandle
from graftlab.jobs.script_rank import ScriptRank, _claim_rank, forget_claims
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks import holding
from graftlab.ranks.held_call import HeldCall, WatchChoice
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.holding import ScriptEnd


class Rank:
    """Takes what a script's process holds, from the ``first`` unit on."""

    def __init__(self, first: tuple[str, int] | None = None) -> None:
        self.choice = WatchChoice()
        self.updates: list[UpdateDescription] = []
        self.calls: list[HeldCall] = []
        self._first = first

    def waits_in(self, kind: str, number: int) -> bool:
        if self._first not in (None, (kind, number)):
            return False
        self._first = None
        return True

    def hold(self, unit: HeldCall | HeldUpdate) -> None:
        if isinstance(unit, HeldUpdate):
            self.updates.append(unit.describe())
        else:
            self.calls.append(unit)
        unit.end()


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> Rank:
    made = Rank()
    monkeypatch.setattr(held_script, "become_rank", lambda *where: made)
    return made


@pytest.fixture
def script(tmp_path: Path) -> Iterator[HeldScript]:
    made = HeldScript(tmp_path, "target", None)
    yield made
    made.remove()


def test_each_update_is_held_with_the_calls_and_gradients_since_the_last_one(rank: Rank, script: HeldScript) -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    script.begin(model, (x,), {}).sum().backward()
    model(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    model(x).sum().backward()
    optimizer.step()
    with torch.no_grad():
        model(x)
    assert [(each.number, each.calls) for each in rank.updates] == [(1, 2), (2, 1)]
    first, second = rank.updates
    assert first.gradients["bias"].values.item() == first.accumulated["bias"].values.item() == 2.0
    assert list(first.of_results) == ["call 1", "call 2"]
    assert second.gradients["bias"].values.item() == 1.0
    assert second.previous["bias"].values.item() == 2.0
    assert list(second.of_results) == ["call 1"]
    assert [call.unit for call in rank.calls] == [("call", n) for n in (1, 2, 3, 4)]
    script.remove()
    model(x).sum().backward()
    optimizer.step()
    assert (len(rank.updates), len(rank.calls)) == (2, 4)


def test_other_models_are_counted_and_noted_once_until_a_call_is_held(rank: Rank, tmp_path: Path) -> None:
    made = HeldScript(tmp_path, "target", "Sequential")
    other, third = nn.Linear(1, 1), nn.Linear(1, 1)
    for model in (other, other, third):
        made._before(model, (), {})
    noted = held_script.other_models(tmp_path, "target")
    assert noted.read_text() == "Linear\nLinear[1]\n"
    assert rank.calls == []
    made._before(nn.Sequential(nn.Linear(1, 1)), (torch.ones(1),), {})
    # Once a model was held, the others are not noted.
    made._before(nn.LayerNorm(1), (), {})
    assert noted.read_text() == "Linear\nLinear[1]\n"
    (held,) = rank.calls
    assert held.describe_result().model == "Sequential"
    assert held.describe_result().raises is None
    assert held._others == {"Linear": 2, "Linear[1]": 1}
    # The comparison may be over, and its folder deleted.
    HeldScript(tmp_path / "gone", "target", "Net")._before(other, (), {})


def test_an_update_that_is_passed_still_begins_the_next_step(rank: Rank, script: HeldScript) -> None:
    rank._first = ("update", 2)
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    script.begin(model, (x,), {}).sum().backward()
    optimizer.step()
    model(x).sum().backward()
    optimizer.step()
    assert [(each.number, each.calls) for each in rank.updates] == [(2, 1)]
    assert rank.calls == []


def test_the_optimizers_inside_of_one_are_part_of_its_step(rank: Rank, script: HeldScript) -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    inner = torch.optim.SGD(model.parameters(), 0.1)

    class Outer(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            inner.step()

    outer = Outer(model.parameters(), 0.1)
    script.begin(model, (x,), {}).sum().backward()
    outer.step()
    outer.step()
    assert [each.optimizer for each in rank.updates] == ["Outer", "Outer"]


def test_a_step_that_raised_is_over_with_the_next_call(rank: Rank, script: HeldScript) -> None:
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    script.begin(model, (x,), {}).sum().backward()
    script._updating = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    assert rank.updates == []
    model(x)
    optimizer.step()
    assert len(rank.updates) == 1


def test_a_process_that_is_no_rank_holds_nothing_and_leaves_a_mark(
    tmp_path: Path, script: HeldScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(held_script, "become_rank", lambda *where: None)
    model, x = nn.Linear(2, 1), torch.ones(1, 2)
    script.begin(model, (x,), {})
    assert held_script.uncompared_calls(tmp_path, "target").exists()
    asked: list[int] = []
    monkeypatch.setattr(held_script, "become_rank", lambda *where: asked.append(1))
    model(x)
    assert asked == []


@pytest.mark.parametrize("worker", [True, False])
def test_forks_and_workers_of_data_loaders_are_no_ranks(
    worker: bool, rank: Rank, tmp_path: Path, script: HeldScript, monkeypatch: pytest.MonkeyPatch
) -> None:
    if worker:
        monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: object())
    else:
        monkeypatch.setattr(script, "_process", os.getpid() + 1)
    script.begin(nn.Linear(2, 1), (torch.ones(1, 2),), {})
    assert rank.calls == []
    assert held_script.uncompared_calls(tmp_path, "target").exists()


def test_only_the_first_process_of_a_rank_becomes_it_until_claims_are_forgotten(tmp_path: Path) -> None:
    assert _claim_rank(tmp_path, "target", 0)
    assert not _claim_rank(tmp_path, "target", 0)
    assert _claim_rank(tmp_path, "target", 1)
    assert _claim_rank(tmp_path, "baseline", 0)
    assert not _claim_rank(tmp_path / "gone", "target", 0)
    forget_claims(tmp_path)
    assert _claim_rank(tmp_path, "target", 0)


# ---- the rank of a script --------------------------------------------------------------------------------------------


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is done to the held call, which is the third of its process."""
    done: list[str] = []
    unit: Any = SimpleNamespace(unit=("call", 3), end=lambda: done.append("released"))
    monkeypatch.setattr(holding, "_held_here", lambda: unit)
    monkeypatch.setattr(holding, "_held", unit)
    return done


def of_script(**fields: Any) -> Any:
    made = ScriptRank.__new__(ScriptRank)
    made.__dict__.update(fields)
    return made


def test_a_script_continues_to_the_chosen_unit_and_waits_there(held: list[str]) -> None:
    rank = of_script()
    assert rank.waits_in("call", 1)
    rank.skip_to("call", 3)
    assert held == []
    rank.skip_to("update", 2)
    assert held == ["released"]
    assert [rank.waits_in(*unit) for unit in (("call", 4), ("update", 1), ("update", 2), ("call", 5))] == [
        *(False, False, True, True),
    ]


def test_a_script_that_is_left_outlives_the_notebook(held: list[str]) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        fcntl.fcntl(ours, fcntl.F_SETFL, fcntl.fcntl(ours, fcntl.F_GETFL) | os.O_ASYNC)
        rank = of_script(_hold_nothing=lambda: held.append("holds nothing"), _death_pipe=ours.fileno())
        rank.leave()
        assert not fcntl.fcntl(ours, fcntl.F_GETFL) & os.O_ASYNC
    assert held == ["holds nothing", "released"]
    assert rank._is_over


def test_the_scripts_own_handler_of_interrupts_is_back_after_a_held_call() -> None:
    before = signal.getsignal(signal.SIGINT)
    rank = of_script()
    rank.on_interrupt = lambda *_: None

    def fail() -> None:
        with rank._interruptible():
            assert signal.getsignal(signal.SIGINT) is rank.on_interrupt
            assert rank._takes_interrupts
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert signal.getsignal(signal.SIGINT) is before
    assert not rank._takes_interrupts
    seen: list[bool] = []

    def on_another_thread() -> None:
        with rank._interruptible():
            seen.append(rank._takes_interrupts)

    thread = threading.Thread(target=on_another_thread)
    thread.start()
    thread.join()
    assert seen == [False]


def test_a_script_that_has_ended_answers_one_request_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    drained: list[float] = []
    rank = of_script(
        _runs=4,
        _control=SimpleNamespace(stopping=False),
        _line=SimpleNamespace(channel=SimpleNamespace(drain=drained.append)),
    )
    handled: list[Any] = []

    def handle_next() -> None:
        handled.append(holding.held_unit())
        rank._runs += len(handled) == 2

    rank.handle_next = handle_next
    monkeypatch.setattr(holding, "_held", None)
    monkeypatch.setattr(script_rank.sys, "last_value", ValueError("no"), raising=False)
    rank._report_end(os.getpid() + 1)
    assert handled == []
    rank._report_end(os.getpid())
    assert handled == [ScriptEnd("ValueError: no")] * 2
    assert drained == [5.0]
    rank._report_end(os.getpid())
    assert len(handled) == 2
    # Without an error it has none.
    rank._is_over = False
    handled.clear()
    monkeypatch.delattr(script_rank.sys, "last_value")
    rank._report_end(os.getpid())
    assert handled == [ScriptEnd(None)] * 2


# ---- joining ---------------------------------------------------------------------------------------------------------


class Answering:
    """The process that compares, which answers one request."""

    def __init__(self, patch: pytest.MonkeyPatch, answer: Any) -> None:
        self.requests: list[Any] = []
        self.dies_with: list[int] = []
        self.made: list[tuple[Any, ...]] = []
        self.line, self.wake = socket.socketpair()
        connection: Any = MagicMock()
        place: Any = MagicMock()
        place.__enter__.return_value.connect.return_value = None if answer is None else connection
        patch.setattr(script_rank, "Rendezvous", lambda folder: place)
        patch.setattr(handshake, "send_handshake", lambda connection, request: self.requests.append(request))
        patch.setattr(handshake, "receive_handshake", lambda connection: answer)
        ends = [os.dup(self.line.fileno()), os.dup(self.wake.fileno())]
        patch.setattr(script_rank, "receive_descriptors", lambda connection, count: [3, 4, *ends, 99])
        patch.setattr(script_rank, "die_with_notebook", self.dies_with.append)
        patch.setattr(
            script_rank, "make_exchange", lambda _, shared, size, **given: (("exchange", shared, given), "own")
        )
        patch.setattr(script_rank, "ScriptRank", lambda *given: self.made.append(given) or SimpleNamespace())
        patch.setattr(script_rank, "own_rank", lambda: (1, 2, 0))


def test_a_process_becomes_the_rank_that_the_comparison_expects_and_ends_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = GraftPlan().edit(b2t="layer == 1")
    accepted = HoldAccepted(3, 4096, 5, 7.0, 1 << 20, 1 << 19, to_wire(plan), "name == 'x'", ("softmax",), "h")
    comparison = Answering(monkeypatch, accepted)
    joined: Any = script_rank._join(tmp_path, "target", print)
    (request,) = comparison.requests
    assert (request.side, request.rank, request.world_size, request.pid) == ("target", 1, 2, os.getpid())
    assert comparison.dies_with == [99]
    ((hold_nothing, death_pipe, place, _, own_plan, exchange, own, *_),) = comparison.made
    assert (hold_nothing, death_pipe, own) == (print, 99, "own")
    assert place == Place("target", 1, 2, 3)
    assert own_plan.b2t == "layer == 1"
    assert exchange == ("exchange", [3, 4], {"budget": 1 << 20, "timeout": 7.0})
    assert joined.choice == WatchChoice("name == 'x'", ("softmax",), "h")


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (None, "the comparison in .* is over"),
        (RequestRefused("two ranks were expected", settings=True), "two ranks were expected"),
        (StatusQuery(stacks=False), "the other end answered StatusQuery"),
    ],
)
def test_a_process_that_is_not_admitted_raises_the_reason(
    answer: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    comparison = Answering(monkeypatch, answer)
    with pytest.raises(ConfigError, match=said):
        script_rank._join(tmp_path, "target", print)
    assert comparison.made == []


def test_a_handle_of_a_scripts_rank_has_the_devices_of_its_request() -> None:
    request = handshake.HoldRequest("target", 0, 1, os.getpid(), "cuda:1", "nccl")
    ends = [socket.socket() for _ in range(3)]
    segment = os.memfd_create("status")
    os.truncate(segment, 1 << 16)
    try:
        handle = ScriptRankHandle(Place("target", 0, 1, 1), request, MagicMock(), *ends, segment)
        assert (handle.assignment.device, handle.assignment.backend, handle.pid) == ("cuda:1", "nccl", os.getpid())
    finally:
        os.close(segment)
        for end in ends:
            end.close()


def test_a_module_of_a_model_called_before_is_a_part_of_it(rank: Rank, script: HeldScript) -> None:
    model, other, x = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2), torch.ones(1, 2)
    with torch.no_grad():
        for each in (model[1], model, model[0], other, model[1]):
            script.begin(each, (x,), {}) if each is model[1] and not rank.calls else each(x)
    # A repetition would be held, too.
    script.remove()
    assert [each.describe().part_of for each in rank.calls] == ["", "", "Sequential", "", "Sequential"]
    assert rank.calls[2].describe_result().part_of == "Sequential"


def test_a_comparison_that_does_not_answer_is_waited_for_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    connection = MagicMock()
    connection.settimeout = limits.append
    place = SimpleNamespace(connect=lambda timeout: limits.append(timeout) or connection)
    monkeypatch.setattr(script_rank, "Rendezvous", lambda folder: nullcontext(place))

    def ask(*given: object) -> None:
        assert limits == [script_rank._ANSWER_LIMIT] * 2
        raise TimeoutError

    monkeypatch.setattr(script_rank, "ask", ask)
    with pytest.raises(TimeoutError):
        script_rank._join(Path("a comparison"), "target", lambda: None)
