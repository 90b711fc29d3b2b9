"""What people put into a model's code: ``tap``, ``tags``, ``step`` and ``here``.

Outside a session every one of them returns at once, so that taps can stay in code that ships.
"""

from __future__ import annotations

import functools
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

from graftlab.base.tags import RESERVED_TAGS, TagItems
from graftlab.base.world import Side
from graftlab.errors import TagError
from graftlab.taps.extras import ExtrasWithLayout

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

ambient: ContextVar[TagItems] = ContextVar("graftlab_tags", default=())
# What ``ambient`` was outside of each ``with gl.tags(...)`` that is open in this thread or task, outermost first. Kept
# here and not in the object, which several threads may have entered.
_outside: ContextVar[tuple[TagItems, ...]] = ContextVar("graftlab_tags_outside", default=())


class TapHandler(Protocol):
    """Who is given what taps show."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """See :func:`graftlab.tap`. With ``replace`` a grafted value comes back as a new tensor."""


class RankTapHandler(TapHandler, Protocol):
    """Who takes all taps of a rank, and is told where its steps end."""

    @property
    def moment(self) -> object:
        """Another value in each run, and in each step of it."""

    def step(self) -> None:
        """See :func:`graftlab.step`."""


class TracedCalls(Protocol):
    """What stands for these calls in code that ``torch.compile`` traces; see :mod:`graftlab.taps.compiled`."""

    def tap(
        self,
        name: Any,
        value: Any,
        extras: Any,
        tags: Mapping[str, Any],
        *,
        layout: Any = None,
        replace: bool = False,
        grad: bool = False,
    ) -> Any: ...

    def open_tags(self, tags: Mapping[str, Any]) -> None: ...

    def close_tags(self) -> None: ...

    def step(self) -> None: ...


# The grafter, except while some thread's taps go elsewhere. Only `tap` has to be quick, so it alone is looked up here.
_handler: TapHandler | None = None
_grafter: RankTapHandler | None = None
_here: Here | None = None
_traced: TracedCalls | None = None
# torch.compiler's own function, which a tracer takes for a constant; torch is not imported before there is a grafter.
_is_tracing: Callable[[], bool] = bool
# Whom a thread's taps go to; None while all go to the grafter.
_route: Callable[[int], TapHandler | None] | None = None


@dataclass(frozen=True)
class Here:
    """Where this process stands. ``rank`` and ``world_size`` count within its own side.

    ``vars`` is the namespace in which ``%%graft`` cells run on this rank; it lives as long as the rank, so a function
    given to ``session.run`` can leave its model there for the next one.
    """

    side: Side
    rank: int
    world_size: int
    device: torch.device
    vars: dict[str, Any] = field(repr=False)


def tap(name: str, value: T, /, *, extras: Any = None, layout: Any = None, grad: bool = False, **tags: Any) -> T:
    """Show a tensor to graftlab under a name; returns the tensor to continue with.

    If the plan grafts this tap, ``value`` itself is overwritten with what came from the other side, and returned.
    ``extras`` (picklable) travel with the tensor to the other side's transform. ``tags`` tell this call from others of
    the same name (``layer=3``) and are what filters see. A callable ``value`` is called only when the tap is wanted,
    and is itself returned. A value that is not a tensor is skipped, with one warning per tap.

    ``layout`` says how what this rank holds is made from the whole tensor: as text, ``"shard(dim=-1, mesh='tp')"`` or
    ``"b s h[tp] d"``, or a :class:`graftlab.layouts.Layout`. The whole tensor is then made from all ranks, and the
    other side gets its own part of it. A DTensor needs none; without a layout, the shapes decide.

    With ``grad`` the gradient of what is returned is a tap too, in the backward pass, of the same name and tags and
    with ``kind="grad"``. A graft replaces the gradient that flows on; nothing is written into the tensor that autograd
    gave, which other branches may share. A tensor that needs no gradient, and a callable, have none to show.

    Raises :class:`TagError` for a tag that graftlab sets itself, and :class:`GraftOverlapError` where the plan grafts
    this tap in both directions. Outside a session it does nothing.

    >>> x = torch.ones(2, 3)
    >>> x = gl.tap("attn_out", x, layer=3)
    >>> gl.tap("logits", lambda: x @ x.T)(), gl.here()
    (tensor([[3., 3.],
            [3., 3.]]), None)
    """
    if _handler is None:
        return value
    if _is_tracing():
        return show_traced(name, value, extras, tags, layout=layout, grad=grad)  # type: ignore[no-any-return]
    if layout is not None:
        extras = ExtrasWithLayout(layout, extras)
    grafted: T = _handler.tap(name, value, extras, tags)
    if grad:
        tap_gradient(name, grafted, tags)
    return grafted


_NO_TAGS: Mapping[str, Any] = {}


def show(
    name: str,
    value: Any,
    extras: Any,
    *,
    replace: bool = False,
    grad: bool = False,
    tags: Mapping[str, Any] = _NO_TAGS,
) -> Any:
    """A tap of graftlab's own. With ``replace`` a grafted value comes back as a new tensor."""
    if _handler is None:
        return value
    if _is_tracing():
        return show_traced(name, value, extras, tags, replace=replace, grad=grad)
    shown = _handler.tap(name, value, extras, tags, replace=replace)
    if grad:
        tap_gradient(name, shown, tags)
    return shown


