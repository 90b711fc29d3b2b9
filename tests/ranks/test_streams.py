"""Output of a rank reaches its log at once, and the notebook in whole lines of one thread each."""

from __future__ import annotations

import fcntl
import io
import os
import sys
import threading
from pathlib import Path
from unittest.mock import Mock

import pytest
from kit.deadline import DEADLINE
from kit.mailboxes import eager_threads
from kit.refusals import exactly

from graftlab.errors import SessionError
from graftlab.ranks import streams
from graftlab.ranks.streams import LabelledStream


@pytest.fixture
def log() -> io.StringIO:
    return io.StringIO()


@pytest.fixture
def sent() -> list[str]:
    return []


@pytest.fixture
def stream(log: io.StringIO, sent: list[str]) -> LabelledStream:
    return LabelledStream(log, sent.append)


def test_only_whole_lines_are_sent_and_the_log_has_everything_at_once(
    stream: LabelledStream, log: io.StringIO, sent: list[str]
) -> None:
    assert stream.write("half of ") == 8
    assert sent == []
    assert log.getvalue() == "half of "
    stream.write("a line\nand")
    assert sent == ["half of a line\n"]
    stream.write(" one\ntwo\nmore")
    assert sent == ["half of a line\n", "and one\ntwo\n"]
    stream.write("")
    assert log.getvalue() == "half of a line\nand one\ntwo\nmore"


def test_unfinished_lines_are_sent_when_the_run_ends(stream: LabelledStream, sent: list[str]) -> None:
    print("no newline", end="", file=stream)
    other = threading.Thread(target=lambda: stream.write("nor here"))
    other.start()
    other.join(DEADLINE)
    assert sent == []
    stream.flush_lines()
    assert sorted(sent) == ["no newline\n", "nor here\n"]
    stream.flush_lines()
    assert len(sent) == 2


def test_the_log_is_on_disk_when_a_run_ends_and_its_length_is_looked_at_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flushed, looked = Mock(), Mock()
    monkeypatch.setattr(streams, "shorten", looked)
    monkeypatch.setattr(streams, "_CHARACTERS_TO_A_CHECK", 10)
    stream = LabelledStream(flushed, lambda text: None)
    lengths = []
    for text in ("0123456789", "1\n", "2\n", "3456789\n", "4567\n"):
        stream.write(text)
        lengths.append(looked.call_count)
    assert lengths == [0, 1, 1, 1, 2]
    looked.assert_called_with(flushed)
    flushed.flush.assert_not_called()
    stream.flush_lines()
    flushed.flush.assert_called_once_with()


