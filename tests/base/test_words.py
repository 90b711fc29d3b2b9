"""Names and numbers in running text."""

from __future__ import annotations

import math

import pytest

from graftlab.base.html import number
from graftlab.base.text import numbered, shortened


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    assert shortened("model.layers.0", 14) == "model.layers.0"
    assert shortened("model.layers.0.attention.query", 12) == "model….query"


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (math.nan, "-"), (0.0, "0.00e+00"), (1234.5, "1.23e+03")])
def test_a_number_that_is_absent_is_a_dash(value: float | None, shown: str) -> None:
    assert number(value) == shown


@pytest.mark.parametrize(
    ("numbers", "shown"), [([3], "step 3"), ([0, 1, 2, 5], "steps 0-2, 5"), ({4, 2}, "steps 2, 4")]
)
def test_numbered_things_are_listed_in_spans_behind_their_noun(numbers: list[int], shown: str) -> None:
    assert numbered("step", numbers) == shown
