"""Two jobs without a notebook, configured by environment variables, make rows in their run folder."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from kit import warm
from kit.deadline import DEADLINE
from kit.job_scripts import end, start, variables
from kit.support import wait_until

import graftlab as gl
from graftlab.config import GraftConfig

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


def ranks_of(
    script: str, role: str, mine: int, baseline: int, target: int, *arguments: object, **settings: object
) -> list[warm.Running]:
    jobs = []
    for rank in range(mine):
        ranked = {"RANK": str(rank), "WORLD_SIZE": str(mine)} if mine > 1 else {}
        jobs.append(start(script, *arguments, **variables(role, baseline, target, **settings), **ranked))
    return jobs


def server_has_ended(folder: Path) -> None:
    wait_until(lambda: not (folder / ".rendezvous" / "socket").exists(), "the end of the host")


def test_one_rank_and_three_join_by_a_folder_and_make_rows(tmp_path: Path) -> None:
    told = {"run_dir": tmp_path / "run", "b2t_filter": "layer == 1 and step == 1", "keep_filter": "nam == 'hidden'"}
    jobs = [
        *ranks_of("trusted_model.py", "baseline", 1, 1, 3, **told),
        *ranks_of("engine_rank.py", "target", 3, 1, 3, **told),
    ]
    ends = [end(job) for job in jobs]
    assert [code for code, _, _ in ends] == [0] * 4, ends
    assert ends[0][1] == "done True\n"
    # A mistake in a filter would show as nothing at all.
    said = "keep_filter (GRAFTLAB_KEEP_FILTER) is \"nam == 'hidden'\" and matched no tap here: 0 of "
    assert [said in err for _, _, err in ends] == [True, True, False, False]
    assert "did you mean 'name'?" in ends[1][2]
    server_has_ended(tmp_path / "run")
    frame = gl.load_run(tmp_path / "run")
    measured = frame[frame["name"] == "hidden"]
    assert len(measured) == 3 * 3 * 2
    assert set(measured[measured["layer"] == 0]["rel_l2"]) == {0.0}
    grafted = measured[measured["status"] == "grafted"]
    assert set(zip(grafted["step"], grafted["layer"], strict=True)) == {(1, 1)}
    assert sorted(grafted["rank"]) == [0, 1, 2]
    assert set(grafted["aligned_by"]) == {"slice dim=1"}
    wrong = measured[(measured["layer"] == 1) & (measured["status"] == "compared")]
    assert wrong["rel_l2"].to_numpy() == pytest.approx(0.05, rel=1e-4)
    # What only the baseline has is reported, once it is known that no rank asks for it.
    assert frame[frame["name"] == "logits"]["status"].tolist() == ["unmatched"] * 3
    assert gl.plots.divergence(frame) is not None
    log = (tmp_path / "run" / "logs" / "target-2.log").read_text()
    assert log.count("grafted b2t at tap 'hidden' step 1") == 1


def test_both_sides_join_by_a_port_and_a_second_start_is_another_run(tmp_path: Path) -> None:
    told = {"address": "localhost", "port": 20001, "group_name": f"{tmp_path.name}-{os.getpid()}", "run_dir": tmp_path}
    rendezvous = GraftConfig(address="localhost", port=20001, group_name=str(told["group_name"])).rendezvous
    for _ in range(2):
        jobs = [
            *ranks_of("trusted_model.py", "baseline", 1, 1, 1, 1, **told),
            *ranks_of("engine_rank.py", "target", 1, 1, 1, 1, **told),
        ]
        assert [end(job)[0] for job in jobs] == [0, 0]
        server_has_ended(rendezvous)
    assert sorted(gl.load_run(tmp_path)["run"].unique()) == [0, 1]


def test_a_wrong_world_size_is_an_error_on_every_rank(tmp_path: Path) -> None:
    jobs = [
        start(
            "engine_rank.py",
            **variables("target", 1, 3, run_dir=tmp_path),
            RANK=str(rank),
            WORLD_SIZE="2",
        )
        for rank in range(2)
    ]
    for job in jobs:
        code, _, err = end(job)
        assert code == 1
        assert "target_world_size (GRAFTLAB_TARGET_WORLD_SIZE) is 3, and this job has 2 processes" in err


def test_sides_with_different_filters_are_refused(tmp_path: Path) -> None:
    first = start("trusted_model.py", **variables("baseline", 1, 1, run_dir=tmp_path))
    try:
        wait_until(lambda: "baseline[0] has joined" in _read(tmp_path / "session-server.log"), "the baseline's joining")
        second = start("engine_rank.py", **variables("target", 1, 1, run_dir=tmp_path, compare_filter="layer == 0"))
        code, _, err = end(second)
        assert code == 1
        assert "compare_filter (GRAFTLAB_COMPARE_FILTER) is 'layer == 0' here, but 'True' in the job that" in err
        assert len(gl.load_run(tmp_path)) == 0
    finally:
        first.kill()
        end(first)


def test_a_job_that_waits_in_vain_warns_once_and_continues_without_graftlab(tmp_path: Path) -> None:
    # The first of two ranks starts the host, which takes its time; so that of the second is for the target alone.
    first, waits = (
        {**variables("baseline", 2, 1, run_dir=tmp_path, timeout=limit), "RANK": str(rank), "WORLD_SIZE": "2"}
        for rank, limit in ((0, DEADLINE), (1, 8))
    )
    holds = start("trusted_model.py", **first)
    try:
        wait_until(
            lambda: "baseline[0] has joined" in _read(tmp_path / "session-server.log"), "the joining of the first"
        )
        code, out, err = end(start("trusted_model.py", **waits))
        assert (code, out) == (0, "done False\n")
        assert err.count("GraftWarning") == 1
        assert "target[0] had not joined within 8 s" in err
    finally:
        holds.kill()
        end(holds)


def test_a_killed_side_frees_the_other_which_continues(tmp_path: Path) -> None:
    stays = start(
        "trusted_model.py",
        40,
        **variables("baseline", 1, 1, run_dir=tmp_path, t2b_filter="layer == 0", compare_filter=""),
    )
    killed = start(
        "dies_in_step.py", 3, **variables("target", 1, 1, run_dir=tmp_path, t2b_filter="layer == 0", compare_filter="")
    )
    assert end(killed)[0] == -signal.SIGKILL
    code, out, err = end(stays)
    assert (code, out) == (0, "done True\n"), err
    server_has_ended(tmp_path)
    frame = gl.load_run(tmp_path)
    received = frame[(frame["name"] == "hidden") & (frame["layer"] == 0)].sort_values("step")
    assert received["status"].tolist() == ["grafted"] * 3 + ["missing"] * 37
    assert "died" in received["error"].iloc[-1]


def test_a_failure_in_graftlab_costs_a_job_its_taps_with_one_warning(tmp_path: Path) -> None:
    told = {"run_dir": tmp_path, "compare_filter": "layer == 0"}
    trusted = start("trusted_model.py", 4, **variables("baseline", 1, 1, **told))
    failing = start("fails_inside.py", **variables("target", 1, 1, **told))
    code, out, err = end(failing)
    assert (code, out) == (0, "done\n"), err
    assert err.count("GraftWarning") == 1
    assert "graftlab failed on target[0] and stopped taking taps; the job continues (planted in graftlab)" in err
    code, out, err = end(trusted)
    assert (code, out) == (0, "done True\n"), err
    server_has_ended(tmp_path)
    assert (gl.load_run(tmp_path)["status"] == "compared").sum() == 1


def test_a_failure_in_graftlab_does_not_keep_the_other_side_waiting(tmp_path: Path) -> None:
    told = {"run_dir": tmp_path, "compare_filter": "layer == 0"}
    failing = start("fails_inside.py", **variables("baseline", 1, 1, **told))
    waits = start("trusted_model.py", 4, **variables("target", 1, 1, **told))
    assert end(failing)[0] == 0
    code, out, err = end(waits)
    assert (code, out) == (0, "done True\n"), err
    server_has_ended(tmp_path)
    rows = gl.load_run(tmp_path)
    assert rows["status"].tolist() == ["compared", "missing", "missing", "missing"]
    # The step at which it fails ends a moment before the run does.
    assert rows["error"].str.contains(r"baseline\[0\] ended the (?:step|run) without this tap").sum() == 3


def test_the_environment_makes_a_job_record_taps_that_its_filter_matches(tmp_path: Path) -> None:
    told = {"GRAFTLAB_RECORD": str(tmp_path), "GRAFTLAB_RECORD_FILTER": "layer == 1"}
    code, out, err = end(start("trusted_model.py", 2, **told))
    assert (code, out) == (0, "done False\n"), err
    recorded = gl.Recording(tmp_path).frame
    assert recorded[["step", "name", "layer"]].values.tolist() == [[0, "hidden", 1], [1, "hidden", 1]]


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""
