"""Routing of the ranks' messages to the parts of a session."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from graftlab.control.plans import Plans
from graftlab.control.queries import Queries
from graftlab.control.runs import Runs
from graftlab.control.tap_catalog import TapCatalog
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import (
    AskWaitReason,
    Contact,
    Dispatch,
    DisplayData,
    FromRank,
    Hello,
    LinkReport,
    LiveOutput,
    Output,
    PlanAdopted,
    Reply,
    RunDone,
    RunSettled,
    StatusUpdate,
    TapSeen,
    WorldSwitch,
)
from graftlab.rows.store import RowStore


class MessageRouter:
    """Handles what the hub receives. A new message to the notebook needs one line here."""

    def __init__(self, rows: RowStore, runs: Runs, plans: Plans, taps: TapCatalog, queries: Queries) -> None:
        self._rows = rows
        self._runs = runs
        self._queries = queries
        self._handle = Dispatch[[RankHandle], None]()
        self._handle.on(Output, runs.note_output)
        self._handle.on(LiveOutput, runs.note_output)
        self._handle.on(DisplayData, runs.note_output)
        self._handle.on(RunDone, runs.note_done)
        self._handle.on(RunSettled, runs.note_settled)
        self._handle.on(TapSeen, taps.note)
        self._handle.on(PlanAdopted, plans.note_adopted)
        self._handle.on(Reply, lambda reply, rank: queries.on_reply(reply))
        self._handle.on(Hello, lambda hello, rank: self.on_joined(rank))
        self._handle.on(Contact, lambda contact, rank: self.on_contact(rank, contact))
        self._handle.on(LinkReport, lambda linked, rank: self.on_linked(rank, linked))
        self._handle.on(WorldSwitch, lambda moved, rank: self.on_moved(rank, moved))
        self._handle.on(AskWaitReason, lambda ask, rank: self.on_ask_missing(rank))
        self._handle.on(StatusUpdate, lambda where, rank: rank.note_status(where))
        # Set by the session server, where jobs join.
        self.on_contact: Callable[[RankHandle, Contact], None] = lambda rank, contact: None
        self.on_joined: Callable[[RankHandle], None] = lambda rank: None
        self.on_linked: Callable[[RankHandle, LinkReport], None] = lambda rank, linked: None
        self.on_moved: Callable[[RankHandle, WorldSwitch], None] = lambda rank, moved: None
        self.on_ask_missing: Callable[[RankHandle], None] = lambda rank: None
        self.on_left: Callable[[RankHandle], None] = lambda rank: None

    def on_rows(self, lines: Sequence[bytes]) -> None:
        self._rows.append(lines)

    def on_message(self, message: FromRank, rank: RankHandle) -> None:
        self._handle(message, rank)

    def on_gone(self, rank: RankHandle) -> None:
        self._runs.note_death(rank)
        self._queries.note_gone(rank)
        self.on_left(rank)
