"""Layouts in the default transform: what both sides say of their parts, and what is said where that fails."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts import Layout, Mesh, parse_layout
from graftlab.layouts.on_ranks import RankLayout, rank_layout
from graftlab.transforms import GraftTransformInput
from graftlab.transforms.by_layout import INFERRED, _by_layout, _shape_of_one, by_layout
from graftlab.transforms.suggest import suggested


def made(received: list[Tensor], target: Tensor, **more: Any) -> Tensor:
    nothing = [None] * len(received)
    count = {"senders": list(range(len(received))), "send_world_size": len(received)}
    return _by_layout(GraftTransformInput({"name": "x"}, received, nothing, target, **{**count, **more})).value


def test_a_pair_is_between_ranks_of_one_number_only_where_both_sides_have_as_many() -> None:
    pair = parse_layout("a b -> b a")
    parts = [torch.arange(6.0).view(2, 3), torch.arange(6.0).view(2, 3) + 9]
    ours = made(parts, torch.zeros(3, 2), pair=pair, recv_rank=1, recv_world_size=2)
    assert torch.equal(ours, parts[1].T)
    # One receiver of two senders that differ: neither of them is its counterpart.
    with pytest.raises(LayoutError, match="2 senders hold different tensors"):
        made(parts, torch.zeros(3, 2), pair=pair)


def test_a_sender_that_is_silent_is_named() -> None:
    with pytest.raises(LayoutError, match=r"only \[1\] of 2 senders sent something"):
        made([torch.ones(2)], torch.ones(2), senders=[1], send_world_size=2, pair=Layout())


def test_a_layout_that_only_the_shapes_tell_is_called_inferred() -> None:
    def told(received: list[Tensor], target: Tensor, layout: str | None) -> str | None:
        rest: dict[str, Any] = {"recv_world_size": 2, "senders": [0], "send_world_size": 1}
        given = GraftTransformInput({"name": "x"}, received, [None], target, **rest)
        return by_layout(dataclasses.replace(given, layout=rank_layout(target, layout, 2))).layout

    whole = torch.arange(8.0)
    assert told([whole], torch.zeros(4), None) == INFERRED == "inferred"
    assert told([whole], torch.zeros(4), "shard(dim=0, mesh='tp')") == "same => shard(dim=0, mesh='tp')"
    assert told([whole], torch.zeros(8), None) is None


def test_names_of_one_side_alone_say_nothing_of_the_other() -> None:
    named = rank_layout(torch.ones(2, 3), "s d", 1)
    assert named is not None
    assert named.names == "s d"
    value = torch.arange(6.0).view(2, 3)
    for mine in (None, RankLayout(Layout())):
        assert torch.equal(made([value], torch.zeros(2, 3), received_layouts=[named], layout=mine), value)
    # Named on both sides, the names tell what is between them.
    transposed = rank_layout(torch.ones(3, 2), "d s", 1)
    assert torch.equal(made([value], torch.zeros(3, 2), received_layouts=[named], layout=transposed), value.T)


@pytest.mark.parametrize(
    ("shape", "arranged", "said"),
    [
        ((2, 3, 4), lambda x: x.reshape(6, 4), "a b c -> (a b) c"),
        ((2, 3, 4), lambda x: x.reshape(2, 12), "a b c -> a (b c)"),
        ((2, 3, 4), lambda x: x.permute(2, 0, 1), "a b c -> c a b"),
    ],
)
def test_where_shapes_do_not_fit_the_layout_that_the_values_fit_in_is_suggested(
    shape: tuple[int, ...], arranged: Any, said: str
) -> None:
    value = torch.arange(24.0).view(shape)
    assert f"the values fit, with rel_l2 0, in the layout '{said}' of the received tensor" in suggested(
        [value], arranged(value)
    )


def test_a_summand_is_measured_as_the_sum_and_refused_where_nobody_has_taken_it() -> None:
    summand = torch.tensor([1.0, 2.0])
    layout = rank_layout(summand, "partial(mesh='tp')", 2)
    assert layout is not None
    assert layout.is_partial
    rest: dict[str, Any] = {"layout": layout, "recv_world_size": 2, "senders": [0], "send_world_size": 1}
    given = GraftTransformInput({"name": "x"}, [torch.tensor([3.0, 3.0])], [None], summand, **rest)
    outcome = _by_layout(dataclasses.replace(given, target_reduced=torch.tensor([2.0, 4.0])))
    assert outcome.measured is not None
    assert [each.tolist() for each in outcome.measured] == [[3.0, 3.0], [2.0, 4.0]]
    with pytest.raises(LayoutError, match="this rank holds a summand alone"):
        _by_layout(given)
    with pytest.raises(LayoutError, match="the group is gone"):
        _by_layout(dataclasses.replace(given, target_reduced="the group is gone"))


@pytest.mark.parametrize(
    ("is_known", "more"),
    [
        # Without a pair, the target's side has the whole of what the baseline is given.
        (True, {"direction": "t2b"}),
        (False, {"direction": "b2t"}),
        (False, {"direction": "t2b", "whole": "target", "recv_world_size": 2}),
        (True, {"direction": "t2b", "whole": "received"}),
        (False, {"direction": "b2t", "whole": "target"}),
        # With one, the pair says which is the larger.
        (True, {"direction": "b2t", "whole": "target", "pair": Layout()}),
        (True, {"direction": "t2b", "whole": "target", "pair": Layout()}),
        (False, {"direction": "t2b", "whole": "received", "pair": Layout()}),
        (False, {"direction": "b2t", "whole": "target", "pair": Layout(), "recv_world_size": 2}),
        # A layout knows on how many ranks it is.
        (True, {"direction": "t2b", "recv_world_size": 2, "layout": RankLayout(Layout())}),
        (False, {"direction": "t2b", "layout": RankLayout(Layout((), Mesh((("tp", 2),))))}),
        (False, {"direction": "b2t", "layout": RankLayout(Layout())}),
    ],
)
def test_the_receivers_shape_is_the_wholes_where_it_holds_it_alone(is_known: bool, more: dict[str, Any]) -> None:
    given = GraftTransformInput({"name": "x"}, [torch.ones(6)], [None], torch.zeros(2, 3), **more)
    assert _shape_of_one(given) == ((2, 3) if is_known else None)
