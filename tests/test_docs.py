"""The README and the pages of docs/: their code runs and shows what they say that it shows, and nothing is left out."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import prose, warm
from kit.kernels import Kernel, kernel

import graftlab as gl
from graftlab import __main__ as command
from graftlab import errors
from graftlab.magics import command_line, subcommands

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(DOCS.rglob("*.md"))]
WITH_CELLS = [page for page in PAGES if prose.cells(page)]

# Blocks that no test runs, by page; each says in the page why.
NOT_RUN: dict[str, int] = {"docs/attach.md": 1, "docs/ray.md": 2}


def title(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


# ---- what the pages show is what happens ----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def notebook() -> Iterator[Kernel]:
    """One kernel for all pages: only the first launch starts a process that imports torch."""
    with kernel() as running:
        yield running


OPEN_SESSIONS = (
    "[s for s in __import__('gc').get_objects() if type(s) is __import__('graftlab').Session and not s.closed]"
)


@pytest.mark.ranks
@pytest.mark.parametrize("source", WITH_CELLS, ids=title)
def test_every_cell_of_the_page_shows_what_the_page_says(source: Path, notebook: Kernel) -> None:
    # Each page begins with nothing but the extension, if another has loaded it. One that failed may leave a session.
    notebook.run(f"for each in ({OPEN_SESSIONS}): each.close()")
    notebook.run("%reset_selective -f ^[a-zA-Z]")
    for block, expected in prose.cells(source):
        reply = notebook.run(block.text)
        error = prose.error_of(reply)
        if block.raises:
            assert error, f"{block}: this cell must raise"
            assert expected is not None, f"{block}: the page does not show what this cell raises"
        else:
            assert not error, f"{block} failed:\n{error}"
        shown = error or prose.shown_by(reply)
        if expected is not None:
            assert prose.fits(expected, shown), f"{block} shows\n{shown}\nand the page says\n{expected}"
    assert notebook.run(OPEN_SESSIONS).values == ["[]"], f"{title(source)} leaves a session open"


def test_blocks_are_cells_or_their_outputs_or_commands() -> None:
    known = {"python", "text", "sh", "{eval-rst}"}
    wrong = [
        f"{block}: {block.info!r}" for page in PAGES for block in prose.blocks(page) if block.language not in known
    ]
    assert wrong == []


def test_only_these_blocks_are_not_run_and_each_says_why() -> None:
    skipped = [block for page in PAGES for block in prose.blocks(page) if not block.is_run]
    found: dict[str, int] = {}
    for block in skipped:
        found[title(block.page)] = found.get(title(block.page), 0) + 1
        assert re.match(r"\*Not run by the tests: \S.{10,}\*", block.paragraph), f"{block} does not say why"
    assert found == NOT_RUN


def commands() -> list[tuple[str, str]]:
    """Every command line of the pages, with where it stands."""
    found = []
    for page in PAGES:
        for block in prose.blocks(page):
            if block.language == "sh":
                lines = (line.partition("#")[0].strip() for line in block.text.splitlines())
                found += [(str(block), line) for line in lines if line]
    return found


@pytest.mark.ranks
def test_commands_of_the_pages_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    pyproject = (ROOT / "pyproject.toml").read_text()
    helps: dict[str, str] = {}
    for where, line in commands():
        words = shlex.split(line)
        if words[0] == "make":
            for target in words[1:]:
                if re.fullmatch(r"[a-z-]+", target):
                    assert re.search(rf"^{target}:", makefile, re.MULTILINE), f"{where}: no target {target}"
                else:
                    assert re.match(r"[A-Z_]+=", target), f"{where}: {target}"
        elif words[:2] == ["pip", "install"]:
            for extra in re.findall(r"\[([a-z,]+)\]", line):
                assert all(re.search(rf"^{each} = \[", pyproject, re.MULTILINE) for each in extra.split(",")), where
        elif words[:2] == ["python", "-m"] and words[2].startswith("graftlab."):
            module = words[2]
            if module not in helps:
                told = warm.start(["-m", module, "-h"], {**os.environ}, cwd=ROOT)
                helps[module], err = told.communicate()
                assert told.returncode == 0, f"{where}: {err}"
            for option in re.findall(r"(--[a-z-]+)", line):
                assert option in helps[module], f"{where}: {module} has no option {option}"
        elif words[0] == "graftlab" and words[1] in ("compare", "new"):
            if words[1] not in helps:
                with contextlib.redirect_stdout(io.StringIO()) as said, pytest.raises(SystemExit):
                    command.main([words[1], "-h"])
                helps[words[1]] = said.getvalue()
            for option in re.findall(r"(?<= )(--[a-z-]+)", re.sub(r'"[^"]*"', "", line)):
                assert option in helps[words[1]], f"{where}: {words[1]} has no option {option}"
        else:
            assert words[0] in ("python", "git", "export", "ruff", "mypy"), f"{where}: {line}"


# ---- nothing is left out --------------------------------------------------------------------------------------------


def sections(page: Path) -> dict[str, str]:
    parts = re.split(r"^## (.+)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def exceptions() -> set[str]:
    own = {name: value for name, value in vars(errors).items() if isinstance(value, type)}
    return {
        name for name, value in own.items() if issubclass(value, BaseException) and value.__module__ == errors.__name__
    }


def test_every_exception_has_a_section_that_shows_it_and_the_right_way() -> None:
    found = sections(DOCS / "errors.md")
    assert set(found) - {"What raises nothing"} == exceptions()
    for name, text in found.items():
        if name not in ("What raises nothing", "GraftError"):
            assert "Wrong:" in text or "raises\n" in text, name
            assert "Right:" in text, name
            shown = re.findall(r"^```text\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
            # Of some the class is not what the reader sees: a row says it, or Python's own name.
            assert any(name in each for each in shown) or name in ("BufferFullError", "WaitInterrupted"), name


def test_every_column_of_a_frame_is_explained(tmp_path: Path) -> None:
    from graftlab.rows.store import to_frame

    explained = set(
        re.findall(r"`(\w+)`", "".join(re.findall(r"^\| .* \|", sections(DOCS / "rows.md")["Columns"], re.MULTILINE)))
    )
    assert set(to_frame([]).columns) <= explained


def test_every_magic_is_explained_with_its_options() -> None:
    text = (DOCS / "magics.md").read_text(encoding="utf-8")
    for name, each in subcommands.COMMANDS.items():
        (row,) = re.findall(rf"^\| `%graft {name}\b.*$", text, re.MULTILINE)
        explained = set(re.findall(r"`(--?[a-z0-9-]+)`", row))
        assert explained == set(each.options) - {"-h", "--help"}, name
    assert all(f"`{target}`" in text or f"%%graft {target}" in text for target in command_line.CELL_TARGETS)


def rooms() -> set[str]:
    package = ROOT / "graftlab"
    return {path.stem for path in package.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}


def test_the_picture_of_the_layout_has_every_room_in_the_order_of_imports() -> None:
    picture = next(b.text for b in prose.blocks(ROOT / "CONTRIBUTING.md") if b.language == "text")
    drawn = re.findall(r"^   (\w+) {2,}\S", picture, re.MULTILINE)
    order = re.search(r"^ROOMS = \[(.*?)\]", (ROOT / "tests" / "test_layout.py").read_text(), re.MULTILINE | re.DOTALL)
    assert order is not None
    assert drawn == re.findall(r'"(\w+)"', order[1])
    assert set(drawn) == rooms()


def test_files_that_pages_name_exist() -> None:
    wrong = []
    for page in PAGES:
        for name in set(re.findall(r"`((?:[a-z_]+/)+[a-z_]+\.(?:py|ipynb|md))`", page.read_text(encoding="utf-8"))):
            is_there = (ROOT / name).is_file() or (ROOT / "graftlab" / name).is_file()
            if not is_there and not name.endswith(("yours.py", "yours.md", "yours.ipynb")):
                wrong.append(f"{title(page)}: {name}")
    assert wrong == []


# What these pages say is held by tests of their own, or they are lists of names, whose docstrings say what they do.
WITHOUT_PROMISES = {
    *("CONTRIBUTING.md", "docs/errors.md", "docs/glossary.md", "docs/promises.md"),
    # It is about versions that do not exist yet.
    "docs/stability.md",
    *(f"docs/api/{name}.md" for name in ("engine", "matching", "plots", "requests", "transforms")),
}


def promises() -> dict[str, list[tuple[str, list[str]]]]:
    """Of each page, by its link: what it promises, and the tests that hold that."""
    page = (DOCS / "promises.md").read_text(encoding="utf-8")
    parts = re.split(r"^## \[.+?\]\((.+?)\)$", page, flags=re.MULTILINE)
    assert len(set(parts[1::2])) == len(parts[1::2]), "a page has two sections"
    rows = {
        link: re.findall(r"^\| (.+) \| (`.+`) \|$", text, re.MULTILINE)
        for link, text in zip(parts[1::2], parts[2::2], strict=True)
    }
    assert sum(map(len, rows.values())) == len(re.findall(r"^\| (?!promise)", page, re.MULTILINE)), "a row has no test"
    return {link: [(promise, re.findall(r"`(.+?)`", tests)) for promise, tests in each] for link, each in rows.items()}


def test_every_promise_is_on_its_page_and_its_test_exists() -> None:
    def words(text: str) -> str:
        return " ".join(text.split())

    wrong = []
    for link, rows in promises().items():
        page, place = words((DOCS / link).read_text(encoding="utf-8")), 0
        for promise, tests in rows:
            found = page.find(promise, place)
            if found < 0:
                where = "not on" if promise not in page else "out of the order of"
                wrong.append(f"{where} {link}: {promise}")
            place = max(place, found)
            for file, _, test in (each.partition("::") for each in tests):
                path = ROOT / "tests" / file
                if not path.is_file() or f"def {test}(" not in path.read_text(encoding="utf-8"):
                    wrong.append(f"no such test: {file}::{test}, which is to hold: {promise}")
    assert wrong == []


def test_no_page_is_without_promises_that_were_looked_at() -> None:
    pages = {title(page) for page in (*PAGES, ROOT / "SECURITY.md")} - WITHOUT_PROMISES
    held = {title((DOCS / link).resolve()) for link, rows in promises().items() if rows}
    assert sorted(pages - held) == [], "read these, and put what they promise into docs/promises.md"
    assert sorted(held - pages) == []


# ---- links and pictures ---------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as both GitHub and the site make them."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_link_leads_somewhere() -> None:
    wrong = []
    for page in PAGES:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
        for link in re.findall(r"\]\(([^)]+)\)|src=\"([^\"]+)\"", text):
            target, _, anchor = (link[0] or link[1]).partition("#")
            if "://" in target:
                continue
            there = (page.parent / target).resolve() if target else page
            if not there.is_file() or (anchor and anchor not in anchors(there)):
                wrong.append(f"{title(page)}: {target}#{anchor}")
    assert wrong == []


def test_every_picture_is_shown_on_some_page() -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES)
    unused = [path.name for path in (DOCS / "images").iterdir() if f"images/{path.name}" not in text]
    assert unused == []


# ---- the site -------------------------------------------------------------------------------------------------------


def configuration() -> object:
    spec = importlib.util.spec_from_file_location("docs_conf", DOCS / "conf.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        # It sets them for the kernels of a build.
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("GRAFTLAB_HOME", "")
        spec.loader.exec_module(module)
    return module


def test_the_site_lists_every_page_and_notebook() -> None:
    conf = configuration()
    front = conf.contents((ROOT / "README.md").read_text())
    below = conf.contents((DOCS / "api" / "index.md").read_text())
    listed = [name for names in front.values() for name in names]
    listed += [f"docs/api/{name}" for names in below.values() for name in names]
    paths = [
        *DOCS.rglob("*.md"),
        *(ROOT / "notebooks").glob("*.ipynb"),
        ROOT / "CONTRIBUTING.md",
        ROOT / "CHANGELOG.md",
        ROOT / "SECURITY.md",
    ]
    assert sorted(listed) == sorted(path.relative_to(ROOT).with_suffix("").as_posix() for path in paths)


@pytest.mark.parametrize(
    ("written", "loads"),
    [
        ('<script async src="https://cdn.example.org/a.js"></script>', "https://cdn.example.org/a.js"),
        ("<link rel='stylesheet' href='//fonts.example.org/css'>", "//fonts.example.org/css"),
        ("<style>@import url('https://cdn.example.org/a.css');</style>", "https://cdn.example.org/a.css"),
        ("<style>body { background: url(http://example.org/a.png) }</style>", "http://example.org/a.png"),
        ('<img alt="a" src="http://example.org/a.png">', "http://example.org/a.png"),
        ('<a href="https://example.org">a link</a> <img src="a.png"> <script src="a.js"></script>', None),
    ],
)
def test_what_a_page_would_load_from_elsewhere_is_found(written: str, loads: str | None, tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(written)
    found = configuration().loaded_from_elsewhere(tmp_path)
    assert found == ([] if loads is None else [f"index.html loads {loads}"])


@pytest.mark.ranks
@pytest.mark.timeout(400)  # ten seconds of the processor, and a busy machine gives it little
@pytest.mark.soak
def test_the_pages_and_the_api_make_a_site_without_a_warning(tmp_path: Path) -> None:
    # With all pages and references; `make docs`, which .github/workflows calls, executes the notebooks, too.
    command = ["-m", "sphinx", "-b", "html", "-W", "-q", "-c", "docs", "-D", "nb_execution_mode=off"]
    folders = ["-d", tmp_path / "doctrees", ".", tmp_path / "site"]
    with warm.start([*command, *folders], {**os.environ}, cwd=ROOT) as built:
        out, err = built.communicate()
    assert built.returncode == 0, out + err
    assert (tmp_path / "site" / "index.html").is_file()
    assert gl.__name__ in (tmp_path / "site" / "index.html").read_text()
