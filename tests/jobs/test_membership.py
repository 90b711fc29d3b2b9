"""Ranks that join, die and join again: when a world is set up, who switches to it, and where each begins."""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from kit.deadline import DEADLINE
from kit.processes import descriptors
from kit.refusals import exactly

from graftlab.base.world import Place, RunInfo
from graftlab.errors import LaunchError, SessionError
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.status_page import RankStatus, StatusPage, WireStatus
from graftlab.jobs.agreed_plan import AgreedPlan
from graftlab.jobs.attached_rank_handle import AttachedRankHandle
from graftlab.jobs.handshake import JoinRequest, RejoinState, RequestRefused, send_handshake
from graftlab.jobs.membership import Membership, introduce
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.jobs.session_server import open_session_server
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.descriptors import SharedDescriptors
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.messages import (
    Contact,
    Contacts,
    LinkReport,
    PlanUpdate,
    RunRequest,
    StatusUpdate,
    WorldRequest,
    WorldStart,
    WorldSwitch,
    unpack_to_rank,
)
from graftlab.ranks.options import LaunchOptions
from graftlab.session import Session


class Runs:
    """In place of the session: gives runs their numbers."""

    def __init__(self) -> None:
        self.count = 0
        self.remarks: list[str] = []
        self.sent: list[str] = []
        """The ranks to which the newest plan was sent."""
        self.runs = self.plans = self

    def begin_run(self, generations: tuple[int, int], base: int | None) -> tuple[RunInfo, GraftPlan]:
        info = RunInfo(self.count, 100, (0, 1, 2), generations, 100 if base is None else base)
        self.count += 1
        return info, GraftPlan()

    def note_moved(self, rank: AttachedRankHandle) -> None: ...

    def send_to(self, rank: AttachedRankHandle) -> None:
        self.sent.append(rank.label)

    def remark(self, text: str) -> None:
        self.remarks.append(text)


class Jobs:
    """One baseline rank and two of the target; the test plays each."""

    def __init__(self, folder: Path) -> None:
        self.ranks = [AttachedRankHandle(place, folder) for place in Place("baseline", 0, 1, 2).everyone()]
        self.runs = Runs()
        runs: Any = self.runs
        self.membership = Membership(self.ranks, runs, makes_links=True)
        self._ends: dict[int, SocketChannel] = {}

    def come(self, *ranks: int, first_step: int | None = None, run: RunInfo | None = None) -> None:
        """A process takes each of these places, and is ready: a new one, or one that is in this run."""
        for number in ranks:
            rank = self.ranks[number]
            if rank.has_joined:
                rank.renew()
            rank.assign_process(1000 + number, DeviceAssignment("cpu", "none"))
            line, wake = rank.take_ends()
            self._ends[number] = SocketChannel(line)
            wake.close()
            self.membership.enter(rank, run, first_step)
            self.membership.note_ready(rank)

    def heard(self, number: int) -> list[Any]:
        """The messages to this rank since the last call."""
        messages = [unpack_to_rank(frame) for frame in self._ends[number].receive()]
        return [message for message in messages if not isinstance(message, PlanUpdate)]

    def link(self, world: int, *ranks: int) -> None:
        for number in ranks:
            size, descriptors = self.membership.share_of(self.ranks[number], world)
            # A segment and a socket for each of the others, and its own segment.
            assert (size > 0, len(descriptors)) == (True, 5)
            others = tuple({0, 1, 2} - {number})
            self.membership.note_linked(self.ranks[number], LinkReport(world, others, ()))

    def move(self, number: int, world: int, step: int) -> None:
        self.membership.note_moved(self.ranks[number], WorldSwitch(world, step))

    def begin(self) -> Jobs:
        """All are in their first run."""
        self.come(0, 1, 2)
        self.link(1, 0, 1, 2)
        for number in range(3):
            self.heard(number)
        return self

    def close(self) -> None:
        self.membership.close()
        for rank in self.ranks:
            rank.release()
        for end in self._ends.values():
            end.close()


@pytest.fixture
def jobs(tmp_path: Path) -> Iterator[Jobs]:
    made = Jobs(tmp_path)
    yield made
    made.close()


def kinds(messages: list[Any]) -> list[type]:
    return [type(message) for message in messages]


def begun(messages: list[Any]) -> RunInfo:
    [request] = messages
    assert isinstance(request, RunRequest)
    return request.info


