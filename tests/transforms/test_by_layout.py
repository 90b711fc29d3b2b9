"""Layouts in the default transform: declared and inferred ones, and the errors for those that do not fit."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from kit.refusals import exactly
from torch import Tensor

from graftlab.errors import LayoutError, TransformError
from graftlab.layouts import Layout, Mesh, parse_layout
from graftlab.layouts.gathering import Rows
from graftlab.layouts.on_ranks import RankLayout, rank_layout
from graftlab.layouts.row_alignment import FoundRows
from graftlab.layouts.sketching import SignedSums
from graftlab.taps.module_inputs import KIND
from graftlab.transforms import GraftTransformInput
from graftlab.transforms.by_layout import INFERRED, SKETCHED, _by_layout, _rows_of_pair, _shape_of_one, _text, by_layout
from graftlab.transforms.default import suggested


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
    with pytest.raises(
        LayoutError,
        match=exactly("2 senders hold different tensors and do not declare which part of the whole each holds"),
    ):
        made(parts, torch.zeros(3, 2), pair=pair)


def test_inputs_of_modules_that_lack_the_rows_of_the_output_pair_by_shape() -> None:
    packs = parse_layout("a b ... -> (a b) ...")
    batch, table = torch.arange(24.0).view(2, 4, 3), torch.arange(12.0).view(4, 3)
    of_module = GraftTransformInput({"kind": KIND}, [batch], [None], torch.zeros(8, 3), pair=packs)
    assert torch.equal(by_layout(of_module).value, batch.view(8, 3))
    # A table of positions, or the batch that a module itself packs.
    for whole in (table, batch):
        alike = dataclasses.replace(of_module, received_list=[whole], target=torch.zeros_like(whole))
        assert torch.equal(by_layout(alike).value, whole)
        with pytest.raises(TransformError, match="would have shape"):
            by_layout(dataclasses.replace(alike, tags={}))
    with pytest.raises(
        TransformError,
        match=exactly(
            "from same to a b ... -> (a b) ...: rank 0 would have shape [8, 3], but it has [7, 3] (from "
            "[[2, 4, 3]] of senders [] to [7, 3] on rank 0); if the layout is wrong, declare it with "
            "gl.tap(layout=...) or the plan's pairs, or give the plan a transform: `def "
            "transform(graft_input: gl.GraftTransformInput) -> torch.Tensor`"
        ),
    ):
        by_layout(dataclasses.replace(of_module, target=torch.zeros(7, 3)))


def test_inputs_of_modules_on_ranks_that_lack_a_part_pair_by_shape_too() -> None:
    pair = parse_layout("part(dim=0, index=0, of=[4, 2])")
    table = torch.arange(18.0).view(6, 3)
    of_module = GraftTransformInput(
        {"kind": KIND}, [table], [None], torch.zeros(6, 3), recv_rank=1, recv_world_size=2, pair=pair, whole="target"
    )
    assert torch.equal(by_layout(of_module).value, table)
    # Where nothing fits, the pair's layout says why.
    with pytest.raises(
        TransformError,
        match=exactly(
            "part(index=0, of=[4, 2], dim=0): dimension 0 of [6, 3] does not divide into 4 for part 0 "
            "(from [[6, 3]] of senders [] to [6, 3] on rank 1); if the layout is wrong, declare it with "
            "gl.tap(layout=...) or the plan's pairs, or give the plan a transform: `def "
            "transform(graft_input: gl.GraftTransformInput) -> torch.Tensor`"
        ),
    ):
        by_layout(dataclasses.replace(of_module, tags={}))


def test_a_sender_that_is_silent_is_named() -> None:
    with pytest.raises(LayoutError, match=r"only \[1\] of 2 senders sent a tensor"):
        made([torch.ones(2)], torch.ones(2), senders=[1], send_world_size=2, pair=Layout())


def test_layout_known_only_from_shapes_is_called_inferred() -> None:
    def told(received: list[Tensor], target: Tensor, layout: str | None) -> str | None:
        rest: dict[str, Any] = {"recv_world_size": 2, "senders": [0], "send_world_size": 1}
        given = GraftTransformInput({"name": "x"}, received, [None], target, **rest)
        return by_layout(dataclasses.replace(given, layout=rank_layout(target, layout, 2))).layout

    whole = torch.arange(8.0)
    assert told([whole], torch.zeros(4), None) == INFERRED == "inferred"
    assert told([whole], torch.zeros(4), "shard(dim=0, mesh='tp')") == "same => shard(dim=0, mesh='tp')"
    assert told([whole], torch.zeros(8), None) is None


def test_only_a_layout_that_differs_counts_as_what_aligned_the_tensors() -> None:
    same = rank_layout(WHOLE, "same", 1)
    given = GraftTransformInput({"name": "x"}, [WHOLE], [None], WHOLE, received_layouts=[same], layout=same)
    outcome = _by_layout(given)
    assert (outcome.layout, outcome.aligned_by) == (None, None)
    turned = rank_layout(WHOLE, "a b -> b a", 1)
    outcome = _by_layout(dataclasses.replace(given, layout=turned, target=WHOLE.T))
    assert (outcome.layout, outcome.aligned_by) == ("same => a b -> b a", "layout")


def test_dimension_names_on_one_side_do_not_describe_the_other() -> None:
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
def test_layout_that_fits_the_values_is_suggested_for_unfit_shapes(
    shape: tuple[int, ...], arranged: Any, said: str
) -> None:
    value = torch.arange(24.0).view(shape)
    assert f"the values fit, with rel_l2 0, in the layout '{said}' of the received tensor" in suggested(
        [value], arranged(value)
    )


def test_partial_sum_is_measured_as_the_sum_or_refused_without_one() -> None:
    summand = torch.tensor([1.0, 2.0])
    layout = rank_layout(summand, "partial(mesh='tp')", 2)
    assert layout is not None
    assert layout.is_partial
    rest: dict[str, Any] = {"layout": layout, "recv_world_size": 2, "senders": [0], "send_world_size": 1}
    given = GraftTransformInput({"name": "x"}, [torch.tensor([3.0, 3.0])], [None], summand, **rest)
    outcome = _by_layout(dataclasses.replace(given, target_reduced=torch.tensor([2.0, 4.0])))
    assert outcome.measured is not None
    assert [each.tolist() for each in outcome.measured] == [[3.0, 3.0], [2.0, 4.0]]
    with pytest.raises(LayoutError, match=exactly("partial(mesh='tp'): this rank holds only a partial sum")):
        _by_layout(given)
    with pytest.raises(LayoutError, match="the group is gone"):
        _by_layout(dataclasses.replace(given, target_reduced="the group is gone"))
    where = r"from \[\[2\]\] of senders \[0\] to \[2\] on rank 0.*or give the plan a transform: `"
    with pytest.raises(TransformError, match=where):
        by_layout(given)


def test_a_recorded_sketch_is_compared_with_a_whole_tensor_of_one_rank_alone() -> None:
    value = torch.arange(12.0).view(3, 4)
    layout = Layout((SignedSums(4, (3, 4)),))
    sums = layout.local(value)
    sketched = RankLayout(layout)
    given = GraftTransformInput(
        {"name": "x"}, [sums], [None], value, received_layouts=[sketched], senders=[0], send_world_size=1
    )
    outcome = by_layout(given)
    assert outcome.measured is not None
    assert torch.equal(*outcome.measured)
    # It is never grafted.
    assert outcome.value is value
    assert (outcome.compare_only, outcome.layout, outcome.note) == (True, layout.text, SKETCHED)
    changes: list[dict[str, Any]] = [
        {"pair": parse_layout("a b -> b a")},
        {"layout": rank_layout(value, "shard(dim=0, mesh='tp')", 2)},
        {"received_list": [sums, sums], "received_layouts": [sketched] * 2, "senders": [0, 1], "send_world_size": 2},
    ]
    for change in changes:
        with pytest.raises(
            TransformError,
            match=exactly(
                "the recording has a sketch of this tensor, which is compared only with a tensor of the same "
                "name, on one rank; record it whole"
            ),
        ):
            by_layout(dataclasses.replace(given, **change))


def test_a_note_on_unused_names_comes_before_that_on_the_tensors() -> None:
    unusable = RankLayout(Layout(), None, "s d", "no mesh")
    given = GraftTransformInput(
        {"name": "x"},
        [torch.ones(2), torch.ones(2) + 1e-7],
        [None, None],
        torch.zeros(2),
        received_layouts=[unusable, unusable],
        senders=[0, 1],
        send_world_size=2,
    )
    assert by_layout(given).note == (
        "the names of dimensions were not used: no mesh; sender 0's tensor was taken, but the senders are not replicas "
        "(sender 1: 2 elements differ, by up to 1.19e-07)"
    )


def test_tokens_packed_by_a_step_need_lengths_that_names_do_not() -> None:
    parts = [torch.arange(2.0), torch.arange(2.0) + 2]

    def joined(layout: str) -> Tensor:
        layouts = [RankLayout(parse_layout(layout, mesh={"cp": 2}), None, layout if "[" in layout else None)] * 2
        rest: dict[str, Any] = {"received_layouts": layouts, "senders": [0, 1], "send_world_size": 2}
        return by_layout(GraftTransformInput({"name": "x"}, parts, [None] * 2, torch.zeros(4), **rest)).value

    assert joined("t[cp]").tolist() == [0, 1, 2, 3]
    with pytest.raises(TransformError, match="needs the lengths of the sequences: pass lengths="):
        joined("shard(dim=0, mesh='cp', packed=True)")


def test_a_single_receiver_knows_the_shape_that_the_senders_layout_needs() -> None:
    flat = rank_layout(torch.arange(6.0), "a b -> (a b)", 1)
    whole = torch.zeros(2, 3)
    layouts: dict[str, Any] = {"received_layouts": [flat], "layout": rank_layout(whole, "same", 1)}
    assert made([torch.arange(6.0)], whole, direction="t2b", **layouts).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_all_side_effects_of_a_graft_are_said() -> None:
    padded = rank_layout(torch.zeros(3, 4), "pad(dim=0, size=2, to=3) | pad(dim=1, size=3, to=4)", 1)
    given = GraftTransformInput({"name": "x"}, [torch.ones(2, 3)], [None], torch.zeros(3, 4), layout=padded)
    assert by_layout(given).caveat == (
        "a graft fills elements 2..2 of dim 0, which are padding, with 0; "
        "a graft fills elements 3..3 of dim 1, which are padding, with 0"
    )
    # A pair's, too, for a receiver of several that declares no layout.
    pair = parse_layout("pad(dim=0, size=2, to=4)")
    rest: dict[str, Any] = {"pair": pair, "whole": "received", "senders": [0], "send_world_size": 1}
    given = GraftTransformInput({"name": "x"}, [torch.ones(2)], [None], torch.zeros(2), recv_world_size=2, **rest)
    assert by_layout(given).caveat == "a graft fills elements 2..3 of dim 0, which are padding, with 0"


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
def test_single_receivers_shape_is_that_of_the_whole(is_known: bool, more: dict[str, Any]) -> None:
    given = GraftTransformInput({"name": "x"}, [torch.ones(6)], [None], torch.zeros(2, 3), **more)
    assert _shape_of_one(given) == ((2, 3) if is_known else None)


# ---- several senders, several receivers -----------------------------------------------------------------------------

WHOLE = torch.arange(24.0).view(4, 6)
TWO_GROUPS = [Mesh((("tp", 2),), (0, 1)), Mesh((("tp", 2),), (2, 3))]


def grouped(wholes: list[Tensor], **more: Any) -> tuple[list[Tensor], dict[str, Any]]:
    """Two groups of two ranks; each group has its own whole tensor, split by columns over its ranks."""
    layouts = [RankLayout(parse_layout("shard(dim=1, mesh='tp')").on(mesh)) for mesh in TWO_GROUPS]
    sent = [part for whole in wholes for part in whole.chunk(2, 1)]
    return sent, {"received_layouts": [layouts[0]] * 2 + [layouts[1]] * 2, **more}


def test_groups_that_hold_the_same_are_one_whole_for_a_single_receiver() -> None:
    # Sums in another order, as groups that compute the same may have them.
    rounded = WHOLE * (1 + torch.finfo(torch.float32).eps)
    sent, rest = grouped([WHOLE, rounded])
    assert torch.equal(made(sent, torch.zeros(4, 6), **rest), WHOLE)
    assert torch.equal(made(sent, torch.zeros(4, 1, 6), **rest), WHOLE[:, None])
    sent, rest = grouped([WHOLE.long(), WHOLE.long()])
    assert torch.equal(made(sent, torch.zeros(4, 6).long(), **rest), WHOLE.long())


@pytest.mark.parametrize("off", [WHOLE * 1.001, WHOLE.long() + 1, WHOLE.flip(0)])
def test_groups_with_different_tensors_must_declare_their_parts(off: Tensor) -> None:
    sent, rest = grouped([WHOLE.to(off.dtype), off])
    # A batch of one in each group is no part of a batch either.
    for shape in ((4, 6), (4, 1, 6)):
        with pytest.raises(
            LayoutError,
            match=exactly("2 groups of senders hold different tensors and do not declare which part each holds"),
        ):
            made(sent, torch.zeros(shape, dtype=off.dtype), **rest)


def test_groups_that_each_have_a_part_of_the_batch_are_joined_along_it() -> None:
    sent, rest = grouped(list(WHOLE.chunk(2)))
    assert torch.equal(made(sent, torch.zeros(4, 6), **rest), WHOLE)
    # With a pair they have to be the same: what it takes the receiver's out of is one whole.
    with pytest.raises(
        LayoutError,
        match=exactly("2 groups of senders hold different tensors and do not declare which part each holds"),
    ):
        made(sent, torch.zeros(4, 6), pair=Layout(), **rest)


def test_groups_with_different_layouts_are_refused() -> None:
    sent, rest = grouped([WHOLE, WHOLE])
    other = RankLayout(parse_layout("shard(dim=0, mesh='tp')").on(TWO_GROUPS[1]))
    rest["received_layouts"][2:] = [other, other]
    with pytest.raises(
        LayoutError,
        match=exactly(
            "the groups of senders have different layouts: [\"shard(dim=1, mesh='tp')\", \"shard(dim=0, mesh='tp')\"]"
        ),
    ):
        made(sent, torch.zeros(4, 6), **rest)


def test_receiver_takes_the_whole_from_the_mesh_with_its_rank() -> None:
    sent, rest = grouped([WHOLE, WHOLE + 100], recv_world_size=4)
    for rank, whole in enumerate([WHOLE, WHOLE, WHOLE + 100, WHOLE + 100]):
        mine = RankLayout(Layout((), TWO_GROUPS[rank // 2]))
        assert torch.equal(made(sent, torch.zeros(4, 6), layout=mine, recv_rank=rank, **rest), whole)
    # With a different number of ranks the receiver's group is unknown.
    for world_size, rank in ((3, 1), (4, 9)):
        with pytest.raises(LayoutError, match=f"on several meshes, and none of them contains rank {rank}"):
            made(sent, torch.zeros(4, 6), recv_rank=rank, **{**rest, "recv_world_size": world_size})


def test_senders_without_a_layout_among_others_with_one_are_named() -> None:
    layout = rank_layout(torch.ones(4, 3), "shard(dim=1, mesh='tp')", 2)
    with pytest.raises(LayoutError, match=r"senders \[1\] declare no layout, but the others do"):
        made(list(WHOLE.chunk(2, 1)), torch.zeros(4, 6), received_layouts=[layout, None])


def test_the_ranks_of_a_layout_that_sent_nothing_are_named() -> None:
    layout = rank_layout(torch.ones(4, 3), "shard(dim=1, mesh='tp')", 3)
    with pytest.raises(LayoutError, match=exactly("shard(dim=1, mesh='tp'): ranks [1] of [0, 1, 2] sent nothing")):
        made([WHOLE, WHOLE], WHOLE, received_layouts=[layout] * 2, senders=[0, 2], send_world_size=3)


def test_shards_are_put_together_in_the_order_of_their_ranks_and_in_one_dtype() -> None:
    layout = rank_layout(torch.ones(4, 3), "shard(dim=1, mesh='tp')", 2)
    left, right = WHOLE.chunk(2, 1)
    ours = made([left, right.double()], torch.zeros(4, 6), received_layouts=[layout] * 2)
    assert torch.equal(ours, WHOLE)
    assert torch.equal(made([right, left], WHOLE, received_layouts=[layout] * 2, senders=[1, 0]), WHOLE)


@pytest.mark.parametrize("mine", ["shard(dim=0, mesh='tp')", "shard(dim=1, mesh='tp')"])
def test_senders_layout_is_inferred_from_the_receivers_whole_shape(mine: str) -> None:
    on_two = parse_layout(mine).on(Mesh((("tp", 2),)))
    layout = RankLayout(on_two, (4, 6))
    for rank in (0, 1):
        target = on_two.local(WHOLE, rank) * 0
        for cut in (0, 1):
            ours = made(list(WHOLE.chunk(2, cut)), target, layout=layout, recv_rank=rank, recv_world_size=2)
            assert torch.equal(ours, on_two.local(WHOLE, rank))


@pytest.mark.parametrize(("off", "is_refused"), [(0.0, False), (1e-7, False), (1.0, True)])
def test_whole_tensors_that_differ_are_said_to_and_not_grafted_into_parts(off: float, is_refused: bool) -> None:
    on_two = parse_layout("shard(dim=0, mesh='tp')").on(Mesh((("tp", 2),)))
    rest: dict[str, Any] = {"senders": [0, 1], "send_world_size": 2, "recv_world_size": 2}
    for rank in (0, 1):
        given = GraftTransformInput({"name": "x"}, [WHOLE, WHOLE * (1 + off)], [None] * 2, torch.zeros(2, 6), **rest)
        found = _by_layout(dataclasses.replace(given, layout=RankLayout(on_two, (4, 6)), recv_rank=rank))
        # Of one sender on all ranks, so that together they have one tensor.
        assert torch.equal(found.value, WHOLE.chunk(2)[rank])
        said = "sender 0's tensor was taken, but the senders are not replicas"
        assert (found.note or "").startswith(said if off else "")
        assert (found.note is None, found.caveat) == (not off, None)
        assert ("not grafted" in (found.graft_refused or "")) == is_refused


def test_replicas_that_say_nothing_are_one_whole_and_others_are_refused() -> None:
    layout = rank_layout(torch.ones(2, 6), "shard(dim=0, mesh='tp')", 2)
    rest: dict[str, Any] = {"layout": layout, "recv_rank": 1, "recv_world_size": 2}
    assert torch.equal(made([WHOLE, WHOLE], torch.zeros(2, 6), **rest), WHOLE[2:])
    for other in (WHOLE + 1, WHOLE[:3]):
        with pytest.raises(
            LayoutError,
            match=exactly("2 senders hold different tensors and do not declare which part of the whole each holds"),
        ):
            made([WHOLE, other], torch.zeros(2, 6), **rest)


@pytest.mark.parametrize("direction", ["b2t", "t2b"])
def test_names_on_both_sides_go_whichever_way_the_tensor_does(direction: str) -> None:
    theirs, ours = rank_layout(torch.ones(4, 6), "s d", 1), rank_layout(torch.ones(6, 4), "d s", 1)
    value = made([WHOLE], torch.zeros(6, 4), received_layouts=[theirs], layout=ours, direction=direction)
    assert torch.equal(value, WHOLE.T)


def test_named_heads_that_the_senders_split_are_fused_in_their_order() -> None:
    whole = torch.arange(24.0).view(3, 4, 2)
    layouts = [rank_layout(part, "t h[tp] d", 2, rank) for rank, part in enumerate(whole.chunk(2, 1))]
    ours = rank_layout(torch.zeros(3, 8), "t (d*h)", 1)
    value = made(list(whole.chunk(2, 1)), torch.zeros(3, 8), received_layouts=layouts, layout=ours, direction="b2t")
    assert torch.equal(value, whole.transpose(1, 2).reshape(3, 8))


# ---- a receiver of several that says nothing -------------------------------------------------------------------------


def test_receiver_without_a_layout_gets_its_slice_of_the_whole() -> None:
    layout = rank_layout(torch.ones(4, 3), "shard(dim=1, mesh='tp')", 2)
    rest: dict[str, Any] = {"received_layouts": [layout] * 2, "recv_world_size": 2}
    for rank in (0, 1):
        given = list(WHOLE.chunk(2, 1))
        ours = made(given, torch.zeros(2, 6), recv_rank=rank, **rest)
        assert torch.equal(ours, WHOLE.chunk(2)[rank])


def test_a_pair_takes_the_one_out_of_the_other_also_where_ranks_share_it() -> None:
    pair, rest = parse_layout("a b -> b a"), {"recv_world_size": 2, "recv_rank": 1}
    rows = rank_layout(torch.ones(2, 6), "shard(dim=0, mesh='tp')", 2)
    sent = list(WHOLE.chunk(2))
    ours = made(sent, torch.zeros(3, 4), received_layouts=[rows] * 2, pair=pair, **rest)
    assert torch.equal(ours, WHOLE.T[3:])
    # The same if the target is the larger tensor, from which the received one is made.
    transposed = list(WHOLE.T.chunk(2))
    ours = made(transposed, torch.zeros(4, 6), received_layouts=[rows] * 2, pair=pair, whole="target", **rest)
    assert torch.equal(ours, WHOLE)
    # And on one rank, which holds the whole.
    alone = made(transposed, torch.zeros(4, 6), received_layouts=[rows] * 2, pair=pair, whole="target")
    assert torch.equal(alone, WHOLE)
    received = made(sent, torch.zeros(6, 4), received_layouts=[rows] * 2, pair=pair)
    assert torch.equal(received, WHOLE.T)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_elements_outside_a_layout_stay_the_receivers_own(dtype: torch.dtype) -> None:
    pair, mine = parse_layout("part(dim=0, index=1, of=[1, 1])"), torch.full((4, 6), -1.0, dtype=dtype)
    rest: dict[str, Any] = {"pair": pair, "whole": "target", "recv_world_size": 2}
    rows = rank_layout(torch.ones(2, 6), None, 1) or RankLayout(Layout(), (2, 6))
    given = GraftTransformInput(
        {"name": "x"}, [WHOLE[2:]], [None], mine, received_layouts=[rows], senders=[0], send_world_size=1, **rest
    )
    outcome = _by_layout(given)
    assert outcome.value.dtype is dtype
    assert torch.equal(outcome.value, torch.cat([mine[:2], WHOLE[2:].to(dtype)]))
    assert outcome.known is not None
    assert outcome.known.tolist() == [[False] * 6] * 2 + [[True] * 6] * 2
    assert outcome.layout == f"{pair} => inferred"


def half_sent_to(target: Tensor, rank: int, ranks: int) -> GraftTransformInput:
    """One sender has the first half of a square, which the receivers have transposed."""
    half = RankLayout(parse_layout("part(dim=0, index=0, of=[2, 2])"), (4, 4))
    return GraftTransformInput(
        {"name": "x"},
        [SQUARE[:2]],
        [None],
        target,
        received_layouts=[half],
        senders=[0],
        send_world_size=1,
        recv_rank=rank,
        recv_world_size=ranks,
        pair=parse_layout("a b -> b a"),
    )


SQUARE = torch.arange(16.0).view(4, 4)


@pytest.mark.parametrize("ranks", [1, 2])
def test_what_the_senders_leave_out_is_left_out_where_the_pair_moves_it(ranks: int) -> None:
    outcome = by_layout(half_sent_to(torch.full((4, 4), -1.0), ranks - 1, ranks))
    assert outcome.value.tolist() == [[row, row + 4, -1, -1] for row in range(4)]
    assert outcome.known is not None
    assert outcome.known.tolist() == [[True, True, False, False]] * 4


def test_a_slice_of_what_the_senders_have_in_part_is_refused() -> None:
    with pytest.raises(LayoutError) as refused:
        _by_layout(half_sent_to(torch.zeros(2, 4), 1, 2))
    assert str(refused.value) == (
        "part(index=0, of=[2, 2], dim=0) | a b -> b a leaves out a part of [4, 4], and this rank, which declares no "
        "layout, holds [2, 4]"
    )


@pytest.mark.parametrize(
    ("index", "expected", "rows"),
    [
        ([2, -1, 0], [[6, 7], [-1, -1], [0, 1]], (2, 1)),
        ([2, 1, 0], [[6, 7], [3, 4], [0, 1]], (None, 0)),
        ([-1, -1, -1], [[-1, -1]] * 3, (0, 1)),
    ],
)
def test_rows_without_a_partner_are_left_out_on_receivers_that_say_nothing(
    index: list[int], expected: list[list[int]], rows: tuple[int | None, int]
) -> None:
    found = Rows("ids", "tokens").with_found(FoundRows((3,), (3,), np.array(index)))
    sent, own = torch.arange(9.0).view(3, 3)[:, :2], torch.full((3, 2), -1.0)
    given = GraftTransformInput(
        {"name": "x"},
        [sent],
        [None],
        own,
        senders=[0],
        send_world_size=1,
        recv_rank=1,
        recv_world_size=2,
        pair=Layout((found,)),
    )
    outcome = by_layout(given)
    assert outcome.value.tolist() == expected
    has_all = -1 not in index
    assert outcome.known is None if has_all else outcome.known.tolist() == [[each >= 0] * 2 for each in index]
    assert (outcome.rows_matched, outcome.rows_unmatched) == rows


@pytest.mark.parametrize(
    ("theirs", "mine", "said"),
    [
        ("same", "same", None),
        ("same", "shard(dim=0, mesh='tp')", "same => shard(dim=0, mesh='tp')"),
        ("shard(dim=0, mesh='tp')", "same", "shard(dim=0, mesh='tp') => same"),
        ("shard(dim=0, mesh='tp')", "shard(dim=0, mesh='tp')", "shard(dim=0, mesh='tp')"),
        ("part(index=0, of=[1, 1], dim=0)", "same", "part(index=0, of=[1, 1], dim=0) => same"),
        ("a b -> b a", "same", "a b -> b a => same"),
    ],
)
def test_row_has_both_layouts_or_the_common_one(theirs: str, mine: str, said: str | None) -> None:
    assert _text(parse_layout(theirs), parse_layout(mine), False) == said
    assert _text(parse_layout(theirs), parse_layout(mine), True) == (f"inferred => {parse_layout(mine)}")


def test_part_of_the_larger_tensor_is_suggested_on_either_side() -> None:
    whole = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    second = "part(index=1, of=[1, 1, 1], dim=1)"
    assert f"rel_l2 0, in the layout '{second}' of the received tensor" in suggested([whole], whole[:, 2:4])
    assert f"rel_l2 0, in the layout '{second}' of the receiver's own tensor" in suggested([whole[:, 2:4]], whole)
    # Nearly is near enough, and another is not.
    assert "rel_l2 0.09, in" in suggested([whole], whole[:, 2:4] / 1.09)
    assert suggested([whole], whole[:, 2:4] / 1.2) == "; 3 layouts would fit the shapes, but none fits the values"
    assert suggested([whole], whole[:, 2:4].long()) == "; 3 layouts would fit the shapes, but none fits the values"
    numbers = torch.arange(24).view(4, 6)
    assert f"rel_l2 0, in the layout '{second}'" in suggested([numbers], numbers[:, 2:4])


def test_no_layout_is_suggested_unless_one_fits_shapes_or_values() -> None:
    whole = torch.arange(1.0, 25).view(4, 6)
    for mine in (whole[:, :4], whole[:2, :3], whole[:, :, None][:2], whole[:, :0], torch.ones(1)):
        assert suggested([whole], mine) == "", mine.shape
    # Up to sixteen parts are tried.
    row = torch.arange(34.0)[None]
    assert "rel_l2 0, in" in suggested([row[:, :32]], row[:, 2:4])
    assert suggested([row], row[:, 2:4]) == ""
    assert suggested([whole], -whole.T) == (
        "; the shapes would fit in the layout 'a b -> b a' of the received tensor, but the values do not"
    )
    zeros = suggested([whole], torch.zeros(6, 4))
    assert zeros == "; the shapes would fit in the layout 'a b -> b a' of the received tensor, but the values do not"
    assert "declare it with gl.tap(layout=...)" in suggested([whole, whole], whole)


# ---- packed sequences over context parallel ranks --------------------------------------------------------------------


@pytest.mark.parametrize("order", ["t[cp] h", "t[cp:natural] h", "t[cp:zigzag] h"])
def test_tokens_of_packed_sequences_are_joined_per_sequence(order: str) -> None:
    lengths, whole = (8, 4), torch.arange(24.0).view(12, 2)
    pieces: list[list[Tensor]] = [[], []]
    for sequence in whole.split(lengths):
        chunks = sequence.chunk(4)
        first, second = ((0, 3), (1, 2)) if "zigzag" in order else ((0, 1), (2, 3))
        pieces[0] += [chunks[number] for number in first]
        pieces[1] += [chunks[number] for number in second]
    held = [torch.cat(each) for each in pieces]
    extras = {"request_lens": list(lengths)}
    rest: dict[str, Any] = {"received_layouts": [rank_layout(each, order, 2) for each in held]}
    for named in (None, "t h"):
        mine = rank_layout(whole, named, 1)
        assert torch.equal(made(held, whole * 0, target_extras=extras, layout=mine, **rest), whole)
    # Cut for two receivers, too.
    for rank in (0, 1):
        mine = rank_layout(held[rank], order, 2)
        sent: dict[str, Any] = {"received_layouts": [rank_layout(whole, "t h", 1)], "recv_world_size": 2}
        given = made([whole], held[rank] * 0, target_extras=extras, layout=mine, recv_rank=rank, **sent)
        assert torch.equal(given, held[rank])


def test_without_lengths_tokens_are_of_one_sequence_with_a_note() -> None:
    whole = torch.arange(24.0).view(12, 2)
    rest: dict[str, Any] = {"senders": [0, 1], "send_world_size": 2}
    for mine in (None, rank_layout(whole, "t h", 1)):
        given = GraftTransformInput({"name": "x"}, list(whole.chunk(2)), [None, None], whole * 0, layout=mine, **rest)
        found = by_layout(
            dataclasses.replace(given, received_layouts=[rank_layout(each, "t[cp] h", 2) for each in whole.chunk(2)])
        )
        assert torch.equal(found.value, whole)
        assert "no lengths of sequences arrived" in (found.note or "")


# ---- names on both sides ---------------------------------------------------------------------------------------------


def named(theirs: list[Tensor], text: str, mine: list[Tensor], own: str, sizes: dict[str, int]) -> list[Tensor]:
    """What each receiver gets; ``sizes`` is the mesh of a side with several ranks."""
    sent = [
        rank_layout(each, parse_layout(text, mesh=sizes) if len(theirs) > 1 else text, len(theirs)) for each in theirs
    ]
    found = []
    for rank, each in enumerate(mine):
        layout = rank_layout(each, parse_layout(own, mesh=sizes) if len(mine) > 1 else own, len(mine))
        rest: dict[str, Any] = {"recv_rank": rank, "recv_world_size": len(mine)}
        for direction in ("b2t", "t2b"):
            found.append(made(theirs, each * 0, received_layouts=sent, layout=layout, direction=direction, **rest))
        assert torch.equal(found[-1], found[-2])
    return found[::2]


TOKENS = torch.arange(4 * 24.0).view(4, 24)
ONE_RANK = [
    ("t (a*c)", TOKENS, "t a c", TOKENS.view(4, 2, 12)),
    ("b (h*d)", TOKENS, "b h d", TOKENS.view(4, 2, 12)),
    ("t h", TOKENS, "s 1 h", TOKENS.view(4, 1, 24)),
    ("t 1 h", TOKENS.view(4, 1, 24), "t h", TOKENS),
    ("t h", TOKENS, "s b h", TOKENS.view(2, 2, 24).transpose(0, 1)),
    ("b t h", TOKENS.view(2, 2, 24), "b s h", TOKENS.view(2, 2, 24)),
    ("t (a*e*c)", TOKENS, "t a e c", TOKENS.view(4, 2, 3, 4)),
    ("t (a*e) c", TOKENS.view(4, 6, 4), "t a (e*c)", TOKENS.view(4, 2, 12)),
    ("(t*h) a", TOKENS.view(24, 4), "s h a", TOKENS.view(4, 6, 4)),
]


@pytest.mark.parametrize("case", ONE_RANK, ids=[f"{case[0]} and {case[2]}" for case in ONE_RANK])
def test_dimensions_with_the_same_names_correspond(case: tuple[str, Tensor, str, Tensor]) -> None:
    one, left, other, right = case
    assert torch.equal(named([left], one, [right], other, {})[0], right)
    assert torch.equal(named([right], other, [left], one, {})[0], left)


def test_names_with_a_mesh_align_over_ranks() -> None:
    tp = {"tp": 2}
    fused = list(TOKENS.chunk(2, 1))
    apart = list(TOKENS.view(4, 2, 12).chunk(2, 1))
    assert torch.equal(named(fused, "t (a*c)[tp]", [TOKENS.view(4, 2, 12)], "t a c", tp)[0], TOKENS.view(4, 2, 12))
    for got, expected in zip(named(fused, "t (a*c)[tp]", apart, "t a[tp] c", tp), apart, strict=True):
        assert torch.equal(got, expected)
    whole = TOKENS.view(2, 2, 24)  # b s h
    quarters = [part for half in whole.transpose(0, 1).chunk(2, 0) for part in half.chunk(2, 2)]
    assert torch.equal(named(quarters, "s[cp] b h[tp]", [whole], "b s h", {"cp": 2, "tp": 2})[0], whole)
    for got, expected in zip(
        named([whole], "b s h", quarters, "s[cp] b h[tp]", {"cp": 2, "tp": 2}), quarters, strict=True
    ):
        assert torch.equal(got, expected)
    summands = [TOKENS - 7, torch.full_like(TOKENS, 7.0)]
    assert torch.equal(
        named(summands, "t (a*c)[tp:partial]", [TOKENS.view(4, 2, 12)], "t a c", tp)[0].view(4, 24), TOKENS
    )


def test_names_that_cannot_be_used_are_left_out_with_a_note() -> None:
    text, halves = "s[cp] b h[tp]", list(WHOLE.chunk(2))
    rest: dict[str, Any] = {"senders": [0, 1], "send_world_size": 2}
    given = GraftTransformInput(
        {"name": "x"}, halves, [None, None], WHOLE * 0, layout=rank_layout(WHOLE, "b s h", 1), **rest
    )
    found = by_layout(dataclasses.replace(given, received_layouts=[rank_layout(each, text, 2, 0) for each in halves]))
    assert torch.equal(found.value, WHOLE)
    assert (found.aligned_by, found.layout) == ("concat dim=0", INFERRED)
    assert "the names of dimensions were not used: s[cp] b h[tp]: it is unknown how 2 ranks" in (found.note or "")
    with pytest.raises(
        TransformError, match=r"cannot make a tensor of shape .*; the names of dimensions were not used"
    ):
        by_layout(
            dataclasses.replace(given, target=WHOLE[:3, :1] * 0, received_layouts=[rank_layout(WHOLE, text, 2)] * 2)
        )


def test_a_rank_takes_its_own_part_of_each_tensor_that_it_has_fused() -> None:
    wholes = [torch.arange(32.0).reshape(8, 4), torch.arange(16.0).reshape(4, 4) + 100]
    for rank in range(2):
        own = torch.cat([whole.chunk(2)[rank] for whole in wholes])
        for index, whole in enumerate(wholes):
            given = GraftTransformInput(
                {"name": "w"},
                [whole],
                [None],
                target=torch.zeros_like(own),
                senders=[0],
                send_world_size=1,
                recv_rank=rank,
                recv_world_size=2,
                pair=parse_layout(f"part(dim=0, index={index}, of=[2, 1])"),
                whole="target",
            )
            outcome = by_layout(given)
            assert outcome.known is not None
            assert torch.equal(outcome.value[outcome.known], own[outcome.known])
            assert int(outcome.known.sum()) == whole.numel() // 2


@pytest.mark.parametrize(
    ("whole", "known", "expected"),
    [
        ("received", None, (3, 1)),
        ("received", [True, False], (3, 1)),
        # The tensor has none of the rows that the taps show.
        ("received", [False, False], (0, 1)),
        # The whole's other rows may be in further pairs.
        ("target", None, (3, 0)),
    ],
)
def test_rows_of_a_pair_are_counted_as_the_taps_show_them(
    whole: str, known: list[bool] | None, expected: tuple[int, int]
) -> None:
    rows = Rows("ids", "tokens").with_found(FoundRows((5,), (4,), np.array([2, -1, 0, 4])))
    given: Any = SimpleNamespace(pair=Layout((rows,)), whole=whole)
    assert _rows_of_pair(given, None if known is None else torch.tensor(known)) == expected
    given.pair = Layout((Rows("ids", "tokens"),))
    assert _rows_of_pair(given, None) == (None, 0)
