"""Groups of taps: those of one computation in all layers, which a verdict reports together."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from graftlab.base.text import numbered

_NUMBER = re.compile(r"\d+")
# Where a function calls several models, a model's taps begin with its name. A module inside may be named output, too.
_OUTPUT = re.compile(r"([^.]+\.)?output([.\[].*)?")
KINDS = ("input", "grad", "param_grad", "optimizer", "param")
"""The values of the tag ``kind`` that form separate groups. Any other tap shows a value of the forward pass."""

DATA = "((kind == 'param' or kind == 'optimizer') and not updated)"
"""A filter for taps that show inputs of the computation: weights before a step, and an optimizer's settings. They are
compared and never grafted, because an overwritten weight would stay overwritten."""


def is_data(tags: Mapping[str, Any]) -> bool:
    """Whether :data:`DATA` matches a tap with these tags."""
    return tags.get("kind") in ("param", "optimizer") and not tags.get("updated")


def kind_of(tags: Mapping[str, Any] | None) -> str | None:
    """Return the kind of a tap with these tags; None for a value of the forward pass."""
    kind = tags.get("kind") if tags else None
    return kind if kind in KINDS else None


def is_recomputed(tags: Mapping[str, Any]) -> bool:
    """Whether a tap with these tags repeats a value in the backward pass, as activation checkpointing does."""
    return tags.get("recompute_status") == "recompute"


def is_value(tags: Mapping[str, Any]) -> bool:
    """Whether a tap with these tags shows a value of the forward pass itself."""
    return kind_of(tags) is None and not is_recomputed(tags)


def is_output(name: str) -> bool:
    """Whether a tap with this name shows what a watched model or function returns, or a part of it.

    >>> is_output("output"), is_output("Encoder.output[1]"), is_output("layer.0.output.dense")
    (True, True, False)
    """
    return _OUTPUT.fullmatch(name) is not None


def group_of(name: str, tags: Mapping[str, Any] | None = None) -> str:
    """Return the group of a tap: its path with each numeric part replaced by ``*``.

    Digits within a part stay, so ``n1`` and ``n2`` are two groups. A tap whose tag ``kind`` is one of :data:`KINDS` is
    not in the group of the value with the same name.

    >>> group_of("layers.3.experts.0.q1"), group_of("layers.3.q", {"kind": "grad"})
    ('layers.*.experts.*.q1', 'layers.*.q@grad')
    """
    group = ".".join("*" if _NUMBER.fullmatch(part) else part for part in name.split("."))
    kind = kind_of(tags)
    return group if kind is None else f"{group}@{kind}"


def kind_of_group(group: str) -> str | None:
    """Return the kind of a group's taps; see :func:`kind_of`."""
    kind = group.rpartition("@")[2]
    return kind if "@" in group and kind in KINDS else None


_OF_KIND = {
    None: "{}",
    "input": "the input {}",
    "grad": "the gradient of {}",
    "param_grad": "the gradient of the weight {}",
    "optimizer": "the optimizer's {}",
    "param": "the update of the weight {}",
}


def described(group: str) -> str:
    """A group as a sentence names it.

    >>> described("layers.*.q@grad")
    'the gradient of layers.*.q'
    """
    kind = kind_of_group(group)
    name = group.removesuffix(f"@{kind}") if kind else group
    return _OF_KIND[kind].format("the model's members" if kind and name == "*" else name)


def place_in_blame(group: str) -> int:
    """Return a group's place in the order of computation: data, values, gradients, weights' gradients, update."""
    return ("input", None, "grad", "param_grad", "optimizer", "param").index(kind_of_group(group))


def numbers_in(name: str) -> tuple[int, ...]:
    """Return the numbers that the group's stars replace."""
    return tuple(int(part) for part in name.split(".") if _NUMBER.fullmatch(part))


def in_layers(names: Iterable[str]) -> str:
    """Return the layers of these taps as the end of a clause, `` in layers 0-3``; blank without layers."""
    layers = {numbers[0] for name in names if (numbers := numbers_in(name))}
    return f" in {numbered('layer', layers)}" if layers else ""


def filter_of(names: Iterable[tuple[str, str | None]], *, whole_groups: bool = True) -> str | None:
    """Return a filter expression for all taps of these groups, each given as a tap's name and kind.

    Without ``whole_groups`` the filter matches the taps of these names alone, not those of other layers. The name may
    be that of either side. Returns None if ``names`` is empty.
    """
    patterns: dict[tuple[str, str | None], None] = {}
    for name, kind in names:
        parts = [r"\d+" if whole_groups and _NUMBER.fullmatch(part) else re.escape(part) for part in name.split(".")]
        patterns[r"\.".join(parts), kind] = None
    texts = []
    for kind in (None, *KINDS):
        alternatives = "|".join(pattern for pattern, of_kind in patterns if of_kind == kind)
        if alternatives:
            chosen = f"kind == {kind!r}" if kind else f"kind not in {KINDS!r}"
            texts.append(f"(fullmatch({alternatives!r}, name) and {chosen})")
    return " or ".join(texts) or None
