"""Checks whether both sides have the same inputs, weights and settings, before any code is blamed."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tap_groups import group_of, in_layers, is_data, is_output, kind_of
from graftlab.base.text import first_of, listed, numbered
from graftlab.diffs.rounding import assumed_floor, roundoff
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import coarser_dtype, records, rows_where
from graftlab.verdict.optimizer_settings import NO_SETTINGS, SettingsDifference
from graftlab.verdict.quantised_modules import is_dequantised, is_wrongly_quantised, quantised_pair

BEGINNINGS = {
    "input": "The inputs already differ",
    "param": "The weights already differ",
    "optimizer": "The optimizer's settings already differ",
}
"""How the sentence on each kind of data begins."""
_MOST_SHOWN = 6
# The angles of the last positions in a table are off by more than those of most.
_OF_ONE_NUMBER = 10
# The roundoff of float32 is below, those of bfloat16 and float16 are above.
_OF_LOW_PRECISION = 1e-5


def data_rows(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of weights and settings in the first step. In later steps they are computed."""
    if not len(frame):
        return frame
    return rows_where(frame, _is_data(frame) & (frame["step"] == frame["step"].min()))


def without_data(frame: pd.DataFrame) -> pd.DataFrame:
    """All other rows."""
    if not len(frame):
        return frame
    return rows_where(frame, ~_is_data(frame))


@dataclass(frozen=True)
class RunData:
    """The rows of one run that show both sides' inputs, weights and settings, as rows of one step.

    Grafted weights are equal from then on, so the rows are those of the run's first step. ``grafted_from`` is the step
    of the first such graft.
    """

    rows: pd.DataFrame
    grafted_from: int | None


def data_of_run(run: pd.DataFrame, compared: pd.DataFrame, grafted: pd.DataFrame) -> RunData:
    """The data of a run, from the rows of a step without grafts and of one with every tap grafted.

    The former may be empty. Rows of later steps do not count.
    """
    first = compared if len(compared) else grafted
    measured = run[run["status"].isin(MEASURED) & (run["step"] <= grafted["step"].max())]
    data = measured[_is_data(measured)]
    written = data.loc[data["status"] == "grafted", "step"]
    weights = data[data["step"] == data["step"].min()] if len(written) else first[_is_data(first)]
    rows = pd.concat([weights, without_data(first)]).assign(step=0)
    return RunData(rows, int(written.min()) if len(written) else None)


def _is_data(frame: pd.DataFrame) -> pd.Series[bool]:
    return pd.Series(np.fromiter(map(is_data, frame["tags"]), bool, len(frame)), index=frame.index)


def input_names(frame: pd.DataFrame) -> list[str]:
    """The taps of the model's inputs: those of kind ``input``, and integers before all computation.

    Tokens, positions and masks are whole numbers or booleans that are tapped before the first floating-point number.
    Without such a number, whole numbers may be computed ones, as those that a model returns are. ``frame`` is in
    execution order.
    """
    found: dict[str, None] = {}
    rows = records(without_data(frame), "name", "tags", "status", "dtype", "cast")
    rounds = [roundoff(coarser_dtype(row)) > 0 for row in rows]
    first = rounds.index(True) if any(rounds) else 0
    for place, row in enumerate(rows):
        is_early = place < first and row["status"] in MEASURED and not is_output(row["name"])
        if kind_of(row["tags"]) == "input" or is_early:
            found[row["name"]] = None
    return list(found)


def inputs_of_later_calls(frame: pd.DataFrame) -> pd.Series[bool]:
    """Which rows show inputs that follow a value of the same step: another code than the model's has computed them.

    That is the loop between two calls of a model, or what comes between an encoder and its decoder. ``frame`` is in
    execution order.
    """
    first: dict[tuple[int, int], int] = {}
    of_input = []
    for row in records(frame, "step", "rank", "order", "tags", "status", "dtype", "cast"):
        place, order, kind = (row["step"], row["rank"]), row["order"], kind_of(row["tags"])
        of_input.append((kind == "input", place, order))
        if kind is None and row["status"] in MEASURED and roundoff(coarser_dtype(row)) > 0:
            first[place] = min(order, first.get(place, order))
    later = [is_input and order > first.get(place, math.inf) for is_input, place, order in of_input]
    return pd.Series(np.array(later, bool), index=frame.index)


