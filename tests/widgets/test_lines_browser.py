"""Lines of source in a real JupyterLab: in the dashboard's verdict and a cell's output, and what their links open."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from playwright.sync_api import Locator, expect

if TYPE_CHECKING:
    from kit.browser import Lab

pytest_plugins = ["kit.browser"]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

MODEL = """
import torch


class Attention(torch.nn.Module):
    def __init__(self, scale):
        super().__init__()
        self.scale = scale
        self.q, self.k, self.v = (torch.nn.Linear(16, 16) for _ in range(3))

    def forward(self, x):
        q, k, v = self.q(x), self.k(x), self.v(x)
        scores = q @ k.mT * self.scale
        return scores.softmax(-1) @ v
"""
UP = """
%load_ext graftlab
%graft up -b 1 -t 1 -o session
"""
CODE = """
%%graft both
import sys
sys.path.insert(0, FOLDER)
from gem import Attention
torch.manual_seed(0)
model = torch.nn.ModuleDict({"attn": Attention(0.25 if gl.here().side == "baseline" else 0.5)})
watched = gl.watch(model)
x = torch.linspace(-1, 1, 96).reshape(6, 16)
"""


def opens(lab: Lab, link: Locator) -> None:
    """Click a link, confirm it where JupyterLab asks, and see the file in front."""
    expect(link).to_be_visible()
    link.click()
    front = "window.jupyterapp.shell.currentWidget?.context?.path"
    asked = lab.page.locator(".jp-Dialog button.jp-mod-accept")
    lab.wait_for(f"() => {front} === 'gem.py' || document.querySelector('.jp-Dialog')")
    if asked.count():
        asked.click()
    lab.wait_for(f"() => {front} === 'gem.py'")
    lab.command("application:close")


def test_the_panel_and_the_cell_show_both_sources_and_open_the_file(lab: Lab) -> None:
    (lab.folder / "gem.py").write_text(MODEL.lstrip())
    code = CODE.replace("FOLDER", repr(str(lab.folder))).strip()
    lab.open(UP.strip(), code, "%graft lines attn model.attn(x)", "session.dashboard()")
    lab.page.set_viewport_size({"width": 1300, "height": 1100})
    for cell in range(4):
        lab.run_cell(cell)
    of_cell = lab.page.locator(".jp-OutputArea-output .graftlab-lines").first
    expect(of_cell.locator("mark")).to_have_count(2)
    lab.screenshot("lines_in_a_cell", of=of_cell)
    panel = lab.page.locator(".graftlab-dashboard").first
    panel.locator(".graftlab-verdict-expression input").fill("model.attn(x)")
    panel.locator("button", has_text="Judge").click()
    lines = panel.locator(".graftlab-lines")
    expect(lines).to_be_visible(timeout=90_000)
    # One click on the named group opens where its tensors differ, in view.
    where = panel.locator("details.graftlab-where")
    expect(where.locator("img").first).to_be_hidden()
    where.locator("summary").click()
    expect(where.locator("img:visible")).to_have_count(1)
    expect(where.locator("img:visible")).to_be_in_viewport(ratio=0.3)
    expect(where.locator("img:visible")).to_have_attribute("alt", re.compile(r"Where attn differs: attn .*worst: "))
    lab.screenshot("where_a_named_group_differs", of=panel.locator(".graftlab-verdict-text"))
    where.locator("summary").press("Enter")
    expect(where.locator("img:visible")).to_have_count(0)
    marked = lines.locator("mark")
    expect(marked).to_have_text(["▶  12      scores = q @ k.mT * self.scale"] * 2)
    # Side by side: the target's source is to the left of the baseline's.
    left, right = (marked.nth(place).bounding_box() for place in range(2))
    assert left is not None
    assert right is not None
    assert left["x"] + left["width"] <= right["x"]
    assert abs(left["y"] - right["y"]) < 40
    lab.screenshot("lines_in_the_dashboard", of=lines)
    for shown in (lines, of_cell):
        opens(lab, shown.get_by_role("button", name="gem.py:12").first)
    assert lab.console_errors == []
