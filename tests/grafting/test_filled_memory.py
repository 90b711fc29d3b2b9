"""A call is repeated, and repeated with new memory filled: what differs then, and what is left as it was."""

from __future__ import annotations

import collections
import ctypes
import gc
import itertools
import sys
from contextlib import suppress

import pytest
import torch
from kit.grafters import GrafterWorld

import graftlab as gl
from graftlab.grafting.filled_memory import repeat_with_filled_memory
from graftlab.taps import calls

BUDGET = 1 << 20


@pytest.fixture(autouse=True)
def _rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process taps as a target's rank does, and has compiled nothing, as other tests may have."""
    if dynamo := sys.modules.get("torch._dynamo.utils"):
        monkeypatch.setitem(dynamo.counters, "frames", collections.Counter())
    grafter = GrafterWorld(1, 1).target.grafter
    monkeypatch.setattr(calls, "_grafter", grafter)
    monkeypatch.setattr(calls, "_handler", grafter)


def test_a_result_that_differs_is_found_though_each_call_overwrites_the_last_one() -> None:
    buffer, numbers = torch.zeros(4), itertools.count()
    found = repeat_with_filled_memory(lambda: buffer.fill_(next(numbers)), budget=BUDGET)
    assert (found.differing, found.unwritten) == (["the returned value"], [])


@pytest.mark.parametrize("reserve", [torch.empty, torch.zeros])
def test_a_tap_of_memory_that_nothing_has_written_is_named_and_torch_left_as_it_was(reserve: object) -> None:
    def reads() -> torch.Tensor:
        # Zeros: memory that is new, or that the allocator has given back. It keeps its notes at the beginning.
        room = reserve(1 << 24)  # type: ignore[operator]
        return gl.tap("read", room[1 << 23 : (1 << 23) + 8]).sum()

    def mode() -> tuple[int, bool]:
        return torch.get_deterministic_debug_mode(), torch.utils.deterministic.fill_uninitialized_memory

    # Earlier tests may have freed memory that they wrote, which torch.empty would reuse.
    gc.collect()
    with suppress(AttributeError):  # Of glibc alone.
        ctypes.CDLL(None).malloc_trim(0)
    before = mode()
    found = repeat_with_filled_memory(reads, budget=BUDGET)
    assert (found.differing, found.unwritten) == ([], ["read"] if reserve is torch.empty else [])
    assert mode() == before
