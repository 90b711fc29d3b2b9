"""A verdict: without grafts, with every tap grafted, the baseline against itself, the swaps, and what it comes to."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import KINDS, filter_of, group_of, kind_of, kind_of_group, place_in_blame
from graftlab.control.core import internals_of
from graftlab.control.job_verdict_runs import StepRuns
from graftlab.control.verdict_request import VerdictRequest, refuse_floor, refuse_threshold
from graftlab.control.verdict_runs import CalledRuns, RunFilters, VerdictRuns
from graftlab.control.verdicts import Verdict
from graftlab.control.work import refuse_invalid_expressions
from graftlab.errors import SessionError
from graftlab.grafting.self_graft import AddedRounding, SelfGraft
from graftlab.recordings.recorded import Recorded
from graftlab.rows.schema import MEASURED
from graftlab.verdict.activations import activation_hint
from graftlab.verdict.added import (
    added_frame,
    lonely_filter,
    named_groups,
    roundoff,
    times,
    unread_grafts,
    unread_grafts_text,
    unseen_of,
)
from graftlab.verdict.causes import Causes, Order, consequences, deadlocking_taps, distance, find_causes
from graftlab.verdict.floor import Floor, pool
from graftlab.verdict.gradient_scaling import GradientScaling, gradient_scaling
from graftlab.verdict.hints import hint_of
from graftlab.verdict.job_remarks import data_of_jobs, more_in_other_steps, remarks_on_rows
from graftlab.verdict.model_data import RunData, data_rows, differing_data, input_names, without_data
from graftlab.verdict.pair_contradictions import contradicting_pairs
from graftlab.verdict.unexplained import AccumulatedFloors, UnexplainedDifferences, differing_taps
from graftlab.verdict.wording import Findings

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore


def judge(session: SessionCore, request: VerdictRequest) -> Verdict:
    """See :meth:`graftlab.session.Session.verdict`."""
    if all(rank.takes_work for rank in session.ranks):
        runs: VerdictRuns = CalledRuns(session, _of_functions(session, request))
    else:
        runs = StepRuns(session, _of_jobs(request))
    with runs:
        return _Judgement(runs).verdict()


def _of_functions(session: SessionCore, request: VerdictRequest) -> VerdictRequest:
    """The request with each side's default. Raises :class:`SessionError` where its functions cannot be judged."""
    default = internals_of(session).default_callees
    baseline = default.get("baseline") if request.baseline is None else request.baseline
    target = default.get("target") if request.target is None else request.target
    if baseline is None or target is None:
        raise SessionError(
            "verdict: give baseline= and target=, the functions to judge; only a session that listens for jobs judges "
            "without them, in the steps that the jobs make anyway"
        )
    if request.steps != 1 or request.graft_weights:
        raise SessionError(
            "verdict: steps= and graft_weights= are for a session that listens for jobs. A function that is called "
            "for each run makes all of its steps, and begins from the same weights"
        )
    if isinstance(target, Recorded):
        raise SessionError(
            "verdict: the target is a recording, which computes nothing from what is grafted into it, so what each tap "
            "adds cannot be measured. Make it the baseline, or give the code that was recorded; "
            "session.plot.divergence() shows the differences as they are"
        )
    if isinstance(baseline, Recorded) and request.exact is not None:
        raise SessionError(
            "verdict: exact= measures a floor, and the baseline is a recording, which has none: leave it out, and give "
            "floor= where the assumed floor does not suit"
        )
    refuse_invalid_expressions(baseline, target, request.exact)
    return replace(request, baseline=baseline, target=target)


