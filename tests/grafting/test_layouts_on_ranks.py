"""Tensors that are split over ranks in different ways are compared and grafted as whole tensors."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from kit.support import reset

import graftlab as gl

RANKS = 1, 2

pytestmark = pytest.mark.ranks

WHOLE = torch.arange(20.0).reshape(5, 4)


@pytest.fixture(scope="module")
def one_and_four() -> Iterator[gl.Session]:
    with gl.launch(1, 4) as session:
        yield session


@pytest.fixture
def five_ranks(one_and_four: gl.Session) -> gl.Session:
    return reset(one_and_four)


# ---- what the ranks run ---------------------------------------------------------------------------------------------


def placed(kinds: str, sizes: tuple[int, ...], shift: float) -> list[list[float]]:
    """The target's tensor is a DTensor, the baseline's is plain; returns the whole after the tap."""
    whole = torch.arange(20.0).reshape(5, 4)
    if gl.here().side == "baseline":
        return gl.tap("x", whole.clone()).tolist()
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp")[-len(sizes) :])
    made: Any = {"0": Shard(0), "1": Shard(1), "r": Replicate(), "p": Replicate()}
    x = distribute_tensor(whole + shift, mesh, [made[kind] for kind in kinds])
    if "p" in kinds:
        count = sizes[kinds.index("p")]
        partial = [Partial() if kind == "p" else made[kind] for kind in kinds]
        x = DTensor.from_local(x.to_local() / count, mesh, partial, shape=x.shape, stride=x.stride())
    gl.tap("x", x)
    found: list[list[float]] = x.full_tensor().tolist()
    dist.barrier()
    return found


KINDS = [("0", (2,)), ("1", (2,)), ("r", (2,)), ("p", (2,))]
KINDS_ON_A_MESH = [("r1", (2, 2)), ("01", (2, 2)), ("0p", (2, 2)), ("pr", (2, 2))]


@pytest.mark.parametrize(("kinds", "sizes"), KINDS)
def test_dtensor_is_compared_as_the_whole_tensor(session: gl.Session, kinds: str, sizes: Any) -> None:
    frame = session.run(placed, placed, args=(kinds, sizes, 0.0)).frame
    assert frame["status"].tolist() == ["compared"] * 2
    assert frame["max_abs"].tolist() == [0.0, 0.0]
    assert set(session.run(placed, placed, args=(kinds, sizes, 1.0)).frame["max_abs"]) == {1.0}


@pytest.mark.parametrize("direction", ["b2t", "t2b"])
@pytest.mark.parametrize(("kinds", "sizes"), KINDS)
def test_a_graft_makes_the_whole_tensors_equal(session: gl.Session, kinds: str, sizes: Any, direction: str) -> None:
    session.edit(**{direction: "True"})
    run = session.run(placed, placed, args=(kinds, sizes, 1.0))
    assert set(run.frame["status"]) == {"grafted"}
    expected = (WHOLE + (1.0 if direction == "t2b" else 0.0)).tolist()
    assert run.baseline + run.target == [expected] * 3
    noted = run.frame["note"].astype(str).str.contains("zeros on the others").any()
    assert noted == (kinds == "p" and direction == "b2t")


@pytest.mark.parametrize("direction", [None, "b2t", "t2b"])
@pytest.mark.parametrize(("kinds", "sizes"), KINDS_ON_A_MESH)
def test_two_dimensions_of_a_mesh(five_ranks: gl.Session, kinds: str, sizes: Any, direction: str | None) -> None:
    if direction is not None:
        five_ranks.edit(**{direction: "True"})
    run = five_ranks.run(placed, placed, args=(kinds, sizes, 1.0))
    assert set(run.frame["status"]) == {"compared" if direction is None else "grafted"}
    assert set(run.frame["max_abs"]) == {1.0}
    expected = (WHOLE + (0.0 if direction == "b2t" else 1.0)).tolist()
    assert run.target == [expected] * 4
    assert run.baseline == [(WHOLE + (1.0 if direction == "t2b" else 0.0)).tolist()]


@pytest.mark.parametrize("direction", [None, "b2t", "t2b"])
@pytest.mark.parametrize(
    ("baseline", "target"),
    [
        ("same", "shard(dim=1, mesh='tp', uneven='balanced')"),
        ("b s h", "b s h[tp]"),
        ("b s h", "s b h[tp]"),
        ("b s h", "(s*b) h[tp]"),
        ("same", "b s h -> h s b | shard(dim=0, mesh='tp')"),
        ("same", "partial(mesh='tp')"),
    ],
)
def test_tap_with_a_declared_layout_needs_no_shapes(
    session: gl.Session, baseline: str, target: str, direction: str | None
) -> None:
    if direction is not None:
        session.edit(**{direction: "True"})
    run = session.run(said, said, args=(baseline, target))
    assert run.frame["error"].isna().all(), run.frame["error"].tolist()
    assert set(run.frame["max_abs"]) == {1.0}
    assert run.frame["layout"].notna().all()
    if direction == "t2b":
        assert run.baseline == [(torch.arange(24.0).reshape(2, 3, 4) + 1).tolist()]
    if direction == "b2t":
        assert set(session.run(said, said, args=(baseline, target)).frame["status"]) == {"grafted"}


def said(baseline: str, target: str) -> list[Any]:
    """The target's tensor is made from a whole that is one more; its dimensions are as it says."""
    from graftlab.layouts import parse_layout

    me = gl.here()
    whole = torch.arange(24.0).reshape(2, 3, 4) + (1.0 if me.side == "target" else 0.0)
    text = baseline if me.side == "baseline" else target
    if text.startswith("s b"):
        whole = whole.transpose(0, 1)
    elif text.startswith("(s*b)"):
        whole = whole.transpose(0, 1).reshape(6, 4)
    local = parse_layout(text, mesh={"tp": me.world_size}).local(whole, me.rank).clone()
    if "partial" in text:
        local = whole / 2
    return gl.tap("x", local, layout=text).tolist()


