"""Layouts can be applied and inverted: the ranks' tensors join to the whole bit by bit, also across layouts."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from kit.examples import examples
from kit.refusals import exactly
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts import (
    Gather,
    Layout,
    Mesh,
    OneOf,
    Pack,
    Pad,
    Part,
    Partial,
    Rearrange,
    Replicate,
    Rows,
    Scale,
    Shard,
    Unpack,
    Window,
    join_parts,
    parse_layout,
    relayout,
    steps,
)
from graftlab.layouts.row_alignment import FoundRows

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.complex64]


def tensor(shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Of distinct values where the dtype has enough of them, negative zero among them."""
    order = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(seed)).reshape(shape)
    if not dtype.is_floating_point and not dtype.is_complex:
        return order.to(dtype)
    values = (order.double() - math.prod(shape) // 2) / 8
    return torch.where(order == 0, torch.tensor(-0.0, dtype=torch.float64), values).to(dtype)


def bits(value: Tensor) -> list[int]:
    return value.contiguous().view(torch.uint8).flatten().tolist() if value.numel() else []


def same_bits(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and bits(one) == bits(other)


# ---- any two layouts of one tensor, both ways -----------------------------------------------------------------------

SHAPE = (4, 8, 24)
LENGTHS = (8, 4, 8, 4)
# From a whole of SHAPE, each over the mesh dimension "x"; how many ranks it can have.
OVER_RANKS: list[tuple[Any, tuple[int, ...]]] = [
    (lambda: [], (1, 2, 3, 4)),
    (lambda: [Replicate("x")], (1, 2, 3, 4)),
    (lambda: [Partial("x")], (1, 2, 3, 4)),
    (lambda: [Partial("x", "max")], (1, 2, 3, 4)),
    (lambda: [Partial("x", "avg")], (1, 2, 4)),
    (lambda: [Shard(0, "x")], (1, 2, 3, 4)),
    (lambda: [Shard(1, "x")], (1, 2, 3, 4)),
    (lambda: [Shard(-1, "x", uneven="balanced")], (1, 2, 3, 4)),
    (lambda: [Shard(0, "x", padded=True)], (1, 2, 3, 4)),
    (lambda: [Shard(2, "x", replicas=2)], (2, 4)),
    (lambda: [Shard(2, "x", blocks=(4, 1, 1))], (1, 2, 4)),
    (lambda: [Shard(2, "x", blocks=(4, 1, 1), replicas=(1, 2, 2))], (2, 4)),
    (lambda: [Shard(1, "x", order="zigzag")], (1, 2, 4)),
    (lambda: [Rearrange("b s (h d) -> b h s d", (("h", 6),)), Shard(1, "x")], (1, 2, 3)),
    (lambda: [Rearrange("b s h -> (b s) h"), Shard(0, "x")], (1, 2, 3, 4)),
    (lambda: [Rearrange("b s (h d) -> (s b) (d h)", (("d", 2),)), Shard(0, "x", order="zigzag")], (1, 2, 4)),
    (lambda: [Rearrange("b ... -> ... 1 b"), Shard(1, "x")], (1, 2, 3, 4)),
    (lambda: [Pad(2, 24, 30), Shard(2, "x")], (1, 2, 3, 4)),
    (lambda: [Rearrange("b s (k d) -> b s (k r d)", (("r", 2), ("d", 4))), Shard(2, "x")], (1, 2, 3, 4)),
]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    make, counts = draw(st.sampled_from(OVER_RANKS))
    return Layout(tuple(make())).on({"x": draw(st.sampled_from(counts))})


def prepared(layout: Layout, whole: Tensor) -> list[Tensor]:
    """What the ranks hold, with partial sums that are really partial, and padding that is no zeros."""
    held = [part.clone() for part in layout.split(whole)]
    for step in layout.steps:
        if isinstance(step, Partial) and step.op == "sum" and len(held) > 1:
            # A whole number, so that the sum is exact.
            held[0], held[-1] = held[0] - 3, held[-1] + 3
    return held


@pytest.mark.slow
@examples(300)
@given(layouts(), layouts(), st.sampled_from(DTYPES), st.integers(0, 99))
def test_from_any_layout_to_any_other_and_back_no_bit_changes(
    source: Layout, target: Layout, dtype: torch.dtype, seed: int
) -> None:
    assume(not (dtype.is_complex and any(isinstance(step, Partial) for step in (*source.steps, *target.steps))))
    assume(dtype.is_floating_point or not any(isinstance(s, Partial) for s in (*source.steps, *target.steps)))
    whole = tensor(SHAPE, dtype, seed)
    held = source.split(whole)
    there = [relayout([(source, held)], target, rank, shape=SHAPE) for rank in target.mesh.ranks]
    assert not any(each.disagreements for each in there)
    for rank, each in enumerate(there):
        assert same_bits(each.value, target.local(whole, rank))
    back = relayout([(target, [each.value for each in there])], source, source.mesh.ranks[-1], shape=SHAPE)
    assert same_bits(back.value, held[-1])
    joined = target.join([each.value for each in there], SHAPE)
    assert same_bits(joined.whole, whole)
    assert joined.known is None


@pytest.mark.slow
@examples(200)
@given(layouts(), layouts())
def test_wrong_layout_is_refused_or_gives_a_different_tensor(source: Layout, wrong: Layout) -> None:
    whole = tensor(SHAPE, torch.float64)
    held = prepared(source, whole)
    assert torch.equal(source.join(held, SHAPE).whole, whole)
    assume(wrong.mesh.size == source.mesh.size)
    try:
        taken = wrong.join(held, SHAPE)
    except LayoutError:
        return
    if not torch.equal(taken.whole, whole) or taken.disagreements:
        return
    # They are equal, so the two layouts agree for this tensor on this number of ranks.
    same = all(torch.equal(one, other) for one, other in zip(held, wrong.split(whole), strict=True))
    assert same or wrong.steps == source.steps


@examples(100)
@given(
    st.sampled_from([(2, 2), (2, 1), (1, 4), (3, 1)]),
    st.integers(0, 2),
    st.integers(0, 2),
    st.integers(5, 9),
    st.booleans(),
)
def test_two_mesh_dimensions_on_one_or_two_tensor_dimensions(
    sizes: tuple[int, int], first: int, second: int, extent: int, one_of: bool
) -> None:
    whole = tensor((extent, 7, 6), torch.float64)
    mesh = {"dp": sizes[0], "tp": sizes[1]}
    layout = Layout((Shard(first, "dp"), Shard(second, "tp"))).on(mesh)
    held = layout.split(whole)
    assert [part.numel() for part in held] == [layout.local(whole, rank).numel() for rank in range(len(held))]
    assert sum(part.numel() for part in held) == whole.numel()
    assert torch.equal(layout.join(held).whole, whole)
    other = Layout((Shard(second, "tp"), Shard(first, "dp"))).on(mesh)
    relaid = [relayout([(layout, held)], other, rank).value for rank in range(len(held))]
    assert torch.equal(other.join(relaid).whole, whole)


def test_dimensions_of_the_mesh_that_no_step_names_hold_replicas_that_are_compared() -> None:
    whole = tensor((6, 4))
    layout = parse_layout("shard(dim=0, mesh='tp')", mesh={"dp": 2, "tp": 2})
    held = [part.clone() for part in layout.split(whole)]
    assert layout.join(held).disagreements == ()
    held[3][1, 2] += 0.5
    (found,) = layout.join(held).disagreements
    assert (found.count, found.max_abs) == (1, 0.5)
    assert "replicas 0 and 1 along 'dp'" in str(found)
    assert torch.equal(layout.join(held).whole, whole)


def test_nan_agrees_with_nan_and_different_shapes_disagree() -> None:
    layout = Layout((Replicate("tp"),)).on(2)
    nans = torch.tensor([math.nan, 1.0])
    assert layout.join([nans, nans.clone()]).disagreements == ()
    assert "shapes [2] and [3]" in str(layout.join([nans, torch.zeros(3)]).disagreements[0])


# ---- the steps one by one, against what is written out by hand ------------------------------------------------------


def test_fused_qkv_with_grouped_heads_comes_apart_both_ways_of_fusing() -> None:
    q, k, v = tensor((8, 4), seed=1), tensor((4, 4), seed=2), tensor((4, 4), seed=3)
    block = torch.cat((q, k, v))
    for index, part in enumerate((q, k, v)):
        assert torch.equal(Layout((Part(index, (2, 1, 1)),)).local(block), part)
    grouped = torch.cat((q[:4], k[:2], v[:2], q[4:], k[2:], v[2:]))
    for index, part in enumerate((q, k, v)):
        assert torch.equal(Layout((Part(index, (2, 1, 1), groups=2),)).local(grouped), part)
    parts = [(Layout((Part(i, (2, 1, 1), groups=2),)), [part]) for i, part in enumerate((q, k, v))]
    joined = join_parts(parts)
    assert torch.equal(joined.whole, grouped)
    assert joined.known is None


def test_elements_outside_the_parts_are_the_receivers_own() -> None:
    fused, own = tensor((6, 4), seed=1), tensor((6, 4), seed=2)
    k = Layout((Part(1, (1, 1, 1)),))
    assert k.leaves_out == ("the other 2 parts along dim 0",)
    relaid = relayout([(k, [fused[2:4]])], Layout(), own=own)
    assert torch.equal(relaid.value, torch.cat((own[:2], fused[2:4], own[4:])))
    assert relaid.known is not None
    assert relaid.known[:, 0].tolist() == [False, False, True, True, False, False]
    with pytest.raises(
        LayoutError, match=exactly("the parts lack elements that same needs: the other 2 parts along dim 0")
    ):
        relayout([(k, [fused[2:4]])], Layout())


def test_parts_that_overlap_are_compared() -> None:
    whole = tensor((6,))
    one, other = Layout((Window(0, 0, 4),)), Layout((Window(0, 2, 4),))
    parts = [(one, [whole[:4]]), (other, [whole[2:] + torch.tensor([0.0, 1.0, 0.0, 0.0])])]
    joined = join_parts(parts, shape=(6,))
    assert joined.disagreements[0].count == 1
    assert torch.equal(joined.whole[:4], whole[:4])
    # What the ranks of a later part disagree about is reported too.
    ranks = Layout((Replicate("tp"), Window(0, 2, 4))).on(2)
    joined = join_parts([(one, [whole[:4]]), (ranks, [whole[2:], whole[2:] + 1])], shape=(6,))
    assert len(joined.disagreements) == 1
    with pytest.raises(LayoutError, match=exactly("same makes a whole of shape [6], but the previous part one of [4]")):
        join_parts([(Layout(), [whole[:4]]), (Layout(), [whole])])


def test_a_part_beside_the_whole_is_compared_and_changes_nothing() -> None:
    whole, part = tensor((6,)), Layout((Window(0, 2, 4),))
    joined = join_parts([(Layout(), [whole]), (part, [whole[2:] + torch.tensor([0.0, 1.0, 0.0, 0.0])])], shape=(6,))
    assert torch.equal(joined.whole, whole)
    assert (joined.known, joined.disagreements[0].count) == (None, 1)


def test_gate_and_up_that_alternate_row_by_row() -> None:
    gate, up = tensor((5, 3), seed=1), tensor((5, 3), seed=2)
    fused = torch.stack((gate, up), dim=1).flatten(0, 1)
    assert torch.equal(Layout((Part(0, (1, 1), groups=5),)).local(fused), gate)
    assert torch.equal(Layout((Part(1, (1, 1), groups=5),)).local(fused), up)


def test_tensor_parallel_rank_has_its_q_k_and_v_in_sequence() -> None:
    q, k, v = tensor((8, 2), seed=1), tensor((2, 2), seed=2), tensor((2, 2), seed=3)
    layout = Layout((Shard(0, "tp", blocks=(4, 1, 1), replicas=(1, 2, 2)),)).on(4)
    held = layout.split(torch.cat((q, k, v)))
    for rank in range(4):
        expected = torch.cat((q[2 * rank : 2 * rank + 2], k[rank // 2 : rank // 2 + 1], v[rank // 2 : rank // 2 + 1]))
        assert torch.equal(held[rank], expected)
    assert torch.equal(layout.join(held).whole, torch.cat((q, k, v)))
    held[1][2] += 1
    assert "replicas 0 and 1" in layout.join(held).disagreements[0].where


def test_zigzag_assigns_each_rank_an_early_and_a_late_chunk() -> None:
    whole = torch.arange(8)
    held = Layout((Shard(0, "cp", order="zigzag"),)).on(2).split(whole)
    assert [part.tolist() for part in held] == [[0, 1, 6, 7], [2, 3, 4, 5]]
    packed = Layout((Shard(0, "cp", order="zigzag", packed=True),)).on(2)
    held = packed.split(torch.arange(12), lengths=(8, 4))
    assert [part.tolist() for part in held] == [[0, 1, 6, 7, 8, 11], [2, 3, 4, 5, 9, 10]]
    assert torch.equal(packed.join(held, lengths=(8, 4), shape=(12,)).whole, torch.arange(12))


def test_uneven_shards_are_cut_as_torch_cuts_them() -> None:
    whole = torch.arange(5)
    for ranks in (1, 2, 3, 4):
        chunks = [part.tolist() for part in whole.chunk(ranks)]
        held = [part.tolist() for part in Layout((Shard(0, "x"),)).on(ranks).split(whole)]
        assert held == chunks + [[]] * (ranks - len(chunks))
        balanced = Layout((Shard(0, "x", uneven="balanced"),)).on(ranks).split(whole)
        assert [part.tolist() for part in balanced] == [part.tolist() for part in whole.tensor_split(ranks)]


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 3))
def test_packed_and_padded_are_one_batch(lengths: list[int], more: int) -> None:
    packed = tensor((sum(lengths), 3))
    width = max(lengths) + more
    padded = Layout((Unpack(width),)).local(packed, lengths=lengths)
    assert padded.shape == (len(lengths), width, 3)
    assert torch.equal(Layout((Unpack(width),)).join([padded], lengths=lengths).whole, packed)
    assert torch.equal(Layout((Pack(),)).local(padded, lengths=lengths), packed)
    assert torch.equal(Layout((Pack(),)).join([packed], padded.shape, lengths).whole, padded)
    # A batch of no sequences, as on a rank that has nothing to do.
    assert Layout((Pack(),)).local(padded[:0], lengths=()).shape == packed[:0].shape


def test_scaling_is_inverted_with_a_caveat_if_that_rounds() -> None:
    whole = tensor((5,))
    assert Layout((Scale(0.125),)).caveats == ()
    assert torch.equal(Layout((Scale(0.125),)).join([whole * 0.125]).whole, whole)
    assert "rounds" in Layout((Scale(0.1),)).caveats[0]
    assert torch.allclose(Layout((Scale(0.1, 1.0),)).join([whole * 0.1 + 1]).whole, whole, atol=1e-5)


def test_scaling_leaves_the_mask_of_known_elements_as_it_is() -> None:
    held = tensor((3,))
    own = torch.full((6,), -7.0)
    relaid = relayout([(Layout((Part(0, (1, 1)),)), [held])], Layout((Scale(2.0, 1.0),)), own=own)
    assert relaid.known is not None
    assert relaid.known.tolist() == [True] * 3 + [False] * 3
    assert relaid.value.tolist() == [*(2 * held + 1).tolist(), -7.0, -7.0, -7.0]


def test_partial_sums_are_added_and_a_graft_notes_where_the_value_goes() -> None:
    partial = Layout((Partial("tp"),)).on(2)
    half = torch.full((3,), 0.5)
    assert partial.join([half, half]).whole.tolist() == [1.0] * 3
    grafted = [relayout([(Layout(), [half * 2])], partial, rank) for rank in range(2)]
    assert [each.value.tolist() for each in grafted] == [[1.0] * 3, [0.0] * 3]
    assert "whole value of a partial sum over 'tp' on the first rank and zeros" in grafted[0].caveats[0]
    # Booleans have no sum: each rank has the whole.
    mask = torch.tensor([True, False])
    assert partial.join([mask, mask]).whole.tolist() == [True, False]
    assert [relayout([(Layout(), [mask])], partial, rank).value.tolist() for rank in range(2)] == [[True, False]] * 2
    # The zero of the others changes no bit, not even of a negative zero.
    minus = relayout([(Layout(), [torch.tensor([-0.0])])], partial, 0).value
    assert same_bits(partial.join([minus, relayout([(Layout(), [minus])], partial, 1).value]).whole, minus)
    bf16 = [torch.tensor([256.0], dtype=torch.bfloat16)] + [torch.tensor([0.5], dtype=torch.bfloat16)] * 4
    assert Layout((Partial("tp"),)).on(5).join(bf16).whole.item() == 258.0
    fine = torch.tensor([1 + 2.0**-40], dtype=torch.float64)
    assert partial.join([fine, fine]).whole.item() == 2 + 2.0**-39


def test_steps_made_from_lists_are_those_made_from_tuples_and_hashable() -> None:
    lists: Any = (Shard(0, blocks=[1, 2], replicas=[1, 2]), Gather([3], [[1, 2], [0, 1]], [3]))  # type: ignore[arg-type]
    tuples = (Shard(0, blocks=(1, 2), replicas=(1, 2)), Gather((3,), ((1, 2), (0, 1)), (3,)))
    assert lists == tuples
    assert hash(lists) == hash(tuples)


def test_one_of_the_data_parallel_ranks_holds_it_all() -> None:
    layout = Layout((OneOf("dp"),)).on(3)
    whole, empty = tensor((4, 2)), torch.empty(0, 2)
    assert torch.equal(layout.join([empty, whole, empty]).whole, whole)
    assert relayout([(Layout(), [whole])], layout, 0, own=empty).value is empty
    with pytest.raises(
        LayoutError, match=exactly("one_of(mesh='dp'): places [0, 1] all have elements, but only one rank may")
    ):
        layout.join([whole, whole, empty])


def test_ranks_with_one_value_are_added_averaged_or_their_extremes_taken() -> None:
    parts = [torch.tensor([1.0, -4.0]), torch.tensor([5.0, 2.0])]
    expected = {"sum": [6, -2], "avg": [3, -1], "max": [5, 2], "min": [1, -4]}
    for op, values in expected.items():
        layout = Layout((Partial("tp", op),)).on(2)
        assert layout.join(parts).whole.tolist() == values
        narrow = layout.join([part.bfloat16() for part in parts]).whole
        assert (narrow.dtype, narrow.tolist()) == (torch.bfloat16, values)
        # A sum is on the first rank alone, and any other value on each.
        whole = torch.tensor(values, dtype=torch.float32)
        assert layout.local(whole, 1).tolist() == ([0, 0] if op == "sum" else values)
        assert layout.local(whole, 0).tolist() == values
    assert parts[0].tolist() == [1, -4]
    assert Layout((Partial("tp", "avg"),)).on(3).join([*parts, torch.tensor([3.0, 8.0])]).whole.tolist() == [3, 2]
    with pytest.raises(
        LayoutError, match=exactly("partial(mesh='tp'): the partial results have different shapes, [[2], [3]]")
    ):
        Layout((Partial("tp"),)).on(2).join([torch.zeros(2), torch.zeros(3)])


def test_padded_shards_are_filled_with_zeros_which_joining_drops() -> None:
    layout = Layout((Shard(0, "tp", padded=True),)).on(2)
    held = layout.split(torch.tensor([1.0, 2.0, 3.0]))
    assert [each.tolist() for each in held] == [[1, 2], [3, 0]]
    assert layout.join(held, (3,)).whole.tolist() == [1, 2, 3]


def test_a_strided_view_is_of_the_whole_even_of_a_view_and_is_put_back_in_its_place() -> None:
    layout = parse_layout("strided(shape=[2, 2], sizes=[4], strides=[2], offset=1)")
    whole = torch.arange(10.0)[2:]
    assert layout.local(whole).tolist() == [[3, 5], [7, 9]]
    joined = layout.join([torch.tensor([[1.0, 2.0], [3.0, 4.0]])], (8,))
    assert joined.whole.tolist() == [0, 1, 0, 2, 0, 3, 0, 4]
    assert joined.known is not None
    assert joined.known.tolist() == [False, True] * 4
    assert layout.leaves_out
    # Elements count in the order of the dimensions, not of the memory.
    assert layout.local(torch.arange(8.0).reshape(2, 4).T).tolist() == [[4, 5], [6, 7]]
    with pytest.raises(
        LayoutError,
        match=exactly("strided(shape=[2, 2], sizes=[4], strides=[2], offset=1) reaches beyond the 7 elements of [7]"),
    ):
        layout.local(torch.arange(7.0))
    with pytest.raises(
        LayoutError,
        match=exactly(
            "strided(shape=[2, 2], sizes=[4], strides=[2], offset=1) does not determine the whole tensor's "
            "shape; give it"
        ),
    ):
        layout.join([torch.zeros(2, 2)])


def test_a_strided_view_that_repeats_elements_is_put_back_once_and_compared() -> None:
    layout = parse_layout("strided(shape=[2, 3], sizes=[2, 3], strides=[0, 1])")
    assert layout.local(torch.tensor([1.0, 2.0, 3.0])).tolist() == [[1, 2, 3]] * 2
    joined = layout.join([torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 4.0]])], (3,))
    assert joined.whole.tolist() == [1, 2, 3]
    (disagreement,) = joined.disagreements
    assert "repetitions" in str(disagreement)


