"""What is done in a warm process before a script of ``graftlab compare`` begins there.

A module of its own, because what it imports is imported for each script, which needs nothing of the notebook's side.
"""

from __future__ import annotations

import runpy
from pathlib import Path

import torch

_BOOTSTRAP = Path(__file__).resolve().parents[2] / "graftlab" / "jobs" / "bootstrap"


def prepare() -> None:
    """Do in a process that has imported torch what the sitecustomize of compared scripts does when it is imported."""
    runpy.run_path(str(_BOOTSTRAP / "sitecustomize.py"))["_prepare"](torch.nn.Module)
