"""The benchmark runs and says what it should; and the reference that it compares with grafts as published."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from kit import warm

from benchmarks import __main__ as command
from benchmarks import edit, growth, machine, taps
from benchmarks.lines import Budget, Line, Spread, quantity
from benchmarks.reference import ReferenceGrafter, ReferencePlace, ReferenceWorld, diff_statistics
from benchmarks.table import markdown, plain
from graftlab.ranks import forkserver

ROOT = Path(__file__).resolve().parent.parent
FACTS = {
    **machine.facts(),
    **{name: {"median": 1e9, "lower": 1e9, "upper": 1e9, "count": 1} for name in ("read_bandwidth", "copy_bandwidth")},
}


def benchmarks(*arguments: str) -> subprocess.CompletedProcess[str]:
    process = warm.start(["-m", "benchmarks", *arguments], os.environ, cwd=ROOT, forkserver=True)
    out, err = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


# --- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize("more", [(), pytest.param(("edit", "rows"), marks=pytest.mark.soak)], ids=["few", "more"])
def test_a_quick_run_prints_its_lines_and_writes_them_as_json(tmp_path: Path, more: tuple[str, ...]) -> None:
    out = tmp_path / "made" / "bench.json"
    done = benchmarks("--quick", "--only", "taps", "graphs", "cuda", *more, "--out", str(out))
    assert done.returncode == 0, done.stderr
    written = json.loads(out.read_text())
    facts = written["machine"]
    assert {"cpu", "cores", "memory_bytes", "torch", "python", "kernel", "load_average_before", "date"} <= set(facts)
    assert facts["read_bandwidth"]["median"] > 0
    assert facts["copy_bandwidth"]["median"] > 0
    lines = {line["name"]: line for line in written["lines"]}
    assert [line["subject"] for line in written["lines"]] == sorted(
        (line["subject"] for line in written["lines"]), key=command.SUBJECTS.index
    )
    assert all(name in done.stdout for name in lines)
    unmatched = lines["tap that no filter matches"]
    for figure in ("ours", "reference"):
        assert 0 < unmatched[figure]["lower"] <= unmatched[figure]["median"] <= unmatched[figure]["upper"]
        assert unmatched[figure]["count"] > 1
    assert unmatched["ratio"] == pytest.approx(unmatched["reference"]["median"] / unmatched["ours"]["median"])
    assert [budget["of"] for budget in unmatched["budgets"]] == ["figure", "ratio"]
    assert unmatched["met"] == all(budget["met"] for budget in unmatched["budgets"])
    assert lines["fill_from against copies by hand, 10 slots, 40 of 64 rows, cpu"]["budgets"][0]["bound"] == 1.3
    # Which of them takes longer is for the bench itself to say: a busy machine turns two short figures round.
    for wanted in ("all taps wanted", "no tap wanted"):
        assert lines[f"captured decode, {wanted}, cpu"]["ours"]["count"] > 1
    if not torch.cuda.is_available():
        assert lines["cuda"]["ours"] is None
        assert "cuda: skipped, no device" in done.stdout


@pytest.mark.ranks
def test_an_unknown_subject_is_refused_and_the_known_ones_are_listed() -> None:
    refused = benchmarks("--only", "no_such_line")
    assert refused.returncode == 2
    assert "no_such_line" in refused.stderr
    assert all(subject in refused.stderr for subject in command.SUBJECTS)


@pytest.mark.slow
def test_a_failing_subject_is_reported_and_costs_no_other_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(setup: object) -> list[Line]:
        raise ValueError("out of order")

    monkeypatch.setattr(taps, "measure", broken)
    monkeypatch.setattr(edit, "measure", lambda setup: [Line("edit", "plan edit", ours=Spread.of([0.001]))])
    out = tmp_path / "bench.json"
    assert command.main(["--quick", "--only", "taps", "edit", "--out", str(out)]) == 1
    said = capsys.readouterr().out
    assert "taps: failed: ValueError: out of order" in said
    assert "plan edit" in said
    assert [line["failed"] for line in json.loads(out.read_text())["lines"]] == [True, False]


# --- the table -------------------------------------------------------------------------------------------------------


def line(**changes: Any) -> Line:
    return Line("taps", "a line", **changes)


def test_the_slope_of_a_cost_is_its_steepest_growth() -> None:
    assert growth.slope([10, 100, 1000], [1.0, 2.0, 20.0]) == pytest.approx(1)
    assert growth.slope([2, 8, 32], [3.0, 48.0, 50.0]) == pytest.approx(2)
    assert growth.slope([100, 1000], [1.0, 1.0]) == 0


def test_less_time_and_more_a_second_are_better() -> None:
    quick = line(unit="s", ours=Spread.of([2.0]), reference=Spread.of([10.0]), limit=1.0)
    assert quick.ratio == 5
    assert quick.share == 0.5
    many = line(unit="rows/s", ours=Spread.of([50.0]), reference=Spread.of([10.0]), limit=100.0)
    assert many.ratio == 5
    assert many.share == 0.5


def test_a_budget_is_met_missed_or_unknown() -> None:
    both = (Budget("figure", "at most", 1e-6), Budget("ratio", "at least", 15))
    met = line(ours=Spread.of([1e-6]), reference=Spread.of([15e-6]), budgets=both)
    assert met.all_met is True
    assert line(ours=Spread.of([1e-6]), reference=Spread.of([14e-6]), budgets=both).all_met is False
    assert line(ours=Spread.of([1e-6]), budgets=both).all_met is None
    assert met.budget_text() == "<= 1.00 us, >= 15x reference"
    assert line(budgets=(Budget("share", "at least", 1 / 5),)).budget_text() == ">= 20% of limit"


def test_a_spread_is_the_median_and_the_quartiles() -> None:
    assert Spread.of([5.0, 1.0, 4.0, 2.0, 3.0]) == Spread(3.0, 2.0, 4.0, 5)
    assert Spread.of([7.0]) == Spread(7.0, 7.0, 7.0, 1)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (88.7e-9, "s", "88.7 ns"),
        (999.9e-6, "s", "1.00 ms"),
        (61.0, "s", "61.0 s"),
        (4096.0, "B", "4.00 KiB"),
        (10.5 * 2**30, "B/s", "10.5 GiB/s"),
        (52345.6, "rows/s", "52,346 rows/s"),
        (1.234, "x", "1.23x"),
    ],
)
def test_figures_have_three_digits_and_a_unit(value: float, unit: str, text: str) -> None:
    assert quantity(value, unit) == text


def test_the_page_shows_ratios_of_chosen_lines_and_the_machine() -> None:
    shown = line(ours=Spread.of([1.0]), reference=Spread.of([30.0]), in_docs=True)
    hidden = Line("taps", "another", ours=Spread.of([1.0]))
    text = markdown(FACTS, [shown, hidden, Line("cuda", "cuda", note="skipped", in_docs=True)])
    assert "| a line | 30 |" in text
    assert "another" not in text
    assert "cuda |" not in text
    assert str(FACTS["date"]) in text
    assert "another" in plain(FACTS, [shown, hidden])


# --- the reference ---------------------------------------------------------------------------------------------------


def graft_on(place: ReferencePlace, b2t: str | None, t2b: str | None, name: str) -> list[float]:
    grafter = ReferenceGrafter(place, b2t, t2b)
    tensor = torch.full((3,), 10.0 * (place.side == "target") + place.rank)
    assert grafter.tap(name, tensor, layer=3) is tensor
    return tensor.tolist()


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Its ranks are forks of a process that has imported torch. How they start is nothing that is measured."""
    forkserver.prepare()
    context = torch.multiprocessing.get_context("forkserver")
    monkeypatch.setattr(torch.multiprocessing, "get_context", lambda method: context)
    with forkserver.hidden_main():
        yield


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_ranks")
def test_the_reference_grafts_matching_taps_into_the_receivers_counterpart() -> None:
    with ReferenceWorld(2, 2) as world:
        expression = "search('attn', name) and layer < 4 and side in ('baseline', 'target')"
        assert world.run(graft_on, expression, None, "attn_out") == [[0.0] * 3, [1.0] * 3, [0.0] * 3, [1.0] * 3]
        assert world.run(graft_on, None, expression, "attn_out") == [[10.0] * 3, [11.0] * 3, [10.0] * 3, [11.0] * 3]
        assert world.run(graft_on, expression, None, "mlp_out") == [[0.0] * 3, [1.0] * 3, [10.0] * 3, [11.0] * 3]


