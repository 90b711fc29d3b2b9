"""Sketches: sums of a tensor's elements under random signs, which show only how far two tensors are apart."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.steps import StepContext, call, check_count

# A recording's file may name any size, and each sum takes memory.
_MOST_SUMS = 1 << 16


@dataclass(frozen=True)
class SignedSums:
    """``size`` sums that stand for a tensor of shape ``of``: element ``i`` is in sum ``i % size``, under a random sign.

    The relative difference of two sketches is about that of the two tensors, whichever elements differ. A sketch
    reveals neither the elements nor their places, so the step cannot be inverted.
    """

    size: int
    of: tuple[int, ...]
    caveat: ClassVar[str | None] = None
    leaves_out: ClassVar[str | None] = "the single elements"

    def __post_init__(self) -> None:
        object.__setattr__(self, "of", tuple(self.of))
        check_count("sketch", "size", self.size)
        if self.size > _MOST_SUMS:
            raise LayoutError(f"sketch: size is {self.size:,}, and at most {_MOST_SUMS:,} sums stand for a tensor")
        for extent in self.of:
            check_count("sketch", "each number in of", extent)

    @property
    def text(self) -> str:
        return call("sketch", size=self.size, of=list(self.of))

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        if tuple(before.shape) != self.of:
            raise LayoutError(
                f"the recording has a sketch of a tensor of shape {list(self.of)}, and this one is {list(before.shape)}"
            )
        flat = before.detach().reshape(-1)
        flat = torch.view_as_real(flat.resolve_conj()).reshape(-1) if flat.is_complex() else flat
        sums = signed_sums(flat.double(), self.size)
        return sums.to(torch.float64 if before.dtype == torch.float64 else torch.float32)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        raise LayoutError(f"a tensor cannot be made from its sketch of {self.size} sums")


def signed_sums(values: Tensor, size: int) -> Tensor:
    """Return ``size`` sums of a vector's elements under random signs, which are the same in every process."""
    signed = values * _signs(values.numel()).to(values.device)
    rows = -(-signed.numel() // size)
    return torch.nn.functional.pad(signed, (0, rows * size - signed.numel())).reshape(rows, size).sum(0)


@functools.lru_cache(maxsize=8)
def _signs(count: int) -> Tensor:
    drawn = torch.randint(
        0, 2, (count,), generator=torch.Generator().manual_seed(count), dtype=torch.int8, device="cpu"
    )
    return drawn.double() * 2 - 1
