"""The source of both sides around the lines that differ, and the links that open it."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from graftlab.base.jupyter import file_link
from graftlab.lines.frames import SourceFrame
from graftlab.verdict.lines import DifferingLine
from graftlab.verdict.source_view import source_view

MODEL = "import torch\n\n\ndef attend(q, k):\n    scores = q @ k\n    scale = 0.3\n    return scores * scale < 1\n"


def line(file: Path, **values: Any) -> DifferingLine:
    usual: dict[str, Any] = {
        **{"group": "attn", "side": "target", "line": 6, "source": "scale = 0.3", "operation": "mul(f32[2], 0.3)"},
        **{
            "confirmed": True,
            "is_suspect": False,
            "lacks_sum": False,
            "is_only_here": False,
            "state": (),
            "written": (),
            "arguments": ("other=0.3",),
            "shapes": ((2,), (2,)),
            "tap": "attn",
            "step": 0,
            "occurrence": 0,
        },
        **{"rank": 0, "file": str(file)},
        **values,
    }
    caller = SourceFrame(str(file.with_name("main.py")), 99, "main", "attend(q, k)")
    usual["stack"] = (SourceFrame(str(file), usual["line"], "attend", usual["source"]), caller)
    return DifferingLine(**usual)


def text_of(page: str) -> str:
    return re.sub("<[^>]*>", "", page)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    file = tmp_path / "gem.py"
    file.write_text(MODEL)
    return file


def test_both_sides_are_shown_side_by_side_with_the_line_marked(model: Path) -> None:
    other = model.with_name("ref.py")
    other.write_text(MODEL.replace("0.3", "0.5"))
    theirs = line(other, side="baseline", source="scale = 0.5", confirmed=False)
    page = source_view([line(model), theirs], link=lambda file, text: f"[{Path(file).name}|{text}]")
    assert re.findall("<mark>(.*?)</mark>", page) == ["▶   6      scale = 0.3", "▶   6      scale = 0.5"]
    assert page.index("[gem.py|gem.py:6]") < page.index("[ref.py|ref.py:6]")
    assert page.count("<section") == 1
    shown = text_of(page)
    assert "    3  \n    4  def attend(q, k):\n    5      scores = q @ k\n" in shown
    assert "    7      return scores * scale &lt; 1" in shown
    assert shown.count("confirmed") == 1
    assert "()" not in page


def test_each_group_has_its_own_lines(model: Path) -> None:
    lines = [line(model), line(model, group="mlp", line=5, source="scores = q @ k")]
    page = source_view(lines, link=lambda file, text: text)
    sections = page.split("<section")[1:]
    assert [re.findall("first differs|attn|mlp", text_of(each))[0] for each in sections] == ["attn", "mlp"]
    marked = [re.findall("<mark>(.*?)</mark>", each) for each in sections]
    assert marked == [["▶   6      scale = 0.3"], ["▶   5      scores = q @ k"]]


@pytest.mark.parametrize(
    ("side", "said"),
    [
        ("target", "confirmed: only the target does this, and without it the tap agrees"),
        ("baseline", "confirmed: the target lacks this, and with it the tap agrees"),
    ],
)
def test_a_line_that_one_side_alone_has_is_said_to_be(model: Path, side: str, said: str) -> None:
    page = text_of(source_view([line(model, side=side, is_only_here=True)], link=lambda file, text: text))
    assert said in page


def test_a_file_that_is_not_the_one_that_ran_shows_no_lines_around(model: Path) -> None:
    page = text_of(source_view([line(model, source="scale = 0.4", state=("store.k",))], link=lambda file, text: text))
    assert "scale = 0.4" in page
    assert "attend" not in page
    assert "reads store.k, whose values the baseline does not read" in page
    lost = text_of(source_view([line(model.with_name("lost.py"))], link=lambda file, text: text))
    assert "scale = 0.3" in lost


def test_a_file_below_the_servers_folder_is_a_link_elsewhere_a_text(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("JPY_PARENT_PID", raising=False)
    assert file_link(str(model), "a<b") == "a&lt;b"
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("JPY_PARENT_PID", "123")
    assert file_link(str(model), "gem.py:6") == "gem.py:6"
    (tmp_path / "jpserver-123.json").write_text(json.dumps({"root_dir": str(tmp_path)}))
    (tmp_path / "it's").mkdir()
    inside = tmp_path / "it's" / "gem.py"
    os.symlink(model, inside)
    assert 'data-commandlinker-args="{&quot;path&quot;: &quot;gem.py&quot;}"' in file_link(str(inside), "gem.py:6")
    assert file_link(str(tmp_path / "lost.py"), "lost.py:6") == "lost.py:6"
    (tmp_path / "jpserver-123.json").write_text(json.dumps({"root_dir": str(tmp_path / "it's")}))
    assert file_link(str(model), "gem.py:6") == "gem.py:6"


def test_an_empty_line_does_not_keep_the_indent_of_the_others(tmp_path: Path) -> None:
    file = tmp_path / "gem.py"
    file.write_text("class A:\n    def f(self):\n        a = 1\n\n        scale = 0.3\n\n        return scale\n")
    shown = text_of(source_view([line(file, line=5)]))
    assert "    2  def f(self):\n    3      a = 1\n    4  \n▶   5      scale = 0.3\n" in shown
