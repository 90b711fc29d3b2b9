"""Jupyter Notebook 7, where it is installed: JupyterLab's server shows a notebook with its page too."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")
pytest.importorskip("notebook", reason="Jupyter Notebook 7 is not installed")

from kit import notebooks
from kit.browser import TOKEN
from playwright.sync_api import expect

if TYPE_CHECKING:
    from kit.browser import Server
    from playwright.sync_api import Page

pytest_plugins = ["kit.browser"]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

CELLS = (
    """
import torch
import graftlab as gl
session = gl.launch(baseline=1, target=1)
plan = session.edit(keep="True")
run = session.run(lambda: gl.tap("first", torch.zeros(4)), lambda: gl.tap("first", torch.ones(4)))
""",
    "session.plot.divergence()",
    "session.dashboard()",
)


def test_notebook_7_shows_the_canvas_the_pair_behind_a_tap_and_the_editors(lab_page: Page, lab_server: Server) -> None:
    expect.set_options(timeout=60_000)
    notebooks.write(lab_server.folder / "seven.ipynb", *CELLS)
    page = lab_page.context.new_page()
    try:
        page.goto(f"{lab_server.address}/notebooks/seven.ipynb?token={TOKEN}")
        page.wait_for_selector(".jp-Notebook-ExecutionIndicator[data-status=idle]")
        page.get_by_role("menuitem", name="Run", exact=True).click()
        page.get_by_role("menuitem", name="Run All Cells", exact=True).click()
        canvas = page.locator(".graftlab-canvas canvas")
        expect(canvas).to_be_visible()
        expect(page.locator(".graftlab-static").first).to_be_hidden()
        board = page.locator(".graftlab-dashboard")
        expect(board.locator("tr[data-tap]").first).to_be_visible()
        canvas.click()
        expect(page.locator(".graftlab-canvas .graftlab-pair .graftlab-on-light").first).to_be_visible()
        board.get_by_role("tab", name="Filters").click()
        expect(board.get_by_role("textbox", name="b2t")).to_be_visible()
    finally:
        page.close()
        lab_server.end_kernels(but=lab_server.shared_kernel)
