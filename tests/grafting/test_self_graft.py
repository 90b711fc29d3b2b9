"""The self-graft: the rounding that each tap adds, measured by grafting a run's own record, slightly moved, into it."""

from __future__ import annotations

import itertools
import math
from functools import partial
from typing import Any

import pytest
import torch
from kit.grafters import GrafterWorld
from torch.utils.checkpoint import checkpoint

import graftlab as gl
from graftlab.diffs.results import named_tensors
from graftlab.grafting.self_graft import SelfGraft, changed_results, graft_self, is_mask, moved, without_dependents
from graftlab.taps import calls
from graftlab.taps.watch import watch

BUDGET = 1 << 20


@pytest.fixture(autouse=True)
def rank(monkeypatch: pytest.MonkeyPatch) -> GrafterWorld:
    """This process taps as a baseline's rank does."""
    world = GrafterWorld(1, 1)
    monkeypatch.setattr(calls, "_grafter", world.baseline.grafter)
    monkeypatch.setattr(calls, "_handler", world.baseline.grafter)
    return world


def chain(gain: float = 1.0) -> torch.Tensor:
    x = torch.linspace(0.5, 2.0, 1000)
    x = gl.tap("layers.0.x", x)
    x = gl.tap("layers.1.x", x * 3 * gain)
    return gl.tap("y", x - x.mean().round())


def by_name(rows: list[Any]) -> dict[str, Any]:
    return {row.name: row for row in rows}


def graft(call: Any, **options: Any) -> SelfGraft:
    return graft_self(call, options.pop("dtypes", None), **{"budget": BUDGET, **options})


# ---- moving by one unit in the last place ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_each_number_moves_by_one_unit_of_its_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([1.5, -3.25, 100.0, -0.007], dtype=dtype).repeat(64)
    other = moved(x, dtype, seed=0)
    assert other.dtype == dtype
    assert x.equal(torch.tensor([1.5, -3.25, 100.0, -0.007], dtype=dtype).repeat(64))
    steps = (other.double() - x.double()).abs()
    unit = torch.finfo(dtype).eps * 2.0 ** x.double().abs().log2().floor()
    assert torch.equal(steps, unit)
    assert {-1.0, 1.0} == set((other.double() - x.double()).sign().tolist())


def test_a_coarser_dtype_moves_further() -> None:
    x = torch.full((64,), 1.0)
    assert (moved(x, torch.bfloat16, seed=0) - 1).abs().max().item() == 2.0**-7
    assert (moved(x, torch.float64, seed=0) - 1).abs().max().item() == 2.0**-23


def test_numbers_of_every_block_move_by_themselves_and_the_arrangement_stays() -> None:
    x = torch.ones(4, 1 << 16)
    signs = (moved(x, x.dtype, seed=0) - 1).sign()
    assert not any(torch.equal(one, other) for one, other in itertools.combinations(signs, 2))
    assert torch.equal(moved(x.t(), x.dtype, seed=0).t().flatten()[: 1 << 16].sign(), x[0])
    assert moved(x.t(), x.dtype, seed=0).stride() == x.t().stride()


def test_the_largest_and_smallest_numbers_of_float64_move_by_their_own_unit() -> None:
    x = torch.tensor([1e300, -1e300, 1e-290], dtype=torch.float64).repeat(32)
    off = (moved(x, x.dtype, 0) - x).abs() / x.abs()
    assert (off > 2.0**-54).all()
    assert (off < 2.0**-51).all()


def test_zeros_infinities_and_nan_and_integers_stay() -> None:
    x = torch.tensor([0.0, math.inf, -math.inf, math.nan])
    assert torch.equal(moved(x, x.dtype, 0).nan_to_num(7.0), x.nan_to_num(7.0))
    assert torch.equal(moved(torch.arange(5), torch.float32, 0), torch.arange(5))


def test_both_parts_of_a_complex_number_move() -> None:
    x = torch.complex(torch.ones(8), torch.full((8,), 2.0))
    off = moved(x, torch.float32, 0) - x
    assert (off.real.abs() > 0).all()
    assert (off.imag.abs() > 0).all()


