"""Finds out whether one side is ahead by some steps or calls, from the values of both sides in several of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tap_groups import kind_of
from graftlab.base.text import counted
from graftlab.base.world import other_side
from graftlab.diffs.rounding import roundoff
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import coarser_dtype, records, rows_where, tags_key
from graftlab.verdict.facts import tap_name

MOST_STEPS = 8
"""The largest shift that is tried."""
ENOUGH_STEPS = 6
"""The number of steps in which a search compares jobs."""
_FEWEST_CALLS = 4
_FEWEST_PAIRS = 2
_STATISTICS = ("mean", "std", "min", "max")
# The sides may compute a value in different orders or dtypes.
_ROUNDINGS = 4
_LEAST_TOLERANCE = 1e-5


@dataclass(frozen=True)
class MisalignedSteps:
    """One side is ahead by ``by`` of ``unit``. The tap shows it in ``pairs`` pairs of calls."""

    ahead: str
    by: int
    unit: str
    tap: str
    pairs: int
    taps: int

    @property
    def sentence(self) -> str:
        behind = other_side(self.ahead)
        by = counted(self.by, self.unit)
        others = f", and so are those at {counted(self.taps - 1, 'more tap')}" if self.taps > 1 else ""
        remedy = (
            f"Let both begin with the same step, for example by {counted(self.by, 'more call')} of gl.step() on the "
            f"{self.ahead} before its first step"
            if self.unit == "step"
            else f"Let both make the same calls: the {behind} makes {by} first that the {self.ahead} does not"
        )
        return (
            f"The {self.ahead} is ahead by {by}: its values at {self.tap} are those that the {behind} shows {by} "
            f"later, in {counted(self.pairs, 'pair')} of {self.unit}s{others}. So different {self.unit}s were "
            f"compared, and no computation is judged. {remedy}, and judge again."
        )


_FAR = 0.1
_FIRST_TAPS = 3


def may_be_misaligned(rows: pd.DataFrame) -> bool:
    """Whether some of the first values in these rows are so far apart that the sides may be in different steps."""
    values = [
        row
        for row in records(rows_where(rows, rows["status"].isin(MEASURED)))
        if kind_of(row["tags"]) in (None, "input")
    ]
    return any((row["rel_l2"] or 0.0) > _FAR for row in values[:_FIRST_TAPS])


def find_misaligned_steps(rows: pd.DataFrame) -> MisalignedSteps | None:
    """Find how many steps, or calls in a step, one side is ahead of the other; None if that explains nothing.

    ``rows`` are of steps without grafts, in execution order. Two tensors count as equal if their mean, standard
    deviation, least and largest element agree. A shift is found if, at the first tap whose values change from call to
    call, all calls are equal that many calls apart, and no such tap has equal values in the same calls.
    """
    shifted: list[tuple[_CallSequence, int]] = []
    for calls in _sequences(rows):
        if calls.is_aligned(0):
            return None
        if (shift := calls.shift()) is not None:
            shifted.append((calls, shift))
    if not shifted:
        return None
    first, shift = shifted[0]
    same = [calls for calls, other in shifted if other == shift]
    # A single counter, such as a position, may itself be wrong by as much.
    if not any(calls.is_float for calls in same) and len({calls.baseline.tobytes() for calls in same}) < 2:
        return None
    per_step = first.calls_in_a_step
    in_steps = per_step is not None and shift % per_step == 0
    by = abs(shift) // per_step if in_steps and per_step else abs(shift)
    ahead = "target" if shift > 0 else "baseline"
    pairs = (len(first.baseline) - abs(shift)) // (per_step if in_steps and per_step else 1)
    return MisalignedSteps(ahead, by, "step" if in_steps else "call", first.name, pairs, len(same))


@dataclass(frozen=True)
class _CallSequence:
    """The calls of one tap on one rank in order, with four statistics of each side's tensor in each."""

    name: str
    baseline: np.ndarray[Any, np.dtype[np.float64]]
    target: np.ndarray[Any, np.dtype[np.float64]]
    steps: tuple[int, ...]
    tolerance: float

    @property
    def is_float(self) -> bool:
        return self.tolerance > 0

    @property
    def calls_in_a_step(self) -> int | None:
        """How many calls each step has; None for a single step, or unequal ones."""
        _, counts = np.unique(self.steps, return_counts=True)
        return int(counts[0]) if len(counts) > 1 and len(set(counts.tolist())) == 1 else None

    def changes(self) -> bool:
        """Whether the baseline's values change from each call to the next."""
        return not any(_equal(self.baseline[1:], self.baseline[:-1], self.tolerance))

    def is_aligned(self, shift: int) -> bool:
        """Whether the target's values in each call are the baseline's ``shift`` calls later."""
        ours, theirs = self.baseline[max(shift, 0) :], self.target[max(-shift, 0) :]
        length = min(len(ours), len(theirs))
        return length >= _FEWEST_PAIRS and all(_equal(ours[:length], theirs[:length], self.tolerance))

    def shift(self) -> int | None:
        most = min(MOST_STEPS * (self.calls_in_a_step or 1), len(self.steps) - _FEWEST_PAIRS)
        # Values that repeat, as in equal steps, fit any shift by their period.
        changing = (
            n for n in range(1, most + 1) if not all(_equal(self.baseline[n:], self.baseline[:-n], self.tolerance))
        )
        shifts = (each * sign for each in changing for sign in (1, -1))
        return next((shift for shift in shifts if self.is_aligned(shift)), None)


def _equal(one: Any, other: Any, tolerance: float) -> list[bool]:
    scale = np.maximum(np.abs(one), np.abs(other)).max(axis=1, keepdims=True)
    found: list[bool] = (np.abs(one - other) <= tolerance * scale).all(axis=1).tolist()
    return found


def _sequences(rows: pd.DataFrame) -> Iterator[_CallSequence]:
    """The values and inputs that change, in execution order."""
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in records(rows_where(rows, rows["status"].isin(MEASURED))) if len(rows) else []:
        if kind_of(row["tags"]) not in (None, "input") or any(row[column] is None for column in _COLUMNS):
            continue
        found.setdefault((row["name"], tags_key(row["tags"]), row["rank"], row["direction"]), []).append(row)
    for each in found.values():
        if len(each) < _FEWEST_CALLS:
            continue
        baseline, target = (
            np.array([[row[f"{what}_{side}"] for what in _STATISTICS] for row in each], dtype=float)
            for side in ("baseline", "target")
        )
        rounding = max(roundoff(coarser_dtype(row)) for row in each)
        calls = _CallSequence(
            tap_name(each[0]["name"], {tag: value for tag, value in each[0]["tags"].items() if tag != "kind"}),
            baseline,
            target,
            tuple(int(row["step"]) for row in each),
            max(_LEAST_TOLERANCE, _ROUNDINGS * rounding) if rounding else 0.0,
        )
        if calls.changes():
            yield calls


_COLUMNS = [f"{what}_{side}" for what in _STATISTICS for side in ("baseline", "target")]
