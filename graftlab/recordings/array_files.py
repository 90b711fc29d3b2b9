"""Folders of array files that other programs wrote as a recording: ``.npy``, ``.npz``, ``.safetensors``, ``.pt``.

Names, steps and calls are in the files' names, by a pattern. A ``.pt`` file is read by torch's restricted unpickler,
and an ``.npy`` file without pickles, so that no code in them runs.
"""

from __future__ import annotations

import io
import os
import pickletools
import re
import string
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from isal.isal_zlib import crc32

from graftlab.base.files import opened
from graftlab.base.tags import RESERVED_TAGS
from graftlab.base.tensor_bytes import DTYPE_NAMES, as_bytes
from graftlab.errors import RecordingError
from graftlab.recordings.file_format import (
    LONGEST_GAP,
    MOST_RANKS,
    TAP_ARGUMENTS,
    IndexEnd,
    StoredTensor,
    TapEntry,
    end_of,
)
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.recordings.tensor_file import read_tensor, tensor_places

SUFFIXES = (".npy", ".npz", ".safetensors", ".pt", ".pth")
# Fields of a pattern that are numbers and no tags. Any further field but the name is a tag.
_NUMBERS = ("step", "rank", "call", "index")
_DIGITS = re.compile("([0-9]+)")

# Values in a file that torch wrote, and how deep they lie in one another.
_MOST_VALUES, _DEEPEST = 1_000_000, 50
# Bytes in memory beyond eight times the file's own: one with equal elements, or with tensors that share theirs, may be
# far smaller than what it makes.
_MOST_BEYOND = 128 << 20
# The sum of the squares of the lengths of all words in a pickle: the steps of a search that torch makes.
_MOST_TEXT = 1 << 28
# The first bytes of a file that torch writes.
_ZIP = b"PK\x03\x04"
# How many pickles a file of torch's old format has.
_OLD_PICKLES = 5

# An array, or the sentence that says what it is instead.
_Arrays = Mapping[str, torch.Tensor | str]


@dataclass(frozen=True)
class _StatedTap:
    """What a file's name states."""

    name: str
    step: int
    rank: int
    call: int | None
    index: int | None
    tags: dict[str, int | str]


class ArrayFolder(RecordedSide):
    """A folder of array files; see :meth:`Recording.from_files`. One file at a time is in memory."""

    def __init__(self, folder: str | Path, pattern: str | None = None) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self._found = _read_folder(self.folder, pattern)
        self.world_size = len(self._found)
        self._newest: tuple[str, _Arrays] = ("", {})

    def _read_index(self, rank: int) -> tuple[list[TapEntry], IndexEnd]:
        entries, left_out = self._found[rank]
        return entries, end_of(entries, left_out)

    def _load(self, rank: int, entry: TapEntry, stored: StoredTensor) -> torch.Tensor:
        if self._newest[0] != stored.shard:
            self._newest = stored.shard, _arrays_in(self.folder, stored.shard)
        value = self._newest[1].get(stored.key)
        if not isinstance(value, torch.Tensor) or _stored(stored.shard, stored.key, value) != stored:
            raise RecordingError(
                f"{entry} on rank {rank}: {self.folder / stored.shard} has changed since it was opened"
            )
        return value

    def __getstate__(self) -> dict[str, Any]:
        # What was found travels to the ranks, so that they replay what was opened; the arrays do not.
        return {**self.__dict__, "_newest": ("", {})}


def array_files_in(folder: Path) -> list[str]:
    """The names of a folder's array files in natural order: a number in them counts as a number.

    Raises :class:`RecordingError` for a folder that cannot be read.
    """
    try:
        return sorted((name for name in os.listdir(folder) if _suffix(name) in SUFFIXES), key=_natural)
    except OSError as error:
        raise RecordingError(f"{folder} cannot be read: {error.strerror}") from None


