"""A held call: one call of a model that a rank can repeat, each time from the same state.

It is the outermost call of a script's model, in which the script waits, or a call of a function
(:mod:`graftlab.ranks.held_functions`).
"""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import GeneratorType, MappingProxyType
from typing import Any, Literal

import torch

from graftlab.base.quantisation import weight_tap
from graftlab.base.text import first_of
from graftlab.diffs.results import (
    NamedTensors,
    compare_named,
    is_written,
    named_tensors,
    value_in_words,
    with_tensors,
    written_path,
)
from graftlab.diffs.rounding import roundoff
from graftlab.errors import SessionError
from graftlab.grafting.in_float64 import as_it_is, in_float64
from graftlab.grafting.self_graft import changed_results
from graftlab.grafting.tap_records import CallKey, CountingHandler
from graftlab.ranks.asked_operators import AskedOperators
from graftlab.ranks.autocast import no_autocast, no_autocast_cache
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.float32_state import Float32State, KnownState
from graftlab.ranks.state_snapshot import StateSnapshot, own_part, tensors_by_path
from graftlab.ranks.stored_numbers import is_made_of, stored_in_16_bits
from graftlab.ranks.widening import (
    NARROW,
    ReadsOf16Bits,
    TrialOfRanks,
    WideTensors,
    memory_of,
    refuse_too_large,
    rounded_at_random,
)
from graftlab.taps.calls import tap_handler
from graftlab.taps.nested import tap_inside
from graftlab.taps.routing import handled_by, taps_within
from graftlab.taps.untraced import COMPILER
from graftlab.taps.watch import Watch, watch, weights_of

# How many items are taken of a generator, which may be endless.
_MOST_ITEMS = 1024
WEIGHT = "@param"
"""The end of a weight's path in :meth:`HeldCall.dtypes`."""
_WHOLE_NUMBERS = (torch.int64, torch.int32)
_MOST_WHOLE_NUMBERS = 1 << 16
# Bytes of written state that each run of a verdict compares.
_WRITTEN_BUDGET = 32 << 20
# Bytes of a call's numbers that are sent to the other side.
_MOST_NUMBERS = 64 << 20
_DROPOUTS = (
    torch.nn.Dropout,
    torch.nn.Dropout1d,
    torch.nn.Dropout2d,
    torch.nn.Dropout3d,
    torch.nn.AlphaDropout,
    torch.nn.FeatureAlphaDropout,
)
_BATCH_NORMS = (torch.nn.BatchNorm1d, torch.nn.BatchNorm2d, torch.nn.BatchNorm3d, torch.nn.SyncBatchNorm)


@dataclass(frozen=True)
class WatchChoice:
    """Which parts of a held model are tapped, beside its inputs: the arguments of :func:`graftlab.watch`."""

    include: str | None = None
    functions: tuple[str, ...] = ()
    inside: str | None = None
    params: bool = True


