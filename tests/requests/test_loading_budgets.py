"""No small file takes the time or the memory of a large one; which budget was exceeded is said."""

from __future__ import annotations

import io
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch

from graftlab.errors import DumpError
from graftlab.requests import budget as budgets
from graftlab.requests import load_dump
from graftlab.requests.records import Opaque

LEVELS = 40
PRIME = 2**61 - 1
# {"requests": [], KEY: None}, with a key whose hash would take for ever: each tuple has the one before it three times.
BOMB_KEY = b")" + b"22\x87" * LEVELS


def stack_global(module: str, name: str) -> bytes:
    parts = [b"\x8c" + bytes([len(part)]) + part.encode() for part in (module, name)]
    return b"".join(parts) + b"\x93"


def file_of(tmp_path: Path, value: bytes) -> Path:
    path = tmp_path / "a.pkl"
    path.write_bytes(value)
    return path


def dumped(value: Any) -> bytes:
    return pickle.dumps({"requests": [(value, {}, 0.0, 1.0)]})


@pytest.mark.parametrize("data", [b"\x80\x04}" + BOMB_KEY + b"Ns.", b"\x80\x04(" + BOMB_KEY + b"\x91."])
def test_a_key_of_shared_tuples_is_refused_at_once(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(DumpError, match="a key of tuples with more than 100,000 parts"):
        load_dump(file_of(tmp_path, data))


COLLIDING = [PRIME * number for number in range(1, 100_000)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dict.fromkeys, set, frozenset])
def test_keys_that_collide_end_with_the_time_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    monkeypatch.setattr(budgets, "_SECONDS", 0.5)
    numbers = b"".join(pickle.dumps(number, 2)[2:-1] for number in COLLIDING)
    if kind is dict.fromkeys:
        data = b"}(" + b"".join(pickle.dumps(number, 2)[2:-1] + b"N" for number in COLLIDING) + b"u."
    elif kind is set:
        data = stack_global("builtins", "set") + b"](" + numbers + b"e\x85R."
    else:
        data = b"(" + numbers + b"\x91."
    with pytest.raises(DumpError, match="the time budget of its size"):
        load_dump(file_of(tmp_path, b"\x80\x04" + data))


def test_one_large_value_in_many_places_is_refused(tmp_path: Path) -> None:
    one = b"\x8e" + (1 << 20).to_bytes(8, "little") + bytes(1 << 20) + b"\x85\x94"
    copies = b"0" + (stack_global("builtins", "bytearray") + b"h\x00R") * 10_000
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(DumpError, match="the memory budget of its size"):
        load_dump(file_of(tmp_path, b"\x80\x04(" + one + copies + b"l."))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) >> 10 < 500


class StorageOf:
    def __init__(self, packed: bytes) -> None:
        self.packed = packed

    def __reduce__(self) -> Any:
        return torch.storage._load_from_bytes, (self.packed,)


def test_a_packed_storage_is_not_unpacked(tmp_path: Path) -> None:
    packed = io.BytesIO()
    torch.save(torch.zeros(1000)._typed_storage(), packed)
    [record] = load_dump(file_of(tmp_path, dumped(StorageOf(packed.getvalue()))))["requests"]
    assert isinstance(record.request, Opaque)
    [record] = load_dump(file_of(tmp_path, dumped(torch.arange(1000.0)._typed_storage())))["requests"]
    assert list(record.request) == list(range(1000))


def test_an_expanded_tensor_comes_back_and_a_boundless_one_does_not(tmp_path: Path) -> None:
    [record] = load_dump(file_of(tmp_path, dumped(torch.ones(1).expand(1000, 1000))))["requests"]
    assert record.request.sum() == 1e6
    [record] = load_dump(file_of(tmp_path, dumped(torch.ones(1).expand(1 << 20, 1 << 20))))["requests"]
    assert isinstance(record.request, Opaque)


def test_what_nests_too_deep_is_refused(tmp_path: Path) -> None:
    deep = b"\x80\x04" + b"]" * 5000 + b"a" * 4999 + b"."
    with pytest.raises(DumpError, match="more than 1000 deep in each other"):
        load_dump(file_of(tmp_path, deep))


def test_more_objects_than_the_budget_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_OBJECTS", 1000)
    with pytest.raises(DumpError, match="more than 1,000 objects"):
        load_dump(file_of(tmp_path, pickle.dumps({"requests": [list(range(2000))]})))
