"""The time of one graft on the sender and on the receiver, by size, dtype and number of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import graftlab as gl
from benchmarks import published, worlds
from benchmarks.lines import Budget, Line, Setup, Spread, quantity
from benchmarks.loops import Times, graft_repeatedly
from benchmarks.reference import ReferenceGrafter, ReferencePlace, ReferenceWorld

FILTER = "search('hidden', name) and layer < 4"

# Smaller tensors may be in a cache, to which the memory's bandwidth does not apply.
_BEYOND_CACHES = 4 << 20


@dataclass(frozen=True)
class _Size:
    """Bytes of a tensor, the number of grafts by graftlab and by the reference with 1+1 and 2+2 ranks, and budgets.

    ``ratios`` are to the reference and ``shares`` of the copy limit, by dtype; ``seconds`` is the receiver's time.
    """

    bytes: int
    ours: int
    reference: tuple[int, int]
    ratios: Mapping[str, float] = field(default_factory=dict)
    shares: Mapping[str, float] = field(default_factory=dict)
    seconds: float | None = None

    def budgets(self, dtype: str) -> tuple[Budget, ...]:
        ratio = (Budget("ratio", "at least", self.ratios[dtype]),) if dtype in self.ratios else ()
        share = (Budget("share", "at least", self.shares[dtype]),) if dtype in self.shares else ()
        return (*ratio, *share, *(() if self.seconds is None else (Budget("figure", "at most", self.seconds),)))


_SIZES = (
    _Size(4 << 10, 1000, (200, 60), {"float32": 20, "bfloat16": 20}, seconds=80e-6),
    _Size(256 << 10, 400, (100, 40)),
    _Size(4 << 20, 150, (20, 8), {"float32": 35, "bfloat16": 35}),
    _Size(64 << 20, 20, (4, 2), {"float32": 60, "bfloat16": 100}, {"bfloat16": 0.6}),
)


def measure(setup: Setup) -> list[Line]:
    with published.grafter(FILTER) as package:
        lines = _measure_world(setup, 1, package)
    return [*lines, *_measure_world(setup, 2, None), Line("grafts", package.note)]


def _measure_world(setup: Setup, ranks: int, package: published.PublishedGrafter | None) -> list[Line]:
    lines = []
    with ReferenceWorld(ranks, ranks) as reference, worlds.session(setup, ranks, ranks, b2t=FILTER) as session:
        for dtype in ("float32", "bfloat16"):
            for size in _SIZES:
                run = session.run(_ours, _ours, args=(size.bytes, dtype, setup.repeats(size.ours)))
                ours = [*run.baseline, *run.target]
                repeats = setup.repeats(size.reference[ranks - 1])
                theirs = reference.run(_reference, size.bytes, dtype, repeats)
                packaged = package.graft(size.bytes, dtype, repeats) if package else None
                for what, figure in (("receiver", _receivers), ("sender", _senders), ("loop, a tap", _loop)):
                    budgets = size.budgets(dtype) if what == "receiver" and ranks == 1 else ()
                    lines.append(
                        Line(
                            "grafts",
                            f"graft {quantity(size.bytes, 'B')} {dtype} {ranks}+{ranks}, {what}",
                            "s",
                            figure(ours),
                            figure(theirs),
                            figure(packaged) if packaged else None,
                            limit=size.bytes / setup.copy_bandwidth if size.bytes >= _BEYOND_CACHES else None,
                            budgets=budgets,
                            in_docs=bool(budgets),
                        )
                    )
    return lines


def _senders(times: Sequence[Times]) -> Spread:
    return Spread.of(taken for rank in times[: len(times) // 2] for taken in rank.taps)


def _receivers(times: Sequence[Times]) -> Spread:
    return Spread.of(taken for rank in times[len(times) // 2 :] for taken in rank.taps)


def _loop(times: Sequence[Times]) -> Spread:
    return Spread.of([max(rank.wall for rank in times)])


def _ours(size: int, dtype: str, repeats: int) -> Times:
    here = gl.here()
    assert here is not None
    return graft_repeatedly(gl.tap, gl.step, here.side, here.rank, size, dtype, repeats)


def _reference(place: ReferencePlace, size: int, dtype: str, repeats: int) -> Times:
    grafter = ReferenceGrafter(place, b2t=FILTER)
    return graft_repeatedly(grafter.tap, grafter.step, place.side, place.rank, size, dtype, repeats)
