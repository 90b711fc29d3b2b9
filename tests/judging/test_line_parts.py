"""How the lines of a tap are confirmed, run by run, with operations that no rank computes."""

from __future__ import annotations

import math
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from graftlab.base.world import SIDES
from graftlab.errors import RunError
from graftlab.judging import line_runs
from graftlab.judging.line_reports import _with_counterpart, _written, lines_of
from graftlab.judging.line_runs import MOST_CONFIRMING_RUNS, LineSearch
from graftlab.judging.traced_call import _SMALLEST_TOLERANCE, TracedCall
from graftlab.lines.first_lost import TOLERANCE
from graftlab.lines.lost import LostOperation
from graftlab.lines.traces import LINE_TAP, OperationChanges


def operation(index: int, name: str = "add") -> Any:
    frame = SimpleNamespace(file="model.py", line=index, source=f"line {index}")
    return SimpleNamespace(index=index, name=name, frames=(frame,), is_random=False, inputs=(1,), only_arranges=False)


def _traced(index: int) -> Any:
    made = operation(index)
    made.call, made.arguments, made.shapes = f"{made.name}()", (), ()
    return made


def lost(index: int, **more: Any) -> Any:
    usual = {"operation": operation(index), "is_later": False, "is_suspect": True, "counterpart": None}
    return SimpleNamespace(**{**usual, **more})


def on_both(*target: Any, remedies: tuple[Any, ...] = ()) -> Any:
    return SimpleNamespace(target=list(target), baseline=[], remedies=remedies)


def remedy(**given: Any) -> Any:
    usual = {"grafted": {}, "partner": None, "fed": (3,), "changes": {7: ("fed", 3, None)}}
    return SimpleNamespace(**{**usual, "is_certain": False, **given})


def call(group: str = "g", **given: Any) -> TracedCall:
    row = {"added": 1e-2, "floor": 1e-6, "floor_max": 1e-6, "cast": None, "dtype": "float32", "rank": 0}
    wanted: Any = SimpleNamespace(name=group)
    return TracedCall(group, row, wanted, given.pop("is_worst", True), **given)


class Traced:
    """A traced run of one rank on each side, with the operations that lead to each call."""

    def __init__(self, *slices: tuple[int, ...]) -> None:
        own = [
            SimpleNamespace(
                operations=[operation(index) for index in each],
                is_cut_short=False,
                result=0,
                values=[SimpleNamespace(sources=each)],
            )
            for each in slices
        ]
        self.target = self.baseline = [own]
        self.rows: Any = None