def computed_between_calls(compared: pd.DataFrame, grafted: pd.DataFrame, threshold: float) -> set[str]:
    """The inputs that first agree, and in a later call differ although everything before has the baseline's values.

    So the code between the calls computes them differently. ``compared`` are rows of a run without grafts.
    """
    found: set[str] = set()
    for frame, of_later in ((grafted, True), (compared, False)):
        chosen = rows_where(frame, inputs_of_later_calls(frame) == of_later) if len(frame) else frame
        rows = records(rows_where(chosen, chosen["status"].isin(MEASURED)))
        differing = {row["name"] for row in rows if kind_of(row["tags"]) == "input" and _differs(row, threshold)}
        found = differing if of_later else found - differing
    return found


BELOW = "The code that uses them is judged below."
WITH_THE_BASELINES = "Everything below was measured with the baseline's weights."
AGREES_WITH_THE_BASELINES = "With the baseline's weights the target agrees."
"""The ending of a sentence on weights if each side kept its own, and if the target had the baseline's."""


def differing_data(
    compared: pd.DataFrame,
    threshold: float,
    grafted: pd.DataFrame | None = None,
    *,
    of_weights: str = BELOW,
    settings: SettingsDifference = NO_SETTINGS,
) -> list[str]:
    """A sentence for each kind of data that differs between the sides, in a run without grafts.

    Weights of different dtypes, or that were merged, may be rounded: they differ above ``threshold`` times one
    rounding, and in one dtype of low precision above one, because nothing accumulates in a weight. ``of_weights``
    follows the sentence on weights. ``settings`` is the difference of the optimizers' settings.

    Inputs of later steps may be computed, such as a decode's tokens. They count only if they also differ in
    ``grafted``, the rows of a run in which every tap had the baseline's values.
    """
    sentences = list(settings.lacking)
    for kind, groups in _differing(compared, threshold, grafted).items():
        # Settings that differ only because one side lacks weights are reported by that.
        shown = {group: rows for group, rows in groups.items() if settings.values.get(group) != ""}
        if shown:
            ending = of_weights if kind == "param" else BELOW
            sentences.append(f"{BEGINNINGS[kind]}: {_listed(shown, settings.values)}. {ending}")
            sentences += misplaced_weights(compared, threshold) if kind == "param" else []
    return sentences


def misplaced_weights(compared: pd.DataFrame, threshold: float) -> list[str]:
    """A sentence on weights in whose place the target has another weight of the baseline.

    Two tensors are taken for one if their means and standard deviations agree to 9 digits, and their extremes are
    equal. A tensor of one value says nothing.
    """
    rows = [row for row in records(data_rows(compared)) if _kind(row) == "param" and row["status"] in MEASURED]
    of_baseline: dict[tuple[Any, ...], str] = {}
    for row in rows:
        if row["std_baseline"]:
            of_baseline.setdefault(_traits(row, "baseline"), row["name"])
    found: dict[str, None] = {}
    for row in rows:
        if row["std_target"] and _differs(row, threshold):
            traits = _traits(row, "target")
            origin = of_baseline.get(traits, row["name"])
            # A weight of the same numbers in another order, such as its transpose, is in its place.
            is_reordered = row["std_baseline"] and traits == _traits(row, "baseline")
            if origin != row["name"] and not is_reordered:
                found[f"the target's {row['name']} is the baseline's {origin}"] = None
    if not found:
        return []
    return [f"By their statistics, weights are in the wrong place: {listed([*found], most=_MOST_SHOWN)}."]


def _traits(row: Mapping[str, Any], side: str) -> tuple[Any, ...]:
    # The sums of a transposed tensor have another order.
    mean, std = (float(f"{row[f'{name}_{side}']:.9g}") for name in ("mean", "std"))
    return row["rank"], row["numel"], mean, std, row[f"min_{side}"], row[f"max_{side}"]


