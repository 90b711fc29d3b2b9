"""Warns of modules that were edited on disk after this rank imported them: a rank does not import them again."""

from __future__ import annotations

import os
import site
import sys
import sysconfig
import warnings

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
        self._files: dict[str, int | None] = {}
        if _of_forkserver is not None:
            self._names |= _of_forkserver._names
            self._files |= _of_forkserver._files

    def note(self) -> None:
        """Note the state of the files of modules that were imported since the last call."""
        new = sys.modules.keys() - self._names
        self._names |= new
        for name in new:
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


def note_before_forks() -> None:
    """Note what this process has imported, for the ranks that are forked from it.

    Each would need 20 ms to look at thousands of modules, and copy the memory that they share.
    """
    global _of_forkserver
    _of_forkserver = EditedModules()
    _of_forkserver.note()


def _modified_at(file: str) -> int | None:
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return None
