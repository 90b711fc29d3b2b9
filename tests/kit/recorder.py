"""A tap handler of this process that records and grafts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


class Recorder:
    """A handler that records each tap, and grafts as a rank does."""

    def __init__(self) -> None:
        self.shown: list[tuple[str, torch.Tensor]] = []
        self.grafts: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {}
        self.tags: dict[str, dict[str, Any]] = {}
        self.moment = 0

    def step(self) -> None:
        self.moment += 1

    def may_take(self, path: str) -> bool:
        return True

    def tap(self, name: str, value: Any, extras: Any, tags: Any, replace: bool = False) -> Any:
        label = f"{name} {tags['kind']}" if "kind" in tags else name
        self.tags[label] = dict(tags)
        self.shown.append((label, value.detach().clone()))
        graft = self.grafts.get(label)
        if graft is None:
            return value
        new = graft(value.detach())
        if replace:
            return value + (new - value).detach() if value.requires_grad else new.clone()
        value.data.copy_(new)
        return value

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.shown]
