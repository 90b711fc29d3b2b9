"""The line of source that a torch operation comes from: the stack without torch, graftlab and the standard library."""

from __future__ import annotations

import linecache
import os
import re
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from types import CodeType, FrameType

import torch

from graftlab.taps.backward import ENGINE

# Rooms of graftlab that contain models. Their lines count as a user's code.
_ROOMS_OF_MODELS = ("engine", "models", "zoo")
_GRAFTLAB = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_MODELS = tuple(os.path.join(_GRAFTLAB, room) + os.sep for room in _ROOMS_OF_MODELS)
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_RANKS = os.path.join(_GRAFTLAB, "ranks") + os.sep
_TORCHS_MODULES = os.path.join(_TORCH, "nn", "modules") + os.sep
# These only call other modules.
_CALLING = ("module.py", "container.py")
_STANDARD = tuple(
    os.path.abspath(path) + os.sep for name in ("stdlib", "platstdlib") if (path := sysconfig.get_path(name))
)
_INSTALLED = (f"{os.sep}site-packages{os.sep}", f"{os.sep}dist-packages{os.sep}")
_INTERNAL, _OF_A_PACKAGE, _OF_THE_USER, _OF_A_RANK, _OF_TORCHS_MODULE = range(5)

# A notebook's cell, whose file is named by a number.
_CELL = re.compile(rf"{re.escape(os.sep)}ipykernel_\d+{re.escape(os.sep)}\d+\.py$")

# A stack of a model has tens of frames; generated code that calls itself may have thousands.
_MOST_FRAMES = 32


@dataclass(frozen=True)
class SourceFrame:
    """A line of source on the stack of an operation. ``line`` counts from 1; an unknown ``source`` is blank."""

    file: str
    line: int
    function: str
    source: str
    instruction: int = field(default=-1, compare=False, repr=False)
    """The instruction of the function, which distinguishes the calls of one line; -1 if unknown."""

    def __str__(self) -> str:
        name = "cell" if _CELL.search(self.file) else os.path.basename(self.file)
        return f"{name}:{self.line}"


@dataclass(frozen=True)
class StackEntry:
    """A position in running code. Without its text it is cheap enough to note for each operation."""

    code: CodeType
    line: int
    is_of_user: bool
    defines_modules: bool
    instruction: int = -1

    def read(self) -> SourceFrame:
        """Return the frame with its line of source."""
        # Read only now, because an entry is noted for each operation, and few are shown.
        source = linecache.getline(self.code.co_filename, self.line).strip()
        name = getattr(self.code, "co_qualname", self.code.co_name)
        return SourceFrame(self.code.co_filename, self.line, name.replace("<locals>.", ""), source, self.instruction)


class KnownCode:
    """What earlier calls of :func:`stack_entries` found out about code, which later ones share."""

    def __init__(self) -> None:
        self.entries: dict[tuple[int, int], StackEntry] = {}
        self.kinds: dict[int, tuple[int, CodeType]] = {}
        """By the id of code. The code is held here, so no other object gets its id."""


def stack_entries(frame: FrameType | None = None, known: KnownCode | None = None) -> list[StackEntry]:
    """Return the calling code's stack, innermost first, without torch, graftlab and the standard library.

    ``frame`` is the first frame, by default the caller's. A stack without any other code, as when an expression calls
    torch's own modules, has the lines of those modules.
    """
    known = KnownCode() if known is None else known
    entries, kinds = known.entries, known.kinds
    each: FrameType | None = sys._getframe(1) if frame is None else frame
    found: list[StackEntry] = []
    modules: list[StackEntry] = []
    while each is not None and len(found) < _MOST_FRAMES:
        code = each.f_code
        kind, _ = kinds.get(id(code)) or kinds.setdefault(id(code), (_kind(code), code))
        if kind in (_OF_A_PACKAGE, _OF_THE_USER):
            place = id(code), each.f_lasti
            if place not in entries:
                line = each.f_lineno or code.co_firstlineno
                entries[place] = StackEntry(code, line, kind == _OF_THE_USER, _has_modules(each), each.f_lasti)
            found.append(entries[place])
        elif kind == _OF_A_RANK:
            # The callers of this are the rank's loop and the start of the process.
            break
        elif kind == _OF_TORCHS_MODULE and not found:
            modules.append(StackEntry(code, each.f_lineno or code.co_firstlineno, False, True))
        each = each.f_back
    return found or modules


