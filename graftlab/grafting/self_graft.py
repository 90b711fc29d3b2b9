"""The self-graft: runs a side against its own record, to measure how much rounding alone adds at each tap.

The code runs once, and every tap is recorded. It runs again, and must show the same values. Then it runs with each tap
overwritten by its own record, moved by one unit in the last place up or down at random: a tap's difference from its
record is then the effect of rounding before it. Only masks are not moved. Taps that the other side does not have are
moved and not overwritten, so that rounding before them adds up as it does in the target. All of this happens on the
rank, without the other side.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from graftlab.base.tags import plain
from graftlab.base.tap_groups import group_of, is_output, kind_of
from graftlab.diffs.measure import measure
from graftlab.diffs.results import compare_named, named_tensors, value_in_words
from graftlab.diffs.rounding import assumed_floor, is_quantised, quantised_roundoff, roundoff
from graftlab.grafting.in_float64 import as_it_is, in_float64
from graftlab.grafting.tap_records import CallKey, CountingHandler, SelfGraftRecorder, TapRecord
from graftlab.taps.calls import TapHandler
from graftlab.taps.routing import handled_by

Call = Callable[[], Any]


class AddedRounding(NamedTuple):
    """One tap's difference from the record, in a repeated run in which all earlier taps had their recorded values."""

    name: str
    tags: dict[str, Any]
    occurrence: int
    rel_l2: float
    rel_max: float
    """The largest difference over the root mean square of the record."""
    squares: float
    """The sum of the record's squares, which is the tap's weight in its group."""
    dtype: str
    typical: float | None = None
    """The relative difference of the median row, if few rows have most of the difference; otherwise None."""


@dataclass
class SelfGraft:
    """The result of a self-graft."""

    added: list[AddedRounding] = field(default_factory=list)
    exact: list[AddedRounding] = field(default_factory=list)
    """The same for the run in higher precision, with taps overwritten by the unchanged record."""
    outputs: list[AddedRounding] = field(default_factory=list)
    """Differences when each tap is moved and none is reset: how rounding accumulates over the whole run."""
    exact_outputs: list[AddedRounding] = field(default_factory=list)
    """Differences in the run in higher precision when no tap is overwritten."""
    not_repeated: list[str] = field(default_factory=list)
    """Taps that differed in a repeat without changes, in order; or descriptions of other differences."""
    returned_not_repeated: list[str] = field(default_factory=list)
    """Returned values that a repeat changed although no tap shows it, such as a time, in words."""
    skipped: list[str] = field(default_factory=list)
    """Taps whose value is not a tensor that can be recorded."""
    not_recorded: int = 0
    """The number of taps after the budget was used up."""
    last: dict[str, torch.Tensor] = field(default_factory=dict)
    """The last record at each tap of ``keep``, on the CPU, by group."""
    returned: dict[str, float] = field(default_factory=dict)
    """The rel_l2 of each returned tensor, by its path in the result, when each tap is moved and none is reset, combined
    with that of the run in higher precision."""
    computed_in: str = ""
    """The coarsest dtype of 16 bits in which the call computes what its taps and results do not show; blank if it does
    not, or if that is unknown."""