class HeldCall:
    """A call that can be repeated: calling this object restores the state, calls, and returns the named tensors.

    These are the tensors of its result, and those that the call has written: buffers and attributes of modules, tensors
    and caches among the arguments. ``models`` are the tapped models, by the prefix of their taps' names; ``state`` has
    other objects that the call may change, by name. ``name`` names the model in sentences; by default it is the class.
    ``float32`` is that of all calls of a script. ``part_of`` names a model called earlier that has this one as a
    module.
    """

    def __init__(
        self,
        call: Callable[[], Any],
        models: Mapping[str, torch.nn.Module],
        state: Mapping[str, Any],
        choice: WatchChoice,
        *,
        name: str | None = None,
        number: int = 1,
        others: Mapping[str, int] | None = None,
        float32: Float32State | None = None,
        part_of: str = "",
    ) -> None:
        self.is_released = False
        self._part_of = part_of
        self._name = name
        self._call = call
        self._models = dict(models)
        self._choice = choice
        self._number = number
        self._has_backward = False
        self._others = dict(others or {})
        self._watched: list[Watch] = []
        self._state = state
        self._shows_written = True
        self._left: dict[str, None] = {}
        self._snapshot = self._taken()
        self._wide: WideTensors | None = None
        # The dtypes of 16 bits that are left while operators compute in float64; None if they do not.
        self._in_float64: set[str] | None = None
        # Whether all numbers in float32 are in float64 then, too.
        self._all_in_float64 = False
        self._narrow_snapshot = self._snapshot
        # What the call reads in 16 bits that neither models nor arguments have, once :meth:`constants` has found it.
        self._stored: dict[str, torch.Tensor] = {}
        self._float32 = float32
        if float32 is not None:
            # A script may give the same empty cache to each call.
            given = {} if float32.has_calls else self._state
            float32.see(self._kind, _numbers_in({**self._models, **given}))

    def _taken(self) -> StateSnapshot:
        return StateSnapshot([*self._models.values(), *self._state.values()])

    def __call__(self) -> dict[str, torch.Tensor]:
        self._restore()
        results = named_tensors(self._called())
        state = self._written() if self._shows_written else {}
        if self._has_backward:
            self._go_backward(results)
        returned = self._without_left({**results, **state})
        returned.passed_on = self._passed_on(results, state)
        return returned

    def _passed_on(self, results: Mapping[str, torch.Tensor], written: Collection[str]) -> frozenset[str]:
        """The paths of results that are arguments, to which the call has not written."""
        if not self._shows_written:
            return frozenset()
        given = tensors_by_path(self._state)
        unwritten = {id(tensor) for path, tensor in given if written_path(path) not in {*written, *self._left}}
        return frozenset(path for path, tensor in results.items() if id(tensor) in unwritten)

    def _written(self) -> dict[str, torch.Tensor]:
        found, without_room = self._snapshot.written({**self._models, **self._state}, _WRITTEN_BUDGET)
        self._left.update(dict.fromkeys(map(written_path, without_room)))
        return {written_path(path): tensor for path, tensor in found.items()}

    def _without_left(self, values: Mapping[str, torch.Tensor]) -> NamedTensors:
        return with_tensors(values, {path: tensor for path, tensor in values.items() if path not in self._left})

    def _restore(self) -> None:
        for model in self._models.values():
            _reshard(model)
        self._snapshot.restore()

    def prepare(self, backward: bool) -> None:
        """Install the taps for one call in this process, with or without a backward pass."""
        self._has_backward = backward
        # A single call does not show which memory has no values yet.
        self._shows_written = False
        self._watch()

    def describe(self, *, reports_failure: bool = False) -> CallDescription:
        """Call it twice without taps, once with them. ``reports_failure`` describes an exception of the first call."""
        names = TapLister()
        not_repeated: list[str] = []
        fails = None
        with handled_by(names):
            # Taps in the model's own code stay, and do nothing else here.
            before = self._weight_versions()
            try:
                first = self()
            except Exception as error:
                if not reports_failure:
                    raise
                return self._describe_failure(error, watches=True)
            writes_weights = self._weight_versions() != before
            needs_backward = any(tensor.requires_grad for tensor in first.values())
            plain = tapped = _copied(first)
            try:
                changed = changed_results(plain, self())
                not_repeated = [value_in_words(path) for path in changed if not is_written(path)]
                # For example memory that was reserved and has no values yet.
                self._left.update(dict.fromkeys(path for path in changed if is_written(path)))
                plain = self._without_left(plain)
                names.reached.clear()
                self._watch()
                tapped = _copied(self())
            except Exception as error:
                fails = _first_line_of(error)
        buffers = [f"{prefix}{name}" for prefix, model in self._models.items() for name, _ in model.named_buffers()]
        return CallDescription(
            self._kind,
            self._number,
            needs_backward,
            tuple(names.reached),
            plain,
            tapped,
            tuple(not_repeated),
            self._others,
            tuple(buffers),
            fails,
            whole_numbers := self._whole_numbers(),
            self._untapped(whole_numbers),
            not_compared=tuple(value_in_words(path) for path in self._left),
            writes_weights=writes_weights,
            trained=tuple(self._trained()),
            in_training=tuple(self._in_training()),
            is_training=any(model.training for model in self._models.values()),
            weights=self._weights(),
            part_of=self._part_of,
            values=tuple(name for name, kind in names.reached.items() if kind is None),
        )

    def _weights(self) -> int:
        return sum(weight.numel() for model in self._models.values() for weight in model.parameters())

    def _weight_versions(self) -> list[int]:
        """How often each weight was written to; weights of inference mode do not count it."""
        weights = (weight for model in self._models.values() for weight in model.parameters())
        return [0 if weight.is_inference() else weight._version for weight in weights]

    def describe_result(self, *, reports_failure: bool = False) -> CallDescription:
        """Call it once, without taps, and describe its result."""
        try:
            with handled_by(TapLister()):
                result = self()
        except Exception as error:
            if not reports_failure:
                raise
            return self._describe_failure(error, watches=False)
        needs_backward = any(tensor.requires_grad for tensor in result.values())
        plain = _copied(result)
        return CallDescription(
            self._kind,
            self._number,
            needs_backward,
            (),
            plain,
            plain,
            weights=self._weights(),
            part_of=self._part_of,
        )

    def _describe_failure(self, error: Exception, *, watches: bool) -> CallDescription:
        """Describe a call that raises; if it ``watches``, with the taps that it reaches before, which stay."""
        names = TapLister()
        if watches:
            self._watch()
            # The exception is the one that is described.
            with handled_by(names), contextlib.suppress(Exception):
                self()
        reached = tuple(names.reached)
        return CallDescription(self._kind, self._number, False, reached, {}, {}, raises=_first_line_of(error))

    def _whole_numbers(self) -> dict[str, torch.Tensor]:
        self._restore()
        given = named_tensors(self._state)
        return _copied(
            {path: t for path, t in given.items() if t.dtype in _WHOLE_NUMBERS and t.numel() <= _MOST_WHOLE_NUMBERS}
        )

    def _untapped(self, paths: Iterable[str]) -> tuple[str, ...]:
        """Those of these paths of arguments whose tensors a tap of the arguments does not reach."""
        reached: list[torch.Tensor] = []

        def reach(name: str, value: torch.Tensor) -> torch.Tensor:
            reached.append(value)
            return value

        tap_inside("", self._state, reach, put=lambda value, changed: value)
        tapped = {id(each) for each in reached}
        given = named_tensors(self._state)
        return tuple(path for path in paths if id(given[path]) not in tapped)

    @property
    def unit(self) -> tuple[Literal["call"], int]:
        """The call's kind, and its number among those of this process."""
        return "call", self._number

    @property
    def _kind(self) -> str:
        if self._name is not None:
            return self._name
        return " and ".join(dict.fromkeys(type(model).__name__ for model in self._models.values()))

    def try_backward(self) -> str | None:
        """Include a backward pass in each repetition from now on, and tap its gradients. Returns the reason if that
        fails; then repetitions are as before.
        """
        if self._is_sharded() and any(tensor.requires_grad for _, tensor in tensors_by_path(self._state)):
            # That pass would leave gradients where the script's own pass accumulates.
            return "FSDP2 shards the weights, and an argument requires a gradient"
        if not self._models:
            return "code that has taps is called as it is, so its weights are not tapped"
        if not self._is_sharded() and not self._trained():
            return "no weight of the call's models needs a gradient"
        self._set_backward(True)
        return self._called_once(self.drop_backward)

    def _called_once(self, undo: Callable[[], None], call: Callable[[], object] | None = None) -> str | None:
        """Call it, or what makes the ``call``; if that fails, undo what was changed for it, and return the reason."""
        try:
            with handled_by(TapLister()):
                (call or self)()
        except Exception as error:
            undo()
            return _first_line_of(error)
        return None

    def take_weights(self) -> None:
        """Tap the weights and buffers; repetitions and the script continue with the values that the taps return."""
        self._restore()
        handler = tap_handler()
        for prefix, model in self._models.items():
            weights = weights_of(model, prefix, _every, _none)
            for name in weights:
                if handler is not None:
                    handler.tap(name, *weight_tap(name, weights), {"kind": "param"})
        self._snapshot = self._narrow_snapshot = self._taken()

    def drop_backward(self) -> None:
        """Repeat only the forward pass again."""
        self._set_backward(False)

    def _set_backward(self, has_backward: bool) -> None:
        self._has_backward = has_backward
        self._watch()

    def numbers(self) -> dict[str, torch.Tensor] | None:
        """The floating-point tensors that the call may read, by path, without weights; None if they are too large."""
        self._restore()
        numbers = _numbers_in({**self._models, **self._state})
        return numbers if sum(each.nbytes for each in numbers.values()) <= _MOST_NUMBERS else None

    def known_state(self) -> KnownState:
        """What is known of the state that the call may read."""
        self._restore()
        if self._float32 is None:
            return KnownState()
        return self._float32.known(self._kind, _numbers_in({**self._models, **self._state}))

    def note_equal(self) -> None:
        """Note that the call is bit-equal to the other side's."""
        if self._float32 is not None:
            self._float32.note_equal()

    def confirm_state(self) -> None:
        """Note that the script has now made this call, from the same state."""
        if self._float32 is not None:
            self._float32.confirm(_numbers_in({**self._models, **self._state}))

    def dtypes(self) -> dict[str, torch.dtype]:
        """The dtypes of the floating-point tensors that the call may read, by path, with its weights."""
        self._restore()
        return {path: tensor.dtype for path, tensor in self._read().items() if tensor.is_floating_point()}

    def _read(self) -> dict[str, torch.Tensor]:
        weights = {
            f"{prefix}{name}{WEIGHT}": weight
            for prefix, model in self._models.items()
            for name, weight in model.named_parameters()
        }
        return {**dict(tensors_by_path({**self._models, **self._state})), **weights, **self._stored}

    def widen(
        self,
        numbers: Mapping[str, torch.Tensor],
        rounded: Mapping[str, torch.dtype],
        trial: TrialOfRanks | None = None,
        sharing: int = 1,
        kept: Collection[str] = (),
        rounded_otherwise: Collection[str] = (),
    ) -> str | None:
        """Repeat the call from now on in float32 instead of 16 bits; returns the reason if that is impossible.

        ``numbers`` has values that replace those that the call would read, by path. Those of ``rounded`` are rounded to
        these dtypes, as the other side has them. State of the paths ``kept`` is as earlier calls would have left it in
        float32, see :class:`Float32State`. Numbers of 16 bits of the paths ``rounded_otherwise`` are moved at random by
        up to four roundings. With a ``trial``, all ranks of the side do the same, or none. The
        memory is shared with ``sharing`` ranks.
        """
        reason = self._widened(numbers, rounded, trial, sharing, kept, rounded_otherwise)
        if trial is not None and (failed := trial.end(reason)) is not None and reason is None:
            self.narrow()
            return failed
        if reason is None and self._float32 is not None and not rounded_otherwise:
            # As the first repetition has left it; the next one restores it.
            self._float32.note(_numbers_in({**self._models, **self._state}))
        return reason

    def _widened(
        self,
        numbers: Mapping[str, torch.Tensor],
        rounded: Mapping[str, torch.dtype],
        trial: TrialOfRanks | None,
        sharing: int,
        kept: Collection[str],
        rounded_otherwise: Collection[str],
    ) -> str | None:
        self._restore()
        if self._is_sharded():
            return "FSDP2 shards the weights, and gathers them from memory of 16 bits"
        read = self._read()
        given = self._given(read, numbers, rounded, kept, rounded_otherwise)
        try:
            self._wide = WideTensors(read.values(), given, sharing, self._unwritten)
        except SessionError as error:
            return str(error)
        self._snapshot = self._taken()
        with trial or contextlib.nullcontext(), ReadsOf16Bits() as reads:
            reason = self._called_once(lambda: None)
        if reason is not None and trial is None:
            # Some operators, such as flex attention, run in no mode, and the compiler remembers that they failed.
            if COMPILER in sys.modules:
                torch.compiler.reset()
            reason = self._called_once(lambda: None)
        if reason is not None:
            self.narrow()
            return reason
        if reads.operators:
            self.narrow()
            operators = first_of([*reads.operators])
            return f"operators round to 16 bits even then ({operators}), and read numbers that are out of reach"
        return None

    def _given(
        self,
        read: Mapping[str, torch.Tensor],
        numbers: Mapping[str, torch.Tensor],
        rounded: Mapping[str, torch.dtype],
        kept: Collection[str],
        rounded_otherwise: Collection[str],
    ) -> dict[int, torch.Tensor]:
        """The values that replace those of tensors that are ``read``, by id; for the others see :meth:`widen`."""
        given = {id(tensor): numbers[path] for path, tensor in read.items() if path in numbers}
        if self._float32 is not None:
            of_state = _numbers_in({**self._models, **self._state})
            own = self._float32.values({path: each for path, each in of_state.items() if path in kept})
            given |= {id(read[path]): value for path, value in own.items()}
        for path, dtype in rounded.items():
            if path in read:
                value = read[path].detach() if path not in numbers else numbers[path]
                given[id(read[path])] = value.to(dtype).to(read[path].dtype)
        for path in rounded_otherwise:
            if path in read and (moved := read[path]).dtype in NARROW and own_part(moved) is moved:
                given[id(moved)] = rounded_at_random(given.get(id(moved), moved.detach()), moved.dtype)
        return given

    def widen_operators(
        self,
        numbers: Mapping[str, torch.Tensor] = MappingProxyType({}),
        rounded: Mapping[str, torch.dtype] = MappingProxyType({}),
        kept: Collection[str] = (),
        rounded_otherwise: Collection[str] = (),
        stored: bool = False,
    ) -> str | None:
        """Repeat the call from now on with operators that compute in float64; returns the reason if that fails.

        See :func:`graftlab.grafting.in_float64.in_float64`. Numbers that the call rounds to 16 bits before any
        operator reads them, such as weights, are rounded as before. For the arguments see :meth:`widen`: what they name
        is replaced, and nothing else is, unless ``stored``: then all numbers in float32 are in float64, because some
        functions, such as convolutions with a bias, refuse both in one call. Then it fails too if the call computes in
        16 bits, or asks its operators for something else, such as an epsilon that depends on the dtype.
        """
        if self._has_backward:
            return "it has a backward pass"
        asked = AskedOperators()
        if stored and (failure := self._called_in(asked)) is not None:
            return failure
        if asked.in_16_bits:
            return "it computes in 16 bits"
        self._restore()
        read = self._read()
        given = self._given(read, numbers, rounded, kept, rounded_otherwise)
        if stored:
            stored_in_float32 = {id(t): t for t in read.values() if t.dtype == torch.float32}
            try:
                # The other side does the same at this moment.
                refuse_too_large(map(own_part, stored_in_float32.values()), sharing=2, dtype=torch.float64)
            except SessionError as error:
                return str(error)
            given |= {key: t.detach().double() for key, t in stored_in_float32.items()}
        if given:
            chosen = [each for each in read.values() if id(each) in given]
            others = [each for each in read.values() if id(each) not in {*given, *self._unwritten}]
            if not memory_of(chosen).isdisjoint(memory_of(others)):
                # A write into one of two views must reach the other, and so must what is given.
                return "some tensors share their memory"
            try:
                self._wide = WideTensors(chosen, given, unwritten=self._unwritten)
            except SessionError as error:
                return str(error)
            self._snapshot = self._taken()
        self._in_float64, self._all_in_float64 = set(), stored
        if (failure := self._called_once(self.narrow)) is not None or not stored:
            return failure
        wide = AskedOperators()
        if (failure := self._called_in(wide)) is None and not asked.asks_the_same(wide):
            failure = "it asks its operators for something else in float64"
        if failure is not None:
            self.narrow()
        return failure

    def _called_in(self, mode: AskedOperators) -> str | None:
        """Call it once in this mode, which sees nothing else; returns the reason if that fails."""
        self._restore()
        with mode:
            return self._called_once(lambda: None, self._called)

    def constants(self) -> dict[str, torch.Tensor]:
        """The models' floating-point tensors that no call has changed, without weights, by path, and those of 16 bits
        that the call reads and nothing else has, such as a table in a closure; nothing if they are too large.
        """
        self._restore()
        # Within it, restoring would read the copies that it keeps.
        self._stored = stored_in_16_bits(lambda: self._called_once(lambda: None, self._called), self._read().values())
        self._restore()
        numbers = _numbers_in(self._models)
        if sum(each.nbytes for each in (*numbers.values(), *self._stored.values())) > _MOST_NUMBERS:
            return {}
        unchanged = numbers if self._float32 is None else self._float32.known(self._kind, numbers).unchanged
        stored = {path: each.detach() for path, each in self._stored.items()}
        return {**{path: each for path, each in numbers.items() if path in unchanged}, **stored}

    @property
    def _unwritten(self) -> set[int]:
        """The ids of tensors that code holds and that no call writes to, such as two views of one table."""
        return {id(each) for each in self._stored.values()}

    def are_made_of_own(self, samples: Sequence[Sequence[torch.Tensor]]) -> list[bool]:
        """Whether each of these tensors, by their :func:`samples_of`, is made of this call's weights and constants."""
        own = [own_part(each) for each in self._read().values()]
        return [is_made_of(each, own) for each in samples]

    def left_in_16_bits(self) -> list[str]:
        """The dtypes of 16 bits to which the call still rounded, after :meth:`widen_operators`."""
        return sorted(self._in_float64 or ())

    def own_rounding(self) -> tuple[str, float] | None:
        """The coarsest dtype of 16 bits in which the call computes, and the largest rel_l2 of its results from the same
        call in float64. None if it does not compute in 16 bits, or does not run in float64.
        """
        if self._has_backward:
            return None
        with handled_by(TapLister()), contextlib.suppress(Exception):
            plain = _copied(self())
            with in_float64(rounds_stored=True) as coarse:
                wide = self()
            apart = [each.rel_l2 for each in compare_named(plain, wide).differences]
            computed_in = max(coarse.read, key=roundoff, default="")
            return (computed_in, max(apart, default=0.0)) if computed_in else None
        return None

    def _called(self) -> Any:
        if self._in_float64 is None:
            devices = {each.device.type for each in self._read().values()} if self._wide is not None else set()
            with no_autocast_cache(), no_autocast(devices):
                return _with_items(self._call())
        mode = in_float64(rounds_stored=True, widens_new=self._all_in_float64)
        with no_autocast_cache(), taps_within(as_it_is), mode as coarse:
            result = _with_items(self._call())
        self._in_float64 |= coarse.left
        return result

    def narrow(self) -> None:
        """Repeat the call with its own numbers again."""
        self._in_float64 = None
        if self._wide is not None:
            self._restore()
            self._wide.narrow()
            self._wide, self._snapshot = None, self._narrow_snapshot
            self._restore()

    def _go_backward(self, results: Mapping[str, torch.Tensor]) -> None:
        """Run a backward pass from random gradients of the results, and tap the weights' final gradients.

        The real gradients come from a loss that the script computes after the call. The backward pass is linear in
        them, so any gradients show a mistake in it.
        """
        for model in self._models.values():
            # Those that the call has gathered get no gradients.
            _reshard(model)
        weights = self._trained()
        for weight in weights.values():
            weight.grad = None
        reached = [tensor for tensor in results.values() if tensor.requires_grad]
        # Tensors computed before the call have a graph that the script's backward pass needs.
        torch.autograd.backward(
            reached,
            [_gradient_of(place, tensor) for place, tensor in enumerate(reached)],
            retain_graph=True,
            inputs=None if self._is_sharded() else list(weights.values()),
        )
        handler = tap_handler()
        for name, weight in reversed(weights.items()):
            if handler is not None and weight.grad is not None:
                handler.tap(name, weight.grad, None, {"kind": "param_grad"})

    def _trained(self) -> dict[str, torch.Tensor]:
        return {
            f"{prefix}{name}": weight
            for prefix, model in self._models.items()
            for name, weight in weights_of(model, "", _every, _none, buffers=False).items()
            if weight.requires_grad and weight.is_leaf
        }

    def _in_training(self) -> Iterator[str]:
        for prefix, model in self._models.items():
            for name, module in model.named_modules():
                depends = isinstance(module, _BATCH_NORMS) or (isinstance(module, _DROPOUTS) and module.p > 0)
                if module.training and depends:
                    yield f"{prefix}{name}" or type(module).__name__

    def _is_sharded(self) -> bool:
        """Whether the call's graph ends in weights that FSDP2 has gathered, which are not those of the model.

        FSDP2 reduces their gradients, unless the backward pass is for certain weights alone.
        """
        modules = (module for model in self._models.values() for module in model.modules())
        return "torch.distributed.fsdp" in sys.modules and any(
            isinstance(module, torch.distributed.fsdp.FSDPModule) for module in modules
        )

    def end(self) -> None:
        """Remove the taps, and restore the state from before the first replay."""
        self.is_released = True
        self._unwatch()
        self.narrow()
        self._restore()

    def _unwatch(self) -> None:
        for each in self._watched:
            each.remove()
        self._watched = []

    def _watch(self) -> None:
        # A call may be described more than once.
        self._unwatch()
        chosen = self._choice
        self._watched = [
            watch(
                model,
                prefix,
                chosen.include,
                functions=chosen.functions,
                inside=chosen.inside,
                params=chosen.params,
                inputs=True,
                grads=self._has_backward,
            )
            for prefix, model in self._models.items()
        ]


