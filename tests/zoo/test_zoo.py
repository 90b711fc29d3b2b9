"""The zoo: its specimens are what they say, and a verdict names those of a sample, and all of them in the soak."""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graftlab import __main__ as command
from graftlab.zoo import faults, scoring
from graftlab.zoo.controls import CONTROLS, FusedNorm
from graftlab.zoo.faults import FAULTS, Specimen, math_of, weights_of
from graftlab.zoo.line_truth import LINES, has_line, is_right
from graftlab.zoo.model import Config, Math, Model, RankShard, make_weights
from graftlab.zoo.programs import PROGRAMS, Program, forget_calls
from graftlab.zoo.quantised_programs import Int8Linear

FAULTY = [each for each in PROGRAMS if not each.is_benign]

# One of each regime, and controls that cancel or are in another dtype; the soak has all of them.
SAMPLE = [
    *("values_gradient_halved", "one_sum_forgotten", "up_of_the_neighbour"),
    *("all_positions_shifted", "tensor_parallel"),
]

SAMPLE_PROGRAMS = [
    *("batch_norm_momentum_turned_around", "autocast_keeps_a_stale_copy", "loss_over_padding"),
    *("head_under_another_name", "first_call_before_its_scale_is_loaded", "every_third_call_tunes_its_kernel"),
    *("window_over_long_requests", "packed_zero_point_off_by_one", "autocast_by_hand", "weights_in_float8"),
]


def test_the_zoo_has_the_promised_number_of_uniquely_named_specimens() -> None:
    readme = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
    promised = re.search(r"on (\d+) planted mistakes .*?\sand\s(\d+) correct variants", readme, re.DOTALL)
    assert promised is not None
    assert promised.groups() == (str(len(FAULTS)), str(len(CONTROLS)))
    programs = re.search(r"(\d+) more\s+mistakes .*?\sand\s(\d+)\s+correct\s+variants", readme, re.DOTALL)
    assert programs is not None
    assert programs.groups() == (str(len(FAULTY)), str(len(PROGRAMS) - len(FAULTY)))
    for kind in (FAULTS, (*CONTROLS, *PROGRAMS)):
        assert len({each.name for each in kind}) == len(kind)


def test_every_fault_has_a_truth_and_no_control_has_one() -> None:
    assert all(each.truth for each in FAULTS)
    assert not any(each.truth for each in CONTROLS)
    assert [each.name for each in PROGRAMS if bool(each.truth or each.says) == each.is_benign] == []


def test_every_right_line_in_the_table_is_a_line_of_the_zoo() -> None:
    assert LINES.keys() <= {each.name for each in (*FAULTS, *PROGRAMS)}
    files = [path for path in Path(scoring.__file__).parent.glob("*.py") if path.name != "line_truth.py"]
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    assert [part for parts in LINES.values() for part in parts if part not in source] == []
    # A part is in the program's own code, or in what several programs call.
    code = {each.name: inspect.getsource(each.body) for each in PROGRAMS}
    elsewhere = [
        (name, part)
        for name, parts in LINES.items()
        for part in parts
        if name in code and part not in code[name] and any(part in others for others in code.values())
    ]
    assert elsewhere == []


def test_a_specimen_in_low_precision_is_so_on_the_target_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[set[torch.dtype]] = []

    class Noted(Model):
        def __init__(self, math: Math, weights: dict[str, torch.Tensor], **more: Any) -> None:
            used.append({each.dtype for each in weights.values()})
            super().__init__(math, weights, **more)

    monkeypatch.setattr(scoring, "Model", Noted)
    name = next(each.name for each in CONTROLS if each.dtype is torch.bfloat16)
    for side in ("baseline", "target"):
        monkeypatch.setattr(scoring, "here", lambda side=side: SimpleNamespace(side=side, rank=0, world_size=1))
        scoring.run_specimen("control", name)
    assert used == [{torch.float32}, {torch.bfloat16}]


def test_wrong_programs_return_something_else_and_benign_ones_return_the_same() -> None:
    returned: dict[str, list[float]] = {}

    def difference(program: Program) -> float:
        forget_calls()
        # For dropout.
        torch.manual_seed(0)
        with torch.no_grad():
            # A fault in some calls shows in one of three.
            pairs = [(program.body(False), program.body(True)) for _ in range(3)]
        returned[program.name] = [_fingerprint(each) for each in pairs[-1]]
        return max(_distance(*pair) for pair in pairs)

    off = {each.name: difference(each) for each in PROGRAMS}
    # Rounding to 4 bits moves a weight by a tenth.
    allowed = {each.name: 0.1 if each.area == "quantised weights" else 1e-5 for each in PROGRAMS}
    assert [each.name for each in PROGRAMS if each.is_benign and off[each.name] > allowed[each.name]] == []
    # Another way to compute something rounds differently; only these four make the same operations.
    equal = {"experts_in_buffers", "autocast_by_hand", "dataclass_for_a_dataclass_with_a_norm", "first_call_warms_up"}
    # On some processors a product and its transpose are computed alike.
    equal.add("tied_head_as_a_copy")
    assert {each.name for each in PROGRAMS if each.is_benign and off[each.name] == 0.0} <= equal
    only_in_a_tap = {"head_under_another_name", "dataclass_with_logarithms_of_its_weights"}
    assert {each.name for each in FAULTY if off[each.name] < 1e-3} == only_in_a_tap
    # Releases of torch drop other numbers.
    returned["dropout_left_on"][1] = BEFORE["dropout_left_on"][2]
    _are_as_before(returned)


