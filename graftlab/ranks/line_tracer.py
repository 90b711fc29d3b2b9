"""Traces a side's code on its ranks: the operations between a tap that differs and the grafted taps before it."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from graftlab.base.tags import TapIdentity, identity
from graftlab.base.tap_groups import kind_of
from graftlab.grafting import active
from graftlab.grafting.decisions import given_tags, recompute_status
from graftlab.grafting.tensors import plain_tensor
from graftlab.lines.operations import OperationRecorder
from graftlab.lines.traces import SliceTrace, WantedCall, slice_of
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.remote_functions import Callee, bind_callee
from graftlab.taps.calls import ambient, here
from graftlab.taps.routing import handled_by

_TAPS_BEFORE = 40

LINE_TAP = "graftlab.line"
"""The beginning of the names of taps at operations, which confirm a line."""


@dataclass(frozen=True)
class OperationChanges:
    """What a traced run changes at single operations, by their index.

    ``shown`` are operations whose results are shown as taps, each with its name. ``passed`` are the numbers of values
    that operations return unchanged, ``fed`` those of values in whose place they read what a tap shows.
    """

    shown: Mapping[int, str] = field(default_factory=dict)
    passed: Mapping[int, int] = field(default_factory=dict)
    fed: Mapping[int, tuple[int, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class TraceRequest:
    """What to trace in one run.

    ``grafted`` are the calls of taps that have the baseline's values, each with its step and its occurrence. ``only``
    are the values to take fingerprints of; all if it is None.
    """

    wanted: Sequence[WantedCall]
    grafted: frozenset[tuple[TapIdentity, int, int]]
    plan: GraftPlan
    changes: OperationChanges = field(default_factory=OperationChanges)
    only: frozenset[int] | None = None


def trace_callee(
    callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], request: TraceRequest
) -> list[SliceTrace | None]:
    """Run the code once; returns the operations that lead to each wanted call, or None if it was not reached."""
    tracer = _LineTracer(request)
    backward = any(kind_of(each.tags) is not None for each in request.wanted)
    # Autograd then keeps the lines of each operation for its backward pass.
    lines = torch.autograd.set_detect_anomaly(True, check_nan=False) if backward else contextlib.nullcontext()
    # Called under a mode, a compiled function would run eagerly from then on, in the user's own calls as well.
    eager = torch.compiler.set_stance("force_eager")
    with handled_by(tracer), eager, tracer.recorder, lines:
        bind_callee(callee, args, kwargs)()
    return [tracer.found.get(place) for place in range(len(request.wanted))]


class _LineTracer:
    """Passes taps on to the grafter, and notes what each shows and sets."""

    def __init__(self, request: TraceRequest) -> None:
        self.recorder = OperationRecorder(request.only)
        self.recorder.present_step = self._present_step
        self.recorder.takes_large = any(each.step == 0 and each.order <= _TAPS_BEFORE for each in request.wanted)
        self.found: dict[int, SliceTrace] = {}
        self._request = request
        me = here()
        assert me is not None
        self._side = me.side
        grafter = active.grafter()
        assert grafter is not None
        self._grafter = grafter
        self._first_step = grafter.next_step - 1
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

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        with self.recorder.pause():
            return self._tap(name, value, extras, tags, replace)

    def _tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool) -> Any:
        self._follow_steps()
        own = plain_tensor(value) if isinstance(value, torch.Tensor) else None
        self.recorder.begin_taps()
        if not isinstance(own, torch.Tensor) or not self.recorder.is_open:
            return self._grafter.tap(name, value, extras, tags, replace)
        given, _ = given_tags(name, dict(ambient.get()), tags, _ignore_warning)
        names = [(each.name, each.tags) for each in self._request.plan.pairings(self._side, name, given)]
        calls = [
            self._note(paired, paired_tags if paired_tags is not None else given, own) for paired, paired_tags in names
        ]
        result = self._grafter.tap(name, value, extras, tags, replace)
        # A call that only one side makes has its own value, and what it computed belongs to what differs.
        is_grafted = any(call in self._request.grafted for call in calls)
        is_copied = is_grafted and replace and result is value and kind_of(given) == "grad"
        if is_copied:
            # A graft sets the gradient of one branch. Without a copy, the other branches that autograd gives the same
            # tensor would end at this tap on the side that has no graft.
            result = result.clone()
        shown = plain_tensor(result) if isinstance(result, torch.Tensor) else None
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
        # Of a large model, few tensors lead to a tap. Where one further back does, another run takes its fingerprint.
        self.recorder.takes_large = any(
            each.step == self._step and each.order - _TAPS_BEFORE <= self._taps for each in self._request.wanted
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
        shown: torch.Tensor = self._grafter.tap(name, result, None, {})
        return shown

    def _show_once(self, name: str, value: torch.Tensor) -> torch.Tensor:
        """Show a value at the first operation that reads it; the others read the same."""
        if name not in self._fed:
            self._fed[name] = self._show(name, value)
        return self._fed[name]


def _ignore_warning(name: str, what: str) -> None:
    """Ignore a warning about an invalid tag, which the grafter showed in an earlier run."""
