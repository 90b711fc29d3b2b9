"""Which tap a verdict takes for the output."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from kit.refusals import exactly

from graftlab.errors import SessionError
from graftlab.filters.expressions import compile_filter
from graftlab.judging.swaps import OutputTap, Swaps, find_outputs


def rows(*names: str, dtypes: tuple[str, ...] = ()) -> pd.DataFrame:
    found = [
        {"name": name, "tags": {"name": name}, "step": 0, "order": order, "dtype": "float32", "cast": None}
        | {"status": "grafted", "error": None}
        for order, name in enumerate(names)
    ]
    for row, dtype in zip(reversed(found), reversed(dtypes), strict=False):
        row["dtype"] = dtype
    return pd.DataFrame(found)


@pytest.mark.parametrize(
    ("names", "dtypes", "output"),
    [
        (("a", "b"), (), "b"),
        (("a", "head", "output[0]", "output[1][0][0]", "output[1][0][1]"), (), "output[0]"),
        (("a", "model.output['logits']", "model.output['cache']"), (), "model.output['logits']"),
        (("attn[0]", "attn[1]", "head"), (), "head"),
        (("head", "output.logits", "output.past[0][0]", "output.past[0][1]"), (), "output.logits"),
        (("head", "Net.output.loss", "Net.output.logits", "Net.output.past[0]"), (), "Net.output.loss"),
        (("embed", "output.ids", "output.mean"), (), "output.mean"),
        (("l.1.output.dense", "l.1.output.norm"), (), "l.1.output.norm"),
        (("attn[0]", "mid", "attn[1]"), (), "attn[1]"),
        (("a", "output[0]", "output[1]"), ("int64", "float32"), "output[1]"),
    ],
)
def test_the_output_is_the_first_part_of_the_last_result(
    names: tuple[str, ...], dtypes: tuple[str, ...], output: str
) -> None:
    assert [each.name for each in find_outputs(rows(*names, dtypes=dtypes), None)] == [output]


@pytest.mark.parametrize("path", [".{}", "['{}']"])
def test_parts_of_a_result_are_known_from_the_returned_values(path: str) -> None:
    returned = [path.format(name) for name in ("scores", "boxes")]
    (found,) = find_outputs(rows("head", "output.scores", "output.boxes"), None, returned)
    assert (found.name, found.whole) == ("output.scores", "output")
    assert [each.name for each in found.parts] == ["output.boxes"]
    (found,) = find_outputs(rows("embed", "output.dense", "output.norm"), None, returned)
    assert (found.name, found.whole) == ("output.norm", "")


def test_no_value_that_activation_checkpointing_repeats_is_the_output() -> None:
    frame = rows("layers.0", "layers.1", "head", "layers.1", "layers.0", "layers.0")
    for place, tags in ((3, {"recompute_status": "recompute"}), (4, {"recompute_status": "recompute"})):
        frame.at[place, "tags"] = {"name": frame["name"][place], **tags}
    # Where a gradient is computed within the repetition, it is that of the tap.
    frame.at[5, "tags"] = {"name": "layers.0", "kind": "grad", "recompute_status": "recompute"}
    assert [each.group for each in find_outputs(frame, None)] == ["head", "layers.*@grad"]


def test_the_step_of_the_output_is_counted_from_the_runs_first() -> None:
    frame = rows("head", "head", "head").assign(step=[5, 6, 7])
    assert [each.place for each in find_outputs(frame, None)] == [(2, 2)]
    # Where all values are whole numbers, the last of them is the output.
    assert [each.name for each in find_outputs(rows("a", "ids", dtypes=("int64", "int64")), None)] == ["ids"]


def test_the_parts_of_a_long_result_are_not_measured_one_by_one() -> None:
    for count, measured in ((8, 7), (9, 0)):
        (found,) = find_outputs(rows(*(f"output[{n}]" for n in range(count))), None)
        assert (found.name, len(found.parts)) == ("output[0]", measured)


def test_parts_of_a_result_are_those_of_its_last_step() -> None:
    frame = rows("output[0]", "output[1]", "output[0]", "output[1]").assign(step=[5, 5, 6, 6])
    (found,) = find_outputs(frame, None)
    assert [(each.name, each.place) for each in found.all] == [("output[0]", (1, 2)), ("output[1]", (1, 3))]
    assert (found.end, found.title) == ((1, 3), "output")
    # The parts of a result that one tap shows have the name of that tap.
    (alone,) = find_outputs(rows("head", "output[0]"), None)
    assert (alone.end, alone.title) == ((0, 1), "output[0]")
    for group, is_beside in (("output[0]", False), ("output[1]", False), ("output[2]", True), ("outputs[2]", False)):
        assert found.is_beside(group) is is_beside


def test_a_chosen_output_is_used_unchanged() -> None:
    assert [each.name for each in find_outputs(rows("a", "output[0]", "output[1]"), "output[1]")] == ["output[1]"]


def test_an_output_that_was_not_measured_is_refused_with_the_reason() -> None:
    frame = rows("a", "head")
    with pytest.raises(
        SessionError,
        match=exactly("verdict: no tap named 'x' was measured, so it cannot be the output; the last taps are a, head"),
    ):
        find_outputs(frame, "x")
    frame["status"] = "failed"
    frame["error"] = "Traceback ...\nTransformError: [2, 3] does not fit [2, 4]"
    reason = r"; nor was any other tap\. It is failed: TransformError: \[2, 3\] does not fit \[2, 4\]$"
    with pytest.raises(SessionError, match=reason):
        find_outputs(frame, "head")
    frame["status"], frame["error"] = "missing", None
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: no tap named 'head' was measured, so it cannot be the output; nor was any other tap. "
            "It is missing"
        ),
    ):
        find_outputs(frame, "head")


def test_effects_are_measured_at_each_direct_part_of_a_result() -> None:
    (found,) = find_outputs(rows("head", "output.logits", "output.past[0][0]", "output.past[0][1]"), None)
    assert found.title == "output.logits"
    assert [each.name for each in found.all] == ["output.logits"]
    (found,) = find_outputs(rows("head", "output[0]", "output[1]", "output[2][0]"), None)
    assert found.title == "output"
    assert [each.name for each in found.all] == ["output[0]", "output[1]"]
    assert found.end == (0, 2)
    assert found.is_beside("output[2][0]")
    assert not found.is_beside("output[1]")


def test_effects_on_gradients_are_measured_at_one_part_alone() -> None:
    values = rows("head", "output.scores", "output.boxes")
    gradients = values.assign(tags=[{"name": name, "kind": "grad"} for name in values["name"]], order=[3, 4, 5])
    value, gradient = find_outputs(pd.concat([values, gradients]), None, [".scores", ".boxes"])
    assert [each.name for each in value.all] == ["output.scores", "output.boxes"]
    assert [each.name for each in gradient.all] == ["output.scores"]


def output_of(name: str, group: str, **tags: Any) -> OutputTap:
    return OutputTap(name, group, "float32", tags, (0, 1))


def test_the_filter_at_an_output_matches_it_alone_where_both_sides_know_its_name() -> None:
    swaps: Any = SimpleNamespace(_is_exact=True)
    text = Swaps._filter_at(swaps, output_of("h.1", "h.*", layer=3, rid=None))
    matches = compile_filter(text).matches
    assert matches({"name": "h.1", "layer": 3})
    for other in (
        {"name": "h.0", "layer": 3},
        {"name": "h.1", "layer": 2},
        {"name": "h.1", "layer": 3, "kind": "grad"},
    ):
        assert not matches(other)
    grad = compile_filter(Swaps._filter_at(swaps, output_of("h.1", "h.*@grad", kind="grad"))).matches
    assert [grad({"name": "h.1", "kind": kind}) for kind in ("grad", "param_grad")] == [True, False]
    assert not grad({"name": "h.1"})
    # Otherwise the taps of its group, by both names.
    of_group: Any = SimpleNamespace(_is_exact=False, _names={"h.*": {("h.1", None), ("b.1", None)}})
    matches = compile_filter(Swaps._filter_at(of_group, output_of("h.1", "h.*"))).matches
    assert [matches({"name": name}) for name in ("h.1", "h.0", "b.7", "c.1")] == [True, True, True, False]


def test_an_output_is_kept_under_the_name_of_its_pair() -> None:
    rows = [SimpleNamespace(names=names, tags={}) for names in (["h.0"], ["old.1", "h.1"], ["other"])]
    floors = SimpleNamespace(paired=lambda row: row.names)
    session = SimpleNamespace(options=SimpleNamespace(keep_budget=3 << 30))
    swaps: Any = SimpleNamespace(
        _selves=[SimpleNamespace(outputs=rows)], _floors=floors, _runs=SimpleNamespace(session=session)
    )
    assert Swaps._kept_name(swaps, output_of("h.1", "h.*")) == "h.1"
    assert Swaps._kept_name(swaps, output_of("own", "h.*")) == "h.1"
    assert Swaps._kept_name(swaps, output_of("own", "old.*")) == "old.1"
    with pytest.raises(
        SessionError,
        match=exactly(
            "verdict: the baseline's values of x were not recorded, because not all taps fit into "
            "3,072 MiB on each rank; launch with a larger keep_budget="
        ),
    ):
        Swaps._kept_name(swaps, output_of("x", "x"))


def test_the_effect_of_a_group_does_not_show_at_its_own_later_calls() -> None:
    frame = pd.DataFrame(
        {"name": name, "tags": {"name": name, "layer": layer}, "rank": rank, "step": step}
        for name, layer, rank, step in (("h.0", 1, 0, 0), ("h.1", 1, 0, 0), ("h.1", 2, 0, 1), ("h.1", 2, 1, 1))
    )

    def can(groups: list[str], *, exact: bool = True, rows: pd.DataFrame = frame) -> bool:
        return Swaps.can_measure(SimpleNamespace(_rows=rows, _is_exact=exact), groups, output_of("h.1", "h.*", layer=1))  # type: ignore[arg-type]

    assert can(["other"], exact=False)
    assert can(["h.*"])
    # By names that pairs or renames make, other taps of the group cannot be told from it.
    assert not can(["h.*"], exact=False)
    assert not can(["h.*"], rows=pd.concat([frame, frame]))
    # One call in each step, and on each rank, is no earlier call.
    apart = [frame[1:2].assign(step=step, rank=rank) for step in (0, 1) for rank in (0, 1)]
    assert can(["h.*"], rows=pd.concat(apart))
    assert can(["h.*"], rows=frame[:0])


@pytest.mark.parametrize(
    ("known", "said"),
    [
        (
            "h.1.ba",
            (
                "the baseline's last tap of this group, h.2.ba, has no partner; name another tap that counts "
                "(output=, or --output)"
            ),
        ),
        ("h.2.ba", "no pair of tensors is kept for 'h.2.ba'"),
    ],
)
def test_an_output_whose_last_layer_has_no_partner_is_refused_in_words_of_taps(known: str, said: str) -> None:
    def pair(*_: object) -> None:
        raise SessionError("no pair of tensors is kept for 'h.2.ba'")

    swaps: Any = object.__new__(Swaps)
    swaps._selves, swaps._runs, swaps._rows = [SimpleNamespace(last={})], SimpleNamespace(pair=pair), rows(known)
    with pytest.raises(SessionError, match=exactly(said)):
        swaps._distance("h.2.ba", OutputTap("h.1.ba", "h.*.ba", "float32", {}, (0, 0)), 1)
