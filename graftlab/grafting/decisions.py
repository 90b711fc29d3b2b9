"""Decisions of the plan in force about each distinct tag set on this rank, and the addresses of calls."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from threading import get_ident
from types import FrameType
from typing import Any, NamedTuple

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
from graftlab.errors import GraftOverlapError, TagError
from graftlab.filters.expressions import CheckpointedStatus
from graftlab.plan.pairs import Pairing, as_tags
from graftlab.plan.plan import Action, GraftPlan
from graftlab.taps.backward import is_backward

# Tag sets that never repeat (with a request id, for example) must not fill the memory.
_DECISIONS_LIMIT = 100_000
_SEEN_LIMIT = 10_000


def recompute_status() -> RecomputeStatus:
    """Return ``"recompute"`` while activation checkpointing repeats a forward pass inside the backward pass.

    Hooks and custom backward functions run there too, but without grad mode.
    """
    return "recompute" if is_backward() and torch.is_grad_enabled() else "original"


_CHECKPOINTING = re.compile(
    r"/(torch/utils/checkpoint|megatron/core/tensor_parallel/random|activation_checkpointing/checkpointing)\.py$"
)


def is_checkpointed() -> bool:
    """Whether this code runs inside activation checkpointing of torch, Megatron or DeepSpeed."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if _CHECKPOINTING.search(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def sends(place: Place, direction: Direction | None) -> bool:
    """Whether the side of this place sends its tensors in this direction."""
    return direction == ("b2t" if place.side == "baseline" else "t2b")


WarnOnce = Callable[[str, str], None]
"""Shows a warning about the tap of a given name, once per text."""


def given_tags(
    name: str, around: Mapping[str, Any], own: Mapping[str, Any], warn_once: WarnOnce | None
) -> tuple[dict[str, Any], bool]:
    """Merge a tap's own tags with those set around it, without invalid ones; also returns whether all are valid.

    ``warn_once`` is None in repeated runs, because an earlier run has shown the warnings.
    """
    given = {**around, **own}
    refused = [tag for tag, value in given.items() if is_no_tag(tag, value)]
    for tag in refused:
        kind = type(given.pop(tag)).__name__
        if warn_once is not None:
            warn_once(
                name,
                f"{tag}={kind} cannot be a tag, since it would never be equal on both sides; it is left out. Pass data "
                "for the other side's transform as extras=",
            )
    return given, not refused


def all_tags(name: str, given: Mapping[str, Any], place: Place, step: int) -> dict[str, Any]:
    """Return the tags of the current call as filters see them: those that graftlab sets, and those given."""
    return {
        "name": name,
        "step": step,
        "side": place.side,
        "rank": place.rank,
        "recompute_status": recompute_status(),
        **given,
    }


def paired_tags(tags: Mapping[str, Any], given: Mapping[str, Any], pairing: Pairing) -> dict[str, Any]:
    """Return a tap's tags in one of its pairs; except for the place tags they are equal on both sides."""
    own = given if pairing.tags is not None else ()
    return {**{tag: value for tag, value in tags.items() if tag not in own}, **as_tags(pairing)}


class Decision(NamedTuple):
    """The plan's decision about one pair of a distinct tag set, made once: the action, and the parts of the address.

    ``tags`` are those that the filters saw, without the names in ``pairing``; step and ``recompute_status`` of a later
    call may differ. ``name`` is the name in the pair's address. ``others`` are the decisions about the tap's further
    pairs. With ``shows_rows`` the plan needs the rows of its tensor, whatever the action.
    """

    action: Action
    sends: bool
    tags: dict[str, Any]
    name: str
    key_tags: tuple[tuple[str, Plain], ...]
    pairing: Pairing | None = None
    others: tuple[Decision, ...] = ()
    own_name: str = ""
    shows_rows: bool = False

    def tags_at(self, step: int, status: str) -> dict[str, Any]:
        """Return the tags of a call in this step."""
        return {**self.tags, "step": step, "recompute_status": status}


class SeenTags:
    """Reports each tag set at its first call, whether or not a filter matches it.

    It outlives plans, and remembers a limited number of tag sets.
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
"""The key of a call in the decisions: the name, the tags around the call, and the tap's tags, each as a pair."""

_NOTHING = Action()


class PairedTaps:
    """This rank's distinct tag sets in the plan's pairs, before any decision.

    They do not depend on filters, so plans that differ only there share them. A limited number is remembered.
    """

    def __init__(self, place: Place, report: Callable[[dict[str, Any]], None], warn_once: WarnOnce) -> None:
        self.place = place
        self.seen = SeenTags(report)
        self._warn_once = warn_once
        self._plan = GraftPlan(version=-1)
        self._known: dict[tuple[RecomputeStatus, TapLookup], list[Decision]] = {}

    def adopt(self, plan: GraftPlan) -> None:
        """Use the pairs of this plan from now on."""
        if (plan.pairs, plan.rename) != (self._plan.pairs, self._plan.rename):
            self._known.clear()
        self._plan = plan

    def of(self, lookup: TapLookup, step: int) -> tuple[list[Decision], bool]:
        """Return a call in each of its pairs, with no action, and whether a later call may share them.

        Raises :class:`TagError` for an invalid name or tag.
        """
        key = recompute_status(), lookup
        # A tag's value may be unhashable.
        with contextlib.suppress(KeyError, TypeError):
            return self._known[key], True
        name, around, *own = lookup
        given, is_whole = given_tags(name, dict(around), dict(own), self._warn_once)
        if not isinstance(name, str) or not name:
            raise TagError(f"gl.tap: the name must be a non-empty string, not {name!r}")
        taken = RESERVED_TAGS.intersection(tag for tag, _ in own)
        if taken:
            raise TagError(
                f"gl.tap({name!r}): the tags {sorted(taken)} are set by graftlab itself; give your tags other names"
            )
        tags = all_tags(name, given, self.place, step)
        self.seen.note(tags, tuple(given.items()))
        pairings = self._plan.pairings(self.place.side, name, given)
        found = [_undecided(name, paired_tags(tags, given, each), each) for each in pairings]
        # A cached key would keep an excluded tensor alive.
        if is_whole:
            if len(self._known) >= _DECISIONS_LIMIT:
                self._known.clear()
            with contextlib.suppress(TypeError):
                self._known[key] = found
        return found, is_whole


