"""Numbers that pages and help texts state are those of the code: limits, time limits, exit codes and defaults."""

from __future__ import annotations

import argparse
import importlib
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from kit.command_options import options_of_commands

import graftlab as gl
from graftlab import control, judging
from graftlab.magics.magics import _cluster_of

DOCS = Path(__file__).resolve().parents[1] / "docs"
MIB = 1 << 20

# A page, what it states, and the constants of the code that make it true.
STATED: list[tuple[str, str, dict[str, Any]]] = [
    ("compare", "| 64 |", {"comparison.sides.WRONG_USAGE": 64}),
    ("compare", "| 70 |", {"comparison.command._FAILED": 70}),
    ("compare", "| 130 |", {"comparison.command._INTERRUPTED": 130}),
    ("compare", "and at least ten seconds", {"comparison.scripts._LOOK_AT_RESULTS": 10.0}),
    ("compare", "up to 32 MiB", {"ranks.held_call._WRITTEN_BUDGET": 32 * MIB}),
    ("compare", "A list of 16 or more numbers is compared as one", {"diffs.results._LEAST_NUMBERS": 16}),
    ("compare", "for at most 1,024 items", {"ranks.held_call._MOST_ITEMS": 1024}),
    ("compare", "takes about seven runs", {"comparison.started_scripts.EXPECTED_STARTS": 7}),
    ("compare", "the number of starts, at most 100", {"comparison.started_scripts.MOST_STARTS": 100}),
    ("compare", "says so after half a minute", {"comparison.command._LONG": 30.0}),
    ("compare", "ends with an error after ten minutes", {"comparison.functions._SCRIPT_TIMEOUT": 600.0}),
    ("compare", "names no more than ten times what rounding had", {"comparison.inherited_rounding._MOST": 10.0}),
    ("compare", "few gradients of 16 bits differ by at most three times their", {"comparison.gradients._LITTLE": 3.0}),
    ("compare", "the baseline's update from them, to 1 % of the update", {"comparison.held_updates._OF_UPDATE": 0.01}),
    ("compare", "returns fewer than 256 whole numbers", {"grafting.unseen_choices._MOST_RETURNED": 256}),
    ("verdict", "adds more than 5 times its floor", {}),
    ("verdict", "adds more than 4 times the median", {"verdict.rounds_differently._MEDIANS": 4.0}),
    ("verdict", "adds more than twice what such outputs add", {"verdict.quantised_modules._TIMES": 2.0}),
    ("verdict", "more than four times the rounding of its weights", {"verdict.quantised_modules._SIGMAS": 4.0}),
    ("verdict", "is named from 1 % on", {"verdict.quantised_modules._FACTOR": 0.01}),
    ("verdict", "with a factor named from 5 % on", {"verdict.quantised_modules._FACTOR_OF_PACKED": 0.05}),
    ("verdict", "with three lines around them", {"verdict.source_view.AROUND": 3}),
    ("verdict", "up to three lines of each side", {"verdict.lines.MOST_LINES": 3}),
    ("verdict", "at least three quarters of the weights' gradients", {"verdict.gradient_scaling._MOST_OF_ALL": 0.75}),
    (
        "verdict",
        "takes at least four calls, or six steps of a job",
        {"verdict.misaligned_steps._FEWEST_CALLS": 4, "verdict.misaligned_steps.ENOUGH_STEPS": 6},
    ),
    ("rows", "none arrives for half a second", {"rows.moving._QUIET": 0.5}),
    ("rows", "when the log reaches 32 MiB", {"rows.moving.MUCH": 32 * MIB}),
    ("sessions", "60 by default", {"base.limits.TIMEOUT": 60.0}),
    (
        "sessions",
        "that the plan keeps; 256 MiB each",
        {"base.limits.BUFFER_BUDGET": 256 * MIB, "base.limits.KEEP_BUDGET": 256 * MIB},
    ),
    ("sessions", "keeps its first and its last 8 MiB", {"ranks.streams._KEPT": 8 * MIB}),
    ("sessions", "removes those older than 30 days", {"control.past_runs._DAYS": 30.0}),
    ("sessions", "while all together exceed 10 GiB", {"control.past_runs._GIB": 10.0}),
    ("attach", "a vanished machine after 20 seconds", {"exchange.tcp.PING_TIMEOUT": 20.0}),
    ("ray", "the notebook waits one second, for all ranks", {"remote.remote_rank_handle._END_LIMIT": 1.0}),
    ("scale", "A session has at most 512 ranks", {"base.world.MAX_RANKS": 512}),
    ("architecture", "if an interrupt has not freed it after 1.5 seconds", {"control.runs._GRACE": 1.5}),
]