def test_padding_is_filled_and_left_out_again() -> None:
    layout = parse_layout("pad(dim=0, size=3, to=5, fill=-1.0)")
    assert layout.local(torch.tensor([1.0, 2.0, 3.0])).tolist() == [1, 2, 3, -1, -1]
    assert layout.join([torch.tensor([1.0, 2.0, 3.0, 7.0, 8.0])]).whole.tolist() == [1, 2, 3]
    assert layout.caveats == ("a graft fills elements 3..4 of dim 0, which are padding, with -1",)
    with pytest.raises(
        LayoutError, match=exactly("pad(dim=0, size=3, to=5, fill=-1.0): dimension 0 of [4] is not of size 5")
    ):
        layout.join([torch.zeros(4)])
    assert parse_layout("pad(dim=0, size=3, to=3)").caveats == ()


def test_only_a_tensor_far_larger_than_the_one_that_it_is_made_from_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LayoutError, match=r"makes a tensor of \[1099511627776\] from one of \[1\], which is too large"):
        Layout((Pad(0, 1, 1 << 40),)).local(torch.ones(1))
    # However large both are.
    monkeypatch.setattr(steps, "_MOST_ELEMENTS", 4)
    assert Layout((Pad(0, 5, 8),)).local(torch.ones(5)).tolist() == [1.0] * 5 + [0.0] * 3
    assert Layout((Pad(0, 1, 4),)).local(torch.ones(1)).tolist() == [1.0, 0.0, 0.0, 0.0]


