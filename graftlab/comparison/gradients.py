"""Finds how gradients that optimizers read differ: by one factor, in single weights, by a sum over ranks or steps."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from graftlab.base.tap_groups import kind_of
from graftlab.base.text import counted, first_of, spans
from graftlab.base.world import other_side
from graftlab.comparison.amplified_rounding import distance, distance_of_amplified
from graftlab.comparison.rows_of_loss import rows_of_loss
from graftlab.diffs.results import is_in_a_cache
from graftlab.diffs.rounding import assumed_floor, roundoff
from graftlab.ranks.held_update import TensorSample, UpdateDescription
from graftlab.verdict.added import coarser_dtype
from graftlab.verdict.gradient_scaling import best_factor, left_over, norms_of

# A result that has a number, not a name.
_NUMBERED = re.compile(r"\[\d+\]$")
# How far apart gradients of agreeing code may be, as a multiple of the distance in a judged call of the model.
_TIMES = 10.0
# Gradients below this part of all gradients of a rank, over the unit roundoff, are rounding errors of zero.
_OF_ALL = 16.0
# Rounding errors of zero have random directions; from this cosine on a gradient is not one, unless all of it is as
# small: the same code makes similar errors. In 16 bits that would excuse a gradient that lacks some numbers.
_ALIKE = 0.99
_OF_32_BITS = 1e-6
# Sums over ranks and steps are compared with at least this tolerance, because their parts may cancel.
_SUM = 1e-3
# A loss whose terms cancel, as that of a policy does, is zero but for their rounding.
_OF_ZERO = 1e-5
# A product with a power of two is exact, but the factor is computed from rounded sums.
_EXACT = 1e-6
# Gradients in 16 bits may be rounded if at most this part of them differs, by at most this multiple of their floor.
_FEW = 0.25
_LITTLE = 3.0
_SHOWN = 4


@dataclass(frozen=True)
class GradientFindings:
    """Sentences on differences of the gradients that both optimizers read, the most important first.

    ``named`` are the weights whose gradients differ by more than a common factor, ``factor`` is that factor, 1 if there
    is none. ``unseen`` has sentences on what was not compared. ``losses`` is a sentence on losses that differ although
    their gradients agree, ``rounding`` one on gradients whose difference 16 bits, or a loss that amplifies rounding,
    may explain. ``parts`` is 0, or the number of ranks that have only their parts of some gradients, which the target's
    step may still add up; 1 if it may average them. ``small`` are the weights whose gradients may be rounding noise, so
    that they were not compared.
    """

    sentences: tuple[str, ...] = ()
    named: tuple[str, ...] = ()
    factor: float = 1.0
    unseen: tuple[str, ...] = ()
    losses: str = ""
    parts: int = 0
    rounding: str = ""
    small: tuple[str, ...] = ()


@dataclass(frozen=True)
class _GradientPair:
    """One compared gradient: the weight's names on both sides, the target's rank, the row, and the rounding limit.

    ``is_small`` means that the gradient may be zero, and the difference rounding.
    """

    name: str
    target_name: str
    rank: int
    row: Mapping[str, Any]
    limit: float
    is_small: bool

    def left(self, factor: float) -> float:
        """The remaining difference without this factor; NaN if unknown, 0 if both gradients are zero."""
        norms = norms_of(self.row)
        return 0.0 if norms == (0.0, 0.0) else left_over(self.row, factor)

    def is_explained(self, factor: float) -> bool:
        return self.left(factor) <= self.limit


def judge_gradients(
    rows: Sequence[Mapping[str, Any]],
    baseline: Sequence[UpdateDescription],
    target: Sequence[UpdateDescription],
    known: Mapping[str, float],
) -> GradientFindings:
    """Compare the gradients that both sides' optimizers read.

    ``rows`` are the measured rows of a run that tapped them, without grafts. ``known`` has, by weight, the ``rel_l2``
    of its gradient in a call that agrees; other gradients are held to an assumed floor.
    """
    lines = _lines(rows, baseline, target, known)
    unseen = []
    small = list(dict.fromkeys(line.name for line in lines if line.is_small))
    if small:
        unseen.append(f"the gradients of {first_of(small, _SHOWN)}, which are barely above rounding noise.")
    lines = [line for line in lines if not line.is_small]
    absent = _absent(baseline[0], target[0], {line.name: line.target_name for line in lines})
    factor, alike = _common_factor(lines)
    over = [line for line in lines if not line.is_explained(factor)]
    rounding = ""
    if factor == 1.0 and not absent and _may_be_rounding(over, lines, known):
        rounding, over = _of_rounding(over), []
    elif factor == 1.0 and not absent and (of_loss := _of_amplifying_loss(over, baseline, target, known)):
        rounding, over = of_loss, []
    named = tuple(dict.fromkeys(line.name for line in over))
    sentences, parts = list(absent), 0
    paired = {line.name: line.target_name for line in lines}
    if named and (sum_of_ranks := _sum_of_ranks(over, paired, baseline[0], target)) is not None:
        sentences.append(sum_of_ranks[0])
        parts = 0 if absent else sum_of_ranks[1]
    elif named and (sum_of_steps := _sum_of_steps(named, paired, baseline[0], target[0])) is not None:
        sentences.append(sum_of_steps)
    elif named:
        sentences.append(_in_words(over, named, factor))
        sentences += _where_they_begin(named, lines, baseline[0]) if factor == 1.0 else []
    if factor != 1.0:
        norms = "" if named or absent else _norms_in_words(baseline, target, paired)
        is_all = bool(norms) or not _without_partner(baseline[0], target[0], paired)
        sentences.append(_of_factor(factor, alike, bool(named or absent), is_all))
        sentences += [norms] if norms else []
    if named or factor != 1.0:
        sentences += _where(baseline, target, paired)
    elif (hidden := _hidden_factor(baseline[0], target[0], paired)) is not None:
        (unseen if _is_unscaled(baseline[0], target[0]) else sentences).append(hidden)
    losses = "" if sentences and not parts else _differing_losses(baseline, target, paired, bool(rounding))
    if len({bool(each.losses) for each in (*baseline, *target)}) == 2:
        unseen.append("the losses, because on some ranks the backward passes do not begin from a single number.")
    return GradientFindings(tuple(sentences), named, factor, tuple(unseen), losses, parts, rounding, tuple(small))


def _may_be_rounding(over: Sequence[_GradientPair], lines: Sequence[_GradientPair], known: Mapping[str, float]) -> bool:
    """Whether few gradients differ, by little more than the floor of 16 bits, and no call that agrees has shown how far
    rounding moves them. Gradients of queries and keys, whose terms cancel, are moved by more than others.
    """
    few = len({line.name for line in over}) <= _FEW * len({line.name for line in lines})
    return few and all(
        line.name not in known
        and line.limit >= assumed_floor(["float16"])[0]
        and line.left(1.0) <= _LITTLE * line.limit
        # A factor is no rounding.
        and line.left(best_factor(line.row)) > line.limit
        for line in over
    )


def _of_amplifying_loss(
    over: Sequence[_GradientPair],
    baseline: Sequence[UpdateDescription],
    target: Sequence[UpdateDescription],
    known: Mapping[str, float],
) -> str:
    """A sentence if rounding that a loss amplifies may explain these gradients, else blank."""
    if not over or len(baseline) != len(target):
        return ""
    ranks = [*zip(baseline, target, strict=True)]
    if any({*ours.of_results, *theirs.of_results} != {*_common_results(ours, theirs)} for ours, theirs in ranks):
        return ""
    pairs = [pair for ours, theirs in ranks for pair in _common_results(ours, theirs).values()]
    dtypes = {each.dtype for side in (baseline[0], target[0]) for each in side.gradients.values()}
    apart = distance_of_amplified(pairs, dtypes)
    if not apart or not all(line.limit < apart and line.left(1.0) <= _TIMES * apart for line in over):
        return ""
    # A call that agrees has shown the backward pass.
    where = "loss" if all(line.name in known for line in over) else "loss or in the backward pass"
    return (
        f"The gradients of {_with_distances(over)} differ, and so do, by {apart:.2g}, those of the loss with "
        "respect to the model's results. Rounding of the results may explain that, where the loss amplifies it as a "
        f"logarithm of small numbers does, and so may a small mistake in the {where}."
        f"{'' if dtypes == {'float64'} else ' Compare both sides in float64 to find out.'}"
    )


def _with_distances(over: Sequence[_GradientPair]) -> str:
    """These gradients with their distances, in words."""
    apart: dict[str, float] = {}
    for line in over:
        apart[line.name] = max(apart.get(line.name, 0.0), line.left(1.0))
    return first_of([f"{name} (rel_l2 {left:.2g})" for name, left in apart.items()], _SHOWN)


def _of_rounding(over: Sequence[_GradientPair]) -> str:
    """A sentence on these gradients; blank if there are none."""
    if not over:
        return ""
    return (
        f"The gradients of {_with_distances(over)} differ by little more than the floor assumed for 16 bits. "
        "Rounding may explain that: no call was compared that shows how far it moves them. Compare both sides in "
        "float32 to find out."
    )


def _differing_losses(
    baseline: Sequence[UpdateDescription],
    target: Sequence[UpdateDescription],
    paired: Mapping[str, str],
    may_be_rounded: bool,
) -> str:
    """A sentence on losses that differ although their gradients agree, or may be rounded; blank if they agree, or
    cannot be compared.
    """
    losses = _compared_losses(baseline, target, paired)
    if losses is None or losses.agree:
        return ""
    if may_be_rounded:
        return f"The losses from which the backward passes begin differ, too: {losses.shown}."
    return (
        f"The gradients agree, and the losses from which the backward passes begin differ: {losses.shown}. They differ "
        "by a part that no weight has a gradient of, or the loss that is shown is not the one that is trained."
    )


@dataclass(frozen=True)
class _Losses:
    """Both sides' losses in words, and whether they agree to 0.1 % or to their dtype's rounding."""

    shown: str
    agree: bool


def _compared_losses(
    baseline: Sequence[UpdateDescription], target: Sequence[UpdateDescription], paired: Mapping[str, str]
) -> _Losses | None:
    """Both sides' losses; None if they are not known.

    One side may make several backward passes, of parts of the loss, and divide by their number in the loss or in the
    gradients. Each rank may have its part of a batch.
    """
    if not all(each.losses for each in (*baseline, *target)):
        return None
    ours, theirs = ([sum(each.losses) for each in side] for side in (baseline, target))
    times = _factor_of_backward(baseline[0], target[0], paired)[0] or 1.0
    scale = baseline[0].scale / target[0].scale
    factors = {1.0, times, 1 / scale, times / scale, len(theirs) / len(ours), len(ours) / len(theirs)}
    factors |= {len(target[0].losses) / len(baseline[0].losses)}
    of_ranks = [(sum(ours), sum(theirs)), *((one, other) for one in ours for other in theirs)]
    dtypes = {dtype for each in (baseline[0], target[0]) for dtype in each.dtypes.values()}
    inside = {sample.dtype for each in (baseline[0], target[0]) for sample in each.of_results.values()}
    rounding = 4 * max(roundoff(dtype) for dtype in dtypes | inside)
    of_losses, of_zero = max(_SUM, rounding), max(_OF_ZERO, rounding)
    agree = any(
        math.isclose(factor * one, other, rel_tol=of_losses, abs_tol=of_zero)
        for one, other in of_ranks
        for factor in factors
    )
    shown = [", ".join(f"{value:.6g}" for value in side) for side in (ours, theirs)]
    return _Losses(f"{shown[0]} on the baseline, {shown[1]} on the target", agree)


def _hidden_factor(baseline: UpdateDescription, target: UpdateDescription, paired: Mapping[str, str]) -> str | None:
    """A sentence on a factor of the backward passes that the optimizers' gradients no longer have."""
    times, what = _factor_of_backward(baseline, target, paired)
    before, after = _changed_afterwards(baseline), _changed_afterwards(target)
    if times is None and before is not None and after is not None:
        # The gradients that the optimizers read are equal.
        times = before / after * baseline.scale / target.scale
        what = "gradients after the backward passes"
    if times is None or abs(times - 1) <= _SUM:
        return None
    return (
        f"The target's {what} are {times:.4g} times the baseline's, and a later step divides them by "
        "that factor. A scaler always does that; clipping does it only in steps in which it clips."
    )


