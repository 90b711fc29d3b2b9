"""Taps that differ by a factor which the target undoes, as where one side scales an embedding in its module and the
other in the code behind it.

The baseline's value there is wrong for the target, and would be scaled twice. So what follows looks wrong too, and such
a tap is left out where that clears other taps and names none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from typing import Any

import torch

from graftlab.base.tap_groups import filter_of, group_of, kind_of, kind_of_group
from graftlab.base.tensor_bytes import real_parts
from graftlab.base.text import first_of
from graftlab.diffs.rounding import roundoff
from graftlab.errors import SessionError
from graftlab.judging.evidence import Evidence
from graftlab.judging.verdict_runs import RunFilters, VerdictRuns, kept_pair
from graftlab.verdict.added import coarser_dtype, measured_rows

# The distance from the baseline's value times the factor (rel_l2), in roundings of the dtype.
_ROUNDINGS = 4
_MOST_SHOWN = 4

Factors = Mapping[str, float]
"""By the name of a tap, what the target's value is of the baseline's."""


def scaled_taps(runs: VerdictRuns, evidence: Evidence, named: Collection[str]) -> dict[str, Factors]:
    """The named groups, with the factors of their taps, whose taps differ by nothing else from equal inputs.

    Empty if no second group of values is named, which the graft of such a tap might explain. Makes a run if there may
    be such groups, and one before it if the inputs differ: values from other inputs, such as other tokens, are no
    multiples.
    """
    values = [group for group in named if kind_of_group(group) is None]
    if len(values) < 2 or runs.recorded:
        return {}
    rows = measured_rows(evidence.compared)
    given = {group for group in named if kind_of_group(group) == "input"}
    inputs = filter_of(
        ((row["name"], "input") for row in rows if group_of(row["name"], row["tags"]) in given), whole_groups=False
    )
    if inputs is not None:
        rows = measured_rows(runs.both("what differs from equal inputs", RunFilters(b2t=inputs, compare="True")))
    calls: dict[str, list[Mapping[str, Any]]] = {group: [] for group in values}
    for row in rows:
        group = group_of(row["name"], row["tags"])
        if group in calls and kind_of(row["tags"]) is None:
            calls[group].append(row)
    likely = {group: each for group, each in calls.items() if each and all(map(_may_be_scaled, each))}
    keep = filter_of((row["name"], None) for each in likely.values() for row in each)
    if keep is None:
        return {}
    runs.both("whether taps differ by a factor", RunFilters(b2t=inputs, compare="True", keep=keep))
    found: dict[str, Factors] = {}
    for group, each in likely.items():
        factors = [(row["name"], _factor(runs, row)) for row in each]
        # On every rank, and in every call of a tap.
        if all(factor for _, factor in factors):
            found[group] = dict(factors)
    return found


def _may_be_scaled(row: Mapping[str, Any]) -> bool:
    """Whether the root mean squares of both sides explain how far a tap's values are apart."""
    if row["rel_l2"] is None or row["nonfinite_differ"] or not roundoff(coarser_dtype(row)):
        return False
    rms = [math.hypot(row[f"mean_{side}"], row[f"std_{side}"]) for side in ("target", "baseline")]
    if not all(rms):
        return False
    apart = abs(1 - rms[0] / rms[1])
    # A factor of less than one percent may be rounding, and the run with the tensors is exact.
    return apart > 0.01 and abs(row["rel_l2"] - apart) <= 0.02 * apart


def _factor(runs: VerdictRuns, row: Mapping[str, Any]) -> float:
    """What the target's value is of the baseline's; zero if it is no multiple, or the pair was not kept."""
    try:
        expected, found = (real_parts(each).double() for each in kept_pair(runs, row, row["in_run"]))
    except SessionError:
        # A pair that did not fit the budget proves nothing.
        return 0.0
    size = float((expected * expected).sum())
    factor = float((expected * found).sum()) / size if size else 0.0
    off = float(torch.linalg.vector_norm(found - factor * expected))
    limit = _ROUNDINGS * roundoff(coarser_dtype(row)) * abs(factor) * math.sqrt(size)
    return factor if off <= limit else 0.0


def is_undone(before: Collection[str], without: Collection[str], group: str) -> bool:
    """Whether a group's factor is undone, from the groups that are named with it and without it.

    If the target lacks the factor, what follows is right only with the baseline's value, and is named without it.
    """
    return {*without} < {*before} - {group}


def factors_not_compared(undone: Mapping[str, Factors]) -> list[str]:
    """A sentence on the taps that were left out."""
    if not undone:
        return []
    taps = [f"{name} ({factor:.6g} times)" for each in undone.values() for name, factor in each.items()]
    return [
        f"{first_of(taps, _MOST_SHOWN)}: the target's value is a multiple of the baseline's, and the code behind it "
        "makes up for that, as where one side scales an embedding later. What follows is judged from the target's own "
        "value."
    ]
