"""The code editor in a real browser: what a person types, presses and sees, while the kernel is busy and while not."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from kit.processes import stop_process
from kit.support import wait_for_file
from playwright.sync_api import Locator, expect

from graftlab.widgets.code_mirror import BUNDLE

if TYPE_CHECKING:
    from kit.browser import Lab

pytest_plugins = ["kit.browser"]
pytestmark = pytest.mark.browser

# The source of a cell is text on the page too, so nothing is found by its text alone.
SETUP = """
import json, os, pathlib, time
import ipywidgets as widgets
from graftlab.widgets.code_editor import CodeMirrorEditor, TextAreaEditor

def busy_until(name):
    while not pathlib.Path(name).exists():
        time.sleep(0.01)

def note(*event):
    events.append(event)
    log.value = f'<pre id="events">{json.dumps(events)}</pre>'

events, log = [], widgets.HTML()
editor = KIND(START)
editor.on_submit(lambda text, action: note("submit", text, action))
apply = widgets.Button(description="Apply")
apply.on_click(lambda _: editor.submit("apply"))
apply.add_class("apply-button")
note("ready")
"""
BUSY = "busy_until('go.flag')"
NOTE_CHANGES = "editor.on_change(lambda text: note('change', text))\n"


@dataclass
class Screen:
    """One editor on the screen, whichever it is."""

    lab: Lab
    plain: bool = False

    def open(self, *cells: str, start: str = "", show: str = "display(editor, apply, log)") -> None:
        """Show the editor with a first cell; ``cells`` follow it, and are not run."""
        for file in self.lab.folder.glob("*.flag"):
            file.unlink()
        kind = "TextAreaEditor" if self.plain else "CodeMirrorEditor"
        setup = SETUP.replace("START", repr(start)).replace("KIND", kind) + show
        self.lab.open(setup, *cells)
        self.lab.run_cell(0)
        self.saw(["ready"])

    def flag(self, name: str) -> None:
        """Let a ``busy_until`` in the kernel come to its end."""
        (self.lab.folder / f"{name}.flag").touch()

    @property
    def typing(self) -> Locator:
        """The element that takes the keys."""
        inner = ".graftlab-plain-editor textarea" if self.plain else ".graftlab-editor .cm-content"
        return self.lab.page.locator(inner)

    @property
    def footer(self) -> Locator:
        return self.lab.page.locator(".graftlab-footer")

    @property
    def message(self) -> Locator:
        return self.lab.page.locator(".graftlab-error")

    def type(self, text: str) -> None:
        self.typing.press_sequentially(text)

    def paste(self, text: str) -> None:
        self.typing.focus()
        self.lab.page.keyboard.insert_text(text)

    def press(self, keys: str) -> None:
        self.typing.press(keys)

    def click_apply(self) -> None:
        self.lab.page.locator(".apply-button").click()

    def shows(self, text: str) -> None:
        """Wait until this is the text on the screen."""
        if self.plain:
            expect(self.typing).to_have_value(text)
        else:
            lines = "[...document.querySelectorAll('.graftlab-editor .cm-line')].map(line => line.textContent)"
            # Not with to_have_text, which takes any white space for any other.
            self.lab.wait_for(f"text => {lines}.join('\\n') === text", text)

    def saw(self, *events: list[str | int]) -> None:
        """Wait until the callbacks in the kernel have noted exactly these events."""
        noted = "document.getElementById('events')?.textContent"
        self.lab.wait_for(f"events => {noted} === events", json.dumps(events))


@pytest.fixture(autouse=True)
def patience_and_no_errors(lab: Lab) -> Iterator[None]:
    expect.set_options(timeout=60_000)
    yield
    # CodeMirror reports what goes wrong in a key's command here, and then acts as if the key were not bound.
    assert lab.console_errors == []


@pytest.fixture
def screen(lab: Lab) -> Screen:
    if not BUNDLE.is_file():
        pytest.skip("CodeMirror was not built")
    return Screen(lab)


@pytest.fixture
def plain(lab: Lab) -> Screen:
    return Screen(lab, plain=True)


def test_a_button_clicked_while_a_cell_runs_gets_the_text_on_the_screen(screen: Screen) -> None:
    screen.open(BUSY)
    screen.lab.run_cell(1, wait=False)
    screen.lab.wait_busy()
    screen.type("x = 12345")
    screen.click_apply()
    screen.flag("go")
    screen.saw(["ready"], ["submit", "x = 12345", "apply"])


def test_keys_that_mean_something_to_jupyterlab_stay_in_the_editor(screen: Screen) -> None:
    screen.open("editor.on_change(lambda text: note('lines', text.count('\\n')))")
    screen.lab.run_cell(1)
    before = screen.lab.execution_counts()
    screen.typing.click()
    screen.press("Shift+Enter")
    # By now a run of the cell would have reached the kernel.
    screen.saw(["ready"], ["lines", 1])
    screen.press("Alt+Enter")  # in a notebook: run the cell, and insert one below it
    screen.press("Control+b")  # hide the side bar
    screen.type("x")
    screen.click_apply()
    expect(screen.lab.page.locator("#events")).to_contain_text('"apply"')
    screen.lab.wait_idle()
    assert screen.lab.execution_counts() == before
    expect(screen.lab.page.locator(".jp-FileBrowser")).to_be_visible()


def test_set_text_replaces_text_typed_while_a_cell_ran_for_good(screen: Screen) -> None:
    screen.open(
        "busy_until('typed.flag')\neditor.set_text('y = 2')\nbusy_until('go.flag')",
        "note(editor.value)",
    )
    screen.lab.run_cell(1, wait=False)
    screen.lab.wait_busy()
    screen.type("x = 1")
    screen.typing.blur()  # now it is on its way to the kernel
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
    screen.saw(["ready"], ["y = 2"], ["submit", "y = 23", "apply"])


def test_the_error_is_shown_with_its_line_and_cleared(screen: Screen) -> None:
    screen.open("editor.show_error('no such <name>', 2)", "editor.clear_error()", start="a = 1\nb = c\nd = 2")
    marked = screen.lab.page.locator(".graftlab-error-line")
    screen.lab.run_cell(1)
    expect(screen.message).to_contain_text("line 2: no such <name>")
    expect(marked).to_have_text("b = c")
    expect(screen.lab.page.locator(".cm-lineNumbers .graftlab-error-number")).to_have_text("2")
    screen.press("Control+Home")
    screen.press("Enter")
    expect(screen.message).to_contain_text("line 3: no such <name>")
    expect(marked).to_have_text("b = c")
    screen.lab.run_cell(2)
    expect(screen.message).to_have_count(0)
    expect(marked).to_have_count(0)


def test_a_read_only_editor_takes_no_keys(screen: Screen) -> None:
    screen.open("editor.read_only = True", "editor.read_only = False", start="a")
    screen.lab.run_cell(1)
    expect(screen.footer).to_contain_text("read-only")
    screen.type("b")
    screen.press("Control+Enter")
    screen.shows("a")
    screen.lab.run_cell(2)
    expect(screen.footer).not_to_contain_text("read-only")
    screen.press("End")
    screen.type("c")
    screen.click_apply()
    screen.saw(["ready"], ["submit", "ac", "apply"])


def test_ctrl_enter_sends_the_text_of_that_moment_though_a_cell_runs(screen: Screen) -> None:
    screen.open(BUSY)
    screen.lab.run_cell(1, wait=False)
    screen.lab.wait_busy()
    screen.type("x = 1")
    screen.press("Control+Enter")
    screen.type("00")
    screen.press("Control+Shift+Enter")
    screen.type("7")
    screen.flag("go")
    screen.saw(["ready"], ["submit", "x = 1", "apply"], ["submit", "x = 100", "try"])
    screen.shows("x = 1007")
    screen.lab.wait_idle()
    first, second = screen.lab.execution_counts()
    assert first is not None
    assert second == first + 1


def test_the_editor_shows_whether_the_kernel_has_the_text(screen: Screen) -> None:
    screen.open("pathlib.Path('pid').write_text(str(os.getpid()))\npathlib.Path('written.flag').touch()")
    screen.lab.run_cell(1)
    wait_for_file(screen.lab.folder / "written.flag")
    pid = int((screen.lab.folder / "pid").read_text())
    # Stopped, it cannot answer on any thread; which thread would answer differs between releases of ipykernel.
    stop_process(pid)
    try:
        screen.type("x")
        screen.press("Control+Enter")
        expect(screen.footer).to_contain_text("apply: waiting for the kernel")
    finally:
        os.kill(pid, signal.SIGCONT)
    expect(screen.footer).to_contain_text("apply: received")
    screen.saw(["ready"], ["submit", "x", "apply"])


# What the page has sent to the kernel since, in its order: the kernel may take messages of two widgets in another
# order, because it may take them on two threads (ipykernel 7.4 does).
SENT = """() => {
    window.sent = [];
    const { send } = WebSocket.prototype;
    WebSocket.prototype.send = function (data) {
        const text = typeof data === "string" ? data : new TextDecoder().decode(data);
        const found = /"(changed|submit|click)"/.exec(text);
        if (found) window.sent.push(found[1]);
        return send.call(this, data);
    };
    window.stopNotingWhatIsSent = () => (WebSocket.prototype.send = send);
}"""


def test_a_change_arrives_when_typing_pauses_and_when_the_editor_is_left(screen: Screen) -> None:
    screen.open(NOTE_CHANGES)
    screen.lab.run_cell(1)
    screen.paste("ab")
    screen.saw(["ready"], ["change", "ab"])
    page = screen.lab.page
    page.evaluate(SENT)
    try:
        screen.paste("cd")
        screen.click_apply()
        screen.saw(["ready"], ["change", "ab"], ["change", "abcd"], ["submit", "abcd", "apply"])
        assert page.evaluate("() => window.sent") == ["changed", "click", "submit"]
    finally:
        page.evaluate("() => window.stopNotingWhatIsSent()")


def test_tab_indents_and_escape_then_tab_leaves(screen: Screen) -> None:
    screen.open()
    screen.typing.click()
    screen.press("Tab")
    screen.type("x")
    screen.shows("    x")
    screen.press("Tab")
    screen.type("y")
    screen.shows("    x   y")
    screen.press("Shift+Tab")
    screen.shows("x   y")
    expect(screen.typing).to_be_focused()
    screen.press("Escape")
    screen.press("Tab")
    expect(screen.typing).not_to_be_focused()
    expect(screen.lab.page.locator(".apply-button")).to_be_focused()
    screen.shows("x   y")


def test_ctrl_s_in_the_editor_saves_the_notebook(screen: Screen) -> None:
    screen.open()
    unsaved = "window.jupyterapp.shell.currentWidget.context.model.dirty"
    screen.lab.wait_for(f"() => {unsaved}")
    screen.typing.click()
    screen.press("Control+s")
    screen.lab.wait_for(f"() => !{unsaved}")


def test_the_callers_names_are_completed(screen: Screen) -> None:
    screen.open("editor.completions = ['graft_input.target', 'graft_input.tags']")
    screen.lab.run_cell(1)
    screen.type("y = graft_input.tar")
    option = screen.lab.page.locator(".cm-tooltip-autocomplete li")
    expect(option).to_have_text(["graft_input.target"])
    option.click()
    screen.shows("y = graft_input.target")


def test_a_reloaded_page_shows_what_was_typed_and_submits_nothing_again(screen: Screen) -> None:
    screen.open(NOTE_CHANGES, start="a = 1")
    screen.lab.run_cell(1)
    screen.typing.click()
    screen.press("Control+End")
    screen.type("0")
    screen.click_apply()
    seen = (["ready"], ["change", "a = 10"], ["submit", "a = 10", "apply"])
    screen.saw(*seen)
    screen.lab.reload()
    screen.shows("a = 10")
    screen.typing.click()
    screen.press("Control+End")
    screen.type("0")
    screen.press("Control+Enter")
    screen.saw(*seen, ["change", "a = 100"], ["submit", "a = 100", "apply"])
    expect(screen.footer).to_contain_text("apply: received")


def test_two_views_of_an_editor_show_one_text_and_submit_it_once(screen: Screen) -> None:
    screen.open("display(editor)", show="display(apply, log, editor)")
    screen.lab.run_cell(1)
    first, second = (screen.typing.nth(i) for i in (0, 1))
    first.press_sequentially("x = 1")
    expect(second).to_have_text("x = 1")
    second.press("Control+End")
    second.press_sequentially("2")
    expect(first).to_have_text("x = 12")
    screen.click_apply()
    screen.saw(["ready"], ["submit", "x = 12", "apply"])
    first.press("Control+Enter")
    screen.saw(["ready"], ["submit", "x = 12", "apply"], ["submit", "x = 12", "apply"])


# --- how they look --------------------------------------------------------------------

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
SHOW_ERROR = "editor.show_error(\"name 'scals' is not defined\", 12)"


def test_the_editor_follows_the_theme_unless_dark_is_set(screen: Screen) -> None:
    screen.open(SHOW_ERROR, "editor.dark = False", "editor.dark = True", start=SHOWN)
    frame = screen.lab.page.locator(".graftlab-editor")

    def wait_for_background(dark: bool) -> None:
        screen.lab.wait_for(
            """dark => {
                const { backgroundColor } = getComputedStyle(document.querySelector(".graftlab-editor .cm-editor"));
                const red = Number(backgroundColor.match(/\\d+/)[0]);
                return dark ? red < 60 : red > 200;
            }""",
            dark,
        )

    screen.lab.run_cell(1)
    expect(screen.message).to_be_visible()
    screen.typing.click(position={"x": 200, "y": 130})
    wait_for_background(dark=False)
    screen.lab.screenshot("code_editor_light", frame)
    screen.lab.use_theme("JupyterLab Dark")
    wait_for_background(dark=True)
    screen.lab.screenshot("code_editor_dark", frame)
    screen.lab.run_cell(2)
    wait_for_background(dark=False)
    screen.lab.use_theme("JupyterLab Light")
    screen.lab.run_cell(3)
    wait_for_background(dark=True)


def test_the_text_area_submits_the_text_on_the_screen_and_shows_an_error(plain: Screen) -> None:
    plain.open(BUSY, "editor.show_error('no such <name>', 1)")
    plain.lab.run_cell(1, wait=False)
    plain.lab.wait_busy()
    plain.type("x = 12345")
    plain.click_apply()
    plain.flag("go")
    plain.saw(["ready"], ["submit", "x = 12345", "apply"])
    plain.lab.run_cell(2)
    expect(plain.message).to_have_text("line 1: no such <name>")
