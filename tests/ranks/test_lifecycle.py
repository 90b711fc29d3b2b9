"""Ranks end with their session, in whatever way the notebook or one of them ends."""

from __future__ import annotations

import contextlib
import json
import multiprocessing.util
import os
import re
import signal
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.deadline import DEADLINE
from kit.kernels import COLD, Kernel, kernel
from kit.processes import family, shared_memory_left, still_there, watch
from kit.scripts import first_line, script
from kit.support import wait_until

import graftlab as gl

pytestmark = pytest.mark.ranks

METHODS = ("forkserver", "spawn")

# What holds the interpreter in C gets no Python to run, not even to learn that the notebook is gone.
WAIT_AND_HOLD = """
import re, time
import graftlab as gl

def hold_the_interpreter():
    print("holding")
    re.match("(a+)+b", "a" * 64)

one = gl.launch(1, 1, **how)
one.start(baseline=hold_the_interpreter, target="gl.tap('only here', torch.ones(1))")
while "holding" not in one.log("baseline[0]") or one.status().state.tolist() != ["running", "waiting"]:
    time.sleep(0.01)
pids = [rank.pid for rank in one.ranks]
"""
COMPUTE_RECEIVE_AND_IDLE = """
import torch

def compute():
    while True:
        torch.mm(torch.ones(64, 64), torch.ones(64, 64))

def receive_what_nobody_sends():
    if gl.here().rank == 0:
        torch.distributed.recv(torch.ones(1), 1)

two, three = gl.launch(1, 2, **how), gl.launch(1, 1, **how)
two.start(target=receive_what_nobody_sends)
three.start(baseline=compute)
while "recv" not in two.stacks()["target[0]"] or "torch.mm" not in three.stacks()["baseline[0]"]:
    time.sleep(0.01)
while not two.status().state[0] == three.status().state[1] == "idle":
    time.sleep(0.01)
pids += [rank.pid for session in (two, three) for rank in session.ranks]
"""


@pytest.fixture
def shm() -> set[str]:
    return set(os.listdir("/dev/shm"))


@pytest.fixture
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty, short folder for temporary files of this process and those it starts: it will hold sockets."""
    # Outlives this folder: the forkserver of the whole test run listens in it.
    multiprocessing.util.get_temp_dir()
    with tempfile.TemporaryDirectory(prefix="gl-") as folder:
        monkeypatch.setenv("TMPDIR", folder)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)


def pids_of(session: gl.Session) -> list[int]:
    return [int(pid) for pid in session.status().pid]


def receive_what_nobody_sends() -> None:
    dist.recv(torch.ones(1), 1 - dist.get_rank())


# ---- the notebook ends them -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_close_leaves_only_rows_and_logs(temporary: Path, shm: set[str], method: Any) -> None:
    session = gl.launch(1, 1, start_method=method)
    ranks = watch(pids_of(session))
    session.run(lambda: gl.tap("x", torch.ones(1 << 20)).sum(), lambda: gl.tap("x", torch.ones(1 << 20)).sum())
    assert not list(temporary.glob("graftlab*")), "a rendezvous that has a name would stay behind"
    session.close()
    assert still_there(ranks) == []
    assert not list(temporary.glob("graftlab*"))
    assert shared_memory_left(shm) == set()
    assert session.closed
    names = sorted(path.name for path in session.folder.iterdir())
    moved = [name for name in names if name.startswith("rows-") and name.endswith(".parquet")]
    assert len(moved) == 1
    assert names == ["logs", *moved, "rows.crc32", "rows.jsonl", "session.json"]
    assert sorted(path.name for path in (session.folder / "logs").glob("*.log")) == ["baseline-0.log", "target-0.log"]
    assert len(session.frame) == len(gl.load_run(session.folder)) == 1
    session.close()


def test_shared_memory_of_ranks_never_has_a_name() -> None:
    with gl.launch(1, 1) as session:
        session.run(lambda: gl.tap("x", torch.ones(1 << 20)).sum(), lambda: gl.tap("x", torch.ones(1 << 20)).sum())
        for pid in pids_of(session):
            maps = Path(f"/proc/{pid}/maps").read_text()
            assert "graftlab" in maps, "the ranks' shared memory is looked for in the wrong place"
            assert "/dev/shm" not in maps


def test_leaving_the_with_block_ends_the_ranks_even_by_an_exception() -> None:
    with gl.launch(1, 1) as session:
        ranks = watch(pids_of(session))
    assert still_there(ranks) == []

    def leave_by_an_exception() -> None:
        with gl.launch(1, 1) as session:
            ranks.update(watch(pids_of(session)))
            raise ZeroDivisionError

    ranks.clear()
    with pytest.raises(ZeroDivisionError):
        leave_by_an_exception()
    assert len(ranks) == 2
    assert still_there(ranks) == []


def test_closing_ends_ranks_that_hang_in_a_collective_and_the_run_reports_why() -> None:
    session = gl.launch(1, 2)
    ranks = watch(pids_of(session))
    run = session.start(target=receive_what_nobody_sends)
    wait_until(lambda: "recv" in session.stacks()["target[1]"], "the wait in recv")
    session.close()
    assert still_there(ranks) == []
    assert run.done
    with pytest.raises(gl.RunError, match=r"target\[0\], target\[1\] died: the session was closed"):
        run.wait()


# ---- the notebook ends ----------------------------------------------------------------------------------------------

LIVES = """
    import json, os, signal, sys, time
    import torch
    import graftlab as gl

    session = gl.launch(1, 2)
    session.run(baseline="__import__('subprocess').Popen(['sleep', '1000']).pid")
    run = session.start(target=lambda: torch.distributed.recv(torch.ones(1), 1 - gl.here().rank))
    while "recv" not in session.stacks()["target[1]"]:
        time.sleep(0.01)
    print(json.dumps([rank.pid for rank in session.ranks]), flush=True)
    sys.stdin.readline()
