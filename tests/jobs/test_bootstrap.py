"""What the sitecustomize of compared scripts does to the class of modules, without a process."""

from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import graftlab
from graftlab.taps.outermost_calls import OutermostCalls

_FILE = Path(graftlab.__file__).parent / "jobs" / "bootstrap" / "sitecustomize.py"


class Begun:
    """A class of modules that is prepared as in a script, and the calls with which graftlab began."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

        class Module:
            def parameters(self) -> Any:
                return iter([1])

            def __call__(self, x: Any) -> Any:
                return (x, "called")

        self.base: Any = Module
        prepare: Any = runpy.run_path(str(_FILE))["_prepare"]
        prepare.__globals__["_graftlab"] = lambda: SimpleNamespace(begin_from_environment=self._begin)
        prepare(Module)

    def _begin(self, module: Any, args: Any, kwargs: Any) -> Any:
        self.calls.append(args)
        return module(*args)


def test_a_call_that_was_kept_and_is_wrapped_again_as_in_compiling_ends() -> None:
    begun = Begun()
    kept: Callable[..., Any] = begun.base.__call__
    assert begun.base()(1) == (1, "called")

    def as_fx_does(module: Any, *args: Any) -> Any:
        return kept(module, *args)

    begun.base.__call__ = as_fx_does
    assert begun.base()(2) == (2, "called")
    assert begun.calls == [(1,)]


def test_a_call_that_was_kept_reaches_graftlabs_present_one() -> None:
    begun = Begun()
    kept: Callable[..., Any] = begun.base.__call__
    begun.base()(1)

    def held(module: Any, *args: Any) -> Any:
        return "held"

    held.__module__ = OutermostCalls.__module__
    begun.base.__call__ = held
    assert kept(begun.base(), 2) == "held"


def test_a_trace_before_the_first_call_is_not_taken_for_it() -> None:
    begun = Begun()
    proxy = torch.fx.Proxy(torch.fx.Graph().placeholder("x"))
    assert begun.base()(proxy)[1] == "called"
    assert begun.base()(3) == (3, "called")
    assert begun.calls == [(3,)]
