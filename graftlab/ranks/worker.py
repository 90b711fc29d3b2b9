"""A rank: the process that runs one side's code, and nothing else.

The model runs on its main thread. A second thread, the desk, talks to the notebook: it takes plans, answers questions
while the model computes, and ends the process at once when the notebook is gone.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import logging
import os
import pickle
import queue
import select
import signal
import socket
import sys
import threading
import time
import traceback
import types
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

import graftlab
from graftlab.base import shipping
from graftlab.diffs.maps import difference_map
from graftlab.exchange.arena import Arena
from graftlab.exchange.channel import Channel
from graftlab.exchange.contract import LiveExchange
from graftlab.exchange.interrupts import may_raise_at
from graftlab.exchange.shared_memory import SharedMemoryExchange
from graftlab.exchange.whereabouts import WhereaboutsPage
from graftlab.grafting import active
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.kept import KeptPair, KeptPairs
from graftlab.ranks.lifeline import die_with_the_notebook
from graftlab.ranks.messages import (
    Failure,
    Hello,
    Output,
    PlanAdopted,
    PlanUpdate,
    Query,
    Reply,
    RunDone,
    RunRequest,
    RunSettled,
    Shutdown,
    TapSeen,
    Work,
    pack,
    pack_row,
    unpack,
)
from graftlab.ranks.spec import FDS_A_MESSAGE, RankSpec
from graftlab.ranks.streams import LabelledStream
from graftlab.rows.schema import Row
from graftlab.taps import calls as taps
from graftlab.transforms import user_traceback

# Seconds until an interrupt that came at a bad moment is tried again.
_LOOK_AGAIN = 0.01


def main(spec: RankSpec, connection: socket.socket) -> None:
    """The life of a rank. The connection carries the descriptors of memory and sockets first, then messages."""
    faulthandler.enable()
    stacks = open(spec.stacks, "a")  # noqa: SIM115 - faulthandler writes there as long as the process lives
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    *descriptors, store, bell, lifeline = _receive_descriptors(connection, 2 * len(spec.place.everyone()) + 2)
    die_with_the_notebook(lifeline)
    line = Line(Channel(connection), socket.socket(fileno=bell))
    _settle_in(spec, spec.store or f"/proc/self/fd/{store}")
    rank = Rank(spec, line, descriptors)
    line.send(pack(Hello(os.getpid(), spec.device, spec.backend, spec.notes)))
    rank.serve()
    line.channel.drain(5.0)
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    # Collective libraries may keep threads that wait for peers that are gone already; nothing here needs them.
    os._exit(0)


def _receive_descriptors(connection: socket.socket, count: int) -> list[int]:
    connection.setblocking(True)
    descriptors: list[int] = []
    while len(descriptors) < count:
        data, received, _, _ = socket.recv_fds(connection, 1, FDS_A_MESSAGE)
        if not data:
            raise EOFError("the notebook was gone before this rank had started")
        descriptors += received
    return descriptors


def _settle_in(spec: RankSpec, store: str) -> None:
    """Make this process what the notebook is: same folder, import path and environment; and join the side's group."""
    place = spec.place
    os.environ.clear()
    os.environ.update(spec.environ)
    os.environ.update(
        RANK=str(place.rank),
        WORLD_SIZE=str(place.world_size),
        LOCAL_RANK=str(place.rank),
        LOCAL_WORLD_SIZE=str(place.world_size),
    )
    sys.path[:] = spec.sys_path
    os.chdir(spec.cwd)
    torch.set_num_threads(spec.threads)
    device = torch.device(spec.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(
        spec.backend,
        store=FileStore(store, place.world_size),
        rank=place.rank,
        world_size=place.world_size,
        timeout=timedelta(seconds=spec.timeout),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_QuickFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    package = logging.getLogger(graftlab.__name__)
    package.addHandler(handler)
    package.setLevel(logging.INFO)
    package.propagate = False


class _QuickFormatter(logging.Formatter):
    """Works out date and time once a second: each graft is a line, and would spend more on its time than on itself."""

    _second = -1
    _shown = ""

    def formatTime(self, record: logging.LogRecord, datefmt: str | None = None) -> str:
        second = int(record.created)
        if second != self._second:
            self._second, self._shown = second, time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(second))
        return f"{self._shown},{int(record.msecs):03d}"


class Line:
    """The rank's end of its line to the notebook.

    The notebook lets rows gather for a moment before it looks again; the bell asks it to look now.
    """

    def __init__(self, channel: Channel, bell: socket.socket) -> None:
        self.channel = channel
        bell.setblocking(False)
        self._bell = bell
        self._rung = False

    def send(self, frame: bytes) -> None:
        """Send what somebody may wait for."""
        self.channel.send(frame)
        self._ring()

    def post(self, frame: bytes) -> None:
        """Send what may wait with others of its kind: a row."""
        self.channel.send(frame)
        # More than the socket holds: once is enough to be looked at.
        backed_up = self.channel.backed_up
        if backed_up and not self._rung:
            self._ring()
        self._rung = backed_up

    def _ring(self) -> None:
        # A bell that is full rings already; one without a notebook has nobody to hear it.
        with contextlib.suppress(OSError):
            self._bell.send(b"!")


class Rank:
    """What a rank holds between runs: its grafter, its namespace, and its line to the notebook."""

    def __init__(self, spec: RankSpec, line: Line, descriptors: list[int]) -> None:
        self._line = line
        self._place = place = spec.place
        everyone = [other.world_rank for other in place.everyone()]
        segments, sockets = descriptors[: len(everyone)], descriptors[len(everyone) :]
        arenas = {}
        for world_rank, descriptor in zip(everyone, segments, strict=True):
            arenas[world_rank] = Arena(descriptor, spec.segment_size, writable=world_rank == place.world_rank)
            os.close(descriptor)
        own = arenas.pop(place.world_rank)
        channels = (Channel(socket.socket(fileno=descriptor)) for descriptor in sockets)
        links = {rank: (link, arenas[rank]) for rank, link in zip(arenas, channels, strict=True)}
        self._exchange: LiveExchange[Row] = SharedMemoryExchange(
            place, own, links, budget=spec.buffer_budget, timeout=spec.timeout
        )
        self._kept = KeptPairs(spec.keep_budget)
        self.grafter = Grafter(
            place,
            self._exchange,
            WhereaboutsPage(own.map),
            taps.ambient,
            self,
            self._kept,
        )
        # Cells run in a real __main__, so that dataclasses and pickle find what they define.
        module = types.ModuleType("__main__")
        sys.modules["__main__"] = module
        self._vars = module.__dict__
        self._vars.update(gl=graftlab, torch=torch)
        here = taps.Here(place.side, place.rank, place.world_size, torch.device(spec.device), self._vars)
        active.activate(self.grafter, here)
        self._run_number = -1
        self._jobs: queue.SimpleQueue[RunRequest | PlanUpdate | Shutdown] = queue.SimpleQueue()
        self._stop_read, self._stop_write = os.pipe()
        self._stopping = False
        self._streams = [LabelledStream(stream, self._print) for stream in (sys.stdout, sys.stderr)]
        sys.stdout, sys.stderr = self._streams
        signal.signal(signal.SIGINT, self._on_interrupt)
        threading.Thread(target=self._desk, name="graftlab-desk", daemon=True).start()

    # ---- what the grafter reports -------------------------------------------------------------------------------

    def row(self, row: Row) -> None:
        self._line.post(pack_row(row))

    def seen(self, tags: dict[str, Any]) -> None:
        self._line.post(pack(TapSeen(tags)))

    def adopted(self, version: int, step: int) -> None:
        self._line.send(pack(PlanAdopted(version, step)))

    def _print(self, text: str) -> None:
        self._line.send(pack(Output(text)))

    def _on_interrupt(self, number: int, frame: types.FrameType | None) -> None:
        """``session.interrupt()`` ends the user's code: never the rank, and never half of a frame on the wire."""
        is_harmless = may_raise_at(frame)
        while frame is not None and frame.f_code is not Rank._work.__code__:
            frame = frame.f_back
        if frame is None and self._run_number < 0:
            return
        if frame is None or not is_harmless:
            # Look again when the user's code has begun, or that is done; unless it was the last thing that it did.
            again = threading.Timer(_LOOK_AGAIN, self._interrupt_again, (self._run_number, number))
            again.daemon = True
            again.start()
            return
        raise KeyboardInterrupt

    def _interrupt_again(self, run: int, number: int) -> None:
        if run == self._run_number:
            os.kill(os.getpid(), number)

    # ---- the desk: its own thread -------------------------------------------------------------------------------

    def _desk(self) -> None:
        poller = select.poll()
        poller.register(self._line.channel.fileno(), select.POLLIN)
        while True:
            poller.poll()
            for frame in self._line.channel.receive():
                message = unpack(frame)
                if isinstance(message, PlanUpdate):
                    self.grafter.offer_plan(message.plan)
                    self._jobs.put(message)
                elif isinstance(message, RunRequest):
                    self._jobs.put(message)
                elif isinstance(message, Query):
                    self._answer(message)
                elif isinstance(message, Shutdown):
                    self._stopping = True
                    os.write(self._stop_write, b"x")
                    self._jobs.put(message)
            if self._line.channel.closed:
                # The notebook is gone, by whatever death: nobody would ever collect what this rank computes.
                os._exit(1)

    def _answer(self, query: Query) -> None:
        try:
            if query.topic == "stacks":
                value: Any = _stacks()
            elif query.topic == "kept_tags":
                value = self._kept.tags(*query.arguments)
            else:
                name, tags, *more = query.arguments
                pair = self._kept.find(name, tags, failed=query.topic == "kept_input")
                value = None if pair is None else shipping.pack_result(_shown(pair, query.topic, *more))
            reply = pack(Reply(query.number, value))
        except Exception as error:
            reply = pack(Reply(query.number, None, f"{type(error).__name__}: {error}"))
        self._line.send(reply)

    # ---- the main thread ----------------------------------------------------------------------------------------

    def serve(self) -> None:
        """Run what is asked for, one run after the other, until the shutdown."""
        self.grafter.adopt_offered_plan()
        while not self._stopping:
            job = self._jobs.get()
            if isinstance(job, PlanUpdate):
                self.grafter.adopt_offered_plan()
            elif isinstance(job, RunRequest):
                self._run(job)

    def _run(self, request: RunRequest) -> None:
        run = self._run_number = request.info.run
        result, failure = None, None
        self.grafter.begin_run(request.info, request.plan)
        try:
            result = shipping.pack_result(self._work(request.work))
        except BaseException as error:
            failure = _failure(error)
        self._run_number = -1
        for stream in self._streams:
            stream.flush_lines()
        self.grafter.end_run()
        self._line.send(pack(RunDone(run, result, failure)))
        if self._exchange.settle(self._stop_read):
            self.grafter.close_run()
            self._line.send(pack(RunSettled(run, self.grafter.next_step)))

    def _work(self, work: Work) -> Any:
        if work.kind == "call":
            assert isinstance(work.body, bytes)
            function, args, kwargs = shipping.unpack_call(work.body)
            return function(*args, **kwargs)
        assert isinstance(work.body, str)
        shipping.install_source(work.filename, work.body)
        if work.kind == "eval":
            # Without dont_inherit the user's code would be compiled under this module's own __future__ imports.
            return eval(compile(work.body.strip(), work.filename, "eval", dont_inherit=True), self._vars)
        return self._execute_cell(work.body, work.filename)

    def _execute_cell(self, source: str, filename: str) -> Any:
        """Execute a cell; like a notebook, its value is that of a last line that is an expression."""
        tree = ast.parse(source, filename)
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, filename, "exec", dont_inherit=True), self._vars)
        if not isinstance(last, ast.Expr):
            return None
        return eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), self._vars)


