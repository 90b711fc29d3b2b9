"""The lines of tensor parallel code are confirmed by grafts of each rank's part."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import graftlab as gl

RANKS = 1, 2

pytestmark = pytest.mark.ranks


def block(wrong: str) -> Tensor:
    """Attention and an MLP, whose heads and inner dimension the ranks share. ``wrong`` is the target's fault."""
    me = gl.here()
    assert me is not None
    size, rank = me.world_size, me.rank
    wrong = wrong if me.side == "target" else ""
    generator = torch.Generator().manual_seed(0)
    q, k, o, up, down = (torch.randn(32, 32, generator=generator) / 6 for _ in range(5))
    bias, x = torch.randn(32, generator=generator), torch.randn(2, 6, 32, generator=generator)
    part = "shard(dim=1, mesh='tp')" if size > 1 else None
    x = gl.tap("x", x)
    heads = [(x @ w.chunk(size, 1)[rank]).view(2, 6, 4 // size, 8).transpose(1, 2) for w in (q, k)]
    scores = heads[0] @ heads[1].mT
    scores = scores * (0.3 if wrong == "scale" else 0.35)
    probabilities = scores.softmax(-1)
    if wrong == "rank 1" and rank == 1:
        probabilities = probabilities * 0.9
    mixed = gl.tap("mixed", probabilities @ heads[1], layout=part)
    summand = mixed.transpose(1, 2).flatten(2) @ o.chunk(size, 0)[rank]
    if wrong == "bias":
        summand = summand + bias
    if size > 1:
        dist.all_reduce(summand)
    attended = gl.tap("attended", x + (summand if wrong == "bias" else summand + bias))
    hidden = attended @ up.chunk(size, 1)[rank]
    if wrong == "rank 1 alone" and rank == 1:
        hidden = hidden.relu()
    else:
        hidden = hidden.relu() if wrong == "relu" else torch.nn.functional.gelu(hidden)
    result = hidden @ down.chunk(size, 0)[rank]
    if size > 1:
        dist.all_reduce(result)
    out: Tensor = gl.tap("out", attended + result)
    return out


@pytest.mark.parametrize(
    ("wrong", "line"),
    [
        ("scale", 'scores = scores * (0.3 if wrong == "scale" else 0.35)'),
        ("rank 1", "probabilities = probabilities * 0.9"),
        ("rank 1 alone", "hidden = hidden.relu()"),
        ("relu", 'hidden = hidden.relu() if wrong == "relu" else torch.nn.functional.gelu(hidden)'),
    ],
)
def test_a_line_of_code_that_ranks_share_is_confirmed(session: gl.Session, wrong: str, line: str) -> None:
    verdict = session.verdict(block, block, args=(wrong,))
    frame = verdict.lines
    confirmed = frame[frame["confirmed"]]
    assert confirmed["source"].tolist() == [line], verdict
    assert frame["source"].iloc[0] == line
    if wrong.startswith("rank 1"):
        assert confirmed["rank"].iloc[0] == 1
    assert "with the baseline's value there, the tap agrees" in verdict.text
    assert ("(only rank 1 runs this)" in verdict.text) == (wrong in ("rank 1", "rank 1 alone"))


def test_the_line_of_the_one_wrong_rank_comes_before_the_sum_that_all_share() -> None:
    with gl.launch(2, 2) as session:
        verdict = session.verdict(block, block, args=("rank 1 alone",))
    first = verdict.lines.iloc[0]
    assert (first["source"], first["ranks"], first["confirmed"]) == ("hidden = hidden.relu()", (1,), True), verdict


def test_a_line_that_makes_summands_is_named_with_the_reason_why_it_is_not_confirmed(session: gl.Session) -> None:
    verdict = session.verdict(block, block, args=("bias",))
    assert verdict.lines["source"].iloc[0] == "summand = summand + bias"
    assert not verdict.lines["confirmed"].any()
    place = verdict.lines["line"].iloc[0]
    assert (
        f"test_lines_of_ranks.py:{place} is not confirmed: its results are summed over the ranks, and the baseline has "
        "no such summands." in verdict.text
    )


def test_right_code_that_ranks_share_has_no_lines(session: gl.Session) -> None:
    verdict = session.verdict(block, block, args=("",))
    assert (verdict.named, len(verdict.lines)) == ([], 0)


def stages(wrong: bool) -> Tensor:
    """Four layers. Each rank of the target runs its share, and sends its result to the next."""
    me = gl.here()
    assert me is not None
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(32, 32, generator=generator) / 4 for _ in range(4)]
    x = torch.randn(4, 32, generator=generator)
    each = len(weights) // me.world_size
    if me.rank:
        dist.recv(x, me.rank - 1)
    for layer in range(me.rank * each, (me.rank + 1) * each):
        name = f"{('encoder', 'decoder')[layer // 2]}.{layer % 2}"
        hidden = gl.tap(f"{name}.up", x @ weights[layer])
        if wrong and me.side == "target" and layer == 3:
            hidden = hidden * 1.1
        x = gl.tap(name, x + hidden.relu())
    if me.rank < me.world_size - 1:
        dist.send(x, me.rank + 1)
    if me.world_size > 1:
        dist.broadcast(x, me.world_size - 1)
    out: Tensor = gl.tap("out", x * 1.5)
    return out


def test_a_stage_of_a_pipeline_is_judged_though_the_other_rank_lacks_its_taps(session: gl.Session) -> None:
    verdict = session.verdict(stages, stages, args=(True,))
    assert verdict.named == ["decoder.*"], verdict
    assert "With the baseline's decoder.* the output out agrees" in verdict.text
    assert not {"timeout", "missing"} & {*session.frame["status"]}
    confirmed = verdict.lines[verdict.lines["confirmed"]]
    assert confirmed["source"].tolist() == ["hidden = hidden * 1.1"]
    right = session.verdict(stages, stages, args=(False,))
    assert right.named == []