def _of_jobs(request: VerdictRequest) -> VerdictRequest:
    """The request itself. Raises :class:`SessionError` where it gives code, which jobs do not take."""
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
    floor: float | None,
    threshold: float,
    where: str,
) -> Verdict:
    """See :meth:`graftlab.control.loaded_run.LoadedRun.verdict`. ``others`` are of steps like ``grafted``."""
    refuse_floor(floor)
    refuse_threshold(threshold)
    said = remarks_on_rows(compared, grafted, shown, given=floor, threshold=threshold, where=where)
    computed = without_data(grafted)
    frame = added_frame(computed, {}, compared=compared, constant=said.constant)
    named = named_groups(frame, threshold)
    data = data_of_jobs(shown.rows, grafted, threshold)
    evened = GradientScaling() if sizes is None else gradient_scaling(frame, computed, named, *sizes, threshold)
    even = evened.groups
    if even:
        data.append(evened.text)
    following = consequences(frame, [group for group in named if group not in even], threshold)
    data += more_in_other_steps(without_data(others), {*named}, said, threshold)
    named = [group for group in named if group not in (*even, *following)]
    inputs = {*input_names(compared), *input_names(computed)}
    given = [group_of(n, t) for n, t in zip(grafted["name"], grafted["tags"], strict=True) if n in inputs]
    findings = Findings(
        labelled(frame, named, following, {}, threshold, even),
        threshold,
        grafted["rank"].nunique(),
        [*unseen_of(grafted), *said.unseen],
        remarks=said.of_named if named else (),
        data=data,
        inputs=[*given, *even],
        following=following,
        job_remarks=said,
    )
    return Verdict(findings, 0)


