"""All static buffers of a captured graph: made in one place, filled in one go, shown in place of a batch's fields."""

from __future__ import annotations

import bisect
import copy
import dataclasses
import functools
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from graftlab.errors import GraphError
from graftlab.graphs.slots import FillContext, GraphSlot, PaddingPolicy
from graftlab.requests.identity import IDENTITIES
from graftlab.taps.calls import tap
from graftlab.taps.watch import Chooser, Watch, chooser

Batch = TypeVar("Batch")
Key = TypeVar("Key")
Value = TypeVar("Value")

_NO_FIELD = object()

# The most plans of each kind. A decode has one for each size of its batch; beyond this number all are made again.
_MOST_PLANS = 256


@dataclass(frozen=True)
class _FillPlan:
    """The checked writes of a fill, for given sizes, and sources of given shapes, dtypes and devices."""

    resets: list[tuple[Tensor, float | int | bool]]
    # Which sources go into which heads, by device and dtypes.
    copies: list[tuple[list[int], list[Tensor]]]
    heads: list[Tensor | None]
    absent: frozenset[str]


class _BufferWatch:
    """Slots that are tapped after each fill, under these names, for as long as it is among the ``others``."""

    def __init__(self, slots: list[tuple[str, GraphSlot]], others: list[_BufferWatch]) -> None:
        self._slots, self._others = slots, others

    def tap(self, ctx: FillContext, absent: frozenset[str]) -> None:
        for name, slot in self._slots:
            if slot.name not in absent:
                head, tail = slot.head_and_tail(ctx)
                tap(name, head, part="head")
                if tail is not None:
                    tap(name, tail, part="tail")

    def remove(self) -> None:
        self._others.remove(self)


