"""A grafted value replaces the model's own: exactly, in place where possible, and for autograd too."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.tensors import COPYABLE, PLAIN_LAYOUTS, bits, layouts, random_bits

from graftlab.grafting.overwrite import OverwrittenTensors, may_overlap, overwrite, replacement_for

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

Graft = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
NAN = float("nan")


def in_place(own: torch.Tensor, received: torch.Tensor) -> torch.Tensor:
    """As ``gl.tap`` does where it overwrites."""
    result, note = overwrite(own, received)
    assert result is own
    assert note is None
    return result


BOTH = pytest.mark.parametrize("graft", [in_place, replacement_for])

# ---- the value ------------------------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("dtype", COPYABLE, ids=str)
def test_every_dtype_is_grafted_bit_exact_into_every_layout(graft: Graft, dtype: torch.dtype) -> None:
    for name in PLAIN_LAYOUTS:
        own = layouts(dtype)[name]
        received = random_bits(dtype, *own.shape, seed=8)
        result = graft(own, received)
        assert (result.shape, result.dtype) == (own.shape, own.dtype), name
        assert torch.equal(bits(result), bits(received)), name


@BOTH
def test_different_dtype_is_converted(graft: Graft) -> None:
    result = graft(torch.zeros(3, dtype=torch.bfloat16), torch.tensor([1.0, 1e39, NAN], dtype=torch.float64))
    assert result.dtype is torch.bfloat16
    assert result[:2].tolist() == [1.0, float("inf")]
    assert result[2].isnan()


@BOTH
def test_received_tensor_may_change_after_the_graft(graft: Graft) -> None:
    received = torch.ones(3)
    result = graft(torch.zeros(3), received)
    received.fill_(9.0)
    assert result.tolist() == [1.0, 1.0, 1.0]


@BOTH
def test_conjugated_views_are_overwritten_with_the_right_value(graft: Graft) -> None:
    received = torch.tensor([1 + 2j, 3 - 4j])
    assert graft(torch.zeros(2, dtype=torch.complex64).conj(), received).tolist() == [1 + 2j, 3 - 4j]
    assert graft(torch.zeros(2, dtype=torch.complex64), received.conj()).tolist() == [1 - 2j, 3 + 4j]


# ---- in place -------------------------------------------------------------------------------------------------------


def test_views_write_through_to_their_base() -> None:
    qkv = torch.zeros(2, 9)
    query, key, _ = qkv.split(3, dim=1)
    in_place(key.t(), torch.arange(6.0).view(3, 2))
    assert qkv.tolist() == [[0, 0, 0, 0, 2, 4, 0, 0, 0], [0, 0, 0, 1, 3, 5, 0, 0, 0]]
    assert query.tolist() == [[0, 0, 0], [0, 0, 0]]


def test_expanded_tensor_is_overwritten_if_all_its_places_agree() -> None:
    for value in (2.0, NAN):
        base = torch.zeros(2, 1)
        in_place(base.expand(2, 3), torch.tensor([[1.0] * 3, [value] * 3]))
        assert torch.equal(base.nan_to_num(-1.0), torch.tensor([[1.0], [value]]).nan_to_num(-1.0))


@pytest.mark.parametrize("received", [[[1.0, 2.0, 3.0]] * 2, [[1.0, NAN, 1.0]] * 2, [[NAN, 1.0, 1.0]] * 2], ids=str)
def test_returned_tensor_has_values_that_an_expanded_one_cannot(
    received: list[list[float]],
) -> None:
    base = torch.zeros(2, 1)
    result, note = overwrite(base.expand(2, 3), torch.tensor(received))
    assert torch.equal(bits(result), bits(torch.tensor(received)))
    assert note is not None
    assert "only gl.tap's result carries the graft" in note
    assert base.tolist() == [[0.0], [0.0]]


def test_overlapping_windows_are_overwritten_if_the_overlaps_agree() -> None:
    base, signal = torch.zeros(6), torch.tensor([1.0, 2.0, NAN, 4.0, 5.0, 6.0])
    in_place(base.unfold(0, 3, 1), signal.unfold(0, 3, 1))
    assert torch.equal(bits(base), bits(signal))


@pytest.mark.parametrize(
    ("tensor", "overlaps"),
    [
        (torch.zeros(3, 4), False),
        (torch.zeros(4, 3).T, False),
        (torch.zeros(8)[::2], False),
        (torch.zeros(1).expand(3), True),
        (torch.zeros(1).expand(1), False),
        (torch.zeros(7).unfold(0, 3, 1), True),
        # Each window begins with the last number of the one before it.
        (torch.zeros(7).unfold(0, 3, 2), True),
        (torch.zeros(7).unfold(0, 3, 3), False),
    ],
)
def test_numbers_that_share_a_place_are_known_by_the_strides(tensor: torch.Tensor, overlaps: bool) -> None:
    assert may_overlap(tensor) == overlaps


def test_tensors_are_restored_to_their_first_values_the_last_overwritten_first() -> None:
    whole = torch.tensor([1.0, 2.0, 3.0])
    before = OverwrittenTensors()
    before.remember(whole)
    whole.fill_(5.0)
    before.remember(whole)
    before.remember(whole[:2])
    whole.fill_(7.0)
    before.restore()
    assert whole.tolist() == [1.0, 2.0, 3.0]
    # Nothing is restored twice.
    whole.fill_(9.0)
    before.restore()
    assert whole.tolist() == [9.0] * 3


def test_returned_tensor_has_values_that_overlapping_windows_cannot() -> None:
    base = torch.arange(6.0)
    received = torch.arange(12.0).view(4, 3)
    result, note = overwrite(base.unfold(0, 3, 1), received)
    assert torch.equal(result, received)
    assert note is not None
    assert base.tolist() == [0, 1, 2, 3, 4, 5]


@given(st.data())
def test_any_view_is_overwritten_completely_or_not_at_all(data: st.DataObject) -> None:
    base = torch.arange(120.0)
    shape = data.draw(st.lists(st.integers(0, 4), max_size=3))
    strides = data.draw(st.lists(st.integers(0, 13), min_size=len(shape), max_size=len(shape)))
    own = base.as_strided(shape, strides, data.draw(st.integers(0, 20)))
    received = torch.randint(0, 3, shape, generator=torch.Generator().manual_seed(data.draw(st.integers(0, 9)))).float()
    before = base.clone()
    result, note = overwrite(own, received)
    assert torch.equal(result, received)
    if note is None:
        assert result is own
        outside = torch.ones(120, dtype=torch.bool)
        outside.as_strided(shape, strides, own.storage_offset()).fill_(False)
        assert torch.equal(base[outside], before[outside])
    else:
        assert torch.equal(base, before)


@pytest.mark.parametrize("made_in_inference", [True, False])
@pytest.mark.parametrize("written_in_inference", [True, False])
@BOTH
def test_tensors_of_either_inference_mode_can_be_grafted_in_either(
    graft: Graft, made_in_inference: bool, written_in_inference: bool
) -> None:
    with torch.inference_mode(made_in_inference):
        own = torch.zeros(3)
    with torch.inference_mode(written_in_inference):
        result = graft(own, torch.ones(3))
    assert result.tolist() == [1.0, 1.0, 1.0]
    assert own.is_inference() == made_in_inference


def test_an_expanded_inference_tensor_can_be_written_outside_inference_mode() -> None:
    with torch.inference_mode():
        base = torch.zeros(2, 1)
        own = base.expand(2, 3)
    in_place(own, torch.ones(2, 3))
    assert base.tolist() == [[1.0], [1.0]]


# ---- a tensor in its place ------------------------------------------------------------------------------------------


def test_replacement_does_not_change_the_models_tensor() -> None:
    base = torch.zeros(4, 4)
    result = replacement_for(base[1:3].t(), torch.ones(4, 2))
    result.add_(1.0)
    assert base.tolist() == [[0.0] * 4] * 4


@pytest.mark.parametrize("name", ["contiguous", "transposed", "permuted"])
@pytest.mark.parametrize("requires_grad", [False, True])
def test_a_replacement_has_the_strides_that_views_after_the_tap_rely_on(name: str, requires_grad: bool) -> None:
    own = layouts(torch.float32)[name].requires_grad_(requires_grad) * 1
    assert replacement_for(own, torch.zeros(own.shape)).stride() == own.stride()


@pytest.mark.parametrize("requires_grad", [False, True])
def test_replacement_may_be_changed_in_place_later(requires_grad: bool) -> None:
    x = torch.full((3,), 2.0, requires_grad=requires_grad)
    result = replacement_for(x * 3, torch.tensor([-1.0, 0.5, 1.0]))
    torch.nn.functional.relu(result, inplace=True)
    assert result.tolist() == [0.0, 0.5, 1.0]
    if requires_grad:
        result.sum().backward()
        assert x.grad is not None
        assert x.grad.tolist() == [0.0, 3.0, 3.0]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_grad_mode_a_replacement_is_a_plain_tensor(
    mode: Callable[[], contextlib.AbstractContextManager[None]],
) -> None:
    h = torch.ones(3, requires_grad=True) * 2
    with mode():
        assert not replacement_for(h, torch.zeros(3)).requires_grad
    assert not replacement_for(torch.ones(3), torch.zeros(3)).requires_grad


# ---- autograd -------------------------------------------------------------------------------------------------------


def gradients(graft: Graft | None, layout: Callable[[torch.Tensor], torch.Tensor], rest: str) -> list[torch.Tensor]:
    """Of every parameter before and after the tap, the loss and the grafted value being the same each time."""
    generator = torch.Generator().manual_seed(1)
    x, weight, after = (torch.randn(4, 4, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3))
    h = layout(x @ weight)
    received = torch.randn(h.shape, generator=generator, dtype=torch.float64)
    grafted = h + (received - h).detach() if graft is None else graft(h, received)
    loss = grafted @ after if rest == "linear" else grafted**2 * after
    loss.sum().backward()
    assert torch.allclose(grafted, received, rtol=0, atol=1e-14)
    return [each.grad if each.grad is not None else torch.zeros(()) for each in (x, weight, after)]


LAYOUTS = {
    "contiguous": lambda h: h,
    "transposed": lambda h: h.t(),
    "a slice": lambda h: h[:, 1:3].repeat(1, 2)[:, :4],
    "a view of a larger tensor": lambda h: torch.cat([h, h], dim=1)[:, 2:6],
}


@BOTH
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("rest", ["linear", "squared"])
def test_upstream_gradients_are_those_of_h_plus_the_detached_difference(graft: Graft, layout: str, rest: str) -> None:
    expected = gradients(None, LAYOUTS[layout], rest)
    for one, other in zip(gradients(graft, LAYOUTS[layout], rest), expected, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    assert all(float(each.abs().sum()) > 0 for each in expected)


def test_an_expanded_tensors_gradient_is_that_of_the_detached_difference() -> None:
    x = torch.ones(1, requires_grad=True)
    result, _ = overwrite((x * 3).expand(3), torch.tensor([1.0, 2.0, 3.0]))
    (result * torch.tensor([1.0, 10.0, 100.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [333.0]


def test_earlier_op_runs_backward_with_the_grafted_value() -> None:
    x = torch.tensor([0.0, 1.0], requires_grad=True)
    h = x.exp()  # saves what it returns
    saved = h * h  # saves what it is given
    in_place(h, torch.tensor([5.0, 7.0]))
    (h + saved).sum().backward()
    # As if exp had produced the grafted value: d(h + h^2)/dx = (1 + 2 h) * h.
    assert x.grad is not None
    assert x.grad.tolist() == [11.0 * 5.0, 15.0 * 7.0]


def test_a_replacement_changes_nothing_that_an_earlier_op_saved() -> None:
    x = torch.tensor([0.0], requires_grad=True)
    h = x.exp()
    replacement_for(h, torch.tensor([5.0])).sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [1.0]


@BOTH
def test_a_leaf_that_requires_grad_can_be_grafted(graft: Graft) -> None:
    weight = torch.nn.Parameter(torch.zeros(3))
    result = graft(weight, torch.tensor([1.0, 2.0, 3.0]))
    (result**2).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0, 4.0, 6.0]
    assert weight.is_leaf
    assert isinstance(weight, torch.nn.Parameter)
    assert weight.tolist() == ([1.0, 2.0, 3.0] if graft is in_place else [0.0, 0.0, 0.0])


def test_one_of_several_outputs_of_an_op_can_be_grafted() -> None:
    x = torch.ones(4, requires_grad=True)
    one, other = (x * 2).chunk(2)
    in_place(one, torch.full((2,), 7.0))
    (one.sum() + 10 * other.sum()).backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0, 2.0, 20.0, 20.0]


@BOTH
def test_a_graft_in_grad_mode_makes_nothing_require_grad_that_did_not(graft: Graft) -> None:
    assert not graft(torch.zeros(3), torch.ones(3)).requires_grad


@BOTH
def test_gradients_of_gradients_pass_too(graft: Graft) -> None:
    x = torch.tensor([2.0], requires_grad=True)
    (first,) = torch.autograd.grad((graft(x * 3, torch.tensor([5.0])) * x**2).sum(), x, create_graph=True)
    # d/dx (g x^2) with g = 5 and dg/dx = 3: 3 x^2 + 10 x; again: 6 x + 10 + 3 * 2 x.
    assert first.tolist() == [32.0]
    (second,) = torch.autograd.grad(first, x)
    assert second.tolist() == [34.0]
