"""Figures show what the rows and tensors say: where each artist is, what is written, and what must not be lost."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import warm
from kit.examples import examples
from kit.refusals import exactly
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cbook import is_math_text
from matplotlib.colors import LogNorm, to_hex
from matplotlib.figure import Figure
from matplotlib.text import Annotation

from graftlab import plots
from graftlab.diffs import samples
from graftlab.plots import style
from graftlab.plots.pairs import _two
from graftlab.plots.scales import color_bar, log_image
from graftlab.plots.taps import MAX_SLANTED
from graftlab.plots.themes import in_words
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame

OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}
FRAME_FIGURES: dict[str, Callable[[pd.DataFrame], Figure]] = {
    "divergence": plots.divergence,
    "history": lambda frame: plots.history(frame, "h"),
    "ranks": lambda frame: plots.ranks(frame, "h"),
}
PAIR_FIGURES = {"heatmap": plots.heatmap, "histogram": plots.histogram, "scatter": plots.scatter}
REAL_DTYPES = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]


def row(name: str = "h", value: float | None = 1e-6, /, status: str = "compared", **more: Any) -> Row:
    """A row as a rank writes it; keywords other than columns become tags."""
    own = {
        "run",
        "step",
        "order",
        "side",
        "rank",
        "senders",
        "nonfinite_differ",
        "occurrence",
        "max_abs",
        "cosine",
        "mean_target",
    }
    tags = {key: more.pop(key) for key in list(more) if key not in own}
    base = {"run": 1, "step": 0, "order": 0, "side": "target", "rank": 0, "senders": [0], "occurrence": 0, **more}
    base["tags"] = {"name": name, "step": base["step"], "side": "target", "rank": base["rank"], **tags}
    base.setdefault("nonfinite_differ", 0 if status in ("compared", "grafted") else None)
    return Row(name=name, rel_l2=value, status=status, direction="b2t", **base)


def frame(*rows: Row) -> pd.DataFrame:
    """Rows in execution order, unless they say otherwise."""
    return to_frame([one._replace(order=one.order or at) for at, one in enumerate(rows)])


def by_gid(figure: Figure, gid: str) -> Any:
    found = [artist for artist in figure.findobj() if artist.get_gid() == gid]
    assert len(found) <= 1, f"{len(found)} artists are called {gid}"
    return found[0] if found else None


def points(figure: Figure, gid: str) -> list[tuple[float, float]]:
    artist = by_gid(figure, gid)
    return [] if artist is None else [tuple(point) for point in np.asarray(artist.get_offsets())]


def near(expected: list[tuple[float, float]]) -> Any:
    return pytest.approx(np.array(expected))


def axes(figure: Figure) -> Axes:
    return figure.axes[0]


def tick_labels(figure: Figure) -> list[str]:
    return [label.get_text() for label in axes(figure).get_xticklabels()]


def y_ticks(figure: Figure) -> dict[str, float]:
    ax = axes(figure)
    return dict(zip([t.get_text() for t in ax.get_yticklabels()], ax.get_yticks(), strict=True))


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text")))


def title(figure: Figure) -> str:
    return axes(figure).get_title(loc="left")


def annotations(figure: Figure) -> list[Annotation]:
    return [text for text in axes(figure).texts if isinstance(text, Annotation)]


def legend(figure: Figure) -> list[str]:
    found = axes(figure).get_legend()
    return [] if found is None else [text.get_text() for text in found.get_texts()]


def model_frame(
    layers: int = 3, ranks: int = 2, steps: int = 1, first_step: int = 0, bad: int | None = None
) -> pd.DataFrame:
    """What a small model leaves behind; from layer ``bad`` on the outputs are wrong."""
    rows = []
    for rank in range(ranks):
        order = 0
        for step in range(first_step, first_step + steps):
            for layer in range(layers):
                for name in ("attn_out", "mlp_out"):
                    wrong = bad is not None and (layer, name) >= (bad, "mlp_out")
                    value = (1 + rank) * (2e-2 if wrong else 1e-7 * (layer + 1))
                    rows.append(row(name, value, rank=rank, step=step, order=order, layer=layer))
                    order += 1
    return to_frame(rows)


# --- divergence


def test_taps_are_placed_in_execution_order_whatever_the_order_of_the_rows() -> None:
    data = frame(row("c", 1e-3, order=7), row("a", 1e-5, order=2), row("b", 1e-4, order=5))
    figure = plots.divergence(data.sample(frac=1, random_state=1))
    assert tick_labels(figure) == ["a", "b", "c"]
    assert points(figure, "run 1: compared") == near([(0, 1e-5), (1, 1e-4), (2, 1e-3)])


def test_later_steps_are_to_the_right_even_if_a_rank_has_fewer_taps() -> None:
    ahead = [row("a", step=0, order=90, rank=0), row("a", step=1, order=91, rank=0)]
    behind = [row("b", step=1, order=1, rank=1)]
    assert tick_labels(plots.divergence(to_frame(ahead + behind))) == ["a step=0", "b step=1", "a step=1"]


def test_names_are_level_if_they_fit_and_otherwise_slanted_or_upright() -> None:
    def rotation(names: list[str]) -> float:
        figure = plots.divergence(frame(*(row(name, order=n) for n, name in enumerate(names))))
        return float(axes(figure).get_xticklabels()[0].get_rotation())

    assert rotation(["x"]) == 0, "slanted it is a plus"
    assert rotation([f"layers.{n}.self_attn.out" for n in range(8)]) == 45
    assert rotation([f"layers.{n}.self_attn.out" for n in range(40)]) == 90


def test_runs_are_ordered_by_their_steps_not_by_where_the_frame_has_them() -> None:
    data = to_frame([row("a", run=1, step=0), row("a", run=2, step=1), row("a", run=3, step=2)])
    assert tick_labels(plots.divergence(data[::-1])) == ["a step=0", "a step=1", "a step=2"]


def test_divergence_has_units_and_a_log_axis() -> None:
    ax = axes(plots.divergence(frame(row())))
    assert ax.get_yscale() == "log"
    # Ticks between those that are labelled would suggest values that the axis does not have, such as zero's neighbours.
    assert not len(ax.yaxis.get_minorticklocs())
    assert ax.get_ylabel() == "rel_l2 = ‖x-y‖ / ‖baseline‖  (ratio)"
    assert "execution order" in ax.get_xlabel()
    assert "tensor's units" in axes(plots.divergence(frame(row(max_abs=1.0)), value="max_abs")).get_ylabel()


def test_several_receiving_ranks_show_as_their_largest() -> None:
    data = frame(*(row("a", value, rank=rank, order=1) for rank, value in enumerate([1e-6, 3e-4, math.nan, 2e-6])))
    assert points(plots.divergence(data), "run 1: compared") == near([(0, 3e-4)])


def test_every_status_has_its_own_colour_and_marker_from_the_palette() -> None:
    statuses = ["compared", "grafted", "failed", "missing", "timeout", "unmatched"]
    figure = plots.divergence(frame(*(row(s, 1e-6 if s in ("compared", "grafted") else None, s) for s in statuses)))
    drawn = [by_gid(figure, f"run 1: {status}") for status in statuses]
    colors = {to_hex(artist.get_facecolors()[0]) for artist in drawn}
    assert len(colors) == len(statuses)
    assert colors <= OKABE_ITO
    assert len({artist.get_paths()[0].vertices.tobytes() for artist in drawn}) == len(statuses)
    assert sorted(legend(figure)) == sorted(statuses)


def test_a_row_without_a_value_is_at_the_edge_and_inside_the_axes() -> None:
    data = frame(row("a", 1e-6), row("b", None, "failed"), row("c", None, "missing"), row("d", 2e-2))
    figure = plots.divergence(data)
    ((_, top),), ((_, bottom),) = points(figure, "run 1: failed"), points(figure, "run 1: missing")
    low, high = axes(figure).get_ylim()
    assert low < bottom < 1e-6
    assert 2e-2 < top < high


def test_a_tap_that_one_rank_measured_and_another_missed_shows_both() -> None:
    figure = plots.divergence(frame(row("a", 1e-6, order=3), row("a", None, "timeout", rank=1, order=3)))
    assert points(figure, "run 1: compared") == near([(0, 1e-6)])
    assert [x for x, _ in points(figure, "run 1: timeout")] == [0]


def test_an_unknown_status_is_drawn_and_named() -> None:
    figure = plots.divergence(frame(row("a"), row("b", None, "skipped")))
    assert len(points(figure, "run 1: skipped")) == 1
    assert "skipped" in legend(figure)


def test_exact_zeros_are_hollow_below_the_scale() -> None:
    figure = plots.divergence(frame(row("a", 0.0), row("b", 1e-7), row("c", 0.0, "grafted")))
    floor = y_ticks(figure)["0 (exact)"]
    assert points(figure, "run 1: compared exact") == [(0, floor)]
    assert points(figure, "run 1: grafted exact") == [(2, floor)]
    assert axes(figure).get_ylim()[0] < floor < 1e-7
    assert not len(by_gid(figure, "run 1: compared exact").get_facecolors())


@pytest.mark.slow
@pytest.mark.parametrize("value", [0.0, math.nan, math.inf, None])
def test_frames_without_one_ordinary_value_are_drawn(value: float | None) -> None:
    for draw in FRAME_FIGURES.values():
        figure = draw(frame(row("h", value), row("h", value, step=1, order=1)))
        assert plots.to_png(figure)
    figure = plots.divergence(frame(row("h", value)), noise_floor=1e-5)
    place = points(figure, "run 1: compared exact" if value == 0 else "run 1: compared")
    low, high = axes(figure).get_ylim()
    assert len(place) == 1
    assert low < place[0][1] < high


def test_values_at_the_ends_of_float64_are_drawn() -> None:
    figure = plots.divergence(frame(row("a", 5e-324), row("b", 1.7e308), row("c", None, "failed"), row("d", 0.0)))
    assert plots.to_png(figure)
    assert all(math.isfinite(limit) and limit > 0 for limit in axes(figure).get_ylim())


def test_non_finite_differences_stand_out() -> None:
    data = frame(row("a"), row("b", 1e-7, nonfinite_differ=2), row("c", math.nan, nonfinite_differ=9))
    figure = plots.divergence(data)
    ring = by_gid(figure, "run 1: non-finite")
    assert [x for x, _ in ring.get_offsets()] == [1, 2]
    assert ring.get_sizes()[0] > 2 * by_gid(figure, "run 1: compared").get_sizes()[0]
    assert ring.get_zorder() > by_gid(figure, "run 1: compared").get_zorder()
    assert "non-finite differs" in legend(figure)


def test_a_tap_that_agrees_except_for_nans_is_not_shown_as_exact() -> None:
    data = frame(row("a", 1e-7), row("b", 0.0, nonfinite_differ=2), row("c", 0.0))
    figure = plots.divergence(data)
    ticks = y_ticks(figure)
    assert points(figure, "run 1: compared exact") == [(2, ticks["0 (exact)"])]
    ((x, y),) = points(figure, "run 1: non-finite")
    assert x == 1
    assert y == ticks["not finite"] > 1e-7
    figure = plots.history(frame(row("h", 1e-7), row("h", 0.0, step=1, nonfinite_differ=2)), "h")
    assert "0 (exact)" not in y_ticks(figure)
    assert points(figure, "target rank 0: non-finite") == [(1, y_ticks(figure)["not finite"])]
    figure = plots.ranks(frame(row("h", 1e-7), row("h", 0.0, rank=1, nonfinite_differ=2)), "h")
    assert "0 (exact)" not in legend(figure)
    assert by_gid(figure, "not finite").get_x() == 0.5
    assert title(figure) == "h\nworst: target rank 1, step 0, non-finite values differ"


def test_the_noise_floor_is_a_line_and_the_first_tap_above_it_is_annotated() -> None:
    figure = plots.divergence(model_frame(bad=1), noise_floor=1e-5)
    assert list(by_gid(figure, "noise floor").get_ydata()) == [1e-5, 1e-5]
    (note,) = annotations(figure)
    assert note.get_text() == "first divergent: mlp_out layer=1  (rel_l2 0.04)"
    assert note.xy == pytest.approx((3, 4e-2))
    assert not annotations(plots.divergence(model_frame(bad=1), noise_floor=1e-5, suspect=False))
    assert not annotations(plots.divergence(model_frame(), noise_floor=1e-5))


def test_without_a_floor_only_failures_and_non_finite_values_are_suspects() -> None:
    assert not annotations(plots.divergence(frame(row("a", 0.9))))
    (note,) = annotations(plots.divergence(frame(row("a", 0.9), row("b", None, "failed"))))
    assert note.get_text() == "first divergent: b  (failed)"
    (note,) = annotations(plots.divergence(frame(row("a", 0.9), row("b", 1e-9, nonfinite_differ=1))))
    assert note.get_text() == "first divergent: b  (non-finite values differ)"


def test_labels_contain_only_distinguishing_tags() -> None:
    rows = [row("norm", layer=0, phase="decode"), row("norm", layer=1, phase="decode"), row("logits", phase="decode")]
    assert tick_labels(plots.divergence(frame(*rows))) == ["norm layer=0", "norm layer=1", "logits"]
    twice = [row("f"), row("f", occurrence=1), row("f", step=1), row("f", step=1, occurrence=1)]
    assert tick_labels(plots.divergence(frame(*twice))) == ["f step=0 #0", "f step=0 #1", "f step=1 #0", "f step=1 #1"]


def test_tags_are_named_before_the_step_and_no_line_leads_from_one_step_to_the_next() -> None:
    figure = plots.divergence(frame(*(row("f", step=step, layer=layer) for step in (0, 1) for layer in (0, 1, 2))))
    assert tick_labels(figure) == [f"f layer={layer} step={step}" for step in (0, 1) for layer in (0, 1, 2)]
    line = by_gid(figure, "run 1: line")
    np.testing.assert_array_equal(line.get_xdata(), [0, 1, 2, math.nan, 3, 4, 5])
    assert np.isnan(line.get_ydata()).tolist() == [False] * 3 + [True] + [False] * 3


def test_labels_have_the_tags_of_all_runs() -> None:
    figure = plots.divergence([frame(row("h", first=1, last=2)), frame(row("h", last=3))])
    assert sorted(tick_labels(figure)) == ["h first=1 last=2", "h last=3"]


def test_only_compared_taps_of_several_runs_are_grey_in_the_legend() -> None:
    data = frame(row("a"), row("b", 1e-6, "grafted"), row("c", None, "failed"))
    found = axes(plots.divergence([data, data])).get_legend()
    assert found is not None
    colors = {handle.get_label(): handle.get_color() for handle in found.legend_handles}
    expected = {"compared": style.GREY, **{each: style.look(each).color for each in ("grafted", "failed")}}
    assert {name: colors[name] for name in expected} == expected
    assert expected["grafted"] != style.GREY != expected["failed"]


def test_tags_that_name_a_rank_do_not_split_a_tap() -> None:
    data = frame(*(row("a", 1e-6, rank=rank, tp_rank=rank, order=1) for rank in range(3)))
    assert tick_labels(plots.divergence(data)) == ["a"]


def test_tags_may_be_lists_dicts_missing_or_called_like_a_column() -> None:
    tags: list[dict[str, Any]] = [{"where": [1, 2]}, {"where": {"a": 1}}, {"where": 3}, {}, {"shape": "wide"}]
    labels = tick_labels(plots.divergence(frame(*(row("a", **one) for one in tags))))
    assert labels == ["a where=[1, 2]", "a where={'a': 1}", "a where=3", "a", "a tag_shape=wide"]


def test_a_frame_made_by_hand_needs_few_columns() -> None:
    data = pd.DataFrame(
        {"name": ["a", "a"], "order": [0, 1], "status": "compared", "rel_l2": [1e-7, 1e-1], "layer": [0, 1]}
    )
    figure = plots.divergence(data, noise_floor=1e-5)
    assert tick_labels(figure) == ["a layer=0", "a layer=1"]
    found = plots.first_divergent(data)
    assert found is not None
    assert found["layer"] == 1


def test_long_names_are_cut_in_the_middle_and_keep_their_numbers() -> None:
    name = "model.decoder.layers.17.self_attention.projection.output_dropout"
    (label,) = tick_labels(plots.divergence(frame(row(name))))
    assert label == "model…17…projection.output_dropout"
    (label,) = tick_labels(plots.divergence(frame(row("x" * 500 + "tail"))))
    assert len(label) == 40
    assert label.startswith("xxx")
    assert label.endswith("tail")
    assert "…" in label


@pytest.mark.slow
def test_ten_thousand_taps_make_few_artists_and_few_labels() -> None:
    figure = plots.divergence(frame(*(row(f"tap.{i}", 1e-7) for i in range(10_000))), noise_floor=1e-5)
    assert 30 <= len(tick_labels(figure)) <= 60
    assert "one in 167 named" in axes(figure).get_xlabel()
    assert figure.get_size_inches()[0] <= 16
    assert len(points(figure, "run 1: compared")) == 10_000
    assert len(axes(figure).collections) + len(axes(figure).lines) < 10
    widths = [plots.divergence(frame(*(row(f"t{i}") for i in range(n)))).get_size_inches()[0] for n in (10, 60)]
    assert widths[0] < widths[1] < 16


def test_runs_are_aligned_by_tap_even_if_their_steps_differ() -> None:
    figure = plots.divergence({"bad": model_frame(bad=1), "good": model_frame(first_step=5)}, noise_floor=1e-5)
    assert len(tick_labels(figure)) == 6
    bad, good = points(figure, "bad: compared"), points(figure, "good: compared")
    assert [round(x) for x, _ in bad] == [round(x) for x, _ in good] == list(range(6))
    assert to_hex(by_gid(figure, "bad: line").get_color()) != to_hex(by_gid(figure, "good: line").get_color())
    assert by_gid(figure, "bad: line").get_linestyle() != by_gid(figure, "good: line").get_linestyle()
    assert {"bad", "good"} <= set(legend(figure))
    assert [note.get_text() for note in annotations(figure)] == ["bad, first divergent: mlp_out layer=1  (rel_l2 0.04)"]


def test_steps_are_counted_from_each_runs_first_if_they_differ() -> None:
    first, second = (frame(row("a", step=s), row("a", step=s + 1)) for s in (3, 7))
    assert tick_labels(plots.divergence([first, second])) == ["a step +0", "a step +1"]
    assert tick_labels(plots.divergence([first, first])) == ["a step=3", "a step=4"]


def test_a_tap_of_only_one_run_is_placed_after_its_predecessor() -> None:
    more = frame(row("zero"), row("a"), row("extra"), row("b", phase="x"), row("end"))
    less = frame(row("a"), row("b", phase="x"))
    for frames in ([less, more], [more, less]):
        figure = plots.divergence(frames, labels=["one", "two"])
        assert tick_labels(figure) == ["zero", "a", "extra", "b", "end"]
        assert legend(figure)[:2] == ["one", "two"]


def test_labels_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="1 labels were given for 2 frames"):
        plots.divergence([frame(row()), frame(row())], labels=["one"])
    with pytest.raises(ValueError, match=exactly("the labels ['one', 'one'] are not all different")):
        plots.divergence([frame(row()), frame(row())], labels=["one", "one"])


def test_a_value_that_can_be_negative_gets_a_linear_axis() -> None:
    rows = [row("a", mean_target=-0.5), row("b", mean_target=0.0), row("c", mean_target=1.0)]
    figure = plots.divergence(frame(*rows), value="mean_target")
    assert axes(figure).get_yscale() == "linear"
    assert points(figure, "run 1: compared") == near([(0, -0.5), (1, 0.0), (2, 1.0)])


def test_a_cosine_is_shown_as_its_distance_from_that_of_equal_tensors() -> None:
    rows = frame(row("a", 0.0, cosine=1.0), row("b", cosine=1.0), row("b", rank=1, cosine=0.0), row("c", cosine=0.5))
    figure = plots.divergence(rows, value="cosine", noise_floor=1e-5)
    assert axes(figure).get_ylabel() == "1 - cosine similarity  (ratio)"
    assert points(figure, "run 1: compared") == near([(0, 2.0**-53), (1, 1.0), (2, 0.5)])
    assert by_gid(figure, "run 1: compared exact") is None
    assert title(plots.over_steps(rows, value="cosine")).startswith("first divergent: b in step")
    suspect = plots.first_divergent(rows, value="cosine")
    assert suspect is not None
    assert (suspect["name"], suspect["rank"]) == ("b", 1)


@pytest.mark.filterwarnings("ignore:Glyph")
def test_names_are_written_unchanged() -> None:
    names = ["注意力", "μ.λ", "$x^2$", r"\frac", "two\nlines", "$", "", "_hidden"]
    figure = plots.divergence(frame(*(row(name) for name in names)))
    assert plots.to_png(figure)
    assert not any(is_math_text(label) for label in tick_labels(figure))
    shown = [label.replace(r"\$", "$") for label in tick_labels(figure)]
    assert shown == [name.replace("\n", "\N{REPLACEMENT CHARACTER}") for name in names]
    assert "_hidden" in "".join(legend(plots.divergence({"_hidden": frame(row()), "b": frame(row())})))


# --- what every frame figure promises


@pytest.mark.parametrize("draw", FRAME_FIGURES.values(), ids=FRAME_FIGURES)
def test_an_empty_frame_gives_a_figure_with_a_message(draw: Callable[[pd.DataFrame], Figure]) -> None:
    for empty in (pd.DataFrame(), frame(row()).head(0), to_frame([])):
        figure = draw(empty)
        assert "no rows to show" in texts(figure)
        assert axes(figure).get_xlabel()
        assert axes(figure).get_ylabel()
        assert plots.to_png(figure)
    assert "no rows to show" in texts(plots.divergence([])) + texts(plots.divergence({}))


@pytest.mark.parametrize("column", ["name", "status", "rel_l2"])
@pytest.mark.parametrize("draw", FRAME_FIGURES.values(), ids=FRAME_FIGURES)
def test_a_missing_column_is_named(draw: Callable[[pd.DataFrame], Figure], column: str) -> None:
    with pytest.raises(ValueError, match=f"no column '{column}'"):
        draw(frame(row()).drop(columns=column))


@pytest.mark.parametrize("floor", [-1, math.nan, "float32", True])
def test_a_floor_that_nothing_can_be_compared_with_is_refused(floor: Any) -> None:
    for draw in (plots.first_divergent, plots.divergence, plots.over_steps):
        with pytest.raises(ValueError, match="noise_floor must be a number of at least 0"):
            draw(frame(row()), noise_floor=floor)
    # A number of numpy is one too.
    assert plots.first_divergent(frame(row(rel_l2=0.1)), noise_floor=np.float32(1.0)) is None


def test_missing_columns_of_only_some_figures_are_named() -> None:
    with pytest.raises(ValueError, match="no column 'order'"):
        plots.divergence(frame(row()).drop(columns="order"))
    with pytest.raises(ValueError, match="no column 'order'"):
        plots.first_divergent(frame(row()).drop(columns="order"))
    with pytest.raises(ValueError, match="no column 'step'"):
        plots.history(frame(row()).drop(columns="step"), "h")
    with pytest.raises(ValueError, match=r"no column 'rel_l3'; did you mean 'rel_l2'\?"):
        plots.divergence(frame(row()), value="rel_l3")
    with pytest.raises(ValueError, match="no column 'layr'"):
        plots.history(frame(row(layer=1)), "h", layr=1)
    with pytest.raises(ValueError, match=exactly("column 'name' cannot be drawn, it holds 'h'; choose a numeric one")):
        plots.divergence(frame(row()), value="name")
    with pytest.raises(
        TypeError, match=exactly("expected a pandas DataFrame of rows (session.frame, run.frame), got dict")
    ):
        plots.divergence([{"name": "h"}])  # type: ignore[list-item]


# --- the first divergent row


def test_the_first_divergent_row_is_the_first_in_execution_order() -> None:
    data = frame(row("late", 0.9, order=9), row("early", 2e-5, order=4), row("fine", 9e-6, order=1))
    found = plots.first_divergent(data)
    assert found is not None
    assert found["name"] == "early"
    assert data.loc[found.name, "name"] == "early"
    assert plots.first_divergent(data, noise_floor=1.0) is None
    assert plots.first_divergent(data, noise_floor=None) is None


def test_integers_diverge_by_any_difference() -> None:
    rows = [row("fine", 1e-6), row("token", 3e-7, step=1)]
    rows = [one._replace(dtype=dtype) for one, dtype in zip(rows, ("float32", "int64"), strict=True)]
    found = plots.first_divergent(frame(*rows))
    assert found is not None
    assert found["name"] == "token"
    # Whatever is looked at, those that are equal do not diverge.
    equal = frame(row("ids", 0.0, max_abs=0.0, cosine=1.0)._replace(dtype="int64"))
    assert plots.first_divergent(equal, value="cosine", noise_floor=2.0) is None
    assert "first divergent: token" in texts(plots.divergence(frame(*rows), noise_floor=1e-5))
    assert "in step 1" in texts(plots.over_steps(frame(*rows)))


def test_non_finite_differences_and_failures_diverge_and_other_statuses_do_not() -> None:
    silent = [row("a", None, "missing"), row("b", 5.0, "timeout"), row("c", 5.0, "unmatched"), row("d", math.nan)]
    assert plots.first_divergent(frame(*silent)) is None
    for culprit in (row("x", 1e-9, nonfinite_differ=1), row("x", None, "failed"), row("x", math.inf)):
        found = plots.first_divergent(frame(*silent, culprit, row("y", 1.0)))
        assert found is not None
        assert found["name"] == "x"
    rows = frame(row("a", 0.5, "grafted"), row("b", 0.25))
    assert [
        text for text in texts(plots.divergence(rows, noise_floor=1e-5)).splitlines() if "first divergent" in text
    ] == ["first divergent: b  (rel_l2 0.25)"], "what was grafted is not divergent again"
    grafted = plots.first_divergent(frame(row("a", 0.5, "grafted")))
    assert grafted is not None
    assert grafted["status"] == "grafted"
    assert plots.first_divergent(pd.DataFrame()) is None


@pytest.mark.slow
@examples(20)
@given(
    st.lists(
        st.tuples(
            st.integers(0, 2),
            st.sampled_from("abc"),
            st.sampled_from([0.0, 1e-6, 1e-4, math.nan, math.inf]),
            st.sampled_from(["compared", "grafted", "failed", "missing"]),
            st.sampled_from([0, 0, 3]),
        ),
        max_size=12,
    ),
    st.sampled_from([None, 1e-5]),
)
def test_the_annotated_tap_is_the_first_divergent_row_that_was_not_grafted(
    rows: list[Any], floor: float | None
) -> None:
    made = [row(n, v, s, step=step, nonfinite_differ=bad) for step, n, v, s, bad in sorted(rows, key=lambda r: r[0])]
    data = to_frame([one._replace(order=at, occurrence=at) for at, one in enumerate(made)])
    expected = [
        at
        for at, one in enumerate(made)
        if one.status == "failed"
        or (
            one.status in ("compared", "grafted")
            and (one.nonfinite_differ > 0 or (floor is not None and one.rel_l2 > floor))
        )
    ]
    found = plots.first_divergent(data, noise_floor=floor)
    notes = annotations(plots.divergence(data, noise_floor=floor))
    assert (None if found is None else found["order"]) == (expected[0] if expected else None)
    annotated = [at for at in expected if made[at].status != "grafted"]
    assert [round(note.xy[0]) for note in notes] == annotated[:1]


# --- one tap over steps and ranks


def test_history_draws_one_line_per_rank() -> None:
    figure = plots.history(model_frame(steps=4), "attn_out", layer=2)
    assert axes(figure).get_xlabel() == "step"
    assert axes(figure).get_yscale() == "log"
    for rank, scale in ((0, 1), (1, 2)):
        assert points(figure, f"target rank {rank}: compared") == near([(s, scale * 3e-7) for s in range(4)])
        assert list(by_gid(figure, f"target rank {rank}").get_xdata()) == [0, 1, 2, 3]
    assert legend(figure)[:2] == ["target rank 0", "target rank 1"]
    assert title(figure) == "attn_out layer=2"


def test_history_takes_the_largest_match_and_names_the_varying_tags() -> None:
    figure = plots.history(model_frame(steps=2, ranks=1), "attn_out")
    assert points(figure, "target rank 0: compared") == near([(0, 3e-7), (1, 3e-7)])
    assert title(figure) == "attn_out  (largest over layer)"


def test_history_marks_missing_exact_and_non_finite_values() -> None:
    steps = [
        row("h", 1e-6),
        row("h", None, "timeout", step=1),
        row("h", 0.0, step=2),
        row("h", 1e-6, step=3, nonfinite_differ=1),
    ]
    figure = plots.history(frame(*steps, row("h", None, "missing", step=4)), "h")
    ticks, low_high = y_ticks(figure), axes(figure).get_ylim()
    assert points(figure, "target rank 0: compared exact") == [(2, ticks["0 (exact)"])]
    assert [x for x, _ in points(figure, "target rank 0: non-finite")] == [3]
    ((x, top),), ((_, bottom),) = points(figure, "target rank 0: timeout"), points(figure, "target rank 0: missing")
    assert x == 1
    assert low_high[0] < bottom < 1e-6 < top < low_high[1]
    assert {"timeout", "missing", "exact (hollow)", "non-finite differs"} <= set(legend(figure))


def test_a_step_in_which_a_tap_was_grafted_and_compared_is_drawn_as_grafted() -> None:
    rows = [row("h", 1e-6), row("h", 1e-3, "grafted", occurrence=1), row("h", 1e-5, step=1)]
    figure = plots.history(frame(*rows), "h")
    assert points(figure, "target rank 0: compared") == near([(1, 1e-5)])
    assert points(figure, "target rank 0: grafted") == near([(0, 1e-3)])


def test_tags_choose_the_tap() -> None:
    data = frame(row("h", 1e-1, layer=1), row("h", 1e-2, layer=2), row("h", 1e-3), row("h", 1e-4, layer=2, rank=1))
    # A frame made by hand may lack a rank, which no row does.
    without_rank = frame(row("h", 0.5, layer=7)).astype({"rank": "Int64"}).assign(rank=pd.NA)
    data = pd.concat([data, frame(row("h", 1e-5, shape="s")), without_rank], ignore_index=True)

    def shown(**tags: Any) -> list[float]:
        figure = plots.history(data, "h", **tags)
        return [y for rank in (0, 1) for _, y in points(figure, f"target rank {rank}: compared")]

    assert shown(layer=1) == pytest.approx([1e-1])
    assert shown(layer=2) == pytest.approx([1e-2, 1e-4])
    assert shown(layer=2, rank=1) == pytest.approx([1e-4])
    assert shown(rank=1) == pytest.approx([1e-4])
    assert shown(layer=None) == pytest.approx([1e-3])
    assert shown(tag_shape="s") == pytest.approx([1e-5])
    assert "no row of 'h' has layer=9" in texts(plots.history(data, "h", layer=9))


@pytest.mark.parametrize("draw", [plots.history, plots.ranks])
def test_a_misspelt_tap_suggests_the_right_one(draw: Callable[..., Figure]) -> None:
    assert "no tap is called 'atn_out'\ndid you mean 'attn_out'" in texts(draw(model_frame(), "atn_out"))


def test_ranks_show_a_cell_for_each_receiver_and_step_and_frame_the_worst() -> None:
    rows = [
        row("h", (r + 1) * 10.0 ** -(6 - s), rank=r, step=s, senders=[0, 1, 2, 4]) for s in range(2) for r in range(3)
    ]
    figure = plots.ranks(frame(*rows), "h")
    shown = by_gid(figure, "cells").get_array()
    np.testing.assert_allclose(shown, [[1e-6, 2e-6, 3e-6], [1e-5, 2e-5, 3e-5]])
    assert isinstance(by_gid(figure, "cells").norm, LogNorm)
    assert tick_labels(figure) == [f"target rank {r}\n← 0-2, 4" for r in range(3)]
    assert title(figure) == "h\nworst: target rank 2, step 1, rel_l2 3e-05"
    assert by_gid(figure, "worst").get_xy() == (1.5, 0.5)
    assert "3e-05" in [text.get_text() for text in axes(figure).texts]
    assert axes(figure).get_ylabel() == "step"
    assert "(ratio)" in figure.axes[1].get_ylabel()


def test_cells_without_a_value_are_blank_and_marked() -> None:
    rows = [
        row("h", 1e-6),
        row("h", None, "missing", rank=1),
        row("h", 0.0, rank=2),
        row("h", math.nan, rank=3, nonfinite_differ=1),
    ]
    figure = plots.ranks(frame(*rows), "h")
    assert by_gid(figure, "cells").get_array().mask.tolist() == [[False, True, False, True]]
    assert points(figure, "missing") == [(1, 0)]
    assert by_gid(figure, "not finite").get_x() == 2.5
    assert by_gid(figure, "non-finite").get_x() == pytest.approx(2.54)
    assert legend(figure) == ["0 (exact)", "not finite", "missing", "non-finite differs"]


def test_many_steps_share_strips_and_lose_no_maximum() -> None:
    rows = [row("h", 0.5 if s == 777 else 1e-7, step=s, rank=r) for s in range(1000) for r in range(2)]
    figure = plots.ranks(frame(*rows), "h", rank=1)
    shown = by_gid(figure, "cells").get_array()
    assert shown.shape == (200, 1)
    assert shown.max() == 0.5
    assert np.argmax(shown) == 777 // 5
    assert "steps from 775" in title(figure)


def test_a_strip_shows_the_largest_magnitude_whatever_its_sign() -> None:
    rows = [row("h", 0.0, step=s, mean_target=-0.5 if s == 777 else 1e-7) for s in range(1000)]
    shown = by_gid(plots.ranks(frame(*rows), "h", value="mean_target"), "cells").get_array()
    assert (shown.max(), np.argmax(shown)) == (0.5, 777 // 5)


# --- downsampling by maximum


def brute_force(diff: np.ndarray[Any, Any], dims: tuple[int, int], limit: int) -> np.ndarray[Any, Any]:
    flat = np.moveaxis(diff, dims, (0, 1)).reshape(diff.shape[dims[0]], diff.shape[dims[1]], -1).max(axis=2)
    down, across = (math.ceil(size / limit) for size in flat.shape)
    blocks = [
        [flat[i : i + down, j : j + across] for j in range(0, flat.shape[1], across)]
        for i in range(0, flat.shape[0], down)
    ]
    return np.array([[block.max() for block in line] for line in blocks])


@pytest.mark.slow
@given(
    st.lists(st.integers(1, 9), min_size=2, max_size=4),
    st.integers(1, 10),
    st.integers(1, 200),
    st.randoms(use_true_random=False),
)
def test_downsampling_gives_the_maximum_of_each_cell_for_any_block_size(
    shape: list[int], limit: int, block: int, random: Any
) -> None:
    dims = tuple(random.sample(range(len(shape)), 2))
    diff = torch.tensor([random.gauss(0, 1) for _ in range(math.prod(shape))]).reshape(shape)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("graftlab.diffs.maps.BLOCK", block)
        cells, extent = plots.max_downsample(diff, [dims[0], dims[1] - len(shape)], limit)
    np.testing.assert_array_equal(cells, brute_force(diff.numpy(), dims, limit))
    assert max(cells.shape) <= limit
    assert extent[:1] + extent[3:] == (-0.5, -0.5)
    assert extent[1] + 0.5 >= shape[dims[1]]
    assert extent[2] + 0.5 >= shape[dims[0]]


@pytest.mark.slow
def test_no_block_spans_two_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    diff = torch.randn(11, 3, 13, generator=torch.Generator().manual_seed(0))
    for block in range(1, 3 * 11 * 13 + 1):
        monkeypatch.setattr("graftlab.diffs.maps.BLOCK", block)
        for dims in ((0, 2), (2, 0), (0, 1)):
            np.testing.assert_array_equal(plots.max_downsample(diff, dims, 4)[0], brute_force(diff.numpy(), dims, 4))


def test_one_bad_element_in_a_large_tensor_is_found_and_ringed() -> None:
    baseline = torch.zeros(4096, 4096, dtype=torch.bfloat16)
    target = baseline.clone()
    target[1234, 3210] = 0.25
    cells, _ = plots.max_downsample((baseline - target).abs())
    assert cells.shape == (512, 512)
    assert np.argwhere(cells).tolist() == [[1234 // 8, 3210 // 8]]
    figure = plots.heatmap(baseline, target)
    assert points(figure, "worst") == [(3210, 1234)]
    assert "worst: 0.25 at [1234, 3210]  (baseline 0, target 0.25)" in title(figure)
    left, right, bottom, top = by_gid(figure, "cells").get_extent()
    shown = by_gid(figure, "cells").get_array()
    row_of = int((1234 - top) / (bottom - top) * shown.shape[0])
    column_of = int((3210 - left) / (right - left) * shown.shape[1])
    assert np.unravel_index(np.argmax(shown), shown.shape) == (row_of, column_of)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [*REAL_DTYPES, torch.complex64, torch.complex128], ids=str)
@pytest.mark.parametrize("draw", PAIR_FIGURES.values(), ids=PAIR_FIGURES)
def test_pairs_of_any_dtype_are_drawn_and_left_alone(draw: Callable[..., Figure], dtype: torch.dtype) -> None:
    baseline = torch.tensor([[0, 1, 0], [1, 1, 0]]).to(dtype)
    target = torch.tensor([[0, 1, 1], [1, 1, 0]]).to(dtype)
    copies = baseline.clone(), target.clone()
    figure = draw(baseline, target)
    # What is drawn has no dtype any more; rendering it takes most of the time.
    if dtype in (torch.bool, torch.bfloat16, torch.complex64):
        assert plots.to_png(figure)
    if draw is not plots.histogram:
        assert "[0, 2]" in title(figure)
    for tensor, copy in zip((baseline, target), copies, strict=True):
        assert torch.equal(tensor.view(torch.uint8), copy.view(torch.uint8))


def test_differences_that_the_operands_dtype_cannot_hold_are_right() -> None:
    def worst(x: Any, y: Any, dtype: torch.dtype) -> float:
        return plots.difference_map(torch.tensor([x], dtype=dtype), torch.tensor([y], dtype=dtype)).worst

    assert worst(3, 250, torch.uint8) == 247
    assert worst(-128, 127, torch.int8) == 255
    assert worst(2**40, 2**40 + 1, torch.int64) == 1
    assert worst(1.0, 1.0 + 1e-12, torch.float64) == pytest.approx(1e-12, rel=1e-3, abs=0)
    assert worst(-448.0, 448.0, torch.float8_e4m3fn) == 896
    assert worst(1 + 1j, 1 - 1j, torch.complex64) == 2
    assert math.isfinite(worst(-3e38, 3e38, torch.float32))


def test_the_axes_of_a_heatmap_have_whole_indices() -> None:
    figure = plots.draw_difference_map(plots.difference_map(torch.zeros(3, 3), torch.eye(3)))
    for axis in (axes(figure).xaxis, axes(figure).yaxis):
        assert all(float(at).is_integer() for at in axis.get_majorticklocs())


def test_mixed_dtypes_strides_and_gradients_are_fine() -> None:
    baseline = torch.randn(6, 5, 4, requires_grad=True).transpose(0, 2)
    target = baseline.detach().double().contiguous()
    target[3, 2, 1] += 5
    for draw in PAIR_FIGURES.values():
        assert plots.to_png(draw(baseline, target))
    assert plots.difference_map(baseline, target).worst_index == (3, 2, 1)


def test_the_first_of_several_non_finite_values_is_named_whichever_block_it_is_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("graftlab.diffs.maps.BLOCK", 8)
    target = torch.zeros(4, 40)
    target[1, 0] = target[0, 30] = target[3, 3] = math.nan
    found = plots.difference_map(torch.zeros(4, 40), target, limit=2)
    assert found.nonfinite_index == (0, 30)
    assert found.nonfinite_differ == 3


def test_nan_wins_its_cell_and_empty_tensors_have_no_cells() -> None:
    diff = torch.zeros(10, 10)
    diff[3, 7] = math.nan
    cells, _ = plots.max_downsample(diff, limit=5)
    assert np.argwhere(np.isnan(cells)).tolist() == [[1, 3]]
    assert plots.max_downsample(torch.zeros(3, 0, 2))[0].shape == (0, 0)
    assert plots.max_downsample(torch.tensor(4.0))[0].tolist() == [[4.0]]
    assert plots.max_downsample(torch.tensor([1 + 1j, 3 + 4j]))[0][0, 1] == 5


@pytest.mark.parametrize(
    ("dims", "problem"),
    [((0, 3), "names dim 3"), ((1, 1), "two different"), ((0, 1, 2), "one or two"), ((), "one or two")],
)
def test_axes_that_do_not_fit_are_refused(dims: tuple[int, ...], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        plots.max_downsample(torch.zeros(2, 2, 2), dims)
    with pytest.raises(ValueError, match=problem):
        plots.heatmap(torch.zeros(2, 2, 2), torch.zeros(2, 2, 2), dims=dims)
    with pytest.raises(ValueError, match=exactly("limit must be at least 1, got 0")):
        plots.max_downsample(torch.zeros(2), limit=0)


# --- figures of a pair


def test_heatmap_shows_the_chosen_axes_with_units_on_a_log_scale() -> None:
    baseline, target = torch.zeros(3, 40, 5), torch.zeros(3, 40, 5)
    target[2, 30, 1] = -8
    target[0, 0, 0] = 1e-3
    figure = plots.heatmap(baseline, target, dims=(1, 0), title="attn_out, layer=3")
    ax = axes(figure)
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("dim 1  (element index)", "dim 0  (element index)")
    assert by_gid(figure, "cells").get_array().shape == (40, 3)
    assert points(figure, "worst") == [(2, 30)]
    norm = by_gid(figure, "cells").norm
    assert isinstance(norm, LogNorm)
    assert (norm.vmin, norm.vmax) == pytest.approx((1e-3, 8))
    assert title(figure).splitlines() == [
        "attn_out, layer=3  [3, 40, 5] float32",
        "worst: 8 at [2, 30, 1]  (baseline 0, target -8)",
    ]
    assert "|baseline - target|" in figure.axes[1].get_ylabel()
    assert "units" in figure.axes[1].get_ylabel()
    assert ax.get_xlim() == (-0.5, 2.5)
    assert ax.get_ylim() == (39.5, -0.5)


def test_beside_a_heatmap_each_dimension_has_its_profile_and_the_hint_is_drawn() -> None:
    baseline, target = torch.zeros(3, 40, 6), torch.zeros(3, 40, 6)
    target[1, 15:, 2] = 8
    target[2, 30, 5] = math.nan
    found = plots.difference_map(baseline, target)
    figure = plots.draw_difference_map(found, title="attn", note="equal up to 14", spans=[(1, 15, 39)])
    panels = [each for each in figure.axes if "largest by index" in each.get_xlabel()]
    assert [panel.get_xlabel().partition(":")[0] for panel in panels] == ["dim 0", "dim 1", "dim 2"]
    heights = [next(p for p in panel.patches if p.get_gid() == "profile").get_data().values for panel in panels]
    assert [each.tolist() for each in heights] == [[0, 8, 0], [0] * 15 + [8] * 15 + [0] + [8] * 9, [0, 0, 8, 0, 0, 0]]
    assert [len([c for c in panel.collections if c.get_gid() == "non-finite index"]) for panel in panels] == [1, 1, 1]
    assert title(figure).splitlines()[-1] == "hint: equal up to 14"
    assert [line.get_ydata()[0] for line in axes(figure).lines if line.get_gid() == "span"] == [14.5]
    assert [[p.get_gid() for p in panel.patches].count("span") for panel in panels] == [0, 1, 0]
    assert "where the hint says" in legend(figure)
    own = Figure().subplots()
    assert plots.draw_difference_map(found, ax=own).axes[0] is own
    assert not any("largest at each" in each.get_xlabel() for each in own.figure.axes), "no room beside given axes"
    # Of many dimensions the last have profiles.
    many = plots.heatmap(torch.zeros(2, 2, 1, 2, 2, 2), torch.ones(2, 2, 1, 2, 2, 2))
    assert [each.get_xlabel()[:5] for each in many.axes if "by index" in each.get_xlabel()] == [
        *("dim 1", "dim 3", "dim 4", "dim 5")
    ]


@given(st.lists(st.integers(1, 5), max_size=4), st.integers(1, 4), st.data())
def test_profiles_are_the_largest_difference_at_each_index(shape: list[int], limit: int, data: st.DataObject) -> None:
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1000)))
    x, y = (torch.rand(shape, generator=generator) for _ in range(2))
    dims = data.draw(st.permutations(range(len(shape))).map(lambda each: each[:2])) if shape else None
    found = plots.difference_map(x, y, dims=dims, limit=limit)
    assert len(found.profiles) == len(shape)
    for dim, profile in enumerate(found.profiles):
        largest = (x - y).abs().movedim(dim, 0).reshape(shape[dim], -1).amax(1).tolist()
        unit = -(-len(largest) // limit)
        assert profile.tolist() == [max(largest[at : at + unit]) for at in range(0, len(largest), unit)]


def test_the_axes_end_with_the_tensor_even_if_the_last_cell_is_larger() -> None:
    figure = plots.heatmap(torch.zeros(2, 1025), torch.ones(2, 1025))
    assert by_gid(figure, "cells").get_array().shape == (2, 342)
    assert by_gid(figure, "cells").get_extent()[1] == 1025.5
    assert axes(figure).get_xlim() == (-0.5, 1024.5)


def test_zeros_and_non_finite_cells_have_colours_outside_the_scale() -> None:
    baseline = torch.tensor([[1.0, 1.0, 1.0, 1.0, -math.inf]])
    target = torch.tensor([[1.0, 1.5, math.nan, math.inf, -math.inf]])
    figure = plots.heatmap(baseline, target)
    cells = by_gid(figure, "cells")
    colors = [to_hex(color) for color in cells.cmap(cells.norm(cells.get_array()))[0]]
    assert colors[0] == colors[4] == "#101010"
    assert colors[2] == colors[3] == "#d55e00"
    assert colors[1] not in ("#101010", "#d55e00")
    assert points(figure, "non-finite") == [(2, 0), (3, 0)]
    assert "2 differ, first at [0, 2]  (baseline 1, target nan)" in title(figure)
    assert "1 equal on both sides" in title(figure)
    assert legend(figure) == ["worst element", "0 (exact)", "non-finite differs"]


@pytest.mark.parametrize(("wrong", "crossed"), [(400, 400), (401, 0)])
def test_non_finite_cells_are_crossed_unless_there_are_many(wrong: int, crossed: int) -> None:
    target = torch.zeros(21, 21)
    target.view(-1)[:wrong] = math.nan
    figure = plots.heatmap(torch.zeros(21, 21), target)
    assert len(points(figure, "non-finite")) == crossed
    assert "non-finite differs" in legend(figure)


@pytest.mark.slow
def test_equal_all_nan_and_unusually_shaped_pairs_are_drawn() -> None:
    same = plots.heatmap(torch.ones(4, 4), torch.ones(4, 4))
    assert "every pair is equal" in title(same)
    assert by_gid(same, "worst") is None
    nan = torch.full((4, 4), math.nan)
    assert "every pair is equal" in title(plots.heatmap(nan, nan))
    assert "16 differ" in title(plots.heatmap(nan, torch.ones(4, 4)))
    flat = plots.heatmap(torch.zeros(7), torch.arange(7.0))
    assert points(flat, "worst") == [(6, 0)]
    assert axes(flat).get_xlabel() == "dim 0  (element index)"
    assert "worst: 2 at []" in title(plots.heatmap(torch.tensor(1.0), torch.tensor(3.0)))
    for x, y in (
        (nan, nan),
        (nan, torch.ones(4, 4)),
        (torch.tensor(1.0), torch.tensor(3.0)),
        (torch.zeros(7), torch.ones(7)),
    ):
        for draw in PAIR_FIGURES.values():
            assert plots.to_png(draw(x, y), dpi=30)


@pytest.mark.parametrize("draw", PAIR_FIGURES.values(), ids=PAIR_FIGURES)
def test_empty_pairs_give_a_message_and_unlike_pairs_are_refused(draw: Callable[..., Figure]) -> None:
    figure = draw(torch.zeros(3, 0), torch.zeros(3, 0))
    assert "the tensors have no elements:\nshape [3, 0]" in texts(figure)
    assert plots.to_png(figure)
    with pytest.raises(
        ValueError,
        match=exactly(
            "baseline has shape [2, 3] and target [3, 2]: align them first, for instance by concatenating "
            "the shards or by taking the matching slice"
        ),
    ):
        draw(torch.zeros(2, 3), torch.zeros(3, 2))
    with pytest.raises(TypeError, match=r"target must be a torch\.Tensor, got ndarray"):
        draw(torch.zeros(2), np.zeros(2))


@pytest.mark.parametrize(
    ("values", "labels"),
    [
        ((0.5, 2.0), ["0.5", "0.79", "1.3", "2"]),
        ((0.5, 20.0), ["1e0", "1e1"]),
        ((1.99999, 2.0), ["1", "1.3", "1.6", "2"]),  # not four times the same number, in all colours
        ((0.0, 0.0), None),
    ],
)
def test_a_colour_bar_has_numbers_to_read_the_colours_by(values: tuple[float, ...], labels: list[str] | None) -> None:
    figure = Figure()
    shown, norm, colours = log_image(np.array([values]))
    ax = figure.subplots()
    color_bar(figure, ax.imshow(shown, norm=norm, cmap=colours), ax, "relative difference")
    bars = figure.axes[1:]
    assert [each.get_text() for bar in bars for each in bar.get_yticklabels()] == (labels or [])
    assert len(bars) == (labels is not None)


@given(
    st.lists(
        st.tuples(*[st.sampled_from([0.0, 1.0, -2.5, 3e38, -3e38, 1e-30, math.nan, math.inf])] * 2),
        min_size=1,
        max_size=40,
    )
)
def test_histograms_count_every_finite_value_once(pairs: list[tuple[float, float]]) -> None:
    x, y = torch.tensor(pairs).T
    found = samples.distributions(x, y)
    both = torch.isfinite(x) & torch.isfinite(y)
    assert found.baseline.sum() == torch.isfinite(x).sum()
    assert found.target.sum() == torch.isfinite(y).sum()
    assert found.above.sum() == (y > x)[both].sum()
    assert found.below.sum() == (y < x)[both].sum()
    assert found.above.sum() + found.below.sum() + found.equal == found.pairs == both.sum()
    assert (found.nonfinite_baseline, found.nonfinite_target) == (
        (~torch.isfinite(x)).sum(),
        (~torch.isfinite(y)).sum(),
    )


def test_histogram_bins_reach_from_the_smallest_to_the_largest_value_of_both() -> None:
    found = samples.distributions(torch.tensor([-3.0, 0.0, 5.0]), torch.tensor([-3.0, 0.1, 4.0]))
    assert found.edges[[0, -1]].tolist() == [-3.0, 5.0]
    assert np.flatnonzero(found.baseline).tolist() == [0, 45, 119]
    assert found.magnitude_edges[[0, -1]].tolist() == pytest.approx([-1.0, 0.0])
    assert (found.above[0], found.below[-1], found.equal) == (1, 1, 1)


def test_histogram_has_two_panels_with_log_counts_and_units() -> None:
    baseline = torch.linspace(-1, 1, 1000)
    target = baseline + torch.where(baseline > 0.5, 1e-3, 0.0)
    target[0] = math.nan
    figure = plots.histogram(baseline, target, title="attn_out")
    left, right = axes(figure).child_axes
    assert left.get_yscale() == right.get_yscale() == "log"
    assert left.get_xlabel() == "value  (tensor's units)"
    assert right.get_xlabel() == "|target - baseline|  (tensor's units)"
    assert left.get_ylabel() == right.get_ylabel() == "elements  (count)"
    assert left.get_title(loc="left") == "attn_out\nnot finite: baseline 0, target 1"
    assert right.get_title(loc="left").startswith("250 of 999 elements differ, and 1 that are not finite\nmean")
    assert right.patches[-1].get_height() == 749
    assert right.get_xticklabels()[0].get_text() == "0"
    first, second = (patch.get_data().edges for patch in left.patches[-2:])
    np.testing.assert_array_equal(first, second)
    # The tallest bin of either side has room below the legend.
    for pair in ((torch.arange(100.0), torch.zeros(100)), (torch.zeros(100), torch.arange(100.0))):
        assert axes(plots.histogram(*pair)).child_axes[0].get_ylim() == (0.5, 800)


@pytest.mark.slow
def test_the_worst_elements_are_always_among_the_points(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.diffs.maps.BLOCK", 10_000)
    baseline = torch.randn(300, 1000, generator=torch.Generator().manual_seed(0))
    target = baseline + 1e-6
    bad = torch.randperm(300_000, generator=torch.Generator().manual_seed(1))[:2000]
    target.view(-1)[bad] += torch.linspace(1, 2, 2000)
    target[7, 7], target[8, 8] = math.nan, -math.inf
    before = torch.get_rng_state()
    figure = plots.scatter(baseline, target)
    assert torch.equal(before, torch.get_rng_state())
    worst = points(figure, "worst")
    assert len(worst) == 2000
    assert min(y - x for x, y in worst) > 0.9
    assert 10_000 < (drawn := len(points(figure, "sample")) + len(worst)) <= 20_000
    assert f"{drawn:,} of 300,000 elements are drawn" in title(figure)
    index = np.unravel_index(int(bad[-1]), (300, 1000))
    assert f"worst at [{index[0]}, {index[1]}]" in title(figure)
    assert "2 with a non-finite value left out" in title(figure)


def test_scatter_draws_the_identity_and_all_of_a_small_pair() -> None:
    figure = plots.scatter(torch.arange(100.0), torch.arange(100.0) * 2)
    ax = axes(figure)
    assert ax.get_xlabel() == "baseline  (tensor's units)"
    assert ax.get_ylabel() == "target  (tensor's units)"
    assert by_gid(figure, "identity").get_slope() == 1.0
    drawn = points(figure, "sample") + points(figure, "worst")
    assert sorted(drawn) == [(i, 2 * i) for i in range(100)]
    assert "all 100 elements are drawn" in title(figure)
    assert "worst at [99]: baseline 99, target 198" in title(figure)
    assert ax.get_xlim() == ax.get_ylim()
    assert "every pair is equal" in title(plots.scatter(torch.ones(3), torch.ones(3)))
    for wrong, name in ((1, "the worst"), (2, "the 2 worst")):
        assert name in legend(plots.scatter(torch.zeros(30), torch.arange(30.0) * (torch.arange(30) > 29 - wrong)))


def test_no_figure_of_a_pair_calls_one_equal_whose_non_finite_values_differ() -> None:
    one = torch.tensor([1.0, math.nan, math.inf, math.inf, 2.0])
    other = torch.tensor([1.0, math.nan, math.inf, -math.inf, math.nan])
    for draw in (plots.heatmap, plots.histogram, plots.scatter):
        same, differing = (in_words(draw(one, each)) for each in (one, other))
        assert "every pair is equal" in same
        assert "every pair is equal" not in differing
        assert "every finite pair is equal" in differing
    assert "4 with a non-finite value left out (2 unequal)" in title(plots.scatter(one, other))


# --- what every figure promises


def everything(ax: Axes | None = None) -> Mapping[str, Callable[[], Figure]]:
    data = model_frame(layers=8, ranks=3, steps=3, bad=4)
    baseline = torch.randn(2, 64, 48, generator=torch.Generator().manual_seed(0))
    target = baseline + 1e-6
    target[1, 3, 4] = math.nan
    long = frame(*(row(f"model.layers.{i}.a_long_module_name.and_another_one", 10.0 ** (i % 9 - 9)) for i in range(90)))
    return {
        "divergence": lambda: plots.divergence(data, noise_floor=1e-5, ax=ax),
        "divergence of runs": lambda: plots.divergence(
            {"one": data, "two": data, "three": data}, noise_floor=1e-5, ax=ax
        ),
        "divergence of many": lambda: plots.divergence(long, noise_floor=1e-5, ax=ax),
        "history": lambda: plots.history(data, "attn_out", ax=ax),
        "ranks": lambda: plots.ranks(data, "attn_out", layer=1, ax=ax),
        "heatmap": lambda: plots.heatmap(baseline, target, title="attn_out", ax=ax),
        "histogram": lambda: plots.histogram(baseline, target, title="attn_out", ax=ax),
        "scatter": lambda: plots.scatter(baseline, target, title="attn_out", ax=ax),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", everything())
def test_nothing_is_cut_off_and_no_legend_covers_data(name: str) -> None:
    figure = everything()[name]()
    assert isinstance(figure.canvas, FigureCanvasAgg)
    figure.canvas.draw()
    drawn, page = figure.get_tightbbox(), figure.get_size_inches()
    assert drawn.x0 >= -0.02
    assert drawn.y0 >= -0.02
    assert drawn.x1 <= page[0] + 0.02
    assert drawn.y1 <= page[1] + 0.02
    ax = axes(figure)
    if ax.get_legend() is not None:
        legend_box, data_box = ax.get_legend().get_window_extent(), ax.get_window_extent()
        assert not legend_box.overlaps(data_box)
        labels = [*ax.get_xticklabels(), ax.xaxis.label]
        assert not any(legend_box.overlaps(label.get_window_extent()) for label in labels if label.get_text())


@pytest.mark.slow
@pytest.mark.parametrize("name", everything())
def test_every_figure_draws_into_axes_that_it_is_given(name: str) -> None:
    page = Figure(figsize=(16, 12), layout="constrained")
    ax = page.subfigures(1, 2)[1].subplots(2, 1)[1]
    assert everything(ax)[name]() is page
    assert ax.has_data() or ax.child_axes or ax.images
    assert plots.to_png(page, dpi=30)


@pytest.mark.slow
def test_figures_may_be_made_and_rendered_in_any_thread() -> None:
    figures = everything()

    def render(name: str) -> bytes:
        return plots.to_png(figures[name](), dpi=30)

    names = ("divergence", "history", "ranks", "heatmap", "histogram", "scatter")
    expected = {name: render(name) for name in names}
    with ThreadPoolExecutor(len(names)) as pool:
        for name, png in zip(names, pool.map(render, names), strict=True):
            assert png == expected[name], name


def test_a_figure_shows_itself_in_a_notebook() -> None:
    figure: Any = plots.divergence(frame(row()))
    assert figure._repr_png_().startswith(b"\x89PNG")


@pytest.mark.ranks
def test_unused_modules_are_not_imported() -> None:
    script = """
        import sys, torch
        assert "matplotlib" not in sys.modules, "torch, or what the script is forked from"
        from graftlab.plots import max_downsample
        max_downsample(torch.ones(3, 3))
        assert "matplotlib" not in sys.modules, "a rank"
        import graftlab.control.report, graftlab.comparison.functions, graftlab.comparison.scripts
        assert "matplotlib" not in sys.modules, "a report without pictures"
        from graftlab import plots
        plots.to_png(plots.histogram(*torch.ones(2, 9)))
        assert "matplotlib.pyplot" not in sys.modules, "a figure"
    """
    done = warm.run("-c", textwrap.dedent(script))
    assert done.returncode == 0, done.stderr


def test_every_public_name_exists_and_is_documented() -> None:
    for name in plots.__all__:
        assert getattr(plots, name).__doc__
    assert set(plots.__all__) <= set(dir(plots))
    with pytest.raises(AttributeError, match=exactly("module 'graftlab.plots' has no attribute 'pyplot'")):
        _ = plots.pyplot
    assert set(style.MARKS) == {"compared", "grafted", "failed", "missing", "timeout", "unmatched", "recomputed"}


def test_names_of_many_taps_stand_upright_in_smaller_letters() -> None:
    for count, size, rotation in ((MAX_SLANTED, style.TICK, 45.0), (MAX_SLANTED + 1, style.DENSE, 90.0)):
        rows = [row(f"a.tap.with.a.long.name.{chr(97 + n // 26)}{chr(97 + n % 26)}") for n in range(count)]
        (labels,) = {
            (each.get_fontsize(), each.get_rotation())
            for each in axes(plots.divergence(frame(*rows))).get_xticklabels()
        }
        assert labels == (size, rotation)


def test_the_axes_that_a_tensor_lacks_are_filled_in_front() -> None:
    assert [_two(shown, 0) for shown in ([5], [], [3, 5])] == [(0, 5), (0, 0), (3, 5)]
