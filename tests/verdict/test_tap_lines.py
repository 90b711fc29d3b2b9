"""What has a line of its own in tables and figures of taps, and which comes first."""

from __future__ import annotations

from typing import Any

from graftlab.rows.schema import Row
from graftlab.verdict.tap_lines import so_far, tap_lines


def row(status: str, rank: int, rel_l2: float) -> Row:
    tags = {"name": "h", "step": 0, "side": "target", "rank": rank, "recompute_status": status}
    tags |= {"layer": 3, "tp_rank": rank}
    return Row(0, 0, 1, "h", tags, "b2t", "target", rank, "compared", [0], rel_l2=rel_l2)


def test_a_tap_has_one_line_for_all_its_ranks_and_a_recomputed_forward_one_of_its_own() -> None:
    found = tap_lines([row("original", 0, 1e-7), row("original", 1, 0.5), row("recompute", 0, 1e-6)])
    assert [(line.name, line.row.rank, line.row.rel_l2) for line in found] == [
        ("h layer=3", 1, 0.5),
        ("h layer=3 recompute", 0, 1e-6),
    ]


def test_the_first_divergent_line_is_in_the_order_of_the_rows_whichever_steps_they_are_of() -> None:
    def tap(name: str, step: int, rel_l2: float | None, **more: Any) -> Row:
        tags = {"name": name, "step": step, "side": "target", "rank": 0, "recompute_status": "original"}
        return row("original", 0, 0.0)._replace(name=name, tags=tags, step=step, rel_l2=rel_l2, **more)

    rows = [
        tap("grafted", 9, 0.5, status="grafted"),
        tap("missing", 9, None, status="missing"),
        tap("first", 9, 1e-3),
        tap("worst", 8, 1.0),
    ]
    found = so_far(rows)
    assert found.first == 2
    assert found.floor == 1e-5
    assert found.sentences[0].startswith("grafted 1 tap; first divergent after it: first on target[0]: rel_l2 1.00e-03")
    assert so_far(rows, noise_floor=0.1).first == 3
    assert so_far(rows, noise_floor=2.0).first is None
    assert so_far([]).sentences == []
