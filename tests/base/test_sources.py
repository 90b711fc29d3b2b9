"""Parsing source text in several threads at once."""

from __future__ import annotations

import ast
import contextlib
import gc
import linecache
import math
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from graftlab.base import sources
from graftlab.base.sources import literal, parse, parse_expression


class Cycle:
    """Takes long enough to die that another thread runs meanwhile."""

    def __init__(self) -> None:
        self.me = self

    def __del__(self) -> None:
        for _ in range(200):
            pass


@contextlib.contextmanager
def threads_that_change_often() -> Iterator[None]:
    interval, threshold = sys.getswitchinterval(), gc.get_threshold()
    sys.setswitchinterval(1e-5)
    gc.set_threshold(5)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)
        gc.set_threshold(*threshold)


def test_threads_that_parse_at_the_same_time_all_get_their_trees() -> None:
    errors: list[BaseException] = []
    wanted = ast.dump(ast.parse("layer == 3 and a.b(c)[1] or name == 'x'"))

    def read(depth: int) -> None:
        # In Python 3.11 the error comes where threads stand at different depths.
        if depth:
            return read(depth - 1)
        try:
            for _ in range(300):
                Cycle()
                assert ast.dump(parse("layer == 3 and a.b(c)[1] or name == 'x'")) == wanted
                assert isinstance(parse_expression("(layer == 3 and (kind in ['grad'] or name == 'x'))"), ast.BoolOp)
        except BaseException as error:
            errors.append(error)

    with threads_that_change_often():
        threads = [threading.Thread(target=read, args=(depth,)) for depth in (0, 50, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert errors == []


def test_other_errors_are_raised_without_a_retry(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(*_: object, **__: object) -> ast.AST:
        calls.append(1)
        raise SystemError("unknown opcode")

    # Not ast.parse itself, which pytest needs to show a failure.
    monkeypatch.setattr(sources, "ast", SimpleNamespace(parse=broken))
    with pytest.raises(SystemError, match="unknown opcode"):
        parse("1")
    assert len(calls) == 1


def test_an_expression_silences_no_warning_but_its_own() -> None:
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        parse_expression(r"'\d' in name")
        warnings.warn("of the user's code", stacklevel=1)
    assert [str(each.message) for each in shown] == ["of the user's code"]


def test_an_installed_source_has_the_lines_of_its_file() -> None:
    sources.install_source("<installed>", "a = 1\nb = 2\n")
    assert linecache.getline("<installed>", 2) == "b = 2\n"
    assert sources.source_of("<installed>") == "a = 1\nb = 2\n"
    assert sources.source_of("<another>") is None
    # Any process can read a file itself.
    assert linecache.getline(__file__, 1)
    assert sources.source_of(__file__) is None


def test_everything_of_ours_is_read_here() -> None:
    """The bare :func:`ast.parse` may fail in any thread; see :func:`graftlab.base.sources.parse`."""
    package = Path(sources.__file__).parent.parent
    found = [path for path in package.rglob("*.py") if "ast.parse(" in path.read_text()]
    assert found == [Path(sources.__file__)]


@pytest.mark.parametrize(
    "value",
    [
        *(1, -0.5, math.inf, -math.inf, True, None, "", "a", (), ("a",), ("a", (1, 2.5))),
        *("one\ntwo", 'two\nquoted"', 'a\n"""b"""', "back\\slash\n", "carriage\r\nreturn", "\n", '\n"'),
        *('one\ntwo"', 'one\n"two""', 'a\n\\"', "a\n'b'"),
    ],
)
def test_a_value_of_a_plan_is_written_as_an_expression_that_gives_it(value: object) -> None:
    assert eval(literal(value)) == value
    assert type(eval(literal(value))) is type(value)


def test_lines_are_written_as_lines() -> None:
    assert literal('one\ntwo "three"\n') == '"""\\\none\ntwo "three"\n"""'
    assert literal('one\ntwo"') == '"""\\\none\ntwo\\""""'


def test_nan_is_written_as_an_expression_too() -> None:
    assert math.isnan(eval(literal(math.nan)))
