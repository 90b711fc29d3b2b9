"""Transforms: the default's handling of shards, loading of the user's, and the handling of failures."""

from __future__ import annotations

import math
import re
import sys
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.refusals import exactly
from kit.support import run_cell
from kit.tensors import COPYABLE, PLAIN_LAYOUTS, bits, layouts, random_bits
from kit.values import assert_values

import graftlab as gl
from graftlab.errors import GraftError, TransformError
from graftlab.transforms import GraftTransformInput, Outcome, TransformSpec, run_transform, user_traceback
from graftlab.transforms.default import default_transform, suggested
from graftlab.transforms.running import _fitted
from graftlab.transforms.spec import specs_of

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")


def the_input(
    received: list[torch.Tensor], target: torch.Tensor, rank: int = 0, receivers: int = 1, **more: Any
) -> GraftTransformInput:
    return GraftTransformInput(
        **{
            "tags": {"name": "x"},
            "received_list": received,
            "received_extras_list": [None] * len(received),
            "target": target,
            "recv_rank": rank,
            "recv_world_size": receivers,
            "senders": list(range(len(received))),
            "send_world_size": len(received),
            **more,
        }
    )


def made_of(*shapes: tuple[int, ...]) -> list[torch.Tensor]:
    """Tensors of these shapes, numbered on from 0 so that every element tells where it is from."""
    whole = torch.arange(float(sum(math.prod(shape) for shape in shapes)))
    parts = whole.split([math.prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


# ---- the default transform ------------------------------------------------------------------------------------------


# (senders' shapes, my shape, my rank of how many receivers) -> what I get, and what the row says of it.
FITS: dict[str, tuple[list[tuple[int, ...]], tuple[int, ...], tuple[int, int], Callable[..., Any], str | None]] = {
    "one to one": ([(2, 3)], (2, 3), (0, 1), lambda r: r[0], None),
    "my rank among as many": ([(2, 3)] * 3, (2, 3), (1, 3), lambda r: r[1], None),
    "one replicated to all": ([(2, 3)], (2, 3), (2, 3), lambda r: r[0], None),
    "replicated, fewer receivers": ([(2, 3)] * 3, (2, 3), (1, 2), lambda r: r[1], "sender 1"),
    "replicated, more receivers": ([(2, 3)] * 2, (2, 3), (2, 3), lambda r: r[0], "sender 0"),
    "0-d": ([(), ()], (), (1, 2), lambda r: r[1], None),
    "empty": ([(0, 3)] * 2, (0, 3), (1, 2), lambda r: r[1], None),
    "a batch of one": ([(1, 2, 3)], (2, 3), (0, 1), lambda r: r[0][0], "dims of length 1"),
    "dims of one among as many": ([(2, 3)] * 2, (2, 1, 3), (1, 2), lambda r: r[1][:, None], "dims of length 1"),
    "replicated batches of one": ([(1, 3)] * 3, (3,), (1, 2), lambda r: r[1][0], "sender 1, dims of length 1"),
    "two shards of one row": ([(1, 3)] * 2, (2, 3), (0, 1), lambda r: torch.cat(r), "concat dim=0"),
    "two shards to one": ([(2, 3)] * 2, (4, 3), (0, 1), lambda r: torch.cat(r, 0), "concat dim=0"),
    "two shards to every one of two": ([(2, 3)] * 2, (2, 6), (1, 2), lambda r: torch.cat(r, 1), "concat dim=1"),
    "uneven shards to one": ([(3, 3), (2, 3)], (5, 3), (0, 1), lambda r: torch.cat(r, 0), "concat dim=0"),
    "a shard without elements": ([(5, 3), (0, 3)], (5, 3), (0, 1), lambda r: torch.cat(r, 0), "concat dim=0"),
    "one to two shards": ([(2, 6)], (2, 3), (1, 2), lambda r: r[0][:, 3:], "slice dim=1"),
    "replicated to shards": ([(4, 3)] * 2, (2, 3), (1, 2), lambda r: r[1][2:], "slice dim=0"),
    "replicated to more shards": ([(6, 3)] * 2, (2, 3), (2, 3), lambda r: r[0][4:], "slice dim=0"),
    "four shards to two": ([(2,)] * 4, (4,), (1, 2), lambda r: torch.cat(r[2:]), "concat, slice dim=0"),
    "two shards to four": ([(4,)] * 2, (2,), (3, 4), lambda r: r[1][2:], "concat, slice dim=0"),
    "three shards to two": ([(2, 2)] * 3, (2, 3), (1, 2), lambda r: torch.cat(r, 1)[:, 3:], "concat, slice dim=1"),
}


@pytest.mark.parametrize("case", FITS)
def test_the_default_transform_takes_joins_or_cuts(case: str) -> None:
    shapes, mine, (rank, receivers), expected, aligned_by = FITS[case]
    received = made_of(*shapes)
    outcome = run_transform(None, the_input(received, torch.zeros(mine), rank, receivers))
    assert outcome.value.tolist() == expected(received).tolist()
    assert outcome.value.shape == mine
    assert outcome.aligned_by == aligned_by
    assert outcome.cast is None


def _taken_of_two(other: torch.Tensor, chosen: torch.Tensor, receivers: int = 1) -> Any:
    mine = torch.zeros_like(chosen).chunk(receivers)[0]
    return run_transform(None, the_input([chosen, other], mine, 0, receivers))


def test_a_sender_taken_among_several_that_differ_has_a_note_and_is_not_grafted() -> None:
    summand, infinite = torch.tensor([1.5, -2.0, 3.0, 0.5]), torch.tensor([math.inf, 1.0, 2.0, 3.0])
    for chosen, other in ((summand, 4 - summand), (infinite, infinite + 1), (summand, torch.full((4,), math.nan))):
        for receivers in (1, 2):
            taken = _taken_of_two(other, chosen, receivers)
            assert taken.aligned_by == ("sender 0" if receivers == 1 else "slice dim=0")
            assert "the senders are not replicas (sender 1: " in taken.note
            assert "declare it with gl.tap(layout=...)" in taken.graft_refused


def test_shards_of_several_dtypes_are_joined_in_the_first_ones() -> None:
    for first, other in ((torch.float32, torch.float64), (torch.int64, torch.float32), (torch.bfloat16, torch.int8)):
        shards = [torch.tensor([1, 2]).to(first), torch.tensor([3]).to(other)]
        made = default_transform(the_input(shards, torch.zeros(3)))
        assert (made.value.dtype, made.value.tolist()) == (first, [1, 2, 3])


PART = "; the values fit, with rel_l2 0, in the layout 'part(index=1, of=[1, 1], dim=0)' of the {} tensor: give it to "


@pytest.mark.parametrize(
    ("received", "mine", "said"),
    [
        ([[1.0, 2.0, 3.0, 4.0]], [3.0, 4.0], f"{PART.format('received')}the plan's pairs"),
        # A part whose distance is unknown is not the nearest.
        ([[math.nan, 2.0, 3.0, 4.0]], [3.0, 4.0], f"{PART.format('received')}the plan's pairs"),
        ([[3.0, 4.0]], [1.0, 2.0, 3.0, 4.0], PART.format("receiver's own") + "the plan's pairs"),
        ([[5.0, 6.0, 7.0, 8.0]], [3.0, 4.0], "; 2 layouts would fit the shapes, but none fits the values"),
        ([[1.0, 2.0, 3.0]], [3.0, 4.0], ""),
        (
            [[1.0], [2.0]],
            [3.0, 4.0, 5.0],
            "; if these are shards, partial sums or replicas, declare it with gl.tap(layout=...)",
        ),
    ],
)
def test_a_layout_is_suggested_by_the_values(received: list[list[float]], mine: list[float], said: str) -> None:
    assert suggested([torch.tensor(each) for each in received], torch.tensor(mine)) == said


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.bool])
def test_equal_senders_are_replicas_in_every_dtype(dtype: torch.dtype) -> None:
    value = torch.tensor([1.0, 0.0, 3.0]).to(dtype)
    taken = _taken_of_two(value.clone(), value)
    assert (taken.note, taken.graft_refused) == (None, None)
    assert _taken_of_two(torch.zeros(3).to(dtype), value).graft_refused


