"""The filter editor without a browser: what it shows of a text, what it applies, and how it follows the plan.

Typing and clicking arrive as messages, as from a browser, on the main thread or on another.
"""

from __future__ import annotations

import html
import itertools
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.pages import Browser, MirrorPage, Screen, descendants, page_of, words
from kit.support import own_value, reset, wait_for_file, wait_until

import graftlab as gl
from graftlab.control.plans import Plans
from graftlab.filters.check import TAP_LIMIT
from graftlab.filters.expressions import MAX_LENGTH, Filter
from graftlab.plan.changes import PlanChange, parts_of
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.widgets import filter_view
from graftlab.widgets.code_editor import CodeEditor
from graftlab.widgets.filter_editor import FilterEditor
from graftlab.widgets.filter_view import NAMES_LISTED, NAMES_SHOWN
from graftlab.widgets.refresher import refresher_of


def tap(name: str, **tags: object) -> dict[str, Any]:
    """A tap as a session lists it."""
    return {"name": name, "step": 0, "side": "baseline", "rank": 0, "recompute_status": "original", **tags}


class FakeSession:
    """A session without ranks: the plan, its versions, and the taps that it has been given."""

    def __init__(self, *taps: dict[str, Any]) -> None:
        self.published = Plans([])
        self.published.publish(GraftPlan())
        self._internals = SimpleNamespace(plans=self.published)
        self.seen = list(taps)
        self.ranks = [SimpleNamespace(label=label, alive=True) for label in ("baseline[0]", "target[0]")]
        self.adoptions: dict[int, dict[str, int]] = {}
        self.runs: list[Any] = []
        self.closed = False

    @property
    def plan(self) -> GraftPlan:
        return self.published.newest

    @property
    def plans(self) -> list[GraftPlan]:
        return self.published.all()

    @property
    def taps(self) -> list[dict[str, Any]]:
        return list(self.seen)

    def edit(self, **changes: Any) -> GraftPlan:
        if self.closed:
            raise gl.SessionClosedError("this session is closed")
        self.published.publish_edit(self.plan.edit(**changes))
        return self.plan

    def undo(self) -> PlanChange:
        return self.published.revert("undo", self.plan.edit(**parts_of(self.published.wanted("undo"))))

    def redo(self) -> PlanChange:
        return self.published.revert("redo", self.plan.edit(**parts_of(self.published.wanted("redo"))))

    def adopted(self, version: int) -> dict[str, int]:
        return dict(self.adoptions.get(version, {}))


class FilterScreen(Screen):
    """A filter editor as a person sees it, in one page of a simulated browser."""

    def __init__(self, browser: Browser, editor: FilterEditor) -> None:
        super().__init__(browser, editor)
        self.editor = editor
        self.pages = {name: page_of(browser, self.line(name)) for name in FILTERS}

    def line(self, name: str) -> CodeEditor:
        [line] = lines_of(self.find(f"filter-{name}"))
        return line

    def type(self, **texts: str) -> None:
        for name, text in texts.items():
            self.pages[name].type(text)
        self.browser.kernel_works()

    def apply(self) -> None:
        self.click("apply")
        self.browser.kernel_works()

    def html_below(self, name: str) -> str:
        return self.markup("below", within=f"filter-{name}")

    def below(self, name: str) -> str:
        """What is said below a line."""
        return self.shown("below", within=f"filter-{name}")

    def text(self, name: str) -> str:
        """What is on the screen in a line."""
        return self.pages[name].text

    @property
    def earlier(self) -> list[str]:
        """The plans that are listed."""
        return [words(self.state(row.children[1])["value"]) for row in self.find("plans").children]

    @property
    def adopted(self) -> str:
        return self.shown("adopted")

    @property
    def can_apply(self) -> bool:
        return not self.find("apply").disabled


def lines_of(widget: Any) -> list[CodeEditor]:
    return [each for each in descendants(widget) if isinstance(each, CodeEditor)]


@pytest.fixture
def show(stub_bundle: Path, simulated: Browser) -> Iterator[Callable[[Any], FilterScreen]]:
    """Shows a session's filter editor, which is only refreshed when the test does it."""
    made: list[FilterEditor] = []

    def make(session: Any) -> FilterScreen:
        refresher_of(session).interval = 1000
        made.append(FilterEditor(session))
        return FilterScreen(simulated, made[-1])

    yield make
    for editor in made:
        editor.close()
    assert not any(refresher_of(editor.session).running for editor in made)


LAYERS = [tap("attn_out", layer=0), tap("attn_out", layer=1), tap("mlp_out", layer=0), tap("logits")]


@pytest.fixture
def session() -> FakeSession:
    return FakeSession(*LAYERS)


