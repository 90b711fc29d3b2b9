from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
from kit import compared_scripts

from graftlab.jobs import script_process


@pytest.fixture
def warm_scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Start compared scripts in processes that have imported torch."""
    names = SimpleNamespace(
        Popen=compared_scripts.start, DEVNULL=subprocess.DEVNULL, TimeoutExpired=subprocess.TimeoutExpired
    )
    monkeypatch.setattr(script_process, "subprocess", names)
