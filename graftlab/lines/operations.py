"""Records a call's torch operations: the values that each read and wrote, its scalar arguments, its line of source."""

from __future__ import annotations

import math
import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graftlab.base.tensor_bytes import DTYPE_NAMES, memory_of
from graftlab.lines.fingerprints import Fingerprint, fingerprint, with_rows
from graftlab.lines.frames import (
    KnownCode,
    SourceFrame,
    StackEntry,
    frames_of_traceback,
    model_entry,
    runs_in_backward,
    stack_entries,
)
from graftlab.lines.rows import ROW_BUDGET
from graftlab.lines.signatures import Signature, in_words, shape_of, signature_of
from graftlab.lines.state import path_of
from graftlab.taps.backward import frame_in_backward
from graftlab.taps.untraced import UntracedMode

MOST_OPERATIONS = 50_000
SORT_BUDGET = 1 << 24
"""The most elements that one recording sorts for fingerprints, about a second of one processor core."""
LARGE = 1 << 16
"""A tensor with more elements is large: its values are not sorted, which takes thirty times as long as their sums."""
NUMBER_BUDGET = 1 << 29
"""The most elements that one recording reads for fingerprints."""

# The search for the name of a tensor written in place takes about a millisecond.
_MOST_SEARCHES = 200
_SEARCHES_OF_ONE = 2

# These do not read the tensors that they write to.
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})
_FROM_DATA = frozenset({"lift_fresh", "lift_fresh_copy"})
"""The operation that ``torch.tensor`` calls with the tensor that it has made of Python's numbers."""
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "transpose", "t", "permute", "select", "slice", "expand"})
LAYOUT_OPERATIONS = _VIEWS | frozenset(
    {"unsqueeze", "squeeze", "split", "chunk", "unbind", "detach", "alias", "clone", "contiguous", "split_with_sizes"}
    | {"as_strided", "lift_fresh", "unfold", "diagonal", "numpy_T", "_reshape_alias", "view_as_real", "view_as_complex"}
)
"""Operations that only rearrange numbers."""


class TracedValue(NamedTuple):
    """A tensor at one moment of a recording.

    ``sources`` are the operations that wrote it, before the tap (``tap``) that set it, if one did; empty if it existed
    before.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[int, ...]
    tap: str | None = None
    is_parameter: bool = False
    path: str | None = None
    """The attribute or variable through which code reads a tensor that existed before; for one written in place, only
    an attribute or key.
    """


class WrittenPart(NamedTuple):
    """A part of a tensor that an operation wrote: the numbers of the whole's values before and after, and its place."""

    before: int
    after: int
    begin: tuple[int, ...]
    """The index in the whole of the part's first element."""


class Operation(NamedTuple):
    """One operation of torch. ``index`` counts from 0 in order of execution; ``inputs`` and ``outputs`` are numbers of
    values, results before other tensors that it writes to; ``call`` is the operation with its arguments in words.
    """

    index: int  # type: ignore[assignment]  # hides the method of tuples
    name: str
    call: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stack: tuple[StackEntry, ...]
    is_random: bool = False
    """Whether the result depends on the state of a random generator."""
    backward_of: tuple[SourceFrame, ...] = ()
    """For an operation of the backward pass: the lines of its forward operation."""
    is_of_backward: bool = False
    step: int = 0
    """The step in which it ran, counted from the recording's first."""
    arguments: tuple[str, ...] = ()
    """Arguments in words: those that are not tensors and not at their defaults."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """The shapes of the tensors that it reads, and last that of its first result."""
    is_collective: bool = False
    written_parts: tuple[WrittenPart, ...] = ()

    @property
    def only_arranges(self) -> bool:
        """Whether the operation leaves all numbers unchanged."""
        return self.name in LAYOUT_OPERATIONS

    def frames(self) -> list[SourceFrame]:
        """Return the lines of source, the line to show first, then the stack, innermost first."""
        shown = model_entry(self.stack)
        own = [each.read() for each in ([] if shown is None else [shown, *(e for e in self.stack if e is not shown)])]
        if own and shown is not self.stack[0]:
            # The line to show comes first, and its callers do not follow it.
            own[0] = replace(own[0], instruction=-1)
        return [*self.backward_of, *own] if self.backward_of and not _has_own_backward(own) else own


def _has_own_backward(frames: Sequence[SourceFrame]) -> bool:
    """Whether the innermost line is in the ``backward`` of a custom ``autograd.Function``."""
    return bool(frames) and frames[0].function.rpartition(".")[2] == "backward"


class _Layout(NamedTuple):
    """The place of a tensor's elements in its memory; ``stride`` is None for a tensor that is not strided."""

    shape: tuple[int, ...]
    begin: int = 0
    stride: tuple[int, ...] | None = None

    @property
    def extent(self) -> tuple[int, int] | None:
        """The place of a tensor's first element in its memory, and the distance of the last one."""
        if self.stride is None:
            return None
        steps = zip(self.shape, self.stride, strict=True)
        return self.begin, sum((size - 1) * stride for size, stride in steps)

    def index_of(self, place: int) -> tuple[int, ...]:
        """The index of the element at this place of the memory."""
        strides = self.stride or ()
        index = [0] * len(strides)
        left = place - self.begin
        for dim in sorted(range(len(strides)), key=strides.__getitem__, reverse=True):
            index[dim], left = divmod(left, max(strides[dim], 1))
        return tuple(index)


