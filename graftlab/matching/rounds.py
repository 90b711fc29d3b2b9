"""Matches in rounds: grafts taps that have a partner, runs again, and matches the values of later taps."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

from graftlab.base.world import Side
from graftlab.diffs.rounding import roundoff
from graftlab.matching.aligned_taps import AlignedTaps, Sides
from graftlab.matching.matcher import match_taps
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import Fetch, RecordedTap
from graftlab.matching.row_orders import CallKey, call_of, has_distinct_rows, row_orders
from graftlab.matching.search import applied
from graftlab.matching.suspects import NOTE, copies, suspects
from graftlab.matching.weight_taps import with_weights, without_weights

Record = Callable[[tuple[Pair, ...]], tuple[Sequence[RecordedTap], Sequence[RecordedTap]]]
"""Runs both sides once and records their taps, with the baseline's values grafted into the target at these pairs. For a
grafted tap it records the target's own value.
"""

INTERRUPTED = "the match was interrupted; this is what was found by then, and later taps may have partners too"
"""The notice of an incomplete proposal."""

ROUNDS = 12
GUESSES = 6
# A tap is no partner of one that another tap is nearer to by this factor, and by more than rounding.
_NEARER = 3.0
_LEAST = 1e-5


def match_in_rounds(
    record: Record,
    rounds: int = ROUNDS,
    guesses: int = GUESSES,
    *,
    varies: bool = False,
    fetch_baseline: Fetch | None = None,
    fetch_target: Fetch | None = None,
) -> Proposal:
    """Match, graft the pairs by value and by rule, and run again, until nothing changes.

    After a fault no values match until the fault is grafted away. A pair by rule whose values match then is
    ``confirmed``; the fault itself stays by rule, with its distance. When no rule helps any more, likely partners of
    the first tap without one are tried, one per run. A partner is kept only if more taps match by value with it.
    Matching ends after ``guesses`` failures in a row, or at an interrupt, with the pairs known by then. With ``varies``
    each run may have a different batch. The fetches are as in :func:`match_taps`.
    """
    match = partial(match_taps, fetch_baseline=fetch_baseline, fetch_target=fetch_target)
    every = record(())
    baseline, target = map(without_weights, every)

    def values(grafts: tuple[Pair, ...]) -> Sides:
        ours, theirs = record(grafts)
        return without_weights(ours), without_weights(theirs)

    proposal, rows = _first(baseline, target, match, {"baseline": fetch_baseline, "target": fetch_target})
    if rows is not None:
        found = _repeat_rounds(
            _aligned(values, rows, varies), rows.of(baseline, target), proposal, match, rounds, guesses
        )
        proposal = rows.real_proposal(found)
    else:
        proposal = _repeat_rounds(values, (baseline, target), proposal, match, rounds, guesses)
    return with_weights(proposal, *every, fetch_baseline, fetch_target)


def match_once(
    baseline: Sequence[RecordedTap],
    target: Sequence[RecordedTap],
    *,
    fetch_baseline: Fetch | None = None,
    fetch_target: Fetch | None = None,
) -> Proposal:
    """Match the taps of one run. If rows are in different orders, their order is found first."""
    match = partial(match_taps, fetch_baseline=fetch_baseline, fetch_target=fetch_target)
    ours, theirs = without_weights(baseline), without_weights(target)
    proposal, rows = _first(ours, theirs, match, {"baseline": fetch_baseline, "target": fetch_target})
    proposal = proposal if rows is None else rows.real_proposal(proposal)
    return with_weights(proposal, baseline, target, fetch_baseline, fetch_target)


# If a smaller share of the target's taps matches by value, the rows may be in a different order.
_FEW = 0.9
# How many taps of a call show whether its rows are in the same order, and among how many they are looked for.
_FIRST, _LOOKED_AT = 8, 32


def _first(
    baseline: Sequence[RecordedTap],
    target: Sequence[RecordedTap],
    match: Callable[..., Proposal],
    fetch: Mapping[Side, Fetch | None],
) -> tuple[Proposal, AlignedTaps | None]:
    """The proposal of one run; and the taps in another row order, if more of them match in it."""
    proposal = match(baseline, target)
    if _matched(proposal) >= _FEW * len(target):
        return proposal, None
    orders = row_orders(baseline, _of_unmatched_calls(target, proposal, fetch["target"]), fetch)
    if not orders:
        return proposal, None
    rows = AlignedTaps(orders, fetch)
    found = match(*rows.of(baseline, target))
    real = {rows.real(pair).target for pair in found.graftable}
    return (found, rows) if len(real) > _matched(proposal) else (proposal, None)


def _of_unmatched_calls(target: Sequence[RecordedTap], proposal: Proposal, fetch: Fetch | None) -> list[RecordedTap]:
    """The target's taps of calls whose first taps do not match as wholes, so that their rows may differ.

    Equal rows are equal in any order, as where a guided sampler has each of them twice.
    """
    wholes = {pair.target for pair in proposal.graftable if not pair.layout.leaves_out}
    first: dict[CallKey, list[bool]] = defaultdict(list)
    tried: Counter[CallKey] = Counter()
    for tap in target:
        call = call_of(tap.name)
        if len(tap.shape) > 1 and len(first[call]) < _FIRST:
            tried[call] += 1
            if tried[call] > _LOOKED_AT or has_distinct_rows(tap, fetch):
                first[call].append(tap.name in wholes)
    same = {call for call, found in first.items() if 2 * sum(found) > len(found)}
    return [tap for tap in target if call_of(tap.name) not in same]


def _aligned(record: Record, rows: AlignedTaps, varies: bool) -> Record:
    def aligned(grafts: tuple[Pair, ...]) -> tuple[Sequence[RecordedTap], Sequence[RecordedTap]]:
        if not varies:
            return rows.of(*record(tuple(map(rows.real, grafts))))
        # The next batch has different lengths, or a different order.
        taps = record(tuple(rows.ruled(grafts)[0]))
        rows.orders = row_orders(*taps, rows.fetch) or rows.orders
        return rows.of(*taps)

    return aligned


def _repeat_rounds(
    record: Record,
    taps: tuple[Sequence[RecordedTap], Sequence[RecordedTap]],
    proposal: Proposal,
    match: partial[Proposal],
    rounds: int,
    guesses: int,
) -> Proposal:
    baseline, target = taps
    fetch = match.keywords["fetch_baseline"], match.keywords["fetch_target"]
    trusted: list[Pair] = []
    in_vain: set[tuple[str, str]] = set()
    known = _known(proposal)
    # If everything matches by value, no fault hides a tap.
    is_complete = not proposal.unmatched_target and all(pair.by_value for pair in proposal.pairs)
    left, tries = 0 if is_complete else rounds, 0
    grafted: set[tuple[str, str, str, Side]] | None = None
    following = proposal
    try:
        while left:
            if grafted != (wanted := {(*_key(pair), pair.layout.text, pair.whole) for pair in _grafts(proposal)}):
                baseline, target = record(_grafts(proposal))
                following, grafted = match(baseline, target, before=proposal, trusted=trusted), wanted
            if _matched(following) > _matched(proposal) or _known(following) - known:
                # Pairs that come and go are new once.
                known |= _known(following)
                proposal = _keep(following, proposal)
                left -= 1
                continue
            proposal = _keep(following, proposal)
            # Taps whose pairs no values have confirmed are tried too.
            guess = next(suspects(baseline, target, proposal, trusted, in_vain, *fetch), None)
            if guess is None or tries >= guesses:
                break
            ours, theirs = record((*_grafts(proposal), guess))
            with_guess = match(ours, theirs, before=proposal, trusted=[*trusted, guess])
            is_copy = copies(ours, guess)
            if _matched(with_guess, is_copy) > _matched(proposal, is_copy):
                trusted.append(replace(guess, note=NOTE))
                proposal = _keep(match(ours, theirs, before=proposal, trusted=trusted), proposal)
                left, tries = rounds, 0
            else:
                in_vain.add(_key(guess))
                tries += 1
        return _without_lookalikes(record, taps, proposal)
    except KeyboardInterrupt:
        return replace(proposal, notices=(*proposal.notices, INTERRUPTED))


def _without_lookalikes(record: Record, taps: Sides, proposal: Proposal) -> Proposal:
    """The proposal without target taps that only resemble a baseline tap, if another tap is much nearer to it.

    Two places of one residual stream may be nearer to each other than the limit for 16 bits. A graft of one at the
    other makes the taps that follow differ, so the distances are those of a run without grafts of these taps.
    """
    rounding = [{tap.name: 2 * roundoff(str(tap.dtype).removeprefix("torch.")) for tap in side} for side in taps]
    sharing: dict[str, list[Pair]] = defaultdict(list)
    for pair in proposal.graftable:
        sharing[pair.baseline].append(pair)

    def rounds_by(pair: Pair) -> float:
        return max(rounding[0][pair.baseline], rounding[1][pair.target], _LEAST)

    doubted = [
        pair
        for own in sharing.values()
        if len(own) > 1 and any(pair.rel is not None and pair.rel > rounds_by(pair) for pair in own)
        for pair in own
    ]
    if not doubted:
        return proposal
    ours, theirs = record(tuple(pair for pair in _grafts(proposal) if pair not in doubted))
    mine, others = ({tap.name: tap for tap in side} for side in (ours, theirs))
    apart: dict[tuple[str, str], float] = {}
    for pair in doubted:
        one, other = mine.get(pair.baseline), others.get(pair.target)
        rel = None if one is None or other is None or pair.whole == "target" else applied(pair.layout, one, other)
        if rel is not None:
            apart[_key(pair)] = rel
    gone: dict[str, str] = {}
    for name in dict.fromkeys(pair.baseline for pair in doubted):
        known = {pair.target: apart[_key(pair)] for pair in sharing[name] if _key(pair) in apart}
        nearest = min(known, key=known.__getitem__, default=None)
        for pair in sharing[name]:
            if nearest and known.get(pair.target, 0.0) > max(_NEARER * known[nearest], rounds_by(pair)):
                gone[pair.target] = f"its values are near those of {name}, and {nearest} is much nearer"
    kept = tuple(
        replace(pair, rel=apart.get(_key(pair), pair.rel)) for pair in proposal.pairs if pair.target not in gone
    )
    return replace(proposal, pairs=kept, unmatched_target={**proposal.unmatched_target, **gone})


def _key(pair: Pair) -> tuple[str, str]:
    return pair.baseline, pair.target


def _grafts(proposal: Proposal) -> tuple[Pair, ...]:
    """The pairs to graft in the next round: no unconfirmed guesses."""
    return tuple(pair for pair in proposal.pairs if pair.sureness != "guess")


def _matched(proposal: Proposal, without: Callable[[Pair], bool] = lambda pair: False) -> int:
    return len({pair.target for pair in proposal.graftable if not without(pair)})


def _known(proposal: Proposal) -> set[tuple[str, str]]:
    return {_key(pair) for pair in _grafts(proposal)}


def _keep(following: Proposal, before: Proposal) -> Proposal:
    """A round's pairs, and earlier pairs by value for taps that have none now."""
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
