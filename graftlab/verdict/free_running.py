"""Finds out whether a side reads its own choices, as in generation, and which values a verdict replaced."""

from __future__ import annotations

from collections.abc import Collection

import pandas as pd

from graftlab.base.tap_groups import kind_of
from graftlab.base.text import first_of
from graftlab.diffs.rounding import roundoff

# A different token changes whole rows; rounding and most mistakes change all rows a little.
_LEAST_ADDED = 0.05
_OF_TRAINING = ("param_grad", "optimizer")


def runs_freely(frame: pd.DataFrame, named: Collection[str], threshold: float) -> list[str]:
    """A sentence if the first value of each step is named from a later step on, so that something untapped is fed back.

    ``frame`` is a verdict's, from the run in which every tap had the baseline's value. A float that is computed before
    all other taps of its step can only read values that no tap shows: its inputs, or state of the previous step.
    """
    if any(kind_of(tags) in _OF_TRAINING for tags in frame["tags"]):
        # An update changes the state with which the next step begins.
        return []
    values = _values(frame)
    for _, rows in values.groupby("rank"):
        first = rows.iloc[0]
        calls = rows[(rows["name"] == first["name"]) & (rows["group"] == first["group"])]
        over = (calls["ratio"] > threshold).to_numpy(dtype=bool)
        if first["group"] not in named or roundoff(first["dtype"]) == 0 or over[0] or not over.any():
            continue
        at = calls.iloc[int(over.argmax())]
        before = rows[(rows["step"] < at["step"]) | ((rows["step"] == at["step"]) & (rows["order"] < at["order"]))]
        in_steps = rows["step"].nunique() > 1
        if in_steps and (before["step"] == at["step"]).any():
            continue
        if not at["added"] > _LEAST_ADDED:
            continue
        if not in_steps and at["occurrence"] == first["occurrence"]:
            # A different tap of the same name, such as another layer's, and not a later call of this one.
            continue
        unit = "step" if in_steps else "occurrence"
        where, reader = f"{unit} {at[unit]}", f"{at['name']}, the first tap{' of each step' if in_steps else ''},"
        return [
            f"From {where} on, each side probably generates freely: {reader} differs from there on, although all "
            "earlier taps had the baseline's values. So it reads a value that no tap shows, most likely one that the "
            f"run feeds back to itself, such as a token chosen from {before.iloc[-1]['name']}; differences from "
            f"{where} on may be its consequences. Tap that value where the model reads it, for example "
            'token = gl.tap("token", token); both sides then get the baseline\'s.'
        ]
    return []


def held_choices(frame: pd.DataFrame, named: Collection[str]) -> list[str]:
    """A sentence on whole numbers that the target computes differently only because of earlier taps, such as tokens."""
    values = _values(frame)
    if not len(values):
        return []
    whole = values[[roundoff(dtype) == 0 for dtype in values["dtype"]]]
    parted = whole[(whole["error"] > 0) & (whole["added"] == 0) & ~whole["group"].isin(list(named))]
    if not len(parted):
        return []
    names = list(dict.fromkeys(parted["name"]))
    in_steps = values["step"].nunique() > 1
    # Nothing reads the last choice.
    first = parted.iloc[0]
    later = values[(values["step"] > first["step"]) | (values["order"] > first["order"])]
    if not (later["error"] > 0).any():
        return []
    unit = "step" if in_steps else "occurrence"
    return [
        f"Running freely, the target has different numbers at {first_of(names)} from {unit} {first[unit]} on. Here it "
        "was given the baseline's, so later code that reads them is judged from equal numbers."
    ]


def _values(frame: pd.DataFrame) -> pd.DataFrame:
    # Typed, because an empty list would choose no columns.
    of_values = pd.Series([kind_of(tags) in (None, "input") for tags in frame["tags"]], index=frame.index, dtype=bool)
    return frame[of_values].sort_values(["step", "order"], kind="stable")
