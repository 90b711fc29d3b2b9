"""The graft world, which is all ranks of both sides, and a rank's place in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["baseline", "target"]
Direction = Literal["b2t", "t2b"]
SIDES: tuple[Side, Side] = ("baseline", "target")

MAX_RANKS = 512
"""The largest number of ranks of both sides together: a rank's status page has one bit for each rank it may await."""


def other_side(side: str) -> Side:
    """Return the side that is compared with this one."""
    return "target" if side == "baseline" else "baseline"


@dataclass(frozen=True)
class Place:
    """A rank's place in the graft world. ``world_size`` counts the ranks of that side."""

    side: Side
    rank: int
    world_size: int
    other_world_size: int

    @property
    def world_rank(self) -> int:
        """Index among all ranks of both sides: the baseline's first, then the target's."""
        return self.rank if self.side == "baseline" else self.other_world_size + self.rank

    @property
    def label(self) -> str:
        return f"{self.side}[{self.rank}]"

    def everyone(self) -> list[Place]:
        """Return all places of the graft world, in world-rank order, including this one."""
        mine, others = self.world_size, self.other_world_size
        baseline, target = (mine, others) if self.side == "baseline" else (others, mine)
        return [Place("baseline", rank, baseline, target) for rank in range(baseline)] + [
            Place("target", rank, target, baseline) for rank in range(target)
        ]


@dataclass(frozen=True)
class RunInfo:
    """A rank's view of a run: the participating world ranks, and its first step number.

    ``generations`` counts the starts of the baseline and of the target so far. A job that resumes at its own step k
    begins at step ``base + k``.
    """

    run: int
    first_step: int
    participants: tuple[int, ...]
    generations: tuple[int, int] = (1, 1)
    base: int = 0

    @property
    def leader(self) -> int:
        """The rank whose plan changes all others follow: the baseline's rank 0 if it participates."""
        return min(self.participants)
