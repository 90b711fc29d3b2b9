"""Route the taps of single threads to a different handler than the grafter, such as a captured function."""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from graftlab.taps import calls
from graftlab.taps.backward import frame_in_backward, is_backward
from graftlab.taps.calls import TapHandler
from graftlab.taps.untraced import outside_compiled_code

# By thread.
_routes: dict[int, TapHandler] = {}
_routing = threading.Lock()


@contextmanager
def handled_by(handler: TapHandler | None) -> Iterator[None]:
    """Send this thread's taps to ``handler`` instead of the grafter; with None, to the grafter again.

    Outside a session this does nothing.
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


@contextmanager
def taps_within(around: Callable[[], AbstractContextManager[object]]) -> Iterator[None]:
    """Enter a new ``around`` for each tap of this thread, which goes to the same handler as before."""
    handler = _handler_of(threading.get_ident())
    with nullcontext() if handler is None else handled_by(_Within(handler, around)):
        yield


class _Within:
    def __init__(self, handler: TapHandler, around: Callable[[], AbstractContextManager[object]]) -> None:
        self._handler, self._around = handler, around

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        with self._around():
            return self._handler.tap(name, value, extras, tags, replace)


class _Router:
    """Takes the grafter's place while some thread's taps go to a different handler."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        me = threading.get_ident()
        handler = _routes.get(me) or _route_of_backward(me) or calls.grafter()
        return value if handler is None else handler.tap(name, value, extras, tags, replace)


def _handler_of(thread: int) -> TapHandler | None:
    return _routes.get(thread) or calls.grafter()


def _route_of_backward(thread: int) -> TapHandler | None:
    """The route of the thread whose backward pass this one computes, as the engine's own threads do for a GPU.

    Checkpointed code reaches its taps there a second time. None for any other thread, and if several may be meant.
    """
    if not is_backward() or frame_in_backward(thread) is not None:
        return None
    waiting = [handler for each, handler in list(_routes.items()) if frame_in_backward(each) is not None]
    return waiting[0] if len(waiting) == 1 else None


@functools.cache
def _router() -> TapHandler:
    router = _Router()
    # Looking up the thread would break a compiled graph.
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
    """Reset the routes in a forked child, which is not a rank: the thread that held the lock does not exist there."""
    global _routing
    _routing = threading.Lock()
    _routes.clear()


os.register_at_fork(after_in_child=_forget_routes)
