"""The part of the filter editor that lists earlier plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import ipywidgets as widgets

from graftlab.plan.plan import GraftPlan
from graftlab.widgets import plan_view
from graftlab.widgets.panel import Fold, Panel, close_all, row, update

_LISTED = 30


class PlanList(Fold):
    """A session's plans but for the one in force, newest first, each with a button that calls ``restore``."""

    def __init__(self, panel: Panel, restore: Callable[[GraftPlan], object]) -> None:
        self._panel = panel
        self._restore = restore
        self._rows: dict[int, widgets.HBox] = {}
        self._list = widgets.VBox().add_class("graftlab-plans")
        super().__init__(self._list)
        self.add_class("graftlab-earlier")

    def show(self, plans: Sequence[GraftPlan], closed: bool) -> None:
        """List all of ``plans`` but the last one."""
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
        again = f"Publish version {plan.version} anew"
        button = self._panel.button(f"Restore {plan.version}", "restore", again, partial(self._restore, plan))
        return row(button, widgets.HTML(plan_view.described(plan))).add_class(f"graftlab-plan-{plan.version}")
