"""Continuous batching: choose each request's tokens for the next forward pass."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from graftlab.engine.batch import Mode
from graftlab.engine.kv_cache import KVCache, Reservation
from graftlab.requests.served import Request


@dataclass(eq=False)
class LiveRequest:
    """A live request: its tokens so far, and how many of them are in the cache. Times are in seconds, ``created`` since
    the epoch, the others on the monotonic clock."""

    request: Request
    created: float
    arrived: float
    tokens: list[int] = field(init=False)
    computed: int = 0
    place: Reservation | None = None
    started: float | None = None
    first_token: float | None = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.input_ids)

    @property
    def output_ids(self) -> list[int]:
        return self.tokens[len(self.request.input_ids) :]


@dataclass(frozen=True)
class Span:
    """The tokens of one request, from ``live.computed`` to ``stop``, that go through the next forward."""

    live: LiveRequest
    stop: int

    @property
    def completes(self) -> bool:
        """Whether a new token follows, as opposed to the next piece of a long prompt."""
        return self.stop == len(self.live.tokens)


@dataclass(frozen=True)
class Work:
    """One forward: the next pieces of some prompts, or the latest token of every running request."""

    mode: Mode
    spans: list[Span]


class Scheduler:
    """First come, first served, and prefill before decode.

    A request is admitted when a row and slots for its maximum length are free, and keeps them until it ends. So the
    cache never fills up in the middle of an output and no request is computed twice, at the price of room for tokens
    that may never come. A prompt that is longer than what is left of ``max_prefill_tokens`` is taken in pieces.
    """

    def __init__(self, cache: KVCache, max_prefill_tokens: int) -> None:
        self.cache, self.max_prefill_tokens = cache, max_prefill_tokens
        # The first request in the queue may have part of its prompt in the cache already.
        self.waiting: deque[LiveRequest] = deque()
        self.running: list[LiveRequest] = []

    @staticmethod
    def tokens_needed(request: Request) -> int:
        """The slots that a request may use: one for each token but the last."""
        return len(request.input_ids) + request.max_new_tokens - 1

    def plan(self) -> Work | None:
        """Return the next work; None when no request is live. It only reserves places until :meth:`done` gets it."""
        spans, left = [], self.max_prefill_tokens
        for live in self.waiting:
            if not left or not self._has_place(live):
                break
            stop = min(len(live.tokens), live.computed + left)
            left -= stop - live.computed
            spans.append(Span(live, stop))
        if spans:
            return Work("prefill", spans)
        if self.running:
            return Work("decode", [Span(live, len(live.tokens)) for live in self.running])
        return None

    def _has_place(self, live: LiveRequest) -> bool:
        if live.place is None:
            live.place = self.cache.reserve(self.tokens_needed(live.request))
        return live.place is not None

    def done(self, work: Work) -> None:
        """Note that the planned tokens are in the cache; the caller appends the tokens that follow."""
        for span in work.spans:
            span.live.computed = span.stop
            if work.mode == "prefill" and span.completes:
                self.waiting.remove(span.live)
                self.running.append(span.live)

    def remove(self, live: LiveRequest) -> None:
        """Remove a request, whether it waits or runs, and free its place."""
        (self.running if live in self.running else self.waiting).remove(live)
        if live.place is not None:
            self.cache.release(live.place)
            live.place = None
