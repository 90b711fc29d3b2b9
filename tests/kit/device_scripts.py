"""What the ranks of ``test_device`` run; apart, because a rank need not import what tests need."""

from __future__ import annotations

from typing import Any

import torch

import graftlab as gl
from kit.mailboxes import Mailbox, key

MANY = 1000
SIZE = 256 << 10


def finish(mailbox: Mailbox, line: Any, said: Any) -> None:
    mailbox.exchange.end_step(0)
    mailbox.exchange.end_run()
    line.send(said)
    # A process that ends frees its GPU memory.
    line.recv()


def allocated(mailbox: Mailbox) -> int:
    """Bytes of this rank's GPU that are in use or kept for later."""
    return torch.cuda.memory_reserved() if mailbox.gpu is None else mailbox.gpu.allocated


def sends_many(mailbox: Mailbox, line: Any) -> None:
    value = mailbox.put(torch.zeros(SIZE, dtype=torch.uint8))
    before = allocated(mailbox)
    for number in range(MANY):
        mailbox.exchange.publish(key(occurrence=number), value.fill_(number % 251), None)
    finish(mailbox, line, allocated(mailbox) - before)


def receives_many(mailbox: Mailbox, line: Any) -> None:
    right = 0
    for number in range(MANY):
        receipt = mailbox.receive(key(occurrence=number))
        right += all(bool((each.tensor == number % 251).all()) for each in receipt.contributions)
        receipt.release()
    finish(mailbox, line, right)


def size_of_the_work(mailbox: Mailbox) -> int:
    return 4096 if mailbox.gpu is None else 64


def sends_behind_a_long_kernel(mailbox: Mailbox, line: Any) -> None:
    """Several times in the same place: a receiver that does not wait sees nothing, or the time before."""
    matrix = mailbox.put(torch.eye(size_of_the_work(mailbox)))
    for number in range(8):
        product = matrix * number
        for _ in range(20):
            product = product @ matrix
        mailbox.exchange.publish(key(occurrence=number), product.diagonal().contiguous(), None)
        # Nothing of it is computed yet when the test lets this rank continue.
        mailbox.take(key("next", occurrence=number))
    finish(mailbox, line, None)


def receives_behind_a_long_kernel(mailbox: Mailbox, line: Any) -> None:
    own, seen = mailbox.put(torch.zeros(size_of_the_work(mailbox))), []
    for number in range(8):
        receipt = mailbox.receive(key(occurrence=number))
        own.copy_(receipt.contributions[0].tensor)
        receipt.release()
        mailbox.exchange.publish(key("next", occurrence=number), torch.zeros(()), None)
        seen.append(own.unique().tolist())
    finish(mailbox, line, seen)


def taps_on_the_gpu() -> list[float]:
    me = gl.here()
    assert me is not None
    values = []
    for layer in range(6):
        x = torch.full((1 << 20,), 1.0 if me.side == "baseline" else 2.0, device=me.device)
        values.append(gl.tap("x", x * (layer + 1), layer=layer).mean().item())
    return values
