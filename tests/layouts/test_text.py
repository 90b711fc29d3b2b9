"""Layouts as text: the text of a layout parses to the same layout, and errors have positions."""

from __future__ import annotations

import contextlib
import itertools
import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.refusals import exactly

from graftlab.errors import LayoutError
from graftlab.layouts import (
    Layout,
    OneOf,
    Part,
    Partial,
    Rearrange,
    Replicate,
    Shard,
    layouts_of_pair,
    parse_dims,
    parse_layout,
    relayout,
)

WRITTEN = [
    "same",
    "b s (h d) -> b h s d",
    "rearrange('b s (h d) -> b h s d', h=12)",
    "b ... -> ... 1 b",
    "shard(dim=0, mesh='tp')",
    "shard(dim=0, mesh='tp', uneven='balanced')",
    "shard(dim=0, mesh='tp', padded=True)",
    "shard(dim=0, mesh='tp', replicas=2, blocks=[4, 1, 1])",
    "shard(dim=0, mesh='tp', replicas=[1, 2, 2], blocks=[4, 1, 1])",
    "shard(dim=0, mesh='cp', order='zigzag', packed=True)",
    "replicate(mesh='ep')",
    "partial(mesh='tp')",
    "partial(mesh='tp', op='max')",
    "one_of(mesh='moe_dp')",
    "regroup(dim=1, ranks=2)",
    "regroup(dim=0, ranks=4, blocks=[4, 1, 1], replicas=[1, 2, 2])",
    "part(index=1, of=[4, 1, 1], dim=0, groups=8)",
    "window(dim=1, start=2, length=5, step=2)",
    "window(dim=1, start=-1, length=1)",
    "gather(of=[2, 4], runs=[[4, 3], [-1, 1], [0, 2]], into=[6])",
    "pad(dim=0, size=50257, to=50304)",
    "pad(dim=0, size=3, to=5, fill=-1.0)",
    "strided(shape=[2, 2], sizes=[4], strides=[2], offset=1)",
    "strided(shape=[4], sizes=[4], strides=[1])",
    "sketch(size=8, of=[2, 3])",
    "rows(of='ids', into='tokens')",
    "rows(of='ids', into='tokens', flat=True)",
    "scale(factor=0.125, add=1.0)",
    "pack()",
    "unpack(to=128)",
]


def test_a_bar_inside_quotes_separates_no_steps() -> None:
    layout = parse_layout("rows(of='a|b', into=\"c | d\") | scale(factor=2.0)")
    assert layout.text == "rows(of='a|b', into='c | d') | scale(factor=2.0)"


@pytest.mark.parametrize("text", WRITTEN)
def test_a_layout_is_written_as_it_is_read(text: str) -> None:
    assert parse_layout(text).text == text


# Of no dimension, without elements, and of one to four.
SHAPES = [(), (0,), (1,), (3,), (6,), (1, 3), (2, 0), (2, 3), (2, 3, 4), (1, 2, 3, 4)]


@pytest.mark.parametrize("text", WRITTEN)
def test_a_tensor_that_does_not_fit_a_layout_raises_nothing_but_its_error(text: str) -> None:
    layout = parse_layout(text)
    for ranks, shape, lengths in itertools.product((1, 2), SHAPES, (None, (), (3,), (1, 2))):
        if ranks > 1 and "mesh" not in text:
            continue
        tensor = torch.zeros(shape)
        with contextlib.suppress(LayoutError):
            layout.on(ranks).local(tensor, 0, lengths)
        with contextlib.suppress(LayoutError):
            layout.on(ranks).join([tensor] * ranks, lengths=lengths)


def test_a_batch_without_sequences_is_cut_into_nothing() -> None:
    layout = parse_layout("shard(dim=0, mesh='cp', order='zigzag', packed=True)", mesh=2)
    assert [layout.local(torch.ones(0, 3), rank, ()).shape for rank in (0, 1)] == [(0, 3)] * 2


@given(st.lists(st.sampled_from(WRITTEN[1:]), max_size=3))
def test_layout_text_is_parsed_as_the_same_layout(texts: list[str]) -> None:
    text = " | ".join(texts)
    axes = re.findall(r"mesh='(\w+)'", text)
    if len(set(axes)) < len(axes):
        with pytest.raises(LayoutError, match="two steps use"):
            parse_layout(text)
        return
    layout = parse_layout(text)
    assert layout.text == (text or "same")
    assert parse_layout(layout.text) == layout


