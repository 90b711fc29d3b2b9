"""An engine behind HTTP, from its first request to the end of its last.

``POST /generate``, ``POST /configure_logging`` and ``GET /health`` take and give JSON.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import time
from concurrent.futures import Future
from typing import Any

from tornado.httpserver import HTTPServer
from tornado.iostream import StreamClosedError
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from graftlab.engine.access import ListeningSocket
from graftlab.engine.engine import Engine
from graftlab.engine.engine_thread import DuplicateRequestError, EngineStoppedError, EngineThread
from graftlab.errors import RequestError
from graftlab.requests import RequestLogging, configure
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


class Handler(RequestHandler):
    """Checks the token, and reports errors as ``{"error": reason}``."""

    def initialize(self, server: Server) -> None:
        self.server = server

    async def prepare(self) -> None:
        # Browsers send the origin of a request. No web page should call an engine.
        if "Origin" in self.request.headers:
            await self.answer(403, {"error": "requests from pages in a browser are not served"})
        elif not self._is_authorized():
            self.set_header("WWW-Authenticate", "Bearer")
            await self.answer(401, {"error": "this server requires its token: Authorization: Bearer TOKEN"})

    def _is_authorized(self) -> bool:
        if self.server.token is None:
            return True
        scheme, _, given = self.request.headers.get("Authorization", "").partition(" ")
        # In constant time, so that it does not reveal how much of the token is right.
        known = hmac.compare_digest(given.strip().encode(), self.server.token.encode())
        return known and scheme.lower() == "bearer"

    async def answer(self, status: int, content: object) -> None:
        """Send `content` as JSON; returns once it is sent, or the client has disconnected."""
        self.set_status(status)
        self.set_header("Content-Type", "application/json")
        with contextlib.suppress(StreamClosedError):
            await self.finish(json.dumps(content) + "\n")

    def write_error(self, status_code: int, **_: Any) -> None:
        self.set_header("Content-Type", "application/json")
        self.finish(json.dumps({"error": self._reason}) + "\n")


class NotFound(Handler):
    """Answers every other path with 404."""

    async def prepare(self) -> None:
        await super().prepare()
        if not self._finished:
            await self.answer(404, {"error": f"the paths of this server are {', '.join(path for path, _ in ROUTES)}"})


class Generate(Handler):
    """Answers with the response once the request has ended; a client that disconnects aborts it."""

    _future: Future[FinishedRequest] | None = None
    _rid = ""

    async def post(self) -> None:
        try:
            request = Request.from_dict(_json_object(self.request.body), self.server.tokenizer)
            if self.server.draining or self.server.engine.live >= self.server.max_live:
                why = "the server is ending" if self.server.draining else "too many requests wait"
                return await self.answer(503, {"error": f"{why}; try again later"})
            self._rid, self._future = request.rid, self.server.submit(request)
        except DuplicateRequestError as error:
            return await self.answer(409, {"error": str(error)})
        except RequestError as error:
            return await self.answer(400, {"error": str(error)})
        except EngineStoppedError as error:
            return await self.answer(503, {"error": str(error)})
        task = asyncio.current_task()
        assert task is not None
        self.server.answering.add(task)
        task.add_done_callback(self.server.answering.discard)
        response = (await asyncio.wrap_future(self._future)).response
        failed = response["meta_info"]["finish_reason"] == "error"
        await self.answer(500 if failed else 200, response)

    def on_connection_close(self) -> None:
        if self._future is not None:
            self.server.engine.abort(self._rid, self._future)


class ConfigureLogging(Handler):
    """See :func:`graftlab.requests.configure`."""

    async def post(self) -> None:
        # In a thread, because it may make a folder, and a slow disk must not delay every request.
        await self.answer(*await asyncio.to_thread(configure, self.server.requests, self.request.body))


class Health(Handler):
    """200 while requests are accepted, 503 otherwise; with the current load."""

    async def get(self) -> None:
        state = "draining" if self.server.draining else "ok" if self.server.engine.alive else "dead"
        await self.answer(200 if state == "ok" else 503, {"status": state, **self.server.status()})


ROUTES: list[tuple[str, type[Handler]]] = [
    ("/generate", Generate),
    ("/configure_logging", ConfigureLogging),
    ("/health", Health),
]


def _json_object(body: bytes) -> dict[str, Any]:
    try:
        content = json.loads(body)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise RequestError(f"the body must be a JSON object, and is a {type(content).__name__}")
    return content
