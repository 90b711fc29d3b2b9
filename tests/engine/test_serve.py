"""The engine's server answers right over real HTTP, records what it answered, and ends in good order."""

from __future__ import annotations

import asyncio
import http.client
import json
import logging
import os
import resource
import signal
import socket
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit import warm
from kit.bodies import bodies
from kit.examples import examples
from kit.support import DEADLINE, wait_until

from graftlab.engine import EagerRunner, Engine, build_model
from graftlab.engine import server as engine_server
from graftlab.engine.server import ConfigureLogging, Server
from graftlab.requests import RecordedRequest, RequestDumper, RequestLogging, configure_logging, load_dump

pytestmark = pytest.mark.ranks

ROOT = Path(__file__).resolve().parents[2]
BUSINESS = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def ask(url: str, body: object = None, headers: dict[str, str] | None = None) -> tuple[int, Any]:
    """The status and the JSON of an answer; `body` is sent as it is when it is bytes, and as JSON otherwise."""
    data = body if body is None or isinstance(body, bytes) else json.dumps(body).encode()
    try:
        with BUSINESS.open(urllib.request.Request(url, data, headers or {}), timeout=DEADLINE) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def asked_over(connection: http.client.HTTPConnection, *request: str) -> tuple[int, str | None]:
    """The status of an answer, and the ``status`` in its JSON."""
    connection.request(*request)
    answer = connection.getresponse()
    return answer.status, json.load(answer).get("status")


def recorded(folder: Path) -> dict[str, RecordedRequest]:
    """All requests in the files of a folder by their ids, which must each occur once."""
    requests = [request for path in sorted(folder.glob("*.pkl")) for request in load_dump(path)["requests"]]
    by_id = {request.rid: request for request in requests}
    assert len(by_id) == len(requests)
    assert None not in by_id
    return by_id  # type: ignore[return-value]


# ---- real processes -------------------------------------------------------------------------------------------------


