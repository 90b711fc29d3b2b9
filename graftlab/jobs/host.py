"""Who holds a session of jobs: lets them in, one process a rank, and begins the run when all are there."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import shlex
import socket
import threading
from pathlib import Path
from typing import TypeVar

from graftlab.base.world import Place
from graftlab.control.core import SessionCore
from graftlab.control.run_folder import describe_session
from graftlab.errors import GraftError, LaunchError, MessageError, SessionError
from graftlab.jobs.attached_rank import AttachedRank
from graftlab.jobs.greeting import Join, Joined, Refused, hear, our_version, tell
from graftlab.jobs.meeting import Meeting, peer_of
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.plan.wire import from_wire, to_wire
from graftlab.ranks.devices import Seat
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.options import LaunchOptions
from graftlab.ranks.settling import receive_descriptors
from graftlab.ranks.shared import Shared, send_descriptors
from graftlab.rows.store import RowStore

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=SessionCore)

# Seconds that a process has to say who it is, once it has connected.
_GREETING_LIMIT = 10.0


class Host:
    """Holds the meeting for a session. ``over`` is set when all that had joined are gone again.

    With ``agreed`` every job has to bring the same plan; otherwise the plan is the session's alone.
    """

    def __init__(
        self, session: SessionCore, shared: Shared, meeting: Meeting, listener: socket.socket, agreed: GraftPlan | None
    ) -> None:
        self.over = threading.Event()
        self._session = session
        self._ranks = [rank for rank in session.ranks if isinstance(rank, AttachedRank)]
        self._shared = shared
        self._meeting = meeting
        self._listener = listener
        self._agreed = agreed
        self._first_plan = session.plan
        # Joining and leaving are told on two threads.
        self._lock = threading.Lock()
        self._greeted: set[int] = set()
        self._begun = False
        self._resumed = False
        self._closed = False
        session.reports.on_joined, session.reports.on_left = self._on_joined, self._on_left
        session.closes_first = self.close
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="graftlab-host", daemon=True)
        self._thread.start()

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there, or was."""
        return not any(rank.has_joined for rank in self._ranks)

    @property
    def invitation(self) -> str:
        """The variables with which a job of each side joins, a line a side."""
        options = self._session.options
        where = shlex.quote(str(self._meeting.folder))
        return "\n".join(
            f"  {side}: GRAFTLAB_ENABLE=1 GRAFTLAB_ROLE={side} GRAFTLAB_ADDRESS={where} "
            f"GRAFTLAB_BASELINE_WORLD_SIZE={options.baseline} GRAFTLAB_TARGET_WORLD_SIZE={options.target}"
            for side in ("baseline", "target")
        )

    def close(self) -> None:
        """Let nobody in any more."""
        if self._closed:
            return
        self._closed = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        with self._meeting.locked():
            self._meeting.forget()
            self._listener.close()
        self._meeting.close()
        self._shared.release()
        os.close(self._wake_read)
        os.close(self._wake_write)

    # ---- letting jobs in ----------------------------------------------------------------------------------------

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._wake_read, select.POLLIN)
        while self._wake_read not in [descriptor for descriptor, _ in poller.poll()]:
            connection, _ = self._listener.accept()
            with connection:
                connection.settimeout(_GREETING_LIMIT)
                try:
                    self._greet(connection)
                except (OSError, EOFError, GraftError) as error:
                    logger.warning("a process that wanted to join was not let in: %s", error)

    def _greet(self, connection: socket.socket) -> None:
        if (uid := peer_of(connection)) != os.getuid():
            raise SessionError(f"it is of user {uid}, not {os.getuid()}")
        try:
            join = hear(connection)
        except MessageError as error:
            tell(connection, Refused(f"what it said is no greeting: {error}", settings=False))
            raise
        if join is None:
            return  # somebody looked whether there is anybody
        if not isinstance(join, Join):
            raise SessionError(f"it said {type(join).__name__} before it had asked to join")
        segment = receive_descriptors(connection, 1)[0] if join.membership is not None else None
        with self._lock:
            why, settings = self._objection(join)
            if why:
                logger.warning("%s[%d] (pid %d) may not join: %s", join.side, join.rank, join.pid, why)
                tell(connection, Refused(why, settings))
                if segment is not None:
                    os.close(segment)
                return
            self._let_in(connection, join, segment)

    def _objection(self, join: Join) -> tuple[str, bool]:
        """Why this process cannot have the place, and whether its settings are at fault; blank where it can."""
        options = self._session.options
        if join.version != our_version():
            return f"it runs graftlab {join.version}, and the session graftlab {our_version()}", False
        mine, others = options.baseline, options.target
        if join.side == "target":
            mine, others = others, mine
        if (join.world_size, join.other_world_size) != (mine, others):
            other = "target" if join.side == "baseline" else "baseline"
            return (
                f"{join.side}_world_size is {join.world_size} and {other}_world_size {join.other_world_size} there; "
                f"the session is of {options.baseline} baseline and {options.target} target ranks",
                True,
            )
        rank = self._rank_of(join)
        if rank.alive:
            return f"{rank.label} has joined already, as pid {rank.pid}", False
        if join.membership is None and (self._begun or self._resumed):
            return (
                f"the run has begun, and {rank.label} {rank.how_it_ended()}; the others have no connection to a new "
                f"process. Start the jobs of both sides again",
                False,
            )
        if join.membership is not None and (self._begun or (self._greeted and not self._resumed)):
            return f"{rank.label} is in a run of another session, and this one has its own", False
        if self._agreed is not None and join.plan is not None:
            return _difference(from_wire(join.plan), self._agreed), True
        return "", False

    def _let_in(self, connection: socket.socket, join: Join, segment: int | None) -> None:
        rank = self._rank_of(join)
        place = rank.place
        note = ""
        if join.membership is not None:
            assert segment is not None
            rank.adopt_segment(segment)
            shared: list[int] = []
            if not self._resumed:
                self._resumed = True
                # What was published before anybody was here was for a job that begins anew.
                published = self._session.plan is not self._first_plan
                self._session.joined.resume(join.membership.run, from_wire(join.membership.plan), published=published)
            if join.membership.lost_rows:
                note = f"at least {join.membership.lost_rows:,} rows were made while nobody listened, and are lost"
                logger.warning("%s: %s", rank.label, note)
        else:
            shared = self._shared.of(place)
        options = self._session.options
        line = rank.hand_over(join.pid, Seat(join.device, join.backend, (note,) if note else ()))
        tell(
            connection,
            Joined(
                folder=str(self._session.folder),
                log=str(rank.log),
                segment_size=self._shared.segment_size,
                tap_timeout=options.tap_limit,
                buffer_budget=options.buffer_budget,
                keep_budget=options.keep_budget,
                descriptors=len(shared) + len(line),
            ),
        )
        send_descriptors(connection, [*shared, *line])
        rank.handed_over()
        if join.membership is not None:
            self._session.joined.tell_plan(rank)

    def _rank_of(self, join: Join) -> AttachedRank:
        sizes = (join.world_size, join.other_world_size)
        if not 0 <= join.rank < join.world_size:
            raise SessionError(f"there is no {join.side}[{join.rank}] among {join.world_size}")
        return self._ranks[Place(join.side, join.rank, *sizes).world_rank]

    # ---- on the hub's thread ------------------------------------------------------------------------------------

    def _on_joined(self, rank: RankHandle) -> None:
        with self._lock:
            self._greeted.add(rank.place.world_rank)
            logger.info("%s has joined (pid %s)", rank.label, rank.pid)
            if self._resumed or self._begun or len(self._greeted) < len(self._ranks):
                return
            self._begun = True
            # Were these kept here, nobody would notice the death of another.
            self._shared.release()
        self._session.joined.begin()

    def _on_left(self, rank: RankHandle) -> None:
        with self._lock:
            self._greeted.discard(rank.place.world_rank)
            if not self._begun and not self._closed and isinstance(rank, AttachedRank):
                # Nothing has begun, so another process may have the place; or the same one comes back.
                rank.renew()
                self._session.joined.hear(rank)
            if not self._greeted:
                self.over.set()


