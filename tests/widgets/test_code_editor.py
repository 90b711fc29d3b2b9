"""The code editor without a browser: the CodeMirror editor, its messages, and the text area."""

from __future__ import annotations

import html
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.pages import Browser, EditorScreen, MirrorPage
from kit.refusals import exactly

from graftlab.widgets.code_editor import CodeMirrorEditor, TextAreaEditor, code_editor


@pytest.fixture
def screen(simulated: Browser, stub_bundle: Path) -> Iterator[EditorScreen]:
    editor = CodeMirrorEditor("start")
    yield EditorScreen(simulated, editor)
    editor.close()


@pytest.fixture
def plain(simulated: Browser) -> Iterator[EditorScreen]:
    editor = TextAreaEditor("start")
    yield EditorScreen(simulated, editor)
    editor.close()


# --- the CodeMirror editor -------------------------------------------------------------


def test_the_first_text_is_shown_and_is_the_value(screen: EditorScreen) -> None:
    assert screen.page.text == screen.editor.value == "start"
    assert screen.events == []


def test_typed_text_becomes_the_value_with_one_change_event(screen: EditorScreen) -> None:
    screen.page.type("typed")
    screen.browser.kernel_works()
    assert screen.editor.value == "typed"
    screen.page.type("typed")
    screen.browser.kernel_works()
    assert screen.events == [("changed", "typed")]


def test_a_click_while_the_kernel_is_busy_gets_the_text_on_the_screen(screen: EditorScreen) -> None:
    for text in ("a", "ab", "abc"):
        screen.page.type(text)
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.submitted == [("apply", "abc")]
    assert screen.editor.value == "abc"


def test_each_click_is_answered_once_and_in_order(screen: EditorScreen) -> None:
    screen.click("try")
    screen.click("apply")
    screen.page.type("new")
    screen.browser.kernel_works()
    assert [action for action, _ in screen.submitted] == ["try", "apply"]
    assert screen.submitted[-1] == ("apply", "new")
    screen.browser.kernel_works()
    assert len(screen.submitted) == 2


def test_fetch_delivers_the_text_on_the_screen_to_its_caller_only(screen: EditorScreen) -> None:
    told: list[str] = []
    for text in ("a", "ab", "abc"):
        screen.page.type(text)
    screen.browser.queue.append(lambda: screen.editor.fetch("apply", told.append))
    screen.browser.kernel_works()
    assert told == ["abc"]
    assert screen.submitted == []
    assert ("changed", "abc") in screen.events


def test_the_change_event_comes_before_the_submit_with_the_new_text(screen: EditorScreen) -> None:
    screen.page.type("a")
    screen.page.type("news")
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.events[-2:] == [("changed", "news"), ("apply", "news")]


def test_set_text_shows_the_text_without_a_change_event(screen: EditorScreen) -> None:
    screen.editor.set_text("restored")
    screen.browser.kernel_works()
    assert screen.page.text == screen.editor.value == "restored"
    assert screen.events == []


def test_set_text_with_the_value_replaces_what_the_kernel_has_not_seen(screen: EditorScreen) -> None:
    screen.page.type("not yet with the kernel")
    screen.editor.set_text("start")
    screen.browser.kernel_works()
    assert screen.page.text == screen.editor.value == "start"


def test_text_typed_before_set_text_does_not_return(screen: EditorScreen) -> None:
    for text in ("a", "ab", "abc"):
        screen.page.type(text)
    screen.browser.queue.appendleft(lambda: screen.editor.set_text("restored"))
    screen.browser.kernel_works()
    assert screen.page.text == screen.editor.value == "restored"
    screen.page.type("restored, and typed on")
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.submitted == [("apply", "restored, and typed on")]
    assert screen.editor.value == "restored, and typed on"


def test_a_submit_under_way_at_set_text_is_delivered_with_its_own_text(screen: EditorScreen) -> None:
    screen.page.type("mine")
    screen.browser.kernel_works()
    screen.click("apply")
    screen.browser.queue.append(lambda: screen.editor.set_text("restored"))
    screen.browser.kernel_works()
    assert screen.submitted == [("apply", "mine")]
    assert screen.page.text == screen.editor.value == "restored"


def test_an_offer_is_accepted_if_nothing_was_typed(screen: EditorScreen) -> None:
    screen.editor.offer("offered")
    assert screen.editor.value == "offered"
    screen.browser.kernel_works()
    assert screen.page.text == screen.editor.value == "offered"
    screen.page.type("offered, and typed on")
    screen.browser.kernel_works()
    assert screen.events == [("changed", "offered, and typed on")]
    assert not screen.editor.offer_declined


