"""How a script's command is started: apart from the terminal, in its folder, and with all of its output in the log."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.errors import LaunchError
from graftlab.jobs import script_launcher
from graftlab.jobs.script_launcher import ScriptSettings, start_scripts
from graftlab.jobs.script_process import ScriptCommand, ScriptProcess
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.options import LaunchOptions


def test_a_command_is_started_apart_from_the_terminal_with_its_output_in_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[tuple[Any, dict[str, Any]]] = []

    def popen(arguments: Any, **options: Any) -> Any:
        os.write(options["stdout"], b"out\n")
        os.write(options["stderr"], b"err\n")
        started.append((arguments, options))
        return SimpleNamespace(pid=os.getpid())

    monkeypatch.setattr(subprocess, "Popen", popen)
    log = tmp_path / "target.log"
    log.write_bytes(b"an earlier start\n")
    command = ScriptCommand(("python", "train.py"), folder="/models")
    process = ScriptProcess("target", command, log, {"A": "b"})
    os.close(process.ended)
    ((arguments, options),) = started
    assert arguments == ("python", "train.py")
    # An interrupt of the terminal reaches graftlab alone, which ends what the script has started too.
    assert options["start_new_session"] is True
    assert options["stdin"] == subprocess.DEVNULL
    assert (options["cwd"], options["env"]) == ("/models", {"A": "b"})
    assert log.read_bytes() == b"an earlier start\nout\nerr\n"
    assert process.last_lines() == "out\nerr"


@pytest.mark.parametrize("error", [LaunchError("a side ended"), KeyboardInterrupt(), SystemExit(1)])
def test_whatever_ends_the_wait_for_the_scripts_ends_both(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released: list[str] = []

    def wait(*given: Any) -> Any:
        raise error

    monkeypatch.setattr(
        script_launcher,
        "ScriptProcess",
        lambda side, *given: SimpleNamespace(release=lambda: released.append(side)),
    )
    monkeypatch.setattr(script_launcher, "_Admission", lambda *given: SimpleNamespace(wait=wait))
    commands = {side: ScriptCommand(("python", "train.py")) for side in ("baseline", "target")}
    with pytest.raises(type(error)) as raised:
        start_scripts(commands, LaunchOptions(1, 1), GraftPlan(), tmp_path, ScriptSettings(), print)  # type: ignore[arg-type]
    assert raised.value is error
    assert released == ["baseline", "target"]
