"""The run folder, where a session's rows and logs go."""

from __future__ import annotations

import json
import logging
import os
import time
from pathlib import Path

from graftlab.errors import LaunchError

logger = logging.getLogger(__name__)

HOME_VARIABLE = "GRAFTLAB_HOME"


def home() -> Path:
    """Where run folders lie that nobody named: ``$GRAFTLAB_HOME`` or ``~/.graftlab``.

    Raises :class:`LaunchError` where the user has no home.
    """
    try:
        return Path(os.environ.get(HOME_VARIABLE) or "~/.graftlab").expanduser()
    except RuntimeError as error:
        raise LaunchError(f"{error}; set {HOME_VARIABLE} to a folder you can write to") from error


def make_run_folder(folder: str | Path | None) -> Path:
    """The session's run folder, made if need be, for nobody else to enter. Raises LaunchError when it cannot be."""
    if folder is None:
        path = home() / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(2).hex()}"
        source = f"set {HOME_VARIABLE} to a folder you can write to"
    elif isinstance(folder, (str, os.PathLike)):
        path, source = Path(folder).expanduser(), "pass another folder="
    else:
        raise LaunchError(f"folder={folder!r}: give a path, or None for a new folder below ${HOME_VARIABLE}")
    # The notebook may change its folder.
    path = path.absolute()
    try:
        path.mkdir(parents=True, exist_ok=True, mode=0o700)
        (path / "logs").mkdir(exist_ok=True, mode=0o700)
    except OSError as error:
        raise LaunchError(f"the run folder {path} cannot be made: {error.strerror}; {source}") from error
    return path


def describe_session(folder: Path, meeting: Path | None = None) -> None:
    """Note in the run folder when its session began, in which process, and where its jobs meet if it is one of jobs."""
    try:
        descriptor = os.open(folder / "session.json", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(descriptor, "w") as file:
            said = {"started": time.time(), "kernel": os.getpid()}
            json.dump(said if meeting is None else {**said, "meeting": str(meeting)}, file)
    except OSError as error:
        logger.warning("%s cannot be written: %s", folder / "session.json", error)
