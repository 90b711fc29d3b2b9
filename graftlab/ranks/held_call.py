"""A held call: one call of a model that a rank can repeat, each time from the same state.

It is the outermost call of a script's model, in which the script waits, or the call of a model that a function has
returned. The notebook sends the functions of this module to ranks by their names.
"""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import GeneratorType
from typing import Any, Literal

import torch

from graftlab.diffs.results import NamedTensors, is_written, named_tensors, value_in_words, written_path
from graftlab.errors import SessionError
from graftlab.grafting.self_graft import CallKey, CountingHandler, changed_results
from graftlab.ranks.held_update import HeldUpdate, UpdateDescription
from graftlab.ranks.remote_functions import Callee, bind_callee
from graftlab.ranks.state_snapshot import StateSnapshot
from graftlab.taps.calls import here, tap_handler
from graftlab.taps.outermost_calls import OutermostCalls
from graftlab.taps.routing import handled_by
from graftlab.taps.watch import Watch, watch, weights_of

# Set before a function loads its model and makes its inputs, so that both sides draw the same random numbers.
_SEED = 0
# Items that a generator is run for, which may have no end.
_MOST_ITEMS = 1024
_WHOLE_NUMBERS = (torch.int64, torch.int32)
_MOST_WHOLE_NUMBERS = 1 << 16
# Bytes of state that a call has written and that are compared, in each of a verdict's runs.
_WRITTEN_BUDGET = 32 << 20

UnitKind = Literal["call", "update"]
"""What a script is held in: a call of a model, or an update of its weights."""


@dataclass(frozen=True)
class WatchChoice:
    """What is tapped of a held model: the arguments of the same names of :func:`graftlab.watch`."""

    include: str | None = None
    functions: tuple[str, ...] = ()
    inside: str | None = None
    params: bool = True
    inputs: bool = True


@dataclass(frozen=True)
class CallDescription:
    """What a rank reports of its held call.

    ``number`` counts the calls of models from 1. ``taps`` are the names of its taps, in execution order. ``plain``
    are the tensors that the call returns without taps and those that it writes, by their paths, and ``tapped`` the same
    with taps. ``not_repeated`` describes the results that a replay without taps does not repeat, and ``not_compared``
    is what the call writes and repetitions leave out.
    """

    model: str
    number: int
    needs_backward: bool
    taps: tuple[str, ...]
    plain: dict[str, torch.Tensor]
    tapped: dict[str, torch.Tensor]
    not_repeated: tuple[str, ...] = ()
    others: Mapping[str, int] = field(default_factory=dict)
    """How often models of other classes than the chosen one were called so far, by class."""
    buffers: tuple[str, ...] = ()
    """The names of the model's buffers, which its own calls may write."""
    fails_when_repeated: str | None = None
    """What a repetition raises although the first call returns."""
    whole_numbers: Mapping[str, torch.Tensor] = field(default_factory=dict)
    """The integers among the arguments, such as tokens, by their paths."""
    raises: str | None = None
    """What the call itself raises; then nothing else is described."""
    not_compared: tuple[str, ...] = ()

    @property
    def returned(self) -> dict[str, torch.Tensor]:
        """What the call returns without taps, and nothing that it writes."""
        return {path: tensor for path, tensor in self.plain.items() if not is_written(path)}


@dataclass(frozen=True)
class ScriptEnd:
    """What a rank reports in place of a held call when its script has ended; ``failure`` is the exception, if any."""

    failure: str | None = None


