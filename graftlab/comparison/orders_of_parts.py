"""Finds that the target's ranks have parts of the baseline's input in another order than one after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from graftlab.base.text import spans
from graftlab.diffs.results import ResultDifference, compare_named

if TYPE_CHECKING:
    from graftlab.ranks.held_call import CallDescription

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
    for whole in baseline[0].whole_numbers.values():
        for path, first in target[0].whole_numbers.items():
            parts = [each.whole_numbers.get(path) for each in target]
            known = [part for part in parts if part is not None and part.shape == first.shape]
            dims = [d for d in range(whole.dim()) if whole.dim() == first.dim() and whole.shape[d] != first.shape[d]]
            if len(known) < len(target) or len(dims) != 1 or whole.shape[dims[0]] != len(target) * first.shape[dims[0]]:
                continue
            if torch.equal(torch.cat(known, dims[0]), whole):
                # So is an argument that is constant, such as a mask of ones.
                continue
            for order in _orders(whole.shape[dims[0]], len(target)):
                if all(torch.equal(_part(whole, dims[0], at), one) for at, one in zip(order, known, strict=True)):
                    return path, dims[0], order
    return None


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
    return f"The target's ranks have {name} in another order along dim {dim} than one after the other ({places})."


def _part(whole: torch.Tensor, dim: int, at: torch.Tensor) -> torch.Tensor:
    return whole.index_select(dim, at.to(whole.device))


def _orders(size: int, ranks: int) -> Iterator[list[torch.Tensor]]:
    every = torch.arange(size, device="cpu")
    yield [every[rank::ranks] for rank in range(ranks)]
    if size % (2 * ranks) == 0:
        chunks = every.chunk(2 * ranks)
        yield [torch.cat([chunks[rank], chunks[-1 - rank]]) for rank in range(ranks)]
