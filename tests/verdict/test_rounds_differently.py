"""Groups that are never bit-equal from equal inputs, where the others always are, are distinguished from mistakes."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from graftlab.verdict.rounds_differently import RoundingGroups, rounds_differently, sentence_on_single_taps

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
    said = sentence_on_single_taps(frame, [])
    assert said is not None
    assert said.startswith("l.1.o is not bit-equal from equal inputs, and the other 5 taps of bfloat16 are. So it comp")
    assert sentence_on_single_taps(frame, ["l.*.o"]) is None
    assert sentence_on_single_taps(frame.assign(dtype="float32"), []) is None
    assert sentence_on_single_taps(frame.assign(added=0.0), []) is None


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
        "taps always are. So it computes in"
    )
    assert one.sentences(1.0)[0].endswith(
        "so only the rounding differs: it computes in a different order or precision."
    )
    assert "In float32 the sides agree" in one.sentences(1.0)[0]
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
