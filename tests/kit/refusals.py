"""What a call says when it refuses its arguments."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from graftlab.errors import GraftError

REFUSALS = (GraftError, ValueError, TypeError)


def refusal(call: Callable[[], Any]) -> str:
    """The text of the error that a call raises; the test fails if it raises none, or one that says nothing of use."""
    with pytest.raises(REFUSALS) as refused:
        call()
    return str(refused.value)


def exactly(text: str) -> str:
    """The ``match`` of an error that says this and nothing else."""
    return rf"^{re.escape(text)}\Z"


def ids(refused: list[tuple[Callable[[], Any], str]]) -> list[str]:
    """The beginnings of what is said, as names of test cases."""
    return [said.split("\n")[0][:60] for _, said in refused]
