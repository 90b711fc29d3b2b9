"""Taps inside code that ``torch.compile`` or ``torch.export`` traces: custom operators that cause no graph break.

A compiler must not drop or reorder taps. So each operator writes into a clock, one tensor that outlives all graphs, and
compilers keep operators that mutate their inputs, in order. The clock's number also identifies the open
``with gl.tags(...)`` blocks of the graph. It flows through the graph like any other tensor, so a part that activation
checkpointing repeats sees the same tags as the first time. While the plan in force can match no tap, a graph has none.

Names and tags are stored as text, not as indices into a table of this process, so that a compiled graph from a cache,
or an exported program in a file, stays valid.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import itertools
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from graftlab.base.sources import parse_expression
from graftlab.base.tags import COMPILED
from graftlab.errors import GraphError, TagError, warn
from graftlab.filters.expressions import compile_filter
from graftlab.taps import calls
from graftlab.taps.ambient_tags import ambient
from graftlab.taps.backward import is_backward
from graftlab.taps.extras import ExtrasWithLayout

logger = logging.getLogger(__name__)

# The form of absent extras.
_NO_EXTRAS: list[str] = []
# Marks a tensor among extras.
_TENSOR = "*"
# Marks a complex tensor, which is passed to inductor as its real and imaginary parts.
_COMPLEX = "**"


class _OpenTags(NamedTuple):
    """The graph's open tags at one number of the clock."""

    outer: int
    tags: tuple[tuple[str, Any], ...]
    thread: int


class _GradientOrigin(NamedTuple):
    """The tags and the thread of a forward pass's tap, for the tap of the gradient."""

    tags: dict[str, Any]
    thread: int


# Which taps are traced; None for all.
_choice: str | None = None
# Prefix of a choice that is a set of names and not an expression.
_SET = "#"
_sets: dict[tuple[str, ...], int] = {}
_by_choice: dict[str, frozenset[str]] = {}
_is_chosen: Callable[[str, tuple[str, ...], str], bool]

_lock = threading.Lock()
_open: list[_OpenTags] = [_OpenTags(0, (), 0)]
_numbers: dict[_OpenTags, int] = {}
# By the number that flows through the graph. The oldest are dropped; their backward pass is long over.
_shown: dict[int, _GradientOrigin] = {}
_SHOWN_LIMIT = 100_000
_shown_numbers: dict[tuple[tuple[tuple[str, Any], ...], int], int] = {}
_places = itertools.count()
# The taps that are in no graph because the plan in force matches nothing: name, tags around them, and own tags.
_left_out: dict[tuple[str, tuple[tuple[str, Any], ...], tuple[str, ...]], None] = {}
_LEFT_OUT_LIMIT = 10_000
# Set by a tracer. Whether graphs of this process end steps, so that a plan may change while one runs.
_has_steps = False
# Set by a tracer. The tags of the open blocks around taps that are left out.
_around: tuple[tuple[str, ...], ...] = ()
# Set while the taps of a compilation are given, whatever the plan.
_is_given = False
_warned_of: set[str] = set()

# A model's own call may be what imports this module, in inference mode or with another default device.
with torch.inference_mode(False):
    clock = torch.zeros((), dtype=torch.int64, device="cpu")


# ---- calls that are traced ------------------------------------------------------------------------------------------