class Process:
    """A server in a separate process, which is ready."""

    def __init__(self, options: Sequence[str], log: Path, made_token: bool, **environment: str) -> None:
        self.log = log
        if "--token" not in options and "GRAFTLAB_ENGINE_TOKEN" not in environment and not made_token:
            options = ["--no-token", *options]
        with log.open("w") as stderr:
            self._process = warm.start(
                ["-m", "graftlab.engine.serve", "--port", "0", "--threads", "1", *options],
                {**os.environ, **environment},
                cwd=ROOT,
                stderr=stderr,
            )
        # One of them is ended by a signal that leaves a core.
        resource.prlimit(self._process.pid, resource.RLIMIT_CORE, (0, 0))
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert "ready at http://127.0.0.1:" in line, log.read_text()
        self.url = line.split()[-1]
        # Where it makes one, a second line tells it.
        self.token_line = self._process.stdout.readline() if made_token else ""

    def end(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, and wait for the end."""
        self._process.send_signal(number)
        return self._process.wait(DEADLINE)

    def kill(self) -> None:
        self._process.kill()
        self._process.communicate()


@contextmanager
def process(folder: Path, *options: str, made_token: bool = False, **environment: str) -> Iterator[Process]:
    server = Process(options, folder / "log", made_token, **environment)
    try:
        yield server
    finally:
        server.kill()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Process]:
    with process(tmp_path_factory.mktemp("server"), "--sliding-window", "6", "--seed", "3", "--request-ids") as server:
        yield server


def test_it_answers_as_the_engine_does(server: Process) -> None:
    engine = Engine(build_model("tiny", seed=3, sliding_window=6))
    bodies: list[dict[str, Any]] = [
        {"text": "naïve", "max_new_tokens": 7},
        {"input_ids": [1, 2, 3], "rid": "mine", "bootstrap_room": 5, "temperature": 0},
        {"text": "drawn", "temperature": 0.8, "seed": 11, "top_k": 20, "max_new_tokens": 20},
    ]
    for body, expected in zip(bodies, engine.generate(bodies), strict=True):
        status, response = ask(f"{server.url}/generate", body)
        assert (status, response["text"], response["output_ids"]) == (200, expected["text"], expected["output_ids"])
        assert response["meta_info"]["id"] == body.get("rid", response["meta_info"]["id"])
        assert response["meta_info"]["completion_tokens"] == body.get("max_new_tokens", 16)
    status, health = ask(f"{server.url}/health")
    assert (status, health["status"], health["running"], health["waiting"]) == (200, "ok", 0, 0)


def test_many_at_a_time_get_what_each_gets_alone(server: Process) -> None:
    bodies = [{"text": f"prompt {i}" * (1 + i % 5), "max_new_tokens": 1 + i, "seed": i} for i in range(24)]
    bodies = [{**body, "temperature": i % 2} for i, body in enumerate(bodies)]
    with ThreadPoolExecutor(len(bodies)) as pool:
        together = list(pool.map(lambda body: ask(f"{server.url}/generate", body), bodies))
    expected = Engine(build_model("tiny", seed=3, sliding_window=6)).generate(bodies)
    assert [response["output_ids"] for _, response in together] == [each["output_ids"] for each in expected]
    assert len({response["meta_info"]["id"] for _, response in together}) == len(bodies)


@pytest.mark.parametrize(
    ("body", "reason"),
    [
        (b"{", "the body is not JSON"),
        (b"\xff\xfe\xfd", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        ([], "must be a JSON object, and is a list"),
        ({}, "either text or input_ids"),
        ({"text": "x", "input_ids": [1]}, "either text or input_ids"),
        ({"text": 5}, "text must be a string"),
        ({"text": "x", "max_new_tokens": "9"}, "max_new_tokens must be an int"),
        ({"text": "x", "rid": 9}, "a request id is a string"),
        ({"text": "x", "stream": True}, "there is no field 'stream'"),
        ({"input_ids": [256]}, "not in the model's vocabulary of 256"),
        ({"text": "x" * 500}, "516 tokens, more than a request may have (512)"),
        (b'{"text": "x", "temperature": 1e400}', "temperature must be from 0"),
        ({"text": "\ud800"}, "cannot be written in UTF-8"),
    ],
)
def test_a_bad_request_gets_the_reason(server: Process, body: object, reason: str) -> None:
    status, answer = ask(f"{server.url}/generate", body)
    assert status == 400
    assert reason in answer["error"]


@given(st.sampled_from(["generate", "configure_logging", "health", ""]), bodies)
@examples(40)
def test_any_body_gets_json_and_leaves_the_server_running(server: Process, path: str, body: bytes) -> None:
    status, answer = ask(f"{server.url}/{path}", body)
    assert (status, list(answer)) in [(400, ["error"]), (404, ["error"]), (405, ["error"])] or status == 200
    assert ask(f"{server.url}/health")[1]["status"] == "ok"


def test_other_paths_methods_and_pages_get_json_too(server: Process) -> None:
    assert ask(f"{server.url}/")[0] == 404
    assert "/generate" in ask(f"{server.url}/")[1]["error"]
    assert ask(f"{server.url}/generate") == (405, {"error": "Method Not Allowed"})
    body = {"text": "x"}
    status, answer = ask(f"{server.url}/generate", body, {"Origin": "http://elsewhere.example"})
    assert (status, "browser" in answer["error"]) == (403, True)


def test_a_token_is_demanded_everywhere_and_is_in_no_file(tmp_path: Path) -> None:
    dumps = str(tmp_path / "dumps")
    with process(tmp_path, "--token", "s3cret", "--dump-requests-folder", dumps) as server:
        body = {"text": "x"}
        for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": "Basic s3cret"}):
            for path, sent in (("generate", body), ("configure_logging", {}), ("health", None), ("nowhere", None)):
                status, answer = ask(f"{server.url}/{path}", sent, headers)
                assert (status, "token" in answer["error"]) == (401, True)
        assert ask(f"{server.url}/generate", body, {"Authorization": "bearer s3cret"})[0] == 200
        assert server.end() == 0
        assert "s3cret" not in server.log.read_text()
    (path,) = Path(dumps).glob("*.pkl")
    assert b"s3cret" not in path.read_bytes()
    assert load_dump(path)["server_args"]["dump_requests_folder"] == dumps


def test_a_token_is_made_told_once_and_kept_where_only_the_user_reads_it(tmp_path: Path) -> None:
    with process(tmp_path, made_token=True, GRAFTLAB_HOME=str(tmp_path)) as server:
        assert ask(f"{server.url}/health")[0] == 401
        token = server.token_line.split()[-1]
        assert ask(f"{server.url}/health", headers={"Authorization": f"Bearer {token}"})[0] == 200
        path = tmp_path / f"engine-{server.url.rpartition(':')[2]}.token"
        assert path.read_text().strip() == token
        assert path.stat().st_mode & 0o777 == 0o600
        assert str(path) in server.token_line
        assert server.end() == 0
        assert token not in server.log.read_text()
        assert not path.exists()


def test_clients_choose_dump_folders_below_the_root_alone(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "root", tmp_path / "elsewhere"
    root.mkdir()
    (root / "link").symlink_to(tmp_path)
    with process(tmp_path, "--dump-root", str(root)) as server:
        for wanted in (elsewhere, root / ".." / "elsewhere", root / "link" / "elsewhere"):
            status, answer = ask(f"{server.url}/configure_logging", {"dump_requests_folder": str(wanted)})
            assert (status, answer["error"][:36]) == (400, "requests may be dumped below " + str(root)[:7])
        assert not elsewhere.exists()
        status, answer = ask(f"{server.url}/configure_logging", {"dump_requests_folder": str(root / "in")})
        assert (status, (root / "in").is_dir()) == (200, True)
        assert ask(f"{server.url}/configure_logging", {"dump_requests_folder": ""})[0] == 200


def test_clients_beyond_the_descriptors_are_hung_up_on_and_the_others_served(tmp_path: Path) -> None:
    with process(tmp_path) as server:
        pid = server._process.pid
        taken = len(os.listdir(f"/proc/{pid}/fd"))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (taken + 8, taken + 8))
        address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
        clients = [socket.create_connection(address) for _ in range(50)]

        def hung_up(client: socket.socket) -> bool:
            client.setblocking(False)
            try:
                return client.recv(1) == b""
            except BlockingIOError:
                return False
            except ConnectionResetError:
                return True

        wait_until(lambda: sum(map(hung_up, clients)) >= 40, "the end of those that are too many")
        for client in clients:
            client.close()
        wait_until(lambda: len(os.listdir(f"/proc/{pid}/fd")) <= taken + 1, "the end of the others")
        assert ask(f"{server.url}/health")[0] == 200
        assert server.log.read_text().count("too many connections") == 1
        assert "Traceback" not in server.log.read_text()


def test_fifty_requests_are_recorded_while_the_settings_change(tmp_path: Path) -> None:
    dumps, more = tmp_path / "dumps", tmp_path / "more"
    options = ("--dump-requests-folder", str(dumps), "--dump-requests-threshold", "7", "--dump-root", str(tmp_path))
    with process(tmp_path, *options, GRAFTLAB_ENGINE_TOKEN="t") as server:
        headers = {"Authorization": "Bearer t"}

        def send(i: int) -> Any:
            return ask(f"{server.url}/generate", {"rid": f"r{i}", "text": f"prompt {i}", "max_new_tokens": 4}, headers)

        def change(*options: str) -> int:
            return configure_logging.main(["--url", server.url, "--token", "t", *options])

        with ThreadPoolExecutor(4) as pool:
            before = list(pool.map(send, range(20)))
            assert change("--dump-requests-exclude-meta-keys", "queue_seconds,total_seconds") == 0
            between = list(pool.map(send, range(20, 40)))
            assert change("--dump-requests-folder", str(more), "--dump-requests-exclude-meta-keys", "") == 0
            assert change("--log-requests", "--log-requests-level", "2", "--dump-requests-threshold", "2") == 0
            after = list(pool.map(send, range(40, 50)))
        status, answer = ask(f"{server.url}/configure_logging", {"dump_requests_threshold": "many"}, headers)
        assert (status, "dump_requests_threshold" in answer["error"]) == (400, True)
        assert server.end() == 0
        log = server.log.read_text()
    files = {**recorded(dumps), **recorded(more)}
    for i, (status, response) in enumerate(before + between + after):
        assert status == 200
        request = files.pop(f"r{i}")
        assert request.request["text"] == f"prompt {i}"
        assert request.response["output_ids"] == response["output_ids"]
        hidden = {"queue_seconds", "total_seconds"} if 20 <= i < 40 else set()
        assert response["meta_info"].keys() - request.response["meta_info"].keys() == hidden
    assert files == {}
    assert len(list(more.glob("*.pkl"))) >= 5
    assert "r39" not in log
    assert "prompt 45" in log


def test_a_shutdown_is_quick_answers_every_request_and_loses_none(tmp_path: Path) -> None:
    dumps = tmp_path / "dumps"
    # Seconds of work, with no time given to it.
    options = ("--model", "small", "--drain-seconds", "0", "--dump-requests-folder", str(dumps))
    with process(tmp_path, *options) as server, ThreadPoolExecutor(4) as pool:
        body = {"text": "x", "max_new_tokens": 2000}
        answers = [pool.submit(ask, f"{server.url}/generate", {**body, "rid": f"r{i}"}) for i in range(4)]
        wait_until(
            lambda: sum(ask(f"{server.url}/health")[1][key] for key in ("running", "waiting")) == 4, "4 requests"
        )
        assert server.end() == 0
        for answer, request in zip(answers, sorted(recorded(dumps).items()), strict=True):
            status, response = answer.result(DEADLINE)
            assert (status, response["meta_info"]["finish_reason"]) == (200, "abort")
            assert (response["meta_info"]["id"], response["output_ids"]) == (
                request[0],
                request[1].response["output_ids"],
            )


def test_a_crash_leaves_what_was_finished_and_what_was_not(tmp_path: Path) -> None:
    crashes = tmp_path / "crashes"
    with (
        process(tmp_path, "--model", "small", "--crash-dump-folder", str(crashes)) as server,
        ThreadPoolExecutor(1) as pool,
    ):
        assert ask(f"{server.url}/generate", {"text": "x", "rid": "finished"})[0] == 200
        cut = pool.submit(ask, f"{server.url}/generate", {"text": "x", "rid": "cut", "max_new_tokens": 2000})
        wait_until(lambda: ask(f"{server.url}/health")[1]["running"], "the request that is cut")
        assert server.end(signal.SIGQUIT) == -signal.SIGQUIT
        with pytest.raises((OSError, ValueError)):
            cut.result(DEADLINE)
    requests = recorded(crashes)
    assert requests.keys() == {"finished", "cut"}
    assert requests["finished"].response["meta_info"]["finish_reason"] == "length"
    assert requests["cut"].response is None
    assert requests["cut"].request["max_new_tokens"] == 2000


def test_a_server_that_cannot_start_says_why_in_one_line() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        for options, reason in (
            (["--port", str(taken.getsockname()[1])], "Address already in use"),
            (["--port", "0", "--device", "nonsense"], "nonsense"),
        ):
            failed = warm.start(["-m", "graftlab.engine.serve", *options], os.environ, cwd=ROOT)
            out, err = failed.communicate(timeout=DEADLINE)
            assert failed.returncode == 1
            assert out == ""
            assert reason in err
            assert "Traceback" not in err


# ---- a server in this process, whose forwards wait ------------------------------------------------------------------


class Gate:
    """Lets forwards through one by one, or fails the next."""

    def __init__(self) -> None:
        self.permits, self.waiting = threading.Semaphore(0), threading.Event()
        self.failure: Exception | None = None

    def runner(self, model: Any, cache: Any) -> Gated:
        return Gated(model, cache, self)


class Gated(EagerRunner):
    def __init__(self, model: Any, cache: Any, gate: Gate) -> None:
        super().__init__(model, cache)
        self.gate = gate

    def forward(self, batch: Any) -> torch.Tensor:
        self.gate.waiting.set()
        assert self.gate.permits.acquire(timeout=DEADLINE)
        failure, self.gate.failure = self.gate.failure, None
        if failure is not None:
            raise failure
        return super().forward(batch)


class Local:
    """A server on a thread of this process."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.gate, self.folder = Gate(), folder
        self.dumper = RequestDumper(folder)
        ready = threading.Event()

        async def serve() -> None:
            self.loop, self.closing, self.hurry = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
            engine = Engine(build_model("tiny"), runner=self.gate.runner)
            self.server = Server(engine, RequestLogging(self.dumper), **options)
            self.url = f"http://127.0.0.1:{self.server.listen('127.0.0.1', 0)}"
            ready.set()
            await self.closing.wait()
            await self.server.close(DEADLINE, self.hurry)
            self.dumper.close()

        self.thread = threading.Thread(target=asyncio.run, args=(serve(),))
        self.thread.start()
        assert ready.wait(DEADLINE)

    def on_loop(self, call: Callable[[], object]) -> None:
        self.loop.call_soon_threadsafe(call)

    def end(self) -> None:
        if self.thread.is_alive():
            self.gate.permits.release(10_000)
            self.on_loop(self.closing.set)
            self.thread.join(DEADLINE)
        assert not self.thread.is_alive()


@pytest.fixture
def local(tmp_path: Path) -> Iterator[Callable[..., Local]]:
    servers: list[Local] = []

    def start(**options: Any) -> Local:
        servers.append(Local(tmp_path / "dumps", **options))
        return servers[-1]

    yield start
    for server in servers:
        server.end()


def test_a_half_sent_request_is_closed(local: Callable[..., Local]) -> None:
    server = local(half_sent_seconds=0.5)
    address = ("127.0.0.1", int(server.url.rpartition(":")[2]))
    head = b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n"
    for sent in (b"", b"POST /gen", head + b"{"):
        with socket.create_connection(address, timeout=DEADLINE) as client:
            client.sendall(sent)
            while client.recv(1000):  # raises TimeoutError where no end hangs up
                pass
    assert ask(f"{server.url}/health")[0] == 200


def test_an_id_may_be_used_again_only_once_its_request_is_over(local: Callable[..., Local]) -> None:
    server, body = local(), {"text": "x", "rid": "same", "max_new_tokens": 1}
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, f"{server.url}/generate", body)
        assert server.gate.waiting.wait(DEADLINE)
        status, answer = ask(f"{server.url}/generate", body)
        assert (status, "'same' is not over yet" in answer["error"]) == (409, True)
        server.gate.permits.release(2)
        assert first.result(DEADLINE)[0] == 200
    assert ask(f"{server.url}/generate", body)[0] == 200
    # What was refused is neither kept nor recorded.
    assert server.server._begun == {}
    server.end()
    (path,) = server.folder.glob("*.pkl")
    assert [request.response["meta_info"]["id"] for request in load_dump(path)["requests"]] == ["same", "same"]


