"""Access to a server: its token, and listening sockets that survive too many connections."""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from pathlib import Path

logger = logging.getLogger(__name__)

# Seconds between two warnings about the same problem.
_QUIET = 60.0


def write_token(path: Path, token: str) -> None:
    """Write the token to a file that only this user can read. Raises OSError."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # A new file, because another process may have an existing one open.
    path.unlink(missing_ok=True)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(token + "\n")
    except OSError:
        # An empty token is none.
        path.unlink(missing_ok=True)
        raise


class ListeningSocket(socket.socket):
    """Accepts a client and hangs up if the process has no descriptor for it.

    Left waiting, the client would wake the server again at once, and again, with a traceback in the log each time.
    """

    def __init__(self, other: socket.socket) -> None:
        super().__init__(other.family, other.type, other.proto, fileno=other.detach())
        self._spare = os.open(os.devnull, os.O_RDONLY)
        self._warned = -_QUIET

    def accept(self) -> tuple[socket.socket, object]:
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        os.close(self._spare)
        try:
            refused, _ = super().accept()
            refused.close()
        finally:
            self._spare = os.open(os.devnull, os.O_RDONLY)
        now = time.monotonic()
        if now - self._warned >= _QUIET:
            self._warned = now
            logger.warning(
                "too many connections: this process has no file descriptors left, so it closes new connections"
            )
        # The caller treats this as no connection.
        raise BlockingIOError(errno.EAGAIN, "closed a client's connection")

    def close(self) -> None:
        if self.fileno() >= 0:
            os.close(self._spare)
        super().close()
