"""Every message arrives as it was sent, and only in its direction; anything else is refused by name."""

from __future__ import annotations

import contextlib
import pickle
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.in_process import a_row
from kit.limits import limited
from kit.refusals import exactly

from graftlab.base.tags import identity
from graftlab.base.world import RunInfo
from graftlab.errors import MessageError
from graftlab.exchange.status_page import WireStatus
from graftlab.lines.traces import OperationChanges, TraceRequest, WantedCall
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks import messages
from graftlab.ranks.messages import (
    Acknowledgement,
    AskKeptInput,
    AskKeptMap,
    AskKeptPair,
    AskKeptTags,
    AskLineTraces,
    AskMatch,
    AskPostMortem,
    AskSelfGraft,
    AskStacks,
    AskWaitReason,
    Call,
    Contact,
    Contacts,
    Dispatch,
    DisplayData,
    Evaluate,
    Execute,
    Failure,
    FallbackPlan,
    FromRank,
    Hello,
    Interrupt,
    JobCode,
    KeptTags,
    KeptValue,
    LineTraces,
    LinkReport,
    LiveOutput,
    MatchResult,
    Output,
    PlanAdopted,
    PlanUpdate,
    PostMortem,
    Query,
    RecordStep,
    Refusal,
    Reply,
    RunDone,
    RunRequest,
    RunSelfGraft,
    RunSettled,
    SelfGraftResult,
    Shutdown,
    Stacks,
    StatusUpdate,
    StoreAddress,
    TapSeen,
    ToRank,
    TraceSteps,
    WaitReason,
    WorldRequest,
    WorldStart,
    WorldSwitch,
    pack,
    pack_row,
    unpack_from_rank,
    unpack_to_rank,
)
from graftlab.rows.encoding import encode

PLAN = to_wire(
    GraftPlan().edit(b2t="layer < 3", transform="def transform(g): return g.target", rename={"target": {"a": "b"}})
)
INFO = RunInfo(3, 17, (0, 2))
TAGS = {"name": "attn", "layer": 3, "scale": 0.5, "on": True, "off": None, "id": 1 << 70, "half": "\ud800"}

CONTACT = Contact(2, "/tmp/x/socket", b"\x00nonce", b"target[1] 7f", "10.0.0.7", 29600)

TRACE = TraceRequest(
    [WantedCall("attn", {"layer": 3}, 1, 0, 12)],
    frozenset({(identity({"name": "h", "layer": 3}), 1, 2)}),
    OperationChanges({4: "graftlab.line.3.4"}, {5: 6}, {7: (8, "graftlab.line.3.before.7")}),
    frozenset({1, 2}),
)
TO_RANK = [
    Contacts((CONTACT,)),
    Contacts(()),
    WorldRequest(2, RunInfo(3, 17, (0, 2), (1, 2), 4), PLAN),
    WorldStart(2),
    WaitReason("target[0] had not joined"),
    RunRequest(INFO, PLAN, Call(b"\x80packed")),
    RunRequest(INFO, PLAN, Evaluate("1 + 1", "<graft cell 1>")),
    RunRequest(INFO, PLAN, Execute("x = 1", "<graft cell 2>")),
    RunRequest(INFO, PLAN, JobCode()),
    PlanUpdate(PLAN),
    PlanUpdate(to_wire(GraftPlan())),
    Query(1, AskStacks()),
    Query(2, AskKeptTags(True)),
    Query(3, AskKeptPair("attn", TAGS)),
    Query(4, AskKeptInput("attn", {})),
    Query(5, AskKeptMap("attn", TAGS, (0, 2))),
    Query(6, AskKeptMap("attn", TAGS, None)),
    Query(7, AskPostMortem("p x")),
    Query(8, RunSelfGraft(7, ("record", "repeat"), 2, {"attn": "bfloat16"}, ("out",), 1 << 30)),
    Query(10, AskSelfGraft()),
    Query(11, RecordStep(7, ("h.0.fc",), 1 << 30, 1 << 28)),
    Query(12, AskMatch("h.0.fc")),
    Query(13, TraceSteps(7, TRACE, 2)),
    Query(14, AskLineTraces()),
    FallbackPlan(PLAN),
    FallbackPlan(None),
    Interrupt(3),
    Shutdown(),
]
FROM_RANK = [
    Hello(42),
    CONTACT,
    LinkReport(2, (1,), (0, 3)),
    WorldSwitch(2, 17),
    AskWaitReason(),
    StatusUpdate(WireStatus("waiting", 7, 2, 30, 0.25, "attn", (0, 3))),
    Output("two\nlines\n"),
    LiveOutput(1, " 45%|####"),
    DisplayData({"text/plain": "3", "image/png": "iVBORw0K"}),
    TapSeen(TAGS),
    PlanAdopted(3, 17),
    RunDone(3, b"\x80packed", None),
    RunDone(3, None, Failure("KeyError", "'x'", "Traceback ...")),
    RunDone(3, None, Failure("KeyError", "'x'", "Traceback ...", b"\x80packed")),
    RunSettled(3, 18),
    Reply(1, Stacks("thread MainThread")),
    Reply(2, KeptTags([TAGS, {}], [TAGS])),
    Reply(3, KeptValue(b"\x80packed")),
    Reply(4, KeptValue(None)),
    Reply(6, PostMortem("41")),
    Reply(8, Acknowledgement()),
    Reply(10, SelfGraftResult(None)),
    Reply(10, SelfGraftResult(b"\x80packed")),
    Reply(11, MatchResult(b"\x80packed")),
    Reply(14, LineTraces(b"\x80packed")),
    Reply(14, LineTraces(None, "gl.step() is called inside a mode")),
    Reply(5, Refusal("ValueError: no")),
]


