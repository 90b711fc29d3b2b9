"""Which sides have lost their process group, so that nobody takes a rank that waits in vain for one that is idle."""

from __future__ import annotations

import re
from collections.abc import Sequence

from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Failure

# How collectives fail: gloo by a RuntimeError that names its own source, NCCL and the store by classes of their own.
_BACKEND_ERRORS = frozenset({"DistBackendError", "DistNetworkError", "DistStoreError"})
_GLOO = "gloo/transport"

_FRAME = re.compile(r'File "(?P<path>[^"]+)", line (?P<line>\d+), in (?P<name>.+)\n(?:    (?P<source>.+)\n)?')
# So far from the innermost frame a collective may have been called.
_NEAR = 3


class ProcessGroups:
    """Of the ranks of one session. A side with a single rank has no group to lose."""

    def __init__(self, ranks: Sequence[RankHandle]) -> None:
        self._ranks = ranks
        self._failed: dict[str, str] = {}

    def note_failure(self, rank: RankHandle, failure: Failure) -> None:
        """After a collective has failed, gloo's connections are closed and NCCL's communicator is aborted."""
        if failure.kind in _BACKEND_ERRORS or (failure.kind == "RuntimeError" and _GLOO in failure.message):
            brief = failure.message.strip().partition("\n")[0][-120:]
            self._failed.setdefault(rank.place.side, f"a collective failed on {rank.label}: {brief}")

    def lost(self) -> dict[str, str]:
        """By side, why its group is gone."""
        found: dict[str, str] = {}
        for rank in self._ranks:
            # Of the groups of jobs that joined nothing is known here.
            if rank.takes_work and rank.place.world_size > 1 and not rank.alive:
                found.setdefault(rank.place.side, f"{rank.label} {rank.how_it_ended()}")
        return found | {side: why for side, why in self._failed.items() if side not in found}

    def renew(self) -> None:
        """The ranks are new, and so are their groups."""
        self._failed.clear()


def collective_in(stack: str) -> str | None:
    """The line of the user's code that waits in a collective, from the stacks of a rank; None where none does."""
    _, found, main = stack.partition("thread MainThread\n")
    frames = list(_FRAME.finditer(main.partition("\nthread ")[0])) if found else []
    near = frames[-_NEAR:]
    waits = bool(near) and ".wait(" in (near[-1]["source"] or "")
    if not (waits or any("/torch/distributed/" in frame["path"] for frame in near)):
        return None
    own = next((frame for frame in reversed(frames) if "/torch/" not in frame["path"]), frames[-1])
    return f"{own['path']}, line {own['line']}: {own['source'] or own['name']}"
