"""Pairs that matched by value once and do not any more: whether the target was mended, or has a new mistake."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from kit.in_process import a_row

from graftlab.layouts import parse_layout
from graftlab.matching.pair import SURENESS, Pair
from graftlab.plan.plan import GraftPlan
from graftlab.rows.store import to_frame
from graftlab.verdict.outdated_pairs import (
    OutdatedPair,
    learned_from_other_code,
    no_longer_equal,
    outdated_pairs,
    with_present_partners,
)

OLD = OutdatedPair("layers.0.k", "blocks.0.q", "same", 1e-7, 0.5)


def test_a_target_that_now_has_a_tap_of_that_name_was_fixed() -> None:
    planned = [Pair("layers.0.k", "blocks.0.q")]
    present = [Pair("layers.0.v", "blocks.0.v"), Pair("layers.0.q", "blocks.0.q")]
    (found,) = with_present_partners([OLD], planned, present)
    assert (found.present, found.is_mended) == ("has the values of layers.0.q", True)
    said = learned_from_other_code([found, replace(found, target="blocks.1.q")])
    assert "blocks.0.q was paired with layers.0.k, and now has the values of layers.0.q (1 more pair like it)" in said
    assert "like it" not in learned_from_other_code([found])


def test_a_target_that_now_has_another_taps_values_does_not_count_as_fixed() -> None:
    right = OutdatedPair("layers.0.q", "blocks.0.q", "same", 1e-7, 0.5)
    planned, present = [Pair("layers.0.q", "blocks.0.q")], [Pair("layers.0.k", "blocks.0.q")]
    (found,) = with_present_partners([right], planned, present)
    assert (found.present, found.is_mended) == ("has the values of layers.0.k", False)
    assert learned_from_other_code([found]) == ""


def test_the_same_tap_in_another_layout_is_named_with_the_layout() -> None:
    turned = Pair("layers.0.k", "blocks.0.q", parse_layout("a b -> b a"))
    (found,) = with_present_partners([OLD], [Pair("layers.0.k", "blocks.0.q")], [turned])
    assert found.present == "takes it in the layout 'a b -> b a'"


def test_a_pair_that_still_holds_or_has_no_partner_keeps_its_place() -> None:
    planned = [Pair("layers.0.k", "blocks.0.q")]
    assert with_present_partners([OLD], planned, planned) == [OLD]
    parts = [Pair("layers.0.v", "blocks.0.q"), *planned]
    assert with_present_partners([OLD], planned, parts) == [OLD]
    assert with_present_partners([OLD], planned, []) == [OLD]
    first_call = replace(OLD, baseline="layers.0.k#0", target="blocks.0.q#0")
    assert with_present_partners([first_call], planned, planned) == [first_call]


def test_the_remark_prefers_a_pair_whose_present_partner_is_known() -> None:
    known = replace(OLD, target="blocks.1.q", present="has the values of layers.1.q")
    said = no_longer_equal([OLD, known])
    assert said.startswith(
        "blocks.1.q and 1 more matched layers.0.k by value to 1e-07 when the pairs were made, and now"
    )
    assert "now has the values of layers.1.q" in said
    assert "and differs by 0.5 now. If the target's code has changed" in no_longer_equal([OLD])


def test_a_target_that_had_another_roles_values_was_fixed_under_any_new_name() -> None:
    outdated, present = [OutdatedPair("blocks.0.k", "blocks.0.q", "same", 1e-7, 0.5)], [Pair("proj", "blocks.0.q")]
    (found,) = with_present_partners(outdated, [Pair("blocks.0.k", "blocks.0.q")], present)
    assert (found.present, found.is_mended) == ("has the values of proj", True)
    # The name of the former one fitted, so this is a mistake.
    right = [replace(outdated[0], baseline="blocks.0.q")]
    (found,) = with_present_partners(right, [Pair("blocks.0.q", "blocks.0.q")], present)
    assert not found.is_mended


def test_pairs_by_value_that_differ_more_than_a_match_allows_are_outdated() -> None:
    pairs = [{"baseline": f"b{n}", "target": f"t{n}"} for n in range(4)]
    plan = GraftPlan(pairs=[{**each, "matched_by": "near", "rel": 1e-7} for each in pairs])

    def found(given: Sequence[str] = (), **changes: object) -> list[OutdatedPair]:
        usual = {"matched_by": "near", "match_rel": 1e-7, "dtype": "float32", "rel_l2": 0.5}
        rows = [
            a_row(
                name=f"b{n}",
                target_name=f"t{n}",
                **{"tags": {"name": f"b{n}"}, **usual, **(changes if n == 2 else {"rel_l2": 1e-6})},
            )
            for n in range(4)
        ]
        return outdated_pairs(to_frame(rows), plan, given)

    assert found() == [OutdatedPair("b2", "t2", "same", 1e-7, 0.5)]
    assert (
        found(rel_l2=None)
        == found(rel_l2=1e-6)
        == found(matched_by="rule")
        == found(match_rel=None)
        == found(match_rel=0.1)
        == []
    )
    assert {each for each in SURENESS if found(matched_by=each)} == {"exact", "near", "confirmed"}
    # What the model was given is no result of code.
    assert found(["b2"]) == []
    # The weight after an optimizer's step.
    assert found(tags={"name": "b2", "kind": "param", "updated": True}) == []
    # The match has not compared the gradients.
    assert found(tags={"name": "b2", "kind": "grad"}) == found(tags={"name": "b2", "kind": "param_grad"}) == []
    # A row whose dtype this torch does not have is held to the limit of float32.
    assert found(dtype="float4_of_a_later_torch") == found()


def test_a_target_that_still_has_the_values_of_another_role_was_not_fixed() -> None:
    planned, present = [Pair("layers.0.k", "blocks.0.q")], [Pair("layers.0.v", "blocks.0.q")]
    (found,) = with_present_partners([OLD], planned, present)
    assert (found.present, found.is_mended) == ("has the values of layers.0.v", False)
