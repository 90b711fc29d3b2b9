"""What a rank has in the place of a keyboard: it refuses to wait for an answer that nobody can give."""

from __future__ import annotations

import io
import sys
from typing import Any, NoReturn

from graftlab.errors import SessionError

_INPUT = (
    "nobody can answer input() on a rank, which has no terminal; pass what it needs as an argument "
    "(session.run(f, f, args=(...,))), or set a variable there with a %%graft cell"
)
_DEBUGGER = (
    "nobody can answer a debugger on a rank, which has no terminal; `%graft debug target[0]` (session.post_mortem) "
    "looks into the frames of what failed there, as this has now, `%graft stacks` (session.stacks()) shows where each "
    "rank is, and `%%graft target[0]` runs a cell on one rank"
)
_DEBUGGERS = frozenset({"pdb", "bdb", "ipdb", "IPython.core.debugger"})


class RefusedInput(io.TextIOBase):
    """``sys.stdin`` of a rank. Whatever would read from it raises :class:`SessionError`; it is no terminal."""

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return "utf-8"

    def readable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return False

    def fileno(self) -> int:
        return 0

    def readline(self, size: int = -1, /) -> NoReturn:  # type: ignore[override]
        _refuse()

    def read(self, size: int | None = -1, /) -> NoReturn:
        _refuse()


def refuse_input() -> None:
    """Refuse input and debuggers in this process from now on."""
    sys.stdin = RefusedInput()
    sys.breakpointhook = _breakpoint


def _breakpoint(*_: Any, **__: Any) -> NoReturn:
    raise SessionError(_DEBUGGER)


def _refuse() -> NoReturn:
    frame = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__") in _DEBUGGERS:
            raise SessionError(_DEBUGGER)
        frame = frame.f_back  # type: ignore[assignment]
    raise SessionError(_INPUT)
