"""Taps on torch functions inside a model: what each call is given and returns, whatever the modules around it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

Show = Callable[[str, Any], Any]
"""Shows a value under a name; returns the value to go on with."""


class _ShowCalls(TorchFunctionMode):
    """While it is active, the calls of some functions show their tensors."""

    def __init__(self, functions: frozenset[str], prefix: str, show: Show) -> None:
        super().__init__()
        self._functions, self._prefix, self._show = functions, prefix, show

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        given = kwargs or {}
        if name not in self._functions:
            return func(*args, **given)
        label = f"{self._prefix}{name}"
        shown = [self._input(f"{label}.in[{place}]", value) for place, value in enumerate(args)]
        named = {key: self._input(f"{label}.in.{key}", value) for key, value in given.items()}
        return self._show(f"{label}.out", func(*shown, **named))

    def _input(self, name: str, value: Any) -> Any:
        return self._show(name, value) if isinstance(value, torch.Tensor) else value


class FunctionTaps:
    """A handle on hooks of a model, between which the functions that it calls are tapped."""

    def __init__(self, model: torch.nn.Module, functions: frozenset[str], prefix: str, show: Show) -> None:
        self._functions, self._prefix, self._show = functions, prefix, show
        # Each thread runs a forward of its own, and a forward may be inside of another.
        self._open = threading.local()
        self._handles = (
            model.register_forward_pre_hook(self._enter, prepend=True),
            # Also when the forward raises: a mode that stays behind would tap everything after it.
            model.register_forward_hook(self._leave, always_call=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        mode = _ShowCalls(self._functions, self._prefix, self._show)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes().append(mode)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if modes := self._modes():
            modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _modes(self) -> list[_ShowCalls]:
        if not hasattr(self._open, "modes"):
            self._open.modes = []
        modes: list[_ShowCalls] = self._open.modes
        return modes


def named_functions(functions: Iterable[str]) -> frozenset[str]:
    """The names, each of which some torch function has. Raises TypeError or ValueError for anything else."""
    if isinstance(functions, str):
        raise TypeError(f"functions is a sequence of names, such as ({functions!r},)")
    names = frozenset(functions)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"functions are given by name, not as {type(name).__name__}")
        if not any(hasattr(place, name) for place in (torch, torch.nn.functional, torch.Tensor, torch.linalg)):
            raise ValueError(f"torch has no function {name!r}; write 'scaled_dot_product_attention' or 'softmax'")
    return names
