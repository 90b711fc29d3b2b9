"""The sides of a comparison on the command line: a function in a file, a script or a command."""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import re
import shlex
import shutil
import sys
import tokenize
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from graftlab.base import sources
from graftlab.errors import ConfigError

# A job that attaches imports this module for the arguments of commands, and must not import the comparison.
if TYPE_CHECKING:
    from graftlab.jobs.script_process import ScriptCommand
    from graftlab.ranks.held_functions import FunctionInFile

# The exit code for wrong usage of a command.
WRONG_USAGE = 64
Kind = Literal["functions", "recording", "scripts"]

_FUNCTION = re.compile(r"(?P<path>.+\.py):(?P<name>[A-Za-z_][\w.]*)")
# A file that uses one of these may define names that its text does not show.
_MAY_DEFINE = ("globals", "vars", "exec", "setattr")
_VARIABLE = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.*)", re.DOTALL)
# A word of a command as typed, with its quotes.
_WORD = re.compile(r"""(?:'[^']*'|"(?:\\.|[^"\\])*"|\\.|[^\s'"\\])+""", re.DOTALL)
# Unquoted words with which a shell joins commands or redirects them.
_FOR_A_SHELL = re.compile(r"(?:.*[^\\\\])?;|&&?|\|[|&]?|\d*(?:<|>>?)(?:&\d)?|(?:\d*|&)>>?[\w./~-]*", re.DOTALL)


def names_function(text: str) -> bool:
    """Whether a side is written as ``FILE.py:FUNCTION``.

    >>> names_function("port.py:load_model"), names_function("port.py")
    (True, False)
    """
    return _FUNCTION.fullmatch(text) is not None


def kind_of_sides(baseline: str, target: str) -> Kind:
    """The kind of two sides: functions, a folder of recorded values and a function, or scripts.

    Raises :class:`ConfigError` for two sides that cannot be compared.
    """
    if Path(target).is_dir():
        raise ConfigError(f"TARGET {target} is a folder; a recording computes nothing, so give it as BASELINE")
    if Path(baseline).is_dir():
        if names_function(target):
            return "recording"
        raise ConfigError(
            f"BASELINE {baseline} is a folder of recorded values, and a script may call its model with other "
            "inputs; give TARGET as FILE.py:FUNCTION, a function that returns the model, with --inputs"
        )
    functions = [names_function(side) for side in (baseline, target)]
    if any(functions) and not all(functions):
        raise ConfigError(
            "one side is a function and the other a script; give two scripts, or two functions as FILE.py:FUNCTION"
        )
    return "functions" if all(functions) else "scripts"


def function_in_file(text: str) -> FunctionInFile:
    """The function that a text ``FILE.py:FUNCTION`` names. Raises :class:`ConfigError` if the file cannot define it."""
    from graftlab.ranks.held_functions import FunctionInFile

    found = _FUNCTION.fullmatch(text)
    if found is None:
        raise ConfigError(f"{text!r} names no function; write FILE.py:FUNCTION")
    path = Path(found["path"]).expanduser()
    if not path.is_file():
        raise ConfigError(f"{path} does not exist; give its path from {os.getcwd()}, or an absolute one")
    _check_defined(path, found["name"])
    return FunctionInFile(str(path.resolve()), found["name"])


def _check_defined(path: Path, name: str) -> None:
    """Raise :class:`ConfigError` unless the file may define or import the name. The file is read, not executed."""
    try:
        with tokenize.open(path) as file:  # as Python reads it: the file may name its encoding
            tree = sources.parse(file.read(), str(path))
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{path} is not valid Python: {error}; fix it first") from error
    known: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            known.add(node.name)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            known.update(alias.asname or alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            known.add(node.id)
        elif isinstance(node, ast.Name) and node.id in _MAY_DEFINE:
            return
    name = name.partition(".")[0]
    if name in known or known & {"*", "__getattr__"}:
        return
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]}?" if near else f"it defines {', '.join(sorted(known)[:8]) or 'nothing'}"
    raise ConfigError(f"{path.name} does not define {name}; {hint}")


