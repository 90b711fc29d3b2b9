"""How named groups differ: which kept pairs are looked at, and when another run is needed to have them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from kit.rows import tap
from torch import Tensor

from graftlab.base.world import Side
from graftlab.diffs.results import ResultDifference
from graftlab.errors import SessionError
from graftlab.grafting.kept import OCCURRENCE
from graftlab.judging.mechanisms import LentWeights, Mechanisms, _distance, _rules_of_inputs
from graftlab.judging.verdict_runs import RunFilters, VerdictAbandoned
from graftlab.plan.pairs import PairRule
from graftlab.rows.store import to_frame
from graftlab.taps.module_inputs import SUFFIX
from graftlab.verdict.returned_values import ReturnedValues

Pair = tuple[Tensor, Tensor]
X = torch.randn(16, 8, generator=torch.Generator().manual_seed(0))


class Runs:
    """The runs of a verdict; each keeps the pairs of one more dict."""

    def __init__(self, *kept: Mapping[str, Pair]) -> None:
        self._later = list(kept)
        self._newest: Mapping[str, Pair] = {}
        self.asked: list[RunFilters] = []
        self.calls: list[tuple[Any, ...]] = []
        self.before = SimpleNamespace(pairs=[])

    def both(self, why: str, wanted: RunFilters) -> None:
        self.asked.append(wanted)
        self._newest = self._later.pop(0)

    def pair(self, name: str, rank: int, step: int, tags: Mapping[str, Any]) -> Pair:
        self.calls.append((name, rank, step, dict(tags)))
        if name not in self._newest:
            raise SessionError(f"no pair of {name}\nwas kept")
        return self._newest[name]


def line(name: str, order: int, ratio: float = 0.0, **more: Any) -> dict[str, Any]:
    """What is read of a row of a verdict's frame."""
    label = "culprit" if ratio > 1 else "clean"
    usual = {"tags": {}, "occurrence": 0, "rank": 0, "step": 0, "group": name, "added": ratio, "label": label}
    return {"name": name, "order": order, "ratio": ratio, **usual, **more}


def mechanisms(runs: Runs, one_sided: str | None = None) -> Mechanisms:
    return Mechanisms(runs, one_sided)  # type: ignore[arg-type]


def frame_of(*lines: dict[str, Any]) -> pd.DataFrame:
    return pd.DataFrame(list(lines))


def test_a_group_is_looked_at_where_it_adds_the_most_in_a_run_that_keeps_its_pair() -> None:
    runs = Runs({"h.0": (X, 5 * X), "h.1": (X, 2 * X)})
    found = mechanisms(runs, "name == 'alone'")
    hints = found.hints(frame_of(line("h.0", 1, 5.0, group="h"), line("h.1", 2, 9.0, group="h")), ["h"])
    assert list(hints) == ["h"]
    assert hints["h"].startswith("at h.1, ")
    assert "2" in hints["h"]
    (wanted,) = runs.asked
    assert (wanted.b2t, wanted.leaving) == ("True", "name == 'alone'")
    assert "h\\\\.1" in str(wanted.keep)
    assert found.maps["h"].title == "h.1"


@pytest.mark.parametrize("whole", ["target", "baseline"])
def test_a_hint_has_the_baselines_indices_where_the_target_stacks_layers(whole: Side) -> None:
    stacked = torch.randn(4, 16, 8, generator=torch.Generator().manual_seed(1))
    wrong = stacked.clone()
    wrong[2, 5] = -wrong[2, 5]
    runs = Runs({"layers.2.weight": (stacked, wrong)})
    layout = "part(index=2, of=[1, 1, 1, 1], dim=0) | 1 b c -> b c"
    runs.before.pairs = [PairRule("layers.2.weight", "weights", layout, whole)]
    found = mechanisms(runs)
    lines = frame_of(line("layers.2.weight", 1, 9.0, target_name="weights"))
    hint = found.hints(lines, ["layers.2.weight"])["layers.2.weight"]
    # Where the baseline has the whole, its tensor has that index.
    place = "index 5 of dim 0" if whole == "target" else "index 2 of dim 0 and index 5 of dim 1"
    assert hint.startswith(f"at layers.2.weight, only at {place}, ")


