"""The pairs of tensors that a plan's ``keep`` filter keeps on a rank, with the transform's inputs, newest last."""

from __future__ import annotations

import copy
import ctypes
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch

from graftlab.base import limits
from graftlab.base.tags import PLACE_TAGS, RESERVED_TAGS, plain
from graftlab.base.tensor_bytes import copyable
from graftlab.errors import SessionError
from graftlab.transforms import GraftTransformInput

OCCURRENCE = "occurrence"
"""The tag by which a question chooses a tap's call in its step. Answers have it from the second call on."""
# The most taps remembered whose newest pair was not kept.
_MISSING_LIMIT = 10_000
# How often the heap is trimmed for each budget's worth of kept bytes.
_TRIMS_A_BUDGET = 8


@dataclass(frozen=True)
class KeptPair:
    """Both values of one tap before any graft, and the transform's input; all on the CPU.

    ``value`` is None if the transform in force failed. Then only the input exists, for trying a different transform.
    ``occurrence`` is the number of the tap's call in its step.
    """

    graft_input: GraftTransformInput
    value: torch.Tensor | None
    occurrence: int = 0

    @property
    def tags(self) -> dict[str, Any]:
        return self.graft_input.tags

    @property
    def baseline(self) -> torch.Tensor | None:
        return self.value if self.graft_input.direction == "b2t" else self.graft_input.target

    @property
    def target(self) -> torch.Tensor | None:
        return self.graft_input.target if self.graft_input.direction == "b2t" else self.value

    @property
    def nbytes(self) -> int:
        """Bytes kept; a tensor that occurs twice counts once."""
        tensors = [self.value, self.graft_input.target, *self.graft_input.received_list]
        return sum({id(tensor): tensor.nbytes for tensor in tensors if tensor is not None}.values())


@dataclass(frozen=True)
class _MissingPair:
    """A tap's newest pair that was dropped or never kept; ``number`` counts the pairs added so far."""

    number: int
    tags: dict[str, Any]
    occurrence: int
    why: str


