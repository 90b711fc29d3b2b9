"""In a real JupyterLab every control has a name and is reached by keys, and figures follow the theme and say what they
show."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from kit.browser import Lab

pytest_plugins = ["kit.browser"]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

UP = """
import torch
import graftlab as gl
%load_ext graftlab
%graft up -b 1 -t 1 -o session
def model(off):
    for layer in range(3):
        gl.tap("hidden", torch.arange(64.0).view(8, 8) + (off if layer == 1 else 0.0), layer=layer)
plan = session.edit(keep="layer == 1")
run = session.run(lambda: model(0.0), lambda: model(1.0))
"""
# What a person may press, type into, or choose from.
CONTROLS = {
    *("button", "textbox", "searchbox", "combobox", "listbox", "checkbox", "radio", "slider", "spinbutton", "tab"),
    *("switch", "link", "menuitem", "ComboBoxMenuButton", "ToggleButton"),
}


def tree(lab: Lab, selector: str) -> list[dict[str, Any]]:
    """The accessibility tree below an element, as Chromium gives it to a screen reader."""
    client = lab.page.context.new_cdp_session(lab.page)
    document = client.send("DOM.getDocument", {"depth": 0})
    found = client.send("DOM.querySelector", {"nodeId": document["root"]["nodeId"], "selector": selector})
    node = client.send("DOM.describeNode", {"nodeId": found["nodeId"]})["node"]
    nodes = client.send("Accessibility.queryAXTree", {"backendNodeId": node["backendNodeId"]})["nodes"]
    client.detach()
    return [each for each in nodes if not each["ignored"]]


def role_and_name(node: dict[str, Any]) -> tuple[str, str]:
    # The symbols of the icon font have no names, and are left out by screen readers.
    name = re.sub("[\ue000-\uf8ff]", "", str(node.get("name", {}).get("value", "")))
    return node["role"]["value"], name.strip()


# What a screen reader finds in each part, besides what the taps of a run add.
FIGURE = ["button All", "button Zoom in", "button Zoom out", "checkbox one point per layer", "image rel_l2 of each tap"]
EVERYWHERE = [
    "button Judge",
    "button ■ Stop",
    "tab Filters",
    "tab Logs",
    "tab Taps",
    "tab Transform",
    "textbox Verdict on",
]
FILTERS = [
    "button Apply",
    "button Redo",
    "button Revert",
    "button Undo",
    "textbox b2t",
    "textbox compare",
    "textbox keep",
]
TRANSFORM = ["button Apply", "button Redo", "button Revert", "button Try", "button Undo", "button Versions"]
TRANSFORM += ["combobox Try on", "combobox where", "textbox Transform"]
TABS = [
    [
        *FIGURE,
        "button Graft this",
        "button Keep this tap",
        "button Open the pair",
        "button Worst first",
        "textbox Noise floor",
    ],
    [*FILTERS, "textbox t2b"],
    TRANSFORM,
    ["combobox Rank"],
]
# A part in a separate cell.
ALONE = {
    ".graftlab-canvas": [*FIGURE, "button Table", "textbox Noise floor"],
    ".graftlab-match": ["button Apply", "button Undo"],
    ".graftlab-filter-editor": FILTERS,
    ".graftlab-transform-editor": TRANSFORM,
}


def test_every_control_has_a_unique_name_and_is_reached_by_the_tab_key(lab: Lab) -> None:
    expect.set_options(timeout=30_000)
    lab.open(UP, "session.dashboard()")
    lab.run_all()
    board = lab.page.locator(".graftlab-dashboard")
    expect(board).to_be_visible()
    for tab, wanted in enumerate(TABS):
        board.get_by_role("tab").nth(tab).click()
        if tab == 0:
            lab.page.locator(".gle canvas").focus()
            lab.page.keyboard.press("ArrowRight")
            expect(board.get_by_role("button", name="Graft this")).to_be_visible()
        all_are_named_and_reached(lab, ".graftlab-dashboard", [*EVERYWHERE, *wanted])
        if tab == 0:
            looked_at(lab)
    # All tabs are one stop, like a menu; arrow keys move between them.
    tabs = board.get_by_role("tab")
    tabs.first.focus()
    for number in range(1, 4):
        lab.page.keyboard.press("ArrowRight")
        expect(tabs.nth(number)).to_be_focused()
    lab.page.keyboard.press("Enter")
    expect(tabs.nth(3)).to_have_attribute("aria-selected", "true")


def test_the_figure_and_the_editors_alone_have_named_controls_that_keys_reach(lab: Lab) -> None:
    expect.set_options(timeout=30_000)
    matched = "session.match_editor(session.match(lambda: model(0.0), lambda: model(0.0)))"
    lab.open(UP, "run", matched, "session.filter_editor()", "session.transform_editor()")
    lab.run_all()
    for selector, wanted in ALONE.items():
        expect(lab.page.locator(selector)).to_be_visible()
        all_are_named_and_reached(lab, selector, wanted)


def all_are_named_and_reached(lab: Lab, selector: str, expected: list[str]) -> None:
    page = lab.page
    named = [role_and_name(node) for node in tree(lab, selector)]
    found = {f"{role} {name}" for role, name in named}
    lacking = [each for each in expected if not any(one.startswith(each) for one in found)]
    assert lacking == [], sorted(found)
    controls = [each for each in named if each[0] in CONTROLS]
    assert len(controls) > 3, named
    assert [each for each in controls if not each[1]] == []
    assert [name for role, name in named if role in ("image", "img") and not name] == []
    # Options of a list, and lines of a table, may repeat what others say; what is pressed may not.
    pressed = [each for each in controls if each[0] in ("button", "textbox", "checkbox", "tab", "combobox")]
    assert sorted({each for each in pressed if pressed.count(each) > 1}) == []
    wanted = page.evaluate(
        """(selector) => {
            const kinds = 'button, input, select, textarea, summary, [contenteditable=true]';
            const all = document.querySelectorAll(`${selector} :is(${kinds})`);
            window.wanted = [...all].filter(each => each.checkVisibility() && !each.disabled
                && each.tabIndex > -2);
            return window.wanted.length;
        }""",
        selector,
    )
    page.evaluate("(selector) => { document.querySelector(selector).closest('.jp-Cell').focus(); }", selector)
    page.evaluate("() => { window.reached = new Set(); }")
    start = page.locator(f"{selector} :is(button, input, select, [role=tab], canvas, [contenteditable=true])").first
    start.focus()
    for _ in range(wanted * 3 + 30):
        inside, in_an_editor = page.evaluate(
            """(selector) => { const here = document.activeElement; window.reached.add(here);
                               return [here.closest(selector) !== null, here.isContentEditable]; }""",
            selector,
        )
        if not inside:
            break
        if in_an_editor:  # in which Tab is a character
            page.keyboard.press("Escape")
        page.keyboard.press("Tab")
    missed = page.evaluate(
        "() => window.wanted.filter(each => !window.reached.has(each)).map(each => each.outerHTML.slice(0, 200))"
    )
    assert missed == []


# What the figure was drawn with last, and what the theme wants. A new theme's colours may come after its name.
INK_IS_THE_THEMES = """() => {
    const canvas = document.querySelector('.graftlab-dashboard canvas');
    const wanted = document.createElement('canvas').getContext('2d');
    wanted.fillStyle = getComputedStyle(canvas.closest('.gle')).color;
    return canvas.getContext('2d').fillStyle === wanted.fillStyle;
}"""


def looked_at(lab: Lab) -> None:
    """Pictures of the dashboard at the usual sizes and in both themes; nothing is wider than the page."""
    page = lab.page
    for theme in ("JupyterLab Dark", "JupyterLab Light"):
        lab.use_theme(theme)
        lab.wait_for(INK_IS_THE_THEMES)
        for width, height in ((1280, 800), (1000, 700)):
            page.set_viewport_size({"width": width, "height": height})
            page.locator(".graftlab-verdict").first.scroll_into_view_if_needed()
            lab.screenshot(f"dashboard-{theme.split()[-1].lower()}-{width}")
            wide = page.evaluate(
                """() => { const cell = document.querySelector('.graftlab-dashboard').closest('.jp-OutputArea-output');
                           return cell.scrollWidth - cell.clientWidth; }"""
            )
            assert wide <= 1, f"{wide} pixels are beyond the output at {width}"
    page.set_viewport_size({"width": 1100, "height": 900})


def test_a_figure_follows_the_theme_and_has_a_description(lab: Lab) -> None:
    expect.set_options(timeout=30_000)
    lab.open(UP, "gl.plots.divergence(run.frame, noise_floor=1e-5)")
    lab.run_all()
    page = lab.page
    light, dark = page.locator(".graftlab-on-light"), page.locator(".graftlab-on-dark")
    expect(light).to_be_visible()
    expect(dark).to_be_hidden()
    [(_, name)] = [
        each for each in (role_and_name(node) for node in tree(lab, ".graftlab-figure")) if each[0] == "image"
    ]
    assert "first divergent: hidden layer=1" in name
    lab.screenshot("figure-light")
    lab.use_theme("JupyterLab Dark")
    expect(dark).to_be_visible()
    expect(light).to_be_hidden()
    lab.screenshot("figure-dark")
