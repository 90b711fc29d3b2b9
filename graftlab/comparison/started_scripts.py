"""Judges a call or an update that cannot be repeated: starts the scripts again for each run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Literal

from graftlab.base.text import counted
from graftlab.base.world import SIDES, Side
from graftlab.comparison.answers import Comparison
from graftlab.comparison.held_calls import judge_held_calls, why_no_backward
from graftlab.comparison.held_updates import judge_held_updates, take_equal_inputs
from graftlab.comparison.repeats import JudgingChoice, NoCloserLookError, Repeats
from graftlab.control.core import lend_plan, replace_ranks, restore_plan
from graftlab.errors import RunError, SessionError
from graftlab.jobs.script_rank import skip_to
from graftlab.judging.judge import judge_runs
from graftlab.judging.match_runs import match
from graftlab.judging.started_runs import RecordedSteps, StartedRuns
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.judging.verdict_runs import VerdictAbandoned
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.held_call import HeldCall
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.holding import (
    OfCall,
    OfUpdate,
    ScriptEnd,
    UnitKind,
    held_unit,
    prepare_once,
    repeat_call,
)
from graftlab.ranks.recorded_step import compare_with_record, record_step
from graftlab.verdict.added import added_frame
from graftlab.verdict.findings import Findings

if TYPE_CHECKING:
    from graftlab.control.verdicts import Verdict
    from graftlab.matching.proposal import Proposal
    from graftlab.session import Session

# Starts for a record and its repetition, for runs without grafts and with every tap grafted, for two of the baseline
# against itself, and for one from which the scripts continue.
EXPECTED_STARTS = 7
# The most starts of one comparison.
MOST_STARTS = 100

Units = Mapping[Side, tuple[UnitKind, int]]
"""What each side is held in, a call or an update, and its number on that side."""


def units_of(side_by_side: Mapping[Side, CallDescription | UpdateDescription]) -> Units:
    return {
        side: ("update" if isinstance(each, UpdateDescription) else "call", each.number)
        for side, each in side_by_side.items()
    }


class StartedScripts(Repeats):
    """Makes each run in new processes, which find the same call or update by its number.

    ``start`` starts both scripts; they wait at their first call. With ``training`` the target takes the baseline's
    weights there.
    """

    in_place = False

    def __init__(self, session: Session, start: Callable[[], Sequence[RankHandle]], *, training: bool) -> None:
        super().__init__(session)
        self.starts = 0
        self._start, self._training = start, training
        # The updates from which the target continued with the baseline's values.
        self._kept: list[Units] = []
        self._units: Units = {}
        self._backward = False
        self._no_backward: str | None = None
        self._recorded: RecordedSteps

    def keep(self, units: Units) -> None:
        """Let the target continue with the baseline's values after this update, now and in each later start."""
        self._kept.append(units)

    def in_float32(
        self, choice: JudgingChoice, *, is_first: bool, rounded_otherwise: Collection[str] = (), explain: bool = True
    ) -> Verdict:
        """Raise :class:`NoCloserLookError`: each run starts the scripts again, with their own dtypes."""
        raise NoCloserLookError("the scripts are started again for each run, with their own dtypes")

    def unfit_taps(self) -> set[str]:
        """Return none: the scripts are not started again for a match of a later call."""
        return set()

    def have_other_parts(self) -> bool:
        """Return false, for the same reason."""
        return False

    # ---- one judgement ------------------------------------------------------------------------------------------

    def judge_call(
        self,
        baseline: Sequence[CallDescription],
        target: Sequence[CallDescription],
        choice: JudgingChoice,
        known: Proposal | None,
    ) -> Comparison:
        """Judge these calls, whose plain results are described. Afterwards the scripts wait there again."""
        self._units = units_of({"baseline": baseline[0], "target": target[0]})
        calls = [*baseline, *target]
        self._backward = why_no_backward(calls) is None
        self._no_backward = None
        if (moved := self._record(f"call {baseline[0].number} of {baseline[0].model}")) is not None:
            return self._not_comparable(moved, choice)
        described = [
            [
                replace(each, taps=record.taps, tapped=record.results, not_repeated=(), fails_when_repeated=None)
                for each, record in zip(side, records, strict=True)
            ]
            for side, records in zip((baseline, target), self._recorded.records.values(), strict=True)
        ]
        compared = judge_held_calls(self, described[0], described[1], choice, known)
        return self._back(compared)

    def judge_update(
        self,
        baseline: Sequence[UpdateDescription],
        target: Sequence[UpdateDescription],
        choice: JudgingChoice,
        proposal: Proposal | None,
        known: Mapping[str, float],
    ) -> Comparison:
        """Judge these updates. Afterwards the scripts wait there again."""
        self._units = units_of({"baseline": baseline[0], "target": target[0]})
        self._backward, self._no_backward = False, None
        if (moved := self._record(f"update {baseline[0].number} of the weights")) is not None:
            return self._not_comparable(moved, choice)
        self._reach(takes_inputs=False)
        ours, theirs = ([replace(each, not_repeated=False) for each in side] for side in (baseline, target))
        return self._back(judge_held_updates(self, ours, theirs, choice, proposal, known))

    def _back(self, compared: Comparison) -> Comparison:
        if compared.answer == "agree":
            # The scripts continue from here.
            self._reach()
        return replace(compared, starts=self.starts)

    def _record(self, where: str) -> str | None:
        """Record two starts; returns a sentence if a side does not show the same values in both."""
        folder = self.session.folder / "started"
        folder.mkdir(exist_ok=True)
        record = partial(record_step, str(folder), self.session.options.keep_budget)
        self._reach()
        try:
            first = self.session.run(record, record)
        except RunError as error:
            if not self._backward:
                raise
            self._backward, self._no_backward = False, str(error).partition("\n")[0]
            self._reach()
            first = self.session.run(record, record)
        self._reach()
        second = self.session.run(*[partial(compare_with_record, str(folder))] * 2)
        self._recorded = RecordedSteps(
            str(folder),
            {"baseline": first.baseline, "target": first.target},
            {"baseline": second.baseline, "target": second.target},
        )
        return next(
            (_not_seeded(side, found, where) for side in SIDES if (found := self._recorded.differing(side))), None
        )

    def _not_comparable(self, why: str, choice: JudgingChoice) -> Comparison:
        nothing = added_frame(self.session.frame.iloc[:0], {}, constant=None)
        findings = Findings(nothing, choice.threshold, self.session.options.target, inconclusive=[why])
        return Comparison(findings, 2, self.session, None, "inconclusive", starts=self.starts)

    # ---- runs ---------------------------------------------------------------------------------------------------

    def match(self) -> Proposal:
        # Each further round would be a start.
        self._reach()
        return match(self.session, repeat_call, repeat_call, rounds=0)

    def add_backward(self) -> str | None:
        return self._no_backward

    def verdict(
        self, choice: JudgingChoice, *, explain: bool | Literal["lines"] = True, gradient_parts: bool = False
    ) -> Verdict:
        # To find parts of gradients takes several more starts.
        request = VerdictRequest(
            repeat_call,
            repeat_call,
            choice.output if explain is True else None,
            choice.floor,
            None,
            choice.threshold,
            explain,
        )
        return judge_runs(StartedRuns(self.session, request, self._reach, self._recorded))

    # ---- starts -------------------------------------------------------------------------------------------------

    def _reach(self, *, takes_inputs: bool = True) -> None:
        """Start both scripts, and let them continue to the units to be judged."""
        if self.starts >= MOST_STARTS:
            raise VerdictAbandoned(f"the scripts were started {MOST_STARTS} times, which is the limit")
        self.starts += 1
        replace_ranks(self.session, self._start)
        if self._training:
            take_baseline_weights(self.session)
        for units in self._kept:
            self._skip_to(units)
            take_equal_inputs(self.session)
            self.session.run(*[OfUpdate(HeldUpdate.keep_inputs)] * 2)
        self._skip_to(self._units)
        self.session.run(prepare_once, prepare_once, args=(self._backward,))
        if takes_inputs and self._units["baseline"][0] == "update":
            take_equal_inputs(self.session)

    def _skip_to(self, units: Units) -> None:
        self.session.run(partial(skip_to, *units["baseline"]), partial(skip_to, *units["target"]))
        run = self.session.run(held_unit, held_unit)
        for side, results in (("baseline", run.baseline), ("target", run.target)):
            wanted = units["baseline" if side == "baseline" else "target"]
            if (other := next((each for each in results if each != wanted), None)) is not None:
                how = (
                    f"ended{f' ({other.failure})' if other.failure else ''}"
                    if isinstance(other, ScriptEnd)
                    else "waits"
                )
                raise SessionError(
                    f"the {side} was started again and {how} before {wanted[0]} {wanted[1]}, which it reached "
                    "in its first start: it does not repeat itself"
                )


