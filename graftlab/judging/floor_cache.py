"""A cache of measured floors, which saves repeating the baseline's run against itself."""

from __future__ import annotations

import hashlib
import json
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import pandas as pd

from graftlab.base import shipping
from graftlab.grafting.self_graft import SelfGraft
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import pack_plan
from graftlab.ranks.remote_functions import Callee
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import records, rows_where

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore

# Entries per session; each holds the outputs that the baseline's ranks recorded.
_MOST_KEPT = 8
# The columns that describe the baseline's value at a tap and how it was aligned.
_SEEN = (
    *("name", "tags", "occurrence", "side", "rank", "shape", "dtype", "cast", "aligned_by"),
    *("numel", "mean_baseline", "std_baseline", "min_baseline", "max_baseline"),
)

_known: WeakKeyDictionary[SessionCore, OrderedDict[str, list[SelfGraft]]] = WeakKeyDictionary()
_lock = threading.Lock()


def floor_key(
    session: SessionCore,
    plan: GraftPlan,
    rows: pd.DataFrame,
    callees: Sequence[Callee | None],
    keep: Sequence[str],
) -> str:
    """A digest of what a floor depends on: code with its arguments, dtypes, the plan, and the baseline's values.

    The values stand for everything else that the code reads, such as weights that live on the ranks. ``rows`` are those
    of the run in which every tap was grafted b2t.
    """
    digest = hashlib.blake2b(digest_size=16)
    for callee in callees:
        shipped = callee if callee is None or isinstance(callee, str) else shipping.pack_function(callee)
        digest.update(repr(shipped).encode())
    # A verdict replaces the plan's filters; its transform and its renaming count.
    digest.update(pack_plan(replace(plan, version=0, b2t="True", t2b=None, compare=None, keep=None)))
    digest.update(repr((list(keep), session.options.keep_budget)).encode())
    measured = rows_where(rows, rows["status"].isin(MEASURED))
    for row in records(measured):
        tags = {tag: value for tag, value in row["tags"].items() if tag != "step"}
        seen = [tags if column == "tags" else row[column] for column in _SEEN]
        digest.update(json.dumps(seen, sort_keys=True, default=str).encode())
    return digest.hexdigest()


def known_floor(session: SessionCore, key: str) -> list[SelfGraft] | None:
    with _lock:
        floors = _known.get(session, OrderedDict())
        if key in floors:
            floors.move_to_end(key)
        return floors.get(key)


def remember_floor(session: SessionCore, key: str, measured: list[SelfGraft]) -> None:
    """Store a floor, unless the baseline differed from itself, and so has none."""
    if any(each.not_repeated for each in measured):
        return
    with _lock:
        floors = _known.setdefault(session, OrderedDict())
        floors[key] = measured
        while len(floors) > _MOST_KEPT:
            floors.popitem(last=False)
