"""Keep functions out of graphs that ``torch.compile`` traces."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from torch.utils._python_dispatch import TorchDispatchMode

P = ParamSpec("P")
R = TypeVar("R")

COMPILER = "torch._dynamo"
"""The module that torch imports before it compiles anything."""


def outside_compiled_code(function: Callable[P, R]) -> Callable[P, R]:
    """Like ``torch.compiler.disable``, but without its import of ``torch._dynamo``, which takes seconds.

    Nothing is traced before that module is imported, so until then the function is called directly.
    """
    disabled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal disabled
        if disabled is None:
            if COMPILER not in sys.modules:
                return function(*args, **kwargs)
            import torch

            disabled = torch.compiler.disable(function)  # type: ignore[no-untyped-call]
        return disabled(*args, **kwargs)

    return call


class UntracedMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode whose own code is not compiled, without the import of the compiler that torch does for that."""

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)  # type: ignore[no-untyped-call]
        cls.__torch_dispatch__ = outside_compiled_code(cls.__torch_dispatch__)  # type: ignore[method-assign]

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else torch does the same by `torch.compiler.disable`.
        return False
