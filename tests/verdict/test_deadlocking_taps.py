"""In a swap no side waits at a tap that the other reaches only after one that it waits at itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graftlab.verdict.causes import Order, deadlocking_on_ranks, deadlocking_taps

NAMES = "abcdefg"


def order(names: str) -> Order:
    return {(name, None): place for place, name in enumerate(names)}


def test_taps_that_both_sides_reach_in_one_order_are_swapped() -> None:
    assert deadlocking_taps({("b", None)}, order("abc"), order("abc")) == set()


def test_taps_in_opposite_order_are_left_out_of_the_swap() -> None:
    assert deadlocking_taps({("b", None)}, order("abc"), order("bca")) == {("a", None)}
    # The other way about no side waits: the baseline has sent it before it waits itself.
    assert deadlocking_taps({("b", None)}, order("bca"), order("abc")) == set()


def test_a_one_sided_tap_blocks_no_swap() -> None:
    assert deadlocking_taps({("b", None)}, order("ab"), order("b")) == set()
    assert deadlocking_taps({("b", None)}, order("ab"), order("a")) == set()
    assert deadlocking_taps({("b", None)}, order("a"), order("ab")) == set()


def test_a_tap_that_one_rank_lacks_is_left_out_before_one_that_waits() -> None:
    assert deadlocking_on_ranks({("b", None)}, [order("abc")], [order("abc"), order("bc")]) == {("a", None)}
    # The rank that lacks the tap may wait in a collective for the other, which waits for the baseline.
    assert deadlocking_on_ranks({("b", None)}, [order("abc")], [order("abc"), order("c")]) == {("a", None)}
    assert deadlocking_on_ranks({("b", None)}, [order("abc")], [order("abc"), order("ab")]) == set()
    # The target waits at b until the baseline's second rank ends, and that rank at c for the target.
    assert deadlocking_on_ranks({("b", None)}, [order("abc"), order("ac")], [order("abc")]) == {("c", None)}


@given(st.permutations(NAMES), st.permutations(NAMES), st.sets(st.sampled_from(NAMES)))
def test_both_sides_finish_if_these_taps_are_left_out(baseline: list[str], target: list[str], taken: set[str]) -> None:
    chosen = {(name, None) for name in taken}
    alone = deadlocking_taps(chosen, order("".join(baseline)), order("".join(target)))
    sides = [list(baseline), list(target)]
    reached: list[set[str]] = [set(), set()]
    moved = True
    while moved:
        moved = False
        for side in (0, 1):
            while sides[side]:
                name = sides[side][0]
                receives = (name, None) not in alone and ((name in taken) == (side == 1))
                if receives and name not in reached[1 - side]:
                    break
                reached[side].add(sides[side].pop(0))
                moved = True
    assert sides == [[], []]
