"""The job scripts of docs/attach.md run under Slurm, of a controller and two nodes that the test starts."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from kit import namespaces

pytestmark = [pytest.mark.soak, pytest.mark.ranks, pytest.mark.timeout(1200)]

SCRIPT = Path(__file__).parent / "scripts" / "slurm_story.py"


def test_the_pages_job_scripts_run_under_slurm_and_find_the_mistake() -> None:
    for program in ("slurmctld", "slurmd", "munged", "sbatch"):
        if not shutil.which(program):
            pytest.skip(f"needs {program}: Debian's packages slurm-wlm and munge")
    namespaces.run(SCRIPT)