def test_a_client_that_leaves_ends_its_request_and_no_other(
    local: Callable[..., Local], caplog: pytest.LogCaptureFixture
) -> None:
    server = local()
    leaving = json.dumps({"text": "x", "rid": "leaving", "max_new_tokens": 500}).encode()
    with (
        ThreadPoolExecutor(1) as pool,
        socket.create_connection(("127.0.0.1", int(server.url.split(":")[2]))) as client,
    ):
        client.sendall(b"POST /generate HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (len(leaving), leaving))
        assert server.gate.waiting.wait(DEADLINE)
        staying = pool.submit(ask, f"{server.url}/generate", {"text": "y", "rid": "staying", "max_new_tokens": 500})
        wait_until(lambda: server.server.engine.live == 2, "the second request")
        client.close()

        def one_left() -> bool:
            server.gate.permits.release()
            return server.server.engine.live == 1

        wait_until(one_left, "the end of what nobody waits for")
        server.gate.permits.release(1000)
        assert staying.result(DEADLINE)[1]["meta_info"]["completion_tokens"] == 500
    server.end()
    response = recorded(server.folder)["leaving"].response
    assert response["meta_info"]["finish_reason"] == "abort"
    assert len(response["output_ids"]) < 500
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []


def test_a_failing_step_ends_its_requests_and_the_server_continues(local: Callable[..., Local]) -> None:
    server = local()
    server.gate.permits.release(100)
    server.gate.failure = ArithmeticError("an overflow somewhere")
    status, response = ask(f"{server.url}/generate", {"text": "x", "rid": "failed"})
    assert (status, response["meta_info"]["finish_reason"]) == (500, "error")
    assert response["meta_info"]["error"] == "ArithmeticError: an overflow somewhere"
    assert ask(f"{server.url}/generate", {"text": "x", "rid": "failed"})[0] == 200
    assert ask(f"{server.url}/health")[1]["free_tokens"] == 4096


def test_too_many_requests_are_sent_away(local: Callable[..., Local]) -> None:
    server = local(max_live=1)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ask, f"{server.url}/generate", {"text": "x", "max_new_tokens": 1})
        assert server.gate.waiting.wait(DEADLINE)
        status, answer = ask(f"{server.url}/generate", {"text": "y"})
        assert (status, "too many" in answer["error"]) == (503, True)
        server.gate.permits.release()
        assert first.result(DEADLINE)[0] == 200


