"""Tags: what describes one call of a tap, and which of them say which tap it is.

Every tag is of one of six kinds:

* ``name``, and the **own tags** that the caller gave (``layer=3``, or :func:`graftlab.tags` around the tap);
* ``baseline_name`` and ``target_name``, what each side itself calls the tap that ``name`` is on both;
* ``recompute_status``, which tells a forward that activation checkpointing runs again from the original;
* **place tags** (``step``, ``side``, ``rank``): when and where the tap was reached;
* **rank tags**, own tags that end in ``_rank``: they differ between the ranks that hold parts of one value;
* ``compiled``, which is true of a tap inside code that ``torch.compile`` has compiled.

:func:`identity` is the one definition of "the same tap", on every rank, on both sides, in rows and in what is shown.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Plain = str | int | float | bool | None
"""What a tag's value becomes where it leaves the rank: see :func:`plain`."""

TagItems = tuple[tuple[str, Any], ...]
"""Tags as a value that can be hashed: their names and values, in the order in which they were given."""

RecomputeStatus = Literal["original", "recompute"]

PLACE_TAGS = frozenset({"step", "side", "rank"})

COMPILED = "compiled"

# What the two sides call the tap themselves; ``name`` is what both call it, see graftlab.plan.pairs.
SIDE_NAMES = ("baseline_name", "target_name")

# Tags that graftlab sets itself; a caller's tag cannot have these names.
RESERVED_TAGS = PLACE_TAGS | {"name", "recompute_status", *SIDE_NAMES}

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_USUAL = frozenset({str, int, bool})


# Bits; of more than 4,300 decimal digits.
_LONGEST_INTEGER = 14_000


def plain(value: object) -> Plain:
    """A tag's value as it travels in keys and rows, which must not need its class: text, a number, or its repr.

    NaN becomes the text ``"nan"``: no NaN equals another, so two taps that have one would never pair.
    """
    if value is None or type(value) in (str, bool):
        return value  # type: ignore[return-value]
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum is its name
    if isinstance(value, numbers.Integral):
        whole = int(value)
        # Python refuses to write larger ones as decimal digits, as rows and messages would have to.
        return whole if whole.bit_length() <= _LONGEST_INTEGER else hex(whole)
    if isinstance(value, numbers.Real):
        number = float(value)
        return "nan" if math.isnan(number) else number
    # An object's memory address differs between processes, so taps would not pair; and it tells a reader nothing.
    return _ADDRESS.sub("", repr(_in_a_row(value)))


def _in_a_row(value: object) -> object:
    """What a row has in place of a list, a tuple or a dict, being JSON: a tuple is a list there."""
    if isinstance(value, (list, tuple, dict)):
        try:
            return json.loads(json.dumps(value, default=plain))
        except (TypeError, ValueError, RecursionError):
            pass  # a dict whose keys are not text, or a value that holds itself
    return value


def own_tags(tags: Mapping[str, Any]) -> dict[str, Any]:
    """The tags that the caller gave."""
    return {name: value for name, value in tags.items() if name not in RESERVED_TAGS}


def display_tags(tags: Mapping[str, Any]) -> dict[str, Any]:
    """The tags that a sentence, or a figure, names a tap by: the caller's, without ``compiled``, which names none."""
    return {name: value for name, value in own_tags(tags).items() if name != COMPILED}


def is_rank_tag(name: str) -> bool:
    """Whether a tag of this name says which part of a value a rank holds, as ``tp_rank`` does, not which value."""
    return name.endswith("_rank")


def rank_tags(tags: Mapping[str, Any]) -> tuple[tuple[str, str | int | float | bool], ...]:
    """The rank tags among these, as :func:`identity` has the others."""
    return tuple(sorted((name, _comparable(value)) for name, value in tags.items() if is_rank_tag(name)))


class TapIdentity(NamedTuple):
    """Which tap it is: equal for two calls exactly when they show the same quantity."""

    name: str
    tags: tuple[tuple[str, str | int | float | bool], ...]
    recompute_status: str = "original"


def identity(tags: Mapping[str, Any]) -> TapIdentity:
    """Which tap has these tags: its name, its own tags but for rank tags, and its ``recompute_status``.

    * Place tags are left out: a tap is the same in each step, on each rank and on both sides.
    * Rank tags are left out, as they are where taps are paired: ``tp_rank=0`` and ``tp_rank=1`` hold parts of one
      value.
    * ``recompute_status`` is part of it. A recomputed forward may differ from the original (other random numbers, other
      kernels) and can be grafted by itself, so neither may hide what the other shows.
    * A tag that is None, or NaN, counts as one that was not given, as it does for filters and in a frame.
    * ``compiled`` is left out: a compiled model is compared with one that is not.
    * The order in which tags were given does not matter, nor whether a value is 1 or 1.0.
    * Values count as rows have them: a tuple is a list, and any other object is its repr; see :func:`plain`.
    """
    own = []
    for name, value in tags.items():
        if name in RESERVED_TAGS or name.endswith("_rank") or name == COMPILED:
            continue
        if type(value) not in _USUAL:
            value = _comparable(value)
            if value is None:
                continue
        own.append((name, value))
    own.sort(key=_first)
    return TapIdentity(tags["name"], tuple(own), tags.get("recompute_status", "original"))


def name_with(name: str, tags: Mapping[str, Any]) -> str:
    """A tap's name with the tags that tell its calls apart, as pairs write it: ``q[layer=3]``."""
    told = ",".join(f"{key}={_whole(value)}" for key, value in sorted(tags.items()) if not is_rank_tag(key))
    return f"{name}[{told}]" if told else name


def _whole(value: object) -> object:
    """Tags count as equal whether they are 1 or 1.0."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def distinguishes_taps(tag: str) -> bool:
    """Whether :func:`identity` looks at the tag of this name, beside the ``name`` itself."""
    return tag not in PLACE_TAGS and tag not in ("name", COMPILED, *SIDE_NAMES) and not is_rank_tag(tag)


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _comparable(value: object) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    return plain(value)


def is_no_tag(name: str, value: object) -> bool:
    """Whether this can tell no taps apart: a tensor, a list or a dict, of which each side has its own.

    Nor can ``grafter_extras``, by which other graft kits call what travels with a tensor.
    """
    if name == "grafter_extras" or isinstance(value, (list, dict)):
        return True
    if isinstance(value, tuple):
        return any(is_no_tag("", item) for item in value)
    # Tensors of torch, and arrays of others, but not the latter's scalars.
    return hasattr(value, "untyped_storage") or (hasattr(value, "__array__") and type(value).__hash__ is None)


class TapKey(NamedTuple):
    """The address of one tensor: equal on both sides exactly when the two taps mean the same value.

    Its ``tags`` and ``recompute_status`` are those of the tap's :func:`identity`, and ``name`` is that which the plan
    gives to its pair; the same tap is reached once for each ``step`` and ``occurrence`` in it.
    """

    step: int
    name: str
    tags: tuple[tuple[str, Plain], ...]
    recompute_status: str
    occurrence: int