@dataclass(slots=True)
class _Storage:
    """The state of one storage: its life, because addresses are reused, and the operations that wrote to it."""

    life: int
    writes: int = 0
    writers: list[int] = field(default_factory=list)
    present: dict[int, _Layout] = field(default_factory=dict)
    """Its present values, each with its place in the memory."""
    is_written_in_place: bool = False
    path: str | None = None
    searches: int = 0


def modes_in_force() -> list[TorchDispatchMode]:
    """Return this thread's active modes, the innermost last."""
    return list(_get_current_dispatch_mode_stack())


class _BegunOperation(NamedTuple):
    """Notes on an operation, made before it runs."""

    signature: Signature
    addresses: Sequence[int]
    """Those of the tensors that it reads."""
    written: Sequence[torch.Tensor]
    inputs: tuple[int, ...]
    index: int  # type: ignore[assignment]  # hides the method of tuples
    node: Any
    stack: tuple[StackEntry, ...] = ()
    backward_of: tuple[SourceFrame, ...] = ()
    call: str = ""
    arguments: tuple[str, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()


class OperationRecorder(UntracedMode):
    """Records the operations of this thread while it is entered and not paused.

    Of each tensor that is read only the fingerprint is kept, so memory does not grow with the tensors' size. ``only``
    limits fingerprints to these values, by number, and words and lines to operations that read no others. While
    ``is_near`` is False, large tensors get no fingerprints, and the others ones without quantiles, which take most of
    the time. While ``is_open`` is False, nothing is recorded. ``replaced`` has functions by the index of an operation:
    each receives the operation's first result, and returns the one to continue with. ``passed`` has numbers of values,
    by the index of the operation whose first result each replaces. ``fed`` has, by the index of an operation, the
    number of a value that it reads, and a function that receives the value and returns the one to read.

    >>> from graftlab.lines.operations import OperationRecorder
    >>> with OperationRecorder() as recorder:
    ...     scores = torch.ones(4, 4) * 0.125
    >>> [each.call for each in recorder.operations]
    ['ones([4, 4])', 'mul(f32[4, 4], 0.125)']
    """

    def __init__(self, only: frozenset[int] | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations: list[Operation] = []
        self.values: list[TracedValue] = []
        self.fingerprints: dict[int, Fingerprint] = {}
        self.left_out: set[int] = set()
        """The values without a fingerprint: over the budget, far from wanted values, or not in ``only``."""
        self.is_open = True
        self.present_step: Callable[[], int] = int
        """Returns the code's present step, counted from the first."""
        self.is_near = True
        """Whether the code is near a wanted value."""
        self.reads_constants = True
        """Whether fingerprints far from wanted values are taken of values that no operation computed."""
        self.takes_rows = False
        """Whether fingerprints have the sums of rows, to compare a packed batch with a padded one."""
        self.is_cut_short = False
        """Whether there were too many operations to record all."""
        self.fails_silently = False
        """Whether an exception of the recorder ends only the recording, not the recorded code."""
        self.failure: Exception | None = None
        self.replaced: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.passed: dict[int, int] = {}
        self.fed: dict[int, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._taps_from: int | None = None
        self._small: dict[int, Fingerprint] = {}
        self.only = only
        self._paused = 0
        self._known: dict[tuple[Any, ...], int] = {}
        self._computed_from: set[int] = set()
        """The values that operations have read to compute others."""
        self._written: dict[int, _Storage] = {}
        self._named: set[int] = set()
        self._code = KnownCode()
        self._thread = threading.get_ident()
        self._lives = 0
        self._searches = _MOST_SEARCHES
        self._sorts, self._numbers, self._rows = SORT_BUDGET, NUMBER_BUDGET, ROW_BUDGET

    def __enter__(self) -> OperationRecorder:
        self._thread = threading.get_ident()
        return super().__enter__()  # type: ignore[no-any-return, no-untyped-call]

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing inside the block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {} if kwargs is None else dict(kwargs)
        if self._paused or not self.is_open or _is_captured():
            return func(*args, **given)
        if len(self.operations) >= MOST_OPERATIONS:
            self.is_cut_short = True
            return func(*args, **given)
        try:
            begun = self._begin(func, args, given)
            if begun.index in self.fed:
                args, given = self._fed_to(begun, args, given)
        except Exception as error:
            self._fail(error)
            return func(*args, **given)
        result = func(*args, **given)
        try:
            return self._end(begun, func, args, given, result)
        except Exception as error:
            self._fail(error)
            return result

    def _fail(self, error: Exception) -> None:
        if not self.fails_silently:
            raise error
        self.failure, self.is_open = error, False

    def _begin(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> _BegunOperation:
        """Note the values that an operation reads, before it may overwrite them."""
        signature = signature_of(func)
        read: list[torch.Tensor] = []
        written: list[torch.Tensor] = []
        for argument, value in signature.given(args, given):
            if not (found := _tensors(value)):
                continue
            if argument.is_written:
                written += found
                if argument.is_by_name or signature.name in _OVERWRITING:
                    continue
            read += found
        if signature.name in _FROM_DATA:
            # A tensor made without an operation, perhaps at the address of one that no longer exists.
            for each in read:
                self._begin_life(_address(each), [])
        addresses = [_address(each) for each in read]
        numbers = [self.read(each, address) for each, address in zip(read, addresses, strict=True)]
        inputs = tuple(dict.fromkeys(numbers))
        if signature.name not in LAYOUT_OPERATIONS:
            self._computed_from.update(inputs)
        for each, address, number in zip(read, addresses, numbers, strict=True):
            if (memory := self._written[address]).is_written_in_place:
                self._name_state(each, memory, number)
        if self.passed:
            self._keep(read)
        node, index = _autograd_node(), len(self.operations)
        if self.only is not None and not self.only.issuperset(inputs):
            # An operation that leads to a wanted value reads only wanted values.
            return _BegunOperation(signature, addresses, written, inputs, index, node)
        # Without the frames of this method and of the method that the operation calls.
        frame = sys._getframe(2)
        stack = tuple(stack_entries(frame, self._code))
        if threading.get_ident() != self._thread and (waiting := frame_in_backward(self._thread)) is not None:
            # The backward pass of a GPU's tensors runs on a thread of its own.
            stack += tuple(stack_entries(waiting, self._code))
        words = in_words(func, args, given)
        # A hook, or the backward of a custom operation, is the user's own code, and no line of the forward pass.
        lines = () if node is None or runs_in_backward(stack, frame) else _forward_lines(node)
        return _BegunOperation(signature, addresses, written, inputs, index, node, stack, lines, *words)

    def _end(
        self, begun: _BegunOperation, func: Any, args: Sequence[Any], given: Mapping[str, Any], result: Any
    ) -> Any:
        """Record an operation that has run, and return the result to continue with."""
        # Operations inside this one were not recorded, because torch disables the mode meanwhile.
        index, written, signature = begun.index, begun.written, begun.signature
        if index in self.replaced:
            result = _with_first(result, self.replaced[index])
        if index in self.passed and (kept := self._kept.get(self.passed[index])) is not None:
            result = _passing(result, written, kept)
        outputs: list[int] = []
        changed: list[int] = []
        shared = begun.addresses
        parts: list[WrittenPart] = []
        if written:
            wholes = [] if signature.is_collective else [found for each in written if (found := self._whole(each))]
            for each in written:
                self._write(each, index)
            parts = [WrittenPart(before, self._number(whole), begin) for before, whole, begin in wholes]
            shared = [*shared, *map(_address, written)]
            changed = [self._number(each, _address(each), (index,)) for each in written]
            for each in [] if signature.is_collective else written:
                # A part of a buffer may be written and then read only through the whole.
                self.read(each)
        results = _tensors(result)
        for each in results:
            address = _address(each)
            if address not in shared:
                self._begin_life(address, [index])
            number = self._number(each, address, (index,))
            if number not in (*begun.inputs, *changed, *outputs) and self.values[number].sources not in ((), (index,)):
                number = self._made_again(number, each, index)
            outputs.append(number)
        self.operations.append(
            Operation(
                index,
                signature.name,
                begun.call,
                begun.inputs,
                tuple(dict.fromkeys((*outputs, *changed))),
                begun.stack,
                signature.draws(args, given),
                begun.backward_of,
                begun.node is not None,
                self.present_step(),
                begun.arguments,
                (*begun.shapes, *map(shape_of, results[:1])),
                signature.has_later_result,
                tuple(parts),
            )
        )
        return result

    def read(self, tensor: torch.Tensor, address: int | None = None) -> int:
        """Return the number of this tensor's present value, and take its fingerprint."""
        number = self._number(tensor, address)
        if number not in self.fingerprints:
            size = tensor.numel()
            is_near = self._is_near(number)
            is_needed = is_near or (self.only is None and (self.reads_constants or self.values[number].sources))
            if size > self._numbers or not is_needed or (size > LARGE and not is_near):
                self.left_out.add(number)
            elif _is_plain(tensor):
                self._numbers -= size
                sorts = is_near and size <= min(LARGE, self._sorts)
                self._sorts -= size if sorts else 0
                found = fingerprint(tensor, sorts=sorts)
                if self.takes_rows and is_near and self._rows > 0 and size <= LARGE:
                    found = with_rows(found, tensor)
                    self._rows -= 0 if found.rows is None else len(found.rows)
                self.fingerprints[number] = found
                self.left_out.discard(number)
        return number

    def _is_near(self, number: int) -> bool:
        return self.is_near if self.only is None else number in self.only

    def _keep(self, read: Sequence[torch.Tensor]) -> None:
        """Copy the values that are to be passed on, before an operation overwrites them."""
        wanted = set(self.passed.values()) - self._kept.keys()
        for each in read if wanted else ():
            number = self._number(each)
            if number in wanted and number not in self._kept:
                self._kept[number] = each.clone()

    def _fed_to(
        self, begun: _BegunOperation, args: Sequence[Any], given: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments with fed values replaced, except where the operation writes to them."""
        # No function within this one that calls itself: it would keep what it uses until Python collects cycles.
        changed = {id(each) for each in begun.written}
        return (
            [self._fed(each, begun.index, changed) for each in args],
            {name: self._fed(each, begun.index, changed) for name, each in given.items()},
        )

    def _fed(self, value: Any, index: int, changed: Collection[int]) -> Any:
        if isinstance(value, torch.Tensor):
            number, replace = self.fed[index]
            is_wanted = id(value) not in changed and self._number(value) == number
            return replace(value.clone()) if is_wanted else value
        if type(value) in (list, tuple):
            return type(value)(self._fed(each, index, changed) for each in value)
        return value

    def begin_taps(self) -> None:
        """Note that taps begin: parameters written earlier are the model's, however it was built."""
        if self._taps_from is None:
            self._taps_from = len(self.operations)

    def without_quantiles(self, number: int) -> Fingerprint:
        """Return a value's fingerprint without quantiles."""
        if number not in self._small:
            own = self.fingerprints[number]
            is_small = own.values is None and own.rows is None
            self._small[number] = own if is_small else replace(own, magnitudes=None, values=None, rows=None)
        return self._small[number]

    def set_by_tap(self, tensor: torch.Tensor, tap: str, *, changed: bool) -> int:
        """Note that a tap showed this tensor, and whether it overwrote it. Returns the value's number."""
        # A received tensor may be at the address of one that no longer exists, so that only a write gives it a number
        # that is the same in each run.
        if changed or self._has_been_read(tensor):
            self._write(tensor, None)
        self.begin_taps()
        number = self._number(tensor)
        for each in {number, *(() if changed else self._of_same_numbers(tensor))}:
            self.values[each] = self.values[each]._replace(tap=tap)
        return number

    def _has_been_read(self, tensor: torch.Tensor) -> bool:
        """Whether something was computed from the tensor's present value, which a tap sets only from now on."""
        return not self._computed_from.isdisjoint({self._number(tensor), *self._of_same_numbers(tensor)})

    def _of_same_numbers(self, tensor: torch.Tensor) -> set[int]:
        """The known values with the same numbers in another shape, as before heads were split."""
        extent = _layout(tensor).extent
        numbers = {number for number, own in self._memory(tensor).present.items() if own.extent == extent}
        return {number for number in numbers if math.prod(self.values[number].shape) == tensor.numel()}

    def _write(self, tensor: torch.Tensor, index: int | None) -> None:
        memory = self._memory(tensor)
        memory.writes += 1
        memory.present.clear()
        if index is not None:
            memory.writers.append(index)
            memory.is_written_in_place = True

    def _whole(self, part: torch.Tensor) -> tuple[int, torch.Tensor, tuple[int, ...]] | None:
        """The number and tensor of the largest known value that this is a part of, and the index where it begins.

        None if there is none.
        """
        extent, kind = _layout(part).extent, DTYPE_NAMES[part.dtype]
        if extent is None or type(part) not in (torch.Tensor, torch.nn.Parameter):
            return None
        begin, end = extent[0], sum(extent)
        size, found = part.numel(), None
        for number, layout in self._memory(part).present.items():
            own = layout.extent
            if own is None or not (own[0] <= begin and end <= sum(own)) or self.values[number].dtype != kind:
                continue
            if math.prod(layout.shape) > size and 0 not in (layout.stride or ()):
                size, found = math.prod(layout.shape), (number, layout)
        if found is None:
            return None
        number, layout = found
        whole = part.detach().as_strided(layout.shape, layout.stride or (), layout.begin)
        return number, whole, layout.index_of(begin)

    def _memory(self, tensor: torch.Tensor) -> _Storage:
        address = _address(tensor)
        return self._written.get(address) or self._begin_life(address, [])

    def _begin_life(self, address: int, writers: list[int]) -> _Storage:
        """Note that the memory at an address is new, whatever was there before."""
        self._lives += 1
        memory = self._written[address] = _Storage(self._lives, 0, writers)
        return memory

    def _number(self, tensor: torch.Tensor, address: int | None = None, sources: tuple[int, ...] | None = None) -> int:
        """The number of a tensor's present value. A view with the same numbers in one arrangement is the same value."""
        if address is None:
            address = _address(tensor)
        memory = self._written.get(address) or self._begin_life(address, [])
        key = self._key(memory, tensor)
        number = self._known.get(key)
        if number is None:
            layout = _layout(tensor)
            number = self._known[key] = len(self.values)
            memory.present[number] = layout
            wrote = tuple(memory.writers) if sources is None else sources
            self.values.append(TracedValue(number, layout.shape, DTYPE_NAMES[tensor.dtype], wrote))
        value = self.values[number]
        # A parameter's class looks at each instance in Python.
        may_be_parameter = type(tensor) is not torch.Tensor and isinstance(tensor, torch.nn.Parameter)
        if value.sources and not may_be_parameter:
            return number
        is_parameter = value.is_parameter or (may_be_parameter and self._is_from_before(value))
        path, is_new = value.path, number not in self._named or is_parameter != value.is_parameter
        if is_new and (is_parameter or not value.sources) and self._is_near(number):
            # The search for its name goes through thousands of objects.
            self._named.add(number)
            path = path_of(tensor, sys._getframe(1))
        if (path, is_parameter) != (value.path, value.is_parameter):
            self.values[number] = value._replace(path=path, is_parameter=is_parameter)
        return number

    @staticmethod
    def _key(memory: _Storage, tensor: torch.Tensor) -> tuple[Any, ...]:
        """What identifies a tensor's present value."""
        place = (tensor.storage_offset(), tensor.stride()) if _is_plain(tensor) else type(tensor)
        return memory.life, memory.writes, shape_of(tensor), place, tensor.dtype

    def _made_again(self, number: int, view: torch.Tensor, index: int) -> int:
        """A new value for a view that an earlier operation has made too: this operation's line leads to its readers."""
        memory, again = self._memory(view), len(self.values)
        self._known[self._key(memory, view)] = again
        memory.present[again] = memory.present[number]
        # A tap, if it showed the earlier view, showed these numbers.
        self.values.append(self.values[number]._replace(number=again, sources=(index,)))
        if number in self.fingerprints:
            self.fingerprints[again] = self.fingerprints[number]
        return again

    def _name_state(self, tensor: torch.Tensor, memory: _Storage, number: int) -> None:
        """Note the attribute under which code has a tensor that operations wrote in place, such as a cache."""
        value = self.values[number]
        if value.path is not None or value.tap is not None:
            return
        if memory.path is None and memory.searches < _SEARCHES_OF_ONE and self._searches:
            # The search for a value that only a variable has finds nothing.
            memory.searches += 1
            self._searches -= 1
            memory.path = path_of(tensor, sys._getframe(1), with_variables=False)
        if memory.path is not None:
            self.values[number] = value._replace(path=memory.path)

    def _is_from_before(self, value: TracedValue) -> bool:
        """Whether a value is unchanged since before the first tap."""
        return all(self._taps_from is None or index < self._taps_from for index in value.sources)


def _tensors(value: Any) -> Sequence[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return (value,)
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return ()


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_meta and not tensor.is_nested


def _layout(tensor: torch.Tensor) -> _Layout:
    shape = shape_of(tensor)
    return _Layout(shape, int(tensor.storage_offset()), tensor.stride()) if _is_plain(tensor) else _Layout(shape)


def _address(tensor: torch.Tensor) -> int:
    """The identity of a tensor's memory while it lives."""
    # Most tensors have none, and a missing attribute costs an exception.
    inner = tensor if type(tensor) is torch.Tensor else getattr(tensor, "_local_tensor", tensor)
    return memory_of(inner) or id(inner)


def _passing(result: Any, written: Sequence[torch.Tensor], kept: torch.Tensor) -> Any:
    """The result of an operation that is skipped: the value from before it."""
    for each in written:
        if each.shape == kept.shape:
            each.copy_(kept)
            return result
    return _with_first(result, lambda _: kept.clone())


def _with_first(result: Any, replace: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if isinstance(result, torch.Tensor):
        return replace(result)
    return type(result)([replace(result[0]), *result[1:]])


def _is_captured() -> bool:
    """Whether operations are being captured into a CUDA graph, while which no value may be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


def _autograd_node() -> Any:
    """The node of autograd's graph that runs now; None outside a backward pass."""
    return None if _current_node is None else _current_node()


_current_node: Callable[[], Any] | None = getattr(torch._C, "_current_autograd_node", None)


def _forward_lines(node: Any) -> tuple[SourceFrame, ...]:
    """The user's lines of the forward operation whose gradient is being computed, innermost first.

    Autograd keeps them in anomaly mode, see ``torch.autograd.set_detect_anomaly``. Accumulation into an earlier
    gradient belongs to no operation, but to the call of ``backward``.
    """
    if node is None or node.name().endswith("AccumulateGrad"):
        return ()
    return frames_of_traceback("".join(node.metadata.get("traceback_", ())))
