"""A session as one page to attach to an issue: what was run, the conclusions, and the worst taps.

The page is one file, and its content security policy forbids it to load anything. It shows values of tensors only on
request; messages of errors and notes are included unchanged.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import html
import json
import os
import platform
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from types import CodeType
from typing import Any

import torch

from graftlab.base.html import cell, table
from graftlab.base.tags import own_tags
from graftlab.control.core import SessionCore, internals_of
from graftlab.control.run import Run, failing_in, state_of
from graftlab.control.verdicts import Verdict
from graftlab.control.work import source_of
from graftlab.errors import GraftError, SessionError
from graftlab.plan.plan import FILTERS, GraftPlan
from graftlab.plots import explorer
from graftlab.rows import loading
from graftlab.rows.rendering import written
from graftlab.rows.schema import DIFFERENCES, Row
from graftlab.verdict.conclusion import Conclusion, conclude, newest_run
from graftlab.verdict.source_view import source_view

_PACKAGES = ("graftlab", "torch", "numpy", "transformers", "triton")
_WORST = 30
_FAILED = 20
_NOTES = 30
_PICTURES = 12
_CODE = 100
# The page's script is named by its hash, so no other script runs, whatever a text contains.
_POLICY = "default-src 'none'; script-src '{script}'; style-src 'unsafe-inline'; img-src data:"

_STYLE = """
:root { color-scheme: light dark }
body { font: 14px/1.5 system-ui, sans-serif; max-width: 1100px; margin: 2em auto; padding: 0 1em }
h1 { font-size: 1.5em } h2 { font-size: 1.15em; margin-top: 2em }
pre { overflow-x: auto; padding: 8px 10px; font-size: 12px }
pre { background: color-mix(in srgb, currentColor 7%, transparent) }
.static table { border-collapse: collapse; font-size: 12px }
.static td, .static th { padding: 2px 10px; text-align: left }
.static td { border-top: 1px solid color-mix(in srgb, currentColor 20%, transparent); overflow-wrap: anywhere }
.static .number { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap }
img { max-width: 100% }
#explorer .headline { display: none }
"""


def write_report(session: SessionCore, path: str | Path, verdict: Verdict | None, tensors: bool) -> Path:
    """Write the page; see :meth:`graftlab.Session.report`."""
    found = conclude(newest_run(session.frame, internals_of(session).set_aside), session.taps)
    parts = [
        f"<h1>graftlab report</h1><p>{time.strftime('%Y-%m-%d %H:%M %Z')}</p>",
        _conclusion(found, verdict, failing_in(session.runs, found)),
        "<h2>Taps</h2><div id='explorer'></div>",
        _worst(found),
        _failed(found),
        _notes(found),
        _plan(session.plan),
        _code(session.runs),
        _environment(session),
        *([_pictures(session)] if tensors else []),
    ]
    return _written(path, parts, found)


def write_report_of_rows(folder: Path, path: str | Path, verdict: Verdict | None) -> Path:
    """Write the page from rows on disk; see :meth:`graftlab.loaded_run.LoadedRun.report`."""
    found = conclude(newest_run(loading.load_run(folder)), [])
    parts = [
        f"<h1>graftlab report</h1><p>{time.strftime('%Y-%m-%d %H:%M %Z')}, from the rows in "
        f"{html.escape(str(folder))}</p>",
        _conclusion(found, verdict),
        "<h2>Taps</h2><div id='explorer'></div>",
        _worst(found),
        _failed(found),
        _notes(found),
        _section(
            "Not included",
            "<p>The rows of a run do not contain its plan, its code, its tensors, or the environment of its ranks.</p>",
        ),
    ]
    return _written(path, parts, found)


def _written(path: str | Path, parts: Sequence[str], found: Conclusion) -> Path:
    made = Path(path).expanduser()
    page = _page(parts, {**explorer.taps(found), **explorer.figures(found)}).encode()
    try:
        _replace(made, page)
    except OSError as error:
        raise SessionError(f"the report cannot be written to {made}: {error.strerror}; give another path") from error
    return made


def _replace(path: Path, content: bytes) -> None:
    """Replace the file by a whole new one, or leave it unchanged. Raises OSError."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        # A pipe, a device, or a link to a file elsewhere must not be replaced.
        path.write_bytes(content)
        return
    descriptor, part = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(content)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(part, path.stat().st_mode & 0o777 if path.exists() else 0o666 & ~umask)
        os.replace(part, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(part)
        raise


def _page(parts: Sequence[str], state: dict[str, Any]) -> str:
    # A closing tag in the data would end the script element.
    data = json.dumps(state, separators=(",", ":")).replace("<", "\\u003c")
    script = (
        f"\n{explorer.SCRIPT.read_text(encoding='utf-8')}\n"
        'mount(document.getElementById("explorer")).show(JSON.parse(document.getElementById("state").textContent));\n'
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = _POLICY.format(script=f"sha256-{digest}")
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>graftlab report</title>'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}"><style>{_STYLE}</style></head>\n'
        f'<body>\n{"".join(parts)}\n<script type="application/json" id="state">{data}</script>\n'
        f'<script type="module">{script}</script></body></html>\n'
    )


def _section(title: str, body: str) -> str:
    return f'<section class="static"><h2>{title}</h2>{body}</section>'


def _conclusion(found: Conclusion, verdict: Verdict | None, failing: Mapping[str, str] | None = None) -> str:
    lines = [explorer.headline(found, failing), *found.sentences[1:]]
    body = "".join(f"<p>{'<b>' * (not at)}{html.escape(line)}{'</b>' * (not at)}</p>" for at, line in enumerate(lines))
    if verdict is None:
        return _section("Conclusion", f"{body}<p>No verdict was computed.</p>")
    words = "".join(f"<p>{html.escape(line)}</p>" for line in verdict.text.split("\n"))
    # No links: the page is read elsewhere.
    sources = source_view(verdict.findings.lines, link=lambda file, text: html.escape(text))
    return _section("Conclusion", body) + _section("Newest verdict", words + sources)


def _worst(found: Conclusion) -> str:
    lines = sorted(found.lines, key=lambda line: -line.badness)[:_WORST]
    head = ("tap", "status", *DIFFERENCES, "shape", "dtype", "worst on")
    rows = []
    for line in lines:
        row = line.row
        cells = [cell(line.name), cell(row.status)]
        cells += [cell(written(name, getattr(row, name)), "number") for name in DIFFERENCES]
        cells += [cell(row.shape or ""), cell(row.dtype or ""), cell(f"{row.side}[{row.rank}]")]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    return _section(f"Worst taps ({len(lines)} of {len(found.lines)})", table(head, rows, DIFFERENCES)) if lines else ""


def _failed(found: Conclusion) -> str:
    failed = [line for line in found.lines if line.row.status == "failed"]
    shown = "".join(
        f"<p>{html.escape(line.name)} on {line.row.side}[{line.row.rank}]</p>"
        f"<pre>{html.escape(line.row.error or 'no reason is known')}</pre>"
        for line in failed[:_FAILED]
    )
    more = f"<p>and {len(failed) - _FAILED:,} more</p>" if len(failed) > _FAILED else ""
    return _section("Failed transforms", shown + more) if failed else ""


def _notes(found: Conclusion) -> str:
    def notes_of(row: Row) -> list[str]:
        return [text for text in (row.note, row.cast, row.error if row.status != "failed" else None) if text]

    counted = Counter(note for line in found.lines for note in notes_of(line.row))
    rows = [
        f"<tr>{cell(count, 'number')}{cell(note.partition(chr(10))[0])}</tr>"
        for note, count in counted.most_common(_NOTES)
    ]
    more = f"<p>and {len(counted) - _NOTES:,} others</p>" if len(counted) > _NOTES else ""
    return _section("Notes of rows", table(("taps", "note"), rows) + more) if rows else ""


def _plan(plan: GraftPlan) -> str:
    rows = [f"<tr>{cell(name)}{cell(getattr(plan, name) or '(matches nothing)')}</tr>" for name in FILTERS]
    rows += [f"<tr>{cell('rename')}{cell(f'{side}: {old} → {new}')}</tr>" for side, old, new in plan.rename]
    source = "".join(
        f"<p>{html.escape(spec.described)}</p><pre>{html.escape(spec.text)}</pre>" for spec in plan.transforms
    )
    rows.append(f"<tr>{cell('transform')}{cell('see below' if plan.transforms else 'the default')}</tr>")
    return _section(f"Plan {plan.version}", table(("filter", "taps"), rows) + source)


def _code(runs: Sequence[Run]) -> str:
    """Each piece of code once, under its first run."""
    first: dict[tuple[str, str | CodeType], int] = {}
    for run in runs:
        for where, code in state_of(run).code.items():
            first.setdefault((where, code), run.number)
    shown = [
        f"<p>run {number}, {html.escape(where)}</p><pre>{html.escape(source_of(code))}</pre>"
        for (where, code), number in list(first.items())[-_CODE:]
    ]
    more = f"<p>{len(first) - _CODE:,} earlier pieces are left out</p>" if len(first) > _CODE else ""
    return _section("Code that was run", more + "".join(shown)) if shown else ""


def _environment(session: SessionCore) -> str:
    facts = {"Python": sys.version.split()[0], "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            # The build matters too, and the package's metadata lack it.
            facts[package] = torch.__version__ if package == "torch" else metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    facts["CUDA"] = str(torch.version.cuda or "not in this build of torch")
    for rank in session.ranks:
        facts[rank.label] = rank.assignment.device
    options = session.options
    facts["launch"] = (
        f"baseline={options.baseline}, target={options.target}, device={options.device}, backend={options.backend}, "
        f"timeout={options.timeout:g}, start_method={options.start_method}"
    )
    rows = [f"<tr>{cell(name)}{cell(value)}</tr>" for name, value in facts.items()]
    return _section("Environment", table(("what", "which"), rows))


def _pictures(session: SessionCore) -> str:
    """Heatmaps of the kept pairs; on request only, because they show values."""
    # matplotlib takes a quarter of the time of importing torch, and most reports have no pictures.
    from graftlab.control.session_plots import SessionPlots
    from graftlab.plots.style import to_html
    from graftlab.plots.themes import STYLE, in_words

    plot = SessionPlots(session)
    kept = {(str(tags["name"]), tuple(own_tags(tags).items())): None for tags in session.kept()}
    shown = []
    for name, tags in list(kept)[:_PICTURES]:
        try:
            figure = plot.heatmap(name, **dict(tags))
        except GraftError as error:
            shown.append(f"<p>{html.escape(f'{name}: {error}')}</p>")
            continue
        shown.append(to_html(figure, f"{name}: where the pair differs. {in_words(figure)}"))
    more = f"<p>and {len(kept) - _PICTURES:,} more kept pairs</p>" if len(kept) > _PICTURES else ""
    return _section("Kept pairs", STYLE + "".join(shown) + more if shown else "<p>No pair is kept.</p>")
