"""Text that a notebook shows and replaces while something runs."""

from __future__ import annotations

from typing import Any

import pytest

from graftlab.base import live


def test_text_is_published_once_for_each_change_under_one_name(monkeypatch: pytest.MonkeyPatch) -> None:
    published: list[tuple[str, str, str, bool]] = []

    def publish(bundle: dict[str, str], *, transient: dict[str, Any], update: bool) -> None:
        published.append((bundle["text/plain"], bundle["text/html"], transient["display_id"], update))

    monkeypatch.setattr(live, "publisher", lambda: publish)
    shown = live.LiveText()
    for text in ("", "one", "one", "two < 3", "", ""):
        shown.show(text)
    names = {name for _, _, name, _ in published}
    assert len(names) == 1
    assert [(plain, update) for plain, _, _, update in published] == [("one", False), ("two < 3", True), ("", True)]
    style = live._STYLE
    assert [html for _, html, _, _ in published] == [
        f'<pre class="graftlab-live" style="{style}">one</pre>',
        f'<pre class="graftlab-live" style="{style}">two &lt; 3</pre>',
        live._NOTHING,
    ]
    other = live.LiveText()
    other.show("one")
    assert published[-1][2] not in names
