"""The stages of a verdict, each attempted: one that fails is reported, and the others proceed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from graftlab.errors import GraftError, RunError
from graftlab.judging.job_steps import JobStepsAbandoned
from graftlab.judging.verdict_runs import VerdictAbandoned

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore

_log = logging.getLogger(__name__)
Result = TypeVar("Result")


class Attempts:
    """Makes the stages of a verdict. ``failed`` has a sentence on each that failed."""

    def __init__(self, session: SessionCore) -> None:
        self._session = session
        self.failed: list[str] = []
        self.is_abandoned = False

    def __call__(self, what: str, stage: Callable[[], Result], otherwise: Result) -> Result:
        """Return the stage's result; if it fails, ``otherwise``, and add a sentence to the verdict."""
        if self.is_abandoned:
            return otherwise
        try:
            return stage()
        except Exception as error:
            # Any other error is a defect of graftlab, and a report of it needs the traceback.
            level = logging.DEBUG if isinstance(error, GraftError) else logging.WARNING
            _log.log(level, "verdict: %s failed", what, exc_info=True)
            self.is_abandoned = isinstance(error, (VerdictAbandoned, JobStepsAbandoned)) or self._session.closed
            lines = [line for line in str(error).splitlines() if line.strip()]
            own = isinstance(error, GraftError) and lines
            # A run's error names the ranks in its first line, and what happened to the first of them in its second.
            shown = ": ".join(lines[: 2 if isinstance(error, RunError) else 1]).partition(". Its log (")[0]
            reason = shown if own else ": ".join([type(error).__name__, *lines[:1]])
            self.failed.append(f"{what[0].upper()}{what[1:]} failed, so its results are missing: {reason}")
            return otherwise
