"""Compare the results of two calls: their tensors and numbers, at any depth of nesting."""

from __future__ import annotations

import dataclasses
import hashlib
import math
import re
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from types import ModuleType
from typing import Any, NamedTuple

import torch

from graftlab.base.text import first_of
from graftlab.errors import SessionError

Results = list[list[torch.Tensor]]
"""The tensors of a result, for each rank."""


@dataclass(frozen=True)
class ResultFloor:
    """The effect of rounding alone on the eager result, as the largest rel_l2 over the ranks."""

    moved: float
    """With each tap moved by one unit in its last place."""
    exact: float
    """Distance from the result in float64; NaN if that is unavailable, infinite if only one of the two is finite."""
    unit: float
    """The unit in the last place of the results' dtype."""
    in_float64: Results
    error: str | None
    """Why the function does not run in float64."""

    @property
    def rel_l2(self) -> float:
        parts = [each for each in (self.moved, self.exact) if math.isfinite(each)]
        return max(math.hypot(*parts), self.unit)


class ResultDifference(NamedTuple):
    """The distance of one tensor of a result from the corresponding tensor of a second result."""

    path: str
    """The tensor's path in the result: ``""`` for the result itself, else such as ``['logits']`` or ``[1].hidden``."""
    rel_l2: float
    """Relative to the norm of the first; infinite if only one side is not finite, NaN if no element is finite."""
    dtypes: tuple[str, str]
    factor: float | None = None
    """The second one is nearly this multiple of the first, which explains the difference; None if none does."""


class ComparedResults(NamedTuple):
    """The differences between two results, and in words the reasons why other values were not compared.

    ``lost`` has the reasons that let nothing be said of the whole: the second result lacks a value that is not in a
    cache, or its list is longer. ``reshaped`` has the values of different shapes, and ``left`` the others.
    """

    differences: list[ResultDifference]
    left: list[str]
    lost: list[str]
    reshaped: list[str]