@pytest.mark.parametrize(
    ("name", "method", "found"), [("scaled_by_head_dim", "scale", False), ("other_theta", "rotate", True)]
)
def test_a_line_of_a_replaced_method_is_right_unless_it_takes_effect_elsewhere(
    name: str, method: str, found: bool
) -> None:
    specimen: Any = next(each for each in FAULTS if each.name == name)
    lines, first = inspect.getsourcelines(getattr(specimen.math, method))
    at = {"file": inspect.getsourcefile(specimen.math), "line": first + len(lines) - 1}
    last: Any = SimpleNamespace(source=lines[-1], **at)
    assert is_right(specimen, last) is found
    assert not is_right(specimen, SimpleNamespace(**{**vars(last), "line": 1}))


def test_the_score_shows_a_line_that_was_wrongly_confirmed() -> None:
    wrong = SimpleNamespace(side="target", stack=["model.py:3"], source="y = x")
    scored = SimpleNamespace(is_control=False, specimen=next(each for each in FAULTS if has_line(each)), lines=[wrong])
    for place in (None, 2):
        each: Any = SimpleNamespace(**vars(scored), wrongly_confirmed=[wrong], place_of_line=place)
        assert scoring._line_of_source(each).endswith("\n    WRONGLY CONFIRMED: model.py:3 y = x")


def test_the_norm_of_torch_adds_the_same_epsilon_as_ours() -> None:
    # Epsilon is most of the norm of such small numbers.
    x, weight = 1e-4 * torch.linspace(-1, 1, 32), torch.ones(32)
    ours, torchs = (math(Config()).norm(x, weight, None, "final") for math in (Math, FusedNorm))
    torch.testing.assert_close(torchs, ours)


def test_one_scale_for_all_tokens_clips_the_largest_one() -> None:
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(0))
    x[2] *= 9
    weight = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))
    right, clipped = (Int8Linear(weight, wrong)(x) for wrong in ("", "clipped"))
    lost = (clipped - right).norm(dim=1) / right.norm(dim=1)
    assert lost[2] > 0.3
    assert lost[[0, 1, 3]].max() < 0.05


# What each specimen expects of a verdict, and one number for what each of its sides returns. A score counts the same
# specimens in every version, so one that is changed on purpose is changed here too, and the scores are made again.
BEFORE: dict[str, list[Any]] = json.loads(Path(__file__).with_name("specimens.json").read_text(encoding="utf-8"))


def _expected_of(specimen: Specimen | Program) -> str:
    """What a specimen is run as and must be named, on one line."""
    fields = {field.name: getattr(specimen, field.name) for field in dataclasses.fields(specimen)}
    shown = {name: sorted(value) if isinstance(value, frozenset) else value for name, value in fields.items()}
    left_out = ("name", "area", "body", "math", "weights")
    return ", ".join(f"{name}={value}" for name, value in shown.items() if value and name not in left_out)


def test_what_is_expected_of_each_specimen_is_as_it_was_written_down() -> None:
    expected = {each.name: _expected_of(each) for each in (*FAULTS, *CONTROLS, *PROGRAMS)}
    assert expected == {name: text for name, (text, *_) in BEFORE.items()}


def _fingerprint(value: object) -> float:
    flat = torch.cat([leaf.detach().flatten().double() for leaf in _leaves(value)]).nan_to_num(0.0, 1.0, -1.0)
    return float((flat * torch.arange(1.0, len(flat) + 1).double().cos()).sum() / flat.norm().clamp(min=1e-30))


def _are_as_before(returned: dict[str, list[float]]) -> None:
    before = {name: BEFORE[name][1:] for name in returned}
    assert {name: found for name, found in returned.items() if found != pytest.approx(before[name], abs=0.02)} == {}


def _distance(wanted: object, found: object) -> float:
    """The distance of the returned tensors and numbers, relative to their size."""
    x, y = (torch.cat([leaf.flatten().double() for leaf in _leaves(each)]) for each in (wanted, found))
    return float((x - y).norm() / x.norm().clamp(min=1e-30))


