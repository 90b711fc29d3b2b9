"""Judges one call or update that two scripts hold: repeats it in place, or starts the scripts again for each run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from graftlab.base.tap_groups import kind_of
from graftlab.comparison.answers import Comparison
from graftlab.comparison.held_calls import judge_held_calls
from graftlab.comparison.held_units import HeldUnits, described_as, split_alike, why_not_held, why_not_repeated
from graftlab.comparison.held_updates import judge_held_updates
from graftlab.comparison.inherited_rounding import InheritedRounding
from graftlab.comparison.repeats import JudgingChoice, Repeats
from graftlab.comparison.started_scripts import StartedScripts, announcement, units_of
from graftlab.comparison.units_so_far import followed_by
from graftlab.matching.proposal import Proposal
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.holding import OfUpdate

if TYPE_CHECKING:
    from graftlab.session import Session

_REFUSED = "To judge a call or update that cannot be repeated, the scripts must be started again for each run;"


class UnitJudge:
    """Judges held calls and updates with what earlier ones have shown: pairs of taps, and how far rounding moves them.

    ``started`` starts the scripts again; None if they must not be, as ``refused_by`` demands, an option.
    ``announce`` is called with a sentence before that.
    """

    def __init__(
        self,
        session: Session,
        choice: JudgingChoice,
        started: StartedScripts | None,
        announce: Callable[[str], object],
        refused_by: str,
    ) -> None:
        self.started = started
        self._session, self._choice, self._announce, self._refused_by = session, choice, announce, refused_by
        # The pairs found for each two models, the newest last.
        self._proposals: dict[tuple[str, str], Proposal | None] = {}
        # By weight, the distance of its gradients in calls that agree.
        self._apart: dict[str, float] = {}
        # By tap, how far rounding moved it in an earlier call, where that is far more than one rounding.
        self._inherited = InheritedRounding()

    @property
    def starts(self) -> int:
        """How often the scripts were started again."""
        return self.started.starts if self.started is not None else 0

    def has_judged(self, held: HeldUnits) -> bool:
        """Whether a call of these two models was judged, and counts."""
        ours, theirs = described_as(held, CallDescription)
        return (ours[0].model, theirs[0].model) in self._proposals

    def judge_call(self, held: HeldUnits) -> Comparison:
        """Judge a call that is described whole."""
        baseline, target = described_as(held, CallDescription)
        models = baseline[0].model, target[0].model
        known = self._proposals.get(models)
        if self._proposals and list(self._proposals)[-1] != models:
            # Pairs of other models are in force.
            self._session.edit(pairs=known)
        why = why_not_held(baseline, target)
        if why is None or self.started is None:
            choice = replace(self._choice, match_trained=True)
            compared = judge_held_calls(Repeats(self._session), baseline, target, choice, known, self._inherited)
            why = why or why_not_repeated(compared)
        if why is not None and self.started is not None:
            self._announce(announcement(why))
            compared = self.started.judge_call(baseline, target, self._choice, known)
        elif why is not None:
            compared = self.refused(compared)
        self._proposals.pop(models, None)
        self._proposals[models] = compared.match
        if compared.answer == "differ":
            doubts = self._inherited.doubts(compared)
            if doubts:
                compared = replace(compared, answer="inconclusive", remarks=(*doubts, *compared.remarks))
        self._inherited.add(compared)
        if split_alike(held):
            # Gradients of different parts of a batch are apart by more than rounding.
            frame = compared.findings.frame
            for name, tags, error in zip(frame["name"], frame["tags"], frame["error"], strict=True):
                if kind_of(tags) == "param_grad" and error == error:
                    self._apart[name] = max(self._apart.get(name, 0.0), float(error))
        return compared

    def forget_pairs(self) -> None:
        """Forget the pairs that the last call has shown first."""
        self._proposals.popitem()

    def must_refuse(self, held: HeldUnits) -> bool:
        """Whether an update calls a model in a closure, so that only a new start could judge it, which is refused."""
        ours, theirs = described_as(held, UpdateDescription)
        return self.started is None and any(each.has_closure for each in (*ours, *theirs))

    def judge_update(self, held: HeldUnits) -> Comparison:
        """Judge an update. If it shows no difference, the target continues with the baseline's values."""
        baseline, target = described_as(held, UpdateDescription)
        proposal = next(reversed(self._proposals.values()), None)
        why = why_not_held(baseline, target)
        if why is None or self.started is None:
            repeats = Repeats(self._session)
            compared = judge_held_updates(repeats, baseline, target, self._choice, proposal, self._apart)
            why = why or why_not_repeated(compared)
        if why is not None and self.started is not None:
            self._announce(announcement(why))
            compared = self.started.judge_update(baseline, target, self._choice, proposal, self._apart)
        elif why is not None:
            compared = self.refused(compared)
        if compared.answer == "agree" or (compared.answer == "inconclusive" and self.may_follow(held, compared)):
            # Optimizers may amplify rounding, which would accumulate over the updates.
            self._session.run(*[OfUpdate(HeldUpdate.keep_inputs)] * 2)
            if self.started is not None:
                self.started.keep(units_of({"baseline": baseline[0], "target": target[0]}))
        return compared

    def refused(self, compared: Comparison) -> Comparison:
        """The comparison with the reason why the scripts were not started again."""
        return followed_by(compared, [f"{_REFUSED} {self._refused_by} refuses that."])

    def may_follow(self, held: HeldUnits, compared: Comparison) -> bool:
        """Whether a call or update that proves nothing may be followed by others: not if it cannot be repeated, or is
        the last that can be judged.
        """
        kinds = (CallDescription, UpdateDescription)
        ours, theirs = ([each for each in side if isinstance(each, kinds)] for side in (held.baseline, held.target))
        repeats = self.started is not None or why_not_held(ours, theirs) is None
        return repeats and why_not_repeated(compared) is None and not compared.is_last
