"""Faults that are put into imported functions are those of the file, and the tests that ran them notice."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from live_faults import OutsideFunctionsError, _changed, _changed_constant, _compiled

CODE = """
LIMIT = 3
DOUBLE = LIMIT * 2
def plain(x):
    return x + 1
def makes(y):
    def inner(x):
        return x * y
    return inner
class Counter:
    start = 5
    def count(self):
        return self.start + LIMIT
    @property
    def twice(self):
        return 2 * self.start
def added(x, y=1):
    return x + y
"""
TESTS = """
from graftlab_of_a_test import Counter, added, makes, plain
def test_plain(): assert plain(1) == 2
def test_inner(): assert makes(2)(3) == 6
def test_count(): assert Counter().count() == 8
def test_twice(): assert Counter().twice == 10
def test_added(): assert added(1) == 2
"""
# A fault as what is replaced by what, and the names of functions whose code is then another.
FAULTS = [
    ("x + 1", "x - 1", ["plain"]),
    ("x * y", "x / y", ["inner"]),
    ("self.start + LIMIT", "self.start", ["count"]),
    ("2 * self.start", "self.start", ["twice"]),
    ("return x + y", "return y", ["added"]),
]
# What runs on import: a class's values, a default, and what was computed from a constant.
OUTSIDE = [("start = 5", "start = 6"), ("y=1", "y=2"), ("LIMIT * 2", "LIMIT * 3")]


@pytest.mark.parametrize(("old", "new", "names"), FAULTS, ids=[new for _, new, _ in FAULTS])
def test_the_functions_that_a_fault_changes_are_found(old: str, new: str, names: list[str]) -> None:
    pairs = list(_changed(_compiled("m.py", CODE), _compiled("m.py", CODE.replace(old, new))))
    innermost = [before.co_name for before, after in pairs if before.co_code != after.co_code]
    assert innermost == names
    assert all(before.co_name == after.co_name for before, after in pairs)


@pytest.mark.parametrize(("old", "new"), [*OUTSIDE, ("LIMIT = 3", "LIMIT = 4")])
def test_a_fault_in_what_runs_on_import_changes_no_function(old: str, new: str) -> None:
    with pytest.raises(OutsideFunctionsError):
        list(_changed(_compiled("m.py", CODE), _compiled("m.py", CODE.replace(old, new))))


def test_only_one_assignment_of_a_module_is_a_changed_constant() -> None:
    found = _changed_constant(CODE, CODE.replace("LIMIT = 3", "LIMIT = 4"))
    assert found is not None
    assert found[0] == "LIMIT"
    both = CODE.replace("LIMIT = 3", "LIMIT = 4").replace("* 2\n", "* 3\n")
    for after in (both, CODE.replace("LIMIT = 3", "OTHER = 3"), CODE.replace("start = 5", "start = 6"), CODE + "X = 1"):
        assert _changed_constant(CODE, after) is None


SCRIPT = """
import json, sys
from pathlib import Path
from live_faults import CollectedTests
path = Path("graftlab_of_a_test.py")
text = path.read_text()
collected = CollectedTests("not absent", 60.0)
tests, found = ["tests/test_small.py"], []
for old, new in json.load(sys.stdin):
    assert old in text
    found.append(collected.first_failure(path, text, text.replace(old, new), tests))
collected.close()
print(json.dumps(found))
"""


@pytest.mark.ranks
def test_the_tests_notice_a_fault_in_the_code_that_they_have_imported(tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "graftlab_of_a_test.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "tests" / "test_small.py").write_text(TESTS, encoding="utf-8")
    given = [*((old, new) for old, new, _ in FAULTS), ("LIMIT = 3", "LIMIT = 4"), *OUTSIDE, ("x + 1", "1 + x")]
    ran = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{Path(__file__).parent}"},
        input=json.dumps(given),
        capture_output=True,
        text=True,
        check=True,
    )
    # Where nothing fails after a fault that cannot be put in, it is not known; the last one changes nothing.
    expected = [f"tests/test_small.py::test_{name}" for name in ("plain", "inner", "count", "twice", "added", "count")]
    assert json.loads(ran.stdout) == [*expected, None, None, None, ""]
