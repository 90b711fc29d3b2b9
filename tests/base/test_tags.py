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
    distinguishes_taps,
    identity,
    is_no_tag,
    own_tags,
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
    assert {tag for tag in given if distinguishes_taps(tag)} == {"layer", "recompute_status"}
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
