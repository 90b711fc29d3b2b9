"""The commands of both sides: how they are started, what is said of one that ends, and which processes are admitted."""

from __future__ import annotations

import os
import select
import shlex
import socket
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from kit.deadline import DEADLINE
from kit.mailboxes import in_background
from kit.processes import descriptors

import graftlab as gl
from graftlab.base.world import Side
from graftlab.jobs import held_script, script_launcher
from graftlab.jobs.handshake import (
    HoldAccepted,
    HoldRequest,
    RequestRefused,
    StatusQuery,
    receive_handshake,
    send_handshake,
)
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.jobs.script_launcher import ScriptSettings, _Admission, _environment, start_scripts
from graftlab.jobs.script_process import ScriptCommand, ScriptProcess
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.descriptors import receive_descriptors
from graftlab.ranks.held_call import WatchChoice
from graftlab.ranks.options import LaunchOptions

pytestmark = pytest.mark.ranks  # of a shell


def started(tmp_path: Path, script: str, **more: Any) -> ScriptProcess:
    command = ScriptCommand(("sh", "-c", script), **more)
    return ScriptProcess("target", command, tmp_path / "target.log", dict(os.environ))


def start(
    folder: Path, baseline: str, target: str, on_wait: Callable[..., None] = lambda *_: None, **settings: Any
) -> Sequence[Any]:
    (folder / "logs").mkdir(exist_ok=True)
    scripts: dict[Side, str] = {"baseline": baseline, "target": target}
    commands = {side: ScriptCommand(("sh", "-c", script)) for side, script in scripts.items()}
    return start_scripts(commands, LaunchOptions(1, 1), GraftPlan(), folder, ScriptSettings(**settings), on_wait)


# ---- one process ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "how", "done"),
    [
        ("exit 0", "ended with exit code 0", True),
        ("exit 3", "ended with exit code 3", False),
        ("kill -9 $$", "was killed by SIGKILL", False),
    ],
)
def test_how_a_command_ended_is_said(script: str, how: str, done: bool, tmp_path: Path) -> None:
    process = started(tmp_path, script)
    assert process.wait(DEADLINE)
    assert (process.how_it_ended(), process.is_done, process.has_ended) == (how, done, True)
    process.release()


