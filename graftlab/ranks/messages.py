"""What the notebook and a rank say to each other: one tagged struct a message, as msgpack, one frame each.

A message is checked against its type when it arrives, and reading one never runs anything. What the notebook's author
sends to their own ranks, or gets back from them, may be any object and is pickled: those parts are fields of type
:data:`Pickled`, stay bytes here, and are opened by whoever may trust the sender.

Rows are the exception: they are the many, and travel as the JSON line that is also written to disk. The first byte of
a frame tells the two apart.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Concatenate, Generic, Literal, ParamSpec, TypeVar

import msgspec

from graftlab.base import wire
from graftlab.base.world import RunInfo
from graftlab.errors import MessageError
from graftlab.exchange.status_page import WireStatus
from graftlab.plan.wire import WirePlan
from graftlab.rows.encoding import encode
from graftlab.rows.schema import Row

Pickled = bytes
"""A value that :mod:`graftlab.base.shipping` packed. To open it runs what its sender says."""

M = TypeVar("M", bound=msgspec.Struct)
P = ParamSpec("P")
R = TypeVar("R")

# See graftlab.base.tags.plain.
_PLAIN = frozenset({str, int, float, bool, type(None)})

_MESSAGE = b"m"
_ROW = b"r"


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """The root of all messages; on the wire each is tagged with its class's name."""


# ---- from the notebook to a rank ------------------------------------------------------------------------------------


class Call(Message, frozen=True):
    """Call a function with arguments."""

    packed: Pickled


class Evaluate(Message, frozen=True):
    """Evaluate an expression where cells run; ``filename`` is what tracebacks call it."""

    source: str
    filename: str


class Execute(Message, frozen=True):
    """Execute a cell; ``filename`` is what tracebacks call it."""

    source: str
    filename: str


class JobCode(Message, frozen=True):
    """What the process does by itself: it is a job that nobody but its own user started."""


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
    """The plans that follow are somebody's for a while: should the notebook go away, this one is in force again.

    Meanwhile no rank gets more than a step ahead. With None there is no such plan any more, what was recorded meanwhile
    is to be forgotten, and ``version`` is that of the plan that comes after theirs.
    """

    plan: WirePlan | None
    version: int = 0


class Interrupt(Message, frozen=True):
    """Raise KeyboardInterrupt in the code of this run, even before it begins. For a rank that was seen idle.

    One that was seen at work gets a signal instead, which also ends waits in C.
    """

    run: int


class Shutdown(Message, frozen=True):
    """End."""


class Contact(Message, frozen=True):
    """How other ranks reach this one, where each makes its own connections; see :mod:`graftlab.jobs.linking`.

    ``socket`` is a path on its machine, and ``nonce`` what can be read in its memory by whoever shares that; ``name``
    is what it is called at ``port`` of ``address``. Sent to the notebook by the rank, and by the notebook to others.
    """

    world_rank: int
    socket: str
    nonce: bytes
    name: bytes
    address: str
    port: int


class Contacts(Message, frozen=True):
    """These ranks are there. One that was there before is another process now."""

    contacts: tuple[Contact, ...]


class WorldRequest(Message, frozen=True):
    """All ranks are there: connect to each of them anew, and report :class:`LinkReport`.

    What is connected is called a world, by number. A rank that is at work goes on in the world that it has, until it
    hears :class:`WorldStart` and comes to the end of a step; one that waits begins with a :class:`RunRequest`.
    """

    world: int
    info: RunInfo
    plan: WirePlan


class WorldStart(Message, frozen=True):
    """All ranks are connected in this world: move there at the end of the step."""

    world: int


class WaitReason(Message, frozen=True):
    """What a rank that waits is waiting for, in words."""

    what: str


# ---- from a rank to the notebook ------------------------------------------------------------------------------------


class Hello(Message, frozen=True):
    """The rank is ready."""

    pid: int


class LinkReport(Message, frozen=True):
    """The rank has a connection to every other in this world: with which it shares memory, and which are behind TCP."""

    world: int
    memory: tuple[int, ...]
    tcp: tuple[int, ...]


class WorldSwitch(Message, frozen=True):
    """The rank, which was at work, goes on in this world, from this step on."""

    world: int
    step: int


class AskWaitReason(Message, frozen=True):
    """The rank will wait no longer, and wants to know for what it has waited: answered by :class:`WaitReason`."""


class StatusUpdate(Message, frozen=True):
    """Where the rank is, for a notebook that cannot look into its memory."""

    where: WireStatus


class Output(Message, frozen=True):
    """Whole lines that the rank printed."""

    text: str


class LiveOutput(Message, frozen=True):
    """The lines that a program writes over and over, as they stand on this stream; none when it has ended."""

    stream: int
    text: str


class DisplayData(Message, frozen=True):
    """What the rank's code displays: a representation a MIME type, as text, images in base64."""

    data: dict[str, str]


class TapSeen(Message, frozen=True):
    """A tag set that the rank reached for the first time, wanted by some filter or not. Plain values only."""

    tags: dict[str, Any]

    def __post_init__(self) -> None:
        _require_plain(self.tags)


class PlanAdopted(Message, frozen=True):
    """The plan of this version is in force on this rank from this step on."""

    version: int
    step: int


class Failure(Message, frozen=True):
    """An exception that ended a rank's work. ``traceback`` starts at the user's own code.

    ``exception`` is the object itself, where it can travel. It lets the notebook raise the same class, and to open it
    runs what the rank says: only for processes of the notebook's own user.
    """

    kind: str
    message: str
    traceback: str
    exception: Pickled | None = None


class RunDone(Message, frozen=True):
    """This rank's work of the run has ended, with a result or a failure."""

    run: int
    result: Pickled | None
    failure: Failure | None


