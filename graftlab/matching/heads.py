"""Checks the order of rows within attention heads, the same for q and k, and for v and o, and that of gates."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from graftlab.errors import LayoutError
from graftlab.matching.contradictions import Contradiction
from graftlab.matching.names import last_role, module_of, role_of
from graftlab.matching.pair import Pair
from graftlab.matching.recorded_taps import RecordedTap

Order = npt.NDArray[np.int64]

# The parameters whose rows, or for o columns, are the features of heads, each with the one that it must agree with.
_AGREE = (("q", "k"), ("v", "o"))
# A parameter of a recurrent layer: its module, its layer and its direction.
_RECURRENT = re.compile(r"(.*)(?:weight|bias)_(?:ih|hh)((?:_l\d+)?(?:_reverse)?)")


@dataclass(frozen=True)
class _Heads:
    """The order that a pair's layout gives to the features of heads: the baseline's feature at place i is ``order[i]``.

    ``size`` is the number of features in each head, if the layout reorders all heads alike and nothing across heads;
    ``within`` is the order in one of them. A layout that reorders nothing fits heads of any size.
    """

    pair: Pair
    order: Order
    size: int | None

    @property
    def within(self) -> Order:
        return self.order if self.size is None else self.order[: self.size]

    @property
    def is_plain(self) -> bool:
        return bool((np.diff(self.order) == 1).all())

    @property
    def words(self) -> str:
        if self.is_plain:
            return "in the same order"
        return "in another order" if self.size is None else f"reordered in heads of {self.size} rows"


def odd_heads(
    pairs: Sequence[Pair],
    baseline: Mapping[str, RecordedTap],
    target: Mapping[str, RecordedTap],
    odd: Collection[str],
) -> list[Contradiction]:
    """Sentences on pairs of q and k, or of v and o, whose heads have their features in different orders.

    Scores multiply each feature of q with the same feature of k, and o reads the features that v wrote. So any order is
    right if both have it. Whole heads may be in a different order on one of the two, such as groups of queries. ``odd``
    has target parameters whose layout is already known to be a mistake.
    """
    modules: dict[tuple[str, str], dict[str, _Heads]] = defaultdict(dict)
    for pair in pairs:
        role = role_of(pair.inner, "attention")
        if role is None or pair.target in odd:
            continue
        outer = (target if pair.whole == "target" else baseline)[pair.outer]
        order = _order(pair, outer.shape, columns=role[1] == "o")
        if order is not None:
            own = module_of(pair.target) if pair.whole == "target" else module_of(module_of(pair.target))
            modules[own, last_role(pair.inner) or ""][role[1]] = _Heads(pair, order, _head_size(order))
    problems = []
    for roles in modules.values():
        sizes: dict[int, str] = {}
        for one, other in _AGREE:
            if one not in roles or other not in roles:
                continue
            first, second = roles[one], roles[other]
            if _agree(first, second):
                if first.size is not None:
                    sizes.setdefault(first.size, one)
                continue
            text = (
                f"{second.pair.target} is {second.pair.baseline} {second.words}, and {first.pair.target} is "
                f"{first.pair.baseline} {first.words}: in one attention, all heads must have the same size and order"
            )
            problems.append(Contradiction(second.pair.target, text))
        # Smaller heads in the order of v and o change nothing.
        if len(sizes) > 1 and max(sizes) % min(sizes):
            (size, one), (other_size, other) = sizes.items()
            text = (
                f"{roles[other].pair.target} is reordered in heads of {other_size} rows, and {roles[one].pair.target} "
                f"in heads of {size}: in one attention, all heads must have the same size"
            )
            problems.append(Contradiction(roles[other].pair.target, text))
    return problems


def odd_gates(pairs: Sequence[Pair], baseline: Mapping[str, RecordedTap]) -> list[Contradiction]:
    """Sentences on parameters of recurrent layers whose rows, the gates, have another order than others of the layer.

    A layer adds what its parameters compute for a gate, so any order is right if all have it.
    """
    layers: dict[tuple[str, str], list[tuple[Pair, tuple[int, ...]]]] = defaultdict(list)
    for pair in pairs:
        found = _RECURRENT.fullmatch(pair.baseline)
        shape = baseline[pair.baseline].shape
        if found is None or pair.whole != "baseline" or not 1 <= len(shape) <= 2:
            continue
        rows = torch.arange(shape[0], device="cpu").reshape(-1, *[1] * (len(shape) - 1))
        try:
            along = _along(pair.layout.local(rows.expand(tuple(shape)).contiguous()))
        except LayoutError:
            continue
        if along is not None:
            layers[found[1], found[2]].append((pair, tuple(along[1].tolist())))
    usual = Counter(order for own in layers.values() for _, order in own)
    problems = []
    for own in layers.values():
        kept, order = max(own, key=lambda each: usual[each[1]])
        problems += [
            Contradiction(
                pair.target,
                f"{pair.target} has the rows of {pair.baseline} in a different order than {kept.target} has those of "
                f"{kept.baseline}: all gates of one recurrent layer must have the same order",
            )
            for pair, other in own
            if other != order
        ]
    return problems


def _agree(one: _Heads, other: _Heads) -> bool:
    """Whether two parameters can have the features of their heads in the same order."""
    few, many = sorted((one, other), key=lambda each: len(each.order))
    if np.array_equal(_repeated(few.order, len(many.order)), many.order):
        return True
    if len(few.order) == many.size:
        # One head of keys for several of queries.
        return False
    if all(each.is_plain or each.size is not None for each in (one, other)):
        return few.size == many.size and np.array_equal(few.within, many.within)
    # The code may count whole heads in any order, but both must have the same number.
    mine, theirs = _strides(few.order), _strides(many.order)
    if mine is None or theirs is None:
        return True
    # Of one length they would be the same order, which repeats itself.
    return any(a == b for a, b in zip(mine, theirs, strict=True))


def _repeated(order: Order, length: int) -> Order:
    starts = np.arange(0, length - len(order) + 1, len(order))
    return (starts[:, None] + order).reshape(-1)


def _strides(order: Order) -> tuple[int, int] | None:
    """Both extents of a transposition ``(a b) -> (b a)``; None for other orders."""
    step = int(order[1] - order[0]) if len(order) > 1 else 0
    if step <= 1 or len(order) % step:
        return None
    transposed = np.arange(len(order)).reshape(-1, step).T.reshape(-1)
    return (len(order) // step, step) if np.array_equal(order, transposed) else None


def _order(pair: Pair, shape: Sequence[int], *, columns: bool) -> Order | None:
    """The order that the layout gives to the features of heads; None if it is not such an order."""
    if not 1 <= len(shape) <= 2 or (columns and len(shape) == 1):
        return None
    found = None
    for dim in range(len(shape)):
        # The place of each element along one dimension of the whole.
        counted = torch.arange(shape[dim], device="cpu").reshape(
            [-1 if place == dim else 1 for place in range(len(shape))]
        )
        try:
            taken = pair.layout.local(counted.expand(tuple(shape)).contiguous())
        except LayoutError:
            return None
        along = _along(taken)
        if along is None:
            return None
        at, order = along
        # Rows are the first dimension of the separate parameter.
        if (at if pair.whole == "baseline" else dim) == (1 if columns else 0) or len(shape) == 1:
            found = order
    if found is None or len(found) < 2:
        return None
    # A part of a fused parameter is counted from its own first row.
    if pair.layout.leaves_out:
        found = np.argsort(np.argsort(found))
    # For a fused target, the places are those of the baseline's rows.
    return np.argsort(found) if pair.whole == "target" else found


def _along(taken: torch.Tensor) -> tuple[int, Order] | None:
    """The dimension along which the values vary, and those along it; None if they vary along several."""
    values = taken.numpy()
    for dim in range(values.ndim):
        line = np.moveaxis(values, dim, 0).reshape(values.shape[dim], -1)
        if (line == line[:, :1]).all():
            return dim, line[:, 0].astype(np.int64)
    return None


def _head_size(order: Order) -> int | None:
    """The smallest head size with which the order rearranges all heads alike; None for other orders."""
    if (np.diff(order) == 1).all():
        return None
    total = len(order)
    for size in range(2, total // 2 + 1):
        if total % size:
            continue
        within = order.reshape(-1, size) - np.arange(0, total, size)[:, None]
        if within.min() == 0 and within.max() == size - 1 and (within == within[0]).all():
            return size
    return None
