"""Rows that one side has in another order, or fewer of, are found by value, and all taps of their calls are matched."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache

import pytest
import torch
from torch import Tensor

from graftlab.layouts import parse_layout
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap, SketchRecorder
from graftlab.matching.rounds import match_in_rounds, match_once
from graftlab.matching.search import applied

Show = Callable[[str, Tensor], None]
Program = Callable[[Show], None]

WIDTH, HEADS, LAYERS, WORDS, PAD = 16, 2, 2, 40, 0
LENGTHS = (7, 12, 4, 9, 12, 5, 90)


@cache
def weights() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = [f"{name}.{n}" for n in range(LAYERS) for name in ("q", "k", "v", "o", "mlp")]
    made = {name: torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for name in names}
    return {**made, "table": torch.randn(WORDS, WIDTH, generator=generator)}


@cache
def sequences() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    # All begin with one token, as texts of an encoder do.
    drawn = [torch.randint(2, WORDS, (length,), generator=generator) for length in LENGTHS]
    return [torch.cat([torch.ones(1, dtype=torch.int64), each[1:]]) for each in drawn]


def padded(order: list[int], width: int) -> tuple[Tensor, Tensor]:
    ids = torch.full((len(order), width), PAD)
    for row, number in enumerate(order):
        ids[row, : LENGTHS[number]] = sequences()[number]
    return ids, ids != PAD


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """Attention of ``[batch, tokens, width]`` under a mask ``[batch, queries, keys]``."""
    apart = [each.unflatten(-1, (HEADS, -1)).transpose(1, 2) for each in (q, k, v)]
    scores = (apart[0] @ apart[1].mT).masked_fill(~mask[:, None], -1e9)
    return (scores.softmax(-1) @ apart[2]).transpose(1, 2).flatten(2)


def batched(
    order: list[int], width: int, names: str = "h.{}.{}", causal: bool = False, wrong: int | None = None
) -> Program:
    """An encoder of padded sequences."""

    def program(show: Show) -> None:
        ids, mask = padded(order, width)
        show("ids", ids)
        x = weights()["table"][ids]
        show("embeddings", x)
        seen = mask[:, None, :].expand(-1, width, -1)
        seen = seen & torch.ones(width, width, dtype=torch.bool).tril() if causal else seen
        for n in range(LAYERS):
            q, k, v = (x @ weights()[f"{role}.{n}"] for role in "qkv")
            for role, value in zip("qkv", (q, k, v), strict=True):
                show(names.format(n, role), value)
            mixed = attended(q, k, v, seen) @ weights()[f"o.{n}"] * (1.1 if n == wrong else 1.0)
            show(names.format(n, "out"), mixed)
            x = x + mixed
            x = x + (x @ weights()[f"mlp.{n}"]).tanh()
            show(names.format(n, "mlp"), x)

    return program


def packed(order: list[int], wrong: int | None = None) -> Program:
    """The same without padding, all sequences in one row, and with q, k and v fused."""

    def program(show: Show) -> None:
        x = weights()["table"][torch.cat([sequences()[number] for number in order])]
        show("embed", x)
        owner = torch.cat([torch.full((LENGTHS[number],), number) for number in order])
        for n in range(LAYERS):
            qkv = x @ torch.cat([weights()[f"{role}.{n}"] for role in "qkv"], 1)
            show(f"layers.{n}.qkv", qkv)
            q, k, v = qkv[None].chunk(3, -1)
            mixed = attended(q, k, v, (owner[:, None] == owner)[None])[0] @ weights()[f"o.{n}"]
            mixed = mixed * (1.1 if n == wrong else 1.0)
            show(f"layers.{n}.attn", mixed)
            x = x + mixed
            x = x + (x @ weights()[f"mlp.{n}"]).tanh()
            show(f"layers.{n}.ffn", x)

    return program


def decoded(number: int, prompt: int) -> Program:
    """One sequence as a prefill and a step for each further token, with caches."""

    def program(show: Show) -> None:
        caches: dict[str, list[Tensor]] = {}
        tokens = sequences()[number]
        start = 0
        for count in (prompt, *(1 for _ in range(len(tokens) - prompt))):
            x = weights()["table"][tokens[None, start : start + count]]
            show("embed", x)
            seen = torch.arange(start + count) <= torch.arange(start, start + count)[:, None]
            for n in range(LAYERS):
                q, k, v = (x @ weights()[f"{role}.{n}"] for role in "qkv")
                for role, value in zip("kv", (k, v), strict=True):
                    caches.setdefault(f"{role}.{n}", []).append(value)
                k, v = (torch.cat(caches[f"{role}.{n}"], 1) for role in "kv")
                show(f"layers.{n}.q", q)
                mixed = attended(q, k, v, seen[None]) @ weights()[f"o.{n}"]
                show(f"layers.{n}.attn", mixed)
                x = x + mixed
                x = x + (x @ weights()[f"mlp.{n}"]).tanh()
                show(f"layers.{n}.ffn", x)
            start += count

    return program


def in_turn(*programs: Program) -> Program:
    def program(show: Show) -> None:
        for each in programs:
            each(show)

    return program


def recorded(program: Program, grafts: Mapping[str, Tensor] | None = None) -> list[RecordedTap]:
    """The taps of one run, in which some tensors are overwritten after they are recorded."""
    recorder = SketchRecorder()

    def show(name: str, value: Tensor) -> None:
        recorder.tap(name, value, None, {})
        if grafts and name in grafts:
            value.copy_(grafts[name])

    program(show)
    return recorder.taps


def matched(baseline: Program, target: Program) -> Proposal:
    sides = recorded(baseline), recorded(target)
    proposal = match_once(*sides)
    # Each layout takes one of the real tensors out of the other.
    mine, theirs = ({tap.name: tap for tap in taps} for taps in sides)
    for pair in proposal.graftable:
        outer, inner = mine[pair.baseline], theirs[pair.target]
        outer, inner = (outer, inner) if pair.whole == "baseline" else (inner, outer)
        rel = applied(parse_layout(pair.layout.text), outer, inner)
        assert rel is not None
        assert rel < 1e-5, pair
    return proposal


def partners(proposal: Proposal, target: str) -> set[str]:
    return {pair.baseline for pair in proposal.of_target(target) if pair.by_value}


# The last sequence is for those that are alone.
IN_ORDER = list(range(6))
SORTED = sorted(IN_ORDER, key=lambda number: LENGTHS[number])


@pytest.mark.parametrize("order", [IN_ORDER, SORTED], ids=["in order", "sorted"])
def test_padded_sequences_are_matched_with_packed_ones(order: list[int]) -> None:
    proposal = matched(batched(IN_ORDER, 12), packed(order))
    assert {pair.target for pair in proposal.graftable} == {
        "embed",
        *(f"layers.{n}.{name}" for n in range(LAYERS) for name in ("qkv", "attn", "ffn")),
    }
    for n in range(LAYERS):
        assert partners(proposal, f"layers.{n}.qkv") == {f"h.{n}.q", f"h.{n}.k", f"h.{n}.v"}
        assert partners(proposal, f"layers.{n}.attn") == {f"h.{n}.out"}
    (notice,) = proposal.notices
    another = "" if order[0] == 0 else " in another order"
    assert notice.startswith(f"49 rows are the unpadded rows of 6 x 12{another}, found at h.0.")
    assert proposal.problems == ()


EVERY = {f"layers.{n}.{role}" for n in range(LAYERS) for role in ("q", "k", "v", "out", "mlp")} | {"ids", "embeddings"}


@pytest.mark.slow
@pytest.mark.parametrize(("order", "width"), [(SORTED, 12), (IN_ORDER, 15), (SORTED[::-1], 15)])
def test_batches_that_are_sorted_or_padded_otherwise_are_matched(order: list[int], width: int) -> None:
    proposal = matched(batched(IN_ORDER, 12), batched(order, width, "layers.{}.{}"))
    assert {pair.target for pair in proposal.graftable} == EVERY
    for pair in proposal.pairs:
        assert pair.baseline == pair.target.replace("layers.", "h.")
    # More padding alone is a part, which needs no order.
    assert len(proposal.notices) == (order != IN_ORDER)


@pytest.mark.slow
def test_micro_batches_are_matched_with_the_whole_batch() -> None:
    """Each of the parts is padded to its own longest sequence."""
    whole, parts = batched(IN_ORDER, 12), in_turn(batched(SORTED[:3], 7), batched(SORTED[3:], 12))
    proposal = matched(whole, parts)
    for number in range(2):
        for n in range(LAYERS):
            assert partners(proposal, f"h.{n}.out" + "#1" * number) == {f"h.{n}.out"}
    assert len(proposal.notices) == 2
    proposal = matched(parts, whole)
    for n in range(LAYERS):
        assert partners(proposal, f"h.{n}.out") == {f"h.{n}.out", f"h.{n}.out#1"}


@pytest.mark.slow
def test_a_prefill_and_decode_steps_are_matched_with_one_pass_over_all_tokens() -> None:
    proposal = matched(batched([6], 90, causal=True), decoded(6, prompt=87))
    for step in range(4):
        for n in range(LAYERS):
            for mine, theirs in (("q", "q"), ("attn", "out"), ("ffn", "mlp")):
                call = f"#{step}" if step else ""
                assert partners(proposal, f"layers.{n}.{mine}{call}") == {f"h.{n}.{theirs}"}, (step, n, mine)
    assert proposal.notices[2].startswith("1 row is row 88 of 90, found at ")


def test_a_decode_loop_is_matched_with_full_forwards_of_growing_length() -> None:
    def growing(show: Show) -> None:
        for length in range(87, LENGTHS[6] + 1):
            whole = batched([6], 90, causal=True)
            whole(lambda name, value, length=length: show(name, value[:, :length].contiguous()))  # type: ignore[misc]

    proposal = matched(growing, decoded(6, prompt=87))
    for step in range(4):
        call = f"#{step}" if step else ""
        for n in range(LAYERS):
            assert partners(proposal, f"layers.{n}.attn{call}") == {f"h.{n}.out{call}"}, (step, n)


@pytest.mark.slow
def test_behind_a_fault_rows_in_another_order_are_grafted_until_taps_match() -> None:
    runs: list[int] = []
    grafted: dict[str, Tensor] = {}

    def record(grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        runs.append(len(grafts))
        mine = recorded(batched(IN_ORDER, 12))
        values = {tap.name: tap.value for tap in mine}
        grafted.clear()
        for pair in grafts:
            # Taps that are a whole of several parts are left alone; this fault needs none.
            if pair.whole == "baseline":
                grafted[pair.target] = pair.layout.local(values[pair.baseline])  # type: ignore[arg-type]
        return mine, recorded(packed(SORTED, wrong=0), grafted)

    proposal = match_in_rounds(record)
    assert len(runs) > 1
    doubtful = {pair.target for pair in proposal.pairs if not pair.by_value}
    assert doubtful == {"layers.0.attn"}
    assert partners(proposal, "layers.1.ffn") == {"h.1.mlp"}


def test_programs_with_unlike_rows_have_no_order() -> None:
    def other(show: Show) -> None:
        generator = torch.Generator().manual_seed(7)
        for n in range(6):
            show(f"x.{n}", torch.randn(9, WIDTH, generator=generator))

    assert matched(batched(IN_ORDER, 12), other).notices == ()
