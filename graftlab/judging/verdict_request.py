"""The parameters of a verdict."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from graftlab.control.work import arguments
from graftlab.errors import SessionError
from graftlab.ranks.remote_functions import Callee


@dataclass(frozen=True)
class VerdictRequest:
    """The parameters of :meth:`graftlab.session.Session.verdict`, which explains them.

    Raises :class:`SessionError` for a value that cannot be used.
    """

    baseline: Callee | None = None
    target: Callee | None = None
    output: str | None = None
    floor: float | Literal["auto"] = "auto"
    exact: Callee | None = None
    threshold: float = 5.0
    explain: bool | Literal["lines"] = True
    """``"lines"`` looks for lines of source, and does without the runs that show effects."""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None
    steps: int = 1
    graft_weights: bool = False
    gradient_parts: bool = False
    """Whether gradients of a run may be parts, which code after it adds up over the ranks."""
    stop: threading.Event = field(default_factory=threading.Event, compare=False)
    """Another thread sets it to interrupt the verdict, as the stop button does on the notebook's thread."""

    def __post_init__(self) -> None:
        if self.floor != "auto" and not _is_positive(self.floor):
            raise SessionError(f"verdict: floor must be 'auto' or a number above 0, not {self.floor!r}")
        refuse_threshold(self.threshold)
        if not (self.output is None or isinstance(self.output, str)):
            raise SessionError(f"verdict: output must be the name of a tap, not {self.output!r}")
        if not (self.exact is None or isinstance(self.exact, str) or callable(self.exact)):
            raise SessionError(f"verdict: exact must be a function or an expression, like baseline, not {self.exact!r}")
        if not (isinstance(self.steps, int) and self.steps > 0):
            raise SessionError(
                f"verdict: steps, the jobs' steps in one run, must be a whole number above 0, not {self.steps!r}"
            )
        _ = self.arguments

    @property
    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The positional and the named arguments of both functions."""
        return arguments("verdict", self.args, self.kwargs)

    @property
    def constant_floor(self) -> float | None:
        """The floor that the caller gave for all taps; None if it is to be measured or assumed."""
        return None if self.floor == "auto" else float(self.floor)


def refuse_floor(floor: float | None) -> None:
    """Raise :class:`SessionError` for a floor of rows that cannot be used."""
    if floor is not None and not _is_positive(floor):
        raise SessionError(f"verdict: floor must be a number above 0, not {floor!r}")


def refuse_threshold(threshold: object) -> None:
    """Raise :class:`SessionError` for a threshold that cannot be used."""
    if not _is_positive(threshold):
        raise SessionError(
            f"verdict: threshold, the multiple of its floor that a tap may add, must be above 0, not {threshold!r}"
        )


def _is_positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
