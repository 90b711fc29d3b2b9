"""Layouts: how each rank's tensor is made from the whole tensor, and how the whole is joined from those."""

from __future__ import annotations

from graftlab.layouts.dims import Dims, layouts_of_pair, parse_dims
from graftlab.layouts.gathering import Gather, Rows
from graftlab.layouts.known_mesh import give_mesh, parse_mesh
from graftlab.layouts.layout import Joined, Layout, Relaid, join_parts, relayout
from graftlab.layouts.mesh import Mesh
from graftlab.layouts.on_ranks import RankLayout, layout_of_dtensor, rank_layout
from graftlab.layouts.rearrange import Rearrange
from graftlab.layouts.shards import OneOf, Partial, Replicate, Shard
from graftlab.layouts.sketching import SignedSums
from graftlab.layouts.steps import Disagreement, Pack, Pad, Part, Scale, Step, Strided, Unpack, Window
from graftlab.layouts.text import parse_layout

__all__ = [
    "Dims",
    "Disagreement",
    "Gather",
    "Joined",
    "Layout",
    "Mesh",
    "OneOf",
    "Pack",
    "Pad",
    "Part",
    "Partial",
    "RankLayout",
    "Rearrange",
    "Relaid",
    "Replicate",
    "Rows",
    "Scale",
    "Shard",
    "SignedSums",
    "Step",
    "Strided",
    "Unpack",
    "Window",
    "give_mesh",
    "join_parts",
    "layout_of_dtensor",
    "layouts_of_pair",
    "parse_dims",
    "parse_layout",
    "parse_mesh",
    "rank_layout",
    "relayout",
]
