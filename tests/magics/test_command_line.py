"""The command line of ``%graft``, without a kernel: expressions, options, and which kinds of plot take which."""

from __future__ import annotations

from pathlib import Path

import pytest
from IPython.core.error import UsageError
from kit.refusals import exactly

from graftlab.control.session_plots import SessionPlots
from graftlab.magics import command_line
from graftlab.magics.magics import GraftMagics
from graftlab.magics.subcommands import COMMANDS, PLOT_KINDS, HelpRequest, overview

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


SHORTEST = {
    "up": {
        **{"baseline": 1, "target": 1, "device": None, "backend": None, "timeout": 60.0, "start_method": "forkserver"},
        **{"out": "session", "keep_rows": None, "on": None, "gpus_per_rank": None, "replace": False},
    },
    "listen": {
        **{"baseline": 1, "target": 1, "folder": None, "append": False, "address": None, "timeout": 60.0},
        **{"keep_rows": None, "out": "session"},
    },
    "debug": {"rank": None, "command": ""},
    "log": {"rank": "both", "lines": 50},
    "verdict": {"out": None, "expression": ""},
    "compiled x": {"out": None, "backend": None, "grad_mode": None, "fullgraph": False, "expression": "x"},
    "replay FILE": {
        **{"file": "FILE", "baseline": "generate", "target": "generate", "batch_size": 1, "limit": None, "out": None},
    },
    "filter": {"b2t": None, "t2b": None, "compare": None, "keep": None},
    "transform default": {"name": "default", "where": None},
    "rename": {"side": None, "pattern": None, "replacement": "", "clear": False},
    "frame": {"all": False, "out": None},
    "plot": {
        **{"tap": None, "kind": "divergence", "verdict": False, "step": None, "steps": None, "noise_floor": None},
        **{"tags": None, "dims": None},
    },
    "report": {"file": "report.html", "tensors": False},
}


@pytest.mark.parametrize("line", SHORTEST)
def test_the_shortest_line_of_a_command_has_its_defaults(line: str) -> None:
    _, arguments = command_line.parse(line)
    assert vars(arguments) == SHORTEST[line]


@pytest.mark.parametrize("name", ["status", "stacks", "interrupt", "restart", "down", "undo", "redo", "ui"])
def test_other_commands_take_no_argument(name: str) -> None:
    assert vars(command_line.parse(name)[1]) == {}


@pytest.mark.parametrize("name", ["run", "compare", "check", "compiled"])
def test_commands_that_evaluate_ask_for_an_expression(name: str) -> None:
    with pytest.raises(UsageError, match=f"give an expression, such as `%graft {name} forward"):
        command_line.parse(name)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("up --timeout 0", "expected a number of seconds above 0, not '0'"),
        ("up --timeout inf", "above 0, not 'inf'"),
        ("up --timeout x", "above 0, not 'x'"),
        ("up --gpus-per-rank -1", "expected a number of at least 0, not '-1'"),
        ("up --gpus-per-rank inf", "at least 0, not 'inf'"),
        ("up --on ray", "expected ray:auto, ray:HOST:PORT"),
        ("up --on ray:", "expected ray:auto"),
        ("up --on ray://", "expected ray:auto"),
        ("up -b 0", "of at least 1"),
        ("up -b two", "not 'two'"),
        ("up -t -1", "not '-1'"),
        ("up --start-method fork", "invalid choice: 'fork'"),
        ("up 3", "unrecognized arguments: 3"),
        ("status --all", "unrecognized arguments: --all"),
        ("log -n none", "not 'none'"),
        *[
            (f"plot out --verdict {more}", "--verdict takes a tap, and with it --dims, and no other option")
            for more in ("--steps 1:2", "--noise-floor 0.1", "--tags layer=3")
        ],
        ("run -o", "expected one argument"),
        ("run -o name", "give an expression"),
        ("run -o 1x 1", "'1x' is not a valid variable name"),
        ("run --out-file x 1", "unrecognized arguments: --out-file"),
        ("run f() --out", "--out takes the name of a variable"),
        ("filter name", "--b2t, --t2b, --compare, --keep"),
        ("filter --b2t --keep True", "--b2t needs an expression"),
        ("filter --only name", "unrecognized arguments: --only"),
        ("transform", "required: NAME"),
        ("frame --every", "unrecognized arguments: --every"),
        ("plot --kind pie", "invalid choice: 'pie'"),
        ("plot --noise-floor low", "expected a number of at least 0, not 'low'"),
        ("plot --noise-floor -1", "expected a number of at least 0, not '-1'"),
        ("nonsense", "%graft lists the commands"),
        ("up -o 3x", "'3x' is not a valid variable name"),
        ("up -o class", "'class' is not a valid variable name"),
        ("plot --steps 5", "expected steps A:B"),
        ("plot --steps a:", "expected steps A:B"),
        ("plot x --tags layer", "expected TAG=VALUE"),
        ("plot x --tags 1=2", "expected TAG=VALUE"),
        ("plot x --dims 1,2,3", "expected one or two dimensions"),
        ("plot x --dims a", "expected one or two dimensions"),
        ("plot --verdict --step 3", "takes a tap, and with it --dims, and no other option"),
        ("plot x --verdict --kind history", "and no other option"),
        ("plot --verdict --dims 0", "--verdict --dims: name a tap"),
        ("plot --kind history", "--kind history: name a tap"),
        ("report 'a", "%graft report: No closing quotation"),
        ("filter layer == 1 --b2t x", "before the expression 'layer == 1'"),
        ("filter --b2t", '--b2t needs an expression; "" matches nothing'),
        ("filter --b2t x --keep", "--keep needs an expression"),
        ("transform f --where", "--where needs a filter"),
        ("baseline", "write %%graft baseline, with two %"),
        ("target[1]", r"write %%graft target\[1\], with two %"),
        ("statsu", "unknown command 'statsu'; did you mean 'status'"),
        ("launch", "unknown command 'launch'; did you mean 'up'"),
    ],
)
def test_a_wrong_line_is_refused_with_what_was_expected(line: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        command_line.parse(line)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("up --on ray:auto --gpus-per-rank 0", {"on": "auto", "gpus_per_rank": 0.0}),
        ("up --on ray:host:6379", {"on": "host:6379"}),
        ("up --on ray://host:1", {"on": "ray://host:1"}),
        ("plot --steps :100", {"steps": (None, 100)}),
        ("plot --steps 50:", {"steps": (50, None)}),
        ("plot --steps all", {"steps": (None, None)}),
        ("plot x --tags layer=3 phase=decode on=True", {"tags": [("layer", 3), ("phase", "decode"), ("on", True)]}),
        ("plot x --dims 0,-1", {"dims": (0, -1), "kind": "heatmap"}),
        ("plot x --verdict --dims 2", {"dims": (2,), "verdict": True, "kind": None}),
        ("debug target[1] p x + 1", {"rank": "target[1]", "command": "p x + 1"}),
        ("transform 'a b' --where name == 'q'", {"name": "a b", "where": "name == 'q'"}),
        ("transform f --where='layer < 4'", {"name": "f", "where": "layer < 4"}),
    ],
)
def test_values_are_read_as_their_help_says(line: str, expected: dict[str, object]) -> None:
    given = vars(command_line.parse(line)[1])
    assert {name: given[name] for name in expected} == expected


