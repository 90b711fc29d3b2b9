"""Where a rank is, readable by everybody at any moment without asking it.

A rank that hangs cannot answer; what it last wrote into the first page of its segment still can. There are two halves:
the writer fills the one that is not in force and then counts up, which puts it in force. So a writer that stops or dies
half way leaves the other half whole, and a reader that was overtaken notices and looks again.
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
# Names that never repeat must not fill the memory.
_NAMES_LIMIT = 10_000


@dataclass(frozen=True)
class RankStatus:
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


class WireStatus(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The same on its way to another machine, whose clock is another: ``seconds`` is for how long it has been so."""

    state: str
    step: int
    plan_version: int
    taps: int
    seconds: float
    tap: str
    awaits: tuple[int, ...]

    @classmethod
    def of(cls, look: RankStatus) -> WireStatus:
        seconds = time.monotonic() - look.since
        return cls(look.state, look.step, look.plan_version, look.taps, seconds, look.tap, look.awaits)

    def restore(self) -> RankStatus:
        """What was told, by the clock of this machine."""
        since = time.monotonic() - self.seconds
        return RankStatus(self.state, self.step, self.plan_version, self.taps, since, self.tap, self.awaits)


class StatusPage:
    """The page itself: its owner writes, everybody reads."""

    def __init__(self, page: mmap) -> None:
        self._page = page
        self._count = 0
        # Names as they are written: a model reaches the same taps over and over.
        self._names: dict[str, bytes] = {}

    def pass_tap(self, step: int, plan_version: int, taps: int, tap: str) -> None:
        """Write that the rank runs, and has come to this tap: :meth:`write` in a third of the time."""
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
        # Not pack_into: it blanks what it writes to first, and a count of zero is a count too.
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
