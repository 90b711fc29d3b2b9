"""The options of a comparison on the command line, and what it shows while it waits."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import webbrowser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.__main__ import main
from graftlab.comparison import command, functions, scripts
from graftlab.comparison.command import _given_ranks, _Progress
from graftlab.comparison.repeats import JudgingChoice
from graftlab.comparison.scripts import ScriptChoice
from graftlab.control import report
from graftlab.errors import ConfigError, GraftError, WaitInterrupted
from graftlab.jobs.script_launcher import ScriptSettings
from graftlab.ranks.held_call import WatchChoice


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    now = SimpleNamespace(value=100.0)
    monkeypatch.setattr(command, "time", SimpleNamespace(monotonic=lambda: now.value))
    return now


PROCESSES: Any = [
    SimpleNamespace(
        side=side, command=SimpleNamespace(ranks=2), last_lines=lambda most, side=side: f"{most} of {side}  "
    )
    for side in ("baseline", "target")
]


def test_on_a_terminal_one_line_is_rewritten_and_removed(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with _Progress() as progress:
        clock.value += 7
        progress.wait_for(PROCESSES, ["target[0]", "target[1]"])
        assert shown.getvalue() == "\r\x1b[2Kwaiting for target[0], target[1] to call a model · 7 s · 1 of target"
        progress.wait_for(PROCESSES, ["baseline[0]", "target[0]"])
        assert shown.getvalue().endswith("baseline[0], target[0] to call a model · 7 s · 1 of baseline")
        progress.show("x" * 500)
        line = shown.getvalue().rpartition("\x1b[2K")[2]
        assert len(line) < 200
        progress.announce("one sentence")
        assert shown.getvalue().endswith("\r\x1b[2Kone sentence\n")
    assert shown.getvalue().endswith("\r\x1b[2K")


def test_in_a_file_there_is_a_line_now_and_then(clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    with _Progress() as progress:
        progress.show("loads")
        assert shown.getvalue() == ""
        # One side has called its model: at once.
        progress.wait_for(PROCESSES, ["target[0]"])
        progress.wait_for(PROCESSES, ["target[0]"])
        progress.wait_for(PROCESSES, ["baseline[0]", "target[0]"])
        clock.value += command._PATIENCE + 1
        progress.show("loads")
        progress.show("loads")
        progress.show("judges")
        progress.announce("one sentence")
    assert shown.getvalue().splitlines() == [
        "waiting for target[0] to call a model · 0 s",
        f"loads · {command._PATIENCE + 1:.0f} s",
        "one sentence",
    ]


def test_ranks_that_are_held_while_others_of_their_side_are_not_are_mentioned_once(
    clock: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)

    def said() -> list[str]:
        return [line for line in shown.getvalue().splitlines() if "Since" in line]

    with _Progress() as progress:
        # No rank of the baseline is held, and all of the target's are.
        for missing in (["baseline[0]", "baseline[1]"], ["baseline[0]", "baseline[1]", "target[1]"], ["target[1]"]):
            clock.value += command._LONG
            progress.wait_for(PROCESSES, missing)
        assert said() == []
        # They are started again.
        for missing in (["target[0]", "target[1]"], ["target[1]"]):
            clock.value += command._LONG
            progress.wait_for(PROCESSES, missing)
        assert said() == []
        clock.value += command._LONG
        clock.value += 1
        progress.wait_for(PROCESSES, ["target[1]"])
        progress.wait_for(PROCESSES, ["target[1]"])
    assert said() == [
        "Since 31 s other ranks of the target wait in their first call, which is held until target[1] makes a call, "
        "too. If that needs their result first, as the next stage of a pipeline does, these calls cannot be compared: "
        "press Ctrl-C, and run all stages in one process."
    ]


def test_numbers_of_ranks_are_two_or_left_to_the_commands() -> None:
    assert _given_ranks(None) == [None, None]
    assert _given_ranks("1, 2") == [1, 2]
    for wrong in ("1", "1,2,3", "0,1", "1,0", "1,-1", "a,b", ""):
        with pytest.raises(ConfigError, match="give two numbers"):
            _given_ranks(wrong)


JUDGED = "--include type=='Linear' --functions relu,add --inside name=='attn' --no-match --output head --floor 0.5"


@pytest.fixture
def compared(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments of the comparison that a command asks for, which is not made."""
    asked: list[Any] = []

    def ask(*args: Any, **options: Any) -> None:
        asked.append((args, options))
        raise GraftError("not made")

    monkeypatch.setattr(scripts, "compare_scripts", ask)
    monkeypatch.setattr(functions, "compare", ask)
    monkeypatch.setattr(functions, "compare_with_compiled", ask)
    return asked


