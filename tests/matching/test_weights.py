"""Two state dicts are matched by value: every parameter finds its own, and each mistake of a conversion is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kit.int8_tensor import Int8Tensor
from kit.ports import Encoder, Port, State, encoder_from_bert
from kit.refusals import exactly

import graftlab as gl
from graftlab.errors import MatchError
from graftlab.layouts import Scale, join_parts, parse_layout
from graftlab.matching.converting import _code, _fused
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.weights import WeightMatch


def outputs(found: object) -> torch.Tensor:
    for name in ("logits", "last_hidden_state"):
        found = getattr(found, name, found)
    assert isinstance(found, torch.Tensor)
    return found


# ---- right conversions ----------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_hand_written_conversions_are_right(port: Port) -> None:
    one, other = outputs(port.run(port.baseline)), outputs(port.run(port.target))
    assert torch.allclose(one, other, atol=1e-4)


def test_a_right_conversion_matches_completely_without_problems(port: Port) -> None:
    match = gl.match_weights(port.baseline, port.target)
    assert match.clean, match
    assert match.problems == ()
    assert match.notices == ()
    assert match.unmatched_baseline == {}
    assert {pair.sureness for pair in match.pairs} == {"exact"}
    assert {pair.target for pair in match.pairs} == set(port.target.state_dict())


def test_the_written_converter_makes_the_targets_state_bit_by_bit(port: Port) -> None:
    source = gl.make_converter(gl.match_weights(port.baseline, port.target), "port")
    namespace: dict[str, Callable[[State], State]] = {}
    exec(source, namespace)
    assert namespace["port"].__doc__ == "Make the target's state dict from the baseline's."
    made, expected = namespace["port"](port.baseline.state_dict()), port.target.state_dict()
    assert made.keys() == expected.keys()
    assert all(torch.equal(made[name], expected[name]) for name in expected)
    # One loop over the layers, and nothing of graftlab's.
    assert source.count("for n in range(") == 1
    assert "graftlab" not in source


@pytest.mark.slow
def test_real_weights_match_completely(minilm: Port) -> None:
    match = gl.match_weights(minilm.baseline, minilm.target)
    assert match.clean, match
    assert match.unmatched_baseline == {}
    fused = match.of_target("encoder.layers.5.self_attn.in_proj_weight")
    assert [(pair.baseline.split(".")[-2], pair.layout.text) for pair in fused] == [
        (name, f"part(index={index}, of=[1, 1, 1], dim=0)") for index, name in enumerate(("query", "key", "value"))
    ]


def test_transposed_parts_of_a_fused_matrix_are_written_as_such(gpt2: Port) -> None:
    match = gl.match_weights(gpt2.baseline, gpt2.target)
    (pair,) = match.of_target("stack.1.key.weight")
    assert (pair.baseline, pair.whole) == ("h.1.attn.c_attn.weight", "baseline")
    assert pair.layout.text == "part(index=1, of=[1, 1, 1], dim=1) | a b -> b a"
    source = gl.make_converter(match)
    # In a layout that can be saved.
    taken = "state[f'h.{n}.attn.c_attn.weight'].chunk(3, dim=1)[1].T.contiguous()"
    assert f"new[f'stack.{{n}}.key.weight'] = {taken}" in source


def test_the_frame_has_all_columns_and_the_unmatched_parameters(small_bert: Port) -> None:
    baseline, target = small_bert.states()
    target["extra.weight"] = torch.randn(3, 5)
    frame = gl.match_weights(baseline, target).frame
    assert {"baseline_name", "target_name", "layout", "matched_by", "match_rel"} <= set(frame.columns)
    row = frame[frame.target_name == "extra.weight"].iloc[0]
    assert row.isna()["baseline_name"]
    assert "no baseline parameter has 15 elements" in row["note"]


def test_constant_parameters_of_fresh_models_are_paired_by_name() -> None:
    from transformers import BertConfig, BertModel

    config = BertConfig(vocab_size=50, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32)
    bert = BertModel(config, add_pooling_layer=False)
    encoder = Encoder(config)
    encoder.load_state_dict(encoder_from_bert(bert.state_dict()))
    match = gl.match_weights(bert, encoder)
    assert match.clean, match
    constant = match.of_target("encoder.layers.1.norm2.weight")
    assert [pair.baseline for pair in constant] == ["encoder.layer.1.output.LayerNorm.weight"]
    assert "matched by name" in constant[0].note
    fused = match.of_target("encoder.layers.1.self_attn.in_proj_bias")
    assert [pair.baseline.split(".")[-2] for pair in fused] == ["query", "key", "value"]


def test_half_width_weights_match_their_originals(llama: Port) -> None:
    baseline, target = llama.states()
    match = gl.match_weights(baseline, {name: value.bfloat16() for name, value in target.items()})
    assert match.clean, match
    assert ".to(torch.bfloat16)" in match.to_code()


def test_unrelated_weights_have_no_partner(llama: Port) -> None:
    baseline, target = llama.states()
    generator = torch.Generator().manual_seed(7)
    fresh = {name: torch.randn(value.shape, generator=generator) for name, value in target.items()}
    match = gl.match_weights(baseline, fresh)
    assert not any(pair.by_value for pair in match.pairs)
    assert repr(match).splitlines() == [
        f"<graftlab.WeightMatch: {match.summary}>",
        *(f"  {each}" for each in match.problems),
    ]
    assert len(match.problems) >= len(fresh)


# ---- mistakes -------------------------------------------------------------------------------------------------------


def swap(state: State, one: str, other: str) -> None:
    state[one], state[other] = state[other], state[one]


def layers(state: State) -> list[int]:
    return sorted({int(found.group(1)) for name in state if (found := re.search(r"\.(\d+)\.", name))})


def everywhere(state: State, one: str, other: str) -> None:
    for n in layers(state):
        swap(state, one.format(n=n), other.format(n=n))


def bert_qkv(state: State, order: tuple[int, ...], n: int, last: str = "weight") -> None:
    name = f"encoder.layers.{n}.self_attn.in_proj_{last}"
    parts = state[name].chunk(3)
    state[name] = torch.cat([parts[index] for index in order])


def by_head(weight: torch.Tensor, heads: int = 4) -> torch.Tensor:
    """q, k and v one after the other, as they are fused where each head has its three together."""
    return weight.unflatten(0, (3, heads, -1)).transpose(0, 1).flatten(0, 2)


def permuted(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """From the rotary pairs (i, i + D/2) to the pairs (2i, 2i + 1)."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def change(state: State, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    state[name] = make(state[name]).contiguous()


