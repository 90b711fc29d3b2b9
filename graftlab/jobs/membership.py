"""The membership of a session of jobs: which ranks have a process, and the worlds that connect them.

When every rank has a process, all set up a new world: each connects to every other again. Ranks in a run move to the
new world at the end of a step, and report the step with which they continue; then the waiting ranks begin. If a rank
dies, the others continue without it until another process replaces it.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from graftlab.base.world import SIDES, RunInfo, Side
from graftlab.control.joined_jobs import JoinedJobs
from graftlab.errors import LaunchError, SessionError
from graftlab.jobs.attached_rank_handle import AttachedRankHandle
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.descriptors import SharedDescriptors
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import (
    Contact,
    Contacts,
    JobCode,
    LinkReport,
    RunRequest,
    WorldRequest,
    WorldStart,
    WorldSwitch,
    pack,
)

logger = logging.getLogger(__name__)


class Membership:
    """For one thread at a time. With ``makes_links`` it creates the memory and sockets that connect the ranks."""

    def __init__(self, ranks: Sequence[AttachedRankHandle], joined: JoinedJobs, *, makes_links: bool) -> None:
        self._ranks = ranks
        self._joined = joined
        self._makes_links = makes_links
        # World ranks that have a process; of these the ones that are ready, in a run, and in the newest run.
        self.occupied: set[int] = set()
        self._ready: set[int] = set()
        self._at_work: set[int] = set()
        self._current: set[int] = set()
        self._first_steps: dict[int, int | None] = {}
        # How often each side was started, and whether it has begun a run since then.
        self._generations = [1, 1]
        self._has_begun = [False, False]
        # The newest world, and its state.
        self._world = 0
        self._setting_up = False
        self._info: RunInfo | None = None
        self._plan = GraftPlan()
        self._shared: SharedDescriptors | None = None
        self._linked: set[int] = set()
        self._moved: dict[int, int] = {}
        self._contacts: dict[int, Contact] = {}

    @property
    def has_begun(self) -> bool:
        """Whether any rank is in a run."""
        return bool(self._at_work)

    def is_at_work(self, rank: AttachedRankHandle) -> bool:
        return rank.place.world_rank in self._at_work

    def generation(self, side: Side) -> int:
        return self._generations[SIDES.index(side)]

    # ---- joining and leaving ------------------------------------------------------------------------------------

    def enter(self, rank: AttachedRankHandle, run: RunInfo | None, first_step: int | None) -> None:
        """Note that a process is this rank from now on: a new one, or one that is already in this ``run``."""
        number = rank.place.world_rank
        self.occupied.add(number)
        self._first_steps[number] = first_step
        if run is None:
            return
        self._at_work.add(number)
        if self._info is None:
            self._info = run
            self._generations, self._has_begun = list(run.generations), [True, True]
        if run.run == self._info.run:
            self._current.add(number)

    def note_ready(self, rank: AttachedRankHandle) -> None:
        """Note that the rank's process is ready to connect, and set up a world if it was the last."""
        self._ready.add(rank.place.world_rank)
        if len(self._ready) == len(self._ranks) and len(self._current) < len(self._ranks):
            self._set_up_world()

    def leave(self, rank: AttachedRankHandle) -> None:
        """Note that the rank's process is gone, and abandon the world that is being set up."""
        number = rank.place.world_rank
        if self._setting_up and number in self._ready:
            self._setting_up = False
            self._release()
        for those in (self.occupied, self._ready, self._at_work, self._current):
            those.discard(number)

    def close(self) -> None:
        self._setting_up = False
        self._release()

    # ---- a world ------------------------------------------------------------------------------------------------

    def _set_up_world(self) -> None:
        for index, side in enumerate(SIDES):
            is_new = any(r.place.side == side and r.place.world_rank not in self._at_work for r in self._ranks)
            if is_new and self._has_begun[index]:
                self._generations[index] += 1
                self._has_begun[index] = False
        self._release()
        self._world += 1
        self._linked, self._moved, self._contacts = set(), {}, {}
        self._current = set()
        if self._makes_links:
            shared = SharedDescriptors([rank.place for rank in self._ranks])
            try:
                shared.make()
            except LaunchError as error:
                shared.release()
                logger.error("the jobs cannot be connected: %s", error)
                return
            self._shared = shared
        base = None if self._info is None else self._info.base
        generations = cast("tuple[int, int]", tuple(self._generations))
        self._info, self._plan = self._joined.begin_run(generations, base)
        self._setting_up = True
        message = pack(WorldRequest(self._world, self._info, to_wire(self._plan)))
        for rank in self._ranks:
            rank.channel.send(message)

    def share_of(self, rank: AttachedRankHandle, world: int) -> tuple[int, list[int]]:
        """Return the size of a segment, and the rank's descriptors in this world. Raises :class:`SessionError`."""
        if self._shared is None or world != self._world or rank.place.world_rank in self._linked:
            raise SessionError("this world has started without this process, or was abandoned because a rank is gone")
        return self._shared.segment_size, self._shared.of(rank.place)

    def note_contact(self, rank: AttachedRankHandle, contact: Contact) -> None:
        """Send the rank's address to the other ranks, and theirs to it."""
        introduce(rank, contact, self._contacts, self._ranks)

    def note_linked(self, rank: AttachedRankHandle, message: LinkReport) -> None:
        """Note that the rank is connected to all others, and start the world if it was the last."""
        rank.note_links(message)
        if not self._setting_up or message.world != self._world or rank.place.world_rank in self._linked:
            return
        self._linked.add(rank.place.world_rank)
        if len(self._linked) == len(self._ranks):
            if self._shared is not None:
                for each in self._ranks:
                    each.prepare_segment(os.dup(self._shared.segments[each.place.world_rank]))
            # Sockets kept open here would hide the death of a rank from the others.
            self._release()
            for each in self._ranks:
                if each.place.world_rank in self._at_work:
                    each.channel.send(pack(WorldStart(self._world)))
            self._begin_when_all_have_moved()

    def note_moved(self, rank: AttachedRankHandle, message: WorldSwitch) -> None:
        """Note that the rank has moved from its run to the new world at the end of a step."""
        if message.world != self._world:
            return
        number = rank.place.world_rank
        self._moved[number] = message.step
        self._current.add(number)
        self._record_move(rank)
        if self._setting_up:
            self._begin_when_all_have_moved()

    def _record_move(self, rank: AttachedRankHandle) -> None:
        """Record that the rank is in the newest world."""
        rank.enter_world()
        rank.generation = self.generation(rank.place.side)
        self._joined.runs.note_moved(rank)

    def _begin_when_all_have_moved(self) -> None:
        if len(self._linked) < len(self._ranks) or not self._at_work <= self._moved.keys():
            return
        assert self._info is not None
        # All ranks of a continuing side count the same steps, but may have moved at different ones.
        common_step = max(self._moved.values(), default=self._info.first_step)
        self._setting_up = False
        newcomers: dict[Side, int] = {}
        for rank in self._ranks:
            number = rank.place.world_rank
            if number in self._at_work:
                continue
            own = self._first_steps.get(number)
            first_step = common_step if own is None else self._info.base + own
            self._record_move(rank)
            if rank.generation > 1:
                note = f"joined again as generation {rank.generation}, and began at step {first_step}"
                rank.assignment = replace(rank.assignment, notes=(*rank.assignment.notes, note))
                logger.info("%s %s", rank.label, note)
            rank.channel.send(
                pack(RunRequest(replace(self._info, first_step=first_step), to_wire(self._plan), JobCode()))
            )
            newcomers.setdefault(rank.place.side, first_step)
            # A newer plan may have been published since the world was set up.
            self._joined.plans.send_to(rank)
            self._at_work.add(number)
            self._current.add(number)
        self._has_begun = [True, True]
        for side, first_step in newcomers.items():
            if self.generation(side) > 1:
                self._joined.runs.remark(
                    f"the {side} was started again (generation {self.generation(side)}), and its first step is step "
                    f"{first_step} here: this run compares like with like only if both sides compute the same there; a "
                    f"job that resumes passes its step as first_step (GRAFTLAB_FIRST_STEP)"
                )

    def missing(self) -> str:
        """Describe what the waiting ranks wait for."""
        absent = [rank.label for rank in self._ranks if rank.place.world_rank not in self._ready]
        if absent:
            return f"{', '.join(absent)} had not joined"
        unlinked = [rank.label for rank in self._ranks if rank.place.world_rank not in self._linked]
        if unlinked:
            return f"{', '.join(unlinked)} had not connected to all others"
        slow = [
            rank.label
            for rank in self._ranks
            if rank.place.world_rank in self._at_work and rank.place.world_rank not in self._moved
        ]
        return f"{', '.join(slow)} had not reached the end of a step, where new ranks join,"

    def _release(self) -> None:
        if self._shared is not None:
            self._shared.release()
            self._shared = None


def introduce(rank: RankHandle, contact: Contact, known: dict[int, Contact], ranks: Sequence[RankHandle]) -> None:
    """Note the contact of a rank among the ``known`` ones, send it to their ranks, and theirs to this one."""
    rank.channel.send(pack(Contacts(tuple(known.values()))))
    known[rank.place.world_rank] = contact
    for other in ranks:
        if other is not rank and other.place.world_rank in known:
            other.channel.send(pack(Contacts((contact,))))
