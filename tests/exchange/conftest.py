"""The worlds that the tests of the contract run in, once for every exchange."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.implementations import PROCESSES, WORLDS, MakeProcesses, MakeWorld
from kit.mailboxes import World

# What takes most over the wires, in tests that pass each tensor by the same few steps; `make soak` runs these.
LONG_OVER_WIRES = frozenset(
    {
        "test_any_strided_view_arrives_exactly",
        "test_an_interrupt_at_any_moment_leaves_an_exchange_that_goes_on",
        "test_children_that_outlive_a_killed_rank_keep_nobody_waiting",
        "test_every_dtype_crosses_from_process_to_process_bit_exact",
        "test_killed_ranks_leave_nothing_behind",
        "test_many_small_tensors_are_released_before_the_step_ends",
        "test_small_tensors_beyond_number_do_not_make_a_sender_wait",
        "test_tensors_find_their_taps_in_whatever_order_the_sides_reach_them",
        "test_the_others_go_on_when_one_of_several_is_killed",
        "test_what_a_receiver_holds_does_not_change_while_the_sender_goes_on",
        "test_whatever_the_order_of_events_a_receiver_gets_what_was_sent_and_all_memory_comes_back",
    }
)
LONG_OF_PARAMETERS = ("wires-exit", "wires-exception", "wires-11")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if isinstance(item, pytest.Function) and "[wires" in item.name:
            parameters = item.name.partition("[")[2].rstrip("]")
            if item.originalname in LONG_OVER_WIRES or parameters in LONG_OF_PARAMETERS:
                item.add_marker("soak")


# Of module scope, so that tests with many examples may use them.
@pytest.fixture(scope="module", params=WORLDS)
def a_world(request: pytest.FixtureRequest) -> MakeWorld:
    make: MakeWorld = request.param
    return make


@pytest.fixture(scope="module", params=PROCESSES)
def processes(request: pytest.FixtureRequest) -> MakeProcesses:
    make: MakeProcesses = request.param
    return make


@pytest.fixture
def world(a_world: MakeWorld) -> Iterator[World]:
    with a_world(1, 1) as made:
        yield made.begin()
