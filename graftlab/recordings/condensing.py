"""``condense``: a small copy of a recording, with equal tensors stored once and sketches of the largest ones."""

from __future__ import annotations

from pathlib import Path

import torch

from graftlab.base.text import counted
from graftlab.errors import RecordingError
from graftlab.layouts import Layout, SignedSums
from graftlab.recordings.file_format import FORMAT, RankHeader, StoredLayout, TapEntry, rank_folder
from graftlab.recordings.recording import Recording
from graftlab.recordings.writer import PendingTap, RecordingWriter, tensor_digest

# Sums of a sketch. With fewer, two tensors that differ are too likely to have like sketches.
_LARGEST, _SMALLEST = 1024, 32
# Bytes of a tap's line in the index, with its tensor's entry in the header of its file, and of its layout.
_LINE, _LAYOUT = 320, 64


def condense(folder: Path, into: Path, limit: int) -> list[str]:
    """Write a copy of a recording of one rank whose files have at most ``limit`` bytes; returns taps that are sketches.

    Equal tensors are stored once. The smallest are kept whole, and the others, for which no room is left, are sketches.
    Extras are left out. Raises :class:`RecordingError` if even sketches of all taps do not fit.
    """
    recording = Recording(folder)
    entries, end = recording._ranks[0]
    values: dict[bytes, torch.Tensor] = {}
    digests = []
    for _, tensor, _ in recording.taps(0):
        digests.append(tensor_digest(tensor))
        values[digests[-1]] = tensor
    left = limit - sum(_LINE + _LAYOUT + len(str(entry)) + len(entry.name) for entry in entries)
    size = _sketch_size(values, left)
    if not size:
        raise RecordingError(
            f"a recording of {counted(len(entries), 'tap')} does not fit into {limit:,} bytes, even with sketches of "
            f"{_SMALLEST} sums: choose fewer modules with include=, or raise --graftlab-record-limit"
        )
    whole = _kept_whole(values, left, size)
    writer = RecordingWriter(rank_folder(into, 0), RankHeader(FORMAT, "baseline", 0, 1), shares=True)
    sketched: dict[str, None] = {}
    for entry, digest in zip(entries, digests, strict=True):
        value, layout = values[digest], entry.layout
        if digest not in whole:
            sketch = SignedSums(size, tuple(value.shape))
            value, layout = Layout((sketch,)).local(value), StoredLayout(sketch.text)
            sketched[entry.name] = None
        writer.put(PendingTap(entry.step, entry.name, entry.tags, value, layout=layout))
    writer.close(end.steps, [*end.left_out, *_extras(entries)])
    if writer.error is not None:
        raise RecordingError(f"the recording ended: {writer.error}")
    written = sum(path.stat().st_size for path in rank_folder(into, 0).iterdir())
    if written > limit:
        raise RecordingError(
            f"the recording has {written:,} bytes and may have {limit:,}; raise --graftlab-record-limit"
        )
    return list(sketched)


def _extras(entries: list[TapEntry]) -> list[str]:
    return [f"extras of tap {entry.name!r}" for entry in entries if entry.extras is not None or entry.extra_tensors]


def _cost(tensor: torch.Tensor, size: int) -> int:
    """The bytes of a sketch, or of a tensor that is no larger than that."""
    return min(tensor.nbytes, size * (8 if tensor.dtype == torch.float64 else 4))


def _sketch_size(values: dict[bytes, torch.Tensor], left: int) -> int:
    """The number of sums of each sketch, so that sketches of all tensors would fit; 0 where too few would."""
    size = _LARGEST
    while size >= _SMALLEST:
        if sum(_cost(tensor, size) for tensor in values.values()) <= left:
            return size
        size //= 2
    return 0


def _kept_whole(values: dict[bytes, torch.Tensor], left: int, size: int) -> set[bytes]:
    """The tensors for which there is room, if the others are sketches: the smallest."""
    left -= sum(_cost(tensor, size) for tensor in values.values())
    whole = set()
    for digest, tensor in sorted(values.items(), key=lambda each: each[1].nbytes):
        left -= tensor.nbytes - _cost(tensor, size)
        if left < 0:
            break
        whole.add(digest)
    return whole
