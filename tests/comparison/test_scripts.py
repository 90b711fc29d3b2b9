"""Two scripts that know nothing of graftlab, compared by the command."""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from kit import prose
from kit.processes import still_there, watch
from kit.support import wait_until

from graftlab.__main__ import main
from graftlab.jobs import script_process

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(300), pytest.mark.usefixtures("warm_scripts")]

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = Path(__file__).with_name("scripts")
DECODES, TRAINS, ENCODES = (str(SCRIPTS / name) for name in ("decodes.py", "trains.py", "encodes.py"))


def compared(capsys: pytest.CaptureFixture[str], folder: Path, *words: str) -> dict[str, object]:
    """What ``graftlab compare`` prints as JSON; its exit code is the one in there."""
    code = main(["compare", *words, "--json", "--folder", str(folder)])
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    assert answer["exit_code"] == code
    return answer


def test_the_readmes_scripts_are_compared_as_the_readme_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    # As a reader's scripts are.
    monkeypatch.setattr(script_process, "subprocess", subprocess)
    blocks = prose.blocks(ROOT / "README.md")
    command, shown = next(pair for pair in itertools.pairwise(blocks) if "\ngraftlab compare" in pair[0].text)
    assert main([*shlex.split(command.text.splitlines()[-1])[1:], "--folder", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert prose.fits(shown.text, printed), printed


def test_a_mistake_of_later_calls_is_named_in_unchanged_scripts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # The second call is judged because its result differs, although one call is asked for.
    answer = compared(capsys, tmp_path, DECODES, f"{DECODES} wrong", "--calls", "1")
    assert (answer["answer"], answer["exit_code"], answer["named"]) == ("differ", 1, ["layers.*.out"])
    text = str(answer["text"])
    assert text.startswith(
        "1 call of Model agrees. In call 2, of Model:\nlayers.* is computed differently in layers 0-1, "
    )
    assert "With the baseline's layers.*.out the output output.logits agrees" in text
    assert "layers.* is computed differently in layers 0-1, " in Path(str(answer["report"])).read_text()
    # The scripts end with the answer: neither has printed the token of the second call.
    assert (tmp_path / "logs" / "target.log").read_text().count("token") == 1


def test_scripts_that_agree_continue_with_the_results_of_their_own_calls(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = compared(capsys, tmp_path, DECODES, DECODES, "--calls", "2")
    assert (answer["answer"], answer["exit_code"]) == ("agree", 0)
    agrees, adds, *_ = str(answer["text"]).splitlines()
    assert agrees == "2 calls of Model agree, and so do the results of the next 2 calls."
    assert adds.startswith("No tap adds more than rounding")
    # Each call was repeated many times, and has written into its caches once.
    for side in ("baseline", "target"):
        assert (tmp_path / "logs" / f"{side}.log").read_text().splitlines()[-1] == "cached 8 8"


FORKS = """
import os, torch
model, x = torch.nn.Linear(4, 2), torch.ones(1, 4)
model(x)
if (child := os.fork()) == 0:
    model(2 * x)
    os._exit(0)
print("ended with", os.waitpid(child, 0)[1])
model(3 * x)
"""


def test_calls_in_a_fork_of_a_script_are_passed_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "forks.py"
    script.write_text(f"import torch\ntorch.manual_seed(0)\n{FORKS}")
    answer = compared(capsys, tmp_path / "run", str(script), str(script))
    text = str(answer["text"])
    assert (answer["answer"], text.partition("\n")[0]) == ("agree", "2 calls of Linear agree.")
    assert "Not checked: calls of models in other processes of the target" in text
    assert "ended with 0" in (tmp_path / "run" / "logs" / "target.log").read_text()


STARTS = """
import subprocess, sys, torch
model, x = torch.nn.Linear(4, 2), torch.ones(1, 4)
if "child" not in sys.argv:
    model(x)
if "starts" in sys.argv:
    subprocess.run([sys.executable, __file__, "child"], check=True)
model(2 * x)
print("ended")
"""


def test_calls_in_a_program_that_a_script_starts_are_passed_and_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "starts.py"
    script.write_text(f"import torch\ntorch.manual_seed(0)\n{STARTS}")
    answer = compared(capsys, tmp_path / "run", str(script), f"{script} starts")
    text = str(answer["text"])
    assert (answer["answer"], text.partition("\n")[0]) == ("agree", "2 calls of Linear agree.")
    assert "Not checked: calls of models in other processes of the target" in text
    assert (tmp_path / "run" / "logs" / "target.log").read_text() == "ended\nended\n"


RAISES = """
import sys, torch
torch.manual_seed(0)
model, x = torch.nn.Linear(4, 2), torch.ones(1, 4)
if "tries" in sys.argv:
    try:
        model(torch.ones(1, 5))
    except RuntimeError:
        print("caught")
model(torch.ones(1, 5) if "fails" in sys.argv else x)
"""


def test_a_call_that_raises_is_left_to_its_script_and_the_next_one_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "raises.py"
    script.write_text(RAISES)
    answer = compared(capsys, tmp_path / "run", str(script), f"{script} tries")
    text = str(answer["text"])
    assert (answer["answer"], text.partition("\n")[0]) == ("agree", "1 call of Linear agrees.")
    assert "Not checked: the target's call 1 of Linear, which raises RuntimeError: " in text
    assert "mat1 and mat2 shapes" in text
    assert main(["compare", str(script), f"{script} fails", "--folder", str(tmp_path / "fails")]) == 2
    error = capsys.readouterr().err
    assert f"The target `{sys.executable} {script} fails` raised RuntimeError: " in error
    assert f'File "{script}", line 10, in <module>' in error


PARTS = """
import sys, torch
torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 2)

    def forward(self, x):
        hidden = self.first(x)
        if "scales" in sys.argv:
            hidden = hidden * 1.1
        hidden = torch.tanh(self.first(x + hidden[:, :4]))
        if "raises" in sys.argv and len(x) == 2:
            raise RuntimeError("no kernel")
        return self.last(hidden)

model = Net().eval()
with torch.no_grad():
    if "scales" not in sys.argv:
        model(torch.ones(1, 4))
    model(torch.ones(2, 4))
"""


def test_the_values_before_an_exception_of_one_side_are_judged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, other = tmp_path / "parts.py", tmp_path / "scales.py"
    script.write_text(PARTS)
    other.write_text(PARTS.replace('if "scales" not in sys.argv', 'if "both" in sys.argv'))
    answer = compared(capsys, tmp_path / "right", str(script), f"{script} raises")
    text = str(answer["text"])
    assert (answer["answer"], text.partition(". ")[0]) == ("inconclusive", "1 call of Net agrees")
    assert "raises RuntimeError: no kernel; its script has continued. The values before that agree to rounding" in text
    answer = compared(capsys, tmp_path / "wrong", str(other), f"{other} raises scales")
    text = str(answer["text"])
    assert text.startswith("The target raises RuntimeError: no kernel (scales.py:")
    assert "Before that, values already differ:\n" in text
    assert "scales.py:13" in text
    assert answer["answer"] == "differ"


def test_a_script_that_ends_before_it_calls_a_model_is_shown_with_its_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "fails.py"
    script.write_text("print('loading')\nraise OSError('no weights here')\n")
    assert main(["compare", DECODES, str(script), "--folder", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert f"{script}` ended with exit code 1 before it called a model" in error
    assert "loading\nTraceback" in error
    assert error.rstrip().endswith("OSError: no weights here")


def test_an_interrupt_ends_both_scripts_and_reports_what_agreed_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, signal, subprocess, sys, torch\n"
        "torch.manual_seed(0)\n"
        "torch.nn.Linear(2, 2)(torch.ones(1, 2))\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import signal; signal.pause()'])\n"
        "with open(f'{sys.argv[1]}.new', 'w') as file:\n"
        "    file.write(f'{os.getpid()} {child.pid}')\n"
        "os.rename(f'{sys.argv[1]}.new', sys.argv[1])\n"
        "signal.pause()\n"
    )
    notes = [tmp_path / side for side in ("baseline", "target")]
    watched: dict[int, int] = {}

    def interrupt() -> None:
        try:
            wait_until(lambda: all(note.exists() for note in notes), "both scripts to wait after a call that agrees")
            watched.update(watch(int(pid) for note in notes for pid in note.read_text().split()))
        finally:
            os.kill(os.getpid(), signal.SIGINT)

    stopper = threading.Thread(target=interrupt)
    stopper.start()
    code = main(["compare", *(f"{script} {note}" for note in notes), "--folder", str(tmp_path / "run")])
    stopper.join()
    assert code == 130
    assert len(watched) == 4
    assert still_there(watched) == []
    error = capsys.readouterr().err
    assert error.endswith("interrupted; both sides have ended. So far: 1 call of Linear agrees.\n")


def test_an_environment_without_graftlab_is_named_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "env")], check=True)
    module = tmp_path / "torch" / "nn" / "modules" / "module.py"
    module.parent.mkdir(parents=True)
    for package in (tmp_path / "torch", tmp_path / "torch" / "nn", module.parent):
        (package / "__init__.py").touch()
    module.write_text("class Module:\n    def __call__(self): pass\n    def parameters(self): return iter([1])\n")
    script = tmp_path / "calls.py"
    script.write_text("from torch.nn.modules.module import Module\nModule()()\n")
    side = f"{tmp_path / 'env' / 'bin' / 'python'} {script}"
    assert main(["compare", side, side, "--folder", str(tmp_path / "run")]) == 2
    error = capsys.readouterr().err
    assert "cannot import graftlab" in error
    assert "-m pip install graftlab`, or give --inject" in error


def test_a_wrong_optimizer_is_distinguished_from_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = compared(capsys, tmp_path, TRAINS, f"{TRAINS} rate")
    assert answer["answer"] == "differ"
    assert str(answer["text"]).startswith(
        "1 call of Model agrees. In update 1 of the weights:\n"
        "The optimizer's lr is 0.1 on the baseline and 0.2 on the target.\n"
    )


def test_the_line_of_an_optimizer_that_computes_another_update_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = compared(capsys, tmp_path, f"{TRAINS} normed", f"{TRAINS} largest", "--calls", "1")
    assert answer["answer"] == "differ"
    first, of_target, of_baseline = str(answer["text"]).splitlines()[3:6]
    assert first == "The values first differ here; with the baseline's value there, the tap agrees:"
    assert "size = weight.grad.norm(torch.inf)" in of_target
    assert "size = weight.grad.norm()" in of_baseline


def test_another_loss_beside_equal_gradients_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    answer = compared(capsys, tmp_path, TRAINS, f"{TRAINS} shifted", "--calls", "1")
    assert answer["answer"] == "inconclusive", answer["text"]
    assert "the losses from which the backward passes begin differ: " in str(answer["text"])


@pytest.mark.parametrize("fault", [pytest.param("", marks=pytest.mark.soak), "wrong"])
def test_a_padded_batch_is_compared_with_a_packed_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    answer = compared(capsys, tmp_path, ENCODES, f"{ENCODES} packed {fault}")
    assert answer["answer"] == ("differ" if fault else "agree"), answer["text"]
    assert answer["named"] == (["layers.*.norm"] if fault else [])
    assert answer["pairs"]


@pytest.mark.soak
@pytest.mark.parametrize("fault", ["", "unreduced"])
def test_two_ranks_of_torchrun_are_compared_with_one_process(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: str
) -> None:
    launcher = f"{sys.executable} -m torch.distributed.run --standalone --nproc-per-node 2"
    answer = compared(capsys, tmp_path, TRAINS, f"{launcher} {TRAINS} {fault}", "--calls", "1")
    assert answer["answer"] == ("differ" if fault else "agree"), answer["text"]
    assert ("first@grad" in answer["named"]) == bool(fault)  # type: ignore[operator]


def environment(folder: Path, *requirements: str) -> Path:
    """The Python of a new environment with these packages before those of this one; skips where they are missing."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    packages = next(folder.glob("lib/python*/site-packages"))
    (packages / "outer.pth").write_text("\n".join([*(p for p in sys.path if p.endswith("site-packages")), str(ROOT)]))
    install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(packages), *requirements]
    done = subprocess.run(install, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"{' '.join(requirements)} cannot be installed: {done.stderr[-300:]}")
    return folder / "bin" / "python"


@pytest.mark.soak
@pytest.mark.timeout(900)
def test_a_release_that_scales_a_query_twice_is_found_between_environments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with_it = ("tokenizers==0.21.4", "huggingface-hub==0.32.0")
    sides = [
        f"{environment(tmp_path / release, f'transformers=={release}', *with_it)} {SCRIPTS / 'opt.py'}"
        for release in ("4.51.3", "4.52.3")
    ]
    answer = compared(capsys, tmp_path / "run", *sides)
    assert answer["answer"] == "differ", answer["text"]
    assert "modeling_opt.py:158  query_states = self.q_proj(hidden_states) * self.scaling" in str(answer["text"])
