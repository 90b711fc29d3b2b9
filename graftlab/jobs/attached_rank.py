"""The attached rank: this process of a job as a rank of a graft world, from joining to its end."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import select
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TypeVar

import msgspec

from graftlab.base.world import RunInfo
from graftlab.config import GraftConfig
from graftlab.errors import GraftError, SessionError, warn
from graftlab.exchange.channel import Received
from graftlab.exchange.heartbeat import Heartbeat
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting import active
from graftlab.grafting.kept import KeptPairs
from graftlab.jobs.handshake import RejoinState
from graftlab.jobs.job_connection import JobConnection
from graftlab.jobs.job_grafter import JobGrafter, WorldOffer
from graftlab.jobs.job_log import log_to, nothing_measured, unmatched_filters
from graftlab.jobs.peer_connector import PeerConnector, address_towards
from graftlab.jobs.session_client import SessionClient
from graftlab.jobs.world_setup import SetupContext, World, WorldSetup
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire, to_wire
from graftlab.ranks.control_thread import ControlThread, pack_value
from graftlab.ranks.messages import (
    Acknowledgement,
    AskLineTraces,
    AskMatch,
    AskSelfGraft,
    AskWaitReason,
    Contacts,
    Failure,
    FallbackPlan,
    Hello,
    LineTraces,
    MatchResult,
    Output,
    Query,
    RecordStep,
    RunDone,
    RunRequest,
    RunSelfGraft,
    RunSettled,
    SelfGraftResult,
    TraceSteps,
    WaitReason,
    WorldRequest,
    WorldStart,
    WorldSwitch,
    unpack_to_rank,
)
from graftlab.ranks.namespace import failure_of
from graftlab.ranks.own_place import own_device, place_of
from graftlab.taps import calls as taps
from graftlab.taps.ambient_tags import ambient

A = TypeVar("A")

logger = logging.getLogger(__name__)

# Seconds between two attempts to join a session again, after the last one ended.
_RETRY = 0.5
# Seconds between two statuses to a session that cannot read this process's status page.
_STATUS_INTERVAL = 0.25
# Seconds for the session server to name the ranks that are missing.
_MISSING_LIMIT = 5.0


class AttachedRank:
    """A job's process in a graft world. It joins when made, and is in a run from :meth:`begin` to :meth:`leave`."""

    def __init__(self, config: GraftConfig) -> None:
        """Raises :class:`ConfigError` for settings that do not fit, and :class:`SessionError` if joining fails."""
        self.place = place_of(config)
        self._config = config
        self._client = SessionClient(self.place, config)
        self._join = self._client.join()
        self._proxy = self._join.proxy
        self.folder = Path(self._join.answer.folder)
        self._connection = JobConnection(self._join.channel, self._join.wake)
        self._run: RunInfo | None = None
        # The plan to restore if the session ends while a verdict's plan is in force.
        self._fallback_plan: GraftPlan | None = None
        self._over = threading.Event()
        self._ending = threading.Lock()
        # The world of this rank, and the one being set up. Read by the control thread, the setup thread and the job's
        # thread.
        self._world: World | None = None
        self._setup: WorldSetup | None = None
        self._setup_lock = threading.Lock()
        # Results of world setups until the run begins.
        self._worlds: queue.SimpleQueue[World | Exception] = queue.SimpleQueue()

    # ---- joining ------------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Wait until every rank of both sides has joined, and begin.

        Raises :class:`SessionError` if some have not within the config's ``timeout``.
        """
        try:
            self._connection.send(Hello(os.getpid()))
            request, world, rest = self._await_request()
        except BaseException:
            self._drop_setup()
            self._connection.channel.close()
            self._close_proxy()
            raise
        answer = self._join.answer
        self._world = world
        self._kept = KeptPairs(answer.keep_budget)
        self._grafter = JobGrafter(
            self.place, world.exchange, StatusPage(world.page), ambient, self._connection, self._kept
        )
        self._grafter.on_failure = self._fail
        log_to(self._own_log())
        self._enter(world, request.info)
        self._grafter.begin_run(request.info, from_wire(request.plan))
        self._open_control_thread(rest)
        namespace = sys.modules["__main__"].__dict__
        here = taps.Here(self.place.side, self.place.rank, self.place.world_size, own_device(), namespace)
        active.activate(self._grafter, here)
        # atexit would not do: processes that multiprocessing has started skip it.
        Finalize(self, self.leave, exitpriority=100)
        logger.info("%s has joined; rows go to %s", self.place.label, self.folder)

    def _await_request(self) -> tuple[RunRequest, World, list[Received]]:
        """Return the request that begins the run, the run's world, and the frames that followed."""
        channel = self._connection.channel
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        request: RunRequest | None = None
        rest: list[Received] = []
        while not channel.closed:
            poller.poll(min(self._client.remaining(), _RETRY) * 1000)
            if self._client.remaining() <= 0.001:
                raise SessionError(
                    f"{self._what_is_missing()} within {self._config.timeout:g} s; a larger timeout (GRAFTLAB_TIMEOUT) "
                    f"waits longer"
                )
            for frame in channel.receive():
                message = unpack_to_rank(frame) if request is None else None
                if isinstance(message, RunRequest):
                    request = message
                elif isinstance(message, (WorldRequest, Contacts)):
                    self._set_up_world(message)
                elif request is not None or isinstance(message, (Query, FallbackPlan)):
                    # The session server may send questions as soon as it has made the run.
                    rest.append(frame)
                # Plans that arrive before the request are outdated: the newest follows it.
            if request is not None or not self._worlds.empty():
                if request is not None and self._setup is not None:
                    self._setup.finish()
                arrived = self._next_world()
                if isinstance(arrived, Exception):
                    raise arrived
                if request is None:
                    raise SessionError("a world was set up without a request")
                return request, arrived, rest
        raise SessionError("the session ended before all ranks had joined")

    def _next_world(self) -> World | Exception:
        try:
            return self._worlds.get(timeout=self._client.remaining())
        except queue.Empty:
            return SessionError(f"connecting to the other ranks took longer than {self._config.timeout:g} s")

    def _what_is_missing(self) -> str:
        """Ask the session server which ranks are missing, and describe them."""
        channel = self._connection.channel
        if self._setup is not None and (unlinked := self._setup.missing()):
            return f"{', '.join(unlinked)} had not joined"
        self._connection.send(AskWaitReason())
        poller = select.poll()
        poller.register(channel.fileno(), select.POLLIN)
        deadline = time.monotonic() + _MISSING_LIMIT
        while not channel.closed and (remaining := deadline - time.monotonic()) > 0:
            poller.poll(remaining * 1000)
            for frame in channel.receive():
                message = unpack_to_rank(frame)
                if isinstance(message, WaitReason):
                    return message.what
        return "some of the other ranks had not joined"

    def _enter(self, world: World, run: RunInfo) -> None:
        """Continue in this world. The grafter already uses its exchange."""
        with self._setup_lock:
            before, self._world, self._run = self._world, world, run
        if before is not None and before is not world:
            before.close_connections()
        self._connection.generations = run.generations
        if world.connector is not None:
            connection = self._connection
            Heartbeat(
                StatusPage(world.page),
                connection.send_status,
                lambda: connection.generation,
                lambda: self._over.is_set() or self._world is not world,
                rest=_STATUS_INTERVAL,
            ).start()

    # ---- other peers --------------------------------------------------------------------------------------------

    def _set_up_world(self, message: WorldRequest | WorldStart | Contacts) -> None:
        """Handle the messages by which all ranks set up a new world."""
        if isinstance(message, WorldRequest):
            self._drop_setup()
            joined, token = self._join.answer, self._join.token
            make_connector = None
            if joined.address:
                assert token is not None
                address, ports = self._own_address(), self._config.port_range()

                def make_connector() -> PeerConnector:
                    return PeerConnector(self.place, token, address, ports)

            context = SetupContext(self.place, joined, self._connection, self._client.fetch_share, make_connector)
            with self._setup_lock:
                self._setup = WorldSetup(context, message, self._on_world)
        elif self._setup is not None:
            if isinstance(message, Contacts):
                self._setup.add_contacts(message)
            elif message.world == self._setup.world:
                self._setup.finish()

    def _drop_setup(self) -> None:
        with self._setup_lock:
            setup, self._setup = self._setup, None
        if setup is not None:
            setup.abandon()
        if self._run is not None:
            self._grafter.offer(None)

    def _on_world(self, arrived: World | Exception) -> None:
        """Handle the result of a world setup, on the setup's thread."""
        run = self._run
        if run is None:
            self._worlds.put(arrived)
        elif isinstance(arrived, World):
            self._offer(arrived)
        elif isinstance(arrived, (GraftError, OSError, EOFError)):
            what = (
                f"graftlab could not connect to ranks that joined again, so their tensors are missing here: {arrived}"
            )
            self._connection.send(Output(f"{what}\n"))
            warn(f"{self.place.label}: {what}; the job continues")
        else:
            self._fail(arrived)

    def _offer(self, world: World) -> None:
        offer = WorldOffer(
            world.exchange,
            StatusPage(world.page),
            world.run,
            world.plan,
            lambda run: self._on_moved(world, run),
            world.close,
        )
        with self._setup_lock:
            is_wanted = self._setup is not None and self._setup.world == world.number
            if is_wanted:
                self._grafter.offer(offer)
        if not is_wanted:
            world.close()
        elif self._over.is_set():
            self._grafter.offer(None)

    def _on_moved(self, world: World, run: RunInfo) -> None:
        """Enter the world that the grafter has moved to. Called on the job's thread at the end of a step."""
        self._enter(world, run)
        self._connection.send(WorldSwitch(world.number, run.first_step))
        logger.info(
            "%s continues with step %d in run %d, with generation %d of the baseline and generation %d of the target",
            self.place.label,
            run.first_step,
            run.run,
            *run.generations,
        )

    def _own_address(self) -> str:
        """The address at which other machines reach this one: the one from which it reaches the session server."""
        endpoint = self._config.endpoint
        if self._proxy is None or endpoint is None:
            return self._join.answer.address
        try:
            return address_towards(*endpoint)
        except OSError as error:
            raise SessionError(f"this machine has no route to {endpoint}: {error}") from error

    def _own_log(self) -> Path:
        """The log's file: in the session's folder, or on another machine in this job's folder."""
        log = Path(self._join.answer.log)
        if self._proxy is not None:
            folder = (
                self._config.rendezvous if self._config.run_dir is None else Path(self._config.run_dir).expanduser()
            )
            log = folder / "logs" / log.name
            # If the folder cannot be made, opening the log reports it.
            with contextlib.suppress(OSError):
                log.parent.mkdir(parents=True, mode=0o700, exist_ok=True)
        return log

    def _open_control_thread(self, frames: Sequence[Received] = ()) -> None:
        self._control = ControlThread(
            self._connection, self._grafter, self._kept, lambda run: None, end=self._on_server_gone, fail=self._fail
        )
        self._control.on(WorldRequest, self._set_up_world)
        self._control.on(WorldStart, self._set_up_world)
        self._control.on(Contacts, self._set_up_world)
        self._control.on(FallbackPlan, self._on_fallback_plan)
        grafter = self._grafter
        self._control.on_question(RunSelfGraft, _acknowledging(grafter.run_self_graft))
        self._control.on_question(AskSelfGraft, lambda _: SelfGraftResult(pack_value(grafter.self_graft_result())))
        self._control.on_question(RecordStep, _acknowledging(grafter.record_step))
        self._control.on_question(AskMatch, lambda asked: MatchResult(pack_value(grafter.match_result(asked.value))))
        self._control.on_question(TraceSteps, _acknowledging(grafter.trace_steps))
        self._control.on_question(AskLineTraces, self._line_traces)
        for frame in frames:
            self._control.take(frame)
        self._control.open()

    # ---- for a verdict and a match ------------------------------------------------------------------------------

    def _on_fallback_plan(self, message: FallbackPlan) -> None:
        self._fallback_plan = None if message.plan is None else from_wire(message.plan)
        self._grafter.keeps_step = message.plan is not None
        if message.plan is None:
            self._grafter.forget_orders(message.version)

    def _line_traces(self, question: AskLineTraces) -> LineTraces:
        traces, obstacle = self._grafter.line_traces()
        return LineTraces(pack_value(traces), obstacle)

    # ---- the end ------------------------------------------------------------------------------------------------

    def leave(self) -> None:
        """End this job's part of the run, so that the other side's taps stop waiting for it. Safe to call twice."""
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
            active.deactivate()
            try:
                self._end_run()
            except Exception as error:
                # A thread may still be in a tap. The job ends in any case.
                logger.warning(
                    "%s: graftlab could not end cleanly; the job is not affected: %s", self.place.label, error
                )
            self._drop_setup()
            self._connection.channel.close()
            self._close_proxy()
            if self._world is not None:
                self._world.close_connections()

    def _close_proxy(self) -> None:
        proxy, self._proxy = self._proxy, None
        if proxy is not None:
            proxy.close(when_done=True)

    def _end_run(self) -> None:
        run = self._run
        if run is None:
            return
        self._grafter.end_run()
        error = getattr(sys, "last_value", None)
        failure: Failure | None = None if error is None else failure_of(error)
        self._connection.send(RunDone(run.run, None, failure))
        # How the others end shows which tensors had no receiver.
        if not self._grafter.exchange.settle(timeout=self._config.timeout):
            self._connection.send(
                Output(
                    f"this job ended after it had waited {self._config.timeout:g} s for the others: it is unknown "
                    f"whether they requested its last tensors, so those have no rows\n"
                )
            )
        self._grafter.close_run()
        self._connection.send(RunSettled(run.run, self._grafter.next_step))
        self._connection.channel.drain(5.0)
        # Last, because a warning may be an error here.
        if self.place.rank == 0:
            connection = self._connection
            nothing = nothing_measured(connection.taps, connection.statuses, connection.last_errors, self.folder)
            for warning in filter(
                None, (nothing, *unmatched_filters(self._config, self._grafter.plan, connection.taps))
            ):
                warn(f"{self.place.label}: {warning}")

    def _fail(self, error: Exception) -> None:
        """After an error in graftlab itself: stop taking taps, and let the job continue."""
        logger.error("%s: graftlab failed", self.place.label, exc_info=error)
        with self._ending:
            if self._over.is_set():
                return
            self._over.set()
            active.deactivate()
            try:
                # Otherwise the other side would wait for each of this job's taps until its time limit.
                self._grafter.end_run()
            except Exception as second:
                logger.warning(
                    "%s could not notify the other ranks that it stopped taking taps: %s", self.place.label, second
                )
            self._connection.send(
                Output(f"graftlab failed and stopped taking taps here: {type(error).__name__}: {error}\n")
            )
            self._connection.channel.drain(1.0)
            self._connection.channel.close()
        warn(f"graftlab failed on {self.place.label} and stopped taking taps; the job continues ({error})")

    # ---- without a session --------------------------------------------------------------------------------------

    def _on_server_gone(self) -> None:
        """Continue without a session until one listens again. Called on the control thread, which then ends."""
        self._connection.channel.close()
        if self._over.is_set():
            return
        nothing = self._config.without_session == "nothing"
        logger.warning(
            "%s: the session ended; the job continues, %s. Rows are lost until another session listens %s",
            self.place.label,
            "and compares nothing" if nothing else "with its plan",
            f"at {endpoint}" if (endpoint := self._config.endpoint) else f"in {self._config.rendezvous}",
        )
        self._grafter.keeps_step = False
        fallback, self._fallback_plan = self._fallback_plan, None
        if fallback is not None:
            self._grafter.offer_plan(replace(fallback, version=self._grafter.newest_plan.version + 1))
        self._grafter.forget_orders(self._grafter.newest_plan.version)
        if nothing:
            self._grafter.offer_plan(_without_filters(self._grafter.newest_plan))
        self._drop_setup()
        while not self._over.wait(_RETRY):
            try:
                if self._rejoin():
                    return
            except (GraftError, OSError) as error:
                logger.warning("%s could not join the session that listens: %s", self.place.label, error)
                # The reason will probably stay, so ask less often.
                self._over.wait(10 * _RETRY)

    def _rejoin(self) -> bool:
        with self._setup_lock:
            run, world = self._run, self._world
        assert run is not None
        assert world is not None
        now = replace(run, first_step=self._grafter.next_step)
        state = RejoinState(
            now,
            to_wire(self._grafter.newest_plan),
            self._connection.lost_rows,
            world.connector is not None,
            self._join.answer.session,
        )
        self._close_proxy()
        result = self._client.rejoin(state, world.segment)
        if result is None:
            return False
        is_same = result.answer.session == self._join.answer.session
        self._join, self._proxy = result, result.proxy
        self._connection.reconnect(result.channel, result.wake)
        self._connection.lost_rows = 0
        self._open_control_thread()
        if world.connector is not None:
            self._connection.send(world.connector.linked(world.number))
        self._connection.send(Hello(os.getpid()))
        which = "its session again" if is_same else "another session"
        logger.info("%s has joined %s; rows go to %s", self.place.label, which, result.answer.folder)
        return True


def _acknowledging(handle: Callable[[A], None]) -> Callable[[A], Acknowledgement]:
    def acknowledge(order: A) -> Acknowledgement:
        handle(order)
        return Acknowledgement()

    return acknowledge


def _without_filters(plan: GraftPlan) -> GraftPlan:
    blank = msgspec.structs.replace(
        to_wire(plan), b2t=None, t2b=None, compare=None, keep=None, version=plan.version + 1
    )
    return from_wire(blank)
