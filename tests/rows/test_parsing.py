"""Lines read by the compiled parser have the values that Python reads in them, or are left to Python."""

from __future__ import annotations

import _ctypes
import json
import math
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from graftlab.diffs import kernel
from graftlab.rows.columns import Columns
from graftlab.rows.encoding import decode_all, encode
from graftlab.rows.parsing import Parsed, _powers_of_five, parse, rows_of_pieces
from graftlab.rows.schema import COLUMNS, Row

pytestmark = pytest.mark.skipif(kernel.load() is None, reason=f"no compiled library: {kernel.description()}")

TAGS = {"name": "x", "step": 0, "side": "target", "rank": 0}
ROW = Row(0, 0, 1, "x", TAGS, None, "target", 0, "compared", [0], [2], "float32", seconds=0.25, numel=2)


def line_with(column: str, literal: str) -> bytes:
    """A line with this text as the value of a column."""
    values = [json.dumps(value, separators=(",", ":")) for value in ROW]
    values[COLUMNS.index(column)] = literal
    return f"[{','.join(values)}]\n".encode()


def parsed(lines: bytes) -> Parsed:
    found = parse(lines)
    assert found is not None, "left to Python"
    return found


def bits(value: float) -> bytes:
    return struct.pack("<d", value)


def cells(block: dict[str, Any], columns: Columns) -> Iterator[tuple[str, list[str]]]:
    frame = columns.frame(block)
    for name in frame.columns:
        yield name, [f"{type(value).__name__} {value!r}" for value in frame[name]]


@given(st.floats(allow_nan=False, allow_infinity=False).filter(lambda v: v == 0 or abs(v) >= 2.3e-308))
@example(1.7976931348623157e308)
@example(2.2250738585072014e-308 * 2)
@example(9007199254740993.0)
@example(-0.0)
def test_a_float_comes_back_to_the_last_bit(value: float) -> None:
    assert bits(parsed(line_with("rel_l2", repr(value))).numbers["rel_l2"][0]) == bits(value)


@given(st.integers(0, 10**19 - 1), st.integers(-330, 300), st.integers(0, 18))
@example(9007199254740993, 0, 0)  # halfway between two floats
@example(45035996273704975, -1, 0)
@example(1, 23, 0)
@example(5, -27, 0)
def test_a_decimal_is_read_as_the_nearest_float(digits: int, exponent: int, after_point: int) -> None:
    text = str(digits).rjust(after_point + 1, "0")
    literal = f"{text[: len(text) - after_point]}.{text[len(text) - after_point :] or '0'}e{exponent}"
    found = parse(line_with("rel_l2", literal))
    if found is None:
        # Digits, or a magnitude, beyond what it takes.
        digit_count = len(literal.partition("e")[0].replace(".", "").lstrip("0"))
        assert digit_count > 19 or not 2.3e-308 < float(literal) < math.inf
    else:
        assert bits(found.numbers["rel_l2"][0]) == bits(float(literal))


@pytest.mark.parametrize(
    ("column", "literal"),
    [
        ("rel_l2", "5e-324"),
        ("rel_l2", "1e999"),
        ("rel_l2", "12345678901234567890"),
        *(("rel_l2", bad) for bad in ("01", "1.", ".5", "+1", "1e", "- 1", "nan", "-NaN", "true", '"1"', "")),
        *(("order", bad) for bad in ("null", "1.0", "1e3", "01", "-", "9" * 19)),
        *(("name", bad) for bad in ("null", "3", '"a', "a", '"\x01"', '"\\x"', "[]")),
        *(("tags", bad) for bad in ("[]", "{", '{"a"}', '{"a":[1}]', '{"a":1,}', '{"a":1}}', '{"a":\n1}')),
        *(("shape", bad) for bad in ("[1", "[1]]", "[[1]", "1]", "[1 2]", "[}", "{}", "[1],[2]")),
        ("note", '"\\"'),
        ("note", b'"\xff"'.decode("latin-1")),
    ],
)
def test_what_is_unusual_or_damaged_is_left_to_python(column: str, literal: str) -> None:
    line = line_with(column, "@").replace(b"@", literal.encode("latin-1"))
    good = line_with("rel_l2", "0.5")
    assert parse(good + line + good) is None


