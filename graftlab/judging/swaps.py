"""Swaps: runs in which some groups of taps are computed by the target's code and all others by the baseline's."""

from __future__ import annotations

import itertools
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd

from graftlab.base.tags import display_tags
from graftlab.base.tap_groups import KINDS, filter_of, group_of, is_value, kind_of, kind_of_group, place_in_blame
from graftlab.diffs.rounding import roundoff
from graftlab.errors import SessionError
from graftlab.grafting.self_graft import SelfGraft
from graftlab.judging.measured_floors import MeasuredFloors, TapName
from graftlab.judging.verdict_runs import RunFilters, VerdictRuns
from graftlab.rows.schema import MEASURED
from graftlab.transforms.default import NO_REPLICAS
from graftlab.verdict.added import coarser_dtype, records, rows_where
from graftlab.verdict.causes import (
    MOST_SWAPS,
    UNKNOWN,
    Causes,
    Distance,
    Order,
    OutputFloor,
    deadlocking_on_ranks,
    distance,
    find_causes,
)
from graftlab.verdict.returned_values import AccumulatedFloors
from graftlab.verdict.unexplained import OF_A_RESULT


@dataclass(frozen=True)
class OutputTap:
    """The tap at which effects are measured, with the tags of both sides.

    ``place`` is its step, counted from the run's first, and its position in that step. For the main part of a
    result, ``whole`` is the result's name, otherwise blank, and ``parts`` are the other parts at which effects are
    measured too.
    """

    name: str
    group: str
    dtype: str
    tags: dict[str, Any]
    place: tuple[int, int]
    whole: str = ""
    parts: tuple[OutputTap, ...] = ()

    @property
    def all(self) -> tuple[OutputTap, ...]:
        """This part and all others."""
        return self, *self.parts

    @property
    def end(self) -> tuple[int, int]:
        """The place of the last part."""
        return max(each.place for each in self.all)

    @property
    def title(self) -> str:
        """Its name in a sentence: the whole result's if several parts are measured."""
        return self.whole if self.parts else self.group

    def is_beside(self, group: str) -> bool:
        """Whether a group consists of other parts of the same result, at which no effects are measured."""
        return (
            bool(self.whole)
            and group.startswith((f"{self.whole}[", f"{self.whole}."))
            and all(group != each.group for each in self.all)
        )


def find_outputs(all_rows: pd.DataFrame, name: str | None, returned: Collection[str] = ()) -> list[OutputTap]:
    """The last value and the last gradient among the measured rows of one run; ``name`` chooses the value's tap.

    ``all_rows`` are the run's rows, ``returned`` the paths of the functions' returned values.

    Raises :class:`SessionError` where no tap of that name was measured.
    """
    rows = rows_where(all_rows, all_rows["status"].isin(MEASURED))
    zero = int(rows["step"].min()) if len(rows) else 0
    found = []
    for kind in (None, "grad"):
        # Activation checkpointing repeats inner values after the last one.
        are_meant = [is_value(tags) if kind is None else kind_of(tags) == kind for tags in rows["tags"]]
        chosen = rows[are_meant] if len(rows) else rows
        if name is not None and kind is None:
            chosen = chosen[chosen["name"] == name]
            if not len(chosen):
                known = ", ".join(list(dict.fromkeys(rows["name"]))[-5:])
                raise SessionError(
                    f"verdict: no tap named {name!r} was measured, so it cannot be the output; "
                    + (f"the last taps are {known}" if known else "nor was any other tap")
                    + _why_not_measured(all_rows, name)
                )
        elif len(chosen):
            # A token hides the logits that chose it: most mistakes in the logits do not change it.
            rounded = chosen[[roundoff(dtype) > 0 for dtype in chosen["dtype"]]]
            chosen = rounded if len(rounded) else chosen
        if len(chosen):
            rows_of_result, whole = _last_result(
                records(chosen.sort_values(["step", "order"])), set(map(_as_in_taps, returned))
            )
            main, *others = (_output_tap(row, zero, whole) for row in rows_of_result)
            # A cache has nested parts, and a list may be long.
            direct = [each for each in others if _DIRECT.fullmatch(each.name.removeprefix(whole))]
            found.append(replace(main, parts=tuple(direct) if kind is None and len(direct) < _MOST_PARTS else ()))
    return found


