"""A frame of rows as a notebook shows it: the most useful columns first, and columns without information folded."""

from __future__ import annotations

import html
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from graftlab.base.html import cell, number, table
from graftlab.base.tags import RESERVED_TAGS
from graftlab.base.text import counted
from graftlab.rows.schema import COLUMNS, DIFFERENCES, TABLE, UNMEASURED, in_tables

_SHOWN = 20
"""Rows; of more, the worst are shown."""
# No repr is longer than a screen.
_REPR_LINES, _REPR_CHARACTERS = 22, 2048

_NEEDED = frozenset({"order", "name", "tags", "rel_l2", "status", "side", "rank", "nonfinite_differ"})
# The range of a bar, in decades: from rounding in float64 to unrelated tensors.
_LOW, _HIGH = -12.0, 0.0
_WORDS = 80
# What a person says for a column; the name that code takes stands below it.
_DIFFERENCES = {"rel_l2": "relative difference", "max_abs": "largest difference"}
_COUNTS = frozenset(column.name for column in TABLE if column.storage == "integer")
# In larger frames constant columns are not searched for.
_FOLDED_ROWS = 50_000


class RowsFrame(pd.DataFrame):
    """A pandas frame whose display in a notebook is made for rows. :meth:`full` shows everything.

    >>> type(session.frame.full()).__name__
    'DataFrame'
    """

    @property
    def _constructor(self) -> Any:
        return RowsFrame

    def full(self) -> pd.DataFrame:
        """The same rows as a plain frame; a notebook shows all its columns."""
        return pd.DataFrame(self)

    def __repr__(self) -> str:
        return bounded_repr(self)

    def _repr_html_(self) -> str | None:
        if not set(self.columns) >= {*_NEEDED, *in_tables()} or self.columns.has_duplicates:
            plain: str | None = self.full()._repr_html_()  # type: ignore[operator]
            return plain
        return _html(self.full())


def bounded_repr(frame: pd.DataFrame) -> str:
    """The text of a frame in at most a screen: its first and last rows, and as many columns as fit."""
    plain = pd.DataFrame(frame)
    text = repr(plain)
    for columns in (12, 8, 6, 4, 2):
        if text.count("\n") < _REPR_LINES and len(text) <= _REPR_CHARACTERS:
            break
        text = plain.to_string(
            max_rows=12, min_rows=10, max_cols=columns, max_colwidth=24, line_width=120, show_dimensions=True
        )
    return text


def written(name: str, value: float | None) -> str:
    """A difference as tables show it."""
    if value is None or math.isnan(value) or not DIFFERENCES[name].format:
        return number(value)
    return format(value, DIFFERENCES[name].format)


def _html(frame: pd.DataFrame) -> str:
    if not len(frame):
        return "<p>no rows: nothing was compared or grafted yet</p>"
    shown, which = frame, counted(len(frame), "row")
    if len(frame) > _SHOWN:
        worst = np.argsort(-_badness(frame), kind="stable")[:_SHOWN]
        shown = frame.iloc[np.sort(worst)]
        which = f"the {_SHOWN} worst of {len(frame):,} rows, in execution order"
    several_steps = frame["step"].nunique() > 1 if "step" in frame.columns else False
    tags = _tags(shown)
    differences = ["rel_l2", *in_tables()]
    way = ["direction"] if (shown["status"] == "grafted").any() and "direction" in frame.columns else []
    records = shown.to_dict("records")
    note = ["note"] if any(_note(row) for row in records) else []  # type: ignore[arg-type]
    before = [*(["step"] if several_steps else []), "order", "name", *tags]
    head = [*before, *differences, "status", *way, "rank", *note]
    lines = [_line(row, tags, several_steps, bool(way), bool(note)) for row in records]  # type: ignore[arg-type]
    above = f"<p>{which}; <code>.full()</code> shows all</p>"
    folded = _folded(frame, {*head, "side", "tags", "error", "note"})
    return above + table(tuple(map(_title, head)), lines, {_title(name) for name in differences}) + folded


def _title(name: str) -> str:
    """The title of a column, as markup."""
    own = html.escape(str(name))
    return f"{_DIFFERENCES[name]}<br><small>{own}</small>" if name in _DIFFERENCES else own


