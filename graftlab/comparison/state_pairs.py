"""State that calls of both sides leave under different names, such as two kinds of caches: pairs found by value."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlab.diffs.results import compare_results, is_written, value_in_words
from graftlab.diffs.rounding import assumed_floor
from graftlab.ranks.call_description import CallDescription

# State of fewer numbers may be equal by chance.
_LEAST = 8
# State is differing if it is this many times as far apart as rounding explains, or as it was when it was paired.
_FAR = 100.0
# The numbers of two tensors that are compared before all are: each of a model's caches may be that of any layer.
_SAMPLED = 512


@dataclass(frozen=True)
class _Pair:
    """The path of the baseline's state, how far it was from the target's (rel_l2), and after which call."""

    baseline: str
    apart: float
    call: int


@dataclass(frozen=True)
class _Differing:
    """A pair that agreed, and differs by ``rel_l2`` after ``call``."""

    pair: _Pair
    target: str
    rel_l2: float
    call: int


class StatePairs:
    """Pairs, by value, what the calls of two models leave behind, and notes which call has left it differing.

    Paths of both sides that are equal are left out: they are compared like results.
    """

    def __init__(self) -> None:
        # By the target's path.
        self._pairs: dict[str, _Pair] = {}
        self._differing: dict[str, _Differing] = {}

    def add(self, number: int, baseline: CallDescription, target: CallDescription) -> None:
        """Compare what these calls, the ``number``-th of both sides, leave behind."""
        ours = {path: each for path, each in baseline.plain.items() if path not in target.plain and _is_state(each)}
        theirs = {
            path: each
            for path, each in target.plain.items()
            if is_written(path) and path not in baseline.plain and _is_state(each)
        }
        samples = _Samples(ours)
        for path, value in theirs.items():
            pair = self._pairs.get(path)
            if pair is None or pair.baseline not in ours:
                self._pair(number, path, value, samples.perhaps_near(value))
            elif (apart := _apart(ours[pair.baseline], value)) is not None:
                if apart > _FAR * max(pair.apart, _floor(ours[pair.baseline], value)):
                    self._differing.setdefault(path, _Differing(pair, path, apart, number))
                else:
                    self._differing.pop(path, None)

    def remark(self) -> list[str]:
        """A sentence on state that differs although it once agreed, the first of it; nothing if none does."""
        if not self._differing:
            return []
        first = min(self._differing.values(), key=lambda each: each.call)
        more = len(self._differing) - 1
        others = f"; so {'does' if more == 1 else 'do'} {more} more" if more else ""
        return [
            f"State differs that call {first.call} has left: {value_in_words(first.target)} on the target differs by "
            f"{first.rel_l2:.2g} from {value_in_words(first.pair.baseline)} on the baseline, and after call "
            f"{first.pair.call} they agreed{others}. Call {first.call} may write it wrongly, or in another order; then "
            "code named below that reads it may be right."
        ]

    def _pair(self, number: int, path: str, value: Tensor, ours: Mapping[str, Tensor]) -> None:
        near = {
            name: apart
            for name, each in ours.items()
            if (apart := _apart(each, value)) is not None and apart <= _floor(each, value)
        }
        if len(near) == 1:
            ((name, apart),) = near.items()
            self._pairs[path] = _Pair(name, apart, number)
            # It may have differed from another tensor.
            self._differing.pop(path, None)


class _Samples:
    """Some numbers of each of these tensors, by which most that are far from another tensor are known at once."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._tensors = tensors
        named: dict[int, list[str]] = defaultdict(list)
        for name, each in tensors.items():
            named[each.numel()].append(name)
        self._names = dict(named)
        self._numbers = {n: torch.stack([_sampled(tensors[name]) for name in names]) for n, names in named.items()}

    def perhaps_near(self, value: Tensor) -> dict[str, Tensor]:
        """The tensors that may be no further from ``value`` than rounding explains."""
        names = self._names.get(value.numel(), [])
        if not names:
            return {}
        # A part of a difference is no larger than the whole, which is measured by one of the two tensors.
        apart = (self._numbers[value.numel()] - _sampled(value)).norm(dim=1).tolist()
        size = float(_wide(value).norm())
        return {
            name: self._tensors[name]
            for name, part in zip(names, apart, strict=True)
            if part <= 2 * _floor(self._tensors[name], value) * size
        }


def _sampled(value: Tensor) -> Tensor:
    flat = value.detach().reshape(-1)
    return _wide(flat[:: max(1, flat.numel() // _SAMPLED)])


def _wide(value: Tensor) -> Tensor:
    return value.detach().double().nan_to_num(0, 0, 0)


def _is_state(value: Tensor) -> bool:
    return value.is_floating_point() and value.numel() >= _LEAST and bool(value.any())


def _apart(one: Tensor, other: Tensor) -> float | None:
    """How far two tensors are apart (rel_l2); None if their shapes differ in more than dims of length 1."""
    if one.numel() != other.numel():
        return None
    found = compare_results(one, other, matched=True).differences
    return found[0].rel_l2 if found else None


def _floor(one: Tensor, other: Tensor) -> float:
    return assumed_floor([str(each.dtype).removeprefix("torch.") for each in (one, other)])[0]
