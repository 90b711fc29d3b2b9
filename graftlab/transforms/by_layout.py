"""The default transform for known layouts: from the senders' tensors to the whole tensor, and on to the receiver's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch

from graftlab.errors import LayoutError, TransformError
from graftlab.layouts import (
    Disagreement,
    Layout,
    Mesh,
    RankLayout,
    Rows,
    SignedSums,
    join_parts,
    layouts_of_pair,
    parse_dims,
    relayout,
)
from graftlab.layouts.layout import part_of
from graftlab.taps.module_inputs import KIND
from graftlab.transforms.default import default_transform, in_one_dtype, nearly_equal
from graftlab.transforms.inputs import SIGNATURE, GraftTransformInput, Outcome

SKETCHED = "only a sketch of it is recorded, which is compared and never grafted"
INFERRED = "inferred"
"""The text in a row for a layout that was not declared and was inferred from shapes."""


def by_layout(graft_input: GraftTransformInput) -> Outcome:
    """Make the receiver's tensor by the known layouts, or by the shapes alone if no layout is known.

    Layouts are known from DTensors, from ``gl.tap(layout=...)``, and from the plan's pair. If only one side's is known,
    the other's is inferred from the shapes, and ``layout`` says ``inferred``. Raises :class:`TransformError` if tensors
    do not have their layouts, or if a part of the whole is missing.

    >>> given = gl.GraftTransformInput({"name": "q"}, [torch.arange(4.0)], [None], target=torch.zeros(4))
    >>> gl.transforms.by_layout(given).value
    tensor([0., 1., 2., 3.])
    """
    given, note = _usable(graft_input)
    try:
        return _noted(_outcome(given), note)
    except TransformError as error:
        if note is None:
            raise
        # Often the reason: without its names, a tensor may fit no shape.
        raise TransformError(f"{error}; {note}") from error


def _outcome(given: GraftTransformInput) -> Outcome:
    sketch = next((step for each in given.received_layouts if each for step in each.layout.steps), None)
    if isinstance(sketch, SignedSums):
        return _sketched(given, sketch)
    if given.layout is None and given.pair is None and not any(given.received_layouts):
        outcome = default_transform(given)
        return replace(outcome, layout=INFERRED) if outcome.aligned_by else outcome
    try:
        return _by_layout(given)
    except LayoutError as error:
        if given.pair is not None and given.tags.get("kind") == KIND:
            # A verdict assumes the rows of a module's output for its inputs. Tables of positions do not have them, nor
            # does the batch that a module itself packs.
            with suppress(TransformError):
                return _outcome(replace(given, pair=None))
        raise TransformError(
            f"{error} (from {[list(t.shape) for t in given.received_list]} of senders {given.senders} to "
            f"{list(given.target.shape)} on rank {given.recv_rank}); if the layout is wrong, declare it "
            f"with gl.tap(layout=...) or the plan's pairs, or give the plan a transform: `{SIGNATURE}`"
        ) from error


def _sketched(given: GraftTransformInput, sketch: SignedSums) -> Outcome:
    """Compare a recorded sketch with that of the receiver's tensor."""
    if given.pair is not None or given.layout is not None or len(given.received_list) > 1:
        raise TransformError(
            "the recording has a sketch of this tensor, which is compared only with a tensor of the same name, on one "
            "rank; record it whole"
        )
    try:
        own = Layout((sketch,)).local(given.target)
    except LayoutError as error:
        raise TransformError(str(error)) from error
    theirs = given.received_list[0].to(own.device, own.dtype)
    return Outcome(given.target, measured=(theirs, own), layout=sketch.text, compare_only=True, note=SKETCHED)


def _usable(given: GraftTransformInput) -> tuple[GraftTransformInput, str | None]:
    """Return the input with layouts that can be applied, and a note on what could not be."""
    layouts = [given.layout, *given.received_layouts]
    unknown = next((each.unknown for each in layouts if each is not None and each.unknown), None)
    if unknown is not None:
        mine, *theirs = [None if each is None or each.names else each for each in layouts]
        given = replace(given, layout=mine, received_layouts=theirs)
        return given, f"the names of dimensions were not used: {unknown}"
    if _lengths(given) is not None or not any(_needs_lengths(each) for each in layouts):
        return given, None
    mine, *theirs = [
        replace(each, layout=each.layout.of_one_sequence()) if each is not None and _needs_lengths(each) else each
        for each in layouts
    ]
    return replace(given, layout=mine, received_layouts=theirs), (
        "no lengths of sequences arrived, so that the tokens were joined as those of one sequence; pass the lengths as "
        'extras={"request_lens": lengths}'
    )


