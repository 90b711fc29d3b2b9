"""Rows that one side has in another order, or fewer of, are found by value, and all taps of their calls are matched."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from kit.grafters import GrafterWorld
from torch import Tensor

from graftlab.base.world import Side
from graftlab.grafting.batch_rows import BatchRows, RowsOfTaps, for_batch
from graftlab.layouts import Gather, Layout, Rearrange, Scale
from graftlab.layouts.row_alignment import FoundRows, ShownRows
from graftlab.matching.aligned_taps import AlignedTaps, _merged, _row_dims
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap, SketchRecorder
from graftlab.matching.rounds import _aligned, match_in_rounds, match_once
from graftlab.matching.row_orders import RowOrder, row_orders, unpaired_rows
from graftlab.matching.row_rules import _RowTaps, _ShownCall, _ways, with_row_rules
from graftlab.matching.search import applied
from graftlab.plan.pairs import PairRule
from graftlab.rows.schema import Row
from graftlab.taps.ambient_tags import ambient

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
        ours, others = mine[pair.baseline], theirs[pair.target]
        rule = PairRule(pair.baseline, pair.target, pair.layout.text, pair.whole)
        assert rule.row_steps or pair.layout.text.count("gather") == 0, pair
        shown = [
            rows_shown(taps, tap, rule, side) for taps, tap, side in zip(sides, (ours, others), SIDES, strict=True)
        ]
        outer, inner = (ours, others) if pair.whole == "baseline" else (others, ours)
        rel = applied(for_batch(rule.parsed, *(shown if pair.whole == "baseline" else shown[::-1])), outer, inner)
        assert rel is not None
        assert rel < 1e-5, pair
    return proposal


SIDES: tuple[Side, Side] = ("baseline", "target")


def rows_shown(taps: list[RecordedTap], until: RecordedTap, rule: PairRule, side: Side) -> RowsOfTaps:
    """What a rank's taps up to this one have shown of their rows."""
    rows = BatchRows()
    for tap in taps[: until.order + 1]:
        if tap.value is not None and tap.value.dim() > 1:
            rows.show(tap.name.partition("#")[0], tap.value, ())
    return rows.of(rule, rule.whole == side, ()) or {}


def rows_under(proposal: Proposal, baseline: Program, target: Program, **plan: str) -> list[Row]:
    """The rows of two ranks that run other programs under the pairs of a proposal; the side that sends runs first."""
    world = GrafterWorld(pairs=proposal, **plan)
    ranks = [(world.baseline, baseline), (world.target, target)]
    for rank, program in ranks[::-1] if plan.get("t2b") else ranks:
        program(rank.tap)
    world.end()
    # The baseline alone has this one.
    return [row for row in world.rows if row.name != "ids"]


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
    notice, rule = proposal.notices
    another = "" if order[0] == 0 else " in another order"
    assert notice.startswith(f"49 rows are the unpadded rows of 6 x 12{another}, found at h.0.")
    assert rule == "in every batch the rows are found again by embeddings and embed"
    assert proposal.problems == ()
    assert proposal.to_code().splitlines()[2:-2] == [
        f"        {{'baseline': {mine!r}, 'target': {theirs!r}, 'layout': \"{layout}\", 'whole': {whole!r}}},"
        for mine, theirs, layout, whole in (
            ("embeddings", "embed", "rows(of='embeddings', into='embed')", "baseline"),
            *(
                (
                    f"h.{{n}}.{role}",
                    "layers.{n}.qkv",
                    f"part(index={n}, of=[1, 1, 1], dim=1) | rows(of='embed', into='embeddings')",
                    "target",
                )
                for n, role in enumerate("qkv")
            ),
            ("h.{n}.out", "layers.{n}.attn", "rows(of='embeddings', into='embed')", "baseline"),
            ("h.{n}.mlp", "layers.{n}.ffn", "rows(of='embeddings', into='embed')", "baseline"),
        )
    ]


EVERY = {f"layers.{n}.{role}" for n in range(LAYERS) for role in ("q", "k", "v", "out", "mlp")} | {"ids", "embeddings"}


