"""Tapping the tensors inside a value: a module's output, or its arguments."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from graftlab.taps import calls

TapOne = Callable[[str, torch.Tensor], Any]
"""Taps a tensor under a name; returns the tensor to continue with."""

# Outputs nest a few levels; deeper structures are caches or graphs.
_MAX_DEPTH = 6


Put = Callable[[Any, Mapping[Any, Any]], Any]
"""Puts values into a container, by index, key or field; returns the container to continue with."""


def _copied(value: Any, changed: Mapping[Any, Any]) -> Any:
    """Put values into a copy of a container."""
    if isinstance(value, (tuple, list)):
        items = [changed.get(index, item) for index, item in enumerate(value)]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, Mapping):
        # A copy keeps the class, and a ModelOutput's attributes beside its entries.
        replaced = copy.copy(value) if hasattr(value, "__setitem__") else dict(value)
        for key, new in changed.items():
            replaced[key] = new
        return replaced
    return dataclasses.replace(value, **changed)


class PlacedArguments:
    """Puts grafted tensors into a call's own arguments until the call ends.

    The call may write into its lists, dicts and tensors, such as a cache, for later calls to read. What it does not
    write is taken back, so that the caller's arguments do not keep the values that grafts gave this call.
    """

    def __init__(self) -> None:
        self._placed: list[tuple[Any, Any, Any, Any]] = []
        self._tensors: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor | int]] = []

    def tap(self, name: str, value: Any, tap_one: TapOne) -> Any:
        """Tap the tensors inside an argument by ``tap_one``."""

        def noted(inside: str, tensor: torch.Tensor) -> Any:
            new = tap_one(inside, tensor)
            if new is not tensor and isinstance(new, torch.Tensor) and not calls.is_tracing():
                # Tensors of inference mode do not count how often they were written to.
                self._tensors.append((tensor, new, new.clone() if new.is_inference() else new._version))
            return new

        return tap_inside(name, value, noted, put=self.put)

    def put(self, value: Any, changed: Mapping[Any, Any]) -> Any:
        """Put values into this container. One that nothing can be written to is copied."""
        is_mapping = isinstance(value, Mapping)
        if calls.is_tracing() or isinstance(value, tuple) or (is_mapping and not hasattr(value, "__setitem__")):
            return _copied(value, changed)
        if not isinstance(value, (list, Mapping)):
            parameters = getattr(type(value), "__dataclass_params__", None)
            if parameters is None or parameters.frozen:
                return _copied(value, changed)
        for key, new in changed.items():
            self._placed.append((value, key, _item(value, key), new))
            _set_item(value, key, new)
        return value

    def take_back(self, *_: object) -> None:
        """Restore what the call has not replaced, and write what it wrote. A forward hook."""
        while self._tensors:
            own, given, before = self._tensors.pop()
            unchanged = torch.equal(given, before) if isinstance(before, torch.Tensor) else given._version == before
            if not unchanged and given.shape == own.shape:
                with torch.no_grad():
                    own.copy_(given)
        while self._placed:
            container, key, old, new = self._placed.pop()
            if _item(container, key) is new:
                _set_item(container, key, old)


def _item(container: Any, key: Any) -> Any:
    """The value in a list, a mapping or a dataclass; None if the call has removed it."""
    if isinstance(container, list):
        return container[key] if key < len(container) else None
    return container.get(key) if isinstance(container, Mapping) else getattr(container, key, None)


def _set_item(container: Any, key: Any, value: Any) -> None:
    if isinstance(container, (list, Mapping)):
        container[key] = value  # type: ignore[index]
    else:
        setattr(container, key, value)


def tap_inside(name: str, value: Any, tap_one: TapOne, depth: int = _MAX_DEPTH, put: Put = _copied) -> Any:
    """Tap the tensors inside a value. Returns the same object unless a tensor was grafted.

    ``put`` puts grafted tensors into a container; by default into a copy.
    """
    if isinstance(value, torch.Tensor):
        return tap_one(name, value)
    if depth == 0:
        return value
    entries: dict[Any, Any]
    if isinstance(value, (tuple, list)):
        entries = {n: tap_inside(f"{name}[{n}]", item, tap_one, depth - 1, put) for n, item in enumerate(value)}
        changed = {index: new for index, new in entries.items() if _differs(new, value[index])}
    elif isinstance(value, Mapping):
        entries = {key: tap_inside(f"{name}.{key}", item, tap_one, depth - 1, put) for key, item in value.items()}
        changed = {key: new for key, new in entries.items() if _differs(new, value[key])}
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in dataclasses.fields(value) if field.init}
        entries = {key: tap_inside(f"{name}.{key}", item, tap_one, depth - 1, put) for key, item in own.items()}
        changed = {key: new for key, new in entries.items() if _differs(new, own[key])}
    else:
        return value
    return put(value, changed) if changed else value


def tap_in_tuples(name: str, value: Any, tap_one: TapOne, depth: int = _MAX_DEPTH) -> Any:
    """Like :func:`tap_inside`, for tensors and tuples alone: the callee may write into any other container."""
    if isinstance(value, torch.Tensor):
        return tap_one(name, value)
    if depth == 0 or not isinstance(value, tuple):
        return value
    entries = {n: tap_in_tuples(f"{name}[{n}]", item, tap_one, depth - 1) for n, item in enumerate(value)}
    changed = {index: new for index, new in entries.items() if _differs(new, value[index])}
    return _copied(value, changed) if changed else value


def _differs(new: Any, old: Any) -> bool:
    # A tracer cannot tell whether two containers are the same.
    return new is not old if not isinstance(old, (tuple, list, Mapping)) else calls.is_tracing() or new is not old
