"""``Recording``: a folder of recorded taps, usable as one side of a session."""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec
import safetensors
import torch

from graftlab.base.tensor_bytes import as_bytes, dtype_named
from graftlab.base.text import counted
from graftlab.errors import RecordingError
from graftlab.recordings.layout import (
    FORMAT,
    INDEX_FILE,
    OLD_FORMAT,
    RANK_FILE,
    Chain,
    End,
    Entry,
    Line,
    RankHeader,
    StoredTensor,
    rank_folder,
)
from graftlab.recordings.old_dumps import OldDump
from graftlab.recordings.recorded import Recorded

_line = msgspec.json.Decoder(Line)
_header = msgspec.json.Decoder(RankHeader)


class Recording(Recorded):
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
        if rank_folder(self.folder, self.world_size).exists():
            raise RecordingError(
                f"{self.folder} is of {counted(self.world_size, 'rank')} by its {RANK_FILE}, and has a folder of rank "
                f"{self.world_size}: two jobs recorded into it, or it was edited"
            )
        for rank in range(1, first.world_size):
            if self._read_header(rank).world_size != first.world_size:
                raise RecordingError(f"{self.folder}: its ranks are not of one recording; {RANK_FILE} tells how many")
        _ = self._ranks

    @classmethod
    def open(cls, folder: str | Path, *, partial: bool = False) -> Recorded:
        """A recording, or a folder that SGLang's dumper wrote: ``.pt`` files with a tap's tags in their names.

        Such files are read without running anything of them, and can be a side just so. ``dims`` in them are the
        layouts.

        >>> with gl.record(session.folder / "opened"):
        ...     x = gl.tap("hidden", torch.ones(4))
        >>> gl.Recording.open(session.folder / "opened").world_size
        1
        """
        path = Path(folder).expanduser().absolute()
        if not (rank_folder(path, 0) / RANK_FILE).exists() and not any(path.glob("*.pt")):
            inside = sorted({each.parent.name for each in path.glob("*/*.pt")})
            if inside:
                # The dumper makes a folder for each time that it runs, within the one that it was given.
                raise RecordingError(
                    f"{path} has dumps in {', '.join(inside)}, each of another time; name one of these"
                )
        if (rank_folder(path, 0) / RANK_FILE).exists() or not any(path.glob("*.pt")):
            return cls(path, partial=partial)
        return OldDump(path, partial=partial)

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
        if header.format not in (OLD_FORMAT, FORMAT) or header.rank != rank or rank >= header.world_size:
            raise RecordingError(
                f"{path} is of format {header.format} and rank {header.rank} of {header.world_size}, not of format "
                f"{FORMAT} and rank {rank}"
            )
        return header

    def _read_index(self, rank: int) -> tuple[list[Entry], End]:
        path = rank_folder(self.folder, rank) / INDEX_FILE
        try:
            lines = path.read_bytes().split(b"\n")
            chain = Chain((rank_folder(self.folder, rank) / RANK_FILE).read_bytes())
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
        entries: list[Entry] = []
        end: End | None = None
        # Once a line has a checksum, all that follow have one.
        sealed = self._read_header(rank).format != OLD_FORMAT
        for number, text in enumerate(lines[:-1], 1):
            try:
                line: Line = _line.decode(text)
            except msgspec.DecodeError as error:
                raise RecordingError(f"{path}, line {number}: this is no tap ({error}); {_after(entries)}") from None
            if end is not None:
                raise RecordingError(f"{path}, line {number}: there is more after its end")
            fits = chain.fits(text)
            if fits is False or (fits is None and sealed):
                what = "the end" if isinstance(line, End) else str(line)
                raise RecordingError(
                    f"{path}, line {number}: {what} is not what was recorded there: this line, the one before it or "
                    f"{RANK_FILE} was edited; {_after(entries)}"
                )
            sealed |= fits is True
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

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (str(self.folder), self.partial)


def _reopen(folder: str, partial: bool) -> Recording:
    return Recording(folder, partial=partial)


def _after(entries: list[Entry]) -> str:
    return f"the last whole one is {entries[-1]}" if entries else "there is no whole one"
