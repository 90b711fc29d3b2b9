"""Lines where one side computes a padded batch, and the other the real tokens alone, request by request."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from graftlab.lines.fingerprints import fingerprint, with_rows
from graftlab.lines.first_lost import first_lost
from graftlab.lines.lost import LostOperation
from graftlab.lines.operations import OperationRecorder
from graftlab.lines.rows import KnownRows, RowSums, row_sums
from graftlab.lines.traces import SliceTrace, slice_of

LENGTHS = (5, 9, 7)
LONGEST = max(LENGTHS)
MASK = torch.tensor([[0] * (LONGEST - length) + [1] * length for length in LENGTHS])
FREQUENCIES = 1 / 10000 ** (torch.arange(0, 8, 2) / 8)


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HIDDEN = drawn(3, LONGEST, 32)


def turned(x: Tensor, angles: Tensor) -> Tensor:
    one, other = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()], -1)


def padded(x: Tensor) -> Tensor:
    positions = (MASK.cumsum(-1) - 1).clamp(min=0)
    q = v = x.view(3, LONGEST, 4, 8).transpose(1, 2)
    q = turned(q, positions[:, None, :, None] * FREQUENCIES)
    scores = q @ q.mT * 8**-0.5
    hidden = torch.full((LONGEST, LONGEST), -1e30).triu(1) + (1 - MASK[:, None, None]) * -1e30
    return ((scores + hidden).softmax(-1) @ v).transpose(1, 2).reshape(3, LONGEST, 32)


def engine(scale: float = 8**-0.5, window: int = 99, moved: int = 0) -> Callable[[Tensor], Tensor]:
    """Attention over packed tokens with a cache; ``moved`` is how far one token's slot is from its place."""

    def attend(x: Tensor) -> Tensor:
        positions = torch.cat([torch.arange(length) for length in LENGTHS])
        table = torch.arange(64)[:, None] * FREQUENCIES
        q = v = x.view(-1, 4, 8)
        q = turned(q, table[positions][:, None])
        cache, out, begin = torch.zeros(64, 4, 8), torch.zeros_like(q), 0
        slots = torch.cat([torch.arange(length) + 16 * row for row, length in enumerate(LENGTHS)])
        slots[7] += moved
        cache[slots] = q
        for row, length in enumerate(LENGTHS):
            keys = cache[torch.arange(length) + 16 * row]
            scores = torch.einsum("qhd,khd->hqk", q[begin : begin + length], keys)
            scores = scores * scale
            here, there = torch.arange(length)[:, None], torch.arange(length)[None]
            near = there > here - window
            scores = scores.masked_fill(~(near & (there <= here)), -math.inf)
            out[begin : begin + length] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v[begin : begin + length])
            begin += length
        return out.flatten(1)

    return attend


def trace(function: Callable[[Tensor], Tensor], x: Tensor, *, takes_rows: bool = True) -> SliceTrace:
    recorder = OperationRecorder()
    recorder.takes_rows = takes_rows
    with recorder:
        recorder.set_by_tap(x, "x", changed=False)
        result = recorder.read(function(x))
    return slice_of(recorder, result)


def sources(found: Sequence[LostOperation]) -> list[str]:
    return list(dict.fromkeys(each.operation.frames[0].source for each in found if not each.is_later))


@pytest.mark.parametrize(
    ("changed", "line"),
    [
        ({"scale": 0.3}, "scores = scores * scale"),
        ({"window": 3}, "near = there > here - window"),
        ({"moved": 20}, "keys = cache[torch.arange(length) + 16 * row]"),
    ],
    ids=["scale", "window", "slot"],
)
def test_the_wrong_line_of_a_packed_engine_comes_before_right_ones(changed: dict[str, float], line: str) -> None:
    sides = trace(padded, HIDDEN), trace(engine(**changed), HIDDEN[MASK.bool()])  # type: ignore[arg-type]
    found = [each for each in sources(first_lost([sides[0]], [sides[1]], 0).target) if "arange(length)[:" not in each]
    assert found[0] == line
    # Without the sums of rows, it begins where the two sides compute angles in different ways.
    sides = (
        trace(padded, HIDDEN, takes_rows=False),
        trace(engine(**changed), HIDDEN[MASK.bool()], takes_rows=False),  # type: ignore[arg-type]
    )
    assert sources(first_lost([sides[0]], [sides[1]], 0).target)[0] != line


