"""Plain data arrives unchanged; anything else is refused with a message, and nothing is executed."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.limits import limited

from graftlab.base import wire
from graftlab.errors import MessageError


class Sample(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    tags: dict[str, Any] = {}
    text: str = ""
    parts: tuple[str, ...] = ()
    inner: Sample | None = None


anything = wire.Decoder(Any)
samples = wire.Decoder(Sample)

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(st.characters())


@given(st.dictionaries(st.text(), PLAIN))
def test_values_of_a_dict_arrive_exactly(values: dict[str, Any]) -> None:
    arrived = samples.decode(wire.encode(Sample(tags=values))).tags
    assert arrived == values
    assert [type(value) for value in arrived.values()] == [type(value) for value in values.values()]


@pytest.mark.parametrize(
    "value",
    [
        1 << 63,
        (1 << 64) - 1,
        1 << 64,
        -(1 << 63),
        -(1 << 63) - 1,
        10**5000,
        -(10**5000),
        "\ud800",
        "a\udcffb",
        "",
        float("inf"),
    ],
    ids=lambda value: f"{type(value).__name__}-{len(str(value)) if isinstance(value, str) else hash(value)}",
)
def test_values_that_msgpack_lacks_arrive_too(value: Any) -> None:
    for sent in ({"tag": value, "other": 1}, {"deep": [{"tag": value}]}):
        assert anything.decode(wire.encode(sent)) == sent


def test_text_that_is_only_read_is_escaped_where_utf8_cannot_express_it() -> None:
    sent = Sample(text="a\udcff", parts=("b\ud800",), tags={"c\ud800": "d\ud800"}, inner=Sample(text="e\udc80"))
    arrived = samples.decode(wire.encode(sent))
    assert (arrived.text, arrived.parts, arrived.inner.text) == ("a\\udcff", ("b\\ud800",), "e\\udc80")
    assert arrived.tags == {"c\\ud800": "d\ud800"}


def test_bytes_of_a_different_type_are_refused_with_the_fault() -> None:
    for sent, says in (
        ({"type": "Sample", "text": 3}, r"Expected `str`, got `int` - at `\$.text`"),
        ({"type": "Sample", "more": 3}, "unknown field `more`"),
        ({"type": "Other"}, "Invalid value 'Other'"),
        ({"type": "Sample", "tags": {"a": msgspec.msgpack.Ext(7, b"")}}, "graftlab does not send extension 7"),
        ({"type": "Sample", "tags": {"a": msgspec.msgpack.Ext(2, b"\xff")}}, "decode"),
    ):
        with pytest.raises(MessageError, match=says):
            samples.decode(msgspec.msgpack.encode(sent))
    with pytest.raises(MessageError, match="trailing"):
        samples.decode(wire.encode(Sample()) + b"\x00")


@given(st.binary(max_size=200))
def test_no_bytes_raise_anything_else(data: bytes) -> None:
    for decoder in (anything, samples):
        with limited(), contextlib.suppress(MessageError):
            decoder.decode(data)


def test_too_deeply_nested_lists_are_refused() -> None:
    with pytest.raises(MessageError):
        anything.decode(b"\x91" * 1_000_000)


def test_a_pickle_is_not_opened(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "was run",)

    sent = pickle.dumps(Evil())
    with pytest.raises(MessageError):
        samples.decode(sent)
    assert anything.decode(wire.encode({"blob": sent})) == {"blob": sent}
    assert not list(tmp_path.iterdir())
