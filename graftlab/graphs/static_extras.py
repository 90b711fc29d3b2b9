"""The extras of a tap in a captured function, where no host code runs at replay."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from graftlab.errors import GraphError
from graftlab.graphs.slots import FillContext
from graftlab.graphs.tap_sites import Rows, copy_bits, cut, rows_of
from graftlab.taps.extras import together

Path = tuple[Any, ...]
"""How to get to a part of the extras: keys and indices, outermost first."""

# One per request, whatever the batch's sizes, as `align_by_request` takes them.
_OF_REQUESTS = frozenset({"rids_int", "bootstrap_room_ids_int", "request_lens"})


@dataclass(frozen=True, eq=False)
class _Part:
    """A tensor in the extras: the static memory into which the graph copies it, or the tensor on the host."""

    tensor: Tensor
    rows: Rows | None
    is_copied: bool


class StaticExtras:
    """The extras of one tap, first seen when its function runs to be captured.

    Tensors on the device of the tap's value have static memory here, into which the graph copies them. Those of the
    host, in a graph of a GPU's kernels, are read where they lie. A callable is called on the host after each replay.
    All other values must be the same each time that the function runs, since a replay could not notice a change.

    Tensors with a row for each padded request or token are passed on without the padding rows.
    """

    def __init__(self, tap: str, around: Mapping[str, Any] | None, own: Any, like: Tensor, padded: FillContext) -> None:
        self._tap, self._like, self._padded = tap, like, padded
        self._function: Callable[[], Any] | None = own if callable(own) else None
        self._whole = together(around, None if callable(own) else own)
        self._parts: dict[Path, _Part] = {}
        self.plain: dict[Path, Any] = {}
        """The values that must be the same each time."""
        for path, leaf in _leaves(self._whole):
            if isinstance(leaf, Tensor):
                self._parts[path] = self._part(path, leaf)
            else:
                self.plain[path] = leaf

    def _part(self, path: Path, tensor: Tensor) -> _Part:
        rows = "requests" if path[-1:] and path[-1] in _OF_REQUESTS else rows_of(tensor, self._padded)
        fixed = isinstance(tensor, torch.nn.Parameter) or tensor.device != self._like.device
        if fixed or tensor.layout != torch.strided or tensor.is_meta or hasattr(tensor, "to_local"):
            return _Part(tensor, rows, is_copied=False)
        # Outside inference mode, where a tensor that was made inside it could not be written.
        with torch.inference_mode(False), torch.no_grad():
            return _Part(torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device), rows, is_copied=True)

    def update(self, around: Mapping[str, Any] | None, own: Any) -> None:
        """Copy the tensors of a run of the function, with one kernel each if kernels are captured.

        Raises :class:`GraphError` for a value that has changed.
        """
        if callable(own) is not (self._function is not None):
            raise self._error("extras", "were a callable at one time and not at another")
        found = dict(_leaves(together(around, None if callable(own) else own)))
        if found.keys() != self._parts.keys() | self.plain.keys():
            raise self._error("extras", f"had the entries {[_name(each) for each in found]} this time")
        self.compare({path: leaf for path, leaf in found.items() if path in self.plain})
        for path, part in self._parts.items():
            tensor = found[path]
            if not isinstance(tensor, Tensor) or (tensor.shape, tensor.dtype) != (part.tensor.shape, part.tensor.dtype):
                raise self._error(_name(path), "was a tensor of another shape or dtype, or none, this time")
            if part.is_copied:
                copy_bits(part.tensor, tensor.detach())
            elif tensor is not part.tensor and tensor.data_ptr() != part.tensor.data_ptr():
                raise self._error(_name(path), f"is on {tensor.device} and was created again this time")

    def compare(self, plain: Mapping[Path, Any]) -> None:
        """Raise :class:`GraphError` for plain objects that differ from those of the first run."""
        for path, before in self.plain.items():
            if path in plain and not _are_same(before, plain[path]):
                raise self._error(
                    _name(path), f"was {_shown(before)} at one time, and {_shown(plain[path])} at another"
                )

    def _error(self, what: str, how: str) -> GraphError:
        return GraphError(
            f"tap {self._tap!r} in a captured function: {what} {how}. No Python runs there at a replay, which would "
            "repeat the values of the capture. Make it a tensor that the graph computes, or give extras=lambda: {...}, "
            "which is called on the host at each replay"
        )

    def given(self, ctx: FillContext) -> Any:
        """The extras of the batch that was replayed last."""
        heads = {path: cut(part.tensor, part.rows, ctx) for path, part in self._parts.items()}
        around = _rebuilt(self._whole, heads)
        if self._function is None:
            return around
        own = self._function()
        tensors = {path: leaf for path, leaf in _leaves(own) if isinstance(leaf, Tensor)}
        heads = {path: cut(leaf, self._rows_in(path, leaf), ctx) for path, leaf in tensors.items()}
        return together(around, _rebuilt(own, heads))

    def _rows_in(self, path: Path, tensor: Tensor) -> Rows | None:
        """For extras that the host made for this replay, which may already have the batch's own size."""
        of_requests = path[-1:] and path[-1] in _OF_REQUESTS and tensor.dim() and len(tensor) == self._padded.padded_bs
        return "requests" if of_requests else rows_of(tensor, self._padded)


def _leaves(extras: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if type(extras) is dict:
        for key, value in extras.items():
            yield from _leaves(value, (*path, key))
    elif isinstance(extras, (list, tuple)):
        for index, value in enumerate(extras):
            yield from _leaves(value, (*path, index))
    else:
        yield path, extras


def _rebuilt(extras: Any, tensors: Mapping[Path, Tensor], path: Path = ()) -> Any:
    if type(extras) is dict:
        return {key: _rebuilt(value, tensors, (*path, key)) for key, value in extras.items()}
    if isinstance(extras, (list, tuple)):
        items = [_rebuilt(value, tensors, (*path, index)) for index, value in enumerate(extras)]
        return type(extras)(*items) if hasattr(extras, "_fields") else type(extras)(items)
    return tensors.get(path, extras)


def _are_same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    try:
        # Comparing arrays gives no bool, NaN equals nothing, and most classes compare by identity.
        return bool(one == other) or pickle.dumps(one) == pickle.dumps(other)
    except Exception:
        try:
            return pickle.dumps(one) == pickle.dumps(other)
        except Exception:  # what cannot be pickled cannot be told apart either
            return False


def _name(path: Path) -> str:
    return "extras" + "".join(f"[{key!r}]" for key in path)


def _shown(value: Any) -> str:
    text = repr(value)
    return f"the {type(value).__name__} {text if len(text) <= 60 else text[:57] + '...'}"
