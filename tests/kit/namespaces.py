"""Scripts that start a cluster on this machine, with a network, process numbers and a host name of their own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

# Ray asks a public name server for its own address, unless it has no network but its own loopback interface.
_ALONE = ["unshare", "--net", "--pid", "--uts", "--fork", "--kill-child", "--mount-proc"]


def require() -> None:
    """Skip the test where this user may make no namespaces."""
    if not shutil.which("unshare") or subprocess.run([*_ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces, because the cluster would look for a network")


def run(script: Path, *arguments: object, **extra: str) -> None:
    """Run this script, whose first argument is a folder, to its end; its output is shown if it fails.

    The folder has a short name: the path of a socket has at most 107 bytes. ``extra`` are environment variables.
    """
    require()
    folder = Path(tempfile.mkdtemp(prefix="gl-", dir="/tmp"))
    environment = {
        **os.environ,
        "GRAFTLAB_HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
        **extra,
    }
    inside = ["sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, script, folder, *map(str, arguments)]
    try:
        done = subprocess.run([*_ALONE, *inside], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
        assert done.returncode == 0, done.stdout.decode(errors="replace")[-8000:]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
