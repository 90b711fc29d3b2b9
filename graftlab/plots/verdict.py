"""The figure of a verdict: the added and inherited error of each tap, over the floor."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from graftlab.base.text import counted
from graftlab.diffs.maps import DifferenceMap
from graftlab.plots import style, themes
from graftlab.plots.explorer import rounded
from graftlab.plots.pairs import draw_difference_map
from graftlab.plots.scales import value_axis
from graftlab.verdict.facts import tap_name
from graftlab.verdict.findings import ShownMap
from graftlab.verdict.order import require

_MARKED = {
    "culprit": style.VERMILLION,
    "minor": style.ORANGE,
    "cancels": style.PURPLE,
    "rounds differently": style.BLUE,
}
MAX_LABELS = 60
_NAMED = 4
_PICTURES = 4
_PICTURE_SIZE = (7.6, 4.6)
# Looks like a button, also in a saved notebook.
_SUMMARY = (
    "cursor:pointer;width:fit-content;max-width:100%;padding:1px 8px;border-radius:3px;"
    "border:1px solid color-mix(in srgb, currentColor 40%, transparent)"
)


def added_errors(frame: pd.DataFrame, *, threshold: float = 5.0, ax: Axes | None = None) -> Figure:
    """Added and inherited error of each tap in execution order, over the floor; culprits are named.

    ``frame`` is a verdict's frame. The band reaches up to the floor of each tap, the dashed line is ``threshold`` times
    the floor. A hollow point is the error of a run without grafts, which a tap may have inherited; a filled point is
    the error added at the tap itself. If several ranks received a tap, the largest of each is drawn. Steps follow each
    other, separated by lines. Errors that are non-finite on one side only are at the top, zeros are below the scale,
    and taps without a value are not drawn. If more than four groups are at fault, the first four are named above the
    axes.

    Raises ValueError naming a column that the frame lacks.

    >>> figure = session.verdict(forward, forward, args=(x,)).plot()
    """
    require(frame, "name", "tags", "step", "order", "added", "ratio", "floor", "error", "error_ratio", "label", "group")
    taps = worst_of_ranks(frame)
    count = len(taps)
    figure, ax = style.new_axes(ax, style.width_for(count), 5.4)
    every = -(-count // MAX_LABELS) or 1
    thinned = "" if every == 1 else f" (one in {every} named)"
    style.label_axes(ax, f"tap, in execution order{thinned}", style.value_label("rel_l2"))
    if not count:
        style.say(ax, "nothing was measured on both sides")
        return figure
    x = np.arange(count)
    floor = taps["floor"].to_numpy(dtype=float)
    error, added = _drawn_values(taps, "error", "error_ratio"), _drawn_values(taps, "added", "ratio")
    values = np.concatenate([error, added])
    limits = [float(each) for each in (floor.min(), floor.max() * threshold)]
    scale = value_axis(values[~np.isnan(values)], marks=limits)
    scale.apply(ax)
    bottom = scale.limits[0]
    ax.fill_between(
        x, bottom, np.maximum(floor, bottom), step="mid", color=style.GREY, alpha=0.25, gid="floor", linewidth=0
    )
    ax.step(x, floor * threshold, where="mid", color=style.GREY, linestyle="--", linewidth=1, gid="limit")

    def mark(chosen: style.Array, value: style.Array, look: style.Mark, gid: str, *, hollow: bool = False) -> None:
        chosen = chosen & ~np.isnan(value)
        face, edge = ("none", look.color) if hollow else (look.color, style.ink())
        size = (34.0 if count <= MAX_LABELS else 20.0) - 4 * hollow
        y = scale.place(value)[chosen]
        style.marks(ax, x[chosen], y, look, face=face, edge=edge, size=size, above=4 - hollow, gid=gid)

    mark(np.ones(count, dtype=bool), error, style.Mark(style.BLUE, "o"), "inherited", hollow=True)
    colors = np.array([_MARKED.get(label, style.GREEN) for label in taps["label"]])
    for color in dict.fromkeys(colors.tolist()):
        mark(colors == color, added, style.Mark(color, "D"), f"added {color}")
    _name_groups(ax, taps, x, np.where(np.isnan(added), scale.top, scale.place(added)))
    _mark_steps(ax, taps)
    ax.set_xlim(-0.8, count - 0.2)
    names = [tap_name(style.shorten(str(name)), tags) for name, tags in zip(taps["name"], taps["tags"], strict=True)]
    ax.set_xticks(
        x[::every], [style.plain(style.shorten(each, 48)) for each in names[::every]], rotation=90, fontsize=style.DENSE
    )
    style.legend(
        ax,
        [
            style.key("added at the tap", style.GREEN, "D"),
            *(style.key(label, color, "D") for label, color in _MARKED.items() if (taps["label"] == label).any()),
            style.key("error without grafts", style.BLUE, "o", hollow=True),
            style.key(f"{threshold:g} x the floor", style.GREY, line="--"),
            Patch(color=style.GREY, alpha=0.25, linewidth=0, label="the floor"),
        ],
    )
    return figure


def explored(frame: pd.DataFrame, threshold: float, headline: str) -> dict[str, Any]:
    """What ``explorer.js`` shows of a verdict's frame: as :func:`added_errors`, with a table of the taps."""
    taps = worst_of_ranks(frame)
    labels = _labels(taps)
    culprits = np.flatnonzero((taps["label"] == "culprit").to_numpy())
    # Of each group the tap with the largest error that it adds.
    worst = sorted(culprits.tolist(), key=lambda at: -_known(taps["ratio"].iloc[at]))
    firsts = {str(taps["group"].iloc[at]): at for at in reversed(worst)}
    named = sorted(firsts.items(), key=lambda each: each[1])
    left = len(named) - _NAMED
    more = f" (and {left} more groups)" if left > 0 else ""
    notes = [
        [at, f"culprit: {group}" + (more if place == _NAMED else "")]
        for place, (group, at) in enumerate(named[:_NAMED], start=1)
    ]
    added, before = _drawn_values(taps, "added", "ratio"), _drawn_values(taps, "error", "error_ratio")
    return {
        "label": labels,
        "order": list(range(1, len(taps) + 1)),
        "columns": [
            ["order", "order", "count"],
            ["tap", "label", "text"],
            ["label", "status", "text"],
            ["added", "value", "number"],
            ["floor", "floors", "number"],
            ["error without grafts", "before", "number"],
            ["its group alone moves the output (x its floor)", "alone", "number"],
            ["worst on", "worst", "text"],
            ["step", "step", "count"],
        ],
        "status": taps["label"].tolist(),
        "value": [rounded(each) for each in added.tolist()],
        "before": [rounded(each) for each in before.tolist()],
        "floors": [rounded(each) for each in taps["floor"].tolist()],
        "alone": [rounded(each) for each in taps["alone"].tolist()],
        "nonfinite": [int(each == np.inf) for each in added.tolist()],
        "badness": [rounded(_known(each)) for each in taps["ratio"].tolist()],
        "worst": [f"target[{rank}]" for rank in taps["rank"]],
        "step": [int(each) for each in taps["step"]],
        "floor": None,
        "limit": threshold,
        "notes": notes,
        "headline": headline,
        "count": "",
    }


