"""Taps in the modules of a model that nobody's code watches: the first one that is called."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from graftlab.taps import calls
from graftlab.taps.watch import watch

logger = logging.getLogger(__name__)


def watch_first_model(include: str) -> None:
    """Watch the first module with parameters that is called from outside of any other; each call of it is a step.

    ``include`` is as :func:`graftlab.watch` takes it.
    """
    handle: Any = None

    def on_call(module: torch.nn.Module, inputs: Any) -> None:
        # The outermost module is the first to be called, so this is one; a loss has no parameters.
        if next(module.parameters(), None) is None or calls.tap_handler() is None:
            return
        handle.remove()
        watched = watch(module, include=include)
        if not watched.names:
            logger.warning("GRAFTLAB_WATCH=%r matches no module of %s", include, type(module).__name__)
        # Not at this call, whose hooks are listed already: a step ends where the next one begins, so that its backward
        # pass belongs to it.
        module.register_forward_pre_hook(_end_step)

    handle = register_module_forward_pre_hook(on_call)


def _end_step(module: torch.nn.Module, inputs: Any) -> None:
    calls.step()
