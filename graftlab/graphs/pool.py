"""Memory that the registries of one process share: runners that never run at once need not have a buffer each."""

from __future__ import annotations

import torch
from torch import Tensor

from graftlab.errors import GraphError

# Each entry is flat. A name's memory is never made larger or replaced: captured graphs hold its address.
_pool: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}


def share_input_buffer(name: str, buffer: Tensor) -> Tensor:
    """The process's memory for buffers of this name, number of elements, dtype and device, in the shape of `buffer`.

    The first buffer of a kind becomes the memory of all; of later ones only the shape counts, and what is in the
    memory stays. So it does not matter which of two registries comes first.

    Raises :class:`GraphError` for a buffer that is not contiguous, which other shapes could not be laid over.
    """
    if not buffer.is_contiguous():
        raise GraphError(
            f"buffer {name!r} of shape {list(buffer.shape)} has strides {list(buffer.stride())}; only contiguous "
            "buffers can be shared"
        )
    key = (name, buffer.numel(), buffer.dtype, buffer.device)
    # In one call, so that two threads cannot both be first.
    return _pool.setdefault(key, buffer.view(-1)).view(buffer.shape)


def clear_input_buffer_pool() -> None:
    """Forget all shared memory. Registries that have some keep it; buffers shared from now on have new memory."""
    _pool.clear()
