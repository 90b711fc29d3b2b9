"""Taps at the torch operations inside modules, as their source writes them: one for each call of a torch function."""

from __future__ import annotations

import os
import sys
import threading
import weakref
from collections.abc import Collection, Mapping
from types import FrameType
from typing import Any, NamedTuple, Protocol

import torch
import torch.utils.checkpoint
from torch.overrides import TorchFunctionMode

from graftlab.base.tensor_bytes import memory_of
from graftlab.errors import warn
from graftlab.taps import calls as taps
from graftlab.taps import compiled
from graftlab.taps.operation_names import CALL_OF_MODULE, NamesInside, OperationName

_CHECKPOINT = torch.utils.checkpoint.__file__
_TORCH = os.path.dirname(torch.__file__)
# What runs compiled code, and the text that it is generated as.
_COMPILED = (os.path.join(_TORCH, "_functorch", "_aot_autograd", ""), os.path.join(_TORCH, "_inductor", ""))
_GENERATED = "<eval_with_key>"
_WRITING = frozenset(
    f"__{name}__"
    for name in (
        *("setitem", "iadd", "isub", "imul", "itruediv", "idiv", "ifloordiv", "imod", "ipow"),
        *("iand", "ior", "ixor", "ilshift", "irshift"),
    )
)


_NO_TAGS: Mapping[str, Any] = {}


class ShowOperation(Protocol):
    """Shows a tensor under a name; returns the one to continue with, which is new if ``replace`` and grafted."""

    def __call__(self, name: str, value: torch.Tensor, *, replace: bool, tags: Mapping[str, Any]) -> Any: ...


class _Scope(NamedTuple):
    """A module whose operations are tapped; ``path`` begins their names."""

    path: str
    names: NamesInside


class _OpenCall(NamedTuple):
    """An open call of a module; without a scope its operations are not tapped."""

    module: torch.nn.Module
    scope: _Scope | None
    mode: _OperationTapMode | None


# The open calls of each watch on a thread. Not an attribute of the hooks, so that a watched model can be copied.
_open = threading.local()


