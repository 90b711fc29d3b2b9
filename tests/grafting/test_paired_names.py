"""Filters and rows use the pair's name, and both sides decide alike about a pair."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graftlab as gl

pytestmark = pytest.mark.ranks

THIRD = "part(dim=1, index={}, of=[1, 1, 1])"


def renamed() -> float:
    """``old.x`` on the baseline is ``new.x`` on the target."""
    mine = 1.0 if gl.here().side == "baseline" else 2.0
    name = "old.x" if gl.here().side == "baseline" else "new.x"
    return gl.tap(name, torch.full((2,), mine))[0].item()


def fused() -> list[float]:
    """One tap on the baseline that is three on the target."""
    qkv = torch.arange(12.0).reshape(2, 6)
    if gl.here().side == "baseline":
        return gl.tap("qkv", qkv.clone()).flatten().tolist()
    return [gl.tap(name, 10 + part.clone())[0, 0].item() for name, part in zip("qkv", qkv.chunk(3, 1), strict=True)]


def only_row(run: gl.Run) -> dict[str, Any]:
    (row,) = run.frame.to_dict("records")
    return row


RENAME = {"target": {r"^new\.": "old."}}


@pytest.mark.parametrize("change", [{"rename": RENAME}, {"pairs": [("old.x", "new.x")]}])
@pytest.mark.parametrize("direction", ["b2t", "t2b"])
@pytest.mark.parametrize("filter_", ["name == 'old.x'", "baseline_name == 'old.x'", "target_name == 'new.x'"])
def test_a_graft_by_any_name_of_the_pair_takes_place(
    session: gl.Session, change: dict[str, Any], direction: str, filter_: str
) -> None:
    if "rename" in change and "target_name" in filter_:
        with pytest.raises(gl.PlanError, match="the baseline's ranks cannot know"):
            session.edit(**{direction: filter_}, compare=None, **change)
        return
    session.edit(**{direction: filter_}, compare=None, **change)
    run = session.run(renamed, renamed)
    row = only_row(run)
    assert (row["status"], row["name"]) == ("grafted", "old.x")
    assert (row["baseline_name"], row["target_name"]) == ("old.x", "new.x")
    assert run.target == ([1.0] if direction == "b2t" else [2.0])
    assert run.baseline == ([1.0] if direction == "b2t" else [2.0])


def test_filter_for_a_name_outside_the_pair_matches_on_neither_side(session: gl.Session) -> None:
    session.edit(b2t="name == 'new.x'", compare=None, rename=RENAME)
    assert len(session.run(renamed, renamed).frame) == 0


def test_seen_taps_are_one_per_pair_with_both_names(session: gl.Session) -> None:
    session.edit(pairs=[("old.x", "new.x")])
    session.run(renamed, renamed)
    names = [(t["name"], t["baseline_name"], t["target_name"]) for t in session.taps if "x" in t["name"]]
    assert names == [("old.x", "old.x", "new.x")]


def test_one_tap_that_is_three_is_compared_and_grafted_part_by_part(session: gl.Session) -> None:
    session.edit(pairs=[("qkv", part, THIRD.format(i)) for i, part in enumerate("qkv")], b2t="name == 'k'")
    run = session.run(fused, fused)
    frame = run.frame.set_index("name")
    assert frame["status"].to_dict() == {"q": "compared", "k": "grafted", "v": "compared"}
    assert set(frame["max_abs"]) == {10.0}
    assert run.target == [[10.0, 2.0, 14.0]]
    assert set(frame["baseline_name"]) == {"qkv"}
    assert frame.loc["k", "matched_by"] == "given"


def test_three_taps_graft_only_their_part_of_one(session: gl.Session) -> None:
    session.edit(pairs=[("qkv", part, THIRD.format(i)) for i, part in enumerate("qkv")], t2b="name in ('q', 'v')")
    run = session.run(fused, fused)
    assert run.baseline == [[10.0, 11.0, 2.0, 3.0, 14.0, 15.0, 16.0, 17.0, 8.0, 9.0, 20.0, 21.0]]
    frame = run.frame.set_index("name")
    assert frame.loc["q", ["status", "side", "max_abs"]].tolist() == ["grafted", "baseline", 10.0]
    assert frame.loc["k", ["status", "side"]].tolist() == ["compared", "target"]


def crossed() -> float:
    """The baseline's ``x`` is the target's ``y``, and the target has an ``x`` without a counterpart."""
    if gl.here().side == "baseline":
        return gl.tap("x", torch.ones(1)).item()
    gl.tap("x", torch.zeros(1))
    return gl.tap("y", torch.ones(1)).item()


def test_tap_whose_namesake_is_in_a_pair_is_reported_without_counterpart(session: gl.Session) -> None:
    session.edit(pairs=[("x", "y")])
    frame = session.run(crossed, crossed).frame
    assert sorted(zip(frame["target_name"], frame["status"], strict=True)) == [("x", "missing"), ("y", "compared")]
    assert "x = y" in frame.loc[frame["status"] == "missing", "error"].item()


def several_calls() -> list[float]:
    if gl.here().side == "baseline":
        return [gl.tap("act", torch.full((1,), float(i))).item() for i in range(3)]
    return [gl.tap(f"act.{i}", torch.full((1,), 5.0 + i)).item() for i in (2, 0)]


def test_calls_of_one_module_are_taps_of_several(session: gl.Session) -> None:
    session.edit(pairs=[(f"act#{i}", f"act.{i}") for i in (0, 2)], b2t="True")
    run = session.run(several_calls, several_calls)
    assert run.target == [[2.0, 0.0]]
    lost = run.frame[run.frame["status"] == "unmatched"]
    assert "the plan has no pair for this call of 'act'" in lost["error"].item()


def layer_in_the_middle(x: torch.Tensor) -> torch.Tensor:
    return gl.tap("middle", x.sin()).sin()


def checkpointed() -> None:
    x = torch.ones(2, requires_grad=True)
    torch.utils.checkpoint.checkpoint(layer_in_the_middle, x, use_reentrant=False).sum().backward()


def plain_forward() -> None:
    layer_in_the_middle(torch.ones(2, requires_grad=True)).sum().backward()


@pytest.mark.parametrize("direction", ["b2t", "t2b"])
@pytest.mark.parametrize("side", ["baseline", "target"])
def test_one_sided_recomputation_is_not_a_missing_tap(session: gl.Session, side: str, direction: str) -> None:
    session.edit(**{direction: "True"})
    run = session.run(*((checkpointed, plain_forward) if side == "baseline" else (plain_forward, checkpointed)))
    rows = run.frame[["recompute_status", "status"]].sort_values("recompute_status").values.tolist()
    assert rows == [["original", "grafted"], ["recompute", "recomputed"]]
    assert run.frame["error"].isna().all()
