"""The taps that a session knows of: each once, as filters can tell them apart."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import graftlab as gl
from graftlab.base.tags import identity

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 2) as session:
        session.run(tap_in_many_ways, tap_in_many_ways)
        yield session


def tap_in_many_ways() -> None:
    me = gl.here()
    assert me is not None
    x = torch.ones(1)
    gl.tap("same", x, layer=1, phase="decode")
    gl.step()
    gl.tap("same", x, phase="decode", layer=1)
    gl.tap("parts", x, tp_rank=me.rank)
    gl.tap("tuples", x, heads=(1, 2))
    gl.tap("one tag", x, a=1)
    gl.tap("one tag", x, b=1)


def seen(session: gl.Session, name: str) -> list[dict]:
    return [tags for tags in session.taps if tags["name"] == name]


def test_a_tap_is_listed_once_for_all_steps_ranks_and_tag_orders(session: gl.Session) -> None:
    (same,) = seen(session, "same")
    assert (same["layer"], same["phase"]) == (1, "decode")


def test_parts_of_one_value_are_listed_separately(session: gl.Session) -> None:
    assert sorted(tags["tp_rank"] for tags in seen(session, "parts")) == [0, 1]


def test_taps_with_different_tag_names_are_distinct(session: gl.Session) -> None:
    assert len(seen(session, "one tag")) == 2


def test_listed_taps_are_those_of_the_rows(session: gl.Session) -> None:
    assert {identity(tags) for tags in session.taps} == {identity(tags) for tags in session.frame["tags"]}
