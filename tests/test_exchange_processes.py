"""The exchange between real processes: every dtype, load from all sides at once, and deaths of every kind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from mailboxes import DEADLINE, MIB, Mailbox, Processes, key, processes
from support import wait_for_file
from test_exchange import DTYPES, bits, layouts

import graftlab as gl

BASELINE, TARGET = 0, 1
A_MIB = torch.zeros(MIB, dtype=torch.uint8)

# ---- what the ranks run ---------------------------------------------------------------------------------------------


def end(mailbox: Mailbox, step: int = 0) -> tuple[int, list[object]]:
    """End the run as a rank does; what is then still in use, and unmatched."""
    mailbox.exchange.end_step(step)
    mailbox.exchange.end_run()
    never, _ = os.pipe()
    assert mailbox.exchange.settle(never)
    return mailbox.bytes_in_use(), mailbox.exchange.take_unmatched()


def say_when_waiting(mailbox: Mailbox, line: Any) -> None:
    waits = mailbox.exchange.on_wait

    def on_wait(awaits: Any) -> None:
        waits(awaits)
        if awaits:
            line.send("waits")

    mailbox.exchange.on_wait = on_wait


def sends_everything(mailbox: Mailbox, line: Any) -> None:
    for dtype in DTYPES:
        for name, tensor in layouts(dtype).items():
            mailbox.publish(key(name, dtype=str(dtype)), tensor)
    line.send(end(mailbox))


def checks_everything(mailbox: Mailbox, line: Any) -> None:
    wrong = []
    for dtype in reversed(DTYPES):
        for name, tensor in layouts(dtype).items():
            receipt = mailbox.receive(key(name, dtype=str(dtype)))
            (arrived,) = (contribution.tensor for contribution in receipt.contributions)
            same = (arrived.shape, arrived.dtype) == (tensor.shape, tensor.dtype)
            if not same or not torch.equal(bits(arrived), bits(tensor)):
                wrong.append((str(dtype), name))
            receipt.release()
    end(mailbox)
    line.send(wrong)


STEPS, TAPS = 3, 24


def the_tensor(direction: str, step: int, tap: int, rank: int) -> torch.Tensor:
    """Of a size that depends on the tap, with values that tell all four numbers."""
    values = random.Random(f"{direction} {step} {tap} {rank}")
    return torch.full((values.choice([0, 1, 30, 3000, 60_000]),), values.getrandbits(40), dtype=torch.int64)


def sends_and_receives(mailbox: Mailbox, line: Any) -> None:
    """Taps in an order of its own, half of them sent and half received."""
    me = mailbox.place
    sent, received = ("down", "up") if me.side == "baseline" else ("up", "down")
    for step in range(STEPS):
        taps = [(name, tap) for name in ("down", "up") for tap in range(TAPS)]
        random.Random(f"{me.label} {step}").shuffle(taps)
        # Whoever receives first waits for the other side: an order without a circle is one that sends first.
        taps.sort(key=lambda each: (each[1] // 8, each[0] == received))
        for name, tap in taps:
            address = key(name, step=step, tap=tap)
            if name == sent:
                mailbox.publish(address, the_tensor(name, step, tap, me.rank), extras=(step, tap, me.rank))
                continue
            receipt = mailbox.receive(address)
            for rank, contribution in enumerate(receipt.contributions):
                assert contribution.rank == rank
                assert contribution.extras == (step, tap, rank)
                assert torch.equal(contribution.tensor, the_tensor(name, step, tap, rank))
            assert receipt.absent == {}
            receipt.release()
        mailbox.exchange.end_step(step)
    line.send(end(mailbox, STEPS))


def receives_x_then_y(mailbox: Mailbox, line: Any) -> None:
    line.send(mailbox.take(key("x")))
    say_when_waiting(mailbox, line)
    receipt = mailbox.receive(key("y"))
    line.send((receipt.absent, receipt.timed_out))
    line.recv()


def receives_x_then_y_in_short(mailbox: Mailbox, line: Any) -> None:
    line.send(mailbox.take(key("x")))
    line.recv()
    mailbox.exchange.timeout = 0.1
    receipt = mailbox.receive(key("y"))
    line.send((receipt.absent, receipt.timed_out))


def sends_x_then_is_told(mailbox: Mailbox, line: Any) -> None:
    mailbox.tap = "x"
    mailbox.note("running")
    mailbox.publish(key("x"), 5.0)
    how = line.recv()
    if how == "exit":
        os._exit(3)
    if how == "exception":
        raise RuntimeError("as it happens")
    os.kill(os.getpid(), how)


def fills_its_budget(mailbox: Mailbox, line: Any) -> None:
    for number in range(3):
        mailbox.publish(key(occurrence=number), A_MIB, memo=number)
    say_when_waiting(mailbox, line)
    mailbox.publish(key(occurrence=3), A_MIB, memo=3)
    line.send((mailbox.bytes_in_use(), mailbox.exchange.take_unmatched()))
    line.recv()


def sits_still(mailbox: Mailbox, line: Any) -> None:
    line.recv()


def sends_x_and_leaves_a_child(mailbox: Mailbox, line: Any) -> None:
    mailbox.publish(key("x"), 5.0)
    if line.recv() == "forked":
        child = os.fork()
        if child == 0:
            signal.pause()
    else:
        # As os.system does: it closes nothing that is not marked to be closed.
        child = subprocess.Popen(["sleep", "1000"], close_fds=False).pid
    line.send(child)
    signal.pause()


# ---- the promises ---------------------------------------------------------------------------------------------------


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


def named_remains(temporary: Path) -> list[str]:
    shared = [name for name in os.listdir("/dev/shm") if "graftlab" in name]
    return shared + [path.name for path in temporary.iterdir() if not path.name.startswith("pymp-")]


@pytest.mark.parametrize("victims", [(BASELINE,), (TARGET,), (BASELINE, TARGET)], ids=["sender", "receiver", "both"])
def test_killed_ranks_leave_nothing_behind(
    victims: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with processes(sends_x_then_is_told, receives_x_then_y) as world:
        assert world.hear(TARGET) == [5.0]
        assert world.hear(TARGET) == "waits"
        for victim in victims:
            world.processes[victim].kill()
        if TARGET not in victims:
            assert world.hear(TARGET) == ({0: "baseline[0] died"}, False)
    # The memory had no name, so with the last process that held it it is gone; here nothing holds it any more.
    mapped = Path("/proc/self/maps").read_text()
    assert "graftlab" not in mapped
    assert named_remains(tmp_path) == []


# ---- children of a rank ---------------------------------------------------------------------------------------------


def taps_in_a_child_too(folder: str) -> list[float]:
    mine = Path(folder) / "the child has tapped"
    if gl.here().side == "target":
        wait_for_file(mine)
        return gl.tap("x", torch.zeros(3)).tolist()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.read(read, 1)
            gl.tap("y", torch.full((3,), 2.0))
        finally:
            os._exit(0)
    gl.tap("x", torch.full((3,), 1.0))
    os.write(write, b"now")
    os.waitpid(child, 0)
    mine.touch()
    return []


def test_a_forked_child_of_a_rank_does_not_write_into_what_the_rank_sent(tmp_path: Path) -> None:
    with gl.launch(1, 1) as session:
        session.edit(b2t="True")
        run = session.run(taps_in_a_child_too, taps_in_a_child_too, args=(str(tmp_path),))
        assert run.target == [[1.0, 1.0, 1.0]]
        assert run.frame["name"].tolist() == ["x"]