class KeptPairs:
    """Keeps pairs up to ``budget`` bytes, then drops the oldest. Any thread may query it."""

    def __init__(self, budget: int = limits.KEEP_BUDGET) -> None:
        self._budget = budget
        self._bytes = 0
        # Each with its number among all added pairs.
        self._pairs: deque[tuple[int, KeptPair]] = deque()
        self._added = 0
        self._missing: dict[Any, _MissingPair] = {}
        self._since_trim = 0
        self._lock = threading.Lock()

    def add(self, graft_input: GraftTransformInput, value: torch.Tensor | None, occurrence: int = 0) -> str | None:
        """Keep copies of the input and of the transform's result, if it has one. ``occurrence`` is the call's number.

        Returns a note if the pair alone exceeds the budget and was not kept, or if a part of it could not be kept.
        """
        # Usually the value is one of the received tensors, and need not be kept twice.
        same = None
        if value is not None:
            same = next((i for i, tensor in enumerate(graft_input.received_list) if _is_same(tensor, value)), None)
        tensors = [graft_input.target, *graft_input.received_list]
        size = sum(each.nbytes for each in (tensors if value is None or same is not None else [*tensors, value]))
        if size > self._budget:
            with self._lock:
                self._added += 1
                self._miss(
                    self._added,
                    graft_input.tags,
                    occurrence,
                    f"was not kept: its tensors have {size >> 20} MiB and the budget of a rank is {self._budget >> 20} "
                    f"MiB; keep it with gl.launch(..., keep_budget={-(-size >> 20)} << 20) or more",
                )
            return f"not kept: the tensors have {size >> 20} MiB and the budget is {self._budget >> 20} MiB"
        note: str | None = None
        with self._lock:
            # First, so that old and new tensors never exist at the same time.
            self._make_room(size)
        received = [_copy(tensor) for tensor in graft_input.received_list]
        try:
            extras = copy.deepcopy(graft_input.target_extras)
        except Exception as error:
            # The pair is useful without them, except for transforms that need them.
            extras = None
            note = f"kept without the receiver's extras, which cannot be copied: {error}"
        own = replace(
            graft_input,
            tags=dict(graft_input.tags),
            received_list=received,
            target=_copy(graft_input.target),
            target_extras=extras,
        )
        if value is not None:
            value = _copy(value) if same is None else received[same]
        pair = KeptPair(own, value, occurrence)
        with self._lock:
            self._added += 1
            if value is None:
                self._miss(self._added, own.tags, occurrence, "was not kept: its transform failed")
            else:
                self._missing.pop(_tap(own.tags), None)
            self._pairs.append((self._added, pair))
            self._bytes += pair.nbytes
        self._since_trim += size
        if self._since_trim > self._budget // _TRIMS_A_BUDGET:
            self._since_trim = 0
            _trim_heap()
        return note

    def _make_room(self, size: int) -> None:
        while self._pairs and self._bytes + size > self._budget:
            number, gone = self._pairs.popleft()
            self._bytes -= gone.nbytes
            known = self._missing.get(_tap(gone.tags))
            if known is None or known.number < number:
                self._miss(
                    number,
                    gone.tags,
                    gone.occurrence,
                    "is no longer kept: newer pairs replaced it, because the budget of a rank is "
                    f"{self._budget >> 20} MiB; set a larger one, in bytes, with gl.launch(..., keep_budget=...)",
                )

    def _miss(self, number: int, tags: Mapping[str, Any], occurrence: int, why: str) -> None:
        if len(self._missing) >= _MISSING_LIMIT:
            self._missing.pop(next(iter(self._missing)))
        self._missing[_tap(tags)] = _MissingPair(number, dict(tags), occurrence, why)

    def find(self, name: str, tags: Mapping[str, object], failed: bool = False) -> KeptPair | None:
        """Return the tap's newest pair with these plain tag values; with ``failed``, also a pair without a value.

        The tag ``occurrence`` chooses a call of its step, unless the tap has an own tag of that name. Raises
        :class:`SessionError` with the reason if the newest pair was not kept or was dropped.
        """

        def fits(each: KeptPair | _MissingPair) -> bool:
            known = {OCCURRENCE: each.occurrence, **each.tags}
            return known.get("name") == name and all(plain(known.get(k)) == v for k, v in tags.items())

        with self._lock:
            pairs = [(n, pair) for n, pair in self._pairs if fits(pair) and (failed or pair.value is not None)]
            if pairs:
                number, newest = pairs[-1]
                missing = self._missing.get(_tap(newest.tags))
                if missing is None or missing.number <= number or not fits(missing):
                    return newest
            else:
                missing = max((m for m in self._missing.values() if fits(m)), key=lambda m: m.number, default=None)
                if missing is None:
                    return None
        own = [f"{tag}={plain(value)}" for tag, value in missing.tags.items() if tag not in RESERVED_TAGS]
        which = f"{' '.join([name, *own])} at step {missing.tags.get('step')}"
        older = f". An older pair is kept: step={newest.tags.get('step')}" if pairs else ""
        raise SessionError(f"the pair of {which} {missing.why}{older}")

    def tags(self, failed: bool = False) -> list[dict[str, Any]]:
        """Return the tags of all kept pairs as plain values, oldest first; with ``failed``, also without a value."""
        with self._lock:
            pairs = [pair for _, pair in self._pairs if failed or pair.value is not None]
        return [_plain(pair) for pair in pairs]

    def missing(self) -> list[dict[str, Any]]:
        """Return the tags of the newest pair of each tap for which that pair is not kept."""
        with self._lock:
            missing = list(self._missing.values())
        return [_plain(each) for each in missing]


def _plain(kept: KeptPair | _MissingPair) -> dict[str, Any]:
    called_again = {OCCURRENCE: kept.occurrence} if kept.occurrence else {}
    return {tag: plain(value) for tag, value in {**called_again, **kept.tags}.items()}


def _tap(tags: Mapping[str, Any]) -> tuple[Any, ...]:
    """Return the identity of a tap on this rank."""
    own = ((tag, plain(value)) for tag, value in tags.items() if tag not in PLACE_TAGS)
    return tuple(sorted(own, key=lambda pair: pair[0]))


def _load_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # a different C library
        return None
    return trim


_trim = _load_trim()


def _trim_heap() -> None:
    """Return freed memory to the system.

    Small long-lived objects of a pair, such as its dicts, lie between the model's tensors of that moment, whose freed
    memory then fits no tensor of the same size: with a budget of 256 MiB a rank grew by 400 MiB.
    """
    if _trim is not None:
        _trim(0)


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    same_place = one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
    return same_place and one.shape == other.shape and one.dtype == other.dtype


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    return (
        copyable(tensor.detach()).to(device="cpu", copy=True, memory_format=torch.contiguous_format).view(tensor.dtype)
    )
