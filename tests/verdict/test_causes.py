"""Causes: each named group gets the label that its effects on the output bear out."""

from __future__ import annotations

import math
from collections.abc import Callable

import pandas as pd
import pytest
import torch

from graftlab.base.tap_groups import group_of
from graftlab.verdict.causes import (
    MOST_SWAPS,
    Causes,
    OutputFloor,
    _unlike,
    consequences,
    distance,
    effects_in_words,
    find_causes,
)
from graftlab.verdict.floor import Floor

T = OutputFloor(1e-7, 6e-8, 5.0)


def additive(**strength: float) -> Callable[[frozenset[str]], float]:
    """Effects that add up with their signs, as small faults' do."""
    return lambda kept: abs(sum(strength[group] for group in kept))


def test_a_group_that_moves_the_output_alone_is_a_culprit() -> None:
    found = find_causes(["a"], additive(a=1e4), T)
    assert found.labels == {"a": "culprit"}
    assert (found.alone, found.total, found.restored) == ({"a": 1e4}, 1e4, 0.0)


def test_two_unrelated_faults_are_both_culprits() -> None:
    assert find_causes(["a", "b"], additive(a=1e4, b=700.0), T).labels == {"a": "culprit", "b": "culprit"}


def test_a_group_that_does_not_move_the_output_is_minor() -> None:
    assert find_causes(["a", "b"], additive(a=1e4, b=1.0), T).labels == {"a": "culprit", "b": "minor"}


def test_groups_that_move_it_alone_and_not_together_cancel() -> None:
    found = find_causes(["q", "k"], additive(q=300.0, k=-300.0), T)
    assert found.labels == {"q": "cancels", "k": "cancels"}
    assert found.cancelling == (frozenset("qk"),)


@pytest.mark.parametrize("others", ["qk", "qkv", "qkvo"])
def test_a_culprit_beside_cancelling_groups_is_distinguished(others: str) -> None:
    strength = dict.fromkeys(others, 100.0)
    strength[others[-1]] = -100.0 * (len(others) - 1)
    # Unlike for any of them alone, only all together cancel.
    found = find_causes([*others, "x"], additive(**strength, x=5e3), T)
    assert found.labels == {**dict.fromkeys(others, "cancels"), "x": "culprit"}


def test_a_group_that_already_cancels_another_is_in_no_further_set() -> None:
    found = find_causes(["a", "b", "c", "x"], additive(a=100.0, b=-100.0, c=100.0, x=5e3), T)
    assert found.cancelling == (frozenset("ab"),)
    assert found.labels == {"a": "cancels", "b": "cancels", "c": "culprit", "x": "culprit"}


def test_sets_with_equal_effects_are_the_most_likely_to_cancel() -> None:
    assert _unlike([10.0, 10.0]) == 0.0
    assert _unlike([10.0, 9.0, 9.0]) == pytest.approx(math.log(19 / 11))
    assert _unlike([21.0, 10.0]) == pytest.approx(math.log(22 / 11))
    assert _unlike([math.inf, 1.0]) == math.inf


def test_gradients_follow_from_wrong_values_only_if_all_of_their_taps_do() -> None:
    def followed(*wrong: str) -> list[str]:
        lines = [("l.0.up", None), ("l.1.up", None), ("l.1.up", "grad"), ("l.0.up", "grad")]
        lines += [("l.1.up.weight", "param_grad"), ("l.0.up.weight", "param_grad")]
        frame = pd.DataFrame(
            {"name": name, "tags": {"kind": kind} if kind else {}, "ratio": 9.0 if kind or name in wrong else 1.0}
            for name, kind in lines
        )
        frame["group"] = [group_of(name, tags) for name, tags in zip(frame["name"], frame["tags"], strict=True)]
        return consequences(frame, list(dict.fromkeys(frame["group"])), 5.0)

    assert followed() == followed("l.0.up") == []
    assert followed("l.0.up", "l.1.up") == ["l.*.up.weight@param_grad"]


def test_the_gradient_of_a_tap_follows_from_what_is_computed_of_it() -> None:
    lines = [("h", None, 1.0), ("down", None, 9.0), ("down", "grad", 1.0), ("h", "grad", 9.0)]
    frame = pd.DataFrame({"name": n, "tags": {"kind": k} if k else {}, "ratio": r} for n, k, r in lines)
    frame["group"] = [group_of(name, tags) for name, tags in zip(frame["name"], frame["tags"], strict=True)]
    assert consequences(frame, ["down", "h@grad"], 5.0) == ["h@grad"]
    # A value that is wrong before it explains nothing.
    assert consequences(frame.iloc[[1, 0, 2, 3]], ["down", "h@grad"], 5.0) == []


