"""The server's paths: ``POST /generate``, ``POST /configure_logging``, ``GET /health``; JSON in, JSON out."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Protocol

from tornado.iostream import StreamClosedError
from tornado.web import RequestHandler

from graftlab.engine.engine_thread import DuplicateRequestError, EngineStoppedError, EngineThread
from graftlab.errors import RequestError
from graftlab.requests import RequestLogging, configure
from graftlab.requests.served import Encoder, FinishedRequest, Request


class Serving(Protocol):
    """The server as its handlers use it."""

    requests: RequestLogging
    engine: EngineThread
    tokenizer: Encoder
    token: str | None
    max_live: int
    draining: bool
    answering: set[asyncio.Task[Any]]
    status: Callable[[], dict[str, Any]]

    def submit(self, request: Request) -> Future[FinishedRequest]:
        """Return the future result of a request."""


class Handler(RequestHandler):
    """Checks the token, and reports errors as ``{"error": reason}``."""

    def initialize(self, server: Serving) -> None:
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
