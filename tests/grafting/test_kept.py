"""Kept pairs: copies of both values, found by their tags, within the budget."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.mailboxes import DEADLINE, MIB, eager_threads, in_background
from kit.refusals import exactly
from kit.tensors import DTYPES, bits, layouts, random_bits

from graftlab.errors import SessionError
from graftlab.grafting.kept import KeptPair, KeptPairs
from graftlab.transforms import GraftTransformInput

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def the_input(received: torch.Tensor, target: torch.Tensor, direction: Any = "b2t", **tags: Any) -> GraftTransformInput:
    return GraftTransformInput({"name": "x", **tags}, [received], [None], target, direction)


def keep_number(kept: KeptPairs, number: float, nbytes: int = 8, **tags: Any) -> str | None:
    """Keep a pair of this size in bytes, whose target is filled with ``number``."""
    received, target = torch.zeros(nbytes // 8), torch.full((nbytes // 8,), float(number))
    return kept.add(the_input(received, target, **tags), received)


def numbers(kept: KeptPairs) -> list[float]:
    found = [kept.find("x", {"index": tags["index"]}) for tags in kept.tags()]
    targets = [pair.target for pair in found if pair is not None and pair.target is not None]
    return [target[0].item() for target in targets if target.numel()]


# ---- what is kept ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("direction", ["b2t", "t2b"])
def test_pair_distinguishes_baseline_and_target_values(direction: str) -> None:
    kept = KeptPairs()
    mine, theirs = torch.tensor([1.0]), torch.tensor([2.0])
    kept.add(the_input(theirs, mine, direction), theirs)
    pair = kept.find("x", {})
    assert pair is not None
    assert pair.baseline is not None
    assert pair.target is not None
    values = (pair.baseline.item(), pair.target.item())
    assert values == ((2.0, 1.0) if direction == "b2t" else (1.0, 2.0))


def test_kept_tensors_are_copies_from_before_the_graft() -> None:
    kept, mine, theirs, made = KeptPairs(), torch.zeros(3), torch.ones(3), torch.full((3,), 2.0)
    graft_input = the_input(theirs, mine, layer=3)
    kept.add(graft_input, made)
    for tensor in (mine, theirs, made):
        tensor.fill_(9.0)
    graft_input.tags["layer"] = 4
    pair = kept.find("x", {"layer": 3})
    assert isinstance(pair, KeptPair)
    assert pair.graft_input.target.tolist() == [0.0] * 3
    assert pair.graft_input.received_list[0].tolist() == [1.0] * 3
    assert pair.baseline is not None
    assert pair.baseline.tolist() == [2.0] * 3


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_and_layout_is_kept_bit_exact(dtype: torch.dtype) -> None:
    kept = KeptPairs()
    for name, tensor in layouts(dtype).items():
        received = random_bits(dtype, *tensor.shape, seed=8)
        kept.add(the_input(received, tensor, layout=name), received)
        pair = kept.find("x", {"layout": name})
        assert pair is not None
        for one, other in ((pair.target, tensor), (pair.baseline, received)):
            assert one is not None
            assert (one.shape, one.dtype, one.is_contiguous()) == (other.shape, other.dtype, True)
            assert torch.equal(bits(one), bits(other)), name


def test_tensors_of_an_autograd_graph_are_kept_without_it() -> None:
    kept = KeptPairs()
    kept.add(the_input(torch.ones(2), torch.ones(2, requires_grad=True) * 2), torch.ones(2))
    pair = kept.find("x", {})
    assert pair is not None
    assert pair.target is not None
    assert not pair.target.requires_grad


# ---- finding --------------------------------------------------------------------------------------------------------


def test_the_newest_pair_that_has_these_tags_is_found() -> None:
    kept = KeptPairs()
    for number, (layer, step) in enumerate([(1, 0), (2, 0), (1, 1), (2, 1)]):
        keep_number(kept, number, layer=layer, step=step)

    def found(name: str = "x", **tags: Any) -> float | None:
        pair = kept.find(name, tags)
        return None if pair is None or pair.target is None else pair.target.item()

    assert found() == 3.0
    assert found(layer=1) == 2.0
    assert found(layer=1, step=0) == 0.0
    assert found(layer=3) is None
    assert found(head=None) == 3.0  # an absent tag is None
    assert found("y") is None


def test_an_input_without_a_value_is_found_only_on_request_for_failures() -> None:
    kept = KeptPairs()
    keep_number(kept, 1.0, layer=1)
    kept.add(the_input(torch.zeros(1), torch.full((1,), 2.0), layer=2), None)
    pair, failed = kept.find("x", {}), kept.find("x", {}, failed=True)
    assert pair is not None
    assert failed is not None
    assert pair.tags["layer"] == 1
    assert (failed.tags["layer"], failed.value, failed.baseline) == (2, None, None)
    assert [tags["layer"] for tags in kept.tags()] == [1]
    assert [tags["layer"] for tags in kept.tags(failed=True)] == [1, 2]


def test_tags_are_listed_oldest_first_and_are_copies() -> None:
    kept = KeptPairs()
    for layer in (2, 1, 2):
        keep_number(kept, layer, layer=layer)
    listed = kept.tags()
    assert [tags["layer"] for tags in listed] == [2, 1, 2]
    listed[0]["layer"] = 9
    assert [tags["layer"] for tags in kept.tags()] == [2, 1, 2]


# ---- the budget -----------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 12), max_size=20))
def test_the_newest_pairs_that_fit_are_held(sizes: list[int]) -> None:
    kept = KeptPairs(80)
    expected: list[tuple[int, int]] = []
    for index, size in enumerate(sizes):
        note = keep_number(kept, index, 8 * size, index=index)
        assert (note is None) == (size <= 10)
        if size <= 10:
            expected.append((index, size))
        while sum(each for _, each in expected) > 10:
            expected.pop(0)
        assert [tags["index"] for tags in kept.tags()] == [each for each, _ in expected]
    assert numbers(kept) == [float(each) for each, size in expected if size]


def test_a_pair_beyond_the_budget_is_not_kept_and_drives_no_other_out() -> None:
    kept = KeptPairs(2 * MIB)
    keep_number(kept, 1.0, MIB, index=0)
    note = keep_number(kept, 2.0, 4 * MIB, index=1)
    assert note == "not kept: the tensors have 4 MiB and the budget is 2 MiB"
    assert numbers(kept) == [1.0]


def test_a_call_is_chosen_by_its_number_unless_the_tap_has_a_tag_of_that_name() -> None:
    kept = KeptPairs()
    for call in range(3):
        for own in ({}, {"occurrence": 9 - call}):
            numbers = torch.full((1,), call + 10.0 * len(own))
            kept.add(the_input(numbers, numbers, **own), numbers, call)
    for number, expected in ((1, 1.0), (2, 2.0), (8, 11.0), (9, 10.0)):
        pair = kept.find("x", {"occurrence": number})
        assert pair is not None
        assert pair.target == expected


def test_older_pair_does_not_replace_one_that_was_not_kept() -> None:
    kept = KeptPairs(2 * MIB)
    keep_number(kept, 1.0, MIB, layer=1, step=0)
    keep_number(kept, 2.0, 4 * MIB, layer=1, step=7)
    with pytest.raises(SessionError) as caught:
        kept.find("x", {"layer": 1})
    assert str(caught.value) == (
        "the pair of x layer=1 at step 7 was not kept: its tensors have 4 MiB and the budget of a rank is 2 MiB; "
        "keep it with gl.launch(..., keep_budget=4 << 20) or more. An older pair is kept: step=0"
    )
    with pytest.raises(
        SessionError,
        match=exactly(
            "the pair of x layer=1 at step 7 was not kept: its tensors have 4 MiB and the budget of a rank "
            "is 2 MiB; keep it with gl.launch(..., keep_budget=4 << 20) or more"
        ),
    ):
        kept.find("x", {"layer": 1, "step": 7})
    older = kept.find("x", {"layer": 1, "step": 0})
    assert older is not None
    # What is kept of it later is the newest again.
    keep_number(kept, 3.0, MIB, layer=1, step=8)
    newest = kept.find("x", {"layer": 1})
    assert newest is not None
    assert newest.target is not None
    assert newest.target[0] == 3.0


def test_missing_pair_of_a_different_tap_does_not_matter() -> None:
    kept = KeptPairs(2 * MIB)
    keep_number(kept, 1.0, MIB, layer=1, step=0)
    keep_number(kept, 2.0, 4 * MIB, layer=2, step=0)
    assert kept.find("x", {}) is not None
    assert kept.find("x", {"layer": 1}) is not None
    assert kept.find("y", {}) is None


def test_where_the_newest_transform_failed_an_older_pair_is_not_taken_for_it() -> None:
    kept = KeptPairs()
    keep_number(kept, 1.0, layer=1, step=0)
    kept.add(the_input(torch.zeros(1), torch.ones(1), layer=1, step=4), None)
    with pytest.raises(
        SessionError,
        match=exactly(
            "the pair of x layer=1 at step 4 was not kept: its transform failed. An older pair is kept: step=0"
        ),
    ):
        kept.find("x", {"layer": 1})
    failed = kept.find("x", {"layer": 1}, failed=True)
    assert failed is not None
    assert failed.tags["step"] == 4


def test_dropped_pair_is_reported_with_the_reason() -> None:
    kept = KeptPairs(2 * MIB)
    for layer in range(3):
        keep_number(kept, layer, MIB, layer=layer, step=5)
    assert kept.find("x", {"layer": 1}) is not None
    with pytest.raises(
        SessionError,
        match=exactly(
            "the pair of x layer=0 at step 5 is no longer kept: newer pairs replaced it, because the "
            "budget of a rank is 2 MiB; set a larger one, in bytes, with gl.launch(..., keep_budget=...)"
        ),
    ):
        kept.find("x", {"layer": 0})


def test_of_several_dropped_pairs_of_a_tap_the_newest_is_reported() -> None:
    kept = KeptPairs(2 * MIB)
    for step in (3, 4):
        keep_number(kept, step, MIB, layer=0, step=step)
    for layer in (1, 2):
        keep_number(kept, layer, MIB, layer=layer, step=5)
    with pytest.raises(
        SessionError,
        match=exactly(
            "the pair of x layer=0 at step 4 is no longer kept: newer pairs replaced it, because the "
            "budget of a rank is 2 MiB; set a larger one, in bytes, with gl.launch(..., keep_budget=...)"
        ),
    ):
        kept.find("x", {"layer": 0})
    assert [tags["step"] for tags in kept.missing()] == [4]


def test_failed_transform_is_reported_after_its_input_was_dropped() -> None:
    kept = KeptPairs(2 * MIB)
    kept.add(the_input(torch.zeros(MIB // 8), torch.zeros(MIB // 8), layer=0, step=5), None)
    for layer in (1, 2):
        keep_number(kept, layer, MIB, layer=layer, step=5)
    assert [tags["layer"] for tags in kept.tags(failed=True)] == [1, 2]
    with pytest.raises(
        SessionError, match=exactly("the pair of x layer=0 at step 5 was not kept: its transform failed")
    ):
        kept.find("x", {"layer": 0}, failed=True)


def test_newest_of_several_missing_pairs_is_reported() -> None:
    kept = KeptPairs(2 * MIB)
    assert kept.missing() == []
    for step in (3, 4):
        for layer in (1, 2):
            keep_number(kept, 0, 4 * MIB, layer=layer, step=step)
    assert [(tags["layer"], tags["step"]) for tags in kept.missing()] == [(1, 4), (2, 4)]
    with pytest.raises(
        SessionError,
        match=exactly(
            "the pair of x layer=2 at step 4 was not kept: its tensors have 4 MiB and the budget of a rank "
            "is 2 MiB; keep it with gl.launch(..., keep_budget=4 << 20) or more"
        ),
    ):
        kept.find("x", {})
    # What was kept before another tap's newest was missed is not held against it.
    keep_number(kept, 7, MIB, layer=1, step=5)
    assert [tags["layer"] for tags in kept.missing()] == [2]
    assert kept.find("x", {}) is not None


def test_pair_of_exactly_the_budget_is_kept_and_sizes_are_in_whole_mib() -> None:
    kept = KeptPairs(2 * MIB)
    assert keep_number(kept, 1, 2 * MIB, index=0) is None
    assert keep_number(kept, 1, 2 * MIB + 8, index=1) == "not kept: the tensors have 2 MiB and the budget is 2 MiB"
    with pytest.raises(
        SessionError,
        match=exactly(
            "the pair of x index=1 at step None was not kept: its tensors have 2 MiB and the budget of a "
            "rank is 2 MiB; keep it with gl.launch(..., keep_budget=3 << 20) or more"
        ),
    ):
        kept.find("x", {"index": 1})
    assert [tags["index"] for tags in kept.tags()] == [0]


def test_shared_tensor_counts_once_in_a_pairs_bytes() -> None:
    received, target = torch.zeros(4), torch.zeros(6)
    for value, nbytes in ((received, 40), (None, 40), (torch.zeros(4), 56)):
        assert KeptPair(the_input(received, target), value).nbytes == nbytes


def test_extras_that_cannot_be_copied_are_left_out_with_a_note() -> None:
    class Uncopyable:
        def __deepcopy__(self, memo: object) -> object:
            raise TypeError("no copies")

    given = the_input(torch.zeros(1), torch.zeros(1))
    note = KeptPairs().add(replace(given, target_extras={"k": Uncopyable()}), None)
    assert note == "kept without the receiver's extras, which cannot be copied: no copies"
    extras = {"k": [1]}
    kept = KeptPairs()
    assert kept.add(replace(given, target_extras=extras), torch.zeros(1)) is None
    extras["k"].append(2)
    pair = kept.find("x", {})
    assert pair is not None
    assert pair.graft_input.target_extras == {"k": [1]}


def test_the_heap_is_tidied_each_time_an_eighth_of_the_budget_was_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    tidied: list[int] = []
    monkeypatch.setattr("graftlab.grafting.kept._trim", tidied.append)
    kept = KeptPairs(800)
    for count in range(1, 26):
        keep_number(kept, 0, 40, index=count)
        # 120 bytes are the first to be more than 100.
        assert tidied == [0] * (count // 3)
    monkeypatch.setattr("graftlab.grafting.kept._trim", None)
    for count in range(3):
        keep_number(kept, 0, 40, index=count)


def test_dropped_pairs_do_not_fill_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.grafting.kept._MISSING_LIMIT", 5)
    kept = KeptPairs(2 * MIB)
    for layer in range(23):
        keep_number(kept, layer, MIB, layer=layer, step=5)
        assert len(kept._missing) <= 5
    # Those that went last are still told of.
    with pytest.raises(
        SessionError,
        match=exactly(
            "the pair of x layer=20 at step 5 is no longer kept: newer pairs replaced it, because the "
            "budget of a rank is 2 MiB; set a larger one, in bytes, with gl.launch(..., keep_budget=...)"
        ),
    ):
        kept.find("x", {"layer": 20})


@pytest.mark.parametrize("same", [True, False], ids=["as it came", "made anew"])
def test_a_value_counts_only_where_it_is_not_a_received_tensor_as_it_came(same: bool) -> None:
    kept = KeptPairs(2 * MIB)
    keep_number(kept, 1.0, 8, index=0)
    received = torch.zeros(MIB // 4)
    note = kept.add(the_input(received, torch.ones(MIB // 4), index=1), received if same else received.clone())
    if same:
        assert note is None
        assert numbers(kept) == [1.0]  # and the older one had to go
    else:
        assert note == "not kept: the tensors have 3 MiB and the budget is 2 MiB"
        assert numbers(kept) == [1.0]


@pytest.mark.parametrize(
    "view",
    [
        torch.Tensor.t,
        lambda received: received.view(torch.int32),
        torch.Tensor.flatten,
        lambda received: received[1:],
        lambda received: received[:1],
    ],
    ids=["transposed", "bits", "flat", "part", "first part"],
)
def test_a_view_of_a_received_tensor_is_not_taken_for_the_tensor_itself(view: Callable[..., torch.Tensor]) -> None:
    kept, received = KeptPairs(), torch.arange(4.0).view(2, 2)
    value = view(received)
    kept.add(the_input(received, torch.zeros(2, 2)), value)
    pair = kept.find("x", {})
    assert pair is not None
    assert pair.baseline is not None
    assert (pair.baseline.dtype, pair.baseline.tolist()) == (value.dtype, value.tolist())


@pytest.mark.slow
def test_other_threads_may_ask_while_pairs_come_and_go() -> None:
    kept, stop = KeptPairs(800), threading.Event()

    def ask() -> Iterator[int]:
        while True:
            pair = kept.find("x", {"index": -1})
            yield len(kept.tags()) + (pair is not None)
            if stop.is_set():
                return

    with eager_threads():
        asking = [in_background(lambda: max(ask())) for _ in range(2)]
        for index in range(3000):
            keep_number(kept, index, index=index)
        stop.set()
        assert all(1 <= future.result(DEADLINE) <= 100 for future in asking)
    assert numbers(kept) == [float(index) for index in range(2900, 3000)]
