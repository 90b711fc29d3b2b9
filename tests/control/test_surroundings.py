"""Machines that are short of something, and other users of them: a session works, or says at once what it lacks."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch
from kit import warm
from kit.deadline import DEADLINE

import graftlab as gl

pytestmark = pytest.mark.ranks

SCRIPT = """
import os, torch
import graftlab as gl

def forward():
    gl.tap("small", torch.ones(3))
    return gl.tap("large", torch.ones(8 << 20)).sum().item()

try:
    with gl.launch(1, 2, folder=os.environ.get("FOLDER")) as session:
        run = session.run(forward, forward)
        print(run.target, sorted(set(run.frame["status"])), len(gl.load_run(session.folder)))
except gl.LaunchError as error:
    print("LaunchError:", error)
"""
WORKS = f"[{float(8 << 20)}, {float(8 << 20)}] ['compared'] 4\n"
NOBODY = 65534
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may become another user, or mount")


def said_warm(folder: Path, first: str = "", **environment: str | None) -> str:
    """The same where nothing is short before the script begins; ``first`` is what it does before anything else."""
    path = folder / "script.py"
    path.write_text(f"{first}\n{SCRIPT}")
    roots = [str(Path(gl.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    changed = {**os.environ, "PYTHONPATH": os.pathsep.join(roots), **environment}
    env = {name: value for name, value in changed.items() if value is not None}
    # A limit that the script sets is to hold for its forkserver, too.
    with warm.start([path], env, cwd=folder, forkserver=not first) as process:
        told, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == 0, errors
        return told


def said(*before: str, **environment: str | None) -> str:
    """What a notebook in these surroundings says; a variable that is None is taken out of its environment."""
    changed = {**os.environ, **environment}
    done = subprocess.run(
        [*before, sys.executable, "-c", SCRIPT],
        env={name: value for name, value in changed.items() if value is not None},
        capture_output=True,
        text=True,
        timeout=DEADLINE,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def limited(descriptors: int) -> str:
    return f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({descriptors}, {descriptors}))"


def test_256_descriptors_are_enough(tmp_path: Path) -> None:
    assert said_warm(tmp_path, limited(256)) == WORKS


def test_too_few_descriptors_are_reported(tmp_path: Path) -> None:
    told = said_warm(tmp_path, limited(24))
    assert re.match(r"LaunchError: .*(Too many open files|descriptors)", told)


@pytest.mark.soak
def test_a_missing_temporary_folder_is_tolerated(tmp_path: Path) -> None:
    assert said(TMPDIR=str(tmp_path / "missing"), HOME=None) == WORKS


def test_an_unusable_home_is_reported_with_the_variable_to_set(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    told = said_warm(tmp_path, GRAFTLAB_HOME=None, HOME=str(tmp_path / "file"), TMPDIR=str(tmp_path / "missing"))
    assert re.match(r"LaunchError: the run folder .*file/.graftlab/.* cannot be made: .*; set GRAFTLAB_HOME to", told)


# ---- mounts of one's own --------------------------------------------------------------------------------------------


def with_mount(options: str, where: Path | str) -> list[str]:
    """The command before a command that runs it with an empty file system there, which no other process sees."""
    tried = ["unshare", "--mount", "sh", "-ec", f'mount -t tmpfs -o {options} none "{where}"; exec "$@"', "sh"]
    if not shutil.which("unshare") or subprocess.run([*tried, "true"], capture_output=True).returncode:
        pytest.skip("this user may not mount here")
    return tried


@as_root
@pytest.mark.soak
def test_little_shared_memory_is_enough() -> None:
    # 64 MiB are a container's, and less than the tensors of three ranks: these do not lie there.
    assert said(*with_mount("size=1m", "/dev/shm")) == WORKS


@as_root
@pytest.mark.soak
def test_a_read_only_disk_is_reported_at_the_launch(tmp_path: Path) -> None:
    told = said(*with_mount("ro", tmp_path), FOLDER=str(tmp_path / "run"))
    assert (
        told
        == f"LaunchError: the run folder {tmp_path}/run cannot be made: Read-only file system; pass another folder=\n"
    )


# ---- other users ----------------------------------------------------------------------------------------------------


@pytest.fixture
def open_to_all() -> Iterator[Path]:
    """A folder that everybody may enter, as pytest's own are not."""
    with TemporaryDirectory() as name:
        os.chmod(name, 0o755)
        yield Path(name)


@as_root
def test_nothing_of_a_session_is_readable_or_reachable_for_another_user(open_to_all: Path) -> None:
    def refused(*command: str) -> bool:
        done = subprocess.run(command, user=NOBODY, group=NOBODY, extra_groups=[], capture_output=True, text=True)
        return done.returncode != 0 and re.search("Permission denied|not permitted", done.stderr) is not None

    folder = open_to_all / "run"
    with gl.launch(1, 1, folder=folder) as session:
        session.run(*[lambda: gl.tap("a", torch.ones(3))] * 2)
        pids = [rank.pid for rank in session.ranks]
        assert not refused("ls", str(open_to_all))
        assert refused("ls", str(folder))
        for path in folder.rglob("*"):
            assert refused("cat", str(path)), path
            # Also where the folders above were open.
            assert path.stat().st_mode & 0o077 == 0
        for pid in pids:
            for part in ("fd", "map_files"):
                assert refused("ls", f"/proc/{pid}/{part}/")
            for part in ("mem", "environ", "maps"):
                assert refused("cat", f"/proc/{pid}/{part}")
            assert refused("kill", "-9", str(pid))
        # Sockets without a name, so that there is nothing to connect to.
        inodes = set()
        for descriptor in (each for pid in pids for each in Path(f"/proc/{pid}/fd").iterdir()):
            with contextlib.suppress(FileNotFoundError):  # closed meanwhile
                inodes.add(descriptor.stat().st_ino)
        sockets = [line.split() for line in Path("/proc/net/unix").read_text().splitlines()[1:]]
        assert [line for line in sockets if int(line[6]) in inodes and len(line) > 7] == []
