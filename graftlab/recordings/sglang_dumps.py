"""Dumps of SGLang's dumper as a recording: a folder of ``.pt`` files, with a tap's tags in each file's name.

Each file has ``{"value": tensor, "meta": {...}}`` and is read by torch's restricted unpickler, which runs no code.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Mapping
from itertools import permutations, product
from pathlib import Path
from typing import Any

import msgspec
import torch

from graftlab.base.files import opened
from graftlab.base.tags import PLACE_TAGS, RESERVED_TAGS, is_no_tag, plain
from graftlab.base.tensor_bytes import DTYPE_NAMES
from graftlab.errors import LayoutError, RecordingError
from graftlab.layouts.dims import AXES, parse_dims
from graftlab.recordings.array_files import most_bytes, too_large, torch_content
from graftlab.recordings.file_format import MOST_RANKS, IndexEnd, StoredLayout, StoredTensor, TapEntry, end_of
from graftlab.recordings.recorded_side import RecordedSide

_BETWEEN = "___"
_NUMBER = re.compile("[0-9]{1,18}")
# Where a dump has the places of its rank in the groups of the engine.
_PARALLEL_INFO = ("sglang_parallel_info", "megatron_parallel_info")
# The parts of a file's name that are not tags.
_OWN = frozenset({"step", "rank", "dump_index", "name", "recompute_status"})


class SglangDump(RecordedSide):
    """A folder of such files. Steps are numbered from the first that has a dump."""

    def __init__(self, folder: str | Path, *, partial: bool = False) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.partial = partial
        self._found, size = _entries(self.folder)
        self.world_size = max(self._found) + 1
        missing = sorted(set(range(self.world_size)) - set(self._found))
        if missing:
            raise RecordingError(f"{self.folder} has dumps of ranks up to {self.world_size - 1}, but none of {missing}")
        if size > self.world_size and not partial:
            raise RecordingError(
                f"{self.folder}: its dumps are of a job of {size} ranks, but only ranks up to {self.world_size - 1} "
                f"have dumps; if the others dumped nothing, partial=True uses these as the side"
            )

    def _read_index(self, rank: int) -> tuple[list[TapEntry], IndexEnd]:
        entries, left_out = self._found[rank]
        return entries, end_of(entries, left_out)

    def _load(self, rank: int, entry: TapEntry, stored: StoredTensor) -> torch.Tensor:
        value = _read(self.folder / stored.shard)["value"]
        if not isinstance(value, torch.Tensor):
            raise RecordingError(f"{entry} on rank {rank}: {self.folder / stored.shard} was changed meanwhile")
        return value.detach().as_subclass(torch.Tensor)

    def __reduce__(self) -> tuple[Any, ...]:
        return functools.partial(SglangDump, partial=self.partial), (str(self.folder),)


def _entries(folder: Path) -> tuple[dict[int, tuple[list[TapEntry], list[str]]], int]:
    """Return each rank's taps and what was left out, and the world size that the files state."""
    files = []
    for path in folder.glob("*.pt"):
        named = _tags_in(path)
        files.append((int(named["rank"]), int(named["dump_index"]), path, named))
    files.sort(key=lambda file: file[:2])
    places: dict[int, dict[str, tuple[int, int]]] = {}
    first = min(int(named["step"]) for *_, named in files)
    found: dict[int, tuple[list[TapEntry], list[str]]] = {}
    size = 1
    for rank, _, path, named in files:
        entries, left_out = found.setdefault(rank, ([], []))
        content = _read(path)
        stated = content["meta"].get("world_size")
        size = max(size, stated if isinstance(stated, int) else 1)
        places.setdefault(rank, _place_of(content["meta"]))
        entry = _entry(path, content, named, first)
        if isinstance(entry, str):
            left_out.append(entry)
        else:
            entries.append(entry)
    for entries, _ in found.values():
        entries[:] = [_with_mesh(entry, places) for entry in entries]
    return found, size


def _place_of(meta: dict[str, Any]) -> dict[str, tuple[int, int]]:
    """Return a rank's place and the number of ranks along each axis, as its engine stated them."""
    stated = {key: value for info in _PARALLEL_INFO for key, value in _plain_dict(meta.get(info)).items()}
    found = {}
    for axis in AXES:
        rank, size = (stated.get(f"{axis}_{what}") for what in ("rank", "size"))
        if isinstance(rank, int) and isinstance(size, int) and size > 1:
            found[axis] = rank, size
    return found


