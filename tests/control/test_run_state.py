"""What is known of a run while its ranks report: steps, failures in order, and who still runs."""

from __future__ import annotations

import pickle
import threading
import time
from typing import Any, cast

import pytest
from kit.refusals import exactly

from graftlab.base.progress import LongWait
from graftlab.base.world import Place
from graftlab.control.process_groups import collective_in
from graftlab.control.run_state import RunState
from graftlab.errors import RunError
from graftlab.ranks.messages import Failure, RunDone


class Status:
    def __init__(self, step: int, state: str = "runs") -> None:
        self.step, self.state = step, state

    def __str__(self) -> str:
        return f"{self.state} step {self.step}"


class Rank:
    """The handle of a rank that does nothing."""

    trusted = True

    def __init__(self, place: Place) -> None:
        self.place, self.label, self.was_ended, self.at = place, place.label, False, Status(0)

    def status(self) -> Status:
        return self.at


def state_of(baseline: int = 1, target: int = 2, **more: Any) -> tuple[RunState, list[Any]]:
    ranks = [Rank(place) for place in Place("baseline", 0, baseline, target).everyone()]
    return RunState(3, cast("Any", ranks), **more), ranks


def failed(message: str = "no", kind: str = "ValueError") -> RunDone:
    return RunDone(3, None, Failure(kind, message, f"Traceback of {message}"))


ENDED = RunDone(3, None, None)


def test_unread_output_is_limited_to_its_newest_ten_thousand_pieces() -> None:
    state, ranks = state_of()
    for number in range(10_002):
        state.note_output(ranks[0], cast("Any", number))
    assert [piece for _, _, piece in state.output] == list(range(2, 10_002))


def test_steps_are_those_that_every_rank_has_ended_since_the_run_began() -> None:
    state, ranks = state_of(first_step=4)
    for rank, step in zip(ranks, (9, 7, 8), strict=True):
        rank.at = Status(step)
    assert state.steps == 3
    assert state.wait_steps(3, time.monotonic())
    assert not state.wait_steps(4, time.monotonic())
    # It has not begun yet.
    ranks[0].at = Status(2)
    assert state.steps == 0
    state.is_held_up = True
    assert state.wait_steps(4, None)


def test_a_run_is_done_when_the_rows_of_every_rank_have_arrived() -> None:
    state, ranks = state_of()
    for rank in ranks:
        state.note_done(rank, ENDED)
    assert all(map(state.has_ended, ranks))
    assert not state.done
    for rank in ranks:
        assert not state.has_news()
        state.note_settled(rank)
    assert state.done
    assert state.has_news()
    # Its rows have arrived, so its death is none of this run's.
    state.note_death(ranks[0], "killed")
    assert state.failures == {}
    state.raise_failures()


def test_waits_see_what_another_thread_notes() -> None:
    state, ranks = state_of(1, 1)
    for note in (state.note_done, lambda rank, done: state.note_settled(rank)):
        threads = [threading.Thread(target=note, args=(rank, ENDED)) for rank in ranks]
        for thread in threads:
            thread.start()
        state.wait_ended(ranks, time.monotonic() + 60)
        assert all(map(state.has_ended, ranks))
        for thread in threads:
            thread.join()
    assert state.wait_steps(1000, None)


def test_a_wait_lasts_until_the_ranks_have_ended_or_until_the_deadline() -> None:
    state, ranks = state_of(1, 1)

    class Watched(list[Any]):
        """Ranks that end only once the wait for them has looked."""

        thread: threading.Thread | None = None

        def __iter__(self) -> Any:
            if self.thread is None:
                self.thread = threading.Thread(target=lambda: [state.note_done(rank, ENDED) for rank in ranks])
                self.thread.start()
            return super().__iter__()

    watched = Watched(ranks)
    state.wait_ended(watched, time.monotonic() + 60)
    assert all(map(state.has_ended, ranks))
    assert watched.thread is not None
    watched.thread.join()
    later, others = state_of(1, 1)
    later.wait_ended(others, time.monotonic())
    assert not any(map(later.has_ended, others))


def test_ranks_that_run_when_another_fails_are_marked_and_those_of_its_side_found() -> None:
    state, (base, first, second) = state_of()
    assert state.left_on_failed_sides() == []
    state.note_done(base, ENDED)
    assert state.left_on_failed_sides() == []
    # The ranks of a side need not end together.
    other, (_, early, _) = state_of()
    other.note_done(early, ENDED)
    assert other.left_on_failed_sides() == []
    state.note_done(first, failed())
    assert state.left_on_failed_sides() == [second]
    assert state.mark_stopped() == [second]
    state.note_done(second, failed("stop", "KeyboardInterrupt"))
    with pytest.raises(RunError) as raised:
        state.raise_failures("While it ran, ")
    text = str(raised.value)
    assert text.startswith("While it ran, run 3 failed on target[0], target[1]\n\n")
    assert "target[0] raised ValueError: no\nTraceback of no" in text
    assert "target[1] was interrupted, because target[0] failed" in text


