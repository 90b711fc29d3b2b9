"""``graftlab new``: each kind of notebook that it writes is executed as it is, and wrong arguments are refused."""

from __future__ import annotations

import shlex
import shutil
from pathlib import Path

import pytest
import torch
from kit import notebooks
from kit.refusals import exactly

import graftlab as gl
from graftlab.__main__ import main
from graftlab.comparison import new_notebook
from graftlab.comparison.answers import Comparison, answer_of
from graftlab.errors import ConfigError
from graftlab.verdict.findings import Findings
from graftlab.verdict.wording import NOT_CHECKED

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
REFERENCE = """
from collections import OrderedDict

import torch
from torch import nn


def load_model():
    torch.manual_seed(0)
    modules = {"first": nn.Linear(8, 8), "norm": nn.LayerNorm(8), "act": nn.GELU(), "last": nn.Linear(8, 8)}
    return nn.Sequential(OrderedDict(modules))
"""
PORT = """
import reference


def load_model():
    model = reference.load_model()
    model.norm.eps = 0.1
    return model
"""
DATA = """
import torch

prompt = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two functions that load a model, and their inputs."""
    for name, text in (("reference", REFERENCE), ("port", PORT), ("data", DATA)):
        (tmp_path / f"{name}.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def last_output(notebook: Path, **how: bool) -> str:
    """What the last cell of a notebook shows, once all are executed. None of them may fail."""
    notebooks.validate(notebooks.read(notebook))
    outputs = notebooks.execute(notebook, notebook.parent, **how)
    assert not any(output.output_type == "error" for output in outputs)
    assert sum("image/png" in output.get("data", {}) for output in outputs) == 1
    return notebooks.texts(outputs[-1:]).strip()


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_notebook_for_two_functions_names_the_planted_mistake(folder: Path) -> None:
    words = "reference.py:load_model port.py:load_model --inputs data.py:prompt"
    assert main(["new", "bug.ipynb", *words.split()]) == 0
    assert last_output(folder / "bug.ipynb") == "The sides differ norm"


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_notebook_in_another_folder_names_the_mistake_of_two_scripts(folder: Path) -> None:
    shutil.copyfile(EXAMPLES / "reference.py", folder / "a.py")
    shutil.copyfile(EXAMPLES / "port.py", folder / "b.py")
    (folder / "notes").mkdir()
    assert main(["new", "notes/bug.ipynb", "a.py", "b.py"]) == 0
    assert last_output(folder / "notes" / "bug.ipynb", warm_scripts=False) == "The sides differ layers.*.norm1"


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_notebook_for_a_recording_and_a_function_names_the_planted_mistake(folder: Path) -> None:
    names: dict[str, object] = {}
    exec(REFERENCE + DATA, names)
    model, prompt = names["load_model"](), names["prompt"]  # type: ignore[operator]
    with torch.no_grad(), gl.record(folder / "recorded"):
        gl.watch(model, inputs=True)
        model(prompt)
    assert main(["new", "bug.ipynb", "recorded", "port.py:load_model", "--inputs", "data.py:prompt"]) == 0
    assert last_output(folder / "bug.ipynb") == "The sides differ norm"


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        ("bug.txt reference.py:load_model port.py:load_model", "give one that ends in .ipynb"),
        ("taken.ipynb reference.py:load_model port.py:load_model", "give another name, or remove it first"),
        ("none/bug.ipynb reference.py:load_model port.py:load_model", "cannot be written: No such file or directory"),
        ("bug.ipynb reference.py:load_model port.py:load_modle", "port.py does not define load_modle; did you mean"),
        ("bug.ipynb reference.py:load_model port.py:other", "it defines load_model, model, reference"),
        ("bug.ipynb reference.py:load_model gone.py:load_model", "gone.py does not exist"),
        ("bug.ipynb gone.py:load_model port.py:load_model", "gone.py does not exist"),
        ("bug.ipynb reference.py:load_model broken.py:load_model", "fix it first"),
        ("bug.ipynb reference.py port.py:load_model", "give two scripts, or two functions as FILE.py:FUNCTION"),
        ("bug.ipynb reference.py port.py --inputs data.py:prompt", "a script makes its own inputs"),
        ("bug.ipynb reference.py gone.py", "gone.py does not exist"),
        ("bug.ipynb reference.py:load_model empty", "give it as BASELINE"),
        ("bug.ipynb empty port.py", "give TARGET as FILE.py:FUNCTION"),
        ("bug.ipynb empty port.py:load_model", "a recording has such a file for each rank"),
    ],
)
def test_wrong_arguments_are_refused_with_the_remedy_and_write_nothing(
    words: str, remedy: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "empty").mkdir()
    (folder / "broken.py").write_text("def load_model(:\n")
    (folder / "taken.ipynb").write_text("mine")
    assert main(["new", *shlex.split(words)]) == 64
    said = capsys.readouterr().err
    assert said.startswith("graftlab new: ")
    assert remedy in said
    assert [path.read_text() for path in folder.rglob("*.ipynb")] == ["mine"]