def _leaves(value: object) -> list[torch.Tensor]:
    if dataclasses.is_dataclass(value):
        value = list(vars(value).values())
    elif isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple)):
        return [leaf for each in value for leaf in _leaves(each)]
    return [torch.zeros(1) if value is None else torch.as_tensor(value)]


def test_faults_of_the_forward_pass_alone_move_the_logits() -> None:
    config = Config()
    tokens, weights = scoring.make_tokens(config), make_weights(config)
    wanted = Model(Math(config), weights)(tokens)

    returned: dict[str, list[float]] = {}

    def off(specimen: Specimen) -> float:
        own = Model(math_of(specimen)(config, RankShard()), weights_of(specimen, weights))(tokens)
        apart = float((own - wanted).norm() / wanted.norm())
        # Those that agree differ by rounding alone, which says nothing.
        returned[specimen.name] = [_fingerprint(own), _fingerprint(own - wanted) if apart > 1e-3 else 0.0]
        return apart

    with torch.no_grad():
        unmoved = [each.name for each in FAULTS if each.regime == "forward" and off(each) < 1e-5]
        moved = [each.name for each in CONTROLS if each.regime == "forward" and off(each) > 1e-5]
        # Their truth is a gradient, so the values are right.
        moved += [each.name for each in FAULTS if each.regime == "backward" and off(each) > 1e-5]
    assert (unmoved, moved) == ([], [])
    _are_as_before(returned)


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_a_sample_is_named_exactly() -> None:
    found = list(scoring.score(names=SAMPLE))
    assert sorted(each.specimen.name for each in found) == sorted(SAMPLE)
    wrong = {each.specimen.name: (each.labels, each.text) for each in found if not each.exact or each.alarm}
    assert wrong == {}
    assert not any(each.innocents or each.wrongly_confirmed for each in found)
    # Ranks that differ leave the output's distance unknown where they do, and not the effect of the baseline's code.
    (of_ranks,) = [each.text for each in found if each.specimen.name == "one_sum_forgotten"]
    assert "With the baseline's layers.*.attn the output logits agrees" in of_ranks
    assert "without them it could not be measured" in of_ranks
    # Two runs, and each side against itself, before anything is swapped.
    assert {each.runs for each in found if not each.labels} == {3}


@pytest.mark.ranks
@pytest.mark.timeout(300)
def test_sample_programs_are_named_or_reported_as_unexplained() -> None:
    found = list(scoring.score(names=SAMPLE_PROGRAMS))
    assert sorted(each.specimen.name for each in found) == sorted(SAMPLE_PROGRAMS)
    assert {each.specimen.name: (each.labels, each.text) for each in found if not each.exact or each.alarm} == {}


# A program, the named groups, the verdict's first line, and (exact, honest, silent, innocents, alarm).
SCORES = {
    "named": ("ssm_without_its_skip", ["layers.*.out"], "It is.", (True, False, False, set(), False)),
    "cleared": ("ssm_without_its_skip", [], "No tap adds.", (False, False, True, set(), False)),
    "reported": (
        "ssm_without_its_skip",
        [],
        "y differs, and no tapped value explains it.",
        (False, True, False, set(), False),
    ),
    "innocent": ("ssm_without_its_skip", ["x"], "x is.", (False, False, True, {"x"}, False)),
    "unseen": ("loss_over_padding", [], "Something after the last tap, h, is.", (True, False, False, set(), False)),
    "unseen and cleared": ("loss_over_padding", [], "No tap adds.", (False, False, True, set(), False)),
    "benign": ("batch_norm_by_hand", [], "No tap adds.", (True, False, False, set(), False)),
    "alarm": ("batch_norm_by_hand", ["norm"], "norm is.", (False, False, False, {"norm"}, True)),
    "alarm without a name": (
        *("batch_norm_by_hand", [], "y differs, and no tapped value explains it."),
        (False, False, False, set(), True),
    ),
}


@pytest.mark.parametrize(("name", "named", "text", "expected"), SCORES.values(), ids=list(SCORES))
def test_score_of_one_verdict(name: str, named: list[str], text: str, expected: tuple[object, ...]) -> None:
    program = next(each for each in PROGRAMS if each.name == name)
    scored = scoring.Scored(program, dict.fromkeys(named, "culprit"), 3, 0.1, text)
    assert (scored.exact, scored.honest, scored.silent, scored.innocents, scored.alarm) == expected


