"""What is public: the documented names and no others, each with an example that runs; and annotations in the wheel."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import subprocess
import sys
import types
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kit import prose
from kit.in_process import talking_ranks
from kit.support import reset

import graftlab as gl
from graftlab.control.replay import Replay
from graftlab.control.verdicts import Verdict
from graftlab.grafting.trial import Trial
from graftlab.judging.replica_check import ReplicaCheck
from graftlab.ranks.options import LaunchOptions
from graftlab.rows.store import RowStore

ROOT = Path(__file__).resolve().parent.parent
API = ROOT / "docs" / "api"
MODULES = {
    "graftlab.plots": "plots.md",
    "graftlab.transforms": "transforms.md",
    "graftlab.layouts": "matching.md",
    "graftlab.requests": "requests.md",
    "graftlab.engine": "engine.md",
    "graftlab.graphs": "engine.md",
    "graftlab.models": "engine.md",
}
# Examples of these would only repeat their fields; pages show them where they are used.
WITHOUT_AN_EXAMPLE = {
    *("DifferenceMap", "Here", "Dropped", "Dump", "DumpSettings", "LoggingSettings", "Opaque", "RecordedRequest"),
    # `%load_ext graftlab` calls it.
    "load_ipython_extension",
}


def documented(page: str) -> set[str]:
    """The names that a page of the API documents, in its directives and its tables."""
    text = (API / page).read_text(encoding="utf-8")
    directives = re.findall(
        r"^\.\. (?:auto)?(?:function|class|exception|data|attribute):: ([\w.]+)", text, re.MULTILINE
    )
    rows = "".join(re.findall(r"^\| .*$", text, re.MULTILINE))
    return {name.rpartition(".")[2] for name in directives} | set(re.findall(r"`(\w+)`", rows))


# ---- names ----------------------------------------------------------------------------------------------------------


def test_the_api_page_lists_the_names_of_the_package() -> None:
    _, _, text = (API / "index.md").read_text(encoding="utf-8").partition("## Every name of `graftlab`")
    assert sorted(re.findall(r"`(\w+)`", text.partition("\n## ")[0])) == sorted(gl.__all__)


def test_every_name_of_the_package_is_documented_below_it() -> None:
    below = documented("taps.md") | documented("session.md") | documented("transforms.md") | documented("matching.md")
    modules = {name for name in gl.__all__ if inspect.ismodule(getattr(gl, name))}
    # A class of a module that has a separate page.
    elsewhere = {name for name in gl.__all__ if name in importlib.import_module("graftlab.transforms").__all__}
    assert set(gl.__all__) - below - modules - elsewhere == set()


@pytest.mark.parametrize("module", MODULES)
def test_a_public_modules_names_exist_and_are_on_its_page(module: str) -> None:
    found = importlib.import_module(module)
    assert len(found.__all__) == len(set(found.__all__))
    text = (API / MODULES[module]).read_text(encoding="utf-8")
    assert f".. automodule:: {module}\n   :members:" in text
    # What has a docstring comes with the module; data and names that are looked up when they are used do not.
    explicit = documented(MODULES[module])
    hidden = [
        name
        for name in found.__all__
        if not (
            name in dir(found) and (inspect.isclass(getattr(found, name)) or inspect.isroutine(getattr(found, name)))
        )
        and name not in explicit
    ]
    assert hidden == []


def attributes(kind: object) -> set[str]:
    return {name for name in dir(kind) if not name.startswith("_")}


def listed_under(heading: str) -> list[str]:
    """The attributes that docs/api/session.md lists for a class."""
    text = (API / "session.md").read_text(encoding="utf-8").partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return sorted(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| `[^|]*\|", text, re.MULTILINE))))


@pytest.mark.parametrize(
    ("heading", "expected"),
    [
        ("A replay", attributes(Replay) | set(Replay.__dataclass_fields__)),
        ("A check of one side's ranks", attributes(ReplicaCheck) | set(ReplicaCheck.__dataclass_fields__)),
        ("A verdict", attributes(Verdict) | set(Verdict.__dataclass_fields__)),
        ("A trial of a transform", attributes(Trial) | set(Trial.__dataclass_fields__)),
    ],
)
def test_the_api_page_lists_every_public_attribute(heading: str, expected: set[str]) -> None:
    assert listed_under(heading) == sorted(expected)


def test_tab_on_a_session_or_run_shows_the_documented_names_only(tmp_path: Path) -> None:
    with talking_ranks(tmp_path, 1, 1) as ranks:
        rows = RowStore(tmp_path)
        session = gl.Session(LaunchOptions(1, 1), [each.rank for each in ranks], gl.GraftPlan(), rows, tmp_path)
        run = session.start("1", "1")
        assert listed_under("The session") == sorted(attributes(session))
        assert listed_under("A run") == sorted(attributes(run))
        session.close()


def test_packages_say_that_they_are_internal_unless_they_are_public() -> None:
    public = {*MODULES, "graftlab"}
    for path in sorted((ROOT / "graftlab").rglob("__init__.py")):
        name = ".".join(path.relative_to(ROOT).parts[:-1])
        doc = inspect.getdoc(importlib.import_module(name)) or ""
        assert doc, f"{name} has no docstring"
        assert ("Internal" in doc) == (name not in public), name


@pytest.mark.ranks
def test_the_wheel_ships_the_marker_of_its_annotations(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed, so nothing can be built without a network")
    code = "import hatchling.build, sys; print(hatchling.build.build_wheel(sys.argv[1]))"
    environment = {**os.environ, "GRAFTLAB_SKIP_JS": "1"}
    built = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, env=environment
    )
    assert built.returncode == 0, built.stderr
    with zipfile.ZipFile(tmp_path / built.stdout.split()[-1]) as wheel:
        assert "graftlab/py.typed" in wheel.namelist()


# ---- examples -------------------------------------------------------------------------------------------------------


def examples() -> Iterator[tuple[str, Any]]:
    """Every public name that people call or make, and the methods of what they hold."""
    for module in ("graftlab", "graftlab.plots", "graftlab.transforms", "graftlab.requests"):
        found = importlib.import_module(module)
        for name in found.__all__:
            value = getattr(found, name)
            is_error = inspect.isclass(value) and issubclass(value, (Exception, Warning))
            # In Python 3.10 the type of a function is a class, too.
            is_alias = isinstance(value, types.GenericAlias)
            if (inspect.isclass(value) or inspect.isroutine(value)) and not (is_error or is_alias):
                yield f"{module}.{name}", value
    for holder in (gl.Session, type(gl.Session.plot.fget(None))):  # type: ignore[attr-defined]
        for name in sorted(attributes(holder)):
            yield f"{holder.__name__}.{name}", inspect.getattr_static(holder, name)


EXAMPLES = {name: value for name, value in examples() if name.rpartition(".")[2] not in WITHOUT_AN_EXAMPLE}


@pytest.fixture(scope="module")
def shared() -> Iterator[dict[str, Any]]:
    """What the page of the API shows before its examples: executed once, for all of them."""
    first, last = (block.text for block, _ in prose.cells(API / "index.md"))
    # Functions of a notebook are of this module, and so travel to the ranks by value.
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(first, names)
    yield names
    exec(last, names)


class WithoutLogs(doctest.OutputChecker):
    """Compares output without torch's log: 2.15 warns of ``item()`` in what it compiles."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        lines = [line for line in got.splitlines(keepends=True) if not re.match(r"target\[0\] \| \[rank0\]:W", line)]
        return super().check_output(want, "".join(lines), optionflags)


