"""Sessions for the benchmarks: on the CPU by default, and with a plan that compares nothing by default."""

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
    """Open a session whose plan has only the filters in ``plan``."""
    wanted = gl.GraftPlan(**{"compare": "False", **plan})
    folder = tempfile.mkdtemp(dir=setup.folder)
    with gl.launch(baseline, target, device=device, plan=wanted, timeout=120.0, folder=folder) as launched:
        yield launched