def _factor_of_backward(
    baseline: UpdateDescription, target: UpdateDescription, paired: Mapping[str, str]
) -> tuple[float | None, str]:
    """The factor between what both sides' backward passes leave, without scalers, and what they leave, in words."""
    left = [
        (sample, target.accumulated[paired[name]])
        for name, sample in baseline.accumulated.items()
        if paired.get(name) in target.accumulated and sample.norm
    ]
    what = "gradients after the backward passes"
    if not left:
        left = [*_common_results(baseline, target).values()]
        what = "gradients of the loss with respect to the model's results"
    return _factor_of_all(left, baseline.scale / target.scale), what


def _is_unscaled(baseline: UpdateDescription, target: UpdateDescription) -> bool:
    """Whether both sides, after the backward passes, take out exactly the factors of their losses.

    Then they multiply by an exact power of two, or one side does not change its gradients at all. Clipping multiplies
    by any number, and makes the updates of different losses equal only if it clips on both sides.
    """
    factors = [_changed_afterwards(each) for each in (baseline, target)]
    known = [factor for factor in factors if factor is not None]
    if len(known) < len(factors):
        return False
    if any(abs(factor - 1) <= _EXACT for factor in known):
        return True
    return all(abs(2.0 ** round(math.log2(factor)) / factor - 1) <= _EXACT for factor in known)


