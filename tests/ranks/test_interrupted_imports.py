"""An interrupt leaves no half-imported module on a rank, and ends an endless import."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from kit.support import wait_for_file

import graftlab as gl

pytestmark = pytest.mark.ranks

SLOW = """
from pathlib import Path
folder = Path(__file__).parent
with open(folder / "begun", "a") as file:
    file.write("x")
while not (folder / "go").exists():
    pass
"""


def imports(folder: str, name: str) -> Any:
    sys.path.insert(0, folder)
    __import__(name)
    while not (Path(folder) / "enough").exists():
        pass
    return (Path(folder) / "begun").read_text()


def test_an_interrupt_waits_for_an_import_to_end(session: gl.Session, tmp_path: Path) -> None:
    (tmp_path / "slow_to_import.py").write_text(SLOW)
    run = session.start(imports, args=(str(tmp_path), "slow_to_import"))
    wait_for_file(tmp_path / "begun")
    session.interrupt()
    (tmp_path / "go").touch()
    with pytest.raises(gl.RunError, match=r"KeyboardInterrupt|interrupted"):
        run.wait()
    (tmp_path / "enough").touch()
    # Once, although it was imported twice.
    assert session.run(imports, args=(str(tmp_path), "slow_to_import")).baseline == ["x"]


def test_an_import_that_never_ends_is_interrupted(session: gl.Session, tmp_path: Path) -> None:
    (tmp_path / "never_imported.py").write_text(SLOW)
    run = session.start(imports, args=(str(tmp_path), "never_imported"))
    wait_for_file(tmp_path / "begun")
    session.interrupt()
    with pytest.raises(gl.RunError, match=r"KeyboardInterrupt|interrupted"):
        run.wait()
    assert session.run("1").baseline == [1]
