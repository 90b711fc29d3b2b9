"""How code runs in a rank's namespace, and how the exception that ended it is described to the notebook."""

from __future__ import annotations

import pickle
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from graftlab.ranks.messages import Evaluate, Execute
from graftlab.ranks.namespace import Namespace, failure_of


class TwoParts(Exception):
    """Can be pickled, but not read back: its class wants two arguments."""

    def __init__(self, one: str, other: str) -> None:
        super().__init__(f"{one} and {other}")


class Unprintable(Exception):
    def __str__(self) -> str:
        raise LookupError


class Local(Exception):
    def __reduce__(self) -> Any:
        raise TypeError("not to be pickled")


def test_an_exception_travels_as_itself() -> None:
    failure = failure_of(ValueError("no such factor: 3"))
    assert (failure.kind, failure.message) == ("ValueError", "no such factor: 3")
    assert repr(pickle.loads(failure.exception or b"")) == "ValueError('no such factor: 3')"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (TwoParts("one", "two"), "one and two"),
        (Local("x"), "x"),
        (Unprintable(), "(its message cannot be shown: str() of it raised LookupError)"),
        (SystemExit(3), "the code called exit(3); the rank keeps running"),
    ],
    ids=["not read back", "not pickled", "not printed", "exit"],
)
def test_an_exception_that_does_not_travel_or_print_is_described(error: BaseException, said: str) -> None:
    failure = failure_of(error)
    assert (failure.kind, failure.message) == (type(error).__name__, said)
    assert (failure.exception is None) == isinstance(error, (TwoParts, Local))


def test_a_cell_has_the_value_of_its_last_expression_and_its_own_language() -> None:
    space = Namespace(ModuleType("cells"))
    assert space.run(Execute("def f(x: int): return x\nf(3)", "<cell 1>")) == 3
    assert space.run(Execute("y = f(4)", "<cell 2>")) is None
    assert space.run(Execute("", "<cell 3>")) is None
    # Not that of the module which compiles it, whose annotations are texts.
    assert space.run(Execute("def g(x: int): ...\ng.__annotations__", "<cell 4>")) == {"x": int}
    assert space.run(Evaluate("  f(y) + 1\n", "<cell 5>")) == 5
    assert space.variables["y"] == 4


@pytest.mark.parametrize("work", [Execute("1 / 0", "<cell 6>"), Evaluate("1 / 0", "<cell 7>")])
def test_a_traceback_shows_the_line_of_a_cell_or_an_expression(work: Execute | Evaluate) -> None:
    with pytest.raises(ZeroDivisionError) as raised:
        Namespace(ModuleType("cells")).run(work)
    assert f'File "{work.filename}", line 1' in failure_of(raised.value).traceback
    assert "    1 / 0\n" in failure_of(raised.value).traceback


def test_a_figure_that_is_a_cells_value_is_left_out_of_those_that_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    left_out: list[object] = []
    backend = SimpleNamespace(show_all_but=left_out.append)
    monkeypatch.setitem(sys.modules, "graftlab.ranks.matplotlib_backend", backend)
    space = Namespace(ModuleType("cells"))
    figure = space.run(Execute("from matplotlib.figure import Figure\nFigure()", "<cell 8>"))
    space.run(Execute("3", "<cell 9>"))
    assert left_out == [figure, None]