class HeldCall:
    """A call that can be repeated: calling this object restores the state, calls, and returns the named tensors.

    These are the tensors of its result, and those that the call has written: buffers and attributes of modules, and
    tensors and caches among the arguments. ``models`` are what is tapped, by the prefix of the names of their taps;
    ``state`` what the call may change besides, by name. ``name`` is that of the model in sentences, or its class.
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
    ) -> None:
        self.is_released = False
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

    def _taken(self) -> StateSnapshot:
        return StateSnapshot([*self._models.values(), *self._state.values()])

    def __call__(self) -> dict[str, torch.Tensor]:
        self._restore()
        result = self._call()
        if isinstance(result, GeneratorType):
            # What it computes would arise in the script's own code, after the call.
            result = list(itertools.islice(result, _MOST_ITEMS))
        results = named_tensors(result)
        state = self._written() if self._shows_written else {}
        if self._has_backward:
            self._go_backward(results)
        return self._without_left({**results, **state})

    def _written(self) -> dict[str, torch.Tensor]:
        found, without_room = self._snapshot.written({**self._models, **self._state}, _WRITTEN_BUDGET)
        self._left.update(dict.fromkeys(map(written_path, without_room)))
        return {written_path(path): tensor for path, tensor in found.items()}

    def _without_left(self, values: Mapping[str, torch.Tensor]) -> NamedTensors:
        return NamedTensors({path: tensor for path, tensor in values.items() if path not in self._left})

    def _restore(self) -> None:
        for model in self._models.values():
            _reshard(model)
        self._snapshot.restore()

    def prepare(self, backward: bool) -> None:
        """Install the taps for one call in this process, with or without a backward pass."""
        self._has_backward = backward
        # One call alone does not show which memory has no values yet.
        self._shows_written = False
        self._watch()

    def describe(self, *, reports_failure: bool = False) -> CallDescription:
        """Call it without taps, again, and with them. ``reports_failure`` describes what the first call raises."""
        names = _TapLister()
        not_repeated: list[str] = []
        fails = None
        with handled_by(names):
            # A tap in the model's own code stays, and does nothing else here.
            try:
                first = self()
            except Exception as error:
                if not reports_failure:
                    raise
                return self._describe_failure(error)
            needs_backward = any(tensor.requires_grad for tensor in first.values())
            plain = tapped = _copied(first)
            try:
                changed = changed_results(plain, self())
                not_repeated = [value_in_words(path) for path in changed if not is_written(path)]
                # Such as memory that was reserved and has no values yet.
                self._left.update(dict.fromkeys(path for path in changed if is_written(path)))
                plain = self._without_left(plain)
                names.reached.clear()
                self._watch()
                tapped = _copied(self())
            except Exception as error:
                fails = _in_a_line(error)
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
            self._whole_numbers(),
            not_compared=tuple(value_in_words(path) for path in self._left),
        )

    def describe_result(self, *, reports_failure: bool = False) -> CallDescription:
        """Call it once, without taps; what this does not show is left out."""
        try:
            with handled_by(_TapLister()):
                result = self()
        except Exception as error:
            if not reports_failure:
                raise
            return self._describe_failure(error)
        needs_backward = any(tensor.requires_grad for tensor in result.values())
        plain = _copied(result)
        return CallDescription(self._kind, self._number, needs_backward, (), plain, plain)

    def _describe_failure(self, error: Exception) -> CallDescription:
        return CallDescription(self._kind, self._number, False, (), {}, {}, raises=_in_a_line(error))

    def _whole_numbers(self) -> dict[str, torch.Tensor]:
        self._restore()
        given = named_tensors(self._state)
        return _copied(
            {path: t for path, t in given.items() if t.dtype in _WHOLE_NUMBERS and t.numel() <= _MOST_WHOLE_NUMBERS}
        )

    @property
    def unit(self) -> tuple[UnitKind, int]:
        """What this is, with its number among those of this process."""
        return "call", self._number

    @property
    def _kind(self) -> str:
        if self._name is not None:
            return self._name
        return " and ".join(dict.fromkeys(type(model).__name__ for model in self._models.values()))

    def try_backward(self) -> str | None:
        """From now on each repetition includes a backward pass, whose gradients are tapped too.

        Returns the reason if that fails; then repetitions are as before.
        """
        self._unwatch()
        self._has_backward = True
        self._watch()
        try:
            with handled_by(_TapLister()):
                self()
        except Exception as error:
            self.drop_backward()
            return _in_a_line(error)
        return None

    def take_weights(self) -> None:
        """Tap the weights and buffers, and let repetitions and the script continue with what the taps leave."""
        self._restore()
        handler = tap_handler()
        for prefix, model in self._models.items():
            for name, weight in weights_of(model, prefix, _every, _none).items():
                if handler is not None:
                    handler.tap(name, weight, None, {"kind": "param"})
        self._snapshot = self._taken()

    def drop_backward(self) -> None:
        """Repeat the forward pass alone again."""
        self._unwatch()
        self._has_backward = False
        self._watch()

    def _go_backward(self, results: Mapping[str, torch.Tensor]) -> None:
        """Run a backward pass from random gradients of the results, and tap the weights' gradients as they end up.

        The real gradients come from a loss that the script computes after the call. The backward pass is linear in
        them, so a mistake in it shows for any of them.
        """
        weights = {
            f"{prefix}{name}": weight
            for prefix, model in self._models.items()
            for name, weight in weights_of(model, "", _every, _none, buffers=False).items()
            if weight.requires_grad and weight.is_leaf
        }
        for weight in weights.values():
            weight.grad = None
        reached = [tensor for tensor in results.values() if tensor.requires_grad]
        # What was computed before the call has its own graph, which the script's backward pass needs.
        torch.autograd.backward(
            reached,
            [_gradient_of(place, tensor) for place, tensor in enumerate(reached)],
            retain_graph=True,
            inputs=list(weights.values()),
        )
        handler = tap_handler()
        for name, weight in reversed(weights.items()):
            if handler is not None and weight.grad is not None:
                handler.tap(name, weight.grad, None, {"kind": "param_grad"})

    def end(self) -> None:
        """Take the taps away and leave the state as it was before the first replay."""
        self.is_released = True
        self._unwatch()
        self._restore()

    def _unwatch(self) -> None:
        for each in self._watched:
            each.remove()
        self._watched = []

    def _watch(self) -> None:
        chosen = self._choice
        self._watched = [
            watch(
                model,
                prefix,
                chosen.include,
                functions=chosen.functions,
                inside=chosen.inside,
                params=chosen.params,
                inputs=chosen.inputs,
                grads=self._has_backward,
            )
            for prefix, model in self._models.items()
        ]


def _reshard(model: torch.nn.Module) -> None:
    """Let each rank have its part of the weights alone again, where FSDP gathers them for a call."""
    if "torch.distributed.fsdp" in sys.modules:
        for module in model.modules():
            if isinstance(module, torch.distributed.fsdp.FSDPModule):
                module.reshard()


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def _gradient_of(place: int, tensor: torch.Tensor) -> torch.Tensor:
    """A random gradient of a result, the same on every rank of both sides for a result of this shape and place."""
    generator = torch.Generator().manual_seed(place)
    drawn = torch.randn(tensor.shape, generator=generator, dtype=torch.float32)
    return drawn.to(tensor.device, tensor.dtype)


def _every(name: str, kind: str) -> bool:
    return True


def _none(name: str, kind: str) -> bool:
    return False


class _TapLister(CountingHandler):
    """Notes the names of the taps that are reached, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: dict[str, None] = {}

    def take(self, place: CallKey, tags: dict[str, Any], own: torch.Tensor) -> None:
        self.reached[place[0]] = None


