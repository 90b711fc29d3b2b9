"""The record of a run is in a file: it comes back bit for bit, and takes no memory but that of one tensor."""

from __future__ import annotations

import dataclasses
import gc
import os
import pickle

import pytest
import torch
from kit.grafters import GrafterWorld
from kit.refusals import exactly

import graftlab as gl
from graftlab.grafting.self_graft import graft_self
from graftlab.grafting.spilled import SpillFile
from graftlab.grafting.tap_records import SelfGraftRecorder
from graftlab.taps import calls

_TAPS, _NUMBERS = 8, 1 << 18


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process taps as a baseline's rank does."""
    world = GrafterWorld(1, 1)
    monkeypatch.setattr(calls, "_grafter", world.baseline.grafter)
    monkeypatch.setattr(calls, "_handler", world.baseline.grafter)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).view(2, 3, 4),
        torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
        torch.arange(120.0).view(2, 3, 4, 5).to(memory_format=torch.channels_last),
        torch.arange(24.0)[::2],
        torch.ones(3, 1).expand(3, 4),
        torch.tensor(2.5, dtype=torch.bfloat16),
        torch.empty(0, 3),
        torch.arange(4.0).to(torch.float8_e4m3fn),
        torch.tensor([True, False]),
        torch.tensor([1 + 2j, 3 - 1j]).conj(),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
    ],
)
def test_a_spilled_tensor_comes_back_with_its_values_and_arrangement(tensor: torch.Tensor) -> None:
    file = SpillFile()
    file.store(torch.ones(5))
    stored = file.store(tensor)
    file.store(torch.ones(5))
    read, clone = stored.read(), tensor.clone()
    assert (read.dtype, read.shape, read.stride()) == (clone.dtype, clone.shape, clone.stride())
    assert read.float().equal(clone.float()) if not read.is_complex() else read.equal(clone.resolve_conj())


def test_what_the_system_writes_or_reads_in_parts_comes_back_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    write, read = os.pwrite, os.preadv
    monkeypatch.setattr(os, "pwrite", lambda file, data, place: write(file, data[:7], place))
    monkeypatch.setattr(os, "preadv", lambda file, parts, place: read(file, [parts[0][:5]], place))
    file = SpillFile()
    stored = file.store(torch.arange(6.0))
    assert stored.read().equal(torch.arange(6.0))
    os.truncate(file.descriptor, 20)
    said = "a temporary file with the record of a run is shorter than what was written to it"
    with pytest.raises(OSError, match=exactly(said)):
        stored.read()


def test_a_spilled_tensor_comes_back_on_its_device() -> None:
    stored = SpillFile().store(torch.arange(6.0).view(2, 3).T)
    read = dataclasses.replace(stored, device=torch.device("meta")).read()
    assert (read.device.type, read.shape, read.stride()) == ("meta", (3, 2), (1, 3))


def live_bytes() -> int:
    """The bytes of memory that all tensors of this process have; those that a compiler traces with have none."""
    tensors = (each for each in gc.get_objects() if type(each) is torch.Tensor and each.device.type == "cpu")
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in tensors}.values())


def test_a_self_graft_keeps_less_than_two_tensors_beyond_the_calls_own() -> None:
    seen: list[int] = []

    def call() -> torch.Tensor:
        x = torch.linspace(0.5, 2.0, _NUMBERS)
        for layer in range(_TAPS):
            x = gl.tap("x", torch.cos(x), layer=layer)
            seen.append(live_bytes())
        return x.sum()

    call()
    own = max(seen)
    seen.clear()
    found = graft_self(call, None, budget=1 << 30)
    assert len(found.added) == _TAPS
    assert len(seen) == 4 * _TAPS
    assert max(seen) - own < 2 * _NUMBERS * 4


def test_without_room_on_the_disk_the_record_takes_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*given: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    found = graft_self(lambda: gl.tap("x", torch.linspace(0.5, 2.0, 10)), None, budget=1 << 20)
    assert [each.name for each in found.added] == ["x"]
    assert not found.not_repeated
    # The record does not keep the graph of what it was computed with.
    recorder = SelfGraftRecorder(1 << 20)
    recorder.take(("x", (), "none", 0), {"name": "x"}, torch.ones(2, requires_grad=True) * 2)
    (record,) = recorder.taps.values()
    assert isinstance(record.value, torch.Tensor)
    assert not record.value.requires_grad


def test_a_record_travels_with_its_values() -> None:
    recorder = SelfGraftRecorder(1 << 20)
    recorder.take(("x", (), "none", 0), {"name": "x"}, torch.arange(4.0))
    sent = pickle.dumps(recorder.taps)
    # Where it arrives, the file cannot be opened.
    del recorder
    (read,) = pickle.loads(sent).values()
    assert (read.place, read.tags) == (("x", (), "none", 0), {"name": "x"})
    assert read.value.equal(torch.arange(4.0))


def test_the_file_is_closed_with_its_last_tensor(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[int] = []
    monkeypatch.setattr(os, "close", closed.append)
    file = SpillFile()
    descriptor, stored = file.descriptor, file.store(torch.ones(2))
    del file
    assert stored.read().equal(torch.ones(2))
    assert not closed
    del stored
    monkeypatch.undo()
    os.close(descriptor)
    assert closed == [descriptor]
