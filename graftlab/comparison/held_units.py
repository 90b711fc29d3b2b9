"""The state in which two scripts wait: calls of models, updates of weights, or the ends of the scripts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

from graftlab.base.text import counted
from graftlab.base.world import SIDES, Side, other_side
from graftlab.jobs.script_process import ScriptProcess
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_update import UpdateDescription
from graftlab.ranks.holding import ScriptEnd

if TYPE_CHECKING:
    from graftlab.comparison.answers import Comparison

# Seconds that a script's processes have to end after the first of them.
_END_LIMIT = 60.0


@dataclass(frozen=True)
class HeldUnits:
    """The reports of both sides' ranks on what they hold."""

    baseline: Sequence[object]
    target: Sequence[object]

    def of(self, side: Side) -> Sequence[object]:
        return self.baseline if side == "baseline" else self.target

    def holds(self, side: Side, kind: type[object]) -> bool:
        """Whether all ranks of a side hold a unit of this kind."""
        return all(isinstance(result, kind) for result in self.of(side))

    def both_hold(self, kind: type[object]) -> bool:
        return self.holds("baseline", kind) and self.holds("target", kind)

    @property
    def have_ended(self) -> bool:
        """Whether the scripts of both sides have ended. A process that ends abruptly does not report its end."""
        return all(isinstance(each, ScriptEnd) or each is None for each in (*self.baseline, *self.target))

    @property
    def behind(self) -> Side | None:
        """The side that calls its model once more while the other already makes its update.

        Or the side that still makes an update without a call since its last one, as the second of two optimizers does,
        while the other makes none, or one that follows a call.
        """
        for side in SIDES:
            if self._continues(side) and not self._continues(other_side(side)):
                return side
        for side in SIDES:
            if self.holds(side, CallDescription) and self.holds(other_side(side), UpdateDescription):
                return side
        return None

    def _continues(self, side: Side) -> bool:
        """Whether all ranks of a side hold an update without a call since their last one."""
        return all(isinstance(each, UpdateDescription) and each.number > 1 and not each.calls for each in self.of(side))

    @property
    def raising(self) -> list[tuple[Side, CallDescription]]:
        """The calls that raise, with their sides."""
        return [
            (side, each)
            for side in SIDES
            for each in self.of(side)[:1]
            if isinstance(each, CallDescription) and each.raises
        ]


def trains(held: HeldUnits) -> bool:
    """Whether the calls need gradients on all ranks."""
    every = (*held.baseline, *held.target)
    return all(isinstance(each, CallDescription) and each.needs_backward for each in every)


def split_alike(held: HeldUnits) -> bool:
    """Whether both sides split the batch alike: all ranks' calls return the same shapes, and those of one rank are
    given as many tokens or labels. A loss has one shape for any batch.
    """
    every = (*held.baseline, *held.target)
    shapes = [[t.shape for t in each.returned.values()] for each in every if isinstance(each, CallDescription)]
    ours, theirs = numbers_given(held)
    # Ranks may each have a part of the batch.
    return all(each == shapes[0] for each in shapes) and (len(every) > 2 or ours == theirs)


def numbers_given(held: HeldUnits) -> tuple[int, int]:
    """The size of the largest tensor of whole numbers that each side's call is given, such as tokens or labels."""
    calls = described_as(held, CallDescription)
    ours, theirs = (
        max((t.numel() for call in side[:1] for t in call.whole_numbers.values()), default=0) for side in calls
    )
    return ours, theirs


@dataclass(frozen=True)
class PartOfModel:
    """A model that has less than half as many weights as the one that the other side calls, as a part of it has."""

    side: Side
    name: str
    weights: int
    whole: str
    all_weights: int

    def not_compared(self, count: int) -> str:
        """A phrase on this many calls of the part."""
        other = other_side(self.side)
        return (
            f"{counted(count, 'call')} of {self.name} by the {self.side}: it has {self.weights:,} weights, and the "
            f"{other}'s {self.whole} {self.all_weights:,}, so it is perhaps a part that is called alone."
        )


def part_of_model(held: HeldUnits) -> PartOfModel | None:
    """The model that is perhaps a part of the other side's; None if neither is, or ranks may share the weights."""
    ours, theirs = described_as(held, CallDescription)
    if len(ours) != 1 or len(theirs) != 1:
        return None
    for side, part, whole in zip(SIDES, (ours[0], theirs[0]), (theirs[0], ours[0]), strict=True):
        if 2 * part.weights < whole.weights:
            # The same part of each layer is Part, Part[1] and so on.
            return PartOfModel(side, part.model.partition("[")[0], part.weights, whole.model, whole.weights)
    return None


Description = TypeVar("Description", CallDescription, UpdateDescription)


def described_as(held: HeldUnits, kind: type[Description]) -> tuple[list[Description], list[Description]]:
    ours, theirs = ([each for each in side if isinstance(each, kind)] for side in (held.baseline, held.target))
    return ours, theirs


def other_exit_code(ended: Mapping[Side, ScriptProcess]) -> str | None:
    """A sentence on the side whose exit code shows a different end; None if the codes are equal, or prove nothing."""
    if any(process.command.ranks > 1 for process in ended.values()):
        # Collective libraries may abort when a process ends, which a launcher reports as a failure.
        return None
    for process in ended.values():
        process.wait(_END_LIMIT)
    ours, theirs = ended["baseline"], ended["target"]
    if None in (ours.exit_code, theirs.exit_code) or ours.exit_code == theirs.exit_code:
        return None
    wrong = theirs if theirs.exit_code else ours
    return f"{wrong.side} `{wrong.command.text}` {wrong.how_it_ended()}. Its output ends:\n{wrong.last_lines()}"


def failure_of(process: ScriptProcess, results: Sequence[object]) -> str | None:
    """How a script failed; None if it ended successfully, or calls a model again."""
    raised = [result.failure for result in results if isinstance(result, ScriptEnd) and result.failure is not None]
    if raised:
        return f"raised {raised[0]}"
    # A process that was killed, or ended abruptly, could not report its end.
    if all(result is not None for result in results) or (process.wait(_END_LIMIT) and process.is_done):
        return None
    return process.how_it_ended()


def why_not_held(
    baseline: Sequence[CallDescription | UpdateDescription], target: Sequence[CallDescription | UpdateDescription]
) -> str | None:
    """A sentence on why the held units cannot be repeated in place; None if they can."""
    for side, held in (("baseline", baseline), ("target", target)):
        for each in held:
            if isinstance(each, UpdateDescription):
                what = f"The {side}'s update {each.number} of the weights, a step of {each.optimizer},"
                if each.has_closure:
                    return f"{what} calls the model in a closure, and cannot be repeated in its process."
                if each.not_repeated:
                    return f"{what} gives a different result when it is repeated."
                continue
            what = f"The {side}'s call {each.number} of {each.model}"
            if each.fails_when_repeated:
                return f"{what} fails when it is repeated ({each.fails_when_repeated})."
            if each.not_repeated:
                return f"{what} gives a different result when it is repeated ({each.not_repeated[0]})."
    return None


def why_not_repeated(compared: Comparison) -> str | None:
    """A sentence on the side that differs from itself by a verdict; None if neither does."""
    found = compared.findings
    for side, taps in (("baseline", found.not_repeated), ("target", found.target_not_repeated)):
        if compared.answer == "inconclusive" and taps:
            return f"The {side} gives a different result when it is repeated (at {taps[0]})."
    return None