def spoil_rows(weight: torch.Tensor) -> torch.Tensor:
    weight[5:9] += 1
    return weight


MISTAKES: dict[str, tuple[str, Callable[[State], None], str]] = {
    "gate and up swapped in all layers": (
        "llama",
        lambda s: everywhere(s, "blocks.{n}.mlp.gate_proj.weight", "blocks.{n}.mlp.up_proj.weight"),
        r"blocks\.2\.mlp\.gate_proj\.weight is gate by its name but has the values of model\.layers\.2\.mlp\.up_proj",
    ),
    "k and v swapped in one layer": (
        "llama",
        lambda s: swap(s, "blocks.1.attention.k_proj.weight", "blocks.1.attention.v_proj.weight"),
        r"blocks\.1\.attention\.k_proj\.weight is k by its name but has the values of .*v_proj\.weight, which is v",
    ),
    "the two norms swapped in all layers": (
        "llama",
        lambda s: everywhere(s, "blocks.{n}.attn_norm.weight", "blocks.{n}.mlp_norm.weight"),
        r"blocks\.0\.attn_norm\.weight is the norm of attention by its name but has .*post_attention_layernorm",
    ),
    "another layer's weight": (
        "llama",
        lambda s: s.update({"blocks.2.mlp.down_proj.weight": s["blocks.1.mlp.down_proj.weight"]}),
        r"blocks\.2\.mlp\.down_proj\.weight has the values of model\.layers\.1\..*in layer 1; it should be layer 2",
    ),
    "two of three layers swapped": (
        "llama",
        lambda s: swap(s, "blocks.1.mlp.down_proj.weight", "blocks.2.mlp.down_proj.weight"),
        r"blocks\.1\.mlp\.down_proj\.weight has the values of model\.layers\.2\..*it should be layer 1, as for other",
    ),
    "a norm's weight is one less, as Gemma stores it": (
        "llama",
        lambda s: change(s, "blocks.1.attn_norm.weight", lambda w: w - 1),
        r"blocks\.1\.attn_norm\.weight is model\.layers\.1\.input_layernorm\.weight minus 1$",
    ),
    "q scaled beforehand": (
        "llama",
        lambda s: change(s, "blocks.0.attention.q_proj.weight", lambda w: w * 8**-0.5),
        r"blocks\.0\.attention\.q_proj\.weight is model\.layers\.0\.self_attn\.q_proj\.weight times 0\.353553$",
    ),
    "a weight went through bfloat16": (
        "llama",
        lambda s: change(s, "blocks.0.mlp.up_proj.weight", lambda w: w.bfloat16().float()),
        r"blocks\.0\.mlp\.up_proj\.weight is model\.layers\.0\.mlp\.up_proj\.weight rounded to bfloat16",
    ),
    "the rotary permutation in one layer only": (
        "llama",
        lambda s: change(s, "blocks.1.attention.q_proj.weight", lambda w: permuted(w, 4)),
        r"blocks\.1\.attention\.q_proj\.weight is .* in the layout .*\(a b c\) d -> \(a c b\) d.* where 2 others",
    ),
    "some rows were not loaded": (
        "llama",
        lambda s: change(s, "embedding.weight", spoil_rows),
        r"embedding\.weight differs from model\.embed_tokens\.weight in 128 of 3072 elements: 4 rows, 5 to 8",
    ),
    "the head is tied to the embedding, and was not": (
        "llama",
        lambda s: s.update({"lm_head.weight": s["embedding.weight"]}),
        r"lm_head\.weight has the values of model\.embed_tokens\.weight, as embedding\.weight does; .*lm_head",
    ),
    "a weight left at random": (
        "llama",
        lambda s: change(s, "blocks.1.mlp.gate_proj.weight", lambda w: torch.randn_like(w)),
        r"blocks\.1\.mlp\.gate_proj\.weight differs from model\.layers\.1\.mlp\.gate_proj\.weight everywhere",
    ),
    "k and v swapped within the fused weight": (
        "small_bert",
        lambda s: [bert_qkv(s, (0, 2, 1), n) for n in layers(s)] and None,
        r"encoder\.layers\.3\.self_attn\.in_proj_weight has .*key\.weight in place of its v",
    ),
    "the fused weight by heads, the bias by blocks": (
        "small_bert",
        lambda s: [change(s, f"encoder.layers.{n}.self_attn.in_proj_weight", by_head) for n in layers(s)] and None,
        r"encoder\.layers\.0\.self_attn\.in_proj_bias has .* and its weight is in the layout 'part\(.*groups=4\)'",
    ),
    "a bias that was forgotten": (
        "small_bert",
        lambda s: change(s, "encoder.layers.2.linear1.bias", torch.zeros_like),
        r"encoder\.layers\.2\.linear1\.bias differs from .*2\.intermediate\.dense\.bias: all its values are 0, as if",
    ),
    "a norm's weight and bias swapped": (
        "small_bert",
        lambda s: swap(s, "encoder.layers.1.norm1.weight", "encoder.layers.1.norm1.bias"),
        r"encoder\.layers\.1\.norm1\.weight is the weight by its name but has .*LayerNorm\.bias, which is the bias",
    ),
    "two layers swapped": (
        "small_bert",
        lambda s: [swap(s, n, n.replace("layers.1", "layers.2")) for n in list(s) if "layers.1" in n] and None,
        r"encoder\.layers\.1\.linear2\.weight has the values of encoder\.layer\.2\..* should be layer 1",
    ),
    "q, k and v of which k was forgotten": (
        "small_bert",
        lambda s: change(
            s, "encoder.layers.0.self_attn.in_proj_weight", lambda w: torch.cat((w[:32], w[32:64] * 0, w[64:]))
        ),
        r"encoder\.layers\.0\.self_attn\.in_proj_weight contains .* has no values for 32 of 96 rows, 32 to 63, of it",
    ),
    "a square matrix that was not transposed": (
        "gpt2",
        lambda s: [change(s, f"stack.{n}.merge.weight", lambda w: w.T) for n in layers(s)] and None,
        r"stack\.0\.merge\.weight is h\.0\.attn\.c_proj\.weight not transposed, and all \d+ matrices that are not",
    ),
    "parts of the fused matrix taken by head": (
        "gpt2",
        lambda s: (
            [
                change(s, f"stack.1.{name}.weight", lambda w, i=i: by_head(torch.cat(fused_of(s, 1))).chunk(3)[i])
                for i, name in enumerate(("query", "key", "value"))
            ]
            and None
        ),
        r"stack\.1\.query\.weight (is|holds|differs|has)",
    ),
}


