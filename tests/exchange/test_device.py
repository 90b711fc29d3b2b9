"""The exchange's way over GPUs: its logic over a stand-in that is as late as a GPU can be, and the same over CUDA."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import mailboxes
from kit.device_scripts import (
    MANY,
    receives_behind_a_long_kernel,
    receives_many,
    sends_behind_a_long_kernel,
    sends_many,
    taps_on_the_gpu,
)
from kit.examples import examples
from kit.gpus import LateGpu, Machine, a_world_of_gpus, on_gpu
from kit.implementations import PROCESSES, MakeProcesses
from kit.mailboxes import DEADLINE, MIB, Mailbox, World, in_background, key
from kit.support import wait_until
from kit.tensors import DTYPES, bits, layouts

import graftlab as gl
from graftlab.errors import GraftWarning
from graftlab.exchange import device

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

BASELINE, TARGET = 0, 1
A_MIB = torch.zeros(MIB, dtype=torch.uint8)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """For the GPUs of every rank of this process; nothing may synchronise a whole device."""
    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    return Machine()


def a_world_that_proved_nothing(machine: Machine, *counts: int) -> AbstractContextManager[World]:
    return mailboxes.a_world(*counts, gpu=lambda rank: LateGpu(machine))


def fails(*args: Any, **options: Any) -> Any:
    raise RuntimeError("an illegal memory access was encountered")


def hear(mailbox: Mailbox) -> None:
    """Read what has come."""
    mailbox.exchange.end_step(-1)


@pytest.fixture
def world(machine: Machine) -> Iterator[World]:
    with a_world_of_gpus(1, 1, machine=machine, budget=4 * MIB) as made:
        yield made.begin()


# ---- the way of a tensor --------------------------------------------------------------------------------------------


def test_a_gpu_tensor_is_read_in_place_once_the_receiver_has_replied(machine: Machine) -> None:
    with a_world_that_proved_nothing(machine, 1, 1) as world:
        sender, receiver = world.begin().mailboxes
        seen = []
        for number in range(3):
            sender.publish(key(occurrence=number), on_gpu([1.0, 2.0]))
            receipt = receiver.receive(key(occurrence=number))
            arrived = receipt.contributions[0].tensor
            seen.append((arrived.tolist(), machine.holds(arrived)))
            receipt.release()
        assert seen == [([1.0, 2.0], False), ([1.0, 2.0], True), ([1.0, 2.0], True)]


def test_a_receiver_waits_for_the_copy_and_the_sender_does_not(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    value = on_gpu(torch.arange(1000.0))
    sender.publish(key(), value)
    value.zero_()
    assert sender.gpu.issued["default"]  # nothing has been copied yet
    receipt = receiver.receive(key())
    assert torch.equal(receipt.contributions[0].tensor, torch.arange(1000.0))
    assert machine.synchronized == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_exact_in_every_layout(dtype: torch.dtype, world: World, machine: Machine) -> None:
    sender, receiver = world.mailboxes
    for name, tensor in layouts(dtype).items():
        sender.publish(key(name), on_gpu(tensor))
        sender.publish(key(name, on="host"), tensor)
    for name, tensor in layouts(dtype).items():
        for tags in ({}, {"on": "host"}):
            receipt = receiver.receive(key(name, **tags))
            arrived = receipt.contributions[0].tensor
            assert (arrived.shape, arrived.dtype) == (tensor.shape, dtype), name
            assert torch.equal(bits(arrived), bits(tensor)), name
            assert machine.holds(arrived) == (not tags and tensor.numel() > 0)
            receipt.release()


steps = st.lists(st.tuples(st.integers(0, 1), st.booleans(), st.sampled_from([0, 1, 7, 5000, 300_000])), max_size=30)


@pytest.mark.slow
@examples(20)
@given(taps=steps, slow=st.booleans())
def test_two_senders_and_two_receivers_mix_nothing_and_free_all_memory(
    taps: list[tuple[int, bool, int]], slow: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        machine = Machine()
        patch.setattr(device, "CHUNK", MIB)
        with a_world_of_gpus(2, 2, machine=machine, budget=64 * MIB) as world:
            world.begin()
            machine.reads_take_long = slow
            for number, (_, is_on_gpu, size) in enumerate(taps):
                for sender in world.side("baseline"):
                    value = torch.full((size,), 100.0 * number + sender.place.rank)
                    sender.publish(key(occurrence=number), on_gpu(value) if is_on_gpu else value)
            for number, (skips, _, size) in enumerate(taps):
                for receiver in world.side("target")[skips:]:
                    receipt = receiver.receive(key(occurrence=number))
                    arrived = [contribution.tensor.tolist() for contribution in receipt.contributions]
                    assert arrived == [[100.0 * number] * size, [100.0 * number + 1] * size]
                    receipt.release()
            world.end(step=0)
            assert [sender.bytes_in_use() for sender in world.mailboxes] == [0] * 4
            assert all(sum(sender.gpu.chunks) <= 64 * MIB for sender in world.mailboxes)


@pytest.mark.parametrize("sent_from", ["gpu", "host"])
def test_contributions_arrive_on_the_device_of_the_receivers_tensor(sent_from: str, world: World) -> None:
    world.baseline.publish(key(), on_gpu(1.0) if sent_from == "gpu" else 1.0)
    receipt = world.target.exchange.receive(key(), torch.empty(3, device="meta"))
    assert receipt.contributions[0].tensor.device.type == "meta"


class Full(torch.Tensor):
    """A tensor on a device that has no memory left."""

    is_cpu = False  # type: ignore[assignment]

    @property
    def device(self) -> torch.device:
        raise torch.OutOfMemoryError("out of memory")


@pytest.mark.parametrize("sent_from", ["gpu", "host"])
def test_a_full_receiving_device_makes_the_tap_missing_and_frees_its_memory(
    sent_from: str, machine: Machine, world: World
) -> None:
    sender, receiver = world.mailboxes
    sender.publish(key(), on_gpu(A_MIB) if sent_from == "gpu" else A_MIB)
    receipt = receiver.exchange.receive(key(), torch.zeros(()).as_subclass(Full))
    assert receipt.contributions == []
    assert receipt.absent == {0: "baseline[0] sent this tap, but its tensor cannot be read here: out of memory"}
    hear(receiver)
    hear(sender)
    assert sender.bytes_in_use() == 0
    # That is no reason to take another way.
    sender.publish(key("next"), on_gpu(1.0))
    assert machine.holds(receiver.receive(key("next")).contributions[0].tensor)


# ---- when a location is free again ----------------------------------------------------------------------------------


def test_nothing_is_released_before_the_receivers_stream_has_read_it(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    machine.reads_take_long = True
    for number in range(4):
        sender.publish(key(occurrence=number), on_gpu(A_MIB))
    for number in range(4):
        receiver.receive(key(occurrence=number)).release()
    hear(sender)
    assert sender.bytes_in_use() == 4 * MIB
    publishing = in_background(lambda: sender.publish(key("late"), on_gpu(A_MIB)))
    sender.until_it_waits()
    assert not publishing.done()
    machine.finish_reads()
    hear(receiver)
    publishing.result(DEADLINE)
    assert machine.synchronized == 0


def test_a_waiting_receiver_releases_tensors_that_its_stream_has_read(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    machine.reads_take_long = True
    sender.publish(key("x"), on_gpu(A_MIB))
    receiver.receive(key("x")).release()
    receiving = in_background(lambda: receiver.take(key("y")))
    receiver.until_it_waits()
    machine.finish_reads()
    sender.publish(key("next"), on_gpu(A_MIB))
    until_released(sender, left=MIB)
    sender.publish(key("y"), 1.0)
    assert receiving.result(DEADLINE) == [1.0]
    assert machine.synchronized == 0


def test_a_rank_waiting_for_room_releases_tensors_that_it_has_read(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    machine.reads_take_long = True
    sender.publish(key("x"), on_gpu(A_MIB))
    receiver.receive(key("x")).release()
    for number in range(4):
        receiver.publish(key("up", occurrence=number), A_MIB)
    publishing = in_background(lambda: receiver.publish(key("up", occurrence=4), A_MIB))
    receiver.until_it_waits()
    machine.finish_reads()
    until_released(sender, left=0)
    sender.take(key("up", occurrence=0))
    publishing.result(DEADLINE)


def until_released(sender: Mailbox, left: int) -> None:
    def is_released() -> bool:
        hear(sender)
        return sender.bytes_in_use() <= left

    wait_until(is_released, "the release")


def test_the_end_of_a_step_waits_only_for_that_steps_reads(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    machine.reads_take_long = True
    for name in ("x", "y"):
        sender.publish(key(name), on_gpu(A_MIB))
        receiver.receive(key(name)).release()
    assert machine.synchronized == 0
    receiver.exchange.end_step(0)
    assert machine.synchronized == 2
    sender.exchange.end_step(0)
    assert sender.bytes_in_use() == 0


def test_the_end_of_a_run_waits_for_reads_after_its_last_step(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    sender.publish(key(), on_gpu(A_MIB))
    receipt = receiver.receive(key())
    machine.reads_take_long = True
    receipt.release()
    assert machine.synchronized == 0
    receiver.exchange.end_run()
    assert machine.synchronized == 1
    sender.exchange.end_run()
    assert sender.bytes_in_use() == 0


def test_unrequested_tensors_are_freed_when_the_receivers_end_the_step(world: World) -> None:
    sender, receiver = world.mailboxes
    sender.publish(key(), on_gpu(A_MIB), memo="unmatched")
    receiver.exchange.end_step(0)
    sender.exchange.end_step(0)
    assert sender.bytes_in_use() == 0
    assert sender.exchange.take_unmatched() == ["unmatched"]


def test_a_late_copy_on_another_stream_overwrites_no_later_tensor(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    machine.current_stream = "slow"
    sender.publish(key("unrequested", step=0), on_gpu(A_MIB))
    receiver.exchange.end_step(0)
    sender.exchange.end_step(0)
    machine.current_stream = "default"
    sender.publish(key("x", step=1), on_gpu(A_MIB + 1))
    receipt = receiver.receive(key("x", step=1))
    sender.gpu.run_all()
    assert torch.equal(receipt.contributions[0].tensor, A_MIB + 1)


def test_memory_and_events_are_used_again(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    for number in range(500):
        sender.publish(key(occurrence=number), on_gpu(A_MIB))
        receiver.receive(key(occurrence=number)).release()
    assert sender.waits_so_far == 0
    assert len(machine.shared) <= 2 + 4  # a chunk a rank, and an event for each tensor that was under way at once


def test_a_reused_event_is_the_one_that_the_receiver_waits_for(world: World) -> None:
    sender, receiver = world.mailboxes
    for number in range(2):
        sender.publish(key(occurrence=number), on_gpu(A_MIB))
    first, second = (receiver.receive(key(occurrence=number)) for number in range(2))
    # So that the event of the first is used again, which is not the newest.
    for each in (second, first):
        each.release()
        receiver.exchange.end_step(-1)
    hear(sender)
    sender.publish(key(occurrence=2), on_gpu(A_MIB + 7))
    assert torch.equal(receiver.receive(key(occurrence=2)).contributions[0].tensor, A_MIB + 7)


def test_the_tensors_of_a_dead_receiver_are_freed(machine: Machine, world: World) -> None:
    sender, receiver = world.mailboxes
    machine.reads_take_long = True
    for name in ("read", "not read"):
        sender.publish(key(name), on_gpu(A_MIB))
    receiver.receive(key("read")).release()
    receiver.die()
    sender.exchange.end_step(0)
    assert sender.bytes_in_use() == 0


@pytest.mark.parametrize("copied", [True, False])
def test_only_finished_copies_of_a_dead_senders_gpu_are_read(copied: bool, world: World) -> None:
    sender, receiver = world.mailboxes
    sender.publish(key("x"), on_gpu(5.0))
    if copied:
        sender.gpu.run_past(sender.gpu.events[-1].mark)
    sender.die()
    for _ in range(2):
        hear(receiver)  # what came, then the end of the stream
    receipt = receiver.receive(key("x"))
    if copied:
        assert receipt.contributions[0].tensor.item() == 5.0
    else:
        assert receipt.contributions == []
        assert "it died before its GPU had made the copy" in receipt.absent[0]


def cross_three_times(sender: Mailbox, receivers: list[Mailbox], value: torch.Tensor) -> None:
    for number in range(3):
        sender.publish(key("cross", occurrence=number), value)
        for receiver in receivers:
            receipt = receiver.receive(key("cross", occurrence=number))
            assert torch.equal(receipt.contributions[0].tensor, value)
            receipt.release()
            hear(receiver)


# ---- chunks and the budget ------------------------------------------------------------------------------------------


def test_chunks_are_made_when_needed_and_large_enough(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device, "CHUNK", MIB)
    with a_world_of_gpus(1, 1, machine=machine, budget=8 * MIB) as world:
        sender, receiver = world.begin().mailboxes
        assert sender.gpu.chunks == [MIB]
        for number in range(2):
            sender.publish(key(occurrence=number), on_gpu(A_MIB))
        sender.publish(key("large"), on_gpu(torch.ones(3 * MIB - 5, dtype=torch.uint8)))
        assert sender.gpu.chunks == [MIB, MIB, 3 * MIB]
        for each in (key(occurrence=1), key("large"), key(occurrence=0)):
            receipt = receiver.receive(each)
            assert machine.holds(receipt.contributions[0].tensor)
            receipt.release()


def test_tensors_too_large_for_a_chunk_go_through_the_host_with_one_warning(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CHUNK", MIB)
    with a_world_of_gpus(1, 1, machine=machine, budget=2 * MIB) as world:
        sender, receiver = world.begin().mailboxes
        large = on_gpu(torch.ones(3 * MIB, dtype=torch.uint8))
        with pytest.warns(GraftWarning, match=r"gl.tap on baseline\[0\].*no room for 3145728 bytes") as noted:
            cross_three_times(sender, [receiver], large)
        assert len(noted) == 1
        assert sender.gpu.chunks == [MIB]


def test_tensors_on_gpus_and_on_the_host_share_one_budget(world: World) -> None:
    sender, receiver = world.mailboxes
    for number in range(2):
        sender.publish(key(occurrence=number), A_MIB)
        sender.publish(key("gpu", occurrence=number), on_gpu(A_MIB))
    publishing = in_background(lambda: sender.publish(key("late"), on_gpu(A_MIB)))
    sender.until_it_waits()
    receiver.take(key())
    publishing.result(DEADLINE)


def test_tensors_beyond_the_number_of_events_go_through_the_host(
    machine: Machine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "_MOST_EVENTS", 2)
    sender, receiver = world.mailboxes
    where = []
    for number in range(3):
        sender.publish(key(occurrence=number), on_gpu(float(number)))
    for number in range(3):
        receipt = receiver.receive(key(occurrence=number))
        arrived = receipt.contributions[0].tensor
        where.append((arrived.item(), machine.holds(arrived)))
    assert where == [(0.0, True), (1.0, True), (2.0, False)]


# ---- where it cannot be ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", ["allocate", "share", "open", "copy", "share_event"])
def test_where_cuda_ipc_fails_tensors_go_through_the_host_with_one_warning(at: str, machine: Machine) -> None:
    machine.fails_at = at
    with a_world_that_proved_nothing(machine, 1, 2) as world:
        sender, *receivers = world.begin().mailboxes
        with pytest.warns(GraftWarning, match=f"through the host's memory.*{at} is forbidden here") as noted:
            cross_three_times(sender, receivers, on_gpu(torch.arange(1000.0)))
        assert len(noted) == 1
        hear(sender)
        assert sender.bytes_in_use() == 0


@pytest.mark.parametrize("at", ["open", "open_event"])
def test_a_receiver_that_fails_late_loses_only_tensors_in_transit(
    at: str, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device, "CHUNK", MIB)
    with a_world_of_gpus(1, 1, machine=machine) as world:
        sender, receiver = world.begin().mailboxes
        machine.fails_at = at
        sender.publish(key("lost"), on_gpu(torch.ones(2 * MIB, dtype=torch.uint8)))
        receipt = receiver.receive(key("lost"))
        assert receipt.contributions == []
        assert "baseline[0] sent this tap, but its tensor cannot be read here" in receipt.absent[0]
        receipt.release()
        hear(receiver)
        hear(sender)
        with pytest.warns(GraftWarning, match=f"{at} is forbidden here"):
            sender.publish(key("host"), on_gpu(3.0))
        assert receiver.take(key("host")) == [3.0]
        world.end(step=0)
        assert sender.bytes_in_use() == 0


def test_a_failing_receiver_gpu_ends_neither_the_step_nor_the_run(
    machine: Machine, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = world.mailboxes
    sender.publish(key(), on_gpu(A_MIB))
    receipt = receiver.receive(key())
    monkeypatch.setattr(LateGpu, "record", fails)
    receipt.release()
    world.end(step=0)
    assert sender.bytes_in_use() == 0


def test_a_world_on_the_cpu_asks_nothing_of_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("takes", "allocate", "new_event", "record", "wait"):
        monkeypatch.setattr(device.Cuda, name, fails)
    with mailboxes.a_world(1, 1) as world, warnings.catch_warnings():
        warnings.simplefilter("error")
        world.begin().baseline.publish(key(), 1.0)
        receipt = world.target.exchange.receive(key(), torch.zeros(()))
        assert receipt.contributions[0].tensor.item() == 1.0
        receipt.release()
        world.end(step=0)


# ---- between processes, over a stand-in and over CUDA ---------------------------------------------------------------


# Overrides the fixture of all implementations: only those whose GPUs share memory.
@pytest.fixture(scope="module", params=[each for each in PROCESSES if each.id in ("device", "cuda")])
def processes(request: pytest.FixtureRequest) -> MakeProcesses:
    make: MakeProcesses = request.param
    return make


@pytest.mark.ranks
def test_a_thousand_tensors_stay_within_the_memory_budget(processes: MakeProcesses) -> None:
    with processes(sends_many, receives_many, budget=4 * MIB) as world:
        assert world.hear(TARGET) == MANY
        assert world.hear(BASELINE) == 0  # bytes that came to what was there at first


@pytest.mark.ranks
def test_a_tap_after_a_long_kernel_shows_the_kernels_result(processes: MakeProcesses) -> None:
    with processes(sends_behind_a_long_kernel, receives_behind_a_long_kernel) as world:
        assert world.hear(TARGET) == [[float(number)] for number in range(8)]


@pytest.mark.ranks
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("where", ["cuda:0", "cuda"])
def test_ranks_graft_on_gpus_whether_or_not_they_share_one(where: str) -> None:
    with gl.launch(1, 2, device=where) as session:
        session.edit(b2t="True")
        run = session.run(taps_on_the_gpu, taps_on_the_gpu)
        assert run.target == [[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]] * 2
        assert set(run.frame["status"]) == {"grafted"}
