"""``Recording``: a folder of recorded taps, usable as one side of a session."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import msgspec
import pandas as pd
import safetensors
import torch

from graftlab.base.tensor_bytes import as_bytes, dtype_named
from graftlab.errors import RecordingError
from graftlab.grafting import active
from graftlab.recordings.layout import (
    FORMAT,
    INDEX_FILE,
    RANK_FILE,
    End,
    Entry,
    Line,
    RankHeader,
    StoredTensor,
    rank_folder,
)
from graftlab.taps import calls

_line = msgspec.json.Decoder(Line)
_header = msgspec.json.Decoder(RankHeader)


class Recording:
    """What :func:`record` kept of one side, on all its ranks. ``gl.launch(baseline=gl.Recording(folder), target=2)``
    makes a side of it, which shows the recorded taps again in each run; so one run of a baseline serves many targets.

    ``world_size`` is how many ranks it has. With ``partial`` a recording that was cut off is taken as far as it goes.

    Raises :class:`RecordingError` for a folder that is no recording, lacks a rank or was cut off; a damaged tensor is
    told, with its tap, when it is read.

    >>> with gl.record(session.folder / "one"):
    ...     x = gl.tap("hidden", torch.ones(4), layer=3)
    >>> recording = gl.Recording(session.folder / "one")
    >>> recording.world_size, recording.tensor("hidden", layer=3)
    (1, tensor([1., 1., 1., 1.]))
    """

    def __init__(self, folder: str | Path, *, partial: bool = False) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.partial = partial
        first = self._read_header(0)
        self.world_size = first.world_size
        for rank in range(1, first.world_size):
            if self._read_header(rank).world_size != first.world_size:
                raise RecordingError(f"{self.folder}: its ranks are not of one recording; {RANK_FILE} tells how many")
        _ = self._ranks

    def _read_header(self, rank: int) -> RankHeader:
        path = rank_folder(self.folder, rank) / RANK_FILE
        try:
            header = _header.decode(path.read_bytes())
        except OSError as error:
            raise RecordingError(
                f"{path} cannot be read: {error.strerror}; a recording has such a file a rank"
            ) from None
        except msgspec.DecodeError as error:
            raise RecordingError(f"{path} is damaged: {error}") from None
        if header.format != FORMAT or header.rank != rank:
            raise RecordingError(f"{path} is of format {header.format} and rank {header.rank}, not {FORMAT} and {rank}")
        return header

    @cached_property
    def _ranks(self) -> list[tuple[list[Entry], End]]:
        return [self._read_index(rank) for rank in range(self.world_size)]

    def _read_index(self, rank: int) -> tuple[list[Entry], End]:
        path = rank_folder(self.folder, rank) / INDEX_FILE
        try:
            lines = path.read_bytes().split(b"\n")
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
        entries: list[Entry] = []
        end: End | None = None
        for number, text in enumerate(lines[:-1], 1):
            try:
                line: Line = _line.decode(text)
            except msgspec.DecodeError as error:
                raise RecordingError(f"{path}, line {number}: this is no tap ({error}); {_after(entries)}") from None
            if end is not None:
                raise RecordingError(f"{path}, line {number}: there is more after its end")
            if isinstance(line, End):
                end = line
            else:
                entries.append(line)
        if end is None and self.partial:
            end = End(len(entries), entries[-1].step + 1 if entries else 1, ["what came after it was cut off"])
        if end is None:
            raise RecordingError(
                f"{path} was cut off: {_after(entries)}. gl.Recording(folder, partial=True) takes it as far as it goes"
            )
        if end.taps != len(entries):
            raise RecordingError(f"{path} should have {end.taps} taps and has {len(entries)}; it was edited")
        return entries, end

    # ---- looking at it ------------------------------------------------------------------------------------------

    @property
    def left_out(self) -> list[str]:
        """What was not recorded, in words."""
        return list(dict.fromkeys(what for _, end in self._ranks for what in end.left_out))

    @property
    def frame(self) -> pd.DataFrame:
        """A line a recorded tap: rank, step, name, dtype, shape, and a column for each tag."""
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

    def _load(self, rank: int, entry: Entry, stored: StoredTensor) -> torch.Tensor:
        path = rank_folder(self.folder, rank) / stored.shard
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                tensor: torch.Tensor = file.get_tensor(stored.key)
            if stored.raw:
                tensor = tensor.view(dtype_named(stored.dtype)).view(stored.shape)
        except (OSError, safetensors.SafetensorError, RuntimeError, ValueError) as error:
            raise RecordingError(f"{entry} on rank {rank} cannot be read from {path}: {error}") from error
        if tensor.dtype != dtype_named(stored.dtype) or tuple(tensor.shape) != stored.shape:
            raise RecordingError(f"{entry} on rank {rank}: {path} has another tensor than the index says")
        if zlib.crc32(as_bytes(tensor).numpy().data) != stored.crc32:
            raise RecordingError(f"{entry} on rank {rank}: its bytes in {path} were changed since it was recorded")
        return tensor

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
                calls.tap(entry.name, tensor, extras=extras, **entry.tags)
                shown += 1
        return shown

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.folder), self.partial)

    def __repr__(self) -> str:
        taps = sum(len(entries) for entries, _ in self._ranks)
        return f"<Recording of {self.world_size} ranks: {taps} taps, {self.folder}>"


def _reopen(folder: str, partial: bool) -> Recording:
    return Recording(folder, partial=partial)


def _after(entries: list[Entry]) -> str:
    return f"the last whole one is {entries[-1]}" if entries else "there is no whole one"