class _OperationTapMode(TorchFunctionMode):
    """While active, taps the result of each torch function that a watched module calls."""

    def __init__(
        self, calls: list[_OpenCall], show: ShowOperation, kinds: dict[str, str], taken: Collection[str]
    ) -> None:
        super().__init__()
        self._calls, self._show, self._kinds, self._taken = calls, show, kinds, taken
        # New tensors that replaced views, and those views: what is then written into one belongs into the other.
        self._replaced: list[tuple[weakref.ref[torch.Tensor], torch.Tensor]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        # A compiled function inside a watched module has no lines of source when it runs.
        if torch.compiler.is_compiling():
            return result
        written = _written(func, args, kwargs)
        if written is not None and self._replaced:
            self._write_through(written)
        scope = self._calls[-1].scope if self._calls else None
        value = result if written is None else written
        if scope is None or not isinstance(value, (torch.Tensor, tuple, list)):
            return result
        if not isinstance(value, torch.Tensor) and not any(isinstance(item, torch.Tensor) for item in value):
            return result
        caller = sys._getframe(1)
        found = scope.names.of(func, caller)
        # A summand of a sum over ranks is no value of the other side, and a graft would be summed. An unnamed view
        # shows the numbers of the tap before it once more.
        if found is None or found.is_summand or (not found.is_plain and written is None and _is_view(value, args)):
            return result
        if (why := _hidden_by(caller, scope)) is not None:
            _warn_of_hidden(scope, why)
            return result
        shown = self._shown(scope, found, value, replace=written is None)
        if written is not None:
            return result
        if shown is not value and _is_view(value, args):
            self._note_replaced(shown, value)
        return shown

    def _shown(self, scope: _Scope, found: OperationName, value: Any, *, replace: bool) -> Any:
        if isinstance(value, torch.Tensor):
            return self._shown_tensor(scope, found, found.name, value, replace=replace)
        names = found.items
        if len(names) != len(value):
            names = tuple(f"{found.name}[{place}]" for place in range(len(value)))
        items = [
            self._shown_tensor(scope, found, name, item, replace=replace) if isinstance(item, torch.Tensor) else item
            for name, item in zip(names, value, strict=True)
        ]
        if all(new is old for new, old in zip(items, value, strict=True)):
            return value
        # The named tuples of torch, such as that of max(), take a sequence.
        return type(value)(items)

    def _shown_tensor(
        self, scope: _Scope, found: OperationName, name: str, value: torch.Tensor, *, replace: bool
    ) -> Any:
        path = f"{scope.path}{name}"
        if path in self._taken:
            # A variable that is named as a module whose output is a tap.
            path = f"{path}.{found.line}"
        self._kinds[path] = found.operation
        # Lines of two files that have the same number are not the same line.
        tags = _NO_TAGS if found.is_plain else {"file": found.file}
        return self._show(path, value, replace=replace, tags=tags)

    def _note_replaced(self, shown: Any, value: Any) -> None:
        for new, old in zip(shown, value, strict=True) if isinstance(value, (tuple, list)) else ((shown, value),):
            if isinstance(new, torch.Tensor) and new is not old:
                self._replaced.append((weakref.ref(new), old))

    def _write_through(self, written: torch.Tensor) -> None:
        """Repeat a write into a tensor that replaced a view where the model meant it: in the memory of that view."""
        touched = [written]
        for new, view in reversed(self._replaced):
            replaced = new()
            if replaced is not None and any(_shares_memory(replaced, each) for each in touched):
                with torch.no_grad():
                    view.detach().copy_(replaced.detach())
                touched.append(view)


def _written(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None) -> torch.Tensor | None:
    """Return what a function has written into: a tensor, or the part of it that was assigned; None for a new result."""
    name = getattr(func, "__name__", "")
    if kwargs and isinstance(out := kwargs.get("out"), torch.Tensor):
        return out
    is_in_place = (name.endswith("_") and not name.endswith("__")) or name in _WRITING
    if not (is_in_place or (kwargs and kwargs.get("inplace") is True)) or not args:
        return None
    tensor = args[0]
    if not isinstance(tensor, torch.Tensor):
        return None
    if name == "__setitem__":
        part = tensor[args[1]]
        return part if _shares_memory(part, tensor) else tensor
    return tensor


def _is_view(value: Any, args: tuple[Any, ...]) -> bool:
    first = value if isinstance(value, torch.Tensor) else next(item for item in value if isinstance(item, torch.Tensor))
    return bool(args) and isinstance(args[0], torch.Tensor) and _shares_memory(first, args[0])


def _shares_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one is other or ((memory := memory_of(one)) is not None and memory == memory_of(other))


def _hidden_by(caller: FrameType, scope: _Scope) -> str | None:
    """Return why an operation is out of a tap's reach; None if it is not.

    Between the call of the innermost module and the operation, an activation checkpoint or compiled code began.
    """
    frame: FrameType | None = caller
    while frame is not None and frame.f_code is not CALL_OF_MODULE:
        file = frame.f_code.co_filename
        if file == _CHECKPOINT:
            return (
                "begins an activation checkpoint in its own forward. The backward pass repeats the operations in it "
                "outside the module, where no graft reaches them: make that part a module, and choose it"
            )
        if file.startswith(_COMPILED) or (file.startswith(_GENERATED) and not scope.names.is_forward(frame.f_code)):
            return "calls compiled code, which has no lines of source: run it without torch.compile"
        frame = frame.f_back
    return None


def _warn_of_hidden(scope: _Scope, why: str) -> None:
    text = f"gl.watch(inside=...): {scope.path.rstrip('.') or 'the model'} {why}. Those operations are not tapped"
    if text not in _warned:
        _warned.add(text)
        warn(text)


_warned: set[str] = set()


class InsideTaps:
    """A handle on the hooks of modules whose operations are tapped.

    ``chosen`` has the modules by the beginning of their taps' names. Their submodules have hooks too: what a submodule
    computes is tapped only if it is chosen itself. ``kinds`` collects the operation behind each tap; ``taken`` has the
    names of other taps.
    """

    def __init__(
        self,
        chosen: Mapping[str, torch.nn.Module],
        show: ShowOperation,
        kinds: dict[str, str],
        taken: Collection[str],
    ) -> None:
        self._show, self._kinds, self._taken = show, kinds, taken
        scopes: dict[torch.nn.Module, _Scope | None] = {}
        for path, module in chosen.items():
            scopes[module] = _Scope(path, NamesInside(module))
        for module in chosen.values():
            for inner in module.modules():
                scopes.setdefault(inner, None)
        self._scopes = scopes
        # One for all modules, so that a compiled model has one warning.
        first = f"{next(iter(chosen), '') or 'model.'}*"
        self._label = first if len(chosen) < 2 else f"{first} and those of {len(chosen) - 1} more modules"
        self._handles = [
            handle
            for module in scopes
            for handle in (
                module.register_forward_pre_hook(self.enter),
                # Also when the forward raises: otherwise the mode would tap what follows.
                module.register_forward_hook(self._leave, prepend=True, always_call=True),
            )
        ]

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Tap a module's operations, or a submodule's no longer, from now until its call ends.

        Does nothing for a module that is neither.
        """
        if module not in self._scopes:
            return
        scope = self._scopes[module]
        if torch.compiler.is_compiling():
            if scope is not None:
                torch.ops.graftlab.skip_(
                    compiled.clock,
                    self._label,
                    "compiled code has no lines of source; for taps inside a module, run it without torch.compile",
                )
            return
        if scope is not None and not taps.may_take(scope.path):
            scope = None
        calls = self._calls()
        mode = None
        if scope is not None and not any(each.mode for each in calls):
            mode = _OperationTapMode(calls, self._show, self._kinds, self._taken)
            mode.__enter__()  # type: ignore[no-untyped-call]
        calls.append(_OpenCall(module, scope, mode))

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():
            return
        calls = self._calls()
        # Another hook may have raised before this call was entered.
        if calls and calls[-1].module is module and (mode := calls.pop().mode) is not None:
            mode.__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _calls(self) -> list[_OpenCall]:
        if not hasattr(_open, "calls"):
            _open.calls = {}
        of_watches: dict[int, list[_OpenCall]] = _open.calls
        return of_watches.setdefault(id(self), [])