def _lines(
    rows: Sequence[Mapping[str, Any]],
    baseline: Sequence[UpdateDescription],
    target: Sequence[UpdateDescription],
    known: Mapping[str, float],
) -> list[_GradientPair]:
    mine = [row for row in rows if kind_of(row["tags"]) == "param_grad"]
    # Values between the weights may be rounded more than the weights, as under autocast.
    inside = [sample.dtype for each in (*baseline[:1], *target[:1]) for sample in each.of_results.values()]
    squares: dict[int, float] = {}
    for row in mine:
        before = norms_of(row)[0]
        if math.isfinite(before):
            squares[row["rank"]] = squares.get(row["rank"], 0.0) + before**2 * (row["numel"] or 0)
    lines = []
    for row in mine:
        dtypes = [coarser_dtype(row), *inside]
        limit = max(assumed_floor(dtypes)[0], _TIMES * known.get(row["name"], 0.0))
        before = norms_of(row)[0]
        unit = max(roundoff(dtype) for dtype in dtypes)
        most = _OF_ALL * unit * math.sqrt(squares.get(row["rank"], 0.0))
        size = math.sqrt(row["numel"] or 0)
        apart = (row["rel_l2"] or 0.0) * before * size
        is_small = math.isfinite(apart) and limit * before * size < apart <= most
        if is_small and _cosine(row) >= _ALIKE:
            is_scaled = left_over(row, best_factor(row)) <= limit
            is_below_rounding = unit <= _OF_32_BITS and max(norms_of(row)) * size <= most / _OF_ALL
            is_small = is_below_rounding and not is_scaled
        lines.append(
            _GradientPair(row["name"], row.get("target_name") or row["name"], row["rank"], row, limit, is_small)
        )
    return lines


