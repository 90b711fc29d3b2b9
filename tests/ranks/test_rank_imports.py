"""A rank imports no module that only the notebook needs, whatever the session runs on it."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import IS_2_6

import graftlab as gl

pytestmark = pytest.mark.ranks

# Any import of these costs each rank tens of MiB, or shows that notebook-side code runs on ranks.
_OUTSIDE = ("pandas", "pyarrow", "matplotlib", "ipywidgets")
_ROOMS = ("control", "judging", "verdict", "plots", "widgets")
NOTEBOOK_ONLY = tuple(f"{name}." for name in (*_OUTSIDE, *(f"graftlab.{room}" for room in _ROOMS)))


def model(mistake: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(4, 16, generator=generator)
    for layer in range(3):
        weight = torch.randn(16, 16, generator=generator) / 4
        x = gl.tap("hidden", torch.tanh(x @ weight) + (mistake if layer == 1 else 0), layer=layer)
    return x


def right() -> torch.Tensor:
    return model(0.0)


def wrong() -> torch.Tensor:
    return model(0.01)


def record_right(folder: Path) -> None:
    with gl.record(folder):
        right()


def answer(requests: list[Any]) -> list[list[int]]:
    return [[3] for _ in requests]


def notebook_only_modules() -> list[str]:
    return [name for name in sorted(sys.modules) if f"{name}.".startswith(NOTEBOOK_ONLY)]


def forget_them() -> None:
    """Forget what the tests' own forkserver has imported; a later import would bring it back."""
    for name in notebook_only_modules():
        del sys.modules[name]


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(2, 2) as session:
        session.run(forget_them, forget_them)
        yield session


def imported_on_ranks(session: gl.Session) -> list[list[str]]:
    run = session.run(notebook_only_modules, notebook_only_modules)
    return [*run.baseline, *run.target]


def compiler_modules() -> list[str]:
    return [] if IS_2_6 else [name for name in ("torch._dynamo", "torch._inductor.config") if name in sys.modules]


def test_no_rank_imports_pandas_or_notebook_modules(session: gl.Session) -> None:
    session.run(right, wrong)
    judged = session.verdict(right, wrong)
    assert judged.named
    assert len(judged.lines)
    # A second of each rank's time, for code that is not compiled.
    run = session.run(compiler_modules, compiler_modules)
    assert [*run.baseline, *run.target] == [[], [], [], []]
    assert session.match(right, wrong).pairs
    assert session.check(baseline=right).found == []
    assert session.compare_compiled(right, backend="eager").fused is None
    assert imported_on_ranks(session) == [[], [], [], []]


def test_no_rank_imports_them_for_a_recording_or_a_replay(session: gl.Session, tmp_path: Path) -> None:
    session.run(baseline=record_right, args=(tmp_path / "recorded",))
    recording = gl.Recording(tmp_path / "recorded")
    assert len(session.run(recording, wrong).frame)
    assert session.verdict(recording, wrong).named
    (tmp_path / "requests.pkl").write_bytes(pickle.dumps({"requests": [({"input_ids": [1, 2]}, {"output_ids": [3]})]}))
    assert len(session.replay(tmp_path / "requests.pkl", answer, answer).summary) == 1
    assert imported_on_ranks(session) == [[], [], [], []]


def test_a_job_that_attaches_and_the_forkserver_import_none_of_them() -> None:
    modules = "json, sys, graftlab.jobs.attached_rank, graftlab.ranks.worker"
    code = f"import {modules}; print(json.dumps(list(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [name for name in json.loads(done.stdout) if f"{name}.".startswith(NOTEBOOK_ONLY)] == []
