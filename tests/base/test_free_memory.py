"""The memory that a process can still take, in a container too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from graftlab.base import free_memory
from graftlab.base.free_memory import free_bytes

CPU = torch.device("cpu")
KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The files of a machine with 8 MiB of free memory, and of a container without a limit."""
    (tmp_path / "meminfo").write_text(f"MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:   {8 * KIB} kB\n")
    monkeypatch.setattr(free_memory, "_MEMORY", tmp_path / "meminfo")
    monkeypatch.setattr(free_memory, "_GROUPS", tmp_path)
    return tmp_path


def limit(machine: Path, most: str, used: int) -> None:
    (machine / "memory.max").write_text(f"{most}\n")
    (machine / "memory.current").write_text(f"{used}\n")


def test_free_memory_is_that_of_the_machine_or_what_its_container_leaves(machine: Path) -> None:
    assert free_bytes(CPU) == 8 * MIB
    limit(machine, "max", MIB)
    assert free_bytes(CPU) == 8 * MIB
    limit(machine, str(4 * MIB), 3 * MIB)
    assert free_bytes(CPU) == MIB
    (machine / "memory.stat").write_text(f"anon {MIB}\ninactive_file {2 * MIB}\nactive_file 7\n")
    assert free_bytes(CPU) == 3 * MIB
    limit(machine, str(16 * MIB), MIB)
    assert free_bytes(CPU) == 8 * MIB
    limit(machine, str(MIB), 4 * MIB)
    assert free_bytes(CPU) == 0


def test_free_memory_is_known_in_a_container_of_the_first_version(machine: Path) -> None:
    (machine / "memory").mkdir()
    (machine / "memory" / "memory.limit_in_bytes").write_text(f"{4 * MIB}\n")
    (machine / "memory" / "memory.usage_in_bytes").write_text(f"{3 * MIB}\n")
    assert free_bytes(CPU) == MIB
    (machine / "memory" / "memory.stat").write_text(f"cache 7\ntotal_inactive_file {2 * MIB}\n")
    assert free_bytes(CPU) == 3 * MIB


def test_free_memory_is_unknown_where_no_file_has_it(machine: Path) -> None:
    (machine / "meminfo").unlink()
    assert free_bytes(CPU) is None
    limit(machine, str(2 * MIB), MIB)
    assert free_bytes(CPU) == MIB
    assert free_bytes(torch.device("meta")) is None


def test_free_memory_is_known_on_this_machine() -> None:
    free = free_bytes(CPU)
    assert free is not None
    assert free >= 0


def test_memory_that_torch_keeps_on_a_gpu_is_free_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 7 * MIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 2 * MIB)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (16 * MIB, 80 * MIB))
    assert free_bytes(torch.device("cuda", 1)) == 21 * MIB
