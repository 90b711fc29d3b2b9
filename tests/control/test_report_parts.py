"""Parts of a report, without ranks: code under its first run, and notes of rows."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.rows import row

from graftlab.control import report
from graftlab.rows.store import to_frame


def test_code_that_ran_twice_stands_under_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "state_of", lambda run: run)
    monkeypatch.setattr(report, "source_of", lambda code: code)
    runs: Any = [SimpleNamespace(number=number, code={"target": code}) for number, code in enumerate("aba")]
    text = report._code(runs)
    assert [part for part in ("run 0, target", "run 1, target", "run 2, target") if part in text] == [
        "run 0, target",
        "run 1, target",
    ]


def test_a_report_of_rows_has_their_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [row("a", order=0, note="the layouts differ"), row("b", order=1, note="the layouts differ")]
    monkeypatch.setattr(report.loading, "load_run", lambda folder: to_frame(rows))
    text = report.write_report_of_rows(tmp_path, tmp_path / "report.html", None).read_text(encoding="utf-8")
    assert "Notes of rows" in text
    assert "the layouts differ" in text
