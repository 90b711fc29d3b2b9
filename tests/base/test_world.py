"""The ranks of both sides in one order, as each of them counts them."""

from __future__ import annotations

import pytest

from graftlab.base.world import Place, RunInfo, other_side


@pytest.mark.parametrize(("baseline", "target"), [(1, 1), (3, 2), (1, 4)])
def test_every_rank_counts_all_ranks_alike_the_baselines_first(baseline: int, target: int) -> None:
    everyone = Place("baseline", 0, baseline, target).everyone()
    labels = [f"baseline[{n}]" for n in range(baseline)] + [f"target[{n}]" for n in range(target)]
    assert [each.label for each in everyone] == labels
    assert [each.world_rank for each in everyone] == list(range(baseline + target))
    for place in everyone:
        assert place.everyone() == everyone
        assert place in everyone
        sizes = (baseline, target) if place.side == "baseline" else (target, baseline)
        assert (place.world_size, place.other_world_size) == sizes


def test_the_first_rank_that_takes_part_leads_a_run() -> None:
    assert RunInfo(3, 0, (2, 1, 4)).leader == 1
    assert (other_side("baseline"), other_side("target")) == ("target", "baseline")