def test_a_mask_whose_smallest_change_would_excuse_anything_is_not_moved() -> None:
    """``(mask - 1) * 1e9`` makes a hundred of one unit in the last place, and the floor would be the whole value."""

    def attend(kept: int) -> torch.Tensor:
        mask = gl.tap("mask", (torch.arange(200) < kept).float())
        scores = gl.tap("scores", torch.linspace(-2, 2, 200))
        return gl.tap("p", (scores + (mask - 1) * 1e9).softmax(0))

    for kept in (150, 200):
        assert 0 < by_name(graft(partial(attend, kept)).added)["p"].rel_l2 < 1e-6
    assert is_mask(torch.tensor([[0.0, 1.0]], dtype=torch.bfloat16))
    assert is_mask(torch.zeros(0))
    for other in (
        torch.tensor([0.0, 1.0, 0.5]),
        torch.tensor([0, 1]),
        torch.zeros(100).index_fill(0, torch.tensor(99), 2),
    ):
        assert not is_mask(other)
    assert not is_mask(torch.zeros(4, dtype=torch.uint8).view(torch.float8_e4m3fn))


# ---- what is added --------------------------------------------------------------------------------------------------


def test_each_taps_addition_is_the_rounding_before_it() -> None:
    rows = by_name(graft(chain).added)
    assert list(rows) == ["layers.0.x", "layers.1.x", "y"]
    assert rows["layers.0.x"].rel_l2 == 0.0  # nothing comes before it
    assert 1e-8 < rows["layers.1.x"].rel_l2 < 3e-7
    # What cancellation leaves has lost digits.
    assert rows["y"].rel_l2 > rows["layers.1.x"].rel_l2


def quantised(dtype: torch.dtype) -> None:
    x = gl.tap("x", torch.linspace(0.5, 2.0, 1 << 14).to(dtype))
    q = gl.tap("q", x.to(torch.float8_e4m3fn))
    gl.tap("y", q.float() * 3)


def test_where_both_sides_quantise_few_numbers_move() -> None:
    """Otherwise the floor of the next tap would be the whole rounding of 8 bits, which hides most mistakes."""
    found = graft(lambda: quantised(torch.float32))
    assert by_name(found.added)["y"].rel_l2 == 0.0
    rows = by_name(graft(lambda: quantised(torch.bfloat16)).added)
    # One number in 16 moves by about 9 %.
    assert 0.015 < rows["y"].rel_l2 < 0.03


def test_where_one_side_quantises_alone_every_number_moves() -> None:
    rows = by_name(graft(lambda: quantised(torch.float32), dtypes={"x": "", "q": "float8_e4m3fn", "y": ""}).added)
    assert 0.07 < rows["y"].rel_l2 < 0.11


def test_an_error_is_added_at_one_tap_and_not_inherited_by_the_next() -> None:
    def deep() -> None:
        x = torch.linspace(0.5, 2.0, 1000)
        for i in range(30):
            x = gl.tap(f"layers.{i}.x", x * 1.1)

    found = graft(deep)
    assert found.added[-1].rel_l2 < 3 * found.added[1].rel_l2
    # Without a reset errors add up.
    assert found.outputs[-1].rel_l2 > 3 * found.outputs[1].rel_l2


def test_additions_are_relative_to_the_records_norm_and_root_mean_square() -> None:
    record, shift = torch.tensor([3.0, -4.0]), torch.tensor([0.0, 0.5])
    found = graft(lambda: gl.tap("x", record.clone(), layer=3), exact=lambda: gl.tap("x", record + shift, layer=3))
    (row,) = found.exact
    assert row.rel_max == pytest.approx(0.5 / math.sqrt(12.5))
    assert row.squares == pytest.approx(25.0)
    assert row.rel_l2 == pytest.approx(0.1)
    assert (row.name, row.tags["layer"], row.occurrence, row.dtype) == ("x", 3, 0, "float32")


def test_a_tap_of_another_shape_than_its_record_adds_nothing_that_is_known() -> None:
    assert graft(lambda: gl.tap("x", torch.ones(2, 3)), exact=lambda: gl.tap("x", torch.ones(3, 2))).exact == []


def test_complex_numbers_have_no_typical_row() -> None:
    record = torch.ones(8, 4, dtype=torch.complex64)
    shift = torch.zeros(8, 1).index_fill(0, torch.tensor(3), 0.5)
    (row,) = graft(lambda: gl.tap("x", record.clone()), exact=lambda: gl.tap("x", record + shift)).exact
    assert row.typical is None
    (row,) = graft(lambda: gl.tap("x", record.real.clone()), exact=lambda: gl.tap("x", record.real + shift)).exact
    assert row.typical == 0.0


def test_beside_a_record_of_zeros_any_difference_is_without_bound() -> None:
    found = graft(lambda: gl.tap("x", torch.zeros(2)), exact=lambda: gl.tap("x", torch.tensor([0.0, 1e-30])))
    assert [(row.rel_max, row.squares) for row in found.exact] == [(math.inf, 0.0)]
    found = graft(lambda: gl.tap("x", torch.zeros(2)), exact=lambda: gl.tap("x", torch.zeros(2)))
    assert [(row.rel_max, row.squares) for row in found.exact] == [(0.0, 0.0)]


