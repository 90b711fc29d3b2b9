"""Weights that the target stores in another form, such as the weight of a norm with the 1 that its code would add."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
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
_BETTER = 0.01
"""A weight in another form is right if its module is off by less than this part of what the baseline's would cause."""


def stored_otherwise(
    runs: VerdictRuns, rows: Sequence[dict[str, Any]], threshold: float, *, agrees: bool
) -> dict[str, str]:
    """How the target's weights are made from the baseline's, by name, if they are right; empty if that is not proven.

    ``rows`` are those of all weights that differ; ``agrees`` says that the results agree. All numbers of a weight must
    have one form, equal in all layers, so that numbers which this call does not read have it too. Each must matter:
    with the baseline's weight, and all taps grafted, the output of its module differs. If the results differ, it must
    agree with the target's own weight, or nearly so; weights for which this is not so are left out.
    """
    if not rows or sum(row["numel"] for row in rows) > _MOST:
        return {}
    names = [*{row["name"]: None for row in rows}]
    try:
        runs.lend_weights(names, names)
        formed = _formed(runs, rows)
        if not formed or (agrees and len(formed) < len(rows)):
            return {}
        moved = _moved(runs.both("what each tap adds with the baseline's weights", RunFilters(b2t="True")), threshold)
        runs.return_weights()
        own: dict[tuple[str, int], float] = {}
        if not agrees:
            own = _moved(runs.both("what each tap adds with its own weights", RunFilters(b2t="True")), threshold)
    except GraftError as error:
        if isinstance(error, VerdictAbandoned) or runs.session.closed:
            raise
        return {}
    finally:
        runs.return_weights()
    # Rounding may be amplified before a module, and its code may be slightly wrong, but not with the right weight.
    # If the baseline's weight makes the output far too large, or not finite, this counts as an error of 100 %.
    needed = {tap for tap, off in moved.items() if own.get(tap, 0.0) <= _BETTER * min(off, 1.0)}
    unproven = {group_of(row["name"]) for row, _ in formed if _module(row) not in needed}
    if agrees and unproven:
        return {}
    return {row["name"]: form for row, form in formed if group_of(row["name"]) not in unproven}


def _formed(runs: VerdictRuns, rows: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The weights of groups that have one form throughout, if no other weight of their modules differs."""
    modules = Counter(map(_module, rows))
    found: dict[str, list[tuple[dict[str, Any], str | None]]] = defaultdict(list)
    for row in rows:
        pair = runs.pair(row["name"], int(row["rank"]), 0, {"kind": "param"})
        alone = modules[_module(row)] == 1
        found[group_of(row["name"])].append((row, _form(*pair, 2 * roundoff(coarser_dtype(row))) if alone else None))
    return [
        (row, form)
        for group in found.values()
        if len({form for _, form in group}) == 1
        for row, form in group
        if form is not None
    ]


def _module(row: Mapping[str, Any]) -> tuple[str, int]:
    return row["name"].rpartition(".")[0], row["rank"]


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
    """What makes the one weight from the other up to this error, in words: a factor and a constant, or a roll."""
    if baseline.shape != target.shape or baseline.is_complex() or target.is_complex():
        return None
    # torch compares no float8 with another dtype.
    ours, theirs = (each.detach().double() for each in (baseline, target))
    if (rolled := _roll(ours, theirs)) is not None:
        return f"the baseline's rolled by {rolled[0]} along dim {rolled[1]}"
    # The rounding of 16 bits hides a wrong number.
    if limit > 2 * _OF_32_BITS:
        return None
    ours, theirs = ours.flatten(), theirs.flatten()
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


def _roll(baseline: torch.Tensor, target: torch.Tensor) -> tuple[int, int] | None:
    """How far, and along which dim, the one weight is the other rolled, as where a fused one has its two parts in the
    other order.
    """
    for dim, size in enumerate(baseline.shape):
        first = baseline.narrow(dim, 0, 1)
        alike = (target == first).movedim(dim, 0).reshape(size, -1).all(1).nonzero().flatten().tolist()
        # Equal rows, such as zeros, show no order.
        if len(alike) == 1 and 0 < alike[0] < size and torch.equal(baseline.roll(alike[0], dim), target):
            return alike[0], dim
    return None


def _moved(grafted: pd.DataFrame, threshold: float) -> dict[tuple[str, int], float]:
    """How far the taps, by name and rank, differ in a run in which every tap was grafted, if by more than rounding."""
    found: dict[tuple[str, int], float] = {}
    for row in measured_rows(grafted):
        limit = threshold * assumed_floor([row["dtype"]])[0]
        off = math.inf if row["nonfinite_differ"] else row["rel_l2"]
        if off is not None and off > limit:
            tap = row["name"], row["rank"]
            found[tap] = max(off, found.get(tap, 0.0))
    return found
