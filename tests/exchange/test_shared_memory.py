"""What is the shared-memory exchange's own affair: its batches, its sockets, and the processes around a rank."""

from __future__ import annotations

import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from kit.exchange_scripts import taps_in_a_child_too
from kit.mailboxes import MIB, Mailbox, World, a_world, key

import graftlab as gl
from graftlab.exchange.arena import PAGE
from graftlab.exchange.frames import KINDS, DeviceLocation, PublishFrame, encode


@pytest.fixture
def world() -> Iterator[World]:
    with a_world(1, 1) as made:
        yield made.begin()


def hear(mailbox: Mailbox) -> None:
    """Read what has come."""
    mailbox.exchange.end_step(-1)


def test_releases_travel_together(world: World) -> None:
    sender, receiver = world.mailboxes
    for number in range(64):
        sender.publish(key(occurrence=number), torch.zeros(16))
    in_use = sender.bytes_in_use()
    for number in range(63):
        receiver.take(key(occurrence=number))
        sender.exchange.end_step(-1)
    assert sender.bytes_in_use() == in_use
    receiver.take(key(occurrence=63))
    hear(sender)
    assert sender.bytes_in_use() == 0


def test_a_large_tensor_is_released_at_once() -> None:
    with a_world(1, 1, budget=8 * MIB) as world:
        sender, receiver = world.begin().mailboxes
        sender.publish(key(), torch.zeros(MIB, dtype=torch.uint8))
        receiver.take(key())
        hear(sender)
        assert sender.bytes_in_use() == 0


def test_a_cancelled_settle_stops_polling_its_descriptor(world: World) -> None:
    read, write = os.pipe()
    os.write(write, b"x")
    assert not world.baseline.exchange.settle(read)
    # Else every wait to come would return at once, again and again.
    assert world.baseline.exchange._peers.pump(0) == []
    os.close(read)
    os.close(write)


def test_tensors_for_an_ended_step_are_not_kept(world: World) -> None:
    sender, receiver = world.mailboxes
    receiver.exchange.end_step(3)
    for step in range(4):
        sender.publish(key(step=step), 1.0)
        sender.exchange.decline(key("another", step=step))
    receiver.exchange.end_step(3)
    assert not any(receiver.exchange._peers.others[0].inbox.values())


def test_the_end_of_a_step_frees_the_untaken_tensors_of_earlier_steps(world: World) -> None:
    sender, receiver = world.mailboxes
    for step in range(3):
        sender.publish(key(step=step), torch.zeros(1000))
    receiver.exchange.end_step(1)
    hear(sender)
    of_one = sender.bytes_in_use()
    receiver.exchange.end_step(2)
    hear(sender)
    assert (of_one > 0, sender.bytes_in_use()) == (True, 0)


def test_a_rank_that_is_past_a_step_stays_past_it(world: World) -> None:
    sender, receiver = world.mailboxes
    for step in (3, 1):
        receiver.exchange.end_step(step)
        hear(sender)
        assert sender.exchange._peers.others[0].is_past(3)
        assert not sender.exchange._peers.others[0].is_past(4)


def test_tensors_for_an_ended_run_are_not_kept(world: World) -> None:
    sender, receiver = world.mailboxes
    sender.publish(key(step=4), 1.0)
    hear(receiver)
    peer = receiver.exchange._peers.others[0]
    assert list(peer.inbox) == [4]
    receiver.exchange.end_run()
    assert not peer.inbox


def test_every_kind_of_frame_has_a_handler(world: World) -> None:
    assert set(world.baseline.exchange._peers._handlers) == set(KINDS)


# ---- a peer that cannot be understood -------------------------------------------------------------------------------

GARBAGE = {
    "a pickle": pickle.dumps((0, 1)),
    "another version's frame": b"\x92\x63\x01",
    "noise": bytes(range(200, 256)),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE)
def test_a_sender_of_an_unreadable_frame_is_disconnected_and_named(
    garbage: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    with a_world(2, 1) as world, caplog.at_level(logging.ERROR):
        bad, good, receiver = world.begin().mailboxes
        for sender in (bad, good):
            sender.publish(key("before"), 1.0)
        to_receiver = bad.channels[-1]
        to_receiver.send(garbage)
        bad.publish(key("after"), 2.0)
        good.publish(key("after"), 3.0)
        # What came before is as good as ever.
        assert receiver.take(key("before")) == [1.0, 1.0]
        receipt = receiver.receive(key("after"))
        assert [(each.rank, each.tensor.item()) for each in receipt.contributions] == [(1, 3.0)]
        why = "was disconnected: it sent a frame that target[0] cannot read ("
        assert receipt.absent[0].startswith(f"baseline[0] {why}")
        assert "do all ranks run the same release of graftlab?" in receipt.absent[0]
        assert not receipt.timed_out
        assert [record.levelname for record in caplog.records if f"baseline[0] {why}" in record.message] == ["ERROR"]
        assert f"baseline[0]: {why}" in receiver.exchange.where_peers_are()
        assert receiver.exchange.lost_peers().startswith(f"baseline[0] {why}")
        assert "baseline[1]" not in receiver.exchange.lost_peers()
        # The other end sees an end as well, so that it waits for nothing.
        hear(bad)
        assert bad.receive(key("up")).absent == {0: "target[0] died"}


FAULTS = {
    "a dtype of another torch": ({"dtype": "float3"}, "torch has no dtype 'float3'"),
    "another shape": ({"shape": (5,)}, "16 bytes do not make a torch.float32 tensor of shape [5]"),
    "a place outside": ({"location": 1 << 60}, "out of bounds for storage"),
    "a GPU that it has not shown": ({"location": DeviceLocation(3, 0, 0, b"")}, "(0, 3)"),
}


@pytest.mark.parametrize(("changes", "why"), FAULTS.values(), ids=FAULTS)
def test_an_unreadable_tensor_is_missing_and_freed(changes: dict[str, Any], why: str, world: World) -> None:
    sender, receiver = world.mailboxes
    sender.publish(key("real"), torch.zeros(4))
    frame = PublishFrame(key("x"), id=1, dtype="float32", shape=(4,), nbytes=16, location=PAGE, extras=None)
    sender.channels[0].send(encode(msgspec.structs.replace(frame, **changes)))
    receipt = receiver.receive(key("x"))
    assert receipt.contributions == []
    assert "baseline[0] sent this tap, but its tensor cannot be read here" in receipt.absent[0]
    assert why in receipt.absent[0]
    receipt.release()
    receiver.exchange.end_step(-1)
    hear(sender)
    assert sender.bytes_in_use() == 0


# ---- the processes around a rank ------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_forked_child_does_not_write_to_its_ranks_connections(tmp_path: Path) -> None:
    with gl.launch(1, 1) as session:
        session.edit(b2t="True")
        run = session.run(taps_in_a_child_too, taps_in_a_child_too, args=(str(tmp_path),))
        assert run.target == [[1.0, 1.0, 1.0]]
        assert run.frame["name"].tolist() == ["x"]
