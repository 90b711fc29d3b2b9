"""A function that is compiled where it runs, once, however often it is sent to a rank."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graftlab.base import shipping
from graftlab.taps import calls
from graftlab.taps.compiled import only_taps

# The function that this process has compiled last, by what it is, its options and its taps.
_compiled: dict[tuple[str, str, tuple[str, ...] | None], Callable[..., Any]] = {}


@dataclass(frozen=True)
class CompiledCall:
    """Calls a function as ``torch.compile`` makes it, with the taps of these names in its graphs (None: all of them).

    ``source`` is an expression, which is evaluated where ``%%graft`` cells run, or ``packed`` a function.
    """

    source: str | None
    packed: bytes | None
    options: Mapping[str, Any] = field(default_factory=dict)
    names: tuple[str, ...] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with only_taps(self.names):
            return self._function()(*args, **kwargs)

    def _function(self) -> Callable[..., Any]:
        what = self.packed if self.packed is not None else str(self.source).encode()
        key = (hashlib.sha256(what).hexdigest(), repr(sorted(self.options.items())), self.names)
        if key not in _compiled:
            # torch runs code that it has compiled eight times uncompiled from then on, and says so in a log alone.
            torch.compiler.reset()
            _compiled.clear()
            _compiled[key] = torch.compile(self._unpacked(), **self.options)
        return _compiled[key]

    def _unpacked(self) -> Callable[..., Any]:
        if self.packed is not None:
            function: Callable[..., Any] = shipping.unpack_function(self.packed)
            return function
        here = calls.here()
        assert here is not None
        made: Callable[..., Any] = eval(f"lambda: ({self.source}\n)", here.vars)
        return made
