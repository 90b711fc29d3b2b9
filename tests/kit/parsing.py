"""Source files as trees, parsed once for all tests of a worker."""

from __future__ import annotations

import ast
import functools
import gc
from collections.abc import Iterator
from pathlib import Path

import pytest


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@pytest.fixture(autouse=True)
def uncollected() -> Iterator[None]:
    """Leave the trees to themselves: they have no cycles, and the collector would take three quarters of the time."""
    gc.disable()
    yield
    gc.enable()
