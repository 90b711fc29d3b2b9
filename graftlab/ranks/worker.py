"""A rank: the process that runs one side's code, and nothing else.

The model runs on its main thread; the control thread handles the notebook's messages.
"""

from __future__ import annotations

import faulthandler
import importlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import types
from functools import partial
from mmap import mmap
from typing import NoReturn

import torch

from graftlab.base import shipping
from graftlab.base.world import Place
from graftlab.exchange.channel import SocketChannel
from graftlab.exchange.contract import Exchange
from graftlab.exchange.interrupts import is_interruptible_at
from graftlab.exchange.status_page import StatusPage
from graftlab.grafting import active
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.kept import KeptPairs
from graftlab.grafting.tap_rows import PendingRow
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import from_wire
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.control_thread import ControlThread
from graftlab.ranks.debugging import LastFailure
from graftlab.ranks.descriptors import make_exchange, receive_descriptors
from graftlab.ranks.displays import show_displays
from graftlab.ranks.edited_modules import EditedModules
from graftlab.ranks.messages import (
    Dispatch,
    DisplayData,
    Hello,
    LiveOutput,
    Output,
    PlanUpdate,
    RunDone,
    RunRequest,
    RunSettled,
    Shutdown,
)
from graftlab.ranks.namespace import Namespace, failure_of
from graftlab.ranks.options import RankSpec
from graftlab.ranks.process_end import die_with_notebook
from graftlab.ranks.process_setup import set_up_process
from graftlab.ranks.streams import LabelledStream
from graftlab.taps import calls as taps
from graftlab.taps.ambient_tags import ambient

# Seconds until an interrupt that came at a bad moment is retried.
_LOOK_AGAIN = 0.01
# Seconds that an interrupt waits for an import, since the import of a script may never end.
_FOR_AN_IMPORT = 2.0
_IMPORTER = importlib.__import__.__code__.co_filename


