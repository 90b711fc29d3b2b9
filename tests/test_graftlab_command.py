"""Each command of the terminal and of the notebook explains its arguments, and names the defaults that it has."""

from __future__ import annotations

import argparse
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from graftlab.__main__ import main
from graftlab.engine import serve
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