@pytest.fixture
def screen(show: Callable[[Any], FilterScreen], session: FakeSession) -> FilterScreen:
    return show(session)


# ---- while typing ---------------------------------------------------------------------------------------------------


def test_each_line_begins_with_the_filter_in_force(show: Callable[[Any], FilterScreen], session: FakeSession) -> None:
    session.edit(b2t="layer < 4", keep="name == 'logits'")
    screen = show(session)
    assert {name: screen.text(name) for name in FILTERS} == {
        "b2t": "layer < 4",
        "t2b": "",
        "compare": "True",
        "keep": "name == 'logits'",
    }
    assert screen.message == ""


def test_a_text_shows_how_many_taps_it_matches_and_which(screen: FilterScreen) -> None:
    screen.type(b2t="layer == 0", keep="search('logits', name)")
    assert screen.below("b2t").startswith("2 of 4 seen attn_out layer=0 mlp_out layer=0")
    assert screen.below("keep").startswith("1 of 4 seen logits")
    assert screen.below("compare") == "4 of 4 seen attn_out layer=0 attn_out layer=1 mlp_out layer=0 logits"
    assert screen.below("t2b") == "matches nothing"
    assert screen.can_apply


def test_a_syntax_error_is_shown_at_its_position_and_blocks_apply(screen: FilterScreen) -> None:
    screen.type(compare="layer <")
    assert "the expression ends too early; finish it (at position 7)" in screen.below("compare")
    assert not screen.can_apply
    screen.type(compare="layer < 1")
    assert "position" not in screen.below("compare")
    assert screen.can_apply


@pytest.mark.parametrize(
    ("text", "before", "after"),
    [
        ("a and & b", "a and ", "& b"),
        ("名前 == 'ü' and && x", "名前 == 'ü' and ", "&& x"),
        ("a and\n\tb.c", "a and⏎ ", "b.c"),
        ("x" * 200 + " = 1 or " + "y" * 200, "…" + "x" * 39 + " ", "= 1 or " + "y" * 33 + "…"),
        ("'<b>' + <i>", "'<b>' + ", "<i>"),
    ],
)
def test_a_caret_marks_the_error(screen: FilterScreen, text: str, before: str, after: str) -> None:
    screen.type(t2b=text)
    found = re.search(
        '<pre>(.*)\n<span class="unseen" aria-hidden="true">(.*)</span><b>\\^</b></pre>', screen.html_below("t2b")
    )
    assert found is not None
    line, unseen = html.unescape(found[1]), html.unescape(found[2])
    # The blank below is as wide as what is left of the fault, whatever characters that has.
    assert unseen == before
    assert line == before + after


def test_a_tap_matched_in_both_directions_is_marked_and_blocks_apply(screen: FilterScreen) -> None:
    screen.type(b2t="name == 'attn_out'", t2b="layer == 1 or name == 'logits'")
    for name in ("b2t", "t2b"):
        assert "both b2t and t2b match 1 tap" in screen.below(name)
        assert '<span class="tap both">attn_out layer=1 <b>both</b></span>' in screen.html_below(name)
        assert screen.html_below(name).count("tap both") == 1
    assert not screen.can_apply
    screen.type(t2b="name == 'logits'")
    assert "both" not in screen.html_below("b2t") + screen.html_below("t2b")
    assert screen.can_apply