def test_a_pair_is_asked_for_by_its_call() -> None:
    runs = Runs({"h": (X, 2 * X)})
    mechanisms(runs).hints(
        frame_of(line("h", 3, 9.0, rank=2, step=4, occurrence=1, tags={"layer": 3, "expert": None})), ["h"]
    )
    assert runs.calls == [("h", 2, 4, {OCCURRENCE: 1, "layer": 3})]


def rows_of(frame: pd.DataFrame) -> pd.DataFrame:
    """The rows of a later run in which the taps are as far apart as in a verdict's frame."""
    return frame.assign(status="grafted", rel_l2=frame["added"], step=frame["step"] + 7)


def test_pairs_that_an_earlier_run_kept_need_no_further_run() -> None:
    runs = Runs({"h": (X, 2 * X)})
    runs.both("earlier", RunFilters())
    runs.asked.clear()
    found, frame = mechanisms(runs), frame_of(line("h", 1, 9.0))
    assert "h" in str(found.pairs_for_hints(frame, ["h"]))
    found.note_pairs(frame, ["h"], rows_of(frame))
    assert found.hints(frame, ["h"])
    assert runs.asked == []


def test_a_pair_of_a_run_in_which_the_tap_was_another_distance_apart_is_not_used() -> None:
    runs = Runs({"h": (X, 2 * X)}, {"h": (X, 3 * X)})
    runs.both("earlier", RunFilters())
    found, frame = mechanisms(runs), frame_of(line("h", 1, 9.0))
    found.note_pairs(frame, ["h"], rows_of(frame.assign(added=8.0)))
    assert "3" in found.hints(frame, ["h"])["h"]
    assert len(runs.asked) == 2


def test_a_group_that_is_named_without_a_culprit_is_not_looked_at() -> None:
    runs = Runs()
    assert mechanisms(runs).hints(frame_of(line("h", 1, 9.0, label="minor")), ["h"]) == {}
    assert runs.asked == []


def test_a_pair_that_was_not_kept_is_named_in_place_of_a_hint() -> None:
    runs = Runs({"k": (X, 2 * X)})
    found = mechanisms(runs)
    # The second group is a gradient, which nothing before it feeds.
    hints = found.hints(
        frame_of(line("q", 1, 9.0), line("k", 2, 9.0, tags={"kind": "grad"}, group="k@grad")), ["q", "k@grad"]
    )
    assert hints["q"] == "none, since the pair was not kept (no pair of q)"
    assert hints["k@grad"].startswith("at k, ")
    assert list(found.maps) == ["k@grad"]
    assert found.maps["k@grad"].title == "gradient of k"


def test_only_agreeing_taps_just_before_on_the_same_rank_explain_an_activation() -> None:
    pair = (torch.relu(X), torch.nn.functional.silu(X))
    for more, explained in (({}, True), ({"rank": 1}, False), ({"step": 1}, False), ({"order": 9}, False)):
        runs = Runs({"x": (X, X), "act": pair})
        before = {**line("x", 1), **more}
        hints = mechanisms(runs).hints(frame_of(before, line("act", 2, 9.0)), ["act"])
        assert ("relu" in hints.get("act", "")) == explained, more


def test_tensors_of_unlike_shapes_have_no_map() -> None:
    found = mechanisms(Runs({"h": (X, X[:4])}))
    found.hints(frame_of(line("h", 1, 9.0)), ["h"])
    assert found.maps == {}


# ---- weights that are lent ------------------------------------------------------------------------------------------


class LendingRuns:
    """Results that are 1e-3 apart with each side's own weights, and ``lent`` apart with the baseline's."""

    can_lend_weights = True

    def __init__(self, lent: float | Exception, own: float = 1e-3) -> None:
        self._lent = lent
        self.returned = ReturnedValues((ResultDifference("", own, ("float32", "float32")),))
        self.was_returned = False
        self.closed = False
        self.before = SimpleNamespace(pairs=[])

    @property
    def session(self) -> LendingRuns:
        return self

    def lend_weights(self, names: list[str], keep: list[str]) -> pd.DataFrame:
        assert names == keep == ["w"]
        if isinstance(self._lent, Exception):
            raise self._lent
        self.returned = ReturnedValues((ResultDifference("", self._lent, ("float32", "float32")),))
        return pd.DataFrame({"name": [], "tags": [], "status": []})

    def return_weights(self) -> None:
        self.was_returned = True

    def pair(self, *_: object) -> Pair:
        return X, 2 * X


