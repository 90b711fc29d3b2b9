"""What becomes of recorded requests when the process that serves them is killed."""

from __future__ import annotations

import json
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from kit.refusals import exactly

from graftlab.errors import DumpError
from graftlab.requests import RecordedRequest, RequestDumper, load_dump

# Python has no time to act before these end the process.
UNWATCHED = ("SIGKILL", "SIGHUP", "SIGABRT")

SCRIPT = Path(__file__).resolve().parents[1] / "kit" / "request_scripts.py"


def python(*arguments: str, timeout: float = 90.0) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout)


def acknowledged(folder: Path) -> dict[str, set[str]]:
    """What the process wrote down: begun, added and flushed; a last line that was cut off is none."""
    found: dict[str, set[str]] = {"begun": set(), "added": set(), "flushed": set()}
    path = folder / "acknowledged"
    for line in path.read_text().splitlines() if path.exists() else ():
        what, rid = line.split()
        found[what].add(rid)
    return found


def safe_by_flush(found: dict[str, set[str]]) -> set[str]:
    """A flush covers all that its own thread was told before it."""
    safe = set()
    for last in found["flushed"]:
        name, number = last.split("-")
        safe |= {rid for rid in found["added"] if rid.split("-")[0] == name and int(rid.split("-")[1]) <= int(number)}
    return safe


def files(folder: Path) -> list[Path]:
    return [*folder.glob("dumps/*.pkl"), *folder.glob("crash/*.pkl")]


def unmarked(path: Path) -> list[RecordedRequest]:
    """The requests of a file that no other file has."""
    dump: Any = load_dump(path)
    marks = dump["crash"]["marks"] if "crash" in dump else [None] * len(dump["requests"])
    assert len(marks) == len(dump["requests"])
    return [each for each, mark in zip(dump["requests"], marks, strict=True) if mark in (None, "unfinished")]


@pytest.mark.ranks
def test_each_acknowledged_request_is_in_exactly_one_file_however_the_process_dies(tmp_path: Path) -> None:
    seed = random.randrange(1_000_000)
    done = python(str(SCRIPT), str(tmp_path), "96", str(seed))
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == 96
    proven: Counter[str] = Counter()
    for run in runs:
        fate, folder = run["fate"], Path(run["folder"])
        assert run["status"] == (1 if fate == "exception" else -getattr(signal, fate)), run
        times: Counter[str] = Counter()
        finished = set()
        for path in files(folder):
            for record in unmarked(path):
                assert record.rid is not None
                times[record.rid] += 1
                if record.finished is not None:
                    finished.add(record.rid)
        told = acknowledged(folder)
        assert {rid: count for rid, count in times.items() if count > 1} == {}, run
        assert safe_by_flush(told) - finished == set(), run
        for path in folder.glob("crash/*.journal"):
            for record in unmarked(path):
                assert record.rid is not None
                times[record.rid] += 1
                finished.add(record.rid)
                proven[f"{fate} by the journal"] += 1
        if fate not in UNWATCHED:
            assert told["begun"] - set(times) == set(), run
            assert len(list(folder.glob("crash/*.pkl"))) <= 1
            proven["begun"] += len(told["begun"] - finished)
        assert {rid: count for rid, count in times.items() if count > 1 and rid in told["added"]} == {}, run
        assert told["added"] - finished == set(), run
        proven[fate] += len(told["added"])
    # A process that was killed before it did anything proves nothing; most did.
    assert all(proven[fate] > 150 for fate in (*UNWATCHED, "SIGTERM", "SIGQUIT", "exception")), proven
    assert all(proven[f"{fate} by the journal"] > 50 for fate in UNWATCHED), proven
    assert proven["begun"] > 5, proven


# ---- one crash at a time --------------------------------------------------------------------------------------------