def main(spec: RankSpec, connection: socket.socket) -> None:
    """Run a rank to its end. The connection carries the descriptors of memory and sockets first, then messages."""
    faulthandler.enable()
    # Never closed: faulthandler writes to it until the process ends.
    stacks = os.open(spec.stacks, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    *descriptors, store, wake_socket, death_pipe = receive_descriptors(connection, 2 * len(spec.place.everyone()) + 2)
    die_with_notebook(death_pipe)
    line = ControlConnection(SocketChannel(connection), socket.socket(fileno=wake_socket))
    set_up_process(spec, spec.store or f"/proc/self/fd/{store}")
    exchange, own = make_exchange(
        spec.place, descriptors, spec.segment_size, budget=spec.buffer_budget, timeout=spec.tap_timeout
    )
    plan = from_wire(spec.plan)
    rank = Rank(
        spec.place, torch.device(spec.device), plan, exchange, own, KeptPairs(spec.keep_budget), line, Namespace()
    )
    rank.redirect_output()
    signal.signal(signal.SIGINT, rank.on_interrupt)
    rank.serve()
    end_cleanly(rank)


def end_cleanly(rank: Rank) -> NoReturn:
    """End the process once the notebook has what was sent to it."""
    rank.drain(5.0)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Collective libraries may keep threads that wait for peers that have ended; an ordinary exit would join them.
    os._exit(0)


class Rank:
    """The state of a rank between runs: its grafter, its namespace, and its connection to the notebook."""

    def __init__(
        self,
        place: Place,
        device: torch.device,
        plan: GraftPlan,
        exchange: Exchange[PendingRow],
        own: mmap,
        kept: KeptPairs,
        line: ControlConnection,
        namespace: Namespace,
    ) -> None:
        self._line = line
        self._exchange = exchange
        self._first_plan = plan
        self._grafter = Grafter(place, exchange, StatusPage(own), ambient, line, kept)
        self._namespace = namespace
        here = taps.Here(place.side, place.rank, place.world_size, device, namespace.variables)
        active.activate(self._grafter, here)
        self._edited_modules = EditedModules()
        # The current run, and the last one that was interrupted before it began.
        self._run_number, self._interrupted_run = -1, -1
        # The time at which an interrupt stops waiting for an import; 0 before the first such wait of a run.
        self._import_may_take = 0.0
        self._streams: list[LabelledStream] = []
        self._last_failure = LastFailure()
        self._handle = Dispatch[[], None]()
        self._handle.on(PlanUpdate, lambda update: self._grafter.adopt_offered_plan())
        self._handle.on(RunRequest, self._run)
        self._handle.on(Shutdown, lambda shutdown: None)
        self._control = ControlThread(line, self._grafter, kept, self._interrupt, self.end, self._last_failure.ask)
        self._control.open()

    def end(self) -> None:
        """End the process, because without a notebook this rank's results would be lost."""
        os._exit(1)

    def drain(self, seconds: float) -> None:
        """Wait at most ``seconds`` until the system has taken everything that was sent to the notebook."""
        self._line.channel.drain(seconds)

    def redirect_output(self) -> None:
        """Send what this process prints and displays to the notebook."""
        send = self._line.send
        self._streams = [
            LabelledStream(stream, lambda text: send(Output(text)), partial(self._print_live, number))
            for number, stream in enumerate((sys.stdout, sys.stderr))
        ]
        sys.stdout, sys.stderr = self._streams
        show_displays(lambda data: send(DisplayData(data)))

    def serve(self) -> None:
        """Handle the main thread's tasks, one after the other, until the shutdown."""
        self.begin()
        while not self._control.stopping:
            self.handle_next()

    def begin(self) -> None:
        """Take the first plan, and report to the notebook that this rank is ready."""
        self._grafter.begin_with(self._first_plan)
        # Sent last, so that a status read after it is that of an idle rank.
        self._line.send(Hello(os.getpid()))

    def handle_next(self) -> None:
        """Wait for the next task of the main thread, and handle it."""
        self._handle(self._control.tasks.get())

    def _run(self, request: RunRequest) -> None:
        run = self._run_number = request.info.run
        self._import_may_take = 0.0
        result, failure = None, None
        self._last_failure.forget()
        self._grafter.interrupt_due = False
        self._grafter.begin_run(request.info, from_wire(request.plan))
        try:
            if self._interrupted_run == run:
                raise KeyboardInterrupt
            self._edited_modules.warn_of_edits()
            result = memoryview(shipping.pack_result(self._namespace.run(request.work)))
        except BaseException as error:
            failure = failure_of(error)
            self._last_failure.keep(error)
        self._run_number = -1
        self._edited_modules.note()
        for stream in self._streams:
            stream.flush_lines()
        self._grafter.end_run()
        self._line.send(RunDone(run, result, failure))
        if self._exchange.settle(self._control.stop):
            self._grafter.close_run()
            self._line.send(RunSettled(run, self._grafter.next_step))

    def _print_live(self, stream: int, text: str) -> None:
        self._line.send(LiveOutput(stream, text))

    def _interrupt(self, run: int) -> None:
        """Interrupt a run, on the control thread: by a signal, or before it begins."""
        self._interrupted_run = run
        if self._run_number == run:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    def on_interrupt(self, number: int, frame: types.FrameType | None) -> None:
        """Raise KeyboardInterrupt in the user's code only: never outside it, and never within a frame on the wire."""
        is_harmless = is_interruptible_at(frame) and not self._spares_import(frame)
        while frame is not None and frame.f_code is not Namespace.run.__code__:
            frame = frame.f_back
        if frame is None and self._run_number < 0:
            return
        if frame is None or not is_harmless:
            # Retry once the user's code has begun or the exchange has finished, unless the run has ended by then. A
            # loop of little more than taps and steps may be in the exchange each time, so taps and steps check the flag
            # too.
            self._grafter.interrupt_due = True
            again = threading.Timer(_LOOK_AGAIN, self._interrupt_again, (self._run_number, number))
            again.daemon = True
            again.start()
            return
        self._grafter.interrupt_due = False
        raise KeyboardInterrupt

    def _spares_import(self, frame: types.FrameType | None) -> bool:
        """Whether to let a running import finish, because a half-imported C extension stays broken."""
        while frame is not None and frame.f_code.co_filename != _IMPORTER:
            frame = frame.f_back
        if frame is None:
            return False
        now = time.monotonic()
        self._import_may_take = self._import_may_take or now + _FOR_AN_IMPORT
        return now < self._import_may_take

    def _interrupt_again(self, run: int, number: int) -> None:
        if run == self._run_number and self._grafter.interrupt_due:
            os.kill(os.getpid(), number)
