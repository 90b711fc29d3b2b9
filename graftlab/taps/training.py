"""``watch_training``: taps on an optimizer's inputs, and on the state and weights after its step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch

from graftlab.errors import warn
from graftlab.taps import calls as taps
from graftlab.taps.hooks import Removable
from graftlab.taps.watch import Chooser, Watch, chooser, weights_of

_SETTING = (bool, int, float)


def watch_training(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    prefix: str = "",
    include: Chooser = None,
    exclude: Chooser = None,
) -> Watch:
    """Tap the gradients before each step of ``optimizer``, and its state and the weights after it.

    Taps are named ``prefix`` plus the weights' names in ``model.state_dict()`` without wrappers' parts, as in
    :func:`watch`; ``include`` and ``exclude`` choose among them. Before the step: the gradient as the optimizer uses
    it, accumulated, reduced over the ranks and without a gradient scaler's factor (``kind="param_grad"``), in the order
    in which the backward pass computed them, and the settings (``optimizer.lr``, ``optimizer.weight_decay`` and so on,
    one value per parameter, ``kind="optimizer"``).
    After it: each tensor of the optimizer's state (``layers.0.weight.exp_avg``, ``kind="optimizer"``) and the weight
    (``kind="param"``), both with ``updated=True``. A graft writes into them. A DTensor is shown as the rank's own
    shard. ``foreach`` and ``fused`` optimizers are tapped in the same way.

    Returns a handle as ``gl.watch`` does; outside a session no hook is installed. Raises TypeError if ``model`` is not
    a module or ``optimizer`` not an optimizer, and ValueError if the optimizer has none of the model's weights, as when
    it was created before ``fully_shard``.

    >>> model = torch.nn.Linear(3, 4)
    >>> with gl.watch_training(model, torch.optim.AdamW(model.parameters())) as watched:
    ...     watched.names
    ['weight', 'bias']
    """
    return watch_steps(model, optimizer, prefix, include, exclude, settings=True)


def watch_steps(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    prefix: str = "",
    include: Chooser = None,
    exclude: Chooser = None,
    *,
    settings: bool,
) -> Watch:
    """Do the same as :func:`watch_training`, with the optimizer's settings or without them."""
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"gl.watch_training taps a torch.nn.Module, not {type(model).__name__}")
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise TypeError(f"gl.watch_training taps a torch.optim.Optimizer, not {type(optimizer).__name__}")
    wanted, unwanted = chooser(include, default=True), chooser(exclude, default=False)
    mine = weights_of(model, prefix, chooser(None, default=True), chooser(None, default=False), buffers=False)
    names = {id(tensor): name for name, tensor in mine.items()}
    held = [tensor for group in optimizer.param_groups for tensor in group["params"]]
    strange = sum(id(tensor) not in names for tensor in held)
    if strange == len(held):
        raise ValueError(
            f"gl.watch_training: none of the optimizer's {len(held)} tensors is a weight of the model. Create the "
            "optimizer after the model is wrapped, sharded or moved"
        )
    if strange:
        warn(f"gl.watch_training: {strange} of the optimizer's {len(held)} tensors are not weights of this model")
    chosen = weights_of(model, prefix, wanted, unwanted, buffers=False)
    if taps.tap_handler() is None:
        return Watch([], list(chosen))
    training = _TrainingTaps(chosen, prefix, settings=settings)
    handles: list[Removable] = [
        optimizer.register_step_pre_hook(training.before),
        optimizer.register_step_post_hook(training.after),
        *training.accumulation_hooks(),
    ]
    return Watch(handles, list(chosen))


