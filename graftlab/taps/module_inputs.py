"""Taps on what modules are given: the model's arguments, and for a verdict those of the watched modules that it asks
about.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch

from graftlab.base.tensor_bytes import DTYPE_NAMES
from graftlab.taps import calls as taps
from graftlab.taps.hooks import before_call
from graftlab.taps.nested import TapOne, tap_in_tuples
from graftlab.taps.wrappers import forward_of

if TYPE_CHECKING:
    from typing_extensions import Self

KIND = "module_input"
"""The tag ``kind`` of the inputs of modules inside a model."""
SUFFIX = ".in"
"""What follows the name of a module's tap in the name of its inputs' taps."""
FIRST = "first"
"""The tag ``argument`` of a module's first tensor, which the sides may call differently."""

_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
_TapValue = Callable[[str, Any, TapOne], Any]


class ArgumentTaps:
    """A forward pre-hook with keyword arguments that taps the tensors among the arguments of a module's calls.

    ``forward`` has the names of the parameters. ``begin`` returns the function that taps the tensors of one call, under
    the names of their parameters, ``tap_value`` calls it for the tensors inside a value.
    """

    def __init__(self, forward: Callable[..., Any], begin: Callable[[], TapOne], tap_value: _TapValue) -> None:
        self._parameters = _positional(forward)
        self._begin = begin
        self._tap_value = tap_value

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if taps.tap_handler() is None:
            return None
        tap_one = self._begin()
        named = [self._parameters[i] if i < len(self._parameters) else f"[{i}]" for i in range(len(args))]
        positional = tuple(self._tap_value(name, value, tap_one) for name, value in zip(named, args, strict=True))
        by_name = {name: self._tap_value(name, value, tap_one) for name, value in kwargs.items()}
        same = all(new is old for new, old in zip(positional, args, strict=True))
        if same and all(by_name[name] is kwargs[name] for name in kwargs):
            return None
        return positional, by_name


def _positional(forward: Callable[..., Any]) -> list[str]:
    """The names of the parameters that may be positional."""
    if isinstance(forward, torch.ScriptMethod):
        return [each.name for each in forward.schema.arguments[1:]]
    return [each.name for each in inspect.signature(forward).parameters.values() if each.kind in _POSITIONAL]


@dataclass(frozen=True)
class WatchedModule:
    """A watched module's name, and the beginning of the names of all taps inside it."""

    name: str
    inside: str


_watched: weakref.WeakKeyDictionary[torch.nn.Module, list[WatchedModule]] = weakref.WeakKeyDictionary()
_open: ModuleInputs | None = None


class WatchedModules:
    """A handle on watched modules, whose inputs :class:`ModuleInputs` can tap."""

    def __init__(self, modules: Iterable[tuple[torch.nn.Module, WatchedModule]]) -> None:
        self._modules = list(modules)
        for module, watched in self._modules:
            _watched.setdefault(module, []).append(watched)
        if _open is not None:
            _open.tap(self._modules)

    def remove(self) -> None:
        for module, watched in self._modules:
            known = _watched[module]
            known.remove(watched)
            if not known:
                del _watched[module]
        self._modules = []


@dataclass(frozen=True)
class Argument:
    """A tensor that a module is given after its first one: the parameter's name, and what the tensor is like."""

    name: str
    dtype: str
    numel: int


@dataclass(frozen=True)
class ModuleCall:
    """A call of a watched module, by its name.

    ``within`` are the names of the watched modules whose forward is under way, the innermost first. ``function`` is the
    innermost function of the user's that calls the module; ``is_method`` if it is one of the first of ``within``.
    ``tensor`` is the number of its first tensor, the same for all calls that are given one tensor object; ``arguments``
    are the others, in order.
    """

    module: str
    within: tuple[str, ...] = ()
    function: str | None = None
    is_method: bool = False
    tensor: int | None = None
    arguments: tuple[Argument, ...] = ()