def _cosine(row: Mapping[str, Any]) -> float:
    before, after = norms_of(row)
    return best_factor(row) * before / after if after else 0.0


def _common_factor(lines: Sequence[_GradientPair]) -> tuple[float, int]:
    """The factor that explains more than half of the gradients, and for how many weights; 1 if there is none."""
    agreeing = {line.name for line in lines if line.is_explained(1.0)}
    best, most = 1.0, agreeing
    for line in lines:
        factor = best_factor(line.row)
        if not (math.isfinite(factor) and factor > 0) or line.is_explained(1.0):
            continue
        explained = {each.name for each in lines if each.is_explained(factor)}
        explained -= {each.name for each in lines if not each.is_explained(factor)}
        if len(explained) > len(most):
            best, most = factor, explained
    names = {line.name for line in lines}
    nonzero = {line.name for line in lines if norms_of(line.row) != (0.0, 0.0)}
    if best == 1.0 or 2 * len(most & nonzero) <= len(nonzero) or len(names) < 2:
        return 1.0, len(agreeing)
    return best, len(most)


def _absent(baseline: UpdateDescription, target: UpdateDescription, paired: Mapping[str, str]) -> list[str]:
    """Sentences on weights that have a gradient on only one side, or that one side does not train."""
    partner = {**paired, **{theirs: ours for ours, theirs in paired.items()}}
    sentences = []
    sides = (("baseline", baseline, target), ("target", target, baseline))
    for (side, own, other), (opposite, _, _) in zip(sides, reversed(sides), strict=True):
        trained = {name for name in other.dtypes if name not in (*other.frozen, *other.elsewhere)}
        frozen = [n for n in own.frozen if partner.get(n, n) in trained]
        none = [n for n in own.without_gradient if partner.get(n, n) in other.gradients and n not in frozen]
        for names, why in ((frozen, "does not train"), (none, "has no gradient for")):
            if names:
                sentences.append(f"The {side} {why} {first_of([*names], _SHOWN)}, and the {opposite} does.")
    return sentences