class CudaGraphBufferRegistry:
    """The slots of one graph runner, or of several that never run at once. For one thread at a time.

    ``device`` is that of slots that name none; ``max_bs`` and ``max_num_tokens`` are the largest sizes ever captured.
    With ``share_pool``, slots take their memory from the process's pool (:func:`share_input_buffer`).
    """

    def __init__(self, device: torch.device | str, max_bs: int, max_num_tokens: int, share_pool: bool = False) -> None:
        if max_bs < 0 or max_num_tokens < 0:
            raise GraphError(f"max_bs={max_bs} and max_num_tokens={max_num_tokens} cannot be negative")
        self.device = torch.device(device)
        self.max_bs, self.max_num_tokens, self.share_pool = max_bs, max_num_tokens, share_pool
        self._slots: dict[str, GraphSlot] = {}
        self._absent: frozenset[str] = frozenset()
        self._watched: list[_BufferWatch] = []
        self._forget_plans()

    # ---- slots ----------------------------------------------------------------------------------------------------

    def register_slot(self, slot: GraphSlot, bind: Tensor | None = None) -> GraphSlot:
        """Give a slot its buffer: new memory, the pool's, or the tensor ``bind``, whose content stays as it is.

        Returns the slot; for a slot of another registry, a copy with a different buffer. Memory from the pool keeps
        its content too, except for FILL_ONCE, whose value may never have been written there. So do not register a
        slot between a fill and its replay.

        Raises :class:`GraphError` for a second slot of a name, and for a shape that has no room for the registry's
        largest sizes. A tensor to adopt must have exactly the slot's shape, dtype and device.
        """
        if slot.name in self._slots:
            raise slot.error("a slot of this name exists already")
        if slot.is_registered:
            slot = dataclasses.replace(slot, buffer=None)
        if slot.enabled:
            buffer = self._buffer_for(slot, slot.buffer if bind is None else bind)
            # A slot that cannot be sliced is not registered.
            ends = FillContext(0, self.max_bs, 0, self.max_num_tokens)
            dataclasses.replace(slot, buffer=buffer).head_and_tail(ends)
            slot.buffer = buffer
        slot.is_registered = True
        self._slots[slot.name] = slot
        self._forget_plans()
        return slot

    def _buffer_for(self, slot: GraphSlot, adopted: Tensor | None) -> Tensor:
        shape = torch.Size(slot.shape_fn(self.max_bs, self.max_num_tokens))
        # A device that leaves out its index, as "cuda" does, gets one with its first tensor.
        device = torch.empty(0, device=self.device if slot.device is None else slot.device).device
        if adopted is not None:
            got = (adopted.shape, adopted.dtype, adopted.device)
            if got != (shape, slot.dtype, device):
                raise slot.error(f"cannot adopt {_described(*got)}; allowed is {_described(shape, slot.dtype, device)}")
            return adopted
        # Filled outside inference mode too, where a tensor that was made inside it could not be written.
        with torch.inference_mode(False), torch.no_grad():
            buffer = new = torch.empty(shape, dtype=slot.dtype, device=device)
            if self.share_pool:
                buffer = share_input_buffer(slot.name, new)
            if buffer.data_ptr() == new.data_ptr() or slot.padding_policy is PaddingPolicy.FILL_ONCE:
                buffer.fill_(slot.fill_value)
        return buffer

    def get_slot(self, name: str) -> GraphSlot:
        """The slot of this name, its buffer in it. Raises :class:`GraphError` where there is none."""
        try:
            return self._slots[name]
        except KeyError:
            raise GraphError(f"no slot {name!r}; the slots are {self.slot_names()}") from None

    def enable_slot(self, name: str) -> GraphSlot:
        """Give a slot that is registered and not enabled its buffer; one that has it stays as it is.

        Returns the slot. Graphs that were captured before do not read it. Raises :class:`GraphError` as
        :meth:`register_slot` does.
        """
        slot = self.get_slot(name)
        if slot.enabled:
            return slot
        new = dataclasses.replace(slot, enabled=True)
        before, self._slots = self._slots, {each: it for each, it in self._slots.items() if each != name}
        try:
            self.register_slot(new)
            # In its old place among the others.
            self._slots = {each: new if each == name else it for each, it in before.items()}
        except BaseException:
            self._slots = before
            raise
        finally:
            self._forget_plans()
        return new

    def share_buffers(self) -> None:
        """Move the buffers into the process's pool (:func:`share_input_buffer`), before any graph has captured them.

        The first buffer of its kind there becomes the memory of all; later ones use it instead of their own.
        Raises :class:`GraphError` for a buffer that is not contiguous.
        """
        shared = {
            slot.name: share_input_buffer(slot.name, slot.buffer) for slot in self._enabled if slot.buffer is not None
        }
        for name, buffer in shared.items():
            self._slots[name].buffer = buffer
        self.share_pool = True
        self._forget_plans()

    @property
    def buffers(self) -> ForwardInputBuffers:
        """The whole buffers by name; graphs hold references to them."""
        return ForwardInputBuffers(self)

    def has_slot(self, name: str) -> bool:
        """Whether a slot of this name is registered, enabled or not."""
        return name in self._slots

    def slot_names(self) -> list[str]:
        """All slots, enabled or not, in the order in which they were registered."""
        return list(self._slots)

    # ---- batches --------------------------------------------------------------------------------------------------

    def fill_from(
        self,
        batch: Any,
        *,
        raw_bs: int,
        padded_bs: int,
        raw_num_tokens: int,
        padded_num_tokens: int,
        pp_proxy_tensors: Any = None,
    ) -> None:
        """Make the buffers hold `batch`: first reset tails, then copy, then call the ``post_fill`` hooks.

        `batch` is any object with fields as attributes; a field that is None or missing is absent. The whole buffer of
        an absent field is reset if its policy resets tails, since a graph that was captured with it still reads it;
        otherwise it keeps its content. A source may lie in the buffers themselves.

        Raises :class:`GraphError`, before anything is written, for sizes beyond the registry's, for a source that does
        not have the batch's own size, and for one whose dtype would lose data.
        """
        ctx = FillContext(raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, pp_proxy_tensors)
        sources: list[Any] = [
            getattr(batch, slot.name, None) if slot.source_fn is None else slot.source_fn(batch, ctx)
            for slot in self._copied
        ]
        # Fills with equal keys are equally valid, so one whose plan is known has been checked.
        key = (raw_bs, padded_bs, raw_num_tokens, padded_num_tokens, *map(_kind, sources))
        plan = self._plans.get(key)
        if plan is None:
            plan = _remember(self._plans, key, self._make_plan(ctx, sources))
        with torch.no_grad():
            self._clone_overlapping(sources, plan.heads)
            for part, value in plan.resets:
                part.fill_(value)
            for indices, heads in plan.copies:
                copy_all(heads, [sources[index] for index in indices])
            self._absent = plan.absent
            for hook, buffer in self._hooks:
                hook(buffer, batch, ctx)
            for watched in self._watched:
                watched.tap(ctx, plan.absent)

    def extract_buffer(self, *, padded_bs: int, padded_num_tokens: int, forward_batch_template: Batch) -> Batch:
        """A copy of the template with views of the buffers, of the padded sizes, in place of its fields.

        Call it after the fill from the same batch. A field that was absent then, or is None in the template, stays the
        template's own, even if the buffer holds an earlier batch. Other fields of the template stay too. In its
        ``sampling_info``, a field with a batch field's name and tensor becomes the view as well, and so does an equal
        copy of the identities. A ``batch_size`` that can be set becomes the padded one.

        Raises :class:`GraphError` for sizes beyond the registry's.
        """
        key = (padded_bs, padded_num_tokens)
        views = self._views.get(key)
        if views is None:
            views = _remember(self._views, key, self._make_views(*key))
        shown: dict[str, Any] = {}
        shown_in_info: dict[str, Tensor] = {}
        info = getattr(forward_batch_template, "sampling_info", None)
        for slot, view in views:
            own = getattr(forward_batch_template, slot.name, _NO_FIELD)
            is_absent = slot.name in self._absent or (own is None and slot.copy_from_batch and slot.source_fn is None)
            if own is _NO_FIELD or is_absent:
                continue
            shown[slot.name] = view
            if own is not None and _is_equal(slot.name, getattr(info, slot.name, None), own):
                shown_in_info[slot.name] = view
        if shown_in_info:
            shown["sampling_info"] = _with_fields(info, shown_in_info)
        is_computed = isinstance(getattr(type(forward_batch_template), "batch_size", None), property)
        if hasattr(forward_batch_template, "batch_size") and not is_computed:
            shown["batch_size"] = padded_bs
        return _with_fields(forward_batch_template, shown)

    # ---- taps -----------------------------------------------------------------------------------------------------

    def watch(self, prefix: str = "slot.", include: Chooser = None, exclude: Chooser = None) -> Watch:
        """Tap the slots after each fill: stale padding shows as a row, and a graft repairs it before the replay.

        A slot's tap has its name after ``prefix``, and the tag ``part``: ``"head"`` is what the batch filled, and
        ``"tail"`` the padding after it, where there is any. Slots whose field is absent are not shown, nor those that
        are registered later. ``include`` and ``exclude`` choose as in :func:`graftlab.watch`; a slot's ``type`` is its
        axis.

        Raises :class:`FilterError` for a bad expression, and :class:`GraphError` where no slot is chosen.
        """
        wanted, unwanted = chooser(include, default=True), chooser(exclude, default=False)
        named = [(prefix + slot.name, slot) for slot in self._enabled]
        chosen = [(name, slot) for name, slot in named if wanted(name, slot.axis) and not unwanted(name, slot.axis)]
        if not chosen:
            raise GraphError(
                f"include={include!r} and exclude={exclude!r} leave no slot to watch; they are expressions over "
                f"`name`, one of {[name for name, _ in named]}, and `type`, the slot's axis"
            )
        watched = _BufferWatch(chosen, self._watched)
        self._watched.append(watched)
        return Watch([watched], [name for name, _ in chosen])

    # ---- plans ----------------------------------------------------------------------------------------------------

    def _forget_plans(self) -> None:
        self._plans: dict[tuple[object, ...], _FillPlan] = {}
        self._views: dict[tuple[int, int], list[tuple[GraphSlot, Tensor]]] = {}
        self._enabled = [slot for slot in self._slots.values() if slot.enabled]
        self._copied = [slot for slot in self._enabled if slot.copy_from_batch]
        buffers = [(slot.post_fill, slot.buffer) for slot in self._enabled if slot.buffer is not None]
        self._hooks = [(hook, buffer) for hook, buffer in buffers if hook is not None]
        storages = [buffer.untyped_storage() for _, buffer in buffers]
        ends = sorted({(each.data_ptr(), each.data_ptr() + each.nbytes()) for each in storages})
        self._starts, self._ends = [start for start, _ in ends], [end for _, end in ends]

    def _make_plan(self, ctx: FillContext, sources: Sequence[Any]) -> _FillPlan:
        self._check_sizes(ctx)
        resets: list[tuple[Tensor, float | int | bool]] = []
        grouped: defaultdict[tuple[object, ...], tuple[list[int], list[Tensor]]] = defaultdict(lambda: ([], []))
        heads: list[Tensor | None] = []
        absent: set[str] = set()
        for slot in self._enabled:
            head, part = slot.head_and_tail(ctx)
            if slot.copy_from_batch:
                source = sources[len(heads)]
                if source is None:
                    absent.add(slot.name)
                    heads.append(None)
                    part = slot.slice_for(ctx.padded_bs, ctx.padded_num_tokens)
                else:
                    if slot.axis == "none" and slot.source_fn is not None:
                        head = _head_for(source, head)
                    _check_source(slot, source, head, ctx)
                    indices, into = grouped[head.device, source.device, head.dtype, source.dtype]
                    indices.append(len(heads))
                    into.append(head)
                    heads.append(head)
            if slot.padding_policy.resets and part is not None:
                resets.append((part, slot.fill_value))
        return _FillPlan(resets, list(grouped.values()), heads, frozenset(absent))

    def _make_views(self, padded_bs: int, padded_num_tokens: int) -> list[tuple[GraphSlot, Tensor]]:
        self._check_sizes(FillContext(padded_bs, padded_bs, padded_num_tokens, padded_num_tokens))
        return [(slot, slot.slice_for(padded_bs, padded_num_tokens)) for slot in self._enabled]

    def _check_sizes(self, ctx: FillContext) -> None:
        for what, axis, raw, padded, most in (
            ("bs", "bs", ctx.raw_bs, ctx.padded_bs, self.max_bs),
            ("num_tokens", "tokens", ctx.raw_num_tokens, ctx.padded_num_tokens, self.max_num_tokens),
        ):
            if 0 <= raw <= padded <= most:
                continue
            slots = [slot.name for slot in self._enabled if slot.axis == axis]
            raise GraphError(
                f"got raw_{what}={raw} and padded_{what}={padded}; allowed is 0 <= raw <= padded <= {most} "
                f"(max_{what}), for which slots {slots} have room"
            )

    def _clone_overlapping(self, sources: list[Any], heads: Sequence[Tensor | None]) -> None:
        """Clone, in place in the list, the sources that lie in a buffer, because it is about to be overwritten.

        A source that is exactly its own destination may stay, since no reset touches it.
        """
        for index, source in enumerate(sources):
            if source is None:
                continue
            address = source.data_ptr()
            place = bisect.bisect_right(self._starts, address) - 1
            if place >= 0 and address < self._ends[place]:
                head = heads[index]
                assert head is not None, "planned for this source"
                if address != head.data_ptr() or source.stride() != head.stride() or source.dtype != head.dtype:
                    sources[index] = source.clone()


