"""What goes wrong on the ranks, on the disk or in the notebook: it is reported at once, and does no further damage."""

from __future__ import annotations

import math
import multiprocessing.context
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from kit.mailboxes import in_background
from kit.processes import descriptors, still_there, stop_process, watch
from kit.support import run_cell, wait_for_file, wait_until

import graftlab as gl
from graftlab.control import core
from graftlab.ranks.launcher import end_ranks
from graftlab.ranks.messages import AskKeptTags, KeptTags

pytestmark = pytest.mark.ranks


def test_an_evaluation_in_inference_mode_leaves_later_taps_alone() -> None:
    def run(inference: bool) -> None:
        with torch.inference_mode(inference):
            # Small tensors and others are copied in different ways.
            gl.tap("a", torch.ones(3))
            gl.tap("b", torch.ones(1 << 18))

    with gl.launch(1, 1) as session:
        for inference in (True, False):
            frame = session.run(run, run, args=(inference,)).frame
            assert frame[["status", "rel_l2"]].values.tolist() == [["compared", 0.0]] * 2


# ---- one rank fails while others continue ----------------------------------------------------------------------------


def loop_forever() -> None:
    while True:
        gl.step()


def fail() -> None:
    raise ZeroDivisionError("planted")


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture(scope="module")
def two_targets() -> Iterator[gl.Session]:
    with gl.launch(1, 2) as session:
        yield session


def test_the_first_failure_stops_the_others_and_is_reported_first(two_targets: gl.Session) -> None:
    run = two_targets.start(loop_forever, lambda: fail() if gl.here().rank == 1 else loop_forever())
    with pytest.raises(gl.RunError) as told:
        run.wait()
    assert run.done
    text = str(told.value)
    assert text.index("target[1] raised ZeroDivisionError: planted") < text.index(
        "baseline[0], target[0] was interrupted, because target[1] failed"
    )
    assert isinstance(told.value.__cause__, ZeroDivisionError)
    assert two_targets.run("1", "2").target == [2, 2]


def test_a_failure_is_shown_while_the_others_continue(two_targets: gl.Session) -> None:
    run = two_targets.start(loop_forever, fail, on_failure="continue")
    wait_until(lambda: len(two_targets.failing) == 2, "the news of the failure")
    assert two_targets.failing["target[0]"] == "ZeroDivisionError: planted"
    wait_until(lambda: two_targets.status()["state"][0] == "running", "the beginning of the baseline's part")
    with pytest.raises(
        TimeoutError, match=r"target\[0\]: failed: ZeroDivisionError: planted.*baseline\[0\]: computing"
    ):
        run.wait(0.5)
    assert "target[1]: failed: ZeroDivisionError" in repr(run)
    assert two_targets.status()["state"].tolist()[1:] == ["failed: ZeroDivisionError: planted"] * 2
    assert "failed: ZeroDivisionError" in two_targets._repr_mimebundle_()["text/html"]
    two_targets.interrupt()
    with pytest.raises(gl.RunError, match="ZeroDivisionError"):
        run.wait()
    with pytest.raises(gl.SessionError, match="on_failure='no'"):
        two_targets.start("1", "1", on_failure="no")


def test_a_dead_rank_is_reported_while_others_continue() -> None:
    with gl.launch(1, 1) as session:
        run = session.start(loop_forever, die, on_failure="continue")
        wait_until(lambda: session.failing, "the news of the death")
        with pytest.raises(TimeoutError, match=r"target\[0\]: failed: killed by SIGKILL"):
            run.wait(0.2)
        session.interrupt()
        with pytest.raises(gl.RunError, match=r"target\[0\] died: killed by SIGKILL"):
            run.wait()
    with gl.launch(1, 1) as session, pytest.raises(gl.RunError, match=r"baseline.* was interrupted, because target"):
        session.run(loop_forever, die)


# ---- a full disk ----------------------------------------------------------------------------------------------------


