"""What the environment asks to be recorded: from the first tap to the end of the process, on ranks alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import graftlab as gl
from graftlab.recordings import by_environment
from graftlab.recordings.by_environment import FOLDER, record_by_environment
from graftlab.taps import calls


@pytest.fixture
def at_exit(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Callable[[], None]]]:
    """What would be called when the process ends."""
    asked: list[Callable[[], None]] = []
    monkeypatch.setattr(by_environment, "Finalize", lambda what, call, exitpriority: asked.append(call))
    yield asked
    calls.deactivate()


@pytest.mark.parametrize(("only", "layers"), [(None, [0, 1]), ("layer == 1", [1])])
def test_the_first_tap_begins_a_recording_of_those_that_the_filter_matches(
    only: str | None,
    layers: list[int],
    at_exit: list[Callable[[], None]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not record_by_environment()
    monkeypatch.setenv(FOLDER, str(tmp_path / "recording"))
    if only is not None:
        monkeypatch.setenv("GRAFTLAB_RECORD_FILTER", only)
    assert record_by_environment()
    waits = calls.grafter()
    # A second import of graftlab changes nothing, and nothing is written before a tap.
    assert record_by_environment()
    assert calls.grafter() is waits
    assert not (tmp_path / "recording").exists()
    for layer in range(2):
        gl.tap("hidden", torch.full((2,), float(layer)), layer=layer)
    [end] = at_exit
    end()
    assert gl.Recording(tmp_path / "recording").frame["layer"].tolist() == layers


def test_a_data_loaders_worker_records_nothing(
    at_exit: list[Callable[[], None]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "recording"))
    assert record_by_environment()
    monkeypatch.setattr(torch.utils.data, "get_worker_info", object)
    gl.tap("hidden", torch.ones(2))
    assert (at_exit, calls.grafter()) == ([], None)
    assert not (tmp_path / "recording").exists()