def _badness(frame: pd.DataFrame) -> np.ndarray[Any, Any]:
    value = pd.to_numeric(frame["rel_l2"], errors="coerce").to_numpy(dtype=np.float64, na_value=math.nan)
    differ = pd.to_numeric(frame["nonfinite_differ"], errors="coerce").to_numpy(dtype=np.float64, na_value=0.0)
    lost = frame["status"].astype(str).isin(UNMEASURED).to_numpy()
    found: np.ndarray[Any, Any] = np.where(lost | (differ > 0), math.inf, np.nan_to_num(value, nan=-1.0, posinf=1e300))
    return found


def _tags(frame: pd.DataFrame) -> list[str]:
    """The names of the callers' tags, in the order in which they come."""
    names: dict[str, None] = {}
    for tags in frame["tags"]:
        if isinstance(tags, Mapping):
            names.update(dict.fromkeys(name for name in tags if name not in RESERVED_TAGS))
    return list(names)


def _note(row: dict[str, Any]) -> str:
    texts = (row.get("error"), row.get("note"), row.get("aligned_by"))
    return str(next((text for text in texts if _is_there(text)), "")).partition("\n")[0][:_WORDS]


def _line(row: dict[str, Any], tags: list[str], with_step: bool, with_direction: bool, with_note: bool) -> str:
    own = row["tags"] if isinstance(row["tags"], Mapping) else {}
    differ = row["nonfinite_differ"]
    cells = [
        *([cell(row["step"], "number")] if with_step else []),
        cell(row["order"], "number"),
        cell(row["name"]),
        *(cell(own.get(tag, "")) for tag in tags),
        cell(f"not finite ({int(differ)})", "number") if _is_there(differ) and differ > 0 else _bar(row["rel_l2"]),
        *(cell(written(name, _float(row[name])), "number") for name in in_tables()),
        cell(row["status"]),
        *([cell(row["direction"] if row["status"] == "grafted" else "")] if with_direction else []),
        cell(f"{row['side']}[{row['rank']}]"),
        *([cell(_note(row))] if with_note else []),
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _bar(value: Any) -> str:
    """A number over a bar as long as its logarithm is high."""
    known = _float(value)
    if math.isnan(known) or known <= 0:
        return cell(number(known), "number")
    share = (min(max(math.log10(known) if math.isfinite(known) else _HIGH, _LOW), _HIGH) - _LOW) / (_HIGH - _LOW)
    colour = f"rgba(213, 94, 0, {0.12 + 0.38 * share:.2f})"
    bar = f"background:linear-gradient(90deg, {colour} {100 * share:.0f}%, transparent {100 * share:.0f}%)"
    return f'<td class="number" style="text-align:right;white-space:nowrap;{bar}">{number(known)}</td>'


def _folded(frame: pd.DataFrame, shown: set[str]) -> str:
    """What is not in the table: constant columns with their value, empty ones and others by name."""
    constant, empty, others = [], [], []
    for name in frame.columns:
        if name in shown or (name not in COLUMNS and str(name).startswith("tag_")):
            continue
        if len(frame) > _FOLDED_ROWS:
            others.append(str(name))
            continue
        column = frame[name]
        if column.isna().all():
            empty.append(str(name))
            continue
        try:
            is_constant = column.nunique(dropna=False) == 1
        except TypeError:  # lists
            is_constant = column.map(repr).nunique() == 1
        if is_constant:
            constant.append(f"{name}={_counted(name, column.iloc[0])}"[:_WORDS])
        else:
            others.append(str(name))
    parts = [("the same in all", constant), ("empty", empty), ("and", others)]
    words = "".join(f"<div>{title}: {html.escape(', '.join(names))}</div>" for title, names in parts if names)
    folded = len(constant) + len(empty) + len(others)
    return f"<details><summary>{folded} columns more</summary>{words}</details>" if folded else ""


def _counted(name: str, value: Any) -> Any:
    # Counts are held as floats, because some rows have none.
    return int(value) if name in _COUNTS and _is_there(value) else value


def _is_there(value: Any) -> bool:
    return value is not None and value is not pd.NA and value == value


def _float(value: Any) -> float:
    return float(value) if _is_there(value) else math.nan
