"""What a plan refuses: all of what is said, with what was given and what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kit.refusals import ids, refusal

from graftlab.plan.pairs import rules_from
from graftlab.plan.plan import GraftPlan

REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: rules_from([{"baseline": "a"}]),
        "a pair has baseline= and target=, and optionally layout= and whole=, not {'baseline': 'a'}",
    ),
    (
        lambda: rules_from([{"baseline": "a", "target": "b", "side": "c"}]),
        "a pair has baseline= and target=, and optionally layout= and whole=, not {'baseline': 'a', "
        "'target': 'b', 'side': 'c'}",
    ),
    (
        lambda: rules_from([("a",)]),
        "a pair is (baseline's tap, target's tap[, layout[, side of the whole]]), not ('a',)",
    ),
    (
        lambda: rules_from("a -> b"),
        "pairs must be the proposal of session.match or a list of rules, not str",
    ),
    (
        lambda: rules_from([("", "b")]),
        "pairs: the baseline's tap must be a name, not ''",
    ),
    (
        lambda: rules_from([("a", "b", "same", "both")]),
        "pairs: whole must be 'baseline' or 'target', not 'both'",
    ),
    (
        lambda: rules_from([("h.{n}", "layers.{m}")]),
        "pairs: 'h.{n}' and 'layers.{m}' must have the same numbers in braces, such as {n}",
    ),
    (
        lambda: GraftPlan().edit(**{"filter": "x", "b2tt": "y"}),
        "edit() got unexpected keywords ['b2tt', 'filter']; a plan has b2t, t2b, compare, keep, "
        "transform, rename, pairs",
    ),
    (
        lambda: GraftPlan(rename={"both": {}}),
        "rename is for 'baseline' or 'target', not 'both'",
    ),
    (
        lambda: GraftPlan(rename={"target": {"(": ""}}),
        "rename '(' -> '' for target is invalid: missing ), unterminated subpattern at position 0",
    ),
    (
        lambda: GraftPlan(rename=[("target", "a")]),
        "rename maps a side to {regex: replacement}, e.g. {'target': {r'^model\\.': ''}}",
    ),
    (
        lambda: GraftPlan(rename={"target": "a"}),
        "rename maps a side to {regex: replacement}, e.g. {'target': {r'^model\\.': ''}}",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=ids(REFUSED))
def test_a_part_that_is_none_of_a_plan_is_named_with_what_is(call: Callable[[], Any], said: str) -> None:
    assert refusal(call) == said
