"""Rows in order: the same taps and the same order wherever rows are shown, and one notion of what diverges."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.refusals import exactly

from graftlab import demo
from graftlab.base.tags import RESERVED_TAGS, identity
from graftlab.diffs.rounding import DEFAULT_NOISE_FLOOR
from graftlab.rows.encoding import encode
from graftlab.rows.newest import LiveTaps
from graftlab.rows.schema import COLUMNS, Row
from graftlab.rows.store import RowStore, to_frame
from graftlab.verdict.order import distances_in, first_divergent, group, require, tag_columns


def row(name: str = "h", /, *, order: int = 1, rank: int = 0, **more: Any) -> Row:
    own = more.pop("own", {})
    status = more.pop("recompute_status", "original")
    tags = {"name": name, "step": 0, "side": "target", "rank": rank, "recompute_status": status, **own}
    return Row(0, 0, order, name, tags, "b2t", "target", rank, "compared", [0], **more)


def test_rows_without_a_step_come_after_all_steps() -> None:
    rows = {"name": ["none", "later", "first"], "step": [math.nan, 1, 0], "order": 1, "status": "compared"}
    taps = group(pd.DataFrame({**rows, "rel_l2": 0.0}), "rel_l2")
    assert [key[0] for key in taps.keys] == ["first", "later", "none"]
    assert taps.steps == [0, 1, None]


own_tags = st.dictionaries(
    st.sampled_from(["layer", "phase", "tp_rank", "error"]),
    st.sampled_from([None, 0, 1, 1.0, True, "1", "decode", [1, 2], [2], {"a": 1}, 0.5]),
)
some_rows = st.lists(
    st.builds(
        lambda name, order, rank, own, status: row(name, order=order, rank=rank, own=own, recompute_status=status),
        st.sampled_from("ab"),
        st.integers(0, 9),
        st.integers(0, 1),
        own_tags,
        st.sampled_from(["original", "recompute"]),
    ),
    max_size=12,
)


@pytest.mark.slow
@examples(40)
@given(some_rows)
def test_a_frame_and_the_newest_rows_distinguish_the_same_taps(rows: list[Row]) -> None:
    """Of one occurrence in one step; ranks of one tap are one tap, and have a newest row each."""
    frame = to_frame(rows)
    taps = group(frame, "rel_l2")
    assert len(taps.keys) == len({identity(one.tags) for one in rows})
    of_place = {int(place): identity(tags) for place, tags in zip(taps.row_tap, frame["tags"], strict=True)}
    assert all(of_place[int(p)] == identity(t) for p, t in zip(taps.row_tap, frame["tags"], strict=True))
    with TemporaryDirectory() as folder:
        store = RowStore(Path(folder))
        if rows:
            store.append([encode(one) for one in rows])
        newest = LiveTaps(store).look()
        store.close()
    assert {(identity(one.tags), one.rank) for one in newest} == {(identity(one.tags), one.rank) for one in rows}
    # And both stand as they ran.
    places = list(zip(frame["step"], frame["order"], frame["side"], frame["rank"], strict=True))
    assert places == sorted(places)
    assert [(one.order, one.rank) for one in newest] == sorted((one.order, one.rank) for one in newest)


def test_an_original_and_a_recomputed_forward_are_two_taps() -> None:
    frame = to_frame([row(order=1), row(order=2, recompute_status="recompute")])
    assert len(group(frame, "rel_l2").keys) == 2
    assert tag_columns(frame) == ["recompute_status"]


def test_a_graft_in_the_other_direction_is_a_newer_row_of_the_same_tap(tmp_path: Path) -> None:
    store = RowStore(tmp_path)
    store.append([encode(row(order=1)), encode(row(order=2)._replace(direction="t2b", status="unmatched"))])
    assert [one.status for one in LiveTaps(store).look()] == ["unmatched"]
    store.close()


def test_a_frame_without_a_needed_column_is_refused_by_its_name() -> None:
    frame = to_frame([row("h", order=1)])
    with pytest.raises(ValueError, match="status"):
        group(frame.drop(columns="status"), "rel_l2")
    with pytest.raises(ValueError, match=exactly("the frame has no column 'status' (it has: none)")):
        require(pd.DataFrame(), "status")


def test_without_a_noise_floor_only_pairs_with_one_finite_number_diverge() -> None:
    rows = [row(name, rel_l2=rel_l2, nonfinite_differ=n) for name, rel_l2, n in (("a", 0.5, 0), ("b", 0.0, 1))]
    taps = group(to_frame(rows), "rel_l2")
    assert taps.suspects(None).tolist() == [False, True]
    assert taps.suspects(1e-5).tolist() == [True, True]


def test_a_column_of_text_cannot_be_drawn() -> None:
    frame = pd.DataFrame({"note": ["cut", None], "rel_l2": [None, 0.5]})
    with pytest.raises(ValueError, match="column 'note' cannot be drawn, it holds 'cut'; choose a numeric one"):
        distances_in(frame, "note")
    assert distances_in(frame, "rel_l2")[1] == 0.5


def test_a_cosine_is_drawn_as_a_distance_above_zero() -> None:
    frame = pd.DataFrame({"cosine": [0.25, 1.0, None], "rel_l2": [0.5, 0.0, 1.0]})
    assert distances_in(frame, "cosine").tolist()[:2] == [0.75, 2.0**-53]
    assert distances_in(frame, "rel_l2").tolist() == [0.5, 0.0, 1.0]


def test_a_tag_with_the_name_of_a_column_of_rows_has_a_separate_column() -> None:
    assert tag_columns(to_frame([row(own={"error": 3, "layer": 1})])) == ["recompute_status", "tag_error", "layer"]


def test_whole_numbers_are_one_tag_whatever_their_type() -> None:
    frame = pd.DataFrame({"name": ["h"] * 3, "order": 1, "status": "compared", "rel_l2": 0.0, "layer": [3, 3.0, [4]]})
    assert len(group(frame, "rel_l2").keys) == 2
    # As in a frame that was read from a file, where a tap lacks the tag.
    frame = pd.DataFrame(
        {"name": ["h", "x"], "order": 1, "status": "compared", "rel_l2": 0.0, "layer": [3.0, math.nan]}
    )
    assert [repr(key[-1]) for key in group(frame, "rel_l2").keys] == ["3", "None"]


def test_a_frame_made_by_hand_is_read_by_the_same_tags() -> None:
    frame = pd.DataFrame({"name": ["h", "h"], "order": [1, 2], "status": ["compared"] * 2, "rel_l2": [0.0, 1.0]})
    assert tag_columns(frame.assign(layer=3, tp_rank=[0, 1], recompute_status="original")) == [
        "layer",
        "recompute_status",
    ]
    assert not {"step", "side", "rank"} & set(tag_columns(frame.assign(step=0, side="target", rank=0)))
    assert RESERVED_TAGS & set(COLUMNS) == {"name", "step", "side", "rank", "baseline_name", "target_name"}


# ---- what diverges --------------------------------------------------------------------------------------------------


@pytest.mark.slow
@examples(40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from("abc"),
            st.sampled_from([None, 0.0, 1e-6, 1e-4, math.nan, math.inf]),
            st.sampled_from(["compared", "grafted", "failed", "missing", "timeout", "unmatched"]),
            st.sampled_from([None, 0, 3]),
        ),
        min_size=1,
        max_size=8,
    ),
    st.sampled_from([None, 1e-5]),
)
def test_a_tap_diverges_exactly_if_one_of_its_rows_does(rows: list[Any], floor: float | None) -> None:
    made = [
        row(name, order=order, rel_l2=value, nonfinite_differ=odd)._replace(status=status)
        for order, (name, value, status, odd) in enumerate(rows)
    ]
    frame = to_frame(made)
    # Of taps that some rank grafted only what failed counts.
    grafted = {name for name, _, status, _ in rows if status == "grafted"}
    found = first_divergent(frame[~frame["name"].isin(grafted) | (frame["status"] == "failed")], noise_floor=floor)
    taps = group(frame, "rel_l2")
    suspects = taps.suspects(floor)
    assert (found is None) is (not suspects.any())
    if found is not None:
        first, *more = (key[0] for key, suspect in zip(taps.keys, suspects, strict=True) if suspect)
        assert found["name"] in {first, *(more if grafted else ())}


@pytest.mark.parametrize("cast", ["float32 -> bfloat16", "bfloat16 -> float32", "float32 -> int8"])
def test_no_tap_is_named_because_it_casts(cast: str) -> None:
    cause = row("wrong", order=3, rel_l2=0.3)
    rows = [row("same", rel_l2=1e-7), row("casts", order=1, rel_l2=5e-3)._replace(cast=cast)]
    assert first_divergent(to_frame(rows)) is None
    assert first_divergent(to_frame([*rows, cause]))["name"] == "wrong"  # type: ignore[index]
    assert first_divergent(to_frame(rows), noise_floor=1e-5)["name"] == "casts"  # type: ignore[index]
    assert first_divergent(to_frame([row("fp32", rel_l2=5e-3)]))["name"] == "fp32"  # type: ignore[index]


def test_the_first_divergent_gradient_is_the_first_of_the_backward_pass() -> None:
    """Rows in the order of the parameters; the backward pass begins at the head."""
    names = ["embed.weight", "norm1.weight", "qkv.weight", "router.weight", "norm2.weight", "head.weight"]
    sizes = [0.5, 0.4, 0.3, 0.2, 1e-7, 0.0]
    rows = [
        row(name, order=len(names) - place, rel_l2=size, own={"kind": "param_grad"})
        for place, (name, size) in enumerate(zip(names, sizes, strict=True))
    ]
    found = first_divergent(to_frame(rows))
    assert found is not None
    assert found["name"] == "router.weight"
    # Values come before all gradients, whatever they differ by.
    value = row("out", order=0, rel_l2=1e-3)
    assert first_divergent(to_frame([*rows, value]))["name"] == "out"  # type: ignore[index]


def test_a_pair_with_only_one_finite_value_always_diverges() -> None:
    frame = to_frame([row("fine", rel_l2=0.0, nonfinite_differ=0), row("odd", order=2, rel_l2=0.0, nonfinite_differ=1)])
    found = first_divergent(frame)
    assert found is not None
    assert found["name"] == "odd"


def test_the_noise_floor_is_one_number() -> None:
    assert inspect.signature(demo.report).parameters["noise_floor"].default is DEFAULT_NOISE_FLOOR


def test_a_one_sided_tap_keeps_its_place_between_shared_taps() -> None:
    """What is sent has its row on the receiver, so of the baseline's own counting only its own taps have rows."""

    def one(name: str, order: int, side: str, status: str, **more: Any) -> Row:
        tags = {"name": name, "step": 0, "side": side, "rank": 0, "recompute_status": "original"}
        made = row(name, order=order)._replace(tags=tags, side=side, status=status, **more)
        return made if status == "compared" else made._replace(rel_l2=None)

    layers = range(6)
    rows = [one(f"a{i}", i + 1, "target", "compared", rel_l2=1e-7) for i in layers]
    rows += [one(f"only{i}", 2 * i + 2, "baseline", "unmatched") for i in layers]
    expected = [name for i in layers for name in (f"a{i}", f"only{i}")]
    assert [key[0] for key in group(to_frame(rows), "rel_l2").keys] == expected
    # A tap of the target alone, and no further ones of the baseline.
    rows = [
        one("t", 1, "target", "missing"),
        one("a", 2, "target", "compared", rel_l2=1e-7),
        one("b", 3, "target", "compared", rel_l2=1e-7),
        one("only", 2, "baseline", "unmatched"),
    ]
    assert [key[0] for key in group(to_frame(rows), "rel_l2").keys] == ["t", "a", "only", "b"]


def test_tags_without_a_column_of_their_own_are_left_out() -> None:
    frame = pd.DataFrame({"name": ["q", "q"], "tags": [{"name": "q", "layer": 0, "head": 1}] * 2, "layer": [0, 0]})
    assert tag_columns(frame) == ["layer"]
