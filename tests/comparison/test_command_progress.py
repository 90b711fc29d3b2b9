"""What a comparison in a terminal, or with its output in a file, shows while it waits."""

from __future__ import annotations

import io
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.comparison import command
from graftlab.comparison.command import _given_ranks, _Progress
from graftlab.errors import ConfigError


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(value=100.0)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now.value))
    return now


PROCESSES: Any = [
    SimpleNamespace(side=side, last_lines=lambda most, side=side: f"{most} of {side}  ")
    for side in ("baseline", "target")
]


def test_on_a_terminal_one_line_is_rewritten_and_removed(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with _Progress() as progress:
        clock.value += 7
        progress.wait_for(PROCESSES, ["target[0]", "target[1]"])
        assert shown.getvalue() == "\r\x1b[2Kwaiting for target[0], target[1] to call a model · 7 s · 1 of target"
        progress.show("x" * 500)
        line = shown.getvalue().rpartition("\x1b[2K")[2]
        assert len(line) < 200
        progress.announce("one sentence")
        assert shown.getvalue().endswith("\r\x1b[2Kone sentence\n")
    assert shown.getvalue().endswith("\r\x1b[2K")


def test_in_a_file_there_is_a_line_now_and_then(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with _Progress() as progress:
        progress.show("loads")
        assert shown.getvalue() == ""
        # One side has called its model: at once.
        progress.wait_for(PROCESSES, ["target[0]"])
        progress.wait_for(PROCESSES, ["target[0]"])
        progress.wait_for(PROCESSES, ["baseline[0]", "target[0]"])
        clock.value += command._PATIENCE + 1
        progress.show("loads")
        progress.show("loads")
        progress.show("judges")
        progress.announce("one sentence")
    assert shown.getvalue().splitlines() == [
        "waiting for target[0] to call a model · 0 s",
        f"loads · {command._PATIENCE + 1:.0f} s",
        "one sentence",
    ]


def test_numbers_of_ranks_are_two_or_left_to_the_commands() -> None:
    assert _given_ranks(None) == [None, None]
    assert _given_ranks("1, 2") == [1, 2]
    for wrong in ("1", "1,2,3", "0,1", "1,-1", "a,b", ""):
        with pytest.raises(ConfigError, match="give two numbers"):
            _given_ranks(wrong)
