"""The figure of a verdict: what each tap adds, and what it inherits, over the floor."""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from graftlab.plots import style
from graftlab.verdict.order import require

_MARKED = {"culprit": style.VERMILLION, "minor": style.ORANGE, "cancels": style.PURPLE}
MAX_LABELS = 60


def added_errors(frame: pd.DataFrame, *, threshold: float = 5.0, ax: Axes | None = None) -> Figure:
    """Added and inherited error of each tap in execution order, over the floor; culprits are named.

    ``frame`` is that of a verdict. The band reaches up to the floor of each tap, the dashed line to ``threshold`` times
    it. A hollow point is the error of a run without grafts, which a tap may have inherited; a filled one what arose at
    the tap itself. Where several ranks received a tap, the largest of each is drawn. Steps stand one after the other,
    with a line between them. Zeros stand on the lower edge.

    Raises ValueError naming a column that the frame lacks.

    >>> figure = session.verdict(forward, forward, args=(x,)).plot()
    """
    require(frame, "name", "step", "order", "added", "floor", "error", "label", "group")
    taps = _worst_of_ranks(frame)
    count = len(taps)
    figure, ax = style.new_axes(ax, float(np.clip(4.6 + 0.15 * count, 7.5, 16.0)), 5.4)
    style.label_axes(ax, "tap, in execution order", style.value_label("rel_l2"))
    if not count:
        style.say(ax, "nothing was measured on both sides")
        return figure
    x = np.arange(count)
    floor = taps["floor"].to_numpy(dtype=float)
    values = taps[["added", "error"]].to_numpy(dtype=float)
    positive = np.concatenate([values[np.isfinite(values) & (values > 0)], floor[floor > 0]])
    low = float(positive.min()) / 3 if len(positive) else 1e-9
    high = float(positive.max()) * 3 if len(positive) else 1.0
    ax.set_yscale("log")
    ax.set_ylim(low, max(high, low * 10))
    ax.fill_between(x, low, np.maximum(floor, low), step="mid", color=style.GREY, alpha=0.25, gid="floor", linewidth=0)
    ax.step(
        x, np.maximum(floor * threshold, low), where="mid", color=style.GREY, linestyle="--", linewidth=1, gid="limit"
    )

    def on_axis(column: str) -> style.Array:
        numbers = taps[column].to_numpy(dtype=float)
        return np.asarray(np.clip(np.nan_to_num(numbers, nan=low, posinf=high), low, high))

    error, added = on_axis("error"), on_axis("added")
    style.marks(
        ax, x, error, style.Mark(style.BLUE, "o"), face="none", edge=style.BLUE, size=30, above=3, gid="inherited"
    )
    colors = [_MARKED.get(label, style.GREEN) for label in taps["label"]]
    for color in dict.fromkeys(colors):
        chosen = np.array([each == color for each in colors])
        mark = style.Mark(color, "D")
        style.marks(
            ax, x[chosen], added[chosen], mark, face=color, edge=style.ink(), size=34, above=4, gid=f"added {color}"
        )
    _name_groups(ax, taps, x, added)
    _mark_steps(ax, taps)
    every = -(-count // MAX_LABELS) or 1
    ax.set_xticks(x[::every], [style.plain(style.shorten(str(n))) for n in taps["name"].iloc[::every]], rotation=90)
    style.legend(
        ax,
        [
            style.key("added at the tap", style.GREEN, "D"),
            *(style.key(label, color, "D") for label, color in _MARKED.items() if (taps["label"] == label).any()),
            style.key("error without grafts", style.BLUE, "o", hollow=True),
            style.key(f"{threshold:g} x the floor", style.GREY, line="--"),
        ],
    )
    return figure


def _worst_of_ranks(frame: pd.DataFrame) -> pd.DataFrame:
    """One line a call of a tap: the rank at which the most was added."""
    if not len(frame):
        return frame
    ordered = frame.sort_values(
        ["step", "order", "ratio"], ascending=[True, True, False], kind="stable", na_position="last"
    )
    return ordered.drop_duplicates(["step", "order", "name"]).reset_index(drop=True)


def _mark_steps(ax: Axes, taps: pd.DataFrame) -> None:
    """Where each step begins, if there is more than one."""
    steps = taps["step"].to_numpy()
    if steps[0] == steps[-1]:
        return
    for start in (0, *(int(place) for place in np.flatnonzero(np.diff(steps)) + 1)):
        if start:
            ax.axvline(start - 0.5, color=style.GREY, linewidth=0.8, gid=f"step {steps[start]}")
        ax.annotate(
            f"step {steps[start]}",
            (start - 0.4, 1.0),
            xycoords=("data", "axes fraction"),
            xytext=(0, 2),
            textcoords="offset points",
            fontsize=style.TICK,
        )


def _name_groups(ax: Axes, taps: pd.DataFrame, x: style.Array, added: style.Array) -> None:
    """Each culprit's name, at the first of its taps."""
    for group in dict.fromkeys(taps.loc[taps["label"] == "culprit", "group"]):
        at = int(np.flatnonzero(((taps["group"] == group) & (taps["label"] == "culprit")).to_numpy())[0])
        ax.annotate(
            style.plain(group),
            (float(x[at]), float(added[at])),
            xytext=(4, 6),
            textcoords="offset points",
            fontsize=style.TICK,
            color=style.VERMILLION,
            gid="culprit",
        )