def test_the_summary_counts_each_kind_of_score_apart() -> None:
    specimen = next(each for each in FAULTS if has_line(each))
    line, confirmed = SimpleNamespace(confirmed=False), SimpleNamespace(confirmed=True)

    def scored(number: int, is_control: bool, **more: Any) -> Any:
        # Each has its own count, and no two counts are equal.
        counts = (
            {"exact": 6, "first_right": 5, "honest": 3, "silent": 2} if not is_control else {"exact": 4, "alarm": 1}
        )
        known: dict[str, Any] = dict.fromkeys(("exact", "first_right", "honest", "silent", "alarm"), False)
        known |= {name: number < count for name, count in counts.items()}
        innocents = {"x", "y"} if number < 4 and not is_control else set()
        known |= {"is_control": is_control, "specimen": specimen, "innocents": innocents, "labels": {}, "lines": []}
        known |= {"wrongly_confirmed": [], "place_of_line": None, "runs": 3, "seconds": 0.75}
        return SimpleNamespace(**known | more)

    places = [1, 1, 2, 3, 3, None, None, None]
    faults = [scored(n, False, labels={"x": "culprit"}, place_of_line=place) for n, place in enumerate(places)]
    faults[0].lines, faults[0].wrongly_confirmed = [confirmed] * 7, [confirmed]
    controls = [scored(n, True, lines=[line] if n else []) for n in range(11)]
    assert scoring.summary([*faults, scored(8, False), *controls]) == (
        "9 faults: 6 named exactly, 5 first right, 4 with an innocent named, 3 not named but reported as unexplained, "
        "2 cleared\n"
        "11 benign controls: 1 alarms, 7 with a group named that should not be\n"
        "8 named faults at a line of source: 2 with the right line first, 5 among the first three; 7 lines confirmed, "
        "1 of them wrong; 10 benign controls with lines\n"
        "60 runs, 15 s (0.75 s a verdict)"
    )


@pytest.mark.ranks
def test_the_command_prints_the_score(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["zoo", "--only", "embedding", "--no-explain"]) == 0
    out = capsys.readouterr().out
    assert "named exactly" in out
    assert "1 benign controls: 0 alarms" in out


@pytest.mark.soak
@pytest.mark.ranks
@pytest.mark.timeout(1800)
def test_nothing_in_the_zoo_is_cleared_and_no_innocent_is_named() -> None:
    names = {each.name for each in (*FAULTS, *CONTROLS, *PROGRAMS)}
    found = list(scoring.score())
    assert {each.specimen.name for each in found} == names
    exact = {each.name for each in (*FAULTS, *CONTROLS)}
    wrong = {
        each.specimen.name: each.text
        for each in found
        if each.silent
        or each.innocents
        or each.alarm
        or not (each.exact or (each.honest and each.specimen.name not in exact))
    }
    assert wrong == {}, scoring.summary(found)
    located = [each for each in found if each.labels and not each.is_control and has_line(each.specimen)]
    missed = [each.specimen.name for each in located if each.place_of_line is None]
    assert len(missed) <= 0.1 * len(located), missed
    assert {each.specimen.name: each.wrongly_confirmed for each in found if each.wrongly_confirmed} == {}
    assert [each.specimen.name for each in found if each.is_control and each.lines] == []


@pytest.mark.parametrize(
    ("name", "of"),
    [("AttentionsGradient", "attn"), ("MlpsGradient", "mlp"), ("RoutersGradient", "router")],
)
def test_a_gradient_that_is_not_summed_is_that_of_the_fault(
    name: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Math, "enter", lambda self, x, layer, which: -x)
    wrong: Any = object.__new__(getattr(faults, f"{name}NotSummed"))
    assert [each for each in ("attn", "mlp", "router") if wrong.enter(torch.ones(1), 0, each) > 0] == [of]


@pytest.mark.parametrize(("name", "of"), [("OneSumForgotten", "attn"), ("MeanForSum", "mlp")])
def test_a_sum_over_ranks_is_wrong_only_where_the_fault_says(
    name: str, of: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Math, "reduce", lambda self, partial, layer, which: 6 * partial)
    wrong = getattr(faults, name)(Config(), RankShard(0, 2))
    assert [which for which in ("attn", "mlp") if wrong.reduce(torch.ones(1), 0, which).item() != 6] == [of]


def test_the_model_shows_each_step_of_its_layers_and_the_logits() -> None:
    class Shown(Model):
        def __init__(self, math: Math, weights: dict[str, torch.Tensor]) -> None:
            super().__init__(math, weights)
            self.names: list[str] = []

        def _tap(self, name: str, value: torch.Tensor) -> torch.Tensor:
            self.names.append(name)
            return value

    config = Config(layers=2)
    model = Shown(Math(config), make_weights(config))
    with torch.no_grad():
        model(scoring.make_tokens(config))
    attention = [*("norm1", "q", "k", "v", "q_rot", "k_rot", "mix", "attn", "mid", "norm2")]
    layers = [[*attention, "gate", "up", "act", "mlp", "out"], [*attention, "router", "mlp", "out"]]
    of_layers = [f"layers.{i}.{name}" for i, names in enumerate(layers) for name in names]
    assert model.names == ["embed", *of_layers, "norm", "logits"]
