"""Ranks on a Ray cluster of a head and two workers: found mistakes, deaths, and what is left; and jobs inside Ray."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = [pytest.mark.soak, pytest.mark.ranks, pytest.mark.timeout(2400)]

SCRIPTS = Path(__file__).with_name("scripts")
# Ray asks a public name server for its own address, unless it has no network but its own loopback interface.
ALONE = ["unshare", "--net", "--pid", "--fork", "--kill-child", "--mount-proc"]


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short name: the path of a socket of Ray's has at most 107 bytes."""
    made = tempfile.mkdtemp(prefix="gl-ray-", dir="/tmp")
    yield Path(made)
    shutil.rmtree(made, ignore_errors=True)


def tell(story: str, folder: Path) -> None:
    """Run this script, which starts a cluster, with a network and process numbers of its own."""
    pytest.importorskip("ray", reason="needs ray: pip install 'graftlab[ray]'")
    if not shutil.which("unshare") or subprocess.run([*ALONE, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to make namespaces, because Ray would look for a network")
    environment = {
        **os.environ,
        "RAY_USAGE_STATS_ENABLED": "0",
        "GRAFTLAB_HOME": str(folder / "home"),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [*ALONE, "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, SCRIPTS / story, folder]
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    assert done.returncode == 0, done.stdout.decode(errors="replace")[-8000:]


def test_a_ray_cluster_runs_a_session_survives_deaths_and_gets_all_back(folder: Path) -> None:
    tell("ray_story.py", folder)


def test_a_stale_cache_of_a_rollout_engine_inside_ray_is_found(folder: Path) -> None:
    tell("ray_rollout_story.py", folder)
