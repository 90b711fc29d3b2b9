"""``session.check``: one side's ranks against each other, without a baseline."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kit.support import DEADLINE
from torch import nn

import graftlab as gl
from graftlab.base.progress import LongWait
from graftlab.errors import SessionError
from graftlab.judging import replica_check
from graftlab.zoo.scoring import run_specimen

RANKS = 1, 2

pytestmark = pytest.mark.ranks


def rank() -> int:
    me = gl.here()
    assert me is not None
    return me.rank


# ---- activations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("control", ["tensor_parallel", "tensor_parallel_backward"])
def test_a_correct_split_agrees_and_its_shards_are_reported(session: gl.Session, control: str) -> None:
    check = session.check(target=run_specimen, args=("control", control))
    assert check.found == [], check.text
    assert "The 2 ranks agree where they hold copies (" in check.text
    assert "are each rank's own, as shards are: " in check.text


def test_a_sum_that_one_layer_forgets_is_found(session: gl.Session) -> None:
    check = session.check(target=run_specimen, args=("fault", "one_sum_forgotten"))
    assert check.found[0] == "layers.*.attn"
    first = check.text.split("\n")[0]
    assert first.startswith("layers.*.attn should be equal on the ranks but is not in layer 1: rank 1 differs from the")
    assert "It looks like a partial sum that was not reduced here." in check.text


def forgets_every_sum() -> None:
    from graftlab.zoo.model import Config, Math, Model, RankShard, make_weights, shard_weights
    from graftlab.zoo.scoring import make_tokens

    class Unreduced(Math):
        def reduce(self, partial: torch.Tensor, layer: int, which: str) -> torch.Tensor:
            return partial if which == "attn" else super().reduce(partial, layer, which)

    config, shard = Config(), RankShard(rank(), 2)
    with torch.no_grad():
        Model(Unreduced(config, shard), shard_weights(make_weights(config), shard))(make_tokens(config))


def test_a_sum_that_every_layer_forgets_is_found_by_the_tensor_it_is_added_to(session: gl.Session) -> None:
    check = session.check(target=forgets_every_sum)
    assert check.found[0] == "layers.*.mid"
    # One paragraph: the first layer and its reason, and then what follows from it.
    first, *rest = check.text.split("\n")
    assert first.startswith("layers.*.mid should be equal on the ranks but is not in layer 0: rank 1 differs from the")
    assert "All of that difference is in layers.0.attn, whose values differ on each rank: a partial" in first
    assert " Later ones differ too, and may have inherited it: " in first
    assert not any("should be equal" in line for line in rest)


def test_differing_arithmetic_on_one_rank_is_found(session: gl.Session) -> None:
    check = session.check(target=run_specimen, args=("fault", "one_ranks_eps"))
    assert check.found[0] == "layers.*.norm1"
    frame = check.frame
    assert frame.loc[frame["relation"] == "disagrees", "name"].iloc[0] == "layers.0.norm1"
    assert frame.loc[frame["name"] == "embed", "relation"].item() == "agrees"


def test_a_gradient_that_is_not_summed_is_found(session: gl.Session) -> None:
    check = session.check(target=run_specimen, args=("fault", "attentions_gradient_not_summed"))
    assert "layers.*.norm1@grad" in check.found or "layers.*.out@grad" in check.found, check.text


def sequence_parallel(bias: float, forgets: bool = False) -> None:
    """Two layers between whose sums each rank has its part of the sequence, and adds the same bias to it."""
    from torch import distributed

    draw = partial(torch.randn, generator=torch.Generator().manual_seed(0))
    x, up, down, added = draw(16, 32) + 1, draw(32, 64) / 6, draw(64, 32) / 8, draw(32) * bias
    rows, columns = slice(rank() * 8, rank() * 8 + 8), slice(rank() * 32, rank() * 32 + 32)
    h = gl.tap("scattered", gl.tap("embed", x)[rows].clone())
    for layer in range(2):
        n = gl.tap(f"layers.{layer}.norm", nn.functional.layer_norm(h, (32,)))
        gathered = [torch.empty_like(n), torch.empty_like(n)]
        distributed.all_gather(gathered, n)
        whole = gl.tap(f"layers.{layer}.gathered", torch.cat(gathered))
        summed = gl.tap(f"layers.{layer}.partial", (whole @ up[:, columns]).relu() @ down[columns]).clone()
        if not (forgets and layer == 1):
            distributed.all_reduce(summed)
        if forgets:
            gl.tap(f"layers.{layer}.whole", whole + summed)
        down_part = gl.tap(f"layers.{layer}.down", summed[rows].clone())
        h = gl.tap(f"layers.{layer}.out", h + gl.tap(f"layers.{layer}.biased", down_part + added))


@pytest.mark.parametrize("bias", [2.0, 30.0])
def test_parts_of_a_sequence_are_not_taken_for_unreduced_sums(session: gl.Session, bias: float) -> None:
    check = session.check(target=sequence_parallel, args=(bias,))
    assert check.found == [], check.text
    assert "The 2 ranks agree where they hold copies (" in check.text
    assert session.check(target=sequence_parallel, args=(bias, True)).found == ["layers.*.whole"]


# ---- inputs and layouts ---------------------------------------------------------------------------------------------


def data_parallel(shifted: float = 0.0) -> None:
    x = gl.tap("tokens", torch.arange(8) + rank() * 3)
    h = gl.tap("hidden", x.float() * 2)
    gl.tap("norm", torch.ones(4) + shifted * rank(), kind="param")
    gl.tap("out", h + 1)


def test_differing_inputs_come_first_and_later_taps_are_not_judged(session: gl.Session) -> None:
    check = session.check(target=data_parallel)
    assert check.text.startswith("The ranks' inputs differ: tokens. Under data parallelism they must;")
    assert check.found == []


def test_weights_are_checked_despite_differing_inputs(session: gl.Session) -> None:
    check = session.check(target=data_parallel, args=(0.01,))
    assert check.found == ["norm@param"]
    assert "the update of" not in check.text


def shifted_hidden() -> None:
    gl.tap("x", torch.ones(4))
    gl.tap("hidden", torch.linspace(1, 2, 64) * (1 if rank() == 0 else -1))
    gl.tap("near", torch.linspace(1, 2, 64) + 0.01 * rank())


def test_declared_layouts_take_precedence(session: gl.Session) -> None:
    inferred = session.check(target=shifted_hidden)
    assert inferred.found == ["near"]
    assert "a difference may be intended. State with layouts= what each rank holds." in inferred.text
    layouts = {"name == 'hidden'": "replicate('tp')", "name == 'near'": "shard(dim=0, mesh='tp')"}
    check = session.check(target=shifted_hidden, layouts=layouts)
    assert check.found == ["hidden"]
    assert "inferred" not in check.text
    with pytest.raises(SessionError, match="has 3 ranks, and the side has 2"):
        session.check(target=shifted_hidden, layouts=layouts, mesh={"tp": 3})


def dtensors(spoiled: bool) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    mesh = init_device_mesh("cpu", (2,))
    own = torch.linspace(1, 2, 8) + (0.5 * rank() if spoiled else 0)
    gl.tap("replica", DTensor.from_local(own, mesh, [Replicate()]))
    gl.tap("shard", DTensor.from_local(torch.ones(4) + 0.01 * rank(), mesh, [Shard(0)]))


def test_a_dtensors_placements_determine_its_copies(session: gl.Session) -> None:
    assert session.check(target=dtensors, args=(False,)).found == []
    check = session.check(target=dtensors, args=(True,))
    assert check.found == ["replica"]
    assert check.frame["layout"].tolist() == ["replicate(mesh='mesh0')", "shard(dim=0, mesh='mesh0')"]


# ---- a mesh of two dimensions ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def four() -> Iterator[gl.Session]:
    with gl.launch(1, 4) as session:
        yield session


def on_a_mesh(fault: str = "") -> None:
    """Two rows of data by two halves of the weights, as data and tensor parallelism together have them."""
    dp, tp = divmod(rank(), 2)
    drawn = torch.Generator().manual_seed(0)
    weights = [torch.randn(8, 8, generator=drawn) for _ in range(3)]
    x = gl.tap("tokens", torch.randn(4, 8, generator=torch.Generator().manual_seed(dp)), kind="input")
    for layer, whole in enumerate(weights):
        mine = whole[:, 4 * tp : 4 * tp + 4].clone()
        if fault == "one replica of a shard" and rank() == 3 and layer == 1:
            mine[0, 0] += 0.5
        gl.tap(f"layers.{layer}.weight", mine, kind="param")
        gl.tap(f"layers.{layer}.part", x[:, 4 * tp : 4 * tp + 4] @ whole[4 * tp : 4 * tp + 4])
        # What the sum of all parts is, computed here so that nothing has to be sent.
        total = torch.tanh(x @ whole)
        if fault == "one rank's arithmetic" and rank() == 2 and layer == 1:
            total = total * 1.01
        x = gl.tap(f"layers.{layer}.out", total)


MESH = {"dp": 2, "tp": 2}


def test_on_a_mesh_copies_are_those_of_one_dimension(four: gl.Session) -> None:
    check = four.check(target=on_a_mesh, mesh=MESH)
    assert check.found == [], check.text
    layouts = dict(zip(check.frame["name"], check.frame["layout"], strict=True))
    assert layouts["layers.1.weight"].endswith("along dp")
    assert layouts["layers.1.out"].endswith("along tp")


@pytest.mark.parametrize(
    ("fault", "first", "said"),
    [
        ("one replica of a shard", "layers.*.weight@param", "in layer 1: rank 3 differs"),
        ("one rank's arithmetic", "layers.*.out", "in layers 1-2, layer 1 first: rank 3 differs"),
    ],
)
def test_on_a_mesh_a_copy_that_differs_is_found_in_its_own_group(
    four: gl.Session, fault: str, first: str, said: str
) -> None:
    check = four.check(target=on_a_mesh, mesh=MESH, args=(fault,))
    assert check.found[0] == first, check.text
    assert said in check.text


def says_it_itself(spoiled: bool) -> None:
    from graftlab.layouts import parse_layout

    layout = parse_layout("shard(dim=0, mesh='tp') | replicate(mesh='dp')", mesh=MESH)
    own = torch.linspace(-1, 1, 8).chunk(2)[rank() % 2] * (-1 if spoiled and rank() == 2 else 1)
    gl.tap("x", own, layout=layout)


def test_a_layout_declared_at_the_tap_is_used(four: gl.Session) -> None:
    assert four.check(target=says_it_itself, args=(False,)).found == []
    check = four.check(target=says_it_itself, args=(True,))
    assert check.found == ["x"]
    assert "inferred" not in check.text
    assert check.frame["ranks"].tolist() == [[2]]


def test_a_mesh_that_is_not_the_sides_is_refused(four: gl.Session) -> None:
    with pytest.raises(SessionError, match="has 6 ranks, and the side has 4"):
        four.check(target=on_a_mesh, mesh={"dp": 3, "tp": 2})


# ---- training -------------------------------------------------------------------------------------------------------


def trains(fault: str) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    if fault != "not reduced":
        model = nn.parallel.DistributedDataParallel(model)
    if fault == "other weight" and rank() == 1:
        model.module[2].bias.data += 0.001
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    rows = torch.randn(4, 6, generator=torch.Generator().manual_seed(rank()))
    with gl.watch(model, params=True, inputs=True, grads=True), gl.watch_training(model, optimizer):
        model(rows).square().mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("fault", "first"),
    [("", None), ("not reduced", "*.bias@param_grad"), ("other weight", "*.bias@param")],
)
def test_data_parallel_training_is_judged_by_its_weights(session: gl.Session, fault: str, first: str | None) -> None:
    check = session.check(target=trains, args=(fault,))
    assert "The ranks' inputs differ: input." in check.text
    assert (check.found[0] if check.found else None) == first, check.text


# ---- what is refused, what is said ----------------------------------------------------------------------------------


def uneven() -> None:
    gl.tap("x", torch.ones(2))
    if rank() == 1:
        gl.tap("only there", torch.ones(2))
        gl.tap("text", "no tensor")


def test_taps_that_some_ranks_do_not_reach_are_reported_first(session: gl.Session) -> None:
    text = session.check(target=uneven).text
    assert text.startswith("Not checked: text show no tensor to compare.\nNot checked, because some ranks")
    assert "only there (on rank 1 only)" in text


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        (("b",), "b has no finite number on any rank.\nThe 2 ranks agree where they hold copies (1 group of taps)."),
        (("a", "b"), "a, b have no finite number on any rank.\nNothing was compared: no tap has a finite number."),
    ],
)
def test_taps_without_a_finite_number_agree_with_nothing(session: gl.Session, lost: tuple[str, ...], said: str) -> None:
    def side() -> None:
        for name in ("a", "b"):
            gl.tap(name, torch.full((4,), math.nan if name in lost else 1.0))

    assert session.check(target=side).text == f"Not checked: {said}"


def test_one_rank_and_two_sides_are_refused(session: gl.Session) -> None:
    with pytest.raises(SessionError, match="the baseline has one rank, and a check compares several"):
        session.check(baseline=uneven)
    with pytest.raises(SessionError, match="give one side's function"):
        session.check(baseline=uneven, target=uneven)


def test_a_check_without_taps_does_not_agree(session: gl.Session) -> None:
    assert session.check(target=rank).text.startswith("Nothing was compared")


def test_a_check_has_text_and_html(session: gl.Session) -> None:
    check = session.check(target=shifted_hidden)
    shown = check._repr_mimebundle_()
    assert shown["text/plain"].startswith("<ReplicaCheck of 2 ranks: near>\nnear should be equal")
    assert "<p>near should be equal" in shown["text/html"]


def steps_forever() -> None:
    while True:
        gl.tap("x", torch.ones(2))
        gl.step()
        time.sleep(0.01)  # the pace of a model


def test_a_stopped_check_stops_its_code_and_leaves_the_plan(
    session: gl.Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(LongWait):
        """The stop button, pressed once the code has made a step."""

        def next_look(self, remaining: float | None) -> float:
            if session.runs[-1].steps:
                raise KeyboardInterrupt
            return super().next_look(remaining)

    plan = session.plan
    with monkeypatch.context() as patched:
        patched.setattr(replica_check, "LongWait", Stopped)
        with pytest.raises(KeyboardInterrupt, match="the check was stopped, and its code on the target's ranks"):
            session.check(target=steps_forever)
    assert session.runs[-1].wait_steps(10**9, timeout=DEADLINE).done
    assert session.plan is plan
    assert session.check(target=run_specimen, args=("control", "tensor_parallel")).found == []
