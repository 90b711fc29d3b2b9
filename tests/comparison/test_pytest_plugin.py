"""The fixture ``graftlab_compare`` in a temporary project, run by pytest in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kit.refusals import exactly
from torch import Tensor, nn

import graftlab as gl
from graftlab import pytest_plugin
from graftlab.comparison import functions
from graftlab.comparison.functions import record_reference
from graftlab.comparison.recorded_calls import judge_against_recording
from graftlab.comparison.repeats import JudgingChoice
from graftlab.ranks.held_call import WatchChoice
from graftlab.ranks.held_functions import load_and_hold

TESTS = """
import torch
from torch import nn


def load(eps=1e-5):
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4, eps=eps))


def wrong():
    return load(0.5)


x = torch.ones(2, 4)


def test_wrong(graftlab_compare):
    graftlab_compare(load, wrong, inputs=x)


def test_recorded(graftlab_compare):
    graftlab_compare("reference.graft", load, inputs=x)


def test_recorded_and_wrong(graftlab_compare):
    graftlab_compare("reference.graft", wrong, inputs=x, reference=load)
"""


def outcomes(folder: Path, capsys: pytest.CaptureFixture[str], *options: str) -> tuple[dict[str, str], str]:
    """How each test of the project ended, and all that pytest printed."""
    # Others do not nest.
    left_out = ("graftlab", "cacheprovider", "xdist", "playwright", "timeout")
    plugins = [*(f"-pno:{each}" for each in left_out), "-pgraftlab.pytest_plugin"]
    place = ["--rootdir", str(folder), "-c", "/dev/null", "--import-mode", "importlib"]
    # Another project's file of this name may be imported already.
    sys.modules.pop("test_port", None)
    pytest.main([*plugins, *place, "-rA", "-q", *options, str(folder / "test_port.py")])
    printed = capsys.readouterr().out
    lines = [line.split() for line in printed.splitlines() if line.startswith(("PASSED ", "FAILED "))]
    return {words[1].rpartition("::")[2]: words[0] for words in lines}, printed


@pytest.mark.ranks
def test_a_test_fails_with_the_text_and_a_recording_replaces_the_reference(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "test_port.py").write_text(TESTS)
    found, printed = outcomes(tmp_path, capsys, "-k", "recorded")
    assert found == {"test_recorded": "FAILED", "test_recorded_and_wrong": "FAILED"}
    assert "reference.graft does not exist; pytest --graftlab-record makes it" in printed

    found, _ = outcomes(tmp_path, capsys, "-k", "recorded_and_wrong", "--graftlab-record")
    assert found == {"test_recorded_and_wrong": "PASSED"}
    recorded = [path for path in (tmp_path / "reference.graft").rglob("*") if path.is_file()]
    assert recorded
    assert sum(path.stat().st_size for path in recorded) < 1 << 20

    pages = tmp_path / "pages"
    found, printed = outcomes(tmp_path, capsys, "--graftlab-report", str(pages))
    assert found == {
        "test_wrong": "FAILED",
        "test_recorded": "PASSED",
        "test_recorded_and_wrong": "FAILED",
    }
    assert "The model's member 1 of 0-1 is computed differently" in printed
    assert "The model's member 1 of 0-1 or its input is computed differently" in printed
    assert len(list(pages.glob("*.html"))) == 3


# ---- what the fixture asks for, with a comparison that stands in for graftlab's --------------------------------------


class Compared(SimpleNamespace):
    """A comparison with this answer; it notes what it is asked for."""

    def __init__(self, answer: str) -> None:
        super().__init__(answer=answer, text=f"the text of {answer}", closed=0)
        self.session = self

    def close(self) -> None:
        self.closed += 1

    def report(self, page: Path) -> Path:
        page.write_text("a page")
        return page


class Asked:
    """The calls of ``compare`` and ``record_reference``, which do nothing else."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.answers: list[str] = []
        self.made: list[Compared] = []
        self.calls: list[Any] = []
        self.failure: BaseException | None = None
        monkeypatch.setattr(functions, "compare", self.compare)
        monkeypatch.setattr(functions, "record_reference", self.record)

    def compare(self, *given: Any, **options: Any) -> Compared:
        self.calls.append((*given, options))
        self.made.append(Compared(self.answers.pop(0) if self.answers else "agree"))
        return self.made[-1]

    def record(self, load: Any, inputs: Any, folder: Path, **options: Any) -> None:
        assert not folder.exists()
        folder.mkdir(parents=True)
        (folder / "made").write_text(str(load))
        self.calls.append((load, inputs, options))
        if self.failure is not None:
            raise self.failure


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    return Asked(monkeypatch)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., Any]:
    """Makes what the fixture gives to a test in a folder of a project."""
    (tmp_path / "tests").mkdir()

    def comparer(*, pages: bool = False, records: bool = False) -> Any:
        folder = str(tmp_path / "pages") if pages else None
        return pytest_plugin.ModelComparer("name", folder, records, 1 << 20, tmp_path / "tests", tmp_path)

    return comparer


