"""Replace the imports of another kit's modules by graftlab's, as ``GRAFTLAB_COMPAT`` asks for."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import Iterable, Sequence
from types import ModuleType

from graftlab.config import PREFIX
from graftlab.errors import ConfigError

_KITS = {"sglang": {"sglang.srt.debug_utils.dumper": "graftlab.compat.sglang_dumper"}}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds modules by full name, and makes them of graftlab's."""

    def __init__(self, modules: dict[str, str]) -> None:
        self._modules = modules

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(fullname, self) if fullname in self._modules else None

    def exec_module(self, module: ModuleType) -> None:
        ours = importlib.import_module(self._modules[module.__name__])
        public = {name: value for name, value in vars(ours).items() if not name.startswith("__")}
        module.__dict__.update(public)


class _ParentFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the packages around the replaced modules as empty ones, where the kit itself is not installed."""

    def __init__(self, modules: Iterable[str]) -> None:
        self._packages = {parent for name in modules for parent in _parents(name)}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self._packages:
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def exec_module(self, module: ModuleType) -> None:
        module.__doc__ = "An empty package, which graftlab made because GRAFTLAB_COMPAT replaces a module in it."


def _parents(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[:count]) for count in range(1, len(parts))]


def replace_imports() -> None:
    """Replace the modules of the kit that ``GRAFTLAB_COMPAT`` names. Raises :class:`ConfigError` for an unknown kit."""
    kit = os.environ.get(f"{PREFIX}COMPAT")
    if not kit:
        return
    if kit not in _KITS:
        raise ConfigError(f"compat ({PREFIX}COMPAT) is {kit!r}; it takes {', '.join(_KITS)}")
    late = [name for name in _KITS[kit] if name in sys.modules]
    if late:
        raise ConfigError(f"{late[0]} was imported before graftlab, which could not replace it; import graftlab first")
    sys.meta_path.insert(0, _Finder(_KITS[kit]))
    # Last, so that an installed kit is found first.
    sys.meta_path.append(_ParentFinder(_KITS[kit]))