def fused_of(state: State, n: int) -> list[torch.Tensor]:
    if "fused" not in state:
        state["fused"] = torch.cat([state[f"stack.{n}.{name}.weight"] for name in ("query", "key", "value")])
    return [state["fused"]]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_of_the_conversion_is_named(name: str, request: pytest.FixtureRequest) -> None:
    which, plant, sentence = MISTAKES[name]
    baseline, target = request.getfixturevalue(which).states()
    plant(target)
    target.pop("fused", None)
    match = gl.match_weights(baseline, target)
    assert not match.clean
    assert any(re.search(sentence, problem) for problem in match.problems), "\n".join(match.problems)
    # Nothing is said of what is right.
    right = request.getfixturevalue(which).target.state_dict()
    wrong = {name for name in right if not torch.equal(right[name], target[name])}
    said = {problem.partition(" ")[0] for problem in match.problems}
    assert said <= wrong | {name.replace("weight", "bias") for name in wrong}, match.problems
    assert len(said & wrong) or len(match.problems)


def test_rows_reordered_in_all_layers_are_a_notice_not_a_mistake(llama: Port) -> None:
    baseline, target = llama.states()
    for n in layers(target):
        change(target, f"blocks.{n}.attention.q_proj.weight", lambda w: permuted(w, 4))
        change(target, f"blocks.{n}.attention.k_proj.weight", lambda w: permuted(w, 2))
    match = gl.match_weights(baseline, target)
    assert match.clean, match
    assert len(match.notices) == 6
    assert "with its rows or columns in a different order" in match.notices[0]


def test_a_weight_with_a_name_of_no_known_kind_is_not_a_mistake() -> None:
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    for one, other in (("weight", "kernel"), ("kernel", "weight"), ("kernel", "bias"), ("table", "kernel")):
        match = gl.match_weights({f"fc.{one}": weight}, {f"fc.{other}": weight})
        assert (match.problems, len(match.pairs)) == ((), 1)


