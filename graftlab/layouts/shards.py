"""Layout steps that involve several ranks: shards, replicas, partial sums.

Inverting such a step joins the tensors of the ranks along one dimension of the mesh.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, Literal, Protocol

import torch
from torch import Tensor

from graftlab.errors import LayoutError
from graftlab.layouts.steps import Step, StepContext, call, check_count, check_dim, dim_of

Segment = tuple[int, int]
"""Start and end of a range of a dimension."""

Order = Literal["contiguous", "zigzag"]

Reduction = Literal["sum", "avg", "max", "min"]


class MeshStep(Step, Protocol):
    """A step that involves the ranks along one dimension of the mesh."""

    @property
    def mesh(self) -> str:
        """The mesh's dimension."""
        ...

    def join(self, afters: Sequence[Tensor], at: StepContext, shape: Sequence[int] | None) -> Tensor:
        """Return the tensor before the step, from the tensors of the ranks along the dimension after it."""
        ...


@dataclass(frozen=True)
class Shard:
    """A dimension cut over the ranks along a dimension of the mesh.

    * ``uneven``: the shards' sizes if the extent does not divide evenly. ``"chunk"`` is as in ``torch.chunk``, FSDP and
      DTensor (5 over 4: 2, 2, 1, 0), ``"balanced"`` as in ``torch.tensor_split`` (2, 1, 1, 1).
    * ``padded``: every rank's shard is as large as the first one, with meaningless padding.
    * ``replicas``: this number of consecutive ranks have the same shard, as with fewer key/value heads than ranks.
    * ``blocks``: the dimension was fused from parts in these proportions, and each part is cut separately. So a rank
      has its q, k and v one after the other. ``replicas`` may then be one number per block.
    * ``order="zigzag"``: rank r of n has chunks r and 2n-1-r of 2n, as context parallelism balances causal attention.
    * ``packed``: the dimension consists of consecutive sequences of given lengths, each cut separately.
    """

    dim: int
    mesh: str = "rank"
    uneven: Literal["chunk", "balanced"] = "chunk"
    padded: bool = False
    replicas: tuple[int, ...] = (1,)
    blocks: tuple[int, ...] = (1,)
    order: Order = "contiguous"
    packed: bool = False
    leaves_out: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        if isinstance(self.replicas, int):
            object.__setattr__(self, "replicas", (self.replicas,))
        object.__setattr__(self, "replicas", tuple(self.replicas))
        object.__setattr__(self, "blocks", tuple(self.blocks))
        check_dim("shard", self.dim)
        for block in self.blocks:
            check_count("shard", "each number in blocks", block)
        for count in self.replicas:
            check_count("shard", "replicas", count)
        if not self.blocks:
            raise LayoutError("shard: blocks has at least one number")
        if len(self.replicas) not in (1, len(self.blocks)):
            raise LayoutError(f"{self.text}: replicas is one number, or one number per block")
        if self.uneven not in ("chunk", "balanced") or self.order not in ("contiguous", "zigzag"):
            raise LayoutError(f"{self.text}: uneven is 'chunk' or 'balanced', order is 'contiguous' or 'zigzag'")
        plain = self.blocks == (1,) and self.replicas == (1,) and not self.padded and self.uneven == "chunk"
        if (self.order == "zigzag" or self.packed) and not plain:
            raise LayoutError(f"{self.text}: zigzag and packed exclude blocks, replicas, padded and uneven")

    @property
    def caveat(self) -> str | None:
        return f"a graft fills the padding of {self.text} with 0" if self.padded else None

    @property
    def text(self) -> str:
        replicas = self.replicas[0] if len(self.replicas) == 1 else list(self.replicas)
        return call(
            "shard",
            dim=self.dim,
            mesh=self.mesh,
            uneven=self.uneven if self.uneven != "chunk" else None,
            padded=self.padded or None,
            replicas=replicas if replicas != 1 else None,
            blocks=list(self.blocks) if self.blocks != (1,) else None,
            order=self.order if self.order != "contiguous" else None,
            packed=self.packed or None,
        )

    def segments(self, extent: int, ranks: int, lengths: tuple[int, ...] | None) -> list[list[Segment]]:
        """Return the segments of the dimension that each rank has, in the order in which it has them."""
        if self.packed:
            return self._segments_of_sequences(extent, ranks, lengths)
        if self.order == "zigzag":
            return self._zigzag(0, extent, ranks)
        if extent % sum(self.blocks):
            raise LayoutError(f"{self.text}: {extent} elements do not divide into blocks of {list(self.blocks)}")
        held: list[list[Segment]] = [[] for _ in range(ranks)]
        start, unit = 0, extent // sum(self.blocks)
        for number, block in enumerate(self.blocks):
            replicas = self.replicas[number if len(self.replicas) > 1 else 0]
            if ranks % replicas:
                raise LayoutError(f"{self.text}: {ranks} ranks do not divide into {replicas} replicas")
            cuts = self._cuts(block * unit, ranks // replicas)
            for rank in range(ranks):
                first, last = cuts[rank // replicas]
                held[rank].append((start + first, start + last))
            start += block * unit
        return held

    def _cuts(self, extent: int, parts: int) -> list[Segment]:
        if self.uneven == "balanced":
            ends = [(extent // parts) * n + min(n, extent % parts) for n in range(parts + 1)]
        else:
            size = math.ceil(extent / parts)
            ends = [min(size * n, extent) for n in range(parts + 1)]
        return list(pairwise(ends))

    def _zigzag(self, start: int, extent: int, ranks: int) -> list[list[Segment]]:
        chunks = 2 * ranks
        if extent % chunks:
            raise LayoutError(f"{self.text}: zigzag over {ranks} ranks needs a multiple of {chunks}, not {extent}")
        size = extent // chunks
        pairs = [(rank, chunks - 1 - rank) for rank in range(ranks)]
        return [[(start + n * size, start + (n + 1) * size) for n in pair] for pair in pairs]

    def _segments_of_sequences(self, extent: int, ranks: int, lengths: tuple[int, ...] | None) -> list[list[Segment]]:
        if lengths is None:
            raise LayoutError(f"{self.text} needs the lengths of the sequences: pass lengths=...")
        if sum(lengths) != extent:
            raise LayoutError(f"{self.text}: lengths {list(lengths)} add up to {sum(lengths)}, not to {extent}")
        held: list[list[Segment]] = [[] for _ in range(ranks)]
        start = 0
        for length in lengths:
            if self.order == "zigzag":
                pieces = self._zigzag(start, length, ranks)
            else:
                if length % ranks:
                    raise LayoutError(f"{self.text}: a sequence of {length} tokens does not divide by {ranks} ranks")
                pieces = [[(start + a, start + b)] for a, b in self._cuts(length, ranks)]
            for rank, piece in enumerate(pieces):
                held[rank] += piece
            start += length
        return held

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        ranks = at.mesh.size_of(self.mesh)
        if ranks == 1:
            return before
        dim = dim_of(self.dim, before, self.text)
        held = self.segments(before.shape[dim], ranks, at.lengths)
        # A batch without sequences has no segments.
        segments = held[at.coordinate(self.mesh)] or [(0, 0)]
        pieces = [before.narrow(dim, first, last - first) for first, last in segments]
        piece = pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim)
        widest = max(_extent(segments) for segments in held)
        if not self.padded or piece.shape[dim] == widest:
            return piece
        filled = piece.new_zeros((*piece.shape[:dim], widest, *piece.shape[dim + 1 :]))
        filled.narrow(dim, 0, piece.shape[dim]).copy_(piece)
        return filled

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        return self.join([after], at, shape)

    def join(self, afters: Sequence[Tensor], at: StepContext, shape: Sequence[int] | None) -> Tensor:
        if len(afters) == 1:
            return afters[0]
        dim = dim_of(self.dim, afters[0], self.text)
        # If every rank has one separate range, in order, joining is a plain concatenation.
        plain = self.blocks == (1,) and self.replicas == (1,) and self.order == "contiguous" and not self.packed
        around = {(*after.shape[:dim], *after.shape[dim + 1 :]) for after in afters}
        if len(around) > 1 or (shape is not None and len(shape) != afters[0].dim()):
            shapes = [list(after.shape) for after in afters]
            whole_shape = "" if shape is None else f" of a whole of shape {list(shape)}"
            raise LayoutError(f"{self.text}: {shapes} are not shards{whole_shape}: they differ outside dimension {dim}")
        extents = [after.shape[dim] for after in afters]
        extent = shape[dim] if shape is not None else self._extent_of_whole(extents)
        held = self.segments(extent, len(afters), at.lengths)
        for number, (after, segments) in enumerate(zip(afters, held, strict=True)):
            expected = max(map(_extent, held)) if self.padded else _extent(segments)
            if after.shape[dim] != expected:
                raise LayoutError(
                    f"{self.text} of {extent} elements gives place {number} of {len(afters)} {expected} of them, not "
                    f"shape {list(after.shape)}"
                )
        if plain and not self.padded:
            return torch.cat(list(afters), dim)
        first = afters[0]
        whole = first.new_empty((*first.shape[:dim], extent, *first.shape[dim + 1 :]))
        written: dict[Segment, int] = {}
        for number, (after, segments) in enumerate(zip(afters, held, strict=True)):
            start = 0
            for segment in segments:
                length = segment[1] - segment[0]
                piece, place = after.narrow(dim, start, length), whole.narrow(dim, segment[0], length)
                start += length
                if segment in written and length:
                    at.compare(f"replicas {written[segment]} and {number} along {self.mesh!r}", place, piece)
                else:
                    place.copy_(piece)
                    written[segment] = number
        return whole

    def _extent_of_whole(self, extents: Sequence[int]) -> int:
        ranks = len(extents)
        if self.padded:
            raise LayoutError(f"the amount of padding in {self.text} is unknown; give the whole tensor's shape")
        if all(count == 1 for count in self.replicas):
            return sum(extents)
        # A block with n replicas counts n times in the extents.
        counts = self.replicas if len(self.replicas) > 1 else self.replicas * len(self.blocks)
        if any(ranks % count for count in counts):
            raise LayoutError(f"{self.text}: {ranks} ranks do not divide into {list(counts)} replicas")
        shares = [block * count for block, count in zip(self.blocks, counts, strict=True)]
        extent, rest = divmod(sum(extents) * sum(self.blocks), sum(shares))
        if rest:
            raise LayoutError(f"{self.text}: extents {list(extents)} do not fit one whole; give its shape")
        return extent


def _extent(segments: Sequence[Segment]) -> int:
    return sum(last - first for first, last in segments)


@dataclass(frozen=True)
class Replicate:
    """Copies on all ranks along a dimension of the mesh, which are compared when they are joined."""

    mesh: str
    leaves_out: ClassVar[str | None] = None
    caveat: ClassVar[str | None] = None

    @property
    def text(self) -> str:
        return call("replicate", mesh=self.mesh)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        return before

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        return after

    def join(self, afters: Sequence[Tensor], at: StepContext, shape: Sequence[int] | None) -> Tensor:
        for number, after in enumerate(afters[1:], start=1):
            at.compare(f"replicas 0 and {number} along {self.mesh!r}", afters[0], after)
        return afters[0]


@dataclass(frozen=True)
class Partial:
    """Partial results on the ranks: the whole is their sum (or ``op``) over a dimension of the mesh.

    Sums of 16-bit dtypes are computed in float32 and rounded once. The original summands cannot be recovered, so a
    graft puts the value on the first rank and zeros on the others. For ``avg``, ``max`` and ``min`` it puts the value
    on all ranks.
    """

    mesh: str
    op: Reduction = "sum"
    leaves_out: ClassVar[str | None] = None

    def __post_init__(self) -> None:
        if self.op not in ("sum", "avg", "max", "min"):
            raise LayoutError(f"partial: op is 'sum', 'avg', 'max' or 'min', not {self.op!r}")

    @property
    def caveat(self) -> str | None:
        how = "on the first rank and zeros on the others" if self.op == "sum" else "on every rank"
        return f"a graft puts the whole value of a partial {self.op} over {self.mesh!r} {how}"

    @property
    def text(self) -> str:
        return call("partial", mesh=self.mesh, op=self.op if self.op != "sum" else None)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        if self.op != "sum" or at.coordinate(self.mesh) == 0 or before.dtype == torch.bool:
            return before
        # For floats the negative zero, because adding it never changes a bit.
        zero = -0.0 if before.is_floating_point() or before.is_complex() else 0
        return torch.full_like(before, zero)

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        return after

    def join(self, afters: Sequence[Tensor], at: StepContext, shape: Sequence[int] | None) -> Tensor:
        first = afters[0]
        if len(afters) == 1 or first.dtype == torch.bool:
            return first
        if any(after.shape != first.shape for after in afters):
            shapes = [list(after.shape) for after in afters]
            raise LayoutError(f"{self.text}: the partial results have different shapes, {shapes}")
        narrow = first.is_floating_point() and first.element_size() < 4
        wide = [after.float() if narrow else after for after in afters]
        if self.op in ("max", "min"):
            stacked = torch.stack(wide)
            return (stacked.amax(0) if self.op == "max" else stacked.amin(0)).to(first.dtype)
        total = wide[0].clone()
        for after in wide[1:]:
            total += after
        if self.op == "avg":
            total /= len(afters)
        return total.to(first.dtype)


@dataclass(frozen=True)
class OneOf:
    """One rank along a dimension of the mesh has everything; the others are idle, with empty tensors (data parallel).

    Only the tensors show which rank that is, so the layout alone does not determine a graft.
    """

    mesh: str
    leaves_out: ClassVar[str | None] = None

    @property
    def caveat(self) -> str | None:
        return f"a graft goes to the rank along {self.mesh!r} whose tensor is not empty"

    @property
    def text(self) -> str:
        return call("one_of", mesh=self.mesh)

    def get(self, before: Tensor, at: StepContext) -> Tensor:
        return before

    def put(self, after: Tensor, at: StepContext, shape: Sequence[int] | None) -> Tensor:
        return after

    def join(self, afters: Sequence[Tensor], at: StepContext, shape: Sequence[int] | None) -> Tensor:
        if len(afters) == 1:
            return afters[0]
        holders = [number for number, after in enumerate(afters) if after.numel()]
        if len(holders) > 1:
            raise LayoutError(f"{self.text}: places {holders} all have elements, but only one rank may")
        return afters[holders[0] if holders else 0]