@pytest.mark.parametrize("name", COMMANDS)
def test_every_subcommand_has_help_that_names_its_options(name: str) -> None:
    texts = []
    for line in (f"{name} -h", f"{name} --help", f"help {name}", f" help  {name} "):
        with pytest.raises(HelpRequest) as asked:
            command_line.parse(line)
        texts.append(asked.value.text)
    assert len({*texts}) == 1
    usage = texts[0].partition("\n\n")[0]
    actions = [action for action in COMMANDS[name].parser._actions if action.option_strings]
    assert [action.dest for action in actions if not any(each in usage for each in action.option_strings)] == []
    assert texts[0].startswith((f"usage: %graft {name}", f"usage: %%graft {name}"))
    assert [option for option in COMMANDS[name].options if option not in texts[0]] == []


def test_a_line_may_end_with_a_comment() -> None:
    _, arguments = command_line.parse("up -b 2  # two of them")
    assert (arguments.baseline, arguments.target) == (2, 1)


def test_no_line_exits_the_process() -> None:
    with pytest.raises(
        UsageError,
        match=exactly(
            "%graft up: unrecognized arguments: --no-such-option\nusage: %graft up [-h] [-b N] [-t N] "
            "[--device DEVICE] [--backend BACKEND]\n                 [--timeout SECONDS] [--start-method "
            "{forkserver,spawn}]\n                 [-o NAME] [--keep-rows N] [--on "
            "ray:ADDRESS]\n                 [--gpus-per-rank N] [--replace]\nsee `%graft up -h`"
        ),
    ):
        command_line.parse("up --no-such-option")
    with pytest.raises(HelpRequest, match="usage: %graft up"):
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
    with pytest.raises(
        UsageError,
        match=exactly("%graft plot: --noise-floor goes with the kinds divergence, over_steps, not with history"),
    ):
        command_line.parse("plot hidden --noise-floor 1e-5")


def test_the_overview_and_the_magics_help_list_each_command_once_in_its_group() -> None:
    text = overview()
    for name in COMMANDS:
        assert text.count(f"  %graft {name} ") == 1
    assert text.index("Compare:") < text.index("%graft verdict") < text.index("The plan:")
    assert text in (GraftMagics.graft.__doc__ or "")


def test_an_option_is_given_by_its_whole_name() -> None:
    """So that a new option cannot change what a saved notebook means."""
    assert command_line.parse("up --baseline 2")[1].baseline == 2
    with pytest.raises(UsageError, match="--base"):
        command_line.parse("up --base 2")
