"""A layout step that puts the elements of a fused dimension in the order in which ranks have them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.shards import Segment, Shard
from graftlab.layouts.steps import StepContext, call, check_count, dim_of


@dataclass(frozen=True)
class Regroup:
    """Elements of a dimension fused from blocks, in the order of ``ranks`` that each have a part of each block.

    So q, k and v of all heads become those of the first rank's heads, then those of the second's. ``blocks`` and
    ``replicas`` are as in :class:`Shard`; what several ranks have alike is repeated.
    """

    dim: int
    ranks: int
    blocks: tuple[int, ...] = (1,)
    replicas: tuple[int, ...] = (1,)
    leaves_out: ClassVar[str | None] = None
    caveat: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        check_count("regroup", "ranks", self.ranks)
        shard = Shard(self.dim, blocks=self.blocks, replicas=self.replicas)
        object.__setattr__(self, "blocks", shard.blocks)
        object.__setattr__(self, "replicas", shard.replicas)

    @property
    def text(self) -> str:
        replicas = None if set(self.replicas) == {1} else list(self.replicas)
        blocks = list(self.blocks) if self.blocks != (1,) else None
        return call("regroup", dim=self.dim, ranks=self.ranks, blocks=blocks, replicas=replicas)

    def _segments(self, extent: int) -> list[Segment]:
        if extent % sum(self.blocks):
            raise LayoutError(f"{self.text}: {extent} elements do not divide into blocks of {list(self.blocks)}")
        shard = Shard(self.dim, blocks=self.blocks, replicas=self.replicas)
        return [segment for held in shard.segments(extent, self.ranks, None) for segment in held]

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        dim = dim_of(self.dim, before, self.text)
        return torch.cat([before.narrow(dim, a, b - a) for a, b in self._segments(before.shape[dim])], dim)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        dim = dim_of(self.dim, after, self.text)
        replicas = self.replicas if len(self.replicas) > 1 else self.replicas * len(self.blocks)
        units = sum(block * count for block, count in zip(self.blocks, replicas, strict=True))
        extent, rest = divmod(after.shape[dim] * sum(self.blocks), units)
        segments = self._segments(extent) if not rest else []
        if rest or sum(b - a for a, b in segments) != after.shape[dim]:
            raise LayoutError(f"{self.text}: {after.shape[dim]} elements are not those of all ranks")
        whole = after.new_zeros((*after.shape[:dim], extent, *after.shape[dim + 1 :]))
        seen: dict[Segment, Tensor] = {}
        start = 0
        for segment in segments:
            piece = after.narrow(dim, start, segment[1] - segment[0])
            start += piece.shape[dim]
            if segment in seen:
                at.compare(f"repetitions in {self.text}", seen[segment], piece)
                continue
            seen[segment] = piece
            whole.narrow(dim, segment[0], piece.shape[dim]).copy_(piece)
        return whole
