"""Weights among taps are paired by value, by most of their values, and by the outputs of their modules."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor

from graftlab.layouts import parse_layout
from graftlab.matching import matcher
from graftlab.matching.digests import Digest
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.recorded_taps import RecordedTap
from graftlab.matching.rounds import match_in_rounds, match_once
from graftlab.matching.rules import rules_of
from graftlab.matching.weight_taps import _by_the_first_rule, _with_one_role, with_weights, without_weights


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def weights(**tensors: Tensor) -> list[RecordedTap]:
    """Taps of weights; ``a_weight`` is the one of module ``a``."""
    found = []
    for order, (name, tensor) in enumerate(tensors.items()):
        path = name.replace("_", ".").replace("running.", "running_")
        tap = RecordedTap.of(f"{path}[kind=param]", tensor, order=order)
        tap.tags = {"kind": "param"}
        found.append(tap)
    return found


def paired(proposal: Proposal) -> list[tuple[str, str, str, str]]:
    """The pairs of weights: names without their tag, layout and whole."""
    plain = [(pair.baseline.partition("[")[0], pair.target.partition("[")[0], pair) for pair in proposal.pairs]
    return [(one, other, pair.layout.text, pair.whole) for one, other, pair in plain if "weight" in other]


OUTPUTS = Proposal((Pair("a", "b"),))
BY_RULE = Proposal((Pair("a", "b", sureness="rule"),))


def outputs_of_parts(*modules: str) -> Proposal:
    """The output of each baseline module is a part of the target's ``qkv``."""
    parts = (parse_layout(f"part(index={index}, of=[1, 1, 1], dim=-1)") for index in range(len(modules)))
    return Proposal(tuple(Pair(name, "qkv", part, "target") for name, part in zip(modules, parts, strict=True)))


def test_names_keep_their_tag_and_pairs_the_order_of_the_target() -> None:
    one, other = drawn(4, 6), drawn(4, 6, seed=1)
    found = with_weights(Proposal(()), weights(x_weight=one, y_weight=other), weights(v_weight=other, u_weight=one))
    assert [(pair.baseline, pair.target, pair.sureness) for pair in found.pairs] == [
        ("y.weight[kind=param]", "v.weight[kind=param]", "exact"),
        ("x.weight[kind=param]", "u.weight[kind=param]", "exact"),
    ]
    assert (found.problems, found.wrong_weights) == ((), ())


def unsent(**tensors: Tensor) -> list[RecordedTap]:
    """Taps of weights that stayed on their rank."""
    taps = weights(**tensors)
    for tap, tensor in zip(taps, tensors.values(), strict=True):
        tap.digest, tap.value = Digest.of(tensor), None
    return taps


def test_equal_fused_and_split_weights_are_paired_without_their_values() -> None:
    q, k, v, o = (drawn(rows, 6, seed=rows) for rows in (16, 8, 4, 6))
    gate, up = drawn(12, 6, seed=30), drawn(12, 6, seed=31)

    def refuse(name: str) -> Tensor:
        raise AssertionError(f"the value of {name} was fetched")

    found = with_weights(
        Proposal(()),
        unsent(q_weight=q, k_weight=k, v_weight=v, o_weight=o, gu_weight=torch.cat([gate, up])),
        unsent(qkv_weight=torch.cat([q, k, v]), out_weight=o.view(6, 3, 2), g_weight=gate, u_weight=up),
        refuse,
        refuse,
    )
    assert paired(found) == [
        ("q.weight", "qkv.weight", "part(index=0, of=[4, 3], dim=0)", "target"),
        ("k.weight", "qkv.weight", "part(index=1, of=[4, 2, 1], dim=0)", "target"),
        ("v.weight", "qkv.weight", "part(index=6, of=[1, 1, 1, 1, 1, 1, 1], dim=0)", "target"),
        ("o.weight", "out.weight", "rearrange('a (b c) -> a b c', c=2)", "baseline"),
        ("gu.weight", "g.weight", "part(index=0, of=[1, 1], dim=0)", "baseline"),
        ("gu.weight", "u.weight", "part(index=1, of=[1, 1], dim=0)", "baseline"),
    ]
    assert {pair.sureness for pair in found.pairs} == {"exact"}
    assert (found.unmatched_baseline, found.unmatched_target) == ({}, {})


