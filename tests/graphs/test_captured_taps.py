"""Taps in captured graphs show what those of an eager model show, row by row, and grafts do the same there."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from kit.support import SMALL_MODEL, reset
from torch import Tensor

import graftlab as gl
from graftlab.engine import (
    BreakableGraphRunner,
    CacheAttention,
    DecodeGraphRunner,
    EagerRunner,
    Engine,
    ForwardBatch,
    PrefillGraphRunner,
    Request,
)
from graftlab.engine.graph_attention import UnpaddedAttention
from graftlab.graphs import FillContext, PaddingPolicy
from graftlab.graphs.capture import CpuCapturer
from graftlab.graphs.captured_function import CapturedFunction
from graftlab.graphs.tap_sites import WantedTaps
from graftlab.models import Transformer

pytestmark = pytest.mark.ranks

TESTS = str(Path(__file__).resolve().parents[1])

CONFIG = dataclasses.replace(SMALL_MODEL, max_positions=48)

IN_MLP, IN_VALUES = "blocks.1.mlp.down_proj", "blocks.0.attention.v_proj"

KINDS = ("decode", "prefill", "both", "breakable")
kinds = pytest.mark.parametrize("kind", KINDS)
# Where only kernels are captured, whatever Python does at a replay is not done.
captures = pytest.mark.parametrize(
    "device",
    [
        "cpu",
        "kernels",
        pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ],
)
# Each runner on one of the two; in soak on both, and on a GPU always.
alternating = pytest.mark.parametrize(
    ("kind", "device"),
    [
        pytest.param(kind, device, marks=[] if (number + is_other) % 2 == 0 else pytest.mark.soak)
        for number, kind in enumerate(KINDS)
        for is_other, device in enumerate(("cpu", "kernels"))
    ]
    + [
        pytest.param(kind, "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
        for kind in KINDS
    ],
)


@pytest.fixture(scope="module")
def launched() -> Iterator[gl.Session]:
    with gl.launch(baseline=1, target=1, device=None if torch.cuda.is_available() else "cpu") as session:
        yield session


@pytest.fixture
def session(launched: gl.Session) -> gl.Session:
    return reset(launched)


# ---- on the ranks ---------------------------------------------------------------------------------------------------


def runner_of(kind: str) -> Any:
    return {
        "eager": EagerRunner,
        "decode": DecodeGraphRunner,
        "prefill": PrefillGraphRunner,
        "both": partial(PrefillGraphRunner, decode=DecodeGraphRunner),
        "breakable": BreakableGraphRunner,
    }[kind]


@contextlib.contextmanager
def capturing(device: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if device == "kernels":
            patch.syspath_prepend(TESTS)
            from kit.recorded_kernels import record_kernels

            record_kernels(patch)
        yield


def serve(
    kind: str, device: str = "cpu", fault: str = "", prepare: Callable[[Engine], object] | None = None
) -> tuple[list[list[int]], dict[str, Any]]:
    """The tokens of a few requests, and the runner's status then, by a new engine; each forward is a step."""
    torch.set_num_threads(1)
    with capturing(device):
        model = Transformer(CONFIG, seed=3).double().requires_grad_(False).to("cuda" if device == "cuda" else "cpu")
        if fault:
            model.get_submodule(fault).weight.mul_(1.5)  # type: ignore[operator]
        engine = Engine(model, runner=runner_of(kind), max_requests=4, max_prefill_tokens=20)
        engine.on_step = lambda batch: gl.step()
        if prepare is not None:
            prepare(engine)
    me = gl.here()
    assert me is not None
    me.vars["engine"] = engine
    return serve_again(device)


def serve_again(device: str = "cpu") -> tuple[list[list[int]], dict[str, Any]]:
    """The same requests again, by the same engine."""
    me = gl.here()
    assert me is not None
    engine, rng = me.vars["engine"], random.Random(5)
    prompts = [tuple(rng.choices(range(61), k=rng.randint(1, 20))) for _ in range(5)]
    requests = [Request(f"r{i}", prompt, rng.randint(1, 8)) for i, prompt in enumerate(prompts)]
    with capturing(device):
        answers = engine.generate(requests)
    return [answer["output_ids"] for answer in answers], engine.status()["runner"]


def rows_of(run: gl.Run) -> pd.DataFrame:
    """What a run found, in the order of each rank's taps, without what differs from run to run."""
    frame = run.frame.sort_values(["side", "step", "order"]).reset_index(drop=True)
    frame["step"] -= frame["step"].min()
    frame["shape"] = frame["shape"].map(str)
    names = ["side", "step", "name", "layer", "phase", "direction", "status", "shape", "occurrence", "error"]
    figures = ["rel_l2", "max_abs", "mean_baseline", "mean_target", "nonfinite_target"]
    return frame[[*names, *figures]]


