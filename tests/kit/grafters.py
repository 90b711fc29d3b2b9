"""Graft worlds made of grafters alone: every rank in this thread, over an exchange in which no rank ever waits.

So a test decides who reaches what first: let the side that sends reach its taps, then the side that receives.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import pytest
import torch

from graftlab.base.tags import TapKey
from graftlab.base.world import Place, RunInfo, Side
from graftlab.errors import BufferFullError, ShippingError
from graftlab.exchange.contract import Contribution, Receipt
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting import active
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.kept import KeptPairs
from graftlab.plan.plan import GraftPlan
from graftlab.rows.schema import Row
from graftlab.taps import calls
from graftlab.taps.ambient_tags import ambient

NEVER = 1 << 60


@dataclass
class Sent:
    """One tensor that a rank published."""

    tensor: torch.Tensor
    extras: object
    memo: object
    asked_for: bool = False


@dataclass
class Post:
    """What the exchanges of one world share. A None is a tap that its rank declined to send."""

    sent: dict[TapKey, dict[int, Sent | None]] = field(default_factory=dict)
    ended_step: dict[int, int] = field(default_factory=dict)
    announced: dict[tuple[int, int], bytes] = field(default_factory=dict)
    unreadable: str = ""
    """Why no extras can be loaded; empty while they can."""
    is_full: bool = False
    lost: str = ""
    gone: dict[int, str] = field(default_factory=dict)
    """By world rank, why it sends nothing more."""


class OneThreadExchange:
    """Keeps the promises of :class:`graftlab.exchange.contract.Exchange`; a time limit is over at once."""

    timeout = 5.0

    def __init__(self, place: Place, post: Post) -> None:
        self.place = place
        self.on_wait: Callable[[Collection[int]], None] = lambda awaits: None
        self.declined: list[TapKey] = []
        self.awaited: list[int] = []
        self.released = 0
        self._post = post
        self._me = place.world_rank
        self._others = [other for other in place.everyone() if other.side != place.side]
        self._peers: list[Place] = []

    def begin_run(self, run: RunInfo) -> None:
        self._peers = [peer for peer in self._others if peer.world_rank in run.participants]
        self._post.ended_step[self._me] = run.first_step - 1

    def publish(self, key: TapKey, tensor: torch.Tensor, extras: object, memo: object = None) -> None:
        if isinstance(extras, Unpackable):
            raise ShippingError(f"gl.tap({key.name!r}): the extras cannot be pickled")
        if self._post.is_full:
            raise BufferFullError(f"{self.place.label} could not publish tap {key.name!r}")
        self._post.sent.setdefault(key, {})[self._me] = Sent(tensor.clone(), extras, memo)

    def decline(self, key: TapKey) -> None:
        self.declined.append(key)
        self._post.sent.setdefault(key, {})[self._me] = None

    def receive(self, key: TapKey, near: torch.Tensor | None = None) -> Receipt:
        contributions, absent, timed_out = [], {}, False
        found = self._post.sent.get(key, {})
        for peer in self._others:
            sent = found.get(peer.world_rank)
            if sent is not None:
                sent.asked_for = True
                contributions.append(Contribution(peer.rank, sent.tensor.clone(), sent.extras))
            elif peer.world_rank in found:
                absent[peer.rank] = f"{peer.label} did not send this tap"
            elif peer not in self._peers:
                absent[peer.rank] = f"{peer.label} takes no part in this run"
            elif self._post.ended_step[peer.world_rank] >= key.step:
                absent[peer.rank] = f"{peer.label} ended the step without this tap"
            else:
                absent[peer.rank] = f"{peer.label} did not reach this tap within {self.timeout:g} s"
                timed_out = True
        unreadable = {c.rank: self._post.unreadable for c in contributions if self._post.unreadable}
        return Receipt(contributions, absent, timed_out, unreadable, self._release)

    def _release(self) -> None:
        self.released += 1

    def end_step(self, step: int) -> None:
        self._post.ended_step[self._me] = step

    def end_run(self) -> None:
        self._post.ended_step[self._me] = NEVER

    def take_unmatched(self) -> list[object]:
        past = min((self._post.ended_step[peer.world_rank] for peer in self._peers), default=NEVER)
        memos: list[object] = []
        for key, of_ranks in self._post.sent.items():
            sent = of_ranks.get(self._me)
            if sent is not None and not sent.asked_for and key.step <= past:
                sent.asked_for = True
                memos.append(sent.memo)
        return memos

    def announce(self, step: int, payload: bytes) -> None:
        self._post.announced[self._me, step] = payload

    def announcements(self, rank: int, step: int) -> list[bytes] | None:
        if (rank, step) in self._post.announced:
            return [self._post.announced[rank, step]]
        return [] if self._post.ended_step[rank] == NEVER else None

    def await_past(self, step: int) -> bool:
        """A time limit is over at once; the steps that were waited for are in ``awaited``."""
        self.awaited.append(step)
        return all(self._post.ended_step[peer.world_rank] >= step for peer in self._peers)

    def share(self, let_go: Callable[[], bool], take_back: Callable[[], None]) -> None:
        """No rank waits here, but in tests that make one wait."""
        self.shared = (let_go, take_back)

    def lost_peers(self) -> str:
        return self._post.lost

    def why_gone(self, rank: int) -> str:
        return self._post.gone.get(rank, "")

    def where_peers_are(self) -> str:
        return ", ".join(f"{peer.label}: idle" for peer in self._others)


class Unpackable:
    """Extras that cannot travel."""


class Rank:
    """One grafter, and what it reported."""

    def __init__(self, place: Place, post: Post) -> None:
        self.place = place
        self.rows: list[Row] = []
        self.tags_seen: list[dict[str, Any]] = []
        self.plans: list[tuple[int, int]] = []
        self.exchange = OneThreadExchange(place, post)
        self.page = StatusPage(mmap.mmap(-1, mmap.PAGESIZE))
        self.kept = KeptPairs()
        exchange: Any = self.exchange
        self.grafter = Grafter(place, exchange, self.page, ambient, self, self.kept)

    def row(self, row: Row) -> None:
        self.rows.append(row)

    def seen(self, tags: dict[str, Any]) -> None:
        self.tags_seen.append(tags)

    def adopted(self, version: int, step: int) -> None:
        self.plans.append((version, step))

    def tap(self, name: str, value: Any, /, *, extras: Any = None, replace: bool = False, **tags: Any) -> Any:
        """As :func:`graftlab.tap`; a number is a tensor of two such numbers."""
        if isinstance(value, (int, float)):
            value = torch.full((2,), float(value))
        return self.grafter.tap(name, value, extras, tags, replace)


class GrafterWorld:
    """The ranks of both sides, in a run under one plan. :meth:`end` ends it everywhere."""

    def __init__(self, baseline: int = 1, target: int = 1, /, **plan: Any) -> None:
        self.post = Post()
        places = Place("baseline", 0, baseline, target).everyone()
        self.ranks = [Rank(place, self.post) for place in places]
        self.baselines, self.targets = self.ranks[:baseline], self.ranks[baseline:]
        self.baseline, self.target = self.baselines[0], self.targets[0]
        self.plan = GraftPlan(**plan)
        self.begin()

    def begin(self, run: int = 0, first_step: int = 0, participants: Collection[int] | None = None) -> None:
        chosen = tuple(range(len(self.ranks)) if participants is None else participants)
        for rank in self.ranks:
            if rank.place.world_rank in chosen:
                rank.grafter.begin_run(RunInfo(run, first_step, chosen), self.plan)

    def edit(self, **changes: Any) -> None:
        """A newer plan, in force from each rank's next step."""
        self.plan = self.plan.edit(**changes)
        for rank in self.ranks:
            rank.grafter.offer_plan(self.plan)

    def step(self) -> None:
        """Every rank ends its step; the leader, which is first, says with which plan the next one begins."""
        for rank in self.ranks:
            rank.grafter.step()

    def end(self) -> None:
        for rank in self.ranks:
            rank.grafter.end_run()
        for rank in self.ranks:
            rank.grafter.close_run()

    @property
    def rows(self) -> list[Row]:
        """What every rank reported, the baseline's first."""
        return [row for rank in self.ranks for row in rank.rows]


class StandInGrafter:
    """The grafter of a rank whose taps are handled otherwise: it leaves them alone, and counts steps."""

    def __init__(self) -> None:
        self.next_step = 0

    @property
    def moment(self) -> object:
        return self.next_step

    def may_take(self, path: str) -> bool:
        return True

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        return value

    def step(self) -> None:
        self.next_step += 1


def become_rank(patch: pytest.MonkeyPatch, side: Side, **variables: Any) -> StandInGrafter:
    """Make this process the only rank of a side for a test; ``variables`` are those of its cells."""
    grafter: Any = StandInGrafter()
    for name in ("_grafter", "_handler", "_here", "_traced", "_is_tracing"):
        patch.setattr(calls, name, getattr(calls, name))
    patch.setattr(active, "_grafter", grafter)
    active.install_handler(grafter, calls.Here(side, 0, 1, torch.device("cpu"), variables))
    return cast("StandInGrafter", grafter)
