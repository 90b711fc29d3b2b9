"""The widget for pairs, in a real JupyterLab and on a page by itself: links by how sure they are, and their buttons."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from playwright.sync_api import expect

from graftlab.widgets import match_editor

if TYPE_CHECKING:
    from kit.browser import Lab
    from playwright.sync_api import Page

pytest_plugins = ["kit.browser"]
pytestmark = [pytest.mark.browser, pytest.mark.timeout(240)]

DEFINE = """
import torch
import graftlab as gl
%load_ext graftlab
%graft up -b 1 -t 1 -o session
x, weight = torch.randn(2, 5, 6), torch.randn(6, 12)
def fused(layers=12):
    y = gl.tap("emb", x + 1)
    gl.tap("mask", torch.arange(5.0))
    for n in range(layers):
        qkv = gl.tap(f"h.{n}.qkv", y @ weight)
        y = gl.tap(f"h.{n}.out", y + qkv[..., :6].tanh())
    return y
def split(layers=12):
    y = gl.tap("tokens", (x + 1).transpose(0, 1))
    for n in range(layers):
        q = gl.tap(f"blocks.{n + 1}.q", y @ weight[:, :6])
        kv = gl.tap(f"blocks.{n + 1}.kv", y @ weight[:, 6:])
        y = gl.tap(f"blocks.{n + 1}.mixed", y + q.tanh())
    return y
