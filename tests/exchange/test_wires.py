"""The direct way between GPUs of two hosts, over a stand-in for NCCL that waits forever where NCCL would."""

from __future__ import annotations

import gc
import logging
import random
import signal
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.exchange_scripts import receives_what_it_is_told_to, sends_x_then_is_told
from kit.gpus import on_gpu
from kit.mailboxes import DEADLINE, MIB, Mailbox, World, a_world, in_background, key, until_joined
from kit.support import wait_until
from kit.wire_gpus import NAME, Fabric, SocketWireGpu, a_world_of_wires, processes_with_wires

from graftlab.errors import GraftWarning
from graftlab.exchange import wire_pair
from graftlab.exchange.frames import Published, WireLocation, encode
from graftlab.exchange.interrupts import may_raise_at
from graftlab.exchange.wire_request import Request
from graftlab.exchange.wires import Wires

A_MIB = torch.zeros(MIB, dtype=torch.uint8)
LARGE = torch.arange(300_000)


@pytest.fixture
def fabric() -> Fabric:
    return Fabric()


@pytest.fixture
def world(fabric: Fabric) -> Iterator[World]:
    with a_world_of_wires(1, 1, fabric=fabric, put=on_gpu) as made:
        yield made.begin()


def wires_of(mailbox: Mailbox) -> Wires:
    assert mailbox.wires is not None
    return mailbox.wires


def not_joined(world: World, why: str, caplog: pytest.LogCaptureFixture) -> None:
    """Both ends have given each other up, each with one warning that names both and says why."""
    wait_until(lambda: not any(wires_of(mailbox).joined() for mailbox in world.mailboxes), "the end of the pair")
    whys = []
    for me, other in (("baseline[0]", "target[0]"), ("target[0]", "baseline[0]")):
        start = f"tensors between {me} and {other} go through the hosts' memory and TCP from now on, and not by {NAME}"
        wait_until(lambda start=start: start in caplog.text, "the warning")  # type: ignore[misc]
        told = [each for each in caplog.records if each.getMessage().startswith(start)]
        assert [each.levelno for each in told] == [logging.WARNING]
        whys.append(told[0].getMessage().removeprefix(start))
    # Nor do they speak of it any more.
    wait_until(lambda: not any(wires_of(mailbox)._post.channels() for mailbox in world.mailboxes), "silence")
    # The other end may hear of it from NCCL before it hears of it from this one.
    assert why in whys[0] + whys[1]


def arrives_by_tcp(world: World, fabric: Fabric, name: str = "by TCP") -> None:
    before = len(fabric.transfers)
    world.baseline.publish(key(name), LARGE)
    receipt = world.target.receive(key(name))
    assert [torch.equal(each.tensor, LARGE) for each in receipt.contributions] == [True]
    receipt.release()
    assert len(fabric.transfers) == before


# ---- the way of a tensor --------------------------------------------------------------------------------------------


def test_a_tensor_goes_from_gpu_to_gpu_and_none_of_its_bytes_over_tcp(world: World, fabric: Fabric) -> None:
    for number in range(3):
        world.baseline.publish(key(occurrence=number), LARGE + number)
    world.deliver()
    for number in (2, 0, 1):
        receipt = world.target.receive(key(occurrence=number))
        assert torch.equal(receipt.contributions[0].tensor, LARGE + number)
        receipt.release()
    assert fabric.handed_over == 3
    assert len(fabric.transfers) == 6
    assert world.target.exchange._peers.others[0].carried == {}  # type: ignore[attr-defined]


def test_small_tensors_and_those_on_the_host_go_along_with_their_frames(world: World, fabric: Fabric) -> None:
    wires_of(world.baseline)._smallest = 1000
    world.baseline.publish(key("small"), torch.zeros(999, dtype=torch.uint8))
    world.baseline.exchange.publish(key("on the host"), LARGE, None)
    assert len(world.target.take(key("small"))[0]) == 999
    assert world.target.take(key("on the host")) == [LARGE.tolist()]
    assert fabric.transfers == []


def test_who_has_no_memory_for_the_copy_sends_from_the_host_and_says_so_once(world: World, fabric: Fabric) -> None:
    fabric.fails_at = (None, "copy")
    with pytest.warns(GraftWarning, match=r"gl.tap on baseline\[0\]: .* cannot be copied on its device .*forbidden"):
        arrives_by_tcp(world, fabric)
    arrives_by_tcp(world, fabric, "again")
    assert wires_of(world.baseline).joined() == (1,)


