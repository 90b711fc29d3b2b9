"""Both sides derive the same pair from the plan."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.refusals import exactly

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
    plan = GraftPlan(pairs=[(baseline, "layers.{n+1}.ffn"), ("l.{n}", "k.{n-1}"), ("d.{n}#1", "e.{n-1}")])
    assert only(plan, "target", "layers.0.ffn").rule is None
    assert only(plan, "baseline", "l.0").rule is None
    assert only(plan, "baseline", "d.0").rule is None
    assert [only(plan, "baseline", name).target_name for name in ("l.1", "d.1")] == ["k.0", "e.0"]


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


PART_RULES = [("h.{n}.qkv", f"l.{{n}}.{part}", THIRD.format(i)) for i, part in enumerate("qk")]
LITERAL_PARTS = [("h.1.qkv", "l.1.kk", THIRD.format(1)), ("h.1.qkv", "l.1.q", THIRD.format(2))]


@pytest.mark.parametrize("turned", [False, True])
def test_literal_rules_for_parts_replace_the_patterns_of_those_parts_alone(turned: bool) -> None:
    rules = [*PART_RULES, *LITERAL_PARTS]
    whole, part = ("target", "baseline") if turned else ("baseline", "target")
    plan = GraftPlan(pairs=[(two, one, layout, "target") for one, two, layout in rules] if turned else rules)
    # The name of q is both a rule's and a pattern's, so it alone does not tell which.
    q = "l.1.q = h.1.qkv" if turned else "h.1.qkv = l.1.q"
    assert [each.name for each in of(plan, whole, "h.1.qkv")] == ["l.1.kk", q, "l.1.k"]
    assert [only(plan, part, f"l.1.{name}").name for name in ("kk", "q", "k")] == ["l.1.kk", q, "l.1.k"]
    rule = only(plan, part, "l.1.q").rule
    assert rule is not None
    assert rule.layout == "part(index=2, of=[1, 1, 1], dim=0)"
    # Beside a literal rule for another part, the name of the whole would stand for two pairs.
    plan = GraftPlan(pairs=[PART_RULES[0], LITERAL_PARTS[0]])
    assert [only(plan, "baseline", "h.0.qkv").name, *(each.name for each in of(plan, "baseline", "h.1.qkv"))] == [
        "l.0.q",
        "l.1.kk",
        "l.1.q",
    ]


def test_a_pattern_gives_way_to_literal_rules_of_either_of_its_taps() -> None:
    plan = GraftPlan(pairs=[("h.{n}.w", "l.{n}.w"), ("h.1.w", "l.7.w"), ("other", "l.5.w")])
    assert [only(plan, "baseline", f"h.{n}.w").target_name for n in (0, 1)] == ["l.0.w", "l.7.w"]
    assert [only(plan, "baseline", f"h.{n}.w").name for n in (0, 1)] == ["h.0.w", "h.1.w"]
    assert only(plan, "baseline", "h.7.w").rule is None
    assert only(plan, "baseline", "h.5.w").rule is None
    assert only(plan, "target", "l.1.w").rule is None


@pytest.mark.parametrize(
    ("pairs", "baseline", "target", "name", "tags", "occurrences"),
    [
        # Values of tags are what they are for Python.
        ([("q[p=1.5]", "x")], ("q", {"p": 1.5}), ("x", {}), "q", {"p": 1.5}, None),
        ([("q[p=None]", "x")], None, ("x", {}), "q", {"p": None}, None),
        ([("q[p=True]", "x")], ("q", {"p": True}), ("x", {}), "q", {"p": True}, None),
        ([("q[p=a-b]", "x")], ("q", {"p": "a-b"}), ("x", {}), "q", {"p": "a-b"}, None),
        ([("q[p='a']", "x")], ("q", {"p": "'a'"}), ("x", {}), "q", {"p": "'a'"}, None),
        ([("q[p=[]]", "x")], None, ("x", {}), "q[p=[]]", None, None),
        # Tags of the baseline's name, or else of the target's, and those that neither names.
        ([("q[l=1]", "x[i=2]")], ("q", {"l": 1, "p": 5}), ("x", {"i": 2, "p": 5}), "q", {"p": 5, "l": 1}, None),
        ([("a", "x[layer=2]")], ("a", {"p": 5}), ("x", {"layer": 2, "p": 5}), "a", {"p": 5, "layer": 2}, None),
        # Tags in any order and with blanks, as people write them.
        ([("q[t=5, layer={n}]", "x.{n}")], ("q", {"layer": 3, "t": 5}), ("x.3", {}), "q", {"layer": 3, "t": 5}, None),
        ([("q[t = *, l={n}]#1", "x.{n}")], ("q", {"l": 3, "t": 5}), ("x.3", {}), "q", {"l": 3}, (1, 0)),
        ([("q[p=1.0]", "x")], ("q", {"p": 1}), ("x", {}), "q", {"p": 1}, None),
        # Calls by their number.
        ([("h.{n}#1", "l.{n}")], ("h.3", {}), ("l.3", {}), "h.3", None, (1, 0)),
        ([("h.{n+1}#1", "l.{n}")], ("h.1", {}), ("l.0", {}), "h.1", None, (1, 0)),
        ([("d#1", "e#2")], ("d", {}), ("e", {}), "d", None, (1, 2)),
        ([("q[layer={n}]#1", "l.{n}")], ("q", {"layer": 3}), ("l.3", {}), "q", {"layer": 3}, (1, 0)),
        ([("q[l={n}]#1", "l.{n}")], ("q", {"l": 3, "p": 0}), ("l.3", {"p": 0}), "q", {"l": 3, "p": 0}, (1, 0)),
        # Names with characters that mean something in regular expressions.
        ([("m({n}).w+", "l.{n}[0]")], ("m(2).w+", {}), ("l.2[0]", {}), "m(2).w+", None, None),
        # Names that would stand for two pairs.
        ([("a", "m"), ("a", "b"), ("m", "c")], None, ("m", {}), "a = m", None, None),
        ([("a", "m"), ("a", "b"), ("m", "c")], ("m", {}), ("c", {}), "m", None, None),
        ([("m", "c"), ("m", "d"), ("a", "m"), ("a", "e")], None, ("m", {}), "m", None, None),
        ([("a", "m1"), ("a", "b"), ("z", "m2"), ("m3", "c")], ("z", {}), ("m2", {}), "z", None, None),
    ],
    ids=str,
)  # fmt: skip
def test_both_sides_derive_name_tags_and_calls_of_a_pair(
    pairs: Any, baseline: Any, target: Any, name: str, tags: Any, occurrences: Any
) -> None:
    plan = GraftPlan(pairs=pairs)
    theirs = only(plan, "target", target[0], **target[1])
    mine = only(plan, "baseline", baseline[0], **baseline[1]) if baseline else theirs
    assert seen(mine) == seen(theirs)
    assert (theirs.name, theirs.tags) == (name, tags)
    assert (mine.occurrence, theirs.occurrence) == (occurrences if occurrences else (None, None))


@pytest.mark.parametrize("name", ["h.10", "h.3", "h.x3", "hx3"])
def test_names_that_are_none_of_a_patterns_have_no_pair(name: str) -> None:
    plan = GraftPlan(pairs=[("h.{n}", "l.{n}.{n+1}"), ("h.x.{n}#{m}", "l.x.{n}.{m}")])
    known = {"h.10": "l.10.11", "h.3": "l.3.4"}
    assert only(plan, "baseline", name).target_name == known.get(name, name)
    for other in ("l.3.5", "l.03.4", "l.3.4x"):
        assert only(plan, "target", other).rule is None
    # Which calls these are is not known before they are reached.
    assert only(plan, "baseline", "h.x.3").rule is None


def test_a_rule_for_calls_with_tags_leaves_calls_without_them_to_other_rules() -> None:
    plan = GraftPlan(pairs=[("q[layer={n}]", "attn.{n}.q"), ("h", "x[layer=1]"), ("h", "y")])
    assert only(plan, "baseline", "q").rule is None
    assert [each.key for each in of(plan, "baseline", "h")] == ["h = x[layer=1]", "h = y"]
    assert only(plan, "baseline", "h", layer=1).key == "h = y"


def test_tap_whose_namesake_is_paired_elsewhere_has_no_counterpart() -> None:
    tagged = GraftPlan(pairs=[("q[layer={n}]", "attn.{n}.q"), ("r[layer=1]", "w"), ("s#1", "v"), ("t.{n}#1", "u.{n}")])
    for name, known in (("q", "'q' with others"), ("r", "'r' with others"), ("s", "s#1 = v"), ("t.3", "t.3#1 = u.3")):
        assert f"(the plan pairs {known})" in str(only(tagged, "target", name).alone)
        assert (only(tagged, "target", name).key, only(tagged, "target", name).baseline_name) == (
            f"{name} (target only)",
            None,
        )
    assert only(tagged, "target", "q.3").alone is None
    ranks = GraftPlan(pairs=[("w[tp_rank=0]", "y")])
    assert only(ranks, "baseline", "w").rule is None
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
    with pytest.raises(
        PlanError,
        match=exactly(
            "compare uses target_name, which the baseline's ranks cannot know because rename rewrites the "
            "target's names. Use name, which is the name after the rename, or write pairs=[...] instead of "
            "the rename"
        ),
    ):
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
        ([("h.{n}", "l.{n}.{m}")], "same numbers in braces"),
        ([("h.{n}.{m}", "l.{n}")], "same numbers in braces"),
        ([("h", "l.{n}")], "same numbers in braces"),
        ([("a\ud800", "b")], "surrogates not allowed"),
        ([("a", "b", "same", "baseline", "given")], "a pair is"),
        ([{"baseline": "a", "target": "b", "layout": ["a b -> b a"]}], "written as text, not list"),
        ([("a",)], "a pair is"),
        ([("a", 3)], "a pair is"),
        ([("a", "b", "part(")], "'a' and 'b'"),
        ([("", "b")], exactly("pairs: the baseline's tap must be a name, not ''")),
        ([{"baseline": "a", "target": 3}], exactly("pairs: the target's tap must be a name, not 3")),
        (
            [{"baseline": "a", "target": "b", "whole": "received"}],
            "not 'received'",
        ),
    ],
)
def test_pairs_that_are_none_are_refused(pairs: Any, says: str) -> None:
    with pytest.raises(PlanError, match=says):
        GraftPlan(pairs=pairs)


@pytest.mark.parametrize(
    ("written", "reached"),
    [
        ("q[step=2, layer=1]#0", "q[layer=1,step=2]#0"),
        ("q[step=2, layer=1]#3", "q[layer=1,step=2]#3"),
        ("q[layer={n}, t=*]", "q[layer={n},t=*]"),
        ("q[ phase = decode ]", "q[phase=decode]"),
        ("q[layer=None]", "q[layer=None]"),
        ("q[tp_rank=1, layer=0]", "q[tp_rank=1, layer=0]"),
        ("q#1", "q#1"),
        ("q[0]", "q[0]"),
    ],
)
def test_a_pair_names_a_call_as_it_is_reached(written: str, reached: str) -> None:
    rule = PairRule(written, written)
    assert (rule.baseline, rule.target) == (reached, reached)


@pytest.mark.parametrize(
    ("layout", "moves", "is_part"),
    [
        ("same", False, False),
        ("a b -> b a", False, False),
        ("rows(of='ids', into='tokens')", True, True),
        ("gather(of=[2], runs=[[1, 1], [0, 1]], into=[2])", True, False),
        ("gather(of=[3], runs=[[1, 1], [0, 1]], into=[2])", True, True),
        (THIRD.format(2), False, True),
    ],
)
def test_a_rule_knows_what_its_layout_does_to_rows(layout: str, moves: bool, is_part: bool) -> None:
    rule = PairRule("a", "b", layout)
    assert (rule.moves_rows, rule.is_part) == (moves, is_part)


def test_rule_shows_its_parsed_layout() -> None:
    assert PairRule("a", "b", "a  b ->  b a").layout == "a b -> b a"
    assert PairRule("a", "b").to_code() == "{'baseline': 'a', 'target': 'b'}"
    assert GraftPlan(pairs=[("a", "b", "same", "target")]).pairs[0].whole == "target"


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