def test_a_world_is_set_up_when_every_rank_is_ready_and_starts_when_all_are_linked(jobs: Jobs) -> None:
    jobs.come(0, 1)
    assert jobs.heard(0) == []
    jobs.come(2)
    assert [kinds(jobs.heard(number)) for number in range(3)] == [[WorldRequest]] * 3
    jobs.link(1, 0, 1)
    assert jobs.heard(0) == []
    jobs.link(1, 2)
    assert [begun(jobs.heard(number)).first_step for number in range(3)] == [100] * 3
    # A newer one may have been published since the world was set up.
    assert jobs.runs.sent == ["baseline[0]", "target[0]", "target[1]"]
    assert [rank.generation for rank in jobs.ranks] == [1, 1, 1]
    assert jobs.runs.remarks == []


def test_running_ranks_switch_first_and_new_ones_begin_at_the_latest_step(jobs: Jobs) -> None:
    jobs.begin()
    jobs.membership.leave(jobs.ranks[0])
    assert [jobs.heard(number) for number in (1, 2)] == [[], []]
    jobs.come(0)
    [assemble] = jobs.heard(1)
    assert assemble.info.generations == (2, 1)
    jobs.heard(0), jobs.heard(2)
    lost = "at least 3 rows are lost"
    jobs.ranks[0].assignment = DeviceAssignment("cpu", "none", (lost,))
    jobs.link(2, 0, 1, 2)
    assert [kinds(jobs.heard(number)) for number in range(3)] == [[], [WorldStart], [WorldStart]]
    # The ranks of one side need not come to the same step.
    jobs.move(1, 2, 151)
    assert jobs.heard(0) == []
    jobs.move(2, 2, 152)
    info = begun(jobs.heard(0))
    assert (info.run, info.first_step, info.generations) == (1, 152, (2, 1))
    assert [rank.generation for rank in jobs.ranks] == [2, 1, 1]
    [remark] = jobs.runs.remarks
    assert "the baseline was started again (generation 2), and its first step is step 152 here" in remark
    assert jobs.ranks[0].assignment.notes == (lost, "joined again as generation 2, and began at step 152")


def test_a_session_server_that_took_over_jobs_counts_their_generations_on(jobs: Jobs) -> None:
    info = RunInfo(4, 100, (0, 1, 2), (3, 1), 40)
    jobs.come(0, 1, 2, run=info)
    jobs.membership.leave(jobs.ranks[0])
    jobs.come(0)
    [request] = jobs.heard(1)
    # The steps of jobs are counted on from where the first session counted.
    assert (request.info.generations, request.info.base) == ((4, 1), 40)
    assert info.generations == (3, 1)


def test_a_job_that_resumes_begins_at_its_own_step(jobs: Jobs) -> None:
    jobs.begin()
    for number in (1, 2):
        jobs.membership.leave(jobs.ranks[number])
    jobs.come(1, 2, first_step=30)
    for number in range(3):
        jobs.heard(number)
    jobs.link(2, 0, 1, 2)
    jobs.move(0, 2, 151)
    assert [begun(jobs.heard(number)).first_step for number in (1, 2)] == [130, 130]


def test_a_world_abandoned_by_a_death_does_not_count_as_a_generation(jobs: Jobs) -> None:
    jobs.begin()
    jobs.membership.leave(jobs.ranks[1])
    jobs.come(1)
    for number in range(3):
        jobs.heard(number)
    jobs.link(2, 0, 1)
    jobs.membership.leave(jobs.ranks[1])
    with pytest.raises(
        SessionError,
        match=exactly("this world has started without this process, or was abandoned because a rank is gone"),
    ):
        jobs.membership.share_of(jobs.ranks[2], 2)
    jobs.come(1)
    [assemble] = jobs.heard(0)
    assert (assemble.world, assemble.info.generations) == (3, (1, 2))
    jobs.heard(1), jobs.heard(2)
    # Word of the world before, which was on its way, is of no account.
    jobs.membership.note_linked(jobs.ranks[2], LinkReport(2, (0, 1), ()))
    jobs.move(0, 2, 140)
    jobs.link(3, 0, 1, 2)
    jobs.move(2, 3, 150)
    assert jobs.heard(1) == []
    jobs.move(0, 3, 150)
    assert begun(jobs.heard(1)).first_step == 150


def test_a_share_is_sent_once_and_only_for_the_newest_world(jobs: Jobs) -> None:
    jobs.come(0, 1, 2)
    jobs.link(1, 0)
    for rank, world in ((0, 1), (1, 0), (1, 2)):
        with pytest.raises(
            SessionError,
            match=exactly("this world has started without this process, or was abandoned because a rank is gone"),
        ):
            jobs.membership.share_of(jobs.ranks[rank], world)