def graft_self(
    call: Call,
    dtypes: Mapping[str, str] | None,
    *,
    budget: int,
    exact: Call | None = None,
    keep: Sequence[str] = (),
    doubtful: Collection[str] = (),
    paired_names: Callable[[str], Sequence[str]] = lambda name: (name,),
) -> SelfGraft:
    """Run ``call`` against itself; see the module.

    ``dtypes`` maps each tap that is grafted into the target to the coarser dtype of its pair, blank if that is its own;
    None stands for all taps, and the keys are the names from ``paired_names``, one for each pair of the tap. ``keep``
    are the groups whose last record is returned. The record has at most ``budget`` bytes; later taps are counted, and
    not grafted. ``doubtful`` are names of taps, as in ``dtypes``, that differ from the target's by more than one
    rounding: if moving other taps moves none of these, as in a loop whose only tap is the logits, the call is repeated
    in float64.
    """
    record = SelfGraftRecorder(budget)
    result = _copied(_run(call, record))
    found = SelfGraft(skipped=list(record.skipped), not_recorded=record.not_recorded)
    found.last = record.last(keep, paired_names)
    repeat = RepeatComparer(record.taps)
    again = _run(call, repeat)
    found.not_repeated = repeat.differences()
    found.returned_not_repeated = in_words(changed_results(result, again))
    if found.not_repeated:
        return found

    dtype_of = of_paired_names(dtypes, paired_names)

    def measure_in_higher_precision(exact: Call, only: Collection[str] | None = None) -> None:
        twin = SelfGrafter(record.taps, dtype_of, moves=False)
        _run(exact, twin)
        found.exact = [row for row in twin.rows if only is None or row.name in only]
        alone = SelfGrafter(record.taps, dtype_of, moves=False, resets=False)
        note_returned(found, result, _run(exact, alone))
        found.exact_outputs = alone.rows

    # Moving a result shows no rounding before it, as in a function of tokens that has no other taps.
    if exact is None and _only_results_move(record):
        found.computed_in, agrees = _agrees_in_float64(call, result)
        exact = partial(_in_float64, call) if agrees else None
    # First, because a tensor that is moved in place may be an argument, and would stay moved.
    if exact is not None:
        measure_in_higher_precision(exact)
    perturbed = SelfGrafter(record.taps, dtype_of)
    _run(call, perturbed)
    found.added = perturbed.rows
    drift = SelfGrafter(record.taps, dtype_of, seed=1, resets=False)
    note_returned(found, result, _run(call, drift))
    found.outputs = drift.rows
    if exact is None:
        still = _never_moved(perturbed.rows, lambda name: any(each in doubtful for each in paired_names(name)))
        if still:
            found.computed_in, agrees = _agrees_in_float64(call, result)
            if agrees:
                measure_in_higher_precision(partial(_in_float64, call), still)
    return found


def of_paired_names(
    dtypes: Mapping[str, str] | None, paired_names: Callable[[str], Sequence[str]]
) -> Callable[[str], str | None]:
    """The function that looks up a tap in ``dtypes`` of :func:`graft_self`; None stands for a tap without a graft."""
    if dtypes is None:
        return lambda name: ""
    return lambda name: next((dtypes[paired] for paired in paired_names(name) if paired in dtypes), None)


def _never_moved(rows: Sequence[AddedRounding], is_doubtful: Callable[[str], bool]) -> set[str]:
    """The names of doubtful taps that are bit-equal although earlier taps were moved.

    They are computed from no other tap, so nothing shows the rounding of what computes them.
    """
    moved_names = {row.name for row in rows if row.rel_l2 != 0}
    return {row.name for row in rows if is_doubtful(row.name)} - moved_names


def _only_results_move(record: SelfGraftRecorder) -> bool:
    """Whether all taps of floating-point numbers, apart from inputs, show what a model or a function returns."""
    names = [name for (name, *_), each in record.taps.items() if each.is_floating and kind_of(each.tags) != "input"]
    return bool(names) and all(map(is_output, names))


def _in_float64(call: Call) -> Any:
    # Both sides round what they store.
    with in_float64(rounds_stored=True):
        return call()


def _agrees_in_float64(call: Call, result: Mapping[str, torch.Tensor]) -> tuple[str, bool]:
    """The coarsest dtype of 16 bits in which a call computes its results, blank if there is none; and whether it runs
    in float64 and makes the same choices, of tokens for example, so that only rounding differs.

    Otherwise its distance would excuse mistakes.
    """
    with contextlib.suppress(Exception), in_float64(rounds_stored=True) as coarse:
        again = _run(call, SelfGraftRecorder(0))
        with as_it_is():
            computed_in = max(coarse.read, key=roundoff, default="")
            return computed_in, not changed_results(result, again, computed_in)
    return "", False


def note_returned(found: SelfGraft, recorded: Mapping[str, torch.Tensor], result: Any) -> None:
    """Add a result's distance from the recorded one to ``found.returned``, as a root of summed squares."""
    differences = compare_named(recorded, named_tensors(result)).differences
    for path, rel_l2, _, _ in differences:
        # A distance that is not finite would excuse any difference.
        if math.isfinite(rel_l2):
            found.returned[path] = math.hypot(found.returned.get(path, 0.0), rel_l2)


@dataclass(frozen=True)
class RoundedResults:
    """A function's results with different rounding."""

    moved: Any
    """With each tap's value moved by one unit in its last place."""
    exact: Any
    """In float64; see :func:`in_float64`."""
    error: str | None
    """Why the function does not run in float64, if it does not."""


