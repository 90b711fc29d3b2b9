"""Work that the stop button does not cut in half."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from kit.deadline import DEADLINE
from kit.refusals import exactly

from graftlab.base.uninterrupted import import_module, uninterrupted
from graftlab.errors import WaitInterrupted


def test_the_result_or_the_exception_of_the_call_comes_back() -> None:
    assert uninterrupted("it is done", lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        uninterrupted("it is done", lambda: 1 // 0)

    def exits() -> None:
        raise SystemExit(3)

    with pytest.raises(SystemExit, match=exactly("3")):
        uninterrupted("it is done", exits)


@pytest.fixture
def slow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module ``slow_to_import`` whose import waits in the middle."""
    gate: Any = ModuleType("gate")
    gate.begun, gate.go_on, gate.imports = threading.Event(), threading.Event(), 0
    monkeypatch.setitem(sys.modules, "gate", gate)
    (tmp_path / "slow_to_import.py").write_text(
        f"import gate\ngate.imports += 1\ngate.begun.set()\ngate.go_on.wait({DEADLINE})\nend = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, "slow_to_import", None)  # restored, so that the test leaves nothing behind
    del sys.modules["slow_to_import"]
    return gate


def test_in_a_notebook_an_import_continues_after_the_stop_button(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())

    def press() -> None:
        slow.begun.wait(DEADLINE)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    with pytest.raises(
        WaitInterrupted, match=exactly("stopped waiting until slow_to_import is imported; that continues")
    ):
        import_module("slow_to_import")
    slow.go_on.set()
    assert import_module("slow_to_import").end
    assert slow.imports == 1


def test_a_script_imports_on_its_own_thread(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    slow.go_on.set()
    made: list[threading.Thread] = []
    slow.begun.set = lambda: made.append(threading.current_thread())
    import_module("slow_to_import")
    assert made == [threading.current_thread()]


def test_another_thread_of_a_notebook_imports_by_itself(slow: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "IPython", SimpleNamespace())
    slow.go_on.set()
    made: list[threading.Thread] = []
    slow.begun.set = lambda: made.append(threading.current_thread())
    other = threading.Thread(target=import_module, args=("slow_to_import",))
    other.start()
    other.join(DEADLINE)
    assert made == [other]
