"""Jobs as users start them: scripts in processes of their own, told by environment variables alone."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

import graftlab as gl
from kit import warm
from kit.deadline import DEADLINE

SCRIPTS = Path(__file__).resolve().parent.parent / "jobs" / "scripts"
ROOT = SCRIPTS.parent.parent.parent


def variables(role: str, baseline: int, target: int, **settings: object) -> dict[str, str]:
    """What a job of this role finds in its environment; ``settings`` by the names of their fields."""
    settings = {
        "enable": 1,
        "baseline_world_size": baseline,
        "target_world_size": target,
        "timeout": DEADLINE,
    } | settings
    return {"GRAFTLAB_ROLE": role, **{f"GRAFTLAB_{name.upper()}": str(value) for name, value in settings.items()}}


def environment(extra: dict[str, str]) -> dict[str, str]:
    # Unbuffered, the words of one print come one by one, and those of two ranks that share a pipe come mixed.
    dropped = ("GRAFTLAB_", "DUMPER_", "PYTHONUNBUFFERED")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**kept, "GRAFTLAB_HOME": os.environ["GRAFTLAB_HOME"], "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **extra}


def start(
    script: str, *arguments: object, command: tuple[str, ...] = (), imports: tuple[str, ...] = (), **extra: str
) -> warm.Running:
    """Start a script of ``tests/jobs/scripts``. ``command`` stands before its path. ``imports`` are imported before."""
    return warm.start([*command, SCRIPTS / script, *arguments], environment(extra), imports=imports, children=True)


def end(process: warm.Running) -> tuple[int, str, str]:
    """Its exit code, and what it printed to either stream."""
    try:
        out, err = process.communicate(timeout=4 * DEADLINE)
    except subprocess.TimeoutExpired:
        process.kill()
        out, err = process.communicate()
    assert process.returncode is not None
    return process.returncode, out, err


def on_look(session: gl.Session, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
    """Do this when a verdict looks whether its second plan, under which every tap is grafted, is in force."""
    adopted = session.adopted

    def look(version: int) -> dict[str, int]:
        if session.plan.b2t is not None:
            monkeypatch.undo()
            act()
        return adopted(version)

    monkeypatch.setattr(session, "adopted", look)