def test_the_status_of_a_rank_is_read_in_the_world_that_it_has_entered(jobs: Jobs) -> None:
    jobs.come(0, 1, 2)
    size, segments = jobs.membership.share_of(jobs.ranks[1], 1)
    with mmap.mmap(segments[1], size) as segment:
        StatusPage(segment).write("running", step=5, plan_version=1, taps=2, tap="x")
        assert jobs.ranks[1].status().state == "idle"
        jobs.link(1, 0, 1, 2)
        assert jobs.ranks[1].status().step == 5


def test_a_move_to_a_world_before_is_none_to_the_next(jobs: Jobs) -> None:
    jobs.begin()
    for world in (2, 3):
        jobs.membership.leave(jobs.ranks[0])
        jobs.come(0)
        for number in range(3):
            jobs.heard(number)
        jobs.link(world, 0, 1, 2)
        jobs.move(2, world, 150)
        assert jobs.heard(0) == []
        if world == 2:
            jobs.move(1, 2, 150)
            assert begun(jobs.heard(0)).first_step == 150


def test_ranks_that_link_themselves_are_introduced_anew_in_each_world(tmp_path: Path) -> None:
    ranks = [AttachedRankHandle(place, tmp_path) for place in Place("baseline", 0, 1, 1).everyone()]
    runs: Any = Runs()
    membership = Membership(ranks, runs, makes_links=False)
    ends = []
    for number, rank in enumerate(ranks):
        rank.assign_process(number, DeviceAssignment("cpu", "none"))
        line, wake = rank.take_ends()
        wake.close()
        ends.append(SocketChannel(line))
        membership.enter(rank, None, None)
        membership.note_ready(rank)
    heard = []
    for port in (1, 2):
        for number, rank in enumerate(ranks):
            membership.note_contact(rank, Contact(number, "", b"nonce", b"name", "", port))
        messages = [unpack_to_rank(frame) for frame in ends[0].receive()]
        heard.append([[each.port for each in found.contacts] for found in messages if isinstance(found, Contacts)])
        # The target's process is replaced, and all connect again.
        membership.leave(ranks[1])
        membership.enter(ranks[1], None, None)
        membership.note_ready(ranks[1])
    assert heard == [[[], [1]], [[], [2]]]
    for rank, end in zip(ranks, ends, strict=True):
        end.close()
        rank.release()


def test_missing_ranks_are_named_to_those_that_wait(jobs: Jobs) -> None:
    jobs.come(0)
    assert jobs.membership.missing() == "target[0], target[1] had not joined"
    jobs.come(1, 2)
    jobs.link(1, 0, 2)
    assert jobs.membership.missing() == "target[0] had not connected to all others"
    jobs.link(1, 1)
    jobs.membership.leave(jobs.ranks[1])
    assert jobs.membership.missing() == "target[0] had not joined"
    jobs.come(1)
    jobs.link(2, 0, 1, 2)
    jobs.move(2, 2, 110)
    assert jobs.membership.missing().startswith("baseline[0] had not reached the end of a step")


def test_jobs_returning_from_different_runs_get_one_new_world(jobs: Jobs) -> None:
    """Some ranks had switched when the last notebook died, and others had not."""
    for number, run in ((0, 4), (1, 4), (2, 3)):
        rank = jobs.ranks[number]
        rank.assign_process(number, DeviceAssignment("cpu", "none"))
        line, wake = rank.take_ends()
        jobs._ends[number] = SocketChannel(line)
        wake.close()
        jobs.membership.enter(rank, RunInfo(run, 120, (0, 1, 2), (1, 2), 100), None)
        jobs.membership.note_ready(rank)
    assert [kinds(jobs.heard(number)) for number in range(3)] == [[WorldRequest]] * 3
    jobs.link(1, 0, 1, 2)
    assert [kinds(jobs.heard(number)) for number in range(3)] == [[WorldStart]] * 3
    for number in range(3):
        jobs.move(number, 1, 130)
    assert [jobs.heard(number) for number in range(3)] == [[], [], []]
    assert jobs.membership.generation("target") == 2
    assert jobs.runs.remarks == []


# ---- the plan that jobs bring ----------------------------------------------------------------------------------------