def test_weights_in_the_wrong_place_are_measured_even_if_they_were_not_sent() -> None:
    values = {f"layers_{layer}_weight": drawn(8, 6, seed=layer) for layer in range(5)}
    swapped = {**values, "layers_1_weight": values["layers_2_weight"], "layers_2_weight": values["layers_1_weight"]}
    sent = [{tap.name: tap.value for tap in weights(**side)} for side in (values, swapped)]
    found = with_weights(Proposal(()), unsent(**values), unsent(**swapped), sent[0].get, sent[1].get)
    assert len(found.wrong_weights) == 2
    by_rule = [pair for pair in found.pairs if pair.sureness == "rule"]
    assert [pair.target for pair in by_rule] == [f"layers.{layer}.weight[kind=param]" for layer in (1, 2)]
    assert all(pair.rel is not None and pair.rel > 1 for pair in by_rule)


def test_a_part_whose_rows_are_in_reverse_is_wrong_and_does_not_end_the_match() -> None:
    q, k = drawn(16, 6), drawn(16, 6, seed=1)
    found = with_weights(Proposal(()), weights(q_weight=q, k_weight=k), weights(qk_weight=torch.cat([q, k.flip(0)])))
    assert paired(found) == [("q.weight", "qk.weight", "part(index=0, of=[1, 1], dim=0)", "target")]
    assert [*found.unmatched_baseline] == ["k.weight[kind=param]"]


def test_rounded_weights_are_compared_with_few_of_other_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matcher, "FETCHED", 0)
    layers = {f"h_{n}_weight": drawn(96, 64, seed=n) for n in range(16)}
    rounded = {f"l_{n}_weight": layers[f"h_{n}_weight"].bfloat16() for n in range(16)}
    held = {f"{name.replace('_', '.')}[kind=param]": each for name, each in (layers | rounded).items()}
    asked: list[str] = []

    def fetch(name: str) -> Tensor:
        asked.append(name)
        return held[name]

    found = with_weights(Proposal(()), unsent(**layers), unsent(**rounded), fetch, fetch)
    assert paired(found) == [(f"h.{n}.weight", f"l.{n}.weight", "same", "baseline") for n in range(16)]
    assert len(asked) < 3 * 16


def test_rounded_parts_of_fused_weights_are_compared_with_few_of_other_layers() -> None:
    layers, count = range(8), Counter[str]()
    split = {f"h_{n}_{name}_weight": drawn(32, 64, seed=10 * n + at) for n in layers for at, name in enumerate("qkv")}
    fused = {
        f"l_{n}_qkv_weight": torch.cat([split[f"h_{n}_{name}_weight"] for name in "qkv"]).bfloat16() for n in layers
    }
    held = {f"{name.replace('_', '.')}[kind=param]": each for name, each in (split | fused).items()}

    def fetch(name: str) -> Tensor:
        count[name] += 1
        return held[name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matcher, "FETCHED", 0)
        found = with_weights(Proposal(()), unsent(**split), unsent(**fused), fetch, fetch)
    assert {(one, other) for one, other, _, _ in paired(found)} == {
        (f"h.{n}.{name}.weight", f"l.{n}.qkv.weight") for n in layers for name in "qkv"
    }
    # Without a limit, each is fetched once.
    assert count.total() < 3 * len(held)
    count.clear()
    with_weights(Proposal(()), unsent(**split), unsent(**fused), fetch, fetch)
    assert set(count.values()) == {1}


