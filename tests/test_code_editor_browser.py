"""The code editor in a real browser: what a person types, presses and sees, while the kernel is busy and while not."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from playwright.sync_api import Locator, expect
from support import wait_for_file

from graftlab.notebook.code_editor import CodeMirrorEditor, code_editor

if TYPE_CHECKING:
    from browser import Lab

pytest_plugins = ["browser"]
pytestmark = pytest.mark.browser

# The cell's own source must not match what the tests look for, so everything is found by id or class.
SETUP = """
import json, os, pathlib, time
import ipywidgets as widgets
from graftlab.notebook.code_editor import code_editor

def busy_until(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

def note(*event):
    events.append(event)
    log.value = f'<pre id="events">{json.dumps(events)}</pre>'

events, log = [], widgets.HTML()
editor = code_editor(START, plain=PLAIN)
editor.on_submit(lambda text, action: note("submit", text, action))
apply = widgets.Button(description="Apply")
apply.on_click(lambda _: editor.submit("apply"))
apply.add_class("apply-button")
changes = lambda: editor.on_change(lambda text: note("change", text))
note("ready")
"""


@dataclass
class Screen:
    """One editor on the screen, whichever it is."""

    lab: Lab
    plain: bool

    def open(self, *cells: str, start: str = "", show: str = "display(editor, apply, log)") -> None:
        for file in self.lab.folder.glob("*.flag"):
            file.unlink()
        setup = SETUP.replace("START", repr(start)).replace("PLAIN", repr(self.plain)) + show
        self.lab.open(setup, *cells)
        self.lab.run_cell(0)
        expect(self.typing).to_be_visible()
        self.saw(["ready"])

    def flag(self, name: str) -> None:
        (self.lab.folder / f"{name}.flag").touch()

    @property
    def typing(self) -> Locator:
        """The element that takes the keys."""
        return self.lab.page.locator(".graftlab-plain-editor textarea" if self.plain else ".graftlab-editor .cm-content")

    @property
    def footer(self) -> Locator:
        return self.lab.page.locator(".graftlab-footer")

    def type(self, text: str) -> None:
        self.typing.press_sequentially(text)

    def press(self, keys: str) -> None:
        self.typing.press(keys)

    def click_apply(self) -> None:
        self.lab.page.locator(".apply-button").click()

    def shows(self, text: str) -> None:
        """Wait until this is the text on the screen."""
        if self.plain:
            expect(self.typing).to_have_value(text)
        else:
            expect(self.typing.locator(".cm-line")).to_have_text(text.split("\n"))

    def saw(self, *events: list[str]) -> None:
        """Wait until the callbacks in the kernel have noted these events."""
        expect(self.lab.page.locator("#events")).to_have_text(json.dumps(events))


def needs_code_mirror() -> None:
    editor = code_editor()
    if not isinstance(editor, CodeMirrorEditor):
        pytest.skip(f"there is only the text area here: {editor.reason}")


@pytest.fixture(autouse=True)
def patience() -> None:
    expect.set_options(timeout=60_000)


@pytest.fixture
def mirror(lab: Lab) -> Screen:
    needs_code_mirror()
    return Screen(lab, plain=False)


@pytest.fixture(params=["codemirror", "textarea"])
def screen(lab: Lab, request: pytest.FixtureRequest) -> Screen:
    if request.param == "codemirror":
        needs_code_mirror()
    return Screen(lab, plain=request.param == "textarea")


BUSY = "busy_until('go.flag')"


def test_a_button_clicked_while_a_cell_runs_gets_the_text_on_the_screen(screen: Screen) -> None:
    screen.open(BUSY)
    screen.lab.run_cell(1, wait=False)
    screen.lab.wait_busy()
    screen.type("x = 12345")
    screen.click_apply()
    screen.flag("go")
    screen.saw(["ready"], ["submit", "x = 12345", "apply"])


def test_shift_enter_makes_a_line_and_does_not_run_the_cell(screen: Screen) -> None:
    screen.open("changes()")
    screen.lab.run_cell(1)
    before = screen.lab.execution_counts()
    screen.typing.click()
    screen.press("Shift+Enter")
    # It was sent after the run of the cell would have been.
    screen.saw(["ready"], ["change", "\n"])
    screen.lab.wait_idle()
    assert screen.lab.execution_counts() == before
    screen.shows("\n")


def test_set_text_replaces_what_was_typed_while_a_cell_ran_and_it_does_not_come_back(screen: Screen) -> None:
    screen.open(
        "changes()\nbusy_until('typed.flag')\neditor.set_text('y = 2')\nbusy_until('go.flag')",
        "note(editor.value)",
    )
    screen.lab.run_cell(1, wait=False)
    screen.lab.wait_busy()
    screen.type("x = 1")
    screen.flag("typed")
    screen.shows("y = 2")
    screen.flag("go")
    screen.lab.wait_idle()
    screen.lab.run_cell(2)
    screen.saw(["ready"], ["y = 2"])
    screen.shows("y = 2")
    screen.typing.click()
    screen.press("End")
    screen.type("3")
    screen.click_apply()
    expect(screen.lab.page.locator("#events")).to_contain_text('["submit", "y = 23", "apply"]')


def test_the_error_is_shown_with_its_line(screen: Screen) -> None:
    screen.open("editor.show_error('no such <name>', 2)", "editor.clear_error()", start="a = 1\nb = c\nd = 2")
    screen.lab.run_cell(1)
    message = screen.lab.page.locator(".graftlab-error")
    expect(message).to_contain_text("line 2: no such <name>")
    if screen.plain:
        expect(message).to_contain_text("b = c")
    else:
        expect(screen.lab.page.locator(".graftlab-error-line")).to_have_text("b = c")
        expect(screen.lab.page.locator(".cm-lineNumbers .graftlab-error-number")).to_have_text("2")
        screen.press("Control+Home")
        screen.type("\n")
        expect(message).to_contain_text("line 3: no such <name>")
        expect(screen.lab.page.locator(".graftlab-error-line")).to_have_text("b = c")
    screen.lab.run_cell(2)
    expect(message).to_have_count(0)
    expect(screen.lab.page.locator(".graftlab-error-line")).to_have_count(0)


def test_ctrl_enter_sends_the_text_of_that_moment_though_a_cell_runs(mirror: Screen) -> None:
    mirror.open(BUSY)
    mirror.lab.run_cell(1, wait=False)
    mirror.lab.wait_busy()
    mirror.type("x = 1")
    mirror.press("Control+Enter")
    mirror.type("00")
    mirror.press("Control+Shift+Enter")
    mirror.type("7")
    mirror.flag("go")
    mirror.saw(["ready"], ["submit", "x = 1", "apply"], ["submit", "x = 100", "try"])
    mirror.shows("x = 1007")
    assert mirror.lab.execution_counts()[:1] == [1]


def test_the_editor_says_whether_the_kernel_has_the_text(mirror: Screen) -> None:
    mirror.open("pathlib.Path('pid.flag').write_text(str(os.getpid()))")
    mirror.lab.run_cell(1)
    wait_for_file(mirror.lab.folder / "pid.flag")
    mirror.lab.wait_idle()
    pid = int((mirror.lab.folder / "pid.flag").read_text())
    # Stopped, no thread of it can answer, whichever thread of which release would.
    os.kill(pid, signal.SIGSTOP)
    try:
        mirror.type("x")
        mirror.press("Control+Enter")
        expect(mirror.footer).to_contain_text("apply: waiting for the kernel")
    finally:
        os.kill(pid, signal.SIGCONT)
    expect(mirror.footer).to_contain_text("apply: received")
    mirror.saw(["ready"], ["submit", "x", "apply"])


def test_tab_indents_and_escape_then_tab_leaves(mirror: Screen) -> None:
    mirror.open()
    mirror.typing.click()
    mirror.press("Tab")
    mirror.type("x")
    mirror.shows("    x")
    mirror.press("Shift+Tab")
    mirror.shows("x")
    expect(mirror.typing).to_be_focused()
    mirror.press("Escape")
    mirror.press("Tab")
    expect(mirror.typing).not_to_be_focused()
    expect(mirror.lab.page.locator(".apply-button")).to_be_focused()
    mirror.shows("x")


def test_the_callers_names_are_completed(mirror: Screen) -> None:
    mirror.open("editor.completions = ['graft_input.target', 'graft_input.tags']")
    mirror.lab.run_cell(1)
    mirror.type("y = graft_input.tar")
    option = mirror.lab.page.locator(".cm-tooltip-autocomplete li")
    expect(option).to_have_text(["graft_input.target"])
    option.click()
    mirror.shows("y = graft_input.target")


def test_a_reloaded_page_shows_what_was_typed_and_submits_nothing_again(mirror: Screen) -> None:
    mirror.open("changes()", start="a = 1")
    mirror.lab.run_cell(1)
    mirror.typing.click()
    mirror.press("Control+End")
    mirror.type("0")
    mirror.click_apply()
    seen = (["ready"], ["change", "a = 10"], ["submit", "a = 10", "apply"])
    mirror.saw(*seen)
    mirror.lab.command("docmanager:save")
    mirror.lab.reload()
    mirror.shows("a = 10")
    mirror.typing.click()
    mirror.press("Control+End")
    mirror.type("0")
    mirror.press("Control+Enter")
    mirror.saw(*seen, ["change", "a = 100"], ["submit", "a = 100", "apply"])


def test_two_views_of_an_editor_show_one_text_and_submit_it_once(mirror: Screen) -> None:
    mirror.open("display(editor)", show="display(apply, log, editor)")
    mirror.lab.run_cell(1)
    first, second = (mirror.lab.page.locator(".graftlab-editor .cm-content").nth(i) for i in (0, 1))
    first.press_sequentially("x = 1")
    expect(second).to_have_text("x = 1")
    second.press("Control+End")
    second.press_sequentially("2")
    expect(first).to_have_text("x = 12")
    mirror.click_apply()
    mirror.saw(["ready"], ["submit", "x = 12", "apply"])
    first.press("Control+Enter")
    mirror.saw(["ready"], ["submit", "x = 12", "apply"], ["submit", "x = 12", "apply"])


def test_a_read_only_editor_takes_no_keys(screen: Screen) -> None:
    screen.open("editor.read_only = True", "editor.read_only = False", start="a")
    screen.lab.run_cell(1)
    if screen.plain:
        expect(screen.typing).to_be_disabled()
    else:
        expect(screen.footer).to_contain_text("read-only")
        screen.type("b")
        screen.press("Control+Enter")
    screen.shows("a")
    screen.lab.run_cell(2)
    expect(screen.typing).to_be_enabled()
    if not screen.plain:
        expect(screen.footer).not_to_contain_text("read-only")
    screen.press("End")
    screen.type("c")
    screen.click_apply()
    screen.saw(["ready"], ["submit", "ac", "apply"])


SHOWN = '''from graftlab import GraftTransformInput
import torch


def transform(graft_input: GraftTransformInput) -> torch.Tensor:
    """The mean of what all ranks sent, scaled as they ask."""
    received = torch.stack(graft_input.received_list)
    scale = graft_input.received_extras_list[0]["scale"]
    if received.shape[1:] != graft_input.target.shape:
        raise ValueError(f"{tuple(received.shape)} does not fit")
    # bfloat16 would lose the small differences that are looked for
    return received.float().mean(0) * scals
'''


def test_the_editor_follows_the_theme_and_can_be_told_not_to(mirror: Screen) -> None:
    mirror.open(
        "editor.show_error(\"name 'scals' is not defined\", 12)",
        "editor.dark = False",
        "editor.dark = True",
        start=SHOWN,
    )
    frame = mirror.lab.page.locator(".graftlab-editor")

    def background() -> int:
        """0 (black) to 255 (white)."""
        colour = mirror.lab.page.locator(".cm-content").evaluate(
            "node => getComputedStyle(node.closest('.cm-editor')).backgroundColor"
        )
        return int(colour.split("(")[1].split(",")[0])

    mirror.lab.run_cell(1)
    expect(mirror.lab.page.locator(".graftlab-error")).to_be_visible()
    mirror.typing.click(position={"x": 200, "y": 130})
    mirror.lab.screenshot("code_editor_light", frame)
    assert background() > 200
    mirror.lab.use_theme("JupyterLab Dark")
    mirror.lab.page.wait_for_function(
        "() => getComputedStyle(document.querySelector('.graftlab-editor .cm-editor')).color !== 'rgba(0, 0, 0, 0.87)'"
    )
    mirror.lab.screenshot("code_editor_dark", frame)
    assert background() < 60
    mirror.lab.run_cell(2)
    mirror.lab.page.wait_for_function(
        "() => document.querySelector('.graftlab-editor').style.getPropertyValue('--gl-background').startsWith('#f')"
    )
    assert background() > 200
    mirror.lab.use_theme("JupyterLab Light")
    mirror.lab.run_cell(3)
    mirror.lab.page.wait_for_function(
        "() => document.querySelector('.graftlab-editor').style.getPropertyValue('--gl-background').startsWith('#1')"
    )
    assert background() < 60


def test_the_plain_editor_is_on_one_screen_with_its_error(lab: Lab) -> None:
    plain = Screen(lab, plain=True)
    plain.open("editor.show_error(\"name 'scals' is not defined\", 12)", start=SHOWN)
    lab.run_cell(1)
    expect(lab.page.locator(".graftlab-error")).to_contain_text("mean(0) * scals")
    family = plain.typing.evaluate("node => getComputedStyle(node).fontFamily")
    assert "mono" in family
    lab.screenshot("code_editor_plain", lab.page.locator(".graftlab-plain-editor"))
