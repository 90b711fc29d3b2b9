"""Modules that are edited on disk: a rank that has imported one warns that it continues with the code from before."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graftlab as gl
from graftlab.errors import GraftWarning
from graftlab.ranks.edited_modules import EditedModules


@pytest.fixture
def edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module of the user whose function ``f`` returns 1; later the file says 2."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "edited_by_hand.py").write_text("def f(): return 1\n")
    yield importlib.import_module("edited_by_hand")
    del sys.modules["edited_by_hand"]


def edit(module: Any) -> None:
    before = os.stat(module.__file__).st_mtime_ns
    Path(module.__file__).write_text("def f(): return 2 + 0\n")
    os.utime(module.__file__, ns=(before + 10**9, before + 10**9))


def test_each_edit_is_warned_of_once(edited: Any, recwarn: pytest.WarningsRecorder) -> None:
    modules = EditedModules()
    modules.note()
    modules.warn_of_edits()
    assert not [each for each in recwarn if "edited_by_hand" in str(each.message)]
    for _ in range(2):
        edit(edited)
        with pytest.warns(GraftWarning, match=r"edited_by_hand.py was edited after .* %graft restart, starts ranks"):
            modules.warn_of_edits()
        modules.warn_of_edits()
    assert not [each for each in recwarn if "edited_by_hand" in str(each.message)]
    os.unlink(edited.__file__)
    modules.warn_of_edits()


@pytest.mark.ranks
def test_a_rank_warns_that_it_runs_the_code_from_before(edited: Any, capsys: pytest.CaptureFixture[str]) -> None:
    with gl.launch(1, 1) as session:
        assert session.run(edited.f, edited.f).target == [1]
        edit(edited)
        importlib.reload(edited)
        assert edited.f() == 2
        capsys.readouterr()
        assert session.run(edited.f, edited.f).target == [1]
        shown = capsys.readouterr().out
        assert "edited_by_hand.py was edited after this rank had imported it" in shown
        session.restart()
        assert session.run(edited.f, edited.f).target == [2]


def known_before_the_first_run() -> bool:
    return {"torch", "graftlab.ranks.worker"} <= EditedModules()._names


@pytest.mark.ranks
def test_the_forkserver_looks_at_its_modules_once_for_all_ranks() -> None:
    with gl.launch(1, 1) as session:
        run = session.run(known_before_the_first_run, known_before_the_first_run)
    assert [*run.baseline, *run.target] == [True, True]
    assert not known_before_the_first_run()