@pytest.mark.parametrize("answer", ["agree", "differ", "inconclusive"])
def test_only_agreement_lets_a_test_pass_and_each_comparison_has_a_page(
    asked: Asked, make: Callable[..., Any], tmp_path: Path, answer: str
) -> None:
    comparer = make(pages=True)
    assert comparer(model, loaded, IDS, include="*.norm") is asked.made[0]
    asked.answers = [answer]
    if answer == "agree":
        assert comparer(model, loaded) is asked.made[1]
    else:
        page = tmp_path / "pages" / "name-2.html"
        said = f"{answer}:\nthe text of {answer}\nThe report is {page}"
        with pytest.raises(pytest.fail.Exception, match=exactly(said)):
            comparer(model, loaded)
    assert asked.calls == [(model, loaded, IDS, {"include": "*.norm"}), (model, loaded, None, {})]
    assert sorted(each.name for each in (tmp_path / "pages").iterdir()) == ["name-2.html", "name.html"]
    # Those that failed, too.
    comparer.close()
    assert [each.closed for each in asked.made] == [1, 1]


def test_without_a_folder_for_pages_a_failure_is_the_text_alone(asked: Asked, make: Callable[..., Any]) -> None:
    asked.answers = ["differ"]
    with pytest.raises(pytest.fail.Exception, match=exactly("differ:\nthe text of differ")):
        make()(model, loaded)


def test_a_recording_is_found_beside_the_test_or_from_the_root(
    asked: Asked, make: Callable[..., Any], tmp_path: Path
) -> None:
    comparer = make()
    beside, root = tmp_path / "tests" / "ref", tmp_path / "ref"
    for baseline, missing in (("ref", beside), ("tests/ref", beside), ("data/ref", tmp_path / "data" / "ref")):
        said = f"{missing} does not exist; pytest --graftlab-record makes it"
        with pytest.raises(pytest.fail.Exception, match=exactly(said)):
            comparer(baseline, model)
    root.mkdir()
    comparer("ref", model)
    beside.mkdir()
    (tmp_path / "tests" / "tests" / "ref").mkdir(parents=True)
    comparer("ref", model)
    comparer(Path("tests/ref"), model)
    assert [each[0] for each in asked.calls] == [root, beside, beside]


def test_a_recording_is_made_anew_unless_its_model_fails(
    asked: Asked, make: Callable[..., Any], tmp_path: Path
) -> None:
    comparer = make(records=True)
    (tmp_path / "tests" / "ref").mkdir()
    (tmp_path / "tests" / "ref" / "old").touch()
    asked.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        comparer("ref", "the target")
    assert [each.name for each in (tmp_path / "tests").rglob("*")] == ["ref", "old"]
    asked.failure = None
    assert comparer("ref", "the target", IDS, include="*.norm") is None
    assert [each.name for each in (tmp_path / "tests").rglob("*")] == ["ref", "made"]
    assert comparer("other/ref", "the target", reference="the reference") is None
    assert (tmp_path / "other" / "ref" / "made").read_text() == "the reference"
    options = {"include": "*.norm", "limit": 1 << 20}
    assert asked.calls[1:] == [
        ("the target", IDS, options),
        ("the reference", None, {"include": None, "limit": 1 << 20}),
    ]