# A rank sends it, and the notebook passes it on.
BOTH_WAYS = StoreAddress("10.0.0.7", 29500)


def parts_of(message: Any) -> set[type]:
    """The types of a message and of the messages that it contains."""
    inner = [
        value for value in map(message.__getattribute__, message.__struct_fields__) if isinstance(value, msgspec.Struct)
    ]
    return {type(message)}.union(*map(parts_of, inner))


def test_there_is_a_sample_of_every_message() -> None:
    concrete = {
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, messages.Message) and not kind.__subclasses__()
    }
    assert set().union(*map(parts_of, [*TO_RANK, *FROM_RANK, BOTH_WAYS])) >= concrete
    assert {type(message) for message in [*TO_RANK, BOTH_WAYS]} == set(get_args(ToRank))
    assert {type(message) for message in [*FROM_RANK, BOTH_WAYS]} == set(get_args(FromRank))


def test_a_message_that_is_passed_on_arrives_equal_both_ways() -> None:
    assert unpack_to_rank(pack(BOTH_WAYS)) == unpack_from_rank(pack(BOTH_WAYS)) == BOTH_WAYS


@pytest.mark.parametrize("message", TO_RANK, ids=lambda message: type(message).__name__)
def test_messages_to_a_rank_arrive_equal_and_are_refused_from_one(message: Any) -> None:
    assert unpack_to_rank(pack(message)) == message
    with pytest.raises(MessageError, match=type(message).__name__):
        unpack_from_rank(pack(message))


@pytest.mark.parametrize("message", FROM_RANK, ids=lambda message: type(message).__name__)
def test_messages_from_a_rank_arrive_equal_and_are_refused_by_one(message: Any) -> None:
    assert unpack_from_rank(pack(message)) == message
    with pytest.raises(MessageError, match=type(message).__name__):
        unpack_to_rank(pack(message))


def test_a_row_arrives_as_its_line_and_only_in_the_notebook() -> None:
    row = a_row(order=7)
    for frame in (pack_row(row), memoryview(pack_row(row))):
        line = unpack_from_rank(frame)
        # A view would hold the whole buffer that it was received in.
        assert type(line) is bytes
        assert line == encode(row)
        with pytest.raises(MessageError, match=exactly("a frame that begins with b'r' is not a message")):
            unpack_to_rank(frame)


