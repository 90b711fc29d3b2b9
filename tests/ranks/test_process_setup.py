"""The messages of the package in a rank's log."""

from __future__ import annotations

import io
import logging
import sys

import pytest

from graftlab.ranks import process_setup


def test_each_message_in_a_log_has_the_time_at_which_it_was_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, package = io.StringIO(), logging.Logger("graftlab")
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(process_setup, "_PACKAGE", package)
    process_setup.log_to_stderr()
    expected = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    lines = []
    for created in (0.0, 0.25, 0.75, 61.5, 61.999, 3600.0, 0.5):
        record = logging.LogRecord("graftlab.x", logging.INFO, "", 0, "graft %d", (7,), None)
        record.created, record.msecs = created, created % 1 * 1000
        package.handle(record)
        lines.append(expected.format(record))
    assert shown.getvalue().splitlines() == lines
    package.debug("left out")
    package.info("logged")
    assert shown.getvalue().endswith(" INFO graftlab: logged\n")
    assert len(shown.getvalue().splitlines()) == len(lines) + 1
    assert not package.propagate
