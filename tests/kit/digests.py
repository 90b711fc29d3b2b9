"""Digests of rows that no session made."""

from __future__ import annotations

from typing import Any

from graftlab.rows.digest import RunDigest
from graftlab.rows.schema import Row


def row(name: str, order: int = 1, step: int = 0, **fields: Any) -> Row:
    """A row of the target's rank 0, compared and equal, where ``fields`` say nothing else."""
    side, rank, own = fields.pop("side", "target"), fields.pop("rank", 0), fields.pop("own", {})
    tags = {"name": name, "step": step, "side": side, "rank": rank, "recompute_status": "original", **own}
    usual = {"status": "compared", "rel_l2": 0.0, "nonfinite_differ": 0, "numel": 64, "dtype": "float32", "run": 0}
    given = {**usual, **fields}
    return Row(given.pop("run"), step, order, name, tags, "b2t", side, rank, senders=[0], **given)


def digest_of(*rows: Row) -> RunDigest:
    """What these rows come to, all of one run."""
    made = RunDigest(0)
    made.take((at, list(each)) for at, each in enumerate(rows))
    return made
