"""The published grafter's protocol, written from its description: what the benchmarks compare graftlab with.

The ranks of both sides form one gloo group. A tap evaluates the filter's text; where it holds, every rank takes part
in an ``all_gather_object``, to which senders bring ``(tensor, extras)`` and receivers None. A receiver measures how far
the received tensor is from its own, over the full tensors, logs that, and copies the received one over its own.
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
class Seat:
    """Where a reference rank stands. The group's ranks are the baseline's first, then the target's."""

    side: Literal["baseline", "target"]
    rank: int
    baseline: int
    target: int

    @property
    def world_rank(self) -> int:
        return self.rank if self.side == "baseline" else self.baseline + self.rank


class ReferenceGrafter:
    """Grafts wherever the filters ``b2t`` or ``t2b``, Python expressions over tags, say so; None matches nothing."""

    def __init__(self, seat: Seat, b2t: str | None = None, t2b: str | None = None) -> None:
        self.seat = seat
        self._b2t = b2t
        self._t2b = t2b
        self._step = 0

    def tap(self, name: str, tensor: torch.Tensor, extras: Any = None, **tags: Any) -> torch.Tensor:
        names = {"name": name, "step": self._step, "side": self.seat.side, "rank": self.seat.rank, **tags}
        b2t, t2b = _holds(self._b2t, names), _holds(self._t2b, names)
        if not (b2t or t2b):
            return tensor
        senders = range(self.seat.baseline) if b2t else range(self.seat.baseline, self.seat.baseline + self.seat.target)
        gathered: list[Any] = [None] * (self.seat.baseline + self.seat.target)
        if self.seat.world_rank in senders:
            dist.all_gather_object(gathered, (tensor, extras))
            return tensor
        dist.all_gather_object(gathered, None)
        received, _ = gathered[senders[self.seat.rank % len(senders)]]
        baseline, target = (received, tensor) if b2t else (tensor, received)
        logger.info("tap %r: %s", name, diff_statistics(baseline, target))
        tensor.copy_(received)
        return tensor

    def step(self) -> None:
        self._step += 1


def _holds(expression: str | None, names: Mapping[str, Any]) -> bool:
    return expression is not None and bool(eval(expression, _HELPERS, names))


def join_group(seat: Seat, folder: str) -> None:
    """Make this process a rank of the gloo group of both sides. ``folder`` is one that all ranks share."""
    # One host: nobody else should reach the group.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo" if sys.platform.startswith("linux") else "lo0")
    world_size = seat.baseline + seat.target
    store = FileStore(os.path.join(folder, "store"), world_size)
    timeout = timedelta(seconds=_TIMEOUT)
    dist.init_process_group("gloo", store=store, rank=seat.world_rank, world_size=world_size, timeout=timeout)


class ReferenceWorld:
    """Ranks that compute with one thread each, live until the end of the ``with``.

    ``join(seat, folder)`` is the first that each of them calls.
    """

    def __init__(self, baseline: int, target: int, join: Callable[[Seat, str], None] = join_group) -> None:
        self._seats = [
            *(Seat("baseline", rank, baseline, target) for rank in range(baseline)),
            *(Seat("target", rank, baseline, target) for rank in range(target)),
        ]
        self._join = join
        self._folder = tempfile.TemporaryDirectory(prefix="graftlab-reference-")
        self._connections: list[Connection] = []
        self._processes: list[Any] = []

    def __enter__(self) -> ReferenceWorld:
        context: Any = torch.multiprocessing.get_context("spawn")
        for seat in self._seats:
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(seat, self._folder.name, theirs, self._join), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            # One that waits for a rank that has failed would never see its pipe close.
            process.join(5.0 if error is None else 0.0)
            process.kill()
            process.join()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call ``function(seat, *args)`` on every rank at once; returns what each returned, the baseline's first.

        ``function`` is one that can be imported. Raises RuntimeError with the traceback of the first rank that fails,
        and when none answers in time.
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
                seat = self._seats[index]
                try:
                    fine, value = self._connections[index].recv()
                except EOFError:
                    fine, value = False, "its process has ended"
                if not fine:
                    raise RuntimeError(f"the reference's {seat.side}[{seat.rank}] failed: {value}")
                results[index] = value
        return [results[index] for index in range(len(self._seats))]


def _serve(seat: Seat, folder: str, connection: Connection, join: Callable[[Seat, str], None]) -> None:
    torch.set_num_threads(1)
    # As graftlab's ranks do, it writes its log to a file.
    logging.basicConfig(filename=Path(folder) / f"{seat.side}-{seat.rank}.log", level=logging.INFO)
    join(seat, folder)
    while True:
        try:
            function, args = connection.recv()
        except EOFError:
            break
        try:
            answer = (True, function(seat, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        try:
            connection.send(answer)
        except BrokenPipeError:
            break  # another rank had failed before, and nobody waits for this one any more
    if dist.is_initialized():
        dist.destroy_process_group()