def test_an_offer_is_declined_if_the_browser_has_newer_text(screen: EditorScreen) -> None:
    declined: list[bool] = []
    screen.editor.on_change(lambda text: declined.append(screen.editor.offer_declined))
    for text in ("a", "ab", "abc"):
        screen.page.type(text)
    screen.editor.offer("offered")
    screen.browser.kernel_works()
    assert screen.page.text == screen.editor.value == "abc"
    assert screen.events[-1] == ("changed", "abc")
    assert declined[0]
    screen.page.type("abcd")
    screen.browser.kernel_works()
    assert declined[-1] is False
    screen.editor.set_text("set")
    screen.browser.kernel_works()
    assert screen.page.text == screen.editor.value == "set"


def test_text_that_was_typed_and_removed_does_not_decline_an_offer(screen: EditorScreen) -> None:
    screen.page.type("typed")
    screen.page.type("start")
    screen.editor.offer("offered")
    screen.browser.kernel_works()
    assert screen.editor.value == screen.page.text


def test_the_newest_of_several_offers_is_taken(screen: EditorScreen) -> None:
    screen.editor.offer("first")
    screen.editor.offer("second")
    screen.browser.kernel_works()
    assert screen.page.text == screen.editor.value == "second"
    assert screen.events == []


def test_a_submit_right_after_an_offer_delivers_the_offer(screen: EditorScreen) -> None:
    screen.editor.offer("offered")
    screen.editor.submit("at once")
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.submitted == [("at once", "offered"), ("apply", "offered")]


def test_a_submit_right_after_a_declined_offer_delivers_what_was_typed(screen: EditorScreen) -> None:
    screen.page.type("a")
    screen.page.type("typed")
    screen.editor.offer("offered")
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.submitted == [("apply", "typed")]


def test_a_callback_may_set_the_text(screen: EditorScreen) -> None:
    screen.editor.on_submit(lambda text, action: screen.editor.set_text(text.upper()))
    screen.page.type("quiet")
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.page.text == screen.editor.value == "QUIET"
    screen.page.type("on")
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.submitted == [("apply", "quiet"), ("apply", "on")]


def test_a_failing_callback_is_shown_and_the_others_run(screen: EditorScreen, caplog: pytest.LogCaptureFixture) -> None:
    def parse(text: str) -> None:
        raise RuntimeError("no <luck>")

    screen.editor.on_change(parse)
    screen.editor.on_change(lambda text: screen.events.append(("after", text)))
    screen.page.type("x")
    screen.browser.kernel_works()
    assert ("after", "x") in screen.events
    assert screen.editor.error_message == "parse failed: RuntimeError: no <luck>"
    assert "a callback of the code editor failed" in caplog.text


def test_the_error_is_shown_with_its_line_until_it_is_cleared_or_the_text_replaced(screen: EditorScreen) -> None:
    screen.editor.show_error("name 'x' is not defined", 1)
    assert screen.page.error.replace("&#x27;", "'") == "line 1: name 'x' is not defined"
    assert (screen.editor.error_line, screen.editor.error_message) == (1, "name 'x' is not defined")
    screen.editor.clear_error()
    assert screen.page.error == ""
    screen.editor.show_error("no line known")
    assert screen.page.error == "no line known"
    screen.editor.set_text("other")
    assert screen.page.error == ""
    assert screen.editor.error_line is None


def test_an_error_after_the_last_line_is_shown(screen: EditorScreen) -> None:
    screen.editor.show_error("unexpected EOF", 7)
    assert screen.page.error == "line 7: unexpected EOF"


def test_read_only_reaches_the_browser_and_outlives_set_text(screen: EditorScreen) -> None:
    screen.editor.read_only = True
    assert screen.page.locked
    screen.editor.set_text("other")
    assert screen.page.locked
    screen.editor.read_only = False
    assert not screen.page.locked


def test_the_value_can_only_be_set_through_set_text(screen: EditorScreen) -> None:
    with pytest.raises(Exception, match="read-only"):
        screen.editor.value = "assigned"
    assert screen.editor.value == "start"


def test_an_unknown_language_is_refused() -> None:
    with pytest.raises(
        ValueError, match=exactly("the code editor has no language 'perl': use one of python, filter, text")
    ):
        code_editor("", language="perl")


def test_a_closed_editor_leaves_no_widget_behind(simulated: Browser, stub_bundle: Path) -> None:
    for kind in (CodeMirrorEditor, TextAreaEditor):
        editor = kind("x")
        own = {editor.comm.comm_id, *(child.comm.comm_id for child in editor.children)}
        editor.set_text("y")
        own |= {child.comm.comm_id for child in editor.children}
        editor.close()
        assert own & set(simulated.comms) == set()
        left = {simulated.models[name]["_model_name"] for name in simulated.comms}
        assert left <= {"LayoutModel", "TextStyleModel", "HTMLStyleModel"}


# --- the wire to CodeMirror -------------------------------------------------------------


def test_a_key_submits_the_text_of_that_moment(screen: EditorScreen) -> None:
    assert isinstance(screen.page, MirrorPage)
    screen.page.text = "x = 1"
    screen.page.submit("apply")
    screen.page.text = "x = 12"
    screen.page.submit("try")
    screen.browser.kernel_works()
    assert screen.submitted == [("apply", "x = 1"), ("try", "x = 12")]