class _Judgement:
    """One verdict on its way, from its runs to what they came to."""

    def __init__(self, runs: VerdictRuns) -> None:
        self.session = runs.session
        self._runs = runs
        self._before = runs.before
        self._lonely: str | None = None
        # The first step of the run in which every tap was grafted.
        self._zero = 0
        self._not_swapped: dict[str, None] = {}

    def verdict(self) -> Verdict:
        request = self._runs.request
        constant, threshold = request.constant_floor, request.threshold
        compared = self._runs.both("without grafts", RunFilters(compare="True"))
        returned = self._runs.returned
        grafted = self._runs.both("what each tap adds", RunFilters(b2t="True"))
        returned_grafted = self._runs.returned
        # In a swap a side that waits for such a tap could hold up one that waits for it.
        self._lonely = lonely_filter(pd.concat([compared, grafted]))
        rows = grafted[grafted["status"].isin(MEASURED)]
        self._zero = 0 if grafted.empty else int(grafted["step"].min())
        outputs = self._outputs(rows, request.output)
        selves = self._runs.baseline_against_itself(rows, list(outputs))
        unseen = _not_in_twin(selves, self._runs.has_twin)
        unseen += _unseen(compared, self._runs.to_be_grafted(compared), grafted, selves)
        given = {*input_names(compared), *input_names(grafted)}
        inputs = [group_of(n, t) for n, t in zip(rows["name"], rows["tags"], strict=True) if n in given]
        not_repeated = list(dict.fromkeys(tap for each in selves for tap in each.not_repeated))
        job_remarks = self._runs.job_remarks(compared, grafted, not_repeated)
        data = contradicting_pairs(compared, self._before) + differing_data(compared, threshold, grafted)
        if job_remarks is not None:
            constant = job_remarks.constant
            unseen += job_remarks.unseen
            data = contradicting_pairs(compared, self._before) + data_of_jobs(compared, grafted, threshold)
        own = self._pool_taps(
            (row for each in selves for row in each.added), (row for each in selves for row in each.exact)
        )
        frame = added_frame(grafted, self._floors(selves), compared=compared, constant=constant, own=own)
        named = named_groups(frame, threshold)
        accumulated = self._accumulated(selves, constant)
        differing = [] if not_repeated else differing_taps(compared, accumulated, threshold, leave=given)
        sizes = self.session.options.baseline, self.session.options.target
        evened = gradient_scaling(frame, grafted, named, *sizes, threshold)
        even = evened.groups
        if even:
            data.append(evened.text)
        inputs += even
        following = consequences(frame, [group for group in named if group not in even], threshold)
        named = [group for group in named if group not in (*even, *following)]
        # Before anything is cleared the target has run often enough to differ from itself.
        clears = not (named or not_repeated)
        explain = request.explain and bool(named)
        target_not_repeated = self._runs.target_against_itself() if explain or clears else []
        unexplained: list[str] = []
        if not not_repeated:
            differences = UnexplainedDifferences(
                compared, differing, returned, returned_grafted, accumulated, threshold, given
            )
            unexplained = differences.after_last_tap()
            if clears:
                said = [] if data else differences.no_tap_explains()
                unexplained += said
                if said and not target_not_repeated and self._runs.returned is not None:
                    again = self._runs.both("without grafts again", RunFilters(compare="True"))
                    unexplained += differences.only_sometimes(again, self._runs.returned, self._runs.count)
                unexplained += differences.without_partner(self._last_baseline_tap(selves))
        causes: dict[str, Causes] = {}
        remarks: list[str] = []
        can_swap = not (not_repeated or self._runs.recorded) and (job_remarks is None or not target_not_repeated)
        explained = explain and can_swap
        if explained:
            names = self._names_by_group(rows, selves)
            for where in outputs:
                rank = place_in_blame(where)
                last = outputs[where]["place"]
                groups = [g for g in named if _judged_at(g) == rank and _first_over(frame, g, threshold) <= last]
                # A gradient is judged with the baseline's values, which go before it.
                settled = [*(group for group in named if _judged_at(group) < rank), *following, *even]
                if groups:
                    found = self._causes(groups, settled, where, outputs[where], names, rows, selves, threshold)
                    if found.total <= threshold:
                        name, tags = outputs[where]["name"], outputs[where]["tags"]
                        # Other layers are of its group, too.
                        is_output = (frame["name"] == name) & frame["tags"].map(tags.__eq__).astype(bool)
                        found = found.with_earlier(frame.loc[is_output & (frame["error_ratio"] > threshold), "step"])
                    causes[where] = found
            remarks += self._unexplained(named, causes)
            if changed := self._runs.baseline_changed():
                # Whatever the swaps came to was measured against something else.
                remarks, causes, explained = [_changed(changed)], {}, False
        if job_remarks is not None and named:
            remarks += job_remarks.of_named
        unseen += _may_have_passed(grafted, frame, threshold)
        unseen += unread_grafts_text(unread_grafts(frame, threshold))
        frame = labelled(frame, named, following, causes, threshold, even)
        hints: dict[str, str] = {}
        if explained or (explain and job_remarks is not None):
            hints = self._hints(
                frame, [g for g in named if (frame.loc[frame["group"] == g, "label"] == "culprit").any()]
            )
        return Verdict(
            Findings(
                frame,
                threshold,
                self.session.options.target,
                unseen,
                not_repeated if job_remarks is None else (),
                causes,
                hints,
                remarks,
                data,
                inputs,
                following,
                target_not_repeated if job_remarks is None or self._runs.recorded else (),
                job_remarks,
                unexplained,
            ),
            self._runs.count,
        )

    # ---- the floor ----------------------------------------------------------------------------------------------

    def _groups(self, added: AddedRounding) -> list[str]:
        return [group_of(name, added.tags) for name in self._paired(added)]

    def _paired(self, added: AddedRounding) -> list[str]:
        """What filters call a tap of the baseline's run against itself: one name for each pair it is in."""
        return [pairing.name for pairing in self._before.pairings("baseline", added.name, own_tags(added.tags))]

    def _pool(self, rows: Iterable[AddedRounding]) -> dict[str, Floor]:
        return pool((group, each.rel_l2, each.rel_max, each.squares) for each in rows for group in self._groups(each))

    def _pool_taps(
        self, moved: Iterable[AddedRounding], exact: Iterable[AddedRounding]
    ) -> dict[tuple[str, str | None], Floor]:
        """Floors of single taps, by the name that filters know and by kind; ``exact`` are those of the twin."""
        floors, distances = (
            pool(
                ((name, kind_of(each.tags)), each.rel_l2, each.rel_max, each.squares)
                for each in rows
                for name in self._paired(each)
            )
            for rows in (moved, exact)
        )
        return {tap: f.with_distance(distances[tap]) if tap in distances else f for tap, f in floors.items()}

    def _accumulated(self, selves: Sequence[SelfGraft], constant: float | None) -> AccumulatedFloors:
        returned: dict[str, float] = {}
        for each in selves:
            for path, rel_l2 in each.returned.items():
                returned[path] = max(returned.get(path, 0.0), rel_l2)
        taps = self._pool_taps(
            (row for each in selves for row in each.outputs), (row for each in selves for row in each.exact_outputs)
        )
        return AccumulatedFloors(taps, returned, constant)

    def _last_baseline_tap(self, selves: Sequence[SelfGraft]) -> str | None:
        """The last tap of the baseline's forward pass, as filters call it."""
        values = [added for each in selves[:1] for added in each.outputs if kind_of(added.tags) is None]
        return self._paired(values[-1])[0] if values else None

    def _floors(self, selves: Sequence[SelfGraft]) -> dict[str, Floor]:
        floors = self._pool(row for each in selves for row in each.added)
        distances = self._pool(row for each in selves for row in each.exact)
        return {g: f.with_distance(distances[g]) if g in distances else f for g, f in floors.items()}

    # ---- the cause ----------------------------------------------------------------------------------------------

    def _outputs(self, rows: pd.DataFrame, output: str | None) -> dict[str, dict[str, Any]]:
        """The taps at which effects are measured, by group: the last value, and the last gradient."""
        found: dict[str, dict[str, Any]] = {}
        for kind in (None, "grad"):
            chosen = rows[[kind_of(tags) == kind for tags in rows["tags"]]] if len(rows) else rows
            if output is not None and kind is None:
                chosen = chosen[chosen["name"] == output]
                if not len(chosen):
                    known = ", ".join(list(dict.fromkeys(rows["name"]))[-5:])
                    raise SessionError(
                        f"verdict: no tap named {output!r} was measured, so it cannot be the output; the last taps "
                        f"are {known}"
                    )
            elif len(chosen):
                # What was chosen hides what it was chosen by: most mistakes in logits leave the token.
                rounded = chosen[[roundoff(dtype) > 0 for dtype in chosen["dtype"]]]
                chosen = rounded if len(rounded) else chosen
            if len(chosen):
                row = chosen.sort_values(["step", "order"]).iloc[-1]
                group = group_of(row["name"], row["tags"])
                step = int(row["step"]) - self._zero
                found[group] = {"name": row["name"], "dtype": row["dtype"], "cast": row["cast"], "step": step}
                found[group] |= {"place": (step, int(row["order"])), "tags": own_tags(row["tags"])}
        return found

    def _names_by_group(
        self, rows: pd.DataFrame, selves: Sequence[SelfGraft]
    ) -> dict[str, set[tuple[str, str | None]]]:
        """Under which names the taps of each group are known on either side; what filters see."""
        names: dict[str, set[tuple[str, str | None]]] = {}
        for name, tags in zip(rows["name"], rows["tags"], strict=True):
            group = group_of(name, tags)
            names.setdefault(group, set()).add((name, kind_of(tags)))
        for added in (row for each in selves for row in each.added):
            for name in self._paired(added):
                names.setdefault(group_of(name, added.tags), set()).add((name, kind_of(added.tags)))
        return names

    def _causes(
        self,
        groups: Sequence[str],
        settled: Sequence[str],
        where: str,
        output: Mapping[str, Any],
        names: Mapping[str, set[tuple[str, str | None]]],
        rows: pd.DataFrame,
        selves: Sequence[SelfGraft],
        threshold: float,
    ) -> Causes:
        dtype = max((output["dtype"], *(output["cast"] or "").split(" -> ")[:1]), key=roundoff)
        drift = self._pool(row for each in selves for row in each.outputs if where in self._groups(row))
        floor = drift.get(where, Floor(0.0, 0.0)).at_least(roundoff(dtype)).rel_l2
        at_output = filter_of(sorted(names[where], key=str))
        later = f"kind in {_computed_after(where)!r}"
        orders, known = self._orders(rows, selves), set(rows["name"])
        wanted = [each.last.get(where) for each in selves]
        # The baseline's own name for it: the pair is kept there.
        name = [row.name for row in selves[0].outputs if where in self._groups(row)][-1]

        def effect(kept: frozenset[str]) -> float:
            taken = {name for group in (*settled, *groups) if group not in kept for name in names[group]}
            # What is computed after the output is for the next step, which begins from the baseline's state.
            from_baseline = " or ".join(filter(None, (filter_of(sorted(taken, key=str)), later)))
            # The output's pair is kept on the baseline's ranks, whole or in its shards.
            b2t = f"({from_baseline}) and not ({at_output})"
            t2b = f"not ({from_baseline}) or ({at_output})"
            held = filter_of(sorted(deadlocking_taps(taken, *orders) - names[where], key=str))
            if held is not None:
                b2t, t2b = (f"({each}) and not ({held})" for each in (b2t, t2b))
            why = f"with the target's {', '.join(sorted(kept)) or 'code at none of them'}"
            frame = self._runs.both(why, RunFilters(b2t=b2t, t2b=t2b, keep=at_output, leaving=self._lonely))
            waited = frame[frame["status"].isin(("missing", "timeout")) & frame["name"].isin(known)]
            if len(waited):
                self._not_swapped.update(dict.fromkeys(waited["name"]))
                return math.nan
            # Before the output tap both sides hold one state, so each side's value is that side's code's.
            side = 0 if where in groups and where not in kept else 1
            return times(self._distance(wanted, name, output["step"], where, side), floor)

        return find_causes(groups, effect, threshold)

    def _orders(self, rows: pd.DataFrame, selves: Sequence[SelfGraft]) -> tuple[Order, Order]:
        """When the baseline, and when the target, first reaches each tap."""
        ours: Order = {}
        for place, added in enumerate(selves[0].added):
            for name in self._paired(added):
                ours.setdefault((name, kind_of(added.tags)), place)
        theirs: Order = {}
        for name, tags, place in zip(rows["name"], rows["tags"], rows["order"], strict=True):
            theirs[name, kind_of(tags)] = min(theirs.get((name, kind_of(tags)), place), place)
        return ours, theirs

    def _distance(self, wanted: Sequence[torch.Tensor | None], name: str, step: int, where: str, side: int) -> float:
        """How far the newest kept pair's value of this side is from the baseline's record, over that record's norm."""
        kind = kind_of_group(where)
        tags = {"kind": kind} if kind else {}
        pairs = [(recorded, self._runs.pair(name, rank, step, tags)[side]) for rank, recorded in enumerate(wanted)]
        return distance(pairs)

    # ---- the mechanism ------------------------------------------------------------------------------------------

    def _hints(self, frame: pd.DataFrame, culprits: Sequence[str]) -> dict[str, str]:
        """What the tensors of each culprit tell, at the tap that adds the most."""
        worst = {}
        for group in culprits:
            rows = frame[frame["group"] == group]
            worst[group] = rows.iloc[int(rows["ratio"].fillna(0.0).to_numpy().argmax())]
        before = {group: _taps_before(frame, row) for group, row in worst.items()}
        shown = [*worst.values(), *(row for rows in before.values() for row in rows)]
        keep = filter_of((row["name"], kind_of(row["tags"])) for row in shown)
        if keep is None:
            return {}
        self._runs.both("how the values differ", RunFilters(b2t="True", keep=keep, leaving=self._lonely))
        hints = {}
        for group, row in worst.items():
            try:
                pair = self._pair(row)
                inputs = {each["name"]: self._pair(each)[0] for each in before[group]}
            except SessionError as error:
                hints[group] = f"none, since the pair was not kept ({str(error).splitlines()[0]})"
                continue
            hint = hint_of(*pair) or activation_hint(*pair, inputs)
            if hint is not None:
                hints[group] = f"at {row['name']}, {hint}"
        return hints

    def _pair(self, row: pd.Series[Any]) -> tuple[torch.Tensor, torch.Tensor]:
        tags = {tag: value for tag, value in row["tags"].items() if value is not None}
        return self._runs.pair(row["name"], int(row["rank"]), int(row["step"]), tags)

    def _unexplained(self, named: Sequence[str], causes: Mapping[str, Causes]) -> list[str]:
        # The update of a weight, and what it is made from, has no part in the output of this step.
        left = [
            g for g in named if _judged_at(g) <= _JUDGED_LAST and not any(g in each.labels for each in causes.values())
        ]
        do = "do" if len(left) > 1 else "does"
        said = [f"What {', '.join(left)} {do} to the output was not measured."] if left else []
        if self._not_swapped:
            taps = ", ".join(list(self._not_swapped)[:4])
            said.append(f"Code could not be swapped at {taps}: there each side waited for the other.")
        return said