def _copied(result: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy the tensors of a result, because the next call may overwrite them."""
    return {path: tensor.detach().to("cpu", copy=True) for path, tensor in result.items()}


@dataclass(frozen=True)
class FunctionInFile:
    """A function in a Python file, by their names, for a rank to import and call. ``name`` may have dots.

    Raises :class:`SessionError` where the file has no such function.
    """

    path: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.find()
        return found(*args, **kwargs) if callable(found) and not isinstance(found, torch.nn.Module) else found

    def find(self) -> Any:
        """Import the file, and return what has this name."""
        path = Path(self.path).resolve()
        folder = str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)
        found: Any = importlib.import_module(path.stem)
        if Path(getattr(found, "__file__", None) or "").resolve() != path:
            raise SessionError(
                f"compare: the name of {path} is that of another module, {path.stem} ({found!r}); rename the file"
            )
        for part in self.name.split("."):
            if not hasattr(found, part):
                raise SessionError(f"compare: {path} has no {self.name!r}")
            found = getattr(found, part)
        return found


# ---- on a rank ------------------------------------------------------------------------------------------------------

_held: HeldCall | HeldUpdate | ScriptEnd | None = None


def hold(call: HeldCall | HeldUpdate | ScriptEnd) -> None:
    """Make this the call or the update that the functions below repeat; or report from now on that there is none."""
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
    """Whether no other rank of this side would wait for one whose call raises."""
    me = here()
    return me is None or me.world_size == 1


def prepare_once(backward: bool) -> tuple[UnitKind, int] | ScriptEnd:
    """Install the taps for one run of the held call or update; returns what is held, with its number."""
    if isinstance(_held, ScriptEnd):
        return _held
    held = _held_here()
    held.prepare(backward)
    return held.unit


def held_unit() -> tuple[UnitKind, int] | ScriptEnd:
    """What is held, with its number among those of this process; or how the script has ended."""
    return _held if isinstance(_held, ScriptEnd) else _held_here().unit


def repeat_call() -> dict[str, torch.Tensor]:
    """Repeat the held call or update; returns the tensors of its result by their paths."""
    return _held_here()()


def show_given() -> None:
    """Tap what the held update is given; see :meth:`HeldUpdate.show_given`."""
    held_update().show_given()


def take_given() -> None:
    """Begin repetitions of the held update with what taps leave; see :meth:`HeldUpdate.take_given`."""
    held_update().take_given()


def keep_given() -> None:
    """Let the script continue with what :func:`take_given` left."""
    held_update().keep_given()


def take_weights() -> None:
    """Tap the weights of the held call's models, and repeat it from now on with what the taps leave."""
    held_call().take_weights()


def try_backward() -> str | None:
    """Include a backward pass in each repetition; see :meth:`HeldCall.try_backward`."""
    return held_call().try_backward()


def drop_backward() -> None:
    """Repeat the forward pass alone again."""
    held_call().drop_backward()


def release_call() -> None:
    """End the held call or update: its script continues with the call itself."""
    _held_here().end()


def load_and_hold(load: Callee, inputs: Any, choice: WatchChoice, backward: bool) -> CallDescription:
    """Load a model and hold its call with these inputs; returns its description. ``backward`` calls it with gradients.

    ``load`` returns a model, or a function of the inputs; if it has parameters without defaults, it is that function
    itself. ``inputs`` is a tensor, a tuple of positional arguments, a mapping of named ones, or a function that returns
    one of them.
    """
    _seed()
    model = _function_of_inputs(load, inputs) or bind_callee(load, (), {})()
    if not callable(model):
        raise SessionError(
            f"compare: the function that loads a model returned {type(model).__name__}, which cannot be called; return "
            "a torch.nn.Module or a function of the inputs, or take the inputs as arguments"
        )
    _seed()
    args, kwargs = arguments_of(inputs)
    models: dict[str, torch.nn.Module] = {}
    if not isinstance(model, torch.nn.Module):
        once = partial(model, *args, **kwargs) if backward else partial(_without_gradients, model, args, kwargs)
        models, has_taps = _models_called(once, (args, kwargs))
        model = model if models or has_taps else _as_module(model)
    if isinstance(model, torch.nn.Module):
        models = {"": model}
    call = partial(model, *args, **kwargs) if backward else partial(_without_gradients, model, args, kwargs)
    hold(HeldCall(call, models, arguments_by_name(args, kwargs), choice))
    return held_call().describe()


def hold_callee(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], choice: WatchChoice) -> CallDescription:
    """Hold a call of this code, as it is. Its models are tapped, unless it has taps already."""
    call = bind_callee(callee, args, kwargs)
    models, has_taps = _models_called(call, (args, kwargs))
    watched: Mapping[str, torch.nn.Module] = {} if has_taps else models
    if not models and not has_taps:
        call = _as_module(call)
        watched = {"": call}
    hold(HeldCall(call, watched, {**models, **arguments_by_name(args, kwargs)}, choice))
    return held_call().describe()


