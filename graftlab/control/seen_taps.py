"""Every distinct tap that some rank has reached, wanted by some filter or not."""

from __future__ import annotations

from typing import Any

from graftlab.ranks.messages import TapSeen
from graftlab.ranks.rank_process import RankProcess

# Tags that tell where and when a tap was reached, not which tap it is.
_PLACE_TAGS = frozenset({"step", "side", "rank"})


class SeenTaps:
    """Notes each when it is first reached, by whichever rank."""

    def __init__(self) -> None:
        self._tags: dict[tuple[Any, ...], dict[str, Any]] = {}

    def note(self, seen: TapSeen, rank: RankProcess) -> None:
        tags = seen.tags
        self._tags.setdefault((tags["name"], tuple(v for k, v in tags.items() if k not in _PLACE_TAGS)), tags)

    def all(self) -> list[dict[str, Any]]:
        """The tags of each, as they were when it was first seen."""
        return list(self._tags.values())
