"""``align_by_request``: rows are paired by request."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.refusals import exactly

import graftlab as gl
from graftlab.errors import TransformError
from graftlab.requests.identity import request_ids_tensor
from graftlab.transforms import GraftTransformInput, align_by_request, compare, run_transform
from graftlab.transforms.align import MOVED, _token_dims


def the_input(
    received: list[tuple[torch.Tensor, Any]], target: torch.Tensor, extras: Any, rank: int = 0
) -> GraftTransformInput:
    return GraftTransformInput(
        tags={"name": "x"},
        received_list=[tensor for tensor, _ in received],
        received_extras_list=[each for _, each in received],
        target=target,
        recv_rank=rank,
        senders=list(range(len(received))),
        send_world_size=len(received),
        target_extras=extras,
    )


def ids(*numbers: int) -> dict[str, Any]:
    return {"rids_int": torch.tensor(numbers, dtype=torch.int64)}


def tokens(lengths: list[int], *numbers: int) -> dict[str, Any]:
    return {**ids(*numbers), "request_lens": torch.tensor(lengths)}


def rows_of(*values: float) -> torch.Tensor:
    """One row of two equal numbers for each value."""
    return torch.tensor(values).view(-1, 1).expand(-1, 2).contiguous()


def values_of(tensor: torch.Tensor) -> list[float]:
    return tensor[..., 0].flatten().tolist()


# ---- rows are requests ----------------------------------------------------------------------------------------------


def test_rows_are_paired_by_id_whatever_their_order() -> None:
    graft_input = the_input([(rows_of(10, 20, 30), ids(1, 2, 3))], rows_of(3, 1, 2), ids(3, 1, 2))
    outcome = run_transform(align_by_request, graft_input)
    assert values_of(outcome.value) == [30, 10, 20]
    assert (outcome.aligned_by, outcome.rows_unmatched) == ("request", 0)


def test_rows_without_a_counterpart_keep_their_values_and_are_counted() -> None:
    graft_input = the_input([(rows_of(10, 20), ids(1, 2))], rows_of(5, 6, 7), ids(2, 8, 9))
    outcome = run_transform(align_by_request, graft_input)
    assert values_of(outcome.value) == [20, 6, 7]
    assert outcome.rows_unmatched == 2
    assert outcome.rows is not None
    assert [index.tolist() for index in outcome.rows] == [[0]]


def test_samples_of_one_request_are_paired_in_their_order() -> None:
    graft_input = the_input([(rows_of(10, 20, 11, 12), ids(1, 2, 1, 1))], rows_of(1, 5, 1, 2), ids(1, 1, 2, 2))
    outcome = run_transform(align_by_request, graft_input)
    assert values_of(outcome.value) == [10, 11, 20, 2]
    assert outcome.rows_unmatched == 1


def test_statistics_cover_matched_rows_with_indices_of_the_whole_tensor() -> None:
    graft_input = the_input([(rows_of(10, 20), ids(1, 2))], rows_of(1e9, 21, 10), ids(7, 2, 1))
    stats = compare(run_transform(align_by_request, graft_input), graft_input)
    assert (stats.numel, stats.max_abs, stats.max_abs_index) == (4, 1.0, (1, 0))


def test_padding_on_either_side_is_neither_matched_nor_counted() -> None:
    sent = (rows_of(10, 20, 99, 98), ids(1, 2, 0, 0))
    graft_input = the_input([sent], rows_of(2, 1, 55, 56, 57), ids(2, 1, 0))
    outcome = run_transform(align_by_request, graft_input)
    assert values_of(outcome.value) == [20, 10, 55, 56, 57]
    assert outcome.rows_unmatched == 0


def test_each_data_parallel_sender_contributes_its_requests() -> None:
    received = [(rows_of(10, 20), ids(1, 2)), (rows_of(30, 40, 50), ids(3, 4, 5))]
    outcome = run_transform(align_by_request, the_input(received, rows_of(5, 1, 9, 3), ids(5, 1, 9, 3)))
    assert values_of(outcome.value) == [50, 10, 9, 30]
    assert outcome.rows is not None
    # In the order of the tensor's rows, whichever sender they are from.
    assert [index.tolist() for index in outcome.rows] == [[0, 1, 3]]
    assert (outcome.rows_matched, outcome.rows_unmatched, outcome.note) == (3, 1, MOVED)


def test_requests_of_one_sender_in_other_rows_are_noted_whatever_the_next_sender_has() -> None:
    received = [(rows_of(20, 10), ids(2, 1)), (rows_of(0, 0, 30), ids(7, 8, 3))]
    outcome = run_transform(align_by_request, the_input(received, rows_of(1, 2, 3), ids(1, 2, 3)))
    assert (values_of(outcome.value), outcome.note) == ([10, 20, 30], MOVED)
    in_place = [(rows_of(10, 20), ids(1, 2))]
    assert run_transform(align_by_request, the_input(in_place, rows_of(1, 2), ids(1, 2))).note is None


def test_the_sender_whose_rows_are_unlike_is_named() -> None:
    received = [(rows_of(10), ids(1)), (torch.zeros(1, 3), ids(2))]
    with pytest.raises(
        TransformError,
        match=exactly("align_by_request: a row has shape [2] here and [3] at sender 1; only whole rows can be paired"),
    ):
        run_transform(align_by_request, the_input(received, rows_of(1, 2), ids(1, 2)))


@pytest.mark.parametrize("given_ids", [[True, False], torch.tensor([True, False]), [1.0, 2.0], "12", {1: 2}])
def test_ids_that_are_no_whole_numbers_are_refused(given_ids: Any) -> None:
    with pytest.raises(
        TransformError,
        match=exactly("align_by_request: rids_int of the receiver must be a one-dimensional tensor of integers"),
    ):
        run_transform(align_by_request, the_input([(rows_of(1, 2), ids(1, 2))], rows_of(1, 2), {"rids_int": given_ids}))


def test_request_at_several_senders_is_taken_from_the_receivers_rank() -> None:
    received = [(rows_of(10, 20), ids(1, 2)), (rows_of(11, 31), ids(1, 3)), (rows_of(12, 32), ids(1, 3))]
    for rank, expected in ((0, [10, 31]), (1, [11, 31]), (2, [12, 32]), (7, [10, 31])):
        outcome = run_transform(align_by_request, the_input(received, rows_of(0, 0), ids(1, 3), rank))
        assert values_of(outcome.value) == expected


@given(st.data())
def test_any_two_batches_pair_every_request_that_both_have(data: st.DataObject) -> None:
    everything = range(1, 12)
    mine = data.draw(st.lists(st.sampled_from(everything), unique=True))
    senders = [
        data.draw(st.lists(st.sampled_from(everything), unique=True)) for _ in range(data.draw(st.integers(1, 3)))
    ]
    pad = data.draw(st.integers(0, 3))
    received = [(rows_of(*(100.0 * each for each in batch), *[-1.0] * pad), ids(*batch)) for batch in senders]
    target = rows_of(*map(float, mine), *[-2.0] * pad)
    outcome = run_transform(align_by_request, the_input(received, target, ids(*mine)))
    sent = set().union(*senders)
    assert values_of(outcome.value) == [*(100.0 * m if m in sent else m for m in mine), *[-2.0] * pad]
    assert outcome.rows_unmatched == sum(m not in sent for m in mine)


# ---- rows are tokens ------------------------------------------------------------------------------------------------


def test_tokens_are_paired_by_request_and_place() -> None:
    sent = (rows_of(10, 11, 12, 20, 30, 31), tokens([3, 1, 2], 1, 2, 3))
    mine = rows_of(0, 0, 5, 0, 0, 0, 77)
    outcome = run_transform(align_by_request, the_input([sent], mine, tokens([2, 1, 3], 3, 9, 1)))
    assert values_of(outcome.value) == [30, 31, 5, 10, 11, 12, 77]
    assert outcome.rows_unmatched == 1


def test_a_request_with_fewer_tokens_on_the_other_side_is_paired_from_its_start() -> None:
    sent = (rows_of(10, 11), tokens([2], 1))
    outcome = run_transform(align_by_request, the_input([sent], rows_of(1, 2, 3), tokens([3], 1)))
    assert values_of(outcome.value) == [10, 11, 3]
    assert outcome.rows_unmatched == 1


def test_padded_batches_pair_with_flat_and_wider_batches() -> None:
    flat = rows_of(10, 11, 12, 20)
    padded = torch.full((2, 5, 2), -1.0)
    padded[0, 0], padded[1, :3] = 20, torch.tensor([[10.0] * 2, [11.0] * 2, [12.0] * 2])
    mine = torch.full((3, 4, 2), -2.0)
    for sent in ((flat, tokens([3, 1], 1, 2)), (padded, tokens([1, 3], 2, 1))):
        graft_input = the_input([sent], mine, tokens([3, 1, 2], 1, 2, 8))
        outcome = run_transform(align_by_request, graft_input)
        expected = [[10, 11, 12, -2], [20, -2, -2, -2], [-2, -2, -2, -2]]
        assert outcome.value[..., 0].tolist() == expected
        assert outcome.rows_unmatched == 2
        assert compare(outcome, graft_input).max_abs_index == (1, 0, 0)


def _number_of(request: int, token: int) -> float:
    return 10.0 * request + token


def _stacked(order: list[int], lengths: dict[int, int]) -> torch.Tensor:
    """``[6, tokens, 2]`` of the requests in this order; the sign of a value is its head's."""
    values = torch.tensor([_number_of(each, token) for each in order for token in range(lengths[each])])
    return torch.stack([values, -values] * 3).unsqueeze(-1).expand(-1, -1, 2).contiguous()


