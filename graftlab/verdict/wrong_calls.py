"""Describes which calls of a group are wrong, by steps, occurrences and tags, and what these have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.tags import COMPILED, is_rank_tag
from graftlab.base.text import spans
from graftlab.verdict.order import plain_cell

# The sentence has other words for these, or they are the same for all calls of a group.
_NO_CALL = frozenset({"layer", "kind", "updated", COMPILED})
_SHOWN = 6
_RARE = 8
_MODULI = (256, 128, 64, 32, 16, 8, 4, 3, 2)

Call = Mapping[str, Any]


def which_calls(rows: pd.DataFrame, over: pd.DataFrame) -> str:
    """The calls of a group that are wrong, in words; blank if all are. ``over`` are the wrong ones of its ``rows``.

    The layers and ranks of one call count as one: a call is wrong if it is wrong in any of them.
    """
    every, wrong = _calls(rows), _calls(over)
    if len(wrong) == len(every):
        return ""
    varying = [part for part in _parts(every) if len({call.get(part) for call in every}) > 1]
    keys = {tuple(call.items()) for call in wrong}
    right = [call for call in every if tuple(call.items()) not in keys]
    # Parts that by themselves decide which calls are wrong.
    deciding: dict[str, tuple[set[Any], set[Any]]] = {}
    for part in varying:
        bad, good = ({call.get(part) for call in calls} for calls in (wrong, right))
        if not bad & good and None not in bad | good:
            deciding[part] = bad, bad | good
    for part, values in deciding.items():
        if _follows_rule(*values):
            return _of_part(part, *values)
    if size := _by_size(rows, over):
        return size
    if len(deciding) == 1:
        ((part, values),) = deciding.items()
        return _of_part(part, *values)
    shown = [_call_text(call, varying) for call in wrong[:_SHOWN]]
    return f" in {len(wrong)} of {len(every)} calls: {', '.join(shown)}{', ...' if len(wrong) > _SHOWN else ''}"


def _by_size(rows: pd.DataFrame, over: pd.DataFrame) -> str:
    """The wrong calls in words, by the size of one dimension of their tensors, if that decides; otherwise blank."""
    if "shape" not in rows:
        return ""
    every, wrong = ([shape for shape in each["shape"] if isinstance(shape, (list, tuple))] for each in (rows, over))
    if len(wrong) != len(over) or len({len(shape) for shape in every}) != 1:
        return ""
    for dim in range(len(every[0])):
        sizes, bad = ({int(shape[dim]) for shape in each} for each in (every, wrong))
        right = rows.index.difference(over.index)
        good = {int(shape[dim]) for shape in rows.loc[right, "shape"] if isinstance(shape, (list, tuple))}
        if not bad & good and (rule := common_rule(bad, sizes)):
            return f" in calls whose dim {dim} has {_few(sorted(bad))} of {_few(sorted(sizes))} elements ({rule})"
    return ""


def _calls(rows: pd.DataFrame) -> list[Call]:
    found: dict[tuple[Any, ...], Call] = {}
    for step, occurrence, tags in zip(rows["step"], rows["occurrence"], rows["tags"], strict=True):
        call = {"step": int(step), "occurrence": 0 if pd.isna(occurrence) else int(occurrence)}
        call.update({k: plain_cell(v) for k, v in sorted(tags.items()) if k not in _NO_CALL and not is_rank_tag(k)})
        found.setdefault(tuple(call.items()), call)
    return list(found.values())


def _parts(calls: Sequence[Call]) -> list[str]:
    return list(dict.fromkeys(part for call in calls for part in call))


def _follows_rule(wrong: set[Any], every: set[Any]) -> bool:
    if not all(type(value) is int for value in every):
        return False
    return bool(common_rule(wrong, every)) or _is_tail(wrong, every)


def _is_tail(wrong: set[int], every: set[int]) -> bool:
    """Whether the wrong numbers are exactly those from some number on."""
    return len(wrong) > 1 and {number for number in every if number >= min(wrong)} == wrong


def _of_part(part: str, wrong: set[Any], every: set[Any]) -> str:
    """The wrong calls in words, by the one part that decides."""
    if not all(type(value) is int for value in every):
        shown = sorted(map(str, wrong))
        more = ", ..." if len(shown) > _SHOWN else ""
        return f" in calls with {part}={', '.join(shown[:_SHOWN])}{more} ({len(wrong)} of {len(every)} values)"
    numbers, among = sorted(wrong), _few(sorted(every))
    rule = f" ({found})" if (found := common_rule(wrong, every)) else ""
    plural = "s" if len(numbers) > 1 else ""
    if part in ("step", "occurrence"):
        if _is_tail(wrong, every):
            return f" from {part} {numbers[0]} on (of {among})"
        return f" in {part}{plural} {_few(numbers)} of {among}{rule}"
    if _is_tail(wrong, every):
        return f" in calls from {part}={numbers[0]} on (of {among})"
    return f" in calls with {part}={_few(numbers)} of {among}{rule}"


def _few(numbers: Sequence[int]) -> str:
    text = spans(numbers).split(", ")
    return ", ".join(text[:_SHOWN]) + (", ..." if len(text) > _SHOWN else "")


def common_rule(wrong: set[int], every: set[int]) -> str:
    """The rule that holds for the wrong numbers and for no others, such as ``multiples of 16``; blank if there is none.

    At least three numbers must follow it and two must not, or it may be a coincidence; for multiples of 8 and more,
    which are rarer, two and three.

    >>> common_rule({16, 32, 48}, {8, 16, 24, 32, 40, 48})
    'all multiples of 16 and no others'
    """
    if len(wrong) < 2 or len(every) - len(wrong) < (2 if len(wrong) > 2 else 3):
        return ""
    rules: list[tuple[str, Callable[[int], bool]]] = [
        *((f"multiples of {n}" if n > 2 else "even numbers", lambda v, n=n: v % n == 0) for n in _MODULI),
        ("odd numbers", lambda v: v % 2 == 1),
    ]
    if len(wrong) == 2:
        rules = [each for each, n in zip(rules, _MODULI, strict=False) if n >= _RARE]
    for words, holds in rules:
        if all(holds(value) == (value in wrong) for value in every):
            return f"all {words} and no others"
    return ""


def _call_text(call: Call, varying: Sequence[str]) -> str:
    given = [part for part in varying if call.get(part) is not None]
    # The caller's own tags first.
    given.sort(key=lambda part: part in ("step", "occurrence"))
    return " ".join(f"{part}={call[part]}" for part in given)


# Added errors with one cause differ by less than the first factor, those with two causes by more than the second.
_WITHIN, _BETWEEN = 1.5, 3.0


def separate_sizes(over: pd.DataFrame, number_of: Callable[[pd.Series[Any]], int | None]) -> str:
    """A part of a sentence if the errors of several layers fall into two clearly separate sizes; otherwise blank.

    ``number_of`` returns the layer of a row. Each size must occur in at least two layers.
    """
    largest: dict[int, float] = {}
    for _, row in over.iterrows():
        number, added = number_of(row), row["added"]
        if number is None or not np.isfinite(added) or added <= 0:
            return ""
        largest[number] = max(largest.get(number, 0.0), added)
    sizes = sorted(largest.values())
    if len(sizes) < 4:
        return ""
    at = max(range(1, len(sizes)), key=lambda place: sizes[place] / sizes[place - 1])
    low, high = sizes[:at], sizes[at:]
    if len(low) < 2 or len(high) < 2 or high[0] <= _BETWEEN * low[-1]:
        return ""
    if low[-1] >= _WITHIN * low[0] or high[-1] >= _WITHIN * high[0]:
        return ""
    few, many = (
        sorted(number for number, size in largest.items() if (size > low[-1]) is is_high) for is_high in (False, True)
    )
    return f"two sizes, up to {low[-1]:.2g} in {spans(few)} and {high[-1]:.2g} in {spans(many)}, may have two causes"
