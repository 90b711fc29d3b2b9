"""Taps of two implementations find each other by value, and by rule where a fault hides the values."""

from __future__ import annotations

import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.ports import Port, record_taps
from torch import Tensor

from graftlab.errors import GraftError, LayoutError
from graftlab.layouts import Layout, Scale, parse_layout
from graftlab.matching import matcher, rounds
from graftlab.matching.contradictions import first_taps, odd_layouts, other_roles
from graftlab.matching.digests import Digest
from graftlab.matching.matcher import match_taps
from graftlab.matching.mistakes import (
    _changed_values,
    _differing_rows,
    _order_of_dims,
    _other_layers,
    _rest,
    _without_partner,
    rounded_to,
)
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import COLUMNS, Proposal, pairs_of, written_as
from graftlab.matching.recorded_taps import RecordedTap, SketchRecorder
from graftlab.matching.rounds import Record, _keep, _repeat_rounds, match_in_rounds
from graftlab.matching.rules import rules_of
from graftlab.matching.search import find

EXPECTED = {
    "small_bert": {
        "encoder.layers.{n}.self_attn[0]": "encoder.layer.{n}.attention.output.dense",
        "encoder.layers.{n}.linear1": "encoder.layer.{n}.intermediate.dense",
        "encoder.layers.{n}.linear2": "encoder.layer.{n}.output.dense",
        "encoder.layers.{n}.norm1": "encoder.layer.{n}.attention.output.LayerNorm",
    },
    "llama": {
        "blocks.{n}.attn_norm": "model.layers.{n}.input_layernorm",
        "blocks.{n}.attention.q_proj": "model.layers.{n}.self_attn.q_proj",
        "blocks.{n}.attention.k_proj": "model.layers.{n}.self_attn.k_proj",
        "blocks.{n}.attention.v_proj": "model.layers.{n}.self_attn.v_proj",
        "blocks.{n}.mlp.gate_proj": "model.layers.{n}.mlp.gate_proj",
        "blocks.{n}.mlp.up_proj": "model.layers.{n}.mlp.up_proj",
        "blocks.{n}.mlp_norm": "model.layers.{n}.post_attention_layernorm",
    },
    "gpt2": {
        "stack.{n}.query": "h.{n}.attn.c_attn",
        "stack.{n}.key": "h.{n}.attn.c_attn",
        "stack.{n}.value": "h.{n}.attn.c_attn",
        "stack.{n}.merge": "h.{n}.attn.c_proj",
        "stack.{n}.widen": "h.{n}.mlp.c_fc",
        "stack.{n}.norm2": "h.{n}.ln_2",
    },
}
LAYERS = {"small_bert": 4, "llama": 3, "gpt2": 3}


def taps_of(port: Port, target: torch.nn.Module | None = None) -> tuple[list[RecordedTap], list[RecordedTap]]:
    return (
        record_taps(port.baseline, port.run).taps,
        record_taps(target or port.target, port.run).taps,
    )


@pytest.fixture(params=sorted(EXPECTED))
def named(request: pytest.FixtureRequest) -> tuple[str, Port]:
    return request.param, request.getfixturevalue(request.param)


def check_expected(name: str, proposal: Proposal, *, at_least: float = 1.0) -> None:
    """How many of the pairs that names tell a person were found; no found pair is wrong."""
    right = total = 0
    for target, baseline in EXPECTED[name].items():
        for n in range(LAYERS[name]):
            total += 1
            found = {pair.baseline for pair in proposal.of_target(target.format(n=n)) if pair.sureness != "guess"}
            assert found <= {baseline.format(n=n)}, (target.format(n=n), found)
            right += bool(found)
    assert right >= at_least * total, f"{right} of {total}"


# ---- right ports ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_tap_of_a_right_port_finds_its_partner_by_value(named: tuple[str, Port]) -> None:
    name, port = named
    proposal = match_taps(*taps_of(port))
    assert proposal.unmatched_target == {}
    assert all(pair.by_value for pair in proposal.pairs)
    assert proposal.problems == ()
    check_expected(name, proposal)


@pytest.mark.slow
def test_each_pairs_layout_takes_one_tensor_out_of_the_other(named: tuple[str, Port]) -> None:
    _, port = named
    baseline, target = taps_of(port)
    mine, theirs = ({tap.name: tap.value for tap in taps} for taps in (baseline, target))
    for pair in match_taps(baseline, target).pairs:
        outer, inner = mine[pair.baseline], theirs[pair.target]
        if pair.whole == "target":
            outer, inner = inner, outer
        assert outer is not None
        assert inner is not None
        taken = pair.layout.local(outer)
        assert taken.shape == inner.shape
        assert torch.allclose(taken, inner, rtol=1e-3, atol=1e-4), pair


def test_a_fused_projection_is_paired_with_each_of_its_parts(gpt2: Port) -> None:
    proposal = match_taps(*taps_of(gpt2))
    parts = [pair for name in ("query", "key", "value") for pair in proposal.of_target(f"stack.1.{name}")]
    assert [pair.layout.text for pair in parts] == [f"part(index={i}, of=[1, 1, 1], dim=2)" for i in range(3)]


def test_half_width_runs_match_their_full_width_originals(llama: Port) -> None:
    half = copy.deepcopy(llama.target).bfloat16()
    proposal = match_taps(*taps_of(llama, half))
    check_expected("llama", proposal, at_least=0.95)


def test_unrelated_models_have_no_pair_by_value(llama: Port) -> None:
    from graftlab.models import ModelConfig, Transformer

    other = Transformer(ModelConfig(96, 32, 3, 4, 2, 48, 64), seed=11)
    proposal = match_taps(*taps_of(llama, other))
    assert proposal.graftable == ()
    assert all(pair.sureness == "guess" for pair in proposal.pairs)


# ---- sketches -------------------------------------------------------------------------------------------------------


def test_sketches_alone_find_most_pairs(llama: Port) -> None:
    recorders = [record_taps(model, llama.run, budget=0) for model in (llama.baseline, llama.target)]
    assert all(tap.value is None for recorder in recorders for tap in recorder.taps)
    proposal = match_taps(recorders[0].taps, recorders[1].taps)
    check_expected("llama", proposal, at_least=0.9)
    assert all("only extreme values compared" in pair.note for pair in proposal.graftable)
    twice = [RecordedTap.of(name, values(8, 8, seed=1), order=order, keep=False) for order, name in enumerate("xy")]
    notes = {pair.note for pair in match_taps(twice[:1], twice).pairs}
    assert notes == {"only extreme values compared", "has the same values as x; only extreme values compared"}


def test_values_are_fetched_only_for_candidates(gpt2: Port) -> None:
    kept = [{tap.name: tap.value for tap in taps} for taps in taps_of(gpt2)]
    recorders = [record_taps(model, gpt2.run, budget=0) for model in (gpt2.baseline, gpt2.target)]
    asked: list[str] = []

    def fetch(side: int, name: str) -> Tensor | None:
        asked.append(name)
        return kept[side][name]

    recorders[0].tap("nothing like it", torch.arange(704.0).reshape(2, 11, 32) * 1e6, None, {})
    proposal = match_taps(
        recorders[0].taps,
        recorders[1].taps,
        fetch_baseline=lambda name: fetch(0, name),
        fetch_target=lambda name: fetch(1, name),
    )
    check_expected("gpt2", proposal)
    assert "nothing like it" not in asked
    assert not any(pair.note for pair in proposal.graftable if "extreme" in pair.note)


def test_what_is_computed_from_taps_of_one_size_is_dropped_before_the_next_size() -> None:
    taken = [tap(name, values(16, 16, seed=n), n) for n, name in enumerate("ab")]
    others = [tap(name, values(16, 16, seed=n) + 1e-5, n) for n, name in enumerate("xy")]
    found = matcher.Matcher(taken, others, None, None)
    found.match_equals()
    assert len(found.pairs) == 2
    assert [each.in_memory for each in (*taken, *others)] == [4 * 16 * 16] * 4


def test_only_weights_are_fetched_to_be_compared_by_rule() -> None:
    asked: list[str] = []
    value = RecordedTap.of("a", torch.ones(2), keep=False)
    weight = RecordedTap.of("w", torch.ones(2), keep=False, digest=Digest.of(torch.ones(2)))
    matcher.Matcher([value, weight], [], asked.append, None).bring_weights(value, weight)  # type: ignore[arg-type]
    assert asked == ["w"]


def test_values_are_fetched_from_the_side_of_the_tap() -> None:
    mine, theirs = tap("a", torch.zeros(2), 0), tap("a", torch.zeros(2), 0)
    found = matcher.Matcher([mine], [theirs], lambda name: torch.tensor([1.0]), lambda name: torch.tensor([2.0]))
    for each, value in ((mine, 1.0), (theirs, 2.0)):
        found._fetch_values(each)
        assert each.value is not None
        assert each.value.tolist() == [value]


def test_values_that_are_compared_are_not_dropped_to_fetch_the_other_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "FETCHED", 4096)
    values = {name: torch.randn(256, generator=torch.Generator().manual_seed(seed)) for seed, name in enumerate("abcd")}
    values["a'"] = values["a"] + 1e-5
    mine, theirs = (
        [RecordedTap.of(each, values[each], order=0, keep=False) for each in side] for side in ("ab", ["a'"])
    )
    found = matcher.Matcher(mine, theirs, values.get, values.get)
    for each in mine:
        of_extremes = each.lookup
        found._fetch_values(each)
        assert each.lookup is not None
        assert each.lookup is not of_extremes
        found._memory.keep(each)
    match = found._find(mine[0], theirs[0])
    assert match is not None
    assert not match.sampled
    # What is not compared now has made room.
    assert [each.value is None for each in (*mine, *theirs)] == [False, True, False]