# ---- as an eager model ----------------------------------------------------------------------------------------------


def halfway(graft_input: gl.GraftTransformInput) -> Tensor:
    return (graft_input.received_list[0] + graft_input.target) / 2


PLANS: dict[str, dict[str, Any]] = {
    "compare": {},
    "graft": {"b2t": "name == 'mlp_out' and layer == 1"},
    "graft all": {"b2t": "True"},
    "both ways": {"b2t": "name in ('mlp_out', 'q')", "t2b": "name == 'v' or name == 'logits'"},
    "transform": {"b2t": "name == 'attn_out'", "transform": halfway},
    "some steps": {"b2t": "name == 'mlp_out' and step % 2 == 0", "compare": "step % 3 == 0"},
    "by rank": {"b2t": "name == 'mlp_out' and rank == 0", "compare": "layer == rank"},
}


@pytest.fixture(scope="module")
def eager(launched: gl.Session) -> Callable[[str], tuple[Any, pd.DataFrame]]:
    """Tokens and rows of an eager target under each plan."""
    known: dict[str, tuple[Any, pd.DataFrame]] = {}

    def of(plan: str) -> tuple[Any, pd.DataFrame]:
        if plan not in known:
            reset(launched).edit(**PLANS[plan])
            run = launched.run(baseline=partial(serve, "eager"), target=partial(serve, "eager", fault=IN_MLP))
            known[plan] = ((run.baseline[0][0], run.target[0][0]), rows_of(run))
        return known[plan]

    return of


def rows_and_tokens_are_those_of_an_eager_target(
    session: gl.Session, eager: Any, plan: str, kind: str, device: str
) -> None:
    tokens, rows = eager(plan)
    assert not rows["status"].isin(["missing", "timeout", "failed", "unmatched"]).any()
    session.edit(**PLANS[plan])
    run = session.run(baseline=partial(serve, "eager"), target=partial(serve, kind, device, fault=IN_MLP))
    assert (run.baseline[0][0], run.target[0][0]) == tokens
    pd.testing.assert_frame_equal(rows_of(run), rows, rtol=1e-6, atol=1e-9)
    status = run.target[0][1]
    assert status["captures"] < status["replays"]
    assert status["grafts"] == ("breaks" if kind == "breakable" else "switches")


WITH_SWITCHES = KINDS[:-1]
DEVICES = ("cpu", "cuda" if torch.cuda.is_available() else "kernels")
# Each plan with one of the runners that have switches on one device, and with breaks on the other; with all of them in
# soak.
CASES = [
    case
    for n, plan in enumerate(PLANS)
    for case in (
        (plan, WITH_SWITCHES[n % len(WITH_SWITCHES)], DEVICES[n % 2]),
        (plan, "breakable", DEVICES[1 - n % 2]),
    )
]


@pytest.mark.parametrize(("plan", "kind", "device"), CASES)
def test_rows_and_tokens_are_those_of_an_eager_target(
    session: gl.Session, eager: Any, plan: str, kind: str, device: str
) -> None:
    rows_and_tokens_are_those_of_an_eager_target(session, eager, plan, kind, device)


@pytest.mark.soak
@captures
@kinds
@pytest.mark.parametrize("plan", PLANS)
def test_rows_and_tokens_equal_an_eager_targets_in_every_runner(
    session: gl.Session, eager: Any, plan: str, kind: str, device: str
) -> None:
    rows_and_tokens_are_those_of_an_eager_target(session, eager, plan, kind, device)


@kinds
def test_both_sides_may_be_captured(session: gl.Session, eager: Any, kind: str) -> None:
    tokens, rows = eager("both ways")
    session.edit(**PLANS["both ways"])
    run = session.run(baseline=partial(serve, "breakable"), target=partial(serve, kind, "kernels", fault=IN_MLP))
    assert (run.baseline[0][0], run.target[0][0]) == tokens
    pd.testing.assert_frame_equal(rows_of(run), rows, rtol=1e-6, atol=1e-9)


def test_the_planted_fault_shows_and_a_graft_removes_it(eager: Any) -> None:
    (baseline, target), rows = eager("compare")
    assert baseline != target
    first = rows[rows["rel_l2"] > 1e-9].iloc[0]
    assert (first["name"], first["layer"], first["step"]) == ("mlp_out", 1, 0)
    (baseline, target), _ = eager("graft")
    assert baseline == target


# ---- what is captured when ------------------------------------------------------------------------------------------


