"""A held update: one step of an optimizer that a rank can repeat, each time from the same weights, gradients and state.

The inputs of both sides are compared first: weights, gradients and settings. Then the target takes the baseline's, so
that repetitions show what the update itself computes differently.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from graftlab.base.tensor_bytes import real_parts
from graftlab.ranks.state_snapshot import StateSnapshot, own_part
from graftlab.taps.calls import tap_handler
from graftlab.taps.training import scale_of, tap_gradients, watch_steps
from graftlab.taps.watch import Watch, weights_of

# Elements of a gradient that are kept for a closer look.
_MOST_ELEMENTS = 4096

_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class TensorSample:
    """Elements of a tensor at fixed places, in float64, with the whole tensor's norm, shape and dtype."""

    values: torch.Tensor
    norm: float
    shape: tuple[int, ...]
    dtype: str

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSample:
        """Draw the sample. For a DTensor it is of the whole tensor, so all of its ranks must call this."""
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        flat = real_parts(whole.detach()).reshape(-1)
        values = flat[_places(flat.numel()).to(flat.device)].to("cpu", torch.float64)
        norm = float(torch.linalg.vector_norm(flat, dtype=torch.float64))
        return cls(values, norm, tuple(whole.shape), str(whole.dtype).removeprefix("torch."))

    @property
    def places(self) -> torch.Tensor:
        """The place of each element in the flattened tensor of real numbers, int64."""
        return _places(math.prod(self.shape))


def _places(count: int) -> torch.Tensor:
    """The places of the elements that are drawn from a tensor with this number of them, int64."""
    places = torch.linspace(0, max(count - 1, 0), min(count, _MOST_ELEMENTS), dtype=torch.float64, device="cpu")
    return places.round().long()


@dataclass(frozen=True)
class UpdateDescription:
    """A rank's report of its held update.

    ``number`` counts the updates from 1, ``calls`` is the number of model calls since the last one. ``settings`` has
    the optimizer's settings by weight. ``gradients`` are those that the optimizer reads, ``accumulated`` those that the
    backward passes left before anything else changed them, in the order in which a pass completes them. ``previous``
    are those of the last update, and ``of_results`` those that the loss gave to the results of the calls. ``frozen``
    are weights of the models that no optimizer of the process has, ``elsewhere`` those that only others have, and
    ``without_gradient`` those of this one's weights that no gradient reached. ``scale`` is a gradient scaler's factor
    in ``of_results``; 1 without one. ``losses`` are the numbers from which the backward passes begin. ``of_shards`` are
    this rank's parts of sharded gradients, as the last backward pass left them and as the optimizer reads them.
    ``states`` has, by weight, the shapes of the tensors that the optimizer keeps for it after the step.
    """

    optimizer: str
    number: int
    calls: int
    settings: Mapping[str, Mapping[str, Any]]
    gradients: Mapping[str, TensorSample]
    accumulated: Mapping[str, TensorSample]
    previous: Mapping[str, TensorSample]
    of_results: Mapping[str, TensorSample]
    dtypes: Mapping[str, str]
    frozen: tuple[str, ...]
    without_gradient: tuple[str, ...]
    not_repeated: bool
    scale: float = 1.0
    has_closure: bool = False
    """Whether the step itself calls the model, by a closure. Then it is described without being made."""
    losses: tuple[float, ...] = ()
    of_shards: tuple[tuple[TensorSample, TensorSample], ...] = ()
    states: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    elsewhere: tuple[str, ...] = ()


