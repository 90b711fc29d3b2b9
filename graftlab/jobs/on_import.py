"""Prepares a job, when it imports graftlab, to join or record if the environment asks for it."""

from __future__ import annotations

import logging
import sys
from typing import Any
from weakref import WeakSet

import torch
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_pre_hook

from graftlab.config import GraftConfig, enabled
from graftlab.errors import ConfigError
from graftlab.jobs.attach import arm, is_armed
from graftlab.recordings.by_environment import record_by_environment
from graftlab.taps import calls
from graftlab.taps.training import watch_training
from graftlab.taps.watch import named_functions, watch

logger = logging.getLogger(__name__)


def prepare() -> None:
    """Arrange to join or record from the first tap or step on.

    Raises :class:`ConfigError` if the environment's settings cannot be used.
    """
    if is_armed():
        return
    joins, records = enabled(), record_by_environment()
    if joins and records:
        raise ConfigError(
            "GRAFTLAB_RECORD and GRAFTLAB_ENABLE are both set; a job that joins records with gl.attach(), and then "
            "`with gl.record(folder):`"
        )
    if joins or records:
        config = GraftConfig.from_env()
        if joins:
            arm()
        if config.watches:
            watch_first_model(config)


def watch_first_model(config: GraftConfig) -> None:
    """Watch the first outermost module with parameters that is called; each of its calls is a step.

    Raises :class:`ConfigError` for a torch function that does not exist.
    """
    include = "True" if config.watch is None else config.watch
    try:
        functions = named_functions(filter(None, map(str.strip, (config.watch_functions or "").split(","))))
    except ValueError as error:
        raise ConfigError(
            f"watch_functions (GRAFTLAB_WATCH_FUNCTIONS) is {config.watch_functions!r}: {error}"
        ) from None
    handle: Any = None

    def on_call(module: torch.nn.Module, inputs: Any) -> Any:
        # The outermost module is called first, so this is one. A loss has no parameters.
        if next(module.parameters(), None) is None or calls.tap_handler() is None:
            return None
        handle.remove()
        watched = watch(
            module,
            include=include,
            inside=config.watch_inside,
            functions=sorted(functions),
            params=config.watch_params,
            inputs=config.watch_inputs,
            grads=config.watch_grads,
        )
        if not watched.names and not (config.watch_inside or functions or config.watch_inputs):
            logger.warning("GRAFTLAB_WATCH=%r matches no module of %s", include, type(module).__name__)
        if config.watch_optimizer:
            _watch_optimizers(module)
        # Takes effect at the next call, because torch has already collected this one's hooks. A step ends where the
        # next begins, so it includes its backward pass.
        module.register_forward_pre_hook(_end_step, prepend=True)
        # torch passes keyword arguments to no hook of this kind, and their taps write into the caller's own dict.
        keywords = sys._getframe(1).f_locals.get("kwargs")
        return watched.catch_up(inputs, keywords if isinstance(keywords, dict) else {})

    handle = register_module_forward_pre_hook(on_call)


def _watch_optimizers(model: torch.nn.Module) -> None:
    """Watch each optimizer of the model's weights from its first step on."""
    weights = {id(weight) for weight in model.parameters()}
    known: WeakSet[torch.optim.Optimizer] = WeakSet()

    def on_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer in known:
            return
        known.add(optimizer)
        if any(id(weight) in weights for group in optimizer.param_groups for weight in group["params"]):
            watch_training(model, optimizer)

    register_optimizer_step_pre_hook(on_step)


def _end_step(module: torch.nn.Module, inputs: Any) -> None:
    calls.step()
