"""What a verdict says of pairs that contradict their names or each other."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
from kit.in_process import a_row

from graftlab.plan.pairs import rules_from
from graftlab.plan.plan import GraftPlan
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.pair_contradictions import compared_in_part, contradicting_pairs

QKV = {0: "q", 1: "k", 2: "v"}


def split_from_fused(swapped: dict[str, str]) -> list[dict[str, Any]]:
    """Three layers whose fused qkv the target has apart, some of them under another's name."""
    pairs = []
    for layer in range(3):
        for part, role in QKV.items():
            own = f"layers.{layer}.{role}_proj"
            layout = f"part(index={part}, of=[1, 1, 1], dim=1)"
            pairs.append({"baseline": f"h.{layer}.qkv", "target": swapped.get(own, own), "layout": layout})
    return pairs


def rows_of(pairs: list[dict[str, Any]], shape: list[int] | None = None) -> pd.DataFrame:
    made = [
        Row(
            *(0, 0, n, pair["target"], tags, "b2t", "target", 0, "compared", [0], shape),
            target_name=pair["target"],
            matched_by=pair.get("matched_by", "near"),
        )
        for n, pair in enumerate(pairs)
        for tags in ({"kind": "param"} if pair["target"].endswith(".weight") else {},)
    ]
    return to_frame(made)


def said_of(pairs: list[dict[str, Any]], shape: list[int] | None = None) -> list[str]:
    return contradicting_pairs(rows_of(pairs, shape), GraftPlan(pairs=rules_from(pairs)))


def test_parts_with_the_name_of_a_different_part_are_reported() -> None:
    pairs = split_from_fused({f"layers.1.{a}_proj": f"layers.1.{b}_proj" for a, b in ("kv", "vk")})
    (said,) = said_of(pairs)
    assert "layers.1.v_proj is the k of h.1.qkv, not its v, and layers.1.k_proj its v: the two are swapped." in said
    assert "a difference is named in the code that reads them" in said


def test_a_layer_whose_layout_differs_from_the_others_is_reported() -> None:
    pairs = [{"baseline": f"h.{n}.out", "target": f"l.{n}.out", "layout": "a b -> b a"} for n in range(3)]
    assert said_of(pairs) == []
    pairs[2] = {**pairs[2], "layout": "same"}
    (said,) = said_of(pairs)
    assert "l.2.out is h.2.out in the layout 'same', where 2 others like it are in the layout 'a b -> b a'" in said


def test_a_layout_that_no_other_tap_needs_is_reported_by_the_first_name_of_the_value() -> None:
    pairs = [{"baseline": "h", "target": target, "layout": "a b -> b a"} for target in ("late", "early")]
    assert said_of(pairs, [4, 4]) == [
        "The plan's pairs contradict their names or each other: late is compared in the layout 'a b -> b a', though "
        "both shapes are equal and no other tap needs one. They are compared as the plan says. If the target mixes "
        "them up, a difference is named in the code that reads them."
    ]
    # Several values in one order are a convention; another shape needs a layout.
    assert said_of([*pairs, {"baseline": "i", "target": "x", "layout": "a b -> b a"}], [4, 4]) == []
    assert said_of(pairs, [4, 2]) == []


def test_the_first_four_contradictions_are_shown_and_the_others_counted() -> None:
    layouts = ["a b c d -> " + order for order in ("b a c d", "a c b d", "a b d c", "b c a d", "c a b d", "d a b c")]
    pairs = [{"baseline": f"h{n}", "target": f"t{n}", "layout": layout} for n, layout in enumerate(layouts)]
    for count, more in ((4, ""), (5, "; and 1 more"), (6, "; and 2 more")):
        [said] = said_of(pairs[:count], [2, 2, 2, 2])
        shown = "; ".join(
            f"t{n} is compared in the layout {layout!r}, though both shapes are equal and no other tap needs one"
            for n, layout in enumerate(layouts[:4])
        )
        assert said.startswith(f"The plan's pairs contradict their names or each other: {shown}{more}. They are"), count


