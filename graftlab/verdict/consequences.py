"""Gradients that are other because the forward is: code that is named for its value has another backward too."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from graftlab.base.tap_groups import kind_of, kind_of_group


def consequences(frame: pd.DataFrame, named: Sequence[str], threshold: float) -> list[str]:
    """The named groups of gradients that named values explain.

    The gradient of a tap is computed by the backward of the code that reads the tap. Where that code computes another
    value, another gradient follows. What reads a tap shows its result before the next tap of the same group is reached:
    a layer later at most. The gradient of a weight follows from the value of the module that the weight belongs to.
    ``frame`` is that of a verdict, in execution order.
    """
    if not any(kind_of_group(group) in ("grad", "param_grad") for group in named):
        return []
    over = frame["ratio"] > threshold
    is_value = frame["tags"].map(lambda tags: kind_of(tags) is None)
    values = frame[is_value]
    wrong = [bool(each) for each in over[is_value]]
    names = [str(name) for name in values["name"]]
    explained = _read_by(names, [str(group) for group in values["group"]], wrong)
    modules = {name for name, is_wrong in zip(names, wrong, strict=True) if is_wrong}
    found = []
    for group in named:
        own = [str(name) for name in frame.loc[over & (frame["group"] == group), "name"]]
        kind = kind_of_group(group)
        if (kind == "grad" and explained.issuperset(own)) or (
            kind == "param_grad" and all(_shows(name.rpartition(".")[0], modules) for name in own)
        ):
            found.append(group)
    return found


def _read_by(names: Sequence[str], groups: Sequence[str], wrong: Sequence[bool]) -> set[str]:
    """The taps after which, up to the next one of their group, some value is wrong."""
    found = set()
    # From the end: which taps were passed since the group's next one, and whether a wrong value was among them.
    wrongs = 0
    wrongs_at_next: dict[str, int] = {}
    for name, group, is_wrong in zip(reversed(names), reversed(groups), reversed(wrong), strict=True):
        if wrongs > wrongs_at_next.get(group, 0):
            found.add(name)
        # The next one of the group is itself among what the one before it may have been read for.
        wrongs_at_next[group] = wrongs
        wrongs += is_wrong
    return found


def _shows(module: str, modules: set[str]) -> bool:
    """Whether a module's own output, or a tensor in it, is among these taps."""
    return any(name == module or name.startswith(f"{module}[") for name in modules)