def test_tokens_after_the_heads_are_found_by_the_lengths() -> None:
    lengths = {1: 3, 2: 2, 3: 4}
    theirs, mine = _stacked([1, 2, 3], lengths), _stacked([3, 1], lengths)
    extras = tokens([3, 2, 4], 1, 2, 3), tokens([4, 3], 3, 1)
    graft_input = the_input([(theirs, extras[0])], mine * 0, extras[1])
    outcome = run_transform(align_by_request, graft_input)
    assert torch.equal(outcome.value, mine)
    assert (outcome.rows_matched, outcome.rows_unmatched) == (7, 0)
    wrong = replace(graft_input, target=mine.index_fill(1, torch.tensor([5]), 0))
    assert compare(run_transform(align_by_request, wrong), wrong).max_abs_index == (0, 5, 0)
    # The same for padded requests: [requests, heads, longest, 2].
    padded = torch.zeros(3, 6, 4, 2)
    for index, each in enumerate((1, 2, 3)):
        padded[index, :, : lengths[each]] = _stacked([each], lengths)
    outcome = run_transform(
        align_by_request, the_input([(padded, extras[0])], padded.flip(0) * 0, tokens([4, 2, 3], 3, 2, 1))
    )
    assert torch.equal(outcome.value, padded.flip(0))
    assert outcome.rows_matched == 9
    outcome = run_transform(align_by_request, the_input([(padded, extras[0])], mine.transpose(0, 1) * 0, extras[1]))
    assert torch.equal(outcome.value, mine.transpose(0, 1))