@pytest.mark.ranks
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_public_names_docstring_has_an_example_that_runs(name: str, shared: dict[str, Any]) -> None:
    value = EXAMPLES[name]
    text = inspect.getdoc(value) or ""
    assert ">>>" in text, f"{name} has no example"
    reset(shared["session"]).edit(keep="True")
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    test = doctest.DocTestParser().get_doctest(text, dict(shared), name, None, 0)
    said: list[str] = []
    write: Callable[[str], object] = said.append
    result = doctest.DocTestRunner(WithoutLogs(), optionflags=flags, verbose=False).run(test, out=write)
    assert result.failed == 0, "".join(said)


@pytest.mark.parametrize(
    ("variables", "done"),
    [
        ({}, []),
        ({"GRAFTLAB_ROLE": "target"}, []),
        ({"GRAFTLAB_ENABLE": ""}, []),
        ({"GRAFTLAB_ENABLE": "1"}, ["prepare"]),
        ({"DUMPER_GRAFTER_ENABLE": "1"}, ["prepare"]),
        ({"GRAFTLAB_RECORD": "/recorded"}, ["prepare"]),
        ({"GRAFTLAB_COMPAT": "1"}, ["replace_imports"]),
        ({"GRAFTLAB_ENABLE": "1", "GRAFTLAB_COMPAT": "1"}, ["prepare", "replace_imports"]),
    ],
)
def test_an_import_does_what_the_environment_asks_for(
    variables: dict[str, str], done: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str] = []
    for name in ("GRAFTLAB_ENABLE", "DUMPER_GRAFTER_ENABLE", "GRAFTLAB_RECORD", "GRAFTLAB_COMPAT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("graftlab.jobs.on_import.prepare", lambda: found.append("prepare"))
    monkeypatch.setattr("graftlab.compat.imports.replace_imports", lambda: found.append("replace_imports"))
    gl._follow_environment()
    assert found == done


@pytest.mark.parametrize("package", ["pyarrow", "torchvision"])
def test_another_missing_package_than_torch_is_not_taken_for_it(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ModuleNotFoundError(f"No module named {package!r}", name=package)

    def import_module(name: str) -> Any:
        raise missing

    monkeypatch.setattr(gl, "import_module", import_module)
    with pytest.raises(ModuleNotFoundError) as raised:
        gl.load_ipython_extension(None)
    assert raised.value is missing
