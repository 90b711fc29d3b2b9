"""How to start the ranks of a session, and what each of them receives when it starts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol, get_args

from graftlab.base import limits
from graftlab.base.world import MAX_RANKS, Place
from graftlab.errors import LaunchError
from graftlab.plan.wire import WirePlan

if TYPE_CHECKING:
    from graftlab.plan.plan import GraftPlan
    from graftlab.ranks.handle import RankHandle

# Seconds; poll() counts milliseconds in 32 bits.
_LONGEST = 1e6


class RankStarter(Protocol):
    """Starts a session's ranks elsewhere than on the notebook's machine."""

    def start_ranks(self, options: LaunchOptions, folder: Path, plan: GraftPlan) -> Sequence[RankHandle]:
        """Start every rank under this plan; ``folder`` is the session's. Raises :class:`LaunchError`."""


StartMethod = Literal["forkserver", "spawn"]


@dataclass(frozen=True)
class LaunchOptions:
    """How to start the ranks; budgets are in bytes per rank, both timeouts in seconds. ``on`` starts them elsewhere.

    Raises :class:`LaunchError` for values out of range.
    """

    baseline: int
    target: int
    device: str | None = None
    backend: str | None = None
    timeout: float = limits.TIMEOUT
    start_method: StartMethod = "forkserver"
    buffer_budget: int = limits.BUFFER_BUDGET
    keep_budget: int = limits.KEEP_BUDGET
    tap_timeout: float | None = None
    keep_rows: int | None = None
    on: RankStarter | None = None

    def __post_init__(self) -> None:
        for side, count in (("baseline", self.baseline), ("target", self.target)):
            if not isinstance(count, int) or count < 1:
                raise LaunchError(f"{side}={count!r}: each side needs a whole number of ranks, at least one")
        if self.baseline + self.target > MAX_RANKS:
            raise LaunchError(
                f"baseline={self.baseline}, target={self.target}: a graft world has at most {MAX_RANKS} ranks, both "
                f"sides together"
            )
        if self.start_method not in get_args(StartMethod):
            raise LaunchError(f"start_method={self.start_method!r}: ranks start by 'forkserver' or 'spawn'")
        if self.on is not None and not hasattr(self.on, "start_ranks"):
            raise LaunchError(f"on={self.on!r}: give gl.Ray(...), or leave it out to start the ranks on this machine")
        _require_seconds("timeout", self.timeout)
        if self.tap_timeout is not None:
            _require_seconds("tap_timeout", self.tap_timeout)
        for name, budget in (("buffer_budget", self.buffer_budget), ("keep_budget", self.keep_budget)):
            if not isinstance(budget, int) or budget < 0:
                raise LaunchError(f"{name}={budget!r}: give whole bytes, such as 256 << 20 for 256 MiB")

        if self.keep_rows is not None and (not isinstance(self.keep_rows, int) or self.keep_rows < 0):
            raise LaunchError(f"keep_rows={self.keep_rows!r}: give a number of rows, or None for all")

    @property
    def tap_limit(self) -> float:
        """Seconds that a tap waits: less than a collective, which may be waiting for this rank."""
        return self.timeout / 2 if self.tap_timeout is None else self.tap_timeout


def _require_seconds(name: str, given: object) -> None:
    if not isinstance(given, (int, float)) or not 0 < given <= _LONGEST:
        raise LaunchError(f"{name}={given!r}: give seconds, more than 0 and at most {_LONGEST:g}")


@dataclass(frozen=True)
class RankSpec:
    """Everything that a rank receives when it starts.

    ``store`` is the path of the rendezvous store of its side's process group; empty for an unnamed file, which is
    passed as a descriptor. ``multiprocessing`` is the start method of the notebook's process; None where it has not
    chosen one.
    """

    place: Place
    device: str
    backend: str
    store: str
    log: str
    stacks: str
    segment_size: int
    timeout: float
    tap_timeout: float
    multiprocessing: str | None
    buffer_budget: int
    keep_budget: int
    threads: int
    plan: WirePlan
    environ: dict[str, str]
    sys_path: list[str]
    cwd: str