def _noted(outcome: Outcome, note: str | None) -> Outcome:
    return outcome if note is None else replace(outcome, note="; ".join(filter(None, (note, outcome.note))))


def _needs_lengths(layout: RankLayout | None) -> bool:
    # A layout in steps says itself that the tokens are packed; named dimensions do not.
    return layout is not None and layout.names is not None and layout.layout.cuts_sequences


@dataclass(frozen=True)
class _SenderTensors:
    """Tensors in the order of their layout's mesh. ``note`` and ``graft_refused`` are as in :class:`Outcome`."""

    layout: RankLayout
    tensors: Sequence[torch.Tensor]
    is_inferred: bool = False
    note: str | None = None
    graft_refused: str | None = None


def _by_layout(given: GraftTransformInput) -> Outcome:
    senders = _senders(given)
    mine = given.layout
    pair = given.pair
    if pair is None and mine is not None and mine.names and senders.layout.names:
        return _relaid(given, *_by_names(given, senders, mine), _shape_of_one(given))
    into = pair if given.whole == "received" else None
    out_of = pair if given.whole == "target" else None
    if mine is None:
        if given.recv_world_size > 1:
            return _inferred(given, senders, into, out_of)
        mine = RankLayout(Layout(), tuple(given.target.shape))
    theirs = senders.layout
    if out_of is not None:
        theirs = RankLayout(_after(out_of, theirs.layout), None)
    if into is not None:
        mine = RankLayout(_after(into, mine.layout))
    # The whole tensor is the larger of the two.
    shape = senders.layout.shape if out_of is None else None
    if shape is None and into is None:
        shape = mine.shape or _shape_of_one(given)
    return _relaid(given, replace(senders, layout=theirs), mine, shape)


def _shape_of_one(given: GraftTransformInput) -> tuple[int, ...] | None:
    """Return the receiver's shape if one rank holds its whole tensor; else None."""
    is_whole = given.whole == "target" if given.pair is not None else given.direction == "t2b"
    alone = given.recv_world_size == 1 if given.layout is None else given.layout.layout.mesh.size == 1
    return tuple(given.target.shape) if alone and is_whole else None


def _after(pair: Layout, on_ranks: Layout) -> Layout:
    """Return the pair's layout followed by the split over ranks."""
    return Layout((*pair.steps, *on_ranks.steps), on_ranks.mesh)


def _relaid(
    given: GraftTransformInput, senders: _SenderTensors, mine: RankLayout, shape: tuple[int, ...] | None = None
) -> Outcome:
    lengths = _lengths(given)
    parts = [(senders.layout.layout, senders.tensors)]
    relaid = relayout(parts, mine.layout, given.recv_rank, shape=shape, lengths=lengths, own=given.target)
    measured = None
    if mine.is_partial:
        if not isinstance(given.target_reduced, torch.Tensor):
            raise LayoutError(given.target_reduced or f"{mine.layout}: this rank holds only a partial sum")
        reduced = mine.reduced()
        whole = relayout(parts, reduced.layout, given.recv_rank, shape=shape, lengths=lengths, own=given.target_reduced)
        measured = (whole.value, given.target_reduced)
    text = _text(senders.layout.layout, mine.layout, senders.is_inferred)
    matched, unmatched = _rows_of_pair(given, relaid.known)
    return Outcome(
        relaid.value,
        aligned_by=None if text is None else "layout",
        known=relaid.known,
        rows_matched=matched,
        rows_unmatched=unmatched,
        measured=measured,
        layout=text,
        note="; ".join(filter(None, (senders.note, _note_on(relaid.disagreements)))) or None,
        caveat="; ".join(relaid.caveats) or None,
        graft_refused=senders.graft_refused,
    )


def _rows_of_pair(given: GraftTransformInput, known: torch.Tensor | None) -> tuple[int | None, int]:
    """Return how many of the receiver's rows are rows of the senders', and how many are not, where taps show rows."""
    found = [] if given.pair is None else [step.found for step in given.pair.steps if isinstance(step, Rows)]
    if not found or found[0] is None or (known is not None and not known.any()):
        return (0, 1) if found and known is not None else (None, 0)
    matched = int((found[0].index >= 0).sum())
    # The other rows of a receiver that has the whole may be in further pairs.
    return matched, len(found[0].index) - matched if given.whole == "received" else 0


