"""A plan as plain data, for ranks and other receivers: checked on arrival, and never executed by decoding.

Only a transform that was given as a function is pickled. It stays bytes until it is loaded.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from graftlab.base import wire
from graftlab.base.world import Side
from graftlab.errors import PlanError
from graftlab.plan.pairs import PairRule
from graftlab.plan.plan import GraftPlan
from graftlab.transforms import TransformSpec
from graftlab.transforms.spec import specs_of


class WireTransform(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See :class:`graftlab.transforms.TransformSpec`."""

    kind: Literal["path", "source", "function"]
    text: str
    blob: bytes
    where: str | None


class WirePair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See :class:`graftlab.plan.pairs.PairRule`."""

    baseline: str
    target: str
    layout: str
    whole: Side
    matched_by: str
    rel: float | None


class WirePlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """See :class:`graftlab.plan.plan.GraftPlan`. No field has a default: messages are complete."""

    b2t: str | None
    t2b: str | None
    compare: str | None
    keep: str | None
    transform: tuple[WireTransform, ...]
    rename: tuple[tuple[Side, str, str], ...]
    pairs: tuple[WirePair, ...]
    version: Annotated[int, msgspec.Meta(ge=0)]


_decoder = wire.Decoder(WirePlan)


def to_wire(plan: GraftPlan) -> WirePlan:
    """Encode a plan; :func:`from_wire` is the inverse."""
    transform = tuple(WireTransform(made.kind, made.text, made.blob, made.where) for made in plan.transforms)
    pairs = tuple(WirePair(p.baseline, p.target, p.layout, p.whole, p.matched_by, p.rel) for p in plan.pairs)
    return WirePlan(plan.b2t, plan.t2b, plan.compare, plan.keep, transform, plan.rename, pairs, plan.version)


def from_wire(received: WirePlan) -> GraftPlan:
    """Decode a plan.

    Raises :class:`FilterError` or :class:`PlanError` if it is invalid. Its transform is not loaded here, so a transform
    that cannot be loaded is not noticed.
    """
    transforms = []
    for sent in received.transform:
        if (sent.kind == "function") != bool(sent.blob):
            raise PlanError(f"a transform of kind {sent.kind!r} came with {len(sent.blob)} bytes of a function")
        transforms.append(TransformSpec(sent.kind, sent.text, sent.blob, sent.where))
    # As in unpickling: this skips the warnings about a new plan, which its author has already seen.
    plan = GraftPlan.__new__(GraftPlan)
    plan.__setstate__(
        {
            "b2t": received.b2t,
            "t2b": received.t2b,
            "compare": received.compare,
            "keep": received.keep,
            "transform": specs_of(transforms, TransformSpec.draft),
            "rename": received.rename,
            "pairs": tuple(
                PairRule(p.baseline, p.target, p.layout, p.whole, p.matched_by, p.rel) for p in received.pairs
            ),
            "version": received.version,
        }
    )
    # Compiles every part, so that an invalid plan is refused now.
    _ = plan.looks_at, plan.pairings("baseline", " ", {})
    return plan


def pack_plan(plan: GraftPlan) -> bytes:
    """Encode a plan as bytes; see :func:`to_wire`."""
    return wire.encode(to_wire(plan))


def unpack_plan(data: bytes) -> GraftPlan:
    """The inverse of :func:`pack_plan`. Raises :class:`MessageError`, and the errors of :func:`from_wire`."""
    received: WirePlan = _decoder.decode(data)
    return from_wire(received)
