"""Progress bars: one display with their current state, and the lines that they end with."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
from tqdm.std import tqdm

from graftlab.ranks import streams
from graftlab.ranks.streams import LabelledStream, LiveLines


class Shown:
    """The lines that a stream sends, and the states of its bars."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        # Every state is shown, however soon after the last one.
        monkeypatch.setattr(streams, "_LIVE_INTERVAL", -1.0)
        self.log = io.StringIO()
        self.lines: list[str] = []
        self.live: list[str] = []
        self.stream = LabelledStream(self.log, self.lines.append, self.live.append)

    @property
    def text(self) -> str:
        return "".join(self.lines)


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> Shown:
    return Shown(monkeypatch)


def bar(shown: Shown, count: int, **options: object) -> tqdm[int]:
    return tqdm(range(count), file=shown.stream, mininterval=0, miniters=1, ncols=60, **options)  # type: ignore[arg-type]


def test_a_bar_is_one_live_line_and_ends_as_one_line(shown: Shown) -> None:
    for _ in bar(shown, 5, desc="epoch"):
        pass
    assert [text for text in shown.live if "\n" in text] == []
    assert {text[:12] for text in shown.live if text} == {"epoch:   0%|", "epoch:  20%|", "epoch:  40%|"} | {
        "epoch:  60%|",
        "epoch:  80%|",
        "epoch: 100%|",
    }
    shown.stream.flush_lines()
    assert shown.live[-1] == ""
    assert shown.text.count("\n") == 1
    assert shown.text.startswith("epoch: 100%|")
    assert "5/5" in shown.text


def test_bars_are_shown_a_few_times_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now, live = [10.0], list[str]()
    monkeypatch.setattr(streams, "time", SimpleNamespace(monotonic=lambda: now[0]))
    stream = LabelledStream(io.StringIO(), lambda text: None, live.append)
    for step in range(10):
        now[0] = 10.0 + step / 16
        stream.write(f"\rstep {step}")
    assert live == ["step 0", "step 4", "step 8"]


def test_nested_bars_take_a_line_each_in_one_display(shown: Shown) -> None:
    for _ in bar(shown, 2, desc="outer"):
        for _ in bar(shown, 3, desc="inner", leave=False, position=1):
            pass
    two = [text.splitlines() for text in shown.live if text.count("\n") == 1]
    assert any(above.startswith("outer:  50%") and below.startswith("inner:  67%") for above, below in two)
    assert max(len(text.splitlines()) for text in shown.live) == 2
    shown.stream.flush_lines()
    assert [line[:10] for line in shown.text.splitlines()] == ["outer: 100"]


def test_output_after_a_bar_follows_its_last_line(shown: Shown) -> None:
    for _ in bar(shown, 3, desc="bar"):
        pass
    print("done", file=shown.stream)
    assert [line[:8] for line in shown.text.splitlines()] == ["bar: 100", "done"]
    assert shown.live[-1] == ""
    print("more", file=shown.stream)
    assert shown.text.splitlines()[-1] == "more"


def test_successive_bars_take_bounded_space_and_none_is_lost(shown: Shown) -> None:
    for number in range(30):
        for _ in bar(shown, 2, desc=f"b{number:02}"):
            pass
    assert max(len(text.splitlines()) for text in shown.live) <= 9
    shown.stream.flush_lines()
    assert [line[:3] for line in shown.text.splitlines()] == [f"b{number:02}" for number in range(30)]


def test_an_overwritten_line_shows_its_latest_text() -> None:
    lines = LiveLines()
    assert lines.write("12345\rab") == ""
    assert lines.text == "ab345"
    lines.write("\r\x1b[K\x1b[31mred")
    assert lines.text == "redd5"[:3] + "45"
    lines.write("\n\rbelow\x1b[A\rabove")
    assert lines.text == "above\nbelow"
    # There is no line above the first.
    lines.write("\x1b[A\x1b[A\x1b[A\rfirst")
    assert lines.text == "first\nbelow"


def test_a_bar_begins_behind_what_its_line_has_already(shown: Shown) -> None:
    shown.stream.write("loading 1%")
    shown.stream.write("\rL")
    assert shown.live == ["Loading 1%"]
    shown.stream.flush_lines()
    assert shown.text == "Loading 1%\n"
    assert shown.log.getvalue() == "loading 1%\rL"


def test_windows_line_ends_are_not_taken_for_bars(shown: Shown) -> None:
    shown.stream.write("one\r\ntwo\r\n")
    assert shown.live == []
    assert shown.text.split() == ["one", "two"]


def test_text_is_written_where_the_last_one_has_ended() -> None:
    lines = LiveLines()
    lines.write("ab")
    lines.write("cd")
    assert lines.text == "abcd"
    lines.write("\rx")
    lines.write("y")
    assert lines.text == "xycd"