def runs_in_backward(stack: Sequence[StackEntry], frame: FrameType) -> bool:
    """Whether autograd has called the innermost entry of ``frame``'s stack, which is the user's own code."""
    if not stack or not stack[0].is_of_user:
        return False
    each: FrameType | None = frame
    while each is not None and each.f_code is not stack[0].code:
        if each.f_code.co_name == ENGINE:
            return False
        each = each.f_back
    return each is not None


def _kind(code: CodeType) -> int:
    """Whose code this is, as in :func:`_origin`, with the internal code that matters to a stack apart."""
    file = code.co_filename
    origin = _origin(file)
    if origin != _INTERNAL:
        return origin
    if file.startswith(_RANKS):
        return _OF_A_RANK
    return _OF_TORCHS_MODULE if file.startswith(_TORCHS_MODULES) and not file.endswith(_CALLING) else _INTERNAL


def model_entry(stack: Sequence[StackEntry]) -> StackEntry | None:
    """Return the entry to show for an operation: the model's line, not one in a package's helper. That is the innermost
    entry, if it is the user's own code or in a file that defines modules. For an installed helper (a model library's
    attention function, an einops call) the innermost entry of such a file is returned, or without one the helper's.
    """
    if not stack:
        return None
    innermost = stack[0]
    if innermost.is_of_user:
        return innermost
    # A notebook defines modules and also calls packages' functions. Only its modules' methods are a model's code.
    for each in stack:
        if each.defines_modules and (not each.is_of_user or each.code.co_varnames[:1] == ("self",)):
            return each
    return innermost


def model_frame(frame: FrameType) -> FrameType | None:
    """Return the running frame that :func:`model_entry` would choose from this one's stack; None without any."""
    innermost: FrameType | None = None
    each: FrameType | None = frame
    while each is not None:
        origin = _origin(each.f_code.co_filename)
        if origin != _INTERNAL:
            if innermost is None:
                innermost = each
                if origin == _OF_THE_USER:
                    return each
            if _has_modules(each) and (origin == _OF_A_PACKAGE or each.f_code.co_varnames[:1] == ("self",)):
                return each
        each = each.f_back
    return innermost


def is_of_graftlab(code: CodeType) -> bool:
    """Whether code is graftlab's, and not one of its example models."""
    return code.co_filename.startswith(_GRAFTLAB) and _origin(code.co_filename) == _INTERNAL


_LINE = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>.+)\n(?:[ \t]+(?P<source>\S.*))?')


def frames_of_traceback(text: str) -> tuple[SourceFrame, ...]:
    """Return the lines of a printed stack, innermost first, without those of torch, graftlab and Python.

    >>> from graftlab.lines.frames import frames_of_traceback
    >>> frames_of_traceback('  File "/home/me/model.py", line 3, in forward\\n    return x * 2\\n')[0].source
    'return x * 2'
    """
    found = [
        SourceFrame(each["file"], int(each["line"]), each["function"], (each["source"] or "").strip())
        for each in _LINE.finditer(text)
        if is_of_model_code(each["file"])
    ]
    return tuple(reversed(found))


def is_of_model_code(file: str) -> bool:
    """Return whether a file is neither part of torch, nor of graftlab, nor of Python."""
    return _origin(file) != _INTERNAL


@lru_cache(maxsize=4096)
def _origin(file: str) -> int:
    """Whose code a file is: the user's, unless it is installed, or part of torch, graftlab or Python."""
    if file == "<string>":
        # The name of all generated code without a file. From Python 3.13 on, linecache has a text for it: that of
        # python -c, with which ranks' processes start.
        return _INTERNAL
    if file.startswith("<"):
        # Without a text it is generated code, such as the __init__ of a dataclass.
        return _OF_THE_USER if linecache.getline(file, 1) else _INTERNAL
    path = os.path.abspath(file)
    if path.startswith(_MODELS):
        return _OF_THE_USER
    if path.startswith((_TORCH, _GRAFTLAB)):
        return _INTERNAL
    if any(part in path for part in _INSTALLED):
        return _OF_A_PACKAGE
    return _INTERNAL if path.startswith(_STANDARD) else _OF_THE_USER


# Cached by file: a module's classes are defined before any of its functions runs in a model.
_files_with_modules: dict[str, bool] = {}


def _has_modules(frame: FrameType) -> bool:
    """Whether a frame's file defines a subclass of ``torch.nn.Module``."""
    file = frame.f_code.co_filename
    known = _files_with_modules.get(file)
    if known is None:
        name = frame.f_globals.get("__name__")
        classes = [each for each in list(frame.f_globals.values()) if isinstance(each, type)]
        known = any(issubclass(each, torch.nn.Module) and each.__module__ == name for each in classes)
        _files_with_modules[file] = known
    return known
