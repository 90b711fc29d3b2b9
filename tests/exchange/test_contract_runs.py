"""Every exchange's promises on unrequested tensors, ends of steps and runs, and announcements."""

from __future__ import annotations

import os

import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.implementations import MakeWorld
from kit.mailboxes import DEADLINE, MIB, World, has_settled, in_background, key, settles

from graftlab.base.tags import TapKey

A_MIB = torch.zeros(MIB, dtype=torch.uint8)


# ---- unrequested tensors --------------------------------------------------------------------------------------------


def test_memos_of_unrequested_tensors_return_at_the_receivers_step_end(a_world: MakeWorld) -> None:
    with a_world(1, 2) as world:
        sender, one, other = world.begin().mailboxes
        for name in ("both", "one", "none"):
            sender.publish(key(name), 1.0, memo=name)
        one.take(key("both"))
        other.take(key("both"))
        one.take(key("one"))
        one.exchange.end_step(0)
        world.deliver()
        sender.exchange.end_step(0)
        assert sender.exchange.take_unmatched() == []  # the other receiver may still ask
        other.exchange.end_step(0)
        world.deliver()
        sender.exchange.end_step(0)
        assert sender.exchange.take_unmatched() == ["none"]
        assert sender.exchange.take_unmatched() == []
        assert sender.bytes_in_use() == 0


def test_a_tensor_published_after_all_receivers_ended_the_step_is_unmatched(world: World) -> None:
    world.target.exchange.end_step(0)
    world.deliver()
    world.baseline.exchange.end_step(-1)  # reads what has come
    world.baseline.publish(key(), A_MIB, memo="late")
    assert world.baseline.exchange.take_unmatched() == ["late"]
    assert world.baseline.bytes_in_use() == 0


def test_a_tensor_that_was_received_in_an_unfinished_step_is_not_unmatched(world: World) -> None:
    world.baseline.publish(key("taken"), 1.0, memo="taken")
    world.baseline.publish(key("left"), 1.0, memo="left")
    world.target.take(key("taken"))
    # Its code may raise before the end of the step.
    world.target.exchange.end_run()
    world.deliver()
    world.baseline.exchange.end_step(0)
    assert world.baseline.exchange.take_unmatched() == ["left"]


def test_a_tensor_without_a_receiver_in_the_run_is_unmatched_at_once(a_world: MakeWorld) -> None:
    with a_world(2, 1) as world:
        world.begin(participants=(0, 1))
        world.baseline.publish(key(), 1.0, memo="alone")
        assert world.baseline.exchange.take_unmatched() == ["alone"]


def test_a_dead_receivers_unread_tensors_are_unmatched_and_freed(world: World) -> None:
    world.baseline.publish(key("x"), A_MIB, memo="x")
    world.target.die()
    world.deliver()
    world.baseline.exchange.end_step(0)
    assert world.baseline.exchange.take_unmatched() == ["x"]
    assert world.baseline.bytes_in_use() == 0


# ---- the end of a run -----------------------------------------------------------------------------------------------


def test_a_run_is_settled_when_every_rank_has_ended_it_or_died(a_world: MakeWorld) -> None:
    with a_world(2, 2) as world:
        first, second, third, _ = world.begin(participants=(0, 1, 2)).mailboxes
        first.exchange.end_run()
        assert not has_settled(first)
        settling = in_background(lambda: settles(first))
        second.exchange.end_run()
        third.die()
        assert settling.result(DEADLINE) is True
        assert has_settled(first)


def test_settling_can_be_called_off(world: World) -> None:
    read, write = os.pipe()
    settling = in_background(lambda: world.baseline.exchange.settle(read))
    os.write(write, b"x")
    assert settling.result(DEADLINE) is False
    # And again later, for real.
    os.read(read, 1)
    settling = in_background(lambda: world.baseline.exchange.settle(read))
    world.target.exchange.end_run()
    assert settling.result(DEADLINE) is True
    assert world.baseline.exchange.settle(timeout=0.0) is True
    os.close(read)
    os.close(write)


def test_settling_ends_after_its_timeout(world: World) -> None:
    settling = in_background(lambda: world.baseline.exchange.settle(timeout=0.01))
    assert settling.result(DEADLINE) is False
    settling = in_background(lambda: world.baseline.exchange.settle(timeout=DEADLINE))
    world.target.exchange.end_run()
    assert settling.result(DEADLINE) is True


