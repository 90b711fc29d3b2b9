"""Live text in JupyterLab's page: an empty one has no height and hides nothing else."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from graftlab.base import live

if TYPE_CHECKING:
    from playwright.sync_api import Page

pytest_plugins = ["kit.browser"]
pytestmark = pytest.mark.browser

CELL = '<div class="jp-Cell-outputWrapper" style="padding:9px">{}</div>'
CHILD = '<div class="jp-OutputArea-child" style="padding:9px">{}</div>'


def test_a_place_that_is_empty_has_no_height_and_hides_nothing_else(empty_page: Page) -> None:
    gone, text = CHILD.format(live._NOTHING), CHILD.format("text")
    empty_page.set_content("".join(map(CELL.format, (gone, gone + text, text))))
    alone, beside, other = empty_page.locator(".jp-Cell-outputWrapper").all()
    assert not alone.is_visible()
    assert beside.is_visible()
    assert [each.is_visible() for each in beside.locator(".jp-OutputArea-child").all()] == [False, True]
    assert other.is_visible()
