"""Figures of one pair of tensors: where they differ, how they are distributed, and one against the other."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from torch import Tensor

from graftlab.diffs.maps import DifferenceMap, difference_map
from graftlab.diffs.samples import Distributions, distributions, sample
from graftlab.plots import style
from graftlab.plots.scales import EXACT, ODD, color_bar, log_image

_MAX_CROSSES = 400
# More would be too small to read.
_MOST_PROFILES = 4
_NOTE_WIDTH = 90
_SPAN_KEY = "where the hint says"


def heatmap(
    baseline: Tensor,
    target: Tensor,
    *,
    dims: Sequence[int] | None = None,
    title: str | None = None,
    ax: Axes | None = None,
) -> Figure:
    """Where the pair differs: ``|baseline - target|`` over two axes, the worst element ringed.

    Look for structure. Noise is uniform; a bright block is a shard or a head, a bright row a token, a bright
    column a channel, a bright edge a mask or an off-by-one.

    - rows and columns: the axes ``dims`` (the last two by default) in element indices; other axes are
      reduced by maximum. At most 512 x 512 cells are drawn, each with its maximum, so no single bad element
      is lost.
    - colour: log scale over at most eight decades. Black is exactly 0; a cell with a NaN or an
      infinity on one side only is vermillion (and crossed, unless there are many).
    - title: the largest difference with the element's full index and both values, and how many non-finite
      pairs there are (equal ones, such as a mask's ``-inf`` on both sides, count as 0).
    - at the right, unless ``ax`` is given: the largest difference at each index of each dimension, so that a
      head, a token or a channel stands out in the dimensions that the map does not show.

    The tensors have the same shape, any dtype (complex: magnitude of the difference) and device, and are read in
    blocks. Raises TypeError when an argument is not a tensor, ValueError when the shapes differ or ``dims`` does not
    fit.

    >>> figure = gl.plots.heatmap(torch.zeros(8, 16), torch.eye(8, 16))
    """
    return draw_difference_map(difference_map(baseline, target, dims=dims), title=title, ax=ax)


def draw_difference_map(
    found: DifferenceMap,
    *,
    title: str | None = None,
    note: str = "",
    spans: Sequence[tuple[int, int, int]] = (),
    ax: Axes | None = None,
) -> Figure:
    """Draw a `heatmap` from a map that `difference_map` made, for instance on a rank.

    ``note`` is a sentence for the title, such as a verdict's hint; ``spans`` are places to mark, each a dimension with
    its first and last index.

    >>> found = gl.plots.difference_map(torch.zeros(8, 16), torch.eye(8, 16))
    >>> figure = gl.plots.draw_difference_map(found, title="attn_out")
    """
    rows, columns = _two(found.dims, None)
    flat = rows is None
    beside = [] if ax is not None or flat else [dim for dim, each in enumerate(found.profiles) if len(each) > 1]
    beside = beside[-_MOST_PROFILES:]
    figure, ax, grid = _map_axes(ax, flat, len(beside))
    style.label_axes(ax, _dim_label(columns), _dim_label(rows))
    dtypes = " / ".join(dict.fromkeys(found.dtypes))
    head = f"{style.shorten(title, 70) + '  ' if title else ''}{list(found.shape)} {dtypes}"
    lines = textwrap.wrap(f"hint: {note}", _NOTE_WIDTH) if note else []
    style.head(ax, head, *_findings(found), *lines, size=style.NOTE)
    if not found.grid.size:
        style.say(ax, _no_elements(found.shape))
        return figure

    shown, norm, cmap = log_image(found.grid)
    drawn = ax.imshow(
        shown, norm=norm, cmap=cmap, extent=found.extent, aspect="auto", interpolation="nearest", gid="cells"
    )
    height = found.shape[rows] if rows is not None else 1
    width = found.shape[columns] if columns is not None else 1
    ax.set_xlim(-0.5, width - 0.5)  # the last cell of an axis may extend beyond the tensor
    ax.set_ylim(height - 0.5, -0.5)
    for side in ("top", "right"):
        ax.spines[side].set_visible(True)
    ax.xaxis.set_major_locator(MaxNLocator(8, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(8, integer=True))
    if flat:
        ax.set_yticks([])
    keys: list[Any] = []
    for dim, first, last in spans:
        # Lines at both ends, except where the span ends with the tensor.
        ends = [at for at, inside in ((first - 0.5, first > 0), (last + 0.5, last < found.shape[dim] - 1)) if inside]
        if dim not in (rows, columns):
            continue
        draw = ax.axhline if dim == rows else ax.axvline
        for at in ends:
            draw(at, color=style.ORANGE, linestyle="--", linewidth=1.4, gid="span", zorder=5)
        if ends and not keys:
            keys.append(style.key(_SPAN_KEY, style.ORANGE, line="--"))
    if found.worst > 0 and found.worst_index is not None:
        y, x = _two([found.worst_index[dim] for dim in found.dims], 0)
        style.rings(ax, np.array([x]), np.array([y]), size=190, gid="worst")
        keys.append(style.key("worst element", ODD, "o", hollow=True, size=11))
    if (found.grid == 0).any():
        keys.append(Patch(facecolor=EXACT, edgecolor=style.GREY, label="0 (exact)"))
    if found.nonfinite_differ:
        odd = np.argwhere(~np.isfinite(found.grid))
        if len(odd) <= _MAX_CROSSES:  # few cells are easily overlooked, many are not
            across, down = _centres(found)
            crosses = ax.scatter(across[odd[:, 1]], down[odd[:, 0]], marker="x", s=44, color=ODD, linewidths=1.6)
            crosses.set(zorder=4, gid="non-finite", clip_on=False)
        keys.append(style.key("non-finite differs", ODD, "x"))
    color_bar(figure, drawn, ax, "|baseline - target|  (tensor's units)")
    style.legend_below(ax, keys)
    for place, dim in enumerate(beside):
        panel = figure.add_subplot(grid[place, 1])
        _draw_profile(panel, found, dim, [(first, last) for each, first, last in spans if each == dim])
    return figure


def _map_axes(ax: Axes | None, flat: bool, panels: int) -> tuple[Figure, Axes, Any]:
    """The axes of a map, in a grid with room for panels below each other at its right."""
    if not panels:
        return *style.new_axes(ax, 7.4, 3.0 if flat else 6.4), None
    figure, whole = style.new_axes(None, 10.0, 5.4)
    whole.remove()
    grid = figure.add_gridspec(panels, 2, width_ratios=(2.4, 1.0))
    return figure, figure.add_subplot(grid[:, 0]), grid


def _draw_profile(ax: Axes, found: DifferenceMap, dim: int, spans: Sequence[tuple[int, int]]) -> None:
    """Draw the largest difference at each index of a dimension, from 0 on."""
    values = np.asarray(found.profiles[dim], dtype=float)
    size = found.shape[dim]
    edges = np.minimum(np.arange(len(values) + 1) * -(-size // len(values)), size) - 0.5
    odd = ~np.isfinite(values)
    drawn = np.where(odd, np.nan, values)
    for first, last in spans:
        ax.axvspan(first - 0.5, last + 0.5, color=style.ORANGE, alpha=0.25, linewidth=0, gid="span")
    ax.stairs(np.nan_to_num(drawn), edges, color=style.BLUE, fill=True, gid="profile")
    if odd.any():
        at = (edges[:-1] + edges[1:])[odd] / 2
        ax.scatter(at, np.zeros(len(at)), marker="x", s=30, color=ODD, zorder=5, clip_on=False, gid="non-finite index")
    ax.set_xlim(-0.5, size - 0.5)
    ax.set_ylim(0, max(float(np.nan_to_num(drawn).max()) * 1.08, 1e-300) if np.nan_to_num(drawn).any() else 1.0)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(3))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.2g}"))
    style.label_axes(ax, f"dim {dim}: largest by index", "")
    ax.xaxis.label.set_fontsize(style.TICK)


def histogram(baseline: Tensor, target: Tensor, *, title: str | None = None, ax: Axes | None = None) -> Figure:
    """How the values of both tensors are distributed, and how large their differences are.

    - left: values in shared bins, log count; baseline solid, target dashed. A scale, a bias or a clipped tail
      separates the outlines.
    - right: ``|target - baseline|`` on a log scale, log count, separately for elements where the target is larger
      (solid) and smaller (dashed); the bar at ``0`` counts equal elements. Rounding is one hill far to the left;
      a second hill is a wrong part of the tensor, a few counts to the right are outliers, and outlines that do not
      coincide are a bias.
    - titles: how many elements differ, mean and standard deviation of ``target - baseline``, and how many values
      are not finite (they are not drawn, since a difference needs two finite values).

    The tensors have the same shape, any dtype (complex: magnitudes) and device, and are read in blocks. With ``ax``
    both panels are drawn inside it. Raises TypeError when an argument is not a tensor, ValueError when the shapes
    differ.

    >>> figure = gl.plots.histogram(torch.zeros(8, 16), torch.eye(8, 16))
    """
    found = distributions(baseline, target, bins=int(np.clip(2 * math.isqrt(baseline.numel()), 20, 120)))
    figure, whole = style.new_axes(ax, 9.6, 4.2)
    whole.set_axis_off()
    left, right = whole.inset_axes((0.0, 0.0, 0.45, 1.0)), whole.inset_axes((0.57, 0.0, 0.43, 1.0))
    style.label_axes(left, "value  (tensor's units)", "elements  (count)")
    style.label_axes(right, "|target - baseline|  (tensor's units)", "elements  (count)")
    odd = found.nonfinite_baseline + found.nonfinite_target
    note = f"not finite: baseline {found.nonfinite_baseline}, target {found.nonfinite_target}" if odd else ""
    style.head(left, style.shorten(title or "values", 48), note, size=style.NOTE)
    differing = found.pairs - found.equal
    spread = f"mean {style.number(found.mean)}, std {style.number(found.std)}" if differing else ""
    unequal = f", and {found.nonfinite_differ:,} that are not finite" if found.nonfinite_differ else ""
    style.head(right, f"{differing:,} of {found.pairs:,} elements differ{unequal}", spread, size=style.NOTE)
    if not found.pairs:
        for panel in (left, right):
            style.say(panel, "no pair of finite values" if baseline.numel() else _no_elements(baseline.shape))
        return figure

    left.stairs(found.baseline, found.edges, color=style.BASELINE, alpha=0.15, fill=True)
    _outline(left, found.edges, found.baseline, style.BASELINE, "-", "baseline")
    _outline(left, found.edges, found.target, style.TARGET, "--", "target")
    left.xaxis.set_major_locator(MaxNLocator(6))
    _count_axis(left, max(found.baseline.max(), found.target.max()))
    _draw_sizes(right, found, signed=not (baseline.is_complex() or target.is_complex()))
    return figure


def _draw_sizes(ax: Axes, found: Distributions, *, signed: bool) -> None:
    """Draw the sizes of the differences, by powers of ten, with a bar for equal pairs on the left."""
    low, high = float(found.magnitude_edges[0]), float(found.magnitude_edges[-1])
    ticks, labels = [], []
    if found.equal < found.pairs:
        _outline(ax, found.magnitude_edges, found.above, style.TARGET, "-", "target larger" if signed else "differing")
        if signed:
            _outline(ax, found.magnitude_edges, found.below, style.ink(), "--", "target smaller")
        first, last = math.ceil(low), math.floor(high)
        ticks = [float(e) for e in range(first, last + 1, -(-(last - first + 1) // 7) or 1)]
        ticks = ticks if len(ticks) > 1 else [float(tick) for tick in np.linspace(low, high, 4)]
        whole = all(tick.is_integer() for tick in ticks)
        labels = [style.power(10.0**tick) if whole else style.number(10.0**tick, 2) for tick in ticks]
    else:
        low, high = 0.0, 1.0
        ax.text(
            0.55,
            0.5,
            _all_equal(found.nonfinite_differ),
            transform=ax.transAxes,
            ha="center",
            fontsize=style.LABEL,
            color=style.GREY,
        )
    width = (high - low) * 0.05
    if found.equal:
        ax.bar([low - 2 * width], [found.equal], width=width, color=style.SKY, label="equal")
        ticks, labels = [low - 2 * width, *ticks], ["0", *labels]
    ax.set_xlim(low - 3.5 * width, high + width)
    ax.set_xticks(ticks, labels)
    _count_axis(ax, max(found.above.max(), found.below.max(), found.equal))


def scatter(baseline: Tensor, target: Tensor, *, title: str | None = None, ax: Axes | None = None) -> Figure:
    """Baseline against target, one point per element: equal elements lie on the identity line.

    A line of another slope is a scale, a parallel one a bias, a cross or a cloud around the axes a
    permutation or a wrong tensor, a flat end a clipped range, a few points off the line are outliers.

    At most 20,000 points are drawn: a tenth of them are always the elements that differ most, in a different
    colour and marker; the others are a random sample with a fixed seed. The title counts the pairs left out
    because a value is not finite and those among them that differ, and names the worst element.

    The tensors have the same shape, any dtype (complex: magnitudes, so a phase shift does not show here) and
    device, and are read in blocks. Raises TypeError when an argument is not a tensor, ValueError when the shapes
    differ.

    >>> figure = gl.plots.scatter(torch.zeros(8, 16), torch.eye(8, 16))
    """
    points = sample(baseline, target)
    figure, ax = style.new_axes(ax, 6.0, 6.5)
    style.label_axes(ax, "baseline  (tensor's units)", "target  (tensor's units)")
    drawn = len(points.baseline)
    counts = f"all {drawn:,}" if drawn + points.nonfinite == points.numel else f"{drawn:,} of {points.numel:,}"
    left_out = f", {points.nonfinite:,} with a non-finite value left out" if points.nonfinite else ""
    left_out += f" ({points.nonfinite_differ:,} unequal)" if points.nonfinite_differ else ""
    finding = _all_equal(points.nonfinite_differ) if drawn else ""
    if points.worst_index is not None:
        x, y = (style.number(tensor[points.worst_index].item(), 4) for tensor in (baseline, target))
        finding = f"worst at {list(points.worst_index)}: baseline {x}, target {y}"
    style.head(ax, style.shorten(title or "", 70), f"{counts} elements are drawn{left_out}", finding, size=style.NOTE)
    if not drawn:
        style.say(ax, "no pair of finite values" if points.numel else _no_elements(baseline.shape))
        return figure

    both = np.concatenate([points.baseline, points.target])
    low, high = float(both.min()), float(both.max())
    room = 0.04 * (high - low) or abs(high) * 0.1 or 0.5
    ax.set_xlim(low - room, high + room)
    ax.set_ylim(low - room, high + room)
    ax.axline((low, low), slope=1.0, color=style.GREY, linewidth=1.0, linestyle="--", zorder=1, gid="identity")
    common = drawn - points.worst
    size = 6 if drawn > 2000 else 16
    plain = ax.scatter(points.baseline[:common], points.target[:common], s=size, color=style.BLUE, alpha=0.35)
    plain.set(linewidths=0, zorder=2, gid="sample")
    keys = [style.key("equal", style.GREY, line="--"), style.key("elements", style.BLUE, "o", size=5)]
    if points.worst:
        worst = ax.scatter(
            points.baseline[common:], points.target[common:], s=2 * size, marker="D", color=style.VERMILLION
        )
        worst.set(alpha=0.6, linewidths=0, zorder=3, gid="worst")
        keys.append(
            style.key(f"the {points.worst} worst" if points.worst > 1 else "the worst", style.VERMILLION, "D", size=5)
        )
    style.legend_below(ax, keys)
    return figure


def _dim_label(dim: int | None) -> str:
    return "" if dim is None else f"dim {dim}  (element index)"


def _no_elements(shape: Sequence[int]) -> str:
    return f"the tensors have no elements:\nshape {list(shape)}"


def _findings(found: DifferenceMap) -> list[str]:
    lines = []
    if found.worst_index is None or found.worst_values is None:
        lines.append("no pair of finite values")
    elif found.worst == 0:
        lines.append(_all_equal(found.nonfinite_differ))
    else:
        x, y = (style.number(value, 4) for value in found.worst_values)
        lines.append(f"worst: {style.number(found.worst)} at {list(found.worst_index)}  (baseline {x}, target {y})")
    if found.nonfinite_index is not None and found.nonfinite_values is not None:
        x, y = (style.number(value, 4) for value in found.nonfinite_values)
        where = list(found.nonfinite_index)
        lines.append(f"non-finite: {found.nonfinite_differ} differ, first at {where}  (baseline {x}, target {y})")
    if found.nonfinite_equal:
        lines.append(f"non-finite: {found.nonfinite_equal} equal on both sides")
    return lines


def _all_equal(nonfinite_differ: int) -> str:
    return "every finite pair is equal" if nonfinite_differ else "every pair is equal"


def _two(values: Sequence[Any], absent: Any) -> tuple[Any, Any]:
    """Row and column of the shown axes of a tensor, with ``absent`` for a missing axis."""
    row, column = [*[absent] * (2 - len(values)), *values]
    return row, column


def _centres(found: DifferenceMap) -> tuple[style.Array, style.Array]:
    """Element indices at the centres of the cells: x of each column, y of each row."""
    rows, columns = found.grid.shape
    left, right, bottom, top = found.extent
    across, down = (right - left) / columns, (bottom - top) / rows
    return left + across * (np.arange(columns) + 0.5), top + down * (np.arange(rows) + 0.5)


def _outline(ax: Axes, edges: style.Array, counts: style.Array, color: str, line: str, label: str) -> None:
    # A log axis has no zero: an empty bin goes below its lower end.
    ax.stairs(np.maximum(counts, 0.1), edges, color=color, linestyle=line, linewidth=1.5, label=label, baseline=0.1)


def _count_axis(ax: Axes, most: int) -> None:
    ax.set_yscale("log")
    ax.set_ylim(0.5, most * 8)  # the legend is above the tallest bin
    ax.yaxis.set_major_locator(LogLocator(10, numticks=8))
    ax.yaxis.set_major_formatter(FuncFormatter(lambda count, _: f"{count:g}" if count < 1e4 else style.power(count)))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.legend(loc="upper center", ncols=3, frameon=False, fontsize=style.TICK, handletextpad=0.6, columnspacing=1.2)