def _text(theirs: Layout, mine: Layout, is_inferred: bool) -> str | None:
    left, right = (INFERRED if is_inferred else theirs.text), mine.text
    return None if left == right == "same" else left if left == right else f"{left} => {right}"


def _note_on(found: Sequence[Disagreement]) -> str | None:
    return "; ".join(map(str, found)) or None


def _senders(given: GraftTransformInput) -> _SenderTensors:
    """Return the received tensors as parts of one whole. Raises :class:`LayoutError` if a part is missing."""
    ranks = given.senders or list(range(len(given.received_list)))
    tensors = dict(zip(ranks, given.received_list, strict=True))
    layouts = dict(zip(ranks, given.received_layouts or [None] * len(ranks), strict=True))
    known = [each for each in layouts.values() if each is not None]
    if not known:
        return _unsaid_senders(given, tensors)
    if len(known) < len(layouts):
        raise LayoutError(
            f"senders {[r for r, each in layouts.items() if each is None]} declare no layout, but the others do"
        )
    by_mesh: dict[Mesh, RankLayout] = {each.layout.mesh: each for each in known}
    if len(by_mesh) > 1:
        # Each mesh has its own whole, as data parallel groups do; the receiver's is the mesh with its rank.
        own = {mesh: each for mesh, each in by_mesh.items() if given.recv_rank in mesh.ranks}
        if given.recv_world_size == 1:
            return _groups(given, list(by_mesh.values()), tensors)
        if len(own) != 1 or given.send_world_size != given.recv_world_size:
            raise LayoutError(f"the senders are on several meshes, and none of them contains rank {given.recv_rank}")
        by_mesh = own
    layout = next(iter(by_mesh.values()))
    return _SenderTensors(layout, _held(layout, tensors))


def _held(layout: RankLayout, tensors: Mapping[int, torch.Tensor]) -> list[torch.Tensor]:
    """Return the tensors of a layout's mesh, in the order of its ranks."""
    ranks = layout.layout.mesh.ranks
    missing = [rank for rank in ranks if rank not in tensors]
    if missing:
        raise LayoutError(f"{layout.layout}: ranks {missing} of {list(ranks)} sent nothing")
    return in_one_dtype([tensors[rank] for rank in ranks])


def _groups(
    given: GraftTransformInput, layouts: Sequence[RankLayout], tensors: Mapping[int, torch.Tensor]
) -> _SenderTensors:
    """Combine groups of senders, such as data parallel groups, that hold copies or parts of one tensor."""
    layouts = sorted(layouts, key=lambda each: min(each.layout.mesh.ranks))
    if len({each.layout.text for each in layouts}) > 1:
        raise LayoutError(f"the groups of senders have different layouts: {[each.layout.text for each in layouts]}")
    wholes = [each.layout.join(_held(each, tensors), each.shape).whole for each in layouts]
    count = len(wholes)
    if given.pair is None and any(each.shape != given.target.shape for each in wholes):
        # Each group has its own part of the batch.
        outcome = default_transform(
            replace(
                given,
                received_list=wholes,
                received_extras_list=[None] * count,
                received_layouts=[None] * count,
                senders=list(range(count)),
                send_world_size=count,
            )
        )
        # One group's tensor, without dimensions of length 1, is taken only if all groups hold the same.
        if not outcome.graft_refused:
            inferred = RankLayout(Layout(), tuple(outcome.value.shape))
            return _SenderTensors(inferred, [outcome.value], is_inferred=True, note=outcome.note)
    if not all(each.shape == wholes[0].shape and nearly_equal(each, wholes[0]) for each in wholes):
        raise LayoutError(f"{count} groups of senders hold different tensors and do not declare which part each holds")
    return _SenderTensors(RankLayout(Layout(), tuple(wholes[0].shape)), wholes[:1])


