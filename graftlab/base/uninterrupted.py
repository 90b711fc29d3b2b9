"""Work that the stop button must not cut in half."""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from types import ModuleType
from typing import TypeVar

from graftlab.errors import WaitInterrupted

T = TypeVar("T")

# An interrupt that arrives just before a wait begins does not end it, so it is ended by the next one.
_LONGEST = 0.2


def uninterrupted(what: str, call: Callable[[], T]) -> T:
    """Call this on another thread, so that the stop button ends only the wait; returns or raises what the call does.

    ``what`` completes "stopped waiting until ...".
    """
    result = Future[T]()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    try:
        try:
            threading.Thread(target=work, name="graftlab-uninterrupted", daemon=True).start()
        except RuntimeError:  # the interpreter is shutting down and starts no threads
            work()
        while not wait([result], _LONGEST).done:
            pass
        return result.result()
    except KeyboardInterrupt:
        raise WaitInterrupted(f"stopped waiting until {what}; that continues") from None


def import_module(name: str) -> ModuleType:
    """Import a module; in a notebook, so that the stop button does not cut the import in half.

    A kernel in which that happens to torch cannot import torch again, and may crash when it tries.
    """
    in_notebook = "IPython" in sys.modules and threading.current_thread() is threading.main_thread()
    if name in sys.modules or not in_notebook:
        return importlib.import_module(name)
    return uninterrupted(f"{name} is imported", partial(importlib.import_module, name))
