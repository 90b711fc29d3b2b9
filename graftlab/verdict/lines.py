"""The lines of source at which a named group's error arises, as values, as a frame and as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, fields

import pandas as pd

from graftlab.base.tap_groups import described
from graftlab.base.text import listed, numbered
from graftlab.base.world import Side, other_side
from graftlab.lines.frames import SourceFrame

MOST_LINES = 3
"""The most lines of a side that are reported for a group."""
INDENT = "  "
"""The indent of lines of source in a verdict's text."""
# The dtypes of the tensors that an operation reads, and those of whole numbers among them.
_DTYPE = re.compile(r"(\w+)\[")
_COUNT = re.compile(r"(i|int|uint)\d+|bool")


@dataclass(frozen=True)
class DifferingLine:
    """A line of source at which a side's computation departs from the other's.

    ``group`` is the named group that it explains, ``tap`` the tap whose call was traced, with its ``step``,
    ``occurrence`` and the side's ``rank``. ``operation`` is torch's operation with its arguments, tensors by dtype and
    shape; ``arguments`` are the arguments that are not tensors; ``shapes`` are those of the tensors that it reads, and
    last that of its result. ``confirmed`` means that the tap agrees when just this operation has the baseline's value;
    ``is_suspect`` that from here on a value has a different order, sign or place, which may be intended; ``lacks_sum``
    that the ranks' results are summands of the baseline's value, and are not summed; ``is_only_here`` that the sides
    agree without this line, which the other side lacks. ``state`` has the names of tensors that the line reads, that
    outlive a call, and whose values the other side does not read: a weight, a buffer, a cache. ``written`` has for each
    of them the step and the line that wrote it last, blank if unknown. ``stack`` is the line itself and then its
    callers, innermost first. ``ranks`` are the side's ranks that run the line for this value, empty if all do.
    ``is_random`` means that the operation draws random numbers; ``puts_constants`` that it only puts constants at
    indices, as ``index_put`` does to make an adjacency matrix.
    """

    group: str
    side: Side
    file: str
    line: int
    source: str
    operation: str
    arguments: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    confirmed: bool
    is_suspect: bool
    lacks_sum: bool
    is_only_here: bool
    state: tuple[str, ...]
    written: tuple[str, ...]
    tap: str
    step: int
    occurrence: int
    rank: int
    stack: tuple[SourceFrame, ...]
    ranks: tuple[int, ...] = ()
    is_random: bool = False
    puts_constants: bool = False

    @property
    def is_telling(self) -> bool:
        """Whether values that the other side lacks are computed here from others; another order may be meant."""
        return self.confirmed or not (self.is_suspect or self.counts)

    @property
    def counts(self) -> bool:
        """Whether the operation reads no values but whole numbers, as ``arange`` and ``argsort(i64[8])`` do, only a
        shape, or constants beside indices: it may count what the other side counts differently, or what a fused
        operation of it never shows.
        """
        name, _, arguments = self.operation.partition("(")
        reads_shape_alone = name.endswith("_like") or name.startswith("new_")
        return self.puts_constants or reads_shape_alone or all(map(_COUNT.fullmatch, _DTYPE.findall(arguments)))

    @property
    def chooses(self) -> bool:
        """Whether the operation chooses among values by their order, which rounding may change: ``topk``, ``argmax``,
        ``max`` along a dimension.
        """
        name = self.operation.partition("(")[0]
        return name in _CHOICES or (name in ("max", "min", "median", "mode") and bool(self.arguments))


_CHOICES = {"topk", "argmax", "argmin", "sort", "argsort", "kthvalue"}
COLUMNS = tuple(each.name for each in fields(DifferingLine))


def lines_frame(lines: Sequence[DifferingLine]) -> pd.DataFrame:
    """A row for each line, in the order of the report."""
    return pd.DataFrame([[getattr(each, name) for name in COLUMNS] for each in lines], columns=list(COLUMNS))


def lines_in_words(lines: Sequence[DifferingLine], groups: Sequence[str], are_several: bool = False) -> list[str]:
    """The first line of each side behind these groups, as text: a heading and indented lines. None without lines.

    ``are_several`` means that the groups have several sentences before it.
    """
    with_lines = [group for group in groups if first_places(lines, [group])]
    if not with_lines:
        return []
    # Of several groups, those of the first confirmed one, or else of the first; verdict.lines has all.
    of_group = {group: [each for each in lines if each.group == group] for group in with_lines}
    shown_of_group = {group: _first_of_sides(found) for group, found in of_group.items()}
    confirmed = [group for group, shown in shown_of_group.items() if any(each.confirmed for each in shown)]
    group = next(iter(confirmed or with_lines))
    found, shown = of_group[group], shown_of_group[group]
    is_of_all = len(with_lines) > 1 and len({first_places(lines, [each]) for each in with_lines}) == 1
    is_confirmed = any(each.confirmed for each in shown)
    # One side may compute the same in other steps, and its first values that the other lacks may be right.
    first = {each.side: each for each in reversed(shown)}.values()
    are_alike = len(first) > 1 and _are_alike(*first)
    what = "first differ" if is_confirmed or are_alike else "that only one side has begin"
    head = f"{'In each of them, the' if is_of_all and are_several else 'The'} values {what} here"
    tap = "the tap agrees"
    if is_of_all and len(confirmed) < len(with_lines):
        names = [described(each) for each in confirmed]
        tap = f"{listed(names, most=4)} {'agrees' if len(names) == 1 else 'agree'}"
    if any(each.confirmed and each.side == "target" and each.is_only_here for each in shown):
        head += f"; without this operation {tap}:"
    elif any(each.confirmed and each.is_only_here for each in shown):
        head += f"; with this operation added {tap}:"
    elif is_confirmed:
        head += f"; with the baseline's value there, {tap}:"
    elif len(found) > len(shown):
        head += f" (not confirmed; {len(found) - len(shown)} more in the report and in verdict.lines):"
    else:
        head += " (not confirmed):"
    places = [str(each.stack[0]) for each in shown]
    width = max(map(len, places))
    drawn = [] if is_confirmed else _drawn([*first])
    return [head, *(_in_words(each, place.ljust(width)) for each, place in zip(shown, places, strict=True)), *drawn]


