"""The widgets in a real JupyterLab, on ranks that run: what a person types and clicks, and what comes of it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from playwright.sync_api import Locator, expect

from graftlab.widgets.code_mirror import BUNDLE

if TYPE_CHECKING:
    from kit.browser import Lab

pytest_plugins = ["kit.browser"]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

# A loop that runs until the test ends it; the target's second layer is off by one.
RANKS = """
import pathlib
import graftlab as gl
%load_ext graftlab
%graft up -b 1 -t 1 -o session
"""
LOOP = """
%%graft both
import pathlib, time
def loop(flag):
    off = 1.0 if gl.here().side == "target" else 0.0
    while not pathlib.Path(flag).exists():
        for layer in range(4):
            gl.tap("hidden", torch.arange(64.0).view(8, 8) + (off if layer == 1 else 0.0), layer=layer)
        gl.tap("logits", torch.ones(16) + off)
        time.sleep(0.1)  # the pace of a model
        gl.step()
"""
START = """
session.edit(keep="name == 'hidden' and layer == 1")
pathlib.Path("stop.flag").unlink(missing_ok=True)
call = f"loop({str(pathlib.Path('stop.flag').absolute())!r})"
run = session.start(call, call).wait_steps(3)
"""
# The test asks for what the rows say by running this cell; the answer is found by its id.
ASK = """
import json, ipywidgets
frame = run.frame
frame = frame[frame["step"] < frame["step"].max()]  # the last step may have come in part
frame = frame[frame["plan_version"] == frame["plan_version"].max()]
found = {
    "version": int(frame["plan_version"].max()),
    "grafted": sorted({f"{r['name']} {r['layer']:g}" for _, r in frame[frame["status"] == "grafted"].iterrows()}),
    "worst": float(frame.loc[frame["name"] == "hidden", "max_abs"].max()),
    "going on": not run.done,
}
ipywidgets.HTML(f"<pre class='answer'>{json.dumps(found)}</pre>")
"""
STOP = """
import ipywidgets
pathlib.Path("stop.flag").touch()
run.wait()
session.close()
ipywidgets.HTML("<pre class='stopped'>stopped</pre>")
"""


@pytest.fixture(autouse=True)
def code_mirror_and_patience() -> None:
    if not BUNDLE.is_file():
        pytest.skip("CodeMirror was not built")
    expect.set_options(timeout=60_000)


class Screen:
    """A notebook whose loop runs, and one widget below it."""

    def __init__(self, lab: Lab, show: str) -> None:
        self.lab = lab
        self.page = lab.page
        self.page.set_viewport_size({"width": 1300, "height": 1100})
        lab.open(RANKS.strip(), LOOP.strip(), START.strip(), show, ASK.strip(), STOP.strip())
        for cell in range(4):
            lab.run_cell(cell)

    def ask(self) -> dict[str, object]:
        import json

        self.lab.run_cell(4)
        answer: dict[str, object] = json.loads(self.page.locator("pre.answer").last.inner_text())
        return answer

    def ask_until(self, version: int) -> dict[str, object]:
        """Ask until rows of this plan have come; each asking takes a cell's time."""
        answer = self.ask()
        for _ in range(100):
            if answer["version"] == version:
                break
            answer = self.ask()
        assert answer["version"] == version
        return answer

    has_stopped = False

    def stop(self) -> None:
        self.has_stopped = True
        self.lab.run_cell(5)
        expect(self.page.locator("pre.stopped")).to_be_visible()

    def write(self, editor: Locator, text: str) -> None:
        """Replace what an editor holds, with the keyboard."""
        editor.locator(".cm-content").click()
        self.page.keyboard.press("ControlOrMeta+a")
        self.page.keyboard.press("Delete")
        self.page.keyboard.insert_text(text)


def center(of: Locator) -> tuple[float, float]:
    """Where the middle of an element is on the page."""
    box = of.bounding_box()
    assert box is not None
    return box["x"] + box["width"] / 2, box["y"] + box["height"] / 2


@pytest.fixture
def screen(lab: Lab, request: pytest.FixtureRequest) -> Iterator[Screen]:
    yield (screen := Screen(lab, request.param))
    if not screen.has_stopped:
        screen.stop()


