"""How the exception that ended a rank's work is described to the notebook."""

from __future__ import annotations

import pickle
from typing import Any

import pytest

from graftlab.ranks.namespace import failure_of


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
