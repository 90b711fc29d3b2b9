"""Copies of a transform's inputs, which it may do with as it likes."""

from __future__ import annotations

import copy
from typing import Any

import torch

from graftlab.errors import TransformError


class Uncopied:
    """Stands for a part of the extras that cannot be copied, so that no transform could change the model by it."""

    def __init__(self, kind: str, reason: str) -> None:
        self._kind, self._reason = kind, reason

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        raise TransformError(
            f"this part of the tap's extras is a {self._kind} that cannot be copied ({self._reason}), so the transform "
            "does not get it; put what it needs of it into the extras"
        )

    def __repr__(self) -> str:
        return f"<a {self._kind} that cannot be copied: {self._reason}>"


def private_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous copy, conjugations and negations carried out."""
    return tensor.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)


def private_extras(extras: Any) -> Any:
    """A copy of extras: tensors as :func:`private_tensor` has them, the rest as ``copy.deepcopy`` does."""
    if extras is None or type(extras) in (bool, int, float, str, bytes):
        return extras
    if type(extras) is dict:
        return {key: private_extras(value) for key, value in extras.items()}
    if type(extras) in (list, tuple):
        return type(extras)(map(private_extras, extras))
    if isinstance(extras, torch.Tensor) and extras.layout == torch.strided and not extras.is_meta:
        local = extras.to_local() if hasattr(extras, "to_local") else extras
        return private_tensor(local)
    try:
        return copy.deepcopy(extras)
    except Exception as error:  # of the user's class, which may raise what it likes
        return Uncopied(type(extras).__qualname__, f"{type(error).__name__}: {error}")
