"""The comparison of two commands: their scripts run unchanged, and wait in calls of their models."""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graftlab.base.progress import LongWait
from graftlab.base.tap_groups import group_of, kind_of
from graftlab.base.text import counted, listed
from graftlab.base.world import SIDES, Side, other_side
from graftlab.comparison.answers import Answer, Comparison, ComparisonStopped, is_beyond_rounding, known_at
from graftlab.comparison.chosen_tokens import ChosenToken, chosen_tokens, sentence_on
from graftlab.comparison.held_calls import judge_held_calls, judge_until_exception
from graftlab.comparison.held_units import (
    HeldUnits,
    PartOfModel,
    described_as,
    failure_of,
    other_exit_code,
    part_of_model,
    split_alike,
    trains,
    why_not_held,
    why_not_repeated,
)
from graftlab.comparison.held_updates import judge_held_updates
from graftlab.comparison.inherited_rounding import InheritedRounding
from graftlab.comparison.left_to_updates import perhaps_of_other_work, unless_of_a_part, why_left_to_update
from graftlab.comparison.other_work import given_other_tokens, other_batch
from graftlab.comparison.repeats import JudgingChoice, Repeats, described
from graftlab.comparison.started_scripts import (
    StartedScripts,
    announcement,
    how_started,
    take_baseline_weights,
    units_of,
)
from graftlab.control.run import state_of
from graftlab.control.run_folder import make_run_folder
from graftlab.errors import SessionError
from graftlab.jobs.held_script import uncompared_calls
from graftlab.jobs.script_launcher import ScriptSettings, scripts_of, start_scripts
from graftlab.jobs.script_process import ScriptCommand, ScriptProcess
from graftlab.jobs.script_rank import leave
from graftlab.judging.unmeasured import BEGIN_INPUT
from graftlab.matching.proposal import Proposal
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.held_call import CallDescription
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.holding import OfUpdate, describe_call, describe_result, release_call
from graftlab.ranks.options import LaunchOptions
from graftlab.session import Session, open_session
from graftlab.verdict.model_data import BEGINNINGS
from graftlab.verdict.returned_values import ReturnedValues, compare_returned
from graftlab.verdict.wording import NOT_CHECKED, text_before_exception

if TYPE_CHECKING:
    from graftlab.control.run import Run

_HOW = (
    "The scripts ran once. Only outermost calls of models and steps of optimizers were repeated, each time from the "
    "same state."
)
_REFUSED = "To judge a call or update that cannot be repeated, the scripts must be started again for each run;"
# After this many calls that raise, a script is no longer waited for.
_MOST_RAISING = 16
_AFTER_A_TIE = f"{NOT_CHECKED}what the scripts compute from different tokens."
_NOTHING_TO_JUDGE = "a script ended before both sides had made a call to judge"
_ONLY_PARTS = (
    "Each of the target's ranks has only a summand of some gradients, and no update of the weights followed that would "
    "show whether they are added up."
)
_NOT_ALL = f"{NOT_CHECKED}further calls, if there are any; --calls N judges more of them."
# The least time, in seconds, in which the results of further calls are compared.
_LOOK_AT_RESULTS = 10.0
# After this many calls without an update, none is expected any more.
_MOST_WITHOUT_UPDATE = 64

# The beginning of a verdict's sentence on weights.
_WEIGHTS_DIFFER = "The weights already differ"

logger = logging.getLogger(__name__)

_Calls = tuple[CallDescription, CallDescription]
OnWait = Callable[[Sequence[ScriptProcess], Sequence[str]], None]


@dataclass(frozen=True)
class ScriptChoice:
    """How two scripts are compared: at most ``calls`` calls of their models, each judged by ``judging``.

    With ``training`` the target begins with the baseline's weights, and some update of the weights must be judged. With
    ``keep_going`` the scripts continue afterwards. With ``restart`` they are started again for each run if a call or an
    update cannot be repeated.
    """

    settings: ScriptSettings = field(default_factory=ScriptSettings)
    judging: JudgingChoice = field(default_factory=JudgingChoice)
    calls: int = 4
    training: bool = False
    keep_going: bool = False
    restart: bool = True
    folder: str | Path | None = None


