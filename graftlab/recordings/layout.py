"""What a recording's folder holds: a folder a rank, with tensors in safetensors files and an index of JSON lines.

::

    rank-00000/rank.json         which rank of how many, of which side
    rank-00000/index.jsonl       a line a tap, in order; the last line says that the recording ended
    rank-00000/000000.safetensors, ...

Each line ends with a checksum of all that stands before it, the header included, so that a line that was changed, moved
or taken out is noticed where it is.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import msgspec

from graftlab.base.world import Side

RANK_FILE, INDEX_FILE = "rank.json", "index.jsonl"
FORMAT = 2
# Of the first releases, in whose recordings lines may have no checksum.
OLD_FORMAT = 1


class RankHeader(msgspec.Struct, frozen=True):
    """``rank.json``."""

    format: int
    side: Side
    rank: int
    world_size: int


class StoredTensor(msgspec.Struct, frozen=True):
    """Where a tensor lies. ``raw`` where it is there as bytes, because the files have no such dtype."""

    shard: str
    key: str
    dtype: str
    shape: tuple[int, ...]
    crc32: int
    raw: bool = False


class StoredLayout(msgspec.Struct, frozen=True):
    """How what a rank holds is made from the whole tensor; ``mesh`` has the sizes where the tap was given them too."""

    text: str
    mesh: list[tuple[str, int]] | None = None


class Entry(msgspec.Struct, frozen=True, tag="tap"):
    """One tap. ``extras`` are plain values, and ``extra_tensors`` those of its extras that are tensors.

    ``lost_extras`` says why some of them are not here.
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
        tags = "".join(f", {tag}={value!r}" for tag, value in self.tags.items())
        return f"tap {self.name!r}{tags} of step {self.step}"


class End(msgspec.Struct, frozen=True, tag="end"):
    """The last line: how many taps and steps there are, and what was left out."""

    taps: int
    steps: int
    left_out: list[str] = []


Line = Entry | End

_CHECK = b',"check":'


class Chain:
    """The checksums of an index's lines, one after the other. Begins with the bytes of ``rank.json``."""

    def __init__(self, header: bytes) -> None:
        self._check = zlib.crc32(header)

    def sealed(self, line: Line) -> bytes:
        """The next line, with its checksum."""
        text = msgspec.json.encode(line)
        self._check = zlib.crc32(text, self._check)
        return text[:-1] + _CHECK + b"%d}\n" % self._check

    def fits(self, text: bytes) -> bool | None:
        """Whether this is the next line, as it was written; None for one without a checksum, as old ones are."""
        before, found, check = text.rpartition(_CHECK)
        if not found or not check[:-1].isdigit():
            return None
        self._check = zlib.crc32(before + b"}", self._check)
        return check == b"%d}" % self._check


def rank_folder(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank:05d}"