def _sum_of_ranks(
    over: Sequence[_GradientPair],
    paired: Mapping[str, str],
    baseline: UpdateDescription,
    target: Sequence[UpdateDescription],
) -> tuple[str, int] | None:
    """A sentence if the gradients of the target's ranks add up to the baseline's, or average to it; and how many such
    gradients as the baseline's would add up to as much.
    """
    limits = {line.name: max(line.limit, _SUM) for line in over}
    for what, divisor in (("sum", 1), ("average", len(target))):
        fits = {}
        for name, limit in limits.items():
            # The parts are summed as they were before clipping, whose factor may differ between ranks. If a script
            # reduces them after the backward passes, they are equal when the optimizer reads them.
            expected, own = _accumulated(baseline, name), paired[name]
            parts = [part for each in target if own in each.gradients and (part := _accumulated(each, own))]
            if expected is None or len(parts) < len(target) or any(part.shape != expected.shape for part in parts):
                continue
            found = [part.values for part in parts]
            if all(distance(expected.values, each) <= limit for each in found):
                # Each rank has the whole gradient, and makes something else of it.
                continue
            # A script that has reduced them leaves no rank its own part, though the ranks may clip differently.
            is_own = all(_factor(part, each.gradients[own]) for part, each in zip(parts, target, strict=True))
            apart = any(distance(found[0], each) > limit for each in found[1:])
            is_whole = distance(expected.values, torch.stack(found).sum(0) / divisor) <= limit
            fits[name] = is_own and apart and is_whole
        if fits and all(fits.values()):
            ranks = spans(range(len(target)))
            names = first_of([*fits], _SHOWN)
            sentence = (
                f"The target's ranks {ranks} {what} to the baseline's gradient of {names}, and each has only its "
                "part: a reduction over the ranks is missing."
            )
            return sentence, len(target) // divisor
    return None


def _sum_of_steps(
    named: Sequence[str], paired: Mapping[str, str], baseline: UpdateDescription, target: UpdateDescription
) -> str | None:
    """A sentence if one side's gradients still contain those of its last update."""
    sides = (("target", baseline, target), ("baseline", target, baseline))
    for side, clean, added in sides:
        fits = []
        for name in named:
            mine, other = (name, paired[name]) if side == "baseline" else (paired[name], name)
            expected, found = _accumulated(clean, other), _accumulated(added, mine)
            before = added.previous.get(mine)
            if expected is None or found is None or before is None or found.shape != expected.shape:
                continue
            fits.append(distance(found.values, expected.values + before.values) <= _SUM)
        if fits and all(fits):
            other = other_side(side)
            return (
                f"The {side}'s gradients are those of the {other} plus the {side}'s own of the last update "
                f"({first_of([*named], _SHOWN)}): they are not set to zero in between (zero_grad)."
            )
    return None


