"""A step that is made once in a process is recorded in a file, and compared with in the next process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from kit.grafters import become_rank

import graftlab as gl
from graftlab.errors import SessionError
from graftlab.plan.plan import GraftPlan
from graftlab.ranks import holding
from graftlab.ranks.recorded_step import compare_with_record, graft_record, record_step

X, Y = torch.arange(1.0, 9.0), torch.arange(9.0, 17.0)


class Step:
    """A held step with two taps and a result that can all be changed."""

    def __init__(self) -> None:
        self.x, self.y, self.result = X, Y, X
        self.shown: list[torch.Tensor] = []
        self.repeats_x = False

    def __call__(self) -> dict[str, torch.Tensor]:
        self.shown = [gl.tap("x", self.x.clone()), gl.tap("y", self.y.clone())]
        if self.repeats_x:
            gl.tap("x", self.y.clone())
        gl.tap("text", "no tensor")
        return {"out": self.result.clone().requires_grad_()}


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> Step:
    become_rank(monkeypatch, "baseline")
    made: Any = Step()
    monkeypatch.setattr(holding, "_held_here", lambda: made)
    return made


def test_a_record_summarises_what_the_step_shows_and_returns(step: Step, tmp_path: Path) -> None:
    summary = record_step(str(tmp_path), 1 << 20)
    assert (summary.taps, summary.skipped, summary.not_recorded) == (("x", "y"), ("text",), 0)
    assert torch.equal(summary.results["out"], X)
    assert not summary.results["out"].requires_grad
    assert [path.name for path in tmp_path.iterdir()] == ["baseline-0.pt"]
    assert record_step(str(tmp_path), 32).not_recorded == 1
    # A tap that is reached again is one.
    step.repeats_x = True
    assert record_step(str(tmp_path), 1 << 20).taps == ("x", "y")


def test_a_repeat_is_compared_by_its_taps_and_then_by_its_results(step: Step, tmp_path: Path) -> None:
    record_step(str(tmp_path), 1 << 20)
    assert compare_with_record(str(tmp_path)) == []
    step.result = Y
    (said,) = compare_with_record(str(tmp_path))
    assert "out" in said
    step.y = X
    assert compare_with_record(str(tmp_path)) == ["y"]


def test_the_record_is_grafted_with_each_tap_moved_by_a_rounding(step: Step, tmp_path: Path) -> None:
    record_step(str(tmp_path), 1 << 20)
    step.x = step.result = Y
    found = graft_record(str(tmp_path), {"x": "bfloat16", "y": ""}, GraftPlan(), ["y"], resets=True)
    assert [row.name for row in found.added] == ["x", "y"]
    assert found.added[0].rel_l2 > 0.1
    assert [*found.last] == ["y"]
    assert torch.equal(found.last["y"], Y)
    assert (found.outputs, found.returned) == ([], {})
    # The record's value, moved as bfloat16 and as float32 round.
    assert 1e-3 < float(((step.shown[0] - X) / X).abs().max()) < 2e-2
    assert 0 < float(((step.shown[1] - Y) / Y).abs().max()) < 1e-6


def test_a_recorded_tap_is_kept_and_rounded_under_the_name_of_its_pair(step: Step, tmp_path: Path) -> None:
    record_step(str(tmp_path), 1 << 20)
    plan = GraftPlan(rename={"baseline": {"^x$": "x_of_both"}})
    assert plan.paired_names("baseline", "x") != plan.paired_names("target", "x")
    found = graft_record(str(tmp_path), {"x_of_both": "bfloat16"}, plan, ["x_of_both"], resets=True)
    assert [*found.last] == ["x_of_both"]
    assert 1e-3 < float(((step.shown[0] - X) / X).abs().max()) < 2e-2


def test_without_resets_the_step_continues_with_its_own_values(step: Step, tmp_path: Path) -> None:
    record_step(str(tmp_path), 1 << 20)
    step.x = step.result = Y
    found = graft_record(str(tmp_path), None, GraftPlan(), [], resets=False)
    assert [row.name for row in found.outputs] == ["x", "y"]
    assert (found.added, found.last) == ([], {})
    assert float(((step.shown[0] - Y) / Y).abs().max()) < 1e-6
    assert found.returned["out"] > 0.1


def test_a_record_without_room_leaves_no_file_and_says_where_room_is_needed(
    step: Step, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(value: object, path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("[enforce fail at inline_container.cc:603] . unexpected pos\nmore")

    def refuse(*_: object) -> None:
        raise TypeError("cannot pickle this")

    monkeypatch.setattr(torch, "save", refuse)
    with pytest.raises(TypeError, match="cannot pickle this"):
        record_step(str(tmp_path), 1 << 20)
    monkeypatch.setattr(torch, "save", save)
    with pytest.raises(SessionError, match=r"baseline-0\.pt: \[enforce fail .* pos; make room there, or set GRAFTLAB"):
        record_step(str(tmp_path), 1 << 20)
    assert [*tmp_path.iterdir()] == []
