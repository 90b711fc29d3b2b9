"""An exception of one side's function: up to it, both sides can still be compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from graftlab.base.world import Side, other_side
from graftlab.lines.frames import frames_of_traceback
from graftlab.ranks.messages import Failure

if TYPE_CHECKING:
    from graftlab.control.core import SessionCore


@dataclass(frozen=True)
class RaisedException:
    """An exception that one side's function raises in the run without grafts, and the other's does not.

    ``what`` is its class and the first line of its message, ``place`` the line of the model's code; blank if unknown.
    """

    side: Side
    what: str
    place: str

    @property
    def sentence(self) -> str:
        other = other_side(self.side)
        return f"The {self.side} raises {self.what}{f' ({self.place})' if self.place else ''}; the {other} does not."


def exception_of_one_side(session: SessionCore, failures: Mapping[str, Failure | str]) -> RaisedException | None:
    """The exception that all ranks of one side have raised, and none of the other; None if a run failed otherwise.

    ``failures`` are those of a run, by rank.
    """
    sides: list[Side] = list(dict.fromkeys(rank.place.side for rank in session.ranks if rank.label in failures))
    if len(sides) != 1:
        return None
    raised = [failures.get(rank.label) for rank in session.ranks if rank.place.side == sides[0]]
    # A rank that waits for one that has raised fails with another exception, or not at all.
    found = [each for each in raised if isinstance(each, Failure)]
    if len(found) < len(raised) or any(each.kind != found[0].kind for each in found):
        return None
    frames = frames_of_traceback(found[0].traceback)
    place = f"{frames[0]}: {frames[0].source}" if frames else ""
    return RaisedException(sides[0], f"{found[0].kind}: {found[0].message}".partition("\n")[0], place)
