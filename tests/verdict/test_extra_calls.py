"""Taps that one side reaches more often than the other."""

from __future__ import annotations

from typing import Any

import pandas as pd

from graftlab.verdict.extra_calls import extra_calls, only_before


def rows(*given: tuple[str, str, str, dict[str, Any]]) -> pd.DataFrame:
    """A row for each status, side, name and tags."""
    lines = [
        {"status": status, "side": side, "name": name, "tags": tags, "step": 0, "rank": 0}
        for status, side, name, tags in given
    ]
    return pd.DataFrame(lines, columns=["status", "side", "name", "tags", "step", "rank"])


def test_a_call_that_one_side_makes_more_often_is_reported_with_both_counts() -> None:
    calls = [("grafted", "target", "gate", {})] * 3
    (said,) = extra_calls(rows(*calls, ("unmatched", "target", "gate", {})), ["gate"])
    assert said.startswith("The target reaches gate 4 times and the baseline 3 times. ")
    (said,) = extra_calls(rows(*calls, ("missing", "baseline", "gate", {})), ["gate"])
    assert said.startswith("The baseline reaches gate 4 times and the target 3 times. ")


def test_taps_with_the_same_extra_calls_share_a_sentence() -> None:
    names = [f"layers.{n}" for n in range(6)]
    once = [("grafted", "target", name, {}) for name in [*names, "gate", "gate"]]
    more = [("missing", "baseline", name, {}) for name in [*names, "gate"]]
    layers, gate = extra_calls(rows(*once, *more), [*names, "layers.*", "gate"])
    assert layers.startswith(
        "The baseline reaches each of 6 taps (layers.0, layers.1, layers.2, layers.3 and 2 more) 2 times and the "
        "target 1 time. Calls are paired in order, so after the first call that only one side makes, each of them is "
    )
    assert gate.startswith("The baseline reaches gate 3 times and the target 2 times. ")


def test_taps_of_one_side_of_other_tags_or_not_named_are_not_extra_calls() -> None:
    assert extra_calls(rows(("unmatched", "target", "gate", {}), ("grafted", "target", "up", {})), ["gate", "up"]) == []
    decode = rows(("grafted", "target", "gate", {"t": 1}), ("unmatched", "target", "gate", {"t": 2}))
    assert extra_calls(decode, ["gate"]) == []
    extra = rows(("grafted", "target", "gate", {}), ("unmatched", "target", "gate", {}))
    assert extra_calls(extra, ["up"]) == []
    recompute = {"recompute_status": "recompute"}
    assert extra_calls(rows(("grafted", "target", "g", {}), ("unmatched", "target", "g", recompute)), ["g"]) == []


def test_only_the_call_whose_tags_have_more_calls_is_reported() -> None:
    found = rows(
        ("grafted", "target", "gate", {"t": 1}),
        ("grafted", "target", "gate", {"t": 2}),
        ("unmatched", "target", "gate", {"t": 2}),
    )
    (said,) = extra_calls(found, ["gate"])
    assert said.startswith("The target reaches gate (t=2) 2 times and the baseline 1 time. ")


def test_a_tap_with_extra_calls_in_several_steps_is_reported_once() -> None:
    first = rows(*[("grafted", "target", "gate", {})] * 2, ("unmatched", "target", "gate", {}))
    later = rows(*[("grafted", "target", "gate", {})] * 4, ("unmatched", "target", "gate", {})).assign(step=1)
    (said,) = extra_calls(pd.concat([first, later], ignore_index=True), ["gate"])
    assert said.startswith("The target reaches gate 3 times and the baseline 2 times. ")


def in_order(*given: tuple[str, str, str, int]) -> pd.DataFrame:
    """A row for each status, side, name and order, of the run's third step."""
    lines = [
        {"status": status, "side": side, "name": name, "order": order, "step": 2, "rank": 0, "tags": {}}
        for status, side, name, order in given
    ]
    return pd.DataFrame(lines)


def before(rows: pd.DataFrame, name: str) -> str:
    (order,) = rows.loc[(rows["name"] == name) & (rows["status"] == "grafted"), "order"]
    return only_before(rows, {"g": {"name": name, "order": order, "step": 0, "rank": 0}}).get("g", "")


def test_a_value_of_one_side_directly_before_a_named_tap_is_mentioned() -> None:
    added = in_order(
        ("grafted", "target", "layers.0", 1),
        ("missing", "target", "norm", 2),
        ("grafted", "target", "head", 3),
        ("missing", "target", "more", 4),
    )
    assert before(added, "head") == "Before g the target alone has norm, which was not compared."
    first = in_order(("missing", "target", "norm", 1), ("grafted", "target", "head", 2))
    assert before(first, "head") == "Before g the target alone has norm, which was not compared."
    assert before(added, "layers.0") == ""
    # Its worst call may be of another run.
    assert only_before(first, {"g": {"name": "head", "order": 9, "step": 0, "rank": 0}}) == {}
    several = [("unmatched", "baseline", name, order) for order, name in enumerate("ab", start=1)]
    both = in_order(*several, ("grafted", "target", "head", 1))
    assert before(both, "head").endswith("the baseline alone has a, b, which were not compared.")
    # The order of a row of the baseline counts the taps of the baseline.
    lost = in_order(
        ("grafted", "target", "layers.0", 1),
        ("grafted", "target", "head", 2),
        ("unmatched", "baseline", "norm", 2),
        ("grafted", "target", "output", 3),
    )
    assert before(lost, "head") == "Before g the baseline alone has norm, which was not compared."
    assert before(lost, "layers.0") == before(lost, "output") == ""


def test_a_value_of_one_side_in_the_same_module_is_mentioned_too() -> None:
    rows = in_order(
        ("missing", "target", "attn.q_norm", 1),
        ("missing", "target", "mlp.drop", 2),
        ("grafted", "target", "attn.k", 3),
        ("unmatched", "baseline", "attn.scale", 2),
        ("grafted", "target", "attn.o", 4),
    )
    assert before(rows, "attn.o") == (
        "Before g the target alone has attn.q_norm and the baseline alone has attn.scale, which were not compared."
    )


def test_a_value_of_the_target_alone_counts_in_the_targets_own_order() -> None:
    far = [("grafted", "target", "a", 1), ("unmatched", "target", "b", 2), ("grafted", "target", "c", 3)]
    given = in_order(*far, ("grafted", "target", "g", 4))
    assert before(given, "g") == ""
    assert before(given, "c") == "Before g the target alone has b, which was not compared."


def test_values_before_a_tap_are_those_of_its_rank_and_of_the_baselines_first() -> None:
    ours = in_order(("grafted", "target", "a", 1), ("missing", "target", "norm", 2), ("grafted", "target", "head", 3))
    theirs = in_order(("grafted", "target", "x", 2), ("missing", "target", "own", 2), ("grafted", "target", "head", 3))
    both = pd.concat([ours, theirs.assign(rank=1)], ignore_index=True)
    named = [only_before(both, {"g": {"name": "head", "order": 3, "step": 0, "rank": rank}}) for rank in (0, 1)]
    assert named == [{"g": "Before g the target alone has norm, which was not compared."}, {}]
    lost = in_order(("unmatched", "baseline", "norm", 1))
    second = pd.concat([in_order(("grafted", "target", "head", 1)).assign(rank=1), lost], ignore_index=True)
    assert only_before(second, {"g": {"name": "head", "order": 1, "step": 0, "rank": 1}}) == {
        "g": "Before g the baseline alone has norm, which was not compared."
    }