def test_a_size_may_stand_after_a_comma_and_quotes_may_be_double() -> None:
    expected = Layout((Rearrange("b s (h d) -> b h s d", (("h", 12),)), Shard(1, "tp")))
    assert parse_layout('b  s (h d)->b h s d , h=12 | shard(1, "tp")') == Layout(
        (Rearrange("b s (h d)->b h s d", (("h", 12),)), Shard(1, "tp"))
    )
    assert parse_layout("b s (h d) -> b h s d, h=12 | shard(dim=1, mesh='tp')") == expected
    assert parse_layout("  ") == Layout()
    # What begins like a call is none.
    expected = Layout((Rearrange("a (b c) -> (a b) c", (("c", 2),)), Part(1, (1, 2), 0)))
    assert parse_layout("a (b c) -> (a b) c, c=2 | part(index=1, of=[1, 2], dim=0)") == expected


# The mark ^ stands under the fault, and is not part of the text.
FAULTS = [
    ("b s -> s", "'b' is only on the left", "^"),
    ("b s -> s b c", "'c' is only on the right, so it needs a size", "           ^"),
    ("b b -> b", "'b' occurs twice on the left", "^"),
    ("a b -> b a a", "'a' occurs twice on the right", "         ^"),
    ("b (s (h d)) -> b s h d", "a ( inside a (", "     ^"),
    ("b s) -> b s", "a ) without its (", "   ^"),
    ("b (s -> b s", "a ( without its )", "    ^"),
    ("b +s -> b s", "'+' is not an axis", "  ^"),
    ("b -> b -> b", "has one '->'", "       ^"),
    ("b -> b ...", "'...' is only on the right", "       ^"),
    ("(b ...) -> b ...", "'...' inside ( )", "   ^"),
    ("a b -> b a, h", "write a size after the comma", "           ^"),
    ("a b -> b a, h=x", "write a size after the comma", "           ^"),
    ("a b -> b a, c=2, h=x", "write a size after the comma", "                " + "^"),
    ("a b -> b a, 2=h", "write a size after the comma", "           ^"),
    ("a b -> b a, c=2", "has no axis 'c'", ""),
    ("a b c -> c", "'a' is only on the left", "^"),
    ("shard(dim=0) | ", "a step is missing", "               ^"),
    ("shard(dim=0) | shart(dim=1)", "there is no step 'shart'", "               ^"),
    ("shard(dim=0) | shard(dum=1)", "unexpected keyword argument 'dum'", "               ^"),
    ("shard(dim=0) | shard(dim=tp)", "only plain values here", "                         ^"),
    ("shard(dim=0) | nothing", "is neither a rearrangement", "               ^"),
    ("a -> a | partial('tp', op='mul')", "op is 'sum', 'avg', 'max' or 'min'", "         ^"),
    ("a -> a | rearrange('b  b -> b')", "'b' occurs twice on the left", "                    ^"),
    ("a -> a | rearrange('  b  b -> b')", "'b' occurs twice on the left", "                      ^"),
    ("shard(dim=0, dim=1)", "give arguments by name, each only once", "             ^"),
    ("shard(dim=0)(1)", "a step is a single call", "^"),
    ("shard(dim='0')", "dim must be an int, not '0'", "^"),
    ("shard(dim=0, blocks=[2, 0])", "each number in blocks must be an int of at least 1, not 0", "^"),
    ("shard(dim=0, replicas=True)", "replicas must be an int of at least 1, not True", "^"),
    ("shard(dim=0, blocks=[1, 1], replicas=[1, 1, 1])", "replicas is one number, or one number per block", "^"),
    ("shard(dim=0, uneven='odd')", "uneven is 'chunk' or 'balanced'", "^"),
    ("shard(dim=0, order='odd')", "order is 'contiguous' or 'zigzag'", "^"),
    ("shard(dim=0, order='zigzag', padded=True)", "zigzag and packed exclude blocks, replicas, padded", "^"),
    ("shard(dim=0, packed=True, uneven='balanced')", "zigzag and packed exclude blocks, replicas, padded", "^"),
    ("part(index=0, of=[1, 1], dim=0.0)", "part: dim must be an int, not 0.0", "^"),
    ("window(dim=True, start=0, length=1)", "window: dim must be an int, not True", "^"),
    ("pad(dim='h', size=1, to=2)", "pad: dim must be an int, not 'h'", "^"),
    ("pad(dim=0, size=1, to=2, fill='x')", "pad: fill must be a number, not 'x'", "^"),
    (
        "strided(shape=[2.0], sizes=[2.0], strides=[1])",
        "each number in shape and sizes must be an int",
        "^",
    ),
    ("shard(dim=0, blocks=[], replicas=[])", "blocks has at least one number", "^"),
    ("sketch(size=65537, of=[2])", "size is 65,537, and at most 65,536 sums stand for a tensor", "^"),
    ("part(index=2, of=[1, 1])", "index must be one of 0..1, not 2", "^"),
    ("part(index=0.0, of=[1, 1])", "index must be one of 0..1, not 0.0", "^"),
    ("part(index=0, of=[1, 0])", "each number in of must be an int of at least 1, not 0", "^"),
    ("part(index=0, of=[1, 1], groups=0)", "groups must be an int of at least 1, not 0", "^"),
    ("window(dim=0, start=0, length=-1)", "length must be an int of at least 0, not -1", "^"),
    ("window(dim=0, start=0, length=1, step=0)", "step must be an int of at least 1, not 0", "^"),
    ("strided(shape=[4], sizes=[2, 2], strides=[2])", "each size needs a stride", "^"),
    ("strided(shape=[5], sizes=[4], strides=[1])", "sizes must multiply to the shape's product", "^"),
    ("strided(shape=[4], sizes=[4], strides=[-1])", "strides and offset must be an int of at least 0, not -1", "^"),
    ("strided(shape=[4], sizes=[4], strides=[1], offset=-1)", "strides and offset must be an int of at", "^"),
    ("rows(of='', into='ids')", "of and into are names of taps, not '' and 'ids'", "^"),
]


