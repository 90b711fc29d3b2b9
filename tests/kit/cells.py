"""The cells of a matrix of parameters that a test runs in the suite."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import pytest


def every_pair(rows: Collection[str], columns: Collection[str], ways: Collection[str]) -> list[Any]:
    """All cells, as parameters: each row with each column in one of the ways, and so every pair; the others as soak.

    Each row has every way if there are as many columns as ways or more, and each column if there are as many rows.
    """
    return [
        pytest.param(row, column, way, marks=() if (i + j + k) % len(ways) == 0 else pytest.mark.soak)
        for i, row in enumerate(rows)
        for j, column in enumerate(columns)
        for k, way in enumerate(ways)
    ]
