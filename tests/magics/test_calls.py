"""Each line of ``%graft`` calls one method of the session, with what the line gives and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pandas as pd
import pytest
from IPython.core.completer import CompletionContext
from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from kit.refusals import exactly
from matplotlib import pyplot

from graftlab.base.world import Place
from graftlab.control.verdicts import Verdict
from graftlab.errors import RunError, WaitInterrupted
from graftlab.magics import magics
from graftlab.magics.magics import GraftMagics, complete_graft, magics_of_completion
from graftlab.remote.ray_cluster import Ray
from graftlab.verdict.findings import Findings


class Recorded:
    """Records the calls of its methods, also of those of ``plot``; each returns ``answers[name]`` or its own name."""

    def __init__(self, calls: list[Any], answers: dict[str, Any], prefix: str = "") -> None:
        self._calls, self._answers, self._prefix = calls, answers, prefix

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def method(*args: Any, **kwargs: Any) -> Any:
            self._calls.append((self._prefix + name, args, kwargs))
            return self._answers.get(name, name)

        return method


class FakeSession(Recorded):
    """An open session of one baseline rank and two target ranks."""

    def __init__(self, calls: list[Any], answers: dict[str, Any]) -> None:
        super().__init__(calls, answers)
        self.closed = False
        self.ranks: Any = [
            SimpleNamespace(label=place.label, alive=True, takes_work=True, place=place)
            for place in Place("baseline", 0, 1, 2).everyone()
        ]
        self.plot = Recorded(calls, answers, "plot.")
        self.taps: list[dict[str, Any]] = [{"name": "hidden"}, {"name": "out"}, {"name": "hidden"}]
        self.runs: list[Any] = []
        self.row_count = 1234
        self.folder = Path("/run/folder")
        # As in a session whose baseline is a recording, so that a verdict needs no expression.
        self._internals = SimpleNamespace(default_callees={"baseline": "the recording"})
        self.plan = SimpleNamespace(rename=(("target", "a", "b"), ("baseline", "c", "")))
        self.options = SimpleNamespace(
            baseline=1,
            target=2,
            device=None,
            backend=None,
            timeout=60.0,
            start_method="forkserver",
            on=None,
            keep_rows=None,
        )

    def close(self) -> None:
        self._calls.append(("close", (), {}))
        self.closed = True


class Notebook:
    """The magics in a notebook with some variables; ``calls`` has what the session was asked."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self.magics = GraftMagics.__new__(GraftMagics)
        shell: Any = SimpleNamespace(user_ns=self.names)
        object.__setattr__(self.magics, "_trait_values", {})
        self.magics.__dict__.update(shell=shell, session=FakeSession(self.calls, self.answers))

    @property
    def session(self) -> Any:
        return self.magics.session

    def run(self, line: str, cell: str | None = None) -> Any:
        return self.magics.graft(line, cell)


@pytest.fixture
def notebook() -> Notebook:
    return Notebook()


@pytest.mark.parametrize(
    ("raised", "said"),
    [
        (KeyboardInterrupt(), "%graft verdict was stopped"),
        (WaitInterrupted("the verdict was stopped: layer 3 is known"), "the verdict was stopped: layer 3 is known"),
    ],
)
def test_a_stopped_command_says_what_was_known(raised: BaseException, said: str, notebook: Notebook) -> None:
    vars(notebook.magics)["_verdict"] = Mock(side_effect=raised)
    with pytest.raises(WaitInterrupted) as stopped:
        notebook.run("verdict f(x)")
    assert str(stopped.value) == said


@pytest.mark.parametrize(
    ("missing", "advice"),
    [
        (["mine"], "'mine' exists in the notebook, not on the ranks: define it there in a"),
        (["x", "mine", "x"], "'x' and 'mine' exist in the notebook, not on the ranks: define them there in a"),
        (["typo"], None),
        (["typo", "x"], "'x' exists in the notebook, not on the ranks: define it there in a"),
    ],
)
def test_a_name_that_only_the_notebook_has_is_said_to_be_there(
    missing: list[str], advice: str | None, notebook: Notebook
) -> None:
    raised = RunError("\n".join(f"NameError: name {each!r} is not defined" for each in missing), {"target[0]": ""})
    notebook.names.update(x=1, mine=2)
    vars(notebook.magics)["_verdict"] = Mock(side_effect=raised)
    with pytest.raises(RunError) as shown:
        notebook.run("verdict f(x)")
    rest = (
        " `%%graft both` cell, or give session.run(baseline=..., target=...) functions, which may use variables of "
        "the notebook"
    )
    assert str(shown.value) == (str(raised) if advice is None else f"{raised}\n\n{advice}{rest}")
    assert shown.value.failures == {"target[0]": ""}


