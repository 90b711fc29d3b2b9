"""``attach``, and the first tap of a job that was to join: what joins, what warns, and what is refused."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.refusals import exactly

from graftlab.config import GraftConfig
from graftlab.errors import ConfigError, GraftWarning, LayoutError, SessionError
from graftlab.grafting import active
from graftlab.jobs import attach as attaching
from graftlab.taps import calls


class Joining:
    """What stands for a rank that joins: it fails where the test wants it to."""

    def __init__(self) -> None:
        self.configs: list[GraftConfig] = []
        self.meshes: list[Any] = []
        self.began = 0
        self.failure: Exception | None = None

    def __call__(self, config: GraftConfig) -> Joining:
        self.configs.append(config)
        return self

    def begin(self) -> None:
        self.began += 1
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def joining(monkeypatch: pytest.MonkeyPatch) -> Iterator[Joining]:
    made = Joining()
    monkeypatch.setattr(attaching, "AttachedRank", made)
    monkeypatch.setattr(attaching, "give_mesh", made.meshes.append)
    yield made
    calls.deactivate()


def test_a_process_joins_with_its_config_or_that_of_its_environment(
    joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = GraftConfig(role="baseline", mesh="tp=1")
    assert attaching.attach(config)
    assert joining.configs == [config]
    monkeypatch.setenv("GRAFTLAB_ROLE", "target")
    assert attaching.attach(mesh="given")
    assert [each.role for each in joining.configs] == ["baseline", "target"]
    attaching.attach(config, mesh="given")
    assert joining.meshes == ["tp=1", "given", "given"]
    assert joining.began == 3
    monkeypatch.setattr(active, "grafter", lambda: object())
    with pytest.raises(SessionError, match=exactly("this process is a rank already; gl.here() shows which")):
        attaching.attach(config)
    assert joining.began == 3


@pytest.mark.parametrize("failure", [SessionError("no session answers"), OSError("no space"), EOFError("cut")])
def test_a_job_that_cannot_join_continues_without_its_taps(joining: Joining, failure: Exception) -> None:
    attaching.arm()
    joining.failure = failure
    with pytest.warns(GraftWarning, match=f"could not join, and the job continues without it: {failure}"):
        assert attaching.attach(GraftConfig()) is False
    # Its next tap would try again, and wait again.
    assert not attaching.is_armed()


def test_wrong_settings_and_faults_are_raised(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    for failure in (ConfigError("timeout is -1"), RuntimeError("a fault of graftlab")):
        joining.failure = failure
        with pytest.raises(type(failure), match=str(failure)):
            attaching.attach(GraftConfig())

    def refuse(mesh: object) -> None:
        raise LayoutError("no axis has that name")

    monkeypatch.setattr(attaching, "give_mesh", refuse)
    with pytest.raises(ConfigError, match="mesh: no axis has that name"):
        attaching.attach(GraftConfig())


def test_the_first_tap_joins_once_and_in_no_data_loader(joining: Joining, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: SimpleNamespace(id=0))
    attaching.arm()
    assert attaching.FirstTapJoiner().begin() is None
    assert not attaching.is_armed()
    assert joining.began == 0
    monkeypatch.setattr(torch.utils.data, "get_worker_info", lambda: None)
    assert attaching.FirstTapJoiner().begin() is None
    assert joining.began == 1
    joined = object()
    monkeypatch.setattr(active, "grafter", lambda: joined)
    assert attaching.FirstTapJoiner().begin() is joined
    assert joining.began == 1


@pytest.mark.parametrize("by_another_thread", [True, False])
def test_a_first_tap_that_another_thread_forestalls_is_no_mistake(
    by_another_thread: bool, joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[Any] = [None]
    monkeypatch.setattr(active, "grafter", lambda: found[0])

    def refuse() -> bool:
        found[0] = "the other thread's" if by_another_thread else None
        raise SessionError("this process is a rank already")

    monkeypatch.setattr(attaching, "attach", refuse)
    if by_another_thread:
        assert attaching.FirstTapJoiner().begin() == "the other thread's"
    else:
        with pytest.raises(SessionError):
            attaching.FirstTapJoiner().begin()


@pytest.mark.parametrize(("started", "named"), [("/somewhere/train.py", "train.py"), ("", "this process")])
def test_an_armed_process_that_ends_without_a_tap_warns_once(
    started: str, named: str, joining: Joining, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_exit: list[Any] = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    monkeypatch.setattr(sys, "argv", [started, "--epochs", "/3"])
    attaching.arm()
    [(warns, process)] = at_exit
    assert process == os.getpid()
    with pytest.warns(GraftWarning, match=rf"^{named} ended before it reached a tap"):
        warns(process)
    assert not attaching.is_armed()
    warns(process)
