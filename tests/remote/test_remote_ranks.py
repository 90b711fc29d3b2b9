"""Ranks that a session launches over TCP are ranks like any other. Ray, which starts them, has a soak test."""

from __future__ import annotations

import os
import platform
import re
import signal
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from kit.processes import still_there, watch
from kit.remote_hosts import LocalHosts, LocalProcess
from kit.support import run_cell, wait_until

import graftlab as gl
from graftlab.remote.rank_supervisor import RankEnd, RankSupervisor
from graftlab.remote.remote_rank import _interface_of

MODEL = """
def model(scale):
    x = torch.linspace(-1, 1, 64).reshape(8, 8)
    for layer in range(3):
        x = gl.tap("attn", torch.tanh(x @ x.T / 4), layer=layer)
        x = gl.tap("mlp", torch.relu(x) * (scale if layer == 1 else 1.0) + x, layer=layer)
    return gl.tap("out", x.sum(-1))
"""


def reduced() -> float:
    x = torch.ones(2)
    dist.all_reduce(x)
    return gl.tap("sum", x).sum().item()


def serve() -> None:
    while True:
        gl.tap("x", torch.ones(2))
        gl.step()


def fail() -> None:
    inside = 3
    raise ValueError(f"planted {inside}")


@pytest.fixture(scope="module")
def hosts() -> LocalHosts:
    return LocalHosts()


@pytest.fixture(scope="module")
def session(hosts: LocalHosts) -> Iterator[gl.Session]:
    with gl.launch(1, 2, on=hosts) as session:
        yield session


@pytest.mark.ranks
def test_a_verdict_names_the_mistake_of_a_cell(session: gl.Session) -> None:
    session.execute(MODEL)
    session.execute("scale = 1.0", on="baseline")
    session.execute("scale = 1.001; print('a line')", on="target")
    found = session.verdict("model(scale)", "model(scale)")
    assert found.named == ["mlp"]
    assert "layer 1" in found.text
    assert session.verdict("model(1.0)", "model(1.0)").named == []
    assert "a line" in session.log("target[1]", lines=10_000)
    assert session.status()["links"].tolist() == ["shared memory"] * 3


@pytest.mark.ranks
def test_functions_of_cells_and_the_sides_groups_work(session: gl.Session) -> None:
    add = run_cell("def add(x, y):\n    return x + y")["add"]
    assert session.run(add, add, args=(2, 3)).target == [5, 5]
    assert session.run(target=reduced).target == [4.0, 4.0]
    run = session.execute("import os\n[os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK')]")
    assert run.baseline + run.target == [["0", "1", "0"], ["0", "2", "0"], ["1", "2", "1"]]
    # Code that reads a command line finds none.
    assert session.execute("import sys\nsys.argv").baseline == [[""]]
    assert session.match(reduced, reduced).pairs
    assert session.check(target=reduced).found == []


@pytest.mark.ranks
def test_code_is_interrupted_inspected_and_edited_while_it_runs(session: gl.Session) -> None:
    run = session.start(serve, serve).wait_steps(2)
    version = session.edit(keep="name == 'x'").version
    wait_until(lambda: len(session.adopted(version)) == 3, "the new plan on every rank")
    assert "serve" in session.stacks()["target[1]"]
    wait_until(lambda: (session.status()["step"].fillna(0) > 0).all(), "the status of every rank")
    session.interrupt()
    with pytest.raises(gl.RunError, match="KeyboardInterrupt"):
        run.wait()
    assert session.tensors("x")[1].tolist() == [1.0, 1.0]
    with pytest.raises(gl.RunError, match="planted 3"):
        session.run(target=fail)
    assert session.post_mortem("target[1]", "p inside") == "3"


@pytest.mark.ranks
def test_a_killed_rank_is_named_and_nothing_stays_behind(session: gl.Session, hosts: LocalHosts) -> None:
    pids = [rank.pid or 0 for rank in session.ranks]
    processes = watch(pids)
    session.execute("print('a last line')", on="target")
    run = session.start(serve, serve).wait_steps(1)
    os.kill(pids[2], signal.SIGKILL)
    with pytest.raises(gl.RunError, match=r"target\[1\].*killed by SIGKILL"):
        run.wait()
    assert session.lost_groups == {"target": "target[1] killed by SIGKILL"}
    assert hosts.released == 0
    session.close()
    assert still_there(processes) == []
    assert hosts.released == 1
    assert "a last line" in session.ranks[1].log.read_text()


def test_a_machine_with_another_graftlab_or_python_is_refused() -> None:
    facts = RankSupervisor().facts()
    hosts = LocalHosts(replace(facts, wire_version=0, release="0.0.1"))
    with pytest.raises(
        gl.LaunchError,
        match=r"baseline\[0\]: .* has graftlab 0\.0\.1, of wire version 0.*install",
    ):
        gl.launch(on=hosts)
    assert hosts.released == 1
    with pytest.raises(
        gl.LaunchError, match=rf"has Python 3\.7\.1, and the notebook {platform.python_version()}; start"
    ):
        gl.launch(on=LocalHosts(replace(facts, python="3.7.1")))


def test_a_device_that_no_rank_asked_for_is_refused() -> None:
    hosts = LocalHosts()
    with pytest.raises(
        gl.LaunchError,
        match=r"device='cuda': each rank has 0 GPUs; .*resources=",
    ):
        gl.launch(device="cuda", on=hosts)
    assert hosts.released == 1


def test_a_port_that_is_taken_is_an_error_and_frees_the_machines() -> None:
    import socket

    hosts = LocalHosts()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        hosts.port = taken.getsockname()[1]
        with pytest.raises(gl.LaunchError, match="the notebook cannot listen at 127"):
            gl.launch(on=hosts)
    assert hosts.released == 1


def test_the_interface_of_an_address_is_found() -> None:
    assert _interface_of("127.0.0.1") == "lo"
    assert _interface_of("203.0.113.7") is None


def test_ranks_that_never_start_are_named_once_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(process: LocalProcess, number: int) -> None:
        process.ended.set_result(RankEnd(-number, b""))

    hosts = LocalHosts()
    monkeypatch.setattr(LocalProcess, "start", lambda self, spec: None)
    monkeypatch.setattr(LocalProcess, "signal", end)
    with pytest.raises(gl.LaunchError) as raised:
        gl.launch(1, 2, on=hosts, timeout=0.05)
    text = str(raised.value)
    everyone = r"baseline\[0\], target\[0\], target\[1\]"
    assert re.match(
        rf"{everyone} did not become ready within 0\.05 s; {everyone} had not connected to the notebook at tcp://", text
    )
    assert "The log of baseline[0] ends:\n(nothing, or its machine cannot be reached)" in text
    assert hosts.released == 1
