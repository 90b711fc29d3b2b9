"""Lost process groups, and collectives that ranks wait in."""

from __future__ import annotations

import re
from collections.abc import Sequence

from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Failure

# How a failed collective shows: gloo raises a RuntimeError that names its source file; NCCL and the store have their
# own classes.
_BACKEND_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_GLOO = "gloo/transport"

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)\n(?:    (?P<source>.+)\n)?')
# How many of the innermost frames are searched for a collective.
_NEAR = 3


class ProcessGroups:
    """The process groups of one session's sides. A side with one rank has none."""

    def __init__(self, ranks: Sequence[RankHandle]) -> None:
        self._ranks = ranks
        self._failed: dict[str, str] = {}

    def note_failure(self, rank: RankHandle, failure: Failure) -> None:
        """Note a failed collective, which closes gloo's connections or aborts NCCL's communicator."""
        if failure.kind in _BACKEND_ERRORS or (failure.kind == "RuntimeError" and _GLOO in failure.message):
            brief = failure.message.strip().partition("\n")[0][-120:]
            self._failed.setdefault(rank.place.side, f"a collective failed on {rank.label}: {brief}")

    def lost(self) -> dict[str, str]:
        """The sides that have lost their group, and why."""
        found: dict[str, str] = {}
        for rank in self._ranks:
            # This session knows nothing of the groups of jobs that joined.
            if rank.takes_work and rank.place.world_size > 1 and not rank.alive:
                found.setdefault(rank.place.side, f"{rank.label} {rank.how_it_ended()}")
        return found | {side: why for side, why in self._failed.items() if side not in found}

    def renew(self) -> None:
        """Forget all failures: new ranks have new groups."""
        self._failed.clear()


def collective_in(stack: str) -> str | None:
    """The line of the user's code that waits in a collective, found in a rank's stacks; None if none does."""
    _, found, main = stack.partition("thread MainThread\n")
    frames = list(_FRAME.finditer(main.partition("\nthread ")[0])) if found else []
    near = frames[-_NEAR:]
    waits = bool(near) and ".wait(" in (near[-1]["source"] or "")
    if not (waits or any("/torch/distributed/" in frame["path"] for frame in near)):
        return None
    own = next((frame for frame in reversed(frames) if "/torch/" not in frame["path"]), frames[-1])
    return f"{own['path']}, line {own['line']}: {own['source'] or own['name']}"
