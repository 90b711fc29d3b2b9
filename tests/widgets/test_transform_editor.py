"""The transform editor without a browser: what it tries, applies, follows and restores, on real ranks.

Typing and clicking arrive as messages, as from a browser, on the main thread or on another.
"""

from __future__ import annotations

import html
import re
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import ipywidgets as widgets
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.deadline import DEADLINE
from kit.pages import Browser, Screen, page_of
from kit.support import own_value, reset, run_cell, wait_until

import graftlab as gl
from graftlab.base.tags import plain
from graftlab.filters.expressions import compile_filter
from graftlab.grafting.trial import PRINTED_LIMIT, Trial
from graftlab.plan.plan import GraftPlan
from graftlab.transforms import SIGNATURE, TransformSpec
from graftlab.widgets.draft_box import DraftBox
from graftlab.widgets.drafts import FIELDS, TEMPLATE, Draft, Version, functions_in, likely_transforms, spec_of
from graftlab.widgets.kept_taps import TapOption, filter_to_keep, join_filters, kept_options
from graftlab.widgets.refresher import refresher_of
from graftlab.widgets.tap_chooser import LISTED
from graftlab.widgets.transform_editor import DraftTask, TaskQueue, TransformEditor
from graftlab.widgets.trial_view import summary
from graftlab.widgets.version_list import VersionList

# Only bounds how long a draft that ought to end at once may take on a busy machine.
PLENTY = 60.0


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gl.Session]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "of_a_path.py").write_text("def halves(graft_input):\n    return graft_input.received_list[0] / 2\n")
    with pytest.MonkeyPatch.context() as patch:
        # Before the launch, for the ranks look there too.
        patch.syspath_prepend(folder)
        with gl.launch(1, 1) as session:
            yield session


@pytest.fixture
def session(launched: gl.Session) -> gl.Session:
    """A session that grafts and keeps `x`, with a kept pair: 10 from the baseline and 20 on the target."""
    reset(launched).edit(b2t="name == 'x'", keep="name == 'x'")
    launched.run(tap_x, tap_x)
    return launched


def tap_x(layer: int = 4) -> list[float]:
    return gl.tap("x", torch.full((2, 3), own_value()), layer=layer).tolist()


def runs_on(folder: str) -> None:
    """Take steps until the file `stop` exists."""
    while not Path(f"{folder}/stop").exists():
        tap_x()
        gl.step()
        # Only so that it makes fewer rows.
        threading.Event().wait(0.01)


def source(*lines: str) -> str:
    """A transform with this body, which begins in line 2."""
    return "\n".join(["def transform(graft_input):", *(f"    {line}" for line in lines), ""])


DOUBLES = source("return 2 * graft_input.received_list[0]")
RAISES = source("x = 1", "return graft_input.received_list[7]")


# ---- a simulated browser --------------------------------------------------------------------------------------------


class TransformScreen(Screen):
    """A transform editor as a person sees it, in one page of a simulated browser."""

    def __init__(self, browser: Browser, editor: TransformEditor) -> None:
        super().__init__(browser, editor)
        self.editor = editor
        self.page = page_of(browser, editor.editor)

    def type(self, text: str) -> None:
        self.page.type(text)

    def name(self, name: str) -> None:
        """Choose a function or a dotted path."""
        self.choose("kinds", "Function or path")
        self.enter("name", name)

    def tries(self, text: str) -> str:
        self.type(text)
        self.click("try")
        self.settle()
        return self.result

    def applies(self, text: str) -> str:
        self.type(text)
        self.click("apply")
        self.settle()
        return self.message

    @property
    def text(self) -> str:
        return self.page.text

    @property
    def source(self) -> str:
        """What is read where nothing can be written."""
        assert self.find("source").layout.display == "none"
        viewer = self.find("viewer")
        assert viewer.layout.display is None
        assert viewer.read_only
        return str(viewer.value)

    @property
    def result(self) -> str:
        return self.shown("result")

    @property
    def in_force(self) -> str:
        return self.shown("in-force")

    @property
    def busy(self) -> str:
        return self.shown("busy")


Show = Callable[..., TransformScreen]


# The filter editor and the dashboard are tested with both, and their messages take the same way.
@pytest.fixture(params=["another thread", pytest.param("main thread", marks=pytest.mark.soak)])
def show(request: pytest.FixtureRequest, stub_bundle: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Show]:
    """Shows a session's transform editor, which is only refreshed when the test does it."""
    browser = Browser(in_a_thread=request.param == "another thread")
    monkeypatch.setattr("ipywidgets.comm.create_comm", browser.create_comm)
    made: list[TransformScreen] = []

    def make(session: gl.Session, **options: Any) -> TransformScreen:
        monkeypatch.setattr(refresher_of(session), "interval", 1000)
        options = {"names": {}, "limit": PLENTY, **options}
        editor = TransformEditor(session, **options)
        made.append(TransformScreen(browser, editor))
        made[-1].settle()
        return made[-1]

    yield make
    for screen in made:
        screen.editor.close()
    assert not any(refresher_of(screen.editor.session).running for screen in made)


# ---- what it starts from --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tap", "options", "label"),
    [
        (TapOption("x", (), "target", 1), {}, "trying on x · target[1] …"),
        (TapOption("x", (), "target", 1), {"published": True}, "applying on x · target[1] …"),
        (TapOption("x", (), "target", 1), {"published": True, "tried": False}, "applying …"),
        # A draft is only loaded without kept tensors.
        (TapOption("x", ()), {}, "trying …"),
        (None, {}, "trying …"),
    ],
)
def test_a_task_names_the_tap_on_whose_tensors_it_is_tried(tap: TapOption | None, options: Any, label: str) -> None:
    assert DraftTask(Draft("text", "x = 1"), tap, **options).label == label


def test_tasks_run_one_after_another_and_the_newest_try_alone_waits() -> None:
    tasks = TaskQueue()
    first, tried, newest, applied = (DraftTask(Draft("text", f"x = {n}"), published=n in (0, 3)) for n in range(4))
    tasks.add(first)
    assert (tasks.begin_next(), tasks.open) == (first, [first])
    tasks.add(tried)
    tasks.add(newest)
    assert tasks.open == [first, newest]
    tasks.add(applied)
    assert tasks.open == [first, applied]
    tasks.end()
    assert (tasks.begin_next(), tasks.open) == (applied, [applied])
    tasks.end()
    assert (tasks.begin_next(), tasks.open) == (None, [])


def test_two_applies_that_wait_are_made_in_their_order() -> None:
    tasks = TaskQueue()
    earlier, later = (DraftTask(Draft("text", f"x = {n}"), published=True) for n in range(2))
    tasks.add(earlier)
    tasks.add(later)
    assert [tasks.begin_next(), tasks.begin_next(), tasks.begin_next()] == [earlier, later, None]


def test_the_template_has_the_real_signature_and_every_field() -> None:
    assert SIGNATURE in TEMPLATE
    for name in FIELDS:
        assert re.search(rf"#   graft_input\.{name} +\S", TEMPLATE), name


