"""The part of the transform editor that chooses the kept tensors to try a draft on."""

from __future__ import annotations

import html
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any

import ipywidgets as widgets

from graftlab.base.text import shortened
from graftlab.errors import SessionError
from graftlab.rows.schema import Row
from graftlab.widgets.inputs import Menu
from graftlab.widgets.kept_taps import TapOption, default_option, filter_to_keep, kept_options, other_options
from graftlab.widgets.panel import Panel, row, update

logger = logging.getLogger(__name__)

LOAD_ONLY = "nothing (only load it)"
# ipywidgets takes None for no selection.
_NOTHING = ""
LISTED = 300
"""Taps in the menu at once. The search field finds others."""

# Up to this many taps need no search field.
_FEW = 12
# Queries to the ranks about kept pairs take at most this share of the time, and are this many seconds apart.
_ASKING_SHARE = 0.1
_ASKING_INTERVAL = 0.5
_TEXT_SHOWN = 200


class TapChooser(Panel):
    """A menu of the kept taps, then of the others, and a button that extends the plan's keep filter.

    The button submits ``"keep"`` to the parent, which reads ``menu`` and calls :meth:`keep`. ``rows`` returns the
    newest row of each tap.
    """

    def __init__(self, parent: Panel, rows: Callable[[], Iterable[Row]]) -> None:
        super().__init__(parent.session, parent=parent)
        self._rows = rows
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
        """The chosen tap, according to the kernel; a draft cannot be tried on one that is not kept."""
        return self.tap_of(self.menu.value)

    @staticmethod
    def tap_of(value: object) -> TapOption | None:
        """The tap of a menu value, if any."""
        return value if isinstance(value, TapOption) else None

    def keep(self, tap: TapOption | None) -> None:
        """Make the plan keep this tap; without one, the taps that it grafts, or else compares."""
        plan = self.session.plan
        wanted = filter_to_keep(plan, tap)
        if wanted == (plan.keep or "").strip():
            self.say_kept("this", plan, self._rows)
            return
        self.say_kept(shortened(wanted, _TEXT_SHOWN), self.session.edit(keep=wanted), self._rows)

    def _follow(self) -> None:
        """Update the menu, and query the ranks for kept pairs in the background, at intervals."""
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
            # A rank may be too busy to answer, or be gone; the next rows trigger another attempt.
            logger.debug("querying the kept pairs failed: %s", error)
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
        # Another plan has another default.
        state = (self._kept, len(taps), words, self.session.plan.version)
        if self._listed == state:
            return
        self._listed = state
        every = [*self._kept, *other_options(taps, self._kept)]
        found = [option for option in every if all(word in option.label.lower() for word in words)]
        chosen = self.chosen
        if chosen is None and not self._is_picked and self._kept:
            chosen = default_option(self.session.plan, self._kept)
        elif chosen is not None and chosen not in every:
            # It has been kept since, or is no longer kept.
            same = [option for option in every if (option.name, option.tags) == (chosen.name, chosen.tags)]
            chosen = same[0] if same else None
        options = found[:LISTED]
        if chosen is not None and chosen not in options:
            options = [chosen, *options]
        self.menu.fill([(LOAD_ONLY, _NOTHING), *((option.label, option) for option in options)], chosen)
        update(self._search.layout, display=None if len(every) > _FEW else "none")
        more = len(found) - LISTED
        shown = f"{more:,} more; type part of a name to find them" if more > 0 else ""
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
        label = "Keep this tap" if chosen is not None else "Keep grafted taps" if grafts else "Keep all taps"
        hint = ""
        if needed:
            hint = "Its tensors are not kept" if chosen is not None else "No tensors are kept"
            hint += ", so a draft is only loaded, not run." if more else " yet; they arrive with the next step."
        tooltip = f"Set the plan's keep filter to {shortened(wanted, _TEXT_SHOWN)}"
        update(self._keep, description=label, tooltip=tooltip)
        update(self._keep.layout, display=None if needed and more else "none")
        update(self._hint, value=f'<span class="quiet">{html.escape(hint)}</span>' if hint else "")
        update(self._hint.layout, display=None if hint else "none")
