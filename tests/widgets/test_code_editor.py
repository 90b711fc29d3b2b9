"""The code editor without a browser: what both editors promise, and the wire to CodeMirror."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.pages import Browser, Desk, MirrorPage

from graftlab.widgets.code_editor import code_editor
from graftlab.widgets.code_mirror_editor import CodeMirrorEditor
from graftlab.widgets.editor import CodeEditor
from graftlab.widgets.text_area_editor import TextareaEditor

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(params=["codemirror", "textarea"])
def make_desk(simulated: Browser, request: pytest.FixtureRequest) -> Iterator[Callable[..., Desk]]:
    made: list[CodeEditor] = []
    if request.param == "codemirror":
        request.getfixturevalue("stub_bundle")

    def make(value: str = "", **options: Any) -> Desk:
        kind = CodeMirrorEditor if request.param == "codemirror" else TextareaEditor
        made.append(kind(value, **options))
        return Desk(simulated, made[-1])

    yield make
    for editor in made:
        editor.close()


@pytest.fixture
def desk(make_desk: Callable[..., Desk]) -> Desk:
    return make_desk("start")


@pytest.fixture
def mirror(simulated: Browser, stub_bundle: Path) -> Iterator[Desk]:
    editor = CodeMirrorEditor("start")
    yield Desk(simulated, editor)
    editor.close()


# --- what both editors promise ---------------------------------------------------------


def test_the_first_text_is_shown_and_is_the_value(desk: Desk) -> None:
    assert desk.page.text == desk.editor.value == "start"
    assert desk.events == []


def test_a_typed_text_becomes_the_value_and_is_told_once(desk: Desk) -> None:
    desk.page.type("typed")
    desk.browser.kernel_works()
    assert desk.editor.value == "typed"
    desk.page.type("typed")
    desk.browser.kernel_works()
    assert desk.events == [("changed", "typed")]


def test_a_click_while_the_kernel_is_busy_gets_the_text_on_the_screen(desk: Desk) -> None:
    for text in ("a", "ab", "abc"):
        desk.page.type(text)
    desk.click("apply")
    desk.browser.kernel_works()
    assert desk.submitted == [("apply", "abc")]
    assert desk.editor.value == "abc"


def test_each_click_is_answered_once_and_in_order(desk: Desk) -> None:
    desk.click("try")
    desk.click("apply")
    desk.page.type("new")
    desk.browser.kernel_works()
    assert [action for action, _ in desk.submitted] == ["try", "apply"]
    assert desk.submitted[-1] == ("apply", "new")
    desk.browser.kernel_works()
    assert len(desk.submitted) == 2


def test_whoever_asks_gets_the_text_on_the_screen_and_nobody_else_hears_of_it(desk: Desk) -> None:
    told: list[str] = []
    for text in ("a", "ab", "abc"):
        desk.page.type(text)
    desk.browser.queue.append(lambda: desk.editor.ask("apply", told.append))
    desk.browser.kernel_works()
    assert told == ["abc"]
    assert desk.submitted == []
    assert ("changed", "abc") in desk.events


def test_every_submit_raises_the_acknowledged_number(desk: Desk) -> None:
    before = desk.editor.acknowledged
    for _ in range(3):
        desk.click("apply")
        desk.browser.kernel_works()
        assert desk.editor.acknowledged > before
        before = desk.editor.acknowledged


def test_a_change_is_told_before_the_submit_that_brings_it(desk: Desk) -> None:
    desk.page.type("a")
    desk.page.type("news")
    desk.click("apply")
    desk.browser.kernel_works()
    assert desk.events[-2:] == [("changed", "news"), ("apply", "news")]


def test_set_text_shows_the_text_and_is_no_change_of_the_persons(desk: Desk) -> None:
    desk.editor.set_text("restored")
    desk.browser.kernel_works()
    assert desk.page.text == desk.editor.value == "restored"
    assert desk.events == []


def test_set_text_with_the_value_replaces_what_the_kernel_has_not_seen(desk: Desk) -> None:
    desk.page.type("not yet with the kernel")
    desk.editor.set_text("start")
    desk.browser.kernel_works()
    assert desk.page.text == desk.editor.value == "start"


def test_what_was_typed_before_set_text_does_not_come_back(desk: Desk) -> None:
    for text in ("a", "ab", "abc"):
        desk.page.type(text)
    desk.browser.queue.appendleft(lambda: desk.editor.set_text("restored"))
    desk.browser.kernel_works()
    assert desk.page.text == desk.editor.value == "restored"
    desk.page.type("restored, and typed on")
    desk.click("apply")
    desk.browser.kernel_works()
    assert desk.submitted == [("apply", "restored, and typed on")]
    assert desk.editor.value == "restored, and typed on"


def test_a_submit_under_way_at_set_text_is_delivered_with_its_own_text(desk: Desk) -> None:
    desk.page.type("mine")
    desk.browser.kernel_works()
    desk.click("apply")
    desk.browser.queue.append(lambda: desk.editor.set_text("restored"))
    desk.browser.kernel_works()
    assert desk.submitted == [("apply", "mine")]
    assert desk.page.text == desk.editor.value == "restored"


def test_an_offer_is_taken_where_nothing_was_typed(desk: Desk) -> None:
    desk.editor.offer("offered")
    assert desk.editor.value == "offered"
    desk.browser.kernel_works()
    assert desk.page.text == desk.editor.value == "offered"
    desk.page.type("offered, and typed on")
    desk.browser.kernel_works()
    assert desk.events == [("changed", "offered, and typed on")]
    assert not desk.editor.offer_declined


def test_an_offer_is_declined_where_something_was_typed_that_the_kernel_had_not_heard_of(desk: Desk) -> None:
    declined: list[bool] = []
    desk.editor.on_change(lambda text: declined.append(desk.editor.offer_declined))
    for text in ("a", "ab", "abc"):
        desk.page.type(text)
    desk.editor.offer("offered")
    desk.browser.kernel_works()
    assert desk.page.text == desk.editor.value == "abc"
    assert desk.events[-1] == ("changed", "abc")
    assert declined[0]
    desk.page.type("abcd")
    desk.browser.kernel_works()
    assert declined[-1] is False
    desk.editor.set_text("set")
    desk.browser.kernel_works()
    assert desk.page.text == desk.editor.value == "set"


def test_what_was_typed_and_taken_back_does_not_decline_an_offer(desk: Desk) -> None:
    desk.page.type("typed")
    desk.page.type("start")
    desk.editor.offer("offered")
    desk.browser.kernel_works()
    assert desk.editor.value == desk.page.text


def test_the_newest_of_several_offers_is_taken(desk: Desk) -> None:
    desk.editor.offer("first")
    desk.editor.offer("second")
    desk.browser.kernel_works()
    assert desk.page.text == desk.editor.value == "second"
    assert desk.events == []


def test_a_submit_right_after_an_offer_delivers_the_offer(desk: Desk) -> None:
    desk.editor.offer("offered")
    desk.editor.submit("at once")
    desk.click("apply")
    desk.browser.kernel_works()
    assert desk.submitted == [("at once", "offered"), ("apply", "offered")]


def test_a_submit_right_after_a_declined_offer_delivers_what_was_typed(desk: Desk) -> None:
    desk.page.type("a")
    desk.page.type("typed")
    desk.editor.offer("offered")
    desk.click("apply")
    desk.browser.kernel_works()
    assert desk.submitted == [("apply", "typed")]


def test_a_callback_may_set_the_text(desk: Desk) -> None:
    desk.editor.on_submit(lambda text, action: desk.editor.set_text(text.upper()))
    desk.page.type("quiet")
    desk.click("apply")
    desk.browser.kernel_works()
    assert desk.page.text == desk.editor.value == "QUIET"
    desk.page.type("on")
    desk.click("apply")
    desk.browser.kernel_works()
    assert desk.submitted == [("apply", "quiet"), ("apply", "on")]


def test_a_failing_callback_is_shown_and_the_others_run(desk: Desk, caplog: pytest.LogCaptureFixture) -> None:
    def parse(text: str) -> None:
        raise RuntimeError("no <luck>")

    desk.editor.on_change(parse)
    desk.editor.on_change(lambda text: desk.events.append(("after", text)))
    desk.page.type("x")
    desk.browser.kernel_works()
    assert ("after", "x") in desk.events
    assert desk.editor.error_message == "parse failed: RuntimeError: no <luck>"
    assert "a callback of the code editor failed" in caplog.text


def test_a_removed_callback_is_not_called(desk: Desk) -> None:
    told: list[str] = []
    desk.editor.on_change(told.append)
    desk.editor.on_change(told.append, remove=True)
    desk.editor.on_change(told.append, remove=True)  # as in ipywidgets, no error
    desk.page.type("x")
    desk.browser.kernel_works()
    assert told == []


def test_the_error_is_shown_with_its_line_until_it_is_cleared_or_the_text_replaced(desk: Desk) -> None:
    desk.editor.show_error("name 'x' is not defined", 1)
    assert desk.page.error.replace("&#x27;", "'") == "line 1: name 'x' is not defined"
    assert (desk.editor.error_line, desk.editor.error_message) == (1, "name 'x' is not defined")
    desk.editor.clear_error()
    assert desk.page.error == ""
    desk.editor.show_error("no line known")
    assert desk.page.error == "no line known"
    desk.editor.set_text("other")
    assert desk.page.error == ""
    assert desk.editor.error_line is None


def test_a_line_after_the_last_one_is_still_an_error_that_is_shown(desk: Desk) -> None:
    desk.editor.show_error("unexpected EOF", 7)
    assert desk.page.error == "line 7: unexpected EOF"


def test_read_only_reaches_the_browser_and_outlives_set_text(desk: Desk) -> None:
    desk.editor.read_only = True
    assert desk.page.locked
    desk.editor.set_text("other")
    assert desk.page.locked
    desk.editor.read_only = False
    assert not desk.page.locked


def test_the_value_can_only_be_set_through_set_text(desk: Desk) -> None:
    with pytest.raises(Exception, match="read-only"):
        desk.editor.value = "assigned"
    assert desk.editor.value == "start"


def test_an_unknown_language_is_refused(make_desk: Callable[..., Desk]) -> None:
    with pytest.raises(ValueError, match="no language 'perl': use one of python, filter, text"):
        make_desk("", language="perl")


def test_a_closed_editor_leaves_no_widget_behind(make_desk: Callable[..., Desk]) -> None:
    desk = make_desk("x")
    own = {desk.editor.comm.comm_id, *(child.comm.comm_id for child in desk.editor.children)}
    desk.editor.set_text("y")
    own |= {child.comm.comm_id for child in desk.editor.children}
    desk.editor.close()
    assert own & set(desk.browser.comms) == set()
    left = {desk.browser.models[name]["_model_name"] for name in desk.browser.comms}
    assert left <= {"LayoutModel", "TextStyleModel", "HTMLStyleModel"}


# --- the wire to CodeMirror -------------------------------------------------------------


def test_a_key_submits_the_text_of_that_moment(mirror: Desk) -> None:
    assert isinstance(mirror.page, MirrorPage)
    mirror.page.text = "x = 1"
    mirror.page.submit("apply")
    mirror.page.text = "x = 12"
    mirror.page.submit("try")
    mirror.browser.kernel_works()
    assert mirror.submitted == [("apply", "x = 1"), ("try", "x = 12")]


def test_the_browser_is_told_that_the_kernel_has_it_before_the_callbacks_run(mirror: Desk) -> None:
    told: list[int] = []
    mirror.editor.on_submit(lambda text, action: told.append(mirror.page.state["acknowledged"]))
    mirror.page.submit("apply")
    mirror.page.submit("apply")
    mirror.browser.kernel_works()
    assert told == [1, 2]


def test_a_reloaded_page_gets_the_last_text_and_no_old_request(mirror: Desk) -> None:
    mirror.page.type("typed")
    mirror.click("apply")
    mirror.browser.kernel_works()
    reloaded = MirrorPage(mirror.browser, mirror.editor, "reloaded")
    assert reloaded.text == "typed"
    reloaded.type("typed on")
    mirror.browser.kernel_works()
    assert mirror.editor.value == "typed on"
    assert mirror.submitted == [("apply", "typed")]


def test_two_pages_follow_each_other_and_answer_a_click_once(mirror: Desk) -> None:
    other = MirrorPage(mirror.browser, mirror.editor, "other")
    mirror.page.type("from the first")
    mirror.browser.kernel_works()
    assert other.text == "from the first"
    other.type("from the other")
    mirror.click("apply")
    mirror.browser.kernel_works()
    assert mirror.page.text == "from the other"
    assert mirror.submitted == [("apply", "from the other")]


def test_a_page_does_not_take_its_own_older_text_for_news(mirror: Desk) -> None:
    mirror.page.type("a")
    mirror.page.text = "ab"  # typed while the kernel takes the "a"
    mirror.browser.kernel_works()
    assert mirror.page.text == "ab"


@pytest.mark.parametrize(
    "content",
    [
        None,
        "text",
        {},
        {"type": "submit", "text": "x"},
        {"type": "erase", "text": "x", "serial": 1, "revision": 0, "page": "p"},
        {"type": "changed", "text": 5, "serial": 1, "revision": 0, "page": "p"},
        {"type": "changed", "text": "x", "serial": "one", "revision": 0, "page": "p"},
    ],
)
def test_a_message_that_cannot_be_read_changes_nothing(
    mirror: Desk, content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.browser.send(mirror.page.id, content)
    mirror.browser.kernel_works()
    assert mirror.editor.value == "start"
    assert mirror.events == []
    assert "cannot be read" in caplog.text


def test_the_options_reach_the_browser(simulated: Browser, stub_bundle: Path) -> None:
    editor = CodeMirrorEditor("x", language="text", lines=5, label="b2t filter")
    state = simulated.models[editor.children[0].comm.comm_id]
    editor.completions = ["graft_input.target"]
    editor.dark = True
    assert (state["language"], state["lines"], state["label"]) == ("text", 5, "b2t filter")
    assert (state["completions"], state["dark"]) == (["graft_input.target"], True)
    assert state["_esm"] == stub_bundle.read_text()
    editor.close()


# --- which editor it is -----------------------------------------------------------------


def test_code_mirror_is_taken_where_it_is_there(stub_bundle: Path) -> None:
    assert isinstance(code_editor("x"), CodeMirrorEditor)
    assert isinstance(code_editor("x", plain=True), TextareaEditor)


def test_without_the_bundle_the_text_area_says_how_to_get_it(stub_bundle: Path) -> None:
    stub_bundle.unlink()
    editor = code_editor("x")
    assert isinstance(editor, TextareaEditor)
    assert "python hatch_build.py" in editor.reason
    assert editor.value == "x"


def test_without_anywidget_the_text_area_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "graftlab.widgets.code_mirror", None)
    editor = code_editor("x")
    assert isinstance(editor, TextareaEditor)
    assert "pip install anywidget" in editor.reason


@pytest.mark.ranks
def test_importing_the_editor_does_not_load_anywidget() -> None:
    code = f"import sys, {code_editor.__module__}; print('anywidget' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert said.stdout.strip() == "False"
