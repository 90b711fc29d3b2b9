"""The transform editor: a transform is written, tried on kept tensors and put in force while the ranks run.

What Try and Apply take is what is on the screen: the choices are asked whether the kernel has their last values, and
the text comes with the code editor's submit. Everything slow runs on the one worker thread of the widget.

The plan can be changed from anywhere. The editor follows it as long as nothing in it waits to be applied; otherwise
what was written stays, and the editor says that another transform is in force.
"""

from __future__ import annotations

import html
import logging
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import ipywidgets as widgets

from graftlab.control.core import SessionCore
from graftlab.errors import GraftError, SessionError
from graftlab.rows.schema import Row
from graftlab.transforms import TransformSpec
from graftlab.widgets import trial_view as view
from graftlab.widgets.choices import Buttons, NameBox, Questions
from graftlab.widgets.code_editor import CodeEditor, TextareaEditor, code_editor
from graftlab.widgets.drafts import (
    FIELDS,
    TEMPLATE,
    Draft,
    Version,
    fitting_functions,
    functions_in,
    label_of,
    source_of,
    spec_of,
)
from graftlab.widgets.filter_view import adoption
from graftlab.widgets.kept_taps import TapChoice
from graftlab.widgets.refresher import explain, refresher_of
from graftlab.widgets.tap_chooser import TapChooser
from graftlab.widgets.version_list import VersionList

logger = logging.getLogger(__name__)

KINDS = {
    "text": ("Python", "Write the transform here"),
    "name": ("Function or path", "Use a function of the notebook, or any that can be imported"),
    "default": ("Default", "Pair by rank, or join and cut shards"),
}
_LINES = 14
# Rows read a tick, to tell whether the transform in force fails.
_ROWS_A_TICK = 500


@dataclass(frozen=True)
class _Job:
    """Work for the worker: to be ``tried`` on the tensors of ``tap`` if any are kept, then ``published`` or not."""

    draft: Draft
    tap: TapChoice | None = None
    tried: bool = True
    published: bool = False

    @property
    def label(self) -> str:
        on = f" on {self.tap.label}" if self.tried and self.tap is not None and self.tap.kept else ""
        return f"{'applying' if self.published else 'trying'}{on} …"


