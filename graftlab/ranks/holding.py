"""What this rank holds: a call, an update, or the end of a script; and the functions that the notebook runs with it."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from graftlab.errors import SessionError
from graftlab.ranks.float32_state import KnownState
from graftlab.ranks.held_call import CallDescription, HeldCall
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.widening import TrialOfRanks
from graftlab.taps.calls import here

UnitKind = Literal["call", "update"]
"""The unit that a script is held in: a call of a model, or an update of its weights."""


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


def held_update() -> HeldUpdate:
    """The update that this rank holds. Raises :class:`SessionError` if it holds none."""
    if not isinstance(_held, HeldUpdate):
        raise SessionError("this rank holds no update")
    return _held


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


def show_inputs() -> None:
    """Tap the inputs of the held update; see :meth:`HeldUpdate.show_inputs`."""
    held_update().show_inputs()


def show_unchanged() -> None:
    """Tap the weights without making the held update; see :meth:`HeldUpdate.show_unchanged`."""
    held_update().show_unchanged()


def take_inputs() -> None:
    """Let repetitions of the held update begin with the taps' results; see :meth:`HeldUpdate.take_inputs`."""
    held_update().take_inputs()


def divide_gradients(by: int, names: Collection[str]) -> None:
    """Divide gradients of the held update; see :meth:`HeldUpdate.divide_gradients`."""
    held_update().divide_gradients(by, names)


def keep_inputs() -> None:
    """Let the script continue with the inputs that :func:`take_inputs` set."""
    held_update().keep_inputs()


def take_weights() -> None:
    """Tap the weights of the held call's models, and repeat it from now on with the taps' results."""
    held_call().take_weights()


def try_backward() -> str | None:
    """Include a backward pass in each repetition; see :meth:`HeldCall.try_backward`."""
    return held_call().try_backward()


def drop_backward() -> None:
    """Repeat only the forward pass again."""
    held_call().drop_backward()


def call_numbers() -> dict[str, torch.Tensor] | None:
    """The tensors that the held call may read; see :meth:`HeldCall.numbers`."""
    return held_call().numbers()


def call_dtypes() -> dict[str, torch.dtype]:
    """The dtypes of what the held call may read; see :meth:`HeldCall.dtypes`."""
    return held_call().dtypes()


def known_state() -> KnownState:
    """What is known of the state that the held call may read; see :meth:`HeldCall.known_state`."""
    return held_call().known_state()


def note_equal_call() -> None:
    """Note that the held call is bit-equal to the other side's; see :meth:`HeldCall.note_equal`."""
    held_call().note_equal()


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


def widen_operators() -> str | None:
    """Repeat the held call with operators in float64; see :meth:`HeldCall.widen_operators`."""
    return held_call().widen_operators()


def left_in_16_bits() -> list[str]:
    """The dtypes to which the held call still rounded; see :attr:`HeldCall.left_in_16_bits`."""
    return held_call().left_in_16_bits


def own_rounding() -> tuple[str, float] | None:
    """How far rounding moves the held call's results; see :meth:`HeldCall.own_rounding`."""
    return held_call().own_rounding()


def narrow_call() -> None:
    """Repeat the held call with its own numbers again."""
    held_call().narrow()


def release_call() -> None:
    """End the held call or update: its script continues with the call itself."""
    _held_here().end()


def drop_call() -> None:
    """End the held call, if there is one, and forget it: to end it again would restore its state once more."""
    global _held
    held, _held = _held, None
    if isinstance(held, HeldCall):
        held.end()
