"""Modules whose weights one side alone has in 8 bits, and what that explains of the difference of their outputs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from types import MappingProxyType
from typing import Any

import pandas as pd
import torch

from graftlab.base.quantisation import is_quantised, scale_names
from graftlab.base.tap_groups import group_of, in_layers, kind_of
from graftlab.base.text import counted, first_of, listed
from graftlab.base.world import SIDES, Side
from graftlab.diffs.rounding import cast_dtypes, roundoff
from graftlab.rows.schema import MEASURED
from graftlab.transforms.quantised import DEQUANTISED
from graftlab.verdict.added import records, rows_where
from graftlab.verdict.floor import Floor

_TIMES = 2.0
"""An output is named if it adds more than this many times what the outputs of all such modules add (median)."""
_FACTOR = 0.01
"""Rounding to 8 bits has no preferred direction, so a factor further from 1 than this is none of its effects."""
_SIGMAS = 4.0
_OF_ROUNDING = 0.42
"""The rel_l2 of rounding to the nearest float, in unit roundoffs: 1 / sqrt(3) over the mean size of a mantissa."""
_OF_INTEGERS = 0.02
"""The rel_l2 of rounding activations to 8-bit integers, with a scale for each token."""
_OF_PACKED = 0.15
"""The rel_l2 of a weight of 4 bits, or of integers of 8 bits that may hold numbers of 4."""
_OF_8_BITS = 0.03
"""Integers that are further than this from a weight, beside a factor, hold fewer bits."""
_FACTOR_OF_PACKED = 0.05
"""Methods for 4 bits make up for outputs, or clip, so their rounding may have a direction."""
_MARKS = ("scale", "qweight", "qzeros", "absmax")
"""Parts of the names of a module's other tensors, if its weight is packed."""
_MOST_SHOWN = 6
_GROUPS_SHOWN = 2


@dataclass(frozen=True)
class QuantisedModules:
    """Modules whose weights one side alone has in 8 bits.

    ``floors`` are the least floors of their outputs, by name; ``text`` a sentence on the weights, and one on the
    outputs. ``scaled`` are outputs that differ by a factor, in words, by name. ``scales`` are the names of the scales.
    """

    floors: Mapping[str, Floor] = field(default_factory=dict)
    text: tuple[str, ...] = ()
    scaled: Mapping[str, str] = field(default_factory=dict)
    scales: Collection[str] = ()

    def outputs(self, frame: pd.DataFrame, named: Collection[str]) -> list[str]:
        """The groups of their outputs that differ, and are not named; ``frame`` is :func:`.added_frame`'s."""
        differ = frame["name"].isin(list(self.floors)) & (frame["added"] > 0) & ~frame["group"].isin(list(named))
        return list(dict.fromkeys(frame.loc[differ, "group"]))

    def factors(self, frame: pd.DataFrame, named: Collection[str]) -> list[str]:
        """Sentences on outputs that differ by a factor, and whose groups are not named."""
        known = {row["name"] for row in records(frame, "name", "group") if row["group"] not in named}
        found = [words for name, words in self.scaled.items() if name in known]
        if not found:
            return []
        return [f"From equal inputs, {listed(found, most=_MOST_SHOWN)}, which quantising does not explain."]


