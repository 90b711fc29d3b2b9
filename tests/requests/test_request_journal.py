"""What a dumper has accepted is on disk before it returns, and no death of the process takes it away again."""

from __future__ import annotations

import os
import pickle
import resource
import signal
import subprocess
import sys
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.limits import limited

from graftlab.control.replay import _read
from graftlab.errors import DumpError
from graftlab.requests import RequestDumper, load_dump
from graftlab.requests import journal as journals
from graftlab.requests.journal import MAGIC, SUFFIX, Journal, packed, read_journal


def journal_of(folder: Path) -> Path:
    (path,) = folder.glob(f"*{SUFFIX}")
    return path


def rids(path: Path) -> list[str | None]:
    return [each.rid for each in load_dump(path)["requests"]]


def add(dumper: RequestDumper, *names: str) -> None:
    for name in names:
        assert dumper.add({"rid": name}, {"text": name.upper()}, time.time(), time.time())


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGHUP)", -signal.SIGHUP),
        ("os.kill(os.getpid(), signal.SIGSEGV)", -signal.SIGSEGV),
        ("os.abort()", -signal.SIGABRT),
        ("os._exit(3)", 3),
    ],
)
def test_a_death_that_leaves_no_time_loses_nothing_that_was_accepted(tmp_path: Path, end: str, status: int) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    code = f"""
import os, signal
from pathlib import Path
from graftlab.requests import RequestDumper
folder = Path({str(tmp_path)!r})
args = {{"model": "m"}}
dumper = RequestDumper(folder / "dumps", 2, crash_folder=folder / "crash", server_args=args, catch_crashes=True)
for name in "abc":
    assert dumper.add({{"rid": name, "why": lambda: 1}}, {{"text": name.upper()}}, 1.0, 2.0)
    if name == "b":
        assert dumper.flush()
{end}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=90)
    assert done.returncode == status, done.stderr
    (path,) = (tmp_path / "dumps").glob("*.pkl")
    assert rids(path) == ["a", "b"]
    left: Any = [load_dump(each) for each in (tmp_path / "crash").glob(f"*{SUFFIX}")]
    (dump,) = [each for each in left if each["requests"]]
    (record,) = dump["requests"]
    assert (record.rid, record.response, record.created, record.finished) == ("c", {"text": "C"}, 1.0, 2.0)
    assert dump["server_args"] == {"model": "m"}
    assert "graftlab.requests import RequestDumper" in dump["launch_command"]
    assert [item["where"] for item in dump["dropped"]] == ["requests[0].request['why']"]
    assert dump["crash"]["reason"].startswith("a journal:")


def test_a_request_is_in_the_journal_when_add_returns_and_in_a_whole_file_later(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path / "dumps", crash_folder=tmp_path / "crash")
    add(dumper, "a", "b")
    assert rids(journal_of(tmp_path / "crash")) == ["a", "b"]
    assert dumper.flush()
    assert list((tmp_path / "crash").iterdir()) == []
    add(dumper, "c")
    assert rids(journal_of(tmp_path / "crash")) == ["c"]
    assert dumper.close()
    assert list((tmp_path / "crash").iterdir()) == []


def test_without_a_crash_folder_the_journal_is_beside_the_files(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path)
    add(dumper, "a")
    assert rids(journal_of(tmp_path)) == ["a"]
    assert dumper.close()
    assert [path.suffix for path in tmp_path.iterdir()] == [".pkl"]


def test_a_journal_is_its_owners_alone(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path)
    add(dumper, "a")
    assert journal_of(tmp_path).stat().st_mode & 0o777 == 0o600
    dumper.close()


def test_a_death_around_a_files_appearance_leaves_each_request_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumper = RequestDumper(tmp_path)
    add(dumper, "a")
    seen: list[tuple[int, list[str | None]]] = []
    rename = os.rename

    def watched(source: Any, to: Any) -> None:
        seen.append((len(list(tmp_path.glob("*.pkl"))), rids(journal_of(tmp_path))))
        rename(source, to)
        seen.append((len(list(tmp_path.glob("*.pkl"))), rids(journal_of(tmp_path))))

    monkeypatch.setattr("graftlab.requests.writing.os.rename", watched)
    assert dumper.flush()
    assert seen == [(0, ["a"]), (1, [])]
    dumper.close()


def test_a_journal_that_is_moved_with_its_files_says_the_same(tmp_path: Path) -> None:
    journal = Journal("token", lambda: {"requests": [], "server_args": None, "dropped": []})
    for name in "ab":
        journal.accept(tmp_path / "x", packed({"requests": [({"rid": name},)], "server_args": None, "dropped": []}), id)
    whole = tmp_path / "x" / "whole.pkl"
    journal.mark(whole, [1])
    assert rids(journal_of(tmp_path / "x")) == ["a", "b"]
    whole.touch()
    assert rids(journal_of(tmp_path / "x")) == ["b"]
    (tmp_path / "x").rename(tmp_path / "y")
    assert rids(journal_of(tmp_path / "y")) == ["b"]
    journal.abandon()


def test_a_folder_that_vanishes_is_made_again_with_all_that_is_in_memory(tmp_path: Path) -> None:
    dumper = RequestDumper(None, crash_folder=tmp_path / "crash")
    add(dumper, "a", "b")
    journal_of(tmp_path / "crash").unlink()
    (tmp_path / "crash").rmdir()
    add(dumper, "c")
    assert dumper.flush()  # so that the writer has repeated what it holds
    assert rids(journal_of(tmp_path / "crash")) == ["a", "b", "c"]
    dumper.close()


def test_segments_that_nothing_needs_any_more_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_LONGEST_COUNT", 3)
    dumper = RequestDumper(None, threshold=3, crash_folder=tmp_path, crash_window=100.0)
    now = time.time()
    for index in range(30):
        # The first ones are beyond the window of a crash.
        assert dumper.add({"rid": str(index)}, None, now, now - (200.0 if index < 21 else 0.0))
        if index % 3 == 2:
            assert dumper.flush()
            dumper._writer.call()
            assert dumper.flush()
    found = sorted(str(rid) for path in tmp_path.glob(f"*{SUFFIX}") for rid in rids(path))
    assert found == sorted(map(str, range(21, 30)))
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) > 1
    dumper.close()


def test_a_forked_process_leaves_its_parents_journal_alone(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path)
    add(dumper, "parent")
    child = os.fork()
    if child == 0:
        try:
            add(dumper, "child")
            os._exit(0 if dumper.close() else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert rids(journal_of(tmp_path)) == ["parent"]
    add(dumper, "again")
    assert rids(journal_of(tmp_path)) == ["parent", "again"]
    dumper.close()


def segment(folder: Path, count: int) -> bytes:
    journal = Journal("token", lambda: {"requests": [], "server_args": 7, "launch_command": "", "dropped": []})
    for index in range(count):
        content = {"requests": [({"rid": str(index)}, None, 1.0, 2.0)], "server_args": None, "dropped": []}
        journal.accept(folder, packed(content), id)
    journal.abandon()
    return journal_of(folder).read_bytes()


@given(st.data())
def test_every_whole_request_of_a_torn_journal_is_read_and_the_tear_named(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    whole = segment(tmp_path_factory.mktemp("torn"), 4)
    starts = [at for at in range(len(whole)) if whole.startswith(MAGIC, at)] + [len(whole)]
    cut = data.draw(st.integers(0, len(whole)))
    found = read_journal(Path("x"), whole[:cut], pickle.loads)
    # One frame is the head.
    assert len(found["requests"]) == max(sum(start <= cut for start in starts[1:]) - 1, 0)
    assert bool(found["dropped"]) == (cut not in starts)

    at = data.draw(st.integers(0, len(whole) - 1))
    spoilt = whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :]
    frame = sum(start <= at for start in starts[:-1]) - 1
    found = read_journal(Path("x"), spoilt, pickle.loads)
    expected = [str(index) for index in range(4) if index != frame - 1]
    assert [each[0]["rid"] for each in found["requests"]] == expected
    assert len(found["dropped"]) == 1


@given(st.binary(max_size=60), st.integers(0, 400))
def test_any_bytes_after_the_magic_are_read_or_refused(noise: bytes, at: int) -> None:
    journal = Path("any.journal")
    head = journals._FRAME.pack(MAGIC, b"R", at, len(noise), journals._checksum(b"R", at, noise)) + noise
    try:
        with limited():
            found = read_journal(journal, head + noise, lambda data: data if at % 2 else {"requests": data})
    except DumpError:
        return
    assert set(found) >= {"requests", "dropped", "crash"}


def test_a_signals_exception_while_a_request_is_pickled_is_not_swallowed() -> None:
    class Interrupts:
        times = 0

        def __reduce__(self) -> Any:
            # As a handler does that runs at this moment, and not the next time.
            Interrupts.times += 1
            if Interrupts.times == 1:
                raise SystemExit("asked to end")
            return str, ()

    content = {"requests": [(Interrupts(),)], "server_args": None, "dropped": []}
    with pytest.raises(SystemExit, match="asked to end"):
        packed(content)


def test_the_requests_of_a_folder_are_each_read_once_from_files_crashes_and_journals(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path)
    add(dumper, "a")
    assert dumper.flush()
    add(dumper, "b")
    path = dumper.dump_before_crash()
    assert path is not None
    assert rids(path) == ["a", "b"]
    add(dumper, "c")
    assert sorted(str(each.record.rid) for each in _read(tmp_path, trusted=False)) == ["a", "b", "c"]
    # A crash is read on its own.
    assert [each.record.rid for each in _read(path, trusted=False)] == ["a", "b"]
    dumper.close()


def test_the_files_of_a_folder_are_read_in_the_order_of_their_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("2026-01-01", "2026-01-02", "2026-01-03"):
        content = {
            "requests": [({"rid": name}, None, 1.0, 2.0)],
            "server_args": None,
            "launch_command": "",
            "dropped": [],
        }
        (tmp_path / f"{name}.pkl").write_bytes(pickle.dumps(content))
    glob = Path.glob
    # A disk may give them in any order.
    monkeypatch.setattr(Path, "glob", lambda self, pattern: sorted(glob(self, pattern), reverse=True))
    assert [each.record.rid for each in _read(tmp_path, trusted=False)] == ["2026-01-01", "2026-01-02", "2026-01-03"]


def test_a_segment_goes_when_the_lowest_request_in_memory_is_beyond_it(tmp_path: Path) -> None:
    journal = Journal("token", lambda: {"requests": [], "server_args": None, "dropped": []})
    for _ in range(2):
        journal.accept(tmp_path, b"", id)
        # A short segment is continued.
        journal.tidy(lambda: 1)
    assert len(journal.paths) == 1
    journal.tidy(lambda: 1, force=True)
    journal.accept(tmp_path, b"", id)
    journal.tidy(lambda: 2, force=True)
    assert len(list(tmp_path.iterdir())) == 2
    journal.tidy(lambda: 3)
    assert [path.name[-14:] for path in tmp_path.iterdir()] == ["000002.journal"]
    journal.tidy(lambda: None)
    assert list(tmp_path.iterdir()) == []


def test_an_abandoned_journal_is_closed_and_left_as_it_is(tmp_path: Path) -> None:
    journal = Journal("token", lambda: {"requests": [], "server_args": None, "dropped": []})
    journal.accept(tmp_path, b"one", id)
    journal.tidy(lambda: 1, force=True)
    journal.accept(tmp_path, b"two", id)

    def open_here() -> list[str]:
        links = [os.readlink(f"/proc/self/fd/{each.name}") for each in os.scandir("/proc/self/fd") if each.is_symlink()]
        return sorted(Path(link).name for link in links if link.startswith(str(tmp_path)))

    written = {path: path.read_bytes() for path in journal.paths}
    assert open_here() == sorted(path.name for path in written)
    journal.abandon()
    assert open_here() == []
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == written


def frame(kind: bytes, number: int, content: Any) -> bytes:
    """As any version has written it: a magic, the kind, the number, the length and the checksum; little-endian."""
    payload = pickle.dumps(content)
    numbers = number.to_bytes(8, "little") + len(payload).to_bytes(4, "little")
    checksum = zlib.crc32(payload, zlib.crc32(kind + str(number).encode()))
    return b"\x93GLJ\r\n\x1a\n" + kind + numbers + checksum.to_bytes(4, "little") + payload


def test_a_journal_of_an_earlier_process_says_what_no_whole_file_has(tmp_path: Path) -> None:
    def request(rid: str, **more: Any) -> dict[str, Any]:
        return {"requests": [({"rid": rid}, None, 1.0, 2.0)], "server_args": None, "dropped": [], **more}

    (tmp_path / "whole.pkl").touch()
    replaced = [{"where": "requests[0].request['x']", "reason": "TypeError: no"}]
    data = b"".join(
        (
            frame(b"H", 0, {"requests": [], "server_args": 7, "dropped": [{"where": "server_args", "reason": "r"}]}),
            frame(b"R", 3, request("third", dropped=replaced)),
            frame(b"R", 1, request("first")),
            frame(b"R", 2, request("second")),
            frame(b"W", 0, (str(tmp_path / "elsewhere" / "whole.pkl"), [1])),
            frame(b"W", 0, (str(tmp_path / "never.pkl"), [2])),
        )
    )
    path = tmp_path / "a.journal"
    found = read_journal(path, data + b"\x93GLJ", pickle.loads)
    assert [each[0]["rid"] for each in found["requests"]] == ["second", "third"]
    assert found["server_args"] == 7
    assert found["dropped"] == [
        {"where": "server_args", "reason": "r"},
        {"where": f"bytes {len(data)} to {len(data) + 4}", "reason": "a frame that was not written to its end"},
        {"where": "requests[1].request['x']", "reason": "TypeError: no"},
    ]
    assert found["crash"] == {
        "reason": "a journal: its process has not written these requests into a file",
        "files": [str(tmp_path / "elsewhere" / "whole.pkl")],
        "marks": [None, None],
    }
    with pytest.raises(DumpError, match=r"a\.journal begins as a journal of requests but continues as something else"):
        read_journal(path, frame(b"R", 1, 7), pickle.loads)


def test_a_segment_is_long_by_its_requests_its_bytes_or_its_age(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(journals.time, "monotonic", lambda: now[0])
    segment = journals._Segment(tmp_path / "a.journal", b"head")
    segment.add(7, b"request")
    assert (segment.last, segment.count, segment.bytes) == (7, 1, segment.path.stat().st_size)
    assert not segment.is_long
    for name, longest in (("_LONGEST_COUNT", 1), ("_LONGEST_BYTES", segment.bytes)):
        with monkeypatch.context() as patch:
            patch.setattr(journals, name, longest + 1)
            assert not segment.is_long
            patch.setattr(journals, name, longest)
            assert segment.is_long
    now[0] += 59.9
    assert not segment.is_long
    now[0] += 0.2
    assert segment.is_long
    segment.remove()
    assert not segment.path.exists()


def test_a_disk_that_takes_a_few_bytes_at_a_time_gets_them_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = os.write
    monkeypatch.setattr(journals.os, "write", lambda descriptor, data: whole(descriptor, data[:100]))
    found = read_journal(Path("x"), segment(tmp_path, 2), pickle.loads)
    assert ([each[0]["rid"] for each in found["requests"]], found["dropped"]) == (["0", "1"], [])


def test_a_journal_that_ended_before_its_first_frame_is_known_by_its_name() -> None:
    for data in (b"", MAGIC[:2]):
        assert journals.is_journal(Path(f"a{SUFFIX}"), data)
        assert not journals.is_journal(Path("a.pkl"), data)
    assert not journals.is_journal(Path(f"a{SUFFIX}"), b"else")
