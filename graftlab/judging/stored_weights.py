"""Weights that the target stores in another form, such as the weight of a norm with the 1 that its code would add."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pandas as pd
import torch

from graftlab.base.tap_groups import group_of, kind_of
from graftlab.base.text import first_of
from graftlab.diffs.rounding import assumed_floor, roundoff
from graftlab.errors import GraftError
from graftlab.judging.verdict_runs import RunFilters, VerdictAbandoned, VerdictRuns
from graftlab.verdict.added import coarser_dtype, measured_rows

_MOST = 16 << 20
"""The most numbers of weights that are looked at."""
_OF_32_BITS = 1e-6


def stored_otherwise(runs: VerdictRuns, rows: Sequence[dict[str, Any]], threshold: float) -> dict[str, str]:
    """How the target's weights are made from the baseline's, by name, if they are right; empty if that is not proven.

    ``rows`` are those of all weights that differ, in a run whose results agree. All numbers of a weight must have one
    factor and one constant, equal in all layers, so that numbers which this call does not read have them too. Each must
    matter: with the baseline's weight, and all taps grafted, the output of its module differs.
    """
    names = {row["name"] for row in rows}
    modules = Counter((row["name"].rpartition(".")[0], row["rank"]) for row in rows)
    roundings = [roundoff(coarser_dtype(row)) for row in rows]
    # The rounding of 16 bits hides a wrong number.
    if not rows or max(roundings) > _OF_32_BITS or max(modules.values()) > 1:
        return {}
    if sum(row["numel"] for row in rows) > _MOST:
        return {}
    try:
        runs.lend_weights([*names], [*names])
        pairs = [runs.pair(row["name"], int(row["rank"]), 0, {"kind": "param"}) for row in rows]
        forms = [_form(*pair, 2 * rounding) for pair, rounding in zip(pairs, roundings, strict=True)]
        of_groups = {(group_of(row["name"]), form) for row, form in zip(rows, forms, strict=True)}
        if None in forms or len(of_groups) > len({group for group, _ in of_groups}):
            return {}
        grafted = runs.both("what each tap adds with the baseline's weights", RunFilters(b2t="True"))
    except GraftError as error:
        if isinstance(error, VerdictAbandoned) or runs.session.closed:
            raise
        return {}
    finally:
        runs.return_weights()
    if not {*modules} <= _moved(grafted, threshold):
        return {}
    return {row["name"]: str(form) for row, form in zip(rows, forms, strict=True)}


def text_on_stored(forms: Mapping[str, str]) -> list[str]:
    """A sentence on these weights."""
    groups = {group_of(name): form for name, form in forms.items()}
    if not groups:
        return []
    shown = first_of([f"{group} ({form})" for group, form in groups.items()])
    return [f"The target stores weights in another form: {shown}. What their modules compute from them agrees."]


def without_weights(compared: pd.DataFrame, names: Collection[str]) -> pd.DataFrame:
    """The rows of a run but those of these weights."""
    if not names:
        return compared
    of_weights = compared["tags"].map(lambda tags: kind_of(tags) == "param").astype(bool)
    return compared[~(compared["name"].isin([*names]) & of_weights)]


def _form(baseline: torch.Tensor, target: torch.Tensor, limit: float) -> str | None:
    """The factor and the constant that make the one weight from the other up to this error, in words, if they do."""
    if baseline.shape != target.shape or baseline.is_complex() or target.is_complex():
        return None
    ours, theirs = (each.detach().double().flatten() for each in (baseline, target))
    spread = ours - ours.mean()
    factor = float(spread @ theirs / (spread @ spread))
    if not math.isfinite(factor):
        return None
    # Rounding of a sum leaves a factor near 1, and a constant near a whole number.
    factor = next((near for near in (1.0, -1.0) if abs(factor - near) <= _NEAR), factor)
    add = float(theirs.mean() - factor * ours.mean())
    add = float(round(add)) if abs(add - round(add)) <= _NEAR else add
    error = (theirs - (factor * ours + add)).abs()
    # Of each number, because a large one would excuse all others.
    if not factor or (factor, add) == (1.0, 0.0) or not (error <= limit * ((factor * ours).abs() + abs(add))).all():
        return None
    how = [f"times {factor:.6g}"] if factor != 1 else []
    how += [f"{'plus' if add > 0 else 'minus'} {abs(add):.6g}"] if add else []
    return f"the baseline's {' '.join(how)}"


_NEAR = 1e-5


def _moved(grafted: pd.DataFrame, threshold: float) -> set[tuple[str, int]]:
    """The taps, with their ranks, that differ by more than rounding in a run in which every tap was grafted."""
    found = set()
    for row in measured_rows(grafted):
        if row["rel_l2"] is not None and row["rel_l2"] > threshold * assumed_floor([row["dtype"]])[0]:
            found.add((row["name"], row["rank"]))
    return found
