"""Slots: the content of each static buffer of a captured graph, and of the part that a batch does not fill."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from enum import Enum
from typing import Any, Literal

import torch
from torch import Tensor

from graftlab.errors import GraphError

Axis = Literal["bs", "tokens", "none"]


class PaddingPolicy(Enum):
    """The content of a buffer's tail: the places between the batch's own size and the size that the graph reads."""

    KEEP_PAD = "keep_pad"
    """Earlier content, which a hook or the owner of an adopted buffer wrote there on purpose."""

    FILL_SENTINEL = "fill_sentinel"
    """``pad_value``, written before every copy (and over the whole buffer when it is allocated)."""

    ZERO = "zero"
    """0, written before every copy."""

    FOREACH_COPY = "foreach_copy"
    """What an earlier batch left: only for values that the graph never uses past the batch's own size."""

    FILL_ONCE = "fill_once"
    """``pad_value`` where no batch has reached yet: it is written over the whole buffer, and only at allocation."""

    @property
    def resets(self) -> bool:
        """Whether the tail is written before every copy, so that nothing of an earlier batch is left in it."""
        return self in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.ZERO)

    @property
    def needs_value(self) -> bool:
        """Whether the policy needs a ``pad_value``; the others ignore it."""
        return self in (PaddingPolicy.FILL_SENTINEL, PaddingPolicy.FILL_ONCE)


@dataclass(frozen=True)
class FillContext:
    """The sizes of one fill: the batch's own (raw), and those that the graph was captured for (padded)."""

    raw_bs: int
    padded_bs: int
    raw_num_tokens: int
    padded_num_tokens: int
    pp_proxy_tensors: Any = None


