"""The filter editor's feedback on a text, as HTML: its syntax error and the taps it matches."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence

from graftlab.base.tags import RESERVED_TAGS
from graftlab.base.text import shortened
from graftlab.errors import FilterError
from graftlab.filters.check import Tags, tested_in_words

NAMES_SHOWN = 12
"""Taps shown at once; further ones are folded."""

NAMES_LISTED = 500
"""Taps listed in total."""

# Characters shown on each side of an error, however long the text.
_ECHO = 40
_TEXT_SHOWN = 160
_LABEL_SHOWN = 80


def fault_html(error: FilterError) -> str:
    """The text around the error, with a caret below, and the message."""
    text, at = error.expression, error.position
    start, stop = max(0, at - _ECHO), at + _ECHO
    before = ("…" if start else "") + _one_line(text[start:at])
    after = _one_line(text[at:stop]) + ("…" if stop < len(text) else "")
    # The same characters, invisible, instead of blanks: some scripts have wider characters.
    caret = f'<span class="unseen" aria-hidden="true">{html.escape(before)}</span><b>^</b>'
    message = html.escape(shortened(error.message, 2 * _TEXT_SHOWN))
    return (
        f'<div class="fault bad" role="alert"><pre>{html.escape(before)}{html.escape(after)}\n{caret}</pre>'
        f"{message} (at position {at:,})</div>"
    )


def _one_line(text: str) -> str:
    return text.translate({ord("\n"): "⏎", ord("\r"): "⏎", ord("\t"): " "})


def overlap_message(number: int) -> str:
    """Why Apply is disabled; plain text."""
    taps = "1 tap" if number == 1 else f"{number:,} taps"
    return f"both b2t and t2b match {taps}; narrow one of the filters"


def matches_html(hits: Sequence[int], both: Collection[int], taps: Sequence[Tags]) -> str:
    """The matching taps among those seen, and their number; those in ``both`` come first, marked."""
    if not taps:
        return quiet("no taps seen yet")
    none = "" if hits else " none"
    count = f'<span class="count{none}"><b>{len(hits):,}</b> of {tested_in_words(taps)}</span>'
    # Taps that block Apply come first, so that they are always listed.
    order = [*both, *(index for index in hits if index not in both)]
    names = [_tap(taps[index], index in both) for index in order[:NAMES_LISTED]]
    shown, folded = names[:NAMES_SHOWN], names[NAMES_SHOWN:]
    more = ""
    if folded:
        others = f" and {len(order) - len(names):,} others" if len(order) > len(names) else ""
        more = f"<details><summary>{len(order) - len(shown):,} more</summary>{' '.join(folded)}{others}</details>"
    return f'<div class="matches">{count} {" ".join(shown)} {more}</div>'


def _tap(tags: Tags, is_both: bool) -> str:
    given = [f"{name}={value!r}" for name, value in tags.items() if name not in RESERVED_TAGS]
    if tags.get("recompute_status") == "recompute":
        given.append("recompute_status='recompute'")
    label = html.escape(shortened(" ".join([str(tags["name"]), *given]), _LABEL_SHOWN))
    return f'<span class="tap both">{label} <b>both</b></span>' if is_both else f'<span class="tap">{label}</span>'


def unknown_tag(name: str, meant: str | None) -> str:
    hint = f"; did you mean {code(meant)}?" if meant else ""
    return quiet(f"no tap seen so far has the tag {code(name)}{hint}", "unknown")


def value_hint(text: str, value: str) -> str:
    return quiet(f"no tap has {code(repr(text))}; did you mean {code(repr(value))}?", "unknown")


def missed_note(run: int) -> str:
    """A note that the filter in force matched no tap of the newest run."""
    return f'<div class="missed" role="status">matched no tap in run {run}</div>'


def in_force_note(text: str, overtaken: bool) -> str:
    """The filter in force, beside an edited one."""
    now = f"in force: {code(text) or 'nothing'}"
    if not overtaken:
        return quiet(now, "in-force")
    return f'<div class="overtaken" role="status">changed elsewhere, and your text is kept; {now}</div>'


def code(text: str) -> str:
    return f"<code>{html.escape(shortened(_one_line(text.strip()), _TEXT_SHOWN))}</code>" if text.strip() else ""


def quiet(markup: str, kind: str = "") -> str:
    return f'<div class="{f"quiet {kind}".strip()}">{markup}</div>'


STYLE = """
.graftlab-filter-editor > .graftlab-message { min-height: 22px; margin: 0 4px }
.graftlab-filter-editor .name { font-weight: 600; line-height: 1.2; margin-top: 3px }
.graftlab-filter-editor .caption { font-size: 11px; line-height: 1.2; color: var(--gl-faint) }
.graftlab-filter-editor .graftlab-below { margin: 0 4px 6px; width: auto; max-width: 100% }
.graftlab-filter-editor .graftlab-below > div { min-width: 0; max-width: 100% }
.graftlab-filter-editor code, .graftlab-filter-editor pre, .graftlab-filter-editor .tap {
  font-family: var(--gl-code); font-size: var(--jp-code-font-size, 12px);
}
.graftlab-filter-editor code { background: none; padding: 0; color: inherit; overflow-wrap: anywhere }
.graftlab-filter-editor .fault pre {
  margin: 0; line-height: 1.25; color: inherit; background: none; white-space: pre; overflow-x: auto;
}
.graftlab-filter-editor .unseen { visibility: hidden }
.graftlab-filter-editor .matches .count { margin-right: 0.6em; color: var(--gl-faint) }
.graftlab-filter-editor .matches .none, .graftlab-filter-editor .missed { color: var(--gl-warn) }
.graftlab-filter-editor .matches details { display: inline }
.graftlab-filter-editor .matches details[open] { display: block; max-height: 12em; overflow-y: auto }
.graftlab-filter-editor .matches summary { display: inline-block; cursor: pointer; text-decoration: underline dotted }
.graftlab-filter-editor .tap {
  display: inline-block; padding: 0 5px; margin: 1px 0; border-radius: 3px; font-size: 12px; line-height: 1.5;
  background: var(--gl-fill); overflow-wrap: anywhere;
}
.graftlab-filter-editor .tap.both { color: var(--gl-bad); background: none; box-shadow: inset 0 0 0 1px var(--gl-bad) }
.graftlab-filter-editor .graftlab-restore { height: 24px; line-height: 24px; flex: 0 0 auto }
"""