proposal = session.match(fused, split)
"""
TOLD = "import ipywidgets; ipywidgets.HTML(f\"<pre class='told'>{len(session.plan.pairs)} pairs</pre>\")"


def test_pairs_are_folded_by_layer_chosen_by_keys_rejected_and_applied(lab: Lab) -> None:
    expect.set_options(timeout=30_000)
    lab.open(DEFINE, "session.match_editor(proposal)", TOLD)
    lab.run_cell(0)
    lab.run_cell(1)
    page = lab.page
    editor = page.locator(".glm")
    expect(editor.locator(".summary")).to_contain_text("37 of 37 target taps have a partner")
    expect(editor.locator(".target .tap")).to_have_count(4)
    expect(editor.locator(".baseline .tap")).to_have_text(["emb", "mask", "h.{n}.qkv x12", "h.{n}.out x12"])
    expect(editor.locator(".baseline .alone")).to_have_text(["mask"])
    expect(editor.locator("path:not([d^=M0\\,4L])")).to_have_count(4)
    # With keys alone.
    editor.locator(".target .tap").first.focus()
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("Enter")
    detail = editor.locator(".detail")
    expect(detail).to_contain_text("h.{n}.qkv → blocks.{n+1}.kv")
    expect(detail).to_contain_text("12 layers")
    expect(editor.locator("path.chosen")).to_have_count(1)
    editor.scroll_into_view_if_needed()
    lab.screenshot("match-editor", of=editor)
    lab.use_theme("JupyterLab Dark")
    lab.screenshot("match-editor-dark", of=editor)
    lab.use_theme("JupyterLab Light")
    detail.get_by_role("button", name="Reject").click()
    expect(editor.locator(".summary")).to_contain_text("25 of 37 target taps have a partner")
    alone = editor.locator(".target .alone")
    expect(alone).to_have_attribute("title", "blocks.1.kv … blocks.12.kv: rejected")
    editor.get_by_role("button", name="Undo").click()
    expect(editor.locator(".summary")).to_contain_text("37 of 37")
    editor.get_by_role("button", name="Show code").click()
    expect(editor.locator("pre")).to_contain_text("session.edit(")
    expect(editor.locator("pre")).to_contain_text("'blocks.{n+1}.kv'")
    editor.get_by_role("button", name="Apply").click()
    expect(page.locator(".graftlab-match .graftlab-message")).to_contain_text("has 37 pairs")
    expect(editor.get_by_role("button", name="Apply")).to_be_disabled()
    lab.run_cell(2)
    expect(page.locator(".told")).to_have_text("37 pairs")
    assert lab.console_errors == []


# ---- on a page by itself ---------------------------------------------------------------------------------------------


@pytest.fixture
def page(empty_page: Page) -> Page:
    empty_page.set_viewport_size({"width": 900, "height": 700})
    return empty_page


def link(baseline: str, target: str, sureness: str, count: int = 1, **more: Any) -> dict[str, Any]:
    usual = {"rel": None, "layout": "same", "note": "", "targets": [f"{target}/{at}" for at in range(count)]}
    return {"baseline": baseline, "target": target, "sureness": sureness, "count": count, **usual, **more}


def mount(page: Page) -> None:
    """Show two taps of a side whose names both sides have, and one without a partner."""
    taps = [{"label": name, "count": count, "why": ""} for name, count in (("a", 1), ("h.{n}", 3))]
    links = [
        link("a", "a", "exact", rel=0.0),
        link("h.{n}", "h.{n}", "rule", 3, rel=0.25, note="the values differ", layout="a b -> b a"),
        link("a", "h.{n}", "guess", 2),
    ]
    state = {
        **{"baseline": taps, "target": [*taps, {"label": "lone", "count": 1, "why": "rejected"}], "links": links},
        **{"meanings": [["exact", "equal"], ["rule", "as the others"], ["guess", "by name"]], "problems": ["odd"]},
        **{"summary": "two of three", "folded": True, "can_undo": False, "is_applied": False, "code": "session.edit()"},
    }
    script = match_editor._SCRIPT.read_text(encoding="utf-8")
    act = "(...given) => window.acts.push(given)"
    page.set_content("<div id='root'></div>")
    page.add_script_tag(
        type="module",
        content=f"{script}\nwindow.acts = []; const root = document.getElementById('root');\n"
        f"mount(root, {act}).show({json.dumps(state)}); window.mounted = true;",
    )
    page.wait_for_function("() => window.mounted")


def test_the_key_counts_the_pairs_of_all_layers(page: Page) -> None:
    mount(page)
    assert page.locator(".key").all_inner_texts() == ["exact 1", "rule 3", "guess 2"]
    assert page.locator(".key").first.get_attribute("title") == "equal"


def test_a_chosen_tap_is_that_of_its_side_and_its_pairs_are_described(page: Page) -> None:
    mount(page)
    page.locator(".target .tap").nth(1).click()
    assert page.locator("[aria-pressed=true]").count() == 1
    assert page.locator(".target [aria-pressed=true]").get_attribute("data-label") == "h.{n}"
    said = page.locator(".detail > div").all_inner_texts()
    assert said[0] == "h.{n} → h.{n} rule, rel_l2 2.5e-1, layout a b -> b a, 3 layers, the values differ"
    assert said[1] == "a → h.{n} guess, layout same, 2 layers"
    page.locator(".detail button.accept").click()
    assert page.evaluate("() => window.acts") == [["accept", [*(f"h.{{n}}/{at}" for at in range(3))]]]
    # Once more, and nothing is chosen.
    page.locator(".target .tap").nth(1).click()
    assert page.locator("[aria-pressed=true]").count() == 0
    page.locator(".target .tap").nth(2).click()
    assert page.locator(".detail").inner_text() == "lone has no partner: rejected"


def test_only_pairs_of_rules_are_accepted_together(page: Page) -> None:
    mount(page)
    page.locator("button.accept-rules").click()
    assert page.evaluate("() => window.acts") == [["accept", [*(f"h.{{n}}/{at}" for at in range(3))]]]


def test_code_that_cannot_be_copied_is_shown_to_be_copied_by_hand(page: Page) -> None:
    mount(page)
    assert not page.locator("pre").is_visible()
    # This page may not write to the clipboard, as is usual without https.
    page.locator("button.copy").click()
    page.get_by_role("button", name="Copy it below").wait_for()
    assert page.locator("pre").inner_text() == "session.edit()"
    assert page.locator("pre").is_visible()