def test_a_settling_rank_still_learns_which_tensors_were_requested(world: World) -> None:
    world.baseline.publish(key("asked"), 1.0, memo="asked")
    world.baseline.publish(key("not asked"), 1.0, memo="not asked")
    world.baseline.exchange.end_step(0)
    world.baseline.exchange.end_run()
    world.target.take(key("asked"))
    world.end(step=0)
    assert world.baseline.exchange.take_unmatched() == ["not asked"]
    assert world.baseline.bytes_in_use() == 0


# ---- what the leader says -------------------------------------------------------------------------------------------


def test_every_participant_receives_an_announcement_once(a_world: MakeWorld) -> None:
    with a_world(2, 2) as world:
        leader, *followers = world.begin().mailboxes
        for step in (1, 2):
            leader.exchange.announce(step, f"plan of {step}".encode())
        for follower in followers:
            assert follower.exchange.announcements(0, 1) == [b"plan of 1"]
            assert follower.exchange.announcements(0, 2) == [b"plan of 2"]


def test_a_follower_waits_for_the_leader_up_to_the_time_limit(world: World) -> None:
    listening = in_background(lambda: world.target.exchange.announcements(0, 1))
    world.target.until_it_waits()
    world.baseline.exchange.announce(1, b"begin")
    assert listening.result(DEADLINE) == [b"begin"]
    world.target.exchange.timeout = 0.05
    assert world.target.exchange.announcements(0, 2) is None


def test_a_follower_has_no_announcement_before_the_leaders_first(world: World) -> None:
    world.target.exchange.timeout = 0.05
    assert world.target.exchange.announcements(0, 0) is None
    world.baseline.exchange.announce(0, b"begin")
    world.deliver()
    assert world.target.exchange.announcements(0, 0) == [b"begin"]


def test_a_missed_announcement_arrives_with_the_next_step(world: World) -> None:
    world.target.exchange.timeout = 0.05
    assert world.target.exchange.announcements(0, 1) is None
    world.baseline.exchange.announce(1, b"a new plan")
    world.baseline.exchange.announce(2, b"the same plan")
    world.deliver()
    assert world.target.exchange.announcements(0, 2) == [b"a new plan", b"the same plan"]


def test_announcements_of_an_earlier_run_do_not_reach_the_next(world: World) -> None:
    world.baseline.exchange.announce(1, b"of the first run")
    world.end(step=1)
    world.begin(run=1, first_step=2)
    world.baseline.exchange.announce(3, b"of this run")
    assert world.target.exchange.announcements(0, 3) == [b"of this run"]


def test_no_rank_waits_for_steps_that_a_late_leader_skipped(world: World) -> None:
    world.baseline.exchange.announce(3, b"its first")
    world.deliver()
    assert [world.target.exchange.announcements(0, step) for step in (1, 2, 3)] == [[], [], [b"its first"]]
    assert world.target.waits_so_far == 0


def test_waiting_until_the_other_side_is_past_a_step_has_a_time_limit(a_world: MakeWorld) -> None:
    with a_world(1, 2) as world:
        world.begin()
        ahead = world.baseline.exchange
        _, first, second = world.mailboxes
        waiting = in_background(lambda: ahead.await_past(1))
        world.baseline.until_it_waits()
        first.exchange.end_step(0)
        first.exchange.end_step(1)
        second.exchange.end_step(1)
        assert waiting.result(DEADLINE)
        ahead.timeout = 0.05
        assert not ahead.await_past(2)
        first.exchange.end_step(2)
        # One that has ended its run is in no step.
        second.exchange.end_run()
        ahead.timeout = DEADLINE
        assert ahead.await_past(2)


def test_ranks_of_one_side_do_not_wait_for_each_others_steps(a_world: MakeWorld) -> None:
    with a_world(1, 2) as world:
        world.begin()
        leader, first, _ = world.mailboxes
        waiting = in_background(lambda: first.exchange.await_past(0))
        first.until_it_waits()
        leader.exchange.end_step(0)
        assert waiting.result(DEADLINE)


