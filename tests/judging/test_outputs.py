"""Which tap a verdict takes for the output."""

from __future__ import annotations

import pandas as pd
import pytest

from graftlab.errors import SessionError
from graftlab.judging.swaps import find_outputs


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


def test_a_chosen_output_is_used_unchanged() -> None:
    assert [each.name for each in find_outputs(rows("a", "output[0]", "output[1]"), "output[1]")] == ["output[1]"]


def test_an_output_that_was_not_measured_is_refused_with_the_reason() -> None:
    frame = rows("a", "head")
    with pytest.raises(SessionError, match=r"no tap named 'x' was measured, .*; the last taps are a, head$"):
        find_outputs(frame, "x")
    frame["status"] = "failed"
    frame["error"] = "Traceback ...\nTransformError: [2, 3] does not fit [2, 4]"
    reason = r"; nor was any other tap\. It is failed: TransformError: \[2, 3\] does not fit \[2, 4\]$"
    with pytest.raises(SessionError, match=reason):
        find_outputs(frame, "head")
    frame["status"], frame["error"] = "missing", None
    with pytest.raises(SessionError, match=r"\. It is missing$"):
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
