"""Taps of two implementations find each other by value, in live runs, and what was found can be applied."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import graftlab as gl
from graftlab.base.progress import reported_to
from graftlab.plan.pairs import TapCallName

pytestmark = pytest.mark.ranks


def weights(layer: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(layer)
    return [torch.randn(8, size, generator=generator) / 3 for size in (24, 8, 8)]


def fused(layers: int) -> list[float]:
    """Attention without softmax, with one projection for q, k and v; one tap a step of it."""
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(99))
    for n in range(layers):
        into, out, mlp = weights(n)
        qkv = gl.tap(f"h.{n}.qkv", x @ into)
        q, k, v = qkv.chunk(3, -1)
        x = gl.tap(f"h.{n}.attn", (q @ k.mT).tanh() @ v @ out) + x
        x = gl.tap(f"h.{n}.mlp", (x @ mlp).relu()) + x
    return gl.tap("out", x).flatten().tolist()


def split(layers: int, fault: int | None = None, swapped: int | None = None) -> list[float]:
    """The same with three projections, tokens first, and other names; a fault in one layer if asked for.

    In the layer ``swapped``, k and v have each other's weights, and so have the taps.
    """
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(99)).transpose(0, 1)
    for n in range(layers):
        into, out, mlp = weights(n)
        parts = [into.chunk(3, 1)[place] for place in ((0, 2, 1) if n == swapped else (0, 1, 2))]
        q, k, v = (gl.tap(f"layers.{n + 1}.{name}", (x @ w)) for name, w in zip("qkv", parts, strict=True))
        scores = (q.transpose(0, 1) @ k.transpose(0, 1).mT).tanh() * (1.5 if n == fault else 1.0)
        x = gl.tap(f"layers.{n + 1}.mix", (scores @ v.transpose(0, 1) @ out).transpose(0, 1)) + x
        x = gl.tap(f"layers.{n + 1}.ffn", (x @ mlp).relu()) + x
    return gl.tap("result", x).transpose(0, 1).flatten().tolist()


def partners(proposal: Any) -> dict[str, str]:
    return {pair.target: pair.baseline for pair in proposal.pairs if pair.sureness != "guess"}


def expected(layers: int) -> dict[str, str]:
    names = {"q": "qkv", "k": "qkv", "v": "qkv", "mix": "attn", "ffn": "mlp"}
    pairs = {f"layers.{n + 1}.{mine}": f"h.{n}.{theirs}" for n in range(layers) for mine, theirs in names.items()}
    return {**pairs, "result": "out"}


EXPECTED = expected(3)


def test_taps_are_matched_applied_and_then_compare_clean(session: gl.Session) -> None:
    rows = session.row_count
    proposal = session.match(fused, split, args=(3,))
    assert partners(proposal) == EXPECTED
    assert not proposal.problems
    assert session.row_count == rows
    session.edit(pairs=proposal)
    run = session.run(fused, split, args=(3,))
    assert set(run.frame["status"]) == {"compared"}
    assert len(run.frame) == len(EXPECTED)
    assert run.frame["rel_l2"].max() < 1e-5
    assert run.frame["layout"].notna().all()
    assert set(run.frame["matched_by"]) <= {"exact", "near"}
    session.edit(b2t="search('attn', baseline_name)")
    run = session.run(fused, split, args=(3,))
    assert (run.frame["status"] == "grafted").sum() == 3


def test_behind_a_fault_the_target_is_grafted_until_its_taps_match(session: gl.Session) -> None:
    wrong = partial(split, fault=2)
    alone = session.match(fused, wrong, args=(4,), rounds=0)
    proposal = session.match(fused, wrong, args=(4,))
    assert len(proposal.graftable) > len(alone.graftable)
    assert partners(proposal) == expected(4)
    # With every tap grafted, what is left at one was added there.
    session.edit(pairs=proposal, b2t="True")
    frame = session.run(fused, wrong, args=(4,)).frame
    assert frame.loc[frame["rel_l2"] > 1e-3, "target_name"].tolist() == ["layers.3.mix"]


def test_a_match_shows_its_runs_and_how_many_taps_are_paired(session: gl.Session) -> None:
    shown: list[str] = []
    with reported_to(shown.append):
        session.match(fused, partial(split, fault=1), args=(3,))
    titles = list(dict.fromkeys(title.partition(" paired")[0] for title in shown))
    assert titles[:2] == ["matching, run 1", "matching, the values of 10 and 16 taps in run 1"]
    assert re.fullmatch(r"matching, run 2, 1\d of 16 taps", titles[2])


def test_the_exported_code_pairs_as_the_proposal_does(session: gl.Session) -> None:
    proposal = session.match(fused, split, args=(3,))
    eval(proposal.to_code(), {"session": session})
    rules = session.plan.pairs
    assert len(rules) < len(proposal.pairs)
    for name, baseline in EXPECTED.items():
        assert [each.baseline_name for each in session.plan.pairings("target", name, {})] == [baseline]
    assert session.run(fused, split, args=(3,)).frame["rel_l2"].max() < 1e-5


def test_beyond_the_budget_values_of_candidates_are_fetched(session: gl.Session) -> None:
    from graftlab.judging.match_runs import match

    proposal = match(session, fused, split, args=(3,), sent=1)
    assert partners(proposal) == EXPECTED


def with_weights(fused: bool) -> float:
    """A layer's weights as taps, before what it computes."""
    into, out = weights(0)[:2]
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(99))
    q, k, v = into.T.contiguous().chunk(3)
    for name, weight in {"qkv": into.T, "out": out}.items() if fused else {"q": q, "k": k, "v": v, "o": out}.items():
        gl.tap(f"{'a' if fused else 'b'}.{name}.weight", weight.contiguous(), kind="param")
    gl.tap("a.h" if fused else "b.values", x @ out)
    return 0.0


