"""The session: runs, live plans, what ranks print and return, and errors that say what to do."""

from __future__ import annotations

import os
import re
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from kit.processes import stop_process
from kit.support import own_value, reset, run_cell, wait_for_file, wait_until

import graftlab as gl
from graftlab.control.core import internals_of
from graftlab.control.run import state_of
from graftlab.rows.encoding import decode
from graftlab.rows.log import ROWS_FILE

RANKS = 1, 2


@pytest.fixture(scope="module")
def two_and_two() -> Iterator[gl.Session]:
    with gl.launch(2, 2) as session:
        yield session


@pytest.fixture
def four_ranks(two_and_two: gl.Session) -> gl.Session:
    return reset(two_and_two)


# ---- what the ranks run ---------------------------------------------------------------------------------------------


def tap_x(layer: int = 0, *, shift: float = 0.0) -> list[float]:
    return gl.tap("x", torch.full((2,), own_value() + shift), layer=layer).tolist()


def holds(folder: str) -> str:
    """Report that it has begun, and wait for the file that lets it continue."""
    me = gl.here()
    Path(f"{folder}/{me.side}[{me.rank}] began").touch()
    wait_for_file(f"{folder}/continue")
    return "went on"


def long_run(folder: str, steps: int, pauses: tuple[int, ...]) -> int:
    """Steps through a loop; the leader stops at some of them until the plan has been edited."""
    me = gl.here()
    for step in range(steps):
        if step in pauses and me.side == "baseline" and me.rank == 0:
            Path(f"{folder}/at {step}").touch()
            wait_for_file(f"{folder}/after {step}")
        for name in ("a", "b"):
            gl.tap(name, torch.full((2,), own_value()))
        gl.step()
    return steps


def in_background(function: Callable[[], Any]) -> Callable[[], Any]:
    """Call in a thread; what comes back waits for it and returns or raises what it did."""
    outcome: list[Any] = []

    def call() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=call)
    thread.start()

    def result() -> Any:
        thread.join(60)
        assert outcome, "still going on"
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return result


# ---- runs -----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_run_calls_both_sides_and_returns_each_ranks_result(session: gl.Session) -> None:
    run = session.run(tap_x, lambda layer, shift: tap_x(layer, shift=2 * shift), args=(3,), kwargs={"shift": 0.25})
    assert run.done
    assert run.baseline == [[10.25, 10.25]]
    assert run.target == [[20.5, 20.5], [21.5, 21.5]]
    assert run.frame["layer"].tolist() == [3, 3]
    assert set(run.frame["run"]) == {run.number}
    assert session.runs[-1] is run


@pytest.mark.ranks
def test_each_run_is_a_new_step_and_the_sessions_frame_has_the_rows_of_all(session: gl.Session) -> None:
    before = len(session.frame)
    first, second = session.run(tap_x, tap_x), session.run(tap_x, tap_x)
    assert second.number == first.number + 1
    assert set(second.frame["step"]) == {max(first.frame["step"]) + 1}
    everything = session.frame
    assert len(everything) == before + 4
    pd.testing.assert_frame_equal(everything[everything["run"] == second.number].reset_index(drop=True), second.frame)


@pytest.mark.ranks
def test_start_does_not_wait(session: gl.Session, tmp_path: Path) -> None:
    run = session.start(holds, holds, args=(str(tmp_path),))
    wait_for_file(tmp_path / "target[1] began")
    assert not run.done
    assert run.target == [None, None]
    assert "in progress" in repr(run)
    with pytest.raises(
        TimeoutError,
        match=rf"run {run.number} is still running.*baseline\[0\]: .*wait\(\) waits for it again, session.interrupt",
    ):
        run.wait(timeout=0.01)
    (tmp_path / "continue").touch()
    assert run.wait() is run
    assert run.done
    assert run.target == ["went on", "went on"]
    assert "done" in repr(run)


@pytest.mark.ranks
def test_a_run_during_a_run_is_refused_and_the_first_continues(session: gl.Session, tmp_path: Path) -> None:
    run = session.start(target=holds, args=(str(tmp_path),))
    for call in (lambda: session.run(tap_x, tap_x), lambda: session.start(tap_x), lambda: session.execute("1")):
        with pytest.raises(gl.SessionBusyError, match=rf"run {run.number} is still running.*session.interrupt"):
            call()
    (tmp_path / "continue").touch()
    assert run.wait().target == ["went on", "went on"]


@pytest.mark.ranks
def test_expressions_and_cells_run_in_the_ranks_own_lasting_namespace(session: gl.Session) -> None:
    assert session.execute("me = gl.here()\nnumber = 10 * me.rank\nnumber + 1", on="both").target == [1, 11]
    assert session.execute("number = 7", on="target[1]").target == [None]
    assert session.run(baseline="number", target="(me.side, number)").target == [("target", 0), ("target", 7)]
    assert session.run(target=lambda: gl.here().vars["number"]).target == [0, 7]
    assert session.run(baseline="number").baseline == [0]
    with pytest.raises(gl.SessionError, match=r"'target\[2\]' names no rank.*baseline\[0\], target\[0\], target\[1\]"):
        session.execute("1", on="target[2]")
    with pytest.raises(gl.SessionError, match="takes no args"):
        session.run(target="number", args=(1,))


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("run", lambda session, x: session.run(_first, _first, args=x)),
        ("run", lambda session, x: session.start(_first, _first, args=x)),
        ("verdict", lambda session, x: session.verdict(_first, _first, args=x)),
        ("check", lambda session, x: session.check(target=_first, args=x)),
        ("match", lambda session, x: session.match(_first, _first, args=x)),
        ("compare_compiled", lambda session, x: session.compare_compiled(_first, args=x)),
    ],
)
def test_a_tensor_given_as_all_arguments_is_not_split(name: str, call: Any, session: gl.Session) -> None:
    """Its rows would be the arguments: of a batch of one, the model would get the only sample, and run all the same."""
    with pytest.raises(
        gl.SessionError, match=rf"^{name}: args= must be a tuple of all positional arguments, not Tensor"
    ):
        call(session, torch.ones(1, 3))


