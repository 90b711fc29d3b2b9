"""What the rows of a run come to, in a sentence or two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import RESERVED_TAGS
from graftlab.filters.expressions import compile_filter
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.rows.schema import MEASURED
from graftlab.verdict.order import Array, numbers

# A filter is asked about each of them.
_ROWS_JUDGED = 100_000


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
            f"non-finite values differ in {_rows(differing)}, first at {_place(first)}: "
            f"{first['nonfinite_differ']:.0f} of {first['numel']:.0f} elements are NaN or infinite on one side alone, "
            "or in another way"
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


def unmatched_filters(plans: Sequence[GraftPlan], frame: pd.DataFrame) -> dict[str, str]:
    """The filters of these plans that match no row of a run, by name, with their text.

    A tap that some filter matches leaves a row, so what matches no row has matched no tap. ``plans`` are those that may
    have been in force, the first one as the run began; one that no row has was not used to the end of a step. Of
    ``compare`` nothing is said where there is no row at all, for then it has nothing to tell apart. Of very many rows
    nothing is said either.
    """
    if len(frame) > _ROWS_JUDGED:
        return {}
    used = set(frame["plan_version"].dropna().astype(int))
    in_force = [plan for plan in plans if plan.version in used] or list(plans[:1])
    tags = list(frame["tags"])
    found = {}
    for name in FILTERS:
        if name == "compare" and not tags:
            continue
        texts = dict.fromkeys(text for plan in in_force if (text := getattr(plan, name)) and text.strip())
        if texts and not any(_may_match(text, tags) for text in texts):
            found[name] = next(reversed(texts))
    return found


def _may_match(text: str, tags: Sequence[Mapping[str, object]]) -> bool:
    """Whether a filter matches one of these rows, or may have matched tags of which a row has only the repr."""
    filter_ = compile_filter(text)
    return any(filter_.matches(each) or not all(_is_as_given(each.get(tag)) for tag in filter_.names) for each in tags)


def _is_as_given(value: object) -> bool:
    """Whether a row has a tag's value as filters saw it, and not a repr."""
    return type(value) in (int, float, bool, type(None)) or (
        type(value) is str and value[:1] not in ("(", "[", "{", "<")
    )


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