@pytest.mark.slow
@pytest.mark.parametrize(("order", "width"), [(SORTED, 12), (IN_ORDER, 15), (SORTED[::-1], 15)])
def test_batches_that_are_sorted_or_padded_otherwise_are_matched(order: list[int], width: int) -> None:
    proposal = matched(batched(IN_ORDER, 12), batched(order, width, "layers.{}.{}"))
    assert {pair.target for pair in proposal.graftable} == EVERY
    for pair in proposal.pairs:
        assert pair.baseline == pair.target.replace("layers.", "h.")
    # More padding alone is a part, which needs no order.
    assert len(proposal.notices) == 2 * (order != IN_ORDER)


@pytest.mark.slow
def test_micro_batches_are_matched_with_the_whole_batch() -> None:
    """Each of the parts is padded to its own longest sequence."""
    whole, parts = batched(IN_ORDER, 12), in_turn(batched(SORTED[:3], 7), batched(SORTED[3:], 12))
    proposal = matched(whole, parts)
    for number in range(2):
        for n in range(LAYERS):
            assert partners(proposal, f"h.{n}.out" + "#1" * number) == {f"h.{n}.out"}
    assert len(proposal.notices) == 3
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
    assert proposal.notices[3].startswith("1 row is row 88 of 90, found at ")


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
    # One line for the prefill and all decode steps.
    assert proposal.to_code().count("layers.{n}.attn") == 1


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


OTHERS = [5, 3, 2, 4]


@pytest.mark.parametrize("plan", [{}, {"b2t": "True"}, {"t2b": "True"}], ids=["compared", "b2t", "t2b"])
def test_rows_are_found_again_in_a_batch_of_other_lengths(plan: dict[str, str]) -> None:
    proposal = matched(batched(IN_ORDER, 12), packed(SORTED))
    rows = rows_under(proposal, batched(OTHERS, 12), packed(OTHERS[::-1]), **plan)
    assert len(rows) == 11
    assert {row.status for row in rows} == {"grafted" if plan else "compared"}
    assert max(row.rel_l2 or 0.0 for row in rows) < 1e-5
    count = sum(LENGTHS[number] for number in OTHERS)
    assert {row.rows_matched for row in rows} == {count}
    # Only the padding has no partner, where it is compared at all.
    assert {row.rows_unmatched for row in rows if row.target_name.startswith("layers.0.a")} == {0}


def test_a_fault_in_a_batch_of_other_lengths_is_seen_where_it_is() -> None:
    proposal = matched(batched(IN_ORDER, 12), packed(SORTED))
    rows = rows_under(proposal, batched(OTHERS, 12), packed(OTHERS, wrong=1), b2t="True")
    assert [row.target_name for row in rows if (row.rel_l2 or 0.0) > 1e-5] == ["layers.1.attn"]


def test_sequences_that_the_other_side_lacks_are_counted_and_not_compared() -> None:
    proposal = matched(batched(IN_ORDER, 12), packed(SORTED))
    rows = rows_under(proposal, batched(OTHERS[1:], 12), packed(OTHERS), b2t="True")
    row = next(row for row in rows if row.target_name == "layers.1.ffn")
    known = sum(LENGTHS[number] for number in OTHERS[1:])
    assert (row.rows_matched, row.rows_unmatched) == (known, LENGTHS[OTHERS[0]])
    # None of them is no agreement.
    rows = rows_under(proposal, batched([0], 12), packed([6]), compare="target_name == 'layers.1.ffn'")
    assert [row.status for row in rows] == ["missing"]


def test_a_tap_before_those_that_show_the_rows_is_refused() -> None:
    pair = {"baseline": "early", "target": "early", "layout": "rows(of='ids', into='ids')"}
    world = GrafterWorld(pairs=[pair])
    for rank in (world.baseline, world.target):
        rank.tap("early", torch.ones(4))
        rank.tap("ids", torch.arange(4))
    world.end()
    (row,) = (row for row in world.rows if row.name == "early")
    assert row.status == "failed"
    assert "in this call, these taps have not shown their rows before this tap" in (row.error or "")