def test_waits_end_where_a_rank_runs_that_cannot_be_stopped() -> None:
    state, ranks = state_of()
    state.note_done(ranks[0], ENDED)
    state.stop_waiting(ranks)
    assert not state.is_held_up
    state.stop_waiting(ranks[:2])
    assert state.is_held_up
    assert state.has_news()


def test_an_interrupt_counts_as_a_consequence_only_of_a_rank_that_still_ran() -> None:
    state, (base, first, second) = state_of()
    state.note_done(base, RunDone(3, None, Failure("KeyboardInterrupt", "by hand", "by hand")))
    assert state.mark_stopped() == [first, second]
    state.note_done(first, RunDone(3, None, Failure("ValueError", "mine", "mine", pickle.dumps(ValueError("mine")))))
    state.note_done(second, failed("later"))
    with pytest.raises(RunError) as raised:
        state.raise_failures()
    parts = str(raised.value).split("\n\n")
    # Without frames a traceback only repeats the message.
    assert parts[1:3] == ["baseline[0] raised KeyboardInterrupt: by hand", "target[0] raised ValueError: mine"]
    assert parts[3].startswith("target[1] raised ValueError: later\nTraceback")
    assert raised.value.failures == {"baseline[0]": "by hand", "target[0]": "mine", "target[1]": "later"}
    # The first exception that was sent is the cause, whatever came without one.
    assert isinstance(raised.value.__cause__, ValueError)


def test_each_note_wakes_a_waiting_thread_at_once() -> None:
    state, (base, first, second) = state_of(on_failure="continue", code={"baseline": "f()"})
    assert state.code == {"baseline": "f()"}
    notes: list[Any] = [
        lambda: state.note_output(base, cast("Any", "piece")),
        lambda: state.note_done(base, ENDED),
        lambda: state.note_settled(base),
        lambda: state.note_death(first, "killed"),
        lambda: state.note_return(first),
        lambda: state.note_return(second),
        lambda: state.stop_waiting([]),
    ]
    woken = []
    state.changed.notify_all = lambda: woken.append(len(woken))  # type: ignore[method-assign]
    counts = []
    for note in notes:
        note()
        counts.append(len(woken))
    # A return that takes back nothing is no news.
    assert counts == [1, 2, 3, 4, 5, 5, 6]
    assert state.has_news()


def test_output_is_news_and_a_wait_for_a_condition_ends_with_the_run_or_with_it() -> None:
    state, ranks = state_of(1, 1)
    assert not state.has_news()
    state.note_output(ranks[0], cast("Any", "piece"))
    assert state.has_news()
    looks = iter([False, False, True])
    state.wait_until(lambda: next(looks), LongWait("waiting", "steps", lambda: 0))
    assert next(looks, "none left") == "none left"
    for rank in ranks:
        state.note_settled(rank)
    state.wait_until(lambda: False, LongWait("waiting", "steps", lambda: 0))


def test_failures_are_listed_in_their_order_and_deaths_lead() -> None:
    state, (base, first, second) = state_of(lost_groups=lambda: {"target": "killed by 9"})
    state.note_done(second, failed("b\nmore"))
    state.note_done(first, failed("b\nmore"))
    state.note_death(base, "killed by 9")
    assert state.failing == {"target[1]": "ValueError: b", "target[0]": "ValueError: b", "baseline[0]": "killed by 9"}
    with pytest.raises(RunError) as raised:
        state.raise_failures()
    text = str(raised.value)
    assert text.startswith("run 3 failed on baseline[0], target[0], target[1]\n\nbaseline[0] died: killed by 9\n\n")
    # One that failed first does not stand first: the frame has them by rank.
    assert "target[0], target[1] raised ValueError: b\nmore" in text
    assert "The process group of the target is gone: its collectives" in text


def test_why_a_process_group_is_gone_is_said_where_nothing_else_says_it() -> None:
    state, ranks = state_of(lost_groups=lambda: {"target": "rank 1 left"})
    state.note_done(ranks[0], failed())
    with pytest.raises(
        RunError,
        match=exactly(
            "run 3 failed on baseline[0]\n\nbaseline[0] raised ValueError: no\nTraceback of no\n\nstill "
            "running, because it cannot be interrupted where it is: target[0]: runs step 0; target[1]: "
            "runs step 0. session.stacks() shows its stack, and session.restart() ends it\n\nThe process "
            "group of the target is gone (rank 1 left): its collectives fail from now on. "
            "session.restart(), or %graft restart, brings the same ranks and plan back, and reruns nothing"
        ),
    ):
        state.raise_failures()


def test_a_rank_that_was_ended_for_a_failure_comes_last_and_did_not_die() -> None:
    state, (base, first, _) = state_of()
    base.was_ended = True
    state.note_death(base, "was ended by restart")
    state.note_done(first, failed())
    with pytest.raises(RunError) as raised:
        state.raise_failures()
    parts = str(raised.value).split("\n\n")
    assert [part.partition(" ")[0] for part in parts[1:3]] == ["target[0]", "baseline[0]"]
    assert parts[2] == "baseline[0] was ended by restart"
    assert parts[3].startswith("still running, because it cannot be interrupted where it is: target[1]: runs step 0.")


