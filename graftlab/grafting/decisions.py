"""Decisions: what the plan in force says of each distinct tag set on this rank, and the address of each call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from threading import get_ident
from typing import Any

import torch

from graftlab.base.tags import (
    RESERVED_TAGS,
    SIDE_NAMES,
    Plain,
    RecomputeStatus,
    TagItems,
    TapKey,
    identity,
    is_no_tag,
    plain,
)
from graftlab.base.world import Direction, Place
from graftlab.errors import TagError
from graftlab.plan.pairs import Pairing, as_tags
from graftlab.plan.plan import Action, GraftPlan
from graftlab.taps.backward import is_backward

# Tag sets that never repeat (a request id, say) must not fill the memory.
_DECISIONS_LIMIT = 100_000
_SEEN_LIMIT = 10_000


def recompute_status() -> RecomputeStatus:
    """``"recompute"`` while activation checkpointing runs a forward again inside the backward pass.

    Hooks and custom backward functions run there too, but without grad mode.
    """
    return "recompute" if is_backward() and torch.is_grad_enabled() else "original"


def sends(place: Place, direction: Direction | None) -> bool:
    """Whether the side of this place gives its tensors away, where they go this way."""
    return direction == ("b2t" if place.side == "baseline" else "t2b")


WarnOnce = Callable[[str, str], None]
"""Told the name of a tap, and what a person should know of it; says each such thing once."""


def given_tags(
    name: str, around: Mapping[str, Any], own: Mapping[str, Any], warn_once: WarnOnce
) -> tuple[dict[str, Any], bool]:
    """A tap's own tags with those set around it, and whether all of them: what can be no tag is left out."""
    given = {**around, **own}
    refused = [tag for tag, value in given.items() if is_no_tag(tag, value)]
    for tag in refused:
        warn_once(
            name,
            f"{tag}={type(given.pop(tag)).__name__} can be no tag, since it would never be the same on both sides; "
            "it is left out. extras= takes what travels to the other side's transform",
        )
    return given, not refused


def all_tags(name: str, given: Mapping[str, Any], place: Place, step: int) -> dict[str, Any]:
    """The tags of a tap that is reached now, as filters see them: those that graftlab sets, and those given."""
    return {
        "name": name,
        "step": step,
        "side": place.side,
        "rank": place.rank,
        "recompute_status": recompute_status(),
        **given,
    }


def paired_tags(tags: Mapping[str, Any], given: Mapping[str, Any], pairing: Pairing) -> dict[str, Any]:
    """The tags of a tap as one of its pairs has them, which are the same on both sides but for its place."""
    own = given if pairing.tags is not None else ()
    return {**{tag: value for tag, value in tags.items() if tag not in own}, **as_tags(pairing)}


@dataclass(frozen=True)
class Decision:
    """What the plan says of one pair of a distinct tag set, worked out once: what is done, and under which address.

    ``tags`` are those that the filters saw, but for the names that ``pairing`` has; of a later call its step and
    ``recompute_status`` may be others. ``name`` is that in the pair's address. ``others`` are those of the tap's
    further pairs.
    """

    action: Action
    sends: bool
    tags: dict[str, Any]
    name: str
    key_tags: tuple[tuple[str, Plain], ...]
    pairing: Pairing | None = None
    others: tuple[Decision, ...] = ()
    own_name: str = ""

    def tags_at(self, step: int, status: str) -> dict[str, Any]:
        """The tags of a call in this step."""
        return {**self.tags, "step": step, "recompute_status": status}


class SeenTags:
    """Reports each tag set that is reached for the first time, whether or not some filter wants it.

    It outlives plans, and knows a limited number of tag sets.
    """

    def __init__(self, report: Callable[[dict[str, Any]], None]) -> None:
        self._report = report
        self._known: set[tuple[str, str, TagItems]] = set()

    def note(self, tags: Mapping[str, Any], own: TagItems) -> None:
        shown = tuple((tag, plain(value)) for tag, value in own)
        known = (str(tags["name"]), str(tags["recompute_status"]), shown)
        if known not in self._known and len(self._known) < _SEEN_LIMIT:
            self._known.add(known)
            self._report({**tags, **dict(shown)})


TapLookup = tuple[Any, ...]
"""How a call of a tap is looked up: its name, the tags around it, and each of its own as a pair."""


