"""The calls for model code: ``tap``, ``tags``, ``step`` and ``here``.

Outside a session each of them returns at once, so that taps can stay in production code.
"""

from __future__ import annotations

import functools
import inspect
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ParamSpec, Protocol, TypeVar, cast

from graftlab.base.tags import RESERVED_TAGS
from graftlab.base.world import Side
from graftlab.errors import TagError
from graftlab.taps.ambient_tags import ambient, close_block, in_generators, leave_out_suspended, open_block
from graftlab.taps.extras import ExtrasWithLayout

if TYPE_CHECKING:
    import torch


T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")


class TapHandler(Protocol):
    """Receives what taps show."""

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        """See :func:`graftlab.tap`. With ``replace`` a grafted value is returned as a new tensor."""


class RankTapHandler(TapHandler, Protocol):
    """Receives all taps of a rank, and the ends of its steps."""

    @property
    def moment(self) -> object:
        """A value that changes with each run and each step."""

    def may_take(self, path: str) -> bool:
        """Whether taps whose names begin with ``path`` may have an effect; if not, they need not be shown."""

    def step(self) -> None:
        """See :func:`graftlab.step`."""


class TracedCalls(Protocol):
    """Replaces these calls in code that ``torch.compile`` traces; see :mod:`graftlab.taps.compiled`."""

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


# The grafter, except while some thread's taps are routed elsewhere. Kept apart because `tap` must be fast.
_handler: TapHandler | None = None
_grafter: RankTapHandler | None = None
_here: Here | None = None
_traced: TracedCalls | None = None
# torch.compiler's own function, which a tracer treats as a constant; torch is not imported before a grafter exists.
_is_tracing: Callable[[], bool] = bool
# False while the plan in force can match no tap, whatever its name. Graphs that are compiled meanwhile contain none; a
# tracer guards on it, so code is compiled again, once, when it changes.
_are_wanted = True
# Returns the tap handler of a thread; None while all taps go to the grafter.
_route: Callable[[int], TapHandler | None] | None = None


@dataclass(frozen=True)
class Here:
    """This process's place in the session. ``rank`` and ``world_size`` count within its side.

    ``vars`` is the namespace in which ``%%graft`` cells run on this rank. It exists as long as the rank, so a function
    passed to ``session.run`` can leave its model there for the next one. A place that a rank returns to the notebook
    has no variables.
    """

    side: Side
    rank: int
    world_size: int
    device: torch.device
    vars: dict[str, Any] = field(repr=False)

    def __getstate__(self) -> dict[str, Any]:
        # The variables are the rank's: a process that receives the place gets none of them.
        return {**self.__dict__, "vars": {}}


def tap(name: str, value: T, /, *, extras: Any = None, layout: Any = None, grad: bool = False, **tags: Any) -> T:
    """Show a tensor to graftlab under a name; returns the tensor to continue with.

    If the plan grafts this tap, ``value`` itself is overwritten with the other side's tensor, and returned. ``extras``
    (picklable) travel with the tensor to the other side's transform. ``tags`` distinguish this call from others of the
    same name (``layer=3``), and filters see them. A callable ``value`` is called only if the plan matches the tap, and
    is itself returned. A value that is not a tensor is skipped, with one warning per tap.

    ``layout`` describes how this rank's tensor is made from the whole tensor: as text, ``"shard(dim=-1, mesh='tp')"``
    or ``"b s h[tp] d"``, or as a :class:`graftlab.layouts.Layout`. The whole tensor is then joined from all ranks, and
    the other side gets its part of it. A DTensor needs no layout; for other tensors the default is to go by shape.

    With ``grad`` the gradient of the returned tensor is a tap too, in the backward pass, with the same name and tags
    and ``kind="grad"``. A graft replaces the gradient that flows upstream; autograd's own tensor, which other branches
    may share, is not modified. A callable, or a tensor that does not require a gradient, has no gradient tap.

    Raises :class:`TagError` for a tag that graftlab sets itself, and :class:`GraftOverlapError` if the plan grafts this
    tap in both directions. Outside a session it does nothing.

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
    if in_generators:
        leave_out_suspended()
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
    """Tap a value from graftlab's own code. With ``replace`` a grafted value is returned as a new tensor."""
    if _handler is None:
        return value
    if _is_tracing():
        return show_traced(name, value, extras, tags, replace=replace, grad=grad)
    if in_generators:
        leave_out_suspended()
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
    """Tap a value in code that is being traced."""
    assert _traced is not None
    return _traced.tap(name, value, extras, tags, layout=layout, replace=replace, grad=grad)