def _shown(pair: KeptPair, topic: str, dims: tuple[int, ...] | None = None) -> Any:
    if topic == "kept_map":
        # Reduced here, so that only what is drawn travels, however large the tensors are.
        # A pair whose transform failed has only one of them, and is only found for kept_input.
        assert pair.baseline is not None
        assert pair.target is not None
        return difference_map(pair.baseline, pair.target, dims=dims)
    return pair if topic == "kept_input" else (pair.baseline, pair.target)


def _failure(error: BaseException) -> Failure:
    pickled = None
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        # The text says it all; the object only lets the notebook raise the same class.
        pickled = None
    message = str(error)
    if isinstance(error, SystemExit):
        message = f"the code called exit({error.code!r}); the rank goes on"
    return Failure(type(error).__name__, message, user_traceback(error), pickled)


def _stacks() -> str:
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    parts = []
    for ident, frame in sys._current_frames().items():
        if ident == threading.get_ident():
            continue
        stack = traceback.extract_stack(frame)
        # How the process came to run the user's code is the same on every rank, and not what anybody looks for.
        ours = max((index for index, line in enumerate(stack) if line.filename == __file__), default=-1)
        lines = "".join(traceback.format_list(stack[ours + 1 :])) or "  idle\n"
        parts.append(f"thread {names.get(ident, ident)}\n{lines}")
    return "\n".join(parts)
