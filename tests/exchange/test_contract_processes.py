"""What every exchange promises between real processes: every dtype, load from all sides, deaths of every kind."""

from __future__ import annotations

import os
import signal
import tempfile
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
)
from kit.implementations import MakeProcesses
from kit.mailboxes import DEADLINE, MIB, Processes
from kit.processes import stop_process

pytestmark = pytest.mark.ranks

BASELINE, TARGET = 0, 1


def who_died(world: Processes, *ranks: int) -> dict[int, str]:
    """What a receiver says of these ranks of the baseline. Over a network it cannot know whose fault the end is."""
    how = "died" if world.shares_memory else "died, or the network connection to it failed"
    return {rank: f"baseline[{rank}] {how}" for rank in ranks}


@pytest.mark.parametrize("counts", [(1, 1), (2, 2)], ids=["1+1", "2+2"])
def test_every_dtype_crosses_from_process_to_process_bit_exact(
    processes: MakeProcesses, counts: tuple[int, int]
) -> None:
    with processes(sends_everything, checks_everything, counts) as world:
        said = [world.hear(rank) for rank in range(sum(counts))]
        assert said == [(0, [])] * counts[0] + [[]] * counts[1]
        assert world.join() == [0] * sum(counts)


def test_four_ranks_in_different_orders_lose_and_mix_nothing(
    processes: MakeProcesses,
) -> None:
    with processes(sends_and_receives, sends_and_receives, (2, 2), budget=MIB) as world:
        assert [world.hear(rank) for rank in range(4)] == [(0, [])] * 4
        assert world.join() == [0] * 4


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV, "exit", "exception"], ids=str)
def test_a_sender_that_dies_frees_the_receiver_that_waits_for_it(processes: MakeProcesses, how: Any) -> None:
    with processes(sends_x_then_is_told, receives_x_then_y) as world:
        # What was published before the death still arrived.
        assert world.hear(TARGET) == [5.0]
        assert world.hear(TARGET) == "waits"
        world.lines[BASELINE].send(how)
        assert world.hear(TARGET) == (who_died(world, 0), False)


def test_a_receiver_that_is_killed_frees_the_sender_that_waits_for_room(processes: MakeProcesses) -> None:
    with processes(fills_its_budget, sits_still, budget=3 * MIB) as world:
        assert world.hear(BASELINE) == "waits"
        world.processes[TARGET].kill()
        assert world.hear(BASELINE) == (0, [0, 1, 2, 3])


def test_the_others_continue_when_one_of_several_is_killed(processes: MakeProcesses) -> None:
    with processes(sends_x_then_is_told, receives_x_then_y, (2, 2)) as world:
        for receiver in (2, 3):
            assert world.hear(receiver) == [5.0, 5.0]
            assert world.hear(receiver) == "waits"
        world.lines[0].send(signal.SIGKILL)
        world.processes[0].join(DEADLINE)
        world.lines[1].send("exit")
        assert [world.hear(receiver) for receiver in (2, 3)] == [(who_died(world, 0, 1), False)] * 2


@pytest.mark.parametrize("made", ["forked", "executed"])
def test_children_of_a_killed_rank_keep_no_peer_waiting(processes: MakeProcesses, made: str) -> None:
    with processes(sends_x_and_leaves_a_child, receives_x_then_y) as world:
        assert world.hear(TARGET) == [5.0]
        assert world.hear(TARGET) == "waits"
        world.lines[BASELINE].send(made)
        child = world.hear(BASELINE)
        try:
            world.processes[BASELINE].kill()
            assert world.hear(TARGET) == (who_died(world, 0), False)
        finally:
            os.kill(child, signal.SIGKILL)


def test_the_status_of_a_stopped_rank_can_still_be_read(processes: MakeProcesses) -> None:
    with processes(sends_x_then_is_told, receives_x_then_y_in_short) as world:
        assert world.hear(TARGET) == [5.0]
        stop_process(world.processes[BASELINE].pid)
        world.lines[TARGET].send("continue")
        absent, timed_out = world.hear(TARGET)
        assert timed_out
        assert "baseline[0] did not reach this tap within 0.1 s: computing for" in absent[0]
        assert "last seen at tap 'x' of step 0" in absent[0]


def files_of_all() -> set[str]:
    """What has a name where memory is shared and temporary files lie. Folders are those of other tests."""
    folders = ("/dev/shm", tempfile.gettempdir())
    return {entry.name for folder in folders for entry in os.scandir(folder) if not entry.is_dir()}


@pytest.mark.parametrize("victims", [(BASELINE,), (TARGET,), (BASELINE, TARGET)], ids=["sender", "receiver", "both"])
def test_killed_ranks_leave_nothing_behind(processes: MakeProcesses, victims: tuple[int, ...]) -> None:
    named = files_of_all()
    with processes(sends_x_then_is_told, receives_x_then_y) as world:
        assert world.hear(TARGET) == [5.0]
        assert world.hear(TARGET) == "waits"
        assert len(world.who_holds_memory()) == (4 if world.shares_memory else 2)
        for victim in victims:
            world.processes[victim].kill()
        if TARGET not in victims:
            assert world.hear(TARGET) == (who_died(world, 0), False)
    # The memory has no name, so it is gone with the last process that holds it.
    assert world.who_holds_memory() == []
    assert [name for name in files_of_all() - named if "graftlab" in name] == []
