"""Weights of 8 bits: where their scale is, and what they stand for."""

from __future__ import annotations

import pytest
import torch

from graftlab.base.quantisation import SCALE, by_extras, is_quantised, scale_of

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
    codes = (VALUES / each).to(FP8)
    found = by_extras(codes, {SCALE: 1 / scale if inverse else scale})
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, codes.float() * each)


@pytest.mark.parametrize("shape", [(5, 3), (80,), (48, 80, 1), (0, 1), (7, 1)])
def test_a_scale_of_another_shape_does_not_fit(shape: tuple[int, ...]) -> None:
    codes = VALUES.to(FP8)
    assert by_extras(codes, {SCALE: torch.ones(shape)}) is codes


def test_other_tensors_and_extras_stay_as_they_are() -> None:
    for shown, extras in ((VALUES, {SCALE: torch.ones(1)}), (VALUES.to(FP8), None), (VALUES.to(FP8), {SCALE: 2.0})):
        assert by_extras(shown, extras) is shown
