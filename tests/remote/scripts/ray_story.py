"""A session over a Ray cluster of a head and two workers, in a network namespace: what works, who dies, what is left.

Run by tests/remote/test_ray_soak.py, in separate namespaces for network and processes.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
import torch

import graftlab as gl

HEAD = "127.0.0.1:6399"
CELL = """
import torch

def model(scale):
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    for layer in range(4):
        x = gl.tap("attn", torch.tanh(x @ x.T / 4), layer=layer)
        x = gl.tap("mlp", torch.relu(x) * (scale if layer == 2 else 1.0) + x, layer=layer)
    return gl.tap("out", x.sum(-1))
"""
KERNEL_CELLS = [
    "%load_ext graftlab",
    "%graft up --baseline 2 --target 4 --on ray:127.0.0.1:6399 --gpus-per-rank 0 --timeout 240",
    "%%graft both" + CELL,
    "%%graft baseline\nscale = 1.0",
    "%%graft target\nscale = 1.01",
    "%graft verdict model(scale)",
    "%graft down",
]


def model(scale: float, steps: int = 1, rest: float = 0.0) -> torch.Tensor:
    for _ in range(steps):
        x = torch.linspace(-1, 1, 64).reshape(8, 8)
        for layer in range(4):
            x = gl.tap("attn", torch.tanh(x @ x.T / 4), layer=layer)
            x = gl.tap("mlp", torch.relu(x) * (scale if layer == 2 else 1.0) + x, layer=layer)
        out = gl.tap("out", x.sum(-1))
        time.sleep(rest)
        gl.step()
    return out


def right() -> torch.Tensor:
    return model(1.0)


def wrong() -> torch.Tensor:
    return model(1.01)


def serve() -> torch.Tensor:
    return model(1.0, steps=100_000, rest=0.01)


def wait_until(condition: Callable[[], object], what: str, within: float = 300.0) -> float:
    began = time.monotonic()
    while not condition():
        if time.monotonic() - began > within:
            raise TimeoutError(f"{what} did not happen within {within:g} s")
        time.sleep(0.02)
    return time.monotonic() - began


def note(what: str) -> None:
    print(f"[{time.strftime('%H:%M:%S')}] {what}", flush=True)


class Node:
    """A Ray node of this machine, at an address of the loopback interface."""

    def __init__(self, folder: Path, address: str, *arguments: str) -> None:
        self._log = folder / f"{address}.log"
        self._command = [f"{Path(sys.executable).parent}/ray", "start", "--block", f"--node-ip-address={address}"]
        self._command += ["--disable-usage-stats", *arguments]
        # Ray gives its processes 30 seconds to start, which is too short on a machine that does other work.
        for _ in range(5):
            self._start()
            wait_until(lambda: self._has_started() or self.process.poll() is not None, "the start of a node")
            if self._has_started():
                return
            note(f"the node at {address} did not start in Ray's time")
        raise TimeoutError(self._log.read_text())

    def _start(self) -> None:
        # Unbuffered, because its output says when it has started.
        environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
        with open(self._log, "wb") as log:
            self.process = subprocess.Popen(
                self._command, stdout=log, stderr=log, env=environment, start_new_session=True
            )

    def _has_started(self) -> bool:
        return "Ray runtime started" in self._log.read_text()

    def kill(self) -> None:
        """Kill all of its processes at once, as if its machine had lost its power."""
        processes = [psutil.Process(self.process.pid), *psutil.Process(self.process.pid).children(recursive=True)]
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.process.wait()


def worker(folder: Path, number: int) -> Node:
    return Node(folder, f"127.0.0.{number}", f"--address={HEAD}", "--num-cpus=3")


@contextlib.contextmanager
def cluster(folder: Path) -> Iterator[list[Node]]:
    head = Node(
        folder, "127.0.0.1", "--head", "--port=6399", "--include-dashboard=false", "--num-cpus=0",
        f"--temp-dir={folder}/ray",
    )  # fmt: skip
    nodes = [head]
    try:
        nodes += [worker(folder, 2), worker(folder, 3)]
        yield nodes
    finally:
        # Ray ends a process that has lost its cluster, before it could say what was wrong.
        ray.shutdown()
        for node in nodes:
            with contextlib.suppress(psutil.NoSuchProcess):
                node.kill()


def rank_processes() -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "graftlab.remote.remote_rank" in " ".join(process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def nothing_is_left() -> bool:
    """Whether Ray has all resources back, no placement group, and no rank runs."""
    from ray.util import placement_group_table

    cpus = ray.available_resources().get("CPU", 0.0), ray.cluster_resources().get("CPU", 0.0)
    groups = [group for group in placement_group_table().values() if group["state"] != "REMOVED"]
    return cpus[0] == cpus[1] > 0 and not groups and not rank_processes()


def over_ray(timeout: float = 240.0) -> gl.Session:
    return gl.launch(2, 4, timeout=timeout, tap_timeout=60.0, on=gl.Ray(HEAD, resources={"CPU": 1}))


def works(session: gl.Session) -> None:
    found = session.verdict(right, wrong)
    assert found.named == ["mlp"], found.text
    assert "layer 2" in found.text, found.text


def in_a_kernel(folder: Path) -> str:
    from jupyter_client.manager import start_new_kernel

    manager, client = start_new_kernel(kernel_name="python3", cwd=str(folder))
    shown: list[str] = []

    def show(message: dict[str, Any]) -> None:
        content = message["content"]
        shown.append(content.get("text", "") or content.get("data", {}).get("text/plain", ""))

    try:
        for cell in KERNEL_CELLS:
            reply = client.execute_interactive(cell, output_hook=show, timeout=300)
            assert reply["content"]["status"] == "ok", reply["content"]
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)
    return "".join(shown)


def dies_with(session: gl.Session, label: str, kill: Callable[[], None]) -> str:
    """Start a run, kill, and return what the run says; the wait for the news is bounded by the fault pages' 2 s."""
    run = session.start(serve, serve).wait_steps(1, timeout=120)
    began = time.monotonic()
    kill()
    try:
        run.wait()
    except gl.RunError as error:
        note(f"{label}: the run ended {time.monotonic() - began:.2f} s after the kill")
        return str(error)
    raise AssertionError("the run did not fail")


