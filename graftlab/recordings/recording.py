"""``Recording``: a folder of recorded taps, which can be one side of a session."""

from __future__ import annotations

import functools
import io
import os
from pathlib import Path
from typing import Any

import msgspec
import torch

from graftlab.base.files import opened, read_all
from graftlab.base.tensor_bytes import dtype_named
from graftlab.base.text import counted
from graftlab.errors import RecordingError
from graftlab.recordings.array_files import ArrayFolder, array_files_in
from graftlab.recordings.file_format import (
    FORMAT,
    INDEX_FILE,
    LONGEST_GAP,
    MOST_RANKS,
    OLD_FORMAT,
    RANK_FILE,
    TAP_ARGUMENTS,
    ChecksumChain,
    IndexEnd,
    IndexLine,
    RankHeader,
    StoredTensor,
    TapEntry,
    end_of,
    rank_folder,
)
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.recordings.sglang_dumps import SglangDump
from graftlab.recordings.tensor_file import ReusedMemory, TensorPlace, read_tensor, tensor_places

_line = msgspec.json.Decoder(IndexLine)
_header = msgspec.json.Decoder(RankHeader)
# What decoding raises for bytes that were not recorded.
_DAMAGE = (msgspec.DecodeError, ValueError, RecursionError, MemoryError)


