"""Call a function compiled by ``torch.compile``; each rank compiles it only once, however often it is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from graftlab.base import shipping
from graftlab.taps import calls
from graftlab.taps.compiled import only_taps
from graftlab.taps.routing import handled_by

GradMode = Literal["grad", "no_grad", "inference_mode"]
_MODES: dict[GradMode, Callable[[], AbstractContextManager[Any]]] = {
    "grad": torch.enable_grad,
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
}

# The function that this process compiled last, by its digest, options, taps, mode, and whether by its modules.
_compiled: dict[tuple[object, ...], Callable[..., Any]] = {}


def in_mode(mode: GradMode | None) -> AbstractContextManager[Any]:
    """Return a context in which torch computes gradients or not; the caller's mode for None."""
    return nullcontext() if mode is None else _MODES[mode]()


@dataclass(frozen=True)
class CompiledCall:
    """Calls a function through ``torch.compile``, with the taps of these names in its graphs (None: all taps).

    The function is either ``source``, an expression evaluated in the namespace of ``%%graft`` cells, or ``packed``.
    It is called in ``mode``. With ``by_modules`` the function itself runs as it is, and the outermost modules that it
    calls are compiled.
    """

    source: str | None
    packed: bytes | None
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None
    mode: GradMode | None = None
    by_modules: bool = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with in_mode(self.mode), only_taps(self.names):
            return self._function(args, kwargs)(*args, **kwargs)

    def called_anew(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Compile once more, and call."""
        _compiled.clear()
        return self(*args, **kwargs)

    def _function(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Callable[..., Any]:
        what = self.packed if self.packed is not None else str(self.source).encode()
        options = repr(sorted(self.options.items()))
        key = (hashlib.sha256(what).hexdigest(), options, self.names, self.mode, self.by_modules)
        if key not in _compiled:
            # After eight compilations of the same code torch runs it uncompiled, and reports that only in a log.
            torch.compiler.reset()
            _compiled.clear()
            function = self._unpacked()
            if self.by_modules:
                modules = outermost_modules(function, args, kwargs)
                _compiled[key] = _CompiledModules(function, modules, self.options)
            else:
                _compiled[key] = torch.compile(function, **self.options)
        return _compiled[key]

    def modules(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.nn.Module]:
        """Return the outermost modules that the function calls, which runs it uncompiled and without taps."""
        with in_mode(self.mode):
            return outermost_modules(self._unpacked(), args, kwargs)

    def _unpacked(self) -> Callable[..., Any]:
        if self.packed is not None:
            function: Callable[..., Any] = shipping.unpack_function(self.packed)
            return function
        here = calls.here()
        assert here is not None
        made: Callable[..., Any] = eval(f"lambda: ({self.source}\n)", here.vars)
        return made


def outermost_modules(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> list[torch.nn.Module]:
    """Return the modules that a function calls, without those that they call themselves."""
    found: dict[torch.nn.Module, None] = {}
    open_calls: list[torch.nn.Module] = []

    def enter(module: torch.nn.Module, inputs: Any) -> None:
        if not open_calls:
            found[module] = None
        open_calls.append(module)

    def leave(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        if open_calls:
            open_calls.pop()

    handles = (
        register_module_forward_pre_hook(enter),
        register_module_forward_hook(leave, always_call=True),
    )
    try:
        with handled_by(_NoTaps()):
            function(*args, **kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return list(found)


class _NoTaps:
    """A tap handler that ignores what taps show."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        return value


def _call_of(module: torch.nn.Module) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)  # type: ignore[no-untyped-call]

    # Not the method itself, as module.compile() takes it: in a module of torch's own that would compile nothing.
    return call


class _CompiledModules:
    """Calls a function while some modules are compiled, as by ``module.compile()``."""

    def __init__(
        self, function: Callable[..., Any], modules: list[torch.nn.Module], options: Mapping[str, Any]
    ) -> None:
        self._function = function
        self._compiled = {module: torch.compile(_call_of(module), **options) for module in modules}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self._in_place():
            return self._function(*args, **kwargs)

    @contextmanager
    def _in_place(self) -> Iterator[None]:
        before = {module: module._compiled_call_impl for module in self._compiled}
        try:
            for module, compiled in self._compiled.items():
                module._compiled_call_impl = compiled
            yield
        finally:
            for module, own in before.items():
                module._compiled_call_impl = own
