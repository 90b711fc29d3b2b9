"""Every kind of figure is drawn as it is kept in figures.txt: texts, colours, marks, limits and what is drawn where.

``GRAFTLAB_REDRAW=1 pytest tests/plots/test_drawn_figures.py`` writes the file anew; read its differences before you
commit them. Nothing in it depends on fonts or on the layout of a page.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from graftlab import plots
from graftlab.plots.verdict import added_errors
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame

KEPT = Path(__file__).with_name("figures.txt")


# ---- what is drawn --------------------------------------------------------------------------------------------------


def rows(steps: int = 3, ranks: int = 2) -> pd.DataFrame:
    """Taps of all kinds: equal ones, growing ones, with NaN, missing, failed, grafted, and without a value."""
    made = []
    values = {"exact": 0.0, "small": 2e-7, "large": 3e-2, "nan": math.nan, "missing": None, "failed": None, "new": None}
    for rank in range(ranks):
        for step in range(steps):
            for order, (name, value) in enumerate(values.items()):
                status = {"missing": "missing", "failed": "failed", "new": "from another version"}.get(name, "compared")
                own = None if value is None else value * (1 + rank) * 10.0 ** min(step, 5)
                tags = {"name": name, "step": step, "side": "target", "rank": rank, "layer": order % 2}
                odd = None if value is None else int(name == "nan")
                own_order = step * len(values) + order
                row = Row(1, step, own_order, name, tags, "b2t", "target", rank, senders=[0], rel_l2=own, status=status)
                made.append(row._replace(nonfinite_differ=odd, dtype="float32", occurrence=0, numel=8))
    made.append(made[1]._replace(status="grafted", step=steps, order=99))
    return to_frame(made)


@cache
def pair() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    baseline = torch.randn(12, 40, generator=generator)
    target = baseline * (1 + 1e-3 * torch.randn(12, 40, generator=generator))
    target[3] = baseline[3]
    target[7, 30] = 9.0
    return baseline, target


def odd_pair() -> tuple[torch.Tensor, torch.Tensor]:
    baseline, target = (each.clone() for each in pair())
    baseline[0, :2], target[0, 1:4] = torch.nan, torch.inf
    return baseline, target


def culprits() -> pd.DataFrame:
    labels = [
        "clean",
        "inherited",
        "culprit",
        "minor",
        "cancels",
        "clean",
        "unmeasured",
        "rounds differently",
        "culprit",
    ]
    lines = [
        {
            "name": f"layers.{at // 2}.{'ab'[at % 2]}",
            "group": f"layers.*.{'ab'[at % 2]}",
            "order": at % 5,
            "step": at // 5,
        }
        | {"tags": {"rank": 0}, "added": 10.0 ** (at - 8), "floor": 1e-7 * (1 + at), "error": 10.0 ** (at - 7)}
        | {"ratio": 10.0 ** (at - 1), "error_ratio": 10.0**at, "label": label}
        for at, label in enumerate(labels)
    ]
    return pd.DataFrame([*lines, {**lines[2], "ratio": 0.0, "added": 0.0}])


def in_max_abs(frame: pd.DataFrame) -> pd.DataFrame:
    """The same numbers in another column."""
    return frame.assign(max_abs=frame["rel_l2"], rel_l2=0.0)


FIGURES: dict[str, Callable[[], Figure]] = {
    "divergence": lambda: plots.divergence(rows()),
    "divergence of runs": lambda: plots.divergence({"before": rows(2), "after": rows(1)}, noise_floor=1e-6),
    "divergence in max_abs": lambda: plots.divergence(rows().assign(max_abs=0.5), value="max_abs"),
    "history": lambda: plots.history(rows(), "large"),
    "history of what is missing": lambda: plots.history(rows(), "missing"),
    "history of nan": lambda: plots.history(rows(), "nan"),
    "history in a tensor's units": lambda: plots.history(rows().assign(std_target=0.5), "large", value="std_target"),
    "ranks": lambda: plots.ranks(rows(), "large"),
    "ranks of equal taps": lambda: plots.ranks(rows(), "exact"),
    "ranks of nan": lambda: plots.ranks(rows(), "nan"),
    "ranks over many steps": lambda: plots.ranks(in_max_abs(rows(400, 1)), "small", value="max_abs"),
    "over steps": lambda: plots.over_steps(rows()),
    "over many steps": lambda: plots.over_steps(in_max_abs(rows(60, 1)), value="max_abs", noise_floor=1.0),
    "heatmap": lambda: plots.heatmap(*pair(), title="hidden layer=3"),
    "heatmap of non-finite values": lambda: plots.heatmap(*odd_pair()),
    "heatmap of equal tensors": lambda: plots.heatmap(pair()[0], pair()[0]),
    "histogram": lambda: plots.histogram(*pair(), title="hidden layer=3"),
    "histogram of non-finite values": lambda: plots.histogram(*odd_pair()),
    "histogram of equal tensors": lambda: plots.histogram(pair()[0], pair()[0]),
    "histogram of complex tensors": lambda: plots.histogram(pair()[0] * 1j, pair()[1] * 1j),
    "scatter": lambda: plots.scatter(*pair(), title="hidden layer=3"),
    "scatter of non-finite values": lambda: plots.scatter(*odd_pair()),
    "scatter of constants": lambda: plots.scatter(torch.full((3,), 2.0), torch.full((3,), 2.0)),
    "scatter of zeros": lambda: plots.scatter(torch.zeros(3), torch.zeros(3)),
    "added errors": lambda: added_errors(culprits()),
    "added errors of one step": lambda: added_errors(culprits()[:5], threshold=2.0),
}


# ---- in words -------------------------------------------------------------------------------------------------------


def number(value: float) -> str:
    return f"{float(value) + 0.0:.3g}"


def extent(values: Any) -> str:
    """The least, the largest and the mean of what is finite, and how many others there are."""
    flat = np.ma.masked_invalid(np.asarray(values, dtype=float)).compressed()
    size = np.size(values)
    if not flat.size:
        return f"{size} without a number"
    return (
        f"{size} from {number(flat.min())} to {number(flat.max())}, mean {number(flat.mean())}, {size - flat.size} odd"
    )


def colours(found: Any) -> str:
    listed = np.atleast_2d(found) if not isinstance(found, str) else [found]
    return "/".join(dict.fromkeys(to_hex(each, keep_alpha=True) for each in listed if len(each)))


def fixed_ticks(labels: Iterable[Any], places: Iterable[float]) -> str:
    return "; ".join(f"{label.get_text()} at {number(at)}" for label, at in zip(labels, places, strict=True))


def own_label(artist: Any) -> str:
    """Its label, unless matplotlib made it up."""
    label = str(artist.get_label())
    return "" if label.startswith("_") else label


def described(ax: Axes) -> Iterator[str]:
    titles = [title for where in ("left", "center", "right") if (title := ax.get_title(loc=where))]  # type: ignore[arg-type]
    yield f"axes {titles!r}, x {ax.get_xlabel()!r} {ax.get_xscale()}, y {ax.get_ylabel()!r} {ax.get_yscale()}"
    if not ax.axison:
        yield "  off"
    yield "  limits " + " ".join(map(number, (*ax.get_xlim(), *ax.get_ylim())))
    for axis in (ax.xaxis, ax.yaxis):
        if type(axis.get_major_locator()).__name__ == "FixedLocator":
            yield f"  ticks {fixed_ticks(axis.get_ticklabels(), axis.get_ticklocs())}"
        else:
            yield f"  ticks by {type(axis.get_major_locator()).__name__}"
    for text in ax.texts:
        place = (*text.xyann, *text.xy) if isinstance(text, Annotation) else text.get_position()
        look = f"{to_hex(text.get_color())} {text.get_ha()} {number(text.get_fontsize())} gid={text.get_gid()}"
        yield f"  text {text.get_text()!r} at {' '.join(map(number, place))}, {look}"
    for line in ax.lines:
        x, y = (np.asarray(each, dtype=float) for each in (line.get_xdata(), line.get_ydata()))
        look = f"{to_hex(line.get_color())} {line.get_linestyle()} {line.get_marker()} {number(line.get_linewidth())}"
        yield f"  line {own_label(line)!r} gid={line.get_gid()} {look}: x {extent(x)}; y {extent(y)}"
    for many in ax.collections:
        look = f"face {colours(many.get_facecolor())} edge {colours(many.get_edgecolor())}"
        look += f" wide {extent(many.get_linewidth())} above {number(many.get_zorder())}"
        offsets = np.asarray(many.get_offsets(), dtype=float)
        paths = np.concatenate([path.vertices for path in many.get_paths()]) if many.get_paths() else np.empty((0, 2))
        at = offsets if offsets.any() else paths
        size = extent(many.get_sizes()) if hasattr(many, "get_sizes") else "of its own"
        where = f"x {extent(at[:, 0])}; y {extent(at[:, 1])}"
        yield f"  {type(many).__name__} gid={many.get_gid()} {look} size {size}: {where}"
    for patch in ax.patches:
        corners = patch.get_path().transformed(patch.get_patch_transform()).vertices
        look = f"face {colours(patch.get_facecolor())} edge {colours(patch.get_edgecolor())} {patch.get_linestyle()}"
        where = f"x {extent(corners[:, 0])}; y {extent(corners[:, 1])}"
        # Releases of matplotlib make patches of different classes.
        yield f"  patch {own_label(patch)!r} gid={patch.get_gid()} {look}: {where}"
    for image in ax.images:
        ends = " ".join(map(number, image.get_extent()))
        yield f"  image gid={image.get_gid()} {np.shape(image.get_array())} in {ends}: {extent(image.get_array())}"
    if legend := ax.get_legend():
        yield f"  legend {[text.get_text() for text in legend.get_texts()]!r}"


def words(figure: Figure) -> str:
    size = " x ".join(map(number, figure.get_size_inches()))
    legends = [[text.get_text() for text in legend.get_texts()] for legend in figure.legends]
    axes = sorted(figure.findobj(Axes), key=lambda ax: (ax.get_title(loc="left"), ax.get_xlabel(), ax.get_ylabel()))
    return "\n".join([f"figure {size} {legends or ''}".rstrip(), *(line for ax in axes for line in described(ax))])  # type: ignore[arg-type]


@cache
def kept() -> dict[str, str]:
    parts = KEPT.read_text(encoding="utf-8").split("\n=== ")[1:]
    return {name: text.strip("\n") for name, _, text in (part.partition(" ===\n") for part in parts)}


@pytest.mark.skipif("GRAFTLAB_REDRAW" in os.environ, reason="the figures are drawn anew")
@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_is_drawn_as_it_is_kept(name: str) -> None:
    assert words(FIGURES[name]()).splitlines() == kept()[name].splitlines()


@pytest.mark.skipif("GRAFTLAB_REDRAW" not in os.environ, reason="GRAFTLAB_REDRAW is not set")
def test_figures_are_drawn_anew() -> None:
    KEPT.write_text("".join(f"\n=== {name} ===\n{words(draw())}\n" for name, draw in FIGURES.items()), encoding="utf-8")
