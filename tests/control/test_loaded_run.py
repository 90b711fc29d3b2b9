"""What is read back from a run folder: a frame that plots take, a page, and as much of a verdict as rows tell."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from kit.refusals import exactly
from matplotlib.figure import Figure

import graftlab as gl
from graftlab.control.run_folder import describe_session, sizes_of
from graftlab.rows.encoding import encode
from graftlab.rows.schema import Row
from graftlab.rows.store import RowStore


def row(step: int, order: int, name: str, rel_l2: float, status: str = "grafted", **values: Any) -> Row:
    tags = {"name": name, "step": step, "side": "target", "rank": 0, "recompute_status": "original"}
    made = Row(0, step, order, name, tags | values.pop("tags", {}), "b2t", "target", 0, status, [0], [4], "float32")
    usual = {"numel": 4, "rel_l2": rel_l2, "rel_diff": rel_l2**2, "max_abs": rel_l2, "mean_abs": rel_l2, "cosine": 1.0}
    more = {
        "nonfinite_baseline": 0,
        "nonfinite_target": 0,
        "nonfinite_differ": 0,
        "max_abs_index": [0],
        "plan_version": 0,
    }
    both = {f"{what}_{side}": 1.0 for side in ("baseline", "target") for what in ("mean", "std", "min", "max")}
    return made._replace(**{**usual, **more, **both, **values})


def step_of(step: int, errors: Sequence[float], status: str = "grafted") -> list[Row]:
    names = ("layers.0.act", "layers.1.act", "out")
    return [row(step, at, name, error, status) for at, (name, error) in enumerate(zip(names, errors, strict=True), 1)]


def loaded(folder: Path, rows: Sequence[Row]) -> Any:
    folder.mkdir(exist_ok=True)
    store = RowStore(folder)
    store.append([encode(each) for each in rows])
    store.close()
    return gl.load_run(folder)


COMPARED = step_of(0, [0.0, 0.1, 0.3], "compared")
GRAFTED = step_of(1, [0.0, 0.1, 1e-7])


def test_a_loaded_run_is_a_frame_and_derived_frames_are_plain(tmp_path: Path) -> None:
    run = loaded(tmp_path, COMPARED)
    assert isinstance(run, pd.DataFrame)
    assert run["name"].tolist() == ["layers.0.act", "layers.1.act", "out"]
    assert type(run[run["rel_l2"] > 0]) is pd.DataFrame
    assert run.folder == tmp_path


@pytest.mark.parametrize("draw", ["divergence", "history", "over_steps", "ranks"])
def test_every_plot_of_frames_draws_a_loaded_run(tmp_path: Path, draw: str) -> None:
    run = loaded(tmp_path, COMPARED + GRAFTED)
    figure = getattr(gl.plots, draw)(run, *(["out"] if draw in ("history", "ranks") else []))
    assert isinstance(figure, Figure)
    assert figure.axes


def test_the_first_divergent_tap_is_found_in_a_loaded_run(tmp_path: Path) -> None:
    first = gl.plots.first_divergent(loaded(tmp_path, COMPARED))
    assert first is not None
    assert first["name"] == "layers.1.act"


def test_its_report_has_the_newest_runs_taps_and_its_limits(tmp_path: Path) -> None:
    earlier = [each._replace(run=0, name="earlier") for each in COMPARED]
    run = loaded(tmp_path, [*earlier, *(each._replace(run=1, step=5) for each in COMPARED)])
    page = run.report(tmp_path / "page.html").read_text()
    assert "layers.1.act" in page
    assert "earlier" not in page
    assert "The rows of a run do not contain its plan, its code, its tensors, or the environment of its ranks." in page
    assert "No verdict was computed." in page
    with pytest.raises(gl.SessionError, match="cannot be written"):
        run.report(tmp_path / "nowhere" / "page.html")


def test_a_fully_grafted_step_shows_where_errors_arose(tmp_path: Path) -> None:
    run = loaded(tmp_path, COMPARED + GRAFTED)
    verdict = run.verdict()
    assert verdict.named == ["layers.*.act"]
    assert verdict.frame["label"].tolist() == ["clean", "culprit", "inherited"]
    assert verdict.frame["error"].tolist() == [0.0, 0.1, 0.3]
    based = (
        "This verdict is from the rows of step 1 of run 0, in which every tap was grafted. So the floor is not measured"
    )
    assert f"\n{based} but assumed for float32 (rel_l2 1e-05), no code was swapped" in verdict.text
    assert verdict.text.startswith("layers.*.act is computed differently in layer 1 of 0-1 (added 0.1, ")
    assert isinstance(verdict.plot(), Figure)
    assert "layers.*.act is computed differently" in run.report(tmp_path / "page.html", verdict=verdict).read_text()
    assert run.verdict(floor=0.5).named == []
    assert "Nothing that was checked adds more than 5 x the given floor of 0.5" in run.verdict(floor=0.5).text


def test_a_loaded_run_of_misaligned_sides_names_nothing(tmp_path: Path) -> None:
    def shown(step: int, side: str, later: int = 0) -> dict[str, float]:
        return {
            f"{what}_{side}": math.sin(step + later + place) for place, what in enumerate(("mean", "std", "min", "max"))
        }

    rows = [
        row(
            step,
            0,
            "h",
            0.9,
            "compared" if step < 5 else "grafted",
            **shown(step, "baseline"),
            **shown(step, "target", 1),
        )
        for step in range(6)
    ]
    verdict = loaded(tmp_path, rows).verdict()
    assert verdict.text.startswith("The target is ahead by 1 step: its values at h are those that the baseline shows")
    assert verdict.named == []
    assert verdict.labels == {"h": "unmeasured"}


def test_incomplete_or_partly_grafted_steps_are_not_judged(tmp_path: Path) -> None:
    mixed = [*step_of(2, [0.0, 0.0, 0.0])[:2], row(2, 3, "out", 0.9, "compared")]
    back = [each._replace(direction="t2b", side="baseline") for each in step_of(3, [0.7, 0.7, 0.7])]
    short = step_of(4, [0.5, 0.5, 0.5])[:1]
    verdict = loaded(tmp_path, COMPARED + GRAFTED + mixed + back + short).verdict()
    assert "step 1 of run 0" in verdict.text
    assert verdict.frame["added"].tolist() == [0.0, 0.1, 1e-7]


def test_without_a_fully_grafted_step_a_verdict_is_refused(tmp_path: Path) -> None:
    run = loaded(tmp_path, COMPARED)
    with pytest.raises(
        gl.SessionError,
        match=exactly(
            "verdict: in no step of this run was every tap grafted from the baseline, so the rows do not "
            "show where each error arose. Let the jobs run with GRAFTLAB_B2T_FILTER=True; graftlab.plots "
            "shows the differences as they are"
        ),
    ):
        run.verdict()
    with pytest.raises(
        gl.SessionError,
        match=exactly(
            "verdict: in no step of run 7 was every tap grafted from the baseline, so the rows do not show "
            "where each error arose. It has no rows"
        ),
    ):
        run.verdict(run=7)
    with pytest.raises(
        gl.SessionError,
        match=exactly(
            "verdict: in step 0 of run 0 not every tap was grafted from the baseline, so the rows do not "
            "show where each error arose. Let the jobs run with GRAFTLAB_B2T_FILTER=True; graftlab.plots "
            "shows the differences as they are"
        ),
    ):
        run.verdict(run=0, step=0)
    with pytest.raises(
        gl.SessionError,
        match=exactly(
            "verdict: in step 5 of this run not every tap was grafted from the baseline, so the rows do not show "
            "where each error arose. It has no rows"
        ),
    ):
        run.verdict(step=5)


def test_the_refusal_reports_that_every_graft_failed(tmp_path: Path) -> None:
    failed = row(1, 1, "out", 0.0, "failed", error="TransformError: no layout fits")
    with pytest.raises(
        gl.SessionError,
        match=exactly(
            "verdict: in no step of this run was every tap grafted from the baseline, so the rows do not "
            "show where each error arose. No tap was measured on both sides: 1 tap (out) could not be "
            "compared (the transform failed): TransformError: no layout fits. 1 tap (h) is on the target "
            "only"
        ),
    ) as it:
        loaded(tmp_path, [failed, row(1, 2, "h", 0.0, "missing")]).verdict()
    assert "1 tap (h) is on the target only" in str(it.value)
    assert "GRAFTLAB_B2T_FILTER" not in str(it.value)


def test_differences_in_other_grafted_steps_are_reported(tmp_path: Path) -> None:
    clean = [0.0, 0.0, 0.0]
    broken = row(2, 3, "out", 0.0, nonfinite_differ=1)
    rows = [*step_of(1, clean), *step_of(2, clean)[:2], broken, *step_of(3, clean), *step_of(4, clean)]
    run = loaded(tmp_path, rows)
    said = "Other steps show more: in step 2, where every tap was grafted too, out added more than 5 x the assumed"
    text = run.verdict().text
    assert "the rows of step 4 of run 0" in text
    assert said in text
    assert run.verdict(step=2).named == ["out"]
    assert "Other steps" not in run.verdict(step=2).text
    assert "Other steps" not in loaded(tmp_path / "two", [*step_of(0, [0.0, 0.2, 0.0]), *GRAFTED]).verdict().text


def test_unknown_facts_of_a_loaded_run_are_listed(tmp_path: Path) -> None:
    verdict = loaded(tmp_path, GRAFTED).verdict()
    assert "Not checked: what was inherited: no step of this run compared every tap and grafted none." in (
        verdict.text.splitlines()
    )
    assert verdict.frame["error"].isna().all()


def test_differing_weights_are_reported_and_need_no_graft(tmp_path: Path) -> None:
    weight = row(0, 0, "w", 0.2, "compared", tags={"kind": "param"})
    verdict = loaded(tmp_path, [weight, *COMPARED, weight._replace(step=1), *GRAFTED]).verdict()
    assert "w" not in set(verdict.frame["name"])
    assert verdict.text.startswith("The weights already differ: w (rel_l2 0.2).")
    assert "differing weights may explain what is named" in verdict.text


def test_grafted_weights_are_reported_to_have_differed_before(tmp_path: Path) -> None:
    kind = {"kind": "param"}
    before = [row(0, 0, "w", 0.2, tags=kind), *step_of(0, [0.0, 0.0, 0.0])]
    after = [row(1, 0, "w", 0.0, tags=kind), *GRAFTED]
    of_grafted = "The target has had the baseline's weights since step 0"
    for rows in ([*before, *after], [*before, *step_of(2, [0.0, 0.1, 0.3], "compared"), *after]):
        text = loaded(tmp_path / str(len(rows)), rows).verdict().text
        assert text.startswith("The weights already differ: w (rel_l2 0.2).")
        assert of_grafted in text
        assert "which no tap shows (gl.watch(params=True))" not in text
        assert "may be the doing" not in text
    assert of_grafted not in loaded(tmp_path / "compared", [*COMPARED, *GRAFTED]).verdict().text


def test_inputs_shown_only_in_a_grafted_step_are_known(tmp_path: Path) -> None:
    unknown = "whether both jobs have the same inputs, which no tap shows"
    assert unknown in loaded(tmp_path / "none", GRAFTED).verdict().text
    for error in (0.0, 0.5):
        given = row(1, 0, "input.x", error, tags={"kind": "input"})
        text = loaded(tmp_path / str(error), [given, *GRAFTED]).verdict().text
        assert unknown not in text
        assert ("The inputs already differ: input.x" in text) == (error > 0)


def shared_batch(weights: float) -> list[Row]:
    """A step of two ranks that each take the mean over half of the batch; weights' gradients are scaled so."""
    rows = []
    for name, kind, factor in (("out", "grad", 2.0), ("up.weight", "param_grad", weights)):
        for rank in (0, 1):
            made = row(1, len(rows), name, abs(factor - 1), tags={"kind": kind}, rank=rank)
            rows.append(made._replace(rank=rank, mean_target=factor, std_target=factor))
    return rows