"""


@pytest.mark.parametrize(
    ("ending", "status"),
    [
        ("pass", 0),
        ("sys.exit(3)", 3),
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
    ],
)
def test_the_end_of_a_script_ends_its_ranks_and_their_programs(
    temporary: Path, tmp_path: Path, shm: set[str], ending: str, status: int
) -> None:
    with script(textwrap.dedent(LIVES) + ending, tmp_path) as process:
        pids = first_line(process)
        everyone = watch(family(process.pid) | set(pids))
        assert set(pids) < set(everyone)
        process.communicate("go on\n")
        assert process.returncode == status
    assert still_there(everyone) == []
    assert shared_memory_left(shm) == set()
    assert not list(temporary.glob("graftlab*"))
    assert not list(temporary.glob("pymp-*"))


def test_a_killed_kernel_leaves_no_rank_in_any_state(shm: set[str]) -> None:
    with kernel() as notebook:
        reply = notebook.run(f"how = {{}}\n{WAIT_AND_HOLD}\n{COMPUTE_RECEIVE_AND_IDLE}\npids")
        assert not reply.error, reply.error
        pids = json.loads(reply.values[-1])
        assert len(pids) == 7
        everyone = watch(family(notebook.pid) | set(pids))
        os.kill(notebook.pid, signal.SIGKILL)
        assert still_there(everyone) == []
        assert not list(notebook.temporary.glob("graftlab*"))
    assert shared_memory_left(shm) == set()


def test_a_killed_script_leaves_no_spawned_rank(temporary: Path, tmp_path: Path, shm: set[str]) -> None:
    last = "import json\nprint(json.dumps(pids), flush=True)\ninput()\n"
    with script(f"how = dict(start_method='spawn')\n{WAIT_AND_HOLD}{last}", tmp_path) as process:
        pids = first_line(process)
        everyone = watch(family(process.pid) | set(pids))
        assert len(pids) == 2
        process.kill()
    assert still_there(everyone) == []
    assert shared_memory_left(shm) == set()


def test_a_restarted_kernel_leaves_no_rank_and_can_start_new_ones(shm: set[str]) -> None:
    with kernel() as notebook:
        for now in (False, True):
            started = notebook.run("%load_ext graftlab\n%graft up\n[rank.pid for rank in session.ranks]")
            assert not started.error, started.error
            everyone = watch(family(notebook.pid) - {notebook.pid} | set(json.loads(started.values[-1])))
            hang = "session.start('__import__(\"time\").sleep(600)', 'gl.tap(\"x\", torch.ones(1))').done"
            assert notebook.run(hang).values == ["False"]
            notebook.manager.restart_kernel(now=now)
            notebook.client.wait_for_ready(timeout=DEADLINE)
            assert still_there(everyone) == []
            assert not list(notebook.temporary.glob("graftlab*"))
    assert shared_memory_left(shm) == set()


# ---- the stop button ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def gates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which each spawned process of the kernel below makes a file named by its pid, and then hangs."""
    return tmp_path_factory.mktemp("gates")


