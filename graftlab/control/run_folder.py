"""The run folder, where a session's rows and logs go."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import time
from pathlib import Path
from typing import Any

from graftlab.base.files import open_regular, others_can_write, read_all
from graftlab.errors import LaunchError

logger = logging.getLogger(__name__)

HOME_VARIABLE = "GRAFTLAB_HOME"
_DESCRIPTION = "session.json"
# A session writes far less, so a larger file is not its own.
_MOST_BYTES, _MOST_RANKS = 1 << 20, 1 << 20


def home() -> Path:
    """The folder for run folders without an explicit path: ``$GRAFTLAB_HOME`` or ``~/.graftlab``.

    Raises :class:`LaunchError` if the user has no home.
    """
    try:
        return Path(os.environ.get(HOME_VARIABLE) or "~/.graftlab").expanduser()
    except RuntimeError as error:
        raise LaunchError(f"{error}; set {HOME_VARIABLE} to a folder you can write to") from error


def make_run_folder(folder: str | Path | None) -> Path:
    """Make the run folder if it is missing, readable by this user alone. Raises :class:`LaunchError` when it cannot."""
    if folder is None:
        path = home() / "runs"
        source = f"set {HOME_VARIABLE} to a folder you can write to"
    elif isinstance(folder, (str, os.PathLike)):
        path, source = Path(folder).expanduser(), "pass another folder="
    else:
        raise LaunchError(f"folder={folder!r}: give a path, or None for a new folder below ${HOME_VARIABLE}")
    # The notebook may change its working directory.
    path = path.absolute()
    try:
        if folder is None:
            path.mkdir(parents=True, exist_ok=True)
            path = _new_folder(path)
        else:
            path.mkdir(parents=True, exist_ok=True, mode=0o700)
        (path / "logs").mkdir(exist_ok=True, mode=0o700)
        is_shared = others_can_write(path)
    except OSError as error:
        raise LaunchError(f"the run folder {path} cannot be made: {error.strerror}; {source}") from error
    if is_shared:
        raise LaunchError(
            f"other users can write into the run folder {path}, and so change what a session reads and writes there; "
            f"run chmod go-w {path}, or {source}"
        )
    return path


def _new_folder(parent: Path) -> Path:
    """Make a folder that nothing else has made, such as another session of this process in the same second."""
    while True:
        path = parent / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(2).hex()}"
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
            return path


def describe_session(folder: Path, sizes: tuple[int, int], first_run: int, rendezvous: Path | None = None) -> None:
    """Write the facts of a session that its rows lack into the run folder.

    These are when it began, its process, the sizes of baseline and target, and the first run with these sizes. A
    session of jobs also has a rendezvous.
    """
    before = description_of(folder)
    if before.get("ranks") == list(sizes) and isinstance(before.get("first_run"), int):
        first_run = before["first_run"]
    facts: dict[str, Any] = {"started": time.time(), "kernel": os.getpid(), "ranks": sizes, "first_run": first_run}
    if rendezvous is not None:
        facts["rendezvous"] = str(rendezvous)
    partial = folder / f"{_DESCRIPTION}.partial"
    try:
        # Whole or not at all: a full disk must not cost the facts that an earlier session wrote.
        descriptor = open_regular(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        with open(descriptor, "w") as file:
            json.dump(facts, file)
        partial.replace(folder / _DESCRIPTION)
    except OSError as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        logger.warning("%s cannot be written: %s", folder / _DESCRIPTION, error)


def description_of(folder: Path) -> dict[str, Any]:
    """The facts that :func:`describe_session` wrote; empty if they cannot be read."""
    try:
        facts = json.loads(read_all(folder, _DESCRIPTION, most=_MOST_BYTES))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) else {}


def sizes_of(folder: Path, run: int) -> tuple[int, int] | None:
    """The sizes of baseline and target in this run; None if they are not known."""
    facts = description_of(folder)
    try:
        baseline, target = (int(size) for size in facts["ranks"])
        known = run >= int(facts["first_run"]) and max(baseline, target) <= _MOST_RANKS
        return (baseline, target) if known else None
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
