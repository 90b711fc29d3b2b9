"""An engine behind HTTP, from its first request to the end of its last."""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import Future
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application

from graftlab.engine.access import ListeningSocket
from graftlab.engine.engine import Engine
from graftlab.engine.engine_thread import EngineThread
from graftlab.engine.handlers import ROUTES, NotFound
from graftlab.requests import RequestLogging
from graftlab.requests.served import Encoder, FinishedRequest, Request

_MAX_BODY = 8 * 2**20  # bytes
# Seconds for the current step, and then for sending the last answers.
_LAST_STEP, _LAST_WORDS = 5.0, 2.0


class Server:
    """Serves from :meth:`listen` to :meth:`close`, on one event loop, with the engine on a separate thread.

    Each request is recorded through ``requests`` before it is answered. With a ``token``, only clients that send it as
    bearer token are served. At most ``max_live`` requests wait and run at a time. A connection without a whole request
    within ``half_sent_seconds`` is closed.
    """

    def __init__(
        self,
        engine: Engine,
        requests: RequestLogging,
        *,
        token: str | None = None,
        max_live: int = 1000,
        half_sent_seconds: float = 15.0,
    ) -> None:
        self.requests, self.token, self.max_live = requests, token, max_live
        self.tokenizer: Encoder = engine.tokenizer
        self.status = engine.status
        self.draining = False
        # The tasks that wait for an answer.
        self.answering: set[asyncio.Task[Any]] = set()
        # By the request's identity, which lives as long as it does: the dumper wants the very object at both ends.
        self._begun: dict[int, dict[str, Any]] = {}
        self.engine = EngineThread(engine, self._record)
        arguments = {"server": self}
        application = Application(
            [(path, handler, arguments) for path, handler in ROUTES],
            default_handler_class=NotFound,
            default_handler_args=arguments,
        )
        self._http = HTTPServer(
            application,
            max_body_size=_MAX_BODY,
            max_buffer_size=2 * _MAX_BODY,
            idle_connection_timeout=half_sent_seconds,
            body_timeout=half_sent_seconds,
        )

    def listen(self, host: str, port: int) -> int:
        """Accept requests from now on; returns the port, a free one for port 0. Raises `OSError` if it cannot."""
        sockets = [ListeningSocket(each) for each in bind_sockets(port, host)]
        self._http.add_sockets(sockets)
        return int(sockets[0].getsockname()[1])

    def submit(self, request: Request) -> Future[FinishedRequest]:
        """The future of a request. Raises as :meth:`EngineThread.submit` does."""
        fields = request.as_dict()
        self._begun[id(request)] = fields
        self.requests.dumper.begin(fields, time.time())
        try:
            return self.engine.submit(request)
        except BaseException:
            self.requests.dumper.forget(fields)
            del self._begun[id(request)]
            raise

    def _record(self, finished: FinishedRequest) -> None:
        fields = self._begun.pop(id(finished.request))
        self.requests.finished(fields, finished.response, finished.created, finished.finished)

    async def close(self, patience: float, hurry: asyncio.Event) -> None:
        """Refuse new requests, wait up to `patience` seconds, or until `hurry`, for live ones, and abort the rest."""
        self.draining = True
        self._http.stop()
        answered = asyncio.ensure_future(self._all_answered())
        hurried = asyncio.ensure_future(hurry.wait())
        await asyncio.wait({answered, hurried}, timeout=patience, return_when=asyncio.FIRST_COMPLETED)
        hurried.cancel()
        await asyncio.to_thread(self.engine.stop, _LAST_STEP)
        await asyncio.wait({answered}, timeout=_LAST_WORDS)
        answered.cancel()
        await self._http.close_all_connections()

    async def _all_answered(self) -> None:
        while self.answering:
            await asyncio.wait(set(self.answering))