def crashes(folder: Path, body: str, **kwargs: Any) -> subprocess.CompletedProcess[str]:
    """Run a process that has a dumper of ``folder``/dumps and ``folder``/crash; ``body`` ends it."""
    options = {"catch_crashes": True, **kwargs}
    start = f"""
import logging, os, signal, sys, threading, time
from graftlab.requests import RequestDumper
from pathlib import Path
folder = Path({str(folder)!r})
now = time.time()
def dumper_of(**options):
    return RequestDumper(folder / "dumps", crash_folder=folder / "crash", **options)
def add(dumper, rid, ago=0.0):
    assert dumper.add({{"rid": rid}}, "text", now, now - ago)
"""
    make = "" if "dumper_of" in body else f"dumper = dumper_of(**{options!r})\n"
    return python("-c", start + make + body)


def rids(paths: Iterable[Path]) -> list[tuple[str | None, bool]]:
    """Each recorded request's id, and whether it was finished."""
    return [(item.rid, item.finished is not None) for path in sorted(paths) for item in load_dump(path)["requests"]]


FOUR = """
add(dumper, "written")
assert dumper.flush()
add(dumper, "old", ago=1000.0)
add(dumper, "recent", ago=10.0)
unfinished = {"rid": "unfinished"}
assert dumper.begin(unfinished, now)
"""


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("end", "status", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM, "signal SIGTERM"),
        ("os.kill(os.getpid(), signal.SIGQUIT)", -signal.SIGQUIT, "signal SIGQUIT"),
        ("raise RuntimeError('the model broke')", 1, "uncaught RuntimeError: the model broke"),
        ("dumper.dump_before_crash('asked'); os._exit(3)", 3, "asked"),
        ("dumper.dump_before_crash('asked'); dumper.dump_before_crash(); sys.exit(4)", 4, "asked"),
    ],
)
def test_a_crash_writes_what_is_in_no_file_yet_and_ends_as_it_would_have(
    tmp_path: Path, end: str, status: int, reason: str
) -> None:
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    done = crashes(tmp_path, FOUR + end)
    assert done.returncode == status, done.stderr
    (path,) = tmp_path.glob("crash/*.pkl")
    assert rids([path]) == [("written", True), ("recent", True), ("unfinished", False)]
    ordinary = sorted(tmp_path.glob("dumps/*.pkl"))
    assert rids(ordinary) == [("written", True), ("old", True)]
    crash = load_dump(path)["crash"]  # type: ignore[typeddict-item]
    written = str(ordinary[0])
    assert crash == {"reason": reason, "files": [written], "marks": [written, None, "unfinished"]}
    assert [each.rid for left in tmp_path.glob("*/*.journal") for each in load_dump(left)["requests"]] == []
    if "raise" in end:
        assert "RuntimeError: the model broke" in done.stderr


def test_nothing_is_watched_unless_it_was_asked_for(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT), sys.excepthook
    dumper = RequestDumper(tmp_path)
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT), sys.excepthook) == before
    dumper.close()


def test_closing_undoes_what_watching_installed(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT), sys.excepthook
    dumper = RequestDumper(tmp_path, catch_crashes=True)
    assert signal.getsignal(signal.SIGTERM) != before[0]
    dumper.close()
    assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGQUIT), sys.excepthook) == before


def test_watching_outside_of_the_main_thread_is_a_clear_error(tmp_path: Path) -> None:
    with (
        ThreadPoolExecutor(1) as pool,
        pytest.raises(
            DumpError,
            match=exactly(
                "signals can only be watched from the main thread: make the dumper there, or call its "
                "dump_before_crash() from your own handlers"
            ),
        ),
    ):
        pool.submit(RequestDumper, tmp_path, catch_crashes=True).result()


@pytest.mark.ranks
def test_the_previous_handler_runs_after_the_dump_and_serving_continues(tmp_path: Path) -> None:
    body = """
def graceful(number, frame):
    assert list(folder.glob("crash/*.pkl"))
    print("draining")
signal.signal(signal.SIGTERM, graceful)
dumper = dumper_of(catch_crashes=True)
request = {"rid": "first"}
dumper.begin(request, now)
os.kill(os.getpid(), signal.SIGTERM)
assert dumper.add(request, "late text", now, now)
add(dumper, "second")
"""
    done = crashes(tmp_path, body)
    assert (done.returncode, done.stdout) == (0, "draining\n"), done.stderr
    assert rids(tmp_path.glob("crash/*.pkl")) == [("first", False)]
    assert rids(tmp_path.glob("dumps/*.pkl")) == [("first", True), ("second", True)]


