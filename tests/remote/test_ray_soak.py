"""Ranks on a Ray cluster of a head and two workers: found mistakes, deaths, and what is left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.ranks, pytest.mark.timeout(2400)]

STORY = Path(__file__).with_name("scripts") / "ray_story.py"
# Ray asks a public name server for its own address, unless it has no network but its own loopback interface.
ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


def test_a_ray_cluster_runs_a_session_survives_deaths_and_gets_all_back(tmp_path: Path) -> None:
    pytest.importorskip("ray", reason="needs ray: pip install 'graftlab[ray]'")
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces, because Ray would look for a network")
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "GRAFTLAB_HOME": str(tmp_path / "home"),
        # The paths of Ray's sockets have at most 107 bytes.
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [*ALONE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, str(STORY)]
    done = subprocess.run(
        [*command, str(_short_folder(tmp_path))], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-8000:]


def _short_folder(tmp_path: Path) -> Path:
    """A short name for the test's folder: the path of a socket of Ray's has at most 107 bytes."""
    link = Path(f"/tmp/gl-ray-{os.getpid()}")
    link.unlink(missing_ok=True)
    link.symlink_to(tmp_path)
    return link