def test_a_transform_of_one_side_is_the_plans_whichever_job_joins_first() -> None:
    plain = GraftPlan(b2t="layer == 1")
    given = GraftPlan(b2t="layer == 1", transform="graftlab.transforms.by_layout")
    for first, second in ((plain, given), (given, plain)):
        agreed = AgreedPlan(first)
        assert agreed.objection("baseline", first) == agreed.objection("target", second) == ""
        assert agreed.enter("baseline", first).transforms == first.transforms
        assert agreed.enter("target", second).transforms == given.transforms


def test_a_transform_that_both_sides_bring_applies_where_each_brought_it() -> None:
    plan = GraftPlan(b2t="layer == 1", transform="graftlab.transforms.by_layout")
    agreed = AgreedPlan(plan)
    agreed.enter("baseline", plan)
    # Without a further condition, which would keep it from the taps that are compared.
    assert agreed.enter("target", plan).transforms == plan.transforms


def test_a_transform_for_a_direction_without_grafts_is_left_out() -> None:
    def brought(path: str, t2b: str | None = None) -> GraftPlan:
        return GraftPlan(b2t="layer == 1", t2b=t2b, transform=f"graftlab.transforms.{path}")

    for t2b in (None, "  "):
        agreed = AgreedPlan(brought("by_layout", t2b))
        agreed.enter("baseline", brought("by_layout", t2b))
        (only,) = agreed.enter("target", brought("align_by_request", t2b)).transforms
        assert (only.text.rpartition(".")[2], only.where) == (
            "align_by_request",
            "side == 'target' and (\nlayer == 1\n)",
        )


def test_each_receiver_has_the_transform_that_its_own_job_brought() -> None:
    def brought(path: str) -> GraftPlan:
        return GraftPlan(b2t="layer == 1", t2b="layer == 2 # the head", transform=f"graftlab.transforms.{path}")

    agreed = AgreedPlan(brought("by_layout"))
    agreed.enter("baseline", brought("by_layout"))
    plan = agreed.enter("target", brought("align_by_request"))
    found = {}
    for side in ("baseline", "target"):
        for layer in (0, 1, 2):
            which = plan.action_for({"name": "h", "layer": layer, "side": side, "rank": 0, "step": 0}).transform
            if which is not None:
                found[side, layer] = plan.transforms[which].text.rpartition(".")[2]
    assert found == {("target", 1): "align_by_request", ("baseline", 2): "by_layout"}
    joined_first = "in the target process that joined first; the ranks of a side need the same"
    assert joined_first in agreed.objection("target", brought("by_layout"))
    assert "is 'graftlab.transforms.by_layout' here, but 'graftlab.transforms.align_by_request'" in agreed.objection(
        "target", brought("by_layout")
    )
    other = GraftPlan(b2t="layer == 3", t2b="layer == 2 # the head")
    assert "b2t_filter (GRAFTLAB_B2T_FILTER) is 'layer == 3' here" in agreed.objection("baseline", other)


def test_a_membership_that_ends_leaves_no_memory_open(tmp_path: Path) -> None:
    before = descriptors()
    jobs = Jobs(tmp_path)
    jobs.come(0, 1, 2)
    assert descriptors() - before
    jobs.close()
    assert descriptors() <= before


def test_a_world_without_memory_is_logged_and_leaves_nothing_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def make(shared: SharedDescriptors) -> None:
        released.append(shared)
        raise LaunchError("/dev/shm is full")

    released: list[SharedDescriptors] = []
    monkeypatch.setattr(SharedDescriptors, "make", make)
    monkeypatch.setattr(SharedDescriptors, "release", lambda shared: released.append(shared))
    jobs = Jobs(tmp_path)
    jobs.come(0, 1, 2)
    assert "the jobs cannot be connected: /dev/shm is full" in caplog.text
    made, ended = released
    assert made is ended
    assert [jobs.heard(number) for number in range(3)] == [[], [], []]
    with pytest.raises(
        SessionError,
        match=exactly("this world has started without this process, or was abandoned because a rank is gone"),
    ):
        jobs.membership.share_of(jobs.ranks[0], 1)
    jobs.close()


