"""Warns of modules that were edited on disk after this rank imported them: a rank does not import them again."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import warnings
from contextlib import suppress
from itertools import takewhile
from types import ModuleType

import graftlab.errors
from graftlab.errors import GraftWarning

# Modules of these folders are not edited between two runs, and they are thousands.
_INSTALLED = (
    *(sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib", "purelib", "platlib")),
    *(folder + os.sep for folder in (*site.getsitepackages(), site.getusersitepackages())),
    os.path.dirname(graftlab.errors.__file__) + os.sep,
)


class EditedModules:
    """The user's modules on this rank. :meth:`note` and :meth:`warn_of_edits` are called after and before each run."""

    def __init__(self) -> None:
        self._names: set[str] = set()
        self._files: dict[str, int | None] = dict(_of_forkserver._files) if _of_forkserver else {}

    def note(self) -> None:
        """Note the state of the files of modules that were imported since the last call."""
        for name in _imported_since_the_fork():
            if name in self._names:
                continue
            self._names.add(name)
            file = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(file, str) and file.endswith(".py") and not file.startswith(_INSTALLED):
                self._files.setdefault(file, _modified_at(file))

    def warn_of_edits(self) -> None:
        """Warn once of each edit of a noted file."""
        for file, before in self._files.items():
            now = _modified_at(file)
            if now is not None and now != before:
                self._files[file] = now
                text = (
                    f"{file} was edited after this rank had imported it, and the rank continues with the code from "
                    "before, even if the notebook has reloaded it; session.restart(), or %graft restart, starts ranks "
                    "that import it anew"
                )
                warnings.warn_explicit(text, GraftWarning, file, 1)


_of_forkserver: EditedModules | None = None
# The module that the forkserver imported last.
_last_of_forkserver: tuple[str, ModuleType] | None = None


def note_before_forks() -> None:
    """Note what this process has imported, for the ranks that are forked from it.

    Each would need 20 ms to look at thousands of modules, and copy the memory that they share.
    """
    global _of_forkserver, _last_of_forkserver
    _of_forkserver = EditedModules()
    _of_forkserver.note()
    _last_of_forkserver = next(reversed(sys.modules.items()))


def _imported_since_the_fork() -> list[str]:
    """The names of the modules that the forkserver had not imported, newest first; without a forkserver all.

    To look at a name is to write to its reference count: a rank that looked at all would copy 5 MB of shared memory.
    """
    while True:
        # Another thread may import a module between the steps, and then all names are looked at again.
        with suppress(RuntimeError):
            newest_first = reversed(sys.modules)
            if _last_of_forkserver is not None:
                name, module = _last_of_forkserver
                # One that was imported again has moved.
                if sys.modules.get(name) is module:
                    return list(takewhile(name.__ne__, newest_first))
            return list(newest_first)


def _modified_at(file: str) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None
