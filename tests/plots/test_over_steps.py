"""Taps over steps: what a cell shows, where neighbours share one, and which step a ring marks."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

import graftlab as gl


def frame(values: np.ndarray[Any, Any], **columns: Any) -> pd.DataFrame:
    """Rows of taps ``t0``, ``t1``, ... with these values, a row of the array a step."""
    rows = [
        {"run": 0, "step": step, "order": step * len(line) + at, "name": f"t{at}", "status": "compared"}
        | {"rel_l2": value, "nonfinite_differ": 0, "tags": {}, "dtype": "float32", "side": "target", "rank": 0}
        for step, line in enumerate(values)
        for at, value in enumerate(line)
    ]
    return pd.DataFrame(rows).assign(**columns)


def cells(figure: Figure) -> Any:
    [image] = [each for each in figure.axes[0].images if each.get_gid() == "cells"]
    return image.get_array()


def rings(figure: Figure) -> list[tuple[float, float]]:
    found = [each for each in figure.axes[0].collections if each.get_gid() == "first divergent step"]
    return [tuple(point) for each in found for point in each.get_offsets().tolist()]


def title(figure: Figure) -> str:
    return str(figure.axes[0].get_title(loc="left"))


def test_cells_show_taps_in_steps_and_rings_their_first_divergent_step() -> None:
    values = np.array([[1e-7, 1e-7, 0.0], [1e-7, 1e-3, 1e-7], [1e-7, 1e-2, 1e-1]])
    figure = gl.plots.over_steps(frame(values))
    shown = cells(figure)
    assert shown.shape == (3, 3)
    assert shown[1, 2] == pytest.approx(1e-2)
    assert rings(figure) == [(1, 1), (2, 2)]
    assert title(figure) == "first divergent: t1 in step 1 (the floor 1e-05, assumed for float32)"
    assert title(gl.plots.over_steps(frame(values), noise_floor=0.5)) == "no tap is above the floor 0.5 in 3 steps"


def test_the_title_counts_the_taps_that_were_not_compared() -> None:
    values = np.array([[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    rows = frame(values).assign(status=["compared", "failed", "unmatched", "compared", "failed", "recomputed"])
    assert title(gl.plots.over_steps(rows)).splitlines() == [
        "no tap is above the floor 1e-05, assumed for float32 in 2 steps",
        "not compared: 2 failed, 1 unmatched",
    ]


def test_negative_values_are_shown_by_their_size() -> None:
    values = np.array([[1e-7, 1e-3]])
    rows = frame(values).assign(mean_target=[-0.25, 4.0])
    assert cells(gl.plots.over_steps(rows, value="mean_target")).tolist() == [[0.25], [4.0]]


def test_each_occurrence_of_a_tap_has_its_own_line() -> None:
    values = np.array([[1e-7, 1e-3]])
    rows = frame(values).assign(name="q", occurrence=[0, 1])
    figure = gl.plots.over_steps(rows)
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["q", "q #1"]
    assert cells(figure)[:, 0].tolist() == [pytest.approx(1e-7), pytest.approx(1e-3)]


def test_nan_is_neither_blank_nor_exact_and_unmeasured_cells_are_blank() -> None:
    rows = frame(np.array([[1e-7, 0.0, 0.0]]))
    rows.loc[1, "nonfinite_differ"] = 4
    rows.loc[2, ["status", "rel_l2"]] = ["missing", None]
    figure = gl.plots.over_steps(rows)
    assert cells(figure).mask.ravel().tolist() == [False, True, True]
    [red] = [each for each in figure.axes[0].images if each.get_gid() == "not finite"]
    assert (red.get_array()[:, 0, 3] > 0).tolist() == [False, True, False]
    assert rings(figure) == [(0, 1)]


def test_grafted_taps_have_no_ring() -> None:
    rows = frame(np.array([[0.5, 0.5]]))
    rows.loc[0, "status"] = "grafted"
    assert rings(gl.plots.over_steps(rows)) == [(0, 1)]


@pytest.mark.slow
def test_beyond_the_limit_the_worst_of_neighbouring_cells_is_shown() -> None:
    values = np.full((500, 300), 1e-7)
    values[321, 123] = 0.5
    figure = gl.plots.over_steps(frame(values))
    shown = cells(figure)
    assert shown.shape == (150, 167)
    assert shown[123 // 2, 321 // 3] == pytest.approx(0.5)
    assert rings(figure) == [(321 // 3, 123 // 2)]
    assert title(figure).startswith("first divergent: t123 in step 321")


def test_an_empty_frame_gives_a_message() -> None:
    [ax] = gl.plots.over_steps(pd.DataFrame()).axes
    assert "no rows to show" in ax.texts[0].get_text()


def test_cells_of_more_steps_or_taps_than_fit_share_one_with_their_maximum() -> None:
    values = np.full((481, 3), 1e-6)
    values[4, 1] = values[480, 2] = 1e-2
    drawn = cells(gl.plots.over_steps(frame(values), noise_floor=1e-3))
    # Three steps share a cell, so that at most 240 are drawn.
    assert drawn.shape == (3, 161)
    assert np.argwhere(np.asarray(drawn) > 1e-3).tolist() == [[1, 1], [2, 160]]
    assert rings(gl.plots.over_steps(frame(values), noise_floor=1e-3)) == [(1.0, 1.0), (160.0, 2.0)]
    assert cells(gl.plots.over_steps(frame(values.T.repeat(100, axis=0)), noise_floor=1e-3)).shape == (161, 150)
    assert cells(gl.plots.over_steps(frame(np.full((240, 2), 1.0)))).shape == (2, 240)


def test_blank_cells_at_the_edge_stay_blank_when_neighbours_share_a_cell() -> None:
    shown = frame(np.full((481, 2), 1e-6))
    shown = shown[(shown["name"] != "t1") | (shown["step"] < 478)].reset_index(drop=True)
    drawn = np.ma.filled(cells(gl.plots.over_steps(shown)), np.nan)
    assert np.isfinite(drawn[0]).all()
    assert not np.isfinite(drawn[1, -2:]).any() or drawn[1, -1] != drawn[0, -1]


def test_tags_whose_values_are_lists_are_named_where_they_vary() -> None:
    rows = frame(np.array([[1e-7, 1e-3], [1e-7, 1e-2]])).assign(name="t", occurrence=0)
    rows["tags"] = [{"name": "t", "at": [n % 2, 0]} for n in range(4)]
    rows["at"] = [[n % 2, 0] for n in range(4)]
    assert "(largest over at)" in title(gl.plots.history(rows, "t"))
