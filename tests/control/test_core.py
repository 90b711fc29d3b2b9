"""The parts of a session's core, and the core itself, with ranks that the test speaks for: no process is started."""

from __future__ import annotations

import os
import pickle
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock

import pytest
import torch
from kit.in_process import TalkingRank, a_row, talking_ranks
from kit.mailboxes import in_background
from kit.refusals import exactly
from kit.support import wait_until

import graftlab as gl
from graftlab.base import shipping
from graftlab.base.world import Place
from graftlab.control import closing
from graftlab.control import plans as plans_module
from graftlab.control import queries as queries_module
from graftlab.control.core import SessionCore, callees_of, replace_ranks
from graftlab.control.hub import MessageRouter
from graftlab.control.kept_pairs import PairsOnRanks
from graftlab.control.pickles import open_exception, open_value
from graftlab.control.plans import Plans
from graftlab.control.process_groups import ProcessGroups
from graftlab.control.queries import Queries
from graftlab.control.runs import Runs
from graftlab.control.tap_catalog import TapCatalog
from graftlab.control.work import WorkFactory, arguments
from graftlab.errors import GraftOverlapError, SessionBusyError, SessionClosedError, SessionError
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import to_wire
from graftlab.ranks.messages import (
    AskKeptInput,
    AskKeptMap,
    AskKeptPair,
    AskKeptTags,
    AskStacks,
    Call,
    Evaluate,
    Execute,
    Failure,
    Interrupt,
    KeptTags,
    KeptValue,
    Output,
    PlanAdopted,
    PlanUpdate,
    Query,
    Question,
    Refusal,
    Reply,
    RunDone,
    RunRequest,
    RunSettled,
    Shutdown,
    Stacks,
    TapSeen,
    pack,
)
from graftlab.ranks.options import LaunchOptions
from graftlab.rows.store import RowStore


@pytest.fixture
def ranks(tmp_path: Path) -> Iterator[list[TalkingRank]]:
    with talking_ranks(tmp_path, 1, 2) as made:
        yield made


def processes(ranks: list[TalkingRank]) -> list[Any]:
    return [each.rank for each in ranks]


# ---- work -----------------------------------------------------------------------------------------------------------


def test_each_callee_becomes_a_work_request_with_a_unique_file_name() -> None:
    works = WorkFactory()
    called = works.of("baseline", max, (1, 2), {"key": abs})
    assert isinstance(called, Call)
    assert shipping.unpack_call(called.packed) == (max, (1, 2), {"key": abs})
    evaluated, cell = works.of("target", "1 + 1", (), {}), works.of_cell("x = 1\nx")
    assert (evaluated, cell) == (Evaluate("1 + 1", "<graft cell 1>"), Execute("x = 1\nx", "<graft cell 2>"))


@pytest.mark.parametrize(
    ("args", "kwargs", "says"),
    [
        (
            torch.ones(1, 4),
            None,
            (
                "verdict: args= must be a tuple of all positional arguments, not Tensor; for a single one "
                "write args=(x,)"
            ),
        ),
        (
            5,
            None,
            ("verdict: args= must be a tuple of all positional arguments, not int; for a single one write args=(x,)"),
        ),
        (
            "text",
            None,
            ("verdict: args= must be a tuple of all positional arguments, not str; for a single one write args=(x,)"),
        ),
        (
            {"x": 1},
            None,
            ("verdict: args= must be a tuple of all positional arguments, not dict; for a single one write args=(x,)"),
        ),
        ((), [1], "verdict: kwargs= must be a dict of all arguments by name, not [1]"),
        ((), {1: 2}, "verdict: kwargs= must be a dict of all arguments by name, not {1: 2}"),
    ],
    ids=repr,
)
def test_a_single_argument_in_place_of_a_tuple_is_refused(args: Any, kwargs: Any, says: str) -> None:
    with pytest.raises(SessionError, match=exactly(says)):
        arguments("verdict", args, kwargs)


def test_arguments_become_a_tuple_and_a_dict() -> None:
    assert arguments("run", [1, 2], None) == ((1, 2), {})
    assert arguments("run", (), {"x": 1}) == ((), {"x": 1})


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda works: works.of("target", 3, (), {}), "target= must be a function or an expression, not int"),
        (lambda works: works.of("target", "f", (1,), {}), "takes no args"),
        (lambda works: works.of("target", "x = 1", (), {}), "the expression is not valid Python, so nothing was run"),
        (lambda works: works.of("target", "'\ud800'", (), {}), "the expression is not valid Python"),
        (lambda works: works.of_cell("def"), "the cell is not valid Python, so nothing was run"),
    ],
)
def test_invalid_work_is_refused_before_any_rank_begins(make: Any, says: str) -> None:
    with pytest.raises(SessionError, match=says):
        make(WorkFactory())


# ---- plans ----------------------------------------------------------------------------------------------------------


def test_a_published_plan_is_the_newest_and_reaches_every_rank(ranks: list[TalkingRank]) -> None:
    plans = Plans(processes(ranks))
    first = GraftPlan()
    second = first.edit(b2t="layer < 3", transform="def transform(g): return g.target")
    plans.publish(first)
    plans.publish(second)
    assert plans.newest is second
    assert plans.all() == [first, second]
    for each in ranks:
        assert [each.hear(), each.hear()] == [PlanUpdate(to_wire(first)), PlanUpdate(to_wire(second))]