@pytest.fixture(scope="module")
def gated(gates: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    """A kernel whose spawned processes hang at their start, while its environment has a variable GATES."""
    folder = tmp_path_factory.mktemp("hooks")
    (folder / "sitecustomize.py").write_text(
        "import os, signal, sys\n"
        "if 'GATES' in os.environ and '--multiprocessing-fork' in sys.orig_argv:\n"
        "    signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "    open(os.path.join(os.environ['GATES'], str(os.getpid())), 'w').close()\n"
        "    signal.pause()\n"
    )
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    # The stop button reaches a forkserver that still imports, too.
    with kernel(PYTHONPATH=path, **{COLD: "yes"}) as notebook:
        loaded = notebook.run("%load_ext graftlab\nimport graftlab as gl\nimport os")
        assert not loaded.error, loaded.error
        yield notebook


def test_the_stop_button_during_a_launch_leaves_no_rank_and_allows_another(gates: Path, gated: Kernel) -> None:
    gated.run(f"os.environ['GATES'] = {str(gates)!r}")
    cell = gated.begin("session = gl.launch(1, 1, start_method='spawn', timeout=600)")
    wait_until(lambda: len(os.listdir(gates)) == 2, "the start of two processes")
    ranks = watch(int(name) for name in os.listdir(gates))
    gated.manager.interrupt_kernel()
    stopped = gated.finish(cell)
    assert stopped.error == "KeyboardInterrupt: the launch was stopped, and its ranks end; no session was opened"
    assert still_there(ranks) == []
    gated.run("del os.environ['GATES']")
    after = gated.run("with gl.launch(1, 1) as session:\n    run = session.run('1')\nrun.baseline")
    assert after.values[-1:] == ["[1]"], after.error


def test_the_stop_button_ends_the_wait_and_not_the_ranks(gated: Kernel, tmp_path: Path) -> None:
    for side in ("baseline", "target"):
        os.mkfifo(tmp_path / side)
    gated.run(f"from pathlib import Path\nfolder = Path({str(tmp_path)!r})")
    gated.run("%graft up -b 1 -t 1")
    wait = f"def wait():\n    print('begun')\n    return open({str(tmp_path)!r} + '/' + gl.here().side).read()"
    gated.run(f"%%graft both\n{wait}")
    pids = json.loads(gated.run("[rank.pid for rank in session.ranks]").values[-1])
    for pid in pids:
        assert os.getsid(pid) == pid, "a rank would get the signals of the kernel's terminal and group"

    cell = gated.begin("%graft run -o run wait()")
    gated.finish(cell, until=lambda reply: reply.stdout.count("begun") == 2)
    gated.manager.interrupt_kernel()
    stopped = gated.finish(cell)
    assert stopped.error.startswith("KeyboardInterrupt: stopped waiting for run 1; the ranks continue")
    assert "session.runs[-1].wait()" in stopped.error
    assert "Traceback" not in stopped.error
    assert gated.run("run.done, [rank.pid for rank in session.ranks]").values[-1] == str((False, pids))
    assert gated.run("%graft run 1").error.startswith("SessionBusyError: run 1 is still running")

    gated.run("for side in ('baseline', 'target'):\n    (folder / side).write_text(side + ' went on')")
    ended = gated.run("session.runs[1].wait().baseline, run.target")
    assert ended.values[-1] == "(['baseline went on'], ['target went on'])"


def test_a_rank_shares_the_forkservers_imports_even_after_a_garbage_collection() -> None:
    def shared() -> bool:
        import gc

        import torch

        # An import makes objects that no collection may reach, or the rank would have to copy them.
        return gc.get_freeze_count() > 10_000 and not any(each is torch.__dict__ for each in gc.get_objects())

    with gl.launch(1, 1) as session:
        assert session.run(shared).baseline == [True]


# ---- one rank ends --------------------------------------------------------------------------------------------------


def test_a_killed_rank_frees_the_others_and_the_run_names_it_with_its_log() -> None:
    def baseline() -> None:
        print("the last words of the baseline")
        gl.tap("never", lambda: torch.ones(1)) if gl.here().side == "target" else receive_nothing()

    def receive_nothing() -> None:
        import time

        time.sleep(600)

    with gl.launch(1, 2, timeout=600.0) as session:
        # The death alone ends the waits: no rank is interrupted.
        run = session.start(baseline, lambda: gl.tap("never", torch.ones(1)).item(), on_failure="continue")
        wait_until(lambda: session.status().state.tolist() == ["running", "waiting", "waiting"], "the wait at the tap")
        wait_until(lambda: "last words" in session.log("baseline[0]"), "the print")
        session.ranks[0].signal(signal.SIGKILL)
        # The waits themselves would have ten minutes.
        with pytest.raises(gl.RunError) as caught:
            run.wait(DEADLINE)
        assert list(caught.value.failures) == ["baseline[0]"]
        assert re.search(
            r"baseline\[0\] died: killed by SIGKILL \(pid \d+, .*\). Its log \(.*baseline-0.log\) ends:",
            str(caught.value),
        )
        assert "the last words of the baseline" in str(caught.value)
        assert run.target == [1.0, 1.0]
        assert run.frame.status.tolist() == ["missing", "missing"]
        assert run.frame.error.tolist() == ["baseline[0] died"] * 2

        status = session.status()
        assert status.state.tolist() == ["gone: killed by SIGKILL", "idle", "idle"]
        assert session.run(target="gl.here().rank").target == [0, 1]
        with pytest.raises(
            gl.SessionClosedError, match=r"baseline\[0\] is gone \(killed by SIGKILL\) .*session\.restart\(\)"
        ) as refused:
            session.run("1", "1")
        assert "the last words of the baseline" in str(refused.value)
        assert sorted(session.stacks()) == ["target[0]", "target[1]"]


def test_a_rank_killed_in_a_collective_frees_the_others_of_its_side() -> None:
    with gl.launch(1, 2, timeout=600.0) as session:
        run = session.start(target=receive_what_nobody_sends)
        wait_until(lambda: "recv" in session.stacks()["target[0]"], "the wait in recv")
        session.ranks[2].signal(signal.SIGKILL)
        with pytest.raises(gl.RunError) as caught:
            run.wait(DEADLINE)
        assert sorted(caught.value.failures) == ["target[0]", "target[1]"]
        assert "target[1] died: killed by SIGKILL" in str(caught.value)
        assert "target[0] raised" in str(caught.value)


@pytest.mark.parametrize("how", ["sys.exit(7)", "raise SystemExit('no more')"])
def test_code_that_exits_fails_its_run_and_leaves_the_rank_alive(how: str) -> None:
    with gl.launch(1, 1) as session:
        pids = pids_of(session)
        with pytest.raises(gl.RunError, match=r"the code called exit\(.*the rank keeps running"):
            session.execute(f"import sys\n{how}", on="target")
        assert session.run("1", "2").target == [2]
        assert pids_of(session) == pids


def test_a_rank_that_ends_itself_fails_the_run() -> None:
    with gl.launch(1, 1) as session, pytest.raises(gl.RunError, match=r"target\[0\] died: ended with exit code 9"):
        session.execute("import os; os._exit(9)", on="target")


def test_a_rank_that_receives_garbage_ends_with_the_reason_in_its_log() -> None:
    with gl.launch(1, 1) as session:
        session.ranks[1].channel.send(b"garbage")
        run = session.start("1", "1")
        with pytest.raises(gl.RunError, match=r"target\[0\] died: ended with exit code 1") as caught:
            run.wait(60)
        assert "cannot read a message from the notebook" in session.log("target[0]")
        assert "MessageError" in str(caught.value)


# ---- scripts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_script_without_a_main_guard_works_wherever_it_is_started(tmp_path: Path, method: str) -> None:
    # Python looks into the current folder first when it starts the processes that ranks come from; the script does not.
    if sys.version_info >= (3, 11):  # which can be told not to
        (tmp_path / "graftlab").mkdir()
        (tmp_path / "graftlab" / "__init__.py").write_text("raise RuntimeError('this is another graftlab')")
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "found_later.py").write_text("def triple(x):\n    return 3 * x")
    (tmp_path / "scripts").mkdir()
    source = f"""
        import json, os, sys
        from dataclasses import dataclass
        import torch
        import graftlab as gl

        os.chdir({str(tmp_path)!r})
        sys.path.append({str(tmp_path / "later")!r})
        import found_later

        @dataclass
        class Answer:
            side: str
            total: float

        def forward(batch):
            return Answer(gl.here().side, gl.tap("scaled", found_later.triple(batch)).sum().item())

        with gl.launch(1, 1, start_method={method!r}) as session:
            run = session.run(forward, forward, args=(torch.ones(2),))
            same = session.run("(gl.__file__, __import__('os').getcwd())").baseline == [(gl.__file__, os.getcwd())]
            print(json.dumps([run.baseline == [Answer("baseline", 6.0)], run.target[0].side, len(run.frame), same]))
    """
    with script(source, tmp_path / "scripts") as process:
        assert first_line(process) == [True, "target", 1, True]