def test_the_other_sides_rows_decide_between_two_dimensions_that_fit() -> None:
    # Eight rows of a padded graph with five heads, and five tokens: only one reading has rows like the other side's.
    theirs, mine = rows_of(*range(5)).unsqueeze(1).expand(-1, 5, -1), torch.zeros(8, 5, 2)
    outcome = run_transform(align_by_request, the_input([(theirs, tokens([5], 1))], mine, tokens([5], 1)))
    assert outcome.value[:, 0, 0].tolist() == [0, 1, 2, 3, 4, 0, 0, 0]
    assert "dim 0 was taken" in (outcome.note or "")
    outcome = run_transform(align_by_request, the_input([(mine, tokens([5], 1))], mine, tokens([5], 1)))
    assert "dim 1 was taken" in (outcome.note or "")
    either = torch.zeros(2, 5, 2)
    with pytest.raises(
        TransformError,
        match=exactly(
            "align_by_request: the lengths of the receiver fit a tensor of shape [2, 5, 2] in several "
            "ways: the tokens may be in dim 1 or [requests, tokens] in dims 0 and 1. Tap it with the "
            "tokens in its first dimension"
        ),
    ):
        run_transform(align_by_request, the_input([(either, tokens([2, 3], 1, 2))], either, tokens([2, 3], 1, 2)))