def _is_equal(name: str, found: Any, own: Any) -> bool:
    """Whether the sampling info holds the batch's own tensor.

    Comparing values would make the host wait, so copies of other fields do not count: an equal name may mean something
    different.
    """
    if found is own or name not in IDENTITIES or not isinstance(found, Tensor):
        return found is own
    same_kind = (found.shape, found.dtype, found.device) == (own.shape, own.dtype, own.device)
    return same_kind and torch.equal(found, own)


def _remember(plans: dict[Key, Value], key: Key, plan: Value) -> Value:
    if len(plans) >= _MOST_PLANS:
        plans.clear()
    plans[key] = plan
    return plan


def _kind(source: object) -> object:
    """The properties of a source that a plan depends on."""
    if isinstance(source, Tensor):
        return source.shape, source.dtype, source.device
    return type(source)


def _head_for(source: object, head: Tensor) -> Tensor:
    """The beginning of a buffer that a source with fewer rows fills."""
    if isinstance(source, Tensor) and source.dim() and head.dim() and source.shape[0] < head.shape[0]:
        return head[: source.shape[0]]
    return head


def _check_source(slot: GraphSlot, source: object, head: Tensor, ctx: FillContext) -> None:
    if not isinstance(source, Tensor):
        raise slot.error(f"got {type(source).__name__} from the batch; it must be a tensor or None")
    if source.shape != head.shape:
        assert slot.buffer is not None
        size = {"bs": f" with raw_bs={ctx.raw_bs}", "tokens": f" with raw_num_tokens={ctx.raw_num_tokens}", "none": ""}
        raise slot.error(
            f"got a source of shape {list(source.shape)}; allowed is {list(head.shape)}{size[slot.axis]}, "
            f"and the whole slot has room for {list(slot.buffer.shape)}"
        )
    if not is_lossless(source.dtype, slot.dtype):
        raise slot.error(
            f"got a source of {source.dtype}, which would lose data as {slot.dtype}; it must hold every "
            "value without loss. If the values do fit, convert them in a source_fn"
        )


