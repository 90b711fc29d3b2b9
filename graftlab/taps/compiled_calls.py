"""Call a function compiled by ``torch.compile``; each rank compiles it only once, however often it is sent."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from graftlab.base import shipping
from graftlab.taps import calls
from graftlab.taps.compiled import only_taps

# The function that this process compiled last, by its digest, its options and its taps.
_compiled: dict[tuple[str, str, tuple[str, ...] | None], Callable[..., Any]] = {}


@dataclass(frozen=True)
class CompiledCall:
    """Calls a function through ``torch.compile``, with the taps of these names in its graphs (None: all taps).

    The function is either ``source``, an expression evaluated in the namespace of ``%%graft`` cells, or ``packed``.
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
            # After eight compilations of the same code torch runs it uncompiled, and reports that only in a log.
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
