"""A condensed recording has a bounded size, equal tensors once, and sketches of what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import graftlab as gl
from graftlab.recordings.condensing import condense


def recorded(folder: Path) -> Path:
    with gl.record(folder):
        same = torch.randn(40, 100, generator=torch.Generator().manual_seed(0))
        gl.tap("ids", torch.arange(20))
        gl.tap("one", same)
        gl.tap("two", same.clone(), layer=1)
        gl.step()
        gl.tap("large", torch.randn(300, 300, generator=torch.Generator().manual_seed(1)))
    return folder


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def test_the_smallest_are_kept_whole_and_the_others_are_sketches_within_the_limit(tmp_path: Path) -> None:
    whole = recorded(tmp_path / "whole")
    assert condense(whole, tmp_path / "small", 40_000) == ["large"]
    assert size_of(tmp_path / "small") <= 40_000
    before, small = gl.Recording(whole), gl.Recording(tmp_path / "small")
    for name, tags in (("ids", {}), ("one", {}), ("two", {"layer": 1})):
        assert torch.equal(small.tensor(name, **tags), before.tensor(name, **tags))
    assert small.sketched == ["large"]
    assert small.tensor("large", step=1).shape == (1024,)
    # Two equal tensors take the room of one.
    assert condense(whole, tmp_path / "all", 420_000) == []
    assert size_of(tmp_path / "all") < size_of(whole) - 16_000


def test_taps_that_do_not_fit_even_as_sketches_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        gl.RecordingError, match=r"of 4 taps does not fit into 1,000 bytes.*raise --graftlab-record-limit"
    ):
        condense(recorded(tmp_path / "whole"), tmp_path / "small", 1_000)
    assert not (tmp_path / "small").exists()
