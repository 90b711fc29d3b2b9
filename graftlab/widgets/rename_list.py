"""The part of the filter editor for renames: rules that rewrite the names of one side's taps before pairing."""

from __future__ import annotations

import html
from collections.abc import Iterable
from functools import partial

import ipywidgets as widgets

from graftlab.base.text import first_of
from graftlab.base.world import Side, other_side
from graftlab.errors import FilterError, PlanError
from graftlab.filters.patterns import bounded_rewrite
from graftlab.plan.plan import GraftPlan
from graftlab.widgets.panel import FoldableBox, Panel, close_all, row, update

_EXAMPLES = 3

Rule = tuple[Side, str, str]


class RenameList(FoldableBox):
    """A plan's rules, each with a button that removes it, and fields for a new rule with a preview."""

    def __init__(self, panel: Panel) -> None:
        self._panel = panel
        self._rules: tuple[Rule, ...] | None = None
        self._buttons: list[widgets.Button] = []
        self._list = widgets.VBox().add_class("graftlab-rules")
        # Typed text arrives when the field loses focus, as by a click on the button.
        self._side = widgets.Dropdown(
            options=["target", "baseline"], description="Names of the", style={"description_width": "auto"}
        )
        self._side.layout.width = "auto"
        self._pattern = widgets.Text(placeholder=r"regular expression, such as ^model\.", continuous_update=False)
        self._pattern.description = "that match"
        self._new = widgets.Text(placeholder="replacement; may be empty", continuous_update=False)
        self._new.description = "become"
        for field in (self._side, self._pattern, self._new):
            field.observe(panel.guarded(lambda _: self._preview()), "value")
        self._add = panel.button("Add rule", "add-rule", "Add this rule and publish the rules", self._on_add)
        self._found = widgets.HTML().add_class("graftlab-rule-preview")
        content = widgets.VBox([self._list, row(self._side, self._pattern, self._new, self._add), self._found])
        super().__init__(content)
        self.add_class("graftlab-renames")

    def show(self, plan: GraftPlan, closed: bool) -> None:
        """Show the rules of this plan."""
        if plan.rename != self._rules:
            self._rules = plan.rename
            gone, lines = self._list.children, [self._line(rule) for rule in plan.rename]
            self._buttons = [line.children[0] for line in lines]
            self._list.children = tuple(lines)
            for each in gone:
                close_all(each)
            self.title = f"Renames ({len(plan.rename)})"
            self._preview()
        for button in (self._add, *self._buttons):
            update(button, disabled=closed)

    def _line(self, rule: Rule) -> widgets.HBox:
        side, pattern, new = rule
        drop = self._panel.button(
            "Remove", "drop-rule", f"Remove the rule {pattern} of the {side}", partial(self._drop, rule)
        )
        markup = f"{side}: <code>{html.escape(pattern)}</code> → <code>{html.escape(new) or '(nothing)'}</code>"
        return row(drop, widgets.HTML(markup))

    def _drop(self, rule: Rule) -> None:
        left = [each for each in self._panel.session.plan.rename if each != rule]
        plan = self._panel.session.edit(rename=_as_given(left))
        self._panel.refresh()
        self._panel.say(f"Published version {plan.version} without that rule.")

    def _on_add(self) -> None:
        side, pattern, new = self._side.value, self._pattern.value, self._new.value
        if not pattern:
            raise PlanError(r"enter the regular expression that the names match, such as ^model\.")
        if (side, pattern, new) in self._panel.session.plan.rename:
            self._panel.say(f"Nothing to add: the {side} already has this rule for {pattern}.")
            return
        rules = self._rules_without(side, pattern)
        plan = self._panel.session.edit(rename=_as_given([*rules, (side, pattern, new)]))
        update(self._pattern, value="")
        update(self._new, value="")
        self._panel.refresh()
        self._panel.say(f"Published version {plan.version}, which rewrites {pattern} in names of the {side}.")

    def _preview(self) -> None:
        """Show which of the taps seen the new rule would rewrite, and how many of them would then pair."""
        side, pattern, new = self._side.value, self._pattern.value, self._new.value
        if not pattern:
            update(self._found, value="")
            return
        session = self._panel.session
        other = other_side(side)
        # A tap lists the side that reached it first; taps that both sides have need no rule.
        mine, theirs = (
            {str(tap.get(f"{each}_name") or tap["name"]) for tap in session.taps if tap.get("side") == each}
            for each in (side, other)
        )
        rules = self._rules_without(side, pattern)
        try:
            plan = GraftPlan(rename=(*rules, (side, pattern, new)))
            rewrite = bounded_rewrite(pattern, new)
            matched = {name: made for name in sorted(mine) if (made := rewrite(name)) is not None}
            known = {plan.rewrite(other, name) for name in theirs}
            # Only the first matching rule rewrites a name.
            changed = {name: made for name, made in matched.items() if plan.rewrite(side, name) == made}
        except (PlanError, FilterError) as error:
            update(self._found, value=f'<div class="bad">{html.escape(str(error))}</div>')
            return
        pairs = len(set(changed.values()) & known)
        shown = first_of([f"{old} → {name or '(nothing)'}" for old, name in changed.items()], _EXAMPLES)
        summary = f"{len(matched)} names seen match; {pairs} of the new names exist on the {other}"
        if len(changed) < len(matched):
            summary += f"; an earlier rule rewrites {len(matched) - len(changed)} first"
        text = html.escape(f"{summary}. {shown}" if shown else summary)
        update(self._found, value=f'<div class="{"good" if pairs else "quiet"}">{text}</div>')

    def _rules_without(self, side: Side, pattern: str) -> list[Rule]:
        """The plan's rules, except one with the same side and pattern, which a new rule replaces."""
        return [each for each in self._panel.session.plan.rename if each[:2] != (side, pattern)]


def _as_given(rules: Iterable[Rule]) -> dict[Side, dict[str, str]]:
    made: dict[Side, dict[str, str]] = {}
    for side, pattern, new in rules:
        made.setdefault(side, {})[pattern] = new
    return made