def take_baseline_weights(session: Session) -> None:
    """Give the target's models of the held calls the baseline's weights."""
    lend_plan(session, b2t="kind == 'param'")
    session.run(*[OfCall(HeldCall.take_weights)] * 2)
    restore_plan(session)


def announcement(why: str) -> str:
    """Sentences on starting the scripts again for this reason: how often, and what that repeats."""
    return (
        f"{why} The scripts will be started again for each of about {EXPECTED_STARTS} runs, and about twice as many if "
        "they differ: checkpoints, uploads and prints are repeated; --no-restart refuses this."
    )


def how_started(starts: int) -> str:
    """A sentence on how the runs were made."""
    return (
        f"The scripts were started again {counted(starts, 'time')}, because a call or an update could not be repeated "
        "in its process: each run began from the start, and counted calls and updates up to it."
    )


def _not_seeded(side: Side, taps: Sequence[str], where: str) -> str:
    more = f" and at {counted(len(taps) - 1, 'more tap')}" if len(taps) > 1 else ""
    return (
        f"The {side} does not repeat itself: started twice, it shows different values in {where}, first at {taps[0]}"
        f"{more}. The usual reason is random numbers without a seed: begin the script with torch.manual_seed(0), and "
        "random.seed(0) and numpy.random.seed(0) where it uses them; a data loader takes generator=."
    )