def test_the_result_of_an_earlier_draft_is_gone_while_the_next_is_tried() -> None:
    tasks, seen, said = TaskQueue(), list[object](), list[str]()
    editor: Any = SimpleNamespace(_lock=threading.RLock(), _tasks=tasks, _trial=SimpleNamespace(value="of an earlier"))
    editor.say, editor.guarded, editor._show = said.append, lambda run: run, lambda: None
    editor._run = lambda task: seen.append((task.draft.text, editor._trial.value, tasks.current is task))
    tasks.add(DraftTask(Draft("text", "x = 1")))
    TransformEditor._work(editor)
    assert tasks.open == []
    TransformEditor._work(editor)
    assert (seen, said, tasks.open) == ([("x = 1", "", True)], [""], [])


def test_a_draft_is_saved_only_if_it_exists_nowhere_else() -> None:
    in_force, settled = Draft("default"), Draft("text", "x = 2")
    saved: list[Draft] = []
    editor: Any = SimpleNamespace(_settled=settled, _compare_again=lambda: None, _box=SimpleNamespace(take=Mock()))
    editor._versions = SimpleNamespace(in_force=SimpleNamespace(draft=in_force), save_draft=saved.append)
    editor._is_applied = lambda draft: TransformEditor._is_applied(editor, draft)
    for draft in (in_force, settled, Draft("text", TEMPLATE), Draft("text", DOUBLES)):
        TransformEditor._replace(editor, draft, editor._versions.in_force)
    assert saved == [Draft("text", DOUBLES)]


@pytest.mark.parametrize("closed", [True, False])
def test_a_try_that_ends_after_the_editor_was_closed_publishes_nothing(closed: bool) -> None:
    session = SimpleNamespace(try_transform=lambda spec, limit: Trial())
    editor: Any = SimpleNamespace(session=session, limit=5.0, _lock=threading.RLock(), _closed=closed)
    editor._box = SimpleNamespace(draft=Draft("default"))
    editor._trial = SimpleNamespace(value="")
    task = DraftTask(Draft("text", "x = 1"), published=True)
    assert TransformEditor._try_succeeds(editor, task, TransformSpec("source", "x = 1")) is not closed
    assert bool(editor._trial.value) is not closed


def test_a_draft_is_tried_on_the_chosen_pair_if_that_is_kept_and_concerns_it() -> None:
    tried: list[dict[str, Any]] = []
    draft, spec = Draft("text", "x = 1"), TransformSpec("source", "x = 1")
    session = SimpleNamespace(try_transform=lambda spec, **given: tried.append(given) or Trial())
    session.plan = GraftPlan(b2t="name == 'x'")
    editor: Any = SimpleNamespace(session=session, limit=5.0, _lock=threading.RLock(), _closed=False)
    editor._box, editor.editor = SimpleNamespace(draft=draft), Mock()
    editor._trial = SimpleNamespace(value="")
    x, y = (TapOption(name, (), "target", 0) for name in "xy")
    for tap, published in ((None, False), (x, False), (y, False), (x, True), (y, True), (TapOption("x", ()), False)):
        assert TransformEditor._try_succeeds(editor, DraftTask(draft, tap, published=published), spec)
    # One that is not kept, or that the draft would leave alone, says nothing about it.
    on = [{}, x.selection, y.selection, x.selection, {}, {}]
    assert tried == [{"limit": 5.0, **selection} for selection in on]
    assert editor.editor.clear_error.call_count == 6


def test_a_name_means_what_had_it_when_it_was_published() -> None:
    def f(graft_input: Any) -> Any: ...

    now = TransformSpec.draft(f)
    two = (TransformSpec("source", "x = 1", where="layer == 1"), TransformSpec("path", "a.b", where="layer == 2"))
    versions = [Version(1, TransformSpec("source", "a.b")), Version(3, now), Version(4, two)]
    assert [version.draft.text for version in versions] == ["a.b", f"{now.label} (plan 3)", "2 transforms (plan 4)"]
    assert spec_of(versions[1].draft, {}, versions) == now
    assert spec_of(versions[2].draft, {}, versions) == two
    # A text is no name.
    assert spec_of(Draft("name", "a.b"), {}, versions) == TransformSpec.draft("a.b")
    with pytest.raises(gl.TransformError) as refused:
        spec_of(Draft("name", "2 transforms (plan 4)", "layer == 3"), {}, versions)
    assert str(refused.value) == "'2 transforms (plan 4)' have their own filters; leave this filter blank"


def test_a_function_looks_like_a_transform_by_its_first_argument_alone() -> None:
    def variable(graft_input: Any, *more: Any, **others: Any) -> Any: ...

    def needs_two(graft_input: Any, other: Any) -> Any: ...

    def has_default(graft_input: Any, scale: float = 2.0) -> Any: ...

    found = {each.__name__: each for each in (variable, needs_two, has_default)}
    for name in ("variable", "needs_two", "has_default"):
        del found[name].__annotations__["graft_input"]
    written = {"quoted": "'gl.GraftTransformInput'", "plain": "GraftTransformInput", "of_another": "gl.Here"}
    for name, annotation in written.items():

        def made(x: Any) -> Any: ...

        made.__annotations__["x"] = annotation
        found[name] = made
    assert likely_transforms(found) == ["has_default", "plain", "quoted", "variable"]


@pytest.mark.parametrize(
    ("draft", "shown"),
    [
        (Draft("text", "x = 1", "layer == 2"), {"source", "where"}),
        (Draft("name", "package.f", "layer == 2"), {"name", "viewer", "where"}),
        (Draft("default"), {"viewer"}),
    ],
)
def test_each_kind_of_draft_has_its_fields(
    draft: Draft, shown: set[str], simulated: Browser, stub_bundle: Path
) -> None:
    box = DraftBox(TEMPLATE, lambda draft: f"# {draft.kind}")
    # First as any other kind, so that all fields exist.
    box.take(Draft("name", "other"))
    box.take(draft)
    fields = {"source": box.editor, "viewer": box._viewer, "name": box.name, "where": box.where}
    assert {name for name, each in fields.items() if each is not None and each.layout.display != "none"} == shown
    assert box.draft == draft
    assert "viewer" not in shown or fields["viewer"].value == f"# {draft.kind}"


@pytest.mark.ranks
def test_it_starts_from_the_template_which_works(session: gl.Session, show: Show) -> None:
    screen = show(session)
    assert screen.text == TEMPLATE
    assert screen.in_force.startswith("In force: the default transform , since plan ")
    assert "not applied" not in screen.in_force
    screen.click("try")
    screen.settle()
    assert "✓ ran on x · layer=4 · target[0]" in screen.result


@pytest.fixture
def importable(launched: gl.Session) -> Iterator[str]:
    yield "of_a_path.halves"
    sys.modules.pop("of_a_path", None)


