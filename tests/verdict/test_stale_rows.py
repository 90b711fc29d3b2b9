"""Hints at caches: rows that another call computed, or that stand in a wrong place."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from graftlab.verdict.stale_rows import _places, stale_rows

OLD = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(0))
NEW = torch.randn(2, 1, 4, generator=torch.Generator().manual_seed(1))
CACHE = torch.cat([OLD, NEW], 1)
OTHER = torch.randn(2, 8, 4, generator=torch.Generator().manual_seed(2))


def hint(target: Tensor, baseline: Tensor = CACHE, source: Tensor = NEW) -> str:
    return str(stale_rows(baseline, target, {"q": torch.ones(2, 1, 4), "k": source}))


def test_rows_of_an_earlier_call_that_differ_were_not_computed_in_this_one() -> None:
    said = hint(torch.cat([OLD[:, :2], OTHER[:, 2:5], OLD[:, 5:], NEW], 1))
    assert said.startswith("indices 2-4 of dim 1 were not computed in this call, a stale or wrongly indexed cache: k,")


def test_a_new_row_that_was_not_written_is_stale() -> None:
    for stale in (torch.zeros_like(NEW), OTHER[:, :1]):
        assert hint(torch.cat([OLD, stale], 1)).startswith("index 8 of dim 1 was not computed in this call, a stale or")
    said = hint(torch.cat([OLD, OLD[:, 3:4]], 1))
    assert "(index 8 holds what the baseline has at 3)" in said


def test_a_new_row_over_an_old_one_is_in_a_wrong_place() -> None:
    said = hint(torch.cat([OLD[:, :-1], NEW, NEW], 1))
    assert (
        "index 7 of dim 1 holds a row of this call in a wrong place (index 7 holds what the baseline has at 8)" in said
    )
    # Slots along another dimension, filled by rows of several heads.
    heads = CACHE.reshape(2, 9, 2, 2).transpose(1, 2)
    moved = torch.cat([OLD[:, :-1], NEW, NEW], 1).reshape(2, 9, 2, 2).transpose(1, 2)
    assert "index 7 of dim 2 holds a row of this call" in hint(moved, heads, NEW)


@pytest.mark.parametrize(
    "target",
    [
        torch.cat([OLD, NEW.to(torch.float8_e4m3fn).float()], 1),
        torch.cat([OLD, NEW], 1) * 1.5,
        torch.cat([OLD, NEW], 1),
        torch.cat([OTHER, NEW + 1], 1),
    ],
    ids=["rounded", "all rows", "equal", "old and new rows"],
)
def test_other_differences_are_not_stale_rows(target: Tensor) -> None:
    assert stale_rows(CACHE, target, {"k": NEW}) is None


def test_rows_that_the_baseline_has_nowhere_are_in_no_wrong_place() -> None:
    """Some rows of a stacked result are computed differently, as with a different adapter."""
    own = torch.cat([OLD[:, :6], OTHER[:, :3]], 1)
    computed = {"layer": torch.cat([CACHE[:, 3:6], OTHER[:, :3]], 1)}
    assert stale_rows(CACHE, own, computed) is None


@pytest.mark.parametrize(("rows", "is_found"), [(16_384, True), (16_385, False)])
def test_only_caches_of_at_most_16384_rows_are_searched(rows: int, is_found: bool) -> None:
    old = torch.randn(rows - 1, 4, generator=torch.Generator().manual_seed(3))
    cache, stale = (torch.cat([old, new])[None] for new in (NEW[0], OTHER[0, :1]))
    assert (stale_rows(cache, stale, {"k": NEW[:1]}) is not None) is is_found


def test_rows_of_16_bits_are_this_calls_though_rounded_otherwise() -> None:
    target = torch.cat([OLD * (1 + 2**-8), OTHER[:, :1]], 1).bfloat16()
    said = hint(target, CACHE.bfloat16(), NEW.bfloat16())
    assert said.startswith("index 8 of dim 1 was not computed in this call, a stale or")
    # In float32 the other rows differ too.
    assert stale_rows(CACHE, target.float(), {"k": NEW}) is None


def test_whole_numbers_are_no_cache() -> None:
    whole = (100 * CACHE).long()
    stale = torch.cat([whole[:, :8], whole[:, 3:4]], 1)
    assert stale_rows(whole, stale.float(), {"k": whole[:, 8:].float()}) is None


def test_rows_without_a_tap_that_feeds_them_are_not_a_cache() -> None:
    assert stale_rows(CACHE, torch.cat([OTHER, NEW], 1), {"k": NEW * 2}) is None
    assert stale_rows(OLD, OLD.flip(1), {"k": OLD}) is None


def test_each_row_is_sought_among_the_others_and_rows_of_zeros_are_in_no_place() -> None:
    others = torch.randn(6, 16, generator=torch.Generator().manual_seed(3)).double()
    order = [4, 0, 5, 1]
    rows = torch.cat([others[order], torch.zeros(1, 16), others[:1] * 1.5]).double()
    assert _places(rows, others, 1e-6).tolist() == [*order, -1, -1]
