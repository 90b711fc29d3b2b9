"""What a comparison of compiled with eager code measures and says, with given results and no rank."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.refusals import exactly
from kit.verdict_stages import taps

from graftlab.control.verdicts import Verdict
from graftlab.errors import SessionError, WaitInterrupted
from graftlab.judging import compiled_comparison
from graftlab.judging.compiled_comparison import CompiledComparison, _CompiledRuns, compare_compiled
from graftlab.lines.frames import SourceFrame
from graftlab.ranks.compiled_pieces import MiscompiledLine, PieceSearch
from graftlab.ranks.compiled_runs import CallInMode, CompilerSearch
from graftlab.taps.compiled_calls import CompiledCall
from graftlab.verdict.added import added_frame, labelled
from graftlab.verdict.findings import Findings


def verdict(*named: str) -> Verdict:
    rows = taps("grafted", **dict.fromkeys(named, 0.1))
    frame = added_frame(rows, {}, compared=rows, constant=1e-6)
    return Verdict(Findings(labelled(frame, named, (), {}, 5.0), 5.0, 1), 1)


def comparison(untapped: float, tapped: float, *named: str, **more: Any) -> CompiledComparison:
    usual: dict[str, Any] = {"floor": 1e-7, "exact": (1e-7, 2e-7, 3e-7), "fused": None, "graphs": 2}
    return CompiledComparison(**{"verdict": verdict(*named), "untapped": untapped, "tapped": tapped, **usual, **more})


def line(number: int) -> MiscompiledLine:
    inner, outer = (SourceFrame("model.py", number + more, "f", "x = x") for more in (0, 100))
    return MiscompiledLine("model.py", number, f"line {number}", ("sin", "mul"), (inner, outer))


# ---- the text --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("untapped", "tapped", "more", "said"),
    [
        (math.nan, 0.0, {}, "returns no finite tensor or number"),
        (0.0, 0.0, {}, "its result is equal to the eager one, without taps and with them."),
        (
            0.0,
            4e-7,
            {},
            "without taps its result is equal to the eager one, with taps 4.0e-07 from the eager one. That is",
        ),
        (4e-7, 5e-7, {}, "That is within rounding: rounding alone changes the eager result by 1.0e-07."),
        (5.1e-7, 5e-7, {}, "Without taps that is more than rounding (rounding alone"),
        (
            5e-7,
            5.1e-7,
            {},
            "That is more than rounding (rounding alone changes the eager result by 1.0e-07), though no tap",
        ),
        (0.1, 0.1, {"fused": "h"}, "They differ only without the tap 'h' in the graph"),
        (
            4e-7,
            4e-7,
            {"exact": (1e-7, 2e-7, 3e-7)},
            "in float64 is 1.0e-07 from the eager result and 3.0e-07 from the c",
        ),
        (4e-7, 4e-7, {"exact": (3e-7, 2e-7, 3e-7)}, "which rounds less often and is not at fault."),
        (
            0.1,
            0.1,
            {"exact": (3e-7, 2e-7, 3e-7), "fused": "h"},
            "3.0e-07 from the compiled one, which rounds less often.",
        ),
        (4e-7, 4e-7, {"exact": (math.inf, 0.1, 0.1)}, "the eager result is not finite in places where it should be."),
        (
            4e-7,
            4e-7,
            {"not_in_float64": "no kernel"},
            "does not run in float64 (no kernel), so the floors do not include",
        ),
        (4e-7, 4e-7, {"exact": (2.5e-7, 2e-7, 3e-7)}, "and 3.0e-07 from the compiled one."),
        (0.1, 0.1, {"pieces": PieceSearch((line(7), line(8)), True)}, "The compiled code of these lines is wrong"),
        (0.1, 0.1, {"not_whole": "a break"}, "cannot compile this call as a whole (a break)."),
        (0.1, 0.1, {"other_mode": 5e-7}, "(torch.no_grad), its result agrees too."),
        (0.1, 0.1, {"other_mode": 0.2}, "its result is 2.0e-01 from the eager one, which is no better."),
        (
            0.1,
            0.1,
            {"other_mode": 0.0, "grad_mode": "no_grad"},
            "and compiled so its result is equal to the eager one.",
        ),
        (0.1, 0.1, {"grad_mode": "inference_mode"}, "Judged under inference_mode, as grad_mode says."),
        (0.1, 0.1, {"switches": {"a": False}}, "With torch._inductor.config.a = False the compiled result is right"),
        (0.1, 0.1, {"switches": {"a": 1, "b": 2}}, "config.b = 2, together but not one alone, the compiled result"),
        (0.1, 0.1, {"stage": "aot_eager"}, "backend='aot_eager' does, which runs fewer steps of the compiler."),
        (0.1, 0.1, {"pieces": PieceSearch((), False)}, "give a wrong result even when none of them is compiled"),
    ],
)
def test_how_far_compiled_results_are_off_and_why_is_said(
    untapped: float, tapped: float, more: dict[str, Any], said: str
) -> None:
    assert said in comparison(untapped, tapped, **more).text


def test_a_named_tap_is_more_than_rounding_and_nothing_else_is_blamed() -> None:
    text = comparison(0.1, 0.1, "b").text
    assert "That is more than rounding: rounding alone changes the eager result by 1.0e-07." in text
    assert "Tap the result" not in text
    text = comparison(0.1, 0.1, "b", exact=(3e-7, 2e-7, 3e-7)).text
    assert "which rounds less often." in text
    assert "not at fault" not in text


def test_miscompiled_lines_are_listed_from_both_ends() -> None:
    found = comparison(0.1, 0.1, pieces=PieceSearch((line(7),), True))
    assert "Only this line's compiled code is wrong" in found.text
    assert "  model.py:7  line 7  [sin, mul]" in found.text
    assert found.lines.iloc[0][["line", "operations"]].tolist() == [7, ("sin", "mul")]
    six, seven = (
        [
            each
            for each in comparison(
                0.1, 0.1, pieces=PieceSearch(tuple(map(line, range(8, 8 + n))), True)
            ).text.splitlines()
            if each.startswith("  ")
        ]
        for n in (6, 7)
    )
    assert six[:2] == ["  model.py:8   line 8  [sin, mul]", "  model.py:9   line 9  [sin, mul]"]
    assert len(six) == 6
    assert seven[3] == "  ... 1 more in comparison.lines"
    assert [each.split()[0] for each in (seven[2], seven[4], seven[6])] == ["model.py:10", "model.py:12", "model.py:14"]
    page = comparison(0.1, 0.1, pieces=PieceSearch((line(7),), True))._repr_mimebundle_()["text/html"]
    assert page.count("font-family: monospace") == 1
    assert comparison(0.1, 0.1).lines.empty


# ---- the runs --------------------------------------------------------------------------------------------------------


class Given(_CompiledRuns):
    """Runs whose distances are given, by the mode and the names of the taps in the graph."""

    distance: dict[tuple[Any, Any], float]
    has_gradients = True
    floor_error: str | None = None
    made: list[Any]

    def choose_what_is_compiled(self) -> None:
        self.graphs += 1
        self.not_whole = "a break"

    def runs_without_gradients(self) -> bool:
        return self.has_gradients

    def distances(self, names: tuple[str, ...] | None, title: str) -> tuple[float, float]:
        self.graphs += 1
        self.made.append((self.call.mode, names, title))
        return self.distance[self.call.mode, names], 1e-7

    @property
    def floor(self) -> Any:
        return SimpleNamespace(rel_l2=1e-7, exact=2e-7, error=self.floor_error)

    def search(self) -> CompilerSearch:
        self.made.append("search")
        return CompilerSearch({"a": 1}, "eager", PieceSearch((), True), 3)

    def in_mode(self, mode: Any) -> Any:
        return super().in_mode(mode)


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> type[Given]:
    monkeypatch.setattr(compiled_comparison, "_CompiledRuns", Given)
    monkeypatch.setattr(Given, "made", [], raising=False)
    monkeypatch.setattr(Given, "has_gradients", True)
    monkeypatch.setattr(Given, "floor_error", None)
    asked: list[Any] = []

    def judged(session: Any, request: Any) -> Verdict:
        asked.append(request)
        return verdict()

    monkeypatch.setattr(compiled_comparison, "judge", judged)
    monkeypatch.setattr(Given, "asked", asked, raising=False)
    return Given


def compared(given: type[Given], distance: dict[tuple[Any, Any], float], **more: Any) -> CompiledComparison:
    given.distance = distance
    options: dict[str, Any] = {
        "function": math.sqrt,
        "args": (1,),
        "kwargs": {"k": 2},
        "options": {"backend": "eager"},
        "threshold": 5.0,
    }
    return compare_compiled(None, **{**options, **more})  # type: ignore[arg-type]


BOTH = {(None, ()): 0.0, ("no_grad", ()): 0.0, (None, None): 0.0, ("no_grad", None): 0.0}


def test_a_call_is_judged_as_it_is_called_unless_only_its_other_mode_is_wrong(given: Any) -> None:
    found = compared(given, BOTH)
    assert (found.grad_mode, found.other_mode, found.fused, found.pieces) == (None, 0.0, None, None)
    assert (found.floor, found.exact, found.not_whole) == (1e-7, (2e-7, 1e-7, 1e-7), "a break")
    (request,) = given.asked
    assert (request.baseline, request.target.names, request.threshold) == (math.sqrt, None, 5.0)
    assert (request.args, request.kwargs) == ((1,), {"k": 2})
    assert request.exact is not None
    assert (request.target.options, request.target.source) == ({"backend": "eager"}, None)
    assert request.target.packed is not None
    compared(given, BOTH, function="f(x)", args=(), kwargs=None, threshold=3.0)
    assert (given.asked[-1].target.source, given.asked[-1].target.packed) == ("f(x)", None)
    assert given.asked[-1].threshold == 3.0
    found = compared(given, {**BOTH, ("no_grad", ()): 0.1, ("no_grad", None): 0.1})
    assert (found.grad_mode, found.untapped, found.tapped, found.other_mode) == ("no_grad", 0.1, 0.1, 0.0)
    assert isinstance(given.asked[-1].baseline, CallInMode)
    assert (found.switches, found.stage, found.pieces) == ({"a": 1}, "eager", PieceSearch((), True))
    # Both are wrong.
    found = compared(given, {**BOTH, ("no_grad", ()): 0.1, (None, ()): 0.2, (None, None): 0.2})
    assert (found.grad_mode, found.untapped, found.other_mode) == (None, 0.2, 0.1)
    given.has_gradients = False
    assert compared(given, {(None, ()): 0.0, (None, None): 0.0}).other_mode is None
    given.has_gradients = True
    found = compared(given, {("no_grad", ()): 0.0, ("no_grad", None): 0.0}, grad_mode="no_grad")
    assert (found.grad_mode, found.other_mode) == ("no_grad", None)
    given.floor_error = "no kernel"
    assert compared(given, BOTH).not_in_float64 == "no kernel"
    assert given.asked[-1].exact is None


def test_the_tap_that_mends_a_result_is_found_by_halves(given: Any) -> None:
    names = ("a", "b", "c", "d")
    given.has_gradients = False
    apart = {(None, names[:n]): 0.1 if n < 3 else 0.0 for n in range(5)}
    found = compared(given, {**apart, (None, None): 0.0})
    assert found.fused == "c"
    assert [each[1] for each in given.made if isinstance(each, tuple) and each[1]] == [names[:2], names[:3]]
    assert found.graphs == 1 + 2 + 2
    apart = {(None, names[:n]): 0.1 if n < 4 else 0.0 for n in range(5)}
    assert compared(given, {**apart, (None, None): 0.0}).fused == "d"
    # Halfway between them, by their logarithms.
    apart = {(None, names[:n]): (0.1, 0.1, 2e-4, 1e-6, 1e-6)[n] for n in range(5)}
    assert compared(given, {**apart, (None, None): 1e-6}).fused == "b"
    # With the taps the result is hardly nearer.
    assert compared(given, {(None, ()): 0.1, (None, None): 0.05}).fused is None


def test_what_cannot_be_compiled_so_is_refused() -> None:
    for function, more, said in (
        ("f(x)", {"args": (1,)}, "'f(x)' is an expression, which takes no args"),
        ("f(x)", {"kwargs": {"x": 1}}, "which takes no args"),
        ("f(", {}, "is not valid Python"),
        (math.sqrt, {"grad_mode": "no"}, "grad_mode is 'no'; it takes "),
    ):
        usual: dict[str, Any] = {"args": (), "kwargs": None, "options": {}, "threshold": 5.0}
        with pytest.raises(SessionError) as refused:
            compare_compiled(None, function, **{**usual, **more})  # type: ignore[arg-type]
        assert said in str(refused.value)


def runs(*results: Any) -> Any:
    """Compiled runs whose results on the baseline and the target are given, in their order."""
    made: Any = _CompiledRuns(
        SimpleNamespace(options=SimpleNamespace(keep_budget=7)),  # type: ignore[arg-type]
        math.sqrt,
        CompiledCall(None, b"packed", {}, ()),
        (1,),
        {"k": 2},
    )
    left, made.asked = list(results), []

    def run(title: str, baseline: Any, target: Any, args: Any = (), kwargs: Any = None) -> Any:
        made.asked.append((title, baseline, target, args, kwargs))
        ours, theirs = left.pop(0)
        return SimpleNamespace(baseline=ours, target=theirs)

    made._run = run
    return made


def test_distances_are_measured_from_the_eager_and_from_the_exact_result() -> None:
    one = torch.ones(4)
    rounded = SimpleNamespace(moved=one * 1.01, exact=one * 2, error=None)
    made = runs(([one], [one * 1.1]), ([rounded], []), ([one], [one * 2]))
    assert made.distances((), "without taps") == (pytest.approx(0.1), pytest.approx(0.45))
    assert made.floor.moved == pytest.approx(0.01)
    assert made.floor.exact == pytest.approx(0.5)
    # The floor is measured once.
    assert made.distances(None, "with every tap") == (pytest.approx(1.0), pytest.approx(0.0))
    assert made.graphs == 2
    (title, eager, compiled, args, kwargs), (_, rounding, nothing, *_), (last, *_) = made.asked
    assert made.asked[2][2].names is None
    assert (title, last) == ("compilation 1, without taps", "compilation 2, with every tap")
    assert (eager, compiled.names, args, kwargs) == (math.sqrt, (), (1,), {"k": 2})
    assert (rounding.args, nothing) == ((math.sqrt, (1,), {"k": 2}, 7), None)
    failing = SimpleNamespace(moved=one, exact=None, error="no kernel")
    made = runs(([one], [one]), ([failing], []))
    assert made.distances((), "without taps") == (0.0, pytest.approx(math.nan, nan_ok=True))
    assert (made.floor.error, math.isnan(made.floor.exact)) == ("no kernel", True)


def test_what_ranks_find_differently_is_no_common_answer() -> None:
    found = CompilerSearch({"a": 1}, "eager", PieceSearch((), True), 3)
    alike = CompilerSearch({"a": 1}, "aot_eager", PieceSearch((), True), 4)
    other = CompilerSearch({"b": 1}, "aot_eager", PieceSearch((), True), 5)
    for second, settings in ((alike, {"a": 1}), (other, {})):
        made = runs(([], [found, second]))
        made._floor = SimpleNamespace(rel_l2=1e-7)
        made.graphs = 2
        searched = made.search()
        assert (searched.settings, searched.stage) == (settings, "eager")
        assert made.graphs == 2 + second.compilations
        assert made.asked[0][2].args[2] == pytest.approx(5e-7)
    made = runs(([True, False], []), ([True, True], []))
    assert (made.runs_without_gradients(), made.runs_without_gradients()) == (False, True)
    made = runs(([], [None, "a break"]), ([], [None, None]))
    made.choose_what_is_compiled()
    assert (made.not_whole, made.call.by_modules, made.graphs) == ("a break", True, 1)
    changed = made.in_mode("no_grad")
    assert (changed.not_whole, changed.graphs, changed.call.by_modules) == ("a break", 1, True)
    assert (changed.call.mode, made.call.mode, changed._args, changed._kwargs) == ("no_grad", None, (1,), {"k": 2})
    made.call = CompiledCall(None, b"packed", {}, ())
    made.choose_what_is_compiled()
    assert (made.not_whole, made.call.by_modules) == (None, False)


def test_the_plan_is_restored_after_a_run_and_an_interrupt_reaches_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    session: Any = SimpleNamespace(row_count=3, runs=[], interrupt=lambda: made.append("interrupt"))

    def start(session: Any, plan: Any, callees: Any, args: Any, kwargs: Any) -> Any:
        if made == ["refused"]:
            raise KeyboardInterrupt
        made.append((plan, callees, args, kwargs))
        session.runs.append(run)
        return run, 1

    def wait(bar: Any) -> str:
        made.append(bar._count())
        session.row_count = 8
        made.append(bar._count())
        if "stop" in made:
            raise KeyboardInterrupt
        return "the run"

    run = SimpleNamespace(wait=wait)
    monkeypatch.setattr(compiled_comparison, "start_under", start)
    monkeypatch.setattr(compiled_comparison, "restore_plan", lambda session: made.append("restored"))
    compiled = _CompiledRuns(session, math.sqrt, CompiledCall(None, b"", {}, ()), (), {})
    assert compiled._run("title", "f", "g", (1,), {"k": 2}) == "the run"  # type: ignore[comparison-overlap]
    nothing = {"b2t": "False", "t2b": "False", "compare": "False", "keep": None}
    assert made == [(nothing, {"baseline": "f", "target": "g"}, (1,), {"k": 2}), 0, 5, "restored"]
    made[:] = ["stop"]
    with pytest.raises(
        WaitInterrupted,
        match=exactly(
            "the comparison with compiled code was stopped (title); its code on the ranks was interrupted, "
            "and the plan from before is in force again"
        ),
    ):
        compiled._run("title", None, None)
    assert made[-2:] == ["interrupt", "restored"]
    made[:] = ["refused"]
    with pytest.raises(WaitInterrupted):
        compiled._run("title", None, None)
    assert made == ["refused", "restored"], "the newest run is not its own"
