"""What is given to each rank that starts, what is closed if that fails, and the wait for their first messages."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.forkserver import ForkServer
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest.mock import Mock, call

import pytest
from kit.in_process import talking_ranks

from graftlab.base.world import Place
from graftlab.errors import LaunchError
from graftlab.ranks import forkserver, launcher, preload_first
from graftlab.ranks.entry import enter
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.launcher import _await_hellos, _environment, _start, end_ranks
from graftlab.ranks.messages import Hello
from graftlab.ranks.options import LaunchOptions

PLACE = Place("target", 1, 2, 1)


class Started:
    """A stand-in for the process of a rank."""

    def __init__(self) -> None:
        self.given: dict[str, Any] = {}
        self.method: Any = None
        self.was_started = False

    def context(self, method: str) -> Any:
        self.method = method
        return SimpleNamespace(Process=self.process)

    def process(self, **given: Any) -> Any:
        self.given = given
        return self

    def start(self) -> None:
        self.was_started = True


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> Started:
    made = Started()
    monkeypatch.setattr(launcher.torch.multiprocessing, "get_context", made.context)
    monkeypatch.setattr(launcher.forkserver, "hidden_main", contextlib.nullcontext)
    monkeypatch.setattr(launcher, "RankProcess", lambda *parts: parts)
    return made


@pytest.fixture
def pairs(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """The pairs of sockets that were made: ours first."""
    made: list[tuple[socket.socket, socket.socket]] = []
    plain = socket.socketpair

    def pair() -> tuple[socket.socket, socket.socket]:
        made.append(plain())
        return made[-1]

    monkeypatch.setattr(launcher.socket, "socketpair", pair)
    yield made
    for each in made:
        for end in each:
            end.close()


def start(folder: Path, **options: Any) -> Any:
    chosen: Any = LaunchOptions(1, 2, **options)
    shared: Any = SimpleNamespace(
        segment_size=4096, of=lambda place: [f"of {place.label}"], segments=["segment 0", "segment 1", "segment 2"]
    )
    assignment: Any = SimpleNamespace(device="cpu", backend="gloo")
    return _start(chosen, folder, "the plan", PLACE, assignment, shared)  # type: ignore[arg-type]


def test_a_rank_gets_its_place_its_limits_and_the_notebooks_surroundings(
    started: Started, pairs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[Any] = []
    monkeypatch.setattr(launcher, "send_descriptors", lambda channel, descriptors: sent.append((channel, descriptors)))
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    monkeypatch.setenv("MINE", "1")
    # To ask for the usual method would choose it, and the notebook's own code could choose none any more.
    asked = {True: "the notebook's own", False: "chosen by asking"}
    monkeypatch.setattr(multiprocessing, "get_start_method", lambda allow_none=False: asked[allow_none])
    (tmp_path / "logs").mkdir()
    rank = start(tmp_path, timeout=50.0, tap_timeout=4.0, buffer_budget=1 << 20, keep_budget=1 << 21)
    assert (started.method, started.was_started) == (LaunchOptions(1, 2).start_method, True)
    assert (started.given["target"], started.given["name"]) == (enter, "graftlab-target[1]")
    spec, theirs = started.given["args"]
    assert theirs is pairs[0][1]
    assert (spec.place, spec.device, spec.backend, spec.plan) == (PLACE, "cpu", "gloo", "the plan")
    assert (spec.timeout, spec.tap_timeout, spec.buffer_budget, spec.keep_budget) == (50.0, 4.0, 1 << 20, 1 << 21)
    assert (spec.log, spec.stacks) == (f"{tmp_path}/logs/target-1.log", f"{tmp_path}/logs/target-1.stacks")
    # The processors are divided among the ranks of both sides.
    assert (spec.threads, spec.segment_size, spec.cwd) == (4, 4096, os.getcwd())
    assert spec.environ["MINE"] == "1"
    assert spec.multiprocessing == "the notebook's own"
    assert spec.sys_path == sys.path
    assert spec.sys_path is not sys.path
    (ours, descriptors) = sent[0]
    assert ours is pairs[0][0]
    assert descriptors[0] == "of target[1]"
    assert rank[0] == PLACE
    assert rank[4:] == (pairs[1][0], pairs[2][0], "segment 2", Path(spec.log), Path(spec.stacks))
    # The rank's ends of the sockets are open only there.
    assert [each[1].fileno() for each in pairs] == [-1, -1, -1]
    assert all(each[0].fileno() >= 0 for each in pairs)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    start(tmp_path)
    assert started.given["args"][0].threads == 1


def test_a_rank_that_cannot_be_started_leaves_no_socket(
    started: Started, pairs: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(launcher, "send_descriptors", fails)
    with pytest.raises(KeyboardInterrupt):
        start(tmp_path)
    assert [end.fileno() for each in pairs for end in each] == [-1] * 6


@pytest.mark.parametrize("fails", ["second rank", "hello", None])
def test_a_launch_that_fails_leaves_no_rank_and_the_notebook_keeps_no_descriptor(
    fails: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done, error = Mock(), KeyboardInterrupt() if fails == "hello" else OSError("no room")
    done.start.side_effect = ["first", error if fails == "second rank" else "second"]
    done.hellos.side_effect = error if fails == "hello" else None
    for name, made in (("SharedDescriptors", done.shared), ("_start", done.start), ("_abandon", done.abandon)):
        monkeypatch.setattr(launcher, name, made)
    monkeypatch.setattr(launcher, "_await_hellos", done.hellos)
    options: Any = SimpleNamespace(start_method="spawn", timeout=3.0)
    given: Any = (options, tmp_path, "plan", ["a", "b"], ["cpu", "cpu"], "given up")
    if fails is None:
        assert launcher._launch(*given) == ["first", "second"]
    else:
        expected = LaunchError if fails == "second rank" else KeyboardInterrupt
        with pytest.raises(expected, match="no room" if fails == "second rank" else None):
            launcher._launch(*given)
    left = ["first", "second"] if fails == "hello" else ["first"]
    assert done.abandon.call_args_list == ([] if fails is None else [call(left)])
    done.shared.return_value.release.assert_called_once_with()


def test_collectives_stay_on_this_machine_unless_the_user_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    environ = _environment()
    assert environ["NCCL_SOCKET_IFNAME"] == "eth7"
    assert environ["GLOO_SOCKET_IFNAME"] == ("lo" if sys.platform.startswith("linux") else "lo0")
    assert "GLOO_SOCKET_IFNAME" not in os.environ
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth8")
    assert _environment()["GLOO_SOCKET_IFNAME"] == "eth8"


class Channel:
    """A rank's channel: its socket, and the frames to be read from it."""

    def __init__(self, *frames: Any, closed: bool = False) -> None:
        self.ours, self.theirs = socket.socketpair()
        self.frames, self.closed = list(frames), closed
        if frames or closed:
            self.theirs.send(b"x")

    def fileno(self) -> int:
        return self.ours.fileno()

    def receive(self) -> list[Any]:
        return self.frames


