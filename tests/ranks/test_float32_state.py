"""State of 16 bits is known in float32 only as calls that were noted have left it."""

from __future__ import annotations

import pytest
import torch

from graftlab.ranks import float32_state
from graftlab.ranks.float32_state import Float32State
from graftlab.ranks.held_call import HeldCall, WatchChoice

WIDE = torch.linspace(0.1, 1, 12).reshape(3, 4)
OWN = WIDE.bfloat16()


def confirmed(own: torch.Tensor = OWN) -> Float32State:
    state = Float32State()
    state.see("Net", {})
    state.note({"cache": WIDE, "still narrow": OWN})
    state.confirm({"cache": own, "still narrow": OWN})
    return state


def test_state_is_known_as_a_call_has_left_it() -> None:
    state = confirmed()
    (found,) = state.values({"cache": OWN.clone(), "still narrow": OWN, "other": OWN}).values()
    assert torch.equal(found, WIDE)
    # The call that reads it may write to it.
    found.zero_()
    assert torch.equal(state.values({"cache": OWN})["cache"], WIDE)
    # A rejected token is cut off.
    assert torch.equal(state.values({"cache": OWN[:2]})["cache"], WIDE[:2])
    assert state.known("Net", {"cache": OWN}).in_float32 == {"cache"}


@pytest.mark.parametrize(
    "written", [OWN + 1, OWN[1:], OWN.float(), OWN.flatten(), torch.cat([OWN, OWN[:1]]), OWN.flip(0)]
)
def test_what_anything_else_has_written_is_not_known(written: torch.Tensor) -> None:
    assert confirmed().values({"cache": written}) == {}


def test_a_call_that_the_script_has_not_made_leaves_nothing() -> None:
    state = Float32State()
    state.note({"cache": WIDE})
    assert state.values({"cache": OWN}) == {}
    # The script's own call has left less than the one in float32.
    assert confirmed(OWN[:2]).values({"cache": OWN[:2]}) == {}
    state = confirmed()
    state.confirm({"cache": OWN + 1})
    assert state.values({"cache": OWN + 1}) == {}


def test_caches_that_a_script_gives_to_its_calls_in_turn_are_known() -> None:
    state = confirmed()
    state.note({"cache": WIDE + 1})
    state.confirm({"cache": OWN + 1})
    assert torch.equal(state.values({"cache": OWN})["cache"], WIDE)
    assert torch.equal(state.values({"cache": OWN + 1})["cache"], WIDE + 1)


def test_the_newest_of_equal_states_is_known_and_each_models_first() -> None:
    state = confirmed()
    # The script writes the same values in 16 bits to the cache again.
    state.note({"cache": WIDE + 1e-4})
    state.confirm({"cache": OWN})
    assert torch.equal(state.values({"cache": OWN})["cache"], WIDE + 1e-4)
    state.see("Other", {"cache": OWN + 1})
    state.see("Net", {"cache": OWN + 2})
    state.see("Third", {"cache": OWN + 3})
    for model, own, is_first in (("Other", OWN + 1, True), ("Third", OWN + 3, True), ("Net", OWN + 2, False)):
        assert state.known(model, {"cache": own}).unchanged == (frozenset({"cache"}) if is_first else frozenset())


def test_state_of_models_that_no_call_has_changed_is_known_by_model() -> None:
    state = Float32State()
    state.see("Net", {".table": OWN})
    state.see("Net", {".table": OWN + 1})
    assert state.known("Net", {".table": OWN, "cache": OWN}).unchanged == {".table"}
    assert state.known("Net", {".table": OWN + 1}).unchanged == frozenset()
    assert state.known("Other", {".table": OWN}).unchanged == frozenset()


def test_calls_that_are_bit_equal_from_the_first_on_leave_their_own_values() -> None:
    state = Float32State()
    for equal, known in ((True, True), (True, True), (False, False), (True, False)):
        state.see("Net", {})
        if equal:
            state.note_equal()
        left = torch.randn(3).bfloat16()
        state.confirm({"cache": left})
        assert ("cache" in state.values({"cache": left})) is known


def test_state_that_is_too_large_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(float32_state, "_MOST", WIDE.nbytes - 1)
    state = confirmed()
    state.see("Large", {".table": WIDE})
    assert state.values({"cache": OWN}) == {}
    assert state.known("Large", {".table": WIDE}).unchanged == frozenset()


def test_a_later_call_in_float32_reads_what_the_earlier_one_has_left() -> None:
    state, cache, weight = Float32State(), torch.zeros(4).bfloat16(), torch.full((4,), 1.01).bfloat16()

    def call() -> torch.Tensor:
        cache.add_(weight * weight)
        return cache.clone()

    for number in (1, 2):
        held = HeldCall(call, {}, {"cache": cache, "weight": weight}, WatchChoice(), name="Net", float32=state)
        known = held.known_state()
        # The cache is empty before the first call, and the weight is never written.
        assert known.unchanged == ({"cache", "weight"} if number == 1 else {"weight"})
        assert known.in_float32 == (frozenset() if number == 1 else {"cache", "weight"})
        assert held.widen({}, {}, kept={"cache"}) is None
        expected = number * weight.float() ** 2
        assert torch.equal(held()[""], expected)
        held.end()
        call()
        held.confirm_state()
    assert not torch.equal(cache.float(), expected)


def test_a_look_at_numbers_that_were_moved_shows_no_state() -> None:
    state, cache = Float32State(), torch.full((4,), 1.01).bfloat16()

    def call() -> torch.Tensor:
        cache.mul_(cache)
        return cache.clone()

    held = HeldCall(call, {}, {"cache": cache}, WatchChoice(), name="Net", float32=state)
    assert held.widen({}, {}, rounded_otherwise=["cache"]) is None
    held.end()
    call()
    held.confirm_state()
    held = HeldCall(call, {}, {"cache": cache}, WatchChoice(), name="Net", float32=state)
    assert held.known_state().in_float32 == frozenset()


def test_an_empty_cache_that_a_script_makes_anew_for_each_call_is_as_before_any() -> None:
    state = Float32State()
    for value, same in ((0.0, True), (0.0, True), (1.0, False)):
        cache = torch.full((4,), value).bfloat16()
        held = HeldCall(cache.clone, {}, {"cache": cache}, WatchChoice(), name="Net", float32=state)
        assert held.known_state().unchanged == ({"cache"} if same else set())
    # A cache that appears later may have been written by an earlier call.
    held = HeldCall(cache.clone, {}, {"late": cache}, WatchChoice(), name="Net", float32=state)
    assert held.known_state().unchanged == frozenset()


def test_what_the_first_call_of_another_model_is_given_may_have_been_written_before() -> None:
    state, cache = Float32State(), torch.zeros(4).bfloat16()
    for name, unchanged in (("Encoder", {"cache"}), ("Decoder", set())):
        held = HeldCall(cache.clone, {}, {"cache": cache}, WatchChoice(), name=name, float32=state)
        assert held.known_state().unchanged == unchanged
