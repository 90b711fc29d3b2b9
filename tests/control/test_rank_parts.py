"""What a notebook says of ranks that are interrupted, debugged or print, without a rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.base.world import Place
from graftlab.control import interrupt_report, queries, rank_output
from graftlab.control.interrupt_report import interrupt_and_report
from graftlab.control.post_mortems import post_mortem, prompt
from graftlab.control.queries import Queries
from graftlab.control.rank_output import RankOutput
from graftlab.control.run_state import RunState
from graftlab.errors import SessionError
from graftlab.ranks.messages import AskPostMortem, DisplayData, LiveOutput, Output, PostMortem, RunDone
from graftlab.session import Session

# ---- interrupts ------------------------------------------------------------------------------------------------------


class Ranks:
    """A session of one baseline rank and two target ranks with a run; ``ending`` end when they are interrupted."""

    def __init__(self, *ending: str, stacks: dict[str, str] | None = None) -> None:
        self.ranks: list[Any] = [
            SimpleNamespace(
                place=place, label=place.label, was_ended=False, status=lambda label=place.label: f"at {label}"
            )
            for place in Place("baseline", 0, 1, 2).everyone()
        ]
        self.state = RunState(1, self.ranks)
        self.runs: list[Any] = [RunState(0, []), self.state]
        self.options = SimpleNamespace(timeout=60.0)
        self.lost_groups = {"target": "killed"}
        self.interrupts = 0
        self._ending, self._stacks = ending, stacks or {}

    def interrupt(self) -> None:
        self.interrupts += 1
        for rank in self.ranks:
            if rank.label in self._ending:
                self.state.note_done(rank, RunDone(1, None, None))

    def stacks(self) -> dict[str, str]:
        return self._stacks


@pytest.fixture(autouse=True)
def _no_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt_report, "_PATIENCE", 0.0)
    monkeypatch.setattr(interrupt_report, "state_of", lambda run: run)


def test_an_interrupt_reports_each_running_rank_with_where_it_was() -> None:
    stacks = {"target[1]": '  File "/a.py", line 1, in main\n    f()\n  File "/b.py", line 2, in f\n    wait()'}
    ranks = Ranks("target[0]", stacks=stacks)
    ranks.state.note_done(ranks.ranks[0], RunDone(1, None, None))
    said = interrupt_and_report(ranks)  # type: ignore[arg-type]
    assert ranks.interrupts == 1
    assert said[0] == "target[0]: ended; it was at target[0]"
    assert said[1].startswith("target[1]: still running; its code has not returned from a call")
    assert '(File "/b.py", line 2, in f); `%graft restart` ends it' in said[1]
    assert said[2:] == ["the process group of the target is gone (killed); `%graft restart` brings it back"]


def test_an_ended_rank_is_distinguished_from_one_in_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = Ranks(stacks={"target[1]": "in a collective"})
    ranks.ranks[0].was_ended, ranks.ranks[0].how_it_ended = True, lambda: "was ended"
    monkeypatch.setattr(interrupt_report, "collective_in", lambda stack: "all_reduce" if stack else None)
    said = interrupt_and_report(ranks)  # type: ignore[arg-type]
    assert said[0] == "baseline[0]: was ended"
    assert said[1].endswith("no interrupt reaches; `%graft restart` ends it")
    assert "it waits in a collective (all_reduce)" in said[2]
    assert "the time limit of its group, 60 s;" in said[2]


def test_without_a_run_in_progress_nothing_is_interrupted() -> None:
    ranks = Ranks()
    for rank in ranks.ranks:
        ranks.state.note_settled(rank)
    assert interrupt_and_report(ranks) == ["nothing is running"]  # type: ignore[arg-type]
    ranks.runs.clear()
    assert interrupt_and_report(ranks) == ["nothing is running"]  # type: ignore[arg-type]
    assert ranks.interrupts == 0


# ---- debugging -------------------------------------------------------------------------------------------------------


def test_a_debugger_command_goes_to_one_rank() -> None:
    ranks: Any = Ranks().ranks
    asked: list[Any] = []

    def ask(*question: Any) -> PostMortem:
        asked.append(question)
        return PostMortem("the answer")

    assert post_mortem(ranks[1:2], "target[0]", "p x", ask) == "the answer"  # type: ignore[arg-type]
    assert asked == [(ranks[1], AskPostMortem("p x"), PostMortem)]
    with pytest.raises(SessionError, match=r"'target' is more than one rank; name one of target\[0\], target\[1\]"):
        post_mortem(ranks[1:], "target", "w", ask)  # type: ignore[arg-type]
    session: Any = SimpleNamespace(select={"target[0]": ranks[1:2]}.__getitem__, _ask=ask)
    assert Session.post_mortem(session, "target[0]", "w") == "the answer"
    assert asked[-1] == (ranks[1], AskPostMortem("w"), PostMortem)


@pytest.mark.parametrize("end", ["q", "quit", "exit", EOFError(), KeyboardInterrupt()])
def test_a_prompt_repeats_the_last_command_and_shows_errors_until_its_end(end: Any) -> None:
    lines: Iterator[Any] = iter(["", " u ", "", "wrong", end, "late"])
    asked: list[str] = []
    shown: list[str] = []
    prompts: list[str] = []

    def read(text: str) -> str:
        prompts.append(text)
        line = next(lines)
        if isinstance(line, BaseException):
            raise line
        return str(line)

    def ask(command: str) -> str:
        asked.append(command)
        if command == "wrong":
            raise SessionError("no such frame")
        return f"<{command}>"

    prompt("target[0]", ask, read, shown.append)
    assert asked == ["", "u", "u", "wrong"]
    assert shown[0].startswith("<>\n\nw: the frames")
    assert shown[1:] == ["<u>\n", "<u>\n", "no such frame\n"]
    assert set(prompts) == {"(target[0]) "}
    assert next(lines) == "late"


def test_the_stack_of_a_rank_that_cannot_answer_is_written_by_its_signal_handler(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(queries, "_ANSWER_TIMEOUT", 0.0)
    file = tmp_path / "stacks"
    file.write_text("of an earlier time\n")
    signals: list[int] = []

    def write(number: int) -> None:
        signals.append(number)
        file.write_bytes(file.read_bytes() + b"of now\xff\n")

    rank: Any = SimpleNamespace(label="target[0]", pid=77, stacks_file=None, signal=write, join=lambda seconds: False)
    asking: Any = Queries(0.0)
    monkeypatch.setattr(asking, "ask", lambda *_: (_ for _ in ()).throw(SessionError("it did not answer")))
    assert asking.stack_of(rank).startswith("it did not answer; `py-spy dump --pid 77` shows")
    assert signals == []
    rank.stacks_file = file
    assert asking.stack_of(rank) == "of now\ufffd\n"
    assert len(signals) == 1
    rank.signal = signals.append
    assert asking.stack_of(rank) == "target[0] did not answer within 0 s"


# ---- output ----------------------------------------------------------------------------------------------------------


class Bar:
    """A live area."""

    shown: list[str]

    def __init__(self) -> None:
        self.shown = []
        bars.append(self)

    def show(self, text: str) -> None:
        self.shown.append(text)


bars: list[Bar] = []


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    bars.clear()
    monkeypatch.setattr(rank_output, "LiveText", Bar)
    return []


def test_each_line_has_its_rank_and_each_stream_one_live_area(written: list[str]) -> None:
    output = RankOutput(written.append)
    output.show(
        [
            ("b", True, LiveOutput(1, "10 %")),
            ("b", True, Output("one\ntwo\n")),
            ("b", True, LiveOutput(1, "20 %\nmore")),
            ("b", True, LiveOutput(2, "5 %")),
            ("t", True, LiveOutput(1, "1 %")),
        ]
    )
    output.show([("b", True, LiveOutput(1, "30 %"))])
    output.close()
    assert written == ["b | one\nb | two\n"]
    assert [bar.shown for bar in bars if bar.shown] == [
        ["b | 20 %\nb | more", "b | 30 %", ""],
        ["b | 5 %", ""],
        ["t | 1 %", ""],
    ]


def test_a_browser_runs_nothing_of_ranks_that_the_notebook_did_not_start(
    written: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    published: list[dict[str, str]] = []
    monkeypatch.setattr(rank_output, "publisher", lambda: published.append)
    data = {"text/html": "<script>", "text/plain": "a\nb", "image/png": "p", "application/javascript": "x"}
    RankOutput(written.append).show([("b", True, DisplayData(data)), ("t", False, DisplayData(data))])
    assert published == [data, {"text/plain": "a\nb", "image/png": "p"}]
    assert written == ["b |\n", "t |\n"]


def test_without_a_front_end_the_text_is_printed(written: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_output, "publisher", lambda: None)
    RankOutput(written.append).show([("b", True, DisplayData({"text/plain": "a\nb"})), ("b", True, DisplayData({}))])
    assert written == ["b | a\nb | b\n", ""]