@pytest.mark.parametrize("in_rounds", [True, False])
def test_weights_that_stayed_on_their_ranks_are_fetched_for_any_match(in_rounds: bool) -> None:
    weight = drawn(96, 64)
    ours, theirs = unsent(h_weight=weight), unsent(l_weight=weight.bfloat16())
    held = {"h.weight[kind=param]": weight, "l.weight[kind=param]": weight.bfloat16()}
    if in_rounds:
        found = match_in_rounds(lambda grafts: (ours, theirs), fetch_baseline=held.get, fetch_target=held.get)
    else:
        found = match_once(ours, theirs, fetch_baseline=held.get, fetch_target=held.get)
    # Without its values, only the extreme ones would have been compared.
    assert [(pair.sureness, pair.note) for pair in found.pairs] == [("near", "")]


def test_a_value_that_no_rank_has_is_asked_for_once() -> None:
    asked: list[str] = []
    ours, theirs = unsent(a_weight=drawn(8, 6), b_weight=drawn(8, 6) + 1e-9), unsent(c_weight=drawn(8, 6) * 1.001)
    found = with_weights(Proposal(()), ours, theirs, lambda name: asked.append(name), lambda name: asked.append(name))
    assert sorted(asked) == ["a.weight[kind=param]", "b.weight[kind=param]", "c.weight[kind=param]"]
    assert len(found.pairs) == 1


def test_a_side_without_weights_leaves_those_of_the_other_unmatched() -> None:
    value = RecordedTap.of("h", drawn(4), order=1)
    found = with_weights(OUTPUTS, [*weights(x_weight=drawn(4, 6)), value], [value])
    assert found.unmatched_baseline == {"x.weight[kind=param]": "the other side taps no weights"}
    assert (found.unmatched_target, found.pairs) == ({}, OUTPUTS.pairs)
    found = with_weights(OUTPUTS, [value], [*weights(x_weight=drawn(4, 6)), value])
    assert found.unmatched_target == {"x.weight[kind=param]": "the other side taps no weights"}


def test_what_a_weight_lacks_is_said_of_weights_beside_what_was_known() -> None:
    known = Proposal((), {"h": "no target tap has its values"}, {}, ("a problem.",))
    found = with_weights(known, weights(x_weight=drawn(4, 6)), weights(t_weight=drawn(5, 5)))
    assert found.unmatched_target == {"t.weight[kind=param]": "no baseline weight has 25 elements or contains it"}
    assert found.unmatched_baseline == {
        "h": "no target tap has its values",
        "x.weight[kind=param]": "no target weight has 24 elements or contains it",
    }
    assert found.problems == ("a problem.",)


def test_a_weight_that_is_tapped_again_is_known_by_its_number() -> None:
    first, again = weights(x_weight=drawn(4, 6), y_weight=drawn(4, 6, seed=1))
    again.name = f"{first.name}#1"
    target = weights(u_weight=drawn(4, 6, seed=1), v_weight=drawn(4, 6))
    assert [(pair.baseline, pair.target) for pair in with_weights(Proposal(()), [first, again], target).pairs] == [
        ("x.weight[kind=param]#1", "u.weight[kind=param]"),
        ("x.weight[kind=param]", "v.weight[kind=param]"),
    ]


def test_values_are_numbered_without_the_weights_between_them() -> None:
    x, y = RecordedTap.of("x", drawn(3), order=0), RecordedTap.of("y", drawn(3, seed=1), order=2)
    assert [(tap.name, tap.order) for tap in without_weights([x, *weights(w_weight=drawn(3)), y])] == [
        ("x", 0),
        ("y", 1),
    ]


@pytest.mark.parametrize("turned", [False, True])
def test_a_weight_is_paired_with_the_one_that_has_most_of_its_values(turned: bool) -> None:
    good, near = drawn(40, 20), drawn(40, 20)
    near[:12] = drawn(12, 20, seed=1)
    spoiled = drawn(40, 20)
    spoiled[:10] = drawn(10, 20, seed=2)
    target = spoiled.T.contiguous() if turned else spoiled
    found = with_weights(Proposal(()), weights(near_weight=near, good_weight=good), weights(t_weight=target))
    other = with_weights(Proposal(()), weights(good_weight=good, near_weight=near), weights(t_weight=target))
    assert paired(found) == paired(other)
    assert paired(found) == [("good.weight", "t.weight", "a b -> b a" if turned else "same", "baseline")]
    (pair,) = found.pairs
    assert (pair.note, pair.sureness) == ("75% of its values are equal", "rule")
    assert pair.rel is not None
    assert 0.5 < pair.rel < 1.0


