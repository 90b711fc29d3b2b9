"""The glossary: every word that the pages define, every status and label, and the nouns of the public names."""

from __future__ import annotations

import re
from pathlib import Path
from typing import get_args

import pytest

import graftlab as gl
from graftlab.rows import schema
from graftlab.verdict.added import LABELS

ROOT = Path(__file__).resolve().parent.parent
GLOSSARY = ROOT / "docs" / "glossary.md"
PAGES = [ROOT / "README.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]

# Emphasis, and texts of buttons.
NO_WORDS_OF_OURS = {
    *("later", "on", "thread", "where", "you", "one point per layer", "jobs", "grafts", "static buffers"),
    *("Apply", "Copy code", "Matching"),
}
# Public names whose words are ordinary English or the field's.
ORDINARY = {
    *(
        "attach",
        "compile_taps",
        "export_taps",
        "here",
        "Here",
        "launch",
        "listen",
        "load_ipython_extension",
        "load_run",
    ),
    *("make_converter", "match_weights", "plots", "Ray", "record", "runs", "strip"),
}


def tables() -> list[list[str]]:
    """The words of each table, in their order."""
    parts = GLOSSARY.read_text(encoding="utf-8").split("\n## ")[1:]
    return [re.findall(r"^\| \*\*(.+?)\*\* \|", part, re.MULTILINE) for part in parts]


def defined() -> list[str]:
    """Every word that the glossary explains, in a separate line or within another word's."""
    return re.findall(r"\*\*(.+?)\*\*", GLOSSARY.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def words() -> set[str]:
    return set(defined())


def test_each_word_has_one_meaning_and_its_alphabetical_place() -> None:
    assert len(defined()) == len(set(defined()))
    assert [sorted(table, key=str.casefold) for table in tables()] == tables()


def test_about_twenty_words_come_first() -> None:
    assert len(tables()[0]) <= 25


def test_every_word_that_a_page_defines_is_in_the_glossary(words: set[str]) -> None:
    left = set()
    for page in PAGES:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for found in re.findall(r"(?<![\w*])\*([A-Za-z][^*\n]{0,60}?)\*(?![\w*])", text):
            if found not in NO_WORDS_OF_OURS and found not in words and page != GLOSSARY:
                left.add(f"{page.name}: {found}")
    assert not left


def test_every_status_and_label_is_in_the_glossary(words: set[str]) -> None:
    assert set(LABELS) <= words
    assert set(get_args(schema.Status)) <= words


def test_the_nouns_of_public_names_are_in_the_glossary(words: set[str]) -> None:
    names = [name for name in gl.__all__ if not name.endswith(("Error", "Warning")) and name not in ORDINARY]
    assert len(names) > 5
    for name in names:
        parts = {part.lower() for part in re.findall(r"[A-Z][a-z]+|[a-z]+", name)}
        assert parts & words or {part.removesuffix("s") for part in parts} & words, name
    for name in ("verdict", "match", "check", "replay", "plan"):
        assert callable(getattr(gl.Session, name)) or isinstance(getattr(gl.Session, name), property)
        assert name in words


def test_every_word_of_the_glossary_is_used(words: set[str]) -> None:
    pages = [page.read_text(encoding="utf-8").casefold() for page in PAGES if page != GLOSSARY]
    code = [path.read_text(encoding="utf-8").casefold() for path in sorted((ROOT / "graftlab").rglob("*.py"))]
    text = "\n".join([*pages, *code])
    assert not [word for word in words if word.casefold() not in text]
