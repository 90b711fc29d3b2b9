"""Matching in rounds: graft taps that have a partner, run again, and match the values of later taps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from graftlab.matching.matcher import match_taps
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.suspects import NOTE, copies, suspects

Record = Callable[[tuple[Pair, ...]], tuple[Sequence[RecordedTap], Sequence[RecordedTap]]]
"""Runs both sides once and records their taps, with the baseline's values grafted into the target at these pairs. For a
grafted tap it records the target's own value."""

ROUNDS = 12
GUESSES = 6


def match_in_rounds(
    record: Record,
    rounds: int = ROUNDS,
    guesses: int = GUESSES,
    *,
    fetch_baseline: Fetch | None = None,
    fetch_target: Fetch | None = None,
) -> Proposal:
    """Match, graft what is matched by value or by rule, run again, until nothing changes.

    No value after a fault matches until the fault is grafted away. A pair by rule whose values then match is
    ``confirmed``; the fault itself stays by rule, with its distance. If no rule helps further, likely partners of the
    first tap without one are tried, one a run, and kept only if more taps match by value with it than without. Matching
    ends after ``guesses`` failures in a row. The fetches are as in :func:`match_taps`.
    """
    match = partial(match_taps, fetch_baseline=fetch_baseline, fetch_target=fetch_target)
    baseline, target = record(())
    proposal = match(baseline, target)
    trusted: list[Pair] = []
    in_vain: set[tuple[str, str]] = set()
    if not proposal.unmatched_target and all(pair.by_value for pair in proposal.pairs):
        # Everything matches by value, so no fault hides any tap.
        return proposal
    left, tries = rounds, 0
    while left:
        baseline, target = record(_grafts(proposal))
        following = match(baseline, target, before=proposal, trusted=trusted)
        if _matched(following) > _matched(proposal) or _more_rules(following, proposal):
            proposal = _keep(following, proposal)
            left -= 1
            continue
        proposal = _keep(following, proposal)
        # Taps that the values have not confirmed are tried too.
        guess = next(suspects(baseline, target, proposal, trusted, in_vain, fetch_baseline, fetch_target), None)
        if guess is None or tries >= guesses:
            break
        baseline, target = record((*_grafts(proposal), guess))
        with_guess = match(baseline, target, before=proposal, trusted=[*trusted, guess])
        is_copy = copies(baseline, guess)
        if _matched(with_guess, is_copy) > _matched(proposal, is_copy):
            trusted.append(replace(guess, note=NOTE))
            proposal = _keep(match(baseline, target, before=proposal, trusted=trusted), proposal)
            left, tries = rounds, 0
        else:
            in_vain.add(_key(guess))
            tries += 1
    return proposal


def _key(pair: Pair) -> tuple[str, str]:
    return pair.baseline, pair.target


def _grafts(proposal: Proposal) -> tuple[Pair, ...]:
    """The pairs to graft in the next round: no unconfirmed guesses."""
    return tuple(pair for pair in proposal.pairs if pair.sureness != "guess")


def _matched(proposal: Proposal, without: Callable[[Pair], bool] = lambda pair: False) -> int:
    return len({pair.target for pair in proposal.graftable if not without(pair)})


def _more_rules(following: Proposal, proposal: Proposal) -> bool:
    known = {_key(pair) for pair in proposal.pairs if pair.sureness != "guess"}
    return any(_key(pair) not in known for pair in following.pairs if pair.sureness != "guess")


def _keep(following: Proposal, before: Proposal) -> Proposal:
    """A round's pairs, and earlier pairs by value for taps that now have none."""
    have = {pair.target for pair in following.pairs if pair.sureness != "guess"}
    kept = [pair for pair in before.graftable if pair.target not in have]
    names = {pair.target for pair in kept}
    pairs = [pair for pair in following.pairs if pair.target not in names] + kept
    order = {pair.target: place for place, pair in enumerate(following.pairs)}
    pairs.sort(key=lambda pair: order.get(pair.target, len(order)))
    left = {pair.baseline for pair in pairs}
    return replace(
        following,
        pairs=tuple(pairs),
        unmatched_target={name: why for name, why in following.unmatched_target.items() if name not in names},
        unmatched_baseline={name: why for name, why in following.unmatched_baseline.items() if name not in left},
    )