@pytest.fixture
def search(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A search in which each call is as before, and agrees as ``agreeing`` says by its group."""
    made: Any = LineSearch.__new__(LineSearch)
    made._found_calls, made._not_confirmed, made.agreeing = [], False, {}
    monkeypatch.setattr(made, "_agrees", lambda each, rows: made.agreeing.get(each.group))
    monkeypatch.setattr(made, "_is_as_before", lambda each, traced: True)
    return made


# ---- what is lost ----------------------------------------------------------------------------------------------------


def test_an_operation_is_kept_once_and_those_that_appear_later_are_marked(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = iter([on_both(lost(1), lost(2, is_later=True), remedies=("r",)), on_both(lost(1), lost(4))])
    monkeypatch.setattr(line_runs, "first_lost", lambda *_: next(found))
    monkeypatch.setattr(line_runs, "_has_counterpart", lambda each: True)
    mine = call()
    search._found_calls = [mine]
    traced: Any = Traced((1, 2, 4))
    search._compare([mine], traced)
    assert [each.operation.index for each in mine.kept] == [1]
    assert (mine.appeared, mine.untried, mine.prefers_graft) == (set(), ["r"], True)
    first = mine.before
    search._compare([mine], traced)
    assert [each.operation.index for each in mine.kept] == [1, 4]
    assert mine.appeared == {4}
    assert mine.before is first is not mine.lost
    assert mine.untried == ["r"]


def test_a_call_that_a_rank_did_not_trace_is_not_compared(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line_runs, "first_lost", lambda *_: pytest.fail("compared"))
    search._found_calls = [mine := call()]
    search._compare([mine], SimpleNamespace(target=[[None]], baseline=[[object()]]))
    assert mine.lost is None


@pytest.mark.parametrize("cut", [("baseline",), ("target",), ("baseline", "target")])
def test_a_call_that_a_trace_does_not_reach_is_not_compared(
    cut: tuple[str, ...], search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Every operation of the other side would be one that this side lacks.
    monkeypatch.setattr(line_runs, "first_lost", lambda *_: pytest.fail("compared"))
    search._found_calls = [mine := call()]
    own = {side: [[SimpleNamespace(is_cut_short=side in cut)]] for side in ("baseline", "target")}
    search._compare([mine], SimpleNamespace(**own))
    assert mine.lost is None
    assert mine.cut_short == cut


@pytest.mark.parametrize(
    ("row", "tolerance"),
    [
        ({"added": 1e-4, "floor": 1e-8}, 1e-6),
        ({"added": math.inf, "floor": 1e-8}, TOLERANCE),
        ({"added": 0.0, "floor": 1e-8}, TOLERANCE),
        ({"added": 1e-2, "floor": 0.0}, TOLERANCE),
        ({"added": 1.0, "floor": 1.0}, TOLERANCE),
        ({"added": 1e-30, "floor": 1e-30}, _SMALLEST_TOLERANCE),
    ],
)
def test_equal_values_are_as_near_as_the_floor_and_the_difference_allow(row: dict[str, Any], tolerance: float) -> None:
    mine = call()
    mine.row.update(row)  # type: ignore[attr-defined]
    assert mine.tolerance == pytest.approx(tolerance)
    mine.row.update(cast="float32 -> bfloat16", dtype="bfloat16")  # type: ignore[attr-defined]
    assert mine.tolerance > 1e-3


# ---- what is tried next ----------------------------------------------------------------------------------------------


@pytest.fixture
def grafts(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The next graft of each group."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(TracedCall, "next_graft", lambda each: found.get(each.group, {}))
    return found


def test_each_unsettled_call_gets_its_next_operation(search: Any, grafts: dict[str, Any]) -> None:
    grafts.update({"a": {1: 10}, "b": {2: 20}, "c": {3: 30}, "d": {4: 40}})
    calls = [
        call("a", lost=on_both()),
        call("b", lost=on_both(), is_settled=True),
        call("c", lost=on_both(), is_worst=False),
        call("d"),
    ]
    assert search._choose(calls, Traced((1,), (2,), (3,), (4,))) == calls[:1]
    assert [each.grafts for each in calls] == [[{1: 10}], [], [], []]


def test_an_operation_that_leads_to_several_calls_is_grafted_for_one_at_a_time(
    search: Any, grafts: dict[str, Any]
) -> None:
    grafts.update({"a": {1: 10}, "b": {2: 20}})
    calls = [call(name, lost=on_both()) for name in "ab"]
    assert search._choose(calls, Traced((1, 2), (2,))) == calls[:1]
    calls = [call(name, lost=on_both()) for name in "ab"]
    assert search._choose(calls, Traced((1,), (1, 2))) == calls[:1]
    calls = [call(name, lost=on_both()) for name in "ab"]
    assert search._choose(calls, Traced((1,), (2,))) == calls


def test_calls_share_a_run_if_it_changes_the_operations_of_each_alike(search: Any, grafts: dict[str, Any]) -> None:
    def chosen(first: dict[str, Any], second: dict[str, Any], *slices: tuple[int, ...]) -> int:
        grafts.update({"a": first.pop("graft", {}), "b": second.pop("graft", {})})
        return len(
            search._choose([call("a", lost=on_both(), **first), call("b", lost=on_both(), **second)], Traced(*slices))
        )

    assert chosen({"graft": {1: 10}}, {"graft": {1: 10}}, (1,), (1,)) == 2
    # The second call's other operation comes after what the first call shows.
    assert chosen({"graft": {1: 10}}, {"graft": {1: 10, 2: 20}}, (1,), (1, 2)) == 2
    assert chosen({"graft": {1: 10}}, {"graft": {1: 10, 2: 20}}, (1, 2), (1, 2)) == 1
    assert chosen({"graft": {1: 10}}, {"graft": {1: 11}}, (1,), (1,)) == 1
    earlier = {"graft": {2: 20}, "grafts": [{1: 10}]}
    assert chosen({"graft": {2: 20}}, earlier, (2,), (1, 2)) == 2
    assert chosen({"graft": {2: 20}}, earlier, (1, 2), (1, 2)) == 1
    assert chosen({"untried": [remedy()]}, {"untried": [remedy()]}, (7,), (7,)) == 2
    other = remedy(changes={7: ("passed", 3)})
    assert chosen({"untried": [remedy()]}, {"untried": [other]}, (7,), (7,)) == 1
    assert chosen({"untried": [remedy()]}, {"graft": {7: 70}}, (7,), (7,)) == 1
    leaves_out = {"grafts": [{1: 10}, {2: 20}], "is_to_leave_out": True}
    assert chosen({"graft": {2: 20}}, leaves_out, (2,), (1, 2)) == 2
    assert chosen({"graft": {1: 10}}, leaves_out, (1,), (1, 2)) == 1


def test_remedies_come_first_unless_a_counterpart_is_preferred(search: Any, grafts: dict[str, Any]) -> None:
    grafts["a"] = {1: 10}
    mine = call("a", lost=on_both(), untried=[remedy(), remedy()])
    search._choose([mine], Traced((1,)))
    assert mine.trying is not None
    assert (len(mine.untried), mine.grafts) == (1, [])
    mine = call("a", lost=on_both(), untried=[remedy()], prefers_graft=True)
    search._choose([mine], Traced((1,)))
    assert (mine.trying, mine.grafts) == (None, [{1: 10}])
    grafts.clear()
    mine = call("a", lost=on_both(), untried=[remedy()], prefers_graft=True)
    search._choose([mine], Traced((1,)))
    assert mine.trying is not None
    assert search._choose([call("a", lost=on_both())], Traced((1,))) == []


def test_operations_are_grafted_up_to_a_limit(search: Any, grafts: dict[str, Any]) -> None:
    grafts["a"] = {9: 90}
    full = [{n: n} for n in range(line_runs.MOST_GRAFTS)]
    assert search._choose([call("a", lost=on_both(), grafts=list(full))], Traced((9,))) == []
    mine = call("a", lost=on_both(), grafts=full[:-1])
    assert search._choose([mine], Traced((9,))) == [mine]
    assert mine.grafts[-1] == {9: 90}


def test_the_first_of_two_operations_is_left_out_to_see_whether_it_is_needed(search: Any) -> None:
    mine = call("a", lost=on_both(), grafts=[{1: 10}, {2: 20}], is_to_leave_out=True)
    assert search._choose([mine], Traced((1, 2))) == [mine]
    assert (mine.left_out, mine.grafts) == ({1: 10}, [{2: 20}])


# ---- what a run shows ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "agrees", "confirmed", "settled", "leaves_out"),
    [
        # A single operation with which the tap agrees is the fault.
        ({"grafts": [{1: 10}]}, True, {1}, True, False),
        ({"grafts": [{1: 10}]}, None, set(), True, False),
        # Of two, the first is left out next, unless the second read equal values only since.
        ({"grafts": [{1: 10}, {2: 20}]}, True, set(), False, True),
        ({"grafts": [{1: 10}, {2: 20}], "appeared": {2}}, True, {1, 2}, True, False),
        ({"grafts": [{1: 10}, {2: 20}], "appeared": {1}}, True, set(), False, True),
        ({"grafts": [{1: 10}, {2: 20}]}, None, set(), True, False),
        ({"grafts": [{1: 10}, {2: 20}, {3: 30}]}, True, set(), True, False),
        # The third one does not make the tap's value, and which of three is needed takes more than one run.
        ({"grafts": [{3: 30}, {1: 10}, {2: 20}]}, True, set(), True, False),
        # The last operation of the three makes the tap's own value, so that its graft says nothing of earlier ones.
        ({"grafts": [{3: 30}]}, True, {3}, True, False),
        ({"grafts": [{1: 10}, {3: 30}], "appeared": {3}}, True, set(), True, False),
        ({"grafts": [{1: 10}, {3: 30}]}, True, set(), True, False),
        ({"grafts": [{2: 20}], "left_out": {1: 10}}, True, {2}, True, False),
        ({"grafts": [{2: 20}], "left_out": {1: 10}}, False, {1, 2}, True, False),
        ({"grafts": [{2: 20}], "left_out": {1: 10}}, None, {1, 2}, True, False),
    ],
)
def test_what_is_confirmed_follows_from_whether_the_tap_agrees_now(
    given: dict[str, Any], agrees: bool | None, confirmed: set[int], settled: bool, leaves_out: bool, search: Any
) -> None:
    mine = call("a", **given)
    search.agreeing["a"] = agrees
    search._traced, search._found_calls = Traced((1, 2, 3)), [mine]
    search._judge([mine], search._traced)
    assert (mine.confirmed, mine.is_settled, mine.is_to_leave_out) == (confirmed, settled, leaves_out)
    assert not search._not_confirmed


def test_a_remedy_with_which_the_tap_agrees_is_the_cure(search: Any) -> None:
    tried = remedy()
    for agrees in (True, False, None):
        mine = call("a", trying=tried)
        search.agreeing["a"] = agrees
        search._judge([mine], Traced((1,)))
        assert mine.trying is None
        assert (mine.cure, mine.is_settled) == ((tried, True) if agrees else (None, False))


def test_a_tap_that_still_differs_is_compared_again(search: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[Any] = []
    monkeypatch.setattr(search, "_compare", lambda calls, traced: compared.extend(calls))
    mine = call("a", grafts=[{1: 10}])
    search.agreeing["a"] = False
    search._judge([mine], Traced((1,)))
    assert (compared, mine.is_settled) == ([mine], False)
    monkeypatch.setattr(search, "_is_as_before", lambda each, traced: False)
    search.agreeing["a"] = True
    search._judge([mine], Traced((1,)))
    assert (mine.confirmed, mine.is_settled, search._not_confirmed) == (set(), True, True)


def test_a_line_whose_run_failed_is_reported_as_not_confirmed_with_the_reason(
    search: Any, monkeypatch: pytest.MonkeyPatch, grafts: dict[str, Any]
) -> None:
    def fails(*_: object) -> object:
        raise RunError(
            "run 3 failed on target[0]", {"target[0]": "index 9 is out of bounds\nmore", "target[1]": "died"}
        )

    monkeypatch.setattr(search, "_trace", fails)
    mine = call("a", lost=on_both(), kept=[lost(1, is_suspect=False)])
    grafts["a"] = {1: 10}
    search._found_calls, search._traced, search._not_traced = [mine], Traced((1,)), ""
    search._runs = SimpleNamespace(count=0)
    search.confirm()
    assert (mine.confirmed, mine.is_settled) == (set(), True)
    (said,) = search.remarks
    assert said.endswith(
        " is not confirmed: the run with the baseline's value there failed (target[0]: index 9 is out of bounds; "
        "target[1]: died)."
    )
    assert said.startswith(str(mine.kept[0].operation.frames[0]))


def test_what_is_changed_for_a_call_is_its_remedy_or_all_of_its_grafts() -> None:
    mine = call("a", grafts=[{1: 10}, {2: 20, 3: 30}])
    assert mine.grafted == {1: 10, 2: 20, 3: 30}
    assert (set(mine.changes), mine.shown_on_baseline) == ({1, 2, 3}, {10, 20, 30})
    assert len(mine.taps) == 3
    mine.trying = remedy(grafted={5: 50}, partner=60, fed=(9, 8))
    assert (mine.grafted, set(mine.changes), mine.shown_on_baseline) == ({5: 50}, {7}, {50, 60})
    assert f"{LINE_TAP}.60.before.8" in mine.taps
    assert len(mine.taps) == 2
    mine.trying = remedy(grafted={5: 50})
    assert (len(mine.taps), mine.shown_on_baseline) == (1, {50})


def test_the_counterpart_of_the_targets_first_operation_leads_on_the_baseline() -> None:
    baseline = [lost(1), lost(2)]
    assert _with_counterpart(baseline, []) == baseline
    assert _with_counterpart(baseline, [lost(5)]) == baseline
    assert _with_counterpart(baseline, [lost(5, counterpart=operation(2))]) == baseline[::-1]
    added, *rest = _with_counterpart(baseline, [lost(5, counterpart=operation(3))])
    assert (added.operation.index, rest) == (3, baseline)


def test_lines_that_appeared_later_are_shown_only_where_none_is_confirmed(search: Any) -> None:
    search._traced = None
    first, later = (
        LostOperation(_traced(line), has_equal_inputs=True, follows_inputs=True, is_later=line > 1) for line in (1, 2)
    )

    def shown(**given: Any) -> list[tuple[int, bool]]:
        mine = call("a", before=on_both(first, later), kept=[first], **given)
        mine.wanted = SimpleNamespace(name="a", step=0, occurrence=0)
        mine.is_on_some_ranks = True
        return [(each.line, each.confirmed) for each in lines_of(mine, partial(search._ranks_that_run, mine))]

    # Without the parts of other ranks, right values seem to be lost.
    assert shown() == []
    assert shown(confirmed={1}) == [(1, True)]
    cured = SimpleNamespace(side="target", operation=_traced(3), is_one_sided=False, reader=None)
    assert shown(cure=cured) == [(3, True), (1, False)]


def test_where_a_state_was_written_is_said_if_it_was_seen() -> None:
    assert _written(SimpleNamespace(writer=None)) == ""  # type: ignore[arg-type]
    assert _written(SimpleNamespace(writer=SimpleNamespace(frames=(), step=1))) == ""  # type: ignore[arg-type]


class Frame:
    source = "cache[:] = x"

    def __str__(self) -> str:
        return "model.py:7"


def test_the_line_that_wrote_a_state_has_its_step() -> None:
    writer = SimpleNamespace(frames=(Frame(),), step=4)
    assert _written(SimpleNamespace(writer=writer)) == "in step 4 by model.py:7  cache[:] = x"  # type: ignore[arg-type]


def test_a_run_that_fails_is_followed_by_one_of_the_next_change(
    search: Any, monkeypatch: pytest.MonkeyPatch, grafts: dict[str, Any]
) -> None:
    runs: list[tuple[list[str], Any]] = []
    traced = [Traced((1,), (2,)) for _ in range(MOST_CONFIRMING_RUNS + 1)]

    def trace(why: str, calls: Any, changed: Any) -> Any:
        runs.append(([each.group for each in changed], why))
        if len(runs) == 1:
            raise RunError("run 3 failed on target[0]", {"target[0]": "boom"})
        return traced[len(runs) - 1]

    judged: list[Any] = []
    compared: list[Any] = []
    monkeypatch.setattr(search, "_trace", trace)
    monkeypatch.setattr(search, "_judge", lambda chosen, again: judged.append(again))
    choose = search._choose
    monkeypatch.setattr(search, "_choose", lambda calls, now: compared.append(now) or choose(calls, now))
    # The first change is a remedy, after which the graft is tried.
    mine = call("a", lost=on_both(), untried=[remedy()])
    grafts["a"] = {1: 10}
    search._found_calls, search._traced, search._not_traced = [mine], traced[0], ""
    search._runs = SimpleNamespace(count=0)
    search.confirm()
    assert judged[0] is traced[1]
    assert [groups for groups, _ in runs[:2]] == [["a"], ["a"]]
    # Each run is planned from the operations of the one before it.
    assert compared[:3] == [traced[0], traced[0], traced[1]]


def test_a_call_of_a_rank_is_compared_with_the_same_rank_if_both_sides_have_as_many(
    search: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[tuple[int, int, int]] = []

    def first(found: list[Any], others: list[Any], own: int, tolerance: float) -> Any:
        compared.append((len(found), len(others), own))
        return on_both()

    monkeypatch.setattr(line_runs, "first_lost", first)
    monkeypatch.setattr(line_runs, "lost_where_ranks_differ", lambda lost, found, others, own, tolerance: (lost, own))
    monkeypatch.setattr(line_runs, "_has_counterpart", lambda each: False)
    trace = SimpleNamespace(is_cut_short=False)

    def compare(baseline: list[Any], target: list[Any]) -> TracedCall:
        mine = call()
        mine.rank = 1
        search._found_calls = [mine]
        search._compare([mine], SimpleNamespace(baseline=[[e] for e in baseline], target=[[e] for e in target]))
        return mine

    # On a stage of a pipeline that the other side has on another rank, operations are no counterparts.
    assert compare([trace, None], [None, trace]).lost is None
    mine = compare([None, trace], [None, trace])
    assert mine.lost is not None
    assert (mine.rank, mine.is_on_some_ranks) == (1, True)
    assert compare([trace], [None, trace]).lost is not None
    assert compared == [(1, 1, 0), (1, 1, 0)]


def test_the_ranks_that_run_a_line_are_those_of_the_whole_side(search: Any) -> None:
    mine, line = call(), operation(4)
    search._found_calls = [mine]
    runs, lacks = (SimpleNamespace(operations=[each]) for each in (operation(4), operation(5)))

    def ranks(*traces: Any) -> tuple[int, ...]:
        search._traced = SimpleNamespace(target=[[each] for each in traces], baseline=[])
        return tuple(search._ranks_that_run(mine, "target", line))

    assert ranks(None, runs, lacks, runs) == (1, 3)
    # Those that do not reach the call at all are no exception.
    assert ranks(None, runs, runs) == ()


def test_the_first_operation_of_a_trace_is_shown_as_the_others_are() -> None:
    changed = {side: [OperationChanges(), OperationChanges()] for side in SIDES}
    search: Any = SimpleNamespace(_index_on=lambda call, side, own, index, rank: index + rank if rank == own else None)
    LineSearch._show(search, changed, SimpleNamespace(), {"baseline": 0, "target": 1}, 0, 6, "tap")  # type: ignore[arg-type]
    assert [[each.shown for each in changed[side]] for side in SIDES] == [[{0: "tap"}, {}], [{}, {7: "tap"}]]
    LineSearch._show(search, changed, SimpleNamespace(), {"baseline": 0, "target": 1}, 3, None, "one")  # type: ignore[arg-type]
    assert [[each.shown for each in changed[side]] for side in SIDES] == [[{0: "tap", 3: "one"}, {}], [{}, {7: "tap"}]]
