"""Questions to a rank that are answered while its model computes."""

from __future__ import annotations

import itertools
import queue
import signal
import time
from typing import Any

from graftlab.errors import SessionError
from graftlab.ranks.launcher import RankProcess
from graftlab.ranks.messages import Query, Reply, pack

# How long a rank may take to answer a question that needs no waiting.
_ANSWER_TIMEOUT = 5.0


class Questions:
    """Asks, and brings each answer to whoever asked. Any thread may ask; ``timeout``, in seconds, bounds the wait."""

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        self._numbers = itertools.count(1)
        self._answers: dict[int, queue.SimpleQueue[Reply]] = {}

    def ask(self, rank: RankProcess, topic: Any, *arguments: Any) -> Any:
        """The answer of the rank's desk. Raises :class:`SessionError` when there is none in time, or it is an error."""
        number = next(self._numbers)
        answer = self._answers[number] = queue.SimpleQueue()
        # Tensors may take their time; a rank that is asked for its stack alone hangs if it does.
        limit = _ANSWER_TIMEOUT if topic == "stacks" else max(_ANSWER_TIMEOUT, self._timeout)
        try:
            rank.channel.send(pack(Query(number, topic, arguments)))
            reply = answer.get(timeout=limit)
        except queue.Empty:
            raise SessionError(f"{rank.label} did not answer within {limit:g} s ({rank.whereabouts()})") from None
        finally:
            del self._answers[number]
        if reply.error is not None:
            raise SessionError(f"{rank.label}: {reply.error}")
        return reply.value

    def on_reply(self, reply: Reply) -> None:
        waiting = self._answers.get(reply.number)
        if waiting is not None:
            waiting.put(reply)

    def stack_of(self, rank: RankProcess) -> str:
        """Where the rank's threads are in the code, also if none of them lets go of the interpreter."""
        try:
            return str(self.ask(rank, "stacks"))
        except SessionError:
            # Its desk gets no turn, so some C code holds the interpreter: ask the signal handler, which needs none.
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
