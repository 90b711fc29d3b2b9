"""Settings of recording and logging, changed while a server runs: by a function, and by a command that posts to it."""

from __future__ import annotations

import json
import logging
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from graftlab.requests import RequestDumper, RequestLogging, configure, load_dump
from graftlab.requests.configure_logging import TOKEN_VARIABLE, _parser, main


@pytest.fixture
def recording(tmp_path: Path) -> Iterator[RequestLogging]:
    dumper = RequestDumper(tmp_path / "dumps", threshold=100)
    yield RequestLogging(dumper)
    dumper.close()


@dataclass
class Server:
    """A server that mounts the function, or answers as a test wants it to."""

    url: str
    posts: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    answer: Callable[[bytes], tuple[int, Any]] = lambda body: (200, {})
    headers: dict[str, str] = field(default_factory=dict)

    def bodies(self) -> list[Any]:
        return [json.loads(body) for _, _, body in self.posts]


@pytest.fixture
def server(recording: RequestLogging) -> Iterator[Server]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            found.posts.append((self.path, dict(self.headers), body))
            status, answer = found.answer(body)
            data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            for name, value in found.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            found.posts.append((self.path, {}, b"GET"))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *args: Any) -> None:
            """The test's output is no place for it."""

    httpd = HTTPServer(("127.0.0.1", 0), Handler)
    found = Server(f"http://127.0.0.1:{httpd.server_port}", answer=lambda body: configure(recording, body))
    thread = threading.Thread(target=httpd.serve_forever, args=(0.01,))
    thread.start()
    yield found
    httpd.shutdown()
    thread.join()
    httpd.server_close()


# ---- the receiving function -----------------------------------------------------------------------------------------


def test_what_is_given_changes_and_what_is_not_stays(recording: RequestLogging, tmp_path: Path) -> None:
    before = recording.settings
    assert configure(recording, b"{}") == (200, before.__dict__)
    status, answer = configure(recording, b'{"dump_requests_threshold": 7}')
    assert (status, answer["dump_requests_threshold"]) == (200, 7)
    assert recording.dumper.settings.threshold == 7
    assert answer == {**before.__dict__, "dump_requests_threshold": 7}
    new = {
        "log_requests": True,
        "log_requests_level": 2,
        "dump_requests_folder": str(tmp_path / "elsewhere"),
        "dump_requests_threshold": 3,
        "dump_requests_exclude_meta_keys": ["a", "b"],
    }
    for body in (json.dumps(new), json.dumps(new).encode(), new):
        status, answer = configure(recording, body)
        assert (status, json.loads(json.dumps(answer))) == (200, new)
    assert (tmp_path / "elsewhere").is_dir()


def test_a_folder_that_has_vanished_is_not_made_again_in_passing(recording: RequestLogging, tmp_path: Path) -> None:
    (tmp_path / "dumps").rmdir()
    assert configure(recording, {"dump_requests_threshold": 5})[0] == 200
    assert not (tmp_path / "dumps").exists()


def test_a_link_does_not_lead_out_of_the_servers_folder(recording: RequestLogging, tmp_path: Path) -> None:
    recording.root = tmp_path / "dumps"
    (tmp_path / "dumps" / "link").symlink_to(tmp_path)
    status, answer = configure(recording, {"dump_requests_folder": str(tmp_path / "dumps" / "link" / "mine")})
    assert (status, (tmp_path / "mine").exists()) == (400, False)
    assert f"below {recording.root} on this server" in answer["error"]


def test_excluded_keys_change_while_requests_are_recorded(recording: RequestLogging, tmp_path: Path) -> None:
    response = {"meta_info": {"hidden_states": 1, "b": 2, "c": 3}}
    for keys in (None, [], ["b", "c"]):
        if keys is not None:
            configure(recording, {"dump_requests_exclude_meta_keys": keys})
        assert recording.finished({"rid": "a"}, response, 1.0, 2.0)
    assert recording.dumper.flush()
    (path,) = (tmp_path / "dumps").iterdir()
    found = [record.response["meta_info"] for record in load_dump(path)["requests"]]
    assert found == [{"b": 2, "c": 3}, {"hidden_states": 1, "b": 2, "c": 3}, {"hidden_states": 1}]


