"""What one plan has changed since another, in words."""

from __future__ import annotations

import html
from dataclasses import dataclass
from typing import Any

from graftlab.base.html import bundle
from graftlab.base.text import counted, shortened
from graftlab.plan.plan import FILTERS, GraftPlan

PARTS = (*FILTERS, "transform", "rename", "pairs")
"""The parts of a plan that an edit changes: all but its version."""

_SHOWN = 80


def parts_of(plan: GraftPlan) -> dict[str, Any]:
    """Return every part of a plan, as :meth:`GraftPlan.edit` takes them."""
    return {name: getattr(plan, name) for name in PARTS}


@dataclass(frozen=True, repr=False)
class PlanChange:
    """Two plans of a session, ``before`` and after (``plan``), and what differs between them.

    ``session.undo()`` and ``session.redo()`` return one.

    >>> gl.plan.changes.PlanChange(gl.GraftPlan(), gl.GraftPlan().edit(b2t="layer == 3")).text
    'b2t: nothing -> layer == 3'
    """

    before: GraftPlan
    plan: GraftPlan

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that differ: filters, ``transform``, ``rename`` and ``pairs``."""
        return tuple(name for name in PARTS if _plain(self.before, name) != _plain(self.plan, name))

    @property
    def text(self) -> str:
        """Each part that differs, with its value before and after; filters and transforms are shortened."""
        parts = [f"{name}: {_shown(self.before, name)} -> {_shown(self.plan, name)}" for name in self.parts]
        return "; ".join(parts) or "nothing changed"

    def __repr__(self) -> str:
        return f"<plan {self.plan.version}: {self.text}>"

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, str]:
        return bundle(repr(self), f"<b>plan {self.plan.version}</b>: {html.escape(self.text)}")


def _plain(plan: GraftPlan, name: str) -> Any:
    part = getattr(plan, name)
    # None and blank are the same filter.
    return (part or "").strip() if name in FILTERS else part


def _shown(plan: GraftPlan, name: str) -> str:
    if name in FILTERS:
        return shortened((getattr(plan, name) or "").strip(), _SHOWN) or "nothing"
    if name == "transform":
        return shortened(", ".join(each.described for each in plan.transforms), _SHOWN) or "default"
    if name == "rename":
        rules = [f"{side} {pattern} -> {new}" for side, pattern, new in plan.rename]
    else:
        rules = [f"{rule.baseline} = {rule.target}" for rule in plan.pairs]
    if not rules:
        return "none"
    word = "rule" if name == "rename" else "pair"
    return f"{counted(len(rules), word)} ({shortened(', '.join(rules), _SHOWN)})"
