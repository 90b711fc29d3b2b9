"""What a model was given is told from what it computed."""

from __future__ import annotations

from typing import Any

from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.given import differing_data, input_names


def row(order: int, name: str, dtype: str, rel_l2: float = 0.0, status: str = "compared", **tags: Any) -> Row:
    made = Row(0, 0, order, name, {"name": name, **tags}, "b2t", "target", 0, status, [0], [2], dtype)
    return made._replace(numel=2, rel_l2=rel_l2, max_abs=rel_l2, nonfinite_differ=0)


def test_whole_numbers_before_all_computation_are_inputs_and_those_after_it_are_not() -> None:
    frame = to_frame(
        [
            row(1, "embed.weight", "float32", kind="param"),
            row(2, "tokens", "int64", 0.5),
            row(3, "mask", "bool"),
            row(4, "alone", "int64", status="missing"),
            row(5, "hidden", "float32", 0.5),
            row(6, "scale", "float32", kind="input"),
            row(7, "chosen", "int64", 0.5),
        ]
    )
    assert input_names(frame) == ["tokens", "mask", "scale"]
    (said,) = differing_data(frame, threshold=5.0)
    assert said.startswith("The inputs differ already: tokens (rel_l2 0.5)")
