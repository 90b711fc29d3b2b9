"""Parts of a report, without ranks: code under its first run, and notes of rows."""

from __future__ import annotations

import base64
import hashlib
import os
import platform
import re
import resource
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib.pyplot as plt
import pytest
import torch
from kit.rows import row

from graftlab.control import report
from graftlab.errors import SessionError
from graftlab.plan.plan import GraftPlan
from graftlab.rows.store import to_frame


def test_code_that_ran_twice_stands_under_its_first_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "state_of", lambda run: run)
    monkeypatch.setattr(report, "source_of", lambda code: code)
    runs: Any = [SimpleNamespace(number=number, code={"target": code}) for number, code in enumerate("aba")]
    text = report._code(runs)
    assert [part for part in ("run 0, target", "run 1, target", "run 2, target") if part in text] == [
        "run 0, target",
        "run 1, target",
    ]


def test_of_much_code_the_newest_pieces_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report, "state_of", lambda run: run)
    monkeypatch.setattr(report, "source_of", lambda code: code)
    runs: Any = [SimpleNamespace(number=n, code={"target": f"piece {n}\n"}) for n in range(report._CODE + 2)]
    text = report._code(runs)
    assert "<p>2 earlier pieces are left out</p>" in text
    assert "piece 1\n" not in text
    assert text.count("<pre>") == report._CODE
    assert "left out" not in report._code(runs[2:])
    marked: Any = SimpleNamespace(number=7, code={"<all>": "if a < b & c: pass"})
    assert "<p>run 7, &lt;all&gt;</p><pre>if a &lt; b &amp; c: pass</pre>" in report._code([marked])
    assert report._code([]) == ""


def test_a_plan_of_a_report_has_its_filters_renames_and_transforms() -> None:
    source = "def transform(graft_input):\n    return graft_input.target  # <x>\n"
    text = report._plan(GraftPlan(b2t="name == '<h>'", rename={"target": {"a": "b"}}, transform=source, version=3))  # type: ignore[arg-type]
    assert "<h2>Plan 3</h2>" in text
    cells = dict(re.findall(r"<td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>", text))
    assert cells["b2t"] == "name == &#x27;&lt;h&gt;&#x27;"
    assert cells["t2b"] == cells["keep"] == "(matches nothing)"
    assert cells["rename"] == "target: a → b"
    assert cells["transform"] == "see below"
    assert "# &lt;x&gt;" in text
    assert ">the default</td>" in report._plan(GraftPlan())


def test_the_environment_has_every_package_that_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    def version(package: str) -> str:
        if package == "triton":
            raise report.metadata.PackageNotFoundError(package)
        return f"version of {package}"

    monkeypatch.setattr(report.metadata, "version", version)
    options = SimpleNamespace(baseline=1, target=2, device="cpu", backend="gloo", timeout=60.0, start_method="spawn")
    ranks = [SimpleNamespace(label="target[0]", assignment=SimpleNamespace(device="cuda:3"))]
    text = report._environment(SimpleNamespace(options=options, ranks=ranks))  # type: ignore[arg-type]
    found = dict(re.findall(r"<td[^>]*>([^<]*)</td><td[^>]*>([^<]*)</td>", text))
    assert found["Python"] == platform.python_version()
    assert found["torch"] == torch.__version__
    assert found["numpy"] == "version of numpy"
    assert "triton" not in found
    assert found["target[0]"] == "cuda:3"
    assert found["launch"] == "baseline=1, target=2, device=cpu, backend=gloo, timeout=60, start_method=spawn"


def test_of_the_kept_pairs_a_few_are_drawn_and_each_failure_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def heatmap(self: Any, name: str, **tags: Any) -> Any:
        asked.append((name, tags))
        if name == "<h0>":
            raise SessionError("gone")
        return plt.Figure()

    monkeypatch.setattr("graftlab.control.session_plots.SessionPlots.heatmap", heatmap)
    monkeypatch.setattr("graftlab.plots.style.to_html", lambda figure, words: f"<img>{words}")
    monkeypatch.setattr("graftlab.plots.themes.in_words", lambda figure: "in words")
    kept = [{"name": f"<h{n}>", "step": step, "side": "target", "layer": n} for n in range(14) for step in (0, 1)]
    text = report._pictures(SimpleNamespace(kept=lambda: kept))  # type: ignore[arg-type]
    assert asked == [(f"<h{n}>", {"layer": n}) for n in range(report._PICTURES)]
    assert "<p>&lt;h0&gt;: gone</p>" in text
    assert text.count("<img>") == report._PICTURES - 1
    assert f"<p>and {14 - report._PICTURES} more kept pairs</p>" in text
    assert "No pair is kept." in report._pictures(SimpleNamespace(kept=list))  # type: ignore[arg-type]