def _accumulated(description: UpdateDescription, name: str) -> TensorSample | None:
    return description.accumulated.get(name) or description.gradients.get(name)


def _in_words(over: Sequence[_GradientPair], named: Sequence[str], factor: float) -> str:
    worst: dict[str, tuple[float, str]] = {}
    for line in over:
        left = line.left(factor)
        left = math.inf if math.isnan(left) else left
        own = best_factor(line.row)
        is_scaled = math.isfinite(own) and own > 0 and line.is_explained(own)
        how = f"{own / factor:.4g} times the baseline's" if is_scaled else f"rel_l2 {left:.2g}"
        worst[line.name] = max(worst.get(line.name, (0.0, "")), (left, how))
    shown = [f"{name} ({worst[name][1]})" for name in sorted(named, key=lambda each: -worst[each][0])]
    verb = "differs" if len(named) == 1 else "differ"
    subject = "gradient" if len(named) == 1 else "gradients"
    apart = " apart from the factor below" if factor != 1.0 else ""
    return f"The {subject} of {first_of([*shown], _SHOWN)} {verb}{apart}."


def _where_they_begin(named: Sequence[str], lines: Sequence[_GradientPair], baseline: UpdateDescription) -> list[str]:
    """A sentence on the first gradient of the backward pass that differs, if some before it agree."""
    compared = {line.name for line in lines}
    order = [name for name in baseline.accumulated if name in compared]
    first = next((place for place, name in enumerate(order) if name in named), 0)
    if first == 0:
        return []
    return [
        f"In the order of the baseline's backward pass, the gradients agree up to {order[first - 1]}, and the first "
        f"that differs is that of {order[first]}."
    ]


def _without_partner(baseline: UpdateDescription, target: UpdateDescription, paired: Mapping[str, str]) -> bool:
    """Whether the optimizer of a side reads gradients that were not compared."""
    return not paired.keys() >= baseline.gradients.keys() or not {*paired.values()} >= target.gradients.keys()


def _of_factor(factor: float, alike: int, others_differ: bool, is_all: bool) -> str:
    if not others_differ and is_all:
        return f"All gradients that the optimizer reads are {factor:.6g} times the baseline's."
    if not others_differ:
        return (
            f"All gradients that were compared are {factor:.6g} times the baseline's. Others were not compared: if "
            "those differ, this factor may follow from clipping by the global norm."
        )
    others = counted(alike, "other weight")
    return (
        f"The gradients of the {others} are {factor:.6g} times the baseline's, as when clipping by the global norm "
        "follows from the gradients above, which are shown without this factor."
    )


def _norms_in_words(
    baseline: Sequence[UpdateDescription], target: Sequence[UpdateDescription], paired: Mapping[str, str]
) -> str:
    """A sentence on both sides' norms over all gradients, which may be a limit of clipping; blank if one is unknown."""
    ours, theirs = baseline[0].gradients, target[0].gradients
    pairs = [(one, theirs.get(paired.get(name, ""))) for name, one in ours.items()]
    known = [(one, other) for one, other in pairs if other is not None and other.shape == one.shape]
    norms = [_norm_of_ranks(side) for side in (baseline, target)]
    if not known or len(known) < max(len(pairs), len(theirs)) or None in norms:
        return ""
    return f"The norm over all of them is {norms[0]:.4g} on the baseline and {norms[1]:.4g} on the target."


def _norm_of_ranks(ranks: Sequence[UpdateDescription]) -> float | None:
    """The norm over all gradients of a side; None if its ranks may have parts of them, such as a pipeline's stages."""
    norms = [math.sqrt(sum(each.norm**2 for each in rank.gradients.values())) for rank in ranks]
    alike = all(rank.gradients.keys() == ranks[0].gradients.keys() for rank in ranks)
    return norms[0] if alike and max(norms) - min(norms) <= _SUM * max(norms) else None


