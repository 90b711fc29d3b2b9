"""Tensors of which each rank has a part, with no layout that says which, are paired by what the transform makes."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from graftlab.errors import SessionError
from graftlab.judging.match_runs import _Match
from graftlab.judging.match_shards import with_shards
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.matching.rounds import INTERRUPTED, ROUNDS


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# Four heads of queries and two of keys and values, of four features each.
WEIGHTS = {"q": drawn(16, 12, seed=0), "k": drawn(8, 12, seed=1), "v": drawn(8, 12, seed=2), "o": drawn(12, 16, seed=3)}
HIDDEN = drawn(2, 6, 12, seed=4)
BASELINE = {f"{name}.weight": weight for name, weight in WEIGHTS.items()} | {"hidden": HIDDEN}


def fused(rank: int, *parts: Tensor) -> Tensor:
    return torch.cat([part.chunk(2)[rank] if len(part) > 4 else part for part in parts])


TARGET = {
    "qkv": [fused(rank, WEIGHTS["q"], WEIGHTS["k"], WEIGHTS["v"]) for rank in range(2)],
    "proj": [WEIGHTS["o"].chunk(2, 1)[rank] for rank in range(2)],
    # Sequence first, of which each rank has a half.
    "states": [HIDDEN.transpose(0, 1).chunk(2)[rank] for rank in range(2)],
}


def paired(
    baseline: dict[str, Tensor], target: dict[str, list[Tensor]], known: Sequence[Pair] = ()
) -> dict[tuple[str, str], tuple[str, str]]:
    """The layouts of the pairs found, and the sides of the wholes."""
    ours = [RecordedTap.of(name, value, order=place) for place, (name, value) in enumerate(baseline.items())]
    theirs = {
        name: [RecordedTap.of(name, value.contiguous(), order=place) for value in values]
        for place, (name, values) in enumerate(target.items())
    }
    with_partner = {pair.baseline for pair in known}
    proposal = Proposal(
        tuple(known),
        {name: "no partner" for name in baseline if name not in with_partner},
        dict.fromkeys(target.keys() - {pair.target for pair in known}, "its ranks hold different tensors"),
        order={"baseline": tuple(baseline), "target": tuple(target)},
    )
    found = with_shards(proposal, ours, theirs)
    has = {pair.target for pair in found.pairs}
    assert found.unmatched_target.keys() == target.keys() - has
    assert found.unmatched_baseline.keys() == baseline.keys() - {pair.baseline for pair in found.pairs}
    return {(pair.baseline, pair.target): (pair.layout.text, pair.whole) for pair in found.pairs}


def test_weights_split_by_rows_or_columns_and_fused_ones_are_paired() -> None:
    found = paired(BASELINE, TARGET)
    assert {key: whole for key, (_, whole) in found.items() if key[1] == "qkv"} == dict.fromkeys(
        [(f"{name}.weight", "qkv") for name in "qkv"], "target"
    )
    assert found["o.weight", "proj"] == ("same", "baseline")
    assert found["hidden", "states"] == ("a b c -> b a c", "baseline")


def test_heads_that_each_rank_has_whole_are_paired_beside_those_that_are_split() -> None:
    few = {name: WEIGHTS[name][:4] for name in "kv"}
    baseline = {"q.weight": WEIGHTS["q"], **{f"{name}.weight": value for name, value in few.items()}}
    target = {"qkv": [fused(rank, WEIGHTS["q"], *few.values()) for rank in range(2)]}
    assert {key[0] for key in paired(baseline, target)} == {"q.weight", "k.weight", "v.weight"}


def _both_fused(few: int) -> tuple[Tensor, list[Tensor]]:
    """A fused weight of queries, keys and values, and what two ranks have of it; ``few`` rows of keys and values."""
    parts = WEIGHTS["q"], *(WEIGHTS[name][:few] for name in "kv")
    return torch.cat(parts), [fused(rank, *parts) for rank in range(2)]


@pytest.mark.parametrize(
    ("few", "layout"),
    [(8, "blocks=[2, 1, 1]"), (4, "blocks=[2, 1], replicas=[1, 2]")],
    ids=["split", "one head for all"],
)
def test_weights_fused_on_both_sides_are_paired_with_their_outputs(few: int, layout: str) -> None:
    weight, held = _both_fused(few)
    x, other = drawn(3, 12, seed=6), drawn(3, 12, seed=7)
    baseline = {"qkv.weight": weight, "qkv": x @ weight.T, "qkv.bias": weight[:, 0].contiguous()}
    target = {"qkv.weight": held, "qkv": [x @ each.T for each in held], "qkv.bias": [each[:, 0] for each in held]}
    expected = {(name, name): (f"regroup(dim={int(name == 'qkv')}, ranks=2, {layout})", "baseline") for name in target}
    assert paired(baseline, target) == expected
    # What precedes the output may differ.
    assert paired(baseline, {**target, "qkv": [other @ each.T for each in held]}) == expected


def test_a_rank_with_another_ranks_keys_has_no_fused_partner() -> None:
    weight, held = _both_fused(8)
    held[1] = torch.cat([held[1][:8], held[0][8:12], held[1][12:]])
    assert paired({"qkv.weight": weight}, {"qkv.weight": held}) == {}


def test_a_part_that_one_rank_has_otherwise_is_not_paired() -> None:
    wrong = {"qkv": [TARGET["qkv"][0], TARGET["qkv"][1].roll(1, 0)], "proj": [TARGET["proj"][0]] * 2}
    assert paired(BASELINE, wrong) == {}


def test_a_part_that_the_transform_cannot_make_is_not_paired() -> None:
    """Each rank has a column, without the dimension in which the whole is split."""
    whole = drawn(16, 2, seed=5)
    assert paired({"w": whole}, {"column": [column.squeeze(1) for column in whole.chunk(2, 1)]}) == {}


def test_taps_with_partners_or_without_values_stay_as_they_are() -> None:
    known = Pair("o.weight", "proj")
    assert paired(BASELINE, {"proj": TARGET["proj"]}, [known]) == {("o.weight", "proj"): ("same", "baseline")}
    ours = [RecordedTap.of("o.weight", WEIGHTS["o"])]
    theirs = {"proj": [RecordedTap.of("proj", value.contiguous(), keep=False) for value in TARGET["proj"]]}
    proposal = Proposal((), {"o.weight": "no partner"}, {"proj": "its ranks hold different tensors"})
    assert with_shards(proposal, ours, theirs) == proposal
    # In the newest run all ranks have the same.
    assert with_shards(proposal, [RecordedTap.of("o.weight", WEIGHTS["o"])], {}) == proposal


class Interrupted(_Match):
    """A match whose run after its rounds is interrupted, or fails."""

    error: BaseException = KeyboardInterrupt()

    def _record(self, grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        self._runs += 1
        if self._runs > 1:
            raise self.error
        self._parts["proj"] = [RecordedTap.of("proj", value) for value in TARGET["proj"]]
        hidden = [RecordedTap.of("hidden", HIDDEN, order=0)]
        return hidden, hidden


def test_an_interrupt_of_the_run_for_parts_keeps_what_was_found() -> None:
    session: Any = SimpleNamespace(select=lambda side: [side])
    found = Interrupted(session, 1 << 20, 1 << 20).proposal(ROUNDS)
    assert [(pair.baseline, pair.target) for pair in found.pairs] == [("hidden", "hidden")]
    assert INTERRUPTED in found.notices
    # Any other error is no wish to stop.
    failing = Interrupted(session, 1 << 20, 1 << 20)
    failing.error = SessionError("a rank died")
    with pytest.raises(SessionError, match="a rank died"):
        failing.proposal(ROUNDS)
