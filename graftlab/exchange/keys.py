"""A session's join token, and the keys that follow from it: who has the token has the keys, and nobody else.

Both ends of every connection work the same CURVE keys out of the token, which itself never travels. CurveZMQ then
gives each connection keys of its own, so that who learns the token later cannot read what was recorded before.
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

from graftlab.errors import ConfigError

_LENGTH = 32
# What 256 bits are in base64, less a little: shorter ones were made by hand, and can be guessed.
_SHORTEST = 40


class Keys(NamedTuple):
    """The key pairs of those that listen and of those that connect, in Z85."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes


def new_token() -> str:
    """A token that nobody can guess."""
    return secrets.token_urlsafe(_LENGTH)


def derive_keys(token: str) -> Keys:
    """The keys of the session with this token. Raises :class:`ConfigError` for one that could be guessed."""
    if len(token) < _SHORTEST:
        raise ConfigError(
            f"token (GRAFTLAB_TOKEN) has {len(token)} characters; it takes one that gl.listen has printed, or that "
            f"`graftlab token FILE` has made"
        )
    server, client = _secret(token, b"graftlab-server"), _secret(token, b"graftlab-client")
    return Keys(zmq.curve_public(server), server, zmq.curve_public(client), client)


def _secret(token: str, use: bytes) -> bytes:
    return z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=use).digest())


def read_token(path: Path) -> str:
    """The token in a file of this user's that nobody else can read. Raises :class:`ConfigError`."""
    try:
        with path.open(encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            text = file.read(4096).strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"token_file (GRAFTLAB_TOKEN_FILE): {path} cannot be read: {error}") from error
    if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise ConfigError(
            f"token_file (GRAFTLAB_TOKEN_FILE): others can read {path}, or it is not yours; chmod 600 it, and make a "
            f"new token if others may have seen this one"
        )
    return text


def write_token(path: Path, token: str) -> None:
    """Put the token into a new file of mode 0600. Raises FileExistsError."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "w", encoding="utf-8") as file:
        file.write(token + "\n")