@pytest.mark.parametrize("receivers", [1, 2])
def test_senders_of_other_shapes_are_replicas_if_only_dims_of_length_1_differ(receivers: int) -> None:
    value = torch.arange(12.0).view(4, 3)
    if receivers == 1:
        alike = run_transform(None, the_input([value[None], value.view(4, 3, 1)], value * 0, 0, 1))
        assert (alike.aligned_by, alike.note) == ("sender 0, dims of length 1", None)
        other = value.view(4, 3, 1) + 1
    else:
        other = value[:2]
    taken = run_transform(None, the_input([value, other], value[: 4 // receivers] * 0, 0, receivers))
    assert "so it is not grafted" in (taken.graft_refused or "")


def test_senders_that_differ_by_rounding_are_noted_and_may_be_grafted() -> None:
    value = torch.linspace(1, 2, 5)
    taken = _taken_of_two(torch.nextafter(value, value + 1), value)
    assert "are not replicas (sender 1: 5 elements differ, by up to 2.38e-07)" in taken.note
    assert taken.graft_refused is None
    # One that is near does not vouch for one that is far.
    for others in ([torch.nextafter(value, value + 1), 2 * value], [value.clone(), 2 * value], [2 * value, value]):
        taken = run_transform(None, the_input([value, *others], torch.zeros(5)))
        assert "so it is not grafted" in (taken.graft_refused or "")


FITS_NOT: dict[str, tuple[list[tuple[int, ...]], tuple[int, ...], tuple[int, int]]] = {
    "another number of dimensions": ([(2, 3)], (2, 3, 2), (0, 1)),
    "two dimensions differ": ([(8, 6)], (4, 3), (0, 2)),
    "no whole factor": ([(5, 3)], (2, 3), (0, 2)),
    "too few shards": ([(2, 3)] * 2, (6, 3), (0, 1)),
    "a factor, but not that of the ranks": ([(8, 3)], (2, 3), (0, 2)),
    "larger than the only sender's": ([(2, 3)], (4, 3), (0, 1)),
    "shards that differ in two dimensions": ([(2, 3), (2, 2)], (4, 3), (0, 1)),
    "0-d to 1-d": ([()], (2,), (0, 1)),
    "nothing to something": ([(0, 3)], (2, 3), (0, 2)),
    "something to nothing": ([(2, 3)], (0, 3), (0, 2)),
    "transposed": ([(2, 3)], (3, 2), (0, 1)),
}


@pytest.mark.parametrize("case", FITS_NOT)
def test_the_default_transform_names_the_shapes_that_do_not_fit(case: str) -> None:
    shapes, mine, (rank, receivers) = FITS_NOT[case]
    with pytest.raises(TransformError) as raised:
        run_transform(None, the_input(made_of(*shapes), torch.zeros(mine), rank, receivers))
    message = str(raised.value)
    assert f"a tensor of shape {list(mine)} (rank {rank} of {receivers})" in message
    assert ", ".join(str(list(shape)) for shape in shapes) in message
    assert "def transform(graft_input: gl.GraftTransformInput) -> torch.Tensor" in message


def test_same_ranks_tensor_is_taken_although_others_sent_none() -> None:
    received = made_of((3,), (3,))
    outcome = run_transform(None, the_input(received, torch.zeros(3), 2, 3, senders=[0, 2], send_world_size=3))
    assert outcome.value.tolist() == received[1].tolist()
    assert outcome.aligned_by is None


@pytest.mark.parametrize(
    ("shapes", "mine", "rank", "receivers", "senders", "count"),
    [
        ([(3,)], (3,), 0, 2, [1], 2),
        ([(3,)], (3,), 1, 2, [0], 2),
        ([(3,)], (3,), 2, 4, [1], 2),
        ([(2,), (2,)], (4,), 1, 2, [0, 1], 4),
        ([(2,), (2,)], (2,), 0, 1, [1, 2], 3),
        ([(4,)], (2,), 1, 2, [0], 2),
    ],
    ids=["rank 0 of 2", "rank 1 of 2", "rank 2 of 4", "half of the shards", "all but mine", "a shard or a replica"],
)
def test_missing_ranks_tensor_is_not_made_up_from_others(
    shapes: list[tuple[int, ...]], mine: tuple[int, ...], rank: int, receivers: int, senders: list[int], count: int
) -> None:
    graft_input = the_input(
        made_of(*shapes), torch.zeros(mine), rank, receivers, senders=senders, send_world_size=count
    )
    with pytest.raises(TransformError, match=r"\(senders \[.*\] of \d\)"):
        run_transform(None, graft_input)


@given(st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(1, 3), min_size=1, max_size=3), st.data())
def test_shards_of_any_number_of_senders_come_back_whole_on_any_number_of_receivers(
    senders: int, receivers: int, shape: list[int], data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, len(shape) - 1))
    shape[dim] *= math.lcm(senders, receivers)
    (full,) = made_of(tuple(shape))
    sent, mine = full.chunk(senders, dim), torch.zeros_like(full).chunk(receivers, dim)
    got = [run_transform(None, the_input([*sent], mine[rank], rank, receivers)).value for rank in range(receivers)]
    assert torch.equal(torch.cat(got, dim), full)


@given(st.integers(1, 4), st.integers(1, 4), st.booleans(), st.data())
def test_replicated_tensor_reaches_each_receiver_whole_or_as_its_shard(
    senders: int, receivers: int, sharded: bool, data: st.DataObject
) -> None:
    dim = data.draw(st.integers(0, 1))
    shape = [3, 3]
    shape[dim] *= receivers
    (full,) = made_of(tuple(shape))
    expected = full.chunk(receivers, dim) if sharded else [full] * receivers
    for rank, wanted in enumerate(expected):
        outcome = run_transform(None, the_input([full.clone()] * senders, torch.zeros(wanted.shape), rank, receivers))
        assert torch.equal(outcome.value, wanted)


@given(st.lists(st.integers(0, 5), min_size=2, max_size=4))
def test_uneven_shards_come_back_whole_on_a_single_receiver(extents: list[int]) -> None:
    shards = made_of(*((extent, 2) for extent in extents))
    if all(extent == sum(extents) for extent in extents):
        return  # nothing but empty tensors: there is nothing to join
    outcome = run_transform(None, the_input(shards, torch.zeros(sum(extents), 2)))
    assert torch.equal(outcome.value, torch.cat(shards))


@pytest.mark.parametrize("dtype", COPYABLE, ids=str)
def test_shards_of_every_dtype_are_joined_and_cut_bit_exact(dtype: torch.dtype) -> None:
    shards = [random_bits(dtype, 3, 4, seed=seed) for seed in (1, 2)]
    expected = torch.cat([bits(shard) for shard in shards])
    outcome = run_transform(None, the_input(shards, random_bits(dtype, 6, 4)))
    assert torch.equal(bits(outcome.value), expected)
    (half,) = (run_transform(None, the_input([outcome.value], random_bits(dtype, 3, 4), 1, 2)).value,)
    assert torch.equal(bits(half), bits(shards[1]))


# ---- loading --------------------------------------------------------------------------------------------------------

MODULE = '''
"""A user's module."""

class Namespace:
    value = 3

def doubled(graft_input):
    return graft_input.received_list[0] * 2

def fails(graft_input):
    half = graft_input.target / 2
    return half + missing  # this line

def old(received_list, target):
    return received_list[0] + target
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "their_transforms.py").write_text(MODULE)
    (tmp_path / "leaves.py").write_text("raise SystemExit(2)")
    (tmp_path / "breaks.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "their_transforms", raising=False)
    return "their_transforms"


def outcome_of(transform: Any, received: float = 3.0, target: float = 1.0) -> Outcome:
    spec = TransformSpec.of(transform)
    return run_transform(spec.load(), the_input([torch.tensor([received])], torch.tensor([target])))


def test_a_transform_is_loaded_by_path(module: str) -> None:
    for path in (f"{module}.doubled", f"{module}:doubled", f"  {module}.doubled\n"):
        assert outcome_of(path).value.tolist() == [6.0]


SOURCES = {
    "by its name": "def transform(g):\n    return g.received_list[0] * 2",
    "the only function": "SCALE = 2\ndef whatever(g):\n    return g.received_list[0] * SCALE",
    "by its name among several": "def f(x):\n    return x * 2\ndef transform(g):\n    return f(g.received_list[0])",
    "a lambda with that name": "transform = lambda g: g.received_list[0] * 2",
    "with torch and gl at hand": (
        "def transform(g: gl.GraftTransformInput) -> torch.Tensor:\n    return torch.mul(g.received_list[0], 2)"
    ),
    "with the input's class at hand": "def transform(g: GraftTransformInput):\n    return g.received_list[0] * 2",
    "comments and blank lines": "\n\n# a comment\n\ndef transform(g):\n\n    return g.received_list[0] * 2\n\n",
}


@pytest.mark.parametrize("source", SOURCES.values(), ids=SOURCES)
def test_a_transform_is_loaded_from_source(source: str) -> None:
    assert outcome_of(source).value.tolist() == [6.0]


def test_source_is_compiled_without_the_loaders_future_imports() -> None:
    transform = TransformSpec.of("def transform(g: GraftTransformInput):\n    return g.target").load()
    assert transform.__annotations__ == {"g": GraftTransformInput}


def test_notebook_function_is_loaded_with_its_captured_variables() -> None:
    cell = run_cell(
        """
        scale = 2.0
        def transform(graft_input):
            return graft_input.received_list[0] * scale
        class Adds:
            def __init__(self, what):
                self.what = what
            def __call__(self, graft_input):
                return graft_input.received_list[0] + self.what
        """
    )
    assert outcome_of(cell["transform"]).value.tolist() == [6.0]
    assert outcome_of(cell["Adds"](4.0)).value.tolist() == [7.0]


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        ("doubled", "is not a dotted path"),
        ("no_such_module.transform", "module 'no_such_module' cannot be imported: No module named 'no_such_module'"),
        ("their_transforms.tripled", "module 'their_transforms' has no function 'tripled'"),
        ("their_transforms.__name__", "has no function '__name__'"),
        ("leaves.transform", "module 'leaves' cannot be imported: 2"),
        ("breaks.transform", "module 'breaks' cannot be imported: division by zero"),
        ("", "defines no function named 'transform'"),
        ("x = 1", "defines no function named 'transform'"),
        ("def one(g): ...\ndef other(g): ...", "defines no function named 'transform'"),
        ("transform = 3", "defines no function named 'transform'"),
        ("def transform(g) return g", "does not compile, line 1: expected ':'"),
        ("def transform(g):\n    return (g", "does not compile, line 2: "),
        ("def transform(g):\0", "does not compile"),
        ("import no_such_module", "failed while it was loaded"),
        ("raise SystemExit", "failed while it was loaded"),
        (3, "a transform is a dotted path, source text or a function, not int"),
    ],
    ids=repr,
)
def test_unloadable_transform_is_refused_with_the_reason(module: str, transform: Any, message: str) -> None:
    with pytest.raises(TransformError) as raised:
        TransformSpec.of(transform)
    assert message in str(raised.value)
    assert "(<" not in str(raised.value), "the file and the line once more"


def test_source_that_fails_while_loading_shows_its_line() -> None:
    with pytest.raises(TransformError) as raised:
        TransformSpec.of("import math\nlimit = math.missing\ndef transform(g): ...")
    assert "line 2, in <module>\n    limit = math.missing" in str(raised.value)


# ---- what a transform is given --------------------------------------------------------------------------------------


def test_a_transform_is_given_everything_by_the_published_names() -> None:
    seen: list[GraftTransformInput] = []

    def transform(graft_input: GraftTransformInput) -> torch.Tensor:
        seen.append(graft_input)
        return graft_input.target + 1

    received = made_of((2,), (3,))
    given = the_input(
        received, torch.zeros(4), 1, 3, direction="t2b", received_extras_list=[None, {"fill": 1}], senders=[0, 2]
    )
    run_transform(transform, given)
    (look,) = seen
    assert look.tags == {"name": "x"}
    assert [tensor.tolist() for tensor in look.received_list] == [[0.0, 1.0], [2.0, 3.0, 4.0]]
    assert look.received_extras_list == [None, {"fill": 1}]
    assert look.target.tolist() == [0.0] * 4
    assert (look.direction, look.recv_rank, look.recv_world_size, look.senders) == ("t2b", 1, 3, [0, 2])


def test_a_transform_builds_no_graph() -> None:
    scale, modes = torch.nn.Parameter(torch.tensor(3.0)), []

    def transform(graft_input: GraftTransformInput) -> torch.Tensor:
        modes.append(torch.is_grad_enabled())
        return graft_input.target * scale

    outcome = run_transform(transform, the_input([torch.ones(2)], torch.ones(2)))
    assert modes == [False]
    assert not outcome.value.requires_grad


def replaces_the_lists(graft_input: GraftTransformInput) -> torch.Tensor:
    graft_input.tags["name"] = "another"
    graft_input.received_list.append(graft_input.received_list.pop() + 1)
    graft_input.received_extras_list.clear()
    graft_input.senders.clear()
    return graft_input.received_list[0]


def test_lists_and_tags_are_a_transforms_own() -> None:
    given = the_input([torch.ones(1)], torch.zeros(1))
    assert run_transform(replaces_the_lists, given).value.tolist() == [2.0]
    assert (given.tags, given.received_extras_list, given.senders) == ({"name": "x"}, [None], [0])
    assert given.received_list[0].tolist() == [1.0]


# ---- results that cannot be used ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "result", [None, 1.0, [torch.zeros(2)], (torch.zeros(2),), "x", torch.zeros(2).numpy()], ids=repr
)
def test_result_other_than_a_tensor_is_refused(result: Any) -> None:
    with pytest.raises(
        TransformError, match=rf"returned {type(result).__name__}; it must return a tensor of shape \[2\]"
    ):
        run_transform(lambda g: result, the_input([torch.ones(2)], torch.zeros(2)))


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 1), (1, 2), (0,)], ids=str)
def test_result_of_a_different_shape_is_refused_and_not_broadcast(shape: tuple[int, ...]) -> None:
    with pytest.raises(TransformError) as raised:
        run_transform(lambda g: torch.ones(shape), the_input([torch.ones(2)], torch.zeros(2)))
    assert f"returned shape {list(shape)}; the target has shape [2] and nothing is broadcast" in str(raised.value)


@pytest.mark.parametrize(
    ("result", "target", "cast"),
    [
        (torch.float32, torch.float32, None),
        (torch.float64, torch.float32, "float64 -> float32"),
        (torch.float32, torch.bfloat16, "float32 -> bfloat16"),
        (torch.float32, torch.float8_e4m3fn, "float32 -> float8_e4m3fn"),
        (torch.bool, torch.int64, "bool -> int64"),
        (torch.float32, torch.complex64, "float32 -> complex64"),
        (torch.complex128, torch.complex64, "complex128 -> complex64"),
    ],
    ids=str,
)
def test_result_of_a_different_dtype_is_converted_and_noted(
    result: torch.dtype, target: torch.dtype, cast: str | None
) -> None:
    outcome = run_transform(lambda g: torch.ones(2).to(result), the_input([torch.ones(2)], torch.zeros(2).to(target)))
    assert outcome.cast == cast


@pytest.mark.parametrize("target", [torch.float32, torch.int64, torch.bool], ids=str)
def test_an_imaginary_part_is_never_dropped_silently(target: torch.dtype) -> None:
    own = torch.zeros(2).to(target)
    for transform in (None, lambda g: g.received_list[0]):
        with pytest.raises(TransformError, match=r"returned complex64, but the target is .*return \.real or \.abs\(\)"):
            run_transform(transform, the_input([torch.ones(2, dtype=torch.complex64)], own))


# ---- inputs that are changed, which are copies -----------------------------------------------------------------------


def adds(tensor: torch.Tensor) -> None:
    tensor.add_(1)


def adds_to_a_view(tensor: torch.Tensor) -> None:
    tensor.view(-1)[-1] += 1


def adds_to_its_data(tensor: torch.Tensor) -> None:
    tensor.data.add_(1)


def gets_other_data(tensor: torch.Tensor) -> None:
    tensor.data = tensor + 1


def adds_through_numpy(tensor: torch.Tensor) -> None:
    tensor.numpy()[...] += 1


def is_resized(tensor: torch.Tensor) -> None:
    tensor.resize_(1)


def is_transposed(tensor: torch.Tensor) -> None:
    tensor.t_()


def gets_a_dimension_more(tensor: torch.Tensor) -> None:
    tensor.unsqueeze_(0)


def becomes_minus_zero(tensor: torch.Tensor) -> None:
    tensor.mul_(-1)


def gets_a_nan(tensor: torch.Tensor) -> None:
    tensor[0, 1] = math.nan


CHANGES = [adds, adds_to_a_view, adds_to_its_data, gets_other_data, adds_through_numpy, is_resized, is_transposed]
CHANGES += [gets_a_dimension_more, becomes_minus_zero, gets_a_nan]


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("which", ["target", "first received", "last received"])
def test_a_transform_may_change_its_inputs_which_are_copies(change: Callable[[torch.Tensor], None], which: str) -> None:
    def transform(graft_input: GraftTransformInput) -> torch.Tensor:
        result = graft_input.received_list[0].clone()
        index = {"target": None, "first received": 0, "last received": 1}[which]
        change(graft_input.target if index is None else graft_input.received_list[index])
        return result

    received, target = (
        [torch.tensor([[0.0, 1.0], [2.0, 3.0]]) for _ in range(2)],
        torch.tensor([[0.0, 5.0], [6.0, 7.0]]),
    )
    before = [bits(tensor).clone() for tensor in (*received, target)]
    assert run_transform(transform, the_input(received, target)).value.tolist() == [[0.0, 1.0], [2.0, 3.0]]
    assert all(torch.equal(bits(tensor), old) for tensor, old in zip((*received, target), before, strict=True))


@pytest.mark.parametrize("returns", ["target", "None", "received"])
def test_value_written_into_the_target_is_the_result(returns: str) -> None:
    def transform(graft_input: GraftTransformInput) -> Any:
        into = graft_input.received_list[0] if returns == "received" else graft_input.target
        into.mul_(3)
        return None if returns == "None" else into

    target = torch.tensor([1.0, 2.0])
    assert run_transform(transform, the_input([torch.tensor([1.0, 2.0])], target)).value.tolist() == [3.0, 6.0]
    assert target.tolist() == [1.0, 2.0]


@pytest.mark.parametrize("returns", ["target", "None"])
@pytest.mark.parametrize("infers", [False, True])
def test_equal_values_written_into_the_target_are_a_result(returns: str, infers: bool) -> None:
    def transform(graft_input: GraftTransformInput) -> Any:
        graft_input.target.copy_(graft_input.received_list[0])
        return None if returns == "None" else graft_input.target

    with torch.inference_mode(infers):
        assert run_transform(transform, the_input([torch.ones(2)], torch.ones(2))).value.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("made", [lambda own: own, torch.detach, lambda own: own[:], Outcome])
def test_a_target_returned_as_it_was_fails_rather_than_agrees(made: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(
        TransformError,
        match=exactly(
            "the transform returned graft_input.target as it was, so there is nothing to compare; make the "
            "result from graft_input.received_list, or leave this tap out with a filter: "
            "transform=(filter, function)"
        ),
    ):
        run_transform(lambda graft_input: made(graft_input.target), the_input([torch.ones(2)], torch.zeros(2)))


def test_a_target_in_another_order_or_without_compared_rows_is_a_result() -> None:
    def other(graft_input: GraftTransformInput) -> torch.Tensor:
        return graft_input.target.T

    def no_rows(graft_input: GraftTransformInput) -> Outcome:
        none = torch.zeros(0, dtype=torch.int64)
        return Outcome(graft_input.target, rows=(none,), rows_matched=0)

    given = the_input([torch.ones(2, 2)], torch.arange(4.0).view(2, 2))
    assert run_transform(other, given).value.tolist() == [[0.0, 2.0], [1.0, 3.0]]
    assert run_transform(no_rows, given).rows_matched == 0


def test_writing_into_the_models_tensor_fails() -> None:
    target = torch.tensor([1.0, 2.0])

    def transform(graft_input: GraftTransformInput) -> torch.Tensor:
        target.mul_(3)
        return graft_input.target

    with pytest.raises(
        TransformError,
        match=exactly(
            "the transform wrote into the model's own tensor, which it must have obtained elsewhere; write "
            "into graft_input.target, which is a copy"
        ),
    ):
        run_transform(transform, the_input([torch.ones(2)], target))


def test_receivers_extras_are_copies_too() -> None:
    scale, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    mine = {"scale": scale, "nested": [{"p": parameter * 1}, (scale,)], "list": [1]}

    def transform(graft_input: GraftTransformInput) -> torch.Tensor:
        extras = graft_input.target_extras
        extras["scale"].fill_(99)
        extras["nested"][0]["p"].fill_(99)
        extras["nested"][1][0].fill_(99)
        extras["list"].append(2)
        graft_input.received_extras_list[0]["fill"][0] = 99
        return graft_input.received_list[0]

    given = replace(
        the_input([torch.ones(2)], torch.zeros(2)), target_extras=mine, received_extras_list=[{"fill": [1]}]
    )
    run_transform(transform, given)
    assert scale.tolist() == parameter.tolist() == [1.0, 1.0]
    assert mine["list"] == [1]
    assert given.received_extras_list == [{"fill": [1]}]


def test_uncopyable_extras_are_withheld_from_the_transform_only() -> None:
    lock = threading.Lock()
    given = replace(the_input([torch.ones(2)], torch.zeros(2)), target_extras={"lock": lock, "n": 2})
    assert run_transform(lambda g: g.target + g.target_extras["n"], given).value.tolist() == [2.0, 2.0]
    with pytest.raises(
        TransformError,
        match=exactly(
            "this part of the tap's extras is a lock that cannot be copied (TypeError: cannot pickle "
            "'_thread.lock' object), so the transform does not receive it; put the values that it needs "
            "into the extras"
        ),
    ):
        run_transform(lambda g: g.target_extras["lock"].acquire(), given)
    assert not lock.locked()
    # Asked for a protocol, it has none, as any other object.
    protocols = run_transform(lambda g: g.target + hasattr(g.target_extras["lock"], "__len__"), given)
    assert protocols.value.tolist() == [0.0, 0.0]


@pytest.mark.parametrize("dtype", COPYABLE, ids=str)
def test_reading_is_not_mistaken_for_changing_whatever_the_dtype_and_layout(dtype: torch.dtype) -> None:
    for name in PLAIN_LAYOUTS:
        received, target = layouts(dtype)[name], layouts(dtype)[name]
        outcome = run_transform(lambda g: g.received_list[0], the_input([received], target))
        assert torch.equal(bits(outcome.value), bits(received)), name


def test_conjugated_and_negated_views_are_passed_as_plain_tensors() -> None:
    value = torch.tensor([1 + 2j, 3 - 4j])
    for view in (value.conj(), value.conj().imag):
        # numpy knows no such views, so this raises for one.
        outcome = run_transform(lambda g: torch.from_numpy(g.received_list[0].numpy().copy()), the_input([view], view))
        assert outcome.value.tolist() == view.tolist()


# ---- failures, and how they read ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [ValueError("no"), SystemExit(3), MemoryError(), GraftError("mine"), StopIteration()], ids=repr
)
def test_transforms_own_exception_is_raised_unchanged(error: BaseException) -> None:
    def transform(graft_input: GraftTransformInput) -> torch.Tensor:
        graft_input.target.zero_()
        raise error

    target = torch.ones(2)
    with pytest.raises(type(error)) as raised:
        run_transform(transform, the_input([torch.zeros(2)], target))
    assert raised.value is error
    assert target.tolist() == [1.0, 1.0]


def traceback_of(transform: Any) -> str:
    """As in a row: what is caught is caught by graftlab, so this frame is not one of it."""
    loaded = TransformSpec.of(transform).load()
    with pytest.raises(Exception) as raised:  # noqa: PT011 - whichever it is, its traceback is what matters
        run_transform(loaded, the_input([torch.zeros(1)], torch.zeros(1)))
    assert raised.tb is not None
    return user_traceback(raised.value.with_traceback(raised.tb.tb_next))


def lines_after_the_headline(text: str) -> list[str]:
    headline, *lines = text.splitlines()
    assert headline == "Traceback (most recent call last):"
    return lines


def test_the_traceback_of_a_module_starts_at_the_users_line_and_shows_it(module: str, tmp_path: Path) -> None:
    first, second, *_, last = lines_after_the_headline(traceback_of(f"{module}.fails"))
    assert first == f'  File "{tmp_path / "their_transforms.py"}", line 12, in fails'
    assert second == "    return half + missing  # this line"
    assert last == "NameError: name 'missing' is not defined"


def test_the_traceback_of_source_starts_at_the_users_line_and_shows_it() -> None:
    source = "def helper(x):\n    return x.missing\n\ndef transform(g):\n    return helper(g.target)"
    lines = lines_after_the_headline(traceback_of(source))
    spec = TransformSpec.of(source)
    assert lines[0] == f'  File "<transform {spec.label}>", line 5, in transform'
    assert lines[1] == "    return helper(g.target)"
    assert [line for line in lines if "line 2, in helper" in line]
    assert "    return x.missing" in lines
    assert lines[-1].startswith("AttributeError: ")


def test_the_traceback_of_a_notebook_function_starts_at_the_cells_line_and_shows_it() -> None:
    cell = run_cell("def transform(graft_input):\n    return torch_is_not_here")
    lines = lines_after_the_headline(traceback_of(cell["transform"]))
    assert "ipykernel" in lines[0]
    assert lines[0].endswith("line 2, in transform")
    assert lines[1] == "    return torch_is_not_here"


def test_a_decorator_of_torch_does_not_stand_before_the_users_line() -> None:
    source = "@torch.no_grad()\ndef transform(g):\n    return g.missing"
    lines = lines_after_the_headline(traceback_of(source))
    assert lines[0].endswith("line 3, in transform")
    # Where there is no line of the user's at all, torch's own are better than none.
    assert "in relu" in lines_after_the_headline(traceback_of("torch.nn.functional.relu"))[0]


def test_the_traceback_shows_the_cause_too() -> None:
    source = """
def transform(g):
    try:
        return g.missing
    except AttributeError as error:
        raise ValueError("no such thing") from error
"""
    text = traceback_of(source)
    assert "line 4, in transform\n    return g.missing" in text
    assert "direct cause" in text
    assert text.endswith("ValueError: no such thing")


@pytest.mark.parametrize(
    ("source", "line", "shown", "says"),
    [
        ("def transform(g):\n    x = g.target\n    return x[:0]", 3, "return x[:0]", "returned shape [0]"),
        ("def transform(g):\n    return None", 2, "return None", "returned NoneType"),
        ("def transform(g):\n    if g:\n        return 1\n    return 2", 1, "def transform(g):", "returned int"),
        ("@torch.no_grad()\ndef transform(g):\n    return 3", 3, "return 3", "returned int"),
        ("class T:\n    def __call__(self, g):\n        return 4\ntransform = T()", 3, "return 4", "returned int"),
        (
            "from functools import partial\ndef f(n, g):\n    return n\ntransform = partial(f, 6)",
            3,
            "return n",
            "returned int",
        ),
        ("def transform(received_list, target):\n    return 5", 2, "return 5", "returned int"),
        ("def transform(g):\n    g.target.data_ptr(1)", 2, "g.target.data_ptr(1)", "takes no arguments"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*old signature")
def test_unusable_result_is_reported_at_the_users_line(source: str, line: int, shown: str, says: str) -> None:
    *frames, last = lines_after_the_headline(traceback_of(source))
    label = TransformSpec.of(source).label
    assert [text for text in frames if "File" in text][-1].startswith(f'  File "<transform {label}>", line {line}, in')
    assert f"    {shown}" in frames
    assert says in last


@pytest.mark.parametrize(
    ("source", "called"),
    [
        ("import math\ndef halve(g):\n    return g.target / 2", "halve"),
        ("def helper(x):\n    return x\n\ndef transform(g):\n    return helper(g.target)", "transform"),
        ("transform = abs", "transform"),
        ("def unfinished(", "transform"),
    ],
)
def test_source_texts_with_the_same_function_name_have_different_labels(source: str, called: str) -> None:
    label = TransformSpec.draft(f"{source}\n").label
    assert re.fullmatch(rf"{called} \(text [0-9a-f]{{6}}\)", label)
    assert TransformSpec.draft(f"{source}  # another\n").label != label


def test_error_without_a_users_line_is_raised_unchanged() -> None:
    with pytest.raises(
        TransformError, match=exactly("the transform returned int; it must return a tensor of shape [1]")
    ):
        run_transform(id, the_input([torch.zeros(1)], torch.zeros(1)))  # type: ignore[arg-type]


# ---- signatures -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["source", "function", "path"])
def test_the_old_signature_is_adapted_with_a_note(how: str, module: str) -> None:
    source = "def transform(received_list, target):\n    return received_list[0] + target"
    transform: Any = {"source": source, "function": run_cell(source)["transform"], "path": f"{module}.old"}[how]
    with pytest.warns(
        gl.GraftWarning, match=r"old signature \(received_list, target\), which will be removed; write `def tran"
    ):
        spec = TransformSpec.of(transform)
    with warnings.catch_warnings():
        # Ranks need not say it again.
        warnings.simplefilter("error")
        loaded = spec.load()
    outcome = run_transform(loaded, the_input([torch.tensor([1.0])], torch.tensor([2.0])))
    assert outcome.value.tolist() == [3.0]


@pytest.mark.parametrize("arguments", ["", "a, b, c", "*, g", "a, b, *, c"])
def test_wrong_number_of_arguments_is_refused_at_the_edit(arguments: str) -> None:
    with pytest.raises(TransformError, match=r"takes \(.*\), and is called with one argument; write `def transform"):
        TransformSpec.of(f"def transform({arguments}):\n    return 1")


@pytest.mark.parametrize("arguments", ["g", "*all", "g, scale=2", "g=None, *, scale=2", "g, /"])
def test_callable_with_one_argument_is_used_unchanged(arguments: str) -> None:
    TransformSpec.of(f"def transform({arguments}):\n    return 1")


def test_two_sources_do_not_show_each_others_lines() -> None:
    one, other = (f"def transform(g):\n    return g.missing_{number}" for number in "ab")
    TransformSpec.of(other)
    assert "    return g.missing_a" in traceback_of(one)
    assert "    return g.missing_b" in traceback_of(other)


# ---- with the taps that it is for -----------------------------------------------------------------------------------


def test_a_transform_takes_its_filter_along() -> None:
    spec = TransformSpec.of(("layer == 3", "torch.clone"))
    assert (spec.text, spec.where, spec.described) == ("torch.clone", "layer == 3", "torch.clone where layer == 3")
    assert TransformSpec.of("torch.clone").described == "torch.clone"
    # A draft runs none of its code.
    exits = ("layer == 3", "raise SystemExit('it was run')\n")
    assert TransformSpec.draft(exits).where == "layer == 3"
    with pytest.raises(gl.TransformError, match="it was run"):
        TransformSpec.of(exits)
    assert specs_of([]) is None
    assert specs_of(["torch.clone"]) == specs_of("torch.clone") == TransformSpec("path", "torch.clone")
    assert specs_of(["torch.clone", spec]) == (TransformSpec("path", "torch.clone"), spec)
    with pytest.raises(
        gl.TransformError,
        match=exactly(
            "the filter of a transform is blank, which matches no tap; write 'True' for all taps, or give "
            "the transform without a filter for the taps that the plan grafts"
        ),
    ):
        TransformSpec.of((" ", "torch.clone"))
    with pytest.raises(
        gl.TransformError,
        match=exactly(
            "the filter of a transform is blank, which matches no tap; write 'True' for all taps, or give "
            "the transform without a filter for the taps that the plan grafts"
        ),
    ):
        TransformSpec.draft(("", "torch.clone"))
    # A filter within a filter would be lost.
    for pair in (("layer == 3", ("name == 'q'", "torch.clone")), (3, "torch.clone"), ("True",)):
        with pytest.raises(gl.TransformError, match=r"a transform for certain taps is \(filter, transform\)"):
            TransformSpec.draft(pair)  # type: ignore[arg-type]


# ---- what came of it ------------------------------------------------------------------------------------------------


def test_tensor_from_host_memory_moves_to_the_targets_device_without_a_note() -> None:
    fitted = _fitted(Outcome(torch.ones(2)), torch.empty(2, device="meta"))
    assert fitted.value.device.type == "meta"
    assert fitted.cast is None


def test_values_of_the_room_cannot_be_changed() -> None:
    assert_values(GraftTransformInput, Outcome, TransformSpec)


def test_a_slice_of_a_long_dimension_is_cut_as_of_a_short_one() -> None:
    whole = torch.arange(2000.0)
    given = gl.GraftTransformInput({"name": "x"}, [whole], [None], torch.zeros(1000), recv_rank=1, recv_world_size=2)
    assert torch.equal(run_transform(None, given).value, whole[1000:])
