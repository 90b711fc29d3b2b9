"""This process as a rank of a graft world that it has joined: from the greeting to its end."""

from __future__ import annotations

import logging
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any

import msgspec

from graftlab.base.world import RunInfo
from graftlab.config import GraftConfig
from graftlab.errors import ConfigError, GraftError, SessionError, warn
from graftlab.exchange.channel import Channel
from graftlab.exchange.whereabouts import WhereaboutsPage
from graftlab.grafting import active
from graftlab.grafting.kept import KeptPairs
from graftlab.jobs.greeting import Join, Joined, Membership, Refused, hear, our_version, tell
from graftlab.jobs.headless import start_host
from graftlab.jobs.job_grafter import JobGrafter
from graftlab.jobs.job_log import log_to
from graftlab.jobs.meeting import Meeting
from graftlab.jobs.place import own_backend, own_device, place_of
from graftlab.jobs.waiting import Waiting
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire, to_wire
from graftlab.ranks.desk import Desk
from graftlab.ranks.line import Line
from graftlab.ranks.messages import Failure, Hello, Output, RunDone, RunRequest, RunSettled, TapSeen, unpack_to_rank
from graftlab.ranks.settling import receive_descriptors
from graftlab.ranks.shared import send_descriptors
from graftlab.ranks.wiring import exchange_of
from graftlab.ranks.workplace import failure_of
from graftlab.rows.schema import Row
from graftlab.taps import calls as taps

logger = logging.getLogger(__name__)

# Seconds between two looks whether another notebook listens, after one went away.
_LOOK_FOR_ANOTHER = 0.5
# So many hosts are started before a job gives up: each may end, for its last job is gone, just as another comes.
_HOSTS = 3


class JobLine(Line):
    """A line that may be without a notebook for a while. It knows what another would have to be told."""

    def __init__(self, channel: Channel, bell: socket.socket) -> None:
        super().__init__(channel, bell)
        self.lost_rows = 0
        self._taps: list[dict[str, Any]] = []

    def row(self, row: Row) -> None:
        if self.channel.closed:
            self.lost_rows += 1
        super().row(row)

    def seen(self, tags: dict[str, Any]) -> None:
        self._taps.append(tags)
        super().seen(tags)

    def tell_again(self) -> None:
        """Tell a new notebook of every tap that was seen so far."""
        for tags in self._taps:
            self.send(TapSeen(tags))


@dataclass(frozen=True)
class _Entry:
    """What the host has handed over."""

    joined: Joined
    descriptors: list[int]
    channel: Channel
    bell: socket.socket


