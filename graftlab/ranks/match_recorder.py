"""Records the taps of a side on its ranks for a match, and grafts pairs that are already matched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.grafting import active
from graftlab.grafting.decisions import recompute_status
from graftlab.grafting.overwrite import overwritten
from graftlab.grafting.tensors import plain_tensor
from graftlab.layouts import Layout, RankLayout, rank_layout, relayout
from graftlab.matching.digests import Digest
from graftlab.matching.recorded_taps import RecordedTap, SketchRecorder
from graftlab.matching.sketch import Sketch
from graftlab.ranks.remote_functions import Callee, bind_callee
from graftlab.taps.calls import TapHandler, here
from graftlab.taps.extras import ExtrasWithLayout
from graftlab.taps.routing import handled_by
from graftlab.taps.watch import kinds_of_watched


@dataclass(frozen=True)
class MatchGraft:
    """A tensor of the baseline that overwrites a target's tap, in the layout of their pair."""

    layout: Layout
    whole: str
    value: Tensor


@dataclass
class MatchRecord:
    """One rank's taps in order. ``notes`` are about those that were not recorded or grafted as planned."""

    taps: list[RecordedTap]
    layouts: dict[str, RankLayout] = field(default_factory=dict)
    skipped: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


# Taps of the last run whose values were not sent, and the grafts in force, for later calls of the same match.
_held: dict[str, RecordedTap] = {}
_grafts: dict[str, list[MatchGraft]] = {}
# The sketches of weights by their digests. They change seldom, and a sketch takes far longer than a digest.
_sketches: dict[bytes, Sketch] = {}


def record_taps(
    callee: Callee,
    budget: int,
    send: int,
    grafts: Mapping[str, list[MatchGraft]],
    forget: list[str] | None,
) -> MatchRecord:
    """Run the code once. Up to ``budget`` bytes are recorded here; up to ``send`` bytes of them are returned.

    ``grafts`` are added, by the name of the target's tap; those of the taps in ``forget`` are dropped, or all for None.
    """
    for name in list(_grafts) if forget is None else forget:
        _grafts.pop(name, None)
    _grafts.update(grafts)
    recorder = _MatchRecorder(_grafts, budget, sketches=_sketches)
    with handled_by(recorder):
        bind_callee(callee)()
    _held.clear()
    return _record_of(recorder, send, _held)


def _record_of(recorder: _MatchRecorder, send: int, held: dict[str, RecordedTap]) -> MatchRecord:
    """The record, with up to ``send`` bytes of values; taps with the others go to ``held``.

    Parts of a whole come first, because they are joined when they arrive. Then come computed values, then weights,
    small ones first: of large ones few are needed.
    """

    def place(tap: RecordedTap) -> tuple[bool, int]:
        return tap.name not in recorder.layouts, -1 if tap.digest is None else tap.sketch.numel

    for tap in sorted(recorder.taps, key=place):
        tap.forget()
        if tap.value is None:
            continue
        size = tap.value.numel() * tap.value.element_size()
        if size <= send:
            send -= size
            tap.value = _value_of(tap)
        else:
            # A weight is part of the model, so it stays where it is.
            held[tap.name] = replace(tap, value=tap.value if tap.digest is not None else tap.value.cpu())
            tap.value = None
    return MatchRecord(recorder.taps, recorder.layouts, recorder.skipped, recorder.notes)


def recorded_value(name: str) -> Tensor | None:
    """Return a value that was recorded and not sent; None if there is none, or if its weight has changed since."""
    return _value_of(_held.get(name))


def _value_of(tap: RecordedTap | None) -> Tensor | None:
    if tap is None or tap.value is None:
        return None
    if tap.digest is None:
        return tap.value.cpu()
    if not _has_memory(tap.value):
        return None
    # Of a copy, because another thread may train the model meanwhile.
    value = tap.value.cpu().clone()
    return value if Digest.of(value).whole == tap.digest.whole else None


def _has_memory(value: Tensor) -> bool:
    """Whether a tensor's memory was not released. FSDP releases that of whole weights once their module has run, and to
    read it then would end the process.
    """
    last = value.storage_offset() + sum(
        (size - 1) * stride for size, stride in zip(value.shape, value.stride(), strict=True)
    )
    return (last + 1) * value.element_size() <= value.untyped_storage().nbytes()