def _first_over(frame: pd.DataFrame, group: str, threshold: float) -> tuple[int, int]:
    """The step and the place in it where the group first adds more than rounding."""
    over = frame[(frame["group"] == group) & (frame["ratio"] > threshold)]
    return min((int(step), int(order)) for step, order in zip(over["step"], over["order"], strict=True))


def _computed_after(group: str) -> tuple[str, ...]:
    """The kinds of taps that a step reaches when it has computed values, or gradients, like those of this group."""
    return tuple(kind for kind in KINDS if place_in_blame(f"@{kind}") > place_in_blame(group))


# An activation follows its inputs, of which a gated one has two.
_INPUTS_SHOWN = 3


def _taps_before(frame: pd.DataFrame, row: Any) -> list[Any]:
    """The rows of values just before this one on its rank."""
    if kind_of(row["tags"]) is not None:
        return []
    beside = (frame["rank"] == row["rank"]) & (frame["step"] == row["step"])
    values = frame[beside & frame["tags"].map(lambda tags: kind_of(tags) is None)]
    return [each for _, each in values[values["order"] < row["order"]].tail(_INPUTS_SHOWN).iterrows()]


_JUDGED_LAST = place_in_blame("@grad")


def _judged_at(group: str) -> int:
    """With which output's groups the effects of a group are measured: an input's at the last value."""
    return max(place_in_blame(group), place_in_blame(""))