def test_a_leader_that_ended_its_run_is_not_waited_for_and_announces_nothing(world: World) -> None:
    world.baseline.exchange.announce(1, b"first")
    world.baseline.exchange.announce(2, b"last")
    world.baseline.exchange.end_run()
    world.deliver()
    assert [world.target.exchange.announcements(0, step) for step in (1, 2, 3)] == [[b"first"], [b"last"], []]
    assert world.target.exchange.why_gone(0) == ""
    assert world.target.waits_so_far == 0


def test_a_dead_leader_is_not_waited_for_and_what_it_announced_before_arrives(world: World) -> None:
    world.baseline.exchange.announce(1, b"first")
    world.baseline.exchange.announce(2, b"last")
    world.baseline.die()
    world.deliver()
    assert [world.target.exchange.announcements(0, step) for step in (1, 2, 3)] == [[b"first"], [b"last"], None]
    assert "died" in world.target.exchange.why_gone(0)
    assert world.target.waits_so_far == 0


def test_a_wait_for_an_announcement_ends_when_the_leader_dies(world: World) -> None:
    listening = in_background(lambda: world.target.exchange.announcements(0, 1))
    world.target.until_it_waits()
    world.baseline.die()
    assert listening.result(DEADLINE) is None


# ---- any interleaving -----------------------------------------------------------------------------------------------

actions = st.lists(
    st.tuples(
        st.sampled_from(
            ["publish", "publish", "publish", "receive", "receive", "receive", "decline", "release", "end"]
        ),
        st.integers(0, 3),
        st.integers(0, 5),
    ),
    max_size=50,
)


@examples(40)
@given(actions)
def test_any_order_of_events_delivers_all_tensors_and_frees_all_memory(
    a_world: MakeWorld, events: list[tuple[str, int, int]]
) -> None:
    """Four ranks, each sends and receives; only what cannot wait is done, because all run on this one thread."""
    with a_world(2, 2) as world:
        world.begin()
        said: dict[int, dict[TapKey, float | None]] = {rank: {} for rank in range(4)}
        step, held, asked = [0] * 4, [], set()
        for what, rank, number in events:
            mailbox = world.mailboxes[rank]
            direction = {True: mailbox.place.side == "baseline", False: mailbox.place.side == "target"}
            mine = key("down" if direction[True] else "up", step=step[rank], occurrence=number)
            if what in ("publish", "decline") and mine not in said[rank]:
                value = rank * 1000.0 + step[rank] * 100 + number
                if what == "publish":
                    mailbox.publish(mine, torch.full((40,), value), memo=(rank, mine))
                else:
                    mailbox.exchange.decline(mine)
                said[rank][mine] = value if what == "publish" else None
            elif what == "receive":
                theirs = key("up" if direction[True] else "down", step=step[rank], occurrence=number)
                senders = [other for other in world.mailboxes if other.place.side != mailbox.place.side]
                can_wait = [
                    s
                    for s in senders
                    if theirs not in said[s.place.world_rank] and step[s.place.world_rank] <= step[rank]
                ]
                if can_wait or (rank, theirs) in asked:
                    continue
                asked.add((rank, theirs))
                expected = [
                    (s.place.rank, said[s.place.world_rank][theirs])
                    for s in senders
                    if said[s.place.world_rank].get(theirs) is not None
                ]
                receipt = mailbox.receive(theirs)
                assert [(c.rank, c.tensor[0].item()) for c in receipt.contributions] == expected
                held.append((receipt, [value for _, value in expected]))
            elif what == "release" and held:
                receipt, values = held.pop(number % len(held))
                assert [contribution.tensor.tolist() for contribution in receipt.contributions] == [
                    [value] * 40 for value in values
                ]
                receipt.release()
            elif what == "end":
                for receipt, _ in held:
                    receipt.release()
                held = []
                mailbox.exchange.end_step(step[rank])
                step[rank] += 1
        for receipt, _ in held:
            receipt.release()
        world.end(step=max(step))
        assert [mailbox.bytes_in_use() for mailbox in world.mailboxes] == [0] * 4
        for rank, mailbox in enumerate(world.mailboxes):
            published = {each for each, value in said[rank].items() if value is not None}
            others = [m.place.world_rank for m in world.mailboxes if m.place.side != mailbox.place.side]
            wanted = {each for each in published if any((other, each) in asked for other in others)}
            unmatched = mailbox.exchange.take_unmatched()
            assert len(unmatched) == len(set(unmatched))
            assert set(unmatched) == {(rank, each) for each in published - wanted}