# ---- forked children ------------------------------------------------------------------------------------------------


def test_a_forked_child_of_the_script_keeps_no_rank_alive_and_ends_none(temporary: Path, tmp_path: Path) -> None:
    source = """
        import json, os, signal, sys, time
        import graftlab as gl

        session = gl.launch(1, 1)
        leaves = os.fork()
        if not leaves:
            sys.exit()  # with all that is done at an exit
        os.waitpid(leaves, 0)
        stays = os.fork()
        if not stays:
            signal.pause()
        alive = session.run("1 + 1").baseline == [2]
        session.start("print('holding') or __import__('re').match('(a+)+b', 'a' * 64)")
        while "holding" not in session.log("baseline[0]"):
            time.sleep(0.01)
        print(json.dumps([alive, [rank.pid for rank in session.ranks], stays]), flush=True)
        sys.stdin.readline()
    """
    with script(source, tmp_path) as process:
        alive, pids, stays = first_line(process)
        assert alive
        ranks = watch(pids)
        process.kill()
        process.wait()
        assert still_there(ranks) == []
        os.kill(stays, signal.SIGKILL)


def test_a_forked_child_of_a_rank_takes_no_part_and_does_not_hide_its_death() -> None:
    def forks() -> None:
        child = os.fork()
        if not child:
            print("printed in the child")
            gl.tap("x", torch.ones(1))
            signal.pause()
        print(f"child={child}")
        signal.pause()

    with gl.launch(1, 1, timeout=600.0) as session:
        run = session.start(forks, lambda: gl.tap("x", torch.ones(1)).item())
        wait_until(lambda: "printed in the child" in session.log("baseline[0]"), "the fork")
        wait_until(lambda: "child=" in session.log("baseline[0]"), "the fork")
        child = int(re.search(r"child=(\d+)", session.log("baseline[0]"))[1])
        wait_until(lambda: session.status().state.tolist() == ["running", "waiting"], "the target's wait")
        session.ranks[0].signal(signal.SIGKILL)
        with pytest.raises(gl.RunError, match=r"baseline\[0\] died: killed by SIGKILL"):
            run.wait(DEADLINE)
        assert run.frame.status.tolist() == ["missing"]
        os.kill(child, signal.SIGKILL)