class GradientWatch:
    """Samples of the gradients of weights and of results, taken while a script's own backward passes run.

    While it ``is_paused``, backward passes are not the script's.
    """

    def __init__(self) -> None:
        self.accumulated: dict[int, TensorSample] = {}
        self.of_results: dict[str, TensorSample] = {}
        self.of_shards: dict[int, TensorSample] = {}
        self.losses: list[float] = []
        self.is_paused = False
        # The weights of the passes that have ended, and of the present one, by their ids, as gradients reached them.
        self._order: list[int] = []
        self._reached: list[int] = []
        # How many passes run, each within another, or in another thread.
        self._running = 0
        self._backward = torch.autograd.backward
        # A script may make several models, one after the other.
        self._hooked = WeakTensorKeyDictionary()
        self._sharded = WeakTensorKeyDictionary()

    def install(self) -> None:
        """Note the numbers from which backward passes begin, from now on."""
        self._backward = torch.autograd.backward
        torch.autograd.backward = self._note_loss

    def remove(self) -> None:
        """Note no further loss."""
        self.is_paused = True
        if torch.autograd.backward == self._note_loss:
            # Otherwise other code has replaced it since, and calls this.
            torch.autograd.backward = self._backward

    def add_weights(self, model: torch.nn.Module) -> None:
        """Watch the gradients of a model's weights from now on."""
        for weight in model.parameters():
            # A sharded weight's gradient would need a collective here, and FSDP2 sets it without a call of hooks.
            if weight.requires_grad and hasattr(weight, "full_tensor"):
                self._sharded[weight] = True
            if weight.requires_grad and weight.is_leaf and weight not in self._hooked and type(weight) in _WHOLE:
                self._hooked[weight] = True
                weight.register_post_accumulate_grad_hook(self._note)  # type: ignore[no-untyped-call]

    def add_results(self, results: Mapping[str, torch.Tensor]) -> None:
        """Watch the gradients that a loss gives to the tensors of a call's result."""
        for path, tensor in results.items():
            if tensor.requires_grad and not hasattr(tensor, "full_tensor"):
                tensor.register_hook(partial(self._note_result, path))  # type: ignore[no-untyped-call]

    def begin_step(self) -> None:
        """Forget the last step's gradients."""
        self.accumulated.clear()
        self.of_results.clear()
        self.of_shards.clear()
        self.losses.clear()
        self._order, self._reached = [], []

    def order(self) -> list[int]:
        """The ids of the weights in the order in which a backward pass completes their gradients.

        Several passes of one step may each reach only some: the heads or the experts of one loss or micro-batch.
        """
        return in_order_of_passes(self._order, self._reached)

    def _note_loss(self, tensors: Any, *args: Any, **kwargs: Any) -> None:
        if self.is_paused or torch.compiler.is_compiling():
            self._backward(tensors, *args, **kwargs)
            return
        is_one = isinstance(tensors, torch.Tensor) and tensors.numel() == 1 and not hasattr(tensors, "full_tensor")
        # A pass from a given gradient shows no loss.
        is_given = any(each is not None for each in (*args[:1], kwargs.get("grad_tensors")))
        if is_one and not (is_given or tensors.is_meta):
            self.losses.append(float(tensors.detach()))
        # Activation checkpointing may make passes within one.
        if not self._running:
            self._order, self._reached = self.order(), []
        self._running += 1
        try:
            self._backward(tensors, *args, **kwargs)
        finally:
            self._running -= 1
        for weight in self._sharded:
            if weight.grad is not None and weight.grad.layout == torch.strided:
                self.of_shards[id(weight)] = TensorSample.of(own_part(weight.grad))

    def _note(self, weight: torch.Tensor) -> None:
        if weight.grad is not None and weight.grad.layout == torch.strided and not self.is_paused:
            self.accumulated[id(weight)] = TensorSample.of(weight.grad)
            self._reached.append(id(weight))

    def _note_result(self, path: str, gradient: torch.Tensor) -> None:
        if gradient.layout == torch.strided:
            self.of_results[path] = TensorSample.of(gradient)


def in_order_of_passes(order: Sequence[int], found: Sequence[int]) -> list[int]:
    """The weights of several passes, in the order of earlier ones, with what only a further pass has found put before
    what follows it there. A weight that a pass has reached more than once counts in its last place.

    >>> in_order_of_passes([1, 2, 3], [4, 2, 5, 3, 5])
    [1, 4, 2, 3, 5]
    """
    known, following = {*order}, None
    before: dict[int | None, list[int]] = {}
    for each in dict.fromkeys(reversed(found)):
        if each in known:
            following = each
        else:
            before.setdefault(following, []).insert(0, each)
    merged = [one for each in order for one in (*before.get(each, ()), each)]
    return [*merged, *before.get(None, ())]


_WHOLE = (torch.nn.Parameter, torch.Tensor)


