"""A trace in a job's own loop: of whole steps, without harm to the job."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from graftlab.base.tags import identity
from graftlab.lines import operations
from graftlab.lines.operations import modes_in_force
from graftlab.lines.traces import SliceTrace, TraceRequest, WantedCall
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.line_tracer import TracedSteps
from graftlab.taps.calls import TapHandler


class Grafter:
    """Takes taps as they are."""

    plan = GraftPlan()

    def __init__(self) -> None:
        self.moment: tuple[int, int] | None = (0, 0)
        self.taken: list[str] = []

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        self.taken.append(name)
        return value


@dataclass
class Job:
    """A loop whose steps tap the double of their number."""

    grafter: Grafter = field(default_factory=Grafter)
    number: int = 0
    steps: int = 1

    def __post_init__(self) -> None:
        wanted = [WantedCall("doubled", {}, step, 0, 1) for step in range(self.steps)]
        self.traced = TracedSteps(TraceRequest(wanted, frozenset()), self.steps, "target", self.grafter, self.grafter)

    def step(self, compute: Callable[[torch.Tensor], torch.Tensor] = lambda x: x * 2) -> torch.Tensor:
        """Begin a step as ``gl.step()`` does, and compute in it."""
        self.number += 1
        self.grafter.moment = (0, self.number)
        handler: TapHandler = self.traced.handler_at(self.number)
        doubled: torch.Tensor = handler.tap("doubled", compute(torch.arange(4.0) + self.number), None, {})
        return doubled

    def found(self) -> list[SliceTrace | None] | None:
        return self.traced.traces


def test_the_first_step_is_traced_and_nothing_is_left_in_the_loop_afterwards() -> None:
    job = Job()
    assert torch.equal(job.step(), (torch.arange(4.0) + 1) * 2)
    assert job.found() is None
    assert torch.equal(job.step(), (torch.arange(4.0) + 2) * 2)
    [trace] = job.found() or []
    assert trace is not None
    assert [each.name for each in trace.operations] == ["arange", "add", "mul"]
    assert trace.operations[1].frames[0].source.startswith("doubled: torch.Tensor = handler.tap(")
    assert modes_in_force() == []
    assert job.traced.is_left
    assert job.grafter.taken == ["doubled", "doubled"]


def test_tensors_have_whole_fingerprints_in_the_taps_before_a_wanted_call() -> None:
    grafter = Grafter()
    traced = TracedSteps(TraceRequest([WantedCall("late", {}, 0, 0, 60)], frozenset()), 1, "target", grafter, grafter)
    grafter.moment = (0, 1)
    handler, near = traced.handler_at(1), []
    for name in (*(f"h.{number}" for number in range(60)), "late", "after"):
        handler.tap(name, torch.ones(2), None, {})
        assert traced._tracer is not None
        near.append(traced._tracer.recorder.is_near)
    traced.end()
    first = near.index(True)
    # The order of the wanted call is approximate.
    assert 0 < first < 50
    assert near == [*[False] * first, *[True] * (61 - first), False]


def test_a_trace_of_several_steps_has_the_wanted_call_of_each() -> None:
    job = Job(steps=3)
    # The first of them is a multiple of their number.
    for number in range(1, 7):
        job.step()
        assert (job.found() is None) == (number < 6)
    found = [[operation.name for operation in each.operations] for each in job.found() or [] if each is not None]
    assert found == [["arange", "add", "mul"]] * 3


def test_a_wanted_tap_of_no_tensor_has_no_trace() -> None:
    job = Job()
    assert job.step(lambda x: 3) == 3  # type: ignore[arg-type,return-value,comparison-overlap]
    job.step()
    assert job.found() == [None]
    assert job.grafter.taken == ["doubled", "doubled"]


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """The job's own mode, which counts its operations."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls[func._schema.name] += 1
        return func(*args, **(kwargs or {}))