def torch_content(file: io.FileIO) -> Any:
    """What ``torch.save`` wrote, if it is tensors and plain data. Raises many kinds of errors for other files."""
    if zipfile.is_zipfile(file):
        # torch compresses nothing, and a compressed file may be much larger in memory.
        with zipfile.ZipFile(file) as archive:
            if any(part.compress_type != zipfile.ZIP_STORED for part in archive.infolist()):
                raise ValueError("it is compressed, and torch compresses none of its files")
            pickled: list[Any] = [archive.open(part) for part in archive.infolist() if part.filename.endswith(".pkl")]
            for each in pickled:
                _refuse_costly(each)
    else:
        file.seek(0)
        if file.read(len(_ZIP)) == _ZIP:
            raise ValueError("it is truncated: its table of contents, which is written last, is missing")
        # Its format before that is a sequence of pickles, and then the bytes of the tensors.
        file.seek(0)
        for _ in range(_OLD_PICKLES):
            _refuse_costly(file)
    file.seek(0)
    return torch.load(file, map_location="cpu", weights_only=True)


def most_bytes(file: io.FileIO) -> int:
    """How many bytes the arrays of a file may take in memory: a small file may not fill it."""
    return _MOST_BEYOND + 8 * os.fstat(file.fileno()).st_size


def too_large(nbytes: int) -> ValueError:
    """The error for a file whose arrays would take this many bytes."""
    return ValueError(
        f"its arrays take {nbytes:,} bytes in memory, which is far more than the file's own; write it uncompressed, "
        "and expanded tensors as contiguous ones"
    )


def _refuse_costly(file: Any) -> None:
    """Raise ValueError for a pickle that costs torch's restricted unpickler far more than its bytes.

    That makes a bytearray of any size, and searches its own message on what it refuses, which may have all text of the
    pickle in it, in a time that grows with the square of the longest word.
    """
    cost = 0
    for operation, argument, _ in pickletools.genops(file):
        if isinstance(argument, (str, bytes)):
            if operation.name == "GLOBAL" and str(argument).endswith(" bytearray"):
                raise ValueError("it has a bytearray, which is not an array")
            cost += sum(len(word) ** 2 for word in argument.split())
            if cost > _MOST_TEXT:
                raise ValueError("it has names of many thousand characters, too long for arrays")


# ---- names ----------------------------------------------------------------------------------------------------------


def _suffix(name: str) -> str:
    return "" if name.startswith(".") else Path(name).suffix.lower()


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if place % 2 else (-1, part) for place, part in enumerate(_DIGITS.split(name))]


def _expression(pattern: str) -> re.Pattern[str]:
    """The pattern as a regular expression. Raises :class:`RecordingError` if it is none."""
    written, fields = "", []
    try:
        for text, field, form, conversion in string.Formatter().parse(pattern):
            written += re.escape(text)
            if field is None:
                continue
            if not field.isidentifier() or form or conversion or field in fields:
                raise ValueError(f"{{{field}}} is not a field, or occurs twice")
            if field in (RESERVED_TAGS | TAP_ARGUMENTS) - {"name", *_NUMBERS}:
                raise ValueError(f"{field!r} cannot be a tag, because graftlab uses it")
            fields.append(field)
            written += f"(?P<{field}>{'[0-9]{1,18}' if field in _NUMBERS else '.+' if field == 'name' else '.+?'})"
        if not fields:
            raise ValueError("it has no field")
    except ValueError as error:
        raise RecordingError(
            f"pattern={pattern!r}: {error}; write file names without their suffix, with fields in braces, such as "
            "'{index}_{name}' or 'step{step}.{name}.call{call}'"
        ) from None
    return re.compile(written, re.DOTALL)


def _file_name(path: Path, expression: re.Pattern[str], pattern: str) -> _StatedTap:
    found = expression.fullmatch(path.stem)
    if found is None:
        raise RecordingError(f"{path} does not fit pattern={pattern!r}; remove the file, or change the pattern")
    parts = found.groupdict()
    name = parts.pop("name", "")
    step, rank, call, index = (parts.pop(number, None) for number in _NUMBERS)
    if int(rank or 0) >= MOST_RANKS:
        raise RecordingError(f"{path}: there is no rank {rank}")
    tags = {tag: int(text) if text.isascii() and text.isdigit() else text for tag, text in parts.items()}
    return _StatedTap(
        name,
        int(step or 0),
        int(rank or 0),
        None if call is None else int(call),
        None if index is None else int(index),
        tags,
    )


