"""Scripts that ``graftlab compare`` starts, as warm processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from kit import warm


def start(arguments: Sequence[str], **how: Any) -> warm.Running:
    """Start a command as ``subprocess.Popen`` does: warm, if it is this Python with a script or torchrun."""
    executable, *rest = arguments
    launches = rest[:2] == ["-m", "torch.distributed.run"]
    if executable != sys.executable or not (launches or rest[0].endswith(".py")):
        return subprocess.Popen(arguments, **how)
    assert how.pop("stdin") == subprocess.DEVNULL
    # Workers are forks of a process that has been prepared, too.
    script = warm.Script(rest, how.pop("env"), prepare="kit.held_scripts.prepare", children=launches, **how)
    for stream in (script.stdin, script.stdout, script.stderr):
        stream.close()
    return script
