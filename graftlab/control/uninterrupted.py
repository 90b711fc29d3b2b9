"""What the stop button must not end half way: it ends the wait for it, and no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future


def uninterrupted(call: Callable[[], None]) -> None:
    """Call this on a thread of its own and wait for it; raises what it raises."""
    ending = Future[None]()

    def work() -> None:
        try:
            call()
        except BaseException as error:
            ending.set_exception(error)
        else:
            ending.set_result(None)

    try:
        threading.Thread(target=work, name="graftlab-uninterrupted", daemon=True).start()
    except RuntimeError:  # the interpreter is shutting down and starts no threads any more
        work()
    ending.result()
