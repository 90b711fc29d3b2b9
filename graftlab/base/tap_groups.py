"""Groups: the taps that show one computation of each layer, which a verdict speaks of together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_NUMBER = re.compile(r"\d+")
GRADIENT = "@grad"
"""What the group of a gradient's taps ends with."""
KINDS = ("input", "grad", "param_grad", "optimizer", "param")
"""The values of the tag ``kind`` that have groups of their own. Everything else shows a value of the forward pass."""

DATA = "((kind == 'param' or kind == 'optimizer') and not updated)"
"""A filter for the taps that show what both sides were given, not what they computed: weights before a step, and an
optimizer's settings. They are compared and never grafted, for a weight that was overwritten would stay so."""


def is_data(tags: Mapping[str, Any]) -> bool:
    """Whether :data:`DATA` matches a tap with these tags."""
    return tags.get("kind") in ("param", "optimizer") and not tags.get("updated")


def kind_of(tags: Mapping[str, Any] | None) -> str | None:
    """The kind of a tap with these tags; None for a value of the forward pass."""
    kind = tags.get("kind") if tags else None
    return kind if kind in KINDS else None


def group_of(name: str, tags: Mapping[str, Any] | None = None) -> str:
    """The group of a tap: its path with each part that is a number replaced by ``*``.

    Digits within a part stay, so ``n1`` and ``n2`` are two groups. A tap whose tag ``kind`` is one of :data:`KINDS` is
    in another group than a value of the same name.

    >>> group_of("layers.3.experts.0.q1"), group_of("layers.3.q", {"kind": "grad"})
    ('layers.*.experts.*.q1', 'layers.*.q@grad')
    """
    group = ".".join("*" if _NUMBER.fullmatch(part) else part for part in name.split("."))
    kind = kind_of(tags)
    return group if kind is None else f"{group}@{kind}"


def kind_of_group(group: str) -> str | None:
    """The kind of a group's taps; see :func:`kind_of`."""
    kind = group.rpartition("@")[2]
    return kind if "@" in group and kind in KINDS else None


def place_in_blame(group: str) -> int:
    """Blame goes to what is computed first: data, values, their gradients, those of weights, then the update."""
    return ("input", None, "grad", "param_grad", "optimizer", "param").index(kind_of_group(group))


def numbers_in(name: str) -> tuple[int, ...]:
    """What stands in the places of the group's stars."""
    return tuple(int(part) for part in name.split(".") if _NUMBER.fullmatch(part))


def filter_of(names: Iterable[tuple[str, str | None]]) -> str | None:
    """A filter expression for all taps of these groups. Each is a tap's name, and its kind.

    A group is given by the names of its taps, on either side; None where there is no name.
    """
    patterns: dict[tuple[str, str | None], None] = {}
    for name, kind in names:
        parts = [r"\d+" if _NUMBER.fullmatch(part) else re.escape(part) for part in name.split(".")]
        patterns[r"\.".join(parts), kind] = None
    texts = []
    for kind in (None, *KINDS):
        alternatives = "|".join(pattern for pattern, of_kind in patterns if of_kind == kind)
        if alternatives:
            chosen = f"kind == {kind!r}" if kind else f"kind not in {KINDS!r}"
            texts.append(f"(fullmatch({alternatives!r}, name) and {chosen})")
    return " or ".join(texts) or None
