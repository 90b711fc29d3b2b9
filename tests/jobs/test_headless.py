"""The session server that a job starts: its settings, and what it shares with the job's process."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from graftlab.base import wire
from graftlab.config import GraftConfig
from graftlab.errors import SessionError
from graftlab.exchange.keys import new_token
from graftlab.jobs import headless, session_server
from graftlab.jobs.headless import start_headless_server
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.plan.wire import from_wire
from graftlab.ranks.options import LaunchOptions


class Started:
    """The process that was asked for; its standard input keeps what is written."""

    def __init__(self, command: list[str], **options: Any) -> None:
        self.command, self.options = command, options
        self.written = b""
        self.log = os.readlink(f"/proc/self/fd/{options['stdout']}")
        process = self

        class Input(io.BytesIO):
            def close(self) -> None:
                process.written = self.getvalue()
                super().close()

        self.stdin = Input()


def started(folder: Path, token: str | None, **settings: Any) -> tuple[Started, Any, int]:
    config = GraftConfig(
        **{
            **{"role": "target", "baseline_world_size": 2, "target_world_size": 3, "address": str(folder)},
            **{"timeout": 7.0, "buffer_budget": 1 << 20, "keep_budget": 1 << 21, "compare_filter": "layer == 1"},
            **settings,
        }
    )
    with Rendezvous(folder) as place, socket.socket(socket.AF_UNIX) as listener:
        made: Any = start_headless_server(config, place, listener, token)
        return made, headless._decoder.decode(made.written), listener.fileno()


def test_the_server_gets_the_jobs_settings_and_inherits_the_listener(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Started)
    monkeypatch.setenv("GRAFTLAB_ROLE", "target")
    monkeypatch.setenv("DUMPER_ENABLE", "1")
    monkeypatch.setenv("GRAFTLAB_HOME", "/home/of/runs")
    process, order, listener = started(tmp_path, None, run_dir="/runs")
    assert (order.baseline, order.target, order.timeout, order.listener) == (2, 3, 7.0, listener)
    assert (order.buffer_budget, order.keep_budget, order.run_dir) == (1 << 20, 1 << 21, "/runs")
    assert (order.endpoint, order.token) == (None, None)
    assert from_wire(order.plan).compare == "layer == 1"
    assert order.rendezvous == str(tmp_path)
    # Signals to the job's process group, such as the stop button's, are none of the server's.
    assert process.options["start_new_session"] is True
    assert process.options["pass_fds"] == [listener]
    assert process.options["stderr"] == process.options["stdout"]
    assert process.log == str(tmp_path / "session-server.log")
    assert process.command[0] == sys.executable
    assert process.command[-2:] == ["-m", "graftlab.jobs.headless"]
    environment = process.options["env"]
    assert environment["GRAFTLAB_HOME"] == "/home/of/runs"
    assert not {"GRAFTLAB_ROLE", "DUMPER_ENABLE"} & {*environment}
    assert environment["PYTHONPATH"].split(os.pathsep)[: len(sys.path)] == sys.path
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(process.options["stdout"])


def test_with_a_token_the_server_listens_for_other_machines_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", Started)
    token = new_token()
    _, order, _ = started(tmp_path, token, address="tcp://localhost:29500")
    assert (order.endpoint, order.token) == (("localhost", 29500), token)


def test_the_server_opens_a_session_with_the_jobs_settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", Started)
    process, order, _ = started(tmp_path, None, run_dir=str(tmp_path))
    inherited = socket.socket(socket.AF_UNIX)
    inherited.set_inheritable(True)
    order = msgspec.structs.replace(order, listener=inherited.detach())
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(wire.encode(order))))
    opened: list[Any] = []

    def note(kind: Any, options: Any, plan: Any, folder: Any, rendezvous: Any, listener: Any, **more: Any) -> None:
        # No program that the server starts keeps the rendezvous.
        assert not listener.get_inheritable()
        listener.close()
        opened.append((options, plan.compare, rendezvous.folder, more))
        raise SessionError("noted")

    monkeypatch.setattr(session_server, "open_session_server", note)
    with pytest.raises(SessionError, match="noted"):
        headless.main()
    options = LaunchOptions(2, 3, timeout=7.0, buffer_budget=1 << 20, keep_budget=1 << 21)
    more = {"append": True, "agreed": True, "listen_at": None}
    assert opened == [(options, "layer == 1", tmp_path, more)]
    assert process.written