def tap(
    name: Any,
    value: Any,
    extras: Any,
    tags: Mapping[str, Any],
    *,
    layout: Any = None,
    replace: bool = False,
    grad: bool = False,
) -> Any:
    """Tap a value as :func:`graftlab.tap` does, in a graph. With ``replace`` a graft does not write into ``value``.

    Raises :class:`TagError` for values that a graph cannot contain: a tag other than text, a number, a bool or None,
    extras other than a tensor or a dict of tensors and such values, and a layout other than text.
    """
    if not isinstance(name, str):
        raise TagError("gl.tap: the name must be a string")
    if layout is not None and not isinstance(layout, str):
        raise TagError(f"layout of gl.tap({name!r}): in compiled code a layout is given as text")
    if _choice is not None and not _is_chosen(name, tuple(as_text(f"gl.tap({name!r})", tags)), _choice):
        return value
    # The gradient may be computed under a later plan.
    if not grad and _leaves_out():
        own = as_text(f"gl.tap({name!r})", tags)
        torch.ops.graftlab.left_out(clock, name, [text for block in _around for text in block] + own)
        return value
    is_computed = _is_function(value)
    shown = value() if is_computed else value
    if not isinstance(shown, torch.Tensor):
        torch.ops.graftlab.skip_(clock, name, f"its value is {type(shown).__name__}, not a tensor; the tap is skipped")
        return value
    if shown.is_complex():
        # The same tensor, unless it is lazily conjugated, which the operators cannot write into.
        shown = shown.resolve_conj()
    is_copy = not replace and _overlaps_itself(shown)
    if replace or is_copy:
        # A compiler optimizes away a clone with a single use. In a tensor that overlaps itself, a graph would add up
        # the numbers written to one place.
        shown = shown.clone()
    text = as_text(f"gl.tap({name!r})", tags)
    tensors, form = _taken_apart(name, extras() if _is_function(extras) else extras)
    # Hidden from autograd, as a graft outside graphs is: the gradient passes straight through.
    alias = shown.detach()
    local = alias
    if hasattr(alias, "to_local"):
        torch.ops.graftlab.skip_(clock, name, "a DTensor is shown without its placements; give layout= to the tap")
        local = alias.to_local()
    is_complex = local.is_complex()
    whole = local
    if is_complex or not _is_dense(local):
        # Inductor does not compile operators that write into complex tensors. For a tensor with gaps it copies all the
        # memory in between; after detach(), which hides the base tensor, the gaps are uninitialized.
        whole = _as_real(local).clone(memory_format=torch.contiguous_format)
    torch.ops.graftlab.show_(whole, clock, name, text, tensors, form, layout or "", is_copy, is_complex)
    if whole is not local:
        # Hidden from autograd, which refuses writes into one of several outputs of a split. Under vmap a tensor has no
        # .data, but usually no gradient either.
        place = local.data if shown.requires_grad else local
        place.copy_(torch.view_as_complex(whole) if is_complex else whole)
    if grad and shown.requires_grad:
        shown = _ShownGradient.apply(shown, torch.ops.graftlab.place(clock), name, text)  # type: ignore[no-untyped-call]
    return value if is_computed else shown


def _leaves_out() -> bool:
    return not (calls.are_wanted() or _has_steps or _is_given)


def _is_function(value: Any) -> bool:
    # Tracers cannot call callable() on a dict, and the tracer of torch 2.6 cannot take the type of a function.
    return not hasattr(value, "keys") and callable(value)


def compile_taps(choice: str | None) -> None:
    """Choose which taps future compilations include, by a filter over ``name`` and a tap's own tags.

    The other taps are not in the graph at all: they cost nothing, and do not affect what the compiler fuses. None
    chooses all taps again. Call it where the model runs, on a rank. Code that is already compiled is compiled again at
    its next call. Tags set by ``gl.tags`` are unknown at compile time, so they count as absent.

    Raises :class:`FilterError` for a bad expression.

    >>> gl.compile_taps("name == 'hidden'")
    >>> gl.compile_taps(None)
    """
    global _choice, _is_chosen
    if choice is not None:
        compile_filter(choice)
        # Only here, because this loads the compiler. A tracer treats the result of such a function as a constant.
        _is_chosen = torch.compiler.assume_constant_result(_matches)  # type: ignore[no-untyped-call]
    _choice = choice


@contextlib.contextmanager
def only_taps(names: tuple[str, ...] | None) -> Iterator[None]:
    """Include only taps of these names in compilations inside the block; None includes all."""
    global _choice, _is_chosen, _is_given
    before = _choice, _is_given
    _is_given = True
    if names is not None:
        _is_chosen = torch.compiler.assume_constant_result(_matches)  # type: ignore[no-untyped-call]
        number = _sets.setdefault(names, len(_sets))
        _choice = f"{_SET}{number}"
        _by_choice[_choice] = frozenset(names)
    else:
        _choice = None
    try:
        yield
    finally:
        _choice, _is_given = before


def _matches(name: str, tags: tuple[str, ...], choice: str) -> bool:
    if choice in _by_choice:
        return name in _by_choice[choice]
    return compile_filter(choice).matches({"name": name, **from_text(tags)})


