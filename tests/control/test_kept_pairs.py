"""Kept pairs, from the notebook: never an older one without a word, and advice that has not been followed already."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import graftlab as gl
from graftlab.control.kept_pairs import keep_advice

TAPS = [{"name": "h", "step": 0, "side": "baseline", "rank": 0, "layer": layer} for layer in range(4)]


@pytest.mark.parametrize(
    ("keep", "name", "tags", "advice"),
    [
        (None, "h", {}, "Set session.edit(keep=...) to a filter that matches the tap, and run again"),
        ("layer == 3", "h", {"layer": 1}, "The plan's keep filter, layer == 3, does not match the tap; widen it"),
        (
            "layer == 3",
            "h",
            {"layer": 3, "step": 9},
            "matches the tap, but no pair has been kept since that plan took effect",
        ),
        ("True", "hh", {}, "No tap seen so far is called 'hh'; did you mean 'h'?"),
        ("True", "zzz", {}, "No tap seen so far is called 'zzz'"),
        ("True", "h", {"layer": 7}, "No tap 'h' seen so far has layer=7"),
    ],
)
def test_the_advice_names_the_missing_step(keep: str | None, name: str, tags: dict[str, int], advice: str) -> None:
    assert advice in keep_advice(gl.GraftPlan(keep=keep), TAPS, name, tags)


def test_before_any_tap_was_seen_the_advice_is_to_set_a_filter() -> None:
    assert "Set session.edit(keep=" in keep_advice(gl.GraftPlan(), [], "h", {})


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 2, keep_budget=1 << 20) as session:
        yield session


def tap_h(numel: int) -> None:
    gl.tap("h", torch.ones(numel), layer=3)


@pytest.mark.ranks
def test_the_pair_of_a_smaller_step_is_not_taken_for_one_beyond_the_budget(session: gl.Session) -> None:
    session.edit(keep="True")
    session.run(tap_h, tap_h, args=(1000,))
    assert session.tensors("h")[0].numel() == 1000
    run = session.run(tap_h, tap_h, args=(1 << 20,))
    step = int(run.frame["step"].iloc[0])
    for ask in (session.tensors, session.difference_map, session.plot.heatmap):
        with pytest.raises(gl.SessionError) as caught:
            ask("h", layer=3)
        said = str(caught.value)
        assert f"the pair of h layer=3 at step {step} was not kept: its tensors have 8 MiB and the budget of a" in said
        assert "gl.launch(..., keep_budget=8 << 20) or more" in said
        assert f"An older pair is kept: step={step - 1}" in said
    assert session.tensors("h", step=step - 1)[0].numel() == 1000


@pytest.mark.ranks
def test_a_pair_over_the_budget_is_reported_as_too_large(session: gl.Session) -> None:
    def large() -> None:
        gl.tap("large", torch.ones(1 << 20))

    session.edit(keep="True")
    session.run(large, large)
    with pytest.raises(
        gl.SessionError, match=r"the pair of large at step .* was not kept: its tensors have 8 MiB"
    ) as caught:
        session.tensors("large")
    assert "session.edit" not in str(caught.value)


@pytest.mark.ranks
def test_where_nothing_is_kept_the_advice_is_about_the_plan_in_force(session: gl.Session) -> None:
    def other() -> None:
        gl.tap("other", torch.ones(4))

    session.edit(keep="name == 'h'")
    session.run(other, other)
    with pytest.raises(
        gl.SessionError, match=r"no pair of tensors is kept for 'other'; .* keep filter, name == 'h', does"
    ):
        session.tensors("other")
    session.edit(keep="True")
    with pytest.raises(
        gl.SessionError, match="matches the tap, but no pair has been kept since that plan took effect; run again"
    ):
        session.tensors("other")


@pytest.mark.ranks
def test_a_pair_from_before_the_direction_changed_is_not_taken_for_the_newest(session: gl.Session) -> None:
    session.edit(keep="name == 'h'", b2t="name == 'h'")
    session.run(tap_h, tap_h, args=(1000,))
    assert session.tensors("h")[0].numel() == 1000
    session.edit(b2t=None, t2b="name == 'h'")
    run = session.run(tap_h, tap_h, args=(1 << 20,))
    step = int(run.frame["step"].iloc[0])
    for ask in (session.tensors, session.difference_map):
        with pytest.raises(gl.SessionError, match=rf"the pair of h layer=3 at step {step} was not kept"):
            ask("h", layer=3)
    assert session.tensors("h", step=step - 1)[0].numel() == 1000
    session.edit(t2b=None, b2t=None)
