"""The figure of a verdict: what is at fault is named where it can be read, and NaN is not zero."""

from __future__ import annotations

import itertools
import math
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from graftlab.diffs.maps import difference_map
from graftlab.plots import style
from graftlab.plots.verdict import added_errors, explored, unfolding_maps
from graftlab.verdict.findings import ShownMap


def taps(*lines: dict[str, Any]) -> pd.DataFrame:
    usual: dict[str, Any] = {
        "tags": {},
        "step": 0,
        "added": 1e-8,
        "ratio": 0.1,
        "floor": 1e-7,
        "error": 1e-7,
        "error_ratio": 1.0,
        "label": "clean",
    }
    frame = pd.DataFrame([{"name": f"t{at}", "order": at, **usual, **line} for at, line in enumerate(lines)])
    return frame.assign(group=frame["name"])


def heights(figure: Figure, gid: str) -> list[float]:
    found = [artist for artist in figure.findobj() if artist.get_gid() == gid]
    return [float(y) for artist in found for _, y in np.asarray(artist.get_offsets())]  # type: ignore[attr-defined]


def tick(figure: Figure, label: str) -> float:
    (ax,) = figure.axes
    names = [each.get_text() for each in ax.get_yticklabels()]
    return float(ax.get_yticks()[names.index(label)])


def test_one_sided_non_finite_errors_are_at_the_top_and_zeros_below_the_scale() -> None:
    figure = added_errors(
        taps(
            {"added": 0.0, "ratio": 0.0},
            {"added": math.nan, "ratio": math.inf, "label": "culprit"},
            {"added": 1e-9, "ratio": math.inf, "label": "culprit"},
            {"added": math.nan, "ratio": math.nan, "error": math.nan, "error_ratio": math.nan},
        )
    )
    assert heights(figure, f"added {style.VERMILLION}") == [tick(figure, "not finite")] * 2
    assert heights(figure, f"added {style.GREEN}") == [tick(figure, "0 (exact)")], "what has no value is not drawn"
    assert tick(figure, "0 (exact)") < 1e-7 < tick(figure, "not finite")
    assert len(heights(figure, "inherited")) == 3


@pytest.mark.slow
def test_culprits_are_named_above_the_axes_and_those_beyond_four_are_counted() -> None:
    figure = added_errors(taps(*({"added": 0.1, "ratio": 1e6, "label": "culprit"} for _ in range(6)), {}))
    figure.canvas.draw()
    (ax,) = figure.axes
    notes = [text for text in ax.texts if isinstance(text, Annotation) and text.get_gid() == "culprit"]
    assert [note.get_text() for note in notes] == [
        "culprit: t3 (and 2 more groups)",
        "culprit: t2",
        "culprit: t1",
        "culprit: t0",
    ]
    boxes = [note.get_bbox_patch().get_window_extent() for note in notes]  # type: ignore[union-attr]
    assert all(box.y0 > ax.get_window_extent().y1 for box in boxes)
    assert all(upper.y0 >= lower.y1 - 1 for lower, upper in itertools.pairwise(boxes))
    steps = added_errors(taps({"label": "culprit"}, {"step": 1}))
    steps.canvas.draw()
    at = {text.get_text(): text.get_window_extent() for text in steps.axes[0].texts}
    assert not at["step 0"].overlaps(at["culprit: t0"])


def test_taps_of_one_name_are_labelled_by_their_tags() -> None:
    figure = added_errors(taps(*({"name": "gelu", "tags": {"layer": layer}} for layer in range(3))))
    assert [each.get_text() for each in figure.axes[0].get_xticklabels()] == [f"gelu layer={n}" for n in range(3)]


def test_the_table_of_a_verdict_has_the_label_and_the_worst_rank_of_each_tap() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a", "order": 0, "rank": 0, "ratio": 2.0},
        {"name": "a", "order": 0, "rank": 1, "ratio": 9.0, "label": "culprit", "added": 0.5},
        {"name": "b", "order": 1, "rank": 0, "label": "inherited"},
    ]
    table = explored(taps(*rows).assign(alone=math.nan), 5.0, "a is wrong")
    shown = zip(*(table[key] for key in ("label", "status", "worst", "value")), strict=True)
    assert list(shown) == [("a", "culprit", "target[1]", 0.5), ("b", "inherited", "target[0]", 1e-8)]
    assert (table["floors"], table["badness"]) == ([1e-7] * 2, [9.0, 0.1])
    assert table["notes"] == [[0, "culprit: a"]]


def test_pictures_of_maps_have_their_place_and_those_left_out_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(style, "to_html", lambda figure, alt, dpi: f"[{alt.partition(':')[0]}]")
    monkeypatch.setattr("graftlab.plots.verdict._PICTURES", 2)
    found = difference_map(torch.zeros(2), torch.ones(2))
    maps = {"a<b": ShownMap("a<b", found, None, None), "c": ShownMap("c.0", found, None, None)}
    shown = unfolding_maps(maps)
    assert "more" not in shown
    assert re.findall(r"<summary[^>]*>(.*?)</summary>(.*?)</details>", shown) == [
        ("Where a&lt;b differs", "[Where a<b differs]"),
        ("Where c differs, at c.0", "[Where c differs]"),
    ]
    more = {name: ShownMap(name, found, None, None) for name in "abcde"}
    assert "<p>3 pictures more: <code>verdict.plot(group)</code></p>" in unfolding_maps(more)


@pytest.mark.slow
def test_a_narrow_page_does_not_shrink_a_figure_below_legibility() -> None:
    figure = added_errors(taps(*({} for _ in range(113))))
    # JupyterLab gives an output some 860 pixels; a figure is drawn with 110 to the inch.
    points = 860 / (figure.get_size_inches()[0] * 110) * figure.axes[0].get_xticklabels()[0].get_fontsize()
    assert points * 110 / 72 >= 8
    assert "one in 2 named" in figure.axes[0].get_xlabel()
