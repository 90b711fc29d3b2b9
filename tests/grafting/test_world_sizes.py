"""Sides of all sizes, in both directions: values show which sender's tensor arrived where."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from kit.support import own_value, reset

import graftlab as gl

pytestmark = pytest.mark.ranks

WORLDS = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 2)]
# A whole number of shards for one, two and three ranks.
FULL = 12


@pytest.fixture(scope="module", params=WORLDS, ids=lambda world: f"{world[0]}+{world[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[gl.Session]:
    baseline, target = request.param
    with gl.launch(baseline, target) as session:
        yield session


@pytest.fixture
def session(world: gl.Session) -> gl.Session:
    return reset(world)


def sizes(session: gl.Session) -> tuple[int, int]:
    return session.options.baseline, session.options.target


# ---- what the ranks run ---------------------------------------------------------------------------------------------


def both_ways() -> tuple[list[float], list[float]]:
    down = gl.tap("down", torch.full((3,), own_value()))
    up = gl.tap("up", torch.full((3,), own_value()))
    return down.tolist(), up.tolist()


def my_shard() -> torch.Tensor:
    """0..11 cut into one shard a rank; the target's numbers are negative."""
    me = gl.here()
    sign = 1.0 if me.side == "baseline" else -1.0
    return (sign * torch.arange(1.0, FULL + 1)).chunk(me.world_size)[me.rank].clone().unsqueeze(0)


def sharded_both_ways() -> tuple[torch.Tensor, torch.Tensor]:
    return gl.tap("down", my_shard()), gl.tap("up", my_shard())


def all_reduced() -> tuple[float, int, int]:
    total = torch.tensor([own_value()])
    dist.all_reduce(total)
    return total.item(), dist.get_rank(), dist.get_world_size()


def reversed_group_taps(folder: str) -> tuple[int, torch.Tensor, torch.Tensor]:
    """Join a default group in which every rank has another number than in the graft world, and tap."""
    me = gl.here()
    dist.destroy_process_group()
    store = dist.FileStore(f"{folder}/{me.side}", me.world_size)
    dist.init_process_group("gloo", store=store, rank=me.world_size - 1 - me.rank, world_size=me.world_size)
    same_shape = gl.tap("same", torch.full((2,), own_value()))
    extent = 6 if me.side == "baseline" else 3
    sliced = gl.tap("sliced", torch.arange(float(extent)) if me.side == "baseline" else torch.zeros(extent))
    return dist.get_rank(), same_shape, sliced


# ---- the promises ---------------------------------------------------------------------------------------------------


def are_one_to_one(senders: int, receivers: int) -> bool:
    """Whether each receiver has a sender, or all the only one. Otherwise those that differ are not grafted."""
    return senders in (1, receivers)


def test_default_transform_takes_the_sender_with_my_rank_in_both_directions(session: gl.Session) -> None:
    session.edit(b2t="name == 'down'", t2b="name == 'up'")
    baselines, targets = sizes(session)

    run = session.run(both_ways, both_ways)

    of_baseline, of_target = ([[ten + rank] * 3 for rank in range(3)] for ten in (10.0, 20.0))
    taken_down, taken_up = are_one_to_one(baselines, targets), are_one_to_one(targets, baselines)
    expected_down = [of_baseline[rank % baselines] if taken_down else of_target[rank] for rank in range(targets)]
    expected_up = [of_target[rank % targets] if taken_up else of_baseline[rank] for rank in range(baselines)]
    assert [down for down, _ in run.target] == expected_down
    assert [up for _, up in run.target] == of_target[:targets]
    assert [up for _, up in run.baseline] == expected_up
    assert [down for down, _ in run.baseline] == of_baseline[:baselines]


def test_one_row_per_tap_and_receiving_rank_names_every_sender(session: gl.Session) -> None:
    session.edit(b2t="name == 'down'", t2b="name == 'up'")
    baselines, targets = sizes(session)

    frame = session.run(both_ways, both_ways).frame

    def status(senders: int, receivers: int) -> str:
        return "grafted" if are_one_to_one(senders, receivers) else "failed"

    rows = set(zip(frame["name"], frame["direction"], frame["side"], frame["rank"], frame["status"], strict=True))
    assert len(frame) == len(rows)
    assert rows == {
        *(("down", "b2t", "target", rank, status(baselines, targets)) for rank in range(targets)),
        *(("up", "t2b", "baseline", rank, status(targets, baselines)) for rank in range(baselines)),
    }
    assert all(senders == list(range(baselines)) for senders in frame.loc[frame["name"] == "down", "senders"])
    assert all(senders == list(range(targets)) for senders in frame.loc[frame["name"] == "up", "senders"])
    # baseline - target is -10 between ranks of equal number.
    first = frame[(frame["name"] == "down") & (frame["rank"] == 0)].iloc[0]
    assert first["status"] == "failed" or first["max_abs"] == first["mean_abs"] == 10.0