def test_a_weight_with_few_values_of_another_has_no_partner() -> None:
    spoiled = drawn(40, 20)
    spoiled[:21] = drawn(21, 20, seed=1)
    assert paired(with_weights(Proposal(()), weights(w_weight=drawn(40, 20)), weights(t_weight=spoiled))) == []
    # Only a part of them beside each other is not most of them either.
    spoiled[:, 10:] = drawn(40, 10, seed=2)
    assert paired(with_weights(Proposal(()), weights(w_weight=drawn(40, 20)), weights(t_weight=spoiled))) == []


def test_weights_without_equal_values_follow_the_outputs_of_their_modules() -> None:
    found = with_weights(OUTPUTS, weights(a_weight=drawn(4, 6)), weights(b_weight=drawn(4, 6, seed=1)))
    assert paired(found) == [("a.weight", "b.weight", "same", "baseline")]
    assert found.pairs[0].note.startswith("as the outputs of their modules; the values differ by rel_l2 1.")
    turned = with_weights(OUTPUTS, weights(a_weight=drawn(4, 6)), weights(b_weight=drawn(6, 4, seed=1)))
    assert paired(turned) == [("a.weight", "b.weight", "a b -> b a", "baseline")]
    assert paired(with_weights(OUTPUTS, weights(a_weight=drawn(4, 6)), weights(b_weight=drawn(4, 5, seed=1)))) == []
    assert paired(with_weights(OUTPUTS, weights(a_weight=drawn(4, 6)), weights(c_weight=drawn(4, 6, seed=1)))) == []
    guess = Proposal((Pair("a", "b", sureness="guess"),))
    assert paired(with_weights(guess, weights(a_weight=drawn(4, 6)), weights(b_weight=drawn(4, 6, seed=1)))) == []


def test_a_bias_is_not_paired_where_the_weight_beside_it_is_another_kind() -> None:
    """The output of a convolution with a batch norm's factors in its weights is that of the norm."""
    norm, folded = drawn(4), drawn(4, seed=1)
    ours = weights(a_bias=norm, a_weight=drawn(4, seed=2))
    theirs = weights(b_bias=folded, b_weight=drawn(4, seed=3))
    found = with_weights(OUTPUTS, ours, theirs)
    assert {pair.target.partition("[")[0] for pair in found.pairs} == {"b", "b.bias", "b.weight"}
    theirs = weights(b_bias=folded, b_weight=drawn(4, 6, seed=3))
    assert with_weights(OUTPUTS, ours, theirs).pairs == OUTPUTS.pairs


def test_factors_with_a_batch_norms_statistics_in_them_are_not_its_weight() -> None:
    factors = {"a_weight": drawn(6)}
    norm = {**factors, "a_running_var": drawn(6, seed=1)}
    other = {"b_weight": drawn(6, seed=2)}
    for outputs in (OUTPUTS, BY_RULE):
        assert paired(with_weights(outputs, weights(**norm), weights(**other))) == []
        assert paired(with_weights(outputs, weights(**factors), weights(**other, b_running_var=drawn(6, seed=1)))) == []
    both = with_weights(BY_RULE, weights(**norm), weights(**other, b_running_var=drawn(6, seed=3)))
    assert paired(both) == [("a.weight", "b.weight", "same", "baseline")]


