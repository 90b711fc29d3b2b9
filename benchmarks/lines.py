"""One line of the table: a measured figure, the figures to compare it with, and its budgets."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

_SMALL = (("ns", 1e-9, 1e-6), ("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, float("inf")))
_BYTES = (("B", 1, 1 << 10), ("KiB", 1 << 10, 1 << 20), ("MiB", 1 << 20, 1 << 30), ("GiB", 1 << 30, float("inf")))


@dataclass(frozen=True)
class Spread:
    """The median, the quartiles and the number of repeated measurements."""

    median: float
    lower: float
    upper: float
    count: int

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        measured = list(values)
        if len(measured) == 1:
            return cls(measured[0], measured[0], measured[0], 1)
        lower, _, upper = statistics.quantiles(measured, n=4, method="inclusive")
        return cls(statistics.median(measured), lower, upper, len(measured))


@dataclass(frozen=True)
class Budget:
    """A bound for a line's figure, its ratio to the reference, or its share of the physical limit."""

    of: Literal["figure", "ratio", "share"]
    relation: Literal["at least", "at most"]
    bound: float


@dataclass(frozen=True)
class Line:
    """One line of the table. Without ``ours`` it was not measured, and ``note`` has the reason.

    ``unit`` is ``"s"``, ``"B"`` or ``"x"`` (times as long), where less is better; ``"rows/s"`` or ``"B/s"``, where more
    is better; or ``""`` for a plain number. ``reference`` is the published protocol as written in
    :mod:`benchmarks.reference`, ``published`` the published package itself where it is installed, and ``limit`` the
    machine's limit, all in the same unit. The table of docs/speed.md shows the lines with ``in_docs``.
    """

    subject: str
    name: str
    unit: str = "s"
    ours: Spread | None = None
    reference: Spread | None = None
    published: Spread | None = None
    limit: float | None = None
    budgets: tuple[Budget, ...] = ()
    note: str = ""
    in_docs: bool = False
    failed: bool = False

    @property
    def ratio(self) -> float | None:
        """The ratio to the reference; more is better."""
        return None if self.ours is None or self.reference is None else self._better(self.reference.median)

    @property
    def share(self) -> float | None:
        """The share of the machine's limit, from 0 to 1."""
        return None if self.ours is None or self.limit is None else self._better(self.limit)

    def _better(self, other: float) -> float:
        assert self.ours is not None
        mine = self.ours.median
        return mine / other if self.unit.endswith("/s") else other / mine

    def met(self, budget: Budget) -> bool | None:
        """Whether the budget is met; None where its figure is missing."""
        figure = {
            "figure": None if self.ours is None else self.ours.median,
            "ratio": self.ratio,
            "share": self.share,
        }[budget.of]
        if figure is None:
            return None
        return figure >= budget.bound if budget.relation == "at least" else figure <= budget.bound

    @property
    def all_met(self) -> bool | None:
        """Whether every budget is met; None where there is no budget, or a figure is missing."""
        verdicts = [self.met(budget) for budget in self.budgets]
        return None if not verdicts or None in verdicts else all(verdicts)

    def budget_text(self) -> str:
        return ", ".join(
            f"{'>=' if budget.relation == 'at least' else '<='} " + _bound_text(budget, self.unit)
            for budget in self.budgets
        )


@dataclass(frozen=True)
class Setup:
    """The arguments of every subject. Bandwidths are in bytes a second; ``folder`` is for files."""

    read_bandwidth: float
    copy_bandwidth: float
    folder: Path
    quick: bool = False

    def repeats(self, full: int, quick: int = 3) -> int:
        return quick if self.quick else full


def quantity(value: float, unit: str) -> str:
    """Format a figure with three digits and its unit, such as ``"1.53 ms"``."""
    if unit == "s":
        return _scaled(value, _SMALL)
    if unit in ("B", "B/s"):
        return _scaled(value, _BYTES) + unit[1:]
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
    return number + unit if unit in ("", "x") else f"{number} {unit}"


def _scaled(value: float, scales: tuple[tuple[str, float, float], ...]) -> str:
    # 1.00 of the next unit, not 1000 of this one.
    name, size, _ = next(scale for scale in scales if abs(value) < 0.9995 * scale[2])
    number = value / size
    digits = 0 if abs(number) >= 100 or number == 0 else 1 if abs(number) >= 10 else 2
    return f"{number:.{digits}f} {name}"


def _bound_text(budget: Budget, unit: str) -> str:
    if budget.of == "ratio":
        return f"{budget.bound:g}x reference"
    if budget.of == "share":
        return f"{budget.bound:.0%} of limit"
    return quantity(budget.bound, unit)