@pytest.mark.parametrize("screen", ["session.filter_editor()"], indirect=True)
def test_filters_are_checked_refused_and_applied_to_a_running_loop(screen: Screen) -> None:
    page = screen.page
    b2t, t2b = page.locator(".graftlab-filter-b2t"), page.locator(".graftlab-filter-t2b")
    apply = page.locator("button.graftlab-apply")
    place = center(apply)

    screen.write(b2t, "name == 'hidden' and")
    expect(b2t.locator(".graftlab-below")).to_contain_text("^")
    expect(apply).to_be_disabled()

    screen.write(b2t, "name == 'hidden'")
    expect(b2t.locator(".graftlab-below")).to_contain_text("4 of 5")
    expect(apply).to_be_enabled()

    screen.write(t2b, "layer == 1")
    expect(page.locator(".graftlab-filter-editor")).to_contain_text("both")
    expect(apply).to_be_disabled()
    assert center(apply) == place, "a fault, an overlap or a match moved the button"
    screen.lab.screenshot("filter-editor-overlap", of=page.locator(".graftlab-filter-editor"))

    screen.write(t2b, "")
    screen.write(b2t, "name == 'hidden' and layer == 1")
    expect(apply).to_be_enabled()
    # What is said below a line comes and goes while the mouse is pressed; the button stays under the pointer.
    middle = center(apply)
    page.mouse.move(*middle)
    page.mouse.down()
    expect(b2t.locator(".graftlab-below")).to_contain_text("1 of 5")
    expect(t2b.locator(".graftlab-below")).to_contain_text("matches nothing")
    assert center(apply) == middle
    page.mouse.up()
    expect(page.locator(".graftlab-adopted")).to_contain_text("Plan 2")
    expect(page.locator(".graftlab-adopted")).to_contain_text("all 2 ranks")
    answer = screen.ask_until(2)
    assert answer["grafted"] == ["hidden 1"]
    assert answer["going on"] is True
    screen.lab.screenshot("filter-editor", of=page.locator(".graftlab-filter-editor"))


@pytest.mark.parametrize("screen", ["session.transform_editor()"], indirect=True)
def test_a_transform_is_tried_fixed_and_applied_to_a_running_loop(screen: Screen) -> None:
    page = screen.page
    source, result = page.locator(".graftlab-source"), page.locator(".graftlab-result")
    try_, apply = page.locator("button.graftlab-try"), page.locator("button.graftlab-apply")

    screen.write(source, "def transform(graft_input):\n    return graft_input.received_list[0] * 2\n")
    try_.click()
    expect(result).to_contain_text("float32[8, 8]")
    screen.lab.screenshot("transform-editor", of=page.locator(".graftlab-transform-editor"))

    screen.write(source, "def transform(graft_input):\n    return graft_input.no_such_field\n")
    try_.click()
    expect(page.locator(".graftlab-transform-editor")).to_contain_text("no_such_field")
    expect(page.locator(".graftlab-transform-editor")).to_contain_text("AttributeError")
    # What fails is not applied either.
    apply.click()
    expect(page.locator(".graftlab-transform-editor")).to_contain_text("AttributeError")
    assert screen.ask()["version"] == 1

    screen.write(source, "def transform(graft_input):\n    return graft_input.received_list[0] - 9\n")
    where = page.locator(".graftlab-where input")
    where.fill("True")
    where.press("Enter")
    apply.click()
    expect(page.locator(".graftlab-adopted")).to_contain_text("Plan 2")
    # The target is one above the baseline in one layer, and the transform takes nine more away.
    assert screen.ask_until(2)["worst"] == 10.0


@pytest.mark.parametrize("screen", ["%graft ui"], indirect=True)
def test_the_dashboard_follows_a_run(screen: Screen) -> None:
    page = screen.page
    board = page.locator(".graftlab-dashboard")
    expect(board.locator(".graftlab-ranks tbody tr")).to_have_count(2)
    expect(board.locator(".gle tbody tr[data-tap]")).to_have_count(5)
    verdict = board.locator(".graftlab-verdict")
    expect(verdict).to_contain_text("first divergent: hidden layer=1 on target[0]")
    # It is stated once.
    expect(board.locator(".gle .headline")).to_be_hidden()

    # The conclusion names a step, and a newer one soon.
    seen = int(re.findall(r"steps? (\d+)", verdict.inner_text())[0])
    screen.lab.wait_for(
        "seen => Number(/steps? (\\d+)/.exec(document.querySelector('.graftlab-verdict').textContent)[1]) > seen + 5",
        seen,
    )
    names = board.locator(".gle tbody tr[data-tap] td:nth-child(2)")
    expect(names.first).to_have_text("logits")  # the worst first, which is not the first that diverges
    screen.lab.screenshot("dashboard", of=board)
    board.locator("th[data-column=order] button").click()
    expect(names).to_have_text([*(f"hidden layer={layer}" for layer in range(4)), "logits"])
    board.locator("th[data-column=label] button").click()
    board.locator("th[data-column=label] button").click()
    expect(names.first).to_have_text("logits")
    expect(board.locator("th[data-column=label]")).to_have_attribute("aria-sort", "descending")


def point_at(board: Locator, number: int, of: int) -> dict[str, float]:
    """Where a tap is in the figure, from its left edge; its height is looked for by the figure itself."""
    box = board.locator(".gle canvas").bounding_box()
    assert box is not None
    return {"x": 58 + (number + 0.5) / of * (box["width"] - 68), "y": 120}