def compare_scripts(
    baseline: ScriptCommand,
    target: ScriptCommand,
    choice: ScriptChoice,
    on_wait: OnWait = lambda processes, missing: None,
    announce: Callable[[str], object] = logger.warning,
) -> Comparison:
    """Start both commands, hold the calls of their models one after the other, and judge each until one differs.

    ``announce`` is called with a sentence before the scripts are started again.

    Raises :class:`LaunchError`, with the last lines of a side's output, if a side ends before it calls a model or does
    not call one in time, and the exceptions of :meth:`Session.run`.
    """
    options = LaunchOptions(baseline.ranks, target.ranks, timeout=choice.settings.timeout)
    commands: dict[Side, ScriptCommand] = {"baseline": baseline, "target": target}

    def start(options: LaunchOptions, folder: Path, plan: GraftPlan) -> Sequence[RankHandle]:
        return start_scripts(commands, options, plan, folder, choice.settings, on_wait)

    session = open_session(options, GraftPlan(), make_run_folder(choice.folder), start)

    def start_again() -> Sequence[RankHandle]:
        return start(options, session.folder, session.plan)

    restarts = choice.restart and not choice.keep_going
    started = StartedScripts(session, start_again, training=choice.training) if restarts else None
    held = _HeldInTurn(session, choice, started, announce)
    try:
        compared = held.judge()
        if choice.keep_going and all(rank.alive for rank in session.ranks):
            for process in scripts_of(session).values():
                process.keeps_going = True
            session.run(leave, leave)
        return compared
    except KeyboardInterrupt as interrupt:
        session.close()
        raise ComparisonStopped([held.known, *known_at(interrupt)]) from None
    except BaseException:
        session.close()
        raise