def test_two_weights_of_one_layer_are_not_layers_in_a_different_order() -> None:
    # mlp.0 and mlp.2 are in one block, as f1 and f2 are: 0 and 2 are places in a Sequential.
    baseline = {f"b{n}.mlp.{place}.bias": torch.randn(16) for n in range(2) for place in (0, 2)}
    target = {
        f"blks.{n}.f{1 + place // 2}.bias": baseline[f"b{n}.mlp.{place}.bias"] for n in range(2) for place in (0, 2)
    }
    match = gl.match_weights(baseline, target)
    assert len(match.pairs) == 4
    assert match.clean, match.problems


@pytest.mark.parametrize("outer", [True, False])
def test_layers_that_one_side_counts_within_others_are_not_in_a_different_order(outer: bool) -> None:
    baseline = {f"res.{n}.{m}.weight": torch.randn(4, 4) for n in range(3) for m in range(2)}
    target = {
        f"blocks.{2 * n + m if outer else 3 * m + n}.weight": baseline[f"res.{n}.{m}.weight"]
        for n in range(3)
        for m in range(2)
    }
    match = gl.match_weights(baseline, dict(sorted(target.items())))
    assert len(match.pairs) == 6
    assert match.clean, match.problems


def test_two_layers_are_swapped_although_one_side_has_a_number_that_counts_nothing() -> None:
    baseline = {f"block.{n}.layer.1.weight": torch.randn(4, 4) for n in range(5)}
    target = {f"ffn.{n}.weight": baseline[f"block.{(0, 2, 1, 3, 4)[n]}.layer.1.weight"] for n in range(5)}
    problems = gl.match_weights(baseline, target).problems
    assert [problem.partition(" ")[0] for problem in problems] == ["ffn.1.weight", "ffn.2.weight"]


# ---- what cannot be matched -----------------------------------------------------------------------------------------


# ---- convolutions and recurrent layers ------------------------------------------------------------------------------


def convolutions() -> State:
    """Three convolutions, each with a norm, as of torch."""
    generator = torch.Generator().manual_seed(0)
    state: State = {}
    for n, (inner, outer) in enumerate([(3, 6), (6, 6), (6, 8)]):
        state[f"stage.{n}.conv.weight"] = torch.randn(outer, inner, 3, 3, generator=generator)
        for name in ("weight", "bias", "running_mean", "running_var"):
            state[f"stage.{n}.bn.{name}"] = torch.rand(outer, generator=generator)
        state[f"stage.{n}.bn.num_batches_tracked"] = torch.tensor(0)
    return state


def flat(state: State) -> State:
    """The state in names without modules, with kernels whose rows and columns come first."""
    return {name.replace(".", "_"): t.permute(2, 3, 1, 0) if t.dim() == 4 else t for name, t in state.items()}


def test_counters_and_statistics_are_paired_in_names_without_modules() -> None:
    match = gl.match_weights(convolutions(), flat(convolutions()))
    assert match.clean, match
    wrong = flat(convolutions())
    swap(wrong, "stage_1_bn_running_mean", "stage_1_bn_running_var")
    problems = gl.match_weights(convolutions(), wrong).problems
    assert len(problems) == 2
    assert problems[0].startswith("stage_1_bn_running_mean is the running mean by its name but has the values of ")


def test_a_kernel_whose_rows_and_columns_alone_are_exchanged_is_named() -> None:
    wrong = flat(convolutions())
    change(wrong, "stage_2_conv_weight", lambda kernel: kernel.transpose(0, 1))
    (problem,) = gl.match_weights(convolutions(), wrong).problems
    assert problem == (
        "stage_2_conv_weight is stage.2.conv.weight in the layout 'a b c d -> d c b a', and 2 other kernels are in the "
        "layout 'a b c d -> c d b a': all are square, so they fit either way"
    )
    # A transposed convolution has its input's channels first.
    other = flat(convolutions())
    change(other, "stage_2_conv_weight", lambda kernel: kernel.transpose(2, 3))
    assert gl.match_weights(convolutions(), other).clean


def gates_first(wrong: Callable[[str], bool]) -> tuple[State, State]:
    """The weights of two recurrent layers, and their transposes, some with the two middle gates exchanged."""
    baseline = {name: each.detach() for name, each in torch.nn.LSTM(6, 8, 2).named_parameters(prefix="rnn")}
    target = {}
    for name, each in baseline.items():
        i, f, g, o = each.chunk(4)
        target[name.replace("rnn", "cells")] = (torch.cat([i, g, f, o]) if wrong(name) else each).transpose(0, -1)
    return baseline, target


def test_gates_of_a_recurrent_layer_in_different_orders_are_named() -> None:
    torch.manual_seed(0)
    (problem,) = gl.match_weights(*gates_first(lambda name: name == "rnn.weight_ih_l0")).problems
    assert problem.startswith("cells.weight_ih_l0 has the rows of rnn.weight_ih_l0 in a different order than cells.")
    assert problem.endswith(": all gates of one recurrent layer must have the same order")
    # The target's code may count its gates in another order.
    assert gl.match_weights(*gates_first(lambda name: True)).clean