def test_lengths_that_are_not_the_tensors_are_refused() -> None:
    packed = parse_layout("shard(dim=0, mesh='cp', packed=True)", mesh=2)
    with pytest.raises(
        LayoutError, match=exactly("shard(dim=0, mesh='cp', packed=True): lengths [2, 4] add up to 6, not to 8")
    ):
        packed.local(torch.zeros(8), lengths=[2, 4])
    with pytest.raises(
        LayoutError,
        match=exactly("shard(dim=0, mesh='cp', packed=True): a sequence of 3 tokens does not divide by 2 ranks"),
    ):
        packed.local(torch.zeros(8), lengths=[5, 3][::-1])
    with pytest.raises(LayoutError, match=exactly("unpack(): lengths [1, 1] add up to 2, not to [3]'s rows")):
        parse_layout("unpack()").local(torch.zeros(3), lengths=[1, 1])
    with pytest.raises(
        LayoutError,
        match=exactly(
            "pack(): 2 sequences of up to 5 tokens need a tensor [batch, tokens, ...] of at least that size, not [2, 4]"
        ),
    ):
        parse_layout("pack()").local(torch.zeros(2, 4), lengths=[5, 3])
    with pytest.raises(
        LayoutError,
        match=exactly(
            "pack(): 0 sequences of up to 0 tokens need a tensor [batch, tokens, ...] of at least that size, not [2, 4]"
        ),
    ):
        parse_layout("pack()").local(torch.zeros(2, 4), lengths=[])
    with pytest.raises(LayoutError, match=r"unpack\(to=2\): the longest sequence has 3 tokens"):
        parse_layout("unpack(to=2)").local(torch.zeros(4), lengths=[3, 1])