def test_a_command_runs_in_its_folder_with_its_output_in_a_private_log(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    process = started(tmp_path, "pwd; pwd >&2; cat; exit 5", folder=str(tmp_path / "here"))
    assert process.wait(DEADLINE)
    assert process.last_lines() == f"{tmp_path}/here\n{tmp_path}/here"
    assert process.exit_code == 5
    assert process.log.stat().st_mode & 0o777 == 0o600
    process.release()


def test_only_the_last_lines_of_this_start_are_shown(tmp_path: Path) -> None:
    for script, shown in [("seq 1 30", range(11, 31)), ("echo 7", [7]), ("true", ["(nothing)"])]:
        process = started(tmp_path, script)
        assert process.wait(DEADLINE)
        assert process.last_lines() == "\n".join(map(str, shown))
        process.release()
    assert len(process.log.read_text().split()) == 31
    process.log.unlink()
    assert process.last_lines().startswith("(its output cannot be read: ")


def test_a_command_that_runs_is_ended_with_the_programs_that_it_started(tmp_path: Path) -> None:
    process = started(tmp_path, "sleep 1000 & echo $!; wait")
    assert not process.wait(0.0)
    assert (process.how_it_ended(), process.exit_code, process.is_done) == ("runs", None, False)
    while not (said := process.log.read_text()).endswith("\n"):
        assert not process.has_ended
    child = os.pidfd_open(int(said))
    ended = process.ended
    process.release()
    process.release()
    assert process.how_it_ended() == "was killed by SIGKILL"
    assert select.select([child], [], [], DEADLINE)[0]
    os.close(child)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(ended)


def test_a_process_that_keeps_going_is_not_ended(tmp_path: Path) -> None:
    process = started(tmp_path, "exec sleep 1000")
    process.keeps_going = True
    process.release()
    assert not process.has_ended
    process._process.kill()
    assert process.wait(DEADLINE)


def test_the_log_is_not_left_open_in_this_process(tmp_path: Path) -> None:
    process = started(tmp_path, "exit 0")
    with pytest.raises(gl.LaunchError, match=r"the target `/nowhere/x 'a b'` cannot be started: .*No such file"):
        ScriptProcess("target", ScriptCommand(("/nowhere/x", "a b")), tmp_path / "target.log", {})
    log = process.log.stat().st_ino
    for descriptor in os.listdir("/proc/self/fd"):
        path = Path("/proc/self/fd", descriptor)
        assert not path.exists() or path.stat().st_ino != log
    process.release()


# ---- its environment ------------------------------------------------------------------------------------------------


def test_a_script_gets_its_side_and_no_variable_of_a_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    of_jobs = ("GRAFTLAB_ENABLE", "GRAFTLAB_RECORD", "GRAFTLAB_ROLE", "DUMPER_GRAFTER_ENABLE")
    for name in of_jobs:
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("PYTHONPATH", "/mine")
    found = _environment("target", tmp_path, ScriptSettings(), {"GRAFTLAB_ENABLE": "1", "RATE": "3"})
    assert (found[held_script.SIDE], found[held_script.FOLDER], found["RATE"]) == ("target", str(tmp_path), "3")
    assert not {*of_jobs, held_script.MODEL, "GRAFTLAB_COMPARE_INJECT"} & {*found}
    assert found["PYTHONPATH"] == f"{script_launcher._BOOTSTRAP}:/mine"
    assert found["PYTHONUNBUFFERED"] == "1"
    given = _environment("target", tmp_path, ScriptSettings(model="Net", inject=True), {"PYTHONPATH": ""})
    assert (given[held_script.MODEL], given["GRAFTLAB_COMPARE_INJECT"]) == ("Net", "1")
    assert given["PYTHONPATH"] == str(script_launcher._BOOTSTRAP)


# ---- both sides -----------------------------------------------------------------------------------------------------


def test_a_side_that_ends_without_a_call_ends_the_other_too(tmp_path: Path) -> None:
    kept: list[ScriptProcess] = []
    # A rank of an earlier comparison in this folder.
    claim = tmp_path / "target-0-is-a-process"
    claim.touch()
    before = descriptors()
    with pytest.raises(gl.LaunchError) as raised:
        start(tmp_path, "exec sleep 1000", "echo no weights; exit 3", lambda processes, _: kept.extend(processes))
    assert "the target `sh -c 'echo no weights; exit 3'` ended with exit code 3 before it called a model." in str(
        raised.value
    )
    assert str(raised.value).endswith("ends:\nno weights")
    # What a model is explains a script that has succeeded, and no error of a script.
    assert "A model is" not in str(raised.value)
    assert kept[0].how_it_ended() == "was killed by SIGKILL"
    assert not claim.exists()
    # Nothing of it is left open.
    assert descriptors() <= before
    with Rendezvous(tmp_path) as place, place.locked():
        listener = place.listen()
        assert listener is not None
        listener.close()


@pytest.mark.parametrize(
    ("code", "advice"),
    [("exit 0", "A model is a torch.nn.Module with parameters"), ("echo EOFError; exit 1", "have no standard input")],
)
def test_the_error_of_a_side_without_a_call_gives_the_likely_reason(tmp_path: Path, code: str, advice: str) -> None:
    with pytest.raises(gl.LaunchError, match=advice):
        start(tmp_path, "exec sleep 1000", code)


def test_a_script_of_several_ranks_without_a_launcher_gets_the_command(tmp_path: Path) -> None:
    (tmp_path / "logs").mkdir()
    script = tmp_path / "ep.py"
    script.write_text("raise SystemExit('RANK is not set')")

    def said(target: ScriptCommand) -> str:
        commands: dict[Side, ScriptCommand] = {"baseline": ScriptCommand(("sleep", "1000")), "target": target}
        with pytest.raises(gl.LaunchError) as raised:
            start_scripts(commands, LaunchOptions(1, target.ranks), GraftPlan(), tmp_path, ScriptSettings(), print)
        return str(raised.value)

    plain = (sys.executable, str(script), "--fast")
    launched = f"give the command that does: 'torchrun --nproc-per-node 2 {script} --fast'."
    assert launched in said(ScriptCommand(plain, 2))
    assert "--ranks" not in said(ScriptCommand(plain, 1))
    assert "--ranks" not in said(ScriptCommand(("env", *plain), 2))


def test_sides_that_call_no_model_in_time_are_named_with_their_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script_launcher, "_LOOK", 0.0)
    times = iter((1000.0, 1004.0, 1006.0))
    monkeypatch.setattr(script_launcher, "time", SimpleNamespace(monotonic=lambda: next(times)))
    with pytest.raises(gl.LaunchError) as raised:
        start(tmp_path, "exec sleep 1000", "exec sleep 1000", timeout=5.0)
    text = str(raised.value)
    assert text.startswith("baseline[0], target[0] had not called a model within 5 s; --timeout waits longer. ")
    assert not [*times]
    assert "The output of the baseline `sh -c" in text
    assert "The output of the target `sh -c" in text


