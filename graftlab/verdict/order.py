"""Groups rows into taps in execution order, and finds the first that diverges."""

from __future__ import annotations

import difflib
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Literal

import numpy as np
import pandas as pd

from graftlab.base.tags import distinguishes_taps
from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR, assumed_floor, cast_dtypes
from graftlab.rows.schema import COLUMNS, MEASURED, are_whole

# The statuses of a tap that the other side lacks.
_ALONE = ("missing", "unmatched", "recomputed")

Array = np.ndarray[Any, np.dtype[Any]]
Key = tuple[Hashable, ...]


@dataclass(frozen=True)
class Taps:
    """The taps of one frame in execution order, each the union of its receiving ranks' rows.

    ``keys`` are (name, step index, occurrence, *tag values of ``tag_columns``); ``steps`` the step numbers
    behind the step indices. ``value`` is the largest over the ranks that measured (NaN when none has a
    number), and ``apart`` the same as a floor is compared with it. ``statuses`` maps each status that occurs
    to a mask over taps. ``row_tap`` gives every row of the frame its tap's place.
    """

    keys: list[Key]
    tag_columns: list[str]
    steps: list[Any]
    value: Array
    apart: Array
    nonfinite: Array
    statuses: dict[str, Array]
    row_tap: Array
    row_order: Array

    @property
    def measured(self) -> Array:
        mask = np.zeros(len(self.keys), dtype=bool)
        for status in MEASURED:
            mask |= self.statuses.get(status, mask)
        return mask

    def suspects(self, noise_floor: float | None) -> Array:
        """Mask of the taps that diverge; see :func:`divergent`. Grafted taps do not."""
        nowhere = np.zeros(len(self.keys), dtype=bool)
        failed, grafted = self.statuses.get("failed", nowhere), self.statuses.get("grafted", nowhere)
        return divergent(self.measured & ~grafted, failed, self.apart, self.nonfinite, noise_floor)


def divergent(measured: Array, failed: Array, value: Array, nonfinite: Array, noise_floor: float | None) -> Array:
    """Mask of the rows, or taps, that a noise floor does not explain.

    These were measured and are above the floor or have pairs with only one finite value; or their transform failed.
    NaN is above no floor. Without a floor the value does not count.
    """
    above = np.zeros(len(value), dtype=bool) if noise_floor is None else value > noise_floor
    mask: Array = (measured & (above | (nonfinite > 0))) | failed
    return mask


def is_lost(status: str) -> bool:
    """Whether a row of this status lacks a comparison. A recomputed tap was compared where it was computed first."""
    return status not in (*MEASURED, "recomputed")


def require(frame: pd.DataFrame, *columns: str) -> None:
    """Raise ValueError naming the first of ``columns`` that the frame lacks, TypeError if it is not a frame."""
    if not isinstance(frame, pd.DataFrame):
        raise TypeError(f"expected a pandas DataFrame of rows (session.frame, run.frame), got {type(frame).__name__}")
    for column in columns:
        if column not in frame.columns:
            close = difflib.get_close_matches(column, [str(c) for c in frame.columns], n=1)
            hint = f"; did you mean {close[0]!r}?" if close else ""
            raise ValueError(
                f"the frame has no column {column!r}{hint} (it has: {', '.join(map(str, frame.columns)) or 'none'})"
            )


def require_floor(noise_floor: object) -> None:
    """Raise ValueError for a noise floor that no difference can be compared with."""
    if noise_floor is None:
        return
    if isinstance(noise_floor, bool) or not (isinstance(noise_floor, Real) and float(noise_floor) >= 0):
        raise ValueError(
            "noise_floor must be a number of at least 0, the largest difference that counts as rounding, not "
            f"{noise_floor!r}"
        )


def numbers(frame: pd.DataFrame, column: str) -> Array:
    """A column as float64, None as NaN. Raises ValueError when it holds something other than numbers."""
    raw = frame[column]
    converted = pd.to_numeric(raw, errors="coerce").to_numpy(dtype=np.float64, na_value=math.nan)
    wrong = np.isnan(converted) & raw.notna().to_numpy()
    if wrong.any():
        raise ValueError(f"column {column!r} cannot be drawn, it holds {raw[wrong].iloc[0]!r}; choose a numeric one")
    return converted


