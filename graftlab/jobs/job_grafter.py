"""The grafter of a job: whatever fails in it, the job goes on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from graftlab.errors import GraftError
from graftlab.grafting.decisions import Decision
from graftlab.grafting.grafter import Grafter
from graftlab.taps.untraced import outside_compiled_code


class JobGrafter(Grafter):
    """Takes the taps of a job. ``on_failure`` is told of what should not have happened, and ends it.

    What is the job's own mistake, such as a tap that matches both directions, is raised as on any rank.
    """

    on_failure: Callable[[Exception], None]

    @outside_compiled_code
    def _wanted(self, decision: Decision, name: str, value: Any, extras: Any, replace: bool) -> Any:
        try:
            return super()._wanted(decision, name, value, extras, replace)
        except GraftError:
            raise
        except Exception as error:
            self.on_failure(error)
            return value

    def step(self) -> None:
        """See :func:`graftlab.step`."""
        try:
            super().step()
        except GraftError:
            raise
        except Exception as error:
            self.on_failure(error)