@dataclass(eq=False)
class GraphSlot:
    """One static buffer, and how it is filled. Only ``buffer``, which a registry sets, changes after construction.

    ``shape_fn(max_bs, max_num_tokens)`` gives the buffer's whole shape. ``axis`` says whether requests or tokens lie
    along it; ``"none"`` is a buffer that is always filled whole. ``slice_fn(buffer, n)`` gives the view of the first n
    of these, by default ``buffer[:n]``; it is called once for each size. ``device`` is the registry's by default.

    ``source_fn(batch, ctx)`` returns the tensor to copy, or None if the batch has none; by default it is the batch's
    field with the slot's name. Without ``copy_from_batch`` nothing is copied. ``post_fill(buffer, batch, ctx)`` is
    called with the whole buffer after all copies of every fill, also where the field was absent.

    A ``source_fn`` with axis ``"none"`` may return fewer rows than the buffer has; the remaining rows keep their
    content.

    A slot that is not ``enabled`` only reserves its name: it has no memory, and is never filled or shown. ``buffer``,
    if set before the slot is registered, is a tensor to adopt. ``copy_from_fb`` is SGLang's name of
    ``copy_from_batch``.

    Raises :class:`GraphError` for settings that contradict each other.
    """

    name: str
    shape_fn: Callable[[int, int], tuple[int, ...]]
    dtype: torch.dtype
    axis: Axis = "tokens"
    device: torch.device | str | None = None
    padding_policy: PaddingPolicy = PaddingPolicy.KEEP_PAD
    pad_value: float | int | bool | None = None
    enabled: bool = True
    copy_from_batch: bool = True
    post_fill: Callable[[Tensor, Any, FillContext], object] | None = None
    slice_fn: Callable[[Tensor, int], Tensor] | None = None
    source_fn: Callable[[Any, FillContext], Tensor | None] | None = None
    buffer: Tensor | None = None
    copy_from_fb: InitVar[bool | None] = field(default=None, kw_only=True)
    is_registered: bool = field(default=False, init=False, repr=False)
    """Whether a registry has it, and ``buffer`` is that registry's. Only a registry sets these two."""

    def __setattr__(self, name: str, value: object) -> None:
        # Registries remember how each slot is filled, so a change would go unnoticed there.
        if name in self.__dict__ and name not in ("buffer", "is_registered"):
            raise AttributeError(f"slot {self.name!r}: {name} cannot be changed; make another slot")
        super().__setattr__(name, value)

    def __post_init__(self, copy_from_fb: bool | None) -> None:
        if copy_from_fb is not None:
            self.__dict__["copy_from_batch"] = copy_from_fb
        self._check_types()
        policy = self.padding_policy
        if self.axis not in ("bs", "tokens", "none"):
            raise self.error(f"axis={self.axis!r}; an axis is 'bs', 'tokens' or 'none'")
        if not isinstance(policy, PaddingPolicy):
            raise self.error(f"padding_policy={policy!r}; it must be one of {[str(each) for each in PaddingPolicy]}")
        if self.axis == "none" and policy.resets:
            raise self.error(f"axis='none' has no tail for {policy} to reset; choose KEEP_PAD or FILL_ONCE")
        if self.axis == "none" and self.slice_fn is not None:
            raise self.error("axis='none' is always taken whole, so a slice_fn would never be called")
        if policy.needs_value:
            if self.pad_value is None:
                raise self.error(f"{policy} needs a pad_value")
            if not _fits(self.pad_value, self.dtype):
                raise self.error(f"pad_value={self.pad_value!r} cannot be written as {self.dtype}")
        if self.source_fn is not None and not self.copy_from_batch:
            raise self.error("copy_from_batch=False copies nothing, so a source_fn would never be called")

    def _check_types(self) -> None:
        expected: dict[str, tuple[type, ...]] = {
            "name": (str,),
            "dtype": (torch.dtype,),
            "enabled": (bool,),
            "copy_from_batch": (bool,),
            "pad_value": (bool, int, float, type(None)),
            "device": (torch.device, str, type(None)),
            "buffer": (Tensor, type(None)),
        }
        for name, kinds in expected.items():
            if not isinstance(value := getattr(self, name), kinds):
                words = " or ".join("None" if kind is type(None) else kind.__name__ for kind in kinds)
                raise self.error(f"{name}={value!r}; it must be {words}")
        for name in ("shape_fn", "post_fill", "slice_fn", "source_fn"):
            if not callable(value := getattr(self, name)) and (value is not None or name == "shape_fn"):
                raise self.error(f"{name}={value!r}; it must be a function")

    @property
    def fill_value(self) -> float | int | bool:
        """What a new buffer is filled with, and what a policy that resets writes into the tail."""
        return self.pad_value if self.padding_policy.needs_value and self.pad_value is not None else 0

    def size_of(self, bs: int, num_tokens: int) -> int | None:
        """Which of the two sizes lies along the slot's axis; None if neither does."""
        if self.axis == "none":
            return None
        return bs if self.axis == "bs" else num_tokens

    def slice_for(self, padded_bs: int, padded_num_tokens: int) -> Tensor:
        """The part of the buffer that a graph of these sizes reads: a view that begins where the buffer begins.

        Raises :class:`GraphError` if there is no buffer yet, or if the buffer or ``slice_fn`` has no such part.
        """
        buffer = self.buffer
        if buffer is None:
            raise self.error("no buffer yet; enable the slot and register it first")
        size = self.size_of(padded_bs, padded_num_tokens)
        if size is None:
            return buffer
        if size < 0:
            raise self.error(f"got a size of {size} along its axis {self.axis!r}; it cannot be negative")
        if self.slice_fn is None:
            if not buffer.dim() or size > buffer.shape[0]:
                raise self.error(f"got a size of {size} along its axis {self.axis!r}; its shape is {_shape(buffer)}")
            return buffer[:size]
        view = self.slice_fn(buffer, size)
        if not isinstance(view, Tensor) or not _begins(view, buffer):
            raise self.error(
                f"slice_fn(buffer, {size}) is not a view of the buffer that begins where the buffer begins"
            )
        return view

    def head_and_tail(self, ctx: FillContext) -> tuple[Tensor, Tensor | None]:
        """Views of what the batch fills and of the padding after it, which is None if there is none.

        Raises :class:`GraphError` as :meth:`slice_for` does, and if ``slice_fn``'s view of a smaller size is not the
        beginning of the larger one along one axis.
        """
        head = self.slice_for(ctx.raw_bs, ctx.raw_num_tokens)
        raw, padded = self.size_of(ctx.raw_bs, ctx.raw_num_tokens), self.size_of(ctx.padded_bs, ctx.padded_num_tokens)
        if raw == padded:
            return head, None
        whole = self.slice_for(ctx.padded_bs, ctx.padded_num_tokens)
        if self.slice_fn is None:
            return head, whole[raw:]
        grown = [axis for axis, (less, more) in enumerate(zip(head.shape, whole.shape, strict=True)) if less != more]
        if not grown:
            return head, None
        axis, less = grown[0], head.shape[grown[0]]
        if len(grown) > 1 or less > whole.shape[axis]:
            raise self.error(
                f"slice_fn gives {_shape(head)} for {raw} and {_shape(whole)} for {padded}; it must grow along one axis"
            )
        return head, whole.narrow(axis, less, whole.shape[axis] - less)

    def error(self, fault: str) -> GraphError:
        """An error about this slot."""
        return GraphError(f"slot {self.name!r}: {fault}")


def _begins(view: Tensor, buffer: Tensor) -> bool:
    # Not by data_ptr, because a tensor without elements has none.
    return (
        view.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()
        and view.storage_offset() == buffer.storage_offset()
        and view.stride() == buffer.stride()
        and view.dtype == buffer.dtype
    )


def _fits(value: float | int | bool, dtype: torch.dtype) -> bool:
    """Whether `dtype` holds the number: an integer exactly, a fraction up to rounding."""
    try:
        stored = torch.tensor(value, dtype=dtype, device="cpu").item()
    except (RuntimeError, TypeError, ValueError, OverflowError):
        return False
    if dtype.is_floating_point or dtype.is_complex:
        # A number that is too large becomes infinite.
        return abs(stored) != math.inf or abs(value) == math.inf
    return bool(stored == value)


def _shape(tensor: Tensor) -> list[int]:
    return list(tensor.shape)