@pytest.mark.ranks
def test_it_starts_from_the_transform_in_force(session: gl.Session, show: Show, importable: str) -> None:
    session.edit(transform=DOUBLES)
    assert show(session).text == DOUBLES

    session.edit(transform=importable)
    screen = show(session)
    assert (screen.chosen("kinds"), screen.find("name").value) == ("Function or path", importable)
    assert "return graft_input.received_list[0] / 2" in screen.source

    of_a_cell = run_cell("def of_a_cell(graft_input):\n    return graft_input.received_list[0]  # seen")["of_a_cell"]
    version = session.edit(transform=of_a_cell).version
    screen = show(session)
    assert screen.find("name").value == f"of_a_cell (plan {version})"
    assert "return graft_input.received_list[0]  # seen" in screen.source
    assert "not applied" not in screen.in_force


# ---- edit, try, break, fix, apply -----------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_transform_is_written_tried_fixed_and_applied_to_a_running_loop(
    session: gl.Session, show: Show, tmp_path: Path
) -> None:
    screen = show(session)
    run = session.start(runs_on, runs_on, args=(str(tmp_path),))
    before = session.plan.version

    tried = screen.tries(DOUBLES)
    assert "✓ ran on x · layer=4 · target[0]" in tried
    assert re.search(r"max_abs 1\.00e\+01 0\.00e\+00 ↓ smaller", tried)
    assert "● edited, not applied" in screen.in_force

    assert "✗ failed" in screen.tries(RAISES)
    assert screen.page.error == "line 3: IndexError: list index out of range"
    assert screen.applies(RAISES) == (
        "Not applied: the draft failed. To apply it anyway, try it on other tensors, or on none."
    )
    assert "step" in screen.result
    assert ": IndexError: list index out of range received float32[2, 3]" in screen.result
    assert session.plan.version == before

    assert screen.applies(DOUBLES) == f"Applied as plan {before + 1}."
    assert screen.page.error == ""
    assert session.plan.transform is not None
    assert session.plan.transform.text == DOUBLES
    assert "not applied" not in screen.in_force
    wait_until(lambda: len(session.adopted(before + 1)) == 2, "the plan on every rank")
    taken_up = session.adopted(before + 1)["target[0]"]
    wait_until(lambda: session.live_taps().look()[-1].step > taken_up, "a step with the new plan")
    assert not run.done
    screen.editor.refresh()
    assert screen.shown("adopted") == f"Plan {before + 1} : used from step {taken_up} on by all 2 ranks."

    (tmp_path / "stop").touch()
    frame = run.wait().frame
    frame = frame[frame["status"] == "grafted"]
    old, new = frame[frame["plan_version"] == before], frame[frame["plan_version"] == before + 1]
    assert set(old["mean_baseline"]) == {10.0}
    assert set(new["mean_baseline"]) == {20.0}
    assert set(new["step"]) == set(range(taken_up, int(new["step"].max()) + 1))


@pytest.mark.ranks
def test_a_transform_is_applied_with_its_filter(session: gl.Session, show: Show) -> None:
    screen = show(session)
    screen.type(DOUBLES)
    screen.enter("where", "layer == 5")
    screen.click("try")
    screen.settle()
    assert "its filter does not match this tap, so it would not be applied here" in screen.result
    screen.enter("where", "layer ==")
    screen.click("apply")
    screen.settle()
    assert "layer ==" in screen.message
    assert session.plan.transform is None

    screen.enter("where", " layer == 4 ")
    screen.click("apply")
    screen.settle()
    assert screen.message == f"Applied as plan {session.plan.version}."
    assert [(spec.text, spec.where) for spec in session.plan.transforms] == [(DOUBLES, "layer == 4")]
    assert "where layer == 4" in screen.in_force
    assert "not applied" not in screen.in_force
    # One that matches nothing is applied, and said to.
    screen.enter("where", "laier == 4")
    screen.click("apply")
    screen.settle()
    assert screen.message.startswith(f"Applied as plan {session.plan.version}. Its filter matches 0 of ")
    assert screen.message.endswith(" seen; no tap has the tag 'laier'; did you mean 'layer'?")
    screen.enter("where", "step > 1000")
    screen.click("apply")
    screen.settle()
    assert screen.message == f"Applied as plan {session.plan.version}.", "taps of later steps are not seen yet"
    screen.enter("where", "layer == 4")
    screen.click("apply")
    screen.settle()
    # Another filter is another transform to apply.
    screen.enter("where", "")
    screen.settle()
    assert "● edited, not applied" in screen.in_force
    screen.click("revert")
    screen.settle()
    assert screen.find("where").value == "layer == 4"


@pytest.mark.ranks
def test_it_follows_a_filter_set_elsewhere_and_warns_if_it_matches_no_tap(session: gl.Session, show: Show) -> None:
    screen = show(session)
    session.edit(transform=("layer < 3", DOUBLES))
    screen.editor.refresh()
    screen.settle()
    assert (screen.text, screen.find("where").value) == (DOUBLES, "layer < 3")
    with pytest.warns(gl.GraftWarning, match="applied nowhere"):
        session.edit(b2t=None, transform=RAISES)
    screen.editor.refresh()
    screen.settle()
    assert screen.find("where").value == ""
    assert "where the plan grafts (nowhere)" in screen.in_force


@pytest.mark.ranks
def test_several_transforms_are_shown_tried_and_restored_as_one(session: gl.Session, show: Show) -> None:
    several = [("layer == 4", DOUBLES), ("True", "operator.neg")]
    version = session.edit(transform=several).version
    screen = show(session)
    assert screen.find("name").value == f"2 transforms (plan {version})"
    assert "In force: 2 transforms" in screen.in_force
    assert "# transform (text " in screen.source
    assert DOUBLES in screen.source
    assert "# operator.neg where True" in screen.source
    screen.click("try")
    screen.settle()
    assert re.search(r"max_abs 0\.00e\+00|max_abs 1\.00e\+01 0\.00e\+00", screen.result)
    screen.enter("where", "step == 0")
    screen.click("apply")
    screen.settle()
    assert "have their own filters" in screen.message

    before = session.plan.transforms
    session.edit(transform=None)
    screen.enter("where", "")
    screen.click("apply")
    screen.settle()
    assert session.plan.transforms == before


@pytest.mark.ranks
def test_a_try_shows_its_inputs_output_and_prints(session: gl.Session, show: Show) -> None:
    tried = show(session).tries(
        source("print('<b>layer', graft_input.tags['layer'])", "return graft_input.received_list[0].double() + 5")
    )
    assert "received float32[2, 3] target float32[2, 3] returned float64[2, 3] (float64 -> float32)" in tried
    assert "rel_l2 1.00e+00 3.33e-01 ↓ smaller" in tried
    assert "cosine 1.00000000 1.00000000 = same" in tried
    assert re.search(r"step \d+ in [\d.]+ (µs|ms|s)", tried)
    assert "printed <b>layer 4" in tried


