"""Tensors of 16 bits are widened in place, all or none, within the memory there is, and are as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.refusals import exactly
from torch import nn

from graftlab.errors import SessionError
from graftlab.ranks import widening
from graftlab.ranks.widening import ReadsOf16Bits, TrialOfRanks, WideTensors, memory_of, rounded_at_random

VALUES = torch.linspace(0.1, 1, 6).reshape(2, 3)
OWN = VALUES.bfloat16()


def test_tensors_of_16_bits_have_their_values_in_float32_until_they_are_narrow_again() -> None:
    own, half, single = OWN.clone(), OWN.half(), VALUES.clone()
    weight = nn.Parameter(OWN.clone())
    weight.grad = OWN.clone()
    memory = [each.data_ptr() for each in (own, half, weight)]
    wide = WideTensors([own, half, single, weight, own])
    assert [each.dtype for each in (own, half, single, weight)] == [torch.float32] * 4
    for each in (own, half, weight):
        assert torch.equal(each.data, OWN.float())
    assert torch.equal(single, VALUES)
    # A gradient of another dtype than its weight's would fail the next backward pass.
    assert weight.grad is None
    (weight * 2).sum().backward()
    assert weight.grad.dtype == torch.float32
    for _ in range(2):
        wide.narrow()
        assert [each.dtype for each in (own, half, weight)] == [torch.bfloat16, torch.float16, torch.bfloat16]
        assert [each.data_ptr() for each in (own, half, weight)] == memory
        assert weight.grad is None
    assert torch.equal(own, OWN)
    # What the script has given a tensor since stays.
    own.data = 2 * OWN
    wide.narrow()
    assert torch.equal(own, 2 * OWN)


def test_known_numbers_replace_values_also_of_a_tensor_with_more_bits() -> None:
    own, single, other = OWN.clone(), VALUES.clone(), OWN.clone()
    wide = WideTensors([own, single, other], {id(own): VALUES, id(single): VALUES.double() + 1})
    assert torch.equal(own, VALUES)
    assert (single.dtype, single.tolist()) == (torch.float64, (VALUES.double() + 1).tolist())
    assert torch.equal(other, OWN.float())
    wide.narrow()
    assert torch.equal(own, OWN)
    assert torch.equal(single, VALUES)


class Own(torch.Tensor):
    pass


SHARED = torch.ones(4, dtype=torch.bfloat16)


@pytest.mark.parametrize(
    ("tensors", "says"),
    [
        (lambda: [], "no tensor of 16 bits was found"),
        (lambda: [VALUES], "no tensor of 16 bits was found"),
        (lambda: [SHARED[:2], SHARED[2:]], "some tensors share their memory"),
        (lambda: [SHARED, SHARED.view(2, 2), OWN], "some tensors share their memory"),
        (lambda: [OWN, OWN.to_sparse()], "some tensors are sparse, or of a class that is not torch's"),
        (lambda: [OWN, OWN.as_subclass(Own)], "some tensors are sparse, or of a class that is not torch's"),
    ],
)
def test_what_cannot_be_widened_is_refused_and_left_as_it_is(tensors: Callable[[], Any], says: str) -> None:
    given = tensors()
    with pytest.raises(SessionError, match=exactly(says)):
        WideTensors(given)
    assert all(each.dtype == torch.bfloat16 for each in given if each is not VALUES)


def test_tensors_without_elements_share_no_memory() -> None:
    empty = [torch.empty(0, dtype=torch.bfloat16) for _ in range(2)]
    wide = WideTensors([OWN.clone(), *empty])
    assert {each.dtype for each in empty} == {torch.float32}
    wide.narrow()
    assert memory_of([*empty, OWN.to_sparse(), OWN.as_subclass(Own)]) == set()
    assert memory_of([SHARED[2:], SHARED, OWN]) == {SHARED.data_ptr(), OWN.data_ptr()}


def test_those_before_one_that_refuses_are_narrow_again(monkeypatch: pytest.MonkeyPatch) -> None:
    put, own = WideTensors._put, [OWN.clone() for _ in range(3)]

    def refuses_the_last(self: WideTensors, tensor: torch.Tensor, *values: torch.Tensor) -> None:
        if tensor is own[-1]:
            raise RuntimeError("Cannot set version_counter\nfor inference tensor")
        put(self, tensor, *values)

    monkeypatch.setattr(WideTensors, "_put", refuses_the_last)
    with pytest.raises(SessionError, match=exactly("Cannot set version_counter")):
        WideTensors(own)
    assert [each.dtype for each in own] == [torch.bfloat16] * 3


@pytest.mark.parametrize(
    ("free", "sharing", "takes", "may_take"), [(31 << 20, 1, 16, 15), (63 << 20, 2, 16, 15), (None, 1, 16, 15)]
)
def test_the_copies_of_all_tensors_are_limited_by_the_free_memory(
    free: int | None, sharing: int, takes: int, may_take: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(widening, "free_bytes", lambda device: free)
    monkeypatch.setattr(widening, "_BUDGET", 15 << 20)
    own = [torch.zeros(1 << 21, dtype=torch.bfloat16) for _ in range(2)]
    with pytest.raises(
        SessionError,
        match=exactly(
            f"in float32 its numbers take {takes} MiB on cpu, and a rank may take {may_take} MiB of the free memory "
            "there; free some, or compare a model with fewer layers"
        ),
    ):
        WideTensors(own, sharing=sharing)
    assert [each.dtype for each in own] == [torch.bfloat16] * 2
    monkeypatch.setattr(widening, "free_bytes", lambda device: (32 << 20) * sharing)
    WideTensors(own, sharing=sharing).narrow()


def test_operators_that_round_what_none_has_computed_are_named() -> None:
    weight, number = OWN.clone(), torch.tensor(2.0, dtype=torch.bfloat16)
    with ReadsOf16Bits() as reads:
        _ = VALUES * 2 + number.float()
        _ = number * number
        computed = VALUES.bfloat16()
        _ = torch.exp(computed)
        _ = weight.view(-1).float()
        assert reads.operators == {}
        _ = torch.exp(weight) + computed
        _ = torch.tanh(VALUES)
    assert list(reads.operators) == ["aten::exp"]


def collective(name: str) -> Any:
    return SimpleNamespace(name=lambda: f"c10d::{name}", namespace="c10d")


@pytest.mark.parametrize("name", ["send", "recv_", "recv_any_source_"])
def test_a_rank_that_cannot_continue_in_float32_tells_the_others_why(name: str, tmp_path: Path) -> None:
    first, second = (TrialOfRanks(str(tmp_path / "trial"), rank, 2) for rank in (0, 1))
    reason = f"it sends tensors from rank to rank (c10d::{name})"
    with pytest.raises(SessionError, match=exactly(reason)):
        first.__torch_dispatch__(collective(name), ())
    # The call may have caught the exception.
    with pytest.raises(SessionError, match=exactly(reason)):
        first.__torch_dispatch__(collective("allreduce_"), ())
    second._post("failed: too late")
    assert first.end(None) == reason
    third = TrialOfRanks(str(tmp_path / "trial"), 1, 2)
    assert third.end(None) == f"rank 0 failed: {reason}"
    assert third.end("its own reason") == "its own reason"


def test_ranks_come_to_a_collective_with_tensors_of_the_same_dtypes(tmp_path: Path) -> None:
    trials = [TrialOfRanks(str(tmp_path / "trial"), rank, 2) for rank in (0, 1)]
    given: list[Any] = [([VALUES, [OWN]], {"more": VALUES}), ([VALUES, [OWN]], {"more": OWN})]
    reached = collective("allgather_")

    def come(rank: int) -> str:
        with pytest.raises(SessionError) as refused:
            trials[rank].__torch_dispatch__(reached, (), *given[rank])
        return str(refused.value)

    with ThreadPoolExecutor(2) as pool:
        said = [*pool.map(come, (0, 1))]
    names = [f"'c10d::allgather_ torch.float32 torch.bfloat16 torch.{last}'" for last in ("float32", "bfloat16")]
    assert said == [
        f"rank 1 has reached {names[1]}, and rank 0 {names[0]}",
        f"rank 0 has reached {names[0]}, and rank 1 {names[1]}",
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_moved_alike_by_at_most_four_roundings_and_masks_are_not(dtype: torch.dtype) -> None:
    numbers = torch.linspace(-3, 3, 400)
    state = torch.get_rng_state()
    moved = rounded_at_random(numbers, dtype)
    assert torch.equal(moved, rounded_at_random(numbers, dtype))
    assert torch.equal(torch.get_rng_state(), state)
    roundings = ((moved - numbers) / numbers).abs().nan_to_num() / (torch.finfo(dtype).eps / 2)
    assert 3.5 < roundings.max() <= 4.01
    assert (moved > numbers).any()
    assert (moved < numbers).any()
    assert rounded_at_random(OWN, torch.bfloat16).dtype == torch.float32
    mask = torch.tensor([0.0, -torch.inf], dtype=dtype)
    assert torch.equal(rounded_at_random(mask, dtype), mask.float())
    mask = torch.tensor([0.0, 1.0, 1.0, 0.0], dtype=dtype)
    assert torch.equal(rounded_at_random(mask, dtype), mask.float())
