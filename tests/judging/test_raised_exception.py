"""An exception that one side raises, and the sentence on it."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest

from graftlab.base.world import Side
from graftlab.judging.raised_exception import exception_of_one_side
from graftlab.ranks.messages import Failure

TRACE = 'Traceback:\n  File "/home/me/port.py", line 7, in forward\n    y = x @ w\nRuntimeError: shapes\n'


def session_of(*sides: Side) -> Any:
    ranks = [Mock(place=Mock(side=side), label=f"{side}[{number}]") for number, side in enumerate(sides)]
    for rank in ranks:
        rank.label = f"{rank.place.side}[{[r for r in ranks if r.place.side == rank.place.side].index(rank)}]"
    return Mock(ranks=ranks)


def failure(kind: str = "RuntimeError", message: str = "shapes\nin detail", traceback: str = TRACE) -> Failure:
    return Failure(kind, message, traceback)


def test_the_exception_of_one_side_is_reported_with_its_line() -> None:
    found = exception_of_one_side(session_of("baseline", "target"), {"target[0]": failure()})
    assert found is not None
    assert found.sentence == "The target raises RuntimeError: shapes (port.py:7: y = x @ w); the baseline does not."
    found = exception_of_one_side(session_of("baseline", "target"), {"baseline[0]": failure(traceback="")})
    assert found is not None
    assert found.sentence == "The baseline raises RuntimeError: shapes; the target does not."


@pytest.mark.parametrize(
    "failures",
    [
        {},
        {"baseline[0]": failure(), "target[0]": failure(), "target[1]": failure()},
        {"target[0]": "signal 9", "target[1]": failure()},
        {"target[0]": failure()},
        {"target[0]": failure(), "target[1]": failure("TimeoutError")},
    ],
    ids=["none", "both sides", "a death", "one of two ranks", "two exceptions"],
)
def test_other_failures_are_no_exception_of_one_side(failures: dict[str, Failure | str]) -> None:
    assert exception_of_one_side(session_of("baseline", "target", "target"), failures) is None
