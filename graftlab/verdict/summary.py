"""What the rows of a run come to, in a sentence or two."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import RESERVED_TAGS
from graftlab.rows.schema import MEASURED
from graftlab.verdict.order import Array, numbers


def distances(frame: pd.DataFrame) -> Array:
    """``rel_l2`` of each row as it is to be compared with others: infinite where non-finite values differ.

    A statistic leaves out what is not finite, so that of a tap with NaNs on one side may well be 0. NaN where nothing
    was measured.
    """
    value = np.where(_measured(frame), numbers(frame, "rel_l2"), np.nan)
    differ: Array = np.where(_differing(frame), np.inf, value)
    return differ


def differences(frame: pd.DataFrame) -> list[str]:
    """How far apart the two sides are; a sentence each, what matters most first. Rows are in execution order."""
    sentences = []
    differing = frame[_differing(frame)]
    if len(differing):
        first = differing.iloc[0]
        sentences.append(
            f"non-finite values differ in {_rows(differing)}, first at {_place(first)}: {first['nonfinite_differ']} of "
            f"{first['numel']} elements are NaN or infinite on one side alone, or in another way"
        )
    measured = frame[_measured(frame)]
    value = numbers(measured, "rel_l2")
    if (~np.isnan(value)).any():
        at = int(np.nanargmax(value))
        what = "rel_l2 of what is finite" if len(differing) else "rel_l2"
        sentences.append(f"largest {what} {value[at]:.2e} at {_place(measured.iloc[at])}")
    without = measured[np.isnan(value) & ~_differing(measured)]
    if len(without):
        sentences.append(
            f"not compared: {_rows(without)} without a finite value on either side, first {_place(without.iloc[0])}"
        )
    return sentences


def _measured(frame: pd.DataFrame) -> Array:
    mask: Array = np.isin(frame["status"].astype(str).to_numpy(), MEASURED)
    return mask


def _differing(frame: pd.DataFrame) -> Array:
    mask: Array = _measured(frame) & (numbers(frame, "nonfinite_differ") > 0)
    return mask


def _rows(rows: pd.DataFrame) -> str:
    return "1 row" if len(rows) == 1 else f"{len(rows):,} rows"


def _place(row: pd.Series[Any]) -> str:
    """The tap with its own tags, and the rank."""
    own = [f"{tag}={value}" for tag, value in row["tags"].items() if tag not in RESERVED_TAGS]
    return f"{' '.join([row['name'], *own])} on {row['side']}[{row['rank']}]"