def _changed(taps: Sequence[str]) -> str:
    return (
        f"After its code was swapped the baseline no longer showed what it had shown before, at {', '.join(taps[:3])}: "
        "what the swaps came to is left out."
    )


def _unseen(
    compared: pd.DataFrame, to_be_grafted: pd.DataFrame, grafted: pd.DataFrame, selves: Sequence[SelfGraft]
) -> list[str]:
    data = data_rows(compared)
    said = unseen_of(data[~data["status"].isin(MEASURED)]) + unseen_of(grafted)
    measured = set(grafted.loc[grafted["status"].isin(MEASURED), "name"])
    lost = [
        n for n in dict.fromkeys(to_be_grafted.loc[to_be_grafted["status"].isin(MEASURED), "name"]) if n not in measured
    ]
    if lost:
        said.append(f"{', '.join(lost[:4])} were measured without grafts, and not with them.")
    skipped = list(dict.fromkeys(name for each in selves for name in each.skipped))
    if skipped:
        said.append(f"{', '.join(skipped[:4])} show no tensor, on the baseline, that could be compared.")
    not_recorded = sum(each.not_recorded for each in selves)
    if not_recorded:
        said.append(
            f"the floor of {not_recorded} taps, for which the ranks' memory did not suffice; the largest floor of the "
            "others stands for theirs (launch with a larger keep_budget)."
        )
    return said