class ModuleInputs:
    """While open, the tensors that watched modules are given are taps, also of watches that begin meanwhile.

    ``wanted`` are names of this side's taps. The modules behind them are tapped, and the modules around these. Tuples
    are looked into, no other containers, since a module may write into those. A tap is called after the module's own
    tap, one of ``known``, with ``.in``; its tag ``argument`` is ``first``, or the parameter's name, or the name that
    ``renamed`` has for it by the module's tap. A graft gives the module a new tensor. A context manager for one thread;
    ``calls`` has the last call of each module by the tap's name.
    """

    def __init__(
        self, wanted: Sequence[str], known: Sequence[str], renamed: Mapping[str, Mapping[str, str]] | None = None
    ) -> None:
        self._wanted = wanted
        self._known = known
        self._renamed = renamed or {}
        self._handles: list[Any] = []
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}
        self._count = 0
        self.calls: dict[str, ModuleCall] = {}

    def __enter__(self) -> Self:
        global _open
        _open = self
        self.tap([(module, each) for module, names in list(_watched.items()) for each in names])
        return self

    def __exit__(self, *_: object) -> None:
        global _open
        _open = None
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def tap(self, modules: Iterable[tuple[torch.nn.Module, WatchedModule]]) -> None:
        """Tap the inputs of those of these modules that are wanted."""
        for module, watched in modules:
            if any(_is_output(watched.name, tap) or tap.startswith(watched.inside) for tap in self._wanted):
                begin = partial(self._begin, module, watched)
                hook = ArgumentTaps(forward_of(module), begin, tap_in_tuples)
                self._handles.append(before_call(module, hook))

    def _begin(self, module: torch.nn.Module, watched: WatchedModule) -> TapOne:
        tap = self._tap_of(watched)
        if not torch.compiler.is_compiling():
            self.calls[tap] = _call_of(module, watched.name)
        renamed = self._renamed.get(tap, {})
        is_first = True

        def tap_one(parameter: str, value: torch.Tensor) -> Any:
            nonlocal is_first
            call = self.calls.get(tap)
            if is_first:
                argument, is_first = FIRST, False
                if call is not None:
                    self.calls[tap] = replace(call, tensor=self._number(value))
            else:
                argument = renamed.get(parameter, parameter)
                if call is not None:
                    given = Argument(parameter, DTYPE_NAMES[value.dtype], value.numel())
                    self.calls[tap] = replace(call, arguments=(*call.arguments, given))
            tags = {"kind": KIND, "argument": argument}
            return taps.show(f"{tap}{SUFFIX}", value, None, replace=True, tags=tags)

        return tap_one

    def _number(self, tensor: torch.Tensor) -> int:
        """The number of a tensor object; another object at the place of a deleted one has another number."""
        reference, number = self._tensors.get(id(tensor), (None, 0))
        if reference is None or reference() is not tensor:
            self._count += 1
            number = self._count
            self._tensors[id(tensor)] = weakref.ref(tensor), number
        return number

    def _tap_of(self, watched: WatchedModule) -> str:
        """The known tap of a module's output, or of the first tensor in it; the module's name if there is none."""
        if watched.name in self._known:
            return watched.name
        return next((tap for tap in self._known if _is_output(watched.name, tap)), watched.name)


def _is_output(name: str, tap: str) -> bool:
    """Whether a tap shows the output of the module of this name, or a tensor in it."""
    return tap == name or tap.startswith(f"{name}[")


_OWN = tuple(f"{name}." for name in ("torch", "graftlab"))


def _call_of(module: torch.nn.Module, name: str) -> ModuleCall:
    """The call of a module that is under way, from its pre-hook."""
    within: list[str] = []
    function: str | None = None
    is_method = False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        # A method's first argument is its object, usually called self.
        code = frame.f_code
        own = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        around = _name_of(own) if isinstance(own, torch.nn.Module) and own is not module else None
        if function is None and not _is_own(frame.f_globals):
            function = code.co_name
            is_method = around is not None and not within
        if around is not None and around not in within:
            within.append(around)
        frame = frame.f_back
    return ModuleCall(name, tuple(within), function, is_method)


def _name_of(module: torch.nn.Module) -> str | None:
    known = _watched.get(module)
    return known[0].name if known else None


def _is_own(scope: Mapping[str, Any]) -> bool:
    """Whether a frame with these globals is one of torch's or graftlab's."""
    return f"{scope.get('__name__', '')}.".startswith(_OWN)
