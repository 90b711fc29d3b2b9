"""Closing sessions when this process ends, and never by a fork of it."""

from __future__ import annotations

import atexit
import os
from collections.abc import Sequence
from typing import Protocol

from graftlab.ranks.handle import RankHandle


class OpenSession(Protocol):
    """The part of a session that this module uses. The session's own module imports this one."""

    @property
    def ranks(self) -> Sequence[RankHandle]: ...

    def close(self) -> None: ...


# Not weak references: the ranks of a forgotten session would keep this process from ending.
_open: set[OpenSession] = set()


def close_at_exit(session: OpenSession) -> None:
    """Close this session when the process ends, unless :func:`forget` comes first."""
    _open.add(session)


def forget(session: OpenSession) -> None:
    """Note that this session is closed."""
    _open.discard(session)


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()


def _release_in_child() -> None:
    """Forget all sessions in a forked child, such as a data loader's worker: their ranks belong to the parent."""
    for session in list(_open):
        for rank in session.ranks:
            rank.release_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_release_in_child)
