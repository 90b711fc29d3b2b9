"""Remarks of a verdict on jobs beside its conclusion: whether they repeat a step, and what remains unknown."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from graftlab.base.tap_groups import described, group_of, is_data, kind_of
from graftlab.base.text import first_of, spans
from graftlab.diffs.rounding import assumed_floor
from graftlab.rows.schema import MEASURED
from graftlab.verdict.added import ratio, records
from graftlab.verdict.findings import JobRemarks
from graftlab.verdict.floor import Floor
from graftlab.verdict.model_data import RunData, data_rows, differing_data, input_names

_GRAFT_THEM = "session.verdict(graft_weights=True)"
_MOST_STEPS = 6
_NO_INPUTS = "whether both {} have the same inputs, which no tap shows (gl.watch(inputs=True))."
_NO_WEIGHTS = "whether both {} have the same weights, which no tap shows (gl.watch(params=True))"
_NO_LINES_OF_ROWS = "No line of source is named: this needs steps of the jobs in a session (gl.listen)."
_LET_ROWS_GRAFT_THEM = "GRAFTLAB_B2T_FILTER=True"


def remarks_on_jobs(
    compared: pd.DataFrame,
    grafted: pd.DataFrame,
    *,
    moved: Sequence[str],
    target_moved: Sequence[str],
    given: float | None,
    steps: int,
    weights_grafted: int | None,
    threshold: float,
) -> JobRemarks:
    """The remarks on jobs.

    ``moved`` are the taps at which the baseline differed from one step to the next, ``target_moved`` those of the
    target; ``given`` is the user's floor, ``weights_grafted`` the number of grafted weights, or None if the user did
    not ask to graft them.
    """
    constant, word, words = _floor(grafted, given, repeats=not moved)
    first, basis = [], []
    step = "a step" if steps == 1 else f"a run of {steps} steps"
    if moved:
        basis.append(
            f"The jobs do not repeat {step}: from one to the next, the baseline differs at {first_of(moved)}. So "
            f"{words}, no code was swapped to see what moves the output, and dropout or other random numbers would "
            "not be noticed."
        )
    elif target_moved:
        first.append(
            f"The baseline repeats {step} and the target does not: from one to the next, it differs at "
            f"{first_of(target_moved)}. No code was swapped to see what moves the output. State that only the target "
            "carries over (weights, a cache, random numbers) may explain everything that is named."
        )
    unseen, of_named, last = _given_to_both(compared, weights_grafted, threshold, _GRAFT_THEM)
    return JobRemarks(constant, word, tuple(first), tuple(basis), tuple(unseen), tuple(of_named), tuple(last))


def _shows_weights(compared: pd.DataFrame) -> bool:
    return any(kind_of(row["tags"]) == "param" for row in records(data_rows(compared)))


def remarks_on_recording(compared: pd.DataFrame, grafted: pd.DataFrame, given: float | None) -> JobRemarks:
    """The remarks on a recording as baseline, which shows the same values whatever is grafted."""
    constant, word, words = _floor(grafted, given, repeats=False)
    basis = (
        f"The baseline is a recording, which computes nothing. So {words}, and no code was swapped to see what moves "
        "the output."
    )
    # Unlike two functions, a recording is not called with the same arguments.
    unseen = [] if input_names(compared) else [_NO_INPUTS.format("sides")]
    unseen += [] if _shows_weights(compared) else [_NO_WEIGHTS.format("sides") + "."]
    return JobRemarks(constant, word, basis=(basis,), unseen=tuple(unseen))


def remarks_on_rows(
    compared: pd.DataFrame,
    grafted: pd.DataFrame,
    shown: RunData,
    *,
    given: float | None,
    threshold: float,
    where: str,
) -> JobRemarks:
    """The remarks on a verdict from rows: of a step in which every tap was grafted, and perhaps of one without grafts.

    ``where`` names the step, ``shown`` has the rows of inputs and weights.
    """
    constant, word, words = _floor(grafted, given, repeats=False)
    basis = (
        f"This verdict is from the rows of {where}. So {words}, no code was swapped to see what moves the output, and "
        "whether the code repeats itself is not known."
    )
    weights_grafted = None if shown.grafted_from is None else 1
    unseen, of_named, last = _given_to_both(shown.rows, weights_grafted, threshold, _LET_ROWS_GRAFT_THEM)
    if shown.grafted_from is not None:
        last = [
            f"The target has had the baseline's weights since step {shown.grafted_from}, because the filter that "
            "grafts every tap matches them too."
        ]
    of_named.append(_NO_LINES_OF_ROWS)
    if not len(compared):
        unseen.append("what was inherited: no step of this run compared every tap and grafted none.")
    return JobRemarks(constant, word, (), (basis,), tuple(unseen), tuple(of_named), tuple(last))


def _given_to_both(
    compared: pd.DataFrame, weights_grafted: int | None, threshold: float, graft_them: str
) -> tuple[list[str], list[str], list[str]]:
    """Sentences on unknown inputs and weights, a caveat if anything is named, and how the target was changed."""
    unseen: list[str] = []
    of_named: list[str] = []
    last: list[str] = []
    if not input_names(compared):
        unseen.append(_NO_INPUTS.format("jobs"))
    if not _shows_weights(compared):
        told = "; so none was grafted" if weights_grafted is not None else ""
        unseen.append(_NO_WEIGHTS.format("jobs") + f"{told}.")
    elif weights_grafted is not None:
        last.append("From now on the target has the baseline's weights (graft_weights=True).")
    elif any(each.startswith("The weights already differ") for each in differing_data(compared, threshold)):
        of_named.append(
            f"Weights were not grafted, so differing weights may explain what is named. {graft_them} first gives the "
            "target the baseline's weights, permanently."
        )
    if weights_grafted is None and updates(compared).any():
        unseen.append(f"how the optimizers' steps update the weights: that needs permanent grafts ({graft_them}).")
    return unseen, of_named, last


def data_of_jobs(compared: pd.DataFrame, grafted: pd.DataFrame, threshold: float) -> list[str]:
    """Like :func:`.differing_data`, where the inputs of either run may differ between the sides."""
    sentences = differing_data(compared, threshold)
    if not any(sentence.startswith("The inputs") for sentence in sentences):
        sentences += [sentence for sentence in differing_data(grafted, threshold) if sentence.startswith("The inputs")]
    return sentences


def more_in_other_steps(others: pd.DataFrame, known: set[str], job_remarks: JobRemarks, threshold: float) -> list[str]:
    """A sentence on groups, not ``known``, that add more than the threshold in other steps with every tap grafted."""
    measured = others[others["status"].isin(MEASURED)]
    if not len(measured) or job_remarks.constant is None:
        return []
    floor = Floor(job_remarks.constant, job_remarks.constant * 3)
    # A long run has many rows, and few of them differ.
    differing = measured[(measured["nonfinite_differ"] > 0) | (measured["rel_l2"] > 0)]
    steps: dict[str, set[int]] = {}
    for row in records(differing):
        group = group_of(row["name"], row["tags"])
        if group not in known and ratio(row, floor) > threshold:
            steps.setdefault(group, set()).add(int(row["step"]))
    if not steps:
        return []
    every = sorted({step for found in steps.values() for step in found})
    where = f"step{'s' if len(every) > 1 else ''} {spans(every[:_MOST_STEPS])}"
    where += f" and {len(every) - _MOST_STEPS} more" if len(every) > _MOST_STEPS else ""
    return [
        f"Other steps show more: in {where}, where every tap was grafted too, {first_of([*map(described, steps)])} "
        f"added more than {threshold:g} x the {job_remarks.floor}floor. "
        f"verdict(step={every[-1]}) judges the last of them."
    ]


def _floor(grafted: pd.DataFrame, given: float | None, *, repeats: bool) -> tuple[float | None, str, str]:
    if given is not None:
        return given, "given ", f"the floor is the given one (rel_l2 {given:.1g})"
    if repeats:
        return None, "", ""
    measured = grafted[grafted["status"].isin(MEASURED)]
    constant, dtype = assumed_floor(measured["dtype"].dropna().unique(), measured["cast"].dropna().unique())
    return constant, "assumed ", f"the floor is not measured but assumed for {dtype} (rel_l2 {constant:.1g})"


def updates(rows: pd.DataFrame) -> pd.Series[bool]:
    """A mask of the rows that show the result of an optimizer's step: a weight, or the optimizer's state."""
    found = [kind_of(tags) in ("param", "optimizer") and not is_data(tags) for tags in rows["tags"]]
    return pd.Series(found, index=rows.index, dtype=bool)