_WRITTEN = "written: "
_IN_A_LIST = re.compile(r"(.*)\[\d+\]")
_IN_A_CACHE = re.compile(
    r".*\b(past_key_values?|\w*cache\w*)\b.*|.*\.layers\[\d+\]\.(keys|values|(conv|recurrent)_states)\b.*",
    re.IGNORECASE,
)
"""A value in what models return for their next call, by the names that it usually has, and transformers' in a tuple."""
# Results nest a few levels; objects of other libraries may nest without an end.
_MAX_DEPTH = 12
_TEXT_NUMBERS = 16
# Fewer numbers in a list may be different things, such as a loss and an accuracy.
_LEAST_NUMBERS = 16
_SPARSE = (torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_MOST_DENSE = 1 << 24
# Values of this many numbers that are this near, as rel_l2, are not so by chance.
_LEAST_WIDTH, _NEAR = 8, 0.1
# The share of a difference that a factor may leave unexplained, such as rounding.
_UNEXPLAINED = 0.05


def written_path(path: str) -> str:
    """The path, among those of a result, of state that a call has written, such as a cache among its arguments."""
    return f"{_WRITTEN}{path}"


def is_written(path: str) -> bool:
    """Whether a path is one of state that a call has written, and not of what it returns."""
    return path.startswith(_WRITTEN)


def value_in_words(path: str) -> str:
    """What a path of a result names, as a sentence does.

    >>> value_in_words("['logits']"), value_in_words(written_path("cache[0]"))
    ("the returned value ['logits']", 'what the call writes to cache[0]')
    """
    if is_written(path):
        return f"what the call writes to {path.removeprefix(_WRITTEN)}"
    return f"the returned value{f' {path}' if path else ''}"


def is_in_a_cache(path: str) -> bool:
    """Whether a value in what a model returns belongs to a cache for its next call, by the usual names.

    >>> is_in_a_cache("['past_key_values'].layers[0].keys"), is_in_a_cache("['logits']")
    (True, False)
    """
    return _IN_A_CACHE.fullmatch(path) is not None


class NamedTensors(dict[str, torch.Tensor]):
    """The tensors of a result by their paths in it; as a result itself, it has the same paths."""

    passed_on: Collection[str] = ()
    """The paths of arguments that the call returns as they were given."""


def with_tensors(result: Mapping[str, torch.Tensor], tensors: Mapping[str, torch.Tensor]) -> NamedTensors:
    """Return these tensors, such as copies, in place of those of a result."""
    replaced = NamedTensors(tensors)
    replaced.passed_on = result.passed_on if isinstance(result, NamedTensors) else ()
    return replaced


def named_tensors(result: Any) -> NamedTensors:
    """Return the tensors, arrays, numbers and texts in a result by their paths in containers and objects.

    An array of numpy is a tensor too, and a text is one of whole numbers, which are equal for equal texts alone.

    >>> list(named_tensors({"logits": torch.ones(2), "past": [torch.ones(1), None], "loss": 0.5}))
    ["['logits']", "['past'][0]", "['loss']"]
    """
    return result if isinstance(result, NamedTensors) else NamedTensors(_walk(result, "", set()))


def tensors_of(result: Any) -> list[torch.Tensor]:
    """Return the tensors and numbers in a result, in order."""
    return list(named_tensors(result).values())


def _walk(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, torch.Tensor]]:
    if isinstance(value, torch.Tensor):
        yield from _of_tensor(value, path)
    elif isinstance(value, (int, float)):
        # Whole numbers do not round, such as tokens in a list.
        is_whole = isinstance(value, int) and abs(value) < 2**63
        yield path, torch.tensor(value, dtype=torch.int64 if is_whole else _dtype_of([value]), device="cpu")
    elif isinstance(value, list) and all(type(each) is int and abs(each) < 2**63 for each in value):
        # Tokens are one value: if one side has fewer of them, or none, their number differs.
        yield path, torch.tensor(value, dtype=torch.int64, device="cpu")
    elif isinstance(value, list) and len(value) >= _LEAST_NUMBERS and all(type(each) is float for each in value):
        # So are the log-probabilities of a text: what rounding adds to a single one is known too poorly.
        yield path, torch.tensor(value, dtype=_dtype_of(value), device="cpu")
    elif isinstance(value, complex):
        yield path, torch.tensor(value, device="cpu")
    elif isinstance(value, (str, bytes)):
        yield path, _of_text(value)
    elif (numpy := sys.modules.get("numpy")) is not None and isinstance(value, (numpy.ndarray, numpy.generic)):
        if value.dtype.kind in "biufc":
            yield path, torch.from_numpy(numpy.array(value))
        elif value.dtype.kind in "OSU":
            yield from _walk(value.tolist(), path, above)
    elif isinstance(value, (set, frozenset)):
        # Others have no order that both sides share.
        if all(isinstance(each, (str, bytes, int, float)) for each in value):
            yield from _walk(sorted(value, key=repr), path, above)
    elif isinstance(value, Enum):
        yield from _walk(value.value, path, above)
    elif id(value) not in above and len(above) < _MAX_DEPTH:
        # A result may contain itself.
        inside = above | {id(value)}
        for step, each in _parts(value):
            yield from _walk(each, path + step, inside)


def _dtype_of(numbers: Sequence[float]) -> torch.dtype:
    """The dtype in which numbers of Python were computed: float32 if it holds all of them exactly."""
    exact = torch.tensor(numbers, dtype=torch.float64, device="cpu")
    return torch.float32 if torch.equal(exact.float().double().nan_to_num(), exact.nan_to_num()) else torch.float64


def _of_tensor(value: torch.Tensor, path: str) -> Iterator[tuple[str, torch.Tensor]]:
    """A tensor by its path. A sparse one is made dense, because the zeros that it stores may differ, or if it is too
    large for that, it is the places and numbers that it stores.
    """
    if value.layout not in _SPARSE:
        yield path, value
    elif value.numel() <= _MOST_DENSE:
        yield path, value.to_dense()
    else:
        whole = value.to_sparse(layout=torch.sparse_coo).coalesce()
        yield f"{path}.indices()", whole.indices()
        yield f"{path}.values()", whole.values()


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, NamedTensors):
        yield from value.items()
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in value.items())
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f".{name}", each) for name, each in zip(value._fields, value, strict=True))
    elif isinstance(value, (list, tuple, deque)):
        yield from ((f"[{place}]", each) for place, each in enumerate(value))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{each.name}", getattr(value, each.name)) for each in dataclasses.fields(value))
    elif not (callable(value) or isinstance(value, (type, ModuleType))):
        attributes = {**_in_slots(value), **getattr(value, "__dict__", {})}
        yield from ((f".{name}", each) for name, each in attributes.items() if not name.startswith("_"))


