"""The runs that every verdict needs, without the taps that they show to be incomparable."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import pandas as pd

from graftlab.base.tap_groups import kind_of_group
from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging.attempts import Attempts
from graftlab.judging.evidence import Evidence
from graftlab.judging.masked_values import with_equal_masks
from graftlab.judging.measured_floors import MeasuredFloors
from graftlab.judging.mechanisms import LentWeights
from graftlab.judging.naming import Naming, name_groups
from graftlab.judging.partial_sums import (
    GRADIENTS,
    Summands,
    averages_not_named,
    averages_of_parts,
    gradients_not_compared,
    next_taps,
    not_compared,
    partial_sums,
)
from graftlab.judging.split_calls import SplitCalls, not_paired, split_calls
from graftlab.judging.stored_weights import without_weights
from graftlab.judging.swaps import OutputTap, find_outputs
from graftlab.judging.undone_factors import Factors, factors_not_compared, is_undone, scaled_taps
from graftlab.judging.verdict_runs import CalledRuns, RunFilters, VerdictRuns
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import one_sided_filter, rows_where
from graftlab.verdict.optimizer_settings import NO_SETTINGS, SETTINGS, settings_difference
from graftlab.verdict.quantised_modules import quantised_limits
from graftlab.verdict.returned_values import ReturnedValues


class Measurement:
    """Measures what a verdict needs, and measures again without the taps that cannot be compared.

    ``evidence`` is what was measured last. Left out are ``split``, the taps at which each side divides its work into
    different calls; ``sums``, those that hold a partial sum on each rank, by group; ``averages``, the names of numbers
    that each rank has of its part of the batch; and ``parts``, gradients that code after the run adds up, by group.
    """

    def __init__(self, runs: VerdictRuns, attempt: Attempts) -> None:
        self._runs, self._attempt = runs, attempt
        self._summed_at: dict[str, str] = {}
        self.split: SplitCalls = {}
        self.sums: dict[str, Summands] = {}
        self.averages: list[str] = []
        self.parts: dict[str, list[str]] = {}
        self.undone: dict[str, Factors] = {}
        self._last_naming: tuple[Evidence, Naming] | None = None
        self.evidence = self._measured()

    @property
    def not_compared(self) -> list[str]:
        """Sentences on the taps that were left out."""
        return [
            *not_paired(self.split),
            *not_compared(self.sums),
            *gradients_not_compared(self.parts),
            *averages_not_named(self.averages),
            *factors_not_compared(self.undone),
        ]

    def naming(self) -> Naming:
        """The groups that ``evidence`` names: the same object until something else was measured."""
        # With a small model this takes as long as its runs.
        if self._last_naming is None or self._last_naming[0] is not self.evidence:
            self._last_naming = self.evidence, name_groups(self._runs, self.evidence)
        return self._last_naming[1]

    def leave_out_split_calls(self) -> None:
        """Leave out taps at which each side divides its work into different calls.

        Nothing is left out without a returned value, or if the plan pairs calls.
        """
        pairs_calls = self._runs.before.pairs or self._runs.request.output is not None
        if self._returns and not pairs_calls:
            what = "the search for calls that do not pair"
            self.split = self._attempt(what, partial(split_calls, self.evidence.compared), self.split)
        if self.split:
            self._leave_out(self.split)

    def leave_out_partial_sums(self) -> None:
        """Leave out taps that hold a summand on each rank, if the inputs of modules show that."""
        # What is computed from a summand, as by dropout, is one too, and shows it once the summand is not grafted.
        while self._runs.shows_module_inputs and not self._attempt.failed:
            limits = quantised_limits(self.evidence.compared)
            limits |= {name: limits[output] for name, output in self._summed_at.items() if output in limits}
            search = partial(partial_sums, self._runs, self.evidence.grafted, limits)
            nothing: dict[str, Summands] = {}
            found = self._attempt("the search for partial sums", search, nothing)
            if found.keys() <= self.sums.keys():
                break
            self.sums |= found
            names = {name for each in found.values() for name in each.names}
            after = next_taps(self.evidence.grafted, names)
            self._summed_at |= {name: self._summed_at.get(output, output) for name, output in after.items()}
            self._leave_out((name, None) for name in names)

    def leave_out_averages(self) -> None:
        """Leave out numbers that each rank has of its part of the batch.

        Nothing is left out if functions return values: these differ as well, and would then be unexplained.
        """
        if not (self._returns or self._attempt.failed):
            ranks = self._runs.session.options
            self.averages = averages_of_parts(self.evidence.grafted, ranks.baseline, ranks.target)
        if self.averages:
            self._leave_out((name, None) for name in self.averages)

    def leave_out_parts_of_gradients(self) -> None:
        """Leave out gradients that code after the run adds up over the ranks.

        Nothing is left out if something is named without them too: then they may show where a sum is missing.
        """
        while self._runs.request.gradient_parts and not self._attempt.failed:
            none: dict[str, Summands] = {}
            search = partial(partial_sums, self._runs, self.evidence.grafted, kinds=GRADIENTS)
            sums = self._attempt("the search for partial sums of gradients", search, none)
            found = {group: each.names for group, each in sums.items() if not each.wrong}
            if found.keys() <= self.parts.keys():
                break
            self.parts |= found
            self._leave_out((name, kind_of_group(group)) for group, names in found.items() for name in names)
        if self.parts and self.naming().named:
            self._runs.take_back((name, kind_of_group(group)) for group, names in self.parts.items() for name in names)
            self.parts = {}
            self._measure_again()

    def leave_out_undone_factors(self) -> None:
        """Leave out taps that differ by a factor which the target undoes, if that clears others and names none."""
        if self._attempt.failed:
            return
        before = self.naming().named
        nothing: dict[str, Factors] = {}
        search = partial(scaled_taps, self._runs, self.evidence, before)
        for group, factors in self._attempt("the search for factors", search, nothing).items():
            taps = [(name, None) for name in factors]
            with_it = self.evidence
            self._leave_out(taps)
            without = self.naming().named
            if is_undone(before, without, group):
                self.undone[group], before = factors, without
            else:
                self._runs.take_back(taps)
                # A job's remarks count the weights that were grafted since, too.
                self.evidence, self._last_naming = with_it, None

    @property
    def _returns(self) -> bool:
        """Whether values that both sides' functions returned were compared."""
        return self.evidence.returned is not None and bool(self.evidence.returned.compared)

    def _leave_out(self, taps: Iterable[tuple[str, str | None]]) -> None:
        self._runs.leave_out(taps)
        self._measure_again()

    def _measure_again(self) -> None:
        self._runs.return_weights()
        self.evidence = self._measured()

    def _measured(self) -> Evidence:
        compared = self._runs.both("without grafts", RunFilters(compare="True", keep=SETTINGS))
        returned = self._runs.returned
        settings = self._attempt(
            "the values of the optimizer's settings",
            partial(settings_difference, compared, self._runs.pair),
            NO_SETTINGS,
        )
        weights = LentWeights.of(self._runs, compared, self._runs.request.threshold)
        if weights.compared is not None:
            compared, returned = weights.compared, self._runs.returned
        compared = without_weights(compared, weights.stored)
        grafted = self._attempt(
            "the run in which every tap was grafted",
            lambda: self._runs.both("what each tap adds", RunFilters(b2t="True")),
            compared.iloc[:0],
        )
        returned_grafted = None if self._attempt.failed else self._runs.returned
        masks: list[str] = []
        if isinstance(self._runs, CalledRuns):
            # Jobs may show other values in their next steps.
            as_they_are: tuple[pd.DataFrame, pd.DataFrame, list[str]] = compared, grafted, []
            compared, grafted, masks = self._attempt(
                "the comparison of masks",
                partial(with_equal_masks, self._runs, compared, grafted),
                as_they_are,
            )
        measured = rows_where(grafted, grafted["status"].isin(MEASURED))
        outputs = [] if self._attempt.failed else self._outputs(grafted, returned)
        selves: list[SelfGraft] = self._attempt(
            "the baseline against itself",
            lambda: self._runs.baseline_against_itself(
                rows_where(compared, compared["status"].isin(MEASURED)) if self._attempt.failed else measured,
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
            MeasuredFloors(selves, self._runs.before),
            one_sided_filter(pd.concat([compared, grafted])),
            settings,
            weights,
            masks,
            {**self._summed_at},
        )

    def _outputs(self, grafted: pd.DataFrame, returned: ReturnedValues | None) -> list[OutputTap]:
        paths = [each.path for each in returned.differences] if returned is not None else []
        # After an exception no output is computed, and the values before it are judged.
        name = self._runs.request.output if self._runs.raised is None else None
        return find_outputs(grafted, name, paths)
