"""The fixture ``graftlab_compare`` in a project of its own, run by pytest in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = """
import torch
from torch import nn


def load(eps=1e-5):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=eps))


def wrong():
    return load(0.5)


x = torch.ones(2, 4)


def test_wrong(graftlab_compare):
    graftlab_compare(load, wrong, inputs=x)


def test_recorded(graftlab_compare):
    graftlab_compare("reference.graft", load, inputs=x)


def test_recorded_and_wrong(graftlab_compare):
    graftlab_compare("reference.graft", wrong, inputs=x, reference=load)
"""


def outcomes(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, str], str]:
    """How each test of the project ended, and all that pytest printed."""
    # Others do not nest.
    left_out = ("graftlab", "cacheprovider", "xdist", "playwright", "timeout")
    plugins = [*(f"-pno:{each}" for each in left_out), "-pgraftlab.pytest_plugin"]
    place = ["--rootdir", str(folder), "-c", "/dev/null", "--import-mode", "importlib"]
    pytest.main([*plugins, *place, "-rA", "-q", *options, str(folder / "test_port.py")])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line.startswith(("PASSED ", "FAILED "))]
    return {words[1].rpartition("::")[2]: words[0] for words in lines}, printed


@pytest.mark.ranks
def test_a_test_fails_with_the_text_and_a_recording_replaces_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_port.py").write_text(TESTS)
    found, printed = outcomes(tmp_path, capsys, "-k", "recorded")
    assert found == {"test_recorded": "FAILED", "test_recorded_and_wrong": "FAILED"}
    assert "reference.graft does not exist; pytest --graftlab-record makes it" in printed

    found, _ = outcomes(tmp_path, capsys, "-k", "recorded_and_wrong", "--graftlab-record")
    assert found == {"test_recorded_and_wrong": "PASSED"}
    recorded = [path for path in (tmp_path / "reference.graft").rglob("*") if path.is_file()]
    assert recorded
    assert sum(path.stat().st_size for path in recorded) < 1 << 20

    pages = tmp_path / "pages"
    found, printed = outcomes(tmp_path, capsys, "--graftlab-report", str(pages))
    assert found == {
        "test_wrong": "FAILED",
        "test_recorded": "PASSED",
        "test_recorded_and_wrong": "FAILED",
    }
    assert printed.count("* is computed differently in member 1 of 0-1") >= 2
    assert len(list(pages.glob("*.html"))) == 3