def test_a_window_is_put_back_only_into_a_whole_of_known_shape() -> None:
    layout = parse_layout("window(dim=0, start=-1, length=1)")
    assert layout.join([torch.tensor([5.0])], (3,)).whole.tolist() == [0, 0, 5]
    with pytest.raises(
        LayoutError,
        match=exactly("window(dim=0, start=-1, length=1) does not determine the whole tensor's shape; give it"),
    ):
        layout.join([torch.tensor([5.0])])
    with pytest.raises(LayoutError, match=exactly("window(dim=0, start=-1, length=1) of [3] is [1], not [2]")):
        layout.join([torch.zeros(2)], (3,))


def test_a_mesh_has_each_dimension_and_each_rank_once() -> None:
    with pytest.raises(LayoutError, match=exactly("a mesh has each dimension only once, not ['tp', 'tp']")):
        Mesh((("tp", 2), ("tp", 2)))
    for ranks in ((0, 0), (0, 1, 2), (0,)):
        with pytest.raises(LayoutError, match="has 2 different ranks, not"):
            Mesh((("tp", 2),), ranks)
    with pytest.raises(LayoutError, match=exactly("mesh dimension 'tp' must have a size of at least 1, not 0")):
        Mesh((("tp", 0),))
    with pytest.raises(LayoutError, match=exactly("no part was given, so there is nothing to join")):
        join_parts([])
    with pytest.raises(LayoutError, match=exactly("same gives a whole of shape [2], not [3]")):
        Layout().join([torch.zeros(2)], (3,))


