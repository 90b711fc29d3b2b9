"""Starts processes on one long-lived thread, by default through a forkserver that has imported torch.

The system sends parent-death signals when the *thread* that started a process ends, so that thread must not end.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.resource_tracker
import multiprocessing.util
import os
import signal
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar

from graftlab.ranks import preload_first, preload_last

P = ParamSpec("P")
T = TypeVar("T")

PRELOADED = [f"graftlab.ranks.{each}" for each in ("worker", "line_tracer", "held_functions", "match_recorder")]
"""Modules that the forkserver imports so that ranks need not: those of ranks, and of the functions that verdicts,
comparisons and matches send.

Changes take effect only before it starts.
"""

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftlab-launcher")


def on_starter(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call the function on the thread that starts processes."""
    return _starter.submit(function, *args, **kwargs)


def warm_up() -> None:
    """Start the forkserver, which imports torch, ahead of the first launch. Returns at once."""
    on_starter(prepare)


def start_process(target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Start a process as ranks are started: from the same thread, through the same warm forkserver."""
    import torch.multiprocessing

    def start() -> BaseProcess:
        prepare()
        process = torch.multiprocessing.get_context("forkserver").Process(target=target, args=args, name=name)
        with hidden_main():
            process.start()
        return process

    return on_starter(start).result()


def prepare() -> None:
    """Start the forkserver unless it is running. Raises OSError where it cannot listen."""
    # Not torch's multiprocessing: importing torch here would take as long as in the forkserver.
    multiprocessing.get_context("forkserver").set_forkserver_preload(
        [preload_first.__name__, *PRELOADED, preload_last.__name__]
    )
    owner = f"{os.getpid()}{os.pathsep}{multiprocessing.util.get_temp_dir()}"
    environment = _environment_of_forkserver({preload_first.VARIABLE: owner, **_same_import_path()})
    # It blocks interrupts for its own process, and then no longer, so it is started first.
    multiprocessing.resource_tracker.ensure_running()
    with hidden_main(), environment, _blocked_interrupts():
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def _blocked_interrupts() -> Iterator[None]:
    """Block interrupts in processes started inside, until their first import, which ignores them.

    The stop button would end a forkserver that is just starting, with a traceback in the cell.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script again in every process started inside.

    Functions travel by value, so ranks never need it, and a script without a main guard would launch itself again.
    """
    main_module = sys.modules.get("__main__")
    hidden = {name: getattr(main_module, name) for name in ("__spec__", "__file__") if hasattr(main_module, name)}
    try:
        # Even where it is missing, as after a notebook's %reset, because multiprocessing reads it.
        main_module.__spec__ = None  # type: ignore[union-attr]
        if "__file__" in hidden:
            del main_module.__file__  # type: ignore[union-attr]
        yield
    finally:
        if "__spec__" not in hidden:
            del main_module.__spec__  # type: ignore[union-attr]
        for name, value in hidden.items():
            setattr(main_module, name, value)


def _same_import_path() -> dict[str, str]:
    """Return the variables with which a process imports from the same places as this one.

    Without them, the forkserver of older Pythons searches the current folder first, and ignores later additions to
    ``sys.path``: it would preload a different graftlab than the notebook's, or none.
    """
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def _environment_of_forkserver(wanted: dict[str, str]) -> Iterator[None]:
    """Add these variables to the environment of processes started inside."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
