"""Calls that do different work: batches of different sizes, or different tokens, as where one side splits a prefill."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from torch import Tensor

from graftlab.ranks.call_description import CallDescription

_FEWEST = 3
"""Whole numbers with fewer distinct values, such as those of a mask, are no tokens."""


def other_batch(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> list[str]:
    """A sentence if the results differ only in their numbers of rows, as those of batches of different sizes do."""
    shapes = _shapes_of_one_value(baseline[0].returned, target[0].returned)
    # The ranks of a side may each have a part of the batch.
    if len(baseline) != 1 or len(target) != 1 or not shapes:
        return []
    if any(one[1:] != other[1:] or one[:1] == other[:1] for one, other in shapes):
        return []
    return [
        f"The calls have batches of different sizes, {shapes[0][0][0]} on the baseline and {shapes[0][1][0]} on the "
        "target, so they do different work: let both sides call their models with the same batch."
    ]


def _shapes_of_one_value(
    ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]
) -> list[tuple[Sequence[int], Sequence[int]]]:
    """The shapes of values of one name, or of the only value of one side and the only one as wide of the other."""
    common = [path for path in ours if path in theirs]
    if common:
        return [(ours[path].shape, theirs[path].shape) for path in common if ours[path].dim()]
    fewer, more = (ours, theirs) if len(ours) < len(theirs) else (theirs, ours)
    if len(fewer) != 1:
        return []
    (alone,) = fewer.values()
    wide = [each for each in more.values() if each.dim() > 1 and each.shape[-1] == alone.shape[-1:].numel()]
    if len(wide) != 1 or alone.dim() < 2:
        return []
    # Logits of one position may have a dimension for it.
    one, other = ([size for size in each.shape if size != 1] for each in (alone, wide[0]))
    if not (one and other):
        # A single number may be of any batch.
        return []
    return [(one, other) if fewer is ours else (other, one)]


def other_tokens(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> list[str]:
    """A sentence if the calls are given different numbers of tokens, and neither side has all those of the other."""
    if not given_other_tokens(baseline, target):
        return []
    counts = [max(each.numel() for each in _tokens(side[0])) for side in (baseline, target)]
    if counts[0] == counts[1]:
        return []
    return [
        f"The calls are given different tokens, {counts[0]} on the baseline and {counts[1]} on the target, so they do "
        "different work, as where one side computes a prefill in chunks: let both sides call their models with the "
        "same tokens, or compare two functions that return the results of all calls."
    ]


def given_other_tokens(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> bool:
    """Whether each side is given tokens that the other is not. One without a cache is also given the earlier ones."""
    # The ranks of a side may each have a part of them.
    if len(baseline) != 1 or len(target) != 1:
        return False
    ours, theirs = _tokens(baseline[0]), _tokens(target[0])
    return bool(ours and theirs) and not any(_contains(one, other) for one in ours for other in theirs)


def given_equal_tokens(baseline: Sequence[CallDescription], target: Sequence[CallDescription]) -> bool:
    """Whether each rank of the target is given the tokens of the baseline's rank, but for padding of one number.

    Of whole numbers that both sides are given, such as tokens and lengths, all must be equal; one side may have others.
    """
    if len(baseline) != 1 or not target:
        return False
    ours = _tokens(baseline[0])
    return all(_all_are_given(*sorted((ours, _tokens(each)), key=len)) for each in target)


def _all_are_given(fewer: Sequence[Tensor], more: Sequence[Tensor]) -> bool:
    return bool(fewer) and all(any(_are_equal(one, other) for other in more) for one in fewer)


def _are_equal(one: Tensor, other: Tensor) -> bool:
    """Whether these are the same numbers, each as often, but for one that the larger has more often."""
    more, fewer = (Counter(each.tolist()) for each in sorted((one, other), key=Tensor.numel, reverse=True))
    return not fewer - more and len(more - fewer) <= 1


def _tokens(call: CallDescription) -> list[Tensor]:
    """The whole numbers among a call's arguments that may be tokens, as positions of unlike calls often are alike."""
    found = {
        path: each.flatten()
        for path, each in call.whole_numbers.items()
        if path not in call.untapped_numbers and len(set(each.flatten().tolist())) >= min(_FEWEST, max(each.numel(), 1))
    }
    return [each for path, each in found.items() if "position" not in path] or list(found.values())


def _contains(one: Tensor, other: Tensor) -> bool:
    """Whether one of two tensors has all numbers of the other, each as often."""
    more, fewer = (one, other) if one.numel() >= other.numel() else (other, one)
    return Counter(fewer.tolist()) <= Counter(more.tolist())
