"""The interactive figure of taps in a real browser, on a separate page: its names, colours and columns."""

from __future__ import annotations

import itertools
import json
import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from graftlab.plots import explorer
from graftlab.rows.schema import Row
from graftlab.verdict.conclusion import conclude_from

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest_plugins = ["kit.browser"]
pytestmark = pytest.mark.browser

# Every text that is drawn, with the place of its left and its right end on the canvas.
RECORD = """() => {
window.drawn = [];
window.mounted = false;
const draw = CanvasRenderingContext2D.prototype.fillText;
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  const width = this.measureText(text).width, to = this.getTransform(), ratio = window.devicePixelRatio;
  const left = x - (this.textAlign === "right" ? width : this.textAlign === "center" ? width / 2 : 0);
  const place = (at) => (to.a * at + to.c * y + to.e) / ratio;
  window.drawn.push([text, place(left), place(left + width)]);
  return draw.call(this, text, x, y);
};
}
"""


def row(order: int, name: str, rel_l2: float, **more: Any) -> Row:
    tags = {"name": name, "step": 0, "side": "target", "rank": 0, "recompute_status": "original"}
    given = {"nonfinite_differ": 0, "numel": 4, "dtype": "float32", "status": "compared", **more}
    return Row(0, 0, order, name, tags, "b2t", "target", 0, senders=[0], rel_l2=rel_l2, **given)


@pytest.fixture
def page(empty_page: Page) -> Page:
    empty_page.set_viewport_size({"width": 700, "height": 900})
    return empty_page


def mount(page: Page, *rows: Row, style: str = "", given: str = "", **changes: Any) -> list[tuple[str, float, float]]:
    """Show these rows, with ``changes`` to the state; what was written on the canvas, and from where to where.

    ``given`` are further arguments of the script's ``mount``.
    """
    found = conclude_from(rows)
    state = json.dumps(explorer.taps(found) | explorer.figures(found) | changes)
    page.set_content(f"<style>{style}</style><div id='root'></div>")
    page.evaluate(RECORD)
    script = explorer.SCRIPT.read_text(encoding="utf-8")
    page.add_script_tag(
        type="module",
        content=f"{script}\nwindow.layerOf = layerOf; window.show = () => view.show({state});\n"
        f"const view = mount(document.getElementById('root'){given}); window.show(); window.mounted = true;",
    )
    page.wait_for_function("() => window.mounted && window.drawn.length > 0")
    drawn: list[tuple[str, float, float]] = page.evaluate("() => window.drawn.map((each) => [...each])")
    return drawn


def ten(**more: Any) -> list[Row]:
    return [row(at, f"t{at}", 10.0 ** (at - 9), **more) for at in range(10)]


def visible(page: Page) -> list[str]:
    """The taps whose names the last drawing has below the axis."""
    texts = [text for text, _, _ in page.evaluate("() => window.drawn")]
    last = len(texts) - texts[::-1].index("rel_l2")
    return [text for text in texts[last:] if re.fullmatch(r"t\d", text)]


def place_of(page: Page, number: float, of: int = 10) -> tuple[float, float]:
    """The point of the page that belongs to a tap in a figure that shows all."""
    box = page.locator("canvas").bounding_box()
    assert box is not None
    return box["x"] + 62 + (number + 0.5) / of * (box["width"] - 72), box["y"] + 150


def chosen(page: Page) -> str:
    return page.locator(".chosen b").inner_text()


def test_names_are_shortened_rather_than_cut_off_at_the_edge(page: Page) -> None:
    names = [f"a_rather_long_name.projection.{at}" for at in range(13)]
    drawn = mount(page, *(row(at, name, 1e-3) for at, name in enumerate(names)))
    shown = [(text, left) for text, left, _ in drawn if text.startswith("a_") and text[-1].isdigit()]
    assert len({text for text, _ in shown}) == 13
    assert [text for text, left in shown if left < 0] == []
    assert any("…" in text for text, _ in shown)


def test_the_figure_has_a_description_and_a_legend_of_its_colours(page: Page) -> None:
    drawn = mount(page, row(0, "a", 0.0), row(1, "b", 0.5, status="grafted"), row(2, "c", 0.0, nonfinite_differ=2))
    assert "rel_l2" in [text for text, _, _ in drawn]
    key = page.locator(".key span")
    assert key.all_inner_texts() == ["● compared", "● grafted", "○ equal", "◯ not finite on one side"]
    assert len({each.locator("b").evaluate("dot => dot.style.color") for each in key.all()}) == 3
    mount(page, row(0, "a", 1.0), row(1, "b", 0.5), row(2, "c", 0.5), status=["clean", "culprit", "inherited"])
    assert key.all_inner_texts() == ["● clean, inherited", "● culprit"]