def test_repeated_calls_of_a_tap_are_distinguished() -> None:
    def twice() -> None:
        for _ in range(2):
            gl.tap("x", torch.ones(2))
        gl.tap("x", torch.rand(2), layer=1)
        gl.tap("x", torch.rand(2))

    assert [row.occurrence for row in graft(lambda: [gl.tap("x", torch.ones(2)) for _ in range(3)]).added] == [0, 1, 2]
    assert graft(twice).not_repeated == ["x (layer=1)", "x (call 3)"]


def test_the_coarser_dtype_of_a_tap_is_that_it_is_moved_by() -> None:
    narrow = by_name(graft(chain, dtypes={"layers.0.x": "bfloat16"}).added)
    assert 1e-4 < narrow["layers.1.x"].rel_l2 < 1e-2


def test_rounding_adds_up_over_taps_that_are_not_grafted() -> None:
    def deep() -> None:
        x = gl.tap("given", torch.linspace(0.5, 2.0, 1000))
        for n in range(100):
            x = gl.tap(f"layers.{n}.x", x * 1.1 / 1.1)
        gl.tap("y", x * 3)

    whole, alone = by_name(graft(deep).added), by_name(graft(deep, dtypes={"given": "", "y": ""}).added)
    assert whole["y"].rel_l2 < 3e-7
    # A hundred random steps.
    assert 5e-7 < alone["y"].rel_l2 < 2e-6


def test_self_graft_overwrites_in_place_and_in_module_outputs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
    x = torch.ones(4, 8)

    def statement() -> None:
        y = torch.linspace(0.5, 2.0, 1000)
        gl.tap("a", y)
        gl.tap("b", y * 3)

    assert by_name(graft(statement).added)["b"].rel_l2 > 0
    with watch(model), torch.no_grad():
        assert by_name(graft(lambda: model(x)).added)["1"].rel_l2 > 0


def test_the_code_is_left_as_it_was() -> None:
    before = chain()
    graft(chain)
    assert torch.equal(chain(), before)


# ---- what cannot be relied on ---------------------------------------------------------------------------------------


def test_code_that_does_not_repeat_itself_is_found_before_anything_is_moved() -> None:
    def noisy() -> None:
        x = gl.tap("steady", torch.ones(8))
        gl.tap("noisy", x + torch.rand(8), layer=2)
        gl.tap("after", x)

    found = graft(noisy)
    assert found.not_repeated == ["noisy (layer=2)"]
    assert found.added == []


def test_tap_that_is_not_reached_again_is_reported() -> None:
    reached: list[int] = []

    def once() -> None:
        if not reached:
            gl.tap("first call", torch.ones(2))
        reached.append(1)

    assert graft(once).not_repeated == ["first call was not reached again"]


def test_different_dtype_or_shape_is_not_a_repeat() -> None:
    makes = iter([torch.ones(2), torch.ones(2).double(), torch.ones(2), torch.ones(1, 2)])
    for _ in range(2):
        assert graft(lambda: gl.tap("x", next(makes))).not_repeated == ["x"]


def test_nan_in_the_same_places_is_the_same() -> None:
    for before, after in itertools.permutations([[1.0, 1.0], [1.0, math.nan], [math.nan, 1.0]], 2):
        for dtype in (torch.float32, torch.complex64):
            makes = iter([torch.tensor(before, dtype=dtype), torch.tensor(after, dtype=dtype)])
            assert graft(lambda makes=makes: gl.tap("x", next(makes))).not_repeated == ["x"]
    assert graft(lambda: gl.tap("x", torch.tensor([1.0, math.nan]))).not_repeated == []


def test_record_is_bounded_and_taps_beyond_it_are_counted() -> None:
    def three() -> None:
        for name in "abc":
            gl.tap(name, torch.ones(100 if name == "b" else 10))

    found = graft(three, budget=100)
    assert [row.name for row in found.added] == ["a"]
    assert found.not_recorded == 2  # c too: after a gap a difference may be inherited


def test_taps_without_a_tensor_are_listed() -> None:
    def mixed() -> None:
        gl.tap("number", 3)
        gl.tap("x", torch.ones(2))

    assert graft(mixed).skipped == ["number"]


