"""Frames: whatever a tag may be goes there and back, and whatever else is read is refused without being run."""

from __future__ import annotations

import contextlib
import os
import pickle

import msgspec
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from kit.limits import limited

from graftlab.base.tags import TapKey, plain
from graftlab.exchange.frames import (
    KINDS,
    AnnouncementFrame,
    ChunkFrame,
    ChunkReplyFrame,
    DeclineFrame,
    DeviceLocation,
    Frame,
    PublishFrame,
    ReleaseFrame,
    RunEndFrame,
    StatusFrame,
    StepEndFrame,
    YieldFrame,
    YieldQueryFrame,
    decode,
    encode,
)
from graftlab.exchange.status_page import WireStatus

# Half a surrogate pair is no Unicode, and yet a str may have one.
text = st.text(st.characters(exclude_categories=[]), max_size=8)
numbers = st.integers(0, 2**62)
plain_values = st.one_of(
    st.none(), st.booleans(), st.integers(), st.integers(-(2**200), 2**200), st.floats(allow_nan=False), text
)
keys = st.builds(
    TapKey,
    step=numbers,
    name=text,
    tags=st.lists(st.tuples(text, plain_values), max_size=3).map(tuple),
    recompute_status=st.sampled_from(["original", "recompute"]),
    occurrence=numbers,
)
FRAMES = {
    PublishFrame: st.builds(
        PublishFrame,
        key=keys,
        id=numbers,
        dtype=st.sampled_from(["float32", "bool"]),
        shape=st.lists(numbers, max_size=5).map(tuple),
        nbytes=numbers,
        location=st.one_of(st.none(), numbers, st.builds(DeviceLocation, numbers, numbers, numbers, st.binary())),
        extras=st.none() | st.binary(),
    ),
    DeclineFrame: st.builds(DeclineFrame, keys),
    ReleaseFrame: st.builds(ReleaseFrame, st.lists(numbers)),
    StepEndFrame: st.builds(StepEndFrame, st.integers(-1, 2**62)),
    RunEndFrame: st.just(RunEndFrame()),
    AnnouncementFrame: st.builds(AnnouncementFrame, numbers, st.binary()),
    ChunkFrame: st.builds(ChunkFrame, numbers, st.binary()),
    ChunkReplyFrame: st.builds(ChunkReplyFrame, st.none() | st.text()),
    YieldQueryFrame: st.builds(YieldQueryFrame, numbers, st.booleans()),
    YieldFrame: st.builds(YieldFrame, numbers),
    StatusFrame: st.builds(
        StatusFrame,
        st.builds(
            WireStatus,
            *(st.sampled_from(["idle", "running", "waiting"]), numbers, numbers, numbers, st.floats(0, 1e6)),
            *(st.text(), st.lists(numbers).map(tuple)),
        ),
        numbers,
    ),
}
any_frame = st.one_of(*FRAMES.values())


def test_every_kind_of_frame_is_tried_here() -> None:
    assert set(FRAMES) == set(KINDS)


@given(any_frame)
@example(DeclineFrame(TapKey(3, "\ud800", (("layer", 2**80),), "recompute", 5)))
def test_a_frame_is_read_as_it_was_written(frame: Frame) -> None:
    back = decode(encode(frame))
    assert type(back) is type(frame)
    assert back == frame
    if isinstance(frame, PublishFrame | DeclineFrame):
        assert isinstance(back, PublishFrame | DeclineFrame)
        assert type(back.key) is TapKey
        assert hash(back.key) == hash(frame.key)
        # Equal is not enough to be the same: 1 equals True and 1.0.
        assert [type(value) for _, value in back.key.tags] == [type(value) for _, value in frame.key.tags]


