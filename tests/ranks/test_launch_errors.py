"""A launch that cannot work soon reports what is wrong and what to do, and leaves nothing behind."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import textwrap
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

import pytest
from kit import warm
from kit.deadline import DEADLINE
from kit.processes import family, still_there, watch

import graftlab as gl
from graftlab.control.run_folder import HOME_VARIABLE
from graftlab.ranks import forkserver as starter

pytestmark = pytest.mark.ranks


def refusal(*args: Any, **kwargs: Any) -> str:
    """Return the message of a refused :func:`graftlab.launch`, which has left no process."""
    before = family(os.getpid())
    with pytest.raises(gl.LaunchError) as caught:
        gl.launch(*args, **kwargs)
    # A refusal does not wait for the thread that starts the forkserver. One that multiprocessing starts by itself would
    # have imported nothing, for all later tests too.
    starter.on_starter(starter.prepare).result()
    # These two stay for the next launch.
    helpers = {forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid}
    assert still_there(watch(family(os.getpid()) - before - helpers)) == []
    return str(caught.value)


# ---- what was asked for ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"baseline": 0}, "baseline=0: each side needs a whole number of ranks, at least one"),
        ({"target": -1}, "target=-1: each side needs a whole number of ranks, at least one"),
        ({"target": "2"}, "target='2': each side needs a whole number of ranks, at least one"),
        ({"keep_budget": -1}, "keep_budget=-1: give whole bytes, such as 256 << 20 for 256 MiB"),
        ({"buffer_budget": 2.5e8}, "buffer_budget=250000000.0: give whole bytes"),
        ({"baseline": 1.5}, "baseline=1.5: each side needs a whole number of ranks, at least one"),
        ({"baseline": 256, "target": 257}, "baseline=256, target=257: a graft world has at most 512 ranks, both sides"),
        ({"device": "tpu"}, "device='tpu': ranks run on 'cpu', 'cuda' or 'cuda:N'"),
        ({"device": "cuda:99"}, "device='cuda:99': this machine has"),
        ({"backend": "carrier_pigeon"}, "backend='carrier_pigeon' is not available in this build of torch"),
        ({"start_method": "fork"}, "start_method='fork': ranks start by 'forkserver' or 'spawn'"),
        ({"on": "ray:auto"}, "on='ray:auto': give gl.Ray(...), or leave it out to start the ranks on this machine"),
        ({"timeout": 0}, "timeout=0: give seconds, more than 0"),
        ({"timeout": float("nan")}, "timeout=nan: give seconds, more than 0"),
    ],
)
def test_unusable_launch_options_are_refused_by_name(given: dict[str, Any], says: str) -> None:
    assert says in refusal(**given)


def test_more_ranks_than_the_system_allows_are_refused_naming_its_limits() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 100, before[1]))
    try:
        said = refusal(10, 10)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert said.startswith("cannot create shared memory and sockets for 20 ranks: [Errno 24]")
    assert "higher limits (ulimit -n" in said


# ---- where things go ------------------------------------------------------------------------------------------------


def test_an_unusable_home_is_named_with_its_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv(HOME_VARIABLE, str(tmp_path / "file" / "home"))
    said = refusal()
    assert str(tmp_path / "file" / "home") in said
    assert f"set {HOME_VARIABLE} to a folder you can write to" in said


@pytest.mark.parametrize("start", [gl.launch, gl.listen])
def test_a_run_folder_that_others_can_write_into_is_refused(tmp_path: Path, start: Any) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(gl.LaunchError, match=f"other users can write into the run folder {tmp_path}.*chmod go-w"):
        start(baseline=1, target=1, folder=tmp_path)


def test_an_unusable_run_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    said = refusal(folder=tmp_path / "file")
    assert f"the run folder {tmp_path / 'file'} cannot be made" in said
    assert "pass another folder=" in said


def script(source: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a separate Python that imports the graftlab under test."""
    roots = [environment.pop("FIRST", ""), str(Path(gl.__file__).parent.parent), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, roots))
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(source)],
        env={**os.environ, **environment, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=100,
    )


LAUNCH = """
import graftlab as gl
try:
    with gl.launch(1, 1) as session:
        print(session.run("1 + 1").baseline)
except gl.LaunchError as error:
    print(error)
"""


