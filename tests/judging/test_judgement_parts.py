"""What a verdict does where one of its stages fails, without a rank."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from graftlab.errors import RunError, SessionError
from graftlab.judging.attempts import Attempts
from graftlab.judging.job_steps import JobStepsAbandoned
from graftlab.judging.judgement import _unseen_dtype
from graftlab.judging.swaps import _is_same_layer
from graftlab.judging.unmeasured import baseline_changed, effects_not_measured, outputs_themselves
from graftlab.verdict.causes import Causes


@pytest.fixture
def session() -> Any:
    return SimpleNamespace(closed=False)


@pytest.fixture
def attempt(session: Any) -> Attempts:
    return Attempts(session)


def raising(error: Exception) -> Any:
    def stage() -> Any:
        raise error

    return stage


def test_a_failed_stage_is_reported_with_the_first_line_of_its_error(
    attempt: Attempts, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert attempt("the search", raising(SessionError("\na rank died\nits log ends")), 7) == 7
        assert not caplog.records
        assert attempt("the swap", raising(KeyError("rope\nand more")), 8) == 8
        assert attempt("the swap", raising(ZeroDivisionError()), 9) == 9
    # The traceback of what is a defect of graftlab, and of nothing else.
    assert [record.exc_info is not None for record in caplog.records] == [True, True]
    assert attempt.failed == [
        "The search failed, so its results are missing: a rank died",
        r"The swap failed, so its results are missing: KeyError: 'rope\nand more'",
        "The swap failed, so its results are missing: ZeroDivisionError",
    ]
    assert attempt("the search", lambda: 3, 4) == 3


def test_a_stage_in_which_a_rank_died_says_how(attempt: Attempts) -> None:
    died = "target[1] died: killed by SIGKILL. Its log (/logs/target-1.log) ends:"
    attempt("the search", raising(RunError(f"run 3 failed on target[1]\n\n{died}\nthe log")), None)
    assert attempt.failed == [
        "The search failed, so its results are missing: run 3 failed on target[1]: target[1] died: killed by SIGKILL"
    ]


@pytest.mark.parametrize(
    ("computed_in", "dtypes", "casts", "unseen"),
    [
        ("bfloat16", ["float32", "bfloat16"], [None, None], ""),
        # Only the target's tensor has that dtype.
        ("bfloat16", ["float32", "bfloat16"], [None, "float32 -> bfloat16"], "bfloat16"),
        ("bfloat16", ["float32", "float32"], [None, None], "bfloat16"),
        ("", ["float32", "float32"], [None, None], ""),
    ],
)
def test_a_dtype_of_the_baseline_that_no_tap_shows_is_named(
    computed_in: str, dtypes: list[str], casts: list[str | None], unseen: str
) -> None:
    frame = pd.DataFrame({"dtype": dtypes, "cast": casts})
    assert _unseen_dtype(computed_in, "", frame) == unseen
    # Its taps may have that dtype, and none of them a partner.
    of_taps = "" if "bfloat16" in dtypes else "bfloat16"
    assert _unseen_dtype("", "bfloat16", frame) == of_taps


def test_stages_of_several_lines_show_one(attempt: Attempts) -> None:
    attempt("the search", raising(ValueError("first\nsecond")), None)
    assert attempt.failed == ["The search failed, so its results are missing: ValueError: first"]


@pytest.mark.parametrize("error", [JobStepsAbandoned("the user pressed stop"), OSError("the socket is closed")])
def test_after_an_abandoned_stage_no_other_is_begun(session: Any, attempt: Attempts, error: Exception) -> None:
    session.closed = isinstance(error, OSError)
    attempt("the search", raising(error), None)
    assert attempt("the swap", lambda: pytest.fail("it was begun"), 5) == 5
    assert len(attempt.failed) == 1


def test_an_effect_is_missing_only_if_no_output_was_measured_for_it() -> None:
    swaps: Any = SimpleNamespace(not_swapped={}, unlike_ranks={})
    causes = {"loss": Causes({"a": "a"}), "logits": Causes({"b": "b"})}
    assert effects_not_measured(["a", "b"], causes, swaps) == []
    assert effects_not_measured(["a", "c"], causes, swaps) == ["The effect of c on the output was not measured."]
    swaps = SimpleNamespace(not_swapped=dict.fromkeys("vwxyz"), unlike_ranks=dict.fromkeys(["u"]))
    said = effects_not_measured([], {}, swaps)
    assert said[0] == "Code could not be swapped at v, w, x, y, where the sides would wait for each other."
    assert said[1].startswith("How far the target's u is off could not be measured in every swap")


def test_what_swaps_did_not_show_is_said_of_one_output_and_of_several() -> None:
    assert outputs_themselves([]) == []
    assert outputs_themselves(["a"])[0].startswith("No later tap depends on a: it is an output itself")
    assert outputs_themselves(["a", "b"])[0].startswith("No later tap depends on a, b: they are outputs themselves")
    assert "the same values at a, b, c, so the swaps" in baseline_changed("abcd")


@pytest.mark.parametrize(
    ("mine", "theirs", "same"),
    [
        ({"layer": 1, "token": 1}, {"layer": 1, "token": 2}, True),
        ({"layer": 1}, {"layer": 2}, False),
        ({"kind": "grad"}, {}, False),
        ({}, {"request": 1}, True),
    ],
)
def test_calls_of_a_tap_are_of_one_layer_whatever_their_token_is(
    mine: dict[str, Any], theirs: dict[str, Any], same: bool
) -> None:
    assert _is_same_layer(mine, theirs) is same