def test_a_batch_of_one_request_has_one_reading() -> None:
    mine = torch.zeros(1, 3, 2)
    sent = (rows_of(1, 2, 3).unsqueeze(0), tokens([3], 1))
    outcome = run_transform(align_by_request, the_input([sent], mine, tokens([3], 1)))
    assert outcome.value[0, :, 0].tolist() == [1, 2, 3]
    assert outcome.note is None


# ---- what it refuses ------------------------------------------------------------------------------------------------


def test_a_tap_without_any_ids_goes_the_defaults_way() -> None:
    outcome = run_transform(align_by_request, the_input([(rows_of(1, 2), None)], rows_of(3, 4), {"other": 1}))
    assert values_of(outcome.value) == [1, 2]
    assert outcome.rows is None


REFUSED: dict[str, tuple[Any, Any, str]] = {
    "no ids here": (ids(1, 2), None, "the receiver passed no request ids; write gl.tap"),
    "no ids there": (None, ids(1, 2), "sender 0 passed no request ids"),
    "more ids than rows": (ids(1, 2, 3), ids(1, 2), r"sender 0 passed 3 rids_int for a tensor of shape \[2, 2\]"),
    "ids that are no integers": ({"rids_int": ["a", "b"]}, ids(1, 2), "rids_int of sender 0 must be a one-dimensional"),
    "lengths that do not fit": (tokens([2, 7], 1, 2), ids(1, 2), r"request_lens \[2, 7\], which fit neither"),
    "too few lengths": (tokens([2], 1, 2), ids(1, 2), "each request has one length"),
    "a negative length": (tokens([2, -1], 1, 2), ids(1, 2), "each request has one length"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_unpairable_rows_are_refused_with_the_reason(case: str) -> None:
    theirs, mine, message = REFUSED[case]
    with pytest.raises(TransformError, match=message):
        run_transform(align_by_request, the_input([(rows_of(1, 2), theirs)], rows_of(3, 4), mine))


def test_rows_of_other_shapes_are_refused() -> None:
    with pytest.raises(
        TransformError,
        match=exactly("align_by_request: a row has shape [2] here and [3] at sender 0; only whole rows can be paired"),
    ):
        run_transform(align_by_request, the_input([(torch.ones(2, 3), ids(1, 2))], rows_of(3, 4), ids(1, 2)))


DTYPES = [
    *(torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float8_e5m2),
    *(torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.bool, torch.complex64),
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_aligned_and_the_target_stays_unchanged(dtype: torch.dtype) -> None:
    sent = torch.tensor([[1, 0], [0, 1]], dtype=torch.uint8).to(dtype)
    target = torch.zeros(2, 2, dtype=torch.uint8).to(dtype).t()
    outcome = run_transform(align_by_request, the_input([(sent, ids(1, 2))], target, ids(2, 1)))
    assert outcome.value.to(torch.complex128).real.tolist() == [[0, 1], [1, 0]]
    assert not target.to(torch.complex128).any()
    assert outcome.value.dtype == dtype


# ---- with real ranks ------------------------------------------------------------------------------------------------


def shuffled_batch(ids_of_rank: dict[str, list[str]], scale: float) -> list[list[float]]:
    me = gl.here()
    assert me is not None
    mine = ids_of_rank[f"{me.side}[{me.rank}]"]
    numbers = request_ids_tensor(mine)
    x = torch.tensor([[scale * len(each)] * 2 for each in mine])
    if me.side == "target":
        x += 1
    gl.tap("x", x, extras={"rids_int": numbers})
    return x.tolist()


@pytest.mark.ranks
def test_data_parallel_sides_are_paired_across_ranks() -> None:
    batches = {
        "baseline[0]": ["a", "bb", "ccc"],
        "baseline[1]": ["dddd", "eeeee"],
        "target[0]": ["eeeee", "a", "nobody's"],
    }
    with gl.launch(baseline=2, target=1, timeout=20) as session:
        session.edit(b2t="True", transform="graftlab.transforms.align_by_request", keep="True")
        run = session.run(shuffled_batch, shuffled_batch, args=(batches, 10.0))
        row = run.frame.iloc[0]
        trial = session.try_transform(gl.transforms.align_by_request, "x")

        assert run.target == [[[50.0] * 2, [10.0] * 2, [81.0] * 2]]
        assert (row["status"], row["aligned_by"], row["rows_matched"], row["rows_unmatched"]) == (
            "grafted",
            "request",
            2,
            1,
        )
        assert row["numel"] == 4
        assert row["max_abs"] == 1.0
        assert math.isclose(row["mean_target"], 31.0)
        assert trial.after is not None
        assert trial.after.max_abs == 1.0

        session.edit(b2t=None, transform=("True", gl.transforms.align_by_request))
        batches["target[0]"] = ["nobody's"]
        row = session.run(shuffled_batch, shuffled_batch, args=(batches, 10.0)).frame.iloc[0]
        assert (row["status"], row["rows_matched"], row["rows_unmatched"]) == ("missing", 0, 1)
        assert "no sender has any row of this batch" in row["error"]


def test_an_input_that_names_no_senders_has_them_in_order() -> None:
    first, second = (torch.ones(1, 2), ids(1)), (torch.full((1, 2), 2.0), ids(2))
    given = replace(the_input([first, second], torch.zeros(2, 2), ids(2, 1)), senders=[])
    outcome = run_transform(align_by_request, given)
    assert outcome.value[:, 0].tolist() == [2.0, 1.0]


def test_all_rows_are_unmatched_if_senders_have_none_of_the_requests() -> None:
    own = torch.ones(3, 2)
    outcome = gl.transforms.align_by_request(
        gl.GraftTransformInput(
            tags={"name": "h"},
            received_list=[torch.zeros(2, 2)],
            received_extras_list=[{"rids_int": torch.tensor([1, 2])}],
            target=own,
            target_extras={"rids_int": torch.tensor([7, 8, 9])},
        )
    )
    assert torch.equal(outcome.value, own)
    assert outcome.rows is not None
    assert ([len(index) for index in outcome.rows], outcome.rows_unmatched) == ([0], 3)


@pytest.mark.parametrize(
    ("shape", "lengths", "readings"),
    [
        # Of three dimensions or more the last has features, however many.
        ((2, 4, 7), [3, 4], [(1, True, False)]),
        ((2, 7), [3, 4], [(1, False, False), (1, True, False)]),
        ((7,), [3, 4], [(0, False, False)]),
        ((2, 5, 4, 8), [3, 4], [(2, True, False), (1, True, True)]),
        ((3, 4, 8), [3, 4], [(1, True, True)]),
        ((9, 8), [3, 4], [(1, True, True), (0, False, True)]),
        ((5, 8), None, [(0, False, False)]),
    ],
    ids=str,
)
def test_tokens_may_be_in_these_dimensions(shape: tuple[int, ...], lengths: list[int] | None, readings: Any) -> None:
    assert _token_dims(torch.zeros(shape), 2, lengths, "the receiver") == readings


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [
        (None, ("align_by_request: the receiver passed 2 rids_int for a tensor of shape [], which has 0 rows")),
        (
            [1, 1],
            (
                "align_by_request: the receiver passed request_lens [1, 1], which fit neither [tokens, ...] "
                "nor [requests, longest, ...], also with other dimensions before the tokens, for a tensor of "
                "shape []"
            ),
        ),
    ],
)
def test_a_single_number_has_no_rows_to_pair(lengths: list[int] | None, reason: str) -> None:
    with pytest.raises(TransformError, match=exactly(reason)):
        _token_dims(torch.tensor(1.0), 2, lengths, "the receiver")
