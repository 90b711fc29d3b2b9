"""Public implementations of one model, which share only the mathematics: right ports are clean, mistakes are named."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from kit.ports import Port, State
from pairs.conftest import NEEDS, public_port
from torch import Tensor, nn

import graftlab as gl

HEADS = 4


@pytest.fixture(params=NEEDS)
def port(request: pytest.FixtureRequest) -> Port:
    return public_port(request.param)


def shown(model: nn.Module, run: Callable[[nn.Module], Any]) -> None:
    with torch.no_grad(), gl.watch(model):
        run(model)


def sides(port: Port, target: nn.Module | None = None) -> tuple[Callable[[], None], Callable[[], None]]:
    return partial(shown, port.baseline, port.run), partial(shown, target or port.target, port.run)


# ---- right conversions ----------------------------------------------------------------------------------------------


def tensors(found: Any) -> Iterator[Tensor]:
    if isinstance(found, Tensor):
        yield found
    for each in found.values() if isinstance(found, dict) else found if isinstance(found, tuple) else ():
        yield from tensors(each)


@torch.no_grad()
def test_the_hand_written_conversion_is_right(port: Port) -> None:
    """Or else nothing below says anything: what the target returns, the baseline returns too."""
    theirs = list(tensors(port.run(port.baseline)))
    for mine in tensors(port.run(port.target)):
        # open_clip returns the temperature as it is multiplied, which transformers does not return.
        if mine.dim():
            assert any(one.shape == mine.shape and torch.allclose(one, mine, atol=1e-5) for one in theirs)


def test_weights_match_completely_and_nothing_is_said_against_them(port: Port) -> None:
    match = gl.match_weights(port.baseline, port.target)
    assert match.clean, match
    assert match.notices == ()
    assert match.unmatched_baseline == {}
    assert {pair.target for pair in match.pairs} == set(port.target.state_dict())
    # Of a single number, a temperature, only the name can say which it is.
    assert {pair.target for pair in match.pairs if pair.sureness != "exact"} <= {"logit_scale"}


@pytest.mark.ranks
def test_taps_match_completely_and_compare_clean(port: Port, session: gl.Session) -> None:
    proposal = session.match(*sides(port))
    # The temperature again: one number, which the other side does not show. And what timm's attention gives to its
    # projection, which transformers shows in some versions only. And its pooling, which transformers does in place.
    left = {"output[2]", *(f"blocks.{layer}.attn.norm" for layer in range(3))}
    left |= {"head.global_pool", "head.global_pool.pool", "head.global_pool.flatten"}
    assert set(proposal.unmatched_target) <= left
    assert proposal.problems == ()
    assert all(pair.by_value for pair in proposal.pairs)
    session.edit(pairs=proposal)
    frame = session.run(*sides(port)).frame
    compared = frame[frame["status"] == "compared"]
    assert set(frame["status"]) <= {"compared", "unmatched", "missing"}
    assert set(frame.loc[frame["status"] == "missing", "name"]) == set(proposal.unmatched_target)
    assert len(compared) == len(proposal.pairs)
    assert compared["rel_l2"].max() < 2e-6
    verdict = session.verdict(*sides(port))
    assert verdict.named == []


@pytest.mark.ranks
def test_a_fused_projection_has_all_its_parts_even_where_they_are_tapped_apart_too(session: gl.Session) -> None:
    """timm shows qkv fused and then q and k by themselves; transformers has one tap of each."""
    port = public_port("vit")
    proposal = session.match(*sides(port), rounds=0)
    parts = {pair.baseline.rpartition(".")[2]: pair.layout.text for pair in proposal.of_target("blocks.1.attn.qkv")}
    assert sorted(parts.values()) == [f"part(index={index}, of=[1, 1, 1], dim=2)" for index in range(3)]
    assert len(parts) == 3
    (q,) = proposal.of_target("blocks.1.attn.q_norm")
    assert q.by_value


# ---- mistakes in the weights ----------------------------------------------------------------------------------------


def change(state: State, pattern: str, make: Callable[[Tensor], Tensor]) -> None:
    """In every layer, or wherever a name matches."""
    found = [name for name in state if re.fullmatch(pattern, name)]
    assert found, pattern
    for name in found:
        state[name] = make(state[name]).contiguous()


def swap(state: State, one: str, other: str) -> None:
    found = [name for name in state if re.search(one, name)]
    assert found, one
    for name in found:
        theirs = re.sub(one, other, name)
        state[name], state[theirs] = state[theirs], state[name]


def by_head(fused: Tensor) -> Tensor:
    """q, k and v of each head together, where they should stand one after the other."""
    return fused.unflatten(0, (3, HEADS, -1)).transpose(0, 1).flatten(0, 2)


def grouped(fused: Tensor) -> Tensor:
    """Two query heads, their key and their value, group by group, as older checkpoints of litgpt have them."""
    q, k, v = fused.split((48, 24, 24))
    return torch.cat([q.unflatten(0, (2, 24)), k.unflatten(0, (2, 12)), v.unflatten(0, (2, 12))], 1).flatten(0, 1)


def kv_swapped(fused: Tensor) -> Tensor:
    q, k, v = fused.chunk(3)
    return torch.cat([q, v, k])


IN_THE_WEIGHTS: dict[str, tuple[str, Callable[[State], None], str]] = {
    "k and v swapped within the fused weight": (
        "vit",
        lambda s: change(s, r"blocks\.\d\.attn\.qkv\.(weight|bias)", kv_swapped),
        r"blocks\.2\.attn\.qkv\.weight has .*(key|k_proj)\.weight in place of its v",
    ),
    "the fused weight by heads, its bias not": (
        "vit",
        lambda s: change(s, r"blocks\.\d\.attn\.qkv\.weight", by_head),
        r"blocks\.0\.attn\.qkv\.bias has .* and its weight is in the layout 'part\(.*groups=4\)'",
    ),
    "a square matrix transposed": (
        "vit",
        lambda s: change(s, r"blocks\.\d\.attn\.proj\.weight", lambda w: w.T),
        r"blocks\.1\.attn\.proj\.weight is .* transposed, and all \d+ matrices that are not square are not",
    ),
    "a bias that was forgotten": (
        "vit",
        lambda s: change(s, r"blocks\.1\.mlp\.fc1\.bias", torch.zeros_like),
        r"blocks\.1\.mlp\.fc1\.bias differs from .*: all its values are 0, as if it had not been loaded",
    ),
    "gate and up swapped": (
        "llama",
        lambda s: swap(s, r"mlp\.fc_1", "mlp.fc_2"),
        r"transformer\.h\.0\.mlp\.fc_1\.weight is gate by its name but has .*model\.layers\.0\.mlp\.up_proj",
    ),
    "the groups of attention fused one by one, in one layer": (
        "llama",
        lambda s: change(s, r"transformer\.h\.1\.attn\.qkv\.weight", grouped),
        r"transformer\.h\.1\.attn\.qkv\.weight is .* in the layout .* where 2 others like it are in the layout",
    ),
    "norms swapped in one tower": (
        "clip",
        lambda s: swap(s, r"visual\.transformer\.resblocks\.(\d)\.ln_1", r"visual.transformer.resblocks.\1.ln_2"),
        r"visual\.transformer\.resblocks\.1\.ln_1\.weight is .* has the values of .*layers\.1\.layer_norm2",
    ),
    "the projection to the shared space not transposed": (
        "clip",
        lambda s: change(s, r"visual\.transformer\.resblocks\.\d\.attn\.out_proj\.weight", lambda w: w.T),
        r"visual\.transformer\.resblocks\.0\.attn\.out_proj\.weight is .* transposed, and all",
    ),
    "positions shifted by two": (
        "bert",
        lambda s: change(s, r"positions\.weight", lambda w: w.roll(2, 0)),
        r"positions\.weight ",
    ),
}


@pytest.mark.parametrize("mistake", IN_THE_WEIGHTS)
def test_a_mistake_in_the_weights_is_named(mistake: str) -> None:
    name, plant, sentence = IN_THE_WEIGHTS[mistake]
    port = public_port(name)
    baseline, target = port.states()
    plant(target)
    match = gl.match_weights(baseline, target)
    said = "\n".join(match.problems)
    assert re.search(sentence, said), said
    right = port.target.state_dict()
    wrong = {name for name in right if not torch.equal(right[name], target[name])}
    beside = {name.replace("weight", "bias") for name in wrong}
    assert {problem.partition(" ")[0] for problem in match.problems} <= wrong | beside, said


# ---- mistakes in the code -------------------------------------------------------------------------------------------


def each(layers: Any, plant: Callable[[Any], object]) -> None:
    for layer in layers:
        plant(layer)


def scaled(block: Any) -> None:
    block.attn.fused_attn = False
    block.attn.scale *= 1.1


def heads_permuted(block: Any) -> None:
    weight = block.attn.proj.weight.data
    weight.copy_(weight.unflatten(1, (HEADS, -1)).roll(1, 1).flatten(1))


def shift_rotation(model: Any) -> None:
    """By one position for keys and queries alike would change nothing, so each position turns twice as far."""
    model.cos.copy_(model.cos[::2].repeat(2, 1))
    model.sin.copy_(model.sin[::2].repeat(2, 1))


def quick_gelu(block: Any) -> None:
    from open_clip.transformer import QuickGELU

    block.mlp.gelu = QuickGELU()


def norms_swapped(layer: Any) -> None:
    layer.norm1, layer.norm2 = layer.norm2, layer.norm1


IN_THE_CODE: dict[str, tuple[str, Callable[[Any], None], str]] = {
    "another activation": (
        "bert",
        lambda m: each(m.encoder.layers, lambda layer: setattr(layer, "activation", nn.functional.relu)),
        r"encoder\.layer\.\*\.intermediate",
    ),
    "the eps of a norm": (
        "bert",
        lambda m: each(m.encoder.layers, lambda layer: setattr(layer.norm2, "eps", 1e-5)),
        r"encoder\.layer\.\*\.output\.LayerNorm",
    ),
    "norms that changed places": (
        "bert",
        lambda m: each(m.encoder.layers, norms_swapped),
        r"encoder\.layer\.\*\.(attention\.)?output\.LayerNorm",
    ),
    "positions that begin at two": (
        "bert",
        lambda m: m.positions.weight.data.copy_(m.positions.weight.data.roll(-2, 0)),
        r"embeddings\.position_embeddings",
    ),
    "the scale of attention": (
        "vit",
        lambda m: each(m.blocks, scaled),
        # transformers shows the probabilities under the name of the module that returns them.
        r"vit\.\w*\.?layers?\.\*\.attention(\.attention)?\[1\]",
    ),
    "the tanh approximation of GELU": (
        "vit",
        lambda m: each(m.blocks, lambda block: setattr(block.mlp, "act", nn.GELU("tanh"))),
        # Named after the target's where the baseline's one tap is the partner of several.
        r".*(intermediate_act_fn|activation_fn|mlp\.act)",
    ),
    "heads of attention in another order": (
        "llama",
        lambda m: each(m.transformer.h, heads_permuted),
        r".*\.attn\.proj",
    ),
    "positions that count double": ("llama", shift_rotation, r".*\.attn\.proj"),
    "the eps of a root mean square": (
        "llama",
        lambda m: each(m.transformer.h, lambda block: setattr(block.norm_1, "eps", 1e-6)),
        r"model\.layers\.\*\.input_layernorm",
    ),
    "QuickGELU": (
        "clip",
        lambda m: each(m.visual.transformer.resblocks, quick_gelu),
        r"vision_model\.encoder\.layers\.\*\.mlp\.activation_fn",
    ),
    "a causal mask that is missing": (
        "clip",
        lambda m: m.attn_mask.zero_(),
        r"text_model\.encoder\.layers\.\*\.self_attn\[0\]",
    ),
}


@pytest.mark.ranks
@pytest.mark.parametrize("mistake", IN_THE_CODE)
def test_a_mistake_in_the_code_is_named_once_its_taps_are_matched(mistake: str, session: gl.Session) -> None:
    name, plant, group = IN_THE_CODE[mistake]
    port = public_port(name)
    wrong = copy.deepcopy(port.target)
    plant(wrong)
    both = sides(port, wrong)
    proposal = session.match(*both)
    session.edit(pairs=proposal)
    verdict = session.verdict(*both)
    assert verdict.named, verdict.text
    assert all(re.fullmatch(group, named) for named in verdict.named), verdict.text
    # In every layer, since every layer has it.
    assert "in layers 0-2" in verdict.text or name == "bert", verdict.text
    # What stands before the first one that is wrong is by value, and the fault itself is not passed off as that.
    assert not proposal.problems, proposal.problems