def test_a_death_is_taken_back_when_only_the_connection_had_ended() -> None:
    state, ranks = state_of()
    state.note_death(ranks[1], "closed its connection")
    assert state.has_ended(ranks[1])
    state.note_return(ranks[1])
    state.note_return(ranks[2])
    assert not state.has_ended(ranks[1])
    assert (state.failing, state.failures) == ({}, {})
    ((label, trusted, piece),) = state.output
    assert (label, trusted, piece.text) == ("target[0]", True, "reconnected, and continues this run\n")


@pytest.mark.parametrize(("on_failure", "said"), [("stop", []), ("continue", ["failed: ValueError: no; the other"])])
def test_a_failure_is_shown_at_once_where_the_others_continue(on_failure: Any, said: list[str]) -> None:
    state, ranks = state_of(on_failure=on_failure)
    state.note_done(ranks[0], failed("no\nmore"))
    state.note_death(ranks[0], "killed")
    assert [piece.text[:33] for _, _, piece in state.output if "killed" not in piece.text] == said


def test_where_each_unfinished_rank_is_follows_what_has_failed() -> None:
    state, ranks = state_of()
    ranks[0].at, ranks[1].at = Status(2, "idle"), Status(0, "idle")
    state.note_done(ranks[0], ENDED)
    assert state.where() == "baseline[0]: about to end; target[0]: about to begin; target[1]: runs step 0"
    state.note_done(ranks[2], failed())
    state.note_settled(ranks[0])
    assert state.where() == "target[1]: failed: ValueError: no; target[0]: about to begin"


def test_a_result_is_opened_once_and_is_the_same_object_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    state, ranks = state_of()
    opened: list[object] = []
    monkeypatch.setattr("graftlab.control.run_state.open_value", lambda rank, packed: opened.append(rank) or [rank])
    packed: Any = object()
    state.note_done(ranks[2], RunDone(3, packed, None))
    first = state.results_of("target")
    assert first == [None, [ranks[2]]]
    assert state.results_of("target")[1] is first[1]
    assert state.results_of("baseline") == [None]
    assert len(opened) == 1


def test_forgotten_results_are_neither_kept_nor_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    state, ranks = state_of()
    monkeypatch.setattr("graftlab.control.run_state.open_value", lambda rank, packed: "a result")
    packed: Any = object()
    for rank in ranks:
        state.note_done(rank, RunDone(3, packed, None))
    assert state.results_of("baseline") == ["a result"]
    # One was opened, and the others were not.
    state.forget_results()
    assert (state.results_of("baseline"), state.results_of("target")) == ([None], [None, None])


STACK = """thread MainThread
  File "/me/model.py", line 3, in forward
    {call}
{inner}
thread graftlab-row
  File "/x/torch/distributed/a.py", line 1, in other
    pass
"""
INNER = '  File "/x/torch/{path}.py", line 9, in {name}\n    return f()\n'


@pytest.mark.parametrize(
    ("call", "inner", "expected"),
    [
        ("dist.all_reduce(x)", INNER.format(path="distributed/distributed_c10d", name="all_reduce"), True),
        ("work.wait()", "", True),
        # What a wait has called is computed.
        ("work.wait()", INNER.format(path="nn", name="g"), False),
        ("torch.mm(x, x)", "", False),
        ("model(x)", INNER.format(path="distributed/fsdp", name="f") + INNER.format(path="nn", name="g") * 3, False),
    ],
)
def test_only_a_wait_in_a_collective_is_taken_for_one(call: str, inner: str, expected: bool) -> None:
    found = collective_in(STACK.format(call=call, inner=inner))
    assert found == (f"/me/model.py, line 3: {call}" if expected else None)


def test_a_collective_of_torchs_own_threads_code_is_named_by_its_innermost_line() -> None:
    stack = "thread MainThread\n" + INNER.format(path="run", name="f")
    stack += INNER.format(path="distributed/c10d", name="g") + INNER.format(path="nn", name="h")
    assert collective_in(stack) == "/x/torch/nn.py, line 9: return f()"
    assert collective_in(stack.replace("MainThread", "Thread-1")) is None


def test_ranks_that_fail_alike_are_named_in_their_order() -> None:
    state, ranks = state_of(target=11)
    for rank in (ranks[11], ranks[3], ranks[2]):
        state.note_done(rank, failed())
    # One that ends because of its failure has still failed for that reason.
    state.note_death(ranks[3], "exited with code 1")
    assert state.failing == dict.fromkeys(("target[10]", "target[2]", "target[1]"), "ValueError: no")
    with pytest.raises(RunError, match=r"\ntarget\[1\], target\[2\], target\[10\] raised ValueError: no"):
        state.raise_failures()
