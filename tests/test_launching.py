"""What a launch does to the process that calls it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from graftlab import launching


@pytest.mark.parametrize(
    ("is_on", "frozen", "imports", "calls"),
    [
        (True, 0, True, ["disable", "counted", "freeze", "unfreeze", "enable"]),
        (True, 5, True, ["disable", "counted", "enable"]),
        # Nothing new to hide, and to count what is frozen takes long.
        (True, 0, False, ["disable", "enable"]),
        (False, 0, True, ["disable"]),
        (False, 5, True, ["disable"]),
    ],
)
def test_a_launch_leaves_the_garbage_collector_as_it_was(
    is_on: bool, frozen: int, imports: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    collector = SimpleNamespace(isenabled=lambda: is_on, get_freeze_count=lambda: made.append("counted") or frozen)
    for name in ("disable", "enable", "freeze", "unfreeze"):
        setattr(collector, name, lambda name=name: made.append(name))
    monkeypatch.setattr(launching, "gc", collector)
    with launching._without_collector():
        assert made == ["disable"]
        if imports:
            monkeypatch.setitem(sys.modules, "imported_meanwhile", ModuleType("imported_meanwhile"))
    assert made == calls
