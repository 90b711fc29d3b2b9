"""Folders of SGLang's dumper: which ranks, steps, names and tags their files have, without running the engine."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.refusals import exactly

import graftlab as gl
from graftlab.recordings.sglang_dumps import SglangDump


def dump(folder: Path, index: int, tap: str, value: Any = None, step: int = 0, rank: int = 0, **meta: Any) -> None:
    """Write a file as the dumper does; ``meta`` is what it states, and its tags are in the name of the file too."""
    tags = {tag: text for tag, text in meta.items() if tag in ("layer", "recompute_status")}
    named = {"step": step, "rank": rank, "dump_index": index, "name": tap, **tags}
    content = {"value": torch.full((2,), float(index)) if value is None else value, "meta": meta}
    torch.save(content, folder / f"{'___'.join(f'{tag}={text}' for tag, text in named.items())}.pt")


def test_taps_have_the_order_the_steps_and_the_tags_of_their_files(tmp_path: Path) -> None:
    dump(tmp_path, 10, "late", step=7, layer=3)
    dump(tmp_path, 9, "grad__param__w", step=5)
    dump(tmp_path, 2, "param__w", step=5)
    dump(tmp_path, 3, "grad__h", step=5)
    dump(tmp_path, 4, "again", step=5, recompute_status="recompute")
    dump(tmp_path, 5, "text", "no tensor", step=5)
    # A file's own statement of its name is the whole one.
    dump(tmp_path, 6, "short", step=5, name="a name with / in it")
    side = gl.Recording.open(tmp_path)
    assert isinstance(side, SglangDump)
    frame = side.frame
    found = frame[["step", "name"]].values.tolist()
    assert found == [
        [0, "param__w"],
        [0, "h"],
        [0, "a name with / in it"],
        [0, "param__w"],
        [2, "late"],
    ]
    assert frame["kind"].tolist()[:2] == ["param", "grad"]
    assert frame["kind"].tolist()[3] == "param_grad"
    assert frame["layer"].tolist()[-1] == 3
    assert side.left_out == [
        "tap 'again' where the backward pass recomputes the forward pass",
        "tap 'text', whose value is str, not a tensor",
    ]
    assert torch.equal(side.tensor("late", step=2), torch.full((2,), 10.0))


def test_dumps_of_some_ranks_are_a_side_only_if_that_is_asked_for(tmp_path: Path) -> None:
    for rank in range(2):
        dump(tmp_path, rank, "h", rank=rank, world_size=4)
    with pytest.raises(
        gl.RecordingError,
        match=exactly(
            f"{tmp_path}: its dumps are of a job of 4 ranks, but only ranks up to 1 have dumps; if the others dumped "
            "nothing, partial=True uses these as the side"
        ),
    ):
        gl.Recording.open(tmp_path)
    side = gl.Recording.open(tmp_path, partial=True)
    # On the ranks that replay it too.
    assert (side.world_size, pickle.loads(pickle.dumps(side)).world_size) == (2, 2)


def test_a_rank_without_a_dump_below_others_is_named(tmp_path: Path) -> None:
    for rank in (0, 2):
        dump(tmp_path, rank, "h", rank=rank)
    with pytest.raises(gl.RecordingError, match=exactly(f"{tmp_path} has dumps of ranks up to 2, but none of [1]")):
        gl.Recording.open(tmp_path, partial=True)
