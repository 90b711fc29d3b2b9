"""The outermost calls of models, seen without a change to any code."""

from __future__ import annotations

from collections.abc import Callable, Generator
from functools import partial
from types import GeneratorType
from typing import Any

import torch
from torch.nn.utils.parametrize import ParametrizationList

from graftlab.taps.backward import is_backward

OnCall = Callable[[torch.nn.Module, tuple[Any, ...], dict[str, Any]], None]
OnResult = Callable[[torch.nn.Module, Any], None]


class OutermostCalls:
    """While installed, calls ``before(module, args, kwargs)`` before each call of a module with parameters that is not
    part of another module's call, and ``after(module, result)`` after it. A context manager.

    Calls inside such a call run as if nothing were installed, also those of a generator that it returns. The
    parametrizations of a weight are no such modules, nor is what they call. A call in code that is being compiled is
    not seen, nor is one in a backward pass, where checkpointed modules are called again.
    """

    def __init__(self, before: OnCall, after: OnResult = lambda module, result: None) -> None:
        self._before, self._after = before, after
        self._original: Callable[..., Any] = torch.nn.Module.__call__
        self._is_installed = self._is_inside = False

    def install(self) -> None:
        """See outermost calls from now on."""
        self._is_installed = True
        self._original = torch.nn.Module.__call__
        self._patch()

    def remove(self) -> None:
        """See no further call."""
        self._is_installed = False
        self._set(self._original)

    def __enter__(self) -> OutermostCalls:
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def call(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the module, and ``before`` it."""
        # Code may have kept `model.__call__` from a time when this was installed, so that alone is no sign of it.
        is_outermost = self._is_installed and not self._is_inside and not is_backward()
        if not is_outermost or torch.compiler.is_compiling() or next(module.parameters(), None) is None:
            return self._original(module, *args, **kwargs)
        # It computes a weight, as weight norm does, wherever code reads that, also outside of the model's calls.
        is_model = not isinstance(module, ParametrizationList)
        # A global pre-hook would not get the named arguments, and would run for each module inside.
        self._set(self._original)
        self._is_inside = True
        try:
            if is_model:
                self._before(module, args, kwargs)
            result = self._original(module, *args, **kwargs)
            if is_model:
                self._after(module, result)
        finally:
            self._leave()
        return self._inside(result) if isinstance(result, GeneratorType) else result

    def _leave(self) -> None:
        self._is_inside = False
        if self._is_installed:
            self._patch()

    def _inside(self, items: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        """Run a generator, so that the calls in it are not outermost ones."""
        move: Callable[[], Any] = partial(next, items)
        while True:
            if was_outside := self._is_installed and not self._is_inside:
                self._set(self._original)
                self._is_inside = True
            try:
                item = move()
            except StopIteration as end:
                return end.value
            finally:
                if was_outside:
                    self._leave()
            try:
                sent = yield item
                move = partial(items.send, sent)
            except GeneratorExit:
                items.close()
                raise
            except BaseException as error:
                move = partial(items.throw, error)

    def _patch(self) -> None:
        def called(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
            return self.call(module, args, kwargs)

        self._set(called)

    @staticmethod
    def _set(call: Callable[..., Any]) -> None:
        torch.nn.Module.__call__ = call  # type: ignore[method-assign]
