"""The thread of a server's engine: each request ends once, whatever its step, its callback or its client does."""

from __future__ import annotations

import logging
import queue
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest
from kit.deadline import DEADLINE
from kit.refusals import exactly

from graftlab.engine.engine_thread import DuplicateRequestError, EngineStoppedError, EngineThread
from graftlab.errors import RequestError
from graftlab.requests.served import FinishedRequest, Request


class Steps:
    """An engine whose steps do as they are told: end the requests with these ids, or raise."""

    def __init__(self) -> None:
        self.requests: dict[str, Request] = {}
        self.told: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.is_free = False

    def free(self) -> None:
        """Let this step and all later ones pass, with nothing ended."""
        self.is_free = True
        self.told.put([])

    @property
    def live(self) -> list[str]:
        return [*self.requests]

    def check(self, request: Request) -> None:
        if request.rid == "impossible":
            raise RequestError("too long")

    def add(self, request: Request) -> None:
        self.requests[request.rid] = request

    def step(self) -> list[FinishedRequest]:
        told = [] if self.is_free else self.told.get(timeout=DEADLINE)
        if isinstance(told, Exception):
            raise told
        return [self._end(rid, "length") for rid in told]

    def abort(self, rid: str, error: str | None = None) -> FinishedRequest | None:
        return self._end(rid, error or "abort") if rid in self.requests else None

    def _end(self, rid: str, reason: str) -> FinishedRequest:
        response: Any = {"meta_info": {"finish_reason": reason}}
        return FinishedRequest(self.requests.pop(rid), response, 1.0, 2.0)


@pytest.fixture
def steps() -> Steps:
    return Steps()


@pytest.fixture
def ended() -> list[str]:
    """The ids of the requests of which the callback was told."""
    return []


@pytest.fixture
def thread(steps: Steps, ended: list[str]) -> Iterator[EngineThread]:
    def note(finished: FinishedRequest) -> None:
        ended.append(finished.request.rid)
        if finished.request.rid == "unlucky":
            raise OSError("no space")

    engine: Any = steps
    made = EngineThread(engine, note)
    yield made
    steps.free()
    assert made.stop(DEADLINE)


def request(rid: str) -> Request:
    return Request(rid=rid, input_ids=(1,))


def reason(future: Future[FinishedRequest]) -> str:
    found = future.result(DEADLINE)
    return str(found.response["meta_info"]["finish_reason"])


def test_an_id_is_free_again_once_its_request_is_over(thread: EngineThread, steps: Steps, ended: list[str]) -> None:
    first = thread.submit(request("a"))
    with pytest.raises(
        DuplicateRequestError, match=exactly("a request with the id 'a' is not over yet; use another id")
    ):
        thread.submit(request("a"))
    with pytest.raises(RequestError, match=exactly("too long")):
        thread.submit(request("impossible"))
    assert (thread.live, thread.alive, first.cancel()) == (1, True, False)
    steps.told.put(["a"])
    assert (reason(first), thread.live, ended) == ("length", 0, ["a"])
    again = thread.submit(request("a"))
    # It comes too late for the first, and is not meant for the second.
    thread.abort("a", first)
    steps.told.put([])
    steps.told.put(["a"])
    assert reason(again) == "length"


def test_a_request_that_is_aborted_ends_and_no_other(thread: EngineThread, steps: Steps, ended: list[str]) -> None:
    one, other = thread.submit(request("a")), thread.submit(request("b"))
    thread.abort("a", one)
    steps.told.put([])
    assert reason(one) == "abort"
    steps.told.put(["b"])
    assert (reason(other), ended) == ("length", ["a", "b"])


def test_a_step_that_raises_ends_its_requests_and_the_next_are_served(
    thread: EngineThread, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    one, other = thread.submit(request("a")), thread.submit(request("b"))
    # It may have begun without the second.
    steps.told.put([])
    steps.told.put(ValueError("bad kernel"))
    assert [reason(each) for each in (one, other)] == ["ValueError: bad kernel"] * 2
    assert "a step of the engine failed; its requests end here" in caplog.text
    steps.told.put(["c"])
    assert reason(thread.submit(request("c"))) == "length"


def test_a_callback_that_raises_keeps_no_client_waiting(
    thread: EngineThread, steps: Steps, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.ERROR):
        future = thread.submit(request("unlucky"))
        steps.told.put(["unlucky"])
        assert reason(future) == "length"
    assert "the callback for the finished request 'unlucky' failed" in caplog.text
    assert thread.alive


def test_a_thread_that_stops_ends_its_requests_and_refuses_others(thread: EngineThread, steps: Steps) -> None:
    future = thread.submit(request("a"))
    steps.free()
    assert thread.stop(DEADLINE)
    assert (reason(future), thread.alive, thread.live) == ("abort", False, 0)
    with pytest.raises(EngineStoppedError, match=exactly("the engine has stopped and refuses requests")):
        thread.submit(request("b"))