@pytest.fixture
def lent(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = "graftlab.judging.mechanisms"
    monkeypatch.setattr(f"{module}.weights_to_lend", lambda rows, threshold: [{"name": "w", "rank": 0}])
    monkeypatch.setattr(f"{module}.with_data_of", lambda compared, plain: compared)
    return lambda runs: LentWeights.of(runs, pd.DataFrame({"name": [], "tags": [], "status": []}), 10.0)


def test_weights_are_lent_where_the_results_differ_and_their_pairs_are_looked_at(lent: Any) -> None:
    found = lent(LendingRuns(1e-4))
    assert found
    assert found.hints["w"].startswith("at w, ")
    assert found.maps["w"].title == "w"


@pytest.mark.parametrize(
    ("fields", "is_lent"),
    [
        ({"rel_l2": 1e-3}, True),
        ({"rel_l2": 1e-7}, False),
        # Not a number on one side alone, whose distance is not known.
        ({"rel_l2": float("nan"), "nonfinite_differ": 1}, True),
    ],
)
def test_weights_of_functions_that_return_nothing_are_lent_if_the_last_tap_differs(
    fields: dict[str, Any], is_lent: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("graftlab.judging.mechanisms.weights_to_lend", lambda rows, threshold: [{"name": "w"}])
    runs: Any = LendingRuns(SessionError("it was asked for"))
    runs.returned = None
    rows = to_frame([tap("early", 1, 0.5), tap("late", 2, **fields), tap("late", 3, 0.5, own={"kind": "grad"})])
    assert (LentWeights.of(runs, rows, 10.0).failure is not None) is is_lent


def test_weights_of_another_arrangement_are_given_back(lent: Any) -> None:
    runs = LendingRuns(3e-3)
    assert not lent(runs)
    assert runs.was_returned


def test_no_weight_is_lent_where_both_sides_compute_the_same_with_their_own(lent: Any) -> None:
    assert not lent(LendingRuns(AssertionError("lent"), own=1e-7))


def test_a_weight_that_is_right_in_another_form_is_not_lent(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"name": name, "rank": 0} for name in ("norm.weight", "up.weight")]
    monkeypatch.setattr("graftlab.judging.mechanisms.weights_to_lend", lambda plain, threshold: rows)
    monkeypatch.setattr("graftlab.judging.mechanisms.differing_rows", lambda plain, threshold: rows)
    stored = {"norm.weight": "the baseline's plus 1"}
    monkeypatch.setattr("graftlab.judging.mechanisms.stored_otherwise", lambda *given, agrees: stored)
    runs: Any = LendingRuns(SessionError("it was asked for"))
    runs.lend_weights = lambda names, keep: pytest.fail(f"{names}") if "norm.weight" in (*names, *keep) else lend()

    def lend() -> None:
        raise SessionError("it was asked for")

    found = LentWeights.of(runs, to_frame([tap("late", 1, 0.5)]), 10.0)
    assert (found.failure, found.stored) == ("it was asked for", stored)
    monkeypatch.setattr("graftlab.judging.mechanisms.weights_to_lend", lambda plain, threshold: rows[:1])
    found = LentWeights.of(runs, to_frame([tap("late", 1, 0.5)]), 10.0)
    assert (found.failure, found.stored) == (None, stored)


def test_weights_that_cannot_be_lent_are_named(lent: Any) -> None:
    found = lent(LendingRuns(SessionError("w cannot be grafted\nmore")))
    assert (bool(found), found.failure) == (False, "w cannot be grafted")
    with pytest.raises(VerdictAbandoned):
        lent(LendingRuns(VerdictAbandoned("edited")))
    closed = LendingRuns(SessionError("the session ended"))
    closed.closed = True
    with pytest.raises(SessionError, match="the session ended"):
        lent(closed)


def test_weights_that_bring_the_results_little_farther_apart_stay_lent(lent: Any) -> None:
    runs = LendingRuns(1.5e-3)
    assert lent(runs)
    assert not runs.was_returned


def test_the_pairs_of_one_look_are_all_of_one_run() -> None:
    runs = Runs({"h": (X, 2 * X)}, {"h": (X, 3 * X), "k": (X, X + 1)})
    runs.both("earlier", RunFilters())
    found, frame = mechanisms(runs), frame_of(line("h", 1, 9.0), line("k", 2, 9.0))
    found.note_pairs(frame, ["h", "k"], rows_of(frame[:1]))
    hints = found.hints(frame, ["h", "k"])
    assert "3" in hints["h"]
    assert set(hints) == {"h", "k"}


def test_rows_without_a_measured_value_have_no_distance() -> None:
    assert math.isnan(_distance(to_frame([tap("a", 1, status="missing")._replace(rel_l2=None)]), None))
    assert math.isnan(_distance(to_frame([tap("a", 1)._replace(rel_l2=None)]), None))
    assert _distance(to_frame([tap("a", 1, 1e-4), tap("b", 2, 1e-3)]), None) == pytest.approx(100)
    assert _distance(to_frame([tap("a", 1, 1e-4, nonfinite_differ=1)]), None) == math.inf
    # A gradient comes after the values, whatever its place.
    grad = tap("a", 9, 0.5, own={"kind": "grad"})
    assert _distance(to_frame([tap("a", 1, 1e-4), grad]), None) == pytest.approx(10)
    repeated = tap("first", 2, 1e-2, own={"recompute_status": "recompute"})
    assert _distance(to_frame([tap("a", 1, 1e-4), repeated]), None) == pytest.approx(10)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        # A batch of sequences beside packed ones, and rows found in each batch: inputs have their rows there, too.
        (("a.norm", "b.norm", "a b c -> (a b) c"), "a b ... -> (a b) ..."),
        (("a.norm", "b.norm", "rows(of='ids', into='tokens')", "target"), "rows(of='ids', into='tokens')"),
        # The output's features may be arranged otherwise than the input's, and dims of length 1 need no layout.
        (("a.norm", "b.norm", "a b (c d) -> (a b) d c, c=2"), "same"),
        (("a.norm", "b.norm", "1 a b -> a b"), "same"),
        # Another pair of one of the two taps.
        (("a.other", "b.norm", "a b c -> (a b) c"), "same"),
    ],
)
def test_inputs_of_modules_have_their_rows_where_outputs_have_them(rule: tuple[Any, ...], expected: str) -> None:
    names = ("a.norm", "b.norm")
    (found,) = _rules_of_inputs([(f"{names[0]}{SUFFIX}", f"{names[1]}{SUFFIX}")], [PairRule(*rule)])
    assert (found.baseline, found.target, found.layout) == (f"{names[0]}{SUFFIX}", f"{names[1]}{SUFFIX}", expected)
    assert found.whole == (rule[3] if len(rule) > 3 else "baseline")


