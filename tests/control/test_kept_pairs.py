"""Kept pairs, from the notebook: never an older one without a word, and advice that has not been followed already."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from kit.refusals import exactly

import graftlab as gl
from graftlab.base.world import Place
from graftlab.control import kept_pairs
from graftlab.control.kept_pairs import PairsOnRanks, keep_advice
from graftlab.ranks.messages import AskKeptInput, AskKeptMap, AskKeptTags, KeptTags, KeptValue

TAPS = [{"name": "h", "step": 0, "side": "baseline", "rank": 0, "layer": layer} for layer in range(4)]
TAPS += [{"name": "g", "step": 0, "side": "baseline", "rank": 0, "layer": 9}]


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
        ("True", "g", {"layer": 2}, "No tap 'g' seen so far has layer=2"),
        ("layer == 0", "h", {}, "matches the tap, but no pair has been kept since that plan took effect; run again"),
        ("layer == 0", "h", {"rank": 1, "occurrence": 2}, "run again, unless only one side has this tap"),
    ],
)
def test_the_advice_names_the_missing_step(keep: str | None, name: str, tags: dict[str, int], advice: str) -> None:
    assert advice in keep_advice(gl.GraftPlan(keep=keep), TAPS, name, tags)


def test_before_any_tap_was_seen_the_advice_is_to_set_a_filter() -> None:
    assert "Set session.edit(keep=" in keep_advice(gl.GraftPlan(), [], "h", {})


class Rank:
    def __init__(self, place: Place) -> None:
        self.place, self.label, self.alive, self.trusted = place, place.label, True, True


class Kept:
    """Ranks with these pairs, given by label; ``gone`` are pairs that were not kept. Each question is noted."""

    def __init__(self, held: dict[str, list[dict[str, Any]]], gone: dict[str, list[dict[str, Any]]]) -> None:
        self.held, self.gone, self.asked = held, gone, list[tuple[str, Any]]()
        self.with_failed: set[bool] = set()
        places = Place("baseline", 0, 1, 2).everyone()
        self.ranks: list[Any] = [Rank(place) for place in places]
        self.pairs = PairsOnRanks(self.ranks, self.answer, lambda name, tags: f"Advice on {name} {dict(tags)}")

    def answer(self, rank: Any, question: Any, kind: Any) -> Any:
        held, gone = self.held.get(rank.label, []), self.gone.get(rank.label, [])
        if isinstance(question, AskKeptTags):
            self.with_failed.add(question.failed)
            return KeptTags(held, gone)
        self.asked.append((rank.label, question))
        wanted = {"name": question.name, **question.tags}
        return KeptValue(rank.label.encode() if any(wanted.items() <= each.items() for each in held) else None)


@pytest.fixture
def _values_are_labels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_pairs, "open_value", lambda rank, packed: (rank.label, packed.decode()))


def at(step: int, rank: int = 0, **tags: Any) -> dict[str, Any]:
    return {"name": "h", "step": step, "rank": rank, **tags}


@pytest.mark.usefixtures("_values_are_labels")
def test_the_newest_pair_of_all_ranks_is_found_on_the_rank_that_has_it() -> None:
    kept = Kept({"baseline[0]": [at(4)], "target[0]": [at(2), at(3)], "target[1]": [at(1, 1)]}, {})
    assert kept.pairs.pair("h", None, {}) == ("baseline[0]", "baseline[0]")
    assert kept.pairs.newest("h", None, {}) == at(4)
    assert kept.pairs.pair("h", 1, {}) == ("target[1]", "target[1]")
    assert kept.pairs.newest("h", None, {"step": 2}) == at(2)
    assert kept.pairs.newest("h", None, {"step": 9}) is None
    # Equally new: a receiver of the target stands for both, and the lowest.
    kept.held["target[1]"] = kept.held["target[0]"] = [at(4)]
    assert kept.pairs.pair("h", None, {})[0] == "target[0]"
    kept.ranks[1].alive = False
    assert kept.pairs.pair("h", None, {})[0] == "target[1]"
    # A call that is not counted is the first.
    assert kept.pairs.newest("h", None, {"occurrence": np.int64(0)}) == at(4)
    kept.ranks[2].trusted = False
    with pytest.raises(
        gl.SessionError,
        match=exactly(
            "target[1] was not started by this notebook, so what it sends is not unpickled: a pickle can run any code"
        ),
    ):
        kept.pairs.packed_input("h", None, {})


@pytest.mark.usefixtures("_values_are_labels")
def test_a_rank_that_did_not_keep_its_newer_pair_is_asked_before_older_pairs() -> None:
    held = {"baseline[0]": [at(3)], "target[0]": [at(1), {"name": "g", "step": 9, "rank": 0}], "target[1]": [at(2, 1)]}
    kept = Kept(held, {"target[0]": [at(5), {"name": "g", "step": 8}], "target[1]": [at(6, 1), at(4, 1)]})
    assert kept.pairs.pair("h", None, {}) == ("target[1]", "target[1]")
    assert kept.pairs.newest("h", None, {}) is None
    assert kept.pairs.newest("h", 0, {}) is None
    assert kept.pairs.newest("g", None, {}) == {"name": "g", "step": 9, "rank": 0}
    # What was lost at the step of a kept pair is another call, and no newer one.
    kept.gone = {"target[0]": [at(3)]}
    assert kept.pairs.newest("h", None, {}) == at(3)
    kept.gone, kept.held = {"target[0]": [at(5)]}, {"target[0]": [at(1)]}
    assert kept.pairs.newest("h", None, {}) is None
    kept.held = {}
    assert kept.pairs.newest("h", None, {}) is None


@pytest.mark.usefixtures("_values_are_labels")
def test_axes_are_sent_as_numbers_and_refused_before_any_rank_reads_them() -> None:
    kept = Kept({"target[0]": [at(1)]}, {})
    for given, sent in ((None, None), ((np.int64(1), 0), (1, 0))):
        kept.pairs.difference_map("h", None, {"step": np.int64(1)}, given)
        assert kept.asked[-1] == ("target[0]", AskKeptMap("h", {"step": 1}, sent))
    assert kept.with_failed == {False}
    kept.with_failed.clear()
    assert kept.pairs.packed_input("h", None, {"step": np.int64(1)}) == (kept.ranks[1], b"target[0]")
    assert kept.asked[-1] == ("target[0]", AskKeptInput("h", {"step": 1}))
    # A transform can be tried where it failed, too.
    assert kept.with_failed == {True}
    before = len(kept.asked)
    with pytest.raises(gl.SessionError, match=exactly("dims=('x',): give one or two axes of 'h', such as (0, 1)")):
        kept.pairs.difference_map("h", None, {}, ("x",))  # type: ignore[arg-type]
    assert len(kept.asked) == before


def test_what_is_kept_instead_of_a_missing_pair_is_listed() -> None:
    kept = Kept(
        {"target[0]": [at(7, layer=1), at(3, layer=1)], "target[1]": [at(9, 1, layer=1), at(5, 1, layer=2)]}, {}
    )

    def said(*of: Any) -> str:
        with pytest.raises(gl.SessionError) as caught:
            kept.pairs.pair(*of)
        return str(caught.value)

    assert said("h", 0, {"step": 1, "layer": 1}) == (
        "no pair of tensors is kept for 'h', step=1, layer=1; this tap has pairs of 2 steps from 3 to 7"
    )
    assert said("h", None, {"step": 1, "layer": 2}).endswith("; this tap has pairs of step 5")
    assert said("h", 5, {"layer": 1}).endswith("kept for 'h', layer=1 on rank 5; this tap has pairs of ranks 0-1")
    assert said("h", None, {"layer": 3}).endswith("kept for 'h', layer=3; kept are ['h']. Advice on h {'layer': 3}")
    kept.held["target[0]"] = [{"name": name, "step": 0, "rank": 0} for name in "abcdef"]
    kept.held["target[1]"] = []
    names = "['a', 'b', 'c', 'd', 'e', 'f']"
    assert f"; kept are {names}. Advice" in said("h", None, {})
    kept.held["target[1]"] = [at(0, 1), {"name": "z", "step": 0, "rank": 1}]
    assert f"; kept are {names} and 2 others. Advice" in said("y", None, {})
    # Each rank of those chosen may know why.
    kept.held.clear()
    kept.asked.clear()
    assert ", nor for any other tap. Advice" in said("h", 1, {})
    assert [label for label, _ in kept.asked] == ["target[1]"]
    said("h", None, {})
    assert [label for label, _ in kept.asked][1:] == ["target[0]", "target[1]", "baseline[0]"]


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
        gl.SessionError, match=r"no pair of tensors is kept for 'other'.* keep filter, name == 'h', does"
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
