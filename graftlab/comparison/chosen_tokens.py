"""Tokens that differ before a call: decides whether rounding has flipped the choice between two nearly equal logits."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from graftlab.base.text import counted
from graftlab.diffs.rounding import assumed_floor
from graftlab.ranks.call_description import CallDescription

# Logits are a tie if they are no further apart than this many times the sides' mean difference over the row: rounding
# moves all logits, and moving a single one is a mistake.
_OF_MEAN = 8.0
_MOST_SHOWN = 3


@dataclass(frozen=True)
class ChosenToken:
    """One token that differs, with the row of logits from which it was chosen, in float64.

    ``limit`` is how far apart rounding may move two logits of this row.
    """

    row: int
    baseline: int
    target: int
    apart: float
    limit: float
    is_targets_largest: bool

    @property
    def is_tie(self) -> bool:
        """Whether each side took its largest logit, and rounding explains that they are different ones."""
        return self.is_targets_largest and self.apart <= self.limit

    @property
    def text(self) -> str:
        return f"row {self.row} ({self.baseline} on the baseline, {self.target} on the target)"


def chosen_tokens(
    before: tuple[CallDescription, CallDescription], now: tuple[CallDescription, CallDescription], threshold: float
) -> list[ChosenToken]:
    """The whole numbers that differ among the arguments of a call, as choices from the results of the previous call.

    Each pair has the baseline's call and the target's. An empty list means that these are no such choices: the
    baseline's are not the places of its largest logits, or other arguments differ. Arguments of different names are
    such choices only if both sides' are the places of their largest logits.
    """
    ours, theirs = (each.whole_numbers for each in now)
    results = before[0].plain, before[1].plain
    found = []
    differing = [path for path in ours if path in theirs and not torch.equal(ours[path], theirs[path])]
    for path in differing:
        chosen = (
            _chosen(ours[path], theirs[path], *results, threshold) if ours[path].shape == theirs[path].shape else []
        )
        if not chosen:
            return []
        found += chosen
    if differing:
        return found
    left = (
        [each for path, each in one.items() if path not in other] for one, other in ((ours, theirs), (theirs, ours))
    )
    for one, other in itertools.product(*left):
        if one.squeeze().shape == other.squeeze().shape:
            shape = max(one.shape, other.shape, key=len)
            found = _chosen(one.reshape(shape), other.reshape(shape), *results, threshold)
            if found and all(each.is_targets_largest for each in found):
                return found
    return []


def _chosen(
    baseline: Tensor, target: Tensor, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor], threshold: float
) -> list[ChosenToken]:
    if not 1 <= baseline.dim() <= 2:
        return []
    mine, other = (each.reshape(-1, each.shape[-1]) for each in (baseline, target))
    if not torch.equal(mine[:, :-1], other[:, :-1]):
        # Earlier tokens were chosen before calls that are no longer known.
        return []
    for path, tensor in ours.items():
        same = [theirs[path]] if path in theirs else []
        unnamed = [each for name, each in theirs.items() if name not in ours]
        for partner in [each for each in same if each.shape == tensor.shape] if same else unnamed:
            if not (tensor.is_floating_point() and partner.is_floating_point()):
                continue
            logits, others = (_last_rows(each, len(mine)) for each in (tensor, partner))
            if logits is None or others is None or logits.shape != others.shape:
                continue
            if not _are_largest(logits, mine[:, -1]):
                continue
            dtypes = [str(each.dtype).removeprefix("torch.") for each in (tensor, partner)]
            rounding = 2 * threshold * assumed_floor(dtypes)[0]
            last = zip(mine[:, -1].tolist(), other[:, -1].tolist(), strict=True)
            chosen = [(row, *tokens) for row, tokens in enumerate(last) if tokens[0] != tokens[1]]
            return [_of_row(row, logits[row], others[row], one, two, rounding) for row, one, two in chosen]
    return []


def _are_largest(logits: Tensor, tokens: Tensor) -> bool:
    """Whether each row's token has the row's largest logit, which several tokens may have."""
    if int(tokens.min()) < 0 or int(tokens.max()) >= logits.shape[-1]:
        return False
    return torch.equal(logits.gather(-1, tokens[:, None].long())[:, 0], logits.amax(-1))


def _last_rows(tensor: Tensor, rows: int) -> Tensor | None:
    """The logits from which each row's next token is chosen, in float64; None if the tensor has none."""
    if tensor.dim() == 3 and len(tensor) == rows:
        tensor = tensor[:, -1]
    elif tensor.dim() == 2 and rows == 1:
        tensor = tensor[-1:]
    elif tensor.dim() == 1 and rows == 1:
        tensor = tensor[None]
    if tensor.dim() != 2 or len(tensor) != rows or not tensor.shape[-1]:
        return None
    return tensor.double()


def _of_row(row: int, logits: Tensor, others: Tensor, baseline: int, target: int, rounding: float) -> ChosenToken:
    finite = logits.isfinite() & others.isfinite()
    size, moved = (float(each[finite].square().mean().sqrt()) for each in (logits, logits - others))
    chosen = torch.tensor([target], device="cpu")
    is_largest = _are_largest(others[None], chosen)
    apart = float(logits[baseline] - logits[target]) if 0 <= target < len(logits) else float("inf")
    return ChosenToken(row, baseline, target, apart, min(rounding * size, _OF_MEAN * moved), is_largest)


def sentence_on(tokens: Sequence[ChosenToken], number: int, model: str) -> str:
    """A sentence on the choice of tokens before call ``number``, of a model of this class."""
    wrong = [each for each in tokens if not each.is_tie]
    shown = wrong or tokens
    rows = ", ".join(each.text for each in shown[:_MOST_SHOWN])
    more = f" and {counted(len(shown) - _MOST_SHOWN, 'more row')}" if len(shown) > _MOST_SHOWN else ""
    begins = f"Before call {number}, of {model}, the tokens differ in {rows}{more}"
    if not wrong:
        first = tokens[0]
        return (
            f"{begins}, by a near tie: in the previous call, the baseline's logits of the two tokens are "
            f"{first.apart:.2g} apart, rounding explains up to {first.limit:.2g}, and each side took its largest. "
            "Later differences are inherited from this choice."
        )
    first = wrong[0]
    if not first.is_targets_largest:
        return (
            f"{begins}, and the target's token does not have the largest of its logits: the code that chooses tokens "
            "differs."
        )
    return (
        f"{begins}, and that is not a near tie: in the previous call, the baseline's logits of the two tokens are "
        f"{first.apart:.2g} apart, and rounding explains only {first.limit:.2g}."
    )