def distances_in(frame: pd.DataFrame, column: str) -> Array:
    """A column's values as :func:`numbers` gives them, but ``cosine`` as a distance: 1 - cosine similarity.

    It is above 0 even where nothing differs, because vectors of different lengths have the cosine 1 too.
    """
    found = numbers(frame, column)
    distance: Array = np.maximum(1.0 - found, 2.0**-53) if column == "cosine" else found
    return distance


def tag_columns(frame: pd.DataFrame) -> list[str]:
    """The columns of the tags that tell taps apart; see :func:`graftlab.base.tags.identity`."""
    if "tags" in frame.columns:
        cells = frame["tags"].to_numpy()
        distinct = dict.fromkeys(tuple(tags) for tags in cells if isinstance(tags, (dict, Mapping)))
        names = dict.fromkeys(name for each in distinct for name in map(str, each) if distinguishes_taps(name))
        # A tag whose name is a row's own column is kept as tag_<name>.
        columns = [f"tag_{name}" if f"tag_{name}" in frame.columns else name for name in names]
    else:  # a frame made by hand
        columns = [str(column) for column in frame.columns if column not in COLUMNS and distinguishes_taps(str(column))]
    return [column for column in columns if column in frame.columns]


def is_missing(value: object) -> bool:
    """Whether a cell has no value."""
    return value is None or value is pd.NA or (isinstance(value, (float, np.floating)) and math.isnan(value))


def plain_cell(value: Any) -> Hashable:
    """A cell's value as :func:`graftlab.base.tags.identity` has it: NaN is None, 3.0 is 3, a list its text."""
    if is_missing(value):
        return None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value if isinstance(value, (str, int, float, bool)) else repr(value)


def _codes(column: pd.Series[Any]) -> Array:
    try:
        return np.asarray(pd.factorize(column)[0])
    except TypeError:  # a list or a dict as a tag
        return np.asarray(pd.factorize(column.map(plain_cell))[0])


def tap_codes(frame: pd.DataFrame, *more: str) -> tuple[Array, Array]:
    """The number of each row's tap, in the order of first rows, and the first row of each tap.

    Rows are of one tap if :func:`graftlab.base.tags.identity` and the ``more`` columns are equal.
    """
    by = ["name", *tag_columns(frame), *more]
    codes = pd.DataFrame({str(place): _codes(frame[column]) for place, column in enumerate(by)})
    taps = codes.groupby(list(codes.columns), sort=False).ngroup().to_numpy()
    return taps, np.unique(taps, return_index=True)[1]


def _step_indices(frame: pd.DataFrame, order: Array) -> tuple[Array, list[Any]]:
    """Each row's place in the sequence of (run, step), and the step number behind each place."""
    rows = len(frame)
    step = numbers(frame, "step") if "step" in frame.columns else np.zeros(rows)
    step = np.where(np.isnan(step), np.inf, step)
    run = _codes(frame["run"]) if "run" in frame.columns else np.zeros(rows, dtype=np.int64)
    pairs = pd.DataFrame({"run": run, "step": step, "order": order, "at": np.arange(rows)})
    # Steps count on over the runs of a session; frames put together from several sessions keep their order.
    starts = pairs.groupby("run").agg({"step": "min", "order": "min", "at": "min"}).sort_values(["step", "order", "at"])
    place = {one: number for number, one in enumerate(starts.index)}
    pairs["run"] = [place[one] for one in run]
    distinct, inverse = np.unique(pairs[["run", "step"]].to_numpy(), axis=0, return_inverse=True)
    return inverse.reshape(-1), [int(s) if math.isfinite(s) else None for s in distinct[:, 1]]