def missing_a_shard() -> None:
    x = torch.ones(4)
    if gl.here().side == "baseline":
        gl.tap("x", x)
    elif gl.here().rank == 0:
        gl.tap("x", x[:2], layout="shard(dim=0, mesh='tp')")


def test_a_shard_that_did_not_come_is_never_made_up(session: gl.Session) -> None:
    session.edit(t2b="True")
    row = session.run(missing_a_shard, missing_a_shard).frame.iloc[0]
    assert row["status"] == "failed"
    assert "ranks [1] of [0, 1] sent nothing" in row["error"]


def replicas_apart() -> None:
    me = gl.here()
    gl.tap("x", torch.full((2,), 1.0 + (me.rank if me.side == "target" else 0)), layout="replicate(mesh='tp')")


def test_differing_replicas_are_noted(session: gl.Session) -> None:
    session.edit(t2b="True")
    row = session.run(replicas_apart, replicas_apart).frame.iloc[0]
    assert "replicas 0 and 1 along 'tp': 2 elements differ" in row["note"]


def unreadable() -> None:
    gl.tap("x", torch.ones(2), layout="shard(dim=")


def test_a_layout_that_cannot_be_read_fails_the_tap_and_not_the_model(session: gl.Session) -> None:
    frame = session.run(unreadable, unreadable).frame
    assert set(frame["status"]) <= {"failed", "missing"}
    assert frame["error"].str.contains("shard").any()


def transposed() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6)
    gl.tap("x", x if gl.here().side == "baseline" else x.T.contiguous())


def test_an_error_of_shapes_suggests_the_layout_that_fits_the_values(session: gl.Session) -> None:
    frame = session.run(transposed, transposed).frame
    assert set(frame["status"]) == {"failed"}
    assert frame["error"].str.contains("in the layout 'a b -> b a' of the received tensor").all()
    session.edit(pairs=[("x", "x", "a b -> b a")])
    assert session.run(transposed, transposed).frame["max_abs"].tolist() == [0.0, 0.0]
