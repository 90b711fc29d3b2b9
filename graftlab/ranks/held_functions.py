"""Functions of a file whose calls a rank holds: they load a model, or are called with the inputs themselves.

The notebook sends the functions of this module to ranks by their names.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from graftlab.errors import SessionError
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_call import HeldCall, TapLister, WatchChoice, arguments_by_name
from graftlab.ranks.holding import held_call, hold
from graftlab.ranks.remote_functions import Callee, bind_callee
from graftlab.ranks.state_snapshot import StateSnapshot
from graftlab.taps.calls import here
from graftlab.taps.outermost_calls import OutermostCalls
from graftlab.taps.routing import handled_by
from graftlab.taps.watch import watch

# Set before a function loads its model and makes its inputs, so that both sides draw equal random numbers.
_SEED = 0
_GIVE_INPUTS = "give inputs (inputs=, or --inputs FILE.py:NAME)"


@dataclass(frozen=True)
class FunctionInFile:
    """A function by its name, which may have dots, and its file, for a rank to import and call.

    Raises :class:`SessionError` where the file has no such function.
    """

    path: str
    name: str

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = self.find()
        return found(*args, **kwargs) if callable(found) and not isinstance(found, torch.nn.Module) else found

    def find(self) -> Any:
        """Import the file, and return the object of this name."""
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


def load_and_hold(load: Callee, inputs: Any, choice: WatchChoice, backward: bool) -> CallDescription:
    """Load a model, hold its call with these inputs, and return its description. ``backward`` calls it with gradients.

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
    if inputs is None and (required := _required_by(model)):
        raise SessionError(f"compare: {_name_of(model)} needs {', '.join(required)}; {_GIVE_INPUTS}")
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
    return held_call().describe(reports_failure=True)


def hold_callee(callee: Callee, args: tuple[Any, ...], kwargs: dict[str, Any], choice: WatchChoice) -> CallDescription:
    """Hold a call of this code. Its models are tapped, unless it reaches taps itself."""
    call = bind_callee(callee, args, kwargs)
    models, has_taps = _models_called(call, (args, kwargs))
    watched: Mapping[str, torch.nn.Module] = {} if has_taps else models
    if not models and not has_taps:
        call = _as_module(call)
        watched = {"": call}
    hold(HeldCall(call, watched, {**models, **arguments_by_name(args, kwargs)}, choice))
    return held_call().describe(reports_failure=True)


CALL = "graftlab_call(*graftlab_args, **graftlab_kwargs)"
"""The expression of the call that :func:`define_call` defines."""


def define_call(function: FunctionInFile, inputs: Any, include: str | None) -> None:
    """Define the function that :data:`CALL` calls, and tap its models.

    If ``function`` takes arguments, it is called itself. Otherwise it returns the callee: a model, or a function of the
    inputs. If it returns neither, it is called itself too.
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
    """Return ``function`` if it takes the inputs itself, rather than loading a model."""
    function = load.find() if isinstance(load, FunctionInFile) else load
    if isinstance(function, (str, type, torch.nn.Module)) or not (required := _required(function)):
        return None
    if inputs is None:
        raise SessionError(
            f"compare: {_name_of(function)} needs {', '.join(required)}; {_GIVE_INPUTS}, or a function without "
            "arguments that returns a model"
        )
    return function


def _required_by(model: Callable[..., Any]) -> list[str]:
    """The arguments that a call of this model must have; none if it is not written in Python."""
    forward = model.forward if isinstance(model, torch.nn.Module) else model
    return _required(forward) if inspect.isfunction(forward) or inspect.ismethod(forward) else []


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


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


def _seed() -> None:
    torch.manual_seed(_SEED)
    random.seed(_SEED)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(_SEED)


def _models_called(call: Callable[[], Any], state: Any) -> tuple[dict[str, torch.nn.Module], bool]:
    """Call, and return the models called outermost in each call, by the prefix of their taps' names.

    The second result is whether the call reaches taps itself. The call leaves ``state`` and the models unchanged.
    """
    models, has_taps = _models_of_one_call(call, state)
    if models:
        # The next call would not reach the taps of a model that each call makes anew.
        again = {id(model) for model in _models_of_one_call(call, state)[0]}
        models = [model for model in models if id(model) in again]
    if len(models) < 2:
        return ({"": models[0]} if models else {}), has_taps
    kinds = [type(model).__name__ for model in models]
    named = {
        f"{kind}{f'[{kinds[:place].count(kind)}]' if kinds.count(kind) > 1 else ''}.": model
        for place, (kind, model) in enumerate(zip(kinds, models, strict=True))
    }
    return named, has_taps


def _models_of_one_call(call: Callable[[], Any], state: Any) -> tuple[list[torch.nn.Module], bool]:
    """Call once, and return the models called outermost, and whether the call reaches taps itself."""
    found: dict[int, torch.nn.Module] = {}
    before = [StateSnapshot([state])]

    def note(module: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if id(module) not in found:
            found[id(module)] = module
            before.append(StateSnapshot([module]))

    taps = TapLister()
    # The held call raises the exception again, and is then described up to there.
    try:
        with handled_by(taps), OutermostCalls(note), contextlib.suppress(Exception):
            call()
    finally:
        # Also if it is interrupted.
        for each in reversed(before):
            each.restore()
    return list(found.values()), bool(taps.reached)