def test_an_empty_folder_ends_dumping_and_another_begins_it_again(recording: RequestLogging, tmp_path: Path) -> None:
    status, answer = configure(recording, {"dump_requests_folder": ""})
    assert (status, answer["dump_requests_folder"]) == (200, "")
    assert not recording.finished({"rid": "a"}, None, 1.0, 2.0)
    assert configure(recording, {"dump_requests_folder": str(tmp_path / "new")})[0] == 200
    assert recording.finished({"rid": "b"}, None, 1.0, 2.0)
    assert recording.dumper.flush()
    (path,) = (tmp_path / "new").iterdir()
    assert [record.rid for record in load_dump(path)["requests"]] == ["b"]


BAD: list[tuple[Any, str]] = [
    ({"dump_request_threshold": 5}, "dump_request_threshold"),
    ({"crash_window": 1}, "crash_window"),
    ({"dump_requests_threshold": 0}, "dump_requests_threshold.*at least 1.*0"),
    ({"dump_requests_threshold": -1}, "at least 1"),
    ({"dump_requests_threshold": True}, "at least 1.*True"),
    ({"dump_requests_threshold": 5.0}, "at least 1"),
    ({"dump_requests_threshold": "5"}, "at least 1"),
    ({"log_requests": 1}, "log_requests is true or false"),
    ({"log_requests": "true"}, "true or false"),
    ({"log_requests_level": 4}, "from 0 to 3"),
    ({"log_requests_level": -1}, "from 0 to 3"),
    ({"log_requests_level": False}, "from 0 to 3"),
    ({"dump_requests_folder": 5}, "path of a folder"),
    ({"dump_requests_folder": "a\0b"}, "path of a folder"),
    ({"dump_requests_folder": "/dev/null/x"}, "cannot be made"),
    ({"dump_requests_exclude_meta_keys": "a,b"}, "list of names"),
    ({"dump_requests_exclude_meta_keys": ["a", 1]}, "list of names"),
    ([], "JSON object"),
    ("null", "JSON object"),
    (b"", "not JSON"),
    (b"{", "not JSON"),
    (b"\xff\xfe{", "not JSON"),
    (b"[" * 100_000, "not JSON"),
    (b'{"log_requests": true, "log_requests": false}', "twice"),
]


@pytest.mark.parametrize("index", range(len(BAD)))
def test_an_unknown_or_wrong_setting_gets_400_with_the_reason(
    recording: RequestLogging, tmp_path: Path, index: int
) -> None:
    body, text = BAD[index]
    right = {"log_requests": True, "dump_requests_threshold": 9, "dump_requests_folder": str(tmp_path / "never")}
    before = recording.settings
    # A wrong value spoils the right ones beside it, whichever comes first.
    bodies = [body]
    if isinstance(body, dict):
        rest = {name: value for name, value in right.items() if name not in body}
        bodies = [{**rest, **body}, {**body, **rest}, json.dumps({**rest, **body})]
    for given in bodies:
        status, answer = configure(recording, given)
        assert status == 400
        assert list(answer) == ["error"]
        assert re.search(text, answer["error"]), answer
        assert recording.settings == before
    assert recording.dumper.settings.threshold == 100
    assert not (tmp_path / "never").exists()


# ---- what the log tells ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("level", "told", "untold"),
    [
        (0, ["'a'", "took 1.500 s"], ["cached", "prompt", "answer"]),
        (1, ["'a'", "cached"], ["prompt", "answer"]),
        (2, ["'a'", "cached", "prompt", "answer"], ["the end of it"]),
        (3, ["'a'", "cached", "prompt", "answer", "the end of it"], []),
    ],
)
def test_the_log_tells_of_a_request_what_the_level_says(
    recording: RequestLogging, caplog: pytest.LogCaptureFixture, level: int, told: list[str], untold: list[str]
) -> None:
    caplog.set_level(logging.INFO)
    response = {"text": "answer" + "x" * 5000 + "the end of it", "meta_info": {"cached": 3}}
    request = {"rid": "a", "text": "prompt"}
    recording.finished(request, response, 1.0, 2.5)
    assert caplog.text == ""
    configure(recording, {"log_requests": True, "log_requests_level": level})
    recording.finished(request, response, 1.0, 2.5)
    assert all(word in caplog.text for word in told)
    assert not any(word in caplog.text for word in untold)


