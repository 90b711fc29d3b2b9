"""Code in float64: no rounding between operators, and writes keep the dtype of their tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.grafters import GrafterWorld
from torch import Tensor, nn

import graftlab as gl
from graftlab.grafting.in_float64 import as_it_is, in_float64
from graftlab.grafting.self_graft import graft_self, rounded_results
from graftlab.taps import calls

NARROW = [torch.bfloat16, torch.float16, torch.float32]


@pytest.mark.parametrize("dtype", NARROW)
def test_nothing_is_rounded_between_operators(dtype: torch.dtype) -> None:
    x = torch.linspace(0.5, 2.0, 50).to(dtype)

    def function(x: Tensor) -> Tensor:
        for _ in range(20):
            x = (x * 1.01).to(dtype) + 0.001
        return torch.nn.functional.softmax(x, -1, dtype=torch.float32)

    with in_float64():
        found = function(x)
    wide = x.double()
    for _ in range(20):
        wide = wide * 1.01 + 0.001
    torch.testing.assert_close(found, wide.softmax(-1))
    assert found.dtype == torch.float64
    assert function(x).dtype == torch.float32


def test_a_model_and_its_gradients_come_out_wide_and_its_weights_stay_as_they_are() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).bfloat16()
    tokens = torch.arange(6).view(2, 3)
    with in_float64():
        out = model(tokens)
        out.square().sum().backward()
    # Gradients have their weights' dtype, as autograd casts them.
    assert {parameter.grad.dtype for parameter in model.parameters() if parameter.grad is not None} == {torch.bfloat16}
    twin = nn.Sequential(nn.Embedding(7, 8), nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)).double()
    twin.load_state_dict(model.state_dict())
    torch.testing.assert_close(out, twin(tokens), rtol=1e-12, atol=1e-14)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}


def test_dtypes_of_16_bits_are_noted_as_operators_read_and_leave_them() -> None:
    weight, cache = torch.ones(2, 2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.float16)
    with in_float64() as coarse:
        torch.nn.functional.embedding(torch.tensor([0]), weight)
        torch.ones(2).add(1)
        assert (coarse.read, coarse.left) == ({"bfloat16"}, set())
        weight[0].mul(2)
        with as_it_is():
            cache.add(1)
        assert (coarse.read, coarse.left) == ({"bfloat16"}, set())
        cache.add_(1)
    assert (coarse.read, coarse.left) == ({"bfloat16", "float16"}, {"float16"})


def test_new_tensors_of_16_bits_are_wide_unless_16_bits_would_round_them() -> None:
    made: dict[str, Callable[[], Tensor]] = {
        "mask": lambda: torch.full((2, 2), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16).triu(1),
        "positions": lambda: torch.arange(256).to(torch.bfloat16),
        "room": lambda: torch.empty(3, dtype=torch.float16),
        "room_like": lambda: torch.ones(3, dtype=torch.int64).new_empty(3, dtype=torch.bfloat16),
    }
    for name, make in made.items():
        with in_float64() as coarse:
            found = make()
        assert (found.dtype, coarse.left) == (torch.float64, set()), name
        if "room" not in name:
            assert torch.equal(found, make().double())
    # What is written there is not rounded.
    with in_float64():
        room = torch.empty(1, dtype=torch.bfloat16)
        room[:] = torch.ones(1) / 3
    assert room.item() == pytest.approx(1 / 3, rel=1e-7)
    for rounded in (lambda: torch.arange(300).to(torch.bfloat16), lambda: torch.full((2,), 0.1, dtype=torch.bfloat16)):
        with in_float64() as coarse:
            found = rounded()
        assert (found.dtype, coarse.left) == (torch.bfloat16, {"bfloat16"})
        assert torch.equal(found, rounded())


def test_new_tensors_of_float32_are_wide_with_the_same_values_if_asked() -> None:
    made: dict[str, Callable[[], Tensor]] = {
        "zeros": lambda: torch.zeros(2, 3),
        "positions": lambda: torch.arange(5).float(),
        "rounded": lambda: torch.full((2,), 0.1),
        "grid": lambda: torch.linspace(0, 1, 7),
    }
    for name, make in made.items():
        with in_float64():
            kept = make()
        with in_float64(widens_new=True):
            found = make()
        assert (kept.dtype, found.dtype) == (torch.float32, torch.float64), name
        assert torch.equal(found, make().double()), name
    conv = torch.nn.Conv1d(1, 1, 1).double()
    with in_float64(widens_new=True):
        assert conv(torch.zeros(1, 1, 2)).dtype == torch.float64


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_new_tensors_whose_values_cannot_be_compared_are_made_as_before() -> None:
    rows = [torch.tensor([1]), torch.tensor([1, 2])]
    made: dict[str, Callable[[], Tensor]] = {
        "meta": lambda: torch.zeros(3, dtype=torch.bfloat16, device="meta"),
        "sparse": lambda: torch.zeros(3, 3, dtype=torch.bfloat16, layout=torch.sparse_coo),
        "jagged": lambda: torch.nested.nested_tensor(rows, layout=torch.jagged).to(torch.bfloat16),
        "nested": lambda: torch.nested.nested_tensor(rows, layout=torch.strided).to(torch.bfloat16),
    }
    for name, make in made.items():
        with in_float64() as coarse:
            found = make()
        assert (found.dtype, coarse.left) == (torch.bfloat16, {"bfloat16"}), name


@torch.library.custom_op("graftlab_in_float64::scaled", mutates_args=("out",))
def write_scaled(out: Tensor, x: Tensor, weight: Tensor) -> None:
    out.copy_(x.to(weight.dtype) * weight)


def test_what_a_custom_operator_may_round_before_it_writes_is_noted_as_left() -> None:
    weight, exact = torch.ones(2, dtype=torch.bfloat16), torch.ones(2)
    with in_float64() as coarse:
        x = torch.ones(2).div(3)
        write_scaled(torch.empty(2, dtype=torch.bfloat16), x, exact)
        assert coarse.left == set()
        write_scaled(torch.empty(2, dtype=torch.bfloat16), x, weight)
    assert coarse.left == {"bfloat16"}


def test_what_is_read_in_16_bits_into_a_wide_tensor_is_not_left_so() -> None:
    weight = torch.ones(2, dtype=torch.bfloat16)
    with in_float64() as coarse:
        wide = torch.ones(2) * 2
        wide.add_(weight)
    assert (coarse.read, coarse.left, wide.dtype) == ({"bfloat16"}, set(), torch.float64)


def test_what_is_stored_is_still_rounded_if_asked_and_what_is_computed_is_not() -> None:
    stored = torch.tensor([1 / 3])
    with in_float64(rounds_stored=True) as coarse:
        # Also where the baseline is measured within such a run.
        with in_float64():
            assert stored.to(torch.bfloat16).dtype == torch.bfloat16
        assert stored.to(torch.bfloat16).dtype == torch.bfloat16
        assert (stored * 1).to(torch.bfloat16).dtype == torch.float64
    assert not coarse.left
    with in_float64():
        assert stored.to(torch.bfloat16).dtype == torch.float64


def test_write_into_an_existing_tensor_keeps_its_dtype() -> None:
    cache = torch.zeros(4, 2, dtype=torch.bfloat16)
    sums, picks = torch.zeros(2, dtype=torch.bfloat16), torch.zeros(3)
    x = torch.full((2, 2), 1 / 3, dtype=torch.bfloat16)
    with in_float64():
        y = x * 3
        cache.view(2, 2, 2)[1] = y
        cache[0].add_(y[0])
        cache.index_put_((torch.tensor([1]),), y[:1])
        torch.mm(y, x, out=cache[2:])
        sums += y.sum(0)
        picks.index_add_(0, torch.tensor([1]), y[0, :1])
        torch._foreach_add_([sums], [y[0]])
        y.mul_(x)
    assert (cache.dtype, sums.dtype, picks.dtype, y.dtype) == (
        torch.bfloat16,
        torch.bfloat16,
        torch.float32,
        torch.float64,
    )
    third = x[0, 0].double().item()
    product = torch.mm((x.double() * 3).bfloat16(), x)
    assert cache[:2].tolist() == [[pytest.approx(3 * third, rel=4e-3)] * 2] * 2
    torch.testing.assert_close(cache[2:], product)
    assert sums.tolist() == [pytest.approx(9 * third, rel=8e-3)] * 2
    assert picks[1].item() == pytest.approx(3 * third)
    assert y[0, 0].item() == 3 * third * third


@pytest.mark.parametrize(
    "draws",
    [
        lambda x: torch.nn.functional.dropout(x, 0.5),
        torch.rand_like,
        lambda x: torch.multinomial(x, 2),
        lambda x: torch.rand(3),
    ],
)
def test_random_numbers_are_those_of_the_run_before(draws: Callable[[Tensor], Tensor]) -> None:
    x = torch.linspace(1, 2, 8)
    torch.manual_seed(5)
    expected = draws(x)
    torch.manual_seed(5)
    with in_float64():
        found = draws(x)
    torch.testing.assert_close(found, expected, check_dtype=False)


def test_complex_numbers_integers_and_lists_of_tensors_are_wide_too_or_as_they_were() -> None:
    x = torch.linspace(0, 1, 6)
    with in_float64():
        turned = torch.polar(x, x) * torch.view_as_complex(torch.ones(6, 2))
        joined = torch.cat([x.bfloat16(), x])
        picked = torch.arange(6)[x > 0.5]
        counted = torch.bucketize(x, torch.tensor([0.25, 0.5]))
    assert (turned.dtype, joined.dtype) == (torch.complex128, torch.float64)
    assert (picked.dtype, counted.dtype) == (torch.int64, torch.int64)
    assert joined[6:].equal(x.double())


def test_operator_without_float64_runs_unchanged() -> None:
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    quantized = torch.ones(64, 64, dtype=torch.int8)
    scales = torch.ones(64, dtype=torch.bfloat16)
    with in_float64():
        assert torch._weight_int8pack_mm(x, quantized, scales).tolist() == [[64.0] * 64] * 2
        assert torch._weight_int8pack_mm(x * 2, quantized, scales).tolist() == [[128.0] * 64] * 2


def test_operators_are_as_they_are_where_that_is_asked_for_and_afterwards() -> None:
    x = torch.ones(2)
    with in_float64():
        with as_it_is():
            with as_it_is():
                pass
            assert (x + 1).dtype == torch.float32
        assert (x + 1).dtype == torch.float64
    assert (x + 1).dtype == torch.float32


# ---- before a grafter -----------------------------------------------------------------------------------------------


@pytest.fixture
def rank(monkeypatch: pytest.MonkeyPatch) -> GrafterWorld:
    """This process taps as a baseline's rank does."""
    world = GrafterWorld(1, 1)
    monkeypatch.setattr(calls, "_grafter", world.baseline.grafter)
    monkeypatch.setattr(calls, "_handler", world.baseline.grafter)
    return world