class Member:
    """A job's process in a graft world: joined when it is made, in a run after :meth:`begin`, until :meth:`leave`."""

    def __init__(self, config: GraftConfig) -> None:
        """Raises :class:`ConfigError` for settings that do not fit, and :class:`SessionError` where joining fails."""
        self.place = place_of(config)
        self._config = config
        self._deadline = time.monotonic() + config.timeout
        with Meeting(config.meeting) as meeting:
            self._entry = self._enter(meeting)
        joined = self._entry.joined
        self.folder = Path(joined.folder)
        # Brought along to another notebook, which looks in it where this rank is.
        self._segment = os.dup(self._entry.descriptors[self.place.world_rank])
        self._line = JobLine(self._entry.channel, self._entry.bell)
        self._run: RunInfo | None = None
        self._over = threading.Event()
        self._ending = threading.Lock()

    # ---- joining ------------------------------------------------------------------------------------------------

    def _enter(self, meeting: Meeting) -> _Entry:
        host: subprocess.Popen[bytes] | None = None
        for _ in range(_HOSTS):
            with meeting.locked():
                connection = meeting.connect(self._remaining())
                if connection is None:
                    listener = meeting.listen()
                    assert listener is not None
                    with listener:
                        host = start_host(self._config, meeting, listener)
                    connection = meeting.connect(self._remaining())
            if connection is None:
                continue
            with connection:
                entry = self._ask(connection, None)
            if entry is not None:
                return entry
            # It ended before it answered: for the last of its jobs was gone, or because it could not begin.
        log = meeting.folder / "host.log"
        ended = "" if host is None else f" (exit code {host.poll()})"
        raise SessionError(f"whoever held the session in {meeting.folder} ended before it answered{ended}; see {log}")

    def _ask(self, connection: socket.socket, membership: Membership | None) -> _Entry | None:
        """What the host hands over; None where it ended before it answered."""
        plan = to_wire(self._config.plan()) if membership is None else None
        join = Join(
            version=our_version(),
            side=self.place.side,
            rank=self.place.rank,
            world_size=self.place.world_size,
            other_world_size=self.place.other_world_size,
            pid=os.getpid(),
            device=str(own_device()),
            backend=own_backend(),
            plan=plan,
            membership=membership,
        )
        connection.settimeout(self._remaining() if membership is None else self._config.timeout)
        try:
            tell(connection, join)
            if membership is not None:
                send_descriptors(connection, [self._segment])
            reply = hear(connection)
            if reply is None:
                return None
            if isinstance(reply, Refused):
                raise ConfigError(reply.error) if reply.settings else SessionError(reply.error)
            if not isinstance(reply, Joined):
                raise SessionError(f"the holder of the session answered {type(reply).__name__}")
            *descriptors, channel, bell = receive_descriptors(connection, reply.descriptors)
        except (ConnectionError, EOFError):
            return None
        except TimeoutError:
            raise SessionError(f"no answer came within {self._config.timeout:g} s") from None
        return _Entry(reply, descriptors, Channel(socket.socket(fileno=channel)), socket.socket(fileno=bell))

    def begin(self) -> None:
        """Wait until every rank of both sides has joined, and begin.

        Raises :class:`SessionError` when some have not in time.
        """
        waiting = Waiting(self.place, self._entry.descriptors)
        try:
            self._line.send(Hello(os.getpid()))
            request, rest = self._await_request(waiting)
        except BaseException:
            # As they are, and not shut down: another process may be handed the same ones.
            waiting.give_up()
            self._line.channel.close()
            os.close(self._segment)
            raise
        waiting.close()
        joined = self._entry.joined
        self._exchange, page = exchange_of(
            self.place,
            self._entry.descriptors,
            joined.segment_size,
            budget=joined.buffer_budget,
            timeout=joined.tap_timeout,
        )
        self._kept = KeptPairs(joined.keep_budget)
        self._grafter = JobGrafter(
            self.place, self._exchange, WhereaboutsPage(page), taps.ambient, self._line, self._kept
        )
        self._grafter.on_failure = self._fail
        log_to(Path(joined.log))
        self._run = request.info
        self._grafter.begin_run(request.info, from_wire(request.plan))
        self._open_desk(rest)
        namespace = sys.modules["__main__"].__dict__
        here = taps.Here(self.place.side, self.place.rank, self.place.world_size, own_device(), namespace)
        active.activate(self._grafter, here)
        # Also in processes that multiprocessing has started, which skip what atexit has.
        Finalize(self, self.leave, exitpriority=100)
        logger.info("%s has joined; rows go to %s", self.place.label, self.folder)

    def _await_request(self, waiting: Waiting) -> tuple[RunRequest, list[bytes]]:
        """What begins the run, and the frames that came with it."""
        channel = self._line.channel
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        while not channel.closed:
            if not poller.poll(self._remaining() * 1000):
                raise SessionError(
                    f"{', '.join(waiting.missing())} had not joined within {self._config.timeout:g} s; a larger "
                    f"timeout (GRAFTLAB_TIMEOUT) waits longer"
                )
            frames = channel.receive()
            for number, frame in enumerate(frames):
                message = unpack_to_rank(frame)
                # Plans that come before are older than the one that it brings.
                if isinstance(message, RunRequest):
                    return message, frames[number + 1 :]
        raise SessionError("whoever held the session went away before all had joined")

    def _open_desk(self, frames: Sequence[bytes] = ()) -> None:
        self._desk = Desk(self._line, self._grafter, self._kept, lambda run: None, end=self._on_host_gone)
        for frame in frames:
            self._desk.take(frame)
        self._desk.open()

    def _remaining(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    # ---- the end ------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """End this job's part of the run. The other side's taps wait for it no more. Safe to call twice."""
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
            active.deactivate()
            try:
                self._end_run()
            except Exception as error:
                # A thread may still be in a tap, or the interpreter start no threads any more; the job ends anyway.
                logger.warning("%s: graftlab did not end as it should: %s", self.place.label, error)
            self._line.channel.close()

    def _end_run(self) -> None:
        run = self._run
        if run is None:
            return
        self._grafter.end_run()
        error = getattr(sys, "last_value", None)
        failure: Failure | None = None if error is None else failure_of(error)
        self._line.send(RunDone(run.run, None, failure))
        if not self._settle():
            self._line.send(
                Output(
                    f"this job ended, and did not wait longer than {self._config.timeout:g} s for the others: whether "
                    f"somebody asked for what it sent last is not known, and has no rows\n"
                )
            )
        self._grafter.close_run()
        self._line.send(RunSettled(run.run, self._grafter.next_step))
        self._line.channel.drain(5.0)

    def _settle(self) -> bool:
        """Wait until the others have ended too, so that what nobody asked for is known; not for ever."""
        read, write = os.pipe()
        timer = threading.Timer(self._config.timeout, os.write, (write, b"x"))
        timer.daemon = True
        timer.start()
        try:
            return self._exchange.settle(read)
        finally:
            timer.cancel()
            timer.join()
            os.close(read)
            os.close(write)

    def _fail(self, error: Exception) -> None:
        """What should not have happened: this job takes part no more, and goes on."""
        logger.error("%s: graftlab failed", self.place.label, exc_info=error)
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
            active.deactivate()
            self._line.send(Output(f"graftlab failed and takes no more taps here: {type(error).__name__}: {error}\n"))
            self._line.channel.drain(1.0)
            self._line.channel.close()
        warn(f"graftlab failed on {self.place.label} and takes no more taps; the job goes on ({error})")

    # ---- without a notebook -------------------------------------------------------------------------------------

    def _on_host_gone(self) -> None:
        """On the desk's thread, which ends with this."""
        run = self._run
        assert run is not None
        self._line.channel.close()
        if self._over.is_set():
            return
        nothing = self._config.without_host == "nothing"
        logger.warning(
            "%s: whoever held the session went away; the job goes on, %s. Rows are lost until another listens in %s",
            self.place.label,
            "compares nothing" if nothing else "with the plan that it has",
            self._config.meeting,
        )
        if nothing:
            plan = self._grafter.plan
            self._grafter.offer_plan(_nothing_of(plan))
        while not self._over.wait(_LOOK_FOR_ANOTHER):
            try:
                if self._come_back(run):
                    return
            except (GraftError, OSError) as error:
                logger.warning("%s could not join the session that listens: %s", self.place.label, error)
                # It stays what it is; ask again, but not all the time.
                self._over.wait(10 * _LOOK_FOR_ANOTHER)

    def _come_back(self, run: RunInfo) -> bool:
        with Meeting(self._config.meeting) as meeting:
            connection = meeting.connect(self._config.timeout)
            if connection is None:
                return False
            with connection:
                now = RunInfo(run.run, self._grafter.next_step, run.participants)
                entry = self._ask(connection, Membership(now, to_wire(self._grafter.plan), self._line.lost_rows))
        if entry is None:
            return False
        self._line.reconnect(entry.channel, entry.bell)
        self._line.lost_rows = 0
        self._open_desk()
        self._line.tell_again()
        self._line.send(Hello(os.getpid()))
        logger.info("%s has joined another session; rows go to %s", self.place.label, entry.joined.folder)
        return True


def _nothing_of(plan: GraftPlan) -> GraftPlan:
    blank = msgspec.structs.replace(
        to_wire(plan), b2t=None, t2b=None, compare=None, keep=None, version=plan.version + 1
    )
    return from_wire(blank)