def group(frame: pd.DataFrame, value: str) -> Taps:
    """Group rows into taps. Raises ValueError for a missing column: name, order, status or ``value``."""
    require(frame, "name", "order", "status", value)
    rows = len(frame)
    order = numbers(frame, "order")
    order = np.where(np.isnan(order), np.inf, order)
    step, steps = _step_indices(frame, order)
    tags = tag_columns(frame)
    by = ["name", *(["occurrence"] if "occurrence" in frame.columns else []), *tags]
    codes = pd.DataFrame({"step": step, **{f"{i}": _codes(frame[column]) for i, column in enumerate(by)}})
    ids = codes.groupby(list(codes.columns), sort=False).ngroup().to_numpy()
    count = int(ids.max()) + 1 if rows else 0
    first_row = np.full(count, rows)
    np.minimum.at(first_row, ids, np.arange(rows))
    tap_order, tap_shared = np.full(count, np.inf), np.full(count, np.inf)
    np.minimum.at(tap_order, ids, order)
    np.minimum.at(tap_shared, ids, _shared_before(frame, step, order))
    sequence = np.lexsort((first_row, tap_order, tap_shared, step[first_row])) if rows else np.zeros(0, dtype=np.int64)
    rank_of = np.empty(count, dtype=np.int64)
    rank_of[sequence] = np.arange(count)
    row_tap = rank_of[ids]

    status = frame["status"].astype(str).to_numpy()
    is_measured = np.isin(status, MEASURED)
    worst = np.full(count, np.nan)
    found = distances_in(frame, value)
    np.fmax.at(worst, row_tap, np.where(is_measured, found, np.nan))
    farthest = np.full(count, np.nan)
    np.fmax.at(farthest, row_tap, np.where(is_measured, apart(frame, found), np.nan))
    nonfinite = np.zeros(count)
    np.fmax.at(nonfinite, row_tap, np.where(is_measured, _nonfinite(frame), np.nan))
    statuses = {}
    for one in pd.unique(status):
        statuses[str(one)] = np.zeros(count, dtype=bool)
        statuses[str(one)][row_tap[status == one]] = True

    at = first_row[sequence]
    occurrence = frame["occurrence"].iloc[at].tolist() if "occurrence" in frame.columns else [0] * count
    columns = [frame["name"].iloc[at].tolist(), step[at].tolist(), occurrence]
    columns += [frame[column].iloc[at].tolist() for column in tags]
    keys = [tuple(plain_cell(part) for part in parts) for parts in zip(*columns, strict=True)]
    return Taps(keys, tags, steps, worst, farthest, nonfinite, statuses, row_tap, order)


def _shared_before(frame: pd.DataFrame, step: Array, order: Array) -> Array:
    """The number of shared taps before each row on its rank in its step.

    A rank counts all its taps, but a tap that it sends has its row on the receiver. A rank's count, less its own taps
    that the other side does not have, is a place that both sides share.
    """
    if "side" not in frame.columns or "rank" not in frame.columns:
        return order
    alone = frame["status"].astype(str).isin(_ALONE).to_numpy()
    if not alone.any():
        return order
    table = pd.DataFrame({"step": step, "side": _codes(frame["side"]), "rank": _codes(frame["rank"])})
    table["order"], table["alone"] = order, alone.astype(np.float64)
    in_order = table.sort_values(["step", "side", "rank", "order"], kind="stable")
    before = in_order.groupby(["step", "side", "rank"], sort=False)["alone"].cumsum() - in_order["alone"]
    # A tap that only one side has comes before the shared tap with the same number.
    shared: Array = order - before.reindex(table.index).to_numpy() - np.where(alone, 0.5, 0.0)
    return shared


def _nonfinite(frame: pd.DataFrame) -> Array:
    """The number of pairs in each row with only one finite value; 0 in a frame without that column."""
    return numbers(frame, "nonfinite_differ") if "nonfinite_differ" in frame.columns else np.zeros(len(frame))


