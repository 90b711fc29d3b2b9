"""Both sides derive the same pair from the plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graftlab.errors import PlanError
from graftlab.plan.pairs import Pairing, PairRule, outputs_move_rows
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import pack_plan, unpack_plan

THIRD = "part(dim=0, index={}, of=[1, 1, 1])"


def of(plan: GraftPlan, side: Any, name: str, **tags: Any) -> list[Pairing]:
    return plan.pairings(side, name, tags)


def only(plan: GraftPlan, side: Any, name: str, **tags: Any) -> Pairing:
    (found,) = of(plan, side, name, **tags)
    return found


def seen(pairing: Pairing) -> tuple[Any, ...]:
    """All that a filter and an address depend on."""
    return pairing.name, pairing.baseline_name, pairing.target_name, pairing.key, pairing.tags


@given(layer=st.integers(0, 200))
def test_both_sides_see_the_same_pair(layer: int) -> None:
    plan = GraftPlan(pairs=[("h.{n}.mlp", "layers.{n+1}.ffn")])
    mine, theirs = only(plan, "baseline", f"h.{layer}.mlp"), only(plan, "target", f"layers.{layer + 1}.ffn")
    assert seen(mine) == seen(theirs)
    assert mine.name == f"h.{layer}.mlp"


@pytest.mark.parametrize("baseline", ["h.{n}.mlp", "h.{n+1}.mlp", "h.{n+2}.mlp"])
def test_a_pattern_reaches_no_number_below_zero(baseline: str) -> None:
    plan = GraftPlan(pairs=[(baseline, "layers.{n+1}.ffn")])
    assert only(plan, "target", "layers.0.ffn").rule is None


def test_one_tap_that_is_three_has_three_pairs_each_known_by_its_part() -> None:
    plan = GraftPlan(pairs=[("h.{n}.qkv", f"l.{{n}}.{part}", THIRD.format(i)) for i, part in enumerate("qkv")])
    whole = of(plan, "baseline", "h.2.qkv")
    assert [each.name for each in whole] == ["l.2.q", "l.2.k", "l.2.v"]
    assert [seen(each) for each in whole] == [seen(only(plan, "target", f"l.2.{part}")) for part in "qkv"]
    assert len({each.key for each in whole}) == 3


def test_literal_rule_wins_over_a_pattern() -> None:
    plan = GraftPlan(pairs=[("h.{n}.k", "l.{n}.k"), ("h.{n}.v", "l.{n}.v"), ("h.1.k", "l.1.v"), ("h.1.v", "l.1.k")])
    assert only(plan, "baseline", "h.0.k").target_name == "l.0.k"
    assert only(plan, "baseline", "h.1.k").target_name == "l.1.v"
    assert only(plan, "target", "l.1.k").baseline_name == "h.1.v"


def test_tap_whose_namesake_is_paired_elsewhere_has_no_counterpart() -> None:
    plan = GraftPlan(pairs=[("x", "y")])
    assert "x = y" in str(only(plan, "target", "x").alone)
    assert "x = y" in str(only(plan, "baseline", "y").alone)
    assert only(plan, "target", "z").alone is None


def test_a_pair_of_calls_with_other_tags_has_the_same_tags_on_both_sides() -> None:
    plan = GraftPlan(pairs=[("q[layer={n}]", "attn.{n}.q"), ("drop#1", "drop.1")])
    mine, theirs = only(plan, "baseline", "q", layer=3), only(plan, "target", "attn.3.q")
    assert seen(mine) == seen(theirs)
    assert (mine.name, mine.tags) == ("q", {"layer": 3})
    tags = {"name": "attn.3.q", "side": "target", "step": 0}
    assert plan.paired_tags(tags)[0]["layer"] == 3
    assert only(plan, "baseline", "drop").occurrence == 1
    assert only(plan, "target", "drop.1").occurrence == 0


def test_a_pair_holds_for_calls_with_further_tags_and_with_any_value_of_an_open_one() -> None:
    plan = GraftPlan(pairs=[("q[layer={n},t=*]", "attn.{n}.q"), ("q[layer=1,t=5]", "special")])
    mine = only(plan, "baseline", "q", layer=3, t=17, rid="a")
    assert seen(mine) == seen(only(plan, "target", "attn.3.q", rid="a"))
    assert mine.tags == {"layer": 3, "rid": "a"}
    assert only(plan, "baseline", "q", layer=1, t=4).target_name == "attn.1.q"
    # A rule that names all tags of a call wins.
    assert only(plan, "baseline", "q", layer=1, t=5).target_name == "special"
    # Without one of the tags that are named, the rule is about something else.
    assert only(plan, "baseline", "q", layer=3).rule is None
    assert only(plan, "baseline", "q", t=3).rule is None


def test_pairs_go_before_rename_and_the_rest_is_renamed() -> None:
    plan = GraftPlan(pairs=[("a", "model.b")], rename={"target": {r"^model\.": ""}})
    assert only(plan, "target", "model.b").name == "a"
    assert only(plan, "target", "model.c").name == "c"


def test_filter_on_an_unknown_name_is_refused_with_a_correction() -> None:
    rename = {"target": {r"^new\.": "old."}}
    assert GraftPlan(b2t="baseline_name == 'old.x'", rename=rename).b2t
    with pytest.raises(PlanError, match="compare uses target_name, which the baseline's ranks cannot know"):
        GraftPlan(compare="target_name == 'new.x'", rename=rename)
    assert GraftPlan(b2t="target_name == 'new.x'", pairs=[("old.x", "new.x")]).b2t


def test_pairs_travel_and_are_equal_at_the_other_end() -> None:
    plan = GraftPlan(pairs=[{"baseline": "qkv", "target": "q", "layout": THIRD.format(0)}, ("a", "b")])
    assert unpack_plan(pack_plan(plan)) == plan
    assert plan.edit(b2t="layer == 1").pairs == plan.pairs
    assert plan.edit(pairs=None).pairs == ()


@pytest.mark.parametrize(
    ("pairs", "says"),
    [
        (["ab"], "a pair is"),
        ("ab", "list of rules"),
        (b"ab", "list of rules"),
        ({"a": "b"}, "list of rules"),
        ([{"baseline": "a"}], "baseline= and target="),
        ([{"baseline": "a", "target": "b", "layer": 3}], "baseline= and target="),
        ([("h.{n}", "l.{m}")], "same numbers in braces"),
        ([("a", "b", "part(")], "'a' and 'b'"),
        ([("", "b")], "must be a name"),
        (
            [{"baseline": "a", "target": "b", "whole": "received"}],
            "not 'received'",
        ),
    ],
)
def test_pairs_that_are_none_are_refused(pairs: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        GraftPlan(pairs=pairs)


def test_rule_shows_its_parsed_layout() -> None:
    assert PairRule("a", "b", "a  b ->  b a").layout == "a b -> b a"


def test_a_plan_shows_its_pairs_with_the_layout_in_which_they_are_one() -> None:
    shown = GraftPlan(pairs=[("a.{n}", "b.{n}"), ("x", "y", THIRD.format(1))])._repr_mimebundle_()["text/html"]
    assert "a.{n} = b.{n}" in shown
    assert "x = y" in shown
    assert "given, part(index=1, of=[1, 1, 1], dim=0) of the baseline" in shown


def test_a_result_that_contains_its_input_does_not_move_the_rows_of_the_results() -> None:
    rows = "rows(of='input.ids', into='output[0]')"
    prompt = PairRule("input.ids", "output[0]", rows)
    assert not outputs_move_rows([prompt, PairRule("input.ids", "input.ids")])
    moved = PairRule("layers.0", "layers.0", rows)
    assert outputs_move_rows([prompt, moved])
    assert not outputs_move_rows([prompt, moved, PairRule("output[1]", "output[1]")])
    assert outputs_move_rows([PairRule("output.logits", "output", rows)])
