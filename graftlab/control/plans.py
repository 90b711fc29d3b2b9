"""The plans of a session: all that were published, and the step from which each rank uses them."""

from __future__ import annotations

from collections.abc import Sequence

from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import PlanAdopted, PlanUpdate, pack


class Plans:
    """Oldest first, and never empty after the first :meth:`publish`."""

    def __init__(self, ranks: Sequence[RankHandle]) -> None:
        self._ranks = ranks
        self._published: list[GraftPlan] = []
        self._adopted: dict[int, dict[str, int]] = {}

    @property
    def newest(self) -> GraftPlan:
        return self._published[-1]

    def all(self) -> list[GraftPlan]:
        return list(self._published)

    def publish(self, plan: GraftPlan) -> None:
        """Make this the newest plan, and send it to every live rank."""
        self._published.append(plan)
        self._send()

    def publish_again(self) -> None:
        """Send the newest plan to ranks that have just begun, and forget which plans earlier ranks used."""
        self._adopted.clear()
        self._send()

    def _send(self) -> None:
        for rank in self._ranks:
            if rank.alive:
                self.send_to(rank)

    def send_to(self, rank: RankHandle) -> None:
        """Send the newest plan to one rank."""
        rank.channel.send(pack(PlanUpdate(to_wire(self.newest))))

    def note_adopted(self, message: PlanAdopted, rank: RankHandle) -> None:
        self._adopted.setdefault(message.version, {})[rank.label] = message.step

    def adopted(self, version: int) -> dict[str, int]:
        """The step from which each rank uses this plan, by rank; ranks that do not use it yet are left out."""
        return dict(self._adopted.get(version, {}))
