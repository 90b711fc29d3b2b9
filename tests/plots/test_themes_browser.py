"""Which of a figure's two pictures each front end shows, by the attributes that its pages have."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Literal

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from matplotlib.figure import Figure

from graftlab.plots import themes

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

pytest_plugins = ["kit.browser"]
pytestmark = pytest.mark.browser

PAGE = "<html {}><body {}>{}</body></html>"
# The page of a front end, its attributes on html and on body, and the picture that it shows, or None: the system's.
PAGES = [
    ("JupyterLab and Notebook 7, light", "", 'data-jp-theme-light="true"', "light"),
    ("JupyterLab and Notebook 7, dark", "", 'data-jp-theme-light="false"', "dark"),
    ("VS Code, light", "", 'class="vscode-light"', "light"),
    ("VS Code, dark", "", 'class="vscode-dark"', "dark"),
    ("VS Code, high contrast", "", 'class="vscode-high-contrast"', "dark"),
    ("VS Code, light high contrast", "", 'class="vscode-high-contrast vscode-high-contrast-light"', "light"),
    ("Colab, light", 'theme="light"', "", "light"),
    ("Colab, dark", 'theme="dark"', "", "dark"),
    ("jupyter-book, light", 'data-theme="light"', "", "light"),
    ("jupyter-book, dark", 'data-theme="dark"', "", "dark"),
    ("this project's pages, light", "", 'data-theme="light"', "light"),
    ("this project's pages, dark", "", 'data-theme="dark"', "dark"),
    ("this project's pages, as the system is", "", 'data-theme="auto"', None),
    ("any other page", "", "", None),
]


@pytest.fixture(scope="module")
def picture() -> str:
    return themes.pictures(Figure(figsize=(2, 1)), "first divergent: h", dpi=40)


@pytest.mark.parametrize("system", ["light", "dark"])
def test_each_front_end_shows_the_picture_of_its_theme(
    empty_page: Page, picture: str, system: Literal["light", "dark"]
) -> None:
    empty_page.emulate_media(color_scheme=system)
    for name, html, body, theme in PAGES:
        empty_page.set_content(PAGE.format(html, body, themes.STYLE + picture))
        seen = {each: empty_page.locator(f".graftlab-on-{each}").is_visible() for each in ("light", "dark")}
        shown = theme or system
        assert seen == {"light": shown == "light", "dark": shown == "dark"}, name


def test_a_page_without_styles_and_scripts_shows_one_picture_with_its_description(
    browser: Browser, picture: str
) -> None:
    context = browser.new_context(java_script_enabled=False)
    try:
        page = context.new_page()
        # As GitHub does: attributes of looks are dropped as well.
        page.set_content(PAGE.format("", "", re.sub(r' (class|style)="[^"]*"', "", picture)))
        assert [each.is_visible() for each in page.get_by_role("img", name="first divergent: h").all()] == [True]
    finally:
        context.close()