@pytest.fixture
def waited(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(launcher, "unpack_from_rank", lambda frame: frame)
    ends = socket.socketpair()
    channels: list[Channel] = []

    def wait(*given: Channel, timeout: float = 30.0) -> list[Any]:
        channels.extend(given)
        ranks: Any = [
            SimpleNamespace(
                channel=each,
                pid=0,
                label=f"target[{n}]",
                log=f"{n}.log",
                log_tail=lambda n=n: f"the end of {n}",
                how_it_ended=lambda: "exit code 3",
            )
            for n, each in enumerate(given)
        ]
        _await_hellos(ranks, timeout, ends[0])
        return [each.pid for each in ranks]

    wait.give_up = ends[1]  # type: ignore[attr-defined]
    yield wait
    for end in (*ends, *(end for each in channels for end in (each.ours, each.theirs))):
        end.close()


def hello(pid: int) -> Hello:
    return Hello(pid=pid)


def test_each_rank_is_known_by_its_first_message(waited: Any) -> None:
    assert waited(Channel(b"a row", hello(31)), Channel(hello(32))) == [31, 32]


def test_a_rank_that_does_not_come_is_named_with_the_end_of_its_log(waited: Any) -> None:
    with pytest.raises(LaunchError) as late:
        waited(Channel(hello(31)), Channel(), Channel(), timeout=0.0)
    assert "target[1], target[2] did not become ready within 0 s" in str(late.value)
    assert "The log of target[1] (1.log) ends:\nthe end of 1" in str(late.value)
    with pytest.raises(LaunchError) as died:
        waited(Channel(closed=True))
    assert "target[0] died while starting (exit code 3). Its log (0.log) ends:\nthe end of 0" in str(died.value)
    waited.give_up.send(b"x")
    with pytest.raises(LaunchError, match="the launch was interrupted"):
        waited(Channel())


def test_all_ranks_are_asked_to_end_and_those_left_are_killed_together() -> None:
    done: list[Any] = []

    def rank(name: str, ends: bool) -> Any:
        def join(patience: float) -> bool:
            done.append(("join", name, patience > 0))
            return ends

        return SimpleNamespace(
            channel=SimpleNamespace(send=lambda data: done.append(("ask", name))),
            join=join,
            kill=lambda: done.append(("kill", name)),
            alive=True,
        )

    ranks = [rank("a", True), rank("b", False), rank("c", False)]
    end_ranks(ranks, patience=60.0)
    assert done == [
        *(("ask", name) for name in "abc"),
        *(("join", name, True) for name in "abc"),
        *(("kill", name) for name in "bc"),
        *(("join", name, True) for name in "bc"),
    ]
    assert not any(each.alive for each in ranks)
    done.clear()

    def stopped(patience: float) -> bool:
        raise KeyboardInterrupt

    ranks = [rank("a", True), rank("b", False)]
    ranks[1].join = stopped
    with pytest.raises(KeyboardInterrupt):
        end_ranks(ranks)
    assert done[-2:] == [("kill", "a"), ("kill", "b")]


@pytest.mark.parametrize("is_script", [True, False])
def test_the_users_script_is_hidden_while_a_process_starts_and_then_as_before(
    is_script: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    main = ModuleType("__main__")
    if is_script:
        main.__file__, main.__spec__ = "train.py", cast("Any", "spec")
    else:
        # As after a notebook's %reset.
        del main.__spec__
    monkeypatch.setitem(sys.modules, "__main__", main)
    before = dict(vars(main))
    for error in (None, OSError("no process")):
        with (
            pytest.raises(OSError, match="no process") if error else contextlib.nullcontext(),
            forkserver.hidden_main(),
        ):
            assert (main.__spec__, hasattr(main, "__file__")) == (None, False)
            if error:
                raise error
        assert vars(main) == before


def test_the_forkservers_variables_and_blocked_interrupts_end_with_its_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAFTLAB_TEST_A", "own")
    monkeypatch.delenv("GRAFTLAB_TEST_B", raising=False)
    before = dict(os.environ)
    mine = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        wanted = {"GRAFTLAB_TEST_A": "1", "GRAFTLAB_TEST_B": "2"}
        with (
            contextlib.suppress(OSError),
            forkserver._environment_of_forkserver(wanted),
            forkserver._blocked_interrupts(),
        ):
            assert {name: os.environ[name] for name in wanted} == wanted
            raise OSError("no process")
        assert dict(os.environ) == before
        # A thread that has blocked interrupts itself still does.
        assert signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, [])
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mine)


