"""Entry points of a verdict: on functions, on jobs, and on rows alone."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pandas as pd

from graftlab.base.tap_groups import group_of
from graftlab.control.core import internals_of
from graftlab.control.verdicts import Verdict
from graftlab.control.work import refuse_invalid_expressions
from graftlab.errors import SessionError
from graftlab.judging.job_verdict_runs import StepRuns
from graftlab.judging.judgement import Judgement
from graftlab.judging.verdict_request import VerdictRequest, refuse_floor, refuse_threshold
from graftlab.judging.verdict_runs import CalledRuns, VerdictRuns
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.verdict.added import added_frame, labelled, named_groups, unseen_of
from graftlab.verdict.causes import consequences
from graftlab.verdict.extra_calls import extra_calls
from graftlab.verdict.findings import Findings
from graftlab.verdict.first_step import first_difference
from graftlab.verdict.gradient_scaling import GradientScaling, gradient_scaling
from graftlab.verdict.job_remarks import data_of_jobs, more_in_other_steps, remarks_on_rows
from graftlab.verdict.misaligned_steps import find_misaligned_steps
from graftlab.verdict.model_data import RunData, input_names, without_data
from graftlab.verdict.returned_values import AccumulatedFloors

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore


def judge(session: SessionCore, request: VerdictRequest) -> Verdict:
    """See :meth:`graftlab.session.Session.verdict`."""
    return judge_runs(runs_of(session, request))


def runs_of(session: SessionCore, request: VerdictRequest) -> VerdictRuns:
    """Return the runs that the request takes. Raises :class:`SessionError` for what cannot be judged."""
    if all(rank.takes_work for rank in session.ranks):
        return CalledRuns(session, of_functions(session, request))
    return StepRuns(session, _of_jobs(request))


def judge_runs(runs: VerdictRuns) -> Verdict:
    """Judge these runs, and add the verdict to those of their session."""
    with runs:
        verdict = Judgement(runs).verdict()
    internals_of(runs.session).verdicts.append(verdict)
    return verdict


def of_functions(session: SessionCore, request: VerdictRequest) -> VerdictRequest:
    """Fill in each side's default function. Raises :class:`SessionError` for what cannot be judged."""
    default = internals_of(session).default_callees
    baseline = default.get("baseline") if request.baseline is None else request.baseline
    target = default.get("target") if request.target is None else request.target
    if baseline is None or target is None:
        raise SessionError(
            "give baseline= and target=, the functions to judge; only a session that listens for jobs judges without "
            "them, in the steps that the jobs make anyway"
        )
    if request.steps != 1 or request.graft_weights:
        raise SessionError(
            "verdict: steps= and graft_weights= are for a session that listens for jobs. A function that is called "
            "for each run makes all of its steps, and begins from the same weights"
        )
    if isinstance(target, RecordedSide):
        raise SessionError(
            "verdict: the target is a recording, which computes nothing from what is grafted into it, so what each tap "
            "adds cannot be measured. Make it the baseline, or give the code that was recorded; "
            "session.plot.divergence() shows the differences as they are"
        )
    if isinstance(baseline, RecordedSide) and request.exact is not None:
        raise SessionError(
            "verdict: exact= measures a floor, and the baseline is a recording, which has none: leave it out, and give "
            "floor= where the assumed floor does not suit"
        )
    refuse_invalid_expressions(baseline, target, request.exact)
    return replace(request, baseline=baseline, target=target)


def _of_jobs(request: VerdictRequest) -> VerdictRequest:
    """Return the request. Raises :class:`SessionError` if it has code, because jobs cannot be given any."""
    if any(each is not None for each in (request.baseline, request.target, request.exact)) or any(request.arguments):
        raise SessionError(
            "verdict: these ranks are jobs that another launcher started, and cannot be given code to run: baseline=, "
            "target=, exact=, args= and kwargs= are for a launched session. session.verdict() judges what the jobs do"
        )
    return request


def judge_rows(
    compared: pd.DataFrame,
    grafted: pd.DataFrame,
    others: pd.DataFrame,
    shown: RunData,
    sizes: tuple[int, int] | None,
    *,
    ungrafted: pd.DataFrame,
    floor: float | None,
    threshold: float,
    where: str,
) -> Verdict:
    """See :meth:`graftlab.loaded_run.LoadedRun.verdict`.

    ``others`` are the rows of other steps in which every tap was grafted, ``ungrafted`` those of all steps without
    grafts.
    """
    refuse_floor(floor)
    refuse_threshold(threshold)
    job_remarks = remarks_on_rows(compared, grafted, shown, given=floor, threshold=threshold, where=where)
    computed = without_data(grafted)
    frame = added_frame(computed, {}, compared=compared, constant=job_remarks.constant)
    if (misaligned := find_misaligned_steps(ungrafted)) is not None:
        unjudged = frame.assign(label="unmeasured")
        ranks = grafted["rank"].nunique()
        return Verdict(
            Findings(unjudged, threshold, ranks, inconclusive=[misaligned.sentence], job_remarks=job_remarks), 0
        )
    earlier = ungrafted[ungrafted["step"] < grafted["step"].min()] if len(grafted) else ungrafted
    floors = AccumulatedFloors({}, {}, job_remarks.constant)
    if (first := first_difference(earlier, floors, threshold, sizes or (1, 1))) is not None:
        job_remarks = replace(job_remarks, first=(first.sentence, *job_remarks.first))
    named = named_groups(frame, threshold)
    data = data_of_jobs(shown.rows, grafted, threshold)
    evened = GradientScaling() if sizes is None else gradient_scaling(frame, computed, named, *sizes, threshold)
    even = evened.groups
    if even:
        data.append(evened.text)
        frame = evened.taken_out_of(frame)
    following = consequences(frame, [group for group in named if group not in even], threshold)
    data += more_in_other_steps(without_data(others), {*named}, job_remarks, threshold)
    named = [group for group in named if group not in (*even, *following)]
    inputs = {*input_names(compared), *input_names(computed)}
    given = [group_of(n, t) for n, t in zip(grafted["name"], grafted["tags"], strict=True) if n in inputs]
    findings = Findings(
        labelled(frame, named, following, {}, threshold, even),
        threshold,
        grafted["rank"].nunique(),
        [*unseen_of(grafted), *job_remarks.unseen],
        remarks=job_remarks.of_named if named else (),
        data=data,
        inputs=[*given, *even],
        following=following,
        job_remarks=job_remarks,
        extra_calls=extra_calls(grafted, named),
    )
    return Verdict(findings, 0)
