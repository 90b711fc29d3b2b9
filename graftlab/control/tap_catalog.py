"""The distinct taps that ranks have reached, whether a filter wants them or not."""

from __future__ import annotations

import threading
from typing import Any

from graftlab.base.tags import SIDE_NAMES, identity, rank_tags
from graftlab.lines.traces import LINE_TAP
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import TapSeen


class TapCatalog:
    """Holds each tap's tags as they were when a rank first reached it."""

    def __init__(self) -> None:
        self._tags: dict[tuple[Any, ...], dict[str, Any]] = {}
        # A cache for the last plan asked about, made from the first `_done` taps.
        self._names: tuple[Any, ...] = ()
        self._listed: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._done = 0
        self._lock = threading.Lock()

    def note(self, seen: TapSeen, rank: RankHandle) -> None:
        # Filters can tell taps apart by a rank tag alone, and the two sides may use one name for different taps.
        tags = seen.tags
        if tags["name"].startswith(f"{LINE_TAP}."):
            return  # A verdict's own, in the model only while the verdict looks for a line.
        self._tags.setdefault((*identity(tags), rank_tags(tags), rank.place.side), tags)

    def all(self, plan: GraftPlan) -> list[dict[str, Any]]:
        """The tags of each tap as this plan's filters see them. A pair counts as one tap."""
        with self._lock:
            names = (plan.pairs, plan.rename)
            if names != self._names:
                self._names, self._listed, self._done = names, {}, 0
            # Widgets ask many times a second, and mostly no tap is new.
            for seen in list(self._tags.values())[self._done :]:
                self._done += 1
                for tags in plan.paired_tags(seen):
                    known = self._listed.setdefault((*identity(tags), rank_tags(tags)), tags)
                    for name in SIDE_NAMES:
                        # A side may not know the other's name for the tap; then the other side's report has it.
                        known[name] = known[name] if known[name] is not None else tags[name]
            return list(self._listed.values())
