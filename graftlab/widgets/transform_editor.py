"""The transform editor: write a transform, try it on kept tensors and publish it while the ranks run.

Try and Apply use the draft on the screen. Everything slow runs in the background.

The plan can also change elsewhere. The editor follows it unless it has an unpublished draft; then it keeps the draft
and reports that a different transform is in force.
"""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ipywidgets as widgets

from graftlab.base.tags import PLACE_TAGS
from graftlab.control.core import SessionCore, internals_of
from graftlab.errors import SessionError
from graftlab.filters.check import FilterCheck, check_summary
from graftlab.rows.schema import Row
from graftlab.transforms import TransformSpec
from graftlab.transforms.spec import Specs
from graftlab.verdict.conclusion import of_newest_run
from graftlab.widgets import trial_view as view
from graftlab.widgets.code_editor import NOT_BUILT, TextAreaEditor
from graftlab.widgets.draft_box import DraftBox
from graftlab.widgets.drafts import (
    TEMPLATE,
    Draft,
    Version,
    functions_in,
    label_of,
    likely_transforms,
    source_of,
    spec_of,
)
from graftlab.widgets.kept_taps import TapOption, concerns
from graftlab.widgets.panel import Panel, row, update
from graftlab.widgets.plan_view import UndoButtons, adoption
from graftlab.widgets.refresher import explain
from graftlab.widgets.tap_chooser import TapChooser
from graftlab.widgets.version_list import VersionList

ROWS_A_TICK = 500
"""Rows read in one tick to find out whether the transform in force fails."""

_UNTOUCHED = Draft("text", TEMPLATE)


@dataclass(frozen=True)
class DraftTask:
    """A draft to try on the tensors of ``tap`` if any are kept, then to publish or not."""

    draft: Draft
    tap: TapOption | None = None
    tried: bool = True
    published: bool = False

    @property
    def label(self) -> str:
        on = f" on {self.tap.label}" if self.tried and self.tap is not None and self.tap.kept else ""
        return f"{'applying' if self.published else 'trying'}{on} …"


class TaskQueue:
    """The current task and the waiting ones. Not safe for several threads at once."""

    def __init__(self) -> None:
        self.current: DraftTask | None = None
        self._waiting: list[DraftTask] = []

    def add(self, task: DraftTask) -> None:
        # Of the waiting tries only the newest matters, and none if an Apply follows, which tries the draft too.
        self._waiting = [*(waiting for waiting in self._waiting if waiting.published), task]

    def begin_next(self) -> DraftTask | None:
        """Make the next task current until :meth:`end` and return it; None when no task waits."""
        self.current = self._waiting.pop(0) if self._waiting else None
        return self.current

    def end(self) -> None:
        self.current = None

    def clear(self) -> None:
        """Drop the waiting tasks."""
        self._waiting.clear()

    @property
    def open(self) -> list[DraftTask]:
        """All tasks that are not finished, in order."""
        return [*([] if self.current is None else [self.current]), *self._waiting]