@pytest.mark.parametrize(
    ("line", "call", "args", "given"),
    [
        ("status", "status", (), {}),
        ("verdict", "verdict", (None, None), {}),
        ("verdict f(x)", "verdict", (None, "f(x)"), {}),
        ("lines h.0 f(x)", "lines", ("h.0", None, "f(x)"), {}),
        ("match", "match", (None, None), {}),
        ("match f(x)", "match", (None, "f(x)"), {}),
        ("check f(x)", "check", (), {"target": "f(x)"}),
        ("compiled f(x)", "compare_compiled", ("f(x)",), {"grad_mode": None, "fullgraph": False}),
        (
            "compiled --backend eager --grad-mode grad --fullgraph f(x)",
            "compare_compiled",
            ("f(x)",),
            {"grad_mode": "grad", "fullgraph": True, "backend": "eager"},
        ),
        ("restart", "restart", (), {}),
        ("log", "log", ("both", 50), {}),
        ("log target -n 3", "log", ("target", 3), {}),
        ("undo", "undo", (), {}),
        ("redo", "redo", (), {}),
        ("ui", "dashboard", (), {}),
        ("filter --b2t layer == 1 --keep ''", "edit", (), {"b2t": "layer == 1", "keep": ""}),
        ("transform default", "edit", (), {"transform": None}),
        ("transform double", "edit", (), {"transform": "the function"}),
        ("transform double --where name == 'q'", "edit", (), {"transform": ("name == 'q'", "the function")}),
        ("transform math.sin", "edit", (), {"transform": "math.sin"}),
        ("rename target x y", "edit", (), {"rename": {"target": {"a": "b", "x": "y"}, "baseline": {"c": ""}}}),
        ("rename --clear", "edit", (), {"rename": None}),
        ("rename --clear target x", "edit", (), {"rename": {"target": {"x": ""}}}),
        ("plot", "plot.divergence", (), {"step": None}),
        ("plot --step 3 --noise-floor 0.1", "plot.divergence", (), {"step": 3, "noise_floor": 0.1}),
        ("plot --steps 2:5", "plot.over_steps", (), {"steps": range(2, 5)}),
        ("plot --steps :5", "plot.over_steps", (), {"steps": range(5)}),
        ("plot --steps :0", "plot.over_steps", (), {"steps": range(0)}),
        ("plot --kind over_steps", "plot.over_steps", (), {"steps": None}),
        ("plot --verdict", "plot.verdict", (None,), {}),
        ("plot out --verdict --dims 0,1", "plot.verdict", ("out",), {"dims": (0, 1)}),
        ("plot out", "plot.history", ("out",), {}),
        ("plot out --tags layer=3 --dims 1", "plot.heatmap", ("out",), {"layer": 3, "dims": (1,)}),
    ],
)
def test_a_line_calls_the_session_with_what_it_gives(
    line: str, call: str, args: tuple[Any, ...], given: dict[str, Any], notebook: Notebook
) -> None:
    notebook.names["double"] = "the function"
    notebook.run(line)
    assert notebook.calls[0] == (call, args, given)


@pytest.mark.parametrize(
    ("line", "value"), [("verdict -o v f(x)", "verdict"), ("check -o v f(x)", "check"), ("compiled -o v x", None)]
)
def test_a_result_is_assigned_to_the_named_variable_and_shown(line: str, value: str, notebook: Notebook) -> None:
    shown = notebook.run(line)
    assert notebook.names["v"] == shown == (value or "compare_compiled")
    notebook.names.clear()
    notebook.run(line.replace("-o v ", ""))
    assert notebook.names == {}