def test_each_kind_of_frame_keeps_its_number() -> None:
    key = TapKey(1, "x", (), "original", 0)
    where = WireStatus("idle", 0, 0, 0, 0.0, "", ())
    made: list[Frame] = [
        PublishFrame(key, 1, "float32", (), 4, None, None),
        DeclineFrame(key),
        ReleaseFrame([1]),
        StepEndFrame(1),
        RunEndFrame(),
        AnnouncementFrame(1, b""),
        ChunkFrame(1, b""),
        ChunkReplyFrame(None),
        YieldQueryFrame(1, True),
        YieldFrame(1),
        DeclineFrame(TapKey(1, "\ud800", (), "original", 0)),
        StatusFrame(where, 0),
    ]
    assert [msgspec.msgpack.decode(encode(frame))[0] for frame in made] == list(range(12))


class Mischief:
    """Ends the process that unpickles it."""

    def __reduce__(self) -> object:
        return os.abort, ()


HEADER = encode(DeclineFrame(TapKey(1, "x", (("layer", 1),), "original", 0)))
NOT_FRAMES = {
    "nothing": b"",
    "a pickle": pickle.dumps((0, Mischief())),
    "no MessagePack": b"\xc1",
    "no array": msgspec.msgpack.encode({"key": 1}),
    "an unknown kind": msgspec.msgpack.encode([99]),
    "a field too few": msgspec.msgpack.encode([1]),
    "a field too many": msgspec.msgpack.encode([3, 1, 1]),
    "a field of another type": msgspec.msgpack.encode([3, "1"]),
    "a tag that is a list": msgspec.msgpack.encode([1, [1, "x", [["layer", [1]]], "original", 0]]),
    "a tag that is a map": msgspec.msgpack.encode([1, [1, "x", [["layer", {}]], "original", 0]]),
    "text that is no UTF-8": HEADER.replace(b"layer", b"lay\xffr"),
    "cut off": HEADER[:-1],
    "something behind it": HEADER + b"x",
    "a length beyond its end": b"\x92\x02\xdd\xff\xff\xff\xff",
    "an escaped frame without a key": msgspec.msgpack.encode([10, [1, b"x", [], "original", 0], encode(RunEndFrame())]),
    "an escaped frame in an escaped frame": msgspec.msgpack.encode(
        [10, [1, b"x", [], "", 0], encode(DeclineFrame(TapKey(1, "\ud800", (), "", 0)))]
    ),
    "an escaped value of no kind": msgspec.msgpack.encode([10, [1, b"x", [[b"a", b"?1"]], "", 0], HEADER]),
    "an escaped value of no bytes": msgspec.msgpack.encode([10, [1, b"x", [[b"a", b""]], "", 0], HEADER]),
    "an escaped name that is no UTF-8": msgspec.msgpack.encode([10, [1, b"\xff", [], "", 0], HEADER]),
}


@pytest.mark.parametrize("data", NOT_FRAMES.values(), ids=NOT_FRAMES)
def test_bytes_that_are_not_a_frame_are_refused_with_a_sentence(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"[a-z]") as caught:
        decode(data)
    assert caught.type is ValueError


@given(any_frame, st.data())
def test_corrupted_bytes_decode_to_a_frame_or_are_refused(frame: Frame, data: st.DataObject) -> None:
    changed = bytearray(encode(frame))
    for _ in range(data.draw(st.integers(1, 3))):
        changed[data.draw(st.integers(0, len(changed) - 1))] = data.draw(st.integers(0, 255))
    with limited(), contextlib.suppress(ValueError):
        back = decode(bytes(changed))
        assert type(back) in KINDS
        if isinstance(back, PublishFrame | DeclineFrame):
            hash(back.key)


@given(st.binary(max_size=60))
def test_any_bytes_are_a_frame_or_refused(data: bytes) -> None:
    with limited(), contextlib.suppress(ValueError):
        assert type(decode(data)) in KINDS


def test_a_tag_that_is_not_a_number_has_a_value_that_equals_itself() -> None:
    for nan in (float("nan"), np.float32("nan")):
        assert plain(nan) == "nan"


def test_a_frame_without_a_key_that_cannot_be_written_is_an_error() -> None:
    with pytest.raises(OverflowError):
        encode(StepEndFrame(1 << 70))
    with pytest.raises(TypeError):
        encode(StepEndFrame(object()))  # type: ignore[arg-type]
