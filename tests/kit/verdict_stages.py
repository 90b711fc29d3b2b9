"""A verdict whose measurements and stages are given: what it makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from graftlab.control.verdicts import Verdict
from graftlab.errors import SessionError
from graftlab.judging import judgement
from graftlab.judging.evidence import Evidence
from graftlab.judging.judgement import Judgement
from graftlab.judging.mechanisms import LentWeights
from graftlab.judging.naming import Naming
from graftlab.rows.store import to_frame
from graftlab.verdict.added import added_frame
from graftlab.verdict.causes import Causes
from graftlab.verdict.findings import JobRemarks
from graftlab.verdict.optimizer_settings import NO_SETTINGS
from graftlab.verdict.returned_values import AccumulatedFloors
from graftlab.verdict.rounds_differently import RoundingGroups
from kit.rows import tap

NAMES = ("a", "b", "c", "d")


@cache
def taps(status: str, **differences: float) -> pd.DataFrame:
    return to_frame([tap(n, o, differences.get(n, 0.0), status=status) for o, n in enumerate(NAMES)])


@cache
def _frame(*named: str) -> pd.DataFrame:
    rows = taps("grafted", **dict.fromkeys(named, 0.1))
    return added_frame(rows, {}, compared=taps("compared"), constant=1e-6)


def naming(named: Sequence[str] = ("b", "c"), **more: Any) -> Naming:
    """These groups are named; every difference is above rounding."""
    usual: dict[str, Any] = {
        "frame": _frame(*named),
        "accumulated": AccumulatedFloors({}, {}, 1e-6),
        **{each: [] for each in ("following", "scaled", "differing", "inputs", "data", "unseen", "not_repeated")},
    }
    return Naming(**{**usual, "named": list(named), "given": set(), "data_differs": False, **more})


JOBS = JobRemarks(1e-6, "assumed", first=("the first",), of_named=("of jobs",))


class Made:
    """A verdict whose measurements are given, with what was asked of its runs and stages."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.asked: list[Any] = []
        self.naming = naming()
        self.split: dict[str, list[str]] = {}
        self.parts: dict[str, list[str]] = {}
        self.causes: dict[str, Causes] = {}
        self.rounding = RoundingGroups()
        self.lent: pd.DataFrame | None = None
        self.raising: set[str] = set()
        self.explained: set[str] = set()
        self.evidence = Evidence(
            taps("compared", b=0.1, c=0.1),
            taps("grafted", b=0.1, c=0.1),
            None,
            None,
            [],
            [],
            SimpleNamespace(returned_not_repeated=["varies anyway"], computed_in="", dtype_of_taps=""),  # type: ignore[arg-type]
            "one sided",
            NO_SETTINGS,
        )
        self.runs: Any = SimpleNamespace(
            session=SimpleNamespace(closed=False, options=SimpleNamespace(baseline=1, target=2)),
            request=SimpleNamespace(threshold=5.0, explain=True, graft_weights=False, output=None, constant_floor=None),
            before=None,
            raised=None,
            recorded=False,
            count=7,
            expected=0,
            misaligned_steps=lambda rows: None,
            first_difference=lambda floors: None,
            weights_before=lambda grafted: taps("compared"),
            present_pairs=list,
            target_against_itself=lambda: self.note("target", ["varies", "varies anyway"]),
            unwritten_memory=lambda: self.note("memory", []),
        )
        made = self

        class Search:
            def __init__(self, runs: Any, frame: pd.DataFrame, threshold: float, one_sided: str | None) -> None:
                assert (runs, threshold, one_sided) == (made.runs, 5.0, "one sided")
                self.lines, self.remarks = ["a line"], ["of lines"]

            def trace(self, groups: Sequence[str], keep: str | None) -> str:
                return str(made.note(("trace", tuple(groups), keep), "rows"))

            def confirm(self) -> None:
                made.note("confirm", None)

        class Hints:
            def __init__(self, *_: Any) -> None:
                self.maps = {"b": "a map"}

            def pairs_for_hints(self, frame: pd.DataFrame, named: Sequence[str]) -> str:
                return "kept"

            def note_pairs(self, frame: pd.DataFrame, named: Sequence[str], rows: Any) -> None:
                made.note(("pairs", rows), None)

            def hints(self, frame: pd.DataFrame, named: Sequence[str]) -> dict[str, str]:
                return dict(made.note("hints", {"b": "a hint"}))

        of_module: dict[str, Any] = {
            "LineSearch": Search,
            "Mechanisms": Hints,
            "Swaps": lambda *_: None,
            "explained_by_code": lambda lines: self.explained if lines else set(),
            "runs_freely": lambda frame, groups, threshold: [f"free: {', '.join(sorted(groups))}"],
            "unread_grafts_text": lambda found: ["unread"],
            "held_choices": lambda frame, named: ["held"],
            "differing_weights": lambda rows, threshold: {"w": "differs"},
            "unequal_weights": lambda rows, weights: ["unequal weights"],
            "outdated_pairs": lambda rows, plan, given: [],
            "no_longer_equal": lambda found: f"no longer equal: {found}",
            "with_present_partners": lambda found, pairs, present: found,
            "learned_from_other_code": lambda found: "",
            "pairs_of": lambda rows, plan: [],
            "extra_calls": lambda rows, named: ["extra calls"],
            "pairing_advice": lambda rows, of_jobs: f"pair, jobs: {of_jobs}",
            "not_grafted": lambda rows, frame, threshold: ["not grafted"],
            "reads_unwritten": lambda found: [f"reads unwritten {each}" for each in found],
            "Measurement": self._measured,
            "Effects": lambda *_: SimpleNamespace(
                causes=lambda: (self.causes, ["of causes"]),
                of_quantised=lambda: ([*self.naming.quantised.text], False),
                of_rounding=lambda: self.rounding,
            ),
            "_only_before": lambda evidence, frame: {"b": "only before"},
        }
        for name, stub in of_module.items():
            monkeypatch.setattr(judgement, name, stub)

    def note(self, what: Any, result: Any) -> Any:
        self.asked.append(what)
        if (what if isinstance(what, str) else what[0]) in self.raising:
            raise SessionError(f"{what}: a rank died")
        return result

    def _measured(self, runs: Any, attempt: Any) -> Any:
        lent = LentWeights(self.lent, {"w": "a hint at weights"}, {"w": "a map of weights"})  # type: ignore[dict-item]
        steps = ("split_calls", "partial_sums", "averages", "parts_of_gradients", "undone_factors")
        return SimpleNamespace(
            evidence=replace(self.evidence, weights=lent),
            naming=lambda: self.naming,
            split=self.split,
            sums={},
            parts=self.parts,
            not_compared=[f"not paired: {each}" for each in self.split],
            **{f"leave_out_{step}": lambda: None for step in steps},
        )

    def verdict(self) -> Verdict:
        made = self

        class Given(Judgement):
            def _unmask(self, evidence: Any, naming: Naming) -> list[str]:
                return ["masked"]

            def _unexplained(self, evidence: Any, naming: Naming, *, has_taps: bool) -> Any:
                made.note(("unexplained", has_taps, tuple(naming.target_not_repeated)), None)
                return ["unexplained"], ["without output"], ["written"]

            def _origins(self, *_: Any) -> Any:
                return "origins"

        return Given(self.runs).verdict()
