"""Pairing of taps between real processes, and taps without a counterpart: no rank waits forever."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given
from hypothesis import strategies as st
from kit.examples import examples
from kit.support import own_value, reset, shorten_waits, wait_for_file

import graftlab as gl

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def two_and_two() -> Iterator[gl.Session]:
    with gl.launch(2, 2) as session:
        yield session


@pytest.fixture
def four_ranks(two_and_two: gl.Session) -> gl.Session:
    return reset(two_and_two)


# ---- what the ranks run ---------------------------------------------------------------------------------------------

Tap = tuple[str, int | None, float]


def tap_in_order(baseline: list[Tap], target: list[Tap]) -> list[float]:
    """Tap ``(name, layer, value)`` in the order given for this side; returns what each tap's tensor then holds.

    A None for a tap ends the step.
    """
    seen = []
    for item in baseline if gl.here().side == "baseline" else target:
        if item is None:
            gl.step()
            continue
        name, layer, value = item
        tags = {} if layer is None else {"layer": layer}
        seen.append(gl.tap(name, torch.full((2,), value), **tags)[0].item())
    return seen


def run_in_order(session: gl.Session, baseline: list, target: list) -> gl.Run:
    return session.run(tap_in_order, tap_in_order, args=(baseline, target))


def waits_after_its_step(path: str) -> None:
    """Ends a step without the tap, then holds the run open until the other side has got past that tap."""
    gl.step()
    wait_for_file(path)


def taps_and_tells(path: str) -> list[float]:
    x = gl.tap("only here", torch.full((2,), own_value()))
    Path(path).touch()
    gl.step()
    return x.tolist()


def tap_once() -> list[float]:
    return gl.tap("x", torch.full((2,), own_value())).tolist()


def holds_back_a_tap(folder: str) -> list[float]:
    """The baseline reaches the tap only after the target has stopped waiting for it."""
    if gl.here().side == "baseline":
        gl.tap("early", torch.zeros(1))
        wait_for_file(f"{folder}/gave up")
        return gl.tap("late", torch.full((1,), own_value())).tolist()
    gl.tap("early", torch.zeros(1))
    shorten_waits(0.5)
    late = gl.tap("late", torch.full((1,), own_value()))
    Path(f"{folder}/gave up").touch()
    return late.tolist()


def waits_for_each_other() -> list[float]:
    """Each side first waits for what the other sends second; the target gives up."""
    names = ("up", "down") if gl.here().side == "baseline" else ("down", "up")
    return [gl.tap(name, torch.full((1,), own_value())).item() for name in names]


def dies_before_the_tap(how: str) -> list[float]:
    me = gl.here()
    if me.side == "baseline" and me.rank == me.world_size - 1:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        os._exit(7)
    return gl.tap("x", torch.full((2,), own_value())).tolist()


# ---- order ----------------------------------------------------------------------------------------------------------


def test_taps_reached_in_different_orders_pair(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = run_in_order(
        session,
        [("a", None, 1.0), ("b", None, 2.0), ("c", None, 3.0)],
        [("c", None, 0.0), ("a", None, 0.0), ("b", None, 0.0)],
    )
    assert run.target == [[3.0, 1.0, 2.0]]
    # The rows stand in the receiver's order.
    assert run.frame["name"].tolist() == ["c", "a", "b"]
    assert set(run.frame["status"]) == {"grafted"}


def test_both_directions_pair_in_different_orders(session: gl.Session) -> None:
    session.edit(b2t="name == 'down'", t2b="name == 'up'")
    run = run_in_order(
        session,
        [("down", None, 1.0), ("up", None, 2.0)],
        [("up", None, 3.0), ("down", None, 4.0)],
    )
    assert run.baseline == [[1.0, 3.0]]
    assert run.target == [[3.0, 1.0]]


def test_tags_distinguish_taps_of_one_name(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = run_in_order(
        session,
        [("h", 0, 1.0), ("h", 1, 2.0), ("h", None, 3.0)],
        [("h", None, 0.0), ("h", 1, 0.0), ("h", 0, 0.0)],
    )
    assert run.target == [[3.0, 2.0, 1.0]]


def test_repeated_taps_pair_by_occurrence_within_the_step(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = run_in_order(
        session,
        [("x", None, 1.0), ("x", None, 2.0), None, ("x", None, 3.0), ("x", None, 4.0)],
        [("x", None, 0.0), ("x", None, 0.0), None, ("x", None, 0.0)],
    )
    assert run.target == [[1.0, 2.0, 3.0]]
    frame = run.frame
    received = frame[frame["side"] == "target"]
    assert received["occurrence"].tolist() == [0, 1, 0]
    assert (received["step"] - received["step"].iloc[0]).tolist() == [0, 0, 1]
    left = frame[frame["side"] == "baseline"].iloc[0]
    assert (left["status"], left["occurrence"]) == ("unmatched", 1)


def test_a_tensor_of_an_earlier_step_is_never_taken_for_a_later_one(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = run_in_order(session, [("x", None, 1.0), None, ("x", None, 2.0)], [None, ("x", None, 0.0)])
    assert run.target == [[2.0]]
    assert run.frame["status"].tolist() == ["unmatched", "grafted"]
    # Nor a tensor of an earlier run.
    run_in_order(session, [("x", None, 5.0), ("y", None, 6.0)], [])
    assert run_in_order(session, [("x", None, 7.0)], [("x", None, 0.0), ("y", None, 0.0)]).target == [[7.0, 0.0]]


@st.composite
def two_orders(draw: st.DrawFn) -> tuple[list, list]:
    """Up to three steps of taps; the target reaches each step's taps in another order."""
    baseline: list = []
    target: list = []
    value = 0
    for _ in range(draw(st.integers(1, 3))):
        taps = draw(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([None, 0, 1])), max_size=6))
        for name, layer in taps:
            value += 1
            baseline.append((name, layer, float(value)))
        target += [(name, layer, 0.0) for name, layer in draw(st.permutations(taps))]
        baseline.append(None)
        target.append(None)
    return baseline, target


