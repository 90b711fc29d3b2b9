"""The transform of a plan without one: pair by rank, join shards, cut slices."""

from __future__ import annotations

import itertools
import re
import string
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from graftlab.errors import TransformError
from graftlab.layouts import Layout, parse_layout
from graftlab.layouts.steps import disagreement
from graftlab.transforms.inputs import SIGNATURE, GraftTransformInput, Outcome

# Permutations of more dimensions are too many, and rarely intended.
_DIMS = 5
# Beyond this distance a layout fits by shape only.
_CLOSE = 0.1


def default_transform(graft_input: GraftTransformInput) -> Outcome:
    """Pair by rank, or join and cut shards along the one dimension that differs.

    With S the senders' shape and T the receiver's: equal shapes take the sender with the receiver's rank (where the
    counts differ: rank modulo senders, as for replicated values), and so do shapes that differ only by dimensions of
    length 1, such as a batch of one. Otherwise exactly one dimension may differ, and:

    - the senders' extents add up to T's: they are concatenated;
    - S's extent is T's times the receiving ranks: the receiver's slice is taken;
    - the senders' extents add up to T's times the receiving ranks: both.

    Where one of several senders is taken, they should be replicas: if they differ, the outcome has a note, and if they
    differ by more than rounding, it is not grafted. The tensor of a rank that sent nothing is never made up from the
    others'. Raises :class:`TransformError` with the shapes when none fits.

    >>> shards = [torch.zeros(2, 3), torch.ones(2, 3)]
    >>> given = gl.GraftTransformInput({"name": "q"}, shards, [None, None], target=torch.empty(2, 6))
    >>> gl.transforms.default_transform(given).aligned_by
    'concat dim=1'
    """
    received, mine = graft_input.received_list, graft_input.target
    rank, receivers = graft_input.recv_rank, graft_input.recv_world_size
    senders = graft_input.senders or list(range(len(received)))
    count = graft_input.send_world_size or len(senders)
    complete = len(senders) == count
    partner = rank % count
    chosen = received[senders.index(partner)] if partner in senders else None
    if all(_long_dims(tensor) == _long_dims(mine) for tensor in received):
        if chosen is not None:
            value, how = chosen.reshape(mine.shape), None if chosen.shape == mine.shape else SHORT_DIMS
            if count in (1, receivers):
                return Outcome(value, how)
            taken = f"sender {partner}"
            alike = [tensor.reshape(mine.shape) for tensor in received]
            return _one_of(alike, senders, partner, Outcome(value, taken if how is None else f"{taken}, {how}"))
        raise TransformError(
            f"the default transform takes rank {partner}'s tensor, which was not sent (senders {senders} of {count}). "
            f"If another rank's tensor will do, give the plan a transform: `{SIGNATURE}`"
        )
    dim = _differing_dim(received, mine)
    if dim is not None:
        extent, total = mine.shape[dim], sum(tensor.shape[dim] for tensor in received)
        if complete and total == extent:
            return Outcome(torch.cat(in_one_dtype(received), dim), f"concat dim={dim}")
        if chosen is not None and chosen.shape[dim] == extent * receivers:
            cut = Outcome(chosen.narrow(dim, rank * extent, extent), f"slice dim={dim}")
            return _one_of(received, senders, partner, cut)
        if complete and total == extent * receivers:
            joined = torch.cat(in_one_dtype(received), dim)
            return Outcome(joined.narrow(dim, rank * extent, extent), f"concat, slice dim={dim}")
    hint = suggested(received, mine)
    raise TransformError(
        f"{DOES_NOT_FIT} of shape {list(mine.shape)} (rank {rank} of {receivers}) "
        f"from {_shapes(received)} (senders {senders} of {count})"
        f"{f'{hint}; or' if hint else ';'} give the plan a transform: `{SIGNATURE}`"
    )


SHORT_DIMS = "dims of length 1"
"""``aligned_by`` of a tensor that differs in shape by these alone."""
NO_REPLICAS = "the senders are not replicas"
"""In a note, or in an error where it would have been grafted."""
DOES_NOT_FIT = "the default transform cannot make a tensor"
"""Begins the error where nothing makes the receiver's shape out of what was received."""
_UNFIT = re.compile(rf"{DOES_NOT_FIT} of shape (\[.*?\]) \(rank .*?\) from (.*?) \(senders")


def unfit_shapes(error: str) -> tuple[str, str] | None:
    """The shapes of the receiver and of what it received, if this is the error of shapes that do not fit."""
    found = _UNFIT.search(error)
    return (found[1], found[2]) if found else None


def _one_of(received: Sequence[Tensor], senders: Sequence[int], partner: int, outcome: Outcome) -> Outcome:
    """Add a note to an outcome that is one sender's tensor, if the senders are not replicas."""
    chosen = _comparable(received[senders.index(partner)])
    others = [
        (rank, _comparable(tensor).to(chosen.dtype))
        for rank, tensor in zip(senders, received, strict=True)
        if rank != partner
    ]
    found = [each for rank, tensor in others if (each := disagreement(f"sender {rank}", tensor, chosen)) is not None]
    if not found:
        return outcome
    differ = "; ".join(map(str, found))
    note = f"sender {partner}'s tensor was taken, but {NO_REPLICAS} ({differ})"
    if all(nearly_equal(tensor, chosen) for _, tensor in others):
        return replace(outcome, note=note)
    advice = "if these are partial sums or shards, declare it with gl.tap(layout=...)"
    return replace(outcome, note=f"{note}; {advice}", graft_refused=f"{note}, so it is not grafted; {advice}")


