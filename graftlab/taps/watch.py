"""``watch``: taps on every module's output, without changes to the model's code."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from graftlab.base.quantisation import weight_tap
from graftlab.filters.expressions import compile_filter
from graftlab.taps import calls as taps
from graftlab.taps import compiled
from graftlab.taps.hooks import Removable, after_call, before_call, is_called_from_python
from graftlab.taps.inside import InsideTaps
from graftlab.taps.module_inputs import ArgumentTaps, WatchedModule, WatchedModules
from graftlab.taps.nested import PlacedArguments, tap_inside
from graftlab.taps.wrappers import forward_of, unwrapped

_latest_change = 0

# The name of the root module's output, because its name in named_modules is empty.
ROOT = "output"

Chooser = str | Callable[[str], bool] | None
Extras = Callable[[torch.nn.Module, tuple[Any, ...], Any], Any]


_kinds: dict[str, str] = {}


def kinds_of_watched() -> Mapping[str, str]:
    """Return the module's class, or the operation, behind each watched tap by its name; a view, which grows."""
    return MappingProxyType(_kinds)


def latest_change() -> int:
    """Return a number that changes when taps of modules are added or removed, for captured graphs to check."""
    return _latest_change


class HookChange:
    """A handle that counts a change of taps when a watch is created and when it is removed."""

    def __init__(self) -> None:
        self.remove()

    def remove(self) -> None:
        global _latest_change
        _latest_change += 1
        if "torch._dynamo" in sys.modules:
            # Compiled code does not notice added or removed hooks: their taps would silently be missing.
            torch.compiler.reset()


class Watch:
    """A handle on the taps of a ``watch``, which can be used as a context manager. ``names`` lists the taps.

    >>> watched = gl.watch(torch.nn.Linear(3, 4))
    >>> watched.names
    ['output']
    >>> watched.remove()
    """

    def __init__(
        self,
        handles: Sequence[Removable],
        names: list[str],
        at_call: Callable[[tuple[Any, ...], dict[str, Any]], tuple[Any, Any] | None] | None = None,
    ) -> None:
        self._handles = handles
        self._at_call = at_call
        self.names = names

    def catch_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Do what the taps do before a call of the model, for one that had begun before it was watched.

        Returns other positional arguments if a graft replaced some; keyword arguments are replaced in the dict.
        """
        replaced = None if self._at_call is None else self._at_call(args, kwargs)
        if replaced is None:
            return None
        kwargs.update(replaced[1])
        positional: tuple[Any, ...] = replaced[0]
        return positional

    def remove(self) -> None:
        """Remove the taps, which restores the model or the optimizer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def __repr__(self) -> str:
        return f"<graftlab.Watch of {len(self.names) if self._handles else 0} taps>"