def _where(
    baseline: Sequence[UpdateDescription], target: Sequence[UpdateDescription], paired: Mapping[str, str]
) -> list[str]:
    """Sentences on where gradients begin to differ: at the loss, or after the backward passes."""
    sentences = []
    ours, theirs = baseline[0], target[0]
    common = _common_results(ours, theirs)
    factor = _factor_of_loss(ours, theirs)
    if numbers := _single_numbers(ours, theirs):
        # Any two numbers have a factor. Only a count, as of micro-batches, tells about the loss.
        common = common if factor is not None and _is_count(factor) else {}
    if not common and (losses := _compared_losses(baseline, target, paired)) is not None:
        # A small mistake in a value may move the loss by less than the limit.
        how = "hardly differ, apart from a factor for ranks or passes" if losses.agree else "differ"
        sentences.append(f"The losses from which the backward passes begin {how}: {losses.shown}.")
    if numbers and not common:
        sentences.append(
            f"Of the gradients of the loss with respect to the model's results, only those of single numbers were "
            f"compared ({first_of(numbers, _SHOWN)}), because the other results have different shapes on the two sides."
        )
    for one, other in [*common.values()][:1]:
        limit = max(assumed_floor([one.dtype, other.dtype])[0], _SUM)
        if factor is not None and abs(factor - 1) > limit:
            sentences.append(
                f"The gradients of the loss with respect to the model's results are {factor:.6g} times the "
                "baseline's: the loss is a mean on one side and a sum on the other, or its scale or the number of "
                "micro-batches differs."
            )
        elif factor is None:
            sentences.append(_of_differing_loss(ours, theirs))
        elif all(math.prod(each.shape) == 1 for each, _ in common.values()):
            sentences.append("The models return single numbers, such as their losses, from which the gradients differ.")
        else:
            times = ours.scale / theirs.scale
            apart = max(distance(mine.values, other.values * times) for mine, other in common.values())
            how = f"differ, too (rel_l2 {apart:.2g})" if apart > _floor_of_results(ours, theirs) else "agree"
            sentences.append(f"The gradients of the loss with respect to the model's results {how}.")
    if ours.calls != theirs.calls:
        sentences.append(
            f"For one update the baseline calls models {_times_called(ours.calls)} and the target "
            f"{_times_called(theirs.calls)}."
        )
    by_rank = [_changed_afterwards(each) for each in target]
    known = [factor for factor in by_rank if factor is not None]
    if len(known) == len(by_rank) and max(known) - min(known) > _SUM * max(known):
        listed = first_of([f"{factor:.4g} (rank {rank})" for rank, factor in enumerate(known)], _SHOWN)
        sentences.append(
            f"After the backward passes the target's ranks multiply their gradients by different factors, {listed}, as "
            "when each clips by the norm of its own part."
        )
    before, after = _changed_afterwards(ours), _changed_afterwards(theirs)
    if before is not None and after is not None and abs(before / after - 1) > _SUM:
        sentences.append(
            f"After the backward passes the baseline multiplies its gradients by {before:.4g} and the target by "
            f"{after:.4g}, as clipping, a scaler or an average does."
        )
    return sentences


def _single_numbers(baseline: UpdateDescription, target: UpdateDescription) -> list[str]:
    """What was compared of the gradients of the results, in words, if that is single numbers, and the rest was not."""
    common = _common_results(baseline, target)
    is_all = {*common} == {*baseline.of_results, *target.of_results}
    if is_all or any(math.prod(one.shape) != 1 for one, _ in common.values()):
        return []
    times = baseline.scale / target.scale
    return [
        f"{place}: {factor * times:.4g} times the baseline's"
        for place, (one, other) in common.items()
        if (factor := _factor(one, other)) is not None
    ]


def _is_count(factor: float) -> bool:
    """Whether a factor is a whole number, or one divided by a whole number."""
    larger = max(factor, 1 / factor)
    return abs(larger - round(larger)) <= _SUM * larger


