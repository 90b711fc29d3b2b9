"""The identity of a tap: which tags make the same tap, on every rank, on both sides, in rows and in frames."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from graftlab.base.tags import (
    PLACE_TAGS,
    RESERVED_TAGS,
    TapIdentity,
    display_tags,
    distinguishes_taps,
    identity,
    is_no_tag,
    name_with,
    own_tags,
    plain,
    rank_tags,
)
from graftlab.rows.encoding import decode, encode
from graftlab.rows.schema import Row


def tags(**own: Any) -> dict[str, Any]:
    return {"name": "h", "step": 0, "side": "target", "rank": 0, "recompute_status": "original", **own}


class Phase(str, Enum):
    DECODE = "decode"


class Depth(int):
    pass


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"step": 1}, {"step": 7}),
        ({"side": "baseline"}, {"side": "target"}),
        ({"rank": 0}, {"rank": 3}),
        ({"tp_rank": 0, "pp_rank": 1}, {"tp_rank": 1}),
        ({"layer": 3, "phase": "decode"}, {"phase": "decode", "layer": 3}),
        ({"layer": 3}, {"layer": 3.0}),
        ({"layer": 3}, {"layer": Depth(3)}),
        ({"phase": "decode"}, {"phase": Phase.DECODE}),
        ({"layer": None}, {}),
        ({"scale": math.nan}, {}),
        ({"heads": (1, 2)}, {"heads": [1, 2]}),
        ({"shape": torch.Size([2, 3])}, {"shape": [2, 3]}),
        pytest.param({"where": object()}, {"where": object()}, id="values that are no tags"),
    ],
    ids=str,
)
def test_these_are_one_tap(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identity({**tags(), **one}) == identity({**tags(), **other})


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"name": "h"}, {"name": "k"}),
        ({"layer": 3}, {"layer": 4}),
        ({"layer": 3}, {"layer": "3"}),
        ({"layer": 3}, {}),
        ({"layer": 3}, {"depth": 3}),
        ({"rid": "a"}, {"rid": "b"}),
        ({"heads": [1, 2]}, {"heads": [2, 1]}),
        ({"recompute_status": "original"}, {"recompute_status": "recompute"}),
    ],
    ids=str,
)
def test_these_are_two_taps(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert identity({**tags(), **one}) != identity({**tags(), **other})


def test_an_identity_can_be_read() -> None:
    found = identity(tags(phase="decode", layer=3, tp_rank=1))
    assert found == TapIdentity("h", (("layer", 3), ("phase", "decode")), "original")


def test_tags_are_of_these_kinds() -> None:
    given = tags(layer=3, tp_rank=1)
    assert own_tags(given) == {"layer": 3, "tp_rank": 1}
    assert rank_tags(given) == (("tp_rank", 1),)
    orders = ({"tp_rank": 1, "dp_rank": 0}, {"dp_rank": 0, "tp_rank": 1})
    assert {rank_tags(each) for each in orders} == {(("dp_rank", 0), ("tp_rank", 1))}
    compiled = {**given, "compiled": True, "baseline_name": "h", "target_name": "k"}
    assert {tag for tag in compiled if distinguishes_taps(tag)} == {"layer", "recompute_status"}
    assert display_tags(compiled) == {"layer": 3, "tp_rank": 1}
    assert identity(compiled) == identity(given)
    assert PLACE_TAGS | {"name", "recompute_status"} == given.keys() - {"layer", "tp_rank"}
    assert PLACE_TAGS | {"name", "recompute_status", "baseline_name", "target_name"} == RESERVED_TAGS


numbers = st.none() | st.booleans() | st.integers() | st.floats()
values = st.recursive(
    numbers | st.text(max_size=5) | st.binary(max_size=3) | st.complex_numbers(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.tuples(st.integers()), inner, max_size=2)
        | st.sets(st.integers(), max_size=1)
    ),
    max_leaves=4,
)


@given(st.dictionaries(st.sampled_from(["layer", "phase", "tp_rank", "kind"]), values))
def test_a_tap_is_the_same_in_its_row_after_the_row_was_written_and_read(own: dict[str, Any]) -> None:
    given = tags(**own)
    row = Row(0, 0, 1, "h", given, "b2t", "target", 0, "compared", [0])
    assert identity(decode(encode(row)).tags) == identity(given)
    assert hash(identity(given)) == hash(identity(dict(reversed(given.items()))))


def test_a_tap_without_a_status_is_of_the_original_pass() -> None:
    assert identity({"name": "h"}) == identity({"name": "h", "recompute_status": "original"})


def test_arrays_are_no_tags_and_their_scalars_are() -> None:
    assert is_no_tag("mask", np.ones(2))
    assert is_no_tag("mask", torch.ones(2))
    assert not is_no_tag("scale", np.float32(2))
    for values in ([1], {"a": 1}, (1, torch.ones(1)), (1, (2, [3]))):
        assert is_no_tag("where", values)
    for value in ((1, 2), (), "text", 3, None, Phase.DECODE):
        assert not is_no_tag("where", value)
        assert is_no_tag("grafter_extras", value)


class Address:
    def __repr__(self) -> str:
        return "<Address at 0x7F00aa of 0x10>"


ITSELF: list[Any] = []
ITSELF.append(ITSELF)


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None),
        (True, True),
        (Depth(3), 3),
        (Phase.DECODE, "decode"),
        (np.float32(0.5), 0.5),
        (np.int64(7), 7),
        (math.nan, "nan"),
        (math.inf, math.inf),
        ((1, (2.0, "x")), "[1, [2.0, 'x']]"),
        ({"a": (1,)}, "{'a': [1]}"),
        ({(1, 2): 3}, "{(1, 2): 3}"),
        (ITSELF, "[[...]]"),
        (Address(), "<Address of 0x10>"),
        ((1 << 14_000) - 1, (1 << 14_000) - 1),
        (1 << 14_000, hex(1 << 14_000)),
        (-(1 << 14_000), hex(-(1 << 14_000))),
    ],
    ids=lambda value: repr(value)[:30] if not isinstance(value, int) or value.bit_length() < 99 else "long",
)
def test_a_value_of_a_tag_is_text_or_a_number_outside_its_rank(value: Any, expected: Any) -> None:
    found = plain(value)
    assert (found, type(found)) == (expected, type(expected))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ({}, "q"),
        ({"layer": 3, "phase": "decode"}, "q[layer=3,phase=decode]"),
        ({"phase": "decode", "layer": 3.0}, "q[layer=3,phase=decode]"),
        ({"scale": 0.5, "tp_rank": 1}, "q[scale=0.5]"),
        ({"tp_rank": 1}, "q"),
        ({"last": True}, "q[last=True]"),
    ],
    ids=str,
)
def test_calls_are_named_by_their_tags_in_the_order_of_the_alphabet(given: dict[str, Any], name: str) -> None:
    assert name_with("q", given) == name
