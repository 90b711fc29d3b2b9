"""The recorder of operations, and the fingerprints of what they read."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from graftlab.base.tags import identity
from graftlab.lines.dataflow import Dataflow
from graftlab.lines.fingerprints import (
    ANY_ORDER,
    DIFFERENT,
    IN_ORDER,
    MAGNITUDES,
    agree_in_order,
    agreement,
    fingerprint,
    joined,
)
from graftlab.lines.operations import Operation, OperationRecorder, WrittenPart
from graftlab.lines.signatures import _described, signature_of
from graftlab.lines.traces import SliceTrace, WantedCall, slice_of


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def recorded(recorder: OperationRecorder, name: str) -> Operation:
    return next(each for each in recorder.operations if each.name == name)


def test_arguments_that_cannot_be_hashed_are_known_by_their_kind_alone() -> None:
    described = [_described(each) for each in (3, 4, [3, "a"], [3, "b"], {3}, {4}, {3: 4}, True, 1, 1.0)]
    assert all(isinstance(hash(each), int) for each in described)
    sets = described[4:6]
    assert sets[0] == sets[1]
    others = [each for each in described if each not in sets]
    assert all((one == other) == (n == m) for n, one in enumerate(others) for m, other in enumerate(others))


def test_an_operation_has_its_arguments_in_words_and_its_line_of_source() -> None:
    with OperationRecorder() as recorder:
        drawn(2, 3).softmax(-1)
    softmax = recorded(recorder, "softmax")
    assert softmax.call == "softmax(f32[2, 3], dim=-1, half_to_float=False)"
    assert softmax.frames()[0].source == "drawn(2, 3).softmax(-1)"


def test_an_argument_that_has_its_default_is_left_out_though_another_follows_it() -> None:
    x = drawn(2, 3)
    with OperationRecorder() as recorder:
        torch.topk(x, 2, -1, False)
        torch.topk(x, 2, 0, False)
    calls = [each.call for each in recorder.operations]
    assert calls == ["topk(f32[2, 3], 2, largest=False)", "topk(f32[2, 3], 2, dim=0, largest=False)"]
    assert recorder.operations[0].arguments == ("k=2", "largest=False")


def test_a_slice_without_an_end_ends_at_the_end() -> None:
    x = drawn(2, 3)
    with OperationRecorder() as recorder:
        x[1:].add(x[:1])
    calls = [each.call for each in recorder.operations if each.name == "slice"]
    assert calls == ["slice(f32[2, 3], 1, end)", "slice(f32[2, 3], 0, 1)"]


def test_a_write_through_a_view_is_a_source_of_the_whole() -> None:
    cache = torch.zeros(4, 3)
    with OperationRecorder() as recorder:
        before = recorder.read(cache)
        cache[1] = 2 * torch.ones(3)
        after = recorder.read(cache)
    copy = recorded(recorder, "copy_")
    assert (recorder.values[before].sources, recorder.values[after].sources) == ((), (copy.index,))
    assert recorder.fingerprints[before].moments[0] == 0
    assert recorder.fingerprints[after].moments[0] == 6


def test_a_tensor_that_an_operation_only_overwrites_is_not_its_input() -> None:
    with OperationRecorder() as recorder:
        torch.empty(5).fill_(3)
        torch.add(drawn(5), 1, out=torch.empty(5))
    assert recorded(recorder, "fill_").inputs == ()
    assert len(recorded(recorder, "add").inputs) == 1


def test_numbers_of_python_have_no_source_where_memory_is_used_again() -> None:
    with OperationRecorder() as recorder:
        for _ in range(64):
            # The memory of the first is free when the second is made.
            torch.ones(1).add_(1)
            torch.ones(1) + torch.tensor([1.0])
    added = [each for each in recorder.operations if each.name == "add"]
    assert all(recorder.values[each.inputs[1]].sources == () for each in added)


def test_backward_operations_have_the_line_of_their_forward_operation() -> None:
    x = drawn(4).requires_grad_()
    with OperationRecorder() as recorder, torch.autograd.set_detect_anomaly(True, check_nan=False):
        y = (x * 3).tanh()
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert recorded(recorder, "tanh_backward").frames()[0].source == "y = (x * 3).tanh()"
    assert not any(each.is_of_backward for each in recorder.operations if each.name in ("tanh", "sum"))


def test_a_backward_pass_is_known_as_one_without_the_lines_of_its_forward_pass() -> None:
    x = drawn(4).requires_grad_()
    y = (x * 3).tanh().sum()
    with OperationRecorder() as recorder:
        y.backward()  # type: ignore[no-untyped-call]
    backward = recorded(recorder, "tanh_backward")
    assert (backward.backward_of, backward.is_of_backward) == ((), True)


def _halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.div(2)


def test_an_operation_of_a_gradients_hook_has_its_own_line() -> None:
    x = torch.ones(4, 4, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=False), OperationRecorder() as recorder:  # type: ignore[no-untyped-call]
        y = (x * 3).tanh()
        y.register_hook(_halved)  # type: ignore[no-untyped-call]
        y.sum().backward()  # type: ignore[no-untyped-call]
    assert recorded(recorder, "div").frames()[0].source == "return gradient.div(2)"
    assert recorded(recorder, "tanh_backward").frames()[0].source == "y = (x * 3).tanh()"


def test_a_recorder_changes_no_result_and_can_be_paused() -> None:
    with OperationRecorder() as recorder:
        with recorder.pause():
            torch.ones(3)
        result = drawn(4, 4) @ drawn(4, 4, seed=1)
    names = [each.name for each in recorder.operations]
    assert "ones" not in names
    assert "mm" in names
    assert torch.equal(result, drawn(4, 4) @ drawn(4, 4, seed=1))


def test_fingerprints_agree_in_values_in_any_order_and_in_magnitudes() -> None:
    x = drawn(4, 6, 8)
    one = fingerprint(x)
    rounded = x.double() * (1 + 1e-8)
    for other, level in (
        (rounded.float().reshape(24, 8), IN_ORDER),
        (x.transpose(1, 2), ANY_ORDER),
        (-x.transpose(0, 1), MAGNITUDES),
        (x * 1.001, DIFFERENT),
        (drawn(4, 6, 8, seed=1), DIFFERENT),
        (x[:2], DIFFERENT),
    ):
        assert agreement(one, fingerprint(other), 1e-5) == level
        assert agree_in_order(one, fingerprint(other), 1e-5) == (level == IN_ORDER)
        assert agreement(fingerprint(x, sorts=False), fingerprint(other), 1e-5) == level


@pytest.mark.parametrize("sorts", [True, False])
def test_a_fingerprint_arrives_with_the_numbers_that_it_was_sent_with(sorts: bool) -> None:
    for sent in (fingerprint(drawn(4, 6, 8), sorts=sorts), fingerprint(torch.empty(0), sorts=sorts)):
        arrived = pickle.loads(pickle.dumps(sent))
        assert (arrived.shape, arrived.dtype, arrived.numel) == (sent.shape, sent.dtype, sent.numel)
        assert (arrived.nonfinite, arrived.mask, arrived.constant) == (sent.nonfinite, sent.mask, sent.constant)
        for name in ("moments", "projections", "magnitudes", "values"):
            assert np.array_equal(getattr(arrived, name), getattr(sent, name)), name


@pytest.mark.parametrize(
    "value",
    [
        drawn(7, 11),
        drawn(60, 70).t(),
        drawn(3 * 4096 + 5).bfloat16(),
        drawn(9, 9).half()[:, ::2],
        drawn(5, 1).expand(5, 3),
        drawn(40).to(torch.complex64).conj(),
        torch.complex(drawn(40), drawn(40, seed=1)).conj().imag,
        (drawn(40) * 50).to(torch.int8),
        (drawn(40) * 1e5).long(),
        drawn(40) > 0,
        drawn(40).masked_fill(drawn(40, seed=1) > 0, -torch.inf),
        torch.tensor([1.0, torch.nan, -3.0]),
        torch.full((5,), 2.5),
        torch.empty(0, 4),
    ],
    ids=lambda value: f"{value.dtype}-{list(value.shape)}",
)
def test_fingerprints_are_the_same_without_the_compiled_kernel(
    value: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = fingerprint(value)
    monkeypatch.setattr("graftlab.lines.fingerprints.load", lambda: None)
    other = fingerprint(value)
    for name in ("shape", "dtype", "numel", "nonfinite", "mask", "constant"):
        assert getattr(ours, name) == getattr(other, name), name
    for name in ("moments", "projections", "magnitudes", "values"):
        size = max(1.0, float(other.moments[1]))
        assert np.allclose(getattr(ours, name), getattr(other, name), rtol=1e-12, atol=1e-12 * size), name


def test_an_additive_mask_agrees_with_its_boolean_and_with_other_large_numbers() -> None:
    visible = torch.ones(5, 5, dtype=torch.bool).tril()
    added = torch.zeros(5, 5).masked_fill(~visible, -torch.inf)
    for other in (added, added.clamp(min=-1e9), added.clamp(min=torch.finfo(torch.float16).min)):
        assert agreement(fingerprint(visible), fingerprint(other), 1e-5) == IN_ORDER
    assert agreement(fingerprint(visible), fingerprint(~visible), 1e-5) == MAGNITUDES
    assert agreement(fingerprint(visible), fingerprint(visible.tril(-1)), 1e-5) == DIFFERENT


def test_shards_of_several_ranks_agree_with_the_whole() -> None:
    x = drawn(4, 6)
    whole = joined([fingerprint(x[:, :3]), fingerprint(x[:, 3:])])
    assert agreement(whole, fingerprint(x), 1e-5) == ANY_ORDER
    assert agreement(whole, fingerprint(x * 1.001), 1e-5) == DIFFERENT


def test_constants_and_few_numbers_say_nothing() -> None:
    assert fingerprint(torch.zeros(9)).says_nothing
    assert fingerprint(torch.tensor([1.0, 2.0])).says_nothing
    assert not fingerprint(torch.arange(5)).says_nothing
    assert fingerprint(torch.ones(3, 1).expand(3, 40)).numel == 3


def test_masked_scores_do_not_hide_differences_in_the_others() -> None:
    hidden = torch.full((6, 6), torch.finfo(torch.float32).min).triu(1)
    scores = drawn(6, 6)
    assert agreement(fingerprint(scores + hidden), fingerprint(scores + hidden / 2), 1e-5) == IN_ORDER
    assert agreement(fingerprint(scores + hidden), fingerprint(1.01 * scores + hidden), 1e-5) == DIFFERENT


def test_few_large_values_do_not_hide_differences_in_the_others() -> None:
    x = drawn(1000)
    x[3] = 1e7
    other = x * 1.001
    other[3] = 1e7
    assert agreement(fingerprint(x), fingerprint(other), 1e-5) == DIFFERENT


def test_large_tensors_have_no_fingerprint_until_they_are_wanted_or_asked_for() -> None:
    x = drawn(300, 300)
    far = OperationRecorder()
    far.is_near = False
    with far:
        (x * 2).sum()
    assert far.left_out == {0, 1}
    again = OperationRecorder(only=frozenset({1}))
    with again:
        (x * 2).sum()
    assert set(again.fingerprints) == {1}
    # Though wanted, it is too large to be sorted.
    assert again.fingerprints[1].magnitudes is None


def test_values_far_from_wanted_ones_are_not_sorted() -> None:
    x = drawn(6, 6)
    far = OperationRecorder()
    far.is_near = False
    with far:
        y = x * 2 + 1
        far.is_near = True
        y.sum()
    assert [far.fingerprints[number].magnitudes is None for number in (0, 1, 2)] == [True, True, False]


def scaled(x: torch.Tensor, weight: torch.Tensor, times: int) -> torch.Tensor:
    for _ in range(times):
        x = x * weight
    return x


def traced(times: int, only: frozenset[int] | None = None) -> tuple[OperationRecorder, SliceTrace]:
    """A trace of what is scaled after a tap, as it was before it."""
    x, weight = drawn(6, 4), drawn(4)
    recorder = OperationRecorder(only)
    with recorder:
        before = scaled(x, weight, 3)
        recorder.set_by_tap(before, "before", changed=False)
        number = recorder.read(scaled(before, weight, times))
    return recorder, slice_of(recorder, number)


def test_a_trace_of_wanted_values_has_the_same_operations_and_no_other_fingerprints() -> None:
    _, first = traced(2)
    assert first.elsewhere
    assert first.ran_elsewhere
    recorder, again = traced(2, frozenset(first.values))
    ours, theirs = (
        [(op.index, op.call, op.inputs, op.frames[:2]) for op in each.operations] for each in (again, first)
    )
    assert ours == theirs
    assert {n: each.norm for n, each in again.fingerprints.items()} == {
        n: each.norm for n, each in first.fingerprints.items()
    }
    assert set(recorder.fingerprints) == set(first.fingerprints)
    assert (again.elsewhere, again.ran_elsewhere, again.without_fingerprint) == ((), (), ())
    both = again.beside(first)
    assert (both.operations, both.elsewhere, both.ran_elsewhere) == (
        again.operations,
        first.elsewhere,
        first.ran_elsewhere,
    )


def test_a_trace_says_where_other_values_lead_to_the_result_than_were_wanted() -> None:
    _, first = traced(2)
    _, other = traced(4, frozenset(first.values))
    assert other.without_fingerprint


def test_operations_of_one_line_that_ran_elsewhere_are_kept_once_with_all_results() -> None:
    _, first = traced(2)
    # What led to the value is not among them.
    ((product, made),) = (each for each in first.ran_elsewhere if each[0].name == "mul")
    assert (product.frames[0].source, len(made)) == ("x = x * weight", 3)


def test_what_existed_before_is_named_where_it_is_read_near_a_wanted_value() -> None:
    weight = torch.nn.Parameter(drawn(4), requires_grad=False)
    recorder = OperationRecorder()
    recorder.is_near = recorder.reads_constants = False
    with recorder:
        far = drawn(6, 4) * weight
        (number,) = recorder.left_out
        assert recorder.values[number].path is None
        recorder.is_near = True
        result = recorder.read(far * weight)
    assert (recorder.values[number].path, recorder.values[number].is_parameter) == ("weight", True)
    assert not slice_of(recorder, result).without_fingerprint


def test_a_name_is_searched_in_a_variables_module_and_not_behind_an_object() -> None:
    place = ModuleType("place")
    place.weight = drawn(4)  # type: ignore[attr-defined]
    hidden = SimpleNamespace(place=ModuleType("behind"), held=SimpleNamespace(weight=drawn(4, seed=1)))
    hidden.place.weight = drawn(4, seed=2)

    def paths(where: object, *weights: list[torch.Tensor]) -> list[str | None]:
        recorder, numbers = OperationRecorder(), []
        with recorder:
            for each in weights:
                # A comprehension is a function of its own, without these variables, in older Pythons.
                numbers.append(recorder.read(each.pop()))
        return [recorder.values[number].path for number in numbers]

    assert paths(place, [place.weight]) == ["where.weight"]  # type: ignore[attr-defined]
    assert paths(hidden, [hidden.held.weight], [hidden.place.weight]) == ["where.held.weight", None]


def test_what_existed_before_and_is_read_far_from_a_wanted_value_alone_is_asked_for() -> None:
    weight = torch.nn.Parameter(drawn(4), requires_grad=False)

    def trace(only: frozenset[int] | None) -> SliceTrace:
        recorder = OperationRecorder(only)
        recorder.is_near = recorder.reads_constants = False
        with recorder:
            far = drawn(6, 4) * weight
            recorder.is_near = True
            return slice_of(recorder, recorder.read(far.cos()))

    first = trace(None)
    (number,) = first.without_fingerprint
    again = trace(frozenset(first.values))
    assert (again.without_fingerprint, again.values[number].path) == ((), "weight")


def test_operations_have_their_arguments_and_shapes_apart() -> None:
    x = drawn(2, 3)
    with OperationRecorder() as recorder:
        torch.softmax(x * 0.50005, -1)
    product, softmax = recorder.operations
    assert (product.arguments, product.shapes) == (("other=0.50005",), ((2, 3), (2, 3)))
    assert softmax.arguments == ("dim=-1", "half_to_float=False")


def test_a_tap_sets_its_value_in_every_shape_that_was_known() -> None:
    weight = drawn(8, 8)
    recorder = OperationRecorder()
    with recorder:
        flat = drawn(6, 8) @ weight
        shown = flat.view(2, 3, 8)
        recorder.set_by_tap(shown, "h", changed=False)
        result = recorder.read((shown.view(6, 8) + 1).tanh())
    assert [each.name for each in slice_of(recorder, result).operations] == ["add", "tanh"]


def test_a_tap_does_not_set_what_was_computed_from_its_value_before() -> None:
    recorder = OperationRecorder()
    with recorder:
        part = torch.ones(4).exp()
        total = part + 1
        recorder.set_by_tap(part, "part", changed=False)
        part.sqrt()
    assert recorder.values[recorder.read(total)].tap is None
    before, after = (next(each for each in recorder.operations if each.name == name) for name in ("add", "sqrt"))
    assert [recorder.values[each.inputs[0]].tap for each in (before, after)] == [None, "part"]


def test_a_tap_does_not_set_another_part_of_the_same_memory() -> None:
    weight = drawn(8, 8)
    recorder = OperationRecorder()
    with recorder:
        first, second = (drawn(6, 8) @ weight).chunk(2, -1)
        recorder.read(second)
        recorder.set_by_tap(first, "h", changed=False)
        result = recorder.read(second.tanh())
    assert "mm" in [each.name for each in slice_of(recorder, result).operations]


def test_a_mask_and_its_opposite_agree_up_to_the_rounding_of_their_projections() -> None:
    mask = torch.rand(200, 300, generator=torch.Generator().manual_seed(0)) > 0.5
    one, other = fingerprint(mask), fingerprint(~mask)
    assert one.projections is not None
    rounded = replace(other, projections=other.projections + 1e-3)
    assert agreement(one, rounded, 1e-5) == MAGNITUDES
    assert agreement(one, replace(one, projections=one.projections + 1e-3), 1e-5) == IN_ORDER


def test_a_received_tensor_has_the_same_number_wherever_its_memory_is() -> None:
    counts = []
    for reuses in (True, False):
        with OperationRecorder() as recorder:
            own = torch.ones(4) * 2
            with recorder.pause():
                received = own if reuses else torch.zeros(4)
            recorder.set_by_tap(received, "x", changed=True)
            received + 1
        counts.append([each.outputs for each in recorder.operations])
    assert counts[0] == counts[1]


def test_a_view_that_is_made_again_is_read_from_the_later_line() -> None:
    sigmas = torch.arange(4.0)
    with OperationRecorder() as recorder:
        sigmas[2].mul(3.0)
        again = sigmas[2]
        again.mul(2.0)
        again.detach().mul(5.0)
    (first, second), readers = (
        [each for each in recorder.operations if each.name == name] for name in ("select", "mul")
    )
    read_from = [recorder.values[each.inputs[0]].sources for each in readers]
    # A view of a view in its place adds nothing.
    assert read_from == [(first.index,), (second.index,), (second.index,)]
    assert all(each.inputs[0] in recorder.fingerprints for each in readers)


def test_a_written_part_has_its_place_in_the_largest_tensor_around_it() -> None:
    def parts_of(whole: torch.Tensor, write: Callable[[torch.Tensor], object]) -> list[WrittenPart]:
        with OperationRecorder() as recorder:
            whole.sum()
            write(whole)
            whole.sum()
        parts = [part for each in recorder.operations for part in each.written_parts]
        for part in parts:
            before, after = (recorder.fingerprints[number] for number in (part.before, part.after))
            assert agreement(before, after, 1e-6) != IN_ORDER
        return parts

    def begins(whole: torch.Tensor, write: Callable[[torch.Tensor], object]) -> list[tuple[int, ...]]:
        return [part.begin for part in parts_of(whole, write)]

    made = torch.arange(2.0 * 3 * 4).reshape(2, 3, 4)
    assert begins(made.clone(), lambda whole: whole[1, 2].fill_(7)) == [(1, 2, 0)]
    assert begins(made.clone(), lambda whole: whole[:, 1:][0, :, 3].mul_(2)) == [(0, 1, 3)]
    assert begins(made.clone().transpose(0, 2), lambda whole: whole[3, :, 1].add_(1)) == [(3, 0, 1)]
    assert begins(made.clone(), lambda whole: whole.mul_(2)) == []
    assert begins(made.clone()[0], lambda whole: whole[2].neg_()) == [(2, 0)]
    # An expanded tensor has the part several times.
    assert begins(torch.arange(3.0), lambda whole: (whole.expand(4, 3).sum(), whole[1:].neg_())) == [(1,)]


def test_after_the_most_operations_the_code_runs_on_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.lines.operations.MOST_OPERATIONS", 2)
    x = drawn(3)
    with OperationRecorder() as recorder:
        y = x.exp().exp()
        assert not recorder.is_cut_short
        y = y.exp()
    assert (len(recorder.operations), recorder.is_cut_short) == (2, True)
    assert torch.equal(y, x.exp().exp().exp())


@pytest.mark.parametrize("fails_silently", [False, True])
def test_an_error_of_the_recorder_ends_the_recording_or_the_code(fails_silently: bool) -> None:
    def broken() -> int:
        raise KeyError("which step")

    x, recorder = drawn(3), OperationRecorder()
    recorder.present_step, recorder.fails_silently = broken, fails_silently
    if not fails_silently:
        with pytest.raises(KeyError, match="which step"), recorder:
            x.exp()
        return
    with recorder:
        result = x.exp()
        recorder.present_step = int
        assert torch.equal(result + 1, x.exp() + 1)
    assert repr(recorder.failure) == "KeyError('which step')"
    assert (recorder.is_open, recorder.operations) == (False, [])


def test_data_of_python_has_no_source_at_the_address_of_a_computed_tensor() -> None:
    with OperationRecorder() as recorder:
        computed = torch.ones(4) * 3
        # As torch.tensor does, here with memory that was used before.
        torch.ops.aten.lift_fresh(computed).exp()
    assert recorder.values[recorded(recorder, "exp").inputs[0]].sources == ()


def test_only_operations_that_read_nothing_but_wanted_values_have_words() -> None:
    x, y = drawn(3), drawn(3, seed=1)
    with OperationRecorder(only=frozenset({0})) as recorder:
        x.exp()
        x * y
        y.cos()
    assert [(each.name, each.call, bool(each.stack)) for each in recorder.operations] == [
        ("exp", "exp(f32[3])", True),
        ("mul", "", False),
        ("cos", "", False),
    ]


@pytest.mark.parametrize("is_written_before", [True, False])
def test_a_parameter_that_is_written_after_the_first_tap_is_no_longer_the_models(is_written_before: bool) -> None:
    weight = torch.nn.Parameter(drawn(4))
    recorder = OperationRecorder()
    with recorder, torch.no_grad():
        if not is_written_before:
            recorder.begin_taps()
        weight.mul_(2)
        recorder.begin_taps()
        assert recorder.values[recorder.read(weight)].is_parameter is is_written_before


def test_long_lists_are_cut_in_words() -> None:
    with OperationRecorder() as recorder:
        torch.zeros(1, 1, 1, 1, 1, 2)
        torch.zeros(1, 1, 1, 1, 1, 2, 3)
    calls = [each.call.split("]")[0] for each in recorder.operations]
    assert calls == ["zeros([1, 1, 1, 1, 1, 2", "zeros([1, 1, 1, 1, 1, 2, ..."]


def test_attention_draws_numbers_if_it_drops_out() -> None:
    attention = torch.ops.aten._scaled_dot_product_efficient_attention.default
    q = drawn(1, 1, 2, 8)
    given: list[tuple[Any, tuple[Any, ...]]]
    given = [(attention, (q, q, q, None, False, rate)) for rate in (0.0, 0.5)]
    given += [(torch.ops.aten.rand_like.default, (q,)), (torch.ops.aten.exp.default, (q,))]
    assert [signature_of(func).draws(args, {}) for func, args in given] == [False, True, True, False]


@pytest.mark.parametrize(
    ("name", "kind", "step", "occurrence", "expected"),
    [
        ("x", "grad", 1, 2, True),
        ("y", "grad", 1, 2, False),
        ("x", "param", 1, 2, False),
        ("x", "grad", 2, 2, False),
        ("x", "grad", 1, 1, False),
    ],
)
def test_a_wanted_call_is_one_call_of_one_tap(name: str, kind: str, step: int, occurrence: int, expected: bool) -> None:
    wanted = WantedCall("x", {"kind": "grad"}, 1, 2)
    assert wanted.is_at(identity({"kind": kind, "name": name}), step, occurrence) is expected


def test_the_last_values_that_did_not_lead_to_the_result_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("graftlab.lines.traces.MOST_ELSEWHERE", 2)
    x, recorder = drawn(5), OperationRecorder()
    with recorder:
        beside = [x.cos(), x.sin(), x.exp()]
        for each in beside:
            recorder.read(each)
        result = recorder.read(x.tanh())
    kept = slice_of(recorder, result).elsewhere
    assert [round(each.norm, 4) for each in kept] == [round(each.norm().item(), 4) for each in beside[1:]]


def test_only_several_equal_numbers_are_constant() -> None:
    with OperationRecorder() as recorder:
        numbers = [recorder.read(each) for each in (torch.tensor(2.0), torch.full((3,), 2.0), torch.arange(3.0))]
        result = recorder.read(torch.ones(1))
    flow = Dataflow(slice_of(recorder, result))
    flow = Dataflow(replace(flow.trace, fingerprints=recorder.fingerprints))
    assert [flow.is_constant(each) for each in numbers] == [False, True, False]


def test_numbers_that_are_drawn_in_place_are_no_data() -> None:
    def drawing(draw: Callable[[], torch.Tensor]) -> list[str]:
        with OperationRecorder() as recorder:
            result = recorder.read(draw().view(3, 2) * 2)
        trace = slice_of(recorder, result)
        return [each.name for each in trace.operations if each.index in Dataflow(trace).drawn_data()]

    assert drawing(lambda: torch.randn(6)) == ["randn", "view"]
    assert drawing(lambda: torch.rand_like(torch.ones(6))) == ["rand_like", "view"]
    assert drawing(lambda: torch.empty(6).normal_()) == []
