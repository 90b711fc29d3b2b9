"""Weights of a port that have other names, are fused or transposed: paired by value, and named where they differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from kit.renamed import WIDTH, WORDS, Port, port, reference
from kit.support import IS_2_6, has_compiler
from torch import nn

import graftlab as gl
from graftlab.comparison.answers import Comparison

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300)]


def compared(change: Callable[[Port], None] = lambda model: None, *, tied: bool = True) -> Comparison:
    def changed() -> nn.Module:
        model = port(tied)
        with torch.no_grad():
            change(model)
        return model

    ids = torch.randint(0, 50, (2, 9), generator=torch.Generator().manual_seed(3))
    ids[0, 0] = 7
    return gl.compare(reference, changed, ids)


def test_weights_that_are_wrong_in_a_port_are_named_each_with_how_it_differs() -> None:
    def change(model: Port) -> None:
        wrong = model.h[0].attn.c_proj.weight
        wrong.copy_(wrong.T.clone())
        model.h[1].attn.c_attn.weight[:, :WIDTH].mul_(1.25)
        model.h[2].mlp.c_fc.weight[2, 5] = float("nan")
        model.h[2].ln_2.weight[5] = 3.0
        model.h[1].mlp.c_proj.bias.zero_()

    with (comparison := compared(change)).session:
        text = comparison.text
        assert comparison.answer == "differ"
    wrong = "h.0.attn.c_proj.weight is layers.0.self_attn.o_proj.weight in the layout 'same', where 2 others"
    assert text.startswith(wrong)
    differing = text[text.index("The weights already differ: ") :].partition("\n")[0]
    assert differing.endswith("With the baseline's weights the target agrees.")
    for weight, where, hint in (
        ("self_attn.o_proj.weight", "layer 0", "dims 0 and 1 are transposed"),
        ("self_attn.q_proj.weight", "layer 1", "the target's values are 5/4 times the baseline's"),
        ("up.weight", "layer 2", "1 of 4096 numbers are not finite on the target only"),
        ("post_norm.weight", "layer 2", "the sides differ only at index 5 of dim 0"),
        ("down.bias", "layer 1", "the target's values are all zero"),
    ):
        assert f"layers.*.{weight} in {where} (" in differing, text
        assert hint in next(line for line in text.splitlines() if line.startswith(f"Hint (layers.*.{weight})")), text


def test_two_fused_weights_that_are_swapped_are_named_as_such() -> None:
    def change(model: Port) -> None:
        for swapped in (model.h[1].attn.c_attn.weight, model.h[1].attn.c_attn.bias):
            q, k, v = swapped.split(WIDTH, -1)
            swapped.copy_(torch.cat([k, q, v], -1))

    with (comparison := compared(change)).session:
        text = comparison.text
        assert comparison.answer == "differ"
        # The code is right: its outputs are paired as the weights should be.
        assert comparison.named == []
    for kind in ("weight", "bias"):
        q, k = (f"layers.1.self_attn.{name}_proj.{kind}" for name in "qk")
        assert (
            f"h.1.attn.c_attn.{kind} has {q} in place of its k, and {k} in place of its q: the two are swapped." in text
        )
    assert "With the baseline's weights the target agrees." in text


def test_an_embeddings_row_is_not_padding_and_tied_weights_pair_with_both() -> None:
    def change(model: Port) -> None:
        model.wte.weight[7].mul_(1.5)

    with (comparison := compared(change, tied=False)).session:
        assert comparison.answer == "differ"
        assert "The weights already differ: wte.weight (rel_l2 " in comparison.text
        assert "only at index 7 of dim 0, the target's values are 3/2 times the baseline's" in comparison.text
        assert comparison.match is not None
        partners = {pair.target for pair in comparison.match.pairs if pair.baseline.startswith("embed.weight")}
        assert partners == {"wte.weight[kind=param]", "head.weight[kind=param]"}


def short_reference() -> nn.Module:
    """The reference with one layer: a match of rows takes seconds for each more."""
    model = reference()
    model.layers = model.layers[:1]
    return model


class Requests(nn.Module):
    """The reference, called with its own batch of requests in this order."""

    def __init__(self, order: list[int], wrong: bool = False) -> None:
        super().__init__()
        self.model, self.order, self.wrong = short_reference(), order, wrong

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        ids = torch.randint(0, WORDS, (4, 6), generator=torch.Generator().manual_seed(3))[self.order]
        return self.model(torch.cat([ids[:1].flip(1), ids[1:]]) if self.wrong else ids) * given


@pytest.mark.parametrize("wrong", [False, True])
def test_requests_in_another_order_agree_only_if_all_of_them_do(wrong: bool) -> None:
    ours, theirs = partial(Requests, [0, 1, 2, 3]), partial(Requests, [2, 0, 3, 1], wrong)
    comparison = gl.compare(lambda: ours(), lambda: theirs(), torch.ones(1), match=True)
    with comparison.session:
        # The returned values cannot be compared row by row, and clear or accuse nothing.
        assert (comparison.answer == "agree") is not wrong, comparison.text
        assert "Not checked: the returned values have their rows in a different order on each side." in comparison.text


class MicroBatches(nn.Module):
    """The reference, called with parts of its batch; the last may be wrong."""

    def __init__(self, parts: int, wrong: bool = False) -> None:
        super().__init__()
        self.model, self.parts, self.wrong = short_reference(), parts, wrong

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        *first, last = ids.chunk(self.parts)
        return torch.cat([self.model(part) for part in (*first, last.flip(1) if self.wrong else last)])


def test_a_micro_batch_that_matches_nothing_is_not_cleared() -> None:
    ids = torch.randint(0, WORDS, (8, 6), generator=torch.Generator().manual_seed(1))
    comparison = gl.compare(lambda: MicroBatches(1), lambda: MicroBatches(4, True), ids, match=True)
    with comparison.session:
        assert comparison.answer != "agree", comparison.text
        imported = comparison.session.run(has_compiler, has_compiler)
    assert [*imported.baseline, *imported.target] == [IS_2_6, IS_2_6]