@pytest.mark.ranks
def test_a_try_touches_neither_plan_nor_rows(session: gl.Session, show: Show) -> None:
    screen = show(session)
    before = session.plans, session.row_count, session.kept()
    screen.tries(DOUBLES)
    screen.tries(RAISES)
    assert (session.plans, session.row_count, session.kept()) == before


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("text", "message", "line"),
    [
        ("def transform(graft_input:\n    return 1", "does not compile, line 1", 1),
        (source("return torch.ones(7)"), "the transform returned shape [7]; the target has shape [2, 3]", 2),
        (source("graft_input.target.zero_()", "return 3"), "the transform returned int", 3),
        (source("exit()"), "the draft called exit(None)", 2),
        (source("import os", "os._exit(3)"), "the draft ended its process (exit code 3)", None),
        ("", "the transform's source defines no function named 'transform'", None),
        ("raise RuntimeError('über\\nzwei Zeilen')", "RuntimeError: über", 1),
    ],
    ids=["syntax", "shape", "no tensor", "exit", "os._exit", "empty", "unicode"],
)
def test_an_error_shows_its_message_and_marks_its_line(
    text: str, message: str, line: int | None, session: gl.Session, show: Show
) -> None:
    screen = show(session)
    screen.tries(text)
    assert message in screen.result
    assert message in html.unescape(screen.page.error)
    assert screen.editor.editor.error_line == line
    screen.type(DOUBLES)
    screen.browser.kernel_works()
    assert screen.page.error == ""


