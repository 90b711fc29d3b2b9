"""What a layout refuses: all of what is said, with the numbers that were given and those that would fit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from kit.refusals import ids, refusal

from graftlab.layouts import Layout, Mesh, Rearrange, parse_layout, relayout


def local(text: str, *shape: int, lengths: list[int] | None = None, mesh: Any = 1) -> Any:
    return parse_layout(text, mesh=mesh).local(torch.zeros(shape), 0, lengths)


def join(text: str, *shapes: tuple[int, ...], whole: Sequence[int] | None = None) -> Any:
    mesh = len(shapes) if "mesh" in text else 1
    return parse_layout(text, mesh=mesh).join([torch.zeros(shape) for shape in shapes], whole)


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: local("part(index=0, of=[1, 2], dim=1, groups=2)", 4, 9),
        "part(index=0, of=[1, 2], dim=1, groups=2): dimension 1 of [4, 9] has 9 elements, which do "
        "not divide into 2 x 3",
    ),
    (
        lambda: local("part(index=0, of=[1, 2], dim=3)", 4, 9),
        "part(index=0, of=[1, 2], dim=3): a tensor of shape [4, 9] has no dimension 3",
    ),
    (
        lambda: join("part(index=1, of=[1, 2], groups=2)", (6, 3)),
        "part(index=1, of=[1, 2], dim=0, groups=2): dimension 0 of [6, 3] does not divide into 4 for part 1",
    ),
    (
        lambda: local("unpack()", 3, lengths=[1, 1]),
        "unpack(): lengths [1, 1] add up to 2, not to [3]'s rows",
    ),
    (
        lambda: local("unpack()", lengths=[1]),
        "unpack(): lengths [1] add up to 1, not to []'s rows",
    ),
    (
        lambda: local("pack()", 2, 4, lengths=[5, 1]),
        "pack(): 2 sequences of up to 5 tokens need a tensor [batch, tokens, ...] of at least that size, not [2, 4]",
    ),
    (
        lambda: local("pack()", 2, 4),
        "pack() needs the lengths of sequences: pass lengths=..., or put them into gl.tap's extras",
    ),
    (
        lambda: local("scale(factor=0.0)"),
        "scale: factor must be finite and not 0, and add finite, not 0.0, 0.0 (at position 0)\n"
        "    scale(factor=0.0)\n"
        "    ^",
    ),
    (
        lambda: local("(a b) c -> a b c", 4, 3),
        "'(a b) c -> a b c': 4 elements could be split into ['a', 'b'] in several ways; give all but "
        "one of their sizes, or the whole tensor's shape",
    ),
    (
        lambda: local("(a b) c -> a b c, a=3", 4, 3),
        "'(a b) c -> a b c': dimension 0 of [4, 3] on the left is not (a=3 b=?)",
    ),
    (
        lambda: local("a b -> b a", 4, 3, 2),
        "'a b -> b a': its left side does not have the 3 dimensions of [4, 3, 2]",
    ),
    (
        lambda: join("a b -> (a b)", (4,)),
        "'a b -> (a b)': 4 elements could be split into ['a', 'b'] in several ways; give all but one "
        "of their sizes, or the whole tensor's shape",
    ),
    (
        lambda: Rearrange("a b -> b a", (("c", 2),)),
        "'a b -> b a' has no axis 'c', for which a size is given",
    ),
    (
        lambda: Rearrange("a b -> b a", (("a", 0),)),
        "'a b -> b a': the size of 'a' must be an int of at least 1, not 0",
    ),
    (
        lambda: parse_layout("a b -> b a c"),
        "'c' is only on the right, so it needs a size: c=... (at position 11)\n    a b -> b a c\n               ^",
    ),
    (
        lambda: parse_layout("shard(dim=0, mesh='tp') | shard(dim=1, mesh='tp')"),
        "shard(dim=0, mesh='tp') | shard(dim=1, mesh='tp'): two steps use mesh dimension 'tp'",
    ),
    (
        lambda: parse_layout("shard(dim=0, mesh='tp') | shard(dim=1, mesh='ep')", mesh=4),
        "it is unknown how 4 ranks are split over ['tp', 'ep']; give the size of each, for example "
        "mesh={'tp': 4, 'ep': 1}",
    ),
    (
        lambda: Mesh((("tp", 2),), (0, 1, 2)),
        "a mesh of {'tp': 2} has 2 different ranks, not [0, 1, 2]",
    ),
    (
        lambda: Mesh((("tp", 0),)),
        "mesh dimension 'tp' must have a size of at least 1, not 0",
    ),
    (
        lambda: Mesh((("tp", 2),), (4, 5)).coordinate_of(0, "tp"),
        "rank 0 is not in the mesh of {'tp': 2}, whose ranks are (4, 5)",
    ),
    (
        lambda: parse_layout("same", mesh=2).join([torch.zeros(1)]),
        "same is on 2 ranks {'rank': 2}, not 1 tensors",
    ),
    (
        lambda: join("shard(dim=0, mesh='tp')", (2, 3), (2, 4)),
        "shard(dim=0, mesh='tp'): [[2, 3], [2, 4]] are not shards: they differ outside dimension 0",
    ),
    (
        lambda: join("shard(dim=0, mesh='tp')", (2, 3), (2, 4), whole=(4, 3)),
        "shard(dim=0, mesh='tp'): [[2, 3], [2, 4]] are not shards of a whole of shape [4, 3]: they "
        "differ outside dimension 0",
    ),
    (
        lambda: join("shard(dim=0, mesh='tp')", (2, 3), (3, 3), whole=(5, 3)),
        "shard(dim=0, mesh='tp') of 5 elements gives place 0 of 2 3 of them, not shape [2, 3]",
    ),
    (
        lambda: join("shard(dim=0, mesh='tp', padded=True)", (2, 3), (2, 3)),
        "the amount of padding in shard(dim=0, mesh='tp', padded=True) is unknown; give the whole tensor's shape",
    ),
    (
        lambda: join("shard(dim=0, mesh='tp', replicas=[1, 2, 2], blocks=[4, 1, 1])", (3,), (4,)),
        "shard(dim=0, mesh='tp', replicas=[1, 2, 2], blocks=[4, 1, 1]): extents [3, 4] do not fit "
        "one whole; give its shape",
    ),
    (
        lambda: local("shard(dim=0, mesh='cp', order='zigzag')", 6, mesh=2),
        "shard(dim=0, mesh='cp', order='zigzag'): zigzag over 2 ranks needs a multiple of 4, not 6",
    ),
    (
        lambda: local("shard(dim=0, mesh='cp', packed=True)", 6, lengths=[2, 3], mesh=2),
        "shard(dim=0, mesh='cp', packed=True): lengths [2, 3] add up to 5, not to 6",
    ),
    (
        lambda: local("shard(dim=0, mesh='cp', packed=True)", 5, lengths=[2, 3], mesh=2),
        "shard(dim=0, mesh='cp', packed=True): a sequence of 3 tokens does not divide by 2 ranks",
    ),
    (
        lambda: local("shard(dim=0, mesh='cp', packed=True)", 5, mesh=2),
        "shard(dim=0, mesh='cp', packed=True) needs the lengths of the sequences: pass lengths=...",
    ),
    (
        lambda: join("one_of(mesh='ep')", (2,), (2,)),
        "one_of(mesh='ep'): places [0, 1] all have elements, but only one rank may",
    ),
    (
        lambda: parse_layout("partial(mesh='tp', op='prod')"),
        "partial: op is 'sum', 'avg', 'max' or 'min', not 'prod' (at position 0)\n"
        "    partial(mesh='tp', op='prod')\n"
        "    ^",
    ),
    (
        lambda: relayout([(Layout(), [torch.zeros(2, 3)])], parse_layout("a b -> b a"), 0, own=torch.zeros(2, 3)),
        "from same to a b -> b a: rank 0 would have shape [3, 2], but it has [2, 3]",
    ),
    (
        lambda: relayout([(parse_layout("part(index=0, of=[1, 1])"), [torch.zeros(2)])], Layout()),
        "the parts lack elements that same needs: the other 1 parts along dim 0",
    ),
    (
        lambda: relayout([], Layout()),
        "no part was given, so there is nothing to join",
    ),
    (
        lambda: local("sketch(size=2, of=[4])", 5),
        "the recording has a sketch of a tensor of shape [4], and this one is [5]",
    ),
    (
        lambda: join("sketch(size=2, of=[4])", (2,)),
        "a tensor cannot be made from its sketch of 2 sums",
    ),
    (
        lambda: local("gather(of=[4], runs=[[0, 3]], into=[3])", 5),
        "the rows of this pair were found in a batch of 4 rows, and this tensor is [5]: match again for this batch",
    ),
    (
        lambda: parse_layout("gather(of=[4], runs=[[2, 3]], into=[3])"),
        "gather: the run [2, 3] is not within 4 rows (at position 0)\n"
        "    gather(of=[4], runs=[[2, 3]], into=[3])\n"
        "    ^",
    ),
    (
        lambda: parse_layout("gather(of=[4], runs=[[0, 3]], into=[4])"),
        "gather: the runs do not add up to the 4 rows of [4] (at position 0)\n"
        "    gather(of=[4], runs=[[0, 3]], into=[4])\n"
        "    ^",
    ),
    (
        lambda: parse_layout("gather(of=[4], runs=[[0, 0]], into=[1])"),
        "gather: a run is a first row and a number of rows, not [0, 0] (at position 0)\n"
        "    gather(of=[4], runs=[[0, 0]], into=[1])\n"
        "    ^",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=ids(REFUSED))
def test_a_layout_that_fits_no_tensor_names_both(call: Callable[[], Any], said: str) -> None:
    assert refusal(call) == said
