"""The widget for pairs in a real JupyterLab: links by how sure they are, accepted, rejected, copied and applied."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

pytest.importorskip("pytest_playwright", reason="pytest-playwright is not installed")

from playwright.sync_api import expect

if TYPE_CHECKING:
    from kit.browser import Lab

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
