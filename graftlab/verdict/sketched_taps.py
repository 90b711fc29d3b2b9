"""Taps that a recording has as sketches, which cannot be grafted: what is behind a difference there is not judged."""

from __future__ import annotations

import math

import pandas as pd

from graftlab.transforms.by_layout import SKETCHED


def judged_until_sketch(
    frame: pd.DataFrame, grafted: pd.DataFrame, threshold: float
) -> tuple[pd.DataFrame, str | None]:
    """The frame in which taps behind the first sketch that differs are unmeasured, and a sentence on them if any are.

    ``frame`` is of :func:`.added.added_frame`, ``grafted`` are its rows. A difference that could not be taken out
    arrives at all of them.
    """
    sketched = set(grafted.loc[grafted["note"].astype(str).str.contains(SKETCHED, regex=False), "name"])
    differs = frame["name"].isin(sketched) & (frame["ratio"] > threshold)
    if not differs.any():
        return frame, None
    order = list(zip(frame["step"], frame["order"], strict=True))
    first = min(place for place, is_one in zip(order, differs, strict=True) if is_one)
    behind = pd.Series([place > first for place in order], index=frame.index)
    if not behind.any():
        return frame, None
    name = next(n for n, place in zip(frame["name"], order, strict=True) if place == first)
    frame = frame.copy()
    frame.loc[behind, ["added", "ratio"]] = math.nan
    frame.loc[behind, "label"] = "unmeasured"
    count = frame.loc[behind, "name"].nunique()
    return frame, (
        f"the {count} taps after {name}: the recording has only a sketch of {name}, which cannot be grafted, so its "
        f"difference reaches them. Record the whole tensor (with a larger --graftlab-record-limit), or fix {name} and "
        "judge again."
    )