def test_two_taps_that_take_different_parts_of_one_tensor_are_reported() -> None:
    first, last = (f"part(index={n}, of={[1] * 10}, dim=1)" for n in (0, 9))
    pairs = [
        {"baseline": "out", "target": "x"},
        {"baseline": "out", "target": "pooled", "layout": last},
        {"baseline": "cls", "target": "x", "layout": first, "whole": "target"},
    ]
    (said,) = said_of(pairs)
    assert f"pooled is a part of out ({last!r}), and the baseline's cls is a different part of the target's x (" in said
    # Of another size they need not be the same.
    assert said_of([*pairs[:2], {**pairs[2], "layout": "part(index=0, of=[1, 4], dim=1)"}]) == []
    # Nor where the two wholes are not each other's, or one is itself a part of the other.
    assert said_of([{"baseline": "other", "target": "x"}, *pairs[1:]]) == []
    assert said_of([{**pairs[0], "layout": "part(index=0, of=[1, 1], dim=0)"}, *pairs[1:]]) == []


def test_parts_by_groups_of_heads_are_reported_where_their_layer_does_not_match() -> None:
    layout = "part(index=0, of=[1, 1, 1], dim=1, groups=4)"
    pairs = [{"baseline": f"h.{n}.qkv", "target": f"l.{n}.q", "layout": layout} for n in range(3)]
    pairs += [{"baseline": f"h.{n}.out", "target": f"l.{n}.out"} for n in range(3)]
    assert said_of(pairs) == []
    (said,) = said_of([{**pair, "matched_by": "rule"} if pair["target"] == "l.1.out" else pair for pair in pairs])
    assert "l.1.q is taken out of h.1.qkv by groups of heads" in said
    # A new norm's weight is all ones and so matches none by value, which does not show how the heads were read.
    norms = [{"baseline": f"h.{n}.weight", "target": f"l.{n}.weight", "matched_by": "rule"} for n in range(3)]
    assert said_of([*pairs, *norms]) == []


def test_the_part_that_pairs_leave_out_of_a_tap_is_named_once_for_all_layers() -> None:
    pairs = [
        {
            "baseline": f"h.{n}.{m}",
            "target": f"l.{n}.qkv",
            "layout": f"part(index={m}, of=[1, 1, 1])",
            "whole": "target",
        }
        for n in range(3)
        for m in range(2)
    ]
    rows = rows_of(pairs, [12, 4])
    assert compared_in_part(rows, GraftPlan(pairs=rules_from(pairs))) == [
        "l.0.qkv is compared only in part: it contains h.0.0, h.0.1; no baseline tap has the other 33%, and so in 2 "
        "other layers."
    ]
    pairs += [{**pairs[2 * n], "baseline": f"h.{n}.2", "layout": "part(index=2, of=[1, 1, 1])"} for n in range(3)]
    assert compared_in_part(rows, GraftPlan(pairs=rules_from(pairs))) == []


def test_rows_that_no_batch_of_the_baseline_has_are_reported() -> None:
    parts = [
        "gather(of=[3], runs=[[0, 3], [-1, 5]], into=[8])",
        "gather(of=[3], runs=[[-1, 5], [0, 2], [-1, 1]], into=[8])",
    ]
    pairs = [{"baseline": f"x#{n}", "target": "y", "layout": layout} for n, layout in enumerate(parts)]
    said = compared_in_part(rows_of(pairs, [8, 4]), GraftPlan(pairs=rules_from(pairs)))
    assert said == ["y is compared only in part: 3 of its 8 rows have no row of the baseline's, as padding has."]


def test_a_single_reordered_tensor_of_equal_shapes_is_reported() -> None:
    order = "a (b c) d -> a (c b) d, c=3"
    pairs = [{"baseline": "conv", "target": "patch", "layout": order}, {"baseline": "x", "target": "y"}]
    (said,) = said_of(pairs, [2, 9, 16])
    assert "patch is compared in the layout" in said
    assert "though both shapes are equal" in said
    # Another shape, as of tokens before the batch; and what the whole model has so.
    assert said_of([{"baseline": "x", "target": "y", "layout": "a b c -> b a c"}], [2, 9, 16]) == []
    assert said_of([pairs[0], {**pairs[1], "layout": order}], [2, 9, 16]) == []


