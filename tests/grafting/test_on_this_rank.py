"""A rank's grafter apart from taps: its role, plans, interrupts, names, layouts and partial sums."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.grafters import GrafterWorld
from kit.mailboxes import DEADLINE, in_background

import graftlab as gl
from graftlab.base import limits
from graftlab.errors import LayoutError
from graftlab.grafting import active
from graftlab.grafting.self_graft import rounded_results
from graftlab.grafting.tensors import plain_tensor, summed_partial
from graftlab.layouts import Mesh, RankLayout, parse_layout
from graftlab.plan.plan import GraftPlan
from graftlab.taps import calls

# ---- being a rank ---------------------------------------------------------------------------------------------------


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> list[Callable[[], None]]:
    """What would be done in a child."""
    after: list[Callable[[], None]] = []
    monkeypatch.setattr(os, "register_at_fork", lambda *, after_in_child: after.append(after_in_child))
    monkeypatch.setattr(active, "_grafter", None)
    for name in ("_grafter", "_handler", "_here", "_traced", "_is_tracing"):
        monkeypatch.setattr(calls, name, getattr(calls, name))
    return after


def test_process_is_a_rank_between_activate_and_deactivate(
    forked: list[Callable[[], None]],
) -> None:
    world = GrafterWorld(1, 1)
    here = calls.Here("target", 0, 1, torch.device("cpu"), {})
    active.activate(world.target.grafter, here)
    assert active.grafter() is world.target.grafter
    assert gl.here() == here
    gl.tap("x", torch.ones(2))
    world.end()
    assert [row.name for row in world.target.rows] == ["x"]
    world.begin(run=1, first_step=1)
    active.deactivate()
    assert active.grafter() is None
    gl.tap("late", torch.ones(2))
    assert [row.name for row in world.target.rows] == ["x"]


def test_forked_child_is_not_a_rank(forked: list[Callable[[], None]]) -> None:
    world = GrafterWorld(1, 1)
    active.activate(world.target.grafter, calls.Here("target", 0, 1, torch.device("cpu"), {}))
    for after in forked:
        after()
    assert active.grafter() is None
    gl.tap("x", torch.ones(2))
    assert world.target.rows == []


# ---- plans and moments ----------------------------------------------------------------------------------------------


def test_newest_plan_is_the_offered_one_if_newer() -> None:
    world = GrafterWorld(1, 1)
    grafter, first = world.target.grafter, world.plan
    assert grafter.newest_plan is first
    newer = first.edit(compare="name == 'y'")
    grafter.offer_plan(newer)
    assert (grafter.newest_plan, grafter.plan) == (newer, first)
    grafter.offer_plan(GraftPlan(version=first.version))
    assert grafter.newest_plan is first


def test_moment_is_the_current_run_and_step() -> None:
    world = GrafterWorld(1, 1)
    assert world.target.grafter.moment == (0, 0)
    world.step()
    assert world.target.grafter.moment == (0, 1)
    world.end()
    assert world.target.grafter.moment is None
    world.begin(run=1, first_step=5)
    assert world.target.grafter.moment == (1, 5)


def test_between_runs_an_offered_plan_is_adopted_at_once_and_in_a_run_it_waits() -> None:
    world = GrafterWorld(1, 1)
    grafter, newer = world.target.grafter, world.plan.edit(compare="name == 'y'")
    grafter.offer_plan(newer)
    grafter.adopt_offered_plan()
    assert grafter.plan is world.plan
    world.end()
    grafter.adopt_offered_plan()
    assert grafter.plan is newer
    assert world.target.page.read().state == "idle"
    first = newer.edit(compare="name == 'z'")
    grafter.begin_with(first)
    assert (grafter.plan, grafter.newest_plan) == (first, first)


def test_time_limit_is_ignored_only_inside_patiently() -> None:
    rank = GrafterWorld(1, 1).target
    rank.exchange.timeout = 7.0
    limits_seen = []

    def wait() -> None:
        with rank.grafter.patiently():
            limits_seen.append(rank.exchange.timeout)
            raise KeyError

    with pytest.raises(KeyError):
        wait()
    assert limits_seen == [limits.LONGEST]
    assert rank.exchange.timeout == 7.0


# ---- interrupts -----------------------------------------------------------------------------------------------------


def test_an_interrupt_that_is_due_ends_a_step_or_a_tap_of_the_main_thread_once() -> None:
    world = GrafterWorld(1, 1)
    grafter = world.baseline.grafter
    grafter.interrupt_due = True
    # Of another thread it is not.
    in_background(lambda: world.baseline.tap("y", 1.0)).result(DEADLINE)
    assert grafter.interrupt_due
    with pytest.raises(KeyboardInterrupt):
        world.baseline.tap("x", 1.0)
    assert not grafter.interrupt_due
    world.baseline.tap("x", 1.0)
    grafter.interrupt_due = True
    with pytest.raises(KeyboardInterrupt):
        grafter.step()
    # The step has ended all the same.
    assert grafter.moment == (0, 1)
    assert len([key for key in world.post.sent if key.name == "x"]) == 2


def test_tap_inside_a_tap_is_skipped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrafterWorld(1, 1)
    grafter = world.baseline.grafter
    value = torch.ones(2)
    publish = world.baseline.exchange.publish

    def comes_upon(*given: Any) -> None:
        # As a signal handler does, in the middle of the exchange.
        with pytest.warns(gl.GraftWarning, match="it was reached inside another tap"):
            assert world.baseline.tap("inner", value) is value
        with pytest.warns(gl.GraftWarning, match="it was called inside a tap"):
            grafter.step()
        publish(*given)

    monkeypatch.setattr(world.baseline.exchange, "publish", comes_upon)
    world.baseline.tap("outer", value)
    assert [key.name for key in world.post.sent] == ["outer"]
    assert grafter.moment == (0, 0)


def test_a_function_that_makes_the_value_may_reach_taps_itself() -> None:
    world = GrafterWorld(1, 1)

    def made() -> torch.Tensor:
        return world.baseline.tap("inner", torch.ones(2)) * 2

    world.baseline.tap("outer", made)
    assert {key.name for key in world.post.sent} == {"inner", "outer"}


# ---- names and layouts ----------------------------------------------------------------------------------------------


def test_invalid_layout_fails_the_tap_and_no_receiver_waits(caplog: pytest.LogCaptureFixture) -> None:
    world = GrafterWorld(1, 1)
    from graftlab.taps.extras import ExtrasWithLayout

    world.target.tap("x", 1.0, extras=ExtrasWithLayout("no such layout(", None))
    (row,) = world.target.rows
    assert (row.status, row.name) == ("failed", "x")
    assert row.error is not None
    assert world.target.exchange.declined[0].name == "x"
    assert f"target[0]: tap 'x': {row.error}" in caplog.text


def test_rename_sends_each_side_the_others_tap_name() -> None:
    for way, receiver in (("b2t", "target"), ("t2b", "baseline")):
        world = GrafterWorld(1, 1, **{way: "True"}, rename={"baseline": {r"^model[.]": ""}})
        ranks = (world.baseline, world.target) if way == "b2t" else (world.target, world.baseline)
        names = {"baseline": "model.x", "target": "x"}
        for rank in ranks:
            rank.tap(names[rank.place.side], 1.0)
        (row,) = getattr(world, receiver).rows
        assert (row.name, row.baseline_name, row.target_name) == ("x", "model.x", "x")


# ---- what a tensor is -----------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_value_that_is_not_a_plain_tensor_is_described() -> None:
    plain = torch.ones(2)
    assert plain_tensor(plain) is plain
    assert plain_tensor(torch.nn.Parameter(plain)).tolist() == [1.0, 1.0]  # type: ignore[union-attr]
    for value, said in (
        (3, "its value is int, not a tensor"),
        (torch.ones(2).to_sparse(), "a torch.sparse_coo tensor on cpu cannot travel"),
        (torch.ones(2, device="meta"), "a torch.strided tensor on meta cannot travel"),
        (torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8), "a quantized tensor cannot be compared"),
    ):
        assert str(plain_tensor(value)).startswith(said)
    seen: list[Any] = []
    torch.vmap(lambda row: seen.append(plain_tensor(row)) or row)(torch.ones(2, 2))
    assert str(seen[0]).startswith("inside torch.func or torch.vmap a tensor has no plain values")


def test_plain_tensor_of_a_dtensor_is_the_ranks_shard() -> None:
    local = torch.ones(2)

    class OnMesh(torch.Tensor):
        def to_local(self) -> Any:
            return waited

    class Waited(torch.Tensor):
        def trigger_wait(self) -> None: ...

        def wait(self) -> torch.Tensor:
            return local

    waited: Any = local
    assert plain_tensor(torch.zeros(4).as_subclass(OnMesh)) is local
    waited = torch.zeros(2).as_subclass(Waited)
    assert plain_tensor(torch.zeros(4).as_subclass(OnMesh)) is local


def test_partial_sums_are_taken_where_it_is_clear_in_which_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.distributed, "all_reduce", lambda total: total.mul_(3))
    own = torch.ones(2)
    on_two = RankLayout(parse_layout("partial(mesh='tp')").on(Mesh((("tp", 2),))))
    assert summed_partial(own, own, on_two, 2).tolist() == [3.0, 3.0]
    assert own.tolist() == [1.0, 1.0]
    wide = RankLayout(parse_layout("partial(mesh='tp')").on(Mesh((("dp", 2), ("tp", 2)))))
    most = RankLayout(parse_layout("partial(mesh='tp', op='max')").on(Mesh((("tp", 2),))))
    alone = RankLayout(parse_layout("partial(mesh='tp')").on(Mesh((("dp", 1), ("tp", 2)))))
    assert summed_partial(own, own, alone, 2).tolist() == [3.0, 3.0]
    for layout, ranks in ((wide, 4), (most, 2), (on_two, 4)):
        with pytest.raises(LayoutError, match="the partial sums cannot be added up on the receiving side"):
            summed_partial(own, own, layout, ranks)


def test_the_sums_of_a_dtensor_are_taken_along_the_dimensions_in_which_it_is_partial(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Replicate: ...

    class Partial: ...

    class Shard: ...

    class SentExtras:
        placements = (Partial(), Shard(), Partial())

        def detach(self) -> SentExtras:
            return self

        def redistribute(self, placements: list[Any]) -> SentExtras:
            kinds.append([type(each).__name__ for each in placements])
            assert not torch.is_grad_enabled()
            return self

        def to_local(self) -> Any:
            return local

    class Waited(torch.Tensor):
        def trigger_wait(self) -> None: ...

        def wait(self) -> torch.Tensor:
            return own

    kinds: list[list[str]] = []
    local = own = torch.ones(2)
    monkeypatch.setitem(sys.modules, "torch.distributed.tensor", SimpleNamespace(Replicate=Replicate))
    layout = RankLayout(parse_layout("partial(mesh='tp')").on(Mesh((("tp", 2),))))
    for each in (own, torch.zeros(2).as_subclass(Waited)):
        local = each
        assert summed_partial(SentExtras(), torch.zeros(2), layout, 2) is own
    assert kinds == [["Replicate", "Shard", "Replicate"]] * 2


# ---- rounding -------------------------------------------------------------------------------------------------------


def test_results_are_returned_with_moved_taps_and_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GrafterWorld(1, 1)
    for name in ("_grafter", "_handler"):
        monkeypatch.setattr(calls, name, world.baseline.grafter)
    third = torch.full((50,), 1 / 3)
    found = rounded_results(lambda: gl.tap("x", third * 1) * 3, budget=1 << 20)
    assert found.error is None
    assert found.exact.dtype == torch.float64
    # By a unit in the last place of the tap.
    assert 0 < (found.moved / 3 - third).abs().max() < 1e-7

    def fails() -> torch.Tensor:
        if torch.get_default_dtype() == torch.float64 or (third * 1).dtype == torch.float64:
            raise RuntimeError("\n  no float64 here\nand more")
        return third

    found = rounded_results(fails, budget=1 << 20)
    assert found.exact is None
    assert found.error == "RuntimeError:   no float64 here"
