"""Sessions for the benchmarks: on the CPU, with nothing compared unless asked for, and nothing left behind."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import graftlab as gl
from benchmarks.lines import Setup


@contextmanager
def session(
    setup: Setup, baseline: int = 1, target: int = 1, *, device: str = "cpu", **plan: Any
) -> Iterator[gl.Session]:
    """A session whose plan matches nothing but what ``plan`` says."""
    wanted = gl.GraftPlan(**{"compare": "False", **plan})
    folder = tempfile.mkdtemp(dir=setup.folder)
    with gl.launch(baseline, target, device=device, plan=wanted, timeout=120.0, folder=folder) as launched:
        yield launched
