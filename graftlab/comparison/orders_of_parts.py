"""Finds the order of the baseline's input on the target's ranks, where their parts of it are not consecutive."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from graftlab.base.text import spans
from graftlab.diffs.results import ResultDifference, compare_named

if TYPE_CHECKING:
    from graftlab.ranks.call_description import CallDescription

Order = Sequence[torch.Tensor]
"""The indices of each rank's part in the whole, along one dimension."""


def order_of_parts(
    baseline: Sequence[CallDescription], target: Sequence[CallDescription]
) -> tuple[str, int, Order] | None:
    """An argument of the target whose ranks have the baseline's whole numbers in another order, the dimension, and the
    order; None if there is none. Parts that follow one another are aligned anyway.

    The orders are those in use: every n-th index, as of a distributed sampler, and pairs of chunks from both ends, as
    of context parallelism with causal attention.
    """
    if len(baseline) != 1 or len(target) < 2:
        return None
    in_turn, found = [], None
    for path, whole, parts, dim in _split(baseline[0], target):
        if torch.equal(torch.cat(parts, dim), whole):
            in_turn.append((whole, parts, dim))
        elif found is None:
            orders = _orders(whole.shape[dim], len(target))
            found = next(((path, dim, order) for order in orders if _has_order(whole, parts, dim, order)), None)
    if found is None:
        return None
    size = sum(map(len, found[2]))
    # What is constant, such as a mask of ones, has any order. If other arguments have their own, one of them is wrong.
    same = [each for each in in_turn if each[2] == found[1] and each[0].shape[found[1]] == size]
    if not all(_has_order(*each, found[2]) for each in same):
        return None
    return found


def _split(
    baseline: CallDescription, target: Sequence[CallDescription]
) -> Iterator[tuple[str, torch.Tensor, list[torch.Tensor], int]]:
    """Whole numbers of the target's that have the size of equal parts of some of the baseline's: the path, the whole,
    the parts, and the dimension.
    """
    for whole in baseline.whole_numbers.values():
        for path, first in target[0].whole_numbers.items():
            parts = [each.whole_numbers.get(path) for each in target]
            known = [part for part in parts if part is not None and part.shape == first.shape]
            dims = [d for d in range(whole.dim()) if whole.dim() == first.dim() and whole.shape[d] != first.shape[d]]
            is_part = len(dims) == 1 and whole.shape[dims[0]] == len(target) * first.shape[dims[0]]
            if is_part and len(known) == len(target):
                yield path, whole, known, dims[0]


def _has_order(whole: torch.Tensor, parts: Sequence[torch.Tensor], dim: int, order: Order) -> bool:
    return all(torch.equal(_part(whole, dim, at), part) for at, part in zip(order, parts, strict=True))


def differences_in_order(
    baseline: Sequence[CallDescription], target: Sequence[CallDescription], dim: int, order: Order
) -> list[ResultDifference]:
    """How each rank's results differ from the baseline's at its indices; empty if none has that size."""
    size = sum(map(len, order))
    found: list[ResultDifference] = []
    for at, rank in zip(order, target, strict=True):
        whole = {
            path: _part(each, dim, at)
            for path, each in baseline[0].returned.items()
            if each.dim() > dim and each.shape[dim] == size
        }
        found += compare_named(whole, {path: each for path, each in rank.returned.items() if path in whole}).differences
    return found


def in_words(name: str, dim: int, order: Order) -> str:
    """A sentence on the order."""
    places = "; ".join(f"{spans(at.tolist())} on rank {rank}" for rank, at in enumerate(order))
    return f"The target's ranks do not have consecutive parts of {name} along dim {dim}: {places}."


def _part(whole: torch.Tensor, dim: int, at: torch.Tensor) -> torch.Tensor:
    return whole.index_select(dim, at.to(whole.device))


def _orders(size: int, ranks: int) -> Iterator[list[torch.Tensor]]:
    every = torch.arange(size, device="cpu")
    yield [every[rank::ranks] for rank in range(ranks)]
    if size % (2 * ranks) == 0:
        chunks = every.chunk(2 * ranks)
        yield [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)]