def _undecided(name: str, seen: dict[str, Any], pairing: Pairing) -> Decision:
    own = identity(seen).tags
    for tag in SIDE_NAMES:
        # Rows have separate columns for these.
        del seen[tag]
    return Decision(_NOTHING, False, seen, pairing.key, own, pairing, (), name)


class Decisions:
    """One plan's decisions on this rank, each made when it is first needed; None for a tap that no filter matches.

    Valid while the plan is in force, or for one step if a filter uses the step.
    """

    def __init__(self, plan: GraftPlan, step: int, taps: PairedTaps) -> None:
        self.plan = plan
        self.step = step
        self.known: dict[TapLookup, Decision | None] = {}
        taps.adopt(plan)
        self._taps = taps
        # Whether the plan may match a tap whose name begins so, for those that were asked.
        self._may_match: dict[str, bool] = {}
        # A decision that changes from call to call cannot be cached.
        self._caches = "recompute_status" not in plan.looks_at

    def of(self, lookup: TapLookup) -> Decision | None:
        """Return the decision about a call. Raises :class:`TagError` for an invalid name or tag."""
        try:
            return self.known[lookup]
        except (KeyError, TypeError):
            return self.decide(lookup)

    def may_take(self, path: str) -> bool:
        """Whether to show taps whose names begin with ``path``. True the first time, so that they become known."""
        if path not in self._may_match:
            self._may_match[path] = self.plan.may_match(path)
            return True
        return self._may_match[path]

    def decide(self, lookup: TapLookup) -> Decision | None:
        """Make a new decision about a call."""
        undecided, is_whole = self._taps.of(lookup, self.step)
        decision = self._decided(undecided)
        if self._caches and is_whole:
            if len(self.known) >= _DECISIONS_LIMIT:
                self.known.clear()
            # A tag's value may be unhashable.
            with contextlib.suppress(TypeError):
                self.known[lookup] = decision
        return decision

    def _decided(self, undecided: Iterable[Decision]) -> Decision | None:
        first, *others = map(self._with_action, undecided)
        # If ranks may decide differently, a tap that this rank does not use is still counted, and declined.
        shows_rows = first.own_name in self.plan.row_taps[self._taps.place.side]
        is_unused = first.action == _NOTHING and all(each.action == _NOTHING for each in others)
        if is_unused and not self.plan.rank_dependent and not shows_rows:
            return None
        return first._replace(others=tuple(others), shows_rows=shows_rows) if others or shows_rows else first

    def _with_action(self, undecided: Decision) -> Decision:
        status, pairing = recompute_status(), undecided.pairing
        assert pairing is not None
        seen = {
            **undecided.tags_at(self.step, status),
            "baseline_name": pairing.baseline_name,
            "target_name": pairing.target_name,
        }
        # Looked up only for a filter that uses it, because it takes a look at the whole stack.
        if not self._caches and status == "original" and is_checkpointed():
            seen["recompute_status"] = CheckpointedStatus("original")
        action = self.plan.action_for(seen)
        return undecided._replace(action=action, sends=sends(self._taps.place, action.direction))


def overlap_error(decision: Decision, name: str, place: Place, plan: GraftPlan, step: int) -> GraftOverlapError:
    """The error at a tap that the plan grafts in both directions."""
    tags = decision.tags_at(step, recompute_status())
    return GraftOverlapError(
        f"tap {name!r} matches both b2t and t2b on {place.label}, tags {tags}; "
        f"change one filter so that each tap has one direction (b2t={plan.b2t!r}, t2b={plan.t2b!r})"
    )


class Addresses:
    """Assigns addresses to the calls of taps within one step."""

    def __init__(self, step: int, warn_once: WarnOnce) -> None:
        self._step = step
        self._warn_once = warn_once
        # The number of calls so far, and the thread of the last one.
        self._reached: dict[tuple[str, tuple[tuple[str, Plain], ...], str], tuple[int, int]] = {}

    def next(self, decision: Decision) -> TapKey:
        """Return the address of the current call; further calls of one tap have increasing occurrences."""
        status = recompute_status()
        tap = (decision.name, decision.key_tags, status)
        thread = get_ident()
        occurrence, last = self._reached.get(tap, (0, thread))
        self._reached[tap] = (occurrence + 1, thread)
        if last != thread:
            self._warn_once(
                decision.own_name,
                "two threads reach it in one step, with the same tags. Its calls are paired in the order in which they "
                "arrive, which may differ on the other side: put gl.tags(lane=...) around each thread's code",
            )
        return TapKey(self._step, *tap, occurrence)

    def of_pairs(self, decision: Decision) -> list[tuple[Decision, TapKey | None]]:
        """Return the address for each pair of the current call; None instead of an address if it is in no pair."""
        found: list[tuple[Decision, TapKey | None]] = []
        for each in (decision, *decision.others):
            key = self.next(each)
            wanted = None if each.pairing is None else each.pairing.occurrence
            if wanted is None:
                found.append((each, key))
            elif wanted == key.occurrence:
                # The pair determines which call it is on the other side.
                found.append((each, key._replace(occurrence=0)))
        return found or [(decision, None)]
