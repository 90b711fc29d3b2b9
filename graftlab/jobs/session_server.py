"""The session server: admits the processes of jobs to a session, one per rank."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import shlex
import socket
import threading
from pathlib import Path
from typing import TypeVar

from graftlab.base.world import SIDES, Place, Side, other_side
from graftlab.config import Endpoint
from graftlab.control.core import SessionCore, internals_of
from graftlab.control.run_folder import describe_session
from graftlab.errors import GraftError, LaunchError, MessageError, SessionError
from graftlab.exchange.tcp import TcpChannel
from graftlab.jobs.agreed_plan import AgreedPlan
from graftlab.jobs.attached_rank_handle import AttachedRankHandle
from graftlab.jobs.handshake import (
    JoinAccepted,
    JoinRequest,
    RequestRefused,
    StatusQuery,
    WorldShare,
    WorldShareRequest,
    pack_handshake,
    receive_handshake,
    send_handshake,
    unpack_handshake,
)
from graftlab.jobs.handshake_listener import HandshakeListener
from graftlab.jobs.membership import Membership
from graftlab.jobs.proxy import Ends, TcpListener
from graftlab.jobs.refusals import RefusalLog
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.jobs.status_query import answer_status_query
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire
from graftlab.ranks.descriptors import receive_descriptors, send_descriptors
from graftlab.ranks.devices import DeviceAssignment
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Contact, LinkReport, WaitReason, WorldSwitch
from graftlab.ranks.messages import pack as pack_message
from graftlab.ranks.options import LaunchOptions
from graftlab.rows.store import RowStore

logger = logging.getLogger(__name__)

S = TypeVar("S", bound=SessionCore)

_TOKEN_FILE = "GRAFTLAB_TOKEN_FILE"


class SessionServer:
    """Admits jobs to a session at a rendezvous. ``over`` is set when all processes that had joined are gone.

    With ``agreed`` every job must bring that plan; otherwise the session's plan holds. With a ``tcp_listener`` jobs of
    other machines can join, and ranks connect to each other themselves.
    """

    def __init__(
        self,
        session: SessionCore,
        rendezvous: Rendezvous,
        listener: socket.socket,
        agreed: GraftPlan | None,
        tcp_listener: TcpListener | None,
    ) -> None:
        self.over = threading.Event()
        self._name = secrets.token_hex(8)
        self._session = session
        self._jobs = internals_of(session).jobs
        self._ranks = [rank for rank in session.ranks if isinstance(rank, AttachedRankHandle)]
        self._rendezvous = rendezvous
        self._listener = listener
        self._agreed = None if agreed is None else AgreedPlan(agreed)
        self._first_plan = session.plan
        self._tcp_listener = tcp_listener
        self._membership = Membership(self._ranks, self._jobs, makes_links=tcp_listener is None)
        # Status queries are answered one at a time.
        self._taps = session.live_taps()
        self._status_lock = threading.Lock()
        # The rank that the last refused process asked for, and the reason for the refusal.
        self._last_refused: tuple[str, str] | None = None
        # Jobs join on this thread and the proxy's, and leave on the hub's.
        self._lock = threading.Lock()
        self._resumed = False
        self._closed = False
        reports = internals_of(session).reports
        reports.on_joined, reports.on_left = self._on_joined, self._on_left
        reports.on_contact, reports.on_linked, reports.on_moved = self._on_contact, self._on_linked, self._on_moved
        reports.on_ask_missing = self._on_ask_missing
        internals_of(session).close_first = self.close
        internals_of(session).environment_of = self.environment
        self._refusals = RefusalLog()
        self._handshakes = HandshakeListener(listener, self._accept, self._refusals)
        if tcp_listener is not None:
            tcp_listener.open(self._accept_tcp)

    @property
    def is_empty(self) -> bool:
        """Whether no process has joined yet."""
        return not any(rank.has_joined for rank in self._ranks)

    def environment(self, side: Side) -> dict[str, str]:
        """The environment variables with which a job of this side joins."""
        options, tcp = self._session.options, self._tcp_listener
        found = {
            "GRAFTLAB_ENABLE": "1",
            "GRAFTLAB_ROLE": side,
            "GRAFTLAB_ADDRESS": str(self._rendezvous.folder if tcp is None else tcp.endpoint),
            "GRAFTLAB_BASELINE_WORLD_SIZE": str(options.baseline),
            "GRAFTLAB_TARGET_WORLD_SIZE": str(options.target),
        }
        return found if tcp is None else found | {_TOKEN_FILE: str(self._rendezvous.token_path)}

    @property
    def invitation(self) -> str:
        """The environment variables with which a job of each side joins, one line per side."""
        lines = []
        for side in SIDES:
            given = {name: text for name, text in self.environment(side).items() if name != _TOKEN_FILE}
            lines.append(f"  {side}: " + " ".join(f"{name}={shlex.quote(text)}" for name, text in given.items()))
        if self._tcp_listener is not None:
            lines += [
                f"and this token in GRAFTLAB_TOKEN, or in a file of mode 0600 that {_TOKEN_FILE} names "
                f"({self._rendezvous.token_path} is one):",
                f"  {self._tcp_listener.token}",
            ]
        return "\n".join(lines)

    def close(self) -> None:
        """Stop admitting jobs."""
        if self._closed:
            return
        self._closed = True
        self._handshakes.close()
        if self._tcp_listener is not None:
            self._tcp_listener.close()
        with self._rendezvous.locked():
            self._rendezvous.unlink()
            self._listener.close()
        self._rendezvous.close()
        with self._lock:
            self._membership.close()
        self._refusals.close()

    # ---- admitting jobs -----------------------------------------------------------------------------------------

    def _accept(self, connection: socket.socket) -> None:
        try:
            join = receive_handshake(connection)
        except (MessageError, SessionError) as error:
            send_handshake(connection, RequestRefused(f"the handshake could not be read: {error}", settings=False))
            raise
        if join is None:
            return  # the process only checked whether a server listens
        if isinstance(join, StatusQuery):
            self._answer_status_query(connection.dup(), join)
            return
        if isinstance(join, WorldShareRequest):
            self._send_share(connection, join)
            return
        if not isinstance(join, JoinRequest):
            raise SessionError(f"it sent {type(join).__name__} instead of a request to join")
        brings = join.rejoin is not None and not join.rejoin.linked
        segment = receive_descriptors(connection, 1)[0] if brings else None
        with self._lock:
            # A closing session does not answer, and the process asks the next one.
            refused = None if self._closed else self._refusal(join)
            if refused is not None or self._closed:
                if refused is not None:
                    send_handshake(connection, refused)
                if segment is not None:
                    os.close(segment)
                return
            self._admit_here(connection, join, segment)

    def _send_share(self, connection: socket.socket, request: WorldShareRequest) -> None:
        """Send an attached rank its descriptors of a world."""
        with self._lock:
            try:
                rank = self._rank_of(request)
                if rank.pid != request.pid:
                    raise SessionError(f"{rank.label} is pid {rank.pid}, not {request.pid}")
                size, descriptors = self._membership.share_of(rank, request.world)
            except SessionError as error:
                send_handshake(connection, RequestRefused(str(error), settings=False))
                return
            send_handshake(connection, WorldShare(size, len(descriptors)))
            send_descriptors(connection, descriptors)

    def _answer_status_query(self, connection: socket.socket, query: StatusQuery) -> None:
        """Answer on a separate thread, because ranks may take long to return their stacks."""

        def answer() -> None:
            with connection:
                try:
                    with self._status_lock:
                        send_handshake(connection, answer_status_query(self._session, self._taps, stacks=query.stacks))
                except (OSError, GraftError) as error:
                    logger.warning("a status query was not answered: %s", error)

        threading.Thread(target=answer, name="graftlab-status-query", daemon=True).start()

    def _accept_tcp(self, far: TcpChannel, frame: bytes) -> Ends | None:
        """Handle the first frame of a process on another machine, which has proved that it knows the token."""
        try:
            join = unpack_handshake(frame)
        except (MessageError, SessionError) as error:
            far.send(pack_handshake(RequestRefused(f"the handshake could not be read: {error}", settings=False)))
            raise
        if not isinstance(join, JoinRequest):
            raise SessionError(f"it sent {type(join).__name__} instead of a request to join")
        with self._lock:
            if refused := self._refusal(join):
                far.send(pack_handshake(refused))
                return None
            rank, _ = self._admit(join, None)
            far.send(pack_handshake(self._accepted(rank, [])))
            if join.rejoin is not None:
                self._jobs.plans.send_to(rank)
            return rank.take_ends()

    def _refusal(self, join: JoinRequest) -> RequestRefused | None:
        refused = self._objection(join)
        if refused is not None:
            who = f"{join.side}[{join.rank}] (pid {join.pid})"
            self._refusals.warn(f"{who} may not join{' yet' * refused.again}: {refused.error}")
            if not refused.again:
                self._last_refused = f"{join.side}[{join.rank}]", f"{who} was refused: {refused.error}"
        return refused

    def _objection(self, join: JoinRequest) -> RequestRefused | None:
        """Return why this process cannot be that rank, if it cannot."""
        options = self._session.options
        mine, others = options.baseline, options.target
        if join.side == "target":
            mine, others = others, mine
        if (join.world_size, join.other_world_size) != (mine, others):
            other = other_side(join.side)
            return RequestRefused(
                f"{join.side}_world_size is {join.world_size} and {other}_world_size {join.other_world_size} in this "
                f"job; the session has {options.baseline} baseline and {options.target} target ranks",
                settings=True,
            )
        rank = self._rank_of(join)
        if rank.place.world_rank in self._membership.occupied:
            # The successor of a killed process may arrive before the server has noticed the death, above all if a whole
            # machine has vanished.
            again = self._membership.has_begun and (self._tcp_listener is not None or not _is_running(rank.pid))
            other = other_side(join.side)
            return RequestRefused(
                f"{rank.label} has joined already, as pid {rank.pid}. Should this job be the {other} (GRAFTLAB_ROLE)? "
                f"A second pair of jobs needs a separate folder (GRAFTLAB_RUN_DIR)",
                settings=False,
                again=again,
            )
        returns = join.rejoin is not None and join.rejoin.session == self._name
        if join.rejoin is not None and not returns and self._membership.occupied and not self._resumed:
            return RequestRefused(
                f"{rank.label} is in a run of another session, and this session already has its own run",
                settings=False,
            )
        if self._agreed is not None and join.plan is not None:
            why = self._agreed.objection(join.side, from_wire(join.plan))
            return RequestRefused(why, settings=True) if why else None
        return None

    def _admit_here(self, connection: socket.socket, join: JoinRequest, segment: int | None) -> None:
        rank, ends = self._admit(join, segment)
        try:
            send_handshake(connection, self._accepted(rank, ends, local=True))
            send_descriptors(connection, ends)
        finally:
            # Of a process that no longer waits for the answer, too: open here they would hold its place for good.
            rank.close_rank_ends()
        if join.rejoin is not None:
            self._jobs.plans.send_to(rank)

    def _admit(self, join: JoinRequest, segment: int | None) -> tuple[AttachedRankHandle, list[int]]:
        """Give the process its rank, and return it with the descriptors of its ends."""
        rank = self._rank_of(join)
        if self._agreed is not None and join.plan is not None:
            plan, newest = self._agreed.enter(join.side, from_wire(join.plan)), self._session.plan
            if newest is self._first_plan and plan.transforms != newest.transforms:
                self._first_plan = self._session.edit(transform=plan.transform)
        if self._last_refused is not None and self._last_refused[0] == rank.label:
            self._last_refused = None
        notes: tuple[str, ...] = ()
        if rank.has_joined:
            # Another process was this rank, and its connection has ended.
            rank.renew()
            self._jobs.hub.add(rank)
        run = None if join.rejoin is None else join.rejoin.run
        self._membership.enter(rank, run, join.first_step)
        if join.rejoin is not None:
            rank.generation = self._membership.generation(rank.place.side)
            if not join.rejoin.linked:
                rank.links = "shared memory"
            if segment is not None:
                rank.adopt_segment(segment)
            returns = join.rejoin.session == self._name
            if returns:
                # Only its connection was cut: it has stayed in this session's run.
                self._jobs.runs.note_return(rank, join.rejoin.run.run)
            if returns or self._resumed:
                self._jobs.supersede(from_wire(join.rejoin.plan))
            else:
                self._resumed = True
                # A plan that was published before any job joined was meant for a new job.
                published = self._session.plan is not self._first_plan
                self._jobs.resume(join.rejoin.run, from_wire(join.rejoin.plan), published=published)
            if join.rejoin.lost_rows:
                note = f"at least {join.rejoin.lost_rows:,} rows were made while no session listened, and are lost"
                logger.warning("%s: %s", rank.label, note)
                notes = (note,)
        return rank, rank.assign_process(join.pid, DeviceAssignment(join.device, join.backend, notes))

    def _accepted(self, rank: AttachedRankHandle, ends: list[int], *, local: bool = False) -> JoinAccepted:
        options, tcp = self._session.options, self._tcp_listener
        return JoinAccepted(
            folder=str(self._session.folder),
            log=str(rank.log),
            tap_timeout=options.tap_limit,
            buffer_budget=options.buffer_budget,
            keep_budget=options.keep_budget,
            descriptors=len(ends),
            address="" if tcp is None else tcp.endpoint.host,
            token=tcp.token if tcp is not None and local else "",
            session=self._name,
        )

    def _rank_of(self, join: JoinRequest | WorldShareRequest) -> AttachedRankHandle:
        sizes = (join.world_size, join.other_world_size)
        if not 0 <= join.rank < join.world_size:
            raise SessionError(f"{join.side}[{join.rank}] does not exist: {join.side}_world_size is {join.world_size}")
        return self._ranks[Place(join.side, join.rank, *sizes).world_rank]

    # ---- on the hub's thread ------------------------------------------------------------------------------------

    def _on_joined(self, rank: RankHandle) -> None:
        with self._lock:
            logger.info("%s has joined (pid %s)", rank.label, rank.pid)
            self._membership.note_ready(_attached(rank))

    def _on_contact(self, rank: RankHandle, contact: Contact) -> None:
        with self._lock:
            self._membership.note_contact(_attached(rank), contact)

    def _on_linked(self, rank: RankHandle, linked: LinkReport) -> None:
        with self._lock:
            self._membership.note_linked(_attached(rank), linked)

    def _on_moved(self, rank: RankHandle, moved: WorldSwitch) -> None:
        with self._lock:
            self._membership.note_moved(_attached(rank), moved)

    def _on_ask_missing(self, rank: RankHandle) -> None:
        with self._lock:
            missing = self._membership.missing()
            if self._last_refused is not None:
                missing += f" ({self._last_refused[1]})"
            rank.channel.send(pack_message(WaitReason(missing)))

    def _on_left(self, rank: RankHandle) -> None:
        with self._lock:
            attached = _attached(rank)
            had_begun = self._membership.is_at_work(attached)
            self._membership.leave(attached)
            logger.info("%s has left", rank.label)
            if not had_begun and not self._closed:
                # It never began, so no run has to report its end, and another process may become this rank.
                attached.renew()
                self._jobs.hub.add(attached)
            if not self._membership.occupied:
                self.over.set()


def _attached(rank: RankHandle) -> AttachedRankHandle:
    assert isinstance(rank, AttachedRankHandle)
    return rank


def _is_running(pid: int | None) -> bool:
    """Whether a process with this pid runs on this machine."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in "ZX"


