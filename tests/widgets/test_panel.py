"""What every panel does alike: act on what is on the screen, show what fails, stay up to date, and end."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ipywidgets as widgets
import pytest
from kit.deadline import DEADLINE
from kit.pages import Browser, Screen, TextAreaPage
from kit.rows import row
from kit.support import wait_until

from graftlab.errors import SessionError
from graftlab.plan.plan import GraftPlan
from graftlab.widgets import snapshot as snapshot_module
from graftlab.widgets.code_editor import TextAreaEditor
from graftlab.widgets.inputs import Menu, NameBox
from graftlab.widgets.panel import FoldableBox, Panel
from graftlab.widgets.refresher import refresher_of
from graftlab.widgets.snapshot import Snapshot

Done = tuple[str, dict[str, Any]]


class FakeSession:
    """All that a panel by itself asks of a session."""

    def __init__(self) -> None:
        self.closed = False


class Part(Panel):
    """A panel inside another panel, with its own button."""

    def __init__(self, parent: Panel) -> None:
        super().__init__(parent.session, parent=parent)
        self.go = self.button("Go", "go", "", self.pressed)
        self._open([self.go])

    def pressed(self) -> None:
        self.say("the part was pressed", "good")

    def work(self) -> None:
        self.in_background(self.fails)

    def fails(self) -> None:
        raise SessionError("the part failed")


class Example(Panel):
    """Has a text, a menu and a box; notes what it is to do, and fails when asked to."""

    closed_message = "all over"

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.done: list[Done] = []
        self.followed = 0
        self.editor = TextAreaEditor("start", language="text")
        self.menu = Menu(options=["one", "two", "three"]).add_class("graftlab-menu")
        self.box = NameBox().add_class("graftlab-box")
        self.part = Part(self)
        inputs = {"text": self.editor, "number": self.menu, "name": self.box}
        self._open([*inputs.values(), self.part, self._message_line], inputs)

    def _follow(self) -> None:
        self.followed += 1

    def _act(self, action: str, values: dict[str, Any]) -> None:
        if action == "fail":
            raise ZeroDivisionError("in the action")
        self.done.append((action, values))


@pytest.fixture
def session() -> FakeSession:
    return FakeSession()


@pytest.fixture
def panel(session: FakeSession, simulated: Browser) -> Iterator[Example]:
    refresher_of(session).interval = 1000  # type: ignore[arg-type]
    made = Example(session)
    yield made
    made.close()
    assert not refresher_of(session).running  # type: ignore[arg-type]


@pytest.fixture
def screen(panel: Example, simulated: Browser) -> Screen:
    return Screen(simulated, panel)


@pytest.fixture
def page(panel: Example, simulated: Browser) -> TextAreaPage:
    return TextAreaPage(simulated, panel.editor)


def press(screen: Screen, action: str) -> None:
    """Click a button; the browser does not hold clicks back."""
    screen.browser.queue.append(lambda: screen.panel.submit(action))


# ---- what is on the screen is what is done --------------------------------------------------------------------------


def test_a_click_while_the_kernel_is_busy_uses_all_inputs_on_the_screen(
    panel: Example, screen: Screen, page: TextAreaPage
) -> None:
    for text, number, name in (("a", "two", "x"), ("ab", "one", "xy"), ("abc", "three", "xyz")):
        page.type(text)
        screen.choose("menu", number)
        screen.enter("box", name)
    press(screen, "go")
    screen.browser.kernel_works()
    assert panel.done == [("go", {"text": "abc", "number": "three", "name": "xyz"})]
    assert panel.acknowledged == 1


def test_values_from_a_key_press_are_used_and_the_others_fetched(
    panel: Example, screen: Screen, page: TextAreaPage
) -> None:
    page.type("typed on")
    screen.choose("menu", "two")
    screen.choose("menu", "three")
    screen.browser.queue.append(lambda: panel.submit("go", text="of the key"))
    screen.browser.kernel_works()
    assert panel.done == [("go", {"text": "of the key", "number": "three", "name": ""})]


def test_repeated_clicks_while_the_kernel_is_busy_count_once(panel: Example, screen: Screen) -> None:
    for _ in range(3):
        press(screen, "go")
    press(screen, "other")
    screen.browser.kernel_works()
    assert [action for action, _ in panel.done] == ["go", "other"]
    press(screen, "go")
    screen.browser.kernel_works()
    assert [action for action, _ in panel.done] == ["go", "other", "go"]


def test_each_key_press_uses_its_own_text_and_cancels_no_click(panel: Example, screen: Screen) -> None:
    press(screen, "go")
    for text in ("one", "two"):
        screen.browser.queue.append(lambda text=text: panel.submit("go", text=text))
    screen.browser.kernel_works()
    assert [values["text"] for _, values in panel.done] == ["start", "one", "two"]


def test_a_submit_with_all_values_known_needs_no_browser(panel: Example) -> None:
    panel.submit("go", text="a", number="b", name="c")
    assert panel.done == [("go", {"text": "a", "number": "b", "name": "c"})]


def test_without_an_answer_from_the_browser_nothing_happens(panel: Example) -> None:
    panel.submit("go")
    assert (panel.done, panel.acknowledged) == ([], 0)


# ---- messages -------------------------------------------------------------------------------------------------------


def test_an_error_in_an_action_is_shown_logged_and_acknowledged(
    panel: Example, screen: Screen, caplog: pytest.LogCaptureFixture
) -> None:
    press(screen, "fail")
    screen.browser.kernel_works()
    assert screen.message.endswith("ZeroDivisionError: in the action")
    assert (panel.status, panel.acknowledged) == ("bad", 1)
    assert "a callback of the Example failed" in caplog.text


def test_a_message_is_shown_as_text_with_its_meaning(panel: Example, screen: Screen) -> None:
    panel.say("two <b>words</b>", "good")
    [line] = [each for each in panel.children if isinstance(each, widgets.HTML) and "words" in each.value]
    assert line.value == '<div class="good" role="status">two &lt;b&gt;words&lt;/b&gt;</div>'
    assert (panel.message, panel.status) == ("two <b>words</b>", "good")
    panel.say("")
    assert (line.value, panel.message) == ("", "")


def test_a_message_gives_way_to_its_later_text_and_to_an_error_before(panel: Example, screen: Screen) -> None:
    later: list[str] = []
    for teller, fails in ((panel, False), (panel, True), (panel.part, False)):
        later.clear()
        teller.say("arrives with the next step", "good", lambda: "".join(later))
        panel.refresh()
        assert screen.message == "arrives with the next step"
        if fails:
            press(screen, "fail")
            screen.browser.kernel_works()
        later.append("has arrived")
        panel.refresh()
        shown = "ZeroDivisionError: in the action" if fails else "has arrived"
        assert screen.message.endswith(shown)
        assert panel.status == ("bad" if fails else "good")
        # Once, and not in place of what is said after it.
        later.append(" once more")
        panel.refresh()
        assert screen.message.endswith(shown)
    panel.say("arrives", "good", lambda: "has arrived")
    panel.say("is of something else")
    panel.refresh()
    assert screen.message == "is of something else"


def test_what_a_plan_keeps_is_said_with_the_step_once_its_rows_arrive(
    panel: Example, session: FakeSession, screen: Screen
) -> None:
    session.adopted = lambda version: {"baseline[0]": 4, "target[0]": 3}  # type: ignore[attr-defined]
    plan, rows = GraftPlan(version=7), [row("x", plan_version=6)]
    panel.say_kept("this tap", plan, lambda: rows)
    assert screen.message == "Plan 7 keeps this tap; tensors arrive with the next step."
    panel.refresh()
    assert screen.message.endswith("with the next step.")
    # A later plan, in which something else was edited, keeps it too.
    rows.append(row("x", plan_version=8))
    panel.refresh()
    assert screen.message == "Plan 7 keeps this tap since step 3."
    # It may have arrived before.
    panel.say("")
    panel.say_kept("this tap", plan, lambda: [row("x", plan_version=7)])
    assert screen.message == "Plan 7 keeps this tap since step 3."


def test_a_refresh_error_hides_the_message_until_the_refresh_works(panel: Example, screen: Screen) -> None:
    panel.say("all is well")
    panel.show_error("a tick failed")
    assert (screen.message, panel.status) == ("a tick failed", "bad")
    panel.say("still well")
    assert screen.message == "a tick failed"
    panel.show_error("")
    assert (screen.message, panel.status) == ("still well", "quiet")


def test_a_closed_session_hides_other_messages(panel: Example, session: FakeSession, screen: Screen) -> None:
    panel.say("all is well")
    session.closed = True
    panel.refresh()
    assert screen.message == "all over"
    # A panel that changes nothing in the session has no such message.
    panel.closed_message = ""
    panel.refresh()
    assert screen.message == "all is well"


def test_a_message_that_is_repeated_is_sent_once(panel: Example, screen: Screen) -> None:
    panel.say("all is well")
    sent: list[object] = []
    screen.browser.on_update.append(lambda comm_id, changed: sent.append(changed))
    panel.say("all is well")
    panel.refresh()
    assert sent == []


# ---- a part of another panel ----------------------------------------------------------------------------------------


def test_a_part_shows_messages_in_its_parent(panel: Example, screen: Screen) -> None:
    screen.click("go")
    screen.browser.kernel_works()
    assert (screen.message, panel.status) == ("the part was pressed", "good")
    # No thread changes the one while another shows the other.
    assert panel.part._lock is panel._lock


def test_background_errors_are_shown_and_parts_use_the_parents_thread(
    panel: Example, screen: Screen, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on = threading.Event()
    panel.in_background(goes_on.wait, 60)
    panel.part.work()
    assert panel.busy
    goes_on.set()
    screen.settle()
    assert not panel.busy
    assert screen.message == "the part failed"
    # A message of graftlab's own says all that there is to say.
    assert caplog.text == ""


def test_closing_a_panel_closes_its_parts_and_drops_waiting_work(
    panel: Example, screen: Screen, session: FakeSession
) -> None:
    begun, goes_on, ran, workers = threading.Event(), threading.Event(), [], []
    panel.in_background(lambda: (workers.append(threading.current_thread()), begun.set(), goes_on.wait(60)))
    panel.in_background(lambda: ran.append("after the end"))
    assert begun.wait(60)
    panel.close()
    panel.close()
    left = {screen.browser.models[comm_id]["_model_name"] for comm_id in screen.browser.comms}
    assert {name for name in left if not name.endswith(("LayoutModel", "StyleModel"))} == set()
    goes_on.set()
    [worker] = workers
    worker.join(60)
    assert not worker.is_alive()
    assert ran == []
    followed = panel.followed
    panel.refresh()
    panel.part.refresh()
    panel.say("too late")
    panel.in_background(ran.append, "too late")
    assert (panel.followed, panel.message, ran) == (followed, "", [])


# ---- what is folded -------------------------------------------------------------------------------------------------


def test_a_foldable_box_shows_and_hides_its_content_by_a_button(simulated: Browser) -> None:
    content = widgets.HTML("inside")
    fold = FoldableBox(content)
    fold.title = "Earlier plans (3)"
    button = fold.children[0]
    for display, tooltip in (("none", "Show"), (None, "Hide"), ("none", "Show")):
        assert (content.layout.display, button.tooltip, button.description) == (display, tooltip, "Earlier plans (3)")
        simulated.send(button.comm.comm_id, {"event": "click"})
        simulated.kernel_works()
    fold.close()


# ---- staying up to date ---------------------------------------------------------------------------------------------


def test_it_is_refreshed_until_it_is_closed(simulated: Browser) -> None:
    session = FakeSession()
    refresher_of(session).interval = 0.001  # type: ignore[arg-type]
    panel = Example(session)
    wait_until(lambda: panel.followed > 3, "some ticks")
    assert panel in refresher_of(session)  # type: ignore[arg-type]
    assert panel.part not in refresher_of(session)  # type: ignore[arg-type]
    panel.close()
    assert not refresher_of(session).running  # type: ignore[arg-type]


def test_what_a_notebook_saves_first_is_of_the_moment_of_its_display(
    panel: Example, session: FakeSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    refresher_of(session).remove(panel)  # type: ignore[arg-type]
    saved: list[str] = []
    monkeypatch.setattr(panel._snapshot, "display", lambda bundle, markup, instead: saved.append(markup))
    monkeypatch.setattr(panel, "static_html", lambda with_figures=False: f"after {panel.followed}")
    followed, panel._snapshot_state = panel.followed, "as it was displayed before"
    panel._ipython_display_()
    assert saved == [f"after {followed + 1}"]
    # The next tick renews it, with its figures.
    assert panel._snapshot_state is None
    panel.close()
    followed = panel.followed
    panel._ipython_display_()
    assert saved[1:] == [f"after {followed}"]


def test_it_is_not_refreshed_while_no_page_shows_it(panel: Example, session: FakeSession, screen: Screen) -> None:
    refresher = refresher_of(session)  # type: ignore[arg-type]

    def views(count: int) -> None:
        screen.browser.save(panel.comm.comm_id, _view_count=count)
        screen.browser.kernel_works()

    assert panel in refresher, "a front end may not count views"
    views(1)
    views(0)
    assert panel not in refresher
    followed = panel.followed
    views(1)
    assert panel in refresher
    assert panel.followed == followed + 1
    # A second page shows what the first one does.
    views(2)
    assert panel.followed == followed + 1
    # Of one that is closed, a page may still report.
    views(0)
    panel.close()
    panel._on_view_count({"new": 1, "old": 0})
    assert panel not in refresher


def test_a_snapshot_has_other_forms_for_viewers_without_html(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[tuple[dict[str, Any], bool | None]] = []
    monkeypatch.setattr(
        snapshot_module, "publish_display_data", lambda data, **more: published.append((data, more.get("update")))
    )
    snapshot = Snapshot()
    snapshot.display(None, "<b>nothing</b>")
    assert published == []
    snapshot.display({"a view": 1}, "<b>one</b>", {"image/png": b"picture", "text/plain": "a figure"})
    (view, _), (below, updates) = published
    assert view == {"a view": 1, "text/plain": ""}
    assert (below["image/png"], below["text/plain"], updates) == (b"picture", "a figure", False)
    assert "<b>one</b>" in below["text/html"]
    snapshot.update("<b>one</b>")
    assert len(published) == 2
    snapshot.update("<b>two</b>")
    later, updates = published[2]
    assert (sorted(later), updates) == (["text/html", "text/plain"], True)


def test_a_snapshot_is_renewed_for_each_new_state_and_at_the_end() -> None:
    panel: Any = Panel.__new__(Panel)
    taken: list[str] = []
    panel.__dict__.update(
        _snapshot=SimpleNamespace(update=taken.append),
        static_html=lambda with_figures: "all" if with_figures else "part",
        in_background=lambda work: taken.append("in background"),
        close=lambda: None,
        _snapshot_state=(False, 1, True, 3),
        _next_snapshot=0.0,
    )
    panel._renew_snapshot((False, 1, True, 3), False)
    assert taken == []
    panel._renew_snapshot((False, 2, False, 3), False)
    # That one is not finished.
    panel._renew_snapshot((False, 2, True, 3), False)
    assert taken == ["in background"]
    panel._take_snapshot()
    assert panel._next_snapshot < math.inf
    panel._renew_snapshot((True, 2, True, 3), True)
    assert taken == ["in background", "all", "all"]
    # After one that failed, others still follow.
    panel.static_html, panel._next_snapshot = Mock(side_effect=ValueError("no figure")), math.inf
    with pytest.raises(ValueError, match="no figure"):
        panel._take_snapshot()
    assert panel._next_snapshot < math.inf


def test_a_snapshot_is_of_the_newest_run_and_of_no_panel_inside_another() -> None:
    panel: Any = Panel.__new__(Panel)
    runs = [SimpleNamespace(done=True), SimpleNamespace(done=False)]
    panel.session = SimpleNamespace(closed=False, runs=runs, plan=SimpleNamespace(version=3))
    panel.__dict__.update(_parent=None, _snapshot=SimpleNamespace(is_shown=True), close=lambda: None)
    assert panel._session_state() == (False, 2, False, 3)
    panel.session.runs = []
    assert panel._session_state() == (False, 0, False, 3)
    panel._parent = panel
    assert panel._session_state() is None


@pytest.mark.parametrize(("takes", "again_after"), [(0.125, 2.0), (4.0, 40.0)])
def test_snapshots_take_a_tenth_of_the_time_at_most(
    takes: float, again_after: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [100.0]
    monkeypatch.setattr("graftlab.widgets.panel.time", SimpleNamespace(monotonic=lambda: clock[0]))
    panel: Any = Panel.__new__(Panel)

    def drawn(with_figures: bool) -> str:
        clock[0] += takes
        return ""

    panel.__dict__.update(_snapshot=SimpleNamespace(update=lambda text: None), static_html=drawn, close=lambda: None)
    panel._take_snapshot()
    assert panel._next_snapshot == 100.0 + again_after


def test_a_panel_is_busy_until_its_last_task_has_ended(panel: Example) -> None:
    goes, seen = threading.Event(), list[bool]()
    panel.in_background(goes.wait, DEADLINE)
    panel.in_background(lambda: seen.append(panel.busy))
    assert panel.busy
    goes.set()
    wait_until(lambda: not panel.busy, "the end of the tasks")
    assert seen == [True]


def test_a_menu_keeps_its_choice_or_takes_the_first_and_none_of_no_options() -> None:
    menu = Menu()
    chosen: list[tuple[Any, bool]] = []
    menu.observe(lambda change: chosen.append((change["new"], menu.filling)), "value")
    menu.fill([("one", 1), ("two", 2)], 2)
    assert menu.value == 2
    menu.fill([("two", 2), ("three", 3)], 2)
    assert menu.value == 2
    menu.fill([("three", 3), ("four", 4)], 2)
    assert menu.value == 3
    menu.fill([], 3)
    assert menu.value is None
    assert all(is_filling for _, is_filling in chosen)
    assert not menu.filling


def test_a_panel_brings_its_style_sheet_once_for_all_its_parts(simulated: Browser) -> None:
    class Styled(Example):
        style_sheet = ".example { color: red }"

    panel = Styled(FakeSession())
    sheets = [each.value for each in panel.children if isinstance(each, widgets.HTML) and "<style>" in each.value]
    assert [".example { color: red }" in sheet and ".graftlab-panel" in sheet for sheet in sheets] == [True]
    assert not any(isinstance(each, widgets.HTML) for each in panel.part.children)
    panel.close()
