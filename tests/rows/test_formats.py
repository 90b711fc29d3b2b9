"""Files of rows stay readable: what an earlier process wrote is read by a later one, byte for byte as it lies there."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest

import graftlab as gl
from graftlab.rows.archive import BLOCKS_FILE, Archive, Place, places
from graftlab.rows.encoding import encode
from graftlab.rows.loading import ROWS_FILE, header, read_header
from graftlab.rows.schema import COLUMNS, Row

# Six rows as columns, and one as a line.
BLOCKS = base64.b64decode(
    """
cm93c1wFhgYBBgAAAO4DAAAAAAAAlQaPpnJlbF9sMpgAAAAAAACSw8QGAMDQ2ODkksPEBgA/Pz8/P6hyZWxfZGlmZpgBAAAAAACSw8QG/HxcSj
wzksPEBn9AQEBAQKdtYXhfYWJzz3/8AAAAAAABqG1lYW5fYWJzz3/8AAAAAAABpmNvc2luZc9ADAAAAAAAAa1tZWFuX2Jhc2VsaW5lz3/8AAAA
AAABrHN0ZF9iYXNlbGluZc9//AAAAAAAAaxtaW5fYmFzZWxpbmXPf/wAAAAAAAGsbWF4X2Jhc2VsaW5lz3/8AAAAAAABq21lYW5fdGFyZ2V0AK
pzdGRfdGFyZ2V0AKptaW5fdGFyZ2V0AKptYXhfdGFyZ2V0AKltYXRjaF9yZWzPf/wAAAAAAAGnc2Vjb25kcwCNo3J1bgCkc3RlcJiSw8QGAAAB
AAEAAAAAAAAAAKVvcmRlcpiSwsQFY2AEAQAAAAAAAAAApHJhbmsApW51bWVsBrJub25maW5pdGVfYmFzZWxpbmXPf/////////+wbm9uZmluaX
RlX3RhcmdldM9//////////7Bub25maW5pdGVfZGlmZmVyz3//////////rHJvd3NfbWF0Y2hlZM9//////////65yb3dzX3VubWF0Y2hlZM9/
/////////6xwbGFuX3ZlcnNpb24Aqm9jY3VycmVuY2UApS5zdGVwmJLDxAYAAAEAAQAAAAAAAAAA3gASpG5hbWUApHRhZ3OUksPEBgAB/wH/AZ
LDxAYAAP8A/wCSw8QGAAD/AP8AksPEBgAA/wD/AKlkaXJlY3Rpb24ApHNpZGUApnN0YXR1cwCnc2VuZGVycwClc2hhcGUApWR0eXBlAK1tYXhf
YWJzX2luZGV4lJLDxAYAAf8B/wGSw8QGAAD/AP8AksPEBgAA/wD/AJLDxAYAAP8A/wCtYmFzZWxpbmVfbmFtZQCrdGFyZ2V0X25hbWUAqXRyYW
5zZm9ybQCqYWxpZ25lZF9ieQCmbGF5b3V0AKptYXRjaGVkX2J5AKRjYXN0AKRub3RlAKVlcnJvcgDE4XgBnVBBjoMwDPyLzzkUeuMrEUKGuBBt
SFBipKKKv9cGVl31uJcoMx7b43lBxJmgsTBBa4BxLAJeFyukgcK0QBPXEOTvnYhFlkdiqWWMP9DcDATcKMtvN//urXYx4HymgX2KaqmvWU2dS+
3vVmUYeVWjMKR5wUzu0FF0lJW2t1ZVEy56mq3NXbHj7cDwCAn5XmvPjM8O+9J5aX0enaZqja3klWqPhYKP1F0haQhCn+d/k5JFeaQ8y5RLh8GP
kVzXbx9Ogkorf/CMPExfmgHLH0VMrFdcMynnJEGfcH8Dm/mUJHJvd3Ohi9PeAgEAAACKAAAAAAAAAHgBxU7LCsIwELz7Fcucg9QUPPgrpYcVYw
2mUZJ4EPHfna0giB8ghEnmkd2RoXPSO9k6wQlOHsg6B+zeDLWFKwkDqPGw6E3LFBqjKJrPNDkASe+h2PtJsveL/QlaYI61xjzx29CNBM+tvHFM
F229p84G+ZbSN1q7DXO/zn8V1rKzJliRcfUCPLRg3Q==
"""
)


def row(order: int, **changes: Any) -> Row:
    tags = {"name": "h", "step": order // 2, "side": "target", "rank": 0, "layer": order % 2}
    made = Row(0, order // 2, order, "h", tags, "b2t", "target", 0, "compared", [0], [2, 3], "float32", numel=6)
    return made._replace(rel_l2=order / 8, max_abs_index=(order % 2, 1))._replace(**changes)


def folder_of(path: Path, blocks: bytes, *lines: bytes) -> Path:
    (path / BLOCKS_FILE).write_bytes(blocks)
    (path / ROWS_FILE).write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def test_blocks_that_were_written_before_are_read(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, BLOCKS, header(7), encode(row(7)))
    assert [place.row_count for place in places(tmp_path / BLOCKS_FILE)] == [6, 1]
    frame = gl.load_run(folder)
    expected = [*map(row, range(6)), row(6, rel_l2=None, status="missing"), row(7)]
    for name in ("step", "order", "status", "side", "numel", "dtype", "layer", "max_abs_index"):
        own = "order" if name == "layer" else name
        found = [getattr(each, own) % 2 if name == "layer" else getattr(each, own) for each in expected]
        assert frame[name].tolist() == found, name
    assert frame["rel_l2"].isna().tolist() == [False] * 6 + [True, False]
    assert frame["rel_l2"].dropna().tolist() == [0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.875]


def test_a_block_that_was_cut_short_or_is_none_ends_the_file(tmp_path: Path) -> None:
    path = tmp_path / BLOCKS_FILE
    assert list(places(path)) == []
    path.write_bytes(BLOCKS)
    first, last = places(path)
    assert (first.offset, last.offset, last.offset + last.length) == (0, first.length, len(BLOCKS))
    for data in (BLOCKS[:-1], BLOCKS[: first.length], BLOCKS[: first.length + 20], BLOCKS[: first.length] + b"x" * 400):
        path.write_bytes(data)
        assert list(places(path)) == [first]
        assert Archive(tmp_path).row_count == 6
    path.write_bytes(BLOCKS[: first.length - 1])
    assert list(places(path)) == []


def test_what_is_wrong_with_a_block_is_said_with_its_rows(tmp_path: Path) -> None:
    archive = Archive(folder_of(tmp_path, BLOCKS))
    first, last = archive.places
    with pytest.raises(gl.SessionError, match=r"the block of rows 40 to 45 is not what was written, by its checksum"):
        archive.read(Place(first.offset, first.length + 1, 6), 40)
    changed = bytearray(BLOCKS)
    changed[last.offset + last.length - 1] ^= 1
    (tmp_path / BLOCKS_FILE).write_bytes(changed)
    with pytest.raises(gl.SessionError, match=r"the block of rows 6 to 6 is not what was written"):
        archive.read(last, 6)
    assert len(archive.read(first, 0)) == 6


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (b'{"columns": ["run", "step"]}', (("run", "step"), 0)),
        (b'{"columns": ["run"], "first": 12}', (("run",), 12)),
        (b'{"columns": ["run"], "first": "x"}', None),
        (b'{"columns": 3}', None),
        (b'{"columns"', None),
        (b"[1, 2]", None),
        (header(), (COLUMNS, 0)),
        (header(5), (COLUMNS, 5)),
    ],
)
def test_the_first_line_says_the_columns_and_how_many_rows_are_in_blocks(line: bytes, found: Any) -> None:
    assert read_header(line) == found