def open_tags(tags: Mapping[str, Any]) -> None:
    """Enter a ``with gl.tags(...)`` block in a graph."""
    global _around
    text = as_text("gl.tags", tags)
    if _leaves_out():
        _around = (*_around, tuple(text))
    torch.ops.graftlab.open_(clock, text)


def close_tags() -> None:
    """Leave a ``with gl.tags(...)`` block in a graph."""
    global _around
    if _around:
        _around = _around[:-1]
    torch.ops.graftlab.close_(clock)


def step() -> None:
    """End a step in a graph; see :func:`graftlab.step`."""
    global _has_steps
    _has_steps = True
    torch.ops.graftlab.step_(clock)


class _ShownGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, place: torch.Tensor, name: str, tags: list[str]) -> torch.Tensor:
        ctx.save_for_backward(place)
        ctx.name, ctx.tags = name, tags
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
        [place] = ctx.saved_tensors
        return torch.ops.graftlab.show_gradient(gradient, place, ctx.name, ctx.tags), None, None, None


def as_text(name: str, tags: Mapping[str, Any]) -> list[str]:
    """Convert tags to text. A tracer knows only the class of other objects, so it could not distinguish two of them."""
    written = []
    for tag, value in tags.items():
        if value is not None and not isinstance(value, (str, int, float)):
            raise TagError(
                f"tag {tag!r} of {name} has the type {type(value).__name__}; in compiled code a tag is text, a number, "
                f"a bool or None"
            )
        written.append(f"{tag}={_fixed(value)!r}")
    return written


def _fixed(value: Any) -> Any:
    """Return the value; a number becomes a constant of the graph, where torch would have made it an input."""
    # A key of a dict has to be known while torch traces; releases differ in what else fixes a number.
    return list({value: None})[0]  # noqa: RUF015


def _taken_apart(name: str, extras: Any) -> tuple[list[torch.Tensor], list[str]]:
    if extras is None:
        return [], _NO_EXTRAS
    if isinstance(extras, torch.Tensor):
        return [_as_real(extras)], [_mark(extras)]
    tensors: list[torch.Tensor] = []
    form = []
    if not isinstance(extras, dict):
        raise TagError(
            f"extras of gl.tap({name!r}): in compiled code they are a tensor, or a dict of tensors and values"
        )
    for key, value in extras.items():
        if isinstance(value, torch.Tensor):
            tensors.append(_as_real(value))
            form.append(f"{key}={_mark(value)}")
        elif value is None or isinstance(value, (str, int, float)):
            form.append(f"{key}={_fixed(value)!r}")
        else:
            raise TagError(
                f"extras[{key!r}] of gl.tap({name!r}) has the type {type(value).__name__}; in compiled code extras "
                f"hold tensors, text, numbers, bools and None"
            )
    return tensors, form


