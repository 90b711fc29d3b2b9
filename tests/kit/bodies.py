"""Bodies of HTTP requests for property tests: right ones, ones that are nearly right, and any bytes."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import strategies as st

from graftlab.requests import LoggingSettings
from graftlab.requests.served import Request

# A budget of tokens that a server may be asked for has its own tests; here each request is short.
_TOKENS = st.integers(0, 3)
_texts = st.text(max_size=12)
_values: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _texts | st.sampled_from([10**400, 2**63, -1, "\ud800"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_texts, inner, max_size=3),
    max_leaves=5,
)
# Folders have a strategy of their own, so that nothing is made where the tests run.
_names = sorted({*Request.__dataclass_fields__, *LoggingSettings.__dataclass_fields__} - {"dump_requests_folder"})
_nearly = st.fixed_dictionaries(
    {},
    optional={
        **dict.fromkeys(_names, _values),
        "text": _texts | _values,
        "max_new_tokens": _TOKENS,
        "dump_requests_folder": st.sampled_from(["", "/", "../out", "in\0side", "x" * 5000, 3, None, ["a"]]),
    },
)
_right = st.fixed_dictionaries(
    {},
    optional={
        "log_requests": st.booleans(),
        "log_requests_level": st.integers(0, 3),
        "dump_requests_threshold": st.integers(1, 2**40),
        "dump_requests_exclude_meta_keys": st.lists(_texts, max_size=3),
    },
) | st.fixed_dictionaries(
    {"text": _texts, "max_new_tokens": _TOKENS},
    optional={"temperature": st.floats(0, 2), "seed": st.integers(0, 9), "top_k": st.integers(1, 9)},
)
_objects = (
    _right
    | _nearly
    | st.builds(lambda known, more: {**known, **more}, _right, st.dictionaries(_texts, _values, max_size=2))
)


def _written(content: object) -> bytes:
    return json.dumps(content).encode()


@st.composite
def _spoilt(draw: st.DrawFn) -> bytes:
    body = bytearray(draw(_objects.map(_written)))
    for _ in range(draw(st.integers(1, 3))):
        place = draw(st.integers(0, len(body) - 1))
        body[place : place + draw(st.integers(0, 2))] = draw(st.binary(max_size=2))
        if not body:
            break
    # A flip may make a folder or a long generation of another; those are not what is tried here.
    return bytes(body) if b"max_new_tokens" not in body and b"folder" not in body else b"{"


bodies: st.SearchStrategy[bytes] = st.one_of(
    _objects.map(_written),
    _spoilt(),
    _values.map(_written),
    st.binary(max_size=60),
    st.sampled_from([b"[" * 100_000, b'{"text":' * 50_000, b'{"a":1,"a":2}', b"\xff\xfe{}", b"1" * 5_000]),
)
