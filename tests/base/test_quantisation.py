"""Weights of 8 bits: where their scale is, and what they stand for."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest
import torch
from kit.int8_tensor import Int8Tensor

from graftlab.base.quantisation import (
    CODES,
    SCALE,
    by_extras,
    codes_of,
    dequantised,
    is_quantised,
    numbers_of,
    scale_of,
    stored_codes,
    weight_tap,
)

FP8 = torch.float8_e4m3fn
VALUES = torch.randn(48, 80, generator=torch.Generator().manual_seed(0))


def test_codes_are_floats_and_integers_of_8_bits() -> None:
    dtypes = [torch.int8, torch.uint8, FP8, torch.float8_e5m2, torch.bool, torch.int32, torch.float16]
    assert [is_quantised(dtype) for dtype in dtypes] == [True, True, True, True, False, False, False]


@pytest.mark.parametrize(
    "name", ["weight_scale_inv", "weight_scale", "weight_scales", "scale_weight", "scale", "scales"]
)
@pytest.mark.parametrize("owner", ["", "layers.0.up."])
def test_a_scale_is_found_beside_its_weight(owner: str, name: str) -> None:
    tensors = {f"{owner}weight": torch.zeros(2, 2, dtype=torch.int8), f"{owner}{name}": torch.ones(1)}
    assert scale_of(f"{owner}weight", tensors) is tensors[f"{owner}{name}"]
    assert scale_of(f"{owner}{name}", tensors) is None


def test_without_a_scale_or_with_a_zero_point_nothing_is_found() -> None:
    codes = torch.zeros(2, 2, dtype=torch.int8)
    assert scale_of("up.weight", {"up.weight": codes, "down.weight_scale": torch.ones(1)}) is None
    assert scale_of("weight", {"weight": codes, "scale": torch.ones(1), "zero_point": torch.zeros(1)}) is None
    assert scale_of("weight", {"weight": codes.float(), "scale": torch.ones(1)}) is None


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize(
    ("shape", "block"),
    [((), (48, 80)), ((48,), (1, 80)), ((48, 1), (1, 80)), ((3, 5), (16, 16)), ((2, 3), (32, 32)), ((3, 20), (16, 4))],
)
def test_each_number_is_multiplied_by_the_scale_of_its_block(
    shape: tuple[int, ...], block: tuple[int, int], inverse: bool
) -> None:
    """Blocks at the end may be smaller: 48 are one and a half blocks of 32."""
    scale = (torch.rand(shape, generator=torch.Generator().manual_seed(1)) + 0.5) / 100
    places = torch.arange(48)[:, None] // block[0], torch.arange(80)[None] // block[1]
    each = scale if scale.numel() == 1 else scale.view(len(scale), -1)[places]
    # Older releases of torch make NaN of larger numbers.
    codes = (VALUES / each).clamp(-448, 448).to(FP8)
    found = by_extras(codes, {SCALE: 1 / scale if inverse else scale})
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, codes.float() * each)


def test_a_scale_of_either_sign_divides_if_it_is_above_one() -> None:
    codes = torch.tensor([[2.0], [4.0]]).to(FP8)
    for scale, expected in (([-4.0, 2.0], [[-0.5], [2.0]]), ([-0.25, 0.5], [[-0.5], [2.0]])):
        assert by_extras(codes, {SCALE: torch.tensor(scale)}).tolist() == expected


def test_a_weights_scale_is_shown_without_its_graph() -> None:
    weight, scale = VALUES.to(FP8), torch.nn.Parameter(torch.tensor(0.5))
    shown, extras = weight_tap("q.weight", {"q.weight": weight, "q.weight_scale": scale})
    assert shown is weight
    assert extras is not None
    assert (extras[SCALE].requires_grad, extras[SCALE].tolist()) == (False, 0.5)


@pytest.mark.parametrize("shape", [(5, 3), (80,), (3,), (48, 80, 1), (0, 1), (7, 1)])
def test_a_scale_of_another_shape_does_not_fit(shape: tuple[int, ...]) -> None:
    codes = VALUES.to(FP8)
    assert by_extras(codes, {SCALE: torch.ones(shape)}) is codes


def test_other_tensors_and_extras_stay_as_they_are() -> None:
    for shown, extras in ((VALUES, {SCALE: torch.ones(1)}), (VALUES.to(FP8), None), (VALUES.to(FP8), {SCALE: 2.0})):
        assert by_extras(shown, extras) is shown


def test_the_weight_of_a_class_that_stores_codes_shows_its_numbers() -> None:
    weight = torch.nn.Parameter(Int8Tensor.of(VALUES), requires_grad=False)
    shown, extras = weight_tap("up.weight", {"up.weight": weight})
    assert extras == {CODES: "int8"}
    numbers = shown()
    assert type(numbers) is torch.Tensor
    torch.testing.assert_close(numbers, VALUES, atol=float(VALUES.abs().max()) / 127, rtol=0)
    assert codes_of(numbers, extras) == "int8"
    assert torch.equal(numbers_of("up.weight", {"up.weight": weight}), numbers)


def test_the_numbers_are_not_computed_before_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    computed = []
    monkeypatch.setattr(Int8Tensor, "dequantize", lambda self: computed.append(self))
    weight_tap("weight", {"weight": Int8Tensor.of(VALUES)})
    assert computed == []


# torch will remove these dtypes.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("dtype", "codes"), [(torch.qint8, torch.int8), (torch.quint8, torch.uint8)])
def test_the_codes_of_torchs_own_quantised_tensors_are_known(dtype: torch.dtype, codes: torch.dtype) -> None:
    weight = torch.quantize_per_tensor(VALUES, 0.05, 3, dtype)
    assert stored_codes(weight) == codes
    assert torch.equal(dequantised(weight), weight.dequantize())


def test_float8_codes_in_a_class_keep_their_name() -> None:
    assert stored_codes(Int8Tensor(VALUES.to(FP8), torch.ones(48, 1))) == FP8
    # Their packed codes may have any dtype.
    assert stored_codes(Int8Tensor(torch.zeros(48, 10, dtype=torch.int32), torch.ones(48, 1))) == torch.int8
    assert stored_codes(Int8Tensor(torch.zeros(48, 40, dtype=torch.uint8), torch.ones(48, 1))) == torch.int8


def test_numbers_of_4_bits_come_from_the_library_that_packed_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """bitsandbytes keeps what it needs in an attribute, which ``detach`` loses."""
    library = SimpleNamespace(functional=SimpleNamespace(dequantize_4bit=lambda data, state: (data * state).float()))
    monkeypatch.setitem(sys.modules, "bitsandbytes", library)
    weight = torch.nn.Parameter(torch.arange(4, dtype=torch.uint8), requires_grad=False)
    assert stored_codes(weight) is None
    weight.quant_state = 2  # type: ignore[attr-defined]
    assert stored_codes(weight) == torch.uint8
    assert dequantised(weight).tolist() == [0, 2, 4, 6]


def test_plain_weights_are_shown_as_they_are() -> None:
    plain = torch.nn.Parameter(VALUES)
    assert weight_tap("weight", {"weight": plain}) == (plain, None)
    codes, scale = VALUES.to(FP8), torch.ones(1)
    shown, extras = weight_tap("weight", {"weight": codes, "weight_scale": scale})
    assert shown is codes
    assert extras is not None
    assert torch.equal(extras[SCALE], scale)
    assert codes_of(codes, extras) == "float8_e4m3fn"
    assert codes_of(VALUES, None) is None
    assert codes_of(VALUES, {"other": 1}) is None
