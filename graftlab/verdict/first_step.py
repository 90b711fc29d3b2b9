"""The first step in which two jobs differ, from the rows of the steps before a verdict, and what that says."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tap_groups import described, group_of, is_data, kind_of, kind_of_group
from graftlab.base.text import counted, first_of, numbered
from graftlab.rows.schema import MEASURED
from graftlab.taps.watch import ROOT
from graftlab.verdict.added import coarser_dtype, largest_over_rms, ratio, records
from graftlab.verdict.gradient_scaling import is_scaled
from graftlab.verdict.returned_values import AccumulatedFloors

_GRADIENTS = ("grad", "param_grad")
_ROUTINE = ("optimizer", "param")
NOT_JUDGED_SINCE = (
    "The weights have diverged since then, so the code that uses them is not judged. To judge it, pass "
    "graft_weights=True, which gives the target the baseline's weights, permanently."
)


@dataclass(frozen=True)
class FirstDifference:
    """The first step in which jobs differ. ``sentence`` describes it.

    If ``is_update``, everything agrees up to an optimizer's update, whose results differ: weights that have diverged
    since then do not incriminate the code that uses them. Otherwise ``group`` is that of the first tap that differs.
    """

    step: int
    sentence: str
    is_update: bool
    group: str | None = None


def first_difference(
    rows: pd.DataFrame, floors: AccumulatedFloors, threshold: float, ranks: tuple[int, int] = (1, 1)
) -> FirstDifference | None:
    """Find the first step in which a tap differs by more than rounding, before any graft; None if none does.

    ``ranks`` are the numbers of ranks of both sides: those that share a batch have larger gradients of values, by a
    factor that the average of the weights' gradients undoes. None also if the first step with rows differs and its
    weights do or are not tapped, since nothing is then known of what came before.
    """
    factor = ranks[1] / ranks[0]
    before: list[tuple[int, list[dict[str, Any]]]] = []
    largest = 0.0
    for step, of_step in _steps_without_grafts(rows):
        own = [
            floors.of_tap(row["name"], kind_of(row["tags"]), coarser_dtype(row), largest_over_rms(row))
            for row in of_step
        ]
        judged = [
            (row, ratio(row, floor))
            for row, floor in zip(of_step, own, strict=True)
            if not _is_of_a_part(row, factor, threshold * floor.rel_l2)
        ]
        measured, ratios = [row for row, _ in judged], [each for _, each in judged]
        over = [row for row, each in judged if each > threshold]
        if not all(map(_is_setting, over)):
            # Rounding that training amplifies grows slowly, from step to step.
            # A tap without numbers has no ratio.
            is_jump = max(each for each in ratios if each == each) > _JUMP * largest
            return _described(step, over, before, measured) if is_jump else None
        # A setting may differ from the first step on, and shows in the results of the update.
        largest = max(
            (each for row, each in zip(measured, ratios, strict=True) if each == each and not _is_setting(row)),
            default=0.0,
        )
        before.append((step, measured))
    return None


_JUMP = 10.0


def _is_of_a_part(row: dict[str, Any], factor: float, limit: float) -> bool:
    """Whether a row is the gradient of a value that this rank has for its part of the batch alone."""
    return factor != 1 and kind_of(row["tags"]) == "grad" and is_scaled(row, factor, limit)


def _is_setting(row: dict[str, Any]) -> bool:
    return kind_of(row["tags"]) == "optimizer" and is_data(row["tags"])


def _steps_without_grafts(rows: pd.DataFrame) -> Iterator[tuple[int, list[dict[str, Any]]]]:
    """The measured rows of each step before the first graft, which may have changed what followed."""
    for step, of_step in rows.groupby("step", sort=True):
        measured = of_step[of_step["status"].isin(MEASURED)]
        if (measured["status"] == "grafted").any():
            return
        if len(measured):
            yield int(str(step)), records(measured.sort_values("order", kind="stable"))


def _described(
    step: int,
    over: Sequence[dict[str, Any]],
    before: Sequence[tuple[int, list[dict[str, Any]]]],
    measured: Sequence[dict[str, Any]],
) -> FirstDifference | None:
    settings = [row for row in over if _is_setting(row)]
    weights = [row for row in over if kind_of(row["tags"]) == "param" and is_data(row["tags"])]
    updated = [row for row in over if kind_of(row["tags"]) in _ROUTINE and not is_data(row["tags"])]
    computed = [row for row in over if kind_of(row["tags"]) not in _ROUTINE]
    because = f" (its setting {settings[0]['name']} differs)" if settings else ""
    if updated and not (computed or weights):
        what = _what(measured)
        sentence = (
            f"In step {step}, the first in which the jobs differ, {what} agree, and the results of the optimizer's "
            f"update do not, first {updated[0]['name']} {_by(updated[0])}: the update itself differs{because}."
        )
        return FirstDifference(step, sentence, True)
    if not before:
        has_weights = any(kind_of(row["tags"]) == "param" and is_data(row["tags"]) for row in measured)
        if weights or not computed or not has_weights:
            return None
        where = _place(computed[0])
        sentence = (
            f"In step {step}, the first that was compared, the weights agree, and the first tap that differs is "
            f"{where}."
        )
        return FirstDifference(step, sentence, False, _group(computed[0]))
    agreed = f"The jobs agree in {numbered('step', [each for each, _ in before])}"
    last, rows_of_last = before[-1]
    if weights and last == step - 1:
        has_gradients = any(kind_of(row["tags"]) in _GRADIENTS for row in rows_of_last)
        cause = "the update" if has_gradients else "the update, or gradients that no tap shows"
        sentence = (
            f"{agreed} ({_what(rows_of_last)}, {counted(len(rows_of_last), 'row')} of step {last}), and diverge after "
            f"one update: step {step} begins with a different {weights[0]['name']} {_by(weights[0])}. The cause is "
            f"{cause}{because}."
        )
        return FirstDifference(step, sentence, True)
    if weights or not computed:
        return None
    where = _place(computed[0])
    sentence = f"{agreed}, and differ from step {step} on, first at {where}."
    return FirstDifference(step, sentence, False, _group(computed[0]))


# How much more a module may add than its weights have diverged, relative to each.
_AMPLIFIES = 10.0
_MOST_SHOWN = 6


def explained_by_weights(
    frame: pd.DataFrame, named: Sequence[str], weights: Sequence[Mapping[str, Any]], threshold: float
) -> list[str]:
    """The named groups of values that add only as much as the divergence of their own modules' weights explains.

    ``frame`` is that of a verdict, ``weights`` are the rows of the weights that differ. A weight is its module's own,
    or that of the next module outside of it that has a tap.
    """
    values = frame[frame["group"].map(lambda group: kind_of_group(group) is None).astype(bool)]
    tapped = {*values["name"]}
    diverged: dict[str, float] = {}
    for row in weights:
        owner = row["name"].rpartition(".")[0]
        while owner and owner not in tapped:
            owner = owner.rpartition(".")[0]
        by = math.inf if row["nonfinite_differ"] else row["rel_l2"]
        diverged[owner or ROOT] = max(by, diverged.get(owner or ROOT, 0.0))
    over = values[values["ratio"] > threshold]
    allowed = np.array([_AMPLIFIES * diverged.get(name, 0.0) for name in over["name"]])
    beyond = {*over.loc[~(over["added"] <= allowed), "group"]}
    found = {*over["group"]} - beyond
    return [group for group in named if group in found]


def on_diverged_weights(groups: Sequence[str]) -> str:
    """A sentence on groups that are not judged, because their weights have diverged."""
    # A group of members has no name.
    names = ["members of the model" if group == "*" else group for group in groups]
    return (
        "Not judged, because of weights that have diverged since then, which may explain what is added: "
        f"{first_of(names, _MOST_SHOWN)}. graft_weights=True first gives the target the baseline's weights, "
        "permanently."
    )


def _group(row: Mapping[str, Any]) -> str:
    return group_of(row["name"], row["tags"])


def _place(row: dict[str, Any]) -> str:
    kind = kind_of(row["tags"])
    name = described(f"{row['name']}@{kind}") if kind in _GRADIENTS else row["name"]
    return f"{name} {_by(row)}"


def _by(row: dict[str, Any]) -> str:
    return "(not finite on one side)" if row["nonfinite_differ"] else f"(by {row['rel_l2']:.2g})"


def _what(rows: Sequence[dict[str, Any]]) -> str:
    kinds = {kind_of(row["tags"]) for row in rows}
    return "values and gradients" if kinds & {*_GRADIENTS} else "values"