def test_unwritten_rows_stay_in_the_frame_until_the_disk_has_room() -> None:
    def many() -> str:
        for index in range(300):
            gl.tap("a", torch.ones(3), index=index)
        return "ended"

    with gl.launch(1, 1) as session:
        rows = session._rows
        file = rows._log._file
        with open("/dev/full", "wb", buffering=0) as rows._log._file:
            with pytest.raises(gl.SessionError, match=r"run 0 has ended.* rows 0 to 299 are not on disk.*No space"):
                session.run(many, many)
            assert session.runs[-1].target == ["ended"]
            assert len(session.frame) == len(session.runs[-1].frame) == 300
        rows._log._file = file
        assert session.run(many, many).target == ["ended"]
        assert len(session.frame) == 600
    assert len(gl.load_run(session.folder)) == 600


def test_tampering_with_its_log_or_exceptions_does_not_end_a_rank(own: gl.Session) -> None:
    def print_to_a_full_disk() -> str:
        for descriptor in (1, 2):
            os.dup2(os.open("/dev/full", os.O_WRONLY), descriptor)
        for _ in range(100):
            print("x" * 90, flush=True)
            print("y", file=sys.stderr)
        return "went on"

    def close_the_streams() -> str:
        os.close(1)
        os.close(2)
        print("said", flush=True)
        return "went on"

    def raise_the_untellable() -> None:
        class Untellable(Exception):
            def __str__(self) -> str:
                raise RuntimeError("no")

        raise Untellable

    session = own
    with pytest.raises(gl.RunError, match=r"Untellable: \(its message cannot be shown"):
        session.run(target=raise_the_untellable)
    assert session.run(target=print_to_a_full_disk).target == ["went on"]
    assert session.run(target=close_the_streams).target == ["went on"]
    frame = session.run(*[lambda: gl.tap("a", torch.ones(3), tag=10**5000)] * 2).frame
    assert frame["status"].tolist() == ["compared"]


@pytest.fixture
def own() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as session:
        yield session


# ---- the run folder -------------------------------------------------------------------------------------------------


def tap_a() -> None:
    gl.tap("a", torch.ones(3))


