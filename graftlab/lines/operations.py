"""Record the torch operations of a call: what each read and wrote, its scalar arguments and its line of source."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from graftlab.base.tensor_bytes import memory_of
from graftlab.lines.fingerprints import Fingerprint, fingerprint
from graftlab.lines.frames import SourceFrame, StackEntry, frames_of_traceback, model_entry, stack_entries
from graftlab.lines.state import path_of
from graftlab.taps.untraced import outside_compiled_code

MOST_OPERATIONS = 50_000
SORT_BUDGET = 1 << 24
"""The elements that one recording sorts for fingerprints: about a second of one processor core."""
LARGE = 1 << 16
"""A tensor of more elements is large: its values are not sorted, which takes thirty times as long as their sums."""
NUMBER_BUDGET = 1 << 29
"""The elements that one recording reads for fingerprints at all."""

# A search for the name of what was written in place takes about a millisecond.
_MOST_SEARCHES = 200
_SEARCHES_OF_ONE = 2

# What these write to, they do not read.
_OVERWRITING = frozenset({"copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_"})
# A collective's schema does not say what it writes to. It may still be under way when it returns.
_FROM_DATA = frozenset({"lift_fresh", "lift_fresh_copy"})
"""What ``torch.tensor`` calls with the tensor that it has made of Python's numbers."""
_COLLECTIVES = frozenset({"c10d"})
_FUNCTIONAL_COLLECTIVES = frozenset({"_c10d_functional"})
# In training these write to the running statistics, which their schemas do not say.
_BATCH_NORMS = frozenset({"native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"})
_STATISTICS = ("running_mean", "running_var")
_VIEWS = frozenset({"view", "_unsafe_view", "reshape", "transpose", "t", "permute", "select", "slice", "expand"})
LAYOUT_OPERATIONS = _VIEWS | frozenset(
    {"unsqueeze", "squeeze", "split", "chunk", "unbind", "detach", "alias", "clone", "contiguous", "split_with_sizes"}
    | {"as_strided", "lift_fresh", "unfold", "diagonal", "numpy_T", "_reshape_alias", "view_as_real", "view_as_complex"}
)
"""Operations that only arrange numbers."""


@dataclass(frozen=True)
class TracedValue:
    """A tensor at one moment of a recording.

    ``sources`` are the operations that wrote it; none for what a tap set (``tap``), and for what existed before.
    """

    number: int
    shape: tuple[int, ...]
    dtype: str
    sources: tuple[int, ...]
    tap: str | None = None
    is_parameter: bool = False
    path: str | None = None
    """The attribute or variable under which the code that reads it has it, for a tensor that existed before; for one
    that operations wrote to in place, the attribute or key alone."""


@dataclass(frozen=True)
class Operation:
    """One operation of torch. ``index`` counts from 0 in order of execution; ``inputs`` and ``outputs`` are numbers of
    values; ``call`` is the operation with its arguments in words.
    """

    index: int
    name: str
    call: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    stack: tuple[StackEntry, ...]
    is_random: bool = False
    """Whether the result depends on the state of a random generator."""
    backward_of: tuple[SourceFrame, ...] = ()
    """For an operation of the backward pass: the lines of the forward operation that it belongs to."""
    is_of_backward: bool = False
    step: int = 0
    """The step of the recording in which it ran, from its first."""
    arguments: tuple[str, ...] = ()
    """In words, those that are not tensors and do not have their usual value."""
    shapes: tuple[tuple[int, ...], ...] = ()
    """Those of the tensors that it reads, and last that of its first result."""
    is_collective: bool = False

    @property
    def only_arranges(self) -> bool:
        """Whether the operation changes no number."""
        return self.name in LAYOUT_OPERATIONS

    def frames(self) -> list[SourceFrame]:
        """Return the lines of source, the line to show first, then the stack, innermost first."""
        shown = model_entry(self.stack)
        own = [each.read() for each in ([] if shown is None else [shown, *(e for e in self.stack if e is not shown)])]
        if own and shown is not self.stack[0]:
            # What called it does not follow it.
            own[0] = replace(own[0], instruction=-1)
        return [*self.backward_of, *own] if self.backward_of and not _has_own_backward(own) else own