def test_lines_of_two_threads_are_not_torn(stream: LabelledStream, log: io.StringIO, sent: list[str]) -> None:
    def prints(name: str) -> None:
        for number in range(200):
            print(name, number, name, file=stream)

    with eager_threads():
        threads = [threading.Thread(target=prints, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE)
    lines = "".join(sent).splitlines()
    for name in "ab":
        assert [line for line in lines if line[0] == name] == [f"{name} {number} {name}" for number in range(200)]
    assert len(log.getvalue()) == len("".join(sent))


def test_a_line_that_never_ends_is_sent_in_parts(
    stream: LabelledStream, sent: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_LONGEST", 10)
    stream.write("0123456789")
    assert sent == []
    stream.write("abc")
    assert sent == ["0123456789abc\n"]
    stream.write("x\n")
    assert sent[1:] == ["x\n"]


@pytest.mark.parametrize(("lines", "characters"), [(10, 1 << 21), (1 << 20, 100)])
def test_output_beyond_the_budget_per_second_is_only_in_the_log_with_one_notice(
    lines: int,
    characters: int,
    stream: LabelledStream,
    log: io.StringIO,
    sent: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.5]
    monkeypatch.setattr(streams.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(streams, "_LINES_A_SECOND", lines)
    monkeypatch.setattr(streams, "_CHARACTERS_A_SECOND", characters)
    everything = [f"line {number:04}\n" for number in range(3000)]
    for number, line in enumerate(everything):
        clock[0] = 0.5 + number // 1000
        stream.write(line)
    assert log.getvalue() == "".join(everything)
    # Ten lines of ten characters are within both budgets.
    shown = [line for start in (0, 1000, 2000) for line in everything[start : start + 10]]
    assert [line for line in sent if line in everything] == shown
    [said] = [line for line in sent if line not in everything]
    assert sent[10] == said
    assert "the rest is only in the log of this rank" in said


def test_the_notice_of_too_much_output_has_both_limits(stream: LabelledStream, sent: list[str]) -> None:
    stream.write("\n" * 10_001)
    assert sent == [
        "[graftlab: printed more than 10000 lines or 2 MiB per second; the rest is only in the log of this rank]\n"
    ]


@pytest.mark.parametrize("width", [0, 90])
def test_a_long_log_keeps_its_beginning_and_its_end(
    width: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_KEPT", 1000)
    monkeypatch.setattr(streams, "_CHARACTERS_TO_A_CHECK", 100)
    lines = [f"line {number}".ljust(width) + "\n" for number in range(3000)]
    written = 0
    with open(tmp_path / "log", "a", buffering=1, encoding="utf-8") as log:
        stream = LabelledStream(log, lambda text: None)
        for count in (500, 3000):
            for line in lines[written:count]:
                stream.write(line)
            written = count
            kept = (tmp_path / "log").read_text()
            assert len(kept) < 4000
            (said,) = [line for line in kept.splitlines() if "graftlab" in line]
            before, after = kept.split(f"{said}\n")
            everything = "".join(lines[:count])
            assert everything.startswith(before)
            assert everything.endswith(after)
            left_out = len(everything) - len(before) - len(after)
            assert said == f"[graftlab: {left_out:,} bytes of this log were left out here]"
            assert min(len(before), len(after)) > 900
    # A log that another process shortens at this moment is left to it.
    with open(tmp_path / "log", "a", encoding="utf-8") as log, open(tmp_path / "log") as theirs:
        log.write("x" * 4000)
        log.flush()
        fcntl.flock(theirs, fcntl.LOCK_EX)
        with pytest.raises(BlockingIOError):
            streams.shorten(log)
    # Not before it has three times as many bytes.
    with open(tmp_path / "short", "a", buffering=1, encoding="utf-8") as log:
        LabelledStream(log, lambda text: None).write("123456789\n" * 300)
    assert (tmp_path / "short").read_text() == "123456789\n" * 300
    # What is no file is written to as before.
    read, write = os.pipe()
    with open(write, "w", encoding="utf-8") as log:
        LabelledStream(log, lambda text: None).write("x" * 3000 + "\n")
        log.flush()
        assert len(os.read(read, 9000)) == 3001
    os.close(read)


def test_input_and_debuggers_are_refused_each_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", sys.stdin)
    monkeypatch.setattr(sys, "breakpointhook", sys.breakpointhook)
    streams.refuse_input()
    assert not sys.stdin.isatty()
    for read in ("stdin.readline()", "stdin.read(1)", "stdin.readline(3)"):
        for name, said in (("own", streams._INPUT), ("pdb", streams._DEBUGGER)):
            with pytest.raises(SessionError, match=exactly(said)):
                exec(read, {"__name__": name, "stdin": sys.stdin})
    with pytest.raises(SessionError, match=exactly(streams._DEBUGGER)):
        sys.breakpointhook(header="here")


def test_the_stream_has_the_encoding_and_descriptor_of_its_log(tmp_path: Path) -> None:
    with open(tmp_path / "log", "w", encoding="utf-8") as log:
        stream = LabelledStream(log, lambda text: None)
        assert stream.fileno() == log.fileno()
        assert stream.writable()
        assert stream.encoding == "utf-8"
        stream.write("x")
        stream.flush()
        assert (tmp_path / "log").read_text() == "x"