# ---- the folder -----------------------------------------------------------------------------------------------------


def _read_folder(folder: Path, pattern: str | None) -> list[tuple[list[TapEntry], list[str]]]:
    """Each rank's taps in order, and what was left out. Every array is read once, so that damage is found here."""
    expression = _expression("{name}" if pattern is None else pattern)
    files = array_files_in(folder)
    if not files:
        raise RecordingError(f"{folder} has no array files: {', '.join(SUFFIXES)}")
    named = [(file, _file_name(folder / file, expression, pattern or "{name}")) for file in files]
    named.sort(key=lambda each: (each[1].rank, each[1].step, each[1].index or 0, each[1].call or 0))
    ranks = sorted({each.rank for _, each in named})
    if ranks != list(range(len(ranks))):
        missing = sorted(set(range(ranks[-1])) - set(ranks))
        raise RecordingError(f"{folder} has files of ranks up to {ranks[-1]}, but none of {missing[:10]}")
    first_step = min(each.step for _, each in named)
    found: list[tuple[list[TapEntry], list[str]]] = [([], []) for _ in ranks]
    calls: dict[tuple[Any, ...], list[tuple[_StatedTap, str]]] = {}
    for file, stated in named:
        entries, left_out = found[stated.rank]
        step = stated.step - first_step
        if step - (entries[-1].step if entries else 0) > LONGEST_GAP:
            raise RecordingError(
                f"{folder / file} is of step {stated.step}, more than {LONGEST_GAP:,} after the one before"
            )
        for key, value in _arrays_in(folder, file).items():
            name = _name_of(stated.name, key, by_default=pattern is None)
            if isinstance(value, str):
                left_out.append(f"tap {name!r} of {file}: {value}")
                continue
            entries.append(TapEntry(step, name, dict(stated.tags), _stored(file, key, value)))
            calls.setdefault((stated.rank, step, name, *stated.tags.items()), []).append((stated, file))
    _check_calls(folder, calls)
    if not any(entries for entries, _ in found):
        raise RecordingError(f"{folder} has no array that can be compared: {found[0][1][0] if found[0][1] else 'none'}")
    return found


def _name_of(stated: str, key: str, by_default: bool) -> str:
    """A tap's name: the file's, or that of the array in it, or both where a pattern asks for the file's."""
    if by_default:
        return key or stated
    return ".".join(filter(None, [stated, key])) or "array"


def _check_calls(folder: Path, calls: Mapping[tuple[Any, ...], list[tuple[_StatedTap, str]]]) -> None:
    """Refuse taps whose calls are not numbered without a gap: they would pair with other calls than theirs."""
    first = min((each.call for files in calls.values() for each, _ in files if each.call is not None), default=0)
    for (_, _, name, *_), files in calls.items():
        numbers = [each.call for each, _ in files]
        if len({(each.call, each.index) for each, _ in files}) < len(files):
            raise RecordingError(
                f"{folder}: {files[0][1]} and {files[1][1]} both have tap {name!r} of the same step and call; tell "
                "them apart by a pattern, such as pattern='{name}' or pattern='step{step}_{name}'"
            )
        if numbers[0] is not None and numbers != list(range(first, first + len(numbers))):
            raise RecordingError(
                f"{folder}: tap {name!r} has the calls {', '.join(map(str, numbers[:10]))} in {files[0][1]} and the "
                f"files after it; the calls of a step are numbered from {first} without a gap, in their order"
            )


# ---- arrays ---------------------------------------------------------------------------------------------------------


def _stored(file: str, key: str, tensor: torch.Tensor) -> StoredTensor:
    check = crc32(as_bytes(tensor).numpy().data)
    return StoredTensor(file, key, DTYPE_NAMES[tensor.dtype], tuple(tensor.shape), check)