def test_default_transform_joins_and_cuts_shards_in_both_directions(session: gl.Session) -> None:
    session.edit(b2t="name == 'down'", t2b="name == 'up'")
    full = torch.arange(1.0, FULL + 1).unsqueeze(0)

    run = session.run(sharded_both_ways, sharded_both_ways)

    assert torch.cat([down for down, _ in run.target], dim=1).equal(full)
    assert torch.cat([up for _, up in run.baseline], dim=1).equal(-full)
    assert torch.cat([down for down, _ in run.baseline], dim=1).equal(full)
    expected = {
        (1, 1): (None, None),
        (1, 2): ("slice dim=1", "concat dim=1"),
        (2, 1): ("concat dim=1", "slice dim=1"),
        (2, 2): (None, None),
        (3, 2): ("concat, slice dim=1", "concat, slice dim=1"),
    }[sizes(session)]
    frame = run.frame
    for name, aligned_by in zip(("down", "up"), expected, strict=True):
        assert [None if value != value else value for value in frame.loc[frame["name"] == name, "aligned_by"]] == [
            aligned_by
        ] * (frame["name"] == name).sum()


def test_transform_gets_one_tensor_per_sender_in_rank_order(session: gl.Session) -> None:
    digits = "def transform(g): return g.target * 0 + sum(100**i * (t - 10) for i, t in enumerate(g.received_list))"
    session.edit(b2t="name == 'down'", transform=digits)
    baselines, targets = sizes(session)

    run = session.run(both_ways, both_ways)

    expected = float(sum(100**rank * rank for rank in range(baselines)))
    assert [down for down, _ in run.target] == [[expected] * 3] * targets


def test_a_transform_knows_the_direction_and_its_own_place(session: gl.Session) -> None:
    source = """
def transform(g):
    number = 100.0 * (g.direction == "t2b") + 10.0 * g.recv_world_size + g.recv_rank
    return g.target.new_full(g.target.shape, number)
"""
    session.edit(b2t="name == 'down'", t2b="name == 'up'", transform=source)
    baselines, targets = sizes(session)

    run = session.run(both_ways, both_ways)

    assert [down[0] for down, _ in run.target] == [10.0 * targets + rank for rank in range(targets)]
    assert [up[0] for _, up in run.baseline] == [100.0 + 10.0 * baselines + rank for rank in range(baselines)]


def test_each_side_has_its_own_default_process_group(session: gl.Session) -> None:
    run = session.run(all_reduced, all_reduced)

    for results, first, size in zip((run.baseline, run.target), (10.0, 20.0), sizes(session), strict=True):
        total = sum(first + rank for rank in range(size))
        assert results == [(total, rank, size) for rank in range(size)]


def test_ranks_have_the_environment_variables_of_torchrun(session: gl.Session) -> None:
    def told() -> list[str | None]:
        return [os.environ.get(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")]

    run = session.run(told, told)
    for results, size in zip((run.baseline, run.target), sizes(session), strict=True):
        assert results == [[str(rank), str(size)] * 2 for rank in range(size)]


def test_each_rank_gets_an_equal_share_of_the_cores_as_threads(session: gl.Session) -> None:
    run = session.run("torch.get_num_threads()", "torch.get_num_threads()")
    assert set(run.baseline + run.target) == {max(1, (os.cpu_count() or 1) // sum(sizes(session)))}


def test_the_graft_worlds_rank_decides_even_where_the_default_groups_rank_differs(tmp_path: Path) -> None:
    with gl.launch(2, 2) as session:
        session.edit(b2t="True")
        run = session.run(reversed_group_taps, reversed_group_taps, args=(str(tmp_path),))

    assert [default_rank for default_rank, _, _ in run.target] == [1, 0]
    assert [same.tolist() for _, same, _ in run.target] == [[10.0, 10.0], [11.0, 11.0]]
    assert [sliced.tolist() for _, _, sliced in run.target] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