def _why_not_measured(rows: pd.DataFrame, name: str) -> str:
    """The status of a tap of this name, with the error of a failed transform; blank if there is none."""
    for row in records(rows[rows["name"] == name]):
        error = (row["error"] or "").strip().rpartition("\n")[2]
        return f". It is {row['status']}" + (f": {error}" if error else "")
    return ""


def _output_tap(row: Mapping[str, Any], zero: int, whole: str) -> OutputTap:
    place = int(row["step"]) - zero, int(row["order"])
    group = group_of(row["name"], row["tags"])
    return OutputTap(row["name"], group, coarser_dtype(row), display_tags(row["tags"]), place, whole)


_MOST_PARTS = 8
_DIRECT = re.compile(r"\.\w+|\[[^\[\]]*\]")
_OF_A_CACHE = re.compile(r"((?:.*\.)?output)\..*\[.*")
"""A nested part of the model's output, such as a cache beside ``output.logits``."""


def _as_in_taps(path: str) -> str:
    """A path in a function's result in the form of taps' names: ``['scores']`` is ``.scores``."""
    return re.sub(r"\['(\w+)'\]", r".\1", path)


def _last_result(rows: Sequence[dict[str, Any]], returned: Collection[str]) -> tuple[list[dict[str, Any]], str]:
    """The last tap of these rows in execution order, or the parts of the last result, and the result's name.

    Models return the main result first, and caches after it. A module may be called ``output``, so parts of a result
    without a number are known by what the functions return.
    """
    last = rows[-1]
    name = str(last["name"])
    of_cache = _OF_A_CACHE.fullmatch(name)
    whole, has_parts, _ = name.partition("[") if of_cache is None else (of_cache[1], True, "")
    beginnings = (f"{whole}[",) if of_cache is None else (f"{whole}[", f"{whole}.")
    of_result = OF_A_RESULT.fullmatch(name)
    if of_result is not None and _as_in_taps(of_result[2]) in returned:
        whole, has_parts, beginnings = of_result[1], True, (f"{of_result[1]}[", f"{of_result[1]}.")
    if not has_parts:
        return [last], ""
    parts = itertools.takewhile(
        lambda row: row["step"] == last["step"] and str(row["name"]).startswith(beginnings), reversed(rows)
    )
    return list(parts)[::-1], whole