@pytest.mark.parametrize(("on", "stated", "constants"), STATED, ids=[f"{on}: {stated}" for on, stated, _ in STATED])
def test_a_number_that_a_page_states_is_the_number_in_the_code(on: str, stated: str, constants: dict[str, Any]) -> None:
    text = " ".join((DOCS / f"{on}.md").read_text(encoding="utf-8").split())
    assert stated in text
    for path, value in constants.items():
        module, _, name = path.rpartition(".")
        assert getattr(importlib.import_module(f"graftlab.{module}"), name) == value, path


def test_the_default_that_a_help_text_states_is_the_default_of_the_option() -> None:
    checked = 0
    for name, action in options_of_commands():
        text = (action.help or "") % {**vars(action), "prog": ""} if action.help else ""
        for stated in re.findall(r"\(default:? \"?([\w./-]*)\"?\)", text):
            if action.default is None:
                # What is measured, found or chosen later is no number here; only this one is of what it makes.
                if re.fullmatch(r"[\d.]+", stated):
                    cluster = _cluster_of(argparse.Namespace(on="ray:auto", gpus_per_rank=None))
                    assert cluster is not None
                    assert (action.dest, {"GPU": float(stated)}) == ("gpus_per_rank", cluster.resources)
                continue
            default = f"{action.default:g}" if isinstance(action.default, float) else str(action.default)
            assert stated == default, (name, action.dest, text)
            checked += 1
    assert checked > 15


def test_the_commands_have_the_defaults_of_the_functions_that_they_call() -> None:
    options = {(name, action.dest): action.default for name, action in options_of_commands()}
    functions = {
        "graftlab compare": gl.compare,
        "%graft verdict": gl.Session.verdict,
        "%graft compiled": gl.Session.compare_compiled,
        "%graft replay": gl.Session.replay,
        "%graft lines": gl.Session.lines,
        "%graft check": gl.Session.check,
        "%graft up": gl.launch,
        "%graft listen": gl.listen,
    }
    checked = set()
    for name, function in functions.items():
        for parameter in inspect.signature(function).parameters.values():
            of_command = options.get((name, parameter.name))
            are_numbers = isinstance(of_command, (int, float)) and isinstance(parameter.default, (int, float))
            # A script may take longer to reach its first call than functions take.
            if are_numbers and (name, parameter.name) != ("graftlab compare", "timeout"):
                assert of_command == parameter.default, (name, parameter.name)
                checked.add((name, parameter.name))
    assert ("graftlab compare", "threshold") in checked
    assert len(checked) > 8


def functions_of_methods() -> Iterator[tuple[str, Any, Any]]:
    """Functions whose docstring refers to the method of a session that calls them, with that method."""
    for room in (control, judging):
        for module in pkgutil.iter_modules(room.__path__, f"{room.__name__}."):
            for name, function in inspect.getmembers(importlib.import_module(module.name), inspect.isfunction):
                found = re.match(r"See :meth:`graftlab\.session\.Session\.(\w+)`", function.__doc__ or "")
                if found and function.__module__ == module.name:
                    yield f"{module.name}.{name}", function, getattr(gl.Session, found[1])


def test_what_a_method_calls_has_the_defaults_of_the_method() -> None:
    checked = 0
    for name, function, method in functions_of_methods():
        theirs = inspect.signature(method).parameters
        for parameter in inspect.signature(function).parameters.values():
            if parameter.default is not parameter.empty and parameter.name in theirs:
                assert parameter.default == theirs[parameter.name].default, (name, parameter.name)
                checked += 1
    assert checked > 3
