"""A job's warnings at its end: filters that matched no tap, and nothing compared."""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from graftlab.config import GraftConfig
from graftlab.jobs import attach
from graftlab.jobs.job_log import nothing_measured, unmatched_filters

TAPS = [
    {"name": name, "layer": 0, "step": 0, "side": "target", "rank": 0, "recompute_status": "normal"}
    for name in ("hidden", "out")
]


@pytest.mark.parametrize(
    ("filters", "said"),
    [
        ({"b2t_filter": "name == 'hidden'"}, []),
        ({"b2t_filter": " "}, []),
        # Tags are those of the rank and the step at which a tap was seen first.
        ({"b2t_filter": "step == 3"}, []),
        ({"keep_filter": "side == 'baseline'"}, []),
        (
            {"b2t_filter": "nam == 'hidden'"},
            ["b2t_filter (GRAFTLAB_B2T_FILTER) is \"nam == 'hidden'\" and matched no tap here: 0 of 2 seen;"],
        ),
        (
            {"t2b_filter": "name == 'hiden'", "compare_filter": "layer == 1"},
            [
                "t2b_filter (GRAFTLAB_T2B_FILTER) is \"name == 'hiden'\" and matched no tap here: 0 of 2 seen; did you",
                "compare_filter (GRAFTLAB_COMPARE_FILTER) is 'layer == 1' and matched no tap here: 0 of 2 seen",
            ],
        ),
    ],
)
def test_each_filter_without_a_match_is_named_and_no_other(filters: dict[str, Any], said: list[str]) -> None:
    config = GraftConfig(**filters)
    found = unmatched_filters(config, config.plan(), TAPS)
    assert [each[: len(start)] for each, start in zip(found, said, strict=True)] == said


@pytest.mark.parametrize(
    ("statuses", "said"),
    [
        ({}, ""),  # it sends, or its plan asks for nothing
        ({"unmatched": 4}, ""),
        ({"missing": 4, "compared": 1}, ""),
        ({"missing": 4, "grafted": 1}, ""),
        (
            {"missing": 1_004},
            "(hidden, out) received nothing to compare: 1,004 missing (it ended). A tap pairs with one of",
        ),
        ({"failed": 2, "timeout": 1}, "nothing to compare: 2 failed; 1 timeout. gl.load_run('/runs/1') has the rows"),
    ],
)
def test_a_job_warns_when_nothing_it_received_was_compared(statuses: dict[str, int], said: str) -> None:
    found = nothing_measured(TAPS, statuses, {"missing": "it ended\n..."}, Path("/runs/1"))
    assert said in found
    assert bool(found) == bool(said)


def test_a_job_warns_when_it_reached_no_tap() -> None:
    assert "no tap was reached here" in nothing_measured([], {}, {}, Path("/runs/1"))


def test_no_filter_warning_under_a_notebooks_plan_or_without_taps() -> None:
    config = GraftConfig(b2t_filter="name == 'nobody'")
    assert len(unmatched_filters(config, config.plan(), TAPS)) == 1
    assert unmatched_filters(config, config.plan().edit(b2t="name == 'out'"), TAPS) == []
    assert unmatched_filters(config, config.plan(), []) == []


@pytest.mark.parametrize(
    ("forked", "parent", "warns"), [(0, None, True), (1, None, False), (0, "a process of multiprocessing", False)]
)
def test_only_the_process_that_was_to_join_warns_that_it_never_did(
    forked: int, parent: object, warns: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    warned: list[str] = []
    monkeypatch.setattr(attach, "warn_never_joined", warned.append)
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: parent)
    monkeypatch.setattr(sys, "argv", ["/somewhere/train.py"])
    attach._warn_at_exit(os.getpid() - forked)
    assert warned == ["train.py"] * warns
