"""The files of a recording: one folder for each rank, with tensors in safetensors files and an index of JSON lines.

::

    rank-00000/rank.json         the side, the rank and the world size
    rank-00000/index.jsonl       one line for each tap, in order; the last line marks the end of the recording
    rank-00000/000000.safetensors, ...

Each line ends with a checksum of everything before it, including the header. So a changed, moved or removed line is
noticed at its place.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from graftlab.base.world import Side

RANK_FILE, INDEX_FILE = "rank.json", "index.jsonl"
FORMAT = 2
# The format of the first releases, whose lines may lack checksums.
OLD_FORMAT = 1


class RankHeader(msgspec.Struct, frozen=True):
    """``rank.json``."""

    format: int
    side: Side
    rank: int
    world_size: int


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor's file and key. ``raw`` tensors are stored as bytes, because safetensors lacks their dtype."""

    shard: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int
    raw: bool = False


class StoredLayout(msgspec.Struct, frozen=True):
    """The layout of a rank's part of the whole tensor; ``mesh`` has the mesh's sizes if the tap gave them."""

    text: str
    mesh: list[tuple[str, int]] | None = None


class TapEntry(msgspec.Struct, frozen=True, tag="tap"):
    """One tap. ``extras`` are its extras that are plain values, ``extra_tensors`` those that are tensors.

    ``lost_extras`` has the reason if some extras could not be recorded.
    """

    step: int
    name: str
    tags: dict[str, Any]
    tensor: StoredTensor
    extras: Any = None
    extra_tensors: dict[str, StoredTensor] = {}
    lost_extras: str = ""
    layout: StoredLayout | None = None

    def __str__(self) -> str:
        tags = "".join(f", {tag}={value!r:.80}" for tag, value in self.tags.items())
        return f"tap {self.name!r:.200}{tags:.400} of step {self.step}"


class IndexEnd(msgspec.Struct, frozen=True, tag="end"):
    """The last line: the numbers of taps and steps, and what was left out."""

    taps: int
    steps: int
    left_out: list[str] = []


IndexLine = TapEntry | IndexEnd


def end_of(entries: Sequence[TapEntry], left_out: list[str]) -> IndexEnd:
    """Return the end of an index of these taps."""
    return IndexEnd(len(entries), entries[-1].step + 1 if entries else 1, left_out)


_CHECK = b',"check":'


class ChecksumChain:
    """The running checksum of an index's lines, which begins with the bytes of ``rank.json``."""

    def __init__(self, header: bytes) -> None:
        self._check = zlib.crc32(header)

    def sealed(self, line: IndexLine) -> bytes:
        """Encode the next line with its checksum."""
        text = msgspec.json.encode(line)
        self._check = zlib.crc32(text, self._check)
        return text[:-1] + _CHECK + b"%d}\n" % self._check

    def fits(self, text: bytes) -> bool | None:
        """Whether this is the next line as it was written; None for a line without a checksum, as in old recordings."""
        before, found, check = text.rpartition(_CHECK)
        if not found or not check[:-1].isdigit():
            return None
        self._check = zlib.crc32(before + b"}", self._check)
        return check == b"%d}" % self._check


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"


MOST_RANKS = 1 << 16
# Steps without a tap: a replay makes each of them.
LONGEST_GAP = 1_000_000
# What gl.tap takes by name, beside tags.
TAP_ARGUMENTS = frozenset({"extras", "layout", "grad"})