def test_neither_gpu_is_told_to_wait_before_the_sender_has_made_the_copy(world: World, fabric: Fabric) -> None:
    fabric.copies_take_long = True
    for rank, other in ((world.baseline, world.target), (world.target, world.baseline)):
        rank.publish(key("x"), LARGE)
        taking = in_background(lambda other=other: other.take(key("x")))  # type: ignore[misc]
        [(_, pair)] = wires_of(rank)._partners.values()
        wait_until(lambda pair=pair: bool(pair._copying), "the request")  # type: ignore[misc]
        assert fabric.transfers == []
        fabric.finish_copies()
        assert taking.result(DEADLINE) == [LARGE.tolist()]
        fabric.ends[0].issued.clear()
        fabric.ends[1].issued.clear()
        fabric.copies_take_long = True


def test_both_ends_issue_the_same_transfers_in_the_same_order_whoever_asks_first(fabric: Fabric) -> None:
    """Else a send of each would wait for the other's receive, for good; the stand-in does."""
    with a_world_of_wires(1, 2, fabric=fabric, put=on_gpu, budget=64 * MIB) as world:
        world.begin()

        def send_and_receive(me: Mailbox) -> None:
            mine, theirs = ("down", "up") if me.place.side == "baseline" else ("up", "down")
            taps = list(range(25))
            random.Random(me.place.label).shuffle(taps)
            for number in taps:
                me.publish(key(mine, tap=number), torch.full((40_000 + number,), 100 * me.place.rank + number))
            random.Random(me.place.label * 2).shuffle(taps)
            for number in taps:
                receipt = me.receive(key(theirs, tap=number))
                for rank, each in enumerate(receipt.contributions):
                    assert each.tensor.shape == (40_000 + number,)
                    assert each.tensor.unique().tolist() == [100 * rank + number]
                receipt.release()

        for each in [in_background(lambda me=me: send_and_receive(me)) for me in world.mailboxes]:  # type: ignore[misc]
            each.result(DEADLINE)
        by_pair = [each.issued for each in fabric.ends]
        assert sorted(map(len, by_pair)) == [50] * 4


def test_all_senders_of_a_tap_are_asked_at_once(fabric: Fabric) -> None:
    with a_world_of_wires(3, 1, fabric=fabric, put=on_gpu) as world:
        world.begin()
        fabric.copies_take_long = True
        for sender in world.side("baseline"):
            sender.publish(key(), LARGE + sender.place.rank)
        world.deliver()
        receiving = in_background(lambda: world.target.receive(key()))
        for sender in world.side("baseline"):
            [(_, pair)] = wires_of(sender)._partners.values()
            wait_until(lambda pair=pair: bool(pair._copying), "the request")  # type: ignore[misc]
        fabric.finish_copies()
        tensors = [each.tensor for each in receiving.result(DEADLINE).contributions]
        assert [torch.equal(tensor, LARGE + rank) for rank, tensor in enumerate(tensors)] == [True] * 3


# ---- when something goes wrong --------------------------------------------------------------------------------------


def test_a_copy_that_is_not_made_in_time_is_missing_and_the_two_stay_joined(world: World, fabric: Fabric) -> None:
    fabric.copies_take_long = True
    world.baseline.publish(key("late"), LARGE)
    world.deliver()
    world.target.exchange.timeout = 0.05
    receipt = world.target.receive(key("late"))
    assert receipt.contributions == []
    why = "its tensor cannot be brought here: it did not come from the GPU of baseline[0] within 0.05 s"
    assert why in receipt.absent[0]
    assert fabric.transfers == []
    world.target.exchange.timeout = DEADLINE
    fabric.finish_copies()
    world.baseline.publish(key("next"), LARGE)
    assert world.target.take(key("next")) == [LARGE.tolist()]
    assert [wires_of(mailbox).joined() for mailbox in world.mailboxes] == [(1,), (0,)]
    world.end(0)
    assert world.baseline.bytes_in_use() == 0