def test_columns_without_information_are_hidden(page: Page) -> None:
    titles = (
        "() => [...document.querySelectorAll('th')].filter((each) => !each.hidden).map((each) => each.dataset.column)"
    )
    mount(page, row(0, "a", 1e-3), row(1, "b", 0.0))
    few = page.evaluate(titles)
    assert not {"nonfinite", "way", "note"} & set(few)
    assert page.locator("tr[data-tap]").first.locator("td").count() == len(few)
    mount(page, row(0, "a", 1e-3), row(1, "b", 0.0, nonfinite_differ=1, error="what went wrong"))
    many = page.evaluate(titles)
    assert {"nonfinite", "note"} <= set(many)
    assert page.locator("tr[data-tap]").first.locator("td").count() == len(many)


def test_an_invalid_floor_is_refused_with_a_message_until_corrected(page: Page) -> None:
    mount(page, row(0, "a", 1e-3))
    floor, refused = page.locator("input.floor"), page.locator(".refused")
    assert not refused.is_visible()
    for wrong in ("one", "-1", "1e400"):
        floor.fill(wrong)
        floor.press("Enter")
        assert refused.inner_text().startswith("enter a number of at least 0"), wrong
        assert floor.get_attribute("aria-invalid") == "true"
    floor.fill("0.5")
    floor.press("Enter")
    assert not refused.is_visible()
    assert floor.get_attribute("aria-invalid") == "false"


@pytest.mark.parametrize(
    ("paper", "ink"),
    [
        ("rgb(30, 30, 30)", "rgb(204, 204, 204)"),
        pytest.param("rgb(255, 255, 255)", "rgb(51, 51, 51)", marks=pytest.mark.soak),
    ],
)
def test_overlays_have_the_colour_of_the_page_without_a_theme(page: Page, paper: str, ink: str) -> None:
    mount(page, row(0, "a", 1e-3), style=f"body {{ background: {paper}; color: {ink} }}")
    assert page.locator("th").first.evaluate("each => getComputedStyle(each).backgroundColor") == paper
    assert page.locator(".tip").evaluate("each => getComputedStyle(each).backgroundColor") == paper


# ---- pointer and keys ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("start", "end"), [pytest.param(1.8, 6.2, marks=pytest.mark.soak), (6.2, 1.8)])
def test_a_drag_zooms_to_what_it_covers_in_either_direction(page: Page, start: float, end: float) -> None:
    mount(page, *ten(), style="body { margin-left: 120px }")
    assert visible(page) == [f"t{at}" for at in range(10)]
    page.mouse.move(*place_of(page, start))
    page.mouse.down()
    page.mouse.move(*place_of(page, end), steps=3)
    page.mouse.up()
    assert visible(page) == ["t2", "t3", "t4", "t5", "t6"]
    page.locator("button.all").click()
    assert len(visible(page)) == 10


def test_the_wheel_zooms_in_upwards_and_out_downwards(page: Page) -> None:
    mount(page, *ten())
    page.mouse.move(*place_of(page, 4.5))
    page.keyboard.down("Control")
    counts = []
    for by in (100, -100, -100, 100, 100):
        page.mouse.wheel(0, by)
        page.evaluate("() => new Promise((done) => requestAnimationFrame(done))")
        counts.append(len(visible(page)))
    page.keyboard.up("Control")
    assert counts[0] == 10
    assert counts[2] < counts[1] < 10
    assert counts[4] == 10


def test_keys_choose_and_zoom_and_none_of_them_reaches_the_notebook(page: Page) -> None:
    mount(page, *ten(), given=", (what, value) => {}, ['open']")
    page.evaluate(
        "() => { window.keys = []; document.addEventListener('keydown', (each) => window.keys.push(each.key)); }"
    )
    canvas = page.locator("canvas")
    for pressed, expected in (("ArrowRight", "t0"), ("End", "t9"), ("ArrowLeft", "t8"), ("Home", "t0")):
        canvas.press(pressed)
        assert chosen(page) == expected, pressed
    for pressed in ("=", "+"):
        canvas.press("0")
        assert len(visible(page)) == 10
        canvas.press(pressed)
        assert len(visible(page)) < 10, pressed
    canvas.press("x")
    page.locator("input.find").press("a")
    assert page.evaluate("() => window.keys") == []


