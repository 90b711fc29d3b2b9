"""The transform of a plan that names none: pair by rank, join shards, cut slices."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from graftlab.errors import TransformError
from graftlab.transforms.inputs import SIGNATURE, GraftTransformInput, Outcome
from graftlab.transforms.suggest import suggested


def default_transform(graft_input: GraftTransformInput) -> Outcome:
    """Pair by rank, or join and cut shards along the one dimension that differs.

    With S the senders' shape and T the receiver's: equal shapes take the sender with the receiver's rank (where the
    counts differ: rank modulo senders, as for replicated values). Otherwise exactly one dimension may differ, and

    - the senders' extents add up to T's: they are concatenated;
    - S's extent is T's times the receiving ranks: the receiver's slice is taken;
    - the senders' extents add up to T's times the receiving ranks: both.

    What a rank that sent nothing would have held is never made up from what others sent. Raises
    :class:`TransformError` with the shapes when none fits.

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
    if all(tensor.shape == mine.shape for tensor in received):
        if chosen is not None:
            return Outcome(chosen, None if count in (1, receivers) else f"sender {partner}")
        raise TransformError(
            f"the default transform takes that of rank {partner}, which sent none (senders {senders} of {count}): "
            f"if another will do, give the plan a transform: `{SIGNATURE}`"
        )
    dim = _differing_dim(received, mine)
    if dim is not None:
        extent, total = mine.shape[dim], sum(tensor.shape[dim] for tensor in received)
        if complete and count > 1 and total == extent:
            return Outcome(torch.cat(_like(received), dim), f"concat dim={dim}")
        if chosen is not None and chosen.shape[dim] == extent * receivers:
            return Outcome(chosen.narrow(dim, rank * extent, extent), f"slice dim={dim}")
        if complete and count > 1 and total == extent * receivers:
            joined = torch.cat(_like(received), dim)
            return Outcome(joined.narrow(dim, rank * extent, extent), f"concat, slice dim={dim}")
    hint = suggested(received, mine)
    raise TransformError(
        f"the default transform cannot make a tensor of shape {list(mine.shape)} (rank {rank} of {receivers}) "
        f"from {_shapes(received)} (senders {senders} of {count})"
        f"{f'{hint}; or' if hint else ';'} give the plan a transform: `{SIGNATURE}`"
    )


def _differing_dim(received: Sequence[torch.Tensor], mine: torch.Tensor) -> int | None:
    if any(tensor.dim() != mine.dim() for tensor in received):
        return None
    differing = {d for tensor in received for d in range(mine.dim()) if tensor.shape[d] != mine.shape[d]}
    return differing.pop() if len(differing) == 1 else None


def _like(received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    # Shards of one tensor have one dtype. Where they do not, torch.cat would refuse some pairs (the float8 ones).
    return [tensor.to(received[0].dtype) for tensor in received]


def _shapes(tensors: Sequence[torch.Tensor]) -> str:
    return ", ".join(str(list(tensor.shape)) for tensor in tensors)