def forget_match() -> None:
    """Release the tensors of a match that has ended."""
    _held.clear()
    _grafts.clear()
    _sketches.clear()


class StepRecord:
    """Records the taps of one step of a job, the first under a plan, and passes those in its pairs on to the grafter.

    ``pass_on`` is the grafter's tap, for taps of these ``names``. All other taps of this step and of later ones under
    that plan are ignored, so that all ranks skip the same ones.
    """

    def __init__(self, names: Collection[str], budget: int, send: int, pass_on: Callable[..., Any]) -> None:
        self.found: MatchRecord | None = None
        self._held: dict[str, RecordedTap] = {}
        self._names = frozenset(names)
        self._budget, self._send = budget, send
        self._pass_on = pass_on
        self._recorder: _MatchRecorder | None = None
        # Taps may come from several threads.
        self._lock = threading.RLock()

    def value_held(self, name: str) -> Tensor | None:
        """See :func:`recorded_value`."""
        return _value_of(self._held.get(name))

    def handler_at(self, step: int) -> TapHandler:
        """Return the tap handler for this step, which begins now. Called once for each step, in order."""
        with self._lock:
            if self.found is None and self._recorder is not None:
                self.found = _record_of(self._recorder, self._send, self._held)
            self._recorder = None if self.found is not None else _MatchRecorder({}, self._budget, step)
        return self

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """See :func:`graftlab.tap`."""
        with self._lock:
            if self._recorder is None:
                return value
            # Its own value, before the grafter overwrites it.
            self._recorder.tap(name, value, extras, tags, replace)
        return self._pass_on(name, value, extras, tags, replace) if name in self._names else value


class _MatchRecorder(SketchRecorder):
    """Records this rank's tensors with their layouts, then overwrites those that have a graft."""

    def __init__(
        self,
        grafts: Mapping[str, list[MatchGraft]],
        budget: int,
        step: int | None = None,
        sketches: dict[bytes, Sketch] | None = None,
    ) -> None:
        super().__init__(kinds_of_watched(), budget, sketches=sketches)
        self.layouts: dict[str, RankLayout] = {}
        self.notes: list[str] = []
        self._grafts = grafts
        self._step = step
        self._first_step = _next_step()

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        if self._step is None and _next_step() != self._first_step:
            self.note("taps after the first gl.step() are not matched")
            return value
        if recompute_status() == "recompute":
            self.note("taps that activation checkpointing runs again are not matched")
            return value
        shown = value() if callable(value) and not isinstance(value, Tensor) else value
        own = plain_tensor(shown)
        if isinstance(own, str):
            self.skipped[name] = own
            return value
        before = self.count
        self._record(name, own, extras, tags, is_computed=shown is not value)
        if self.count == before:
            return value
        recorded = self.newest
        place = here()
        assert place is not None
        try:
            given = extras.layout if isinstance(extras, ExtrasWithLayout) else None
            layout = rank_layout(shown, given, place.world_size, place.rank)
        except LayoutError as error:
            self.note(f"{recorded.name}: {error}")
            return value
        if layout is not None and layout.unknown:
            self.note(f"{recorded.name}: {layout.unknown}")
            layout = None
        if layout is not None:
            self.layouts[recorded.name] = layout
        result = own
        for graft in self._grafts.get(recorded.name, ()):
            result = self._grafted(recorded.name, graft, layout, result, place.rank)
        return value if result is own else overwritten(value, shown, own, result, replace=replace)

    def _grafted(self, name: str, graft: MatchGraft, layout: RankLayout | None, own: Tensor, rank: int) -> Tensor:
        split = Layout() if layout is None else layout.layout
        shape = tuple(own.shape) if layout is None else layout.shape
        value = graft.value.to(own.device)
        try:
            if graft.whole == "baseline":
                into = Layout((*graft.layout.steps, *split.steps), split.mesh)
                relaid = relayout([(Layout(), [value])], into, rank, own=own)
            else:
                relaid = relayout([(graft.layout, [value])], split, rank, shape=shape, own=own)
        except LayoutError as error:
            self.note(f"{name} could not be grafted to match the taps after it: {error}")
            return own
        return relaid.value.to(own.dtype)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


def _next_step() -> int:
    grafter = active.grafter()
    return 0 if grafter is None else grafter.next_step
