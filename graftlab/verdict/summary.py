"""What the rows of a run come to, in a sentence or two."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import RESERVED_TAGS
from graftlab.filters.expressions import compile_filter
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.rows.schema import MEASURED
from graftlab.verdict.floor import assumed_floor
from graftlab.verdict.order import Array, divergent, numbers


def distances(frame: pd.DataFrame) -> Array:
    """``rel_l2`` of each row as it is to be compared with others: infinite where non-finite values differ.

    A statistic leaves out what is not finite, so that of a tap with NaNs on one side may well be 0. NaN where nothing
    was measured.
    """
    value = np.where(_measured(frame), numbers(frame, "rel_l2"), np.nan)
    differ: Array = np.where(_differing(frame), np.inf, value)
    return differ


def differences(frame: pd.DataFrame, noise_floor: float | None = None) -> list[str]:
    """How far apart the two sides are; a sentence each, what matters most first. Rows are in execution order.

    What is above ``noise_floor`` diverges. Without one, rounding of the coarsest dtype is assumed, and said.
    """
    sentences = []
    failed = frame[_status(frame, "failed")]
    if len(failed):
        first = failed.iloc[0]
        why = str(first.get("error") or "no reason is known").strip().partition("\n")[0]
        sentences.append(f"the transform failed in {_rows(failed)}, first at {_place(first)}: {why}")
    measured = frame[_measured(frame)]
    value = numbers(measured, "rel_l2")
    if len(measured):
        sentences.append(_first_sentence(frame, floor_of(frame, noise_floor)))
    differing = frame[_differing(frame) & ~_status(frame, "grafted")]
    at = first_divergent_at(frame, floor_of(frame, noise_floor)[0])
    if len(differing) and not (at is not None and _differing(frame)[at]):
        sentences.append(
            f"non-finite values differ in {_rows(differing)}, first at {_place(differing.iloc[0])}: "
            f"{_nonfinite(differing.iloc[0])}"
        )
    if (~np.isnan(value)).any():
        largest = int(np.nanargmax(value))
        what = "rel_l2 of what is finite" if len(differing) else "rel_l2"
        sentences.append(f"largest {what} {value[largest]:.2e} at {_place(measured.iloc[largest])}")
    without = measured[np.isnan(value) & ~_differing(measured)]
    if len(without):
        sentences.append(
            f"not compared: {_rows(without)} without a finite value on either side, first {_place(without.iloc[0])}"
        )
    return sentences


def floor_of(frame: pd.DataFrame, noise_floor: float | None = None) -> tuple[float, str]:
    """The floor that these rows are judged by, and in words where it is from."""
    if noise_floor is not None:
        return noise_floor, f"the floor {noise_floor:g}"
    dtypes = frame["dtype"].dropna().unique() if "dtype" in frame.columns else ()
    floor, dtype = assumed_floor(dtypes)
    return floor, f"the floor {floor:g}, assumed for {dtype}"


def first_divergent_at(frame: pd.DataFrame, noise_floor: float) -> int | None:
    """Where the first row stands that was measured, not grafted, and that rounding does not explain."""
    compared = _measured(frame) & ~_status(frame, "grafted")
    none = np.zeros(len(frame), dtype=bool)
    nonfinite = np.where(_differing(frame), 1, 0)
    mask = divergent(compared, none, numbers(frame, "rel_l2"), nonfinite, noise_floor)
    return int(mask.argmax()) if mask.any() else None


def _first_sentence(frame: pd.DataFrame, floor: tuple[float, str]) -> str:
    """Where the two sides part; of grafted taps that they were, and what comes of it after them."""
    limit, in_words = floor
    grafted = _status(frame, "grafted")
    compared = _measured(frame) & ~grafted
    at = first_divergent_at(frame, limit)
    start, which = "", "first divergent"
    if grafted.any():
        taps = len(
            {_tap(name, tags) for name, tags in zip(frame["name"][grafted], frame["tags"][grafted], strict=True)}
        )
        start = f"grafted {taps} {'tap' if taps == 1 else 'taps'}; "
        first_graft = int(grafted.argmax())
        which = "first divergent after them" if at is None or at > first_graft else "first divergent, before them"
    if not compared.any():
        return f"{start}nothing else was compared"
    if at is None:
        with_value = np.flatnonzero(compared & ~np.isnan(numbers(frame, "rel_l2")))
        if not len(with_value):
            return f"{start}{which}: none has a finite value"
        last = frame.iloc[int(with_value[-1])]
        rows = "the 1 compared row" if len(with_value) == 1 else f"{len(with_value):,} compared rows"
        agrees = f"the last one, {_place(last)}, agrees to {last['rel_l2']:.1e}"
        return f"{start}{which}: none of {rows} is above {in_words}; {agrees}"
    row = frame.iloc[at]
    if _differing(frame)[at]:
        others = int((_differing(frame) & ~grafted).sum()) - 1
        more = f", and in {others:,} {'row' if others == 1 else 'rows'} more" if others else ""
        how = f"{_nonfinite(row)}{more}"
    else:
        ratio = row["rel_l2"] / limit if limit else math.inf
        times = f"{ratio:,.{1 if ratio < 10 else 0}f} x " if ratio < 1e6 else "above "
        how = f"rel_l2 {row['rel_l2']:.2e}, {times}{in_words}"
    steps = frame["step"].nunique() if "step" in frame.columns else 1
    when = f" in step {row['step']}" if steps > 1 else ""
    return f"{start}{which}: {_place(row)}{when}: {how}"


def _nonfinite(row: pd.Series[Any]) -> str:
    return (
        f"{row['nonfinite_differ']:.0f} of {row['numel']:.0f} elements are NaN or infinite on one side alone, or in "
        "another way"
    )


def unmatched_filters(plans: Sequence[GraftPlan], frame: pd.DataFrame) -> dict[str, str]:
    """The filters of these plans that match no row of a run, by name, with their text.

    A tap that some filter matches leaves a row, so what matches no row has matched no tap. ``plans`` are those that may
    have been in force, the first one as the run began; one that no row has was not used to the end of a step. Of
    ``compare`` nothing is said where there is no row at all, for then it has nothing to tell apart.
    """
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
    names = sorted(filter_.names)
    asked = set()
    for each in tags:
        # Rows are many, and what a filter looks at in them differs little.
        values = [each.get(name) for name in names]
        known = repr(values)
        if known in asked:
            continue
        asked.add(known)
        if filter_.matches(each) or not all(map(_is_as_given, values)):
            return True
    return False


def _is_as_given(value: object) -> bool:
    """Whether a row has a tag's value as filters saw it, and not a repr."""
    return type(value) in (int, float, bool, type(None)) or (
        type(value) is str and value[:1] not in ("(", "[", "{", "<")
    )


def _status(frame: pd.DataFrame, status: str) -> Array:
    mask: Array = frame["status"].astype(str).to_numpy() == status
    return mask


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
    return f"{_tap(row['name'], row['tags'])} on {row['side']}[{row['rank']}]"


def _tap(name: str, tags: Mapping[str, Any]) -> str:
    return " ".join([name, *(f"{tag}={value}" for tag, value in tags.items() if tag not in RESERVED_TAGS)])
