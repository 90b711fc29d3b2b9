"""The job scripts and the call of docs/attach.md, as they are written there, on a Slurm cluster of two nodes.

Run by tests/remote/test_slurm_soak.py, in separate namespaces. Nodes have addresses of the loopback interface.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pandas as pd

import graftlab as gl

PAGE = Path(__file__).resolve().parents[3] / "docs" / "attach.md"
# Two jobs of the same model; the second has a mistake in its second layer.
MODEL = """
import os
import torch
import graftlab as gl

class Model(torch.nn.Module):
    def __init__(self, factor):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)
        self.factor = factor

    def forward(self, x):
        x = gl.tap("first", self.first(x))
        return gl.tap("second", self.second(x) * self.factor)

torch.set_num_threads(1)
model = Model({factor})
for step in range(3):
    model(torch.ones(2, 8))
    {step}
"""
CONFIGURATION = """
ClusterName=graft
SlurmctldHost=login(10.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
MpiDefault=none
ProctrackType=proctrack/pgid
TaskPlugin=task/none
ReturnToService=2
SlurmctldPidFile={folder}/slurmctld.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmdLogFile={folder}/slurmd-%n.log
SlurmdSpoolDir={folder}/spool-%n
StateSaveLocation={folder}/state
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
GresTypes=gpu
NodeName=node1 NodeHostname=login NodeAddr=10.0.0.2 Port=17001 CPUs=2 Gres=gpu:2
NodeName=node2 NodeHostname=login NodeAddr=10.0.0.3 Port=17002 CPUs=2 Gres=gpu:2
PartitionName=all Nodes=node1,node2 Default=YES State=UP
"""
HOSTS = "127.0.0.1 localhost\n10.0.0.1 login\n10.0.0.2 node1\n10.0.0.3 node2\n"


def wait_until(condition: Callable[[], object], what: str, within: float = 300.0) -> None:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within:
            raise TimeoutError(f"{what} did not happen within {within:g} s")
        time.sleep(0.1)


def said(*command: object, folder: Path | None = None) -> str:
    """What this command prints; its own errors are raised with what it said."""
    words = [str(part) for part in command]
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder)
    if done.returncode:
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}")
    return done.stdout


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[None]:
    """A controller and two node daemons of this machine, each at an address of the loopback interface."""
    for number in (1, 2, 3):
        said("ip", "addr", "add", f"10.0.0.{number}/32", "dev", "lo")
    (folder / "hosts").write_text(HOSTS)
    said("mount", "--bind", folder / "hosts", "/etc/hosts")
    socket.sethostname("login")
    (folder / "slurm.conf").write_text(CONFIGURATION.format(folder=folder))
    # Two devices that are no GPUs, but can be reserved as if they were.
    for number in (0, 1):
        said("mknod", folder / f"gpu{number}", "c", 1, 3)
    (folder / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={folder}/gpu[0-1]\n")
    (folder / "munge.key").write_bytes(os.urandom(128))
    (folder / "munge.key").chmod(0o600)
    os.environ["SLURM_CONF"] = str(folder / "slurm.conf")
    munge = [f"--{name}-file={folder}/munge.{name}" for name in ("key", "pid", "log", "seed")]
    commands = [
        ["munged", "--foreground", "--force", f"--socket={folder}/munge.socket", *munge],
        ["slurmctld", "-D"],
        ["slurmd", "-D", "-N", "node1"],
        ["slurmd", "-D", "-N", "node2"],
    ]
    (folder / "state").mkdir()
    daemons = []
    try:
        for command in commands:
            with open(folder / f"{command[0]}-{len(daemons)}.out", "wb") as log:
                daemons.append(subprocess.Popen(command, stdout=log, stderr=log))
            if command[0] == "munged":
                wait_until((folder / "munge.socket").exists, "the start of munge")
        wait_until(lambda: said("sinfo", "--noheader", "--format=%D %T").strip() == "2 idle", "the start of two nodes")
        yield
    finally:
        for daemon in reversed(daemons):
            daemon.terminate()
        for daemon in daemons:
            daemon.wait()


def commands(folder: Path) -> None:
    """Put what the page's scripts call on the path: the Python that runs this, and its graftlab."""
    found = folder / "bin"
    found.mkdir()
    for name, words in {"python": "", "graftlab": "-m graftlab", "torchrun": "-m torch.distributed.run"}.items():
        (found / name).write_text(f'#!/bin/sh\nexec {sys.executable} {words} "$@"\n')
        (found / name).chmod(0o755)
    os.environ["PATH"] = f"{found}{os.pathsep}{os.environ['PATH']}"


def job(folder: Path, **programs: str) -> Path:
    """A folder with these programs, in which jobs are submitted."""
    folder.mkdir()
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    return folder


def submit(folder: Path, text: str) -> None:
    """Submit this job script, wait for its end, and raise what it printed if it failed."""
    (folder / "job.sbatch").write_text(text)
    try:
        said("sbatch", "--wait", "--output=job.out", "job.sbatch", folder=folder)
    except RuntimeError as error:
        raise RuntimeError(f"{error}\n{(folder / 'job.out').read_text()}") from None


def differing(frame: pd.DataFrame) -> dict[str, bool]:
    compared = frame[frame["status"] == "compared"]
    return {name: bool((rows["rel_l2"] > 1e-5).any()) for name, rows in compared.groupby("name")}


def main(folder: Path) -> None:
    page = PAGE.read_text(encoding="utf-8")
    one_node, two_nodes, one_side = re.findall(r"```text\n(#!/bin/bash\n.*?)```", page, re.S)
    [listening] = re.findall(r"```python\n([^`]*sbatch.*?)```", page, re.S)
    right, wrong = MODEL.format(factor=1.0, step="gl.step()"), MODEL.format(factor=2.0, step="gl.step()")
    commands(folder)
    with cluster(folder):
        # Two GPUs of one node; no program of it names graftlab's steps.
        here = job(
            folder / "one", train=MODEL.format(factor="1.0 + (os.environ['GRAFTLAB_ROLE'] == 'target')", step="pass")
        )
        submit(here, one_node)
        assert differing(gl.load_run(here / "graft"))["second"]
        print("one node", flush=True)

        here = job(folder / "two", reference=right, engine=wrong)
        submit(here, two_nodes)
        assert differing(gl.load_run(here / "graft")) == {"first": False, "second": True}
        assert (here / "graft.token").stat().st_mode & 0o777 == 0o600
        print("two nodes", flush=True)

        here = job(folder / "listen", reference=right, engine=wrong)
        for name, program in {"baseline": "reference", "target": "engine"}.items():
            (here / f"{name}.sbatch").write_text(one_side.replace("reference.py", f"{program}.py"))
        os.chdir(here)
        names: dict[str, gl.Session] = {}
        exec(listening, names)
        with names["session"] as session:
            wait_until(lambda: len(session.frame) >= 6, "six rows of two jobs")
            assert differing(session.frame) == {"first": False, "second": True}
            token_is_in_its_file_only(session.folder)
        wait_until(lambda: not said("squeue", "--noheader").strip(), "the jobs' ends")
        print("a notebook that listens", flush=True)


def token_is_in_its_file_only(folder: Path) -> None:
    """No file of Slurm's has the token of a session whose jobs it started."""
    [path] = folder.rglob("*token*")
    token = path.read_bytes().strip()
    assert path.stat().st_mode & 0o777 == 0o600
    for each in Path(os.environ["SLURM_CONF"]).parent.rglob("*"):
        if each.is_file() and each != path:
            assert token not in each.read_bytes(), each


if __name__ == "__main__":
    main(Path(sys.argv[1]))