def test_a_transfer_that_takes_too_long_is_missing_and_what_follows_takes_tcp(
    world: World, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    fabric.transfers_take_long = True
    world.baseline.publish(key("stuck"), LARGE)
    world.deliver()
    taking = in_background(lambda: world.target.receive(key("stuck")))
    wait_until(lambda: len(fabric.transfers) == 2, "the transfer")
    assert not taking.done()
    for mailbox in world.mailboxes:
        mailbox.exchange.timeout = 0.05
    receipt = taking.result(DEADLINE)
    assert receipt.contributions == []
    assert "a transfer took longer than 0.05 s" in receipt.absent[0]
    not_joined(world, "a transfer took longer", caplog)
    for mailbox in world.mailboxes:
        mailbox.exchange.timeout = DEADLINE
    arrives_by_tcp(world, fabric)
    wait_until(lambda: all(end.aborted for end in fabric.ends), "the aborts")


@pytest.mark.parametrize("at", ["new_id", "join", "ready"])
@pytest.mark.parametrize("end", [0, 1])
def test_two_that_cannot_be_joined_talk_over_tcp_and_both_say_why(
    end: int, at: str, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    if (end, at) == (1, "new_id"):
        at = "ready"
    fabric.fails_at = (end, at)
    with caplog.at_level(logging.INFO), joining(fabric) as world:
        world.begin()
        not_joined(world, f"{at} is forbidden here", caplog)
        arrives_by_tcp(world, fabric)


def joining(fabric: Fabric, **options: Any) -> Any:
    """A world that is used whether or not the two are joined."""
    return a_world(1, 1, tcp=True, wire=lambda place: SocketWireGpu(place, fabric), put=on_gpu, **options)


def test_while_the_two_are_not_joined_yet_and_when_they_never_are_tensors_take_tcp(
    fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    fabric.hangs_at = (1, "ready")
    with joining(fabric, timeout=0.5) as world:
        world.begin()
        arrives_by_tcp(world, fabric)
        not_joined(world, "the two were not joined within 0.5 s", caplog)
        arrives_by_tcp(world, fabric, "later")


@pytest.mark.parametrize(("end", "at"), [(0, "send"), (1, "receive"), (1, "transfer")])
def test_an_error_of_either_end_ends_the_pair_and_no_half_of_a_tensor_is_used(
    end: int, at: str, world: World, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    world.baseline.publish(key("x"), LARGE)
    world.deliver()
    fabric.fails_at = (end, at)
    receipt = world.target.receive(key("x"))
    assert receipt.contributions == []
    assert f"{at} is forbidden here" in receipt.absent[0]
    not_joined(world, f"{at} is forbidden here", caplog)
    arrives_by_tcp(world, fabric)
    world.end(0)
    assert world.baseline.bytes_in_use() == 0


def test_memory_that_the_device_may_still_touch_is_not_given_back(world: World, fabric: Fabric) -> None:
    fabric.transfers_take_long = True
    fabric.abort_may_return.clear()
    world.baseline.publish(key("x"), LARGE)
    world.deliver()
    taking = in_background(lambda: world.target.receive(key("x")))
    wait_until(lambda: len(fabric.transfers) == 2, "the transfer")
    touched = [weakref.ref(each.bytes) for each in fabric.transfers]
    for end in fabric.ends:
        end.issued.clear()
        end._queue.clear()
    fabric.late.clear()
    world.target.exchange.timeout = 0.05
    assert "longer than 0.05 s" in taking.result(DEADLINE).absent[0]
    wait_until(lambda: not wires_of(world.baseline).joined(), "the end of the pair")
    world.end(0)
    assert world.baseline.bytes_in_use() == 0
    gc.collect()
    assert all(each() is not None for each in touched)
    fabric.abort_may_return.set()

    def all_gone() -> bool:
        gc.collect()
        return all(each() is None for each in touched)

    wait_until(all_gone, "the memory")


def test_memory_of_a_communicator_that_cannot_be_ended_is_never_given_back(
    world: World, fabric: Fabric, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept: list[Any] = []
    monkeypatch.setattr(wire_pair, "_never_given_back", kept)
    monkeypatch.setattr(fabric.ends[0], "abort", lambda: 1 / 0)
    fabric.transfers_take_long = True
    world.baseline.publish(key("x"), LARGE)
    world.deliver()
    world.target.exchange.timeout = 0.05
    world.target.receive(key("x")).release()
    wait_until(lambda: "could not end what joined it" in caplog.text, "the warning")
    [(under_way, _)] = kept
    assert under_way[0] in fabric.transfers


def test_what_comes_from_no_wire_of_this_rank_is_missing() -> None:
    with a_world(1, 1, tcp=True) as world:
        world.begin()
        frame = Published(key(), 1, "uint8", (4,), 4, WireLocation(1), None)
        world.baseline.channels[0].send(encode(frame))
        assert "no direct way from here" in world.target.receive(key()).absent[0]


@pytest.mark.parametrize("number", [7, 1])
def test_a_tensor_that_its_sender_does_not_hold_or_not_like_that_is_missing(number: int, world: World) -> None:
    world.baseline.publish(key("other"), A_MIB)
    frame = Published(key(), 9, "uint8", (4,), 4, WireLocation(number), None)
    world.baseline.channels[0].send(encode(frame))
    assert "baseline[0] does not hold it any more" in world.target.receive(key()).absent[0]
    assert len(world.target.take(key("other"))[0]) == MIB


@pytest.mark.parametrize("said", [b"noise", b"\x92\x05\x01", b"\x93\x06\x01\xc3"], ids=["noise", "There", "Go"])
def test_an_end_that_says_what_it_may_not_is_given_up(
    said: bytes, world: World, fabric: Fabric, caplog: pytest.LogCaptureFixture
) -> None:
    """``There`` is for the leader to hear, the baseline's rank here, and ``Go`` for the other."""
    sender = world.target if said[1:2] == b"\x06" else world.baseline
    [(_, pair)] = wires_of(sender)._partners.values()
    assert pair._channel is not None
    pair._channel.send(said)
    not_joined(world, "", caplog)
    arrives_by_tcp(world, fabric)


def test_two_threads_of_a_rank_fetch_at_once_and_each_gets_its_own(world: World, fabric: Fabric) -> None:
    for number in range(5):
        world.baseline.publish(key(tap=number), LARGE + number)
    world.deliver()
    wires = wires_of(world.target)

    def fetch(number: int) -> torch.Tensor:
        return wires.collect(0, wires.ask(0, WireLocation(number + 1), LARGE.nbytes), lambda wait: wait())

    fetching = [in_background(lambda n=number: fetch(n)) for number in reversed(range(5))]  # type: ignore[misc]
    for number, each in zip(reversed(range(5)), fetching, strict=True):
        assert torch.equal(each.result(DEADLINE).view(torch.int64), LARGE + number)


def test_a_thread_that_fetches_keeps_no_other_from_its_own_tap(world: World, fabric: Fabric) -> None:
    receiver, owner = world.target, threading.Lock()

    def let_go() -> bool:
        owner.release()
        return True

    receiver.exchange.share(let_go, owner.acquire)  # type: ignore[arg-type]

    def take(name: str) -> Any:
        with owner:
            return receiver.take(key(name))

    fabric.copies_take_long = True
    world.baseline.publish(key("late"), LARGE)
    world.baseline.exchange.publish(key("on the host"), torch.tensor(1.0), None)
    world.deliver()
    late = in_background(lambda: take("late"))
    [(_, pair)] = wires_of(world.baseline)._partners.values()
    wait_until(lambda: bool(pair._copying), "the request")
    assert in_background(lambda: take("on the host")).result(DEADLINE) == [1.0]
    assert not late.done()
    fabric.finish_copies()
    assert late.result(DEADLINE) == [LARGE.tolist()]


def test_an_interrupt_ends_the_wait_for_a_tensor_and_the_two_stay_joined(world: World, fabric: Fabric) -> None:
    fabric.copies_take_long = True
    world.baseline.publish(key("late"), LARGE)
    world.deliver()

    def stop(number: int, frame: Any) -> None:
        if may_raise_at(frame) and frame.f_code is Request.wait.__code__:
            signal.setitimer(signal.ITIMER_REAL, 0)
            raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, stop)
    try:
        # Again and again, until it comes where it may.
        signal.setitimer(signal.ITIMER_REAL, 0.01, 0.01)
        with pytest.raises(KeyboardInterrupt):
            world.target.receive(key("late"))
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    fabric.finish_copies()
    world.baseline.publish(key("next"), LARGE)
    assert world.target.take(key("next")) == [LARGE.tolist()]
    assert wires_of(world.target).joined() == (0,)
    world.end(0)
    assert world.baseline.bytes_in_use() == 0


def test_after_its_end_nobody_waits_for_a_wire(world: World) -> None:
    wires_of(world.target).close()
    with pytest.raises(RuntimeError, match="this rank has left"):
        wires_of(world.target).ask(0, WireLocation(1), 4)
    wires_of(world.target).close()


# ---- deaths ---------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_tensor_whose_sender_was_killed_before_it_was_fetched_is_missing_at_once() -> None:
    with processes_with_wires(sends_x_then_is_told, receives_what_it_is_told_to) as world:
        assert world.hear(1) == "x has come"
        world.processes[0].kill()
        world.processes[0].join(DEADLINE)
        world.lines[1].send("fetch")
        contributions, absent = world.hear(1)
        assert contributions == 0
        assert "sent this tap, but its tensor cannot be brought here" in absent[0]


def test_joined_again_after_the_end_of_a_world(fabric: Fabric) -> None:
    for _ in range(2):
        with a_world_of_wires(1, 1, fabric=fabric, put=on_gpu) as world:
            world.begin().baseline.publish(key(), 3.0)
            assert world.target.take(key()) == [3.0]
            until_joined(*world.mailboxes)
