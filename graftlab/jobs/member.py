"""This process as a rank of a graft world that it has joined: from the greeting to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path

import msgspec

from graftlab.base.world import RunInfo
from graftlab.config import GraftConfig
from graftlab.errors import GraftError, SessionError, warn
from graftlab.exchange.heartbeat import Heartbeat
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting import active
from graftlab.grafting.kept import KeptPairs
from graftlab.jobs.assembling import Assembly, Means, World
from graftlab.jobs.entering import Entrance
from graftlab.jobs.greeting import Membership
from graftlab.jobs.job_grafter import JobGrafter, Offer
from graftlab.jobs.job_line import JobLine
from graftlab.jobs.job_log import log_to
from graftlab.jobs.linking import Linker, address_towards
from graftlab.jobs.unmatched import nothing_measured, unmatched_filters
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire, to_wire
from graftlab.ranks.control_thread import ControlThread, packed
from graftlab.ranks.messages import (
    Acknowledgement,
    AskSelfGraft,
    AskWaitReason,
    Contacts,
    Failure,
    FallbackPlan,
    Hello,
    Output,
    RunDone,
    RunRequest,
    RunSelfGraft,
    RunSettled,
    SelfGraftResult,
    WaitReason,
    WorldRequest,
    WorldStart,
    WorldSwitch,
    unpack_to_rank,
)
from graftlab.ranks.namespace import failure_of
from graftlab.ranks.own_place import own_device, place_of
from graftlab.taps import calls as taps

logger = logging.getLogger(__name__)

# Seconds between two looks whether another notebook listens, after one went away.
_LOOK_FOR_ANOTHER = 0.5
# Seconds between two words to a notebook that cannot look where this process is.
_TELL_WHERE = 0.25
# Seconds for the holder of the session to say for whom this process has waited in vain.
_SAYING_LIMIT = 5.0


class Member:
    """A job's process in a graft world: joined when it is made, in a run after :meth:`begin`, until :meth:`leave`."""

    def __init__(self, config: GraftConfig) -> None:
        """Raises :class:`ConfigError` for settings that do not fit, and :class:`SessionError` where joining fails."""
        self.place = place_of(config)
        self._config = config
        self._entrance = Entrance(self.place, config)
        self._entry = self._entrance.enter()
        self._carrier = self._entry.carrier
        self.folder = Path(self._entry.joined.folder)
        self._line = JobLine(self._entry.channel, self._entry.bell)
        self._run: RunInfo | None = None
        # What is in force again when a notebook goes away that has changed the plan for a while.
        self._lasting: GraftPlan | None = None
        self._over = threading.Event()
        self._ending = threading.Lock()
        # Where this rank is connected with all others, and where it is about to be; the control thread, the one of an
        # assembly, and the job's own look at these.
        self._world: World | None = None
        self._assembly: Assembly | None = None
        self._assembling = threading.Lock()
        # What comes of assemblies until the run begins.
        self._arrived: queue.SimpleQueue[World | Exception] = queue.SimpleQueue()

    # ---- joining ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until every rank of both sides is there, and begin.

        Raises :class:`SessionError` when some are not in time.
        """
        try:
            self._line.send(Hello(os.getpid()))
            request, world, rest = self._await_request()
        except BaseException:
            self._drop_assembly()
            self._line.channel.close()
            self._let_go_of_line()
            raise
        joined = self._entry.joined
        self._world = world
        self._kept = KeptPairs(joined.keep_budget)
        self._grafter = JobGrafter(
            self.place, world.exchange, StatusPage(world.page), taps.ambient, self._line, self._kept
        )
        self._grafter.on_failure = self._fail
        log_to(self._own_log())
        self._enter(world, request.info)
        self._grafter.begin_run(request.info, from_wire(request.plan))
        self._open_control_thread(rest)
        namespace = sys.modules["__main__"].__dict__
        here = taps.Here(self.place.side, self.place.rank, self.place.world_size, own_device(), namespace)
        active.activate(self._grafter, here)
        # Also in processes that multiprocessing has started, which skip what atexit has.
        Finalize(self, self.leave, exitpriority=100)
        logger.info("%s has joined; rows go to %s", self.place.label, self.folder)

    def _await_request(self) -> tuple[RunRequest, World, list[bytes]]:
        """What begins the run, what joins this rank with the others, and the frames that came with it."""
        channel = self._line.channel
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        request: RunRequest | None = None
        rest: list[bytes] = []
        while not channel.closed:
            poller.poll(min(self._entrance.remaining(), _LOOK_FOR_ANOTHER) * 1000)
            if self._entrance.remaining() <= 0.001:
                raise SessionError(
                    f"{self._what_is_missing()} within {self._config.timeout:g} s; a larger timeout (GRAFTLAB_TIMEOUT) "
                    f"waits longer"
                )
            for frame in channel.receive():
                message = unpack_to_rank(frame) if request is None else None
                if isinstance(message, RunRequest):
                    request = message
                elif isinstance(message, (WorldRequest, Contacts)):
                    self._assemble(message)
                elif request is not None:
                    rest.append(frame)
                # Plans that come before are older than the one that follows the request.
            if request is not None or not self._arrived.empty():
                if request is not None and self._assembly is not None:
                    self._assembly.finish()
                arrived = self._next_arrived()
                if request is None or isinstance(arrived, Exception):
                    raise arrived if isinstance(arrived, Exception) else SessionError("nobody had asked for a world")
                return request, arrived, rest
        raise SessionError("whoever held the session went away before all had joined")

    def _next_arrived(self) -> World | Exception:
        try:
            return self._arrived.get(timeout=self._entrance.remaining())
        except queue.Empty:
            return SessionError(f"connecting to the others took longer than {self._config.timeout:g} s")

    def _what_is_missing(self) -> str:
        """For what this rank has waited in vain: the holder of the session knows."""
        channel = self._line.channel
        if self._assembly is not None and (unlinked := self._assembly.missing()):
            return f"{', '.join(unlinked)} had not joined"
        self._line.send(AskWaitReason())
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        deadline = time.monotonic() + _SAYING_LIMIT
        while not channel.closed and (remaining := deadline - time.monotonic()) > 0:
            poller.poll(remaining * 1000)
            for frame in channel.receive():
                message = unpack_to_rank(frame)
                if isinstance(message, WaitReason):
                    return message.what
        return "not all of the others had joined"

    def _enter(self, world: World, run: RunInfo) -> None:
        """Go on in this world, of which the exchange's owner knows already."""
        with self._assembling:
            before, self._world, self._run = self._world, world, run
        if before is not None and before is not world:
            before.let_go()
        self._line.generations = run.generations
        if world.linker is not None:
            line = self._line
            Heartbeat(
                StatusPage(world.page),
                line.tell_where,
                lambda: line.generation,
                lambda: self._over.is_set() or self._world is not world,
                rest=_TELL_WHERE,
            ).start()

    # ---- other peers --------------------------------------------------------------------------------------------

    def _assemble(self, message: WorldRequest | WorldStart | Contacts) -> None:
        """Come together with all others, in a world that is there when all of them have."""
        if isinstance(message, WorldRequest):
            self._drop_assembly()
            joined, token = self._entry.joined, self._entry.token
            make_linker = None
            if joined.address:
                assert token is not None
                address, ports = self._own_address(), self._config.port_range()

                def make_linker() -> Linker:
                    return Linker(self.place, token, address, ports)

            means = Means(self.place, joined, self._line, self._entrance.fetch, make_linker)
            with self._assembling:
                self._assembly = Assembly(means, message, self._on_arrival)
        elif self._assembly is not None:
            if isinstance(message, Contacts):
                self._assembly.meet(message)
            elif message.world == self._assembly.world:
                self._assembly.finish()

    def _drop_assembly(self) -> None:
        with self._assembling:
            assembly, self._assembly = self._assembly, None
        if assembly is not None:
            assembly.give_up()
        if self._run is not None:
            self._grafter.offer(None)

    def _on_arrival(self, arrived: World | Exception) -> None:
        """On the thread of an assembly."""
        run = self._run
        if run is None:
            self._arrived.put(arrived)
        elif isinstance(arrived, World):
            self._offer(arrived)
        elif isinstance(arrived, (GraftError, OSError, EOFError)):
            what = f"graftlab could not connect to the ranks that came anew, whose tensors are missing here: {arrived}"
            self._line.send(Output(f"{what}\n"))
            warn(f"{self.place.label}: {what}; the job goes on")
        else:
            self._fail(arrived)

    def _offer(self, world: World) -> None:
        offer = Offer(
            world.exchange,
            StatusPage(world.page),
            world.run,
            world.plan,
            lambda run: self._on_moved(world, run),
            world.close,
        )
        with self._assembling:
            is_wanted = self._assembly is not None and self._assembly.world == world.number
            if is_wanted:
                self._grafter.offer(offer)
        if not is_wanted:
            world.close()
        elif self._over.is_set():
            self._grafter.offer(None)

    def _on_moved(self, world: World, run: RunInfo) -> None:
        """On the job's own thread, at the end of a step."""
        self._enter(world, run)
        self._line.send(WorldSwitch(world.number, run.first_step))
        logger.info("%s goes on with step %d in run %d, %s", self.place.label, run.first_step, run.run, _of(run))

    def _own_address(self) -> str:
        """Where other machines reach this one: at the address from which it reaches who holds the session."""
        endpoint = self._config.endpoint
        if self._carrier is None or endpoint is None:
            return self._entry.joined.address
        try:
            return address_towards(*endpoint)
        except OSError as error:
            raise SessionError(f"no way leads from here to {endpoint}: {error}") from error

    def _own_log(self) -> Path:
        """A file of the session's folder; on another machine one of the same name in this job's own folder."""
        log = Path(self._entry.joined.log)
        if self._carrier is not None:
            folder = self._config.meeting if self._config.run_dir is None else Path(self._config.run_dir).expanduser()
            log = folder / "logs" / log.name
            # Where that cannot be, whoever opens the log tells.
            with contextlib.suppress(OSError):
                log.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        return log

    def _open_control_thread(self, frames: Sequence[bytes] = ()) -> None:
        self._control = ControlThread(
            self._line, self._grafter, self._kept, lambda run: None, end=self._on_host_gone, fail=self._fail
        )
        self._control.on(WorldRequest, self._assemble)
        self._control.on(WorldStart, self._assemble)
        self._control.on(Contacts, self._assemble)
        self._control.on(FallbackPlan, self._on_plans_for_a_while)
        self._control.on_question(RunSelfGraft, self._run_against_itself)
        self._control.on_question(AskSelfGraft, self._against_itself)
        for frame in frames:
            self._control.take(frame)
        self._control.open()

    # ---- for a verdict ------------------------------------------------------------------------------------------

    def _on_plans_for_a_while(self, message: FallbackPlan) -> None:
        self._lasting = None if message.plan is None else from_wire(message.plan)
        self._grafter.keeps_step = message.plan is not None
        if message.plan is None:
            self._grafter.forget_itself(message.version)

    def _run_against_itself(self, order: RunSelfGraft) -> Acknowledgement:
        self._grafter.run_against_itself(order)
        return Acknowledgement()

    def _against_itself(self, question: AskSelfGraft) -> SelfGraftResult:
        return SelfGraftResult(packed(self._grafter.against_itself()))

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
            self._drop_assembly()
            self._line.channel.close()
            self._let_go_of_line()
            if self._world is not None:
                self._world.let_go()

    def _let_go_of_line(self) -> None:
        carrier, self._carrier = self._carrier, None
        if carrier is not None:
            carrier.close(when_done=True)

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
        # Last, because a warning may be an error here.
        if self.place.rank == 0:
            line = self._line
            nothing = nothing_measured(line.taps, line.statuses, line.last_errors, self.folder)
            for said in filter(None, (nothing, *unmatched_filters(self._config, self._grafter.plan, line.taps))):
                warn(f"{self.place.label}: {said}")

    def _settle(self) -> bool:
        """Wait until the others have ended too, so that what nobody asked for is known; not for ever."""
        read, write = os.pipe()
        timer = threading.Timer(self._config.timeout, os.write, (write, b"x"))
        timer.daemon = True
        timer.start()
        try:
            return self._grafter.exchange.settle(read)
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
        """On the control thread, which ends with this."""
        self._line.channel.close()
        if self._over.is_set():
            return
        nothing = self._config.without_host == "nothing"
        logger.warning(
            "%s: whoever held the session went away; the job goes on, %s. Rows are lost until another listens %s",
            self.place.label,
            "compares nothing" if nothing else "with the plan that it has",
            f"at {endpoint}" if (endpoint := self._config.endpoint) else f"in {self._config.meeting}",
        )
        self._grafter.keeps_step = False
        lasting, self._lasting = self._lasting, None
        if lasting is not None:
            self._grafter.offer_plan(replace(lasting, version=self._grafter.newest_plan.version + 1))
        self._grafter.forget_itself(self._grafter.newest_plan.version)
        if nothing:
            self._grafter.offer_plan(_nothing_of(self._grafter.newest_plan))
        self._drop_assembly()
        while not self._over.wait(_LOOK_FOR_ANOTHER):
            try:
                if self._come_back():
                    return
            except (GraftError, OSError) as error:
                logger.warning("%s could not join the session that listens: %s", self.place.label, error)
                # It stays what it is; ask again, but not all the time.
                self._over.wait(10 * _LOOK_FOR_ANOTHER)

    def _come_back(self) -> bool:
        with self._assembling:
            run, world = self._run, self._world
        assert run is not None
        assert world is not None
        now = replace(run, first_step=self._grafter.next_step)
        membership = Membership(
            now,
            to_wire(self._grafter.newest_plan),
            self._line.lost_rows,
            world.linker is not None,
            self._entry.joined.session,
        )
        self._let_go_of_line()
        entry = self._entrance.come_back(membership, world.segment)
        if entry is None:
            return False
        is_same = entry.joined.session == self._entry.joined.session
        self._entry, self._carrier = entry, entry.carrier
        self._line.reconnect(entry.channel, entry.bell)
        self._line.lost_rows = 0
        self._open_control_thread()
        if world.linker is not None:
            self._line.send(world.linker.linked(world.number))
        self._line.send(Hello(os.getpid()))
        which = "its session again" if is_same else "another session"
        logger.info("%s has joined %s; rows go to %s", self.place.label, which, entry.joined.folder)
        return True


def _of(run: RunInfo) -> str:
    baseline, target = run.generations
    return f"with generation {baseline} of the baseline and generation {target} of the target"


def _nothing_of(plan: GraftPlan) -> GraftPlan:
    blank = msgspec.structs.replace(
        to_wire(plan), b2t=None, t2b=None, compare=None, keep=None, version=plan.version + 1
    )
    return from_wire(blank)