def test_groups_that_move_it_only_together_are_blamed() -> None:
    def both(kept: frozenset[str]) -> float:
        return 1e3 if kept == frozenset("ab") else 0.0

    assert find_causes(["a", "b"], both, T).labels == {"a": "culprit", "b": "culprit"}


@pytest.mark.parametrize("left", [50.0, float("inf"), float("nan")])
def test_a_swap_that_does_not_restore_clears_no_group(left: float) -> None:
    found = find_causes(["a", "b"], lambda kept: left if not kept else 1.0, T)
    assert found.labels == {"a": "culprit", "b": "culprit"}
    assert not found.restored <= T.threshold


def test_the_search_is_bounded_and_reports_it() -> None:
    asked: list[frozenset[str]] = []

    def effect(kept: frozenset[str]) -> float:
        asked.append(kept)
        return 100.0 * len(kept)

    found = find_causes([f"g{i}" for i in range(20)], effect, T)
    assert found.cut_short
    assert len(asked) == len(set(asked)) <= MOST_SWAPS


def test_groups_that_move_the_output_only_together_are_culprits_beside_another() -> None:
    strength = {"a": 1e4, "b": 3.0, "c": 3.0}
    found = find_causes(list(strength), additive(**strength), T)
    assert found.labels == dict.fromkeys(strength, "culprit")
    assert found.together == {"b", "c"}


@pytest.mark.parametrize(("count", "alone"), [(5, 5), (6, 4)])
def test_all_groups_are_swapped_alone_if_the_runs_suffice(count: int, alone: int) -> None:
    asked: list[frozenset[str]] = []

    def effect(kept: frozenset[str]) -> float:
        asked.append(kept)
        return 0.1 * len(kept)

    found = find_causes([f"g{i}" for i in range(count)], effect, T, most=8)
    assert (len(found.alone), len(found.untested)) == (alone, count - alone)
    assert len(asked) <= 8


def test_groups_beyond_the_bound_are_swapped_together_and_reported() -> None:
    strength = {"big": 1e4} | {f"g{i}": 0.1 for i in range(20)}
    found = find_causes(list(strength), additive(**strength), T, by_size=["big"])
    assert found.labels["big"] == "culprit"
    assert {label for group, label in found.labels.items() if group != "big"} == {"minor"}
    assert set(found.untested) == set(strength) - set(found.alone)
    moving = find_causes([*strength, "last"], additive(**strength, last=300.0), T, by_size=[*strength, "last"])
    assert moving.labels["last"] == "culprit"
    # Those that were swapped alone, and moved nothing, have no part in it.
    assert {moving.labels[group] for group in moving.alone if group != "big"} == {"minor"}
    assert not moving.together


def test_groups_beyond_the_bound_are_blamed_if_they_move_the_output_with_minor_ones() -> None:
    minor = [f"g{i}" for i in range(20)]
    # Neither those that were swapped alone nor the others move it; all of them do.
    strength = {"big": 1e4} | dict.fromkeys(minor, 0.4)
    found = find_causes(list(strength), additive(**strength), T, by_size=["big"])
    assert found.untested
    assert found.labels == dict.fromkeys(strength, "culprit")
    assert found.together == set(minor)


@pytest.mark.parametrize(("restored", "moves"), [(0.0, True), (0.9, False)])
def test_a_large_floor_of_low_precision_excuses_only_the_remaining_error(restored: float, moves: bool) -> None:
    # Rounding adds up to 10 %, and the group moves the output by 20 %.
    low_precision = OutputFloor(0.1, 2**-9, 5.0)
    found = find_causes(["a"], lambda kept: 2.0 if kept else restored, low_precision)
    assert found.labels == {"a": "culprit" if moves else "minor"}
    assert found.agrees is not moves


INF, NAN = float("inf"), float("nan")


@pytest.mark.parametrize(
    ("record", "value", "expected"),
    [
        ([3.0, 4.0, -INF, NAN], [3.0, 4.5, -INF, NAN], 0.1),
        ([3.0, 4.0, -INF], [3.0, 4.0, 0.0], INF),
        ([3.0, 4.0, -INF], [3.0, 4.0, INF], INF),
        ([3.0, 4.0, 0.0], [3.0, 4.0, NAN], INF),
        ([0.0, -INF], [0.0, -INF], 0.0),
        ([0.0, 0.0], [0.0, 0.0], 0.0),
    ],
)
def test_values_not_finite_on_both_sides_are_left_out_of_the_distance(
    record: list[float], value: list[float], expected: float
) -> None:
    assert distance([(torch.tensor(record), torch.tensor(value))]).rel_l2 == pytest.approx(expected)


def test_imaginary_parts_count_in_the_distance() -> None:
    one = torch.tensor([3 + 4j, 3 - 4j])
    assert distance([(one, one.conj())]).rel_l2 == pytest.approx(1.6)
    assert distance([(one, one)]).rel_l2 == distance([(one.conj(), one.conj().resolve_conj())]).rel_l2 == 0
    assert distance([(one, one.real)]).rel_l2 == pytest.approx(0.8)