def test_a_stopping_server_first_serves_the_waiting_requests(local: Callable[..., Local]) -> None:
    server = local()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(ask, f"{server.url}/generate", {"text": "x", "rid": "last", "max_new_tokens": 5})
        assert server.gate.waiting.wait(DEADLINE)
        kept = http.client.HTTPConnection(server.url.removeprefix("http://"))
        assert asked_over(kept, "GET", "/health") == (200, "ok")
        server.on_loop(server.closing.set)
        wait_until(lambda: server.server.draining, "the beginning of the end")
        with pytest.raises(urllib.error.URLError):
            ask(f"{server.url}/generate", {"text": "y"})
        # Who was connected before is heard, and sent away.
        assert asked_over(kept, "GET", "/health") == (503, "draining")
        assert asked_over(kept, "POST", "/generate", '{"text": "y"}')[0] == 503
        kept.close()
        server.gate.permits.release(5)
        status, response = last.result(DEADLINE)
    server.thread.join(DEADLINE)
    assert (status, response["meta_info"]["finish_reason"]) == (200, "length")
    assert recorded(server.folder)["last"].response["output_ids"] == response["output_ids"]


def test_a_second_signal_ends_the_waiting(local: Callable[..., Local]) -> None:
    server = local()
    with ThreadPoolExecutor(1) as pool:
        last = pool.submit(ask, f"{server.url}/generate", {"text": "x", "rid": "last", "max_new_tokens": 500})
        assert server.gate.waiting.wait(DEADLINE)
        server.on_loop(server.closing.set)
        server.on_loop(server.hurry.set)

        def answered() -> bool:
            server.gate.permits.release()
            return last.done()

        wait_until(answered, "the end of a request that nobody waits for")
        status, response = last.result()
    server.thread.join(DEADLINE)
    assert (status, response["meta_info"]["finish_reason"]) == (200, "abort")
    assert recorded(server.folder)["last"].response["output_ids"] == response["output_ids"]


def test_a_slow_disk_delays_no_other_request_while_logging_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    answered: list[Any] = []

    async def answer(*given: Any) -> None:
        answered.append(given)

    monkeypatch.setattr(engine_server, "configure", lambda logging, body: (logging, body, threading.get_ident()))
    own: Any = SimpleNamespace(server=SimpleNamespace(requests="log"), request=SimpleNamespace(body=b"{}"))
    own.answer = answer
    # In another thread, since tests in a browser leave an event loop in this one.
    with ThreadPoolExecutor(1) as executor:
        executor.submit(asyncio.run, ConfigureLogging.post(own)).result()
        looping = executor.submit(threading.get_ident).result()
    ((logging_, body, thread),) = answered
    assert (logging_, body) == ("log", b"{}")
    assert thread != looping
