"""No small file takes the time or the memory of a large one; which budget was exceeded is said."""

from __future__ import annotations

import io
import pickle
import resource
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.refusals import exactly

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


@pytest.mark.parametrize("items", ["list", "tuple"])
def test_a_set_of_keys_that_are_slow_to_hash_is_refused(tmp_path: Path, items: str) -> None:
    key = pickle.dumps(1 << 100_000, 2)[2:-1]
    data = b"\x80\x04" + stack_global("builtins", "set") + (b"]" + key + b"a" if items == "list" else key + b"\x85")
    with pytest.raises(DumpError, match="a key that is a number of 100001 bits"):
        load_dump(file_of(tmp_path, data + b"\x85R."))
    # Copies of sets are made by a function that takes the set's class.
    with pytest.raises(DumpError, match="a key that is a number of 100001 bits"):
        load_dump(file_of(tmp_path, b"\x80\x04" + stack_global("copyreg", "__newobj__") + data[2:] + b"\x86R."))


COLLIDING = [PRIME * number for number in range(1, 100_000)]


@pytest.mark.slow
@pytest.mark.parametrize("kind", [dict.fromkeys, set, pytest.param(frozenset, marks=pytest.mark.soak)])
def test_keys_that_collide_end_with_the_time_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: Any) -> None:
    # Other numbers take half of this time, and these a minute.
    monkeypatch.setattr(budgets, "_SECONDS", 0.7)
    monkeypatch.setattr(budgets, "_SECONDS_A_BYTE", 0.0)
    each = [pickle.dumps(number, 2)[2:-1] for number in COLLIDING]
    numbers = b"".join(each)
    if kind is dict.fromkeys:
        data = b"}(" + b"".join(number + b"N" for number in each) + b"u."
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


def test_too_deep_nesting_is_refused(tmp_path: Path) -> None:
    deep = b"\x80\x04" + b"]" * 5000 + b"a" * 4999 + b"."
    with pytest.raises(DumpError, match="more than 1000 deep"):
        load_dump(file_of(tmp_path, deep))


def test_more_objects_than_the_budget_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_OBJECTS", 1000)
    with pytest.raises(DumpError, match="more than 1,000 objects"):
        load_dump(file_of(tmp_path, pickle.dumps({"requests": [list(range(2000))]})))


# ---- where each budget ends ------------------------------------------------------------------------------------------


def nested(depth: int) -> Any:
    value: Any = ()
    for _ in range(depth - 1):
        value = (value,)
    return value


def test_the_memory_budget_grows_with_the_files_size_and_is_enforced() -> None:
    budget = budgets.Budget(10)
    budget.take((64 << 20) + 16 * 10)
    with pytest.raises(
        budgets.BudgetExceeded, match=exactly("it expands to more than 67,109,024 bytes, the memory budget of its size")
    ):
        budget.take(1)


@pytest.mark.parametrize(
    ("value", "size"),
    [
        ("abc", 3),
        (b"abc", 3),
        (bytearray(5), 5),
        ([1, 2, 3], 24),
        (("ab", b"c", 1), 24 + 3),
        ({"key": "value", "k": 1}, 16 + 5),
        ({"abcd", 1}, 16 + 4),
        (frozenset([b"abc"]), 8 + 3),
        ([["not looked into"]], 8),
        (12345, 0),
        (None, 0),
    ],
)
def test_copies_take_a_word_an_item_and_the_text_right_in_them(
    value: Any, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budgets, "_BYTES", size + 7)
    budget = budgets.Budget(0)
    budget.take_copies(["1234567", value])
    with pytest.raises(budgets.BudgetExceeded):
        budget.take(1)


def test_the_time_budget_grows_with_the_files_size_and_is_enforced(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(budgets.time, "monotonic", lambda: now[0])
    budget = budgets.Budget(1_000_000)
    now[0] = 112.0
    budget.check_time()
    now[0] = 112.01
    for looks in (budget.check_time, lambda: list(budget.pieces([1])), lambda: budget.require_light([((),)])):
        with pytest.raises(
            budgets.BudgetExceeded, match=exactly("reading it takes more than 12 s, the time budget of its size")
        ):
            looks()


def test_the_time_is_checked_at_a_fixed_number_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(budgets, "_SECONDS", -1.0)
    budget = budgets.Budget(0)
    with pytest.raises(budgets.BudgetExceeded):
        [budget.count() for _ in range(1000)]


@pytest.mark.parametrize("count", [0, 1, 255, 256, 257, 1000])
def test_what_is_taken_in_pieces_is_whole_and_in_order(count: int) -> None:
    pieces = list(budgets.Budget(0).pieces(list(range(count))))
    assert [item for piece in pieces for item in piece] == list(range(count))
    assert all(0 < len(piece) <= 256 for piece in pieces)


def test_keys_are_limited_in_depth_and_weight() -> None:
    budget = budgets.Budget(0)
    budget.require_light([nested(100), 1 << 99_999, -(1 << 99_999), "text", (1,) * 49_999, None])
    for key, said in (
        (nested(101), "a key of more than 100 nested tuples"),
        (1 << 100_000, "a key that is a number of 100001 bits"),
        ((1,) * 100_000, "a key of tuples with more than 100,000 parts"),
        ((1 << 1_000_000,), "a key of tuples with more than 100,000 parts"),
        (((1,) * 500,) * 200, "a key of tuples with more than 100,000 parts"),
    ):
        with pytest.raises(budgets.BudgetExceeded, match=said):
            budget.require_light([(), key])
    # A part of the key counts 1, each tuple 1 more, and so does each word of a number.
    budget.require_light([(1,) * 99_999, (1 << (8 * 99_998 - 1),), (((1,) * 998,) * 100,)])


@pytest.mark.parametrize("make", [lambda inner: [inner], lambda inner: (inner,), lambda inner: {"k": inner}])
def test_containers_deeper_than_the_limit_are_refused(make: Any) -> None:
    deep: Any = make("end")
    for _ in range(999):
        deep = make(deep)
    budgets.Budget(0).require_shallow(deep)
    with pytest.raises(budgets.BudgetExceeded, match="lists, tuples and dicts nested more than 1000 deep"):
        budgets.Budget(0).require_shallow(make(deep))
    endless: list[Any] = []
    endless.append(endless)
    budgets.Budget(0).require_shallow(endless)
    budgets.Budget(0).require_shallow("text")
