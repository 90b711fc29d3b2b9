"""Where two traces of one computation part: the first lost operations of each side."""

from __future__ import annotations

import math
from collections.abc import Callable, ItemsView, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from graftlab.lines.fingerprints import Fingerprint, fingerprint
from graftlab.lines.first_lost import LostOnBothSides, first_lost
from graftlab.lines.known_values import is_sum
from graftlab.lines.lost import LostOperation, StateRead
from graftlab.lines.operations import OperationRecorder, TracedValue
from graftlab.lines.traces import SliceTrace, slice_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


Q, K, V = (drawn(2, 5, 4, 8, seed=seed) for seed in (1, 2, 3))
WEIGHT = drawn(6, 8, seed=4)


def trace(function: Callable[..., Tensor], *inputs: Tensor) -> SliceTrace:
    """The operations of a function between its arguments, which count as taps, and its result."""
    recorder = OperationRecorder()
    with recorder:
        for place, each in enumerate(inputs):
            recorder.set_by_tap(each, f"input{place}", changed=False)
        result = recorder.read(function(*inputs))
    return slice_of(recorder, result)


def compared(baseline: Callable[..., Tensor], target: Callable[..., Tensor], *inputs: Tensor) -> LostOnBothSides:
    return first_lost([trace(baseline, *inputs)], [trace(target, *inputs)], 0)


def sources(found: Sequence[LostOperation]) -> list[str]:
    return list(dict.fromkeys(each.operation.frames[0].source for each in found))


# ---- right and wrong attention --------------------------------------------------------------------------------------


def eager(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (1 / math.sqrt(8))
    scores = scores + torch.full((5, 5), -math.inf).triu(1)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v)


def fused(scale: float | None) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale).transpose(1, 2)

    return attention


def test_a_wrong_scale_is_lost_at_the_fused_call_and_at_the_eager_product() -> None:
    found = compared(eager, fused(0.125), Q, K, V)
    assert sources(found.target)[0].startswith("return F.scaled_dot_product_attention(")
    assert "scale=0.125" in found.target[0].operation.call
    assert found.target[0].has_equal_inputs
    assert sources(found.baseline)[0].startswith('scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (1')


def test_each_rank_is_compared_with_the_same_one_or_with_the_only_one() -> None:
    def computes(count: int, factor: float = 1.0) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            for _ in range(count):
                x = x * 2
            return x.exp() * factor

        return function

    x = drawn(4, 8) / 100
    ours, theirs = [trace(computes(1), x), trace(computes(3), x)], [trace(computes(1), x), trace(computes(3, 0.5), x)]
    own, other = first_lost(ours, theirs, 0), first_lost(ours, theirs, 1)
    assert (own.baseline, own.target) == ([], [])
    assert "0.5" in other.target[0].operation.call
    # Compared with the other rank, it would have lost two more operations.
    assert len(other.target) == 1
    assert first_lost(ours[1:], theirs, 1) == other


def test_values_that_are_read_many_times_do_not_delay_the_search() -> None:
    def doubled(factor: float) -> Callable[[Tensor], Tensor]:
        def computes(x: Tensor) -> Tensor:
            # 2 ** 40 paths lead to the result.
            for _ in range(40):
                x = x * x.roll(1).cos()
            return x * factor + 1

        return computes

    found = compared(doubled(1.0), doubled(1.5), torch.linspace(0.5, 2.0, 24))
    assert sources(found.target)[0] == "return x * factor + 1"


def test_a_right_fused_attention_has_only_its_own_result_which_the_eager_one_has_too() -> None:
    theirs, ours = trace(fused(None), Q, K, V), trace(eager, Q, K, V)
    found = first_lost([ours], [theirs], 0)
    # Its result agrees even in order, so nothing of it is lost at any level.
    assert [each.operation.name for each in found.target if not each.operation.only_arranges] == []


# ---- what order and sign hide ---------------------------------------------------------------------------------------


def rotated(sign: float) -> Callable[[Tensor], Tensor]:
    def rotate(x: Tensor) -> Tensor:
        angle = torch.arange(5.0)[:, None] * 0.3
        sine = angle.sin() if sign > 0 else -angle.sin()
        first, second = x[..., 0, :4], x[..., 0, 4:]
        return first * angle.cos() - second * sine

    return rotate


def test_a_wrong_sign_is_followed_back_to_where_it_arises() -> None:
    found = compared(rotated(1), rotated(-1), Q)
    assert sources(found.target)[0] == "sine = angle.sin() if sign > 0 else -angle.sin()"
    assert found.target[0].is_suspect
    assert not any(each.has_equal_inputs for each in found.target[1:])


def test_what_computes_from_a_count_of_one_side_alone_is_reported_beside_it() -> None:
    steps = 10000 ** -(torch.arange(4.0) / 4)
    table = torch.polar(torch.ones(5, 4), torch.outer(torch.arange(5.0), steps))

    def by_table(x: Tensor) -> Tensor:
        return torch.view_as_complex(x[..., 0, :].reshape(2, 5, 4, 2)) * table

    def by_angles(x: Tensor) -> Tensor:
        places = torch.arange(5)[:, None]
        angles = places.float() * (steps * 0.5)
        pairs = x[..., 0, :].reshape(2, 5, 4, 2)
        return torch.complex(
            pairs[..., 0] * angles.cos() - pairs[..., 1] * angles.sin(),
            pairs[..., 0] * angles.sin() + pairs[..., 1] * angles.cos(),
        )

    found = sources(compared(by_table, by_angles, Q).target)
    assert found[:2] == ["places = torch.arange(5)[:, None]", "angles = places.float() * (steps * 0.5)"]


