"""The grafter of this process, once it is a rank."""

from __future__ import annotations

import os

import torch

from graftlab.grafting.grafter import Grafter
from graftlab.taps import calls, compiled

_grafter: Grafter | None = None


def activate(grafter: Grafter, where: calls.Here) -> None:
    """Make this process a rank: from now on its taps go to this grafter. Called once, by whatever makes ranks."""
    global _grafter
    _grafter = grafter
    install_handler(grafter, where)
    # Forked children are no ranks; see there.
    os.register_at_fork(after_in_child=_forget)


def install_handler(handler: calls.RankTapHandler, where: calls.Here | None) -> None:
    """Give this process's taps to one that stands before the grafter, or in its place."""
    calls.activate(handler, where, compiled, torch.compiler.is_dynamo_compiling)


def deactivate() -> None:
    """Make this process no rank any more: its taps are left alone from now on."""
    _forget()
    calls.deactivate()


def _forget() -> None:
    global _grafter
    _grafter = None


def grafter() -> Grafter | None:
    """This rank's grafter; None outside a session."""
    return _grafter
