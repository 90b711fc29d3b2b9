"""What the kit's own engine is asked: plain values that are checked, named in errors, and written back as given."""

from __future__ import annotations

from typing import Any

import pytest
from kit.refusals import exactly
from kit.values import assert_values

import graftlab.requests
from graftlab.errors import RequestError
from graftlab.requests import DumpSettings, LoggingSettings
from graftlab.requests.served import FinishedRequest, Request

MOST = 2**63 - 1


class Letters:
    def encode(self, text: str) -> list[int]:
        return list(text.encode())


def request(**fields: Any) -> Request:
    return Request(**{"rid": "r", "input_ids": (1,), **fields})


@pytest.mark.parametrize(
    ("field", "good"),
    [
        ("input_ids", [0, MOST]),
        ("stop_token_ids", [0]),
        ("max_new_tokens", 1),
        ("max_new_tokens", MOST),
        ("seed", 0),
        ("seed", MOST),
        ("top_k", 1),
        ("top_k", None),
        ("bootstrap_room", -MOST - 1),
        ("bootstrap_room", MOST),
        ("bootstrap_room", None),
        ("temperature", 0),
        ("temperature", 1e6),
    ],
)
def test_the_least_and_the_largest_values_are_taken(field: str, good: Any) -> None:
    given = getattr(request(**{field: good}), field)
    assert given == (tuple(good) if isinstance(good, list) else good)


@pytest.mark.parametrize(
    ("field", "bad", "said"),
    [
        ("input_ids", (), "the prompt is empty; give at least one token"),
        ("input_ids", "ab", "input_ids must be a list of token ids, got 'ab'"),
        ("input_ids", [5, -1], f"input_ids[1] must be from 0 to {MOST}, got -1"),
        ("input_ids", [True], "input_ids[0] must be an int, got True"),
        ("stop_token_ids", [1.0], "stop_token_ids[0] must be an int, got 1.0"),
        ("max_new_tokens", 0, f"max_new_tokens must be from 1 to {MOST}, got 0"),
        ("max_new_tokens", MOST + 1, f"max_new_tokens must be from 1 to {MOST}, got {MOST + 1}"),
        ("seed", -1, f"seed must be from 0 to {MOST}, got -1"),
        ("top_k", 0, f"top_k must be from 1 to {MOST}, got 0"),
        ("bootstrap_room", -MOST - 2, f"bootstrap_room must be from {-MOST - 1} to {MOST}, got {-MOST - 2}"),
        ("temperature", -0.1, "temperature must be from 0 to 1e+06, got -0.1"),
        ("temperature", 1e6 + 1, "temperature must be from 0 to 1e+06, got 1000001.0"),
        ("temperature", float("nan"), "temperature must be from 0 to 1e+06, got nan"),
        ("temperature", True, "temperature must be a number, got True"),
        ("temperature", "hot", "temperature must be a number, got 'hot'"),
        ("seed", "x" * 59, f"seed must be an int, got '{'x' * 56}..."),
        ("seed", "x" * 58, f"seed must be an int, got '{'x' * 58}'"),
    ],
)
def test_an_impossible_value_is_named_with_its_field(field: str, bad: Any, said: str) -> None:
    with pytest.raises(RequestError) as refused:
        request(**{field: bad})
    assert str(refused.value) == said


def test_a_value_whose_repr_raises_is_named_by_its_type() -> None:
    class Shy:
        def __repr__(self) -> str:
            raise RuntimeError

    with pytest.raises(RequestError, match="seed must be an int, got a Shy"):
        request(seed=Shy())


def test_a_prompt_is_text_or_tokens() -> None:
    made = Request.from_dict({"text": "ab", "seed": None}, Letters())
    assert (made.input_ids, made.text, made.seed) == ((97, 98), "ab", 0)
    assert len(made.rid) == 32
    assert Request.from_dict({"input_ids": [1], "rid": "mine"}, Letters()) == request(rid="mine")
    for fields in ({}, {"text": "a", "input_ids": [1]}, {"text": None, "input_ids": None}):
        with pytest.raises(
            RequestError, match=exactly("the prompt is either text or input_ids: give one of them, and not both")
        ):
            Request.from_dict(fields, Letters())
    for fields, said in (
        ({"text": 5}, "text must be a string, got 5"),
        ({"text": "\ud800"}, "the text cannot be written in UTF-8: surrogates not allowed"),
        (
            {"text": "a", "zeta": 1, "beta": 2},
            "there is no field 'beta'; the fields are rid, input_ids, max_new_tokens",
        ),
        # The keys of a recorded request may be anything.
        ({"text": "a", "zeta": 1, 7: 2}, "there is no field 7; the fields are rid"),
    ):
        with pytest.raises(RequestError, match=said):
            Request.from_dict(fields, Letters())


def test_a_request_is_written_with_its_prompt_as_it_was_given() -> None:
    for fields, other in (({"text": "ab"}, "input_ids"), ({"input_ids": [97, 98]}, "text")):
        made = Request.from_dict({**fields, "rid": "r", "stop_token_ids": [1], "top_k": 2}, Letters())
        written = made.as_dict()
        assert fields.items() <= written.items()
        assert other not in written
        assert Request.from_dict(written, Letters()) == made


def test_the_room_names_what_needs_torch_when_it_is_asked_for() -> None:
    from graftlab.requests import identity

    for name in ("bootstrap_rooms_tensor", "request_ids_tensor"):
        assert getattr(graftlab.requests, name) is getattr(identity, name)
    with pytest.raises(AttributeError, match=r"module 'graftlab\.requests' has no attribute 'nothing'"):
        _ = graftlab.requests.nothing


def test_values_of_the_room_cannot_be_changed() -> None:
    assert_values(Request, FinishedRequest, DumpSettings, LoggingSettings)