def rounded_results(call: Call, *, budget: int) -> RoundedResults:
    """Run ``call`` with its taps moved by one unit in the last place, and in float64."""
    record = SelfGraftRecorder(budget)
    _run(call, record)
    exact, failed = None, None
    try:
        # Before any tensor is moved, because it may be an argument. This handler replaces the grafter.
        with in_float64():
            exact = _run(call, SelfGraftRecorder(0))
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        failed = ": ".join([type(error).__name__, *lines[:1]])
    moved = _run(call, SelfGrafter(record.taps, lambda name: "", resets=False))
    return RoundedResults(moved, exact, failed)


def without_dependents(
    call: Call,
    groups: Sequence[str],
    *,
    budget: int,
    paired_names: Callable[[str], Sequence[str]] = lambda name: (name,),
) -> list[str]:
    """The groups that no later tap depends on: overwriting their taps changes no other."""
    record = SelfGraftRecorder(budget)
    _run(call, record)
    alone = []
    for group in groups:
        change = GroupChanger(record.taps, partial(_is_in, group, paired_names))
        _run(call, change)
        if not change.differences():
            alone.append(group)
    return alone


def _is_in(group: str, paired_names: Callable[[str], Sequence[str]], name: str, tags: Mapping[str, Any]) -> bool:
    return any(group_of(each, tags) == group for each in paired_names(name))


def _copied(result: Any) -> dict[str, torch.Tensor]:
    """Copy the tensors of a result, because a call may return a buffer that the next call overwrites."""
    return {path: value.detach().clone() for path, value in named_tensors(result).items()}


def changed_results(result: Mapping[str, torch.Tensor], again: Any, computed_in: str = "") -> list[str]:
    """The paths of the returned values that differ from those of the previous call by more than rounding.

    ``computed_in`` is a coarser dtype in which some of them are computed.
    """
    differences = compare_named(result, named_tensors(again)).differences
    return [
        path
        for path, rel_l2, (dtype, _), _ in differences
        if rel_l2 > (assumed_floor(filter(None, [dtype, computed_in]))[0] if roundoff(dtype) else 0.0)
    ]


def in_words(paths: Sequence[str]) -> list[str]:
    """The names of these paths of results in sentences."""
    return [value_in_words(path) for path in paths]


def _run(call: Call, handler: TapHandler) -> Any:
    with handled_by(handler):
        return call()


class RepeatComparer(CountingHandler):
    """Compares taps with the record, without grafting, and ignores differences within rounding."""

    def __init__(self, taps: Mapping[CallKey, TapRecord]) -> None:
        super().__init__()
        self._taps = taps
        self._left = dict.fromkeys(taps)
        self._differing: list[str] = []

    def take(self, place: CallKey, tags: dict[str, Any], own: torch.Tensor) -> torch.Tensor | None:
        recorded = self._taps.get(place)
        self._left.pop(place, None)
        if recorded is not None and not self._is_as_recorded(recorded, own):
            self._differing.append(_label(place))
        return None

    def _is_as_recorded(self, recorded: TapRecord, own: torch.Tensor) -> bool:
        return _repeated(recorded, own)

    def differences(self) -> list[str]:
        return self._differing + [f"{_label(place)} was not reached again" for place in self._left]


# Far above rounding in every dtype, and too little to overflow.
_CHANGE = 0.125


def _changed(value: torch.Tensor) -> torch.Tensor:
    """Different numbers of the same size, and no multiple of ``value``, which a norm would undo."""
    generator = torch.Generator().manual_seed(0)
    factors = 1 + _CHANGE * torch.rand(value.shape, generator=generator, dtype=torch.float64, device="cpu").to(
        value.device
    )
    return (value * factors).to(value.dtype)


class GroupChanger(RepeatComparer):
    """Overwrites the taps of one group with changed values, and compares all others with the record."""

    def __init__(self, taps: Mapping[CallKey, TapRecord], is_changed: Callable[[str, Mapping[str, Any]], bool]) -> None:
        super().__init__(taps)
        self._is_changed = is_changed

    def take(self, place: CallKey, tags: dict[str, Any], own: torch.Tensor) -> torch.Tensor | None:
        if not self._is_changed(place[0], tags):
            return super().take(place, tags, own)
        self._left.pop(place, None)
        if not (own.is_floating_point() or own.is_complex()):
            return own.roll(1) if own.numel() > 1 else own
        return _changed(own.detach())

    def _is_as_recorded(self, recorded: TapRecord, own: torch.Tensor) -> bool:
        # In low precision, dependent values may move by less than one rounding.
        return _same(recorded.value, own)