def test_a_step_of_decoding_is_compared_by_rows_where_one_side_loops_over_requests() -> None:
    keys, q = drawn(3, LONGEST, 4, 8, seed=1), drawn(3, 4, 8, seed=2)

    def whole(q: Tensor) -> Tensor:
        scores = torch.einsum("bhd,bkhd->bhk", q, keys) + (1 - MASK[:, None]) * -1e30
        return torch.einsum("bhk,bkhd->bhd", scores.softmax(-1), keys)

    def looped(scale: float) -> Callable[[Tensor], Tensor]:
        def attend(q: Tensor) -> Tensor:
            out = []
            for row, length in enumerate(LENGTHS):
                own = keys[row, -length:].clone()
                scores = torch.einsum("hd,khd->hk", q[row], own) * scale
                out.append(torch.einsum("hk,khd->hd", scores.softmax(-1), own))
            return torch.stack(out)

        return attend

    lost = first_lost([trace(whole, q)], [trace(looped(0.5), q)], 0).target
    assert "* scale" in sources(lost)[0]
    assert not any(each.operation.name == "clone" for each in lost if not each.is_later)


def test_sequences_of_one_length_are_compared_by_rows_where_one_side_packs_them() -> None:
    x = drawn(3, 6, 8, seed=4)

    def whole(x: Tensor) -> Tensor:
        q = x.tanh() * 0.5
        return (q @ x.mT).softmax(-1) @ q

    def looped(factor: float) -> Callable[[Tensor], Tensor]:
        def attend(x: Tensor) -> Tensor:
            out = []
            for own in x.split(6):
                q = own.tanh() * 0.5
                weights = (q @ own.T * factor).softmax(-1)
                out.append(weights @ q)
            return torch.cat(out)

        return attend

    lost = first_lost([trace(whole, x)], [trace(looped(2.0), x.flatten(0, 1))], 0).target
    assert "* factor" in sources(lost)[0]


def known(*values: Tensor, share: float = 1.0) -> KnownRows:
    sums = [(each.shape[-1], row_sums(each)) for each in values]
    return KnownRows([(width, found) for width, found in sums if found is not None], 1e-5, share)


def rows_of(tensor: Tensor) -> RowSums:
    found = row_sums(tensor)
    assert found is not None
    return found


def test_rows_are_found_in_other_places_and_only_in_one_order_and_size() -> None:
    whole = drawn(6, 5, 8)
    assert known(whole).has(8, rows_of(whole[2:4, [4, 1]]))
    assert known(whole).has(8, rows_of(whole * (1 + 1e-6)))
    for other in (whole.flip(-1), -whole, whole * 1.01, drawn(6, 5, 8, seed=3)):
        assert not known(whole).has(8, rows_of(other))
    # With half of the rows as padding the others are enough, but not with fewer.
    mixed = torch.cat([whole[:3], drawn(3, 5, 8, seed=3)])
    assert not known(whole).has(8, rows_of(mixed))
    assert known(whole, share=0.5).has(8, rows_of(mixed))
    assert not known(whole, share=0.6).has(8, rows_of(mixed))


def test_zeros_are_padding_beside_other_numbers_and_never_a_whole_row() -> None:
    weights = drawn(4, 6).softmax(-1)
    wide = torch.cat([torch.zeros(4, 3), weights], -1)
    assert known(wide).has(6, rows_of(weights))
    assert not known(wide, torch.zeros(4, 9)).has(6, rows_of(torch.cat([weights, torch.zeros(1, 6)])))
    hidden = torch.cat([torch.full((4, 3), -math.inf), weights], -1)
    for masked in (torch.cat([weights, torch.full((4, 1), -1e38)], -1), weights):
        assert known(hidden).has(masked.shape[-1], rows_of(masked))
    # The weights of two experts are not those of two tokens beside padding.
    pairs = drawn(5, 2).softmax(-1)
    assert known(drawn(3, 2), pairs).has(2, rows_of(pairs[[3, 1]]))
    assert not known(torch.cat([pairs, torch.zeros(5, 3)], -1)).has(2, rows_of(pairs))
    # A row with a single number, as of the first token's weights, proves nothing.
    assert not known(torch.eye(6)).has(6, rows_of(torch.eye(6)))


def test_only_rows_of_finite_floats_have_sums_and_fingerprints_keep_them() -> None:
    for without in (torch.arange(32).reshape(4, 8), drawn(8), drawn(8, 1), torch.full((4, 8), math.inf), drawn(0, 8)):
        assert row_sums(without) is None
    # Rows of an eighth of the numbers that a byte holds agree by chance.
    assert row_sums(drawn(4, 8).to(torch.float8_e4m3fn)) is None
    own = with_rows(fingerprint(HIDDEN), HIDDEN)
    copied = pickle.loads(pickle.dumps(own))
    assert own.rows is not None
    assert (copied.rows == own.rows).all()
    assert pickle.loads(pickle.dumps(fingerprint(HIDDEN))).rows is None