def _are_alike(one: DifferingLine, other: DifferingLine) -> bool:
    """Whether two lines make the same operation, and one result is as large as the other or has a rank's part of it."""
    names = [each.operation.partition("(")[0].rstrip("_") for each in (one, other)]
    sizes = sorted(math.prod(each.shapes[-1]) for each in (one, other) if each.shapes)
    return names[0] == names[1] and (len(sizes) < 2 or sizes[1] % max(sizes[0], 1) == 0)


def _drawn(first: Sequence[DifferingLine]) -> list[str]:
    """A sentence if the first lines of both sides, or of one side alone, draw random numbers."""
    sides = [each.side for each in first if each.is_random]
    if len(sides) == 2 and len({each.operation for each in first}) > 1:
        return ["Both sides draw random numbers there, by different operations or with other arguments."]
    if len(sides) == 2:
        return [
            "Both sides draw random numbers there, and not the same ones: seed both alike before this call, and "
            "restore the state of the generators with a checkpoint."
        ]
    if sides and len(first) == 1:
        return [f"Only the {sides[0]} draws random numbers there, as dropout does unless model.eval() turns it off."]
    return []


def first_places(lines: Sequence[DifferingLine], groups: Sequence[str]) -> tuple[tuple[Side, str, int, str], ...]:
    """The line of each side (file, number, source) that the text shows for the first of these groups with lines."""
    found = [each for each in lines if each.group in groups]
    shown = _first_of_sides([each for each in found if each.group == found[0].group]) if found else []
    return tuple((each.side, each.file, each.line, each.source) for each in shown)


def first_choices(lines: Sequence[DifferingLine], groups: Sequence[str]) -> list[DifferingLine]:
    """The first lines of these groups that choose among values by their order; none if a group has no such line."""
    shown = [_first_of_sides([each for each in lines if each.group == group]) for group in groups]
    chosen = [[each for each in found if each.chooses] for found in shown]
    return [each for found in chosen for each in found] if all(chosen) else []


def explained_by_code(lines: Sequence[DifferingLine]) -> set[str]:
    """The groups with a confirmed line whose operation itself differs between the sides, not only its values."""
    shown = {group: _first_of_sides([each for each in lines if each.group == group]) for group in _groups(lines)}
    return {
        group
        for group, sides in shown.items()
        if any(each.confirmed for each in sides) and len({each.operation for each in sides}) == len(sides)
    }


def _groups(lines: Sequence[DifferingLine]) -> list[str]:
    return list(dict.fromkeys(each.group for each in lines))


def _first_of_sides(lines: Sequence[DifferingLine]) -> list[DifferingLine]:
    sides: tuple[Side, ...] = ("target", "baseline")
    is_confirmed = any(each.confirmed for each in lines)
    return [each for side in sides for each in _shown_of([e for e in lines if e.side == side], is_confirmed)]


def _shown_of(lines: Sequence[DifferingLine], is_confirmed: bool) -> list[DifferingLine]:
    """The confirmed line of a side, or its first; then also the first telling one, unless a line is confirmed.

    A telling line precedes one that only counts.
    """
    first = [each for each in lines if each.confirmed][:1] or list(lines[:1])
    if is_confirmed or not first or first[0].is_telling:
        return first
    telling = [each for each in lines if each.is_telling][:1]
    return [*telling, *first] if first[0].counts else [*first, *telling]


def most_telling(lines: Sequence[DifferingLine]) -> list[DifferingLine]:
    """The lines of a side to report: the first, and a telling one among them if there is any."""
    chosen = list(lines[:MOST_LINES])
    telling = [each for each in lines if each.is_telling]
    if telling and not any(each.is_telling for each in chosen):
        chosen[-1] = telling[0]
    return chosen


def _in_words(line: DifferingLine, place: str) -> str:
    operation = f"  [{line.operation}]" if line.source else line.operation
    notes = [*([only_here_in_words(line)] if line.is_only_here else []), *notes_on(line)]
    return f"{INDENT}{line.side:<8}  {place}  {line.source}{operation}{''.join(f'  ({note})' for note in notes)}"


def notes_on(line: DifferingLine) -> list[str]:
    """What else is known of a line, in words."""
    notes = [
        "from here on values have another order, place or sign, which may be intended" if line.is_suspect else "",
        f"only {numbered('rank', line.ranks)} run{'s' if len(line.ranks) == 1 else ''} this" if line.ranks else "",
        f"reads {_state_in_words(line)}" if line.state else "",
        "the ranks' results sum to the baseline's, but no sum over the ranks follows" if line.lacks_sum else "",
    ]
    return [*filter(None, notes)]


def _state_in_words(line: DifferingLine) -> str:
    """Tensors that outlive a call, which a line reads and the other side does not, with their writers, in words."""
    other = other_side(line.side)
    last = dict.fromkeys(filter(None, line.written))
    read = f"{', '.join(line.state)}, whose values the {other} does not read"
    return read + (f"; last written {'; '.join(last)}" if last else "")


def only_here_in_words(line: DifferingLine) -> str:
    """Which side alone has the operation of this line, in words."""
    return "only the target does this" if line.side == "target" else "the target lacks this"