class HeldUpdate:
    """A step of an optimizer that can be repeated: calling this object restores the step's inputs, and steps.

    ``models`` are those whose weights the optimizer may have, by name. If the step calls the model, by a closure,
    ``watch_calls`` taps that.
    """

    def __init__(
        self,
        step: Callable[[], Any],
        optimizer: torch.optim.Optimizer,
        models: Mapping[str, torch.nn.Module],
        gradients: GradientWatch,
        previous: Mapping[str, TensorSample],
        *,
        number: int,
        calls: int,
        watch_calls: Callable[[torch.nn.Module], Watch] | None = None,
    ) -> None:
        self.is_released = False
        self._watch_calls = watch_calls
        self._watched_calls: Watch | None = None
        self._step, self._optimizer, self._gradients = step, optimizer, gradients
        self._model = _named(models, optimizer)
        self._previous, self._number, self._calls = previous, number, calls
        self.gradients: dict[str, TensorSample] = {}
        """The gradients that the optimizer reads, once they are described."""
        self._watched: Watch | None = None
        self._states: dict[str, dict[str, tuple[int, ...]]] = {}
        self._first = self._base = self._snapshot()

    def __call__(self) -> dict[str, torch.Tensor]:
        if self._watched is None:
            # The description has the settings by weight, in whatever number and order each side has its weights.
            self._watched = watch_steps(
                self._model, self._optimizer, exclude=self._elsewhere().__contains__, settings=False
            )
            if self._watch_calls is not None:
                self._watched_calls = self._watch_calls(self._model)
        self._base.restore()
        self._step()
        return {}

    @property
    def unit(self) -> tuple[Literal["update"], int]:
        """The update's kind, and its number among those of this process."""
        return "update", self._number

    def prepare(self, backward: bool) -> None:
        """Do nothing: the first run installs the taps, those of gradients included."""

    def describe(self) -> UpdateDescription:
        """Describe the update's inputs, and whether its repetition gives the same result."""
        weights = self._weights()
        held_by_optimizer = {id(w) for w in _weights_in(self._optimizer)}
        scale = scale_of(self._optimizer)
        read = {
            name: w.grad if scale is None else w.grad / scale.to(w.grad.device)
            for name, w in weights.items()
            if w.grad is not None and w.grad.layout == torch.strided
        }
        self.gradients = {name: TensorSample.of(gradient) for name, gradient in read.items()}
        has_closure = self._watch_calls is not None
        once, twice = ([], []) if has_closure else (self._results(), self._results())
        accumulated, shards = self._gradients.accumulated, self._gradients.of_shards
        order = {weight: place for place, weight in enumerate(self._gradients.order())}
        left = [name for name, w in weights.items() if id(w) in order]
        left.sort(key=lambda name: order[id(weights[name])])
        elsewhere = self._elsewhere()
        return UpdateDescription(
            type(self._optimizer).__name__,
            self._number,
            self._calls,
            _settings_of(self._optimizer, weights),
            self.gradients,
            {name: accumulated[id(weights[name])] for name in left},
            self._previous,
            dict(self._gradients.of_results),
            {name: str(w.dtype).removeprefix("torch.") for name, w in weights.items()},
            tuple(
                name
                for name, w in weights.items()
                if not w.requires_grad or (id(w) not in held_by_optimizer and name not in elsewhere)
            ),
            tuple(name for name, w in weights.items() if id(w) in held_by_optimizer and w.grad is None),
            not all(torch.equal(a, b) for a, b in zip(once, twice, strict=True)),
            _scale_of_losses(),
            has_closure,
            tuple(self._gradients.losses),
            tuple(
                (shards[id(w)], TensorSample.of(own_part(read[name])))
                for name, w in weights.items()
                if id(w) in shards and name in read
            ),
            self._states,
            elsewhere,
        )

    def show_inputs(self) -> None:
        """Tap the update's inputs: weights, the optimizer's state and the gradients."""
        self._unwatch()
        self._base.restore()
        handler = tap_handler()
        if handler is None:
            return
        weights = self._weights()
        for name, weight in weights.items():
            handler.tap(name, weight, None, {"kind": "param"})
        for name, weight in weights.items():
            for key, value in self._optimizer.state.get(weight, {}).items():
                if isinstance(value, torch.Tensor):
                    handler.tap(f"{name}.{key}", value, None, {"kind": "optimizer"})
        tap_gradients(handler, self._optimizer, reversed(weights.items()))

    def show_unchanged(self) -> None:
        """Tap the weights as if after the update, without making it."""
        self._base.restore()
        handler, elsewhere = tap_handler(), self._elsewhere()
        for name, weight in self._weights().items():
            if handler is not None and name not in elsewhere and weight.requires_grad:
                handler.tap(name, weight, None, {"kind": "param", "updated": True})

    def take_inputs(self) -> None:
        """Tap the update's inputs, and let repetitions begin with the taps' results."""
        self.show_inputs()
        self._base = self._snapshot()

    def divide_gradients(self, by: int, names: Collection[str]) -> None:
        """Let repetitions begin with these weights' gradients divided by a number, for a step that adds them up over
        ranks.
        """
        self._base.restore()
        for name, weight in self._weights().items():
            if name in names and weight.grad is not None:
                weight.grad.div_(by)
        self._base = self._snapshot()

    def keep_inputs(self) -> None:
        """Let the script continue with the inputs that :meth:`take_inputs` set."""
        self._first = self._base

    def end(self) -> None:
        """Remove the taps, and restore the state from before the first repetition."""
        self.is_released = True
        self._unwatch()
        self._first.restore()

    def _snapshot(self) -> StateSnapshot:
        """The state of the optimizer, and of trained weights that it lacks: their taps may be grafted all the same."""
        own = {id(weight) for weight in _weights_in(self._optimizer)}
        others = tuple(w for w in self._weights().values() if w.requires_grad and id(w) not in own)
        return StateSnapshot([self._optimizer, others], weights=True)

    def _results(self) -> list[torch.Tensor]:
        self._base.restore()
        self._step()
        weights, state = self._weights(), self._optimizer.state
        shown = [own_part(weight).clone() for weight in weights.values()]
        # The first step makes them.
        self._states = {
            name: {key: tuple(value.shape) for key, value in state[weight].items() if isinstance(value, torch.Tensor)}
            for name, weight in weights.items()
            if weight in state
        }
        self._base.restore()
        return shown

    def _elsewhere(self) -> tuple[str, ...]:
        """The names of the weights that only other optimizers of this process have, such as Adam beside Muon."""
        own = {id(w) for w in _weights_in(self._optimizer)}
        left = {name: id(w) for name, w in self._weights().items() if w.requires_grad and id(w) not in own}
        # A model does not know its optimizers.
        known = {id(w) for each in _living(torch.optim.Optimizer) for w in _weights_in(each)} if left else set()
        return tuple(name for name, each in left.items() if each in known)

    def _unwatch(self) -> None:
        if self._watched is not None:
            self._watched.remove()
            self._watched = None
        if self._watched_calls is not None:
            self._watched_calls.remove()
            self._watched_calls = None

    def _weights(self) -> dict[str, torch.Tensor]:
        return weights_of(self._model, "", lambda name, kind: True, lambda name, kind: False, buffers=False)


