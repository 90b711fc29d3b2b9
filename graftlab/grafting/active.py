"""This process's grafter, if the process is a rank."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import torch

from graftlab.grafting.grafter import Grafter
from graftlab.taps import calls, compiled

_grafter: Grafter | None = None


class FirstTap:
    """Stands in for the handler of a process until its first tap or step, which calls :meth:`begin`."""

    def begin(self) -> calls.RankTapHandler | None:
        """Return the handler of this tap and all that follow; None if the taps of this process do nothing."""
        raise NotImplementedError

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        handler = self.begin()
        return value if handler is None else handler.tap(name, value, extras, tags, replace)

    @property
    def moment(self) -> object:
        return object()

    def may_take(self, path: str) -> bool:
        return True

    def step(self) -> None:
        handler = self.begin()
        if handler is not None:
            handler.step()


def activate(grafter: Grafter, where: calls.Here) -> None:
    """Make this process a rank whose taps go to this grafter. Called once."""
    global _grafter
    _grafter = grafter
    install_handler(grafter, where)
    # Forked children are not ranks; see there.
    os.register_at_fork(after_in_child=_forget)


def install_handler(handler: calls.RankTapHandler, where: calls.Here | None) -> None:
    """Send this process's taps to ``handler``, which may pass them on to the grafter."""
    calls.activate(handler, where, compiled, torch.compiler.is_dynamo_compiling)


def deactivate() -> None:
    """End this process's role as a rank: its taps do nothing from now on."""
    _forget()
    calls.deactivate()


def _forget() -> None:
    global _grafter
    _grafter = None


def grafter() -> Grafter | None:
    """Return this rank's grafter; None outside a session."""
    return _grafter