class RunSettled(Message, frozen=True):
    """The run has ended everywhere and all rows of it are sent. ``next_step`` is the first unused step number."""

    run: int
    next_step: int


# ---- questions to a rank, answered while its model computes, and their answers ---------------------------------------


class Stacks(Message, frozen=True):
    """Where the rank's threads are in the code."""

    text: str


class KeptTags(Message, frozen=True):
    """The tags of every pair that is kept, oldest first, and of the newest of each tap whose newest is not held.

    Plain values only.
    """

    tags: list[dict[str, Any]]
    missing: list[dict[str, Any]] = []

    def __post_init__(self) -> None:
        for tags in (*self.tags, *self.missing):
            _require_plain(tags)


class KeptValue(Message, frozen=True):
    """What was asked of a kept pair; None where no such pair is kept."""

    packed: Pickled | None


class PostMortem(Message, frozen=True):
    """What a debugger says of the frames of the last failure."""

    text: str


class Acknowledgement(Message, frozen=True):
    """It will be done."""


class SelfGraftResult(Message, frozen=True):
    """A :class:`graftlab.grafting.self_graft.SelfGraft`; None as long as its last step has not ended."""

    packed: Pickled | None


class Refusal(Message, frozen=True):
    """Why there is no answer."""

    error: str


Answer = Stacks | KeptTags | KeptValue | PostMortem | Acknowledgement | SelfGraftResult | Refusal


class AskStacks(Message, frozen=True):
    """Where are the rank's threads in the code? Answered by :class:`Stacks`."""


class AskPostMortem(Message, frozen=True):
    """What does a debugger say to this command, in the frames of the last failure? Runs what the command says."""

    command: str


class AskKeptTags(Message, frozen=True):
    """Which pairs are kept? With ``failed`` also where the transform failed, which leaves an input but no pair.

    Answered by :class:`KeptTags`; the questions that follow by :class:`KeptValue`.
    """

    failed: bool


class AskKept(Message, frozen=True):
    """The root of what can be asked of the newest pair with this name and these plain tags."""

    name: str
    tags: dict[str, Any]

    def __post_init__(self) -> None:
        _require_plain(self.tags)


class AskKeptPair(AskKept, frozen=True):
    """Both tensors, ``(baseline, target)``."""


class AskKeptInput(AskKept, frozen=True):
    """The :class:`graftlab.grafting.kept.KeptPair`, also of a transform that failed."""


class AskKeptMap(AskKept, frozen=True):
    """The :class:`graftlab.diffs.maps.DifferenceMap` over these two dimensions (None: over two that suit)."""

    dims: tuple[int, int] | None


class RunSelfGraft(Message, frozen=True):
    """Take these passes of a self-graft, each of so many steps, once the plan of this version is in force.

    See :class:`graftlab.grafting.self_graft_in_steps.SelfGraftInSteps`. Answered by
    :class:`Acknowledgement`. For jobs, whose code a session cannot call again.
    """

    version: int
    passes: tuple[Literal["record", "repeat", "graft", "drift", "rest"], ...]
    steps: Annotated[int, msgspec.Meta(ge=1)] = 1
    dtypes: dict[str, str] = {}
    keep: tuple[str, ...] = ()
    budget: int = 0


class AskSelfGraft(Message, frozen=True):
    """What did these passes come to? Answered by :class:`SelfGraftResult`."""


Question = (
    AskStacks | AskPostMortem | AskKeptTags | AskKeptPair | AskKeptInput | AskKeptMap | RunSelfGraft | AskSelfGraft
)


class Query(Message, frozen=True):
    """A question, with the number under which its answer is awaited."""

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
    | WorldRequest
    | WorldStart
    | WaitReason
)
FromRank = (
    Hello
    | Contact
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


def pack(message: ToRank | FromRank) -> bytes:
    return _MESSAGE + wire.encode(message)


def pack_row(row: Row) -> bytes:
    return _ROW + encode(row)


def unpack_to_rank(frame: bytes) -> ToRank:
    """What the notebook sent. Raises :class:`MessageError` for what is no message to a rank."""
    message: ToRank = _to_rank.decode(_body(frame))
    return message


def unpack_from_rank(frame: bytes) -> FromRank | bytes:
    """What a rank sent: a message, or a row's line as bytes. Raises :class:`MessageError` for anything else."""
    if frame[:1] == _ROW:
        return frame[1:]
    message: FromRank = _from_rank.decode(_body(frame))
    return message


def _body(frame: bytes) -> memoryview:
    if frame[:1] != _MESSAGE:
        raise MessageError(f"a frame that begins with {frame[:1]!r} is no message")
    return memoryview(frame)[1:]


def _require_plain(tags: dict[str, Any]) -> None:
    if not _PLAIN.issuperset(map(type, tags.values())):
        odd = next(tag for tag, value in tags.items() if type(value) not in _PLAIN)
        raise ValueError(f"tag {odd!r} has no plain value but a {type(tags[odd]).__name__}")


class Dispatch(Generic[P, R]):
    """A table from the type of a message to its handler. A handler also gets what the dispatch is called with."""

    def __init__(self) -> None:
        self._handlers: dict[type[msgspec.Struct], Callable[..., R]] = {}

    def on(self, kind: type[M], handler: Callable[Concatenate[M, P], R]) -> None:
        self._handlers[kind] = handler

    def __call__(self, message: msgspec.Struct, *args: P.args, **kwargs: P.kwargs) -> R:
        """Raises :class:`MessageError` for a message that is not in the table."""
        handler = self._handlers.get(type(message))
        if handler is None:
            known = ", ".join(kind.__name__ for kind in self._handlers)
            raise MessageError(f"{type(message).__name__} is not handled here; what is: {known}")
        return handler(message, *args, **kwargs)