def quantised_pair(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """The dtypes of a weight that one side alone has in 8 bits, before and after the conversion; or None."""
    if kind_of(row["tags"]) != "param":
        return None
    pairs = cast_dtypes(row["cast"])
    return next((each for each in pairs if len({is_quantised(getattr(torch, name)) for name in each}) == 2), None)


def is_dequantised(row: Mapping[str, Any]) -> bool:
    """Whether a row compares the values that codes stand for."""
    return DEQUANTISED in (row["aligned_by"] or "")


@dataclass(frozen=True)
class _Weight:
    """A weight that one ``side`` alone has in few bits, and the largest difference that may explain in outputs.

    ``codes`` is the name of their dtype, blank if they are packed.
    """

    row: Mapping[str, Any]
    side: Side
    codes: str
    limit: float
    factor: float = _FACTOR

    @property
    def module(self) -> str:
        return str(self.row["name"]).rpartition(".")[0]


def quantised_limits(compared: pd.DataFrame) -> dict[str, float]:
    """How far the output of each such module may be from the baseline's (rel_l2), by the module's name."""
    return {weight.module: weight.limit for weight in _weights(compared)}


def quantised_modules(
    compared: pd.DataFrame,
    grafted: pd.DataFrame,
    threshold: float,
    summed_at: Mapping[str, str] = MappingProxyType({}),
) -> QuantisedModules:
    """Find such modules, by their weights in ``compared``, and how far their outputs are apart in ``grafted``.

    ``grafted`` are the rows of a run in which every tap had the baseline's values. An output is named above
    ``threshold`` times its floor. One that differs by a factor has no such floor. ``summed_at`` are taps that show the
    sum of outputs that are not compared, because each rank has a summand, with the name of that output.
    """
    weights = _weights(compared)
    if not weights:
        return QuantisedModules()
    of_weights = {weight.module: weight for weight in weights}
    outputs: dict[str, list[dict[str, Any]]] = {}
    modules: dict[str, _Weight] = {}
    for row in records(rows_where(grafted, grafted["status"].isin(MEASURED))):
        name = row["name"]
        weight = of_weights.get(_module(summed_at.get(name, name)))
        if kind_of(row["tags"]) is None and weight is not None and row["rel_l2"] is not None:
            outputs.setdefault(name, []).append(row)
            modules[name] = weight
    usual = {
        is_sum: median(row["rel_l2"] for name in names for row in outputs[name])
        for is_sum in (False, True)
        if (names := [name for name in outputs if (name in summed_at) is is_sum])
    }
    scaled = {
        name: f"the target's {name} is {factor:.3g} times the baseline's"
        for name, rows in outputs.items()
        if (factor := next(filter(None, (_factor(row, modules[name].factor) for row in rows)), None))
    }
    allowed = {
        name: _TIMES * min(usual[name in summed_at], modules[name].limit) for name in outputs if name not in scaled
    }
    own_names = {name for weight in weights if is_dequantised(weight.row) for name in _own_names(weight.row)}
    scales = {each for name in own_names for each in scale_names(name)}
    if not any(row["rel_l2"] for rows in outputs.values() for row in rows) and outputs:
        # The other side has rounded its weights alike, and nothing else is quantised.
        return QuantisedModules(scales=scales)
    # The largest of many differences is several times their root mean square.
    floors = {name: Floor(most / threshold, 3 * most / _TIMES) for name, most in allowed.items()}
    return QuantisedModules(floors, tuple(_sentences(weights, outputs, allowed)), scaled, scales)


def _module(name: str) -> str:
    """The name of the module that has this output, or a part of it."""
    return name.partition("[")[0]


def _weights(compared: pd.DataFrame) -> list[_Weight]:
    if not len(compared):
        return []
    rows = records(rows_where(compared, compared["step"] == compared["step"].min()))
    params = [row for row in rows if kind_of(row["tags"]) == "param"]
    found = []
    for row in params:
        if row["status"] in MEASURED and (pair := quantised_pair(row)) is not None:
            side = SIDES[1 if is_quantised(getattr(torch, pair[1])) else 0]
            found.append(_Weight(row, side, _codes(pair), _limit(row, pair), _most_factor(row, pair)))
    return found + _packed([row for row in params if row["status"] not in MEASURED])


def _packed(lone: Sequence[Mapping[str, Any]]) -> list[_Weight]:
    """The weights without a partner whose modules have tensors on the other side alone, such as packed codes."""
    beside: dict[str, Side] = {}
    for row in lone:
        module, _, leaf = row["name"].rpartition(".")
        if any(mark in leaf for mark in _MARKS):
            beside.setdefault(module, row["side"])
    found = []
    limit = _TIMES * math.hypot(_OF_PACKED, _OF_INTEGERS)
    for row in lone:
        module, _, leaf = row["name"].rpartition(".")
        own = getattr(torch, row["dtype"] or "", None)
        # A norm's weight may be the other side's ``scale``.
        if leaf != "weight" or own is None or len(row["shape"]) < 2:
            continue
        if row["status"] == "failed" and is_quantised(own):
            side: Side = row["side"]
        elif module in beside and beside[module] != row["side"] and own.is_floating_point and not is_quantised(own):
            side = beside[module]
        else:
            continue
        found.append(_Weight(row, side, "", limit, _FACTOR_OF_PACKED))
    return found


def _own_names(row: Mapping[str, Any]) -> set[str]:
    """The names of a tap on both sides."""
    return {row["name"], row.get("baseline_name") or row["name"], row.get("target_name") or row["name"]}


def _limit(row: Mapping[str, Any], pair: tuple[str, str]) -> float:
    """The largest difference that quantising may explain in a module's output: that of its weight and its input."""
    codes = _codes(pair)
    of_input = _OF_ROUNDING * roundoff(codes) or _OF_INTEGERS
    # Without a pair of finite numbers, nothing was measured.
    of_weight = row["rel_l2"] if is_dequantised(row) and row["rel_l2"] is not None else of_input
    return _TIMES * math.hypot(min(of_weight, most_by_rounding(codes)), of_input)


def most_by_rounding(codes: str) -> float:
    """The largest rel_l2 of a dequantised weight that its rounding to this dtype may explain."""
    return roundoff(codes) or _OF_PACKED


def is_wrongly_quantised(row: Mapping[str, Any], pair: tuple[str, str]) -> bool:
    """Whether a dequantised weight differs by more than rounding to 8 bits, or by a factor."""
    if row["nonfinite_differ"]:
        return True
    if row["rel_l2"] is None:
        return False
    return row["rel_l2"] > most_by_rounding(_codes(pair)) or _factor(row, _most_factor(row, pair)) is not None


def _factor(row: Mapping[str, Any], most: float) -> float | None:
    """The factor by which the sides differ, beside differences of no preferred direction; None if it may be 1."""
    factor = _projected(row)
    if factor is None:
        return None
    is_near = abs(factor - 1) <= max(most, _SIGMAS * row["rel_l2"] / math.sqrt(row["numel"]))
    return None if is_near else factor


def _projected(row: Mapping[str, Any]) -> float | None:
    """The factor of the baseline in the target; None where a side is zero."""
    squares = [row[f"mean_{side}"] ** 2 + row[f"std_{side}"] ** 2 for side in SIDES]
    if not all(squares) or row["cosine"] is None:
        return None
    return float(row["cosine"] * math.sqrt(squares[1] / squares[0]))


def _most_factor(row: Mapping[str, Any], pair: tuple[str, str]) -> float:
    """The factor by which rounding may change a weight, from the part of the difference that is not a factor."""
    factor = _projected(row)
    if not is_dequantised(row) or factor is None or roundoff(_codes(pair)):
        return _FACTOR
    rest = math.sqrt(max(0.0, row["rel_l2"] ** 2 - (factor - 1) ** 2))
    return _FACTOR_OF_PACKED if rest > _OF_8_BITS else _FACTOR


def _codes(pair: tuple[str, str]) -> str:
    return next(name for name in pair if is_quantised(getattr(torch, name)))


def _sentences(
    weights: Sequence[_Weight],
    outputs: Mapping[str, Sequence[Mapping[str, Any]]],
    allowed: Mapping[str, float],
) -> list[str]:
    """What is quantised, how far that moves the outputs of its modules, and what cannot be seen."""
    sides = dict.fromkeys(weight.side for weight in weights)
    side = next(iter(sides))
    whose = f"The {side}'s weights" if len(sides) == 1 else "Weights of either side"
    groups: dict[str, list[Mapping[str, Any]]] = {}
    for weight in weights:
        groups.setdefault(group_of(weight.row["name"]), []).append(weight.row)
    words = [f"{group}{in_layers(row['name'] for row in rows)}" for group, rows in groups.items()]
    other = next(each for each in SIDES if each != side)
    dequantised = [weight.row for weight in weights if is_dequantised(weight.row)]
    known = [row["rel_l2"] for row in dequantised if row["rel_l2"] is not None]
    whose_other = f"the {other}'s" if len(sides) == 1 else "the other side's"
    how = ""
    if known:
        how = f"multiplied by their scales, they differ from {whose_other} by at most {max(known):.2g} (rel_l2)"
    if len(dequantised) < len(weights):
        is_packed = any(not weight.codes for weight in weights)
        why = "they are packed" if is_packed else "no scale was found"
        of_some = f"of {len(weights) - len(dequantised)} " if dequantised else ""
        how += f"{'; ' if how else ''}the values {of_some}are not compared, because {why}"
    codes = " and ".join(dict.fromkeys(weight.codes for weight in weights if weight.codes))
    to_codes = f" to {codes}" if codes else ""
    found = [f"{whose} are quantised{to_codes}: {first_of(words, _GROUPS_SHOWN)}{f'; {how}' if how else ''}."]
    within = {name: [row["rel_l2"] for row in outputs[name]] for name in allowed}
    within = {name: sizes for name, sizes in within.items() if max(sizes) <= allowed[name]}
    sizes = [size for each in within.values() for size in each]
    of_outputs = f"From equal inputs, {len(within)} of {counted(len(outputs), 'output')} of such modules"
    if any(sizes):
        most = max(within, key=lambda name: max(within[name]))
        by = " to ".join(dict.fromkeys(f"{size:.2g}" for size in (min(sizes), max(sizes))))
        found.append(
            f"{of_outputs} differ by {by}, most at {most}. Quantising explains up to {max(allowed.values()):.2g}; a "
            "mistake within that is not seen."
        )
    elif sizes:
        found.append(f"{of_outputs} are equal.")
    return found
