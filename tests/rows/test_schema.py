"""The one table of columns: rows, statistics, encoding and frames follow from it."""

from __future__ import annotations

import json
from dataclasses import fields
from typing import Any, NamedTuple, get_args, get_type_hints

import pytest
import torch
from kit import rows
from kit.grafters import GrafterWorld
from kit.refusals import exactly
from kit.values import assert_values

from graftlab.control.report import _worst
from graftlab.diffs.measure import DiffStats, measure
from graftlab.grafting.trial import Trial
from graftlab.plots.explorer import figures
from graftlab.plots.style import value_label
from graftlab.rows import schema
from graftlab.rows.columns import BECAME
from graftlab.rows.encoding import decode, encode
from graftlab.rows.log import header_line
from graftlab.rows.parquet import RowFile
from graftlab.rows.schema import (
    COLUMNS,
    DIFFERENCES,
    MEASURED,
    STATISTICS,
    TABLE,
    Column,
    Presentation,
    Row,
    Status,
    statistics_of,
)
from graftlab.rows.store import to_frame
from graftlab.rows.tables import SCHEMA
from graftlab.verdict.conclusion import conclude_from
from graftlab.widgets.tap_explorer import static_html
from graftlab.widgets.trial_view import trial_html


def test_the_statistics_are_the_fields_of_diff_stats() -> None:
    """A new one is a field of each: nothing else names them all."""
    measured = get_type_hints(DiffStats)
    recorded = {column.name: get_type_hints(Row)[column.name] for column in TABLE if column.is_statistic}
    assert [field.name for field in fields(DiffStats)] == list(STATISTICS)
    for name, hint in recorded.items():
        nullable = get_args(measured[name]) or (measured[name],)
        assert set(get_args(hint)) == {*nullable, type(None)}, name


def test_the_statistics_are_adjacent_columns() -> None:
    first = COLUMNS.index(STATISTICS[0])
    assert COLUMNS[first : first + len(STATISTICS)] == STATISTICS
    assert COLUMNS[first - 1] == "dtype"


def test_every_statistic_is_stored_in_its_own_column() -> None:
    world = GrafterWorld()
    x, y = torch.randn(3, 5), torch.randn(3, 5)
    x[0, 0], y[0, 1] = torch.nan, torch.inf
    world.baseline.tap("h", x.clone())
    world.target.tap("h", y.clone())
    (row,) = world.target.rows
    stats = measure(x, y)
    assert {name: getattr(row, name) for name in STATISTICS} == {name: getattr(stats, name) for name in STATISTICS}
    assert len(set(map(repr, statistics_of(stats)))) >= 14, "enough of them differ that a swap would show"


def holds(column: Column, value: Any) -> bool:
    return column.is_nullable if value is None else type(value) is column.type


def test_values_have_their_columns_types_before_and_after_writing() -> None:
    world = GrafterWorld(b2t="name == 'grafted'", keep="True")
    for name in ("grafted", "compared", "unmatched"):
        world.baseline.tap(name, 1.0, layer=3)
    for name in ("grafted", "compared"):
        world.target.tap(name, 2.0, layer=3)
    world.baseline.tap("failed", torch.ones(2, 2))
    world.target.tap("failed", 1.0)
    world.target.tap("timeout", 1.0)
    world.baseline.grafter.end_run()
    world.target.tap("missing", 1.0)
    world.end()
    # What is recomputed takes a backward pass; see tests/grafting/test_paired_names.py.
    statuses = set(get_args(Status)) - {"recomputed"}
    assert {row.status for row in world.rows} == statuses == {*map(str, (row.name for row in world.rows))}
    for row in world.rows:
        for made in (row, decode(encode(row))):
            wrong = [c.name for c in TABLE if not holds(c, getattr(made, c.name))]
            assert not wrong, f"{made.status}: {wrong}"
        # None of them says something of a tensor that was not measured.
        assert (row.rel_l2 is not None) == (row.status in MEASURED)


def test_the_log_header_and_frames_have_the_columns_of_the_table() -> None:
    assert tuple(json.loads(header_line())["columns"]) == tuple(column.name for column in TABLE) == COLUMNS
    # And one that follows from others.
    assert tuple(to_frame([]).columns) == (*COLUMNS, BECAME)


def test_fields_that_are_not_given_have_neutral_defaults() -> None:
    row = Row(1, 4, 9, "h", {"name": "h"}, "b2t", "target", 1, "missing", [0])
    rest = dict(zip(COLUMNS[COLUMNS.index("senders") + 1 :], row[COLUMNS.index("senders") + 1 :], strict=True))
    said = {name: value for name, value in rest.items() if value is not None}
    assert said == {"plan_version": 0, "occurrence": 0, "seconds": 0.0}


def test_a_column_of_an_unsupported_type_is_refused() -> None:
    class Wrong(NamedTuple):
        name: str
        when: complex

    with pytest.raises(
        TypeError,
        match=exactly(
            "Row.when: a column holds one of int, float, str, list, tuple, dict, perhaps or None, and not "
            "<class 'complex'>"
        ),
    ):
        [schema._column(name, hint) for name, hint in get_type_hints(Wrong).items()]


def test_a_statistic_measures_a_difference_or_one_side() -> None:
    one_side = {
        f"{what}_{side}" for what in ("nonfinite", "mean", "std", "min", "max") for side in ("baseline", "target")
    }
    assert set(STATISTICS) == {*DIFFERENCES, *one_side, "numel", "max_abs_index"}
    assert [column.name for column in TABLE] == SCHEMA.names


def test_a_new_difference_is_shown_wherever_differences_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIFFERENCES, "std_target", Presentation("spread of y", "furlongs", ".3f", in_tables=True))
    stats = measure(torch.tensor([1.0, 6.0]), torch.tensor([2.0, 7.0]))
    made = rows.row("h", **{name: getattr(stats, name) for name in STATISTICS})
    found = conclude_from([made])
    assert value_label("std_target") == "spread of y  (furlongs)"
    assert {"max_abs", "std_target"} <= {name for _, name, _ in figures(found)["columns"]}
    assert figures(found)["std_target"] == [2.5]
    tables = (
        to_frame([made])._repr_html_(),
        static_html(found, with_figure=False),
        _worst(found),
        trial_html(Trial(before=stats, after=stats)),
    )
    for table in tables:
        assert "std_target</t" in str(table), table
        assert ">2.500</td>" in str(table), table


def test_values_are_immutable() -> None:
    assert_values(Column, Presentation, RowFile)
