"""Replicas, which are ranks with copies of one tensor, and the sketches by which their copies are compared.

Ranks make sketches and the notebook compares them, so this module imports neither pandas nor the verdict room.
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
"""The number of values in a sketch, which gives the distance of two tensors to within about 10 %."""


class Replicas(NamedTuple):
    """The replicas in a tap's layout: each of ``groups`` has copies of one tensor."""

    layout: str
    groups: tuple[tuple[int, ...], ...]


class TapSketch(NamedTuple):
    """One call of a tap on one rank. ``sketch`` has :data:`SKETCH` numbers; ``declared`` comes from its layout."""

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
        """Whether the tensor has elements, but no finite one."""
        return 0 < math.prod(self.shape) <= self.nonfinite


def replicas_of(layout: Layout) -> Replicas:
    """Return the groups of ranks with copies of one tensor, according to a layout."""
    own = [step for step in layout.steps if hasattr(step, "join") and not isinstance(step, Replicate)]
    names = {getattr(step, "mesh", None) for step in own}
    kept = [place for place, name in enumerate(layout.mesh.names) if name in names]
    groups: dict[tuple[int, ...], list[int]] = {}
    for rank, coordinates in zip(layout.mesh.ranks, layout.mesh.coordinates(), strict=True):
        groups.setdefault(tuple(coordinates[place] for place in kept), []).append(rank)
    return Replicas(layout.text, tuple(map(tuple, groups.values())))
