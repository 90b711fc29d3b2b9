"""Runs that feed back what they chose: named where no tap shows it, and said to be held where one does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import pytest

from graftlab.verdict.free_running import held_choices, runs_freely

Tap = tuple[str, str, Sequence[float], Sequence[float]]
"""A tap's name, dtype, and its added error and error in each step."""

CLEAN = [0.0] * 4


def frame(taps: Sequence[Tap], *, one_step: bool = False, **tags: Any) -> pd.DataFrame:
    return pd.DataFrame(
        {
            "name": name,
            "group": name,
            "tags": tags,
            "dtype": dtype,
            "rank": 0,
            "step": 0 if one_step else step,
            "occurrence": step if one_step else 0,
            "order": place + (step * len(taps) if one_step else 0),
            "added": added[step],
            "error": error[step],
            "ratio": added[step] / 1e-6,
        }
        for step in range(4)
        for place, (name, dtype, added, error) in enumerate(taps)
    )


LATER = [0.0, 0.0, 0.7, 0.9]
EMBED: Tap = ("embed", "float32", LATER, LATER)
LOGITS: Tap = ("logits", "float32", CLEAN, [0.0, 0.1, 0.7, 0.9])


@pytest.mark.parametrize(("one_step", "where"), [(False, "step 2"), (True, "occurrence 2")])
def test_a_first_tap_that_differs_in_later_steps_alone_is_a_free_run(one_step: bool, where: str) -> None:
    (said,) = runs_freely(frame([EMBED, LOGITS], one_step=one_step), ["embed"], 5.0)
    assert said.startswith(f"From {where} on, each side probably generates freely: embed, the first tap")
    assert f"such as a token chosen from logits; differences from {where} on may be its consequences" in said


@pytest.mark.parametrize(
    "taps",
    [
        [("token", "int64", CLEAN, LATER), EMBED, LOGITS],
        [("embed", "float32", [0.7] * 4, [0.7] * 4), LOGITS],
        [("embed", "float32", [0.0, 0.0, 1e-3, 1e-3], LATER), LOGITS],
        [LOGITS, EMBED],
    ],
    ids=["the token is tapped", "from the first step on", "a small error", "it is not the first tap"],
)
def test_other_errors_of_later_steps_are_not_a_free_run(taps: list[Tap]) -> None:
    assert runs_freely(frame(taps), ["embed"], 5.0) == []


def test_layers_that_share_a_name_are_not_later_calls_of_the_first() -> None:
    # As gl.tap("hidden", x, layer=layer) in a loop, with one layer wrong.
    layers = frame([EMBED], one_step=True).assign(occurrence=0)
    assert runs_freely(layers, ["embed"], 5.0) == []


def test_training_is_not_a_free_run() -> None:
    updated = frame([("w", "float32", CLEAN, CLEAN)], kind="optimizer")
    assert runs_freely(pd.concat([frame([EMBED, LOGITS]), updated]), ["embed"], 5.0) == []


def test_tokens_that_only_the_targets_own_run_has_are_said_to_be_held() -> None:
    taps: list[Tap] = [("token", "int64", CLEAN, LATER), ("embed", "float32", CLEAN, LATER), LOGITS]
    (said,) = held_choices(frame(taps), ["logits"])
    assert said.startswith("Running freely, the target has different numbers at token from step 2 on. Here it was giv")
    # A token that is chosen wrongly itself, and one that nothing reads.
    assert held_choices(frame([("token", "int64", LATER, LATER), *taps[1:]]), ["token"]) == []
    last: Tap = ("token", "int64", CLEAN, [0.0, 0.0, 0.0, 1.0])
    assert held_choices(frame([LOGITS, last]), ["logits"]) == []


def test_an_unmeasured_run_is_not_a_free_run() -> None:
    nothing = frame([LOGITS]).iloc[:0]
    assert (runs_freely(nothing, [], 5.0), held_choices(nothing, [])) == ([], [])


def test_whole_numbers_that_come_first_are_the_choice_itself() -> None:
    token: Tap = ("token", "int64", LATER, LATER)
    assert runs_freely(frame([token, LOGITS]), ["token"], 5.0) == []