def test_an_output_with_no_finite_number_has_no_distance() -> None:
    """Nothing is known of it: it must not be said to agree."""
    lost, one = torch.tensor([NAN, -INF]), torch.ones(2)
    assert math.isnan(distance([(lost, lost)]).rel_l2)
    assert distance([(lost, lost), (one, 2 * one)]).rel_l2 == 1
    assert distance([(one[:0], one[:0])]).rel_l2 == 0


def test_an_output_without_a_record_of_its_shape_has_no_distance() -> None:
    one = torch.ones(2)
    assert math.isnan(distance([(one, one), (None, one)]).rel_l2)
    assert math.isnan(distance([(one, one[:1])]).rel_l2)


def test_one_wrong_number_of_many_shows_in_the_largest_difference() -> None:
    record = torch.ones(10_000)
    value = record.clone()
    value[7] = 2.0
    found = distance([(record[:5000], value[:5000]), (record[5000:], value[5000:])])
    assert (found.rel_l2, found.rel_max) == pytest.approx((0.01, 1.0))
    assert Floor(0.005, 0.02).ratio(found.rel_l2, found.rel_max) == pytest.approx(50)


@pytest.mark.parametrize(
    ("causes", "said"),
    [
        (Causes({"a@input": "culprit"}, restored=math.nan), ["The effect of a on the output y could not be measured."]),
        (
            Causes({"a": "culprit", "b": "minor"}, restored=math.inf),
            ["With the baseline's a, b the output y is still above any floor: something outside the taps"],
        ),
        (
            Causes({"a": "culprit"}, restored=0.5, total=math.nan),
            ["With the baseline's a the output y agrees (0.5 x its floor); without them it could not be measured."],
        ),
        (
            Causes({"a": "culprit"}, restored=0.5, total=50.0),
            ["With the baseline's a the output y agrees (0.5 x its floor; 50 x without)."],
        ),
        (
            Causes({"a": "culprit"}, restored=0.5, total=math.inf),
            ["With the baseline's a the output y agrees (0.5 x its floor; above any floor without)."],
        ),
        (Causes({"a": "minor"}, total=3.0), ["The output y still agrees (3 x its floor)."]),
        (
            Causes({"a": "culprit"}, total=3.0, earlier=(1,)),
            ["The output y agrees in its last call (3 x its floor) and differs earlier, in step 1."],
        ),
        (Causes({"a": "culprit"}, total=3.0, earlier=(0, 1)), ["The output y agrees in its last call (3 x"]),
        # An output that is itself grafted agrees in any case.
        (Causes({"y": "culprit"}, total=50.0), []),
        (Causes({"y": "culprit"}, total=math.nan), []),
        (
            Causes({"y": "culprit"}, total=50.0, cancelling=(frozenset("ba"), frozenset("c"))),
            ["a, b cancel each other."],
        ),
        (
            Causes({"y": "culprit"}, total=50.0, together=frozenset("ba")),
            ["a and b change the output only together; neither of them does alone."],
        ),
        (
            Causes({"y": "culprit"}, total=50.0, together=frozenset("abcdef"), untested=tuple("abcdefgh")),
            [
                "a, b, c and 3 more change the output only together; none of them does alone.",
                "Not swapped alone, to limit the number of runs: a, b, c, d, e, f, g, h.",
            ],
        ),
        (
            Causes({"y": "culprit"}, total=50.0, untested=tuple("abcdefghi")),
            ["Not swapped alone, to limit the number of runs: a, b, c and 6 more."],
        ),
        (
            Causes({"y": "culprit"}, total=50.0, together=frozenset("abc"), untested=("d", "e"), cut_short=True),
            [
                "a, b and c change the output only together; none of them does alone.",
                "Not swapped alone, to limit the number of runs: d, e.",
                "Not all sets of groups that might cancel were tried.",
            ],
        ),
    ],
)
def test_each_effect_on_an_output_has_its_sentence(causes: Causes, said: list[str]) -> None:
    lines = effects_in_words("y", causes, 5.0)
    assert len(lines) == len(said)
    assert all(line.startswith(each) for line, each in zip(lines, said, strict=True)), lines


def test_outputs_are_named_unless_the_model_has_one() -> None:
    causes = Causes({"a": "culprit"}, restored=5.0, total=50.0)
    assert effects_in_words("output", causes, 5.0)[0].startswith("With the baseline's a the output agrees")
    assert effects_in_words("a@grad", causes, 5.0)[0].startswith("With the baseline's a the output, the gradient")
    # The limit itself is agreement.
    assert "is still 6 x its floor" in effects_in_words("y", Causes({"a": "culprit"}, restored=6.0), 5.0)[0]