def test_rows_of_two_requests_in_flight_are_not_mixed_up() -> None:
    pair = {"baseline": "x", "target": "y", "layout": "rows(of='ids', into='ids')"}
    world = GrafterWorld(pairs=[pair, ("ids", "ids")])
    values = torch.randn(9, 3, generator=torch.Generator().manual_seed(0))
    ids = {1: torch.arange(8), 2: torch.arange(1, 9)}

    def shows(name: str, rid: int, value: Tensor) -> None:
        rank = world.baseline if name == "x" or rid < 0 else world.target
        token = ambient.set((("rid", abs(rid)),))
        rank.tap("ids" if not value.is_floating_point() else name, value)
        ambient.reset(token)

    for side, name in ((-1, "x"), (1, "y")):
        for rid, own in ids.items():
            shows(name, side * rid, own if side < 0 else own.roll(3))
        for rid, own in ids.items():
            shows(name, side * rid, values[own if side < 0 else own.roll(3)])
    world.end()
    rows = [row for row in world.rows if row.target_name == "y"]
    assert [(row.status, row.rel_l2) for row in rows] == [("compared", 0.0)] * 2


def test_in_jobs_whose_batches_vary_orders_are_found_again_in_each_round() -> None:
    grafted: dict[str, Tensor] = {}
    batches = [IN_ORDER, OTHERS, OTHERS[::-1], IN_ORDER[::-1]]
    runs: list[tuple[Pair, ...]] = []

    def record(grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        batch = batches[len(runs) % len(batches)]
        runs.append(grafts)
        mine, theirs = recorded(batched(batch, 12)), recorded(packed(batch[::-1]))
        grafted.clear()
        for pair in grafts:
            rule = PairRule(pair.baseline, pair.target, pair.layout.text, pair.whole)
            if rule.whole == "baseline" and rule.row_steps:
                ours = next(tap for tap in mine if tap.name == pair.baseline)
                others = next(tap for tap in theirs if tap.name == pair.target)
                shown = rows_shown(mine, ours, rule, "baseline"), rows_shown(theirs, others, rule, "target")
                assert ours.value is not None
                grafted[pair.target] = for_batch(rule.parsed, *shown).local(ours.value)
        return mine, recorded(packed(batch[::-1], wrong=0), grafted)

    proposal = match_in_rounds(record, varies=True)
    assert len(runs) > 1
    assert {pair.target for pair in proposal.pairs if not pair.by_value} == {"layers.0.attn"}
    assert partners(proposal, "layers.1.ffn") == {"h.1.mlp"}


def test_programs_with_unlike_rows_have_no_order() -> None:
    def other(show: Show) -> None:
        generator = torch.Generator().manual_seed(7)
        for n in range(6):
            show(f"x.{n}", torch.randn(9, WIDTH, generator=generator))

    assert matched(batched(IN_ORDER, 12), other).notices == ()


def guided(names: str, order: list[int]) -> Program:
    """A denoiser whose batch has each sample twice, with its label and with none."""

    def program(show: Show) -> None:
        samples = torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(3))
        labels = torch.tensor([5, 5, 1, 3])[order]
        x = torch.cat([samples, samples])
        show(names.format("input"), x.clone())
        time = weights()["table"][7].expand(4, -1)
        for n, name in enumerate("qkvo"):
            time = (time @ weights()[f"{name}.0"]).tanh()
            show(names.format(f"clock.{n}"), time.clone())
        label = weights()["table"][labels]
        show(names.format("label"), label)
        for n, name in enumerate("qkvo"):
            x = x + (x + label + time) @ weights()[f"{name}.1"]
            show(names.format(f"block.{n}"), x)

    return program


def test_rows_that_are_equal_do_not_show_that_all_are_in_the_same_order() -> None:
    proposal = match_once(recorded(guided("{}", IN_ORDER[:4])), recorded(guided("net.{}", [2, 3, 0, 1])))
    for name in ("label", *(f"block.{n}" for n in range(4))):
        assert partners(proposal, f"net.{name}") == {name}
        assert "gather" in proposal.of_target(f"net.{name}")[0].layout.text


