"""Who holds a session of jobs: lets them in, one process a rank, each time that one is missing."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import select
import shlex
import socket
import threading
from pathlib import Path
from typing import TypeVar

from graftlab.base.world import Place
from graftlab.config import Endpoint
from graftlab.control.core import SessionCore, internals_of
from graftlab.control.run_folder import describe_session
from graftlab.errors import GraftError, LaunchError, MessageError, SessionError
from graftlab.exchange.tcp import RemoteChannel
from graftlab.jobs.attached_rank import AttachedRank
from graftlab.jobs.gate import Gate
from graftlab.jobs.gathering import Gathering
from graftlab.jobs.greeting import Fetch, Join, Joined, Look, Refused, Share, hear, our_version, pack, tell, unpack
from graftlab.jobs.looking import seen
from graftlab.jobs.meeting import Meeting, peer_of
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.plan.wire import from_wire, to_wire
from graftlab.ranks.descriptors import receive_descriptors, send_descriptors
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Contact, LinkReport, WaitReason, WorldSwitch
from graftlab.ranks.messages import pack as pack_message
from graftlab.ranks.options import LaunchOptions
from graftlab.rows.store import RowStore

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=SessionCore)

# Seconds that a process has to say who it is, once it has connected.
_GREETING_LIMIT = 10.0


class Host:
    """Holds the meeting for a session. ``over`` is set when all that had joined are gone again.

    With ``agreed`` every job has to bring the same plan; otherwise the plan is the session's alone. With a ``gate``
    jobs of other machines come in too, and ranks make their connections themselves, each as it can.
    """

    def __init__(
        self,
        session: SessionCore,
        meeting: Meeting,
        listener: socket.socket,
        agreed: GraftPlan | None,
        gate: Gate | None,
    ) -> None:
        self.over = threading.Event()
        self._name = secrets.token_hex(8)
        self._session = session
        self._jobs = internals_of(session).jobs
        self._ranks = [rank for rank in session.ranks if isinstance(rank, AttachedRank)]
        self._meeting = meeting
        self._listener = listener
        self._agreed = agreed
        self._first_plan = session.plan
        self._gate = gate
        self._gathering = Gathering(self._ranks, self._jobs, makes_links=gate is None)
        # For those who look on from a terminal, one at a time.
        self._taps = session.live_taps()
        self._looking = threading.Lock()
        # Which place the last process asked for that was not let in, and what it was told.
        self._turned_away: tuple[str, str] | None = None
        # Joining and leaving are told on two threads.
        self._lock = threading.Lock()
        self._resumed = False
        self._closed = False
        reports = internals_of(session).reports
        reports.on_joined, reports.on_left = self._on_joined, self._on_left
        reports.on_contact, reports.on_linked, reports.on_moved = self._on_contact, self._on_linked, self._on_moved
        reports.on_ask_missing = self._on_ask_missing
        internals_of(session).close_first = self.close
        self._wake_read, self._wake_write = os.pipe()
        self._thread = threading.Thread(target=self._serve, name="graftlab-host", daemon=True)
        self._thread.start()
        if gate is not None:
            gate.open(self._greet_from_afar)

    @property
    def is_empty(self) -> bool:
        """Whether nobody is there, or was."""
        return not any(rank.has_joined for rank in self._ranks)

    @property
    def invitation(self) -> str:
        """The variables with which a job of each side joins, a line a side."""
        options = self._session.options
        where = shlex.quote(str(self._meeting.folder)) if self._gate is None else str(self._gate.endpoint)
        lines = [
            f"  {side}: GRAFTLAB_ENABLE=1 GRAFTLAB_ROLE={side} GRAFTLAB_ADDRESS={where} "
            f"GRAFTLAB_BASELINE_WORLD_SIZE={options.baseline} GRAFTLAB_TARGET_WORLD_SIZE={options.target}"
            for side in ("baseline", "target")
        ]
        if self._gate is not None:
            lines += [
                "and this token in GRAFTLAB_TOKEN, or in a file of mode 0600 that GRAFTLAB_TOKEN_FILE names "
                f"({self._meeting.token_path} is one):",
                f"  {self._gate.token}",
            ]
        return "\n".join(lines)

    def close(self) -> None:
        """Let nobody in any more."""
        if self._closed:
            return
        self._closed = True
        os.write(self._wake_write, b"x")
        self._thread.join()
        if self._gate is not None:
            self._gate.close()
        with self._meeting.locked():
            self._meeting.forget()
            self._listener.close()
        self._meeting.close()
        with self._lock:
            self._gathering.close()
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
        if isinstance(join, Look):
            self._show(connection.dup(), join)
            return
        if isinstance(join, Fetch):
            self._hand_out(connection, join)
            return
        if not isinstance(join, Join):
            raise SessionError(f"it said {type(join).__name__} before it had asked to join")
        brings = join.membership is not None and not join.membership.linked
        segment = receive_descriptors(connection, 1)[0] if brings else None
        with self._lock:
            refused = self._refusal(join)
            if refused is not None:
                tell(connection, refused)
                if segment is not None:
                    os.close(segment)
                return
            self._let_in(connection, join, segment)

    def _hand_out(self, connection: socket.socket, fetch: Fetch) -> None:
        """Give a rank that has joined its share of what all have in a world."""
        with self._lock:
            try:
                rank = self._rank_of(fetch)
                if rank.pid != fetch.pid:
                    raise SessionError(f"{rank.label} is pid {rank.pid}, not {fetch.pid}")
                size, descriptors = self._gathering.share_of(rank, fetch.world)
            except SessionError as error:
                tell(connection, Refused(str(error), settings=False))
                return
            tell(connection, Share(size, len(descriptors)))
            send_descriptors(connection, descriptors)

    def _show(self, connection: socket.socket, look: Look) -> None:
        """Answer on a thread of its own: ranks that are asked for their stacks may take their time."""

        def answer() -> None:
            with connection:
                try:
                    with self._looking:
                        tell(connection, seen(self._session, self._taps, stacks=look.stacks))
                except (OSError, GraftError) as error:
                    logger.warning("a look at this session was not answered: %s", error)

        threading.Thread(target=answer, name="graftlab-look", daemon=True).start()

    def _greet_from_afar(self, far: RemoteChannel, frame: bytes) -> None:
        """The first word of a process on another machine, which has proved that it knows the token."""
        try:
            join = unpack(frame)
        except MessageError as error:
            far.send(pack(Refused(f"what it said is no greeting: {error}", settings=False)))
            raise
        if not isinstance(join, Join):
            raise SessionError(f"it said {type(join).__name__} before it had asked to join")
        with self._lock:
            if refused := self._refusal(join):
                far.send(pack(refused))
                return
            rank, note = self._admit(join, None)
            rank.hand_over(join.pid, DeviceAssignment(join.device, join.backend, (note,) if note else ()))
            assert self._gate is not None
            far.send(pack(self._joined(rank, [])))
            self._gate.carry(far, *rank.take_line())
            if join.membership is not None:
                self._jobs.tell_plan(rank)

    def _refusal(self, join: Join) -> Refused | None:
        why, settings, again = self._objection(join)
        if not why:
            return None
        who = f"{join.side}[{join.rank}] (pid {join.pid})"
        logger.warning("%s may not join%s: %s", who, " yet" * again, why)
        if not again:
            self._turned_away = f"{join.side}[{join.rank}]", f"{who} was not let in, and told: {why}"
        return Refused(why, settings, again)

    def _objection(self, join: Join) -> tuple[str, bool, bool]:
        """Why this process cannot have the place, blank where it can; whether its settings are at fault, and whether it
        may ask again."""
        options = self._session.options
        if join.version != our_version():
            return f"it runs graftlab {join.version}, and the session graftlab {our_version()}", False, False
        mine, others = options.baseline, options.target
        if join.side == "target":
            mine, others = others, mine
        if (join.world_size, join.other_world_size) != (mine, others):
            other = "target" if join.side == "baseline" else "baseline"
            return (
                f"{join.side}_world_size is {join.world_size} and {other}_world_size {join.other_world_size} there; "
                f"the session is of {options.baseline} baseline and {options.target} target ranks",
                True,
                False,
            )
        rank = self._rank_of(join)
        if rank.place.world_rank in self._gathering.held:
            # What comes in place of one that was killed may be quicker than the news of its death, above all from a
            # machine that has vanished.
            again = self._gathering.has_begun and (self._gate is not None or not _is_running(rank.pid))
            other = "target" if join.side == "baseline" else "baseline"
            return (
                f"{rank.label} has joined already, as pid {rank.pid}. Should this job be the {other} (GRAFTLAB_ROLE)? "
                f"A second pair of jobs needs a folder of its own (GRAFTLAB_RUN_DIR)",
                False,
                again,
            )
        returns = join.membership is not None and join.membership.session == self._name
        if join.membership is not None and not returns and self._gathering.held and not self._resumed:
            return f"{rank.label} is in a run of another session, and this one has its own", False, False
        if self._agreed is not None and join.plan is not None:
            return _difference(from_wire(join.plan), self._agreed), True, False
        return "", False, False

    def _let_in(self, connection: socket.socket, join: Join, segment: int | None) -> None:
        rank, note = self._admit(join, segment)
        line = rank.hand_over(join.pid, DeviceAssignment(join.device, join.backend, (note,) if note else ()))
        tell(connection, self._joined(rank, line, local=True))
        send_descriptors(connection, line)
        rank.handed_over()
        if join.membership is not None:
            self._jobs.tell_plan(rank)

    def _admit(self, join: Join, segment: int | None) -> tuple[AttachedRank, str]:
        """The place of a process that may join, and what is to be noted of it."""
        rank = self._rank_of(join)
        if self._turned_away is not None and self._turned_away[0] == rank.label:
            self._turned_away = None
        note = ""
        if rank.has_joined:
            # Another process had it, whose line has ended.
            rank.renew()
            self._jobs.hear(rank)
        run = None if join.membership is None else join.membership.run
        self._gathering.enter(rank, run, join.first_step)
        if join.membership is not None:
            rank.generation = self._gathering.generation(rank.place.side)
            if not join.membership.linked:
                rank.links = "shared memory"
            if segment is not None:
                rank.adopt_segment(segment)
            if join.membership.session == self._name:
                # Its line was cut, and it is in this session's run all the time.
                self._jobs.note_return(rank, join.membership.run.run)
                self._jobs.outrank(from_wire(join.membership.plan))
            elif not self._resumed:
                self._resumed = True
                # What was published before anybody was here was for a job that begins anew.
                published = self._session.plan is not self._first_plan
                self._jobs.resume(join.membership.run, from_wire(join.membership.plan), published=published)
            else:
                self._jobs.outrank(from_wire(join.membership.plan))
            if join.membership.lost_rows:
                note = f"at least {join.membership.lost_rows:,} rows were made while nobody listened, and are lost"
                logger.warning("%s: %s", rank.label, note)
        return rank, note

    def _joined(self, rank: AttachedRank, line: list[int], *, local: bool = False) -> Joined:
        options, gate = self._session.options, self._gate
        return Joined(
            folder=str(self._session.folder),
            log=str(rank.log),
            tap_timeout=options.tap_limit,
            buffer_budget=options.buffer_budget,
            keep_budget=options.keep_budget,
            descriptors=len(line),
            address="" if gate is None else gate.endpoint.host,
            token=gate.token if gate is not None and local else "",
            session=self._name,
        )

    def _rank_of(self, join: Join | Fetch) -> AttachedRank:
        sizes = (join.world_size, join.other_world_size)
        if not 0 <= join.rank < join.world_size:
            raise SessionError(f"there is no {join.side}[{join.rank}] among {join.world_size}")
        return self._ranks[Place(join.side, join.rank, *sizes).world_rank]

    # ---- on the hub's thread ------------------------------------------------------------------------------------

    def _on_joined(self, rank: RankHandle) -> None:
        with self._lock:
            logger.info("%s has joined (pid %s)", rank.label, rank.pid)
            self._gathering.greet(_attached(rank))

    def _on_contact(self, rank: RankHandle, contact: Contact) -> None:
        with self._lock:
            self._gathering.note_contact(_attached(rank), contact)

    def _on_linked(self, rank: RankHandle, linked: LinkReport) -> None:
        with self._lock:
            self._gathering.note_linked(_attached(rank), linked)

    def _on_moved(self, rank: RankHandle, moved: WorldSwitch) -> None:
        with self._lock:
            self._gathering.note_moved(_attached(rank), moved)

    def _on_ask_missing(self, rank: RankHandle) -> None:
        with self._lock:
            missing = self._gathering.missing()
            if self._turned_away is not None:
                missing += f" ({self._turned_away[1]})"
            rank.channel.send(pack_message(WaitReason(missing)))

    def _on_left(self, rank: RankHandle) -> None:
        with self._lock:
            attached = _attached(rank)
            had_begun = self._gathering.is_at_work(attached)
            self._gathering.leave(attached)
            logger.info("%s has left", rank.label)
            if not had_begun and not self._closed:
                # It never began, so nobody is to be told how it ended; another process may have the place.
                attached.renew()
                self._jobs.hear(attached)
            if not self._gathering.held:
                self.over.set()


def _attached(rank: RankHandle) -> AttachedRank:
    assert isinstance(rank, AttachedRank)
    return rank


def _is_running(pid: int | None) -> bool:
    """Whether there is such a process on this machine, and it has not ended yet."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


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
    gate: tuple[Endpoint, str | None] | None = None,
) -> tuple[S, Host]:
    """A session of this kind for jobs that join in the meeting's folder, and its host.

    With a ``gate`` jobs of other machines join there too: where it listens, and the token, where there is one already.

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
    opened = None
    if gate is not None:
        endpoint, token = gate
        try:
            opened = Gate(endpoint, meeting.own_token(token))
        except (OSError, GraftError) as error:
            listener.close()
            raise LaunchError(f"{error}; name an address of this machine's, and a port that is free") from error
    rows: RowStore | None = None
    try:
        rows = RowStore(folder, append=append)
        describe_session(folder, (options.baseline, options.target), rows.first_run, meeting.folder)
        places = Place("baseline", 0, options.baseline, options.target).everyone()
        ranks = [AttachedRank(place, folder) for place in places]
        session = kind(options, ranks, plan, rows, folder)
    except BaseException as error:
        listener.close()
        if opened is not None:
            opened.close()
        if rows is not None:
            with contextlib.suppress(SessionError):
                rows.close()
        if isinstance(error, (SessionError, OSError)) and not isinstance(error, LaunchError):
            raise LaunchError(str(error)) from error
        raise
    return session, Host(session, meeting, listener, plan if agreed else None, opened)


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