def test_a_loop_inside_a_mode_of_the_job_is_not_traced_and_the_reason_is_given() -> None:
    job, mode = Job(), Counting()
    with mode:
        job.step()
        job.step()
        assert modes_in_force() == [mode]
    assert job.found() == [None]
    assert job.traced.obstacle.startswith("gl.step() is called inside Counting, ")
    assert mode.calls["aten::mul"] == 2


def test_a_mode_that_the_job_enters_meanwhile_is_left_in_its_own_order() -> None:
    job, mode = Job(), Counting()
    job.step()
    with mode:
        # The step ends inside the job's mode.
        job.step()
        assert job.found() is not None
        assert not job.traced.is_left
    job.step()
    assert job.traced.is_left
    assert modes_in_force() == []


def test_a_failure_of_the_trace_does_not_reach_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*args: object) -> None:
        raise RuntimeError("no words")

    job = Job()
    monkeypatch.setattr(operations, "in_words", fails)
    assert torch.equal(job.step(), (torch.arange(4.0) + 1) * 2)
    job.step()
    assert job.found() == [None]
    assert job.traced.obstacle == "the trace failed with RuntimeError: no words"
    assert modes_in_force() == []


def test_an_exception_of_the_jobs_own_reaches_the_job() -> None:
    job = Job()
    with pytest.raises(RuntimeError, match="size"):
        job.step(lambda x: x + torch.ones(3))
    job.step()
    # It was caught by the job, and the step's tap not reached.
    assert (job.found(), job.traced.obstacle) == ([None], "")


def test_compiled_code_is_left_compiled_and_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch._dynamo.utils as compiler

    monkeypatch.setitem(compiler.counters, "frames", Counter(ok=1))
    job = Job()
    job.step()
    job.step()
    assert job.found() == [None]
    assert "code that torch.compile has compiled" in job.traced.obstacle


def test_taps_of_other_threads_pass_through_untraced() -> None:
    job = Job()
    handler = job.traced.handler_at(1)
    thread = threading.Thread(target=handler.tap, args=("doubled", torch.ones(4), None, {}))
    thread.start()
    thread.join()
    assert modes_in_force() != []
    job.traced.end()
    assert modes_in_force() == []
    assert (job.found(), job.grafter.taken) == ([None], ["doubled"])


def with_inner_tap(*, grafted: bool, replace: bool = False, **tags: Any) -> tuple[SliceTrace | None, bool]:
    """The trace of a step that also taps a product before its sum, and whether that tap returns what it is given."""
    inner = identity({"name": "inner", "recompute_status": "original", **tags}), 0, 0
    request = TraceRequest([WantedCall("doubled", {}, 0, 0, 2)], frozenset({inner} if grafted else ()))
    grafter = Grafter()
    traced = TracedSteps(request, 1, "target", grafter, grafter)
    grafter.moment = (0, 1)
    handler = traced.handler_at(1)
    product = torch.arange(4.0) * 2
    shown: torch.Tensor = handler.tap("inner", product, None, tags, replace)
    assert torch.equal(shown, product)
    handler.tap("doubled", shown + 1, None, {})
    grafter.moment = (0, 2)
    traced.handler_at(2)
    [trace] = traced.traces or []
    return trace, shown is product


@pytest.mark.parametrize("grafted", [False, True])
def test_only_a_grafted_call_cuts_off_the_operations_before_it(grafted: bool) -> None:
    trace, _ = with_inner_tap(grafted=grafted)
    assert trace is not None
    assert [each.name for each in trace.operations] == (["add"] if grafted else ["arange", "mul", "add"])


@pytest.mark.parametrize(
    ("grafted", "replace", "tags", "is_copied"),
    [
        (True, True, {"kind": "grad"}, True),
        (True, False, {"kind": "grad"}, False),
        (True, True, {}, False),
        (False, True, {"kind": "grad"}, False),
    ],
)
def test_a_grafted_gradient_that_the_caller_takes_is_a_copy(
    grafted: bool, replace: bool, tags: dict[str, str], is_copied: bool
) -> None:
    """Other branches that autograd gives the same tensor do not end at the tap."""
    _, is_same = with_inner_tap(grafted=grafted, replace=replace, **tags)
    assert is_same is not is_copied
