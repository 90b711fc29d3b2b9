"""The graft world: all ranks of both sides, and where one of them stands in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Side = Literal["baseline", "target"]
Direction = Literal["b2t", "t2b"]

MAX_RANKS = 512
"""How many ranks a graft world may have, both sides together: a rank's page has one bit for each that it awaits."""


@dataclass(frozen=True)
class Place:
    """Where a rank stands in the graft world. ``world_size`` counts the ranks of its own side."""

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
        """All places of the graft world, in world-rank order, mine included."""
        mine, others = self.world_size, self.other_world_size
        baseline, target = (mine, others) if self.side == "baseline" else (others, mine)
        return [Place("baseline", rank, baseline, target) for rank in range(baseline)] + [
            Place("target", rank, target, baseline) for rank in range(target)
        ]


@dataclass(frozen=True)
class RunInfo:
    """What a rank needs to know of a run: who takes part (world ranks), and where its own step numbers begin.

    ``generations`` says how often the baseline and the target have been started so far. A job that resumes at its own
    step k begins at step ``base + k``.
    """

    run: int
    first_step: int
    participants: tuple[int, ...]
    generations: tuple[int, int] = (1, 1)
    base: int = 0

    @property
    def leader(self) -> int:
        """The rank whose plan changes everybody follows: the baseline's rank 0 where it takes part."""
        return min(self.participants)
