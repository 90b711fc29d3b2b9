"""Programs of the zoo in which the target's weights have 8 or 4 bits, and the baseline's are full.

A fault is one mistake beside that; the benign programs quantise and do nothing else.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from graftlab.taps.watch import watch
from graftlab.zoo.programs import benign, draws, fault

_BLOCK = 16
_AREA = "quantised weights"


class Float8Linear(nn.Module):
    """A linear layer of float8 weights with a scale for each block of 16 x 16."""

    weight: Tensor
    weight_scale_inv: Tensor

    def __init__(self, weight: Tensor, wrong: str) -> None:
        super().__init__()
        rows, columns = (size // _BLOCK for size in weight.shape)
        blocks = weight.view(rows, _BLOCK, columns, _BLOCK)
        scale = blocks.abs().amax((1, 3), keepdim=True) / 448
        self.register_buffer("weight", (blocks / scale).view_as(weight).to(torch.float8_e4m3fn))
        self.register_buffer("weight_scale_inv", scale.flatten(0, 1).flatten(1))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        scale = self.weight_scale_inv.T if self.wrong == "transposed scale" else self.weight_scale_inv
        return x @ (self.weight.float() * scale.repeat_interleave(_BLOCK, 0).repeat_interleave(_BLOCK, 1)).T


class Int8Linear(nn.Module):
    """A linear layer of int8 weights with a scale for each row; activations are rounded to int8 for each token."""

    weight: Tensor
    weight_scale: Tensor

    def __init__(self, weight: Tensor, wrong: str) -> None:
        super().__init__()
        scale = weight.abs().amax(1) / 127
        self.register_buffer("weight", (weight / scale[:, None]).round().to(torch.int8))
        self.register_buffer("weight_scale", scale * (1.03 if wrong == "stored scale" else 1.0))
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        largest = x.abs().amax(-1, keepdim=True)
        step = (largest.mean() if self.wrong == "clipped" else largest) / 127
        levels = (x / step).round().clamp(-128, 127)
        return (levels @ self.weight.float().T) * step * self.weight_scale


class PackedLinear(nn.Module):
    """A linear layer of unsigned numbers of 4 bits, two in a byte, with a scale and a zero point for each row."""

    qweight: Tensor
    qzeros: Tensor
    scales: Tensor

    def __init__(self, weight: Tensor, wrong: str) -> None:
        super().__init__()
        low, high = weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
        scale = (high - low) / 15
        zero = (-low / scale).round()
        codes = (weight / scale + zero).round().clamp(0, 15).to(torch.uint8)
        self.register_buffer("qweight", codes[:, ::2] | codes[:, 1::2] << 4)
        self.register_buffer("qzeros", zero.to(torch.uint8))
        self.register_buffer("scales", scale)
        self.wrong = wrong

    def forward(self, x: Tensor) -> Tensor:
        low, high = self.qweight & 15, self.qweight >> 4
        codes = torch.stack([high, low] if self.wrong == "order" else [low, high], -1).flatten(1).float()
        zero = self.qzeros.float() + (1 if self.wrong == "zero" else 0)
        return x @ ((codes - zero) * self.scales).T


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up: nn.Module = nn.Linear(64, 64, bias=False)
        self.down: nn.Module = nn.Linear(64, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.down(F.gelu(self.up(self.norm(x))))
        return x + added


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Block() for _ in range(4))
        self.norm = nn.LayerNorm(64)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        normed: Tensor = self.norm(x)
        return normed


def _run(seed: int, kind: Callable[[Tensor, str], nn.Module] | None, wrong: str = "") -> object:
    """Run a watched model of four blocks, whose layers are of this ``kind``, and one of them ``wrong``."""
    draw, model = draws(seed), _Model()
    for weight in model.parameters():
        weight.copy_(draw(*weight.shape) + (1 if weight.ndim == 1 else 0))
    if kind is not None:
        for number, block in enumerate(model.layers):
            for name in ("up", "down"):
                is_wrong = (number, name) == (2, "down")
                setattr(block, name, kind(getattr(block, name).weight, wrong if is_wrong else ""))
    with watch(model, params=True):
        return model(draw(8, 64) * 8)


@fault(_AREA, "layers.*.down")
def float8_scales_read_by_columns(wrong: bool) -> object:
    """The scales of one layer's blocks are transposed where it computes."""
    return _run(80, Float8Linear if wrong else None, "transposed scale")


@fault(_AREA, "layers.*.down")
def int8_scale_stored_too_large(wrong: bool) -> object:
    """The stored scale of one layer is 3 % too large."""
    return _run(81, Int8Linear if wrong else None, "stored scale")


@fault(_AREA, "layers.*.down")
def int8_activations_clipped(wrong: bool) -> object:
    """One layer rounds its activations with one scale for all tokens, which clips the largest."""
    return _run(82, Int8Linear if wrong else None, "clipped")


@fault(_AREA, "layers.*.down")
def packed_numbers_in_the_other_order(wrong: bool) -> object:
    """One layer takes the upper half of each byte first."""
    return _run(83, PackedLinear if wrong else None, "order")


@fault(_AREA, "layers.*.down")
def packed_zero_point_off_by_one(wrong: bool) -> object:
    """One layer adds 1 to the stored zero point, as for files of an older format."""
    return _run(84, PackedLinear if wrong else None, "zero")


@benign(_AREA)
def weights_in_float8(changed: bool) -> object:
    """float8 with a scale for each block."""
    return _run(85, Float8Linear if changed else None)


@benign(_AREA)
def weights_and_activations_in_int8(changed: bool) -> object:
    """int8 with a scale for each row and each token."""
    return _run(86, Int8Linear if changed else None)


@benign(_AREA)
def weights_packed_in_4_bits(changed: bool) -> object:
    """4 bits with a zero point for each row."""
    return _run(87, PackedLinear if changed else None)
