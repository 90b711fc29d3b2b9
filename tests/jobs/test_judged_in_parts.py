"""A verdict on jobs of several ranks names the tap and the rank, in any order of arrival and without false alarm."""

from __future__ import annotations

import contextlib
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import warm
from kit.deadline import DEADLINE
from kit.job_scripts import SCRIPTS, end, environment, on_look, start, variables
from kit.support import wait_until

import graftlab as gl

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

SCRIPT = "repeats_in_parts.py"


class Judged:
    """A session of jobs that compute the same in every step, until the file ``stop`` exists."""

    def __init__(self, session: gl.Session, folder: Path) -> None:
        self.session = session
        self.stop, self._told = folder / "stop", folder / "told"
        self.jobs: list[warm.Running] = []

    def scripts(self, side: str) -> list[object]:
        """The script of a job of this side; the target's gets the place of its fault."""
        return [self.stop, self._told if side == "target" else self._told.with_name("nothing")]

    def begin(self) -> None:
        wait_until(lambda: self.session.row_count > 4, "rows", within=4 * DEADLINE)

    def plant(self, fault: str) -> None:
        """Have it in force on the target; ``TAP@RANK``, in layer 1."""
        self._told.write_text(fault)
        begun = self.session.status()["step"].max()
        wait_until(lambda: self.session.status()["step"].min() > begun + 1, "a step with the fault")

    def over(self, **how: int) -> tuple[gl.Verdict, set[tuple[str, int]]]:
        """A verdict, and the taps and ranks at which something is added."""
        verdict = self.session.verdict(**how)
        found = verdict.frame[verdict.frame["ratio"] > 5]
        return verdict, set(zip(found["name"], found["rank"], strict=True))


def of_rank(side: str, rank: int, sizes: dict[str, int], folder: Path, **settings: object) -> dict[str, str]:
    """A rank's settings. The ranks of a side meet at a file, because no port is sure to be free."""
    told = variables(side, sizes["baseline"], sizes["target"], timeout=4 * DEADLINE, **settings)
    return {**told, "RANK": str(rank), "WORLD_SIZE": str(sizes[side]), "MEETING": f"file://{folder}/{side} meets"}


@pytest.fixture
def one_and_two(tmp_path: Path) -> Iterator[Judged]:
    """One rank of the baseline, and a target in two parts."""
    sizes = {"baseline": 1, "target": 2}
    with gl.listen(**sizes, folder=tmp_path / "run", timeout=4 * DEADLINE) as session:
        judged = Judged(session, tmp_path)
        for side, size in sizes.items():
            for rank in range(size):
                told = of_rank(side, rank, sizes, tmp_path, address=tmp_path / "run")
                judged.jobs.append(start(SCRIPT, *judged.scripts(side), **told))
        judged.begin()
        yield judged
        judged.stop.touch()


def test_a_verdict_names_the_faulty_rank_and_ranks_that_end_meanwhile(
    one_and_two: Judged, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = one_and_two.session
    before = session.plan
    verdict, over = one_and_two.over()
    assert (verdict.named, over) == ([], set())
    assert "Nothing that was checked adds more than rounding (4 groups of taps" in verdict.text

    one_and_two.plant("act@1")
    verdict, over = one_and_two.over(steps=2)
    assert (verdict.named, over) == (["layers.*.act"], {("layers.1.act", 1)})
    assert "layers.*.act is computed differently in layer 1 of 0-2 on rank 1 alone (added 0.01, " in verdict.text
    assert "With the baseline's layers.*.act the output out agrees (" in verdict.text
    assert "\nHint (layers.*.act): at layers.1.act, the target's values are 1.01 times the baseline's" in verdict.text
    # No rank of a side takes the taps of a step unless all do.
    assert not {"failed", "timeout"} & set(session.frame["status"])

    # One that dies takes those with it that compute with it; the verdict reports it, and the baseline continues.
    on_look(session, monkeypatch, lambda: os.kill(one_and_two.jobs[2].pid, signal.SIGKILL))
    assert re.search(r"the verdict was abandoned, .* failed on target\[[01]\]", session.verdict().text)
    assert (session.plan.b2t, session.plan.compare) == (before.b2t, before.compare)
    with pytest.raises(gl.SessionError, match=r"target\[1\] is missing, and a verdict needs every rank"):
        session.verdict()
    one_and_two.stop.touch()
    code, out, err = end(one_and_two.jobs[0])
    assert (code, out) == (0, "went on True\n"), err


@pytest.mark.soak
def test_ranks_connected_by_tcp_are_judged_like_those_that_share_memory(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if os.geteuid() != 0:
        pytest.skip("ranks with folders of their own need root")
    sizes = {"baseline": 2, "target": 2}
    with contextlib.ExitStack() as closing:
        session = closing.enter_context(
            gl.listen(**sizes, folder=tmp_path / "run", timeout=4 * DEADLINE, address="tcp://127.0.0.1:0")
        )
        judged = Judged(session, tmp_path)
        closing.callback(judged.stop.touch)
        [address, _] = re.findall(r"GRAFTLAB_ADDRESS=(\S+)", capsys.readouterr().out)
        told = {"address": address, "token_file": tmp_path / "run" / ".rendezvous" / "token"}
        for side, size in sizes.items():
            for rank in range(size):
                # The ranks hand their memory over in a separate folder.
                own = tmp_path / f"{side}{rank}"
                own.mkdir(mode=0o700)
                given = of_rank(side, rank, sizes, tmp_path, run_dir=tmp_path / f"run of {side}{rank}", **told)
                apart = {
                    "network": f"/proc/{os.getpid()}/ns/net",
                    "own_folder": (f"/tmp/graftlab-{os.getuid()}", str(own)),
                }
                judged.jobs.append(warm.start([SCRIPTS / SCRIPT, *judged.scripts(side)], environment(given), **apart))
        judged.begin()
        assert set(session.status()["links"]) == {"TCP"}
        assert judged.over()[1] == set()
        for fault in ("act@1", "mlp@0"):
            tap, _, rank = fault.partition("@")
            judged.plant(fault)
            verdict, over = judged.over()
            assert (verdict.named, over) == ([f"layers.*.{tap}"], {(f"layers.1.{tap}", int(rank))})
            assert f"With the baseline's layers.*.{tap} the output out agrees (" in verdict.text
        assert not {"failed", "timeout"} & set(session.frame["status"])
        on_look(session, monkeypatch, judged.stop.touch)
        assert re.search(r"abandoned: .* ended before it was done", session.verdict().text)
        for job in judged.jobs:
            code, out, err = end(job)
            assert (code, out) == (0, "went on True\n"), err
