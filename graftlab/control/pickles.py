"""Unpickles what ranks send, but only from processes that this one started, since a pickle can run any code."""

from __future__ import annotations

import pickle
from typing import Any

from graftlab.base import shipping
from graftlab.errors import GraftError, SessionError
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Failure, Pickled


def require_trusted(rank: RankHandle) -> None:
    """Raise :class:`SessionError` for a rank that is not trusted."""
    if not rank.trusted:
        raise SessionError(
            f"{rank.label} was not started by this notebook, so what it sends is not unpickled: a pickle "
            f"can run any code"
        )


def open_value(rank: RankHandle, packed: Pickled | memoryview) -> Any:
    """Unpack a result or a kept value. Raises :class:`SessionError` for a rank that is not trusted."""
    require_trusted(rank)
    return shipping.unpack_result(packed)


def open_exception(rank: RankHandle, failure: Failure) -> BaseException | None:
    """The exception itself, if it was sent and the rank is trusted; None otherwise."""
    if failure.exception is None or not rank.trusted:
        return None
    try:
        error = pickle.loads(failure.exception)
    except Exception as problem:
        return GraftError(f"{failure.kind}: {failure.message} (the exception itself cannot be loaded here: {problem})")
    return error if isinstance(error, BaseException) else None
