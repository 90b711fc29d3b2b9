"""The notebooks run from their first cell to their last, and come to what their text says.

`make docs` executes all of them too, and fails at an error in a cell. Those that take most of the processor are
compared with their text in the soak.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from kit import notebooks, warm

NOTEBOOKS = Path(__file__).resolve().parent.parent / "notebooks"


def execute(name: str, tmp_path: Path, imports: tuple[str, ...] = ()) -> list[Any]:
    return notebooks.execute(NOTEBOOKS / name, tmp_path, imports)


def cells_of(path: Path) -> list[dict[str, Any]]:
    # Without nbformat, which takes a while to import.
    cells: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return cells


def pictures(outputs: list[Any]) -> int:
    return sum("image/png" in output.get("data", {}) for output in outputs)


def test_every_notebook_is_tested_and_committed_without_outputs() -> None:
    # The quickstart is executed by test_packaging, through `graftlab demo`; ray.ipynb by remote/test_ray_soak.py.
    assert {path.name for path in NOTEBOOKS.glob("*.ipynb")} == {
        "attach.ipynb",
        "compiled.ipynb",
        "index.ipynb",
        "cuda_graphs.ipynb",
        "porting.ipynb",
        "recording.ipynb",
        "quickstart.ipynb",
        "ray.ipynb",
        "live_editing.ipynb",
        "onnx.ipynb",
        "replay.ipynb",
        "tensor_diffs.ipynb",
        "verdict.ipynb",
    }
    for path in NOTEBOOKS.glob("*.ipynb"):
        assert not any(cell.get("outputs") for cell in cells_of(path)), path.name


def test_a_notebook_is_one_story_of_at_most_15_cells() -> None:
    counted = {path.name: len(cells_of(path)) for path in NOTEBOOKS.glob("*.ipynb")}
    assert {name: count for name, count in counted.items() if count > 15} == {}


def test_the_index_leads_to_every_notebook() -> None:
    first = cells_of(NOTEBOOKS / "index.ipynb")[0]
    links = re.findall(r"\]\((\w+\.ipynb)\)", "".join(first["source"]))
    assert sorted([*links, "index.ipynb"]) == sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_tensor_diffs_draws_the_figure_that_shows_each_mistake(tmp_path: Path) -> None:
    outputs = execute("tensor_diffs.ipynb", tmp_path)
    assert pictures(outputs) == 6
    # One element, its vector of 128, and behind attention every one of the 96 positions of its sequence.
    spread = [int(count) for count in re.findall(r"^\d+ .* +(\d+)$", notebooks.texts(outputs), re.M)[-8:]]
    assert spread == [1, 1, 128, 128, 64, 64, 96 * 128, 96 * 128]
    assert not any(output.output_type == "error" for output in outputs)


@pytest.mark.ranks
@pytest.mark.timeout(400)
def test_attach_steers_two_scripts_that_join(tmp_path: Path) -> None:
    outputs = execute("attach.ipynb", tmp_path)
    said = notebooks.texts(outputs)
    assert pictures(outputs) == 1
    assert "shared memory" in said
    assert re.search(r"logits before: 0\.1\b", said)
    assert re.search(r"logits after: +0\.0\b", said)
    assert "The jobs do not repeat a step: " in said
    assert re.search(
        r"hidden is computed differently in layer 1 of 0-2 \(added 0\.1, \S+ x the assumed floor, float32\)", said
    )
    assert "exit codes: [0, 0]" in said


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_recording_compares_three_candidates_with_one_recording(tmp_path: Path) -> None:
    said = notebooks.texts(execute("recording.ipynb", tmp_path))
    assert "<Recording of 1 rank" in said
    table = said[said.rindex("first divergent tap") :]
    assert re.search(r"like the reference +12 +0 +none", table)
    assert re.search(r"second layer +12 +9 +hidden, layer 1, step 0", table)
    assert re.search(r"last layer +12 +6 +hidden, layer 2, step 0", table)


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_live_editing_edits_filters_and_a_transform_while_the_loop_runs(tmp_path: Path) -> None:
    outputs = execute("live_editing.ipynb", tmp_path)
    models = [o for o in outputs if "application/vnd.jupyter.widget-view+json" in o.get("data", {})]
    assert len(models) >= 3, "the dashboard and both editors"
    table = next(text for text in (notebooks.texts([o]) for o in outputs) if "nunique" in text)
    steps = [[int(number) for number in line.split()] for line in table.splitlines()[2:5]]
    assert [version for version, *_ in steps] == [1, 2, 3]
    # Every step had one plan: where one ends the next begins, and none is missing.
    assert steps[1][1] == steps[0][2] + 1
    assert steps[2][1] == steps[1][2] + 1
    assert sum(count for *_, count in steps) == steps[2][2] - steps[0][1] + 1


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_replay_finds_the_requests_that_diverge_the_tap_and_the_cause(tmp_path: Path) -> None:
    outputs = execute("replay.ipynb", tmp_path)
    text = notebooks.texts(outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert "30 answers" in text
    assert "30 requests in 3 files" in text
    # Those that never had more than 23 tokens, and those that had.
    no, yes = ([int(number) for number in line.split()[1:]] for line in re.findall(r"^(?:False|True) .*$", text, re.M))
    assert no[0] + yes[0] == 30
    assert (no[2], no[3]) == (23, 0)
    assert yes[1] == 24
    assert yes[3] > 0
    furthest = re.search(r"attn_out +\[\d+, 1, 64\] .*\((\d+), 0, \d+\)", text)
    assert furthest is not None
    assert int(furthest[1]) >= 23, "beyond the target's window"
    taps = re.findall(r"^(\w+) \(phase=\w+, layer=(\d+)\) +\d+$", text, re.M)
    assert set(taps) == {("attn_out", "0")}
    assert len(re.findall(r"both engines answer alike: +True", text)) == 2, "with the graft, and with the fixed window"
    assert re.search(r"the target as recorded: +True", text), "the graft brings back every recorded answer"
    assert re.search(r"requests that diverge: +0\b", text)


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_cuda_graphs_finds_a_stale_buffer_tail_and_repairs_the_tokens(tmp_path: Path) -> None:
    outputs = execute("cuda_graphs.ipynb", tmp_path)
    text = notebooks.texts(outputs)
    assert not any(output.output_type == "error" for output in outputs)
    assert "['req-12', 'req-13', 'req-14']" in text, "some answers are wrong"
    first = re.search(r"^\d+ +\d+ +(\S+) +(\S+)", text[text.index("max_target") :], re.M)
    assert first is not None
    assert first.groups() == ("slot.positions", "tail")
    # Wrong are the steps in which a stale place alone is far.
    steps = re.findall(r"^(?:(False|True) +)?(False|True) +(False|True) +\d+$", text, re.M)
    assert steps == [("False", "True", "True"), ("True", "False", "True")]
    assert re.search(r"^the tail: \d+ grafts, all tokens agree: True", text, re.M), "the graft of the slot repairs them"
    assert re.search(r"^q and k: \d+ grafts, all tokens agree: True", text, re.M), "so does one inside of the graph"
    before, after = re.search(r"^captures before and after: (\d+) (\d+)", text, re.M).groups()  # type: ignore[union-attr]
    assert before == after
    assert re.search(r"rows that differ: +0\n", text), "once fixed, nothing differs"
    assert re.search(r"status of tails: +compared\nall tokens agree: +True", text)


@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_a_mistake_of_an_export_is_found_among_the_tensors_of_its_graph(tmp_path: Path) -> None:
    for package in ("onnx", "onnxruntime", "onnxscript"):
        pytest.importorskip(package, reason=f"{package} is not installed: pip install 'graftlab[onnx]'")
    outputs = execute("onnx.ipynb", tmp_path)
    assert not any(output.output_type == "error" for output in outputs)
    answers = re.findall(r"^(agree|differ) (\[.*\])$", notebooks.texts(outputs), re.M)
    assert answers == [("differ", "['*.attn.out']"), ("differ", "['div_1']"), ("agree", "[]")]
    assert re.search(r"at div_1, the target's values are 2 times the baseline's", notebooks.texts(outputs))
    assert "29 of 30 target taps have a partner" in notebooks.texts(outputs)


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_porting_finds_the_mistake_of_the_weights_and_that_of_the_code(tmp_path: Path) -> None:
    outputs = execute("porting.ipynb", tmp_path, imports=warm.TRANSFORMERS)
    said = notebooks.texts(outputs)
    assert "12 problems" in said
    assert "in_proj_weight has encoder.layer.0.attention.self.key.weight in place of its v" in said, said
    assert "clean: True with 0 problems" in said
    assert "60 of 60 target taps have a partner" in said
    added = [line.split()[:2] for line in said.splitlines() if line.strip().startswith("encoder.layer.")]
    assert added == [[f"encoder.layer.{n}.intermediate", f"encoder.layers.{n}.dropout"] for n in range(6)]
    assert re.search(r"^  target .*  \[relu\(.*\n  baseline .*  \[gelu\(", said, re.MULTILINE), said
    assert "60 taps compared" in said
    assert "equal outputs: True" in said


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_verdict_names_each_mistake_and_nothing_of_the_right_target(tmp_path: Path) -> None:
    outputs = execute("verdict.ipynb", tmp_path, imports=warm.TRANSFORMERS)
    assert not any(output.output_type == "error" for output in outputs)
    assert pictures(outputs) == 1
    verdicts = re.findall(r"<Verdict of \d+ runs: (.*)>", notebooks.texts(outputs))
    assert verdicts == [
        "nothing named",
        "encoder.layer.*.output.dense",
        "encoder.layer.*.attention[0]@grad",
    ]
    shown = notebooks.texts(outputs)
    assert "output.dense is computed differently in layer 3 of 0-5 on all ranks (" in shown
    assert re.search(r"^  target .*Sum\.apply\(nn\.functional\.linear\(x, self\.weight\)\)", shown, re.M), "the line"
    assert "attention[0] is computed differently in layer 2 of 0-5 on all ranks (" in shown


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(240)
def test_compiled_names_the_compilers_mistake_and_the_tap_across_which_it_fuses(tmp_path: Path) -> None:
    outputs = execute("compiled.ipynb", tmp_path)
    assert not any(output.output_type == "error" for output in outputs)
    said = notebooks.texts(outputs)
    assert "gelu is computed differently in layers 0-2" in said
    assert "They differ only without the tap 'scaled' in the graph" in said
    assert re.search(r"off by \de-05 \(relative L2\)\ncompiled, with the graft: the output is off by 0e\+00", said)
    assert pictures(outputs) == 1
