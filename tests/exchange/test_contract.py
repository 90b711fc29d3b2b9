"""What every exchange promises of one tap; each rank is an exchange in this process."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kit.examples import examples
from kit.implementations import MakeWorld
from kit.mailboxes import DEADLINE, MIB, World, in_background, key, knows_where
from kit.support import wait_until
from kit.tensors import DTYPES, bits, layouts

from graftlab.base.tags import TapKey
from graftlab.errors import BufferFullError, ShippingError

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

A_MIB = torch.zeros(MIB, dtype=torch.uint8)


# ---- promise 1: never a tensor of another tap, step or occurrence ---------------------------------------------------

BASE = key("q", step=1, occurrence=1, status="original", layer=1, phase="a")
OTHERS = {
    "step": key("q", step=2, occurrence=1, layer=1, phase="a"),
    "name": key("k", step=1, occurrence=1, layer=1, phase="a"),
    "value of a tag": key("q", step=1, occurrence=1, layer=2, phase="a"),
    "value of another tag": key("q", step=1, occurrence=1, layer=1, phase="b"),
    "a tag more": key("q", step=1, occurrence=1, layer=1, phase="a", head=0),
    "a tag less": key("q", step=1, occurrence=1, phase="a"),
    "recompute status": key("q", step=1, occurrence=1, status="recompute", layer=1, phase="a"),
    "occurrence": key("q", step=1, occurrence=2, layer=1, phase="a"),
}


@pytest.mark.parametrize("differs", OTHERS)
def test_a_tensor_with_another_address_is_not_taken_for_this_one(differs: str, world: World) -> None:
    sender, receiver = world.baseline, world.target
    sender.publish(OTHERS[differs], 2.0)
    sender.publish(BASE, 1.0)
    assert receiver.take(BASE) == [1.0]
    assert receiver.take(OTHERS[differs]) == [2.0]


keys = st.builds(
    lambda step, name, layer, status, occurrence: key(name, step, occurrence, status, layer=layer),
    *(st.integers(0, 2), st.sampled_from("qk"), st.sampled_from([None, 0, 1, "0"])),
    *(st.sampled_from(["original", "recompute"]), st.integers(0, 2)),
)


@examples(25)
@given(st.lists(keys, unique=True, min_size=1, max_size=12), st.randoms(use_true_random=False))
def test_tensors_find_their_taps_in_any_order_of_the_two_sides(
    a_world: MakeWorld, sent: list[TapKey], random: Any
) -> None:
    asked = random.sample(sent, len(sent))
    with a_world(1, 1) as world:
        world.begin()
        for number, each in enumerate(sent):
            world.baseline.publish(each, float(number))
        assert [world.target.take(each) for each in asked] == [[float(sent.index(each))] for each in asked]


VALUES = [None, True, 0, -1, 2**63, 2**64, -(10**5000), 0.5, 1e300, float("inf"), "", "text", "\u20ac", "\ud800", "7"]


@pytest.mark.parametrize("name", ["x", "\u20ac", "half a surrogate pair: \ud800"], ids=ascii)
def test_any_name_and_plain_tag_value_pairs_and_is_distinguished(name: str, world: World) -> None:
    sent = [key(name, tag=value) for value in VALUES] + [key(name, **{f"tag {name}": 7})]
    for number, each in enumerate(sent):
        world.baseline.publish(each, float(number))
        world.target.exchange.decline(each)
    assert [world.target.take(each) for each in reversed(sent)] == [[float(n)] for n in reversed(range(len(sent)))]
    assert world.baseline.receive(sent[0]).absent == {0: "target[0] did not send this tap"}


def test_both_directions_at_once_do_not_mix(world: World) -> None:
    world.baseline.publish(key("x"), 1.0)
    world.target.publish(key("x"), 2.0)
    assert world.target.take(key("x")) == [1.0]
    assert world.baseline.take(key("x")) == [2.0]


def test_a_received_tensor_does_not_change_while_the_sender_continues(world: World) -> None:
    sender, receiver = world.baseline, world.target
    value = torch.arange(1000.0)
    sender.publish(key("held"), value)
    receipt = receiver.receive(key("held"))
    value.zero_()
    for number in range(600):
        sender.publish(key("later", occurrence=number), torch.full((1000,), -1.0))
        receiver.take(key("later", occurrence=number))
    assert torch.equal(receipt.contributions[0].tensor, torch.arange(1000.0))
    receipt.release()
    assert receipt.contributions == []


def test_tensors_left_over_from_a_run_do_not_reach_the_next(world: World) -> None:
    world.baseline.publish(key("x", step=0), 1.0)
    world.end(step=0)
    world.begin(run=1, first_step=1)
    world.baseline.publish(key("x", step=1), 2.0)
    assert world.target.take(key("x", step=1)) == [2.0]


# ---- promise 2: a sender does not wait while its budget lasts -------------------------------------------------------


def test_a_sender_does_not_wait_while_the_budget_lasts(a_world: MakeWorld) -> None:
    with a_world(1, 1, budget=8 * MIB) as world:
        sender = world.begin().baseline
        for number in range(8):
            sender.publish(key(occurrence=number), A_MIB)
        assert sender.waits_so_far == 0
        assert sender.bytes_in_use() == 8 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("empty", [True, False])
def test_thousands_of_small_tensors_do_not_make_a_sender_wait(empty: bool, world: World) -> None:
    # More frames than a socket buffers, and no receiver reads.
    for number in range(3000):
        world.baseline.publish(key(occurrence=number), torch.empty(0) if empty else torch.tensor(number))
    assert world.baseline.waits_so_far == 0
    assert world.target.take(key(occurrence=2999)) == ([[]] if empty else [2999])


def receives(world: World) -> None:
    world.target.take(key(occurrence=0))


def ends_the_step(world: World) -> None:
    world.target.exchange.end_step(0)


def ends_the_run(world: World) -> None:
    world.target.exchange.end_run()


def dies(world: World) -> None:
    world.target.die()


@pytest.mark.parametrize("receiver", [receives, ends_the_step, ends_the_run, dies])
def test_a_sender_beyond_its_budget_waits_until_the_receiver_makes_room(
    a_world: MakeWorld, receiver: Callable[[World], None]
) -> None:
    with a_world(1, 1, budget=2 * MIB) as world:
        sender = world.begin().baseline
        sender.publish(key(occurrence=0), A_MIB)
        sender.publish(key(occurrence=1), A_MIB)
        publishing = in_background(lambda: sender.publish(key(occurrence=2), A_MIB))
        sender.until_it_waits()
        assert not publishing.done()
        receiver(world)
        publishing.result(DEADLINE)
        if receiver is receives:
            assert len(world.target.take(key(occurrence=2))[0]) == MIB


def test_a_sender_waits_for_the_slowest_of_its_receivers(a_world: MakeWorld) -> None:
    with a_world(1, 2, budget=MIB) as world:
        sender, fast, slow = world.begin().mailboxes
        sender.publish(key(occurrence=0), A_MIB)
        fast.take(key(occurrence=0))
        fast.exchange.end_step(0)
        sender.exchange.timeout = 0.05
        with pytest.raises(BufferFullError):
            sender.publish(key(occurrence=1), A_MIB)
        sender.exchange.timeout = DEADLINE
        publishing = in_background(lambda: sender.publish(key(occurrence=1), A_MIB))
        sender.until_it_waits()
        slow.take(key(occurrence=0))
        publishing.result(DEADLINE)


def test_memory_that_is_released_is_used_again(a_world: MakeWorld) -> None:
    with a_world(1, 1, budget=2 * MIB) as world:
        world.begin()
        offsets = set()
        for number in range(50):
            world.baseline.publish(key(occurrence=number), A_MIB)
            receipt = world.target.receive(key(occurrence=number))
            offsets.add(receipt.contributions[0].tensor.data_ptr())
            receipt.release()
            world.deliver()
        assert world.baseline.waits_so_far == 0
        assert world.baseline.bytes_in_use() <= 2 * MIB
        # Where bytes come over a network, it is the receiver's own memory that they come to.
        assert len(offsets) <= 2 or not world.shares_memory


@pytest.mark.slow
def test_many_small_tensors_are_released_before_the_step_ends(world: World) -> None:
    sender, receiver = world.baseline, world.target
    most = 0
    for number in range(4000):
        sender.publish(key(occurrence=number), torch.zeros(256))
        receiver.take(key(occurrence=number))
        most = max(most, sender.bytes_in_use())
    # The sender hears of it although it never waits.
    assert sender.waits_so_far == 0
    assert most < MIB


def test_a_receiver_releases_its_tensors_before_it_waits(a_world: MakeWorld) -> None:
    with a_world(1, 1, budget=16 * MIB) as world:
        sender, receiver = world.begin().mailboxes
        for number in range(16):
            sender.publish(key(occurrence=number), A_MIB)
        receiver.take(key(occurrence=0))  # too little to tell the sender at once
        publishing = in_background(lambda: sender.publish(key("last"), A_MIB))
        sender.until_it_waits()
        assert len(receiver.take(key("last"))[0]) == MIB
        publishing.result(DEADLINE)
        assert sender.bytes_in_use() == 16 * MIB


def test_a_tensor_larger_than_the_budget_is_sent_when_the_buffer_is_empty(a_world: MakeWorld) -> None:
    with a_world(1, 1, budget=MIB) as world:
        sender, receiver = world.begin().mailboxes
        large = torch.arange(3 * MIB // 8)
        sender.publish(key("large"), large)
        publishing = in_background(lambda: sender.publish(key("small"), 1.0))
        sender.until_it_waits()
        receipt = receiver.receive(key("large"))
        assert torch.equal(receipt.contributions[0].tensor, large)
        receipt.release()
        publishing.result(DEADLINE)


def test_the_error_of_a_full_buffer_names_where_the_peers_are(a_world: MakeWorld) -> None:
    with a_world(1, 2, budget=2 * MIB, timeout=0.1) as world:
        sender, one, other = world.begin().mailboxes
        one.step = other.step = 7
        one.tap = "mlp"
        for mailbox in (one, other):
            mailbox.note("running")
        for where in ("target[0]: computing for", "target[1]: computing for"):
            wait_until(lambda where=where: knows_where(sender, where), "the word of where they are")  # type: ignore[misc]
        sender.publish(key("first"), torch.zeros(2 * MIB, dtype=torch.uint8))
        with pytest.raises(BufferFullError) as raised:
            sender.publish(key("second", step=3), A_MIB)
        message = str(raised.value)
        assert "baseline[0] could not publish tap 'second' of step 3: its buffer of 2 MiB stayed full" in message
        assert "target[0]: computing for" in message
        assert "last seen at tap 'mlp' of step 7" in message
        assert "target[1]: computing for" in message
        # It was not published, and what is said instead frees the receiver.
        sender.exchange.decline(key("second", step=3))
        world.deliver()
        assert one.receive(key("second", step=3)).absent == {0: "baseline[0] did not send this tap"}


def test_a_wait_for_a_later_tap_exceeds_the_senders_budget(
    a_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    with a_world(1, 1, budget=2 * MIB) as world, caplog.at_level(logging.WARNING):
        sender, receiver = world.begin().mailboxes
        taking = in_background(lambda: receiver.take(key("last")))
        receiver.until_it_waits()
        for number in range(4):
            sender.publish(key("not yet requested", occurrence=number), A_MIB)
        sender.publish(key("last"), 5.0)
        assert taking.result(DEADLINE) == [5.0]
        # Over the budget, and said so once.
        assert sender.bytes_in_use() > 4 * MIB
        assert [record.levelname for record in caplog.records if "buffer budget" in record.message] == ["WARNING"]
        assert "exceeds its buffer budget of 2 MiB" in caplog.text


def test_two_sides_without_room_do_not_wait_for_each_other(a_world: MakeWorld) -> None:
    with a_world(1, 1, budget=MIB) as world:
        world.begin()

        def fill_then_read(mine: Any, my_name: str, their_name: str) -> list[Any]:
            for number in range(3):
                mine.publish(key(my_name, occurrence=number), A_MIB)
            return [len(mine.take(key(their_name, occurrence=number))[0]) for number in range(3)]

        one = in_background(lambda: fill_then_read(world.baseline, "down", "up"))
        other = in_background(lambda: fill_then_read(world.target, "up", "down"))
        assert one.result(DEADLINE) == other.result(DEADLINE) == [MIB] * 3


# ---- promise 4: bit-exact -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_arrives_bit_exact_in_every_layout(dtype: torch.dtype, world: World) -> None:
    for name, tensor in layouts(dtype).items():
        world.baseline.publish(key(name), tensor)
    for name, tensor in layouts(dtype).items():
        receipt = world.target.receive(key(name))
        (arrived,) = (contribution.tensor for contribution in receipt.contributions)
        assert (arrived.shape, arrived.dtype) == (tensor.shape, dtype), name
        assert arrived.is_contiguous()
        assert torch.equal(bits(arrived), bits(tensor)), name
        receipt.release()


@pytest.mark.parametrize("dtype", [torch.complex32, torch.complex64, torch.complex128], ids=str)
def test_conjugated_and_negated_views_arrive_with_their_values(dtype: torch.dtype, world: World) -> None:
    value = torch.arange(24.0).to(dtype).view(4, 6) * (1 - 2j)
    views = {"conj": value.conj(), "neg": value.conj().imag, "both": value.t().conj()[1:]}
    # One element of it is contiguous, and still to be negated.
    views["one"] = views["neg"][1, 1:2]
    assert views["one"].is_contiguous()
    assert views["conj"].is_conj()
    assert views["neg"].is_neg()
    for name, view in views.items():
        world.baseline.publish(key(name), view)
        receipt = world.target.receive(key(name))
        arrived = receipt.contributions[0].tensor
        assert not arrived.is_conj()
        assert not arrived.is_neg()
        expected = torch.empty_like(arrived).copy_(view)
        assert torch.equal(bits(arrived), bits(expected)), name


@examples(30)
@given(st.lists(st.integers(0, 5), max_size=5), st.data())
def test_any_strided_view_arrives_exactly(a_world: MakeWorld, shape: list[int], data: st.DataObject) -> None:
    whole = torch.arange(torch.Size(shape).numel(), dtype=torch.int32).view(shape)
    view = whole.permute(data.draw(st.permutations(range(len(shape)))))
    for dim in range(view.dim()):
        start = data.draw(st.integers(0, view.shape[dim]))
        view = view[(slice(None),) * dim + (slice(start, None, data.draw(st.integers(1, 3))),)]
    with a_world(1, 1) as world:
        world.begin()
        world.baseline.publish(key(), view)
        receipt = world.target.receive(key())
        assert torch.equal(receipt.contributions[0].tensor, view)
        receipt.release()


# ---- promise 5: one contribution a sender, in rank order ------------------------------------------------------------


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)], ids=str)
def test_contributions_are_in_rank_order_in_any_order_of_publication(
    a_world: MakeWorld, order: tuple[int, ...]
) -> None:
    with a_world(3, 2) as world:
        senders = world.begin().side("baseline")
        for rank in order:
            senders[rank].publish(key(), 10.0 + rank, extras=rank)
        for receiver in world.side("target"):
            receipt = receiver.receive(key())
            assert [(c.rank, c.tensor.item(), c.extras) for c in receipt.contributions] == [
                (0, 10.0, 0),
                (1, 11.0, 1),
                (2, 12.0, 2),
            ]
            assert receipt.absent == {}


def test_a_sender_without_a_contribution_is_left_out_and_named(a_world: MakeWorld) -> None:
    with a_world(3, 1) as world:
        senders = world.begin().side("baseline")
        senders[2].publish(key(), 2.0)
        senders[1].exchange.decline(key())
        senders[0].publish(key(), 0.0)
        receipt = world.target.receive(key())
        assert [contribution.rank for contribution in receipt.contributions] == [0, 2]
        assert receipt.absent == {1: "baseline[1] did not send this tap"}


def test_a_receiver_waits_for_all_senders_not_only_for_the_first(a_world: MakeWorld) -> None:
    with a_world(2, 1) as world:
        first, second, receiver = world.begin().mailboxes
        first.publish(key(), 1.0)
        receiving = in_background(lambda: receiver.take(key()))
        receiver.until_it_waits()
        assert not receiving.done()
        second.publish(key(), 2.0)
        assert receiving.result(DEADLINE) == [1.0, 2.0]


# ---- extras ---------------------------------------------------------------------------------------------------------


def test_extras_arrive_with_their_tensor_and_are_none_without(world: World) -> None:
    extras = {"fill": 1.0, "mask": torch.tensor([True, False]), "names": ("a", None)}
    world.baseline.publish(key("with"), 1.0, extras=extras)
    world.baseline.publish(key("without"), 2.0)
    arrived = world.target.receive(key("with")).contributions[0].extras
    assert isinstance(arrived, dict)
    assert arrived["mask"].tolist() == [True, False]
    assert (arrived["fill"], arrived["names"]) == (1.0, ("a", None))
    assert world.target.receive(key("without")).contributions[0].extras is None


def test_each_receiver_gets_its_own_extras(a_world: MakeWorld) -> None:
    with a_world(1, 2) as world:
        world.begin().baseline.publish(key(), 1.0, extras=[0])
        one, other = (mailbox.receive(key()).contributions[0].extras for mailbox in world.side("target"))
        assert isinstance(one, list)
        one.append(1)
        assert other == [0]


def test_unpicklable_extras_name_their_tap_and_leave_the_buffer_empty(world: World) -> None:
    with pytest.raises(ShippingError, match=r"gl.tap\('q'\) on baseline\[0\]: the extras cannot be pickled"):
        world.baseline.publish(key("q"), 1.0, extras=threading.Lock())
    assert world.baseline.bytes_in_use() == 0
    world.baseline.publish(key("k"), 2.0)
    assert world.target.take(key("k")) == [2.0]


class Unloadable:
    """Pickles well, and cannot be loaded."""

    def __reduce__(self) -> Any:
        return int, ("not a number",)


def test_extras_that_cannot_be_loaded_are_named_and_freed(world: World) -> None:
    world.baseline.publish(key(), 1.0, extras=Unloadable())
    receipt = world.target.receive(key())
    assert "the extras of baseline[0] cannot be loaded here: ValueError: invalid literal" in receipt.unreadable[0]
    receipt.release()
    world.end(step=0)
    assert world.baseline.bytes_in_use() == 0
