"""In a swap no side waits at a tap that the other reaches only after one that it waits at itself."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from graftlab.verdict.causes import Order, deadlocking_taps

NAMES = "abcdefg"


def order(names: str) -> Order:
    return {(name, None): place for place, name in enumerate(names)}


def test_what_both_reach_in_one_order_is_swapped() -> None:
    assert deadlocking_taps({("b", None)}, order("abc"), order("abc")) == set()


def test_what_comes_before_on_the_baseline_and_after_on_the_target_is_left_alone() -> None:
    assert deadlocking_taps({("b", None)}, order("abc"), order("bca")) == {("a", None)}
    # The other way about nobody waits: the baseline has sent it before it waits itself.
    assert deadlocking_taps({("b", None)}, order("bca"), order("abc")) == set()


def test_a_tap_of_one_side_alone_holds_up_nobody() -> None:
    assert deadlocking_taps({("b", None)}, order("ab"), order("b")) == set()


@given(st.permutations(NAMES), st.permutations(NAMES), st.sets(st.sampled_from(NAMES)))
def test_with_what_is_left_alone_both_sides_come_to_their_end(
    baseline: list[str], target: list[str], taken: set[str]
) -> None:
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
