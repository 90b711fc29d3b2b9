"""A session's join token, and the keys derived from it.

Both ends of every connection derive the same CURVE keys from the token, which is never sent. CurveZMQ then makes new
keys for each connection, so a token that leaks later does not decrypt recorded traffic.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
from pathlib import Path
from typing import NamedTuple

import zmq
from zmq.utils import z85

from graftlab.base.files import open_named
from graftlab.errors import ConfigError

_LENGTH = 32
# 256 bits in base64 take 43 characters. Much shorter tokens were made by hand, and can be guessed.
_SHORTEST = 40


class Keys(NamedTuple):
    """The key pairs of listening and of connecting sockets, in Z85."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def new_token() -> str:
    """Return a new token of 256 random bits."""
    return secrets.token_urlsafe(_LENGTH)


def derive_keys(token: str) -> Keys:
    """Derive a session's keys from its token. Raises :class:`ConfigError` for a token short enough to be guessed."""
    if len(token) < _SHORTEST:
        raise ConfigError(
            f"token (GRAFTLAB_TOKEN) has {len(token)} characters; use the token that gl.listen prints, or one made by "
            f"`graftlab token FILE`"
        )
    server, client = _secret(token, b"graftlab-server"), _secret(token, b"graftlab-client")
    return Keys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def _secret(token: str, use: bytes) -> bytes:
    return z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=use).digest())


def read_token(path: Path) -> str:
    """Read a token from a file that only this user can read. Raises :class:`ConfigError`."""
    try:
        with open(open_named(path), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file (GRAFTLAB_TOKEN_FILE): {path} cannot be read: {error}") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"token_file (GRAFTLAB_TOKEN_FILE): others can read {path}, or it is not yours; run chmod 600 on it, and "
            f"make a new token if others may have seen this one"
        )
    return text


def write_token(path: Path, token: str) -> None:
    """Write the token to a new file of mode 0600. Raises OSError, FileExistsError where there is one."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(token + "\n")
    except OSError:
        # An empty file would be in the way of the next try.
        path.unlink(missing_ok=True)
        raise