def test_weights_that_are_equal_or_fused_are_paired_without_being_sent(session: gl.Session) -> None:
    from graftlab.judging.match_runs import match

    # Room for one value, and for nothing else.
    room = 2 * 5 * 8 * 4
    proposal = match(session, partial(with_weights, True), partial(with_weights, False), budget=room, sent=room)
    assert [(TapCallName.of(pair.baseline).name, TapCallName.of(pair.target).name) for pair in proposal.pairs] == [
        ("a.qkv.weight", "b.q.weight"),
        ("a.qkv.weight", "b.k.weight"),
        ("a.qkv.weight", "b.v.weight"),
        ("a.out.weight", "b.o.weight"),
        ("a.h", "b.values"),
    ]
    # The value of both sides.
    assert proposal.moved == 2 * room


def sharded(layers: int) -> list[float]:
    """The target's q, k and v by two ranks, each with half of the columns and a declared layout."""
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(99))
    me = gl.here()
    for n in range(layers):
        into, _, _ = weights(n)
        for name, w in zip("qkv", into.chunk(3, 1), strict=True):
            gl.tap(f"layers.{n}.{name}", x @ w.chunk(2, 1)[me.rank], layout="shard(dim=-1, mesh='tp')")
            gl.tap(f"layers.{n}.unsaid.{name}", x @ w.chunk(2, 1)[me.rank])
    return []


def separate(layers: int) -> list[float]:
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(99))
    for n in range(layers):
        for name, w in zip("qkv", weights(n)[0].chunk(3, 1), strict=True):
            gl.tap(f"h.{n}.{name}", x @ w)
    return []


def fused_parts(layers: int, fault: int | None = None) -> list[float]:
    """Each rank's half of q, k and v as one tensor, without a layout; in one layer a wrong q on the last rank."""
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(99))
    rank = gl.here().rank
    for n in range(layers):
        q, k, v = (x @ w.chunk(2, 1)[rank] for w in weights(n)[0].chunk(3, 1))
        gl.tap(f"own.{n}.qkv", torch.cat([q * (1.5 if n == fault and rank == 1 else 1.0), k, v], -1))
    return []


@pytest.fixture(scope="module")
def two_targets() -> Iterator[gl.Session]:
    with gl.launch(1, 2) as session:
        yield session


def test_ranks_with_declared_layouts_are_matched_as_one_whole(two_targets: gl.Session) -> None:
    session = two_targets
    proposal = session.match(fused, sharded, args=(1,))
    assert partners(proposal) == {f"layers.0.{name}": "h.0.qkv" for name in "qkv"}
    assert "gl.tap(layout=...)" in proposal.unmatched_target["layers.0.unsaid.q"]
    session.edit(pairs=proposal)
    frame = session.run(fused, sharded, args=(1,)).frame
    paired = frame[frame["baseline_name"] == "h.0.qkv"]
    assert len(paired) == 6
    assert paired["rel_l2"].max() < 1e-6


