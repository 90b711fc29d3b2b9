"""What a transform is given, and what it makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from graftlab.base.world import Direction
from graftlab.layouts import Layout, RankLayout

SIGNATURE = "def transform(graft_input: gl.GraftTransformInput) -> torch.Tensor"


@dataclass(frozen=True)
class GraftTransformInput:
    """What a transform is given, on the receiving rank.

    ``received_list`` holds one tensor a sending rank, in rank order (``senders`` names the ranks), of whatever shape
    and dtype that rank had; ``received_extras_list`` runs parallel to it and holds what the sender passed as ``extras``
    (``None`` where it passed none). ``send_world_size`` counts all ranks of the sending side, those that sent nothing
    included. ``target`` is the receiver's own tensor, ``target_extras`` what the receiver's own tap passed. The tensors
    and the extras are private copies when the transform is the user's, so it may write into them; one that returns
    None has written its result into ``target``.

    ``layout`` and ``received_layouts`` are the layouts on the ranks, where DTensors or ``gl.tap(layout=...)`` say them.
    ``pair`` is the layout of the plan's pair, which takes the one out of the other: ``whole`` says which is the larger.
    ``target_reduced`` is the target with partial sums taken, or why they cannot be.

    >>> def transform(graft_input: gl.GraftTransformInput) -> torch.Tensor:
    ...     return torch.cat(graft_input.received_list, dim=-1)
    >>> shards = [torch.zeros(2), torch.ones(2)]
    >>> transform(gl.GraftTransformInput({"name": "q"}, shards, [None, None], target=torch.empty(4)))
    tensor([0., 0., 1., 1.])
    """

    tags: dict[str, Any]
    received_list: list[torch.Tensor]
    received_extras_list: list[Any]
    target: torch.Tensor
    direction: Direction = "b2t"
    recv_rank: int = 0
    recv_world_size: int = 1
    senders: list[int] = field(default_factory=list)
    send_world_size: int = 0
    target_extras: Any = None
    layout: RankLayout | None = None
    received_layouts: list[RankLayout | None] = field(default_factory=list)
    pair: Layout | None = None
    whole: Literal["received", "target"] = "received"
    target_reduced: torch.Tensor | str | None = None


@dataclass(frozen=True)
class Outcome:
    """What a transform made, when there is more to say of it than the tensor.

    ``value`` has the target's shape; ``aligned_by`` and ``cast`` say in words how it was brought to fit. With ``rows``
    only part of it was received, and the rest is the target's own: one int64 index tensor for each leading dimension,
    all of one length, so that ``value[rows]`` is that part. Statistics then cover these rows alone.
    ``rows_unmatched`` counts the rows for which something should have come and did not. With ``known``, a mask of the
    target's shape, statistics cover what is marked in it. ``measured`` is what is compared in place of the value and
    the target, in this order, where these are summands. ``layout`` says how both were brought to one layout, ``note``
    what a reader should know of it, and ``caveat`` what of a graft.

    >>> gl.transforms.Outcome(torch.ones(2), aligned_by="layer order").aligned_by
    'layer order'
    """

    value: torch.Tensor
    aligned_by: str | None = None
    cast: str | None = None
    rows: tuple[torch.Tensor, ...] | None = None
    rows_unmatched: int = 0
    known: torch.Tensor | None = None
    measured: tuple[torch.Tensor, torch.Tensor] | None = None
    layout: str | None = None
    note: str | None = None
    caveat: str | None = None


Transform = Callable[[GraftTransformInput], "torch.Tensor | Outcome"]


def dtype_name(dtype: torch.dtype) -> str:
    """A dtype in words: ``"bfloat16"``.

    >>> gl.transforms.dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
