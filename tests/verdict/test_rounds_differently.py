"""Groups that are never bit-equal from equal inputs, where the others always are, are distinguished from mistakes."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from graftlab.verdict.rounds_differently import (
    RoundingGroups,
    rounds_differently,
    sentence_on_single_taps,
    taps_that_stand_out,
)

EQUAL, OFF = [0.0, 0.0], [1e-3, 2e-3]


def frame_of(groups: dict[str, list[float | None]], **columns: Any) -> pd.DataFrame:
    """Rows of these groups, with what each of them adds."""
    rows = [(group, added) for group, found in groups.items() for added in found]
    given = {"group": [group for group, _ in rows], "added": [added for _, added in rows], "dtype": "bfloat16"}
    return pd.DataFrame({**given, "cast": None, **columns})


FOUR = {"late": OFF, "b": EQUAL, "a": EQUAL, "c": EQUAL}


def test_the_groups_are_named_in_their_order_with_the_number_of_equal_ones() -> None:
    found = rounds_differently(frame_of({"z": OFF, "y": EQUAL, "a": OFF, "b": EQUAL, "c": EQUAL}), [])
    assert (found.groups, found.equal, found.dtypes) == (("z", "a"), 3, ("bfloat16",))


@pytest.mark.parametrize(
    "groups",
    [
        {"x": EQUAL, "y": EQUAL},
        # As many equal groups as others, and too many that are equal sometimes.
        {"x": OFF, "a": EQUAL},
        {"x": OFF, "y": OFF, "a": EQUAL, "b": EQUAL},
        {"x": OFF, "a": EQUAL, "b": EQUAL, **{f"s{n}": [0.0, 1e-3] for n in range(3)}},
        {"x": [1e-3, 0.0], "a": EQUAL, "b": EQUAL},
    ],
)
def test_no_group_is_reported_without_a_clear_majority_that_is_equal(groups: dict[str, list[float | None]]) -> None:
    assert rounds_differently(frame_of(groups), []).groups == ()


def test_half_of_the_groups_equal_and_more_than_those_that_differ_is_enough() -> None:
    groups: Any = {"x": OFF, "a": EQUAL, "b": EQUAL, **{f"s{n}": [0.0, 1e-3] for n in range(1)}}
    assert rounds_differently(frame_of(groups), []).groups == ("x",)


def test_a_single_layer_that_is_never_bit_equal_is_named_by_its_tap() -> None:
    layers = {f"l.{n}.{name}": OFF if (n, name) == (1, "o") else EQUAL for n in range(3) for name in ("q", "o")}
    frame = frame_of(layers)  # type: ignore[arg-type]
    frame["name"], frame["group"] = frame["group"], frame["group"].str.replace(r"\.\d\.", ".*.", regex=True)
    assert rounds_differently(frame, []).groups == ()
    said = sentence_on_single_taps(frame)
    assert said is not None
    assert said.startswith(
        "l.1.o is not bit-equal from equal inputs, and the other 5 taps of bfloat16 are. So it, or code before it that "
        "is not tapped, computes in"
    )
    both = frame.assign(added=frame["added"].mask(frame["name"] == "l.2.o", 1e-3))
    assert "So they, or code before them that is not tapped, compute in" in str(sentence_on_single_taps(both))
    assert sentence_on_single_taps(frame.assign(dtype="float32")) is None
    assert sentence_on_single_taps(frame.assign(added=0.0)) is None


def test_rows_that_cannot_be_bit_equal_are_left_out() -> None:
    assert rounds_differently(frame_of({}), []).groups == ()
    assert rounds_differently(frame_of(FOUR), ["late"]).groups == ()
    assert rounds_differently(frame_of(FOUR, cast="float32"), []).groups == ()
    for dtype in ("float32", "int16", "nonsense", None):
        assert rounds_differently(frame_of(FOUR, dtype=dtype), []).groups == (), dtype
    dtypes = ["float16", *["bfloat16"] * 7]
    assert rounds_differently(frame_of(FOUR, dtype=dtypes), []).dtypes == ("float16", "bfloat16")
    unmeasured = {"late": [1e-3, None], "a": EQUAL, "b": EQUAL}
    assert rounds_differently(frame_of(unmeasured), []).groups == ("late",)


def test_sentences_agree_in_number_and_name_what_the_groups_explain() -> None:
    assert RoundingGroups().sentences() == []
    one = RoundingGroups(("x",), 3, ("float16", "bfloat16"))
    assert one.sentences()[0].startswith(
        "x rounds differently: from equal inputs it is never bit-equal, and the other 3 groups of float16 and bfloat16 "
        "taps always are. So it, or code before it that is not tapped, computes in"
    )
    assert one.sentences(1.0)[0].endswith(
        "so only the rounding differs: it, or code before it that is not tapped, computes in a different order or "
        "precision."
    )
    assert "In float32 the sides agree" in one.sentences(1.0)[0]
    assert "In float64 the sides agree" in one.sentences(1.0, looked_in="float64")[0]
    assert RoundingGroups(stands_out="x adds more.").sentences(1.0, looked_in="float64") == [
        "x adds more. In float64, from weights and buffers rounded alike, the sides agree. So it is rounding, of these "
        "numbers or in the code, and may still be too much."
    ]
    assert one.sentences(weights=["x.bias (rel_l2 0.01)"])[0].endswith(
        "always are. That may be because of weights that already differ: x.bias (rel_l2 0.01)."
    )
    many = RoundingGroups(tuple("abcdefgh"), 9, ("bfloat16",))
    assert many.sentences()[0].startswith("a, b, c, d, e, f and 2 more round differently: from equal inputs they are")
    assert len(many.sentences()) == 1
    assert many.explains_output
    restored = one.with_effect("logits", 0.0, 0.01)
    assert restored.sentences()[1] == (
        "With the baseline's x the output logits is bit-equal; with the target's it is off by 0.01."
    )
    assert "is off by 0.004;" in one.with_effect("logits", 0.004, 0.01).sentences()[1]
    assert restored.explains_output
    assert one.with_effect("y", 0.005, 0.01).explains_output
    assert not one.with_effect("y", 0.006, 0.01).explains_output


def test_a_tap_that_adds_far_more_than_others_of_its_dtype_stands_out() -> None:
    usual = [0.0017, 0.0025, 0.0032, 0.0061]
    layers: Any = {f"l.{n}.{name}": [added] for n in range(2) for name, added in zip("abcd", usual, strict=True)}
    assert taps_that_stand_out(named(layers)) == ""
    one = {**layers, "l.1.b": [0.03]}
    assert taps_that_stand_out(named(one)) == (
        "l.1.b adds far more than other taps of bfloat16 (0.03, their median is 0.0032), which rounding hardly "
        "explains."
    )
    said = taps_that_stand_out(named({**one, "l.0.b": [0.02], "x@grad": [0.5]}))
    assert said.startswith("l.0.b, l.1.b add far more than other taps of bfloat16 (up to 0.03, their median is 0.0047)")
    # One rounding of bfloat16 is 0.0039: too little, whatever the others add.
    assert taps_that_stand_out(named({**{name: [0.0] for name in layers}, "l.1.b": [0.0095]})) == ""
    # Of few taps the median says nothing, and float32 has a measured floor.
    assert taps_that_stand_out(named({name: one[name] for name in list(one)[1:]})) == ""
    assert taps_that_stand_out(named(one).assign(dtype="float32")) == ""


def named(groups: dict[str, list[float | None]]) -> pd.DataFrame:
    frame = frame_of(groups, cast="float32 -> bfloat16")
    return frame.assign(name=frame["group"])


def test_what_stands_out_is_first_and_says_what_runs_in_float32_showed() -> None:
    found = RoundingGroups(("o",), 4, ("bfloat16",), stands_out="x adds far more.")
    assert found.sentences()[0] == "x adds far more. A run in float32 shows whether it is a mistake."
    first, second = found.sentences(0.2)
    assert first.startswith(
        "x adds far more. In float32, from weights and buffers rounded alike, the sides agree. So i"
    )
    assert second.startswith("o rounds differently")
    alone = RoundingGroups(stands_out="x adds far more.")
    assert len(alone.sentences()) == 1
    assert (alone.is_doubtful(None), alone.is_doubtful(0.2)) == (True, True)
    assert (RoundingGroups(("o",)).is_doubtful(None), RoundingGroups(("o",)).is_doubtful(0.2)) == (True, False)
    assert not RoundingGroups().is_doubtful(None)