def test_the_tables_keys_stop_at_its_ends(page: Page) -> None:
    mount(page, *ten()[:3])
    lines = page.locator(".lines")
    # The worst comes first.
    for pressed, expected in (("ArrowUp", "t2"), ("ArrowDown", "t1"), *[("ArrowDown", "t0")] * 3, ("ArrowUp", "t1")):
        lines.press(pressed)
        assert chosen(page) == expected


def test_a_tap_that_the_search_hides_is_listed_again_where_its_point_is_chosen(page: Page) -> None:
    mount(page, *ten())
    page.locator("input.find").fill("t3")
    assert page.locator("tr[data-tap]").count() == 1
    page.mouse.click(*place_of(page, 7))
    assert page.locator("tr[aria-selected=true] td").nth(1).inner_text() == "t7"
    assert page.locator("input.find").input_value() == ""


def test_a_layer_has_the_point_of_its_worst_tap(page: Page) -> None:
    mount(page, *(row(at, f"layers.{at // 2}.{'ab'[at % 2]}", size) for at, size in enumerate((1e-4, 1e-2, 1e-1, 0.0))))
    page.locator("input.layers").check()
    tips = []
    for at in (0, 1):
        page.mouse.move(*place_of(page, at, 2))
        tips.append(page.locator(".tip").inner_text().partition("\n")[0])
    assert tips == ["layers.0: 2 taps, the worst: layers.0.b", "layers.1: 2 taps, the worst: layers.1.a"]


def test_a_layer_is_a_number_in_the_name_or_else_a_tag(page: Page) -> None:
    mount(page, row(0, "a", 0.0))
    labels = ["model.layers.3.mlp.4", "h layer=3 side=x", "h step=1 block_id=2", "head.out x=1", "h"]
    found = page.evaluate("(labels) => labels.map(window.layerOf)", labels)
    assert found == ["model.layers.3", "layer=3", "block_id=2", "head", "h"]


# ---- what is drawn and shown -----------------------------------------------------------------------------------------


def test_names_of_many_layers_leave_each_other_out_rather_than_overlap(page: Page) -> None:
    drawn = mount(page, *(row(at, f"model.layers.{at // 5}.h{at % 5}", 1e-3) for at in range(200)))
    # The figure may have been drawn twice.
    names = sorted({(left, right) for text, left, right in drawn if text.startswith("model.layers.")})
    assert 2 <= len(names) < 40
    assert all(one[1] <= other[0] for one, other in itertools.pairwise(names))


def test_without_a_floor_there_is_no_line_and_no_field_for_it(page: Page) -> None:
    floor = page.locator("input.floor")
    assert any(text.startswith("floor") for text, _, _ in mount(page, row(0, "a", 1e-3)))
    assert floor.is_visible()
    for none in (0.0, None):
        drawn = mount(page, row(0, "a", 1e-3), floor=none)
        assert not [text for text, _, _ in drawn if text.startswith("floor")]
        assert floor.is_visible() == (none is not None)
    # Where all are equal and no floor is known, the axis has values nevertheless.
    texts = [text for text, _, _ in mount(page, row(0, "a", 0.0), floor=None)]
    assert {"1e-8", "1e0"} <= set(texts)


def test_a_folded_table_shows_lines_each_time_that_it_is_unfolded(page: Page) -> None:
    mount(page, *(row(at, f"t{at}", 1e-3) for at in range(300)), given=", null, [], true")
    lines, unfold = page.locator(".lines"), page.locator("button.unfold")
    assert not lines.is_visible()
    assert unfold.get_attribute("aria-expanded") == "false"
    in_the_middle = """each => {
        const box = each.getBoundingClientRect();
        return document.elementFromPoint(box.left + 50, box.top + box.height / 2)?.closest("tr[data-tap]") !== null;
    }"""
    for scrolls in (True, False):
        unfold.click()
        assert lines.evaluate(in_the_middle)
        if scrolls:
            lines.evaluate("each => { each.scrollTop = 5000; }")
            page.wait_for_selector("tr[data-tap='230']")
            unfold.click()
            page.evaluate("() => window.show()")
    mount(page, row(0, "a", 1e-3))
    assert (lines.is_visible(), unfold.count()) == (True, 0)


def test_buttons_without_words_have_a_name(page: Page) -> None:
    mount(page, row(0, "a", 1e-3))
    for name in ("Zoom in", "Zoom out"):
        assert page.get_by_role("button", name=name, exact=True).count() == 1
    assert page.get_by_role("button", name="All", exact=True).count() == 1
