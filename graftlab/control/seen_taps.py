"""Every distinct tap that some rank has reached, wanted by some filter or not."""

from __future__ import annotations

from typing import Any

from graftlab.base.tags import identity, rank_tags
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import TapSeen


class SeenTaps:
    """Notes each when it is first reached, by whichever rank."""

    def __init__(self) -> None:
        self._tags: dict[tuple[Any, ...], dict[str, Any]] = {}

    def note(self, seen: TapSeen, rank: RankHandle) -> None:
        # Filters can tell apart what differs in a rank tag alone.
        tags = seen.tags
        self._tags.setdefault((*identity(tags), rank_tags(tags)), tags)

    def all(self) -> list[dict[str, Any]]:
        """The tags of each, as they were when it was first seen."""
        return list(self._tags.values())