def test_a_match_is_clean_without_problems_and_unmatched_targets() -> None:
    assert WeightMatch((), {"left": "why"}).clean
    assert not WeightMatch((), {}, {"left": "why"}).clean
    assert not WeightMatch((), {}, {}, ("a is not b.",)).clean


def test_a_scaled_weight_has_whole_factors_and_constants_up_to_rounding() -> None:
    weight = torch.randn(12, 9, generator=torch.Generator().manual_seed(0))
    noise = 1 + 1e-5 * torch.randn(12, 9, generator=torch.Generator().manual_seed(1))
    cases = [((-1.0, 0.0), -weight), ((1.0, 2.0), weight + 2), ((-1.0, 3.0), 3 - weight)]
    for (factor, add), changed in cases:
        (pair,) = gl.match_weights({"a.weight": weight}, {"a.weight": changed * noise}).pairs
        assert pair.layout.steps == (Scale(factor, add),)
        (pair,) = gl.match_weights({"a.weight": weight}, {"a.weight": (changed * noise).T}).pairs
        assert pair.layout.steps[-1] == Scale(factor, add)
    (pair,) = gl.match_weights({"a.weight": weight}, {"a.weight": weight * 0.5 + 0.3}).pairs
    (scale,) = pair.layout.steps
    assert isinstance(scale, Scale)
    assert (scale.factor, scale.add) == pytest.approx((0.5, 0.3), rel=1e-5)


def test_a_constant_with_a_nan_in_it_is_no_copy_of_one_without() -> None:
    whole, broken = torch.ones(8), torch.ones(8)
    broken[3] = torch.nan
    for ours, theirs, is_one in ((whole, broken, False), (broken, whole, False), (broken, broken, False)):
        pairs = gl.match_weights({"a.bias": ours}, {"a.bias": theirs}).pairs
        assert any(pair.rel == 0 and "all its values are equal" in pair.note for pair in pairs) is is_one


def test_few_numbers_that_are_equal_by_chance_show_no_partner() -> None:
    ours, theirs = torch.tensor([0.0, 1.0] * 16), torch.tensor([0.0, 0.0, 1.0, 2.0] * 8)
    match = gl.match_weights({"a.mask": ours}, {"b.mask": theirs})
    assert not any("of its values are equal" in pair.note for pair in match.pairs)


def test_notes_that_differ_in_numbers_alone_are_shown_once_with_the_number_of_layers() -> None:
    notes = ["off by 0.1", "off by 2e-3", "off by 3", "another", "a third"]
    pairs = tuple(Pair(f"h.{n}.x", f"l.{n}.x", note=note) for n, note in enumerate(notes))
    page = Proposal(pairs)._repr_mimebundle_()["text/html"]
    assert "off by 0.1 (and similarly, with different numbers, in 2 more layers); another; a third<" in page
    assert "off by 2e-3" not in page
    left = Proposal((), {"a.0": "no 3", "a.1": "no 4", "b": "no 3"})._repr_mimebundle_()["text/html"]
    assert "a.0 … a.1 (2 taps)" in left
    assert "no 3 (and similarly, with different numbers, in 1 more layer)" in left


def test_arguments_that_are_not_states_are_refused() -> None:
    with pytest.raises(MatchError, match="the baseline must be a state dict or a module, not list"):
        gl.match_weights([1], {})  # type: ignore[arg-type]
    with pytest.raises(
        MatchError, match=exactly("the target has no tensors with values; give a module or a state dict with weights")
    ):
        gl.match_weights({"a": torch.ones(2)}, {"b": 3})
    with pytest.raises(
        MatchError,
        match=exactly(
            "the baseline's 'a' is on the meta device, so it has no values to match; load or convert it first"
        ),
    ):
        gl.match_weights({"a": torch.ones(2, device="meta")}, {"b": torch.ones(2)})


def test_no_converter_is_written_for_unmatched_parameters(llama: Port) -> None:
    baseline, target = llama.states()
    target["extra.weight"] = torch.randn(3, 5)
    match = gl.match_weights(baseline, target)
    with pytest.raises(
        MatchError,
        match=exactly(
            "a converter cannot make extra.weight: no partner was found. match.unmatched_target has the reason for each"
        ),
    ):
        gl.make_converter(match)
    with pytest.raises(MatchError, match=exactly("'class' is not a valid function name; give one such as 'convert'")):
        gl.make_converter(match, "class")


@pytest.mark.parametrize(
    ("layouts", "is_plain"),
    [
        (["part(index=0, of=[1, 1], dim=0)", "part(index=1, of=[1, 1], dim=0)"], True),
        (["part(index=1, of=[1, 1], dim=1)", "part(index=0, of=[1, 1], dim=1)"], True),
        (["part(index=0, of=[1, 1], dim=0, groups=2)", "part(index=1, of=[1, 1], dim=0, groups=2)"], False),
        (["part(index=0, of=[1, 1], dim=0)", "part(index=1, of=[1, 1], dim=0) | a b -> b a"], False),
    ],
)
def test_a_converter_fuses_parameters_along_their_dimension(layouts: list[str], is_plain: bool) -> None:
    whole = torch.arange(32.0).reshape(4, 8)
    parts = {name: parse_layout(text) for name, text in zip("ab", layouts, strict=True)}
    state = {name: layout.local(whole) for name, layout in parts.items()}
    code = _fused([Pair(name, "fused", layout, "target") for name, layout in parts.items()], (4, 8))
    assert code.startswith("torch.cat" if is_plain else "join_parts")
    names = {"torch": torch, "join_parts": join_parts, "parse_layout": parse_layout, "state": state}
    assert torch.equal(eval(code, names), whole)