def _of_differing_loss(baseline: UpdateDescription, target: UpdateDescription) -> str:
    """A sentence on results that the losses give gradients without a common factor."""
    pairs, times = _common_results(baseline, target), baseline.scale / target.scale
    factors = {place: _factor(one, other) for place, (one, other) in pairs.items()}
    known = {place: factor * times for place, factor in factors.items() if factor is not None}
    if len(known) == len(factors):
        listed = first_of([f"{factor:.4g} ({place})" for place, factor in known.items()], _SHOWN)
        return (
            f"The gradients of the loss with respect to the model's results are {listed} times the baseline's: "
            "micro-batches or terms of the loss are weighted differently."
        )
    apart = {place: distance(one.values, other.values) for place, (one, other) in pairs.items()}
    # A cache has gradients of the model's own attention.
    worst = max(apart, key=lambda place: (not is_in_a_cache(place), apart[place]))
    differ = f"The gradients of the loss with respect to the model's results differ (rel_l2 {apart[worst]:.2g}): the"
    return f"{differ} loss or its labels differ. {rows_of_loss(worst, *pairs[worst])}".rstrip()


def _common_results(
    baseline: UpdateDescription, target: UpdateDescription
) -> dict[str, tuple[TensorSample, TensorSample]]:
    """The gradients of those results that both sides have in the same shape, by their place. If the sides' calls return
    different numbers of results, a number as a place says nothing.
    """
    ours, theirs = (Counter(map(_call_of, side.of_results)) for side in (baseline, target))
    others = {call for call in ours if ours[call] != theirs[call] and min(ours[call], theirs[call]) > 1}
    pairs = {place: (sample, target.of_results.get(place)) for place, sample in baseline.of_results.items()}
    return {
        place: (one, other)
        for place, (one, other) in pairs.items()
        if other is not None
        and one.shape == other.shape
        and not (_call_of(place) in others and _NUMBERED.search(place))
    }


def _floor_of_results(*sides: UpdateDescription) -> float:
    """The rel_l2 that rounding explains in the loss's gradients of the results."""
    return assumed_floor([each.dtype for side in sides for each in side.of_results.values()])[0]


def _call_of(place: str) -> str:
    """The call that has a result at this place, as ``call 1`` has ``call 1['cache'].keys[0]``."""
    return place.partition("[")[0]


def _factor_of_loss(baseline: UpdateDescription, target: UpdateDescription) -> float | None:
    """The factor between both losses' gradients of the results, without scalers; None if there is none."""
    return _factor_of_all([*_common_results(baseline, target).values()], baseline.scale / target.scale)


def _factor_of_all(pairs: Sequence[tuple[TensorSample, TensorSample]], times: float) -> float | None:
    """The common factor of all pairs, multiplied by ``times``; None if they have none."""
    factors = [_factor(one, other) for one, other in pairs]
    known = sorted(factor for factor in factors if factor is not None)
    if not known or len(known) < len(factors) or known[-1] - known[0] > _SUM * known[-1]:
        return None
    return known[len(known) // 2] * times


def _times_called(count: int) -> str:
    return "once" if count == 1 else f"{count} times"


def _changed_afterwards(description: UpdateDescription) -> float | None:
    """The factor by which all gradients changed between the backward passes and the update; None if there is none."""
    samples = [
        *((each, description.gradients.get(name)) for name, each in description.accumulated.items()),
        *description.of_shards,
    ]
    factors = [_factor(one, other) for one, other in samples if other is not None and one.norm]
    known = [factor for factor in factors if factor is not None]
    if not known or len(known) < len(factors) or max(known) - min(known) > _SUM * max(known):
        return None
    return sorted(known)[len(known) // 2]


def _factor(one: TensorSample, other: TensorSample) -> float | None:
    """The factor between two samples of the same direction; None for others."""
    if one.values.shape != other.values.shape or not one.norm or not other.norm:
        return None
    square = float(one.values @ one.values)
    factor = float(one.values @ other.values) / square if square else math.nan
    if not factor > 0:
        return None
    apart = float((other.values - factor * one.values).norm()) / (factor * math.sqrt(square))
    return factor if apart <= max(_SUM, assumed_floor([one.dtype, other.dtype])[0]) else None
