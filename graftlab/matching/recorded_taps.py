"""One side's taps and parameters as a match uses them: sketches, and values within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from graftlab.base.quantisation import by_extras
from graftlab.base.tags import identity, name_with
from graftlab.base.tap_groups import is_data
from graftlab.diffs.measure import measure
from graftlab.matching.digests import Digest
from graftlab.matching.sketch import Elements, Sketch, Values, flat_elements, sketch_of
from graftlab.matching.strides import Lookup
from graftlab.taps.ambient_tags import ambient

Fetch = Callable[[str], "Tensor | None"]
"""A function that returns the value of one side's tap of this name, or None."""

BUDGET = 1 << 30
"""Bytes of values that a recorder keeps by default."""
COPIED_WEIGHTS = 1 << 28
"""Bytes of weights that a recorder copies. It refers to all others, which the model has anyway."""


@dataclass
class RecordedTap:
    """One tap of one side: a sketch, and the tensor if the budget allowed.

    ``kind`` is the class of the module, if known; ``order`` is its place in the execution order of its side's taps.
    Weights have a ``digest``.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    order: int
    sketch: Sketch = field(repr=False)
    value: Tensor | None = field(default=None, repr=False)
    tags: dict[str, Any] = field(default_factory=dict)
    digest: Digest | None = field(default=None, repr=False)

    @classmethod
    def of(
        cls,
        name: str,
        value: Tensor,
        *,
        kind: str = "",
        order: int = 0,
        keep: bool = True,
        sketch: Sketch | None = None,
        digest: Digest | None = None,
    ) -> RecordedTap:
        """Make one from a tensor, which is not copied, and from its ``sketch`` if that is known."""
        dense = value.detach()
        made = sketch_of(dense) if sketch is None else sketch
        return cls(name, kind, tuple(value.shape), value.dtype, order, made, dense if keep else None, digest=digest)

    @property
    def in_memory(self) -> int:
        """The bytes of the value and of everything computed from it."""
        arrays = [made for name in ("elements", "flat") if (made := self.__dict__.get(name)) is not None]
        lookup: Lookup | None = self.__dict__.get("lookup")
        value = 0 if self.value is None else self.value.nbytes
        return value + sum(int(each.nbytes) for each in arrays) + (0 if lookup is None else lookup.nbytes)

    @cached_property
    def elements(self) -> Elements | None:
        """The values as they are, flat; None if they were not kept."""
        return None if self.value is None else flat_elements(self.value)

    @cached_property
    def flat(self) -> Values | None:
        """The values in float64, flat; None if they were not kept."""
        return None if self.elements is None else self.elements.astype(np.float64)

    @cached_property
    def lookup(self) -> Lookup:
        """The places of all values, or only of the extremes if no others were kept."""
        return Lookup.of_sketch(self.sketch) if self.flat is None else Lookup(self.flat)

    def forget(self) -> None:
        """Drop everything computed from the values, but not the values."""
        for made in ("elements", "flat", "lookup"):
            self.__dict__.pop(made, None)


class SketchRecorder:
    """Records taps for a match: copies of up to ``budget`` bytes, and sketches of all others.

    Its ``tap`` is like a grafter's, so :func:`graftlab.taps.routing.handled_by` can install it on a rank. ``kinds``
    maps names to classes of modules. Repeated names are distinguished by their tags, or else counted: ``name#1``.
    Weights have digests and are not part of the budget. Those beyond :data:`COPIED_WEIGHTS` are not copied. Weights
    that are computed for their taps, as from codes, are part of it, because the model does not have them in memory.
    ``sketches`` has known sketches of weights by their digests, and gets new ones.
    """

    def __init__(
        self,
        kinds: Mapping[str, str] | None = None,
        budget: int = BUDGET,
        sketches: dict[bytes, Sketch] | None = None,
    ) -> None:
        self._kinds = {} if kinds is None else kinds
        self._left, self._weights_left = budget, COPIED_WEIGHTS
        self._sketches = {} if sketches is None else sketches
        self._taps: dict[str, RecordedTap] = {}
        self.skipped: dict[str, str] = {}

    @property
    def taps(self) -> list[RecordedTap]:
        return list(self._taps.values())

    @property
    def count(self) -> int:
        """The number of taps so far."""
        return len(self._taps)

    @property
    def newest(self) -> RecordedTap:
        """The tap that was recorded last."""
        return next(reversed(self._taps.values()))

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """See :func:`graftlab.tap`; the value is left unchanged."""
        shown = value() if callable(value) and not isinstance(value, Tensor) else value
        self._record(name, shown, extras, tags, is_computed=shown is not value)
        return value

    def _record(self, name: str, shown: Any, extras: Any, tags: Mapping[str, Any], *, is_computed: bool) -> None:
        """Record what a tap shows. ``is_computed`` means that this was made for the tap, and is not in the model."""
        if not isinstance(shown, Tensor) or not shown.numel():
            self.skipped[name] = (
                "is empty" if isinstance(shown, Tensor) else f"is a {type(shown).__name__}, not a tensor"
            )
            return
        numbers = by_extras(shown, extras)
        is_computed |= numbers is not shown
        given = {**dict(ambient.get()), **tags}
        full = name_with(name, dict(identity({**given, "name": name}).tags))
        count = sum(known == full or known.startswith(f"{full}#") for known in self._taps) if full in self._taps else 0
        full = f"{full}#{count}" if count else full
        kind = self._kinds.get(name, "")
        if is_data(given):
            recorded = self._recorded_weight(full, numbers, kind, is_computed)
        else:
            recorded = self._recorded_value(full, numbers, kind)
        recorded.tags = given
        self._taps[full] = recorded

    def _recorded_value(self, name: str, value: Tensor, kind: str) -> RecordedTap:
        size = value.numel() * value.element_size()
        fits = size <= self._left
        self._left -= size if fits else 0
        # A copy, because the model may overwrite the tensor before the run ends.
        seen = value.detach().clone() if fits else value
        return RecordedTap.of(name, seen, kind=kind, order=len(self._taps), keep=fits)

    def _recorded_weight(self, name: str, value: Tensor, kind: str, is_computed: bool) -> RecordedTap:
        own, size = value.detach(), value.numel() * value.element_size()
        kept: Tensor | None
        if is_computed:
            fits = size <= self._left
            self._left -= size if fits else 0
            seen = own.cpu()
            kept = seen if fits else None
        else:
            fits = size <= self._weights_left
            self._weights_left -= size if fits else 0
            # Always a copy, because torch refuses to release memory that numpy has seen, as FSDP does.
            seen = own.clone() if fits else own.to("cpu", copy=True)
            kept = seen if fits else own
        # It shows whether a weight that was not copied has changed since.
        digest = Digest.of(seen)
        known = self._sketches.get(digest.whole)
        recorded = RecordedTap.of(name, seen, kind=kind, order=len(self._taps), sketch=known, digest=digest)
        self._sketches[digest.whole] = recorded.sketch
        recorded.value = kept
        return recorded


def relative_l2(expected: Elements, found: Elements) -> float:
    """``||expected - found|| / ||expected||`` over the finite pairs; inf if only one of some pair is finite."""
    stats = measure(torch.from_numpy(expected), torch.from_numpy(found))
    if stats.nonfinite_differ and not np.array_equal(np.isfinite(expected), np.isfinite(found)):
        return math.inf
    # Without a finite pair nothing differs.
    return 0.0 if math.isnan(stats.rel_l2) else stats.rel_l2