@pytest.mark.ranks
def test_the_error_of_an_older_draft_is_not_marked_in_newer_text(
    session: gl.Session, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen, tried, typed = show(session), threading.Event(), threading.Event()
    trying = session.try_transform

    def try_transform(spec: Any, **given: Any) -> Any:
        trial = trying(spec, **given)
        tried.set()
        assert typed.wait(60)
        return trial

    monkeypatch.setattr(session, "try_transform", try_transform)
    screen.type(source("return 1 / 0"))
    screen.click("try")
    screen.browser.kernel_works()
    assert tried.wait(60)
    screen.type(DOUBLES)
    screen.browser.kernel_works()
    typed.set()
    screen.settle()
    assert "ZeroDivisionError" in screen.result
    assert (screen.page.error, screen.editor.editor.error_line) == ("", None)


def hold_tries(session: gl.Session, patch: pytest.MonkeyPatch) -> tuple[list[str], threading.Event]:
    """Let each try wait for the event; returns the texts of those that have begun, and the event."""
    begun: list[str] = []
    go = threading.Event()
    trying = session.try_transform

    def try_later(spec: Any, **given: Any) -> Any:
        begun.append(spec.text)
        assert go.wait(DEADLINE)
        return trying(spec, **given)

    patch.setattr(session, "try_transform", try_later)
    return begun, go


@pytest.mark.ranks
def test_a_loop_ends_at_the_limit_with_the_buttons_back_and_the_ranks_unharmed(
    session: gl.Session, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = show(session, limit=0.3)
    _, go = hold_tries(session, monkeypatch)
    pids = [rank.pid for rank in session.ranks]
    screen.type(source("while True: pass"))
    screen.click("try")
    screen.browser.kernel_works()
    assert screen.busy == "trying on x · layer=4 · target[0] …"
    assert screen.find("try").disabled
    assert screen.find("apply").disabled
    go.set()
    screen.settle()
    assert "✗ failed: the draft did not end within 0.3 s" in screen.result
    assert not screen.find("try").disabled
    assert [rank.pid for rank in session.ranks] == pids
    assert session.run(tap_x, tap_x).frame["status"].tolist() == ["grafted"]


@pytest.mark.ranks
def test_during_a_try_only_the_newest_try_waits_and_no_apply_is_lost(
    session: gl.Session, show: Show, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = show(session, limit=0.3)
    ran, go = hold_tries(session, monkeypatch)
    screen.type(source("while True: pass"))
    screen.click("try")
    screen.browser.kernel_works()
    wait_until(lambda: ran, "the first try")
    # The keys work while the buttons do not.
    for text, action in (("one", "try"), (DOUBLES, "apply"), ("two", "try"), (TEMPLATE, "try")):
        screen.type(text)
        screen.editor.editor.submit(action)
        screen.browser.kernel_works()
    assert screen.busy.endswith("(2 waiting)")
    # In place of the keys, which would stand beside what is in progress.
    assert screen.editor._keys.layout.display == "none"
    go.set()
    screen.settle()
    assert screen.editor._keys.layout.display is None
    assert ran == [source("while True: pass"), DOUBLES, TEMPLATE]
    assert session.plan.transform is not None
    assert session.plan.transform.text == DOUBLES


@pytest.mark.ranks
def test_a_megabyte_that_is_printed_is_shown_in_part(session: gl.Session, show: Show) -> None:
    screen = show(session)
    screen.tries(source("print('x' * 2**20)", "return graft_input.received_list[0]"))
    assert "more characters" in screen.result
    assert len(screen.markup("result")) < 2 * PRINTED_LIMIT


@pytest.mark.ranks
def test_apply_publishes_the_text_on_the_screen_however_busy_the_kernel(session: gl.Session, show: Show) -> None:
    screen = show(session, names=run_cell("def mine(graft_input):\n    return graft_input.received_list[0]"))
    for text in ("a", "ab", DOUBLES):
        screen.type(text)
    screen.click("apply")
    screen.settle()
    assert session.plan.transform is not None
    assert session.plan.transform.text == DOUBLES
    # Traits are held back while the kernel has not worked off the one before.
    for kind in ("Function or path", "Default", "Python", "Function or path"):
        screen.choose("kinds", kind)
    for name in ("no", "nothing", "mine"):
        screen.name(name)
    screen.click("apply")
    screen.settle()
    assert session.plan.transform.label == "mine"


@pytest.mark.ranks
def test_a_draft_that_fails_to_load_is_not_applied_even_without_kept_tensors(session: gl.Session, show: Show) -> None:
    screen = show(session)
    before = session.plan
    screen.choose("tap", "nothing (only load it)")
    message = screen.applies(f"{DOUBLES}\nraise ValueError('as it loads')")
    assert message == "Not applied: the draft failed."
    assert "as it loads" in screen.result
    assert session.plan is before


@pytest.mark.ranks
def test_an_identical_edit_makes_no_new_plan(session: gl.Session, show: Show) -> None:
    screen = show(session)
    screen.applies(DOUBLES)
    before = session.plan
    assert screen.applies(DOUBLES) == f"Nothing to apply: plan {before.version} already has this transform."
    assert session.plan is before


@pytest.mark.ranks
def test_a_long_text_with_any_characters_is_applied_unchanged(session: gl.Session, show: Show) -> None:
    screen = show(session)
    text = source(
        "größe = '日本 <b>'",
        *(f"# {'x' * 100} {number}" for number in range(1000)),
        "return graft_input.received_list[0]",
    )
    assert len(text) > 100_000
    assert screen.applies(text).startswith("Applied")
    assert session.plan.transform is not None
    assert session.plan.transform.text == text
    assert session.run(tap_x, tap_x).frame["status"].tolist() == ["grafted"]


@pytest.mark.ranks
def test_a_transform_that_fails_on_later_data_stops_nothing_and_shows(session: gl.Session, show: Show) -> None:
    screen = show(session)
    text = source("assert graft_input.tags['layer'] == 4, 'another <layer>'", "return graft_input.received_list[0]")
    assert screen.applies(text).startswith("Applied")
    assert session.run(tap_x, tap_x).frame["status"].tolist() == ["grafted"]
    screen.settle()
    assert "fails" not in screen.in_force
    run = session.run(tap_x, tap_x, args=(5,))
    assert run.frame["status"].tolist() == ["failed"]
    assert run.target == [[[20.0] * 3] * 2]
    screen.settle()
    assert re.search(r"✗ fails in \d+ of the newest \d+ rows: AssertionError: another <layer>", screen.in_force)
    assert "x on target[0]" in screen.in_force
    screen.applies(DOUBLES)
    assert "fails" not in screen.in_force


# ---- the tensors to try on ------------------------------------------------------------------------------------------


def both_taps(layer: int = 0) -> None:
    for name in ("x", "y"):
        gl.tap(name, torch.full((2,), own_value() + layer), layer=layer)


@pytest.mark.ranks
def test_kept_taps_are_offered_once_each_before_the_taps_that_are_not_kept(session: gl.Session, show: Show) -> None:
    session.edit(b2t=None, keep="name == 'y' and layer < 2")
    for layer in (0, 1, 1, 2):
        session.run(both_taps, both_taps, args=(layer,))
    screen = show(session)
    offered = screen.options("tap")
    assert offered[0] == "nothing (only load it)"
    ys = [label for label in offered if label.startswith("y")]
    assert ys == ["y · layer=0 · target[0]", "y · layer=1 · target[0]", "y · layer=2 · not kept"]
    screen.choose("tap", "y · layer=1 · target[0]")
    newest = max(tags["step"] for tags in session.kept() if tags["name"] == "y" and tags["layer"] == 1)
    assert f"y · layer=1 · target[0] · step {newest} in" in screen.tries(DOUBLES)


@pytest.mark.ranks
def test_without_kept_tensors_a_draft_is_only_loaded_and_a_button_keeps_the_tap(show: Show) -> None:
    with gl.launch(1, 1) as session:
        screen = show(session)
        assert screen.options("tap") == ["nothing (only load it)"]
        assert screen.shown("kept-hint") == "No tensors are kept, so a draft is only loaded, not run."
        assert "✓ loads; not run on any tensors" in screen.tries(RAISES)
        for layer in (0, 1):
            session.run(both_taps, both_taps, args=(layer,))
        screen.settle()
        assert screen.chosen("tap") == "nothing (only load it)"
        assert session.plan.keep is None
        screen.choose("tap", "y · layer=1 · not kept")
        screen.browser.kernel_works()
        assert screen.find("keep").description == "Keep this tap"
        screen.click("keep")
        screen.settle()
        assert session.plan.keep == "name == 'y' and layer == 1"
        assert screen.shown("kept-hint") == "Its tensors are not kept yet; they arrive with the next step."
        assert screen.find("keep").layout.display == "none"
        for layer in (0, 1):
            session.run(both_taps, both_taps, args=(layer,))
        wait_until(lambda: screen.editor.refresh() or screen.shown("kept-hint") == "", "what is kept")
        assert screen.chosen("tap") == "y · layer=1 · target[0]"
        assert "✗ failed on y · layer=1 · target[0]" in screen.tries(RAISES)


def many_taps(count: int) -> None:
    for number in range(count):
        gl.tap(f"model.layers.{number}.out", torch.ones(2), part=number % 2)


@pytest.mark.ranks
def test_every_tap_can_be_found_and_tried_on_among_thousands(show: Show) -> None:
    with gl.launch(1, 1) as session:
        session.run(tap_x, tap_x)
        screen = show(session)
        assert screen.find("tap-search").layout.display == "none"
        session.edit(keep="search('[.]1[.]|[.]1462[.]', name)", compare=None)
        session.run(many_taps, many_taps, args=(1463,))
        wait_until(lambda: screen.editor.refresh() or len(screen.options("tap")) == LISTED + 1, "the taps in the menu")
        screen.settle()
        assert screen.find("tap-search").layout.display is None
        assert screen.shown("more-taps") == f"{1463 + 1 - LISTED:,} more; type part of a name to find them"
        assert "model.layers.1462.out · part=0 · target[0]" in screen.options("tap"), "what is kept comes first"
        screen.enter("tap-search", "1401 PART=1")
        screen.settle()
        chosen = screen.chosen("tap")
        assert screen.options("tap") == ["nothing (only load it)", chosen, "model.layers.1401.out · part=1 · not kept"]
        screen.choose("tap", "model.layers.1401.out · part=1 · not kept")
        screen.click("keep")
        screen.settle()
        assert session.plan.keep is not None
        assert session.plan.keep.endswith("or (name == 'model.layers.1401.out' and part == 1)")
        screen.enter("tap-search", "no such tap")
        screen.settle()
        assert screen.shown("more-taps") == "no tap has these words in its name or tags"
        assert screen.chosen("tap") == "model.layers.1401.out · part=1 · not kept"


@pytest.mark.ranks
def test_the_first_kept_tap_is_chosen_unless_the_person_has_chosen(session: gl.Session, show: Show) -> None:
    screen = show(session)
    assert screen.chosen("tap") == "x · layer=4 · target[0]"
    screen.choose("tap", "nothing (only load it)")
    screen.settle()
    session.edit(keep="True")
    session.run(both_taps, both_taps)
    wait_until(lambda: screen.editor.refresh() or len(screen.options("tap")) > 3, "what is kept")
    assert screen.chosen("tap") == "nothing (only load it)"
    # Which is how a transform for other data gets past a pair that it does not fit.
    assert screen.applies(RAISES).startswith("Applied")


@pytest.mark.ranks
def test_a_draft_is_tried_on_what_the_plan_grafts_and_no_other_pair_blocks_it(show: Show) -> None:
    with gl.launch(1, 1) as session:
        # Pairs that an earlier plan kept, as the runs of a verdict leave them.
        session.edit(keep="True")
        session.run(both_taps, both_taps, args=(0,))
        session.edit(keep=None)
        screen = show(session)
        wait_until(lambda: screen.editor.refresh() or len(screen.options("tap")) > 2, "what is kept")
        assert screen.chosen("tap") == "nothing (only load it)", "left over, and none of the plan's"
        session.edit(b2t="name == 'y'")
        screen.settle()
        assert screen.chosen("tap") == "y · layer=0 · target[0]"
        assert screen.applies(RAISES).startswith("Not applied: the draft failed.")
        screen.choose("tap", "x · layer=0 · target[0]")
        assert "✗ failed on x · layer=0 · target[0]" in screen.tries(RAISES)
        assert screen.applies(RAISES).startswith("Applied as plan")
        assert "not run on any tensors" in screen.shown("result")


@pytest.mark.ranks
def test_a_tap_at_which_the_default_transform_fails_can_be_tried_on(session: gl.Session, show: Show) -> None:
    def wide_and_tall() -> None:
        me = gl.here()
        assert me is not None
        gl.tap("w", torch.full((4, 2) if me.side == "baseline" else (2, 5), own_value()))

    session.edit(b2t="name == 'w'", keep="name == 'w'")
    session.run(wide_and_tall, wide_and_tall)
    screen = show(session)
    assert "fails in 1 of the newest 1 rows: TransformError: the default transform" in screen.in_force
    screen.choose("tap", "w · target[0]")
    text = source("return graft_input.received_list[0].mean().expand(2, 5)")
    assert "before (failed) with the draft rel_l2 - 1.00e+00" in screen.tries(text)
    assert screen.applies(text).startswith("Applied")
    assert session.run(wide_and_tall, wide_and_tall).frame["status"].tolist() == ["grafted"]


TAGS = st.dictionaries(
    st.from_regex(r"[a-z_]{1,5}", fullmatch=True) | st.sampled_from(["if", "search", "my_rank", "limit", "täg"]),
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    max_size=4,
)


@given(
    name=st.text(min_size=1, max_size=8),
    tags=TAGS,
    other=st.text(min_size=1, max_size=8),
    keep=st.sampled_from([None, "layer < 4 # early", "layer if step else name", "True", "name == 'a' or layer == 1"]),
)
def test_the_filter_of_a_tap_matches_it_and_no_other_name(
    name: str, tags: dict[str, Any], other: str, keep: str | None
) -> None:
    try:
        name.encode(), other.encode(), repr(tags).encode()
    except UnicodeEncodeError:
        return
    # Kept tags arrive as plain values, and NaN is not one.
    tags = {tag: plain(value) for tag, value in tags.items() if tag not in ("name", "step", "side", "rank")}
    [choice] = kept_options([{"name": name, "step": 3, "side": "target", "rank": 1, **tags}])
    mine, its = {"name": name, "step": 0, **tags}, {"name": other, "step": 0, **tags}
    chosen = compile_filter(choice.filter)
    assert chosen.matches(mine)
    assert chosen.matches(its) is (name == other)
    plan = GraftPlan(keep=keep)
    wider = filter_to_keep(plan, choice)
    for tap in (mine, its):
        before = compile_filter(keep).matches(tap)
        assert compile_filter(wider).matches(tap) is (before or chosen.matches(tap))
    assert filter_to_keep(GraftPlan(keep=wider), choice) == wider


@pytest.mark.parametrize(
    "keep", ["not (name == 'a')", "layer < 4 and (name == 'a')", "(name == 'a') if step else layer"]
)
def test_a_tap_that_a_filter_only_mentions_is_added_to_it(keep: str) -> None:
    [choice] = kept_options([{"name": "a", "step": 0, "side": "target", "rank": 0}])
    wider = filter_to_keep(GraftPlan(keep=keep), choice)
    assert compile_filter(wider).matches({"name": "a", "step": 0, "layer": 9})
    assert filter_to_keep(GraftPlan(keep=wider), choice) == wider
    # What is still being typed is extended as it stands.
    assert join_filters("layer <", "name == 'a'") == "layer < or (name == 'a')"
    assert join_filters("True", "name == 'a'") == "True"


def test_without_a_tap_the_grafted_or_else_the_compared_taps_are_kept() -> None:
    assert filter_to_keep(GraftPlan(b2t="layer < 2", t2b="layer > 4", keep="name == 'x'"), None) == (
        "name == 'x' or (layer < 2) or (layer > 4)"
    )
    assert filter_to_keep(GraftPlan(b2t=" "), None) == "True"
    with pytest.warns(gl.GraftWarning, match="does nothing"):
        nothing = GraftPlan(compare=None)
    assert filter_to_keep(nothing, None) == ""


@pytest.mark.ranks
def test_a_tag_with_the_name_of_an_option_of_try_transform_is_left_out(session: gl.Session, show: Show) -> None:
    def tap_limit() -> None:
        gl.tap("z", torch.ones(2), limit=0, transform="t", tags=None)

    session.edit(keep="name == 'z'")
    session.run(tap_limit, tap_limit)
    screen = show(session)
    screen.choose("tap", "z · limit=0 · transform=t · tags=None · target[0]")
    assert "✓ ran on z" in screen.tries(DOUBLES)


# ---- functions and dotted paths -------------------------------------------------------------------------------------

CELL = """
from __future__ import annotations
import torch
import graftlab as gl
from graftlab import GraftTransformInput

def by_annotation(g: gl.GraftTransformInput) -> torch.Tensor:
    return 3 * g.received_list[0]

def by_name(graft_input, scale=2.0, *, more=None):
    return scale * graft_input.received_list[0]

def unlike(layer): ...
def too_many(graft_input, other): ...
def none(): ...
def other_type(graft_input: int): ...
def only_keywords(*, graft_input): ...
def _private(graft_input): ...
"""


def test_functions_that_look_like_transforms_are_proposed() -> None:
    evaluated = run_cell("import graftlab as gl\ndef evaluated(g: gl.GraftTransformInput): ...")
    names = {**run_cell(CELL), **evaluated, "number": 3}
    assert likely_transforms(functions_in(names)) == ["by_annotation", "by_name", "evaluated"]


@pytest.mark.ranks
def test_a_function_of_the_notebook_is_tried_and_applied(session: gl.Session, show: Show) -> None:
    names = run_cell(CELL)
    for transform in (DOUBLES, None):
        session.edit(transform=transform)
    screen = show(session, names=names)
    assert screen.find("name").options[:2] == ("by_annotation", "by_name")
    screen.name("by_annotation")
    screen.settle()
    assert "return 3 * g.received_list[0]" in screen.source
    screen.click("try")
    screen.settle()
    assert "max_abs 1.00e+01 1.00e+01 = same" in screen.result
    screen.click("apply")
    screen.settle()
    assert screen.message == f"Applied as plan {session.plan.version}."
    assert "In force: by_annotation" in screen.in_force
    assert "not applied" not in screen.in_force
    assert session.run(tap_x, tap_x).target == [[[30.0] * 3] * 2]
    # What the notebook calls so now is meant, unless an earlier plan's is asked for.
    version = session.plan.version
    names.update(run_cell(CELL.replace("3 * g", "4 * g")))
    names["brand_new"] = run_cell("def brand_new(graft_input): ...")["brand_new"]
    screen.settle()
    assert "brand_new" in screen.find("name").options
    # Texts that were in force have no name to choose.
    assert not [name for name in screen.find("name").options if "\n" in name]
    assert "return 4 * g.received_list[0]" in screen.source
    screen.click("apply")
    screen.settle()
    assert session.run(tap_x, tap_x).target == [[[40.0] * 3] * 2]
    screen.name(f"by_annotation (plan {version})")
    screen.click("apply")
    screen.settle()
    assert session.run(tap_x, tap_x).target == [[[30.0] * 3] * 2]


@pytest.mark.ranks
def test_a_dotted_path_is_tried_in_another_process_and_then_applied(
    session: gl.Session, show: Show, importable: str
) -> None:
    screen = show(session)
    screen.name(importable)
    screen.click("try")
    screen.settle()
    assert "✓ ran on x" in screen.result
    assert "of_a_path" not in sys.modules
    assert "has not been imported" in screen.source
    screen.click("apply")
    screen.settle()
    assert session.plan.transform is not None
    assert session.plan.transform.kind == "path"
    assert session.run(tap_x, tap_x).target == [[[5.0] * 3] * 2]


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "no function is chosen"),
        ("missing", "the notebook has no function 'missing'"),
        ("number", "the notebook has no function 'number'"),
        ("no_such_module.f", "module 'no_such_module' cannot be imported"),
        ("captures", "cannot be sent to the ranks"),
    ],
)
def test_an_unusable_name_is_reported(name: str, message: str, session: gl.Session, show: Show) -> None:
    cell = run_cell("import threading\nlock = threading.Lock()\ndef captures(graft_input):\n    return lock")
    screen = show(session, names={**cell, "number": 3})
    before = session.plan
    screen.name(name)
    screen.click("apply")
    screen.settle()
    assert message in screen.message + screen.result
    assert session.plan is before