def _not_in_twin(selves: Sequence[SelfGraft], has_twin: bool) -> list[str]:
    """The taps whose floor is without the distance of a twin that was given."""
    if not has_twin:
        return []
    shown = {added.name for each in selves for added in each.exact}
    left = [n for n in dict.fromkeys(added.name for each in selves for added in each.added) if n not in shown]
    if not left:
        return []
    if not shown:
        return ["what exact= gives: it shows none of the baseline's taps, so that the floor is as without it."]
    more = f" and {len(left) - 4} more" if len(left) > 4 else ""
    return [f"{', '.join(left[:4])}{more} of exact=, which does not show them; their floor is as without it."]


def _may_have_passed(grafted: pd.DataFrame, frame: pd.DataFrame, threshold: float) -> list[str]:
    """Taps that could not be grafted, before one that is named: what is other there goes on with the model."""
    over = frame.loc[frame["ratio"] > threshold, "order"]
    failed = grafted[(grafted["status"] == "failed") & (grafted["order"] < (over.max() if len(over) else -1))]
    if not len(failed):
        return []
    groups = ", ".join(dict.fromkeys(map(group_of, failed["name"], failed["tags"])))
    return [
        f"what came through {groups}, where nothing could be grafted. Taps after it may have inherited what is named."
    ]


def labelled(
    frame: pd.DataFrame,
    named: Sequence[str],
    following: Sequence[str],
    causes: Mapping[str, Causes],
    threshold: float,
    even: Sequence[str] = (),
) -> pd.DataFrame:
    """The frame of a verdict with the columns ``label`` and ``alone``. Of the groups of ``even`` nothing is held."""
    labels = {
        **dict.fromkeys(named, "culprit"),
        **dict.fromkeys(following, "inherited"),
        **dict.fromkeys(even, "clean"),
    }
    alone: dict[str, float] = {}
    for each in causes.values():
        labels.update(each.labels)
        alone.update(each.alone)
    over = frame["ratio"] > threshold
    frame["label"] = [
        labels[g] if o else label for g, o, label in zip(frame["group"], over, frame["label"], strict=True)
    ]
    frame["alone"] = [alone.get(g, math.nan) if o else math.nan for g, o in zip(frame["group"], over, strict=True)]
    if named:
        first = int(over.to_numpy().argmax())
        later = (frame.index > first) & ~over & (frame["error_ratio"] > threshold)
        frame.loc[later, "label"] = "inherited"
    return frame
