"""The run folder, where a session's rows and logs go."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from graftlab.errors import LaunchError

HOME_VARIABLE = "GRAFTLAB_HOME"


def make_run_folder(folder: str | Path | None) -> Path:
    """The session's run folder, made if need be. Raises LaunchError when it cannot be."""
    if folder is None:
        home = Path(os.environ.get(HOME_VARIABLE) or "~/.graftlab").expanduser()
        path = home / "runs" / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{os.urandom(2).hex()}"
        source = f"set {HOME_VARIABLE} to a folder you can write to"
    else:
        path, source = Path(folder).expanduser(), "pass another folder="
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True, mode=0o700)
        (path / "session.json").write_text(json.dumps({"started": time.time(), "kernel": os.getpid()}))
    except OSError as error:
        raise LaunchError(f"the run folder {path} cannot be made: {error.strerror}; {source}") from error
    return path