def test_gradients_that_even_out_over_the_ranks_are_not_named(tmp_path: Path) -> None:
    run = loaded(tmp_path, shared_batch(0.5))
    assert run.verdict().named == ["out@grad", "up.weight@param_grad"]
    describe_session(tmp_path, (1, 2), 0)
    assert run.verdict().named == []
    assert "On each of the target's 2 ranks, gradients are 2 times the baseline's" in run.verdict().text
    # As many ranks on both sides; or of another run of the folder.
    for sizes, first_run in (((2, 2), 0), ((1, 2), 1)):
        describe_session(tmp_path, sizes, first_run)
        assert run.verdict().named == ["out@grad", "up.weight@param_grad"]


def test_the_sizes_of_a_run_are_known_from_the_first_run_with_them(tmp_path: Path) -> None:
    assert sizes_of(tmp_path, 0) is None
    describe_session(tmp_path, (1, 2), 3)
    describe_session(tmp_path, (1, 2), 5)
    assert [sizes_of(tmp_path, run) for run in (2, 3, 5)] == [None, (1, 2), (1, 2)]
    describe_session(tmp_path, (2, 2), 6)
    assert [sizes_of(tmp_path, run) for run in (5, 6)] == [None, (2, 2)]
    (tmp_path / "session.json").write_text('{"ranks": 3')
    assert sizes_of(tmp_path, 6) is None


def test_a_folder_may_be_given_from_the_home_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    store = RowStore(tmp_path / "run")
    store.append([encode(row(0, 1, "a", 0.0))])
    store.close()
    monkeypatch.setenv("HOME", str(tmp_path))
    assert gl.load_run("~/run").folder == tmp_path / "run"