def test_half_a_notebook_is_removed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(new_notebook.json, "dump", fails)
    assert main(["new", "bug.ipynb", "reference.py:load_model", "port.py:load_model"]) == 64
    assert capsys.readouterr().err == (
        "graftlab new: bug.ipynb cannot be written: No space left on device; give another path\n"
    )
    assert not (folder / "bug.ipynb").exists()


def test_a_missing_argument_is_wrong_usage(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["new", "bug.ipynb", "reference.py"])
    assert end.value.code == 64
    assert "required: TARGET" in capsys.readouterr().err


def test_a_notebook_for_functions_without_inputs_calls_them_without_arguments(folder: Path) -> None:
    assert main(["new", "bug.ipynb", "reference.py:load_model", "port.py:load_model"]) == 0
    cells = [cell.source for cell in notebooks.read(folder / "bug.ipynb").cells]
    assert 'comparison = gl.compare("reference.py:load_model", "port.py:load_model")\ncomparison' in cells
    # It begins in the folder that the paths start from.
    assert "import graftlab as gl\n\n%load_ext graftlab" in cells


# ---- texts as sides of gl.compare -----------------------------------------------------------------------------------


def test_texts_that_cannot_be_compared_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="give two scripts, or two functions"):
        gl.compare(lambda: None, "port.py")
    with pytest.raises(ConfigError, match="one side is a function and the other a script"):
        gl.compare("reference.py:load_model", "port.py")
    for given in ({"inputs": torch.ones(1)}, {"backward": True}, {"device": "cpu"}):
        with pytest.raises(
            ConfigError,
            match=exactly("inputs, backward and device are for two functions; scripts choose these themselves"),
        ):
            gl.compare("reference.py", "port.py", **given)


def test_a_comparison_is_shown_with_the_remarks_that_may_overturn_it() -> None:
    import pandas as pd

    findings = Findings(pd.DataFrame({"group": [], "label": [], "ratio": [], "name": []}), 5.0, 1)
    remarks = ("The target's call cannot be replayed.", f"{NOT_CHECKED}later calls.")
    answer = answer_of(findings, False, True)
    shown = Comparison(findings, 3, None, None, answer, remarks, "By scripts.")._repr_mimebundle_()  # type: ignore[arg-type]
    assert shown["text/plain"].startswith("<Verdict of 3 runs: nothing named>\nThe target's call cannot be replayed.")
    page = shown["text/html"]
    first, judged = page.index("<b>The target&#x27;s call cannot be replayed.</b>"), page.index("<p><b>", 10)
    assert first < judged < page.index(f"<p>{NOT_CHECKED}later calls.</p>") < page.index("<p>By scripts.</p>")
    # Each is shown once.
    assert page.count("cannot be replayed") == shown["text/plain"].count("cannot be replayed") == 1
