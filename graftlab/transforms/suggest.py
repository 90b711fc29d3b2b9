"""Where shapes do not fit: which layout would make the received tensor most like the receiver's own."""

from __future__ import annotations

import itertools
import string
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from graftlab.layouts import Layout, parse_layout

# Permutations of more dimensions than this are many, and seldom meant.
_DIMS = 5
# A layout whose values are further off than this fits in shape alone.
_CLOSE = 0.1


def suggested(received: Sequence[Tensor], mine: Tensor) -> str:
    """``; the values fit in the layout '...'``: what to say after an error. Empty where nothing comes near."""
    if len(received) > 1:
        return "; if these are shards, partial sums or replicas, gl.tap(layout=...) says so"
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
        return f"; the shapes would fit in the layout {layout.text!r} of the {which} tensor, the values do not"
    return f"; {len(candidates)} layouts would fit the shapes, and none the values"


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
        # Two neighbours merged, which is what batch and sequence, or heads and their dimension, usually are.
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