def test_a_rank_of_a_job_is_starting_until_a_process_has_its_place(tmp_path: Path) -> None:
    rank = AttachedRankHandle(Place("target", 0, 1, 1), tmp_path)
    assert (rank.status().state, rank.is_expected) == ("starting", True)
    rank.assign_process(1000, DeviceAssignment("cpu", "none"))
    assert (rank.status().state, rank.is_expected) == ("idle", False)
    rank.note_links(LinkReport(1, (0,), ()))
    rank.note_status(StatusUpdate(WireStatus("waiting", 5, 1, 9, 0.0, "x", (0,))))
    assert (rank.status().state, rank.status().step, rank.links) == ("waiting", 5, "shared memory")
    # One that has left is missing, and not waited for as the first one is.
    rank.alive = False
    assert not rank.is_expected
    # The next process in its place has neither its status nor its links.
    rank.renew()
    assert (rank.status(), rank.links, rank.pid) == (RankStatus("starting"), "", None)
    rank.close_rank_ends()


def test_a_new_process_has_neither_the_end_nor_the_status_of_the_one_before(tmp_path: Path) -> None:
    device = DeviceAssignment("cpu", "none")
    gone, released, replaced = (AttachedRankHandle(Place("target", 0, 1, 1), tmp_path) for _ in range(3))
    for handle in (gone, released, replaced):
        handle.assign_process(7, device)
    gone.alive = False
    gone.release()
    assert gone.how_it_ended() == "left, or its process ended"
    released.release()
    assert released.how_it_ended() == "was released, and continues without this session"
    released.assign_process(8, device)
    assert released.how_it_ended() == "left, or its process ended"
    segment = os.memfd_create("of-a-world")
    os.truncate(segment, mmap.PAGESIZE)
    with mmap.mmap(segment, mmap.PAGESIZE) as page:
        StatusPage(page).write("running", step=5, plan_version=1, taps=2)
    replaced.prepare_segment(segment)
    replaced.enter_world()
    assert replaced.status().step == 5
    replaced.renew()
    assert replaced.status() == RankStatus("starting")
    replaced.release()


def test_a_rank_that_is_introduced_learns_of_the_others_and_they_of_it() -> None:
    sent: dict[int, list[Any]] = {number: [] for number in range(3)}
    ranks: Any = [
        SimpleNamespace(
            place=SimpleNamespace(world_rank=number),
            channel=SimpleNamespace(send=lambda frame, to=number: sent[to].append(unpack_to_rank(frame))),
        )
        for number in range(3)
    ]
    contacts = [Contact(number, f"/{number}", b"nonce", b"name", "", 1000 + number) for number in range(3)]
    known: dict[int, Any] = {}
    for number in (1, 0):
        introduce(ranks[number], contacts[number], known, ranks)
    assert known == {1: contacts[1], 0: contacts[0]}
    assert [each.contacts for each in sent[1]] == [(), (contacts[0],)]
    assert [each.contacts for each in sent[0]] == [(contacts[1],)]
    # One that has not joined yet gets nothing.
    assert sent[2] == []


@pytest.mark.parametrize("agreed", [True, False])
def test_only_jobs_without_a_notebook_have_to_bring_one_plan(agreed: bool, tmp_path: Path) -> None:
    first = GraftPlan(b2t="layer == 3")
    session, server = open_session_server(
        Session, LaunchOptions(1, 1), first, tmp_path, Rendezvous(tmp_path), agreed=agreed
    )
    with session:
        join: Any = SimpleNamespace(side="target", rank=0, world_size=1, other_world_size=1, rejoin=None)
        join.plan = to_wire(first)
        assert server._objection(join) is None
        join.plan = to_wire(GraftPlan(b2t="layer == 4"))
        refused = server._objection(join)
        assert (refused is not None) == agreed
        if refused is not None:
            assert "(GRAFTLAB_B2T_FILTER) is 'layer == 4' here" in refused.error
            assert (refused.settings, refused.again) == (True, False)
        for join.rank in (-1, 1):
            with pytest.raises(SessionError, match=r"target\[-?1\] does not exist: target_world_size is 1"):
                server._objection(join)


def test_a_session_that_closes_ends_each_part_of_its_server_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    session, server = open_session_server(
        Session, LaunchOptions(1, 1), GraftPlan(), tmp_path, Rendezvous(tmp_path), agreed=False
    )
    done: list[str] = []
    parts: Any = server

    def note(name: str) -> None:
        close = getattr(parts, name).close
        monkeypatch.setattr(getattr(parts, name), "close", lambda: done.append(name) or close())

    # The socket is closed while no job looks for it, and what jobs share once none can join any more.
    parts._listener = SimpleNamespace(close=parts._listener.close)
    for name in ("_handshakes", "_listener", "_rendezvous", "_membership", "_refusals"):
        note(name)
    session.close()
    server.close()
    assert done == ["_handshakes", "_listener", "_rendezvous", "_membership", "_refusals"]
    with Rendezvous(tmp_path) as place:
        assert place.connect(0.1) is None