def test_the_ranks_of_a_mesh_may_stand_in_any_order() -> None:
    layout = Layout((Shard(0, "tp"),), Mesh((("tp", 2),), (5, 3)))
    whole = torch.arange(4)
    assert layout.local(whole, 5).tolist() == [0, 1]
    assert layout.local(whole, 3).tolist() == [2, 3]
    with pytest.raises(LayoutError, match=exactly("rank 0 is not in the mesh of {'tp': 2}, whose ranks are (5, 3)")):
        layout.local(whole, 0)


# ---- what cannot be is refused, with what and where -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape", "message"),
    [
        ("shard(dim=2)", (4, 2), "has no dimension 2"),
        ("shard(dim=-3)", (4, 2), "has no dimension -3"),
        ("shard(dim=0, order='zigzag')", (6,), "zigzag over 2 ranks needs a multiple of 4, not 6"),
        ("shard(dim=0, blocks=[2, 1])", (4,), r"4 elements do not divide into blocks of \[2, 1\]"),
        ("shard(dim=0, replicas=3)", (4,), "2 ranks do not divide into 3 replicas"),
        ("shard(dim=0, packed=True)", (4,), "needs the lengths"),
        ("part(index=0, of=[1, 1, 1])", (4,), "do not divide into 1 x 3"),
        ("window(dim=0, start=2, length=4)", (4,), "reaches beyond"),
        ("pad(dim=0, size=3, to=4)", (4,), "is not of size 3"),
        ("pack()", (4, 2), "needs the lengths"),
        ("b s -> s b", (4,), r"does not have the 1 dimensions of \[4\]"),
        ("(a b) c -> a b c", (4, 2), r"could be split into \['a', 'b'\]"),
        ("(a b) c -> a b c, a=3", (4, 2), r"dimension 0 of \[4, 2\] on the left is not \(a=3 b=\?\)"),
        ("a 1 -> a", (4, 2), r"dimension 1 of \[4, 2\] on the left is not \(1\)"),
    ],
)
def test_a_tensor_that_does_not_have_the_layout_is_refused(text: str, shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        parse_layout(text, mesh=2).local(tensor(shape))


def test_joining_reports_what_does_not_fit() -> None:
    shard = Layout((Shard(0, "tp"),)).on(2)
    with pytest.raises(LayoutError, match=exactly("shard(dim=0, mesh='tp') is on 2 ranks {'tp': 2}, not 3 tensors")):
        shard.join([torch.zeros(2)] * 3)
    with pytest.raises(
        LayoutError, match=exactly("shard(dim=0, mesh='tp') of 5 elements gives place 0 of 2 3 of them, not shape [2]")
    ):
        shard.join([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(
        LayoutError,
        match=exactly("shard(dim=0, mesh='tp'): [[2, 3], [2, 4]] are not shards: they differ outside dimension 0"),
    ):
        shard.join([torch.zeros(2, 3), torch.zeros(2, 4)])
    with pytest.raises(
        LayoutError,
        match=exactly(
            "shard(dim=0, mesh='tp'): [[2, 3], [2, 3]] are not shards of a whole of shape [4]: they differ "
            "outside dimension 0"
        ),
    ):
        shard.join([torch.zeros(2, 3)] * 2, shape=(4,))
    with pytest.raises(
        LayoutError,
        match=exactly(
            "the amount of padding in shard(dim=0, mesh='tp', padded=True) is unknown; give the whole tensor's shape"
        ),
    ):
        Layout((Shard(0, "tp", padded=True),)).on(2).join([torch.zeros(2)] * 2)
    with pytest.raises(
        LayoutError, match=exactly("from shard(dim=0, mesh='tp') to same: rank 0 would have shape [4], but it has [3]")
    ):
        relayout([(shard, [torch.zeros(2)] * 2)], Layout(), own=torch.zeros(3))
    with pytest.raises(
        LayoutError,
        match=exactly("shard(dim=0, mesh='tp') | shard(dim=1, mesh='tp'): two steps use mesh dimension 'tp'"),
    ):
        Layout((Shard(0, "tp"), Shard(1, "tp")))
    with pytest.raises(
        LayoutError,
        match=exactly(
            "it is unknown how 2 ranks are split over ['tp', 'cp']; give the size of each, for example "
            "mesh={'tp': 2, 'cp': 1}"
        ),
    ):
        Layout((Shard(0, "tp"), Shard(1, "cp"))).on(2)


# ---- rows in another order ------------------------------------------------------------------------------------------


def test_gathered_rows_are_put_back_and_rows_of_one_side_stay_its_own() -> None:
    layout = parse_layout("gather(of=[2, 4], runs=[[4, 3], [-1, 1], [0, 2]], into=[6])")
    whole = torch.arange(1.0, 17.0).reshape(2, 4, 2)
    rows = layout.local(whole)
    assert rows[:, 0].tolist() == [9, 11, 13, 0, 1, 3]
    assert [step.leaves_out for step in layout.steps] == ["3 of 8 rows"]
    assert layout.lacks
    numbers = [1, 2, -1, -1, 0, 3]
    # Rows that follow each other are one run, and so are those that lack.
    assert Gather.of_rows((4,), numbers, (6,)).runs == ((1, 2), (-1, 2), (0, 1), (3, 1))
    assert Gather.of_rows((4,), numbers, (6,)).rows.tolist() == numbers
    assert not parse_layout("gather(of=[4], runs=[[2, 2], [0, 2]], into=[4])").lacks
    joined = layout.join([rows])
    assert joined.known is not None
    assert torch.equal(joined.whole[joined.known], whole[joined.known])
    assert joined.known[..., 0].tolist() == [[True, True, False, False], [True, True, True, False]]
    own = torch.full((6, 2), -5.0)
    relaid = relayout([(parse_layout("same"), [whole])], layout, own=own)
    assert relaid.known is not None
    assert relaid.value[:, 0].tolist() == [9, 11, 13, -5, 1, 3]
    assert relaid.known[:, 0].tolist() == [True, True, True, False, True, True]
    with pytest.raises(
        LayoutError,
        match=exactly(
            "the rows of this pair were found in a batch of 2 x 4 rows, and this tensor is [2, 3, 2]: "
            "match again for this batch"
        ),
    ):
        layout.local(whole[:, :3])


def test_rows_of_taps_state_what_they_leave_out_and_may_be_flat() -> None:
    rows = Rows("ids", "tokens", flat=True)
    assert rows.leaves_out == "rows that only ids or tokens has"
    assert Layout((rows,)).leaves_out
    # Padded sequences of 2 and 1 tokens on both sides, in another order.
    found = rows.with_found(FoundRows((2, 2), (2, 2), np.array([2, -1, 0, 1])))
    assert (found.leaves_out, found.lacks) == ("1 of 4 rows", True)
    assert rows.with_found(FoundRows((2,), (2,), np.array([1, 0]))).leaves_out is None
    whole = torch.tensor([[[1.0], [2.0]], [[3.0], [0.0]]])
    for shape, flat in (((2, 2, 1), False), ((4, 1), True), ((2, 2, 1), True), ((4, 1), False)):
        taken = Layout((replace(found, flat=flat),)).local(whole.reshape(shape))
        assert taken.shape == ((4, 1) if flat else (2, 2, 1))
        assert taken.flatten().tolist() == [3, 0, 1, 2]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "gather(of=[4], runs=[[2, 3]], into=[3])",
            (
                "gather: the run [2, 3] is not within 4 rows (at position 0)\n    gather(of=[4], runs=[[2, "
                "3]], into=[3])\n    ^"
            ),
        ),
        (
            "gather(of=[4], runs=[[0, 3]], into=[4])",
            (
                "gather: the runs do not add up to the 4 rows of [4] (at position 0)\n    gather(of=[4], "
                "runs=[[0, 3]], into=[4])\n    ^"
            ),
        ),
        (
            "gather(of=[4], runs=[[0, 0]], into=[1])",
            (
                "gather: a run is a first row and a number of rows, not [0, 0] (at position 0)\n    "
                "gather(of=[4], runs=[[0, 0]], into=[1])\n    ^"
            ),
        ),
    ],
)
def test_a_gather_that_fits_no_batch_is_refused(text: str, why: str) -> None:
    with pytest.raises(LayoutError, match=exactly(why)):
        parse_layout(text)


