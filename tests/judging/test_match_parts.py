"""Parts of a match of live runs, without a rank."""

from __future__ import annotations

import math

import torch

from graftlab.judging.match_runs import _alike, _call
from graftlab.matching.recorded_taps import RecordedTap


def test_ranks_hold_one_tensor_if_their_extremes_are_alike() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    one = RecordedTap.of("x", x)
    assert _alike(one, RecordedTap.of("x", x * (1 + 1e-6)))
    assert not _alike(one, RecordedTap.of("x", x * (1 + 1e-4)))
    assert not _alike(one, RecordedTap.of("x", x[:1]))
    assert not _alike(RecordedTap.of("x", torch.ones(8)), RecordedTap.of("x", torch.ones(1)))
    lost = x.clone()
    lost[3] = math.nan
    assert _alike(RecordedTap.of("x", lost), RecordedTap.of("x", lost.clone()))
    assert (_call("x"), _call("x#2")) == ("x#0", "x#2")
