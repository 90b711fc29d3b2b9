"""Held calls in one process, and the words of the command."""

from __future__ import annotations

import os
import random
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import MagicMock, call

import numpy as np
import pandas as pd
import pytest
import torch
from kit.refusals import exactly
from torch import nn

import graftlab as gl
from graftlab.__main__ import main
from graftlab.comparison import equal_rows, functions
from graftlab.comparison.answers import ComparisonStopped, answer_of, known_at
from graftlab.comparison.equal_rows import have_equal_rows
from graftlab.comparison.held_calls import judge_held_calls, names_pair
from graftlab.comparison.held_units import HeldUnits, failure_of, numbers_given, other_exit_code, split_alike
from graftlab.comparison.other_work import other_batch
from graftlab.comparison.repeats import JudgingChoice, Repeats
from graftlab.comparison.sides import command_of, function_in_file, ranks_of_command
from graftlab.diffs.results import written_path
from graftlab.errors import ConfigError, SessionError, WaitInterrupted
from graftlab.jobs import held_script
from graftlab.jobs.script_process import _without_frames_between
from graftlab.jobs.script_rank import ScriptRank
from graftlab.matching.pair import Pair
from graftlab.matching.proposal import Proposal
from graftlab.matching.rounds import INTERRUPTED
from graftlab.ranks import holding
from graftlab.ranks.call_description import CallDescription
from graftlab.ranks.held_call import HeldCall, WatchChoice
from graftlab.ranks.held_functions import FunctionInFile, arguments_of
from graftlab.ranks.holding import OfCall, ScriptEnd, describe_call, repeat_call
from graftlab.ranks.state_snapshot import StateSnapshot
from graftlab.taps.outermost_calls import OutermostCalls
from graftlab.verdict.findings import Findings

# ---- state ----------------------------------------------------------------------------------------------------------


class Cache:
    def __init__(self) -> None:
        self.layers: list[torch.Tensor] = [torch.zeros(2)]
        self.length = 0


