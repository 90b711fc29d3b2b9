"""The order in which ranks have the parts of a fused dimension."""

from __future__ import annotations

import pytest
import torch

from graftlab.errors import LayoutError
from graftlab.layouts import Layout
from graftlab.layouts.regroup import Regroup


def test_the_parts_of_each_block_lie_together_for_each_rank() -> None:
    whole = torch.arange(8.0)[None]
    layout = Layout((Regroup(1, 2, (2, 1, 1)),))
    made = layout.local(whole)
    assert made.tolist() == [[0, 1, 4, 6, 2, 3, 5, 7]]
    assert torch.equal(layout.join([made]).whole, whole)
    assert not layout.leaves_out


def test_what_ranks_have_alike_is_repeated_and_compared_when_joined() -> None:
    whole = torch.arange(6.0)
    layout = Layout((Regroup(0, 2, (2, 1), (1, 2)),))
    made = layout.local(whole)
    assert made.tolist() == [0, 1, 4, 5, 2, 3, 4, 5]
    assert torch.equal(layout.join([made]).whole, whole)
    made[6] = 9.0
    (found,) = layout.join([made]).disagreements
    assert found.count == 1
    assert layout.join([made]).whole.tolist() == whole.tolist()


@pytest.mark.parametrize("extent", [7, 9])
def test_a_dimension_that_does_not_divide_is_refused(extent: int) -> None:
    layout = Layout((Regroup(0, 2, (2, 1, 1)),))
    with pytest.raises(LayoutError, match=r"regroup.* do not divide into blocks of \[2, 1, 1\]"):
        layout.local(torch.zeros(extent))
    with pytest.raises(LayoutError, match=r"regroup.* do not divide into blocks of \[2, 1, 1\]"):
        layout.join([torch.zeros(extent)])


def test_elements_that_are_not_those_of_all_ranks_are_refused() -> None:
    layout = Layout((Regroup(0, 2, (2, 1), (1, 2)),))
    with pytest.raises(LayoutError, match=r"regroup.*: 7 elements are not those of all ranks"):
        layout.join([torch.zeros(7)])