def _known(ratio: float) -> float:
    return -1.0 if np.isnan(ratio) else float(ratio)


def _labels(taps: pd.DataFrame) -> list[str]:
    """A name for each tap, which no other has: with its step, and which call of the step it is, where needed."""
    several = taps["step"].nunique() > 1
    found: list[str] = []
    calls: dict[str, int] = {}
    for name, tags, step in zip(taps["name"], taps["tags"], taps["step"], strict=True):
        label = f"{tap_name(str(name), tags)}{f' step {step}' if several else ''}"
        calls[label] = calls.get(label, 0) + 1
        found.append(label if calls[label] == 1 else f"{label} call {calls[label]}")
    return found


def worst_of_ranks(frame: pd.DataFrame) -> pd.DataFrame:
    """One line per call of a tap: the rank with the largest added error."""
    if not len(frame):
        return frame
    ordered = frame.sort_values(
        ["step", "order", "ratio"], ascending=[True, True, False], kind="stable", na_position="last"
    )
    return ordered.drop_duplicates(["step", "order", "name"]).reset_index(drop=True)


def _mark_steps(ax: Axes, taps: pd.DataFrame) -> None:
    """Mark where each step begins, if the frame has several."""
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


def _drawn_values(taps: pd.DataFrame, column: str, over: str) -> style.Array:
    """A column to draw: infinite where one side only is non-finite, whatever the finite elements are."""
    ratio = taps[over].to_numpy(dtype=float)
    shown: style.Array = np.where(np.isposinf(ratio), np.inf, taps[column].to_numpy(dtype=float))
    return shown


def _name_groups(ax: Axes, taps: pd.DataFrame, x: style.Array, y: style.Array) -> None:
    """Write each culprit's name above the axes, with an arrow to the first of its taps."""
    groups = list(dict.fromkeys(taps.loc[taps["label"] == "culprit", "group"]))
    more = f" (and {len(groups) - _NAMED} more groups)" if len(groups) > _NAMED else ""
    is_culprit = (taps["label"] == "culprit").to_numpy()
    first = int(taps["step"].nunique() > 1)  # above the labels of the steps
    # From right to left, so that no arrow crosses the text of a line above it.
    for level, group in enumerate(reversed(groups[:_NAMED]), first):
        at = int(np.flatnonzero((taps["group"] == group).to_numpy() & is_culprit)[0])
        style.point_out(
            ax,
            f"culprit: {group}{more if level == first else ''}",
            (float(x[at]), float(y[at])),
            share=(x[at] + 0.8) / (len(taps) + 0.6),
            level=level,
            color=style.VERMILLION,
        ).set_gid("culprit")


def draw_shown_map(shown: ShownMap, found: DifferenceMap | None = None, **options: Any) -> Figure:
    """Draw a verdict's map of a group with its hint, or ``found``, a map of the same pair over other dimensions."""
    hint: dict[str, Any] = {} if shown.hint is None else {"note": str(shown.hint), "spans": shown.hint.spans}
    return draw_difference_map(shown.found if found is None else found, **{"title": shown.title, **hint, **options})


def unfolding_maps(maps: Mapping[str, ShownMap]) -> str:
    """Return HTML with a line for each group that unfolds the picture of its map; it needs no script and no kernel."""
    lines = []
    for group, shown in [*maps.items()][:_PICTURES]:
        figure = draw_shown_map(shown)
        # About as wide as its place beside the text, so that its text keeps its size.
        figure.set_size_inches(*_PICTURE_SIZE)
        picture = style.to_html(figure, f"Where {group} differs: {themes.in_words(figure)}", dpi=100)
        at = "" if shown.title == group else f", at {html.escape(shown.title)}"
        name = f"Where {html.escape(group)} differs{at}"
        lines.append(
            f'<details class="graftlab-where" style="margin:0.2em 0 0.6em"><summary style="{_SUMMARY}">{name}</summary>'
            f"{picture}</details>"
        )
    more = len(maps) - _PICTURES
    rest = f"<p>{counted(more, 'picture')} more: <code>verdict.plot(group)</code></p>" if more > 0 else ""
    return f"{themes.STYLE}{''.join(lines)}{rest}"
