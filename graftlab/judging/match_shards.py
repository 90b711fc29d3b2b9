"""A match of tensors that the target's ranks hold in parts, with no layout that says which part each has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import cast

from torch import Tensor

from graftlab.diffs.rounding import roundoff
from graftlab.errors import TransformError
from graftlab.layouts import Layout
from graftlab.layouts.regroup import Regroup
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap, relative_l2
from graftlab.matching.regrouped import regrouped, with_dim
from graftlab.matching.rounds import match_once
from graftlab.matching.sketch import flat_elements
from graftlab.plan.pairs import TapCallName
from graftlab.transforms.by_layout import by_layout
from graftlab.transforms.inputs import GraftTransformInput

# Ranks split one of the first dimensions, or have a whole tensor beside their parts, as of few heads of keys.
_SPLIT: tuple[int | None, ...] = (None, 0, 1, 2)
_LEAST = 1e-5


def with_shards(
    proposal: Proposal, baseline: Sequence[RecordedTap], target: Mapping[str, Sequence[RecordedTap]]
) -> Proposal:
    """Add the pairs of a baseline's whole tensors and the parts of them that the target's ranks have.

    ``target`` has, by tap, what each rank recorded; only taps without a partner are paired. The first rank's tensors
    are matched with the parts into which the baseline's can be cut. A pair counts only if, on every rank, the default
    transform makes the rank's tensor of the baseline's.
    """
    left = {
        name: held
        for name, held in target.items()
        if not proposal.of_target(name) and all(tap.value is not None and tap.shape == held[0].shape for tap in held)
    }
    alone = [tap for tap in baseline if tap.name in proposal.unmatched_baseline and tap.value is not None]
    found: dict[tuple[str, str], Pair] = {}
    # The ranks of the newest run may have none, where only chance made them differ before.
    for dim in _SPLIT if left else ():
        parts = [part for tap in alone if (part := _first_part(tap, dim, target)) is not None]
        if not parts:
            continue
        for pair in match_once(parts, [held[0] for held in left.values()]).pairs:
            whole = next(tap for tap in alone if tap.name == pair.baseline)
            # Together the ranks have all of the baseline's tensor.
            has_all = pair.whole == "target" or not pair.layout.leaves_out
            if has_all and pair.by_value and _fits(pair, whole, left[pair.target]):
                found.setdefault((pair.baseline, pair.target), pair)
    partners = {pair.target for pair in found.values()}
    for pair in _fused(alone, {name: held for name, held in left.items() if name not in partners}):
        found.setdefault((pair.baseline, pair.target), pair)
    return _with(proposal, [*found.values()])


def _fused(baseline: Sequence[RecordedTap], left: Mapping[str, Sequence[RecordedTap]]) -> Iterator[Pair]:
    """The pairs of taps that both sides have fused from blocks, where the target cuts each block over its ranks.

    A module's output follows its weight, even if something before it differs.
    """
    by_name = {tap.name: tap for tap in baseline}
    steps: dict[str, Regroup] = {}
    for name, held in left.items():
        others = [by_name[name]] if name in by_name else baseline
        for tap in others:
            if tap.kind == held[0].kind and (pair := _regrouped(tap, name, held)) is not None:
                steps[_module(name)] = cast("Regroup", pair.layout.steps[0])
                yield pair
                break
    for name, held in left.items():
        whole, step = by_name.get(name), steps.get(_module(name))
        if whole is not None and step is not None and (own := with_dim(step, whole.shape, held[0].shape)) is not None:
            pair = Pair(whole.name, name, Layout((own,)), "baseline", "rule")
            yield replace(pair, sureness="near") if _fits(pair, whole, held) else pair


def _regrouped(baseline: RecordedTap, name: str, held: Sequence[RecordedTap]) -> Pair | None:
    values = [tap.value for tap in held if tap.value is not None]
    assert baseline.value is not None
    if not baseline.value.is_floating_point() or any(not each.is_floating_point() for each in values):
        return None
    step = regrouped(baseline.value, values, _limit(baseline, held))
    if step is None:
        return None
    pair = Pair(baseline.name, name, Layout((step,)), "baseline", "near")
    return pair if _fits(pair, baseline, held) else None


def _module(name: str) -> str:
    """The name of a tap's module: a weight's, or the tap's own."""
    path = TapCallName.of(name).name
    return path.rpartition(".")[0] if path.endswith((".weight", ".bias")) else path


def _first_part(tap: RecordedTap, dim: int | None, target: Mapping[str, Sequence[RecordedTap]]) -> RecordedTap | None:
    """The first rank's part of a tap that is split in this dimension; None if it cannot be."""
    ranks = len(next(iter(target.values())))
    assert tap.value is not None
    if dim is None:
        return tap
    if dim >= len(tap.shape) or tap.shape[dim] % ranks:
        return None
    part = tap.value.narrow(dim, 0, tap.shape[dim] // ranks).contiguous()
    return replace(RecordedTap.of(tap.name, part, kind=tap.kind, order=tap.order), tags=tap.tags)


def _fits(pair: Pair, baseline: RecordedTap, held: Sequence[RecordedTap]) -> bool:
    """Whether the default transform makes each rank's tensor of the baseline's, to rounding."""
    limit = max(10 * (pair.rel or 0.0), _limit(baseline, held))
    return all(apart <= limit for apart in _distances(pair, baseline, held))


def _limit(baseline: RecordedTap, held: Sequence[RecordedTap]) -> float:
    """How far equal tensors of these dtypes may be apart (rel_l2)."""
    dtypes = (str(tap.dtype).removeprefix("torch.") for tap in (baseline, held[0]))
    return max(_LEAST, *(2 * roundoff(dtype) for dtype in dtypes))


def _distances(pair: Pair, baseline: RecordedTap, held: Sequence[RecordedTap]) -> Iterator[float]:
    assert baseline.value is not None
    for rank, tap in enumerate(held):
        assert tap.value is not None
        given = GraftTransformInput(
            {"name": pair.target, **tap.tags},
            [baseline.value],
            [None],
            tap.value,
            recv_rank=rank,
            recv_world_size=len(held),
            senders=[0],
            send_world_size=1,
            pair=pair.layout,
            whole="received" if pair.whole == "baseline" else "target",
        )
        try:
            outcome = by_layout(given)
        except TransformError:
            yield float("inf")
            return
        values: list[Tensor] = [outcome.value, tap.value]
        made, own = values if outcome.known is None else (each[outcome.known] for each in values)
        yield relative_l2(flat_elements(own), flat_elements(made))


def _with(proposal: Proposal, found: Sequence[Pair]) -> Proposal:
    """The proposal with these pairs too, in the order of the target's taps."""
    order = {name: place for place, name in enumerate(proposal.order.get("target", ()))}
    pairs = sorted((*proposal.pairs, *found), key=lambda pair: order.get(pair.target, len(order)))
    paired = {pair.baseline for pair in found}, {pair.target for pair in found}
    return replace(
        proposal,
        pairs=tuple(pairs),
        unmatched_baseline={name: why for name, why in proposal.unmatched_baseline.items() if name not in paired[0]},
        unmatched_target={name: why for name, why in proposal.unmatched_target.items() if name not in paired[1]},
    )
