"""The desk: the rank's second thread, which talks to the notebook while the model computes.

It takes plans, hands on what is to be done, answers questions, and is the first to know that the notebook is gone.
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
from graftlab.grafting.grafter import Grafter
from graftlab.grafting.kept import KeptPair, KeptPairs
from graftlab.plan.wire import from_wire
from graftlab.ranks.line import Line
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
    Kept,
    KeptTags,
    PlanUpdate,
    PostMortem,
    Query,
    Refused,
    Reply,
    RunRequest,
    Shutdown,
    Stacks,
    unpack_to_rank,
)
from graftlab.ranks.stacks import stacks_of_other_threads

logger = logging.getLogger(__name__)

Job = RunRequest | PlanUpdate | Shutdown


def nothing_failed(command: str) -> str:
    """The answer of what keeps no failures."""
    raise SessionError("this rank is a job of its own, which keeps no failures; a debugger works where it was started")


class Desk:
    """What is for the main thread waits in ``jobs``. ``stop`` becomes readable when the rank shall end.

    ``interrupt`` is called with the number of a run that is not to go on, ``end`` once, when the notebook is gone, by
    whatever death, or sends what cannot be read.
    """

    def __init__(
        self,
        line: Line,
        grafter: Grafter,
        kept: KeptPairs,
        interrupt: Callable[[int], None],
        end: Callable[[], None],
        post_mortem: Callable[[str], str] = nothing_failed,
    ) -> None:
        self.jobs: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self.stop, self._stop_write = os.pipe()
        self.stopping = False
        self._line = line
        self._grafter = grafter
        self._kept = kept
        self._end = end
        self._post_mortem = post_mortem
        self.takes = Dispatch[[], None]()
        self.takes.on(PlanUpdate, self._on_plan)
        self.takes.on(RunRequest, self.jobs.put)
        self.takes.on(Query, self._on_query)
        self.takes.on(Interrupt, lambda message: interrupt(message.run))
        self.takes.on(Shutdown, self._on_shutdown)
        self.answers = Dispatch[[], Answer]()
        self.answers.on(AskStacks, lambda question: Stacks(stacks_of_other_threads()))
        self.answers.on(AskPostMortem, lambda question: PostMortem(self._post_mortem(question.command)))
        self.answers.on(AskKeptTags, lambda question: KeptTags(kept.tags(question.failed), kept.missing()))
        self.answers.on(AskKeptPair, self._kept_pair)
        self.answers.on(AskKeptInput, self._kept_input)
        self.answers.on(AskKeptMap, self._kept_map)

    def open(self) -> None:
        threading.Thread(target=self._serve, name="graftlab-desk", daemon=True).start()

    def _serve(self) -> None:
        poller = select.poll()
        poller.register(self._line.channel.fileno(), select.POLLIN)
        while not self._line.channel.closed:
            poller.poll()
            for frame in self._line.channel.receive():
                try:
                    self.take(frame)
                except GraftError:
                    # The notebook would wait for ever for what this was about; it hears of an end, and sees the log.
                    logger.critical("this rank cannot read what the notebook sends", exc_info=True)
                    self._end()
                    return
        self._end()

    def take(self, frame: bytes) -> None:
        """Do what one frame of the notebook says."""
        self.takes(unpack_to_rank(frame))

    def _on_plan(self, update: PlanUpdate) -> None:
        self._grafter.offer_plan(from_wire(update.plan))
        self.jobs.put(update)

    def _on_shutdown(self, shutdown: Shutdown) -> None:
        self.stopping = True
        os.write(self._stop_write, b"x")
        self.jobs.put(shutdown)

    # ---- questions ----------------------------------------------------------------------------------------------

    def _on_query(self, query: Query) -> None:
        if isinstance(query.question, AskPostMortem):
            # It evaluates what a person typed, which may take for ever; the desk is for everybody.
            threading.Thread(target=self._reply, args=(query,), name="graftlab-post-mortem", daemon=True).start()
        else:
            self._reply(query)

    def _reply(self, query: Query) -> None:
        try:
            answer = self.answers(query.question)
        except Exception as error:
            answer = Refused(str(error) if isinstance(error, GraftError) else f"{type(error).__name__}: {error}")
        self._line.send(Reply(query.number, answer))

    def _kept_pair(self, question: AskKeptPair) -> Kept:
        pair = self._kept.find(question.name, question.tags)
        return _packed(None if pair is None else _both(pair))

    def _kept_input(self, question: AskKeptInput) -> Kept:
        return _packed(self._kept.find(question.name, question.tags, failed=True))

    def _kept_map(self, question: AskKeptMap) -> Kept:
        # Reduced here, so that only what is drawn travels, however large the tensors are.
        pair = self._kept.find(question.name, question.tags)
        return _packed(None if pair is None else difference_map(*_both(pair), dims=question.dims))


def _both(pair: KeptPair) -> tuple[Any, Any]:
    # A pair whose transform failed has only one of them, and is only found for AskKeptInput.
    assert pair.baseline is not None
    assert pair.target is not None
    return pair.baseline, pair.target


def packed(value: Any) -> bytes | None:
    """What a rank has, for a notebook that may trust it."""
    return None if value is None else shipping.pack_result(value)


def _packed(value: Any) -> Kept:
    return Kept(packed(value))
