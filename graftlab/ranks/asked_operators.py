"""What a call asks of its operators, which shows whether it does the same work in another dtype."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from graftlab.grafting.in_float64 import returns_views, tensors_in
from graftlab.ranks.widening import NARROW
from graftlab.taps.untraced import UntracedMode

# The smallest numbers of dtypes stand for minus infinity, in a mask for example.
_INFINITE = 1e30
# Numbers that code computes from tensors are rounded.
_NEAR = 1e-3


class AskedOperators(UntracedMode):
    """Notes each operator that computes something, with the numbers that code gives it, such as the epsilon of a norm.

    Conversions are left out, because they differ between dtypes. ``in_16_bits`` says whether any operator reads or
    returns a tensor of 16 bits.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.in_16_bits = False
        self._asked: list[tuple[str, tuple[float, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name: str = func.name()
        result = func(*args, **kwargs)
        tensors = [*tensors_in([*args, *kwargs.values(), result])]
        self.in_16_bits |= any(each.dtype in NARROW for each in tensors)
        if func is torch.ops.aten.lift_fresh.default:
            numbers = tuple(float(each) for each in tensors[:1] if _is_number(each))
            self._asked.append((name, numbers))
        elif not returns_views(func) and func is not torch.ops.aten._to_copy.default:
            self._asked.append((name, tuple(_numbers(func, args, kwargs))))
        return result

    def asks_the_same(self, other: AskedOperators) -> bool:
        """Whether both have the same operators, with the same numbers but for rounding."""
        if len(self._asked) != len(other._asked):
            return False
        pairs = zip(self._asked, other._asked, strict=True)
        return all(
            one == name and len(ours) == len(theirs) and all(map(_are_near, ours, theirs))
            for (one, ours), (name, theirs) in pairs
        )


def _numbers(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[float]:
    """The numbers among an operator's arguments; for a norm without an epsilon, that of its input's dtype."""
    given = {**dict(zip((each.name for each in func._schema.arguments), args, strict=False)), **kwargs}
    yield from (each for each in given.values() if isinstance(each, float))
    if any(each.name == "eps" for each in func._schema.arguments) and given.get("eps") is None:
        dtypes = (each.dtype for each in tensors_in(args) if each.is_floating_point())
        yield from (torch.finfo(each).eps for each in [*dtypes][:1])


def _is_number(tensor: torch.Tensor) -> bool:
    return tensor.numel() == 1 and tensor.is_floating_point() and tensor.device.type == "cpu"


def _are_near(one: float, other: float) -> bool:
    if min(abs(one), abs(other)) > _INFINITE:
        return (one > 0) == (other > 0)
    return one == other or math.isclose(one, other, rel_tol=_NEAR) or (math.isnan(one) and math.isnan(other))
