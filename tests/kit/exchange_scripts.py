"""What the ranks of ``test_exchange_processes`` run; apart, because a rank need not import what tests need."""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path
from typing import Any

import torch

import graftlab as gl
from graftlab.exchange.arena import Arena
from graftlab.exchange.status_page import StatusPage
from kit.mailboxes import MIB, Descriptors, Mailbox, key, settles
from kit.support import wait_for_file, wait_until
from kit.tensors import DTYPES, bits, layouts

A_MIB = torch.zeros(MIB, dtype=torch.uint8)


def end(mailbox: Mailbox, step: int = 0) -> tuple[int, list[object]]:
    """End the run as a rank does; what is then still in use, and unmatched."""
    mailbox.exchange.end_step(step)
    mailbox.exchange.end_run()
    assert settles(mailbox)
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
            for arrived in (contribution.tensor for contribution in receipt.contributions):
                same = (arrived.shape, arrived.dtype) == (tensor.shape, tensor.dtype)
                there = not tensor.numel() or arrived.device == mailbox.put(torch.zeros(1)).device
                if not same or not there or not torch.equal(bits(arrived.cpu()), bits(tensor)):
                    wrong.append((str(dtype), name))
            if receipt.absent:
                wrong.append((str(dtype), name, receipt.absent))
            receipt.release()
    end(mailbox)
    line.send(wrong)


STEPS, TAPS = 3, 24


def the_tensor(direction: str, step: int, tap: int, rank: int) -> torch.Tensor:
    """Of a size that depends on the tap, with values that tell all four numbers."""
    values = random.Random(f"{direction} {step} {tap} {rank}")
    return torch.full((values.choice([0, 1, 30, 3000, 60_000]),), values.getrandbits(40), dtype=torch.int64)


def sends_and_receives(mailbox: Mailbox, line: Any) -> None:
    """Reach taps in a different order on each rank, half of them sent and half received."""
    me = mailbox.place
    sent, received = ("down", "up") if me.side == "baseline" else ("up", "down")
    for step in range(STEPS):
        taps = [(name, tap) for name in ("down", "up") for tap in range(TAPS)]
        random.Random(f"{me.label} {step}").shuffle(taps)
        # A rank that receives first waits for the other side: orders that send first have no cycle.
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
                assert torch.equal(contribution.tensor.cpu(), the_tensor(name, step, tap, rank))
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


def write_without_end(segment: Descriptors, size: int, line: Any) -> None:
    page = StatusPage(Arena(segment.descriptors[0], size, writable=True).map)
    number = 0
    while not line.poll():
        for _ in range(1000):
            number += 1
            page.write("running", step=number, plan_version=number, taps=number, tap=str(number))
        if number == 1000:
            line.send("begun")


def receives_what_it_is_told_to(mailbox: Mailbox, line: Any) -> None:
    """Get the frame of x, and receive x when the test asks for it."""
    peer = mailbox.exchange._peers.others[0]  # type: ignore[attr-defined]

    def has_come() -> bool:
        mailbox.exchange.end_step(-1)  # reads what has come
        return bool(peer.inbox[0])

    wait_until(has_come, "x")
    line.send("x has come")
    line.recv()
    receipt = mailbox.receive(key("x"))
    line.send((len(receipt.contributions), receipt.absent))