def _unsaid_senders(given: GraftTransformInput, tensors: Mapping[int, torch.Tensor]) -> _SenderTensors:
    """Combine senders without a layout: one sender holds the whole; for several the shapes decide."""
    count = given.send_world_size or len(tensors)
    if count == 1:
        only = next(iter(tensors.values()))
        return _SenderTensors(RankLayout(Layout(), tuple(only.shape)), [only])
    if len(tensors) < count:
        raise LayoutError(f"only {sorted(tensors)} of {count} senders sent a tensor")
    shape = given.layout.shape if given.layout is not None else None
    if given.pair is not None and given.layout is None and count == given.recv_world_size:
        # Both sides are split alike, or not at all, so the pair's layout applies to each rank's own tensor.
        mine = tensors[given.recv_rank]
        return _SenderTensors(RankLayout(Layout(), tuple(mine.shape)), [mine], is_inferred=True)
    if shape is None or given.pair is not None:
        replicas = Layout((), Mesh((("rank", count),)))
        held = [tensors[rank] for rank in sorted(tensors)]
        if any(each.shape != held[0].shape for each in held) or replicas.join(held).disagreements:
            raise LayoutError(
                f"{count} senders hold different tensors and do not declare which part of the whole each holds"
            )
        return _SenderTensors(RankLayout(Layout(), tuple(held[0].shape)), held[:1], is_inferred=True)
    whole = default_transform(
        replace(
            given,
            target=torch.empty(shape, dtype=given.target.dtype, device="meta"),
            recv_rank=0,
            recv_world_size=1,
        )
    )
    inferred = RankLayout(Layout(), shape)
    return _SenderTensors(inferred, [whole.value], True, note=whole.note, graft_refused=whole.graft_refused)


def _inferred(
    given: GraftTransformInput, senders: _SenderTensors, into: Layout | None, out_of: Layout | None
) -> Outcome:
    """Cut the senders' whole by shapes, for a receiver on several ranks without a layout."""
    theirs, tensors = senders.layout.layout, senders.tensors
    if out_of is not None:
        if not theirs.steps and len(tensors) == 1:
            tensors = [_cut(given, tensors[0], out_of.local(given.target, 0, _lengths(given)))]
        theirs = _after(out_of, theirs)
    shape = senders.layout.shape if out_of is None else tuple(given.target.shape)
    joined = join_parts([(theirs, tensors)], shape, _lengths(given))
    if into is not None:
        joined = part_of(joined, into, 0, _lengths(given))
        theirs = _after(theirs, into)
    whole, known = joined.whole, joined.known
    if known is not None:
        if whole.shape != given.target.shape:
            raise LayoutError(
                f"{theirs} leaves out a part of {list(whole.shape)}, and this rank, which declares no layout, holds "
                f"{list(given.target.shape)}"
            )
        whole = torch.where(known, whole.to(given.target.dtype), given.target)
    found = default_transform(
        replace(given, received_list=[whole], received_extras_list=[None], senders=[0], send_world_size=1)
    )
    if known is not None:
        matched, unmatched = _rows_of_pair(given, known)
        found = replace(found, known=known, rows_matched=matched, rows_unmatched=unmatched)
    caveat = "; ".join(into.caveats) if into is not None else ""
    return replace(found, layout=f"{theirs} => {INFERRED}", note=_note_on(joined.disagreements), caveat=caveat or None)


def _cut(given: GraftTransformInput, whole: torch.Tensor, own: torch.Tensor) -> torch.Tensor:
    """This rank's part of a sender's whole tensor, by the shape of ``own``, a part of what the rank has; the whole if
    none fits, as the pair's layout then says best.
    """
    alone = replace(given, received_list=[whole], received_extras_list=[None], senders=[0], send_world_size=1)
    with suppress(TransformError):
        return default_transform(replace(alone, target=own, pair=None)).value
    return whole


def _by_names(
    given: GraftTransformInput, senders: _SenderTensors, mine: RankLayout
) -> tuple[_SenderTensors, RankLayout]:
    """Derive the layouts of two sides that name their dimensions."""
    names = senders.layout.names
    assert mine.names is not None
    assert names is not None
    mesh, own_mesh = senders.layout.layout.mesh, mine.layout.mesh
    sizes, split_sizes = parse_dims(names).sizes([tensor.shape for tensor in senders.tensors], mesh)
    own_sizes, own_split_sizes = parse_dims(mine.names).sizes([given.target.shape], own_mesh)
    known, split = sizes | own_sizes, split_sizes | own_split_sizes
    if given.direction == "b2t":
        theirs, ours = layouts_of_pair(names, mine.names, known, split_sizes=split)
    else:
        ours, theirs = layouts_of_pair(mine.names, names, known, split_sizes=split)
    theirs, ours = theirs.on(mesh), ours.on(own_mesh)
    if _lengths(given) is None:
        theirs, ours = theirs.of_one_sequence(), ours.of_one_sequence()
    return replace(senders, layout=RankLayout(theirs)), RankLayout(ours)


def _lengths(given: GraftTransformInput) -> Sequence[int] | None:
    """Return the lengths of the sequences in the batch from the taps' extras; see ``align_by_request``."""
    for extras in (given.target_extras, *given.received_extras_list):
        found: Any = extras.get("request_lens") if isinstance(extras, Mapping) else None
        if found is not None:
            return [int(length) for length in found]
    return None
