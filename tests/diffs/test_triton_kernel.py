"""The fused CUDA kernel against the same references as the others, in Triton's interpreter on the CPU."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
from kit.support import not_on

CASES = Path(__file__).with_name("triton_cases.py")


@pytest.mark.ranks
@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed (pip install triton)")
@not_on("2.9", "has a Triton whose interpreter fails with numpy 2.4 and newer")
def test_the_fused_kernel_is_right_in_tritons_interpreter() -> None:
    # A separate process, because Triton reads the variable when it is imported.
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", str(CASES)]
    done = subprocess.run(command, env=os.environ | {"TRITON_INTERPRET": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert " passed" in done.stdout
