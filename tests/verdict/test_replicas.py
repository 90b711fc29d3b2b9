"""The check of one side's ranks: which taps are copies, which copies differ, and which sum was not reduced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from graftlab.layouts.replicas import Replicas, TapSketch
from graftlab.verdict.replicas import (
    FROM_GROUP,
    FROM_WEIGHT,
    ReplicaComparison,
    TapAcrossRanks,
    _cosine,
    _distance,
    check_replicas,
    unreduced,
)
from graftlab.verdict.replicas_wording import judged, text_of_check

BOTH = Replicas("replicate", ((0, 1),))
NUMBERS = np.random.default_rng(0).standard_normal((8, 256))


def sketch(name: str, values: Any, shape: tuple[int, ...] = (4, 8), step: int = 0, **given: Any) -> TapSketch:
    tags = given.pop("tags", {})
    fields = {"dtype": "float32", "norm": float(np.linalg.norm(values)), "nonfinite": 0, **given}
    return TapSketch(
        name, tags, (name, str(tags), step), shape, sketch=np.asarray(values, np.float64).tobytes(), **fields
    )


def check(*ranks: Sequence[TapSketch], **options: Any) -> ReplicaComparison:
    return check_replicas(ranks, options.pop("declared", lambda name: None), **options)


def relations(checked: ReplicaComparison) -> dict[str, str]:
    return {each.name: each.relation for each in checked.taps}


def only(checked: ReplicaComparison) -> TapAcrossRanks:
    (found,) = checked.taps
    return found


@pytest.mark.parametrize(
    ("off", "relation"), [(0.0, "agrees"), (1e-6, "agrees"), (1e-4, "disagrees"), (0.1, "disagrees"), (3.0, "own data")]
)
def test_near_values_are_copies_that_agree_up_to_rounding_and_far_ones_are_own_data(off: float, relation: str) -> None:
    found = only(check([sketch("x", NUMBERS[0])], [sketch("x", NUMBERS[0] + off * NUMBERS[1])]))
    assert found.relation == relation
    assert found.ranks == ((1,) if relation == "disagrees" else ())


def test_a_coarser_dtype_rounds_more() -> None:
    pair = [sketch("x", NUMBERS[0])], [sketch("x", NUMBERS[0] * (1 + 1e-2))]
    assert only(check(*pair)).relation == "disagrees"
    coarse = [[each._replace(dtype="bfloat16") for each in shown] for shown in pair]
    assert only(check(*coarse)).relation == "agrees"


@pytest.mark.parametrize("change", [{"nonfinite": 3}, {"shape": (8, 4)}])
def test_declared_copies_of_another_shape_or_with_nan_on_one_rank_never_agree(change: dict[str, Any]) -> None:
    ours = sketch("x", NUMBERS[0])
    found = only(check([ours], [ours._replace(**change)], declared=lambda name: BOTH))
    assert (found.relation, found.apart) == ("disagrees", np.inf)
    assert "shapes differ, or some ranks are not finite" in text_of_check(ReplicaComparison(2, [found]), [])


def test_a_declared_copy_that_is_far_off_is_not_taken_for_the_ranks_own_data() -> None:
    far = [sketch("x", NUMBERS[0])], [sketch("x", NUMBERS[1])]
    assert only(check(*far)).relation == "own data"
    assert only(check(*far, declared=lambda name: BOTH if name == "x" else None)).relation == "disagrees"
    said = [[each._replace(declared=BOTH) for each in shown] for shown in far]
    assert only(check(*said)).relation == "disagrees"
    # Even where it has the shape of a part of a copy.
    whole = sketch("whole", NUMBERS[2], (8, 8))
    checked = check(*[[whole, *shown] for shown in said])
    assert relations(checked) == {"whole": "agrees", "x": "disagrees"}


def test_a_tap_that_a_rank_lacks_is_named_with_the_ranks_that_have_it() -> None:
    both, alone = sketch("x", NUMBERS[0]), sketch("y", NUMBERS[1])
    checked = check([both, alone], [both], [both, alone])
    assert checked.missing == ["y (on ranks 0, 2 only)"]
    assert relations(checked) == {"x": "agrees"}
    assert text_of_check(checked, []).startswith("Not checked, because some ranks do not reach them: y (on ranks")


def test_copies_along_one_mesh_dimension_are_not_failed_copies_along_another() -> None:
    ranks = [[sketch("x", NUMBERS[rank % 2] * 0.05 + NUMBERS[7])] for rank in range(4)]
    mesh = {"data": [(0, 2), (1, 3)], "tensor": [(0, 1), (2, 3)]}
    found = only(check(*ranks, mesh=mesh))
    assert (found.relation, found.layout) == ("agrees", "inferred from near values along data")
    assert only(check(*ranks)).relation == "disagrees"
    ranks[2] = [sketch("x", NUMBERS[0] * 0.05 + NUMBERS[7] + 0.01 * NUMBERS[3])]
    wrong = only(check(*ranks, declared=lambda name: Replicas("by hand", ((0, 2), (1, 3)))))
    assert (wrong.ranks, wrong.first_of(3), wrong.first_of(2)) == ((2,), 1, 0)


def test_parts_of_a_sequence_that_share_a_bias_are_not_differing_copies() -> None:
    whole = sketch("whole", NUMBERS[0], (8, 8))
    parts = [sketch("part", NUMBERS[1] + 0.05 * NUMBERS[2 + rank], (4, 8)) for rank in range(2)]
    assert relations(check(*[[whole, part] for part in parts]))["part"] == "own data"
    assert relations(check(*[[part] for part in parts]))["part"] == "disagrees"


def test_a_tap_whose_group_is_equal_on_all_ranks_in_other_layers_should_be_equal() -> None:
    ranks = [[sketch("h.0.x", NUMBERS[0]), sketch("h.1.x", NUMBERS[1 + rank])] for rank in range(2)]
    checked = check(*ranks)
    assert relations(checked) == {"h.0.x": "agrees", "h.1.x": "disagrees"}
    (found,) = checked.disagreeing
    assert found.layout == FROM_GROUP
    assert "It looks like a partial sum that was not reduced here." in text_of_check(checked, [])


def test_the_layer_whose_copies_differ_first_is_named() -> None:
    taps = [
        [sketch("h.0.x", NUMBERS[0])],
        *([sketch(f"h.{n}.x", NUMBERS[n] + off) for n in (2, 1)] for off in (0, 0.1)),
    ]
    text = text_of_check(check([*taps[0], *taps[1]], [*taps[0], *taps[2]]), [])
    assert text.startswith("h.*.x should be equal on the ranks but is not in layers 1-2, layer 2 first: rank 1 differs")


@pytest.mark.parametrize(("name", "kind"), [("w", "param_grad"), ("w.exp_avg", "optimizer")])
def test_the_gradient_and_state_of_a_replicated_weight_are_copies_too(name: str, kind: str) -> None:
    weight = sketch("w", NUMBERS[0], tags={"kind": "param"})
    ranks = [[weight, sketch(name, NUMBERS[1 + rank], tags={"kind": kind})] for rank in range(2)]
    gradient = check(*ranks).taps[1]
    assert (gradient.relation, gradient.layout) == ("disagrees", FROM_WEIGHT)
    advice = "Gradients of replicated weights must be reduced over the ranks"
    assert (advice in text_of_check(check(*ranks), [])) == (kind == "param_grad")
    own = [[sketch("w", NUMBERS[3 + at], tags={"kind": "param"}), shown[1]] for at, shown in enumerate(ranks)]
    assert check(*own).taps[1].relation == "own data"


def test_a_sum_that_was_not_reduced_is_found_where_it_is_added_to_a_copy() -> None:
    ranks = [
        [sketch("x", NUMBERS[0]), sketch("part", NUMBERS[1 + rank]), sketch("sum", NUMBERS[0] + NUMBERS[1 + rank])]
        for rank in range(2)
    ]
    checked = check(*ranks)
    assert relations(checked) == {"x": "agrees", "part": "own data", "sum": "disagrees"}
    assert "All of that difference is in part, whose values differ on each rank" in text_of_check(checked, [])
    ranks[1][2] = sketch("sum", NUMBERS[0] + NUMBERS[2] + 0.1 * NUMBERS[5])
    assert relations(check(*ranks))["sum"] == "own data"


def test_a_copy_on_some_of_the_ranks_is_compared_among_these() -> None:
    shown = [[sketch("x", NUMBERS[place])] for place in (0, 0, 1)]
    found = only(check(*shown, declared=lambda name: Replicas("on a mesh", ((0, 1), (2,)))))
    assert (found.relation, found.ranks) == ("agrees", ())
    shown[1] = [sketch("x", NUMBERS[0] + 0.1)]
    assert only(check(*shown, declared=lambda name: Replicas("on a mesh", ((0, 1), (2,))))).ranks == (1,)


def test_parts_that_are_near_by_chance_name_no_rank() -> None:
    """Parts of a sequence, which share a large bias, beside a whole."""
    parts = [NUMBERS[0] + 0.05 * NUMBERS[1 + rank] for rank in range(2)]
    ranks = [[sketch("whole", NUMBERS[5]), sketch("part", part, shape=(2, 8))] for part in parts]
    part = check(*ranks).taps[1]
    assert (part.relation, part.apart, part.ranks) == ("own data", 0.0, ())


def test_values_that_ranks_compute_from_other_inputs_are_not_judged() -> None:
    ranks = [[sketch("ids", NUMBERS[rank]), sketch("h", NUMBERS[2] + 0.05 * NUMBERS[3 + rank])] for rank in range(2)]
    checked = check(*ranks)
    assert [each.name for each in judged(checked, [])] == ["h"]
    assert judged(checked, ["ids"]) == []
    # An input is none itself, and what is stated to be a copy is one whatever the inputs are.
    assert judged(checked, ["h"]) == []
    stated = check(*ranks, declared=lambda name: BOTH if name == "h" else None)
    assert [each.name for each in judged(stated, ["ids"])] == ["h"]
    assert text_of_check(checked, ["ids"]).startswith("The ranks' inputs differ: ids.")


def test_weights_are_blamed_before_values_and_values_before_their_gradients() -> None:
    kinds: list[dict[str, Any]] = [{"kind": "grad"}, {}, {"kind": "param"}]
    ranks = [[sketch("x", NUMBERS[0] + rank * 0.1 * NUMBERS[1], tags=tags) for tags in kinds] for rank in range(2)]
    assert [each.kind for each in check(*ranks).disagreeing] == ["param", None, "grad"]


def test_ranks_without_a_finite_number_are_not_reported_to_agree() -> None:
    lost = sketch("x", np.zeros(256), nonfinite=32)
    assert text_of_check(check([lost], [lost]), []) == (
        "Not checked: x has no finite number on any rank.\nNothing was compared: no tap has a finite number."
    )
    fine = sketch("y", NUMBERS[0])
    assert "no finite number" not in text_of_check(check([lost], [fine._replace(name="x", place=lost.place)]), [])
    text = text_of_check(check([lost, fine], [lost, fine]), [])
    assert text.endswith("The 2 ranks agree where they hold copies (1 group of taps).")
    assert text_of_check(check([], []), []).startswith("Nothing was compared: no tap was reached on every rank.")


def test_a_tensor_without_elements_is_not_reported_to_lack_finite_numbers() -> None:
    empty = check(*[[sketch("x", NUMBERS[0] * 0, shape=(0, 8))]] * 2)
    assert "finite" not in text_of_check(empty, [])


def test_values_as_large_as_a_copy_are_not_parts_even_beside_a_larger_copy() -> None:
    known = [sketch("whole", NUMBERS[0], (8, 8)), sketch("small", NUMBERS[1], (4, 8))]
    ranks = [[*known, sketch("part", NUMBERS[2] + 0.05 * NUMBERS[3 + rank], (4, 8))] for rank in range(2)]
    assert relations(check(*ranks))["part"] == "disagrees"


def test_a_copy_that_passes_on_its_difference_is_not_a_partial_sum() -> None:
    ranks = [[sketch("h", NUMBERS[0] + off), sketch("out", NUMBERS[1] + off)] for off in (0.0, 0.1 * NUMBERS[2])]
    assert relations(check(*ranks)) == {"h": "disagrees", "out": "disagrees"}
    copy, out = check(*ranks).taps
    assert unreduced([copy], out) is None
    assert unreduced([replace(copy, relation="own data")], out) is not None
    assert unreduced([replace(copy, relation="own data", kind="grad")], out) is None


def test_tensors_of_zeros_have_no_direction() -> None:
    zeros, other = sketch("x", NUMBERS[0] * 0), sketch("x", NUMBERS[0])
    assert [_cosine(zeros, zeros), _cosine(zeros, other), _distance(zeros, zeros)] == [0.0, 0.0, 0.0]
    # But a rank without values does not agree with one that has some.
    assert [_distance(zeros, other), _distance(other, zeros)] == [1.0, 1.0]
    assert _cosine(other, other) == pytest.approx(1.0)


def test_of_two_partial_sums_the_last_before_the_copy_is_named() -> None:
    parts = [[sketch(name, NUMBERS[1 + rank]) for name in ("early", "late")] for rank in range(2)]
    ranks = [[sketch("x", NUMBERS[0]), *each, sketch("sum", NUMBERS[0] + each[0].values)] for each in parts]
    assert "All of that difference is in late, " in text_of_check(check(*ranks), [])
    # What is computed from the sum may have the same difference.
    ranks = [[*shown, sketch("after", each[0].values)] for shown, each in zip(ranks, parts, strict=True)]
    assert "All of that difference is in late, " in text_of_check(check(*ranks), [])


def test_own_data_by_a_stated_layout_is_not_looked_at_again() -> None:
    ranks = [[sketch("h.0.x", NUMBERS[0]), sketch("h.1.x", NUMBERS[1 + rank])] for rank in range(2)]
    alone = Replicas("shard", ((0,), (1,)))
    checked = check(*ranks, declared=lambda name: alone if name == "h.1.x" else None)
    assert relations(checked) == {"h.0.x": "agrees", "h.1.x": "own data"}


def test_a_sum_is_sought_among_the_taps_just_before_it_alone() -> None:
    for between, relation in ((15, "disagrees"), (16, "own data")):
        ranks = [
            [
                *(sketch("x", NUMBERS[0]), sketch("part", NUMBERS[1 + rank])),
                *(sketch(f"c{n}", NUMBERS[0]) for n in range(between)),
                sketch("sum", NUMBERS[0] + NUMBERS[1 + rank]),
            ]
            for rank in range(2)
        ]
        assert relations(check(*ranks))["sum"] == relation, between


def test_what_holds_nothing_or_no_copy_is_not_reported_to_agree() -> None:
    checked = check([sketch("x", NUMBERS[0])], [sketch("x", NUMBERS[1])])
    assert relations(checked) == {"x": "own data"}
    lines = text_of_check(checked, []).splitlines()
    assert lines[0] == "The 2 ranks agree where they hold copies (0 groups of taps)."
    assert lines[1].startswith("1 group of taps is each rank's own, as shards are: x.")
    skipped = ReplicaComparison(2, checked.taps, skipped=list("abcdef"))
    assert text_of_check(skipped, []).startswith("Not checked: a, b, c, d show no tensor to compare.\n")


def test_only_inputs_that_differ_are_named_as_such() -> None:
    taps = [sketch("x", NUMBERS[0]), sketch("y", NUMBERS[2])], [sketch("x", NUMBERS[1]), sketch("y", NUMBERS[2])]
    assert text_of_check(check(*taps), ["x", "y"]).startswith("The ranks' inputs differ: x. Under data parallelism")


def test_later_copies_that_differ_follow_the_first_and_inferred_layouts_are_marked() -> None:
    names = [f"h.{n}.{part}" for n in range(2) for part in ("up", "down")]
    ranks = [[sketch(name, NUMBERS[0] + off * NUMBERS[1]) for name in names] for off in (0.0, 1e-3)]
    first, inferred = text_of_check(check(*ranks), []).splitlines()
    assert first.startswith(
        "h.*.up should be equal on the ranks but is not in layers 0-1, layer 0 first: rank 1 differs"
    )
    assert " Later ones differ too, and may have inherited it: h.*.down in layers 0-1 (rel_l2 " in first
    assert inferred.startswith("Layouts were inferred from the values, so a difference may be intended.")
    declared = check(*ranks, declared=lambda name: BOTH)
    assert "inferred" not in text_of_check(declared, [])


def test_ranks_of_several_meshes_have_copies_on_each_of_them() -> None:
    meshes = [Replicas("replicate", ((0, 1),)), Replicas("replicate", ((2, 3),))]
    shown = [[sketch("x", NUMBERS[rank // 2], declared=meshes[rank // 2])] for rank in range(4)]
    assert only(check(*shown)).relation == "agrees"
    shown[3] = [sketch("x", NUMBERS[1] + 0.1, declared=meshes[1])]
    assert (only(check(*shown)).relation, only(check(*shown)).ranks) == ("disagrees", (3,))