@pytest.mark.parametrize(("text", "message", "mark"), FAULTS, ids=[text for text, _, _ in FAULTS])
def test_a_fault_is_shown_where_it_is(text: str, message: str, mark: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_layout(text)
    assert message in caught.value.message
    assert caught.value.text == text
    if mark:
        assert (caught.value.position, str(caught.value).splitlines()[2]) == (len(mark) - 1, "    " + mark)


def test_a_layout_that_is_no_text_is_refused() -> None:
    text: Any = 3
    with pytest.raises(LayoutError, match="a layout is written as text, not int"):
        parse_layout(text)


def test_a_fault_that_python_finds_is_shown_in_its_step() -> None:
    # The words and the position are Python's, and differ between its versions.
    with pytest.raises(LayoutError) as caught:
        parse_layout("a -> a | shard(dim=)")
    assert 9 <= caught.value.position <= 20


# ---- the notation for dimensions ------------------------------------------------------------------------------------


EXPERTS = [Shard(0, "moe_ep"), Shard(1, "moe_tp"), Shard(2, "etp")]


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("b s[cp:zigzag] h[tp] d", [Shard(1, "cp", order="zigzag"), Shard(2, "tp")]),
        ("t (num_heads*head_dim)[tp]", [Shard(1, "tp")]),
        ("t h[tp:partial]", [Partial("tp")]),
        ("t[cp:zigzag] h", [Shard(0, "cp", order="zigzag", packed=True)]),
        ("t[sp:zigzag] h", [Shard(0, "sp", order="zigzag", packed=True)]),
        ("t[cp:natural] h", [Shard(0, "cp", packed=True)]),
        ("t[cp,sp] h", [Shard(0, "cp", packed=True), Shard(0, "sp")]),
        ("s[cp,sp] 1 h", [Shard(0, "cp"), Shard(0, "sp")]),
        ("b s[cp:zigzag, sp:sharded] h", [Shard(1, "cp", order="zigzag"), Shard(1, "sp")]),
        ("t h # ep:replicated tp:replicated", [Replicate("ep"), Replicate("tp")]),
        ("( a * b )[tp] c", [Shard(0, "tp")]),
        ("t (a*c)", []),
        ("b (h * d)", []),
        ("b t[cp] h", [Shard(1, "cp", packed=True)]),
        ("t[attn_dp] h[attn_tp]", [Shard(0, "attn_dp"), Shard(1, "attn_tp")]),
        ("e[moe_ep] h[moe_tp] d[etp] # edp:replicated", [*EXPERTS, Replicate("edp")]),
    ],
)
def test_the_notation_for_dimensions_is_read(text: str, steps: list[object]) -> None:
    layout = parse_layout(text)
    assert layout == Layout((*steps, OneOf("dp")))  # type: ignore[arg-type]
    assert parse_layout(layout.text) == layout


def test_a_dimension_that_the_data_parallel_ranks_split_is_on_all_of_them() -> None:
    assert parse_layout("b[dp] s h").steps == (Shard(0, "dp"),)
    assert parse_layout("t h # moe_dp:replicated dp:=moe_dp").steps == (Replicate("moe_dp"),)


def test_data_parallel_group_may_have_a_different_name() -> None:
    assert parse_layout("t h # ep:replicated dp:=moe_dp").steps == (Replicate("ep"), OneOf("moe_dp"))