def fail_on_target(place: ReferencePlace) -> None:
    if place.side == "target":
        raise ValueError("a mistake of the target")
    ReferenceGrafter(place, "True").tap("x", torch.zeros(1))


@pytest.mark.ranks
@pytest.mark.usefixtures("warm_ranks")
def test_a_failing_rank_of_the_reference_ends_the_measurement() -> None:
    with (
        pytest.raises(RuntimeError, match=r"target\[0\] failed.*\n.*\n(.*\n)*ValueError"),
        ReferenceWorld(1, 1) as world,
    ):
        world.run(fail_on_target)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_references_statistics_are_those_of_its_formulas(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(5, 7, generator=generator).to(dtype) for _ in range(2))
    found = diff_statistics(x, y)
    pairs = list(zip(x.flatten().tolist(), y.flatten().tolist(), strict=True))
    assert found["max_abs"] == pytest.approx(max(abs(a - b) for a, b in pairs), rel=1e-6)
    assert found["mean_abs"] == pytest.approx(sum(abs(a - b) for a, b in pairs) / len(pairs), rel=1e-6)
    expected = sum((a - b) ** 2 for a, b in pairs) / sum(a * a + b * b for a, b in pairs)
    assert found["rel_diff"] == pytest.approx(expected, rel=1e-12)
