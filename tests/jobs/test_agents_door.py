"""Whom an agent takes a line of: processes of its own user, that hand over both ends of one."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
from pathlib import Path

import pytest

from graftlab.exchange.keys import new_token
from graftlab.jobs import agent
from graftlab.jobs.agent import Agent
from graftlab.jobs.meeting import Meeting
from graftlab.ranks.shared import send_descriptors


def test_a_line_is_taken_only_of_its_own_user_and_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "graftlab")
    ends = socket.socketpair()
    with Meeting(tmp_path, "agent-1") as meeting:
        with meeting.locked():
            listener = meeting.listen()
        assert listener is not None
        carries = Agent(meeting, listener, "127.0.0.1", 1, new_token())

        def ask(descriptors: int) -> bytes:
            control = meeting.connect(1.0)
            assert control is not None
            with control:
                if descriptors:
                    send_descriptors(control, [end.fileno() for end in ends[:descriptors]])
                else:
                    control.shutdown(socket.SHUT_WR)
                assert carries._accept()
                with contextlib.suppress(ConnectionResetError):
                    return control.recv(16)
                return b""

        assert ask(1) == b""
        assert caplog.messages == ["a job's line was not taken: it handed over 1 ends of a line, not 2"]
        # Who only looks whether it is there is none of its affair.
        assert ask(0) == b""
        assert len(caplog.messages) == 1
        monkeypatch.setattr(agent, "peer_of", lambda connection: os.getuid() + 1)
        assert ask(2) == b""
        assert caplog.messages[1].endswith(f"the process that asks is of user {os.getuid() + 1}, not {os.getuid()}")
        assert carries._trunk is None
        listener.close()
    for end in ends:
        end.close()
