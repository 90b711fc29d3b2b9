"""The pairs of tensors that the ranks keep, found from the notebook."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from graftlab.base.tags import plain
from graftlab.errors import SessionError
from graftlab.ranks.launcher import RankProcess


class KeptOnRanks:
    """Looks through what the ``keep`` filter held. ``ask(rank, topic, *arguments)`` puts a question to a rank."""

    def __init__(self, ranks: Sequence[RankProcess], ask: Callable[..., Any]) -> None:
        self._ranks = ranks
        self._ask = ask

    def tags(self, failed: bool) -> list[dict[str, Any]]:
        """Of every pair, oldest first, rank by rank; with ``failed`` of those without a value too."""
        return [tags for rank in self._receivers() for tags in self._ask(rank, "kept_tags", failed)]

    def find(
        self, topic: str, name: str, rank: int | None, tags: Mapping[str, Any], *more: Any
    ) -> tuple[RankProcess, bytes]:
        """The newest pair of this tap and these tags, packed as ``topic`` says, and the rank that has it.

        Raises :class:`SessionError` that lists what is kept when there is none.
        """
        wanted_tags = {tag: plain(value) for tag, value in tags.items()}
        steps: dict[RankProcess, int] = {}
        for process in self._receivers():
            if rank in (None, process.place.rank):
                for found in self._ask(process, "kept_tags", topic == "kept_input"):
                    if found["name"] == name and all(found.get(k) == v for k, v in wanted_tags.items()):
                        steps[process] = found["step"]
        # What is grafted t2b was received, and kept, by the other side: the newest counts, whoever has it.
        for process in sorted(steps, key=lambda process: -steps[process]):
            packed = self._ask(process, topic, name, wanted_tags, *more)
            if packed is not None:
                return process, packed
        kept = dict.fromkeys(str(tags["name"]) for tags in self.tags(failed=False))
        wanted = ", ".join([repr(name), *(f"{tag}={value!r}" for tag, value in tags.items())])
        raise SessionError(
            f"no pair of tensors is kept for {wanted}; kept are {list(kept) or 'none'}. "
            f"Set session.edit(keep=...) to a filter that matches the tap, and run again"
        )

    def _receivers(self) -> list[RankProcess]:
        # Taps are received by the target's ranks, but for those that are grafted t2b.
        return sorted((r for r in self._ranks if r.alive), key=lambda r: (r.place.side == "baseline", r.place.rank))