@pytest.mark.ranks
def test_restoring_the_default_needs_no_try(session: gl.Session, show: Show) -> None:
    session.edit(transform=RAISES)
    screen = show(session)
    screen.choose("kinds", "Default")
    screen.settle()
    assert screen.find("try").disabled
    assert screen.source.startswith("# The default transform.")
    screen.click("apply")
    screen.settle()
    assert session.plan.transform is None
    # What was written is still there.
    screen.choose("kinds", "Python")
    screen.browser.kernel_works()
    assert screen.text == RAISES


@pytest.mark.parametrize(
    ("version", "label"),
    [
        (Version(3, TransformSpec("path", "math.sin")), "plan 3: math.sin"),
        (Version(3, TransformSpec("path", "math.sin", where="layer == 1")), "plan 3: math.sin, where layer == 1"),
        (Version(None, TransformSpec("source", DOUBLES)), ", 2 lines"),
        (Version(0, None), "plan 0: "),
    ],
)
def test_a_version_has_the_plan_and_the_length_of_its_text(version: Version, label: str) -> None:
    assert label in version.label
    assert ("line" in version.label) == label.endswith("lines")
    assert version.label.startswith("not applied: ") == (version.plan is None)


@pytest.mark.parametrize("name", ["halves", "math.", "math.sin(1)", "1.5"])
def test_what_is_neither_a_function_nor_a_dotted_path_is_refused(name: str) -> None:
    with pytest.raises(gl.TransformError, match=f"the notebook has no function {re.escape(repr(name))}; choose one"):
        spec_of(Draft("name", name), {}, [])
    assert spec_of(Draft("name", "math.sin"), {}, []) == TransformSpec("path", "math.sin")
    for where, wanted in (("  ", None), (" layer == 1\n", "layer == 1")):
        assert spec_of(Draft("name", "math.sin", where), {}, []) == TransformSpec("path", "math.sin", where=wanted)


