"""The interactive figure of taps in a real browser, on a separate page: its names, colours and columns."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from graftlab.plots import explorer
from graftlab.rows.schema import Row
from graftlab.verdict.conclusion import conclude_from

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

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
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 700, "height": 900})
    yield context.new_page()
    context.close()


def mount(page: Page, *rows: Row, style: str = "") -> list[tuple[str, float, float]]:
    """Show these rows; what was written on the canvas, and from where to where."""
    found = conclude_from(rows)
    state = json.dumps(explorer.taps(found) | explorer.figures(found))
    page.set_content(f"<style>{style}</style><div id='root'></div>")
    page.evaluate(RECORD)
    script = explorer.SCRIPT.read_text(encoding="utf-8")
    page.add_script_tag(
        type="module",
        content=f"{script}\nmount(document.getElementById('root')).show({state}); window.mounted = true;",
    )
    page.wait_for_function("() => window.mounted && window.drawn.length > 0")
    drawn: list[tuple[str, float, float]] = page.evaluate("() => window.drawn.map((each) => [...each])")
    return drawn


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
    ("paper", "ink"), [("rgb(30, 30, 30)", "rgb(204, 204, 204)"), ("rgb(255, 255, 255)", "rgb(51, 51, 51)")]
)
def test_overlays_have_the_colour_of_the_page_without_a_theme(page: Page, paper: str, ink: str) -> None:
    mount(page, row(0, "a", 1e-3), style=f"body {{ background: {paper}; color: {ink} }}")
    assert page.locator("th").first.evaluate("each => getComputedStyle(each).backgroundColor") == paper
    assert page.locator(".tip").evaluate("each => getComputedStyle(each).backgroundColor") == paper
