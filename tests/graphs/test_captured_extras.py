"""What travels with a tap of a captured graph is this batch's, as it is outside of a graph."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.support import SMALL_MODEL, own_value, reset
from torch import Tensor

import graftlab as gl
from graftlab.engine import BreakableGraphRunner, DecodeGraphRunner, EagerRunner, Engine, PrefillGraphRunner
from graftlab.graphs import FillContext
from graftlab.graphs.capture import CpuCapturer
from graftlab.graphs.captured_function import CapturedFunction
from graftlab.graphs.tap_sites import WantedTaps
from graftlab.models import Transformer

pytestmark = pytest.mark.ranks

TESTS = str(Path(__file__).resolve().parents[1])
# Where only kernels are captured, whatever Python does at a replay is not done.
captures = pytest.mark.parametrize("device", ["cpu", "kernels"])
ways = pytest.mark.parametrize("grafts", ["switches", "breaks"])


@pytest.fixture(scope="module")
def launched() -> Iterator[gl.Session]:
    with gl.launch(baseline=1, target=1, device="cpu") as session:
        yield session


@pytest.fixture
def session(launched: gl.Session) -> gl.Session:
    return reset(launched)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def capturing(device: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if device == "kernels":
            patch.syspath_prepend(TESTS)
            from kit.recorded_kernels import record_kernels

            record_kernels(patch)
        yield


def replayed(
    function: Callable[[Tensor], Tensor],
    device: str,
    grafts: Any,
    inputs: list[list[float]],
    padded: int = 2,
    prepare: Callable[[], object] = int,
) -> list[list[float]]:
    """The outputs of a function of one static buffer, captured, or called as it is where nothing says how to graft."""
    outputs, graph = [], None
    with capturing(device), torch.no_grad():
        from graftlab.graphs import capture

        capturer = capture.CudaCapturer(torch.device("cpu")) if device == "kernels" else CpuCapturer()
        buffer = torch.zeros(padded)
        size, wanted = FillContext(padded, padded, 0, 0), WantedTaps(grafts)
        for values in inputs:
            buffer[: len(values)] = torch.tensor(values)
            if grafts is None:
                outputs.append(function(buffer[: len(values)]).tolist())
            else:
                if graph is None or not graph.suits():
                    graph = CapturedFunction(size, wanted, capturer)
                    graph.capture(lambda: (function(buffer),))
                ctx = FillContext(len(values), padded, 0, 0)
                outputs.append(graph.replay(prepare, ctx)[0][0][: len(values)].tolist())
            gl.step()
    return outputs


def refusal(function: Callable[[Tensor], Tensor], device: str, inputs: list[list[float]]) -> str:
    try:
        replayed(function, device, "switches", inputs)
    except gl.GraphError as error:
        return str(error)
    return "nothing was raised"


def scaled(x: Tensor) -> Tensor:
    """Its scale is made inside, nested among other things."""
    gl.tap("x", x, extras={"scales": [x[0] * 3, "max"], "rows": x * own_value()})
    return x + 1


def uses_the_extras(graft_input: gl.GraftTransformInput) -> Tensor:
    """Another number for each number in the extras of both sides."""
    (received,) = graft_input.received_extras_list
    mine = graft_input.target_extras
    assert received["scales"][1] == mine["scales"][1] == "max"
    return received["rows"] + 1000 * mine["rows"] + received["scales"][0] * 1e6 + mine["scales"][0] * 1e8


INPUTS = [[1.0, 2.0], [5.0], [3.0, 7.0]]


@captures
@ways
@pytest.mark.parametrize("captured", ["baseline", "target"])
def test_tensors_in_extras_are_those_of_each_replay(
    session: gl.Session, captured: str, grafts: str, device: str
) -> None:
    session.edit(b2t="name == 'x'", transform=uses_the_extras)
    found = {}
    for way in (None, grafts):
        sides = {"baseline": None, "target": None, captured: way}
        run = session.run(*(partial(replayed, scaled, device, sides[side], INPUTS) for side in sides))
        assert list(run.frame["status"]) == ["grafted"] * 3, run.frame["error"].tolist()
        found[way] = run.target
    assert found[grafts] == found[None]


@captures
@ways
def test_callable_extras_are_called_on_the_host_once_for_each_replay(
    session: gl.Session, grafts: str, device: str
) -> None:
    def counting() -> Callable[[Tensor], Tensor]:
        numbers = itertools.count(1)

        def function(x: Tensor) -> Tensor:
            return gl.tap("x", x, extras=lambda: {"n": next(numbers)}) * 1

        return function

    def run(way: str | None) -> list[list[float]]:
        return replayed(counting(), device, way, INPUTS)

    def n_of_both(graft_input: gl.GraftTransformInput) -> Tensor:
        (received,) = graft_input.received_extras_list
        assert graft_input.target_extras is not None
        return graft_input.target * 0 + received["n"] + 100 * graft_input.target_extras["n"]

    session.edit(b2t="name == 'x'", transform=n_of_both)
    found = session.run(partial(run, grafts), partial(run, grafts)).target[0]
    assert found == [[101.0, 101.0], [202.0], [303.0, 303.0]]


def test_a_callable_of_an_unmatched_tap_is_not_called(session: gl.Session) -> None:
    session.edit(compare=None, b2t="name == 'other'")

    def function() -> bool:
        called: list[int] = []
        gl.tap("x", torch.ones(1), extras=lambda: called.append(1))
        return bool(called)

    assert session.run(function, function).target == [False]


@captures
@pytest.mark.parametrize("own_way", [True, False])
def test_a_plain_object_that_changes_is_refused_when_the_tap_is_wanted_first(
    session: gl.Session, own_way: bool, device: str
) -> None:
    def refused() -> str:
        numbers = itertools.count(2)
        return refusal(lambda x: gl.tap("x", x, extras={"a": {"n": next(numbers)}}) + 1, device, INPUTS)

    session.edit(compare="name == 'x'" if own_way else "name == 'other'")
    said = session.run(baseline=int, target=refused).target[0]
    if own_way:
        assert "tap 'x' in a captured function: extras['a']['n'] was the int 2 at one time, and the int 3" in said
        assert "extras=lambda: {...}" in said
    else:
        assert said == "nothing was raised"


@captures
def test_a_plain_object_that_differs_between_two_captures_is_refused(session: gl.Session, device: str) -> None:
    def refused() -> str:
        wanted, said = WantedTaps("switches"), ""
        with capturing(device):
            for scale in (1.5, 1.5, 2.5):
                graph = CapturedFunction(FillContext(2, 2, 0, 0), wanted, CpuCapturer())
                try:
                    graph.capture(lambda scale=scale: (gl.tap("x", torch.ones(2), extras={"scale": scale}),))
                except gl.GraphError as error:
                    return said + str(error)
                said += "captured, "
        return "nothing was raised"

    said = session.run(baseline=int, target=refused).target[0]
    assert said.startswith("captured, captured, tap 'x'")
    assert "extras['scale'] was the float 2.5 at one time, and the float 1.5 at another" in said


def test_what_is_the_same_each_time_needs_no_tensor(session: gl.Session) -> None:
    def function(x: Tensor) -> Tensor:
        return gl.tap("x", x, extras={"names": ("a", None), "limits": torch.Size([2]), "nan": float("nan")}) + 1

    session.edit(b2t="name == 'x'", transform=lambda g: g.target + len(g.received_extras_list[0]["names"]))
    run = session.run(*[partial(replayed, function, "cpu", "switches", INPUTS)] * 2)
    assert run.target[0] == [[4.0, 5.0], [8.0], [6.0, 10.0]]


# ---- what the host prepares -----------------------------------------------------------------------------------------


def test_shared_inputs_are_prepared_before_each_replay_that_switches_need(session: gl.Session) -> None:
    def used_up(captured: bool) -> tuple[list[list[float]], int]:
        shared, prepared = torch.ones(1), []

        def prepare() -> None:
            prepared.append(shared.fill_(1.0))

        def function(x: Tensor) -> Tensor:
            first = gl.tap("x", x * own_value()) * shared
            second = gl.tap("y", first + own_value()) * shared
            # As a kernel does that works in its metadata.
            shared.mul_(100.0)
            return second

        prepare()
        outputs = replayed(function, "cpu", "switches" if captured else None, [[1.0, 2.0]], prepare=prepare)
        return outputs, len(prepared) - 1

    session.edit(b2t="name in ('x', 'y')")
    run = session.run(partial(used_up, False), partial(used_up, True))
    (outputs, prepared), (expected, _) = run.target[0], run.baseline[0]
    assert outputs == expected
    # One for each switch, and the last one; without a graft there is one alone.
    assert prepared == 3
    session.edit(b2t=None)
    assert session.run(partial(used_up, False), partial(used_up, True)).target[0][1] == 1


# ---- aligning by request --------------------------------------------------------------------------------------------

PROMPTS = ([5, 6, 7], [8, 9], [1, 2, 3, 4])
RUNNERS: dict[str, Any] = {
    "decode": DecodeGraphRunner,
    "prefill": PrefillGraphRunner,
    "breakable": BreakableGraphRunner,
}


def serve(runner: Any, order: tuple[int, ...]) -> list[list[int]]:
    model = Transformer(SMALL_MODEL, seed=3).double().requires_grad_(False)
    engine = Engine(model, runner=runner, max_requests=5, request_ids=True, on_step=lambda batch: gl.step())
    requests = [{"input_ids": PROMPTS[i], "rid": f"r{i}", "max_new_tokens": 4} for i in order]
    return [answer["output_ids"] for answer in engine.generate(requests)]


@pytest.mark.parametrize("runner", RUNNERS)
def test_the_engines_own_taps_are_aligned_by_request_in_padded_graphs(session: gl.Session, runner: str) -> None:
    session.edit(b2t="name == 'mlp_out'", transform=("True", "graftlab.transforms.align_by_request"))
    run = session.run(partial(serve, EagerRunner, (0, 1, 2)), partial(serve, RUNNERS[runner], (2, 0, 1)))
    frame = run.frame
    assert set(frame["status"]) == {"compared", "grafted"}, frame["error"].dropna().tolist()[:1]
    assert set(frame["aligned_by"]) == {"request"}
    assert frame["rel_l2"].max() < 1e-12
    assert (frame["rows_unmatched"] == 0).all()
    baseline, target = run.baseline[0], run.target[0]
    assert [target[1], target[2], target[0]] == baseline


def test_watched_taps_have_the_extras_that_watch_was_given(session: gl.Session) -> None:
    def watched(captured: bool, order: list[int]) -> list[list[float]]:
        module = torch.nn.Identity()
        ids = torch.tensor([7, 8, 9, 0])

        def function(x: Tensor) -> Tensor:
            ids[: len(order)] = torch.tensor(order)
            return module(x) * 1

        with gl.watch(module, extras=lambda module, inputs, output: {"rids_int": ids[: len(inputs[0])]}):
            inputs = [[own_value() + each for each in order]]
            return replayed(function, "cpu", "switches" if captured else None, inputs, padded=4)

    session.edit(b2t="True", transform="graftlab.transforms.align_by_request")
    run = session.run(partial(watched, False, [7, 8, 9]), partial(watched, True, [9, 7]))
    assert run.frame["error"].tolist() == [None]
    assert run.target[0] == [[19.0, 17.0]]