def command_of(text: str, ranks: int | None) -> ScriptCommand:
    """The command of a side; a script runs in the Python of this process. ``ranks`` is read from it if it is None.

    A program that is not on ``PATH``, such as ``torchrun``, is the one beside this Python. ``cd FOLDER &&`` in front
    sets the folder; any other text that needs a shell, such as one with a pipe, runs in one.

    Raises :class:`ConfigError` if the text is not a command, or its program, script or folder does not exist.
    """
    from graftlab.jobs.script_process import ScriptCommand

    if text.endswith(".py") and os.path.isfile(text):
        return ScriptCommand((sys.executable, text), 1 if ranks is None else ranks, variables={})
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{text!r} is not a command: {error}") from error
    typed = list(_WORD.finditer(text))
    folder = None
    if len(typed) > 2 and typed[0][0] == "cd" and typed[2][0] == "&&":
        folder = os.path.expanduser(words[1])
        if not os.path.isdir(folder):
            raise ConfigError(
                f"the folder {folder} does not exist; give its path from {os.getcwd()}, or an absolute one"
            )
        typed, words = typed[3:], words[3:]
    variables: dict[str, str] = {}
    if words[:1] == ["env"] and not (len(words) > 1 and words[1].startswith("-")):
        typed, words = typed[1:], words[1:]
    while words and (given := _VARIABLE.fullmatch(words[0])):
        variables[given["name"]] = given["value"]
        typed, words = typed[1:], words[1:]
    if not words:
        raise ConfigError("a side is empty; give a script, a command in quotes, or FILE.py:FUNCTION")
    if ranks is None:
        ranks = ranks_of_command(words)
    if any(_FOR_A_SHELL.fullmatch(word[0]) for word in typed):
        # In a shell only where it is needed, because PYTHONPATH set there hides graftlab from the script.
        # With the exit code of a script that fails before a pipe.
        shell = [bash, "-o", "pipefail"] if (bash := shutil.which("bash")) else ["sh"]
        words = [*shell, "-c", text[typed[0].start() :]]
    if words[0].endswith(".py"):
        if not os.path.isfile(os.path.join(folder or "", words[0])):
            base = os.path.abspath(folder or "")
            raise ConfigError(f"{words[0]} does not exist; give its path from {base}, or an absolute one")
        words.insert(0, sys.executable)
    return ScriptCommand((_program(words[0], variables), *words[1:]), ranks, folder, variables)


def _program(name: str, variables: Mapping[str, str]) -> str:
    """A program as it is started: by its name if it is on ``PATH``, or the one beside this Python."""
    if os.path.basename(name) != name or shutil.which(name, path=variables.get("PATH", os.environ.get("PATH"))):
        return name
    beside = os.path.join(os.path.dirname(sys.executable), name)
    if os.path.isfile(beside):
        return beside
    raise ConfigError(f"no program {name} is on PATH or in {os.path.dirname(sys.executable)}; give its path")


_COUNTS = {
    "torchrun": ("--nproc-per-node", "--nproc_per_node"),
    "torch.distributed.run": ("--nproc-per-node", "--nproc_per_node"),
    "torch.distributed.launch": ("--nproc-per-node", "--nproc_per_node"),
    "accelerate": ("--num_processes", "--num-processes"),
    "mpirun": ("-n", "-np"),
    "mpiexec": ("-n", "-np"),
}


def ranks_of_command(words: Sequence[str]) -> int:
    """The number of ranks that a command starts, by its launcher's option; 1 without a launcher.

    Raises :class:`ConfigError` if the option is not a number.

    >>> ranks_of_command(["torchrun", "--nproc-per-node", "2", "train.py"])
    2
    """
    options = next((_COUNTS[name] for word in words if (name := os.path.basename(word)) in _COUNTS), ())
    for place, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in options:
            count = value if equals else (words[place + 1] if place + 1 < len(words) else "")
            if not count.isdecimal():
                raise ConfigError(f"{name} {count}: the number of ranks is not known; give --ranks B,T")
            return int(count)
    return 1


def refuse_wrong_usage(parser: argparse.ArgumentParser) -> None:
    """Let a parser end the process with :data:`WRONG_USAGE`, because argparse's 2 has a different meaning here."""

    def refuse(message: str) -> NoReturn:
        parser.exit(WRONG_USAGE, f"{parser.prog}: {message}; `{parser.prog} -h` shows the usage\n")

    parser.error = refuse  # type: ignore[method-assign]
