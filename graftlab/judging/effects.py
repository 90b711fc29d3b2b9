"""What swaps show of the groups that differ: the effect of each on the outputs."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from graftlab.base.tap_groups import kind_of, kind_of_group, place_in_blame
from graftlab.judging.attempts import Attempts
from graftlab.judging.evidence import Evidence
from graftlab.judging.naming import Naming
from graftlab.judging.swaps import Swaps, by_size, earlier_steps, first_over
from graftlab.judging.unmeasured import baseline_changed, effects_not_measured, judged_at, outputs_themselves
from graftlab.judging.verdict_runs import VerdictRuns
from graftlab.verdict.causes import Causes
from graftlab.verdict.rounds_differently import RoundingGroups, rounds_differently, taps_that_stand_out


class Effects:
    """Measures by swaps what named groups, quantised modules and other orders of computing do to the outputs."""

    def __init__(self, runs: VerdictRuns, evidence: Evidence, naming: Naming, swaps: Swaps, attempt: Attempts) -> None:
        self._runs, self._evidence, self._naming = runs, evidence, naming
        self._swaps, self._attempt = swaps, attempt
        # The first output that is a value.
        self._output = next((each for each in evidence.outputs if kind_of(each.tags) is None), None)

    def causes(self) -> tuple[dict[str, Causes], list[str]]:
        """The effect of the named groups on each output, by the output's title, and remarks on it."""
        naming, swaps, frame = self._naming, self._swaps, self._naming.frame
        named = naming.named
        if not named or not self._can_swap or self._runs.raised is not None:
            # A call that raises has no output whose change would show an effect.
            return {}, []
        causes: dict[str, Causes] = {}
        quantised = naming.quantised.outputs(frame, named)
        threshold = self._runs.request.threshold
        for output in self._evidence.outputs:
            rank = place_in_blame(output.group)
            groups = [g for g in named if judged_at(g) == rank and first_over(frame, g, threshold) <= output.end]
            if not groups or not swaps.can_measure(groups, output):
                continue
            # The effect of a gradient is measured with the baseline's values, which are computed before it.
            settled = [*(g for g in named if judged_at(g) < rank), *naming.following, *naming.scaled]
            settled += [group for group in quantised if group != output.group]
            found = self._attempt(
                f"the search for what moves {output.name}",
                lambda output=output, groups=groups, settled=settled: swaps.causes(  # type: ignore[misc]
                    groups, settled, output, threshold, by_size=by_size(frame, groups)
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
        alone = self._without_dependents(causes, [part.group for each in self._evidence.outputs for part in each.all])
        causes = {group: each.with_unknown(alone) for group, each in causes.items()}
        remarks = effects_not_measured(named, causes, swaps, self._evidence.outputs) + outputs_themselves(alone)
        if quantised and causes:
            remarks.append("The effect was measured with the baseline's outputs at the other quantised modules.")
        return causes, remarks

    def of_quantised(self) -> tuple[list[str], bool]:
        """Sentences on quantised modules, with their effect if nothing is named; and whether that is all there is."""
        found = [*self._naming.quantised.text]
        groups = self._naming.quantised.outputs(self._naming.frame, self._naming.named)
        if self._output is None or self._output.group in groups:
            return found, False
        measured = self._with_and_without(groups, "the swap of quantised modules")
        if measured is None:
            return found, False
        restored, total = measured
        # The last tap of a model that is watched as a whole has this name.
        name = "the output" if self._output.name == "output" else f"the output {self._output.name}"
        now = "bit-equal" if restored == 0 else f"off by {restored:.2g}"
        found.append(f"With the baseline's outputs there, {name} is {now}; with the target's it is off by {total:.2g}.")
        limit = self._runs.request.threshold * self._evidence.floors.of_output(self._output.group).rel_l2
        return found, restored <= limit

    def of_rounding(self) -> RoundingGroups:
        """The groups of low precision that compute in another order, and, where nothing is named, their effect."""
        naming, found = self._naming, RoundingGroups()
        if not naming.not_repeated:
            found = rounds_differently(naming.frame, [*naming.named, *naming.quantised.outputs(naming.frame, ())])
        # A caller who gives the floor has chosen what may be added.
        if naming.clears and self._runs.request.constant_floor is None:
            others = ~naming.frame["name"].isin([*naming.quantised.floors, *naming.quantised.scaled])
            found = replace(found, stands_out=taps_that_stand_out(naming.frame[others]))
        if self._output is None or found.groups == (self._output.group,):
            return found
        measured = self._with_and_without(found.groups, "the swap of what rounds differently")
        if measured is None:
            return found
        found = found.with_effect(self._output.name, *measured)
        # In any tensor parallel target sums over ranks round differently, which explains little.
        return found if found.explains_output else RoundingGroups(stands_out=found.stands_out)

    @property
    def _can_swap(self) -> bool:
        naming = self._naming
        if naming.not_repeated or self._runs.recorded or not self._evidence.selves or self._attempt.is_abandoned:
            return False
        is_repeated = naming.job_remarks is None or not naming.target_not_repeated
        return is_repeated and self._runs.request.explain is True

    def _with_and_without(self, groups: Sequence[str], what: str) -> tuple[float, float] | None:
        """How far the output is off with the baseline's values at these groups, and with the target's.

        None if groups are named, whose effect would be part of it, or where it cannot be measured.
        """
        output = self._output
        if not groups or self._naming.named or output is None or not self._can_swap:
            return None
        return self._attempt(what, lambda: self._swaps.with_and_without(groups, output), None)

    def _without_dependents(self, causes: Mapping[str, Causes], outputs: Collection[str]) -> list[str]:
        """The minor groups of values that nothing else depends on. They are outputs themselves."""
        labels = (item for each in causes.values() for item in each.labels.items())
        minor = [g for g, label in labels if label == "minor" and not (kind_of_group(g) or g in outputs)]
        if not minor:
            return []
        return self._attempt("the search for dependents", lambda: self._runs.without_dependents(minor), [])
