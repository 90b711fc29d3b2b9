"""This process as a rank of a graft world that it has joined: from the greeting to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec

from graftlab.base.world import RunInfo
from graftlab.config import GraftConfig
from graftlab.errors import GraftError, SessionError, warn
from graftlab.exchange.beacon import Beacon
from graftlab.exchange.shared_memory import SharedMemoryExchange
from graftlab.exchange.whereabouts import WhereaboutsPage
from graftlab.grafting import active
from graftlab.grafting.kept import KeptPairs
from graftlab.jobs.entering import Entrance
from graftlab.jobs.greeting import Joined, Membership
from graftlab.jobs.job_grafter import JobGrafter
from graftlab.jobs.job_line import JobLine
from graftlab.jobs.job_log import log_to
from graftlab.jobs.linking import Linker, address_towards
from graftlab.jobs.place import own_device, place_of
from graftlab.jobs.waiting import Waiting
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire, to_wire
from graftlab.ranks.desk import Desk, packed
from graftlab.ranks.messages import (
    AgainstItself,
    AskAgainstItself,
    Contacts,
    Departed,
    Failure,
    ForAWhile,
    Hello,
    Linked,
    Noted,
    Output,
    RunAgainstItself,
    RunDone,
    RunRequest,
    RunSettled,
    unpack_to_rank,
)
from graftlab.ranks.wiring import exchange_of
from graftlab.ranks.workplace import failure_of
from graftlab.taps import calls as taps

logger = logging.getLogger(__name__)

# Seconds between two looks whether another notebook listens, after one went away.
_LOOK_FOR_ANOTHER = 0.5
# Seconds between two words to a notebook that cannot look where this process is.
_TELL_WHERE = 0.25


class Member:
    """A job's process in a graft world: joined when it is made, in a run after :meth:`begin`, until :meth:`leave`."""

    def __init__(self, config: GraftConfig) -> None:
        """Raises :class:`ConfigError` for settings that do not fit, and :class:`SessionError` where joining fails."""
        self.place = place_of(config)
        self._config = config
        self._linker: Linker | None = None
        self._segment: int | None = None
        self._entrance = Entrance(self.place, config)
        self._entry = self._entrance.enter()
        self._relay = self._entry.relay
        joined = self._entry.joined
        self.folder = Path(joined.folder)
        if not joined.address:
            # Brought along to another notebook, which looks in it where this rank is.
            self._segment = os.dup(self._entry.descriptors[self.place.world_rank])
        self._line = JobLine(self._entry.channel, self._entry.bell)
        self._run: RunInfo | None = None
        # What is in force again when a notebook goes away that has changed the plan for a while.
        self._lasting: GraftPlan | None = None
        self._over = threading.Event()
        self._ending = threading.Lock()

    # ---- joining ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until every rank of both sides has joined, and begin.

        Raises :class:`SessionError` when some have not in time.
        """
        request, rest = self._meet_here() if not self._entry.joined.address else self._meet_from_afar()
        joined = self._entry.joined
        self._kept = KeptPairs(joined.keep_budget)
        self._grafter = JobGrafter(
            self.place, self._exchange, WhereaboutsPage(self._page), taps.ambient, self._line, self._kept
        )
        self._grafter.on_failure = self._fail
        log_to(self._own_log())
        self._run = request.info
        self._grafter.begin_run(request.info, from_wire(request.plan))
        self._open_desk(rest)
        namespace = sys.modules["__main__"].__dict__
        here = taps.Here(self.place.side, self.place.rank, self.place.world_size, own_device(), namespace)
        active.activate(self._grafter, here)
        # Also in processes that multiprocessing has started, which skip what atexit has.
        Finalize(self, self.leave, exitpriority=100)
        logger.info("%s has joined; rows go to %s", self.place.label, self.folder)

    def _meet_here(self) -> tuple[RunRequest, list[bytes]]:
        """Wait for the others, with what the host has handed over for all of them."""
        waiting = Waiting(self.place, self._entry.descriptors)
        try:
            self._line.send(Hello(os.getpid()))
            begun = self._await_request(waiting.missing)
        except BaseException:
            # As they are, and not shut down: another process may be handed the same ones.
            waiting.give_up()
            self._line.channel.close()
            if self._segment is not None:
                os.close(self._segment)
            raise
        waiting.close()
        joined = self._entry.joined
        self._exchange, self._page = exchange_of(
            self.place,
            self._entry.descriptors,
            joined.segment_size,
            budget=joined.buffer_budget,
            timeout=joined.tap_timeout,
        )
        return begun

    def _meet_from_afar(self) -> tuple[RunRequest, list[bytes]]:
        """Wait for the others, and come to a connection with each, wherever it is."""
        joined = self._entry.joined
        try:
            assert self._entry.token is not None
            linker = self._linker = Linker(
                self.place, self._entry.token, self._own_address(joined), self._config.port_range()
            )
            self._line.send(linker.contact)
            begun = self._await_request(linker.missing, linker)
        except BaseException:
            if self._linker is not None:
                self._linker.seal()
                self._linker.close()
            self._line.channel.close()
            self._close_relay()
            raise
        linker.seal()
        self._exchange = SharedMemoryExchange(
            self.place, linker.arena, linker.links, budget=joined.buffer_budget, timeout=joined.tap_timeout
        )
        self._page = linker.arena.map
        page, line = WhereaboutsPage(self._page), self._line
        Beacon(page, line.tell_where, lambda: line.generation, self._over.is_set, rest=_TELL_WHERE).start()
        return begun

    def _own_address(self, joined: Joined) -> str:
        """Where other machines reach this one: at the address from which it reaches who holds the session."""
        endpoint = self._config.endpoint
        if self._relay is None or endpoint is None:
            return joined.address
        try:
            return address_towards(*endpoint)
        except OSError as error:
            raise SessionError(f"no way leads from here to {endpoint}: {error}") from error

    def _own_log(self) -> Path:
        """A file of the session's folder; on another machine one of the same name in this job's own folder."""
        log = Path(self._entry.joined.log)
        if self._relay is not None:
            folder = self._config.meeting if self._config.run_dir is None else Path(self._config.run_dir).expanduser()
            log = folder / "logs" / log.name
            # Where that cannot be, whoever opens the log tells.
            with contextlib.suppress(OSError):
                log.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        return log

    def _await_request(
        self, missing: Callable[[], list[str]], linker: Linker | None = None
    ) -> tuple[RunRequest, list[bytes]]:
        """What begins the run, and the frames that came with it; all links are made by then."""
        channel = self._line.channel
        poller = select.poll()
        for descriptor in (channel.fileno(), *(() if linker is None else linker.descriptors())):
            poller.register(descriptor, select.POLLIN)
        request: RunRequest | None = None
        rest: list[bytes] = []
        told: object = None
        while not channel.closed:
            poller.poll(min(self._entrance.remaining(), _LOOK_FOR_ANOTHER) * 1000)
            if self._entrance.remaining() <= 0.001:
                raise SessionError(
                    f"{', '.join(missing())} had not joined within {self._config.timeout:g} s; a larger "
                    f"timeout (GRAFTLAB_TIMEOUT) waits longer"
                )
            for frame in channel.receive():
                message = unpack_to_rank(frame) if request is None else None
                if isinstance(message, RunRequest):
                    request = message
                elif request is not None:
                    rest.append(frame)
                elif linker is not None and isinstance(message, Contacts):
                    linker.meet(message.contacts)
                    told = told if linker.complete else None
                elif linker is not None and isinstance(message, Departed):
                    linker.part(message.world_rank)
                # Plans that come before are older than the one that the request brings.
            if linker is not None:
                linker.work()
                if linker.complete and told != linker.kinds():
                    told = linker.kinds()
                    self._line.send(Linked(*linker.kinds()))
                    self._line.send(Hello(os.getpid()))
            if request is not None and (linker is None or linker.complete):
                return request, rest
        raise SessionError("whoever held the session went away before all had joined")

    def _open_desk(self, frames: Sequence[bytes] = ()) -> None:
        self._desk = Desk(self._line, self._grafter, self._kept, lambda run: None, end=self._on_host_gone)
        self._desk.takes.on(ForAWhile, self._on_plans_for_a_while)
        self._desk.answers.on(RunAgainstItself, self._run_against_itself)
        self._desk.answers.on(AskAgainstItself, self._against_itself)
        for frame in frames:
            self._desk.take(frame)
        self._desk.open()

    # ---- for a verdict ------------------------------------------------------------------------------------------

    def _on_plans_for_a_while(self, message: ForAWhile) -> None:
        self._lasting = None if message.plan is None else from_wire(message.plan)

    def _run_against_itself(self, order: RunAgainstItself) -> Noted:
        self._grafter.run_against_itself(order)
        return Noted()

    def _against_itself(self, question: AskAgainstItself) -> AgainstItself:
        return AgainstItself(packed(self._grafter.against_itself()))

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
            self._close_relay()
            if self._linker is not None:
                self._linker.close()

    def _close_relay(self) -> None:
        relay, self._relay = self._relay, None
        if relay is not None:
            relay.close(when_done=True)

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
            try:
                # Or the other side would wait for each of this job's taps up to its time limit.
                self._grafter.end_run()
            except Exception as another:
                logger.warning("%s could not tell the others that it takes no more taps: %s", self.place.label, another)
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
        self._grafter.forget_itself()
        lasting, self._lasting = self._lasting, None
        if lasting is not None:
            self._grafter.offer_plan(replace(lasting, version=self._grafter.newest_plan.version + 1))
        if nothing:
            self._grafter.offer_plan(_nothing_of(self._grafter.newest_plan))
        while not self._over.wait(_LOOK_FOR_ANOTHER):
            try:
                if self._come_back(run):
                    return
            except (GraftError, OSError) as error:
                logger.warning("%s could not join the session that listens: %s", self.place.label, error)
                # It stays what it is; ask again, but not all the time.
                self._over.wait(10 * _LOOK_FOR_ANOTHER)

    def _come_back(self, run: RunInfo) -> bool:
        now = RunInfo(run.run, self._grafter.next_step, run.participants)
        membership = Membership(now, to_wire(self._grafter.newest_plan), self._line.lost_rows, self._linker is not None)
        self._close_relay()
        entry = self._entrance.come_back(membership, self._segment)
        if entry is None:
            return False
        self._relay = entry.relay
        self._line.reconnect(entry.channel, entry.bell)
        self._line.lost_rows = 0
        self._open_desk()
        self._line.tell_again()
        if self._linker is not None:
            self._line.send(Linked(*self._linker.kinds()))
        self._line.send(Hello(os.getpid()))
        logger.info("%s has joined another session; rows go to %s", self.place.label, entry.joined.folder)
        return True


def _nothing_of(plan: GraftPlan) -> GraftPlan:
    blank = msgspec.structs.replace(
        to_wire(plan), b2t=None, t2b=None, compare=None, keep=None, version=plan.version + 1
    )
    return from_wire(blank)