# ---- the plan can be changed from anywhere --------------------------------------------------------------------------


@pytest.mark.ranks
def test_what_is_set_elsewhere_shows_at_the_next_tick(session: gl.Session, show: Show, importable: str) -> None:
    session.edit(transform=RAISES)
    screen = show(session)
    assert "✗ failed" in screen.tries(RAISES)
    assert screen.page.error.startswith("line 3")
    session.edit(transform=DOUBLES)
    screen.settle()
    assert (screen.text, screen.page.error) == (DOUBLES, "")
    assert "Changed elsewhere, and shown here" in screen.message
    assert f"since plan {session.plan.version}" in screen.in_force
    session.edit(transform=importable)
    screen.settle()
    assert (screen.chosen("kinds"), screen.find("name").value) == ("Function or path", importable)
    session.edit(transform=None)
    screen.settle()
    assert screen.chosen("kinds") == "Default"
    session.edit(transform=TEMPLATE)
    screen.settle()
    assert (screen.chosen("kinds"), screen.text) == ("Python", TEMPLATE)
    # Another part of the plan is none of its business.
    session.edit(compare="False")
    screen.settle()
    assert screen.text == TEMPLATE


@pytest.mark.ranks
def test_typed_text_is_not_overwritten_and_revert_shows_the_one_in_force(session: gl.Session, show: Show) -> None:
    screen = show(session)
    screen.type("mine")
    screen.settle()
    session.edit(transform=DOUBLES)
    screen.settle()
    assert screen.text == "mine"
    assert "Changed elsewhere to transform (text " in screen.message
    assert "● edited, not applied" in screen.in_force
    screen.click("revert")
    screen.settle()
    assert screen.text == DOUBLES
    assert "not applied" not in screen.in_force
    # It is not lost either.
    [aside] = [label for label in screen.options("version") if label.startswith("not applied")]
    screen.choose("version", aside)
    screen.click("load")
    screen.settle()
    assert screen.text == "mine"


@pytest.mark.ranks
def test_typed_text_that_has_not_arrived_is_not_overwritten(session: gl.Session, show: Show) -> None:
    screen = show(session)
    screen.type("mine")
    session.edit(transform=DOUBLES)
    screen.editor.refresh()
    screen.settle()
    assert screen.text == "mine"
    assert "Changed elsewhere to transform (text " in screen.message
    assert "● edited, not applied" in screen.in_force


@pytest.mark.ranks
def test_restoring_the_previous_text_is_an_edit_once_a_new_one_is_in_force(session: gl.Session, show: Show) -> None:
    screen = show(session)
    screen.applies(DOUBLES)
    screen.type("mine")
    screen.settle()
    session.edit(transform=RAISES)
    screen.settle()
    screen.type(DOUBLES)
    screen.settle()
    assert "● edited, not applied" in screen.in_force
    session.edit(transform=None)
    screen.settle()
    assert screen.text == DOUBLES


@pytest.mark.ranks
def test_two_editors_show_each_others_changes(session: gl.Session, show: Show) -> None:
    one, other = show(session), show(session)
    one.applies(DOUBLES)
    other.settle()
    assert other.text == DOUBLES
    other.applies(TEMPLATE)
    one.settle()
    assert one.text == TEMPLATE


@pytest.mark.ranks
def test_a_tick_without_changes_sends_nothing_to_the_browser(session: gl.Session, show: Show) -> None:
    screen = show(session)
    screen.tries(RAISES)
    screen.settle()
    sent: list[Any] = []
    screen.browser.on_update.append(lambda comm_id, changed: sent.append(changed))
    for _ in range(5):
        screen.editor.refresh()
    assert sent == []


@pytest.mark.ranks
def test_the_sessions_refresher_keeps_it_up_to_date(session: gl.Session) -> None:
    editor = TransformEditor(session, names={})
    try:
        assert refresher_of(session).running
        session.edit(transform=DOUBLES)
        wait_until(lambda: editor.editor.value == DOUBLES, "the refresh")
    finally:
        editor.close()
    assert not refresher_of(session).running