def open_session_server(
    kind: type[S],
    options: LaunchOptions,
    plan: GraftPlan,
    folder: Path,
    rendezvous: Rendezvous,
    listener: socket.socket | None = None,
    *,
    append: bool = False,
    agreed: bool = False,
    listen_at: tuple[Endpoint, str | None] | None = None,
) -> tuple[S, SessionServer]:
    """Open a session of this class for jobs, and its server, which listens at the rendezvous.

    With ``listen_at``, an endpoint and a token or None for a new one, jobs of other machines can join there too.

    Raises :class:`LaunchError` if another session listens there, or the run folder cannot be used.
    """
    if listener is None:
        with rendezvous.locked():
            listener = rendezvous.listen()
        if listener is None:
            raise LaunchError(
                f"a session already listens in {rendezvous.folder}: another notebook's, or one that jobs started by "
                f"themselves; close that session, or pass another folder="
            )
    opened = None
    if listen_at is not None:
        endpoint, token = listen_at
        try:
            opened = TcpListener(endpoint, rendezvous.session_token(token))
        except (OSError, GraftError) as error:
            listener.close()
            raise LaunchError(f"{error}; give an address of this machine and a free port") from error
    rows: RowStore | None = None
    try:
        rows = RowStore(folder, append=append, keep_rows=options.keep_rows)
        describe_session(folder, (options.baseline, options.target), rows.first_run, rendezvous.folder)
        places = Place("baseline", 0, options.baseline, options.target).everyone()
        ranks = [AttachedRankHandle(place, folder) for place in places]
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
    return session, SessionServer(session, rendezvous, listener, plan if agreed else None, opened)