def apart(frame: pd.DataFrame, value: Array) -> Array:
    """A column's values for comparison with a floor: infinite where whole numbers differ."""
    if "dtype" not in frame.columns:
        return value
    casts = frame["cast"] if "cast" in frame.columns else pd.Series(None, index=frame.index, dtype=object)
    pairs = pd.DataFrame({"dtype": frame["dtype"], "cast": casts})
    codes = pairs.groupby(["dtype", "cast"], dropna=False, sort=False, observed=True).ngroup().to_numpy()
    distinct = np.zeros(int(codes.max(initial=-1)) + 1, dtype=bool)
    first = np.unique(codes, return_index=True)[1]
    for at in first.tolist():
        distinct[codes[at]] = are_whole(pairs["dtype"].iloc[at], pairs["cast"].iloc[at])
    differ = numbers(frame, "rel_l2") if "rel_l2" in frame.columns else value
    found: Array = np.where(distinct[codes] & (differ > 0), np.inf, value)
    return found


def merge(sequences: Sequence[Sequence[Key]]) -> list[Key]:
    """One order for several sequences: the first one's; other keys follow the key that precedes them in theirs."""
    head: Key = ()
    follows: dict[Key, Key | None] = {head: None}
    for sequence in sequences:
        last = head
        for key in sequence:
            if key not in follows:
                follows[key], follows[last] = follows[last], key
            last = key
    merged = []
    at = follows[head]
    while at is not None:
        merged.append(at)
        at = follows[at]
    return merged


def _floor_by_dtype(frame: pd.DataFrame, value: str) -> float:
    """The floor for the coarsest dtype of these rows, including dtypes that were converted."""
    if value != "rel_l2" or "dtype" not in frame.columns:
        return DEFAULT_NOISE_FLOOR
    names = [str(name) for name in frame["dtype"].dropna().unique()]
    casts = list(frame["cast"].dropna().unique()) if "cast" in frame.columns else []
    if any("int8" in name for cast in casts for pair in cast_dtypes(cast) for name in pair):
        # A unit of 8-bit integers that represent fractions is about as coarse as one of bfloat16.
        names.append("bfloat16")
    return assumed_floor(names, casts)[0]


def first_divergent(
    frame: pd.DataFrame, *, value: str = "rel_l2", noise_floor: float | Literal["dtype"] | None = "dtype"
) -> pd.Series[Any] | None:
    """The first row, in execution order, that a noise floor does not explain.

    A row counts when it was measured (``compared`` or ``grafted``) and its ``value`` is above
    ``noise_floor`` or it has ``nonfinite_differ > 0``, and when its transform ``failed``. NaN is above
    no floor. With ``noise_floor=None`` the value does not count. Taps are ordered by step, then by the smallest
    ``order`` over their receiving ranks; within a tap rows keep their own order. The floor is a ratio for
    ``rel_l2`` and ``rel_diff`` and has the tensor's units for ``max_abs`` and ``mean_abs``; of ``cosine``, the distance
    from 1 is compared with it. For ``rel_l2``,
    ``"dtype"`` is the rounding of the coarsest dtype in the frame, 1e-5 for float32 and 2e-2 for bfloat16, so that no
    tap is named because it casts; for other values it is 1e-5.

    Returns the row (its ``name`` is the frame's index label), or None. Raises
    ValueError naming a column (name, order, status, ``value``) that the frame lacks, or for a floor below 0.

    >>> gl.plots.first_divergent(run.frame, noise_floor=1e-5) is None
    True
    """
    if noise_floor != "dtype":
        require_floor(noise_floor)
    if isinstance(frame, pd.DataFrame) and frame.empty:
        return None
    taps = group(frame, value)
    status = frame["status"].astype(str).to_numpy()
    floor = _floor_by_dtype(frame, value) if noise_floor == "dtype" else noise_floor
    found = apart(frame, distances_in(frame, value))
    mask = divergent(np.isin(status, MEASURED), status == "failed", found, _nonfinite(frame), floor)
    if not mask.any():
        return None
    sequence = np.lexsort((taps.row_order, taps.row_tap))
    return frame.iloc[int(sequence[mask[sequence]][0])]
