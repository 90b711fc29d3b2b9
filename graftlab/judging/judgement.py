"""One verdict in progress: makes its runs and draws the conclusions, stage by stage.

After the first run a failure does not lose the results: a failed stage is reported in a sentence, and the stages that
do not depend on it proceed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TypeVar

import pandas as pd

from graftlab.base.tap_groups import group_of, kind_of, kind_of_group, place_in_blame
from graftlab.control.verdicts import Verdict
from graftlab.errors import GraftError, RunError
from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging.job_steps import JobStepsAbandoned
from graftlab.judging.line_runs import LineSearch
from graftlab.judging.masked_values import left_out, masks_alike, with_equal_masks, without_masked_values
from graftlab.judging.measured_floors import MeasuredFloors
from graftlab.judging.mechanisms import LentWeights, Mechanisms
from graftlab.judging.partial_sums import (
    GRADIENTS,
    Summands,
    averages_not_named,
    averages_of_parts,
    gradients_not_compared,
    next_taps,
    not_adding_up,
    not_compared,
    partial_sums,
)
from graftlab.judging.split_calls import SplitCalls, not_paired, split_calls
from graftlab.judging.stored_weights import text_on_stored, without_weights
from graftlab.judging.swaps import OutputTap, Swaps, by_size, earlier_steps, find_outputs, first_over
from graftlab.judging.unmeasured import (
    baseline_changed,
    effects_not_measured,
    judged_at,
    judged_until_sketch,
    not_grafted,
    not_in_twin,
    outputs_themselves,
    unseen_taps,
)
from graftlab.judging.verdict_runs import CalledRuns, RunFilters, VerdictAbandoned, VerdictRuns
from graftlab.matching.pair import Pair
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import (
    NOT_NAMED,
    added_frame,
    labelled,
    named_groups,
    names_one_tap,
    one_sided_filter,
    records,
    unread_grafts,
    unread_grafts_text,
)
from graftlab.verdict.causes import Causes, consequences
from graftlab.verdict.extra_calls import extra_calls, only_before
from graftlab.verdict.facts import Facts
from graftlab.verdict.first_step import (
    NOT_JUDGED_SINCE,
    FirstDifference,
    explained_by_weights,
    on_diverged_weights,
)
from graftlab.verdict.free_running import held_choices, runs_freely
from graftlab.verdict.gradient_scaling import gradient_scaling
from graftlab.verdict.job_remarks import data_of_jobs
from graftlab.verdict.lines import DifferingLine, explained_by_code
from graftlab.verdict.model_data import (
    AGREES_WITH_THE_BASELINES,
    BEGINNINGS,
    BELOW,
    WITH_THE_BASELINES,
    computed_between_calls,
    differing_data,
    differing_rows,
    differing_weights,
    input_names,
    nearly_equal_weights,
    unequal_weights,
)
from graftlab.verdict.optimizer_settings import NO_SETTINGS, SETTINGS, SettingsDifference, settings_difference
from graftlab.verdict.origins import ErrorOrigins
from graftlab.verdict.outdated_pairs import (
    OutdatedPair,
    learned_from_other_code,
    no_longer_equal,
    outdated_pairs,
    with_present_partners,
)
from graftlab.verdict.pair_contradictions import compared_in_part, contradicting_pairs, pairs_of
from graftlab.verdict.quantised_modules import QuantisedModules, quantised_limits, quantised_modules
from graftlab.verdict.renaming import pairing_advice
from graftlab.verdict.rounds_differently import LABEL as ROUNDS_DIFFERENTLY
from graftlab.verdict.rounds_differently import RoundingGroups, rounds_differently, taps_that_stand_out
from graftlab.verdict.summary import floor_of
from graftlab.verdict.unexplained import (
    AccumulatedFloors,
    ReturnedValues,
    UnexplainedDifferences,
    ValueDifference,
    cut_graphs,
    differing_taps,
    on_unseen_choices,
)
from graftlab.verdict.wording import Findings, JobRemarks, reads_unwritten

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


# Runs for all named groups together: with and without their code, the inputs of their modules, and lines of source.
_RUNS_OF_NAMED = 4


@dataclass(frozen=True)
class Evidence:
    """What the runs of a verdict measured.

    ``compared`` are the rows of a run without grafts, ``grafted`` those of a run in which every tap had the baseline's
    value, and ``returned`` and ``returned_grafted`` what the functions returned in them; None for jobs. ``outputs`` are
    the taps at which effects are measured, ``selves`` the results of running the baseline against itself.
    """

    compared: pd.DataFrame
    grafted: pd.DataFrame
    returned: ReturnedValues | None
    returned_grafted: ReturnedValues | None
    outputs: Sequence[OutputTap]
    selves: Sequence[SelfGraft]
    floors: MeasuredFloors
    one_sided: str | None
    """A filter for the taps that only one side has. A swap must not wait for them."""
    settings: SettingsDifference

    @property
    def measured(self) -> pd.DataFrame:
        """The rows of taps that were grafted and measured."""
        return self.grafted[self.grafted["status"].isin(MEASURED)]


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


def _unseen_dtype(computed_in: str, frame: pd.DataFrame) -> str:
    """The dtype of 16 bits in which the baseline computes; blank if its taps show it, or there is none."""
    return "" if ((frame["dtype"] == computed_in) & frame["cast"].isna()).any() else computed_in


class Judgement:
    """Makes the runs of one verdict and draws its conclusions."""

    def __init__(self, runs: VerdictRuns) -> None:
        self.session = runs.session
        self._runs = runs
        self._before = runs.before
        self._threshold = runs.request.threshold
        self._failed: list[str] = []
        self._masks_alike: list[str] = []
        self._summed_at: dict[str, str] = {}
        self._weights = LentWeights()
        self._is_abandoned = False

    def verdict(self) -> Verdict:
        """Make the runs, and return the verdict."""
        evidence, split = self._measured_without_split_calls()
        evidence, sums = self._measured_without_partial_sums(evidence)
        evidence, averages = self._measured_without_averages(evidence)
        evidence, parts = self._measured_without_parts_of_gradients(evidence)
        naming = self._name(evidence)
        naming.unseen += (
            not_paired(split) + not_compared(sums) + gradients_not_compared(parts) + averages_not_named(averages)
        )
        sentence = self._why_grafts_are_wrong(evidence, naming)
        if sentence is not None:
            return self._without_conclusion(naming, sentence)
        outdated, sentence = self._outdated_pairs(evidence, naming)
        if sentence is not None:
            return self._without_conclusion(naming, sentence)
        masked = self._unmask(evidence, naming)
        self._repeat_target(evidence, naming)
        if self._explains(naming):
            # Runs for each group alone, for all together, for the place of their errors, and for hints.
            self._runs.expected = self._runs.count + len(naming.named) + _RUNS_OF_NAMED
        has_taps = bool(split) or len(evidence.compared) > 0
        unexplained, without_output, written = self._unexplained(evidence, naming, has_taps=has_taps)
        if naming.clears and not naming.target_not_repeated:
            nothing_read: list[str] = []
            read = self._attempt("the check for unwritten memory", self._runs.unwritten_memory, nothing_read)
            without_output += reads_unwritten(read)
        if naming.clears:
            # What follows may dilute the difference, as a residual stream does.
            without_output += not_adding_up(sums)
            without_output += self._nearly_equal_weights(evidence, naming, unexplained)
        mechanisms = Mechanisms(self._runs, evidence.one_sided)
        origins = self._origins(evidence, naming, mechanisms)
        swaps = Swaps(self._runs, evidence.measured, evidence.selves, evidence.floors, evidence.one_sided)
        causes, remarks = self._causes(evidence, naming, swaps)
        quantised, explained = self._quantised(evidence, naming, swaps)
        factors = naming.quantised.factors(naming.frame, naming.named)
        if self._runs.request.constant_floor is None:
            unexplained += factors
        else:
            # A caller who gives the floor has chosen what may be added.
            remarks += [*factors, *quantised]
            quantised = []
        # Inputs are grafted with everything else, so the swaps, where possible, measured their effect.
        if not (explained or (causes and all(each.restored <= each.limit for each in causes.values()))):
            # The floor of a caller does not excuse results that no tap explains.
            beside_data = naming.data_differs or not naming.quantised.text
            (naming.data if beside_data else quantised).extend(naming.maybe_explained)
        rounding = self._rounds_differently(evidence, naming, swaps)
        weights = differing_weights(evidence.compared, self._threshold)
        remarks += self._remarks(evidence, naming, weights, outdated, masked + written)
        following = [*naming.following, *naming.diverged]
        frame = labelled(naming.frame, naming.named, following, causes, self._threshold, naming.scaled)
        frame.loc[frame["group"].isin(rounding.groups) & (frame["added"] > 0), "label"] = ROUNDS_DIFFERENTLY
        search = self._search_lines(evidence, naming, frame, mechanisms)
        if search is not None:
            remarks += search.remarks
        lines = [] if search is None else search.lines
        hints: dict[str, str] = {}
        if causes or (self._explains(naming) and not naming.not_repeated):
            hints = self._attempt("the search for hints", lambda: mechanisms.hints(frame, naming.named), {})
        of_functions = naming.job_remarks is None
        return Verdict(
            Findings(
                frame=frame,
                threshold=self._threshold,
                target_ranks=self.session.options.target,
                unseen=naming.unseen,
                may_be_inherited=self._why_inherited(evidence, naming, lines),
                not_repeated=naming.not_repeated if of_functions else (),
                causes=causes,
                hints={**self._weights.hints, **hints},
                remarks=remarks,
                data=naming.data,
                contradicting_pairs=naming.contradictions,
                quantised=quantised,
                inputs=naming.inputs,
                # Jobs may have begun with different weights, so their weights are reported first.
                weights=weights if of_functions else {},
                weights_lent=bool(self._weights),
                following=naming.following,
                target_not_repeated=naming.target_not_repeated if of_functions or self._runs.recorded else (),
                job_remarks=naming.job_remarks,
                raised=None if self._runs.raised is None else self._runs.raised.sentence,
                not_grafted=not_grafted(evidence.grafted, naming.frame, self._threshold),
                unexplained=unexplained,
                only_without_grafts=naming.only_without_grafts and not factors,
                without_output=without_output,
                failed=self._failed,
                pairing_advice=pairing_advice(evidence.compared, of_jobs=not of_functions and not self._runs.recorded),
                rounding=rounding,
                gradient_parts=[*parts],
                computed_in=_unseen_dtype(evidence.floors.computed_in, frame),
                lines=lines,
                only_returned=bool(split),
                after_taps=_after_taps(evidence),
                # The side that raises makes fewer calls, and these pair with the other side's first ones.
                extra_calls=[]
                if self._runs.raised is not None
                else self._attempt(
                    "the search for extra calls", lambda: extra_calls(evidence.grafted, naming.named), []
                ),
                origins=origins,
                only_before=self._attempt("the search for lone taps", partial(_only_before, evidence, frame), {}),
                maps={**self._weights.maps, **mechanisms.maps},
            ),
            self._runs.count,
        )

    def _without_conclusion(self, naming: Naming, sentence: str) -> Verdict:
        """The verdict where grafts would be wrong: the pairs no longer hold, or the sides are in different steps."""
        following = [*naming.following, *naming.diverged]
        frame = labelled(naming.frame, naming.named, following, {}, self._threshold, naming.scaled)
        frame["label"] = "unmeasured"
        ranks = self.session.options.target
        found = Findings(frame, self._threshold, ranks, naming.unseen, failed=self._failed, inconclusive=[sentence])
        return Verdict(found, self._runs.count)

    def _why_grafts_are_wrong(self, evidence: Evidence, naming: Naming) -> str | None:
        """A sentence if the sides are in different steps, or have updated their parameters differently; else None.

        Notes the first step of jobs that differs.
        """
        misaligned = self._attempt(
            "the search for a shift between the sides", lambda: self._runs.misaligned_steps(evidence.compared), None
        )
        if misaligned is not None:
            return misaligned.sentence
        nowhere: FirstDifference | None = None
        first = self._attempt(
            "the search for the first step that differs",
            lambda: self._runs.first_difference(naming.accumulated),
            nowhere,
        )
        if first is not None and naming.job_remarks is not None:
            if first.is_update and not self._runs.request.graft_weights:
                return f"{first.sentence} {NOT_JUDGED_SINCE}"
            sentences = first.sentence, *self._leave_out_diverged(evidence, naming, first)
            naming.job_remarks = replace(naming.job_remarks, first=(*sentences, *naming.job_remarks.first))
        return None

    def _leave_out_diverged(self, evidence: Evidence, naming: Naming, first: FirstDifference) -> list[str]:
        """Name no values that diverged weights explain, if others are named; returns a sentence on them.

        The place where the jobs first differed, from equal weights, stays named.
        """
        if self._runs.request.graft_weights:
            return []
        weights = differing_rows(self._runs.weights_before(evidence.grafted), self._threshold)
        found = explained_by_weights(naming.frame, naming.named, weights, self._threshold)
        naming.diverged = [group for group in found if group != first.group]
        left = [group for group in naming.named if group not in naming.diverged]
        if not naming.diverged or not left:
            naming.diverged = []
            return []
        naming.named = left
        naming.data = [line.replace(f" {BELOW}", "") for line in naming.data]
        return [on_diverged_weights(naming.diverged)]

    def _outdated_pairs(self, evidence: Evidence, naming: Naming) -> tuple[list[OutdatedPair], str | None]:
        """The plan's pairs whose taps are no longer equal, and a sentence if they were learned from other code."""
        outdated = outdated_pairs(evidence.measured, self._before, naming.given)
        if not outdated:
            return [], None
        nothing: list[Pair] = []
        present = self._attempt("the search for the partners that taps have now", self._runs.present_pairs, nothing)
        outdated = with_present_partners(outdated, pairs_of(evidence.compared, self._before), present)
        return outdated, learned_from_other_code(outdated) or None

    def _attempt(self, what: str, stage: Callable[[], Result], otherwise: Result) -> Result:
        """Return the stage's result; if it fails, ``otherwise``, and add a sentence to the verdict."""
        if self._is_abandoned:
            return otherwise
        try:
            return stage()
        except Exception as error:
            # Any other error is a defect of graftlab, and a report of it needs the traceback.
            level = logging.DEBUG if isinstance(error, GraftError) else logging.WARNING
            _log.log(level, "verdict: %s failed", what, exc_info=True)
            self._is_abandoned = isinstance(error, (VerdictAbandoned, JobStepsAbandoned)) or self.session.closed
            lines = [line for line in str(error).splitlines() if line.strip()]
            own = isinstance(error, GraftError) and lines
            # A run's error names the ranks in its first line, and what happened to the first of them in its second.
            shown = ": ".join(lines[: 2 if isinstance(error, RunError) else 1]).partition(". Its log (")[0]
            reason = shown if own else ": ".join([type(error).__name__, *lines[:1]])
            self._failed.append(f"{what[0].upper()}{what[1:]} failed, so its results are missing: {reason}")
            return otherwise

    # ---- the runs that every verdict needs ----------------------------------------------------------------------

    def _measured_without_split_calls(self) -> tuple[Evidence, SplitCalls]:
        """The measurements without taps at which each side divides its work into different calls; and those taps.

        Without a returned value, or if the plan pairs calls, nothing is left out.
        """
        evidence = self._measure()
        split: SplitCalls = {}
        pairs_calls = self._before.pairs or self._runs.request.output is not None
        if evidence.returned is not None and evidence.returned.compared and not pairs_calls:
            what = "the search for calls that do not pair"
            split = self._attempt(what, partial(split_calls, evidence.compared), split)
        if split:
            self._runs.leave_out(split)
            self._runs.return_weights()
            evidence = self._measure()
        return evidence, split

    def _measured_without_partial_sums(self, evidence: Evidence) -> tuple[Evidence, dict[str, Summands]]:
        """The measurements without taps that hold partial sums on each rank; and those taps, by group."""
        sums: dict[str, Summands] = {}
        # What is computed from a summand, as by dropout, is one too, and shows it once the summand is not grafted.
        while self._runs.shows_module_inputs and not self._failed:
            found: dict[str, Summands] = {}
            limits = quantised_limits(evidence.compared)
            limits |= {name: limits[output] for name, output in self._summed_at.items() if output in limits}
            search = partial(partial_sums, self._runs, evidence.grafted, limits)
            found = self._attempt("the search for partial sums", search, found)
            if found.keys() <= sums.keys():
                break
            sums |= found
            names = {name for each in found.values() for name in each.names}
            after = next_taps(evidence.grafted, names)
            self._summed_at |= {name: self._summed_at.get(output, output) for name, output in after.items()}
            self._runs.leave_out((name, None) for name in names)
            self._runs.return_weights()
            evidence = self._measure()
        return evidence, sums

    def _measured_without_averages(self, evidence: Evidence) -> tuple[Evidence, list[str]]:
        """The measurements without numbers that each rank has of its part of the batch; and these, by name.

        Nothing is left out if functions return values: these differ as well, and would then be unexplained.
        """
        ranks = self.session.options
        returns = evidence.returned is not None and evidence.returned.compared
        names: list[str] = []
        if not (returns or self._failed):
            names = averages_of_parts(evidence.grafted, ranks.baseline, ranks.target)
        if names:
            self._runs.leave_out((name, None) for name in names)
            self._runs.return_weights()
            evidence = self._measure()
        return evidence, names

    def _measured_without_parts_of_gradients(self, evidence: Evidence) -> tuple[Evidence, dict[str, list[str]]]:
        """The measurements without gradients that code after the run adds up over the ranks; and those, by group.

        Nothing is left out if something is named without them too: then they may show where a sum is missing.
        """
        parts: dict[str, list[str]] = {}
        while self._runs.request.gradient_parts and not self._failed:
            none: dict[str, Summands] = {}
            search = partial(partial_sums, self._runs, evidence.grafted, kinds=GRADIENTS)
            sums = self._attempt("the search for partial sums of gradients", search, none)
            found = {group: each.names for group, each in sums.items() if not each.wrong}
            if found.keys() <= parts.keys():
                break
            parts |= found
            self._runs.leave_out((name, kind_of_group(group)) for group, names in found.items() for name in names)
            self._runs.return_weights()
            evidence = self._measure()
        if parts and self._name(evidence).named:
            self._runs.take_back((name, kind_of_group(group)) for group, names in parts.items() for name in names)
            self._runs.return_weights()
            return self._measure(), {}
        return evidence, parts

    def _measure(self) -> Evidence:
        compared = self._runs.both("without grafts", RunFilters(compare="True", keep=SETTINGS))
        returned = self._runs.returned
        settings = self._attempt(
            "the values of the optimizer's settings",
            partial(settings_difference, compared, self._runs.pair),
            NO_SETTINGS,
        )
        self._weights = LentWeights.of(self._runs, compared, self._threshold)
        if self._weights.compared is not None:
            compared, returned = self._weights.compared, self._runs.returned
        compared = without_weights(compared, self._weights.stored)
        grafted = self._attempt(
            "the run in which every tap was grafted",
            lambda: self._runs.both("what each tap adds", RunFilters(b2t="True")),
            compared.iloc[:0],
        )
        returned_grafted = None if self._failed else self._runs.returned
        self._masks_alike = []
        if isinstance(self._runs, CalledRuns):
            # Jobs may show other values in their next steps.
            as_they_are: tuple[pd.DataFrame, pd.DataFrame, list[str]] = compared, grafted, []
            compared, grafted, self._masks_alike = self._attempt(
                "the comparison of masks",
                partial(with_equal_masks, self._runs, compared, grafted),
                as_they_are,
            )
        measured = grafted[grafted["status"].isin(MEASURED)]
        outputs = [] if self._failed else self._outputs(grafted, returned)
        selves: list[SelfGraft] = self._attempt(
            "the baseline against itself",
            lambda: self._runs.baseline_against_itself(
                compared[compared["status"].isin(MEASURED)] if self._failed else measured,
                [part.group for output in outputs for part in output.all],
            ),
            [],
        )
        return Evidence(
            compared,
            grafted,
            returned,
            returned_grafted,
            outputs,
            selves,
            MeasuredFloors(selves, self._before),
            one_sided_filter(pd.concat([compared, grafted])),
            settings,
        )

    def _outputs(self, grafted: pd.DataFrame, returned: ReturnedValues | None) -> list[OutputTap]:
        paths = [each.path for each in returned.differences] if returned is not None else []
        # After an exception no output is computed, and the values before it are judged.
        name = self._runs.request.output if self._runs.raised is None else None
        return find_outputs(grafted, name, paths)

    # ---- what is computed differently ---------------------------------------------------------------------------

    def _name(self, evidence: Evidence) -> Naming:
        compared, grafted, rows, floors = evidence.compared, evidence.grafted, evidence.measured, evidence.floors
        unseen = not_in_twin(evidence.selves, self._runs.has_twin)
        to_be_grafted = self._runs.to_be_grafted(compared if len(grafted) else compared.iloc[:0])
        quantised = quantised_modules(compared, grafted, self._threshold, self._summed_at)
        # The scales were compared together with their weights.
        others = compared[~compared["name"].isin(list(quantised.scales))] if len(compared) else compared
        unseen += unseen_taps(others, to_be_grafted, grafted, evidence.selves)
        if self._weights.failure is not None:
            unseen.append(f"the target's code with the baseline's weights: {self._weights.failure}")
        given = {*input_names(compared), *input_names(grafted)}
        given -= computed_between_calls(compared, grafted, self._threshold)
        inputs = [group_of(n, t) for n, t in zip(rows["name"], rows["tags"], strict=True) if n in given]
        not_repeated = floors.not_repeated
        job_remarks = self._runs.job_remarks(compared, grafted, not_repeated)
        contradictions = contradicting_pairs(compared, self._before)
        unseen += compared_in_part(compared, self._before)
        data: list[str] = []
        constant = self._runs.request.constant_floor
        if job_remarks is not None:
            constant = job_remarks.constant
            unseen += job_remarks.unseen
            data += data_of_jobs(compared, grafted, self._threshold)
        else:
            of_weights = WITH_THE_BASELINES if self._weights else BELOW
            data += differing_data(
                compared, self._threshold, grafted, of_weights=of_weights, settings=evidence.settings
            )
        if constant is None and not evidence.selves:
            constant, _ = floor_of(Facts(compared))
        frame = added_frame(
            grafted,
            floors.of_groups(),
            compared=compared,
            constant=constant,
            own=floors.of_taps(),
            allowed=quantised.floors,
        )
        frame, behind = judged_until_sketch(frame, grafted, self._threshold)
        unseen += [behind] if behind else []
        named = named_groups(frame, self._threshold)
        accumulated = floors.accumulated(constant)
        differing = [] if not_repeated else differing_taps(compared, accumulated, self._threshold, leave=given)
        if self._weights and not (named or not_repeated or differing):
            returned = evidence.returned
            if returned is None or not returned.beyond(accumulated, self._threshold, floors.returned_not_repeated):
                data = [line.replace(WITH_THE_BASELINES, AGREES_WITH_THE_BASELINES) for line in data]
        sizes = self.session.options.baseline, self.session.options.target
        scaling = gradient_scaling(frame, grafted, named, *sizes, self._threshold)
        if scaling.groups:
            data.append(scaling.text)
            frame = scaling.taken_out_of(frame)
        following = consequences(frame, [group for group in named if group not in scaling.groups], self._threshold)
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
            any(not line.startswith(BEGINNINGS["param"]) for line in data) or bool(data and not self._weights),
            unseen,
            not_repeated,
            contradictions=contradictions,
            quantised=quantised,
            job_remarks=job_remarks,
        )

    def _unmask(self, evidence: Evidence, naming: Naming) -> list[str]:
        """If something differs and nothing is named, judge masked taps by their other values. Returns a remark."""
        if not naming.clears or not naming.differing:
            return []
        unchanged: tuple[pd.DataFrame, list[str]] = naming.frame, []
        frame, names = self._attempt(
            "the comparison of values that are not masked",
            lambda: without_masked_values(self._runs, evidence.measured, naming.frame, evidence.one_sided),
            unchanged,
        )
        left = {*naming.following, *naming.scaled}
        found = [group for group in named_groups(frame, self._threshold) if group not in left]
        if not found or not names:
            return []
        naming.frame, naming.named = frame, found
        return [left_out(names)]

    def _repeat_target(self, evidence: Evidence, naming: Naming) -> None:
        """Run the target against itself before the verdict names nothing, or explains what it names."""
        if not (naming.clears or self._explains(naming)):
            return
        none: list[str] = []
        found = self._attempt("the target against itself", self._runs.target_against_itself, none)
        # A value that also varies on the baseline, such as a time, says nothing about the target.
        left = evidence.floors.returned_not_repeated
        naming.target_not_repeated = [each for each in found if each not in left]

    # ---- what differs and nothing explains ----------------------------------------------------------------------

    def _unexplained(
        self, evidence: Evidence, naming: Naming, *, has_taps: bool
    ) -> tuple[list[str], list[str], list[str]]:
        """Sentences on unexplained differences, an output that was not compared, and state that the calls write."""
        if naming.not_repeated:
            return [], [], []
        differences = UnexplainedDifferences(
            evidence.compared,
            naming.differing,
            evidence.returned,
            evidence.returned_grafted,
            naming.accumulated,
            self._threshold,
            naming.given,
            evidence.floors.returned_not_repeated,
        )
        # A user who names the output has chosen what counts.
        chosen = self._runs.request.output
        states_lost = naming.clears and chosen is None
        naming.unseen += differences.not_compared(with_lost=not states_lost)
        unexplained = differences.after_last_tap(all_grafted=not (evidence.grafted["status"] == "failed").any())
        written = differences.written() + differences.lost_gradients()
        if naming.clears:
            unexplained += written
            found = differences.no_tap_explains(is_grafted=bool(len(evidence.grafted)))
            if naming.data_differs or naming.quantised.text:
                # The data are stated first, the difference after them.
                naming.maybe_explained = [f"{line} The differences above may explain it." for line in found]
                found = []
            naming.only_without_grafts = bool(found) and bool(len(evidence.grafted)) and not unexplained
            unexplained += found
            if found and not naming.target_not_repeated and evidence.returned is not None:
                again = self._attempt(
                    "another run without grafts",
                    lambda: self._runs.both("without grafts again", RunFilters(compare="True")),
                    None,
                )
                if again is not None:
                    sometimes = differences.only_sometimes(again, self._runs.returned, self._runs.count)
                    # Rounding of equal numbers repeats itself.
                    naming.only_without_grafts &= not sometimes
                    unexplained += sometimes
            without_output = differences.without_partner(evidence.floors.last_tap(), chosen) + differences.turned()
            if not unexplained:
                alone = differences.whole_numbers_alone() if has_taps else []
                unseen, differing = ([], []) if alone else self._unseen_choices(evidence, naming)
                without_output += alone + unseen
                unexplained += differing
            if self._runs.raised is not None:
                # The text begins with the exception, after which nothing is computed.
                without_output = []
            return unexplained, (differences.lost() if states_lost else []) + without_output, []
        return unexplained, [], written

    def _unseen_choices(self, evidence: Evidence, naming: Naming) -> tuple[list[str], list[str]]:
        """A sentence on returned whole numbers that may agree by chance, or one if they do."""
        returned = evidence.returned
        # A recording returns nothing, so its taps may show whole numbers alone.
        if not (self._runs.recorded or (returned is not None and returned.has_whole_numbers)):
            return [], []
        unknown: tuple[float | None, bool] = None, True
        distance, is_known = self._attempt(
            "what whole numbers are chosen from", lambda: self._runs.unseen_choices(evidence.compared), unknown
        )
        if not is_known:
            naming.unseen.append(
                "from which values the returned whole numbers, such as tokens, were chosen, because the code is "
                "compiled or cannot be followed operation by operation."
            )
        return on_unseen_choices(distance, evidence.compared, self._threshold)

    def _nearly_equal_weights(self, evidence: Evidence, naming: Naming, unexplained: Sequence[str]) -> list[str]:
        """A sentence that replaces the one on weights, if they differ by little and nothing else does."""
        near = nearly_equal_weights(evidence.compared, self._threshold)
        only_weights = all(line.startswith(BEGINNINGS["param"]) for line in naming.data)
        differs = unexplained or naming.maybe_explained or naming.following
        # Lent weights were lent because the results differ.
        if near is None or not only_weights or differs or self._weights or naming.job_remarks is not None:
            return []
        naming.data = []
        return [near]

    # ---- the cause ----------------------------------------------------------------------------------------------

    def _origins(self, evidence: Evidence, naming: Naming, mechanisms: Mechanisms) -> ErrorOrigins | None:
        """Where the errors of the named values arise; None where the inputs of modules were not examined."""
        named = [group for group in naming.named if group not in naming.inputs and kind_of_group(group) is None]
        if not (named and self._explains(naming)) or naming.not_repeated:
            return None
        if self._runs.recorded:
            return ErrorOrigins(not_compared=dict.fromkeys(named, ()))
        if not self._runs.shows_module_inputs:
            return None
        constant = self._runs.request.constant_floor
        if constant is None and not evidence.selves:
            constant, _ = floor_of(Facts(evidence.compared))

        def added(rows: pd.DataFrame) -> pd.DataFrame:
            floors = evidence.floors
            return added_frame(rows, floors.of_groups(), constant=constant, own=floors.of_taps())

        return self._attempt(
            "the comparison of modules' inputs",
            lambda: mechanisms.origins(naming.frame, named, evidence.measured, added, self._threshold),
            None,
        )

    def _explains(self, naming: Naming) -> bool:
        return self._runs.request.explain is True and bool(naming.named)

    def _can_swap(self, evidence: Evidence, naming: Naming) -> bool:
        if naming.not_repeated or self._runs.recorded or not evidence.selves or self._is_abandoned:
            return False
        return naming.job_remarks is None or not naming.target_not_repeated

    def _can_trace(self, naming: Naming) -> bool:
        """Whether both sides' operations correspond: in one step of jobs, or in calls with equal results each time."""
        of_functions = naming.job_remarks is None
        may_trace = self._runs.request.explain and naming.named
        return bool(may_trace) and not (of_functions and naming.not_repeated)

    def _causes(self, evidence: Evidence, naming: Naming, swaps: Swaps) -> tuple[dict[str, Causes], list[str]]:
        """The effect of the named groups on each output, by the output's title, and remarks on it."""
        if not (self._explains(naming) and self._can_swap(evidence, naming)) or self._runs.raised is not None:
            # A call that raises has no output whose change would show an effect.
            return {}, []
        frame, named = naming.frame, naming.named
        causes: dict[str, Causes] = {}
        quantised = naming.quantised.outputs(frame, named)
        for output in evidence.outputs:
            rank = place_in_blame(output.group)
            groups = [g for g in named if judged_at(g) == rank and first_over(frame, g, self._threshold) <= output.end]
            if not groups or not swaps.can_measure(groups, output):
                continue
            # The effect of a gradient is measured with the baseline's values, which are computed before it.
            settled = [*(g for g in named if judged_at(g) < rank), *naming.following, *naming.scaled]
            settled += [group for group in quantised if group != output.group]
            found = self._attempt(
                f"the search for what moves {output.name}",
                lambda output=output, groups=groups, settled=settled: swaps.causes(  # type: ignore[misc]
                    groups, settled, output, self._threshold, by_size=by_size(frame, groups)
                ),
                None,
            )
            if found is not None:
                causes[output.title] = found.with_earlier(
                    earlier_steps(frame, output, naming.accumulated, found.limit) if found.agrees else ()
                )
        changed: list[str] = self._attempt("the last check of the baseline", self._runs.baseline_changed, [])
        if changed:
            # The swaps were measured against a baseline that has changed.
            return {}, [baseline_changed(changed)]
        alone = self._without_dependents(causes, [part.group for each in evidence.outputs for part in each.all])
        causes = {group: each.with_unknown(alone) for group, each in causes.items()}
        remarks = effects_not_measured(named, causes, swaps, evidence.outputs) + outputs_themselves(alone)
        if quantised and causes:
            remarks.append("The effect was measured with the baseline's outputs at the other quantised modules.")
        return causes, remarks

    def _without_dependents(self, causes: Mapping[str, Causes], outputs: Collection[str]) -> list[str]:
        """The minor groups of values that nothing else depends on. They are outputs themselves."""
        labels = (item for each in causes.values() for item in each.labels.items())
        minor = [g for g, label in labels if label == "minor" and not (kind_of_group(g) or g in outputs)]
        if not minor:
            return []
        return self._attempt("the search for dependents", lambda: self._runs.without_dependents(minor), [])

    def _quantised(self, evidence: Evidence, naming: Naming, swaps: Swaps) -> tuple[list[str], bool]:
        """Sentences on quantised modules, with their effect if nothing is named; and whether that is all there is."""
        found = [*naming.quantised.text]
        groups = naming.quantised.outputs(naming.frame, naming.named)
        output = next((each for each in evidence.outputs if kind_of(each.tags) is None), None)
        swappable = self._runs.request.explain is True and self._can_swap(evidence, naming)
        if not groups or naming.named or output is None or not swappable or output.group in groups:
            return found, False
        measured = self._attempt("the swap of quantised modules", lambda: swaps.with_and_without(groups, output), None)
        if measured is None:
            return found, False
        restored, total = measured
        # The last tap of a model that is watched as a whole has this name.
        name = "the output" if output.name == "output" else f"the output {output.name}"
        now = "bit-equal" if restored == 0 else f"off by {restored:.2g}"
        found.append(f"With the baseline's outputs there, {name} is {now}; with the target's it is off by {total:.2g}.")
        return found, restored <= self._threshold * evidence.floors.of_output(output.group).rel_l2

    def _rounds_differently(self, evidence: Evidence, naming: Naming, swaps: Swaps) -> RoundingGroups:
        """The groups of low precision that compute in another order, and, where nothing is named, their effect."""
        found = RoundingGroups()
        if not naming.not_repeated:
            found = rounds_differently(naming.frame, [*naming.named, *naming.quantised.outputs(naming.frame, ())])
        # A caller who gives the floor has chosen what may be added.
        if naming.clears and self._runs.request.constant_floor is None:
            others = ~naming.frame["name"].isin([*naming.quantised.floors, *naming.quantised.scaled])
            found = replace(found, stands_out=taps_that_stand_out(naming.frame[others]))
        output = next((each for each in evidence.outputs if kind_of(each.tags) is None), None)
        swappable = self._runs.request.explain is True and self._can_swap(evidence, naming)
        if not found.groups or naming.named or output is None or not swappable or found.groups == (output.group,):
            return found
        measured = self._attempt(
            "the swap of what rounds differently", lambda: swaps.with_and_without(found.groups, output), None
        )
        if measured is None:
            return found
        found = found.with_effect(output.name, *measured)
        # In any tensor parallel target sums over ranks round differently, which explains little.
        return found if found.explains_output else RoundingGroups(stands_out=found.stands_out)

    # ---- what is said beside the conclusion ---------------------------------------------------------------------

    def _remarks(
        self,
        evidence: Evidence,
        naming: Naming,
        weights: Mapping[str, str],
        outdated: Sequence[OutdatedPair],
        more: Sequence[str],
    ) -> list[str]:
        """Remarks that leave the conclusion as it is; ``more`` are those of earlier stages."""
        remarks: list[str] = []
        if naming.job_remarks is not None and naming.named:
            remarks += naming.job_remarks.of_named
        remarks += [masks_alike(self._masks_alike)] if self._masks_alike else []
        remarks += [*more, *text_on_stored(self._weights.stored)]
        if not naming.named:
            remarks += unequal_weights(evidence.compared, weights)
        if outdated and naming.named:
            remarks.append(no_longer_equal(outdated))
        if names_one_tap(naming.frame, self._threshold):
            # What is named in each pass of a loop, such as its logits, is no less wrong there.
            remarks += unread_grafts_text(unread_grafts(naming.frame, self._threshold))
        return remarks + held_choices(naming.frame, naming.named)

    def _why_inherited(self, evidence: Evidence, naming: Naming, lines: Sequence[DifferingLine]) -> list[str]:
        """Sentences on reasons why named groups may be innocent."""
        frame, threshold = naming.frame, self._threshold
        found = runs_freely(frame, {*naming.named} - explained_by_code(lines), threshold)
        found += cut_graphs(evidence.compared, naming.named)
        return found if names_one_tap(frame, threshold) else found + unread_grafts_text(unread_grafts(frame, threshold))

    def _search_lines(
        self, evidence: Evidence, naming: Naming, frame: pd.DataFrame, mechanisms: Mechanisms
    ) -> LineSearch | None:
        """The search for the lines of source of culprits, with its results; None if operations do not correspond."""
        if not self._can_trace(naming):
            return None
        # Groups that cancel or round differently are not mistakes. Minor ones may be right, as a shifted bias.
        to_blame = frame.loc[frame["label"] == "culprit", "group"]
        groups = [group for group in naming.named if group not in naming.inputs and group in {*to_blame}]
        if naming.job_remarks is None:
            # A function may compute its model's inputs itself, as by a tokenizer or a normalisation.
            groups += [group for group in naming.named if group in {*naming.inputs} & {*to_blame}]
        search = LineSearch(self._runs, frame, self._threshold, evidence.one_sided)
        keep = mechanisms.pairs_for_hints(frame, naming.named)
        rows = self._attempt("the search for lines of source", lambda: search.trace(groups, keep), None)
        if rows is not None:
            self._attempt("the search for hints", lambda: mechanisms.note_pairs(frame, naming.named, rows), None)
        # Whatever fails here, the lines that were found are kept.
        self._attempt("the confirmation of lines of source", search.confirm, None)
        return search


def _after_taps(evidence: Evidence) -> float:
    """How far returned values are apart (rel_l2) with the baseline's value at every tap, or if that failed, without."""
    returned = evidence.returned if evidence.returned_grafted is None else evidence.returned_grafted
    return 0.0 if returned is None else returned.most(evidence.floors.returned_not_repeated)


def _only_before(evidence: Evidence, frame: pd.DataFrame) -> dict[str, str]:
    """Sentences on taps of one side before the worst tap of each named group."""
    named = frame[~frame["label"].isin(NOT_NAMED)].sort_values("ratio", ascending=False, kind="stable")
    worst = {row["group"]: row for row in reversed(records(named)) if kind_of_group(row["group"]) is None}
    return only_before(evidence.grafted, worst)
