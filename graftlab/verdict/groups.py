"""Groups: the taps that show one computation of each layer, which a verdict speaks of together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_NUMBER = re.compile(r"\d+")
GRADIENT = "@grad"
"""What the group of a gradient's taps ends with."""


def group_of(name: str, tags: Mapping[str, Any] | None = None) -> str:
    """The group of a tap: its path with each part that is a number replaced by ``*``.

    Digits within a part stay, so ``n1`` and ``n2`` are two groups. A tap whose tag ``kind`` is ``grad`` shows a
    gradient, and is in another group than the value it is the gradient of.

    >>> group_of("layers.3.experts.0.q1"), group_of("layers.3.q", {"kind": "grad"})
    ('layers.*.experts.*.q1', 'layers.*.q@grad')
    """
    group = ".".join("*" if _NUMBER.fullmatch(part) else part for part in name.split("."))
    return group + GRADIENT if is_gradient(tags) else group


def is_gradient(tags: Mapping[str, Any] | None) -> bool:
    return bool(tags) and tags is not None and tags.get("kind") == "grad"


def numbers_in(name: str) -> tuple[int, ...]:
    """What stands in the places of the group's stars."""
    return tuple(int(part) for part in name.split(".") if _NUMBER.fullmatch(part))


def filter_of(names: Iterable[tuple[str, bool]]) -> str | None:
    """A filter expression for all taps of these groups. Each is a tap's name, and whether it is that of a gradient.

    A group is given by the names of its taps, on either side; None where there is no name.
    """
    patterns: dict[tuple[str, bool], None] = {}
    for name, gradient in names:
        parts = [r"\d+" if _NUMBER.fullmatch(part) else re.escape(part) for part in name.split(".")]
        patterns[r"\.".join(parts), gradient] = None
    texts = []
    for gradient in (False, True):
        alternatives = "|".join(pattern for pattern, of_gradient in patterns if of_gradient == gradient)
        if alternatives:
            kind = "==" if gradient else "!="
            texts.append(f"(fullmatch({alternatives!r}, name) and kind {kind} 'grad')")
    return " or ".join(texts) or None
