"""A session's report: what is in it, what is not, and that a real browser opens it from disk without asking anybody."""

from __future__ import annotations

import html
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from kit.browser import keep_picture

import graftlab as gl

if TYPE_CHECKING:
    from playwright.sync_api import Browser

pytest_plugins = ["kit.browser"]
pytestmark = pytest.mark.ranks

LAYERS, PARTS = 250, 6


@pytest.fixture(scope="module")
def session() -> Iterator[gl.Session]:
    with gl.launch(1, 1) as session:
        yield session


def model(off: float) -> None:
    """1,500 taps; those of a layer with two digits are off, and the last has a NaN."""
    for layer in range(LAYERS):
        for part in range(PARTS):
            gl.tap(f"model.layers.{layer}.part{part}", torch.full((4,), 3.14159) + off * (10 <= layer < 100))
    gl.tap("<script>alert(1)</script>", torch.tensor([1.0, torch.nan if off else 1.0]))


def page(session: gl.Session, path: Path, **options: bool) -> str:
    made = session.report(path / "report.html", **options)
    assert made == path / "report.html"
    return made.read_text(encoding="utf-8")


def words(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<(script|style).*?</\1>|<[^>]*>", " ", text, flags=re.DOTALL)).split())


def test_a_report_has_the_conclusion_the_code_the_plan_and_the_environment(session: gl.Session, tmp_path: Path) -> None:
    session.execute("scale = 2.5  # of this cell", on="target")
    session.run(lambda: model(0.0), lambda: model(1.0))
    session.edit(keep="name == 'model.layers.7.part0'")
    try:
        text = page(session, tmp_path)
    finally:
        session.edit(keep=None)
    shown = words(text)
    assert "first divergent: model.layers.10.part0 on target[0]" in shown
    assert "non-finite values differ in 1 row, first at <script>alert(1)</script> on target[0]" in shown
    assert "No verdict was computed." in shown
    assert "scale = 2.5 # of this cell" in shown
    assert "lambda: model(1.0)" in shown
    assert "keep name == 'model.layers.7.part0'" in shown
    assert f"torch {torch.__version__}" in shown
    assert "launch baseline=1, target=1" in shown
    assert "<script>alert" not in text
    assert len(text) < 2 << 20


def test_a_report_has_failed_transforms_with_their_tracebacks(session: gl.Session, tmp_path: Path) -> None:
    session.edit(transform=("True", "def transform(graft_input):\n    raise ValueError('not today')\n"))
    try:
        session.run(lambda: gl.tap("h", torch.ones(2)), lambda: gl.tap("h", torch.ones(2)))
        shown = words(page(session, tmp_path))
    finally:
        session.edit(transform=None)
    assert "the transform failed in 1 row, first at h on target[0]: ValueError: not today" in shown
    assert "Failed transforms h on target[0]" in shown
    assert "raise ValueError('not today')" in shown


def test_a_report_has_the_newest_verdict(session: gl.Session, tmp_path: Path) -> None:
    def f(x: torch.Tensor) -> torch.Tensor:
        by = 2 if gl.here().side == "baseline" else 3
        return gl.tap("out", gl.tap("hidden", x * by).sum())

    verdict = session.verdict(f, f, args=(torch.arange(16.0),))
    written = page(session, tmp_path)
    assert verdict.text.split("\n")[0] in words(written)
    # The source of both sides, and no link: the page is read elsewhere.
    marked = [html.unescape(each) for each in re.findall("<mark>(.*?)</mark>", written)]
    number = f.__code__.co_firstlineno + 2
    assert marked == [f'▶ {number:>3}          return gl.tap("out", gl.tap("hidden", x * by).sum())'] * 2
    assert "commandlinker" not in written


def test_a_report_has_values_of_tensors_only_on_request(session: gl.Session, tmp_path: Path) -> None:
    session.edit(keep="name == 'h'")
    try:
        session.run(lambda: gl.tap("h", torch.ones(2, 2)), lambda: gl.tap("h", torch.ones(2, 2).double()))
        shown = page(session, tmp_path)
        assert "<img" not in shown
        assert "Notes of rows taps note 1 float32 -> float64" in words(shown)
        assert 'alt="h: where the pair differs.' in page(session, tmp_path, tensors=True)
    finally:
        session.edit(keep=None)


def test_a_path_that_cannot_be_written_is_named(session: gl.Session, tmp_path: Path) -> None:
    with pytest.raises(gl.SessionError, match=r"nowhere.*No such file or directory; give another path"):
        session.report(tmp_path / "nowhere" / "report.html")


def test_a_report_before_any_run_states_that_nothing_was_compared(tmp_path: Path) -> None:
    with gl.launch(1, 1) as session:
        assert "Nothing was compared yet." in words(page(session, tmp_path))


@pytest.mark.browser
def test_a_browser_opens_it_from_disk_and_fifteen_hundred_taps_stay_readable(
    session: gl.Session, tmp_path: Path, browser: Browser, pictures: Path | None
) -> None:
    expect = pytest.importorskip("playwright.sync_api", reason="playwright is not installed").expect
    session.run(lambda: model(0.0), lambda: model(1.0))
    path = session.report(tmp_path / "report.html")
    assert path.stat().st_size < 2 << 20
    context = browser.new_context(viewport={"width": 1100, "height": 1000})
    try:
        opened = context.new_page()
        requests: list[str] = []
        errors: list[str] = []
        opened.on("request", lambda request: requests.append(request.url))
        opened.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
        opened.on("pageerror", lambda error: errors.append(str(error)))
        opened.goto(path.as_uri())
        view = opened.locator("#explorer")
        expect(view.locator(".headline")).to_contain_text("first divergent: model.layers.10.part0")
        expect(view.locator(".count")).to_have_text(f"{LAYERS * PARTS + 1:,} taps")
        rows = view.locator("tbody tr[data-tap]")
        assert rows.count() < 60, "only what is in sight is in the page"
        expect(rows.first).to_contain_text("<script>alert(1)</script>")
        expect(view.locator("button.open")).to_have_count(0)
        keep_picture(opened, pictures, "report")

        # By scrolling every tap comes into sight.
        view.locator("th[data-column=order] button").click()
        view.locator(".lines").evaluate("each => { each.scrollTop = each.scrollHeight; }")
        expect(rows.last).to_contain_text("<script>alert(1)</script>")

        # One point per layer: the one of layer 10 leads to its taps.
        view.locator("input.layers").check()
        canvas = view.locator("canvas")
        box = canvas.bounding_box()
        assert box is not None
        place = {"x": 58 + 10.5 / (LAYERS + 1) * (box["width"] - 68), "y": 60}
        canvas.hover(position=place)
        expect(view.locator(".tip")).to_contain_text("model.layers.10: 6 taps, the worst")
        keep_picture(opened, pictures, "report-layers")
        canvas.click(position=place)
        expect(view.locator(".chosen b")).to_contain_text("model.layers.10.part")
        expect(view.locator("input.layers")).not_to_be_checked()
        keep_picture(opened, pictures, "report-zoomed")

        view.locator("input.find").fill("layers.77 PART3")
        expect(rows).to_have_count(1)
        expect(view.locator(".count")).to_have_text(f"1 of {LAYERS * PARTS + 1:,} taps")
        assert requests == [path.as_uri()]
        assert errors == []
    finally:
        context.close()
