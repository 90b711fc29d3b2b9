"""The thread on which a server's engine runs; other threads submit requests and get futures."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from graftlab.engine.engine import Engine
from graftlab.errors import RequestError
from graftlab.requests.served import FinishedRequest, Request

logger = logging.getLogger(__name__)


class EngineStoppedError(RuntimeError):
    """The engine has stopped, and refuses requests."""


class DuplicateRequestError(RequestError):
    """A request with this id is still live."""


class EngineThread:
    """Owns an engine from its construction: no other code may call it. All methods are safe on any thread.

    ``on_finished`` is called on the engine's thread with each request that has ended, in whatever way, before its
    future has a result. A step that raises ends all live requests with finish reason ``error``; the engine continues
    with the next.
    """

    def __init__(self, engine: Engine, on_finished: Callable[[FinishedRequest], object]) -> None:
        self._engine = engine
        self._on_finished = on_finished
        self._orders: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        self._futures: dict[str, Future[FinishedRequest]] = {}
        self._lock = threading.Lock()
        self._stopped = False
        # A daemon, so that a forward that hangs cannot keep the process from ending.
        self._thread = threading.Thread(target=self._run, name="graftlab-engine", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive()

    @property
    def live(self) -> int:
        """How many requests are not over."""
        return len(self._futures)

    def submit(self, request: Request) -> Future[FinishedRequest]:
        """The future of a request, which cannot be cancelled; see :meth:`abort`. Raises :class:`RequestError` if it can
        never be served, :class:`DuplicateRequestError` if one with its id is still live, and
        :class:`EngineStoppedError`.
        """
        self._engine.check(request)
        future: Future[FinishedRequest] = Future()
        future.set_running_or_notify_cancel()
        with self._lock:
            if self._stopped:
                raise EngineStoppedError("the engine has stopped and refuses requests")
            if request.rid in self._futures:
                raise DuplicateRequestError(f"a request with the id {request.rid!r} is not over yet; use another id")
            self._futures[request.rid] = future
            self._orders.put(lambda: self._engine.add(request))
        return future

    def abort(self, rid: str, future: Future[FinishedRequest]) -> None:
        """End the request of this future before the next step, with the output so far. Does not wait."""
        self._orders.put(lambda: self._abort(rid, future))

    def stop(self, timeout: float) -> bool:
        """Stop after the current step, aborting live requests; returns whether it stopped within `timeout` seconds."""
        with self._lock:
            self._stopped = True
        self._orders.put(None)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    # ---- on the thread ----------------------------------------------------------------------------------------------

    def _run(self) -> None:
        going = True
        while going:
            try:
                going = self._carry_out_orders()
                if going:
                    for finished in self._engine.step():
                        self._notify_finished(finished)
            except Exception as error:
                logger.exception("a step of the engine failed; its requests end here")
                self._end_all(f"{type(error).__name__}: {error}")
        self._end_all(None)

    def _carry_out_orders(self) -> bool:
        """Carry out orders, and wait for one if there is nothing else to do; False to stop."""
        wait = not self._engine.live
        while True:
            try:
                order = self._orders.get(block=wait)
            except queue.Empty:
                return True
            if order is None:
                return False
            order()
            wait = False

    def _abort(self, rid: str, future: Future[FinishedRequest]) -> None:
        # By now it may be over, and another request may have its id.
        if self._futures.get(rid) is future and (finished := self._engine.abort(rid)) is not None:
            self._notify_finished(finished)

    def _end_all(self, error: str | None) -> None:
        for rid in self._engine.live:
            if (finished := self._engine.abort(rid, error)) is not None:
                self._notify_finished(finished)

    def _notify_finished(self, finished: FinishedRequest) -> None:
        try:
            self._on_finished(finished)
        except Exception:
            logger.exception("the callback for the finished request %r failed", finished.request.rid)
        with self._lock:
            future = self._futures.pop(finished.request.rid)
        future.set_result(finished)
