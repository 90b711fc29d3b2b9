import pytest
pytest.importorskip("pytest_playwright")
from playwright.sync_api import expect
pytest_plugins = ["browser"]
from test_code_editor_browser import *
def test_try(lab):
    mirror = Screen(lab, False)
    mirror.open()
    mirror.typing.click()
    mirror.press("Tab")
    txt = lambda: lab.page.evaluate("() => [...document.querySelectorAll('.graftlab-editor .cm-line')].map(line => line.textContent)")
    print("A", txt(), lab.page.evaluate("() => document.activeElement.className"))
    mirror.type("x")
    print("B", txt())
def test_try2(lab):
    mirror = Screen(lab, False)
    mirror.open(NOTE_CHANGES + "apply.on_click(lambda _: note('value at the click', editor.value))")
    mirror.lab.run_cell(1)
    mirror.type("ab")
    mirror.saw(["ready"], ["change", "ab"])
    mirror.type("cd")
    mirror.click_apply()
    lab.page.wait_for_timeout(2000)
    print("C", lab.page.locator("#events").inner_text())
