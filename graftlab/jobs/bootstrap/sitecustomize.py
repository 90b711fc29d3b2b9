"""Imported by Python when it starts, in each process of a script that ``graftlab compare`` has started.

It imports nothing that the script does not import. Once torch has been imported, it passes the first call of a model to
graftlab.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import sys
from collections.abc import Sequence
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))
_TORCH = "torch.nn.modules.module"
_HOLDS_CALLS = "graftlab.taps.outermost_calls"


class _TorchWatcher:
    """Finds the module of ``torch.nn.Module`` by the other finders, and prepares it after its import."""

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != _TORCH:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            loader: Any = spec.loader
            execute = loader.exec_module

            def execute_and_prepare(module: Any) -> None:
                execute(module)
                _prepare(module.Module)

            loader.exec_module = execute_and_prepare
        return spec


def _prepare(base: Any) -> None:
    """Pass the first call of a module with parameters to graftlab."""
    call = base.__call__
    has_begun = False

    def first_call(module: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal has_begun
        if has_begun:
            # Code may still hold the `model.__call__` from before, as generate() does. So does torch.fx, which replaces
            # `Module.__call__` while it traces, as in compiling, by one that calls this: that would never end.
            present = base.__call__
            return (present if present.__module__ == _HOLDS_CALLS else call)(module, *args, **kwargs)
        if next(module.parameters(), None) is None or _traces(args, kwargs):
            return call(module, *args, **kwargs)
        has_begun = True
        base.__call__ = call
        return _graftlab().begin_from_environment(module, args, kwargs)

    base.__call__ = first_call


def _traces(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call is part of a torch.fx trace, which computes no values."""
    proxy = getattr(sys.modules.get("torch.fx"), "Proxy", ())
    return any(isinstance(value, proxy) for value in (*args, *kwargs.values()))


def _graftlab() -> Any:
    # The comparison may have graftlab on a path that a script does not inherit.
    may_lend = "GRAFTLAB_COMPARE_INJECT" in os.environ or sys.prefix == os.environ.get("GRAFTLAB_COMPARE_PREFIX")
    if may_lend and importlib.util.find_spec("graftlab") is None:
        sys.meta_path.append(_LentPackage(os.environ["GRAFTLAB_COMPARE_LENDS"]))
    try:
        return importlib.import_module("graftlab.jobs.held_script")
    except ImportError as error:
        sys.stderr.write(
            f"graftlab compare: {sys.executable} cannot import {error.name or 'graftlab'} ({error}). Install graftlab "
            f"there with `{sys.executable} -m pip install graftlab`, or give --inject, which lends it this copy\n"
        )
        sys.stderr.flush()
        os._exit(1)


class _LentPackage:
    """Finds graftlab, and nothing else, in the folder of the comparison's copy."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(self, name: str, path: Sequence[str] | None = None, target: Any = None) -> Any:
        if name != "graftlab":
            return None
        return importlib.machinery.PathFinder.find_spec(name, [self._folder])


def _import_shadowed() -> None:
    """Import the other sitecustomize that this one hides, if there is one."""
    hidden = [folder for folder in sys.path if os.path.abspath(folder or os.curdir) != _HERE]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", hidden)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


if "GRAFTLAB_COMPARE_FOLDER" in os.environ:
    sys.meta_path.insert(0, _TorchWatcher())
_import_shadowed()
