"""What this rank holds: a call, an update, or the end of a script; and the functions that the notebook runs with it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, TypeVar

import torch

from graftlab.errors import SessionError
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_call import HeldCall
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.widening import TrialOfRanks
from graftlab.taps.calls import here

UnitKind = Literal["call", "update"]
"""The unit that a script is held in: a call of a model, or an update of its weights."""
R = TypeVar("R")


@dataclass(frozen=True)
class ScriptEnd:
    """A rank's report that its script has ended, instead of a held call; ``failure`` is the exception, if any."""

    failure: str | None = None


_held: HeldCall | HeldUpdate | ScriptEnd | None = None


def hold(call: HeldCall | HeldUpdate | ScriptEnd) -> None:
    """Make this the call or the update that the functions below repeat, or report the script's end from now on."""
    global _held
    _held = call


def held_call() -> HeldCall:
    """The call that this rank holds. Raises :class:`SessionError` if it holds none."""
    if not isinstance(_held, HeldCall):
        raise SessionError("this rank holds no call")
    return _held


@dataclass(frozen=True)
class OfCall(Generic[R]):
    """A function that a session runs: calls this method of the call that the rank holds, and returns its result.

    Raises :class:`SessionError` if the rank holds none.
    """

    method: Callable[[HeldCall], R]

    def __call__(self) -> R:
        return self.method(held_call())


@dataclass(frozen=True)
class OfUpdate(Generic[R]):
    """Like :class:`OfCall`, for the update that the rank holds."""

    method: Callable[[HeldUpdate], R]

    def __call__(self) -> R:
        if not isinstance(_held, HeldUpdate):
            raise SessionError("this rank holds no update")
        return self.method(_held)


def _held_here() -> HeldCall | HeldUpdate:
    return _held if isinstance(_held, HeldUpdate) else held_call()


def describe_call() -> CallDescription | UpdateDescription | ScriptEnd:
    """Describe the held call, see :meth:`HeldCall.describe`, the held update, or how the script has ended."""
    if isinstance(_held, HeldCall):
        return _held.describe(reports_failure=_is_alone())
    return _held if isinstance(_held, ScriptEnd) else _held_here().describe()


def describe_result() -> CallDescription | UpdateDescription | ScriptEnd:
    """Describe the result of the held call alone; otherwise like :func:`describe_call`."""
    return _held.describe_result(reports_failure=_is_alone()) if isinstance(_held, HeldCall) else describe_call()


def _is_alone() -> bool:
    """Whether this rank's side has no other rank, which would wait for one whose call raises."""
    me = here()
    return me is None or me.world_size == 1


def prepare_once(backward: bool) -> tuple[UnitKind, int] | ScriptEnd:
    """Install the taps for one run of the held call or update; returns its kind and number."""
    if isinstance(_held, ScriptEnd):
        return _held
    held = _held_here()
    held.prepare(backward)
    return held.unit


def held_unit() -> tuple[UnitKind, int] | ScriptEnd:
    """The kind and number of the held call or update; or how the script has ended."""
    return _held if isinstance(_held, ScriptEnd) else _held_here().unit


def repeat_call() -> dict[str, torch.Tensor]:
    """Repeat the held call or update; returns the tensors of its result by their paths."""
    return _held_here()()


def widen_call(
    numbers: Sequence[Mapping[str, torch.Tensor]],
    rounded: Mapping[str, torch.dtype],
    trial: str,
    ranks: int,
    kept: Collection[str] = (),
    rounded_otherwise: Collection[str] = (),
) -> str | None:
    """Repeat the held call in float32; see :meth:`HeldCall.widen`. ``numbers`` has those of each rank of this side, and
    ``trial`` is the path of a file in which its ranks, if it has several, agree. ``ranks`` is the session's number.
    """
    me = here()
    if me is None or me.world_size == 1:
        return held_call().widen(numbers[0], rounded, None, ranks, kept, rounded_otherwise)
    of_ranks = TrialOfRanks(trial, me.rank, me.world_size)
    return held_call().widen(numbers[me.rank], rounded, of_ranks, ranks, kept, rounded_otherwise)


def widen_operators(
    numbers: Mapping[str, torch.Tensor],
    rounded: Mapping[str, torch.dtype],
    kept: Collection[str] = (),
    rounded_otherwise: Collection[str] = (),
) -> str | None:
    """Repeat the held call in float64, operator by operator; see :meth:`HeldCall.widen_operators`."""
    return held_call().widen_operators(numbers, rounded, kept, rounded_otherwise)


def release_call() -> None:
    """End the held call or update: its script continues with the call itself."""
    _held_here().end()


def drop_call() -> None:
    """End the held call, if there is one, and forget it: to end it again would restore its state once more."""
    global _held
    held, _held = _held, None
    if isinstance(held, HeldCall):
        held.end()
