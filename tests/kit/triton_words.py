"""A stand-in for Triton's language, by torch operations on the CPU: what a kernel computes, without Triton.

It has the words that graftlab's kernel uses, and no others. A read or write outside the memory raises.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NamedTuple

import torch


class Pointer(NamedTuple):
    memory: torch.Tensor
    at: Any = 0

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.memory, self.at + more)


class Value(torch.Tensor):
    """A value of the kernel: unlike a tensor, it stays as it is where a name for it is given another."""

    def __iadd__(self, more: Any) -> Any:  # type: ignore[override, misc]
        return self + more


def modules() -> dict[str, ModuleType]:
    """``triton`` and ``triton.language``, by name."""
    program = 0

    class Kernel:
        def __init__(self, run: Callable[..., None]) -> None:
            self.run = run

        def __getitem__(self, grid: tuple[int]) -> Callable[..., None]:
            def launch(*given: Any, **constants: Any) -> None:
                nonlocal program
                arguments = [Pointer(each.view(-1)) if isinstance(each, torch.Tensor) else each for each in given]
                for each in range(grid[0]):
                    program = each
                    self.run(*arguments, **constants)

            return launch

    def load(pointer: Pointer, mask: torch.Tensor | None = None, other: float = 0) -> torch.Tensor:
        memory, at = pointer
        if mask is None:
            return memory[at]
        found = torch.full(at.shape, other, dtype=memory.dtype)
        found[mask] = memory[at[mask]]
        return found

    def store(pointer: Pointer, value: Any) -> None:
        pointer.memory[int(pointer.at)] = value

    language = ModuleType("triton.language")
    words: dict[str, Any] = {
        "constexpr": int,
        "float64": torch.float64,
        "int64": torch.int64,
        "program_id": lambda axis: torch.tensor(program),
        "arange": torch.arange,
        "zeros": lambda shape, dtype: torch.zeros(shape, dtype=dtype).as_subclass(Value),
        "where": torch.where,
        "abs": torch.abs,
        "sum": torch.sum,
        "min": torch.amin,
        "max": torch.amax,
        "maximum": torch.clamp_min,
        "load": load,
        "store": store,
    }
    for word, means in words.items():
        setattr(language, word, means)
    triton = ModuleType("triton")
    triton.__spec__ = ModuleSpec("triton", None)
    for word, means in {"jit": Kernel, "cdiv": lambda count, of: -(-count // of), "language": language}.items():
        setattr(triton, word, means)
    return {"triton": triton, "triton.language": language}
