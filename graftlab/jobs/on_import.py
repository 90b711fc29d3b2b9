"""Prepares a job that the environment asks to join or to record, when it imports graftlab."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from graftlab.config import GraftConfig, enabled
from graftlab.errors import ConfigError
from graftlab.jobs.attach import arm, is_armed
from graftlab.recordings.by_environment import record_by_environment
from graftlab.taps import calls
from graftlab.taps.watch import watch

logger = logging.getLogger(__name__)


def prepare() -> None:
    """Join, or record, from the first tap or step on.

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
        if config.watch is not None:
            _watch_first_model(config.watch)


def _watch_first_model(include: str) -> None:
    """Watch the first outermost module with parameters that is called; each of its calls is a step.

    ``include`` is that of :func:`graftlab.watch`.
    """
    handle: Any = None

    def on_call(module: torch.nn.Module, inputs: Any) -> None:
        # The outermost module is called first, so this is one; a loss has no parameters.
        if next(module.parameters(), None) is None or calls.tap_handler() is None:
            return
        handle.remove()
        watched = watch(module, include=include)
        if not watched.names:
            logger.warning("GRAFTLAB_WATCH=%r matches no module of %s", include, type(module).__name__)
        # Takes effect at the next call, because this one's hooks are listed already. A step ends where the next one
        # begins, so its backward pass belongs to it.
        module.register_forward_pre_hook(_end_step)

    handle = register_module_forward_pre_hook(on_call)


def _end_step(module: torch.nn.Module, inputs: Any) -> None:
    calls.step()
