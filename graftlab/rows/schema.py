"""The row: the record of one tap on one receiving rank. Frames, plots, tables and reports are all made of rows.

:class:`Row` is the one table of columns. Its fields, in this order, are the columns of a frame and the values of a line
in a run's file; their annotations give its type, and how it is encoded, stored and shown. A new
statistic is a field here and one of the same name in :class:`graftlab.diffs.measure.DiffStats`.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    Literal,
    NamedTuple,
    TypeVar,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from graftlab.base.world import Direction, Side

if TYPE_CHECKING:
    from graftlab.diffs.measure import DiffStats

T = TypeVar("T")

Status = Literal["compared", "grafted", "failed", "missing", "timeout", "unmatched", "recomputed"]
"""The outcome of a tap: measured; measured and overwritten; the transform failed; no rank sent it; the wait for it took
too long; (on the sender) no rank requested it; or activation checkpointing runs a forward again on this side alone, so
nothing is absent."""

MEASURED: tuple[Status, ...] = ("compared", "grafted")
"""The statuses of rows that have statistics."""
UNMEASURED = frozenset({"failed", "timeout", "missing"})
"""Those of rows that should have some."""

_STATISTIC = object()
Statistic = Annotated[T | None, _STATISTIC]

TENSOR_UNIT = "tensor's units"


@dataclass(frozen=True)
class Presentation:
    """How a statistic that measures the distance between two tensors is shown."""

    label: str
    """Its definition, for the axis of a plot."""
    unit: str
    format: str = ""
    """A format specification for its values; empty for a few digits and an exponent."""
    in_tables: bool = False
    """Whether the short tables have it: a frame in a notebook and the dashboard. Other tables have all."""


class Row(NamedTuple):
    """One tap on one receiving rank, or on a sending rank whose tensor no rank requested."""

    run: int
    step: int
    order: int
    """Counts the taps of this rank in this step that a filter matched, from 1, including those without a row."""
    name: str
    """The tap's name on both sides, or that of its pair under the plan's pairs and rename."""
    tags: dict[str, Any]
    direction: Direction | None
    side: Side
    rank: int
    status: Status
    senders: list[int]
    """The ranks of the other side whose tensors arrived."""
    shape: list[int] | None = None
    dtype: str | None = None

    numel: Statistic[int] = None
    rel_l2: Annotated[Statistic[float], Presentation("rel_l2 = ‖x-y‖ / ‖baseline‖", "ratio", in_tables=True)] = None
    rel_diff: Annotated[Statistic[float], Presentation("rel_diff = Σ(x-y)² / Σ(x²+y²)", "ratio")] = None
    max_abs: Annotated[Statistic[float], Presentation("max_abs = max |x-y|", TENSOR_UNIT, in_tables=True)] = None
    max_abs_index: Statistic[tuple[int, ...]] = None
    mean_abs: Annotated[Statistic[float], Presentation("mean_abs = mean |x-y|", TENSOR_UNIT)] = None
    cosine: Annotated[Statistic[float], Presentation("cosine similarity", "ratio", ".8f")] = None
    nonfinite_baseline: Statistic[int] = None
    nonfinite_target: Statistic[int] = None
    nonfinite_differ: Annotated[Statistic[int], Presentation("pairs with one non-finite value", "count", ",")] = None
    mean_baseline: Statistic[float] = None
    std_baseline: Statistic[float] = None
    min_baseline: Statistic[float] = None
    max_baseline: Statistic[float] = None
    mean_target: Statistic[float] = None
    std_target: Statistic[float] = None
    min_target: Statistic[float] = None
    max_target: Statistic[float] = None

    baseline_name: str | None = None
    """The tap's name on the baseline; None if the baseline has no such tap, or this rank cannot know."""
    target_name: str | None = None
    """The tap's name on the target, likewise."""
    transform: str | None = None
    """The transform of the plan that was applied; None for the default one."""
    aligned_by: str | None = None
    layout: str | None = None
    """The layouts that made both tensors comparable, of the pair and of the ranks; ``inferred`` from shapes."""
    matched_by: str | None = None
    """How the plan's pair was found: ``given``, or the reason of ``session.match``."""
    match_rel: float | None = None
    """The relative L2 between the two when the pair was matched."""
    rows_matched: int | None = None
    rows_unmatched: int | None = None
    cast: str | None = None
    note: str | None = None
    """A remark on a row that is otherwise good."""
    plan_version: int = 0
    occurrence: int = 0
    """How often this tap was reached before in this step."""
    seconds: float = 0.0
    """How long the model waited at this tap."""
    error: str | None = None
    """The reason why the row has no measurement."""


