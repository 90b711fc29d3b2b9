"""The taps that a session lists: as each side's names become known, and without a verdict's own."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from graftlab.control.tap_catalog import TapCatalog
from graftlab.lines.traces import LINE_TAP
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.messages import TapSeen


def listed(plan: GraftPlan, *seen: tuple[str, str]) -> list[dict[str, Any]]:
    catalog = TapCatalog()
    for side, name in seen:
        rank: Any = SimpleNamespace(place=SimpleNamespace(side=side))
        catalog.note(TapSeen({"name": name, "side": side, "rank": 0, "step": 0}), rank)
    return catalog.all(plan)


def test_a_pair_has_the_names_that_either_side_knows_whichever_is_seen_first() -> None:
    plan = GraftPlan(rename={"target": {r"^theirs$": "h"}})  # type: ignore[arg-type]
    sides = [("baseline", "h"), ("target", "theirs")]
    for seen in (sides, sides[::-1]):
        (pair,) = listed(plan, *seen)
        assert (pair["name"], pair["baseline_name"], pair["target_name"]) == ("h", "h", "theirs")


def test_a_verdicts_own_taps_are_not_listed() -> None:
    assert [each["name"] for each in listed(GraftPlan(), ("target", f"{LINE_TAP}.3"), ("target", "h"))] == ["h"]
