"""The grafter of a job: whatever fails in it, the job goes on. It can run against itself, in the job's own steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from graftlab.errors import GraftError, SessionError
from graftlab.grafting.decisions import Decision
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.self_graft import SelfGraft
from graftlab.grafting.self_graft_in_steps import SelfGraftInSteps
from graftlab.ranks.messages import RunAgainstItself
from graftlab.taps.calls import Taker
from graftlab.taps.untraced import outside_compiled_code


class JobGrafter(Grafter):
    """Takes the taps of a job. ``on_failure`` is told of what should not have happened, and ends it.

    What is the job's own mistake, such as a tap that matches both directions, is raised as on any rank.
    """

    on_failure: Callable[[Exception], None]
    # What runs against itself here, last ordered, and under the plan of which version.
    _itself: SelfGraftInSteps | None = None
    _itself_under = -1

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
            self._turn_to_itself()
        except GraftError:
            raise
        except Exception as error:
            self.on_failure(error)

    # ---- against itself -----------------------------------------------------------------------------------------

    def run_against_itself(self, order: RunAgainstItself) -> None:
        """Begin when the plan of this version is in force. On the desk's thread."""
        if not order.passes:
            self.forget_itself()
            return
        before = self._itself
        if before is None and not {"record", "rest"} & {*order.passes[:1]}:
            raise SessionError("nothing is recorded here to run against")
        self._itself = SelfGraftInSteps(
            order.passes,
            order.steps,
            budget=order.budget,
            dtypes=order.dtypes,
            keep=order.keep,
            paired_names=self._paired_names,
            before=before,
        )
        self._itself_under = order.version

    def against_itself(self) -> SelfGraft | None:
        """What it came to, once the last pass has ended."""
        itself = self._itself
        return itself.found if itself is not None and itself.is_over else None

    def forget_itself(self) -> None:
        """Let go of what was recorded."""
        self._itself, self._itself_under = None, -1

    def _turn_to_itself(self) -> None:
        """Before the first tap of a step: give its taps to what runs against itself, or take them again."""
        itself = self._itself
        if itself is None or self.plan.version != self._itself_under:
            self.__dict__.pop("tap", None)
            return
        # In the place of the method, so that no other step pays for a look whether this is such a one.
        self.__dict__["tap"] = self._guarded(itself.taker_at(self._step))

    def _guarded(self, taker: Taker) -> Callable[..., Any]:
        @outside_compiled_code
        def tap(name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
            try:
                return taker.tap(name, value, extras, tags, replace)
            except GraftError:
                raise
            except Exception as error:
                self.on_failure(error)
                return value

        return tap

    def _paired_names(self, name: str) -> list[str]:
        return [pairing.name for pairing in self.plan.pairings(self.place.side, name, {})]
