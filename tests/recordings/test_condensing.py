"""A condensed recording has a bounded size, equal tensors once, and sketches of what does not fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit.refusals import exactly

import graftlab as gl
from graftlab.recordings import condensing
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
        gl.RecordingError,
        match=exactly(
            "a recording of 4 taps does not fit into 1,000 bytes, even with sketches of 32 sums: "
            "choose fewer modules with include=, or raise --graftlab-record-limit"
        ),
    ):
        condense(recorded(tmp_path / "whole"), tmp_path / "small", 1_000)
    assert not (tmp_path / "small").exists()


def test_tensors_of_equal_bytes_and_other_shapes_keep_their_shapes(tmp_path: Path) -> None:
    with gl.record(tmp_path / "whole"):
        for shape in ((4,), (2, 2)):
            gl.tap("x", torch.zeros(shape), dims=len(shape))
        gl.tap("x", torch.zeros(4, dtype=torch.int32), dims=0)
    condense(tmp_path / "whole", tmp_path / "small", 40_000)
    found = [tensor for _, tensor, _ in gl.Recording(tmp_path / "small").taps(0)]
    assert [(tuple(each.shape), each.dtype) for each in found] == [
        ((4,), torch.float32),
        ((2, 2), torch.float32),
        ((4,), torch.int32),
    ]


def test_the_smallest_tensors_are_kept_whole_in_whatever_order_they_were_recorded() -> None:
    values = {b"large": torch.zeros(1_000), b"small": torch.zeros(100), b"smaller": torch.zeros(50)}
    # Room for sketches of 32 numbers of each, and 100 numbers more.
    assert condensing._kept_whole(values, 4 * (3 * 32 + 100), 32) == {b"small", b"smaller"}


def test_a_recording_that_became_larger_than_was_reckoned_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = recorded(tmp_path / "whole")
    monkeypatch.setattr(condensing, "_LINE", 0)
    monkeypatch.setattr(condensing, "_LAYOUT", 0)
    with pytest.raises(
        gl.RecordingError,
        match=exactly("the recording has 9,798 bytes and may have 8,600; raise --graftlab-record-limit"),
    ):
        condense(whole, tmp_path / "small", 8_600)


def test_a_tensor_that_is_kept_whole_keeps_its_layout(tmp_path: Path) -> None:
    with gl.record(tmp_path / "whole"):
        gl.tap("x", torch.zeros(4), layout="same")
    assert condense(tmp_path / "whole", tmp_path / "small", 40_000) == []
    layouts = [side._ranks[0][0][0].layout for side in map(gl.Recording, (tmp_path / "whole", tmp_path / "small"))]
    assert layouts[0] is not None
    assert layouts[0] == layouts[1]
