"""How the values of named groups differ: where their error arises, and hints at its mechanism."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import pandas as pd
import torch

from graftlab.base.tags import own_tags
from graftlab.base.tap_groups import filter_of, group_of, is_value, kind_of
from graftlab.diffs.maps import difference_map
from graftlab.diffs.rounding import assumed_floor
from graftlab.errors import GraftError, LayoutError, SessionError
from graftlab.grafting.kept import OCCURRENCE
from graftlab.judging.stored_weights import stored_otherwise
from graftlab.judging.verdict_runs import RunFilters, VerdictAbandoned, VerdictRuns, kept_pair
from graftlab.plan.pairs import PairRule, PairTable
from graftlab.rows.schema import MEASURED
from graftlab.taps.module_inputs import FIRST, KIND, SUFFIX
from graftlab.verdict.activations import activation_hint
from graftlab.verdict.added import NOT_NAMED, call_key, measured_rows, records, rows_where
from graftlab.verdict.findings import ShownMap
from graftlab.verdict.hints import Hint, hint_of
from graftlab.verdict.model_data import differing_rows, weights_to_lend, with_data_of, without_data
from graftlab.verdict.origins import (
    ErrorOrigin,
    ErrorOrigins,
    are_alike,
    find_origins,
    names_for_arguments,
    wanted_inputs,
)
from graftlab.verdict.returned_values import ReturnedValues
from graftlab.verdict.stale_rows import stale_rows

_MOST_MAPS = 24
"""How many maps a verdict has, of at most 2 MiB each."""
_PAIR_BUDGET = 16 << 20
"""Bytes of the pairs that a verdict keeps, so that its maps can show other dimensions."""
_WEIGHTS_LOOKED_AT = 8
"""Groups of differing weights whose pairs are kept."""

_FARTHER = 2.0
"""If the baseline's weights move the results this many times farther apart, the sides arrange weights differently."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class LentWeights:
    """The findings of a run in which the target had the baseline's weights where they differ; false if there was none.

    ``compared`` are its rows, but the rows of weights are those of a run with each side's own. ``hints`` and ``maps``
    show the weights, by group. ``failure`` is the reason if weights differ and could not be lent. ``stored`` has those
    that differ and are right, because the target stores them in another form.
    """

    compared: pd.DataFrame | None = None
    hints: Mapping[str, str] = field(default_factory=dict)
    maps: Mapping[str, ShownMap] = field(default_factory=dict)
    failure: str | None = None
    stored: Mapping[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return self.compared is not None

    @classmethod
    def of(cls, runs: VerdictRuns, plain: pd.DataFrame, threshold: float) -> LentWeights:
        """Lend weights from now on if they differ in ``plain``, the rows of a run without grafts."""
        rows = weights_to_lend(plain, threshold) if runs.can_lend_weights else []
        distance = _distance(plain, runs.returned) if rows else math.nan
        if not distance > threshold:
            # Weights that are folded into each other, or permuted together, compute the same: each side needs its own.
            # Without a known distance they may as well be wrong.
            if math.isnan(distance):
                return cls()
            return cls(stored=stored_otherwise(runs, differing_rows(plain, threshold), threshold, agrees=True))
        stored = stored_otherwise(runs, differing_rows(plain, threshold), threshold, agrees=False)
        rows = [row for row in rows if row["name"] not in stored]
        if not rows:
            return cls(stored=stored)
        looked_at = rows[:_WEIGHTS_LOOKED_AT]
        try:
            compared = runs.lend_weights([row["name"] for row in rows], [row["name"] for row in looked_at])
        except GraftError as error:
            if isinstance(error, VerdictAbandoned) or runs.session.closed:
                raise
            _log.debug("verdict: the target could not be given the baseline's weights", exc_info=True)
            return cls(failure=str(error).partition("\n")[0], stored=stored)
        if _distance(compared, runs.returned) > _FARTHER * distance:
            runs.return_weights()
            return cls(stored=stored)
        hints, maps = {}, {}
        for row in looked_at:
            name, group = row["name"], group_of(row["name"])
            try:
                pair = runs.pair(name, int(row["rank"]), 0, {"kind": "param"})
            except SessionError:
                # Without room for the pair there is no hint.
                continue
            pair = _without_others(pair, row, PairTable(runs.before.pairs))
            hint = hint_of(*pair)
            if pair[0].shape == pair[1].shape:
                maps[group] = ShownMap(name, difference_map(*pair), hint)
            if hint is not None:
                hints[group] = f"at {name}, {hint}"
        return cls(with_data_of(compared, plain), hints, maps, stored=stored)


def _distance(rows: pd.DataFrame, returned: ReturnedValues | None) -> float:
    """How far apart a run's results are, or else its last tap, as a multiple of assumed rounding; NaN if unknown."""
    found = [
        each.rel_l2 / assumed_floor(each.dtypes)[0]
        for each in (returned.differences if returned is not None else ())
        if not math.isnan(each.rel_l2)
    ]
    if not found:
        last = max(records(without_data(rows_where(rows, rows["status"].isin(MEASURED)))), key=_place, default=None)
        if last is not None and last["nonfinite_differ"]:
            found = [math.inf]
        elif last is not None and last["rel_l2"] is not None:
            found = [last["rel_l2"] / assumed_floor([last["dtype"]])[0]]
    return max(found, default=math.nan)


def _place(row: Mapping[str, Any]) -> tuple[bool, int, int]:
    return is_value(row["tags"]), row["step"], row["order"]


class Mechanisms:
    """Looks at the tensors of named groups. ``one_sided`` is a filter for the taps that only one side has."""

    def __init__(self, runs: VerdictRuns, one_sided: str | None) -> None:
        self._runs = runs
        self._one_sided = one_sided
        self._of_inputs: dict[str, str | None] = {}
        self._pair_budget = _PAIR_BUDGET
        self._pairs: dict[tuple[Any, ...], tuple[torch.Tensor, torch.Tensor]] = {}
        """The pairs that an earlier run kept, by :func:`call_key`."""
        self.maps: dict[str, ShownMap] = {}
        """Where the tensors of a group differ, for the first named groups, by group."""

    def origins(
        self,
        frame: pd.DataFrame,
        named: Sequence[str],
        rows: pd.DataFrame,
        added: Callable[[pd.DataFrame], pd.DataFrame],
        threshold: float,
    ) -> ErrorOrigins:
        """Graft the inputs of modules too, in one run; returns where the errors of these groups of values arise.

        ``rows`` are those of the run in which every tap was grafted. ``added`` turns such rows into a verdict's frame.
        """
        values = rows[rows["tags"].map(lambda tags: kind_of(tags) is None).astype(bool)]
        over = frame[frame["group"].isin(list(named)) & (frame["ratio"] > threshold)]
        wanted, names = wanted_inputs(values, list(dict.fromkeys(over["name"])))
        before = self._runs.before
        # No rule renames inputs, or has their layout.
        pairs = _rules_of_inputs(names, before.pairs) if before.pairs or before.rename else []
        filters = RunFilters(b2t="True", keep=f"kind == {KIND!r}", leaving=self._one_sided, pairs=pairs)
        again, calls = self._runs.with_module_inputs(wanted, filters)
        renamed = names_for_arguments(calls, names)
        if renamed:
            renaming = {**wanted, "baseline": replace(wanted["baseline"], renamed=renamed)}
            by_kind = self._runs.with_module_inputs(renaming, filters)
            if are_alike(by_kind[0], renamed):
                again, calls = by_kind
        origins = find_origins(frame, named, again, added(again), calls, threshold)
        for origin in origins.found:
            if not origin.is_itself and origin.group not in self._of_inputs:
                self._look_at_input(origin)
        return origins

    def _look_at_input(self, origin: ErrorOrigin) -> None:
        """Note a hint and a map of the input of a module that is right, instead of its output."""
        tags = {"kind": KIND, "argument": origin.arguments[0], OCCURRENCE: origin.input_occurrence}
        try:
            pair = self._runs.pair(origin.input_tap, origin.rank, origin.step, tags)
        except SessionError:
            # All inputs share one budget. Without a pair of the input, its module's output is looked at.
            return
        which = "the input" if origin.arguments[0] == FIRST else f"input {origin.arguments[0]}"
        hint = hint_of(*pair)
        self._map(origin.group, f"{which} of {origin.given_to}", pair, hint)
        self._of_inputs[origin.group] = None if hint is None else f"in {which} of {origin.given_to}, {hint}"

    def _map(self, group: str, title: str, pair: tuple[torch.Tensor, torch.Tensor], hint: Hint | None) -> None:
        if pair[0].shape != pair[1].shape or len(self.maps) >= _MOST_MAPS:
            return
        size = sum(each.nbytes for each in pair)
        kept = size <= self._pair_budget
        self._pair_budget -= size if kept else 0
        self.maps[group] = ShownMap(title, difference_map(*pair), hint, pair if kept else None)

    def pairs_for_hints(self, frame: pd.DataFrame, named: Sequence[str]) -> str | None:
        """A filter for the taps whose pairs :meth:`hints` looks at."""
        return _filter_of_rows(_shown(self._looked_at(frame, named), frame))

    def note_pairs(self, frame: pd.DataFrame, named: Sequence[str], again: pd.DataFrame) -> None:
        """Note the pairs for hints that the newest run kept, so that they need no run of their own.

        ``again`` are its rows. Only pairs that are as far apart as in ``frame`` count.
        """
        rows = ({**row, "step": row["in_run"], "tags": own_tags(row["tags"])} for row in measured_rows(again))
        now = {call_key(row): row["rel_l2"] for row in rows}
        for row in _shown(self._looked_at(frame, named), frame):
            if now.get(call_key(row)) == row["added"]:
                with contextlib.suppress(SessionError):
                    self._pairs[call_key(row)] = kept_pair(self._runs, row, row["step"])

    def _looked_at(self, frame: pd.DataFrame, named: Sequence[str]) -> dict[str, Any]:
        """The row of each culprit that adds the most, except where the input of its module is looked at."""
        culprits = {*frame.loc[frame["label"] == "culprit", "group"]}
        return _worst(frame, [group for group in named if group in culprits and group not in self._of_inputs])

    def hints(self, frame: pd.DataFrame, named: Sequence[str]) -> dict[str, str]:
        """A hint for each culprit, from the tensors at the tap that adds the most, or from its module's input."""
        culprits = {*frame.loc[frame["label"] == "culprit", "group"]}
        known = {group: self._of_inputs.get(group) for group in named if group in culprits}
        hints = {group: hint for group, hint in known.items() if hint is not None}
        worst = self._looked_at(frame, named)
        shown = _shown(worst, frame)
        keep = _filter_of_rows(shown)
        if keep is None:
            return hints
        if not all(call_key(row) in self._pairs for row in shown):
            self._pairs.clear()
            self._runs.both("how the values differ", RunFilters(b2t="True", keep=keep, leaving=self._one_sided))
        for group, row in worst.items():
            before = _taps_before(frame, row)
            try:
                pair = self._pair(row)
                inputs = {each["name"]: self._pair(each)[0] for each in before}
                agreeing = {each["name"]: inputs[each["name"]] for each in before if each["label"] in NOT_NAMED}
            except SessionError as error:
                hints[group] = f"none, since the pair was not kept ({str(error).splitlines()[0]})"
                continue
            last = dict(list(inputs.items())[-_INPUTS_OF_AN_ACTIVATION:])
            hint = stale_rows(*pair, agreeing) or hint_of(*pair) or activation_hint(*pair, last)
            self._map(group, _title(row), pair, hint)
            if hint is not None:
                hints[group] = f"at {row['name']}, {hint}"
        return hints

    def _pair(self, row: Any) -> tuple[torch.Tensor, torch.Tensor]:
        known = self._pairs.get(call_key(row))
        pair = kept_pair(self._runs, row, row["step"]) if known is None else known
        return _without_others(pair, row, self._table)

    @cached_property
    def _table(self) -> PairTable:
        return PairTable(self._runs.before.pairs)


def _without_others(
    pair: tuple[torch.Tensor, torch.Tensor], row: Mapping[str, Any], table: PairTable
) -> tuple[torch.Tensor, torch.Tensor]:
    """A kept pair of a row, without what the target alone has in its tensor, such as the weights of other layers.

    The pair is in the target's shape, and equal in the rest. An index of it would be read as one of the baseline's tap.
    """
    target = row.get("target_name") or row["name"]
    found = table.of("target", target, row.get("tags") or {})
    rule = next((each.rule for each in found if each.name == row["name"] and each.rule is not None), None)
    if rule is None or not rule.is_part or rule.whole != "target" or rule.moves_rows:
        return pair
    with contextlib.suppress(LayoutError):
        return rule.parsed.local(pair[0]), rule.parsed.local(pair[1])
    return pair


def _rules_of_inputs(names: Iterable[tuple[str, str]], rules: Sequence[PairRule]) -> list[PairRule]:
    """The pairs of modules' inputs, of these names. They have their rows where the modules' outputs have them."""
    table, found = PairTable(rules), []
    for baseline, target in names:
        tap, counterpart = target.removesuffix(SUFFIX), baseline.removesuffix(SUFFIX)
        of_output = (each.rule for each in table.of("target", tap, {}) if each.baseline_name == counterpart)
        rule = next(filter(None, of_output), None)
        layout = None if rule is None else rule.parsed.on_leading_dims()
        if rule is None or layout is None:
            found.append(PairRule(baseline, target))
        else:
            found.append(PairRule(baseline, target, layout.text, rule.whole))
    return found


def _filter_of_rows(rows: Iterable[Any]) -> str | None:
    """A filter for the taps of these rows: a pair of each layer of a group would take the memory of the whole model."""
    return filter_of(((row["name"], kind_of(row["tags"])) for row in rows), whole_groups=False)


def _shown(worst: Mapping[str, Any], frame: pd.DataFrame) -> list[Any]:
    """The rows of groups whose tensors are looked at, and those just before them."""
    return [*worst.values(), *(each for row in worst.values() for each in _taps_before(frame, row))]


def _worst(frame: pd.DataFrame, named: Sequence[str]) -> dict[str, Any]:
    """The row of each group that adds the most."""
    found = {}
    for group in named:
        rows = frame[frame["group"] == group]
        found[group] = rows.iloc[int(rows["ratio"].fillna(0.0).to_numpy().argmax())]
    return found


def _title(row: pd.Series[Any]) -> str:
    """A tap with its call, in words."""
    own = [f"{tag}={value}" for tag, value in row["tags"].items() if value is not None and tag != "kind"]
    kind = kind_of(row["tags"])
    what = f"gradient of {row['name']}" if kind == "grad" else str(row["name"])
    calls = [f"{word} {int(row[word])}" for word in ("step", OCCURRENCE, "rank") if row[word]]
    return ", ".join([what, *own, *calls])


# An activation follows its inputs: a gated one has two.
_INPUTS_OF_AN_ACTIVATION = 3
# A cache is read after queries, keys and values, and after the operations on them.
_TAPS_SHOWN = 8


def _taps_before(frame: pd.DataFrame, row: Any) -> list[Any]:
    """The rows of values just before this one on its rank."""
    if kind_of(row["tags"]) is not None:
        return []
    beside = (frame["rank"] == row["rank"]) & (frame["step"] == row["step"])
    values = frame[beside & frame["tags"].map(lambda tags: kind_of(tags) is None)]
    return [each for _, each in values[values["order"] < row["order"]].tail(_TAPS_SHOWN).iterrows()]
