"""Run folders, recordings and reports that somebody else made: opened end to end, with limits on what that may cost."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.limits import limited
from kit.rows import row

import graftlab as gl
from graftlab.control.past_runs import find_runs, runs_text
from graftlab.control.run_folder import describe_session, description_of, sizes_of
from graftlab.jobs.status_query import _rendezvous_of
from graftlab.layouts import parse_layout
from graftlab.rows.encoding import encode
from graftlab.rows.store import RowStore

# It may be shown as text, and never be a part of a page.
MARKUP = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
HOSTILE = (
    MARKUP,
    "\x00\x1b]0;owned\x07\x1b[2J",
    "\u202egnp.exe",
    "$(touch was-run)`touch was-run`",
    "x" * 50_000,
    "../../../../etc/passwd",
    "{name.__class__.__mro__}%s%n",
)
LONG = "9" * 400


def run_folder(folder: Path) -> Path:
    """A colleague's run folder: every text in it is theirs."""
    (folder / "logs").mkdir(parents=True)
    store = RowStore(folder)
    rows = []
    for order, text in enumerate(HOSTILE):
        own = {text[:40]: text, "layer": order}
        rows.append(row(text, order=order, own=own, rel_l2=0.5, note=text, error=text, transform=text, dtype=text[:99]))
    rows.append(row("nan", order=99, rel_l2=float("nan"), max_abs=float("inf"), numel=-1, rank=2**40))
    store.append([encode(each) for each in rows])
    store.close()
    describe_session(folder, (1, 1), 0)
    return folder


def require_text_alone(page: str) -> None:
    assert "<script>alert(1)" not in page
    assert "<img src=x" not in page


def test_a_colleagues_run_folder_is_read_shown_judged_and_reported_as_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = run_folder(tmp_path / "theirs")
    with limited():
        loaded = gl.load_run(folder)
        assert loaded["name"].tolist() == [*HOSTILE, "nan"]
        assert "\x1b" not in repr(loaded)
        require_text_alone(loaded._repr_html_() or "")
        require_text_alone(loaded.report(tmp_path / "report.html").read_text(encoding="utf-8"))
        with contextlib.suppress(gl.SessionError):
            verdict = loaded.verdict()
            require_text_alone(str(verdict._repr_mimebundle_()))
        gl.plots.divergence(loaded)
        gl.plots.history(loaded, "nan")
    assert not (tmp_path / "was-run").exists()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def link(path: Path) -> None:
    (path.parent.parent / "secret").write_text('{"started": 1.0, "ranks": [7, 7], "first_run": 0}')
    path.symlink_to(path.parent.parent / "secret")


