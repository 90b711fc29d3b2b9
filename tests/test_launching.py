"""What a launch does to the process that calls it."""

from __future__ import annotations

import inspect
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

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


@pytest.mark.parametrize(("given", "warms"), [({}, True), ({"start_method": "spawn"}, False), ({"on": "ray"}, False)])
def test_only_ranks_of_the_forkserver_here_have_it_ready(
    given: dict[str, Any], warms: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    opening = SimpleNamespace(open_launched=lambda *_, **__: made.append("opened"))
    monkeypatch.setattr(launching, "import_module", lambda name: opening)
    monkeypatch.setattr(launching.forkserver, "warm_up", lambda: made.append("warm"))
    launching.launch(**given)
    assert made == [*(["warm"] if warms else []), "opened"]


def test_a_launch_passes_on_each_of_its_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    named = dict(inspect.signature(launching.launch).parameters)
    given = {name: f"the {name}" for name in named}
    passed: list[Any] = []

    def open_launched(baseline: Any, target: Any, plan: Any, folder: Any, append: Any, **options: Any) -> None:
        passed.append({"baseline": baseline, "target": target, "plan": plan, "folder": folder, "append": append})
        passed[-1] |= options

    monkeypatch.setattr(launching, "import_module", lambda name: SimpleNamespace(open_launched=open_launched))
    monkeypatch.setattr(launching.forkserver, "warm_up", lambda: None)
    launching.launch(**given)  # type: ignore[arg-type]
    launching.launch()
    assert passed == [given, {name: each.default for name, each in named.items()}]