def test_a_death_is_reported_before_other_failures() -> None:
    def fails_or_dies() -> None:
        if gl.here().side == "target":
            os.kill(os.getpid(), signal.SIGKILL)
        raise ValueError("for another reason")

    with gl.launch(1, 1) as session, pytest.raises(gl.RunError) as caught:
        session.run(fails_or_dies, fails_or_dies)
    said = str(caught.value)
    assert said.index("target[0] died: killed by SIGKILL") < said.index("baseline[0] raised ValueError")


# ---- the network ----------------------------------------------------------------------------------------------------


def test_no_rank_listens_beyond_this_machine() -> None:
    def in_a_group() -> None:
        dist.all_reduce(torch.ones(1))

    with gl.launch(2, 2) as session:
        session.run(in_a_group, in_a_group)
        mine = {name for rank in session.ranks for name in sockets_of(rank.pid)}
        assert mine
        listening = {inode: address for inode, address in listeners() if inode in mine}
        assert set(listening.values()) <= {"0100007F", "00000000000000000000000001000000"}, listening


def sockets_of(pid: int | None) -> set[str]:
    """Return the inodes of the sockets that a process has open."""
    links = []
    for descriptor in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(os.readlink(descriptor))
    return {link[len("socket:[") : -1] for link in links if link.startswith("socket:[")}


def listeners() -> Iterator[tuple[str, str]]:
    """Return each listening TCP socket of this machine: its inode, and its address in hexadecimal."""
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                yield fields[9], fields[1].partition(":")[0]
