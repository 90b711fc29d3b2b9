"""Matching in rounds: graft what has a partner, run again, and see what the values after it say now."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from graftlab.matching.matcher import match_taps
from graftlab.matching.proposal import Pair, Proposal
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.suspects import NOTE, copies, suspects

Record = Callable[[tuple[Pair, ...]], tuple[Sequence[RecordedTap], Sequence[RecordedTap]]]
"""Runs both sides once and records their taps. The baseline's values are grafted into the target at these pairs; of a
grafted tap it records what the target itself had made."""

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

    Behind a fault no value matches; grafted away, what comes after it does. What a rule proposed and the values then
    say too is ``confirmed``; a fault itself stays by rule, with how far it is off. Where no rule helps on, likely
    partners of the first tap without one are tried, one a run, and kept only if more taps match by value with it than
    without; ``guesses`` of them in a row may be in vain. The fetches are as in :func:`match_taps`.
    """
    match = partial(match_taps, fetch_baseline=fetch_baseline, fetch_target=fetch_target)
    baseline, target = record(())
    proposal = match(baseline, target)
    trusted: list[Pair] = []
    in_vain: set[tuple[str, str]] = set()
    if not proposal.unmatched_target and all(pair.by_value for pair in proposal.pairs):
        # Nothing is behind a fault, so there is nothing to look for.
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
        # A tap that the values have not confirmed is no partner; so the first of those is looked at too.
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
    """What is grafted in the next round: never a guess that nothing has confirmed."""
    return tuple(pair for pair in proposal.pairs if pair.sureness != "guess")


def _matched(proposal: Proposal, without: Callable[[Pair], bool] = lambda pair: False) -> int:
    return len({pair.target for pair in proposal.graftable if not without(pair)})


def _more_rules(following: Proposal, proposal: Proposal) -> bool:
    known = {_key(pair) for pair in proposal.pairs if pair.sureness != "guess"}
    return any(_key(pair) not in known for pair in following.pairs if pair.sureness != "guess")


def _keep(following: Proposal, before: Proposal) -> Proposal:
    """A round's pairs, and those by value of the rounds before for taps that now have none."""
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
