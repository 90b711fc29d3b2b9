from __future__ import annotations

import pytest
from kit.recorder import Recorder

from graftlab.taps import calls


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    monkeypatch.setattr(calls, "_grafter", recorder)
    monkeypatch.setattr(calls, "_handler", recorder)
    return recorder