class SelfGrafter(CountingHandler):
    """Measures each tap against its record and overwrites it.

    Without ``resets``, or where ``dtype_of`` returns None, the tap's current value is moved.
    """

    def __init__(
        self,
        taps: Mapping[CallKey, TapRecord],
        dtype_of: Callable[[str], str | None],
        seed: int = 0,
        *,
        moves: bool = True,
        resets: bool = True,
    ) -> None:
        super().__init__()
        self.rows: list[AddedRounding] = []
        self._taps, self._dtype_of, self._seed = taps, dtype_of, seed
        self._moves, self._resets = moves, resets
        self._dtypes = {str(each.dtype).removeprefix("torch.") for each in taps.values()}

    def take(self, place: CallKey, tags: dict[str, Any], own: torch.Tensor) -> torch.Tensor | None:
        recorded = self._taps.get(place)
        if recorded is None or (value := recorded.value).shape != own.shape:
            return None
        self.rows.append(_added(recorded, value, own))
        other = self._dtype_of(place[0])
        value = value if self._resets and other is not None else own.detach()
        if not self._moves or is_mask(value):
            return value
        # Seeded by the tap's position, so that ranks with copies of one value move them alike.
        seed = self._seed + 7919 * len(self.rows)
        own_dtype = str(value.dtype).removeprefix("torch.")
        if is_quantised(own_dtype) and not other:
            return _few_moved(value, roundoff(own_dtype) / quantised_roundoff(own_dtype, self._dtypes), seed)
        return moved(value, getattr(torch, other or "", value.dtype), seed)


