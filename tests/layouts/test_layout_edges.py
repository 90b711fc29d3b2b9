"""Steps and layouts at the edges of what they take: the last index that fits, and the first that does not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from kit.refusals import exactly, ids, refusal
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts import (
    Layout,
    Mesh,
    OneOf,
    Pad,
    Part,
    Partial,
    Rearrange,
    Replicate,
    Rows,
    Scale,
    Shard,
    Window,
    join_parts,
    layouts_of_pair,
    parse_dims,
    parse_layout,
    relayout,
)
from graftlab.layouts.known_mesh import parse_mesh
from graftlab.layouts.on_ranks import RankLayout
from graftlab.layouts.replicas import Replicas, TapSketch, replicas_of
from graftlab.layouts.row_alignment import FoundRows, ShownRows, rows_between, sequence_lengths
from graftlab.layouts.sketching import signed_sums
from graftlab.layouts.steps import disagreement

NAN = math.nan


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ([1.0, NAN], [1.0, NAN], None),
        ([1.0, 0.0], [1.0, -0.0], None),
        ([1.0, NAN], [1.0, 2.0], "here: 1 elements differ, by up to nan"),
        ([NAN, 1.0], [2.0, NAN], "here: 2 elements differ, by up to nan"),
        ([NAN, 1.0, 5.0], [NAN, 4.0, 4.0], "here: 2 elements differ, by up to 3"),
        ([1 + 1j, 2j], [1 + 1j, 3 + 2j], "here: 1 elements differ, by up to 3"),
        ([1 + 1j], [1 + 5j], "here: 1 elements differ, by up to 4"),
        ([1, 2, 3], [3, 2, -3], "here: 2 elements differ, by up to 6"),
        ([[1.0, 2.0]], [1.0, 2.0], "here, of shapes [1, 2] and [2]: 2 elements differ, by up to nan"),
    ],
)
def test_copies_differ_by_their_elements_and_nan_equals_nan(one: Any, other: Any, said: str | None) -> None:
    found = disagreement("here", torch.tensor(one), torch.tensor(other))
    assert (None if found is None else str(found)) == said


@pytest.mark.parametrize(
    ("window", "taken"),
    [
        (Window(0, 0, 5), [0, 1, 2, 3, 4]),
        (Window(0, 1, 3, 2), None),
        (Window(0, 0, 3, 2), [0, 2, 4]),
        (Window(0, 4, 1), [4]),
        (Window(0, 5, 1), None),
        (Window(0, 1, 5), None),
        (Window(0, -5, 5), [0, 1, 2, 3, 4]),
        (Window(0, -6, 1), None),
        (Window(0, -1, 2), None),
        (Window(0, 5, 0), []),
    ],
    ids=lambda each: each.text if isinstance(each, Window) else "",
)
def test_a_window_reaches_the_last_element_and_no_further(window: Window, taken: list[int] | None) -> None:
    layout = Layout((window,))
    if taken is None:
        with pytest.raises(LayoutError, match=exactly(f"{window.text} reaches beyond dimension 0 of [5]")):
            layout.local(torch.arange(5))
        return
    part = layout.local(torch.arange(5))
    assert part.tolist() == taken
    assert layout.join([part + 1], (5,)).whole.tolist() == [n + 1 if n in taken else 0 for n in range(5)]


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: Layout((Window(0, 0, 2),)).join([torch.zeros(4, 2)], (3, 4)),
        "window(dim=0, start=0, length=2) of [3, 4] is [2, 4], not [4, 2]",
    ),
    (
        lambda: Rearrange("a (b c) -> a b c", (("c", 0),)),
        "'a (b c) -> a b c': the size of 'c' must be an int of at least 1, not 0",
    ),
    (
        lambda: Layout((Rearrange("a b -> b a"),)).local(torch.zeros(2, 3, 4)),
        "'a b -> b a': its left side does not have the 3 dimensions of [2, 3, 4]",
    ),
    (
        lambda: Rows("ids", "tokens", found=FoundRows((4,), (2,), np.array([1, 0]))).put(
            torch.zeros(3, 5),
            None,
            None,  # type: ignore[arg-type]
        ),
        "rows(of='ids', into='tokens'): a tensor of shape [3, 5] does not begin with the 2 rows that the taps have "
        "shown",
    ),
    (
        lambda: parse_mesh("c p=2,tp=4"),
        "'c p=2,tp=4' is not a mesh; write sizes by name, outermost first, as in cp=2,tp=4",
    ),
    (
        lambda: Mesh.of(4, ["cp", "tp"]),
        "it is unknown how 4 ranks are split over ['cp', 'tp']; give the size of each, for example "
        "mesh={'cp': 4, 'tp': 1}",
    ),
    (lambda: Pad(0, 5, 3), "pad: to must be an int of at least 5, not 3"),
    (
        lambda: Part(0, (1, 2), 1).get(torch.zeros(3), None),  # type: ignore[arg-type]
        "part(index=0, of=[1, 2], dim=1): a tensor of shape [3] has no dimension 1",
    ),
    (
        lambda: Layout().on(2).local(torch.zeros(3), 2),
        "rank 2 is not in the mesh of {'rank': 2}, whose ranks are (0, 1)",
    ),
    (
        lambda: relayout([(Layout(), [torch.zeros(3)])], Layout(), own=torch.zeros(0)),
        "from same to same: rank 0 would have shape [3], but it has [0]",
    ),
    (
        lambda: relayout([(parse_layout("part(index=0, of=[1, 1])"), [torch.zeros(2)])], Layout()),
        "the parts lack elements that same needs: the other 1 parts along dim 0",
    ),
    (
        lambda: join_parts(
            [(Layout(), [torch.zeros(2)]), (parse_layout("pad(dim=0, size=3, to=3)"), [torch.zeros(3)])]
        ),
        "pad(dim=0, size=3, to=3) makes a whole of shape [3], but the previous part one of [2]",
    ),
    (
        lambda: relayout(parts(*THIRDS[:2]), Layout()),
        "the parts lack elements that same needs: the other 2 parts along dim 0; the other 2 parts along dim 0",
    ),
    (
        lambda: Shard(0, blocks=(1, 1, 1), replicas=(1, 2)),
        "shard(dim=0, mesh='rank', replicas=[1, 2], blocks=[1, 1, 1]): replicas is one number, or one number per block",
    ),
    *(
        (
            lambda more=more: Shard(0, **more),  # type: ignore[misc]
            f"shard(dim=0, mesh='rank', {text}): zigzag and packed exclude blocks, replicas, padded and uneven",
        )
        for more, text in [
            ({"order": "zigzag", "padded": True}, "padded=True, order='zigzag'"),
            ({"order": "zigzag", "replicas": 2}, "replicas=2, order='zigzag'"),
            ({"packed": True, "uneven": "balanced"}, "uneven='balanced', packed=True"),
            ({"packed": True, "blocks": (2, 1)}, "blocks=[2, 1], packed=True"),
        ]
    ),
    (
        lambda: Layout((Shard(0, "x", replicas=2),)).on(3).split(torch.zeros(6)),
        "shard(dim=0, mesh='x', replicas=2): 3 ranks do not divide into 2 replicas",
    ),
    (lambda: join_parts([]), "no part was given, so there is nothing to join"),
    (
        lambda: Layout((Shard(0, "x"), Shard(1, "x"))),
        "shard(dim=0, mesh='x') | shard(dim=1, mesh='x'): two steps use mesh dimension 'x'",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=ids(REFUSED))
def test_what_fits_no_tensor_is_refused_with_its_shape(call: Callable[[], Any], said: str) -> None:
    assert refusal(call) == said


def test_a_small_tensor_may_grow_by_any_factor() -> None:
    assert Layout((Pad(0, 1, 5000),)).local(torch.ones(1)).sum() == 1
    assert Layout((Pad(0, 1, 5000),)).local(torch.ones(1)).shape == (5000,)


def test_only_one_rank_has_the_leading_dims_of_the_whole() -> None:
    packs = parse_layout("a b c -> (a b) c")
    leading = packs.on_leading_dims()
    assert leading is not None
    assert leading.text == "a b ... -> (a b) ..."
    assert packs.on(2).on_leading_dims() is None


@pytest.mark.parametrize(
    ("step", "ranks", "cuts"),
    [
        (Shard(0, "cp", packed=True), 2, True),
        (Shard(0, "cp", packed=True), 1, False),
        (Shard(0, "cp", packed=True, order="zigzag"), 2, False),
        (Shard(0, "cp"), 2, False),
        (Replicate("cp"), 2, False),
    ],
)
def test_only_contiguous_pieces_of_packed_sequences_become_those_of_one(step: Any, ranks: int, cuts: bool) -> None:
    layout = Layout((step,)).on({"cp": ranks})
    assert layout.cuts_sequences is cuts
    assert layout.of_one_sequence() == (Layout((Shard(0, "cp"),)).on({"cp": ranks}) if cuts else layout)


def test_further_steps_are_on_the_same_ranks() -> None:
    longer = Layout((Shard(0, "x"),)).on(2).then(Scale(2.0), Replicate("y"))
    assert longer.text == "shard(dim=0, mesh='x') | scale(factor=2.0) | replicate(mesh='y')"
    assert [each.tolist() for each in longer.split(torch.tensor([1.0, 2.0]))] == [[2], [4]]


def parts(*texts: str) -> list[tuple[Layout, list[Tensor]]]:
    whole = torch.arange(1.0, 7.0)
    return [(layout := parse_layout(text), [layout.local(whole)]) for text in texts]


THIRDS = [f"part(index={index}, of=[1, 1, 1])" for index in range(3)]


@pytest.mark.parametrize(
    ("given", "layout", "own", "value", "known"),
    [
        (THIRDS, "same", None, [1, 2, 3, 4, 5, 6], None),
        # What is known of the whole is all that this rank has.
        (THIRDS[1:2], THIRDS[1], None, [3, 4], None),
        (THIRDS[1:2], THIRDS[1], [0, 0], [3, 4], None),
        (THIRDS[:2], "same", [9, 9, 9, 9, 9, 9], [1, 2, 3, 4, 9, 9], [True] * 4 + [False] * 2),
        ([THIRDS[2], THIRDS[0]], "window(dim=0, start=1, length=3)", [7, 8, 9], [2, 8, 9], [True, False, False]),
    ],
)
def test_a_rank_gets_what_the_parts_have_and_keeps_its_own(
    given: list[str], layout: str, own: list[int] | None, value: list[int], known: list[bool] | None
) -> None:
    mine = None if own is None else torch.tensor(own, dtype=torch.float32)
    found = relayout(parts(*given), parse_layout(layout), own=mine)
    assert found.value.tolist() == value
    assert (None if found.known is None else found.known.tolist()) == known


def test_an_idle_rank_keeps_its_empty_tensor_whatever_the_others_have() -> None:
    layout = Layout((OneOf("dp"),)).on(2)
    empty = torch.zeros(0, 4)
    found = relayout([(Layout(), [torch.ones(3, 4)])], layout, 1, own=empty)
    assert found.value is empty
    assert found.caveats == ("a graft goes to the rank along 'dp' whose tensor is not empty",)


# ---- rearrangements -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shape", "other"),
    [
        ("a (b c) -> a b c, c=4", (2, 12), "rearrange('a (b c) -> a b c', b=3)"),
        ("a (b c) -> a b c, b=3", (2, 12), "rearrange('a (b c) -> a b c', c=4)"),
        ("(a b) (c d) -> a c b d, a=2, d=5", (4, 15), "rearrange('(a b) (c d) -> a c b d', b=2, c=3)"),
        ("a b -> b a", (2, 3), "b a"),
    ],
)
def test_of_two_axes_the_other_one_may_be_given(text: str, shape: tuple[int, ...], other: str) -> None:
    step = parse_layout(text).steps[0]
    assert isinstance(step, Rearrange)
    found = step.with_other_sizes(shape)
    assert found.text == (other if "(" in other else step.text)
    whole = torch.arange(float(math.prod(shape))).view(shape)
    assert torch.equal(Layout((found,)).local(whole), Layout((step,)).local(whole))


@pytest.mark.parametrize(
    ("text", "leading"),
    [
        ("(a b) c (d e) -> a b c (d e), a=2, d=3", None),
        ("(a b) c d -> a b c d, a=2", "rearrange('(a b) ... -> a b ...', a=2)"),
        ("a b (c d) e -> (a b) c d e, c=2", "rearrange('a b (c d) ... -> (a b) c d ...', c=2)"),
    ],
)
def test_only_single_axes_at_the_end_may_be_others(text: str, leading: str | None) -> None:
    found = parse_layout(text).on_leading_dims()
    assert (None if found is None else found.text) == leading


def test_repetitions_are_compared_when_they_are_joined() -> None:
    layout = parse_layout("rearrange('a b -> a r b', r=2)")
    whole = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    held = layout.local(whole).clone()
    assert layout.join([held]).disagreements == ()
    held[1, 1, 0] = 7
    joined = layout.join([held])
    assert torch.equal(joined.whole, whole)
    assert [str(each) for each in joined.disagreements] == [
        "repetitions along 'r' of 'a b -> a r b': 1 elements differ, by up to 4"
    ]


# ---- names of dimensions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "shapes", "mesh", "whole", "split"),
    [
        ("s[cp] h[tp:partial]", [(4, 8)] * 8, {"cp": 2, "tp": 4}, {"h": 8}, {"s": 8}),
        ("s[cp] h", [(3, 8), (2, 8)], {"cp": 2}, {"h": 8}, {}),
        ("s[cp,tp] (a*b) 1", [(3, 8, 1)], {"cp": 2, "tp": 4}, {}, {"s": 24}),
        ("s[cp] h", [(3, 8)], {}, {"s": 3, "h": 8}, {}),
    ],
)
def test_sizes_of_the_whole_follow_from_the_ranks_shapes(
    text: str, shapes: list[tuple[int, ...]], mesh: dict[str, int], whole: dict[str, int], split: dict[str, int]
) -> None:
    assert parse_dims(text).sizes(shapes, Mesh.of(mesh)) == (whole, split)


@pytest.mark.parametrize(
    ("baseline", "target", "sizes", "split", "between"),
    [
        ("(t*h) d", "s h d", {"t": 4}, {}, "rearrange('(s h) d -> s h d', s=4)"),
        ("s h d", "(t*h) d", {}, {"t": 4}, "rearrange('s h d -> (s h) d', s=4)"),
        ("(a*b) d", "a b d", {"a": 2}, {"b": 3}, "rearrange('(a b) d -> a b d', a=2)"),
        ("(a*b) d", "a b d", {}, {"a": 2, "b": 3}, "rearrange('(a b) d -> a b d', a=2)"),
        ("(a*b*c)", "a b c", {"b": 2}, {"a": 3, "c": 5}, "rearrange('(a b c) -> a b c', b=2, a=3)"),
        ("t d", "b s d", {"d": 7}, {}, "(b s) d -> b s d"),
        ("b s d", "b s d", {"d": 7}, {}, ""),
    ],
)
def test_sizes_are_given_where_they_do_not_follow_from_shapes(
    baseline: str, target: str, sizes: dict[str, int], split: dict[str, int], between: str
) -> None:
    theirs = layouts_of_pair(baseline, target, sizes, split_sizes=split)[1]
    assert theirs.text == " | ".join(filter(None, (between, "one_of(mesh='dp')")))


# ---- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("outer", "inner", "lengths"),
    [((1, 5), (2, 3), (0, 3)), ((5,), (1, 1, 4), (0, 0)), ((2, 2, 6), (1, 2, 7), (6, 7)), ((), (3,), (0, 0))],
)
def test_a_batch_of_one_is_a_single_sequence(
    outer: tuple[int, ...], inner: tuple[int, ...], lengths: tuple[int, int]
) -> None:
    if outer:
        assert sequence_lengths(outer, inner) == lengths


def test_a_call_without_rows_moves_no_place() -> None:
    whole = ShownRows.of(torch.tensor([1, 2, 8, 1, 2, 9]))
    nothing, first, part = (ShownRows.of(torch.tensor(ids, dtype=torch.int64)) for ids in ([], [1, 2, 8], [1, 2]))
    assert rows_between([whole], [first, nothing, part]).index.tolist() == [3, 4]


@pytest.mark.parametrize(("shape", "nonfinite", "none"), [((2, 3), 6, True), ((2, 3), 5, False), ((0, 3), 0, False)])
def test_a_tensor_without_a_finite_element_has_no_number(shape: tuple[int, ...], nonfinite: int, none: bool) -> None:
    assert TapSketch("x", {}, (), shape, "float32", b"", 0.0, nonfinite).has_no_number is none


@pytest.mark.parametrize(
    ("steps", "groups"),
    [
        ((), ((0, 1, 2, 3),)),
        ((Replicate("cp"),), ((0, 1, 2, 3),)),
        ((Shard(0, "cp"),), ((0, 1), (2, 3))),
        ((Shard(0, "tp"), Replicate("cp")), ((0, 2), (1, 3))),
        ((Partial("tp"), Shard(0, "cp")), ((0,), (1,), (2,), (3,))),
    ],
)
def test_ranks_with_copies_are_those_that_no_step_tells_apart(
    steps: tuple[Any, ...], groups: tuple[tuple[int, ...], ...]
) -> None:
    layout = Layout(steps, Mesh.of({"cp": 2, "tp": 2}))
    assert replicas_of(layout) == Replicas(layout.text, groups)


def test_a_sum_is_partial_only_over_several_ranks() -> None:
    layout = parse_layout("partial(mesh='tp') | shard(dim=0, mesh='cp')")
    alone = RankLayout(layout.on({"tp": 1, "cp": 2}), (4,))
    several = RankLayout(layout.on({"tp": 2, "cp": 2}), (4,))
    assert (alone.is_partial, several.is_partial) == (False, True)
    reduced = several.reduced()
    assert reduced == RankLayout(
        parse_layout("replicate(mesh='tp') | shard(dim=0, mesh='cp')").on(several.layout.mesh), (4,)
    )


def test_a_sketch_is_summed_in_float64_under_signs_of_its_size() -> None:
    layout = parse_layout("sketch(size=1, of=[4096])")
    value = torch.cat([torch.full((1,), 2.0**24), torch.ones(4095)])
    assert layout.local(value).item() == signed_sums(value.double(), 1).float().item()
    ones = [signed_sums(torch.ones(count), count) for count in (64, 65)]
    assert ones[0].tolist() != ones[1][:64].tolist()
