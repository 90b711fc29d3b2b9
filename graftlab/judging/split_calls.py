"""Calls into which each side divides its work differently, as a prefill in chunks does: no two of them are alike."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

import pandas as pd

from graftlab.base.tap_groups import is_data, is_recomputed, kind_of
from graftlab.base.text import counted, first_of
from graftlab.base.world import SIDES, Side
from graftlab.rows.schema import MEASURED
from graftlab.transforms.default import unfit_shapes
from graftlab.verdict.added import records

SplitCalls = Mapping[tuple[str, str | None], Mapping[Side, int]]
"""How often each side reaches a tap, by the tap's name and kind."""
_ALONE = ("missing", "unmatched")


def split_calls(rows: pd.DataFrame) -> SplitCalls:
    """The taps whose calls do not pair, with their number on each side; empty where calls pair in their order.

    ``rows`` are those of a run without grafts. Calls are divided differently if one side makes more of them, and those
    of the same number have tensors of other shapes. Then a pair of calls compares other work, at all of these taps.
    """
    counts: dict[tuple[str, str | None], Counter[str]] = defaultdict(Counter)
    for row in records(rows[rows["rank"].isin((0, None))] if len(rows) else rows):
        tags: Mapping[str, Any] = row["tags"]
        if is_data(tags) or is_recomputed(tags):
            continue
        if row["status"] in _ALONE:
            what = str(row["side"])
        elif row["status"] in MEASURED:
            what = "measured"
        else:
            what = "unfit" if unfit_shapes(str(row["error"])) is not None else "failed"
        counts[row["name"], kind_of(tags)][what] += 1
    extra = {
        tap: found
        for tap, found in counts.items()
        if (found["baseline"] > 0) != (found["target"] > 0) and found["measured"] + found["unfit"] > 0
    }
    if not any(found["unfit"] for found in extra.values()):
        return {}
    return {
        tap: {side: found[side] + found["measured"] + found["unfit"] + found["failed"] for side in SIDES}
        for tap, found in extra.items()
    }


def not_paired(split: SplitCalls) -> list[str]:
    """A sentence on the taps whose calls do not pair."""
    if not split:
        return []
    names = list(dict.fromkeys(name for name, _ in split))
    most = max(split.values(), key=lambda found: max(found.values()))
    return [
        f"{counted(len(names), 'tap')} ({first_of(names, 4)}): the sides divide their work into different calls "
        f"({counted(most['baseline'], 'call')} on the baseline and {most['target']} on the target, of other shapes), "
        "so none of these calls is judged. Let both sides make the same calls to see where a difference arises."
    ]