def watch(
    model: torch.nn.Module,
    prefix: str = "",
    include: Chooser = None,
    exclude: Chooser = None,
    *,
    extras: Extras | None = None,
    grads: bool = False,
    functions: Sequence[str] = (),
    inside: Chooser = None,
    params: bool = False,
    inputs: bool = False,
) -> Watch:
    """Tap the output of every module of ``model``, in execution order.

    A tap's name is ``prefix`` plus the module's name in ``named_modules``; the model's own output is ``"output"``. The
    parts that wrappers add to names (``module.`` of DDP, ``_orig_mod.`` of ``torch.compile``, ``base_model.model.`` of
    PEFT, those of FSDP and activation checkpointing) are left out, so that a model has the same names with and without
    wrappers. A wrapper and its module are one tap, at the wrapper's output, with the type of the wrapped module.
    Tensors inside an output are named ``name[0]`` (tuples, lists) and ``name.key`` (dicts, dataclasses, Hugging Face
    ``ModelOutput``). A graft replaces the tensor in the output; the module's own tensor is not modified.

    A module of TorchScript is one tap; what it computes inside has none.

    ``include`` and ``exclude`` choose modules: a filter expression over ``name`` and ``type`` (the class name), such as
    ``"search('attn', name) or type == 'LayerNorm'"``, or a function of the name.

    ``extras(module, inputs, output)`` returns the extras of this output's tensors, as for ``gl.tap``: for example the
    request ids by which ``align_by_request`` pairs rows. ``inputs`` is the tuple of positional arguments. By default
    there are no extras.

    With ``grads`` the gradient of each tapped tensor is a tap too, as with ``grad`` of ``gl.tap``: with the same name
    and the tag ``kind="grad"``, in the order of the backward pass.

    ``functions`` are names of torch functions, such as ``"scaled_dot_product_attention"``. Each call inside the model
    shows its tensors, as ``scaled_dot_product_attention.in[0]``, ``.in.attn_mask`` and ``.out``, so that
    implementations that are split into different modules share taps. Calls in a step are distinguished by occurrence.

    ``inside`` chooses modules as ``include`` does, and taps each torch function that their own code calls, submodules
    apart. A tap's name is the module's and the variable that gets the result, such as ``self_attn.q_rot``, or else the
    line of source and the operation, such as ``self_attn.L241.matmul``. A helper's name comes before its variables and
    lines: ``self_attn.rotate.x1``. A graft replaces the result for what follows it. Code that ``torch.compile``
    compiles is left out, with a warning.

    With ``params`` each weight and buffer is a tap too, once per step, at the model's first call: under its name in
    ``state_dict()``, with the tag ``kind="param"``. ``include`` and ``exclude`` choose among them by that name and by
    the type of the owning module. A graft of such a tap changes the weight permanently; a verdict only compares them.
    With ``inputs`` the tensors among the model's arguments are taps, named after the parameters of its ``forward``
    (``input.input_ids``), with ``kind="input"``.

    Outside a session no hook is installed, and the handle only lists the names. ``names`` includes neither inputs
    nor operations, which are unknown before a call.

    Raises :class:`FilterError` for an invalid expression, ValueError for an unknown torch function, and TypeError if
    ``model`` is not a module.

    >>> model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.GELU())
    >>> with gl.watch(model, prefix="mlp.", exclude="type == 'GELU'") as watched:
    ...     watched.names
    ['mlp.output', 'mlp.0']
    """
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"gl.watch taps a torch.nn.Module, not {type(model).__name__}")
    called = named_functions(functions)
    wanted, unwanted = chooser(include, default=True), chooser(exclude, default=False)
    looked_into = chooser(inside, default=False)
    chosen: list[tuple[str, torch.nn.Module]] = []
    for path, (module, kind) in unwrapped_modules(model).items():
        name = prefix + (path or ROOT)
        if wanted(name, kind) and not unwanted(name, kind):
            chosen.append((name, module))
            _kinds[name] = kind
    weights = weights_of(model, prefix, wanted, unwanted) if params else {}
    names = [*weights, *(name for name, _ in chosen)]
    if taps.tap_handler() is None:
        return Watch([], names)
    # Only now, so that an invalid choice leaves the model unchanged.
    handles: list[Removable] = [HookChange()]
    at_call: list[Callable[..., Any]] = []
    input_taps = None
    if params:
        find = partial(weights_of, model, prefix, wanted, unwanted)
        # Before the hooks of FSDP, which replace shards by whole weights.
        at_call.append(_WeightTaps(find))
        handles.append(before_call(model, at_call[-1], prepend=True))
    if inputs:
        tap_one = partial(_tap_input, f"{prefix}input.")
        input_taps = ArgumentTaps(forward_of(model), lambda: tap_one, tap_inside)
        placed = PlacedArguments()
        in_place = ArgumentTaps(forward_of(model), lambda: tap_one, placed.tap)
        handles.append(before_call(model, in_place))
        handles.append(after_call(model, placed.take_back, always_call=True))
    modules = dict(model.named_modules())
    handles += [after_call(module, _hook(name, extras, grads)) for name, module in chosen]
    handles.append(
        WatchedModules(
            (module, WatchedModule(name, prefix if module is model else f"{name}.")) for name, module in chosen
        )
    )
    if called:
        handles.append(function_taps := FunctionTaps(model, called, prefix, partial(_show_call, grads)))
        at_call.append(function_taps.enter)
    if inside is not None:
        # The wrapped modules, because a wrapper's forward is not the model's code.
        within = {unwrapped(path, modules): module for path, module in modules.items()}
        own = {
            f"{prefix}{path}." if path else prefix: module
            for path, module in within.items()
            if looked_into(prefix + (path or ROOT), _type_of(module))
        }
        taken = {prefix + (path or ROOT) for path in within}
        inner = InsideTaps(own, partial(_show_operation, grads), _kinds, taken)
        handles.append(inner)
        at_call.append(inner.enter)

    def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        replaced = None if input_taps is None else input_taps(model, args, kwargs)
        for each in at_call:
            each(model, args)
        return replaced

    return Watch(handles, names, begin)


def _show_call(grads: bool, name: str, value: Any) -> Any:
    return value if taps.tap_handler() is None else tap_inside(name, value, partial(_tap_value, None, grads))


def _show_operation(grads: bool, name: str, value: torch.Tensor, *, replace: bool, tags: Mapping[str, Any]) -> Any:
    return taps.show(name, value, None, replace=replace, grad=grads, tags=tags)


Chosen = Callable[[str, str], bool]


def weights_of(
    model: torch.nn.Module, prefix: str, wanted: Chosen, unwanted: Chosen, *, buffers: bool = True
) -> dict[str, torch.Tensor]:
    """Return a model's parameters and buffers by their names without wrappers' parts; a tied one by its first name.

    They are looked up each time, because wrappers and optimizers replace them.
    """
    modules = dict(model.named_modules())
    found: dict[str, torch.Tensor] = {}
    for path, tensor in (*model.named_parameters(), *(model.named_buffers() if buffers else ())):
        owner, _, leaf = path.rpartition(".")
        inside = unwrapped(owner, modules) if owner else ""
        name = f"{prefix}{inside}.{leaf}" if inside else f"{prefix}{leaf}"
        kind = _type_of(modules[owner])
        if wanted(name, kind) and not unwanted(name, kind):
            found[name] = tensor
    return found