DIM_FAULTS = [
    ("b s[pp] h", "'pp' is not an axis", "    ^"),
    ("b s[cp:zag] h", "'zag' is unknown", "       ^"),
    ("b s[cp:zigzag+natural] h", "states twice", "              ^"),
    ("b s[cp: sharded + zag] h", "'zag' is unknown", "                 ^"),
    ("b s[cp:zigzag+partial] h", "has no order", "    ^"),
    ("b s h[cp:zigzag]", "zigzag is an order of sequences", "      ^"),
    ("b s[tp,tp] h", "has an axis twice", "  ^"),
    ("b s[tp] h[tp]", "splits two dimensions", "        ^"),
    ("b s b", "is named twice", "    ^"),
    ("b s (h)", "is for several dimensions", "    ^"),
    ("b s (h*h)", "names a dimension twice", "    ^"),
    ("b s (h*2)", "'2' is not a name", "       ^"),
    ("b s[] h", "'' is not an axis", "    ^"),
    ("b 2 h", "'2' is not a dimension", "  ^"),
    ("t b s", "both mean the tokens of sequences", "^"),
    (" # ep:replicated", "the dimensions are missing", "^"),
    ("t h[tp] # tp:replicated", "is not replicated", "          ^"),
    ("t h # ep:replicated ep:replicated", "is replicated already", "                    ^"),
    ("t h # dp:=a dp:=b", "dp is 'a' already", "            ^"),
    ("t h # xx:replicated", "'xx' is not an axis", "      ^"),
    ("t h # ep:sharded", "is unknown", "      ^"),
]


@pytest.mark.parametrize(("text", "message", "mark"), DIM_FAULTS, ids=[text for text, _, _ in DIM_FAULTS])
def test_error_in_the_notation_has_its_position(text: str, message: str, mark: str) -> None:
    with pytest.raises(LayoutError) as caught:
        parse_dims(text)
    assert message in caught.value.message
    assert (caught.value.position, caught.value.text) == (len(mark) - 1, text)


def test_two_annotations_of_one_tensor_bring_it_from_one_side_to_the_other() -> None:
    whole = torch.arange(2 * 8 * 4 * 3, dtype=torch.float32).reshape(2, 8, 4, 3)
    baseline, target = layouts_of_pair(
        "b s[cp:zigzag] num_heads[tp] head_dim",
        "s 1 b (num_heads*head_dim)[tp] # cp:replicated",
        {"head_dim": 3, "s": 8},
    )
    # The layout holds for sequences of any length.
    assert target.text.startswith("rearrange('b s num_heads head_dim -> s 1 b (num_heads head_dim)', head_dim=3) |")
    baseline, target = baseline.on({"cp": 2, "tp": 2}), target.on({"tp": 4})
    held = baseline.split(whole)
    expected = whole.permute(1, 0, 2, 3).reshape(8, 1, 2, 12)
    for rank in range(4):
        relaid = relayout([(baseline, held)], target, rank, shape=whole.shape)
        assert torch.equal(relaid.value, expected[..., 3 * rank : 3 * rank + 3])


def test_tokens_are_batch_and_sequence_row_by_row() -> None:
    padded = torch.arange(2 * 3 * 2, dtype=torch.float32).reshape(2, 3, 2)
    flat = padded.flatten(0, 1)
    baseline, target = layouts_of_pair("b s h", "t h")
    assert torch.equal(relayout([(baseline, [padded])], target).value, flat)
    baseline, target = layouts_of_pair("t h", "b s h", {"b": 2})
    assert torch.equal(relayout([(baseline, [flat])], target).value, padded)
    # Without a batch, or with one on both sides, tokens are the sequence.
    for one, other, size in (("t h", "s h", 6), ("b t h", "b s h", 3), ("b s h", "t b h", 3)):
        first, last = layouts_of_pair(one, other, {"s": size})
        moved = padded.transpose(0, 1) if other == "t b h" else padded if "b" in other else flat
        assert torch.equal(relayout([(first, [padded if "b" in one else flat])], last).value, moved)


def test_annotations_with_different_names_are_not_of_one_tensor() -> None:
    with pytest.raises(
        LayoutError,
        match=exactly("only the target has 'd', so they are not one tensor (at position 6)\n    b s h d\n          ^"),
    ) as caught:
        layouts_of_pair("b s h", "b s h d")
    assert caught.value.position == 6
    with pytest.raises(
        LayoutError,
        match=exactly("only the baseline has 'd', so they are not one tensor (at position 4)\n    b x d\n        ^"),
    ):
        layouts_of_pair("b x d", "b")
    # A batch and a sequence beside the same batch's tokens are two tensors.
    with pytest.raises(
        LayoutError,
        match=exactly("only the baseline has 's', so they are not one tensor (at position 2)\n    b s\n      ^"),
    ):
        layouts_of_pair("b s", "b h")
