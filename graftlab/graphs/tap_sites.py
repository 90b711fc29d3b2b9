"""One tap in a captured function: its static memory, and the plan's decision for it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from graftlab.base.tensor_bytes import copyable
from graftlab.errors import GraphError
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.overwrite import may_overlap, one_place_each
from graftlab.graphs.slots import FillContext
from graftlab.plan.plan import Action
from graftlab.taps.ambient_tags import ambient

Grafts = Literal["switches", "breaks"]
"""How a graft gets into a captured function: through a switch at its tap, or in a break of the graph there."""

Rows = Literal["tokens", "requests"]
"""What the rows of a tap's value stand for."""

Identity = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class Slot:
    """Static memory of a tap. ``switch`` is a bool, one for each row if some of the value's rows are padding."""

    value: Tensor
    graft: Tensor
    switch: Tensor


@dataclass(eq=False)
class Site:
    """One tap of the captured function, with the tags that are set inside it.

    ``is_unfit`` if the value was not a tensor that can be sent; then the grafter gets ``stand_in`` instead.
    """

    name: str
    tags: dict[str, Any]
    identity: Identity
    slot: Slot | None = None
    breaks: bool = False
    rows: Rows | None = None
    is_unfit: bool = False
    stand_in: Any = None

    @property
    def is_left_out(self) -> bool:
        """Whether no kernel is captured for it."""
        return self.slot is None and not self.breaks


@dataclass(frozen=True)
class TapDecision:
    """The decision of the plan in force for a site: on this rank, and on any rank of this side."""

    action: Action | None
    is_wanted: bool
    is_received: bool


@dataclass
class WantedTaps:
    """State shared by the graphs of one runner: how they graft, and which taps any plan has used."""

    grafts: Grafts
    identities: set[Identity] = field(default_factory=set)
    plain_extras: dict[tuple[object, ...], Mapping[tuple[Any, ...], Any]] = field(default_factory=dict)
    """By sizes, number and identity of a tap: the values in its extras that were not tensors at the first capture."""


def new_slot(own: Tensor, has_rows: bool) -> Slot:
    """Memory for values like this one, its switch off; with ``has_rows`` it has one switch per row."""
    rows = own.shape[:1] if has_rows else [1] * own.dim()
    # Outside inference mode, where a tensor that was made inside it could not be written.
    with torch.inference_mode(False), torch.no_grad():
        return Slot(
            torch.empty(own.shape, dtype=own.dtype, device=own.device),
            torch.empty(own.shape, dtype=own.dtype, device=own.device),
            torch.zeros([*rows, *[1] * (own.dim() - len(rows))], dtype=torch.bool, device=own.device),
        )


def rows_of(tensor: Tensor, padded: FillContext) -> Rows | None:
    """Return whether a tensor's rows are requests or tokens, by its shape; None for neither."""
    if not tensor.dim() or isinstance(tensor, torch.nn.Parameter):
        return None
    rows: dict[int, Rows] = {padded.padded_bs: "requests", padded.padded_num_tokens: "tokens"}
    return rows.get(tensor.shape[0])


def cut(tensor: Tensor, rows: Rows | None, ctx: FillContext) -> Tensor:
    """The batch's own rows, without the padding after them."""
    if rows is None:
        return tensor
    return tensor[: ctx.raw_num_tokens if rows == "tokens" else ctx.raw_bs]


def decide(grafter: Grafter, site: Site) -> TapDecision:
    """Ask the plan about a site.

    Raises :class:`GraphError` if other ranks of this side decide by tags that this one cannot know.
    """
    action = grafter.action(site.name, site.tags)
    if action is None:
        return TapDecision(None, False, False)
    if grafter.place.world_size == 1 or not grafter.plan.rank_dependent:
        return TapDecision(action, _is_wanted(action), _is_received(grafter, action))
    given = {**dict(ambient.get()), **site.tags}
    private = sorted(tag for tag in grafter.plan.mentions & given.keys() if tag.endswith("_rank"))
    if private:
        raise GraphError(
            f"the plan's filters look at {private} of tap {site.name!r} on {grafter.place.label}, and other ranks have "
            "other values; ranks that compute together must capture and replay alike. Filter by `rank` or by tags that "
            "all ranks of a side share, or set `eager` on the runner"
        )
    everywhere = grafter.actions_of_side(site.name, site.tags)
    return TapDecision(
        action,
        any(_is_wanted(each) for each in everywhere),
        any(_is_received(grafter, each) for each in everywhere),
    )


def _is_wanted(action: Action) -> bool:
    return action.direction is not None or action.overlap


def _is_received(grafter: Grafter, action: Action) -> bool:
    return action.graft and not grafter.sends(action)


def copy_bits(into: Tensor, source: Tensor) -> Tensor:
    """Copy a tensor of any dtype into another of that dtype, which is returned."""
    copyable(into).copy_(copyable(source))
    return into


def write_through(own: Tensor, chosen: Tensor) -> None:
    """Write a value into an expanded tensor where all places that share memory are to hold the same number."""
    place, source = one_place_each(own, chosen)
    if not may_overlap(place):
        place, source, whole = copyable(place), copyable(source), copyable(chosen)
        same = ((whole == source) | ((whole != whole) & (source != source))).all()
        place.copy_(torch.where(same, source, place))
