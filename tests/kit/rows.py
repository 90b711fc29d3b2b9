"""Rows that no session made."""

from __future__ import annotations

from typing import Any

from graftlab.rows.schema import Row


def row(name: str, order: int = 1, step: int = 0, **fields: Any) -> Row:
    """A row of the target's rank 0, compared and equal, but for ``fields``."""
    side, rank, own = fields.pop("side", "target"), fields.pop("rank", 0), fields.pop("own", {})
    tags = {"name": name, "step": step, "side": side, "rank": rank, "recompute_status": "original", **own}
    usual = {"status": "compared", "rel_l2": 0.0, "nonfinite_differ": 0, "numel": 64, "dtype": "float32", "run": 0}
    given = {**usual, **fields}
    direction = given.pop("direction", "b2t")
    return Row(given.pop("run"), step, order, name, tags, direction, side, rank, senders=[0], **given)


def tap(name: str, order: int, rel_l2: float = 0.0, **fields: Any) -> Row:
    """A row of tensors of this relative difference, with standard deviation 1."""
    usual = {f"{of}_{side}": value for side in ("baseline", "target") for of, value in (("mean", 0.0), ("std", 1.0))}
    usual |= {"max_abs": rel_l2, "mean_abs": 0.8 * rel_l2}
    return row(name, order, **{"rel_l2": rel_l2, **usual, **fields})
