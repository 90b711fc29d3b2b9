"""What a recording can do, wherever its taps lie: be looked at, and be a side of a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graftlab.base.text import counted
from graftlab.errors import RecordingError
from graftlab.grafting import active
from graftlab.layouts import parse_layout
from graftlab.recordings.layout import End, Entry, StoredTensor
from graftlab.taps import calls

if TYPE_CHECKING:
    import pandas as pd


class Recorded(ABC):
    """The taps of every rank of one side. ``world_size`` is how many ranks it has."""

    folder: Path
    world_size: int

    @cached_property
    def _ranks(self) -> list[tuple[list[Entry], End]]:
        return [self._read_index(rank) for rank in range(self.world_size)]

    @abstractmethod
    def _read_index(self, rank: int) -> tuple[list[Entry], End]:
        """The taps of one rank in order, and what was left out."""

    @abstractmethod
    def _load(self, rank: int, entry: Entry, stored: StoredTensor) -> torch.Tensor:
        """A tensor of a tap. Raises :class:`RecordingError` that names the tap."""

    # ---- looking at it ------------------------------------------------------------------------------------------

    @property
    def left_out(self) -> list[str]:
        """What was not recorded, in words."""
        return list(dict.fromkeys(what for _, end in self._ranks for what in end.left_out))

    @property
    def frame(self) -> pd.DataFrame:
        """A line a recorded tap: rank, step, name, dtype, shape, and a column for each tag."""
        # Here, because a rank that shows a recording imports this module.
        import pandas as pd

        return pd.DataFrame(
            {
                "rank": rank,
                "step": entry.step,
                "name": entry.name,
                "dtype": entry.tensor.dtype,
                "shape": entry.tensor.shape,
                **entry.tags,
            }
            for rank, (entries, _) in enumerate(self._ranks)
            for entry in entries
        )

    def tensor(self, name: str, *, rank: int = 0, step: int = 0, **tags: Any) -> torch.Tensor:
        """The first tensor of a tap that has this name and these tags. Raises :class:`RecordingError` without one."""
        for entry in self._ranks[rank][0]:
            same = all(entry.tags.get(tag) == value for tag, value in tags.items())
            if entry.name == name and entry.step == step and same:
                return self._load(rank, entry, entry.tensor)
        wanted = "".join(f", {tag}={value!r}" for tag, value in tags.items())
        raise RecordingError(f"{self.folder}: no tap {name!r}{wanted} of step {step} was recorded on rank {rank}")

    # ---- as a side ----------------------------------------------------------------------------------------------

    def taps(self, rank: int) -> Iterator[tuple[Entry, torch.Tensor, Any]]:
        """What one rank recorded, in order: the entry, its tensor and its extras."""
        for entry in self._ranks[rank][0]:
            extras = entry.extras
            if entry.extra_tensors:
                tensors = {name: self._load(rank, entry, stored) for name, stored in entry.extra_tensors.items()}
                extras = {**(extras or {}), **tensors}
            yield entry, self._load(rank, entry, entry.tensor), extras

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        """On a rank of a session: show every recorded tap again, step by step; returns how many there were.

        Arguments are for the other side, and left alone here.
        """
        here, grafter = calls.here(), active.grafter()
        if here is None or grafter is None:
            raise RecordingError("a recording is shown on a rank of a session: session.run(recording, f)")
        if here.world_size != self.world_size:
            raise RecordingError(
                f"{self.folder} was recorded on {self.world_size} ranks, and this side has {here.world_size}; "
                f"launch it with gl.launch({here.side}=recording)"
            )
        step = shown = 0
        # It is ahead of whatever computes, and waits for room as long as the other side is there.
        with grafter.patiently():
            for entry, tensor, extras in self.taps(here.rank):
                while step < entry.step:
                    calls.step()
                    step += 1
                calls.tap(entry.name, tensor, extras=extras, layout=_layout_of(entry), **entry.tags)
                shown += 1
        return shown

    def __repr__(self) -> str:
        taps = sum(len(entries) for entries, _ in self._ranks)
        return f"<{type(self).__name__} of {counted(self.world_size, 'rank')}: {counted(taps, 'tap')}, {self.folder}>"


def _layout_of(entry: Entry) -> Any:
    stored = entry.layout
    if stored is None or stored.mesh is None:
        return None if stored is None else stored.text
    return parse_layout(stored.text, mesh=dict(stored.mesh))
