"""Pickle requests whatever they contain: only objects that cannot be pickled are replaced, step by step."""

from __future__ import annotations

import io
import pickle
import reprlib
import sys
from collections.abc import Callable
from typing import IO, Any, cast

from graftlab.requests.records import Dropped, Opaque, RecordedRequest

# How many containers inside each other are taken apart before the rest is replaced by its repr.
_DEEPEST = 32
_LONGEST_REPR = 10_000
# These always pickle, and run no code of the request's classes.
_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})


class RequestWriteError(Exception):
    """Requests could not be written this time; the message says why."""


class _Sink:
    """A file that distinguishes its own errors from those of the objects pickled into it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def start_over(self) -> None:
        self._file.seek(0)
        self._file.truncate()


class _DiscardingFile(io.RawIOBase):
    """A file that discards what is written: for finding out whether something can be pickled."""

    def write(self, data: Any) -> int:
        return len(data)


class Pickler(pickle.Pickler):
    """Stores tensors as the bytes of just their own elements, on no device, readable by public torch functions."""

    def reducer_override(self, obj: Any) -> Any:
        torch = sys.modules.get("torch")
        tensor_class = getattr(torch, "Tensor", None)  # absent while another thread is still importing torch
        if torch is None or tensor_class is None or not issubclass(type(obj), tensor_class):
            return NotImplemented
        if obj.layout != torch.strided or obj.device.type == "meta" or obj.is_quantized:
            return NotImplemented
        local = obj.to_local() if hasattr(obj, "to_local") else obj
        from graftlab.base.tensor_bytes import DTYPE_NAMES, to_bytes  # imports torch, which is here already

        return tensor_from_bytes, (to_bytes(local), DTYPE_NAMES[local.dtype], tuple(local.shape))


def tensor_from_bytes(data: bytes, dtype: str, shape: tuple[int, ...]) -> Any:
    """Make the CPU tensor of these elements, row by row in this machine's byte order; ``dtype`` is torch's name.

    Raises ValueError if size, dtype and shape contradict each other.
    """
    # Imported late: some processes that record or read requests never use torch.
    from graftlab.base.tensor_bytes import dtype_named, from_bytes

    kind = dtype_named(dtype)
    try:
        return from_bytes(data, kind, shape)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"{len(data)} bytes are not a {dtype} tensor of shape {shape}: {error}") from None


def pickle_in_steps(content: dict[str, Any], file: IO[bytes]) -> tuple[list[Dropped], list[str]]:
    """Pickle ``{"server_args", "requests", "dropped", ...}`` into an empty file.

    Returns the objects that were replaced, and the reason for each failed step.

    The first step pickles everything; the second leaves out ``server_args``; the third takes each request that cannot
    be pickled apart, field by field, and replaces what fails in it by its repr. All other requests stay as they are.
    The file's own ``dropped`` ends with the returned list. Raises :class:`RequestWriteError` if the disk or the memory
    is full.
    """
    dropped: list[Dropped] = []
    failures: list[str] = []
    sink = _Sink(file)
    for step, salvage in _STEPS.items():
        sink.start_over()
        content = salvage(content, dropped)
        whole = {**content, "dropped": [*content["dropped"], *dropped]}
        error = _pickle(whole, cast(IO[bytes], sink))
        if sink.error is not None:
            raise RequestWriteError(str(sink.error)) from sink.error
        if error is None:
            return dropped, failures
        failures.append(f"{step} they cannot be pickled: {describe(error)}")
    # Only builtin values were left, so memory must have run out.
    raise RequestWriteError(failures[-1])


def _pickle(value: Any, file: IO[bytes]) -> BaseException | None:
    """Return the error of pickling this, or None. Objects may raise anything here, SystemExit included."""
    try:
        Pickler(file, pickle.HIGHEST_PROTOCOL).dump(value)
    except BaseException as error:
        return error
    return None


def _whether_it_pickles(value: Any) -> BaseException | None:
    return _pickle(value, cast(IO[bytes], _DiscardingFile()))


def _without_server_args(content: dict[str, Any], dropped: list[Dropped]) -> dict[str, Any]:
    error = _whether_it_pickles(content["server_args"])
    if error is None:
        return content
    dropped.append({"where": "server_args", "reason": describe(error)})
    return {**content, "server_args": None}


def _with_salvaged_requests(content: dict[str, Any], dropped: list[Dropped]) -> dict[str, Any]:
    return {**content, "requests": _salvaged(content["requests"], _whether_it_pickles, dropped)}


def _with_plain_requests(content: dict[str, Any], dropped: list[Dropped]) -> dict[str, Any]:
    """Keep only builtin values: the last step, for objects that pickle at one time and not at another."""
    content = {**content, "server_args": None}
    return {**content, "requests": _salvaged(content["requests"], _whether_it_is_plain, dropped)}


def _whether_it_is_plain(value: Any) -> BaseException | None:
    if type(value) in _PLAIN:
        return None
    return TypeError(f"{type(value).__qualname__} objects did not pickle the same way twice")


_STEPS: dict[str, Callable[[dict[str, Any], list[Dropped]], dict[str, Any]]] = {
    "whole": lambda content, dropped: content,
    "without server_args": _without_server_args,
    "with every request that fails taken apart": _with_salvaged_requests,
    "with builtin values alone": _with_plain_requests,
}

Check = Callable[[Any], "BaseException | None"]


def _salvaged(requests: list[tuple[Any, ...]], check: Check, dropped: list[Dropped]) -> list[tuple[Any, ...]]:
    salvaged = []
    for index, record in enumerate(requests):
        if check(record) is None:
            salvaged.append(record)
            continue
        salvager = _Salvager(check, dropped)
        fields = zip(RecordedRequest._fields, record, strict=True)
        salvaged.append(tuple(salvager.salvage(value, f"requests[{index}].{name}", top=True) for name, value in fields))
    return salvaged


class _Salvager:
    """Takes one request apart only as much as needed to keep the parts that can be kept."""

    def __init__(self, check: Check, dropped: list[Dropped]) -> None:
        self._check = check
        self._dropped = dropped
        # The replacement of each container met so far: a container may hold itself.
        self._known: dict[int, Any] = {}

    def salvage(self, value: Any, where: str, top: bool = False, depth: int = 0) -> Any:
        error = self._check(value)
        if error is None:
            return value
        if id(value) in self._known:
            return self._known[id(value)]
        kind = type(value)
        if depth == _DEEPEST and kind in (dict, list, tuple):
            self._dropped.append(
                {"where": where, "reason": f"nested more than {_DEEPEST} containers deep: {describe(error)}"}
            )
            return reprlib.repr(value)  # its complete repr may be endless
        if kind is dict:
            new: Any = {}
            self._known[id(value)] = new
            self._salvage_items(value, new, depth, lambda key: f"{where}[{_repr(key)[:100]}]")
        elif kind is list:
            new = self._known[id(value)] = []
            new += [self.salvage(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(list(value))]
        elif kind is tuple:
            new = tuple(self.salvage(item, f"{where}[{i}]", depth=depth + 1) for i, item in enumerate(value))
        elif top and (attributes := _attributes(value)):
            # Keep a request's attributes, which are its fields, rather than its repr.
            self._dropped.append({"where": where, "reason": f"kept by its attributes: {describe(error)}"})
            new = self._known[id(value)] = Opaque(f"{kind.__module__}.{kind.__qualname__}", (), {})
            self._salvage_items(attributes, new.state, depth, lambda key: f"{where}.{key}")
        else:
            self._dropped.append({"where": where, "reason": describe(error)})
            new = _repr(value)
        self._known[id(value)] = new
        return new

    def _salvage_items(self, old: dict[Any, Any], new: dict[Any, Any], depth: int, name: Callable[[Any], str]) -> None:
        for key, item in list(old.items()):
            where = name(key)
            if (error := self._check(key)) is not None:
                self._dropped.append({"where": f"the key of {where}", "reason": describe(error)})
                key = _repr(key)
            new[key] = self.salvage(item, where, depth=depth + 1)


def _attributes(value: Any) -> dict[str, Any] | None:
    """Return an object's attributes by name; None for modules and classes, whose attributes lead everywhere."""
    if isinstance(value, type) or type(value) is type(sys):
        return None
    try:
        found = object.__getattribute__(value, "__dict__")
    except AttributeError:
        return None
    return dict(found)


def _repr(value: Any) -> str:
    try:
        text = repr(value)
    except BaseException as error:
        return f"<{type(value).__qualname__} object, whose repr raises {describe(error)}>"
    return text if len(text) <= _LONGEST_REPR else f"{text[:_LONGEST_REPR]}... ({len(text)} characters)"


def describe(error: BaseException) -> str:
    """Return the error's class and message, even if its str() raises."""
    try:
        text = str(error)
    except BaseException:
        text = "its message cannot be shown"
    return f"{type(error).__name__}: {text[:500]}"
