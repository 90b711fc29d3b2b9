"""How the transform editor names, selects and filters the taps on which a draft can be tried."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from kit.pages import Browser, Screen
from kit.rows import row

from graftlab.errors import SessionError
from graftlab.plan.plan import GraftPlan
from graftlab.transforms import TransformSpec
from graftlab.verdict.conclusion import conclude_from
from graftlab.widgets import tap_explorer
from graftlab.widgets.dashboard import VerdictView
from graftlab.widgets.kept_taps import TapOption, concerns, default_option, kept_options, other_options
from graftlab.widgets.panel import Panel
from graftlab.widgets.refresher import refresher_of
from graftlab.widgets.tap_chooser import LISTED, TapChooser
from graftlab.widgets.tap_explorer import TapExplorer, as_floor


def kept(name: str = "out", side: str = "target", rank: int = 0, **tags: Any) -> dict[str, Any]:
    return {"name": name, "step": 3, "side": side, "rank": rank, **tags}


def test_a_tap_is_labelled_by_its_tags_and_the_rank_that_kept_it() -> None:
    [option] = kept_options([kept(layer=3, rank=1)])
    assert (option.kept, option.label) == (True, "out · layer=3 · target[1]")
    [other] = other_options([{"name": "out", "step": 0, "layer": 3}], [])
    assert (other.kept, other.label) == (False, "out · layer=3 · not kept")


def test_each_tap_and_rank_is_one_option_in_the_order_of_keeping() -> None:
    steps = [kept("b", layer=1), {**kept("b", layer=1), "step": 9}, kept("a"), kept("b", layer=1, rank=1)]
    options = kept_options(steps)
    assert [option.label for option in options] == [
        "b · layer=1 · target[0]",
        "a · target[0]",
        "b · layer=1 · target[1]",
    ]
    seen = [{"name": "b", "layer": 1}, {"name": "b", "layer": 2}, {"name": "c"}, {"name": "c", "step": 4}]
    assert [option.label for option in other_options(seen, options)] == ["b · layer=2 · not kept", "c · not kept"]


def test_a_pair_is_selected_by_tags_that_can_select_it() -> None:
    option = TapOption("out", (("layer", 3), ("limit", 2), ("self", 1), ("x", float("nan"))), "baseline", 1)
    assert option.selection == {"layer": 3, "name": "out", "side": "baseline", "rank": 1}


def test_the_static_table_has_the_hundred_worst_taps_and_counts_the_others() -> None:
    found = conclude_from([row(f"t{n}", order=n, rel_l2=float(n)) for n in range(103)])
    shown = tap_explorer.static_html(found, with_figure=False)
    assert shown.endswith("<p>and 3 more taps, none worse</p>")
    assert (">t102<" in shown, ">t3<" in shown, ">t2<" in shown) == (True, True, False)
    assert "<table" not in tap_explorer.static_html(conclude_from([]), with_figure=True)


@pytest.mark.parametrize(
    ("tag", "value", "is_in"),
    [
        ("layer", 3, True),
        ("phase", "decode", True),
        ("scale", 0.5, True),
        ("last", True, True),
        ("cache", None, True),
        # Each rank has its own.
        ("tp_rank", 1, False),
        # No expression can name these.
        ("if", 1, False),
        ("search", 1, False),
        ("two words", 1, False),
        # Objects arrive as their repr, which no tag on a rank equals.
        ("shape", "torch.Size([2])", False),
        ("mode", "<Mode.A: 1>", False),
        ("scale", float("inf"), False),
        ("layers", (1, 2), False),
    ],
)
def test_the_filter_of_a_tap_has_the_tags_that_match_on_every_rank(tag: str, value: object, is_in: bool) -> None:
    expected = f"name == 'out' and {tag} == {value!r}" if is_in else "name == 'out'"
    assert TapOption("out", ((tag, value),)).filter == expected


def test_a_draft_is_tried_by_default_on_a_grafted_tap_or_else_on_a_kept_one() -> None:
    options = kept_options([kept("left"), kept("kept"), kept("grafted")])
    keep = "name in ('kept', 'grafted')"
    chosen = default_option(GraftPlan(b2t="name == 'grafted'", keep=keep), options)
    assert chosen is options[2]
    assert default_option(GraftPlan(keep=keep), options) is options[1]
    assert default_option(GraftPlan(keep="name == 'x'"), options) is None


def test_a_transform_concerns_the_taps_of_its_filter_or_those_that_the_plan_grafts() -> None:
    a, b = kept_options([kept("a"), kept("b")])
    spec = TransformSpec("source", "def transform(graft_input):\n    return graft_input.received_list[0]\n")
    grafts_a = GraftPlan(b2t="name == 'a'")
    assert [concerns(grafts_a, spec, option) for option in (a, b)] == [True, False]
    # Nothing is grafted yet.
    assert [concerns(GraftPlan(), spec, option) for option in (a, b)] == [True, True]
    only_b = TransformSpec("source", spec.text, where="name == 'b'")
    assert [concerns(grafts_a, only_b, option) for option in (a, b)] == [False, True]


def test_ranks_that_are_too_busy_to_answer_leave_the_taps_that_are_known() -> None:
    shown: list[str] = []

    def kept(*, failed: bool) -> None:
        raise SessionError("target[0] is busy")

    chooser: Any = SimpleNamespace(session=SimpleNamespace(kept=kept), _kept=["known"], _lock=threading.RLock())
    chooser._is_asking, chooser._fill, chooser._show = True, lambda: shown.append("fill"), lambda: shown.append("show")
    TapChooser._ask_ranks(chooser, (1, 7))
    assert (chooser._kept, chooser._is_asking, chooser._asked_at) == (["known"], False, (1, 7))
    assert chooser._next_asking > 0
    assert shown == ["fill", "show"]


@pytest.fixture
def arrives_on() -> str:
    return "another thread"


class Choosing(Panel):
    """A session with taps of a plan, and the chooser in its panel."""

    def __init__(self, *kept_now: dict[str, Any], taps: int = 2, **plan: Any) -> None:
        self.edits: list[str] = []
        self.asked = 0
        self.submitted: list[str] = []
        seen = [{"name": f"t{n}", "step": 0} for n in range(taps)]
        # What a reference may be weak to.
        session: Any = type("Session", (), {})()
        session.closed, session.row_count, session.taps = False, 1, seen
        session.plan, session.plans = GraftPlan(**plan), [GraftPlan(**plan)]
        session.kept = lambda failed: [*kept_now] if failed else []
        session.edit = lambda keep: self.edits.append(keep) or GraftPlan(keep=keep, version=7)
        super().__init__(session)
        self.chooser = TapChooser(self, list)
        refresher_of(self.session).interval = 1000
        self._open([self._message_line, self.chooser])

    def in_background(self, callback: Any, *arguments: Any) -> None:
        self.asked += 1
        callback(*arguments)

    def submit(self, action: str, **known: Any) -> None:
        self.submitted.append(action)


@pytest.fixture
def choosing(simulated: Browser) -> Iterator[Callable[..., Screen]]:
    made: list[Panel] = []

    def show(*kept_now: dict[str, Any], **more: Any) -> Screen:
        made.append(Choosing(*kept_now, **more))
        return Screen(simulated, made[-1])

    yield show
    for panel in made:
        panel.close()


def test_ranks_are_asked_for_kept_pairs_of_each_state_once(choosing: Callable[..., Screen]) -> None:
    screen = choosing(kept("t0"), keep="name == 't0'")
    panel: Any = screen.panel
    chooser: Any = panel.chooser
    assert screen.options("tap") == ["nothing (only load it)", "t0 · target[0]", "t1 · not kept"]
    assert screen.chosen("tap") == "t0 · target[0]"
    chooser._next_asking = 0.0
    chooser.refresh()
    assert panel.asked == 1
    panel.session.row_count += 1
    chooser.refresh()
    assert panel.asked == 2
    # Not again at once, nor while an answer is on its way, nor of a session that is closed.
    panel.session.row_count += 1
    chooser.refresh()
    chooser._next_asking, chooser._is_asking = 0.0, True
    chooser.refresh()
    chooser._is_asking, panel.session.closed = False, True
    chooser.refresh()
    assert panel.asked == 2
    assert choosing(kept("t0")).panel.asked == 0, "without a filter nothing is kept"  # type: ignore[attr-defined]


def test_what_is_not_kept_can_be_kept_unless_the_session_is_closed(choosing: Callable[..., Screen]) -> None:
    screen = choosing(b2t="name == 't1'")
    panel: Any = screen.panel
    button = screen.find("keep")
    assert (button.description, button.icon, button.layout.display) == ("Keep grafted taps", "thumb-tack", None)
    assert button.tooltip == "Set the plan's keep filter to name == 't1'"
    assert screen.shown("kept-hint") == "No tensors are kept, so a draft is only loaded, not run."
    screen.choose("tap", "t0 · not kept")
    screen.browser.kernel_works()
    assert (button.description, button.tooltip) == ("Keep this tap", "Set the plan's keep filter to name == 't0'")
    assert screen.shown("kept-hint") == "Its tensors are not kept, so a draft is only loaded, not run."
    screen.click("keep")
    screen.browser.kernel_works()
    assert panel.submitted == ["keep"]
    panel.chooser.keep(panel.chooser.chosen)
    assert panel.edits == ["name == 't0'"]
    assert screen.message == "Plan 7 keeps name == 't0'; tensors arrive with the next step."
    panel.session.closed = True
    panel.refresh()
    panel.chooser.refresh()
    assert button.layout.display == "none"
    # Tensors of an earlier plan are there, whatever the newest one keeps.
    earlier = choosing(kept("t0"), keep="name == 't1'")
    earlier.choose("tap", "t0 · target[0]")
    earlier.browser.kernel_works()
    assert (earlier.find("keep").layout.display, earlier.find("kept-hint").layout.display) == ("none", "none")
    # What the plan keeps already needs no edit.
    asked = choosing(keep="name == 't0'")
    assert asked.find("keep").description == "Keep all taps"
    asked.panel.chooser.keep(TapOption("t0", ()))  # type: ignore[attr-defined]
    assert asked.panel.edits == []  # type: ignore[attr-defined]
    assert "keeps this" in asked.message


def test_of_many_taps_those_with_the_typed_words_are_listed(choosing: Callable[..., Screen]) -> None:
    assert choosing(taps=12).find("tap-search").layout.display == "none"
    screen = choosing(taps=LISTED + 5)
    panel: Any = screen.panel
    assert screen.find("tap-search").layout.display is None
    assert (len(screen.options("tap")), screen.shown("more-taps")) == (
        LISTED + 1,
        "5 more; type part of a name to find them",
    )
    # One that is chosen stays listed, whatever is looked for.
    screen.choose("tap", "t7 · not kept")
    screen.enter("tap-search", "NOT T304")
    screen.browser.kernel_works()
    assert screen.options("tap")[1:] == ["t7 · not kept", "t304 · not kept"]
    assert screen.find("more-taps").layout.display == "none"
    screen.enter("tap-search", "nothing like it")
    screen.browser.kernel_works()
    assert screen.shown("more-taps") == "no tap has these words in its name or tags"
    # It has been kept since, and is gone with its run.
    panel.chooser._kept = kept_options([kept("t7")])
    panel.chooser.refresh()
    assert screen.chosen("tap") == "t7 · target[0]"
    panel.session.taps.clear()
    panel.chooser._kept = []
    panel.chooser.refresh()
    assert screen.chosen("tap") == "nothing (only load it)"


def test_a_pair_that_is_older_than_the_row_in_the_table_is_marked() -> None:
    held = [kept(layer=3), {**kept(layer=3), "step": 1}, {**kept(layer=4), "step": 9}, {**kept("b"), "step": 9}]
    explorer: Any = SimpleNamespace(_panel=SimpleNamespace(session=SimpleNamespace(kept=lambda: held)))

    def note(step: int, **tags: Any) -> str:
        line = SimpleNamespace(row=SimpleNamespace(step=step, tags={**kept(**tags), "step": step}))
        return TapExplorer._step_note(explorer, line)  # type: ignore[arg-type]

    assert note(3, layer=3) == note(2, layer=3) == ""
    assert "This pair is from step 3. The table shows step 4, but no pair of it is kept." in note(4, layer=3)
    # Of another tap, none is shown.
    assert note(4, layer=7) == ""


def test_what_a_page_asks_of_a_tap_is_done_for_that_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    session = SimpleNamespace(plan=GraftPlan(keep="name == 'a'"), edit=lambda keep: said.append(keep) or "edited")
    panel: Any = SimpleNamespace(session=session, in_background=lambda call, line: call(line))
    panel.say_kept = lambda what, plan, rows: said.append((what, plan, rows()))
    explorer: Any = TapExplorer.__new__(TapExplorer)
    sent: list[Any] = []
    shown = SimpleNamespace(value="")
    explorer.__dict__.update(_panel=panel, _grafts=said.append, _noise_floor=None, _pair=shown)
    explorer.__dict__.update(view=SimpleNamespace(send=sent.append), found=conclude_from([row("a"), row("<b>")]))
    explorer.__dict__["follow"] = explorer.__dict__["show"] = lambda: said.append("looked")
    explorer._take("graft", "<b>")
    explorer._take("keep", "<b>")
    explorer._take("keep", "a")
    rows = explorer.found.rows
    wanted = "name == 'a' or (name == '<b>')"
    assert said == ["name == '<b>'", wanted, ("<b>", "edited", rows), ("a", session.plan, rows)]
    said.clear()
    explorer._take("floor", 1)
    assert (explorer._noise_floor, said) == (1.0, ["looked", "looked"])
    with pytest.raises(ValueError, match="there is no tap 'c'"):
        explorer._take("graft", "c")

    def pictures(session: Any, line: Any) -> Any:
        assert "Waiting for target[0], which keeps the newest pair of &lt;b&gt; " in shown.value
        raise SessionError("none of <b> is kept")

    monkeypatch.setattr(tap_explorer, "figures_of_pair", pictures)
    explorer._take("open", "<b>")
    assert shown.value.startswith('<div class="bad">none of &lt;b&gt; is kept</div>')
    assert sent == [{"what": "opened"}] * 2
    explorer._take("chosen", "a")
    assert shown.value == ""


def test_a_run_has_ended_once_it_is_done_or_its_session_is_closed() -> None:
    runs = [SimpleNamespace(number=number, done=done) for number, done in enumerate((False, True))]
    session = SimpleNamespace(closed=False, runs=runs)
    explorer: Any = SimpleNamespace(_panel=SimpleNamespace(session=session))
    # A run that the session no longer has ended before.
    assert [TapExplorer._has_ended(explorer, number) for number in range(3)] == [False, True, True]
    session.closed = True
    assert TapExplorer._has_ended(explorer, 0)


@pytest.mark.parametrize("floor", [None, 0, 0.5, 2])
def test_a_noise_floor_of_a_page_is_a_finite_number(floor: float | None) -> None:
    assert as_floor(floor) == floor
    assert type(as_floor(floor)) in (float, type(None))


@pytest.mark.parametrize("value", [-1e-9, math.inf, math.nan, True, "0.5", [1]])
def test_what_is_no_noise_floor_is_refused(value: Any) -> None:
    with pytest.raises(ValueError, match="a noise floor is a finite number of at least 0, not"):
        as_floor(value)


def test_a_saved_notebook_has_the_result_of_a_verdict_and_not_its_announcement() -> None:
    view: Any = SimpleNamespace(_is_announced=False, _result=SimpleNamespace(value="<p>x differs</p>"))
    assert VerdictView.static_html(view) == '<div class="graftlab-verdict-text"><p>x differs</p></div>'
    view._is_announced = True
    assert VerdictView.static_html(view) == ""
    assert VerdictView.static_html(SimpleNamespace(_is_announced=False, _result=SimpleNamespace(value=""))) == ""  # type: ignore[arg-type]