Storage = Literal["integer", "float", "text", "list", "index", "tags"]
"""How a column is stored: ``integer`` and ``float`` as 64-bit numbers; ``text``, ``list`` and ``tags``, which repeat,
as places in a table of their values; ``index``, which differs from row to row, as objects."""

_STORAGES: dict[Any, Storage] = {
    int: "integer",
    float: "float",
    str: "text",
    list: "list",
    tuple: "index",
    dict: "tags",
}


@dataclass(frozen=True)
class Column:
    """One column of the table. ``type`` is the class of its values that are not None."""

    name: str
    type: type
    is_nullable: bool
    is_statistic: bool
    storage: Storage
    presentation: Presentation | None = None


def _column(name: str, annotation: Any) -> Column:
    is_statistic = get_origin(annotation) is Annotated
    hint = get_args(annotation)[0] if is_statistic else annotation
    is_union = get_origin(hint) in (Union, types.UnionType)
    kinds = [kind for kind in (get_args(hint) if is_union else (hint,)) if kind is not types.NoneType]
    if get_origin(kinds[0]) is Literal:
        kinds = [str]
    kind = get_origin(kinds[0]) or kinds[0]
    if len(kinds) != 1 or kind not in _STORAGES:
        known = ", ".join(known.__name__ for known in _STORAGES)
        raise TypeError(f"Row.{name}: a column holds one of {known}, perhaps or None, and not {annotation}")
    presentation = next((each for each in get_args(annotation)[1:] if isinstance(each, Presentation)), None)
    return Column(name, kind, is_union, is_statistic, _STORAGES[kind], presentation)


TABLE = tuple(_column(name, hint) for name, hint in get_type_hints(Row, include_extras=True).items())
COLUMNS = Row._fields
STATISTICS = tuple(column.name for column in TABLE if column.is_statistic)
DIFFERENCES = {column.name: column.presentation for column in TABLE if column.presentation is not None}
"""The statistics that measure how far two tensors are apart. Plots, tables and reports show these."""


def in_tables() -> list[str]:
    """The differences that short tables have in addition to ``rel_l2``."""
    return [name for name, each in DIFFERENCES.items() if each.in_tables and name != "rel_l2"]


# The order of rows in a frame. Steps are counted over all runs of a session.
EXECUTION_ORDER = ("step", "order", "side", "rank")

statistics_of: Callable[[DiffStats], tuple[Any, ...]] = attrgetter(*STATISTICS)
"""The statistics in a row's order."""


_WHOLE = frozenset({"bool", "int32", "int64", "uint32", "uint64"})


@functools.lru_cache(maxsize=256)
def are_whole(dtype: object, cast: object) -> bool:
    """Whether a row compares whole numbers: ids, positions and masks, where any difference counts.

    They do not round, so no noise floor applies to them. Smaller integers represent fractions in quantized models, and
    those round. ``cast`` is the row's column: the conversions of dtypes and devices.
    """
    if dtype not in _WHOLE:
        return False
    pairs = [set(each.split(" -> ")) for each in cast.split(", ")] if isinstance(cast, str) else []
    return all(pair <= _WHOLE or not pair & _WHOLE for pair in pairs)