@pytest.mark.ranks
def test_while_the_process_ends_nothing_more_is_acknowledged(tmp_path: Path) -> None:
    body = """
def graceful(number, frame):
    assert not dumper.add({"rid": "late"}, None, now, now)
    assert not dumper.begin({"rid": "late too"}, now)
    os._exit(7)
signal.signal(signal.SIGTERM, graceful)
dumper = dumper_of(catch_crashes=True)
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert crashes(tmp_path, body).returncode == 7


@pytest.mark.ranks
def test_a_signal_that_was_ignored_stays_ignored(tmp_path: Path) -> None:
    body = """
signal.signal(signal.SIGTERM, signal.SIG_IGN)
dumper = dumper_of(catch_crashes=True)
add(dumper, "a")
os.kill(os.getpid(), signal.SIGTERM)
assert signal.getsignal(signal.SIGTERM) == signal.SIG_IGN
"""
    done = crashes(tmp_path, body)
    assert done.returncode == 0, done.stderr
    assert rids(tmp_path.glob("crash/*.pkl")) == []
    assert rids(tmp_path.glob("dumps/*.pkl")) == [("a", True)]


@pytest.mark.ranks
def test_a_signal_in_the_middle_of_a_write_to_the_log_does_not_hang(tmp_path: Path) -> None:
    body = """
class Interrupted(logging.StreamHandler):
    def emit(self, record):  # with the handler's lock held
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigpending()
logging.basicConfig(level=logging.DEBUG, handlers=[Interrupted()])
signal.signal(signal.SIGTERM, lambda number, frame: os._exit(9))
dumper = dumper_of(catch_crashes=True, threshold=2)
for index in range(3):
    add(dumper, str(index))
started = time.monotonic()
logging.getLogger().warning("interrupted here")
"""
    done = crashes(tmp_path, body)
    assert done.returncode == 9, done.stderr
    both = [*tmp_path.glob("crash/*.pkl"), *tmp_path.glob("dumps/*.pkl")]
    assert sorted(str(each.rid) for path in both for each in unmarked(path)) == ["0", "1", "2"]
    assert "within" not in done.stderr


@pytest.mark.ranks
def test_two_dumpers_of_one_process_both_write(tmp_path: Path) -> None:
    body = """
