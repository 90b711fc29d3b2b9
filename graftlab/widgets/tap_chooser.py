"""The part of the transform editor in which one chooses the kept tensors that a draft is tried on."""

from __future__ import annotations

import html
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Any

import ipywidgets as widgets

from graftlab.base.html import shortened
from graftlab.control.core import SessionCore
from graftlab.errors import SessionError
from graftlab.widgets.choices import Menu
from graftlab.widgets.kept_taps import TapChoice, filter_to_keep, kept_choices, other_choices

logger = logging.getLogger(__name__)

LOAD_ONLY = "nothing: only load it"
# For ipywidgets, None would be no choice at all.
_NOTHING = ""
# What the list offers at most; who looks for another tap can narrow the plan's keep filter down.
_KEPT_LISTED = 300
_OTHERS_LISTED = 200
# Asking the ranks what they keep takes this part of the time at the most, and is done this often, in seconds.
_ASKING_SHARE = 0.1
_ASKING_INTERVAL = 0.5
_TEXT_SHOWN = 200


class TapChooser(widgets.VBox):  # type: ignore[misc]
    """A menu of the taps that are kept, then of those that are not; and a button that has the plan keep more.

    ``worker`` runs what asks the ranks, ``lock`` is the editor's, ``press`` what the button calls, ``changed`` what is
    called when another tap was chosen.
    """

    def __init__(
        self,
        session: SessionCore,
        worker: Executor,
        lock: threading.RLock,
        press: Callable[[], None],
        changed: Callable[[], None],
    ) -> None:
        self._session = session
        self._worker = worker
        self._lock = lock
        self._changed = changed
        self._kept: list[TapChoice] = []
        self._listed: object = None
        self._picked = False
        self._asking: Future[None] | None = None
        self._asked_at: object = None
        self._next_asking = 0.0
        self.menu = Menu(
            options=[(LOAD_ONLY, _NOTHING)],
            description="Try on",
            style={"description_width": "auto"},
            layout=widgets.Layout(width="auto", flex="1 1 20em", min_width="10em"),
        ).add_class("graftlab-tap")
        self.keep = widgets.Button(icon="thumb-tack", layout=widgets.Layout(width="auto")).add_class("graftlab-keep")
        self.keep.on_click(lambda _: press())
        self._hint = widgets.HTML().add_class("graftlab-kept-hint")
        row = widgets.HBox([self.menu, self.keep], layout=widgets.Layout(flex_flow="row wrap", align_items="center"))
        super().__init__([row, self._hint])
        self.menu.observe(self._on_choice, "value")

    @property
    def chosen(self) -> TapChoice | None:
        """The tap that is chosen; one that is not kept cannot be tried on."""
        choice = self.menu.value
        return choice if isinstance(choice, TapChoice) else None

    def keep_chosen(self) -> str:
        """Have the plan keep what is chosen; returns what came of it."""
        plan = self._session.plan
        wanted = filter_to_keep(plan, self.chosen)
        if wanted == (plan.keep or "").strip():
            return "The plan keeps this already; the next step brings tensors."
        plan = self._session.edit(keep=wanted)
        return f"Plan {plan.version} keeps {shortened(wanted, _TEXT_SHOWN)}; the next step brings tensors."

    def refresh(self) -> None:
        """Show what is kept, as far as it is known; asks for news, on the worker and not too often."""
        plans = self._session.plans
        state = (len(plans), self._session.row_count)
        due = state != self._asked_at and time.monotonic() >= self._next_asking and not self._session.closed
        if due and (self._asking is None or self._asking.done()) and any((plan.keep or "").strip() for plan in plans):
            self._asking = self._worker.submit(self._ask, state)
        self._fill()
        self._show()

    def _ask(self, state: object) -> None:
        began = time.monotonic()
        try:
            kept = kept_choices(self._session.kept(failed=True))
        except SessionError as error:
            # A rank may be too busy to answer, or be gone; the next rows bring another attempt.
            logger.debug("what is kept is not known: %s", error)
            kept = self._kept
        with self._lock:
            self._asked_at = state
            self._next_asking = began + max(_ASKING_INTERVAL, (time.monotonic() - began) / _ASKING_SHARE)
            self._kept = kept[-_KEPT_LISTED:]
            self._fill()
            self._show()

    def _fill(self) -> None:
        taps = self._session.taps
        if self._listed == (self._kept, len(taps)):
            return
        self._listed = (self._kept, len(taps))
        others = other_choices(taps, self._kept)[:_OTHERS_LISTED]
        choices = [*self._kept, *others]
        chosen = self.chosen
        if chosen is None and not self._picked and self._kept:
            # Who has chosen nothing wants to see what a draft does, if there is anything to see it on.
            chosen = self._kept[0]
        elif chosen is not None and chosen not in choices:
            # It is kept by now, or no longer.
            same = [choice for choice in choices if (choice.name, choice.tags) == (chosen.name, chosen.tags)]
            chosen = same[0] if same else None
        self.menu.fill([(LOAD_ONLY, _NOTHING), *((choice.label, choice) for choice in choices)], chosen)

    def _on_choice(self, _change: Any) -> None:
        with self._lock:
            if not self.menu.filling:
                self._picked = True
                self._show()
                self._changed()

    def _show(self) -> None:
        plan, chosen = self._session.plan, self.chosen
        wanted = filter_to_keep(plan, chosen)
        more = wanted != (plan.keep or "").strip() and not self._session.closed
        needed = not chosen.kept if chosen is not None else not self._kept
        grafts = any(text and text.strip() for text in (plan.b2t, plan.t2b))
        label = "Keep this tap" if chosen is not None else "Keep what is grafted" if grafts else "Keep every tap"
        hint = ""
        if needed:
            hint = "No tensors of it are kept" if chosen is not None else "No tensors are kept"
            hint += ", so a draft is loaded and not run." if more else " yet; the next step brings some."
        for widget, trait, value in (
            (self.keep, "description", label),
            (self.keep, "tooltip", f"Set the plan's keep filter to {shortened(wanted, _TEXT_SHOWN)}"),
            (self.keep.layout, "display", None if needed and more else "none"),
            (self._hint, "value", f'<span class="quiet">{html.escape(hint)}</span>' if hint else ""),
            (self._hint.layout, "display", None if hint else "none"),
        ):
            if getattr(widget, trait) != value:
                setattr(widget, trait, value)