def _in_slots(value: Any) -> dict[str, Any]:
    names = (each.__dict__.get("__slots__", ()) for each in reversed(type(value).__mro__))
    every = (name for each in names for name in ([each] if isinstance(each, str) else each))
    return {name: getattr(value, name) for name in every if not name.startswith("_") and hasattr(value, name)}


def _of_text(text: str | bytes) -> torch.Tensor:
    """A tensor of one shape for any text, so that texts of other lengths differ rather than do not compare."""
    written = text.encode("utf-8", "surrogatepass") if isinstance(text, str) else text
    digest = hashlib.blake2b(written, digest_size=_TEXT_NUMBERS).digest()
    return torch.tensor(list(digest), dtype=torch.int32, device="cpu")


def compare_results(expected: Any, found: Any, *, matched: bool = False) -> ComparedResults:
    """Compare the results of two calls.

    Tensors are paired by path. If the results have no path in common, tensors are paired by order if both have the same
    number, and otherwise by shapes that occur once in each, whatever dims of length 1 they have. With ``matched``, as
    where taps are paired by value, tensors of one path may differ in dims of length 1 too.
    """
    return compare_named(named_tensors(expected), named_tensors(found), matched=matched)


def compare_named(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], *, matched: bool = False
) -> ComparedResults:
    """Compare like :func:`compare_results`, for tensors by path."""
    passed_on = one.passed_on if isinstance(one, NamedTensors) else ()
    state = [(path, path) for path in one if path in other and is_written(path)]
    pairs = [*_pairs_of_returned(*(_without_written(each) for each in (one, other))), *state]
    differences: list[ResultDifference] = []
    left: list[str] = []
    reshaped: dict[str, list[str]] = {}
    misplaced: list[str] = []
    for path, path_of_other in pairs:
        a, b = one[path], other[path_of_other]
        if a.device != b.device:
            # A copy that was kept is often on the CPU, and the call's own result is where the model is.
            a, b = a.cpu(), b.cpu()
        if (matched or path != path_of_other) and _long_dims(a) == _long_dims(b):
            b = b.reshape(a.shape)
        if a.shape != b.shape:
            if is_written(path):
                # Grafts write too, so only calls without them are asked for what is unlike.
                continue
            two_shapes = f"has the shape {_shape(a)} on the baseline and {_shape(b)} on the target"
            shapes = f"{_shown(path)} {two_shapes}"
            position = _position(a, b)
            if position is not None and not position.is_last:
                misplaced.append(
                    f"{shapes}; the smaller has the values of position {position.place}, from 0, of the larger"
                )
                continue
            # A target that returns less under the same name has lost the rest.
            if position is None or (path == path_of_other and a.numel() > b.numel()):
                reshaped.setdefault(two_shapes, []).append(_shown(path))
                continue
            left.append(f"{shapes}: only the last position was compared")
            a, b = position.values
        if not a.numel():
            # Nothing was compared that could clear a target.
            continue
        rel_l2 = _rel_l2(a, b)
        factor = _factor(a, b) if 0 < rel_l2 < math.inf else None
        differences.append(ResultDifference(path, rel_l2, (_dtype(a), _dtype(b)), factor))
    paired = {path for path, _ in pairs}, {path for _, path in pairs}
    less, more = (
        [path for path, tensor in _without_written(each).items() if path not in done and not _is_empty_list(tensor)]
        for each, done in zip((one, other), paired, strict=True)
    )
    longer = [path for path in more if _continues_a_list(path, one, other)]
    # A port without a cache computes the same, and so does one that does not return its arguments.
    cached = [path for path in less if is_in_a_cache(path) or path in passed_on]
    if cached:
        left.append(f"only the baseline returns {_shown_paths(cached)}")
    less = [path for path in less if path not in cached]
    lost = [*misplaced, *([f"only the baseline returns {_shown_paths(less)}"] if less else [])]
    lost += [f"only the target returns {_shown_paths(longer)}"] if longer else []
    if added := [path for path in more if path not in longer]:
        left.append(f"only the target returns {_shown_paths(added)}")
    # The layers of a cache have the same two shapes.
    unlike = [
        f"{first} {shapes}" + (f", and so {'have' if others[1:] else 'has'} {len(others)} more" if others else "")
        for shapes, (first, *others) in reshaped.items()
    ]
    return ComparedResults(differences, left, lost, unlike)