def launched(folder: Path, temporary: str) -> tuple[str, str]:
    """Run a script that launches, with this temporary folder; returns its output and its errors."""
    path = folder / "launches.py"
    path.write_text(LAUNCH)
    roots = [str(Path(gl.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), "TMPDIR": temporary}
    with warm.start([path], env, cwd=folder, forkserver=True) as process:
        return process.communicate(timeout=DEADLINE)


def test_a_missing_temporary_folder_does_no_harm(tmp_path: Path) -> None:
    assert launched(tmp_path, str(tmp_path / "missing"))[0] == "[2]\n"


def test_a_temporary_folder_with_too_long_a_path_is_explained(tmp_path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f"gl-{'long-' * 20}") as folder:
        told, errors = launched(tmp_path, folder)
        assert "the forkserver, which starts the ranks, cannot be started: AF_UNIX path too long" in told
        assert "TMPDIR" in told
        assert "start_method='spawn'" in told
        assert not errors


# ---- ranks that do not become ready ---------------------------------------------------------------------------------


def test_a_rank_that_dies_while_starting_shows_the_end_of_its_log(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-interface")
    said = refusal(2, 1)
    assert "died while starting (ended with exit code 1). Its log (" in said
    # Python 3.13 marks more of each line, and the beginning may not be among the last lines.
    assert said.count("Traceback (most recent call last)") <= 1
    assert "no-such-interface" in said.splitlines()[-1]
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    with gl.launch(1, 1) as session:
        assert session.run("1").baseline == [1]


def hooks(folder: Path, source: str) -> str:
    """Make each spawned process run this first; returns the value for PYTHONPATH."""
    begin = "import os, sys\nif '--multiprocessing-fork' in sys.orig_argv:\n"
    (folder / "sitecustomize.py").write_text(begin + textwrap.indent(textwrap.dedent(source), "    "))
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_a_rank_that_dies_before_it_has_a_log_says_where_to_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", hooks(tmp_path, "os._exit(41)"))
    said = refusal(start_method="spawn")
    assert "died while starting (ended with exit code 41)" in said
    assert "had not opened its log yet; see the notebook's own output" in said


def test_a_rank_whose_imports_fail_shows_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", hooks(tmp_path, "sys.modules['graftlab.grafting.grafter'] = None"))
    said = refusal(start_method="spawn")
    assert "died while starting" in said
    assert "ModuleNotFoundError: import of graftlab.grafting.grafter halted" in said


def test_ranks_that_are_not_ready_in_time_are_named_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "gate")
    monkeypatch.setenv("PYTHONPATH", hooks(tmp_path, f"open({str(tmp_path / 'gate')!r}).read()"))
    said = refusal(1, 2, start_method="spawn", timeout=1.0)
    assert "baseline[0], target[0], target[1] did not become ready within 1 s; pass a larger timeout" in said
    assert "The log of baseline[0]" in said


KILLS_ITS_FORKSERVER = """
import os
from multiprocessing import forkserver
import graftlab as gl
from kit.processes import still_there, watch
with gl.launch(1, 1) as session:
    assert session.run("1").baseline == [1]
pid = forkserver._forkserver._forkserver_pid
ended = watch([pid])
os.kill(pid, 9)
assert still_there(ended) == []
with gl.launch(1, 1) as session:
    print(session.run("2").baseline, forkserver._forkserver._forkserver_pid != pid)
"""


def test_a_forkserver_that_was_killed_is_replaced() -> None:
    # Twice, so that the second one need not import torch either.
    done = warm.run("-c", KILLS_ITS_FORKSERVER, forkserver=True, prepare="kit.spare.prepare")
    assert (done.returncode, done.stdout) == (0, "[2] True\n"), done.stderr


def test_ranks_start_after_a_notebook_was_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    """IPython's ``%reset`` empties ``__main__``, including the names that Python puts there."""
    main = sys.modules["__main__"]
    for name in ("__spec__", "__file__"):
        monkeypatch.delattr(main, name, raising=False)
    with gl.launch(1, 1) as session:
        assert session.run("2").baseline == [2]
    assert not hasattr(main, "__spec__")


def test_ranks_collect_garbage_although_the_forkserver_imported_without() -> None:
    with gl.launch(1, 1) as session:
        run = session.run("(__import__('gc').isenabled(), __import__('gc').get_freeze_count() > 10_000)")
    assert run.baseline == [(True, True)]


# ---- without torch --------------------------------------------------------------------------------------------------

BLOCK_TORCH = """
    import sys

    class Blocked:
        def find_spec(self, name, path=None, target=None):
            if name == "torch":
                raise ModuleNotFoundError("No module named 'torch'", name="torch")

    sys.meta_path.insert(0, Blocked())
    import graftlab as gl
"""


def test_without_torch_taps_do_nothing_and_the_rest_names_the_missing_package() -> None:
    done = script(
        BLOCK_TORCH
        + """
    assert gl.tap("x", 3) == 3
    assert gl.here() is None
    gl.step()
    with gl.tags(a=1):
        pass
    for name in ("launch", "watch", "GraftPlan", "Session"):
        try:
            getattr(gl, name)
        except gl.DependencyError as error:
            print(error)
    """
    )
    assert done.stdout.splitlines() == [
        f"graftlab.{name} needs torch, which is not installed; `pip install torch` installs it"
        for name in ("launch", "watch", "GraftPlan", "Session")
    ], done.stderr


def test_without_torch_the_extension_shows_one_line_and_no_traceback() -> None:
    done = script(
        BLOCK_TORCH
        + """
    from IPython.core.interactiveshell import InteractiveShell
    InteractiveShell.instance(colors="NoColor").run_cell("%load_ext graftlab")
    """
    )
    line = "DependencyError: %load_ext graftlab needs torch, which is not installed; `pip install torch` installs it"
    assert (done.stdout + done.stderr).strip() == line
