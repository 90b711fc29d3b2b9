"""The base of recordings: read the recorded taps, and be a side of a session."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from graftlab.base.text import counted
from graftlab.errors import GraftError, RecordingError
from graftlab.grafting import active
from graftlab.layouts import parse_layout
from graftlab.recordings.file_format import IndexEnd, StoredTensor, TapEntry
from graftlab.taps import calls

if TYPE_CHECKING:
    import pandas as pd


class RecordedSide(ABC):
    """The recorded taps of all ranks of one side; ``world_size`` is the number of ranks."""

    folder: Path
    world_size: int

    @cached_property
    def _ranks(self) -> list[tuple[list[TapEntry], IndexEnd]]:
        return [self._read_index(rank) for rank in range(self.world_size)]

    @abstractmethod
    def _read_index(self, rank: int) -> tuple[list[TapEntry], IndexEnd]:
        """Read the taps of one rank in order, and the end of its index."""

    @abstractmethod
    def _load(self, rank: int, entry: TapEntry, stored: StoredTensor) -> torch.Tensor:
        """Read a tensor of a tap. Raises :class:`RecordingError` that names the tap."""

    # ---- reading ------------------------------------------------------------------------------------------------

    @property
    def left_out(self) -> list[str]:
        """Sentences on taps and extras that were not recorded."""
        return list(dict.fromkeys(what for _, end in self._ranks for what in end.left_out))

    @property
    def sketched(self) -> list[str]:
        """The names of taps that it has only as sketches, which are compared and never grafted."""
        entries = (entry for entries, _ in self._ranks for entry in entries)
        return list(dict.fromkeys(e.name for e in entries if e.layout and e.layout.text.startswith("sketch(")))

    @property
    def frame(self) -> pd.DataFrame:
        """One row for each recorded tap: rank, step, name, dtype, shape, and a column for each tag."""
        # Not at the top: a rank that replays a recording imports this module, and ranks import no pandas.
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
        """Return the first tensor with this name and these tags. Raises :class:`RecordingError` if none exists."""
        if not 0 <= rank < self.world_size:
            raise RecordingError(f"{self.folder} is of {counted(self.world_size, 'rank')}, and has no rank {rank}")
        for entry in self._ranks[rank][0]:
            same = all(entry.tags.get(tag) == value for tag, value in tags.items())
            if entry.name == name and entry.step == step and same:
                return self._load(rank, entry, entry.tensor)
        wanted = "".join(f", {tag}={value!r}" for tag, value in tags.items())
        raise RecordingError(f"{self.folder}: no tap {name!r}{wanted} of step {step} was recorded on rank {rank}")

    # ---- as a side ----------------------------------------------------------------------------------------------

    def taps(self, rank: int) -> Iterator[tuple[TapEntry, torch.Tensor, Any]]:
        """Iterate over one rank's taps in order: the entry, its tensor and its extras."""
        for entry in self._ranks[rank][0]:
            extras = entry.extras
            if entry.extra_tensors:
                tensors = {name: self._load(rank, entry, stored) for name, stored in entry.extra_tensors.items()}
                extras = {**(extras or {}), **tensors}
            yield entry, self._load(rank, entry, entry.tensor), extras

    def __call__(self, *args: Any, **kwargs: Any) -> int:
        """Replay every recorded tap on a rank of a session, step by step; return their number.

        Arguments are for the other side, and are ignored here.
        """
        here, grafter = calls.here(), active.grafter()
        if here is None or grafter is None:
            raise RecordingError("a recording replays its taps on a rank of a session: session.run(recording, f)")
        if here.world_size != self.world_size:
            raise RecordingError(
                f"{self.folder} was recorded on {self.world_size} ranks, but this side has {here.world_size}; "
                f"launch it with gl.launch({here.side}=recording)"
            )
        step = shown = 0
        # It is ahead of a side that computes, so it waits for buffer room without the time limit of a tap.
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


def _layout_of(entry: TapEntry) -> Any:
    stored = entry.layout
    if stored is None or stored.mesh is None:
        return None if stored is None else stored.text
    try:
        return parse_layout(stored.text, mesh=dict(stored.mesh))
    except GraftError as error:
        raise RecordingError(f"{entry} has a layout that cannot be read: {error}") from error
