"""The default limits are the same in every place that accepts others."""

from __future__ import annotations

import dataclasses
import inspect

import graftlab as gl
from graftlab.base import limits
from graftlab.magics.command_line import COMMANDS
from graftlab.ranks.options import LaunchOptions


def test_help_of_launch_shows_the_actual_limits() -> None:
    shown = inspect.signature(gl.launch).parameters
    for option in dataclasses.fields(LaunchOptions)[2:]:
        assert shown[option.name].default == option.default, option.name
    assert shown["timeout"].default == limits.TIMEOUT
    assert shown["buffer_budget"].default == limits.BUFFER_BUDGET
    assert shown["keep_budget"].default == limits.KEEP_BUDGET
    assert f"= {limits.TIMEOUT}" in str(inspect.signature(gl.launch))


def test_the_magic_has_the_same_limits() -> None:
    up = COMMANDS["up"].parser
    assert up.get_default("timeout") == limits.TIMEOUT
    assert f"(default {limits.TIMEOUT:g})" in up.format_help()
    assert up.get_default("start_method") == LaunchOptions(1, 1).start_method