@pytest.mark.parametrize(
    ("module", "is_reported"),
    [
        ({}, False),
        ({"layout": "b s d -> (b s) d"}, False),
        ({"layout": "a b c -> b a c"}, True),
        ({"matched_by": "rule"}, True),
        ({"target": "other"}, True),
    ],
)
def test_a_reordered_weight_is_right_if_its_module_has_the_values_in_order(
    module: dict[str, str], is_reported: bool
) -> None:
    pairs = [
        {"baseline": "linear.weight", "target": "proj.weight", "layout": "a (b c) -> a (c b), c=8"},
        {"baseline": "linear", "target": "proj", **module},
    ]
    assert bool(said_of(pairs, [64, 16])) == is_reported


@pytest.mark.parametrize(
    ("given", "is_reported"),
    [
        ({}, True),
        ({"mean_baseline": -2.0, "std_baseline": 1e-8}, True),
        ({"std_baseline": 0.1}, False),
        # One number, whole numbers, and weights show nothing of the order either way.
        ({"numel": 1}, False),
        ({"dtype": "int64"}, False),
        ({"tags": {"kind": "param"}}, False),
    ],
)
def test_equal_numbers_do_not_show_in_which_order_a_module_reads_them(given: dict[str, Any], is_reported: bool) -> None:
    pairs = [
        {"baseline": "linear.weight", "target": "proj.weight", "layout": "a (b c) -> a (c b), c=8"},
        {"baseline": "linear", "target": "proj"},
    ]
    usual = {"tags": {"kind": "input"}, "dtype": "float32", "numel": 8, "mean_baseline": 1.0, "std_baseline": 0.0}
    rows = pd.concat([rows_of(pairs, [64, 16]), to_frame([a_row(name="x", **{**usual, **given})])])
    assert bool(contradicting_pairs(rows, GraftPlan(pairs=rules_from(pairs)))) == is_reported


def test_a_partner_unlike_the_other_layers_is_reported_where_the_usual_one_is_taken() -> None:
    pairs = [{"baseline": f"h.{n}.{a}", "target": f"b.{n}.{b}"} for a, b in ("ax", "by") for n in range(4)]
    assert said_of(pairs) == []
    pairs[1], pairs[5] = ({**pairs[n], "baseline": pairs[6 - n]["baseline"]} for n in (1, 5))
    (said,) = said_of(pairs)
    assert "b.1.x is h.1.b, where 3 others like it are paired as b.0.x with h.0.a" in said
    assert "b.1.y is h.1.a, where" in said


def test_a_reordering_that_every_layer_has_is_not_called_the_only_one() -> None:
    order = "a (b c) d -> a (c b) d, c=3"
    pairs = [{"baseline": f"h.{n}.k", "target": f"b.{n}.k", "layout": order} for n in range(3)]
    assert said_of(pairs, [2, 9, 16]) == []
    # Two names of one quantity are one contradiction.
    twice = [{"baseline": "conv", "target": name, "layout": order} for name in ("patch", "patch.out")]
    (said,) = said_of(twice, [2, 9, 16])
    assert said.count("is compared in the layout") == 1


FIRST_LAYER = [
    {"baseline": "embed", "target": "b.0.input"},
    *({"baseline": f"h.{n}.out", "target": f"b.{n + 1}.input"} for n in range(3)),
]
LAST_LAYER = [
    *({"baseline": f"h.{n}.out", "target": f"b.{n}.out"} for n in range(3)),
    {"baseline": "before_norm", "target": "b.3.out"},
]
TWO_NORMS = [
    *({"baseline": f"h.{n}.ln_1", "target": f"b.{n}.norm_1"} for n in range(3)),
    {"baseline": "h.0.into_mlp", "target": "b.0.norm_2"},
]


@pytest.mark.parametrize("pairs", [[], split_from_fused({}), FIRST_LAYER, LAST_LAYER, TWO_NORMS])
def test_consistent_pairs_are_not_reported(pairs: list[dict[str, Any]]) -> None:
    assert said_of(pairs) == []


def test_rows_without_pairs_give_no_sentence() -> None:
    assert contradicting_pairs(pd.DataFrame(to_frame([])), GraftPlan()) == []


def test_pairs_that_only_names_made_contradict_nothing() -> None:
    pairs = split_from_fused({f"layers.1.{a}_proj": f"layers.1.{b}_proj" for a, b in ("kv", "vk")})
    plan = GraftPlan(pairs=rules_from(pairs))
    assert contradicting_pairs(rows_of(pairs), plan)
    assert contradicting_pairs(rows_of([{**pair, "matched_by": None} for pair in pairs]), plan) == []
