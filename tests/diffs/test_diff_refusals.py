"""What cannot be compared: all of what is said, with the values of both sides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from kit.refusals import ids, refusal

from graftlab.diffs.maps import resolve_dims
from graftlab.diffs.measure import measure

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: measure(torch.zeros(2, 3), torch.zeros(3, 2)),
        "the baseline has shape [2, 3] and the target [3, 2]; only tensors of one shape can be "
        "compared, so convert one to the other's shape first",
    ),
    (
        lambda: measure(torch.zeros(2), torch.zeros(2, device="meta")),
        "the baseline is on cpu and the target on meta; move one with .to(device) first",
    ),
    (
        lambda: measure(torch.zeros(2, device="meta"), torch.zeros(2, device="meta")),
        "the baseline is meta; only dense tensors are measured (.to_dense(), .dequantize())",
    ),
    (
        lambda: measure(torch.zeros(2), torch.zeros(2).to_sparse()),
        "the target is torch.sparse_coo; only dense tensors are measured (.to_dense(), .dequantize())",
    ),
    (
        lambda: resolve_dims(2, (2,)),
        "dims=(2,) names dim 2, but the tensor has 2 dimensions",
    ),
    (
        lambda: resolve_dims(2, (0, 0)),
        "dims=(0, 0) must name one or two different dimensions",
    ),
    (
        lambda: resolve_dims(3, (0, 1, 2)),
        "dims=(0, 1, 2) must name one or two different dimensions",
    ),
    (
        lambda: resolve_dims(2, ()),
        "dims=() must name one or two different dimensions",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=ids(REFUSED))
def test_tensors_that_cannot_be_compared_are_described_for_both_sides(call: Callable[[], Any], said: str) -> None:
    assert refusal(call) == said