def test_a_converter_states_each_problem_above_its_line(llama: Port) -> None:
    baseline, target = llama.states()
    everywhere(target, "blocks.{n}.mlp.gate_proj.weight", "blocks.{n}.mlp.up_proj.weight")
    lines = gl.make_converter(gl.match_weights(baseline, target)).splitlines()
    place = next(n for n, line in enumerate(lines) if "mlp.gate_proj.weight'] =" in line)
    assert "is gate by its name" in lines[place - 1]


@pytest.mark.parametrize("fused", ["w1", "gate", "gate_up_proj"])
def test_a_correct_fused_gate_and_up_is_clean_whatever_its_name(fused: str) -> None:
    torch.manual_seed(0)
    baseline = {f"l.{n}.mlp.{name}.weight": torch.randn(12, 8) for n in range(3) for name in ("gate_proj", "up_proj")}
    target = {
        f"b.{n}.mlp.{fused}.weight": torch.cat([baseline[f"l.{n}.mlp.{name}_proj.weight"] for name in ("gate", "up")])
        for n in range(3)
    }
    match = gl.match_weights(baseline, target)
    assert match.clean, match.problems


def test_a_fused_weight_in_groups_of_heads_is_a_notice(small_bert: Port, gpt2: Port) -> None:
    baseline, target = small_bert.states()
    for n in layers(target):
        for last in ("weight", "bias"):
            change(target, f"encoder.layers.{n}.self_attn.in_proj_{last}", by_head)
    match = gl.match_weights(baseline, target)
    assert match.clean, match
    assert len(match.notices) == 8
    assert match.notices[0].startswith("encoder.layers.0.self_attn.in_proj_weight has encoder.layer.0.attention.self.")
    assert "side by side in each of 4 groups of heads, not one after the other" in match.notices[0]
    # And where the baseline's is the fused one, which the target has apart.
    baseline, target = gpt2.states()
    for n in layers(target):
        for last in ("weight", "bias"):
            names = [f"stack.{n}.{name}.{last}" for name in ("query", "key", "value")]
            parts = torch.cat([target[name] for name in names]).unflatten(0, (4, 3, -1)).transpose(0, 1).flatten(1, 2)
            target.update(zip(names, parts, strict=True))
    match = gl.match_weights(baseline, target)
    assert any("h.1.attn.c_attn.weight has stack.1.query.weight" in notice for notice in match.notices), match.notices


def test_rows_of_a_fused_weight_that_no_other_weight_has_are_counted() -> None:
    qkv = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    fused = {"attn.qkv.weight": qkv}
    for parts, rest in (
        ({"q": qkv[:4], "k": qkv[4:8]}, "4 of 12 rows, 8 to 11, of it"),
        ({"q": qkv[:4], "v": qkv[8:]}, "4 of 12 rows, 4 to 7, of it"),
        ({"q": qkv[:4], "k": qkv[4:8], "v": qkv[8:]}, ""),
    ):
        split = {f"attn.{name}.weight": part.clone() for name, part in parts.items()}
        match = gl.match_weights(fused, split)
        assert match.clean
        said = f"attn.qkv.weight is only partly used: the target lacks {rest}"
        assert match.notices == ((said,) if rest else ())
        match = gl.match_weights(split, fused)
        said = f"attn.qkv.weight contains {', '.join(split)}; the baseline has no values for {rest}"
        assert match.problems == ((said,) if rest else ())


HEADS = {"q": 64, "k": 32, "v": 32, "o": 64}
WIDTH = 24