class _TrainingTaps:
    """The taps around one optimizer's step."""

    def __init__(self, weights: Mapping[str, torch.Tensor], prefix: str, *, settings: bool) -> None:
        self._weights = dict(weights)
        self._prefix = prefix
        self._shows_settings = settings
        self._accumulated: dict[str, None] = {}
        """The names of the weights whose gradients were computed since the last step, in that order."""

    def accumulation_hooks(self) -> list[Removable]:
        """Install hooks that record the order in which the backward pass computes the weights' gradients."""
        trained = [(name, w) for name, w in self._weights.items() if w.requires_grad and w.is_leaf]
        # The method has no annotations in torch.
        return [w.register_post_accumulate_grad_hook(partial(self._record, n)) for n, w in trained]  # type: ignore[no-untyped-call]

    def _record(self, name: str, weight: torch.Tensor) -> None:
        # A later backward pass of the same step replaces an earlier one.
        self._accumulated.pop(name, None)
        self._accumulated[name] = None

    def _in_backward_order(self) -> list[tuple[str, torch.Tensor]]:
        """The weights in the order of their gradients; the last weights first where hooks recorded none (FSDP)."""
        recorded = [name for name in self._accumulated if name in self._weights]
        others = [name for name in reversed(self._weights) if name not in self._accumulated]
        return [(name, self._weights[name]) for name in (*recorded, *others)]

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        handler = taps.tap_handler()
        if handler is None:
            return
        for setting, values in (self._settings(optimizer) if self._shows_settings else {}).items():
            handler.tap(f"{self._prefix}optimizer.{setting}", values, None, {"kind": "optimizer"})
        tap_gradients(handler, optimizer, self._in_backward_order())

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._accumulated.clear()
        handler = taps.tap_handler()
        if handler is None:
            return
        for name, weight in self._weights.items():
            for key, value in optimizer.state.get(weight, {}).items():
                if isinstance(value, torch.Tensor):
                    handler.tap(f"{name}.{key}", value, None, {"kind": "optimizer", "updated": True})
            if weight.requires_grad:
                handler.tap(name, weight, None, {"kind": "param", "updated": True})

    def _settings(self, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
        """Return each numeric setting as one value per weight; NaN for a weight that the optimizer does not have."""
        trained = {id(w): i for i, w in enumerate(w for w in self._weights.values() if w.requires_grad)}
        found: dict[str, torch.Tensor] = {}
        for group in optimizer.param_groups:
            places = [trained[id(weight)] for weight in group["params"] if id(weight) in trained]
            for setting, number in _numbers(group):
                if setting not in found:
                    found[setting] = torch.full((len(trained),), math.nan, dtype=torch.float64, device="cpu")
                found[setting][places] = number
        return found


# Settings of how a step is computed, which do not change its result.
_NO_SETTINGS = frozenset({"foreach", "fused", "capturable", "differentiable"})


def _numbers(group: Mapping[str, Any]) -> list[tuple[str, float]]:
    numbers = []
    for setting, value in group.items():
        if setting == "params" or setting in _NO_SETTINGS:
            continue
        items = value if isinstance(value, tuple) else (value,)
        for place, item in enumerate(items):
            if isinstance(item, torch.Tensor) and item.numel() == 1:
                item = item.item()
            if isinstance(item, _SETTING):
                numbers.append((f"{setting}[{place}]" if isinstance(value, tuple) else setting, float(item)))
    return numbers


def scale_of(optimizer: torch.optim.Optimizer) -> torch.Tensor | None:
    """Return the factor that a gradient scaler left in the gradients for a fused step to remove; None without one."""
    scaler = getattr(optimizer, "grad_scale", None)
    return scaler if isinstance(scaler, torch.Tensor) else None


def tap_gradients(
    handler: taps.TapHandler, optimizer: torch.optim.Optimizer, weights: Iterable[tuple[str, torch.Tensor]]
) -> None:
    """Tap the gradients that an optimizer reads, without the factor that a scaler has left in them."""
    scale = scale_of(optimizer)
    for name, weight in weights:
        if weight.grad is not None and scale is None:
            handler.tap(name, weight.grad, None, {"kind": "param_grad"})
        elif weight.grad is not None and scale is not None:
            _tap_scaled(handler, name, weight.grad, scale)


def _tap_scaled(handler: taps.TapHandler, name: str, gradient: torch.Tensor, scale: torch.Tensor) -> None:
    """Tap a gradient without its factor; a graft is written with the factor."""
    factor = scale.to(gradient.device)
    shown = gradient.detach() / factor
    # Compare only this rank's shard: comparing whole DTensors is a collective.
    local = shown.to_local() if hasattr(shown, "to_local") else shown
    before = local.clone()
    handler.tap(name, shown, None, {"kind": "param_grad"})
    if not torch.equal(before, local):
        with torch.no_grad():
            gradient.copy_(shown * factor)
