"""A rank has no terminal: code that asks for input is refused at once, with advice."""

from __future__ import annotations

import sys
from typing import Any

import pytest
from kit.support import run_cell

import graftlab as gl

pytestmark = pytest.mark.ranks


CELLS = {
    "input": "answer = input('go on? ')",
    "read": "import sys\nsys.stdin.read()",
    "lines": "import sys\nlist(sys.stdin)",
    "breakpoint": "breakpoint()",
    "pdb": "import pdb\npdb.set_trace()\nx = 1",
    "post mortem": "import pdb\ntry:\n    1 / 0\nexcept ZeroDivisionError as e:\n    pdb.post_mortem(e.__traceback__)",
}


@pytest.mark.parametrize("what", CELLS)
def test_input_and_debuggers_are_refused_at_once_with_advice(what: str, session: gl.Session) -> None:
    # coverage.py traces the rank, too.
    before = session.run(None, lambda: type(sys.gettrace()).__name__).target
    with pytest.raises(gl.RunError) as caught:
        session.execute(CELLS[what], "target[0]")
    said = str(caught.value)
    if what in ("input", "read", "lines"):
        assert "input() cannot be answered on a rank, which has no terminal; pass the value as an argument" in said
    else:
        assert "a debugger cannot be used on a rank, which has no terminal; `%graft debug target[0]`" in said
    assert "BdbQuit" not in said
    assert "EOF" not in said
    # The rank keeps running, and no debugger traces it.
    assert session.run(None, lambda: type(sys.gettrace()).__name__).target == before


def test_the_line_that_asked_for_input_is_shown(session: gl.Session) -> None:
    ask: Any = run_cell("def ask():\n    return input('name? ')")["ask"]
    with pytest.raises(gl.RunError, match=r"return input\('name\? '\)"):
        session.run(ask, None)


def test_stdin_is_not_a_terminal(session: gl.Session) -> None:
    looked = session.run(None, lambda: (sys.stdin.isatty(), sys.stdin.fileno(), sys.stdin.readable())).target
    assert looked == [(False, 0, True)]