def differing_weights(compared: pd.DataFrame, threshold: float) -> dict[str, str]:
    """The groups of weights that differ between the sides, each with its name, layers and difference in words."""
    return {group: _in_words(group, rows) for group, rows in _weights(compared, threshold).items()}


def weights_to_lend(compared: pd.DataFrame, threshold: float) -> list[dict[str, Any]]:
    """The row that differs the most of each group of differing weights; none if a run may change weights itself.

    It may if it has gradients of weights, updates or more than one step.
    """
    changing = [kind_of(tags) in ("param_grad", "optimizer") or "updated" in tags for tags in compared["tags"]]
    if any(changing) or compared["step"].nunique() > 1:
        return []
    found = []
    for rows in _weights(compared, threshold).values():
        # The other side's values cannot be put into codes.
        rows = [row for row in rows if quantised_pair(row) is None]
        if not rows:
            continue
        worst = max(rows, key=lambda row: math.inf if row["nonfinite_differ"] else row["rel_l2"])
        found.append(worst)
    return found


def differing_rows(compared: pd.DataFrame, threshold: float) -> list[dict[str, Any]]:
    """The rows of all weights that differ."""
    return [row for rows in _weights(compared, threshold).values() for row in rows]


def with_data_of(compared: pd.DataFrame, plain: pd.DataFrame) -> pd.DataFrame:
    """The rows of a run with lent weights, but the rows of weights from ``plain``, in which each side had its own."""
    return pd.concat([data_rows(plain).assign(step=compared["step"].min()), compared])


_RowsByGroup = dict[str, list[dict[str, Any]]]


def _weights(compared: pd.DataFrame, threshold: float) -> _RowsByGroup:
    """The rows of weights that differ, by group."""
    rows = [("param", row) for row in records(data_rows(compared)) if _kind(row) == "param"]
    return _by_kind(rows, threshold).get("param", {})


def _differing(compared: pd.DataFrame, threshold: float, grafted: pd.DataFrame | None) -> dict[str, _RowsByGroup]:
    """The rows of data that differ, by kind and group."""
    names = set(input_names(compared))
    first = rows_where(compared, compared["step"] == compared["step"].min()) if len(compared) else compared
    if grafted is not None and len(grafted) and len(first):
        # In the first step's later calls they may differ because of what comes before.
        first = rows_where(first, ~inputs_of_later_calls(first))
    data = data_rows(compared)
    inputs = rows_where(first, first["name"].isin(names) & ~first.index.isin(data.index))
    later = [] if grafted is None else _later_inputs(grafted, names)
    rows = [
        *(("input", row) for row in (*records(inputs), *later)),
        *((_kind(row), row) for row in records(data)),
        *(("optimizer", row) for row in _later_settings(compared)),
    ]
    return _by_kind(rows, threshold)


def _by_kind(rows: Iterable[tuple[str, dict[str, Any]]], threshold: float) -> dict[str, _RowsByGroup]:
    """Those rows that differ, by kind and group; with ``alone``, their ranks, where it agrees on others."""
    differing: dict[str, _RowsByGroup] = {}
    ranks: dict[tuple[str, str], set[int]] = {}
    for kind, row in rows:
        if row["status"] in MEASURED:
            ranks.setdefault((kind, row["name"]), set()).add(row["rank"])
            if _differs(row, threshold):
                differing.setdefault(kind, {}).setdefault(group_of(row["name"]), []).append(row)
    for kind, groups in differing.items():
        for group, found in groups.items():
            alone = sorted({row["rank"] for row in found})
            if len(alone) < len(set().union(*(ranks[kind, row["name"]] for row in found))):
                groups[group] = [{**row, "alone": alone} for row in found]
    return differing


def _later_settings(compared: pd.DataFrame) -> list[dict[str, Any]]:
    """The settings of optimizers after the first step, which a schedule may set, with their step as ``later``."""
    first = compared["step"].min() if len(compared) else 0
    rows = rows_where(compared, _is_data(compared) & (compared["step"] > first))
    return [{**row, "later": int(row["step"] - first)} for row in records(rows) if _kind(row) == "optimizer"]


