"""The keys and values of all requests: a pool of token slots, and a table of each request's slots."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PADDING_SLOT = 0
"""Belongs to no request: padding rows of a captured graph write there."""


class SlotAllocator:
    """Hands out `count` numbers from `first` on, and takes them back; the last one back is the next one out."""

    def __init__(self, count: int, first: int = 0) -> None:
        self._free = list(range(first + count - 1, first - 1, -1))
        self._taken: set[int] = set()

    @property
    def available(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """`count` free numbers, or None if there are fewer; then none is taken."""
        if count > len(self._free):
            return None
        slots = [self._free.pop() for _ in range(count)]
        self._taken.update(slots)
        return slots

    def free(self, slots: list[int]) -> None:
        """Take numbers back. Raises `ValueError`, and takes none, if one was not handed out, or is named twice."""
        if len(set(slots)) < len(slots) or not self._taken.issuperset(slots):
            wrong = [slot for slot in slots if slot not in self._taken or slots.count(slot) > 1]
            raise ValueError(f"slots {wrong} are not allocated, or given twice, so they cannot be freed")
        self._taken.difference_update(slots)
        self._free.extend(reversed(slots))


@dataclass(frozen=True)
class Reservation:
    """One request's place in the cache: its row of the table, and the slot of each of its tokens."""

    row: int
    slots: list[int]


class KVCache:
    """Keys and values by layer and slot, ``[layers, 1 + max_tokens, kv_heads, head_dim]`` each.

    ``table[row, place]`` ``[max_requests, max_context]`` is the slot of a request's token at that place, and undefined
    past the last token. Slot 0 is :data:`PADDING_SLOT`; so are all places that were never used.

    With ``encoder_states``, ``encoder_keys`` and ``encoder_values`` ``[layers, max_requests, max_context, kv_heads,
    head_dim]`` hold those of each request's encoder, by the request's row of the table; else they are None.
    """

    def __init__(
        self,
        layers: int,
        kv_heads: int,
        head_dim: int,
        *,
        max_requests: int,
        max_context: int,
        max_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        encoder_states: bool = False,
    ) -> None:
        shape = (layers, 1 + max_tokens, kv_heads, head_dim)
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.encoder_keys: Tensor | None = None
        self.encoder_values: Tensor | None = None
        if encoder_states:
            encoder_shape = (layers, max_requests, max_context, kv_heads, head_dim)
            self.encoder_keys = torch.zeros(encoder_shape, dtype=dtype, device=device)
            self.encoder_values = torch.zeros(encoder_shape, dtype=dtype, device=device)
        self.table = torch.full((max_requests, max_context), PADDING_SLOT, dtype=torch.int64, device=device)
        self.max_requests, self.max_context, self.max_tokens = max_requests, max_context, max_tokens
        self._rows = SlotAllocator(max_requests)
        self._slots = SlotAllocator(max_tokens, first=PADDING_SLOT + 1)

    @property
    def available_rows(self) -> int:
        """How many more requests have room in the table."""
        return self._rows.available

    @property
    def available_slots(self) -> int:
        """How many more tokens have room in the pool."""
        return self._slots.available

    def reserve(self, tokens: int) -> Reservation | None:
        """Reserve a row and `tokens` slots, and write them into the table; None, without taking any, if there is no
        room now. Raises `ValueError` for a request that can never have room.
        """
        most = min(self.max_context, self.max_tokens)
        if not 1 <= tokens <= most:
            raise ValueError(f"{tokens} tokens can never be reserved; a request has from 1 to {most}")
        if not self._rows.available or (slots := self._slots.allocate(tokens)) is None:
            return None
        row = self._rows.allocate(1)
        assert row is not None, "asked for above"
        self.table[row[0], :tokens] = torch.tensor(slots, device=self.table.device)
        return Reservation(row[0], slots)

    def release(self, reservation: Reservation) -> None:
        """Give a request's place back. Raises `ValueError` if that was done already."""
        self._slots.free(reservation.slots)
        self._rows.free([reservation.row])

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put the keys and values ``[T, kv_heads, head_dim]`` of T tokens into their slots ``[T]``."""
        self.keys[layer].index_copy_(0, slots, keys)
        self.values[layer].index_copy_(0, slots, values)

    def write_encoder(self, row: int, keys: Tensor, values: Tensor) -> None:
        """Put the keys and values ``[layers, S, kv_heads, head_dim]`` of a request's S encoder states into its row."""
        assert self.encoder_keys is not None, "made with encoder_states"
        assert self.encoder_values is not None, "made with encoder_states"
        self.encoder_keys[:, row, : keys.shape[1]] = keys
        self.encoder_values[:, row, : values.shape[1]] = values