def test_a_recording_that_another_worker_made_meanwhile_is_left(
    asked: Asked, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_meanwhile(self: Path, target: Path) -> Path:
        target.mkdir()
        raise OSError("Directory not empty")

    monkeypatch.setattr(Path, "rename", made_meanwhile)
    make(records=True)("ref", model)
    assert [each.name for each in (tmp_path / "tests").iterdir()] == ["ref"]


@pytest.mark.slow
def test_the_options_of_pytest_reach_the_fixture_in_their_units(
    asked: Asked, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    class Comparer(pytest_plugin.ModelComparer):
        def __init__(self, *given: Any) -> None:
            super().__init__(*given)
            made.append(given)

        def close(self) -> None:
            made.append("closed")

    monkeypatch.setattr(pytest_plugin, "ModelComparer", Comparer)
    text = "import pytest\n@pytest.mark.parametrize('x', ['a b/c'])\ndef test(graftlab_compare, x):\n    assert 0\n"
    (tmp_path / "test_port.py").write_text(text)
    options = ("--graftlab-report", "pages", "--graftlab-record", "--graftlab-record-limit", "1.5")
    found, _ = outcomes(tmp_path, capsys, *options)
    assert found == {"test[a": "FAILED"}
    assert made == [("test_port.py_test_a_b_c_", "pages", True, 3 << 19, tmp_path, tmp_path), "closed"]


# ---- what a recording of sketches shows -----------------------------------------------------------------------------


class Block(nn.Module):
    scale, shift, is_causal = 1.0, 1.0, True

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(32), nn.Linear(32, 96), nn.Linear(32, 32)
        self.up, self.act, self.down = nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.unflatten(-1, (4, -1)).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=self.is_causal, scale=self.scale / 8**0.5)
        x = x + self.out(mixed.transpose(1, 2).flatten(2))
        return x * self.shift + self.down(self.act(self.up(x)))


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Embedding(60, 32), *(Block() for _ in range(3)), nn.Linear(32, 60)).eval()


def with_epsilon(blocks: nn.Sequential) -> None:
    blocks[2].norm.eps = 0.1


def with_other_activation(blocks: nn.Sequential) -> None:
    blocks[1].act = nn.GELU(approximate="tanh")


def with_scale(blocks: nn.Sequential) -> None:
    blocks[3].scale = 1.1


def without_mask(blocks: nn.Sequential) -> None:
    blocks[1].is_causal = False


def with_residual(blocks: nn.Sequential) -> None:
    blocks[2].shift = 1.01


def with_one_row(blocks: nn.Sequential) -> None:
    blocks[4].weight.data[7] *= 2


def loaded(change: Callable[[nn.Sequential], None] | None) -> nn.Sequential:
    blocks = model()
    if change is not None:
        change(blocks)
    return blocks


IDS = torch.arange(40).reshape(2, 20)
FAULTS = {
    with_epsilon: "*.norm",
    with_other_activation: "*.act",
    with_scale: "*.out",
    without_mask: "*.out",
    with_residual: "*",
    with_one_row: "*",
}


@pytest.fixture(scope="module")
def against_sketches(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[gl.Session, gl.Recording]]:
    """A session whose baseline is a recording that has sketches of nearly all taps."""
    folder = tmp_path_factory.mktemp("recorded") / "reference.graft"
    assert len(record_reference(model, IDS, folder, limit=40_000)) > 15
    recording = gl.Recording(folder)
    with gl.launch(baseline=recording, target=1) as session:
        yield session, recording


def test_a_reference_has_the_modules_that_are_included(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[partial[object]] = []
    session = SimpleNamespace(folder=tmp_path, run=ran.append)
    monkeypatch.setattr(functions, "launch", lambda **sides: nullcontext(session))
    monkeypatch.setattr(functions, "condense", lambda whole, folder, limit: [])
    record_reference(model, IDS, tmp_path / "reference.graft", include="*.norm", limit=40_000)
    assert ran[0].args == (model, IDS, WatchChoice("*.norm", params=False), False)


@pytest.mark.ranks
@pytest.mark.parametrize("change", [*FAULTS, None], ids=lambda each: "right" if each is None else each.__name__)
def test_a_fault_is_found_against_sketches_and_their_limits_are_stated(
    against_sketches: tuple[gl.Session, gl.Recording], change: Callable[[nn.Sequential], None] | None
) -> None:
    session, recording = against_sketches
    work = partial(load_and_hold, partial(loaded, change), IDS, WatchChoice(params=False), False)
    found = judge_against_recording(session, recording, session.run(target=work).target, JudgingChoice())
    assert "Not checked: the single values of " in found.text
    assert found.answer == ("agree" if change is None else "differ")
    assert found.named == ([] if change is None else [FAULTS[change]])
    assert ("cannot be grafted, so its difference reaches them" in found.text) == (change is not None)
