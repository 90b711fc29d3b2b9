"""The comparison of two commands: their scripts run unchanged, and wait in calls of their models."""

from __future__ import annotations

import logging
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from graftlab.base.progress import LongWait
from graftlab.base.tap_groups import group_of
from graftlab.base.world import SIDES, Side, other_side
from graftlab.comparison.answers import Answer, Comparison, ComparisonStopped, is_beyond_rounding, known_at
from graftlab.comparison.chosen_tokens import ChosenToken, chosen_tokens, sentence_on
from graftlab.comparison.held_calls import judge_until_exception
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
)
from graftlab.comparison.left_to_updates import (
    needs_differ,
    perhaps_of_other_work,
    unless_of_a_part,
    why_left_to_update,
)
from graftlab.comparison.other_work import given_other_tokens, other_batch
from graftlab.comparison.own_parts import OwnPart, OwnParts
from graftlab.comparison.repeats import JudgingChoice, Repeats, described
from graftlab.comparison.started_scripts import (
    StartedScripts,
    how_started,
    take_baseline_weights,
)
from graftlab.comparison.state_pairs import StatePairs
from graftlab.comparison.unit_judge import UnitJudge
from graftlab.comparison.units_so_far import UnitsSoFar, followed_by
from graftlab.control.run import state_of
from graftlab.control.run_folder import make_run_folder
from graftlab.errors import SessionError
from graftlab.jobs.held_script import uncompared_calls
from graftlab.jobs.script_launcher import ScriptSettings, scripts_of, start_scripts
from graftlab.jobs.script_process import ScriptCommand, ScriptProcess
from graftlab.jobs.script_rank import leave
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.held_update import UpdateDescription
from graftlab.ranks.holding import describe_call, describe_result, release_call
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
        refused_by = "--keep-going" if choice.restart else "--no-restart"
        self._unit_judge = UnitJudge(session, choice.judging, started, announce, refused_by)
        self._so_far = UnitsSoFar()
        self._began = time.monotonic()
        self._judged_by = math.inf
        # The comparison of calls with different numbers of rows on both sides, for use if no update follows.
        self._unpaired: Comparison | None = None
        # By side, whether calls since the last update need gradients; and the comparison of a call that differs while
        # those of one side alone do, for use if no update follows.
        self._needs: dict[Side, set[bool]] = {side: set() for side in SIDES}
        self._in_other_order: Comparison | None = None
        # Sentences on single calls that were left to an update.
        self._left_to_updates: list[str] = []
        # The first call in which each rank has a part of some gradients, for use if no update follows.
        self._in_parts: Comparison | None = None
        # The comparison of the first call of a part of a model, for use if no other call can be judged.
        self._left_out: Comparison | None = None
        # The comparison of a call that raises on one side, and differs before.
        self._before_exception: Comparison | None = None
        # The parts of models that one side calls by themselves, and the comparison of a call whose part differs.
        self._own_parts = OwnParts()
        self._differs_in_part: Comparison | None = None
        # The newest calls of the first ranks, and the previous ones.
        self._newest: _Calls | None = None
        self._before: _Calls | None = None
        # By the two models, what their calls leave behind under different names; and the number of the newest call
        # that was looked at for that.
        self._states: dict[tuple[str, str], StatePairs] = defaultdict(StatePairs)
        self._noted = 0
        self._compared: Comparison
        self._run: Run

    @property
    def known(self) -> str:
        """A sentence on the findings so far."""
        return self._so_far.known

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
            self._so_far.judged = len(self._so_far.models), self._so_far.updates
            if compared.answer != "agree":
                return self._at_last(compared)
            following = None if self._is_enough(held) else self._next(None, held)
        if (differs := self._before_exception or self._differs_in_part) is not None:
            return self._with(differs, ())
        return self._concluded([_NOT_ALL])

    def _note_call(self, held: HeldUnits) -> None:
        ours, theirs = described_as(held, CallDescription)
        number = self._so_far.looked_at
        # What was left to an update, or left out, has no number, and perhaps did other work on each side.
        if self._newest is not None and len(ours) == len(theirs) == 1 and number > self._noted:
            one, other = self._newest
            self._states[one.model, other.model].add(number, one, other)
        self._noted = number
        self._before, self._newest = self._newest, (ours[0], theirs[0])
        self._own_parts.note(held)
        self._note_needs(held)

    def _judged_call(self, held: HeldUnits) -> Comparison | None:
        """The comparison of this call, which agrees also if later calls or updates must show more.

        None if one side's call was left out, so that the other's gets a later partner.
        """
        if not self._judges_calls(held) and (agreeing := self._look_at_results(held)) is not None:
            return agreeing
        held = self._described_whole(held)
        if (other := self._so_far.of_other_batch) is not None and self._is_out_of_step(held):
            return self._passed_over(held, other)
        is_new = not self._unit_judge.has_judged(held)
        compared = self._judge_call(held)
        if compared.findings.gradient_parts and self._in_parts is None:
            self._in_parts = compared
        compared = perhaps_of_other_work(unless_of_a_part(compared, held), held)
        if (why := why_left_to_update(compared, held)) is not None:
            self._leave_to_update(compared, why)
            # The call was not compared, so it does not count among those that agree, nor do pairs found in it.
            self._so_far.forget_call()
            if is_new:
                self._unit_judge.forget_pairs()
            return replace(compared, answer="agree")
        if compared.answer != "inconclusive" or not self._unit_judge.may_follow(held, compared):
            return compared
        part = self._part_called_alone(held)
        # What was the partner of a call before is no part, whatever this call returns.
        if part is not None and is_new:
            self._so_far.leave_out(part)
            self._left_out = self._left_out or compared
            return None
        # A later call may differ, or tell more.
        self._so_far.add_undecided_call(compared)
        return replace(compared, answer="agree")

    def _judge_call(self, held: HeldUnits) -> Comparison:
        baseline, target = described_as(held, CallDescription)
        compared = self._unit_judge.judge_call(held)
        self._so_far.buffers = {group_of(name) for each in (*baseline, *target) for name in each.buffers}
        if compared.answer == "differ" and (left := self._states[baseline[0].model, target[0].model].remark()):
            compared = replace(compared, remarks=(*left, *compared.remarks))
        self._so_far.add_call(baseline[0].model, compared)
        return compared

    def _leave_to_update(self, compared: Comparison, why: str) -> None:
        """Keep the comparison of a call for use if no update follows; ``why`` says why the update shows more."""
        if compared.answer != "differ":
            self._unpaired = compared
        elif self._in_other_order is None:
            # Later calls may inherit the difference, as by the tokens that were chosen.
            self._in_other_order = self._so_far.with_calls_before(compared)
        self._left_to_updates = list(dict.fromkeys([*self._left_to_updates, why]))

    def _judged_update(self, held: HeldUnits) -> Comparison:
        """The comparison of this update, which agrees also if later ones must show more."""
        self._so_far.since_update = 0
        self._needs, self._in_other_order = {side: set() for side in SIDES}, None
        if self._unit_judge.must_refuse(held):
            return self._unit_judge.refused(self._passed())
        self._so_far.add_update()
        compared = followed_by(self._unit_judge.judge_update(held), self._left_to_updates)
        if compared.answer == "agree" or compared.left_to_next_update:
            self._so_far.clear_updates(compared)
        if compared.answer != "inconclusive" or not self._unit_judge.may_follow(held, compared):
            return compared
        self._so_far.undecided_updates[self._so_far.updates] = compared
        return replace(compared, answer="agree")

    def _concluded(self, remarks: Sequence[str] = ()) -> Comparison:
        """The comparison if everything that was judged agrees."""
        if self._in_other_order is not None:
            return self._with(followed_by(self._in_other_order, remarks), ())
        if self._unpaired is not None and not self._so_far.updates:
            return self._with(self._unpaired, (*remarks, *self._so_far.not_checked_elsewhere(self._unpaired)))
        if self._in_parts is not None and not self._so_far.updates:
            return self._with(self._in_parts, (_ONLY_PARTS, *remarks), "inconclusive")
        self._so_far.leave_last_update_out()
        compared = next(iter(self._so_far.all_undecided), self._compared)
        remarks = [*remarks, *self._so_far.not_checked_elsewhere(compared)]
        if self._choice.training and not self._so_far.updates:
            why = "No optimizer made a step that could be repeated, so no training was compared; leave --training out."
            return self._with(compared, (why, self._so_far.agreed(), *remarks), "inconclusive")
        # A single inconclusive call has its reasons in its own text.
        is_only = len(self._so_far.undecided) == len(self._so_far.models) == 1 and not self._so_far.updates
        # The target may lack what such a call of the baseline returns.
        lacking = self._own_parts.perhaps_lacking
        unclear = bool(lacking) or any(part.side == "baseline" for part in self._so_far.of_parts)
        agreed = "" if is_only else self._so_far.agreed()
        return self._with(compared, (agreed, *lacking, *remarks), "inconclusive" if unclear else None)

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
        what = f"call {self._so_far.looked_at + 1}" if self._so_far.models else "a call"
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
            elif (own := self._own_parts.called_alone(held)) is not None:
                if self._differs_in(own, held):
                    return None
                following = self._next(own.side, held)
            elif (side := held.behind) is not None:
                self._note_needs(held)
                following = self._next(side, held)
            elif (part := self._part_called_alone(held)) is not None and part in self._so_far.of_parts:
                self._so_far.of_parts[part] += 1
                following = self._next(part.side, held)
            else:
                return held
        return None

    def _differs_in(self, part: OwnPart, held: HeldUnits) -> bool:
        """Compare the result of a part with that of the other side's newest call, if that call had none to compare.

        If they differ, :attr:`_differs_in_part` has the comparison. A value that one side alone returns clears nothing.
        """
        found = self._own_parts.results(part, held)
        far = [each for each in found.differences if is_beyond_rounding(each, self._choice.judging.threshold)]
        is_whole = found.compared and not found.lost
        if not (is_whole or far) or (compared := self._so_far.complete_call()) is None:
            if far or not is_whole:
                self._own_parts.leave_out(part)
            return False
        self._compared = compared
        if far:
            remark = part.differing(max(each.rel_l2 for each in far))
            differs = replace(compared, remarks=(remark, *compared.remarks), answer="differ")
            self._differs_in_part = self._so_far.with_calls_before(differs)
        return bool(far)

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
            number = self._so_far.looked_at + 1
            before = [f"{self._so_far.agreed()} In call {number}, of {calls[0][0].model}:"] if number > 1 else []
            self._before_exception = replace(compared, remarks=(*before, *compared.remarks))
            return None
        agree = compared.answer == "inconclusive" and found.raised and found.frame["ratio"].notna().any()
        return f" {text_before_exception(found)}" if agree else ""

    def _next_of(self, raising: Sequence[tuple[Side, CallDescription]], held: HeldUnits, note: str) -> HeldUnits | None:
        """Let the sides continue whose calls raise, because their scripts may expect that, and call again."""
        if len(self._so_far.raised) >= _MOST_RAISING:
            raise SessionError("\n".join(self._so_far.raised))
        for side, call in raising:
            self._so_far.raised.append(
                f"{NOT_CHECKED}the {side}'s call {call.number} of {call.model}, which raises {call.raises}; its script "
                f"has continued.{note}"
            )
        return self._next(raising[0][0] if len(raising) == 1 else None, held)

    @property
    def _are_judged(self) -> bool:
        """Whether the requested number of calls has been judged."""
        return len(self._so_far.models) >= self._choice.calls

    def _look_at_results(self, held: HeldUnits) -> Comparison | None:
        """The comparison so far if this call's results agree, or prove nothing; None if the call must be judged."""
        if self._unpaired is not None or (self._so_far.updates and needs_differ(held)):
            # Only an update would show more, and time may be over before it.
            return self._compared
        ours, _ = described_as(held, CallDescription)
        found = self._returned(held)
        # A value that only one side returns, or in another shape, is a difference too.
        if found.lost or any(is_beyond_rounding(each, self._choice.judging.threshold) for each in found.differences):
            return None
        if found.compared:
            self._so_far.results.append(ours[0].model)
        elif not trains(held):
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

    def _described_whole(self, held: HeldUnits) -> HeldUnits:
        if not self._are_judged:
            return held
        run = self._session.run(describe_call, describe_call)
        self._newest = run.baseline[0], run.target[0]
        return HeldUnits(run.baseline, run.target)

    def _judges_calls(self, held: HeldUnits) -> bool:
        """Whether to judge this call: not after the requested number, or if the sides split the batch differently."""
        self._so_far.since_update += 1
        if self._are_judged:
            return False
        return self._unpaired is None or split_alike(held)

    def _is_enough(self, held: HeldUnits) -> bool:
        if self._so_far.since_update >= _MOST_WITHOUT_UPDATE and (trains(held) or self._in_other_order is not None):
            return True
        if held.both_hold(UpdateDescription):
            if not self._are_judged:
                return self._so_far.updates >= self._choice.calls
        elif (trains(held) and self._judged_by == math.inf) or self._in_other_order is not None:
            # The update after a judged call is judged too.
            return False
        if not self._are_judged:
            return False
        if self._unit_judge.starts:
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

    def _passed_over(self, held: HeldUnits, other: Comparison) -> Comparison:
        """The comparison so far, without the call that is held, which does other work as that of ``other`` does."""
        if self._are_judged:
            self._judged_by = 0.0
            return self._compared
        self._so_far.models.append(described_as(held, CallDescription)[0][0].model)
        self._so_far.add_undecided_call(other)
        return self._compared

    def _passed(self) -> Comparison:
        """The comparison so far, without the update that is held."""
        if not self._so_far.judged:
            raise SessionError(
                "the scripts begin with an update by a closure, which cannot be repeated, and starting them again "
                "was refused"
            )
        return replace(self._compared, answer="agree")

    def _with(self, compared: Comparison, remarks: Sequence[str], answer: Answer | None = None) -> Comparison:
        starts = self._unit_judge.starts
        how = how_started(starts) if starts else _HOW
        elsewhere = [
            f"{NOT_CHECKED}calls of models in other processes of the {side}, such as a data loader's workers."
            for side in SIDES
            if uncompared_calls(self._session.folder, side).exists()
        ]
        phrases = [part.not_compared(count) for part, count in self._so_far.of_parts.items()]
        of_parts = [f"{NOT_CHECKED}{each}" for each in [*phrases, *self._own_parts.not_compared]]
        every = (*remarks, *compared.remarks, *self._so_far.raised, *of_parts, *elsewhere)
        return replace(compared, remarks=every, answer=answer or compared.answer, how=how, starts=starts)

    def _at_last(self, compared: Comparison) -> Comparison:
        """The comparison of the last call or update, with a sentence on what agreed before it."""
        so_far = self._so_far
        if tokens := self._chosen_tokens(compared):
            before = so_far.agreed(len(so_far.models) - 1)
            chosen = f"{before} {sentence_on(tokens, so_far.looked_at, so_far.models[-1])}".strip()
            if not all(each.is_tie for each in tokens):
                return self._with(compared, (chosen,))
            # From equal tokens, this call agrees too.
            if undecided := so_far.all_undecided:
                return self._with(undecided[0], (chosen, _AFTER_A_TIE), "inconclusive")
            return self._with(compared, (chosen, _AFTER_A_TIE), "agree")
        if so_far.since_update == 0 and so_far.updates:
            agreed = so_far.agreed(updates=so_far.updates - 1)
            return self._with(compared, (f"{agreed} In update {so_far.updates} of the weights:".strip(),))
        return self._with(so_far.with_calls_before(compared), ())

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

    def _ended(self, held: HeldUnits) -> Comparison:
        """The comparison after at least one side has ended, while the other may have continued."""
        ranks = zip(self._session.ranks, (*held.baseline, *held.target), strict=True)
        if any(rank.alive and result is None for rank, result in ranks):
            state_of(self._run).raise_failures(f"{self._so_far.agreed()} Then ".lstrip())
        agreed = self._so_far.agreed()
        before = f"{agreed} Then the" if agreed else "The"
        scripts = scripts_of(self._session)
        remarks = [
            f"{before} {side} `{process.command.text}` {how}. Its output ends:\n{process.last_lines()}"
            for side, process in scripts.items()
            if (how := failure_of(process, held.of(side))) is not None
        ]
        if not self._so_far.judged and self._left_out is not None:
            return self._with(self._left_out, remarks)
        if not self._so_far.judged:
            raise SessionError("\n".join([*remarks, *self._so_far.raised]) or _NOTHING_TO_JUDGE)
        if not remarks and held.have_ended and (other := other_exit_code(scripts)) is not None:
            remarks = [f"{before} {other}"]
        if remarks and self._in_other_order is not None:
            return self._with(followed_by(self._in_other_order, remarks), ())
        if remarks:
            return self._with(self._compared, remarks, "inconclusive")
        for more in SIDES:
            fewer = other_side(more)
            for kind, what in ((CallDescription, "calls a model"), (UpdateDescription, "updates its weights")):
                if held.holds(more, kind):
                    differ = f"{before} {more} {what} again, and the {fewer} ends: one side does so more often."
                    if self._so_far.of_other_batch is not None and kind is CallDescription:
                        # As many calls of smaller batches do less.
                        again = f"The {more} {what} again when the {fewer} has ended, perhaps with smaller batches."
                        return self._concluded([again])
                    # A call that was left out is perhaps the partner of this one.
                    is_left_out = any(part.side == fewer for part in self._so_far.of_parts)
                    # Where no call could be judged, they may do other parts of the work.
                    proves_nothing = len(self._so_far.undecided) == len(self._so_far.models) > 0
                    may_be_partner = kind is CallDescription and (is_left_out or proves_nothing)
                    return self._with(self._compared, (differ,), "inconclusive" if may_be_partner else "differ")
        return self._concluded()