def test_logging_never_raises_into_the_server(recording: RequestLogging, caplog: pytest.LogCaptureFixture) -> None:
    class Silent:
        def __repr__(self) -> str:
            raise ValueError("no repr")

    configure(recording, {"log_requests": True, "log_requests_level": 3})
    assert recording.finished({"rid": "a"}, Silent(), 1.0, 2.0)
    assert recording.finished({"rid": "a"}, None, "yesterday", None)  # type: ignore[arg-type]
    assert "was not logged" in caplog.text


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "body"),
    [
        ([], {}),
        (["--dump-requests-folder", "/tmp/x y"], {"dump_requests_folder": "/tmp/x y"}),
        (["--dump-requests-folder", ""], {"dump_requests_folder": ""}),
        (["--dump-requests-threshold", "5"], {"dump_requests_threshold": 5}),
        (["--dump-requests-exclude-meta-keys", "a,b"], {"dump_requests_exclude_meta_keys": ["a", "b"]}),
        (["--dump-requests-exclude-meta-keys", " a , b "], {"dump_requests_exclude_meta_keys": ["a", "b"]}),
        (["--dump-requests-exclude-meta-keys", ""], {"dump_requests_exclude_meta_keys": []}),
        (["--dump-requests-exclude-meta-keys="], {"dump_requests_exclude_meta_keys": []}),
        (["--log-requests"], {"log_requests": True}),
        (["--no-log-requests"], {"log_requests": False}),
        (["--log-requests-level", "0"], {"log_requests_level": 0}),
        (
            ["--log-requests", "--log-requests-level", "3", "--dump-requests-threshold", "1"],
            {"log_requests": True, "log_requests_level": 3, "dump_requests_threshold": 1},
        ),
    ],
)
def test_only_what_was_given_is_posted(
    server: Server, arguments: list[str], body: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda body: (200, {"settings": "now"})
    assert main(["--url", f"{server.url}/", *arguments]) == 0
    ((path, headers, _),) = server.posts
    assert path == "/configure_logging"
    assert headers["Content-Type"] == "application/json"
    assert "Authorization" not in headers
    assert server.bodies() == [body]
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"settings": "now"}
    assert captured.err == ""


@pytest.mark.ranks
def test_the_command_changes_a_running_server_from_another_process(
    server: Server, recording: RequestLogging, tmp_path: Path
) -> None:
    recording.finished({"rid": "before"}, {"meta_info": {"hidden_states": 1}}, 1.0, time.time())
    arguments = ["--dump-requests-exclude-meta-keys", "", "--dump-requests-folder", str(tmp_path / "b")]
    done = subprocess.run(
        [sys.executable, "-m", "graftlab.requests.configure_logging", "--url", server.url, *arguments],
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout) == json.loads(json.dumps(recording.settings.__dict__))
    assert recording.settings.dump_requests_exclude_meta_keys == ()
    recording.finished({"rid": "after"}, {"meta_info": {"hidden_states": 1}}, 1.0, time.time())
    assert recording.dumper.flush()
    (path,) = (tmp_path / "b").iterdir()
    found = {record.rid: record.response["meta_info"] for record in load_dump(path)["requests"]}
    assert found == {"before": {}, "after": {"hidden_states": 1}}


def test_a_url_may_end_in_a_slash(server: Server) -> None:
    assert main(["--url", f"{server.url}/below/", "--log-requests"]) == 0
    assert [path for path, _, _ in server.posts] == ["/below/configure_logging"]


def test_a_token_goes_along_where_it_was_given(server: Server) -> None:
    assert main(["--url", server.url, "--token", "secret"]) == 0
    assert server.posts[0][1]["Authorization"] == "Bearer secret"


def test_the_environments_proxy_is_not_asked(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    assert main(["--url", server.url, "--log-requests"]) == 0


def test_the_servers_token_comes_from_the_environment_unless_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "from the environment")
    assert _parser().parse_args([]).token == "from the environment"
    assert _parser().parse_args(["--token", "given"]).token == "given"
    monkeypatch.delenv(TOKEN_VARIABLE)
    assert _parser().parse_args([]).token is None


