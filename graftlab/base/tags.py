"""Tags, which describe one call of a tap, and the identity of a tap, which follows from some of them.

Every tag is of one of six kinds:

* ``name``, and the **own tags** that the caller gave (``layer=3``, or :func:`graftlab.tags` around the tap);
* ``baseline_name`` and ``target_name``, each side's own name of the tap; ``name`` is the common one;
* ``recompute_status``, which distinguishes a forward pass repeated by activation checkpointing from the original;
* **place tags** (``step``, ``side``, ``rank``): when and where the tap was reached;
* **rank tags**, own tags that end in ``_rank``: they differ between the ranks that hold parts of one value;
* ``compiled``, which is true for a tap inside code that ``torch.compile`` has compiled.

:func:`identity` is the one definition of "the same tap", on every rank, on both sides, in rows and in renderings.
"""

from __future__ import annotations

import json
import math
import numbers
import re
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

Plain = str | int | float | bool | None
"""The type of a tag's value outside its rank; see :func:`plain`."""

TagItems = tuple[tuple[str, Any], ...]
"""Tags as a hashable value: names and values, in the order of the call."""

RecomputeStatus = Literal["original", "recompute"]

PLACE_TAGS = frozenset({"step", "side", "rank"})

COMPILED = "compiled"

# Each side's own name of the tap; ``name`` is the common one, see graftlab.plan.pairs.
SIDE_NAMES = ("baseline_name", "target_name")

# Tags that graftlab sets itself; a caller's tag cannot have these names.
RESERVED_TAGS = PLACE_TAGS | {"name", "recompute_status", *SIDE_NAMES}

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_USUAL = frozenset({str, int, bool})


# In bits. Python writes integers of at most 4,300 decimal digits.
_LONGEST_INTEGER = 14_000


def plain(value: object) -> Plain:
    """Convert a tag's value for keys and rows, which must not need its class: to text, a number, or its repr.

    NaN becomes the text ``"nan"``, because NaN does not equal itself and such taps would never pair.
    """
    if value is None or type(value) in (str, bool):
        return value  # type: ignore[return-value]
    if isinstance(value, str):
        return str.__str__(value)  # str() of an enum is its name
    if isinstance(value, numbers.Integral):
        whole = int(value)
        # Python refuses to write larger integers in decimal, which rows and messages need.
        return whole if whole.bit_length() <= _LONGEST_INTEGER else hex(whole)
    if isinstance(value, numbers.Real):
        number = float(value)
        return "nan" if math.isnan(number) else number
    # An object's memory address differs between processes, so the taps would not pair.
    return _ADDRESS.sub("", repr(_in_a_row(value)))


def _in_a_row(value: object) -> object:
    """Return the value as JSON stores it in a row: a tuple becomes a list."""
    if isinstance(value, (list, tuple, dict)):
        try:
            return json.loads(json.dumps(value, default=plain))
        except (TypeError, ValueError, RecursionError):
            pass  # a dict whose keys are not text, or a value that contains itself
    return value


def own_tags(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tags that the caller gave."""
    return {name: value for name, value in tags.items() if name not in RESERVED_TAGS}


def display_tags(tags: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tags that identify a tap in sentences and figures: the caller's, without ``compiled``."""
    return {name: value for name, value in own_tags(tags).items() if name != COMPILED}


def is_rank_tag(name: str) -> bool:
    """Whether a tag of this name describes which part of a value a rank holds, as ``tp_rank`` does."""
    return name.endswith("_rank")


def rank_tags(tags: Mapping[str, Any]) -> tuple[tuple[str, str | int | float | bool], ...]:
    """Return the rank tags, in the form in which :func:`identity` has the others."""
    return tuple(sorted((name, _comparable(value)) for name, value in tags.items() if is_rank_tag(name)))


class TapIdentity(NamedTuple):
    """A tap's identity: equal for two calls exactly if they show the same quantity."""

    name: str
    tags: tuple[tuple[str, str | int | float | bool], ...]
    recompute_status: str = "original"


def identity(tags: Mapping[str, Any]) -> TapIdentity:
    """Return the identity of a tap: its name, its own tags without rank tags, and its ``recompute_status``.

    * Place tags are left out: a tap is the same in each step, on each rank and on both sides.
    * Rank tags are left out: ``tp_rank=0`` and ``tp_rank=1`` hold parts of one value.
    * ``recompute_status`` is included. A recomputed forward pass may differ from the original (in random numbers or
      kernels) and can be grafted separately, so neither may hide the other.
    * A tag whose value is None or NaN counts as absent, as in filters and frames.
    * ``compiled`` is left out, so that a compiled model can be compared with an eager one.
    * The order of tags does not matter, nor whether a value is 1 or 1.0.
    * Values are compared as rows store them: a tuple as a list, any other object as its repr; see :func:`plain`.
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
    """Return a tap's name with the tags that distinguish its calls, as pairs write it: ``q[layer=3]``."""
    told = ",".join(f"{key}={_whole(value)}" for key, value in sorted(tags.items()) if not is_rank_tag(key))
    return f"{name}[{told}]" if told else name


def _whole(value: object) -> object:
    """Return 1 for 1.0, because tags 1 and 1.0 count as equal."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def distinguishes_taps(tag: str) -> bool:
    """Whether a tag of this name, other than ``name`` itself, is part of :func:`identity`."""
    return tag not in PLACE_TAGS and tag not in ("name", COMPILED, *SIDE_NAMES) and not is_rank_tag(tag)


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _comparable(value: object) -> Any:
    if isinstance(value, float) and math.isnan(value):
        return None
    return plain(value)


def is_no_tag(name: str, value: object) -> bool:
    """Whether a value cannot distinguish taps: a tensor, a list or a dict, which differs between the sides.

    The same holds for ``grafter_extras``, the name under which other graft kits pass extras.
    """
    if name == "grafter_extras" or isinstance(value, (list, dict)):
        return True
    if isinstance(value, tuple):
        return any(is_no_tag("", item) for item in value)
    # torch tensors and other libraries' arrays, but not their scalars.
    return hasattr(value, "untyped_storage") or (hasattr(value, "__array__") and type(value).__hash__ is None)


class TapKey(NamedTuple):
    """The address of one tensor: equal on both sides exactly if the two taps stand for the same value.

    ``tags`` and ``recompute_status`` are those of the tap's :func:`identity`, and ``name`` is the name that the plan
    gives to the pair. ``step`` and ``occurrence`` number the calls of one tap.
    """

    step: int
    name: str
    tags: tuple[tuple[str, Plain], ...]
    recompute_status: str
    occurrence: int