def _first(x: torch.Tensor) -> torch.Tensor:
    return gl.tap("x", x)


@pytest.mark.ranks
@pytest.mark.parametrize("callee", [None, 3, ["f"]], ids=repr)
def test_an_uncallable_value_is_refused(callee: Any, session: gl.Session) -> None:
    with pytest.raises(gl.SessionError):
        session.run(target=callee)


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_an_edit_between_runs_is_in_force_in_the_next(session: gl.Session) -> None:
    first = session.run(tap_x, tap_x)
    plan = session.edit(b2t="layer == 0")
    assert session.plan is plan
    assert session.plans[-1] is plan
    second = session.run(tap_x, tap_x)
    assert set(first.frame["status"]) == {"compared"}
    assert set(second.frame["status"]) == {"grafted"}
    assert set(second.frame["plan_version"]) == {plan.version}
    assert set(first.frame["plan_version"]) == {plan.version - 1}
    # What is not given stays as it was.
    third = session.edit(keep="layer == 0")
    assert (third.b2t, third.compare, third.keep) == ("layer == 0", "True", "layer == 0")


@pytest.mark.ranks
def test_an_edit_reaches_idle_ranks_without_a_run(session: gl.Session) -> None:
    plan = session.edit(b2t="True")
    wait_until(lambda: session.status()["plan_version"].tolist() == [plan.version] * 3, "the plan on every rank")


@pytest.mark.ranks
def test_edits_during_a_run_are_in_force_from_the_leaders_next_step_on_every_rank(
    four_ranks: gl.Session, tmp_path: Path
) -> None:
    pauses = (5, 10, 15)
    plans = {0: four_ranks.edit(b2t="name == 'a'", compare=None)}
    run = four_ranks.start(long_run, long_run, args=(str(tmp_path), 20, pauses))
    edits = [{"b2t": "name == 'b'"}, {"b2t": None, "t2b": "name == 'a'"}, {"t2b": None, "compare": "name == 'b'"}]
    for pause, edit in zip(pauses, edits, strict=True):
        wait_for_file(tmp_path / f"at {pause}")
        plans[pause + 1] = four_ranks.edit(**edit)
        four_ranks.stacks()  # what is sent later is answered later, so the plan has arrived now
        (tmp_path / f"after {pause}").touch()
    run.wait()

    frame = run.frame
    first = frame["step"].min()
    expected = {
        0: ("a", "target", "grafted"),
        6: ("b", "target", "grafted"),
        11: ("a", "baseline", "grafted"),
        16: ("b", "target", "compared"),
    }
    assert len(frame) == 2 * 20
    for step in range(20):
        since = max(begin for begin in expected if begin <= step)
        rows = frame[frame["step"] == first + step]
        assert rows["rank"].tolist() == [0, 1]
        assert set(rows["plan_version"]) == {plans[since].version}
        assert set(zip(rows["name"], rows["side"], rows["status"], strict=True)) == {expected[since]}


