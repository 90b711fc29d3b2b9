"""What people put into a model's code: ``tap``, ``tags``, ``step`` and ``here``.

Outside a session every one of them returns at once, so that taps can stay in code that ships.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextvars import ContextVar, Token
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar

from graftlab.errors import TagError
from graftlab.rows import RESERVED_TAGS

if TYPE_CHECKING:
    import torch

    from graftlab.grafter import Grafter, Tags

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

ambient: ContextVar[Tags] = ContextVar("graftlab_tags", default=())

_grafter: Grafter | None = None
_here: Here | None = None


@dataclass(frozen=True)
class Here:
    """Where this process stands. ``rank`` and ``world_size`` count within its own side.

    ``vars`` is the namespace in which ``%%graft`` cells run on this rank; it lives as long as the rank, so a function
    given to ``session.run`` can leave its model there for the next one.
    """

    side: Literal["baseline", "target"]
    rank: int
    world_size: int
    device: torch.device
    vars: dict[str, Any] = field(repr=False)


def tap(name: str, value: T, /, *, extras: Any = None, **tags: Any) -> T:
    """Show a tensor to graftlab under a name; returns the tensor to go on with.

    Where the plan grafts this tap, ``value`` itself is overwritten with what came from the other side, and returned.
    ``extras`` (picklable) travel with the tensor to the other side's transform. ``tags`` tell this call from others of
    the same name (``layer=3``) and are what filters see. A callable ``value`` is called only when the tap is wanted,
    and is itself returned. A value that is not a tensor is skipped, with one warning a tap.

    Raises :class:`TagError` for a tag that graftlab sets itself, and :class:`GraftOverlapError` where the plan grafts
    this tap in both directions. Outside a session it does nothing.
    """
    if _grafter is None:
        return value
    grafted: T = _grafter.tap(name, value, extras, tags)
    return grafted


def step() -> None:
    """The end of an iteration: occurrences are counted anew, and a plan that was edited meanwhile is in force."""
    if _grafter is not None:
        _grafter.step()


def here() -> Here | None:
    """Where this process stands in the session; None outside one."""
    return _here


class tags:
    """Add tags to every tap inside: a context manager, and a decorator.

    ``with gl.tags(phase="decode"): ...`` or ``@gl.tags(phase="decode")``. With a function, which is given the decorated
    function's arguments at each call: ``@gl.tags(lambda self, *_: {"layer": self.index})``. Inner tags win over outer
    ones, and a tap's own over both. Each thread, and each asyncio task, has its own.
    """

    def __init__(self, compute: Callable[..., dict[str, Any]] | None = None, /, **given: Any) -> None:
        self._compute = compute
        self._given = given
        self._tokens: list[Token[Tags]] = []
        _refuse_reserved(given)

    def __enter__(self) -> tags:
        if self._compute is not None:
            raise TagError("gl.tags(function) needs the arguments of a call: use it as a decorator")
        self._tokens.append(_push(self._given))
        return self

    def __exit__(self, *_: object) -> None:
        ambient.reset(self._tokens.pop())

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def tagged(*args: P.args, **kwargs: P.kwargs) -> R:
            if _grafter is None:
                return function(*args, **kwargs)
            given = self._given
            if self._compute is not None:
                computed = self._compute(*args, **kwargs)
                _refuse_reserved(computed)
                given = {**computed, **given}
            token = _push(given)
            try:
                return function(*args, **kwargs)
            finally:
                ambient.reset(token)

        return tagged


def _push(given: dict[str, Any]) -> Token[Tags]:
    return ambient.set(tuple({**dict(ambient.get()), **given}.items()))


def _refuse_reserved(given: dict[str, Any]) -> None:
    taken = RESERVED_TAGS.intersection(given)
    if taken:
        raise TagError(f"gl.tags: {sorted(taken)} are set by graftlab itself; give your tags other names")


def activate(grafter: Grafter, where: Here) -> None:
    """Make this process a rank. Called once, by whatever makes ranks."""
    global _grafter, _here
    _grafter, _here = grafter, where


def grafter() -> Grafter | None:
    """This rank's grafter; None outside a session."""
    return _grafter
