"""Every distinct tap that some rank has reached, wanted by some filter or not."""

from __future__ import annotations

import threading
from typing import Any

from graftlab.base.tags import SIDE_NAMES, identity, rank_tags
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import TapSeen


class SeenTaps:
    """Notes each when it is first reached, by whichever rank."""

    def __init__(self) -> None:
        self._tags: dict[tuple[Any, ...], dict[str, Any]] = {}
        # Those of the plan that was asked for last: by its names, and how many of all they were made of.
        self._names: tuple[Any, ...] = ()
        self._listed: dict[tuple[Any, ...], dict[str, Any]] = {}
        self._done = 0
        self._lock = threading.Lock()

    def note(self, seen: TapSeen, rank: RankHandle) -> None:
        # Filters can tell apart what differs in a rank tag alone. A name may be another tap's on the other side.
        tags = seen.tags
        self._tags.setdefault((*identity(tags), rank_tags(tags), rank.place.side), tags)

    def all(self, plan: GraftPlan) -> list[dict[str, Any]]:
        """The tags of each as a plan's filters see them, as they were when it was first seen; a pair is one tap."""
        with self._lock:
            names = (plan.pairs, plan.rename)
            if names != self._names:
                self._names, self._listed, self._done = names, {}, 0
            # Widgets ask many times a second, and most taps were there the last time.
            for seen in list(self._tags.values())[self._done :]:
                self._done += 1
                for tags in plan.paired_tags(seen):
                    known = self._listed.setdefault((*identity(tags), rank_tags(tags)), tags)
                    for name in SIDE_NAMES:
                        # What one side cannot know of the other's name the other has said.
                        known[name] = known[name] if known[name] is not None else tags[name]
            return list(self._listed.values())
