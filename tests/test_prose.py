"""The English of the package: phrases that a native speaker would seldom write stay out, and test names stay short."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.parsing import parsed, uncollected

__all__ = ["uncollected"]  # for each test

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "graftlab"
PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]

# Each of these avoids a noun or a verb that says it better: "the caller" for "whoever calls", "differs" for "is other".
PHRASES = (
    "whoever",
    "goes on",
    "go on",
    "of which",
    "so many",
    "somebody",
    "nobody",
    "no more",
    "is other",
    "are other",
    "comes to",
    "as far as",
    "says so",
    "say so",
    "of its own",
    "another one",
    "that is there",
    "are there",
    "is there",
    "is told",
    "are told",
    "tells so",
)
_PHRASE = re.compile(r"\b(?:" + "|".join(PHRASES).replace(" ", r"\s+") + r")\b", re.IGNORECASE)
# Lines that are comments, one below the other, or the end of one that has code before it.
_COMMENTS = re.compile(r"(?:^[ \t]*#.*\n?)+|(?<=  )# .*", re.MULTILINE)
_WORD = re.compile(r"[A-Za-z][A-Za-z'-]*")
# Per 1,000 words. Eight well-written Python projects have 0.0 to 0.4.
LIMIT = 0.5
LONGEST_NAME = 80

# A place that a failure can name, and the text that stands there.
Text = tuple[str, str]


def sources() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def documented_nodes(tree: ast.Module) -> Iterator[ast.Constant]:
    # Statements alone: most nodes are parts of expressions.
    found: list[ast.AST] = [tree]
    for node in found:
        for block in ("body", "orelse", "handlers", "finalbody"):
            inside = getattr(node, block, ())
            found += inside if isinstance(inside, list) else ()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.body:
            first = node.body[0]
            if (
                isinstance(first, ast.Expr)
                and isinstance(first.value, ast.Constant)
                and isinstance(first.value.value, str)
            ):
                yield first.value


def files_of_tests() -> list[Path]:
    return sorted((ROOT / "tests").rglob("*.py"))


def docstrings() -> Iterator[Text]:
    yield from docstrings_of(sources())


def docstrings_of_tests() -> Iterator[Text]:
    yield from docstrings_of(files_of_tests())


def docstrings_of(paths: list[Path]) -> Iterator[Text]:
    for path in paths:
        for node in documented_nodes(parsed(path)):
            yield f"{path.relative_to(ROOT)}:{node.lineno}", str(node.value)


def messages() -> Iterator[Text]:
    """Every string of more than one word that is no docstring, parts of f-strings included."""
    for path in sources():
        tree = parsed(path)
        docs = {id(node) for node in documented_nodes(tree)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docs
            if is_text and " " in node.value.strip():
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value


def comments() -> Iterator[Text]:
    yield from comments_of(sources())


def comments_of_tests() -> Iterator[Text]:
    yield from comments_of(files_of_tests())


def comments_of(paths: list[Path]) -> Iterator[Text]:
    """Every block of comment lines as one text: a phrase may be broken over two lines.

    By a pattern, which takes a hundredth of the time of tokenize; lines of strings that look like comments count too.
    """
    for path in paths:
        text = path.read_text(encoding="utf-8")
        for found in _COMMENTS.finditer(text):
            lines = [line.lstrip("# ") for line in found.group().splitlines()]
            yield f"{path.relative_to(ROOT)}:{text.count(chr(10), 0, found.start()) + 1}", "\n".join(lines)


def pages() -> Iterator[Text]:
    for path in PAGES:
        yield str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")
    for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
        for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
            if cell["cell_type"] == "markdown":
                yield f"{path.relative_to(ROOT)}, cell {number}", "".join(cell["source"])


def phrases_in(texts: list[Text]) -> list[str]:
    return [f"{place}: {found.group()!r}" for place, text in texts for found in _PHRASE.finditer(text)]


@pytest.mark.parametrize(
    "kind",
    [docstrings, messages, comments, pages, docstrings_of_tests, comments_of_tests],
    ids=lambda kind: kind.__name__,
)
def test_english_is_ordinary(kind: object) -> None:
    assert callable(kind)
    texts = list(kind())
    words = sum(len(_WORD.findall(text)) for _, text in texts)
    found = phrases_in(texts)
    assert words > 1000
    assert 1000 * len(found) / words <= LIMIT, "\n".join(found)


def test_phrases_are_found_over_line_ends_and_in_parts_of_messages() -> None:
    assert phrases_in([("here", "the rank\nthat is\nthere")]) == ["here: 'that is\\nthere'"]
    assert phrases_in([("here", "Whoever called")]) == ["here: 'Whoever'"]
    assert phrases_in([("here", "whoeverness, of whichever, nobodys")]) == []


def test_test_names_are_short_and_ordinary() -> None:
    names = [
        f"{path.relative_to(ROOT)}: {name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"^ *def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if len(name) > LONGEST_NAME or _PHRASE.search(name.replace("_", " "))
    ]
    assert not names, "\n".join(names)