class TransformEditor(Panel):
    """Write, try and apply the transform of a session's plan while its ranks run: ``session.transform_editor()``.

    ``names`` maps names to functions (default: the notebook's variables). A try is stopped after ``limit`` seconds.
    """

    style_sheet = view.STYLE
    closed_message = "The session is closed; its plan can no longer be changed."

    def __init__(self, session: SessionCore, *, names: Mapping[str, Any] | None = None, limit: float = 5.0) -> None:
        super().__init__(session)
        self.limit = limit
        self._names = _notebook_names() if names is None else names
        self._tasks = TaskQueue()
        self._publishing: tuple[Specs, Draft] | None = None
        self._live = session.live_taps()
        self._rows: list[Row] = []
        self._functions: dict[str, Any] = {}

        in_force = session.plan.transform
        self._in_force = in_force
        # A draft that counts as published, whatever the plan says; None once another transform was published elsewhere.
        self._settled: Draft | None = _UNTOUCHED if in_force is None else None

        text = in_force.text if isinstance(in_force, TransformSpec) and in_force.kind == "source" else TEMPLATE
        self._header = widgets.HTML().add_class("graftlab-in-force")
        self._box = DraftBox(text, self._source_of)
        self.editor = self._box.editor
        self._taps = TapChooser(self, lambda: self._rows)
        try_ = "Run the draft on the chosen tensors, without touching the ranks"
        apply = "Try the draft, and publish it if that succeeds"
        self._try = self.button("Try", "try", try_, partial(self.submit, "try"))
        self._apply = self.button("Apply", "apply", apply, partial(self.submit, "apply"))
        self._revert = self.button("Revert", "revert", "Show the transform in force", partial(self.submit, "revert"))
        keys = NOT_BUILT if isinstance(self.editor, TextAreaEditor) else "Shift-Ctrl-Enter tries"
        self._keys = widgets.HTML(f'<span class="quiet">{keys}</span>')
        self._progress = widgets.HTML().add_class("graftlab-busy")
        self._trial = widgets.HTML().add_class("graftlab-result")
        self._adopted = widgets.HTML().add_class("graftlab-adopted")
        self._undo = UndoButtons(self)
        self._versions = VersionList(self)
        self._versions.follow(internals_of(session).plans.lasting())
        if in_force is not None:
            self._box.take(self._versions.in_force.draft)

        for choice in (self._box.kinds, self._box.name, self._box.where):
            choice.observe(self.guarded(lambda _: self._on_choice()), "value")
        self.editor.on_change(self.guarded(lambda _: self._on_change()))
        self.editor.on_submit(self.guarded(lambda text, action: self.submit(action, kind="text", text=text)))
        self.add_class("graftlab-transform-editor")
        self._open(
            [
                self._header,
                self._box,
                self._taps,
                row(self._try, self._apply, self._revert, self._undo, self._keys, self._progress),
                self._message_line,
                self._trial,
                self._adopted,
                self._versions,
            ],
            {**self._box.inputs, "tap": self._taps.menu, "version": self._versions.menu},
        )

    def close(self) -> None:
        """Remove the editor from the browser; the session stays open, and the result of a running try is dropped."""
        with self._lock:
            self._tasks.clear()
        super().close()

    def static_html(self, with_figures: bool = False) -> str:
        plan = self.session.plan
        if plan.transform is None:
            return f"<p>Plan {plan.version} has the default transform.</p>"
        return f"<p>Transform of plan {plan.version}</p><pre>{html.escape(source_of(plan.transform))}</pre>"

    # ---- events from the browser --------------------------------------------------------------------------------

    def _act(self, action: str, values: dict[str, Any]) -> None:
        draft, tap = self._box.of(values), self._taps.tap_of(values["tap"])
        if action in ("try", "apply"):
            self._add(DraftTask(draft, tap, published=action == "apply"))
            return
        version: Version | None = values["version"]
        with self._lock:
            if action == "keep":
                self._taps.keep(tap)
            elif action == "revert":
                self._replace(draft, self._versions.in_force)
                self.say("")
            elif version is not None and action == "compare":
                self._versions.compare(version, self._source_of(draft))
            elif version is not None:
                self._use(version, action, draft)

    def _on_choice(self) -> None:
        with self._lock:
            self._show_source()
            self.say("")

    def _on_change(self) -> None:
        with self._lock:
            if self.editor.offer_declined:
                self._report_change()
            elif self.editor.error_message:
                self.editor.clear_error()
            self._compare_again()
            self._show()

    # ---- the draft ----------------------------------------------------------------------------------------------

    def _is_applied(self, draft: Draft) -> bool:
        return draft in (self._settled, self._versions.in_force.draft)

    def _replace(self, draft: Draft, version: Version) -> None:
        """Show a version instead of ``draft``, and save the draft if it exists nowhere else."""
        if not self._is_applied(draft) and draft.text != TEMPLATE:
            self._versions.save_draft(draft)
        self._box.take(version.draft)
        self._compare_again()

    def _use(self, version: Version, action: str, draft: Draft) -> None:
        self._replace(draft, version)
        if action == "restore" and version.plan is not None:
            # It has been in force before, so it needs no try.
            self._add(DraftTask(version.draft, tried=False, published=True))
        else:
            self.say(f"Loaded {version.label}. Apply publishes it.")

    def _source_of(self, draft: Draft) -> str:
        try:
            return source_of(spec_of(draft, self._names, self._versions.versions))
        except Exception as error:
            # Try shows the full message; the name may still be incomplete.
            return "\n".join(f"# {line}" for line in explain(error).splitlines())

    def _show_source(self) -> None:
        self._box.show_source()
        self._compare_again()

    def _compare_again(self) -> None:
        if self._versions.compared is not None:
            self._versions.compare(self._versions.compared, self._source_of(self._box.draft))

    # ---- trying and applying, in the background -----------------------------------------------------------------

    def _add(self, task: DraftTask) -> None:
        with self._lock:
            self._tasks.add(task)
            self.in_background(self._work)
            self._show()

    def _work(self) -> None:
        with self._lock:
            task = self._tasks.begin_next()
            if task is None:
                return
            # Otherwise the result of an earlier draft would look like this one's.
            update(self._trial, value="")
            self.say("")
        try:
            self.guarded(self._run)(task)
        finally:
            with self._lock:
                self._tasks.end()
                self._show()

    def _run(self, task: DraftTask) -> None:
        spec = spec_of(task.draft, self._names, self._versions.versions)
        if spec is None and not task.published:
            raise SessionError("the default transform cannot be tried here: the rows show its result at each tap")
        if (task.tried and spec is not None and not self._try_succeeds(task, spec)) or not task.published:
            return
        if spec == self.session.plan.transform:
            self.say(f"Nothing to apply: plan {self.session.plan.version} already has this transform.")
            return
        with self._lock:
            self._publishing = spec, task.draft
        try:
            # Without the lock, because loading the transform runs user code.
            plan = self.session.edit(transform=spec)
        finally:
            with self._lock:
                self._follow_plan()
                self._publishing = None
        missed = self._filter_warning(task.draft.where)
        self.say(f"Applied as plan {plan.version}.{missed}", "overtaken" if missed else "good")

    def _filter_warning(self, where: str) -> str:
        """A warning if the filter matches none of the taps seen; empty otherwise."""
        check, taps = FilterCheck(where), self.session.taps
        # A filter on the step or rank may match later, whatever values the taps had when first seen.
        if not where.strip() or not taps or check.filter is None or check.filter.names & PLACE_TAGS:
            return ""
        check.catch_up(taps)
        return "" if check.hits else f" Its filter matches {check_summary(check, taps)}"

    def _try_succeeds(self, task: DraftTask, spec: Specs) -> bool:
        tap = task.tap if task.tap is not None and task.tap.kept else None
        # A tap to which the draft would not apply says nothing against publishing it.
        is_left_out = task.published and tap is not None and not concerns(self.session.plan, spec, tap)
        selection = {} if tap is None or is_left_out else tap.selection
        trial = self.session.try_transform(spec, limit=self.limit, **selection)
        with self._lock:
            if self._closed:
                return False
            update(self._trial, value=view.trial_html(trial))
            on_screen = task.draft == self._box.draft and task.draft.kind == "text"
            if trial.error is None:
                if on_screen:
                    self.editor.clear_error()
                return True
            if on_screen:
                self.editor.show_error(view.summary(trial.error), trial.error_line)
            if task.published:
                elsewhere = " To apply it anyway, try it on other tensors, or on none." if selection else ""
                self.say(f"Not applied: the draft failed.{elsewhere}", "bad")
            return False

    # ---- transform in force -------------------------------------------------------------------------------------

    def _follow(self) -> None:
        self._follow_plan()
        self._follow_functions()
        self._rows = of_newest_run(self._live.look(ROWS_A_TICK))
        self._taps.refresh()

    def _follow_plan(self) -> None:
        is_applied = self._is_applied(self._box.draft)
        if (
            not self._versions.follow(internals_of(self.session).plans.lasting())
            or self._versions.in_force.spec == self._in_force
        ):
            return
        self._in_force = self._versions.in_force.spec
        if self._publishing is not None and self._publishing[0] == self._in_force:
            self._settled = self._publishing[1]
        elif is_applied:
            self._show_new(self._versions.in_force.draft)
        else:
            self._report_change()
        self._functions.clear()

    def _show_new(self, draft: Draft) -> None:
        """Show a transform that was published elsewhere, unless the browser has newer text."""
        self._settled = None
        if draft.kind == self._box.kinds.value == "text":
            self.editor.clear_error()
            self.editor.offer(draft.text)
            self._box.where.value = draft.where
        else:
            self._box.take(draft)
        self._current_message = f"Changed elsewhere, and shown here: {label_of(self._in_force)}.", "quiet"

    def _report_change(self) -> None:
        self._settled = None
        what = f"{label_of(self._in_force)} (plan {self._versions.in_force.plan})"
        self._current_message = f"Changed elsewhere to {what}. Your draft is kept; Revert replaces it.", "overtaken"

    def _follow_functions(self) -> None:
        functions = functions_in(self._names)
        if functions != self._functions:
            self._functions = functions
            earlier = [version.draft for version in reversed(self._versions.versions)]
            names = [*likely_transforms(functions), *(draft.text for draft in earlier if draft.kind == "name")]
            self._box.propose(names)
            self._show_source()

    # ---- display ------------------------------------------------------------------------------------------------

    def _show(self) -> None:
        if self._closed:
            return
        self._show_message()
        closed, draft, plan = self.session.closed, self._box.draft, self.session.plan
        applied = self._is_applied(draft)
        update(
            self._header,
            value=view.in_force_html(self._versions.in_force, applied, plan) + view.failure_warning(plan, self._rows),
        )
        tasks = self._tasks.open
        stopped = closed or bool(tasks)
        update(self._try, disabled=stopped or draft.kind == "default")
        update(self._apply, disabled=stopped, button_style="" if applied or closed else "primary")
        for button in (self._revert, self._versions.buttons["restore"]):
            update(button, disabled=stopped)
        self._undo.show(stopped)
        update(self._progress, value=view.progress_html(tasks[0].label, len(tasks) - 1) if tasks else "")
        update(self._keys.layout, display=None if not tasks and draft.kind == "text" else "none")
        alive = [rank.label for rank in self.session.ranks if rank.alive]
        update(self._adopted, value=adoption(plan.version, self.session.adopted(plan.version), alive, closed))


def _notebook_names() -> Mapping[str, Any]:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    names: Mapping[str, Any] = {} if shell is None else shell.user_ns
    return names
