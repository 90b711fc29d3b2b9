"""What has a line of its own in the dashboard's table of taps."""

from __future__ import annotations

from graftlab.rows.schema import Row
from graftlab.widgets.tap_table import tap_lines


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
