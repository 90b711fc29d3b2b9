"""Jobs on several machines: network namespaces with their own addresses, connected by a switch."""

from __future__ import annotations

import json
import threading
from pathlib import Path

import pytest
from kit import warm
from kit.job_scripts import SCRIPTS, end, variables
from kit.machines import Machine, machines
from kit.support import wait_until

import graftlab as gl
from graftlab.exchange.keys import new_token, write_token

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

PORT = 29500


def told(first: Machine, folder: Path, **settings: object) -> dict[str, object]:
    """A job's settings for a session whose server runs on the first machine; the token is in a file."""
    token = folder / "token"
    if not token.exists():
        write_token(token, new_token())
    return {"address": f"tcp://{first.address}:{PORT}", "token_file": token, "timeout": 120, **settings}


def script(name: str, *arguments: object) -> list[str]:
    return [str(SCRIPTS / name), *map(str, arguments)]


def all_end_well(jobs: list[warm.Running]) -> list[str]:
    ends = [end(job) for job in jobs]
    assert [code for code, _, _ in ends] == [0] * len(jobs), ends
    return [out for _, out, _ in ends]


def test_ranks_on_three_machines_make_the_same_rows_as_on_one(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with machines(3) as (first, second, third):
        settings = told(first, tmp_path, b2t_filter="layer == 1 and step == 1")
        baseline = variables("baseline", 1, 3, **settings, run_dir=run)
        jobs = [first.start(*script("trusted_model.py"), **baseline)]
        for rank, machine in enumerate((second, second, third)):
            target = variables("target", 1, 3, **settings, run_dir=tmp_path / machine.name)
            jobs.append(machine.start(*script("engine_rank.py"), **target, RANK=str(rank), WORLD_SIZE="3"))
        ends = [end(job) for job in jobs]
        assert [code for code, _, _ in ends] == [0] * 4, ends
        assert ends[0][1] == "done True\n"
        logs = (tmp_path / second.name / "logs" / "target-1.log").read_text()
    frame = gl.load_run(run)
    measured = frame[frame["name"] == "hidden"]
    assert len(measured) == 3 * 3 * 2
    assert set(measured[measured["layer"] == 0]["rel_l2"]) == {0.0}
    grafted = measured[measured["status"] == "grafted"]
    assert set(zip(grafted["step"], grafted["layer"], strict=True)) == {(1, 1)}
    assert sorted(grafted["rank"]) == [0, 1, 2]
    wrong = measured[(measured["layer"] == 1) & (measured["status"] == "compared")]
    assert wrong["rel_l2"].to_numpy() == pytest.approx(0.05, rel=1e-4)
    assert frame[frame["name"] == "logits"]["status"].tolist() == ["unmatched"] * 3
    # The job's own log is on its own machine.
    assert logs.count("grafted b2t at tap 'hidden' step 1") == 1


@pytest.mark.soak
def test_a_side_started_by_torchrun_on_two_nodes_joins_one_on_a_third(tmp_path: Path) -> None:
    run = tmp_path / "run"
    with machines(3) as (first, second, third):
        settings = told(first, tmp_path, watch="True")
        baseline = variables("baseline", 1, 2, **settings, run_dir=run)
        jobs = [first.start("-m", "graftlab", "attach", str(SCRIPTS / "train.py"), **baseline)]
        rendezvous = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{second.address}:29400", "--rdzv-id", "target"]
        for machine in (second, third):
            target = variables("target", 1, 2, **settings, run_dir=tmp_path / machine.name)
            torchrun = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", *rendezvous]
            # The name of the host, by which it would find that out, is the same on all of these machines.
            torchrun += ["--rdzv-conf", f"is_host={int(machine is second)}"]
            torchrun += ["--local-addr", machine.address, "-m", "graftlab", "attach", str(SCRIPTS / "train.py")]
            jobs.append(machine.start(*torchrun, **target, GLOO_SOCKET_IFNAME="eth0"))
        assert all("trained" in out for out in all_end_well(jobs))
    frame = gl.load_run(run)
    assert len(frame) == 4 * 3 * 2
    assert set(frame["status"]) == {"compared"}
    assert set(frame["aligned_by"]) == {"slice dim=0"}
    assert frame["rel_l2"].max() < 1e-6


def test_a_second_notebook_takes_over_jobs_on_other_machines(tmp_path: Path) -> None:
    stop, folder = tmp_path / "stop", tmp_path / "run"
    with machines(3) as (notebook, second, third):
        settings = told(notebook, tmp_path)
        listens = script("listens.py", settings["address"], folder, stop)
        session = notebook.start(*listens, GRAFTLAB_TOKEN_FILE=str(settings["token_file"]))
        jobs = [second.start(*script("goes_on.py", stop, 1.0), **variables("baseline", 1, 2, **settings))]
        for rank, machine in enumerate((second, third)):
            target = variables("target", 1, 2, **settings, run_dir=tmp_path / f"target {rank}")
            ranked = {"RANK": str(rank), "WORLD_SIZE": "2"}
            jobs.append(machine.start(*script("goes_on.py", stop, 1.5), **target, **ranked))
        code, out, err = end(session)
        stop.touch()
        assert code == 0, (err, [end(job) for job in jobs])
        ends = [end(job) for job in jobs]
    printed, _, last = out.strip().rpartition("\n")
    assert f"GRAFTLAB_ADDRESS={settings['address']} " in printed
    said = json.loads(last)
    # Memory is shared where it can be, and nowhere else.
    links = [
        "shared memory with target[0]; TCP with target[1]",
        "shared memory with baseline[0]; TCP with target[1]",
        "TCP",
    ]
    assert said["links"] == said["links again"] == links
    assert set(said["states"]) <= {"running", "waiting"}
    assert said["steps"] == 1
    assert said["kept"] == [[0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [0.0, 1.5, 3.0, 4.5, 6.0, 7.5]]
    assert said["stacks"] == ["baseline[0]", "target[0]", "target[1]"]
    assert (said["plan"], said["same token"], said["failures"]) == ("layer == 0", True, {})
    for code, printed, err in ends:
        assert (code, printed) == (0, "went on True\n"), err
        assert "the session ended" in err
        assert f"until another session listens at {settings['address']}\n" in err


# ---- networks that fail ---------------------------------------------------------------------------------------------


def two_that_count(first: Machine, second: Machine, folder: Path, **settings: object) -> list[warm.Running]:
    jobs = []
    for machine, role, scale in ((first, "baseline", 2.0), (second, "target", 1.0)):
        given = told(first, folder, **settings)
        own = variables(role, 1, 1, **given, run_dir=folder / ("run" if machine is first else "elsewhere"))
        jobs.append(machine.start(*script("counts.py", folder / "stop", scale), **own))
    return jobs


def rows_of(folder: Path) -> int:
    path = folder / "run" / "rows.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


BAD_NETWORK = {"delay": 0.05, "lost": 0.03, "jitter": 0.1}


def require_bad_network(*those: Machine) -> None:
    """Check that packets were lost, and arrived in another order than they were sent."""
    counted = [machine.packets() for machine in those]
    assert sum(each["RetransSegs"] for each in counted) > 0
    assert sum(each["TCPOFOQueue"] for each in counted) > 0


def require_right_pairs(folder: Path) -> set[str]:
    """Return the statuses; check that compared tensors are of the same step."""
    frame = gl.load_run(folder / "run")
    compared = frame[frame["status"].isin(["compared", "grafted"])]
    assert set(compared["rel_l2"]) == {0.5}
    assert (compared["max_abs"] == compared["step"] + 1).all()
    assert not frame.duplicated(["run", "step", "side", "rank", "name"]).any()
    return set(frame["status"])


def more_rows(folder: Path, count: int) -> None:
    before = rows_of(folder)
    wait_until(lambda: rows_of(folder) >= before + count, "rows")


@pytest.mark.soak
def test_a_cable_unplugged_for_five_seconds_costs_no_row(tmp_path: Path) -> None:
    with machines(2) as (first, second):
        jobs = two_that_count(first, second, tmp_path)
        more_rows(tmp_path, 20)
        second.unplug()
        threading.Event().wait(5.0)
        second.plug_in()
        more_rows(tmp_path, 20)
        (tmp_path / "stop").touch()
        assert all_end_well(jobs) == ["counted True True\n"] * 2
    assert require_right_pairs(tmp_path) <= {"compared", "unmatched", "missing"}
    # No step lacks its row but those at the end, which one side may have reached alone.
    frame = gl.load_run(tmp_path / "run")
    compared = frame[frame["status"] == "compared"]["step"]
    assert set(compared) == set(range(compared.max() + 1))


@pytest.mark.soak
def test_a_cable_that_stays_unplugged_ends_waits_and_the_jobs_continue(tmp_path: Path) -> None:
    with machines(2) as (first, second):
        jobs = two_that_count(first, second, tmp_path, timeout=40)
        more_rows(tmp_path, 20)
        # The rows of the target come over the same cable; the baseline's, which receives then, do not.
        second.unplug()
        wait_until(lambda: all(job.poll() is None for job in jobs), "both jobs")
        threading.Event().wait(25.0)
        (tmp_path / "stop").touch()
        ends = [end(job) for job in jobs]
    assert [code for code, _, _ in ends] == [0, 0], ends
    assert all(out.startswith("counted True") for _, out, _ in ends)
    assert "compared" in require_right_pairs(tmp_path)


@pytest.mark.soak
def test_taps_pair_correctly_where_packets_are_lost_delayed_and_reordered(tmp_path: Path) -> None:
    with machines(2, **BAD_NETWORK) as (first, second):
        jobs = two_that_count(first, second, tmp_path)
        more_rows(tmp_path, 30)
        (tmp_path / "stop").touch()
        assert all_end_well(jobs) == ["counted True True\n"] * 2
        require_bad_network(first, second)
    assert require_right_pairs(tmp_path) <= {"compared", "unmatched", "missing"}


@pytest.mark.soak
def test_a_kill_frees_the_other_side_where_packets_are_lost_delayed_and_reordered(tmp_path: Path) -> None:
    with machines(2, **BAD_NETWORK) as (first, second):
        # The baseline waits for the target at each tap.
        jobs = two_that_count(first, second, tmp_path, t2b_filter="True", compare_filter="")
        more_rows(tmp_path, 20)
        jobs[1].kill()
        # A wait for it would take two minutes each.
        more_rows(tmp_path, 20)
        (tmp_path / "stop").touch()
        assert end(jobs[0])[:2] == (0, "counted True True\n")
        end(jobs[1])
        require_bad_network(first, second)
    assert require_right_pairs(tmp_path) <= {"grafted", "missing", "unmatched"}
    frame = gl.load_run(tmp_path / "run").sort_values("step")
    assert frame["status"].iloc[-1] == "missing"
    assert frame["error"].iloc[-1] == "target[0] died, or the network connection to it failed"


def test_a_rank_killed_on_another_machine_frees_the_others_and_can_rejoin(tmp_path: Path) -> None:
    with machines(2) as (first, second):
        jobs = two_that_count(first, second, tmp_path, t2b_filter="True", compare_filter="")
        more_rows(tmp_path, 10)
        # What starts it on its machine has become it.
        jobs[1].kill()
        # A wait for it would take a minute each.
        more_rows(tmp_path, 10)
        # It begins with its first step again, whose partner is long past, and reaches the step where the other waits.
        given = told(first, tmp_path, t2b_filter="True", compare_filter="", first_step=0)
        own = variables("target", 1, 1, **given, run_dir=tmp_path / "elsewhere")
        jobs.append(second.start(*script("counts.py", tmp_path / "stop", 1.0), **own))
        wait_until(lambda: joined_again(tmp_path) > 10, "grafts of the second generation")
        (tmp_path / "stop").touch()
        assert [end(jobs[index])[:2] for index in (0, 2)] == [(0, "counted True True\n")] * 2
        end(jobs[1])
    frame = gl.load_run(tmp_path / "run")
    # A wait for one that has many steps to make up may reach its limit.
    assert require_right_pairs(tmp_path) <= {"grafted", "missing", "unmatched", "timeout"}
    first_run = frame[(frame["run"] == 0) & (frame["status"] == "missing")]
    assert first_run["error"].iloc[-1] == "target[0] died, or the network connection to it failed"
    again = frame[frame["run"] == 1]
    assert set(again["note"]) == {"generation 2 of target"}
    assert again[again["status"] == "grafted"]["step"].min() > first_run["step"].max()


def joined_again(folder: Path) -> int:
    """The number of grafts of the second generation."""
    lines = (folder / "run" / "rows.jsonl").read_bytes().splitlines()
    return sum(b"generation 2" in line and b'"grafted"' in line for line in lines)