def test_a_folder_belongs_to_one_session_and_is_reused_only_with_append(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    with gl.launch(1, 1, folder=folder) as session:
        session.run(tap_a, tap_a)
        described = (folder / "session.json").read_text()
        for append in (False, True):
            with pytest.raises(gl.LaunchError, match=r"mine is in use by an open session.*pass another folder="):
                gl.launch(1, 1, folder=folder, append=append)
        assert (folder / "session.json").read_text() == described
        assert len(session.frame) == 1
    with pytest.raises(gl.LaunchError, match=r"mine has the rows of an earlier session; pass append=True"):
        gl.launch(1, 1, folder=folder)
    with gl.launch(1, 1, folder=folder, append=True) as session:
        run = session.run(tap_a, tap_a)
        assert (run.number, session.frame["run"].tolist()) == (1, [1])
        everything = [folder, *folder.rglob("*")]
        assert {path.stat().st_mode & 0o077 for path in everything} == {0}
    assert gl.load_run(folder)[["run", "step"]].values.tolist() == [[0, 0], [1, 1]]
    with pytest.raises(gl.LaunchError, match="folder=3: give a path"):
        gl.launch(1, 1, folder=3)


def test_a_relative_folder_is_found_after_the_notebook_changed_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with gl.launch(1, 1, folder="here") as session:
        monkeypatch.chdir("/")
        session.run(tap_a, tap_a)
        assert len(session.frame) == 1
        assert session.folder == tmp_path / "here"


# ---- the stop button during close ------------------------------------------------------------------------------------


def test_a_close_that_is_interrupted_leaves_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    gl.launch(1, 1).close()  # everything that lasts as long as the process exists by now
    before = descriptors()
    session = gl.launch(1, 2)
    pids = watch(rank.pid for rank in session.ranks if rank.pid)

    def stopped(*args: object, **kwargs: object) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        return end_ranks(*args, **kwargs)

    monkeypatch.setattr(core, "end_ranks", stopped)
    with pytest.raises(KeyboardInterrupt):
        session.close()
    session.close()
    assert still_there(pids) == []
    assert session.closed
    # What another test left to be closed may have gone meanwhile.
    assert descriptors() - before == set()


# ---- deaths, waits and workers --------------------------------------------------------------------------------------


def test_a_rank_that_dies_during_a_query_is_reported_with_its_last_tap() -> None:
    def tap_and_die() -> None:
        gl.tap("the last one", torch.ones(3))
        die()

    with gl.launch(1, 1, timeout=60) as session:
        with pytest.raises(gl.RunError, match=r"killed by SIGKILL \(pid \d+, last seen at tap 'the last one'\)"):
            session.run(target=tap_and_die, baseline=tap_a)
        with pytest.raises(gl.SessionError, match=r"no pair of tensors|killed by SIGKILL"):
            session.tensors("a")
        queries, [rank, _] = session._queries, session.ranks
        stop_process(rank.pid or 0)
        asking = in_background(lambda: queries.ask(rank, AskKeptTags(False), KeptTags))
        wait_until(lambda: queries._answers, "the question")
        os.kill(rank.pid or 0, signal.SIGKILL)
        with pytest.raises(gl.SessionError, match=r"baseline\[0\].*gone before it answered \(killed by SIGKILL\)"):
            asking.result(30)


def test_a_tap_times_out_before_the_collective_of_its_waiting_peer(tmp_path: Path) -> None:
    met = str(tmp_path / "met")

    def target() -> str:
        if gl.here().rank == 0:
            gl.tap("late", torch.ones(1))
        dist.all_reduce(torch.ones(1))
        Path(met).touch()
        return "met"

    def baseline() -> None:
        wait_for_file(met)

    with gl.launch(1, 2, timeout=30, tap_timeout=2) as session:
        run = session.run(baseline, target)
        assert run.target == ["met", "met"]
        assert run.frame["status"].tolist() == ["timeout"]
        assert "did not reach this tap within 2 s" in run.frame["error"][0]
    for given in (math.inf, 0, "1"):
        with pytest.raises(gl.LaunchError, match=r"tap_timeout=.*: give seconds, more than 0 and at most"):
            gl.launch(1, 1, tap_timeout=given)
        with pytest.raises(gl.LaunchError, match=r"^timeout=.*: give seconds, more than 0 and at most"):
            gl.launch(1, 1, timeout=given)


def test_a_data_loader_with_workers_works_in_a_rank(own: gl.Session) -> None:
    cell = run_cell(
        """
        import torch

        class Numbers(torch.utils.data.Dataset):
            def __len__(self):
                return 8

            def __getitem__(self, index):
                return index

        def load():
            loader = torch.utils.data.DataLoader(Numbers(), batch_size=4, num_workers=2)
            return [batch.tolist() for batch in loader]
        """
    )
    assert own.run(target=cell["load"]).target == [[[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_programs_started_by_a_rank_end_with_it_unless_detached(own: gl.Session) -> None:
    def start(apart: bool) -> int:
        return subprocess.Popen(["sleep", "1000"], start_new_session=apart).pid

    [stays] = own.run(target=start, args=(True,)).target
    [ends] = own.run(target=start, args=(False,)).target
    staying, ending = watch([stays]), watch([ends])
    os.kill(own.ranks[1].pid or 0, signal.SIGKILL)
    assert still_there(ending) == []
    own.restart()
    ending = watch(own.run(target=start, args=(False,)).target)
    own.close()
    assert still_there(ending) == []
    os.kill(stays, signal.SIGKILL)  # it exists: ProcessLookupError otherwise
    assert still_there(staying) == []


def test_kept_pairs_take_the_memory_of_their_budget() -> None:
    budget = 64 << 20

    def grow() -> int:
        def held() -> int:
            lines = Path("/proc/self/status").read_text().splitlines()
            (line,) = (line for line in lines if line.startswith("RssAnon"))
            return int(line.split()[1]) << 10

        ones = torch.ones(1 << 20)
        gl.tap("first", ones)
        before = held()
        for index in range(60):
            gl.tap("a", ones + 0, index=index)
            gl.step()
        return held() - before

    with gl.launch(1, 1, keep_budget=budget, plan=gl.GraftPlan(keep="True")) as session:
        [grown] = session.run(grow, grow).target
    assert budget / 2 < grown < budget * 1.25


# ---- taps that cannot be taken --------------------------------------------------------------------------------------


class Wrapper(torch.Tensor):
    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)

    @classmethod
    def __torch_dispatch__(cls, *args: Any) -> None:
        raise NotImplementedError("no")


def tap_what_cannot_be_carried() -> None:
    ones = torch.ones(3)
    torch.vmap(lambda x: gl.tap("vmap", x * 2))(torch.ones(3, 2))
    torch.func.jvp(lambda x: gl.tap("jvp", x * 2), (ones,), (ones,))
    torch.func.grad(lambda x: gl.tap("grad", x * 2).sum())(ones)
    gl.tap("quantised", torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8))
    gl.tap("nested", torch.nested.nested_tensor([torch.ones(2), ones]))
    gl.tap("masked", torch.masked.masked_tensor(ones, ones > 0))
    gl.tap("wrapper", Wrapper(ones))
    if hasattr(torch, "float4_e2m1fn_x2"):
        gl.tap("float4", torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2))
    gl.tap("uint1", torch.empty(4, dtype=torch.uint1))
    gl.tap("plain", ones)


def test_an_unusable_tap_only_warns(own: gl.Session, capsys: pytest.CaptureFixture[str]) -> None:
    frame = own.run(tap_what_cannot_be_carried, tap_what_cannot_be_carried).frame
    assert frame[["name", "status"]].values.tolist() == [["plain", "compared"]]
    shown = capsys.readouterr().out
    names = ["vmap", "jvp", "grad", "quantised", "nested", "masked", "wrapper", "uint1"]
    for name in [*names, *(["float4"] if hasattr(torch, "float4_e2m1fn_x2") else [])]:
        assert f"gl.tap('{name}') on target[0]: " in shown


def test_a_tap_inside_of_a_tap_is_skipped_with_a_warning(own: gl.Session, capsys: pytest.CaptureFixture[str]) -> None:
    class Finalized:
        def __reduce__(self) -> Any:
            gl.tap("inner", torch.ones(3))
            gl.step()
            return int, ()

    def run() -> None:
        gl.tap("outer", torch.ones(3), extras=Finalized())
        gl.tap("after", torch.ones(3))

    frame = own.run(run, run).frame
    assert frame[["name", "status", "step"]].values.tolist() == [["outer", "compared", 0], ["after", "compared", 0]]
    shown = capsys.readouterr().out
    assert "gl.tap('inner') on baseline[0]: it was reached inside another tap" in shown


# ---- the forkserver -------------------------------------------------------------------------------------------------


def test_a_forkserver_death_during_launch_is_reported_and_leaks_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gl.launch(1, 1).close()
    before = descriptors()

    def dies(self: object) -> None:
        raise EOFError

    with monkeypatch.context() as patch:
        patch.setattr(multiprocessing.context.ForkServerProcess, "start", dies)
        with pytest.raises(gl.LaunchError, match="the forkserver, which starts the ranks, died; launch again"):
            gl.launch(1, 1)
    assert descriptors() - before == set()
    gl.launch(1, 1).close()


def test_an_invalid_plan_is_refused_before_any_rank_is_started(tmp_path: Path) -> None:
    with pytest.raises(gl.PlanError, match=r"plan='x': give a graftlab.GraftPlan"):
        gl.launch(1, 1, plan="x", folder=tmp_path / "folder")  # type: ignore[arg-type]
    assert not (tmp_path / "folder").exists()