def _comparable(tensor: Tensor) -> Tensor:
    # torch compares no floats of 8 bits, and can only copy those of 4.
    if not tensor.is_floating_point() or tensor.element_size() > 1:
        return tensor
    return tensor.float() if "float8" in str(tensor.dtype) else tensor.view(torch.uint8)


def nearly_equal(one: Tensor, other: Tensor) -> bool:
    """Whether tensors are equal up to the rounding of sums in a different order, which replicas may have."""
    if one.shape != other.shape or not one.is_floating_point():
        return torch.equal(one, other)
    room = 16 * torch.finfo(one.dtype).eps
    finite = one[one.isfinite()]
    largest = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=room, atol=room * largest, equal_nan=True)


def _long_dims(tensor: Tensor) -> list[int]:
    return [length for length in tensor.shape if length != 1]


def _differing_dim(received: Sequence[torch.Tensor], mine: torch.Tensor) -> int | None:
    if any(tensor.dim() != mine.dim() for tensor in received):
        return None
    differing = {d for tensor in received for d in range(mine.dim()) if tensor.shape[d] != mine.shape[d]}
    return differing.pop() if len(differing) == 1 else None


def in_one_dtype(received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors in the first one's dtype: shards usually have one, but torch.cat refuses some pairs of dtypes."""
    return [tensor.to(received[0].dtype) for tensor in received]


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)


# ---- suggesting a layout --------------------------------------------------------------------------------------


def suggested(received: Sequence[Tensor], mine: Tensor) -> str:
    """Return a suggestion to append to an error, ``; the values fit ... in the layout '...'``; empty if none fits."""
    if len(received) > 1:
        return "; if these are shards, partial sums or replicas, declare it with gl.tap(layout=...)"
    candidates = [
        (_distance(layout, received[0], mine, whole), layout, whole) for layout, whole in _layouts(received[0], mine)
    ]
    if not candidates:
        return ""
    distance, layout, whole = min(candidates, key=lambda each: (each[0], len(each[1].text)))
    which = "received" if whole == "received" else "receiver's own"
    if distance <= _CLOSE:
        return (
            f"; the values fit, with rel_l2 {distance:.2g}, in the layout {layout.text!r} of the {which} tensor: "
            "give it to the plan's pairs"
        )
    if len(candidates) == 1:
        return f"; the shapes would fit in the layout {layout.text!r} of the {which} tensor, but the values do not"
    return f"; {len(candidates)} layouts would fit the shapes, but none fits the values"


def _layouts(theirs: Tensor, mine: Tensor) -> Iterator[tuple[Layout, str]]:
    if theirs.numel() == mine.numel():
        yield from ((layout, "received") for layout in _rearranged(theirs, mine))
        return
    larger, smaller, whole = (theirs, mine, "received") if theirs.numel() > mine.numel() else (mine, theirs, "target")
    if larger.dim() != smaller.dim():
        return
    differing = [dim for dim in range(larger.dim()) if larger.shape[dim] != smaller.shape[dim]]
    if len(differing) != 1 or not smaller.shape[differing[0]]:
        return
    dim = differing[0]
    parts, rest = divmod(larger.shape[dim], smaller.shape[dim])
    if not rest and parts <= 16:
        for index in range(parts):
            yield parse_layout(f"part(dim={dim}, index={index}, of={[1] * parts})"), whole


def _rearranged(theirs: Tensor, mine: Tensor) -> Iterator[Layout]:
    names = string.ascii_lowercase
    if theirs.dim() == mine.dim() <= _DIMS and sorted(theirs.shape) == sorted(mine.shape):
        for order in itertools.permutations(range(theirs.dim())):
            if tuple(theirs.shape[dim] for dim in order) == tuple(mine.shape):
                before = " ".join(names[: theirs.dim()])
                yield parse_layout(f"{before} -> {' '.join(names[dim] for dim in order)}")
    if theirs.dim() > mine.dim() >= 1:
        # Two adjacent dimensions merged, as batch and sequence, or heads and head dimension, often are.
        for at in range(theirs.dim() - 1):
            shape = (*theirs.shape[:at], theirs.shape[at] * theirs.shape[at + 1], *theirs.shape[at + 2 :])
            if shape == tuple(mine.shape):
                left = list(names[: theirs.dim()])
                right = [*left[:at], f"({left[at]} {left[at + 1]})", *left[at + 2 :]]
                yield parse_layout(f"{' '.join(left)} -> {' '.join(right)}")


def _distance(layout: Layout, theirs: Tensor, mine: Tensor, whole: str) -> float:
    outer, inner = (theirs, mine) if whole == "received" else (mine, theirs)
    if not (outer.is_floating_point() and inner.is_floating_point()):
        return 0.0 if torch.equal(layout.local(outer).to(inner.device), inner) else float("inf")
    taken = layout.local(outer.detach()).float().to(inner.device)
    norm = inner.detach().float().norm()
    distance = float((taken - inner.detach().float()).norm() / norm) if norm > 0 else float("inf")
    return distance if distance == distance else float("inf")
