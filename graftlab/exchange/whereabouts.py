"""Where a rank is, readable by everybody at any moment without asking it.

A rank that hangs cannot answer; what it last wrote into the first page of its segment still can. The writer counts
up before and after, so that a reader that met a half-written page notices and looks again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from mmap import mmap

_COUNTER = struct.Struct("<Q")
_BODY = struct.Struct("<Iqqqd64sH512s")
_END = _COUNTER.size + _BODY.size
_STATES = ("starting", "idle", "running", "waiting")
MAX_RANKS = 64 * 8


@dataclass(frozen=True)
class Whereabouts:
    """One look at a rank: ``tap`` is the last tap that some filter wanted; ``awaits`` the world ranks it waits for."""

    state: str = "starting"
    step: int = -1
    plan_version: int = 0
    taps: int = 0
    since: float = 0.0
    tap: str = ""
    awaits: tuple[int, ...] = ()

    def __str__(self) -> str:
        if self.state in ("starting", "idle"):
            return self.state
        where = f"at tap {self.tap!r}" if self.tap else "before its first tap"
        seconds = max(0.0, time.monotonic() - self.since)
        if self.state == "waiting":
            return f"waiting {where} of step {self.step} for {seconds:.1f} s"
        return f"computing since {seconds:.1f} s, last seen {where} of step {self.step}"


class WhereaboutsPage:
    """The page itself: its owner writes, everybody reads."""

    def __init__(self, page: mmap) -> None:
        self._page = page
        self._count = 0

    def write(
        self, state: str, *, step: int, plan_version: int, taps: int, tap: str = "", awaits: Collection[int] = ()
    ) -> None:
        bits = 0
        for world_rank in awaits:
            bits |= 1 << world_rank
        name = tap.encode("utf-8", "replace")[:512]
        self._count += 2
        body = _BODY.pack(
            _STATES.index(state),
            step,
            plan_version,
            taps,
            time.monotonic(),
            bits.to_bytes(64, "little"),
            len(name),
            name,
        )
        # Not pack_into: it blanks the place before it writes, and a page with a count of zero looks whole.
        self._page[: _COUNTER.size] = _COUNTER.pack(self._count - 1)
        self._page[_COUNTER.size : _END] = body
        self._page[: _COUNTER.size] = _COUNTER.pack(self._count)

    def read(self) -> Whereabouts:
        for _ in range(1000):
            count = self._page[: _COUNTER.size]
            body = self._page[_COUNTER.size : _END]
            if _COUNTER.unpack(count)[0] % 2 == 0 and self._page[: _COUNTER.size] == count:
                break
        # After a thousand tries the writer died in the middle: half a page still says more than nothing.
        state, step, version, taps, since, bits, length, name = _BODY.unpack(body)
        mask = int.from_bytes(bits, "little")
        awaits = tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
        tap = name[:length].decode("utf-8", "ignore")
        return Whereabouts(_STATES[state % len(_STATES)], step, version, taps, since, tap, awaits)