class Swaps:
    """Measures the effect of groups on an output.

    ``rows`` are those measured with every tap grafted, ``one_sided`` is a filter for the taps that only one side has.
    """

    def __init__(
        self,
        runs: VerdictRuns,
        rows: pd.DataFrame,
        selves: Sequence[SelfGraft],
        floors: MeasuredFloors,
        one_sided: str | None,
    ) -> None:
        self._runs = runs
        self._rows = rows
        self._selves = selves
        self._floors = floors
        self._one_sided = one_sided
        self._names = self._names_by_group()
        self._left = MOST_SWAPS
        self.not_swapped: dict[str, None] = {}
        """The taps at which the sides would wait, or waited, for each other."""
        self.unlike_ranks: dict[str, None] = {}
        """The taps at which the target's ranks have different values, so that none of them is the output."""

    def causes(
        self,
        groups: Sequence[str],
        settled: Sequence[str],
        output: OutputTap,
        threshold: float,
        *,
        by_size: Sequence[str] = (),
    ) -> Causes:
        """Find the effect of each group on the output. All ``settled`` groups have the baseline's code."""
        measured = [
            output,
            *(each for each in output.parts if self._is_recorded(each) and self.can_measure(groups, each)),
        ]
        floors = [self._floors.of_output(each.group).at_least(roundoff(each.dtype)) for each in measured]
        distances_with = self._distances(groups, settled, measured)

        def effect(kept: frozenset[str]) -> float:
            found = zip(floors, distances_with(kept), strict=True)
            times = [floor.ratio(each.rel_l2, each.rel_max) for floor, each in found]
            return max(times, key=lambda one: math.inf if math.isnan(one) else one)

        largest, dtype = max(zip((each.rel_l2 for each in floors), (each.dtype for each in measured), strict=True))
        limits = OutputFloor(largest, roundoff(dtype), threshold)
        return find_causes(groups, effect, limits, most=max(2, self._left), by_size=by_size)

    def with_and_without(self, groups: Sequence[str], output: OutputTap) -> tuple[float, float]:
        """The rel_l2 of the output with the baseline's code at these groups, and with the target's."""
        distances_with = self._distances(groups, (), [output])
        return distances_with(frozenset())[0].rel_l2, distances_with(frozenset(groups))[0].rel_l2

    def _distances(
        self, groups: Sequence[str], settled: Sequence[str], outputs: Sequence[OutputTap]
    ) -> Callable[[frozenset[str]], list[Distance]]:
        """A function from groups that keep the target's code to each output's distance then. Each call is a run."""
        names = [self._kept_name(output) for output in outputs]
        at_output = " or ".join(f"({self._filter_at(output)})" for output in outputs)
        of_outputs: set[TapName] = set().union(*(self._names[output.group] for output in outputs))
        later = f"kind in {_computed_after(outputs[0].group)!r}"
        orders, known = self._orders(), set(self._rows["name"])
        lacking = {tap for side in orders for tap in set().union(*side) if not all(tap in order for order in side)}

        def distances_with(kept: frozenset[str]) -> list[Distance]:
            self._left -= 1
            taken = {name for group in (*settled, *groups) if group not in kept for name in self._names[group]}
            # What is computed after the output is for the next step, which begins from the baseline's state.
            from_baseline = " or ".join(filter(None, (filter_of(sorted(taken, key=str)), later)))
            # The output's pair is kept on the baseline's ranks, whole or in its shards.
            b2t = f"({from_baseline}) and not ({at_output})"
            t2b = f"not ({from_baseline}) or ({at_output})"
            left_out = deadlocking_on_ranks(taken, *orders) - of_outputs
            if wrong := left_out & lacking & set().union(*(self._names[group] for group in kept)):
                # The baseline would compute what it gives to the target from values without this group's error.
                self.not_swapped.update(dict.fromkeys(sorted(name for name, _ in wrong)))
                return [UNKNOWN] * len(outputs)
            if (held := filter_of(sorted(left_out, key=str))) is not None:
                b2t, t2b = (f"({each}) and not ({held})" for each in (b2t, t2b))
            why = f"with the target's {', '.join(sorted(kept)) or 'code at none of them'}"
            frame = self._runs.both(why, RunFilters(b2t=b2t, t2b=t2b, keep=at_output, leaving=self._one_sided))
            waited = frame[frame["status"].isin(("missing", "timeout")) & frame["name"].isin(known)]
            if len(waited):
                self.not_swapped.update(dict.fromkeys(waited["name"]))
                return [UNKNOWN] * len(outputs)
            refused = frame[(frame["status"] == "failed") & frame["name"].isin({name for name, _ in of_outputs})]
            if refused["error"].astype(str).str.contains(NO_REPLICAS, regex=False).any():
                self.unlike_ranks.update(dict.fromkeys(refused["name"]))
                return [UNKNOWN] * len(outputs)
            # Before the output tap both sides hold one state, so each side's value is that side's code's.
            sides = [0 if output.group in groups and output.group not in kept else 1 for output in outputs]
            return [self._distance(*each) for each in zip(names, outputs, sides, strict=True)]

        return distances_with

    def _is_recorded(self, output: OutputTap) -> bool:
        return all(output.group in each.last for each in self._selves)

    def can_measure(self, groups: Sequence[str], output: OutputTap) -> bool:
        """Whether these groups' effect on the output shows: not if they contain earlier calls of the output's tap."""
        if output.group not in groups:
            return True
        rows = zip(self._rows["name"], self._rows["tags"], self._rows["rank"], self._rows["step"], strict=True)
        calls = Counter(
            (rank, step)
            for name, tags, rank, step in rows
            if group_of(name, tags) == output.group
            and (not self._is_exact or (name == output.name and display_tags(tags) == output.tags))
        )
        return max(calls.values(), default=0) <= 1

    @property
    def _is_exact(self) -> bool:
        """Whether both sides know the output by the same name and tags."""
        return not (self._runs.before.pairs or self._runs.before.rename)

    def _filter_at(self, output: OutputTap) -> str:
        """A filter for only the output's tap, if possible, otherwise for its group."""
        if not self._is_exact:
            group = filter_of(sorted(self._names[output.group], key=str))
            assert group is not None
            return group
        kind = kind_of_group(output.group)
        tags = {tag: value for tag, value in output.tags.items() if tag != "kind" and value is not None}
        parts = [f"name == {output.name!r}", f"kind == {kind!r}" if kind else f"kind not in {KINDS!r}"]
        return " and ".join(parts + [f"{tag} == {value!r}" for tag, value in tags.items()])

    def _kept_name(self, output: OutputTap) -> str:
        """The name under which the output's newest pair is kept: the pair's, where its tap is in several."""
        names = next(
            (
                names
                for row in reversed(self._selves[0].outputs)
                if (names := [n for n in self._floors.paired(row) if group_of(n, row.tags) == output.group])
            ),
            None,
        )
        if names is None:
            raise SessionError(
                f"verdict: the baseline's values of {output.name} were not recorded, because not all taps fit into "
                f"{self._runs.session.options.keep_budget >> 20:,} MiB on each rank; launch with a larger keep_budget="
            )
        return output.name if output.name in names else names[-1]

    def _names_by_group(self) -> dict[str, set[TapName]]:
        """The names of each group's taps on either side, as filters see them."""
        names: dict[str, set[TapName]] = {}
        for name, tags in zip(self._rows["name"], self._rows["tags"], strict=True):
            names.setdefault(group_of(name, tags), set()).add((name, kind_of(tags)))
        for added in self._floors.added:
            for name in self._floors.paired(added):
                names.setdefault(group_of(name, added.tags), set()).add((name, kind_of(added.tags)))
        return names

    def _orders(self) -> tuple[list[Order], list[Order]]:
        """When each of the baseline's ranks, and of the target's, first reaches each tap."""
        ours: list[Order] = []
        for rank in self._selves:
            ours.append({})
            for place, added in enumerate(rank.added):
                for name in self._floors.paired(added):
                    ours[-1].setdefault((name, kind_of(added.tags)), place)
        theirs: dict[int, Order] = {}
        columns = (self._rows[each] for each in ("rank", "name", "tags", "order"))
        for rank, name, tags, place in zip(*columns, strict=True):
            order = theirs.setdefault(rank, {})
            order[name, kind_of(tags)] = min(order.get((name, kind_of(tags)), place), place)
        return ours, list(theirs.values())

    def _distance(self, name: str, output: OutputTap, side: int) -> Distance:
        """How far the newest kept pair's value of this side is from the baseline's record."""
        recorded = [each.last.get(output.group) for each in self._selves]
        kind = kind_of_group(output.group)
        tags = {"kind": kind} if kind else {}
        step, _ = output.place
        try:
            pairs = [(record, self._runs.pair(name, rank, step, tags)[side]) for rank, record in enumerate(recorded)]
        except SessionError as error:
            if name in {*self._rows["name"]}:
                raise
            raise SessionError(
                f"the baseline's last tap of this group, {name}, has no partner; name another tap that counts "
                "(output=, or --output)"
            ) from error
        return distance(pairs)


