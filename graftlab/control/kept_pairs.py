"""The kept pairs of tensors: finding them on the ranks, and advice where a tap has none."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from graftlab.base.tags import PLACE_TAGS, plain
from graftlab.base.text import numbered
from graftlab.control.pickles import open_value, require_trusted
from graftlab.control.queries import AskRank
from graftlab.errors import SessionError
from graftlab.filters.expressions import compile_filter
from graftlab.grafting.kept import OCCURRENCE
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import (
    AskKeptInput,
    AskKeptMap,
    AskKeptPair,
    AskKeptTags,
    KeptTags,
    KeptValue,
    Pickled,
)

if TYPE_CHECKING:
    import torch

    from graftlab.diffs.maps import DifferenceMap

# Taps that a message lists.
_NAMED = 6


class PairsOnRanks:
    """Finds pairs that ranks keep because the ``keep`` filter matched.

    ``name``, ``rank`` (the receiving rank's) and ``tags`` choose the newest pair that has them. If there is none,
    methods raise :class:`SessionError` with a list of what is kept and the text of ``advise(name, tags)``.
    """

    def __init__(
        self,
        ranks: Sequence[RankHandle],
        ask: AskRank,
        advise: Callable[[str, Mapping[str, Any]], str] = lambda name, tags: "",
    ) -> None:
        self._ranks = ranks
        self._ask = ask
        self._advise = advise

    def tags(self, failed: bool) -> list[dict[str, Any]]:
        """The tags of every pair, oldest first, rank by rank; with ``failed`` also of inputs whose transform failed."""
        asked = AskKeptTags(failed)
        return [tags for rank in self._receivers() for tags in self._ask(rank, asked, KeptTags).tags]

    def pair(self, name: str, rank: int | None, tags: Mapping[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Both tensors, ``(baseline, target)``, on the CPU."""
        found: tuple[torch.Tensor, torch.Tensor] = open_value(*self._find(AskKeptPair(name, _plain(tags)), rank))
        return found

    def difference_map(
        self, name: str, rank: int | None, tags: Mapping[str, Any], dims: Sequence[int] | None
    ) -> DifferenceMap:
        """The difference map of the pair."""
        # A rank that cannot read a message ends, so a value that a user typed is checked first.
        try:
            chosen = None if dims is None else tuple(operator.index(dim) for dim in dims)
        except TypeError as error:
            raise SessionError(f"dims={dims!r}: give one or two axes of {name!r}, such as (0, 1)") from error
        found: DifferenceMap = open_value(*self._find(AskKeptMap(name, _plain(tags), chosen), rank))
        return found

    def packed_input(self, name: str, rank: int | None, tags: Mapping[str, Any]) -> tuple[RankHandle, Pickled]:
        """The rank that has the pair, and a pickled :class:`graftlab.grafting.kept.KeptPair` for another process."""
        process, packed = self._find(AskKeptInput(name, _plain(tags)), rank)
        require_trusted(process)
        return process, packed

    def newest(self, name: str, rank: int | None, tags: Mapping[str, Any]) -> dict[str, Any] | None:
        """The tags of the pair that :meth:`pair` finds now; None where it raises."""
        holders = self._holders(name, rank, _plain(tags), failed=False)
        return next(iter(holders.values()), None)

    def _holders(
        self, name: str, rank: int | None, tags: Mapping[str, Any], failed: bool
    ) -> dict[RankHandle, dict[str, Any] | None]:
        """The ranks with such a pair, the newest first, and its tags; None for a rank that did not keep its newest."""
        held: dict[RankHandle, dict[str, Any]] = {}
        gone: dict[RankHandle, int] = {}

        for process in self._receivers():
            if rank in (None, process.place.rank):
                answer = self._ask(process, AskKeptTags(failed), KeptTags)
                held.update((process, found) for found in answer.tags if _fits(found, name, tags))
                for found in answer.missing:
                    if _fits(found, name, tags):
                        gone[process] = max(found["step"], gone.get(process, -1))
        # A tap grafted t2b is kept by the other side, so the newest pair of both sides counts. A rank whose newer pair
        # did not fit its budget is asked first, because its answer explains that.
        asked = sorted(held, key=lambda process: -held[process]["step"])
        later = [process for process, step in gone.items() if asked and step > held[asked[0]]["step"]]
        holders: dict[RankHandle, dict[str, Any] | None] = dict.fromkeys(sorted(later, key=lambda each: -gone[each]))
        return holders | {process: held[process] for process in asked if process not in holders}

    def _find(self, question: AskKeptPair | AskKeptInput | AskKeptMap, rank: int | None) -> tuple[RankHandle, Pickled]:
        name, tags = question.name, question.tags
        asked = self._holders(name, rank, tags, isinstance(question, AskKeptInput))
        for process in asked or [each for each in self._receivers() if rank in (None, each.place.rank)]:
            packed = self._ask(process, question, KeptValue).packed
            if packed is not None:
                return process, packed
        every = self.tags(failed=False)
        kept = dict.fromkeys(str(each["name"]) for each in every)
        wanted = ", ".join([repr(name), *(f"{tag}={value!r}" for tag, value in tags.items())])
        others = {tag: value for tag, value in tags.items() if tag != "step"}
        steps = sorted({each["step"] for each in every if _fits(each, name, others) and rank in (None, each["rank"])})
        if steps:
            counted = f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
            raise SessionError(f"no pair of tensors is kept for {wanted}; this tap has pairs of {counted}")
        if rank is not None and (ranks := {each["rank"] for each in every if _fits(each, name, tags)}):
            has = f"this tap has pairs of {numbered('rank', ranks)}"
            raise SessionError(f"no pair of tensors is kept for {wanted} on rank {rank}; {has}")
        more = f" and {len(kept) - _NAMED} others" if len(kept) > _NAMED else ""
        held = f"; kept are {[*kept][:_NAMED]}{more}" if kept else ", nor for any other tap"
        raise SessionError(f"no pair of tensors is kept for {wanted}{held}. {self._advise(name, tags)}")

    def _receivers(self) -> list[RankHandle]:
        # The target's ranks receive at all taps except those that are grafted t2b.
        return sorted((r for r in self._ranks if r.alive), key=lambda r: (r.place.side == "baseline", r.place.rank))


def _fits(found: Mapping[str, Any], name: str, tags: Mapping[str, Any]) -> bool:
    known = {OCCURRENCE: 0, **found}
    return known["name"] == name and all(known.get(tag) == value for tag, value in tags.items())


def _plain(tags: Mapping[str, Any]) -> dict[str, Any]:
    return {tag: plain(value) for tag, value in tags.items()}


def keep_advice(plan: GraftPlan, taps: Sequence[Mapping[str, Any]], name: str, tags: Mapping[str, Any]) -> str:
    """A sentence on how to keep a pair of this tap with these tags; ``taps`` are those seen so far."""
    names = list(dict.fromkeys(str(tap["name"]) for tap in taps))
    if names and name not in names:
        close = get_close_matches(name, names, n=1)
        return f"No tap seen so far is called {name!r}" + (f"; did you mean {close[0]!r}?" if close else "")
    # A tap's place and step are those of its first call, not those of the requested pair.
    wanted = {tag: plain(value) for tag, value in tags.items() if tag not in (*PLACE_TAGS, OCCURRENCE)}
    meant = [tap for tap in taps if tap["name"] == name and all(plain(tap.get(k)) == v for k, v in wanted.items())]
    if names and not meant:
        having = ", ".join(f"{tag}={value!r}" for tag, value in wanted.items())
        return f"No tap {name!r} seen so far has {having}"
    keep = (plan.keep or "").strip()
    if not keep:
        return "Set session.edit(keep=...) to a filter that matches the tap, and run again"
    if any(compile_filter(keep).matches(tap) for tap in meant):
        why = "matches the tap, but no pair has been kept since that plan took effect; run again"
        why += ", unless only one side has this tap"
    else:
        why = "does not match the tap; widen it with session.edit(keep=...), and run again"
    return f"The plan's keep filter, {keep}, {why}"