def _arrays_in(folder: Path, file: str) -> dict[str, torch.Tensor | str]:
    """The arrays of a file by their names in it, which is blank where it has one. Names its damage."""
    try:
        with opened(folder, file) as content:
            found: dict[str, torch.Tensor | str] = {}
            for key, value in _READERS[_suffix(file)](content):
                if key in found:
                    raise ValueError(f"it has two arrays of the name {key!r}")
                found[key] = value
            return found
    except Exception as error:  # damage has many kinds
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error).partition("\n")[0]
        raise RecordingError(
            f"{folder / file} is damaged, or has more than arrays and plain data: {reason or type(error).__name__}"
        ) from error


def _read_npy(file: io.FileIO) -> Iterator[tuple[str, torch.Tensor | str]]:
    yield "", _from_numpy(np.lib.format.read_array(file, allow_pickle=False))


def _read_npz(file: io.FileIO) -> Iterator[tuple[str, torch.Tensor | str]]:
    archive = np.load(file, allow_pickle=False)
    if not isinstance(archive, np.lib.npyio.NpzFile):
        raise ValueError("it is not an archive of arrays")
    # Their sizes are what zipfile reads of each at the most.
    parts = [] if archive.zip is None else archive.zip.infolist()
    if (size := sum(part.file_size for part in parts)) > most_bytes(file):
        raise too_large(size)
    for key in archive.files:
        value = archive[key]
        yield key, _from_numpy(value) if isinstance(value, np.ndarray) else "it is not an array"


def _from_numpy(array: np.ndarray[Any, Any]) -> torch.Tensor | str:
    try:
        # As torch has it: in this machine's byte order, and with strides that are not negative.
        return torch.from_numpy(np.array(array, dtype=array.dtype.newbyteorder("="), order="C"))
    except TypeError:
        return (
            f"its dtype {array.dtype} does not exist in torch (numpy stores bfloat16 as |V2; write it as .safetensors, "
            "or convert it to float32, which changes no value)"
        )


def _read_safetensors(file: io.FileIO) -> Iterator[tuple[str, torch.Tensor | str]]:
    places = tensor_places(file)
    for key in sorted(places, key=_natural):
        try:
            dtype = places[key].torch_dtype()
        except ValueError as error:
            yield key, str(error)
        else:
            yield key, read_tensor(file, places[key], dtype, places[key].shape)[0]


def _read_torch(file: io.FileIO) -> Iterator[tuple[str, torch.Tensor | str]]:
    """The tensors within dicts and sequences, named by the way to them."""
    waiting: list[tuple[str, int, Any]] = [("", 0, torch_content(file))]
    seen = size = 0
    while waiting:
        name, depth, value = waiting.pop()
        # A small file can refer to one list from many others, or from itself.
        seen += 1
        if seen > _MOST_VALUES or depth > _DEEPEST:
            raise ValueError(f"it has more than {_MOST_VALUES:,} values, or some more than {_DEEPEST} deep")
        if isinstance(value, torch.Tensor):
            size += value.numel() * value.element_size()
            if size > most_bytes(file):
                raise too_large(size)
            yield name, _plain_tensor(value)
        elif isinstance(value, (Mapping, list, tuple)):
            inside = value.items() if isinstance(value, Mapping) else enumerate(value)
            named = [(f"{name}.{key}" if name else str(key), depth + 1, each) for key, each in inside]
            waiting += reversed(named)
        else:
            yield name, f"it is {type(value).__name__}, not an array"


def _plain_tensor(value: torch.Tensor) -> torch.Tensor | str:
    plain = value.detach().as_subclass(torch.Tensor)
    if plain.layout != torch.strided or plain.is_quantized or plain.device.type != "cpu":
        return "it is sparse, quantized or without values"
    return plain.contiguous()


_READERS = {
    ".npy": _read_npy, ".npz": _read_npz, ".safetensors": _read_safetensors, ".pt": _read_torch, ".pth": _read_torch,
}  # fmt: skip