class Stateful(nn.Module):
    """Changes everything that a forward pass may change."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(2)
        self.calls, self.cache, self.seen = 0, Cache(), {"keys": [1]}
        self.generators = [torch.Generator().manual_seed(1), random.Random(1), np.random.default_rng(1)]
        self.register_buffer("total", torch.zeros(2))

    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:
        self.calls += 1
        self.total += x.sum(0)
        for each in (self.cache, cache):
            each.layers[0] += 1
            each.layers.append(x)
            each.length += 1
        self.seen["keys"].append(2)
        self.new = True
        mine, plain, numpy = self.generators
        drawn = torch.rand(()) + torch.rand((), generator=mine)
        drawn += random.random() + plain.random() + float(np.random.rand()) + float(numpy.random())
        return self.norm(self.linear(x)) + drawn + cache.layers[0].sum() + self.cache.length + len(self.seen["keys"])


def state_of(model: Stateful, cache: Cache) -> list[Any]:
    return [
        *(model.calls, model.total.tolist(), model.norm.running_mean.tolist(), int(model.norm.num_batches_tracked)),
        *((each.layers[0].tolist(), len(each.layers), each.length) for each in (cache, model.cache)),
        *(model.seen, hasattr(model, "new"), torch.get_rng_state().sum().item(), random.getstate()),
        np.random.get_state()[1].tolist(),
    ]


def test_a_repeated_call_begins_from_the_same_state_and_leaves_it() -> None:
    model, cache, x = Stateful(), Cache(), torch.randn(4, 2)
    before = state_of(model, cache)
    identity = cache.layers[0]
    held = HeldCall(lambda: model(x, cache), {"": model}, {"x": x, "cache": cache}, WatchChoice())
    results = [held()[""] for _ in range(3)]
    assert all(torch.equal(results[0], each) for each in results[1:])
    held.end()
    assert state_of(model, cache) == before
    assert cache.layers[0] is identity


def test_state_that_is_not_restored_is_reported() -> None:
    outside = [0.0]

    def call() -> torch.Tensor:
        outside[0] += 1
        return torch.tensor(outside)

    model = nn.Linear(2, 2)
    described = HeldCall(call, {"": model}, {}, WatchChoice()).describe()
    assert described.not_repeated == ("the returned value",)


@pytest.mark.parametrize("trains", [False, True])
def test_a_call_that_changes_weights_is_known(trains: bool) -> None:
    model = nn.Linear(2, 2)

    def call() -> torch.Tensor:
        with torch.no_grad():
            (model.weight if trains else model.weight.clone()).add_(1)
        return model(torch.ones(2))

    assert HeldCall(call, {"": model}, {}, WatchChoice()).describe().writes_weights is trains


def test_a_tensor_that_a_backward_pass_needs_is_not_written() -> None:
    x = torch.ones(2, requires_grad=True)
    middle = x * 2
    square = (middle * middle).sum()
    StateSnapshot([middle]).restore()
    square.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [8.0, 8.0]


def test_a_backward_pass_leaves_gradients_and_earlier_graphs_as_they_were() -> None:
    before = nn.Parameter(torch.ones(3, 2))
    model = nn.Linear(2, 2)
    model(torch.ones(1, 2)).sum().backward()
    accumulated = model.weight.grad
    assert accumulated is not None
    kept = accumulated.clone()
    x = before * 2
    held = HeldCall(lambda: model(x), {"": model}, {"x": x}, WatchChoice())
    assert held.describe().needs_backward
    assert held.try_backward() is None
    held()
    held()
    held.end()
    assert model.weight.grad is accumulated
    assert torch.equal(accumulated, kept)
    assert before.grad is None
    model(x).sum().backward()
    assert before.grad is not None


# ---- calls ----------------------------------------------------------------------------------------------------------


def test_only_outermost_calls_of_modules_with_parameters_are_seen() -> None:
    seen: list[nn.Module] = []
    before = nn.Module.__call__
    model, loss = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.MSELoss()
    with OutermostCalls(lambda module, args, kwargs: seen.append(module)):
        loss(model(torch.ones(1, 2)), model(torch.ones(1, 2)))
        kept = model.__call__
        with pytest.raises(RuntimeError):
            model(torch.ones(1, 3))
        model[0](torch.ones(1, 2))
    kept(torch.ones(1, 2))
    model(torch.ones(1, 2))
    assert [id(each) for each in seen] == [id(model)] * 3 + [id(model[0])]
    assert nn.Module.__call__ is before


def test_the_parametrization_of_a_weight_that_code_reads_is_no_model() -> None:
    seen: list[nn.Module] = []
    model = nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))
    with OutermostCalls(lambda module, args, kwargs: seen.append(module)):
        model.weight.norm()
        model(torch.ones(1, 2))
        # It may have weights, as that of LoRA has.
        nn.utils.parametrize.register_parametrization(model, "bias", nn.Linear(2, 2))
        model.bias.norm()
    assert seen == [model]


def test_checkpointed_modules_that_the_backward_pass_calls_again_are_not_seen() -> None:
    """Held there, they were called twice, and torch ended the script."""
    seen: list[nn.Module] = []
    block, head = nn.Sequential(nn.Linear(2, 2), nn.Tanh()), nn.Linear(2, 2)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block, self.head = block, head

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return head(torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False))

    model = Net()
    with OutermostCalls(lambda module, args, kwargs: seen.append(module)):
        model(torch.ones(1, 2)).sum().backward()
    assert seen == [model]
    assert block[0].weight.grad is not None


def test_a_call_shows_how_far_its_own_rounding_to_16_bits_moves_its_result() -> None:
    x = torch.linspace(0.1, 3, 64)

    def held(dtype: torch.dtype) -> HeldCall:
        return HeldCall(lambda: (x.to(dtype) * 1.7).sin().float(), {}, {}, WatchChoice())

    dtype, apart = held(torch.bfloat16).own_rounding() or ("", 0.0)
    assert dtype == "bfloat16"
    assert 1e-3 < apart < 1e-2
    assert held(torch.float32).own_rounding() is None


def test_inputs_are_one_argument_several_or_named() -> None:
    x = torch.ones(1)
    assert arguments_of(x) == ((x,), {})
    assert arguments_of([x, x]) == ((x, x), {})
    assert arguments_of({"ids": x}) == ((), {"ids": x})
    assert arguments_of(lambda: (x,)) == ((x,), {})
    assert arguments_of(None) == ((), {})


def test_a_function_in_a_file_is_found_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # The file's folder is put in front.
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "reference_of_test.py"
    path.write_text("class A:\n    def f():\n        return 3\nx = 5\n")
    assert FunctionInFile(str(path), "A.f")() == 3
    assert FunctionInFile(str(path), "x")() == 5
    with pytest.raises(SessionError, match=r"reference_of_test\.py has no 'g'"):
        FunctionInFile(str(path), "g")()
    with pytest.raises(ConfigError, match=r"reference_of_test\.py does not define B; it defines A, f, x"):
        function_in_file(f"{path}:B")
    for text in ("globals()['made'] = 5", "from torch.nn import *", "def __getattr__(name): ...", "import x as made"):
        path.write_text(f"{text}\n")
        assert function_in_file(f"{path}:made").name == "made"
    with pytest.raises(ConfigError, match="does not define x; it defines made"):
        function_in_file(f"{path}:x")
    other = tmp_path / "torch.py"
    other.write_text("")
    with pytest.raises(SessionError, match="is that of another module"):
        FunctionInFile(str(other), "x")()


class Rank:
    """Takes the calls that a script's process holds."""

    def __init__(self) -> None:
        self.choice = WatchChoice()
        self.held: list[CallDescription] = []

    def waits_in(self, kind: str, number: int) -> bool:
        """As a rank that holds every call."""
        return True

    def hold(self, call: HeldCall) -> None:
        self.held.append(call.describe())
        call.end()