def test_a_module_of_fewer_weights_and_the_same_output_has_merged_them() -> None:
    ours, merged = weights(a_weight=drawn(6), a_gain=drawn(6, seed=1)), weights(b_weight=drawn(6, seed=2))
    assert paired(with_weights(OUTPUTS, ours, merged)) == []
    # Where the outputs differ, the weight may be wrong.
    assert [pair[:2] for pair in paired(with_weights(BY_RULE, ours, merged))] == [("a.weight", "b.weight")]
    # A weight with a partner by value is in no other.
    gain = weights(b_weight=drawn(6, seed=2), b_gain=drawn(6, seed=1))
    assert ("a.weight", "b.weight") in {pair[:2] for pair in paired(with_weights(OUTPUTS, ours, gain))}


def test_square_weights_lie_as_most_weights_of_the_model_do() -> None:
    others = {f"m{n}_weight": drawn(5, 7, seed=n) for n in range(3)}
    mine = weights(a_weight=drawn(6, 6), **others)
    turned = weights(b_weight=drawn(6, 6, seed=9), **{name: each.T.contiguous() for name, each in others.items()})
    assert ("a.weight", "b.weight", "a b -> b a", "baseline") in paired(with_weights(OUTPUTS, mine, turned))
    upright = weights(b_weight=drawn(6, 6, seed=9), **others)
    assert ("a.weight", "b.weight", "same", "baseline") in paired(with_weights(OUTPUTS, mine, upright))


@pytest.mark.parametrize("wrong", [0, 1, 2])
def test_a_weight_of_other_values_is_the_part_of_a_fused_one_that_no_other_has(wrong: int) -> None:
    parts = [drawn(4, 6, seed=n) for n in range(3)]
    mine = {f"{name}_weight": part for name, part in zip("qkv", parts, strict=True)}
    parts[wrong] = drawn(4, 6, seed=8)
    found = with_weights(outputs_of_parts("q", "k", "v"), weights(**mine), weights(qkv_weight=torch.cat(parts)))
    layouts = [pair.layout for pair in found.pairs if pair.baseline.startswith(f"{'qkv'[wrong]}.weight")]
    assert layouts == [parse_layout(f"part(index={wrong}, of=[1, 1, 1], dim=0)")]
    assert [pair.whole for pair in found.pairs] == ["target"] * 6


def test_a_part_of_another_size_than_what_is_left_is_not_guessed() -> None:
    parts = [drawn(4, 6, seed=n) for n in range(3)]
    mine = {"q_weight": parts[0], "k_weight": parts[1], "v_weight": drawn(5, 6, seed=7)}
    fused = torch.cat([*parts[:2], drawn(4, 6, seed=8)])
    found = with_weights(outputs_of_parts("q", "k", "v"), weights(**mine), weights(qkv_weight=fused))
    assert sorted(one for one, *_ in paired(found)) == ["k.weight", "q.weight"]


def test_weights_that_are_swapped_in_one_layer_are_paired_as_in_the_others() -> None:
    ours = {f"h_{n}_{name}_weight": drawn(4, 6, seed=10 * n + at) for n in range(4) for at, name in enumerate("qk")}
    theirs = {f"b{name[1:]}": value for name, value in ours.items()}
    theirs["b_1_q_weight"], theirs["b_1_k_weight"] = theirs["b_1_k_weight"], theirs["b_1_q_weight"]
    outputs = Proposal(tuple(Pair(f"h.{n}.q", f"b.{n}.{'k' if n == 1 else 'q'}") for n in range(4)))
    found = with_weights(outputs, weights(**ours), weights(**theirs))
    pairs = {one: (other, sureness) for one, other, sureness in _sure(found)}
    assert pairs["h.1.q.weight"] == ("b.1.q.weight", "rule")
    assert pairs["h.1.k.weight"] == ("b.1.k.weight", "rule")
    assert pairs["h.0.q.weight"] == ("b.0.q.weight", "exact")
    assert len(pairs) == 8
    assert found.wrong_weights
    assert all("b.1." in each for each in found.wrong_weights)


