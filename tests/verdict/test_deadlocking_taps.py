"""In a swap no side waits at a tap that the other reaches only after one that it waits at itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graftlab.verdict.causes import Order, deadlocking_taps

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