@pytest.mark.parametrize(("wanted", "held"), [(None, ["Sequential", "Linear", "Sequential"]), ("Linear", ["Linear"])])
def test_the_calls_of_all_models_are_held_or_those_of_one_class(
    wanted: str | None, held: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank()
    monkeypatch.setattr(held_script, "become_rank", lambda *where: rank)
    encoder, decoder, x = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.5)), nn.Linear(2, 2), torch.ones(1, 2)
    script = held_script.HeldScript(Path("nowhere"), "target", wanted)
    torch.manual_seed(3)
    expected = encoder(x)
    torch.manual_seed(3)
    try:
        assert torch.equal(script.begin(encoder, (x,), {}), expected)
        decoder(x)
        encoder(x)
    finally:
        script.remove()
    assert [each.model for each in rank.held] == held
    assert [each.number for each in rank.held] == list(range(1, len(held) + 1))
    assert rank.held[0].others == ({"Sequential": 1} if wanted else {})


@pytest.mark.parametrize(("wanted", "held"), [("Linear", ["Linear", "Linear[1]"]), ("Linear[1]", ["Linear[1]"])])
def test_several_models_of_a_class_are_distinguished(
    wanted: str, held: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank = Rank()
    monkeypatch.setattr(held_script, "become_rank", lambda *where: rank)
    draft, target, critic, x = nn.Linear(2, 2), nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2)), torch.ones(1, 2)
    script = held_script.HeldScript(tmp_path, "target", wanted)
    try:
        script.begin(critic, (x,), {})
        for model in (draft, target):
            model(x)
    finally:
        script.remove()
    assert [each.model for each in rank.held] == held
    # A script that ends without the model that is asked for is shown with those that it has called.
    names = held_script.other_models(tmp_path, "target").read_text().split()
    assert names == ["Sequential", "Linear"][: 1 + (wanted == "Linear[1]")]


@pytest.mark.parametrize(("error", "failure"), [(None, None), (ValueError("no such file"), "ValueError: no such file")])
def test_a_script_that_ends_answers_the_next_request(
    error: Exception | None, failure: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding, "_held", None)
    monkeypatch.setattr(sys, "last_value", error, raising=False)
    rank = ScriptRank.__new__(ScriptRank)
    done: list[object] = []

    def handle_next() -> None:
        done.append(describe_call())
        # Stacks may be asked for first: only a run is answered by the end.
        rank._runs += len(done) == 3

    given = {"_runs": 0, "_control": SimpleNamespace(stopping=False), "handle_next": handle_next}
    line = SimpleNamespace(channel=SimpleNamespace(drain=lambda limit: done.append("drained")))
    vars(rank).update(given, _line=line)
    rank._report_end(os.getpid() + 1)
    assert not done, "a fork of the script is none"
    rank._report_end(os.getpid())
    assert done == [*[ScriptEnd(failure)] * 3, "drained"]
    rank._report_end(os.getpid())
    assert len(done) == 4
    # The comparison ends first.
    vars(rank).update(given, _is_over=False, _control=SimpleNamespace(stopping=True))
    rank._report_end(os.getpid())
    assert done[4:] == ["drained"]


class Ended:
    """A script's process that has ended, or does not."""

    def __init__(self, ends: bool, code: int = 0) -> None:
        self.ends, self.code, self.is_done = ends, code, ends and not code

    def wait(self, limit: float) -> bool:
        return self.ends

    def how_it_ended(self) -> str:
        return f"ended with exit code {self.code}" if self.ends else "runs"


@pytest.mark.parametrize(
    ("results", "process", "said"),
    [
        ([ScriptEnd(None)], Ended(True, 1), None),
        ([ScriptEnd("ValueError: x"), ScriptEnd(None)], Ended(True), "raised ValueError: x"),
        ([None, ScriptEnd("ValueError: x")], Ended(True), "raised ValueError: x"),
        ([None], Ended(True), None),
        ([None], Ended(True, 1), "ended with exit code 1"),
        ([ScriptEnd(None), None], Ended(True, 1), "ended with exit code 1"),
        ([None], Ended(False), "runs"),
    ],
)
def test_a_script_has_failed_if_it_raised_or_ended_without_a_word(
    results: list[object], process: Any, said: str | None
) -> None:
    assert failure_of(process, results) == said


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [((3, 4), (2, 4), True), ((3, 4), (3, 4), False), ((3, 4), (2, 5), False), ((3, 4, 5), (3, 2, 5), False)],
)
def test_batches_of_other_sizes_are_named(ours: tuple[int, ...], theirs: tuple[int, ...], said: bool) -> None:
    calls = [CallDescription("Net", 1, False, (), {"x": torch.ones(each)}, {}) for each in (ours, theirs)]
    told = other_batch(calls[:1], calls[1:])
    assert bool(told) == said
    assert not said or told[0].startswith(
        "The calls have batches of different sizes, 3 on the baseline and 2 on the target"
    )
    assert not other_batch(calls[:1] * 2, calls[1:])


