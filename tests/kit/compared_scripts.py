"""Scripts that ``graftlab compare`` starts, as warm processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kit import warm


def start(arguments: Sequence[str], **how: Any) -> warm.Running:
    """Start a command as ``subprocess.Popen`` does: warm, if it is this Python with a script."""
    executable, *rest = arguments
    if executable != sys.executable or not rest[0].endswith(".py"):
        return subprocess.Popen(arguments, **how)
    assert how.pop("stdin") == subprocess.DEVNULL
    script = warm.Script(rest, how.pop("env"), prepare="kit.held_scripts.prepare", **how)
    for stream in (script.stdin, script.stdout, script.stderr):
        stream.close()
    return script
