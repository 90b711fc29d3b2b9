"""Parameters that only their names tell apart are paired by module, role, layer and kind."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import graftlab as gl
from graftlab.layouts import Layout
from graftlab.matching.names import (
    in_any_layer,
    last_role,
    layer_of,
    layers_of,
    path_numbers_of,
    pattern_of,
    place_of,
    role_of,
    similarity,
    words_of,
)
from graftlab.matching.pair import SURENESS, Pair
from graftlab.matching.rules import Rule, rules_of


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("layer.0.attention.query", "blocks.0.attn.q"),
        ("h.0.attend.key", "layers.0.attn.k"),
        ("block.0.attn.value", "layers.0.attn.v"),
        ("attention.wq", "attn.q"),
        ("attention.wk", "attn.k"),
        ("attention.wv", "attn.v"),
        ("attention.wo", "attn.o"),
        ("layers.0.ffn.fc", "h.0.mlp.proj"),
        ("intermediate.dense", "feedforward.linear"),
        ("feed_forward.dense", "mlp_mlp.projection"),
        ("embeddings.layernorm.gamma", "embed.ln.weight"),
        ("emb.rmsnorm.beta", "wte.norm.bias"),
    ],
)
def test_code_bases_have_different_words_for_one_part_of_a_model(one: str, other: str) -> None:
    assert words_of(one) == words_of(other)


@pytest.mark.parametrize(
    "pairs",
    [
        # Equal roles, whatever words they are called by.
        {"attn.q.bias": "self.wq.bias", "attn.k.bias": "self.wk.bias", "attn.v.bias": "self.wv.bias"},
        {"attn.query.bias": "attn.q_proj.bias", "attn.key.bias": "attn.k_proj.bias"},
        {"mlp.gate_proj.bias": "ffn.w1.bias", "mlp.up_proj.bias": "ffn.w3.bias"},
        # Equal layers.
        {"h.0.norm.weight": "layers.0.ln.weight", "h.1.norm.weight": "layers.1.ln.weight"},
        {f"blocks.{n}.x.weight": f"model.layers.{n}.y.weight" for n in range(12)},
        # Equal kinds of parameters.
        {"norm.weight": "ln.weight", "norm.bias": "ln.bias"},
        {"norm.running_mean": "bn.mean", "norm.weight": "bn.gamma"},
    ],
    ids=lambda pairs: next(iter(pairs)),
)
@pytest.mark.parametrize("turned", [False, True])
def test_constants_are_paired_by_their_names(pairs: dict[str, str], turned: bool) -> None:
    telling = {"head.weight": torch.arange(12.0).reshape(3, 4)}
    order = list(pairs.values())[:: -1 if turned else 1]
    baseline = telling | {name: torch.ones(4) for name in pairs}
    match = gl.match_weights(baseline, telling | {name: torch.ones(4) for name in order})
    found = {pair.baseline: pair.target for pair in match.pairs if pair.baseline != "head.weight"}
    assert found == pairs
    assert all("matched by name" in pair.note for pair in match.pairs if pair.baseline != "head.weight")


@pytest.mark.parametrize(
    ("attention", "mlp"),
    [
        ("input_layernorm", "post_attention_layernorm"),
        ("attention_norm", "ffn_norm"),
        ("ln_1", "ln_2"),
        ("layernorm_before", "layernorm_after"),
        ("attention.output.LayerNorm", "output.LayerNorm"),
        ("self_attn_layer_norm", "final_layer_norm"),
        ("sa_layer_norm", "output_layer_norm"),
    ],
)
def test_the_two_norms_of_a_block_are_known_by_their_customary_names(attention: str, mlp: str) -> None:
    names = [f"layer.0.{each}.weight" for each in (attention, mlp)]
    assert [role_of(each.lower()) for each in names] == [role_of("h.0.norm1.weight"), role_of("h.0.norm2.weight")]
    assert None not in map(role_of, map(str.lower, names))


@pytest.mark.parametrize(
    "name",
    [
        "h.0.attention.query_key_value.weight",
        "h.0.attn.key_value.weight",
        "h.0.mlp.gate_up.weight",
        "h.0.mlp.up.gate_up.weight",
        "h.0.attn.value.kv_proj.weight",
        # Such code may norm before and after a block.
        "h.0.feedforward.norm1.weight",
        "h.0.pre_feedforward.ln_2",
        # A count of operations of one kind.
        "norm_1",
    ],
)
def test_names_of_several_roles_or_of_one_that_varies_have_none(name: str) -> None:
    assert role_of(name) is None


def test_names_are_alike_by_their_words_the_last_above_all_and_by_their_numbers() -> None:
    assert (
        similarity("attn.norm", "mlp.norm") > similarity("attn.norm", "attn.proj") > similarity("attn.norm", "mlp.proj")
    )
    assert similarity("l.0.norm", "l.0.norm") == 1.0
    assert 0.0 < similarity("l.0.norm", "l.1.norm") < 0.9
    # Of names with as many words in common, that with the same numbers.
    assert similarity("h.0.norm", "blocks.0.norm") > similarity("h.0.norm", "blocks.1.norm") + 0.4
    assert similarity("_", "a") == similarity("a", "_") == similarity("_", "_") == 0.0


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("attn.weight", "the weight"),
        ("attn.in_proj_weight", "the weight"),
        ("attn.in_proj_bias", "the bias"),
        ("norm.gamma", "the weight"),
        ("norm.beta", "the bias"),
        ("norm.running_mean", "the running mean"),
        ("layer1_0_bn1_running_mean", "the running mean"),
        ("layer1_0_bn1_weight", "the weight"),
        ("weight.cache", None),
    ],
)
def test_the_kind_of_a_parameter_is_the_last_word_of_its_name(name: str, kind: str | None) -> None:
    assert last_role(name) == kind


def test_constants_of_different_values_or_shapes_are_not_partners() -> None:
    telling = {"head.weight": torch.arange(12.0).reshape(3, 4)}
    match = gl.match_weights(telling | {"norm.weight": torch.ones(4)}, telling | {"norm.weight": torch.ones(5)})
    assert list(match.unmatched_target) == ["norm.weight"]


def test_parameters_with_a_part_of_equal_values_are_paired_as_a_guess() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = (torch.randn(40, 10, generator=generator) for _ in range(2))
    changed = one.clone()
    changed[10:] = torch.randn(30, 10, generator=generator)
    match = gl.match_weights({"a.weight": other, "b.weight": one}, {"c.weight": other, "d.weight": changed})
    (pair,) = match.of_target("d.weight")
    assert (pair.baseline, pair.sureness) == ("b.weight", "guess")
    assert "25% of its values are equal" in pair.note


@pytest.mark.parametrize(
    ("alike", "names"),
    [
        (pattern_of, [["h.0.norm1", "h.3.norm2"], ["h.0.norm", "h.1.norm"]]),
        # A number that is a part of the path counts layers, unless the name has no such number.
        (place_of, [["h.0.norm1", "h.3.norm1"], ["h.0.norm2"], ["norm1", "norm2"], ["h_0_norm1", "h_4_norm1"]]),
        (layers_of, [["h.0.norm1", "h.3.norm1"], ["norm1"], ["norm2"], ["h0.norm1", "h7.norm1"], ["h0.norm2"]]),
        (in_any_layer, [["h.0.mlp.1", "h.5.mlp.1"], ["h.0.mlp.2"], ["norm1"], ["norm2"]]),
    ],
)
def test_names_that_differ_only_in_what_counts_layers_are_alike(alike: Any, names: list[list[str]]) -> None:
    found = [{alike(name) for name in group} for group in names]
    assert [len(group) for group in found] == [1] * len(names)
    assert len(set.union(*found)) == len(names)


def test_the_layer_is_the_first_number_of_a_names_path() -> None:
    names = ("h.12.mlp.3.norm1", "norm1", "block_2.x", "w")
    assert [(layer_of(name), path_numbers_of(name)) for name in names] == [
        (12, (12, 3)),
        (None, ()),
        (2, (2,)),
        (None, ()),
    ]


def test_a_rule_says_how_the_numbers_of_most_pairs_follow() -> None:
    pairs = [Pair(f"m.1.h.{n + 2}.x", f"t.1.l.{n}.y.0.z.5") for n in range(3)]
    numbers = ((None, 1), (1, 2))
    constant = ((0, 1), (2, 0), (3, 5))
    (rule,) = rules_of([*pairs, Pair("m.1.h.9.x", "t.1.l.3.y.0.z.5")])
    patterns = pattern_of(pairs[0].baseline), pattern_of(pairs[0].target)
    assert rule == Rule(*patterns, numbers, pairs[0], 3, constant)
    assert rule.baseline_for("t.1.l.40.y.0.z.5") == "m.1.h.42.x"
    names = ("t.1.l.40.y.0.z.5", "t.1.l.40.y.0.z.6", "t.1.l.40.y.1.z.5", "t.2.l.40.y.1.z.6", "t.1.l.40.w.0.z.5")
    assert [rule.covers(name) for name in names] == [True, False, False, False, False]
    # Two taps of one layer are one layer, and pairs in other layouts follow no common rule.
    assert rules_of([pairs[0], Pair("m.1.h.2.x", "t.1.l.0.y.0.z.5", sureness="exact")]) == []
    assert rules_of([pairs[0], Pair(pairs[1].baseline, pairs[1].target, whole="target")]) == []


def test_a_pair_has_its_whole_on_one_side_and_all_notes() -> None:
    pair = Pair("b", "t").noted("one").noted("two")
    assert pair == Pair("b", "t", Layout(), "baseline", "near", None, "one; two")
    assert (pair.outer, pair.inner) == ("b", "t")
    other = Pair("b", "t", whole="target")
    assert (other.outer, other.inner) == ("t", "b")
    assert [each for each in SURENESS if Pair("b", "t", sureness=each).by_value] == ["exact", "near", "confirmed"]


def test_each_constant_is_the_partner_of_one_other() -> None:
    ones = torch.ones(4)
    assert len(gl.match_weights({"a.bias": ones, "b.bias": ones}, {"c.bias": ones}).pairs) == 1
    assert len(gl.match_weights({"c.bias": ones}, {"a.bias": ones, "b.bias": ones}).pairs) == 1
