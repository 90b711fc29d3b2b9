"""Weights of 8 bits on one side are compared times their scale, and never grafted."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from graftlab.base import quantisation
from graftlab.base.quantisation import SCALE
from graftlab.transforms import GraftTransformInput, Outcome, compare, run_transform

VALUES = torch.randn(32, 16, generator=torch.Generator().manual_seed(0)).bfloat16()
CODES, ROW_SCALE = (VALUES.float() * 100).to(torch.float8_e4m3fn), {SCALE: torch.full((32,), 0.01)}


def received(
    tensors: list[torch.Tensor], extras: list[Any], target: torch.Tensor, own: Any = None
) -> GraftTransformInput:
    count = len(tensors)
    senders = {"senders": list(range(count)), "send_world_size": count, "recv_world_size": count}
    return GraftTransformInput({"name": "w"}, tensors, extras, target=target, target_extras=own, **senders)


@pytest.mark.parametrize("is_own", [True, False])
def test_codes_are_compared_times_their_scale(is_own: bool) -> None:
    given = received([VALUES], [None], CODES, ROW_SCALE) if is_own else received([CODES], [ROW_SCALE], VALUES)
    outcome = run_transform(None, given)
    assert (outcome.aligned_by, outcome.compare_only) == ("dequantised", True)
    assert outcome.cast == ("bfloat16 -> float8_e4m3fn" if is_own else "float8_e4m3fn -> bfloat16")
    stats = compare(outcome, given)
    assert 0.02 < stats.rel_l2 < 0.04
    sides = [stats.std_baseline, stats.std_target]
    assert (sides if is_own else sides[::-1])[0] == pytest.approx(float(VALUES.float().std(correction=0)), rel=1e-4)


@pytest.mark.parametrize(
    "given",
    [
        received([VALUES], [None], CODES),
        received([VALUES], [ROW_SCALE], CODES),
        received([VALUES], [None], CODES, {SCALE: 0.01}),
        received([VALUES], [None], CODES, {SCALE: torch.ones(5)}),
        received([CODES, CODES], [ROW_SCALE, None], VALUES),
        received([CODES], [None], CODES, ROW_SCALE),
        received([VALUES], [None], VALUES, ROW_SCALE),
    ],
    ids=[
        "no scale",
        "of the other side",
        "no tensor",
        "another shape",
        "one sender without",
        "codes on both sides",
        "no codes",
    ],
)
def test_without_a_scale_for_the_codes_of_one_side_they_are_compared_as_they_are(given: GraftTransformInput) -> None:
    outcome: Outcome = run_transform(None, given)
    assert outcome.aligned_by != "dequantised"
    assert outcome.measured is None
    assert not outcome.compare_only


def test_parts_of_codes_are_joined_as_values() -> None:
    halves = [CODES[:16], CODES[16:]]
    extras = [{SCALE: torch.full((16,), 0.01)}, {SCALE: torch.full((16,), 100.0)}]
    given = received(halves, extras, VALUES)
    outcome = run_transform(None, given)
    assert outcome.aligned_by == "concat dim=0, dequantised"
    assert compare(outcome, given).rel_l2 < 0.04


STORED = {quantisation.CODES: "int8"}
"""The extras of numbers that a weight's class stores as codes."""


@pytest.mark.parametrize(
    ("theirs", "own", "cast"),
    [
        (None, STORED, "bfloat16 -> int8"),
        (STORED, None, "int8 -> bfloat16"),
        (STORED, STORED, None),
        (STORED, {quantisation.CODES: "float8_e4m3fn"}, "int8 -> float8_e4m3fn"),
    ],
)
def test_numbers_that_are_stored_as_codes_are_compared_and_never_grafted(theirs: Any, own: Any, cast: str) -> None:
    """A graft would change a copy of the weight."""
    given = received([VALUES], [theirs], VALUES * 2, own)
    outcome = run_transform(None, given)
    assert (outcome.aligned_by, outcome.cast, outcome.compare_only) == ("dequantised", cast, True)
    assert compare(outcome, given).rel_l2 == pytest.approx(1.0)


def test_stored_codes_are_compared_with_codes_beside_a_scale() -> None:
    given = received([CODES], [ROW_SCALE], VALUES, STORED)
    outcome = run_transform(None, given)
    assert (outcome.cast, outcome.compare_only) == ("float8_e4m3fn -> int8", True)
    assert 0.02 < compare(outcome, given).rel_l2 < 0.04
