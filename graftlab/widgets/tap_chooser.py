"""The part of the transform editor in which one chooses the kept tensors that a draft is tried on."""

from __future__ import annotations

import html
import logging
import time
from typing import Any

import ipywidgets as widgets

from graftlab.base.text import shortened
from graftlab.errors import SessionError
from graftlab.widgets.inputs import Menu
from graftlab.widgets.kept_taps import TapOption, filter_to_keep, kept_options, other_options
from graftlab.widgets.panel import Panel, row, update

logger = logging.getLogger(__name__)

LOAD_ONLY = "nothing: only load it"
# ipywidgets takes None for no selection.
_NOTHING = ""
LISTED = 300
"""Taps that the menu has at once. Words that are typed find the others."""

# So few need no finding.
_FEW = 12
# Asking the ranks what they keep takes this part of the time at the most, and is done this often, in seconds.
_ASKING_SHARE = 0.1
_ASKING_INTERVAL = 0.5
_TEXT_SHOWN = 200


class TapChooser(Panel):
    """A menu of the taps that are kept, then of those that are not; and a button that has the plan keep more.

    The button submits ``"keep"`` to the parent, which reads ``menu`` and calls :meth:`keep`.
    """

    def __init__(self, parent: Panel) -> None:
        super().__init__(parent.session, parent=parent)
        self._kept: list[TapOption] = []
        self._listed: object = None
        self._is_picked = False
        self._is_asking = False
        self._asked_at: object = None
        self._next_asking = 0.0
        self.menu = Menu(
            options=[(LOAD_ONLY, _NOTHING)],
            description="Try on",
            style={"description_width": "auto"},
            layout=widgets.Layout(width="auto", flex="1 1 20em", min_width="10em"),
        ).add_class("graftlab-tap")
        self._search = widgets.Text(
            placeholder="find a tap", tooltip="Find a tap to try on", layout=widgets.Layout(width="12em")
        ).add_class("graftlab-tap-search")
        self._search.observe(self.guarded(lambda _: self.refresh()), "value")
        self._more = widgets.HTML().add_class("graftlab-more-taps")
        self._keep = self.button("", "keep", "", lambda: parent.submit("keep"))
        self._keep.icon = "thumb-tack"
        self._hint = widgets.HTML().add_class("graftlab-kept-hint")
        self.menu.observe(self.guarded(self._on_choice), "value")
        self._open([row(self.menu, self._search, self._keep), self._more, self._hint])

    @property
    def chosen(self) -> TapOption | None:
        """The tap that is chosen, as far as the kernel knows; one that is not kept cannot be tried on."""
        return self.tap_of(self.menu.value)

    @staticmethod
    def tap_of(value: object) -> TapOption | None:
        """The tap that a value of the menu stands for, if it stands for one."""
        return value if isinstance(value, TapOption) else None

    def keep(self, tap: TapOption | None) -> None:
        """Have the plan keep this tap, or without one what it grafts, or else compares."""
        plan = self.session.plan
        wanted = filter_to_keep(plan, tap)
        if wanted == (plan.keep or "").strip():
            self.say("The plan keeps this already; the next step brings tensors.", "good")
            return
        plan = self.session.edit(keep=wanted)
        kept = shortened(wanted, _TEXT_SHOWN)
        self.say(f"Plan {plan.version} keeps {kept}; the next step brings tensors.", "good")

    def _follow(self) -> None:
        """What is kept, as far as it is known; asks the ranks for news in the background, and not too often."""
        plans = self.session.plans
        state = (len(plans), self.session.row_count)
        is_due = state != self._asked_at and time.monotonic() >= self._next_asking and not self.session.closed
        if is_due and not self._is_asking and any((plan.keep or "").strip() for plan in plans):
            self._is_asking = True
            self.in_background(self._ask_ranks, state)
        self._fill()

    def _ask_ranks(self, state: object) -> None:
        began = time.monotonic()
        kept = self._kept
        try:
            kept = kept_options(self.session.kept(failed=True))
        except SessionError as error:
            # A rank may be too busy to answer, or be gone; the next rows bring another attempt.
            logger.debug("what is kept is not known: %s", error)
        finally:
            with self._lock:
                self._is_asking = False
                self._asked_at = state
                self._next_asking = began + max(_ASKING_INTERVAL, (time.monotonic() - began) / _ASKING_SHARE)
        with self._lock:
            self._kept = kept
            self._fill()
            self._show()

    def _fill(self) -> None:
        taps, words = self.session.taps, self._search.value.lower().split()
        state = (self._kept, len(taps), words)
        if self._listed == state:
            return
        self._listed = state
        every = [*self._kept, *other_options(taps, self._kept)]
        found = [option for option in every if all(word in option.label.lower() for word in words)]
        chosen = self.chosen
        if chosen is None and not self._is_picked and self._kept:
            # Without a choice, take any kept pair, so that a draft can be tried.
            chosen = self._kept[0]
        elif chosen is not None and chosen not in every:
            # It is kept by now, or no longer.
            same = [option for option in every if (option.name, option.tags) == (chosen.name, chosen.tags)]
            chosen = same[0] if same else None
        options = found[:LISTED]
        if chosen is not None and chosen not in options:
            options = [chosen, *options]
        self.menu.fill([(LOAD_ONLY, _NOTHING), *((option.label, option) for option in options)], chosen)
        update(self._search.layout, display=None if len(every) > _FEW else "none")
        more = len(found) - LISTED
        shown = f"{more:,} more; type words of their names to find them" if more > 0 else ""
        if words and not found:
            shown = "no tap has these words in its name or tags"
        update(self._more, value=f'<span class="quiet">{shown}</span>' if shown else "")
        update(self._more.layout, display=None if shown else "none")

    def _on_choice(self, _change: Any) -> None:
        with self._lock:
            if not self.menu.filling:
                self._is_picked = True
                self._show()

    def _show(self) -> None:
        if self._closed:
            return
        plan, chosen = self.session.plan, self.chosen
        wanted = filter_to_keep(plan, chosen)
        more = wanted != (plan.keep or "").strip() and not self.session.closed
        needed = not chosen.kept if chosen is not None else not self._kept
        grafts = any(text and text.strip() for text in (plan.b2t, plan.t2b))
        label = "Keep this tap" if chosen is not None else "Keep what is grafted" if grafts else "Keep every tap"
        hint = ""
        if needed:
            hint = "No tensors of it are kept" if chosen is not None else "No tensors are kept"
            hint += ", so a draft is loaded and not run." if more else " yet; the next step brings some."
        tooltip = f"Set the plan's keep filter to {shortened(wanted, _TEXT_SHOWN)}"
        update(self._keep, description=label, tooltip=tooltip)
        update(self._keep.layout, display=None if needed and more else "none")
        update(self._hint, value=f'<span class="quiet">{html.escape(hint)}</span>' if hint else "")
        update(self._hint.layout, display=None if hint else "none")
