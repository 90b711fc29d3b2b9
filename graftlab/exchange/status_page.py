"""A rank's status in shared memory: any process of the session can read it without asking the rank.

A rank that hangs cannot answer, but its status page, the first page of its segment, can still be read. The page has
two halves and a counter whose parity says which half is valid. The writer fills the other half and then increments the
counter. So a writer that dies half way leaves a valid half, and a reader that was overtaken notices and reads again.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Collection
from dataclasses import dataclass
from mmap import mmap

import msgspec

from graftlab.base.world import MAX_RANKS

_COUNTER = struct.Struct("<Q")
_BITS = -(-MAX_RANKS // 8)
_TAP = 512
_BODY = struct.Struct(f"<Iqqqd{_BITS}sH{_TAP}s")
_STATES = ("starting", "idle", "running", "waiting")
_RUNNING = _STATES.index("running")
_NOBODY = bytes(_BITS)
_COUNT = slice(_COUNTER.size)
_HALVES = tuple(slice(start, start + _BODY.size) for start in (_COUNTER.size, _COUNTER.size + _BODY.size))
_pack_count, _pack = _COUNTER.pack, _BODY.pack
# Bounds the memory for tap names that never repeat.
_NAMES_LIMIT = 10_000


@dataclass(frozen=True)
class RankStatus:
    """A rank's status: ``tap`` is the last tap that a filter matched, ``awaits`` the world ranks it waits for."""

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
        return f"computing for {seconds:.1f} s, last seen {where} of step {self.step}"


class WireStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A :class:`RankStatus` sent to another machine, whose clock differs: ``seconds`` is the age of the state."""

    state: str
    step: int
    plan_version: int
    taps: int
    seconds: float
    tap: str
    awaits: tuple[int, ...]

    @classmethod
    def of(cls, status: RankStatus) -> WireStatus:
        seconds = time.monotonic() - status.since
        return cls(status.state, status.step, status.plan_version, status.taps, seconds, status.tap, status.awaits)

    def restore(self) -> RankStatus:
        """Return the status, with ``since`` by this machine's clock."""
        since = time.monotonic() - self.seconds
        return RankStatus(self.state, self.step, self.plan_version, self.taps, since, self.tap, self.awaits)


class StatusPage:
    """The status page: its owner writes it, any process of the session reads it."""

    def __init__(self, page: mmap) -> None:
        self._page = page
        self._count = 0
        # Encoded names, because a model reaches the same taps over and over.
        self._names: dict[str, bytes] = {}

    def pass_tap(self, step: int, plan_version: int, taps: int, tap: str) -> None:
        """Write that the rank is running and has reached this tap, in a third of the time of :meth:`write`."""
        name = self._names.get(tap)
        if name is None:
            name = self._encode_name(tap)
        self._count = count = self._count + 1
        now = time.monotonic()
        self._page[_HALVES[count % 2]] = _pack(_RUNNING, step, plan_version, taps, now, _NOBODY, len(name), name)
        self._page[_COUNT] = _pack_count(count)

    def _encode_name(self, tap: str) -> bytes:
        if len(self._names) >= _NAMES_LIMIT:
            self._names.clear()
        name = self._names[tap] = tap.encode("utf-8", "replace")[:_TAP]
        return name

    def write(
        self, state: str, *, step: int, plan_version: int, taps: int, tap: str = "", awaits: Collection[int] = ()
    ) -> None:
        bits = 0
        for world_rank in awaits:
            bits |= 1 << world_rank
        name = self._encode_name(tap)
        self._count += 1
        now, whom = time.monotonic(), bits.to_bytes(_BITS, "little")
        body = _pack(_STATES.index(state), step, plan_version, taps, now, whom, len(name), name)
        self._page[_HALVES[self._count % 2]] = body
        # Not pack_into, which zeroes the bytes before it writes: a reader would take the zero for a valid count.
        self._page[_COUNT] = _pack_count(self._count)

    def read(self) -> RankStatus:
        while True:
            count = self._page[_COUNT]
            body = self._page[_HALVES[_COUNTER.unpack(count)[0] % 2]]
            if self._page[_COUNT] == count:
                break
        state, step, version, taps, since, bits, length, name = _BODY.unpack(body)
        mask = int.from_bytes(bits, "little")
        awaits = tuple(rank for rank in range(mask.bit_length()) if mask >> rank & 1)
        tap = name[:length].decode("utf-8", "ignore")
        return RankStatus(_STATES[state % len(_STATES)], step, version, taps, since, tap, awaits)
