"""Parts of a match of live runs, without a rank."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.refusals import exactly

from graftlab.errors import SessionError
from graftlab.judging import match_runs
from graftlab.judging.match_runs import _alike, _call, _in_one_order, _Match, _MatchedRuns, _same_parts
from graftlab.layouts import Mesh, parse_layout
from graftlab.layouts.on_ranks import RankLayout
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.ranks.match_recorder import MatchRecord, forget_match, record_taps, recorded_value


def test_ranks_hold_one_tensor_if_their_extremes_are_alike() -> None:
    x = torch.randn(64, generator=torch.Generator().manual_seed(0))
    one = RecordedTap.of("x", x)
    assert _alike(one, RecordedTap.of("x", x * (1 + 1e-6)))
    assert not _alike(one, RecordedTap.of("x", x * (1 + 1e-4)))
    assert not _alike(one, RecordedTap.of("x", x[:1]))
    assert not _alike(RecordedTap.of("x", torch.ones(8)), RecordedTap.of("x", torch.ones(1)))
    lost = x.clone()
    lost[3] = math.nan
    assert _alike(RecordedTap.of("x", lost), RecordedTap.of("x", lost.clone()))
    assert (_call("x"), _call("x#2")) == ("x#0", "x#2")


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_a_value_is_fetched_from_the_first_rank_of_its_side_that_has_it(side: Any) -> None:
    asked: list[Any] = []
    state = Mock()

    def run(**work: Any) -> Any:
        asked.append({name: (each.func, each.args) for name, each in work.items()})
        return SimpleNamespace(_state=state, **{name: [None, torch.ones(3), torch.zeros(3)] for name in work})

    match: Any = SimpleNamespace(_session=SimpleNamespace(run=run), _moved=5)
    found = _MatchedRuns._fetch(match, side, "x")
    assert found is not None
    assert (found.tolist(), match._moved) == ([1.0] * 3, 29)
    assert asked == [{side: (recorded_value, ("x",))}]
    # The session keeps its runs, and would keep as much as the model holds.
    state.forget_results.assert_called_once_with()


def test_taps_of_all_ranks_come_in_one_order() -> None:
    def names(*ranks: str) -> str:
        taps = _in_one_order([[RecordedTap.of(name, torch.ones(1)) for name in rank] for rank in ranks])
        assert [tap.order for tap in taps] == list(range(len(taps)))
        return "".join(tap.name for tap in taps)

    assert names("iab", "icd") == "iabcd"  # the stages of a pipeline, with the same inputs
    assert names("axb", "ayb") == "axyb"  # an expert on each rank
    assert names("ab", "ab", "ab") == "ab"
    assert names("", "ab", "bc") == "abc"
    assert names("ab", "xayb") == "xayb"  # each comes once before the tap that it precedes
    # The records of the ranks stay as they are.
    own = [RecordedTap.of("a", torch.ones(1))]
    assert len(_in_one_order([own, [RecordedTap.of("b", torch.ones(1))]])) == 2
    assert len(own) == 1


def test_ranks_get_the_budget_of_kept_bytes_and_that_of_sent_ones() -> None:
    asked: list[Any] = []

    class Session:
        closed, runs = False, ()

        def start(self, *callees: Any) -> None:
            asked.extend(callees)
            raise SessionError("enough")

        def run(self, *callees: Any) -> None:
            assert callees == (forget_match, forget_match)

    session: Any = Session()
    with pytest.raises(SessionError, match="enough"), _MatchedRuns(session, "f()", "g()", (), {}, 100, 7) as matching:
        matching._record(())
    assert [each.func for each in asked] == [record_taps, record_taps]
    assert [each.args[1:3] for each in asked] == [(100, 7), (100, 7)]


def test_a_run_of_a_match_adds_new_grafts_and_drops_those_that_are_no_longer_wanted() -> None:
    notes: list[str] = []
    match: Any = SimpleNamespace(_grafted={}, _values={"a": torch.ones(1)}, _note=notes.append)
    match._fetch = lambda side, name: torch.zeros(1) if (side, name) == ("baseline", "b") else None
    match._value = lambda pair: _MatchedRuns._value(match, pair)

    def changed(*pairs: tuple[str, str]) -> tuple[dict[str, int], list[str]]:
        new, gone = _MatchedRuns._changed(match, [Pair(*pair) for pair in pairs])
        return {name: len(grafts) for name, grafts in new.items()}, gone

    assert changed(("a", "x"), ("b", "x"), ("c", "y")) == ({"x": 2}, [])
    assert notes == ["c was not kept, so y was not grafted to match the taps after it"]
    assert list(match._values) == ["a", "b"]
    assert changed(("a", "x"), ("b", "x")) == ({}, ["y"])
    assert changed(("a", "x"), ("b", "z")) == ({"x": 1, "z": 1}, [])
    assert changed() == ({}, ["x", "z"])


def test_values_that_arrive_with_the_record_are_used_and_forgotten_at_the_end() -> None:
    taps = [RecordedTap.of("a", torch.ones(2)), RecordedTap.of("b", torch.ones(2))]
    taps[1].value = None
    record = SimpleNamespace(taps=taps, notes=[], layouts={}, skipped={})
    ended: list[Any] = []
    state = Mock()

    class Session:
        closed = False

        def __init__(self) -> None:
            self.runs = [SimpleNamespace(done=True)]

        def start(self, *callees: Any) -> Any:
            return SimpleNamespace(wait=lambda bar: None, baseline=[record], target=[record], _state=state)

        def run(self, *callees: Any) -> None:
            ended.append(callees)

    session = Session()
    with _MatchedRuns(session, print, print, (), {}, 1, 2) as match:  # type: ignore[arg-type]
        match._record(())
        assert [*match._values] == ["a"]
    assert ended == [(forget_match, forget_match)]
    # Ranks that are still running cannot forget it.
    session.runs = [SimpleNamespace(done=False)]
    with match:
        pass
    assert len(ended) == 1


def test_each_side_is_matched_by_its_own_default_function(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []

    def matched(session: Any, baseline: Any, target: Any, *rest: Any) -> Any:
        made.append((baseline, target))
        raise SessionError("enough")

    session: Any = SimpleNamespace(ranks=[SimpleNamespace(takes_work=True)])
    defaults = {"baseline": "f()", "target": "g()"}
    monkeypatch.setattr(match_runs, "internals_of", lambda session: SimpleNamespace(default_callees=defaults))
    monkeypatch.setattr(match_runs, "_MatchedRuns", matched)
    for given in ({}, {"baseline": "own()"}, {"target": "own()"}):
        with pytest.raises(SessionError, match="enough"):
            match_runs.match(session, **given)
    assert made == [("f()", "g()"), ("own()", "g()"), ("f()", "own()")]


def test_the_stop_button_interrupts_the_run_of_a_match() -> None:
    asked: list[str] = []

    def wait(bar: Any) -> None:
        raise KeyboardInterrupt

    class Session:
        closed, runs = False, ()

        def start(self, *callees: Any) -> Any:
            return SimpleNamespace(wait=wait, done=True)

        def interrupt(self) -> None:
            asked.append("interrupt")

    match = _MatchedRuns(Session(), print, print, (), {}, 1, 2)  # type: ignore[arg-type]
    with pytest.raises(KeyboardInterrupt):
        match._record(())
    assert asked == ["interrupt"]


def test_the_tensors_of_ranks_are_joined_by_their_layout_or_are_copies() -> None:
    x = torch.arange(8.0)
    layout = RankLayout(parse_layout("shard(dim=0, mesh='tp')").on(Mesh((("tp", 2),))), (8,))
    halves = [RecordedTap.of("x", half) for half in x.chunk(2)]
    match: Any = SimpleNamespace()

    def joined(held: list[RecordedTap], layout: RankLayout | None, ranks: int = 2) -> Any:
        return _MatchedRuns._joined(match, held[0], held, layout, ranks)

    halves[0].tags = {"kind": "param", "layer": 3}
    whole = joined(halves, layout)
    assert torch.equal(whole.value, x)
    assert (whole.name, whole.tags) == ("x", {"kind": "param", "layer": 3})
    # The parts of another tensor cannot be joined, which is no failure of the match.
    assert "shape" in joined([halves[0], RecordedTap.of("x", x[:3])], layout)
    copies = [RecordedTap.of("x", x), RecordedTap.of("x", x.clone())]
    assert joined(copies, None) is copies[0]
    assert joined(copies[:1], None) is copies[0]
    for other in (x + 1, x[:4], x.reshape(2, 4)):
        assert "declare it with gl.tap(layout=...)" in joined([copies[0], RecordedTap.of("x", other)], None)
    assert joined(halves[:1], layout) == "only 1 of 2 ranks have it"
    halves[1].value = None
    assert "were not all kept" in joined(halves, layout)


def test_one_part_of_a_weight_on_all_ranks_is_reported() -> None:
    half = parse_layout("part(dim=0, index=0, of=[1, 1])")
    pairs = (
        Pair("up[kind=param]", "w1", half),
        Pair("q", "qkv", half, whole="target"),
        Pair("k", "k", half),
        Pair("k", "k2", half),
    )
    copies = {"w1", "qkv", "k", "k2"}
    # A part of the target's tensor, or several of the baseline's, lack nothing.
    assert _same_parts(Proposal(pairs), copies) == [
        "All ranks of the target have the same part of up in w1, and none has the rest"
    ]
    assert _same_parts(Proposal(pairs), copies - {"w1"}) == []


def test_a_job_that_recorded_nothing_is_named() -> None:
    ranks = [SimpleNamespace(label=f"target[{rank}]") for rank in range(2)]
    records = [MatchRecord([], {}, {}, []), None]
    match: Any = SimpleNamespace(
        _session=SimpleNamespace(select=lambda side: ranks), _recorded_on=lambda rank, name: records[ranks.index(rank)]
    )
    with pytest.raises(SessionError, match=r"match: target\[1\] recorded nothing in this step; its log has the reason"):
        match_runs._MatchedSteps._records(match, "target")
    records[1] = records[0]
    assert match_runs._MatchedSteps._records(match, "target") == [records[0]] * 2


def record(*taps: RecordedTap, notes: tuple[str, ...] = (), skipped: dict[str, str] | None = None) -> MatchRecord:
    return MatchRecord(list(taps), {}, skipped or {}, list(notes))


def test_what_ranks_note_skip_and_hold_in_parts_is_known_of_the_newest_run() -> None:
    x = torch.arange(8.0)
    match = _Match(SimpleNamespace(), 1, 2)  # type: ignore[arg-type]
    weights = [RecordedTap.of("w", x) for _ in range(2)]
    for each in weights:
        each.tags = {"kind": "param"}
    parts = [RecordedTap.of("part", part) for part in x.chunk(2)]
    other = RecordedTap.of("uneven", x), RecordedTap.of("uneven", x + 1)
    ranks = [
        record(weights[0], parts[0], other[0], notes=("full",), skipped={"s": "first"}),
        record(weights[1], parts[1], other[1], skipped={"s": "second", "t": "why"}),
        record(RecordedTap.of("part", x[:4] + 9), RecordedTap.of("alone", x)),
    ]
    taps = match._whole_taps(ranks, "target")
    assert [tap.name for tap in taps] == ["w", "alone"]
    # Only a tensor that every rank has may be a part of one of the baseline's.
    assert {name: len(held) for name, held in match._parts.items()} == {"part": 3}
    assert match._copies == {"w"}
    assert [*match._notes] == ["target[0]: full"]
    assert {name: why for name, why in match._skipped["target"].items() if name in "st"} == {"s": "first", "t": "why"}
    assert match._moved == sum(tap.value.nbytes for each in ranks for tap in each.taps if tap.value is not None)
    match._whole_taps([record(RecordedTap.of("part", x), notes=("late",))], "target")
    assert (match._parts, match._copies, match._skipped["target"]) == ({}, set(), {})
    assert [*match._notes] == ["target[0]: full", "target: late"]


def test_a_match_adds_what_its_ranks_lack_to_what_was_found() -> None:
    found = Proposal(
        (Pair("a", "b"),),
        {"x": "no partner", "y": "no partner"},
        {"z": "no partner"},
        problems=("found",),
        wrong_weights=("wrong",),
    )
    match: Any = _Match(SimpleNamespace(select=lambda side: [side]), 1, 2)  # type: ignore[arg-type]
    match._record = lambda grafts: ([], [])
    match._notes, match._moved, match._order = {"noted": None}, 7, {"target": ("b",)}
    match._skipped = {"baseline": {"x": "not kept"}, "target": {"q": "not kept"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(match_runs, "match_once", lambda *given, **more: found)
        patch.setattr(match_runs, "_same_parts", lambda proposal, copies: ["the same part"])
        made = match.proposal(0)
    assert made.problems == ("found", "the same part", "noted")
    assert made.wrong_weights == ("wrong", "the same part")
    # The reason why a tap was not kept says more than that it has no partner.
    assert made.unmatched_baseline == {"x": "not kept", "y": "no partner"}
    assert made.unmatched_target == {"z": "no partner", "q": "not kept"}
    assert (made.moved, made.order) == (7, {"target": ("b",)})


def test_the_progress_of_a_match_counts_the_targets_taps_that_have_a_partner() -> None:
    match = _Match(SimpleNamespace(), 1, 2)  # type: ignore[arg-type]
    assert match._progress() == "run 1"
    match._runs, match._order = 1, {"baseline": ("a",), "target": ("x", "y", "z")}
    assert match._progress([Pair("a", "x"), Pair("b", "x"), Pair("c", "y")]).startswith("run 2, 2 of 3 taps paired, ")


@pytest.mark.parametrize("given", [{"rounds": -1}, {"rounds": 1.5}, {"budget": 0}, {"budget": 1e9}])
def test_a_match_without_rounds_or_budget_is_refused(given: dict[str, Any]) -> None:
    asked = {"rounds": match_runs.ROUNDS, "budget": match_runs.BUDGET, **given}
    said = f"match: rounds must be at least 0 and budget above 0, not {asked['rounds']!r} and {asked['budget']!r}"
    with pytest.raises(SessionError, match=exactly(said)):
        match_runs.match(SimpleNamespace(), **given)  # type: ignore[arg-type]
