"""The command line of ``%graft``, without a kernel: expressions, options, and which kinds of plot take which."""

from __future__ import annotations

from pathlib import Path

import pytest
from IPython.core.error import UsageError

from graftlab.control.session_plots import SessionPlots
from graftlab.magics import command_line
from graftlab.magics.command_line import COMMANDS, PLOT_KINDS
from graftlab.magics.magics import GraftMagics

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("filter --b2t layer == -1", {"b2t": "layer == -1"}),
        ("filter --b2t 'layer == 1'", {"b2t": "layer == 1"}),
        (r'filter --b2t "name == \"a\""', {"b2t": 'name == "a"'}),
        ("filter --b2t 'a' == 'b'", {"b2t": "'a' == 'b'"}),
        ("filter --b2t name == 'x --keep y' --keep step", {"b2t": "name == 'x --keep y'", "keep": "step"}),
        ("filter --b2t=a --t2b = b --compare ''", {"b2t": "a", "t2b": "b", "compare": ""}),
        ("filter --b2t search(r'\\d+\\.out', name)", {"b2t": r"search(r'\d+\.out', name)"}),
    ],
)
def test_filter_expressions_are_taken_unchanged(line: str, expected: dict[str, str]) -> None:
    name, arguments = command_line.parse(line)
    assert name == "filter"
    assert {key: text for key, text in vars(arguments).items() if text is not None} == expected


def test_a_rename_without_a_replacement_deletes_what_it_finds() -> None:
    name, arguments = command_line.parse(r"rename target '^model\.'")
    assert name == "rename"
    assert (arguments.side, arguments.pattern, arguments.replacement, arguments.clear) == (
        "target",
        r"^model\.",
        "",
        False,
    )


@pytest.mark.parametrize(
    ("line", "out", "expression"),
    [
        ("run f(x)", None, "f(x)"),
        ("run -o r f(x)", "r", "f(x)"),
        ("run --out=r f(x)", "r", "f(x)"),
        ("run f(x) -o r", "r", "f(x)"),
        ("run x -other", None, "x -other"),
        ("run -x", None, "-x"),
        ("run '-o' + x", None, "'-o' + x"),
    ],
)
def test_run_expressions_are_taken_unchanged(line: str, out: str | None, expression: str) -> None:
    _, arguments = command_line.parse(line)
    assert (arguments.out, arguments.expression) == (out, expression)


def test_a_line_may_end_with_a_comment() -> None:
    _, arguments = command_line.parse("up -b 2  # two of them")
    assert (arguments.baseline, arguments.target) == (2, 1)


def test_no_line_exits_the_process() -> None:
    with pytest.raises(UsageError, match="usage: %graft up"):
        command_line.parse("up --no-such-option")
    with pytest.raises(command_line.HelpRequest, match="usage: %graft up"):
        command_line.parse("up -h")


@pytest.mark.parametrize("name", [name for name, command in COMMANDS.items() if command.raw in ("EXPR", "[EXPR]")])
def test_every_option_may_stand_before_an_expression(name: str) -> None:
    actions = [action for action in COMMANDS[name].parser._actions if action.dest != "help"]
    for action in actions:
        for option in action.option_strings:
            word = action.choices[0] if action.choices else "word"
            given = option if action.nargs == 0 else f"{option} {word}"
            _, arguments = command_line.parse(f"{name} {given} -x")
            assert arguments.expression == "-x"
            assert getattr(arguments, action.dest) in (True, word)


# ---- kinds of plot --------------------------------------------------------------------------------------------------


def test_every_figure_of_a_session_is_a_kind_of_plot() -> None:
    figures = {name for name, value in vars(SessionPlots).items() if callable(value) and name[0] != "_"}
    # That of a verdict has an option, --verdict.
    assert figures == {*PLOT_KINDS, "verdict"}


@pytest.mark.parametrize("document", ["magics.md", "plots.md"])
def test_the_pages_name_every_kind_of_plot(document: str) -> None:
    text = (DOCS / document).read_text()
    assert [kind for kind in PLOT_KINDS if f"`{kind}`" not in text] == []


@pytest.mark.parametrize(
    ("line", "kind"),
    [
        ("plot", "divergence"),
        ("plot --noise-floor 0", "divergence"),
        ("plot --step 3 --noise-floor 1", "divergence"),
        ("plot --steps all --noise-floor 1", "over_steps"),
        ("plot hidden", "history"),
        ("plot hidden --kind ranks", "ranks"),
    ],
)
def test_the_kind_of_plot_follows_from_the_arguments(line: str, kind: str) -> None:
    assert command_line.parse(line)[1].kind == kind


@pytest.mark.parametrize("kind", PLOT_KINDS)
@pytest.mark.parametrize(
    ("argument", "given"),
    [("TAP", "hidden"), ("--step", "--step 0"), ("--steps", "--steps 0:2"), ("--noise-floor", "--noise-floor 0.0")],
)
def test_a_kind_of_plot_refuses_arguments_that_it_does_not_take(kind: str, argument: str, given: str) -> None:
    tap = "hidden" if "TAP" in PLOT_KINDS[kind] and argument != "TAP" else ""
    line = f"plot {tap} --kind {kind} {given}"
    if argument in PLOT_KINDS[kind]:
        assert command_line.parse(line)[1].kind == kind
        return
    with pytest.raises(UsageError, match=f"{argument} goes with the kinds .*, not with {kind}"):
        command_line.parse(line)


def test_a_noise_floor_for_one_tap_is_refused() -> None:
    with pytest.raises(UsageError, match="--noise-floor goes with the kinds divergence, over_steps, not with history"):
        command_line.parse("plot hidden --noise-floor 1e-5")


def test_the_overview_and_the_magics_help_list_each_command_once_in_its_group() -> None:
    overview = command_line.overview()
    assert sorted(name for names in command_line.GROUPS.values() for name in names) == sorted(command_line.COMMANDS)
    for name in command_line.COMMANDS:
        assert overview.count(f"  %graft {name} ") == 1
    assert overview.index("Compare:") < overview.index("%graft verdict") < overview.index("The plan:")
    assert overview in (GraftMagics.graft.__doc__ or "")
