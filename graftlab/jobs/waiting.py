"""Until all have joined: what was handed over lies ready, and each process can see who is there."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence

from graftlab.base.world import Place
from graftlab.exchange.arena import PAGE
from graftlab.exchange.whereabouts import WhereaboutsPage


class Waiting:
    """A process that has joined and waits. ``descriptors`` begin with everyone's segments."""

    def __init__(self, place: Place, descriptors: Sequence[int]) -> None:
        self._place = place
        self._descriptors = descriptors
        everyone = place.everyone()
        self._maps = {
            other.label: mmap.mmap(
                descriptors[other.world_rank],
                PAGE,
                flags=mmap.MAP_SHARED,
                prot=mmap.PROT_READ | (mmap.PROT_WRITE if other == place else 0),
            )
            for other in everyone
        }
        self._say("idle")

    def missing(self) -> list[str]:
        """The labels of those that are not there yet."""
        return [label for label, page in self._maps.items() if WhereaboutsPage(page).read().state == "starting"]

    def close(self) -> None:
        for page in self._maps.values():
            page.close()

    def give_up(self) -> None:
        """Be there no more. The descriptors are closed, and nobody else's copies of them are shut."""
        self._say("starting")
        self.close()
        for descriptor in self._descriptors:
            os.close(descriptor)

    def _say(self, state: str) -> None:
        WhereaboutsPage(self._maps[self._place.label]).write(state, step=-1, plan_version=0, taps=0)