def _has_own_backward(frames: Sequence[SourceFrame]) -> bool:
    """Whether the innermost line is in the ``backward`` of a custom ``autograd.Function``."""
    return bool(frames) and frames[0].function.rpartition(".")[2] == "backward"


@dataclass
class _Writes:
    """What is known of one storage: its life (addresses are used again), and the operations that wrote to it."""

    life: int
    writes: int = 0
    writers: list[int] = field(default_factory=list)
    present: dict[int, tuple[int, ...]] = field(default_factory=dict)
    """The values that it holds now, each with the part of the memory that it takes."""
    is_written_in_place: bool = False
    path: str | None = None
    searches: int = 0


def modes_in_force() -> list[TorchDispatchMode]:
    """Return the modes to which this thread's operations go, the innermost last."""
    return list(_get_current_dispatch_mode_stack())


@dataclass(frozen=True)
class _Begun:
    """What is noted of an operation before it runs."""

    name: str
    read: Sequence[torch.Tensor]
    written: Sequence[torch.Tensor]
    inputs: tuple[int, ...]
    index: int
    node: Any
    stack: tuple[StackEntry, ...]
    backward_of: tuple[SourceFrame, ...]
    call: str
    arguments: tuple[str, ...]
    shapes: Sequence[tuple[int, ...]]


class OperationRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operations of this thread while it is entered and not paused.

    Only fingerprints are kept, of each tensor that is read, so memory does not grow with their size. ``only`` limits
    fingerprints to these values, by number; while ``is_near`` is False, those of large tensors are not taken, and
    others without quantiles, which take most of the time. While ``is_open`` is False, operations pass unrecorded.
    ``replaced`` are functions by the index of an operation: each receives the
    operation's first result, and returns the one to continue with. ``passed`` are the numbers of values, by the index
    of an operation whose first result each replaces; ``fed`` the number of a value that an operation reads, by its
    index, with a function that receives the value and returns the one to read.

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
        self.over_budget: set[int] = set()
        """The values whose fingerprints exceeded the budget."""
        self.is_open = True
        self.present_step: Callable[[], int] = int
        """Returns the step that the code has reached, from the first."""
        self.is_near = True
        """Whether the code is near a value that is wanted."""
        self.is_cut_short = False
        """Whether there were too many operations to record them all."""
        self.fails_silently = False
        """Whether an exception of the recorder itself ends the recording, and not the code that is recorded."""
        self.failure: Exception | None = None
        self.replaced: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.passed: dict[int, int] = {}
        self.fed: dict[int, tuple[int, Callable[[torch.Tensor], torch.Tensor]]] = {}
        self._kept: dict[int, torch.Tensor] = {}
        self._taps_from: int | None = None
        self._small: dict[int, Fingerprint] = {}
        self._only = only
        self._paused = 0
        self._known: dict[tuple[Any, ...], int] = {}
        self._written: dict[int, _Writes] = {}
        self._lives = 0
        self._searches = _MOST_SEARCHES
        self._sorts, self._numbers = SORT_BUDGET, NUMBER_BUDGET

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Record nothing inside the block."""
        self._paused += 1
        try:
            yield
        finally:
            self._paused -= 1

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Or torch imports its compiler, which takes seconds, to keep it from compiling the next method.
        return False

    @outside_compiled_code
    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = {} if kwargs is None else dict(kwargs)
        if self._paused or not self.is_open or _is_captured():
            return func(*args, **given)
        if len(self.operations) >= MOST_OPERATIONS:
            self.is_cut_short = True
            return func(*args, **given)
        if not self.fails_silently:
            begun = self._begin(func, args, given)
            args, given = self._fed_to(begun, args, given)
            return self._end(begun, func, args, given, func(*args, **given))
        try:
            begun = self._begin(func, args, given)
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
        self.failure, self.is_open = error, False

    def _begin(self, func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> _Begun:
        """Note what an operation reads, before it may overwrite that."""
        name = func._schema.name.rpartition("::")[2].removeprefix("_")
        is_collective = func.namespace in _COLLECTIVES
        read, written = [], []
        for argument, value in _arguments(func._schema, args, given):
            found = list(_tensors(value))
            changes = is_collective or (argument.alias_info is not None and argument.alias_info.is_write)
            changes |= name in _BATCH_NORMS and argument.name in _STATISTICS
            if changes:
                written += found
            if not (changes and (argument.kwarg_only or name in _OVERWRITING)):
                read += found
        if name in _FROM_DATA:
            # Made without an operation, perhaps where a tensor was that no longer exists.
            for each in read:
                self._begin_life(each, [])
        numbers = [self.read(each) for each in read]
        inputs = tuple(dict.fromkeys(numbers))
        for each, number in zip(read, numbers, strict=True):
            self._name_state(each, number)
        self._keep(read)
        node = _autograd_node()
        # Without this method and the one that the operation calls.
        stack = tuple(stack_entries(sys._getframe(2)))
        shapes = [tuple(each.shape) for each in _tensors([*args, *given.values()])]
        index, (call, arguments) = len(self.operations), _in_words(func, args, given)
        return _Begun(name, read, written, inputs, index, node, stack, _forward_lines(node), call, arguments, shapes)

    def _end(self, begun: _Begun, func: Any, args: Sequence[Any], given: Mapping[str, Any], result: Any) -> Any:
        """Record an operation that has run; returns the result to continue with."""
        # Operations inside this one were not recorded: torch takes the mode away meanwhile.
        index, written = begun.index, begun.written
        if index in self.replaced:
            result = _with_first(result, self.replaced[index])
        if (kept := self._kept.get(self.passed.get(index, -1))) is not None:
            result = _passing(result, written, kept)
        for each in written:
            self._write(each, index)
        changed = {_address(each) for each in written}
        shared = changed | {_address(each) for each in begun.read}
        outputs = [self._number(each, (index,)) for each in written]
        for each in [] if func.namespace in _COLLECTIVES else written:
            # Part of a buffer may be written and read only as a part of the whole.
            self.read(each)
        for each in _tensors(result):
            if _address(each) not in shared:
                self._begin_life(each, [index])
            outputs.append(self._number(each, (index,)))
        self.operations.append(
            Operation(
                index,
                begun.name,
                begun.call,
                begun.inputs,
                tuple(dict.fromkeys(outputs)),
                begun.stack,
                _draws(func, args, given),
                begun.backward_of,
                begun.node is not None,
                self.present_step(),
                begun.arguments,
                (*begun.shapes, *(tuple(each.shape) for each in [*_tensors(result)][:1])),
                func.namespace in _COLLECTIVES | _FUNCTIONAL_COLLECTIVES and begun.name != "wait_tensor",
            )
        )
        return result

    def read(self, tensor: torch.Tensor) -> int:
        """Return the number of this tensor's present value, and take its fingerprint."""
        number = self._number(tensor, None)
        if number not in self.fingerprints and (self._only is None or number in self._only):
            size = tensor.numel()
            is_near = self.is_near or self._only is not None
            left_out = size > LARGE and not is_near
            if size > self._numbers or left_out:
                self.over_budget.add(number)
            elif _is_plain(tensor):
                self._numbers -= size
                sorts = is_near and size <= min(LARGE, self._sorts)
                self._sorts -= size if sorts else 0
                self.fingerprints[number] = fingerprint(tensor, sorts=sorts)
        return number

    def _keep(self, read: Sequence[torch.Tensor]) -> None:
        """Copy those of the values that are to be passed on, before an operation overwrites them."""
        wanted = set(self.passed.values()) - self._kept.keys()
        for each in read if wanted else ():
            number = self._number(each, None)
            if number in wanted and number not in self._kept:
                self._kept[number] = each.clone()

    def _fed_to(
        self, begun: _Begun, args: Sequence[Any], given: dict[str, Any]
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """The arguments, with another tensor in place of a value that is fed, but not where it is written to."""
        if begun.index not in self.fed:
            return args, given
        number, replace = self.fed[begun.index]
        changed = {id(each) for each in begun.written}

        def fed(value: Any) -> Any:
            if isinstance(value, torch.Tensor):
                is_wanted = id(value) not in changed and self._number(value, None) == number
                return replace(value.clone()) if is_wanted else value
            return type(value)(map(fed, value)) if type(value) in (list, tuple) else value

        return [fed(each) for each in args], {name: fed(each) for name, each in given.items()}

    def begin_taps(self) -> None:
        """Note that taps begin: parameters that were written before are what the model has, however it was built."""
        if self._taps_from is None:
            self._taps_from = len(self.operations)

    def without_quantiles(self, number: int) -> Fingerprint:
        """Return the fingerprint of a value in its smaller form."""
        if number not in self._small:
            own = self.fingerprints[number]
            self._small[number] = own if own.values is None else replace(own, magnitudes=None, values=None)
        return self._small[number]

    def set_by_tap(self, tensor: torch.Tensor, tap: str, *, changed: bool) -> int:
        """Note that a tap showed this tensor, and whether it has overwritten it; returns the value's number."""
        if changed:
            self._write(tensor, None)
        self.begin_taps()
        number = self._number(tensor, None)
        for each in {number, *(() if changed else self._of_same_numbers(tensor))}:
            self.values[each] = replace(self.values[each], tap=tap)
        return number

    def _of_same_numbers(self, tensor: torch.Tensor) -> set[int]:
        """The known values that hold the same numbers in another shape, as before heads were split."""
        extent = _extent(tensor)
        numbers = {number for number, own in self._memory(tensor).present.items() if own == extent}
        return {number for number in numbers if math.prod(self.values[number].shape) == tensor.numel()}

    def _write(self, tensor: torch.Tensor, index: int | None) -> None:
        memory = self._memory(tensor)
        memory.writes += 1
        memory.present.clear()
        if index is not None:
            memory.writers.append(index)
            memory.is_written_in_place = True

    def _memory(self, tensor: torch.Tensor) -> _Writes:
        address = _address(tensor)
        return self._written.get(address) or self._begin_life(tensor, [])

    def _begin_life(self, tensor: torch.Tensor, writers: list[int]) -> _Writes:
        """Note that this tensor's memory is new, whatever was at its address before."""
        self._lives += 1
        memory = self._written[_address(tensor)] = _Writes(self._lives, 0, writers)
        return memory

    def _number(self, tensor: torch.Tensor, sources: tuple[int, ...] | None) -> int:
        """The number of a tensor's present value. A view of the same numbers in the same arrangement is one value."""
        memory = self._memory(tensor)
        plain, shape = _is_plain(tensor), tuple(tensor.shape)
        layout = (tensor.storage_offset(), *tensor.stride()) if plain else ()
        key = (memory.life, memory.writes, layout, shape, tensor.dtype, plain or type(tensor))
        number = self._known.get(key)
        if number is None:
            number = self._known[key] = len(self.values)
            wrote = tuple(memory.writers) if sources is None else sources
            dtype = str(tensor.dtype).removeprefix("torch.")
            is_parameter = not wrote and isinstance(tensor, torch.nn.Parameter)
            path = None if wrote else path_of(tensor, sys._getframe(1))
            memory.present[number] = _extent(tensor)
            self.values.append(TracedValue(number, shape, dtype, wrote, is_parameter=is_parameter, path=path))
        value = self.values[number]
        if not value.is_parameter and isinstance(tensor, torch.nn.Parameter) and self._is_from_before(value):
            self.values[number] = replace(value, is_parameter=True, path=path_of(tensor, sys._getframe(1)))
        return number

    def _name_state(self, tensor: torch.Tensor, number: int) -> None:
        """Note under which attribute code has a tensor that operations wrote to in place, such as a cache."""
        memory = self._memory(tensor)
        value = self.values[number]
        if not memory.is_written_in_place or value.path is not None or value.tap is not None:
            return
        if memory.path is None and memory.searches < _SEARCHES_OF_ONE and self._searches:
            # A value that only a variable has is searched for in vain.
            memory.searches += 1
            self._searches -= 1
            memory.path = path_of(tensor, sys._getframe(1), with_variables=False)
        if memory.path is not None:
            self.values[number] = replace(value, path=memory.path)

    def _is_from_before(self, value: TracedValue) -> bool:
        """Whether a value is as it was before the first tap."""
        return all(self._taps_from is None or index < self._taps_from for index in value.sources)


def _arguments(schema: Any, args: Sequence[Any], given: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The arguments of a schema with the values that were given."""
    for place, argument in enumerate(schema.arguments):
        if place < len(args):
            yield argument, args[place]
        elif argument.name in given:
            yield argument, given[argument.name]


def _draws(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> bool:
    """Whether an operation draws random numbers. An attention that drops out nothing does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    values = {argument.name: value for argument, value in _arguments(func._schema, args, given)}
    drops_out = any(argument.name == "dropout_p" for argument in func._schema.arguments)
    return not drops_out or bool(values.get("dropout_p"))


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def _extent(tensor: torch.Tensor) -> tuple[int, ...]:
    """The first element of a tensor in its memory, and how far the last one is from it."""
    if not _is_plain(tensor):
        return ()
    steps = zip(tensor.shape, tensor.stride(), strict=True)
    return int(tensor.storage_offset()), sum((size - 1) * stride for size, stride in steps)


def _address(tensor: torch.Tensor) -> int:
    """What identifies a tensor's memory while it lives."""
    inner = getattr(tensor, "_local_tensor", tensor)
    return memory_of(inner) or id(inner)


def _passing(result: Any, written: Sequence[torch.Tensor], kept: torch.Tensor) -> Any:
    """The result of an operation that changes nothing: the value from before it."""
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
    """Whether operations are captured into a CUDA graph, during which nothing may be read."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()  # type: ignore[no-untyped-call]


# ---- words ----------------------------------------------------------------------------------------------------------

_SHORT = {"float32": "f32", "float64": "f64", "bfloat16": "bf16", "float16": "f16", "int64": "i64", "int32": "i32"}
_MOST_NUMBERS = 6


def _in_words(func: Any, args: Sequence[Any], given: Mapping[str, Any]) -> tuple[str, tuple[str, ...]]:
    """An operation as its call would be written, with tensors by dtype and shape: ``mul(f32[2, 4], 0.1581)``.

    Also its arguments that are not tensors.
    """
    said = []
    plain = []
    for argument, value in _arguments(func._schema, args, given):
        if value is None or (argument.has_default_value() and _is_equal(value, argument.default_value)):
            continue
        shown = _value_in_words(value)
        by_name = argument.kwarg_only or isinstance(value, (bool, str)) or argument.name in ("scale", "eps", "dim")
        said.append(f"{argument.name}={shown}" if by_name and not isinstance(value, torch.Tensor) else shown)
        if next(_tensors(value), None) is None:
            plain.append(f"{argument.name}={shown}")
    name = func._schema.name.rpartition("::")[2].removeprefix("_")
    return f"{name}({', '.join(said)})", tuple(plain)


def _is_equal(value: Any, default: Any) -> bool:
    return not isinstance(value, torch.Tensor) and type(value) is type(default) and bool(value == default)


def _value_in_words(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return f"{_SHORT.get(dtype, dtype)}{list(value.shape)}"
    if isinstance(value, float):
        return f"{value:.7g}"
    if isinstance(value, (list, tuple)):
        shown = [_value_in_words(each) for each in value[:_MOST_NUMBERS]]
        return f"[{', '.join(shown)}{', ...' if len(value) > _MOST_NUMBERS else ''}]"
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value).removeprefix("torch.")
    return repr(value) if isinstance(value, (bool, int, str)) else type(value).__name__


def _autograd_node() -> Any:
    """The node of autograd's graph that runs now; None outside a backward pass."""
    current = getattr(torch._C, "_current_autograd_node", None)
    return None if current is None else current()


def _forward_lines(node: Any) -> tuple[SourceFrame, ...]:
    """The user's lines of the forward operation whose gradient is being computed, innermost first.

    Autograd keeps them while anomalies are looked for, see ``torch.autograd.set_detect_anomaly``. What adds to a
    gradient of before belongs to no operation, but to the call of ``backward``.
    """
    if node is None or node.name().endswith("AccumulateGrad"):
        return ()
    return frames_of_traceback("".join(node.metadata.get("traceback_", ())))
