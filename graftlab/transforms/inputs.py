"""A transform's input and output."""

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
    """A transform's input, on the receiving rank.

    ``received_list`` holds one tensor per sending rank, in rank order (``senders`` names the ranks), with that rank's
    shape and dtype; ``received_extras_list`` has the ``extras`` of each sender, or ``None``. ``send_world_size`` counts
    all ranks of the sending side, including those that sent nothing. ``target`` is the receiver's own tensor,
    ``target_extras`` the extras of that tap. A user's transform gets private copies of the tensors and extras, so it
    may write into them; if it returns None, its result is in ``target``.

    ``layout`` and ``received_layouts`` are the layouts on the ranks, from DTensors or ``gl.tap(layout=...)``. ``pair``
    is the layout of the plan's pair, which makes one tensor from the other; ``whole`` names the larger of the two.
    ``target_reduced`` is the target with its partial sums added up, or the reason why that is impossible.

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
    """A transform's result together with details about it.

    ``value`` has the target's shape; ``aligned_by`` and ``cast`` describe how it was made to fit. ``rows`` marks the
    part that was received, when the rest is the target's own: one int64 index tensor for each leading dimension, all of
    one length, so that ``value[rows]`` is that part. Statistics then cover only these rows. ``rows_matched`` is their
    number if each has several indices, and ``rows_unmatched`` counts the rows that should have had a counterpart.
    ``known``, a mask of the target's shape, limits statistics to the marked elements. ``measured`` is the pair to
    compare instead of the value and the target, if those are partial sums. ``layout`` describes how both were converted
    to one layout, ``note`` what a reader should know about the comparison, and ``caveat`` what a reader should know
    about a graft. With ``graft_refused``, a reason, the value is compared, and a graft of it fails; with
    ``compare_only`` it is compared where the plan grafts it, too.

    >>> gl.transforms.Outcome(torch.ones(2), aligned_by="layer order").aligned_by
    'layer order'
    """

    value: torch.Tensor
    aligned_by: str | None = None
    cast: str | None = None
    rows: tuple[torch.Tensor, ...] | None = None
    rows_matched: int | None = None
    rows_unmatched: int = 0
    known: torch.Tensor | None = None
    measured: tuple[torch.Tensor, torch.Tensor] | None = None
    layout: str | None = None
    note: str | None = None
    caveat: str | None = None
    graft_refused: str | None = None
    compare_only: bool = False


Transform = Callable[[GraftTransformInput], "torch.Tensor | Outcome"]


def dtype_name(dtype: torch.dtype) -> str:
    """Return a dtype's name: ``"bfloat16"``.

    >>> gl.transforms.dtype_name(torch.bfloat16)
    'bfloat16'
    """
    return str(dtype).removeprefix("torch.")