def test_outputs_that_are_paired_by_value_as_in_other_layers_stay_so() -> None:
    ours = {f"h_{n}_{name}_weight": drawn(4, 6, seed=10 * n + at) for n in range(4) for at, name in enumerate("qk")}
    theirs = {f"b{name[1:]}": value for name, value in ours.items()}
    theirs["b_1_q_weight"], theirs["b_1_k_weight"] = theirs["b_1_k_weight"], theirs["b_1_q_weight"]
    outputs = tuple(Pair(f"h.{n}.q", f"b.{n}.q") for n in range(4))
    found = with_weights(Proposal(outputs), weights(**ours), weights(**theirs))
    assert tuple(pair for pair in found.pairs if pair.target.endswith(".q")) == outputs


def test_outputs_of_a_weight_in_the_wrong_order_are_paired_as_in_other_layers() -> None:
    rows, columns = (
        parse_layout(text) for text in ("rearrange('(a b) d -> (b a) d', a=4)", "rearrange('d (a b) -> d (b a)', a=4)")
    )
    ours = {f"h_{n}_q_weight": drawn(8, 6, seed=n) for n in range(7)}
    theirs = {f"b{name[1:]}": rows.local(value) for name, value in ours.items()}
    wrong = (1, 3)
    for n in wrong:
        theirs[f"b_{n}_q_weight"] = ours[f"h_{n}_q_weight"]
    outputs = [Pair(f"h.{n}.q", f"b.{n}.q", parse_layout("same") if n in wrong else columns) for n in range(7)]
    found = with_weights(Proposal(tuple(outputs)), weights(**ours), weights(**theirs))
    layouts = {pair.target: pair.layout.text for pair in found.pairs if pair.target.endswith(".q")}
    assert layouts == {f"b.{n}.q": columns.text for n in range(7)}
    notes = {pair.target: pair.note for pair in found.pairs if "in a different order" in pair.note}
    assert sorted(notes) == ["b.1.q", "b.3.q"]
    assert len(found.wrong_weights) == len(wrong)


def test_keys_in_another_order_than_queries_are_named_once_for_all_layers() -> None:
    order = parse_layout("rearrange('(a b c) d -> (a c b) d', b=4, c=2)")
    ours = {f"h_{n}_{name}_weight": drawn(16, 8, seed=10 * n + at) for n in range(3) for at, name in enumerate("qk")}
    both = {f"b{name[1:]}": order.local(value) for name, value in ours.items()}
    assert with_weights(Proposal(()), weights(**ours), weights(**both)).odd_orders == ()
    queries_alone = {name: ours[f"h{name[1:]}"] if "_k_" in name else value for name, value in both.items()}
    found = with_weights(Proposal(()), weights(**ours), weights(**queries_alone))
    (said,) = found.odd_orders
    assert said.startswith("b.0.k.weight is h.0.k.weight in the same order, and b.0.q.weight is h.0.q.weight reordered")
    assert said.endswith(", and so in 2 other layers")
    assert found.problems == (said,)
    assert found.wrong_weights == ()


def test_a_square_matrix_that_was_not_transposed_is_named_unless_its_module_agrees() -> None:
    sizes = {"up": 32, "proj": 8, "down": 24}
    ours = {f"h.{n}.{name}.weight": drawn(rows, 8, seed=9 * n + rows) for n in range(3) for name, rows in sizes.items()}
    turned = {f"b{name[1:]}": value.T.contiguous() for name, value in ours.items()}
    assert with_weights(Proposal(()), weights(**ours), weights(**turned)).odd_orders == ()
    turned |= {f"b.{n}.proj.weight": ours[f"h.{n}.proj.weight"] for n in range(3)}
    found = with_weights(Proposal(()), weights(**ours), weights(**turned))
    assert found.odd_orders == (
        "b.0.proj.weight is h.0.proj.weight not transposed, and all 6 matrices that are not square are: being square, "
        "it fits either way, and so in 2 other layers",
    )
    agree = Proposal(tuple(Pair(f"h.{n}.proj", f"b.{n}.proj", sureness="exact") for n in range(3)))
    assert with_weights(agree, weights(**ours), weights(**turned)).odd_orders == ()