class Recording(RecordedSide):
    """The taps that :func:`record` has recorded of one side, on all its ranks.

    ``gl.launch(baseline=gl.Recording(folder), target=2)`` uses it as a side, which replays the recorded taps in each
    run. So one run of a baseline serves many targets.

    ``world_size`` is the number of ranks. With ``partial`` a truncated recording is used up to its last whole tap.

    Raises :class:`RecordingError` for a folder that is not a recording, lacks a rank or is truncated. Reading a damaged
    tensor raises one that names the tap.

    >>> with gl.record(session.folder / "one"):
    ...     x = gl.tap("hidden", torch.ones(4), layer=3)
    >>> recording = gl.Recording(session.folder / "one")
    >>> recording.world_size, recording.tensor("hidden", layer=3)
    (1, tensor([1., 1., 1., 1.]))
    """

    def __init__(self, folder: str | Path, *, partial: bool = False) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.partial = partial
        self._newest: tuple[tuple[int, ...], dict[str, TensorPlace]] | None = None
        self._memory = ReusedMemory()
        first = self._read_header(0)
        self.world_size = first.world_size
        if rank_folder(self.folder, self.world_size).exists():
            raise RecordingError(
                f"{self.folder} is of {counted(self.world_size, 'rank')} by its {RANK_FILE}, but has a folder of rank "
                f"{self.world_size}: two jobs recorded to it, or it was edited"
            )
        for rank in range(1, first.world_size):
            if self._read_header(rank).world_size != first.world_size:
                raise RecordingError(
                    f"{self.folder}: its ranks are of different recordings, whose {RANK_FILE} differ in world_size"
                )
        _ = self._ranks

    @classmethod
    def open(cls, folder: str | Path, *, partial: bool = False) -> RecordedSide:
        """Open a recording, or a folder of array files: of SGLang's dumper, or as :meth:`from_files` takes them.

        Files of that dumper are ``.pt`` files with a tap's tags in their names. They are read without running any code
        in them. Their ``dims`` are the layouts.

        >>> with gl.record(session.folder / "opened"):
        ...     x = gl.tap("hidden", torch.ones(4))
        >>> gl.Recording.open(session.folder / "opened").world_size
        1
        """
        path = Path(folder).expanduser().absolute()
        if (rank_folder(path, 0) / RANK_FILE).exists() or not path.is_dir():
            return cls(path, partial=partial)
        if any(path.glob("*dump_index=*.pt")):
            return SglangDump(path, partial=partial)
        if array_files_in(path):
            return cls.from_files(path)
        inside = sorted({each.parent.name for each in path.glob("*/*.pt")})
        if inside:
            # The dumper makes a new folder for each of its runs, within the one that it is given.
            raise RecordingError(f"{path} has dumps of several runs, in {', '.join(inside)}; pass one of these")
        return cls(path, partial=partial)

    @staticmethod
    def from_files(folder: str | Path, *, pattern: str | None = None) -> RecordedSide:
        """Open a folder of arrays that any program wrote: ``.npy``, ``.npz``, ``.safetensors``, ``.pt`` and ``.pth``.

        ``pattern`` says what the files' names are without their suffixes. Of its fields in braces ``{name}`` is the
        tap's name, ``{step}`` its step, counted from the first, ``{call}`` numbers the calls of that tap in one step,
        ``{index}`` orders the files, and ``{rank}`` is the rank; any other field is a tag, such as ``{layer}``. In a
        file of several arrays, their own names follow the file's. Without a pattern a tap's name is the file's, or
        the array's own in a file of several. Without ``{index}`` files are in the order of their steps, calls and
        names.

        The arrays need not be named as the taps of the other side, nor be laid out like them: :meth:`Session.match`
        pairs them by value. Values that torch does not have as arrays are in ``left_out``.

        Only regular files of the folder itself are read, and nothing in them is run. Raises :class:`RecordingError`
        that names the file for one that is damaged, does not fit the pattern, or has the same tap and call as a file
        before.

        >>> folder = session.folder / "arrays"
        >>> folder.mkdir()
        >>> np.save(folder / "000_hidden.npy", np.ones(4))
        >>> recording = gl.Recording.from_files(folder, pattern="{index}_{name}")
        >>> recording.tensor("hidden")
        tensor([1., 1., 1., 1.], dtype=torch.float64)
        """
        return ArrayFolder(folder, pattern)

    def _read_header(self, rank: int) -> RankHeader:
        path = rank_folder(self.folder, rank) / RANK_FILE
        try:
            header = _header.decode(read_all(self.folder, path.parent.name, path.name))
        except OSError as error:
            raise RecordingError(
                f"{path} cannot be read: {error.strerror}; a recording has such a file for each rank"
            ) from None
        except _DAMAGE as error:
            raise RecordingError(f"{path} is damaged: {error}") from None
        is_rank = header.rank == rank < header.world_size <= MOST_RANKS
        if header.format not in (OLD_FORMAT, FORMAT) or not is_rank:
            raise RecordingError(
                f"{path} is of format {header.format} and rank {header.rank} of {header.world_size}, not of format "
                f"{FORMAT} and rank {rank}"
            )
        return header

    def _read_index(self, rank: int) -> tuple[list[TapEntry], IndexEnd]:
        path = rank_folder(self.folder, rank) / INDEX_FILE
        try:
            lines = read_all(self.folder, path.parent.name, INDEX_FILE).split(b"\n")
            chain = ChecksumChain(read_all(self.folder, path.parent.name, RANK_FILE))
        except OSError as error:
            raise RecordingError(f"{path} cannot be read: {error.strerror}") from None
        entries: list[TapEntry] = []
        end: IndexEnd | None = None
        # After a line with a checksum, all lines must have one.
        sealed = self._read_header(rank).format != OLD_FORMAT
        for number, text in enumerate(lines[:-1], 1):
            try:
                line: IndexLine = _line.decode(text)
            except _DAMAGE as error:
                raise RecordingError(f"{path}, line {number}: this is not a tap ({error}); {_after(entries)}") from None
            if end is not None:
                raise RecordingError(f"{path}, line {number}: the index continues after its end")
            fits = chain.fits(text)
            if fits is False or (fits is None and sealed):
                what = "the end" if isinstance(line, IndexEnd) else str(line)
                raise RecordingError(
                    f"{path}, line {number}: {what} is not what was recorded here: this line, the one before it or "
                    f"{RANK_FILE} was edited; {_after(entries)}"
                )
            sealed |= fits is True
            if isinstance(line, IndexEnd):
                end = line
            elif wrong := _impossible(line, entries[-1].step if entries else 0):
                raise RecordingError(f"{path}, line {number}: this is not a tap ({wrong}); {_after(entries)}")
            else:
                entries.append(line)
        if end is None and self.partial:
            end = end_of(entries, ["the taps after its truncation"])
        if end is None:
            raise RecordingError(
                f"{path} is truncated: {_after(entries)}. gl.Recording(folder, partial=True) uses the complete ones"
            )
        if end.taps != len(entries):
            raise RecordingError(f"{path} should have {end.taps} taps and has {len(entries)}; it was edited")
        return entries, end

    def _load(self, rank: int, entry: TapEntry, stored: StoredTensor) -> torch.Tensor:
        path = rank_folder(self.folder, rank) / stored.shard
        try:
            with opened(self.folder, path.parent.name, stored.shard) as file:
                place = self._places_in(file).get(stored.key)
                if place is None:
                    raise ValueError(f"it has no tensor {stored.key!r:.80}")
                if not stored.raw and place.shape != stored.shape:
                    raise ValueError(f"its shape is {list(place.shape)}, and {list(stored.shape)} in the index")
                dtype = dtype_named(stored.dtype)
                tensor, check = read_tensor(file, place, dtype, stored.shape, self._memory)
        except Exception as error:  # damage has many kinds
            raise RecordingError(f"{entry} on rank {rank} cannot be read from {path}: {error}") from error
        if check != stored.crc32:
            raise RecordingError(f"{entry} on rank {rank}: its bytes in {path} have changed since it was recorded")
        return tensor

    def _places_in(self, file: io.FileIO) -> dict[str, TensorPlace]:
        """Where a file has its tensors. Those of the newest file are kept, as long as it is the same."""
        state = os.fstat(file.fileno())
        same = state.st_dev, state.st_ino, state.st_size, state.st_mtime_ns
        if self._newest is None or self._newest[0] != same:
            self._newest = same, tensor_places(file)
        return self._newest[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(Recording, partial=self.partial), (str(self.folder),)


def _impossible(entry: TapEntry, before: int) -> str:
    """In words, why no recording has this tap after one of the step ``before``; blank if it may have."""
    if not before <= entry.step <= before + LONGEST_GAP:
        return f"it is of step {entry.step}, after one of step {before}"
    if not TAP_ARGUMENTS.isdisjoint(entry.tags):
        return "its tags have an invalid name"
    if entry.extra_tensors and not isinstance(entry.extras, dict | None):
        return "its extras are tensors but not a dict"
    return ""


def _after(entries: list[TapEntry]) -> str:
    return f"the last complete tap is {entries[-1]}" if entries else "it has no complete tap"
