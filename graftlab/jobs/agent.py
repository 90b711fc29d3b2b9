"""The agent: one process a host that carries the lines of all its jobs to who holds their session, on one connection.

It is a process of its own, because a job that is killed must not take another one's rows along. The first job that
needs one starts it (:mod:`.own_agent`), and it ends by itself a moment after its last line. It has neither torch nor a
GPU, and holds nothing of a job but its end of the line.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import secrets
import select
import signal
import socket
import struct
import sys
import time
from pathlib import Path

from graftlab.errors import GraftError, MessageError
from graftlab.exchange.keys import derive_keys
from graftlab.exchange.tcp import RemoteChannel, RouterSocket
from graftlab.jobs.meeting import Meeting, peer_of
from graftlab.jobs.trunk import HELLO, HOST, Trunk

logger = logging.getLogger("graftlab.jobs.agent")

PID = struct.Struct("<I")
"""What a job is told first: which process the agent is."""

# Why a line has ended, as its job is told. Nothing is told by an agent that was killed.
ENDED, GONE, STRANGER, REFUSED = b"e", b"g", b"s", b"r"

_WHY = {
    ENDED: "it is needed no more",
    GONE: "nobody is there, or whoever was there went away",
    STRANGER: "who listens there has another token, or is no process of graftlab",
    REFUSED: "whoever holds the session takes no lines of agents",
}

# Seconds without a line after which it ends. Jobs that wait for a notebook ask twice as often.
_IDLE = 2.0
# Milliseconds for which what jobs say gathers, unless a bell rings. They are few: what has not travelled when the agent
# is killed is lost.
_REST = 2


class Agent:
    """Carries until :meth:`serve` returns. The meeting is where jobs come; its ``listener`` is open already."""

    def __init__(self, meeting: Meeting, listener: socket.socket, host: str, port: int, token: str) -> None:
        self._meeting = meeting
        self._listener = listener
        self._endpoint = host, port
        self._keys = derive_keys(token)
        self._controls: set[socket.socket] = set()
        # The connection, where there is one; whether the far end takes lines, once that is known.
        self._post: RouterSocket | None = None
        self._far: RemoteChannel | None = None
        self._trunk: Trunk | None = None
        self._welcome = False
        self._refuses = False
        self._told_in_vain = False
        # Why lines end now.
        self._word = ENDED
        self._last_line = time.monotonic()
        # What is looked at all the time, and what while a rest lasts.
        self._all, self._resting = select.epoll(), select.epoll()
        listener.setblocking(False)
        self._watch(listener.fileno(), while_resting=True)

    def serve(self) -> None:
        while not self._is_over():
            self._all.poll(None if self._controls else _IDLE)
            self._accept()
            self._from_afar()
            if self._trunk is None:
                continue
            urgent = self._trunk.work()
            if self._welcome:
                self._trunk.flush()
            if self._controls and not urgent:
                self._resting.poll(_REST / 1000)
        self._disconnect()
        self._listener.close()

    def _is_over(self) -> bool:
        """Whether no line was here for a while; then no job finds it any more."""
        if self._controls:
            self._last_line = time.monotonic()
            return False
        if time.monotonic() - self._last_line < _IDLE:
            return False
        # A job that comes now has the lock while it connects.
        try:
            with self._meeting.locked():
                if self._accept():
                    return False
                self._meeting.forget()
        except OSError as error:
            # Where its folder is gone nobody finds it either.
            logger.info("the folder in which jobs meet cannot be used any more: %s", error)
        return True

    # ---- jobs ---------------------------------------------------------------------------------------------------

    def _accept(self) -> bool:
        """Let jobs in that have come; whether there were any."""
        came = False
        while True:
            try:
                control, _ = self._listener.accept()
            except BlockingIOError:
                return came
            came = True
            self._last_line = time.monotonic()
            try:
                self._let_in(control)
            except (OSError, EOFError, GraftError) as error:
                control.close()
                logger.warning("a job's line was not taken: %s", error)

    def _let_in(self, control: socket.socket) -> None:
        if (uid := peer_of(control)) != os.getuid():
            raise MessageError(f"the process that asks is of user {uid}, not {os.getuid()}")
        # It has sent them before it did anything else; one that was stopped in between is not waited for.
        control.settimeout(1.0)
        data, descriptors, _, _ = socket.recv_fds(control, 1, 2, getattr(socket, "MSG_CMSG_CLOEXEC", 0))
        ends = [socket.socket(fileno=descriptor) for descriptor in descriptors]
        if len(ends) != 2:
            for end in ends:
                end.close()
            if not data:
                return control.close()  # somebody looked whether there is an agent
            raise MessageError(f"it handed over {len(ends)} ends of a line, not 2")
        control.setblocking(False)
        control.send(PID.pack(os.getpid()))
        if self._refuses:
            for end in ends:
                end.close()
            return self._tell(control, REFUSED)
        trunk = self._connect()
        self._controls.add(control)
        trunk.open(ends[0], ends[1], lambda: self._on_line_end(control))

    def _on_line_end(self, control: socket.socket) -> None:
        self._controls.discard(control)
        self._tell(control, self._word)

    def _tell(self, control: socket.socket, word: bytes) -> None:
        # The job may be gone, and wants no reason then.
        with contextlib.suppress(OSError):
            control.send(word)
        control.close()

    # ---- the connection -----------------------------------------------------------------------------------------

    def _connect(self) -> Trunk:
        if self._trunk is None:
            self._post = RouterSocket(self._keys, b"lines " + secrets.token_hex(8).encode())
            self._far = far = self._post.connect(HOST, *self._endpoint)
            far.send(HELLO + f" {os.getpid()} on {socket.gethostname()}".encode())
            self._welcome = False
            self._trunk = Trunk(far.send, rings_near=False)
            lines, bells = self._trunk.descriptors
            self._watch(lines)
            self._watch(bells, while_resting=True)
            self._watch(self._post.fileno(), while_resting=True)
        return self._trunk

    def _watch(self, descriptor: int, *, while_resting: bool = False) -> None:
        self._all.register(descriptor, select.EPOLLIN)
        if while_resting:
            self._resting.register(descriptor, select.EPOLLIN)

    def _from_afar(self) -> None:
        if self._far is None or self._trunk is None:
            return
        far, trunk = self._far, self._trunk
        try:
            for message in far.receive():
                if self._welcome:
                    trunk.hear(message)
                elif message == HELLO:
                    self._welcome = True
                    logger.info("connected")
                else:
                    # It is of another version, or refuses for a reason that it tells each job itself.
                    self._refuses = True
        except MessageError as error:
            logger.error("the connection is cut: %s", error)
            far.close()
        if self._refuses:
            self._disconnect(REFUSED)
        elif far.closed:
            self._disconnect(STRANGER if far.reached and not far.linked else GONE)

    def _disconnect(self, word: bytes = ENDED) -> None:
        """End the connection, and every line with it, for this reason."""
        if self._trunk is None or self._post is None:
            return
        # Jobs ask twice a second for a notebook that went away, maybe for days: what comes of that is told once.
        if self._welcome or not self._told_in_vain:
            logger.info("the connection ended: %s; %d lines end with it", _WHY[word], len(self._controls))
            self._told_in_vain = not self._welcome
        self._word = word
        self._trunk.close()
        self._word = ENDED
        self._post.close()
        self._trunk = self._post = self._far = None


def main() -> int:
    """Carry lines, as the order on the standard input says, until there are none."""
    order = json.loads(sys.stdin.buffer.read())
    # No child of the job's: it may wait for all that it has.
    if os.fork():
        return 0
    # Jobs that end well after a signal to all of a node have rows to send; it ends when they have.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    logger.info("agent %d for %s:%d begins", os.getpid(), order["host"], order["port"])
    listener = socket.socket(fileno=order["listener"])
    listener.set_inheritable(False)
    with Meeting(Path(order["folder"]), order["name"]) as meeting:
        Agent(meeting, listener, order["host"], order["port"], order["token"]).serve()
    logger.info("agent %d ends: it has had no line for %g s", os.getpid(), _IDLE)
    return 0


if __name__ == "__main__":
    sys.exit(main())
