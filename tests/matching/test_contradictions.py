"""Pairs that contradict each other: of other layouts or partners than in other layers, or of two different parts."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlab.errors import LayoutError
from graftlab.layouts import Gather, Layout, parse_layout
from graftlab.matching.contradictions import (
    fills,
    fused_parts,
    in_groups,
    in_part,
    odd_layouts,
    other_parts,
    other_roles,
    uncovered,
)
from graftlab.matching.mistakes import (
    _held_twice,
    _odd_biases,
    _odd_kernels,
    _other_kinds,
    misplaced,
    mistakes_of,
    notices_of,
    odd_transpositions,
)
from graftlab.matching.pair import Pair
from graftlab.matching.recorded_taps import RecordedTap

TURNED = "a b -> b a"


def pair(baseline: str, target: str, layout: str = "same", **more: Any) -> Pair:
    return Pair(baseline, target, parse_layout(layout), **{"sureness": "exact", **more})


def layers(count: int, first: int = 0, **more: Any) -> list[Pair]:
    return [pair(f"h.{n}.mlp", f"l.{n}.ffn", **more) for n in range(first, first + count)]


def taps(pairs: Sequence[Pair], baseline: Sequence[str] = ()) -> list[str]:
    return [each.tap for each in odd_layouts(pairs, baseline)]


# ---- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("usual", "odd", "is_found"),
    [(4, 1, True), (4, 2, True), (2, 1, True), (3, 2, False), (1, 1, False), (2, 2, False)],
)
def test_a_minority_in_another_layout_is_odd(usual: int, odd: int, is_found: bool) -> None:
    others = layers(odd, usual, layout=TURNED)
    pairs = [*layers(usual), *others]
    assert taps(pairs) == ([each.target for each in others] if is_found else [])
    if is_found:
        said = odd_layouts(pairs, [])[0].text
        assert said.startswith(f"l.{usual}.ffn is h.{usual}.mlp in the layout 'a b -> b a', where {usual} others")


@pytest.mark.parametrize("first", ["w1", "fc_1"])
def test_a_number_is_the_gate_only_of_an_mlp_that_has_one(first: str) -> None:
    second, third = ("w2", "w3") if first == "w1" else ("proj", "fc_2")
    plain = [pair("h.0.up.weight", f"l.1.{first}.weight"), pair("h.0.down.weight", "l.1.w2.weight")]
    assert other_roles(plain) == []
    # Its third matrix, or the other side's gate, shows that it has one.
    gated = [plain[0], pair("h.0.down.weight", f"l.1.{second}.weight"), pair("h.0.up.weight", f"l.1.{third}.weight")]
    assert [each.tap for each in other_roles(gated)] == [f"l.1.{first}.weight"]
    swapped = [plain[0], pair("h.0.gate.weight", "l.1.other.weight")]
    assert [each.tap for each in other_roles(swapped)] == [f"l.1.{first}.weight"]
    assert other_roles([plain[0], pair("h.1.gate.weight", "l.2.other.weight")]) == []


def test_a_reshape_of_another_size_is_not_odd_unless_it_changes_the_order() -> None:
    flat = layers(2, layout="a (b c) d -> a b c d, c=16")
    assert taps([*flat, *layers(1, 2, layout="a (b c) d -> a b c d, c=8")]) == []
    assert taps([*flat, *layers(1, 2, layout="a (b c) d -> a c b d, c=8")]) == ["l.2.ffn"]
    heads = layers(2, layout="a b (h c) -> a h b c, h=16")
    assert taps([*heads, *layers(1, 2, layout="a b (h c) -> a h b c, h=8")]) == ["l.2.ffn"]


def test_pairs_by_rule_or_name_are_not_odd_and_show_no_usual_layout() -> None:
    assert taps([*layers(4), *layers(1, 4, layout=TURNED, sureness="rule")]) == []
    assert taps([*layers(4, sureness="rule"), *layers(1, 4, layout=TURNED)]) == []


def test_another_partner_is_odd_if_the_usual_is_taken_or_it_belongs_elsewhere() -> None:
    moved = pair("h.4.gate", "l.4.ffn")
    pairs = [*layers(4), moved]
    assert taps(pairs) == []
    # The usual partner has no pair, and the present one belongs nowhere else.
    assert taps(pairs, ["h.4.mlp"]) == []
    gates = [pair(f"h.{n}.gate", f"l.{n}.gate") for n in range(4)]
    assert taps([*pairs, *gates]) == []
    assert taps([*pairs, *gates], ["h.4.mlp"]) == ["l.4.ffn"]
    (odd,) = odd_layouts([*pairs, pair("h.4.mlp", "l.4.gate")], [])
    assert odd.text == "l.4.ffn is h.4.gate, where 4 others like it are paired as l.0.ffn with h.0.mlp"
    # A fused tap has the usual partner too, though in another layout.
    (odd,) = odd_layouts([*pairs, pair("h.4.mlp", "l.4.ffn", "part(dim=0, index=0, of=[1, 1])", whole="target")], [])
    assert odd.text.startswith("l.4.ffn is h.4.mlp in the layout 'part(")


def test_a_tap_that_shares_the_usual_partner_in_other_layers_does_not_take_it() -> None:
    # A stage returns what its last member does, and after the last stage the baseline shows that once more.
    members = [pair(f"h.{n}.mlp", f"l.{n}.ffn.act") for n in range(3)]
    last = [pair("last_hidden", "l.3.ffn"), pair("h.3.mlp", "l.3.ffn.act")]
    assert taps([*layers(3), *members, *last]) == []
    # In one layer alone they may agree by chance.
    assert taps([*layers(3), members[0], *last]) == ["l.3.ffn"]


def test_a_table_that_all_layers_share_is_not_taken_by_the_others_of_them() -> None:
    # A rotary embedding has its frequencies twice.
    pairs = [*(pair("rope.inv", f"l.{n}.inv") for n in range(3)), pair("rope.original_inv", "l.3.inv")]
    assert taps(pairs) == []
    assert taps([*pairs, pair("rope.inv", "head.inv")]) == ["l.3.inv"]


def test_a_list_that_alternates_between_two_kinds_is_not_odd_in_one_of_them() -> None:
    second = [pair(f"h.{n}.second.{m}", f"l.{n}.convs.{2 * m + 1}") for n in range(4) for m in range(2)]
    first = [pair(f"h.{n}.first.0", f"l.{n}.convs.0") for n in range(3)]
    first_again = pair("h.0.first.1", "l.0.convs.2")
    taken = pair("h.0.second.0", "l.3.other")
    assert taps([*second, *first, first_again, taken]) == []
    assert taps([*second, first[0], taken]) == []
    # In a list of one kind it is.
    alike = [pair(f"h.{n}.second.{m}", f"l.{n}.convs.{m}") for n in range(4) for m in range(2) if n + m]
    assert taps([*alike, first[0], taken]) == ["l.0.convs.0"]


def test_a_layout_that_one_of_a_list_has_in_all_layers_is_odd() -> None:
    # The list has one kind of module.
    turned = {(n, m): TURNED if m == 3 else "same" for n in range(4) for m in range(8)}
    pairs = [pair(f"h.{n}.experts.{m}", f"l.{n}.experts.{m}", layout) for (n, m), layout in turned.items()]
    assert taps(pairs) == [f"l.{n}.experts.3" for n in range(4)]


def test_a_usual_tap_that_is_also_a_part_of_another_is_not_odd() -> None:
    assert taps([*layers(4), pair("h.0.b", "l.0.ffn", TURNED)]) == []


# ---- roles ----------------------------------------------------------------------------------------------------------


def of_three(index: int) -> str:
    return f"part(index={index}, of=[1, 1, 1], dim=0)"


def test_parts_of_a_fused_tensor_in_another_order_are_named_by_their_places() -> None:
    fused = [
        pair(f"0.{name}_proj", "h.0.qkv", of_three(index), whole="target") for index, name in enumerate(("k", "q", "v"))
    ]
    found = other_roles(fused)
    assert [each.tap for each in found] == ["h.0.qkv"] * 2
    assert found[0].text == (
        "h.0.qkv has 0.k_proj in place of its q, and 0.q_proj in place of its k: the two are swapped"
    )
    # On the other side the parts have the names.
    taken = [pair("h.0.qkv", f"0.{name}_proj", of_three(index)) for index, name in enumerate(("k", "q", "v"))]
    assert other_roles(taken)[0].text == (
        "0.k_proj is the q of h.0.qkv, not its k, and 0.q_proj its k: the two are swapped"
    )
    right = [pair("h.0.qkv", f"0.{name}_proj", of_three(index)) for index, name in enumerate("qkv")]
    assert other_roles(right) == []
    assert fused_parts(right) == {("h.0.qkv", f"0.{name}_proj"): ("h.0.qkv", name) for name in "qkv"}
    # Parts may be written by any split, and be of different sizes.
    sizes = ["part(index=0, of=[4, 4], dim=0)", "part(index=1, of=[4, 2, 2], dim=0)", "part(index=1, of=[6, 2], dim=0)"]
    split = [pair("h.0.qkv", f"0.{name}_proj", text) for name, text in zip("qkv", sizes, strict=True)]
    assert fused_parts(split) == fused_parts(right)
    # Of two of three parts the order is unknown.
    assert fused_parts(right[:2]) == {}


def test_parts_of_a_tensor_that_has_the_name_of_one_of_them_contradict_nothing() -> None:
    halves = [pair("x.q_proj", f"y.{name}_proj", f"part(index={n}, of=[1, 1], dim=0)") for n, name in enumerate("qk")]
    assert other_roles(halves) == []
    # A single part has the values of another role.
    assert [each.tap for each in other_roles(halves[1:])] == ["y.k_proj"]


def test_two_taps_are_swapped_only_in_one_layer_and_of_one_kind() -> None:
    def swapped(*pairs: Pair) -> list[bool]:
        return ["the two are swapped" in each.text for each in other_roles(pairs)]

    def mixed(layer: int, held: str, named: str, kind: str = "weight") -> Pair:
        return pair(f"{layer}.{held}_proj.{kind}", f"h.{layer}.{named}_proj.{kind}")

    assert swapped(mixed(0, "k", "v"), mixed(0, "v", "k")) == [True, True]
    assert swapped(mixed(0, "k", "v"), mixed(1, "v", "k")) == [False, False]
    assert swapped(mixed(0, "k", "v"), mixed(0, "v", "k", "bias")) == [False, False]
    assert swapped(mixed(0, "k", "v"), mixed(0, "v", "q")) == [False, False]
    # Of two that may be its twin, the one with the more similar name.
    both = [mixed(0, "k", "v"), pair("0.v_proj.weight", "other.0.k_proj.weight"), mixed(0, "v", "k")]
    assert [each.tap for each in other_roles(both)] == [
        *("h.0.v_proj.weight", "h.0.k_proj.weight", "other.0.k_proj.weight")
    ]


# ---- mistakes of weights --------------------------------------------------------------------------------------------


def kernels(*shape: int, turned: int = 1, count: int = 4, layout: str = "a b c d -> b a c d") -> list[str]:
    """The kernels that are named if the last ``turned`` of ``count`` have this layout."""
    pairs = [pair(f"{n}.w", f"{n}.w", "same" if n < count - turned else layout) for n in range(count)]
    items = {each.baseline: RecordedTap.of(each.baseline, torch.zeros(shape)) for each in pairs}
    return [each.tap for each in _odd_kernels(pairs, items)]


def test_a_kernel_whose_equal_dims_are_exchanged_alone_is_named() -> None:
    assert kernels(8, 8, 3, 3) == ["3.w"]
    # Other sizes would show a wrong order, and without rows and columns any order is right.
    assert kernels(8, 4, 3, 3) == []
    assert kernels(8, 8, 1, 1) == []
    assert kernels(8, 8, 3, layout="a b c -> b a c") == []
    assert kernels(8, 8, 3, 3, turned=2) == []
    assert kernels(8, 8, 3, 3, turned=2, count=6) == ["4.w", "5.w"]
    assert kernels(8, 8, 3, 3, turned=0) == []


def items(*names: str, shape: tuple[int, ...] = (4, 4)) -> dict[str, RecordedTap]:
    return {name: RecordedTap.of(name, torch.randn(shape)) for name in names}


def test_a_parameter_with_the_values_of_another_kind_is_named() -> None:
    def named(*pairs: Pair) -> list[str]:
        return [each.text for each in _other_kinds(pairs)]

    assert named(pair("a.bias", "b.weight")) == [
        "b.weight is the weight by its name but has the values of a.bias, which is the bias"
    ]
    assert named(pair("a.weight", "b.weight"), pair("a.gamma", "b.weight"), pair("a.table", "b.weight")) == []


def test_a_weight_with_the_values_of_another_role_and_layer_is_named_once() -> None:
    queries = [pair(f"h.{n}.q_proj.weight", f"l.{n}.q_proj.weight") for n in (0, 3)]
    mixed = [pair(f"h.{3 - n}.k_proj.weight", f"l.{n}.q_proj.weight") for n in (1, 2)]
    found = misplaced([*queries, *mixed], [])
    assert [(each.tap, each.text) for each in found] == [
        (
            f"l.{n}.q_proj.weight",
            f"l.{n}.q_proj.weight is q by its name but has the values of h.{3 - n}.k_proj.weight, which is k",
        )
        for n in (1, 2)
    ]


def test_values_held_twice_are_named_where_one_of_that_shape_is_lacking() -> None:
    twice = [pair("0.q.w", "h.0.q.w"), pair("0.q.w", "h.1.q.w")]
    (found,) = _held_twice(twice, items("0.q.w", "1.q.w"))
    assert found.tap == "h.1.q.w"
    assert found.text == "h.1.q.w has the values of 0.q.w, as h.0.q.w does; the target lacks the baseline's 1.q.w"
    assert _held_twice(twice[:1], items("0.q.w", "1.q.w")) == []
    assert _held_twice([*twice, pair("1.q.w", "x")], items("0.q.w", "1.q.w")) == []
    # One of another shape is not what is lacking, nor do two parts of one whole have the same values.
    assert _held_twice(twice, {**items("0.q.w"), **items("1.q.w", shape=(4, 5))}) == []
    halves = [pair("0.qk", f"h.{n}.w", f"part(index={n}, of=[1, 1], dim=0)") for n in (0, 1)]
    assert _held_twice(halves, items("0.qk", "1.q.w")) == []


def test_what_may_be_intended_is_a_notice() -> None:
    turned = "rearrange('(h i two) d -> (h two i) d', i=2, two=2)"
    first, second = (f"part(index={n}, of=[1, 1], dim=0, groups=2)" for n in (0, 1))
    given = items("a", "b", "qk", "half")
    assert notices_of([pair("a", "x", TURNED), pair("b", "y")], given) == []
    (said,) = notices_of([pair("a", "x", turned)], given)
    assert said.startswith(f"x is a with its rows or columns in a different order ({turned}): correct if")
    (said,) = notices_of([pair("qk", "q", first), pair("qk", "k", second)], given)
    assert said.startswith("qk has q, k side by side in each of 2 groups of heads, not one after the other: ")
    (said,) = notices_of([pair("half", "x", "part(index=0, of=[1, 1], dim=0)")], given)
    assert said == "half is only partly used: the target lacks 2 of 4 rows, 2 to 3, of it"
    # Of a target that is the whole, nothing is left out.
    assert notices_of([pair("x", "half", "part(index=0, of=[1, 1], dim=0)", whole="target")], given) == []


def test_a_notice_on_a_weight_is_given_once_however_many_steps_its_layout_has() -> None:
    (step,) = parse_layout("(a b) c -> (b a) c, b=2").steps
    twice = Pair("x", "y", Layout((step, step)), sureness="exact")
    (said,) = notices_of([twice, twice], {})
    assert said.startswith("y is x with its rows or columns in a different order (")


def test_mistakes_of_a_conversion_are_in_the_order_of_the_parameters() -> None:
    baseline = items("0.q.w", "1.q.w", "k.w") | items("a", "b", shape=(4, 3))
    target = {"lost": RecordedTap.of("lost", torch.zeros(4, 4)), **items("qkv", shape=(8, 4))}
    target |= items("h.0.q.w", "h.1.q.w") | items("x", "b.y", shape=(4, 3))
    pairs = [
        *(pair("0.q.w", "h.0.q.w"), pair("0.q.w", "h.1.q.w"), pair("a", "x"), pair("a", "b.y")),
        pair("k.w", "qkv", "part(index=0, of=[1, 1], dim=0)", whole="target"),
    ]
    # What is named as misplaced is not also named as held twice.
    assert mistakes_of(pairs, baseline, target) == [
        "lost has no partner: all its values are 0, as if it had not been loaded",
        "qkv contains k.w; the baseline has no values for 4 of 8 rows, 4 to 7, of it",
        *(
            f"h.{n}.q.w has the values of 0.q.w, which is in layer 0; the layers are in a different order than the "
            "baseline's"
            for n in (0, 1)
        ),
        "b.y has the values of a, as x does; the target lacks the baseline's b",
    ]


def test_a_square_matrix_is_named_where_all_others_are_the_other_way_round() -> None:
    def named(square: str, *others: str, name: str = "0.w") -> list[str]:
        pairs = [pair(name, name, square), *(pair(f"{n}.x.w", f"{n}.x.w", each) for n, each in enumerate(others))]
        items = {each.baseline: RecordedTap.of(each.baseline, torch.zeros(8, 4)) for each in pairs}
        items[name] = RecordedTap.of(name, torch.zeros(8, 8))
        return [each.text for each in odd_transpositions(pairs, items)]

    (said,) = named("same", TURNED, TURNED)
    assert said == (
        "0.w is 0.w not transposed, and all 2 matrices that are not square are: being square, it fits either way"
    )
    (said,) = named(TURNED, "same", "same", "same")
    assert said.startswith("0.w is 0.w transposed, and all 3 matrices that are not square are not:")
    assert named("same", TURNED) == named("same", TURNED, TURNED, "same") == named("same", "same", "same") == []
    assert named("same", TURNED, TURNED, name="embed.w") == named("same", TURNED, TURNED, name="lm_head.w") == []


def test_a_bias_that_is_split_unlike_its_weight_is_named() -> None:
    def named(weight: str, bias: str) -> list[str]:
        both = [pair("a.weight", "b.weight", weight), pair("a.bias", "b.bias", bias)]
        return [each.tap for each in _odd_biases(both)]

    first, second = (f"part(index={n}, of=[1, 1], dim=0)" for n in (0, 1))
    assert named(first, second) == named(first, "same") == named("same", first) == ["b.bias"]
    assert named(first, first) == named("same", "same") == []
    # The columns of a weight are no part of its bias.
    assert named("part(index=0, of=[1, 1], dim=1)", "same") == named(f"{TURNED} | {first}", second) == []
    assert named("scale(factor=2.0)", first) == []
    assert [each.tap for each in _odd_biases([pair("a.weight", "b.weight", first)])] == []
    (found,) = _odd_biases([pair("a.weight", "b.weight", first), pair("a.bias", "b.bias", second)])
    assert found.text == f"b.bias has a.bias in the layout {second!r}, and its weight is in the layout {first!r}"


# ---- parts ----------------------------------------------------------------------------------------------------------


def window(start: int, length: int = 1) -> str:
    return f"window(dim=0, start={start}, length={length})"


def test_two_parts_of_one_tap_contradict_if_they_may_be_one_quantity() -> None:
    whole, mine = pair("x", "y"), pair("x", "first", window(0))
    theirs = pair("last", "y", window(3), whole="target")
    (found,) = other_parts([whole, mine, theirs])
    assert found.tap == "first"
    assert found.text.startswith("first is a part of x (")
    assert "the baseline's last is a different part of the target's y" in found.text
    assert other_parts([mine, theirs]) == other_parts([whole, mine]) == other_parts([whole, theirs]) == []
    # Of another size, only if they have one name.
    wide = pair("last", "y", window(2, 2), whole="target")
    assert other_parts([whole, mine, wide]) == []
    assert len(other_parts([whole, mine, pair("first", "y", window(2, 2), whole="target")])) == 1


def test_a_tap_that_the_baseline_shows_in_part_is_named_with_its_share() -> None:
    part = [pair(name, "qkv", f"part(dim=0, index={n}, of=[1, 1, 1])", whole="target") for n, name in enumerate("qkv")]
    assert in_part(part, {"qkv": (6, 2)}) == []
    (found,) = in_part(part[:2], {"qkv": (6, 2)})
    assert found.text == "qkv is compared only in part: it contains q, k; no baseline tap has the other 33%"
    assert in_part(part[:2], {}) == []
    assert in_part([*part[:2], pair("all", "qkv")], {"qkv": (6, 2)}) == []
    # What is a part of the baseline's tap is compared whole.
    assert in_part([pair("x", "half", "part(dim=0, index=1, of=[1, 1])")], {"half": (6, 2)}) == []


def test_layouts_that_do_not_fit_a_shape_cover_none_of_it() -> None:
    first, last = (parse_layout(f"part(dim=0, index={index}, of=[1, 1])") for index in (0, 1))
    of_three = parse_layout("part(dim=0, index=1, of=[1, 1, 1])")
    gap = uncovered([first, of_three], (4, 2))
    assert gap is not None
    assert gap[:, 0].tolist() == [False, False, True, True]
    assert uncovered([first, last], (4, 2)) is None
    assert bool((uncovered([of_three], (4, 2)) == torch.ones(4, 2, dtype=torch.bool)).all())
    assert (fills(last, gap), fills(first, gap), fills(of_three, gap), fills(Layout(), gap)) == (True, *[False] * 3)


PARTS = st.builds(
    "part(dim={}, index={}, of={}, groups={})".format,
    st.integers(-2, 2),
    st.integers(0, 1),
    st.sampled_from([[1, 1], [2, 1], [1, 1, 1, 1]]),
    st.sampled_from([1, 2]),
)
WINDOWS = st.builds(
    "window(dim={}, start={}, length={})".format, st.integers(-2, 2), st.integers(0, 4), st.integers(1, 4)
)


@given(st.lists(PARTS | WINDOWS, max_size=4))
def test_what_parts_leave_is_the_same_whatever_dims_they_are_of(texts: list[str]) -> None:
    layouts, shape = [parse_layout(text) for text in texts], (6, 12)
    taken = torch.zeros(shape, dtype=torch.bool)
    for layout in layouts:
        numbers = torch.arange(taken.numel()).view(shape)
        with suppress(LayoutError):
            taken.view(-1)[layout.local(numbers).reshape(-1)] = True
    gap = uncovered(layouts, shape)
    assert torch.equal(~taken, torch.zeros(shape, dtype=torch.bool) if gap is None else gap)


def test_what_parts_of_a_large_weight_leave_takes_no_mask_of_all_its_elements() -> None:
    huge = (1 << 20, 1 << 30)
    parts = [parse_layout(f"part(dim=0, index={index}, of=[1, 1, 1])") for index in (0, 2)]
    assert uncovered([*parts, parse_layout("part(dim=0, index=1, of=[1, 1, 1])")], (3 << 18, 1 << 30)) is None
    gap = uncovered([parse_layout("part(dim=0, index=0, of=[1, 1])")], huge)
    assert gap is not None
    assert (tuple(gap.shape), int(gap[:, 0].sum())) == (huge, 1 << 19)


def test_parts_by_groups_of_heads_are_named_in_layers_with_a_tap_that_does_not_match() -> None:
    groups = [
        pair("h.0.qkv", f"l.0.{name}", f"part(dim=0, index={n}, of=[1, 1, 1], groups=2)")
        for n, name in enumerate("qkv")
    ]
    found = in_groups(groups, {"l.0.mlp"})
    assert [each.tap for each in found] == ["l.0.q", "l.0.k", "l.0.v"]
    assert found[0].text.startswith("l.0.q is taken out of h.0.qkv by groups of heads (")
    assert in_groups(groups, {"l.1.mlp"}) == []
    # The output of the module that reads the parts shows whether it reads them correctly.
    inside = [pair("h.0.kv", "l.0.attn.k", "part(dim=0, index=0, of=[1, 1], groups=2)"), pair("h.0.a", "l.0.attn")]
    for unsure, count in (({"l.0.mlp"}, 0), ({"l.0.mlp", "l.0.attn"}, 1), ({"l.0.attn"}, 1)):
        assert len(in_groups(inside, unsure)) == count
    whole_layer = [pair("h.0.kv", "l.0.k", "part(dim=0, index=0, of=[1, 1], groups=2)"), pair("h.0", "l.0")]
    assert len(in_groups(whole_layer, {"l.0.mlp"})) == 1
    one_group = [pair("h.0.qkv", "l.0.q", "part(dim=0, index=0, of=[1, 1, 1])")]
    fused = [pair("h.0.q", "l.0.qkv", "part(dim=0, index=0, of=[1, 1, 1], groups=2)", whole="target")]
    assert in_groups(one_group, {"l.0.mlp"}) == in_groups(fused, {"l.0.mlp"}) == []


@pytest.mark.parametrize("text", ["part(dim=-1, index=0, of=[1, 1])", "window(dim=-1, start=0, length=2)"])
def test_a_dimension_counted_from_the_end_is_that_dimension(text: str) -> None:
    gap = uncovered([parse_layout(text)], (2, 4))
    assert gap is not None
    assert gap.tolist() == [[False, False, True, True]] * 2
    first = parse_layout("part(dim=-2, index=0, of=[1, 1])")
    assert uncovered([first, parse_layout("part(dim=0, index=1, of=[1, 1])")], (2, 4)) is None


def test_rows_are_lacking_only_where_no_pair_finds_them() -> None:
    def rows(*found: int) -> Layout:
        return Layout((Gather.of_rows((4,), found, (4,)),))

    def said(*layouts: Layout, whole: Any = "baseline") -> list[str]:
        pairs = [Pair(f"b{n}", "t", layout, whole, "exact") for n, layout in enumerate(layouts)]
        return [each.text for each in in_part(pairs, {"t": (4, 3)})]

    assert said(rows(0, 1, -1, -1), rows(-1, -1, 2, 3)) == []
    (found,) = said(rows(0, 1, -1, -1), rows(-1, 1, -1, 3))
    assert "1 of its 4 rows have no row of the baseline's" in found
    assert said(rows(0, 1, -1, -1), rows(0, 1, 2, 3)) == []
    # Rows that the target lacks are no rows of its tap.
    assert not any("have no row" in each for each in said(rows(0, 1, -1, -1), whole="target"))


def test_dims_in_another_order_are_no_rows_in_another_order() -> None:
    for text, is_noticed in (("a b c -> b a c", False), ("a b -> b a", False), ("(a b) c -> (b a) c, b=2", True)):
        assert bool(notices_of([pair("x", "y", text)], {})) == is_noticed