def _with_fields(template: Batch, fields: dict[str, Any]) -> Batch:
    """A shallow copy with some fields changed; frozen dataclasses and plain namespaces alike."""
    changed = copy.copy(template)
    for name, value in fields.items():
        # Bypasses frozen dataclasses: this copy is not shared yet.
        object.__setattr__(changed, name, value)
    return changed


def _described(shape: torch.Size, dtype: torch.dtype, device: torch.device) -> str:
    return f"a tensor of shape {list(shape)}, {dtype}, on {device}"


class ForwardInputBuffers:
    """A view of a registry's whole buffers by slot name; None for a slot that is not enabled.

    ``buffers.seq_lens`` is the tensor that graphs read, in its largest size, so its content changes with every batch.
    Slots registered or enabled later appear too. The view is read-only. ``share_buffers()`` is that of the registry.
    """

    __slots__ = ("_registry",)
    _registry: CudaGraphBufferRegistry

    def share_buffers(self) -> None:
        """See :meth:`CudaGraphBufferRegistry.share_buffers`."""
        self._registry.share_buffers()

    def __init__(self, registry: CudaGraphBufferRegistry) -> None:
        object.__setattr__(self, "_registry", registry)

    def __getattr__(self, name: str) -> Tensor | None:
        registry: CudaGraphBufferRegistry = object.__getattribute__(self, "_registry")
        if not registry.has_slot(name):
            raise AttributeError(f"there is no buffer {name!r}; the buffers are {registry.slot_names()}")
        return registry.get_slot(name).buffer

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"buffer {name!r} cannot be another tensor: graphs read this one. Write into it")

    def __dir__(self) -> list[str]:
        return self._registry.slot_names()

    def __repr__(self) -> str:
        return f"<ForwardInputBuffers {dir(self)}>"