def text(content: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text(content)

    return write


@pytest.mark.parametrize(
    "plant",
    [
        pipe,
        link,
        text("[" * 200_000),
        text('{"started": 1e400, "ranks": [1e400, 1], "first_run": 0}'),
        text(f'{{"started": {LONG}, "ranks": [{LONG}, 1], "first_run": 0}}'),
        text('{"started": NaN, "ranks": "ab", "first_run": [], "rendezvous": 3}'),
        text('{"started": -1e300, "ranks": {"a": 1}, "rendezvous": "/nonexistent"}'),
        text('{"x": "' + "y" * (2 << 20) + '"}'),
        text("\x00"),
    ],
    ids=["a pipe", "a link", "deep", "infinite", "long", "other types", "negative", "large", "no JSON"],
)
def test_no_description_in_a_run_folder_hangs_or_hinders_anything(
    tmp_path: Path, plant: Callable[[Path], None]
) -> None:
    folder = run_folder(tmp_path / "runs" / "theirs")
    (folder / "session.json").unlink()
    plant(folder / "session.json")
    with limited():
        assert sizes_of(folder, 0) is None
        assert len(gl.load_run(folder)) == len(HOSTILE) + 1
        listed = gl.runs(tmp_path / "runs")
        assert listed["started"].tolist() == pytest.approx([pd.Timestamp.now()], abs=pd.Timedelta(days=2))
        assert "1 run folders" in runs_text(find_runs(tmp_path / "runs"))
        with contextlib.suppress(gl.SessionError):
            assert _rendezvous_of(folder) is None
        # Appending to it makes it a file of this session.
        describe_session(folder, (1, 2), 3)
    assert description_of(folder)["ranks"] == [1, 2]
    assert not (folder / "session.json").is_symlink()
    assert not (tmp_path / "runs" / "secret").exists() or "7, 7" in (tmp_path / "runs" / "secret").read_text()


@pytest.fixture(scope="module")
def whole_folder(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    folder = tmp_path_factory.mktemp("whole") / "run"
    folder.mkdir()
    store = RowStore(folder)
    store.append([encode(row(f"tap {order}", order=order, rel_l2=order / 7)) for order in range(12)])
    store.close()
    describe_session(folder, (1, 1), 0)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@examples(60)
@given(st.sampled_from(["rows.jsonl", "rows.crc32", "session.json"]), st.booleans(), st.data())
def test_any_damage_of_a_run_folder_is_a_session_error_or_rows(
    whole_folder: dict[str, bytes],
    tmp_path_factory: pytest.TempPathFactory,
    name: str,
    without_checksums: bool,
    data: st.DataObject,
) -> None:
    folder = tmp_path_factory.mktemp("damaged")
    for other, content in whole_folder.items():
        if not (without_checksums and other == "rows.crc32"):
            (folder / other).write_bytes(content)
    written = whole_folder[name]
    start = data.draw(st.integers(0, len(written)))
    stop = data.draw(st.integers(start, min(len(written), start + 20)))
    odd = st.sampled_from([b"[" * 100_000, b"\xff" * 8, b"9" * 5000, b"1e999", b'{"a":' * 2000, b"\n", b"NaN"])
    inserted = data.draw(st.one_of(st.binary(max_size=12), odd))
    (folder / name).write_bytes(written[:start] + inserted + written[stop:])
    loaded: Any = None
    with limited(), contextlib.suppress(gl.SessionError):
        loaded = gl.load_run(folder)
        sizes_of(folder, 0)
        gl.runs(folder.parent)
    # With its checksums a file gives the rows that were written, or none.
    if loaded is not None and not without_checksums and name == "rows.jsonl":
        assert loaded["name"].tolist() == [f"tap {order}" for order in range(len(loaded))]
        assert (loaded["rel_l2"] == [order / 7 for order in range(len(loaded))]).all()


def test_a_colleagues_recording_is_listed_and_compared_as_text(tmp_path: Path) -> None:
    with gl.record(tmp_path / "theirs"):
        for number, name in enumerate(HOSTILE):
            gl.tap(name, torch.full((3,), float(number)), own=name)
    with limited():
        recording = gl.Recording.open(tmp_path / "theirs")
        frame = recording.frame
        assert frame["name"].tolist() == list(HOSTILE)
        require_text_alone(getattr(recording, "_repr_html_", lambda: "")() or "")
        assert "\x1b" not in repr(recording)
        assert [float(tensor[0]) for _, tensor, _ in recording.taps(0)] == [float(each) for each in range(len(HOSTILE))]


@pytest.mark.parametrize("layout", ["pad(dim=0, size=3, to=10000000000)", "sketch(size=1000000000, of=[3])"])
def test_a_layout_in_a_recording_cannot_fill_the_memory(layout: str) -> None:
    with limited(), pytest.raises(gl.LayoutError, match=r"too large|at most"):
        parse_layout(layout).local(torch.ones(3))


def test_a_file_of_requests_that_is_a_pipe_is_refused_and_a_link_to_one_is_read(tmp_path: Path) -> None:
    from graftlab.requests import RequestDumper, load_dump

    os.mkfifo(tmp_path / "pipe.pkl")
    with pytest.raises(OSError, match="it is not a regular file"):
        load_dump(tmp_path / "pipe.pkl")
    dumper = RequestDumper(tmp_path / "served", threshold=1)
    assert dumper.add({"rid": "a"}, None, time.time(), time.time())
    assert dumper.close()
    [path] = (tmp_path / "served").glob("*.pkl")
    (tmp_path / "newest").symlink_to(path)
    assert load_dump(tmp_path / "newest")["requests"][0].request["rid"] == "a"


@pytest.mark.parametrize("text", ["[]", "[1, 2]", '"facts"', "null", "7", "{", "[" * 100_000])
def test_a_description_that_is_no_table_of_facts_has_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "session.json").write_text(text)
    assert description_of(tmp_path) == {}