def test_ranks_that_do_not_divide_into_each_blocks_replicas_are_refused() -> None:
    layout = Layout((Shard(0, "tp", blocks=(4, 1, 1), replicas=(1, 2, 2)),)).on(3)
    with pytest.raises(
        LayoutError,
        match=exactly(
            "shard(dim=0, mesh='tp', replicas=[1, 2, 2], blocks=[4, 1, 1]): 3 ranks do not divide into [1, "
            "2, 2] replicas"
        ),
    ):
        layout.join([tensor((6,))] * 3)


def test_a_scaled_whole_leaves_the_mask_of_known_elements_as_it_is() -> None:
    held = tensor((3,))
    own = torch.full((6,), -7.0)
    relaid = relayout([(Layout((Scale(2.0, 1.0), Part(0, (1, 1)))), [held])], Layout(), own=own)
    assert relaid.known is not None
    assert relaid.known.dtype == torch.bool
    assert relaid.known.tolist() == [True] * 3 + [False] * 3


@pytest.mark.parametrize(
    ("pattern", "sizes", "shape"),
    [
        ("a b -> b a", {}, (2, 3)),
        ("a b c -> c a b", {}, (2, 3, 4)),
        ("(h d) s -> s h d", {"h": 2}, (6, 5)),
        ("b s (h d) -> b h s d", {"h": 2}, (2, 5, 6)),
        ("(h d) -> (d h)", {"h": 2}, (6,)),
        ("a b -> a n b", {"n": 2}, (3, 4)),
        ("a b -> n b a m", {"n": 2, "m": 5}, (3, 4)),
        ("b (h d) -> b n h d", {"h": 2, "n": 3}, (3, 4)),
        ("b (g d) -> b (g n d)", {"g": 2, "n": 3}, (3, 4)),
        ("a b -> (a b)", {}, (2, 3)),
    ],
)
def test_the_torch_code_of_a_rearrangement_computes_what_it_does(
    pattern: str, sizes: dict[str, int], shape: tuple[int, ...]
) -> None:
    step = Rearrange(pattern, tuple(sizes.items()))
    x = tensor(shape)
    expected = Layout((step,)).local(x)
    found = eval(f"x{step.torch_code(shape)}", {"x": x})
    assert found.shape == expected.shape
    assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a b c -> (a b) c", "a b ... -> (a b) ..."),
        ("(a b) c d -> a b c d, a=2", "rearrange('(a b) ... -> a b ...', a=2)"),
        ("1 a b c -> (a b) c", "1 a b ... -> (a b) ..."),
        ("a b c -> (a b) c | gather(of=[6], runs=[[0, 3]], into=[3])", None),
        # Numbers in another order, features that are split, nothing left alone, dims of length 1, or a part.
        ("a b c -> (b a) c", ""),
        ("a (b c) -> a b c, b=2", ""),
        ("a b -> (a b)", ""),
        ("1 a b -> a b", ""),
        ("a ... -> ... a", ""),
        ("a b c -> (a b) c | shard(dim=0, mesh='tp')", ""),
    ],
)
def test_a_layout_of_rows_alone_is_that_of_other_tensors_with_these_rows(text: str, expected: str | None) -> None:
    found = parse_layout(text).on_leading_dims()
    if expected is None:
        expected = text.replace("a b c -> (a b) c", "a b ... -> (a b) ...")
    assert ("" if found is None else found.text) == expected
    if found is not None and "gather" not in text and "a=2" not in text:
        whole = torch.arange(24.0).reshape((1, 2, 3, 4) if text.startswith("1") else (2, 3, 4))
        assert torch.equal(found.local(whole), whole.reshape(6, 4))
