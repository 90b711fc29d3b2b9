"""Each method of a session passes all of its arguments on to what does the work, and its own defaults."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from kit.refusals import exactly

from graftlab import session as sessions
from graftlab.errors import LaunchError, PlanError, SessionError
from graftlab.judging.verdict_request import VerdictRequest
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.options import LaunchOptions
from graftlab.recordings.recorded_side import RecordedSide
from graftlab.session import Session

METHODS = {
    "replay": "graftlab.control.replay:replay",
    "verdict": "graftlab.judging.judge:judge",
    "lines": "graftlab.judging.tap_lines:lines_of_tap",
    "match": "graftlab.judging.match_runs:match",
    "compare_compiled": "graftlab.judging.compiled_comparison:compare_compiled",
    "check": "graftlab.judging.replica_check:check",
    "report": "graftlab.control.report:write_report",
}
# A request is refused for other values than such.
VALUES: dict[str, Any] = {
    "output": "out",
    "floor": 0.25,
    "threshold": 3.5,
    "explain": False,
    "args": (1,),
    "kwargs": {"x": 2},
    "steps": 4,
    "graft_weights": True,
}


class Fake(SimpleNamespace):
    """A session whose methods are called with what they find in it."""

    def __init__(self) -> None:
        super().__init__(verdicts=["the first", "the newest"], required=[])

    def _require_workers(self, what: str) -> None:
        self.required.append(what)


def passed_on(monkeypatch: pytest.MonkeyPatch, method: str, session: Fake, given: dict[str, Any]) -> dict[str, Any]:
    """What arrives where the work is done, by the names that it has there; the fields of a request are among it."""
    module, _, name = METHODS[method].partition(":")
    signature = inspect.signature(getattr(importlib.import_module(module), name))
    found: dict[str, Any] = {}

    def work(*args: Any, **named: Any) -> str:
        arguments = signature.bind(*args, **named).arguments
        assert session in arguments.values()
        for each in [each for each in arguments.values() if isinstance(each, VerdictRequest)]:
            arguments |= {field.name: getattr(each, field.name) for field in dataclasses.fields(each)}
        found.update(arguments)
        return "the result"

    with monkeypatch.context() as patch:
        patch.setattr(f"{module}.{name}", work)
        assert getattr(Session, method)(session, **given) == "the result"
    return found


def parameters(method: str) -> dict[str, inspect.Parameter]:
    named = dict(inspect.signature(getattr(Session, method)).parameters)
    return {name: each for name, each in named.items() if name not in ("self", "options")}


@pytest.mark.parametrize("method", METHODS)
def test_a_method_passes_on_each_of_its_arguments(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = {name: VALUES.get(name, f"the {name}") for name in parameters(method)}
    passed = passed_on(monkeypatch, method, Fake(), given)
    assert {name: passed.get(name) for name in given} == given


@pytest.mark.parametrize("method", METHODS)
def test_a_method_leaves_its_defaults_as_they_are_documented(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    named = parameters(method)
    needed = {name: f"the {name}" for name, each in named.items() if each.default is each.empty}
    passed = passed_on(monkeypatch, method, Fake(), needed)
    usual = {name: each.default for name, each in named.items() if name not in needed}
    assert {name: passed.get(name) for name in usual} == usual


@pytest.mark.parametrize("method", METHODS)
def test_only_what_runs_code_alone_needs_ranks_that_take_work(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    session = Fake()
    needed = [name for name, each in parameters(method).items() if each.default is each.empty]
    passed_on(monkeypatch, method, session, dict.fromkeys(needed))
    needs = method in ("replay", "compare_compiled", "check")
    assert session.required == ["run code on"] * needs


def test_a_report_has_the_newest_verdict_and_options_of_compile_are_passed(monkeypatch: pytest.MonkeyPatch) -> None:
    session = Fake()
    assert passed_on(monkeypatch, "report", session, {"path": "p"})["verdict"] == "the newest"
    session.verdicts.clear()
    assert passed_on(monkeypatch, "report", session, {"path": "p"})["verdict"] is None
    given = {"function": "f", "mode": "max-autotune", "dynamic": True}
    assert passed_on(monkeypatch, "compare_compiled", session, given)["options"] == {
        "mode": "max-autotune",
        "dynamic": True,
    }


# ---- a session of jobs ----------------------------------------------------------------------------------------------


def test_a_listening_session_is_opened_with_all_that_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[Any] = []

    def open_server(*args: Any, **named: Any) -> Any:
        opened.append((args, named))
        return "the session", SimpleNamespace(invitation="the invitation")

    monkeypatch.setattr(sessions, "open_session_server", open_server)
    monkeypatch.setattr(sessions, "make_run_folder", lambda folder: f"made of {folder}")
    monkeypatch.setattr(sessions, "Rendezvous", lambda where: ("rendezvous", where))
    monkeypatch.setenv("GRAFTLAB_TOKEN", "from the environment")
    numbers = {"timeout": 3.0, "buffer_budget": 1 << 20, "keep_budget": 1 << 21, "keep_rows": 7, "tap_timeout": 2.0}
    plan = GraftPlan(keep="True")
    address = "tcp://10.0.0.5:29500"
    more: Any = {**numbers, "plan": plan, "folder": "there", "append": True, "address": address}
    assert sessions.listen(2, 3, **more) == "the session"
    assert sessions.listen(2, 3, **more, token="given") == "the session"
    said = "start each job with these variables, and its own command:\nthe invitation\n"
    assert capsys.readouterr().out == said * 2
    where = "made of there"
    options = LaunchOptions(2, 3, **numbers)  # type: ignore[arg-type]
    for (args, named), token in zip(opened, ("from the environment", "given"), strict=True):
        assert args == (Session, options, plan, where, ("rendezvous", where))
        assert named == {"append": True, "listen_at": (("10.0.0.5", 29500), token)}
    sessions.listen()
    args, named = opened[-1]
    assert args == (Session, LaunchOptions(1, 1), GraftPlan(), "made of None", ("rendezvous", "made of None"))
    assert named == {"append": False, "listen_at": None}


@pytest.mark.parametrize("address", ["0.0.0.0:1", "tcp://0.0.0.0:29500", "tcp://[::]:29500", "", 29500])
def test_an_address_that_no_other_machine_reaches_is_refused(address: Any) -> None:
    with pytest.raises(LaunchError, match="give the address at which other machines reach this one"):
        sessions._own_endpoint(address)


@pytest.mark.parametrize("open_one", [sessions.listen, lambda plan: sessions.open_launched(1, 1, plan, None, False)])
def test_a_plan_that_is_none_is_refused_before_anything_is_made(open_one: Any) -> None:
    with pytest.raises(PlanError, match=r"^plan='keep': give a graftlab\.GraftPlan"):
        open_one(plan="keep")


@pytest.mark.parametrize("error", [SessionError("a session uses it"), PermissionError(13, "not yours")])
def test_a_folder_whose_rows_cannot_be_written_is_a_launch_error(
    error: Exception, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    def refuse(folder: Any, **how: Any) -> None:
        raise error

    monkeypatch.setattr(sessions, "RowStore", refuse)
    start: Any = None
    with pytest.raises(LaunchError, match=exactly(str(error))):
        sessions.open_session(LaunchOptions(1, 1), GraftPlan(), tmp_path, start)


def test_rows_are_closed_if_the_ranks_cannot_be_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Any) -> None:
    done: list[Any] = []

    def close() -> None:
        done.append("closed")
        raise SessionError("the rows are gone")

    monkeypatch.setattr(
        sessions, "RowStore", lambda folder, **how: done.append(how) or SimpleNamespace(close=close, first_run=4)
    )
    monkeypatch.setattr(sessions, "describe_session", lambda *facts: done.append(facts))

    def start(*given: Any) -> Any:
        done.append(given)
        raise KeyboardInterrupt

    options, plan = LaunchOptions(2, 3, keep_rows=9), GraftPlan()
    with pytest.raises(KeyboardInterrupt):
        sessions.open_session(options, plan, tmp_path, start, append=True)
    assert done == [
        {"append": True, "keep_rows": 9},
        (tmp_path, (2, 3), 4),
        (options, tmp_path, plan),
        "closed",
    ]


def test_old_folders_are_removed_only_where_a_new_one_is_made_among_them(monkeypatch: pytest.MonkeyPatch) -> None:
    pruned: list[bool] = []
    monkeypatch.setattr(sessions, "prune", lambda: pruned.append(True))
    monkeypatch.setattr(sessions, "make_run_folder", lambda folder: folder)

    def refuse(*given: Any, **more: Any) -> Any:
        raise LaunchError("no")

    monkeypatch.setattr(sessions, "open_session", refuse)
    for folder in ("mine", None):
        with pytest.raises(LaunchError):
            sessions.open_launched(1, 1, None, folder, False)
    assert pruned == [True]


def test_a_launched_session_appends_if_asked_and_calls_its_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def note(*parts: Any, **more: Any) -> Any:
        given.append((parts, more))
        return session

    session: Any = Session.__new__(Session)
    internals = SimpleNamespace(default_callees={}, verdicts=["one", "two"])
    monkeypatch.setattr(sessions, "internals_of", lambda session: internals)
    monkeypatch.setattr(sessions, "make_run_folder", lambda folder: folder)
    monkeypatch.setattr(sessions, "open_session", note)
    recorded: Any = Mock(spec=RecordedSide, world_size=3)
    plan = GraftPlan(b2t="True")
    assert sessions.open_launched(recorded, 2, plan, "mine", True, keep_rows=7) is session
    assert given == [((LaunchOptions(3, 2, keep_rows=7), plan, "mine", sessions.launch_ranks), {"append": True})]
    assert internals.default_callees == {"baseline": recorded}
    # The list is the caller's own.
    session.verdicts.clear()
    assert session.verdicts == ["one", "two"]