@pytest.mark.parametrize(
    ("flags", "changed"),
    [
        ("--training", {"training": True}),
        ("--keep-going", {"keep_going": True}),
        ("--no-restart", {"restart": False}),
        ("--calls 7 --folder runs", {"calls": 7, "folder": Path("runs")}),
        ("--calls 1", {"calls": 1}),
        # A floor of 0 is a floor, and not the measured one.
        ("--floor 0", {"judging": JudgingChoice(False, "head", 0.0, 9.0)}),
    ],
)
def test_options_of_scripts_reach_the_comparison(compared: list[Any], flags: str, changed: dict[str, Any]) -> None:
    words = f"--threshold 9 {JUDGED} --model Net --inject --timeout 8 --ranks 2,3 {flags}".split()
    assert main(["compare", "python a.py", "python b.py", *words]) == 2
    ((baseline, target, choice, *_), _) = compared[0]
    watched = WatchChoice("type=='Linear'", ("relu", "add"), "name=='attn'")
    settings, judging = ScriptSettings(watched, "Net", True, 8.0), JudgingChoice(False, "head", 0.5, 9.0)
    assert choice == ScriptChoice(settings, **{"judging": judging, **changed})
    assert (baseline.ranks, target.ranks) == (2, 3)


@pytest.mark.parametrize("calls", [0, -1])
def test_no_calls_at_all_are_refused(calls: int, compared: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", "python a.py", "python b.py", "--calls", str(calls)]) == 64
    assert capsys.readouterr().err == f"graftlab compare: --calls {calls}: give at least 1\n"
    assert compared == []


def test_without_options_a_comparison_has_its_documented_defaults(compared: list[Any]) -> None:
    assert main(["compare", "python a.py", "python b.py"]) == 2
    ((_, _, choice, *_), _) = compared[0]
    assert choice == ScriptChoice(ScriptSettings(WatchChoice(), None, False, 600.0))
    assert (choice.judging, choice.training, choice.keep_going, choice.restart) == (JudgingChoice(), False, False, True)


def test_names_of_functions_may_have_spaces_between_them(compared: list[Any]) -> None:
    assert main(["compare", "python a.py", "python b.py", "--functions", " relu, add,"]) == 2
    assert compared[0][0][2].settings.choice.functions == ("relu", "add")


def test_options_of_functions_reach_the_comparison(compared: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "a.py"
    path.write_text("def f(): ...\ndef g(): ...\nx = 1\n")
    more = f"--inputs {path}:x --device cpu --timeout 8 --folder runs"
    words = f"{path}:f {path}:g {more} --threshold 9 --backward {JUDGED}".split()
    assert main(["compare", *words]) == 2
    named, options = compared[0]
    assert [each.name for each in named] == ["f", "g", "x"]
    judged = {"match": False, "output": "head", "floor": 0.5, "threshold": 9.0, "backward": True}
    watched = {"include": "type=='Linear'", "functions": ("relu", "add"), "inside": "name=='attn'"}
    assert options == {**judged, **watched, "device": "cpu", "timeout": 8.0, "folder": Path("runs")}
    words = f"{path}:f {more} --compiled --threshold 9 --backend eager --include type=='Linear'".split()
    assert main(["compare", *words]) == 2
    named, options = compared[1]
    assert ([each.name for each in named[:2]], named[2]) == (["f", "x"], {"backend": "eager"})
    expected = {"include": "type=='Linear'", "threshold": 9.0, "device": "cpu", "timeout": 8.0, "folder": Path("runs")}
    assert options == expected


# ---- the answer -----------------------------------------------------------------------------------------------------


class Answered(contextlib.AbstractContextManager["Answered"]):
    """A comparison, and its session, that was made."""

    answer, named, labels, runs, starts, match, text = "differ", ["norm"], {}, 7, 0, None, "norm differs."

    def __init__(self, folder: Path) -> None:
        self.session, self.folder = self, folder

    def report(self, path: Path) -> Path:
        return path

    def __exit__(self, *_: object) -> None: ...


@pytest.mark.parametrize(("answer", "code"), [("agree", 0), ("differ", 1), ("inconclusive", 2)])
def test_each_answer_has_its_documented_exit_code(
    answer: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Answered, "answer", answer)
    monkeypatch.setattr(scripts, "compare_scripts", lambda *_, **__: Answered(tmp_path))
    assert main(["compare", "python a.py", "python b.py"]) == code


def test_the_report_is_opened_and_the_answer_alone_is_on_stdout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*_: object, **__: object) -> Answered:
        print("a model's own output")
        return Answered(tmp_path)

    opened: list[str] = []
    monkeypatch.setattr(scripts, "compare_scripts", compare)
    monkeypatch.setattr(webbrowser, "open", opened.append)
    words = ["compare", "python a.py", "python b.py"]
    assert main([*words, "--json"]) == 1
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    assert (answer["report"], answer["folder"]) == (str(tmp_path / "report.html"), str(tmp_path))
    assert (answer["named"], answer["exit_code"], answer["pairs"], answer["way"]) == (["norm"], 1, None, "held")
    monkeypatch.setattr(Answered, "match", SimpleNamespace(pairs=[1, 2, 3]))
    monkeypatch.setattr(Answered, "starts", 5)
    assert main([*words, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["pairs"], answer["way"], answer["starts"]) == (3, "started again", 5)
    assert shown.err == "a model's own output\n"
    assert opened == []
    assert main([*words, "--open", "--report", str(tmp_path / "page.html")]) == 1
    assert opened == [(tmp_path / "page.html").as_uri()]
    assert capsys.readouterr().out.endswith(f"norm differs.\n\nThe report is {tmp_path / 'page.html'}\n")

    def fails(*_: object) -> None:
        raise OSError("no space left on device")

    # The answer is not lost with its page.
    monkeypatch.setattr(Answered, "report", fails)
    assert main([*words, "--open"]) == 1
    shown = capsys.readouterr()
    assert shown.out.endswith("norm differs.\n\nThere is no report.\n")
    assert shown.err.endswith(
        f"the report could not be written to {tmp_path / 'report.html'}: no space left on device\n"
    )
    assert main([*words, "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["report"] is None
    assert len(opened) == 1

    def is_wrong(*_: object) -> None:
        raise ValueError("a mistake of graftlab's")

    monkeypatch.setattr(Answered, "report", is_wrong)
    assert main(words) == 1
    shown = capsys.readouterr()
    assert shown.out.endswith("norm differs.\n\nThere is no report.\n")
    assert "Traceback" in shown.err


@pytest.mark.parametrize("json_wanted", [True, False])
@pytest.mark.parametrize(
    ("interrupt", "known"),
    [
        (KeyboardInterrupt("So far: 1 call of Net agrees."), "So far: 1 call of Net agrees."),
        (WaitInterrupted("run 3 continues"), "Nothing was judged yet."),
    ],
)
def test_an_interrupt_ends_with_what_was_known_and_the_code_of_a_shell(
    interrupt: KeyboardInterrupt,
    known: str,
    json_wanted: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def compare(*_: object) -> None:
        raise interrupt

    monkeypatch.setattr(scripts, "compare_scripts", compare)
    assert main(["compare", "python a.py", "python b.py", *(["--json"] if json_wanted else [])]) == 130
    shown = capsys.readouterr()
    text = f"interrupted; both sides have ended. {known}"
    if json_wanted:
        assert json.loads(shown.out) == {"answer": "inconclusive", "exit_code": 130, "text": text}
    else:
        assert (shown.out, shown.err) == ("", f"graftlab compare: {text}\n")


@pytest.mark.parametrize("json_wanted", [True, False])
def test_an_error_within_graftlab_is_not_taken_for_a_difference(
    json_wanted: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def compare(*_: object) -> None:
        raise ZeroDivisionError("within graftlab")

    monkeypatch.setattr(scripts, "compare_scripts", compare)
    assert main(["compare", "python a.py", "python b.py", *(["--json"] if json_wanted else [])]) == 70
    shown = capsys.readouterr()
    assert "ZeroDivisionError: within graftlab\ngraftlab compare: graftlab itself failed, and nothing" in shown.err
    if json_wanted:
        assert json.loads(shown.out)["exit_code"] == 70
    else:
        assert shown.out == ""


def test_a_comparison_with_compiled_code_has_its_report_in_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "a.py"
    path.write_text("def f(): ...\n")
    verdict = SimpleNamespace(named=["norm"])
    found = SimpleNamespace(verdict=verdict, text="norm differs.")
    written: list[Any] = []

    def write(session: object, page: Path, of: object, *_: object) -> Path:
        written.append((page, of))
        return page

    monkeypatch.setattr(functions, "compare_with_compiled", lambda *_, **__: (Answered(tmp_path), found, "differ"))
    monkeypatch.setattr(report, "write_report", write)
    words = ["compare", f"{path}:f", "--compiled"]
    assert main([*words, "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert (answer["named"], answer["report"]) == (["norm"], str(tmp_path / "report.html"))
    assert main([*words, "--report", str(tmp_path / "page.html")]) == 1
    assert capsys.readouterr().out == f"norm differs.\n\nThe report is {tmp_path / 'page.html'}\n"
    assert written == [(tmp_path / "report.html", verdict), (tmp_path / "page.html", verdict)]