class _WeightTaps:
    """Taps the weights at the model's first call in a step."""

    def __init__(self, find: Callable[[], Mapping[str, torch.Tensor]]) -> None:
        self._find = find
        self._shown_at: object = None

    def __call__(self, module: torch.nn.Module, args: Any, kwargs: Any = None) -> None:
        handler, grafter = taps.tap_handler(), taps.grafter()
        if handler is None or grafter is None:
            return
        if torch.compiler.is_compiling():
            torch.ops.graftlab.skip_(compiled.clock, "weights", "they are not shown; watch the compiled module")
            return
        if grafter.moment == self._shown_at:
            return
        self._shown_at = grafter.moment
        tensors = self._find()
        for name in tensors:
            handler.tap(name, *weight_tap(name, tensors), {"kind": "param"})
        # The first tap may have made this process a rank, with its own count of steps.
        grafter = taps.grafter()
        self._shown_at = None if grafter is None else grafter.moment


def unwrapped_modules(model: torch.nn.Module) -> dict[str, tuple[torch.nn.Module, str]]:
    """Return modules by names without wrappers' parts: of equal names, the outermost module and the innermost type.

    Those inside a module of TorchScript are left out, because Python does not call them.
    """
    found: dict[str, tuple[torch.nn.Module, str]] = {}
    modules = dict(model.named_modules())
    for path, module in modules.items():
        if not is_called_from_python(path, modules):
            continue
        name = unwrapped(path, modules)
        found[name] = (found[name][0] if name in found else module, _type_of(module))
    return found


def _type_of(module: torch.nn.Module) -> str:
    """Return the name of a module's original class, which ``fully_shard`` and TorchScript replace."""
    if isinstance(module, torch.jit.ScriptModule):
        return str(module.original_name)
    mine = type(module)
    own = [base for base in mine.__bases__ if base.__name__ != "FSDPModule"]
    return own[0].__name__ if len(own) < len(mine.__bases__) and own else mine.__name__


def chooser(choice: Chooser, *, default: bool) -> Callable[[str, str], bool]:
    """Return a predicate of name and type; see :func:`watch`."""
    if choice is None:
        return lambda name, kind: default
    if callable(choice):
        function = choice
        return lambda name, kind: bool(function(name))
    filter_ = compile_filter(choice)
    return lambda name, kind: filter_.matches({"name": name, "type": kind})


def _hook(name: str, extras: Extras | None, grads: bool) -> Callable[[torch.nn.Module, Any, Any], Any]:
    def tap_output(module: torch.nn.Module, args: Any, output: Any) -> Any:
        if taps.tap_handler() is None:
            return None
        tap_one = partial(_tap_value, None if extras is None else extras(module, args, output), grads)
        replaced = tap_inside(name, output, tap_one)
        # None makes torch keep the object that the module returned. A tracer cannot tell whether it is the same.
        return None if not taps.is_tracing() and replaced is output else replaced

    return tap_output


def _tap_value(extras: Any, grads: bool, name: str, value: torch.Tensor) -> Any:
    return taps.show(name, value, extras, replace=True, grad=grads)


def _tap_input(prefix: str, name: str, value: torch.Tensor) -> Any:
    return taps.show(f"{prefix}{name}", value, None, replace=True, tags={"kind": "input"})


# ---- the torch functions that a model calls -------------------------------------------------------------------------

Show = Callable[[str, Any], Any]
"""Shows a value under a name; returns the value to continue with."""


class _FunctionTapMode(TorchFunctionMode):
    """While active, taps the tensors in calls of some functions."""

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
    """A handle on a model's hooks that tap the torch functions called during its forward pass."""

    def __init__(self, model: torch.nn.Module, functions: frozenset[str], prefix: str, show: Show) -> None:
        self._functions, self._prefix, self._show = functions, prefix, show
        # Each thread may run a forward pass, and forward passes may be nested.
        self._open = threading.local()
        self._handles = (
            model.register_forward_pre_hook(self.enter, prepend=True),
            # Also when the forward pass raises: otherwise the mode would tap everything after it.
            model.register_forward_hook(self._leave, always_call=True),
        )

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        """Tap functions from now until the model's call ends."""
        mode = _FunctionTapMode(self._functions, self._prefix, self._show)
        mode.__enter__()  # type: ignore[no-untyped-call]
        self._modes().append(mode)

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if modes := self._modes():
            modes.pop().__exit__(None, None, None)  # type: ignore[no-untyped-call]

    def _modes(self) -> list[_FunctionTapMode]:
        if not hasattr(self._open, "modes"):
            self._open.modes = []
        modes: list[_FunctionTapMode] = self._open.modes
        return modes


def named_functions(functions: Iterable[str]) -> frozenset[str]:
    """Return the names of torch functions. Raises TypeError or ValueError for anything else."""
    if isinstance(functions, str):
        raise TypeError(f"functions is a sequence of names, such as ({functions!r},)")
    names = frozenset(functions)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"functions are given by name, not as {type(name).__name__}")
        if not any(hasattr(place, name) for place in (torch, torch.nn.functional, torch.Tensor, torch.linalg)):
            raise ValueError(f"torch has no function {name!r}; write 'scaled_dot_product_attention' or 'softmax'")
    return names
