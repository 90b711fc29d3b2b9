"""The rendezvous of processes that only share the name of a folder: a Unix socket that no other user can reach."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator
from pathlib import Path

from graftlab.errors import ConfigError
from graftlab.exchange.keys import new_token, read_token, write_token

# A folder within the one that users name, because other users may be able to enter that.
_FOLDER = ".rendezvous"
_SOCKET, _LOCK, _TOKEN = "socket", "lock", "token"
_CREDENTIALS = struct.Struct("3i")
_BACKLOG = 1024


class Rendezvous:
    """The socket of one folder, its lock, and the token kept there. Usable in ``with``."""

    def __init__(self, folder: Path) -> None:
        """Raises :class:`ConfigError` for a folder that cannot be made, or is not this user's alone."""
        self.folder = folder
        private = folder / _FOLDER
        try:
            # The folder for a port lies below a folder in /tmp that another user may have made.
            if folder.parent.name == f"graftlab-{os.getuid()}":
                folder.parent.mkdir(mode=0o700, exist_ok=True)
                _require_own(folder.parent)
            folder.mkdir(parents=True, mode=0o700, exist_ok=True)
            private.mkdir(mode=0o700, exist_ok=True)
            self._descriptor = os.open(private, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError as error:
            raise ConfigError(
                f"both sides cannot meet in the folder {folder}: {error}; name one that can be created "
                f"(GRAFTLAB_RUN_DIR, or GRAFTLAB_ADDRESS)"
            ) from error
        _require_own(private)
        # The path of a socket has at most 107 bytes, and the folder's may be longer.
        self._address = f"/proc/self/fd/{self._descriptor}/{_SOCKET}"

    def connect(self, timeout: float) -> socket.socket | None:
        """Connect to the session server; return None if none listens.

        Raises :class:`ConfigError` if the server belongs to another user.
        """
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.settimeout(timeout)
        try:
            connection.connect(self._address)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        if (uid := peer_uid(connection)) != os.getuid():
            connection.close()
            raise ConfigError(f"{self.folder}: the process that listens there belongs to user {uid}, not {os.getuid()}")
        return connection

    def listen(self) -> socket.socket | None:
        """Return a listening socket; None if a session server already listens. Call it while :meth:`locked`."""
        existing = self.connect(1.0)
        if existing is not None:
            existing.close()
            return None
        self.unlink()
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        listener.bind(self._address)
        os.chmod(self._address, 0o600)
        listener.listen(_BACKLOG)
        return listener

    def unlink(self) -> None:
        """Remove the socket. Call it while :meth:`locked`."""
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_SOCKET, dir_fd=self._descriptor)

    @property
    def token_path(self) -> Path:
        """The file in which :meth:`session_token` keeps the token."""
        return self.folder / _FOLDER / _TOKEN

    def session_token(self, given: str | None = None) -> str:
        """Return the token with which jobs of other machines join: the last one, a new one, or the one ``given``. It is
        stored for the next session.
        """
        path = self.token_path
        if given is None:
            with contextlib.suppress(FileNotFoundError):
                path.lstat()
                return read_token(path)
        token = new_token() if given is None else given
        path.unlink(missing_ok=True)
        write_token(path, token)
        return token

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Let one process at a time look for a session server, and become it if there is none."""
        descriptor = os.open(_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600, dir_fd=self._descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def close(self) -> None:
        os.close(self._descriptor)

    def __enter__(self) -> Rendezvous:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def peer_uid(connection: socket.socket) -> int:
    """Ask the system for the user at the other end."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    uid: int = _CREDENTIALS.unpack(data)[1]
    return uid


def _require_own(folder: Path) -> None:
    found = folder.lstat()
    if found.st_uid != os.getuid() or not stat.S_ISDIR(found.st_mode) or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a folder of this user with mode 0700, which no other user can enter, for jobs to meet "
            f"there; remove it, or name another address (GRAFTLAB_ADDRESS)"
        )