def with_first(change: Callable[[Tensor], Tensor], program: Program) -> Program:
    """The program with other embeddings, which no tap shows before them."""

    def changed(show: Show) -> None:
        def altered(name: str, value: Tensor) -> None:
            if name in ("embeddings", "embed"):
                value.copy_(change(value))
            show(name, value)

        program(altered)

    return changed


def test_rows_that_both_sides_have_alone_are_said_unless_they_are_padding() -> None:
    order = [3, 0, 2, 1]

    def unpaired(baseline: Program, target: Program) -> str:
        return match_once(recorded(baseline), recorded(target)).unpaired_rows

    def request(value: Tensor) -> Tensor:
        return torch.cat([value[: LENGTHS[3]] * 1.3, value[LENGTHS[3] :]])

    said = unpaired(packed([0, 1, 2, 3]), with_first(request, packed(order)))
    assert said.endswith("computed differently before the first tap that shows them.")
    assert unpaired(batched([0, 1, 2, 3], 14), batched(order, 13)) == ""
    # The baseline lacks a sequence, and all rows that it has are found.
    assert unpaired(packed([0, 1, 2]), packed([2, 0, 3, 1])) == ""


def test_a_row_with_different_values_in_its_place_does_not_show_another_order() -> None:
    def last_token(value: Tensor) -> Tensor:
        return torch.cat([value[:-1], value[-1:] * 1.3])

    found = match_once(recorded(packed([0, 1, 2])), recorded(with_first(last_token, packed([0, 1, 2]))))
    assert not found.notices
    assert not any("gather" in pair.layout.text or "rows" in pair.layout.text for pair in found.pairs)