class _HeldInTurn:
    """Judges the held calls and updates of a session's scripts in turn, until something differs."""

    def __init__(
        self,
        session: Session,
        choice: ScriptChoice,
        started: StartedScripts | None = None,
        announce: Callable[[str], object] = logger.warning,
    ) -> None:
        self._session, self._choice = session, choice
        # None if the scripts must not be started again.
        self._started, self._announce = started, announce
        # The models of the calls so far, and the pairs found for each two models.
        self._models: list[str] = []
        self._proposals: dict[tuple[str, str], Proposal | None] = {}
        self._updates = self._since_update = 0
        # The models of calls after the judged ones whose results agree.
        self._results: list[str] = []
        self._began = time.monotonic()
        self._judged_by = math.inf
        # By weight, the distance of its gradients in calls that agree.
        self._apart: dict[str, float] = {}
        # By tap, how far rounding moved it in an earlier call, where that is far more than one rounding.
        self._inherited = InheritedRounding()
        # The comparison of calls with different numbers of rows on both sides, for use if no update follows.
        self._unpaired: Comparison | None = None
        # By side, whether calls since the last update need gradients; and the comparison of a call that differs while
        # those of one side alone do, for use if no update follows.
        self._needs: dict[Side, set[bool]] = {side: set() for side in SIDES}
        self._in_other_order: Comparison | None = None
        # Sentences on single calls that were left to an update.
        self._left_to_updates: list[str] = []
        # The calls that show no difference but were compared too little to agree, by their place among the models.
        self._undecided: dict[int, Comparison] = {}
        # The same of updates, by their number.
        self._undecided_updates: dict[int, Comparison] = {}
        # The first call in which each rank has a part of some gradients, for use if no update follows.
        self._in_parts: Comparison | None = None
        # By sentence, the first call in which this was not checked.
        self._left: dict[str, int] = {}
        self._buffers: set[str] = set()
        # Sentences on calls that raise.
        self._raised: list[str] = []
        # How many calls of one side were left out because its model is perhaps a part of the other side's.
        self._of_parts: Counter[PartOfModel] = Counter()
        # The comparison of the first of these calls, for use if no other call can be judged.
        self._left_out: Comparison | None = None
        # The comparison of a call that raises on one side, and differs before.
        self._before_exception: Comparison | None = None
        # The newest calls of the first ranks, and the previous ones.
        self._newest: _Calls | None = None
        self._before: _Calls | None = None
        # The numbers of calls and updates that have been judged.
        self._judged: tuple[int, int] | None = None
        self._compared: Comparison
        self._run: Run

    def judge(self) -> Comparison:
        following: HeldUnits | None = self._first()
        while following is not None and (held := self._brought_together(following)) is not None:
            following = held
            if held.both_hold(CallDescription):
                self._note_call(held)
                if (compared := self._judged_call(held)) is None:
                    continue
            elif not held.both_hold(UpdateDescription):
                return self._ended(held)
            elif self._in_other_order is not None and self._needs["baseline"] != self._needs["target"]:
                return self._with(self._in_other_order, ())
            else:
                compared = self._judged_update(held)
            self._compared = compared
            self._judged = len(self._models), self._updates
            if compared.answer != "agree":
                return self._at_last(compared)
            following = None if self._is_enough(held) else self._next(None, held)
        if self._before_exception is not None:
            return self._with(self._before_exception, ())
        return self._concluded([_NOT_ALL])

    def _note_call(self, held: HeldUnits) -> None:
        ours, theirs = described_as(held, CallDescription)
        self._before, self._newest = self._newest, (ours[0], theirs[0])
        self._note_needs(held)

    def _judged_call(self, held: HeldUnits) -> Comparison | None:
        """The comparison of this call, which agrees also if later calls or updates must show more.

        None if one side's call was left out, so that the other's gets a later partner.
        """
        if not self._judges_calls(held) and (agreeing := self._look_at_results(held)) is not None:
            return agreeing
        if self._has_other_batch and self._is_out_of_step(held := self._described_whole(held)):
            return self._passed_over(held)
        held = self._described_whole(held)
        known = len(self._proposals)
        compared = self._judge_call(held)
        if compared.findings.gradient_parts and self._in_parts is None:
            self._in_parts = compared
        compared = perhaps_of_other_work(unless_of_a_part(compared, held), held)
        if (why := why_left_to_update(compared, held)) is not None:
            self._leave_to_update(compared, why)
            # The call was not compared, so it does not count among those that agree, nor do pairs found in it.
            self._models.pop()
            if len(self._proposals) > known:
                self._proposals.popitem()
            return replace(compared, answer="agree")
        if compared.answer != "inconclusive" or not self._may_follow(held, compared):
            return compared
        part = self._part_called_alone(held)
        # What was the partner of a call before is no part, whatever this call returns.
        if part is not None and len(self._proposals) > known:
            self._leave_out(part, compared)
            return None
        # A later call may differ, or tell more.
        self._undecided[len(self._models) - 1] = compared
        return replace(compared, answer="agree")

    def _leave_to_update(self, compared: Comparison, why: str) -> None:
        """Keep the comparison of a call for use if no update follows; ``why`` says why the update shows more."""
        if compared.answer != "differ":
            self._unpaired = compared
        elif self._in_other_order is None:
            # Later calls may inherit the difference, as by the tokens that were chosen.
            self._in_other_order = self._with_calls_before(compared)
        self._left_to_updates = list(dict.fromkeys([*self._left_to_updates, why]))

    def _judged_update(self, held: HeldUnits) -> Comparison:
        """The comparison of this update, which agrees also if later ones must show more."""
        compared = self._judge_update(held)
        if compared.answer == "agree" or compared.left_to_next_update:
            self._clear_updates(compared)
        if compared.answer != "inconclusive" or not self._may_follow(held, compared):
            return compared
        self._undecided_updates[self._updates] = compared
        return replace(compared, answer="agree")

    @property
    def known(self) -> str:
        """A sentence on the findings so far."""
        if not self._judged or not any(self._judged):
            return "Nothing was judged yet."
        return f"So far: {self._agreed(*self._judged)}"

    def _concluded(self, remarks: Sequence[str] = ()) -> Comparison:
        """The comparison if everything that was judged agrees."""
        if self._in_other_order is not None:
            return self._with(_followed_by(self._in_other_order, remarks), ())
        if self._unpaired is not None and not self._updates:
            return self._with(self._unpaired, (*remarks, *self._left_elsewhere(self._unpaired)))
        if self._in_parts is not None and not self._updates:
            return self._with(self._in_parts, (_ONLY_PARTS, *remarks), "inconclusive")
        last = self._undecided_updates.get(self._updates)
        if self._updates > 1 and len(self._undecided_updates) == 1 and last is not None and last.left_to_next_update:
            # No further update shows whether the weights of the last one agree; the others do.
            self._updates -= 1
            self._undecided_updates.clear()
        undecided = [*self._undecided.values(), *self._undecided_updates.values()]
        compared = next(iter(undecided), self._compared)
        remarks = [*remarks, *self._left_elsewhere(compared)]
        if self._choice.training and not self._updates:
            why = "No optimizer made a step that could be repeated, so no training was compared; leave --training out."
            return self._with(compared, (why, self._agreed(), *remarks), "inconclusive")
        # A single inconclusive call has its reasons in its own text.
        is_only = len(self._undecided) == len(self._models) == 1 and not self._updates
        # The target may lack what such a call of the baseline returns.
        unclear = any(part.side == "baseline" for part in self._of_parts)
        return self._with(compared, ("" if is_only else self._agreed(), *remarks), "inconclusive" if unclear else None)

    def _left_elsewhere(self, compared: Comparison) -> list[str]:
        """Sentences on what was not checked in other calls than the one of this comparison."""
        own = compared.text.splitlines()
        return [
            f"{NOT_CHECKED}in call {call}, {line.removeprefix(NOT_CHECKED)}"
            for line, call in self._left.items()
            if line not in own
        ]

    def _first(self) -> HeldUnits:
        if self._choice.training:
            take_baseline_weights(self._session)
        run = self._session.run(describe_call, describe_call)
        return HeldUnits(run.baseline, run.target)

    def _next(self, side: Side | None, before: HeldUnits) -> HeldUnits | None:
        """Let the scripts, or this side's, continue to the next unit; None if the time is over."""
        ours, theirs = side in (None, "baseline"), side in (None, "target")
        self._session.run(release_call if ours else None, release_call if theirs else None)
        describe = describe_result if self._are_judged else describe_call
        run = self._session.start(describe if ours else None, describe if theirs else None, on_failure="continue")
        what = f"call {len(self._models) + len(self._results) + 1}" if self._models else "a call"
        bar = LongWait(f"waiting for {what}", "", lambda: 0, where=state_of(run).where)
        # Run.wait would show the end of a script as a failure.
        state_of(run).wait_until(lambda: time.monotonic() > self._judged_by, bar)
        self._run = run
        if not run.done:
            return None
        return HeldUnits(run.baseline if ours else before.baseline, run.target if theirs else before.target)

    def _brought_together(self, held: HeldUnits) -> HeldUnits | None:
        """Let a side continue whose call raises or was left out, or that calls while the other makes its update.

        Returns None if time is over.

        Raises :class:`SessionError` if calls only raise.
        """
        following: HeldUnits | None = held
        while following is not None:
            held = following
            if raising := held.raising:
                if (note := self._look_before_exception(held)) is None:
                    return None
                following = self._next_of(raising, held, note)
            elif (side := held.behind) is not None:
                self._note_needs(held)
                following = self._next(side, held)
            elif (part := self._part_called_alone(held)) is not None and part in self._of_parts:
                self._of_parts[part] += 1
                following = self._next(part.side, held)
            else:
                return held
        return None

    def _note_needs(self, held: HeldUnits) -> None:
        """Note whether the calls that are held need gradients."""
        for side, calls in zip(SIDES, described_as(held, CallDescription), strict=True):
            if calls:
                self._needs[side].add(any(each.needs_backward for each in calls))

    def _look_before_exception(self, held: HeldUnits) -> str | None:
        """A sentence on the values before the exception of one side's call, blank if none were compared.

        None if they differ although both calls have the same inputs; then :attr:`_before_exception` has the comparison.
        """
        if len(held.raising) > 1 or not held.both_hold(CallDescription):
            return ""
        calls = described_as(held, CallDescription)
        if self._are_judged:
            run = self._session.run(describe_call, describe_call)
            calls = described(run)
        if why_not_held(*calls) is not None:
            return ""
        compared = judge_until_exception(Repeats(self._session), *calls, self._choice.judging)
        found = compared.findings
        if compared.answer == "differ" and not found.data and not {*found.named} & {*found.inputs}:
            number = len(self._models) + len(self._results) + 1
            before = [f"{self._agreed()} In call {number}, of {calls[0][0].model}:"] if number > 1 else []
            self._before_exception = replace(compared, remarks=(*before, *compared.remarks))
            return None
        agree = compared.answer == "inconclusive" and found.raised and found.frame["ratio"].notna().any()
        return f" {text_before_exception(found)}" if agree else ""

    def _next_of(self, raising: Sequence[tuple[Side, CallDescription]], held: HeldUnits, note: str) -> HeldUnits | None:
        """Let the sides continue whose calls raise, because their scripts may expect that, and call again."""
        if len(self._raised) >= _MOST_RAISING:
            raise SessionError("\n".join(self._raised))
        for side, call in raising:
            self._raised.append(
                f"{NOT_CHECKED}the {side}'s call {call.number} of {call.model}, which raises {call.raises}; its script "
                f"has continued.{note}"
            )
        return self._next(raising[0][0] if len(raising) == 1 else None, held)

    @property
    def _are_judged(self) -> bool:
        """Whether the requested number of calls has been judged."""
        return len(self._models) >= self._choice.calls

    def _look_at_results(self, held: HeldUnits) -> Comparison | None:
        """The comparison so far if this call's results agree, or prove nothing; None if the call must be judged."""
        if trains(held) or self._unpaired is not None:
            return self._compared
        ours, _ = described_as(held, CallDescription)
        found = self._returned(held)
        # A value that only one side returns, or in another shape, is a difference too.
        if found.lost or any(is_beyond_rounding(each, self._choice.judging.threshold) for each in found.differences):
            return None
        if found.compared:
            self._results.append(ours[0].model)
        else:
            self._judged_by = 0.0
        return self._compared

    def _returned(self, held: HeldUnits) -> ReturnedValues:
        """The results of both sides' calls, compared."""
        ours, theirs = ([each.plain for each in calls] for calls in described_as(held, CallDescription))
        return compare_returned(ours, theirs, self._session.plan.pairs)

    def _part_called_alone(self, held: HeldUnits) -> PartOfModel | None:
        """The model that is perhaps a part of the other side's; None if the results of the calls can be compared."""
        part = part_of_model(held)
        return None if part is None or self._returned(held).compared else part

    def _leave_out(self, part: PartOfModel, compared: Comparison) -> None:
        """Forget the comparison of a call of a part of a model, so that the other side's call gets a later partner."""
        self._left = {line: call for line, call in self._left.items() if call < len(self._models)}
        self._models.pop()
        self._of_parts[part] = 0
        self._left_out = self._left_out or compared

    def _described_whole(self, held: HeldUnits) -> HeldUnits:
        if not self._are_judged:
            return held
        run = self._session.run(describe_call, describe_call)
        self._newest = run.baseline[0], run.target[0]
        return HeldUnits(run.baseline, run.target)

    def _judges_calls(self, held: HeldUnits) -> bool:
        """Whether to judge this call: not after the requested number, or if the sides split the batch differently."""
        self._since_update += 1
        if self._are_judged:
            return False
        return self._unpaired is None or split_alike(held)

    def _is_enough(self, held: HeldUnits) -> bool:
        if held.both_hold(UpdateDescription):
            return self._are_judged or self._updates >= self._choice.calls
        if trains(held) or self._in_other_order is not None:
            # The update after a judged call is judged too.
            return self._since_update >= _MOST_WITHOUT_UPDATE
        if not self._are_judged:
            return False
        if self._has_started:
            # A look at the results repeats each call once.
            return True
        now = time.monotonic()
        if self._judged_by == math.inf:
            # As long as the judged calls took. Scripts that continue afterwards must not be delayed.
            self._judged_by = 0.0 if self._choice.keep_going else now + max(now - self._began, _LOOK_AT_RESULTS)
        return now > self._judged_by

    def _is_out_of_step(self, held: HeldUnits) -> bool:
        """Whether this call and an earlier one do different work on the two sides, as where one side computes both
        halves of classifier-free guidance at once, or a prefill in chunks. Then the partner of a call is perhaps a
        later one.
        """
        calls = described_as(held, CallDescription)
        return not trains(held) and (bool(other_batch(*calls)) or given_other_tokens(*calls))

    @property
    def _has_other_batch(self) -> bool:
        return any(each.has_other_batch for each in self._undecided.values())

    def _passed_over(self, held: HeldUnits) -> Comparison:
        """The comparison so far, without the call that is held."""
        if self._are_judged:
            self._judged_by = 0.0
            return self._compared
        self._models.append(described_as(held, CallDescription)[0][0].model)
        self._undecided[len(self._models) - 1] = next(each for each in self._undecided.values() if each.has_other_batch)
        return self._compared

    def _judge_call(self, held: HeldUnits) -> Comparison:
        baseline, target = described_as(held, CallDescription)
        models = baseline[0].model, target[0].model
        self._buffers = {group_of(name) for each in (*baseline, *target) for name in each.buffers}
        known = self._proposals.get(models)
        if self._proposals and list(self._proposals)[-1] != models:
            # Pairs of other models are in force.
            self._session.edit(pairs=known)
        judging = self._choice.judging
        why = why_not_held(baseline, target)
        if why is None or self._started is None:
            matching = replace(judging, match_trained=True)
            compared = judge_held_calls(Repeats(self._session), baseline, target, matching, known, self._inherited)
            why = why or why_not_repeated(compared)
        if why is not None and self._started is not None:
            self._announce(announcement(why))
            compared = self._started.judge_call(baseline, target, judging, known)
        elif why is not None:
            compared = self._refused(compared)
        self._proposals.pop(models, None)
        self._proposals[models] = compared.match
        if compared.answer == "differ":
            doubts = self._inherited.doubts(compared)
            if doubts:
                compared = replace(compared, answer="inconclusive", remarks=(*doubts, *compared.remarks))
        self._inherited.add(compared)
        self._models.append(models[0])
        for line in compared.text.splitlines():
            if line.startswith(NOT_CHECKED):
                self._left.setdefault(line, len(self._models))
        if split_alike(held):
            # Gradients of different parts of a batch are apart by more than rounding.
            frame = compared.findings.frame
            for name, tags, error in zip(frame["name"], frame["tags"], frame["error"], strict=True):
                if kind_of(tags) == "param_grad" and error == error:
                    self._apart[name] = max(self._apart.get(name, 0.0), float(error))
        return compared

    def _judge_update(self, held: HeldUnits) -> Comparison:
        baseline, target = described_as(held, UpdateDescription)
        self._updates += 1
        self._since_update = 0
        self._needs, self._in_other_order = {side: set() for side in SIDES}, None
        proposal = next(reversed(self._proposals.values()), None)
        judging = self._choice.judging
        why = why_not_held(baseline, target)
        if why is None or self._started is None:
            if any(each.has_closure for each in (*baseline, *target)):
                self._updates -= 1
                return self._refused(self._passed())
            repeats = Repeats(self._session)
            compared = judge_held_updates(repeats, baseline, target, judging, proposal, self._apart)
            why = why or why_not_repeated(compared)
        if why is not None and self._started is not None:
            self._announce(announcement(why))
            compared = self._started.judge_update(baseline, target, judging, proposal, self._apart)
        elif why is not None:
            compared = self._refused(compared)
        if compared.answer == "agree" or (compared.answer == "inconclusive" and self._may_follow(held, compared)):
            # Optimizers may amplify rounding, which would accumulate over the updates.
            self._session.run(*[OfUpdate(HeldUpdate.keep_inputs)] * 2)
            if self._started is not None:
                self._started.keep(units_of({"baseline": baseline[0], "target": target[0]}))
        return _followed_by(compared, self._left_to_updates)

    def _clear_updates(self, later: Comparison) -> None:
        """Let earlier updates by different sets of optimizers agree if their weights are equal before a later update.

        Weights may differ there by the rounding of earlier updates, and so little may be a whole update.
        """
        for number, update in [*self._undecided_updates.items()]:
            if not update.left_to_next_update:
                continue
            if later.equal_weights.issuperset(update.left_to_next_update):
                del self._undecided_updates[number]
            else:
                why = f"Before update {self._updates} they differ by more than one rounding."
                self._undecided_updates[number] = _followed_by(replace(update, left_to_next_update=()), [why])

    def _refused(self, compared: Comparison) -> Comparison:
        """The comparison with the reason why the scripts were not started again."""
        option = "--keep-going" if self._choice.restart else "--no-restart"
        return _followed_by(compared, [f"{_REFUSED} {option} refuses that."])

    def _passed(self) -> Comparison:
        """The comparison so far, without the update that is held."""
        if not self._judged:
            raise SessionError(
                "the scripts begin with an update by a closure, which cannot be repeated, and starting them again "
                "was refused"
            )
        return replace(self._compared, answer="agree")

    @property
    def _has_started(self) -> bool:
        return self._started is not None and self._started.starts > 0

    def _with(self, compared: Comparison, remarks: Sequence[str], answer: Answer | None = None) -> Comparison:
        starts = self._started.starts if self._started is not None else 0
        how = how_started(starts) if starts else _HOW
        elsewhere = [
            f"{NOT_CHECKED}calls of models in other processes of the {side}, such as a data loader's workers."
            for side in SIDES
            if uncompared_calls(self._session.folder, side).exists()
        ]
        of_parts = [f"{NOT_CHECKED}{part.not_compared(count)}" for part, count in self._of_parts.items()]
        every = (*remarks, *compared.remarks, *self._raised, *of_parts, *elsewhere)
        return replace(compared, remarks=every, answer=answer or compared.answer, how=how, starts=starts)

    def _may_follow(self, held: HeldUnits, compared: Comparison) -> bool:
        """Whether a call or update that proves nothing may be followed by others: not if it cannot be repeated, or is
        the last that can be judged.
        """
        kinds = (CallDescription, UpdateDescription)
        ours, theirs = ([each for each in side if isinstance(each, kinds)] for side in (held.baseline, held.target))
        repeats = self._started is not None or why_not_held(ours, theirs) is None
        return repeats and why_not_repeated(compared) is None and not compared.is_last

    def _agreed(self, calls: int | None = None, updates: int | None = None) -> str:
        """A sentence on what agrees among the first calls and updates, and on the calls that prove nothing."""
        models = self._models[:calls]
        counts = Counter(model for place, model in enumerate(models) if place not in self._undecided)
        agreed = [f"{counted(count, 'call')} of {model}" for model, count in counts.items()]
        made = self._updates if updates is None else updates
        in_part = [number for number in self._undecided_updates if number <= made]
        made -= len(in_part)
        agreed += [f"{counted(made, 'update')} of the weights"] if made else []
        parts = []
        if agreed:
            several = sum(counts.values()) + made > 1
            parts.append(f"{listed(agreed)} agree{'' if several else 's'}")
        if self._results:
            parts.append(
                f"{'and so do ' if parts else ''}the results of the next {counted(len(self._results), 'call')}"
            )
            parts[-1] += "" if len(parts) > 1 else " agree"
        unclear = [str(place + 1) for place in self._undecided if place < len(models)]
        said = [f"{first[0].upper()}{first[1:]}."] if (first := ", ".join(parts)) else []
        for kind, numbers in (("Call", unclear), ("Update", [str(number) for number in in_part])):
            if numbers:
                said.append(f"{kind}{'' if len(numbers) == 1 else 's'} {listed(numbers)} can only be judged in part.")
        return " ".join(said)

    def _at_last(self, compared: Comparison) -> Comparison:
        """The comparison of the last call or update, with a sentence on what agreed before it."""
        tokens = self._chosen_tokens(compared)
        if tokens:
            number = len(self._models) + len(self._results)
            chosen = f"{self._agreed(len(self._models) - 1)} {sentence_on(tokens, number, self._models[-1])}".strip()
            if not all(each.is_tie for each in tokens):
                return self._with(compared, (chosen,))
            # From equal tokens, this call agrees too.
            if undecided := [*self._undecided.values(), *self._undecided_updates.values()]:
                return self._with(undecided[0], (chosen, _AFTER_A_TIE), "inconclusive")
            return self._with(compared, (chosen, _AFTER_A_TIE), "agree")
        if self._since_update == 0 and self._updates:
            agreed = self._agreed(updates=self._updates - 1)
            return self._with(compared, (f"{agreed} In update {self._updates} of the weights:".strip(),))
        return self._with(self._with_calls_before(compared), ())

    def _with_calls_before(self, compared: Comparison) -> Comparison:
        """The comparison of the last call, with a sentence on the calls before it, if there are any."""
        if len(self._models) == 1 and not self._updates:
            return compared
        before = f"{self._agreed(len(self._models) - 1)} {self._at_last_call(compared)}".strip()
        return replace(compared, remarks=(before, *compared.remarks))

    def _chosen_tokens(self, compared: Comparison) -> list[ChosenToken]:
        """The tokens that differ before the last call, if they were chosen from logits and nothing else differs."""
        found = compared.findings
        alone = [
            *(found.unexplained, found.following, found.failed, found.without_output, found.inconclusive),
            *(found.not_repeated, found.target_not_repeated),
        ]
        given = BEGINNINGS["input"]
        named = {*found.named} - {*found.rounding.groups}
        is_of_inputs = named <= {*found.inputs} and all(line.startswith(given) for line in found.data)
        if self._before is None or self._newest is None or any(alone) or not is_of_inputs or not named:
            return []
        return chosen_tokens(self._before, self._newest, self._choice.judging.threshold)

    def _at_last_call(self, compared: Comparison) -> str:
        number = len(self._models) + len(self._results)
        if self._differing_buffers(compared):
            return (
                f"Before call {number} buffers of the model differ, and its weights agree: an earlier call has written "
                "the buffers differently."
            )
        if any(line.startswith(_WEIGHTS_DIFFER) for line in compared.findings.data):
            return (
                f"Before call {number} the weights differ, so the difference arises after the last call: in "
                "the loss, the update, or code that writes weights."
            )
        if number > 1 and any(line.startswith(BEGIN_INPUT) for line in compared.findings.not_grafted):
            return (
                f"Before call {number}, of {self._models[-1]}, its inputs have different shapes: one side has made an "
                "extra call before it, or the scripts' own code between the calls differs."
            )
        found = compared.findings
        if number > 1 and found.named and {*found.named} <= {*found.inputs} and not found.unexplained:
            before = "no call before it is known to differ" if self._undecided else "the calls before it agree"
            return (
                f"Before call {number}, of {self._models[-1]}, its inputs differ, and {before}: the "
                "scripts' own code between the calls differs, or rounding has flipped a choice, such as a token."
            )
        return f"In call {number}, of {self._models[-1]}:"

    def _differing_buffers(self, compared: Comparison) -> bool:
        """Whether buffers of the model differ, such as a norm's running mean, and no weights."""
        differing = set(compared.findings.weights)
        return bool(differing) and differing <= self._buffers

    def _ended(self, held: HeldUnits) -> Comparison:
        """The comparison after at least one side has ended, while the other may have continued."""
        ranks = zip(self._session.ranks, (*held.baseline, *held.target), strict=True)
        if any(rank.alive and result is None for rank, result in ranks):
            state_of(self._run).raise_failures(f"{self._agreed()} Then ".lstrip())
        agreed = self._agreed()
        before = f"{agreed} Then the" if agreed else "The"
        scripts = scripts_of(self._session)
        remarks = [
            f"{before} {side} `{process.command.text}` {how}. Its output ends:\n{process.last_lines()}"
            for side, process in scripts.items()
            if (how := failure_of(process, held.of(side))) is not None
        ]
        if not self._judged and self._left_out is not None:
            return self._with(self._left_out, remarks)
        if not self._judged:
            raise SessionError("\n".join([*remarks, *self._raised]) or _NOTHING_TO_JUDGE)
        if not remarks and held.have_ended and (other := other_exit_code(scripts)) is not None:
            remarks = [f"{before} {other}"]
        if remarks and self._in_other_order is not None:
            return self._with(_followed_by(self._in_other_order, remarks), ())
        if remarks:
            return self._with(self._compared, remarks, "inconclusive")
        for more in SIDES:
            fewer = other_side(more)
            for kind, what in ((CallDescription, "calls a model"), (UpdateDescription, "updates its weights")):
                if held.holds(more, kind):
                    differ = f"{before} {more} {what} again, and the {fewer} ends: one side does so more often."
                    if self._has_other_batch and kind is CallDescription:
                        # As many calls of smaller batches do less.
                        again = f"The {more} {what} again when the {fewer} has ended, perhaps with smaller batches."
                        return self._concluded([again])
                    # A call that was left out is perhaps the partner of this one.
                    may_be_partner = kind is CallDescription and any(part.side == fewer for part in self._of_parts)
                    return self._with(self._compared, (differ,), "inconclusive" if may_be_partner else "differ")
        return self._concluded()


def _followed_by(compared: Comparison, remarks: Sequence[str]) -> Comparison:
    return replace(compared, remarks=(*compared.remarks, *remarks))
