"""What a verdict says of jobs: whether they repeat a step, which floor that leaves, and what they were given."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame
from graftlab.verdict.added import added_frame
from graftlab.verdict.findings import Findings, JobRemarks
from graftlab.verdict.job_remarks import (
    data_of_jobs,
    more_in_other_steps,
    remarks_on_jobs,
    remarks_on_recording,
    remarks_on_rows,
)
from graftlab.verdict.model_data import RunData
from graftlab.verdict.wording import text_of


def row(order: int, name: str, rel_l2: float = 0.0, dtype: str = "float32", **tags: Any) -> Row:
    made = Row(0, 0, order, name, {"name": name, **tags}, "b2t", "target", 0, "compared", [0], [2], dtype)
    return made._replace(
        numel=2, rel_l2=rel_l2, max_abs=rel_l2, nonfinite_differ=0, mean_baseline=1.0, std_baseline=0.0
    )


WATCHED = [row(1, "w", kind="param"), row(2, "input.x", kind="input"), row(3, "y")]


def remarks(rows: list[Row], **given: Any) -> JobRemarks:
    usual = {"moved": [], "target_moved": [], "given": None, "steps": 1, "weights_grafted": None, "threshold": 5.0}
    frame = to_frame(rows)
    return remarks_on_jobs(frame, frame, **{**usual, **given})


def test_repeating_jobs_that_show_their_inputs_have_no_remark() -> None:
    assert remarks(WATCHED) == JobRemarks(None, "")


@pytest.mark.parametrize(("dtype", "constant"), [("float32", 1e-5), ("bfloat16", 2e-2)])
def test_a_baseline_that_does_not_repeat_gets_an_assumed_floor_and_a_remark(dtype: str, constant: float) -> None:
    job_remarks = remarks([*WATCHED, row(4, "z", dtype=dtype)], moved=["y", "z"])
    assert (job_remarks.constant, job_remarks.floor) == (constant, "assumed ")
    (said,) = job_remarks.basis
    assert said.startswith("The jobs do not repeat a step: from one to the next, the baseline differs at y, z. So the ")
    assert f"assumed for {dtype} (rel_l2 {constant:.1g}), no code was swapped" in said
    assert "dropout or other random numbers would not be noticed" in said


def test_a_given_floor_counts_whether_or_not_jobs_repeat() -> None:
    assert remarks(WATCHED, given=1e-3).constant == 1e-3
    assert "The jobs do not repeat a run of 2 steps: " in remarks(WATCHED, moved=["y"], steps=2).basis[0]
    moving = remarks(WATCHED, given=1e-3, moved=["y"], steps=4)
    assert (moving.constant, moving.floor) == (1e-3, "given ")
    assert moving.basis[0].startswith("The jobs do not repeat a run of 4 steps: ")
    assert "the floor is the given one (rel_l2 0.001)" in moving.basis[0]


def test_a_target_that_alone_does_not_repeat_is_reported() -> None:
    job_remarks = remarks(WATCHED, target_moved=["a", "b", "c", "d"])
    assert job_remarks.first[0].startswith("The baseline repeats a step and the target does not: ")
    assert "differs at a, b, c and 1 more. No code was swapped" in job_remarks.first[0]
    assert job_remarks.constant is None


def test_inputs_and_weights_without_taps_are_reported_as_unknown() -> None:
    said = " ".join(remarks([row(1, "y")]).unseen)
    assert "whether both jobs have the same inputs, which no tap shows" in said
    assert "whether both jobs have the same weights, which no tap shows (gl.watch(params=True))." in said
    assert "so none was grafted" in " ".join(remarks([row(1, "y")], weights_grafted=0).unseen)


def test_differing_weights_that_are_not_grafted_qualify_the_named_groups() -> None:
    rows = [row(1, "w", 0.1, kind="param"), *WATCHED[1:]]
    assert "differing weights may explain what is named" in remarks(rows).of_named[0]
    grafted = remarks(rows, weights_grafted=3)
    assert (grafted.of_named, len(grafted.last)) == ((), 1)


def test_updates_of_weights_are_judged_only_if_grafted() -> None:
    rows = [*WATCHED, row(4, "w", kind="param", updated=True)]
    assert "how the optimizers' steps update the weights" in remarks(rows).unseen[0]
    assert remarks(rows, weights_grafted=1).unseen == ()


def test_inputs_that_differ_only_in_grafted_steps_are_reported() -> None:
    same, other = to_frame(WATCHED), to_frame([*WATCHED[:1], row(2, "input.x", 0.5, kind="input")])
    assert data_of_jobs(same, same, 5.0) == []
    assert data_of_jobs(same, other, 5.0) == data_of_jobs(other, same, 5.0) == data_of_jobs(other, other, 5.0)
    assert data_of_jobs(same, other, 5.0)[0].startswith("The inputs already differ: input.x")


def text(rows: list[Row], job_remarks: JobRemarks, label: str) -> str:
    frame: pd.DataFrame = added_frame(to_frame(rows), {}, constant=job_remarks.constant)
    frame.loc[frame["ratio"] > 5, "label"] = label
    return text_of(Findings(frame, 5.0, 1, job_remarks.unseen, job_remarks=job_remarks))


def test_a_recording_has_an_assumed_floor_and_states_what_it_has_no_taps_of() -> None:
    both, neither = to_frame(WATCHED), to_frame([row(1, "y", dtype="bfloat16")])
    known = remarks_on_recording(both, both, None)
    assert (known.constant, known.floor, known.unseen) == (1e-5, "assumed ", ())
    assert known.basis[0].startswith(
        "The baseline is a recording, which computes nothing. So the floor is not measured"
    )
    bare = remarks_on_recording(neither, neither, None)
    assert bare.constant == 2e-2
    inputs, weights = bare.unseen
    assert inputs.startswith("whether both sides have the same inputs, which no tap shows")
    assert weights.startswith("whether both sides have the same weights, which no tap shows")
    assert weights.endswith(".")
    # The floor is that of the run whose taps were grafted.
    given = remarks_on_recording(both, neither, 1e-3)
    assert (given.constant, given.floor) == (1e-3, "given ")
    assert remarks_on_recording(both, neither, None).constant == 2e-2


def test_a_verdict_from_rows_states_what_they_do_not_show() -> None:
    frame, nothing = to_frame(WATCHED), to_frame([])
    settings: Any = {"given": None, "threshold": 5.0, "where": "step 3"}
    plain = remarks_on_rows(frame, frame, RunData(frame, None), **settings)
    assert (plain.constant, plain.floor, plain.unseen, plain.last) == (1e-5, "assumed ", (), ())
    assert plain.basis[0].startswith(
        "This verdict is from the rows of step 3. So the floor is not measured but assumed"
    )
    assert len(plain.of_named) == 1
    grafted = remarks_on_rows(nothing, frame, RunData(frame, 2), **settings)
    assert grafted.unseen == ("what was inherited: no step of this run compared every tap and grafted none.",)
    assert grafted.last[0].startswith("The target has had the baseline's weights since step 2, because")
    unlike = to_frame([row(1, "w", 0.1, kind="param"), *WATCHED[1:]])
    qualified = remarks_on_rows(frame, frame, RunData(unlike, None), **settings)
    assert qualified.of_named[0].startswith("Weights were not grafted, so differing weights may explain what is named.")
    assert qualified.of_named[1:] == plain.of_named


def test_nothing_is_called_rounding_over_an_unmeasured_floor() -> None:
    assert text([row(1, "y", 3e-5)], remarks(WATCHED, moved=["y"]), "culprit").splitlines()[0] == (
        "Nothing that was checked adds more than 5 x the assumed floor of 1e-05 (1 group of taps, at most 3 x "
        "the assumed floor, threshold 5)."
    )
    named = text([row(1, "y", 3e-3)], remarks(WATCHED, moved=["y"]), "culprit")
    assert named.startswith("y is computed differently (added 0.003, 3e+02 x the assumed floor, float32).\n")
    assert "2 x the given floor" in text([row(1, "y", 2e-3)], remarks(WATCHED, given=1e-3), "culprit")


def test_groups_that_add_more_in_other_steps_are_reported_with_the_last_of_these() -> None:
    def said(*steps: int, known: str = "", constant: float | None = 1e-5) -> list[str]:
        rows = [row(1, "y", 0.1)._replace(step=step, status="grafted") for step in steps]
        rows += [
            row(2, "fine", 1e-6)._replace(step=7, status="grafted"),
            row(3, "gone", 0.1)._replace(status="missing"),
        ]
        return more_in_other_steps(to_frame(rows), {known}, JobRemarks(constant, "assumed "), 5.0)

    assert said(3) == [
        "Other steps show more: in step 3, where every tap was grafted too, y added more than 5 x the assumed floor. "
        "verdict(step=3) judges the last of them."
    ]
    (text,) = said(5, 3, 4, 9, 10, 12, 14)
    assert "in steps 3-5, 9-10, 12 and 1 more, where" in text
    assert "verdict(step=14) judges" in text
    assert said() == said(3, known="y") == said(3, constant=None) == []