def show_traced(
    name: str,
    value: Any,
    extras: Any,
    tags: Mapping[str, Any],
    *,
    layout: Any = None,
    replace: bool = False,
    grad: bool = False,
) -> Any:
    """A tap in code that is traced now."""
    assert _traced is not None
    return _traced.tap(name, value, extras, tags, layout=layout, replace=replace, grad=grad)


def tap_gradient(name: str, value: Any, tags: Mapping[str, Any], layout: Any = None) -> None:
    """Tap the gradient of a tensor when the backward pass comes to it; of anything else there is none."""
    if not getattr(value, "requires_grad", False) or not hasattr(value, "register_hook"):
        return
    # The backward pass may run in a thread of autograd's own, which knows neither the tags around the tap nor whom
    # the taps of this thread go to.
    thread, shown = threading.get_ident(), {**dict(ambient.get()), **tags, "kind": "grad"}

    def hook(gradient: Any) -> Any:
        handler = tap_handler_of(thread)
        if handler is None:
            return None
        # A DTensor is written in place, which autograd's own tensor must not be.
        own = gradient.clone() if hasattr(gradient, "to_local") else gradient
        replaced = handler.tap(
            name, own, None if layout is None else ExtrasWithLayout(layout, None), shown, replace=True
        )
        return None if replaced is gradient else replaced

    value.register_hook(hook)


def step() -> None:
    """End an iteration: the count of occurrences restarts, and a plan that was edited meanwhile takes effect.

    >>> def loop():
    ...     for _ in range(3):
    ...         gl.tap("x", torch.ones(2))
    ...         gl.step()
    >>> session.run(loop, loop).steps >= 3
    True
    """
    if _grafter is None:
        return
    if _is_tracing():
        assert _traced is not None
        _traced.step()
        return
    _grafter.step()


def here() -> Here | None:
    """Where this process stands in the session; None outside one.

    >>> session.run(target=lambda: gl.here()).target
    [Here(side='target', rank=0, world_size=1, device=device(type='cpu'))]
    >>> gl.here() is None
    True
    """
    return _here