def _plain_dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _with_mesh(entry: TapEntry, places: Mapping[int, Mapping[str, tuple[int, int]]]) -> TapEntry:
    """Add the sizes of the axes that a tap's layout names, if they split all ranks in row-major order."""
    if entry.layout is None:
        return entry
    try:
        named = parse_dims(entry.layout.text).layout().mesh_names
    except LayoutError:
        # It is refused where the tap is compared.
        return entry
    first = places.get(0, {})
    sizes = {axis: first[axis][1] for axis in named if axis in first}
    # A file may state anything, so the number of places is looked at before they are listed.
    if len(sizes) < 2 or math.prod(sizes.values()) != len(places) or max(places) != len(places) - 1:
        return entry
    for order in permutations(sizes):
        coordinates = product(*(range(sizes[axis]) for axis in order))
        held = [tuple(place.get(axis, (0, 1))[0] for axis in order) for _, place in sorted(places.items())]
        if held == list(coordinates):
            layout = StoredLayout(entry.layout.text, [(axis, sizes[axis]) for axis in order])
            placed: TapEntry = msgspec.structs.replace(entry, layout=layout)
            return placed
    return entry


def _entry(path: Path, content: dict[str, Any], named: dict[str, str], first: int) -> TapEntry | str:
    """Return a file's tap, or a sentence on why it is left out."""
    value, meta = content["value"], content["meta"]
    name = str(meta.get("name", named["name"]))
    if not isinstance(value, torch.Tensor) or value.dtype not in DTYPE_NAMES:
        return f"tap {name!r}, whose value is {type(value).__name__}, not a tensor"
    if named.get("recompute_status", "") == "recompute":
        return f"tap {name!r} where the backward pass recomputes the forward pass"
    tags = {
        tag: plain(meta.get(tag, text))
        for tag, text in named.items()
        if tag not in _OWN | RESERVED_TAGS | PLACE_TAGS and not is_no_tag(tag, meta.get(tag, text))
    }
    is_gradient = name.startswith("grad__")
    # The names that taps use for gradients and for parameters.
    name = name.removeprefix("grad__")
    is_of_parameter = name.startswith("param__")
    if is_gradient or is_of_parameter:
        tags["kind"] = ("param_grad" if is_of_parameter else "grad") if is_gradient else "param"
    dims = meta.get("dims")
    stored = StoredTensor(path.name, "value", DTYPE_NAMES[value.dtype], tuple(value.shape), crc32=0)
    layout = StoredLayout(dims) if isinstance(dims, str) else None
    return TapEntry(int(named["step"]) - first, name, tags, stored, layout=layout)


def _tags_in(path: Path) -> dict[str, str]:
    named = dict(part.partition("=")[::2] for part in path.stem.split(_BETWEEN))
    if not {"step", "rank", "dump_index", "name"} <= named.keys() or not all(
        _NUMBER.fullmatch(named[tag]) for tag in ("step", "rank", "dump_index")
    ):
        raise RecordingError(f"{path} is not a dump of a tap: its name lacks step=, rank=, dump_index= or name=")
    if int(named["rank"]) >= MOST_RANKS:
        raise RecordingError(f"{path} is not a dump of a tap: there is no rank {named['rank']}")
    return named


def _read(path: Path) -> dict[str, Any]:
    try:
        with opened(path.parent, path.name) as file:
            content = torch_content(file)
            value = content.get("value") if isinstance(content, dict) else None
            if isinstance(value, torch.Tensor):
                size = value.numel() * value.element_size()
                if size > most_bytes(file):
                    raise too_large(size)
    except Exception as error:  # damage has many kinds
        reason = str(error).partition("\n")[0]
        raise RecordingError(
            f"tap {_tags_in(path)['name']!r}: {path} is damaged, or has more than tensors and plain data: {reason}"
        ) from error
    if not isinstance(content, dict) or "value" not in content or not isinstance(content.get("meta"), dict):
        raise RecordingError(f"tap {_tags_in(path)['name']!r}: {path} is not a dump of a tap: it lacks value or meta")
    return content