def is_interrupted(session: gl.Session) -> None:
    run = session.start(serve, serve).wait_steps(1, timeout=120)
    session.interrupt()
    with pytest.raises(gl.RunError, match="KeyboardInterrupt"):
        run.wait(timeout=60)
    wait_until(lambda: set(session.status()["state"]) == {"idle"}, "the end of the run on every rank")


def main(folder: Path) -> None:
    with cluster(folder) as nodes:
        ray.init(HEAD, logging_level="ERROR")
        wait_until(lambda: ray.cluster_resources().get("CPU") == 6.0, "three nodes")
        note("three nodes")

        text = in_a_kernel(folder)
        assert re.search(r"mlp is computed differently in layer 2", text), text
        wait_until(nothing_is_left, "the kernel's session to leave nothing")
        note("a verdict in a kernel")

        # The address of the head's client server, as from a machine that is not in the cluster.
        with gl.launch(1, 1, timeout=240.0, on=gl.Ray("ray://127.0.0.1:10001", resources={"CPU": 1})) as session:
            works(session)
        wait_until(nothing_is_left, "the client's session to leave nothing")
        note("a session through Ray's client")

        with over_ray() as session:
            note("launched 2+4")
            status = session.status()
            assert status["state"].tolist() == ["idle"] * 6
            works(session)
            assert session.run(right, right, on_failure="stop").target[0].shape == (8,)
            is_interrupted(session)
            token_is_secret(session, folder)
            pid = session.ranks[3].pid or 0
            said = dies_with(session, "a rank", lambda: os.kill(pid, signal.SIGKILL))
            assert re.search(r"target\[1\].*killed by SIGKILL", said), said
            session.restart()
            works(session)
            note("a rank")

            actor = psutil.Process(session.ranks[4].pid or 0).parent()
            assert actor is not None
            said = dies_with(session, "an actor", actor.kill)
            assert "target[2]" in said, said
            session.restart()
            works(session)
            note("an actor")

            lost = [rank.label for rank in session.ranks if psutil.Process(rank.pid or 0) in below(nodes[2])]
            assert lost
            said = dies_with(session, "a node", nodes[2].kill)
            assert any(label in said for label in lost), (lost, said)
            try:
                restart_says_what_lacks(session)
            finally:
                nodes[2] = worker(folder, 4)
            wait_until(lambda: ray.cluster_resources().get("CPU") == 6.0, "the node's successor")
            session.restart()
            works(session)
            note("a node")
        wait_until(nothing_is_left, "the session to leave nothing")
        note("nothing is left of the session")

        driver = subprocess.Popen([sys.executable, __file__, "driver"], stdout=subprocess.PIPE, text=True)
        assert driver.stdout is not None
        while driver.stdout.readline().strip() != "serves":
            assert driver.poll() is None
        assert len(rank_processes()) == 6
        driver.kill()
        driver.wait()
        took = wait_until(lambda: not rank_processes(), "the ranks' end")
        free = wait_until(nothing_is_left, "the driver's session to leave nothing")
        note(f"a driver: its ranks ended after {took:.2f} s, and Ray had all resources {free:.2f} s later")

        session = over_ray()
        run = session.start(serve, serve).wait_steps(1, timeout=120)
        # Ray ends a process that has lost its cluster, and this one is not the notebook.
        ray.shutdown()
        nodes[0].kill()
        note("the head was killed")
        steps = run.frame["step"].max()
        wait_until(lambda: run.frame["step"].max() > steps + 5, "more steps without the head")
        note("the session works without the head")
        began = time.monotonic()
        session.close()
        note(f"it was closed within {time.monotonic() - began:.1f} s")
        wait_until(lambda: not rank_processes(), "the end of the ranks")
    note("the end")


def restart_says_what_lacks(session: gl.Session) -> None:
    """A restart on a cluster that has become too small says what it lacks."""
    wait_until(lambda: ray.cluster_resources().get("CPU") == 3.0, "the news of the node's death")
    object.__setattr__(session.options, "timeout", 5.0)
    try:
        with pytest.raises(gl.LaunchError, match="6 CPU of 3 in the cluster"):
            session.restart()
    finally:
        object.__setattr__(session.options, "timeout", 240.0)


def below(node: Node) -> list[psutil.Process]:
    return psutil.Process(node.process.pid).children(recursive=True)


def token_is_secret(session: gl.Session, folder: Path) -> None:
    """No file of Ray's, no command line and no environment has the session's token."""
    token = session.ranks[0]._on_release.__self__._token.encode()  # type: ignore[attr-defined]
    for path in (folder / "ray").rglob("*"):
        if path.is_file() and not path.is_symlink():
            assert token not in path.read_bytes(), path
    for process in psutil.process_iter():
        for what in ("cmdline", "environ"):
            with contextlib.suppress(OSError):
                assert token not in Path(f"/proc/{process.pid}/{what}").read_bytes(), (what, process)


def drive() -> None:
    session = over_ray()
    session.start(serve, serve).wait_steps(1, timeout=120)
    print("serves", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if sys.argv[1] == "driver":
        drive()
    else:
        main(Path(sys.argv[1]))