@given(two_orders())
@examples(25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_two_orders_pair_by_name_tags_and_occurrence(launched: gl.Session, orders: tuple[list, list]) -> None:
    reset(launched).edit(b2t="True")
    baseline, target = orders

    run = run_in_order(launched, baseline, target)

    def addressed(taps: list) -> dict[tuple, int]:
        """Each tap's place among the side's taps, under its step, name, layer and occurrence."""
        places: dict[tuple, int] = {}
        counts: dict[tuple, int] = {}
        step = place = 0
        for item in taps:
            if item is None:
                step += 1
                continue
            address = (step, *item[:2])
            occurrence = counts[address] = counts.get(address, -1) + 1
            places[(*address, occurrence)] = place
            place += 1
        return places

    values = [item[2] for item in baseline if item is not None]
    sent = addressed(baseline)
    assert run.target[0] == [values[sent[address]] for address in addressed(target)]
    assert set(run.frame["status"]) <= {"grafted"}
    assert len(run.frame) == len(values)


# ---- names and tags -------------------------------------------------------------------------------------------------


def test_sides_with_other_module_names_pair_through_the_plans_rewriting(session: gl.Session) -> None:
    session.edit(
        b2t="True",
        rename={
            "baseline": {r"^transformer\.h\.(\d+)\.attn$": r"layers.\1.attention"},
            "target": {r"^model\.(.*)\.self_attn$": r"\1.attention"},
        },
    )
    run = run_in_order(
        session,
        [("transformer.h.0.attn", None, 1.0), ("transformer.h.1.attn", None, 2.0)],
        [("model.layers.1.self_attn", None, 0.0), ("model.layers.0.self_attn", None, 0.0)],
    )
    assert run.target == [[2.0, 1.0]]
    # Rows have the paired name, and each side's own.
    assert run.frame["name"].tolist() == ["layers.1.attention", "layers.0.attention"]
    assert run.frame["target_name"].tolist() == ["model.layers.1.self_attn", "model.layers.0.self_attn"]
    assert run.frame["baseline_name"].tolist() == ["transformer.h.1.attn", "transformer.h.0.attn"]

    session.edit(rename=None)
    run = run_in_order(session, [("transformer.h.0.attn", None, 1.0)], [("model.layers.0.self_attn", None, 0.0)])
    assert sorted(run.frame["status"]) == ["missing", "unmatched"]


def test_filters_see_the_paired_name_on_both_sides(session: gl.Session) -> None:
    session.edit(b2t="name == 'left'", compare=None, rename={"target": {"^right$": "left"}})
    run = run_in_order(session, [("left", None, 1.0)], [("right", None, 0.0)])
    assert run.target == [[1.0]]


def test_rank_tags_are_left_out_of_pairing(four_ranks: gl.Session) -> None:
    four_ranks.edit(b2t="True")

    def tap_with_rank_tags() -> list[float]:
        me = gl.here()
        x = torch.full((2,), own_value())
        return gl.tap("x", x, layer=1, tp_rank=me.rank, pp_rank=7 if me.side == "target" else 0).tolist()

    run = four_ranks.run(tap_with_rank_tags, tap_with_rank_tags)
    assert run.target == [[10.0, 10.0], [11.0, 11.0]]
    assert run.frame["tp_rank"].tolist() == [0, 1]
    assert run.frame["pp_rank"].tolist() == [7, 7]


def test_a_tag_that_differs_keeps_taps_apart(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = run_in_order(session, [("x", 1, 1.0)], [("x", 2, 0.0)])
    assert sorted(run.frame["status"]) == ["missing", "unmatched"]


def test_tags_whose_class_only_one_side_knows_pair_by_their_value(session: gl.Session) -> None:
    session.edit(b2t="True")

    def with_enum() -> list[float]:
        class Phase(str, Enum):
            DECODE = "decode"

        class Depth(int):
            pass

        return gl.tap("x", torch.full((1,), own_value()), phase=Phase.DECODE, layer=Depth(3)).tolist()

    def plain() -> list[float]:
        return gl.tap("x", torch.full((1,), own_value()), phase="decode", layer=3).tolist()

    assert session.run(with_enum, plain).target == [[10.0]]


@pytest.mark.parametrize(
    "value",
    [
        *((1, 2), {5}, b"bytes", 1.5, True, float("inf"), torch.float16),
        *(2**64, float("nan"), "half a surrogate pair: \ud800"),
    ],
    ids=ascii,
)
def test_tags_of_any_kind_pair_and_get_into_the_row(value: object, session: gl.Session) -> None:
    session.edit(b2t="True")

    def tagged(value: object) -> list[float]:
        return gl.tap("x", torch.full((1,), own_value()), kind=value).tolist()

    run = session.run(tagged, tagged, args=(value,))
    assert run.target == [[10.0]]
    assert run.frame["status"].tolist() == ["grafted"]
    assert "kind" in run.frame.columns


# ---- taps that only one side has ------------------------------------------------------------------------------------


def test_tap_of_only_the_receiver_is_missing_with_the_reason(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = run_in_order(session, [("x", None, 1.0)], [("only here", None, 0.0), ("x", None, 0.0)])
    assert run.target == [[0.0, 1.0]]
    row = run.frame.set_index("name").loc["only here"]
    assert (row["status"], row["side"]) == ("missing", "target")
    assert "baseline[0] ended the" in row["error"]


def test_tap_of_only_the_sender_is_unmatched(session: gl.Session) -> None:
    session.edit(b2t="True")
    run = run_in_order(session, [("only here", None, 1.0), ("x", None, 1.0)], [("x", None, 0.0)])
    rows = run.frame.set_index("name")
    assert rows["status"].to_dict() == {"only here": "unmatched", "x": "grafted"}
    assert rows.loc["only here", "side"] == "baseline"
    assert rows.loc["only here", "direction"] == "b2t"
    assert (rows.loc["only here", "shape"], rows.loc["only here", "dtype"]) == ([2], "float32")


def test_a_missing_tap_frees_its_waiter_at_once_when_the_other_sides_step_ends(
    session: gl.Session, tmp_path: Path
) -> None:
    # The baseline's run continues until the target is past the tap: only the end of its step can free the target.
    run = session.run(waits_after_its_step, taps_and_tells, args=(str(tmp_path / "past"),))
    assert run.target == [[20.0, 20.0]]
    assert run.frame["status"].tolist() == ["missing"]
    assert run.frame["error"].tolist() == ["baseline[0] ended the step without this tap"]


def test_an_exception_on_one_side_frees_the_other(session: gl.Session) -> None:
    def raises() -> None:
        raise ValueError("no weights")

    def taps() -> list[float]:
        return gl.tap("x", torch.full((2,), own_value())).tolist()

    with pytest.raises(gl.RunError, match="no weights") as caught:
        # Else the other one is interrupted if it is late.
        session.run(raises, taps, on_failure="continue")
    assert list(caught.value.failures) == ["baseline[0]"]
    assert session.runs[-1].target == [[20.0, 20.0]]
    assert session.runs[-1].frame["status"].tolist() == ["missing"]


@pytest.mark.parametrize("longer", ["baseline", "target"])
def test_a_side_with_more_steps_continues_by_itself(longer: str, session: gl.Session) -> None:
    session.edit(b2t="True")
    many = [("x", None, 1.0), None, ("x", None, 2.0), None, ("x", None, 3.0)]
    few = [("x", None, 4.0)]

    run = run_in_order(session, *((many, few) if longer == "baseline" else (few, many)))

    frame = run.frame
    assert (frame["step"] - frame["step"].min()).tolist() == [0, 1, 2]
    lone = "unmatched" if longer == "baseline" else "missing"
    assert frame["status"].tolist() == ["grafted", lone, lone]
    assert frame["name"].tolist() == ["x", "x", "x"]
    # The next run begins past the longer side's last step, on both sides alike.
    again = run_in_order(session, [("x", None, 1.0)], [("x", None, 0.0)])
    assert again.frame["status"].tolist() == ["grafted"]
    assert again.frame["step"].tolist() == [frame["step"].max() + 1]


# ---- filters that look at the rank ----------------------------------------------------------------------------------


def test_rank_dependent_filter_grafts_only_between_those_ranks(four_ranks: gl.Session) -> None:
    four_ranks.edit(b2t="rank == 0", compare=None)

    run = four_ranks.run(tap_once, tap_once)

    assert run.baseline == [[10.0, 10.0], [11.0, 11.0]]
    assert run.target == [[10.0, 10.0], [21.0, 21.0]]
    assert run.frame["status"].tolist() == ["grafted"]
    assert run.frame["senders"].tolist() == [[0]]
    assert run.frame["note"].tolist() == ["baseline[1] did not send this tap"]


@pytest.mark.parametrize(
    ("b2t", "expected", "senders"),
    [
        ("rank == 1", [[20.0, 20.0], [11.0, 11.0]], {1: [1]}),
        ("side == 'target' and rank == 1 or side == 'baseline'", [[20.0, 20.0], [11.0, 11.0]], {1: [0, 1]}),
        ("side == 'baseline'", [[20.0, 20.0], [21.0, 21.0]], {}),
        ("side == 'target'", [[20.0, 20.0], [21.0, 21.0]], {0: [], 1: []}),
    ],
    ids=["one rank of each side", "all send, one receives", "all send, none receives", "none sends, all receive"],
)
def test_no_rank_waits_for_one_whose_filter_does_not_match(
    b2t: str, expected: list, senders: dict, four_ranks: gl.Session
) -> None:
    four_ranks.edit(b2t=b2t, compare=None)

    run = four_ranks.run(tap_once, tap_once)

    assert run.target == expected
    received = run.frame[run.frame["side"] == "target"]
    assert dict(zip(received["rank"], received["senders"], strict=True)) == senders
    assert set(received["status"]) <= {"grafted", "missing"}


def test_a_rank_that_declines_frees_the_receiver_before_its_own_step_ends(
    four_ranks: gl.Session, tmp_path: Path
) -> None:
    def taps_then_holds(folder: str) -> list[float]:
        me = gl.here()
        x = gl.tap("x", torch.full((2,), own_value()))
        if me.side == "target" and me.rank == 0:
            Path(f"{folder}/past").touch()
        else:
            # Still in the step: only what was said at the tap itself can free target[0].
            wait_for_file(f"{folder}/past")
        return x.tolist()

    four_ranks.edit(b2t="rank == 0", compare=None)
    run = four_ranks.run(taps_then_holds, taps_then_holds, args=(str(tmp_path),))
    assert run.target == [[10.0, 10.0], [21.0, 21.0]]
    assert run.frame["status"].tolist() == ["grafted"]


# ---- time limits and deaths -----------------------------------------------------------------------------------------


def test_timeout_ends_the_wait_with_each_peers_position_in_the_row(tmp_path: Path) -> None:
    with gl.launch(2, 1) as session:
        session.edit(b2t="True")

        run = session.run(holds_back_a_tap, holds_back_a_tap, args=(str(tmp_path),))

        assert run.target == [[20.0]]
        rows = run.frame[run.frame["side"] == "target"].set_index("name")
        assert rows["status"].to_dict() == {"early": "grafted", "late": "timeout"}
        for rank in (0, 1):
            reached = f"baseline[{rank}] did not reach this tap within 0.5 s: computing for"
            assert reached in rows.loc["late", "error"]
        assert rows.loc["late", "error"].count("last seen at tap 'early' of step 0") == 2
        # The late tensor has no receiver.
        sent = run.frame[run.frame["side"] == "baseline"]
        assert sent[["name", "status"]].values.tolist() == [["late", "unmatched"]] * 2


@pytest.mark.timeout(240)
def test_two_sides_that_wait_for_each_other_are_freed_at_once() -> None:
    # Longer than the test may take.
    with gl.launch(1, 1, timeout=600.0) as session:
        session.edit(b2t="name == 'down'", t2b="name == 'up'")

        run = session.run(waits_for_each_other, waits_for_each_other)

        rows = run.frame.set_index(["side", "name"])
        assert rows["status"].to_dict() == {
            ("target", "down"): "missing",
            ("baseline", "up"): "grafted",
            ("baseline", "down"): "unmatched",
        }
        cannot_come = (
            "baseline[0] waits for a different tap of target[0], "
            "which target[0] cannot reach while it waits for this one"
        )
        assert f"{cannot_come}: waiting at tap 'up'" in rows.loc[("target", "down"), "error"]
        assert run.baseline == [[20.0, 10.0]]
        assert run.target == [[20.0, 20.0]]
        # The run after it is as good as any.
        again = run_in_order(session, [("down", None, 5.0)], [("down", None, 0.0)])
        assert again.frame["status"].tolist() == ["grafted"]


def test_a_rank_that_comes_late_to_a_step_still_uses_the_plan_of_both_sides(tmp_path: Path) -> None:
    """A follower gives up waiting for the leader's step; the plan that step brought is not lost on it."""

    def steps(folder: str) -> list[float]:
        if gl.here().side == "baseline":
            Path(f"{folder}/began").touch()
            # The plan is edited now; the follower gives up on step 1 before the leader begins it.
            wait_for_file(f"{folder}/gave up")
            gl.step()
        else:
            shorten_waits(0.3)
            wait_for_file(f"{folder}/edited")
            gl.step()
            Path(f"{folder}/gave up").touch()
            shorten_waits(60.0)
        gl.step()
        return gl.tap("x", torch.full((1,), own_value())).tolist()

    with gl.launch(1, 1) as session:
        run = session.start(steps, steps, args=(str(tmp_path),))
        wait_for_file(tmp_path / "began")
        session.edit(b2t="True")
        session.stacks()  # answered after the plan has arrived
        (tmp_path / "edited").touch()
        run.wait()

        assert run.target == [[10.0]]
        frame = run.frame
        assert frame["status"].tolist() == ["timeout", "grafted"]
        assert "baseline[0], which announces the plan of each step, did not begin step 1" in frame["error"].iloc[0]
        assert frame["plan_version"].tolist() == [0, 1]


@pytest.mark.parametrize("how", ["killed", "exited"])
def test_dead_peer_gives_missing_rows_and_frees_its_waiters(how: str) -> None:
    with gl.launch(2, 1) as session:
        with pytest.raises(gl.RunError) as caught:
            # Else the others are interrupted, wherever they are.
            session.run(dies_before_the_tap, dies_before_the_tap, args=(how,), on_failure="continue")

        ended = "killed by SIGKILL" if how == "killed" else "ended with exit code 7"
        assert list(caught.value.failures) == ["baseline[1]"]
        assert ended in caught.value.failures["baseline[1]"]
        run = session.runs[-1]
        # The living sender's contribution has arrived.
        assert run.target == [[20.0, 20.0]]
        assert run.frame["status"].tolist() == ["compared"]
        assert run.frame["senders"].tolist() == [[0]]
        assert run.frame["note"].tolist() == ["baseline[1] died"]
        assert ended in session.status().set_index(["side", "rank"]).loc[("baseline", 1), "state"]
        with pytest.raises(gl.SessionClosedError, match=r"baseline\[1\].*session\.restart\(\)"):
            session.run(dies_before_the_tap, dies_before_the_tap, args=(how,))
        # The living ones can still be used.
        assert session.run(target=lambda: 5).target == [5]


def test_a_side_that_died_gives_missing_rows() -> None:
    with gl.launch(1, 2) as session:
        with pytest.raises(gl.RunError):
            # Else the others are interrupted, wherever they are.
            session.run(dies_before_the_tap, dies_before_the_tap, args=("killed",), on_failure="continue")
        frame = session.runs[-1].frame
        assert frame["status"].tolist() == ["missing", "missing"]
        assert frame["error"].tolist() == ["baseline[0] died", "baseline[0] died"]
        assert session.runs[-1].target == [[20.0, 20.0], [21.0, 21.0]]


# ---- sides that would wait for each other ---------------------------------------------------------------------------


def with_own_taps(names: str, before: str = "", own: str = "", steps: int = 4) -> list[float]:
    """Taps of these names in each step, and one of this side's own before that one; what went on of the last."""
    outputs = []
    for step in range(steps):
        for name in names:
            if name == before:
                gl.tap(own, torch.ones(2))
            outputs.append(gl.tap(name, torch.full((2,), own_value() + step))[0].item())
        gl.step()
    return outputs[len(names) - 1 :: len(names)]


@pytest.mark.parametrize("ranks", [(1, 1), (2, 2)])
@pytest.mark.timeout(240)
def test_no_deadlock_between_a_target_only_tap_and_a_graft(
    ranks: tuple[int, int],
) -> None:
    """The time limit is longer than the test may take: it would end in it."""
    with gl.launch(*ranks, device="cpu", timeout=600.0) as session:
        session.edit(t2b="name == 'b'")
        run = session.run(
            baseline=lambda: with_own_taps("abc"), target=lambda: with_own_taps("abc", before="a", own="extra")
        )
        rows = run.frame
        assert set(rows[rows["name"] == "extra"]["status"]) == {"missing"}
        error = rows[rows["name"] == "extra"]["error"].iloc[0]
        assert "waits for a different tap of target[" in error
        assert set(rows[rows["name"] == "b"]["status"]) == {"grafted"}
        assert set(rows[rows["name"].isin(["a", "c"])]["status"]) == {"compared"}


@pytest.mark.timeout(240)
def test_graft_of_a_tap_that_the_target_lacks_spoils_only_the_first_step() -> None:
    with gl.launch(1, 1, device="cpu", timeout=600.0) as session:
        session.edit(t2b="name == 'only mine' or name == 'b'")
        run = session.run(
            baseline=lambda: with_own_taps("abc", before="a", own="only mine"), target=lambda: with_own_taps("abc")
        )
        rows = run.frame[run.frame["step"] > run.frame["step"].min()]
        assert set(rows[rows["name"] == "only mine"]["status"]) == {"missing"}
        assert set(rows[rows["name"] == "b"]["status"]) == {"grafted"}
        assert set(rows[rows["name"].isin(["a", "c"])]["status"]) == {"compared"}


@pytest.mark.parametrize("kind", ["tensor", "list", "dict", "array", "tuple of a tensor", "grafter_extras"])
def test_invalid_tag_is_left_out_with_one_warning_and_the_taps_pair(kind: str, session: gl.Session) -> None:
    def taps() -> tuple[float, list[str]]:
        own = own_value()
        wrong = {
            "tensor": torch.tensor(own),
            "list": [own],
            "dict": {"n": own},
            "array": np.array([own]),
            "tuple of a tensor": (1, torch.tensor(own)),
            "grafter_extras": own,
        }[kind]
        tag = "grafter_extras" if kind == "grafter_extras" else "info"
        value = torch.zeros(())
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(3):
                value = gl.tap("a", torch.full((), own), layer=3, **{tag: wrong})
            with gl.tags(**{tag: wrong}):
                gl.tap("a", torch.full((), own))
        return value.item(), [str(each.message) for each in said]

    session.edit(b2t="name == 'a'")
    run = session.run(taps, taps)
    assert run.frame["status"].tolist() == ["grafted"] * 4
    assert not {"info", "grafter_extras"} & set(run.frame.columns)
    for own, said in (*run.baseline, *run.target):
        assert own == 10.0
        assert len(said) == 1
        assert "Pass data for the other side" in said[0]


@pytest.mark.parametrize("value", [np.int64(3), np.bool_(True), np.float32(0.5), (1, "a"), frozenset([1])], ids=repr)
def test_scalars_and_frozen_containers_are_tags(value: Any, session: gl.Session) -> None:
    run = session.run(*[lambda: gl.tap("a", torch.zeros(1), info=value)] * 2)
    assert run.frame["status"].tolist() == ["compared"]
    assert "info" in run.frame.columns
