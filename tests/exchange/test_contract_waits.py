"""Every exchange's promises on waits: none lasts forever, and none is for a tensor that cannot come."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from kit.implementations import MakeWorld
from kit.mailboxes import DEADLINE, Mailbox, World, in_background, key, knows_where
from kit.support import wait_until

from graftlab.base.tags import TapKey
from graftlab.exchange.contract import Receipt


def step_ends(sender: Any) -> None:
    sender.exchange.end_step(0)


def run_ends(sender: Any) -> None:
    sender.exchange.end_run()


def declines(sender: Any) -> None:
    sender.exchange.decline(key("x"))


def sender_dies(sender: Any) -> None:
    sender.die()


WHY_ABSENT = {
    step_ends: "baseline[0] ended the step without this tap",
    run_ends: "baseline[0] ended the run without this tap",
    declines: "baseline[0] did not send this tap",
    sender_dies: "baseline[0] died",
}


@pytest.mark.parametrize("before", [True, False], ids=["before the wait", "during the wait"])
@pytest.mark.parametrize("ending", WHY_ABSENT)
def test_a_sender_that_declines_ends_the_wait_at_once(
    ending: Callable[[Any], None], before: bool, world: World
) -> None:
    sender, receiver = world.baseline, world.target
    if before:
        ending(sender)
        world.deliver()
    receiving = in_background(lambda: receiver.receive(key("x")))
    if not before:
        receiver.until_it_waits()
        ending(sender)
    receipt = receiving.result(DEADLINE)
    assert receipt.contributions == []
    assert receipt.absent == {0: WHY_ABSENT[ending]}
    assert not receipt.timed_out
    assert receiver.waits_so_far == (0 if before else 1)


def test_the_end_of_an_earlier_step_ends_no_wait(world: World) -> None:
    receiving = in_background(lambda: world.target.take(key("x", step=2)))
    world.target.until_it_waits()
    world.baseline.exchange.end_step(0)
    world.baseline.exchange.end_step(1)
    world.baseline.publish(key("x", step=2), 4.0)
    assert receiving.result(DEADLINE) == [4.0]


def test_no_rank_waits_for_a_side_that_is_several_steps_ahead(world: World) -> None:
    for step in range(3):
        world.baseline.publish(key("x", step=step), float(step))
        world.baseline.exchange.end_step(step)
    world.deliver()
    assert world.target.take(key("x", step=0)) == [0.0]
    assert world.target.receive(key("y", step=1)).absent == {0: "baseline[0] ended the step without this tap"}
    assert world.target.take(key("x", step=2)) == [2.0]
    assert world.target.waits_so_far == 0


def test_tensors_of_later_steps_outlive_the_end_of_this_step(world: World) -> None:
    for step in range(2):
        world.baseline.publish(key("x", step=step), float(step))
        world.baseline.exchange.end_step(step)
    assert world.target.take(key("x", step=0)) == [0.0]
    world.target.exchange.end_step(0)
    assert world.target.take(key("x", step=1)) == [1.0]


def test_a_rank_outside_the_run_is_not_waited_for(a_world: MakeWorld) -> None:
    with a_world(2, 1) as world:
        world.begin(participants=(1, 2))
        _idle, sender, receiver = world.mailboxes
        sender.publish(key("x"), 1.0)
        receipt = receiver.receive(key("x"))
        assert [each.rank for each in receipt.contributions] == [1]
        assert receipt.absent == {0: "baseline[0] takes no part in this run"}
        receipt.release()
        receiver.publish(key("up"), 2.0)
        assert sender.take(key("up")) == [2.0]
        # Nor does its memory wait for the one that does not know of it.
        sender.exchange.end_step(0)
        world.deliver()
        receiver.exchange.end_step(0)
        assert receiver.bytes_in_use() == 0


def test_a_timeout_ends_the_wait_and_reports_where_each_peer_is(a_world: MakeWorld) -> None:
    with a_world(3, 1, timeout=0.1) as world:
        world.begin()
        punctual, slow, _never, receiver = world.mailboxes
        punctual.publish(key("x"), 1.0)
        slow.step = 4
        slow.tap = "mlp"
        slow.note("waiting", [3])
        # Told from time to time to those that cannot look.
        wait_until(lambda: knows_where(receiver, "waiting at tap 'mlp'"), "the word of where it is")
        world.deliver()
        receipt = receiver.receive(key("x"))
        assert receipt.timed_out
        assert [(each.rank, each.tensor.item()) for each in receipt.contributions] == [(0, 1.0)]
        assert set(receipt.absent) == {1, 2}
        assert (
            "baseline[1] did not reach this tap within 0.1 s: waiting at tap 'mlp' of step 4 for" in receipt.absent[1]
        )
        assert "baseline[2] did not reach this tap within 0.1 s: starting" in receipt.absent[2]


def test_a_late_tensor_reaches_no_other_tap_and_is_freed(a_world: MakeWorld) -> None:
    with a_world(1, 1, timeout=0.05) as world:
        sender, receiver = world.begin().mailboxes
        assert receiver.receive(key("x", occurrence=0)).timed_out
        sender.publish(key("x", occurrence=0), 1.0, memo="late")
        sender.publish(key("x", occurrence=1), 2.0, memo="in time")
        world.deliver()
        assert receiver.take(key("x", occurrence=1)) == [2.0]
        world.end(step=0)
        assert sender.exchange.take_unmatched() == ["late"]
        assert sender.bytes_in_use() == 0


# ---- two that wait for each other -----------------------------------------------------------------------------------


def wait_for(rank: Mailbox, tap: TapKey) -> Future[Receipt]:
    receiving = in_background(lambda: rank.receive(tap))
    rank.until_it_waits()
    return receiving


def test_of_two_mutual_waiters_the_higher_rank_yields_at_once(world: World) -> None:
    baseline, target = world.mailboxes
    waits = [wait_for(rank, key(f"what {rank.place.side} waits for")) for rank in (target, baseline)]
    yielded = waits[0].result(DEADLINE)
    assert yielded.contributions == []
    assert not yielded.timed_out
    why = (
        "baseline[0] waits for a different tap of target[0], "
        "which target[0] cannot reach while it waits for this one: waiting"
    )
    assert yielded.absent[0].startswith(why)
    assert not waits[1].done()
    target.publish(key("what baseline waits for"), 3.0)
    assert [each.tensor.item() for each in waits[1].result(DEADLINE).contributions] == [3.0]


def test_mutual_waiters_yield_again_in_the_next_step(world: World) -> None:
    baseline, target = world.mailboxes
    for step in range(2):
        waits = [wait_for(rank, key(f"what {rank.place.side} waits for", step=step)) for rank in (target, baseline)]
        assert "baseline[0] waits for a different tap of target[0]" in waits[0].result(DEADLINE).absent[0]
        target.exchange.end_step(step)
        assert waits[1].result(DEADLINE).contributions == []
        baseline.exchange.end_step(step)


def test_the_rank_waiting_for_a_never_reached_tap_yields(world: World) -> None:
    baseline, target = world.mailboxes
    baseline.publish(key("known", step=0), 1.0)
    assert target.take(key("known", step=0)) == [1.0]
    for rank in (baseline, target):
        rank.exchange.end_step(0)
    known, never = wait_for(target, key("known", step=1)), wait_for(baseline, key("never", step=1))
    assert "target[0] waits for a different tap of baseline[0]" in never.result(DEADLINE).absent[0]
    assert not known.done()
    baseline.publish(key("known", step=1), 2.0)
    assert [each.tensor.item() for each in known.result(DEADLINE).contributions] == [2.0]


def test_a_rank_does_not_yield_to_one_that_waits_for_a_third(a_world: MakeWorld) -> None:
    with a_world(2, 1) as world:
        first, second, receiver = world.begin().mailboxes
        first.publish(key("down"), 1.0)
        # The second is late; that the first waits for the receiver meanwhile is no reason to give up the second.
        up = wait_for(first, key("up"))
        down = wait_for(receiver, key("down"))
        second.publish(key("down"), 2.0)
        assert [each.tensor.item() for each in down.result(DEADLINE).contributions] == [1.0, 2.0]
        receiver.publish(key("up"), 3.0)
        assert [each.tensor.item() for each in up.result(DEADLINE).contributions] == [3.0]
