"""What rounding moves in one call, such as a router's choice or a state, and a later call inherits through a cache."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from graftlab.base.tap_groups import is_output, kind_of
from graftlab.base.text import first_of
from graftlab.control.verdicts import Verdict
from graftlab.diffs.rounding import DTYPES_OF_16_BITS, roundoff
from graftlab.verdict.added import NOT_NAMED, records
from graftlab.verdict.findings import Findings
from graftlab.verdict.model_data import BEGINNINGS
from graftlab.verdict.rounds_differently import LABEL as ROUNDS_DIFFERENTLY
from graftlab.verdict.wording import NOT_CHECKED

# A query may read mainly the few tokens that were moved, so it differs by more than their whole sequence. A state sums
# what rounding moves in each token.
_MOST = 10.0


class InheritedRounding:
    """How far rounding alone had moved the taps of each module in the calls so far (rel_l2).

    What those calls wrote, such as a cache, is off likewise, and so is what reads it in the same modules. If it was not
    compared, a verdict on a later call may find nothing but that. Taps of 16 bits count if they were off by far more
    than rounding and agreed from equal inputs, as after a flipped choice; those of more bits always do.

    The scripts' own code between two calls, such as a sampler, may compute the later one's inputs from rounded results.
    """

    def __init__(self) -> None:
        self._moved: dict[tuple[str, bool], float] = {}
        self._results: set[float] = set()
        """How far each result was apart in those calls."""

    def add(self, compared: Verdict) -> None:
        """Add a call. One in which something is named proves nothing of rounding."""
        found = compared.findings
        is_unexplained = found.unexplained and not found.is_rounding_possible
        if {*found.named} - {*found.rounding.groups} or is_unexplained or found.data:
            return
        for row in records(found.frame):
            error = row["error"]
            # Without a finite error, as beside zeros alone, nothing is known of rounding.
            if kind_of(row["tags"]) is not None or error is None or not math.isfinite(error):
                continue
            if is_output(row["name"]):
                self._results.add(error)
            if _is_rounding(row, compared):
                self._moved[_part(row)] = max(self._before(row), error)

    def without_earlier_results(self, found: Findings) -> Findings:
        """The findings without the sentence on inputs, if each that differs is a result of an earlier call as it was.

        An input that is off by exactly as much as such a result, in all digits, is that result: code between the calls
        that computes anything from it, on one side or on both, rounds differently.
        """
        inputs = self._rounded_inputs(found)
        if not inputs or not all(row["error"] in self._results for row in inputs):
            return found
        groups = {row["group"] for row in inputs}
        frame = found.frame.copy()
        frame.loc[frame["group"].isin(groups), "label"] = "inherited"
        return replace(found, frame=frame, data=(), inputs=[each for each in found.inputs if each not in groups])

    def doubts(self, compared: Verdict) -> list[str]:
        """Sentences on why a call that differs may be right; none if it cannot be."""
        found = compared.findings
        inputs = self._rounded_inputs(found)
        if found.unexplained or found.following or (found.data and not inputs):
            return []
        others = [row for row in _named(found) if kind_of(row["tags"]) != "input"]
        doubts = self._on_taps(found, others, moved_anyway=bool(inputs)) if others or not inputs else []
        if inputs and (doubts or not others):
            doubts = self._after_rounded_results(max(inputs, key=lambda row: row["added"]), bool(others)) + doubts
        return doubts

    def _on_taps(self, found: Findings, named: Sequence[dict[str, Any]], *, moved_anyway: bool) -> list[str]:
        """Sentences on why what is named may be right. ``moved_anyway`` if rounded inputs move the output."""
        if found.origins is None:
            return []
        groups = list(dict.fromkeys(row["group"] for row in named))
        # Code before a module that is right may read a cache, and so may a module whose inputs were not all compared.
        may_read = [found.origins.are_right(each) or each in found.origins.not_compared for each in groups]
        if not named or not all(may_read):
            return []
        if any(_is_one_sided(row) or row["added"] > _MOST * self._before(row) for row in named):
            return []
        worst = max(named, key=lambda row: row["added"])
        if all(map(_is_narrow, named)):
            return [] if found.contradicting_pairs else self._after_flips(worst, groups)
        # In more bits rounding cannot flip a choice, so a difference that changes the output is not inherited.
        keeps_output = bool(found.causes) and all(each.agrees and not each.cancelling for each in found.causes.values())
        keeps_output |= moved_anyway and all(row["label"] == "minor" for row in named)
        if not keeps_output or any(map(_is_narrow, named)):
            return []
        return self._after_rounding(worst, groups)

    def _before(self, row: dict[str, Any]) -> float:
        return self._moved.get(_part(row), 0.0)

    @property
    def _most(self) -> float:
        """How far results were apart at most."""
        return max(self._results, default=0.0)

    def _rounded_inputs(self, found: Findings) -> list[dict[str, Any]]:
        """The inputs that differ, if no other data do, and they by little more than the results of earlier calls."""
        inputs = [row for row in _named(found) if kind_of(row["tags"]) == "input"]
        if not all(line.startswith(BEGINNINGS["input"]) for line in found.data):
            return []
        # Whole numbers, such as tokens, do not round.
        if not all(roundoff(row["dtype"]) for row in inputs):
            return []
        are_near = not any(_is_one_sided(row) or row["added"] > _MOST * self._most for row in inputs)
        return inputs if are_near else []

    def _after_rounded_results(self, worst: dict[str, Any], with_others: bool) -> list[str]:
        return [
            f"{worst['name']} differs by {worst['added']:.2g}{'' if with_others else ', and nothing else does'}. In "
            f"earlier calls rounding had moved the results by up to {self._most:.2g}. The scripts' own code between "
            "the calls may have amplified that, as a guidance scale does, or it differs. Compare both sides in float64 "
            "to find out.",
            f"{NOT_CHECKED}the scripts' own code between the calls, which computes {worst['name']}.",
        ]

    def _after_flips(self, worst: dict[str, Any], groups: Sequence[str]) -> list[str]:
        return [
            f"In an earlier call rounding to {worst['dtype']} alone had moved taps in {_part(worst)[0]} by up to "
            f"{self._before(worst):.2g}, as where it changes a router's choice. What that call wrote, such as a cache, "
            f"was not compared, so {worst['name']}, which adds {worst['added']:.2g} here, may be right, and whatever "
            "is named below. Compare both sides in float32 to find out.",
            f"{NOT_CHECKED}what earlier calls wrote for {first_of(groups)}, such as a cache.",
        ]

    def _after_rounding(self, worst: dict[str, Any], groups: Sequence[str]) -> list[str]:
        return [
            f"{worst['name']} adds {worst['added']:.2g} here, and the output still agrees. In earlier calls rounding "
            f"alone had moved taps in its module by up to {self._before(worst):.2g}. What these calls wrote, such as a "
            "state or a cache, was not compared, so whatever is named below may be right. Compare both sides in "
            "float64 to find out.",
            f"{NOT_CHECKED}what earlier calls wrote for {first_of(groups)}, such as a state or a cache.",
        ]


def _named(found: Findings) -> list[dict[str, Any]]:
    """The rows of what differs by more than another order of operations."""
    return [row for row in records(found.frame) if row["label"] not in (*NOT_NAMED, ROUNDS_DIFFERENTLY)]


def _is_rounding(row: dict[str, Any], compared: Verdict) -> bool:
    """Whether a tap shows what rounding moves, in a call in which at most rounding is named."""
    found = compared.findings
    if not _is_narrow(row):
        # A choice that rounding to 16 bits has flipped moves what follows in more bits by far more than their rounding.
        return not (found.named or found.unexplained)
    off, added = row["error_ratio"], row["ratio"]
    return not found.contradicting_pairs and off is not None and added is not None and off > found.threshold >= added


def _is_one_sided(row: dict[str, Any]) -> bool:
    """Whether numbers are finite on one side alone, which rounding does not explain and ``added`` does not include."""
    return row["added"] is None or (math.isinf(row["ratio"]) and row["floor"] > 0)


def _is_narrow(row: dict[str, Any]) -> bool:
    return row["dtype"] in DTYPES_OF_16_BITS


def _part(row: dict[str, Any]) -> tuple[str, bool]:
    """The path of the module that a tap is in, and whether the tap has 16 bits."""
    return row["name"].rpartition(".")[0], _is_narrow(row)
