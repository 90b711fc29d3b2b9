"""Hooks on modules. Those of TorchScript refuse hooks, but torch's hooks on all modules see their calls."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class Removable(Protocol):
    """A hook handle."""

    def remove(self) -> None: ...


def before_call(
    module: torch.nn.Module, hook: Callable[[torch.nn.Module, Any, Any], _Arguments | None], *, prepend: bool = False
) -> Removable:
    """Register a forward pre-hook with keyword arguments, which a module of TorchScript does not show it."""
    if not isinstance(module, torch.jit.ScriptModule):
        return module.register_forward_pre_hook(hook, with_kwargs=True, prepend=prepend)

    def of_module(called: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
        replaced = hook(called, args, {}) if called is module else None
        return None if replaced is None else replaced[0]

    # torch's annotation does not know that a hook may replace the arguments.
    return register_module_forward_pre_hook(of_module)  # type: ignore[arg-type]


def after_call(
    module: torch.nn.Module, hook: Callable[[torch.nn.Module, Any, Any], Any], *, always_call: bool = False
) -> Removable:
    """Register a forward hook."""
    if not isinstance(module, torch.jit.ScriptModule):
        return module.register_forward_hook(hook, always_call=always_call)
    return register_module_forward_hook(
        lambda called, args, result: hook(called, args, result) if called is module else None, always_call=always_call
    )


def is_called_from_python(path: str, modules: dict[str, torch.nn.Module]) -> bool:
    """Whether Python may call the module at this path, so that hooks see it: not inside a module of TorchScript."""
    parts = path.split(".") if path else []
    above = (modules[".".join(parts[:place])] for place in range(len(parts)))
    return not any(isinstance(each, torch.jit.ScriptModule) for each in above)