CALL = "graftlab_call(*graftlab_args, **graftlab_kwargs)"
"""The expression of the call that :func:`define_call` defines."""


def define_call(function: FunctionInFile, inputs: Any, include: str | None) -> None:
    """Define what :data:`CALL` calls, and tap its models: a function that takes arguments, or what one without returns.

    That is a model, or a function of the inputs; a function whose result is neither is called itself.
    """
    _seed()
    found: Any = function.find()
    is_model = isinstance(found, torch.nn.Module)
    if not is_model and not _required(found):
        made = found()
        found, is_model = (made, isinstance(made, torch.nn.Module)) if callable(made) else (found, False)
    _seed()
    args, kwargs = arguments_of(inputs)
    models = {"": found} if is_model else _models_called(partial(found, *args, **kwargs), (args, kwargs))[0]
    for prefix, model in models.items():
        watch(model, prefix, include)
    me = here()
    assert me is not None
    me.vars.update(graftlab_call=found, graftlab_args=args, graftlab_kwargs=kwargs)


def _function_of_inputs(load: Callee, inputs: Any) -> Callable[..., Any] | None:
    """What was given in the place of a function that loads a model, if it is a function of the inputs itself."""
    function = load.find() if isinstance(load, FunctionInFile) else load
    if isinstance(function, (str, type, torch.nn.Module)) or not (required := _required(function)):
        return None
    if inputs is None:
        raise SessionError(
            f"compare: {getattr(function, '__name__', function)} needs {', '.join(required)}; give inputs (--inputs "
            "FILE.py:FUNCTION), or a function without arguments that returns a model"
        )
    return function


