"""The published grafter's protocol, written from its description: the reference of the benchmarks.

The ranks of both sides form one gloo group. A tap evaluates the filter's text. Where it is true, every rank calls
``all_gather_object``, senders with ``(tensor, extras)`` and receivers with None. A receiver measures the difference
between the received tensor and its own, logs it, and copies the received tensor over its own.
"""

from __future__ import annotations

import logging
import multiprocessing.connection
import os
import re
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed import FileStore  # type: ignore[attr-defined]

logger = logging.getLogger(__name__)

_HELPERS = {"search": re.search, "match": re.match, "fullmatch": re.fullmatch}
_TIMEOUT = 300.0


def diff_statistics(baseline: torch.Tensor, target: torch.Tensor) -> dict[str, float]:
    """``max_abs`` and ``mean_abs`` of |x - y| in float32; ``rel_diff`` = 1 - 2<x,y> / (|x|^2 + |y|^2) in float64."""
    distance = (baseline.float() - target.float()).abs()
    x, y = baseline.double(), target.double()
    rel_diff = 1 - 2 * (x * y).sum() / (x * x + y * y).sum()
    return {"rel_diff": rel_diff.item(), "max_abs": distance.max().item(), "mean_abs": distance.mean().item()}


@dataclass(frozen=True)
class ReferencePlace:
    """A reference rank's side and number. The group has the baseline's ranks first, then the target's."""

    side: Literal["baseline", "target"]
    rank: int
    baseline: int
    target: int

    @property
    def world_rank(self) -> int:
        return self.rank if self.side == "baseline" else self.baseline + self.rank


class ReferenceGrafter:
    """Grafts the taps that the filters ``b2t`` or ``t2b`` match, Python expressions over tags; None matches nothing."""

    def __init__(self, place: ReferencePlace, b2t: str | None = None, t2b: str | None = None) -> None:
        self.place = place
        self._b2t = b2t
        self._t2b = t2b
        self._step = 0

    def tap(self, name: str, tensor: torch.Tensor, extras: Any = None, **tags: Any) -> torch.Tensor:
        names = {"name": name, "step": self._step, "side": self.place.side, "rank": self.place.rank, **tags}
        b2t, t2b = _holds(self._b2t, names), _holds(self._t2b, names)
        if not (b2t or t2b):
            return tensor
        senders = (
            range(self.place.baseline) if b2t else range(self.place.baseline, self.place.baseline + self.place.target)
        )
        gathered: list[Any] = [None] * (self.place.baseline + self.place.target)
        if self.place.world_rank in senders:
            dist.all_gather_object(gathered, (tensor, extras))
            return tensor
        dist.all_gather_object(gathered, None)
        received, _ = gathered[senders[self.place.rank % len(senders)]]
        baseline, target = (received, tensor) if b2t else (tensor, received)
        logger.info("tap %r: %s", name, diff_statistics(baseline, target))
        tensor.copy_(received)
        return tensor

    def step(self) -> None:
        self._step += 1


def _holds(expression: str | None, names: Mapping[str, Any]) -> bool:
    return expression is not None and bool(eval(expression, _HELPERS, names))


def join_group(place: ReferencePlace, folder: str) -> None:
    """Make this process a rank of the gloo group of both sides. All ranks share ``folder``."""
    # All ranks are on this host, so the group need not be reachable from others.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    world_size = place.baseline + place.target
    store = FileStore(os.path.join(folder, "store"), world_size)
    timeout = timedelta(seconds=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=place.world_rank, world_size=world_size, timeout=timeout)


class ReferenceWorld:
    """Ranks with one thread each, which live until the end of the ``with``.

    Each rank calls ``join(place, folder)`` first.
    """

    def __init__(self, baseline: int, target: int, join: Callable[[ReferencePlace, str], None] = join_group) -> None:
        self._places = [
            *(ReferencePlace("baseline", rank, baseline, target) for rank in range(baseline)),
            *(ReferencePlace("target", rank, baseline, target) for rank in range(target)),
        ]
        self._join = join
        self._folder = tempfile.TemporaryDirectory(prefix="graftlab-reference-")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> ReferenceWorld:
        context: Any = torch.multiprocessing.get_context("spawn")
        for place in self._places:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(place, self._folder.name, theirs, self._join), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            # A rank that waits for a failed one does not notice that its pipe is closed.
            process.join(5.0 if error is None else 0.0)
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(place, *args)`` on every rank at once; return their results, the baseline's first.

        ``function`` has to be importable. Raises RuntimeError with the traceback of the first rank that fails, and when
        no rank answers in time.
        """
        for connection in self._connections:
            connection.send((function, args))
        results: dict[int, Any] = {}
        while len(results) < len(self._connections):
            waiting = [each for i, each in enumerate(self._connections) if i not in results]
            answers = multiprocessing.connection.wait(waiting, _TIMEOUT)
            if not answers:
                raise RuntimeError(f"the reference's ranks did not answer within {_TIMEOUT:g} s")
            for ready in answers:
                index = self._connections.index(ready)  # type: ignore[arg-type]
                place = self._places[index]
                try:
                    fine, value = self._connections[index].recv()
                except EOFError:
                    fine, value = False, "its process has ended"
                if not fine:
                    raise RuntimeError(f"the reference's {place.side}[{place.rank}] failed: {value}")
                results[index] = value
        return [results[index] for index in range(len(self._places))]


def _serve(
    place: ReferencePlace, folder: str, connection: Connection, join: Callable[[ReferencePlace, str], None]
) -> None:
    torch.set_num_threads(1)
    # Like graftlab's ranks, it writes its log to a file.
    logging.basicConfig(filename=Path(folder) / f"{place.side}-{place.rank}.log", level=logging.INFO)
    join(place, folder)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            answer = (True, function(place, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except BrokenPipeError:
            break  # another rank failed before, so the parent has closed the pipe
    if dist.is_initialized():
        dist.destroy_process_group()
