"""Differences of both sides' optimizer settings: which setting, with which values, for which weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import kind_of
from graftlab.base.text import first_of
from graftlab.errors import SessionError
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import records

SETTINGS = "kind == 'optimizer' and not updated"
"""A filter for the taps of an optimizer's settings, which have one number per weight."""
_MOST_NAMES = 4
_MOST_VALUES = 3

PairOf = Callable[[str, int, int, Mapping[str, Any]], tuple[torch.Tensor, torch.Tensor]]
"""Both sides' tensors at a tap, by its name, rank, step and tags."""


@dataclass(frozen=True)
class SettingsDifference:
    """How the settings differ. ``lacking`` has sentences on weights that one side's optimizer lacks; ``values`` has the
    difference of each setting in words, by its tap's name, blank where ``lacking`` explains it.
    """

    lacking: Sequence[str]
    values: Mapping[str, str]


NO_SETTINGS = SettingsDifference((), {})


def settings_difference(compared: pd.DataFrame, pair_of: PairOf) -> SettingsDifference:
    """Compare the settings, each in the first step in which it differs.

    ``compared`` are the rows of a run without grafts in which :data:`SETTINGS` were kept.
    """
    rows = records(compared)
    differing: dict[str, dict[str, Any]] = {}
    for row in rows:
        is_setting = kind_of(row["tags"]) == "optimizer" and not row["tags"].get("updated")
        if is_setting and row["status"] in MEASURED and (row["rel_l2"] or row["nonfinite_differ"]):
            differing.setdefault(row["name"], row)
    lacking: dict[str, None] = {}
    values = {}
    for name, row in differing.items():
        tags = {tag: value for tag, value in own_tags(row["tags"]).items() if value is not None} | {"kind": "optimizer"}
        step = int(row["step"] - compared["step"].min())
        try:
            pair = pair_of(name, int(row["rank"]), step, {"occurrence": int(row["occurrence"]), **tags})
        except SessionError:
            # The pair did not fit the rank's budget. The row has the distance.
            continue
        baseline, target = ([float(each) for each in side.flatten()] for side in pair)
        weights = _weights(rows, row, len(target))
        for side, own, others in (("baseline", baseline, target), ("target", target, baseline)):
            absent = [n for n, a, b in zip(weights, own, others, strict=True) if a != a and b == b]
            if absent:
                lacking[
                    f"The {side}'s optimizer does not have {len(absent)} of {len(weights)} weights: "
                    f"{first_of(absent, _MOST_NAMES)}."
                ] = None
        words = _in_words(baseline, target, weights)
        values[name] = f"{words}, from step {step} on" if words and step else words
    return SettingsDifference(tuple(lacking), values)


def _weights(rows: Sequence[Mapping[str, Any]], row: Mapping[str, Any], count: int) -> list[str]:
    """The names of the weights that a setting has values for, in its order, which is that of the taps of updates."""
    names = dict.fromkeys(
        each["name"]
        for each in rows
        if kind_of(each["tags"]) == "param"
        and each["tags"].get("updated")
        and (each["rank"], each["step"]) == (row["rank"], row["step"])
    )
    # A script that stops in its step shows no updated weight.
    return list(names) if len(names) == count else [f"number {place}" for place in range(count)]


def _in_words(baseline: Sequence[float], target: Sequence[float], weights: Sequence[str]) -> str:
    """Differing values of weights that both sides have, in words; blank if none differ."""
    by_values: dict[tuple[float, float], list[str]] = {}
    for name, ours, theirs in zip(weights, baseline, target, strict=True):
        if ours == ours and theirs == theirs and ours != theirs:
            by_values.setdefault((ours, theirs), []).append(name)
    words = []
    for (ours, theirs), names in list(by_values.items())[:_MOST_VALUES]:
        if len(names) == len(weights):
            of = f"all {len(weights)} weights" if len(weights) > 1 else weights[0]
        else:
            of = f"{len(names)} of {len(weights)} weights: {first_of(names, _MOST_NAMES)}"
        words.append(f"{ours:.7g} on the baseline, {theirs:.7g} on the target for {of}")
    left = len(by_values) - len(words)
    return "; ".join([*words, *([f"{left} more pairs of values"] if left else [])])