class _FunctionModule(torch.nn.Module):
    """A function as a module, so that its inputs and its result have taps."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


def _as_module(function: Callable[..., Any]) -> torch.nn.Module:
    """A module that calls the function, of a class with the function's name."""
    made: torch.nn.Module = type(getattr(function, "__name__", "function"), (_FunctionModule,), {})(function)
    return made


def _required(function: Callable[..., Any]) -> list[str]:
    """The names of the function's parameters that have no default."""
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = inspect.signature(function).parameters.values()
    return [each.name for each in parameters if each.default is each.empty and each.kind not in variable]


def _without_gradients(call: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    with torch.no_grad():
        return call(*args, **kwargs)


def arguments_of(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The positional and the named arguments that ``inputs`` stands for; see :func:`load_and_hold`."""
    given = inputs() if callable(inputs) else inputs
    if given is None:
        return (), {}
    if isinstance(given, Mapping) or hasattr(given, "keys"):
        return (), {str(key): given[key] for key in given.keys()}  # noqa: SIM118 - a BatchEncoding is no dict
    if isinstance(given, (tuple, list)):
        return tuple(given), {}
    return (given,), {}


def arguments_by_name(args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by their names in sentences: ``args[0]`` for a positional one, which has no name."""
    return {**{f"args[{place}]": each for place, each in enumerate(args)}, **kwargs}


def _seed() -> None:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(_SEED)


def _models_called(call: Callable[[], Any], state: Any) -> tuple[dict[str, torch.nn.Module], bool]:
    """Call once, and return the models that were called outermost, by the prefix of the names of their taps.

    The second result is whether the call reaches taps by itself. The call leaves ``state`` and the models as they were.
    """
    found: dict[int, torch.nn.Module] = {}
    before = [StateSnapshot([state])]

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) not in found:
            found[id(module)] = module
            before.append(StateSnapshot([module]))

    taps = _TapLister()
    with handled_by(taps), OutermostCalls(note):
        call()
    for each in reversed(before):
        each.restore()
    models = list(found.values())
    has_taps = bool(taps.reached)
    if len(models) < 2:
        return ({"": models[0]} if models else {}), has_taps
    kinds = [type(model).__name__ for model in models]
    named = {
        f"{kind}{f'[{kinds[:place].count(kind)}]' if kinds.count(kind) > 1 else ''}.": model
        for place, (kind, model) in enumerate(zip(kinds, models, strict=True))
    }
    return named, has_taps