def _later_inputs(grafted: pd.DataFrame, names: set[str]) -> list[dict[str, Any]]:
    """Inputs after the first step, with their step counted from 0 as ``later``."""
    if not len(grafted):
        return []
    first = grafted["step"].min()
    rows = rows_where(grafted, (grafted["step"] > first) & grafted["name"].isin(names) & ~_is_data(grafted))
    return [
        {**row, "later": int(row["step"] - first)} for row in records(rows) if kind_of(row["tags"]) in (None, "input")
    ]


def _kind(row: Mapping[str, Any]) -> str:
    return str(row["tags"]["kind"])


def _differs(row: Mapping[str, Any], threshold: float) -> bool:
    if (pair := quantised_pair(row)) is not None:
        # Codes without their scale are no values.
        return is_dequantised(row) and is_wrongly_quantised(row, pair)
    if row["nonfinite_differ"]:
        return True
    distance, rounding = row["rel_l2"], roundoff(coarser_dtype(row))
    if not distance:
        return False
    if row["cast"] is None and rounding > _OF_LOW_PRECISION and kind_of(row["tags"]) == "param":
        largest = max(abs(row["min_baseline"]), abs(row["max_baseline"]))
        # A single row may differ a lot, and still be small beside all others.
        return bool(distance > rounding or row["max_abs"] > 2.02 * rounding * largest)
    return bool(distance > threshold * rounding)


def nearly_equal_weights(compared: pd.DataFrame, threshold: float) -> str | None:
    """A sentence if weights differ, and all of them by little more than one rounding, though not of 16 bits.

    Two sides that compute a table differently, such as that of sinusoidal positions, have such weights.
    """
    groups = _weights(compared, threshold)
    if not groups or not all(_nearly_equal(row) for rows in groups.values() for row in rows):
        return None
    return (
        f"{BEGINNINGS['param']}: {_listed(groups, {})}. That is little more than rounding, and nothing else differs. "
        "A table that each side computes by itself may round so, and so may merged weights, but a slightly wrong "
        "constant looks the same. Give both sides the same numbers to find out."
    )


def _nearly_equal(row: Mapping[str, Any]) -> bool:
    if row["cast"] is not None or row["nonfinite_differ"] or quantised_pair(row) is not None:
        return False
    limit, _ = assumed_floor([row["dtype"]])
    largest = max(abs(row["min_baseline"]), abs(row["max_baseline"]))
    # One wrong number among many moves the norm by little.
    is_near = row["rel_l2"] <= limit and row["max_abs"] <= _OF_ONE_NUMBER * limit * largest
    return bool(is_near and 0 < roundoff(row["dtype"]) <= _OF_LOW_PRECISION)


def unequal_weights(compared: pd.DataFrame, differing: Collection[str]) -> list[str]:
    """A sentence on weights of one dtype that are not bit-equal, without those in ``differing``."""
    unequal: dict[str, list[dict[str, Any]]] = {}
    for row in records(data_rows(compared)):
        if _kind(row) == "param" and row["status"] in MEASURED and row["cast"] is None and row["rel_l2"]:
            unequal.setdefault(group_of(row["name"]), []).append(row)
    left = {group: rows for group, rows in unequal.items() if group not in differing}
    if not left:
        return []
    return [f"Weights that are not bit-equal, though within rounding: {_listed(left, {})}."]


def _listed(groups: Mapping[str, Sequence[Mapping[str, Any]]], values: Mapping[str, str]) -> str:
    parts = [
        f"{group} ({values[group]})" if group in values else _in_words(group, rows) for group, rows in groups.items()
    ]
    return first_of(parts, _MOST_SHOWN)


def _in_words(group: str, rows: Sequence[Mapping[str, Any]]) -> str:
    where = in_layers(row["name"] for row in rows)
    steps = sorted({row.get("later", 0) for row in rows})
    if 0 not in steps:
        where += f" in {numbered('step', steps)}"
    if alone := rows[0].get("alone"):
        where += f" on {numbered('rank', alone)} alone"
    if any(row["nonfinite_differ"] for row in rows):
        size = "not finite on one side"
    else:
        size = f"rel_l2 {max(row['rel_l2'] for row in rows):.2g}"
    return f"{group}{where} ({size})"
