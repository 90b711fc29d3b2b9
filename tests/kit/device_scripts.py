"""What the ranks of ``test_exchange_device`` run; apart, because a rank need not import what tests need."""

from __future__ import annotations

from typing import Any

import torch

import graftlab as gl
from kit.gpus import equip, to_gpu
from kit.mailboxes import Mailbox, key
from kit.tensors import DTYPES, bits, layouts

MANY = 1000
SIZE = 256 << 10


def open_the_way(mailbox: Mailbox, folder: str | None) -> None:
    """Tap until the receivers have answered that they can open a sender's chunk; both sides call it."""
    equip(mailbox, folder)
    if mailbox.place.side == "baseline":
        mailbox.publish(key("way"), to_gpu(torch.ones(3), folder))
        # The answers come on the same sockets, before these.
        mailbox.take(key("seen"))
        assert not mailbox.exchange._device.awaits_answers
        assert mailbox.exchange._device._failure is None
    else:
        assert mailbox.take(key("way")) == [[1.0] * 3] * mailbox.place.other_world_size
        mailbox.publish(key("seen"), 1.0)


def finish(mailbox: Mailbox, line: Any, said: Any) -> None:
    mailbox.exchange.end_step(0)
    mailbox.exchange.end_run()
    line.send(said)
    # Whoever ends takes its memory along.
    line.recv()


def everything() -> list[tuple[str, str, torch.Tensor]]:
    return [(str(dtype), name, tensor) for dtype in DTYPES for name, tensor in layouts(dtype).items()]


def laid_out(tensor: torch.Tensor, folder: str | None) -> torch.Tensor:
    """On the GPU with the same strides, which ``.cuda()`` does not always keep."""
    if folder is not None:
        return to_gpu(tensor, folder)
    empty = torch.empty(0, dtype=tensor.dtype, device="cuda")
    return empty.set_(tensor.untyped_storage().cuda(), tensor.storage_offset(), tensor.shape, tensor.stride())


def sends_every_dtype(folder: str | None, mailbox: Mailbox, line: Any) -> None:
    open_the_way(mailbox, folder)
    for dtype, name, tensor in everything():
        mailbox.publish(key(name, dtype=dtype), laid_out(tensor, folder))
        mailbox.publish(key(name, dtype=dtype, on="host"), tensor)
    finish(mailbox, line, mailbox.exchange._device._failure)


def checks_every_dtype(folder: str | None, mailbox: Mailbox, line: Any) -> None:
    open_the_way(mailbox, folder)
    wrong = []
    for dtype, name, tensor in reversed(everything()):
        for tags in ({}, {"on": "host"}):
            receipt = mailbox.receive(key(name, dtype=dtype, **tags))
            for contribution in receipt.contributions:
                arrived = contribution.tensor
                same = (arrived.shape, arrived.dtype) == (tensor.shape, tensor.dtype)
                where = arrived.is_cuda == (folder is None and not tags and tensor.numel() > 0)
                if not same or not where or not torch.equal(bits(arrived).cpu(), bits(tensor)):
                    wrong.append((dtype, name, tags))
            receipt.release()
    finish(mailbox, line, wrong)


def memory(folder: str | None) -> int:
    return torch.cuda.memory_reserved() if folder is None else 0


def sends_many(folder: str | None, mailbox: Mailbox, line: Any) -> None:
    open_the_way(mailbox, folder)
    value = to_gpu(torch.zeros(SIZE, dtype=torch.uint8), folder)
    before, chunks = memory(folder), mailbox.exchange._device._chunks
    for number in range(MANY):
        mailbox.publish(key(occurrence=number), value.fill_(number % 251))
    finish(mailbox, line, (memory(folder) - before, len(chunks)))


def receives_many(folder: str | None, mailbox: Mailbox, line: Any) -> None:
    open_the_way(mailbox, folder)
    right = 0
    for number in range(MANY):
        receipt = mailbox.receive(key(occurrence=number))
        right += all(bool((each.tensor == number % 251).all()) for each in receipt.contributions)
        receipt.release()
    finish(mailbox, line, right)


def sends_behind_a_long_kernel(folder: str | None, mailbox: Mailbox, line: Any) -> None:
    """Several times in the same place: a receiver that does not wait sees nothing, or the time before."""
    open_the_way(mailbox, folder)
    matrix = to_gpu(torch.eye(4096 if folder is None else 64), folder)
    for number in range(8):
        product = matrix * number
        for _ in range(20):
            product = product @ matrix
        mailbox.publish(key(occurrence=number), product.diagonal().contiguous())
        # All of it is still to be computed when this rank is told to go on.
        mailbox.take(key("next", occurrence=number))
    finish(mailbox, line, None)


def receives_behind_a_long_kernel(folder: str | None, mailbox: Mailbox, line: Any) -> None:
    open_the_way(mailbox, folder)
    own, seen = to_gpu(torch.zeros(4096 if folder is None else 64), folder), []
    for number in range(8):
        receipt = mailbox.receive(key(occurrence=number))
        own.copy_(receipt.contributions[0].tensor)
        receipt.release()
        mailbox.publish(key("next", occurrence=number), torch.zeros(()))
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
