"""Queries to a rank, which its control thread answers while its model computes."""

from __future__ import annotations

import itertools
import queue
import signal
import time
from typing import Protocol, TypeVar

from graftlab.errors import MessageError, SessionError
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Answer, AskStacks, Query, Question, Refusal, Reply, Stacks, pack, unpack_to_rank

A = TypeVar("A", bound=Answer)

# Seconds that a rank may take to answer a question.
_ANSWER_TIMEOUT = 5.0


class AskRank(Protocol):
    """The type of :meth:`Queries.ask`."""

    def __call__(self, rank: RankHandle, question: Question, expected: type[A], /) -> A: ...


class Queries:
    """Sends questions to ranks and returns their answers, from any thread. ``timeout``, in seconds, bounds the wait."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._answers: dict[int, tuple[RankHandle, queue.SimpleQueue[Answer]]] = {}

    def ask(self, rank: RankHandle, question: Question, expected: type[A]) -> A:
        """Return the answer of the rank's control thread, which has the type ``expected``.

        Raises :class:`SessionError` when no answer arrives in time, the rank refuses with a reason, or a field of the
        question has the wrong type.
        """
        number = next(self._numbers)
        frame = pack(Query(number, question))
        try:
            # A rank ends at a message that it cannot read, and an argument of the wrong type would be one.
            unpack_to_rank(memoryview(frame))
        except MessageError as error:
            wrong = error.__cause__ or error
            raise SessionError(f"{rank.label} is not asked, because an argument has the wrong type: {wrong}") from None
        waiting: queue.SimpleQueue[Answer] = queue.SimpleQueue()
        self._answers[number] = (rank, waiting)
        # Packing tensors may take time. A stack does not: a rank that takes long to send it hangs.
        limit = _ANSWER_TIMEOUT if isinstance(question, AskStacks) else max(_ANSWER_TIMEOUT, self._timeout)
        try:
            if not rank.alive:
                raise SessionError(f"{rank.label} cannot answer ({rank.how_it_ended()})")
            rank.channel.send(frame)
            answer = waiting.get(timeout=limit)
        except queue.Empty:
            advice = "" if isinstance(question, AskStacks) else "; session.stacks() shows where it is in the code"
            raise SessionError(f"{rank.label} did not answer within {limit:g} s ({rank.status()}){advice}") from None
        finally:
            del self._answers[number]
        if isinstance(answer, Refusal):
            raise SessionError(f"{rank.label}: {answer.error}")
        if not isinstance(answer, expected):
            asked = type(question).__name__
            raise SessionError(f"{rank.label} answered {asked} with {type(answer).__name__}, not {expected.__name__}")
        return answer

    def on_reply(self, reply: Reply) -> None:
        waiting = self._answers.get(reply.number)
        if waiting is not None:
            waiting[1].put(reply.answer)

    def note_gone(self, rank: RankHandle) -> None:
        """End every wait for an answer of this rank, which has died."""
        for asked, waiting in list(self._answers.values()):
            if asked is rank:
                waiting.put(Refusal(f"gone before it answered ({rank.how_it_ended()})"))

    def stack_of(self, rank: RankHandle) -> str:
        """The stacks of the rank's threads, even if one of them never releases the interpreter."""
        try:
            return self.ask(rank, AskStacks(), Stacks).text
        except SessionError as error:
            if rank.stacks_file is None:
                return f"{error}; `py-spy dump --pid {rank.pid}` shows its stacks even while the interpreter is blocked"
            # The control thread cannot run, because C code holds the interpreter. The signal handler does not need the
            # interpreter.
            before = rank.stacks_file.stat().st_size
            rank.signal(signal.SIGUSR1)
            deadline = time.monotonic() + _ANSWER_TIMEOUT
            while time.monotonic() < deadline:
                if rank.stacks_file.stat().st_size > before and not rank.join(0.05):
                    break
                rank.join(0.05)
            with open(rank.stacks_file, encoding="utf-8", errors="replace") as file:
                file.seek(before)
                return file.read() or f"{rank.label} did not answer within {_ANSWER_TIMEOUT:g} s"
