"""The summary of a run's rows, in a few sentences."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import SIDE_NAMES
from graftlab.base.text import counted
from graftlab.diffs.rounding import assumed_floor
from graftlab.filters.expressions import compile_filter
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.rows.schema import Row, are_whole
from graftlab.verdict.facts import COMPARED, FAILED, GRAFTED, Facts, tap_name
from graftlab.verdict.order import Array, divergent, require_floor

# A recomputation on only one side is not among them, because its original has a row.
ABSENT = ("missing", "timeout", "unmatched")


def distances(frame: pd.DataFrame) -> Array:
    """``rel_l2`` of each row for comparisons with other rows: infinite where non-finite values differ.

    Statistics leave out non-finite values, so a tap with NaNs on one side may have a rel_l2 of 0. NaN where nothing was
    measured.
    """
    facts = Facts(frame)
    value = np.where(facts.differ > 0, np.inf, facts.value)
    found: Array = np.where(facts.kind <= GRAFTED, value, np.nan)
    return found


def differences(frame: pd.DataFrame, noise_floor: float | None = None) -> list[str]:
    """Sentences on how far apart the two sides are, the most important first. Rows are in execution order.

    Values above ``noise_floor`` diverge. Without one, rounding of the coarsest dtype is assumed and reported.
    """
    facts = Facts(frame)
    parts = []
    failed = facts.kind == FAILED
    if failed.any():
        first = facts.row(_first(failed))
        why = str(first.get("error") or "no reason is known").strip().partition("\n")[0]
        parts.append(f"the transform failed in {_rows(failed)}, first at {_place(first)}{_when(facts, first)}: {why}")
    measured = facts.kind <= GRAFTED
    grafted = facts.kind == GRAFTED
    differs = measured & (facts.differ > 0)
    floor = floor_of(facts, noise_floor)
    at = first_divergent_at(facts, floor[0])
    if measured.any():
        parts.append(_first_sentence(facts, at, floor))
    differing = differs & ~grafted
    if differing.any() and not (at is not None and differs[at]):
        row = facts.row(_first(differing))
        parts.append(f"non-finite values differ in {_rows(differing)}, first at {_place(row)}: {_nonfinite(row)}")
    known = measured & ~np.isnan(facts.value)
    without = measured & np.isnan(facts.value) & ~differs
    if (known & ~grafted).any():
        if facts.value[known & ~grafted].max() == 0:
            some = differing.any() or without.any()
            parts.append("all finite values are equal" if some else "every compared row is equal")
        else:
            what = "rel_l2 of finite values" if differing.any() else "rel_l2"
            parts.append(f"largest {what} {_largest(facts, known & ~grafted)}")
    if (known & grafted).any():
        parts.append(f"grafts replaced differences of up to rel_l2 {_largest(facts, known & grafted)}")
    if without.any():
        row = facts.row(_first(without))
        parts.append(f"not compared: {_rows(without)} without a finite value on either side, first {_place(row)}")
    return parts


def _largest(facts: Facts, mask: Array) -> str:
    """The largest value of these rows, and its place."""
    value = facts.value[mask].max()
    return f"{value:.2e} at {_place(facts.row(_first(mask & (facts.value == value))))}"


def not_compared(statuses: Mapping[str, int]) -> str:
    """The number of rows of each status that lack a counterpart, in words; blank if there are none."""
    return ", ".join(f"{count:,} {status}" for status in ABSENT if (count := statuses.get(status, 0)))


def floor_of(facts: Facts, noise_floor: float | None = None) -> tuple[float, str]:
    """The floor by which these rows are judged, and its source in words."""
    require_floor(noise_floor)
    if noise_floor is not None:
        return noise_floor, f"the floor {noise_floor:g}"
    floor, dtype = assumed_floor(facts.dtypes, facts.casts)
    return floor, f"the floor {floor:g}, assumed for {dtype}"


def first_divergent_at(facts: Facts, noise_floor: float) -> int | None:
    """The place of the first row that was measured, not grafted, and that rounding does not explain."""
    mask = divergent_rows(facts, noise_floor)
    return _first(mask) if mask.any() else None


def divergent_rows(facts: Facts, noise_floor: float) -> Array:
    """Mask of the rows that were measured, not grafted, and that rounding does not explain."""
    none = np.zeros(len(facts.kind), dtype=bool)
    return divergent(facts.kind == COMPARED, none, facts.apart, facts.differ, noise_floor)


def _first(mask: Array) -> int:
    return int(mask.argmax())


def _first_sentence(facts: Facts, at: int | None, floor: tuple[float, str]) -> str:
    """A sentence on where the two sides diverge: after grafted taps, if there are any."""
    in_words = floor[1]
    grafted, compared = facts.kind == GRAFTED, facts.kind == COMPARED
    start, which = "", "first divergent"
    if grafted.any():
        taps = len(facts.names(grafted))
        start = f"grafted {counted(taps, 'tap')}; "
        is_after = at is None or _first(grafted) < at
        them = "it" if taps == 1 else "them"
        which = f"first divergent after {them}" if is_after else f"first divergent, before {them}"
    if not compared.any():
        return f"{start}nothing else was compared"
    if at is None:
        with_value = compared & ~np.isnan(facts.value)
        count = int(with_value.sum())
        if not count:
            return f"{start}{which}: none has a finite value"
        last = facts.row(int(np.flatnonzero(with_value)[-1]))
        how = f"agrees to {last['rel_l2']:.1e}" if last["rel_l2"] else "is equal"
        agrees = f"{_place(last)}, {how}"
        if count == 1:
            return f"{start}{which}: none; the only compared row, {agrees}, which is not above {in_words}"
        return f"{start}{which}: none of {count:,} compared rows is above {in_words}; the last one, {agrees}"
    row = facts.row(at)
    if facts.differ[at] > 0:
        others = int((compared & (facts.differ > 0)).sum()) - 1
        more = f"; so are elements of {others:,} more row{'s' if others > 1 else ''}" if others else ""
        how = f"{_nonfinite(row)}{more}"
    else:
        how = _how_far(row, floor)
    return f"{start}{which}: {_place(row)}{_when(facts, row)}: {how}"


def _when(facts: Facts, row: Mapping[str, Any]) -> str:
    return f" in step {row['step']}" if facts.has_several_steps else ""


def sentence_of_first(row: Row, noise_floor: float) -> str:
    """The sentence on the first row above the floor: where and in which step."""
    values = row._asdict()
    how = _nonfinite(values) if row.nonfinite_differ else _how_far(values, (noise_floor, "the floor"))
    return f"first divergent in this run: {_place(values)} in step {row.step}: {how}"


def sentence_of_nonfinite(row: Row) -> str:
    """The sentence on the first row of a run whose non-finite values differ."""
    values = row._asdict()
    return f"non-finite values first differ at {_place(values)} in step {row.step}: {_nonfinite(values)}"


def _how_far(row: Mapping[str, Any], floor: tuple[float, str]) -> str:
    limit, in_words = floor
    if are_whole(row.get("dtype"), row.get("cast")):
        most = row.get("max_abs")
        by = "" if most is None or math.isnan(most) else f" by up to {most:,.10g},"
        return f"{row['dtype']} numbers differ,{by} which rounding does not explain"
    ratio = row["rel_l2"] / limit if limit else math.inf
    times = f"{ratio:,.{1 if ratio < 10 else 0}f} x " if ratio < 1e6 else "above "
    return f"rel_l2 {row['rel_l2']:.2e}, {times}{in_words}"


def _nonfinite(row: Mapping[str, Any]) -> str:
    count = int(row["nonfinite_differ"])
    are = "is" if count == 1 else "are"
    return f"{count:,} of {row['numel']:,.0f} elements {are} NaN or infinite on one side and not the same on the other"


def unmatched_filters(plans: Sequence[GraftPlan], frame: pd.DataFrame) -> dict[str, str]:
    """The filters of these plans that match no row of a run, by name, with their text.

    Every tap that a filter matches leaves a row, so a filter that matches no row matched no tap. ``plans`` may have
    been in force, the first one when the run began; a plan without rows was not in force for a whole step. The default
    of ``compare``, which matches every tap, is not reported.
    """
    used = set(frame["plan_version"].unique())
    in_force = [plan for plan in plans if plan.version in used] or list(plans[:1])
    found = {}
    default = GraftPlan().compare
    for name in FILTERS:
        texts = dict.fromkeys(text for plan in in_force if (text := getattr(plan, name)) and text.strip())
        if name == "compare":
            texts.pop(default, None)
        if texts and not any(_may_match(text, frame) for text in texts):
            found[name] = next(reversed(texts))
    return found


def _may_match(text: str, frame: pd.DataFrame) -> bool:
    """Whether a filter matches one of these rows, or may have matched tags that the row has only as a repr."""
    filter_ = compile_filter(text)
    names = sorted(filter_.names)
    asked = set()
    for tags, *sides in zip(*(frame[column].to_numpy() for column in ("tags", *SIDE_NAMES)), strict=True):
        # A name that a side lacks is NaN in a column with others.
        seen = {side: name if isinstance(name, str) else None for side, name in zip(SIDE_NAMES, sides, strict=True)}
        seen.update(tags)
        # Many rows have the same values of the tags that a filter reads.
        values = [seen.get(name) for name in names]
        known = repr(values)
        if known in asked:
            continue
        asked.add(known)
        if filter_.matches(seen) or not all(map(_is_as_given, values)):
            return True
    return False


def _is_as_given(value: object) -> bool:
    """Whether a row has a tag's value as filters saw it, and not only a repr."""
    return type(value) in (int, float, bool, type(None)) or (
        type(value) is str and value[:1] not in ("(", "[", "{", "<")
    )


def _rows(mask: Array) -> str:
    return counted(int(mask.sum()), "row")


def _place(row: Mapping[str, Any]) -> str:
    """The tap with its own tags, and the rank."""
    return f"{tap_name(row['name'], row['tags'])} on {row['side']}[{row['rank']}]"
