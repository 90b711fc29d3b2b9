"""The place where jobs meet is one user's alone, at either end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

import graftlab as gl
from graftlab.jobs import meeting
from graftlab.jobs.meeting import Meeting


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def test_nobody_else_can_enter_where_jobs_meet(tmp_path: Path) -> None:
    with Meeting(tmp_path / "run") as place, place.locked():
        listener = place.listen()
        assert listener is not None
        (room,) = (tmp_path / "run").iterdir()
        assert mode(room) == 0o700
        assert {mode(each) for each in room.iterdir()} == {0o600}
        listener.close()
    room.chmod(0o750)
    with pytest.raises(gl.ConfigError, match=r"mode 0700.*name another address"):
        Meeting(tmp_path / "run")


def test_a_place_of_another_user_is_not_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Meeting(tmp_path) as place, place.locked():
        assert place.connect(1.0) is None
        listener = place.listen()
        assert listener is not None
        connection = place.connect(1.0)
        assert connection is not None
        connection.close()
        monkeypatch.setattr(meeting, "peer_of", lambda connection: os.getuid() + 1)
        with pytest.raises(gl.ConfigError, match=f"whoever listens there is user {os.getuid() + 1}, not {os.getuid()}"):
            place.connect(1.0)
        listener.close()
