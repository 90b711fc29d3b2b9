"""The comparison of two commands: their scripts run as they are, and wait where they call a model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from graftlab.base.progress import LongWait
from graftlab.base.text import counted
from graftlab.base.world import Side
from graftlab.comparison.held_calls import Answer, Comparison, JudgingChoice, described, judge_held_calls
from graftlab.control.run import Run, state_of
from graftlab.control.run_folder import make_run_folder
from graftlab.jobs.held_script import leave
from graftlab.jobs.script_launcher import ScriptCommand, ScriptProcess, ScriptSettings, scripts_of, start_scripts
from graftlab.matching.proposal import Proposal
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.held_call import CallDescription, ScriptEnd, describe_call, release_call
from graftlab.ranks.options import LaunchOptions
from graftlab.session import Session, open_session
from graftlab.verdict.wording import NOT_CHECKED

_HOW = (
    "Each script waited in the outermost calls of its models, which were repeated for each run from the same state; "
    "nothing else in the scripts was repeated."
)

# Seconds in which a script's processes end after one of them has.
_END_LIMIT = 60.0
# The sentence of a verdict on weights begins with this.
_WEIGHTS_DIFFER = "The weights already differ"

OnWait = Callable[[Sequence[ScriptProcess], Sequence[str]], None]


@dataclass(frozen=True)
class ScriptChoice:
    """How two scripts are compared: at most ``calls`` calls of their models, each judged by ``judging``.

    With ``keep_going`` the scripts continue afterwards.
    """

    settings: ScriptSettings = field(default_factory=ScriptSettings)
    judging: JudgingChoice = field(default_factory=JudgingChoice)
    calls: int = 4
    keep_going: bool = False
    folder: str | Path | None = None


def compare_scripts(
    baseline: ScriptCommand,
    target: ScriptCommand,
    choice: ScriptChoice,
    on_wait: OnWait = lambda processes, missing: None,
) -> Comparison:
    """Start both commands, hold the calls of their models one after the other, and judge each until one differs.

    Raises :class:`LaunchError`, with the last lines of a side's output, if a side ends before it calls a model or does
    not call one in time, and what :meth:`Session.run` raises.
    """
    options = LaunchOptions(baseline.ranks, target.ranks, timeout=choice.settings.timeout)
    commands: dict[Side, ScriptCommand] = {"baseline": baseline, "target": target}

    def start(options: LaunchOptions, folder: Path, plan: GraftPlan) -> Sequence[RankHandle]:
        return start_scripts(commands, options, plan, folder, choice.settings, on_wait)

    session = open_session(options, GraftPlan(), make_run_folder(choice.folder), start)
    try:
        compared = _CallsInTurn(session, choice).judge()
        if choice.keep_going and all(rank.alive for rank in session.ranks):
            for process in scripts_of(session).values():
                process.keeps_going = True
            session.run(leave, leave)
        return compared
    except BaseException:
        session.close()
        raise


class _CallsInTurn:
    """Judges the held calls of a session's scripts, one after the other, until one differs."""

    def __init__(self, session: Session, choice: ScriptChoice) -> None:
        self._session, self._choice = session, choice
        # The models of the calls so far, and the pairs that were found for each two models.
        self._models: list[str] = []
        self._proposals: dict[tuple[str, str], Proposal | None] = {}

    def judge(self) -> Comparison:
        compared = self._judge_call(self._session.run(describe_call, describe_call))
        while compared.answer == "agree":
            if len(self._models) == self._choice.calls:
                unseen = f"{NOT_CHECKED}further calls, if there are any; --calls N judges more of them."
                return _with(compared, (self._agreed(), unseen))
            self._session.run(release_call, release_call)
            run = self._session.start(describe_call, describe_call, on_failure="continue")
            bar = LongWait(f"waiting for call {len(self._models) + 1}", "", lambda: 0, where=state_of(run).where)
            # Not Run.wait, which shows the end of a script as a failure.
            state_of(run).wait_until(lambda: False, bar)
            if not all(isinstance(result, CallDescription) for result in (*run.baseline, *run.target)):
                return self._ended(compared, run)
            compared = self._judge_call(run)
        if len(self._models) == 1:
            return _with(compared, ())
        return _with(compared, (f"{self._agreed(self._models[:-1])} {self._at_last_call(compared)}",))

    def _judge_call(self, run: Run) -> Comparison:
        baseline, target = described(run)
        models = baseline[0].model, target[0].model
        known = self._proposals.get(models)
        if self._proposals and list(self._proposals)[-1] != models:
            # Pairs of other models are in force.
            self._session.edit(pairs=known)
        compared = judge_held_calls(self._session, baseline, target, self._choice.judging, known)
        self._proposals.pop(models, None)
        self._proposals[models] = compared.match
        self._models.append(models[0])
        return compared

    def _agreed(self, models: Sequence[str] | None = None) -> str:
        counts = Counter(self._models if models is None else models)
        listed = [f"{counted(count, 'call')} of {model}" for model, count in counts.items()]
        several = sum(counts.values()) > 1
        return f"{' and '.join(listed)} agree{'' if several else 's'}."

    def _at_last_call(self, compared: Comparison) -> str:
        number = len(self._models)
        if any(line.startswith(_WEIGHTS_DIFFER) for line in compared.findings.data):
            backward = ", the backward pass" if any("the backward pass" in said for said in compared.remarks) else ""
            return (
                f"Before call {number} the weights differ, so the difference arises in the loss{backward} or the "
                "update: the optimizer, its settings, clipping, a scaler, a reduction over ranks."
            )
        return f"At call {number}, of {self._models[-1]}:"

    def _ended(self, compared: Comparison, run: Run) -> Comparison:
        """The comparison after at least one side has ended where the other may have called a model once more."""
        results: dict[Side, list[object]] = {"baseline": run.baseline, "target": run.target}
        ranks = zip(self._session.ranks, (*run.baseline, *run.target), strict=True)
        if any(rank.alive and result is None for rank, result in ranks):
            state_of(run).raise_failures(f"{self._agreed()} Then ")
        said = [
            f"{self._agreed()} Then the {side} `{process.command.text}` {how}. Its output ends:\n{process.last_lines()}"
            for side, process in scripts_of(self._session).items()
            if (how := _failure(process, results[side])) is not None
        ]
        if said:
            return _with(compared, said, "inconclusive")
        again = [side for side, each in results.items() if all(isinstance(result, CallDescription) for result in each)]
        if again:
            fewer = "target" if again == ["baseline"] else "baseline"
            said = [
                f"{self._agreed()} Then the {again[0]} calls a model again, and the {fewer} ends: their numbers of "
                "calls differ."
            ]
            return _with(compared, said, "differ")
        return _with(compared, (self._agreed(),))


def _failure(process: ScriptProcess, results: Sequence[object]) -> str | None:
    """How a script failed; None if it ended as it should, or calls a model again."""
    raised = [result.failure for result in results if isinstance(result, ScriptEnd) and result.failure is not None]
    if raised:
        return f"raised {raised[0]}"
    # A process that was killed, or ended at once, could not report its end.
    if all(result is not None for result in results) or (process.wait(_END_LIMIT) and process.is_done):
        return None
    return process.how_it_ended()


def _with(compared: Comparison, said: Sequence[str], answer: Answer | None = None) -> Comparison:
    return replace(compared, remarks=(*said, *compared.remarks), answer=answer or compared.answer, how=_HOW)