class tags:
    """Add tags to every tap inside: a context manager, and a decorator.

    ``with gl.tags(phase="decode"): ...`` or ``@gl.tags(phase="decode")``. With a function, which is given the decorated
    function's arguments at each call: ``@gl.tags(lambda self, *_: {"layer": self.index})``. Inner tags win over outer
    ones, and a tap's own over both. Each thread, and each asyncio task, has its own.

    Raises :class:`TagError` for tags that graftlab sets itself, and for a generator, which no decorator can follow.

    >>> @gl.tags(lambda layer: {"layer": layer})
    ... def block(layer):
    ...     with gl.tags(phase="decode"):
    ...         gl.tap("x", torch.ones(2))
    >>> session.run(lambda: block(3), lambda: block(3)).frame[["name", "layer", "phase"]].values.tolist()
    [['x', 3, 'decode']]
    """

    def __init__(self, compute: Callable[..., dict[str, Any]] | None = None, /, **given: Any) -> None:
        self._compute = compute
        self._given = given
        _refuse_reserved(given)

    def __enter__(self) -> tags:
        if self._compute is not None:
            raise TagError("gl.tags(function) needs the arguments of a call: use it as a decorator")
        # Without a session nothing is touched, which also keeps a compiled graph whole.
        if _grafter is not None:
            if _is_tracing():
                assert _traced is not None
                _traced.open_tags(self._given)
                return self
            before = ambient.get()
            _outside.set((*_outside.get(), before))
            ambient.set(tuple({**dict(before), **self._given}.items()))
        return self

    def __exit__(self, *_: object) -> None:
        if _grafter is not None and _is_tracing():
            assert _traced is not None
            _traced.close_tags()
            return
        # Empty if this process became a rank after the block was entered.
        if _grafter is not None and (outside := _outside.get()):
            _outside.set(outside[:-1])
            ambient.set(outside[-1])

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TagError(
                f"gl.tags cannot decorate the generator {function.__qualname__}, which runs a piece at a time; "
                f"write `with gl.tags(...)` around the taps in it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def tagged_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                if not self._is_heard():
                    return await function(*args, **kwargs)
                with self._of_call(args, kwargs):
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", tagged_coroutine)

        @functools.wraps(function)
        def tagged(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self._is_heard():
                return function(*args, **kwargs)
            with self._of_call(args, kwargs):
                return function(*args, **kwargs)

        return tagged

    @staticmethod
    def _is_heard() -> bool:
        # Asked of this class, which travels by its name. A decorated function of a notebook travels by value, and takes
        # along the globals that it names as they are there: for it there would never be a grafter.
        return _grafter is not None

    def _of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tags:
        computed = {} if self._compute is None else self._compute(*args, **kwargs)
        if not isinstance(computed, dict):
            raise TagError(f"gl.tags: the function must return a dict of tags, not {type(computed).__name__}")
        return tags(**{**computed, **self._given})


def _refuse_reserved(given: dict[str, Any]) -> None:
    # In words that torch 2.6 can trace.
    taken = [tag for tag in given if tag in RESERVED_TAGS]
    if taken:
        raise TagError(f"gl.tags: {sorted(taken)} are set by graftlab itself; give your tags other names")


def activate(grafter: RankTapHandler, where: Here | None, traced: TracedCalls, is_tracing: Callable[[], bool]) -> None:
    """Make this process a rank. Called by whatever makes ranks, or puts itself before the taps of one.

    ``traced`` stands for these calls where ``is_tracing``, a function that a tracer takes for a constant, says so.
    """
    global _grafter, _handler, _here, _traced, _is_tracing
    _traced, _is_tracing = traced, is_tracing
    _grafter = _handler = grafter
    _here = where
    # Forked children (a data loader's workers) share the rank's memory, and would overwrite what it has sent.
    os.register_at_fork(after_in_child=deactivate)


@contextmanager
def tracing(traced: TracedCalls, is_tracing: Callable[[], bool]) -> Iterator[None]:
    """Let these calls be traced inside, outside of a session too; see :func:`activate`."""
    global _grafter, _handler, _traced, _is_tracing
    before = _grafter, _handler, _traced, _is_tracing
    nobody = _NullHandler()
    _grafter, _handler, _traced, _is_tracing = _grafter or nobody, _handler or nobody, traced, is_tracing
    try:
        yield
    finally:
        _grafter, _handler, _traced, _is_tracing = before


class _NullHandler:
    """Takes what taps show outside of a session, and does nothing with it."""

    moment: object = None

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        return value

    def step(self) -> None:
        return None


def deactivate() -> None:
    """Take no taps in this process any more."""
    global _grafter, _handler
    _grafter = _handler = None


def tap_handler() -> TapHandler | None:
    """Who takes what taps show; None outside a session."""
    return _handler


def tap_handler_of(thread: int) -> TapHandler | None:
    """Who takes what the taps of this thread show; None outside a session."""
    return _grafter if _route is None else _route(thread)


def grafter() -> RankTapHandler | None:
    """Who takes the taps of this rank; None outside a session."""
    return _grafter


def redirect_taps(handler: TapHandler | None, route: Callable[[int], TapHandler | None] | None = None) -> None:
    """Have another take what taps show, in all threads, until told again; None for the grafter. For routing alone.

    ``route`` says whom it gives the taps of a thread to.
    """
    global _handler, _route
    _handler = handler if _grafter is not None and handler is not None else _grafter
    _route = route