def _computed_after(group: str) -> tuple[str, ...]:
    """The kinds of taps that a step reaches after the values, or gradients, of this group."""
    return tuple(kind for kind in KINDS if place_in_blame(f"@{kind}") > place_in_blame(group))


def first_over(frame: pd.DataFrame, group: str, threshold: float) -> tuple[int, int]:
    """The step, and the position in it, at which the group first adds more than rounding."""
    over = frame[(frame["group"] == group) & (frame["ratio"] > threshold)]
    return min((int(step), int(order)) for step, order in zip(over["step"], over["order"], strict=True))


def by_size(frame: pd.DataFrame, groups: Sequence[str]) -> list[str]:
    """The groups, those that add the most first."""
    most = frame[frame["group"].isin(list(groups))].groupby("group")["ratio"].max()
    return sorted(groups, key=lambda group: -float(most[group]))


def earlier_steps(frame: pd.DataFrame, output: OutputTap, floors: AccumulatedFloors, limit: float) -> list[int]:
    """The steps, before the last one, in which the output differs without grafts."""
    # The group may contain other layers.
    is_output = (frame["name"] == output.name) & frame["tags"].map(lambda tags: _is_same_layer(tags, output.tags))
    floor = floors.of_tap(output.name, kind_of(output.tags), output.dtype)
    # Numbers that are finite on one side alone are not part of the error.
    differs = (frame["error"] > limit * floor.rel_l2) | (frame["error_ratio"] == math.inf)
    rows = frame[is_output & differs]
    return [
        int(step)
        for step, order in zip(rows["step"], rows["order"], strict=True)
        if (int(step), int(order)) != output.place
    ]


def _is_same_layer(tags: Mapping[str, Any], others: Mapping[str, Any]) -> bool:
    """Whether two calls of a tap belong to one layer, even if to different requests, tokens or other iterations."""
    return all(tags.get(tag) == others.get(tag) for tag in ("layer", "kind"))
