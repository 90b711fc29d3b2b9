"""Figures of a notebook in a real JupyterLab: the canvas while there is a kernel, and the picture in the saved file."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from playwright.sync_api import Locator, expect

from graftlab.widgets.snapshot import _WATCH_SCRIPT

if TYPE_CHECKING:
    from kit.browser import Lab
    from playwright.sync_api import Page

pytest_plugins = ["kit.browser"]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

# As a front end without JupyterLab's class names shows a widget, and its snapshot later.
ELSEWHERE = """async (script) => {
    const { default: watch } = await import(URL.createObjectURL(new Blob([script], { type: 'text/javascript' })));
    const el = document.querySelector('.widget');
    watch.render({ model: { get: () => 'snapshot' }, el });
    const still = document.createElement('p');
    still.id = 'snapshot';
    still.textContent = 'the picture';
    await new Promise(requestAnimationFrame);
    document.body.append(still);
}"""
CELLS = (
    """
import torch
import graftlab as gl
%load_ext graftlab
%graft up -b 1 -t 1 -o session
""",
    """%%graft both
def model(off=0.0):
    x = torch.arange(64.0).view(8, 8)
    for layer in range(20):
        x = gl.tap(f"layers.{layer}.out", x / x.norm() + (off if layer == 7 else 0.0))
    return gl.tap("output", x)
off = 1.0 if gl.here().side == "target" else 0.0
""",
    """plan = session.edit(keep="name == 'layers.7.out'")""",
    "%graft run model(off)",
    "%graft verdict -o verdict model(off)",
    "verdict.plot()",
)
OF = 21
# What JupyterLab draws before each part of a view that has lost its kernel.
MARKS = """(view) => [view, ...view.querySelectorAll(".jupyter-widgets-disconnected")].map(
    (each) => getComputedStyle(each, "::before").content
)"""


def at(canvas: Locator, tap: int) -> dict[str, float]:
    """Where a tap is on the canvas, from its left edge; its height does not matter."""
    box = canvas.bounding_box()
    assert box is not None
    return {"x": 62 + (tap + 0.5) / OF * (box["width"] - 72), "y": 90}


def test_a_live_widget_hides_its_picture_outside_jupyterlab_too(empty_page: Page) -> None:
    empty_page.set_content("<div class='widget'></div>")
    empty_page.evaluate(ELSEWHERE, _WATCH_SCRIPT)
    expect(empty_page.locator("#snapshot")).to_be_hidden()


def test_figures_are_canvases_whose_taps_open_their_pairs_and_pictures_in_the_file(lab: Lab) -> None:
    expect.set_options(timeout=60_000)
    lab.open(*CELLS)
    lab.run_all()
    page = lab.page
    views = page.locator(".graftlab-canvas")
    expect(views).to_have_count(2)
    run, verdict = views.nth(0), views.nth(1)
    expect(run.locator("canvas")).to_be_visible()
    expect(verdict.get_by_role("status").first).to_contain_text(
        "layers.*.out is computed differently in layer 7 of 0-19"
    )
    for picture in page.locator(".graftlab-static").all():
        expect(picture).to_be_hidden()

    # Hover, zoom by dragging, and fold the table out.
    canvas = run.locator("canvas")
    canvas.scroll_into_view_if_needed()
    canvas.hover(position=at(canvas, 7))
    expect(run.locator(".tip")).to_contain_text("layers.7.out")
    canvas.drag_to(canvas, source_position=at(canvas, 5), target_position=at(canvas, 9))
    canvas.hover(position={**at(canvas, 0), "x": 66})
    expect(run.locator(".tip")).to_contain_text("layers.5.out")
    run.get_by_role("button", name="All", exact=True).click()
    table = run.get_by_role("button", name="Table")
    expect(table).to_have_attribute("aria-expanded", "false")
    table.click()
    expect(run.locator("tr[data-tap]").first).to_contain_text("layers.7.out")
    table.click()

    # A click opens the pair in view, or says why there is none.
    pair = run.locator(".graftlab-pair")
    canvas.click(position=at(canvas, 7))
    expect(pair.locator(".graftlab-on-light").first).to_be_visible()
    expect(pair.locator(".graftlab-on-light").first).to_be_in_viewport(ratio=0.9)
    lab.screenshot("canvas-pair")
    canvas.click(position=at(canvas, 2))
    expect(pair.get_by_role("alert")).to_contain_text("no pair of tensors is kept for 'layers.2.out'")
    of_verdict = verdict.locator("canvas")
    of_verdict.click(position=at(of_verdict, 7))
    expect(verdict.locator(".graftlab-pair .graftlab-on-light")).to_be_visible()
    lab.screenshot("canvas-of-verdict")

    # The file has both pictures, for where the widgets are unknown.
    lab.command("docmanager:save")
    cells = json.loads(lab.notebook_path().read_text(encoding="utf-8"))["cells"]
    for cell in (cells[3], cells[5]):
        kinds = [set(output["data"]) for output in cell["outputs"] if output["output_type"] == "display_data"]
        assert any({"image/png", "text/html"} <= each for each in kinds), kinds
        assert any("application/vnd.jupyter.widget-view+json" in each for each in kinds), kinds
    assert [message for message in lab.console_errors if "graftlab" in message] == []

    # Without its kernel a canvas still shows its taps, and there is no broken link at any part.
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    page.wait_for_selector(".graftlab-canvas.jupyter-widgets-disconnected", state="attached")
    page.wait_for_selector(".graftlab-canvas .jupyter-widgets-disconnected", state="attached")
    for view in views.all():
        marks = view.evaluate(MARKS)
        assert len(marks) > 1
        assert set(marks) == {"none"}