def _few_moved(value: torch.Tensor, distance: float, seed: int) -> torch.Tensor:
    """Move one number in ``distance`` squared by one unit in the last place, as :func:`moved` moves each.

    Nothing is computed in 8 bits. If both sides quantise, rounding before it moves only numbers near the middle between
    two that 8 bits can represent.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    few = torch.rand(value.shape, generator=generator, device="cpu") * distance**2 < 1
    # As bytes, because torch selects among few dtypes of 8 bits.
    result, own = (each.contiguous().view(torch.uint8) for each in (moved(value, value.dtype, seed), value))
    return torch.where(few.to(value.device), result, own).view(value.dtype)


def is_mask(value: torch.Tensor) -> bool:
    """Whether floating-point numbers are all 0 or 1, as those of a mask are, which no rounding moves.

    Code that computes ``(mask - 1) * 1e9`` makes a large number of one unit in a mask's last place.
    """
    # Few of the numbers in 8 bits are moved anyway, and not all of those dtypes can be compared.
    if not value.is_floating_point() or value.element_size() < 2:
        return False
    flat = value.detach().reshape(-1)
    # The first numbers of nearly all other tensors suffice.
    return all(bool(((part == 0) | (part == 1)).all()) for part in (flat[:_FIRST], flat))


_FIRST = 64


def moved(value: torch.Tensor, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Round ``value`` to ``dtype`` and move each number by one unit in the last place; zeros and integers stay."""
    if value.is_complex():
        parts = moved(torch.view_as_real(value.resolve_conj().resolve_neg()), dtype, seed)
        return torch.view_as_complex(parts.contiguous())
    if not value.is_floating_point():
        return value
    if not dtype.is_floating_point or torch.finfo(dtype).eps < torch.finfo(value.dtype).eps:
        dtype = value.dtype
    generator = torch.Generator().manual_seed(seed)
    # A bit for each number, because drawing a number for each would take longer than everything else.
    drawn = torch.randint(
        0, 256, (-(-value.numel() // _BITS),), generator=generator, dtype=torch.uint8, device="cpu"
    ).numpy()
    result = torch.empty_like(value, memory_format=torch.contiguous_format)
    # A sum with one unit in the last place is exact in float32 for all dtypes but float64.
    wide_dtype, bits, exponent = _IN_DOUBLE if dtype == torch.float64 else _IN_SINGLE
    largest, eps = torch.finfo(wide_dtype).max, torch.finfo(dtype).eps
    # In blocks, because the whole would take many times the memory of the value.
    flat, written = value.reshape(-1), result.view(-1)
    for begin in range(0, len(flat), _BLOCK):
        part, into = (each[begin : begin + _BLOCK] for each in (flat, written))
        wide = part.to(dtype).to(wide_dtype)
        # With only its exponent, a number is a power of two; zero is zero. That of infinity is made finite, and adds
        # nothing to it.
        power = (wide.view(bits) & exponent).view(wide_dtype).clamp_(max=largest)
        signs = torch.from_numpy(_SIGNS.take(drawn[begin // _BITS : (begin + _BLOCK) // _BITS], axis=0)).view(-1)
        units = signs[: len(wide)].to(wide.device, wide_dtype)
        into.copy_(torch.addcmul(wide, power, units, value=eps).to(dtype))
    return result if value.is_contiguous() else torch.empty_like(value).copy_(result)


_BLOCK = 1 << 16
_BITS = 8
# The signs that the bits of a byte stand for.
_SIGNS = np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1).astype(np.float32) * 2 - 1
# A dtype with that of its bits, and the bits of its exponent.
_IN_SINGLE = torch.float32, torch.int32, 0xFF << 23
_IN_DOUBLE = torch.float64, torch.int64, 0x7FF << 52


def _added(recorded: TapRecord, value: torch.Tensor, own: torch.Tensor) -> AddedRounding:
    """The difference from the record; ``value`` is the record's value."""
    stats = measure(value, own)
    mean_square = stats.mean_baseline**2 + stats.std_baseline**2
    rms = math.sqrt(mean_square) if mean_square > 0 else 0.0
    rel_max = stats.max_abs / rms if rms else (0.0 if stats.max_abs == 0 else math.inf)
    name, _, _, occurrence = recorded.place
    dtype = str(value.dtype).removeprefix("torch.")
    squares = mean_square * stats.numel if mean_square > 0 else 0.0
    tags = {tag: plain(value) for tag, value in recorded.tags.items()}
    typical = None
    if stats.mean_abs < _CONCENTRATED * stats.rel_l2 * rms and value.dim() > 1:
        typical = _of_median_row(value, own)
    return AddedRounding(name, tags, occurrence, stats.rel_l2, rel_max, squares, dtype, typical)


_CONCENTRATED = 0.5
"""If a difference's mean over its root mean square is below this, few rows have most of it."""


def _of_median_row(recorded: torch.Tensor, own: torch.Tensor) -> float | None:
    """The difference of the median row over the root mean square of all rows; None for values without a number."""
    if recorded.is_complex() or recorded.shape != own.shape:
        return None
    rows = recorded.detach().float().flatten(0, -2)
    off = (own.detach().float().flatten(0, -2) - rows).square().mean(-1)
    whole = float(rows.square().mean())
    found = math.sqrt(float(off.median()) / whole) if whole else math.nan
    return found if math.isfinite(found) else None


_LARGEST_OVER_NORM = 10.0
"""The largest difference of a repeat, over the root mean square, may be this many times the limit of its rel_l2."""


def _repeated(recorded: TapRecord, own: torch.Tensor) -> bool:
    """Whether a repeat shows the recorded value, up to the order of its sums, which varies on some devices."""
    value = recorded.value
    if _same(value, own):
        return True
    whole = not (own.is_floating_point() or own.is_complex())
    if whole or value.shape != own.shape or value.dtype != own.dtype:
        return False
    difference = _added(recorded, value, own)
    limit, _ = assumed_floor([difference.dtype])
    finite = torch.equal(value.isfinite(), own.isfinite())
    return finite and difference.rel_l2 <= limit and difference.rel_max <= _LARGEST_OVER_NORM * limit


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if torch.equal(one, other):
        return True
    equal = one == other
    if one.is_floating_point() or one.is_complex():
        equal |= (one != one) & (other != other)
    return bool(equal.all())


def _label(place: CallKey) -> str:
    name, tags, _, occurrence = place
    parts = [f"{tag}={value}" for tag, value in tags]
    if occurrence:
        parts.append(f"call {occurrence + 1}")
    return f"{name} ({', '.join(parts)})" if parts else name
