"""The groups of taps that a verdict names, from what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pandas as pd

from graftlab.base.tap_groups import group_of
from graftlab.judging.evidence import Evidence
from graftlab.judging.unmeasured import judged_until_sketch, not_in_twin, unseen_taps
from graftlab.judging.verdict_runs import VerdictRuns
from graftlab.verdict.added import added_frame, named_groups, rows_where
from graftlab.verdict.causes import consequences
from graftlab.verdict.facts import Facts
from graftlab.verdict.findings import JobRemarks
from graftlab.verdict.gradient_scaling import gradient_scaling
from graftlab.verdict.job_remarks import data_of_jobs
from graftlab.verdict.model_data import (
    AGREES_WITH_THE_BASELINES,
    BEGINNINGS,
    BELOW,
    WITH_THE_BASELINES,
    computed_between_calls,
    differing_data,
    input_names,
)
from graftlab.verdict.pair_contradictions import compared_in_part, contradicting_pairs
from graftlab.verdict.quantised_modules import QuantisedModules, quantised_modules
from graftlab.verdict.returned_values import AccumulatedFloors, ValueDifference
from graftlab.verdict.summary import floor_of
from graftlab.verdict.unexplained import differing_taps


@dataclass
class Naming:
    """The named groups, and the measurements of each tap."""

    frame: pd.DataFrame
    named: list[str]
    following: list[str]
    """Groups of gradients that differ because named values differ."""
    scaled: Sequence[str]
    """Groups of gradients that differ by a factor that is taken back later."""
    accumulated: AccumulatedFloors
    differing: list[ValueDifference]
    """The taps that differ without grafts, by more than rounding adds up to."""
    given: set[str]
    """The names of taps that show what the model was given."""
    inputs: list[str]
    data: list[str]
    data_differs: bool
    """Whether inputs, weights, settings or a factor differ, which may explain what no tap does."""
    unseen: list[str]
    not_repeated: list[str]
    contradictions: Sequence[str] = ()
    """A sentence on pairs of the plan that contradict their names or each other, if there are any."""
    quantised: QuantisedModules = field(default_factory=QuantisedModules)
    maybe_explained: list[str] = field(default_factory=list)
    """Sentences on differences for which the data may be the reason."""
    target_not_repeated: list[str] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    """Groups of values that the weights of jobs explain, which differ."""
    only_without_grafts: bool = False
    """Whether what nothing explains shows only where no tap has the baseline's value."""
    job_remarks: JobRemarks | None = None

    @property
    def clears(self) -> bool:
        """Whether no computation is named although one could be. Differing inputs do not count as one."""
        return not (self.not_repeated or any(group not in self.inputs for group in self.named))


def name_groups(runs: VerdictRuns, evidence: Evidence) -> Naming:
    """The groups that add more than their floors allow, with what else the measurements show of the sides' values."""
    threshold, before, weights = runs.request.threshold, runs.before, evidence.weights
    compared, grafted, rows, floors = evidence.compared, evidence.grafted, evidence.measured, evidence.floors
    unseen = not_in_twin(evidence.selves, runs.has_twin)
    to_be_grafted = runs.to_be_grafted(compared if len(grafted) else compared.iloc[:0])
    quantised = quantised_modules(compared, grafted, threshold, evidence.summed_at)
    # The scales were compared together with their weights.
    others = rows_where(compared, ~compared["name"].isin(list(quantised.scales))) if len(compared) else compared
    unseen += unseen_taps(others, to_be_grafted, grafted, evidence.selves)
    if weights.failure is not None:
        unseen.append(f"the target's code with the baseline's weights: {weights.failure}")
    given = {*input_names(compared), *input_names(grafted)}
    given -= computed_between_calls(compared, grafted, threshold)
    inputs = [group_of(n, t) for n, t in zip(rows["name"], rows["tags"], strict=True) if n in given]
    not_repeated = floors.not_repeated
    job_remarks = runs.job_remarks(compared, grafted, not_repeated)
    contradictions = contradicting_pairs(compared, before)
    unseen += compared_in_part(compared, before)
    data: list[str] = []
    constant = runs.request.constant_floor
    if job_remarks is not None:
        constant = job_remarks.constant
        unseen += job_remarks.unseen
        data += data_of_jobs(compared, grafted, threshold)
    else:
        of_weights = WITH_THE_BASELINES if weights else BELOW
        data += differing_data(compared, threshold, grafted, of_weights=of_weights, settings=evidence.settings)
    if constant is None and not evidence.selves:
        constant, _ = floor_of(Facts(compared))
    frame = added_frame(
        grafted,
        floors.of_groups(),
        compared=compared,
        constant=constant,
        own=floors.of_taps(),
        allowed=quantised.floors,
        wholes=floors.of_wholes(),
    )
    frame, behind = judged_until_sketch(frame, grafted, threshold)
    unseen += [behind] if behind else []
    named = named_groups(frame, threshold)
    accumulated = floors.accumulated(constant)
    differing = [] if not_repeated else differing_taps(compared, accumulated, threshold, leave=given)
    if weights and not (named or not_repeated or differing):
        returned = evidence.returned
        if returned is None or not returned.beyond(accumulated, threshold, floors.returned_not_repeated):
            data = [line.replace(WITH_THE_BASELINES, AGREES_WITH_THE_BASELINES) for line in data]
    sizes = runs.session.options.baseline, runs.session.options.target
    scaling = gradient_scaling(frame, grafted, named, *sizes, threshold)
    if scaling.groups:
        data.append(scaling.text)
        frame = scaling.taken_out_of(frame)
    following = consequences(frame, [group for group in named if group not in scaling.groups], threshold)
    named = [group for group in named if group not in (*scaling.groups, *following)]
    return Naming(
        frame,
        named,
        following,
        scaling.groups,
        accumulated,
        differing,
        given,
        [*inputs, *scaling.groups],
        data,
        any(not line.startswith(BEGINNINGS["param"]) for line in data) or bool(data and not weights),
        unseen,
        not_repeated,
        contradictions=contradictions,
        quantised=quantised,
        job_remarks=job_remarks,
    )
