"""The self-graft of a job, which cannot be called again: each pass consists of whole steps of the job.

The first pass records; the second checks whether the job repeats the same values. Only then do further passes graft the
record, as in :mod:`.self_graft`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from graftlab.base.tags import TagItems
from graftlab.grafting.self_graft import RepeatComparer, SelfGraft, SelfGrafter, of_paired_names
from graftlab.grafting.tap_records import CountingHandler, SelfGraftRecorder
from graftlab.taps.ambient_tags import ambient
from graftlab.taps.calls import TapHandler

Pass = Literal["record", "repeat", "graft", "drift", "rest"]

# A graft into one of these persists: the job would continue with different weights.
_STATE = ("param", "optimizer")


class SelfGraftInSteps:
    """A self-graft of ``passes`` with ``steps`` steps each, starting at the next step that is a multiple of ``steps``.
    With ``before`` it continues with that self-graft's record.

    ``dtypes``, ``keep``, ``budget`` and ``paired_names`` are as for :func:`.graft_self`.
    """

    def __init__(
        self,
        passes: Sequence[Pass],
        steps: int = 1,
        *,
        budget: int,
        dtypes: Mapping[str, str] | None = None,
        keep: Sequence[str] = (),
        paired_names: Callable[[str], Sequence[str]] = lambda name: (name,),
        before: SelfGraftInSteps | None = None,
    ) -> None:
        self.found = SelfGraft()
        self._passes, self._steps = tuple(passes), steps
        self._budget, self._keep = budget, tuple(keep)
        self._dtype_of, self._paired_names = of_paired_names(dtypes, paired_names), paired_names
        self._record: SelfGraftRecorder = SelfGraftRecorder(budget) if before is None else before._record
        self._first: int | None = None
        self._at = -1
        self._handler: CountingHandler | None = None

    @property
    def is_over(self) -> bool:
        """Whether the last pass has ended."""
        return self._at >= len(self._passes)

    def handler_at(self, step: int) -> TapHandler:
        """Return the tap handler for this step, which begins now. Called once for each step, in order."""
        if self._first is None:
            self._first = -(-step // self._steps) * self._steps
        at = (step - self._first) // self._steps
        if at != self._at and not self.is_over:
            self._end_pass()
            self._at = min(at, len(self._passes))
            self._handler = self._begin_pass() if 0 <= self._at < len(self._passes) else None
        return _SerialHandler(self._handler)

    def _begin_pass(self) -> CountingHandler | None:
        this = self._passes[self._at]
        if this == "rest":
            return None
        if this == "record":
            self._record = SelfGraftRecorder(self._budget)
            return self._record
        if this == "repeat":
            return RepeatComparer(self._record.taps)
        moved = this == "drift"
        return SelfGrafter(self._record.taps, self._dtype_of, int(moved), resets=not moved)

    def _end_pass(self) -> None:
        ended, found = self._handler, self.found
        if isinstance(ended, SelfGraftRecorder):
            found.skipped, found.not_recorded = list(ended.skipped), ended.not_recorded
            found.last = ended.last(self._keep, self._paired_names)
        elif isinstance(ended, RepeatComparer):
            found.not_repeated = ended.differences()
        elif isinstance(ended, SelfGrafter) and self._passes[self._at] == "drift":
            found.outputs = ended.rows
        elif isinstance(ended, SelfGrafter):
            found.added = ended.rows


class _SerialHandler:
    """Serializes taps for a counting handler, and excludes taps of the job's state; None excludes all taps."""

    def __init__(self, handler: CountingHandler | None) -> None:
        self._handler = handler
        self._lock = threading.RLock()

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        if self._handler is None or _kind(ambient.get(), tags) in _STATE:
            return value
        with self._lock:
            return self._handler.tap(name, value, extras, tags, replace)


def _kind(around: TagItems, tags: Mapping[str, Any]) -> object:
    return tags["kind"] if "kind" in tags else dict(around).get("kind")