def in_heads(weight: torch.Tensor, head: int, by: int = 2) -> torch.Tensor:
    """The rows of each head in another order, as for another convention of rotary embedding."""
    return weight.reshape(-1, by, head // by, WIDTH).transpose(1, 2).reshape(-1, WIDTH)


def transposed_heads(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows that count features first and heads second."""
    return weight.reshape(heads, -1, WIDTH).transpose(0, 1).reshape(-1, WIDTH)


Orders = dict[str, Callable[[torch.Tensor], torch.Tensor]]


def attention_with(orders: Orders, single: bool = False, rows: dict[str, int] | None = None) -> gl.WeightMatch:
    """Two layers whose rows, for o columns, have been put into these orders."""
    torch.manual_seed(0)
    rows = rows or {**HEADS, **({"k": 16, "v": 16} if single else {})}
    baseline = {
        f"h.{n}.attn.{role}_proj.weight": torch.randn(size, WIDTH) for n in range(2) for role, size in rows.items()
    }
    target = {name: orders.get(name.split(".")[3][0], torch.clone)(value) for name, value in baseline.items()}
    for state in (baseline, target):
        state.update({name: value.T.contiguous() for name, value in state.items() if "o_proj" in name})
    return gl.match_weights(baseline, target)


RIGHT_HEADS: dict[str, tuple[Orders, bool]] = {
    "q and k alike": ({"q": lambda w: in_heads(w, 16), "k": lambda w: in_heads(w, 16)}, False),
    "q and k alike, k with one head": ({"q": lambda w: in_heads(w, 16), "k": lambda w: in_heads(w, 16)}, True),
    "v and o alike": ({"v": lambda w: in_heads(w, 16), "o": lambda w: in_heads(w, 16)}, False),
    "heads counted second": (
        {
            "q": lambda w: transposed_heads(w, 4),
            "k": lambda w: transposed_heads(w, 2),
            "v": lambda w: transposed_heads(w, 2),
        },
        False,
    ),
    "queries by their group": ({"q": lambda w: w.reshape(2, 2, 16, WIDTH).transpose(0, 1).reshape(-1, WIDTH)}, False),
}
WRONG_HEADS: dict[str, tuple[Orders, bool, str]] = {
    "k in smaller heads": (
        {"q": lambda w: in_heads(w, 16), "k": lambda w: in_heads(w, 8)},
        False,
        r"^h\.0\.attn\.k_proj\.weight is .* reordered in heads of 8 rows, and .*q_proj.* in heads of 16 rows: in one",
    ),
    "q alone": (
        {"q": lambda w: in_heads(w, 16)},
        False,
        "k_proj.* in the same order, and .*q_proj.* in heads of 16 rows",
    ),
    "k alone": ({"k": lambda w: in_heads(w, 16)}, False, "k_proj.* in heads of 16 rows, and .*q_proj.* the same order"),
    "q alone, k with one head": ({"q": lambda w: in_heads(w, 16)}, True, "k_proj.* in the same order, and .*q_proj"),
    "v alone": ({"v": lambda w: in_heads(w, 16)}, False, "o_proj.* in the same order, and .*v_proj.* heads of 16 rows"),
    "o alone": ({"o": lambda w: in_heads(w, 16)}, False, "o_proj.* in heads of 16 rows, and .*v_proj.* the same order"),
    "o in larger heads": (
        {"v": lambda w: in_heads(w, 16), "o": lambda w: in_heads(w, 32)},
        False,
        "o_proj.* in heads of 32 rows, and .*v_proj.* in heads of 16 rows",
    ),
    "k's heads counted otherwise": (
        {"q": lambda w: transposed_heads(w, 4), "k": lambda w: transposed_heads(w, 8)},
        False,
        "k_proj.* in another order, and .*q_proj.* in another order: in one attention",
    ),
}


@pytest.mark.parametrize("name", RIGHT_HEADS)
def test_one_order_of_heads_throughout_an_attention_is_clean(name: str) -> None:
    match = attention_with(*RIGHT_HEADS[name])
    assert match.clean, match


def test_the_bias_of_an_output_projection_has_no_order_of_heads() -> None:
    def reordered(value: torch.Tensor) -> torch.Tensor:
        return value[in_heads(torch.arange(len(value))[:, None].expand(-1, WIDTH), 16)[:, 0]]

    torch.manual_seed(0)
    baseline = {f"h.{n}.attn.v_proj.weight": torch.randn(32, 24) for n in range(2)}
    baseline |= {f"h.{n}.attn.v_proj.bias": torch.randn(32) for n in range(2)}
    target = {name: reordered(value) for name, value in baseline.items()}
    for n in range(2):
        weight, bias = torch.randn(32, 24), torch.randn(24)
        baseline |= {f"h.{n}.attn.o_proj.weight": weight.T.contiguous(), f"h.{n}.attn.o_proj.bias": bias}
        target |= {f"h.{n}.attn.o_proj.weight": reordered(weight).T.contiguous(), f"h.{n}.attn.o_proj.bias": bias}
    match = gl.match_weights(baseline, target)
    assert match.clean, match


@pytest.mark.parametrize("name", WRONG_HEADS)
def test_two_orders_of_heads_in_one_attention_are_a_mistake(name: str) -> None:
    orders, single, sentence = WRONG_HEADS[name]
    match = attention_with(orders, single)
    assert len(match.problems) == 2, match
    assert re.search(sentence, match.problems[0]), match.problems


def test_heads_of_two_sizes_are_a_mistake_unless_one_divides_the_other() -> None:
    def match(size: int) -> gl.WeightMatch:
        sizes = {"q": 16, "k": 16, "v": size, "o": size}
        orders: Orders = {role: partial(in_heads, head=head) for role, head in sizes.items()}
        return attention_with(orders, rows=dict.fromkeys(sizes, 48))

    problems = match(12).problems
    assert len(problems) == 2
    assert re.search(r"v_proj\.weight is .* in heads of 12 rows, and .*q_proj\.weight in heads of 16: in", problems[0])
    assert match(8).clean


def test_swapped_projections_are_one_mistake(llama: Port, small_bert: Port) -> None:
    baseline, target = llama.states()
    swap(target, "blocks.1.attention.k_proj.weight", "blocks.1.attention.v_proj.weight")
    (said,) = gl.match_weights(baseline, target).problems
    assert said.startswith("blocks.1.attention.k_proj.weight is k by its name but has the values of")
    assert "and blocks.1.attention.v_proj.weight has the values of" in said
    assert said.endswith("which is k: the two are swapped")
    baseline, target = small_bert.states()
    bert_qkv(target, (0, 2, 1), 2)
    bert_qkv(target, (0, 2, 1), 2, "bias")
    said, _ = gl.match_weights(baseline, target).problems
    assert re.search(r"in_proj_weight has .*key\.weight in place of its v, and .*value\.weight in place of its k", said)
    # o is as square as q.
    baseline, target = llama.states()
    everywhere(target, "blocks.{n}.attention.q_proj.weight", "blocks.{n}.attention.o_proj.weight")
    assert len(gl.match_weights(baseline, target).problems) == 3


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("wrong", [False, True])
def test_quantised_weights_are_matched_by_their_values(dtype: torch.dtype, wrong: bool) -> None:
    q, k = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)) / 50
    fused = torch.cat([k, q] if wrong else [q, k])
    scale = fused.abs().amax(1) / 127
    codes = fused / scale[:, None]
    codes = codes.to(dtype) if dtype.is_floating_point else codes.round().to(dtype)
    others = {f"layers.{n}.{x}.weight": value for n in range(3) for x, value in (("q", q + n), ("k", k + n))}
    target = {f"layers.{n}.qk.weight": torch.cat([q + n, k + n]) for n in range(1, 3)}
    target |= {"layers.0.qk.weight": codes, "layers.0.qk.weight_scale": scale}
    match = gl.match_weights(others, target)
    assert match.clean is not wrong
    assert not match.unmatched_target
    assert match.notices[-1] == (
        "weights of the target are quantised (layers.0.qk.weight), and were multiplied by their scales "
        "before they were compared; the converter gives such values in full precision"
    )
    made: dict[str, Any] = {}
    exec(match.to_code(), made)
    converted = made["convert"](others)
    torch.testing.assert_close(converted["layers.0.qk.weight"], fused)
    assert set(converted) == {f"layers.{n}.qk.weight" for n in range(3)}


# torch will remove its own.
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("is_torchs", [False, True])
def test_weights_whose_class_stores_codes_are_matched_by_their_numbers(is_torchs: bool) -> None:
    q, k = torch.randn(2, 32, 32, generator=torch.Generator().manual_seed(0)) / 50
    fused = torch.cat([q, k])
    codes = Int8Tensor.of(fused)
    if is_torchs:
        codes = torch.quantize_per_channel(fused, torch.full((64,), 0.001), torch.zeros(64), 0, torch.qint8)
    match = gl.match_weights({"q.weight": q, "k.weight": k}, {"qk.weight": codes})
    assert match.clean
    assert not match.unmatched_target
    assert "weights of the target are quantised (qk.weight)" in match.notices[-1]
    made: dict[str, Any] = {}
    exec(match.to_code(), made)
    assert torch.equal(made["convert"]({"q.weight": q, "k.weight": k})["qk.weight"], fused)


@pytest.mark.parametrize(
    "text",
    [
        *("a b -> b a", "rearrange('(a b) c -> (b a) c', b=3)", "scale(factor=0.5, add=-1.0)", "scale(factor=2.0)"),
        *(
            f"part(index={index}, of={of}, dim={dim}, groups={groups})"
            for index, of in ((1, [1, 1]), (0, [2, 1]), (1, [2, 1]), (2, [1, 1, 1]))
            for dim in (0, 1, -1)
            for groups in (1, 2)
        ),
        *("window(dim=0, start=1, length=3)", "window(dim=1, start=-4, length=2)", "window(dim=0, start=-1, length=1)"),
        "strided(shape=[2, 3], sizes=[2, 3], strides=[6, 1], offset=7)",
        "part(index=1, of=[1, 1], dim=0) | a b -> b a | part(index=0, of=[1, 2], dim=1)",
    ],
)
def test_the_code_of_a_layout_takes_what_the_layout_takes(text: str) -> None:
    x = torch.arange(144.0).reshape(12, 12)
    layout = parse_layout(text)
    assert torch.equal(eval(f"x{_code(layout, x.shape)}", {"x": x}), layout.local(x))


def test_a_converter_gives_the_targets_dtype_whichever_of_the_sources_has_another() -> None:
    q, k = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    target = {"qk.weight": torch.cat([q, k])}
    for baseline in ({"q.weight": q.float(), "k.weight": k}, {"q.weight": q, "k.weight": k.float()}):
        made: dict[str, Any] = {}
        exec(gl.match_weights(baseline, target).to_code(), made)
        (converted,) = made["convert"](baseline).values()
        assert converted.dtype == torch.bfloat16
        assert torch.equal(converted, target["qk.weight"])
