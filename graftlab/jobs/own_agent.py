"""The agent of this host (:mod:`.agent`), as a job sees it: found or started, and handed the job's line."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from graftlab.config import PREFIX, Endpoint
from graftlab.errors import SessionError
from graftlab.exchange.channel import Channel
from graftlab.jobs.agent import PID, REFUSED, STRANGER
from graftlab.jobs.greeting import Join, hear, our_version, tell
from graftlab.jobs.meeting import Meeting
from graftlab.ranks.shared import send_descriptors

# Seconds for a process of this host to answer.
_LIMIT = 30.0
# Seconds for the reason of an end, which was written before it.
_REASON_LIMIT = 1.0


class NoAgentError(SessionError):
    """There is no agent here that carries lines, and why."""


class AgentLine:
    """This job's line, as the agent carries it. ``pid`` is the agent's process."""

    def __init__(self, control: socket.socket, pid: int) -> None:
        self._control = control
        self.pid = pid

    @property
    def was_killed(self) -> bool:
        """Whether the line has ended because the agent did: it says so where anything else is the reason."""
        return self.reason(_REASON_LIMIT) == b""

    def reason(self, limit: float) -> bytes | None:
        """Why the line has ended, as the agent says; blank where it ended itself, None where it says nothing yet."""
        with contextlib.suppress(ConnectionError):
            poller = select.poll()
            poller.register(self._control, select.POLLIN)
            if not poller.poll(limit * 1000):
                return None
            return self._control.recv(1, socket.MSG_PEEK)
        return b""

    def close(self, *, when_done: bool = False, timeout: float = 5.0) -> None:
        """Let go of the line, whose end here is closed; with ``when_done`` once all that was said is at its far end."""
        if when_done:
            self.reason(timeout)
        self._control.close()


class ThroughAgent:
    """Who holds the session, asked through the agent; the same to its user as :class:`.distant_host.DistantHost`."""

    def __init__(self, endpoint: Endpoint, token: str, folder: Path) -> None:
        """``folder`` is where this host's jobs meet. Raises :class:`NoAgentError`."""
        self.is_stranger = False
        self._line, far_line = socket.socketpair()
        self._bell, far_bell = socket.socketpair()
        try:
            with far_line, far_bell:
                control, self._started = _reach(endpoint, token, folder)
                try:
                    send_descriptors(control, [far_line.fileno(), far_bell.fileno()])
                except OSError:
                    control.close()
                    raise
            self._agent = AgentLine(control, self._hear_pid(control, folder))
        except (OSError, SessionError, ValueError) as error:
            self._line.close()
            self._bell.close()
            raise NoAgentError(str(error)) from error

    def _hear_pid(self, control: socket.socket, folder: Path) -> int:
        data = b""
        with contextlib.suppress(ConnectionError):
            data = control.recv(PID.size)
        ended = "" if self._started is None else f" (exit code {self._started.wait()})"
        if len(data) < PID.size:
            control.close()
            raise NoAgentError(f"the agent ended before it took a line{ended}; see {_log(folder)}")
        return int(PID.unpack(data)[0])

    def ask(self, join: Join, limit: float) -> tuple[Any, list[bytes]] | None:
        """Its answer; None where none came in time. Raises :class:`NoAgentError` where it takes no lines of agents."""
        reply = None
        deadline = time.monotonic() + limit
        with contextlib.suppress(OSError):
            self._line.settimeout(limit)
            tell(self._line, join)
            self._line.settimeout(max(0.001, deadline - time.monotonic()))
            reply = hear(self._line)
        if reply is not None:
            return reply, []
        reason = self._agent.reason(0.0)
        self.is_stranger = reason == STRANGER
        self.close()
        if reason == REFUSED:
            raise NoAgentError("whoever holds the session takes no lines of agents")
        return None

    def open_line(self, early: list[bytes]) -> tuple[Channel, socket.socket, AgentLine]:
        """This job's end of the line, its bell, and the agent's hold of both."""
        return Channel(self._line), self._bell, self._agent

    def close(self) -> None:
        self._line.close()
        self._bell.close()
        self._agent.close()


def _reach(endpoint: Endpoint, token: str, folder: Path) -> tuple[socket.socket, subprocess.Popen[bytes] | None]:
    """A connection to the agent, which is started where there is none."""
    name = _name(endpoint, token)
    with Meeting(folder, name) as meeting:
        started = None
        with meeting.locked():
            control = meeting.connect(_LIMIT)
            if control is None:
                listener = meeting.listen()
                assert listener is not None
                with listener:
                    try:
                        started = _start(endpoint, token, folder, name, listener)
                    except BaseException:
                        meeting.forget()
                        raise
                    control = meeting.connect(_LIMIT)
    if control is None:
        raise NoAgentError("the agent's socket is gone")
    return control, started


def _name(endpoint: Endpoint, token: str) -> str:
    """Of the agent's socket. It does not tell the token, and differs where jobs cannot share an agent."""
    machine = [str(os.stat("/proc/self/ns/net").st_ino), our_version()]
    with contextlib.suppress(OSError):
        machine.append(Path("/proc/sys/kernel/random/boot_id").read_text())
    told = "\0".join([str(endpoint), *machine]).encode()
    return "agent-" + hashlib.blake2b(told, key=hashlib.sha256(token.encode()).digest(), digest_size=8).hexdigest()


def _log(folder: Path) -> Path:
    return folder / "agent.log"


def _start(endpoint: Endpoint, token: str, folder: Path, name: str, listener: socket.socket) -> subprocess.Popen[bytes]:
    order = {"folder": str(folder), "name": name, "listener": listener.fileno(), "token": token}
    order |= {"host": endpoint.host, "port": endpoint.port}
    environ = {key: value for key, value in os.environ.items() if not key.startswith((PREFIX, "DUMPER_"))}
    environ["PYTHONPATH"] = os.pathsep.join(os.path.abspath(entry) for entry in sys.path if isinstance(entry, str))
    if not sys.executable:
        raise NoAgentError("this process does not know the Python that it runs in")
    log = os.open(_log(folder), os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-m", "graftlab.jobs.agent"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            cwd="/",
            env=environ,
            pass_fds=[listener.fileno()],
            # What ends the job by a signal to its group must not end the lines of the others.
            start_new_session=True,
        )
    finally:
        os.close(log)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(json.dumps(order).encode())
    return process
