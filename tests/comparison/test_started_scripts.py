"""Scripts that are started again for each run, where a call or an update cannot be repeated in its process."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from kit.processes import still_there, watch
from kit.support import wait_until
from torch import nn

import graftlab as gl
from graftlab.__main__ import main
from graftlab.base.tap_groups import kind_of_group
from graftlab.comparison.answers import Comparison
from graftlab.comparison.held_updates import take_equal_inputs
from graftlab.comparison.repeats import JudgingChoice
from graftlab.comparison.started_scripts import StartedScripts
from graftlab.ranks.held_call import HeldCall, WatchChoice
from graftlab.ranks.held_update import GradientWatch, HeldUpdate
from graftlab.ranks.holding import describe_call, hold, prepare_once
from graftlab.taps.outermost_calls import OutermostCalls

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.usefixtures("warm_scripts")]

SCRIPTS = Path(__file__).with_name("scripts")
STREAMS, CLOSURES = str(SCRIPTS / "streams.py"), str(SCRIPTS / "closures.py")


# ---- what is held ---------------------------------------------------------------------------------------------------


class Stream(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Iterator[torch.Tensor]:
        for _ in range(3):
            x = self.last(self.first(x))
            got = yield x
            x = x if got is None else x + got


def test_calls_in_a_generator_are_part_of_the_call_that_returned_it() -> None:
    model, seen = Stream(), []
    with OutermostCalls(lambda module, args, kwargs: seen.append(module)):
        items = model(torch.ones(1, 2))
        next(items)
        model.first(torch.ones(1, 2))
        given = items.send(torch.ones(2))
        assert len(list(items)) == 1
    assert seen == [model, model.first]
    plain = Stream.forward(model, torch.ones(1, 2))
    next(plain)
    assert torch.equal(given, plain.send(torch.ones(2)))


def test_a_call_that_returns_a_generator_is_held_to_its_last_item() -> None:
    model, x = Stream(), torch.ones(1, 2)
    described = HeldCall(partial(model, x), {"": model}, {"x": x}, WatchChoice()).describe()
    assert list(described.plain) == ["[0]", "[1]", "[2]"]
    assert described.not_repeated == ()


def test_a_call_that_fails_when_it_is_repeated_keeps_its_first_result() -> None:
    given = iter([torch.ones(2)])

    def call() -> torch.Tensor:
        return next(given)

    described = HeldCall(call, {"": nn.Linear(2, 2)}, {}, WatchChoice()).describe()
    assert described.fails_when_repeated == "StopIteration: "
    assert described.plain[""].tolist() == [1.0, 1.0]


# ---- the judgement, with calls that begin anew in place of processes ------------------------------------------------

calls: list[int] = []


def hold_call(fault: str, start: int) -> None:
    """Hold the call that a new process would reach: nothing outside the model has changed yet."""
    me = gl.here()
    wrong = fault if me is not None and me.side == "target" else ""
    calls.clear()
    torch.manual_seed(start if me is not None and fault == f"unseeded {me.side}" else 0)
    model = nn.Sequential()
    model.add_module("first", nn.Linear(8, 16))
    model.add_module("norm", nn.LayerNorm(16, eps=1e-2 if wrong == "eps" else 1e-5))
    model.add_module("last", nn.Linear(16, 4))
    x = torch.randn(6, 8)

    def call() -> torch.Tensor:
        calls.append(1)
        return model(x) * len(calls)

    hold(HeldCall(call, {"": model}, {"x": x}, WatchChoice()))


class StartedInPlace(StartedScripts):
    """Holds a new call where the scripts would be started again."""

    def __init__(self, session: gl.Session, fault: str) -> None:
        super().__init__(session, lambda: [], training=False)
        self._fault = fault

    def _reach(self, *, takes_inputs: bool = True) -> None:
        self.starts += 1
        self.session.run(hold_call, hold_call, args=(self._fault, self.starts))
        self.session.run(prepare_once, prepare_once, args=(self._backward,))


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(baseline=1, target=1, device="cpu") as session:
        yield session


def judged(session: gl.Session, fault: str) -> Comparison:
    session.run(hold_call, hold_call, args=(fault, 0))
    run = session.run(describe_call, describe_call)
    assert run.baseline[0].not_repeated == ("the returned value",)
    return StartedInPlace(session, fault).judge_call(run.baseline, run.target, JudgingChoice(), None)


def test_calls_that_cannot_be_repeated_agree_when_each_run_begins_anew(session: gl.Session) -> None:
    compared = judged(session, "")
    # Twice for the record, four times for the verdict, and once more to continue from there.
    assert (compared.answer, compared.starts, compared.named) == ("agree", 7, [])
    assert "gradients" not in compared.text
    assert any("grad" in str(tags) for tags in compared.frame["tags"])


def test_a_mistake_is_named_where_each_run_begins_anew(session: gl.Session) -> None:
    compared = judged(session, "eps")
    assert (compared.answer, compared.named[0]) == ("differ", "norm")
    assert "With the baseline's norm the output" in compared.text
    assert compared.starts < 25


@pytest.mark.parametrize("side", ["baseline", "target"])
def test_a_side_that_differs_between_two_starts_is_named_with_its_first_tap(session: gl.Session, side: str) -> None:
    compared = judged(session, f"unseeded {side}")
    assert (compared.answer, compared.starts) == ("inconclusive", 2)
    text = (
        f"The {side} does not repeat itself: started twice, it shows different values in call 1 of Sequential, first "
        "at input"
    )
    assert compared.text.startswith(text)
    assert "torch.manual_seed(0)" in compared.text


def hold_closure(fault: str) -> None:
    """Hold the first step of LBFGS, whose closure calls the model."""
    me = gl.here()
    wrong = fault if me is not None and me.side == "target" else ""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))
    x, wanted = torch.randn(32, 8), torch.randn(32, 4)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.6 if wrong == "rate" else 0.5, max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) - wanted).square().mean() * (1.1 if wrong == "scaled" else 1.0)
        loss.backward()
        return loss

    step = partial(torch.optim.LBFGS.step, optimizer, closure)
    watched = partial(gl.watch, inputs=True, grads=True)
    models = {"Net": model}
    hold(HeldUpdate(step, optimizer, models, GradientWatch(), {}, number=1, calls=0, watch_calls=watched))


class ClosureInPlace(StartedInPlace):
    def _reach(self, *, takes_inputs: bool = True) -> None:
        self.starts += 1
        self.session.run(hold_closure, hold_closure, args=(self._fault,))
        if takes_inputs:
            take_equal_inputs(self.session)


@pytest.mark.parametrize(
    ("fault", "answer", "said"),
    [
        ("", "agree", "From equal weights, gradients and state both sides compute the same update."),
        ("rate", "differ", "The optimizer's lr is 0.5 on the baseline and 0.6 on the target."),
        ("scaled", "differ", "From equal weights and state both sides compute different steps."),
    ],
)
def test_a_step_with_a_closure_is_judged_with_its_calls(
    session: gl.Session, fault: str, answer: str, said: str
) -> None:
    session.run(hold_closure, hold_closure, args=(fault,))
    run = session.run(describe_call, describe_call)
    assert all(each.has_closure for each in (*run.baseline, *run.target))
    compared = ClosureInPlace(session, fault).judge_update(run.baseline, run.target, JudgingChoice(), None, {})
    assert compared.answer == answer, compared.text
    assert said in compared.text
    first_agrees = "The closure's first call agrees" in compared.text
    assert first_agrees == (fault == "rate")
    # Then what differs in the model's later calls is not named beside the step that it follows from.
    assert (not any(kind_of_group(group) in (None, "grad") for group in compared.named)) == (fault != "scaled")
    assert "Fix the forward pass" not in compared.text
    # The closure's calls are among the taps.
    assert {"0", "2"} <= {*compared.frame["name"]}


# ---- scripts --------------------------------------------------------------------------------------------------------


def compared(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> tuple[dict[str, object], str]:
    """What ``graftlab compare`` prints as JSON, and on stderr; its exit code is the one in there."""
    code = main(["compare", *words, "--json", "--folder", str(folder)])
    captured = capsys.readouterr()
    answer: dict[str, object] = json.loads(captured.out)
    assert answer["exit_code"] == code, captured.err
    return answer, captured.err


def test_a_start_again_can_be_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer, error = compared(capsys, tmp_path, STREAMS, f"{STREAMS} wrong", "--no-restart")
    assert (answer["exit_code"], answer["way"], answer["starts"]) == (2, "held", 0)
    assert "--no-restart refuses that." in str(answer["text"])
    assert "started again" not in error


FAILS_LATER = """
import os, signal, sys, torch
note = sys.argv[1]
if os.path.exists(note):
    if sys.argv[2] == "fails":
        sys.exit("the port is taken")
    with open(f"{note}.new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(f"{note}.new", f"{note}.again")
    signal.pause()
open(note, "w").close()
torch.manual_seed(0)
calls = []
class Net(torch.nn.Linear):
    def forward(self, x):
        calls.append(1)
        return super().forward(x) * len(calls)
Net(2, 2)(torch.ones(1, 2))
"""


@pytest.mark.parametrize("how", ["fails", pytest.param("waits", marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_a_failure_or_interrupt_in_a_later_start_ends_both_sides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    script = tmp_path / "later.py"
    script.write_text(FAILS_LATER)
    notes = [tmp_path / side for side in ("baseline", "target")]
    again = [tmp_path / f"{side}.again" for side in ("baseline", "target")]
    watched: dict[int, int] = {}

    def interrupt() -> None:
        try:
            wait_until(lambda: all(note.exists() for note in again), "both scripts to wait in their second start", 600)
            watched.update(watch(int(note.read_text()) for note in again))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=interrupt)
    if how == "waits":
        stopper.start()
    code = main(["compare", *(f"{script} {note} {how}" for note in notes), "--folder", str(tmp_path / "run")])
    error = capsys.readouterr().err
    assert "The scripts will be started again for each of about 7 runs" in error
    if how == "waits":
        stopper.join()
        assert (code, still_there(watched)) == (130, [])
        assert len(watched) == 2
    else:
        assert code == 2
        assert "ended with exit code 1 before it called a model" in error
        assert error.rstrip().endswith("ends:\nthe port is taken")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("fault", "answer"), [("", "agree"), ("wrong", "differ"), ("unseeded", "inconclusive")])
def test_a_generator_that_cannot_be_held_is_judged_by_starting_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, answer: str
) -> None:
    found, error = compared(capsys, tmp_path, STREAMS, f"{STREAMS} {fault}")
    assert (found["answer"], found["way"]) == (answer, "started again"), found["text"]
    assert "--no-restart refuses this" in error
    assert found["named"] == (["norm"] if fault == "wrong" else [])
    assert ("shows different values in call 1 of Model, first at " in str(found["text"])) == (fault == "unseeded")


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("fault", "answer"), [("", "agree"), ("rate", "differ"), ("scaled", "differ")])
def test_a_step_with_a_closure_is_judged_by_starting_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, answer: str
) -> None:
    found, _ = compared(capsys, tmp_path, CLOSURES, f"{CLOSURES} {fault}", "--training", "--calls", "1")
    assert (found["answer"], found["way"]) == (answer, "started again"), found["text"]
    if fault == "rate":
        assert "The optimizer's lr is 0.5 on the baseline and 0.6 on the target." in str(found["text"])


@pytest.mark.soak
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("fault", "answer"), [("", "agree"), ("wrong", "differ")])
def test_ranks_of_torchrun_are_started_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str, answer: str
) -> None:
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    found, _ = compared(capsys, tmp_path, STREAMS, f"{launcher} {STREAMS} {fault}")
    assert (found["answer"], found["way"]) == (answer, "started again"), found["text"]
    assert found["named"] == (["norm"] if fault else [])
