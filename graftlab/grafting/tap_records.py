"""Records what the taps of a call on this rank show; other handlers compare with the record or change values."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch

from graftlab.base.tags import identity
from graftlab.base.tap_groups import group_of, is_data, is_recomputed, kind_of
from graftlab.grafting.decisions import given_tags, recompute_status
from graftlab.grafting.in_float64 import as_it_is
from graftlab.grafting.overwrite import overwritten
from graftlab.grafting.spilled import SpilledTensor, SpillFile
from graftlab.grafting.tensors import plain_tensor
from graftlab.taps.ambient_tags import ambient

CallKey = tuple[str, tuple[Any, ...], str, int]


class TapRecord:
    """A tap's record. ``value`` may be in a file, from which each use reads it anew."""

    def __init__(self, place: CallKey, tags: dict[str, Any], value: torch.Tensor | SpilledTensor) -> None:
        self.place = place
        self.tags = tags
        self.is_floating = value.dtype.is_floating_point
        self.dtype = value.dtype
        self._value = value

    @property
    def value(self) -> torch.Tensor:
        return self._value.read() if isinstance(self._value, SpilledTensor) else self._value

    def __reduce__(self) -> tuple[type[TapRecord], tuple[CallKey, dict[str, Any], torch.Tensor]]:
        # The file has no name under which another process could open it.
        return TapRecord, (self.place, self.tags, self.value)


class CountingHandler:
    """Counts calls as the grafter does, and passes each call with a tensor to :meth:`take`."""

    # A weight is not recomputed in a run, and would stay moved.
    takes_data = False

    def __init__(self) -> None:
        self._reached: dict[Any, int] = {}
        self.skipped: dict[str, None] = {}

    def tap(self, name: str, value: Any, extras: Any, tags: Mapping[str, Any], replace: bool = False) -> Any:
        shown = value() if callable(value) and not isinstance(value, torch.Tensor) else value
        with as_it_is():
            return self._shown(name, value, shown, tags, replace)

    def _shown(self, name: str, value: Any, shown: Any, tags: Mapping[str, Any], replace: bool) -> Any:
        own = plain_tensor(shown)
        if isinstance(own, str):
            self.skipped[name] = None
            return value
        wanted, _ = given_tags(name, dict(ambient.get()), tags, None)
        if is_data(wanted) and not self.takes_data:
            return value
        given = {"name": name, "recompute_status": recompute_status(), **wanted}
        which = identity(given)
        occurrence = self._reached.get(which, 0)
        self._reached[which] = occurrence + 1
        place = (which.name, which.tags, which.recompute_status, occurrence)
        received = self.take(place, given, own)
        return value if received is None else overwritten(value, shown, own, received, replace=replace)

    def take(self, place: CallKey, tags: dict[str, Any], own: torch.Tensor) -> torch.Tensor | None:
        """Return the tensor to overwrite the tap with, or None."""
        raise NotImplementedError


class SelfGraftRecorder(CountingHandler):
    """Records what each tap shows, in a file, up to ``budget`` bytes."""

    def __init__(self, budget: int) -> None:
        super().__init__()
        self._file: SpillFile | None = None
        self.taps: dict[CallKey, TapRecord] = {}
        self.not_recorded = 0
        self._left = budget

    def take(self, place: CallKey, tags: dict[str, Any], own: torch.Tensor) -> None:
        size = own.numel() * own.element_size()
        # Nothing is recorded after a tap that does not fit: taps after a gap would inherit differences.
        if self.not_recorded or size > self._left:
            self.not_recorded += 1
            return
        self._left -= size
        self.taps[place] = TapRecord(place, tags, self._kept(own.detach()))

    def last(self, groups: Collection[str], paired_names: Callable[[str], Sequence[str]]) -> dict[str, torch.Tensor]:
        """The last record at each tap of these groups, on the CPU, by group."""
        found = {}
        for recorded in self.taps.values():
            # Activation checkpointing repeats the first layer last.
            if kind_of(recorded.tags) is None and is_recomputed(recorded.tags):
                continue
            for name in paired_names(recorded.place[0]):
                if (group := group_of(name, recorded.tags)) in groups:
                    found[group] = recorded
        return {group: recorded.value.cpu() for group, recorded in found.items()}

    def _kept(self, value: torch.Tensor) -> torch.Tensor | SpilledTensor:
        try:
            self._file = self._file or SpillFile()
            return self._file.store(value)
        except OSError:
            # If the disk is full, the record takes memory.
            return value.clone()
