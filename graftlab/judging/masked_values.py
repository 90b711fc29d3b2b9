"""Taps with values that both sides mask, such as scores of -1e9 or minus infinity, judged by their other values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from graftlab.base.tap_groups import filter_of, kind_of
from graftlab.base.text import first_of
from graftlab.diffs.rounding import roundoff
from graftlab.errors import SessionError
from graftlab.judging.verdict_runs import RunFilters, VerdictRuns, kept_pair
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import call_key, measured_rows, records, rows_where

_LEAST_MASK = 1e4
"""Values below the negative of this have a softmax of zero."""
_FAR = 1e3
"""How many times larger than all other values a masked value is."""
_CLEARLY = 10
"""How many times larger than all other values the number is that one side has where the other has minus infinity."""
_SHOWN = 3


def with_equal_masks(
    runs: VerdictRuns, compared: pd.DataFrame, grafted: pd.DataFrame
) -> tuple[pd.DataFrame, pd.DataFrame, list[str]]:
    """Both frames, with masked places counted as equal where one side has minus infinity; and the names of these taps.

    ``compared`` are the rows of a run without grafts, ``grafted`` those of one in which every tap was grafted. If a tap
    may have such places, each of these runs is made again. A row in which any other place is finite on one side alone
    stays as it is.
    """
    suspects = {
        (row["name"], kind_of(row["tags"])): None for frame in (compared, grafted) for row in _finite_on_one_side(frame)
    }
    if not suspects:
        return compared, grafted, []
    keep = filter_of(suspects)
    found: dict[str, None] = {}
    frames = []
    for frame, wanted in (
        (compared, RunFilters(compare="True", keep=keep)),
        (grafted, RunFilters(b2t="True", keep=keep)),
    ):
        rows = _finite_on_one_side(frame)
        if rows:
            runs.both("the values that one side masks by minus infinity", wanted)
        changed = frame.copy() if rows else frame
        for row in rows:
            if (masked := _masked_by_infinity(runs, row)) is None:
                continue
            for side, count in zip(("baseline", "target"), masked, strict=True):
                changed.loc[row["index"], f"nonfinite_{side}"] -= count
            changed.loc[row["index"], "nonfinite_differ"] = 0
            found[row["name"]] = None
        frames.append(changed)
    return frames[0], frames[1], list(found)


def _finite_on_one_side(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The measured rows in which one side has all values that are not finite, with their index in the frame.

    Where masks differ in this, one side has them all. Gradients have no masks.
    """
    # Most often every value is finite.
    if not len(frame) or not (frame["nonfinite_differ"] > 0).any():
        return []
    rows = measured_rows(frame.assign(index=frame.index))
    return [
        row
        for row in rows
        if row["nonfinite_differ"]
        and row["nonfinite_differ"] == abs(row["nonfinite_baseline"] - row["nonfinite_target"])
        and kind_of(row["tags"]) in (None, "input", "param")
    ]


def _masked_by_infinity(runs: VerdictRuns, row: Mapping[str, Any]) -> tuple[int, int] | None:
    """How many places of a row each side masks by minus infinity, and the other side by a number.

    None if the sides differ in a place that is not finite in any other way, or the values were not kept.
    """
    try:
        return _places_masked_by_infinity(*kept_pair(runs, row, row["in_run"]))
    except SessionError:
        return None


def _places_masked_by_infinity(baseline: torch.Tensor, target: torch.Tensor) -> tuple[int, int] | None:
    if baseline.shape != target.shape or not (baseline.is_floating_point() and target.is_floating_point()):
        return None
    x, y = baseline.double(), target.double()
    masked = x.isneginf() & (y < -_LEAST_MASK) & y.isfinite(), y.isneginf() & (x < -_LEAST_MASK) & x.isfinite()
    either = masked[0] | masked[1]
    alike = (x == y) | (x.isnan() & y.isnan()) | (x.isfinite() & y.isfinite())
    if not (either | alike).all():
        return None
    others = torch.cat([each[~either & each.isfinite()].abs() for each in (x, y)])
    largest = float(others.max()) if others.numel() else 0.0
    numbers = torch.cat([y[masked[0]], x[masked[1]]])
    if numbers.numel() and float(-numbers.max()) < _CLEARLY * largest:
        # A number among others of its size is no mask.
        return None
    return int(masked[0].sum()), int(masked[1].sum())


def masks_alike(names: Sequence[str]) -> str:
    """A sentence on the taps that one side masks by minus infinity and the other by a number."""
    return (
        f"At {first_of(names, _SHOWN)}, minus infinity on one side and a number below {-_LEAST_MASK:g} on the other "
        "count as equal, since both mask."
    )


def without_masked_values(
    runs: VerdictRuns, grafted: pd.DataFrame, frame: pd.DataFrame, one_sided: str | None
) -> tuple[pd.DataFrame, list[str]]:
    """The verdict's frame with ``added`` and ``ratio`` of values that are not masked; and the names of these taps.

    ``grafted`` are the rows of the run in which every tap was grafted. Makes a run if a tap may have masked values.
    """
    may_be_masked = _may_be_masked(grafted)
    if not may_be_masked:
        return frame, []
    keep = filter_of((name, None) for name in may_be_masked)
    runs.both("the values that are not masked", RunFilters(b2t="True", keep=keep, leaving=one_sided))
    largest = float(frame["floor"].max())
    judged: dict[tuple[Any, ...], tuple[float, float]] = {}
    names: dict[str, None] = {}
    for row in records(frame[frame["name"].isin(may_be_masked)]):
        if kind_of(row["tags"]) is not None:
            continue
        try:
            pair = kept_pair(runs, row, row["step"])
        except SessionError:
            # Where the pair did not fit the budget, the judgement with all values stays.
            continue
        if (rel_l2 := _apart(*pair)) is not None:
            judged[call_key(row)] = rel_l2, rel_l2 / max(largest, roundoff(row["dtype"]))
            names[row["name"]] = None
    known = [judged.get(call_key(row)) for row in records(frame)]
    changed = frame.copy()
    for column, place in (("added", 0), ("ratio", 1)):
        changed[column] = [old if new is None else new[place] for old, new in zip(frame[column], known, strict=True)]
    return changed, list(names)


def _may_be_masked(rows: pd.DataFrame) -> list[str]:
    """The names of differing taps whose smallest value is far below all others."""
    measured = rows_where(rows, rows["status"].isin(MEASURED))
    least, most = measured["min_baseline"].astype(float), measured["max_baseline"].astype(float)
    is_masked = (least < -_LEAST_MASK) & (most.abs() * _FAR < -least) & (measured["max_abs"].astype(float) > 0)
    return list(dict.fromkeys(measured.loc[is_masked, "name"]))


def _apart(baseline: torch.Tensor, target: torch.Tensor) -> float | None:
    """The rel_l2 of the values that are not masked on both sides; None if none is masked, or all are."""
    if baseline.shape != target.shape or not baseline.is_floating_point():
        return None
    x, y = baseline.double(), target.double()
    limit = -_LEAST_MASK
    masked = (x < limit) & (y < limit)
    left = ~masked & x.isfinite() & y.isfinite()
    norm = float(x[left].norm())
    if not masked.any() or not norm:
        return None
    apart = float((x - y)[left].norm()) / norm
    return apart if math.isfinite(apart) else None


def left_out(names: Sequence[str]) -> str:
    """A sentence on the taps whose masked values were left out."""
    return (
        f"At {first_of(names, _SHOWN)}, values below {-_LEAST_MASK:g} on both sides count as masked, and are left out."
    )
