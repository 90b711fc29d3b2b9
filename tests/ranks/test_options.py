"""The default limits are the same in every place that accepts others."""

from __future__ import annotations

import dataclasses
import inspect
import sys
from types import SimpleNamespace
from typing import Any

import pytest

import graftlab as gl
from graftlab.base import limits
from graftlab.base.world import MAX_RANKS
from graftlab.errors import LaunchError
from graftlab.magics.subcommands import COMMANDS
from graftlab.ranks import launcher
from graftlab.ranks.launcher import _environment
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


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan"), float("inf"), "5", None])
@pytest.mark.parametrize("option", ["timeout", "tap_timeout"])
def test_a_limit_that_is_no_number_of_seconds_is_refused(option: str, seconds: Any) -> None:
    if option == "tap_timeout" and seconds is None:
        assert LaunchOptions(1, 1, timeout=7.0).tap_limit > 0
        return
    with pytest.raises(LaunchError, match=f"{option}="):
        LaunchOptions(1, 1, **{option: seconds})


def test_numbers_of_ranks_rows_and_bytes_are_checked() -> None:
    for given, said in (
        ({"baseline": 0}, "baseline=0: each side needs"),
        ({"target": 1.5}, "target=1.5: each side needs"),
        ({"baseline": MAX_RANKS}, f"baseline={MAX_RANKS}, target=1: a graft world has at most {MAX_RANKS} ranks, both"),
        ({"start_method": "fork"}, "start_method='fork'"),
        ({"buffer_budget": -1}, "buffer_budget=-1: give whole bytes"),
        ({"keep_budget": 1.5}, "keep_budget=1.5: give whole bytes"),
        ({"keep_rows": -1}, "keep_rows=-1"),
        ({"keep_rows": 0.5}, "keep_rows=0.5"),
    ):
        with pytest.raises(LaunchError, match=said):
            LaunchOptions(**{"baseline": 1, "target": 1, **given})  # type: ignore[arg-type]
    assert LaunchOptions(1, MAX_RANKS - 1).target == MAX_RANKS - 1
    assert LaunchOptions(1, 1, timeout=7.0).tap_limit == 3.5
    assert LaunchOptions(1, 1, timeout=7.0, tap_timeout=9.0).tap_limit == 9.0
    assert LaunchOptions(1, 1, buffer_budget=0, keep_budget=0, keep_rows=0).tap_limit == LaunchOptions(1, 1).tap_limit


def test_collectives_of_ranks_stay_on_this_machine_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
    for name in names:
        monkeypatch.delenv(name, raising=False)
    assert {_environment()[name] for name in names} == {"lo" if sys.platform.startswith("linux") else "lo0"}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth0")
    assert _environment()["NCCL_SOCKET_IFNAME"] == "eth0"


class Ending:
    """A rank that ends within ``needs`` seconds, or never."""

    def __init__(self, clock: list[float], done: list[str], name: str, needs: float) -> None:
        self.channel = SimpleNamespace(send=lambda message: done.append(f"asked {name}"))
        self.alive = True
        self._clock, self._done, self._name, self._needs = clock, done, name, needs

    def join(self, timeout: float) -> bool:
        self._done.append(f"joined {self._name} for {timeout:g}")
        self._clock[0] += min(timeout, self._needs)
        return self._needs <= timeout

    def kill(self) -> None:
        self._done.append(f"killed {self._name}")


def test_ranks_share_the_time_to_end_and_all_that_are_left_are_killed_first(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, done = [100.0], list[str]()
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    ranks: Any = [Ending(clock, done, name, needs) for name, needs in (("a", 0.5), ("b", 9.0), ("c", 1.0), ("d", 0.0))]
    launcher.end_ranks(ranks, patience=2.0)
    assert done[:4] == ["asked a", "asked b", "asked c", "asked d"]
    assert done[4:8] == ["joined a for 2", "joined b for 1.5", "joined c for 0", "joined d for 0"]
    assert done[8:] == ["killed b", "killed c", "joined b for 5", "joined c for 5"]
    assert not any(rank.alive for rank in ranks)


def test_a_stop_while_ranks_end_leaves_none_alive() -> None:
    killed: list[str] = []

    class Stopped(Ending):
        def join(self, timeout: float) -> bool:
            raise KeyboardInterrupt

        def kill(self) -> None:
            killed.append(self._name)

    ranks: Any = [Stopped([0.0], [], name, 0.0) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        launcher.end_ranks(ranks)
    assert killed == ["a", "b"]