def test_values_that_are_used_again_and_again_count_once(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, third = (tap(name, values(16, 16, seed=n), n) for n, name in enumerate("abc"))
    monkeypatch.setattr(matcher, "FETCHED", 5 * 16 * 16 * 4 // 2)
    memory = matcher._LastUsed()
    memory.fetched = {id(each) for each in (one, other, third)}
    for _ in range(5):
        memory.keep(one)
        memory.keep(other)
    assert one.value is not None
    assert other.value is not None
    memory.keep(third)
    # The one that was used longest ago.
    assert [each.value is None for each in (one, other, third)] == [True, False, False]


def test_two_taps_that_are_compared_are_kept_however_large_and_nothing_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    taken = [tap(name, values(16, 16, seed=n), n) for n, name in enumerate("abc")]
    monkeypatch.setattr(matcher, "FETCHED", 1)
    memory = matcher._LastUsed()
    memory.fetched = {id(each) for each in taken}
    held = []
    for kept in (taken[:2], taken[2:]):
        assert all(each.lookup is not None for each in kept)
        memory.keep(*kept)
        held.append([(each.value is not None, each.in_memory > 2 * 1024) for each in taken])
    is_whole, is_dropped = (True, True), (False, False)
    assert held == [[is_whole, is_whole, (True, False)], [is_dropped, is_dropped, is_whole]]


@pytest.mark.parametrize("order", [1, -1])
def test_of_several_wholes_with_the_same_rows_the_namesake_is_chosen(order: int) -> None:
    table = values(12, 8, seed=1)
    names = ["encoder.embedding.weight", "decoder.embedding.weight"][::order]
    baseline = [RecordedTap.of(name, table, digest=Digest.of(table)) for name in names]
    rows = table[2:9].clone()
    match = matcher.Matcher(
        baseline, [RecordedTap.of("decoder.tokens.weight", rows, digest=Digest.of(rows))], None, None
    )
    match.match_rows()
    assert [(pair.baseline, pair.layout.text) for pair in match.pairs] == [
        ("decoder.embedding.weight", "part(index=1, of=[2, 7, 3], dim=0)")
    ]


def test_rows_of_equal_numbers_are_no_part_of_a_weight_with_such_rows() -> None:
    table, rows = values(12, 8, seed=1), torch.zeros(5, 8)
    table[4:9] = 0
    found = matcher.Matcher(
        [RecordedTap.of("table", table, digest=Digest.of(table))],
        [RecordedTap.of("fresh", rows, digest=Digest.of(rows))],
        None,
        None,
    )
    found.match_rows()
    assert found.pairs == []


def test_a_recorder_keeps_copies_within_its_budget_and_counts_calls() -> None:
    recorder = SketchRecorder({"a": "Linear"}, budget=24)
    value = torch.arange(4.0)
    assert recorder.tap("a", value, None, {}) is value
    recorder.tap("a", value, None, {"layer": 3, "tp_rank": 1})
    recorder.tap("a", value, None, {})
    recorder.tap("b", None, None, {})
    recorder.tap("c", torch.ones(2, 0), None, {})
    value += 1
    names = [tap.name for tap in recorder.taps]
    assert names == ["a", "a[layer=3]", "a#1"]
    assert [tap.value is not None for tap in recorder.taps] == [True, False, False]
    assert recorder.taps[0].value is not None
    assert recorder.taps[0].value.tolist() == [0, 1, 2, 3]
    assert recorder.taps[0].kind == "Linear"
    assert recorder.skipped == {"b": "is a NoneType, not a tensor", "c": "is empty"}


# ---- ties, rules, guesses -------------------------------------------------------------------------------------------


def tap(name: str, value: Tensor, order: int, kind: str = "") -> RecordedTap:
    return RecordedTap.of(name, value, kind=kind, order=order)


def values(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_kind_name_and_order_decide_between_equal_values() -> None:
    x, y = values(4, 8, seed=1), values(4, 8, seed=2)
    baseline = [tap("norm", x, 0, "LayerNorm"), tap("drop", x, 1, "Dropout"), tap("fc", y, 2, "Linear")]
    target = [tap("ln", x, 0, "LayerNorm"), tap("d", x, 1, "Dropout"), tap("again", x, 2, ""), tap("proj", y, 3)]
    proposal = match_taps(baseline, target)
    assert {pair.target: pair.baseline for pair in proposal.pairs if pair.target != "again"} == {
        "ln": "norm",
        "d": "drop",
        "proj": "fc",
    }
    assert "has the same values as" in proposal.of_target("again")[0].note
    assert proposal.order == {"baseline": ("norm", "drop", "fc"), "target": ("ln", "d", "again", "proj")}


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        # That both kinds are unknown shows nothing.
        (tap("h.0.mlp", X := values(4, 8, seed=1), 0, "Linear"), tap("h.0.mlp_norm", X, 1)),
        # The same layout counts more than a few letters of the name.
        (tap("g.0.mlp", X, 0), tap("h.0.mlp", X.T.contiguous(), 1)),
        # Rounding does not decide, also if the other one is several times as near.
        (tap("h.0.mlp", X * (1 + 9e-4), 0), tap("other", X * (1 + 2e-4), 1)),
        (tap("h.0.mlp", X * (1 + 2e-4), 0), tap("other", X * (1 + 9e-4), 1)),
    ],
)
def test_of_equal_values_those_of_the_likelier_place_are_chosen(right: RecordedTap, wrong: RecordedTap) -> None:
    others = [tap(f"other.{n}", values(3, n + 9, seed=n), n + 2) for n in range(19)]
    proposal = match_taps([right, wrong, *others], [tap("h.0.mlp", X, 0)], guesses=False)
    assert [pair.baseline for pair in proposal.pairs] == [right.name]


@pytest.mark.parametrize(("whole_kept", "part_kept"), [*itertools.product([True, False], repeat=2)])
@pytest.mark.parametrize(
    "taken",
    [lambda x: x, torch.t, lambda x: x[4:8], lambda x: x.view(4, 4, 32).transpose(1, 2)],
    ids=["same", "transposed", "part", "rearranged"],
)
def test_a_tap_with_nothing_but_a_sketch_is_found_too(
    taken: Callable[[Tensor], Tensor], whole_kept: bool, part_kept: bool
) -> None:
    whole = values(16, 32, seed=3)
    part = taken(whole).clone()
    outer, inner = RecordedTap.of("h", whole, keep=whole_kept), RecordedTap.of("x", part, keep=part_kept)
    found = find(outer, inner)
    assert found is not None
    assert torch.equal(found.layout.local(whole), part)
    # Only what was compared whole is bit-equal.
    assert (found.exact, found.sampled) == ((True, False) if whole_kept and part_kept else (False, True))
    others = RecordedTap.of("y", values(*part.shape, seed=4), keep=part_kept)
    assert find(outer, others) is None


@pytest.mark.parametrize(
    ("count", "layout"),
    [(2, "part(index=1, of=[1, 1], dim=0) | 1 a -> a"), (3, "window(dim=0, start=-1, length=1) | 1 a -> a")],
)
def test_one_of_two_is_a_part_and_the_last_of_more_is_the_last_of_any_number(count: int, layout: str) -> None:
    whole = values(count, 16, seed=3)
    found = find(RecordedTap.of("h", whole), RecordedTap.of("x", whole[-1].clone()))
    assert found is not None
    assert found.layout.text == layout


@pytest.mark.parametrize(("count", "is_found"), [(64, True), (65, False)])
def test_a_part_is_found_in_a_whole_of_at_most_64_of_its_size(count: int, is_found: bool) -> None:
    whole = values(count, 16, seed=3)
    part, repeated = whole[4].clone(), whole[4].repeat(count, 1)
    for outer, inner in ((whole, part), (part, repeated)):
        assert (find(RecordedTap.of("h", outer), RecordedTap.of("x", inner)) is not None) is is_found


def test_a_pair_by_rule_keeps_its_partner_from_a_module_that_passes_the_graft_on() -> None:
    graft, wrong = values(6, 8, seed=5), values(6, 8, seed=6)
    baseline = [tap("h.0.passed_on", graft, 0), tap("h.0.mlp", graft, 1)]
    target = [tap("layers.0.ffn", wrong, 0), tap("layers.0.mlp", graft, 1)]
    before = Proposal((Pair("h.0.mlp", "layers.0.ffn", sureness="rule"),))
    paired = {pair.target: pair.baseline for pair in match_taps(baseline, target, before=before, guesses=False).pairs}
    assert paired["layers.0.mlp"] == "h.0.passed_on"
    # A guess reserves nothing.
    before = Proposal((Pair("h.0.mlp", "layers.0.ffn", sureness="guess"),))
    paired = {pair.target: pair.baseline for pair in match_taps(baseline, target, before=before, guesses=False).pairs}
    assert paired["layers.0.mlp"] == "h.0.mlp"


def test_a_partner_that_grafts_have_proved_is_kept_whatever_an_earlier_run_proposed() -> None:
    graft, wrong = values(6, 8, seed=5), values(6, 8, seed=6)
    target = [tap("layers.0.ffn", wrong, 0), tap("layers.0.mlp", graft, 1)]
    before = Proposal((Pair("h.0.mlp", "layers.0.mlp", sureness="rule"),))
    trusted = [Pair("h.0.mlp", "layers.0.ffn", sureness="rule")]
    proposal = match_taps([tap("h.0.mlp", graft, 0)], target, before=before, trusted=trusted, guesses=False)
    assert [pair.note for pair in proposal.of_target("layers.0.mlp")] == ["has the same values as layers.0.ffn"]


def layered(count: int, wrong: Sequence[int] = (), shift: int = 0) -> tuple[list[RecordedTap], list[RecordedTap]]:
    baseline = [tap(f"h.{n + shift}.mlp", values(6, 8, seed=n), n) for n in range(count)]
    target = [tap(f"layers.{n}.ffn", values(6, 8, seed=n + 100 * (n in wrong)), n) for n in range(count)]
    return baseline, target


@pytest.mark.parametrize("shift", [0, 2])
def test_a_rule_needs_two_layers_and_reports_the_distance(shift: int) -> None:
    proposal = match_taps(*layered(4, wrong=[3], shift=shift))
    (pair,) = proposal.of_target("layers.3.ffn")
    assert (pair.baseline, pair.sureness) == (f"h.{3 + shift}.mlp", "rule")
    assert pair.rel is not None
    assert pair.rel > 0.5
    assert "as in 3 other layers, where the values match; here the values differ by rel_l2" in pair.note
    # Pairs that grafts have shown do not claim that the values match anywhere.
    shown = [Pair(f"h.{n + shift}.mlp", f"layers.{n}.ffn", sureness="rule") for n in range(2)]
    (pair,) = match_taps(*layered(3, wrong=[0, 1, 2], shift=shift), trusted=shown).of_target("layers.2.ffn")
    assert pair.note.startswith("as in 2 other layers, where grafts confirmed it; here the values differ by rel_l2 ")
    alone = match_taps(*layered(2, wrong=[1], shift=shift), guesses=False)
    assert [pair.target for pair in alone.pairs] == ["layers.0.ffn"]
    assert alone.unmatched_target == {"layers.1.ffn": "no baseline tap has its values"}


@pytest.mark.parametrize(
    ("ours", "theirs", "layout", "sureness", "rel", "note"),
    [
        (torch.ones(3), torch.ones(3), "same", "near", 0.0, "; all its values are equal, so they prove nothing"),
        (
            torch.ones(3),
            torch.full((3,), 2.0),
            "same",
            "near",
            1.0,
            ", where the values match; here the values differ by rel_l2 1",
        ),
        (
            values(2, 3, seed=1),
            values(4, 3, seed=1),
            "a b -> b a",
            "near",
            None,
            "; its values could not be compared in that layout",
        ),
        (
            values(2, 3, seed=1),
            3 * values(2, 3, seed=1),
            "same",
            "near",
            2.0,
            ", where the values match; here the values differ by rel_l2 2",
        ),
        (
            values(2, 3, seed=1),
            3 * values(2, 3, seed=1),
            "same",
            "rule",
            2.0,
            ", where grafts confirmed it; here the values differ by rel_l2 2",
        ),
        (values(2, 3, seed=1), 1.0005 * values(2, 3, seed=1), "same", "near", 0.0005, ""),
    ],
)
def test_a_pair_by_rule_has_the_layout_of_the_others_and_says_how_its_values_differ(
    ours: Tensor, theirs: Tensor, layout: str, sureness: Any, rel: float | None, note: str
) -> None:
    example = Pair("h.0.x", "l.0.y", parse_layout(layout), "baseline", sureness)
    match = matcher.Matcher([one := tap("h.5.x", ours, 0)], [other := tap("l.5.y", theirs, 0)], None, None)
    found = match.by_rule(example, 2, one, other)
    assert (found.baseline, found.target, found.layout.text, found.whole) == ("h.5.x", "l.5.y", layout, "baseline")
    assert (found.sureness, found.note) == ("rule", f"as in 2 other layers{note}")
    assert found.rel == (None if rel is None else pytest.approx(rel, rel=1e-3))


def test_a_rule_follows_the_right_number_of_several() -> None:
    pairs = [Pair(f"stages.{s}.{n}.fc1", f"s{s}.b{n + 1}.lin") for s in range(2) for n in range(3)]
    (rule,) = rules_of(pairs)
    assert rule.baseline_for("s5.b9.lin") == "stages.5.8.fc1"
    assert rule.seen == 6


def test_a_second_result_is_no_further_layer_of_the_first() -> None:
    """A block returns its output and the sum of those before, which only one side has."""
    pairs = [Pair(f"h.{n}.mlp", f"layers.{n}[0]") for n in range(3)]
    (rule,) = rules_of(pairs)
    assert rule.covers("layers.7[0]")
    assert not rule.covers("layers.7[1]")
    mlp, outputs = (
        [tap(f"{name}.{n}{part}", values(6, 8, seed=n), 4 * n + at) for n in range(3)]
        for name, part, at in (("h", ".mlp", 0), ("layers", "[0]", 1))
    )
    inner = [tap(f"layers.{n}.mlp", values(6, 8, seed=n), 4 * n) for n in range(3)]
    sums = [tap(f"layers.{n}[1]", values(6, 8, seed=n + 50), 4 * n + 2) for n in range(3)]
    proposal = match_taps(mlp, [*inner, *outputs, *sums])
    assert {pair.target for pair in proposal.pairs} == {each.name for each in (*inner, *outputs)}
    assert all(pair.by_value for pair in proposal.pairs)


def test_results_in_another_order_make_a_rule_only_for_those_that_follow_it() -> None:
    """The second layer's other result differs, so that only the first layer shows both."""
    pairs = [Pair("h.0[0]", "layers.0[1]"), Pair("h.0[1]", "layers.0[0]"), Pair("h.1[0]", "layers.1[1]")]
    (rule,) = rules_of(pairs)
    assert rule.baseline_for("layers.2[1]") == "h.2[0]"
    assert rule.covers("layers.2[1]")
    assert not rule.covers("layers.2[0]")


def test_the_partner_of_a_second_result_is_not_odd_beside_those_of_the_first() -> None:
    """The first block passes on the embedding, which no other does."""
    first = [Pair(f"h.{n}.mixer", f"layers.{n}[0]") for n in range(4)]
    assert odd_layouts([*first, Pair("embeddings", "layers.0[1]")], []) == []
    # The first result of another layer is, if something else has its partner.
    (odd,) = odd_layouts([*first, Pair("h.4.norm", "layers.4[0]"), Pair("h.4.mixer", "other")], [])
    assert odd.tap == "layers.4[0]"


def test_the_next_module_in_a_sequence_may_have_equal_values_in_another_layout() -> None:
    """A sequence of a transpose, a batch norm and a transpose shows the same values twice."""
    turned = parse_layout("a b c -> a c b")
    norms = [Pair(f"layers.{n}.norm.1", f"blocks.{n}.n", turned) for n in (1, 2)]
    assert odd_layouts([*norms, Pair("layers.0.norm.2", "blocks.0.n")], []) == []
    (odd,) = odd_layouts([*norms, Pair("layers.0.norm.1", "blocks.0.n")], [])
    assert odd.tap == "blocks.0.n"


def test_layers_that_do_not_agree_on_their_numbers_make_no_rule() -> None:
    assert rules_of([Pair("h.0.mlp", "l.0.ffn"), Pair("h.5.mlp", "l.1.ffn")]) == []
    assert rules_of([Pair("h.3.mlp", "l.3.ffn")]) == []
    # One that is given twice is one layer.
    assert rules_of([*[Pair("h.0.mlp", "l.0.ffn")] * 2, Pair("h.5.mlp", "l.1.ffn")]) == []


def test_a_rule_accepts_names_with_a_number_sign() -> None:
    pairs = [Pair(f"h.{layer}.norm#1", f"l.{layer}.norm#2") for layer in range(3)] + [Pair("h.#.x", "l.0.x")]
    (rule,) = rules_of(pairs)
    assert rule.seen == 3
    assert rule.baseline_for("l.7.norm#2") == "h.7.norm#1"


def test_rounding_does_not_decide_between_taps_with_the_same_values() -> None:
    exact = values(4, 8, seed=1)
    rounded = exact * (1 + 2.0**-23)
    baseline = [tap("layers.0.norm", rounded, 0), tap("layers.0.again", exact, 1)]
    (pair,) = match_taps(baseline, [tap("layers.0.norm", exact, 0)]).pairs
    assert (pair.baseline, pair.sureness) == ("layers.0.norm", "near")


def test_equal_outliers_do_not_make_a_pair_of_values_in_another_order() -> None:
    outliers, others = torch.linspace(1.0, 2.0, 64), torch.linspace(-0.9, 0.9, 936)
    shuffled = [
        torch.cat([outliers, others[torch.randperm(936, generator=torch.Generator().manual_seed(seed))]])
        for seed in (1, 2)
    ]
    taps = [[tap("h", each.reshape(10, 100), 0)] for each in shuffled]
    assert match_taps(*taps, guesses=False).pairs == ()


def test_a_guess_is_marked_as_one_and_never_graftable() -> None:
    baseline = [tap("head.logits", values(4, 8, seed=1), 0)]
    target = [tap("head.logits", values(4, 8, seed=2), 0)]
    (pair,) = match_taps(baseline, target).pairs
    assert (pair.sureness, pair.by_value) == ("guess", False)
    assert match_taps(baseline, target).graftable == ()
    assert match_taps(baseline, target, guesses=False).pairs == ()


def test_a_layout_unlike_the_neighbours_is_a_problem() -> None:
    baseline = [tap(f"h.{n}.qkv", values(6, 24, seed=n), n) for n in range(4)]
    target = [
        tap(f"l.{n}.q", base.value.chunk(3, -1)[1 if n == 2 else 0], n)  # type: ignore[union-attr]
        for n, base in enumerate(baseline)
    ]
    proposal = match_taps(baseline, target)
    (problem,) = proposal.problems
    assert problem.startswith("l.2.q is h.2.qkv in the layout 'part(index=1, of=[1, 1, 1], dim=1)', where 3 others")


def test_taps_with_uninformative_values_are_not_matched_by_value() -> None:
    baseline = [tap("mask", torch.zeros(4, 8), 0), tap("nan", torch.full((3,), torch.nan), 1)]
    baseline.append(tap("odd", values(5, 7, seed=1), 2))
    target = [tap("other", torch.zeros(4, 8), 0), tap("nans", torch.full((3,), torch.nan), 1)]
    proposal = match_taps(baseline, target, guesses=False)
    assert proposal.pairs == ()
    assert "all its values are equal" in proposal.unmatched_target["other"]
    assert "it has no finite value" in proposal.unmatched_target["nans"]
    assert proposal.unmatched_baseline["odd"] == "no target tap has 35 elements or contains it"


def test_numbers_within_words_are_not_layers() -> None:
    """``drop1`` is no earlier layer of ``drop2``, neither for what is odd nor for what follows by rule."""
    baseline, target = [], []
    for n in range(5):
        wide, out = values(4, 16, seed=n), values(4, 8, seed=n + 9)
        baseline += [tap(f"h.{n}.wide", wide, 2 * n), tap(f"h.{n}.out", out, 2 * n + 1)]
        wide = values(4, 16, seed=50 + n) if n in (2, 4) else wide
        out = values(4, 8, seed=50 + n) if n == 4 else out
        target += [tap(f"l.{n}.drop1", wide, 2 * n), tap(f"l.{n}.drop2", out, 2 * n + 1)]
    proposal = match_taps(baseline, target, guesses=False)
    assert {pair.target: pair.baseline for pair in proposal.pairs} == {
        f"l.{n}.drop{i + 1}": f"h.{n}.{name}" for n in range(5) for i, name in enumerate(("wide", "out"))
    }
    few = [each for each in target if each.name in ("l.0.drop1", "l.0.drop2", "l.1.drop2", "l.2.drop2", "l.3.drop2")]
    assert match_taps(baseline, few, guesses=False).problems == ()


def test_a_tap_is_as_far_from_one_before_its_place_as_from_one_after_it() -> None:
    taps = [tap(f"h.{n}", values(2, 2, seed=n), n) for n in range(9)]
    distance = matcher.Matcher(taps, taps, None, None)._distance(taps[4], "baseline")
    assert [distance(each) for each in taps] == [4, 3, 2, 1, 0, 1, 2, 3, 4]


def test_layers_choose_alike_between_equal_values() -> None:
    baseline = []
    for n in range(4):
        same = values(4, 8, seed=n)
        baseline += [tap(f"h.{n}.inner", same, 2 * n), tap(f"h.{n}.outer", same, 2 * n + 1)]
    # In layer 2 the order alone would choose the outer one.
    places = {0: 0, 2: 1, 5: 2, 6: 3}
    target = [
        tap(f"l.{places[order]}.only", values(4, 8, seed=places[order]), order)
        if order in places
        else tap(f"more.{order}", values(3, 3, seed=90 + order), order)
        for order in range(8)
    ]
    proposal = match_taps(baseline, target, guesses=False)
    assert [pair.baseline for pair in proposal.pairs] == [f"h.{n}.inner" for n in range(4)]
    assert proposal.problems == ()


def test_a_rule_keeps_its_partner_from_a_tap_that_has_the_same_values() -> None:
    """A module and its last child have equal values; in later layers only the module's still match."""
    baseline, target = [], []
    for n in range(4):
        right, wrong = values(4, 8, seed=n), values(4, 8, seed=n + 50)
        baseline += [tap(f"h.{n}.attn.proj", right, 2 * n, "Linear"), tap(f"h.{n}.attn", right, 2 * n + 1)]
        target += [tap(f"l.{n}.a.out", wrong, 2 * n, "Linear"), tap(f"l.{n}.a", right, 2 * n + 1, "Linear")]
    shown = [Pair(f"h.{n}.attn.proj", f"l.{n}.a.out", sureness="rule") for n in range(2)]
    proposal = match_taps(baseline, target, trusted=shown)
    assert [(pair.baseline, pair.target) for pair in proposal.pairs] == [
        pair for n in range(4) for pair in ((f"h.{n}.attn.proj", f"l.{n}.a.out"), (f"h.{n}.attn", f"l.{n}.a"))
    ]


def test_a_trusted_pair_that_is_no_layer_of_a_rule_keeps_its_partner() -> None:
    """The rule of the other trusted pairs would give it to the tap that passes the graft on."""
    shared, wrong = values(4, 8, seed=2), values(4, 8, seed=50)
    baseline = [tap(f"h.{n}.m", values(4, 8, seed=n), n) for n in range(3)]
    target = [tap("own", wrong, 0), *(tap(f"l.{n}.x", each.value, n + 1) for n, each in enumerate(baseline))]  # type: ignore[arg-type]
    assert torch.equal(baseline[2].value, shared)  # type: ignore[arg-type]
    trusted = [
        Pair("h.2.m", "own", sureness="rule"),
        *(Pair(f"h.{n}.m", f"l.{n}.x", sureness="rule") for n in range(2)),
    ]
    proposal = match_taps(baseline, target, trusted=trusted)
    assert {(pair.baseline, pair.target): pair.note for pair in proposal.pairs if pair.baseline == "h.2.m"} == {
        ("h.2.m", "own"): "",
        ("h.2.m", "l.2.x"): "has the same values as own",
    }
    # It says how far apart the values are now.
    (own,) = proposal.of_target("own")
    assert own.rel == pytest.approx(float((wrong - shared).norm() / shared.norm()), rel=1e-3)


def test_pairs_that_are_replaced_leave_their_taps_to_others() -> None:
    names = ("x", "y")
    taken = [tap(name, values(4, 8, seed=n), n) for n, name in enumerate(names)]
    found = matcher.Matcher(taken, [tap(f"t.{each.name}", each.value, n) for n, each in enumerate(taken)], None, None)  # type: ignore[arg-type]

    def left() -> list[list[str]]:
        return [[each.name for each in found.left(side)] for side in ("baseline", "target")]

    found.add(Pair("x", "t.x"))
    assert left() == [["y"], ["t.y"]]
    found.replace_pairs([Pair("y", "t.x")])
    assert left() == [["x"], ["t.y"]]
    assert [found.has(name, "baseline") for name in names] == [False, True]
    # A target's tap may have several parts, which come in the order in which they run.
    pairs = [Pair("y", "t.x"), Pair("x", "t.y"), Pair("x", "t.x")]
    assert [(each.baseline, each.target) for each in found.in_order(pairs)] == [
        ("x", "t.x"),
        ("y", "t.x"),
        ("x", "t.y"),
    ]


def test_wholes_are_sought_anew_once_a_tap_has_a_partner() -> None:
    """Those without a partner are tried first."""
    small, large = tap("small", values(4, 8, seed=0), 0), tap("large", values(5, 8, seed=1), 1)
    found = matcher.Matcher([small, large], [tap("t", values(3, 8, seed=2), 0)], None, None)
    for expected in ((["small", "large"], {"small", "large"}), (["large", "small"], {"large"})):
        for _ in range(2):
            alone, wholes = found._possible_wholes("baseline", 24)
            assert ([each.name for each in wholes], alone) == expected
        found.add(Pair("small", "t"))


def test_a_part_that_several_layers_lack_is_sought_only_nearby(monkeypatch: pytest.MonkeyPatch) -> None:
    tried: Counter[str] = Counter()

    def note(outer: RecordedTap, inner: RecordedTap, *rest: object) -> None:
        tried[inner.name] += 1

    monkeypatch.setattr(matcher, "find", note)
    baseline = [tap(f"b.{n}.y", values(40, seed=n), n) for n in range(60)]
    match_taps(baseline, [tap(f"l.{n}.x", values(20, seed=99 + n), n) for n in range(5)], guesses=False)
    assert [tried[f"l.{n}.x"] for n in range(3)] == [60] * 3
    assert max(tried["l.3.x"], tried["l.4.x"]) <= 2 * matcher.BESIDE + 1


def test_a_trusted_rule_gives_its_partner_to_the_tap_that_was_grafted_too() -> None:
    """A module that passes on a grafted tensor shows the same values, and is paired by them."""
    baseline, target = [], []
    for n in range(3):
        right, wrong = values(4, 8, seed=n), values(4, 8, seed=n + 50)
        baseline.append(tap(f"h.{n}.m", right, n))
        target += [tap(f"l.{n}.inner", wrong, 2 * n), tap(f"l.{n}.outer", right, 2 * n + 1)]
    trusted = [Pair(f"h.{n}.m", f"l.{n}.inner", sureness="rule") for n in range(2)]
    proposal = match_taps(baseline, target, trusted=trusted, guesses=False)
    assert {pair.target: pair.baseline for pair in proposal.pairs if pair.target.startswith("l.2.")} == {
        "l.2.inner": "h.2.m",
        "l.2.outer": "h.2.m",
    }


def test_a_tap_that_shares_its_partner_in_other_layers_does_so_by_rule() -> None:
    baseline, target = [], []
    for n in range(3):
        right = values(4, 8, seed=n)
        baseline.append(tap(f"h.{n}.m", right, n))
        own = right if n < 2 else values(4, 8, seed=50)
        target += [tap(f"l.{n}.inner", right, 2 * n), tap(f"l.{n}.outer", own, 2 * n + 1)]
    (pair,) = match_taps(baseline, target, guesses=False).of_target("l.2.outer")
    assert (pair.baseline, pair.sureness) == ("h.2.m", "rule")


def test_two_taps_that_are_swapped_in_one_layer_are_one_problem() -> None:
    baseline, target = [], []
    for n in range(4):
        q, k = (values(4, 8, seed=2 * n + each) for each in range(2))
        baseline += [tap(f"h.{n}.attn.q_proj", q, 2 * n), tap(f"h.{n}.attn.k_proj", k, 2 * n + 1)]
        named = ("key", "query") if n == 2 else ("query", "key")
        target += [tap(f"l.{n}.self.{name}", each, 2 * n) for name, each in zip(named, (q, k), strict=True)]
    (said,) = match_taps(baseline, target).problems
    assert said == (
        "l.2.self.key is k by its name but has the values of h.2.attn.q_proj, which is q, and l.2.self.query has the "
        "values of h.2.attn.k_proj, which is k: the two are swapped"
    )


def test_a_fused_tap_has_all_its_parts_even_if_some_match_elsewhere() -> None:
    q, k, v = (values(4, 8, seed=n) for n in range(3))
    baseline = [tap("q", q, 0), tap("k", k, 1), tap("v", v, 2)]
    target = [tap("qkv", torch.cat([q, k, v], 1), 0), tap("q_norm", q.unflatten(1, (2, 4)), 1)]
    proposal = match_taps(baseline, target)
    assert [pair.baseline for pair in proposal.of_target("q_norm")] == ["q"]
    assert {pair.baseline for pair in proposal.of_target("qkv")} == {"q", "k", "v"}


def test_a_copy_of_a_part_is_no_further_part_of_a_fused_tap() -> None:
    q, k, v = (values(4, 8, seed=n) for n in range(3))
    baseline = [tap("q", q, 0), tap("k", k, 1), tap("copy", q, 2)]
    target = [tap("qkv", torch.cat([q, k, v]), 0), tap("copy", q, 1)]
    pairs = match_taps(baseline, target, guesses=False).pairs
    assert [(pair.baseline, pair.target) for pair in pairs] == [("q", "qkv"), ("k", "qkv"), ("copy", "copy")]


def test_of_two_copies_of_a_missing_part_one_fills_the_gap() -> None:
    q, k, v = (values(4, 8, seed=n) for n in range(3))
    baseline = [tap("q", q, 0), tap("k", k, 1), tap("v", v, 2), tap("v_again", v, 3)]
    target = [tap("qkv", torch.cat([q, k, v]), 0), tap("x", v.view(8, 4), 1), tap("y", v.view(8, 4), 2)]
    proposal = match_taps(baseline, target, guesses=False)
    assert [pair.baseline for pair in proposal.of_target("qkv")] == ["q", "k", "v"]


def test_a_fused_tap_of_the_baseline_has_all_its_parts_even_if_some_match_elsewhere() -> None:
    q, k, v = (values(4, 8, seed=n) for n in range(3))
    baseline = [tap("qkv", torch.cat([q, k, v], 1), 0), tap("q_norm", q.unflatten(1, (2, 4)), 1)]
    target = [tap("q", q, 0), tap("k", k, 1), tap("v", v, 2)]
    pairs = match_taps(baseline, target).pairs
    assert {pair.target for pair in pairs if pair.baseline == "qkv"} == {"q", "k", "v"}


def test_only_the_first_run_of_several_shows_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graft into a weight would stay."""
    weight, x = values(8, 8, seed=1), values(4, 8, seed=2)

    def record(grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        sides = [[tap(f"{side}.w", weight, 0), tap(f"{side}.x", x, 1)] for side in ("ours", "theirs")]
        for side in sides:
            side[0].tags["kind"] = "param"
        return sides[0], sides[1]

    seen: list[list[str]] = []

    def repeat(record: Any, first: Any, proposal: Proposal, *_: object) -> Proposal:
        seen.extend([each.name for each in side] for side in (*first, *record(())))
        return proposal

    monkeypatch.setattr(rounds, "_repeat_rounds", repeat)
    match_in_rounds(record)
    assert seen == [["ours.x"], ["theirs.x"]] * 2


def test_a_fused_tap_that_is_covered_in_part_is_a_problem() -> None:
    q, k, v = (values(4, 8, seed=n) for n in range(3))
    baseline = [tap(f"h.{name}", value, n) for n, (name, value) in enumerate(zip("qkv", (q, k, v), strict=True))]
    whole = match_taps(baseline, [tap("fused", torch.cat([q, k, v], 1), 0)])
    assert whole.problems == ()
    (problem,) = match_taps(baseline, [tap("fused", torch.cat([q, k, values(4, 8, seed=9)], 1), 0)]).problems
    assert problem == "fused is compared only in part: it contains h.q, h.k; no baseline tap has the other 33%"
    # A name says that there are further parts, although one alone is known.
    (problem,) = match_taps(baseline[:1], [tap("qkv", torch.cat([q, values(4, 16, seed=9)], 1), 0)]).problems
    assert problem == "qkv is compared only in part: it contains h.q; no baseline tap has the other 67%"
    # The last token of a sequence is no fused tensor.
    assert match_taps([tap("last", q[3:].clone(), 0)], [tap("all", q, 0)]).problems == ()


def test_heads_read_in_groups_are_a_problem_where_the_next_tap_differs() -> None:
    baseline, target = [], []
    for n in range(3):
        fused, out = values(4, 48, seed=n), values(4, 16, seed=20 + n)
        apart = fused.reshape(4, 2, 3, 8).permute(2, 0, 1, 3).reshape(3, 4, 16)
        baseline += [tap(f"h.{n}.qkv", fused, 2 * n), tap(f"h.{n}.out", out, 2 * n + 1)]
        target += [
            tap(f"l.{n}.{role}", part.contiguous(), 4 * n + m)
            for m, (role, part) in enumerate(zip("qkv", apart, strict=True))
        ]
        target += [tap(f"l.{n}.out", out, 4 * n + 3)]
    right = match_taps(baseline, target)
    assert len(right.graftable) == 12
    assert right.problems == ()
    wrong = [
        tap(each.name, values(4, 16, seed=50 + n), n) if "out" in each.name else each for n, each in enumerate(target)
    ]
    problems = match_taps(baseline, wrong, guesses=False).problems
    assert len(problems) == 3, problems
    assert problems[0].startswith(
        "l.0.q is taken out of h.0.qkv by groups of heads ('part(index=0, of=[1, 1, 1], dim=1"
    )
    assert problems[0].endswith("the first tap after it that does not match is l.0.out")


def test_a_candidate_that_does_not_fit_does_not_end_a_match(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(outer: RecordedTap, inner: RecordedTap, *rest: object) -> object:
        if "odd" in (outer.name, inner.name):
            raise LayoutError("strided(...) reaches beyond the 2048 elements")
        return find(outer, inner, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(matcher, "find", refuse)
    x, y = values(4, 8, seed=1), values(4, 8, seed=2)
    proposal = match_taps([tap("x", x, 0), tap("y", y, 1)], [tap("odd", x, 0), tap("z", y, 1)], guesses=False)
    assert [(pair.baseline, pair.target) for pair in proposal.pairs] == [("y", "z")]
    why = "could not be tried as its partner: strided(...) reaches beyond the 2048 elements"
    assert proposal.unmatched_target == {"odd": f"x {why}"}
    # So it says of a tap of the target that may be a whole.
    proposal = match_taps([tap("part", x[:2].clone(), 0)], [tap("odd", x, 0)], guesses=False)
    assert proposal.pairs == ()
    assert proposal.unmatched_target == {"odd": f"part {why}"}


def test_a_tap_that_passes_a_guess_on_does_not_confirm_it() -> None:
    """A dropout shows whatever was grafted before it, right or wrong."""
    baseline = [tap("x", values(4, 8, seed=1), 0), tap("end", values(4, 8, seed=2), 1)]

    def record(grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        wrong = values(4, 8, seed=3)
        given = {pair.target: next(t.value for t in baseline if t.name == pair.baseline) for pair in grafts}
        target = [tap("other", wrong, 0), tap("handed on", given.get("other", wrong), 1), tap("last", -wrong, 2)]  # type: ignore[arg-type]
        return baseline, target

    proposal = match_in_rounds(record)
    assert not [pair for pair in proposal.pairs if pair.sureness != "guess"]


# ---- behind a fault -------------------------------------------------------------------------------------------------


def grafting_runs(port: Port, target: torch.nn.Module) -> Record:
    baseline = record_taps(port.baseline, port.run).taps
    held = {tap.name: tap.value for tap in baseline}

    def record(grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        replaced = {}
        for pair in grafts:
            value = held[pair.baseline]
            assert value is not None
            if pair.whole == "baseline":
                made = pair.layout.local(value)
                replaced[pair.target] = lambda own, made=made: made.reshape(own.shape)
        return baseline, record_taps(target, port.run, replaced).taps

    return record


def in_every_layer(model: torch.nn.Module) -> None:
    for block in model.blocks:  # type: ignore[union-attr]
        weight = block.attention.o_proj.weight.data
        weight.copy_(weight.flip(1))


FAULTS = {
    # No layer is right, so that no rule leads on.
    "the heads in another order in every layer": in_every_layer,
    "a wrong weight": lambda model: model.blocks[1].mlp.down_proj.weight.data.mul_(1.5),
    "a wrong norm": lambda model: model.blocks[0].attn_norm.weight.data.add_(0.5),
    "the heads in another order": lambda model: model.blocks[2].attention.o_proj.weight.data.copy_(
        model.blocks[2].attention.o_proj.weight.data.flip(1)
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_behind_a_fault_grafts_bring_the_values_back(fault: str, llama: Port) -> None:
    wrong = copy.deepcopy(llama.target)
    FAULTS[fault](wrong)
    alone = match_taps(*taps_of(llama, wrong))
    proposal = match_in_rounds(grafting_runs(llama, wrong))
    check_expected("llama", proposal, at_least=0.9)
    assert len(proposal.graftable) > len(alone.graftable)
    # What is left is next to the fault.
    doubtful = [pair.target for pair in proposal.pairs if not pair.by_value]
    assert all(name.startswith(("blocks", "output")) for name in doubtful), doubtful
    assert len(doubtful) <= 5


def test_an_interrupted_match_keeps_its_pairs(llama: Port) -> None:
    wrong = copy.deepcopy(llama.target)
    FAULTS["a wrong norm"](wrong)
    runs, record = 0, grafting_runs(llama, wrong)

    def stopped(grafts: tuple[Pair, ...]) -> tuple[Sequence[RecordedTap], Sequence[RecordedTap]]:
        nonlocal runs
        runs += 1
        if runs == 2:
            raise KeyboardInterrupt
        return record(grafts)

    proposal = match_in_rounds(stopped)
    assert proposal.pairs == match_taps(*record(())).pairs
    (notice,) = proposal.notices
    assert notice.startswith("the match was interrupted; this is what was found by then")
    assert notice in repr(proposal)


@pytest.mark.slow
def test_a_fault_in_every_layer_is_paired_and_notes_how(llama: Port) -> None:
    wrong = copy.deepcopy(llama.target)
    in_every_layer(wrong)
    runs: list[set[tuple[str, str]]] = []
    record = grafting_runs(llama, wrong)

    def counted(grafts: tuple[Pair, ...]) -> tuple[Sequence[RecordedTap], Sequence[RecordedTap]]:
        runs.append({(pair.baseline, pair.target) for pair in grafts})
        return record(grafts)

    proposal = match_in_rounds(counted)
    # Nothing is run twice.
    assert all(one != other for one, other in itertools.combinations(runs, 2))
    assert len(runs) <= 10
    for n in range(LAYERS["llama"]):
        (pair,) = proposal.of_target(f"blocks.{n}.attention.o_proj")
        assert (pair.baseline, pair.sureness) == (f"model.layers.{n}.self_attn.o_proj", "rule")
        assert "later taps match" in pair.note or "as in 2 other layers" in pair.note
        assert pair.rel is not None
        assert pair.rel > 0.1


def test_a_tap_with_a_different_taps_values_is_a_problem(llama: Port) -> None:
    wrong = copy.deepcopy(llama.target)
    attention = wrong.blocks[1].attention  # type: ignore[union-attr,index]
    attention.k_proj.weight.data.copy_(attention.v_proj.weight.data.clone())  # type: ignore[union-attr]
    proposal = match_taps(*taps_of(llama, wrong))
    assert any(
        problem.startswith(
            "blocks.1.attention.k_proj is k by its name but has the values of model.layers.1.self_attn.v_proj"
        )
        and problem.endswith("the first tap after it that does not match is blocks.1.attention.o_proj")
        for problem in proposal.problems
    ), proposal.problems


def test_a_pair_by_rule_is_confirmed_once_its_values_match() -> None:
    before = match_taps(*layered(4, wrong=[3]))
    after = match_taps(*layered(4), before=before)
    (pair,) = after.of_target("layers.3.ffn")
    assert pair.sureness in ("exact", "confirmed")
    baseline, target = layered(4)
    target[3] = tap("layers.3.ffn", values(6, 8, seed=3) * (1 + 1e-6), 3)
    (pair,) = match_taps(baseline, target, before=before).of_target("layers.3.ffn")
    assert pair.sureness == "confirmed"


# ---- the proposal ---------------------------------------------------------------------------------------------------


def test_a_proposal_is_exported_as_code_folded_over_its_layers() -> None:
    proposal = match_taps(*layered(4, shift=1))
    assert proposal.rules() == [{"baseline": "h.{n}.mlp", "target": "layers.{n-1}.ffn"}]
    edits: list[dict[str, object]] = []

    class Session:
        def edit(self, **kwargs: object) -> None:
            edits.append(kwargs)

    exec(proposal.to_code(), {"session": Session()})
    assert edits == [{"pairs": proposal.rules()}]


def test_the_frame_has_pairs_first_then_unmatched_taps_and_reasons() -> None:
    baseline, target = layered(3)
    target.append(tap("extra", values(5, 5, seed=50), 3))
    frame = match_taps(baseline, target).frame
    assert list(frame.columns) == [
        "target_name",
        "baseline_name",
        "matched_by",
        "match_rel",
        "layout",
        "whole",
        "note",
    ]
    assert frame.matched_by.tolist()[:3] == ["exact"] * 3
    assert frame.iloc[3].target_name == "extra"
    assert frame.iloc[3].note == "no baseline tap has 25 elements or contains it"
    frame = match_taps(target, baseline).frame
    assert frame.iloc[3].baseline_name == "extra"
    assert frame.iloc[3].note == "no target tap has 25 elements or contains it"


def test_pairs_are_accepted_and_rejected() -> None:
    proposal = match_taps(*layered(4, wrong=[3]))
    assert proposal.accept("layers.3.ffn").of_target("layers.3.ffn")[0].sureness == "confirmed"
    by_hand = proposal.accept("layers.3.ffn")
    assert by_hand.of_target("layers.3.ffn")[0].note == "accepted by hand"
    assert by_hand.pairs[:3] == proposal.pairs[:3]
    # What the values show is more than what a person has accepted.
    assert proposal.accept("layers.0.ffn") == proposal
    guesses = Proposal((Pair("a", "x", sureness="guess"), Pair("b", "y", sureness="guess"))).accept("y")
    assert [pair.sureness for pair in guesses.pairs] == ["guess", "confirmed"]
    # A tap that is a part of several keeps its other pairs.
    shared = Proposal((Pair("a", "x"), Pair("a", "y")), {"c": "before"}, {"z": "before"}).reject("x")
    assert (shared.unmatched_baseline, shared.unmatched_target) == ({"c": "before"}, {"z": "before", "x": "rejected"})
    without = proposal.reject("layers.0.ffn")
    assert without.unmatched_target == {"layers.0.ffn": "rejected"}
    assert without.unmatched_baseline == {"h.0.mlp": "rejected"}
    assert len(without) == 3


def test_the_rounds_end_after_three_guesses_in_vain() -> None:
    seeds = {"a": 0, "b": 9}
    sides = [[tap(f"{name}.{n}", values(5, 5, seed=seed + n), n) for n in range(6)] for name, seed in seeds.items()]
    tried: list[tuple[Pair, ...]] = []

    def record(grafts: tuple[Pair, ...]) -> Any:
        tried.append(grafts)
        return sides

    match_in_rounds(record, guesses=3)
    assert sum(map(bool, tried)) == 3


def test_a_pair_by_rule_alone_has_its_tap_matched_again() -> None:
    first = Proposal((Pair("a", "x", sureness="exact", rel=0.0), Pair("b", "y", sureness="rule", rel=0.5)))
    again: list[Proposal] = []

    def match(baseline: Any, target: Any, *, before: Proposal, **_: Any) -> Proposal:
        again.append(before)
        return first

    given = partial(match, fetch_baseline=None, fetch_target=None)
    _repeat_rounds(lambda grafts: ([], []), ([], []), first, given, 12, 6)
    assert again == [first]
    # Where each pair is by value, no fault hides a tap.
    by_value = replace(first, pairs=first.pairs[:1])
    _repeat_rounds(lambda grafts: ([], []), ([], []), by_value, given, 12, 6)
    assert again == [first]


def test_a_guess_is_tried_beside_those_that_earlier_ones_have_proved() -> None:
    """With each partner that is grafted, one more tap matches."""
    baseline = [tap(name, values(4, 4, seed=seed), seed) for seed, name in enumerate(("a.0", "b.0"))]
    baseline += [tap(name, values(5, seed=seed), seed) for seed, name in enumerate(("c0", "c1"), 2)]
    target = [tap(name, values(4, 4, seed=seed + 50), seed) for seed, name in enumerate(("x.0", "y.0"))]

    def match(ours: Any, theirs: Any, *, trusted: Sequence[Pair] = (), **_: Any) -> Proposal:
        return Proposal(tuple(Pair(f"c{n}", f"z{n}") for n in range(min(2, len(trusted)))), {}, {"x.0": "", "y.0": ""})

    given = partial(match, fetch_baseline=None, fetch_target=None)
    found = _repeat_rounds(lambda grafts: (baseline, target), (baseline, target), match((), ()), given, 12, 2)
    assert [pair.target for pair in found.pairs] == ["z0", "z1"]


def test_a_guess_that_helps_leads_to_as_many_further_rounds() -> None:
    baseline, target = [tap("a.0", values(4, 4, seed=1), 0)], [tap("x.0", values(4, 4, seed=50), 0)]
    baseline += [tap(f"c{n}", values(5, seed=n), n + 1) for n in range(9)]
    # Of the first run, one round, one in vain, one with the guess twice, and rounds that each find one more.
    counts = iter([0, 1, 1, 2, 2, 3, 4, 5, 6])

    def match(*_: Any, **__: Any) -> Proposal:
        return Proposal(tuple(Pair(f"c{n}", f"z{n}") for n in range(next(counts))), {}, {"x.0": ""})

    def record(grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        return baseline, target

    given = partial(match, fetch_baseline=None, fetch_target=None)
    found = _repeat_rounds(record, (baseline, target), match(), given, 2, 6)
    assert len(found.pairs) == 4


def test_an_interrupt_adds_a_notice_to_those_before() -> None:
    def record(grafts: tuple[Pair, ...]) -> Any:
        raise KeyboardInterrupt

    before = Proposal((Pair("a", "x", sureness="rule"),), notices=("rows in another order",))
    given = partial(match_taps, fetch_baseline=None, fetch_target=None)
    found = _repeat_rounds(record, ([], []), before, given, 12, 6)
    assert (found.pairs, found.notices) == (before.pairs, ("rows in another order", rounds.INTERRUPTED))


def test_pairs_that_come_and_go_are_new_once() -> None:
    in_turn = [Pair(name, "x", sureness="exact", rel=0.0) for name in ("b", "a")]
    rounds: list[int] = []

    def match(baseline: Any, target: Any, **_: Any) -> Proposal:
        rounds.append(len(rounds))
        return Proposal((in_turn[rounds[-1] % 2],), {}, {"y": "no value"})

    first = Proposal((in_turn[1],), {}, {"y": "no value"})
    given = partial(match, fetch_baseline=None, fetch_target=None)
    _repeat_rounds(lambda grafts: ([], []), ([], []), first, given, 12, 6)
    assert len(rounds) == 2


def test_the_html_folds_layers_and_escapes_names() -> None:
    baseline, target = layered(3)
    target.append(tap("<b>", values(5, 5, seed=50), 3))
    shown = match_taps(baseline, target)._repr_mimebundle_()
    assert "x3" in shown["text/html"]
    assert "&lt;b&gt;" in shown["text/html"]
    assert "<b>" not in shown["text/html"].replace("<b>3 of 4", "")
    assert shown["text/plain"] == "<graftlab.Proposal: 3 of 4 target taps have a partner (3 exact)>"
    said = Proposal((), problems=("<i> is not x.",), notices=("<u> may be right.",))._repr_mimebundle_()["text/html"]
    assert "<p>&lt;i&gt; is not x.</p><p>&lt;u&gt; may be right.</p>" in said


def test_pairs_of_several_layers_are_written_with_the_number_that_differs() -> None:
    pairs = [Pair(f"h.{n}.mlp.5", f"l.{n + 1}.mlp.5") for n in range(3)]
    assert written_as(pairs) == ("h.{n}.mlp.5", "l.{n+1}.mlp.5")
    assert written_as(pairs[:1]) == ("h.0.mlp.5", "l.1.mlp.5")


def test_a_large_proposal_is_shown_in_tables_of_at_most_20_lines() -> None:
    # Without numbers, which would be folded.
    names = [chr(97 + n % 26) + chr(97 + n // 26) for n in range(300)]
    proposal = Proposal(tuple(Pair(f"h_{name}", f"p_{name}") for name in names), dict.fromkeys(names, "no value"))
    assert len(repr(proposal)) < 200
    rich = proposal._repr_mimebundle_()["text/html"]
    assert rich.count("<tr>") <= 2 * 20 + 4
    # In both tables. Of a layer that is alone no number is shown.
    assert rich.count("and 280 lines more") == 2
    assert ">x1<" not in rich
    texts = tuple(f"sentence {name}" for name in names)
    rich = Proposal((), problems=texts, notices=texts)._repr_mimebundle_()["text/html"]
    assert rich.count("<p>sentence") == 2 * 20


def test_unmatched_taps_of_all_layers_share_a_line_with_their_reason() -> None:
    left = {f"h.{n}.act": f"has the same values as h.{n}.mlp, which is paired" for n in range(12)}
    shown = Proposal((), {**left, "norm": "no target tap has its values"})
    assert shown.summary.endswith("; 13 baseline taps have none")
    rich = shown._repr_mimebundle_()["text/html"]
    assert "h.0.act … h.11.act (12 taps)" in rich
    assert "same values as h.0.mlp, which is paired (and similarly, with different numbers, in 11 more layers)" in rich
    assert "h.5.act" not in rich
    assert ">norm<" in rich
    alone = Proposal((), {"norm": "no target tap has its values"}, {}, ("one",))
    assert alone.summary.endswith("; 1 baseline tap has none; 1 problem")


def test_rules_are_read_back_as_pairs() -> None:
    (pair,) = pairs_of([{"baseline": "a", "target": "b", "layout": "x y -> y x", "whole": "target"}])
    assert (pair.layout.text, pair.whole, pair.by_value) == ("x y -> y x", "target", True)
    with pytest.raises(GraftError):
        pairs_of([{"baseline": "a", "target": "b", "layout": "x y -> y"}])


def test_notes_that_differ_only_in_numbers_are_shown_once() -> None:
    pairs = tuple(
        Pair(f"a.{n}.h", f"b.{n}.h", sureness="rule", rel=0.5, note=f"as in 2 other layers; here they differ by 0.{n}")
        for n in range(1, 5)
    )
    shown = Proposal(pairs, {}, {}, ())._repr_mimebundle_()["text/html"]
    assert shown.count("differ by") == 1
    assert "here they differ by 0.1 (and similarly, with different numbers, in 3 more layers)" in shown


# ---- complex values -------------------------------------------------------------------------------------------------


def recorded(**taps: Tensor) -> list[RecordedTap]:
    recorder = SketchRecorder()
    for name, value in taps.items():
        recorder.tap(name, value, None, {})
    return recorder.taps


def test_a_complex_tensor_beside_its_real_parts_does_not_end_a_match() -> None:
    angles = torch.outer(torch.arange(32.0), 10000 ** -torch.linspace(0, 1, 32))
    turns = torch.polar(torch.ones(32, 32), angles)
    cos, sin = turns.real.contiguous(), turns.imag.contiguous()
    x = torch.randn(4, 8)
    sides = [
        recorded(turns=turns, x=x),
        recorded(x=x, both=torch.view_as_real(turns)),
        recorded(cos=cos, sin=sin, x=x),
        recorded(x=x, beside=torch.cat([cos, sin], -1)),
    ]
    for baseline in sides:
        for target in sides:
            proposal = match_in_rounds(lambda _, both=(baseline, target): both)  # type: ignore[misc]
            assert ("x", "x") in [(pair.baseline, pair.target) for pair in proposal.pairs]
            paired = {pair.target: pair.baseline for pair in proposal.pairs}
            assert ("turns" in paired) == (baseline is target is sides[0])
    flat = match_taps(recorded(turns=turns), recorded(turns=turns.reshape(-1)))
    assert [str(pair.layout) for pair in flat.pairs] == ["a b -> (a b)"]


# ---- taps that one side lacks ---------------------------------------------------------------------------------------


def test_a_match_continues_past_a_tap_that_only_one_side_has_in_each_layer() -> None:
    """Six right layers, each with a tap that the target alone has, then four layers that are all wrong."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(16, 16, generator=generator) / 4 for _ in range(10)]
    start = torch.randn(8, 16, generator=generator)

    def run(side: str, grafts: dict[str, Tensor]) -> list[RecordedTap]:
        recorder = SketchRecorder()

        def tap(name: str, value: Tensor) -> Tensor:
            recorder.tap(name, value, None, {})
            return grafts.get(name, value)

        own, factor = ("mixing", 1.3) if side == "target" else ("attn", 1.0)
        x = start
        for n, weight in enumerate(weights[:6]):
            if side == "target":
                tap(f"first.{n}.gate", (x @ weight.T).sigmoid())
            x = tap(f"first.{n}.out", x + (x @ weight).tanh())
        for n, weight in enumerate(weights[6:]):
            mixed = (x @ weight).tanh()
            mixed = tap(f"second.{n}.{own}", factor * mixed)
            x = tap(f"second.{n}.out", x + mixed)
        return recorder.taps

    ours = run("baseline", {})
    values = {tap.name: tap.value for tap in ours}

    def record(pairs: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        return ours, run("target", {pair.target: values[pair.baseline] for pair in pairs})  # type: ignore[misc]

    proposal = match_in_rounds(record)
    paired = {pair.target: pair.baseline for pair in proposal.pairs if pair.sureness != "guess"}
    assert [paired.get(f"second.{n}.mixing") for n in range(4)] == [f"second.{n}.attn" for n in range(4)]


def test_a_module_that_passes_on_a_graft_does_not_take_the_grafted_taps_partner() -> None:
    """Every layer's mlp is wrong, and an attention returns what its last projection does, so both have equal values."""
    weights = [values(8, 8, seed=n) / 3 for n in range(8)]

    def run(side: str, replaced: dict[str, Tensor]) -> list[RecordedTap]:
        recorded: list[RecordedTap] = []

        def tapped(name: str, value: Tensor) -> Tensor:
            recorded.append(tap(name, value, len(recorded)))
            return replaced.get(name, value)

        is_target = side == "target"
        prefix, attn = ("layers", "self_attn") if is_target else ("model.layers", "self_attn[0]")
        x = tapped(f"{prefix}.embed", values(6, 8, seed=50))
        for n in range(4):
            for part in () if is_target else "qkv":
                tapped(f"{prefix}.{n}.self_attn.{part}_proj", (x[:, :4] + ord(part)).sin())
            mixed = tapped(f"{prefix}.{n}.self_attn.o_proj", (x @ weights[2 * n]).tanh())
            x = x + tapped(f"{prefix}.{n}.{attn}", mixed)
            mlp = (x @ weights[2 * n + 1]).tanh()
            x = x + tapped(f"{prefix}.{n}.mlp", mlp + 0.6 * (x.abs() - 0.5) if is_target else mlp)
        return recorded

    ours = run("baseline", {})
    held = {tap.name: tap.value for tap in ours}

    def record(pairs: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        return ours, run("target", {pair.target: held[pair.baseline] for pair in pairs})  # type: ignore[misc]

    proposal = match_in_rounds(record)
    paired = {pair.target: pair.baseline for pair in proposal.pairs if pair.sureness != "guess"}
    for n in range(4):
        assert paired[f"layers.{n}.mlp"] == f"model.layers.{n}.mlp"
        assert paired[f"layers.{n}.self_attn.o_proj"] == f"model.layers.{n}.self_attn.o_proj"
        assert paired[f"layers.{n}.self_attn"] == f"model.layers.{n}.self_attn[0]"


@pytest.mark.parametrize("size", [0.02, 1e-5], ids=["resembles", "rounds"])
def test_a_place_of_a_residual_stream_is_no_partner_of_the_next_place(size: float) -> None:
    """The target shows the stream between attention and MLP too, nearer to the layer's output than bfloat16 allows."""
    runs: list[set[str]] = []

    def run(side: str, replaced: dict[str, Tensor]) -> list[RecordedTap]:
        recorded: list[RecordedTap] = []

        def tapped(name: str, value: Tensor) -> Tensor:
            recorded.append(tap(name, value.bfloat16(), len(recorded)))
            return replaced.get(name, value.bfloat16())

        x = values(32, 16, seed=50)
        for n in range(3):
            x = x + tapped(f"layers.{n}.attn", size * values(32, 16, seed=n))
            if side == "target":
                x = tapped(f"layers.{n}[1]", x)
            mlp = size * (values(32, 16, seed=9 + n) + x.float().tanh())
            x = x + tapped(f"layers.{n}.mlp", mlp)
            x = tapped(f"layers.{n}" if side == "baseline" else f"norm.{n}[1]", x)
        return recorded

    ours = run("baseline", {})
    held = {each.name: each.value for each in ours}

    def record(pairs: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
        runs.append({pair.target for pair in pairs})
        return ours, run("target", {pair.target: held[pair.baseline] for pair in pairs})  # type: ignore[misc]

    proposal = match_in_rounds(record)
    paired = {pair.target: pair.baseline for pair in proposal.pairs if pair.sureness != "guess"}
    assert [paired.get(f"norm.{n}[1]") for n in range(3)] == [f"layers.{n}" for n in range(3)]
    middle = {f"layers.{n}[1]" for n in range(3)}
    if size < 1e-3:
        # Nothing tells these apart.
        assert middle <= paired.keys()
        return
    assert not middle & paired.keys()
    assert proposal.unmatched_target["layers.1[1]"] == (
        "its values are near those of layers.1, and norm.1[1] is much nearer"
    )
    assert not runs[-1] & {*middle, "norm.0[1]"}


def test_numbers_that_count_operations_of_an_exported_graph_are_not_roles() -> None:
    pairs = [Pair(f"layer_norm_{2 * n + m}", f"{n}.norm{m + 1}") for n in range(2) for m in range(2)]
    assert other_roles(pairs) == []
    assert other_roles([Pair("h.0.ln_2", "0.norm1")]) != []


def test_contradictions_come_in_the_order_of_the_pairs() -> None:
    swapped = [Pair("0.k_proj", "h.0.v_proj"), Pair("0.v_proj", "h.0.k_proj")]
    found = other_roles([*swapped, Pair("1.up_proj", "h.1.gate_proj"), Pair("2.q_proj", "h.2.k_proj")])
    assert [each.tap for each in found] == ["h.0.v_proj", "h.0.k_proj", "h.1.gate_proj", "h.2.k_proj"]
    assert found[0].text == found[1].text
    # What follows is reported after the first of both.
    assert [*first_taps(found).values()] == ["h.0.v_proj", "h.1.gate_proj", "h.2.k_proj"]
    assert found[0].text.startswith("h.0.v_proj is v by its name but has the values of 0.k_proj, which is k, and h.0.k")


def test_layouts_of_a_later_call_are_taken_for_the_taps_that_need_them() -> None:
    old, new, odd = (parse_layout(f"window(dim=0, start={start}, length=1)") for start in (0, -1, 1))
    pairs = [Pair(f"h.{n}.a", f"l.{n}.a", old) for n in range(3)]
    first = Proposal((*pairs, Pair("h.0.b", "l.0.b", old), Pair("c", "c", old)), unfit=frozenset({"before"}))
    later = Proposal(
        (Pair("h.0.a", "l.0.a", new), Pair("h.1.a", "l.1.a", odd, sureness="rule"), Pair("h.0.b", "l.0.b", new)),
        unpaired_rows="a sentence",
    )
    found = first.with_layouts_of(later, {"h.0.a", "h.1.a", "h.2.a", "c"})
    # Namesakes in other layers have the layout that was found, and a tap that needs none keeps its own.
    assert [pair.layout for pair in found.pairs] == [new, new, new, old, old]
    assert (found.unpaired_rows, found.unfit) == ("a sentence", {"before", "c"})
    # Where two layers have different layouts, none is that of the others.
    both = Proposal((Pair("h.0.a", "l.0.a", new), Pair("h.1.a", "l.1.a", odd)))
    assert [pair.layout for pair in first.with_layouts_of(both, {f"h.{n}.a" for n in range(3)}).pairs[:3]] == [
        *(new, odd, old)
    ]


def test_pairs_that_look_alike_are_distinguished_in_a_run_without_them() -> None:
    own = values(8, 8, seed=1)
    near, far = own + 1e-4 * values(8, 8, seed=2), own + 3e-3 * values(8, 8, seed=3)

    def without(*pairs: Pair, **taps: Tensor) -> tuple[Proposal, list[set[str]]]:
        runs: list[set[str]] = []
        baseline = [tap("a", own, 0), tap("b", own, 1)]
        target = [tap(name, value, n) for n, (name, value) in enumerate(taps.items())]

        def record(grafts: tuple[Pair, ...]) -> tuple[list[RecordedTap], list[RecordedTap]]:
            runs.append({pair.target for pair in grafts})
            return baseline, target

        return rounds._without_lookalikes(record, (baseline, target), Proposal(pairs)), runs

    other = Pair("b", "z", rel=0.0)
    found, runs = without(Pair("a", "x", rel=1e-2), Pair("a", "y", rel=1e-2), other, x=near, y=far, z=own)
    assert [pair.target for pair in found.pairs] == ["x", "z"]
    assert found.unmatched_target == {"y": "its values are near those of a, and x is much nearer"}
    assert runs == [{"z"}]
    assert found.pairs[0].rel is not None
    assert found.pairs[0].rel < 1e-3
    # One pair alone, pairs that are equal up to rounding and pairs that are equally far are left as they are.
    for pairs, taps, count in (
        ((Pair("a", "x", rel=1e-2), other), {"x": far, "z": own}, 0),
        ((Pair("a", "x", rel=1e-8), Pair("a", "y", rel=0.0)), {"x": own, "y": own}, 0),
        ((Pair("a", "x", rel=1e-2), Pair("a", "y", rel=1e-2)), {"x": far, "y": own + (own - far)}, 1),
        ((Pair("a", "x", rel=3e-3), Pair("a", "y", rel=3e-3)), {"x": own.bfloat16(), "y": own.bfloat16()}, 0),
    ):
        found, runs = without(*pairs, **taps)
        assert [pair.target for pair in found.pairs] == [pair.target for pair in pairs]
        assert len(runs) == count
    # A part of the target's tap is not measured as a whole.
    part = Pair("a", "y", parse_layout("part(dim=0, index=0, of=[1, 1])"), "target", rel=1e-2)
    found, _ = without(Pair("a", "x", rel=1e-2), part, x=near, y=torch.cat([far, far]))
    assert [pair.target for pair in found.pairs] == ["x", "y"]
    assert found.pairs[1].rel == 1e-2


def test_a_round_keeps_earlier_pairs_by_value_behind_those_of_the_next() -> None:
    before = Proposal((Pair("a", "x", rel=0.0), Pair("b", "y", rel=0.0), Pair("c", "z", sureness="rule")))
    following = Proposal(
        (Pair("w", "y", sureness="guess"), Pair("d", "v"), Pair("a2", "x")),
        unmatched_baseline={"b": "gone", "e": "gone"},
        unmatched_target={"y": "gone", "u": "gone"},
    )
    kept = _keep(following, before)
    assert [(pair.baseline, pair.target) for pair in kept.pairs] == [("b", "y"), ("d", "v"), ("a2", "x")]
    assert (kept.unmatched_baseline, kept.unmatched_target) == ({"e": "gone"}, {"u": "gone"})
    # One that the next round does not know comes last.
    late = _keep(Proposal((Pair("d", "v"),)), Proposal((Pair("b", "y"),)))
    assert [pair.target for pair in late.pairs] == ["v", "y"]


def test_where_weights_differ_is_only_said_of_tensors_of_one_shape() -> None:
    one, other = (RecordedTap.of(name, value) for name, value in (("a", torch.ones(4, 1)), ("b", torch.ones(4))))
    pair = Pair("a", "b", sureness="rule", rel=0.5)
    assert _differing_rows(pair, one, other) == ""
    near = RecordedTap.of("b", torch.tensor([[1.0], [1.0], [2.0], [3.0]]))
    assert _differing_rows(pair, one, near) == " in 2 of 4 elements: 2 rows, 2 to 3"
    single = RecordedTap.of("b", torch.tensor([[1.0], [1.0], [1.0], [3.0]]))
    assert _differing_rows(pair, one, single) == " in 1 of 4 elements: row 3"
    all_of_it = RecordedTap.of("b", torch.tensor([[2.0], [3.0], [4.0], [5.0]]))
    assert _differing_rows(pair, one, all_of_it) == " everywhere, by rel_l2 0.5"
    wide, in_each_row = (RecordedTap.of("a", each) for each in (torch.ones(4, 2), torch.tensor([[1.0, 2.0]] * 4)))
    assert _differing_rows(pair, wide, in_each_row) == " in 4 of 8 elements: 4 rows, 0 to 3"
    with_nan = torch.tensor([[1.0], [math.nan], [1.0], [1.0]])
    nans = [RecordedTap.of("b", with_nan), RecordedTap.of("b", with_nan + torch.tensor([[0.0], [0], [0], [1.2e-7]]))]
    assert _differing_rows(pair, *nans) == " in 1 of 4 elements: row 3"
    nothing = RecordedTap.of("b", torch.empty(0, 3))
    assert _differing_rows(pair, nothing, nothing) == ""
    constant = RecordedTap.of("b", torch.full((4, 1), 7.0))
    assert _differing_rows(pair, one, constant) == ": all its values are 7, as if it had not been loaded"
    # A layout that does not fit, and values that were not kept.
    turned = Pair("a", "b", parse_layout("a b c -> c b a"), sureness="rule", rel=0.5)
    assert _differing_rows(turned, one, near) == ""
    near.value = None
    assert _differing_rows(pair, one, near) == ""


def test_a_guess_is_the_name_most_alike_of_the_same_shape_and_nearest_in_order() -> None:
    constant = torch.ones(4)
    taps = [RecordedTap.of(name, constant, order=n) for n, name in enumerate(("mlp.down", "attn.proj", "attn.norm"))]
    (pair,) = match_taps(taps, [RecordedTap.of("block.attn.proj", constant, order=1)]).pairs
    assert (pair.baseline, pair.sureness) == ("attn.proj", "guess")
    assert match_taps(taps, [RecordedTap.of("block.attn.proj", torch.ones(5), order=1)]).pairs == ()
    alike = [RecordedTap.of(f"{name}.attn.proj", constant, order=n) for name, n in (("a", 0), ("b", 4), ("c", 9))]
    (pair,) = match_taps(alike, [RecordedTap.of("x.attn.proj", constant, order=5)]).pairs
    assert pair.baseline == "b.attn.proj"


def test_the_frame_of_an_empty_proposal_has_all_columns() -> None:
    assert list(Proposal(()).frame.columns) == list(COLUMNS)
    assert Proposal(()).frame["match_rel"].dtype == "float64"


def test_layers_in_another_order_are_held_to_the_shift_of_the_other_weights() -> None:
    pairs = [Pair(f"h.{n + 2}.mlp", f"b.{n}.mlp") for n in range(5)]
    pairs += [Pair(f"h.{n}.act", f"b.{m}.act") for n, m in ((2, 0), (4, 1), (3, 2))]
    said = _other_layers(pairs, set())
    assert [each.tap for each in said] == ["b.1.act", "b.2.act"]
    assert said[0].text == (
        "b.1.act has the values of h.4.act, which is in layer 4; it should be layer 3, as for other weights"
    )
    # Two layers of six that happen to agree show nothing.
    pairs = [Pair(f"h.{n}.{name}", f"b.{n}.{name}") for name in ("mlp", "up") for n in range(6)]
    pairs += [Pair(f"h.{n}.act", f"b.{m}.act") for m, n in enumerate((1, 2, 0, 5, 3, 4))]
    assert {each.text.partition("; ")[2] for each in _other_layers(pairs, set())} == {
        f"it should be layer {layer}, as for other weights" for layer in range(6)
    }


def test_the_reason_of_each_tap_without_a_partner_is_given() -> None:
    def reasons(target: dict[str, Tensor], **baseline: Tensor) -> tuple[dict[str, str], dict[str, str]]:
        same = {f"h.{n}": values(8, 6, seed=n) for n in range(3)}
        sides = ({**same, **baseline}, {name.replace("h", "b"): each for name, each in same.items()} | target)
        taps = ([tap(name, each, n) for n, (name, each) in enumerate(side.items())] for side in sides)
        found = match_taps(*taps, guesses=False)
        return found.unmatched_baseline, found.unmatched_target

    odd, other = values(8, 6, seed=9), values(8, 6, seed=10)
    assert reasons({"b.3": odd}) == ({}, {"b.3": "by the rule of 3 layers it would be h.3, which does not exist"})
    assert reasons({"b.3": odd, "x": other}, **{"h.3": other}) == (
        {},
        {"b.3": "by the rule of 3 layers it would be h.3, which is paired with x"},
    )
    lost = {"lost": torch.full((8, 6), torch.nan), "ones": torch.ones(7), "small": values(5, seed=8), "other": other}
    assert reasons({"twin": values(8, 6, seed=0), "odd": odd}, **lost) == (
        {
            "lost": "it has no finite value",
            "ones": "all its values are equal, so they cannot identify a partner",
            "small": "no target tap has 5 elements or contains it",
            "other": "no target tap has its values",
        },
        {"odd": "no baseline tap has its values"},
    )


def test_a_second_tap_with_the_values_of_a_pair_names_the_other_one() -> None:
    same = {f"h.{n}": values(8, 6, seed=n) for n in range(3)}
    sides = (same, {**{name.replace("h", "b"): each for name, each in same.items()}, "twin": values(8, 6, seed=0)})
    found = match_taps(*([tap(name, each, n) for n, (name, each) in enumerate(side.items())] for side in sides))
    assert [(pair.baseline, pair.target, pair.note) for pair in found.pairs] == [
        ("h.0", "b.0", ""),
        ("h.1", "b.1", ""),
        ("h.2", "b.2", ""),
        ("h.0", "twin", "has the same values as b.0"),
    ]


def test_changed_values_of_a_weight_are_described() -> None:
    x = values(6, 5, seed=1)

    def said(other: Tensor, *steps: Scale, sureness: Any = "near", rel: float = 0.0) -> list[str]:
        items = {"a": tap("a", x, 0)}, {"b": tap("b", other, 0)}
        return _changed_values(Pair("a", "b", Layout(steps), sureness=sureness, rel=rel), *items)

    for scale, words in (
        (Scale(2.0), "times 2"),
        (Scale(1.0, 0.5), "plus 0.5"),
        (Scale(0.5, -1.0), "times 0.5 minus 1"),
    ):
        assert said(x, scale) == [f"b is a {words}"]
    assert said(x.bfloat16().float(), rel=2e-3) == ["b is a rounded to bfloat16"]
    assert said(x.half().float(), rel=2e-4) == ["b is a rounded to float16"]
    assert said(x * 1.01, rel=0.01) == ["b is a up to rel_l2 0.01 everywhere"]
    # One rounding of the coarser dtype is no change.
    assert said(x.bfloat16(), rel=2e-3) == said(x, rel=1e-8) == []
    spoiled = x.clone()
    spoiled[2] = 5.0
    assert said(spoiled, sureness="rule", rel=0.9) == ["b differs from a in 5 of 30 elements: row 2"]
    assert said(x, sureness="rule", rel=0.0) == said(spoiled, sureness="exact", rel=0.9) == []
    # Nearer than rounding of each element, but not equal.
    assert said(x * (1 + 5e-7), rel=5e-7) == ["b is a up to rel_l2 5e-07 everywhere"]
    one_row = x.clone()
    one_row[1] *= 1 + 5e-7
    assert said(one_row, rel=2e-7) == ["b is a up to rel_l2 2e-07 in 5 of 30 elements: row 1"]
    for wrong in (math.nan, math.inf):
        spoiled = x.clone()
        spoiled[3, 2] = wrong
        assert said(spoiled, sureness="rule", rel=math.inf) == ["b differs from a in 1 of 30 elements: row 3"]
    # Beside values that differ by rounding, those that differ by more are named.
    spoiled = x * (1 + 5e-7)
    spoiled[4, 1] = 3.0
    assert said(spoiled, sureness="rule", rel=0.3) == ["b differs from a in 1 of 30 elements: row 4"]


def test_single_numbers_and_complex_weights_that_differ_are_described() -> None:
    def said(one: Tensor, other: Tensor) -> list[str]:
        pair = Pair("a", "b", sureness="guess", rel=0.5)
        return _changed_values(pair, {"a": tap("a", one, 0)}, {"b": tap("b", other, 0)})

    assert said(torch.tensor(1.0), torch.tensor(1.5)) == ["b differs from a: 1.5 in place of 1"]
    assert said(torch.tensor([7]), torch.tensor([0])) == ["b differs from a: 0 in place of 7"]
    turns = torch.polar(torch.ones(4, 3), values(4, 3, seed=1))
    conjugated = turns.clone()
    conjugated[1] = conjugated[1].conj()
    assert said(turns, conjugated) == ["b differs from a in 3 of 12 elements: row 1"]


def test_only_wider_values_of_a_whole_weight_may_have_been_rounded() -> None:
    x = values(6, 5, seed=1)
    one, other = tap("a", x, 0), tap("b", x.bfloat16().float(), 0)
    pair = Pair("a", "b", sureness="near", rel=2e-3)
    assert rounded_to(one, other, pair) == "bfloat16"
    assert rounded_to(one, tap("b", x.bfloat16(), 0), pair) is None
    assert rounded_to(tap("a", x.bfloat16(), 0), other, pair) is None
    assert rounded_to(one, tap("b", x.long(), 0), pair) is None
    for changed in ({"sureness": "exact"}, {"whole": "target"}, {"layout": parse_layout("a b c -> c b a")}):
        assert rounded_to(one, other, Pair(**{**vars(pair), **changed})) is None


def test_what_parts_leave_of_a_whole_is_described() -> None:
    items = {"w": tap("w", values(4, 6, seed=0), 0)}

    def rest(*texts: str) -> str:
        return _rest("w", [Pair("w", "x", parse_layout(text)) for text in texts], items)

    first, second = (f"part(dim=0, index={n}, of=[2, 2])" for n in range(2))
    assert rest(first, second) == ""
    assert rest(first) == "2 of 4 rows, 2 to 3,"
    assert rest("part(dim=0, index=0, of=[3, 1])") == "row 3"
    assert rest("part(dim=1, index=0, of=[4, 2])") == "8 of 24 elements"


def test_a_parameter_without_a_partner_may_not_have_been_loaded() -> None:
    baseline = {"a": tap("a", values(4, 6, seed=0), 0)}
    assert _without_partner("x", tap("x", torch.zeros(4, 6), 0), baseline) == (
        "x has no partner: all its values are 0, as if it had not been loaded"
    )
    assert _without_partner("x", tap("x", values(5, seed=0), 0), baseline) == (
        "x has no partner: no parameter of the baseline has its size or holds its values"
    )
    assert _without_partner("x", tap("x", values(4, 6, seed=3), 0), baseline) == (
        "x has no partner: no parameter of the baseline holds its values"
    )


def test_the_order_of_dims_is_that_of_a_permutation_alone() -> None:
    orders = [
        _order_of_dims(parse_layout(text), 3) for text in ("same", "a b c -> c a b", "a b c -> a (b c)", "a b -> b a")
    ]
    assert orders == [(0, 1, 2), (2, 0, 1), None, None]
    assert _order_of_dims(parse_layout("a b c -> c b a | part(dim=0, index=0, of=[1, 1])"), 3) is None


def test_a_guess_reaches_neither_a_plan_nor_its_rules() -> None:
    sure, rule, guess = Pair("up", "fc1"), Pair("act", "gelu", sureness="rule"), Pair("down", "fc2", sureness="guess")
    proposal = Proposal((sure, rule, guess))
    assert [each.target for each in proposal.plan_pairs()] == ["fc1", "gelu"]
    assert [each["target"] for each in proposal.rules()] == ["fc1", "gelu"]
    assert proposal.graftable == (sure,)
    # Unless a person has accepted it.
    assert [each.target for each in proposal.accept("fc2").plan_pairs()] == ["fc1", "gelu", "fc2"]


@pytest.mark.parametrize(("found", "is_shared"), [("exact", True), ("guess", False)])
def test_two_taps_share_a_partner_only_where_values_show_that_they_do(found: Any, is_shared: bool) -> None:
    example, beside = (Pair("h.0.x", f"l.0.{name}", Layout(), "baseline", found, 0.0, "") for name in "ab")
    known: Any = SimpleNamespace(pairs=[example, beside])
    rule: Any = SimpleNamespace(example=example)
    assert matcher.Matcher._share_elsewhere(known, rule, "l.1.b") == is_shared
    assert not matcher.Matcher._share_elsewhere(known, rule, "l.1.a")
    assert not matcher.Matcher._share_elsewhere(known, rule, "l.1.c")


# ---- what is said of pairs and of taps without one ------------------------------------------------------------------


def test_a_tap_without_a_partner_has_the_reason() -> None:
    broken, lost = values(4, 4, seed=1), torch.full((4, 4), math.nan)
    broken[0, 0] = math.nan
    theirs = [
        tap("broken", broken, 0),
        tap("lost", lost, 1),
        tap("flat", torch.ones(4, 4), 2),
        tap("small", values(3, 5, seed=2), 3),
        tap("other", values(4, 4, seed=3), 4),
    ]
    ours = [tap("a", values(4, 4, seed=0), 0)]
    alone = "no {} tap has its values"
    expected = {
        "broken": alone.format("baseline"),
        "lost": "it has no finite value",
        "flat": "all its values are equal, so they cannot identify a partner",
        "small": "no baseline tap has 15 elements or contains it",
        "other": alone.format("baseline"),
    }
    found = match_taps(ours, theirs, guesses=False)
    assert (found.unmatched_target, found.unmatched_baseline) == (expected, {"a": alone.format("target")})


def test_a_pair_that_rules_have_made_is_confirmed_once_its_values_are_near() -> None:
    value = values(6, 8, seed=0)
    ours, theirs = [tap("a", value, 0)], [tap("x", value * (1 + 1e-6 * values(6, 8, seed=1)), 0)]
    for before, now in {"rule": "confirmed", "confirmed": "confirmed", "near": "near", "guess": "near"}.items():
        known = Proposal((Pair("a", "x", sureness=before),))  # type: ignore[arg-type]
        assert [pair.sureness for pair in match_taps(ours, theirs, before=known).pairs] == [now]
    # Of another partner, nothing was known before.
    known = Proposal((Pair("b", "x", sureness="rule"),))
    assert [pair.sureness for pair in match_taps(ours, theirs, before=known).pairs] == ["near"]


def test_a_pair_by_rule_says_what_its_values_show() -> None:
    def note(one: Tensor, other: Tensor, sureness: Any = "exact") -> tuple[str, bool]:
        made = matcher.Matcher([tap("a", one, 0)], [tap("x", other, 0)], None, None)
        pair = made.by_rule(Pair("b", "y", sureness=sureness), 3, made.baseline["a"], made.target["x"])
        assert (pair.baseline, pair.target, pair.sureness) == ("a", "x", "rule")
        return pair.note, pair.rel is None

    value = values(4, 5, seed=0)
    begins = "as in 3 other layers"
    assert note(value, value) == (begins, False)
    assert note(torch.ones(4), torch.ones(4)) == (f"{begins}; all its values are equal, so they prove nothing", False)
    assert note(value, value.T.contiguous()) == (f"{begins}; its values could not be compared in that layout", True)
    ends = "; here the values differ by rel_l2 0.1"
    assert note(value, value * 1.1) == (f"{begins}, where the values match{ends}", False)
    assert note(value, value * 1.1, "rule") == (f"{begins}, where grafts confirmed it{ends}", False)


@pytest.mark.parametrize(("name", "is_named"), [("attn.qkv", True), ("attn.last", False)])
def test_a_part_alone_is_a_contradiction_only_in_a_fused_tap(name: str, is_named: bool) -> None:
    q, k, v = (values(6, 16, seed=n) for n in range(3))
    found = match_taps([tap("q", q, 0)], [tap(name, torch.cat([q, k, v], 1), 0)])
    assert [pair.layout.text for pair in found.pairs] == ["part(index=0, of=[1, 1, 1], dim=1)"]
    said = "attn.qkv is compared only in part: it contains q; no baseline tap has the other 67%"
    assert found.problems == ((said,) if is_named else ())


def test_of_taps_that_fit_alike_the_one_with_nearer_values_is_the_partner() -> None:
    value = values(6, 8, seed=0)
    apart = value * (1 + 3e-7 * values(6, 8, seed=1))
    for ours in ([tap("a.x", apart, 0), tap("b.x", value, 0)], [tap("b.x", value, 0), tap("a.x", apart, 0)]):
        found = match_taps(ours, [tap("c.x", value, 0)])
        assert [pair.baseline for pair in found.graftable] == ["b.x"]


def test_names_alone_pair_only_taps_that_would_choose_each_other() -> None:
    theirs = [tap("g.norm", values(4, 4, seed=1), 0), tap("h.norm", values(4, 4, seed=2), 1)]
    found = match_taps([tap("h.norm", values(4, 4, seed=0), 0)], theirs)
    assert [(pair.baseline, pair.target, pair.sureness) for pair in found.pairs] == [("h.norm", "h.norm", "guess")]
    assert [*found.unmatched_target] == ["g.norm"]
