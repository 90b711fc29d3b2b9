"""The messages between the notebook and its ranks: one tagged struct per message, as msgpack, one frame each.

A message is checked against its type when it arrives, and reading one never runs code. Objects that users send to their
ranks, or get back, are pickled. They are fields of type :data:`Pickled`, remain bytes here, and are unpickled only by a
process that trusts the sender.

Rows are different, because of their number: they are sent as the JSON line that is also written to disk. The first byte
of a frame distinguishes the two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

import msgspec

from graftlab.base import wire
from graftlab.base.world import RunInfo
from graftlab.errors import MessageError
from graftlab.exchange.channel import Received
from graftlab.exchange.status_page import WireStatus
from graftlab.lines.traces import TraceRequest
from graftlab.plan.wire import WirePlan
from graftlab.rows.encoding import encode
from graftlab.rows.schema import Row

Pickled = bytes
"""A value packed by :mod:`graftlab.base.shipping`. Unpickling it can run any code that its sender chose."""

M = TypeVar("M", bound=msgspec.Struct)
P = ParamSpec("P")
R = TypeVar("R")

# See graftlab.base.tags.plain.
_PLAIN = frozenset({str, int, float, bool, type(None)})

_MESSAGE = b"m"
_ROW = b"r"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The base class of all messages. On the wire each has its class's name as tag."""


# ---- from the notebook to a rank ------------------------------------------------------------------------------------


class Call(Message, frozen=True):
    """Call a function with arguments."""

    packed: Pickled


class Evaluate(Message, frozen=True):
    """Evaluate an expression in the rank's namespace; tracebacks name it ``filename``."""

    source: str
    filename: str


class Execute(Message, frozen=True):
    """Execute a cell; tracebacks name it ``filename``."""

    source: str
    filename: str


class JobCode(Message, frozen=True):
    """The work of a job: its own code, since a session sends jobs no work."""


Work = Call | Evaluate | Execute | JobCode


class RunRequest(Message, frozen=True):
    """Take part in a run: do this work under this plan."""

    info: RunInfo
    plan: WirePlan
    work: Work


class PlanUpdate(Message, frozen=True):
    """A newer plan, in force from the next step on."""

    plan: WirePlan


class FallbackPlan(Message, frozen=True):
    """The plans that follow are temporary: if the notebook goes away, this plan is in force again. Until then no rank
    gets more than a step ahead. None means that the temporary plans have ended: tensors recorded under them are
    released, and ``version`` is that of the plan after them.
    """

    plan: WirePlan | None
    version: int = 0


class Interrupt(Message, frozen=True):
    """Raise KeyboardInterrupt in the code of this run, even before it begins. Sent to a rank that seemed idle. A rank
    that seemed busy gets a signal instead, which also ends waits in C.
    """

    run: int


class Shutdown(Message, frozen=True):
    """End the rank's process."""


class Contact(Message, frozen=True):
    """How other ranks reach this one, if ranks make their own connections; see :mod:`graftlab.jobs.peer_connector`.

    ``socket`` is a path on its machine, and ``nonce`` the bytes that a rank sharing its memory reads there; ``name``
    identifies it at ``port`` of ``address``. Sent to the notebook by the rank, and by the notebook to others.
    """

    world_rank: int
    socket: str
    nonce: bytes
    name: bytes
    address: str
    port: int


class Contacts(Message, frozen=True):
    """The contacts of ranks that have joined. A new contact of a known rank replaces the old one."""

    contacts: tuple[Contact, ...]


class StoreAddress(Message, frozen=True):
    """The address of the rendezvous store of a side's process group, which its rank 0 sends for its other ranks."""

    host: str
    port: int


class WorldRequest(Message, frozen=True):
    """All ranks have joined: connect to each of them again, and send a :class:`LinkReport`.

    Together these connections are a world, with a number. A rank at work stays in its old world until it has received
    :class:`WorldStart` and ends a step; a waiting rank begins with a :class:`RunRequest`.
    """

    world: int
    info: RunInfo
    plan: WirePlan


class WorldStart(Message, frozen=True):
    """All ranks are connected in this world: switch to it at the end of the step."""

    world: int


class WaitReason(Message, frozen=True):
    """The reason why a rank has to wait, in words."""

    what: str


# ---- from a rank to the notebook ------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The rank is ready."""

    pid: int


class LinkReport(Message, frozen=True):
    """The rank is connected to all others of this world: to ``memory`` by shared memory, to ``tcp`` by TCP."""

    world: int
    memory: tuple[int, ...]
    tcp: tuple[int, ...]


class WorldSwitch(Message, frozen=True):
    """The rank has switched to this world while at work, and continues from this step."""

    world: int
    step: int


class AskWaitReason(Message, frozen=True):
    """Why does the rank wait? Sent before it stops waiting, and answered by :class:`WaitReason`."""