def test_an_argument_is_written_whole(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        _parser().parse_args(["--dump-requests-f", "/tmp"])
    assert "--dump-requests-f" in one_line(capsys)


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.endswith("\n")
    assert captured.err.count("\n") == 1
    return captured.err


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--dump-requests-threshold", "0"], "--dump-requests-threshold.*at least 1.*'0'"),
        (["--dump-requests-threshold", "-3"], "threshold"),
        (["--dump-requests-threshold", "many"], "'many'"),
        (["--dump-requests-threshold", "1.5"], "'1.5'"),
        (["--log-requests-level", "4"], "from 0 to 3"),
        (["--log-requests-level", "x"], "from 0 to 3"),
        (["--log-request"], "--log-request"),
        (["--unknown", "5"], "--unknown"),
        (["extra"], "extra"),
    ],
)
def test_a_bad_value_is_one_line_and_nothing_is_posted(
    server: Server, arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--url", server.url, *arguments])
    assert caught.value.code == 2
    assert re.search(text, one_line(capsys))
    assert server.posts == []


@pytest.mark.parametrize(
    "url", ["", "localhost:80", "file:///etc/passwd", "http://", "http://h:port", "http://h?q=1", "ftp://h"]
)
def test_a_url_that_is_no_servers_is_one_line(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["--url", url, "--log-requests"])
    assert caught.value.code == 2
    assert "--url" in one_line(capsys)


def test_without_a_url_it_is_the_servers_own_default(monkeypatch: pytest.MonkeyPatch) -> None:
    from graftlab.engine.serve import _parser

    asked: list[str] = []
    monkeypatch.setattr("graftlab.requests.configure_logging.post", lambda url, *_: asked.append(url) or "{}")
    assert main(["--log-requests"]) == 0
    served = _parser().parse_args([])
    assert asked == [f"http://{served.host}:{served.port}/configure_logging"]


@pytest.mark.parametrize(
    ("text", "names"), [("a,b", ["a", "b"]), (" a , ,b,", ["a", "b"]), (",", []), ("", []), ("a,,b", ["a", "b"])]
)
def test_blanks_in_lists_are_dropped(text: str, names: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(
        "graftlab.requests.configure_logging.post", lambda _, changes, *__: sent.append(changes) or "{}"
    )
    assert main(["--dump-requests-exclude-meta-keys", text]) == 0
    assert sent == [{"dump_requests_exclude_meta_keys": names}]


def test_the_help_says_that_a_missing_level_stays(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "3 complete ones; unchanged unless given" in text
    assert "http://127.0.0.1:30000 unless given" in text


def test_null_means_unchanged(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, threshold=7, exclude_meta_keys=("a",))
    requests = RequestLogging(dumper, log_requests=True, log_requests_level=2)
    before = requests.settings
    names = [field.name for field in fields(before)]
    assert configure(requests, json.dumps(dict.fromkeys(names)))[0] == 200
    assert requests.settings == before
    status, _ = configure(requests, {**dict.fromkeys(names), "log_requests_level": 1})
    assert (status, requests.settings) == (200, replace(before, log_requests_level=1))
    dumper.close()


def test_an_unreachable_server_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))  # and does not listen
        url = f"http://127.0.0.1:{bound.getsockname()[1]}"
        assert main(["--url", url, "--log-requests"]) == 1
    line = one_line(capsys)
    assert url in line
    assert "cannot be reached" in line
    assert main(["--url", "http://name.invalid", "--log-requests"]) == 1
    assert "name.invalid" in one_line(capsys)


def test_a_server_that_speaks_no_http_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def babble() -> None:
            connection, _ = listening.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(b"220 mail\r\nready\r\n\r\n")

        thread = threading.Thread(target=babble)
        thread.start()
        assert main(["--url", f"http://127.0.0.1:{listening.getsockname()[1]}", "--log-requests"]) == 1
        thread.join()
    assert "cannot be reached" in one_line(capsys)


def test_a_refusal_is_one_line_with_the_servers_reason(
    server: Server, recording: RequestLogging, capsys: pytest.CaptureFixture[str]
) -> None:
    before = recording.settings
    assert main(["--url", server.url, "--log-requests", "--dump-requests-folder", "/dev/null/x"]) == 1
    line = one_line(capsys)
    assert "400" in line
    assert "/dev/null/x" in line
    assert recording.settings == before


@pytest.mark.parametrize(
    ("status", "answer", "text"),
    [
        (401, {"error": "no\ntoken"}, "401 Unauthorized: no token"),
        (404, b"", "404 Not Found: no reason given"),
        (500, b"<html>\n<p>broken</p></html>", "500.*broken"),
        (503, b"\xff\xfe", "503"),
        (302, b"", "302"),
        (307, b"", "307"),
    ],
)
def test_any_refusal_is_one_line(
    server: Server, status: int, answer: Any, text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = lambda body: (status, answer)
    server.headers = {"Location": f"{server.url}/elsewhere"} if status in (302, 307) else {}
    assert main(["--url", server.url, "--log-requests"]) == 1
    assert re.search(text, one_line(capsys))
    assert len(server.posts) == 1
