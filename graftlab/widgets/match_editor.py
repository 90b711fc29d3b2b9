"""The editor of tap pairs: both sides' taps in execution order, with links to accept or reject.

The browser's half is ``match_editor.js``. It shows ``state`` and sends custom messages, each a dict with the requested
action, ``what``, and the ``targets`` of the pairs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ipywidgets as widgets
import traitlets

from graftlab.base.world import Side
from graftlab.control.core import SessionCore
from graftlab.matching.names import pattern_of
from graftlab.matching.pair import MEANINGS, SURENESS, Pair
from graftlab.matching.proposal import Proposal, folded, written_as
from graftlab.widgets.panel import Panel
from graftlab.widgets.scripts import Script, ScriptedWidget, shared

_SCRIPT = Path(__file__).with_suffix(".js")
_STYLE = ".graftlab-match .graftlab-message { margin-top: 4px }"


class MatchView(ScriptedWidget):
    """The widget in the browser."""

    state: traitlets.Dict[str, Any] = traitlets.Dict().tag(sync=True)

    @traitlets.default("script")
    def _script(self) -> Script:
        return shared(_SCRIPT.read_text(encoding="utf-8"))


class MatchEditor(Panel):
    """Shows a proposal: ``session.match_editor(proposal)`` or ``%graft match EXPR``.

    ``proposal`` includes the pairs accepted and rejected so far; Apply puts its pairs into the plan.
    """

    style_sheet = _STYLE

    def __init__(self, session: SessionCore, proposal: Proposal) -> None:
        super().__init__(session)
        self.proposal = proposal
        self._before: list[Proposal] = []
        self._is_folded = True
        self._applied: Proposal | None = None
        self.view = MatchView()
        self.view.on_msg(self.guarded(self._on_message))
        self.view.state = self._state()
        self.add_class("graftlab-match")
        self._open([self.view, self._message_line])

    def static_html(self, with_figures: bool = False) -> str:
        return self.proposal._repr_mimebundle_()["text/html"]

    def static_text(self) -> str:
        return repr(self.proposal)

    def _on_message(self, _view: widgets.Widget, content: Any, _buffers: Any) -> None:
        what, targets = content["what"], [str(each) for each in content.get("targets", ())]
        if what == "fold":
            self._is_folded = bool(content["value"])
        elif what in ("accept", "reject"):
            self._before.append(self.proposal)
            change = self.proposal.accept if what == "accept" else self.proposal.reject
            self.proposal = change(*targets)
            count = f"{len(targets)} {'tap' if len(targets) == 1 else 'taps'}"
            self.say(f"{count} {what}ed. Apply puts the pairs into the plan.")
        elif what == "undo" and self._before:
            self.proposal = self._before.pop()
            self.say("Undid the last change.")
        elif what == "apply":
            plan = self.session.edit(pairs=self.proposal)
            self._applied = self.proposal
            left = sum(pair.sureness == "guess" for pair in self.proposal.pairs)
            are = "guess is left out until it is" if left == 1 else "guesses are left out until they are"
            rest = f" {left} {are} accepted." if left else ""
            self.say(f"Plan {plan.version} has {len(plan.pairs)} pairs.{rest}", "good")
        self.view.state = self._state()

    def _state(self) -> dict[str, Any]:
        proposal = self.proposal
        groups = folded(proposal.pairs) if self._is_folded else [[pair] for pair in proposal.pairs]
        links = [_link(group) for group in groups]
        left: dict[Side, dict[str, dict[str, Any]]] = {
            "baseline": _without(proposal.unmatched_baseline, self._is_folded),
            "target": _without(proposal.unmatched_target, self._is_folded),
        }
        taps: dict[Side, list[dict[str, Any]]] = {}
        for side in left:
            found: dict[str, dict[str, Any]] = {}
            for link, group in zip(links, groups, strict=True):
                names = [pair.baseline if side == "baseline" else pair.target for pair in group]
                found.setdefault(link[side], {"label": link[side], "count": len(names), "names": names, "why": ""})
            found.update(left[side])
            taps[side] = _in_order(found.values(), proposal.order.get(side, ()))
        return {
            "baseline": [{key: tap[key] for key in ("label", "count", "why")} for tap in taps["baseline"]],
            "target": [{key: tap[key] for key in ("label", "count", "why")} for tap in taps["target"]],
            "links": links,
            "summary": proposal.summary,
            "problems": list(proposal.problems),
            "meanings": [[sureness, MEANINGS[sureness]] for sureness in SURENESS],
            "code": proposal.to_code(),
            "folded": self._is_folded,
            "can_undo": bool(self._before),
            "is_applied": self._applied is proposal,
        }


def _link(group: list[Pair]) -> dict[str, Any]:
    baseline, target = written_as(group)
    rels = [pair.rel for pair in group if pair.rel is not None]
    layout = group[0].layout.text
    return {
        "baseline": baseline,
        "target": target,
        "count": len(group),
        "sureness": group[0].sureness,
        "rel": max(rels, default=None),
        "layout": f"{layout} of the target's" if group[0].whole == "target" and group[0].layout.steps else layout,
        "note": "; ".join(dict.fromkeys(pair.note for pair in group if pair.note)),
        "targets": [pair.target for pair in group],
    }


def _without(unmatched: Mapping[str, str], is_folded: bool) -> dict[str, dict[str, Any]]:
    """The taps without a partner, and why; those with the same reason that differ only in numbers are grouped."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, why in unmatched.items():
        groups.setdefault((pattern_of(name) if is_folded else name, why), []).append(name)
    made = {}
    for (_, why), names in groups.items():
        label = names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}"
        made[label] = {"label": label, "count": len(names), "names": names, "why": why}
    return made


def _in_order(taps: Iterable[dict[str, Any]], order: Iterable[str]) -> list[dict[str, Any]]:
    places = {name: place for place, name in enumerate(order)}
    last = len(places)
    return sorted(taps, key=lambda tap: min(places.get(name, last) for name in tap["names"]))