@pytest.mark.ranks
def test_every_step_is_filtered_by_one_plan_however_wildly_it_is_edited(four_ranks: gl.Session, tmp_path: Path) -> None:
    steps = 150
    filters = [{"b2t": "name == 'a'", "t2b": None}, {"b2t": None, "t2b": "name == 'a'"}, {"b2t": None, "t2b": None}]
    of_version = {four_ranks.edit(**filters[0]).version: filters[0]}
    run = four_ranks.start(long_run, long_run, args=(str(tmp_path), steps, (0, steps // 2)))
    for pause in (0, steps // 2):
        wait_for_file(tmp_path / f"at {pause}")
        for _ in range(20):
            edit = filters[len(of_version) % 3]
            of_version[four_ranks.edit(**edit).version] = edit
        four_ranks.stacks()  # the newest has arrived by now
        (tmp_path / f"after {pause}").touch()
    while not run.done:
        edit = filters[len(of_version) % 3]
        of_version[four_ranks.edit(**edit).version] = edit
        four_ranks.status()
    run.wait()

    frame = run.frame
    by_step = frame.groupby("step")["plan_version"]
    assert (by_step.nunique() == 1).all()
    versions = by_step.first()
    assert versions.is_monotonic_increasing
    assert versions.nunique() >= 3
    # 2 rows of each of 2 taps a step, each of the kind that the step's plan asks for: none missing, none unmatched.
    assert len(frame) == 4 * steps
    for row in frame.itertuples():
        plan = of_version[row.plan_version]
        grafted = row.name == "a" and (plan["b2t"] or plan["t2b"])
        assert row.status == ("grafted" if grafted else "compared")
        assert row.side == ("baseline" if row.name == "a" and plan["t2b"] else "target")


@pytest.mark.ranks
def test_a_plan_given_at_the_launch_is_in_force_in_the_first_run() -> None:
    def half(graft_input: gl.GraftTransformInput) -> torch.Tensor:
        return graft_input.received_list[0] / 2

    plan = gl.GraftPlan(b2t="True", compare=None, transform=half, rename={"target": {"^y$": "x"}})
    with gl.launch(1, 1, plan=plan) as session:
        assert session.plan is plan
        run = session.run(tap_x, lambda: gl.tap("y", torch.full((2,), own_value()), layer=0).tolist())
    assert run.target == [[5.0, 5.0]]


def test_a_plan_is_refused_when_it_is_made() -> None:
    with pytest.raises(gl.TransformError):
        gl.GraftPlan(transform="def transform(")
    with pytest.raises(gl.FilterError):
        gl.GraftPlan(b2t="name ==")
    with pytest.raises(gl.PlanError):
        gl.GraftPlan(rename={"target": {"(": "x"}})
    with pytest.raises(gl.PlanError):
        gl.GraftPlan(rename={"nobody": {"a": "x"}})


# ---- kept tensors ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_tensors_are_the_pair_before_the_graft(session: gl.Session) -> None:
    session.edit(b2t="layer == 0", keep="layer < 2")
    for layer in range(3):
        session.run(tap_x, tap_x, args=(layer,))

    for layer in range(2):
        baseline, target = session.tensors("x", layer=layer)
        assert baseline.tolist() == [10.0, 10.0]
        assert target.tolist() == [20.0, 20.0]
    assert session.tensors("x", rank=1)[1].tolist() == [21.0, 21.0]
    with pytest.raises(gl.SessionError, match=r"no pair of tensors is kept for 'x', layer=2; kept are \['x'\].*keep="):
        session.tensors("x", layer=2)


@pytest.mark.ranks
def test_tensors_returns_the_newest_pair_unless_a_step_is_given(session: gl.Session) -> None:
    session.edit(keep="True", compare=None)
    first = session.run(tap_x, tap_x, kwargs={"shift": 1.0}).frame["step"].iloc[0]
    session.run(tap_x, tap_x, kwargs={"shift": 2.0})
    assert session.tensors("x")[0].tolist() == [12.0, 12.0]
    assert session.tensors("x", step=int(first))[0].tolist() == [11.0, 11.0]


@pytest.mark.ranks
def test_tensors_returns_the_newest_pair_of_both_sides(session: gl.Session) -> None:
    def tap_y(shift: float) -> None:
        # Equal on the target's ranks, or none of them would be grafted.
        gl.tap("y", torch.full((2,), own_value() // 10 * 10 + shift))

    session.edit(keep="True")
    session.run(tap_y, tap_y, kwargs={"shift": 1.0})
    session.edit(t2b="True")
    session.run(tap_y, tap_y, kwargs={"shift": 2.0})
    # Received by the baseline; what the target holds is older.
    assert [tensor[0].item() for tensor in session.tensors("y")] == [12.0, 22.0]
    session.edit(t2b=None)
    session.run(tap_y, tap_y, kwargs={"shift": 3.0})
    assert [tensor[0].item() for tensor in session.tensors("y")] == [13.0, 23.0]


@pytest.mark.ranks
def test_kept_pairs_with_unpicklable_tags_are_found(session: gl.Session) -> None:
    def tap_with_odd_tag() -> None:
        gl.tap("odd", torch.full((2,), own_value()), lock=threading.Lock(), layer=5)

    session.edit(keep="name == 'odd'", compare="name == 'odd'", rename=None)
    session.run(tap_with_odd_tag, tap_with_odd_tag)
    assert any(tags["name"] == "odd" and tags["layer"] == 5 for tags in session.kept())
    # No rank has been left deaf by it.
    assert list(session.stacks()) == ["baseline[0]", "target[0]", "target[1]"]


@pytest.mark.ranks
def test_t2b_pairs_are_kept_on_the_baseline_in_the_same_order(session: gl.Session) -> None:
    def other_name() -> None:
        # Equal on the target's ranks, or none of them would be grafted.
        gl.tap("other way", torch.full((2,), own_value() // 10 * 10))

    session.edit(t2b="name == 'other way'", keep="True")
    session.run(other_name, other_name)
    baseline, target = session.tensors("other way")
    assert (baseline[0].item(), target[0].item()) == (10.0, 20.0)


@pytest.mark.ranks
def test_tensors_can_be_asked_for_during_a_run(session: gl.Session, tmp_path: Path) -> None:
    def taps_then_holds(folder: str) -> None:
        gl.tap("during", torch.full((2,), own_value()))
        holds(folder)

    session.edit(keep="True")
    run = session.start(taps_then_holds, taps_then_holds, args=(str(tmp_path),))
    wait_for_file(tmp_path / "target[0] began")
    assert session.tensors("during")[0].tolist() == [10.0, 10.0]
    (tmp_path / "continue").touch()
    run.wait()


# ---- where the ranks are --------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_status_shows_idle_computing_and_waiting_ranks(session: gl.Session, tmp_path: Path) -> None:
    def target_waits(folder: str) -> None:
        if gl.here().side == "baseline":
            holds(folder)
        gl.tap("awaited", torch.zeros(2))

    idle = session.status()
    assert idle["state"].tolist() == ["idle"] * 3
    assert idle[["side", "rank"]].values.tolist() == [["baseline", 0], ["target", 0], ["target", 1]]
    assert len(set(idle["pid"])) == 3
    assert os.getpid() not in set(idle["pid"])
    assert idle["device"].tolist() == ["cpu"] * 3

    run = session.start(target_waits, target_waits, args=(str(tmp_path),))
    wait_until(lambda: session.status()["state"].tolist() == ["running", "waiting", "waiting"], "both targets waiting")
    busy = session.status()
    assert busy["awaits"].tolist() == ["", "baseline[0]", "baseline[0]"]
    # What a notebook shows leaves out columns in which nothing stands.
    assert "awaits</th>" in busy._repr_html_()  # type: ignore[operator]
    assert "awaits</th>" not in idle._repr_html_()  # type: ignore[operator]
    assert busy["last_tap"].tolist()[1:] == ["awaited", "awaited"]
    assert "waiting at tap 'awaited'" in run.where()
    (tmp_path / "continue").touch()
    run.wait()
    wait_until(lambda: session.status()["state"].tolist() == ["idle"] * 3, "every rank idle again")


@pytest.mark.ranks
def test_stacks_show_the_users_line_on_every_rank(session: gl.Session, tmp_path: Path) -> None:
    run = session.start(holds, holds, args=(str(tmp_path),))
    for label in ("baseline[0]", "target[0]", "target[1]"):
        wait_for_file(tmp_path / f"{label} began")
    stacks = session.stacks()
    assert list(stacks) == ["baseline[0]", "target[0]", "target[1]"]
    for text in stacks.values():
        assert 'wait_for_file(f"{folder}/continue")' in text
    (tmp_path / "continue").touch()
    run.wait()


@pytest.mark.ranks
def test_interrupt_ends_the_code_and_not_the_ranks(session: gl.Session, tmp_path: Path) -> None:
    pids = session.status()["pid"].tolist()
    run = session.start(holds, holds, args=(str(tmp_path),))
    for label in ("baseline[0]", "target[0]", "target[1]"):
        wait_for_file(tmp_path / f"{label} began")
    session.interrupt()
    with pytest.raises(gl.RunError) as caught:
        run.wait()
    assert list(caught.value.failures) == ["baseline[0]", "target[0]", "target[1]"]
    assert "KeyboardInterrupt" in str(caught.value)
    assert "holds" in str(caught.value)
    assert session.run(tap_x, tap_x).target == [[20.0, 20.0], [21.0, 21.0]]
    assert session.status()["pid"].tolist() == pids


@pytest.mark.ranks
def test_interrupt_ends_the_wait_of_a_tap(session: gl.Session, tmp_path: Path) -> None:
    def target_waits(folder: str) -> None:
        if gl.here().side == "baseline":
            holds(folder)
        gl.tap("awaited", torch.zeros(2))

    run = session.start(target_waits, target_waits, args=(str(tmp_path),))
    wait_until(lambda: session.status()["state"].tolist() == ["running", "waiting", "waiting"], "both targets waiting")
    session.interrupt()
    with pytest.raises(gl.RunError):
        run.wait()
    # Nothing of the interrupted run is left in the way of the next.
    again = session.run(tap_x, tap_x)
    assert again.frame["status"].tolist() == ["compared", "compared"]


@pytest.mark.ranks
def test_interrupts_at_any_moment_leave_connections_intact(session: gl.Session) -> None:
    def endless() -> None:
        while True:
            gl.tap("x", torch.full((100,), own_value()), extras={"big": list(range(200))})
            gl.step()

    for _ in range(10):
        run = session.start(endless, endless)
        wait_until(lambda run=run: len(run.frame) > 0, "the first row")
        session.interrupt()
        with pytest.raises(gl.RunError, match="KeyboardInterrupt"):
            run.wait(60)
    again = session.run(tap_x, tap_x)
    assert again.target == [[20.0, 20.0], [21.0, 21.0]]
    assert again.frame["status"].tolist() == ["compared", "compared"]


@pytest.mark.ranks
@pytest.mark.parametrize("tapping", [True, False])
def test_an_interrupt_during_an_exchange_still_ends_the_code(session: gl.Session, tapping: bool) -> None:
    def loop() -> None:
        from graftlab.ranks import worker

        usual = worker.is_interruptible_at
        worker.is_interruptible_at = lambda frame: False
        try:
            while True:
                gl.tap("x", torch.ones(1)) if tapping else gl.step()
        finally:
            worker.is_interruptible_at = usual

    run = session.start(loop, loop)
    run.wait_steps(0 if tapping else 2)
    wait_until(lambda: not tapping or len(run.frame) > 2, "taps")
    session.interrupt()
    with pytest.raises(gl.RunError, match="KeyboardInterrupt"):
        run.wait(60)
    assert run.done
    assert session.lost_groups == {}
    assert session.run("1", "2").target[0] == 2


@pytest.mark.ranks
def test_an_interrupt_also_ends_the_run_on_a_rank_that_has_not_begun_yet(session: gl.Session, tmp_path: Path) -> None:
    (late,) = session.select("target[1]")
    wait_until(lambda: late.status().state == "idle", "the end of what was before")
    stop_process(late.pid)
    try:
        run = session.start(holds, holds, args=(str(tmp_path),))
        wait_for_file(tmp_path / "target[0] began")
        session.interrupt()
    finally:
        os.kill(late.pid, signal.SIGCONT)
    with pytest.raises(gl.RunError, match="KeyboardInterrupt") as caught:
        run.wait(60)
    assert list(caught.value.failures) == ["baseline[0]", "target[0]", "target[1]"]
    assert session.run(tap_x, tap_x).target == [[20.0, 20.0], [21.0, 21.0]]


@pytest.mark.ranks
def test_an_interrupt_of_idle_ranks_does_nothing(session: gl.Session) -> None:
    wait_until(lambda: session.status()["state"].tolist() == ["idle"] * 3, "every rank idle")
    session.interrupt()
    assert session.run(tap_x, tap_x).target == [[20.0, 20.0], [21.0, 21.0]]


@pytest.mark.ranks
def test_the_stop_button_ends_the_wait_and_not_the_run(
    session: gl.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def prints_then_holds(folder: str) -> str:
        print("now")
        return holds(folder)

    class Stopping:
        """A notebook's output in which the stop button is pressed when the first line arrives."""

        def write(self, text: str) -> None:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Stopping())
        with pytest.raises(KeyboardInterrupt, match="the ranks continue"):
            session.run(target=prints_then_holds, args=(str(tmp_path),))
    run = session.runs[-1]
    assert not run.done
    (tmp_path / "continue").touch()
    assert run.wait().target == ["went on", "went on"]


# ---- functions of a notebook ----------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_functions_of_a_cell_are_sent_with_everything_they_use(session: gl.Session) -> None:
    cell = run_cell(
        """
        import dataclasses
        import torch
        import graftlab as gl

        SCALE = 3.0

        @dataclasses.dataclass
        class Config:
            shift: float = 1.0

        def helper(x, config):
            return x * SCALE + config.shift

        def make(offset):
            def forward(config=Config(0.5)):
                x = torch.full((2,), float(gl.here().rank))
                return helper(x, config) + offset
            return forward

        recursive = lambda n: 1 if n == 0 else n * recursive(n - 1)
        """
    )
    run = session.run(lambda: 0, cell["make"](100.0))
    assert [result.tolist() for result in run.target] == [[100.5, 100.5], [103.5, 103.5]]
    assert session.run(target=cell["recursive"], args=(5,)).target == [120, 120]
    # By value: what the notebook does to its variable afterwards reaches the next run.
    cell["SCALE"] = 5.0
    assert session.run(target=cell["make"](0.0)).target[1].tolist() == [5.5, 5.5]


@pytest.mark.ranks
def test_instances_of_a_cells_class_come_back_as_such(session: gl.Session) -> None:
    cell = run_cell(
        """
        class Result:
            def __init__(self, value):
                self.value = value

        def make():
            return Result(42)
        """
    )
    result = session.run(target=cell["make"]).target[0]
    assert result.value == 42
    assert type(result).__name__ == "Result"


@pytest.mark.ranks
def test_a_traceback_shows_the_cells_own_lines_and_none_of_graftlabs(session: gl.Session) -> None:
    cell = run_cell(
        """
        def inner(rank):
            if rank == 1:
                raise ValueError("no weights for layer 3")  # the planted line
            return rank

        def forward():
            import graftlab as gl
            return inner(gl.here().rank)  # the calling line
        """
    )
    with pytest.raises(gl.RunError) as caught:
        session.run(target=cell["forward"])
    error = caught.value
    assert error.failures == {"target[1]": "no weights for layer 3"}
    assert isinstance(error.__cause__, ValueError)
    assert error.__cause__.args == ("no weights for layer 3",)
    text = str(error)
    assert f"run {session.runs[-1].number} failed on target[1]" in text
    assert "ValueError: no weights for layer 3" in text
    assert "# the planted line" in text
    assert text.index("# the calling line") < text.index("# the planted line")
    assert "graftlab" not in text.split("Traceback")[1]
    # The results of the other ranks arrive.
    assert session.runs[-1].target == [0, None]
    assert "failed on target[1]" in repr(session.runs[-1])


@pytest.mark.ranks
def test_every_failing_rank_is_named_with_its_failure(session: gl.Session) -> None:
    def fails() -> None:
        me = gl.here()
        if me.side == "baseline":
            raise SystemExit(4)
        raise KeyError(f"shard {me.rank}")

    with pytest.raises(gl.RunError) as caught:
        session.run(fails, fails)
    failures = caught.value.failures
    assert list(failures) == ["baseline[0]", "target[0]", "target[1]"]
    assert failures["baseline[0]"] == "the code called exit(4); the rank keeps running"
    assert failures["target[1]"] == "'shard 1'"
    for part in ("baseline[0] raised SystemExit", "target[0] raised KeyError", "target[1] raised KeyError"):
        assert part in str(caught.value)
    assert session.run(target=lambda: 1).target == [1, 1]


@pytest.mark.ranks
def test_an_unpicklable_exception_is_reported_as_text(session: gl.Session) -> None:
    def fails() -> None:
        class Own(Exception):
            def __reduce__(self) -> Any:
                raise TypeError("stays here")

        raise Own("the words")

    with pytest.raises(gl.RunError, match=r"raised Own: the words"):
        session.run(target=fails)


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("source", "named"),
    [
        ("lock = threading.Lock()\ndef f(): return lock", "variable 'lock' used by f()"),
        (
            "lock = threading.Lock()\ndef helper(): return lock\ndef f(): return helper()",
            "variable 'lock' used by helper()",
        ),
        ("config = {'model': {'lock': threading.Lock()}}\ndef f(): return config", "config"),
        ("def make():\n    mine = threading.Lock()\n    return lambda: mine\nf = make()", "variable 'mine'"),
    ],
    ids=["global", "of a helper", "inside a dict", "closure"],
)
def test_an_unpicklable_variable_is_named(source: str, named: str, session: gl.Session) -> None:
    cell = run_cell(f"import threading\n{source}")
    runs = len(session.runs)
    with pytest.raises(gl.ShippingError) as caught:
        session.run(target=cell["f"])
    assert named in str(caught.value)
    assert "Create it on the ranks instead" in str(caught.value)
    assert len(session.runs) == runs


@pytest.mark.ranks
def test_an_unpicklable_argument_is_named(session: gl.Session) -> None:
    with pytest.raises(gl.ShippingError, match="positional argument 1"):
        session.run(target=lambda a, b: None, args=(1, threading.Lock()))
    with pytest.raises(gl.ShippingError, match="argument 'handle'"):
        session.run(target=lambda handle: None, kwargs={"handle": threading.Lock()})


@pytest.mark.ranks
def test_a_large_capture_warns_and_names_it(session: gl.Session) -> None:
    cell = run_cell(
        """
        import torch
        weights = torch.zeros(20 << 18)
        def forward():
            return weights.numel()
        """
    )
    with pytest.warns(gl.GraftWarning, match=r"takes 2\d MiB along.*variable 'weights' used by forward\(\)") as caught:
        run = session.run(target=cell["forward"])
    assert run.target == [20 << 18, 20 << 18]
    assert caught[0].filename == __file__


# ---- what ranks print -----------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_output_is_labelled_by_rank_and_no_line_is_torn(
    session: gl.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    def chatter() -> None:
        me = gl.here()

        def talk(thread: int) -> None:
            for line in range(50):
                # One line in many writes, to both streams in turn.
                stream = sys.stderr if line % 2 else sys.stdout
                print(me.side, me.rank, "thread", thread, "line", line, "end", file=stream)

        threads = [threading.Thread(target=talk, args=(thread,)) for thread in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    session.run(chatter, chatter)

    pattern = re.compile(r"(\w+)\[(\d)\] \| \1 \2 thread (\d) line (\d+) end")
    lines = capsys.readouterr().out.splitlines()
    found = [pattern.fullmatch(line) for line in lines]
    assert all(found), [line for line, match in zip(lines, found, strict=True) if not match]
    said = [match.groups() for match in found]
    assert len(set(said)) == len(said) == 3 * 4 * 50
    # Each thread's lines of one stream stay in order.
    for label in {groups[:3] for groups in said}:
        numbers = [int(groups[3]) for groups in said if groups[:3] == label]
        assert [n for n in numbers if n % 2 == 0] == list(range(0, 50, 2))
        assert [n for n in numbers if n % 2] == list(range(1, 50, 2))


@pytest.mark.ranks
def test_an_unfinished_line_and_several_lines_at_once_are_shown_whole(
    session: gl.Session, capsys: pytest.CaptureFixture[str]
) -> None:
    def speaks() -> None:
        print("one\ntwo\n\nthree", end="")

    session.execute("print('first', end=' '); print('second')", on="target[0]")
    session.run(baseline=speaks)
    assert capsys.readouterr().out == (
        "target[0] | first second\nbaseline[0] | one\nbaseline[0] | two\nbaseline[0] | \nbaseline[0] | three\n"
    )


@pytest.mark.ranks
def test_output_of_a_started_run_is_held_until_a_wait(session: gl.Session, capsys: pytest.CaptureFixture[str]) -> None:
    run = session.start(target=lambda: print("held"))
    wait_until(lambda: run.done, "the end of the run")
    assert capsys.readouterr().out == ""
    run.wait()
    assert sorted(capsys.readouterr().out.splitlines()) == ["target[0] | held", "target[1] | held"]
    run.wait()
    assert capsys.readouterr().out == ""


@pytest.mark.ranks
def test_the_log_has_a_ranks_prints_and_the_output_of_lower_layers(session: gl.Session) -> None:
    def writes() -> None:
        print("through python")
        os.write(2, b"through the descriptor\n")

    session.run(target=writes)
    text = session.log("target[1]")
    assert "through python" in text
    assert "through the descriptor" in text
    assert text.startswith(f"--- target[1]: {session.folder}")
    assert session.log("both", lines=1).count("--- ") == 3
    assert len(session.log("target[1]", lines=1).splitlines()) == 2


# ---- what ranks return ----------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_results_arrive_as_plain_cpu_tensors_of_their_own_bytes(session: gl.Session) -> None:
    def results() -> dict[str, Any]:
        base = torch.arange(1_000_000, dtype=torch.float32)
        return {
            "view": base[10:14],
            "strided": base[:100].view(10, 10).t()[:2, :3],
            "expanded": torch.tensor([1.0]).expand(3),
            "scalar": torch.tensor(2.5, dtype=torch.bfloat16),
            "empty": torch.empty(0, 3, dtype=torch.int64),
            "grad": torch.ones(2, requires_grad=True) * 2,
            "parameter": torch.nn.Parameter(torch.ones(2)),
            "conjugate": torch.tensor([1 + 2j]).conj(),
            "list": [torch.tensor([True]), None, ("text", torch.tensor([-1], dtype=torch.int8))],
        }

    found = session.run(target=results).target[1]
    base = torch.arange(100, dtype=torch.float32)
    assert found["view"].equal(base[10:14])
    assert found["view"].untyped_storage().nbytes() == 16
    assert found["strided"].equal(base.view(10, 10).t()[:2, :3])
    assert found["expanded"].tolist() == [1.0, 1.0, 1.0]
    assert (found["scalar"].dtype, found["scalar"].shape, found["scalar"].item()) == (torch.bfloat16, (), 2.5)
    assert (found["empty"].dtype, found["empty"].shape) == (torch.int64, (0, 3))
    assert found["grad"].tolist() == [2.0, 2.0]
    assert type(found["parameter"]) is torch.Tensor
    assert found["conjugate"].tolist() == [1 - 2j]
    assert found["list"][0].tolist() == [True]
    assert found["list"][2][1].tolist() == [-1]
    assert not any(value.requires_grad for value in found.values() if isinstance(value, torch.Tensor))
    # They are the notebook's own: writing into one is no trouble.
    found["view"] += 1


@pytest.mark.ranks
def test_a_view_does_not_bring_its_storage_along(session: gl.Session) -> None:
    session.run(target=lambda: torch.zeros(4_000_000)[:2])
    assert all(len(done.result) < 10_000 for done in state_of(session.runs[-1])._done.values())


@pytest.mark.ranks
def test_an_unpicklable_result_is_reported_and_others_arrive(session: gl.Session) -> None:
    def results() -> Any:
        return 5 if gl.here().rank == 0 else {"lock": threading.Lock()}

    run = session.run(target=results)
    assert run.target[0] == 5
    assert repr(run.target[1]).startswith("{'lock': <unlocked _thread.lock")
    assert "lock" in run.target[1].why
    assert run.target[1].kind == "dict"


@pytest.mark.ranks
def test_a_result_that_cannot_be_unpickled_here_is_reported(session: gl.Session) -> None:
    def results() -> Any:
        def refuse() -> None:
            raise OSError("no such device here")

        class Remote:
            def __reduce__(self) -> Any:
                return (refuse, ())

        return Remote()

    result = session.run(target=results).target[0]
    assert "cannot be loaded in the notebook" in repr(result)
    assert "no such device here" in result.why


# ---- rows on disk ---------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_rows_on_disk_are_the_rows_in_memory(tmp_path: Path) -> None:
    folder = tmp_path / "run folder"
    with gl.launch(1, 2, folder=folder) as session:
        session.edit(b2t="layer == 1")
        for layer in range(3):
            session.run(tap_x, tap_x, args=(layer,))
        frame = session.frame
        assert session.folder == folder
        # On disk while the session lives, too.
        pd.testing.assert_frame_equal(gl.load_run(folder), frame, check_frame_type=False)
        shutil.copytree(folder, tmp_path / "killed")
    assert len(frame) == 6
    pd.testing.assert_frame_equal(session.frame, frame)
    pd.testing.assert_frame_equal(gl.load_run(session.folder), frame, check_frame_type=False)
    # A session that was killed in the middle of a line.
    file = tmp_path / "killed" / ROWS_FILE
    whole = file.read_bytes()
    file.write_bytes(whole[:-10])
    assert len(gl.load_run(tmp_path / "killed")) == 5
    assert [decode(line).tags["layer"] for line in whole.splitlines()[1:]] == [0, 0, 1, 1, 2, 2]


@pytest.mark.ranks
def test_rows_in_transit_when_the_session_closes_are_not_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def taps_then_holds(folder: str) -> None:
        for _ in range(50):
            gl.tap("x", torch.full((2,), own_value()))
        holds(folder)

    with gl.launch(1, 1) as session:
        # The notebook does not get round to reading until it stops listening.
        stopping = threading.Event()
        append, stop = session._rows.append, session._hub.stop
        monkeypatch.setattr(session._rows, "append", lambda lines: (stopping.wait(60), append(lines)))
        monkeypatch.setattr(session._hub, "stop", lambda: (stopping.set(), stop()))
        session.start(taps_then_holds, taps_then_holds, args=(str(tmp_path),))
        wait_for_file(tmp_path / "target[0] began")
    assert len(session.frame) == 50
    assert len(gl.load_run(session.folder)) == 50


# ---- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_close_ends_a_run_and_later_calls_raise(tmp_path: Path) -> None:
    session = gl.launch(1, 1)
    pids = session.status()["pid"].tolist()
    run = session.start(holds, holds, args=(str(tmp_path),))
    waiting = in_background(run.wait)
    wait_for_file(tmp_path / "target[0] began")

    session.close()
    session.close()

    with pytest.raises(gl.RunError, match="the session was closed") as caught:
        waiting()
    assert list(caught.value.failures) == ["baseline[0]", "target[0]"]
    assert run.done
    assert session.closed
    assert "closed" in repr(session)
    for call in (lambda: session.run(tap_x, tap_x), lambda: session.edit(b2t="x"), lambda: session.tensors("x")):
        with pytest.raises(gl.SessionClosedError, match="launch another"):
            call()
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
    # What was recorded can still be looked at.
    assert len(session.frame) == 0
    assert session.folder.is_dir()
    assert "--- target[0]" in session.log("target")


@pytest.mark.ranks
def test_leaving_the_with_closes_also_after_an_exception() -> None:
    session = gl.launch(1, 1)
    pid = session.status()["pid"].tolist()[0]
    with pytest.raises(ZeroDivisionError), session:
        raise ZeroDivisionError
    assert session.closed
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.ranks
def test_two_sessions_are_independent() -> None:
    with gl.launch(1, 1) as one, gl.launch(1, 1) as other:
        one.edit(b2t="True")
        assert one.run(tap_x, tap_x).target == [[10.0, 10.0]]
        assert other.run(tap_x, tap_x).target == [[20.0, 20.0]]
        assert (len(one.frame), len(other.frame)) == (1, 1)
        assert one.folder != other.folder
        one.close()
        assert other.run(tap_x, tap_x).target == [[20.0, 20.0]]


@pytest.mark.ranks
def test_a_rank_that_dies_between_runs_is_named_with_its_log() -> None:
    with gl.launch(1, 1) as session:
        session.run(target=lambda: print("the last words"))
        rank = session.ranks[1]
        rank.kill()
        wait_until(lambda: not rank.alive, "the news of its death")
        assert "gone: killed by SIGKILL" in session.status()["state"].tolist()
        with pytest.raises(
            gl.SessionClosedError, match=r"target\[0\] is gone \(killed by SIGKILL\) .*session\.restart\(\)"
        ) as caught:
            session.run(tap_x, tap_x)
        assert "the last words" in str(caught.value)
        assert list(session.stacks()) == ["baseline[0]"]


@pytest.mark.ranks
def test_a_run_ends_if_a_rank_dies_as_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    with gl.launch(1, 1) as session:
        rank, told, on_gone = session.ranks[1], threading.Event(), internals_of(session).reports.on_gone

        def dies_first(*args: Any, **kwargs: Any) -> gl.Run:
            """The rank dies after it was seen alive, and before there is a run in which that could be noted."""
            rank.kill()
            assert told.wait(60)
            return gl.Run(*args, **kwargs)

        monkeypatch.setattr(internals_of(session).reports, "on_gone", lambda rank: (on_gone(rank), told.set()))
        monkeypatch.setattr("graftlab.control.runs.Run", dies_first)
        run = session.start(tap_x, tap_x)
        with pytest.raises(gl.RunError, match=r"target\[0\] died: killed by SIGKILL"):
            run.wait(30)


# ---- pictures and other renderings ----------------------------------------------------------------------------------


def one_bad_element(size: int) -> None:
    value = torch.zeros(size, size)
    if gl.here().side == "target":  # type: ignore[union-attr]
        value[size - 3, 5] = 7.0
    gl.tap("large", value)


@pytest.mark.ranks
def test_a_heatmap_is_reduced_on_the_rank_and_a_single_bad_element_stays_visible() -> None:
    with gl.launch() as session:
        session.edit(keep="True")
        session.run(one_bad_element, one_bad_element, args=(1500,))
        found = session.difference_map("large")
        assert max(found.grid.shape) <= 512
        assert found.worst == 7.0
        assert tuple(found.worst_index) == (1497, 5)
        assert session.plot.heatmap("large").axes
        with pytest.raises(gl.SessionError, match="dim"):
            session.difference_map("large", dims=(0, 5))
        with pytest.raises(gl.SessionError, match="two different dimensions"):
            session.difference_map("large", dims=(0, 1, 0))
        for wrong in (0, (0.5,)):
            with pytest.raises(gl.SessionError, match=f"dims={re.escape(str(wrong))}: give one or two axes"):
                session.difference_map("large", dims=wrong)  # type: ignore[arg-type]
        # A message that a rank cannot read would end it.
        assert session.difference_map("large", dims=(1,)).worst == 7.0
        with pytest.raises(gl.SessionError, match="no pair of tensors is kept for 'other'"):
            session.plot.heatmap("other")


@pytest.mark.ranks
def test_sessions_runs_and_plans_show_as_html_without_markup_of_the_user() -> None:
    with gl.launch() as session:
        session.edit(b2t="name == '<b>'")
        run = session.run(one_bad_element, one_bad_element, args=(8,))
        shown = [thing._repr_mimebundle_() for thing in (session, run, session.plan)]
        for bundle, thing in zip(shown, (session, run, session.plan), strict=True):
            assert bundle["text/plain"].startswith(repr(thing))
        assert "baseline[0]" in shown[0]["text/html"]
        assert "1 compared" in shown[1]["text/html"]
        assert "large on target[0]" in shown[1]["text/html"]
        assert "&lt;b&gt;" in shown[2]["text/html"]
        assert "'<b>'" not in shown[2]["text/html"]
