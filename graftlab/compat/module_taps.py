"""Taps on the inputs and outputs of a model's modules, as SGLang's dumper has them."""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Callable
from typing import Any, Protocol

import torch

from graftlab.config import PREFIX
from graftlab.taps import calls
from graftlab.taps.hooks import Removable
from graftlab.taps.nested import tap_inside
from graftlab.taps.watch import ROOT, HookChange, Watch, unwrapped_modules

# What every engine calls the parts of a batch; their taps have these names wherever they are found.
_CORE = frozenset(
    {
        *("input_ids", "positions", "seq_lens", "req_pool_indices", "rids"),
        *("position_ids", "cu_seqlens_q", "cu_seqlens_kv", "qkv_format"),
    }
)
_LAYER = re.compile(r"(?:.+\.)?layers\.(\d+)")
_INDEX = re.compile(r"\[(\d+)\]")


class TagSetter(Protocol):
    """The dumper: whether it is on, its tags, and its taps."""

    @property
    def is_on(self) -> bool: ...

    def show(self, name: str, value: torch.Tensor) -> torch.Tensor: ...

    @property
    def context(self) -> dict[str, Any]: ...

    def set_ctx(self, **tags: Any) -> None: ...


def watch_modules(dumper: TagSetter, model: torch.nn.Module, *, core_only: bool) -> Watch:
    """Tap the modules of a model. With ``GRAFTLAB_COMPAT=sglang`` the taps have the names of SGLang's dumper.

    Those are ``non_intrusive__layers.0.mlp.output`` and ``non_intrusive__layers.0.mlp.inputs.0``. Otherwise an output
    has its module's name, as with :func:`graftlab.watch`.
    """
    modules = {path: module for path, (module, _) in unwrapped_modules(model).items()}
    taps = [_ModuleTaps(dumper, path, core_only) for path in modules]
    names = [each.output for each in taps if not core_only]
    if calls.tap_handler() is None:
        return Watch([], names)
    handles: list[Removable] = [HookChange()]
    for tapped, (path, module) in zip(taps, modules.items(), strict=True):
        if found := _LAYER.fullmatch(path):
            layer = _Layer(dumper, _number(module, int(found[1])))
            handles += [
                module.register_forward_pre_hook(layer.enter),
                module.register_forward_hook(tapped.after),
                module.register_forward_hook(layer.leave, always_call=True),
            ]
        elif path:
            handles.append(module.register_forward_hook(tapped.after))
        else:
            # Engines call the forward method of their model, which runs no hooks.
            handles.append(_ReplacedForward(module, tapped))
        if path:
            handles.append(module.register_forward_pre_hook(tapped.before, with_kwargs=True))
    return Watch(handles, names)


def _number(module: torch.nn.Module, in_path: int) -> int:
    """Return a layer's number in the whole model, which a stage of a pipeline counts differently."""
    given = getattr(module, "layer_id", None)
    if given is None and isinstance(from_one := getattr(module, "layer_number", None), int):
        given = from_one - 1
    return given if isinstance(given, int) else in_path


class _Layer:
    """Gives the taps inside a layer its number, and afterwards the number of the layer around it, if any."""

    def __init__(self, dumper: TagSetter, number: int) -> None:
        self._dumper, self._number = dumper, number
        self._outside: list[Any] = []

    def enter(self, module: torch.nn.Module, args: Any) -> None:
        self._outside.append(self._dumper.context.get("layer_id"))
        self._dumper.set_ctx(layer_id=self._number)

    def leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        if self._outside:
            self._dumper.set_ctx(layer_id=self._outside.pop())


class _ModuleTaps:
    def __init__(self, dumper: TagSetter, path: str, core_only: bool) -> None:
        self._dumper, self._path, self._core_only = dumper, path, core_only
        self._as_published = os.environ.get(f"{PREFIX}COMPAT") == "sglang"
        self.output = self._name(".output" if path else "output") if self._as_published else path or ROOT

    def before(self, module: torch.nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if not self._dumper.is_on:
            return None
        before = ".inputs" if self._path else "inputs"
        positional = tuple(self._shown(self._name(f"{before}.{place}"), value) for place, value in enumerate(args))
        by_name = {name: self._shown(self._name(f"{before}.{name}"), value) for name, value in kwargs.items()}
        return positional, by_name

    def after(self, module: torch.nn.Module, args: Any, output: Any) -> Any:
        if not self._dumper.is_on:
            return None
        shown = self._tap(self.output, output)
        return None if shown is output else shown

    def _name(self, inside: str) -> str:
        return f"{'non_intrusive__' if self._as_published else ''}{self._path}{inside}"

    def _shown(self, name: str, value: Any) -> Any:
        """Tap the tensors of an input. Objects, such as an engine's batch, are tapped at the model alone."""
        if self._path and not isinstance(value, torch.Tensor | tuple | list):
            return value
        return self._tap(name, value)

    def _tap(self, name: str, value: Any) -> Any:
        # Among the items of a tuple only the tensors count, and a single one has no number.
        tensors = (
            [place for place, item in enumerate(value) if isinstance(item, torch.Tensor)]
            if (isinstance(value, tuple | list))
            else []
        )

        def tap_one(found: str, tensor: torch.Tensor) -> Any:
            inside = found.removeprefix(name)
            key = re.split(r"[.\[\]]+", found)[-1] or found
            if key in _CORE and self._as_published | self._core_only:
                return self._dumper.show(key, tensor)
            if self._core_only:
                return tensor
            if self._as_published:
                if len(tensors) == 1:
                    inside = _INDEX.sub("", inside, count=1)
                elif (index := _INDEX.match(inside)) and int(index[1]) in tensors:
                    inside = f".{tensors.index(int(index[1]))}{inside[index.end() :]}"
                inside = _INDEX.sub(r".\1", inside)
            return self._dumper.show(f"{name}{inside}", tensor)

        return tap_inside(name, value, tap_one)


class _ReplacedForward:
    """A handle on a module whose ``forward`` is tapped, also where it is called directly."""

    def __init__(self, module: torch.nn.Module, tapped: _ModuleTaps) -> None:
        self._module = module
        forward: Callable[..., Any] = module.forward
        self._before = vars(module).get("forward")

        @functools.wraps(forward)
        def with_taps(*args: Any, **kwargs: Any) -> Any:
            args, kwargs = tapped.before(module, args, kwargs) or (args, kwargs)
            output = forward(*args, **kwargs)
            replaced = tapped.after(module, args, output)
            return output if replaced is None else replaced

        module.forward = with_taps

    def remove(self) -> None:
        if self._before is None:
            vars(self._module).pop("forward", None)
        else:
            self._module.forward = self._before