def test_a_job_that_gave_up_before_it_was_answered_has_left(tmp_path: Path) -> None:
    session, server = open_session_server(
        Session, LaunchOptions(1, 1), GraftPlan(), tmp_path, Rendezvous(tmp_path), agreed=False
    )
    with session:
        ours, theirs = socket.socketpair()
        with ours:
            send_handshake(theirs, JoinRequest("target", 0, 1, 1, os.getpid(), "cpu", "gloo", None, None))
            theirs.close()
            with pytest.raises(BrokenPipeError):
                server._accept(ours)
        assert server.over.wait(DEADLINE)
        join = JoinRequest("target", 0, 1, 1, os.getpid(), "cpu", "gloo", None, None)
        assert server._objection(join) is None


def test_all_jobs_of_an_earlier_session_continue_their_one_run(tmp_path: Path) -> None:
    first = GraftPlan(b2t="layer == 3")
    session, server = open_session_server(
        Session, LaunchOptions(1, 1), first, tmp_path, Rendezvous(tmp_path), agreed=False
    )
    theirs = GraftPlan(b2t="layer == 4", version=5)
    state = RejoinState(RunInfo(7, 30, (0, 1)), to_wire(theirs), lost_rows=0, session="an earlier one")
    with session:
        ranks = []
        for side in ("baseline", "target"):
            join = JoinRequest(side, 0, 1, 1, os.getpid(), "cpu", "gloo", None, state)
            rank, _ = server._admit(join, None)
            ranks.append(rank)
        assert [run.number for run in session.runs] == [7]
        assert (session.plan.b2t, session.plan.version) == ("layer == 4", 5)
        for rank in ranks:
            rank.close_rank_ends()


def test_those_that_wait_learn_of_a_refused_process_and_not_of_one_that_asks_again(tmp_path: Path) -> None:
    session, server = open_session_server(
        Session, LaunchOptions(1, 1), GraftPlan(), tmp_path, Rendezvous(tmp_path), agreed=False
    )
    said: list[Any] = []
    waits: Any = SimpleNamespace(channel=SimpleNamespace(send=lambda frame: said.append(unpack_to_rank(frame).what)))
    join = JoinRequest("target", 0, 1, 1, 4321, "cpu", "gloo", None, None)
    with session:
        for again, why in ((True, "its pid is taken"), (False, "it has no filter")):
            server._objection = lambda join, again=again, why=why: (  # type: ignore[method-assign, misc]
                RequestRefused(why, settings=True, again=again)
            )
            server._refusal(join)
            server._on_ask_missing(waits)
    assert "refused" not in said[0]
    assert said[1].endswith(" (target[0] (pid 4321) was refused: it has no filter)")


def test_a_session_of_jobs_is_over_once_the_last_rank_has_left(tmp_path: Path) -> None:
    session, server = open_session_server(
        Session, LaunchOptions(1, 1), GraftPlan(), tmp_path, Rendezvous(tmp_path), agreed=False
    )
    with session:
        ranks = []
        for side in ("baseline", "target"):
            rank, _ = server._admit(JoinRequest(side, 0, 1, 1, os.getpid(), "cpu", "gloo", None, None), None)
            ranks.append(rank)
        for rank, over in zip(ranks, (False, True), strict=True):
            server._on_left(rank)
            assert server.over.is_set() == over
        # Not before: the session would notice that both have left.
        for rank in ranks:
            rank.close_rank_ends()


def test_a_handle_keeps_open_nothing_of_a_process_that_was_replaced(tmp_path: Path) -> None:
    handle = AttachedRankHandle(Place("target", 0, 1, 1), tmp_path)
    ends = [handle.channel, handle._their_end]
    sockets = [handle.wake_socket, handle._their_wake]
    segments = [os.memfd_create(f"of-world-{number}") for number in range(3)]
    for segment in segments:
        os.truncate(segment, 1 << 16)

    def held() -> list[int]:
        return [sum(f"of-world-{number} " in link for _, link in descriptors()) for number in range(3)]

    assert held() == [1, 1, 1]
    handle.prepare_segment(segments[0])
    handle.prepare_segment(segments[1])
    handle.renew()
    assert [each.fileno() for each in (*ends, *sockets)] == [-1] * 4
    handle.prepare_segment(segments[2])
    handle.enter_world()
    # That of the status page.
    assert held() == [0, 0, 1]
    handle.release()
