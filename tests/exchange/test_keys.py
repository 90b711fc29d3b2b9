"""A session's token and what follows from it: the same keys for everybody who has it, and a file that others cannot
read."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import zmq
from kit.refusals import exactly

from graftlab.errors import ConfigError
from graftlab.exchange import keys
from graftlab.exchange.keys import derive_keys, new_token, read_token, write_token


def test_tokens_have_256_bits_and_are_different() -> None:
    made = {new_token() for _ in range(20)}
    assert len(made) == 20
    # Six bits a letter.
    assert all(re.fullmatch(r"[\w-]{43}", token) for token in made)


def test_both_ends_derive_the_same_keys_and_roles_have_different_ones() -> None:
    token = "t" * 43
    made = derive_keys(token)
    assert made == derive_keys(token)
    assert len({*made, *derive_keys("u" * 43)}) == 8
    assert zmq.curve_public(made.server_secret) == made.server_public
    assert zmq.curve_public(made.client_secret) == made.client_public
    # Ends of different versions have to agree.
    assert made.server_secret == b"3LGP4zE21lG1uOL!{5)Lo8eVCyuqVRz)aDuk%9dE"
    assert made.client_secret == b"0*HfOK=9>3/@*R]PdrX@YDUfbkl/BRSkc1wr&WAf"


def test_a_token_that_could_be_guessed_is_refused() -> None:
    derive_keys("x" * 40)
    with pytest.raises(
        ConfigError,
        match=exactly(
            "token (GRAFTLAB_TOKEN) has 39 characters; use the token that gl.listen prints, or one made by "
            "`graftlab token FILE`"
        ),
    ):
        derive_keys("x" * 39)


def test_a_token_comes_back_from_its_file(tmp_path: Path) -> None:
    path, token = tmp_path / "token", new_token()
    write_token(path, token)
    assert path.read_text() == f"{token}\n"
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_token(path) == token
    with pytest.raises(FileExistsError):
        write_token(path, new_token())
    path.write_text(f"  {token}\n\n")
    assert read_token(path) == token


@pytest.mark.parametrize("mode", [0o640, 0o620, 0o610, 0o604, 0o602, 0o601])
def test_a_token_that_others_may_have_seen_is_refused(mode: int, tmp_path: Path) -> None:
    path = tmp_path / "token"
    write_token(path, new_token())
    path.chmod(mode)
    with pytest.raises(ConfigError, match=r"others can read .*token, or it is not yours; run chmod 600 on it"):
        read_token(path)
    path.chmod(0o400)
    read_token(path)


def test_a_file_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token"
    write_token(path, new_token())
    monkeypatch.setattr(keys.os, "getuid", lambda: os.geteuid() + 1)
    with pytest.raises(ConfigError, match="it is not yours"):
        read_token(path)


def test_a_token_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere cannot be read: .*No such file"):
        read_token(tmp_path / "nowhere")
    path = tmp_path / "bytes"
    path.write_bytes(b"\xff\xfe")
    path.chmod(0o600)
    with pytest.raises(ConfigError, match=r"bytes cannot be read: .*utf-8"):
        read_token(path)
    # An endless file is read only up to the length of a token.
    path.write_text("x" * 10_000)
    assert len(read_token(path)) == 4096
