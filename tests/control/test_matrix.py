"""Deaths of every kind in every phase: told with rank, pid, cause and log; the others free; a restart mends it all.

docs/architecture.md has the table. A few cells of it are in the suite, all of them in ``make soak``.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
from collections.abc import Callable, Iterator

import pytest
import torch
import torch.distributed as dist
from kit.processes import stop_process
from kit.support import wait_until

import graftlab as gl

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 2) as session:
        yield session


def by(number: int) -> Callable[[], None]:
    return lambda: os.kill(os.getpid(), number)


ENDS: dict[str, tuple[Callable[[], object], str]] = {
    "SIGKILL": (by(signal.SIGKILL), "killed by SIGKILL"),
    "SIGTERM": (by(signal.SIGTERM), "killed by SIGTERM"),
    "segfault": (lambda: ctypes.string_at(0), "killed by SIGSEGV"),
    "abort": (lambda: os.abort(), "killed by SIGABRT"),
    "_exit": (lambda: os._exit(7), "ended with exit code 7"),
}
LABELS = ("baseline[0]", "target[0]", "target[1]")
PHASES = ("user code", "waiting", "collective", "publishing")

IN_THE_SUITE = {
    ("SIGKILL", "user code", "baseline[0]"),
    ("SIGKILL", "waiting", "target[1]"),
    ("SIGKILL", "publishing", "baseline[0]"),
    ("SIGTERM", "collective", "target[0]"),
    ("segfault", "user code", "target[0]"),
    ("_exit", "user code", "target[1]"),
}
CELLS = [
    pytest.param(*cell, marks=() if cell in IN_THE_SUITE else pytest.mark.soak)
    for cell in itertools.product(ENDS, PHASES, LABELS)
]


def work(phase: str, label: str, end: Callable[[], object]) -> None:
    """What every rank does; the one of this label ends, on another thread while its main thread waits."""
    import threading

    # coverage.py has a handler, which the main thread does not run while it is in a collective.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    me = gl.here()
    is_it = f"{me.side}[{me.rank}]" == label
    gl.tap("before", torch.ones(3))
    if is_it:
        print("the last words")
        if phase == "user code":
            end()
        threading.Timer(0.3, end).start()
    if phase == "waiting" and is_it:
        gl.tap("only here", torch.ones(3))
    elif phase == "collective" and is_it:
        dist.recv(torch.ones(1), 1 - me.rank) if me.world_size > 1 else threading.Event().wait()
    elif phase == "publishing":
        large = torch.ones(16 << 20)
        while True:
            gl.tap("large", large)
            gl.step()
    while True:
        gl.step()


def tap_and_meet() -> float:
    x = gl.tap("after", torch.ones(3))
    dist.all_reduce(x)
    return x.sum().item()


@pytest.mark.parametrize(("kind", "phase", "label"), CELLS)
def test_a_death_is_reported_frees_the_others_and_is_fixed_by_a_restart(
    session: gl.Session, kind: str, phase: str, label: str
) -> None:
    end, cause = ENDS[kind]
    [pid] = [rank.pid for rank in session.ranks if rank.label == label]
    rows = session.row_count
    run = session.start(work, work, args=(phase, label, end))
    with pytest.raises(gl.RunError) as told:
        run.wait(60)
    text = str(told.value)
    assert run.done
    assert re.search(rf"{re.escape(label)} died: {cause} \(pid {pid}, ", text)
    assert "the last words" in text
    assert text.index(label) < text.index("was interrupted") if "was interrupted" in text else True
    assert ("target" in session.lost_groups) == label.startswith("target")
    session.restart()
    assert session.lost_groups == {}
    again = session.run(tap_and_meet, tap_and_meet)
    assert (again.baseline, again.target) == ([3.0], [6.0, 6.0])
    assert again.frame["status"].tolist() == ["compared", "compared"]
    assert session.row_count > rows
    assert len(gl.load_run(session.folder)) == session.row_count


def test_a_death_while_idle_is_reported_and_fixed_by_a_restart(session: gl.Session) -> None:
    session.ranks[0].signal(signal.SIGKILL)
    wait_until(lambda: not session.ranks[0].alive, "the news of the death")
    with pytest.raises(gl.SessionClosedError, match=r"baseline\[0\] is gone \(killed by SIGKILL\)"):
        session.run("1")
    session.restart()
    assert session.run("1").baseline == [1]


def test_a_memory_error_is_an_error_like_others(session: gl.Session) -> None:
    def take_all() -> None:
        bytearray(1 << 60)

    with pytest.raises(gl.RunError, match="MemoryError"):
        session.run(target=take_all)
    assert session.run(target="1").target == [1, 1]


def test_a_stopped_rank_is_shown_and_continues(session: gl.Session) -> None:
    rank = session.ranks[1]
    stop_process(rank.pid or 0)
    run = session.start("gl.tap('x', torch.ones(1)).sum().item()", "gl.tap('x', torch.ones(1)).sum().item()")
    with pytest.raises(TimeoutError, match=r"target\[0\]: about to begin"):
        run.wait(0.5)
    rank.signal(signal.SIGCONT)
    assert run.wait(60).target == [1.0, 1.0]