def _sure(found: Proposal) -> list[tuple[str, str, str]]:
    plain = [(pair.baseline.partition("[")[0], pair.target.partition("[")[0], pair.sureness) for pair in found.pairs]
    return [each for each in plain if "weight" in each[1]]


@pytest.mark.parametrize("wrong", ["", "rows", "leading", "paired", "other module", "far"])
def test_outputs_of_a_fused_module_are_paired_as_the_rows_of_its_weight(wrong: str) -> None:
    """The values need not match, as where the fused weight is quantised."""
    q, k = drawn(4, 6), drawn(8, 6, seed=1)
    output = drawn(2, 3, 12, seed=2)
    target = [*weights(qk_weight=torch.cat([q, k]) * 1.001), RecordedTap.of("qk#1", output)]
    baseline = weights(q_weight=q, k_weight=k)
    shape = (2, 3, 5) if wrong == "rows" else (6, 4) if wrong == "leading" else (2, 3, 4)
    baseline += [
        RecordedTap.of(
            f"{'x' if wrong == 'other module' else 'q'}#1",
            (output[..., :4] * 1.2 if shape == (2, 3, 4) and wrong != "far" else drawn(*shape, seed=3)),
        )
    ]
    baseline += [RecordedTap.of("k#1", output[..., 4:] * 1.2)]
    left: dict[str, str] = {tap.name: "no match" for tap in baseline[2:]}
    proposal = Proposal((), left, {"qk#1": "no match"})
    if wrong == "paired":
        proposal = Proposal((Pair("q#1", "y"),), {"k#1": "no match"}, {"qk#1": "no match"})
    found = with_weights(proposal, baseline, target)
    outputs = [(p.baseline, p.layout.text, p.whole, p.sureness) for p in found.pairs if p.target == "qk#1"]
    of_q = ("q#1", "part(index=0, of=[1, 1, 1], dim=-1)", "target", "rule")
    of_k = ("k#1", "part(index=1, of=[1, 2], dim=-1)", "target", "rule")
    assert outputs == ([of_k] if wrong else [of_q, of_k])
    assert "qk#1" not in found.unmatched_target
    assert list(found.unmatched_baseline) == ([] if wrong in ("", "paired") else [baseline[2].name])


def test_an_output_of_a_wrong_weight_is_paired_as_in_other_layers_for_one_reason() -> None:
    rules = rules_of([Pair(f"m.{n}.q", f"t.{n}.q") for n in range(2)])
    turned = parse_layout("a b -> b a")
    why = "as in 2 other layers, because the weights of t.2.q are"
    right = Pair("m.2.q", "t.2.q", sureness="rule", rel=None)
    for found, what in (
        (Pair("m.3.q", "t.2.q", rel=0.1), "another module's"),
        (Pair("m.2.q", "t.2.q", turned, rel=0.1), "in a different order"),
    ):
        assert _by_the_first_rule(rules, found) == right.noted(f"{why} {what}")
    part = parse_layout("part(index=0, of=[1, 1])")
    for kept in (
        Pair("m.2.q", "t.2.q"),
        Pair("m.3.q", "t.2.q", turned),
        Pair("m.2.q", "t.2.q", part),
        Pair("m.2.q", "t.2.k", turned),
    ):
        assert _by_the_first_rule(rules, kept) is kept


def test_weights_of_two_modules_have_one_role_only_if_no_other_has_it() -> None:
    def taps(*names: str) -> list[RecordedTap]:
        return [RecordedTap.of(name, torch.ones(2)) for name in names]

    def found(ours: list[RecordedTap], theirs: list[RecordedTap]) -> list[tuple[str, str]]:
        return [(one.name, other.name) for one, other in _with_one_role(ours, theirs)]

    assert found(taps("a.gamma", "a.bias", "a.x"), taps("b.weight", "b.x", "b.y")) == [
        ("a.gamma", "b.weight"),
        ("a.x", "b.x"),
    ]
    assert found(taps("a.gamma", "a.weight", "a.bias"), taps("b.weight", "b.beta")) == [("a.bias", "b.beta")]
