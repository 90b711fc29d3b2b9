"""The static buffers by name, for attention backends and others that hold on to them."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from graftlab.graphs.slots import GraphSlot


class Slots(Protocol):
    """What has slots: a registry."""

    def has_slot(self, name: str) -> bool: ...
    def get_slot(self, name: str) -> GraphSlot: ...
    def slot_names(self) -> list[str]: ...


class ForwardInputBuffers:
    """A view of a registry's whole buffers by slot name; None for a slot that is not enabled.

    ``buffers.seq_lens`` is the very tensor that graphs read, in its largest size, so its content changes with every
    batch. Slots registered or enabled later appear too. The view is read-only.
    """

    __slots__ = ("_slots",)

    def __init__(self, slots: Slots) -> None:
        object.__setattr__(self, "_slots", slots)

    def __getattr__(self, name: str) -> Tensor | None:
        slots: Slots = object.__getattribute__(self, "_slots")
        if not slots.has_slot(name):
            raise AttributeError(f"there is no buffer {name!r}; there are {slots.slot_names()}")
        return slots.get_slot(name).buffer

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"buffer {name!r} cannot be another tensor: graphs read this one. Write into it")

    def __dir__(self) -> list[str]:
        return self._slots.slot_names()  # type: ignore[union-attr, no-any-return]

    def __repr__(self) -> str:
        return f"<ForwardInputBuffers {dir(self)}>"