def test_an_overlap_that_appears_with_a_new_tap_stops_apply(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(b2t="name == 'embedding'", t2b="phase == 'decode'")
    assert screen.can_apply
    session.seen.append(tap("embedding", phase="decode"))
    screen.editor.refresh()
    assert not screen.can_apply
    assert "embedding phase='decode' both" in screen.below("b2t")


def test_many_names_are_folded_and_those_that_block_apply_come_first(show: Callable[[Any], FilterScreen]) -> None:
    count = NAMES_LISTED + 20
    screen = show(FakeSession(*(tap(f"tap{number}") for number in range(count))))
    screen.type(b2t="True", t2b=f"name == 'tap{count - 1}'")
    shown, folded = screen.html_below("b2t").split("<details>")
    assert shown.count('class="tap') == NAMES_SHOWN
    assert f'<span class="tap both">tap{count - 1} <b>both</b></span>' in shown
    assert folded.count('class="tap') == NAMES_LISTED - NAMES_SHOWN
    assert f"<summary>{count - NAMES_SHOWN} more</summary>" in folded
    assert "and 20 others" in folded


def test_new_taps_are_counted_as_they_are_seen(screen: FilterScreen, session: FakeSession) -> None:
    session.seen += [tap("late"), tap("late", layer=3)]
    screen.editor.refresh()
    assert screen.below("compare").startswith("6 of 6 seen")


def test_taps_are_matched_again_after_the_plan_renames_them(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(keep="name == 'logits'")
    assert screen.below("keep").startswith("1 of 4 seen")
    session.edit(pairs=[("logits", "lm_head")])
    session.seen = [tap("attn"), tap("mlp"), tap("norm"), tap("head")]
    screen.editor.refresh()
    assert screen.below("keep").startswith("0 of 4 seen")


def test_without_taps_a_text_is_still_checked(show: Callable[[Any], FilterScreen]) -> None:
    screen = show(FakeSession())
    assert screen.below("compare") == "no taps seen yet"
    screen.type(b2t="lay er")
    assert "two values side by side" in screen.below("b2t")


def test_an_unknown_tag_is_reported_with_a_suggestion(screen: FilterScreen) -> None:
    screen.type(b2t="layr == 0", compare="phase == 'decode'")
    assert "no tap seen so far has the tag layr ; did you mean layer ?" in screen.below("b2t")
    assert "no tap seen so far has the tag phase" in screen.below("compare")
    assert "mean" not in screen.below("compare")


def test_an_unknown_name_is_reported_with_a_suggestion(screen: FilterScreen) -> None:
    screen.type(
        b2t="name == 'attn_ot' and layer == 0", keep="search('logtis|x', name)", compare="search('^at+n', name)"
    )
    assert screen.below("b2t").startswith("0 of 4 seen no tap has 'attn_ot' ; did you mean 'attn_out' ?")
    assert "did you mean 'logits' ?" in screen.below("keep")
    assert "mean" not in screen.below("compare")
    # What matches something needs no hint, whatever else it looks for.
    screen.type(b2t="name == 'attn_ot' or layer == 0")
    assert "mean" not in screen.below("b2t")


def test_a_filter_that_matched_no_tap_of_a_run_is_reported_until_changed(
    screen: FilterScreen, session: FakeSession
) -> None:
    session.edit(b2t="layer == 7")
    run = SimpleNamespace(number=3, done=False, unmatched={})
    session.runs.append(run)
    screen.settle()
    assert "matched no tap" not in screen.below("b2t")
    run.done, run.unmatched = True, {"b2t": "layer == 7"}
    screen.settle()
    assert "matched no tap in run 3" in screen.below("b2t")
    assert "matched no tap" not in screen.below("compare")
    screen.type(b2t="layer == 1")
    assert "matched no tap" not in screen.below("b2t")
    session.runs.append(SimpleNamespace(number=4, done=True, unmatched={}))
    screen.settle()
    screen.type(b2t="layer == 7")
    assert "matched no tap" not in screen.below("b2t")


def test_a_filter_on_step_or_rank_names_the_values_it_is_matched_by(screen: FilterScreen) -> None:
    screen.type(b2t="step == 7 and side == 'target'")
    assert "matched by the side and step at which each tap was first seen" in screen.below("b2t")
    assert "judged" not in screen.below("compare")


def test_unicode_names_and_markup_are_shown_unchanged(show: Callable[[Any], FilterScreen]) -> None:
    screen = show(FakeSession(tap("注意力<b>&amp;", 层=1), tap("x" * 500)))
    screen.type(b2t="层 == 1")
    assert screen.below("b2t").startswith("1 of 2 seen 注意力<b>&amp; 层=1")
    assert "<b>&amp;amp;" not in screen.html_below("b2t")
    assert len(screen.html_below("compare")) < 1000


def test_a_paste_of_100_kilobytes_is_refused_and_not_sent_back(screen: FilterScreen) -> None:
    sent: list[dict[str, Any]] = []
    screen.browser.on_update.append(lambda comm_id, changed: sent.append(changed))
    paste = "layer < 4 and " * 7500
    screen.type(b2t=paste)
    assert f"the expression has {len(paste)} characters, and a filter at most {MAX_LENGTH}" in screen.below("b2t")
    assert not screen.can_apply
    # The document is the text that a page which is opened later begins with.
    assert sum(len(str(changed)) for changed in sent if "document" not in changed) < 5000
    screen.browser.queue.append(lambda: screen.line("b2t").submit("apply"))
    screen.browser.kernel_works()
    assert "Not applied. b2t: the expression has" in screen.message
    assert len(screen.message) < 1000


def test_each_tap_is_matched_once_per_text_up_to_a_limit(
    show: Callable[[Any], FilterScreen], monkeypatch: pytest.MonkeyPatch
) -> None:
    judged: list[str] = []
    matches = Filter.matches
    monkeypatch.setattr(Filter, "matches", lambda self, tags: judged.append(self.text) or matches(self, tags))
    session = FakeSession(*(tap("x", layer=number) for number in range(TAP_LIMIT - 1)))
    screen = show(session)
    screen.type(b2t="layer < 7")
    assert judged.count("layer < 7") == judged.count("True") == TAP_LIMIT - 1
    session.seen += [tap("y"), tap("z")]
    screen.editor.refresh()
    screen.editor.refresh()
    assert judged.count("layer < 7") == judged.count("True") == TAP_LIMIT
    assert "7 of the first 10,000 of 10,001 seen" in screen.below("b2t")


def test_tag_names_and_helpers_are_completed(screen: FilterScreen, session: FakeSession) -> None:
    session.seen.append(tap("late", phase="decode"))
    screen.editor.refresh()
    for name in FILTERS:
        assert {"layer", "phase", "name", "step", "search", "fullmatch"} <= set(screen.line(name).completions)


def test_a_refresh_without_changes_does_nothing(screen: FilterScreen, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []
    screen.browser.on_update.append(lambda comm_id, changed: done.append(changed))
    monkeypatch.setattr(filter_view, "matches_html", lambda *arguments: done.append(arguments) or "")
    screen.editor.refresh()
    assert done == []


# ---- apply, revert, restore -----------------------------------------------------------------------------------------


def test_apply_publishes_the_typed_text_and_reports_it(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(b2t="layer == 0", keep="  name == 'logits' ")
    screen.apply()
    assert session.plan == GraftPlan(b2t="layer == 0", keep="  name == 'logits' ", version=1)
    assert screen.message == "Published version 1, which changes b2t and keep."
    assert "in force" not in screen.below("b2t") + screen.below("keep")
    session.edit(compare="False")
    screen.editor.refresh()
    assert screen.message == ""  # it is not about the plan in force any more


def test_apply_stands_out_while_a_line_differs_from_the_filter_in_force(screen: FilterScreen) -> None:
    seen = [screen.find("apply").button_style]
    for text in ("layer == 4", "layer =="):
        screen.type(keep=text)
        seen.append(screen.find("apply").button_style)
    screen.type(keep="layer == 4")
    screen.apply()
    assert [*seen, screen.find("apply").button_style] == ["", "primary", "", ""]


def test_apply_uses_the_text_on_the_screen_even_if_the_kernel_has_an_older_one(
    screen: FilterScreen, session: FakeSession
) -> None:
    for name in ("b2t", "compare"):
        for text in ("lay", "layer", "layer == 1"):
            screen.pages[name].type(text)
    screen.click("apply")
    screen.browser.kernel_works()
    assert (session.plan.b2t, session.plan.compare, session.plan.version) == ("layer == 1", "layer == 1", 1)


def test_apply_refuses_invalid_text_that_reaches_the_kernel_after_the_click(
    screen: FilterScreen, session: FakeSession
) -> None:
    screen.pages["b2t"].type("layer")
    screen.pages["b2t"].type("layer ==")
    assert screen.can_apply
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.message == "Not applied. b2t: the expression ends too early; finish it"
    assert not screen.can_apply
    screen.type(b2t="layer")
    screen.pages["b2t"].type("layer == 1")
    screen.pages["t2b"].type("layer")
    screen.pages["t2b"].type("layer == 1")
    screen.click("apply")
    screen.browser.kernel_works()
    assert screen.message.startswith("Not applied. both b2t and t2b match 1 tap")
    assert len(session.plans) == 1


def test_ctrl_enter_applies_the_texts_of_all_lines(screen: FilterScreen, session: FakeSession) -> None:
    page = screen.pages["b2t"]
    if not isinstance(page, MirrorPage):
        pytest.skip("a text area has no keys")
    screen.pages["keep"].text = "layer == 1"  # nothing told the kernel of it
    page.text = "layer == 0"
    page.submit("apply")
    page.text = "typed after that"
    screen.browser.kernel_works()
    assert session.plan == GraftPlan(b2t="layer == 0", keep="layer == 1", version=1)


def test_the_key_for_trying_applies_nothing(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(b2t="layer == 0")
    screen.line("b2t").submit("try")
    screen.browser.kernel_works()
    assert len(session.plans) == 1


@pytest.mark.filterwarnings("ignore:this plan does nothing")
def test_a_blank_line_removes_the_filter(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(compare="  ")
    screen.apply()
    assert session.plan.compare is None


def test_apply_without_a_change_publishes_nothing(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(compare=" True  ")
    screen.apply()
    assert len(session.plans) == 1
    assert screen.message == "Nothing to apply: version 0 already has these filters."


def test_an_edit_elsewhere_between_click_and_answer_is_not_reverted(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(b2t="layer == 0")
    screen.click("apply")
    screen.browser.queue.append(lambda: session.edit(keep="layer == 1"))
    screen.browser.kernel_works()
    assert (session.plan.b2t, session.plan.keep) == ("layer == 0", "layer == 1")


def test_what_was_set_elsewhere_meanwhile_is_not_published_again(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(b2t="layer == 0")
    session.edit(b2t="layer == 0")
    screen.apply()
    assert len(session.plans) == 2
    assert screen.message == "Nothing to apply: version 1 already has these filters."


def test_an_edit_elsewhere_that_is_not_on_screen_yet_is_not_reverted(
    screen: FilterScreen, session: FakeSession
) -> None:
    session.edit(keep="layer == 1")
    screen.editor.refresh()
    screen.click("apply")
    screen.browser.kernel_works()
    assert (session.plan.keep, session.plan.version) == ("layer == 1", 1)


def test_a_click_is_applied_once(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(b2t="layer == 0")
    screen.click("apply")
    screen.click("apply")
    screen.browser.kernel_works()
    assert len(session.plans) == 2


def test_revert_restores_the_filters_in_force_over_any_typed_text(screen: FilterScreen, session: FakeSession) -> None:
    session.edit(t2b="layer == 1")
    screen.editor.refresh()
    screen.type(b2t="layer ==")
    screen.pages["t2b"].type("x")
    screen.pages["t2b"].type("x y")
    screen.click("revert")
    screen.browser.kernel_works()
    assert {name: screen.text(name) for name in FILTERS} == {
        "b2t": "",
        "t2b": "layer == 1",
        "compare": "True",
        "keep": "",
    }
    assert screen.can_apply
    assert len(session.plans) == 2


def test_an_earlier_plan_is_listed_and_restored_whole_as_a_new_version(
    screen: FilterScreen, session: FakeSession
) -> None:
    session.edit(b2t="layer == 0", transform="operator.neg", rename={"target": {"^model.": ""}})
    session.edit(b2t="layer == 1", compare=None, transform=None, rename=None)
    screen.editor.refresh()
    assert screen.earlier[0] == "1 b2t layer == 0 · compare True · transform operator.neg · 1 rename"
    screen.type(keep="typed, and given up")
    screen.click("restore", within="plan-1")
    screen.browser.kernel_works()
    old, new = session.plans[1], session.plans[3]
    assert new == GraftPlan(old.b2t, old.t2b, old.compare, old.keep, old.transform, old.rename, version=3)
    assert screen.text("b2t") == "layer == 0"
    assert screen.text("keep") == ""
    assert screen.message == "Restored version 1 as version 3."
    assert screen.find("plan-2") is not None


def test_earlier_plans_are_listed_newest_first_up_to_a_limit(screen: FilterScreen, session: FakeSession) -> None:
    assert screen.find("earlier").layout.display == "none"
    session.edit(b2t="layer == -1")
    session.edit(b2t="True")
    screen.editor.refresh()
    gone = screen.find("plan-1")
    for number in range(38):
        session.edit(b2t=f"layer == {number}")
    screen.editor.refresh()
    # The browser keeps nothing of those that are no longer listed.
    assert [each.comm for each in (gone, *gone.children)] == [None] * 3
    assert [plan.split()[0] for plan in screen.earlier] == [str(version) for version in range(39, 9, -1)]
    session.edit(b2t=None)
    screen.editor.refresh()
    assert screen.earlier[0].startswith("40 ")
    assert screen.find("earlier").title == "Earlier plans (41)"


def test_a_refused_edit_is_shown(screen: FilterScreen, session: FakeSession, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**_: Any) -> GraftPlan:
        raise gl.PlanError("the plan does not want to be edited")

    monkeypatch.setattr(session, "edit", refuse)
    screen.type(b2t="layer == 0")
    screen.apply()
    assert screen.message == "the plan does not want to be edited"


def test_an_internal_error_of_the_editor_is_shown_and_logged(
    screen: FilterScreen,
    session: FakeSession,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    screen.type(b2t="layer == 0")
    monkeypatch.setattr(session, "edit", lambda **changes: 1 / 0)
    screen.apply()
    assert screen.message.endswith("ZeroDivisionError: division by zero")
    assert screen.editor.status == "bad"
    assert "a callback of the FilterEditor failed" in caplog.text


# ---- the plan is edited elsewhere -----------------------------------------------------------------------------------


def test_an_unedited_line_follows_the_plan(screen: FilterScreen, session: FakeSession) -> None:
    session.edit(b2t="layer == 1", keep="True")
    screen.editor.refresh()
    screen.browser.kernel_works()
    assert (screen.text("b2t"), screen.text("keep")) == ("layer == 1", "True")
    assert screen.below("b2t") == "1 of 4 seen attn_out layer=1"
    screen.type(b2t="layer == 0")
    screen.apply()
    assert (session.plan.b2t, session.plan.keep) == ("layer == 0", "True")


def test_typed_text_is_kept_and_the_change_reported_when_the_plan_changes_elsewhere(
    screen: FilterScreen, session: FakeSession
) -> None:
    screen.type(b2t="layer == 0", keep="layer == 0")
    session.edit(b2t="layer == 1", compare=None)
    screen.editor.refresh()
    screen.browser.kernel_works()
    assert screen.text("b2t") == screen.text("keep") == "layer == 0"
    assert screen.text("compare") == ""
    assert "changed elsewhere, and your text is kept; in force: layer == 1" in screen.below("b2t")
    assert "in force: nothing" in screen.below("keep")
    assert "elsewhere" not in screen.below("keep")
    screen.type(b2t="layer == 0 or layer == 2")
    assert "changed elsewhere" in screen.below("b2t")
    screen.apply()
    assert session.plan == GraftPlan(b2t="layer == 0 or layer == 2", compare=None, keep="layer == 0", version=2)
    assert "elsewhere" not in screen.below("b2t")


def test_typed_text_that_has_not_reached_the_kernel_survives_a_plan_change(
    screen: FilterScreen, session: FakeSession
) -> None:
    for text in ("lay", "layer", "layer == 0"):
        screen.pages["b2t"].type(text)
    session.edit(b2t="layer == 1", t2b="name == 'logits'")
    screen.editor.refresh()
    screen.browser.kernel_works()
    assert screen.text("b2t") == screen.line("b2t").value == "layer == 0"
    assert "changed elsewhere, and your text is kept; in force: layer == 1" in screen.below("b2t")
    assert screen.text("t2b") == screen.line("t2b").value == "name == 'logits'"
    screen.apply()
    assert (session.plan.b2t, session.plan.t2b) == ("layer == 0", "name == 'logits'")
    screen.type(b2t="layer == 5")
    assert "elsewhere" not in screen.below("b2t")


def test_a_text_typed_after_a_revert_is_newer_than_the_change_elsewhere(
    screen: FilterScreen, session: FakeSession
) -> None:
    screen.type(b2t="layer == 0")
    session.edit(b2t="layer == 1")
    screen.editor.refresh()
    screen.browser.kernel_works()
    assert "changed elsewhere" in screen.below("b2t")
    screen.editor.revert()
    screen.browser.kernel_works()
    assert screen.text("b2t") == "layer == 1"
    screen.type(b2t="layer == 2")
    assert "in force: layer == 1" in screen.below("b2t")
    assert "elsewhere" not in screen.below("b2t")


def test_typing_what_the_plan_has_now_ends_the_difference(screen: FilterScreen, session: FakeSession) -> None:
    screen.type(b2t="layer == 0")
    session.edit(b2t="layer == 1")
    screen.editor.refresh()
    screen.type(b2t="layer == 1")
    assert screen.below("b2t") == "1 of 4 seen attn_out layer=1"
    session.edit(b2t="layer == 0")
    screen.editor.refresh()
    screen.browser.kernel_works()
    assert screen.text("b2t") == "layer == 0"


def test_two_editors_of_a_session_show_each_others_changes(
    show: Callable[[Any], FilterScreen], session: FakeSession
) -> None:
    one, other = show(session), show(session)
    one.type(b2t="layer == 0")
    one.apply()
    other.editor.refresh()
    other.browser.kernel_works()
    assert other.text("b2t") == "layer == 0"
    assert "Plan 1" in other.adopted


# ---- which ranks use the plan ---------------------------------------------------------------------------------------


def test_it_shows_from_which_step_on_each_rank_uses_the_plan(screen: FilterScreen, session: FakeSession) -> None:
    session.adoptions[0] = {"baseline[0]": 0, "target[0]": 0}
    screen.editor.refresh()
    assert screen.adopted == "Plan 0 : used from step 0 on by all 2 ranks."
    screen.type(b2t="layer == 0")
    screen.apply()
    assert screen.adopted == "Plan 1 : not yet used by baseline[0], target[0]."
    session.adoptions[1] = {"target[0]": 6}
    screen.editor.refresh()
    assert screen.adopted == "Plan 1 : used from step 6 on by target[0]; not yet used by baseline[0]."
    session.adoptions[1]["baseline[0]"] = 7
    screen.editor.refresh()
    assert screen.adopted == "Plan 1 : used from step 6 on by target[0]; used from step 7 on by baseline[0]."


def test_a_dead_rank_is_not_waited_for(screen: FilterScreen, session: FakeSession) -> None:
    session.adoptions[0] = {"baseline[0]": 3}
    session.ranks[1].alive = False
    screen.editor.refresh()
    assert screen.adopted == "Plan 0 : used from step 3 on by baseline[0]."
    session.ranks[0].alive = False
    screen.editor.refresh()
    assert screen.adopted == "Plan 0; no rank is alive."


# ---- the end --------------------------------------------------------------------------------------------------------


def test_after_the_session_is_closed_nothing_can_be_changed(screen: FilterScreen, session: FakeSession) -> None:
    session.edit(b2t="layer == 0")
    screen.editor.refresh()
    session.closed = True
    screen.editor.refresh()
    assert screen.message == "The session is closed; its plan can no longer be changed."
    assert not screen.can_apply
    assert screen.find("revert").disabled
    assert screen.find("restore").disabled
    assert all(screen.line(name).read_only for name in FILTERS)


def test_a_click_that_arrives_after_the_session_closed_gets_an_answer(
    screen: FilterScreen, session: FakeSession
) -> None:
    screen.type(b2t="layer == 0")
    screen.click("apply")
    session.closed = True
    screen.browser.kernel_works()
    assert len(session.plans) == 1
    assert screen.message == "The session is closed; its plan can no longer be changed."


def test_a_refresher_error_is_shown_until_it_is_cleared(screen: FilterScreen) -> None:
    screen.type(b2t="layer == 0")
    screen.apply()
    screen.editor.show_error("the <session> cannot be read")
    assert screen.message == "the <session> cannot be read"
    screen.editor.show_error("")
    assert screen.message == "Published version 1, which changes b2t."


def test_a_closed_editor_leaves_no_widget_behind_and_gets_no_events(
    screen: FilterScreen, session: FakeSession, simulated: Browser
) -> None:
    session.edit(b2t="layer == 0")
    screen.editor.refresh()
    shown = [widget.comm.comm_id for widget in descendants(screen.editor)]
    assert len(shown) > 20
    screen.editor.close()
    screen.editor.close()
    assert not set(shown) & set(simulated.comms)
    sent: list[Any] = []
    simulated.on_update.append(lambda comm_id, changed: sent.append(changed))
    session.edit(b2t="layer == 1")
    screen.editor.refresh()
    screen.editor.show_error("too late")
    screen.editor.say("too late")
    assert (sent, screen.editor.message) == ([], "")


# ---- with real ranks ------------------------------------------------------------------------------------------------


def loops(folder: str, pause: int) -> None:
    """Take steps until the file `stop` exists; the leader waits in one step for the file `continue`."""
    me = gl.here()
    assert me is not None
    for step in itertools.count():
        if step == pause and me.side == "baseline":
            Path(f"{folder}/there").touch()
            wait_for_file(f"{folder}/continue")
        for name in ("a", "b"):
            gl.tap(name, torch.full((2,), own_value()))
        gl.step()
        if Path(f"{folder}/stop").exists():
            return


@pytest.mark.ranks
def test_apply_changes_a_loop_that_is_running_from_one_step_on(
    show: Callable[[Any], FilterScreen], launched: gl.Session, tmp_path: Path
) -> None:
    session = reset(launched)
    screen = show(session)
    before = session.plan.version
    run = session.start(loops, loops, args=(str(tmp_path), 2))
    wait_for_file(tmp_path / "there")
    wait_until(lambda: {"a", "b"} <= {seen["name"] for seen in session.taps}, "the report of both taps")
    screen.editor.refresh()
    screen.type(b2t="name == 'b'")
    assert "1 of" in screen.below("b2t")
    screen.apply()
    assert screen.message == f"Published version {before + 1}, which changes b2t."
    assert screen.adopted == f"Plan {before + 1} : not yet used by baseline[0], target[0]."
    assert not run.done
    (tmp_path / "continue").touch()
    wait_until(lambda: len(session.adopted(before + 1)) == 2, "the report that the plan is in use")
    # Both sides take a whole step under the new plan before either stops.
    run.wait_steps(max(session.adopted(before + 1).values()) - run.first_step + 1)
    (tmp_path / "stop").touch()
    run.wait()
    frame, [taken_up] = run.frame, set(session.adopted(before + 1).values())
    assert taken_up >= frame["step"].min() + 3
    old, new = frame[frame["step"] < taken_up], frame[frame["step"] >= taken_up]
    assert set(old["plan_version"]) == {before}
    assert set(old["status"]) == {"compared"}
    assert set(new["plan_version"]) == {before + 1}
    # The sides may stop in different steps, so that one of them takes steps alone.
    both = new[~new["status"].isin(("missing", "unmatched"))]
    assert {(row["name"], row["status"]) for _, row in both.iterrows()} == {("a", "compared"), ("b", "grafted")}
    screen.editor.refresh()
    assert screen.adopted == f"Plan {before + 1} : used from step {taken_up} on by all 2 ranks."


@pytest.mark.ranks
def test_an_edit_elsewhere_and_the_end_of_the_session_show_by_themselves(simulated: Browser) -> None:
    """With the refresher's own thread, and without a kernel."""
    with gl.launch(1, 1) as session:
        screen = FilterScreen(simulated, session.filter_editor())
        session.edit(b2t="name == 'a'")
        wait_until(lambda: screen.line("b2t").value == "name == 'a'", "the edit's arrival in the editor")
        wait_until(lambda: "by all 2 ranks" in screen.adopted, "the ranks' answer in the editor")
    wait_until(lambda: screen.line("b2t").read_only, "the last refresh")
    wait_until(lambda: "The session is closed" in screen.editor.message, "the last refresh")
    screen.editor.close()


@pytest.mark.ranks
def test_a_callback_beside_the_refresher_and_edits_loses_nothing(launched: gl.Session) -> None:
    """The three threads that meet in an editor: the refresher's, the callbacks' and the cell's."""
    session = reset(launched)
    editor = session.filter_editor()
    errors: list[BaseException] = []

    def edits() -> None:
        try:
            for number in range(50):
                session.edit(keep=f"layer == {number}")
        except BaseException as error:
            errors.append(error)

    cell = threading.Thread(target=edits)
    cell.start()
    for _ in range(50):
        editor.revert()
        editor.refresh()
    cell.join(60)
    editor.refresh()
    assert errors == []
    shown = {name: line.value for name, line in zip(FILTERS, lines_of(editor), strict=True)}
    assert shown == {"b2t": "", "t2b": "", "compare": "True", "keep": "layer == 49"}
    editor.close()


def test_undo_and_redo_take_back_edits_and_say_what_they_change(screen: FilterScreen, session: FakeSession) -> None:
    undo, redo = screen.find("undo"), screen.find("redo")
    assert (undo.disabled, redo.disabled) == (True, True)
    assert undo.tooltip == "Undo: there is no edit"
    session.edit(b2t="layer == 0")
    session.edit(rename={"target": {"^m": ""}})
    screen.editor.refresh()
    assert undo.tooltip == "Undo: rename: none -> 1 rule (target ^m -> )"
    screen.click("undo")
    screen.browser.kernel_works()
    assert screen.message == "Undone, as plan 3: rename: 1 rule (target ^m -> ) -> none."
    screen.click("undo")
    screen.browser.kernel_works()
    assert screen.message == "Undone, as plan 4: b2t: layer == 0 -> nothing."
    assert screen.text("b2t") == ""
    assert (undo.disabled, redo.disabled) == (True, False)
    screen.click("redo")
    screen.browser.kernel_works()
    assert screen.message == "Redone, as plan 5: b2t: nothing -> layer == 0."
    assert screen.text("b2t") == "layer == 0"


# ---- renames ---------------------------------------------------------------------------------------------------------


def write_rule(screen: FilterScreen, side: str, pattern: str, new: str = "") -> None:
    renames = screen.editor._renames
    renames._side.value, renames._pattern.value, renames._new.value = side, pattern, new


def test_a_rule_replaces_one_of_its_side_and_pattern_alone(screen: FilterScreen, session: FakeSession) -> None:
    session.edit(rename={"baseline": {"^a": "x"}, "target": {"^a": "y", "^b": "z"}})
    screen.editor.refresh()
    write_rule(screen, "target", "^a", "w")
    screen.click("add-rule")
    screen.browser.kernel_works()
    assert set(session.plan.rename) == {("baseline", "^a", "x"), ("target", "^b", "z"), ("target", "^a", "w")}


def test_new_names_pair_with_the_rewritten_names_of_the_other_side(
    show: Callable[[Any], FilterScreen],
) -> None:
    session = FakeSession(tap("model.a", side="baseline"), tap("net.a", side="target"), tap("net.b", side="target"))
    session.edit(rename={"baseline": {r"^model\.": ""}})
    screen = show(session)
    write_rule(screen, "target", r"^net\.")
    assert screen.shown("rule-preview").startswith(
        "2 names seen match; 1 of the new names exist on the baseline. net.a → a"
    )
    # A name that an earlier rule rewrites does not pair by the new one.
    session.edit(rename={"baseline": {r"^model\.": ""}, "target": {r"^net\.a": "x"}})
    write_rule(screen, "target", "")
    write_rule(screen, "target", r"^net\.")
    assert screen.shown("rule-preview").startswith(
        "2 names seen match; 0 of the new names exist on the baseline; an earlier rule rewrites 1 first. net.b → b"
    )
