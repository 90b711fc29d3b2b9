"""Taps whose norm is dominated by values that both sides mask, such as scores of -1e9, judged by their other values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch

from graftlab.base.tap_groups import filter_of, kind_of
from graftlab.base.text import first_of
from graftlab.diffs.rounding import roundoff
from graftlab.errors import SessionError
from graftlab.grafting.kept import OCCURRENCE
from graftlab.judging.verdict_runs import RunFilters, VerdictRuns
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import call_key, records

_LEAST_MASK = 1e4
"""Values below the negative of this have a softmax of zero."""
_FAR = 1e3
"""How many times larger than all other values a masked value is."""
_SHOWN = 3


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
        tags = {tag: value for tag, value in row["tags"].items() if value is not None}
        try:
            pair = runs.pair(row["name"], row["rank"], row["step"], {OCCURRENCE: row["occurrence"], **tags})
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
    measured = rows[rows["status"].isin(MEASURED)]
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