# ---- versions -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_versions_are_listed_compared_loaded_and_restored(session: gl.Session, show: Show) -> None:
    first = session.edit(transform=DOUBLES).version
    session.edit(compare="False")
    triples = DOUBLES.replace("2 *", "3 *")
    second = session.edit(transform=triples).version
    screen = show(session)
    labels = screen.options("version")
    assert re.fullmatch(rf"plan {second}: transform \(text \w+\), 2 lines \(in force\)", labels[0])
    assert re.fullmatch(rf"plan {first}: transform \(text \w+\), 2 lines", labels[1])
    assert labels[2].endswith("the default transform")
    screen.choose("version", labels[1])
    # The text on the screen is compared, whatever the kernel has of it.
    screen.type(triples.replace("3 *", "4 *"))
    screen.click("compare")
    screen.settle()
    assert "- return 2 * graft_input" in screen.shown("difference")
    assert "+ return 4 * graft_input" in screen.shown("difference")
    # The difference follows the text in the editor.
    screen.type(triples.replace("3 *", "5 *"))
    screen.settle()
    assert "+ return 5 * graft_input" in screen.shown("difference")

    screen.click("load")
    screen.settle()
    assert screen.text == DOUBLES
    assert screen.shown("difference") == "no differences"
    assert session.plan.version == second
    assert "● edited, not applied" in screen.in_force
    assert len([label for label in screen.options("version") if label.startswith("not applied")]) == 1

    screen.choose("version", labels[0])
    screen.settle()
    assert screen.shown("difference") == ""
    screen.choose("version", labels[1])
    screen.click("restore")
    screen.settle()
    assert session.plan.version == second + 1
    assert session.plan.transform is not None
    assert session.plan.transform.text == screen.text == DOUBLES
    assert "not applied" not in screen.in_force
    assert session.run(tap_x, tap_x).target == [[[20.0] * 3] * 2]


@pytest.mark.ranks
def test_any_kind_of_version_is_restored(session: gl.Session, show: Show, importable: str) -> None:
    mine = run_cell("def mine(graft_input):\n    return 7 * graft_input.received_list[0]")["mine"]
    versions = [session.edit(transform=transform).version for transform in (mine, importable, None, DOUBLES)]
    screen = show(session)
    for version, value in zip(versions, (70.0, 5.0, 10.0), strict=False):
        [label] = [label for label in screen.options("version") if label.startswith(f"plan {version}:")]
        screen.choose("version", label)
        screen.click("restore")
        screen.settle()
        assert "not applied" not in screen.in_force
        assert session.run(tap_x, tap_x).target == [[[value] * 3] * 2]
    screen.click("compare")
    screen.settle()
    assert screen.shown("difference") == "no differences"


# ---- its end --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_closing_the_session_is_shown_and_disables_every_button(show: Show) -> None:
    with gl.launch(1, 1) as session:
        screen = show(session)
        screen.type("mine")
    screen.settle()
    assert screen.message == "The session is closed; its plan can no longer be changed."
    for name in ("try", "apply", "revert", "restore"):
        assert screen.find(name).disabled
    screen.editor.editor.submit("apply")
    screen.settle()
    assert screen.message == "The session is closed; its plan can no longer be changed."
    assert screen.text == "mine"


@pytest.mark.ranks
def test_closing_the_session_ends_a_running_try(show: Show) -> None:
    with gl.launch(1, 1) as session:
        screen = show(session, limit=0.5)
        screen.type(source("return 1").replace("def", "while True: pass\ndef"))
        screen.click("apply")
        screen.browser.kernel_works()
    screen.settle()
    assert session.plan.transform is None


@pytest.mark.ranks
def test_closing_it_ends_its_thread_and_leaves_nothing_in_the_browser(session: gl.Session, show: Show) -> None:
    others = set(threading.enumerate())
    screen = show(session)
    screen.tries(DOUBLES)
    new = set(threading.enumerate()) - others
    [worker] = [thread for thread in new if thread.name.startswith("graftlab-TransformEditor")]
    screen.choose("kinds", "Default")
    screen.settle()
    screen.editor.close()
    screen.editor.close()
    worker.join(60)
    assert not worker.is_alive()
    left = {screen.browser.models[comm_id]["_model_name"] for comm_id in screen.browser.comms}
    assert {name for name in left if not re.search("Layout|Style", name)} == set()
    # Late events have no effect.
    screen.editor.refresh()
    screen.editor.show_error("late")
    assert session.run(tap_x, tap_x).frame["status"].tolist() == ["grafted"]


@pytest.mark.ranks
def test_an_error_in_a_callback_is_shown(session: gl.Session, show: Show, monkeypatch: pytest.MonkeyPatch) -> None:
    session.run("gl.tap('unkept', torch.ones(1))", "gl.tap('unkept', torch.ones(1))")
    screen = show(session)

    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("in the session")

    monkeypatch.setattr(session, "try_transform", fails)
    screen.tries(DOUBLES)
    assert "ZeroDivisionError: in the session" in screen.message
    assert not screen.find("try").disabled
    monkeypatch.setattr(session, "edit", fails)
    screen.choose("tap", "unkept · not kept")
    screen.browser.kernel_works()
    screen.click("keep")
    screen.browser.kernel_works()
    assert "ZeroDivisionError: in the session" in screen.message
    screen.editor.show_error("a tick failed")
    assert screen.message == "a tick failed"
    screen.editor.show_error("")
    assert "ZeroDivisionError" in screen.message


@pytest.mark.parametrize(
    ("error", "line"),
    [
        ("TransformError: the shapes differ", "TransformError: the shapes differ"),
        ("Traceback (most recent call last):\n  File a\n    x\nValueError: no\n  more", "ValueError: no\n  more"),
        ("Traceback (most recent call last):\n  File a\nmy.Oddity: no", "my.Oddity: no"),
        ("the draft called exit(0)\nTraceback (most recent call last):\nSystemExit: 0", "the draft called exit(0)"),
        ("", ""),
    ],
)
def test_a_traceback_is_summarised_by_its_exception(error: str, line: str) -> None:
    assert summary(error) == line


def test_a_draft_that_was_not_applied_is_listed_once_with_its_filter() -> None:
    panel: Any = SimpleNamespace(button=lambda *_: widgets.Button(), submit=print)
    versions = VersionList(panel)
    applied = source("return graft_input.target")
    versions.follow([GraftPlan(), GraftPlan(transform=TransformSpec("source", applied, where="True"))])
    drafts = (Draft("text", DOUBLES, "name == 'x'"), Draft("text", "  \n"), Draft("name", "math.sin"))
    for draft in (*drafts, Draft("text", applied, "True")):
        versions.save_draft(draft)
        versions.save_draft(draft)
    (only,) = [version for label, version in versions.menu.options if label.startswith("not applied")]
    assert (only.spec.text, only.spec.where) == (DOUBLES, "name == 'x'")
    # Of many, the newest are listed, the last one first.
    for number in range(30):
        versions.save_draft(Draft("text", f"x = {number}"))
    listed = [version.spec.text for label, version in versions.menu.options if label.startswith("not applied")]
    assert listed == [f"x = {number}" for number in range(29, 19, -1)]
