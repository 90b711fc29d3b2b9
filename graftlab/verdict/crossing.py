"""Taps at which a swap would have each side wait for the other."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

Tap = tuple[str, str | None]
"""A tap's name and kind, as filters see them."""

Order = dict[Tap, int]
"""When a side first reaches each tap."""


def crossing(taken: Iterable[Tap], baseline: Mapping[Tap, int], target: Mapping[Tap, int]) -> set[Tap]:
    """What must be left alone in a swap that takes these taps from the baseline and all others from the target.

    Each side receives at the taps where the other's code counts. Where the baseline reaches one such tap before a
    taken one, and the target the taken one first, both would wait. Neither depends on the other then, since each comes
    first somewhere; so what is left alone is computed by both from the same state.
    """
    places = [(baseline[tap], target[tap]) for tap in set(taken) if tap in baseline and tap in target]
    return {
        tap
        for tap, place in baseline.items()
        if tap in target and any(place < ours and theirs < target[tap] for ours, theirs in places)
    } - set(taken)
