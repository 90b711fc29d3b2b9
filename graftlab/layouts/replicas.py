"""Which ranks hold copies of one tensor, and the sketch by which a rank's copy is compared with those of others.

Ranks make these and the notebook relates them, so this imports neither pandas nor anything of a verdict.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from graftlab.layouts.layout import Layout
from graftlab.layouts.shards import Replicate

Array = npt.NDArray[np.float64]

SKETCH = 256
"""Numbers in a sketch. The distance of two tensors comes out within about 10 %."""


class Replicas(NamedTuple):
    """What a layout says of a tap's ranks: ``groups`` of ranks hold the same."""

    layout: str
    groups: tuple[tuple[int, ...], ...]


class TapSketch(NamedTuple):
    """One call of a tap on one rank. ``sketch`` has :data:`SKETCH` numbers; ``declared`` is what its layout says."""

    name: str
    tags: dict[str, Any]
    place: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: str
    sketch: bytes
    norm: float
    nonfinite: int
    declared: Replicas | None = None

    @property
    def values(self) -> Array:
        return np.frombuffer(self.sketch, dtype=np.float64)

    @property
    def has_no_number(self) -> bool:
        """Whether it has elements, and none is finite."""
        return 0 < math.prod(self.shape) <= self.nonfinite


def replicas_of(layout: Layout) -> Replicas:
    """Which ranks hold the same, where each holds what this layout says."""
    own = [step for step in layout.steps if hasattr(step, "join") and not isinstance(step, Replicate)]
    names = {getattr(step, "mesh", None) for step in own}
    kept = [place for place, name in enumerate(layout.mesh.names) if name in names]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in zip(layout.mesh.ranks, layout.mesh.coordinates(), strict=True):
        groups.setdefault(tuple(coordinates[place] for place in kept), []).append(rank)
    return Replicas(layout.text, tuple(map(tuple, groups.values())))