def test_a_report_of_rows_has_their_notes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rows = [row("a", order=0, note="the layouts differ"), row("b", order=1, note="the layouts differ")]
    monkeypatch.setattr(report.loading, "load_run", lambda folder: to_frame(rows))
    text = report.write_report_of_rows(tmp_path, tmp_path / "report.html", None).read_text(encoding="utf-8")
    assert "Notes of rows" in text
    assert "the layouts differ" in text


@pytest.mark.parametrize("is_new", [True, False])
def test_a_full_disk_leaves_the_former_report_and_no_part_of_the_new_one(
    is_new: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "report.html"
    if not is_new:
        path.write_text("the former report")
    monkeypatch.setattr(report.loading, "load_run", lambda folder: to_frame([row("a", order=0)]))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(SessionError, match=r"the report cannot be written to .*report\.html: .*give another path"):
            report.write_report_of_rows(tmp_path, path, None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert [each.name for each in tmp_path.iterdir()] == ([] if is_new else ["report.html"])
    assert is_new or path.read_text() == "the former report"


def test_only_the_pages_own_script_may_run_in_a_report(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hostile = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"
    rows = [row(hostile, order=0, note=hostile), row("b", order=1, status="failed", error=hostile)]
    monkeypatch.setattr(report.loading, "load_run", lambda folder: to_frame(rows))
    text = report.write_report_of_rows(tmp_path, tmp_path / "report.html", None).read_text(encoding="utf-8")
    [policy] = re.findall(r'http-equiv="Content-Security-Policy" content="([^"]*)"', text)
    assert re.search(r"script-src '(sha256-[^']*)';", policy)
    assert "default-src 'none'" in policy
    scripts = re.findall(r"<script([^>]*)>(.*?)</script>", text, flags=re.DOTALL)
    assert [attributes for attributes, _ in scripts] == [' type="application/json" id="state"', ' type="module"']
    digest = base64.b64encode(hashlib.sha256(scripts[1][1].encode()).digest()).decode()
    assert f"'sha256-{digest}'" in policy
    assert "<img" not in text


def test_a_report_is_as_readable_as_other_new_files_or_as_the_former_one(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        report._replace(tmp_path / "new.html", b"new")
        assert os.umask(0o027) == 0o027
    finally:
        os.umask(before)
    former = tmp_path / "former.html"
    former.write_text("former")
    former.chmod(0o604)
    report._replace(former, b"new")
    assert [stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "new.html", former)] == [0o640, 0o604]
    # A link keeps its place, and what it leads to is written.
    link = tmp_path / "link.html"
    link.symlink_to(former)
    report._replace(link, b"newer")
    assert link.is_symlink()
    assert former.read_bytes() == b"newer"


def test_the_worst_taps_of_a_report_lead_and_failures_have_their_reasons(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    rows = [row(f"t{n}", order=n, rel_l2=10.0 ** (n - 20)) for n in range(15)]
    rows += [row(f"bad{n:02}", order=20 + n, status="failed", error=f"reason {n}") for n in range(30)]
    rows.append(row("odd", order=60, status="failed", error=None))
    monkeypatch.setattr(report.loading, "load_run", lambda folder: to_frame(rows))
    text = report.write_report_of_rows(tmp_path, tmp_path / "report.html", None).read_text(encoding="utf-8")
    worst = text.partition("Worst taps (")[2]
    assert worst.startswith(f"{report._WORST} of 46)")
    shown = re.findall(r"<td[^>]*>(t\d+|bad\d+)</td>", worst.partition("Failed transforms")[0])
    assert shown == sorted(shown, key=lambda name: (name[0] == "t", -int(name[1:]) if name[0] == "t" else 0))
    failed = text.partition("Failed transforms")[2]
    assert failed.count("<pre>reason ") == report._FAILED
    assert f"<p>and {31 - report._FAILED} more</p>" in failed
