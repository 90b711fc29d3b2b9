"""The script of the code editor on a page by itself, with a model that stands in for the kernel's widget."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from graftlab.widgets.code_mirror import BUNDLE

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

pytest_plugins = ["kit.browser"]
pytestmark = pytest.mark.browser

# A model with the traits of the widget. What the script sends is kept, and set() is a change by the kernel.
MODEL = """
const values = VALUES, listeners = new Map();
window.sent = [];
window.model = {
  get: (name) => values[name],
  set: (name, value) => { values[name] = value; for (const each of listeners.get(`change:${name}`) ?? []) each(); },
  on: (event, listener) => listeners.set(event, [...(listeners.get(event) ?? []), listener]),
  off: (event, listener) => listeners.set(event, (listeners.get(event) ?? []).filter((each) => each !== listener)),
  send: (message) => window.sent.push(message),
};
const widget = made();
widget.initialize({ model });
window.show = () => widget.render({ model, el: document.body.appendChild(document.createElement("div")) });
window.hide = window.show();
window.mounted = true;
"""


class Editor:
    """One view of an editor on an empty page."""

    def __init__(self, page: Page, text: str, **values: Any) -> None:
        document = {"text": text, "revision": 1, "page": "", "over": None}
        usual = {"document": document, "acknowledged": 0, "request": {}, "language": "python", "lines": 8, "label": "x"}
        state = {"completions": [], "read_only": False, "error": {"message": "", "line": None}, "dark": False}
        self.page = page
        script = BUNDLE.read_text(encoding="utf-8")
        model = MODEL.replace("VALUES", json.dumps({**usual, **state, **values}))
        page.set_content("<body></body>")
        page.evaluate("script => { window.script = script; }", script)
        load = 'new Blob([window.script], { type: "text/javascript" })'
        page.add_script_tag(
            type="module", content=f"const made = (await import(URL.createObjectURL({load}))).default;\n{model}"
        )
        page.wait_for_function("() => window.mounted")

    @property
    def typing(self) -> Locator:
        return self.page.locator(".cm-content")

    def sets(self, name: str, value: Any) -> None:
        """A change by the kernel."""
        self.page.evaluate("([name, value]) => window.model.set(name, value)", [name, value])

    def sent(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.page.evaluate("() => window.sent")
        return found

    def text(self) -> str:
        lines: list[str] = self.page.locator(".cm-line").all_inner_texts()
        return "\n".join(line.removesuffix("\n") for line in lines)


@pytest.fixture
def bundle() -> None:
    if not BUNDLE.is_file():
        pytest.skip("CodeMirror was not built")


@pytest.fixture
def page(bundle: None, empty_page: Page) -> Page:
    empty_page.set_viewport_size({"width": 500, "height": 600})
    return empty_page


def test_what_was_typed_is_sent_where_the_view_is_removed(page: Page) -> None:
    editor = Editor(page, "")
    editor.typing.press("a")
    page.evaluate("() => window.hide()")
    assert [(each["type"], each["text"]) for each in editor.sent()] == [("changed", "a")]
    page.evaluate("() => window.show()")
    assert editor.text() == "a"


def test_the_mark_of_an_error_is_shown_at_once_and_stays_at_its_line(page: Page) -> None:
    editor = Editor(page, "a\nb\nc", error={"message": "wrong", "line": 2})
    marked, footer = page.locator(".graftlab-error-line"), page.locator(".graftlab-error")
    assert (marked.inner_text(), footer.inner_text()) == ("b", "line 2: wrong")
    editor.typing.press("Control+Home")
    for key in ("ArrowDown", "Enter"):
        editor.typing.press(key)
    assert (editor.text(), marked.inner_text(), footer.inner_text()) == ("a\n\nb\nc", "b", "line 3: wrong")
    # Python may name a line after the last one.
    editor.sets("error", {"message": "unfinished", "line": 9})
    assert (marked.inner_text(), footer.inner_text()) == ("c", "line 4: unfinished")
    editor.sets("error", {"message": "", "line": None})
    assert marked.count() == footer.count() == 0


def test_tab_indents_the_lines_that_are_selected(page: Page) -> None:
    editor = Editor(page, "a\nb")
    for key in ("Control+a", "Tab"):
        editor.typing.press(key)
    assert editor.text() == "    a\n    b"
    editor.typing.press("Shift+Tab")
    assert editor.text() == "a\nb"


@pytest.mark.parametrize(("language", "is_offered"), [("python", True), ("filter", False)])
def test_a_filter_is_offered_names_of_tags_and_no_builtin_functions(
    page: Page, language: str, is_offered: bool
) -> None:
    editor = Editor(page, "", language=language, completions=["layer", "print_every"])
    editor.typing.press_sequentially("pri")
    editor.typing.press("Control+Space")
    page.wait_for_selector(".cm-tooltip-autocomplete li")
    offered = page.locator(".cm-completionLabel").all_inner_texts()
    assert "print_every" in offered
    assert ("print" in offered) == is_offered


def test_names_are_offered_for_a_word_or_when_asked_for(bundle: None, browser: Browser) -> None:
    # Completion waits for a pause, which is over where the page's clock says so. The clock stays in its context.
    context = browser.new_context()
    try:
        page = context.new_page()
        page.clock.install()
        editor = Editor(page, "", language="filter", completions=["layer"])
        for typed, is_offered in (("l", True), ("Escape", False), (" ", False), ("<", False), ("Control+Space", True)):
            editor.typing.press(typed)
            page.clock.run_for(1000)
            assert page.locator(".cm-tooltip-autocomplete li").count() == is_offered, typed
    finally:
        context.close()


def test_a_filter_is_wrapped_rather_than_scrolled(page: Page) -> None:
    Editor(page, " and ".join(["layer < 4"] * 40), language="filter")
    width = "each => [each.scrollWidth, each.clientWidth]"
    needed, shown = page.locator(".cm-scroller").evaluate(width)
    assert needed <= shown


def test_numbers_of_messages_continue_after_those_that_the_kernel_has_seen(page: Page) -> None:
    editor = Editor(page, "", acknowledged=7)
    editor.typing.press("a")
    editor.typing.press("Control+Enter")
    (submit,) = [each for each in editor.sent() if each["type"] == "submit"]
    assert (submit["action"], submit["text"]) == ("apply", "a")
    assert submit["serial"] > 7
    status = page.locator(".graftlab-status")
    assert status.inner_text() == "apply: waiting for the kernel"
    editor.sets("acknowledged", submit["serial"] - 1)
    assert status.inner_text() == "apply: waiting for the kernel"
    editor.sets("acknowledged", submit["serial"])
    assert status.inner_text() == "apply: received"
    # Beside what went wrong that would read as success.
    editor.sets("error", {"line": None, "message": "no such tap"})
    assert status.inner_text() == ""
    editor.typing.press("Control+Enter")
    assert status.inner_text() == "apply: waiting for the kernel"


def test_an_offered_text_does_not_replace_what_was_typed_since(page: Page) -> None:
    editor = Editor(page, "old")
    editor.typing.press("Control+End")
    editor.typing.press("x")
    editor.sets("document", {"text": "offered", "revision": 2, "page": "", "over": "old"})
    assert editor.text() == "oldx"
    editor.sets("document", {"text": "offered", "revision": 3, "page": "", "over": "oldx"})
    assert editor.text() == "offered"
    editor.sets("document", {"text": "set", "revision": 4, "page": "", "over": None})
    assert editor.text() == "set"
