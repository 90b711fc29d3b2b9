"""One verdict in progress: makes its runs and draws the conclusions, stage by stage.

After the first run a failure does not lose the results: a failed stage is reported in a sentence, and the stages that
do not depend on it proceed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial

import pandas as pd

from graftlab.base.tap_groups import kind_of_group
from graftlab.control.verdicts import Verdict
from graftlab.diffs.rounding import DTYPES_OF_16_BITS
from graftlab.judging.attempts import Attempts
from graftlab.judging.effects import Effects
from graftlab.judging.evidence import Evidence
from graftlab.judging.line_runs import LineSearch
from graftlab.judging.masked_values import left_out, masks_alike, without_masked_values
from graftlab.judging.measurement import Measurement
from graftlab.judging.mechanisms import Mechanisms
from graftlab.judging.naming import Naming
from graftlab.judging.partial_sums import Summands, not_adding_up
from graftlab.judging.stored_weights import text_on_stored
from graftlab.judging.swaps import Swaps
from graftlab.judging.unmeasured import not_grafted
from graftlab.judging.verdict_runs import RunFilters, VerdictRuns
from graftlab.matching.pair import Pair
from graftlab.verdict.added import (
    NOT_NAMED,
    added_frame,
    labelled,
    named_groups,
    names_one_tap,
    records,
    unread_grafts,
    unread_grafts_text,
)
from graftlab.verdict.causes import Causes
from graftlab.verdict.extra_calls import extra_calls, only_before
from graftlab.verdict.facts import Facts
from graftlab.verdict.findings import Findings
from graftlab.verdict.first_step import (
    NOT_JUDGED_SINCE,
    FirstDifference,
    explained_by_weights,
    on_diverged_weights,
)
from graftlab.verdict.free_running import held_choices, runs_freely
from graftlab.verdict.lines import DifferingLine, explained_by_code
from graftlab.verdict.model_data import (
    BEGINNINGS,
    BELOW,
    differing_rows,
    differing_weights,
    nearly_equal_weights,
    unequal_weights,
)
from graftlab.verdict.origins import ErrorOrigins
from graftlab.verdict.outdated_pairs import (
    OutdatedPair,
    learned_from_other_code,
    no_longer_equal,
    outdated_pairs,
    with_present_partners,
)
from graftlab.verdict.pair_contradictions import pairs_of
from graftlab.verdict.renaming import pairing_advice
from graftlab.verdict.rounds_differently import LABEL as ROUNDS_DIFFERENTLY
from graftlab.verdict.summary import floor_of
from graftlab.verdict.unexplained import UnexplainedDifferences, cut_graphs, on_unseen_choices
from graftlab.verdict.wording import reads_unwritten

# Runs for all named groups together: with and without their code, the inputs of their modules, and lines of source.
_RUNS_OF_NAMED = 4


def _unseen_dtype(computed_in: str, of_taps: str, frame: pd.DataFrame) -> str:
    """The dtype of 16 bits in which the baseline computes; blank if what was compared shows it, or there is none.

    ``computed_in`` is that of what no tap shows, and ``of_taps`` that of the taps, also of those without a partner.
    """
    if not computed_in:
        return "" if frame["dtype"].isin(DTYPES_OF_16_BITS).any() else of_taps
    return "" if ((frame["dtype"] == computed_in) & frame["cast"].isna()).any() else computed_in


class Judgement:
    """Makes the runs of one verdict and draws its conclusions."""

    def __init__(self, runs: VerdictRuns) -> None:
        self.session = runs.session
        self._runs = runs
        self._before = runs.before
        self._threshold = runs.request.threshold
        self._attempt = Attempts(runs.session)

    def verdict(self) -> Verdict:
        """Make the runs, and return the verdict."""
        measurement = Measurement(self._runs, self._attempt)
        measurement.leave_out_split_calls()
        measurement.leave_out_partial_sums()
        measurement.leave_out_averages()
        measurement.leave_out_parts_of_gradients()
        measurement.leave_out_undone_factors()
        evidence = measurement.evidence
        naming = measurement.naming()
        naming.unseen += measurement.not_compared
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
        has_taps = bool(measurement.split) or len(evidence.compared) > 0
        unexplained, without_output, written = self._unexplained(evidence, naming, has_taps=has_taps)
        without_output += self._why_not_cleared(naming, measurement.sums)
        if naming.clears:
            without_output += self._nearly_equal_weights(evidence, naming, unexplained)
        mechanisms = Mechanisms(self._runs, evidence.one_sided)
        origins = self._origins(evidence, naming, mechanisms)
        swaps = Swaps(self._runs, evidence.measured, evidence.selves, evidence.floors, evidence.one_sided)
        effects = Effects(self._runs, evidence, naming, swaps, self._attempt)
        causes, remarks = effects.causes()
        quantised, explained = effects.of_quantised()
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
        rounding = effects.of_rounding()
        weights = differing_weights(evidence.compared, self._threshold)
        remarks += self._remarks(evidence, naming, weights, outdated, masked + written)
        frame = self._labelled(naming, causes)
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
                hints={**evidence.weights.hints, **hints},
                remarks=remarks,
                data=naming.data,
                contradicting_pairs=naming.contradictions,
                quantised=quantised,
                inputs=naming.inputs,
                # Jobs may have begun with different weights, so their weights are reported first.
                weights=weights if of_functions else {},
                weights_lent=bool(evidence.weights),
                following=naming.following,
                target_not_repeated=naming.target_not_repeated if of_functions or self._runs.recorded else (),
                job_remarks=naming.job_remarks,
                raised=None if self._runs.raised is None else self._runs.raised.sentence,
                not_grafted=not_grafted(evidence.grafted, naming.frame, self._threshold),
                unexplained=unexplained,
                only_without_grafts=naming.only_without_grafts and not factors,
                without_output=without_output,
                failed=self._attempt.failed,
                pairing_advice=pairing_advice(evidence.compared, of_jobs=not of_functions and not self._runs.recorded),
                rounding=rounding,
                gradient_parts=[*measurement.parts],
                computed_in=_unseen_dtype(evidence.floors.computed_in, evidence.floors.dtype_of_taps, frame),
                lines=lines,
                only_returned=bool(measurement.split),
                after_taps=_after_taps(evidence),
                # The side that raises makes fewer calls, and these pair with the other side's first ones.
                extra_calls=[]
                if self._runs.raised is not None
                else self._attempt(
                    "the search for extra calls", lambda: extra_calls(evidence.grafted, naming.named), []
                ),
                origins=origins,
                only_before=self._attempt("the search for lone taps", partial(_only_before, evidence, frame), {}),
                maps={**evidence.weights.maps, **mechanisms.maps},
            ),
            self._runs.count,
        )

    def _without_conclusion(self, naming: Naming, sentence: str) -> Verdict:
        """The verdict where grafts would be wrong: the pairs no longer hold, or the sides are in different steps."""
        frame = self._labelled(naming, {}).assign(label="unmeasured")
        failed, ranks = self._attempt.failed, self.session.options.target
        found = Findings(frame, self._threshold, ranks, naming.unseen, failed=failed, inconclusive=[sentence])
        return Verdict(found, self._runs.count)

    def _labelled(self, naming: Naming, causes: Mapping[str, Causes]) -> pd.DataFrame:
        following = [*naming.following, *naming.diverged]
        return labelled(naming.frame, naming.named, following, causes, self._threshold, naming.scaled)

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

    def _why_not_cleared(self, naming: Naming, sums: Mapping[str, Summands]) -> list[str]:
        """If nothing is named, sentences on memory that is read unwritten, and on sums over ranks that are wrong."""
        if not naming.clears:
            return []
        found: list[str] = []
        if not naming.target_not_repeated:
            nothing_read: list[str] = []
            read = self._attempt("the check for unwritten memory", self._runs.unwritten_memory, nothing_read)
            found += reads_unwritten(read)
        # What follows may dilute the difference, as a residual stream does.
        return found + not_adding_up(sums)

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
        if near is None or not only_weights or differs or evidence.weights or naming.job_remarks is not None:
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

    def _can_trace(self, naming: Naming) -> bool:
        """Whether both sides' operations correspond: in one step of jobs, or in calls with equal results each time."""
        of_functions = naming.job_remarks is None
        may_trace = self._runs.request.explain and naming.named
        return bool(may_trace) and not (of_functions and naming.not_repeated)

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
        remarks += [masks_alike(evidence.masks_alike)] if evidence.masks_alike else []
        remarks += [*more, *text_on_stored(evidence.weights.stored)]
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
