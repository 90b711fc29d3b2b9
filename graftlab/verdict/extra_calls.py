"""Taps that one side reaches more often than the other, so that their calls may be paired with other calls."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection
from typing import Any

import pandas as pd

from graftlab.base.tags import display_tags, distinguishes_taps
from graftlab.base.tap_groups import group_of
from graftlab.base.text import counted
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import records

_ALONE = ("missing", "unmatched")


def extra_calls(rows: pd.DataFrame, named: Collection[str]) -> list[str]:
    """A sentence for each tap of the ``named`` groups that both sides reach, and one side more often.

    Calls of a tap under the same tags are paired in their order. After a call that only one side makes, each is
    compared with another call, and a graft puts another call's value there.
    """
    both: Counter[tuple[Any, ...]] = Counter()
    alone: Counter[tuple[Any, ...]] = Counter()
    shown: dict[tuple[Any, ...], tuple[str, str]] = {}
    for row in records(rows[rows["status"].isin([*MEASURED, *_ALONE])]):
        if row["tags"].get("recompute_status") == "recompute" or group_of(row["name"], row["tags"]) not in named:
            continue
        tags = json.dumps({k: v for k, v in row["tags"].items() if distinguishes_taps(k)}, sort_keys=True, default=str)
        place = (row["name"], tags, row["step"], row["rank"])
        if row["status"] in _ALONE:
            alone[(*place, row["side"])] += 1
        else:
            both[place] += 1
            own = ", ".join(f"{name}={value}" for name, value in display_tags(row["tags"]).items())
            shown[place] = row["name"], f" ({own})" if own else ""
    said: dict[str, str] = {}
    for (*key, side), more in alone.items():
        place = tuple(key)
        if both[place] and shown[place][0] not in said:
            name, own = shown[place]
            other = "baseline" if side == "target" else "target"
            often, seldom = counted(both[place] + more, "time"), counted(both[place], "time")
            said[name] = (
                f"The {side} reaches {name}{own} {often} and the {other} {seldom}. Calls are paired in order, so "
                f"after the first call that only one side makes, {name} is compared with and grafted from the wrong "
                "call, and the findings below may be consequences. Distinguish the calls with gl.tags, or leave the "
                "extra call untapped."
            )
    return list(said.values())
