"""Shows plans in both editors: the earlier ones, and the step from which each rank uses the newest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import ipywidgets as widgets

from graftlab.base.text import counted
from graftlab.control.core import internals_of
from graftlab.control.plans import Action
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.widgets.filter_view import code, quiet
from graftlab.widgets.panel import FoldableBox, Panel, close_all, row, update

_LISTED = 30


class PlanList(FoldableBox):
    """A session's earlier plans, newest first, each with a button that calls ``restore``."""

    def __init__(self, panel: Panel, restore: Callable[[GraftPlan], object]) -> None:
        self._panel = panel
        self._restore = restore
        self._rows: dict[int, widgets.HBox] = {}
        self._list = widgets.VBox().add_class("graftlab-plans")
        super().__init__(self._list)
        self.add_class("graftlab-earlier")

    def show(self, plans: Sequence[GraftPlan], closed: bool) -> None:
        """List all plans except the last."""
        earlier = plans[:-1]
        listed = {plan.version: plan for plan in reversed(earlier[-_LISTED:])}
        if listed.keys() != self._rows.keys():
            rows = {version: self._rows.pop(version, None) or self._row(plan) for version, plan in listed.items()}
            dropped, self._rows = self._rows, rows
            self._list.children = tuple(rows.values())
            for each in dropped.values():
                close_all(each)
            self.title = f"Earlier plans ({len(earlier)})"
        for each in self._rows.values():
            update(each.children[0], disabled=closed)
        update(self.layout, display=None if listed else "none")

    def _row(self, plan: GraftPlan) -> widgets.HBox:
        again = f"Publish version {plan.version} again"
        button = self._panel.button(f"Restore {plan.version}", "restore", again, partial(self._restore, plan))
        return row(button, widgets.HTML(plan_html(plan))).add_class(f"graftlab-plan-{plan.version}")


class UndoButtons(widgets.HBox):  # type: ignore[misc]
    """Undo and Redo for all edits of a session's plan; their tooltips name the edit."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._undo = panel.button("Undo", "undo", "", partial(self._press, "undo"))
        self._redo = panel.button("Redo", "redo", "", partial(self._press, "redo"))
        self._undo.icon, self._redo.icon = "undo", "repeat"
        super().__init__([self._undo, self._redo])

    def _press(self, action: Action) -> None:
        session = self._panel.session
        change = session.undo() if action == "undo" else session.redo()
        self._panel.refresh()
        done = "Undone" if action == "undo" else "Redone"
        self._panel.say(f"{done}, as plan {change.plan.version}: {change.text}.")

    def show(self, closed: bool) -> None:
        """Offer what can be undone and redone now."""
        plans = internals_of(self._panel.session).plans
        actions: tuple[tuple[widgets.Button, Action], ...] = ((self._undo, "undo"), (self._redo, "redo"))
        for button, action in actions:
            change = plans.last(action)
            what = "there is no edit" if change is None else change.text
            update(button, disabled=closed or change is None, tooltip=f"{action.capitalize()}: {what}")


_RANKS_SHOWN = 16


def adoption(version: int, adopted: Mapping[str, int], alive: Sequence[str], closed: bool) -> str:
    """The steps from which the live ranks use the plan."""
    if closed or not alive:
        return quiet(f"The last plan was version {version}." if closed else f"Plan {version}; no rank is alive.")
    steps: dict[int, list[str]] = {}
    for rank in alive:
        if rank in adopted:
            steps.setdefault(adopted[rank], []).append(rank)
    waiting = [rank for rank in alive if rank not in adopted]
    if not waiting and len(steps) == 1 and len(alive) > 1:
        parts = [f"used from step {next(iter(steps))} on by all {len(alive)} ranks"]
    else:
        parts = [f"used from step {step} on by {_ranks(ranks)}" for step, ranks in sorted(steps.items())]
        if waiting:
            parts.append(f"not yet used by {_ranks(waiting)}")
    state = "waiting" if waiting else "everywhere"
    return f'<div class="{state}" role="status"><b>Plan {version}</b>: {"; ".join(parts)}.</div>'


def _ranks(ranks: Sequence[str]) -> str:
    others = len(ranks) - _RANKS_SHOWN
    return ", ".join(ranks[:_RANKS_SHOWN]) + (f" and {others} others" if others > 0 else "")


def plan_html(plan: GraftPlan) -> str:
    """An earlier plan in one line."""
    texts = {name: getattr(plan, name) or "" for name in FILTERS}
    filters = [f"{name} {code(text)}" for name, text in texts.items() if text.strip()]
    transforms = [f"transform {code(spec.described)}" for spec in plan.transforms]
    parts = [*(filters or ["no filters"]), *(transforms or [f"transform {code('default')}"])]
    if plan.rename:
        parts.append(counted(len(plan.rename), "rename"))
    if plan.pairs:
        parts.append(counted(len(plan.pairs), "pair"))
    return f'<span class="plan"><b>{plan.version}</b> {" · ".join(parts)}</span>'
