"""A match of jobs: in steps that they make anyway, whose data differ, and with the plan from before in force again."""

from __future__ import annotations

from pathlib import Path

import pytest
from kit.deadline import DEADLINE
from kit.job_scripts import end, start, variables

import graftlab as gl
from graftlab.plan.plan import FILTERS

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

EXPECTED = {
    **{
        f"blocks.{n}.{mine}": f"h.{n}.{theirs}" for n in range(3) for mine, theirs in (("dense", "fc"), ("gelu", "act"))
    },
    "final": "out",
}


def test_jobs_are_matched_behind_a_fault_and_then_judged(tmp_path: Path) -> None:
    stop = tmp_path / "stop"
    session = gl.listen(baseline=1, target=1, folder=tmp_path / "run", timeout=DEADLINE)
    told = {"address": tmp_path / "run", "timeout": DEADLINE}
    jobs = [start("renamed.py", stop, "act", **variables(role, 1, 1, **told)) for role in ("baseline", "target")]
    try:
        with pytest.raises(gl.SessionError, match=r"match: these ranks are jobs .* cannot be given code to run"):
            session.match("f()", "f()")
        before = session.edit(keep="name == 'out'", compare="False")
        alone = session.match(rounds=0)
        assert {pair.target for pair in alone.graftable} == {"blocks.0.dense", "blocks.0.gelu", "blocks.1.dense"}
        proposal = session.match()
        assert {pair.target: pair.baseline for pair in proposal.pairs} == EXPECTED
        sure = {pair.target for pair in proposal.graftable}
        assert sure == set(EXPECTED) - {"blocks.1.gelu"}
        assert {pair.layout.text for pair in proposal.pairs} == {"a b c -> b a c"}
        after = session.plan
        assert [getattr(after, name) for name in (*FILTERS, "pairs")] == [
            getattr(before, name) for name in (*FILTERS, "pairs")
        ]
        session.edit(pairs=proposal)
        verdict = session.verdict()
        assert verdict.named == ["h.*.act"], verdict.text
        assert "in layer 1 of 0-2" in verdict.text
    finally:
        stop.touch()
        ended = [end(job) for job in jobs]
        session.close()
    assert [code for code, _, _ in ended] == [0, 0], ended
