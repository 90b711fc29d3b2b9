"""Modules that are edited on disk: a rank that has imported one warns that it continues with the code from before."""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import graftlab as gl
from graftlab.errors import GraftWarning
from graftlab.ranks import edited_modules
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
    assert not [each for each in recwarn if "edited_by_hand" in str(each.message)]


def test_an_edit_before_a_file_is_imported_by_another_name_is_warned_of(
    edited: Any, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = EditedModules()
    modules.note()
    edit(edited)
    again = types.ModuleType("edited_by_another_name")
    again.__file__ = edited.__file__
    monkeypatch.setitem(sys.modules, again.__name__, again)
    modules.note()
    modules.warn_of_edits()
    assert len([each for each in recwarn if "edited_by_hand" in str(each.message)]) == 1


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


def looked_at() -> list[bool]:
    new = edited_modules._imported_since_the_fork()
    importlib.import_module("tabnanny")
    return ["torch" in new, "graftlab.ranks.worker" in new, edited_modules._imported_since_the_fork()[0] == "tabnanny"]


@pytest.mark.ranks
def test_a_rank_looks_at_no_module_that_the_forkserver_has_imported() -> None:
    with gl.launch(1, 1) as session:
        run = session.run(looked_at, looked_at)
    assert [*run.baseline, *run.target] == [[False, False, True]] * 2


@pytest.mark.parametrize("moved", [False, True])
def test_all_are_looked_at_once_the_forkservers_last_module_has_moved(
    moved: bool, edited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edited_modules, "_last_of_forkserver", ("edited_by_hand", edited))
    monkeypatch.setitem(sys.modules, "imported_later", types.ModuleType("imported_later"))
    if moved:
        del sys.modules["edited_by_hand"]
        importlib.import_module("edited_by_hand")
    found = edited_modules._imported_since_the_fork()
    assert found == ([*reversed(sys.modules)] if moved else ["imported_later"])


@pytest.mark.parametrize("forked", [False, True])
def test_another_thread_may_import_while_modules_are_looked_at(
    forked: bool, edited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Growing(dict[str, Any]):
        """Gets a module just after the first look has begun."""

        def __reversed__(self) -> Iterator[str]:
            begun = super().__reversed__()
            self.setdefault("imported_later", types.ModuleType("imported_later"))
            return begun

    modules = Growing({"torch": types.ModuleType("torch"), "edited_by_hand": edited})
    monkeypatch.setattr(edited_modules, "sys", types.SimpleNamespace(modules=modules))
    monkeypatch.setattr(edited_modules, "_last_of_forkserver", ("edited_by_hand", edited) if forked else None)
    found = edited_modules._imported_since_the_fork()
    assert found == ["imported_later", *([] if forked else ["edited_by_hand", "torch"])]
