"""What tests with real ranks share: a simulated notebook cell, files that ranks wait for, a session as good as new."""

from __future__ import annotations

import itertools
import os
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import graftlab as gl
from graftlab.base.sources import install_source
from graftlab.grafting import active
from graftlab.models import ModelConfig
from kit.deadline import DEADLINE

# Query heads that share key/value heads, sizes that all differ, and a vocabulary that is no power of two.
SMALL_MODEL = ModelConfig(
    vocab_size=61,
    hidden_size=32,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=48,
    max_positions=64,
)

FSDP_ON_CPU = "does not run FSDP on a CPU"

_cells = itertools.count(1)


RELEASE = ".".join(torch.__version__.split(".")[:2])
IS_2_6 = RELEASE == "2.6"
"""That release imports its compiler with DTensors, which the tests' ranks import before they start."""


def not_on(releases: str, what: str) -> pytest.MarkDecorator:
    """Skips a test on these releases of torch, separated by spaces, which do something wrong or not at all."""
    return pytest.mark.skipif(RELEASE in releases.split(), reason=f"torch {RELEASE} {what}")


def run_cell(source: str, **variables: Any) -> dict[str, Any]:
    """Execute a cell as IPython does, in ``__main__``, its lines known to linecache alone; returns the namespace."""
    source = textwrap.dedent(source).strip() + "\n"
    filename = f"/nonexistent/ipykernel_{os.getpid()}/cell_{next(_cells)}.py"
    install_source(filename, source)
    namespace: dict[str, Any] = {"__name__": "__main__", **variables}
    exec(compile(source, filename, "exec"), namespace)
    return namespace


def reset(session: gl.Session) -> gl.Session:
    """Give a shared session the default plan again."""
    session.edit(b2t=None, t2b=None, compare="True", keep=None, transform=None, rename=None, pairs=None)
    return session


def wait_until(condition: Callable[[], object], what: str, within: float = DEADLINE) -> None:
    deadline = time.monotonic() + within
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{what} did not happen within {within:g} s")
        threading.Event().wait(0.005)


def wait_for_file(path: str | Path) -> None:
    """Continue when another process has made this file."""
    wait_until(Path(path).exists, f"the file {path}")


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def own_value() -> float:
    """A number that tells the side and the rank: 10 + rank on the baseline, 20 + rank on the target."""
    me = gl.here()
    assert me is not None
    return (10.0 if me.side == "baseline" else 20.0) + me.rank


def has_compiler() -> bool:
    """Whether this rank has imported torch's compiler: a second, and 100 MB, for code that is not compiled."""
    return "torch._dynamo" in sys.modules


def shorten_waits(seconds: float) -> None:
    """Let this rank's taps give up after this many seconds, whatever the session's ``timeout`` is.

    A session launched with so short a limit might not even start on a busy machine.
    """
    grafter = active.grafter()
    assert grafter is not None
    grafter._exchange.timeout = seconds
