"""Traces a side's code on its ranks: the operations between a tap that differs and the grafted taps before it."""

from __future__ import annotations

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from graftlab.base.tags import TapIdentity, identity
from graftlab.base.tap_groups import kind_of
from graftlab.base.world import Side
from graftlab.grafting import active
from graftlab.grafting.decisions import given_tags, recompute_status
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.tensors import plain_tensor
from graftlab.lines.operations import OperationRecorder, modes_in_force
from graftlab.lines.traces import SliceTrace, TraceRequest, slice_of
from graftlab.ranks.remote_functions import Callee, bind_callee
from graftlab.taps.ambient_tags import ambient
from graftlab.taps.calls import TapHandler, here
from graftlab.taps.routing import handled_by
from graftlab.taps.untraced import COMPILER

_TAPS_BEFORE = 40


def trace_callee(callee: Callee, requests: Sequence[TraceRequest]) -> list[SliceTrace | None]:
    """Run the code once; returns the operations that lead to each wanted call, or None if it was not reached.

    ``requests`` are those of the side's ranks.
    """
    me, grafter = here(), active.grafter()
    assert me is not None
    assert grafter is not None
    request = requests[me.rank]
    tracer = _LineTracer(request, me.side, grafter, grafter, grafter.next_step - 1)
    with handled_by(tracer), _eagerly(), tracer.recorder, _lines_of_backward(request):
        bind_callee(callee)()
    traces, was_compiled = tracer.traces, _has_compiled()
    tracer.let_go()
    return [each and replace(each, was_compiled=was_compiled) for each in traces]


def _eagerly() -> contextlib.AbstractContextManager[object]:
    """Let compiled functions run eagerly, but only during the trace.

    Without this, a compiled function called under a mode would stay eager in the user's own calls too. A verdict traces
    code that has run before, so if torch's compiler is not imported, nothing is compiled. Importing it takes seconds,
    and a hundred megabytes of each rank.
    """
    if COMPILER not in sys.modules:
        return contextlib.nullcontext()
    eager: contextlib.AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return eager


def _lines_of_backward(request: TraceRequest) -> contextlib.AbstractContextManager[None]:
    """Let autograd keep the lines of each operation for its backward pass, if a gradient is wanted."""
    if _has_gradient(request):
        lines: contextlib.AbstractContextManager[None] = torch.autograd.set_detect_anomaly(True, check_nan=False)
        return lines
    return contextlib.nullcontext()


def _has_gradient(request: TraceRequest) -> bool:
    return any(kind_of(each.tags) is not None for each in request.wanted)