def small_steps(x: Tensor) -> Tensor:
    x = gl.tap("x", x)
    for _ in range(50):
        x = x * 1.001
    return gl.tap("y", lambda: x) if x.dtype == torch.int8 else gl.tap("y", x)


def test_distance_from_float64_shows_rounding_within_a_tap(rank: GrafterWorld) -> None:
    x = torch.full((100,), 1.5, dtype=torch.bfloat16)

    def exact() -> Any:
        with in_float64():
            return small_steps(x)

    found = graft_self(lambda: small_steps(x), None, budget=1 << 20, exact=exact)
    [at_x, at_y] = found.exact
    assert (at_x.name, at_x.rel_l2) == ("x", 0.0)
    assert at_y.rel_l2 == pytest.approx(1.001**50 - 1, rel=1e-2)


def test_results_are_moved_and_exact_and_the_grafter_hears_nothing_of_it(rank: GrafterWorld) -> None:
    x = torch.full((100,), 1.5, dtype=torch.bfloat16)
    found = rounded_results(lambda: small_steps(x), budget=1 << 20)
    assert found.error is None
    steps = (found.moved.double() - 1.5).abs()
    assert steps.max() <= 4 * torch.finfo(torch.bfloat16).eps
    assert steps.min() > 0 or steps.mean() > 0
    torch.testing.assert_close(found.exact, torch.full((100,), 1.5 * 1.001**50, dtype=torch.float64))
    rank.end()
    assert rank.rows == []


def test_code_that_requires_a_dtype_is_reported_in_one_line(rank: GrafterWorld) -> None:
    def insists() -> Tensor:
        y = torch.ones(2) * 2
        if y.dtype != torch.float32:
            raise TypeError("\nfloat32 only\nand no other")
        return y

    found = rounded_results(insists, budget=1 << 20)
    assert (found.exact, found.error) == (None, "TypeError: float32 only")
    assert found.moved.tolist() == [2.0, 2.0]