one = dumper_of(catch_crashes=True)
other = dumper_of(catch_crashes=True)
third = dumper_of(catch_crashes=True)
add(one, "one")
add(other, "other")
third.close()
os.kill(os.getpid(), signal.SIGTERM)
"""
    assert crashes(tmp_path, body).returncode == -signal.SIGTERM
    assert sorted(rids(tmp_path.glob("crash/*.pkl"))) == [("one", True), ("other", True)]


def test_without_a_folder_the_window_alone_is_kept_for_a_crash(tmp_path: Path) -> None:
    dumper = RequestDumper(None, threshold=2, crash_folder=tmp_path, crash_window=100.0)
    now = time.time()
    for index, ago in enumerate([500.0, 400.0, 50.0, 1.0]):
        assert dumper.add({"rid": str(index)}, None, now, now - ago)
    assert dumper.flush()
    assert list(tmp_path.glob("*.pkl")) == []
    path = dumper.dump_before_crash("asked")
    assert path is not None
    assert rids([path]) == [("2", True), ("3", True)]
    assert dumper.dump_before_crash() is None
    assert dumper.close()
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_repeats_as_many_written_requests_as_may_wait(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path / "dumps", threshold=1, crash_folder=tmp_path / "crash", max_waiting=2)
    for index in range(5):
        assert dumper.add({"rid": str(index)}, None, 1.0, time.time())
        assert dumper.flush()
    path = dumper.dump_before_crash("asked")
    assert path is not None
    assert [rid for rid, _ in rids([path])] == ["3", "4"]
    assert dumper.close()


def test_a_crash_names_the_files_of_its_window_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dumper = RequestDumper(tmp_path, crash_window=100.0)
    moment = [1_000.0]
    for clock in ("time", "monotonic"):
        monkeypatch.setattr(f"graftlab.requests.writing.time.{clock}", lambda: moment[0])
    for rid, at in (("long ago", 1_000.0), ("just now", 1_150.0)):
        moment[0] = at
        assert dumper.add({"rid": rid}, None, at, at)
        assert dumper.flush()
    moment[0] = 1_200.0
    path = dumper.dump_before_crash()
    assert path is not None
    assert rids([path]) == [("just now", True)]
    crash = load_dump(path)["crash"]  # type: ignore[typeddict-item]
    (file,) = crash["files"]
    assert rids([Path(file)]) == [("just now", True)]
    assert crash["marks"] == [file]
    dumper.close()


def test_requests_that_are_over_make_room_for_others_to_begin(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, threshold=2, max_waiting=1)
    for index in range(50):
        request = {"rid": str(index)}
        assert dumper.begin(request, 1.0), index
        assert dumper.add(request, None, 1.0, 2.0)
        assert dumper.flush()
    dumper.close()


def test_without_any_folder_nothing_is_recorded() -> None:
    dumper = RequestDumper(None)
    assert not dumper.add({}, None, 0.0, time.time())
    assert not dumper.begin({}, 0.0)
    assert dumper.dump_before_crash() is None
    assert dumper.close()


def test_without_a_crash_folder_the_crash_goes_into_the_folder(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path)
    dumper.begin({"rid": "a"}, 1.0)
    path = dumper.dump_before_crash()
    assert path is not None
    assert path.parent == tmp_path
    assert path.name.startswith("crash_")
    dumper.close()
    assert list(tmp_path.iterdir()) == [path]


def test_a_crash_folder_that_fails_does_not_lose_the_crash(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path / "dumps", crash_folder=tmp_path / "crash")
    (tmp_path / "crash").rmdir()
    (tmp_path / "crash").write_text("in the way")
    assert dumper.add({"rid": "a"}, None, 0.0, time.time())
    path = dumper.dump_before_crash()
    assert path is not None
    assert path.parent == tmp_path / "dumps"
    dumper.close()
    assert rids(files(tmp_path)) == [("a", True)]


def test_a_request_that_was_forgotten_or_finished_is_not_unfinished(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path)
    requests = [{"rid": name} for name in ("finished", "forgotten", "open", "again")]
    for request in requests:
        assert dumper.begin(request, 1.0)
    for request in (requests[0], requests[3]):
        dumper.add(request, "text", 1.0, time.time())
    dumper.forget(requests[1])
    dumper.forget({"rid": "never begun"})
    assert dumper.begin(requests[3], 2.0)
    path = dumper.dump_before_crash()
    assert path is not None
    assert rids([path]) == [("finished", True), ("again", True), ("open", False), ("again", False)]
    dumper.close()


@pytest.mark.parametrize("finished", [None, "yesterday", float("nan"), 10**400])
def test_a_time_that_is_no_number_loses_no_request(tmp_path: Path, finished: Any) -> None:
    dumper = RequestDumper(tmp_path)
    assert dumper.add({"rid": "a"}, None, 0.0, finished)
    path = dumper.dump_before_crash()
    assert path is not None
    assert load_dump(path)["requests"][0].rid == "a"
    dumper.close()


@pytest.mark.ranks
def test_a_request_that_cannot_be_pickled_does_not_spoil_the_crash(tmp_path: Path) -> None:
    done = crashes(
        tmp_path, 'add(dumper, "a")\ndumper.begin({"rid": "b", "lock": threading.Lock()}, now)\nraise ValueError'
    )
    assert done.returncode == 1
    assert rids(tmp_path.glob("crash/*.pkl")) == [("a", True), ("b", False)]


def test_requests_that_were_kept_only_for_a_crash_are_gone_once_it_is_closed(tmp_path: Path) -> None:
    dumper = RequestDumper(None, crash_folder=tmp_path, crash_window=100.0)
    now = time.time()
    assert dumper.add({"rid": "0"}, None, now, now)
    assert dumper.flush()
    assert dumper.close()
    assert list(tmp_path.iterdir()) == []
