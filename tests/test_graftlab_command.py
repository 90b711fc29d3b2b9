"""Each command of the terminal and of the notebook explains its arguments, and names the defaults that it has."""

from __future__ import annotations

import argparse
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftlab import doctor
from graftlab.__main__ import main
from graftlab.control import past_runs
from graftlab.engine import serve
from graftlab.errors import SessionError
from graftlab.jobs import attach, commands
from graftlab.magics.subcommands import COMMANDS
from graftlab.requests import configure_logging


class _Parsed(Exception):
    """The parser, in place of what it would parse."""


def parsers() -> Iterator[argparse.ArgumentParser]:
    def caught(parser: argparse.ArgumentParser, argv: object) -> None:
        raise _Parsed(parser)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "parse_known_args", caught)
        with pytest.raises(_Parsed) as raised:
            main(["doctor"])
    (action,) = (each for each in raised.value.args[0]._actions if isinstance(each, argparse._SubParsersAction))
    assert {each.dest for each in action._choices_actions if each.help} == {*action.choices}
    yield from action.choices.values()
    yield from (command.parser for command in COMMANDS.values())


def arguments() -> Iterator[tuple[str, argparse.Action]]:
    for parser in parsers():
        assert parser.description, parser.prog
        for action in parser._actions:
            yield f"{parser.prog} {'/'.join(action.option_strings) or action.dest}", action


def test_each_argument_of_each_command_is_explained() -> None:
    unexplained = [name for name, action in arguments() if not action.help]
    assert unexplained == []


@pytest.mark.parametrize("module", [serve, configure_logging])
def test_each_argument_of_a_module_that_is_run_is_explained(module: Any) -> None:
    assert [action.dest for action in module._parser()._actions if not action.help] == []


def test_each_default_that_is_a_number_is_named_as_it_is() -> None:
    named = {}
    for name, action in arguments():
        if isinstance(action.default, (int, float)) and not isinstance(action.default, bool):
            text = str(action.help) % {"default": action.default, "prog": ""}
            named[name] = action.default, [float(each) for each in re.findall(r"(?:default:? |\()([\d.e+-]+)\)", text)]
    assert len(named) > 5
    assert [name for name, (default, said) in named.items() if said != [default]] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["comapre", "a.py", "b.py"], "graftlab: unknown command 'comapre'; did you mean compare?"),
        (["nonsense"], "graftlab: unknown command 'nonsense'; `graftlab --help` lists the commands"),
        (
            ["compare", "a.py", "b.py", "--foo"],
            "graftlab compare: unrecognized arguments: --foo; `graftlab compare -h`",
        ),
        (["compare", "a.py", "b.py", "--include", "name =="], "graftlab compare: --include: the expression ends"),
    ],
)
def test_wrong_usage_is_answered_in_one_line_before_anything_starts(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(words)
    except SystemExit as ended:
        code = ended.code
    assert code == 64
    assert capsys.readouterr().err.startswith(said)


def test_a_token_that_a_full_disk_cuts_off_leaves_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        status = main(["token", str(tmp_path / "token")])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert status == 2
    assert capsys.readouterr().err == "graftlab token: [Errno 27] File too large\n"
    assert [*tmp_path.iterdir()] == []


def test_a_token_is_new_and_for_its_owner_alone_and_replaces_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "token"
    assert main(["token", str(file)]) == 0
    assert file.stat().st_mode & 0o777 == 0o600
    token = file.read_bytes()
    assert main(["token", str(file)]) == 2
    said = f"graftlab token: {file} already exists; use that token, or remove the file first\n"
    assert capsys.readouterr() == ("", said)
    assert file.read_bytes() == token


def test_without_a_command_the_help_is_shown_as_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 64
    out, said = capsys.readouterr()
    assert out == ""
    assert said.startswith("usage: graftlab [-h] COMMAND ...")
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    assert capsys.readouterr() == (said, "")


def test_an_option_of_no_command_is_refused_by_its_command_or_by_graftlab(capsys: pytest.CaptureFixture[str]) -> None:
    for words, prog in ((["doctor", "--foo"], "graftlab doctor"), (["--foo"], "graftlab")):
        with pytest.raises(SystemExit):
            main(words)
        last = capsys.readouterr().err.splitlines()[-1]
        assert last == f"{prog}: error: unrecognized arguments: --foo"


def test_only_the_command_that_attaches_a_script_joins_as_the_environment_asks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[str] = []
    monkeypatch.setattr(attach, "forget_first_tap", lambda: done.append("forgotten"))
    monkeypatch.setattr(doctor, "findings", list)
    monkeypatch.setattr(commands, "attach_script", lambda arguments: done.append(arguments.script) or 3)
    assert main(["attach", "a.py"]) == 3
    assert main(["doctor"]) == 0
    assert done == ["a.py", "forgotten"]


def test_runs_are_listed_and_removed_with_the_budgets_that_are_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[object] = []
    monkeypatch.setenv("GRAFTLAB_HOME", str(tmp_path))
    monkeypatch.setattr(past_runs, "runs_text", lambda runs: f"text of {runs}")
    monkeypatch.setattr(past_runs, "find_runs", lambda folder: asked.append(folder) or "those left")
    monkeypatch.setattr(past_runs, "prune", lambda *given: asked.append(given) or "those removed")
    assert main(["runs"]) == 0
    assert main(["runs", "there"]) == 0
    assert main(["runs", "--prune", "--gib", "2", "--days", "3", "there"]) == 0
    assert main(["runs", "--prune"]) == 0
    there = Path("there")
    home = tmp_path / "runs"
    assert asked == [home, there, (there, 2.0, 3.0), there, (None, None, None), home]
    listed, pruned = "text of those left\n", "removed:\ntext of those removed\n\nleft:\ntext of those left\n"
    assert capsys.readouterr() == (listed * 2 + pruned * 2, "")

    def refuse(*given: object) -> None:
        raise SessionError("a budget is above 0")

    monkeypatch.setattr(past_runs, "prune", refuse)
    assert main(["runs", "--prune"]) == 2
    assert capsys.readouterr() == ("", "graftlab runs: a budget is above 0\n")