@alternating
def test_taps_that_no_plan_has_wanted_leave_nothing_in_a_graph(session: gl.Session, kind: str, device: str) -> None:
    session.edit(compare="False")
    run = session.run(baseline=partial(serve, "eager"), target=partial(serve, kind, device))
    status = run.target[0][1]
    assert (status["taps_captured"], status["taps_broken_at"], len(run.frame)) == ({}, {}, 0)
    # The embedding, nine in each of the layers, the last norm and the logits.
    assert status["taps"] == 21


@alternating
def test_an_edit_captures_anew_only_for_taps_never_wanted_before(session: gl.Session, kind: str, device: str) -> None:
    breaks = kind == "breakable"
    session.edit(compare="False")
    run = session.run(baseline=partial(serve, "eager"), target=partial(serve, kind, device, fault=IN_MLP))
    counts, answers = [run.target[0][1]["captures"]], []
    for plan in (
        {"compare": "name == 'mlp_out'"},
        {"compare": "False"},
        {"b2t": "name == 'mlp_out'"},
        {"b2t": "name == 'mlp_out' and layer == 1"},
        {"b2t": "name == 'mlp_out'", "transform": halfway},
        {"b2t": None, "transform": None, "compare": "name == 'mlp_out'"},
        {"b2t": "name == 'mlp_out' and layer == 1"},
        {"b2t": None, "compare": "search('mlp', name)"},
    ):
        session.edit(**plan)
        run = session.run(baseline=partial(serve_again, "cpu"), target=partial(serve_again, device))
        status = run.target[0][1]
        counts.append(status["captures"])
        wanted = 0 if plan.get("b2t") is None else 1 if "layer" in plan["b2t"] else 2
        assert status["taps_broken_at"] == ({"mlp_out": wanted} if breaks and wanted else {})
        answers.append(run.baseline[0][0] == run.target[0][0])
        assert not run.frame["status"].isin(["missing", "timeout", "failed", "unmatched"]).any()
    each = counts[0]
    captured = [(count - before) // each for before, count in itertools.pairwise(counts)]
    # What breaks is captured for each choice of broken taps, and is kept for the next such choice.
    assert captured == ([1, 0, 1, 1, 0, 0, 0, 1] if breaks else [1, 0, 0, 0, 0, 0, 0, 1])
    assert answers == [False, False, True, True, False, False, True, False]
    status = run.target[0][1]
    # One of them in each of the layers.
    assert status["taps_captured"] == {"mlp_norm": 2, "mlp_out": 2, "mlp_residual": 2}
    assert status["taps_broken_at"] == {}


def test_a_plan_that_grafts_both_ways_at_once_is_refused_and_leaves_all_switches_off(session: gl.Session) -> None:
    def overlapping() -> str:
        try:
            serve("decode", fault=IN_MLP)
        except gl.GraftOverlapError as error:
            return str(error)
        return "nothing was raised"

    session.edit(b2t="name == 'embed' or name == 'v'", t2b="name == 'v' and layer == 1 and step >= 0")
    run = session.run(baseline=overlapping, target=overlapping)
    assert "tap 'v' matches both b2t and t2b" in run.target[0]
    session.edit(b2t=None, t2b=None)

    def switches_and_tokens() -> tuple[bool, Any]:
        me = gl.here()
        assert me is not None
        engine = me.vars["engine"]
        for rid in engine.live:
            engine.abort(rid)
        tokens, _ = serve_again()
        functions = [each for variants in engine.runner._captured.values() for each in variants]
        return any(site.slot.switch.any() for each in functions for site in each.sites if site.slot), tokens

    run = session.run(baseline=switches_and_tokens, target=switches_and_tokens)
    assert run.baseline == run.target
    assert run.target[0][0] is False


# ---- tags, occurrences, hooks, host parts ----------------------------------------------------------------------------


class Telling(CacheAttention):
    """Taps in the attention, which a piecewise prefill runs on the host."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return gl.tap("attended", super().attend(layer, q, k, v))


class TellingUnpadded(UnpaddedAttention):
    """The same for padded batches; the padding is no part of what it tells."""

    def prepare_metadata(self, batch: ForwardBatch) -> None:
        assert batch.extend_lens_cpu is not None
        self.tokens = int(batch.extend_lens_cpu.sum())
        super().prepare_metadata(batch)

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = super().attend(layer, q, k, v)
        gl.tap("attended", out[: self.tokens])
        return out


def telling(engine: Engine) -> None:
    if isinstance(engine.runner, PrefillGraphRunner):
        engine.runner.attention = TellingUnpadded(engine.cache, None)
        engine.runner.decode = EagerRunner(engine.model, engine.cache, Telling(engine.cache, None))
    else:
        engine.runner = EagerRunner(engine.model, engine.cache, Telling(engine.cache, None))


@captures
@pytest.mark.parametrize(
    "plan",
    [{}, {"b2t": "name in ('attended', 'q')"}, {"b2t": "name in ('q', 'attn_out')", "t2b": "name == 'attended'"}],
)
def test_taps_of_what_the_host_runs_between_graphs_are_reached_once_and_in_order(
    session: gl.Session, plan: dict[str, str], device: str
) -> None:
    session.edit(**plan)
    runs = [
        session.run(
            baseline=partial(serve, "eager", prepare=telling),
            target=partial(serve, kind, device, fault=IN_VALUES, prepare=telling),
        )
        for kind in ("eager", "prefill")
    ]
    assert runs[0].target[0][0] == runs[1].target[0][0]
    assert (rows_of(runs[1])["name"] == "attended").sum() > 20
    assert not rows_of(runs[1])["status"].isin(["missing", "timeout", "failed", "unmatched"]).any()
    pd.testing.assert_frame_equal(rows_of(runs[1]), rows_of(runs[0]), rtol=1e-6, atol=1e-9)


def watched(engine: Engine) -> None:
    gl.watch(engine.model, include="search('proj$', name)")


@alternating
def test_hooks_of_watch_are_taps_too(session: gl.Session, kind: str, device: str) -> None:
    session.edit(b2t="name == 'blocks.1.mlp.down_proj'")
    runs = [
        session.run(
            baseline=partial(serve, "eager", prepare=watched),
            target=partial(serve, each, device, fault=IN_MLP, prepare=watched),
        )
        for each in ("eager", kind)
    ]
    assert runs[0].baseline[0][0] == runs[1].target[0][0]
    pd.testing.assert_frame_equal(rows_of(runs[1]), rows_of(runs[0]), rtol=1e-6, atol=1e-9)


def rounds(kind: str, fault: str = "") -> list[Any]:
    """One engine in three surroundings; what it answered, and how often it had captured."""
    found = []
    for number in range(3):
        with gl.tags(round=number, **({"layer": "none"} if number == 0 else {})):
            found.append(serve_again() if number else serve(kind, fault=fault))
    return [(tokens, status.get("captures")) for tokens, status in found]


def test_tags_around_a_replay_are_those_of_the_replay_and_not_of_the_capture(session: gl.Session) -> None:
    run = session.run(baseline=partial(rounds, "eager"), target=partial(rounds, "both"))
    assert set(run.frame["status"]) == {"compared"}
    assert run.frame.groupby("round").size().nunique() == 1
    assert set(run.frame[run.frame["name"] == "q"]["layer"]) == {0, 1}
    assert set(run.frame[(run.frame["name"] == "embed") & (run.frame["round"] == 0)]["layer"]) == {"none"}


@kinds
def test_filters_see_the_tags_around_a_replay_at_its_capture_too(session: gl.Session, kind: str) -> None:
    session.edit(b2t="name == 'mlp_out' and round != 1", compare="name == 'q' and round != 2")
    runs = [
        session.run(baseline=partial(rounds, "eager"), target=partial(rounds, each, fault=IN_MLP))
        for each in ("eager", kind)
    ]
    for run in runs:
        assert [target[0] == run.baseline[0][0][0] for target in run.target[0]] == [True, False, True]
    pd.testing.assert_frame_equal(rows_of(runs[1]), rows_of(runs[0]), rtol=1e-6, atol=1e-9)
    counts = [captures for _, captures in runs[1].target[0]]
    # With breaks once more, for none of them.
    assert counts == ([counts[0], 2 * counts[0], 2 * counts[0]] if kind == "breakable" else [counts[0]] * 3)


def test_tags_around_a_replay_may_be_arrays(session: gl.Session) -> None:
    def tagged(kind: str) -> None:
        import numpy as np

        with gl.tags(ids=np.arange(3)):
            serve(kind)

    frame = session.run(baseline=partial(tagged, "eager"), target=partial(tagged, "both")).frame
    assert set(frame["status"]) == {"compared"}


@captures
def test_hooks_that_come_or_go_between_batches_are_in_the_next_replay(session: gl.Session, device: str) -> None:
    def serve_thrice(kind: str) -> None:
        serve(kind, device)
        me = gl.here()
        assert me is not None
        with gl.watch(me.vars["engine"].model, include="search('down_proj', name)"):
            serve_again(device)
        serve_again(device)

    session.edit(compare="search('embed|down_proj', name)")
    frames = [
        rows_of(session.run(baseline=partial(serve_thrice, "eager"), target=partial(serve_thrice, kind)))
        for kind in ("eager", "both")
    ]
    assert set(frames[1]["status"]) == {"compared"}
    pd.testing.assert_frame_equal(frames[1][["step", "name", "shape"]], frames[0][["step", "name", "shape"]])


def test_functions_that_are_captured_anew_let_go_of_their_memory_at_once(session: gl.Session) -> None:
    def with_taps(names: int) -> tuple[int, int]:
        gc.disable()  # which knows nothing of a GPU's memory, and might not come for long
        serve_again()
        me = gl.here()
        assert me is not None
        current = sum(len(each) for each in me.vars["engine"].runner._captured.values())
        alive = sum(type(each).__name__ == "Slot" for each in gc.get_objects())
        return alive, current * names

    session.edit(compare="False")
    session.run(target=partial(serve, "decode"), baseline=partial(serve, "eager"))
    # Other tests' engines.
    session.run(target=gc.collect)
    try:
        for count, names in enumerate(("embed", "embed|logits", "embed|logits|final_norm"), 1):
            session.edit(compare=f"search('{names}', name)")
            run = session.run(target=partial(with_taps, count), baseline=serve_again)
            alive, expected = run.target[0]
            assert alive == expected > 0
    finally:
        session.run(target=gc.enable)


def call(
    function: Callable[[Tensor], Tensor], device: str, grafts: Any, inputs: list[list[float]]
) -> list[list[float]]:
    """A function of one static buffer, captured to be grafted so, or not at all, on each of the inputs, a step each."""
    outputs, graph = [], None
    with capturing(device), torch.no_grad():
        from graftlab.graphs import capture

        buffer = torch.zeros(len(inputs[0]), device="cuda" if device == "cuda" else "cpu")
        kernels = {"kernels": "cpu", "cuda": "cuda"}.get(device)
        capturer = CpuCapturer() if kernels is None else capture.CudaCapturer(torch.device(kernels))
        size, choice = FillContext(len(inputs[0]), len(inputs[0]), 0, 0), WantedTaps(grafts)
        for values in inputs:
            buffer.copy_(torch.tensor(values))
            if grafts is None:
                outputs.append(function(buffer).tolist())
            else:
                if graph is None or not graph.suits():
                    graph = CapturedFunction(size, choice, capturer)
                    graph.capture(lambda: (function(buffer),))
                outputs.append(graph.replay(int, size)[0][0].tolist())
            gl.step()
    return outputs


def odd_taps(x: Tensor) -> Tensor:
    """Values of every kind that a tap may be given."""
    y = x * (2 if gl.here().side == "baseline" else 3)  # type: ignore[union-attr]
    gl.tap("statement", y)
    one = y[:1].clone()
    gl.tap("expanded statement", one.expand(3))
    y = y + one
    y = gl.tap("expanded", (y[:1] + 1).expand(3)) + y
    gl.tap("lazy", lambda: y)
    for _ in range(2):
        y = gl.tap("twice", y + 1)
    gl.tap("strided", torch.stack((y, -y), dim=1)[:, 0])
    y = y + gl.tap("scalar", y.sum())
    gl.tap("not a tensor", "text")
    # Its output is its input; a hook's graft leaves what others have of it as it is.
    module = torch.nn.Identity()
    with gl.watch(module, prefix="identity "):
        y = y - 2 * module(y)
    # What comes after a hook may take a view that only its strides allow.
    turned = torch.nn.Identity()
    with gl.watch(turned, prefix="turned "):
        y = y + turned(torch.stack((y, -y)).t()).t().reshape(2, 3).view(-1)[:3]
    return y + gl.tap("float8", y.to(torch.float8_e4m3fn)).to(y.dtype) + gl.tap("bool", y > 20)


@captures
@pytest.mark.parametrize("grafts", ["switches", "breaks"])
@pytest.mark.filterwarnings("ignore:.*not a tensor")
@pytest.mark.parametrize(
    "b2t",
    [
        None,
        "True",
        "name == 'twice' and layer is None",
        "search('s', name)",
        "search('identity', name)",
        "name == 'expanded statement'",
    ],
)
def test_every_kind_of_value_is_shown_and_grafted_as_outside_of_a_capture(
    session: gl.Session, b2t: str | None, grafts: str, device: str
) -> None:
    session.edit(b2t=b2t)
    inputs = [[1.0, 2.0, 3.0], [-4.0, 0.5, 8.0]]
    outputs, frames = [], []
    for way in (None, grafts):
        run = session.run(
            baseline=partial(call, odd_taps, "cpu", None, inputs), target=partial(call, odd_taps, device, way, inputs)
        )
        outputs.append(run.target[0])
        frame = run.frame.sort_values(["side", "step", "order"]).reset_index(drop=True)
        frames.append(frame[["name", "status", "occurrence", "rel_l2", "max_abs", "shape", "dtype"]])
    assert outputs[0] == outputs[1]
    pd.testing.assert_frame_equal(frames[1], frames[0])
    assert len(frames[0]) == 2 * 12


def test_a_function_that_reaches_other_taps_when_it_runs_again_is_refused(session: gl.Session) -> None:
    def other_taps() -> str:
        names = iter("ab")
        try:
            call(lambda x: gl.tap(next(names), x), "kernels", "switches", [[1.0]])
        except gl.GraphError as error:
            return str(error)
        return "nothing was raised"

    said = session.run(target=other_taps).target[0]
    assert (
        "reached tap 'b' as number 1 this time; when it ran first, its taps were ['a']. It must reach the same" in said
    )


def test_fewer_taps_or_other_shapes_than_at_first_are_refused(session: gl.Session) -> None:
    def said(function: Callable[[Tensor], Tensor]) -> str:
        try:
            call(function, "cpu", "switches", [[1.0, 2.0]])
        except gl.GraphError as error:
            return str(error)
        return "nothing was raised"

    def refused() -> tuple[str, str]:
        times, lengths = iter((2, 1)), iter((2, 1))

        def fewer(x: Tensor) -> Tensor:
            for _ in range(next(times)):
                gl.tap("a", x)
            return x + 1

        def shorter(x: Tensor) -> Tensor:
            return gl.tap("a", x[: next(lengths)])

        return said(fewer), said(shorter)

    fewer, shorter = session.run(baseline=int, target=refused).target[0]
    assert "a captured function ran past 1 taps this time; when it ran first, its taps were ['a', 'a']" in fewer
    assert "had a different value at tap 'a' this time: a tensor of shape [1]" in shorter


def test_a_parameter_is_never_taken_for_rows_of_a_batch(session: gl.Session) -> None:
    def serve_long(kind: str) -> None:
        torch.set_num_threads(1)
        engine = Engine(Transformer(CONFIG, seed=3), runner=runner_of(kind), on_step=lambda batch: gl.step())
        weight = engine.model.final_norm.weight

        def tap_weight(*_: object) -> None:
            gl.tap("weight", weight)

        engine.model.final_norm.register_forward_hook(tap_weight)
        # Padded to as many tokens as there are weights.
        engine.generate([list(range(20))], 2)

    frame = session.run(baseline=partial(serve_long, "eager"), target=partial(serve_long, "prefill")).frame
    assert set(frame["status"]) == {"compared"}
    assert {tuple(shape) for shape in frame[frame["name"] == "weight"]["shape"]} == {(32,)}


def test_compiled_code_inside_of_a_capture_is_compiled_as_outside(session: gl.Session) -> None:
    def compiled_ops(grafts: Any) -> tuple[Any, int]:
        torch._dynamo.reset()
        seen: list[int] = []

        def backend(module: torch.fx.GraphModule, inputs: Any) -> Any:
            seen.append(len(list(module.graph.nodes)))
            return module.forward

        def function(x: Tensor) -> Tensor:
            return gl.tap("b", gl.tap("a", x * 2) + 1) * 3

        return call(torch.compile(function, backend=backend), "cpu", grafts, [[1.0, 2.0], [3.0, 4.0]]), len(seen)

    runs = [
        session.run(baseline=partial(compiled_ops, None), target=partial(compiled_ops, grafts)).target[0]
        for grafts in (None, "switches")
    ]
    assert runs[0] == runs[1]


def tap_inside_of_mlps(engine: Engine, compiled: bool) -> None:
    """Taps within each MLP, which is compiled inside of the runner's captured decodes."""
    torch.compiler.reset()

    def tapped(inner: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def forward(x: Tensor) -> Tensor:
            with gl.tags(part="inside"):
                return gl.tap("after", inner(gl.tap("before", x)) * 1.0)

        return torch.compile(forward, backend="aot_eager", fullgraph=True, dynamic=True) if compiled else forward

    for block in engine.model.blocks:  # type: ignore[union-attr]
        block.mlp.forward = tapped(block.mlp.forward)


@pytest.mark.parametrize("b2t", [pytest.param(None, marks=pytest.mark.soak), "name == 'after'"])
def test_compiled_taps_in_a_captured_decode_equal_an_eager_models(session: gl.Session, b2t: str | None) -> None:
    session.edit(b2t=b2t)
    uncompiled = partial(tap_inside_of_mlps, compiled=False)
    runs = [
        session.run(
            baseline=partial(serve, "eager", prepare=uncompiled),
            target=partial(serve, kind, fault=IN_MLP, prepare=prepare),
        )
        for kind, prepare in (("eager", uncompiled), ("decode", partial(tap_inside_of_mlps, compiled=True)))
    ]
    assert runs[0].target[0][0] == runs[1].target[0][0]
    assert runs[1].target[0][1]["replays"] > 0
    frame = runs[1].frame
    assert set(frame.loc[frame["compiled"].eq(True), "name"]) == {"before", "after"}
    assert set(frame.loc[frame["compiled"].eq(True), "phase"]) >= {"decode"}
    pd.testing.assert_frame_equal(*(rows_of(run) for run in runs), rtol=1e-9, atol=1e-12)


# ---- ranks that compute together ------------------------------------------------------------------------------------


def add_up(x: Tensor) -> Tensor:
    """Ranks of a side add up between two taps."""
    me = gl.here()
    assert me is not None
    total = gl.tap("a", x + me.rank + 1.0).clone()
    if me.world_size > 1:
        torch.distributed.all_reduce(total)
    return gl.tap("b", total * 2)


@pytest.fixture(scope="module")
def one_and_two() -> Iterator[gl.Session]:
    with gl.launch(baseline=1, target=2, device="cpu", timeout=20.0) as session:
        yield session


@pytest.mark.parametrize("grafts", ["switches", "breaks"])
def test_ranks_that_a_plan_tells_apart_capture_and_replay_equally_often(grafts: str, one_and_two: gl.Session) -> None:
    # Eight steps a run, so that each begins with a step of the same parity.
    inputs = [[float(i), 1.0] for i in range(7)]
    plans = [
        {"b2t": "name == 'a' and rank == 0"},
        {
            "b2t": "name == 'a' and (side == 'baseline' or rank == 1) and step % 2 == 0",
            "compare": "name == 'b' and rank == 0",
        },
        {"b2t": None, "compare": "name == 'a' and rank == 0 and step % 8 >= 1 or name == 'b' and rank == 1"},
    ]
    session = reset(one_and_two)
    for plan in plans:
        session.edit(**plan)
        runs = [
            session.run(
                baseline=partial(call, add_up, "cpu", None, inputs),
                target=partial(call, add_up, device, way, inputs),
            )
            for way, device in ((None, "cpu"), (grafts, "cpu"), (grafts, "kernels"))
        ]
        assert runs[0].target == runs[1].target == runs[2].target
        kinds_of_rows = [run.frame.groupby(["name", "rank", "status"]).size().to_dict() for run in runs]
        assert kinds_of_rows[0] == kinds_of_rows[1] == kinds_of_rows[2]
    session.edit(b2t=None, compare="tp_rank == 0")

    def told_apart() -> str:
        me = gl.here()
        assert me is not None
        try:
            call(lambda x: gl.tap("a", x, tp_rank=me.rank), "cpu", grafts, inputs)
        except gl.GraphError as error:
            return str(error)
        return "nothing was raised"

    said = session.run(baseline=int, target=told_apart).target
    assert all("the plan's filters look at ['tp_rank'] of tap 'a' on target" in each for each in said)


def test_taps_of_other_threads_are_not_those_of_a_capture(session: gl.Session) -> None:
    def two_threads() -> None:
        def function(x: Tensor) -> Tensor:
            other = threading.Thread(target=gl.tap, args=("elsewhere", torch.ones(2)))
            other.start()
            other.join()
            return gl.tap("here", x + 1)

        call(function, "cpu", "switches", [[1.0]])

    def one_thread() -> None:
        for _ in range(2):
            gl.tap("elsewhere", torch.ones(2))
        gl.tap("here", torch.tensor([2.0]))

    frame = session.run(baseline=one_thread, target=two_threads).frame
    # At the capture, and at the one replay.
    assert frame["name"].tolist() == ["elsewhere", "elsewhere", "here"]
    assert set(frame["status"]) == {"compared"}


# ---- static buffers as taps -----------------------------------------------------------------------------------------


def watch_slots(engine: Engine, stale: str = "", eager: bool = False) -> None:
    runner = engine.runner
    assert isinstance(runner, DecodeGraphRunner)
    runner.eager = eager
    if stale:
        object.__setattr__(runner.registry.get_slot(stale), "padding_policy", PaddingPolicy.FOREACH_COPY)
    runner.registry.watch(include="name != 'slot.seq_lens_cpu'")


@captures
def test_a_stale_tail_of_a_slot_is_the_first_row_that_differs(session: gl.Session, device: str) -> None:
    run = session.run(
        baseline=partial(serve, "decode", prepare=partial(watch_slots, eager=True)),
        target=partial(serve, "decode", device, prepare=partial(watch_slots, stale="positions")),
    )
    frame = run.frame
    assert set(frame["status"]) == {"compared"}
    assert run.baseline[0][0] == run.target[0][0], "these tokens do not hang on it"
    assert run.baseline[0][1]["replays"] == 0 < run.target[0][1]["replays"]
    differing = frame[frame["max_abs"] > 1e-9]
    assert set(zip(differing["name"], differing["part"], strict=True)) == {("slot.positions", "tail")}
    names = frame[frame["name"].str.startswith("slot.")].groupby("name")["part"].agg(set)
    assert set(names.index) == {
        f"slot.{name}" for name in ("input_ids", "positions", "out_cache_loc", "req_pool_indices", "seq_lens")
    }
    assert all(parts == {"head", "tail"} for parts in names)
    assert set(frame[frame["name"] == "slot.positions"]["phase"]) == {"decode"}


@captures
def test_a_graft_of_a_slot_is_what_the_graph_reads(session: gl.Session, device: str) -> None:
    """Into heads, since tails change nothing: the tokens of other requests."""

    def other(engine: Engine, shift: int) -> None:
        watch_slots(engine)
        generate = engine.generate

        def shifted(requests: list[Request]) -> Any:
            return generate([Request(r.rid, tuple((t + shift) % 61 for t in r.input_ids), 6) for r in requests])

        engine.generate = shifted  # type: ignore[method-assign, assignment]

    def under(**plan: str) -> gl.Run:
        session.edit(**plan)
        return session.run(
            baseline=partial(serve, "decode", prepare=partial(other, shift=0)),
            target=partial(serve, "decode", device, prepare=partial(other, shift=1)),
        )

    alone = under()
    # The second token of each is chosen after the baseline's first; keys before it are the target's own.
    grafted = under(b2t="name == 'slot.input_ids' and part == 'head'", compare="name == 'embed' and phase == 'decode'")
    rows = grafted.frame[grafted.frame["name"] == "embed"]
    assert len(rows)
    assert rows["max_abs"].max() == 0
    assert alone.frame.query("name == 'embed' and phase == 'decode'")["max_abs"].max() > 0


def test_slots_are_tapped_until_the_watch_is_removed(session: gl.Session) -> None:
    def chosen(engine: Engine) -> None:
        runner = engine.runner
        assert isinstance(runner, DecodeGraphRunner)
        watch = runner.registry.watch("a.", include="type == 'bs' and search('[.]positions|lens$', name)")
        assert watch.names == ["a.positions", "a.seq_lens", "a.encoder_lens"]
        with runner.registry.watch("b."):
            pass
        with pytest.raises(gl.FilterError):
            runner.registry.watch(include="name ==")
        with pytest.raises(gl.GraphError, match=r"leave no slot to watch; .*'slot\.positions'"):
            runner.registry.watch(include="positions")

    run = session.run(
        baseline=partial(serve, "decode", prepare=chosen), target=partial(serve, "decode", prepare=chosen)
    )
    taps_of_slots = set(run.frame["name"][run.frame["name"].str.contains(".", regex=False)])
    # No batch of this engine has encoder_lens.
    assert taps_of_slots == {"a.positions", "a.seq_lens"}


@pytest.mark.parametrize("kind", ["decode", "prefill", "breakable"])
def test_an_eager_runner_over_the_same_buffers_gives_the_same(session: gl.Session, kind: str) -> None:
    def eagerly(engine: Engine) -> None:
        engine.runner.eager = True  # type: ignore[attr-defined]

    run = session.run(baseline=partial(serve, kind, prepare=eagerly), target=partial(serve, kind))
    assert run.baseline[0][0] == run.target[0][0]
    assert (run.baseline[0][1]["eager"], run.baseline[0][1]["captures"]) == (True, 0)
    assert set(run.frame["status"]) == {"compared"}
    assert run.frame["rel_l2"].max() < 1e-12


def test_a_drafts_taps_are_distinguished_from_the_models(session: gl.Session) -> None:
    def drafted() -> None:
        from graftlab.engine import DraftGraphRunner

        torch.set_num_threads(1)
        model = Transformer(CONFIG, seed=3).double().requires_grad_(False)
        engine = Engine(model, runner=partial(DraftGraphRunner, draft=model), on_step=lambda batch: gl.step())
        engine.generate([[1, 2, 3]], 6)
        status = engine.status()["runner"]
        assert status["accepted"] > 0
        assert status["draft"]["runner"] == "DecodeGraphRunner"

    frame = session.run(baseline=drafted, target=drafted).frame
    assert set(frame["status"]) == {"compared"}
    logits = frame[(frame["name"] == "logits") & (frame["phase"] == "decode")]
    # Three guesses, and their verification, of one request.
    assert [shape[0] for shape in logits[logits["model"].isna()]["shape"]][:1] == [4]
    assert {shape[0] for shape in logits[logits["model"] == "draft"]["shape"]} == {1}
