"""What the widgets' tests share: a simulated browser, a bundle that is none, and editors of both kinds."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.pages import Browser


@pytest.fixture(params=["main thread", "another thread"])
def arrives_on(request: pytest.FixtureRequest) -> str:
    """Where messages arrive: releases of ipykernel differ. Modules with slow tests choose the harder one."""
    return str(request.param)


@pytest.fixture
def simulated(arrives_on: str, monkeypatch: pytest.MonkeyPatch) -> Browser:
    """A browser whose messages arrive on the main thread or on another."""
    browser = Browser(in_a_thread=arrives_on == "another thread")
    monkeypatch.setattr("ipywidgets.comm.create_comm", browser.create_comm)
    return browser


@pytest.fixture
def stub_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The kernel's half of CodeMirror needs no script to be tested, only a file."""
    code_mirror = pytest.importorskip("graftlab.widgets.code_mirror", reason="anywidget is not installed")
    stub = tmp_path / "stub.js"
    stub.write_text("export default {}")
    monkeypatch.setattr(code_mirror, "BUNDLE", stub)
    return stub