def test_what_only_puts_constants_at_indices_is_marked_and_what_computes_is_not() -> None:
    def summed(x: Tensor, edges: Tensor) -> Tensor:
        return torch.zeros(4, 8).index_add(0, edges[1], x[edges[0]]) * 0.5

    def marked(matrix: Callable[[Tensor], Tensor]) -> dict[str, bool]:
        def by_matrix(x: Tensor, edges: Tensor) -> Tensor:
            return matrix(edges) @ (x * 0.4)

        edges = torch.tensor([[0, 1, 2, 3, 3], [1, 2, 3, 0, 2]])
        return {
            each.operation.name: each.puts_constants for each in compared(summed, by_matrix, drawn(4, 8), edges).target
        }

    counts = marked(lambda edges: torch.zeros(4, 4).index_put((edges[1], edges[0]), torch.ones(5)))
    assert (counts["index_put"], counts["mul"]) == (True, False)
    # Different numbers are weights, and a mask has no indices.
    weights = torch.linspace(0.1, 0.9, 5)
    assert not marked(lambda edges: torch.zeros(4, 4).index_put((edges[1], edges[0]), weights))["index_put"]
    hidden = torch.eye(4).bool()
    assert not marked(lambda edges: (torch.zeros(4, 4) + edges[0, 0]).masked_fill(hidden, 0.3))["masked_fill"]


def test_a_wrong_order_of_heads_is_followed_back_to_where_it_arises() -> None:
    def shared(repeat: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
        def attend(q: Tensor, k: Tensor) -> Tensor:
            k = repeat(k[:, :, :2])
            return torch.einsum("bqhd,bkhd->bhqk", q, k)

        return attend

    found = compared(
        shared(lambda x: x.repeat_interleave(2, dim=2)),
        shared(lambda x: x.repeat(1, 1, 2, 1)),
        *(Q, K),
    )
    assert "x.repeat(1, 1, 2, 1)" in sources(found.target)[0]
    assert found.target[0].is_suspect


def test_a_different_layout_is_not_a_difference() -> None:
    def heads_first(x: Tensor) -> Tensor:
        return (x.transpose(1, 2) * 2).transpose(1, 2) + 1

    found = compared(lambda x: x * 2 + 1, lambda x: heads_first(x) + 1, Q)
    assert sources(found.target) == ["found = compared(lambda x: x * 2 + 1, lambda x: heads_first(x) + 1, Q)"]


# ---- casts, missing operations and parameters -----------------------------------------------------------------------


def test_a_cast_in_the_wrong_place_is_found_in_low_precision() -> None:
    weight = drawn(8, seed=5).bfloat16()

    def norm(casts_first: bool) -> Callable[[Tensor], Tensor]:
        def normed(x: Tensor) -> Tensor:
            y = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-6)
            if casts_first:
                return weight * y.to(x.dtype)
            return (weight * y).to(x.dtype)

        return normed

    found = compared(norm(False), norm(True), Q.bfloat16())
    assert sources(found.target)[0] == "return weight * y.to(x.dtype)"
    assert sources(found.baseline)[0] == "return (weight * y).to(x.dtype)"


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_lines_between_operations_on_nested_tensors_are_named(layout: torch.layout) -> None:
    def doubled(factor: float) -> Callable[[Tensor], Tensor]:
        def computes(x: Tensor) -> Tensor:
            nested = torch.nested.as_nested_tensor([x[:2], x[2:]], layout=layout) * 2
            rows = torch.cat(nested.unbind()).tanh()
            return rows * factor

        return computes

    found = compared(doubled(1.5), doubled(2.5), drawn(5, 8))
    assert sources(found.target) == ["return rows * factor"]


def test_an_operation_that_the_target_lacks_is_named_on_the_baseline() -> None:
    found = compared(lambda x: x.tanh() * 3, lambda x: x.tanh(), Q)
    assert found.target == []
    assert [each.operation.call for each in found.baseline] == ["mul(f32[2, 5, 4, 8], 3)"]


def test_fused_weights_are_not_a_difference_and_a_missing_bias_beside_them_is() -> None:
    bias, both = drawn(6, seed=6), torch.cat([WEIGHT, 2 * WEIGHT])

    def separate(x: Tensor) -> Tensor:
        return F.linear(x, WEIGHT) * F.linear(x, 2 * WEIGHT, bias)

    def together(x: Tensor) -> Tensor:
        first, second = F.linear(x, both).chunk(2, -1)
        return first * second

    found = compared(separate, together, Q)
    assert sources(found.target)[0] == "return first * second"
    assert any(each.operation.name == "addmm" for each in found.baseline)


def test_what_is_only_multiplied_by_zero_is_not_blamed() -> None:
    """The recurrent side's first decay meets an empty state; the other side computes no such decay."""

    def recurrent(x: Tensor, w: Tensor) -> Tensor:
        state = torch.zeros(8)
        steps = []
        for t in range(2):
            state = x[t] + w[t].exp() * state
            steps.append(state)
        return F.layer_norm(torch.stack(steps), (8,))

    def closed(x: Tensor, w: Tensor) -> Tensor:
        return F.layer_norm(torch.cat([x[:1], x[1:] + w[1:].exp() * x[:1]]), (8,), eps=0.1)

    found = compared(recurrent, closed, drawn(2, 8), drawn(2, 8, seed=1))
    assert [each.operation.name for each in found.baseline] == ["native_layer_norm"]
    assert [each.operation.name for each in found.target] == ["native_layer_norm"]


