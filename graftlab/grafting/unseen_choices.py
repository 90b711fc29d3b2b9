"""Finds whole numbers in a result that were chosen from values which nothing shows, such as tokens that were sampled.

Two sides may choose the same few tokens from different probabilities. So tokens clear the code before them only if a
tap, or the result, shows what they were chosen from, or something that is computed from it. To find out, torch's
operations are followed: each value that rounds belongs to the stretch of the call in which it was computed. A stretch
ends at each tap and at each choice. What the choices were made from is summarised, so that the sides can be compared.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Collection, Iterator
from typing import Any, NamedTuple

import torch

from graftlab.diffs.results import is_written, named_tensors
from graftlab.grafting.in_float64 import tensors_in
from graftlab.grafting.tap_records import CallKey, CountingHandler
from graftlab.taps.routing import handled_by
from graftlab.taps.untraced import UntracedMode

_MOST_RETURNED = 256
"""This many whole numbers hardly agree by chance if they are chosen from different values."""
_MOST_CHOSEN = 4096
"""Larger tensors of whole numbers are no tokens of such a result."""

# They copy values as they are, or take some of them, and compute nothing.
_MOVES = frozenset(
    getattr(torch.ops.aten, name)
    for name in ("cat", "stack", "clone", "_to_copy", "copy", "embedding", "index", "index_select", "gather", "repeat")
)
_NONE: frozenset[int] = frozenset()


Summary = tuple[int, int, float, float, float, float]
"""A tensor's number of elements, of finite ones, their norm, and three sums of them under random signs."""


class UnseenChoices(NamedTuple):
    """Whether a call returns whole numbers chosen from values that nothing shows, and what it made its choices from.

    Nothing ``is_known`` of code that could not be followed.
    """

    exist: bool = False
    is_known: bool = False
    made_from: tuple[Summary, ...] = ()

    def distance(self, other: UnseenChoices) -> float:
        """The largest difference from what the other call made its choices from, over the norm; NaN if unknown.

        It is an estimate of ``rel_l2``: the sums of a difference under random signs are about as large as its norm.
        """
        if len(self.made_from) != len(other.made_from) or not self.made_from:
            return math.nan
        return max(map(_distance, self.made_from, other.made_from))


def _distance(one: Summary, other: Summary) -> float:
    if one[0] != other[0]:
        return math.nan
    if one[1] != other[1]:
        return math.inf
    sums = [mine - theirs for mine, theirs in zip(one[3:], other[3:], strict=True)]
    apart = max(abs(one[2] - other[2]), math.hypot(*sums) / math.sqrt(len(sums)))
    return apart / one[2] if one[2] else math.inf if apart else 0.0


def unseen_choices(call: Callable[[], Any], taps: Collection[str], *, sees_result: bool = True) -> UnseenChoices:
    """Run ``call``, and find whole numbers in its result that were chosen from values that no tap of these names shows.

    With ``sees_result`` returned values show what they were computed from, too.
    """
    flow = _ChoiceFlow()
    # Code that does not run under a mode of torch, or on tensors without memory, stays unknown.
    with contextlib.suppress(Exception):
        with handled_by(_SeeingHandler(flow, taps)), flow:
            result = call()
        named = {path: value for path, value in named_tensors(result).items() if not is_written(path)}
        for value in named.values() if sees_result else ():
            flow.see(value)
        numbers = [number for value in named.values() if _is_whole(value) for number in value.flatten().tolist()]
        returned = set(numbers)
        exist = len(numbers) < _MOST_RETURNED and any(each <= returned for each in flow.unseen())
        return UnseenChoices(exist, True, tuple(flow.made_from))
    return UnseenChoices()


class _SeeingHandler(CountingHandler):
    """Notes what the taps of these names show, and grafts nothing."""

    def __init__(self, flow: _ChoiceFlow, names: Collection[str]) -> None:
        super().__init__()
        self._flow = flow
        self._names = names

    def take(self, place: CallKey, tags: dict[str, Any], own: torch.Tensor) -> None:
        if place[0] in self._names:
            self._flow.see(own)


class _ChoiceFlow(UntracedMode):
    """Follows in which stretches of a call the values behind each tensor were computed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._stretch = 0
        # By the memory of each tensor, which its views share. An operation that makes a tensor sets it anew.
        self._behind: dict[int, frozenset[int]] = {}
        self._seen: set[int] = set()
        self._chosen: list[tuple[frozenset[int], set[int]]] = []
        self.made_from: list[Summary] = []

    def see(self, value: torch.Tensor) -> None:
        """Note that a value is compared, and with it what it was computed from."""
        if _rounds(value):
            self._seen |= self._behind_of(value)
            self._stretch += 1

    def unseen(self) -> Iterator[set[int]]:
        """The whole numbers of each choice from values that were not seen."""
        return (numbers for behind, numbers in self._chosen if behind - self._seen)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        given = [*tensors_in(args), *tensors_in(list(kwargs.values()))]
        if any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns):
            return result
        behind = _NONE.union(*map(self._behind_of, given))
        # What was taken by a chosen index agrees wherever the index does.
        of_values = _NONE.union(*(self._behind_of(each) for each in given if not _is_whole(each)))
        rounds = any(map(_rounds, given))
        if rounds and func.overloadpacket not in _MOVES:
            of_values |= {self._stretch}
        if rounds and any(map(_is_whole, tensors_in(result))):
            self.made_from += [_summary(each) for each in given if _rounds(each)]
        for value in tensors_in(result):
            self._behind[_memory(value)] = behind if _is_whole(value) else of_values
            if _is_whole(value) and behind:
                self._stretch += rounds
                if value.numel() <= _MOST_CHOSEN:
                    self._chosen.append((behind, set(value.flatten().tolist())))
        return result

    def _behind_of(self, value: torch.Tensor) -> frozenset[int]:
        return self._behind.get(_memory(value), _NONE)


def _summary(value: torch.Tensor) -> Summary:
    flat = torch.view_as_real(value.resolve_conj()) if value.is_complex() else value
    flat = flat.detach().reshape(-1).double()
    finite = flat.isfinite()
    flat = torch.where(finite, flat, 0.0)
    sums = _signs(len(flat)).to(flat.device, flat.dtype) @ flat
    return value.numel(), int(finite.sum()), float(flat.norm()), *map(float, sums)  # type: ignore[return-value]


@functools.lru_cache(maxsize=4)
def _signs(count: int) -> torch.Tensor:
    """Three rows of random signs, the same in every process."""
    generator = torch.Generator().manual_seed(count)
    return torch.randint(0, 2, (3, count), generator=generator, dtype=torch.int8, device="cpu") * 2 - 1


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage().data_ptr()


def _rounds(value: torch.Tensor) -> bool:
    return value.is_floating_point() or value.is_complex()


def _is_whole(value: torch.Tensor) -> bool:
    return not (_rounds(value) or value.dtype == torch.bool)