@pytest.mark.parametrize("unpack", [unpack_to_rank, unpack_from_rank])
@pytest.mark.parametrize("kind", [b"x", b"M", b""])
def test_only_frames_of_known_kinds_are_messages(kind: bytes, unpack: Any) -> None:
    frame = kind + pack(Shutdown())[1:]
    with pytest.raises(MessageError, match=exactly(f"a frame that begins with {frame[:1]!r} is not a message")):
        unpack(frame)


@pytest.mark.parametrize("unpack", [unpack_to_rank, unpack_from_rank])
def test_an_unknown_message_is_refused_by_name(unpack: Any) -> None:
    class Promotion(messages.Message, frozen=True):
        rank: int

    with pytest.raises(MessageError, match="'Promotion'"):
        unpack(pack(Promotion(3)))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"type": "PlanAdopted", "version": "3", "step": 1}, r"Expected `int`, got `str` - at `\$.version`"),
        ({"type": "PlanAdopted", "version": 3}, "missing required field `step`"),
        ({"type": "PlanAdopted", "version": 3, "step": 1, "more": 1}, "unknown field `more`"),
        ({"type": "TapSeen", "tags": {"layer": [3]}}, "tag 'layer' has a value that is not plain: a list"),
        ({"type": "Reply", "number": 1, "answer": {"type": "Hello", "pid": 3}}, "Invalid value 'Hello'"),
        (
            {"type": "Reply", "number": 1, "answer": {"type": "KeptTags", "tags": [{"a": {}}]}},
            "tag 'a' has a value that is not plain",
        ),
        (
            {"type": "Reply", "number": 1, "answer": {"type": "KeptTags", "tags": [], "missing": [{"a": {}}]}},
            "tag 'a' has a value that is not plain",
        ),
    ],
)
def test_a_message_whose_fields_are_wrong_is_refused_with_the_field(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(MessageError, match=says):
        unpack_from_rank(b"m" + msgspec.msgpack.encode(fields))


@pytest.mark.parametrize("ask", [AskKeptPair, AskKeptInput])
def test_a_question_about_a_tap_is_sent_with_plain_tags_alone(ask: Any) -> None:
    with pytest.raises(ValueError, match="tag 'layer' has a value that is not plain: a list"):
        ask("x", {"step": 0, "layer": [3]})


@given(st.binary(max_size=100), st.sampled_from([b"", b"m", b"x"]))
def test_no_frame_raises_anything_else(data: bytes, kind: bytes) -> None:
    for unpack in (unpack_to_rank, unpack_from_rank):
        with limited(), contextlib.suppress(MessageError):
            unpack(kind + data)


@given(st.sampled_from(TO_RANK), st.integers(0, 10_000), st.integers(0, 255))
def test_a_damaged_message_is_refused_or_valid(message: Any, at: int, byte: int) -> None:
    frame = bytearray(pack(message))
    frame[at % len(frame)] = byte
    with limited(), contextlib.suppress(MessageError):
        assert type(unpack_to_rank(bytes(frame))) in get_args(ToRank)


def test_a_pickle_in_place_of_a_frame_is_not_loaded(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "was run",)

    for frame in (pickle.dumps(Evil()), b"m" + pickle.dumps(Evil())):
        for unpack in (unpack_to_rank, unpack_from_rank):
            with pytest.raises(MessageError):
                unpack(frame)
    assert not list(tmp_path.iterdir())


# ---- dispatch -------------------------------------------------------------------------------------------------------


def test_dispatch_passes_its_arguments_to_the_handler() -> None:
    handle = Dispatch[[str], str]()
    handle.on(Hello, lambda hello, label: f"{label} is {hello.pid}")
    handle.on(Output, lambda output, label: f"{label} says {output.text}")
    assert handle(Output("so"), "target[0]") == "target[0] says so"
    assert handle(Hello(7), "baseline[0]") == "baseline[0] is 7"


def test_a_message_without_a_handler_is_an_error_that_lists_the_handled_ones() -> None:
    handle = Dispatch[[], None]()
    handle.on(Hello, lambda hello: None)
    with pytest.raises(MessageError, match="Shutdown has no handler here; these have: Hello"):
        handle(Shutdown())