def test_parts_that_ranks_have_without_a_layout_are_matched_and_judged(two_targets: gl.Session) -> None:
    session = two_targets
    proposal = session.match(separate, fused_parts, args=(2,))
    assert {(pair.baseline, pair.target) for pair in proposal.pairs} == {
        (f"h.{n}.{name}", f"own.{n}.qkv") for n in range(2) for name in "qkv"
    }
    assert not proposal.unmatched_target
    session.edit(pairs=proposal)
    frame = session.run(separate, partial(fused_parts, fault=1), args=(2,)).frame
    assert len(frame) == 12
    is_wrong = (frame["name"] == "h.1.q") & (frame["rank"] == 1)
    assert frame.loc[is_wrong, "rel_l2"].item() == pytest.approx(0.5, rel=1e-4)
    assert frame.loc[~is_wrong, "rel_l2"].max() < 1e-6


class Encoder(torch.nn.Module):
    """Two layers and their names; with ``rolled``, what the second normalizes is wrong."""

    def __init__(self, first: str, second: str, rolled: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.names, self.rolled = (first, second), rolled
        self.add_module(first, torch.nn.Linear(8, 8))
        self.add_module(second, torch.nn.LayerNorm(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = map(self.get_submodule, self.names)
        between: torch.Tensor = first(x).tanh()
        out: torch.Tensor = second(between + self.rolled * between.roll(1, -1))
        return out


def baseline_of_encoder() -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8) ** 3
    model = Encoder("embed", "norm")
    with gl.watch(model, exclude="name == 'output'"):
        model(x)


def target_of_encoder(rolled: float = 0.0) -> None:
    """Its last module's output is the model's own, so both taps show one tensor."""
    x = torch.linspace(-1, 1, 32).reshape(4, 8) ** 3
    model = Encoder("first", "head", rolled)
    with gl.watch(model):
        model(x)


def test_a_verdict_measures_effects_where_the_output_is_in_several_pairs(session: gl.Session) -> None:
    proposal = session.match(baseline_of_encoder, target_of_encoder)
    assert sorted(pair.target for pair in proposal.pairs if pair.baseline == "norm") == ["head", "output"]
    session.edit(pairs=proposal)
    verdict = session.verdict(baseline_of_encoder, partial(target_of_encoder, 0.3))
    assert verdict.named == ["head"], verdict.text
    assert "With the baseline's head the output agrees" in verdict.text
    assert "failed" not in verdict.text


def test_a_recording_is_matched_as_a_side(session: gl.Session, tmp_path: Path) -> None:
    with gl.record(tmp_path / "taken"):
        fused(3)
    proposal = session.match(gl.Recording.open(tmp_path / "taken"), partial(split, fault=1), args=(3,))
    assert partners(proposal) == EXPECTED


LENGTHS = (4, 7, 5)


def table() -> torch.Tensor:
    return torch.randn(30, 8, generator=torch.Generator().manual_seed(3))


def ids_of(number: int, length: int) -> torch.Tensor:
    return torch.randint(1, 30, (length,), generator=torch.Generator().manual_seed(number))


def padded_sequences(lengths: Sequence[int] = LENGTHS) -> None:
    ids = torch.zeros(3, max(lengths), dtype=torch.int64)
    for number, length in enumerate(lengths):
        ids[number, :length] = ids_of(number, length)
    x = table()[ids]
    gl.tap("embeddings", x)
    for n in range(3):
        x = gl.tap(f"h.{n}.sum", x.cumsum(1).tanh() + x)


def packed_sequences(wrong: int | None = None, lengths: Sequence[int] = LENGTHS) -> None:
    """The same, the shortest sequence first and without padding."""
    order = sorted(range(3), key=lambda number: lengths[number])
    x = table()[torch.cat([ids_of(number, lengths[number]) for number in order])]
    gl.tap("embed", x)
    for n in range(3):
        parts = x.split([lengths[number] for number in order])
        x = gl.tap(f"layers.{n}.sum", torch.cat([p.cumsum(0).tanh() for p in parts]) * (1.1 if n == wrong else 1) + x)


def test_a_padded_batch_is_judged_against_a_sorted_and_packed_one(session: gl.Session) -> None:
    """The pairs are learned from one batch, and judged with sequences of other lengths."""
    proposal = session.match(padded_sequences, partial(packed_sequences, 1))
    assert partners(proposal) == {"embed": "embeddings", **{f"layers.{n}.sum": f"h.{n}.sum" for n in range(3)}}
    notice, rule = proposal.notices
    assert notice.startswith("16 rows are the unpadded rows of 3 x 7 in another order, found at ")
    assert rule == "in every batch the rows are found again by embeddings and embed"
    session.edit(pairs=proposal)
    others = (9, 3, 6)
    verdict = session.verdict(partial(padded_sequences, others), partial(packed_sequences, 1, others))
    assert verdict.named == ["h.*.sum"]
    assert "in layer 1 of 0-2" in verdict.text
    assert "compared only in part" not in verdict.text
    frame = session.run(partial(padded_sequences, others), partial(packed_sequences, lengths=others)).frame
    assert frame["rel_l2"].max() < 1e-6
    assert set(frame["status"]) == {"compared"}


def padded_logits() -> None:
    padded_sequences()
    gl.tap("output.logits", table()[:21].reshape(3, 7, 8).mul(2).tanh())


def packed_logits() -> None:
    packed_sequences()
    gl.tap("output", table()[:16].mul(3).cos())


def test_packed_outputs_that_differ_are_paired_in_the_rows_of_the_head(session: gl.Session) -> None:
    proposal = session.match(padded_logits, packed_logits)
    (pair,) = proposal.of_target("output")
    (head,) = proposal.of_target("layers.2.sum")
    assert (pair.baseline, pair.layout, pair.sureness) == ("output.logits", head.layout, "rule")
    session.edit(pairs=proposal)
    assert session.verdict(padded_logits, packed_logits).named == ["output.logits"]


def with_swapped_parts(layers: int) -> list[float]:
    """``split`` with k and v mixed up in the second layer, as its taps show."""
    return split(layers, swapped=1)


def test_pairs_learned_from_a_faulty_target_are_refused_after_its_fix(session: gl.Session) -> None:
    proposal = session.match(fused, with_swapped_parts, args=(3,))
    learned = {p.target: p.layout.text for p in proposal.pairs if p.target.startswith("layers.2")}
    assert "index=2" in learned["layers.2.k"]
    assert len([text for text in proposal.problems if "are swapped" in text]) <= 1
    session.edit(pairs=proposal)
    verdict = session.verdict(fused, split, args=(3,))
    assert verdict.named == []
    first, *_ = verdict.text.split("\n")
    assert first.startswith("The plan's pairs are outdated: layers.2.k was paired with h.1.qkv"), first
    assert "Match again" in first
    assert "adds more than rounding" not in verdict.text
    # A target that takes another tap's values by mistake is no mended one.
    session.edit(pairs=session.match(fused, split, args=(3,)))
    verdict = session.verdict(fused, with_swapped_parts, args=(3,))
    assert verdict.named != []
    assert "match again" in verdict.text


@pytest.mark.parametrize(
    "given",
    [
        {"baseline": 3},
        {"target": None},
        {"rounds": 1.5},
        {"rounds": "all"},
        {"rounds": -1},
        {"budget": 0},
        {"budget": 1e9},
    ],
)
def test_invalid_requests_for_a_match_are_refused_before_anything_runs(
    session: gl.Session, given: dict[str, Any]
) -> None:
    runs = len(session.runs)
    with pytest.raises(gl.SessionError, match=rf"match: {next(iter(given))}|match: rounds"):
        session.match(**{"baseline": fused, "target": fused, "args": (1,), **given})
    assert len(session.runs) == runs


def stages(layers: int) -> list[float] | None:
    """The split port as a pipeline of two ranks: the first has the first two layers, the second the rest."""
    rank = torch.distributed.get_rank()
    x = torch.randn(2, 5, 8, generator=torch.Generator().manual_seed(99)).transpose(0, 1)
    if rank == 1:
        x = x.clone(memory_format=torch.contiguous_format)
        torch.distributed.recv(x, 0)
    for n in range(2) if rank == 0 else range(2, layers):
        into, out, mlp = weights(n)
        q, k, v = (gl.tap(f"layers.{n + 1}.{name}", x @ w) for name, w in zip("qkv", into.chunk(3, 1), strict=True))
        scores = (q.transpose(0, 1) @ k.transpose(0, 1).mT).tanh()
        x = gl.tap(f"layers.{n + 1}.mix", (scores @ v.transpose(0, 1) @ out).transpose(0, 1)) + x
        x = gl.tap(f"layers.{n + 1}.ffn", (x @ mlp).relu()) + x
    if rank == 0:
        torch.distributed.send(x.contiguous(), 1)
        return None
    return gl.tap("result", x).transpose(0, 1).flatten().tolist()


def test_the_stages_of_a_pipeline_are_matched_and_judged() -> None:
    with gl.launch(baseline=1, target=2) as session:
        proposal = session.match(fused, stages, args=(3,))
        assert partners(proposal) == EXPECTED
        session.edit(pairs=proposal)
        verdict = session.verdict(fused, stages, args=(3,))
        assert verdict.text.startswith("Nothing that was checked adds more than rounding")
        assert "target rank 0 returns nothing" in verdict.text
