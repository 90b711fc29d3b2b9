"""Which fast tests run which line of the package, and how long each takes: measured once, and kept in build/.

The tests run under coverage.py, which notes the test beside each line. A folder of tests is measured again when it, the
package or what all tests share has changed since.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import coverage
import pytest

CHECKOUT = Path(__file__).resolve().parents[1]
KEPT = CHECKOUT / "build" / "tests-by-line"
FAST = "not ranks and not slow and not browser and not soak"
_CONFIGURATION = f"""
[run]
parallel = true
patch = subprocess
source = {CHECKOUT / "graftlab"}
data_file = {KEPT / "data"}
disable_warnings = no-data-collected, module-not-measured, already-imported, couldnt-parse
"""


class TestsByLine:
    """The fast tests that run a line of the package, the quickest first."""

    __test__ = False

    def __init__(self, lines: dict[str, dict[int, set[str]]], seconds: dict[str, float]) -> None:
        self._lines = lines
        self._seconds = seconds

    @classmethod
    def measured(cls, folders: Iterable[str]) -> TestsByLine:
        """Of these folders and modules of tests; those that have not changed since they were measured are read."""
        stale = [folder for folder in folders if not _is_fresh(folder)]
        if stale:
            _measure(stale)
        lines: dict[str, dict[int, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))
        seconds: dict[str, float] = {}
        for folder in folders:
            kept = json.loads(_kept(folder).read_text())
            seconds |= kept["seconds"]
            for path, of_path in kept["lines"].items():
                for line, tests in of_path.items():
                    lines[path][int(line)].update(kept["tests"][each] for each in tests)
        return cls(lines, seconds)

    def of(self, path: Path, lines: Iterable[int], folder: str, budget: float) -> list[str]:
        """The tests that run one of these lines: those of a folder first, and as many as take ``budget`` seconds."""
        of_path = self._lines.get(str(path), {})
        found = {test for line in lines for test in of_path.get(line, ())}
        chosen = []
        for test in sorted(found, key=lambda test: (not test.startswith(folder), self._seconds[test], test)):
            budget -= self._seconds[test]
            if chosen and budget < 0:
                break
            chosen.append(test)
        return chosen


def _kept(folder: str) -> Path:
    return KEPT / f"{folder.replace('/', '-')}.json"


def _is_fresh(folder: str) -> bool:
    kept = _kept(folder)
    return kept.exists() and bool(json.loads(kept.read_text())["digest"] == _digest(folder))


def _digest(folder: str) -> str:
    paths = [CHECKOUT / "tests" / "conftest.py"]
    for part in ("graftlab", "tests/kit", folder):
        whole = CHECKOUT / part
        paths += sorted(whole.rglob("*.py")) if whole.is_dir() else [whole]
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _measure(folders: list[str]) -> None:
    """Run the fast tests of these folders, and keep what ran for each."""
    KEPT.mkdir(parents=True, exist_ok=True)
    for old in KEPT.glob("data*"):
        old.unlink()
    digests = {folder: _digest(folder) for folder in folders}
    settings = KEPT / "coverage.ini"
    settings.write_text(_CONFIGURATION)
    names = ["coverage", "run", f"--rcfile={settings}", "-m", "pytest", "-p", "tests_by_line", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": f"{CHECKOUT}{os.pathsep}{CHECKOUT / 'tests'}", "GRAFTLAB_FUZZ": "0.2"}
    arguments = ["-q", "-n2", "--dist", "worksteal", "-m", FAST, "--timeout", "600", *folders]
    subprocess.run([sys.executable, "-m", *names, *arguments], check=False, cwd=CHECKOUT, env=environment)
    coverage_of = [sys.executable, "-m", "coverage"]
    subprocess.run([*coverage_of, "combine", "-q", f"--rcfile={settings}"], check=True)
    seconds: dict[str, float] = {}
    for times in KEPT.glob("seconds-*.json"):
        seconds |= json.loads(times.read_text())
        times.unlink()
    found = {folder: _Found(folder, seconds) for folder in folders}
    for path, line, test in _runs_of_lines():
        for folder, of_folder in found.items():
            if test.startswith((f"{folder}/", f"{folder}::")):
                of_folder.add(path, line, test)
    for folder, of_folder in found.items():
        _kept(folder).write_text(json.dumps({"digest": digests[folder], **of_folder.as_json()}))


class _Found:
    """What the tests of one folder run."""

    def __init__(self, folder: str, seconds: dict[str, float]) -> None:
        self._seconds = {test: each for test, each in seconds.items() if test.startswith((f"{folder}/", f"{folder}::"))}
        self._tests = {test: number for number, test in enumerate(sorted(self._seconds))}
        self._lines: dict[str, dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))

    def add(self, path: str, line: int, test: str) -> None:
        # A test that was interrupted has no time.
        if test in self._tests:
            self._lines[path][line].append(self._tests[test])

    def as_json(self) -> dict[str, Any]:
        return {"seconds": self._seconds, "tests": list(self._tests), "lines": self._lines}


def _runs_of_lines() -> Iterator[tuple[str, int, str]]:
    """File, line and test, for each line that a test ran."""
    data = coverage.CoverageData(str(KEPT / "data"))
    data.read()
    for path in data.measured_files():
        relative = os.path.relpath(path, CHECKOUT)
        for line, tests in data.contexts_by_lineno(path).items():
            yield from ((relative, line, test) for test in tests if test)


# ---- a plugin of pytest, in the processes that run the tests ---------------------------------------------------------

_seconds: dict[str, float] = {}


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    measuring = coverage.Coverage.current()
    if measuring is None:
        return (yield)
    measuring.switch_context(item.nodeid)
    began = time.process_time()
    try:
        return (yield)
    finally:
        measuring.switch_context("")
        _seconds[item.nodeid] = time.process_time() - began


def pytest_sessionfinish() -> None:
    if _seconds:
        (KEPT / f"seconds-{os.getpid()}.json").write_text(json.dumps(_seconds))