@pytest.mark.parametrize("cut", [2, 3, 5, 40, 100])
def test_lines_of_another_length_are_left_to_python(cut: int) -> None:
    line = line_with("rel_l2", "0.5")
    assert parse(line + line[:-cut] + b"\n") is None
    assert parse(line[:-2] + b",1]\n") is None
    assert parse(line[:-1].replace(b",", b", ") + b"\n") is None


values = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.lists(st.floats(), max_size=2)
)
rows = st.lists(
    st.builds(
        lambda tags, changes: ROW._replace(tags={**TAGS, **tags}, **changes),
        st.dictionaries(st.sampled_from(["layer", "phase", 'a"b\\', "é"]), values, max_size=3),
        st.fixed_dictionaries(
            {},
            optional={
                "order": st.integers(-(10**17), 10**17),
                "name": st.sampled_from(["x", "y", 'q"],[', "é\n\\"]),
                "numel": st.none() | st.integers(0, 10**17),
                "rel_l2": st.none() | st.floats().filter(lambda v: v == 0 or not abs(v) < 2.3e-308),
                "max_abs_index": st.none() | st.lists(st.integers(0, 3), max_size=2).map(tuple),
                "shape": st.none() | st.lists(st.integers(0, 3), max_size=2),
                "note": st.none() | st.text(max_size=4),
            },
        ),
    ),
    min_size=1,
    max_size=8,
)


@pytest.mark.slow
@given(rows)
def test_rows_have_the_values_that_python_reads_in_their_lines(made: list[Row]) -> None:
    lines = b"".join(encode(row) + b"\n" for row in made)
    by_library, by_python = Columns(), Columns()
    found = cells(by_library.block(parsed(lines)), by_library)
    assert dict(found) == dict(cells(by_python.block(decode_all(lines)[0]), by_python))


def test_many_distinct_texts_stay_apart() -> None:
    made = [ROW._replace(order=at, note=f"note {at}", max_abs_index=(at, at % 7)) for at in range(5_000)]
    block = Columns().block(parsed(b"".join(encode(row) + b"\n" for row in made)))
    assert block["max_abs_index"].tolist() == [row.max_abs_index for row in made]
    assert len(np.unique(block["note"])) == 5_000


def test_lines_are_read_without_the_gil() -> None:
    library = kernel.load()
    assert library is not None
    # Calls through ctypes.PyDLL, whose functions alone have this flag, would hold it.
    assert not vars(type(library.read_lines))["_flags_"] & _ctypes.FUNCFLAG_PYTHONAPI


def test_the_powers_of_five_are_those_of_the_published_algorithm() -> None:
    """Daniel Lemire, Number Parsing at a Gigabyte per Second, 2021: from 5**-342 to 5**308, in 128 bits each."""
    table = _powers_of_five().tolist()
    assert [hex(half) for half in table[:2]] == ["0xeef453d6923bd65a", "0x113faa2906a13b3f"]
    assert [hex(half) for half in table[-2:]] == ["0x8e679c2f5e44ff8f", "0x570f09eaa7ea7648"]
    entries = [high << 64 | low for high, low in zip(table[::2], table[1::2], strict=True)]
    assert len(entries) == 342 + 308 + 1
    for power, entry in zip(range(-342, 309), entries, strict=True):
        assert entry.bit_length() == 128
        exact = Fraction(5) ** power
        # So that the exact value is between 2**127 and 2**128.
        shift = 127 - math.floor(math.log2(5) * power)
        rounded = math.floor(exact * Fraction(2) ** shift)
        # Those that a product of 64 bits can be exact with are rounded up, others are cut off.
        assert entry == rounded + (-27 <= power < 0), power


@pytest.mark.parametrize("at_exit", [False, True])
def test_pieces_that_several_threads_read_come_in_their_order(at_exit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    if at_exit:
        monkeypatch.setattr(ThreadPoolExecutor, "submit", refuse)
    lines = [line_with("numel", str(number)) for number in range(40)]
    pieces = [(line + b"what follows counts for nothing", len(line)) for line in lines]
    found = list(rows_of_pieces(pieces))
    assert [int(rows.numbers["numel"][0]) for rows, _ in found if isinstance(rows, Parsed)] == list(range(40))
    assert [length for _, length in found] == [len(line) for line in lines]
    assert list(rows_of_pieces([])) == []
    pieces[7] = (b"[1,2\n", 5)
    read = rows_of_pieces(pieces)
    assert [len(next(read)[0]) for _ in range(7)] == [1] * 7
    with pytest.raises(ValueError, match=r"."):
        next(read)