def test_a_message_is_acknowledged_before_the_callbacks_run(screen: EditorScreen) -> None:
    told: list[int] = []
    screen.editor.on_submit(lambda text, action: told.append(screen.page.state["acknowledged"]))
    screen.page.submit("apply")
    screen.page.submit("apply")
    screen.browser.kernel_works()
    assert told == [1, 2]


def test_a_reloaded_page_shows_the_last_text_and_repeats_no_request(screen: EditorScreen) -> None:
    screen.page.type("typed")
    screen.click("apply")
    screen.browser.kernel_works()
    reloaded = MirrorPage(screen.browser, screen.editor, "reloaded")
    assert reloaded.text == "typed"
    reloaded.type("typed on")
    screen.browser.kernel_works()
    assert screen.editor.value == "typed on"
    assert screen.submitted == [("apply", "typed")]


def test_two_pages_follow_each_other_and_answer_a_click_once(screen: EditorScreen) -> None:
    other = MirrorPage(screen.browser, screen.editor, "other")
    screen.page.type("from the first")
    screen.browser.kernel_works()
    assert other.text == "from the first"
    other.type("from the other")
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.page.text == "from the other"
    assert screen.submitted == [("apply", "from the other")]


def test_a_page_ignores_its_own_older_text(screen: EditorScreen) -> None:
    screen.page.type("a")
    screen.page.text = "ab"  # typed while the kernel takes the "a"
    screen.browser.kernel_works()
    assert screen.page.text == "ab"


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
def test_a_malformed_message_changes_nothing(
    screen: EditorScreen, content: Any, caplog: pytest.LogCaptureFixture
) -> None:
    screen.browser.send(screen.page.id, content)
    screen.browser.kernel_works()
    assert screen.editor.value == "start"
    assert screen.events == []
    assert "malformed message" in caplog.text


def test_the_options_reach_the_browser(simulated: Browser, stub_bundle: Path) -> None:
    editor = CodeMirrorEditor("x", language="text", lines=5, label="b2t filter")
    state = simulated.models[editor.children[0].comm.comm_id]
    editor.completions = ["graft_input.target"]
    editor.dark = True
    assert (state["language"], state["lines"], state["label"]) == ("text", 5, "b2t filter")
    assert (state["completions"], state["dark"]) == (["graft_input.target"], True)
    editor.close()


def test_editors_share_one_script_which_is_sent_anew_once_it_was_closed(simulated: Browser, stub_bundle: Path) -> None:
    def script_of(editor: CodeMirrorEditor) -> str:
        return str(simulated.models[editor.children[0].comm.comm_id]["script"]).removeprefix("IPY_MODEL_")

    # Another test may have sent the stub's text to its own browser.
    stub_bundle.write_text(f"export default {{}} // {stub_bundle}")
    first, second = CodeMirrorEditor("x"), CodeMirrorEditor("y")
    assert script_of(first) == script_of(second)
    assert simulated.models[script_of(first)]["source"] == stub_bundle.read_text()
    assert [state["source"] for state in simulated.models.values() if "source" in state] == [stub_bundle.read_text()]
    first.children[0].script.close()
    third = CodeMirrorEditor("z")
    assert script_of(third) != script_of(first)
    assert simulated.models[script_of(third)]["source"] == stub_bundle.read_text()
    third.close()


# --- the text area ----------------------------------------------------------------------


def test_without_the_bundle_a_text_area_takes_the_place_of_code_mirror(stub_bundle: Path) -> None:
    assert isinstance(code_editor("x"), CodeMirrorEditor)
    stub_bundle.unlink()
    editor = code_editor("x")
    assert isinstance(editor, TextAreaEditor)
    assert editor.value == "x"


def test_the_text_area_submits_the_whole_text_on_the_screen_while_the_kernel_is_busy(plain: EditorScreen) -> None:
    for text in ("a", "ab", "abc"):
        plain.page.type(text)
    plain.click("apply")
    plain.browser.kernel_works()
    assert plain.submitted == [("apply", "abc")]
    assert plain.editor.value == "abc"
    assert plain.events[-2:] == [("changed", "abc"), ("apply", "abc")]


def test_the_text_area_shows_a_text_that_is_set_or_offered(plain: EditorScreen) -> None:
    for show, text in ((plain.editor.set_text, "set"), (plain.editor.offer, "offered")):
        show(text)
        plain.browser.kernel_works()
        assert plain.page.text == plain.editor.value == text
    assert plain.events == []


def test_the_text_area_shows_errors_and_can_be_locked(plain: EditorScreen) -> None:
    plain.editor.show_error("'<' is not expected", 1)
    assert html.unescape(plain.page.error) == "line 1: '<' is not expected"
    plain.editor.set_text("other")
    assert (plain.page.error, plain.editor._error.value) == ("", "")
    plain.editor.read_only = True
    assert plain.page.locked
