"""Finds the name under which code reads a tensor: a variable, or a path of attributes and keys from one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from types import BuiltinFunctionType, FrameType, FunctionType, ModuleType
from typing import Any

import torch

from graftlab.base.tensor_bytes import memory_of
from graftlab.lines.frames import model_frame

_DEEPEST = 4
_MOST_OBJECTS = 3000
_MOST_ITEMS = 64
# These have no parts that could hold tensors.
_WITHOUT_PARTS = frozenset({str, int, float, bool, bytes, type(None), type, FunctionType, BuiltinFunctionType})


def path_of(tensor: torch.Tensor, frame: FrameType, *, with_variables: bool = True) -> str | None:
    """Return the shortest path to a tensor from the variables of the running model code; None if there is none.

    A tensor in the same memory counts too, with ``...`` after its path: the code reads a part or a view of it. Without
    ``with_variables`` only names that outlive a call count: attributes, and keys of objects in variables. A Python
    module is searched only where a variable holds it: through an object, such as a namespace, the search would reach
    all modules.
    """
    running = model_frame(frame)
    if running is None:
        return None
    memory = memory_of(tensor)
    left: deque[tuple[str, Any, int]] = deque((name, value, 0) for name, value in running.f_locals.items())
    seen: set[int] = set()
    part: str | None = None
    while left and len(seen) < _MOST_OBJECTS:
        path, value, depth = left.popleft()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.Tensor):
            if depth == 0 and not with_variables:
                continue
            if value is tensor:
                return path
            if part is None and memory is not None and memory_of(value) == memory:
                part = path if value.shape == tensor.shape else f"{path}[...]"
        elif depth < _DEEPEST and (depth == 0 or not isinstance(value, ModuleType)):
            parts = _inside(value)
            left.extend((path + step, inner, depth + 1) for step, inner in parts if type(inner) not in _WITHOUT_PARTS)
    return part


def _inside(value: Any) -> Iterator[tuple[str, Any]]:
    """The parts of an object that may hold tensors, each with the text that leads to it."""
    if isinstance(value, Mapping):
        for key in list(value)[:_MOST_ITEMS]:
            if isinstance(key, (str, int)):
                yield f"[{key!r}]", value[key]
    elif isinstance(value, (list, tuple)):
        yield from ((f"[{place}]", each) for place, each in enumerate(value[:_MOST_ITEMS]))
    elif isinstance(value, torch.nn.Module):
        own = {name: each for name, each in vars(value).items() if not name.startswith("_")}
        for each in (value._parameters, value._buffers, own, value._modules):
            yield from ((f".{name}", inner) for name, inner in each.items())
    elif hasattr(value, "__dict__") and not isinstance(value, type) and not callable(value):
        yield from ((f".{name}", inner) for name, inner in list(vars(value).items())[:_MOST_ITEMS])
