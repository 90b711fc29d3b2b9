"""What a plan's ``keep`` filter holds on a rank: both values of a tap and what they were made from, newest last."""

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

# Taps of which it is known that their newest pair is not held.
_MISSING_LIMIT = 10_000
# How often the heap is tidied while as much is kept as the budget has.
_TRIMS_A_BUDGET = 8


@dataclass(frozen=True)
class KeptPair:
    """Both values of one tap before anything was overwritten, and the input of the transform; all on the CPU.

    ``value`` is None where the transform in force failed: then there is an input to try another one on, and no pair.
    """

    graft_input: GraftTransformInput
    value: torch.Tensor | None

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
        """Bytes held; what two of the tensors share counts once."""
        tensors = [self.value, self.graft_input.target, *self.graft_input.received_list]
        return sum({id(tensor): _nbytes(tensor) for tensor in tensors if tensor is not None}.values())


@dataclass(frozen=True)
class _MissingPair:
    """The newest pair of a tap, where that is not held any more or never was; ``number`` counts what was added."""

    number: int
    tags: dict[str, Any]
    why: str


class KeptPairs:
    """Holds pairs until ``budget`` bytes are full, then lets the oldest go. Any thread may ask."""

    def __init__(self, budget: int = limits.KEEP_BUDGET) -> None:
        self._budget = budget
        self._bytes = 0
        # With the number of each among all that were added.
        self._pairs: deque[tuple[int, KeptPair]] = deque()
        self._added = 0
        self._missing: dict[Any, _MissingPair] = {}
        self._since_trim = 0
        self._lock = threading.Lock()

    def add(self, graft_input: GraftTransformInput, value: torch.Tensor | None) -> str | None:
        """Keep copies of the input and of the value that the transform made of it, if it made one.

        Returns a note when the pair alone is over the budget and was not kept, or not all of it could be.
        """
        # Usually the value is one of the received tensors, unchanged, and need not be kept twice.
        same = None
        if value is not None:
            same = next((i for i, tensor in enumerate(graft_input.received_list) if _is_same(tensor, value)), None)
        held = [graft_input.target, *graft_input.received_list]
        size = sum(map(_nbytes, held if value is None or same is not None else [*held, value]))
        if size > self._budget:
            with self._lock:
                self._added += 1
                self._miss(
                    self._added,
                    graft_input.tags,
                    f"was not kept: its tensors have {size >> 20} MiB and the budget of a rank is {self._budget >> 20} "
                    f"MiB; gl.launch(..., keep_budget={-(-size >> 20)} << 20) or more keeps it",
                )
            return f"not kept: the tensors have {size >> 20} MiB and the budget is {self._budget >> 20} MiB"
        note: str | None = None
        with self._lock:
            # First, so that both are never there at once.
            self._make_room(size)
        received = [_copy(tensor) for tensor in graft_input.received_list]
        try:
            extras = copy.deepcopy(graft_input.target_extras)
        except Exception as error:
            # The pair is worth keeping without them; only a transform that needs them cannot be tried on it.
            extras = None
            note = f"kept without the extras of its own tap, which cannot be copied: {error}"
        own = replace(
            graft_input,
            tags=dict(graft_input.tags),
            received_list=received,
            target=_copy(graft_input.target),
            target_extras=extras,
        )
        if value is not None:
            value = _copy(value) if same is None else received[same]
        pair = KeptPair(own, value)
        with self._lock:
            self._added += 1
            if value is None:
                self._miss(self._added, own.tags, "was not kept: its transform failed")
            else:
                self._missing.pop(_tap(own.tags), None)
            self._pairs.append((self._added, pair))
            self._bytes += pair.nbytes
        self._since_trim += size
        if self._since_trim > self._budget // _TRIMS_A_BUDGET:
            self._since_trim = 0
            _give_holes_back()
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
                    "is not kept any more: it had to go for newer ones, as the budget of a rank is "
                    f"{self._budget >> 20} MiB; gl.launch(..., keep_budget=...) takes more, in bytes",
                )

    def _miss(self, number: int, tags: Mapping[str, Any], why: str) -> None:
        if len(self._missing) >= _MISSING_LIMIT:
            self._missing.pop(next(iter(self._missing)))
        self._missing[_tap(tags)] = _MissingPair(number, dict(tags), why)

    def find(self, name: str, tags: Mapping[str, object], failed: bool = False) -> KeptPair | None:
        """The newest pair of this tap whose tags have these plain values; with ``failed``, one without a value too.

        Raises :class:`SessionError` that says why, where that pair is older than one of the same tap that is not held;
        and where there is none, because it is not held.
        """

        def fits(tags_of: Mapping[str, Any]) -> bool:
            return tags_of.get("name") == name and all(plain(tags_of.get(k)) == v for k, v in tags.items())

        with self._lock:
            pairs = [(n, pair) for n, pair in self._pairs if fits(pair.tags) and (failed or pair.value is not None)]
            if pairs:
                number, newest = pairs[-1]
                missing = self._missing.get(_tap(newest.tags))
                if missing is None or missing.number <= number or not fits(missing.tags):
                    return newest
            else:
                missing = max((m for m in self._missing.values() if fits(m.tags)), key=lambda m: m.number, default=None)
                if missing is None:
                    return None
        own = [f"{tag}={plain(value)}" for tag, value in missing.tags.items() if tag not in RESERVED_TAGS]
        which = f"{' '.join([name, *own])} at step {missing.tags.get('step')}"
        older = f". An older one is kept: step={newest.tags.get('step')}" if pairs else ""
        raise SessionError(f"the pair of {which} {missing.why}{older}")

    def tags(self, failed: bool = False) -> list[dict[str, Any]]:
        """The tags of every pair here as plain values, oldest first; with ``failed``, of those without a value too."""
        with self._lock:
            pairs = [pair for _, pair in self._pairs if failed or pair.value is not None]
        return [_plain(pair.tags) for pair in pairs]

    def missing(self) -> list[dict[str, Any]]:
        """The tags of each tap's newest pair, of those whose newest is not held."""
        with self._lock:
            missing = list(self._missing.values())
        return [_plain(each.tags) for each in missing]


def _plain(tags: Mapping[str, Any]) -> dict[str, Any]:
    return {tag: plain(value) for tag, value in tags.items()}


def _tap(tags: Mapping[str, Any]) -> tuple[Any, ...]:
    """Which tap it is, of this rank."""
    own = ((tag, plain(value)) for tag, value in tags.items() if tag not in PLACE_TAGS)
    return tuple(sorted(own, key=lambda pair: pair[0]))


def _load_trim() -> Callable[[int], int] | None:
    try:
        trim: Callable[[int], int] = ctypes.CDLL(None).malloc_trim
    except (OSError, AttributeError):  # another C library
        return None
    return trim


_trim = _load_trim()


def _give_holes_back() -> None:
    """Return freed memory to the system.

    Between what a pair leaves on the heap for long, its dicts say, lie the model's tensors of that moment, and where
    they were nothing of their size fits again: a budget of 256 MiB made a rank grow by 400.
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


def _nbytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()
