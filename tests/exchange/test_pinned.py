"""Tensors on a GPU that go to other machines: through pinned memory of both hosts, with stand-ins for CUDA."""

from __future__ import annotations

import warnings

import pytest
import torch
from kit.gpus import LateGpu, Machine, on_gpu
from kit.mailboxes import MIB, World, a_world, key
from kit.refusals import exactly

from graftlab.errors import BufferFullError, GraftWarning
from graftlab.exchange.device import Cuda
from graftlab.exchange.pinned import PinnedMemory, PinnedStaging

SAMPLES = [
    torch.arange(12, dtype=torch.float32).view(3, 4),
    torch.arange(12, dtype=torch.int64).view(3, 4).t(),
    torch.arange(12, dtype=torch.bfloat16)[::3],
    torch.arange(8, dtype=torch.float32).to(torch.float8_e4m3fn),
    torch.tensor([1 + 2j, 3 - 4j]).conj(),
    torch.tensor(3.5, dtype=torch.float64),
    torch.tensor([True, False]),
    torch.empty(0, 7),
]


def a_world_of_machines(machine: Machine, baseline: int = 1, target: int = 1, budget: int = 4 * MIB) -> World:
    """Each rank is on a different machine; all their GPUs count in ``machine``."""
    return a_world(baseline, target, tcp=True, gpu=lambda rank: LateGpu(machine), budget=budget)  # type: ignore[return-value]


def test_a_gpu_tensor_crosses_a_network_through_pinned_memory() -> None:
    machine = Machine()
    with a_world_of_machines(machine) as world:
        sender, receiver = world.begin().mailboxes
        for number, sample in enumerate(SAMPLES):
            near = on_gpu(torch.empty(0))
            sender.publish(key(occurrence=number), on_gpu(sample))
            receipt = receiver.exchange.receive(key(occurrence=number), near)
            [contribution] = receipt.contributions
            assert contribution.tensor.dtype == sample.dtype
            assert contribution.tensor.shape == sample.shape
            assert torch.equal(_as_bytes(contribution.tensor), _as_bytes(sample))
            receipt.release()
        full = [sample.nbytes for sample in SAMPLES if sample.nbytes]
        # Once where it was sent, once where it was received.
        assert machine.pinned == [nbytes for nbytes in full for _ in range(2)]
        world.end(0)
        assert sender.bytes_in_use() == 0


def test_a_receiver_on_the_host_reads_received_bytes_without_pinning() -> None:
    machine = Machine()
    with a_world_of_machines(machine) as world:
        sender, receiver = world.begin().mailboxes
        sender.publish(key(), on_gpu(torch.arange(4.0)))
        assert receiver.take(key()) == [[0, 1, 2, 3]]
        assert machine.pinned == [16]


def test_a_tensor_on_the_host_asks_for_no_pinned_memory() -> None:
    machine = Machine()
    with a_world_of_machines(machine) as world:
        sender, receiver = world.begin().mailboxes
        sender.publish(key(), torch.arange(4.0))
        assert receiver.take(key()) == [[0, 1, 2, 3]]
        assert machine.pinned == []


def test_local_and_remote_receivers_get_the_same_tensor() -> None:
    machine = Machine()
    # The baseline's rank and the target's first are on one machine.
    with a_world(1, 2, far=[2], gpu=lambda rank: LateGpu(machine)) as world:
        sender, here, elsewhere = world.begin().mailboxes
        for number in range(3):
            value = on_gpu(torch.full((1000,), float(number)))
            sender.publish(key(occurrence=number), value)
            value.zero_()
            for receiver in (here, elsewhere):
                receipt = receiver.receive(key(occurrence=number))
                assert [each.tensor.unique().tolist() for each in receipt.contributions] == [[number]]
                receipt.release()
        # The GPU copies once for both.
        assert machine.pinned == [4000] * 3
        assert machine.shared == []
        world.end(0)
        assert sender.bytes_in_use() == 0


def test_a_failure_to_pin_memory_is_warned_of_once_and_tensors_still_arrive() -> None:
    machine = Machine()
    machine.fails_at = "pinned"
    with a_world_of_machines(machine) as world:
        sender, receiver = world.begin().mailboxes

        def passes_on(number: int) -> None:
            sender.publish(key(occurrence=number), on_gpu(float(number)))
            receipt = receiver.exchange.receive(key(occurrence=number), on_gpu(0.0))
            assert [each.tensor.item() for each in receipt.contributions] == [number]
            receipt.release()

        with pytest.warns(GraftWarning, match="unpinned memory, which is slower: pinned is forbidden") as told:
            passes_on(0)
        # Each end has its own memory.
        assert sorted(str(each.message).split(":")[0] for each in told) == [
            "gl.tap on baseline[0]",
            "gl.tap on target[0]",
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            passes_on(1)


def test_pinned_memory_counts_against_the_budget() -> None:
    machine = Machine()
    with a_world_of_machines(machine, budget=MIB) as world:
        sender, receiver = world.begin().mailboxes
        sender.exchange.timeout = 0.05
        sender.publish(key("first"), on_gpu(torch.zeros(MIB, dtype=torch.uint8)))
        assert sender.bytes_in_use() == MIB
        with pytest.raises(
            BufferFullError,
            match=exactly(
                "baseline[0] could not publish tap 'second' of step 0: its buffer of 1 MiB stayed full for "
                "0.05 s; target[0]: starting"
            ),
        ):
            sender.publish(key("second"), on_gpu(torch.zeros(1)))
        receiver.take(key("first"))
        receiver.exchange.end_step(0)
        world.deliver()
        sender.publish(key("third", step=1), on_gpu(torch.zeros(1)))
        assert sender.bytes_in_use() == 4


def test_bytes_in_transit_are_not_overwritten() -> None:
    memory = PinnedMemory(LateGpu(Machine()), "baseline rank 0")
    staging = PinnedStaging(memory)
    first = staging.put(on_gpu(torch.full((64,), 1.0)), 256, {1})
    on_its_way = staging.view(first)
    staging.release(first)
    with pytest.raises(KeyError):
        staging.view(first)  # else it would hold the memory for good
    for number in range(50):
        staging.release(staging.put(on_gpu(torch.full((64,), float(number))), 256, {1}))
    assert torch.frombuffer(on_its_way, dtype=torch.float32).unique().tolist() == [1]
    assert staging.bytes_in_use == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_cuda_crosses_a_network_through_pinned_memory() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert Cuda().pinned(4096).is_pinned()
        with a_world(1, 1, tcp=True, gpu=lambda rank: Cuda()) as world:
            sender, receiver = world.begin().mailboxes
            for number in range(50):
                sent = torch.randn(1 << 20, device="cuda")
                kept = sent.clone()
                sender.exchange.publish(key(occurrence=number), sent, None)
                sent.zero_()
                receipt = receiver.exchange.receive(key(occurrence=number), sent)
                [contribution] = receipt.contributions
                assert contribution.tensor.device == sent.device
                assert torch.equal(contribution.tensor, kept)
                receipt.release()


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.as_subclass(torch.Tensor).resolve_conj().contiguous()
    return plain.view(-1).view(torch.uint8) if plain.numel() else torch.empty(0, dtype=torch.uint8)