# Memory that the registries of one process share: runners that never run at once need not have a buffer each. Each
# entry is flat. A name's memory is never made larger or replaced: captured graphs hold its address.
_pool: dict[tuple[str, int, torch.dtype, torch.device], Tensor] = {}


def share_input_buffer(name: str, buffer: Tensor) -> Tensor:
    """The process's memory for buffers of this name, number of elements, dtype and device, in the shape of `buffer`.

    The first buffer of a kind becomes the memory of all. Later ones contribute only their shape, and the memory keeps
    its content, so the order of registries does not matter.

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
    """Forget all shared memory. Registries keep theirs; buffers that are shared from now on get new memory."""
    _pool.clear()


# One kernel for many copies. The name is private to torch and may disappear in any release: it is looked up only here,
# and the fallback below gives the same result.
foreach_copy: Callable[..., object] | None = getattr(torch, "_foreach_copy_", None)


def copy_all(destinations: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy each source into its destination of the same shape.

    All sources share device and dtype, and all destinations do; no source overlaps another's destination.
    """
    # From pageable memory the driver has copied everything when the call returns, so no wait for the device is needed.
    # Pinned memory is read later, when the host may have written the next batch to it. A copy to the host has to be
    # complete before the host reads it.
    non_blocking = (
        destinations[0].device.type == "cuda"
        and sources[0].device.type == "cpu"
        and not any(source.is_pinned() for source in sources)
    )
    if foreach_copy is not None:
        foreach_copy(destinations, sources, non_blocking)
        return
    for destination, source in zip(destinations, sources, strict=True):
        destination.copy_(source, non_blocking)


@functools.cache
def is_lossless(source: torch.dtype, destination: torch.dtype) -> bool:
    """Whether every number that `source` can hold is the same number in `destination`.

    The dtypes alone decide: whether the numbers of one batch happen to fit cannot be known without waiting for the
    device. So int32 goes into int64, and bfloat16 into float32, but int64 into neither int32 nor float32.
    """
    if source == destination:
        return True
    if destination == torch.bool or (source.is_complex and not destination.is_complex):
        return False
    if destination.itemsize == 1 and destination.is_floating_point:
        # What torch reports for some of these is wrong, such as the eps of float8_e5m2fnuz.
        return False
    try:
        (lowest, highest), (into_lowest, into_highest) = _range(source), _range(destination)
    except (NotImplementedError, TypeError):
        # Raw bits, or quantized: torch does not know their range either.
        return False
    if lowest < into_lowest or highest > into_highest:
        return False
    if _is_integer(source):
        # A significand of p bits holds every integer up to 2**p; eps is 2**(1 - p).
        return _is_integer(destination) or max(-lowest, highest) <= 2 / torch.finfo(destination).eps
    if _is_integer(destination):
        return False
    return torch.finfo(destination).eps <= torch.finfo(source).eps


def _is_integer(dtype: torch.dtype) -> bool:
    return not (dtype.is_floating_point or dtype.is_complex)


def _range(dtype: torch.dtype) -> tuple[float, float]:
    if dtype == torch.bool:
        return 0, 1
    limits = torch.iinfo(dtype) if _is_integer(dtype) else torch.finfo(dtype)
    return limits.min, limits.max