def test_rows_of_padding_that_are_equal_do_not_show_another_order() -> None:
    """The second of three sequences differs. The first one's padding is equal up to rounding, which differs too."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(3, 9, 8, generator=generator)
    values[0, 6:] = values[0, 6] + 1e-6 * torch.randn(3, 8, generator=generator)
    changed = values.clone()
    changed[0, 6:8] = values[0, 7:]
    changed[1] *= 1.3
    taps = [[RecordedTap.of("embed", each)] for each in (values, changed)]
    assert row_orders(*taps, {"baseline": None, "target": None}) == []
    (order,) = row_orders(taps[0], [RecordedTap.of("embed", values[[2, 0, 1]])], {"baseline": None, "target": None})
    assert order.text.startswith("27 rows of 3 x 9 are the rows of 3 x 9 in another order")


@pytest.mark.parametrize(
    ("index", "of", "text"),
    [
        ([3, 4, 5], (8,), "3 rows are rows 3 to 5 of 8"),
        ([3, -1, 4], (8,), "2 rows are rows 3 to 4 of 8"),
        ([5], (8,), "1 row is row 5 of 8"),
        ([3, 6, 7], (8,), "3 rows are 3 rows of 8"),
        ([5, 3, 4], (8,), "3 rows are 3 rows of 8 in another order"),
        ([0, 1, 4, 5], (2, 4), "4 rows are the unpadded rows of 2 x 4"),
        ([2, 3, 0, 1], (2, 2), "4 rows are the rows of 2 x 2 in another order"),
    ],
)
def test_an_order_of_rows_is_described_in_a_sentence(index: list[int], of: tuple[int, ...], text: str) -> None:
    order = RowOrder(((), 0), ((), 0), of, (len(index),), np.array(index), ("mine", "theirs"))
    assert order.text == f"{text}, found at mine and theirs"


def test_steps_between_two_gathers_are_put_before_or_after_the_rule() -> None:
    first, last = Gather((4,), ((3, 1), (0, 3)), (4,)), Gather((4,), ((0, 4),), (4,))
    one, between, other = (Scale(factor) for factor in (2.0, 3.0, 5.0))
    found = FoundRows((4,), (4,), np.array([3, 0, 1, 2]))
    ways = [*_ways((one, first, between, last, other), found)]
    assert ways == [((one, between), False, (other,)), ((one,), False, (between, other))]
    assert [*_ways((first, last), found)] == [((), False, ())]


def test_a_call_has_the_rows_that_its_own_request_had_shown_before() -> None:
    first, other, late = (ShownRows.of(torch.tensor([n])) for n in range(3))
    calls = [(0, (), first), (1, (("rid", 1),), first), (2, (("rid", 2),), other), (5, (("rid", 2),), late)]
    shown = {"target": [_ShownCall(order, (tags, 0), rows) for order, tags, rows in calls], "baseline": []}
    taps = _RowTaps("ids", "tokens", shown)  # type: ignore[arg-type]
    for order, rid, expected in (
        (0, 2, [first]),
        (4, 2, [first, other]),
        (5, 2, [first, other, late]),
        (9, 3, [first]),
    ):
        found = taps.until("target", order, ((("rid", rid), ("step", 0)), 0))
        assert list(map(id, found)) == list(map(id, expected))
    assert taps.until("baseline", 9, ((), 0)) == []


def test_rows_that_a_pair_lacks_are_lacking_by_a_rule_too() -> None:
    steps = Gather((4,), ((3, 1), (0, 3)), (4,)), Gather.of_rows((4,), [0, 1, -1, 2], (4,))
    assert [*_ways(steps, FoundRows((4,), (4,), np.array([3, 0, -1, 1])))] == [((), False, ())]
    assert [*_ways(steps, FoundRows((4,), (4,), np.array([3, 0, 3, 1])))] == []


def test_equal_rows_of_single_steps_are_those_that_follow_one_another() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(4, 16, generator=generator)[[0, 1, 0, 2, 0, 3]]
    steps = [RecordedTap.of(f"embed#{n}" if n else "embed", rows[n : n + 1], order=n) for n in range(6)]
    orders = row_orders([RecordedTap.of("embed", rows)], steps, {"baseline": None, "target": None})
    assert [order.index.tolist() for order in orders] == [[0], [1], [2], [3], [4], [5]]


def test_a_run_that_shows_no_order_leaves_the_known_one() -> None:
    known = [RowOrder(((), 0), ((), 0), (4,), (4,), np.array([3, 0, 1, 2]), ("x", "x"))]
    rows = AlignedTaps(known, {"baseline": None, "target": None})
    given: list[tuple[Pair, ...]] = []

    def record(grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        given.append(grafts)
        return [], []

    assert _aligned(record, rows, True)((Pair("a", "b"),)) == ([], [])
    assert (rows.orders, given) == (known, [(Pair("a", "b"),)])


@pytest.mark.parametrize("name", ["output", "h"])
def test_results_of_other_shapes_have_the_rows_of_their_call(name: str) -> None:
    fetch: dict[Side, None] = {"baseline": None, "target": None}
    value = torch.arange(24.0).reshape(2, 3, 4)
    order = RowOrder(((), 0), ((), 0), (2, 3), (6,), np.array([3, 4, 5, 0, 1, 2]), ("x", "x"))
    flat = value.flip(0).reshape(6, 4)
    mine, theirs = AlignedTaps([order], fetch).of([RecordedTap.of(name, value)], [RecordedTap.of(name, flat)])
    assert [tap.shape for tap in (*mine, *theirs)] == [(6, 4), (6, 4)]
    assert mine[0].value is not None
    assert torch.equal(mine[0].value, flat)
    # With fewer rows, what a function returns as a whole has them only where the two sides' shapes differ.
    fewer = RowOrder(((), 0), ((), 0), (2, 3), (4,), np.array([0, 1, 3, 4]), ("x", "x"))
    for theirs_shape, kept in (((4, 4), (4, 4)), ((2, 3, 4), (2, 3, 4) if name == "output" else (4, 4))):
        other = RecordedTap.of(name, torch.ones(theirs_shape))
        (aligned,), _ = AlignedTaps([fewer], fetch).of([RecordedTap.of(name, value)], [other])
        assert aligned.shape == kept


def test_a_pair_whose_rows_no_rule_gives_is_counted_once() -> None:
    steps = Gather((4,), ((3, 1), (0, 3)), (4,)), Scale(2.0), Gather((4,), ((1, 3), (0, 1)), (4,))
    pairs = [Pair("a", "a", Layout(steps)), Pair("b", "b", Layout(steps[:1])), Pair("c", "c")]
    kept, notice = with_row_rules(pairs, [], [], [], {"baseline": None, "target": None})
    assert (kept, notice) == (pairs, "2 of 3 pairs hold only for batches of these lengths")


def test_a_layout_whose_steps_undo_each_other_is_left_out() -> None:
    order, ids = RowOrder(((), 0), ((), 0), (2, 9), (2, 9), np.arange(18), ("ids", "ids")), torch.arange(18)
    taps = AlignedTaps([order], {"baseline": None, "target": None})
    taps.of(*([RecordedTap.of("ids", ids.reshape(2, 9))] for _ in range(2)))
    steps = (Gather.of_rows((2, 9), range(18), (18,)), Rearrange("(a b) -> a b", (("b", 9),)))
    found = Pair("ids", "ids", Layout(steps), rel=0.0)
    assert taps.real(found).layout == Layout()


def test_the_rows_of_a_call_are_those_that_its_thread_showed_of_that_tap_around_it() -> None:
    rows, rule = BatchRows(), PairRule("h", "x", "rows(of='ids', into='tokens')", "baseline")
    ids = torch.arange(3)
    rows.show("ids", ids, (("layer", 1),))
    rows.show("ids", ids + 1, (("layer", 2),))
    rows.show("other", ids + 2, ())
    rows.show("tokens", ids + 3, ())
    # A single number and complex values have no rows.
    rows.show("ids", torch.tensor(1.0), ())
    rows.show("ids", torch.ones(3, 2, dtype=torch.complex64), ())
    thread = threading.Thread(target=rows.show, args=("ids", ids + 4, ()))
    thread.start()
    thread.join()

    def shown(is_whole: bool, *around: tuple[str, int]) -> dict[str, int]:
        return {name: len(each) for name, each in (rows.of(rule, is_whole, around) or {}).items()}

    assert shown(True, ("layer", 1), ("t", 0)) == {"ids": 1}
    assert shown(True) == {"ids": 0}
    assert shown(False) == {"tokens": 1}
    assert rows.of(PairRule("h", "x", "same", "baseline"), True, ()) is None


@pytest.mark.parametrize("is_turned", [False, True])
def test_a_call_with_a_third_of_the_other_sides_rows_is_found_on_either_side(is_turned: bool) -> None:
    many = torch.arange(36) * 7 % 101
    few = many[[20, 3, 17, 9, 30, 12, 25, 1, 33, 6, 14, 28]]
    sides = [[RecordedTap.of("ids", rows)] for rows in ((many, few) if is_turned else (few, many))]
    (order,) = row_orders(*sides, {"baseline": None, "target": None})
    mine, theirs = (tap.value for (tap,) in sides)
    assert mine is not None
    assert theirs is not None
    known = torch.from_numpy(order.index >= 0)
    assert int(known.sum()) == 12
    assert torch.equal(mine[torch.from_numpy(order.index)[known]], theirs[known])


def test_equal_rows_of_several_calls_are_those_of_the_call_of_the_same_number() -> None:
    rows = torch.arange(12) * 7 % 101
    sides = [[RecordedTap.of(f"ids[call={n}]", each) for n in (0, 1)] for each in (rows, rows.flip(0))]
    orders = row_orders(*sides, {"baseline": None, "target": None})
    assert [order.baseline for order in orders] == [order.target for order in orders]
    assert len(orders) == 2


def test_rows_without_a_partner_on_one_side_alone_are_no_pairs_in_disguise() -> None:
    sides: dict[Side, list[RecordedTap]] = {"baseline": [], "target": []}
    fetch: dict[Side, None] = {"baseline": None, "target": None}

    def said(*index: int) -> str:
        order = RowOrder(((), 0), ((), 0), (4,), (3,), np.array(index), ("ids", "ids"))
        return unpaired_rows([order], sides, fetch)

    assert said(0, 1, 2) == ""
    two = "1 row of the target and 2 rows of the baseline have no partner"
    assert said(0, 1, -1).startswith(two)
    # Rows that are equal to each other, and to no other, are padding; where all are equal, that shows nothing.
    sides["baseline"] = [RecordedTap.of("mask", torch.ones(4, dtype=torch.int64))]
    assert said(0, 1, -1).startswith(two)
    sides["baseline"] += [RecordedTap.of("ids", torch.tensor([5, 6, 0, 0]))]
    assert said(0, 1, -1) == ""


def test_two_gathers_of_rows_become_one_that_takes_the_same_rows() -> None:
    first, second = Gather.of_rows((6,), [5, 3, -1, 0], (4,)), Gather.of_rows((4,), [2, 0, -1, 1, 3, 0], (2, 3))
    other = Rearrange("a b c -> b a c")
    steps = (first, second, other)
    merged = _merged(steps)
    assert [type(step) for step in merged] == [Gather, Rearrange]
    x = torch.arange(1.0, 25.0).reshape(6, 4)
    assert torch.equal(Layout(merged).local(x), Layout(steps).local(x))
    # Not across another step, nor of other rows.
    apart = (second, other, second)
    assert _merged(apart) == apart
    apart = (first, Gather.of_rows((2, 2), [3, 1], (2,)))
    assert _merged(apart) == apart


def test_a_result_of_all_calls_is_not_taken_for_the_rows_of_the_first() -> None:
    # A prefill in chunks: the first call has two of six tokens, and the function returns all of them.
    order = RowOrder(((), 0), ((), 0), (2, 6), (2, 2), np.array([0, 1, 6, 7]), ("h", "h"))
    whole, hidden = torch.randn(2, 6, 5), torch.randn(2, 6, 7)
    sides = (
        [RecordedTap.of("h", hidden), RecordedTap.of("output", whole)],
        [RecordedTap.of("h", hidden[:, :2].contiguous()), RecordedTap.of("output", whole)],
    )
    mine, theirs = AlignedTaps([order], {"baseline": None, "target": None}).of(*sides)
    assert [tap.shape for tap in mine] == [tap.shape for tap in theirs] == [(2, 2, 7), (2, 6, 5)]


def test_taps_with_the_rows_of_several_calls_come_call_by_call() -> None:
    values = torch.arange(8.0).reshape(4, 2)
    fetch: dict[Side, None] = {"baseline": None, "target": None}
    mine = [RecordedTap.of("a", values), RecordedTap.of("b", values + 1, order=1, kind="Linear")]
    mine[0].tags = {"layer": 1}
    theirs = [RecordedTap.of(f"{name}#{n}" if n else name, values[2 * n : 2 * n + 2]) for n in (0, 1) for name in "ab"]
    rows = ([0, 1], [2, 3])
    orders = [RowOrder(((), 0), ((), n), (4,), (2,), np.array(index), ("a", "a")) for n, index in enumerate(rows)]
    aligned, _ = AlignedTaps(orders, fetch).of(mine, theirs)
    assert [(tap.name, tap.order) for tap in aligned] == [("a#0", 0), ("b#0", 1), ("a#1", 2), ("b#1", 3)]
    assert [tap.kind for tap in aligned] == ["", "Linear"] * 2
    assert [tap.tags for tap in aligned] == [{"layer": 1}, {}] * 2


def test_rows_that_were_not_kept_are_fetched_from_their_own_side() -> None:
    ids = torch.arange(48) * 7 % 101
    ours = {"ids[call=0]": ids[:24], "ids[call=1]": ids[24:]}
    theirs = {"tokens": ids.roll(24)}
    fetch: dict[Side, Any] = {"baseline": ours.get, "target": theirs.get}
    mine, other = ([RecordedTap.of(name, each, keep=False) for name, each in side.items()] for side in (ours, theirs))
    aligned, _ = AlignedTaps(row_orders(mine, other, fetch), fetch).of(mine, other)
    assert [tap.value is None for tap in aligned] == [False, False]
    # The same rows in the same order are no order to be found.
    assert row_orders(mine, mine, {"baseline": ours.get, "target": ours.get}) == []
    # Each of two calls has some of the target's rows.
    assert len(row_orders(mine, other, fetch)) == 2
    index = np.roll(np.arange(48), 24)
    whole = RowOrder(((), 0), ((), 0), (48,), (48,), index, ("ids", "tokens"))
    pair = Pair("ids", "tokens", Layout((Gather.of_rows((48,), index.tolist(), (48,)),)))
    fetch = {"baseline": {"ids": ids}.get, "target": theirs.get}
    [ruled], _ = with_row_rules([pair], [whole], [RecordedTap.of("ids", ids, keep=False)], other, fetch)
    assert ruled.layout.text == "rows(of='ids', into='tokens')"


def test_complex_taps_show_no_rows() -> None:
    ids, index = torch.arange(64) * 3, np.roll(np.arange(64), 5)
    phases = torch.polar(torch.ones(64), ids.float())
    sides = [
        [RecordedTap.of(name, value[torch.from_numpy(rows)]) for name, value in (("phases", phases), ("ids", ids))]
        for rows in (np.arange(64), index)
    ]
    order = RowOrder(((), 0), ((), 0), (64,), (64,), index, ("ids", "ids"))
    pair = Pair("phases", "phases", Layout((Gather.of_rows((64,), index.tolist(), (64,)),)))
    [ruled], notice = with_row_rules([pair], [order], *sides, {"baseline": None, "target": None})
    assert notice == "in every batch the rows are found again by ids and ids"
    assert ruled.layout.text == "rows(of='ids', into='ids')"


@pytest.mark.parametrize(
    ("shape", "dims", "places"),
    [
        ((2, 3, 8), (2, 3), (0, 1)),
        ((8, 2, 3), (2, 3), (1, 2)),
        ((6, 8), (2, 3), (0,)),
        ((8, 6), (2, 3), (1,)),
        # Tokens before the batch.
        ((3, 2, 8), (2, 3), (1, 0)),
        ((8, 3, 4, 2), (2, 3), (3, 1)),
        # Two dimensions of one size are two.
        ((2, 2, 4), (2, 2), (0, 1)),
        ((2, 4), (2, 2), (1,)),
        ((5, 3), (3,), (1,)),
        ((4, 5), (2, 3), None),
        ((2, 8), (2, 3), None),
        ((3, 8), (2, 3), None),
        ((3, 8), (3, 3), None),
        ((2, 3, 3, 8), (2, 3, 3), (0, 1, 2)),
    ],
)
def test_rows_lie_along_dimensions_of_their_sizes(shape: Any, dims: Any, places: Any) -> None:
    assert _row_dims(shape, dims) == places


@pytest.mark.parametrize("is_damaged", [False, True])
def test_a_models_inputs_show_the_rows_of_its_call(is_damaged: bool) -> None:
    """Also where the last run had a graft that was tried in vain, so that values before a graft no longer match."""
    ids, mask = padded([0, 2], 7)
    rows = torch.arange(14)[mask.flatten()]
    whole = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(0))
    part = whole.flatten(0, 1)[rows]
    mine = [RecordedTap.of("ids[kind=input]", ids), RecordedTap.of("h", whole, order=1)]
    theirs = [
        RecordedTap.of("tokens[kind=input]", ids[mask]),
        RecordedTap.of("x", part.flip(0) if is_damaged else part, order=1),
    ]
    fetch: dict[Side, None] = {"baseline": None, "target": None}
    (order,) = row_orders(mine[:1], theirs[:1], fetch)
    listed = [Pair("h", "x", Layout((Gather.of_rows((2, 7), rows.tolist(), (len(rows),)),)), rel=0.0)]
    (pair,), notice = with_row_rules(listed, [order], mine, theirs, fetch)
    assert pair.layout.text == "rows(of='ids', into='tokens')"
    assert notice == "in every batch the rows are found again by ids and tokens"