class TransformEditor(widgets.VBox):  # type: ignore[misc]
    """Write, try and apply the transform of a session's plan while its ranks run: ``session.transform_editor()``.

    ``names`` is where functions are looked up by their name (default: the notebook's variables). A draft that is tried
    is stopped after ``limit`` seconds. ``plain=True`` asks for a plain text area, as in
    :func:`graftlab.widgets.code_editor.code_editor`.
    """

    def __init__(
        self, session: SessionCore, *, names: Mapping[str, Any] | None = None, limit: float = 5.0, plain: bool = False
    ) -> None:
        self.session = session
        self.limit = limit
        self._names = _notebook_names() if names is None else names
        self._plain = plain
        self._lock = threading.RLock()
        self._worker = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftlab-transform")
        self._waiting: list[_Job] = []
        self._working: _Job | None = None
        self._publishing: tuple[TransformSpec | None, Draft] | None = None
        self._live = session.live_taps()
        self._rows: list[Row] = []
        self._functions: dict[str, Any] = {}
        self._note: tuple[str, str] = ("", "quiet")
        self._trouble = ""
        self._closed = False

        in_force = session.plan.transform
        self._in_force = in_force
        # What needs no applying, whatever the plan says; None once somebody else has put another in force.
        self._settled: Draft | None = Draft("text", TEMPLATE) if in_force is None else None

        self._build(TEMPLATE if in_force is None or in_force.kind != "source" else in_force.text)
        self._versions.follow(session.plans)
        if in_force is not None:
            self._take(self._versions.in_force.draft)
        self.refresh()
        refresher_of(session).add(self)

    def _build(self, text: str) -> None:
        self._header = widgets.HTML().add_class("graftlab-in-force")
        self._kinds = Buttons(
            options=[(label, kind) for kind, (label, _) in KINDS.items()],
            tooltips=[tooltip for _, tooltip in KINDS.values()],
            style={"button_width": "auto"},
        ).add_class("graftlab-kinds")
        self._name = NameBox(
            placeholder="a function of the notebook, or package.module.function",
            ensure_option=False,
            continuous_update=False,
            layout=widgets.Layout(width="auto", flex="1 1 16em", display="none"),
        ).add_class("graftlab-name")
        self.editor = code_editor(text, language="python", lines=_LINES, plain=self._plain).add_class("graftlab-source")
        self.editor.completions = ["torch", "gl", "graft_input", *(f"graft_input.{name}" for name in FIELDS)]
        # A read-only editor for what is not written here; made when it is needed first.
        self._viewer: CodeEditor | None = None
        self._sources = widgets.VBox([self.editor])
        self._taps = TapChooser(
            self.session, self._worker, self._lock, self._pressing("keep"), lambda: self._guard(self._show)
        )
        self._try = self._button("Try", "try", "Run it on the chosen tensors; the ranks and their run are not touched")
        self._apply = self._button("Apply", "apply", "Try it, and put it in force if that went well")
        self._revert = self._button("Revert", "revert", "Show the transform in force")
        keys = "" if isinstance(self.editor, TextareaEditor) else "Shift-Ctrl-Enter tries"
        self._keys = widgets.HTML(f'<span class="quiet">{keys}</span>')
        self._busy = widgets.HTML().add_class("graftlab-busy")
        self._message = widgets.HTML().add_class("graftlab-message")
        self._trial = widgets.HTML().add_class("graftlab-result")
        self._adopted = widgets.HTML().add_class("graftlab-adopted")
        self._versions = VersionList(lambda action: self._pressing(action)())
        super().__init__(
            [
                widgets.HTML(view.STYLE, layout=widgets.Layout(display="none")),
                self._header,
                _row(self._kinds, self._name),
                self._sources,
                self._taps,
                _row(self._try, self._apply, self._revert, self._keys, self._busy),
                self._message,
                self._trial,
                self._adopted,
                self._versions,
            ]
        )
        self.add_class("graftlab-transform-editor")
        for choice in (self._kinds, self._name):
            choice.observe(lambda _: self._guard(self._on_choice), "value")
        self._questions = Questions(
            (self._kinds, self._name, self._taps.menu, self._versions.menu),
            lambda action: self._guard(self._on_pressed, action),
        )
        self.editor.on_submit(lambda text, action: self._guard(self._do, action, Draft("text", text)))
        self.editor.on_change(lambda _: self._guard(self._on_change))

    def _button(self, label: str, action: str, tooltip: str) -> widgets.Button:
        button = widgets.Button(description=label, tooltip=tooltip, layout=widgets.Layout(width="auto"))
        pressed = self._pressing(action)
        button.on_click(lambda _: pressed())
        return button.add_class(f"graftlab-{action}")

    # ---- for the caller -----------------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Show what is new in the session; called by its refresher, and cheap where nothing is."""
        with self._lock:
            if self._closed:
                return
            self._follow_plan()
            self._follow_functions()
            if self._live.behind:
                self._rows = self._live.look(_ROWS_A_TICK)
            self._taps.refresh()
            self._show()

    def show_error(self, text: str) -> None:
        """Show why a refresh failed, or that it works again."""
        with self._lock:
            self._trouble = text
            self._show()

    def close(self) -> None:
        """Take the editor out of the browser and leave the session alone; a draft that is being tried is forgotten."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._waiting.clear()
        refresher_of(self.session).remove(self)
        self._worker.shutdown(wait=False, cancel_futures=True)
        self._questions.close()
        for child in self.children:
            _close(child)
        super().close()

    # ---- what the browser says ----------------------------------------------------------------------------------

    def _guard(self, callback: Callable[..., None], *arguments: Any) -> None:
        """Nobody else would show the exceptions of a callback, or of the worker."""
        try:
            callback(*arguments)
        except Exception as error:
            if not isinstance(error, GraftError):
                logger.exception("a callback of the transform editor failed")
            self._say(explain(error), "bad")

    def _pressing(self, action: str) -> Callable[[], None]:
        return lambda: self._guard(lambda: self._questions.ask(action))

    def _on_pressed(self, action: str) -> None:
        """A button was pressed, and every choice is known; the text is not yet."""
        draft = self._draft()
        if draft.kind == "text":
            self.editor.submit(action)
        else:
            self._do(action, draft)

    def _do(self, action: str, draft: Draft) -> None:
        if action in ("try", "apply"):
            self._add(_Job(draft, self._taps.chosen, published=action == "apply"))
            return
        with self._lock:
            if action == "keep":
                self._say(self._taps.keep_chosen(), "good")
            elif action == "revert":
                self._replace(draft, self._versions.in_force)
                self._say("")
            elif action == "compare":
                self._versions.compare(self._source_of(draft))
            elif self._versions.chosen is not None:
                self._use(self._versions.chosen, action, draft)

    def _on_choice(self) -> None:
        with self._lock:
            self._show_source()
            self._say("")

    def _on_change(self) -> None:
        with self._lock:
            if self.editor.offer_declined:
                self._overtaken()
            elif self.editor.error_message:
                self.editor.clear_error()
            self._compare_again()
            self._show()

    # ---- the draft ----------------------------------------------------------------------------------------------

    def _draft(self) -> Draft:
        """What is chosen, as far as the kernel knows."""
        kind = self._kinds.value
        return Draft(kind, {"text": self.editor.value, "name": self._name.value.strip()}.get(kind, ""))

    def _is_applied(self, draft: Draft) -> bool:
        return draft in (self._settled, self._versions.in_force.draft)

    def _take(self, draft: Draft) -> None:
        """Show this draft, whatever the browser shows."""
        if draft.kind == "text":
            self.editor.set_text(draft.text)
        elif draft.kind == "name":
            self._name.value = draft.text
        self._kinds.value = draft.kind
        self._show_source()

    def _replace(self, draft: Draft, version: Version) -> None:
        """Show a version in the place of ``draft``, which is set aside if it is nowhere else."""
        if not self._is_applied(draft) and draft.text != TEMPLATE:
            self._versions.set_aside(draft)
        self._take(version.draft)

    def _use(self, version: Version, action: str, draft: Draft) -> None:
        self._replace(draft, version)
        if action == "restore" and version.plan is not None:
            # It has been in force before, so it needs no trying.
            self._add(_Job(version.draft, tried=False, published=True))
        else:
            self._say(f"In the editor now, {version.label}. Apply puts it in force.")

    def _source_of(self, draft: Draft) -> str:
        try:
            return source_of(spec_of(draft, self._names, self._versions.versions))
        except Exception as error:
            # Said in full when it is tried; the name may not even have been typed to its end.
            return "\n".join(f"# {line}" for line in explain(error).splitlines())

    def _show_source(self) -> None:
        """The editor itself, or the source of what is named, to read."""
        draft = self._draft()
        if draft.kind != "text":
            source = self._source_of(draft)
            if self._viewer is None:
                self._viewer = code_editor(source, language="python", lines=_LINES, plain=self._plain)
                self._viewer.read_only = True
                self._viewer.add_class("graftlab-viewer")
                self._sources.children = (self.editor, self._viewer)
            elif self._viewer.value != source:
                self._viewer.set_text(source)
        for widget, shown in (
            (self._name, draft.kind == "name"),
            (self.editor, draft.kind == "text"),
            (self._viewer, draft.kind != "text"),
        ):
            if widget is not None:
                _set(widget.layout, "display", None if shown else "none")
        self._compare_again()

    def _compare_again(self) -> None:
        if self._versions.comparing:
            self._versions.compare(self._source_of(self._draft()))

    # ---- trying and applying, on the worker ---------------------------------------------------------------------

    def _add(self, job: _Job) -> None:
        with self._lock:
            if self._closed:
                return
            # Of the tries that wait only the newest is of interest, and none when an Apply follows, which tries too.
            self._waiting = [*(waiting for waiting in self._waiting if waiting.published), job]
            self._worker.submit(self._work)
            self._show()

    def _work(self) -> None:
        with self._lock:
            if not self._waiting:
                return
            job = self._working = self._waiting.pop(0)
            # What an earlier draft came to would be taken for this one's.
            _set(self._trial, "value", "")
            self._say("")
        try:
            self._guard(self._run, job)
        finally:
            with self._lock:
                self._working = None
                self._show()

    def _run(self, job: _Job) -> None:
        spec = spec_of(job.draft, self._names, self._versions.versions)
        if spec is None and not job.published:
            raise SessionError("the default transform needs no trying: the rows show what it makes of each tap")
        if (job.tried and spec is not None and not self._went_well(job, spec)) or not job.published:
            return
        if spec == self.session.plan.transform:
            self._say(f"Nothing to apply: this is in force, as of plan {self.session.plan.version}.")
            return
        with self._lock:
            self._publishing = spec, job.draft
        try:
            # Without the lock: this loads the transform here, which runs the person's code.
            plan = self.session.edit(transform=spec)
        finally:
            with self._lock:
                self._follow_plan()
                self._publishing = None
        self._say(f"Applied as plan {plan.version}.", "good")

    def _went_well(self, job: _Job, spec: TransformSpec) -> bool:
        selection = job.tap.selection if job.tap is not None and job.tap.kept else {}
        trial = self.session.try_transform(spec, limit=self.limit, **selection)
        with self._lock:
            if self._closed:
                return False
            _set(self._trial, "value", view.trial_html(trial))
            on_screen = job.draft == self._draft() and job.draft.kind == "text"
            if trial.error is None:
                if on_screen:
                    self.editor.clear_error()
                return True
            if on_screen:
                self.editor.show_error(view.summary(trial.error), trial.error_line)
            if job.published:
                elsewhere = " To apply it all the same, choose other tensors to try on, or none." if selection else ""
                self._say(f"Not applied, because it failed.{elsewhere}", "bad")
            return False

    # ---- what is in force ---------------------------------------------------------------------------------------

    def _follow_plan(self) -> None:
        is_applied = self._is_applied(self._draft())
        if not self._versions.follow(self.session.plans) or self._versions.in_force.spec == self._in_force:
            return
        self._in_force = self._versions.in_force.spec
        if self._publishing is not None and self._publishing[0] == self._in_force:
            self._settled = self._publishing[1]
        elif is_applied:
            self._adopt(self._versions.in_force.draft)
        else:
            self._overtaken()
        self._functions.clear()

    def _adopt(self, draft: Draft) -> None:
        """Show what somebody else has put in force, but for a text that the kernel has not heard of yet."""
        self._settled = None
        if draft.kind == self._kinds.value == "text":
            self.editor.clear_error()
            self.editor.offer(draft.text)
        else:
            self._take(draft)
        self._note = f"Put in force elsewhere, and shown here: {label_of(self._in_force)}.", "quiet"

    def _overtaken(self) -> None:
        self._settled = None
        what = f"{label_of(self._in_force)} (plan {self._versions.in_force.plan})"
        self._note = f"Put in force elsewhere: {what}. What you have not applied stays; Revert shows that.", "overtaken"

    def _follow_functions(self) -> None:
        functions = functions_in(self._names)
        if functions != self._functions:
            self._functions = functions
            earlier = [version.draft for version in reversed(self._versions.versions)]
            names = [*fitting_functions(functions), *(draft.text for draft in earlier if draft.kind == "name")]
            _set(self._name, "options", tuple(dict.fromkeys(names)))
            self._show_source()

    # ---- what is shown ------------------------------------------------------------------------------------------

    def _say(self, note: str, kind: str = "quiet") -> None:
        with self._lock:
            self._note = note, kind
            self._show()

    def _show(self) -> None:
        """Set what has changed, with the lock held."""
        if self._closed:
            return
        closed, draft, plan = self.session.closed, self._draft(), self.session.plan
        applied = self._is_applied(draft)
        _set(self._header, "value", view.in_force(self._versions.in_force, applied) + view.failing(plan, self._rows))
        jobs = [*([] if self._working is None else [self._working]), *self._waiting]
        busy = bool(jobs)
        for button, disabled in (
            (self._try, closed or busy or draft.kind == "default"),
            (self._apply, closed or busy),
            (self._revert, closed or busy),
            (self._versions.buttons["restore"], closed or busy),
        ):
            _set(button, "disabled", disabled)
        _set(self._apply, "button_style", "" if applied or closed else "primary")
        _set(self._busy, "value", view.busy(jobs[0].label, len(jobs) - 1) if jobs else "")
        _set(self._keys.layout, "display", None if not jobs and draft.kind == "text" else "none")
        note, kind = (self._trouble, "bad") if self._trouble else self._note
        if closed:
            note, kind = "The session is closed; its plan cannot be changed any more.", "quiet"
        role = "alert" if kind == "bad" else "status"
        _set(self._message, "value", f'<div class="{kind}" role="{role}">{html.escape(note)}</div>' if note else "")
        alive = [rank.label for rank in self.session.ranks if rank.alive]
        _set(self._adopted, "value", adoption(plan.version, self.session.adopted(plan.version), alive, closed))


def _set(widget: Any, trait: str, value: Any) -> None:
    """Send only what changed: every message counts against the notebook's limit."""
    if getattr(widget, trait) != value:
        setattr(widget, trait, value)


def _row(*children: widgets.Widget) -> widgets.HBox:
    return widgets.HBox(children, layout=widgets.Layout(flex_flow="row wrap", align_items="center"))


def _close(widget: widgets.Widget) -> None:
    for child in getattr(widget, "children", ()):
        _close(child)
    widget.close()


def _notebook_names() -> Mapping[str, Any]:
    from IPython.core.getipython import get_ipython

    shell = get_ipython()
    names: Mapping[str, Any] = {} if shell is None else shell.user_ns
    return names
