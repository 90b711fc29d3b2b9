"""Figures on dark pages: what is ink is light, data keep their colours, and the figure is as it was afterwards."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from kit.rows import row
from matplotlib import image
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.text import Text

import graftlab as gl
from graftlab.plots import themes
from graftlab.plots.style import to_html, to_png
from graftlab.rows.store import to_frame

NUMBERS = range(5)


def figure_of(number: int) -> Figure:
    rows = to_frame([row("a"), row("b", 2, rel_l2=1e-3), row("c", 3, rel_l2=0.0, nonfinite_differ=2)])
    x = torch.arange(48.0).view(6, 8)
    y = x.square() / 32
    make: Callable[[], Figure] = [
        lambda: gl.plots.divergence(rows, noise_floor=1e-5),
        lambda: gl.plots.over_steps(rows),
        lambda: gl.plots.ranks(rows, "b"),
        lambda: gl.plots.heatmap(x, y),
        lambda: gl.plots.histogram(x, y),
    ][number]
    return make()


def pixels(png: bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    return np.asarray(image.imread(io.BytesIO(png))[..., :3], dtype=np.float64)


@pytest.mark.slow
@pytest.mark.parametrize("number", NUMBERS)
def test_dark_colours_replace_all_black_and_are_undone_afterwards(number: int) -> None:
    figure = figure_of(number)
    # The layout settles with the first drawing.
    to_png(figure, dpi=40)
    before = to_png(figure, dpi=40)
    with themes.on_dark(figure):
        dark = pixels(to_png(figure, dpi=40))
    assert to_png(figure, dpi=40) == before
    assert np.median(dark[:4].max(axis=-1)) < 0.1, "the rim is paper"
    for text in figure.findobj(Text):
        assert text.get_color() not in ("white", themes._INK), "as it was"
    light = pixels(before)
    assert light.mean() > dark.mean()


@pytest.mark.slow
def test_data_keep_their_colours() -> None:
    figure = gl.plots.heatmap(torch.zeros(4, 4), torch.eye(4))
    light = pixels(to_png(figure))
    with themes.on_dark(figure):
        dark = pixels(to_png(figure))
    # In the middle of the cells: exact zeros are black on both.
    [axes, *_] = figure.axes
    box = axes.get_window_extent()
    scale = light.shape[1] / figure.bbox.width
    column, line = (
        int((box.x0 + box.width * 5 / 8) * scale),
        light.shape[0] - int((box.y0 + box.height * 7 / 8) * scale),
    )
    assert light[line, column].tolist() == dark[line, column].tolist()


def test_numbers_in_coloured_cells_keep_their_colour() -> None:
    figure = gl.plots.ranks(to_frame([row("b", rel_l2=1e-3), row("b", step=1, rel_l2=0.5)]), "b")
    cells = [text for text in figure.axes[0].texts if text.get_text() in ("0.001", "0.5")]
    light = [text.get_color() for text in cells]
    assert sorted(light) == ["black", "white"], "what is readable on each cell's colour"
    with themes.on_dark(figure):
        assert [text.get_color() for text in cells] == light


def test_dark_colours_keep_points_filled_and_lighten_blue_text() -> None:
    rows = to_frame([row("a", rel_l2=1e-3)])
    figure = gl.plots.divergence({"one": rows, "two": rows}, noise_floor=1e-5)
    (points,) = [each for each in figure.axes[0].collections if each.get_gid() == "two: compared"]
    (said,) = [text for text in figure.axes[0].texts if text.get_text().startswith("one, first divergent")]
    assert np.asarray(points.get_facecolor()).tolist() == [[0, 0, 0, 1]]
    with themes.on_dark(figure):
        assert np.asarray(points.get_facecolor()).min() > 0.8, "a hollow point would say that the two sides are equal"
        assert said.get_color() == "#56B4E9"
    assert said.get_color() == "#0072B2"


def test_points_of_several_colours_keep_them() -> None:
    figure = Figure()
    points = figure.add_subplot().scatter([0, 1], [0, 1], c=["black", "red"])
    with themes.on_dark(figure):
        assert np.asarray(points.get_facecolor()).tolist() == [[0, 0, 0, 1], [1, 0, 0, 1]]


def test_the_parts_of_a_point_of_a_line_change_by_themselves() -> None:
    figure = Figure()
    (line,) = figure.add_subplot().plot([1], [1], "o", color="red", markerfacecolor="black", markeredgecolor="white")

    def colours() -> tuple[object, ...]:
        return line.get_color(), line.get_markerfacecolor(), line.get_markeredgecolor()

    with themes.on_dark(figure):
        assert colours() == ("red", themes._INK, themes._PAPER)
    assert colours() == ("red", "black", "white")


def test_the_edge_of_a_bar_is_light_on_a_dark_page_and_its_face_stays() -> None:
    figure = Figure()
    (bar,) = figure.add_subplot().bar([0], [1], color="black", edgecolor="black")
    with themes.on_dark(figure):
        assert (to_rgba(bar.get_edgecolor()), to_rgba(bar.get_facecolor())) == (to_rgba(themes._INK), (0, 0, 0, 1))
    assert to_rgba(bar.get_edgecolor()) == (0, 0, 0, 1)


@pytest.mark.slow
def test_the_html_has_a_picture_for_each_theme_and_a_description() -> None:
    figure = figure_of(0)
    markup = to_html(figure)
    light, dark = re.findall("<img[^>]*>", markup)
    assert "graftlab-on-light" in light
    assert "hidden" not in light
    assert 'graftlab-on-dark dark-light" hidden' in dark
    for picture in (light, dark):
        assert 'alt="x: tap, in execution order. y: rel_l2' in picture
        assert "first divergent: b" in picture
    assert "&lt;b&gt;" in to_html(gl.plots.histogram(torch.ones(2), torch.ones(2), title='<b>"x"'))


WORDS = (
    "x: tap, in execution order. y: rel_l2 = ‖x-y‖ / ‖baseline‖ (ratio). first divergent: b (rel_l2 0.001). "
    "legend: compared, exact (hollow), non-finite differs, noise floor 1e-05",
    "first divergent: b in step 0 (the floor 1e-05, assumed for float32). x: step. y: tap, in execution order. "
    "legend: not finite, 0 (exact), first above the floor. colour: rel_l2 (ratio)",
    "b worst: target rank 0, step 0, rel_l2 0.001. x: receiving rank (← ranks that sent to it). y: step. "
    "colour: rel_l2 (ratio)",
    "[6, 8] float32 worst: 22 at [5, 7] (baseline 47, target 69.03). x: dim 1 (element index). "
    "y: dim 0 (element index). legend: worst element, 0 (exact). colour: |baseline - target| (tensor's units). "
    "x: dim 0: largest by index. x: dim 1: largest by index",
    "values. x: value (tensor's units). y: elements (count). legend: baseline, target. "
    "46 of 48 elements differ mean -0.245, std 8.42. x: |target - baseline| (tensor's units). y: elements (count). "
    "legend: target larger, target smaller, equal",
)


@pytest.mark.parametrize("number", NUMBERS)
def test_every_figure_can_be_described_in_words(number: int) -> None:
    assert themes.in_words(figure_of(number)) == WORDS[number]


def test_a_box_behind_a_text_is_as_dark_as_the_page() -> None:
    figure = Figure()
    text = figure.text(0.5, 0.5, "note", bbox={"facecolor": "black"})
    box = text.get_bbox_patch()
    assert box is not None
    with themes.on_dark(figure):
        assert box.get_facecolor() == to_rgba(themes._INK)
    assert box.get_facecolor() == to_rgba("black")


def test_characters_missing_from_the_font_cause_one_warning() -> None:
    figure = gl.plots.divergence(to_frame([row("层.输出"), row("層.出力", 2)]))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        to_png(figure)
    [one] = told
    assert str(one.message).startswith("the font DejaVu Sans lacks 5 characters of this figure's names")
    assert "matplotlib.rcParams['font.family']" in str(one.message)
