"""The environment's settings watch the first model that is called, as they say, and no other."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.grafters import become_rank
from torch import Tensor, nn

from graftlab.config import GraftConfig
from graftlab.errors import ConfigError
from graftlab.grafting.tap_records import CallKey, CountingHandler
from graftlab.jobs import on_import
from graftlab.jobs.job_log import _WarningForwarder, log_to
from graftlab.jobs.on_import import watch_first_model
from graftlab.taps.routing import handled_by


class Lister(CountingHandler):
    """Lists the names of the taps that are reached."""

    def __init__(self) -> None:
        super().__init__()
        self.reached: list[str] = []

    def take(self, place: CallKey, tags: dict[str, Any], own: Tensor) -> None:
        self.reached.append(f"{place[0]}@{tags['kind']}" if "kind" in tags else place[0])


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor, *, scale: float | Tensor = 1.0) -> Tensor:
        twice = nn.functional.relu(self.linear(x)) * scale
        return twice + 1


def watched(monkeypatch: pytest.MonkeyPatch, settings: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The taps of the first call of the first model, and of what is called afterwards."""
    become_rank(monkeypatch, "target")
    model, other, x = Scaled(), Scaled(), torch.ones(1, 2, requires_grad=True)
    with handled_by(lister := Lister()):
        watch_first_model(GraftConfig(**settings))
        # A module without weights is no model.
        nn.MSELoss()(x, x)
        assert lister.reached == []
        model(x, scale=torch.tensor(2.0)).sum().backward()
        first = list(lister.reached)
        other(x)
        assert lister.reached == first
        model(x, scale=torch.tensor(3.0))
    return first, lister.reached[len(first) :]


@pytest.mark.parametrize(
    ("settings", "taps"),
    [
        ({"watch": "True"}, {"linear", "output"}),
        ({"watch_optimizer": True}, {"linear", "output"}),
        ({"watch": "name == 'linear'"}, {"linear"}),
        ({"watch_inputs": True}, {"linear", "output", "input.x@input", "input.scale@input"}),
        ({"watch_grads": True}, {"linear", "output", "linear@grad", "output@grad"}),
        ({"watch_functions": "relu, "}, {"linear", "output", "relu.out"}),
        ({"watch_inside": "output"}, {"linear", "output"}),
    ],
)
def test_the_first_model_is_watched_as_the_settings_say(
    settings: dict[str, Any], taps: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = watched(monkeypatch, settings)
    looked_at = {"linear", "output", "input.x@input", "input.scale@input", "linear@grad", "output@grad", "relu.out"}
    assert {*first} & looked_at == taps, first
    # Its next call is watched likewise.
    assert {each for each in taps if not each.endswith("@grad")} <= {*second}


def test_a_model_that_is_called_before_anything_takes_taps_is_not_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    early, model, x = Scaled(), Scaled(), torch.ones(1, 2)
    watch_first_model(GraftConfig(watch="name == 'linear'"))
    early(x)
    become_rank(monkeypatch, "target")
    with handled_by(lister := Lister()):
        model(x)
        early(x)
    assert lister.reached == ["linear"]


def test_a_choice_that_matches_no_module_warns_unless_something_else_is_watched(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    said = "GRAFTLAB_WATCH=\"name == 'no'\" matches no module of Scaled"
    for more, warns in (({}, True), ({"watch_inputs": True}, False), ({"watch_functions": "relu"}, False)):
        caplog.clear()
        watched(monkeypatch, {"watch": "name == 'no'", **more})
        assert (said in caplog.text) is warns
    with pytest.raises(ConfigError, match=r"watch_functions \(GRAFTLAB_WATCH_FUNCTIONS\) is 'no_such': "):
        watch_first_model(GraftConfig(watch_functions="no_such"))


def test_warnings_alone_reach_the_handlers_of_the_job(caplog: pytest.LogCaptureFixture) -> None:
    forwarder = _WarningForwarder()
    for level in (logging.INFO, logging.WARNING, logging.ERROR):
        forwarder.emit(logging.LogRecord("graftlab", level, "", 0, logging.getLevelName(level), None, None))
    assert [each.getMessage() for each in caplog.records] == ["WARNING", "ERROR"]


def test_a_log_that_cannot_be_written_is_no_silent_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = logging.getLogger("graftlab")
    monkeypatch.setattr(package, "handlers", [*package.handlers])
    monkeypatch.setattr(package, "propagate", package.propagate)
    monkeypatch.setattr(package, "level", package.level)
    log_to(tmp_path)
    [warning] = [each.getMessage() for each in caplog.records]
    assert f"{tmp_path} cannot be written: " in warning
    assert "only the rows show what each graft did" in warning


def test_each_optimizer_of_the_model_is_watched_once(monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[Any] = []
    hooks: list[Any] = []
    monkeypatch.setattr(on_import, "watch_training", lambda *given: watched.append(given))
    monkeypatch.setattr(on_import, "register_optimizer_step_pre_hook", hooks.append)
    model = Scaled()
    another = Scaled()
    one, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, another))
    of_both = torch.optim.SGD([*another.parameters(), *model.parameters()], lr=0.1)
    on_import._watch_optimizers(model)
    for optimizer in (one, other, one, other, of_both):
        hooks[0](optimizer, (), {})
    assert watched == [(model, one), (model, of_both)]
