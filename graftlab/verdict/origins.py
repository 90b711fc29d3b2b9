"""Finds where the errors of named groups arise: in the module behind a tap, or before it, in the module's inputs.

The rows are those of a run in which the inputs of modules were grafted like all other taps. A module that gives the
baseline's output from equal inputs is right, and its error arises between earlier taps and its inputs.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pandas as pd
import torch

from graftlab.base.tap_groups import group_of, kind_of
from graftlab.base.text import first_of, listed
from graftlab.base.world import SIDES, Side
from graftlab.rows.schema import MEASURED
from graftlab.taps.module_inputs import FIRST, KIND, SUFFIX, Argument, ModuleCall
from graftlab.taps.watch import ROOT
from graftlab.verdict.added import call_key

ModuleCalls = Mapping[Side, Sequence[Mapping[str, ModuleCall]]]
"""The call of the module behind each tap, by side and rank."""


@dataclass(frozen=True)
class WantedInputs:
    """A side's taps whose modules are examined, and all of its taps, by the side's own names.

    ``renamed`` has other names for arguments of these modules, by the module's tap.
    """

    wanted: list[str]
    known: list[str]
    renamed: dict[str, dict[str, str]] = field(default_factory=dict)


@dataclass(frozen=True)
class ErrorOrigin:
    """Where the error of a group of taps arises, at the call that adds the most.

    ``tap`` is the tap's name, ``rank`` the target's rank, ``step`` counts from the run's first. ``modules`` is, by
    side, the innermost module of both sides between whose equal inputs and output the error arises; empty where no
    inputs of it were compared. ``taps`` are all taps of the group with the same origin.

    If ``is_itself``, the module is the one behind the tap. Otherwise that module is right, and the error is in the
    ``arguments`` of ``given_to``, which is the same module or one around it. They are computed after the taps
    ``before``, in ``function`` (``is_method`` of the target's module). ``not_compared`` are arguments of the module
    without a partner, ``tensors`` the numbers of the first tensors among the arguments of ``given_to``.
    """

    group: str
    tap: str
    rank: int
    step: int
    occurrence: int
    is_itself: bool
    modules: Mapping[Side, str]
    taps: tuple[str, ...]
    given_to: str = ""
    arguments: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    function: str | None = None
    is_method: bool = False
    not_compared: tuple[str, ...] = ()
    not_compared_of: Side = "target"
    """The side whose module has those arguments."""
    input_tap: str = ""
    """The tap of the wrong input, as filters know it."""
    input_occurrence: int = 0
    tensors: frozenset[int] = frozenset()


@dataclass(frozen=True)
class ErrorOrigins:
    """The origins of errors, and the watched groups that may be right: their modules' inputs were not all compared.

    ``not_compared`` has the arguments of each of those groups that were not compared, none if no argument was.
    """

    found: tuple[ErrorOrigin, ...] = ()
    not_compared: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def are_right(self, group: str) -> bool:
        """Whether the modules behind a group are right at all of its taps, and only their inputs are wrong."""
        of_group = [origin for origin in self.found if origin.group == group]
        return bool(of_group) and not any(origin.is_itself for origin in of_group)

    def covers(self, group: str) -> bool:
        """Whether this has an origin of the group's error."""
        return any(origin.group == group for origin in self.found)


def wanted_inputs(rows: pd.DataFrame, names: Sequence[str]) -> tuple[dict[Side, WantedInputs], list[tuple[str, str]]]:
    """The modules to examine for the taps of these names, and the pairs of names of both sides' inputs.

    ``rows`` are measured rows of values.
    """
    own = {side: rows[f"{side}_name"].where(rows[f"{side}_name"].notna(), rows["name"]) for side in SIDES}
    chosen = rows["name"].isin(list(names))
    wanted = {
        side: WantedInputs(list(dict.fromkeys(own[side][chosen])), list(dict.fromkeys(own[side]))) for side in SIDES
    }
    pairs = dict.fromkeys(zip(own["baseline"], own["target"], strict=True))
    return wanted, [(f"{baseline}{SUFFIX}", f"{target}{SUFFIX}") for baseline, target in pairs]


def names_for_arguments(calls: ModuleCalls, names: Sequence[tuple[str, str]]) -> dict[str, dict[str, str]]:
    """The target's names for arguments that only the baseline calls so, by the baseline's tap of the module.

    ``names`` are pairs of the names of both sides' inputs. An argument without a namesake is paired with the only one
    of its kind on the other side: of its dtype, or of floating point, and of its size.
    """
    own = {side: {tap: call for of_rank in calls[side] for tap, call in of_rank.items()} for side in SIDES}
    found: dict[str, dict[str, str]] = {}
    for pair in names:
        baseline, target = (name.removesuffix(SUFFIX) for name in pair)
        one, other = own["baseline"].get(baseline), own["target"].get(target)
        if one is None or other is None:
            continue
        ours, theirs = _by_kind(one.arguments, other.arguments), _by_kind(other.arguments, one.arguments)
        for kind, left in ours.items():
            if len(left) == len(theirs.get(kind, ())) == 1:
                found.setdefault(baseline, {})[left[0]] = theirs[kind][0]
    return found


def _by_kind(arguments: Sequence[Argument], others: Sequence[Argument]) -> dict[tuple[str, int], list[str]]:
    """The names of the arguments that have no namesake among the others, by what their tensors are like."""
    names = {each.name for each in others}
    found: defaultdict[tuple[str, int], list[str]] = defaultdict(list)
    for each in arguments:
        if each.name not in names:
            kind = "float" if getattr(torch, each.dtype).is_floating_point else each.dtype
            found[kind, each.numel].append(each.name)
    return found


_LEAST_COSINE = 0.95


def are_alike(rows: pd.DataFrame, renamed: Mapping[str, Mapping[str, str]]) -> bool:
    """Whether the arguments that :func:`names_for_arguments` paired may be each other's, mistakes of scale included.

    ``rows`` are those of the run with these names.
    """
    inputs = rows[_are_inputs(rows) & (rows["side"] == "target").to_numpy(bool)]
    for name, status, tags, rel_l2, cosine in zip(
        *(inputs[column] for column in ("baseline_name", "status", "tags", "rel_l2", "cosine")), strict=True
    ):
        if tags["argument"] in renamed.get(str(name).removesuffix(SUFFIX), {}).values():
            is_close = status in MEASURED and (rel_l2 == 0 or cosine >= _LEAST_COSINE)
            if not is_close:
                return False
    return True


def find_origins(
    frame: pd.DataFrame,
    groups: Sequence[str],
    rows: pd.DataFrame,
    again: pd.DataFrame,
    calls: ModuleCalls,
    threshold: float,
) -> ErrorOrigins:
    """The origins of the errors of these groups.

    ``frame`` is a verdict's. ``rows`` are those of the run with the inputs of modules, ``again`` is the
    :func:`graftlab.verdict.added.added_frame` of it.
    """
    search = _Search(rows, again, calls, threshold)
    over = frame[frame["ratio"] > threshold]
    found: list[ErrorOrigin] = []
    not_compared: dict[str, tuple[str, ...]] = {}
    for group in groups:
        origins, left = search.of_group(group, over[over["group"] == group])
        found += origins
        if left is not None:
            not_compared[group] = left
    return ErrorOrigins(tuple(found), not_compared)


@dataclass(frozen=True)
class _ModuleInputs:
    """The inputs of one call of a module: the measured rows, by the tap of the module's output on the target."""

    tap: str
    call: ModuleCall
    rows: pd.DataFrame


class _Search:
    def __init__(self, rows: pd.DataFrame, again: pd.DataFrame, calls: ModuleCalls, threshold: float) -> None:
        is_measured = rows["status"].isin(MEASURED)
        again = again.assign(
            baseline_name=rows.loc[is_measured, "baseline_name"].to_numpy(),
            is_input=_are_inputs(again),
        )
        # Each choice of rows takes as long as a run of a small model if all fifty columns are copied.
        self._inputs = again.loc[again["is_input"], _OF_INPUTS]
        self._order, self._occurrence = (self._inputs[column].to_numpy() for column in ("order", "occurrence"))
        # In a deep model there are thousands, and to look through them all takes as long for each tap as a step.
        self._places: dict[Any, Any] = self._inputs.groupby(["target_name", "rank", "step"], sort=False).indices
        is_value = np.array([kind_of(tags) is None for tags in again["tags"]], dtype=bool)
        values = again[is_value & ~again["is_input"].to_numpy(bool)].sort_values("order", kind="stable")
        self._values = {column: values[column].to_numpy() for column in ("rank", "step", "order", "target_name")}
        self._by_call = {call_key(row): row for row in _dicts(again[~again["is_input"]])}
        self._calls = calls
        self._threshold = threshold
        left = rows[~is_measured]
        self._not_compared = _dicts(left[_are_inputs(left)])

    def of_group(self, group: str, over: pd.DataFrame) -> tuple[list[ErrorOrigin], tuple[str, ...] | None]:
        """The origins of one group, and the arguments that were not compared; None if all were."""
        is_right: dict[str, bool] = {}
        worst = {}
        for row in _dicts(over.sort_values("ratio", ascending=False, kind="stable")):
            now = self._by_call.get(call_key(row))
            if now is None or math.isnan(now["ratio"]):
                continue
            agrees = now["ratio"] <= self._threshold
            # A tap with both kinds of calls counts as wrong, by its worst such call.
            if now["name"] not in worst or (is_right[now["name"]] and not agrees):
                is_right[now["name"]], worst[now["name"]] = agrees, now
        found: list[ErrorOrigin] = []
        left: tuple[str, ...] | None = None
        for name, now in worst.items():
            tap = self._tap_behind("target", now)
            if tap is None:
                # The target's value may come from no module.
                if not is_right[name] and self._tap_behind("baseline", now) is not None:
                    left = left or ()
                continue
            chain = self._chain(tap, now)
            own = chain[0] if chain and chain[0].tap == tap else None
            origin = None
            if is_right[name]:
                origin = self._before(group, now, chain) if chain else None
            elif own is not None and not self._left_out(own):
                origin = self._itself(group, now, own)
            if origin is not None:
                found.append(origin)
            elif not is_right[name]:
                left = left or (self._left_out(own) if own is not None else ())
        return _merged(found), left

    # ---- the modules around a tap -------------------------------------------------------------------------------

    def _calls_on(self, side: Side, now: Mapping[str, Any]) -> Mapping[str, ModuleCall]:
        own = self._calls[side][now["rank"]] if now["rank"] < len(self._calls[side]) else {}
        if side == "baseline":
            return own
        # Compiled code shows what modules are given, and not which code calls them: the baseline's calls of the same
        # modules show that.
        return {**self._calls_on("baseline", now), **own}

    def _tap_behind(self, side: Side, now: Mapping[str, Any]) -> str | None:
        """The side's tap of the watched module whose output the row shows; None for other taps."""
        calls = self._calls_on(side, now)
        return next((tap for tap, call in calls.items() if call.module in _behind(now[f"{side}_name"])), None)

    def _chain(self, tap: str, now: Mapping[str, Any]) -> list[_ModuleInputs]:
        """The measured inputs of the module behind a tap, and of the modules around it, the innermost first."""
        calls = self._calls_on("target", now)
        by_module = {call.module: each for each, call in calls.items()}
        chain = []
        for each in (tap, *(by_module[name] for name in calls[tap].within if name in by_module)):
            rows = self._given(each, now)
            if len(rows):
                chain.append(_ModuleInputs(each, calls[each], rows))
        return chain

    def _given(self, tap: str, now: Mapping[str, Any]) -> pd.DataFrame:
        """The inputs of the module's last call before this row."""
        places = self._places.get((f"{tap}{SUFFIX}", now["rank"], now["step"]), _NOWHERE)
        places = places[self._order[places] < now["order"]]
        calls = self._occurrence[places]
        rows: pd.DataFrame = self._inputs.iloc[places[calls == calls.max(initial=0)]]
        return rows

    # ---- the two answers ----------------------------------------------------------------------------------------

    def _itself(self, group: str, now: Mapping[str, Any], own: _ModuleInputs) -> ErrorOrigin:
        return ErrorOrigin(
            group,
            now["name"],
            int(now["rank"]),
            int(now["step"]),
            int(now["occurrence"]),
            True,
            self._modules(own),
            (now["name"],),
        )

    def _before(self, group: str, now: Mapping[str, Any], chain: Sequence[_ModuleInputs]) -> ErrorOrigin | None:
        """The origin for a tap that agrees when all modules around it have the same inputs."""
        floor = now["floor"] or np.finfo(float).tiny
        sizes = [_sizes(each.rows) / floor for each in chain]
        largest = [float(each.max()) for each in sizes]
        over = [place for place, ratio in enumerate(largest) if ratio > self._threshold]
        # An ill-conditioned module amplifies a small difference.
        place = over[0] if over else int(np.nanargmax(largest)) if np.isfinite(largest).any() else None
        if place is None or not largest[place] > 0:
            return None
        given = chain[place]
        by_size = sizes[place].sort_values(ascending=False, kind="stable")
        wrong = given.rows.loc[by_size.index[by_size > min(self._threshold, 0.5 * largest[place])]]
        around = chain[place + 1] if place + 1 < len(chain) else None
        is_method = around is not None and given.call.is_method and given.call.within[0] == around.call.module
        function = given.call.function or ""
        # Until Python 3.11 a comprehension is a function by itself. Without its module, the name forward means nothing.
        is_no_name = function.startswith("<") or (function == "forward" and not is_method)
        return ErrorOrigin(
            group,
            now["name"],
            int(now["rank"]),
            int(now["step"]),
            int(now["occurrence"]),
            False,
            {} if around is None else self._modules(around),
            (now["name"],),
            given_to=given.call.module,
            arguments=tuple(dict.fromkeys(tags["argument"] for tags in wrong["tags"])),
            before=self._taps_before(given, around),
            function=None if is_no_name else given.call.function,
            is_method=is_method,
            not_compared=() if around is None else self._left_out(around),
            not_compared_of="target" if around is None else self._side_left_out(around),
            input_tap=wrong["name"].iloc[0],
            input_occurrence=int(wrong["occurrence"].iloc[0]),
            tensors=frozenset(() if given.call.tensor is None else (given.call.tensor,)),
        )

    def _modules(self, given: _ModuleInputs) -> dict[Side, str]:
        name = str(given.rows["baseline_name"].iloc[0]).removesuffix(SUFFIX)
        known = (calls[name].module for calls in self._calls["baseline"] if name in calls)
        return {"baseline": next(known, name), "target": given.call.module}

    def _left_out(self, given: _ModuleInputs) -> tuple[str, ...]:
        """The arguments of this module that were not compared, by their names on one side; see `_side_left_out`."""
        return tuple(self._left_out_by_side(given)[self._side_left_out(given)])

    def _side_left_out(self, given: _ModuleInputs) -> Side:
        """The side whose names of uncompared arguments are used: the target, if it has some."""
        of_side = self._left_out_by_side(given)
        return "baseline" if of_side["baseline"] and not of_side["target"] else "target"

    def _left_out_by_side(self, given: _ModuleInputs) -> dict[Side, list[str]]:
        # By each side's own name: another module's output may be paired with the same tap.
        names = {"target": f"{given.tap}{SUFFIX}", "baseline": str(given.rows["baseline_name"].iloc[0])}
        of_side: dict[Side, dict[str, None]] = {"target": {}, "baseline": {}}
        for row in self._not_compared:
            if names[row["side"]] in (row[f"{row['side']}_name"], row["name"]):
                of_side[row["side"]][row["tags"]["argument"]] = None
        return {side: list(found) for side, found in of_side.items()}

    def _taps_before(self, given: _ModuleInputs, around: _ModuleInputs | None) -> tuple[str, ...]:
        """The last taps that the module around computes before the wrong input, without those inside other modules."""
        values, rows = self._values, given.rows
        before = (values["rank"] == rows["rank"].iloc[0]) & (values["step"] == rows["step"].iloc[0])
        before &= values["order"] < rows["order"].min()
        if around is not None:
            before &= values["order"] > around.rows["order"].max()
        names = list(dict.fromkeys(map(str, values["target_name"][before])))
        outer = [name for name in names if not any(name.startswith((f"{n}.", f"{n}[")) for n in names if n != name)]
        return tuple(outer[-_BEFORE:])


_BEFORE = 5
_OF_INPUTS = [
    *("name", "baseline_name", "target_name", "tags", "rank", "step", "order", "occurrence", "added", "ratio"),
]
"""The columns that are read of inputs."""
_NOWHERE = np.zeros(0, np.intp)


def _sizes(rows: pd.DataFrame) -> pd.Series[float]:
    """What each row adds; infinite where only one side is finite, whatever the other numbers add."""
    return rows["added"].astype(float).mask(np.isinf(rows["ratio"].astype(float)), math.inf)


def _are_inputs(rows: pd.DataFrame) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([tags.get("kind") == KIND for tags in rows["tags"]], dtype=bool)


def _behind(tap: str) -> tuple[str, str]:
    """The names that the module behind a tap of this name may have."""
    return tap, tap.partition("[")[0]


def _dicts(frame: pd.DataFrame) -> list[dict[str, Any]]:
    # By to_dict("records"), which makes a column of each of fifty columns, this takes ten times as long.
    columns = [str(column) for column in frame.columns]
    return [dict(zip(columns, row, strict=True)) for row in frame.to_numpy().tolist()]


def _merged(origins: Sequence[ErrorOrigin]) -> list[ErrorOrigin]:
    """One origin for all taps of a group with the same one: that of the tap that adds the most."""
    doubts: defaultdict[Any, set[tuple[str, ...]]] = defaultdict(set)
    for each in origins:
        doubts[_where(each)] |= {each.not_compared} - {()}
    alike: dict[Any, list[ErrorOrigin]] = {}
    for each in origins:
        # An argument that only some layers have, such as a mask, is a doubt about all of them.
        known = doubts[_where(each)]
        doubt = each.not_compared or (next(iter(known)) if len(known) == 1 else ())
        what = None if each.is_itself else (_where(each), doubt)
        alike.setdefault(what, []).append(each)
    merged = []
    for same in alike.values():
        unsure = next((each for each in same if each.not_compared), same[0])
        merged.append(
            replace(
                same[0],
                taps=tuple(origin.tap for origin in same),
                tensors=frozenset().union(*(origin.tensors for origin in same)),
                not_compared=unsure.not_compared,
                not_compared_of=unsure.not_compared_of,
            )
        )
    return merged


def _where(origin: ErrorOrigin) -> tuple[str, str, tuple[str, ...]]:
    # The taps before it vary by layer, above all in the first. One sentence is enough.
    return group_of(origin.given_to), _place_in_code(origin), origin.arguments


# ---- the text -------------------------------------------------------------------------------------------------------

NOT_EXAMINED = "The inputs of modules were not compared: a named module may be right, and its inputs wrong."


@dataclass(frozen=True)
class OriginWords:
    """Parts of a sentence on where an error arises outside modules that are right.

    ``subject`` is what is computed differently, ``between`` the place in it, blank or beginning with a comma,
    ``right`` the modules that are right, and ``unsure`` a sentence on arguments that were not compared.
    """

    subject: str
    between: str
    right: str
    unsure: str | None


def shared_origin(origins: ErrorOrigins, groups: Sequence[str]) -> Sequence[ErrorOrigin]:
    """The origin of each group, if all have the same and their modules are right; empty otherwise."""
    found = [origin for origin in origins.found if origin.group in groups]
    one_each = len(found) == len(groups) == len({origin.group for origin in found})
    if not one_each or any(each.is_itself or not _is_given_the_same(each, found[0]) for each in found):
        return []
    return found


def origin_in_words(alike: Sequence[ErrorOrigin]) -> OriginWords:
    """The words for an error that arises before modules that are right, all with one :func:`shared_origin`."""
    first = min(alike, key=lambda each: len(each.before))
    around = _module_of(first)
    given_to = list(dict.fromkeys(_relative(group_of(each.given_to), around) for each in alike))
    right = listed(list(dict.fromkeys(_relative(each.group, around) for each in alike)))
    right += " itself is right" if len(alike) == 1 else " themselves are right"
    unsure = _not_compared_text(first)
    if FIRST not in first.arguments:
        subject = f"{_inputs(first.arguments)} of {listed(given_to)}"
        return OriginWords(subject, _place_in_code(first), right, unsure)
    if not around:
        return OriginWords(f"The input of {listed(given_to)}", "", right, unsure)
    before = list(dict.fromkeys(_relative(group_of(name), around) for name in first.before))
    before = [name for name in before if name not in given_to] or before
    if before == given_to:
        between = f", between one {listed(given_to)} and the next"
    else:
        between = f", between {listed([*(before or ['its inputs']), listed(given_to, 'or')])}"
    return OriginWords(_subject(first), between, right, unsure)


def sentences_on(origins: ErrorOrigins, stated: Collection[str] = ()) -> list[str]:
    """Sentences on modules that may be right, without those on the ``stated`` groups."""
    lines = []
    for origin in origins.found:
        if not origin.is_itself and origin.group not in stated:
            words = origin_in_words([origin])
            # A star alone is no name: it stands for the members of a model that is an nn.Sequential.
            subject = "A member of the model" if words.subject == "*" else words.subject
            right = f"{words.right} at {first_of(origin.taps)}"
            lines.append(f"{subject} is computed differently{words.between} ({right}).")
            lines += [words.unsure] if words.unsure else []
    for group, left in origins.not_compared.items():
        module = "a member of the model" if group == "*" else group
        what = f"{_inputs(left)} of {module} was" if left else f"The inputs of {module} were"
        lines.append(f"{what} not compared: {module} itself may be right, and its input wrong.")
    return lines


def _is_given_the_same(one: ErrorOrigin, other: ErrorOrigin) -> bool:
    is_alike = all(f(one) == f(other) for f in (_place_in_code, lambda o: (o.arguments, o.not_compared)))
    # One origin always agrees with itself, even if no tensor of it is known.
    return one is other or (is_alike and (FIRST not in one.arguments or bool(one.tensors & other.tensors)))


def _not_compared_text(origin: ErrorOrigin) -> str | None:
    """A sentence on arguments that may also be at fault: the other side's module has no counterparts of them."""
    if not origin.not_compared:
        return None
    module = _shown(group_of(origin.modules[origin.not_compared_of]))
    whose = f"the baseline's {module}" if origin.not_compared_of == "baseline" else module
    which, was = ("an input", "was") if len(origin.not_compared) == 1 else ("inputs", "were")
    return f"Or {listed(origin.not_compared)} may differ, {which} of {whose} that {was} not compared."


def _inputs(arguments: Sequence[str]) -> str:
    """The subject of a sentence on these arguments of a module, with a verb in the singular."""
    return f"{'Input' if len(arguments) == 1 else 'Each of the inputs'} {listed(list(arguments))}"


def _subject(origin: ErrorOrigin) -> str:
    """The code of a module in which an error arises."""
    around = _module_of(origin)
    module = "The model" if around == ROOT else around
    if origin.function is None or (origin.is_method and origin.function == "forward"):
        return module
    if origin.is_method:
        return f"The model's {origin.function}" if around == ROOT else f"{around}.{origin.function}"
    return f"{origin.function}, called in {_shown(around)},"


def _place_in_code(origin: ErrorOrigin) -> str:
    around = _module_of(origin)
    if origin.function is None or not around:
        return f", in {_shown(around)}" if around else ""
    if origin.is_method:
        return f", in the model's {origin.function}" if around == ROOT else f", in {around}.{origin.function}"
    return f", in {origin.function}, called in {_shown(around)}"


def _module_of(origin: ErrorOrigin) -> str:
    return group_of(origin.modules["target"]) if origin.modules else ""


def _shown(module: str) -> str:
    return {ROOT: "the model", "*": "a member of the model"}.get(module, module)


def _relative(name: str, around: str) -> str:
    return name.removeprefix(f"{around}.") if around else name
