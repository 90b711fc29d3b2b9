"""Grafts that did not reach the model: those into copies, which nothing of the model reads.

A tap whose result is not used overwrites the tensor that it was given. Where that is ``h.float()`` or ``h.clone()``,
the model goes on with its own values, and what it gets wrong from there on looks as if it arose there.
"""

from __future__ import annotations

import numpy as np
import pandas as pd

from graftlab.base.tap_groups import kind_of_group

# Two runs of one code give the same; on some devices only nearly so.
_SAME = 1e-6


def unreached(frame: pd.DataFrame, threshold: float) -> list[str]:
    """The groups of values that were grafted, and no tap after which changed, where something after them is named.

    ``frame`` is :func:`.added.added_frame`'s: a tap that adds just the error that it had without any graft has none of
    its error from what was grafted.
    """
    found: dict[str, None] = {}
    is_value = frame["group"].map(lambda group: kind_of_group(group) is None)
    for _, rows in frame[is_value.astype(bool)].sort_values(["step", "order"]).groupby("rank"):
        error = rows["error"].to_numpy(dtype=float)
        added = rows["added"].to_numpy(dtype=float)
        differed = rows["error_ratio"].to_numpy(dtype=float) > threshold
        known = np.isfinite(added) & np.isfinite(error)
        apart = np.subtract(added, error, out=np.zeros(len(error)), where=known)
        changed = ~known | (np.abs(apart) > _SAME * error)
        last = int(np.flatnonzero(changed).max(initial=-1))
        groups = rows["group"].tolist()
        first = {group: place for place, group in reversed(list(enumerate(groups))) if differed[place]}
        for group, place in first.items():
            after = differed[place + 1 :] & (rows["ratio"].to_numpy(dtype=float)[place + 1 :] > threshold)
            if place >= last and after.any():
                found[group] = None
    return list(found)


def told(groups: list[str]) -> list[str]:
    """A sentence for what was not looked at."""
    if not groups:
        return []
    shown = ", ".join(groups[:3]) + (f" and {len(groups) - 3} more" if len(groups) > 3 else "")
    return [
        f"what {shown} passes on: grafting it changed no tap after it. If it is a copy, such as h.float() or "
        f"h.clone(), and the tap's result is not used, no graft reaches the model, and what is named after it may be "
        f"inherited. Write h = gl.tap(name, h)."
    ]