def test_a_returned_value_may_repeat_up_to_rounding_and_whole_numbers_repeat_exactly() -> None:
    whole = torch.full((64,), 10_000_000)
    first = named_tensors({"x": torch.ones(64), "ids": whole})
    again = {"x": torch.ones(64) + 2e-7, "ids": whole + (torch.arange(64) == 3)}
    assert changed_results(first, again) == ["['ids']"]
    assert changed_results(first, {"x": torch.ones(64) + 1e-3, "ids": whole}) == ["['x']"]
    assert changed_results(first, {"x": torch.full((64,), math.nan), "ids": whole}) == ["['x']"]


# ---- a twin, and what is kept ---------------------------------------------------------------------------------------


def test_a_twins_distance_is_measured_from_the_record() -> None:
    found = graft(chain, exact=lambda: chain(gain=1 + 1e-3))
    assert by_name(found.exact)["layers.1.x"].rel_l2 == pytest.approx(1e-3, rel=1e-2)
    assert by_name(found.exact)["y"].rel_l2 == 0.0


@pytest.mark.parametrize("chooses", [False, True])
def test_a_function_of_whole_numbers_is_measured_in_float64_unless_its_choices_turn(chooses: bool) -> None:
    """Only its result moves, which shows none of the rounding before it."""

    def generate() -> Any:
        x = gl.tap("tokens", torch.arange(64)) / 7
        for _ in range(200):
            x = (x * 1.7).sin() + x / 3
        # A near tie: float32 rounds both numbers alike, and float64 does not.
        tie = (torch.tensor([1.0, 1.0]) + torch.tensor([0.0, 1.0]) * 1e-9).argmax() if chooses else torch.tensor(0)
        return gl.tap("output[0]", x), gl.tap("output[1]", tie)

    found = graft(generate)
    assert [each.name for each in found.exact if each.rel_l2] == ([] if chooses else ["output[0]"])
    # A tap in between moves, and shows the rounding.
    assert not graft(lambda: (generate(), gl.tap("h", torch.ones(2)))).exact


@pytest.mark.parametrize(("dtype", "name"), [(torch.bfloat16, "bfloat16"), (torch.float32, "")])
def test_a_result_in_float32_is_measured_by_the_rounding_of_what_it_is_computed_in(
    dtype: torch.dtype, name: str
) -> None:
    x = torch.linspace(0.5, 2, 64).to(dtype)

    def scores() -> Any:
        return gl.tap("output", ((x * 1.7).sin() + x / 3).float().log_softmax(-1))

    found = graft(scores)
    assert found.computed_in == name
    (exact,) = found.exact
    assert (1e-4 if name else 1e-9) < exact.rel_l2 < (1e-2 if name else 1e-6)


def test_both_sides_round_a_stored_weight_so_that_this_excuses_nothing() -> None:
    weight = torch.full((64,), 1 / 3)
    (exact,) = graft(lambda: gl.tap("output", weight.to(torch.bfloat16) * 2)).exact
    assert exact.rel_l2 == 0.0


def test_the_last_record_of_a_group_is_returned() -> None:
    found = graft(chain, keep=["layers.*.x"])
    assert torch.equal(found.last["layers.*.x"], torch.linspace(0.5, 2.0, 1000) * 3)


def test_the_last_record_is_none_that_activation_checkpointing_repeats() -> None:
    def layer(name: str, x: torch.Tensor) -> torch.Tensor:
        return gl.tap(name, x * 3).sin()

    def two_layers() -> None:
        x = torch.ones(4, requires_grad=True)
        for name in ("layers.0.x", "layers.1.x"):
            x = checkpoint(layer, name, x, use_reentrant=False)
        x.sum().backward()

    found = graft(two_layers, keep=["layers.*.x"])
    assert len(found.added) == 4
    assert torch.equal(found.last["layers.*.x"], torch.ones(4).mul(3).sin() * 3)


def routed() -> torch.Tensor:
    """Of 64 tokens 8 have two equal scores, so that one unit in the last place decides their expert."""
    scores = torch.stack([torch.ones(64), torch.where(torch.arange(64) % 8 == 0, 1.0, 2.0)], -1)
    chosen = gl.tap("scores", scores).argmax(-1)
    experts = torch.stack([torch.linspace(1, 2, 32), torch.linspace(-3, 3, 32)])
    return gl.tap("out", experts[chosen] * gl.tap("x", torch.full((64, 1), 1.5)))


def test_the_typical_difference_leaves_out_rows_whose_choice_rounding_turned() -> None:
    added = by_name(graft(routed).added)
    assert added["out"].rel_l2 > 0.1
    assert added["out"].typical is not None
    assert added["out"].typical < 1e-6
    assert added["x"].typical is None


# ---- what depends on a group ----------------------------------------------------------------------------------------


