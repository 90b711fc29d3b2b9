"""A pair of taps, or of parameters, and how sure it is."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

from graftlab.base.world import Side
from graftlab.layouts import Layout

Sureness = Literal["exact", "near", "confirmed", "rule", "guess"]
SURENESS: tuple[Sureness, ...] = ("exact", "near", "confirmed", "rule", "guess")
BY_VALUE: frozenset[str] = frozenset({"exact", "near", "confirmed"})
"""Those of pairs whose values match, so that a graft may rely on them."""

MEANINGS = {
    "exact": "the values are bit-equal",
    "near": "the values are equal up to rounding",
    "confirmed": "first by rule, then by value once earlier taps were grafted",
    "rule": "as in other layers, where the values match, because later taps match once it is grafted, or, of a weight, "
    "because the outputs of the modules pair or most of its values are equal; of a fused module's output, because the "
    "weights pair; of an output in packed rows, because a tap of the same shapes pairs; of a part of an output, "
    "because the others pair",
    "guess": "by name alone; never grafted",
}


@dataclass(frozen=True)
class Pair:
    """A baseline tap and a target tap that show the same quantity.

    ``layout`` takes one out of the other. Side ``whole`` has the larger tensor, or both have equal size. So a target's
    fused qkv has three pairs, each with ``whole="target"`` and its part as layout. ``rel`` is their relative L2 in that
    layout, None if it could not be measured; ``sureness`` is one of ``exact, near, confirmed, rule, guess``. ``note``
    is a remark for the reader.
    """

    baseline: str
    target: str
    layout: Layout = field(default_factory=Layout)
    whole: Side = "baseline"
    sureness: Sureness = "near"
    rel: float | None = None
    note: str = ""

    @property
    def outer(self) -> str:
        """The tap with the whole."""
        return self.baseline if self.whole == "baseline" else self.target

    @property
    def inner(self) -> str:
        """The tap that the layout takes out of the whole."""
        return self.target if self.whole == "baseline" else self.baseline

    @property
    def by_value(self) -> bool:
        """Whether the values match, so that a graft may rely on the pair."""
        return self.sureness in BY_VALUE

    def noted(self, note: str) -> Pair:
        return replace(self, note=f"{self.note}; {note}" if self.note else note)
