"""Parts of a model that one side's script calls by themselves, as an engine calls its head on some rows."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from graftlab.base.text import counted
from graftlab.base.world import SIDES, Side, other_side
from graftlab.comparison.held_units import HeldUnits, described_as
from graftlab.ranks.call_description import CallDescription
from graftlab.verdict.returned_values import ReturnedValues, compare_returned


@dataclass(frozen=True)
class OwnPart:
    """A module that ``side`` calls by itself, after it has called ``whole``, the model that has this module."""

    side: Side
    name: str
    whole: str

    def not_compared(self, count: int) -> str:
        """A phrase on this many calls of the part."""
        return (
            f"{counted(count, 'call')} of {self.name} by the {self.side}, a part of its {self.whole} that its script "
            "calls by itself, except for results that complete those of a call before."
        )

    @property
    def lacking(self) -> str:
        """A sentence if the side is the baseline, and the target's calls do not return what the part does."""
        return (
            f"The baseline's script calls {self.name}, a part of its {self.whole}, by itself, and no call of the "
            "target returns the same, so the target may lack it."
        )

    def differing(self, rel_l2: float) -> str:
        """A sentence if all of the whole model's call agrees, and the part's result differs by this."""
        return (
            f"The {self.side}'s {self.whole} returns no result that could be compared; that of its part {self.name}, "
            f"which the script calls by itself next, differs by {rel_l2:.2g} from the {other_side(self.side)}'s "
            f"result. All else that was compared agrees, so {self.name} differs, or the script's own code between the "
            "two calls does, such as the choice of rows."
        )


class OwnParts:
    """Which calls of one side are of such parts. They have no partner: the other side calls the whole model again."""

    def __init__(self) -> None:
        self._partners: set[tuple[str, str]] = set()
        self._newest: HeldUnits | None = None
        self._counts: Counter[OwnPart] = Counter()
        self._left_out: dict[OwnPart, None] = {}

    def note(self, held: HeldUnits) -> None:
        """Note calls that are each other's partner, the newest."""
        ours, theirs = described_as(held, CallDescription)
        self._partners.add((ours[0].model, theirs[0].model))
        self._newest = held

    def called_alone(self, held: HeldUnits) -> OwnPart | None:
        """The part that one side's ranks call while the other side calls the partner of the whole, or has ended."""
        calls = dict(zip(SIDES, described_as(held, CallDescription), strict=True))
        for side in SIDES:
            own, others = calls[side], calls[other_side(side)]
            wholes = {each.part_of for each in own}
            if len(own) != len(held.of(side)) or len(wholes) != 1 or any(each.needs_backward for each in own):
                continue
            (whole,) = wholes
            partners = {pair[1 - SIDES.index(side)] for pair in self._partners if pair[SIDES.index(side)] == whole}
            if whole and partners and (not others or others[0].model in partners):
                return OwnPart(side, own[0].model, whole)
        return None

    def results(self, part: OwnPart, held: HeldUnits) -> ReturnedValues:
        """Note a call of this part. Returns its result, compared with that of the other side's newest call."""
        self._counts[part] += 1
        if self._newest is None:
            return ReturnedValues()
        sides = {part.side: held, other_side(part.side): self._newest}
        ours, theirs = (
            [each.returned for each in sides[side].of(side) if isinstance(each, CallDescription)] for side in SIDES
        )
        # The newest call has at most one completion.
        self._newest = None
        return compare_returned(ours, theirs)

    def leave_out(self, part: OwnPart) -> None:
        """Note that a call of this part has a result to which nothing of the other side is equal."""
        self._left_out[part] = None

    @property
    def perhaps_lacking(self) -> list[str]:
        """A sentence on each part of the baseline whose call was left out: the target may lack it."""
        return [each.lacking for each in self._left_out if each.side == "baseline"]

    @property
    def not_compared(self) -> list[str]:
        """A phrase on the calls of each part."""
        return [part.not_compared(count) for part, count in self._counts.items()]