class StatusUpdate(Message, frozen=True):
    """The rank's status, for a notebook that cannot read its memory."""

    where: WireStatus


class Output(Message, frozen=True):
    """Whole lines that the rank printed."""

    text: str


class LiveOutput(Message, frozen=True):
    """The current state of lines that a program rewrites in place on this stream; empty when it has ended."""

    stream: int
    text: str


class DisplayData(Message, frozen=True):
    """A value that the rank's code displays: one representation for each MIME type, as text, images in base64."""

    data: dict[str, str]


class TapSeen(Message, frozen=True):
    """The tags of a tap that the rank reached for the first time, whatever the filters match. Plain values only."""

    tags: dict[str, Any]

    def __post_init__(self) -> None:
        _require_plain(self.tags)


class PlanAdopted(Message, frozen=True):
    """The plan of this version is in force on this rank from this step on."""

    version: int
    step: int


class Failure(Message, frozen=True):
    """An exception that ended a rank's work. ``traceback`` starts at the user's own code.

    ``exception`` is the object itself, if it can be pickled. It lets the notebook raise the same class. Unpickling can
    run any code, so the notebook does it only for processes of its user.
    """

    kind: str
    message: str
    traceback: str
    exception: Pickled | None = None


class RunDone(Message, frozen=True):
    """This rank's work in the run has ended, with a result or a failure."""

    run: int
    # A view of nearly the whole frame in which it came. It may be large.
    result: memoryview | None
    failure: Failure | None


class RunSettled(Message, frozen=True):
    """The run has ended on all ranks, and this one has sent its rows. ``next_step`` is the first unused step."""

    run: int
    next_step: int


# ---- questions to a rank, answered while its model computes, and their answers --------------------------------------


class Stacks(Message, frozen=True):
    """The stacks of the rank's threads."""

    text: str


class KeptTags(Message, frozen=True):
    """The tags of every kept pair, oldest first; ``missing`` has those of taps whose newest pair is not kept.

    Plain values only.
    """

    tags: list[dict[str, Any]]
    missing: list[dict[str, Any]] = []

    def __post_init__(self) -> None:
        for tags in (*self.tags, *self.missing):
            _require_plain(tags)


class KeptValue(Message, frozen=True):
    """A value made from a kept pair; None where no such pair is kept."""

    packed: Pickled | None


class PostMortem(Message, frozen=True):
    """The output of a debugger in the frames of the last failure."""

    text: str


class Acknowledgement(Message, frozen=True):
    """The rank will follow the instruction."""


class SelfGraftResult(Message, frozen=True):
    """A :class:`graftlab.grafting.self_graft.SelfGraft`; None until its last step has ended."""

    packed: Pickled | None


class MatchResult(Message, frozen=True):
    """A :class:`graftlab.ranks.match_recorder.MatchRecord`, None until its step has ended; or one of its tensors."""

    packed: Pickled | None


class LineTraces(Message, frozen=True):
    """A list of :class:`graftlab.lines.traces.SliceTrace`, None until its last step has ended; or why there is none."""

    packed: Pickled | None
    obstacle: str = ""


class Refusal(Message, frozen=True):
    """Why the question cannot be answered."""

    error: str


Answer = (
    Stacks | KeptTags | KeptValue | PostMortem | Acknowledgement | SelfGraftResult | MatchResult | LineTraces | Refusal
)


class AskStacks(Message, frozen=True):
    """What are the stacks of the rank's threads? Answered by :class:`Stacks`."""


class AskPostMortem(Message, frozen=True):
    """What does the debugger print for this command of the user, in the frames of the last failure?"""

    command: str


class AskKeptTags(Message, frozen=True):
    """Which pairs are kept? With ``failed`` also inputs of transforms that failed, which left no pair.

    Answered by :class:`KeptTags`.
    """

    failed: bool


class AskKept(Message, frozen=True):
    """The base class of questions about the newest pair with this name and these plain tags.

    Answered by :class:`KeptValue`.
    """

    name: str
    tags: dict[str, Any]

    def __post_init__(self) -> None:
        _require_plain(self.tags)


class AskKeptPair(AskKept, frozen=True):
    """Both tensors, ``(baseline, target)``."""


class AskKeptInput(AskKept, frozen=True):
    """The :class:`graftlab.grafting.kept.KeptPair`, including that of a failed transform."""


class AskKeptMap(AskKept, frozen=True):
    """The :class:`graftlab.diffs.maps.DifferenceMap` over these two dimensions; None chooses two."""

    dims: tuple[int, ...] | None