def _numbers_in(roots: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    """The floating-point tensors below these roots, by path, without weights."""
    # A part of a DTensor is a rank's own, and its whole a collective.
    found = tensors_by_path(roots)
    return {path: t.detach() for path, t in found if t.is_floating_point() and own_part(t) is t}


def _with_items(result: Any) -> Any:
    """The items of a generator, which would otherwise be computed after the call, in the script's code."""
    return list(itertools.islice(result, _MOST_ITEMS)) if isinstance(result, GeneratorType) else result


def _reshard(model: torch.nn.Module) -> None:
    """Shard the weights again, where FSDP gathers them for a call."""
    if "torch.distributed.fsdp" in sys.modules:
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.reshard()


def _first_line_of(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _gradient_of(place: int, tensor: torch.Tensor) -> torch.Tensor:
    """A random gradient of a result: the same on all ranks of both sides for one shape and place."""
    generator = torch.Generator().manual_seed(place)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32, device="cpu")
    return drawn.to(tensor.device, tensor.dtype)


def _every(name: str, kind: str) -> bool:
    return True


def _none(name: str, kind: str) -> bool:
    return False


class TapLister(CountingHandler):
    """Notes the names of the taps that are reached, in order, with the kind of the first call."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: dict[str, str | None] = {}

    def take(self, place: CallKey, tags: dict[str, Any], own: torch.Tensor) -> None:
        self.reached.setdefault(place[0], tags.get("kind"))


def _copied(result: Mapping[str, torch.Tensor]) -> NamedTensors:
    """Copy the tensors of a result, because the next call may overwrite them."""
    return with_tensors(result, {path: tensor.detach().to("cpu", copy=True) for path, tensor in result.items()})


def arguments_by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by the names that messages use: ``args[0]`` for the first positional one."""
    return {**{f"args[{place}]": each for place, each in enumerate(args)}, **kwargs}