def tap_gradient(name: str, value: Any, tags: Mapping[str, Any], layout: Any = None) -> None:
    """Tap a tensor's gradient when the backward pass reaches it; do nothing for a value without a gradient."""
    if not getattr(value, "requires_grad", False) or not hasattr(value, "register_hook"):
        return
    # The backward pass may run in an autograd thread, which has neither the tags around the tap nor this thread's
    # tap handler.
    thread, shown = threading.get_ident(), {**dict(ambient.get()), **tags, "kind": "grad"}

    def hook(gradient: Any) -> Any:
        handler = tap_handler_of(thread)
        if handler is None:
            return None
        # A graft writes into a DTensor in place, and autograd's own tensor must not change.
        own = gradient.clone() if hasattr(gradient, "to_local") else gradient
        replaced = handler.tap(
            name, own, None if layout is None else ExtrasWithLayout(layout, None), shown, replace=True
        )
        return None if replaced is gradient else replaced

    value.register_hook(hook)


def step() -> None:
    """End a step: occurrence counts restart, and an edited plan takes effect.

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
    """Return this process's place in the session; None outside a session.

    >>> session.run(target=lambda: gl.here()).target
    [Here(side='target', rank=0, world_size=1, device=device(type='cpu'))]
    >>> gl.here() is None
    True
    """
    return _here


class tags:
    """Add tags to every tap inside: a context manager, and a decorator.

    ``with gl.tags(phase="decode"): ...`` or ``@gl.tags(phase="decode")``. A function computes tags from the decorated
    function's arguments at each call: ``@gl.tags(lambda self, *_: {"layer": self.index})``. Inner tags take precedence
    over outer ones, and a tap's own tags over both. Tags are separate for each thread and each asyncio task. In a
    generator they apply while it runs, and not to its caller's taps between two values, unless
    ``contextlib.contextmanager`` makes it a context manager.

    Raises :class:`TagError` for tags that graftlab sets itself, and for a generator, which cannot be decorated.

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
        # Outside a session nothing is changed, which also avoids breaks in a compiled graph.
        if _grafter is not None:
            if _is_tracing():
                assert _traced is not None
                _traced.open_tags(self._given)
                return self
            open_block(tuple(self._given.items()), sys._getframe(1))
        return self

    def __exit__(self, *_: object) -> None:
        if _grafter is not None and _is_tracing():
            assert _traced is not None
            _traced.close_tags()
            return
        if _grafter is not None:
            close_block(sys._getframe(1))

    def __call__(self, function: Callable[P, R]) -> Callable[P, R]:
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise TagError(
                f"gl.tags cannot decorate the generator {function.__qualname__}, which runs in pieces; "
                f"write `with gl.tags(...)` around the taps in it"
            )
        if inspect.iscoroutinefunction(function):

            @functools.wraps(function)
            async def tagged_coroutine(*args: P.args, **kwargs: P.kwargs) -> Any:
                if not self._in_session():
                    return await function(*args, **kwargs)
                with self._of_call(args, kwargs):
                    return await function(*args, **kwargs)

            return cast("Callable[P, R]", tagged_coroutine)

        @functools.wraps(function)
        def tagged(*args: P.args, **kwargs: P.kwargs) -> R:
            if not self._in_session():
                return function(*args, **kwargs)
            with self._of_call(args, kwargs):
                return function(*args, **kwargs)

        return tagged

    @staticmethod
    def _in_session() -> bool:
        # A method of this class, which is pickled by reference. A decorated function from a notebook is pickled by
        # value, with the notebook's values of the globals that it names, so it would never see a grafter.
        return _grafter is not None

    def _of_call(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tags:
        computed = {} if self._compute is None else self._compute(*args, **kwargs)
        if not isinstance(computed, dict):
            raise TagError(f"gl.tags: the function must return a dict of tags, not {type(computed).__name__}")
        return tags(**{**computed, **self._given})


def _refuse_reserved(given: dict[str, Any]) -> None:
    # Written so that torch 2.6 can trace it.
    taken = [tag for tag in given if tag in RESERVED_TAGS]
    if taken:
        raise TagError(f"gl.tags: {sorted(taken)} are set by graftlab itself; give your tags other names")


def activate(grafter: RankTapHandler, where: Here | None, traced: TracedCalls, is_tracing: Callable[[], bool]) -> None:
    """Make this process a rank, whose taps go to ``grafter``.

    ``traced`` replaces these calls while ``is_tracing``, a function that a tracer treats as a constant, returns True.
    """
    global _grafter, _handler, _here, _traced, _is_tracing, _are_wanted
    _traced, _is_tracing = traced, is_tracing
    _grafter = _handler = grafter
    _are_wanted = True
    _here = where
    # Forked children (a data loader's workers) share the rank's memory, and would overwrite tensors that it has sent.
    os.register_at_fork(after_in_child=deactivate)


@contextmanager
def tracing(traced: TracedCalls, is_tracing: Callable[[], bool]) -> Iterator[None]:
    """Let a tracer see these calls inside the block, even outside a session; see :func:`activate`."""
    global _grafter, _handler, _traced, _is_tracing, _are_wanted
    before = _grafter, _handler, _traced, _is_tracing, _are_wanted
    ignored = _NullHandler()
    _grafter, _handler, _traced, _is_tracing = _grafter or ignored, _handler or ignored, traced, is_tracing
    _are_wanted = True
    try:
        yield
    finally:
        _grafter, _handler, _traced, _is_tracing, _are_wanted = before


class _NullHandler:
    """Ignores what taps show outside a session."""

    moment: object = None

    def may_take(self, path: str) -> bool:
        return False

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        return value

    def step(self) -> None:
        return None


def deactivate() -> None:
    """Make this process ignore its taps from now on."""
    global _grafter, _handler
    _grafter = _handler = None


def tap_handler() -> TapHandler | None:
    """Return the tap handler in use; None outside a session."""
    if not _is_tracing() and in_generators:
        leave_out_suspended()
    return _handler


def tap_handler_of(thread: int) -> TapHandler | None:
    """Return the tap handler of this thread; None outside a session."""
    if in_generators:
        leave_out_suspended()
    return _grafter if _route is None else _route(thread)


def may_take(path: str) -> bool:
    """Whether the tap handler in use may do something with a tap whose name begins with ``path``."""
    if _handler is None:
        return False
    return _handler is not _grafter or _grafter.may_take(path)


def want_taps(handler: RankTapHandler, wanted: bool) -> None:
    """Set whether graphs that are compiled from now on contain taps: not if this grafter's plan can match none.

    A recorder in the grafter's place takes them whatever the plan.
    """
    global _are_wanted
    _are_wanted = wanted or handler is not _grafter


def are_wanted() -> bool:
    """Whether graphs contain taps: where the plan may match one, or something other than the grafter takes them."""
    return _are_wanted or _route is not None


def is_tracing() -> bool:
    """Whether a compiler is tracing this code."""
    return _is_tracing()


def grafter() -> RankTapHandler | None:
    """Return this rank's grafter; None outside a session."""
    return _grafter


def redirect_taps(handler: TapHandler | None, route: Callable[[int], TapHandler | None] | None = None) -> None:
    """Send the taps of all threads to ``handler``, or to the grafter if it is None. Only for :mod:`.routing`.

    ``route`` returns the tap handler of a thread.
    """
    global _handler, _route
    _handler = handler if _grafter is not None and handler is not None else _grafter
    _route = route
