"""Rows as an Arrow table: made from lines of the log, and turned back into values.

The table's columns are those of :data:`.schema.TABLE`. Numbers are numbers; text is dictionary-encoded; tags and lists
are JSON text, dictionary-encoded too. In tags, the step is replaced by null where it is the row's own step, so that the
tags of a tap repeat from step to step. Text of tags that begins with a space is complete as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import struct
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from graftlab.rows.encoding import json_of, values_of_line, wrong_value
from graftlab.rows.schema import COLUMNS, TABLE, Column, Row

Array = npt.NDArray[Any]

TEXT = pa.dictionary(pa.int32(), pa.string())
_NUMBERS = {"integer": pa.int64(), "float": pa.float64()}
SCHEMA = pa.schema([pa.field(column.name, _NUMBERS.get(column.storage, TEXT), column.is_nullable) for column in TABLE])
IS_JSON = frozenset({"list", "index", "tags"})
"""The storages of columns that are JSON text in a table."""
# Bytes of lines.
_PART = 1 << 17
_FORMATS = {"integer": "q", "float": "d"}
# What a list or a tuple of text is when it has been read.
_READ_AS = {"list": list, "index": list, "tags": dict}

# Lines have NaN and infinities as JavaScript's words, which are no JSON. Floats stand between two other columns.
_NONFINITE = re.compile(rb"(?<=,)(NaN|-?Infinity)(?=,)")
_NONFINITE_WORDS = ('"NaN"', 'Infinity"')
_Nonfinite = Literal["NaN", "Infinity", "-Infinity"]


class RowError(ValueError):
    """A line is not a row. ``index`` is its place among the lines that were read together."""

    def __init__(self, index: int, message: str) -> None:
        super().__init__(message)
        self.index = index


def _type_of(column: Column, hint: Any) -> Any:
    """What msgspec reads in a column."""
    if column.storage in IS_JSON:
        return msgspec.Raw
    if column.storage == "float":
        return float | _Nonfinite | None
    # Text that is one of few is looked up, which is faster than making it anew.
    if any(get_origin(each) is Literal for each in (hint, *get_args(hint))):
        return hint
    return column.type | None if column.is_nullable else column.type


_HINTS = get_type_hints(Row)
_TYPES: Any = tuple(_type_of(column, _HINTS[column.name]) for column in TABLE)
_decode_lines = msgspec.json.Decoder(tuple[_TYPES]).decode_lines


def table_of_lines(lines: bytes, names: Sequence[str] = COLUMNS) -> pa.Table:
    """The rows of whole lines, whose values are those of the columns ``names``.

    Columns that are no longer known are left out; those that the lines lack have a row's defaults. Raises
    :class:`RowError` for what is not a row.
    """
    if tuple(names) == COLUMNS:
        try:
            return _usual_table(lines)
        except (ValueError, OverflowError, RecursionError):
            pass  # Integers of more than 64 bits, NaN in tags, or damage: read line by line, by Python.
    rows = []
    for index, line in enumerate(lines[:-1].split(b"\n") if lines else ()):
        try:
            rows.append(values_of_line(line, names))
        except ValueError as error:
            raise RowError(index, f"this is not a row of graftlab ({error})") from None
    if (fault := wrong_value(rows)) is not None:
        index, column, value = fault
        raise RowError(index, f"this has {value!r:.80} as its {column}, which is not valid")
    return _table_of_values(rows)


def _usual_table(lines: bytes) -> pa.Table:
    try:
        cells, has_words = _cells_of(lines), False
    except ValueError:
        cells, has_words = _cells_of(_NONFINITE.sub(rb'"\1"', lines)), True
    if len(cells["step"]) != lines.count(b"\n"):
        raise ValueError("not one row per line")
    if not cells["step"]:
        return SCHEMA.empty_table()
    arrays = []
    for column in TABLE:
        of_rows: Sequence[Any] = cells[column.name]
        if column.storage == "tags":
            of_rows = _without_steps(of_rows, cells["step"])
        elif column.storage in IS_JSON:
            of_rows = _texts_or_none(of_rows)
        elif column.storage == "float" and has_words:
            of_rows = [float(value) if type(value) is str else value for value in of_rows]
        array = _array(of_rows, column)
        if column.storage in IS_JSON:
            texts = array.dictionary.to_pylist()
            # The words may have been in a tag, where quotes change what they are.
            if has_words and any(word in text for text in texts for word in _NONFINITE_WORDS):
                raise ValueError("not finite, in a tag")
            values_of_texts(texts, column)
        if array.null_count and not column.is_nullable:
            raise ValueError(f"no {column.name}")
        arrays.append(array)
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _cells_of(lines: bytes) -> dict[str, list[Any]]:
    """The values of all rows, by column. Raises ValueError."""
    cells: list[list[Any]] = [[] for _ in COLUMNS]
    view, start = memoryview(lines), 0
    # A part stays in the processor's cache, and is gone before its tuples are many enough for the garbage collector.
    while start < len(lines):
        stop = lines.rfind(b"\n", start, start + _PART) + 1 or lines.find(b"\n", start) + 1 or len(lines)
        for column, values in zip(cells, zip(*_decode_lines(view[start:stop]), strict=True), strict=False):
            column += values
        start = stop
    return dict(zip(COLUMNS, cells, strict=True))


def _array(cells: Sequence[Any], column: Column) -> pa.Array:
    """The cells of a column as an array, by the fastest of the ways that give the same one."""
    kind, count = SCHEMA.field(column.name).type, len(cells)
    first = cells[0]
    if column.storage in _FORMATS:
        if first is not None:
            # Several times as fast as Arrow's conversion, because it looks at each value once.
            with contextlib.suppress(struct.error):
                data = struct.pack(f"{count}{_FORMATS[column.storage]}", *cells)
                return pa.Array.from_buffers(kind, count, [None, pa.py_buffer(data)])
    elif first is not None and cells.count(first) == count:
        return pa.DictionaryArray.from_arrays(pa.array(np.zeros(count, np.int32)), pa.array([first], pa.string()))
    return pa.array(cells, kind)


def _texts_or_none(cells: Sequence[Any]) -> Sequence[Any]:
    """The JSON texts of cells, which are bytes of one buffer, with None for null."""
    texts = b"\n".join(cells).split(b"\n")
    return [None if text == b"null" else text for text in texts] if b"null" in texts else texts


def _without_steps(tags: Sequence[Any], steps: Sequence[int]) -> list[bytes]:
    """The text of each row's tags, with null in the place of the row's step.

    Tags that have a step elsewhere too may be changed there; their columns' check then refuses the text.
    """
    made: list[bytes] = []
    at = 0
    # Many rows of one step at a time, because bytes are searched much faster than a row takes in Python.
    for step, same in itertools.groupby(steps):
        count = sum(1 for _ in same)
        text = b"\n".join(tags[at : at + count])
        at += count
        own = b'"step":%d,' % step
        if text.count(own) == text.count(b'"step":') == count:
            made += text.replace(own, b'"step":null,').split(b"\n")
        else:
            made += (b" " + each for each in text.split(b"\n"))
    return made


def _table_of_values(rows: Sequence[Sequence[Any]]) -> pa.Table:
    """The table of rows that are given by the values of :data:`.schema.COLUMNS`."""
    arrays = []
    cells = list(zip(*rows, strict=True)) or [()] * len(COLUMNS)
    steps = cells[COLUMNS.index("step")]
    for column, of_rows in zip(TABLE, cells, strict=True):
        if column.storage == "tags":
            of_rows = tuple(map(_text_of_tags, of_rows, steps))
        elif column.storage in IS_JSON:
            of_rows = tuple(None if value is None else json_of(value) for value in of_rows)
        elif column.storage == "text":
            of_rows = tuple(None if value is None else value.encode("utf-8", "replace") for value in of_rows)
        arrays.append(pa.array(of_rows, SCHEMA.field(column.name).type))
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def _text_of_tags(tags: dict[str, Any], step: int) -> bytes:
    own = tags.get("step")
    if type(own) is int and own == step:
        return json_of({**tags, "step": None})
    return b" " + json_of(tags)


# ---- back to values -------------------------------------------------------------------------------------------------


def dictionary_of(column: pa.ChunkedArray) -> tuple[list[Any], Array]:
    """The distinct values of a dictionary-encoded column, the last of them None, and the place of each row's value."""
    if column.num_chunks != 1:
        column = column.unify_dictionaries()
        column = pa.chunked_array([column.combine_chunks()], column.type)
    if not column.num_chunks or not len(column):
        return [None], np.zeros(0, np.int32)
    array = column.chunk(0)
    values = array.dictionary.to_pylist()
    return [*values, None], array.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)