def listen_as(
    kind: type[S],
    options: LaunchOptions,
    plan: GraftPlan,
    folder: Path,
    meeting: Meeting,
    listener: socket.socket | None = None,
    *,
    append: bool = False,
    agreed: bool = False,
) -> tuple[S, Host]:
    """A session of this kind for jobs that join in the meeting's folder, and its host.

    Raises :class:`LaunchError` where another session listens there, or the run folder cannot be used.
    """
    if listener is None:
        with meeting.locked():
            listener = meeting.listen()
        if listener is None:
            raise LaunchError(
                f"somebody listens in {meeting.folder} already: another notebook, or the host of jobs that run without "
                f"one; close that session, or pass another folder="
            )
    rows: RowStore | None = None
    shared = Shared(Place("baseline", 0, options.baseline, options.target).everyone())
    try:
        rows = RowStore(folder, append=append)
        describe_session(folder)
        shared.make()
        places = Place("baseline", 0, options.baseline, options.target).everyone()
        ranks = [AttachedRank(place, shared.segments[place.world_rank], folder) for place in places]
        session = kind(options, ranks, plan, rows, folder)
    except BaseException as error:
        listener.close()
        shared.release()
        if rows is not None:
            with contextlib.suppress(SessionError):
                rows.close()
        if isinstance(error, (SessionError, OSError)) and not isinstance(error, LaunchError):
            raise LaunchError(str(error)) from error
        raise
    return session, Host(session, shared, meeting, listener, plan if agreed else None)


def _difference(theirs: GraftPlan, ours: GraftPlan) -> str:
    """What of a plan is other than in the one that the first job brought; blank where nothing is."""
    for name in (*FILTERS, "transform"):
        here, there = getattr(to_wire(ours), name), getattr(to_wire(theirs), name)
        if here != there:
            field = "transform_path" if name == "transform" else f"{name}_filter"
            return (
                f"{field} (GRAFTLAB_{field.upper()}) is {_shown(there)} here, and {_shown(here)} in the job that came "
                f"first; both sides need the same"
            )
    return ""


def _shown(value: object) -> str:
    return repr(getattr(value, "text", value))
