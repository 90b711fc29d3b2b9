"""The mesh of a side's ranks: named dimensions, and the rank at each coordinate."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from graftlab.errors import LayoutError

Coordinates = tuple[int, ...]


@dataclass(frozen=True)
class Mesh:
    """Named dimensions with their sizes, outermost first, and the rank at each coordinate in row-major order.

    ``ranks`` is 0, 1, 2, ... by default; a ``DeviceMesh`` may have a different order. An absent dimension has size 1,
    so that one layout works for a model with and without it.
    """

    sizes: tuple[tuple[str, int], ...] = ()
    ranks: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.sizes]
        if len(set(names)) < len(names):
            raise LayoutError(f"a mesh has each dimension only once, not {names}")
        for name, size in self.sizes:
            if type(size) is not int or size < 1:
                raise LayoutError(f"mesh dimension {name!r} must have a size of at least 1, not {size!r}")
        if not self.ranks:
            object.__setattr__(self, "ranks", tuple(range(self.size)))
        if len(set(self.ranks)) != self.size or len(self.ranks) != self.size:
            raise LayoutError(f"a mesh of {dict(self.sizes)} has {self.size} different ranks, not {list(self.ranks)}")

    @classmethod
    def of(cls, mesh: Mesh | Mapping[str, int] | int, names: Sequence[str] = ()) -> Mesh:
        """Make a mesh from sizes by name, outermost first, or from the size of the single dimension in ``names``."""
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, Mapping):
            return cls(tuple((str(name), size) for name, size in mesh.items()))
        if len(names) > 1 and mesh != 1:
            raise LayoutError(
                f"it is unknown how {mesh} ranks are split over {list(names)}; give the size of each, "
                f"for example mesh={{{names[0]!r}: {mesh}, {names[1]!r}: 1}}"
            )
        return cls(((names[0] if names else "rank", mesh),))

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(size for _, size in self.sizes)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(name for name, _ in self.sizes)

    def size_of(self, name: str) -> int:
        return dict(self.sizes).get(name, 1)

    def coordinates(self) -> list[Coordinates]:
        """Return the coordinates of all ranks, in row-major order, as in ``ranks``."""
        return list(itertools.product(*(range(size) for _, size in self.sizes)))

    def coordinate_of(self, rank: int, name: str) -> int:
        """Return a rank's coordinate along one dimension. Raises :class:`LayoutError` for a rank outside the mesh."""
        if rank not in self.ranks:
            raise LayoutError(f"rank {rank} is not in the mesh of {dict(self.sizes)}, whose ranks are {self.ranks}")
        if name not in self.names:
            return 0
        return self.coordinates()[self.ranks.index(rank)][self.names.index(name)]
