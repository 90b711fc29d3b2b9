"""Which partners are tried first for taps that have none."""

from __future__ import annotations

import torch

from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.matching.suspects import suspects


def tap(name: str, order: int, seed: int) -> RecordedTap:
    return RecordedTap.of(name, torch.randn(4, 4, generator=torch.Generator().manual_seed(seed)), order=order)


def test_of_equally_likely_partners_the_one_at_the_same_distance_is_first() -> None:
    # Three taps of the baseline have the same values and names alike; the target has two taps that only it has first.
    baseline = [tap("start", 5, 0), tap("x.1", 4, 1), tap("x.2", 7, 1), tap("x.3", 9, 1)]
    target = [tap("begin", 10, 0), tap("y", 12, 1)]
    proposal = Proposal((Pair("start", "begin"),))
    assert [pair.baseline for pair in suspects(baseline, target, proposal)] == ["x.2", "x.3", "x.1"]


def test_partners_like_trusted_ones_are_first_and_like_those_tried_in_vain_last() -> None:
    baseline = [tap("x.1", 1, 1), tap("y.1", 1, 1), tap("z.1", 1, 1)]
    target = [tap("other.1", 1, 1)]
    trusted, in_vain = [Pair("z.2", "other.2")], [("x.2", "other.2")]
    found = suspects(baseline, target, Proposal(()), trusted, in_vain)
    assert [pair.baseline for pair in found] == ["z.1", "y.1", "x.1"]