@pytest.mark.parametrize("screen", ["%graft ui"], indirect=True)
def test_the_figure_names_selects_opens_keeps_and_grafts_a_tap(screen: Screen) -> None:
    page = screen.page
    board = page.locator(".graftlab-dashboard")
    canvas = board.locator(".gle canvas")
    expect(board.locator(".gle tbody tr[data-tap]")).to_have_count(5)
    expect(canvas).to_have_attribute("aria-label", re.compile("rel_l2 of each tap in execution order. Run"))

    canvas.hover(position=point_at(board, 2, 5))
    expect(board.locator(".gle .tip")).to_contain_text("hidden layer=2")
    canvas.click(position=point_at(board, 1, 5))
    expect(board.locator(".gle tr[aria-selected=true] td:nth-child(2)")).to_have_text("hidden layer=1")
    expect(board.locator(".gle .chosen b")).to_have_text("hidden layer=1")
    # On a small screen the pair is far below the button; the browser scrolls to it.
    size = page.viewport_size
    page.set_viewport_size({"width": 1200, "height": 420})
    board.locator(".gle button.open").click()
    expect(board.locator(".graftlab-pair .graftlab-on-light")).to_have_count(2)
    expect(board.locator(".graftlab-pair")).to_be_in_viewport(ratio=0.2)
    page.set_viewport_size(size)
    screen.lab.screenshot("dashboard-divergence", of=board)

    canvas.focus()
    page.keyboard.press("ArrowRight")
    expect(board.locator(".gle .chosen b")).to_have_text("hidden layer=2")
    expect(board.locator(".graftlab-pair .graftlab-on-light")).to_have_count(0)
    board.locator(".gle button.open").click()
    expect(board.locator(".graftlab-pair")).to_contain_text("keep filter")
    board.locator(".gle button.keep").click()
    expect(board.locator(".graftlab-message").first).to_contain_text("keeps hidden layer=2 since step")

    floor, button = board.locator(".gle input.floor"), board.locator(".gle button.graft").element_handle()
    floor.fill("100")
    floor.press("Enter")
    expect(board.locator(".graftlab-verdict")).to_contain_text("none of 5 compared rows is above the floor 100")
    expect(board.locator(".gle .chosen")).not_to_contain_text("x the floor")
    assert button.evaluate("each => each.isConnected"), "other figures must not replace a button that is being clicked"

    board.locator(".gle button.graft").click()
    line = board.locator(".graftlab-filter-b2t")
    expect(line.locator(".cm-content")).to_have_text("name == 'hidden' and layer == 2")
    board.locator("button.graftlab-apply").first.click()
    assert screen.ask_until(3)["grafted"] == ["hidden 2"]
    expect(board.locator(".graftlab-verdict")).to_contain_text("grafted 1 tap")


@pytest.mark.parametrize("screen", ["board = session.dashboard(); board"], indirect=True)
def test_closed_sessions_and_saved_notebooks_show_that_they_are_not_live(screen: Screen) -> None:
    page, lab = screen.page, screen.lab
    live = page.locator(".graftlab-dashboard")
    expect(live.locator(".gle tbody tr[data-tap]")).to_have_count(5)
    expect(page.locator(".graftlab-static")).to_be_hidden()
    screen.stop()
    expect(live.locator(".graftlab-ranks")).to_contain_text("closed")
    expect(live.locator(".gle tbody tr[data-tap]")).to_have_count(5)
    expect(page.locator(".graftlab-static")).to_contain_text("closed")
    expect(page.locator(".graftlab-static .graftlab-on-light")).to_have_count(1)
    lab.command("docmanager:save")

    # What is on the page when the kernel is restarted does not pass for live.
    page.evaluate("() => window.jupyterapp.shell.currentWidget.sessionContext.session.kernel.restart()")
    page.wait_for_selector(".graftlab-dashboard.jupyter-widgets-disconnected", state="attached")
    before = "(panel, of) => getComputedStyle(of ? panel.querySelector(of) : panel, '::before').content"
    assert "Not live" in live.evaluate(before, None)
    assert live.evaluate(before, ".jupyter-widgets-disconnected") == "none", "a broken link at every part"

    # The same holds when the kernel is shut down, which JupyterLab does not report to widgets.
    page.evaluate(
        """() => {
            for (const each of document.querySelectorAll(".jupyter-widgets-disconnected"))
                each.classList.remove("jupyter-widgets-disconnected");
            return window.jupyterapp.shell.currentWidget.sessionContext.shutdown();
        }"""
    )
    page.wait_for_selector(".graftlab-dashboard.jupyter-widgets-disconnected", state="attached")

    lab.server.end_kernels()
    lab.reopen()
    static = page.locator(".graftlab-static")
    expect(static).to_be_visible()
    expect(static.locator("b").first).to_contain_text("first divergent: hidden layer=1 on target[0]")
    expect(static.locator("td", has_text="logits").first).to_be_visible()
    expect(static.locator("img:visible")).to_have_attribute("alt", re.compile("rel_l2 of each tap in execution order"))
    expect(page.get_by_text("model not found")).not_to_be_visible()
    lab.screenshot("static-dashboard", of=static)

    exported = nbconvert_html(lab.notebook_path())
    assert "children=(" not in exported, "no repr of widgets"
    assert "first divergent: hidden layer=1 on target[0]" in exported
    assert "data:image/png;base64" in exported


def nbconvert_html(path: Path) -> str:
    nbconvert = pytest.importorskip("nbconvert")
    body, _ = nbconvert.HTMLExporter(embed_images=True).from_filename(str(path))
    return str(body)