def test_models_that_were_called_beside_the_wanted_one_are_named(tmp_path: Path) -> None:
    calls = shlex.quote(str(held_script.other_models(tmp_path, "target")))
    with pytest.raises(gl.LaunchError, match=r"It has called Linear, Critic only; --model names a different model\."):
        start(tmp_path, "exec sleep 1000", f"printf 'Linear\\nCritic\\nLinear\\n' > {calls}; exit 0", model="Net")


def test_a_folder_in_which_a_session_listens_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with Rendezvous(tmp_path) as place:
        with place.locked():
            listener = place.listen()
        assert listener is not None
        with listener, pytest.raises(gl.LaunchError, match=r"already listens in .*; pass another folder"):
            start(tmp_path, "exit 0", "exit 0")
    assert not [*(tmp_path / "logs").iterdir()]


# ---- which processes are admitted -----------------------------------------------------------------------------------


def asked(admission: _Admission, request: Any) -> Any:
    """What a process is answered."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(DEADLINE)
        send_handshake(theirs, request)
        admission._accept(ours)
        return receive_handshake(theirs)


def test_a_rank_is_admitted_once_and_with_the_expected_number_of_ranks(tmp_path: Path) -> None:
    process = started(tmp_path, "exec sleep 1000")
    options = LaunchOptions(1, 2, tap_timeout=7.0, buffer_budget=1 << 20, keep_budget=1 << 19)
    choice = WatchChoice("name == 'x'", ("matmul",), "name == 'y'")
    admission = _Admission([process], options, GraftPlan(), choice, tmp_path)
    admission._shared.make()
    pid = os.getpid()
    for wrong in (1, 3):
        refused = asked(admission, HoldRequest("target", 1, wrong, pid, "cpu", "gloo"))
        assert refused.error.startswith(f"the target has {wrong} ranks and 2 were expected; give --ranks 1,{wrong}")
    refused = asked(admission, HoldRequest("baseline", 0, 3, pid, "cpu", "gloo"))
    assert refused.error.endswith("give --ranks 3,2")
    accepted = asked(admission, HoldRequest("target", 1, 2, pid, "cpu", "gloo"))
    assert isinstance(accepted, HoldAccepted)
    assert (accepted.other_world_size, accepted.tap_timeout) == (1, 7.0)
    assert (accepted.buffer_budget, accepted.keep_budget) == (1 << 20, 1 << 19)
    assert WatchChoice(accepted.include, accepted.functions, accepted.inside) == choice
    again = asked(admission, HoldRequest("target", 1, 2, pid + 1, "cpu", "gloo"))
    assert isinstance(again, RequestRefused)
    assert again.error == f"target[1] has joined already, as pid {pid}"
    (joined,) = admission._joined.values()
    assert (joined.label, joined.pid, joined.process) == ("target[1]", pid, process)
    assert not joined.join(0.0)
    # Its process may take a moment to end.
    joined.process = Mock(has_ended=False)
    assert joined.how_it_ended() == "closed its connection"
    joined.process.wait.assert_called_once_with(1.0)
    joined.process = process
    # A script that continues by itself keeps no session waiting.
    process.keeps_going = True
    assert joined.join(0.0)
    process.keeps_going = False
    process.kill()
    assert joined.how_it_ended() == "was killed by SIGKILL"
    # What was wrong with its request, and not only that it has ended.
    with pytest.raises(gl.LaunchError) as raised:
        admission._refuse_ended()
    assert str(raised.value) == f"{again.error} (`sh -c 'exec sleep 1000'`, whose output is in {process.log})"
    joined.release()
    admission._shared.release()


def test_an_admitted_rank_gets_the_other_ends_of_its_connections_in_their_order(tmp_path: Path) -> None:
    admission = _Admission(
        [started(tmp_path, "exec sleep 1000")], LaunchOptions(1, 1), GraftPlan(), WatchChoice(), tmp_path
    )
    admission._shared.make()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(DEADLINE)
        send_handshake(theirs, HoldRequest("target", 0, 1, os.getpid(), "cpu", "gloo"))
        admission._accept(ours)
        accepted = receive_handshake(theirs)
        assert isinstance(accepted, HoldAccepted)
        *shared, line, wake, death = receive_descriptors(theirs, accepted.descriptors)
    (rank,) = admission._joined.values()
    for number in shared:
        os.close(number)
    with socket.socket(fileno=line) as ended, socket.socket(fileno=wake) as waker, socket.socket(fileno=death) as alive:
        rank.wake_socket.setblocking(False)
        waker.send(b"!")
        assert rank.wake_socket.recv(1) == b"!"
        alive.setblocking(False)
        with pytest.raises(BlockingIOError):
            alive.recv(1)
        rank.release()
        # The end of the session is the end of both.
        ended.setblocking(False)
        assert alive.recv(1) == ended.recv(1) == b""
    admission._shared.release()


def test_a_rank_that_waits_for_others_in_vain_ends_with_its_command(tmp_path: Path) -> None:
    process = started(tmp_path, "exec sleep 1000")
    admission = _Admission([process], LaunchOptions(1, 2), GraftPlan(), WatchChoice(), tmp_path)

    def join(*_: Any) -> None:
        if not admission._joined:
            asked(admission, HoldRequest("target", 0, 2, os.getpid(), "cpu", "gloo"))

    with Rendezvous(tmp_path) as place, place.locked():
        listener = place.listen()
        assert listener is not None
        with listener, pytest.raises(gl.LaunchError, match=r"target\[1\] had not called a model within 0 s") as raised:
            admission.wait(listener, 0.0, join)
    assert process.has_ended
    # The next stage of a pipeline waits for a call that is held.
    assert "Meanwhile target[0] waits in a first call" in str(raised.value)


def test_what_is_no_request_to_hold_a_call_is_answered_so(tmp_path: Path) -> None:
    admission = _Admission([], LaunchOptions(1, 1), GraftPlan(), WatchChoice(), tmp_path)
    assert asked(admission, StatusQuery(stacks=False)).error == "it is not a request to hold a call"


def test_a_silent_process_is_given_up_so_that_others_can_be_admitted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(script_launcher, "_HANDSHAKE_LIMIT", 0.01)
    admission = _Admission([], LaunchOptions(1, 1), GraftPlan(), WatchChoice(), tmp_path)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        in_background(lambda: admission._accept(ours)).result(DEADLINE)
    assert "a process was refused: " in caplog.text


def test_processes_of_other_users_get_no_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(script_launcher, "peer_uid", lambda connection: os.getuid() + 1)
    admission = _Admission([], LaunchOptions(1, 1), GraftPlan(), WatchChoice(), tmp_path)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        admission._accept(ours)
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)
    assert f"a process of user {os.getuid() + 1} was refused" in caplog.text
