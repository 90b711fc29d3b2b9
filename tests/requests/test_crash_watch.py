"""What is done before a signal or an uncaught exception ends the process, in one process that continues; deaths are in
test_request_crash.py."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftlab.requests import RequestDumper, crash, dump, load_dump
from graftlab.requests.crash import CrashWatch

TERM, QUIT = signal.SIGTERM, signal.SIGQUIT


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What happens, in its order. The program handles SIGTERM and uncaught exceptions already; SIGQUIT is ignored."""
    happened: list[Any] = []
    before = {number: signal.getsignal(number) for number in (TERM, QUIT)}
    signal.signal(TERM, lambda number, frame: happened.append(f"handled {number}"))
    signal.signal(QUIT, signal.SIG_IGN)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: happened.append(f"shown {error}"))
    yield happened
    for number, handler in before.items():
        signal.signal(number, handler)


def watch(log: list[Any]) -> CrashWatch:
    return CrashWatch(log.append, lambda: log.append("went on"))


def raised(error: Exception) -> None:
    sys.excepthook(type(error), error, None)


def test_the_last_act_precedes_the_previous_handler_and_is_cancelled_after(log: list[Any]) -> None:
    watched = watch(log)
    signal.raise_signal(TERM)
    assert log == ["signal SIGTERM", "handled 15", "went on"]
    watched.stop()
    log.clear()
    signal.raise_signal(TERM)
    assert log == ["handled 15"]


def test_an_ignored_signal_is_not_watched(log: list[Any]) -> None:
    watched = watch(log)
    assert signal.getsignal(QUIT) is signal.SIG_IGN
    watched.stop()
    assert signal.getsignal(QUIT) is signal.SIG_IGN


def test_a_raising_handler_leaves_the_process_running(log: list[Any]) -> None:
    def fails(number: int, frame: object) -> None:
        raise KeyError("handler")

    signal.signal(TERM, fails)
    watched = watch(log)
    with pytest.raises(KeyError):
        signal.raise_signal(TERM)
    assert log == ["signal SIGTERM", "went on"]
    watched.stop()
    assert signal.getsignal(TERM) is fails


def test_a_signal_without_a_handler_has_its_default_effect(log: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    signal.signal(TERM, signal.SIG_DFL)
    watched = watch(log)
    handler: Any = signal.getsignal(TERM)
    monkeypatch.setattr(crash.signal, "raise_signal", lambda number: log.append((number, signal.getsignal(number))))
    handler(TERM, None)
    assert log == ["signal SIGTERM", (TERM, signal.SIG_DFL), "went on"]
    watched.stop()


def test_an_uncaught_exception_is_shown_before_the_last_act(log: list[Any]) -> None:
    watched = watch(log)
    raised(ValueError("bad weights"))
    assert log == ["shown bad weights", "uncaught ValueError: bad weights"]
    watched.stop()
    log.clear()
    raised(ValueError("later"))
    assert log == ["shown later"]


def test_an_exception_is_reported_though_showing_it_fails(log: list[Any]) -> None:
    def fails(*given: Any) -> None:
        raise OSError("no terminal")

    sys.excepthook = fails
    watched = watch(log)
    with pytest.raises(OSError, match="no terminal"):
        raised(ValueError("bad weights"))
    assert log == ["uncaught ValueError: bad weights"]
    watched.stop()


def test_a_handler_over_a_stopped_watch_stays_and_still_gets_signals(log: list[Any]) -> None:
    watched = watch(log)
    beneath: Any = signal.getsignal(TERM)
    hook = sys.excepthook

    def after(number: int, frame: Any) -> None:
        beneath(number, frame)

    def shows(kind: Any, error: Any, trace: Any) -> None:
        hook(kind, error, trace)

    signal.signal(TERM, after)
    sys.excepthook = shows
    watched.stop()
    assert signal.getsignal(TERM) is after
    assert sys.excepthook is shows
    signal.raise_signal(TERM)
    raised(ValueError("late"))
    assert log == ["handled 15", "shown late"]


# ---- the dumper -----------------------------------------------------------------------------------------------------


def rids(paths: Iterator[Path]) -> list[str | None]:
    return [record.rid for path in sorted(paths) for record in load_dump(path)["requests"]]


def test_a_dumper_acknowledges_nothing_while_the_process_seems_to_end(log: list[Any], tmp_path: Path) -> None:
    def handler(number: int, frame: object) -> None:
        log.append(rids(tmp_path.glob("crash/*.pkl")))
        log.append(dumper.add({"rid": "late"}, None, 0.0, 0.0))
        log.append(dumper.begin({"rid": "late too"}, 0.0))

    signal.signal(TERM, handler)
    dumper = RequestDumper(tmp_path / "dumps", crash_folder=tmp_path / "crash", catch_crashes=True)
    open_one = {"rid": "unfinished"}
    assert dumper.begin(open_one, 0.0)
    signal.raise_signal(TERM)
    assert log == [["unfinished"], False, False]
    assert dumper.add({"rid": "next"}, None, 0.0, 0.0)
    assert dumper.begin({"rid": "after"}, 0.0)
    dumper.close()
    assert {"next", "after"} <= set(rids(tmp_path.glob("dumps/*.pkl")))


def test_in_a_process_that_was_forked_off_nothing_waits(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, threshold=5)
    writer = dumper._writer
    assert dumper.add({"rid": "parent's"}, None, 0.0, 0.0)
    # As the child does; here the thread and the journal that it leaves alone are this process's own.
    dump._after_fork()
    assert dumper.waiting == 0
    assert dumper.settings.threshold == 5
    assert dumper.add({"rid": "child's"}, None, 0.0, 0.0)
    assert dumper.close()
    assert rids(tmp_path.glob("*.pkl")) == ["child's"]
    writer.wait(writer.order("close", log_here=False), 10)