def values_of_texts(texts: Sequence[str | None], column: Column) -> list[Any]:
    """What the JSON texts of a column say; in tags, None is in the place of a row's own step.

    Raises ValueError for text that no row has.
    """
    known = [text for text in texts if text is not None]
    together = f"[{','.join(known)}]"
    try:
        found = msgspec.json.decode(together)
    except ValueError:
        found = json.loads(together)  # NaN, infinities, or half a character
    if len(found) != len(known) or not {_READ_AS[column.storage]}.issuperset(map(type, found)):
        raise ValueError(f"not the {column.name} of a row")
    if column.storage == "tags" and any(
        not is_complete(text) and ("step" not in tags or tags["step"] is not None)
        for text, tags in zip(known, found, strict=True)
    ):
        raise ValueError("tags without their step")
    if column.storage == "index":
        # A tuple indexes a tensor as it is, and the garbage collector stops tracking it.
        found = map(tuple, found)
    each = iter(found)
    return [None if text is None else next(each) for text in texts]


def is_complete(text: str) -> bool:
    """Whether text of tags has no null in the place of the row's step."""
    return text.startswith(" ")


class RepeatedTags(NamedTuple):
    """Tags that rows of several steps may have."""

    tags: dict[str, Any]
    takes_step: bool
    """Whether each row's own step belongs in the place of their step, which is None."""

    def of(self, step: int) -> dict[str, Any]:
        """The tags of a row of this step, as a dict of the caller's own; the values in it belong to all rows."""
        return {**self.tags, "step": step} if self.takes_step else dict(self.tags)