@pytest.mark.parametrize(
    ("dtype", "added", "label", "is_said"),
    [
        ("bfloat16", 1e-3, "clean", True),
        ("bfloat16", 0.0, "clean", False),
        ("bfloat16", 1e-3, "culprit", False),
        ("float32", 1e-9, "clean", False),
    ],
)
def test_after_a_verdict_in_16_bits_the_command_for_float32_is_named(
    dtype: str, added: float, label: str, is_said: bool, notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    tap = {"name": "output", "group": "output", "dtype": dtype, "added": added, "ratio": 0.5, "label": label}
    verdict = notebook.answers["verdict"] = Verdict(Findings(pd.DataFrame([tap]), 5.0, 1), 4)
    assert notebook.run("verdict f(x)") is verdict
    assert capsys.readouterr().out == ""
    notebook.session._internals.default_callees = {}
    notebook.run("verdict f(x)")
    assert ("`%graft compare f(x)` judges it in float32 too" in capsys.readouterr().out) == is_said


def test_a_run_is_assigned_before_its_end_is_awaited(notebook: Notebook) -> None:
    def wait() -> str:
        assert notebook.names["r"] is started
        return "ended"

    started = notebook.answers["start"] = SimpleNamespace(wait=wait)
    assert notebook.run("run -o r f(x)") == "ended"
    assert notebook.calls == [("start", (None, "f(x)"), {})]


def test_functions_of_the_notebook_are_replayed_and_other_names_are_the_ranks(notebook: Notebook) -> None:
    notebook.names["generate"] = "mine"
    notebook.run("replay ~/x.jsonl --target theirs --batch-size 2 --limit 5 -o r")
    path = Path("~/x.jsonl").expanduser()
    assert notebook.calls == [("replay", (path, "mine", "theirs"), {"batch_size": 2, "limit": 5})]
    assert notebook.names["r"] == "replay"


def test_a_match_shows_its_editor_and_is_assigned_itself(notebook: Notebook) -> None:
    assert notebook.run("match -o m f(x)") == "match_editor"
    assert notebook.calls[1] == ("match_editor", ("match",), {})
    assert notebook.names["m"] == "match"


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("transform missing", "has no function 'missing'"),
        ("transform default --where x", "leave out --where"),
        ("rename target", "rename target: give a regular expression"),
        ("plot ou --kind history", "no tap is called 'ou'; did you mean 'out'"),
        ("plot zzz --kind history", "no tap is called 'zzz'; the taps are 'hidden', 'out'"),
        ("lines", "lines: give the name of a tap"),
        ("lines h.0", "no run evaluated an expression on both sides"),
        ("debug", "nothing failed in the newest run"),
        ("listen", "a session is already open"),
        (
            "up -b 2 -t 2 --timeout 5",
            r"other options is open \(baseline 1 -> 2, timeout 60.0 -> 5.0\)\. .* its 3 ranks",
        ),
        ("up --gpus-per-rank 1", "is for ranks on a cluster"),
    ],
)
def test_a_line_that_cannot_be_followed_is_refused(
    line: str, said: str, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(magics, "internals_of", lambda session: SimpleNamespace(default_callees=False))
    with pytest.raises(UsageError, match=said):
        notebook.run(line)
    assert notebook.calls == []


NO_PLACE = (
    "is not a place to run a cell; use one of baseline, target, both, transform, baseline[0], target[0], target[1]"
)

# A line, the cell below it, and all of what is said.
REFUSED: list[tuple[str, str | None, str]] = [
    (
        "compare f(x)",
        None,
        "%graft compare: the baseline is a recording, which computes nothing; `%graft verdict f(x)` judges against it, "
        "and `%graft match f(x)` pairs taps by their values",
    ),
    (
        "up -b 2 -t 2 --timeout 5",
        None,
        "%graft up: a session with other options is open (baseline 1 -> 2, timeout 60.0 -> 5.0). Closing it loses "
        "everything on its 3 ranks: models, variables, kept tensors (2 runs so far, one still running; 1,234 rows stay "
        "in /run/folder). To close it, add --replace",
    ),
    (
        "transform missing",
        None,
        "%graft transform: the notebook has no function 'missing'; define it, or give a dotted path such as "
        "package.module.function",
    ),
    ("rename target", None, r"%graft rename target: give a regular expression, such as '^model\.'"),
    ("target -o x", "1", f"%%graft: 'target -o x' {NO_PLACE}"),
    ("status", "1", f"%%graft: 'status' {NO_PLACE}; write `%graft status`, with one %, for a line"),
    ("plot --verdict --step 1", None, "%graft plot --verdict takes a tap, and with it --dims, and no other option"),
    ("plot --verdict --dims 0", None, "%graft plot --verdict --dims: name a tap"),
    ("plot --kind history", None, "%graft plot --kind history: name a tap"),
    ("plot --kind divergence --dims 0,1", None, "%graft plot: --dims goes with the kinds heatmap, not with divergence"),
    ("replay x --batch-size 0", None, "expected a whole number of at least 1, not '0'"),
    ("up --timeout 0", None, "expected a number of seconds above 0, not '0'"),
    ("up --on tcp://here", None, "expected ray:auto, ray:HOST:PORT or ray://HOST:PORT, not 'tcp://here'"),
    ("plot --steps 3", None, "expected steps A:B, such as 0:100 or 50:, or `all`, not '3'"),
    ("plot out --tags 3", None, "expected TAG=VALUE, such as layer=3, not '3'"),
    ("plot out --dims 0,1,2", None, "expected one or two dimensions R,C, such as 0,2, not '0,1,2'"),
    ("plot --noise-floor -1", None, "expected a number of at least 0, not '-1'"),
    ("run -o 1x f(x)", None, "'1x' is not a valid variable name"),
]


@pytest.mark.parametrize(("line", "cell", "said"), REFUSED, ids=[line for line, *_ in REFUSED])
def test_a_refusal_names_what_was_given_and_what_to_write(
    line: str, cell: str | None, said: str, notebook: Notebook
) -> None:
    notebook.session.runs = [SimpleNamespace(done=True), SimpleNamespace(done=False)]
    with pytest.raises(UsageError) as refused:
        notebook.run(line, cell)
    text = str(refused.value)
    # What argparse refuses comes after the option, and before the usage.
    assert said in text if said.startswith(("expected", "'1x'")) else text == said
    assert notebook.calls == []


def test_a_command_needs_an_expression_where_the_ranks_have_no_code(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(magics, "internals_of", lambda session: SimpleNamespace(default_callees={}))
    for name in ("verdict", "match"):
        with pytest.raises(UsageError) as refused:
            notebook.run(name)
        assert str(refused.value) == f"%graft {name}: give an expression, such as `%graft {name} model(x)`"


@pytest.mark.parametrize(
    ("line", "printed"),
    [
        ("down", "rows and logs are in /run/folder\n"),
        (
            "restart",
            "new ranks run under the same plan; what cells had defined on the ranks is lost, and nothing was rerun\n",
        ),
        ("log target -n 3", "the end of a log\n"),
        ("stacks", "--- baseline[0]\nmain\n--- target[1]\nforward\n"),
        (
            "up -t 2",
            "the open session already matches; keeping it and everything on its ranks (`%graft up --replace` starts a "
            "new one)\n",
        ),
        ("debug target[1]", "the frame\n`%graft debug target[1] p EXPR` shows a value; also w, u, d, l, a\n"),
        ("debug target[1] p x", "the frame\n"),
    ],
)
def test_a_command_prints_just_this(
    line: str, printed: str, notebook: Notebook, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: False))
    stacks = {"baseline[0]": "main", "target[1]": "forward"}
    notebook.answers |= {"log": "the end of a log", "stacks": stacks, "post_mortem": "the frame"}
    notebook.run(line)
    assert capsys.readouterr().out == printed


def test_without_arguments_the_plan_is_shown(notebook: Notebook) -> None:
    assert notebook.run("filter") is notebook.run("rename") is notebook.session.plan


def test_without_an_open_session_the_way_to_one_and_to_the_rows_is_named(notebook: Notebook) -> None:
    notebook.session.closed = True
    with pytest.raises(
        UsageError,
        match=exactly(
            "%graft: no session is open; `%graft up -b 1 -t 2` starts one. The rows of the closed "
            "session are in session.frame and in /run/folder"
        ),
    ):
        notebook.run("status")
    notebook.magics.session = None
    with pytest.raises(UsageError, match=exactly("%graft: no session is open; `%graft up -b 1 -t 2` starts one")):
        notebook.run("status")


@pytest.mark.parametrize("own", ["none", "closed", "open"])
def test_commands_apply_to_the_variable_session_unless_an_own_one_is_open(
    own: str, notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(magics, "Session", FakeSession)
    started, variable = notebook.session, FakeSession([], {})
    notebook.names["session"] = variable
    started.closed = own == "closed"
    if own == "none":
        notebook.magics.session = None
    assert notebook.magics.open_session() is (started if own == "open" else variable)
    variable.closed = started.closed = True
    assert notebook.magics.open_session() is None


def test_lines_take_the_newest_expression_that_both_sides_evaluated(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(magics, "state_of", lambda run: run)
    notebook.session._internals.default_callees = {}
    codes = [("f(0)", "f(0)"), ("f(1)", "f(1)"), ("f(2)", "g(2)"), ("# f", "# f"), (None, None), ("f(3)", "f(3)")]
    runs = [SimpleNamespace(code={"baseline": one, "target": other}, failures={}) for one, other in codes]
    runs[-1].failures = {"target[0]": "NameError: name 'f' is not defined"}
    notebook.session.runs = runs
    notebook.run("lines h.0")
    # Jobs run what they run.
    notebook.session.ranks[0].takes_work = False
    notebook.run("lines h.0")
    # So do scripts that are held.
    notebook.session.ranks[0].takes_work = True
    notebook.session._internals.default_callees = {"baseline": "its script", "target": "its script"}
    notebook.run("lines h.0")
    assert [args for _, args, _ in notebook.calls] == [("h.0", "f(1)", "f(1)"), *[("h.0", None, None)] * 2]


@pytest.mark.parametrize(("rows", "shown"), [(0, []), (1, ["figure"])])
def test_a_comparison_is_drawn_if_taps_were_compared(
    rows: int, shown: list[str], notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = SimpleNamespace(frame=pd.DataFrame(index=range(rows)), plot=lambda: "figure")
    monkeypatch.setattr(magics, "compare_expression", lambda *_: compared)
    drawn: list[Any] = []
    monkeypatch.setattr(magics, "display", drawn.append)
    notebook.session._internals.default_callees = {}
    assert notebook.run("compare -o c f(x)") is notebook.names["c"] is compared
    assert drawn == shown


def test_the_page_of_a_report_is_named_with_its_size(
    notebook: Notebook, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "page.html"
    path.write_bytes(bytes(2**20))
    notebook.answers["report"] = path
    notebook.run("report page.html --tensors")
    assert notebook.calls == [("report", ("page.html",), {"tensors": True})]
    assert capsys.readouterr().out == f"{path} (1,024 KiB)\n"


@pytest.mark.parametrize(("line", "runs"), [("frame -o f", [2]), ("frame --all -o f", [1, 2, 3])])
def test_the_frame_has_the_newest_run_that_no_verdict_made_or_all(
    line: str, runs: list[int], notebook: Notebook
) -> None:
    notebook.session.frame = pd.DataFrame({"run": [1, 2, 3]})
    notebook.session._internals.set_aside = {3}
    assert notebook.run(line)["run"].tolist() == runs
    assert notebook.names["f"]["run"].tolist() == runs


@pytest.mark.parametrize(("allowed", "answers"), [(True, True), (False, False), (None, False)])
def test_a_debugger_prompts_only_in_a_notebook_that_can_answer(
    allowed: bool | None, answers: bool, notebook: Notebook
) -> None:
    given = {} if allowed is None else {"_allow_stdin": allowed}
    notebook.magics.shell.kernel = SimpleNamespace(**given)  # type: ignore[union-attr]
    assert notebook.magics._has_stdin() is answers


# ---- starting and ending ---------------------------------------------------------------------------------------------


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The arguments with which sessions were started."""
    found: list[Any] = []
    for name in ("launch", "listen"):
        monkeypatch.setattr(magics, name, lambda *args, **given: found.append((args, given)) or "new session")
    return found


def test_a_session_that_matches_is_kept_and_others_need_a_word(
    notebook: Notebook, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert notebook.run("up -t 2 -o mine") is notebook.session
    assert notebook.names["mine"] is notebook.session
    assert "already matches" in capsys.readouterr().out
    assert launched == []
    assert notebook.run("up -t 2 --replace --device cpu --start-method spawn --keep-rows 7") == "new session"
    assert notebook.calls == [("close", (), {})]
    assert capsys.readouterr().out == "closing the open session\n"
    ((args, given),) = launched
    assert args == (1, 2)
    assert given == {
        **{"device": "cpu", "backend": None, "timeout": 60.0, "start_method": "spawn"},
        **{"keep_rows": 7, "on": None},
    }
    assert notebook.names["session"] == "new session"


def test_a_session_with_an_ended_rank_is_replaced_and_the_rank_named(
    notebook: Notebook, launched: list[Any], capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.session.ranks[1].alive = False
    notebook.run("up -t 2")
    assert capsys.readouterr().out == "closing the open session: target[0] ended\n"
    assert len(launched) == 1


def test_a_session_of_jobs_is_not_taken_for_one_with_ranks(notebook: Notebook, launched: list[Any]) -> None:
    notebook.session.ranks[0].takes_work = False
    with pytest.raises(
        UsageError,
        match=exactly(
            "%graft up: the open session is a session of jobs; `%graft down` closes it, and its jobs keep running"
        ),
    ):
        notebook.run("up -t 2")


@pytest.mark.parametrize(
    ("options", "resources"),
    [("", {"GPU": 1.0}), (" --gpus-per-rank 0.5", {"GPU": 0.5}), (" --gpus-per-rank 0", {"CPU": 1})],
)
def test_ranks_on_a_cluster_have_a_gpu_or_what_is_given(
    options: str, resources: dict[str, float], notebook: Notebook, launched: list[Any]
) -> None:
    notebook.magics.session = None
    notebook.run(f"up --on ray:auto{options}")
    on = launched[0][1]["on"]
    assert isinstance(on, Ray)
    assert on == Ray("auto", resources=resources)


def test_listening_takes_its_options_and_assigns_the_session(notebook: Notebook, launched: list[Any]) -> None:
    notebook.magics.session = None
    notebook.run("listen -b 2 --folder f --append --address tcp://h:1 --timeout 5 -o s")
    ((args, given),) = launched
    assert args == (2, 1)
    assert given == {"timeout": 5.0, "folder": "f", "append": True, "address": "tcp://h:1", "keep_rows": None}
    assert notebook.names == {"s": "new session"}


def test_the_end_of_a_session_names_the_folder_of_its_rows(
    notebook: Notebook, capsys: pytest.CaptureFixture[str]
) -> None:
    notebook.run("down")
    assert notebook.calls == [("close", (), {})]
    assert capsys.readouterr().out == "rows and logs are in /run/folder\n"


# ---- cells -----------------------------------------------------------------------------------------------------------


def test_a_cell_runs_where_it_says_and_its_values_are_shown_by_rank(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[Any] = []
    monkeypatch.setattr(magics, "display", shown.append)
    notebook.answers["execute"] = SimpleNamespace(baseline=[0], target=[None, 3], participants=notebook.session.ranks)
    notebook.run("both", "x = 1")
    notebook.run("target[1]", "x = 1")
    assert [args for _, args, _ in notebook.calls] == [("x = 1", "both"), ("x = 1", "target[1]")]
    assert shown == [0, 3, 0, 3]
    assert capsys.readouterr().out == "baseline[0]:\ntarget[1]:\n" * 2


def test_a_figure_that_a_cell_returns_is_not_shown_a_second_time(
    notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(magics, "display", lambda value: None)
    kept, returned = pyplot.figure(), pyplot.figure()
    notebook.answers["execute"] = SimpleNamespace(
        baseline=[returned], target=[None, 3], participants=notebook.session.ranks
    )
    notebook.run("both", "plt.gcf()")
    assert pyplot.get_fignums() == [kept.number]
    pyplot.close("all")


def test_a_cell_may_be_a_transform_for_all_or_for_some_taps(notebook: Notebook) -> None:
    notebook.run("transform", "def f(): ...")
    notebook.run("transform --where name == 'a=b'", "def f(): ...")
    given = [each["transform"] for _, _, each in notebook.calls]
    assert given == ["def f(): ...", ("name == 'a=b'", "def f(): ...")]


def test_a_cell_for_an_unknown_place_is_refused_with_the_places(notebook: Notebook) -> None:
    with pytest.raises(
        UsageError,
        match=exactly(
            "%%graft: 'target[2]' is not a place to run a cell; use one of baseline, target, both, "
            "transform, baseline[0], target[0], target[1]"
        ),
    ):
        notebook.run("target[2]", "x")
    with pytest.raises(
        UsageError,
        match=exactly(
            "%%graft: 'run f(x)' is not a place to run a cell; use one of baseline, target, both, "
            "transform, baseline[0], target[0], target[1]; write `%graft run`, with one %, for a line"
        ),
    ):
        notebook.run("run f(x)", "x")


# ---- completion ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("%graft sta", ["status", "stacks"]),
        ("%graft up --re", ["--replace"]),
        ("%graft up --start-method ", ["forkserver", "spawn"]),
        ("%graft up --start-method s", ["spawn"]),
        ("%graft log target", ["target", "target[0]", "target[1]"]),
        ("%graft debug b", ["baseline[0]"]),
        ("%graft debug target[0] b", []),
        ("%graft plot h", ["hidden"]),
        ("%graft plot --dims 0 h", ["hidden"]),
        ("%graft lines h", ["hidden"]),
        ("%graft lines hidden h", []),
        ("%graft rename ta", ["target"]),
        ("%%graft target", ["target", "target[0]", "target[1]"]),
        ("%%graft both t", []),
        ("%graft unknown t", []),
        ("x = 1", []),
        ("", []),
    ],
)
def test_completion_offers_what_may_stand_there(
    line: str, expected: list[str], notebook: Notebook, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(magics, "magics_of_completion", [*magics_of_completion, notebook.magics])
    context = CompletionContext(token="", full_text=line, cursor_position=len(line), cursor_line=0, limit=None)
    found = complete_graft(context)
    assert [each.text for each in found["completions"]] == expected
    assert bool(found.get("suppress")) is bool(expected)


@pytest.mark.parametrize("has_stdin", [False, True])
def test_the_debugger_takes_one_command_or_prompts_where_a_person_can_answer(
    has_stdin: bool, notebook: Notebook, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(notebook.magics, "_has_stdin", lambda: has_stdin)
    prompts: list[str] = []
    monkeypatch.setattr(magics, "prompt", lambda rank, *_: prompts.append(rank))
    failures: tuple[dict[str, str], ...] = ({"baseline[0]": "KeyError"}, dict.fromkeys(("target[0]", "target[1]"), "x"))
    notebook.session.runs += [SimpleNamespace(failures=each) for each in failures]
    notebook.run("debug baseline[0] p x")
    assert notebook.calls == [("post_mortem", ("baseline[0]", "p x"), {})]
    assert capsys.readouterr().out == "post_mortem\n"
    notebook.run("debug")
    shown = capsys.readouterr().out
    assert prompts == (["target[0]"] if has_stdin else [])
    assert shown.startswith("" if has_stdin else "post_mortem\n`%graft debug target[0] p EXPR` shows a value")
    assert bool(shown) is not has_stdin


def test_after_a_reload_the_same_shell_has_its_session_and_completes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    def shell() -> Any:
        made = InteractiveShell.__new__(InteractiveShell)
        object.__setattr__(made, "_trait_values", {})
        vars(made).update(Completer=SimpleNamespace(custom_matchers=[len]), register_magics=registered.append)
        return made

    registered: list[Any] = []
    warm, formats, known = Mock(), Mock(), list[GraftMagics]()
    for name, part in (("warm_up", warm), ("select_figure_formats", formats), ("magics_of_completion", known)):
        monkeypatch.setattr(magics, name, part)
    mine, other = shell(), shell()
    magics.load(mine)
    # The first launch finds a process that has imported torch.
    warm.assert_called_once_with()
    formats.assert_called_once_with(mine, {"png"})
    sessions: list[Any] = [SimpleNamespace(closed=False) for _ in range(3)]
    known[0].session = sessions[0]
    magics.load(other)
    assert known[1].session is None
    known[1].session = sessions[1]
    magics.load(mine)
    assert known[2].session is sessions[0]
    known[2].session = sessions[2]
    magics.load(mine)
    # That of the newest magics, which may have opened another since.
    assert known[3].session is sessions[2]
    assert registered == known
    assert mine.Completer.custom_matchers == [len, complete_graft]
