"""The exchange between real processes: every dtype, load from all sides at once, and deaths of every kind."""

from __future__ import annotations

import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import pytest
from kit.exchange_scripts import (
    checks_everything,
    fills_its_budget,
    receives_x_then_y,
    receives_x_then_y_in_short,
    sends_and_receives,
    sends_everything,
    sends_x_and_leaves_a_child,
    sends_x_then_is_told,
    sits_still,
    taps_in_a_child_too,
)
from kit.mailboxes import DEADLINE, MIB, processes

import graftlab as gl

BASELINE, TARGET = 0, 1


def test_every_dtype_crosses_from_process_to_process_bit_exact() -> None:
    with processes(sends_everything, checks_everything) as world:
        assert world.hear(TARGET) == []
        assert world.hear(BASELINE) == (0, [])
        assert world.join() == [0, 0]


def test_four_ranks_that_send_and_receive_at_once_in_orders_of_their_own_lose_and_mix_nothing() -> None:
    with processes(sends_and_receives, sends_and_receives, (2, 2), budget=MIB) as world:
        assert [world.hear(rank) for rank in range(4)] == [(0, [])] * 4
        assert world.join() == [0] * 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, "exit", "exception"], ids=str)
def test_a_sender_that_dies_frees_the_receiver_that_waits_for_it(how: Any) -> None:
    with processes(sends_x_then_is_told, receives_x_then_y) as world:
        # What was published before the death still arrived.
        assert world.hear(TARGET) == [5.0]
        assert world.hear(TARGET) == "waits"
        world.lines[BASELINE].send(how)
        assert world.hear(TARGET) == ({0: "baseline[0] died"}, False)


def test_a_receiver_that_is_killed_frees_the_sender_that_waits_for_room() -> None:
    with processes(fills_its_budget, sits_still, budget=3 * MIB) as world:
        assert world.hear(BASELINE) == "waits"
        world.processes[TARGET].kill()
        assert world.hear(BASELINE) == (0, [0, 1, 2, 3])


def test_the_others_go_on_when_one_of_several_is_killed() -> None:
    with processes(sends_x_then_is_told, receives_x_then_y, (2, 2)) as world:
        for receiver in (2, 3):
            assert world.hear(receiver) == [5.0, 5.0]
            assert world.hear(receiver) == "waits"
        world.lines[0].send(signal.SIGKILL)
        world.processes[0].join(DEADLINE)
        world.lines[1].send("exit")
        died = {0: "baseline[0] died", 1: "baseline[1] died"}
        assert [world.hear(receiver) for receiver in (2, 3)] == [(died, False)] * 2


@pytest.mark.parametrize("made", ["forked", "executed"])
def test_children_that_outlive_a_killed_rank_keep_nobody_waiting(made: str) -> None:
    with processes(sends_x_and_leaves_a_child, receives_x_then_y) as world:
        assert world.hear(TARGET) == [5.0]
        assert world.hear(TARGET) == "waits"
        world.lines[BASELINE].send(made)
        child = world.hear(BASELINE)
        try:
            world.processes[BASELINE].kill()
            assert world.hear(TARGET) == ({0: "baseline[0] died"}, False)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_stopped_rank_is_still_found_where_it_was() -> None:
    with processes(sends_x_then_is_told, receives_x_then_y_in_short) as world:
        assert world.hear(TARGET) == [5.0]
        os.kill(world.processes[BASELINE].pid, signal.SIGSTOP)
        world.lines[TARGET].send("go on")
        absent, timed_out = world.hear(TARGET)
        assert timed_out
        assert "baseline[0] did not reach this tap within 0.1 s: computing since" in absent[0]
        assert "last seen at tap 'x' of step 0" in absent[0]


def who_maps(inodes: set[int]) -> list[str]:
    """The processes, this one included, that still hold one of these pieces of memory."""
    found = []
    for maps in Path("/proc").glob("[0-9]*/maps"):
        try:
            lines = [line.split(maxsplit=5) for line in maps.read_text().splitlines() if "graftlab" in line]
        except OSError:
            continue  # it has ended meanwhile
        found += [maps.parent.name for _, _, _, _, inode, *_ in lines if int(inode) in inodes]
    return found


@pytest.mark.parametrize("victims", [(BASELINE,), (TARGET,), (BASELINE, TARGET)], ids=["sender", "receiver", "both"])
def test_killed_ranks_leave_nothing_behind(victims: tuple[int, ...]) -> None:
    named = set(os.listdir("/dev/shm")) | set(os.listdir(tempfile.gettempdir()))
    with processes(sends_x_then_is_told, receives_x_then_y) as world:
        assert world.hear(TARGET) == [5.0]
        assert world.hear(TARGET) == "waits"
        assert len(who_maps(world.inodes)) == 4
        for victim in victims:
            world.processes[victim].kill()
        if TARGET not in victims:
            assert world.hear(TARGET) == ({0: "baseline[0] died"}, False)
    # The memory has no name, so it is gone with the last process that holds it.
    assert who_maps(world.inodes) == []
    new = (set(os.listdir("/dev/shm")) | set(os.listdir(tempfile.gettempdir()))) - named
    assert [name for name in new if "graftlab" in name] == []


def test_a_forked_child_of_a_rank_does_not_write_into_what_the_rank_sent(tmp_path: Path) -> None:
    with gl.launch(1, 1) as session:
        session.edit(b2t="True")
        run = session.run(taps_in_a_child_too, taps_in_a_child_too, args=(str(tmp_path),))
        assert run.target == [[1.0, 1.0, 1.0]]
        assert run.frame["name"].tolist() == ["x"]
