"""Which calls are traced for lines, with what, and which lines are reported, with operations that no rank computes."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from graftlab.errors import RunError
from graftlab.judging import line_reports, line_runs
from graftlab.judging.line_reports import why_not_confirmed
from graftlab.judging.line_runs import LineSearch, _has_counterpart, _what_ran
from graftlab.judging.traced_call import TracedCall, fed_tap_of, tap_of
from graftlab.lines.lost import LostOperation, StateRead
from graftlab.verdict.lines import MOST_LINES


def operation(index: int, line: int | None = None, name: str = "add", **more: Any) -> Any:
    """An operation in this line of model.py, in none if it is 0; by default in that of its index."""
    number = index if line is None else line
    frames = tuple(SimpleNamespace(file="model.py", line=n, source=f"line {n}") for n in (number, 99)) if number else ()
    usual = {"call": f"{name}(x)", "arguments": (), "shapes": ((2,),), "is_random": False, "inputs": (1,)}
    usual |= {"is_collective": False, "only_arranges": False}
    return SimpleNamespace(index=index, name=name, frames=frames, **{**usual, **more})


def lost(index: int, line: int | None = None, of: dict[str, Any] | None = None, **more: Any) -> Any:
    usual = {"has_equal_inputs": True, "follows_inputs": True}
    return LostOperation(operation(index, line, **(of or {})), **{**usual, **more})  # type: ignore[arg-type]


def on_both(target: Any = (), baseline: Any = (), remedies: Any = ()) -> Any:
    return SimpleNamespace(target=list(target), baseline=list(baseline), remedies=remedies)


def call(group: str = "g", **given: Any) -> TracedCall:
    row = {"added": 1e-2, "floor": 1e-6, "floor_max": 1e-6, "cast": None, "dtype": "float32", "rank": 1}
    wanted: Any = SimpleNamespace(name=group, step=2, occurrence=3)
    return TracedCall(group, row, wanted, given.pop("is_worst", True), **given)


FRAME = pd.DataFrame(
    [
        # name, group, step, order, added, ratio
        ("b", "g", 0, 5, 0.1, 9.0),
        ("a", "g", 1, 1, 0.3, 9.0),
        ("c", "g", 0, 2, 0.2, 9.0),
        ("d", "g", 0, 1, 0.9, 2.0),
        ("e", "h", 0, 6, 0.1, 9.0),
    ],
    columns=["name", "group", "step", "order", "added", "ratio"],
)
FRAME["tags"] = [{} for _ in range(len(FRAME))]
FRAME["occurrence"], FRAME["rank"] = 0, 1


class Runs:
    """Traced runs that are given in their order."""

    def __init__(self, *traced: Any) -> None:
        self.left, self.asked, self.count = list(traced), [], 0
        self.session = SimpleNamespace(options=SimpleNamespace(baseline=2, target=2))

    def traced(self, why: str, filters: Any, wanted: Any, grafted: Any, changes: Any, only: Any) -> Any:
        self.asked.append(SimpleNamespace(**{k: v for k, v in locals().items() if k != "self"}))
        self.count += 1
        found = self.left.pop(0)
        if isinstance(found, Exception):
            raise found
        return found


class Traced:
    """A traced run of two ranks on each side."""

    without_fingerprint = False

    def __init__(self, name: str, *calls: Any) -> None:
        self.name, self.rows, self.needed = name, pd.DataFrame({"step": [0]}), frozenset({name})
        self.baseline = self.target = [list(calls), list(calls)]
        self.earlier: Any = None

    def beside(self, first: Any) -> Any:
        self.earlier = first
        return self


def search(*traced: Any) -> Any:
    return LineSearch(Runs(*traced), FRAME, 5.0, "one sided")  # type: ignore[arg-type]


# ---- which calls are traced ------------------------------------------------------------------------------------------


def test_of_a_group_the_worst_call_and_the_first_are_traced() -> None:
    made = search()
    worst, first = made._calls("g")
    assert (worst.wanted.name, worst.wanted.step, worst.wanted.order, worst.is_worst) == ("a", 1, 1, True)
    assert (first.wanted.name, first.wanted.step, first.wanted.order, first.is_worst) == ("c", 0, 2, False)
    assert [each.wanted.name for each in made._calls("h")] == ["e"]
    assert made._calls("nowhere") == []


def test_the_first_groups_are_traced_with_all_taps_grafted(monkeypatch: pytest.MonkeyPatch) -> None:
    made = search(traced := Traced("first", None, None, None))
    compared: list[Any] = []
    made._compare = lambda calls, run: compared.extend(each.wanted.name for each in calls)
    made._agrees = lambda each, rows: each.wanted.name == "c"
    monkeypatch.setattr(line_runs, "MOST_GROUPS", 1)
    assert made.trace(["g", "h"], keep="kept") is traced.rows
    (asked,) = made._runs.asked
    assert [each.name for each in asked.wanted] == ["a", "c"]
    assert (asked.filters.b2t, asked.filters.keep, asked.filters.leaving) == ("True", "kept", "one sided")
    assert (asked.only, len(asked.grafted)) == (None, 5)
    # A tap that agrees when it is traced has no operation to blame.
    assert compared == ["a"]
    assert [each.is_settled for each in made._found_calls] == [False, True]
    assert made.trace([]) is None
    assert len(made._runs.asked) == 1
    refused = search("the ranks differ")
    assert refused.trace(["g"]) is None
    assert refused.remarks == ["No line of source is named: the ranks differ."]


def test_a_later_run_is_read_beside_the_first_whose_fingerprints_it_lacks() -> None:
    first, later, again = Traced("first"), Traced("later"), Traced("again")
    made = search(first, later)
    made._traced = made._trace("why", [])
    assert (made._traced, first.earlier) == (first, None)
    assert made._trace("why", []) is later
    assert later.earlier is first
    assert [each.only for each in made._runs.asked] == [None, first.needed]
    # Other operations lead to the taps now, so the run is made once more, with what it needs.
    lacking = Traced("lacking")
    lacking.without_fingerprint = True
    made = search(lacking, again)
    made._traced = first
    assert made._trace("why", []) is again
    assert again.earlier is first
    assert [each.only for each in made._runs.asked] == [first.needed, lacking.needed]
    assert made._runs.asked[1].why == "why, again"
    made = search(lacking, again)
    assert made._trace("why", []) is again
    assert again.earlier is lacking
    made = search("other ranks")
    made._traced = first
    assert made._trace("why", []) == "other ranks"


def test_the_changes_of_a_call_are_made_on_each_rank_that_runs_its_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    made = search()
    moved = {("target", 0, 4): 5, ("baseline", 0, 40): None}

    def index_on(call: Any, side: str, own: int, index: int, rank: int) -> int | None:
        return index if rank == own else moved.get((side, rank, index), 7)

    monkeypatch.setattr(made, "_index_on", index_on)
    mine = call(grafts=[{4: 40}])
    changes = made._changes([mine])
    tap = tap_of(4, 40)
    assert [each.shown for each in changes["target"]] == [{5: tap}, {4: tap}]
    assert [each.shown for each in changes["baseline"]] == [{}, {40: tap}]
    remedy = SimpleNamespace(
        grafted={}, partner=60, changes={4: "fed"}, fed={4: 1}, passed={6: 0}, operation=operation(4)
    )
    mine.trying = remedy  # type: ignore[assignment]
    changes = made._changes([mine])
    name = fed_tap_of(mine.trying)  # type: ignore[arg-type]
    # The other rank runs the operation at another place: its change would reach something else.
    assert [(each.passed, each.fed) for each in changes["target"]] == [({}, {}), ({6: 0}, {4: (1, name)})]
    assert [each.shown for each in changes["baseline"]] == [{60: name} if r else {7: name} for r in (0, 1)]
    assert [each.shown for each in changes["target"]] == [{}, {}]
    # With different numbers of ranks the baseline's values are those of its first rank.
    made._runs.session.options = SimpleNamespace(baseline=1, target=2)
    mine.trying = None
    assert [each.shown for each in made._changes([mine])["baseline"]] == [{40: tap}]


def test_an_operation_is_found_on_another_rank_by_its_place_in_the_code() -> None:
    made = search()
    ours = SimpleNamespace(places={"line 4": operation(4)})
    theirs = SimpleNamespace(places={"line 4": operation(9)})
    mine = call()
    made._found_calls = [mine]
    assert made._index_on(mine, "target", 1, 4, 0) == 4
    made._traced = SimpleNamespace(target=[[theirs], [ours]])
    assert made._index_on(mine, "target", 1, 4, 1) == 4
    assert made._index_on(mine, "target", 1, 4, 0) == 9
    assert made._index_on(mine, "target", 1, 5, 0) is None
    theirs.places.clear()
    assert made._index_on(mine, "target", 1, 4, 0) is None
    made._traced.target[0] = [None]
    assert made._index_on(mine, "target", 1, 4, 0) is None


# ---- confirming ------------------------------------------------------------------------------------------------------


def test_a_certain_remedy_needs_no_run_and_one_run_is_left_for_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    certain, doubtful = SimpleNamespace(is_certain=True), SimpleNamespace(is_certain=False)
    first, second = call(untried=[certain, doubtful]), call(untried=[doubtful, certain])
    made = search()
    made._found_calls, made._traced = [first, second], Traced("first")
    made._choose = lambda calls, traced: chosen
    judged: list[Any] = []
    made._judge = lambda chosen, traced: judged.append((chosen, traced.name))
    chosen: list[Any] = []
    made.confirm()
    assert (first.cure, first.is_settled, second.cure) == (certain, True, None)
    chosen = [second]
    made._runs.left = [Traced(f"run {n}") for n in range(9)]
    made.confirm()
    assert [name for _, name in judged] == [f"run {n}" for n in range(line_runs.MOST_CONFIRMING_RUNS)]
    made._runs.count = line_runs.MOST_RUNS - 3
    judged.clear()
    made.confirm()
    assert len(judged) == 2
    made._runs.count, made._runs.left = 0, ["other operations"]
    made.confirm()
    assert made._not_confirmed
    assert len(judged) == 2


def test_a_run_that_fails_gives_up_its_change_and_the_others_are_tried() -> None:
    mine = call(grafts=[{1: 10}, {2: 20}], left_out={3: 30})
    mine.give_up_change(RunError("failed", {"target[0]": "index 9\nmore"}))
    assert (mine.grafts, mine.left_out, mine.is_settled, mine.raised) == ([], None, True, "target[0]: index 9")
    tries = call(trying=SimpleNamespace())  # type: ignore[arg-type]
    tries.give_up_change(RunError("failed", {"target[0]": "first"}))
    tries.give_up_change(RunError("failed", {"target[0]": "second"}))
    assert tries.raised == "target[0]: first"
    settled = call(trying=SimpleNamespace())  # type: ignore[arg-type]
    settled.give_up_change(RunError("failed", {}))
    assert (settled.is_settled, settled.trying) == (False, None)
    made = search(OSError("a defect"))
    made._found_calls, made._traced, made._choose = [mine], Traced("first"), lambda calls, traced: [mine]
    with pytest.raises(OSError, match="a defect"):
        made.confirm()


def test_a_line_is_grafted_only_whole_and_from_equal_inputs() -> None:
    def following(*target: Any, grafts: Any = ()) -> Any:
        return call(lost=on_both(target), grafts=list(grafts)).next_graft()

    one, same_line, other = lost(1, 1, partner=10), lost(2, 1, partner=20), lost(3, 3, partner=30)
    assert following(one, same_line, other) == {1: 10, 2: 20}
    assert following(one, same_line, other, grafts=[{1: 10, 2: 20}]) == {3: 30}
    assert following(lost(1, 1, is_later=True, partner=10), other) == {3: 30}
    assert following() == {}
    assert following(lost(1, 0, partner=10), other) == {}
    assert following(one, lost(2, 1), other) == {}
    assert following(one, lost(2, 1, partner=20, has_equal_inputs=False)) == {}


def test_a_counterpart_does_the_same_or_is_all_that_the_baseline_lost() -> None:
    def has(target: Any, baseline: Any) -> bool:
        return _has_counterpart(on_both(target, baseline))

    mul, add = lost(7, of={"name": "mul"}), lost(8, of={"name": "add"})
    assert not has([], [mul])
    assert not has([lost(1)], [mul])
    assert not has([lost(1, is_later=True, partner=7)], [mul])
    assert has([lost(1, partner=8), lost(2)], [mul, add])
    assert not has([lost(1, partner=7), lost(2)], [mul, add])
    assert has([lost(1, partner=7)], [mul])
    assert has([lost(1, partner=7), lost(2, is_later=True)], [mul])
    # A partner that was not lost.
    assert has([lost(1, partner=9), lost(2)], [mul, add])


# ---- whether the tap agrees now --------------------------------------------------------------------------------------


def test_a_tap_agrees_by_the_row_of_its_call_and_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    made = search()
    mine = call("a")
    mine.wanted.is_at = lambda which, step, occurrence: (step, occurrence) == (2, 3)  # type: ignore[misc]
    usual = {"name": "a", "tags": {}, "status": "grafted", "step": 7, "occurrence": 3, "rank": 1, "over": 1.0}
    monkeypatch.setattr(line_runs, "ratio", lambda row, floor: row["over"])

    def agrees(**changes: Any) -> Any:
        begin = {**usual, "name": "b", "step": 5}
        return made._agrees(mine, pd.DataFrame([begin, {**usual, **changes}]))

    assert agrees() is True
    assert agrees(over=9.0) is False
    for other in ({"rank": 0}, {"step": 8}, {"occurrence": 0}, {"status": "missing"}, {"name": "c"}):
        assert agrees(**other) is None
    mine.grafts = [{4: 40}]
    assert agrees() is None
    assert made._agrees(mine, pd.DataFrame([{**usual, "step": 5}, usual, {**usual, "name": tap_of(4, 40)}])) is True


def test_changes_count_only_if_the_same_operations_ran_again() -> None:
    made = search()
    mine = call(grafts=[{4: 40}])
    made._found_calls = [mine]

    def traced(*indices: int, name: str = "add") -> Any:
        return Traced("run", SimpleNamespace(operations=[operation(each, name=name) for each in indices]))

    made._traced = traced(1, 4, 40)
    assert made._is_as_before(mine, traced(2, 4, 40))
    assert not made._is_as_before(mine, traced(1, 4, 40, name="mul"))
    assert not made._is_as_before(mine, traced(4))
    assert not made._is_as_before(mine, traced(40))
    assert not made._is_as_before(mine, Traced("run", None))
    assert _what_ran(None, frozenset({1})) is None
    found = _what_ran(SimpleNamespace(operations=[operation(1, 0), operation(2)]), frozenset({1, 2}))  # type: ignore[arg-type]
    assert found is not None
    assert [(index, len(frames)) for index, _, frames in found] == [(1, 0), (2, 1)]  # type: ignore[arg-type]


# ---- the report ------------------------------------------------------------------------------------------------------


def lines_of(mine: TracedCall) -> Any:
    return line_reports.lines_of(mine, partial(search()._ranks_that_run, mine))


def places(lines: Any) -> list[tuple[str, int]]:
    return [(each.side, each.line) for each in lines]


def test_confirmed_lines_come_first_and_later_ones_only_without_them() -> None:
    first, second, later = lost(1), lost(2), lost(3, is_later=True)
    before = on_both([first, second, later], [lost(8), lost(9, is_later=True)])
    assert places(lines_of(call(before=before))) == [("target", 1), ("target", 2), ("target", 3), ("baseline", 8)]
    found = lines_of(call(before=before, kept=[first, second], confirmed={2}))
    assert places(found) == [("target", 2), ("target", 1), ("baseline", 8)]
    assert [each.confirmed for each in found] == [True, False, False]
    assert lines_of(call()) == []


def test_a_line_has_all_that_was_found_about_its_operation() -> None:
    written = SimpleNamespace(step=4, frames=operation(6).frames)
    state = (StateRead("cache", written), StateRead("scale"))  # type: ignore[arg-type]
    mine = lost(1, is_suspect=True, lacks_sum=True, state=state, of={"arguments": ("dim=1",)})
    (line,) = lines_of(call(before=on_both([mine])))
    assert (line.group, line.tap, line.step, line.occurrence, line.rank) == ("g", "g", 2, 3, 1)
    assert (line.file, line.line, line.source) == ("model.py", 1, "line 1")
    assert (line.operation, line.arguments, line.shapes) == ("add(x)", ("dim=1",), ((2,),))
    assert (line.is_suspect, line.lacks_sum, line.is_only_here, line.confirmed) == (True, True, False, False)
    assert line.state == ("cache", "scale")
    assert [each[:9] for each in line.written] == ["in step 4", ""]
    assert line.written[0].endswith("line 6")
    assert line.stack == mine.operation.frames
    assert not line.is_random
    assert not line.puts_constants
    (line,) = lines_of(call(before=on_both([lost(1, of={"is_random": True}, puts_constants=True)])))
    assert line.is_random
    assert line.puts_constants


def test_a_line_that_only_arranges_may_be_intended_unless_it_is_confirmed() -> None:
    view, add = lost(1, of={"only_arranges": True}), lost(2)
    assert [each.is_suspect for each in lines_of(call(before=on_both([view, add], [view])))] == [True, False, True]
    # Nor is its counterpart, which the baseline means.
    found = lines_of(call(before=on_both([view], [view]), kept=[view], confirmed={1}))
    assert [each.is_suspect for each in found] == [False, False]


def test_operations_of_one_line_are_one_line_which_any_of_them_confirms() -> None:
    found = lines_of(call(before=on_both([lost(1, 7), lost(2, 7), lost(3, 0)]), kept=[lost(2, 7)], confirmed={2}))
    assert [(each.line, each.confirmed) for each in found] == [(7, True)]
    also = call(before=on_both([lost(1, 7), lost(2, 7)]), kept=[lost(1, 7), lost(2, 7)], confirmed={1})
    assert [(each.line, each.confirmed) for each in lines_of(also)] == [(7, True)]
    at_last = call(before=on_both([lost(1, 7), lost(2, 7, is_later=True)]), kept=[lost(2, 7)])
    assert [(each.line, each.confirmed) for each in lines_of(at_last)] == [(7, False)]
    many = [lost(n) for n in range(1, MOST_LINES + 3)]
    assert places(lines_of(call(before=on_both(many)))) == [("target", n) for n in range(1, MOST_LINES + 1)]


def test_a_random_draw_is_confirmed_only_if_it_reads_something() -> None:
    for inputs, confirmed in (((), False), ((1,), True)):
        drawn = lost(1, of={"is_random": True, "inputs": inputs})
        plain = lost(1, of={"inputs": ()})
        assert lines_of(call(before=on_both([plain]), kept=[plain], confirmed={1}))[0].confirmed
        assert [each.confirmed for each in lines_of(call(before=on_both([drawn]), kept=[drawn], confirmed={1}))] == [
            confirmed
        ]


@pytest.mark.parametrize("side", ["target", "baseline"])
@pytest.mark.parametrize("is_one_sided", [True, False])
def test_a_cure_leads_its_side_and_later_lines_are_left_out(side: str, is_one_sided: bool) -> None:
    cure: Any = SimpleNamespace(operation=operation(5), side=side, is_one_sided=is_one_sided, reader=None)
    before = on_both([lost(1), lost(2, is_later=True)], [lost(8)])
    found = lines_of(call(before=before, cure=cure))
    of_side = [each for each in found if each.side == side]
    assert places(of_side) == [(side, 5), (side, 1 if side == "target" else 8)]
    assert [(each.confirmed, each.is_only_here) for each in of_side] == [(True, is_one_sided), (False, False)]
    (other,) = (each for each in found if each.side != side)
    assert (other.confirmed, other.is_only_here) == (False, False)


def test_what_reads_a_missing_result_comes_before_values_of_the_target_alone() -> None:
    cure: Any = SimpleNamespace(operation=operation(8), side="baseline", is_one_sided=True, reader=operation(6))
    found = lines_of(call(before=on_both([lost(1)], [lost(8)]), cure=cure))
    assert places(found) == [("target", 6), ("target", 1), ("baseline", 8)]
    assert [each.confirmed for each in found] == [False, False, True]
    # Once, also if it is lost itself.
    found = lines_of(call(before=on_both([lost(1), lost(6)], [lost(8)]), cure=cure))
    assert places(found) == [("target", 6), ("target", 1), ("baseline", 8)]


def test_a_line_of_two_calls_of_a_group_is_reported_once_where_the_first_has_it() -> None:
    made = search()
    worst = call(before=on_both([lost(1), lost(2)]), kept=[lost(1)], confirmed={1})
    first, other = call(before=on_both([lost(1), lost(3)])), call("h", before=on_both([lost(1)]))
    made._found_calls = [worst, first, other]
    assert [(each.group, each.line, each.confirmed) for each in made.lines] == [
        ("g", 1, True),
        ("g", 2, False),
        ("g", 3, False),
        ("h", 1, False),
    ]


def test_it_is_said_why_a_line_is_not_confirmed() -> None:
    def why(*kept: Any, **more: Any) -> str:
        return why_not_confirmed(call(kept=list(kept), **more))

    collective = lost(1, of={"is_collective": True})
    assert "a collective's result cannot be replaced" in why(collective)
    assert why(collective).startswith(str(collective.operation.frames[0]))
    assert "the baseline has no such summands" in why(lost(1, is_summand=True))
    assert why(lost(1, is_summand=True, partner=3)) == why(lost(1)) == why() == ""
    assert "failed (index 9)" in why(collective, raised="index 9")
    for more in ({"confirmed": {1}}, {"cure": SimpleNamespace()}):
        assert why(collective, **more) == ""
    assert why(lost(1, 0, of={"is_collective": True})) == ""
    # What may be intended is not the line that had to be confirmed.
    assert "a collective's" in why(lost(2, is_suspect=True), collective, lost(3))
    summand = lost(4, is_summand=True)
    assert "no such summands" in why(summand, lost(5, partner=6))
    assert why(lost(5), summand) == ""


def test_groups_that_agree_once_they_are_traced_have_no_line() -> None:
    made = search()
    agreeing, traced = call("a", is_settled=True), call("b", is_settled=True, lost=on_both())
    made._found_calls = [agreeing, traced, call("c")]
    (said,) = made.remarks
    assert said.startswith("Run eagerly, operation by operation, a agrees: no line of source is named, because")
    made._found_calls.append(call("d", is_settled=True))
    made._traced = Traced("first", SimpleNamespace(was_compiled=True), None)
    (said,) = made.remarks
    assert said.startswith("Run eagerly, operation by operation, a, d agree: compiling the target's code makes")
    made._found_calls = [traced]
    made._not_confirmed = True
    assert [each[:28] for each in made.remarks] == ["Lines could not be confirmed"]
    made._found_calls.append(call("e", cure=SimpleNamespace(), lost=on_both()))
    assert made.remarks == []


def test_groups_that_are_traced_in_part_have_no_line_and_the_reason_is_said() -> None:
    made = search()
    made._found_calls = [call("a", cut_short=("baseline",)), call("a", cut_short=("baseline",)), call("b")]
    assert made.remarks == [
        "No line of source is named for a: the baseline runs more operations before it than a trace records (50,000)."
    ]
    made._found_calls = [call("c", cut_short=("baseline", "target"))]
    (said,) = made.remarks
    assert said.startswith("No line of source is named for c: both sides run more operations before it")