def test_a_tap_that_moves_by_less_than_a_rounding_depends_on_the_group() -> None:
    def call() -> None:
        small = gl.tap("small", torch.full((64,), 2.0**-8, dtype=torch.bfloat16))
        gl.tap("unread", torch.ones(64, dtype=torch.bfloat16))
        gl.tap("sum", torch.linspace(0.02, 1, 64, dtype=torch.bfloat16) + small)

    assert without_dependents(call, ["small", "unread", "sum"], budget=BUDGET) == ["unread", "sum"]


# ---- caches among the arguments -------------------------------------------------------------------------------------


class Remembering(torch.nn.Module):
    """Adds the mean of all values that its cache has, in one of several containers."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Any) -> torch.Tensor:
        seen = cache["seen"] if isinstance(cache, dict) else cache[0]
        seen = torch.cat([seen, self.proj(x)])
        cache["seen" if isinstance(cache, dict) else 0] = seen
        return seen.mean(0, keepdim=True)


class Reserving(torch.nn.Module):
    """Like :class:`Remembering`, with memory that the caller has reserved."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, cache: Any, at: int) -> torch.Tensor:
        cache[0][at] = self.proj(x)[0]
        return cache[0][: at + 1].mean(0, keepdim=True)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_later_calls_read_what_a_call_wrote_into_reserved_memory(mode: Any) -> None:
    torch.manual_seed(0)
    model = Reserving()

    def decode() -> torch.Tensor:
        with mode():
            own, x = [torch.zeros(4, 4)], torch.ones(1, 4)
            for at in range(4):
                x = model(x, own, at)
        return x

    with watch(model, inputs=True):
        found = graft(decode)
    assert max(each.rel_l2 for each in found.added) < 1e-5


@pytest.mark.parametrize("cache", [lambda first: {"seen": first}, lambda first: [first]], ids=["dict", "list"])
def test_later_calls_read_what_a_call_wrote_into_a_cache_among_its_arguments(cache: Any) -> None:
    torch.manual_seed(0)
    model, first = Remembering(), torch.randn(1, 4)

    def decode() -> torch.Tensor:
        own, x = cache(first), torch.ones(1, 4)
        with torch.no_grad():
            for _ in range(4):
                x = model(x, own)
        return x

    with watch(model, inputs=True):
        found = graft(decode)
    assert found.returned[""] < 1e-5
    assert max(each.rel_l2 for each in found.outputs) < 1e-5


def test_an_argument_keeps_its_own_tensors_after_a_call_with_others() -> None:
    torch.manual_seed(0)
    model, given = torch.nn.Sequential(torch.nn.Identity()), {"a": torch.ones(3), "parts": [torch.zeros(2)]}
    before = given["a"], given["parts"][0]
    with watch(model, inputs=True):
        found = graft(lambda: model(given)["a"] * 1)
    assert {each.name for each in found.outputs} >= {"input.input.a", "input.input.parts[0]"}
    assert given["a"] is before[0]
    assert given["parts"][0] is before[1]


# ---- values that are computed from no other tap ---------------------------------------------------------------------


def long_sums() -> list[int]:
    """The only tap is the result of many operations on numbers that have no tap, as the logits of a decode loop."""
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(8, 64, generator=generator), torch.randn(64, 64, generator=generator) / 5
    for _ in range(20):
        x = (x @ weight).tanh()
    x = gl.tap("logits", x)
    return [int(each) for each in x.argmax(-1)]


def test_float64_shows_the_rounding_of_a_doubtful_tap_that_no_other_tap_moves() -> None:
    assert graft(long_sums).exact == []
    found = by_name(graft(long_sums, doubtful=["logits"]).exact)
    assert 1e-7 < found["logits"].rel_l2 < 1e-5
    # It may be doubtful in one of several pairs.
    named = graft(long_sums, doubtful=["other.logits"], paired_names=lambda name: (name, f"other.{name}"))
    assert by_name(named.exact).keys() == {"logits"}


def test_a_doubtful_tap_that_others_move_has_its_floor_already() -> None:
    found = graft(chain, doubtful=["layers.1.x"])
    assert found.exact == []
    # The first tap alone is computed from no other, so the later ones keep their floors.
    assert {row.name for row in graft(chain, doubtful=["layers.0.x", "y"]).exact} == {"layers.0.x"}


def test_float64_shows_nothing_of_a_call_that_makes_other_choices_in_it() -> None:
    def chooses() -> int:
        x = gl.tap("x", torch.linspace(0.5, 2, 64).sin().sum())
        return 1 if x.dtype == torch.float64 else 2

    assert graft(chooses, doubtful=["x"]).exact == []