def rows_in_calls(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    one, other = ([CallDescription("Net", 1, False, (), {"": each}, {})] for each in (ours, theirs))
    return have_equal_rows(one, other, 5.0)


def test_results_with_fewer_rows_agree_if_the_other_side_has_all_of_them() -> None:
    padded = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    packed = torch.cat([padded[2, :4], padded[0, :1], padded[1, :3]])
    assert rows_in_calls(padded, packed)
    assert rows_in_calls(packed, padded)
    assert rows_in_calls(padded, padded.flip(0))
    wrong = packed.clone()
    wrong[4, 3] += 1e-2
    assert not rows_in_calls(padded, wrong)
    assert not rows_in_calls(wrong, padded)
    # Each of several equal rows has one of its own.
    twice = torch.cat([padded[2, :4], padded[2, :1]])
    assert rows_in_calls(torch.cat([twice, padded[0]]), twice)
    # A row cannot be the partner of two.
    assert not rows_in_calls(padded, torch.cat([packed[:1], packed[:1]]))
    # Nothing of an empty result was compared.
    assert not rows_in_calls(padded[:, :0], padded[:, :0])


def test_the_rows_of_a_bare_result_are_compared_with_those_of_the_one_value_as_wide() -> None:
    padded = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    packed = torch.cat([padded[2, :4], padded[0, :1]])

    def agree(found: dict[str, torch.Tensor], **also: torch.Tensor) -> bool:
        output = {"['logits']": padded, **also}
        one, other = ([CallDescription("Net", 1, False, (), each, {})] for each in (output, found))
        return have_equal_rows(one, other, 5.0)

    cache = torch.ones(3, 2, 5, 4)
    assert agree({"": packed}, cache=cache)
    assert agree({"": packed, written_path("slots"): cache}, cache=cache)
    assert not agree({"": packed + 1e-2}, cache=cache)
    # Which of two is meant is unknown, and so is what else the target's result should have.
    assert not agree({"": packed}, hidden=padded)
    assert not agree({"x": packed, "y": packed}, cache=cache)


def test_what_one_side_alone_writes_does_not_hide_that_the_rows_are_equal() -> None:
    padded = torch.randn(3, 5, 8, generator=torch.Generator().manual_seed(0))
    packed, state = torch.cat([padded[2, :4], padded[0, :1]]), torch.ones(3, 4)

    def agree(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
        one, other = (
            [CallDescription("Net", 1, False, (), {"": result, **written}, {})]
            for result, written in ((padded, ours), (packed, theirs))
        )
        return have_equal_rows(one, other, 5.0)

    paged, cached = written_path("pages"), written_path("cache[0]")
    assert agree({cached: state}, {paged: torch.ones(2, 8, 4)})
    assert agree({paged: state}, {paged: torch.ones(2, 8, 4)})
    assert agree({paged: state}, {paged: state})
    assert not agree({paged: state}, {paged: state + 1e-2})


def test_results_with_too_many_rows_to_compare_are_not_taken_for_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = torch.eye(4)
    assert rows_in_calls(rows, rows)
    monkeypatch.setattr(equal_rows, "_MOST_ROW_PAIRS", 15)
    assert not rows_in_calls(rows, rows)


def test_an_interrupt_of_the_match_ends_the_comparison_with_the_pairs_so_far() -> None:
    pair = Pair("a", "x")
    proposal = Proposal((pair,), {}, {"y": "no partner"}, (), notices=(INTERRUPTED,))
    edits: list[object] = []
    session = SimpleNamespace(edit=lambda pairs: edits.append(pairs))
    repeats: Any = SimpleNamespace(session=session, match=lambda: proposal)
    ours, theirs = (CallDescription("Net", 1, False, taps, {}, {}) for taps in (("a", "b"), ("x", "y")))
    with pytest.raises(KeyboardInterrupt, match=exactly("1 of 2 taps of the target had a partner.")) as interrupt:
        judge_held_calls(repeats, [ours], [theirs], JudgingChoice())
    assert edits == [proposal], "the pairs stay"
    # If an earlier call's pairs are known, these are counted, in the layouts that were found so far.
    known, repeats.unfit_taps = Proposal((pair, Pair("b", "y"))), lambda: {"a"}
    with pytest.raises(KeyboardInterrupt, match=exactly("2 of 2 taps of the target had a partner.")):
        judge_held_calls(repeats, [ours], [theirs], JudgingChoice(), known)
    assert [pair.target for pair in edits[1].pairs] == ["x", "y"]  # type: ignore[attr-defined]
    assert known_at(interrupt.value) == ["1 of 2 taps of the target had a partner."]
    assert known_at(WaitInterrupted("run 3 continues")) == []
    assert known_at(ComparisonStopped([])) == ["Nothing was judged yet."]
    stopped = ComparisonStopped(["One call agrees.", *known_at(interrupt.value)])
    assert known_at(stopped) == ["One call agrees. 1 of 2 taps of the target had a partner."]
    assert str(stopped) == f"the comparison was stopped, and both sides have ended. {stopped.known}"


class Ending:
    """A script's process whose exit code is known once it was waited for; None if it does not end in time."""

    exit_code: int | None = None

    def __init__(self, side: str, ranks: int, code: int | None) -> None:
        self.side, self.command, self._code = side, SimpleNamespace(text=f"{side}.py", ranks=ranks), code

    def wait(self, limit: float) -> bool:
        self.exit_code = self._code
        return self._code is not None

    def how_it_ended(self) -> str:
        return "ended with exit code"

    def last_lines(self) -> str:
        return "last"


@pytest.mark.parametrize(
    ("codes", "ranks", "said"),
    [
        ((0, 3), 1, "target"),
        ((2, 0), 1, "baseline"),
        ((2, 3), 1, "target"),
        ((3, 3), 1, None),
        ((0, 1), 2, None),
        # A process that still ends has no exit code to compare.
        ((None, 0), 1, None),
        ((3, None), 1, None),
    ],
)
def test_exit_codes_that_differ_are_reported(codes: tuple[int | None, ...], ranks: int, said: str | None) -> None:
    ended = {side: Ending(side, ranks, code) for side, code in zip(("baseline", "target"), codes, strict=True)}
    told = other_exit_code(cast("Any", ended))
    assert (told is None) == (said is None)
    assert said is None or str(told).startswith(f"{said} `{said}.py` ended with exit code")


@pytest.mark.parametrize(
    ("ours", "theirs", "tokens", "ranks", "is_alike"),
    [
        ((2, 3), (2, 3), (6, 6), 1, True),
        ((2, 3), (3, 2), (6, 6), 1, False),
        # A loss has one shape for any batch.
        ((), (), (6, 4), 1, False),
        # Ranks may each have a part of the batch.
        ((), (), (6, 3), 2, True),
        ((2, 3), (1, 3), (6, 3), 2, False),
    ],
)
def test_sides_split_a_batch_alike_by_shapes_and_on_one_rank_by_tokens(
    ours: tuple[int, ...], theirs: tuple[int, ...], tokens: tuple[int, int], ranks: int, is_alike: bool
) -> None:
    calls = [
        CallDescription("Net", 1, False, (), {"": torch.ones(shape)}, {}, whole_numbers={"ids": torch.arange(count)})
        for shape, count in zip((ours, theirs), tokens, strict=True)
    ]
    held = HeldUnits(calls[:1], calls[1:] * ranks)
    assert split_alike(held) is is_alike
    assert numbers_given(held) == tokens


def test_a_side_has_ended_also_if_a_process_could_not_report_it() -> None:
    call, end = CallDescription("Net", 1, False, (), {}, {}), ScriptEnd(None)
    assert HeldUnits([None], [end, None]).have_ended
    assert not HeldUnits([end], [end, call]).have_ended


def test_a_side_of_several_ranks_raises_once() -> None:
    """Whether only one side raises decides which sides continue."""
    raises, returns = (CallDescription("Net", 1, False, (), {}, {}, raises=each) for each in ("ValueError", None))
    assert HeldUnits([returns, returns], [raises, raises]).raising == [("target", raises)]
    assert HeldUnits([raises], [raises, raises]).raising == [("baseline", raises), ("target", raises)]


def test_frames_of_torch_and_of_graftlab_are_left_out_of_the_last_lines() -> None:
    traceback = [
        "Traceback (most recent call last):",
        '  File "/a/train.py", line 3, in <module>',
        "    model(x)",
        *['  File "/p/graftlab/jobs/held_script.py", line 1, in begin', "    return call()"],
        *[
            line
            for _ in range(30)
            for line in ('  File "/p/site-packages/torch/nn/a.py", line 1, in f', "    g()", "    ^^^")
        ],
        "RuntimeError: shapes",
    ]
    assert _without_frames_between(traceback) == [*traceback[:3], "  ... 30 frames of torch", traceback[-1]]
    plain = ["loading", "    indented", "done"]
    assert _without_frames_between(plain) == plain


def taps_of(name: str, label: str = "clean") -> pd.DataFrame:
    """The frame of a verdict with one tap."""
    return pd.DataFrame({"name": [name], "group": [name], "label": [label], "ratio": [0.5]})


# ---- the command ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("command", "ranks"),
    [
        ("python train.py --nproc-per-node 3", 1),
        ("torchrun --standalone --nproc-per-node 2 train.py", 2),
        ("/env/bin/torchrun --nproc_per_node=4 train.py", 4),
        ("python -m torch.distributed.run --nproc-per-node=2 train.py", 2),
        ("accelerate launch --num_processes 2 train.py", 2),
        ("mpirun -np 3 python train.py", 3),
    ],
)
def test_ranks_are_counted_by_the_launchers_option(command: str, ranks: int) -> None:
    assert ranks_of_command(command.split()) == ranks


def test_a_function_is_found_in_a_file_of_the_users_folder_and_of_another_encoding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "named.py").write_bytes("# coding: latin-1\ndef größe(): ...\ndef f(): ...\n".encode("latin-1"))
    assert function_in_file("~/named.py:f").path == str(tmp_path / "named.py")
    # One that Python could not read either is refused with the reason.
    (tmp_path / "named.py").write_bytes("def größe(): ...\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"named\.py is not valid Python: .*; fix it first"):
        function_in_file("~/named.py:f")


def test_a_function_may_be_a_method_of_a_class_in_the_file(tmp_path: Path) -> None:
    (tmp_path / "models.py").write_text("class Models:\n    @staticmethod\n    def small(): ...\n")
    assert function_in_file(f"{tmp_path}/models.py:Models.small").name == "Models.small"
    with pytest.raises(ConfigError, match=r"models\.py does not define Model; did you mean Models\?"):
        function_in_file(f"{tmp_path}/models.py:Model.small")


def test_a_script_runs_in_this_python_also_if_its_path_has_spaces(tmp_path: Path) -> None:
    script = tmp_path / "my model.py"
    script.touch()
    assert command_of(str(script), None).arguments == (sys.executable, str(script))
    assert command_of(f"'{script}' --fast", None).arguments == (sys.executable, str(script), "--fast")


def test_a_program_that_is_not_on_the_path_is_the_one_beside_this_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside, on_path = tmp_path / "bin", tmp_path / "path"
    for folder, programs in ((beside, ("torchrun", "accelerate")), (on_path, ("accelerate",))):
        folder.mkdir()
        for program in programs:
            (folder / program).touch(0o755)
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    monkeypatch.setenv("PATH", str(on_path))
    found = [command_of(f"{program} x.py", None).arguments[0] for program in ("torchrun", "accelerate", "./torchrun")]
    assert found == [str(beside / "torchrun"), "accelerate", "./torchrun"]
    with pytest.raises(ConfigError, match=rf"no program pyhton is on PATH or in {beside}; give its path"):
        command_of("pyhton x.py", None)
    command = command_of(f"PATH={beside} torchrun x.py", None)
    assert command.arguments == ("torchrun", "x.py")


def test_variables_before_a_command_are_set_for_it() -> None:
    command = command_of("env RATE=a=b PYTHONPATH='some where' python score.py X=1", None)
    assert (Path(command.arguments[0]).name, *command.arguments[1:]) == ("python", "score.py", "X=1")
    assert command.variables == {"RATE": "a=b", "PYTHONPATH": "some where"}
    # A shell gets none of them, because PYTHONPATH set there hides graftlab from the script.
    assert command_of("env RATE=1 python score.py | tee out", None).arguments[-1] == "python score.py | tee out"
    # Options of env are for env.
    assert command_of("env -u RATE python score.py", None).arguments[1:] == ("-u", "RATE", "python", "score.py")


def test_a_folder_before_a_command_is_where_it_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my port").mkdir()
    (tmp_path / "my port" / "score.py").touch()
    command = command_of("cd 'my port' && RATE=2 score.py --ids '1;2'", None)
    assert (command.folder, command.variables) == ("my port", {"RATE": "2"})
    assert command.arguments == (sys.executable, "score.py", "--ids", "1;2")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert command_of("cd ~/'my port' && score.py", None).folder == str(tmp_path / "my port")
    with pytest.raises(ConfigError, match="the folder absent does not exist"):
        command_of("cd absent && python score.py", None)
    with pytest.raises(ConfigError, match=rf"other.py does not exist; give its path from {tmp_path}/my port"):
        command_of("cd 'my port' && other.py", None)


@pytest.mark.parametrize(
    "rest",
    [
        "python a.py | tee x",
        "cd b; python a.py",
        "python a.py 2>&1",
        "true && python a.py",
        "python a.py 2>/dev/null",
        "python a.py >>out.txt",
        "python a.py &>out",
    ],
)
def test_a_command_that_needs_a_shell_runs_in_one(rest: str) -> None:
    command = command_of(f"X='1 2' {rest}", None)
    assert (Path(command.arguments[0]).name, *command.arguments[1:]) == ("bash", "-o", "pipefail", "-c", rest)
    assert command.variables == {"X": "1 2"}
    assert command_of(f"torchrun --nproc-per-node 2 a.py && {rest}", None).ranks == 2


@pytest.mark.ranks
def test_a_script_that_fails_before_a_pipe_has_failed() -> None:
    for text, code in (("false | cat", 1), ("true | cat", 0)):
        assert subprocess.run(command_of(text, None).arguments).returncode == code


@pytest.mark.parametrize("typed", ["'a | b'", '"&&"', "a\\;", "http://x?a=1&b=2", "1;2", "torch>2", ">=2", "'>x'"])
def test_a_command_without_a_shell_keeps_its_arguments(typed: str) -> None:
    assert command_of(f"python a.py {typed}", None).arguments[1:] == ("a.py", *shlex.split(typed))


def test_a_number_of_ranks_that_is_not_known_is_asked_for() -> None:
    with pytest.raises(
        ConfigError, match=exactly("--nproc-per-node gpu: the number of ranks is not known; give --ranks B,T")
    ):
        ranks_of_command(["torchrun", "--nproc-per-node", "gpu", "train.py"])


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["a.py"], "required: TARGET"),
        (["absent.py", "python b.py"], "absent.py does not exist"),
        (["absent.py:f", "absent.py:g"], "absent.py does not exist"),
        (["python a.py", "absent.py:g"], "one side is a function and the other a script"),
        (["env X=1", "python b.py"], "a side is empty"),
        (["python a.py", "python b.py", "--inputs", "d.py:x"], "--inputs is for two functions"),
        (["python a.py", "python b.py", "--ranks", "2"], "give two numbers"),
        (["python a.py", "python b.py", "--calls", "0"], "give at least 1"),
        (["/", "python b.py"], "give TARGET as FILE.py:FUNCTION"),
        (["python a.py", "/"], "give it as BASELINE"),
        (["a.py:f", "a.py:g", "--pattern", "{name}"], "--pattern is for a BASELINE that is a folder"),
        (["/", "a.py:g", "--backward"], "computes no backward pass"),
        (["a.py:f", "a.py:g", "--compiled"], "leave TARGET out"),
        (["python 'a.py", "python b.py"], "is not a command"),
        (["python a.py", "python b.py", "--backward"], "--backward is for two functions; a script that needs"),
        (["python a.py", "python b.py", "--include", "type =="], "--include: "),
        (["python a.py", "python b.py", "--device", "cpu"], "--device has no effect on scripts; leave it out"),
        (["a.py:f", "a.py:g", "--calls", "2"], "--calls has no effect on two functions"),
        (["a.py:f", "a.py:g", "--no-restart"], "--no-restart has no effect on two functions"),
        (["a.py:f", "a.py:g", "--backend", "eager"], "--backend has no effect on two functions"),
        (["/", "a.py:g", "--keep-going"], "--keep-going has no effect on a folder and a function"),
        (["a.py:f", "--compiled", "--no-match"], "--no-match has no effect on --compiled"),
        (["a.py:f", "--compiled", "--match"], "--match has no effect on --compiled"),
        (["a.py:f", "--compiled", "--output", "x"], "--output has no effect on --compiled"),
        (["a.py:f", "--compiled", "--include", "type =="], "--include: "),
    ],
)
def test_a_wrong_command_ends_with_64(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        code: object = main(["compare", *words])
    except SystemExit as end:
        code = end.code
    assert code == 64
    assert said in capsys.readouterr().err


def test_names_pair_where_most_of_the_side_with_fewer_occur_on_the_other() -> None:
    def call(*taps: str) -> CallDescription:
        return CallDescription("Model", 1, False, taps, {}, {})

    assert names_pair(call("a", "b", "c"), call("a", "b", "c", "d"))
    assert not names_pair(call("a", "b", "c"), call("a", "x", "y"))


@pytest.mark.parametrize(
    ("found", "trusted", "results_compared", "answer"),
    [
        ({}, True, True, "agree"),
        ({"frame": taps_of("output.logits")}, True, False, "agree"),
        # Taps in the middle clear nothing.
        ({}, True, False, "inconclusive"),
        ({"frame": taps_of("a").iloc[:0]}, True, True, "inconclusive"),
        ({"frame": pd.concat([taps_of("a"), taps_of("output")])}, True, False, "agree"),
        # No number of the output is finite, or it is empty.
        ({"frame": pd.concat([taps_of("a"), taps_of("output").assign(ratio=None)])}, True, False, "inconclusive"),
        ({"failed": ["A stage failed."]}, True, True, "inconclusive"),
        ({"without_output": ["The output was not compared."]}, True, True, "inconclusive"),
        ({"not_repeated": ["a"]}, True, True, "inconclusive"),
        ({"target_not_repeated": ["a"]}, True, True, "inconclusive"),
        ({"inconclusive": ["The target is ahead by 1 call."]}, True, True, "inconclusive"),
        ({}, False, True, "inconclusive"),
        ({"frame": taps_of("a", label="culprit")}, True, True, "differ"),
        ({"unexplained": ["The returned value differs."]}, True, True, "differ"),
        ({"unexplained": ["It differs."], "only_without_grafts": True}, True, True, "differ"),
        ({"unexplained": ["It differs."], "in_float32": 0.5}, True, True, "differ"),
        ({"unexplained": ["It differs."], "only_without_grafts": True, "in_float32": 0.5}, True, True, "inconclusive"),
        ({"data": ["The weights already differ."]}, True, True, "differ"),
        # Gradients that follow from a group that rounds differently still differ.
        ({"following": ("a@grad",)}, True, True, "differ"),
        ({"raised": "The target raises ValueError; the baseline does not."}, True, True, "inconclusive"),
        ({"frame": taps_of("a", label="culprit")}, False, True, "inconclusive"),
    ],
)
def test_only_a_finished_comparison_agrees(
    found: dict[str, Any], trusted: bool, results_compared: bool, answer: str
) -> None:
    findings = Findings(**{"frame": taps_of("a"), "threshold": 5.0, "target_ranks": 1, **found})
    assert answer_of(findings, trusted=trusted, results_compared=results_compared) == answer


@pytest.mark.parametrize("explain", [True, False])
def test_calls_are_judged_as_the_caller_has_chosen(explain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    session, judge = MagicMock(), MagicMock()
    monkeypatch.setattr("graftlab.comparison.repeats.judge", judge)
    choice = JudgingChoice(output="logits", floor=1e-3, threshold=7.0)
    found = Repeats(session).verdict(choice, explain=explain, gradient_parts=not explain)
    assert found is judge.return_value
    ((given, request),) = [each.args for each in judge.call_args_list]
    assert given is session
    assert (request.baseline, request.target) == (repeat_call, repeat_call)
    assert (request.output, request.floor, request.threshold) == ("logits" if explain else None, 1e-3, 7.0)
    assert (request.explain, request.gradient_parts) == (explain, not explain)


def test_taps_whose_pairs_do_not_fit_a_call_are_those_that_fail_in_a_run_of_it() -> None:
    session = MagicMock()
    session.run.return_value.frame = pd.DataFrame({"name": ["a", "b", "b"], "status": ["compared", "failed", "failed"]})
    assert Repeats(session).unfit_taps() == {"b"}
    assert session.run.call_args_list == [call(repeat_call, repeat_call)]


@pytest.mark.parametrize(
    ("differing", "has"),
    [({}, True), ({"aligned_by": None}, False), ({"rel_l2": 0.01}, False), ({"status": "failed"}, False)],
)
def test_ranks_have_other_parts_where_a_weight_is_far_from_its_slice(differing: dict[str, Any], has: bool) -> None:
    row = {"name": "w", "status": "compared", "aligned_by": "slice dim=0", "rel_l2": 1.3, "tags": {"kind": "param"}}
    session = MagicMock()
    rows = pd.DataFrame([{**row, "rel_l2": 0.0}, {**row, **differing}, {**row, "tags": {}}])
    session.run.return_value.frame = rows
    assert Repeats(session).have_other_parts() == has
    # Where no tap is sliced.
    session.run.return_value.frame = rows.assign(aligned_by=None)
    assert not Repeats(session).have_other_parts()


def test_a_backward_pass_that_fails_on_a_rank_is_dropped_on_all() -> None:
    session, tried, dropped = MagicMock(), OfCall(HeldCall.try_backward), OfCall(HeldCall.drop_backward)
    session.run.return_value = SimpleNamespace(baseline=[None], target=[None])
    assert Repeats(session).add_backward() is None
    assert session.run.call_args_list == [call(tried, tried)]
    for ours, theirs in (([None], [None, "no gradient"]), (["no gradient"], [None, None])):
        session.run.reset_mock()
        session.run.return_value = SimpleNamespace(baseline=ours, target=theirs)
        assert Repeats(session).add_backward() == "no gradient"
        assert session.run.call_args_list == [call(tried, tried), call(dropped, dropped)]


def test_a_model_in_place_of_a_function_is_refused_before_anything_starts() -> None:
    with pytest.raises(
        ConfigError,
        match=exactly(
            "compare: the target is a model (Linear); give a function that makes it and returns it, or "
            "lambda: model for one that exists"
        ),
    ):
        gl.compare(torch.nn.Identity, torch.nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("baseline", "target", "which"), [(3, torch.nn.Identity, "baseline is 3"), (dict, 4, "target is 4")]
)
def test_a_side_that_cannot_be_called_is_refused_before_anything_starts(baseline: Any, target: Any, which: str) -> None:
    refusal = f"compare: the {which}; give a function that returns a model, or two scripts"
    with pytest.raises(ConfigError, match=exactly(refusal)):
        gl.compare(baseline, target)


def test_scripts_are_compared_whether_texts_or_paths_name_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started = MagicMock()
    monkeypatch.setattr(functions, "compare_scripts", started)
    sides = [tmp_path / "base.py", tmp_path / "port.py"]
    for side in sides:
        side.touch()
    for given in (sides, [*map(str, sides)]):
        started.reset_mock()
        gl.compare(*given)
        [ours, theirs, _] = started.call_args.args
        assert [str(sides[0]) in ours.arguments, str(sides[1]) in theirs.arguments] == [True, True]


class Metadata:
    """What an attention reads beside its tokens, in an object of its own."""

    def __init__(self) -> None:
        self.slots, self.lens, self.mask = torch.tensor([4, 5]), [3, 2], torch.ones(2)


def test_whole_numbers_that_the_taps_of_arguments_do_not_reach_are_listed() -> None:
    state = {"ids": torch.tensor([1, 2]), "past": [torch.tensor([7])], "at": 3, "meta": Metadata()}
    found = HeldCall(lambda: torch.ones(2), {}, state, WatchChoice()).describe()
    assert found.untapped_numbers == ("['at']", "['meta'].slots", "['meta'].lens")
    assert {"['ids']", "['past'][0]"} == {*found.whole_numbers} - {*found.untapped_numbers}
