"""The control thread of a rank, which talks to the notebook while the model computes on the main thread.

It receives plans, queues work for the main thread, answers questions, and notices when the notebook is gone.
"""

from __future__ import annotations

import logging
import os
import queue
import select
import threading
from collections.abc import Callable
from typing import Any

from graftlab.base import shipping
from graftlab.diffs.maps import difference_map
from graftlab.errors import GraftError, SessionError
from graftlab.exchange.channel import Received
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.kept import KeptPair, KeptPairs
from graftlab.plan.wire import from_wire
from graftlab.ranks.connection import ControlConnection
from graftlab.ranks.debugging import stacks_of_other_threads
from graftlab.ranks.messages import (
    Answer,
    AskKeptInput,
    AskKeptMap,
    AskKeptPair,
    AskKeptTags,
    AskPostMortem,
    AskStacks,
    Dispatch,
    Interrupt,
    KeptTags,
    KeptValue,
    M,
    PlanUpdate,
    PostMortem,
    Query,
    Refusal,
    Reply,
    RunRequest,
    Shutdown,
    Stacks,
    unpack_to_rank,
)

logger = logging.getLogger(__name__)

MainThreadTask = RunRequest | PlanUpdate | Shutdown


def refuse_post_mortem(command: str) -> str:
    """Raise :class:`SessionError`, for a rank that keeps no failures."""
    raise SessionError("this rank is a job, which keeps no failures; start a debugger where the job was started")


class ControlThread:
    """Receives the notebook's messages; ``tasks`` queues those for the main thread.

    ``stop`` becomes readable on shutdown. ``interrupt`` is called with the number of the run to interrupt. ``end`` is
    called once, when the connection to the notebook is lost or a message cannot be read. ``fail`` is called with an
    unexpected exception, which ends the thread; without ``fail``, ``end`` is called instead.
    """

    def __init__(
        self,
        line: ControlConnection,
        grafter: Grafter,
        kept: KeptPairs,
        interrupt: Callable[[int], None],
        end: Callable[[], None],
        post_mortem: Callable[[str], str] = refuse_post_mortem,
        fail: Callable[[Exception], None] | None = None,
    ) -> None:
        self.tasks: queue.SimpleQueue[MainThreadTask] = queue.SimpleQueue()
        self.stop = os.eventfd(0)
        self.stopping = False
        self._line = line
        self._grafter = grafter
        self._kept = kept
        self._end = end
        self._post_mortem = post_mortem
        self._fail = fail
        self._handle = Dispatch[[], None]()
        self._handle.on(PlanUpdate, self._on_plan)
        self._handle.on(RunRequest, self.tasks.put)
        self._handle.on(Query, self._on_query)
        self._handle.on(Interrupt, lambda message: interrupt(message.run))
        self._handle.on(Shutdown, self._on_shutdown)
        self._answer = Dispatch[[], Answer]()
        self._answer.on(AskStacks, lambda question: Stacks(stacks_of_other_threads()))
        self._answer.on(AskPostMortem, lambda question: PostMortem(self._post_mortem(question.command)))
        self._answer.on(AskKeptTags, lambda question: KeptTags(kept.tags(question.failed), kept.missing()))
        self._answer.on(AskKeptPair, self._kept_pair)
        self._answer.on(AskKeptInput, self._kept_input)
        self._answer.on(AskKeptMap, self._kept_map)

    def on(self, kind: type[M], handler: Callable[[M], None]) -> None:
        """Call this handler for messages of this kind, on the control thread."""
        self._handle.on(kind, handler)

    def on_question(self, kind: type[M], answer: Callable[[M], Answer]) -> None:
        """Answer questions of this kind with this function, on the control thread."""
        self._answer.on(kind, answer)

    def open(self) -> None:
        threading.Thread(target=self._serve_or_fail, name="graftlab-control", daemon=True).start()

    def _serve_or_fail(self) -> None:
        try:
            self._serve()
        except Exception as error:
            if self._fail is not None:
                self._fail(error)
                return
            # Without this thread the rank would ignore the notebook.
            logger.critical("the control thread failed", exc_info=True)
            self._end()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._line.channel.fileno(), select.POLLIN)
        while not self._line.channel.closed:
            poller.poll()
            for frame in self._line.channel.receive():
                try:
                    self.take(frame)
                except GraftError:
                    # Otherwise the notebook might wait forever for a reply. It notices the rank's end, and shows this
                    # log.
                    logger.critical("this rank cannot read a message from the notebook", exc_info=True)
                    self._end()
                    return
        self._end()

    def take(self, frame: Received) -> None:
        """Handle one frame from the notebook."""
        self._handle(unpack_to_rank(frame))

    def _on_plan(self, update: PlanUpdate) -> None:
        self._grafter.offer_plan(from_wire(update.plan))
        self.tasks.put(update)

    def _on_shutdown(self, shutdown: Shutdown) -> None:
        self.stopping = True
        os.eventfd_write(self.stop, 1)
        self.tasks.put(shutdown)

    # ---- questions ----------------------------------------------------------------------------------------------

    def _on_query(self, query: Query) -> None:
        if isinstance(query.question, AskPostMortem):
            # It evaluates an expression that a user typed, which may never return, and this thread has other work.
            threading.Thread(target=self._reply, args=(query,), name="graftlab-post-mortem", daemon=True).start()
        else:
            self._reply(query)

    def _reply(self, query: Query) -> None:
        try:
            answer = self._answer(query.question)
        except Exception as error:
            answer = Refusal(str(error) if isinstance(error, GraftError) else f"{type(error).__name__}: {error}")
        self._line.send(Reply(query.number, answer))

    def _kept_pair(self, question: AskKeptPair) -> KeptValue:
        pair = self._kept.find(question.name, question.tags)
        return _pack_kept(None if pair is None else _tensors_of(pair))

    def _kept_input(self, question: AskKeptInput) -> KeptValue:
        return _pack_kept(self._kept.find(question.name, question.tags, failed=True))

    def _kept_map(self, question: AskKeptMap) -> KeptValue:
        # Reduced here, so that only the pixels to draw are sent, however large the tensors are.
        pair = self._kept.find(question.name, question.tags)
        return _pack_kept(None if pair is None else difference_map(*_tensors_of(pair), dims=question.dims))


def _tensors_of(pair: KeptPair) -> tuple[Any, Any]:
    # A pair whose transform failed lacks one tensor, and only AskKeptInput finds it.
    assert pair.baseline is not None
    assert pair.target is not None
    return pair.baseline, pair.target


def pack_value(value: Any) -> bytes | None:
    """Pickle a value for a notebook that trusts this rank; None stays None."""
    return None if value is None else shipping.pack_result(value)


def _pack_kept(value: Any) -> KeptValue:
    return KeptValue(pack_value(value))
