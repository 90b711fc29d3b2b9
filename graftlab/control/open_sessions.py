"""Which sessions are open, so that none outlives this process, and none ends with a fork of it."""

from __future__ import annotations

import atexit
import os
import weakref
from collections.abc import Sequence
from typing import Protocol

from graftlab.ranks.handle import RankHandle


class OpenSession(Protocol):
    @property
    def ranks(self) -> Sequence[RankHandle]: ...

    def close(self) -> None: ...


_open: weakref.WeakSet[OpenSession] = weakref.WeakSet()


def add(session: OpenSession) -> None:
    """Close this session when the process ends."""
    _open.add(session)


def remove(session: OpenSession) -> None:
    _open.discard(session)


@atexit.register
def _close_all() -> None:
    for session in list(_open):
        session.close()


def _release_in_child() -> None:
    """In a forked child, such as a data loader's worker: the ranks are the parent's, and end with it alone."""
    for session in list(_open):
        for rank in session.ranks:
            rank.release_in_child()
    _open.clear()


os.register_at_fork(after_in_child=_release_in_child)