def _as_real(extra: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(extra.resolve_conj()) if extra.is_complex() else extra


def _mark(extra: torch.Tensor) -> str:
    return _COMPLEX if extra.is_complex() else _TENSOR


# ---- code that runs in graphs ---------------------------------------------------------------------------------------


def _show(
    value: torch.Tensor,
    time: torch.Tensor,
    name: str,
    tags: list[str],
    tensors: list[torch.Tensor],
    form: list[str],
    layout: str,
    is_copy: bool = False,
    is_complex: bool = False,
) -> None:
    handler = calls.tap_handler()
    if handler is None:
        return
    if is_complex:
        value = torch.view_as_complex(value)
    _say_once()
    number = int(time)
    around = _open[number]
    if number and around.thread != threading.get_ident() and not is_backward():
        _warn_once(
            "gl.tags in compiled code: graphs of two threads run at once and share their open tags; "
            "set tags outside the compiled function instead"
        )
    given = {**dict(around.tags), **from_text(tuple(tags)), COMPILED: True}
    try:
        # Repeats by activation checkpointing are recognized by their grad mode, which a compiled backward disables.
        with torch.set_grad_enabled(is_backward() or torch.is_grad_enabled()):
            extras = _put_together(tensors, form)
            result = handler.tap(
                name, value, ExtrasWithLayout(layout, extras) if layout else extras, given, replace=is_copy
            )
            if result is not value and is_copy:
                value.copy_(result)
                _warn_once(
                    f"gl.tap({name!r}) in compiled code: the tensor is expanded or overlaps itself (one number in "
                    "several places), so only gl.tap's result carries the graft: continue with x = gl.tap(...)"
                )
    except BaseException:
        forget_open_tags()  # the graph ends here without closing its tags
        raise


def _skip(time: torch.Tensor, name: str, why: str) -> None:
    _warn_once(f"gl.tap({name!r}) in compiled code: {why}")


def _open_tags(time: torch.Tensor, tags: list[str]) -> None:
    outer = int(time)
    opened = _OpenTags(outer, (*_open[outer].tags, *from_text(tuple(tags)).items()), threading.get_ident())
    with _lock:
        number = _numbers.get(opened)
        if number is None:
            number = _numbers[opened] = len(_open)
            _open.append(opened)
    time.fill_(number)


def _close_tags(time: torch.Tensor) -> None:
    time.fill_(_open[int(time)].outer)


def _step(time: torch.Tensor) -> None:
    calls.step()


def _place(time: torch.Tensor) -> torch.Tensor:
    tags = tuple({**dict(ambient.get()), **dict(_open[int(time)].tags)}.items())
    key = (tags, threading.get_ident())
    with _lock:
        number = _shown_numbers.get(key)
        if number is None:
            number = next(_places)
            _shown_numbers[key], _shown[number] = number, _GradientOrigin(dict(tags), key[1])
            if len(_shown) > _SHOWN_LIMIT:
                del _shown_numbers[next(iter(_shown_numbers))], _shown[next(iter(_shown))]
    return torch.tensor(number, device="cpu")


def _show_gradient(gradient: torch.Tensor, place: torch.Tensor, name: str, tags: list[str]) -> torch.Tensor:
    own = gradient.clone()
    shown = _shown.get(int(place))
    if shown is None:
        _warn_once(
            f"gl.tap({name!r}, grad=True) in compiled code: its forward pass was too long ago; the tap is skipped"
        )
        return own
    handler = calls.tap_handler_of(shown.thread)
    if handler is not None:
        given = {**shown.tags, **from_text(tuple(tags)), "kind": "grad", COMPILED: True}
        handler.tap(name, own, None, given)
    return own


def _note_left_out(time: torch.Tensor, name: str, tags: list[str]) -> torch.Tensor:
    """Note a tap at the time of tracing; compilers drop the operator, because nothing uses its result."""
    if len(_left_out) < _LEFT_OUT_LIMIT:
        _left_out.setdefault((name, ambient.get(), tuple(tags)))
    return torch.empty_like(time)


def left_out_since(number: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the names and tags of the taps that are in no graph, without the first ``number`` of them."""
    found = itertools.islice(_left_out, number, None)
    return [(name, {**dict(around), **from_text(tags), COMPILED: True}) for name, around, tags in found]


def _put_together(tensors: Sequence[torch.Tensor], form: Sequence[str]) -> Any:
    if not form:
        return None
    if form[0] in (_TENSOR, _COMPLEX):
        return _as_shown(tensors[0], _MARKS[form[0]])
    left = iter(tensors)
    marks = tuple(_MARKS.values())
    return {
        key: _as_shown(next(left), value) if any(value is mark for mark in marks) else value
        for key, value in from_text(tuple(form)).items()
    }


def _as_shown(extra: torch.Tensor, mark: object) -> torch.Tensor:
    return torch.view_as_complex(extra) if mark is _MARKS[_COMPLEX] else extra


_MARKS = {_TENSOR: object(), _COMPLEX: object()}


@functools.lru_cache(maxsize=100_000)
def from_text(text: tuple[str, ...]) -> dict[str, Any]:
    """The inverse of :func:`as_text`."""
    read = {}
    for each in text:
        tag, _, value = each.partition("=")
        read[tag] = _MARKS[value] if value in _MARKS else _number_or_text(value)
    return read


def _number_or_text(value: str) -> Any:
    # repr() of these is not a literal.
    return float(value) if value in ("nan", "inf", "-inf") else ast.literal_eval(parse_expression(value))


def _say_once() -> None:
    if "compiled" not in _warned_of:
        _warned_of.add("compiled")
        logger.info("a compiled graph here contains taps; code compiled before the session is compiled again, once")


def _warn_once(what: str) -> None:
    if what not in _warned_of:
        _warned_of.add(what)
        warn(what)


def forget_open_tags() -> None:
    """Reset open tags where no ``with gl.tags(...)`` of a graph can be open; an exception leaves some open."""
    global _around
    _around = ()
    clock.zero_()


# ---- the operators --------------------------------------------------------------------------------------------------

_library = torch.library.Library("graftlab", "DEF")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Callable[..., Any], fake: Callable[..., Any] = lambda *args: None) -> None:
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    # Operators that write only into the clock, a constant, also run during ahead-of-time compilation.
    run = run if name == "show_" else _not_ahead_of_time(name, run)
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"graftlab::{name}", _not_ahead_of_time(name, fake), lib=_library)


def _not_ahead_of_time(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        if _is_for_aot_inductor():
            raise GraphError(
                f"this program still has taps (graftlab.{name}), and AOTInductor's runtime cannot run them, because it "
                "has no Python; remove them with gl.strip(program) before you compile it"
            )
        return function(*args)

    return checked


def _is_for_aot_inductor() -> bool:
    # torch has no public way to ask. Without this check torch's own error only names the operator.
    inductor = sys.modules.get("torch._inductor.virtualized")
    return inductor is not None and getattr(inductor.V, "aot_compilation", False) is True


def _show_batched(
    info: Any, in_dims: Any, value: torch.Tensor, time: torch.Tensor, name: str, tags: list[str], *extras: Any
) -> tuple[None, None]:
    """Show the whole batch at once under ``torch.vmap``, with the tag ``vmap``."""
    torch.ops.graftlab.show_(value, time, name, [*tags, "vmap=True"], *extras)
    return None, None


_define(
    "show_(Tensor(a!) value, Tensor(b!) clock, str name, str[] tags, Tensor[] extras, str[] form, str layout, "
    "bool is_copy=False, bool is_complex=False) -> ()",
    _show,
)
_define("skip_(Tensor(a!) clock, str name, str why) -> ()", _skip)
_define("open_(Tensor(a!) clock, str[] tags) -> ()", _open_tags)
_define("close_(Tensor(a!) clock) -> ()", _close_tags)
_define("step_(Tensor(a!) clock) -> ()", _step)
_define("place(Tensor clock) -> Tensor", _place, torch.empty_like)
_define("left_out(Tensor clock, str name, str[] tags) -> Tensor", _note_left_out, _note_left_out)
_define(
    "show_gradient(Tensor gradient, Tensor place, str name, str[] tags) -> Tensor",
    _show_gradient,
    lambda gradient, *rest: torch.empty_like(gradient),
)

torch.library.register_vmap("graftlab::show_", _show_batched, lib=_library)


# How a tensor lies in memory, in code that a tracer can follow: it neither sorts nor guards on data-dependent sizes. A
# condition that a graph cannot know counts as false.


def _overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether several elements share one number in memory: the tensor is expanded, or has overlapping windows."""
    steps = _steps(tensor)
    for place, (extent, stride) in enumerate(steps):
        if _is_true(stride == 0):
            return True
        for other, (_, wider) in enumerate(steps):
            if other != place and _is_true(stride <= wider) and _is_true(wider <= (extent - 1) * stride):
                return True
    return False


def _is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor that does not overlap itself has no gaps in memory."""
    reach = 1
    for extent, stride in _steps(tensor):
        reach = reach + (extent - 1) * stride
    return _is_true(reach == tensor.numel())


def _steps(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return extent and stride of each dimension with more than one element."""
    return [(n, stride) for n, stride in zip(tensor.shape, tensor.stride(), strict=True) if not _is_true(n <= 1)]


def _is_true(condition: bool) -> bool:
    # Imported here because it loads sympy, which is already loaded when code is traced.
    from torch.fx.experimental import symbolic_shapes

    # A tracer can follow hasattr, but not an ImportError.
    if hasattr(symbolic_shapes, "guard_or_false"):
        return symbolic_shapes.guard_or_false(condition)
    # The tracer of torch 2.6 can follow an `if` on an unknown size, but not bool().
    if condition:  # noqa: SIM103
        return True
    return False
