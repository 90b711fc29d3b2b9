"""A process group of ranks that no session started: forks of the forkserver, which has imported torch."""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from graftlab.ranks.forkserver import start_process
from kit.deadline import DEADLINE


def run_ranks(function: Callable[[int, Path], None], folder: Path, world_size: int) -> None:
    """Call ``function(rank, folder)`` in this many processes at once, and raise what the first failure raised.

    The function is found by its module's name, as multiprocessing does.
    """
    ranks = [start_process(_run, (function, rank, folder), f"rank-{rank}") for rank in range(world_size)]
    for rank in ranks:
        rank.join(2 * DEADLINE)
    left = [rank for rank in ranks if rank.exitcode is None]
    for rank in left:
        rank.kill()
        rank.join()
    failed = [path.read_text() for path in sorted(folder.glob("*.failed"))]
    assert [rank.exitcode for rank in ranks] == [0] * world_size, "\n".join(failed)


def _run(function: Callable[[int, Path], None], rank: int, folder: Path) -> None:
    try:
        function(rank, folder)
    except Exception:
        (folder / f"{rank}.failed").write_text(traceback.format_exc())
        sys.exit(1)
