"""What ranks print and display in a real JupyterLab: a live bar a rank, figures and tables, and a debugger's prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from kit.browser import Lab

pytest_plugins = ["kit.browser"]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

UP = """
import graftlab as gl
%load_ext graftlab
%graft up -b 1 -t 2 -o session
"""
SHOWS = """
%%graft both
import pathlib, threading
import matplotlib.pyplot as plt, pandas as pd
from tqdm.auto import tqdm
pause = threading.Event()
for number in tqdm(range(1000), desc="epoch"):
    pause.wait(0.05)
    if pathlib.Path("go.flag").exists() and number > 3:
        break
me = gl.here()
if me.side == "target":
    plt.figure(figsize=(3, 2))
    plt.plot([0, me.rank + 1])
    plt.title(f"rank {me.rank}")
    plt.show()
    if me.rank == 0:
        display(pd.DataFrame({"loss": [0.5, 0.25]}))
"""
FAILS = """
%%graft target[1]
def fails(factor):
    scale = factor * 2
    raise ValueError(f"no such scale: {scale}")
fails(21)
"""


def test_bars_are_live_figures_and_tables_are_shown_and_failures_inspected(lab: Lab) -> None:
    expect.set_options(timeout=60_000)
    (lab.folder / "go.flag").unlink(missing_ok=True)
    lab.open(UP, SHOWS, FAILS, "%graft debug")
    page = lab.page
    lab.run_cell(0)
    lab.run_cell(1, wait=False)
    live = page.locator(".graftlab-live", has_text="epoch")
    expect(live).to_have_count(3)
    for rank in ("baseline[0]", "target[0]", "target[1]"):
        expect(live.filter(has_text=f"{rank} | epoch:")).to_have_count(1)
    before = live.first.inner_text()
    expect(live.first).not_to_have_text(before)
    lab.screenshot("rank-bars")
    (lab.folder / "go.flag").touch()
    lab.wait_idle()
    expect(live).to_have_count(0)
    gone = page.locator(".jp-OutputArea-child:has(.graftlab-gone)")
    # The bar of the run itself is gone, too, where it took so long that there was one.
    expect(gone.nth(2)).to_have_count(1)
    for number in range(gone.count()):
        expect(gone.nth(number)).to_be_hidden()
    outputs = page.locator(".jp-Cell").nth(1).locator(".jp-OutputArea-output")
    expect(outputs.locator("img")).to_have_count(2)
    expect(outputs.locator("table")).to_have_count(1)
    outputs.locator("table").scroll_into_view_if_needed()
    lab.screenshot("rank-output")
    lab.run_cell(2)
    lab.run_cell(3, wait=False)
    field = page.locator(".jp-Stdin-input:not([disabled])").last
    expect(page.locator(".jp-Stdin-prompt").last).to_have_text("(target[1]) ")
    field.fill("p scale")
    field.press("Enter")
    expect(page.locator(".jp-Cell").nth(3)).to_contain_text("42")
    expect(page.locator(".jp-Stdin-input")).to_have_count(2)
    field.scroll_into_view_if_needed()
    lab.screenshot("debug-prompt")
    field.fill("q")
    field.press("Enter")
    lab.wait_idle()
    assert lab.console_errors == []
