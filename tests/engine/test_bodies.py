"""Whatever body a client sends is a request, a change of settings, or an error that says why it is neither."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given
from kit.bodies import bodies
from kit.examples import examples
from kit.limits import limited

from graftlab.engine.engine import ByteTokenizer
from graftlab.engine.server import _json_object
from graftlab.errors import RequestError
from graftlab.requests import RequestDumper, RequestLogging, configure
from graftlab.requests.served import Request


@given(bodies)
@examples(150)
def test_a_body_is_a_request_or_an_error_that_says_why_not(body: bytes) -> None:
    try:
        with limited():
            request = Request.from_dict(_json_object(body), ByteTokenizer())
    except RequestError as error:
        told = str(error)
    else:
        given_again = json.loads(json.dumps(request.as_dict()))
        assert Request.from_dict(given_again, ByteTokenizer()) == request
        return
    assert 0 < len(told.encode()) < 2_000


@given(body=bodies)
@examples(150, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_body_changes_the_settings_to_what_it_says_or_changes_nothing(
    tmp_path: Path, body: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "root"
    root.mkdir(exist_ok=True)
    monkeypatch.chdir(tmp_path)
    requests = RequestLogging(RequestDumper(None), root=root)
    before = configure(requests, "{}")
    status, answer = configure(requests, body)
    json.dumps(answer)
    if status == 200:
        assert answer == configure(requests, "{}")[1]
        given = {name: value for name, value in json.loads(body).items() if value is not None}
        assert {name: value for name, value in answer.items() if name in given} == {
            name: tuple(value) if isinstance(value, list) else value for name, value in given.items()
        }
    else:
        assert (status, list(answer)) == (400, ["error"])
        assert configure(requests, "{}") == before
    assert sorted(tmp_path.iterdir()) == [root]