class RunSelfGraft(Message, frozen=True):
    """Run these passes of a self-graft, each of ``steps`` steps, once the plan of this version is in force.

    See :class:`graftlab.grafting.self_graft_in_steps.SelfGraftInSteps`. Answered by
    :class:`Acknowledgement`. For jobs, because a session cannot call their code again.
    """

    version: int
    passes: tuple[Literal["record", "repeat", "graft", "drift", "rest"], ...]
    steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    dtypes: dict[str, str] = {}
    keep: tuple[str, ...] = ()
    budget: int = 0


class AskSelfGraft(Message, frozen=True):
    """What is the result of these passes? Answered by :class:`SelfGraftResult`."""


class RecordStep(Message, frozen=True):
    """Record the taps of the first step under the plan of this version, for a match.

    Then taps of these names are handled by the plan, and all others are ignored. See
    :class:`graftlab.ranks.match_recorder.StepRecord`. Answered by :class:`Acknowledgement`.
    """

    version: int
    names: tuple[str, ...]
    budget: int
    send: int


class AskMatch(Message, frozen=True):
    """What was recorded? With ``value``, only the tensor of that tap. Answered by :class:`MatchResult`."""

    value: str | None = None


class TraceSteps(Message, frozen=True):
    """Trace the operations of the first ``steps`` steps under the plan of this version.

    See :class:`graftlab.ranks.line_tracer.TracedSteps`. Answered by :class:`Acknowledgement`.
    """

    version: int
    request: TraceRequest
    steps: Annotated[int, msgspec.Meta(ge=1)] = 1


class AskLineTraces(Message, frozen=True):
    """What was traced? Answered by :class:`LineTraces`."""


Question = (
    AskStacks
    | AskPostMortem
    | AskKeptTags
    | AskKeptPair
    | AskKeptInput
    | AskKeptMap
    | RunSelfGraft
    | AskSelfGraft
    | RecordStep
    | AskMatch
    | TraceSteps
    | AskLineTraces
)


class Query(Message, frozen=True):
    """A question, with a number that its answer repeats."""

    number: int
    question: Question


class Reply(Message, frozen=True):
    """The answer to the query of this number."""

    number: int
    answer: Answer


# ---- on the wire ----------------------------------------------------------------------------------------------------

ToRank = (
    RunRequest
    | PlanUpdate
    | FallbackPlan
    | Query
    | Interrupt
    | Shutdown
    | Contacts
    | StoreAddress
    | WorldRequest
    | WorldStart
    | WaitReason
)
FromRank = (
    Hello
    | Contact
    | StoreAddress
    | LinkReport
    | WorldSwitch
    | AskWaitReason
    | StatusUpdate
    | Output
    | LiveOutput
    | DisplayData
    | TapSeen
    | PlanAdopted
    | RunDone
    | RunSettled
    | Reply
)

_to_rank = wire.Decoder(ToRank)
_from_rank = wire.Decoder(FromRank)


def pack(message: ToRank | FromRank) -> bytearray:
    return wire.encode_after(_MESSAGE, message)


def pack_row(row: Row) -> bytes:
    return _ROW + encode(row)


def unpack_to_rank(frame: Received) -> ToRank:
    """Decode a message from the notebook. Raises :class:`MessageError` for anything else."""
    message: ToRank = _to_rank.decode(_body(frame))
    return message


def unpack_from_rank(frame: Received) -> FromRank | bytes:
    """Decode a message from a rank, or return a row's line as bytes. Raises :class:`MessageError` for anything else."""
    if frame[:1] == _ROW:
        return bytes(frame[1:])
    message: FromRank = _from_rank.decode(_body(frame))
    return message


def _body(frame: Received) -> memoryview:
    if frame[:1] != _MESSAGE:
        raise MessageError(f"a frame that begins with {bytes(frame[:1])!r} is not a message")
    return memoryview(frame)[1:]


def _require_plain(tags: dict[str, Any]) -> None:
    if not _PLAIN.issuperset(map(type, tags.values())):
        odd = next(tag for tag, value in tags.items() if type(value) not in _PLAIN)
        raise ValueError(f"tag {odd!r} has a value that is not plain: a {type(tags[odd]).__name__}")


class Dispatch(Generic[P, R]):
    """A table from a message's type to its handler, which also receives the other arguments of the call."""

    def __init__(self) -> None:
        self._handlers: dict[type[msgspec.Struct], Callable[..., R]] = {}

    def on(self, kind: type[M], handler: Callable[Concatenate[M, P], R]) -> None:
        self._handlers[kind] = handler

    def __call__(self, message: msgspec.Struct, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the handler of this message. Raises :class:`MessageError` for one that has none."""
        handler = self._handlers.get(type(message))
        if handler is None:
            known = ", ".join(kind.__name__ for kind in self._handlers)
            raise MessageError(f"{type(message).__name__} has no handler here; these have: {known}")
        return handler(message, *args, **kwargs)
