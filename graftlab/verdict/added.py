"""The error that each tap adds: the rows of a run in which every tap was grafted, over the floor of its group."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import distinguishes_taps, own_tags
from graftlab.base.tap_groups import filter_of, group_of, is_recomputed, kind_of, kind_of_group, place_in_blame
from graftlab.base.text import counted, first_of
from graftlab.base.world import other_side
from graftlab.diffs.rounding import cast_dtypes, is_quantised, quantised_roundoff, roundoff
from graftlab.rows.schema import MEASURED
from graftlab.taps.watch import ROOT
from graftlab.verdict.causes import Causes
from graftlab.verdict.floor import Floor

COLUMNS = (
    *("name", "tags", "occurrence", "rank", "step", "order", "group", "target_name", "shape"),
    *("dtype", "cast", "aligned_by"),
    *("added", "floor", "floor_max", "ratio", "error", "error_ratio", "alone", "label"),
)
LABELS = ("culprit", "minor", "cancels", "rounds differently", "inherited", "clean", "unmeasured")
"""The most serious first."""
NOT_NAMED = ("inherited", "clean", "unmeasured")


def added_frame(
    grafted: pd.DataFrame,
    floors: Mapping[str, Floor],
    *,
    compared: pd.DataFrame | None = None,
    constant: float | None = None,
    own: Mapping[tuple[str, str | None], Floor] | None = None,
    allowed: Mapping[str, Floor] = MappingProxyType({}),
    wholes: Mapping[tuple[str, str | None], float] = MappingProxyType({}),
) -> pd.DataFrame:
    """A row for each measured row of ``grafted``, in execution order, with the error added there.

    ``grafted`` are the rows of the run in which all taps were grafted, ``compared`` those of a run without grafts,
    whose differences are the ``error``. ``added`` and ``error`` are ``rel_l2``; ``ratio`` and ``error_ratio`` are the
    larger of ``rel_l2`` and of the largest difference over the baseline's root mean square, each over its floor. A
    group without a floor takes the largest of all groups. ``own`` has floors of single taps, by name and kind; one
    replaces its group's if that pools unlike taps, see :func:`_floor_of`. ``allowed`` are the least floors of
    values, by name. ``wholes`` has, by name and kind, how far rounding moves the whole tensor whose part a tap has, as
    a norm: the gradient of a fused bias has a part for the keys that is zero but for rounding. ``constant`` replaces
    every floor.
    Nothing is named yet: the labels are all ``clean``, or ``unmeasured`` without a pair of finite numbers.
    """
    errors = {_place(row): row for row in measured_rows(compared)} if compared is not None else {}
    largest = Floor(
        max((f.rel_l2 for f in floors.values()), default=0.0), max((f.rel_max for f in floors.values()), default=0.0)
    )
    lines = []
    rows = measured_rows(grafted)
    dtypes = {row["dtype"] for row in rows if row["dtype"]}
    for row in rows:
        group = group_of(row["name"], row["tags"])
        dtype = coarser_dtype(row)
        if constant is None:
            own_floor = (own or {}).get((row["name"], kind_of(row["tags"])))
            least, of_element = roundoff(dtype), 0.0
            floor = _floor_of(row, floors.get(group, largest), own_floor)
            if is_quantised(dtype) and not cast_dtypes(row["cast"]):
                # With a conversion one side alone has 8 bits, and differs by their whole rounding.
                least, of_element = quantised_roundoff(dtype, dtypes), 3 * least
            elif floor.rel_max == 0:
                # Nothing before this tap was moved: each number rounds in proportion to its own size.
                of_element = least * largest_over_rms(row)
            floor = floor.at_least(least, of_element)
            floor = of_cancelled_part(row, floor, wholes)
            if kind_of(row["tags"]) is None and (other := allowed.get(row["name"])) is not None:
                floor = Floor(max(floor.rel_l2, other.rel_l2), max(floor.rel_max, other.rel_max))
        else:
            floor = Floor(constant, constant * 3)
        before = errors.get(_place(row))
        over_floor = ratio(row, floor)
        lines.append(
            {
                "name": row["name"],
                "tags": own_tags(row["tags"]),
                "occurrence": row["occurrence"],
                "rank": row["rank"],
                "step": row["in_run"],
                "order": row["order"],
                "group": group,
                "target_name": row.get("target_name") or row["name"],
                "shape": row.get("shape"),
                "dtype": dtype,
                "cast": row["cast"],
                "aligned_by": row["aligned_by"],
                "added": row["rel_l2"],
                "floor": floor.rel_l2,
                "floor_max": floor.rel_max,
                "ratio": over_floor,
                "error": math.nan if before is None else before["rel_l2"],
                "error_ratio": math.nan if before is None else ratio(before, floor),
                "alone": math.nan,
                "label": "unmeasured" if math.isnan(over_floor) else "clean",
            }
        )
    return pd.DataFrame(lines, columns=COLUMNS)


_UNLIKE = 10
"""If a group's floor is this many times a tap's own, the group pools unlike taps, as an ``nn.Sequential`` does."""
_FEWEST_NUMBERS = 64
"""With fewer numbers than this, a floor may be small by chance."""
_SPREAD = 0.5
"""A difference is spread over a tensor from this ratio of its mean to its root mean square on (0.8 for a normal
distribution). Where rounding flips a choice (a router's, a rounding to integers), a few rows are off entirely.
"""


def _floor_of(row: Mapping[str, Any], group: Floor, own: Floor | None) -> Floor:
    """The floor of a row: its group's, or the tap's own if the group pools unlike taps.

    Pooling averages out chance at single taps, such as routers whose choices rounding may flip. Such a difference is in
    few rows of the tensor, and is judged by the pooled floor.
    """
    if (row["numel"] or 0) < _FEWEST_NUMBERS or not (row["rel_l2"] and is_spread(row)):
        return group
    # Choices in a few rows do not explain a difference in most of them.
    if own is None or group.rel_l2 <= _UNLIKE * own.rel_l2:
        return group.of_spread()
    return own.of_spread()


_CANCELLED = 1e3
_OF_CANCELLED = 0.1
"""A part is zero but for what rounding leaves of terms that cancel if its floor must be this many times higher, because
rounding may have moved it as far as the whole, and if that is at least this much of the part itself. One that is just
small, as the gradient of queries' weights when training begins, rounds in proportion to its own size.
"""


def of_cancelled_part(row: Mapping[str, Any], floor: Floor, wholes: Mapping[tuple[str, str | None], float]) -> Floor:
    """The floor of a row; a higher one for a weight's gradient that is a part of a larger one and cancels.

    ``wholes`` has, by name and kind, how far rounding moves the larger one, as a norm.
    """
    kind = kind_of(row["tags"])
    moved = wholes.get((row["name"], kind)) if kind == "param_grad" else None
    if moved is None or row["mean_baseline"] is None:
        return floor
    norm = math.hypot(row["mean_baseline"], row["std_baseline"]) * math.sqrt(row["numel"] or 0)
    least = moved / norm if norm else 0.0
    return floor.at_least(least) if least > max(_CANCELLED * floor.rel_l2, _OF_CANCELLED) else floor


def largest_over_rms(row: Mapping[str, Any]) -> float:
    """The baseline's largest number over its root mean square; 1 if it has no finite number, or only zeros."""
    if row["max_baseline"] is None:
        return 1.0
    rms = math.sqrt(row["mean_baseline"] ** 2 + row["std_baseline"] ** 2)
    return max(abs(row["min_baseline"]), abs(row["max_baseline"])) / rms if rms else 1.0


def is_spread(row: Mapping[str, Any]) -> bool:
    """Whether a row's difference is in most of the tensor, and finite."""
    if row["nonfinite_differ"]:
        return False
    difference = row["rel_l2"] * math.sqrt(row["mean_baseline"] ** 2 + row["std_baseline"] ** 2)
    return bool(row["mean_abs"] > _SPREAD * difference)


def measured_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """The measured rows, each with its step counted from the first of its run, as ``in_run``."""
    first = frame["step"].min() if len(frame) else 0
    return [
        {**row, "in_run": row["step"] - first} for row in records(rows_where(frame, frame["status"].isin(MEASURED)))
    ]


def rows_where(frame: pd.DataFrame, chosen: pd.Series[bool]) -> pd.DataFrame:
    """The chosen rows; the frame itself if these are all, which is most often so."""
    # To select rows of fifty columns takes a millisecond, and a verdict selects hundreds of times.
    count = int(chosen.to_numpy().sum())
    if count == len(frame):
        return frame
    return frame[chosen] if count else frame.iloc[:0]


def records(frame: pd.DataFrame, *names: str) -> list[dict[str, Any]]:
    """The rows as dicts, with None for missing values; of the columns ``names``, or of all."""
    # Through one array, since iterating over a frame of fifty columns takes as long as a run of a small model.
    if not len(frame):
        return []
    columns = [*names] or [str(column) for column in frame.columns]
    if names:
        cells = np.empty((len(frame), len(names)), object)
        for place, name in enumerate(names):
            cells[:, place] = frame[name].to_numpy(dtype=object)
    else:
        cells = frame.to_numpy(dtype=object, copy=True)
    cells[pd.isna(cells)] = None
    return [dict(zip(columns, row, strict=True)) for row in cells.tolist()]


def call_key(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """A row of a verdict's frame as a key: equal for the same call of a tap on the same rank, in any run."""
    return row["step"], row["name"], tags_key(row["tags"]), row["occurrence"], row["rank"]


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    return row["in_run"], row["name"], tags_key(row["tags"]), row["occurrence"], row["rank"], row["side"]


def tags_key(tags: Mapping[str, Any]) -> str:
    """The tags that distinguish a tap from others of its name, as a key."""
    return json.dumps({k: v for k, v in tags.items() if distinguishes_taps(k)}, sort_keys=True, default=str)


def ratio(row: Mapping[str, Any], floor: Floor) -> float:
    """A row's difference as a multiple of its floor; infinite where only one side is finite, NaN for no numbers."""
    if row["nonfinite_differ"]:
        return math.inf
    if row["rel_l2"] is None or math.isnan(row["rel_l2"]) or row["numel"] == 0:
        return math.nan
    if row["rel_l2"] == 0:
        return 0.0
    rms = math.sqrt(row["mean_baseline"] ** 2 + row["std_baseline"] ** 2)
    largest = row["max_abs"] / rms if rms else math.inf
    return floor.ratio(row["rel_l2"], largest)


def coarser_dtype(row: Mapping[str, Any]) -> str:
    """The coarser of a tap's dtypes on both sides, which differ if the row has a cast."""
    names = [row["dtype"] or ""]
    names += [name for pair in cast_dtypes(row["cast"]) for name in pair]
    return max(names, key=roundoff)


def named_groups(frame: pd.DataFrame, threshold: float) -> list[str]:
    """The groups with a tap whose ratio is above the threshold, in the order of blame, each kind in execution order."""
    named = dict.fromkeys(frame.loc[frame["ratio"] > threshold, "group"])
    return sorted(named, key=place_in_blame)


def labelled(
    frame: pd.DataFrame,
    named: Sequence[str],
    following: Sequence[str],
    causes: Mapping[str, Causes],
    threshold: float,
    even: Sequence[str] = (),
) -> pd.DataFrame:
    """The frame of a verdict with the columns ``label`` and ``alone``. The groups of ``even`` are never culprits."""
    labels = {
        **dict.fromkeys(named, "culprit"),
        **dict.fromkeys(following, "inherited"),
        **dict.fromkeys(even, "clean"),
    }
    alone: dict[str, float] = {}
    for each in causes.values():
        labels.update(each.labels)
        alone.update(each.alone)
    over = frame["ratio"] > threshold
    frame["label"] = [
        labels[g] if o else label for g, o, label in zip(frame["group"], over, frame["label"], strict=True)
    ]
    frame["alone"] = [alone.get(g, math.nan) if o else math.nan for g, o in zip(frame["group"], over, strict=True)]
    if named:
        first = int(over.to_numpy().argmax())
        later = (frame.index > first) & ~over & (frame["error_ratio"] > threshold)
        frame.loc[later, "label"] = "inherited"
    return frame


_LONGEST_FILTER = 4_000


def one_sided_filter(rows: pd.DataFrame) -> str | None:
    """A filter for the groups without a measured tap, which only one side has; None if there are none.

    A filter that would be too long leaves out the last groups.
    """
    names: dict[str, set[tuple[str, str | None]]] = {}
    measured = set()
    for name, tags, status in zip(rows["name"], rows["tags"], rows["status"], strict=True):
        group = group_of(name, tags)
        names.setdefault(group, set()).add((name, kind_of(tags)))
        if status in MEASURED:
            measured.add(group)
    one_sided = [names[group] for group in names if group not in measured]
    while one_sided:
        text = filter_of(sorted((each for names in one_sided for each in names), key=str))
        if text is not None and len(text) <= _LONGEST_FILTER:
            return f"({text})"
        one_sided = one_sided[: len(one_sided) // 2]
    return None


def unseen_of(frame: pd.DataFrame) -> list[str]:
    """Sentences on what these rows did not measure: one for each status, with the taps' names."""
    sentences: list[str] = []
    if not len(frame):
        return sentences
    # Most often every row was measured, and to select rows takes longer than to look for some.
    is_repeated = frame["status"].isin(("missing", "unmatched", "recomputed"))
    if is_repeated.any():
        is_repeated &= np.array([is_recomputed(tags) for tags in frame["tags"]], bool)
    if is_repeated.any():
        repeated, frame = frame[is_repeated], rows_where(frame, ~is_repeated)
        sentences.append(
            f"the recomputation of {_taps(repeated['name'])} in the backward pass (activation checkpointing), which "
            "only one side has. Nothing was grafted there, so gradients inside such a block may inherit differences of "
            "its forward pass."
        )
    measured, is_measured = frame, frame["status"].isin(MEASURED)
    if not is_measured.all():
        sentences += _unmeasured(frame, frame[~is_measured])
        measured = frame[is_measured]
    sentences += uneven_calls(frame)
    none_finite = rows_where(measured, measured["rel_l2"].isna())
    if len(none_finite):
        sentences.append(f"{_taps(none_finite['name'])} {_be(none_finite, 'has')} no pair of finite numbers.")
    empty = rows_where(measured, measured["numel"] == 0)
    if len(empty):
        sentences.append(f"{_taps(empty['name'])} {_be(empty, 'is')} empty.")
    zeros = rows_where(measured, _all_zeros(measured))
    if len(zeros):
        sentences.append(
            f"{_taps(zeros['name'])} {_be(zeros, 'is')} all zeros on both sides, which may hide earlier mistakes."
        )
    both = rows_where(
        measured,
        (measured["nonfinite_baseline"].fillna(0) > 0)
        & (measured["nonfinite_differ"].fillna(0) == 0)
        & measured["rel_l2"].notna(),
    )
    if len(both):
        where = f"{_be(both, 'has')} numbers that are not finite, in the same places on both sides"
        sentences.append(f"{_taps(both['name'])} {where}; these numbers were left out.")
    partial = rows_where(measured, measured["rows_unmatched"].fillna(0) > 0)
    if len(partial):
        sentences.append(f"{_taps(partial['name'])} {_be(partial, 'has')} rows without a partner on the other side.")
    measured = rows_where(measured, measured["note"].notna())
    if not len(measured):
        return sentences
    notes = measured["note"].astype(str).str
    noted = measured[notes.contains("did not|takes no part|ended")]
    if len(noted):
        sentences.append(
            f"{_taps(noted['name'])} arrived from only some of the sending ranks: {noted['note'].iloc[0]}."
        )
    unlike = measured[notes.contains("are not replicas")]
    if len(unlike):
        sentences.append(
            f"{_taps(unlike['name'])} {_be(unlike, 'was')} compared with one of several ranks that differ: "
            f"{unlike['note'].iloc[0]}."
        )
    return sentences


def uneven_calls(frame: pd.DataFrame) -> list[str]:
    """A sentence on taps that some ranks of a side reach in fewer calls than others: no row shows what they lack.

    A tap that a rank never reaches, such as one of another stage of a pipeline, is not among them.
    """
    reached = rows_where(frame, ~frame["status"].isin(("unmatched", "recomputed")))
    if reached["rank"].nunique() < 2:
        return []
    sizes = reached.groupby(["name", "side", "rank"], sort=False).size()
    spread = sizes.groupby(level=["name", "side"]).agg(["min", "max"])
    names = {name for name, _ in spread.index[spread["min"] < spread["max"]]}
    # Most often there are none, and to read the tags of all rows takes long.
    counts: dict[tuple[str, str, str], Counter[int]] = {}
    columns = ("name", "side", "rank", "tags")
    some = reached[reached["name"].isin(names)]
    for name, side, rank, tags in zip(*(some[column] for column in columns), strict=True):
        counts.setdefault((name, side, tags_key(tags)), Counter())[rank] += 1
    uneven = [(key, calls) for key, calls in counts.items() if min(calls.values()) < max(calls.values())]
    if not uneven:
        return []
    (_, side, _), calls = uneven[0]
    fewer, more = (found(calls, key=lambda rank: calls[rank]) for found in (min, max))
    return [
        f"{_taps(name for (name, *_), _ in uneven)}: {counted(calls[fewer], 'call')} on {side}[{fewer}], and "
        f"{calls[more]} on {side}[{more}]."
    ]


def _all_zeros(rows: pd.DataFrame) -> pd.Series[bool]:
    """Which of these rows have values, not data or gradients, that are nothing but zeros on both sides."""
    found = (rows["numel"] > 0) & (rows["nonfinite_baseline"] == 0) & (rows["nonfinite_differ"] == 0)
    for statistic in ("mean_baseline", "std_baseline", "mean_target", "std_target"):
        found &= rows[statistic] == 0
    if found.any():
        # Whole numbers and masks are often zeros.
        found &= rows["dtype"].map(lambda name: roundoff(str(name)) > 0).astype(bool)
        found &= np.array([kind_of(tags) is None for tags in rows["tags"]], bool)
    return found


def in_more_calls(frame: pd.DataFrame, alone: pd.DataFrame) -> pd.DataFrame:
    """Those rows of ``alone``, which have no partner, whose taps have one in other calls."""
    return alone[alone["name"].isin(frame.loc[frame["status"].isin(MEASURED), "name"])]


def _of_its_calls(frame: pd.DataFrame, more: pd.DataFrame) -> str:
    """The calls without a partner of the first of these taps, and all of its calls, as ``1 of 3 calls is``."""
    name, rank = more[["name", "rank"]].iloc[0]
    alone, paired = (
        int(((rows["name"] == name) & (rows["rank"] == rank)).sum())
        for rows in (more, frame[frame["status"].isin(MEASURED)])
    )
    return f"{alone} of {alone + paired} calls {'is' if alone == 1 else 'are'}"


def _unmeasured(frame: pd.DataFrame, left: pd.DataFrame) -> list[str]:
    """Sentences on ``left``, the rows of the frame without statistics."""
    sentences = []
    for status, meaning in (
        ("failed", "could not be compared (the transform failed)"),
        ("timeout", "did not arrive in time"),
    ):
        rows = left[left["status"] == status]
        if len(rows):
            sentences.append(f"{_taps(rows['name'])} {_be(rows, meaning)}{_first_error(rows)}.")
    for side in ("target", "baseline"):
        # A weight may be unmatched where its gradient is missing; one sentence states both.
        rows = left[left["status"].isin(("missing", "unmatched")) & (left["side"] == side)]
        gradients = rows[[kind_of(tags) == "grad" for tags in rows["tags"]]]
        if len(gradients):
            sentences.append(_one_sided_gradients(gradients, side))
        others = rows.drop(gradients.index)
        more = in_more_calls(frame, others)
        others = others.drop(more.index)
        if len(more):
            sentences.append(f"{_taps(more['name'])}: {_of_its_calls(frame, more)} on the {side} only.")
        if len(others):
            only = _be(others, f"is on the {side} only")
            sentences.append(f"{_taps(others['name'])} {only}{_first_error(others)}.")
    return sentences


def _one_sided_gradients(rows: pd.DataFrame, side: str) -> str:
    other = other_side(side)
    return (
        f"{_taps(rows['name'])} {_be(rows, 'has')} a gradient on the {side} only. If the {other} has the tap but "
        "computes no gradient for it, its graph is cut there (detach, no_grad, requires_grad=False), and gradients "
        "that are computed later may be named instead."
    )


_MANY = {"is": "are", "was": "were", "has": "have"}


def _be(rows: pd.DataFrame, one: str) -> str:
    """The predicate ``one``, in the plural for several taps."""
    verb, _, rest = one.partition(" ")
    several = rows["name"].nunique() > 1
    return " ".join(filter(None, (_MANY.get(verb, verb) if several else verb, rest)))


def _first_error(rows: pd.DataFrame) -> str:
    texts = [str(text).strip().splitlines()[0] for text in rows["error"].dropna() if str(text).strip()]
    # A side that ends without a tap adds nothing to a tap that is on one side only.
    texts = [text for text in texts if not text.endswith("without this tap")]
    return f": {texts[0]}" if texts else ""


def _taps(names: Iterable[str]) -> str:
    distinct = list(dict.fromkeys(names))
    shown = ", ".join(distinct[:4]) + (", ..." if len(distinct) > 4 else "")
    return f"{counted(len(distinct), 'tap')} ({shown})"


# Two runs of the same code agree to this, even on devices whose kernels are not deterministic.
_SAME_ERROR = 1e-6


_RESULT = re.compile(rf"{ROOT}(?:[.\[].*)?$")


def unread_grafts(frame: pd.DataFrame, threshold: float) -> list[str]:
    """The groups whose graft changed no later tap, although a later tap is named.

    The graft may have gone into a copy that the model does not read, such as ``h.float()``. Then errors seem to arise
    at later taps. ``frame`` is :func:`added_frame`'s: a tap that adds exactly its error of the run without grafts was
    reached by no graft.
    """
    found: dict[str, None] = {}
    is_value = frame["group"].map(lambda group: kind_of_group(group) is None)
    for _, rows in frame[is_value.astype(bool)].sort_values(["step", "order"]).groupby("rank"):
        error = rows["error"].to_numpy(dtype=float)
        added = rows["added"].to_numpy(dtype=float)
        differed = rows["error_ratio"].to_numpy(dtype=float) > threshold
        known = np.isfinite(added) & np.isfinite(error)
        apart = np.subtract(added, error, out=np.zeros(len(error)), where=known)
        # Numbers that only one side has finite are left out of both errors, and make both ratios infinite.
        healed = np.isinf(rows["error_ratio"].to_numpy(dtype=float)) & np.isfinite(rows["ratio"].to_numpy(dtype=float))
        changed = ~known | healed | (np.abs(apart) > _SAME_ERROR * error)
        last = int(np.flatnonzero(changed).max(initial=-1))
        groups = rows["group"].tolist()
        # The parts of a result come last, and nothing reads them.
        results = [bool(_RESULT.match(name)) for name in rows["name"]]
        end = len(groups) - next((n for n, each in enumerate(reversed(results)) if not each), len(results))
        first = {group: place for place, group in reversed(list(enumerate(groups))) if differed[place] and place < end}
        for group, place in first.items():
            after = differed[place + 1 :] & (rows["ratio"].to_numpy(dtype=float)[place + 1 :] > threshold)
            if place >= last and after.any():
                found[group] = None
    return list(found)


def names_one_tap(frame: pd.DataFrame, threshold: float) -> bool:
    """Whether all that a verdict names are calls of one tap, and not the same tap in several layers."""
    rows = frame[frame["ratio"] > threshold]
    return rows["name"].nunique() == 1 and not any("layer" in tags for tags in rows["tags"])


def unread_grafts_text(groups: list[str]) -> list[str]:
    """A sentence on grafts whose effect was not checked."""
    if not groups:
        return []
    return [
        f"Not checked: the effect of {first_of(groups)}: grafting it changed no later tap. If it is a copy, such as "
        "h.float() or h.clone(), and the tap's result is not used, no graft reaches the model, and the groups named "
        "after it may be inherited. Write h = gl.tap(name, h)."
    ]
