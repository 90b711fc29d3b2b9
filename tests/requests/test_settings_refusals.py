"""What the settings of recorded requests refuse: all of what is said, with what was given."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from kit.refusals import ids, refusal

from graftlab.requests import RequestDumper, RequestLogging, configure


def answered(body: Any) -> Any:
    code, said = configure(RequestLogging(RequestDumper(None), root=Path("/dumps")), body)
    assert code == 400
    raise ValueError(said["error"])


REFUSED: list[tuple[Callable[[], Any], str]] = [
    (
        lambda: answered("{"),
        "the body is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    (
        lambda: answered("[1, 2]"),
        "the body is a JSON object of settings, not [1, 2]",
    ),
    (
        lambda: answered({"log_request": True}),
        "there is no setting 'log_request'; the settings are log_requests, log_requests_level, "
        "dump_requests_folder, dump_requests_threshold, dump_requests_exclude_meta_keys",
    ),
    (
        lambda: answered('{"log_requests": true, "log_requests": false}'),
        "a name occurs twice in ['log_requests', 'log_requests']",
    ),
    (
        lambda: answered({"log_requests": 1}),
        "log_requests is true or false, not 1",
    ),
    (
        lambda: answered({"log_requests_level": 4}),
        "log_requests_level is a whole number from 0 to 3, not 4",
    ),
    (
        lambda: answered({"log_requests_level": True}),
        "log_requests_level is a whole number from 0 to 3, not True",
    ),
    (
        lambda: answered({"dump_requests_threshold": 0}),
        "dump_requests_threshold is a whole number of at least 1, not 0",
    ),
    (
        lambda: answered({"dump_requests_folder": 3}),
        "dump_requests_folder is the path of a folder, not 3",
    ),
    (
        lambda: answered({"dump_requests_exclude_meta_keys": "a"}),
        "dump_requests_exclude_meta_keys is a list of names, not 'a'",
    ),
    (
        lambda: answered({"dump_requests_folder": "/elsewhere"}),
        "requests may be dumped below /dumps on this server, not into /elsewhere",
    ),
]


@pytest.mark.parametrize(("call", "said"), REFUSED, ids=ids(REFUSED))
def test_a_setting_that_cannot_be_is_named_with_what_it_takes(call: Callable[[], Any], said: str) -> None:
    assert refusal(call) == said