def test_a_group_without_numbers_in_some_call_is_looked_at_where_it_has_some() -> None:
    runs = Runs({"h.0": (X, 3 * X), "h.1": (X, 2 * X)})
    frame = frame_of(line("h.0", 1, math.nan, group="h", label="culprit"), line("h.1", 2, 9.0, group="h"))
    assert mechanisms(runs).hints(frame, ["h"])["h"].startswith("at h.1, ")


def test_a_cache_is_explained_by_the_tap_just_before_it_and_not_by_a_simple_change() -> None:
    fed = torch.randn(12, 8, generator=torch.Generator().manual_seed(1))
    cache = torch.cat([torch.zeros(4, 8), fed])
    stale = cache.clone()
    stale[6:8] = X[:2]
    names = [f"early.{n}" for n in range(8)]
    pairs = {**dict.fromkeys(names, (X[:1], X[:1])), "fed": (fed, fed), "cache": (cache, stale)}
    lines = [line(name, place) for place, name in enumerate([*names, "fed"])]
    frame = frame_of(*lines, line("cache", 99, 9.0), line("after", 100), line("other rank", 98, rank=1))
    runs = Runs(pairs)
    hint = mechanisms(runs).hints(frame, ["cache"])["cache"]
    assert hint.startswith("at cache, indices 6-7 of dim 0 were not computed in this call, a stale or wrongly indexed")
    assert "fed, which feeds it, agrees" in hint
    # The eight taps before it are looked at, and no other.
    assert {name for name, *_ in runs.calls} == {"cache", *names[1:], "fed"}