@pytest.mark.ranks
def test_a_forkserver_that_is_just_starting_survives_the_stop_button(monkeypatch: pytest.MonkeyPatch) -> None:
    """The stop button would end a Python process that is just starting."""
    masks, trackers = [], []

    def ensure_tracker() -> None:
        # As the real one does when it starts its process.
        if not trackers:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        trackers.append("running")

    def spawn(*_: object) -> int:
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
        raise OSError

    monkeypatch.setattr("multiprocessing.resource_tracker.ensure_running", ensure_tracker)
    monkeypatch.setattr("multiprocessing.util.spawnv_passfds", spawn)
    monkeypatch.setattr("multiprocessing.forkserver.ensure_running", ForkServer().ensure_running)
    with pytest.raises(OSError, match=r"^$"):
        forkserver.prepare()
    masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, []))
    assert [signal.SIGINT in mask for mask in masks] == [True, False]
    started = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})\n"
        "os.kill(os.getpid(), signal.SIGINT)\n"
        "import graftlab.ranks.preload_first\n"
        "print(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
    )
    environment = {**os.environ, preload_first.VARIABLE: "yes"}
    ended = subprocess.run([sys.executable, "-c", started], env=environment, capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("set()\n", 0), ended.stderr


def test_a_released_rank_leaves_no_socket_and_no_file_of_torchs(tmp_path: Path) -> None:
    with talking_ranks(tmp_path) as (first, other):
        first.is_at("running", step=7)
        first.rank.pid = 2**22 + 1  # more than the system gives
        left, of_another = (Path(f"/dev/shm/torch_{pid}_test") for pid in (2**22 + 1, 2**22 + 2))
        for path in (left, of_another):
            path.touch()
        try:
            first.rank.release()
            assert not left.exists()
            assert of_another.exists()
        finally:
            for path in (left, of_another):
                path.unlink(missing_ok=True)
        assert (first.rank.wake_socket.fileno(), first.rank.alive, first.rank.channel.closed) == (-1, False, True)
        # The rank ends when its end of this pipe is all that is left.
        first.death_pipe.setblocking(False)
        assert first.death_pipe.recv(1) == b""
        assert first.rank.status().step == 7
        assert other.rank.alive


def test_the_end_of_a_ranks_log_is_read_or_why_it_cannot_be_is_given(tmp_path: Path) -> None:
    with talking_ranks(tmp_path) as (first, _):
        first.rank.log = tmp_path / "log"
        assert first.rank.log_tail().startswith("(nothing: the process had not opened its log yet")
        first.rank.log.write_bytes(b"one\ntwo\n\xff\n")
        assert first.rank.log_tail(2) == "two\n\N{REPLACEMENT CHARACTER}"
        first.rank.log.write_text("")
        assert first.rank.log_tail() == "(nothing)"
        # A progress bar may write megabytes without an end of a line.
        first.rank.log.write_text(f"{'=' * (1 << 21)}\r100%")
        assert first.rank.log_tail(1) == "100%"
        first.rank.log = tmp_path
        assert first.rank.log_tail().startswith("(no log: ")


def test_an_errors_end_of_a_log_has_no_lines_of_grafts(tmp_path: Path) -> None:
    log = tmp_path / "target-0.log"
    graft = "2026-11-29 17:02:07,595 INFO graftlab.grafting.receive_pipeline: target[0] grafted b2t at tap 'x'\n"
    log.write_text("first\n" + graft * 20_000 + "cannot allocate\n" + graft * 40)
    rank: Any = SimpleNamespace(log=log)
    assert RankHandle.log_tail(rank, 30, with_grafts=False) == "cannot allocate", "the first lines are not read"
    assert RankHandle.log_tail(rank, 2).splitlines() == [graft.strip()] * 2
    assert RankHandle.log_tail(rank, 30_000).startswith("first\n")
