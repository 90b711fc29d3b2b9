"""From where processes are started: one long-lived thread, and by default a forkserver that has imported torch already.

Ranks belong to the thread that started them as far as the system's parent-death signals go, so it must not end.
"""

from __future__ import annotations

import contextlib
import multiprocessing.forkserver
import multiprocessing.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from typing import Any, ParamSpec, TypeVar

import torch.multiprocessing

from graftlab.ranks import preload_first, preload_last

P = ParamSpec("P")
T = TypeVar("T")

PRELOADED = ["graftlab.ranks.worker"]
"""What the forkserver imports, so that ranks need not. Changes count until it starts."""

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftlab-launcher")


def on_starter(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> Future[T]:
    """Call this on the thread that starts processes."""
    return _starter.submit(function, *args, **kwargs)


def warm_up() -> None:
    """Start the forkserver, which imports torch, before the first launch needs it. Returns at once."""
    on_starter(prepare)


def start_process(target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Start a process the way ranks are started, from the same thread and the same warm forkserver."""

    def start() -> BaseProcess:
        prepare()
        process = torch.multiprocessing.get_context("forkserver").Process(target=target, args=args, name=name)
        with hidden_main():
            process.start()
        return process

    return on_starter(start).result()


def prepare() -> None:
    """Start the forkserver unless it runs already. Raises OSError where it cannot listen."""
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload(
        [preload_first.__name__, *PRELOADED, preload_last.__name__]
    )
    told = f"{os.getpid()}{os.pathsep}{multiprocessing.util.get_temp_dir()}"
    with hidden_main(), _environment_of_forkserver({preload_first.VARIABLE: told, **_same_import_path()}):
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script anew in every process that starts meanwhile.

    Functions travel by value, so ranks never need it; without this, a script that has no main guard launches itself.
    """
    main_module = sys.modules.get("__main__")
    hidden = {name: getattr(main_module, name) for name in ("__spec__", "__file__") if hasattr(main_module, name)}
    try:
        # Also where there is none, as after a notebook's %reset: multiprocessing asks for it.
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
    """What lets a process import what this one imports.

    Left alone, the forkserver of older Pythons looks into the current folder first, and nowhere that was put on
    ``sys.path`` later: it would preload a different graftlab than the notebook's, or none.
    """
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str))
    return {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


@contextlib.contextmanager
def _environment_of_forkserver(wanted: dict[str, str]) -> Iterator[None]:
    """Processes that start meanwhile get these variables too."""
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
