"""A trace of code that a rank runs once: which operations it has of which tap, and what is left of it afterwards."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import torch
from kit.grafters import StandInGrafter, become_rank

import graftlab as gl
from graftlab.lines.operations import OperationRecorder, modes_in_force
from graftlab.lines.traces import OperationChanges, SliceTrace, TraceRequest, WantedCall
from graftlab.plan.plan import GraftPlan
from graftlab.ranks import line_tracer
from graftlab.ranks.line_tracer import TracedSteps, trace_callee


class Grafter(StandInGrafter):
    """Takes taps as they are, in a run whose present step is the first."""

    plan = GraftPlan()

    def __init__(self) -> None:
        super().__init__()
        self.next_step = 5
        self.taken: list[str] = []

    @property
    def moment(self) -> tuple[int, int]:
        return 0, self.next_step - 1

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        self.taken.append(name)
        return value


@pytest.fixture
def grafter(monkeypatch: pytest.MonkeyPatch) -> Grafter:
    monkeypatch.setattr("kit.grafters.StandInGrafter", Grafter)
    made: Any = become_rank(monkeypatch, "target")
    return made  # type: ignore[no-any-return]


@pytest.fixture
def recorders(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[OperationRecorder]]:
    """The recorders that were made, which these references do not keep."""
    made: list[weakref.ref[OperationRecorder]] = []

    class Noted(OperationRecorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(weakref.ref(self))

    monkeypatch.setattr(line_tracer, "OperationRecorder", Noted)
    return made


@pytest.fixture
def uncollected() -> Iterator[None]:
    gc.disable()
    yield
    gc.enable()


def traced(code: Callable[[], object], *wanted: WantedCall, **more: Any) -> list[SliceTrace | None]:
    return trace_callee(code, [TraceRequest(wanted, frozenset(), **more)])


def names(trace: SliceTrace | None) -> list[str]:
    return [] if trace is None else [each.name for each in trace.operations]


def sums() -> None:
    x = torch.arange(4.0)
    gl.tap("sum", (x + 1) * (x + 2))


@pytest.mark.usefixtures("grafter", "uncollected")
@pytest.mark.parametrize("changes", [OperationChanges(shown={1: "shown"}), OperationChanges(fed={1: (0, "fed")})])
def test_a_trace_is_released_without_the_garbage_collector(
    changes: OperationChanges, recorders: list[weakref.ref[OperationRecorder]]
) -> None:
    (trace,) = traced(sums, WantedCall("sum", {}, 0, 0, 1), changes=changes)
    assert trace is not None
    assert [each() for each in recorders] == [None]
    assert modes_in_force() == []


def test_a_value_that_several_operations_read_is_shown_once(grafter: Grafter) -> None:
    fed = OperationChanges(fed={1: (0, "fed"), 2: (0, "fed")})
    (trace,) = traced(sums, WantedCall("sum", {}, 0, 0, 1), changes=fed)
    assert names(trace) == ["arange", "add", "add", "mul"]
    assert grafter.taken == ["fed", "sum"]


@pytest.mark.parametrize("has_compiled", [False, True])
def test_a_trace_says_whether_this_process_has_compiled_code(
    has_compiled: bool, grafter: Grafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch._dynamo.utils as compiler

    monkeypatch.setitem(compiler.counters, "frames", Counter(ok=int(has_compiled)))
    found = traced(sums, WantedCall("sum", {}, 0, 0, 1), WantedCall("never", {}, 0, 0, 2))
    assert [each and each.was_compiled for each in found] == [has_compiled, None]


def test_nothing_is_recorded_after_the_step_of_the_last_wanted_call(
    grafter: Grafter, recorders: list[weakref.ref[OperationRecorder]]
) -> None:
    recorded: list[int] = []

    def steps() -> None:
        for _ in range(3):
            sums()
            recorder = recorders[0]()
            assert recorder is not None
            recorded.append(len(recorder.operations))
            gl.step()

    # The second call of the first step, which makes only one.
    (trace,) = traced(steps, WantedCall("sum", {}, 0, 1, 1))
    assert trace is None
    # A tap shows that a step has begun, so those before its first one are recorded.
    assert recorded == [4, 8, 8]


def test_calls_are_counted_in_each_step_from_the_first(grafter: Grafter) -> None:
    def steps() -> None:
        for number in range(3):
            x = torch.full((4,), float(number))
            for power in range(number + 1):
                gl.tap("power", x**power)
            gl.step()

    wanted = [WantedCall("power", {}, step, occurrence, 1) for step, occurrence in ((0, 0), (1, 1), (2, 1), (2, 3))]
    found = traced(steps, *wanted)
    assert [each and each.operations[-1].call for each in found] == [
        "pow(f32[4], 0)",
        "pow(f32[4], 1)",
        "pow(f32[4], 1)",
        None,
    ]


@pytest.mark.parametrize("kind", [None, "grad"])
def test_lines_of_a_backward_pass_are_kept_only_if_a_gradient_is_wanted(kind: str | None, grafter: Grafter) -> None:
    wanted = WantedCall("sum", {} if kind is None else {"kind": kind}, 0, 0, 1)
    seen: list[bool] = []
    traced(lambda: seen.append(torch.is_anomaly_enabled()), wanted)
    steps = TracedSteps(TraceRequest([wanted], frozenset()), 1, "target", grafter, grafter)  # type: ignore[arg-type]
    steps.handler_at(1)
    seen += [torch.is_anomaly_enabled()]
    steps.end()
    assert seen == [kind == "grad"] * 2
    assert not torch.is_anomaly_enabled()


def test_a_tap_is_wanted_by_the_name_and_the_tags_of_its_pair(
    grafter: Grafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [("first[layer=1]", "second[index=2]")]
    monkeypatch.setattr(Grafter, "plan", GraftPlan(pairs=pairs))

    def code() -> None:
        gl.tap("second", torch.ones(2) * 3, index=2)

    found = traced(code, WantedCall("first", {"layer": 1}, 0, 0, 1), WantedCall("first", {"index": 2}, 0, 0, 1))
    assert [names(each) for each in found] == [["ones", "mul"], []]


def test_taps_of_earlier_steps_bring_no_wanted_call_nearer(
    grafter: Grafter, recorders: list[weakref.ref[OperationRecorder]]
) -> None:
    near: list[list[bool]] = []

    def steps() -> None:
        for _ in range(2):
            near.append([])
            for number in range(60):
                gl.tap(f"h.{number}", torch.ones(2))
                recorder = recorders[0]()
                assert recorder is not None
                near[-1].append(recorder.is_near)
            gl.step()

    traced(steps, WantedCall("h.59", {}, 1, 0, 60))
    assert near[0] == [False] * 60
    first = near[1].index(True)
    # The order of the wanted call is approximate.
    assert 0 < first < 50
    assert near[1] == [*[False] * first, *[True] * (60 - first)]
