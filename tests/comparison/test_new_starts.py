"""What a new start of both scripts does before a run, with a session that only notes what it is asked."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import graftlab as gl
from graftlab.comparison import started_scripts
from graftlab.comparison.started_scripts import StartedScripts
from graftlab.errors import RunError
from graftlab.judging.verdict_runs import VerdictAbandoned
from graftlab.ranks.held_call import ScriptEnd, held_unit


class Noted:
    """A session whose ranks hold each unit that they are sent to, or what ``holds`` has for one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, holds: dict[tuple[str, int], object] | None = None) -> None:
        self.done: list[object] = []
        self._holds = holds or {}
        self._at: tuple[object, object] = ("", "")
        for name in ("replace_ranks", "take_baseline_weights", "take_equal_inputs"):
            monkeypatch.setattr(started_scripts, name, lambda *_, name=name: self.done.append(name))

    def run(self, baseline: Any, target: Any, args: tuple[object, ...] = ()) -> SimpleNamespace:
        if baseline is held_unit:
            ours, theirs = ([self._holds.get(each, each)] for each in self._at)  # type: ignore[call-overload]
            return SimpleNamespace(baseline=ours, target=theirs)
        if isinstance(baseline, partial):
            self._at = baseline.args, target.args
            self.done.append(self._at)
        else:
            self.done.append((baseline.__name__, *args))
        return SimpleNamespace()


def started(session: Any, *, training: bool = False) -> StartedScripts:
    return StartedScripts(session, lambda: [], training=training)


def test_a_new_start_takes_the_same_values_at_the_same_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    scripts = started(noted, training=True)
    scripts.keep({"baseline": ("update", 1), "target": ("update", 2)})
    scripts._units = {"baseline": ("update", 3), "target": ("update", 4)}
    scripts._reach()
    begins: list[object] = [
        "replace_ranks",
        "take_baseline_weights",
        (("update", 1), ("update", 2)),
        "take_equal_inputs",
        ("keep_inputs",),
        (("update", 3), ("update", 4)),
        ("prepare_once", False),
    ]
    assert noted.done == [*begins, "take_equal_inputs"]
    noted.done.clear()
    scripts._reach(takes_inputs=False)
    assert noted.done == begins
    assert scripts.starts == 2


def test_a_call_is_reached_without_values_of_the_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    scripts = started(noted)
    scripts._units, scripts._backward = {"baseline": ("call", 3), "target": ("call", 3)}, True
    scripts._reach()
    assert noted.done == ["replace_ranks", (("call", 3), ("call", 3)), ("prepare_once", True)]


@pytest.mark.parametrize(
    ("holds", "said"),
    [
        (("call", 2), "the target was started again and waits before call 3"),
        (("update", 3), "the target was started again and waits before call 3"),
        (ScriptEnd("ValueError: x"), r"the target was started again and ended \(ValueError: x\) before call 3"),
        (ScriptEnd(None), "the target was started again and ended before call 3"),
    ],
)
def test_a_side_that_does_not_reach_the_same_call_again_is_named(
    holds: object, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripts = started(Noted(monkeypatch, {("call", 3): holds}))
    scripts._units = {"baseline": ("call", 1), "target": ("call", 3)}
    with pytest.raises(gl.SessionError, match=said):
        scripts._reach()


def test_scripts_are_not_started_without_end(monkeypatch: pytest.MonkeyPatch) -> None:
    noted = Noted(monkeypatch)
    scripts = started(noted)
    scripts.starts = started_scripts.MOST_STARTS
    with pytest.raises(VerdictAbandoned, match="started 100 times, which is the limit"):
        scripts._reach()
    assert noted.done == []


@pytest.mark.parametrize("backward", [True, False])
def test_a_backward_pass_that_fails_is_left_out_of_later_starts(
    backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    reached: list[bool] = []

    class Failing:
        folder = Path(".")
        options = SimpleNamespace(keep_budget=0)

        def run(self, *recorders: Any) -> SimpleNamespace:
            if reached == [backward]:
                raise RunError("RuntimeError: no gradient\nTraceback")
            return SimpleNamespace(baseline=[], target=[])

    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: None)
    scripts = started(Failing())
    monkeypatch.setattr(scripts, "_reach", lambda: reached.append(scripts._backward))
    scripts._backward = backward
    if not backward:
        with pytest.raises(RunError):
            scripts._record("call 1")
        return
    assert scripts._record("call 1") is None
    # The failed start is not recorded: another one takes its place, before the repetition.
    assert reached == [True, False, False]
    assert scripts.add_backward() == "RuntimeError: no gradient"
