"""Taps of some threads that go to another than the grafter: a captured function takes its own."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from graftlab.taps import calls
from graftlab.taps.calls import TapHandler
from graftlab.taps.untraced import outside_compiled_code

# By thread.
_routes: dict[int, TapHandler] = {}
_routing = threading.Lock()


@contextmanager
def handled_by(handler: TapHandler | None) -> Iterator[None]:
    """Give what this thread's taps show to another than the grafter; with None, to the grafter again.

    Outside a session there is nothing to give, and nothing is done.
    """
    if calls.grafter() is None:
        yield
        return
    me = threading.get_ident()
    before = _routes.get(me)
    _route(me, handler)
    try:
        yield
    finally:
        _route(me, before)


class _Router:
    """In place of the grafter while some thread's taps go elsewhere."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        handler = _handler_of(threading.get_ident())
        return value if handler is None else handler.tap(name, value, extras, tags, replace)


def _handler_of(thread: int) -> TapHandler | None:
    return _routes.get(thread) or calls.grafter()


@functools.cache
def _router() -> TapHandler:
    router = _Router()
    # Looking up threads would break compiled graphs.
    router.tap = outside_compiled_code(router.tap)  # type: ignore[method-assign]
    return router


def _route(thread: int, handler: TapHandler | None) -> None:
    with _routing:
        if handler is None:
            _routes.pop(thread, None)
        else:
            _routes[thread] = handler
        if _routes:
            calls.redirect_taps(_router(), _handler_of)
        else:
            calls.redirect_taps(None)


def _forget_routes() -> None:
    """In a forked child, which is no rank: the parent's other threads are not here to give the lock back."""
    global _routing
    _routing = threading.Lock()
    _routes.clear()


os.register_at_fork(after_in_child=_forget_routes)