def _living(kind: type[_Kind]) -> list[_Kind]:
    return [each for each in gc.get_objects() if isinstance(each, kind)]


def _weights_in(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [weight for group in optimizer.param_groups for weight in group["params"]]


def _scale_of_losses() -> float:
    """The factor of the one gradient scaler in this process; 1 without one, or with several."""
    # An optimizer does not know its scaler.
    scalers = [each for each in _living(torch.amp.GradScaler) if each.is_enabled()]
    return float(scalers[0].get_scale()) if len(scalers) == 1 else 1.0


def _named(models: Mapping[str, torch.nn.Module], optimizer: torch.optim.Optimizer) -> torch.nn.Module:
    """The model whose weights an optimizer has; for several models, or weights of none, one module that holds all.

    A fused loss calls a model without its head, which has its weights' names in the whole model, as on the other side.
    """
    left = {id(w): w for group in optimizer.param_groups for w in group["params"]}
    order = list(left)
    used = {}
    for name, model in models.items():
        mine = {id(w) for w in model.parameters()}
        if any(each in mine for each in left):
            used[name] = model
            left = {each: w for each, w in left.items() if each not in mine}
    if len(used) == 1 and not left:
        return next(iter(used.values()))
    if left and used and (whole := _smallest_with(order, [*used.values()])) is not None:
        return whole
    together = _Together()
    for name, model in used.items():
        together.add_module(name, model)
    for each, weight in left.items():
        together.register_parameter(f"parameter_{order.index(each)}", weight)
    return together


class _Together(torch.nn.Module):
    """Holds models and weights that no module of the script has together."""


def _smallest_with(weights: Collection[int], models: Collection[torch.nn.Module]) -> torch.nn.Module | None:
    """The module of the script with the fewest weights that contains these models and the weights of these ids.

    Of several, as where a trainer's module contains the model, it is the innermost one.
    """
    found: dict[tuple[int, int], torch.nn.Module] = {}
    for each in _living(torch.nn.Module):
        # One whose construction has only begun has no parts yet.
        is_whole = "_modules" in getattr(each, "__dict__", {}) and not isinstance(each, _Together)
        if not is_whole or not {*map(id, models)} <= (parts := {*map(id, each.modules())}):
            continue
        held = {id(weight) for weight in each.parameters()}
        if held.issuperset(weights):
            found.setdefault((len(held), len(parts)), each)
    return found[min(found)] if found else None


# Settings of how a step is computed, which leave its result unchanged.
_NO_SETTINGS = frozenset({"params", "foreach", "fused", "capturable", "differentiable"})


def _settings_of(optimizer: torch.optim.Optimizer, weights: Mapping[str, torch.Tensor]) -> dict[str, dict[str, Any]]:
    """Each setting of an optimizer, by the name of its weight."""
    names = {id(weight): name for name, weight in weights.items()}
    found: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for setting, value in group.items():
            plain = _plain(value)
            if setting not in _NO_SETTINGS and plain is not None:
                mine = {names[id(weight)]: plain for weight in group["params"] if id(weight) in names}
                found.setdefault(setting, {}).update(mine)
    return found


def _plain(value: Any) -> Any:
    """A setting as a plain value; None if it has no such form."""
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else None
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value if isinstance(value, (bool, int, float, str)) else None