def repeated_tags(texts: Sequence[str | None], column: Column) -> list[Any]:
    """The tags of these texts, as :class:`RepeatedTags`. Raises ValueError for text that no row has."""
    found = values_of_texts(texts, column)
    return [
        None if text is None else RepeatedTags(tags, not is_complete(text))
        for text, tags in zip(texts, found, strict=True)
    ]


def with_steps(tags: Sequence[RepeatedTags], places: Array, steps: Array) -> Array:
    """The tags of each row, with its step in them. Neighbours that have the same ones share them."""
    if not len(places):
        return np.empty(0, object)
    differs = np.ones(len(places), bool)
    differs[1:] = (places[1:] != places[:-1]) | (steps[1:] != steps[:-1])
    chosen = map(tags.__getitem__, places[differs].tolist())
    own = [each.of(step) for each, step in zip(chosen, steps[differs].tolist(), strict=True)]
    found: Array = np.fromiter(own, object, len(own))[np.cumsum(differs) - 1]
    return found


def values_of_rows(table: pa.Table) -> list[list[Any]]:
    """The values of each row in the order of :data:`.schema.COLUMNS`, as :func:`.encoding.decode_lines` gives them.

    Only that an index is a tuple. Raises ValueError for text that no row has.
    """
    cells: list[list[Any]] = []
    for column in TABLE:
        found = table.column(column.name)
        if column.storage in ("integer", "float"):
            cells.append(found.to_pylist())
            continue
        texts, places = dictionary_of(found)
        if column.storage == "tags":
            steps = table.column("step").to_numpy()
            cells.append(with_steps(repeated_tags(texts, column), places, steps).tolist())
            continue
        values = values_of_texts(texts, column) if column.storage in IS_JSON else texts
        cells.append([values[place] for place in places.tolist()])
    return list(map(list, zip(*cells, strict=True)))
