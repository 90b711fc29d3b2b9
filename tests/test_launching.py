"""What a launch does to the process that calls it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from graftlab import launching


@pytest.mark.parametrize(
    ("is_on", "frozen", "calls"),
    [
        (True, 0, ["disable", "freeze", "unfreeze", "enable"]),
        (True, 5, ["disable", "enable"]),
        (False, 0, ["disable"]),
        (False, 5, ["disable"]),
    ],
)
def test_a_launch_leaves_the_garbage_collector_as_it_was(
    is_on: bool, frozen: int, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    collector = SimpleNamespace(isenabled=lambda: is_on, get_freeze_count=lambda: frozen)
    for name in ("disable", "enable", "freeze", "unfreeze"):
        setattr(collector, name, lambda name=name: made.append(name))
    monkeypatch.setattr(launching, "gc", collector)
    with launching._without_collector():
        assert made == ["disable"]
    assert made == calls