def _continues_a_list(path: str, one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> bool:
    """Whether the value of ``other`` follows one of its kind that ``one`` has too, as the text of another request."""
    found = _IN_A_LIST.fullmatch(path)
    value, before = other[path], one.get(f"{found[1]}[0]") if found else None
    if found is not None and (whole := one.get(found[1])) is not None and _is_empty_list(whole):
        return True
    return before is not None and (before.shape, before.dtype) == (value.shape, value.dtype)


def _is_empty_list(tensor: torch.Tensor) -> bool:
    return tensor.shape == (0,) and tensor.dtype == torch.int64


def values_of_other_shapes(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor], *, matched: bool = False
) -> list[str]:
    """Sentences on what both sides return, or write, in different shapes; with ``matched`` only on other sizes."""
    return [
        f"{(what := value_in_words(path))[0].upper()}{what[1:]} has the shape {_shape(one[path])} on the baseline and "
        f"{_shape(other[path])} on the target."
        for path in one
        if path in other
        and one[path].shape != other[path].shape
        and not (matched and one[path].numel() == other[path].numel())
        and not (one[path].numel() < other[path].numel() and _is_last(one[path], other[path]))
    ]


def written_on_one_side(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[str]:
    """What only the call of one side writes, in words."""
    written = []
    for side, ours, theirs in (("baseline", one, other), ("target", other, one)):
        alone = [path.removeprefix(_WRITTEN) for path in ours if is_written(path) and path not in theirs]
        if alone:
            written.append(f"what only the {side}'s call writes, to {first_of(alone)}")
    return written


def _without_written(values: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {path: tensor for path, tensor in values.items() if not is_written(path)}


def _pairs_of_returned(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    pairs = [(path, path) for path in one if path in other]
    if not pairs and len(one) == len(other):
        pairs = list(zip(one, other, strict=True))
    return (
        pairs
        or _unique_shapes(one, other, lambda tensor: tuple(tensor.shape))
        or _unique_shapes(one, other, _long_dims)
        or _by_position(one, other)
    )


def _long_dims(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape without dims of length 1: one sequence may be a batch of one on the other side."""
    return tuple(length for length in tensor.shape if length != 1)


def _unique_shapes(
    one: Mapping[str, torch.Tensor],
    other: Mapping[str, torch.Tensor],
    shape_of: Callable[[torch.Tensor], tuple[int, ...]],
) -> list[tuple[str, str]]:
    shapes = [{path: shape_of(tensor) for path, tensor in each.items() if tensor.numel() > 1} for each in (one, other)]
    single = [{shape: path for path, shape in each.items() if list(each.values()).count(shape) == 1} for each in shapes]
    return [(path, single[1][shape]) for shape, path in single[0].items() if shape in single[1]]


class _Position(NamedTuple):
    """The place in a sequence that one side returns whole, and the other in part; and both sides' values there."""

    place: int
    is_last: bool
    values: tuple[torch.Tensor, torch.Tensor]


def _by_position(one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]) -> list[tuple[str, str]]:
    """The first pair in which one side is a position of the other, as logits may be."""
    every = ((path, path_of_other) for path in one for path_of_other in other)
    return [each for each in every if _position(one[each[0]], other[each[1]]) is not None][:1]


def _is_last(one: torch.Tensor, other: torch.Tensor) -> bool:
    found = _position(one, other)
    return found is not None and found.is_last


def _position(one: torch.Tensor, other: torch.Tensor) -> _Position | None:
    """The position of a whole sequence at which it nearly agrees with the other value, the last one first; else None.

    Generation needs the logits of the last position only, so some models return no others.
    """
    whole, part = (one, other) if one.numel() > other.numel() else (other, one)
    if whole.dim() < 2 or not (one.is_floating_point() and other.is_floating_point()):
        return None
    *_, length, width = whole.shape
    if width < _LEAST_WIDTH or part.shape[-1:] != (width,) or part.numel() * length != whole.numel():
        return None
    places = whole.detach().reshape(-1, length, width)
    apart = places - part.detach().to(places.dtype).reshape(-1, 1, width)
    sizes = torch.linalg.vector_norm(places, dim=(0, 2), dtype=torch.float64)
    near = torch.linalg.vector_norm(apart, dim=(0, 2), dtype=torch.float64) < _NEAR * sizes
    found = [each for each in (length - 1, *range(length - 1)) if near[each]]
    if not found:
        return None
    cut = whole[..., found[0], :].reshape(part.shape)
    return _Position(found[0], found[0] == length - 1, (cut, part) if whole is one else (part, cut))


def _shown_paths(paths: Sequence[str]) -> str:
    return first_of([_shown(path) for path in paths])


def _shown(path: str) -> str:
    return f"the result's {path}" if path else "the result"


def _shape(tensor: torch.Tensor) -> str:
    return str(list(tensor.shape))


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def distance(expected: Results, found: Results) -> float:
    """Return the largest rel_l2 between a baseline's results and those of a second run.

    NaN if there are no results, or if no element is finite in both.

    Raises :class:`SessionError` if the numbers of ranks do not determine the pairs.
    """
    if not any(expected) and not any(found):
        return math.nan
    if len(expected) != len(found) and len(expected) > 1:
        raise SessionError(
            f"compare_compiled: {len(expected)} baseline ranks return results and {len(found)} target ranks, "
            f"so their pairs are unknown; launch the same number on both sides, or one baseline rank"
        )
    pairs = zip(expected if len(expected) > 1 else expected * len(found), found, strict=True)
    return _largest(_farthest(one, other) for one, other in pairs)


def unit_of(*results: Results) -> float:
    """Return the coarsest unit in the last place among these results."""
    return max((_unit(tensor) for ranks in results for tensors in ranks for tensor in tensors), default=0.0)


def _farthest(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> float:
    if len(expected) != len(found):
        return math.inf
    return _largest(_rel_l2(one, other) for one, other in zip(expected, found, strict=True))


def _largest(distances: Iterable[float]) -> float:
    """Return the largest distance that is not NaN; NaN if all are, and 0 without distances."""
    known = list(distances)
    return max((each for each in known if not math.isnan(each)), default=math.nan if known else 0.0)


def _unit(tensor: torch.Tensor) -> float:
    return torch.finfo(tensor.dtype).eps if tensor.dtype.is_floating_point or tensor.dtype.is_complex else 0.0


def _rel_l2(expected: torch.Tensor, found: torch.Tensor) -> float:
    if expected.shape != found.shape:
        return math.inf
    is_complex = expected.is_complex() or found.is_complex()
    one, other = _wide(expected, is_complex), _wide(found, is_complex)
    finite = one.isfinite()
    if not torch.equal(finite, other.isfinite()) or not torch.allclose(one[~finite], other[~finite], equal_nan=True):
        return math.inf
    if finite.numel() and not finite.any():
        return math.nan
    one, other = one.nan_to_num(0, 0, 0), other.nan_to_num(0, 0, 0)
    difference, size = float((one - other).norm()), float(one.norm())
    if difference == 0 and not _equal(expected, found):
        # Whole numbers beyond 2**53 that float64 does not tell apart.
        return 2.0**-53
    return difference / size if size else (0.0 if difference == 0 else math.inf)


def _factor(expected: torch.Tensor, found: torch.Tensor) -> float | None:
    """The factor that explains most of a difference in numbers that round, by least squares; None if none does."""
    if not expected.dtype.is_floating_point or not found.dtype.is_floating_point or expected.numel() < _LEAST_WIDTH:
        return None
    one, other = (_wide(each, False).nan_to_num(0, 0, 0).flatten() for each in (expected, found))
    factor = float(one.dot(other) / one.dot(one))
    return factor if (other - factor * one).norm() <= _UNEXPLAINED * (other - one).norm() else None


def _wide(tensor: torch.Tensor, as_complex: bool) -> torch.Tensor:
    """The numbers in float64; ``as_complex`` as their real and imaginary parts."""
    plain = tensor.detach()
    return torch.view_as_real(plain.to(torch.complex128)) if as_complex else plain.double()


def _equal(expected: torch.Tensor, found: torch.Tensor) -> bool:
    """Whether whole numbers of one dtype are equal; true for all others."""
    rounds = expected.is_floating_point() or expected.is_complex()
    return rounds or expected.dtype != found.dtype or torch.equal(expected, found)
