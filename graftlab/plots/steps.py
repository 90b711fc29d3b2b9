"""One tap over steps and over ranks."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import MaxNLocator

from graftlab.plots import style
from graftlab.plots.scales import EXACT, ODD, ValueAxis, color_bar, draw_cells, value_axis
from graftlab.plots.style import Array
from graftlab.plots.themes import AS_IT_IS
from graftlab.rows.schema import MEASURED
from graftlab.verdict.order import distances_in, is_missing, numbers, require, tag_columns

_MAX_STRIPS = 200
_MAX_TEXTS = 72


def history(frame: pd.DataFrame, name: str, *, value: str = "rel_l2", ax: Axes | None = None, **tags: Any) -> Figure:
    """One tap over the steps, one line per receiving rank: did the difference grow, jump, or exist from the start?

    A slow rise is an error that accumulates (a KV cache, an optimizer's state); a jump points at a change in
    that step; one rank apart from the others points at a shard.

    - x: step. y: ``value``, log scale; exact zeros are hollow, at a separate tick.
    - marker: the status. A row without a value is at the top edge (failed, timeout) or at the bottom edge
      (missing, unmatched); a large ring is a NaN or an infinity on one side only.

    ``tags`` select the tap, as in ``layer=3`` (None: the tag is absent). Any other column works too, as in
    ``rank=0``; a tag with the name of a row's column is ``tag_<name>``. When several taps or occurrences match,
    the largest value of a step is shown and the title lists the tags that vary.

    Raises ValueError naming a column (name, step, status, ``value`` or a tag) that the frame lacks.

    >>> figure = gl.plots.history(session.frame, "hidden", layer=3)
    """
    figure, ax = style.new_axes(ax, 8.0, 4.2)
    style.label_axes(ax, "step", style.value_label(value))
    rows = _select(frame, name, value, tags)
    cells = _cells(rows, value)
    style.head(ax, _title(rows, name, tags))
    if cells.empty:
        style.say(ax, _empty_message(frame, rows, name, tags))
        return figure

    without = sorted(set(cells.columns) - {"y", "odd", *MEASURED})
    edges = {style.look(s).edge for s in without if cells[s].any()}
    measured = cells["compared"] | cells["grafted"]
    scale = value_axis(cells["y"][measured].to_numpy(), top="top" in edges, bottom="bottom" in edges)
    scale.apply(ax)
    ax.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    steps = cells.index.get_level_values("step")
    room = max(0.5, 0.02 * (steps.max() - steps.min()))
    ax.set_xlim(steps.min() - room, steps.max() + room)
    size = 34.0 if len(cells) <= 200 else 14.0 if len(cells) <= 800 else 5.0
    entries = []
    for number, (who, part) in enumerate(cells.groupby(level="who", sort=False)):
        color, line = style.LINES[number % len(style.LINES)][0], ("-", "--", "-.", ":")[number % 4]
        entries.append(style.key(str(who), color, "o", line, size=5))
        _draw_rank(ax, part, scale, str(who), color, line, size)
    entries += _status_keys(cells, without)
    style.legend(ax, entries, columns=1 if len(entries) <= 18 else 2)
    return figure


def _draw_rank(ax: Axes, part: pd.DataFrame, scale: ValueAxis, who: str, color: str, line: Any, size: float) -> None:
    x = part.index.get_level_values("step").to_numpy(dtype=np.float64)
    value = part["y"].to_numpy()
    y = scale.place(value)
    measured = (part["compared"] | part["grafted"]).to_numpy()
    height = np.where(measured & np.isfinite(value), y, np.nan)
    ax.plot(x, height, color=color, linestyle=line, linewidth=1.5, zorder=2, gid=who)
    exact = (value == 0) & scale.log
    for status in part.columns.drop(["y", "odd"]):
        look = style.look(status)
        mask = part[status].to_numpy()
        if status not in MEASURED:
            edge = np.full(int(mask.sum()), scale.edge(look.edge))
            style.marks(
                ax, x[mask], edge, look, face=look.color, edge=color, size=size, above=3, gid=f"{who}: {status}"
            )
            continue
        if status == "compared":
            mask = mask & ~part["grafted"].to_numpy()
        face = color if status == "compared" else look.color
        for chosen, fill, gid in ((mask & ~exact, face, ""), (mask & exact, "none", " exact")):
            gid = f"{who}: {status}{gid}"
            style.marks(ax, x[chosen], y[chosen], look, face=fill, edge=color, size=size, above=3, gid=gid)
    odd = measured & part["odd"].to_numpy()
    style.rings(ax, x[odd], y[odd], size=max(size * 4.5, 90.0), gid=f"{who}: non-finite")


def ranks(frame: pd.DataFrame, name: str, *, value: str = "rel_l2", ax: Axes | None = None, **tags: Any) -> Figure:
    """One tap over its receiving ranks, one strip per step: which shard is wrong?

    A column that is bright in every step is a rank that has or received a wrong shard; the ranks that sent to
    it are listed below it. A bright row is a step with errors everywhere.

    - x: receiving ranks, with the sending ranks below. y: steps, the first one on top (with more than 200,
      neighbours share a strip and show their maximum). Colour: the magnitude of ``value``, log scale, written
      into the cells if it fits.
    - black is exactly 0, vermillion a non-finite value; a marker is the status of a cell without a value, a
      vermillion frame a NaN or an infinity on one side only. The worst cell is framed and named in the title.

    ``tags`` select the tap as in `history`. Raises ValueError naming a column (name, step, status, ``value``
    or a tag) that the frame lacks.

    >>> figure = gl.plots.ranks(session.frame, "hidden", layer=3)
    """
    rows = _select(frame, name, value, tags)
    cells = _cells(rows, value)
    who = list(dict.fromkeys(cells.index.get_level_values("who")))
    steps = sorted(set(cells.index.get_level_values("step")))
    together = -(-len(steps) // _MAX_STRIPS) or 1
    strips = -(-len(steps) // together)
    height = float(np.clip(2.0 + 0.34 * strips, 3.0, 7.5))
    figure, ax = style.new_axes(ax, float(np.clip(3.4 + 0.95 * len(who), 7.0, 15.0)), height)
    style.label_axes(ax, "receiving rank  (← ranks that sent to it)", "step")
    title = _title(rows, name, tags)
    style.head(ax, title)
    if cells.empty:
        style.say(ax, _empty_message(frame, rows, name, tags))
        return figure

    xs = np.array([who.index(label) for label in cells.index.get_level_values("who")])
    ys = np.searchsorted(steps, cells.index.get_level_values("step")) // together
    measured = (cells["compared"] | cells["grafted"]).to_numpy()
    grid = np.full((strips, len(who)), -np.inf)
    # A NaN wins its cell, as it wins the maximum of a tensor.
    np.maximum.at(grid, (ys[measured], xs[measured]), np.abs(cells["y"].to_numpy()[measured]))
    keys = _draw_cells(figure, ax, grid, style.value_label(value, short=True))
    for status in cells.columns.drop(["y", "odd", *MEASURED]):
        at, look = cells[status].to_numpy(), style.look(status)
        lift = np.where(np.isneginf(grid[ys[at], xs[at]]), 0.0, 0.3)  # so that it does not cover a number
        style.marks(ax, xs[at], ys[at] - lift, look, face=look.color, edge=style.ink(), size=52, above=4, gid=status)
        keys.append(style.status_key(status))
    odd = cells["odd"].to_numpy() & measured
    for x, y in zip(xs[odd], ys[odd], strict=True):
        for color, width, gid in (("white", 4.0, "non-finite halo"), (ODD, 2.0, "non-finite")):
            inner = Rectangle((x - 0.46, y - 0.42), 0.92, 0.84, fill=False, edgecolor=color, linewidth=width)
            inner.set(zorder=5, gid=gid)
            ax.add_patch(inner)
    if odd.any():
        keys.append(Patch(facecolor="none", edgecolor=ODD, linewidth=2.0, label="non-finite differs"))
    finite = np.where(np.isfinite(grid), grid, 0.0)
    differs = np.zeros(grid.shape, dtype=bool)
    differs[ys[odd], xs[odd]] = True
    if differs.any() or finite.max() > 0:
        worst = differs if differs.any() else finite
        y, x = (int(place) for place in np.unravel_index(int(worst.argmax()), grid.shape))
        outline: dict[str, Any] = {
            "fill": False,
            "edgecolor": style.ink(),
            "linewidth": 2.2,
            "zorder": 6,
            "gid": "worst",
        }
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, clip_on=False, **outline))
        step = f"step {steps[y * together]}" if together == 1 else f"steps from {steps[y * together]}"
        figure_of_it = (
            "non-finite values differ" if differs[y, x] else f"{style.value_name(value)} {style.number(grid[y, x])}"
        )
        found = f"worst: {who[x]}, {step}, {figure_of_it}"
        style.head(ax, title, found)
    _label_cells(ax, rows, who, steps[::together])
    style.legend_below(ax, keys, points=54)
    return figure


def _draw_cells(figure: Figure, ax: Axes, grid: Array, label: str) -> list[Any]:
    """Draw the strips, with numbers in the cells if they fit; -inf is a cell without a value and stays blank."""
    drawn, odd = draw_cells(ax, grid)
    for y, x in np.argwhere(odd):
        ax.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, facecolor=ODD, edgecolor="none", gid="not finite"))
    colors = drawn.to_rgba(drawn.get_array())
    colors[odd] = to_rgba(ODD)
    for y, x in np.argwhere(~np.isneginf(grid)) if grid.size <= _MAX_TEXTS else []:
        red, green, blue, _ = colors[y, x]
        color = "white" if 0.299 * red + 0.587 * green + 0.114 * blue < 0.5 else "black"
        text = ax.text(x, y, f"{grid[y, x]:.2g}", ha="center", va="center", fontsize=style.TICK, color=color, zorder=7)
        text.set_gid(AS_IT_IS)
    color_bar(figure, drawn, ax, label)
    keys: list[Any] = []
    if (grid == 0).any():
        keys.append(Patch(facecolor=EXACT, edgecolor=style.GREY, label="0 (exact)"))
    if odd.any():
        keys.append(Patch(facecolor=ODD, label="not finite"))
    return keys


def _select(frame: pd.DataFrame, name: str, value: str, tags: dict[str, Any]) -> pd.DataFrame:
    if isinstance(frame, pd.DataFrame) and frame.empty:
        return frame
    require(frame, "name", "step", "status", value)
    rows = frame[(frame["name"] == name).to_numpy(dtype=bool)]
    for tag, wanted in tags.items():
        require(frame, tag)
        have = rows[tag]
        rows = rows[[is_missing(v) if wanted is None else not is_missing(v) and bool(v == wanted) for v in have]]
    return rows


def _cells(rows: pd.DataFrame, value: str) -> pd.DataFrame:
    """One row per (who, step): the largest measured value ``y``, ``odd`` and a mask for each status."""
    if rows.empty:
        index = pd.MultiIndex.from_tuples([], names=["who", "step"])
        return pd.DataFrame(columns=["y", "odd", *MEASURED], index=index)
    who = _receivers(rows)
    place = {label: at for at, label in enumerate(sorted(set(who), key=_side_and_rank))}
    status = rows["status"].astype(str).to_numpy()
    measured = np.isin(status, MEASURED)
    differ = numbers(rows, "nonfinite_differ") if "nonfinite_differ" in rows.columns else np.zeros(len(rows))
    y = distances_in(rows, value)
    flat = pd.DataFrame(
        {
            "at": [place[w] for w in who],
            "who": who,
            "step": numbers(rows, "step"),
            # Equal finite elements beside differing NaNs are not exact.
            "y": np.where(measured, np.where((differ > 0) & (y == 0), np.inf, y), np.nan),
            "odd": measured & (differ > 0),
            **{s: status == s for s in dict.fromkeys([*MEASURED, *status.tolist()])},
        }
    )
    flat = flat.dropna(subset=["step"])
    flat["step"] = flat["step"].astype(np.int64)
    return flat.groupby(["at", "who", "step"]).max().droplevel("at")


def _receivers(rows: pd.DataFrame) -> list[str]:
    ranks = rows["rank"].tolist() if "rank" in rows.columns else [None] * len(rows)
    sides = rows["side"].tolist() if "side" in rows.columns else [""] * len(rows)
    return ["all ranks" if is_missing(r) else f"{s} rank {int(r)}".strip() for s, r in zip(sides, ranks, strict=True)]


def _side_and_rank(receiver: str) -> tuple[str, int]:
    side, _, rank = receiver.rpartition(" ")
    return side, int(rank) if rank.isdigit() else -1


def _title(rows: pd.DataFrame, name: str, tags: dict[str, Any]) -> str:
    """The title: the tap, and the tags over which the figure takes the largest value."""
    vary = []
    if not rows.empty:
        columns = [*tag_columns(rows), *(["occurrence"] if "occurrence" in rows.columns else [])]
        vary = [c for c in columns if rows[c].map(repr).nunique() > 1]
    given = "".join(f" {tag}={style.shorten(str(wanted), 24)}" for tag, wanted in tags.items())
    return style.shorten(str(name), 60) + given + (f"  (largest over {', '.join(vary)})" if vary else "")


def _empty_message(frame: pd.DataFrame, rows: pd.DataFrame, name: str, tags: dict[str, Any]) -> str:
    if frame.empty:
        return "no rows to show: nothing was compared or grafted yet"
    names = [str(n) for n in frame["name"].unique()]
    if name in names:
        wanted = ", ".join(f"{tag}={wanted!r}" for tag, wanted in tags.items())
        return f"no row of {name!r} has {wanted if rows.empty else 'a step'}"
    close = difflib.get_close_matches(str(name), names, n=3, cutoff=0.5)
    hint = f"\ndid you mean {', '.join(map(repr, close))}?" if close else ""
    return f"no tap is called {name!r}{hint}"


def _status_keys(cells: pd.DataFrame, without: Sequence[str]) -> list[Line2D]:
    keys = [style.status_key(status) for status in [*(["grafted"] if cells["grafted"].any() else []), *without]]
    if (cells["y"] == 0).any():
        keys.append(style.key("exact (hollow)", style.GREY, "o", hollow=True))
    if cells["odd"].any():
        keys.append(style.ring_key())
    return keys


def _ranges(numbers: set[int]) -> str:
    """``{0, 1, 2, 5}`` as ``0-2, 5``."""
    parts: list[list[int]] = []
    for number in sorted(numbers):
        if parts and number == parts[-1][1] + 1:
            parts[-1][1] = number
        else:
            parts.append([number, number])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)


def _label_cells(ax: Axes, rows: pd.DataFrame, who: Sequence[str], steps: Sequence[int]) -> None:
    """Label the columns by receiving rank and senders, the strips by their (first) step."""
    senders: dict[str, set[int]] = {}
    if "senders" in rows.columns:
        for label, sent in zip(_receivers(rows), rows["senders"], strict=True):
            senders.setdefault(label, set()).update(int(s) for s in (sent if isinstance(sent, (list, tuple)) else ()))
    texts = [f"{label}\n← {_ranges(senders[label])}" if senders.get(label) else label for label in who]
    for axis, labels, most in ((ax.xaxis, texts, 16), (ax.yaxis, [str(step) for step in steps], 12)):
        every = -(-len(labels) // most)
        shown = [style.plain_lines(label) for label in labels[::every]]
        axis.set_ticks(range(0, len(labels), every), labels=shown, fontsize=style.TICK)