class TracedSteps:
    """Traces the operations of a job in its own loop, during ``steps`` whole steps.

    The first is the next step that is a multiple of ``steps``. ``takes`` handles the taps, traced or not. A failure of
    the trace does not fail the job: it ends the trace, and is its ``obstacle``.
    """

    def __init__(self, request: TraceRequest, steps: int, side: Side, grafter: Grafter, takes: TapHandler) -> None:
        self.obstacle = ""
        """Why nothing was traced, in words."""
        self._request, self._steps, self._side = request, steps, side
        self._grafter, self._takes = grafter, takes
        self._first: int | None = None
        self._tracer: _LineTracer | None = None
        self._open = contextlib.ExitStack()
        self._is_over = False

    @property
    def traces(self) -> list[SliceTrace | None] | None:
        """The operations that lead to each wanted call; None until the last step has ended."""
        if not self._is_over:
            return None
        return [None] * len(self._request.wanted) if self._tracer is None or self.obstacle else self._tracer.traces

    @property
    def is_left(self) -> bool:
        """Whether the job's loop is free of the trace."""
        return self._is_over and (self._tracer is None or not self._tracer.is_in_force)

    def handler_at(self, step: int) -> TapHandler:
        """Return the tap handler for this step, which begins now. Called once for each step, on the job's thread."""
        if self._first is None:
            self._first = -(-step // self._steps) * self._steps
        if step == self._first:
            self._begin(step)
        elif step >= self._first + self._steps:
            self.end()
        return self._takes if self._tracer is None or self._is_over else self._tracer

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing inside the block."""
        with contextlib.nullcontext() if self._tracer is None else self._tracer.recorder.pause():
            yield

    def _begin(self, step: int) -> None:
        self.obstacle = _obstacle()
        if not self.obstacle:
            self._tracer = _LineTracer(self._request, self._side, self._grafter, self._takes, step)
            self._tracer.recorder.fails_silently = True
            self._open.enter_context(_lines_of_backward(self._request))
            self._tracer.recorder.__enter__()

    def end(self) -> None:
        """Record nothing from now on. Called by the job's thread, it also removes the trace from the loop."""
        self._is_over = True
        if self._tracer is None:
            return
        recorder = self._tracer.recorder
        recorder.is_open = False
        # If the job has entered another mode meanwhile, it must leave that first.
        if modes_in_force()[-1:] == [recorder]:
            recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self._open.close()
        if recorder.failure is not None:
            self.obstacle = f"the trace failed with {type(recorder.failure).__name__}: {recorder.failure}"


def _obstacle() -> str:
    """Why the operations of this thread cannot be recorded; blank if they can."""
    if modes := modes_in_force():
        names = ", ".join(type(each).__name__ for each in modes)
        return f"gl.step() is called inside {names}, and the operations of such code cannot be recorded"
    # Eagerly, the code may need more memory than the job has.
    if _has_compiled():
        return "the job runs code that torch.compile has compiled; with TORCHDYNAMO_DISABLE=1 it can be traced"
    return ""


def _has_compiled() -> bool:
    """Whether torch.compile has compiled code in this process."""
    compiler = sys.modules.get("torch._dynamo.utils")
    return compiler is not None and sum(compiler.counters["frames"].values()) > 0


class _LineTracer:
    """Passes taps on to ``takes``, and notes their values before and after. ``first_step`` is the run's first step."""

    def __init__(self, request: TraceRequest, side: Side, grafter: Grafter, takes: TapHandler, first_step: int) -> None:
        self.recorder = OperationRecorder(request.only)
        self.recorder.present_step = self._present_step
        # Implementations that share no names may pack a batch in other ways.
        self.recorder.takes_rows = bool(grafter.plan.pairs)
        # Only one side's backward pass may read some of the values that the forward pass reads.
        self.recorder.reads_constants = _has_gradient(request)
        self.recorder.is_near = any(each.step == 0 and each.order <= _TAPS_BEFORE for each in request.wanted)
        self.found: dict[int, SliceTrace] = {}
        self._request = request
        self._side = side
        self._grafter = grafter
        self._takes = takes
        self._first_step = first_step
        self._step = 0
        self._reached: Counter[TapIdentity] = Counter()
        self._taps = 0
        self._last = max((each.step for each in request.wanted), default=-1)
        changes = request.changes
        for index, name in changes.shown.items():
            self.recorder.replaced[index] = partial(self._show, name)
        self.recorder.passed.update(changes.passed)
        self._fed: dict[str, torch.Tensor] = {}
        for index, (number, name) in changes.fed.items():
            self.recorder.fed[index] = (number, partial(self._show_once, name))

    @property
    def is_in_force(self) -> bool:
        """Whether the operations of this thread are recorded."""
        return any(each is self.recorder for each in modes_in_force())

    @property
    def traces(self) -> list[SliceTrace | None]:
        """The operations that lead to each wanted call, or None if it was not reached."""
        return [self.found.get(place) for place in range(len(self._request.wanted))]

    def let_go(self) -> None:
        """Break the reference cycle with the recorder, which would keep its notes until Python collects cycles."""
        self.recorder.present_step = int
        self.recorder.replaced.clear()
        self.recorder.fed.clear()

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        if not self.is_in_force:
            # Another thread's operations are not recorded.
            return self._takes.tap(name, value, extras, tags, replace)
        with self.recorder.pause():
            return self._tap(name, value, extras, tags, replace)

    def _tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool) -> Any:
        self._follow_steps()
        own = plain_tensor(value)
        self.recorder.begin_taps()
        if not isinstance(own, torch.Tensor) or not self.recorder.is_open:
            return self._takes.tap(name, value, extras, tags, replace)
        given, _ = given_tags(name, dict(ambient.get()), tags, None)
        names = [(each.name, each.tags) for each in self._grafter.plan.pairings(self._side, name, given)]
        calls = [
            self._note(paired, paired_tags if paired_tags is not None else given, own) for paired, paired_tags in names
        ]
        result = self._takes.tap(name, value, extras, tags, replace)
        # A call that only one side makes keeps its value, and the operations before it count as part of the difference.
        is_grafted = any(call in self._request.grafted for call in calls)
        is_copied = is_grafted and replace and result is value and kind_of(given) == "grad"
        if is_copied:
            # A graft sets the gradient of one branch. Without a copy, the other branches that autograd gives the same
            # tensor would end at this tap on the side that has no graft.
            result = result.clone()
        shown = plain_tensor(result)
        if isinstance(shown, torch.Tensor) and is_grafted:
            self.recorder.set_by_tap(shown, name, changed=self._side == "target" or is_copied)
        self.recorder.is_open = self._step <= self._last and len(self.found) < len(self._request.wanted)
        return result

    def _present_step(self) -> int:
        moment = self._grafter.moment
        return 0 if moment is None else moment[1] - self._first_step

    def _follow_steps(self) -> None:
        step = self._present_step()
        if step != self._step:
            self._step, self._taps = step, 0
            self._reached.clear()
        self._taps += 1
        # In a large model, few tensors lead to a tap. If a large one further back does, another run takes its
        # fingerprint.
        self.recorder.is_near = any(
            place not in self.found and each.step == self._step and each.order - _TAPS_BEFORE <= self._taps
            for place, each in enumerate(self._request.wanted)
        )

    def _note(self, name: str, tags: Mapping[str, Any], own: torch.Tensor) -> tuple[TapIdentity, int, int]:
        """Keep the operations before this call if it is a wanted one; returns the call."""
        which = identity({**tags, "name": name, "recompute_status": recompute_status()})
        occurrence = self._reached[which]
        self._reached[which] += 1
        for place, wanted in enumerate(self._request.wanted):
            if place not in self.found and wanted.is_at(which, self._step, occurrence):
                self.found[place] = slice_of(self.recorder, self.recorder.read(own))
        return which, self._step, occurrence

    def _show(self, name: str, result: torch.Tensor) -> torch.Tensor:
        shown: torch.Tensor = self._takes.tap(name, result, None, {})
        return shown

    def _show_once(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Show a value at the first operation that reads it, since all others read the same."""
        if name not in self._fed:
            self._fed[name] = self._show(name, value)
        return self._fed[name]