class Decisions:
    """One plan's decisions on this rank, each made when it is first needed; None for a tap that is left alone.

    Good for as long as the plan is in force and, where a filter looks at the step, for one step.
    """

    def __init__(self, plan: GraftPlan, place: Place, step: int, seen: SeenTags, warn_once: WarnOnce) -> None:
        self.plan = plan
        self.step = step
        self.known: dict[TapLookup, Decision | None] = {}
        self._place = place
        self._seen = seen
        self._warn_once = warn_once
        # What changes from call to call cannot be remembered.
        self._remembers = "recompute_status" not in plan.looks_at

    def of(self, lookup: TapLookup) -> Decision | None:
        """What the plan says of a tap. Raises :class:`TagError` for a name or tags that it cannot have."""
        try:
            return self.known[lookup]
        except (KeyError, TypeError):
            return self.decide(lookup)

    def decide(self, lookup: TapLookup) -> Decision | None:
        """The same, worked out anew."""
        name, around, *own = lookup
        given, is_whole = given_tags(name, dict(around), dict(own), self._warn_once)
        decision = self._worked_out(name, own, given)
        # What would be remembered holds a tensor that was left out for as long as the plan is in force.
        if self._remembers and is_whole:
            if len(self.known) >= _DECISIONS_LIMIT:
                self.known.clear()
            # Some tag's value may be one that cannot be hashed.
            with contextlib.suppress(TypeError):
                self.known[lookup] = decision
        return decision

    def _worked_out(self, name: str, own: Iterable[tuple[str, Any]], given: dict[str, Any]) -> Decision | None:
        if not isinstance(name, str) or not name:
            raise TagError(f"gl.tap: the name must be a non-empty string, not {name!r}")
        taken = RESERVED_TAGS.intersection(tag for tag, _ in own)
        if taken:
            raise TagError(
                f"gl.tap({name!r}): the tags {sorted(taken)} are set by graftlab itself; give yours another name"
            )
        tags = all_tags(name, given, self._place, self.step)
        self._seen.note(tags, tuple(given.items()))
        decisions = [self._of_pair(tags, given, each) for each in self.plan.pairings(self._place.side, name, given)]
        first, *others = decisions
        # Where ranks may decide differently, a tap that is not wanted here is still counted, and declined.
        if all(each.action == Action() for each in decisions) and not self.plan.rank_dependent:
            return None
        return replace(first, others=tuple(others)) if others else first

    def _of_pair(self, tags: Mapping[str, Any], given: Mapping[str, Any], pairing: Pairing) -> Decision:
        seen = paired_tags(tags, given, pairing)
        action = self.plan.action_for(seen)
        own = identity(seen).tags
        for tag in SIDE_NAMES:
            # Rows have columns for them.
            del seen[tag]
        return Decision(action, sends(self._place, action.direction), seen, pairing.key, own, pairing, (), tags["name"])


class Addresses:
    """The address of each call of a tap that some filter wants, within one step."""

    def __init__(self, step: int, warn_once: WarnOnce) -> None:
        self._step = step
        self._warn_once = warn_once
        # How often, and by which thread last.
        self._reached: dict[tuple[str, tuple[tuple[str, Plain], ...], str], tuple[int, int]] = {}

    def next(self, decision: Decision) -> TapKey:
        """The address of the call that is made now; each further call of one tap has another occurrence."""
        status = recompute_status()
        tap = (decision.name, decision.key_tags, status)
        thread = get_ident()
        occurrence, last = self._reached.get(tap, (0, thread))
        self._reached[tap] = (occurrence + 1, thread)
        if last != thread:
            self._warn_once(
                decision.own_name,
                "two threads reach it in one step, with the same tags. Its calls are paired in the order in which they "
                "come, which may be another on the other side: put gl.tags(lane=...) around what each thread does",
            )
        return TapKey(self._step, *tap, occurrence)

    def of_pairs(self, decision: Decision) -> list[tuple[Decision, TapKey | None]]:
        """The same for each pair that the call is in; None in place of an address for a call that is in none."""
        found: list[tuple[Decision, TapKey | None]] = []
        for each in (decision, *decision.others):
            key = self.next(each)
            wanted = None if each.pairing is None else each.pairing.occurrence
            if wanted is None:
                found.append((each, key))
            elif wanted == key.occurrence:
                # Which call it is on the other side, the pair says.
                found.append((each, key._replace(occurrence=0)))
        return found or [(decision, None)]