def test_a_product_that_is_wrongly_zero_does_not_excuse_what_leads_to_it() -> None:
    def gated(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.sigmoid(x @ w)

    def dead(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.relu(x @ w - 100)

    found = compared(gated, dead, drawn(6, 8), drawn(8, 8, seed=1))
    assert [each.operation.name for each in found.target] == ["sub", "relu", "mul"]


def test_a_differing_constant_comes_before_its_readers() -> None:
    def angles(theta: float) -> Callable[[Tensor], Tensor]:
        def rotate(x: Tensor) -> Tensor:
            frequency = theta ** (-torch.arange(8) / 8)
            return x * frequency.cos()

        return rotate

    found = compared(angles(1e4), angles(1e6), Q)
    assert sources(found.target)[0] == "frequency = theta ** (-torch.arange(8) / 8)"
    assert found.target[0].has_equal_inputs
    assert found.target[0].partner == found.baseline[0].operation.index


def test_shards_of_two_ranks_are_known_and_a_missing_sum_of_theirs_is_not() -> None:
    def whole(x: Tensor) -> Tensor:
        return (F.linear(x, WEIGHT).relu() @ WEIGHT).tanh()

    def shard(rank: int) -> Callable[[Tensor], Tensor]:
        own = WEIGHT.chunk(2)[rank]
        return lambda x: (F.linear(x, own).relu() @ own).tanh()

    found = first_lost([trace(whole, Q)], [trace(shard(rank), Q) for rank in (0, 1)], 1)
    assert [each.operation.name for each in found.target if each.follows_inputs] == ["tanh"]


def test_summands_that_no_rank_sums_are_named_with_the_line_that_makes_them() -> None:
    def shard(rank: int) -> Callable[[Tensor], Tensor]:
        own = WEIGHT.chunk(2)[rank]

        def partial(x: Tensor) -> Tensor:
            inner = F.linear(x, own).relu()
            return inner @ own

        return partial

    def halved(x: Tensor) -> Tensor:
        return (F.linear(x, WEIGHT).relu() @ WEIGHT) / 2

    whole = trace(lambda x: F.linear(x, WEIGHT).relu() @ WEIGHT, Q)
    found = first_lost([whole], [trace(shard(rank), Q) for rank in (0, 1)], 1)
    assert [each.lacks_sum for each in found.target] == [True]
    assert sources(found.target) == ["return inner @ own"]
    # Where a rank's result is unknown, the sum is unknown.
    shards = [trace(shard(rank), Q) for rank in (0, 1)]
    found = first_lost([whole], [*shards, replace(shards[1], fingerprints={})], 1)
    assert not any(each.lacks_sum for each in found.target)
    # Copies of a mean have the same sum.
    found = first_lost([whole], [trace(halved, Q)] * 2, 1)
    assert [(each.operation.name, each.lacks_sum) for each in found.target] == [("div", False)]


@pytest.mark.parametrize("ranks", [2, 3])
def test_summands_are_right_where_the_ranks_sum_them_wrongly(ranks: int) -> None:
    def on_rank(rank: int) -> SliceTrace:
        own = WEIGHT.chunk(ranks)[rank]

        def summed(x: Tensor) -> Tensor:
            part = F.linear(x, own).relu() @ own
            together = part * -3
            return together.tanh()

        found = trace(summed, Q)
        reduced = {"name": "allreduce_", "is_collective": True}
        operations = [replace(each, **reduced) if each.name == "mul" else each for each in found.operations]
        return replace(found, operations=tuple(operations))

    whole = trace(lambda x: (F.linear(x, WEIGHT).relu() @ WEIGHT).tanh(), Q)
    found = first_lost([whole], [on_rank(rank) for rank in range(ranks)], 0)
    assert sources(found.target)[0] == "together = part * -3"


def test_copies_on_all_ranks_are_no_summands_of_a_value_that_they_add_up_to() -> None:
    def halved(x: Tensor) -> Tensor:
        h = F.linear(x, WEIGHT).relu() @ WEIGHT
        half = h / 2
        return half.tanh()

    whole = trace(lambda x: (F.linear(x, WEIGHT).relu() @ WEIGHT).tanh(), Q)
    found = first_lost([whole], [trace(halved, Q)] * 2, 1)
    assert sources(found.target)[0] == "half = h / 2"


@pytest.mark.parametrize(
    ("collective", "is_summed"), [("allreduce_", True), ("reduce_scatter_", True), ("allgather_", False)]
)
def test_only_results_that_the_ranks_reduce_are_summands(collective: str, is_summed: bool) -> None:
    def on_rank(rank: int) -> SliceTrace:
        def shared(x: Tensor) -> Tensor:
            part = x * (rank + 3)
            together = part.clone()
            return together.tanh()

        own = trace(shared, Q)
        operations = [
            replace(each, name=collective, is_collective=True) if each.name == "clone" else each
            for each in own.operations
        ]
        return replace(own, operations=operations)

    found = first_lost([trace(lambda x: (x * 2).tanh(), Q)], [on_rank(0), on_rank(1)], 0)
    part = next(each for each in found.target if each.operation.name == "mul")
    assert part.is_summand is is_summed


def test_a_wrong_number_alone_is_found_and_the_right_ones_beside_it_are_not() -> None:
    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        def scale(x: Tensor) -> Tensor:
            size = x.norm()
            whole: Tensor = size * factor
            return x * whole

        return scale

    assert sources(compared(scaled(2), scaled(3), Q).target)[0] == "whole: Tensor = size * factor"

    def beside(factor: float) -> Callable[[Tensor], Tensor]:
        def scale(x: Tensor) -> Tensor:
            size = x.norm()
            right: Tensor = size * 5
            whole: Tensor = size * factor
            return x * whole + right

        return scale

    found = compared(beside(2), beside(3), Q)
    for side in (found.baseline, found.target):
        assert "right: Tensor = size * 5" not in sources(side)
        assert sources(side)[0] == "whole: Tensor = size * factor"


# ---- caches ---------------------------------------------------------------------------------------------------------


def test_a_cache_row_that_was_not_written_is_lost_where_the_cache_is_read() -> None:
    def cached(written: Sequence[int]) -> Callable[[Tensor, Tensor], Tensor]:
        def attend(q: Tensor, k: Tensor) -> Tensor:
            cache = torch.zeros(8, 8)
            for row in written:
                cache[row : row + 1] = k[0, row, :1]
            return q[0, :, 0] @ cache[:5].T

        return attend

    found = compared(cached(range(5)), cached([0, 1, 3, 4]), Q, K)
    assert sources(found.target)[0] == "return q[0, :, 0] @ cache[:5].T"
    assert not any("cache[row" in source for source in sources(found.target))


def test_leaving_out_a_part_is_a_suspect_before_the_readers_of_the_rest() -> None:
    def scored(drop: int) -> Callable[[Tensor, Tensor], Tensor]:
        def attend(q: Tensor, k: Tensor) -> Tensor:
            k = k[0, :, 0]
            if drop:
                k = k[drop:]
            return (q[0, :1, 0] @ k.T).softmax(-1) @ k

        return attend

    found = compared(scored(0), scored(1), Q, K)
    assert sources(found.target)[:2] == ["k = k[drop:]", "return (q[0, :1, 0] @ k.T).softmax(-1) @ k"]
    assert found.target[0].is_suspect


def test_state_that_differs_is_named_by_its_path_at_the_line_that_reads_it() -> None:
    class Paged:
        def __init__(self, scale: float) -> None:
            self.pages = {"k": [drawn(8, 6, seed=7) * scale]}

        def read(self, x: Tensor) -> Tensor:
            return x @ self.pages["k"][0][2:]

    found = compared(Paged(1).read, Paged(1.1).read, drawn(3, 6))
    assert sources(found.target)[0] == 'return x @ self.pages["k"][0][2:]'
    assert found.target[0].state == (StateRead("self.pages['k'][0]"),)


def test_a_table_whose_rows_the_other_side_computes_is_named_only_if_these_differ() -> None:
    angle = drawn(6, seed=7)

    class Table:
        def __init__(self, turn: float) -> None:
            self.cos = (torch.arange(8)[:, None] * angle * turn).cos()

        def read(self, x: Tensor) -> Tensor:
            return x * self.cos[:5]

    def computes(x: Tensor) -> Tensor:
        return x.square() * (torch.arange(5)[:, None] * angle).cos()

    def state(turn: float) -> set[str]:
        found = compared(computes, Table(turn).read, drawn(5, 6)).target
        return {read.name for each in found for read in each.state}

    assert state(1) == set()
    assert state(1.1) == {"self.cos"}


def test_a_single_number_of_state_is_not_named_because_many_values_equal_it() -> None:
    class Counted:
        def __init__(self, count: float) -> None:
            self.count, self.scale = torch.tensor(count), drawn(6, seed=7)

        def read(self, x: Tensor) -> Tensor:
            return x * self.scale * self.count

    found = compared(Counted(3).read, Counted(4).read, drawn(3, 6))
    assert sources(found.target)[0] == "return x * self.scale * self.count"
    assert found.target[0].state == ()


class Decoder:
    """Writes a key into a cache, and then reads the cache."""

    def __init__(self, slot: int) -> None:
        self.keys = drawn(8, 6, seed=7)
        self.slot = slot

    def step(self, x: Tensor) -> Tensor:
        self.keys[self.slot] = x[0]
        return x @ self.keys[:4].T


def test_state_that_was_written_is_named_with_the_line_that_wrote_it_last() -> None:
    found = compared(Decoder(1).step, Decoder(2).step, drawn(3, 6))
    (read,) = found.target[1].state
    assert read.name == "self.keys"
    assert read.writer is not None
    assert read.writer.frames[0].source == "self.keys[self.slot] = x[0]"
    assert found.baseline[1].state[0].name == "self.keys"
    # The same row at another place.
    places = [side[0].operation.call for side in (found.baseline, found.target)]
    assert places == ["copy_(f32[6], f32[6]) at [1, 0]", "copy_(f32[6], f32[6]) at [2, 0]"]


def ringing(slot: Callable[[int], int], reads: float = 1) -> Callable[[Tensor, Tensor], Tensor]:
    """Attention to a cache of four slots, to which each row is written."""

    def put(cache: Tensor, place: int, row: Tensor) -> None:
        cache[:, place] = row

    def attend(x: Tensor, kept: Tensor) -> Tensor:
        cache = kept.clone()
        for step, row in enumerate(x[:5]):
            put(cache, slot(step), row)
        put(cache, slot(5), x[5])
        return (cache @ cache.mT * reads).softmax(-1) @ cache

    return attend


X, KEPT = drawn(6, 2, 8), drawn(2, 4, 8, seed=7)


def test_a_row_written_to_another_place_is_named_where_it_is_written() -> None:
    right, clamped = ringing(lambda step: step % 4), ringing(lambda step: min(step, 3))
    found = compared(right, clamped, X, KEPT)
    assert sources(found.target)[0] == sources(found.baseline)[0] == "cache[:, place] = row"
    calls = [side[0].operation.call for side in (found.baseline, found.target)]
    assert calls == [f"copy_(f32[2, 8], f32[2, 8]) at [0, {slot}, 0]" for slot in (0, 3)]
    assert found.target[0].has_equal_inputs
    # The line is right where the loop calls it.
    found = compared(right, ringing(lambda step: step % 4 if step < 5 else 0), X, KEPT)
    assert sources(found.target)[0] == "put(cache, slot(5), x[5])"


def test_a_cache_that_differs_itself_has_the_line_that_wrote_to_another_place() -> None:
    def written(slot: int) -> Callable[[Tensor, Tensor], Tensor]:
        def write(x: Tensor, kept: Tensor) -> Tensor:
            cache = kept.clone()
            cache[:, slot] = x[0]
            given = torch.empty_like(kept)
            given.copy_(cache)
            return given

        return write

    found = compared(written(1), written(2), X, KEPT)
    assert sources(found.target)[0] == sources(found.baseline)[0] == "cache[:, slot] = x[0]"


def test_writes_that_begin_at_the_same_place_are_named_without_it() -> None:
    def written(stride: int) -> Callable[[Tensor, Tensor], Tensor]:
        def write(x: Tensor, kept: Tensor) -> Tensor:
            cache = kept.clone()
            cache[:, : 2 * stride : stride] = x[:2].transpose(0, 1)
            return (cache @ cache.mT).softmax(-1)

        return write

    found = compared(written(1), written(2), X, KEPT)
    assert found.target
    assert not any(" at [" in each.operation.call for each in (*found.target, *found.baseline))


def test_a_row_written_to_another_place_is_right_where_no_reader_differs() -> None:
    right = ringing(lambda step: step % 4)
    found = compared(right, ringing(lambda step: (step + 1) % 4, reads=2), X, KEPT[:, :1].expand(2, 4, 8))
    assert not any("cache[:, place]" in source for source in sources(found.target)[:1])


class CountedValues(dict[int, TracedValue]):
    """Values of a trace, and how often they were read from first to last."""

    passes = 0

    def items(self) -> ItemsView[int, TracedValue]:
        self.passes += 1
        return super().items()


def test_a_trace_is_read_a_few_times_however_much_is_lost() -> None:
    def served(wrong: bool) -> Callable[[Tensor], Tensor]:
        def decode(x: Tensor) -> Tensor:
            cache, results = torch.zeros(0, 16), []
            for place, row in enumerate(x.reshape(-1, 16)):
                cache = torch.cat([cache, row[None]])
                read = cache * (1.1 if wrong and place > 3 else 1.0)
                results.append(read.reshape(-1, 2, 8).transpose(1, 2).flatten(1).tanh().sum(0))
            return torch.stack(results)

        return decode

    ours, theirs = (trace(served(wrong), Q) for wrong in (False, True))
    counted = [CountedValues(each.values) for each in (ours, theirs)]
    ours, theirs = (replace(each, values=values) for each, values in zip((ours, theirs), counted, strict=True))
    found = first_lost([ours], [theirs], 0)
    assert "read = cache * (1.1 if wrong and place > 3 else 1.0)" in sources(found.target)
    # A serving loop has thousands of operations, and a pass for each of them took longer than anyone waits.
    assert max(each.passes for each in counted) < 10


def test_a_variable_that_is_written_in_place_is_not_state() -> None:
    def scored(factor: float) -> Callable[[Tensor], Tensor]:
        def score(x: Tensor) -> Tensor:
            y = x * 2
            y.mul_(factor)
            return y.tanh()

        return score

    found = compared(scored(1.5), scored(1.6), drawn(3, 6))
    assert [each.state for each in found.target] == [()] * len(found.target)


def test_an_operation_that_changes_nothing_is_the_counterpart_of_one_that_does() -> None:
    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        return lambda x: (x * factor) @ WEIGHT.T

    found = compared(scaled(1.0), scaled(1.07), drawn(3, 8)).target[0]
    assert found.counterpart is not None
    assert found.counterpart.call == "mul(f32[3, 8], 1)"

    def summed(factor: float) -> SliceTrace:
        own = trace(scaled(factor), drawn(3, 8))
        operations = [replace(each, is_collective=each.name == "mul") for each in own.operations]
        return replace(own, operations=tuple(operations))

    # A collective's result may arrive after it has returned.
    collective = first_lost([summed(1.0)], [summed(1.07)], 0).target[0]
    assert (collective.operation.name, collective.counterpart) == ("mul", None)


def unpacked(is_swapped: bool) -> Callable[[Tensor], Tensor]:
    def cell(x: Tensor) -> Tensor:
        if is_swapped:
            forget, enter, new = x.chunk(3, -1)
        else:
            enter, forget, new = x.chunk(3, -1)
        return forget.sigmoid() * 0.5 + enter.sigmoid() * new.tanh()

    return cell


def test_parts_that_are_unpacked_in_another_order_have_the_line_that_unpacks_them() -> None:
    found = compared(unpacked(False), unpacked(True), drawn(3, 6))
    assert sources(found.target)[0] == "forget, enter, new = x.chunk(3, -1)"
    assert sources(found.baseline)[0] == "enter, forget, new = x.chunk(3, -1)"
    assert found.target[0].is_suspect


def test_a_line_that_reads_another_operand_is_blamed_itself() -> None:
    def gated(first: int) -> Callable[[Tensor], Tensor]:
        def gate(x: Tensor) -> Tensor:
            parts = x.chunk(2, -1)
            if first:
                return parts[0] * parts[1].sigmoid()
            return parts[1] * parts[0].sigmoid()

        return gate

    found = compared(gated(0), gated(1), drawn(3, 6))
    assert sources(found.target)[0] == "return parts[0] * parts[1].sigmoid()"


def test_lines_whose_source_cannot_be_read_are_not_taken_for_the_same() -> None:
    def gated(first: int) -> Callable[[Tensor], Tensor]:
        one, other = ("one", "other") if first else ("other", "one")
        text = f"def gate(x):\n    one, other = x[..., :3], x[..., 3:]\n    return {one} * {other}.sigmoid()\n"
        made: dict[str, Any] = {}
        exec(compile(text, "/nowhere/model.py", "exec"), made)
        return made["gate"]  # type: ignore[no-any-return]

    found = compared(gated(0), gated(1), drawn(3, 6))
    assert [each.operation.frames[0].source for each in found.target] == ["", ""]
    # Nothing tells that the slices are at fault.
    assert [each.operation.frames[0].line for each in found.target] == [3, 3]
    assert not any(each.is_suspect for each in found.target)


def test_data_that_the_other_side_draws_for_another_use_is_not_blamed() -> None:
    def projected(other: bool) -> SliceTrace:
        recorder, weight = OperationRecorder(), torch.nn.Parameter(WEIGHT, requires_grad=False)
        with recorder:
            generator = torch.Generator().manual_seed(3)
            x, memory = (torch.randn(4, 8, generator=generator) for _ in range(2))
            recorder.read(x @ weight.T)
            recorder.read(memory + 1)
            result = recorder.read((x if other else memory).tanh() @ weight.T)
        return slice_of(recorder, result)

    found = first_lost([projected(False)], [projected(True)], 0).target
    assert found[0].operation.name == "tanh"


# ---- what agrees by chance ------------------------------------------------------------------------------------------


def scan(swapped: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    def scanned(u: Tensor, b: Tensor, c: Tensor) -> Tensor:
        driven = u * (c if swapped else b)
        h = torch.zeros(4, 8)
        ys = []
        for t in range(5):
            h = h * 0.5 + driven[t]
            ys.append(h * (b if swapped else c)[t])
        return torch.stack(ys)

    return scanned


def test_a_first_step_that_agrees_by_chance_does_not_clear_its_operands() -> None:
    # b and c are exchangeable where nothing was carried over yet.
    found = compared(scan(False), scan(True), *(each[0] for each in (Q, K, V)))
    assert sources(found.target)[0] == "driven = u * (c if swapped else b)"


def normed(training: bool, eps: float = 1e-5, rectifies: bool = True) -> Callable[[Tensor], Tensor]:
    """Two convolutions, the first with a batch norm whose running statistics are like those that both sides have."""
    mean, variance, weight = drawn(4, seed=5), drawn(4, seed=6).abs() + 0.5, drawn(4, 4, 3, 3, seed=7)

    def run(x: Tensor) -> Tensor:
        hidden = F.relu(x) if rectifies else x
        hidden = F.conv2d(hidden, weight)
        running = mean.clone()
        hidden = F.batch_norm(hidden, running, variance.clone(), training=training, eps=eps)
        # As a copy of a model's state is.
        running.clone().add(1)
        return F.conv2d(hidden.tanh(), weight)

    return run


def pooled(divides: bool, one_call: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Three vectors and their products, the second a mean of the rows, computed in one call or step by step."""

    def interacts(x: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        if one_call:
            mean = rows.mean(0, keepdim=True)
        else:
            present = (ids != 0)[:, None]
            mean = (rows * present).sum(0, keepdim=True)
            if divides:
                mean = mean / 5
        z = torch.stack([x.relu(), mean, x.tanh()], 1)
        return torch.cat([z[:, 0], (z @ z.mT).flatten(1)], 1)

    return interacts


POOLED = drawn(1, 8, seed=1), drawn(5, 8, seed=2), torch.arange(1, 6)


def test_a_part_that_agrees_does_not_clear_a_value_that_is_read_as_a_whole() -> None:
    found = compared(pooled(True, one_call=True), pooled(False, one_call=False), *POOLED)
    assert sources(found.target)[0] == "mean = (rows * present).sum(0, keepdim=True)"
    assert sources(found.baseline)[0] == "mean = rows.mean(0, keepdim=True)"


def test_a_mask_of_one_side_alone_that_hides_nothing_is_no_difference() -> None:
    found = compared(pooled(True, one_call=True), pooled(False, one_call=False), *POOLED)
    assert not any("present = " in source for source in sources(found.target))


@pytest.mark.parametrize("training", [False, True])
def test_running_statistics_that_agree_do_not_clear_the_norm_that_writes_them(training: bool) -> None:
    image = drawn(3, 4, 7, 7, seed=8)
    found = compared(normed(training), normed(training, eps=0.3), image)
    line = "hidden = F.batch_norm(hidden, running, variance.clone(), training=training, eps=eps)"
    assert sources(found.target)[0] == sources(found.baseline)[0] == line
    found = compared(normed(training), normed(training, rectifies=False), image)
    assert sources(found.target)[0] == "hidden = F.conv2d(hidden, weight)"
    assert sources(found.baseline)[0] == "hidden = F.relu(x) if rectifies else x"


def routed(dim: int) -> Callable[[Tensor], Tensor]:
    def route(scores: Tensor) -> Tensor:
        probabilities = scores.softmax(dim)
        weights, chosen = probabilities.topk(2, dim=-1)
        parts = [torch.where(chosen == expert, weights, 0.0).sum(-1) for expert in range(4)]
        return torch.stack(parts)

    return route


def test_tokens_that_some_experts_get_in_any_case_do_not_clear_a_wrong_router() -> None:
    scores = drawn(16, 4, seed=7)
    chosen = [scores.softmax(dim).topk(2, dim=-1).indices for dim in (-1, 0)]
    assert not torch.equal(*chosen)
    # One expert has as many tokens, or the same, on both sides.
    assert any(((chosen[0] == each).sum() == (chosen[1] == each).sum()).item() for each in range(4))
    found = compared(routed(-1), routed(0), scores)
    assert sources(found.target)[0] == "probabilities = scores.softmax(dim)"
    assert found.target[0].has_equal_inputs


def windowed(last: int) -> Callable[[Tensor], Tensor]:
    def attend(scores: Tensor) -> Tensor:
        places = torch.arange(8)
        mask = places > last
        return scores.masked_fill(~mask, -1e9).softmax(-1)

    return attend


def test_a_mask_that_hides_nothing_is_named_and_has_its_counterpart() -> None:
    found = compared(windowed(0), windowed(-1), Q)
    assert sources(found.target)[0] == "mask = places > last"
    other = compared(windowed(0), lambda x: attended_with_equal(x), Q)
    assert sources(other.target)[0] == "mask = places >= 0"
    assert other.target[0].counterpart is not None
    assert other.target[0].counterpart.frames[0].source == "mask = places > last"


def attended_with_equal(scores: Tensor) -> Tensor:
    places = torch.arange(8)
    mask = places >= 0
    return scores.masked_fill(~mask, -1e9).softmax(-1)


def joined_heads(transposed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def project(x: Tensor, weight: Tensor) -> Tensor:
        mixed = (x * 2).transpose(1, 2).contiguous()
        heads = mixed.transpose(1, 2) if transposed else mixed
        joined = heads.reshape(2, 5, 32)
        return joined @ weight

    return project


def test_heads_that_are_joined_without_a_transpose_are_named_where_they_are_joined() -> None:
    found = compared(joined_heads(True), joined_heads(False), Q, drawn(32, 6, seed=8))
    assert sources(found.target)[0] == "joined = heads.reshape(2, 5, 32)"
    assert found.target[0].is_suspect


# ---- lines that run more than once ----------------------------------------------------------------------------------


def turned(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def with_positions(twice: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def rotate(x: Tensor, sine: Tensor) -> Tensor:
        if twice:
            return x + turned(turned(x)) * sine
        return x + turned(x) * sine

    return rotate


def test_a_function_that_is_applied_twice_is_blamed_where_it_is_called() -> None:
    found = compared(with_positions(False), with_positions(True), Q, K)
    assert sources(found.target)[0] == "return x + turned(turned(x)) * sine"


def turned_again(times: int) -> Callable[..., Tensor]:
    def rotate(x: Tensor, sine: Tensor, left: int = times) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        y = torch.cat((-second, first), dim=-1)
        if left > 1:
            return rotate(y, sine, left - 1)
        return y * sine

    return rotate


def test_a_callee_that_calls_itself_is_blamed_where_its_own_line_is_right_at_first() -> None:
    def of_callee(traced: SliceTrace) -> SliceTrace:
        # As in a session, where the callee has no caller.
        own = [
            replace(each, frames=tuple(frame for frame in each.frames if frame.function.endswith("rotate")))
            for each in traced.operations
        ]
        return replace(traced, operations=own)

    found = first_lost([of_callee(trace(turned_again(1), Q, K))], [of_callee(trace(turned_again(2), Q, K))], 0)
    assert [len(each.operation.frames) for each in found.target] == [2, 2]
    assert sources(found.target)[0] == "y = torch.cat((-second, first), dim=-1)"


def decayed(factor: float) -> Callable[[Tensor], Tensor]:
    def step(h: Tensor, x: Tensor) -> Tensor:
        return h * factor + x

    def run(x: Tensor) -> Tensor:
        h = torch.zeros(5, 4, 8)
        for t in range(2):
            h = step(h, x[t])
        return h * 3

    return run


def test_a_line_of_a_loop_that_is_right_at_first_keeps_the_blame() -> None:
    # Nothing is carried over in the first step, whatever the factor is.
    found = compared(decayed(0.5), decayed(0.6), Q)
    assert sources(found.target)[0] == "return h * factor + x"


def test_an_operation_of_one_rank_alone_is_lost() -> None:
    def part(rank: int, wrong: bool) -> Callable[[Tensor, Tensor], Tensor]:
        def project(x: Tensor, weight: Tensor) -> Tensor:
            mine = weight[:, rank * 4 : rank * 4 + 4]
            y = x @ mine
            if wrong:
                y = y * 0.9
            return y.tanh()

        return project

    x, weight = drawn(3, 6, seed=1), drawn(6, 8, seed=2)
    whole = trace(lambda x, weight: (x @ weight).tanh(), x, weight)
    ranks = [trace(part(rank, rank == 1), x, weight) for rank in range(2)]
    found = first_lost([whole], ranks, 1)
    assert sources(found.target)[0] == "y = y * 0.9"


def test_a_part_of_a_rank_has_the_whole_as_its_counterpart() -> None:
    def part(rank: int) -> Callable[[Tensor, Tensor], Tensor]:
        def project(x: Tensor, weight: Tensor) -> Tensor:
            y = x @ weight[:, rank * 4 : rank * 4 + 4]
            scaled = y * 0.3
            return scaled.tanh()

        return project

    def project(x: Tensor, weight: Tensor) -> Tensor:
        y = x @ weight
        scaled = y * 0.35
        return scaled.tanh()

    x, weight = drawn(3, 6, seed=1), drawn(6, 8, seed=2)
    found = first_lost([trace(project, x, weight)], [trace(part(rank), x, weight) for rank in range(2)], 0)
    assert sources(found.target)[0] == "scaled = y * 0.3"
    assert found.target[0].counterpart is not None
    assert found.target[0].counterpart.frames[0].source == "scaled = y * 0.35"


# ---- what depends on no number, and what is overwritten -------------------------------------------------------------


def test_a_line_is_not_excused_by_noise_of_the_shape_of_its_result() -> None:
    def sampled(factor: float) -> Callable[[Tensor], Tensor]:
        def sample(x: Tensor) -> Tensor:
            std = (factor * x).exp()
            torch.manual_seed(3)
            return std * torch.randn_like(std)

        return sample

    found = compared(sampled(0.5), sampled(1.0), WEIGHT)
    assert sources(found.target)[0] == "std = (factor * x).exp()"
    assert sources(found.baseline)[0] == "std = (factor * x).exp()"


def test_what_overwrites_a_part_comes_before_what_reads_the_whole() -> None:
    def dropping(drops: str) -> Callable[[Tensor], Tensor]:
        def drop(x: Tensor) -> Tensor:
            y = x.square()
            if drops == "by assignment":
                y[-1] = 0
            elif drops:
                y[-1].fill_(0)
            return y.exp()

        return drop

    found = compared(dropping(""), dropping("by assignment"), WEIGHT)
    assert sources(found.target)[0] == "y[-1] = 0"
    found = compared(dropping(""), dropping("by a method"), WEIGHT)
    assert sources(found.target)[0] == "y[-1].fill_(0)"


def test_what_writes_through_a_view_comes_before_the_line_that_made_the_view() -> None:
    def scaled(factor: float) -> Callable[[Tensor], Tensor]:
        def scale(x: Tensor) -> Tensor:
            y = x.square()
            part = y[:, :4]
            if factor != 1:
                part.mul_(factor)
            return y.exp()

        return scale

    found = compared(scaled(1), scaled(1.5), WEIGHT)
    assert sources(found.target)[:2] == ["part.mul_(factor)", "part = y[:, :4]"]


def test_new_memory_that_is_filled_later_is_no_suspect() -> None:
    def paged(flips: bool) -> Callable[[Tensor], Tensor]:
        def attend(x: Tensor) -> Tensor:
            table = torch.tensor([[3, 0], [1, 2]])
            pool = torch.zeros(4, 2, 8)
            for step in range(4):
                block = table[:, step // 2]
                if flips and step == 3:
                    block = block.flip(0)
                pool[block, step % 2] = x[:, step, 0]
            return torch.einsum("bhd,btd->bht", x[:, 0], pool[table].flatten(1, 2))

        return attend

    found = compared(paged(False), paged(True), Q)
    assert "pool = torch.zeros(4, 2, 8)" not in sources([*found.target, *found.baseline])
    assert sources(found.target)[0] == "pool[block, step % 2] = x[:, step, 0]"


def test_new_memory_like_a_value_is_not_computed_from_it() -> None:
    def by_rows(x: Tensor) -> Tensor:
        out = x.new_zeros(6, 16)
        for row in range(6):
            scaled = x[row] * 3
            out[row, :8] = scaled.exp()
        return out[:, :8]

    found = compared(lambda x: (x * 2).exp(), by_rows, WEIGHT)
    assert sources(found.target)[0] == "scaled = x[row] * 3"


def test_of_several_lost_lines_one_that_reads_what_the_other_side_reads_comes_first() -> None:
    def masked(x: Tensor, y: Tensor) -> Tensor:
        # The other side computes the scores of the chosen keys alone, so all of these are lost.
        scores = x @ WEIGHT.T
        total = y.relu().sum(0)
        hidden = torch.full((6,), -math.inf).index_fill(0, total.topk(3).indices, 0.0)
        return (scores + hidden).softmax(-1) @ WEIGHT

    def gathered(x: Tensor, y: Tensor) -> Tensor:
        total = y.sum(0)
        kept = WEIGHT[total.topk(3).indices]
        return (x @ kept.T).softmax(-1) @ kept

    found = compared(masked, gathered, drawn(5, 8, seed=7), drawn(4, 6, seed=8))
    assert sources(found.target)[0] == "total = y.sum(0)"
    assert sources(found.baseline)[0] == "total = y.relu().sum(0)"


@pytest.mark.parametrize("draw", [lambda x: torch.randn(x.shape), torch.randn_like], ids=["randn", "randn_like"])
def test_numbers_drawn_elsewhere_leave_the_blame_to_their_reader(
    draw: Callable[[Tensor], Tensor],
) -> None:
    torch.manual_seed(0)
    known = trace(draw, WEIGHT)
    right = trace(lambda x: x * 3, WEIGHT)

    def noisy(x: Tensor) -> Tensor:
        noise = draw(x)
        return x + noise

    torch.manual_seed(0)
    found = first_lost([replace(right, elsewhere=(known.fingerprints[known.result],))], [trace(noisy, WEIGHT)], 0)
    assert sources(found.target) == ["return x + noise"]


def test_a_wrong_write_is_found_whichever_baseline_line_comes_first() -> None:
    def cached(slot: int, in_halves: bool) -> Callable[[Tensor], Tensor]:
        def computes(x: Tensor) -> Tensor:
            pool, weights = K[0, 0].clone(), x[:4].exp()
            pool[slot] = x[5] * 3
            if in_halves:
                doubled = pool * 2
                return doubled * (weights / 2)
            return pool * weights

        return computes

    found = compared(cached(1, True), cached(2, False), WEIGHT)
    assert sources(found.target)[0] == sources(found.baseline)[0] == "pool[slot] = x[5] * 3"


def test_a_lost_line_that_leads_to_one_with_shared_inputs_stays_before_it() -> None:
    weight = drawn(24, 12, seed=1)

    def quantised(*dim: int) -> Callable[[Tensor], Tensor]:
        def multiplied(x: Tensor) -> Tensor:
            scale = weight.abs().amax(dim, keepdim=True) / 127
            return x @ ((weight / scale).round() * scale).T

        return multiplied

    found = compared(quantised(1), quantised(0, 1), drawn(6, 12))
    assert sources(found.target)[0] == "return x @ ((weight / scale).round() * scale).T"
    assert sources(found.baseline)[0] == "scale = weight.abs().amax(dim, keepdim=True) / 127"


def test_a_result_that_nothing_reads_loses_no_operation() -> None:
    def loss(wrong: bool) -> Callable[[Tensor], Tensor]:
        def add(x: Tensor) -> Tensor:
            # Of both results of each operation the second is never read.
            chosen = F.logsigmoid(x[0, :2]).mean() + F.nll_loss(x, torch.zeros(6, dtype=torch.int64))
            y = x.square().mean(1) if wrong else x.square().sum(1)
            return chosen + y

        return add

    found = compared(loss(False), loss(True), WEIGHT)
    assert sources(found.target) == ["y = x.square().mean(1) if wrong else x.square().sum(1)", "return chosen + y"]


def test_a_sum_of_ranks_is_neither_larger_nor_smaller_than_its_parts() -> None:
    def with_total(total: float) -> Any:
        moments = np.array([total, 1.0, 1.0, 1.0, 1.0])
        return Fingerprint((4,), "float32", 4, 0, moments, np.zeros(3), None, None, False, False)

    parts = [with_total(1.0), with_total(2.0)]
    assert [is_sum(parts, with_total(total), 1e-6) for total in (3.0, 2.0, 4.0)] == [True, False, False]
    # Nor has it the same numbers at other places.
    for off in (-1.0, 1.0):
        assert not is_sum(parts, replace(with_total(3.0), projections=np.full(3, off)), 1e-6)
    # Numbers that are not finite are left out of the totals.
    assert not is_sum(parts, replace(with_total(3.0), nonfinite=1), 1e-6)
    assert not is_sum([parts[0], replace(parts[1], nonfinite=1)], with_total(3.0), 1e-6)


def test_a_value_that_the_other_side_uses_elsewhere_leaves_the_blame_to_its_reader() -> None:
    def computes(is_right: bool) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            chosen = x.cos() if is_right else x.sin()
            scaled = chosen.exp()
            return x.tanh() * scaled

        return function

    right, wrong = trace(computes(True), Q), trace(computes(False), Q)
    assert sources(first_lost([right], [wrong], 0).target)[0].startswith("chosen = ")
    for moved in (Q, Q.flip(0)):
        known = trace(lambda x: x.sin(), moved)
        there = replace(right, elsewhere=(known.fingerprints[known.result],))
        assert sources(first_lost([there], [wrong], 0).target)[0] == "scaled = chosen.exp()"
    # As the backward pass may, where the other side's forward pass alone computes it.
    there = replace(right, of_forward=(trace(lambda x: x.sin(), Q).fingerprints[1],))
    assert sources(first_lost([there], [wrong], 0).target)[0] == "scaled = chosen.exp()"


def test_an_operation_is_not_cleared_by_what_comes_beside_its_result() -> None:
    def ordered(factor: float) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            scaled = x * factor
            values, order = scaled.sort()
            places = order.float()
            return values.cumsum(-1) + places.cumsum(-1)

        return function

    # Numbers in another size have the same order.
    found = compared(ordered(1.0), ordered(1.5), Q)
    assert sources(found.target)[0] == "scaled = x * factor"


def test_a_result_that_is_off_by_less_than_fingerprints_show_has_its_line() -> None:
    def grown(factor: float) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            h = x.exp()
            return h * factor

        return function

    found = compared(grown(2.0), grown(2.0 + 4e-6), Q)
    assert sources(found.target) == ["return h * factor"]


def test_a_result_that_is_a_summand_of_an_earlier_value_is_not_cleared() -> None:
    def shard(rank: int) -> Callable[[Tensor], Tensor]:
        own = WEIGHT.chunk(2)[rank]

        def partial(x: Tensor) -> Tensor:
            inner = F.linear(x, own).relu()
            return inner @ own

        return partial

    whole = trace(lambda x: (F.linear(x, WEIGHT).relu() @ WEIGHT) * 3, Q)
    found = first_lost([whole], [trace(shard(rank), Q) for rank in (0, 1)], 1)
    assert sources(found.target) == ["return inner @ own"]


def test_what_new_memory_happens_to_hold_is_not_named_before_what_is_computed() -> None:
    def in_place(factor: float) -> Callable[[Tensor], Tensor]:
        def function(x: Tensor) -> Tensor:
            made = torch.empty_like(x)
            for place in range(len(x)):
                made[place] = x[place].exp() * factor
            return made / made.norm(dim=-1, keepdim=True).add(1)

        return function

    ours = trace(lambda x: x.exp() * 2 / (x.exp() * 2).norm(dim=-1, keepdim=True).add(1), X)
    theirs = trace(in_place(3.0), X)
    (memory,) = (each for each in theirs.operations if each.name == "empty_like")
    garbage = {memory.outputs[0]: fingerprint(drawn(*X.shape, seed=9))}
    found = first_lost([ours], [replace(theirs, fingerprints={**theirs.fingerprints, **garbage})], 0)
    assert "torch.empty_like" not in sources(found.target)[0]
    assert all(each.is_later for each in found.target if each.operation.name == "empty_like")
