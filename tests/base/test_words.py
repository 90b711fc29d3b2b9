"""Names and numbers in running text."""

from __future__ import annotations

import math

import pytest

from graftlab.base.html import number
from graftlab.base.text import shortened


def test_a_long_name_keeps_its_beginning_and_its_end() -> None:
    assert shortened("model.layers.0", 14) == "model.layers.0"
    assert shortened("model.layers.0.attention.query", 12) == "model….query"


@pytest.mark.parametrize(("value", "shown"), [(None, "-"), (math.nan, "-"), (0.0, "0.00e+00"), (1234.5, "1.23e+03")])
def test_a_number_that_is_absent_is_a_dash(value: float | None, shown: str) -> None:
    assert number(value) == shown
