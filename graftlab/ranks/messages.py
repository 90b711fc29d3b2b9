"""What the notebook and a rank say to each other: one frozen dataclass a message, pickled, one frame each.

Rows are the exception: they are the many, and travel as the JSON line that is also written to disk. The first byte of
a frame tells the two apart.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any, Literal

from graftlab.base.world import RunInfo
from graftlab.plan.plan import GraftPlan
from graftlab.rows.encoding import encode
from graftlab.rows.schema import Row

_MESSAGE = b"m"
_ROW = b"r"


# ---- from the notebook to a rank ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Work:
    """What a rank is asked to do: call a shipped function, evaluate an expression, or execute a cell.

    ``body`` is a shipped function with its arguments for ``"call"``, source text otherwise; ``filename`` is how that
    source is called in tracebacks.
    """

    kind: Literal["call", "eval", "exec"]
    body: bytes | str
    filename: str = ""


@dataclass(frozen=True)
class RunRequest:
    info: RunInfo
    plan: GraftPlan
    work: Work


@dataclass(frozen=True)
class PlanUpdate:
    plan: GraftPlan


@dataclass(frozen=True)
class Query:
    """A question that is answered beside a run: ``topic`` names a method of the rank's desk."""

    number: int
    topic: Literal["stacks", "kept", "kept_input", "kept_map", "kept_tags"]
    arguments: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Shutdown:
    pass


# ---- from a rank to the notebook ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hello:
    """The rank is ready. ``notes`` are things the person should know, such as a backend that was replaced."""

    pid: int
    device: str
    backend: str
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Output:
    """Whole lines that the rank printed."""

    text: str


@dataclass(frozen=True)
class TapSeen:
    """A tag set that the rank reached for the first time, wanted by some filter or not. Plain values only."""

    tags: dict[str, Any]


@dataclass(frozen=True)
class PlanAdopted:
    """The plan of this version is in force on this rank from this step on."""

    version: int
    step: int


@dataclass(frozen=True)
class Failure:
    """An exception that ended a rank's work. ``traceback`` starts at the user's own code."""

    kind: str
    message: str
    traceback: str
    pickled: bytes | None = None


@dataclass(frozen=True)
class RunDone:
    """This rank's work of the run has ended, with a packed result or a failure."""

    run: int
    result: bytes | None
    failure: Failure | None


@dataclass(frozen=True)
class RunSettled:
    """The run has ended everywhere and all rows of it are sent. ``next_step`` is the first unused step number."""

    run: int
    next_step: int


@dataclass(frozen=True)
class Reply:
    number: int
    value: Any
    error: str | None = None


def pack(message: object) -> bytes:
    return _MESSAGE + pickle.dumps(message, protocol=pickle.HIGHEST_PROTOCOL)


def pack_row(row: Row) -> bytes:
    return _ROW + encode(row)


def unpack(frame: bytes) -> object:
    """A message, or the bytes of a row's line. Only for frames of this session's own processes."""
    return frame[1:] if frame[:1] == _ROW else pickle.loads(memoryview(frame)[1:])