def test_a_rank_that_has_just_joined_receives_the_newest_plan_last(
    ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = Plans(processes(ranks))
    first = GraftPlan()
    second = first.edit(b2t="layer < 3")
    made.publish(first)
    ranks[0].hear()
    # The session server sends the first plan to a rank while the notebook publishes the second.
    publisher = threading.Thread(target=made.publish, args=(second,))

    def published_meanwhile(message: PlanUpdate) -> bytes:
        if not publisher.ident:
            publisher.start()
            publisher.join(timeout=0.3)
        return pack(message)

    monkeypatch.setattr(plans_module, "pack", published_meanwhile)
    made.send_to(processes(ranks)[0])
    publisher.join()
    assert [ranks[0].hear(), ranks[0].hear()] == [PlanUpdate(to_wire(first)), PlanUpdate(to_wire(second))]


def test_adopted_has_the_step_from_which_each_rank_uses_a_plan(ranks: list[TalkingRank]) -> None:
    plans = Plans(processes(ranks))
    assert plans.adopted(1) == {}
    plans.note_adopted(PlanAdopted(1, 4), ranks[0].rank)
    plans.note_adopted(PlanAdopted(1, 5), ranks[2].rank)
    plans.note_adopted(PlanAdopted(2, 9), ranks[0].rank)
    assert plans.adopted(1) == {"baseline[0]": 4, "target[1]": 5}
    plans.adopted(1).clear()
    assert len(plans.adopted(1)) == 2, "another thread notes more, so the caller has a copy"
    plans.publish(PLAN)
    plans.publish_again()
    assert plans.adopted(1) == plans.adopted(2) == {}, "the ranks that used them are gone"


# ---- taps -----------------------------------------------------------------------------------------------------------


def test_a_tap_is_listed_once_for_all_ranks_and_steps(ranks: list[TalkingRank]) -> None:
    taps = TapCatalog()
    first = {"name": "attn", "step": 0, "side": "baseline", "rank": 0, "layer": 3}
    taps.note(TapSeen(first), ranks[0].rank)
    taps.note(TapSeen({**first, "step": 4, "side": "target", "rank": 1}), ranks[2].rank)
    taps.note(TapSeen({**first, "layer": 4}), ranks[0].rank)
    both = {"baseline_name": "attn", "target_name": "attn"}
    assert taps.all(GraftPlan()) == [{**first, **both}, {**first, "layer": 4, **both}]


def test_a_verdicts_own_taps_are_not_listed(ranks: list[TalkingRank]) -> None:
    taps = TapCatalog()
    for name in ("graftlab.line.60.46", "graftlab.lines"):
        taps.note(TapSeen({"name": name, "step": 0, "side": "target", "rank": 0}), ranks[2].rank)
    assert [tags["name"] for tags in taps.all(GraftPlan())] == ["graftlab.lines"]


def test_taps_are_listed_by_the_names_of_their_pairs(ranks: list[TalkingRank]) -> None:
    taps = TapCatalog()
    for side, name, rank in (("baseline", "a", ranks[0]), ("target", "b", ranks[2]), ("target", "a", ranks[2])):
        taps.note(TapSeen({"name": name, "step": 0, "side": side, "rank": 0}), rank.rank)
    listed = [(t["name"], t["baseline_name"], t["target_name"]) for t in taps.all(GraftPlan(pairs=[("a", "b")]))]
    assert listed == [("a", "a", "b"), ("a (target only)", None, "a")]
    # Under the names of a later plan, each once.
    assert [t["name"] for t in taps.all(GraftPlan())] == ["a", "b"]


# ---- runs -----------------------------------------------------------------------------------------------------------

WORK = Evaluate("1", "<graft cell 1>")
PLAN = GraftPlan().edit(b2t="True")


@pytest.fixture
def runs(ranks: list[TalkingRank], tmp_path: Path) -> Iterator[Runs]:
    rows = RowStore(tmp_path)
    yield Runs(processes(ranks), rows, list)
    rows.close()


def settle(runs: Runs, ranks: list[TalkingRank], run: int, next_step: int) -> None:
    for each in ranks:
        runs.note_done(RunDone(run, None, None), each.rank)
        runs.note_settled(RunSettled(run, next_step), each.rank)


def test_a_run_is_sent_to_its_participants_and_continues_the_steps(runs: Runs, ranks: list[TalkingRank]) -> None:
    run = runs.begin({0: WORK, 2: WORK}, PLAN)
    assert (run.number, runs.busy, runs.all()) == (0, True, [run])
    for each in (ranks[0], ranks[2]):
        request = each.hear()
        assert isinstance(request, RunRequest)
        assert (request.info.run, request.info.first_step, request.info.participants) == (0, 0, (0, 2))
        assert (request.plan, request.work) == (to_wire(PLAN), WORK)
    settle(runs, [ranks[0], ranks[2]], 0, next_step=7)
    assert run.done
    assert not runs.busy
    second = runs.begin({1: WORK}, PLAN)
    assert ranks[1].hear().info.first_step == 7
    settle(runs, [ranks[1]], 1, next_step=9)
    third = runs.begin({2: WORK}, PLAN)
    settle(runs, [ranks[2]], 2, next_step=9)
    assert (second.done, third.done) == (True, True)


def test_each_report_counts_for_the_run_that_it_names(runs: Runs, ranks: list[TalkingRank]) -> None:
    for number in range(2):
        runs.begin({0: WORK}, PLAN)
        settle(runs, ranks[:1], number, next_step=number)
    newest = runs.begin({0: WORK}, PLAN)
    runs.note_output(Output("printed"), ranks[0].rank)
    runs.remark("a remark")
    states = runs._states
    assert [len(state.output) for state in states] == [0, 0, 1]
    assert [state.remarks for state in states] == [[], [], ["a remark"]]
    assert runs.busy
    settle(runs, ranks[:1], 2, next_step=9)
    assert newest.done
    assert not runs.busy


def test_a_second_run_during_a_run_is_refused(runs: Runs, ranks: list[TalkingRank]) -> None:
    runs.begin({0: WORK}, PLAN)
    with pytest.raises(
        SessionBusyError,
        match=exactly(
            "run 0 is still running (baseline[0]: starting); wait for it with run.wait(), or stop its code "
            "with session.interrupt()"
        ),
    ):
        runs.begin({1: WORK}, PLAN)
    assert len(runs.all()) == 1


def test_a_rank_that_is_gone_is_named_with_its_log(runs: Runs, ranks: list[TalkingRank]) -> None:
    ranks[1].die(code=3)
    ranks[1].rank.alive = False
    with pytest.raises(
        SessionClosedError, match=r"target\[0\] is gone \(ended with exit code 3\).*\n.*last words of target\[0\]"
    ):
        runs.begin({0: WORK, 1: WORK}, PLAN)
    assert runs.all() == []
    runs.begin({0: WORK, 2: WORK}, PLAN)


def test_a_rank_that_dies_while_its_run_begins_is_noted(
    runs: Runs, ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = ranks[1].rank

    def dies_first(*args: Any, **kwargs: Any) -> gl.Run:
        ranks[1].die()
        rank.alive = False
        return gl.Run(*args, **kwargs)

    monkeypatch.setattr("graftlab.control.runs.Run", dies_first)
    run = runs.begin({1: WORK}, PLAN)
    assert run.done
    with pytest.raises(gl.RunError, match=r"target\[0\] died: killed by SIGKILL.*\n.*last words of target\[0\]"):
        run.wait()


def test_failures_while_the_session_closes_are_reported_as_its_end(
    runs: Runs, ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs.groups, "lost", lambda: {"target": "target[0] killed by SIGKILL"})
    run = runs.begin({0: WORK, 1: WORK}, PLAN)
    runs.note_done(RunDone(0, shipping.pack_result(7), None), ranks[0].rank)
    runs.close("the session was closed")
    runs.note_done(RunDone(0, None, Failure("RuntimeError", "a peer is gone", "")), ranks[1].rank)
    for each in ranks:
        runs.note_death(each.rank)
    assert run.baseline == [7]
    assert set(run.failures.values()) == {"the session was closed"}
    with pytest.raises(gl.RunError) as caught:
        run.wait()
    assert "restart" not in str(caught.value), "it would restart nothing"
    # New ranks have failures of their own again.
    runs.reopen(processes(ranks))
    again = runs.begin({0: WORK}, PLAN)
    runs.note_done(RunDone(1, None, Failure("RuntimeError", "their own", "")), ranks[0].rank)
    assert again.failing == {"baseline[0]": "RuntimeError: their own"}


def test_an_interrupt_signals_busy_ranks_and_messages_idle_ones(runs: Runs, ranks: list[TalkingRank]) -> None:
    for each, state in zip(ranks, ("running", "waiting", "idle"), strict=True):
        each.is_at(state)
    runs.interrupt()
    run = runs.begin({0: WORK, 1: WORK, 2: WORK}, PLAN)
    runs.interrupt()
    assert [each.signals for each in ranks] == [[signal.SIGINT], [signal.SIGINT], []]
    assert ranks[2].hear_a(Interrupt) == Interrupt(run.number)
    settle(runs, ranks, 0, next_step=1)
    runs.interrupt()
    assert [len(each.signals) for each in ranks] == [1, 1, 0]


# ---- queries --------------------------------------------------------------------------------------------------------


def answering(queries: Queries, rank: TalkingRank, answers: dict[type, Any]) -> Future[None]:
    """Answer the rank's next questions, one for each of ``answers``, by their type."""

    def answer() -> None:
        for _ in answers:
            query = rank.hear_a(Query)
            queries.on_reply(Reply(query.number, answers[type(query.question)]))

    return in_background(answer)


def test_each_answer_reaches_the_caller_that_asked(ranks: list[TalkingRank]) -> None:
    queries = Queries(60.0)
    asking = [in_background(lambda n=n: queries.ask(ranks[1].rank, AskKeptTags(bool(n)), KeptTags)) for n in range(2)]
    asked = [ranks[1].hear_a(Query) for _ in range(2)]
    for query in reversed(asked):
        queries.on_reply(Reply(query.number, KeptTags([{"failed": query.question.failed}])))
    assert [future.result(60).tags for future in asking] == [[{"failed": False}], [{"failed": True}]]
    queries.on_reply(Reply(asked[0].number, Stacks("too late, and no call waits for it")))


def test_a_refusal_or_a_wrong_answer_raises_an_error_that_names_the_rank(ranks: list[TalkingRank]) -> None:
    queries = Queries(60.0)
    answering(queries, ranks[1], {AskStacks: Refusal("ValueError: no")})
    with pytest.raises(SessionError, match=r"target\[0\]: ValueError: no"):
        queries.ask(ranks[1].rank, AskStacks(), Stacks)
    answering(queries, ranks[1], {AskStacks: KeptValue(None)})
    with pytest.raises(SessionError, match=r"target\[0\] answered AskStacks with KeptValue, not Stacks"):
        queries.ask(ranks[1].rank, AskStacks(), Stacks)


@pytest.mark.parametrize(
    ("question", "says"),
    [
        (AskKeptPair(cast("str", 3), {}), "Expected `str`, got `int` - at `$.question.name`"),
        (AskKeptMap("h", {}, cast("tuple[int, ...]", ("a",))), "Expected `int`, got `str` - at `$.question.dims[0]`"),
    ],
)
def test_a_question_that_a_rank_could_not_read_is_not_sent(
    question: Question, says: str, ranks: list[TalkingRank]
) -> None:
    queries = Queries(60.0)
    with pytest.raises(SessionError) as refused:
        queries.ask(ranks[1].rank, question, KeptValue)
    assert str(refused.value) == f"target[0] is not asked, because an argument has the wrong type: {says}"
    assert not queries._answers
    answering(queries, ranks[1], {AskStacks: Stacks("idle")})
    assert queries.ask(ranks[1].rank, AskStacks(), Stacks).text == "idle"


def test_a_rank_that_does_not_answer_is_named_with_where_it_is(
    ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries_module, "_ANSWER_TIMEOUT", 0.01)
    ranks[1].is_at("running", step=3)
    said = r"target\[0\] did not answer within 0.02 s \(computing .* of step 3\); session.stacks\(\) shows"
    with pytest.raises(SessionError, match=said):
        Queries(0.02).ask(ranks[1].rank, AskKeptTags(False), KeptTags)
    # A stack is small, so the session's timeout does not apply to it, nor is a look at stacks any help.
    with pytest.raises(
        SessionError,
        match=r"did not answer within 0.01 s \(computing [^;]*$",
    ):
        Queries(3600.0).ask(ranks[1].rank, AskStacks(), Stacks)


def test_a_rank_that_is_gone_is_not_waited_for_and_no_question_is_remembered(
    ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queries_module, "_ANSWER_TIMEOUT", 0.01)
    queries, gone = Queries(0.01), ranks[1].rank
    gone.alive, gone._ended = False, "killed by SIGKILL"
    with pytest.raises(SessionError, match=r"target\[0\] cannot answer \(killed by SIGKILL\)"):
        queries.ask(gone, AskKeptTags(False), KeptTags)
    assert not queries._answers


def test_a_wait_that_ends_while_others_are_ended_is_no_error() -> None:
    queries, rank, told = Queries(60.0), MagicMock(), []
    answered: Any = MagicMock(put=lambda answer: told.append(answer) or queries._answers.pop(2, None))
    queries._answers.update({1: (rank, answered), 2: (MagicMock(), answered)})
    queries.note_gone(rank)
    assert len(told) == 1


# ---- the taps that were reached -------------------------------------------------------------------------------------


def test_taps_are_listed_as_the_filters_of_each_plan_see_them() -> None:
    catalog = TapCatalog()
    for side, name in (("baseline", "h"), ("target", "model.h")):
        for part in range(2):
            tags = {"name": name, "step": 0, "side": side, "rank": part, "tp_rank": part}
            rank: Any = SimpleNamespace(place=SimpleNamespace(side=side))
            catalog.note(TapSeen({**tags, "recompute_status": "original"}), rank)

    def listed(plan: GraftPlan) -> list[tuple[Any, Any]]:
        return [(tags["name"], tags["tp_rank"]) for tags in catalog.all(plan)]

    apart = [("h", 0), ("h", 1), ("model.h", 0), ("model.h", 1)]
    assert listed(GraftPlan()) == apart
    assert listed(GraftPlan(rename={"target": {r"^model\.": ""}})) == [("h", 0), ("h", 1)]
    assert listed(GraftPlan(pairs=[("h", "model.h")])) == [("h", 0), ("h", 1)]
    assert listed(GraftPlan()) == apart
    # One name, of another tap on each side.
    for side in ("baseline", "target"):
        rank.place.side = side
        catalog.note(TapSeen({**tags, "name": "x", "side": side}), rank)
    assert listed(GraftPlan(rename={"target": {"^x$": "y"}}))[-2:] == [("x", 1), ("y", 1)]


# ---- kept pairs -----------------------------------------------------------------------------------------------------


class Shelf:
    """Stands for the questions: what each rank keeps, as ``{label: [(tags, value), ...]}``, the newest last."""

    def __init__(
        self,
        kept: dict[str, list[tuple[dict[str, Any], Any]]],
        missing: dict[str, list[dict[str, Any]]] | None = None,
    ) -> None:
        self.kept = kept
        self.missing = missing or {}
        self.asked: list[Any] = []

    def __call__(self, rank: Any, question: Any, expected: type[Any]) -> Any:
        pairs = self.kept.get(rank.label, [])
        if isinstance(question, AskKeptTags):
            there = [tags for tags, value in pairs if question.failed or value is not None]
            return KeptTags(there, self.missing.get(rank.label, []))
        if rank.label in self.missing:
            raise SessionError(f"the newest pair on {rank.label} is not held")
        self.asked.append((rank.label, question))
        for tags, value in reversed(pairs):
            is_there = value is not None or isinstance(question, AskKeptInput)
            if is_there and tags["name"] == question.name and question.tags.items() <= tags.items():
                return KeptValue(shipping.pack_result(value))
        return KeptValue(None)


def tags(name: str, step: int, **more: Any) -> dict[str, Any]:
    return {"name": name, "step": step, **more}


def test_the_newest_pair_of_both_sides_is_returned(ranks: list[TalkingRank]) -> None:
    shelf = Shelf(
        {
            "baseline[0]": [(tags("x", 7), "t2b of step 7")],
            "target[0]": [(tags("x", 3), "step 3"), (tags("x", 5, layer=1), "step 5")],
            "target[1]": [(tags("x", 4), "step 4")],
        }
    )
    pairs = PairsOnRanks(processes(ranks), shelf)
    assert pairs.pair("x", None, {}) == "t2b of step 7"
    assert pairs.pair("x", 0, {"layer": 1}) == "step 5"
    assert pairs.pair("x", 1, {}) == "step 4"
    assert [each["step"] for each in pairs.tags(failed=False)] == [3, 5, 4, 7]
    ranks[0].rank.alive = False
    assert pairs.pair("x", None, {}) == "step 5"


def test_an_older_pair_is_not_returned_if_a_newer_one_was_dropped(
    ranks: list[TalkingRank],
) -> None:
    kept = {"target[0]": [(tags("x", 3), "step 3"), (tags("y", 3), "y of step 3")]}
    pairs = PairsOnRanks(processes(ranks), Shelf(kept, {"baseline[0]": [tags("x", 9), tags("z", 9)]}))
    with pytest.raises(SessionError, match=r"the newest pair on baseline\[0\] is not held"):
        pairs.pair("x", None, {})
    assert pairs.pair("y", None, {}) == "y of step 3"
    older = PairsOnRanks(processes(ranks), Shelf(kept, {"baseline[0]": [tags("x", 2)]}))
    assert older.pair("x", None, {}) == "step 3"
    # Of two that hold one, the newest counts.
    two = {**kept, "target[1]": [(tags("x", 5), "step 5")]}
    between = PairsOnRanks(processes(ranks), Shelf(two, {"baseline[0]": [tags("x", 4)]}))
    assert between.pair("x", None, {}) == "step 5"


def test_an_input_whose_transform_failed_is_only_for_trying_drafts(ranks: list[TalkingRank]) -> None:
    pairs = PairsOnRanks(processes(ranks), Shelf({"target[0]": [(tags("x", 3), None)]}))
    assert pairs.tags(failed=False) == []
    assert [each["name"] for each in pairs.tags(failed=True)] == ["x"]
    with pytest.raises(SessionError, match=exactly("no pair of tensors is kept for 'x', nor for any other tap. ")):
        pairs.pair("x", None, {})
    rank, _ = pairs.packed_input("x", None, {})
    assert rank is ranks[1].rank


def test_a_missing_pair_is_reported_with_the_kept_ones(ranks: list[TalkingRank]) -> None:
    shelf = Shelf({"target[0]": [(tags("x", 3), 1), (tags("y", 3), 2)]})
    pairs = PairsOnRanks(processes(ranks), shelf, lambda name, tags: f"Keep {name}")
    with pytest.raises(
        SessionError, match=exactly("no pair of tensors is kept for 'z', layer=3; kept are ['x', 'y']. Keep z")
    ):
        pairs.pair("z", None, {"layer": 3})


# ---- what ranks send pickled ----------------------------------------------------------------------------------------


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_from_an_untrusted_rank_is_unpickled(ranks: list[TalkingRank], tmp_path: Path) -> None:
    marker = tmp_path / "was run"
    rank, evil = ranks[1].rank, Evil(marker)
    failure = Failure("KeyError", "'x'", "", pickle.dumps(evil))
    rank.trusted = False
    assert open_exception(rank, failure) is None
    packed = shipping.pack_result(evil)
    with pytest.raises(
        SessionError,
        match=exactly(
            "target[0] was not started by this notebook, so what it sends is not unpickled: a pickle can run any code"
        ),
    ):
        open_value(rank, packed)
    shelf = Shelf({"target[0]": [(tags("x", 3), evil)]})
    for find in (PairsOnRanks([rank], shelf).pair, PairsOnRanks([rank], shelf).packed_input):
        with pytest.raises(
            SessionError,
            match=exactly(
                "target[0] was not started by this notebook, so what it sends is not unpickled: a pickle can "
                "run any code"
            ),
        ):
            find("x", None, {})
    assert not marker.exists()
    rank.trusted = True
    open_value(rank, packed)
    assert marker.exists()


def test_an_exception_of_a_trusted_rank_is_unpickled_if_possible(ranks: list[TalkingRank]) -> None:
    rank = ranks[1].rank
    found = open_exception(rank, Failure("KeyError", "'x'", "", pickle.dumps(KeyError("x"))))
    assert isinstance(found, KeyError)
    assert open_exception(rank, Failure("KeyError", "'x'", "")) is None
    broken = open_exception(rank, Failure("Odd", "it broke", "", b"\x80no pickle"))
    assert isinstance(broken, gl.GraftError)
    assert "Odd: it broke (the exception itself cannot be loaded here" in str(broken)


# ---- the whole ------------------------------------------------------------------------------------------------------


@pytest.fixture
def core(ranks: list[TalkingRank], tmp_path: Path) -> Iterator[SessionCore]:
    made = SessionCore(LaunchOptions(1, 2), processes(ranks), PLAN, RowStore(tmp_path), tmp_path)
    for each in ranks:
        assert each.hear() == PlanUpdate(to_wire(PLAN))
        each.is_at("idle")
    yield made
    made.close()


def play(rank: TalkingRank, result: Any = None, rows: int = 0) -> Future[RunRequest]:
    """Do what a rank does of the next run that it is asked for; returns the request."""

    def work() -> RunRequest:
        request: RunRequest = rank.hear_a(RunRequest)
        run, place = request.info.run, rank.rank.place
        for order in range(rows):
            rank.line.row(a_row(run=run, order=order, side=place.side, rank=place.rank))
        rank.line.send(RunDone(run, shipping.pack_result(result), None))
        rank.line.send(RunSettled(run, request.info.first_step + 1))
        return request

    return in_background(work)


def test_a_run_of_the_core_from_its_request_to_its_results_and_rows(
    core: SessionCore, ranks: list[TalkingRank]
) -> None:
    playing = [play(each, result=number, rows=10 * number) for number, each in enumerate(ranks)]
    run = core.run(max, "max(1, 2)")
    assert (run.baseline, run.target) == ([0], [1, 2])
    assert len(run.frame) == len(core.frame) == core.row_count == 30
    works = [future.result(60).work for future in playing]
    assert [type(work) for work in works] == [Call, Evaluate, Evaluate]
    assert works[1] == works[2]


def test_an_unknown_way_to_treat_failures_is_refused(core: SessionCore) -> None:
    unknown: Any = "later"
    with pytest.raises(gl.SessionError, match="on_failure='later': a run takes 'stop' or 'continue'"):
        core.start(target="1", on_failure=unknown)
    assert core.runs == []


def test_a_run_that_cannot_begin_lends_no_plan_to_the_one_that_runs(
    core: SessionCore, ranks: list[TalkingRank]
) -> None:
    core.start(target="1")
    with pytest.raises(
        SessionBusyError,
        match=exactly(
            "run 0 is still running (target[0]: about to begin; target[1]: about to begin); wait for it "
            "with run.wait(), or stop its code with session.interrupt()"
        ),
    ):
        core._start_under({"keep": "layer == 3"}, {"target": "2"}, (), {})
    assert core.plan == PLAN
    for each in ranks[1:]:
        each.hear_a(RunRequest)
        each.line.send(RunDone(0, shipping.pack_result(1), None))
        each.line.send(RunSettled(0, 1))
    assert core.runs[0].wait(60).target == [1, 1]
    assert core.edit(keep="layer == 4").version == PLAN.version + 1


def test_a_run_continues_after_a_failure_where_it_was_asked_to(core: SessionCore, ranks: list[TalkingRank]) -> None:
    answers = [play(each) for each in ranks[1:]]
    core.run(target="1", on_failure="continue")
    assert core.runs[0]._state.on_failure == "continue"
    for each in answers:
        each.result(60)


@pytest.mark.parametrize(
    ("recorded", "evaluated"),
    [((), ("m(x)", "m(x)")), (("baseline",), (None, "m(x)")), (("target",), ("m(x)", None))],
)
def test_an_expression_for_both_sides_is_not_evaluated_on_a_recording(recorded: Any, evaluated: Any) -> None:
    session: Any = SimpleNamespace(_internals=SimpleNamespace(default_callees=dict.fromkeys(recorded, print)))
    assert callees_of(session, "m(x)") == evaluated


def test_the_list_of_ranks_is_the_callers_own(core: SessionCore) -> None:
    core.ranks.clear()
    assert [rank.label for rank in core.ranks] == ["baseline[0]", "target[0]", "target[1]"]


def test_jobs_run_no_code_of_the_notebook(core: SessionCore, ranks: list[TalkingRank]) -> None:
    ranks[1].rank.takes_work = False
    for begin in (lambda: core.start(target="1"), lambda: core.execute("1", on="target")):
        with pytest.raises(
            SessionError,
            match=exactly(
                "this session cannot run code on its ranks, because they are jobs that another launcher "
                "started; do that where each was started. Plans, rows, kept tensors, status and stacks work "
                "from here"
            ),
        ):
            begin()
    assert core.runs == []


def test_plans_of_verdicts_are_listed_too_since_rows_have_their_versions(core: SessionCore) -> None:
    core._plans.publish_temporary(core.plan.edit(b2t="False"))
    core._plans.restore()
    assert [(plan.version, plan.b2t) for plan in core.plans] == [(1, "True"), (2, "False"), (3, "True")]


def test_an_edit_is_published_and_its_adoption_reported(core: SessionCore, ranks: list[TalkingRank]) -> None:
    plan = core.edit(keep="layer == 3")
    assert core.plan is plan
    assert core.plans == [PLAN, plan]
    for each in ranks:
        assert each.hear() == PlanUpdate(to_wire(plan))
        each.line.send(PlanAdopted(plan.version, 4))
    wait_until(lambda: len(core.adopted(plan.version)) == 3, "the news of the adoption")
    with pytest.raises(gl.FilterError):
        core.edit(b2t="name ==")
    assert core.plan is plan


def test_a_run_whose_rows_cannot_be_stored_still_ends(
    core: SessionCore, ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: RowStore, lines: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RowStore, "append", full)
    for each in ranks:
        play(each, result="ended", rows=5)
    assert core.start("1", "1").wait(60).target == ["ended", "ended"]


def test_each_view_of_the_taps_has_all_of_them_whatever_others_have_seen(
    core: SessionCore, ranks: list[TalkingRank]
) -> None:
    views = [core.live_taps(), core.live_taps()]
    for each in ranks[1:]:
        play(each, rows=1)
    core.start(target="1").wait(60)
    assert [len(view.look()) for view in views] == [2, 2]
    # Each looks again only at what is new to itself.
    assert views[0] is not views[1]
    assert len(core.live_taps().look()) == 2


def test_output_of_ranks_is_shown_during_the_wait(
    core: SessionCore, ranks: list[TalkingRank], capsys: pytest.CaptureFixture[str]
) -> None:
    run = core.start(target="1")
    ranks[1].line.send(Output("one\ntwo\n"))
    for each in ranks[1:]:
        play(each)
    run.wait(60)
    assert capsys.readouterr().out == "target[0] | one\ntarget[0] | two\n"


def test_closing_the_core_ends_its_ranks_and_closes_it(core: SessionCore, ranks: list[TalkingRank]) -> None:
    run = core.start(target="1")
    closed = MagicMock()
    core._internals.close_first = closed
    core.close()
    core.close()
    assert core.closed
    closed.assert_called_once_with()
    # Another session may write into its folder.
    RowStore(core.folder, append=True).close()
    for each in ranks:
        assert each.hear_a(Shutdown) == Shutdown()
    with pytest.raises(
        gl.RunError,
        match=exactly("run 0 failed on target[0], target[1]\n\ntarget[0], target[1] died: the session was closed"),
    ):
        run.wait(60)


def test_a_closed_session_refuses_all_that_needs_its_ranks(core: SessionCore, ranks: list[TalkingRank]) -> None:
    core.edit(keep="True")
    core.close()
    for call in (
        lambda: core.start(target="1"),
        lambda: core.run(target="1"),
        lambda: core.execute("1"),
        lambda: core.edit(b2t="True"),
        core.undo,
        core.kept,
        core.restart,
        lambda: core.tensors("x"),
        lambda: core.difference_map("x"),
        lambda: core.try_transform(lambda given: given.target, "x"),
        lambda: core.try_transform(lambda given: given.target),
        lambda: replace_ranks(core, lambda: []),
    ):
        with pytest.raises(
            SessionClosedError, match=exactly("this session is closed; launch another with gl.launch(...) or %graft up")
        ):
            call()


def test_every_part_of_the_core_asks_the_ranks_that_replaced_others(
    core: SessionCore, ranks: list[TalkingRank], tmp_path: Path
) -> None:
    for each in ranks:
        in_background(each.die)
    with talking_ranks(tmp_path, 1, 2) as others:
        replace_ranks(core, lambda: processes(others))
        assert core.ranks == processes(others)
        assert core.select("target[1]") == [others[2].rank]
        for each in others:
            assert each.hear_a(PlanUpdate) == PlanUpdate(to_wire(core.plan))
            each.is_at("idle")
        assert core.status()["state"].tolist() == ["idle"] * 3

        def answer() -> None:
            for each in (*others[1:], others[0]):
                query = each.hear_a(Query)
                each.line.send(Reply(query.number, KeptTags([])))

        answering = in_background(answer)
        assert core.kept() == []
        answering.result(60)
        run = core.start("1", "1")
        for each in others:
            play(each, result=each.rank.place.world_rank)
        assert run.wait(60).target == [1, 2]


def test_queries_are_answered_during_a_run(core: SessionCore, ranks: list[TalkingRank]) -> None:
    core.start(target="1")
    pair = (torch.ones(2), torch.zeros(2))

    def answer() -> list[Any]:
        asked = []
        for each in (ranks[1], ranks[2], ranks[0], ranks[1]):
            query = each.hear_a(Query)
            asked.append(query.question)
            if isinstance(query.question, AskKeptTags):
                kept = [tags("x", 0, layer=1 << 70)] if each is ranks[1] else []
                each.line.send(Reply(query.number, KeptTags(kept)))
            else:
                each.line.send(Reply(query.number, KeptValue(shipping.pack_result(pair))))
        return asked

    answering = in_background(answer)
    baseline, target = core.tensors("x", layer=1 << 70)
    assert torch.equal(baseline, pair[0])
    assert torch.equal(target, pair[1])
    assert answering.result(60)[-1] == AskKeptPair("x", {"layer": 1 << 70})


def test_the_core_shows_ranks_that_it_did_not_start(core: SessionCore) -> None:
    assert "3 ranks alive" in repr(core)
    assert core.status()["state"].tolist() == ["idle"] * 3
    assert core.status()["pid"].tolist() == [os.getpid()] * 3
    assert [rank.label for rank in core.select("target")] == ["target[0]", "target[1]"]
    assert [each.place for each in core.ranks] == Place("baseline", 0, 1, 2).everyone()


def test_of_a_log_as_many_lines_are_shown_as_were_asked_for(core: SessionCore, ranks: list[TalkingRank]) -> None:
    ranks[2].rank.log.write_text("".join(f"line {number}\n" for number in range(99)))
    assert core.log("target[1]", lines=2).splitlines()[1:] == ["line 97", "line 98"]
    assert len(core.log("target[1]", lines=70).splitlines()) == 71


def test_a_closed_core_no_longer_reports_groups_that_were_lost(core: SessionCore, ranks: list[TalkingRank]) -> None:
    core._runs.groups.note_failure(ranks[2].rank, Failure("DistStoreError", "gone", ""))
    assert "the group of the target is gone" in repr(core)
    core._closed = True
    assert ": closed, 0 runs, " in repr(core)


def test_a_draft_without_a_pair_is_loaded_for_the_targets_last_rank(
    core: SessionCore, ranks: list[TalkingRank], monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, each in enumerate(processes(ranks)):
        each.assignment = SimpleNamespace(device=f"cuda:{number}", notes=())
    monkeypatch.setattr("graftlab.control.core.try_in_process", lambda drafts, plan, *given: given)
    given: Any = core.try_transform(lambda graft_input: None, limit=0.5)
    assert given == (None, "cuda:2", 0.5)
    packed = MagicMock(return_value=(processes(ranks)[1], b"input"))
    monkeypatch.setattr(core._pairs, "packed_input", packed)
    given = core.try_transform(lambda graft_input: None, "x", rank=1, layer=3)
    assert given == (b"input", "cuda:1", 5.0)
    packed.assert_called_once_with("x", 1, {"layer": 3})


def test_inputs_whose_transform_failed_are_listed_only_if_asked_for(core: SessionCore) -> None:
    pairs: Any = SimpleNamespace(tags=lambda failed: [{"failed": failed}])
    core._pairs = pairs
    assert (core.kept(), core.kept(failed=True)) == ([{"failed": False}], [{"failed": True}])


def test_the_end_of_a_rank_ends_the_wait_for_its_answers_and_no_other(ranks: list[TalkingRank]) -> None:
    asked, ended, left = Queries(60.0), [], []
    runs: Any = MagicMock()
    router = MessageRouter(MagicMock(), runs, MagicMock(), MagicMock(), asked)
    router.on_left = left.append
    waiting = [in_background(lambda n=n: asked.ask(ranks[n].rank, AskStacks(), Stacks)) for n in (1, 2)]
    numbers = [ranks[n].hear_a(Query).number for n in (1, 2)]
    router.on_gone(ranks[1].rank)
    with pytest.raises(SessionError, match=exactly("target[0]: gone before it answered (closed its connection)")):
        waiting[0].result(60)
    asked.on_reply(Reply(numbers[1], Stacks("here")))
    ended.append(waiting[1].result(60).text)
    assert (ended, left) == (["here"], [ranks[1].rank])
    runs.note_death.assert_called_once_with(ranks[1].rank)


def test_a_run_after_a_death_begins_behind_the_step_in_which_the_rank_was(runs: Runs, ranks: list[TalkingRank]) -> None:
    runs.begin({0: WORK, 1: WORK}, PLAN)
    ranks[1].is_at("running", step=5)
    runs.note_death(ranks[1].rank)
    settle(runs, ranks[:1], 0, next_step=2)
    ranks[0].hear()
    runs.begin({0: WORK}, PLAN)
    assert ranks[0].hear_a(RunRequest).info.first_step == 6


def test_participants_are_in_rank_order_however_they_are_given(runs: Runs, ranks: list[TalkingRank]) -> None:
    runs.begin({2: WORK, 0: WORK}, PLAN)
    assert ranks[2].hear_a(RunRequest).info.participants == (0, 2)


def test_the_plans_that_were_published_are_a_list_of_the_callers_own() -> None:
    plans = Plans([])
    plans.publish(PLAN)
    seen = plans.all()
    plans.publish(PLAN.edit(b2t="False"))
    assert [len(seen), len(plans.all())] == [1, 2]
    seen.clear()
    assert plans.newest.b2t == "False"


def test_every_session_is_closed_at_exit_although_each_leaves_the_list(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(closing, "_open", set())
    closed: list[Any] = []

    class Open:
        ranks: tuple[Any, ...] = ()

        def close(self) -> None:
            closed.append(self)
            closing.forget(self)

    sessions = [Open(), Open(), Open()]
    for each in sessions:
        closing.close_at_exit(each)
    closing._close_all()
    assert len(closed) == len(set(closed)) == 3


def test_a_forked_child_lets_its_parents_ranks_go_and_closes_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    rank = MagicMock()
    session = MagicMock(ranks=[rank])
    monkeypatch.setattr(closing, "_open", {session})
    closing._release_in_child()
    closing._close_all()
    assert ([each[0] for each in rank.method_calls], session.method_calls) == (["release_in_child"], [])


def test_a_side_has_its_group_again_once_its_ranks_are_new(ranks: list[TalkingRank]) -> None:
    handles = processes(ranks)
    groups = ProcessGroups(handles)
    failure = Failure("RuntimeError", "[gloo/transport/tcp/pair.cc:1] Connection closed by peer", "")
    groups.note_failure(handles[2], failure)
    assert groups.lost() == {"target": f"a collective failed on target[1]: {failure.message}"}
    groups.renew()
    assert groups.lost() == {}
    # A side of one rank has no group.
    handles[0].alive = False
    assert groups.lost() == {}
    # Of a long message, its end has the reason.
    groups.note_failure(handles[2], Failure("DistBackendError", f"{'x' * 200}: timed out\nIts stack", ""))
    assert groups.lost()["target"].endswith("x: timed out")


def test_a_plan_that_grafts_a_seen_tap_both_ways_is_refused(core: SessionCore, ranks: list[TalkingRank]) -> None:
    ranks[1].line.send(TapSeen({"name": "h", "step": 0, "side": "target", "rank": 0, "layer": 3}))
    wait_until(lambda: core.taps, "the tap")
    with pytest.raises(GraftOverlapError, match="match h layer=3; a tap"):
        core.edit(b2t="layer == 3", t2b="name == 'h'")
    assert core.plan == PLAN


def test_a_run_is_refused_while_another_thread_has_its_own_plan_in_force(core: SessionCore) -> None:
    lent = core._lend_plan({"keep": "layer == 3"})
    begun = in_background(lambda: core.start(target="1"))
    with pytest.raises(SessionBusyError, match="a verdict, a match or a comparison is between two of its runs"):
        begun.result(60)
    assert (core.runs, core.plan) == ([], lent)
