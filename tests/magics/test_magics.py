"""``%graft`` and ``%%graft`` in a real kernel: what each does, what mistakes look like, help and completion."""

from __future__ import annotations

import os
import pickle
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.kernels import Kernel, kernel

from graftlab.magics import subcommands

PACKAGE = str(Path(subcommands.__file__).parents[1])
SUBCOMMANDS = (
    "up",
    "status",
    "stacks",
    "interrupt",
    "debug",
    "restart",
    "down",
    "log",
    "replay",
    "rename",
    "undo",
    "redo",
    "report",
    "run",
    "filter",
    "transform",
    "frame",
    "plot",
    "ui",
    "verdict",
    "lines",
    "compare",
    "match",
    "check",
    "compiled",
    "listen",
)

DEFINE = """
    %%graft both
    def forward(batch):
        hidden = gl.tap("hidden", batch * 2.0, layer=3)
        return gl.tap("out", hidden.sum()).item()
"""


@pytest.fixture(scope="module")
def bare() -> Iterator[Kernel]:
    """A kernel with the extension and whatever session the tests before left."""
    with kernel() as running:
        loaded = running.run("%load_ext graftlab\nimport graftlab as gl, torch")
        assert not loaded.error, loaded.error
        yield running


@pytest.fixture
def notebook(bare: Kernel) -> Kernel:
    """The kernel with a new session of 1+2 ranks."""
    assert not bare.run("%graft up -b 1 -t 2 --replace").error
    return bare


@pytest.fixture
def untouched(bare: Kernel) -> Kernel:
    """The kernel with a session of 1+2 ranks in which nothing has happened; that of the test before, if it is one."""
    state = bare.run("(session.closed, len(session.ranks), len(session.runs), session.plan.version)").values
    if state != ["(False, 3, 0, 0)"]:
        assert not bare.run("%graft up -b 1 -t 2 --replace").error
    return bare


def typed(notebook: Kernel, cell: str) -> str:
    """Run a cell that must work; what it prints."""
    reply = notebook.run(textwrap.dedent(cell).strip())
    assert not reply.error, reply.error
    assert "UsageError" not in reply.stderr, reply.stderr
    return reply.stdout


def value(notebook: Kernel, expression: str) -> str:
    """How the notebook shows the value of an expression or of a line magic."""
    reply = notebook.run(expression)
    assert not reply.error, reply.error
    assert reply.shown, f"{expression} showed nothing: {reply.stderr}"
    # A figure that follows, as below a run, has no text.
    return str(next((each for each in reversed(reply.values) if each), ""))


# ---- each subcommand ------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_a_recorded_side_replays_its_taps_and_does_not_evaluate_the_expression(bare: Kernel) -> None:
    recorded = """
        import tempfile
        folder = f"{tempfile.mkdtemp()}/recorded"
        with gl.record(folder):
            gl.tap("hidden", torch.ones(4) * 2.5, layer=3)
        if "session" in globals():
            session.close()
        session = gl.launch(baseline=gl.Recording(folder), target=1)
    """
    assert not bare.run(textwrap.dedent(recorded)).error
    # Both sides have the function, which the baseline must not run in place of what was recorded.
    assert not bare.run(textwrap.dedent(DEFINE)).error
    assert not bare.run("%graft run -o run forward(torch.ones(4))").error
    assert bare.run("run.frame.query('name == \"hidden\"')['rel_l2'].round(6).tolist()").values == ["[0.2]"]
    assert not bare.run("%graft verdict -o verdict forward(torch.ones(4))").error
    assert bare.run("verdict.frame.set_index('name')['label']['hidden']").values == ["'culprit'"]
    bare.run("session.close()")


@pytest.mark.ranks
def test_up_starts_the_ranks_and_names_the_session(bare: Kernel) -> None:
    assert "<Session 2+1: 3 ranks alive" in value(
        bare, "%graft up --baseline 2 -t 1 --timeout 50 --device cpu --keep-rows 1000 -o mine --replace"
    )
    assert value(bare, "[rank.label for rank in mine.ranks], mine.options.timeout, mine.options.keep_rows") == (
        "(['baseline[0]', 'baseline[1]', 'target[0]'], 50.0, 1000)"
    )
    typed(bare, "%graft up --replace")
    assert value(bare, "session.options.baseline, session.options.target, mine.closed") == "(1, 1, True)"


@pytest.mark.ranks
def test_up_with_the_same_options_keeps_the_session_and_its_ranks(notebook: Kernel) -> None:
    typed(notebook, "first = session")
    typed(notebook, "%%graft both\nmodel = 'loaded'")
    assert "keeping it and everything on its ranks" in typed(notebook, "%graft up -b 1 -t 2 -o again")
    assert value(notebook, "again is first, session is first, first.closed") == "(True, True, False)"
    typed(notebook, "%graft run -o run model")
    assert value(notebook, "run.baseline") == "['loaded']"


@pytest.mark.ranks
def test_up_replaces_a_session_that_has_lost_a_rank(notebook: Kernel) -> None:
    typed(notebook, "import os, signal\nfirst = session\nos.kill(first.ranks[2].pid, signal.SIGKILL)")
    typed(notebook, "while first.ranks[2].alive: pass")
    assert "closing the open session: target[1] ended" in typed(notebook, "%graft up -b 1 -t 2")
    assert value(notebook, "first.closed, session.closed") == "(True, False)"


@pytest.mark.ranks
def test_a_launched_session_is_used_if_its_variable_is_called_session(bare: Kernel) -> None:
    typed(bare, "%graft up --replace\nsession.close()\nsession = by_hand = gl.launch(1, 1)")
    assert "idle" in value(bare, "%graft status")
    typed(bare, "%graft up")
    assert value(bare, "by_hand.closed, session is by_hand") == "(False, True)"
    typed(bare, "%graft up --replace")
    assert value(bare, "by_hand.closed") == "True"


@pytest.mark.ranks
def test_the_session_survives_a_reload_of_the_extension(notebook: Kernel) -> None:
    typed(notebook, "kept, session = session, None\n%reload_ext graftlab\n%graft log")
    typed(notebook, "%graft down")
    assert value(notebook, "kept.closed") == "True"


@pytest.mark.ranks
def test_status_has_one_line_a_rank(notebook: Kernel) -> None:
    reply = notebook.run("%graft status")
    assert "text/html" in reply.shown[0]
    assert value(notebook, "_.side.tolist(), _['rank'].tolist(), set(_.state)") == (
        "(['baseline', 'target', 'target'], [0, 0, 1], {'idle'})"
    )


@pytest.mark.ranks
def test_stacks_show_the_users_lines_and_idle_ranks_as_idle(notebook: Kernel, tmp_path: Path) -> None:
    typed(notebook, f"import os, pathlib\ngate = pathlib.Path({str(tmp_path / 'gate')!r})\nos.mkfifo(gate)")
    typed(notebook, f"%%graft baseline\ndef wait():\n    return open({str(tmp_path / 'gate')!r}).read()")
    typed(notebook, "going = session.start('wait()')\nwhile 'open(' not in session.stacks()['baseline[0]']:\n    pass")
    stacks = typed(notebook, "%graft stacks")
    typed(notebook, "gate.write_text('opened')")
    assert value(notebook, "going.wait().baseline") == "['opened']"
    baseline, target = stacks.split("--- target[0]")
    assert "return open(" in baseline
    assert PACKAGE not in baseline, "how a rank came to run the code is of no interest"
    assert "idle" in target


@pytest.mark.ranks
def test_interrupt_ends_the_code_and_not_the_ranks(notebook: Kernel) -> None:
    typed(notebook, "before = session.status().pid.tolist()")
    typed(notebook, "%%graft both\ndef spin():\n    print('spinning')\n    while True:\n        pass")
    typed(
        notebook,
        "going = session.start('spin()', 'spin()')\nwhile session.log('both').count('spinning') < 3:\n    pass",
    )
    typed(notebook, "%graft interrupt")
    reply = notebook.run("going.wait()")
    assert reply.error_name == "RunError"
    assert "KeyboardInterrupt" in reply.error
    assert value(notebook, "sorted(going.failures)") == "['baseline[0]', 'target[0]', 'target[1]']"
    assert value(notebook, "session.status().pid.tolist() == before, set(session.status().state)") == "(True, {'idle'})"


@pytest.mark.ranks
def test_down_ends_the_ranks_and_names_the_run_folder(notebook: Kernel) -> None:
    printed = typed(notebook, "%graft down")
    assert value(notebook, "session.closed, [rank.alive for rank in session.ranks]") == "(True, [False, False, False])"
    assert value(notebook, "str(session.folder)").strip("'") in printed


@pytest.mark.ranks
def test_log_shows_the_end_of_a_ranks_log(notebook: Kernel) -> None:
    typed(notebook, "%%graft target\nfor index in range(9):\n    print('line', index, gl.here().rank)")
    log = typed(notebook, "%graft log target[1] -n 2")
    assert "--- target[1]" in log
    assert log.splitlines()[1:] == ["line 7 1", "line 8 1"]
    assert "--- baseline[0]" in typed(notebook, "%graft log")
    assert "--- target[0]" in typed(notebook, "%graft log target")


@pytest.mark.ranks
def test_run_evaluates_on_both_sides_as_one_step_and_keeps_the_run(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    assert "done" in value(notebook, "%graft run -o mine forward(torch.ones(4))")
    assert value(notebook, "mine.baseline, mine.target") == "([8.0], [8.0, 8.0])"
    assert value(notebook, "mine.frame.status.tolist()") == "['compared', 'compared', 'compared', 'compared']"
    assert value(notebook, "mine.frame.step.nunique()") == "1"
    typed(notebook, "%graft run forward(torch.zeros(4)) -o other")
    assert value(notebook, "other.baseline, other.number - mine.number") == "([0.0], 1)"
    typed(notebook, "third = %graft run 1 + 1")
    assert value(notebook, "third.target") == "[2, 2]"


@pytest.mark.ranks
def test_a_comparison_with_compiled_code_is_shown_and_kept_under_a_name(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    shown = value(notebook, "%graft compiled -o compared --backend eager forward(torch.ones(4))")
    assert "Compiled, its result is equal to the eager one, without taps and with them." in shown
    assert value(notebook, "compared.fused is None") == "True"


@pytest.mark.ranks
def test_a_verdict_is_shown_and_kept_under_a_name(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%graft filter --b2t name == 'hidden'")
    assert "No tap adds more than rounding" in value(notebook, "%graft verdict -o judged forward(torch.ones(4))")
    assert value(notebook, "judged.named") == "[]"
    assert "'hidden' adds no more than rounding" in value(
        notebook, "%graft lines -o lines hidden forward(torch.ones(4))"
    )
    assert value(notebook, "len(lines.frame)") == "0"
    # The newest expression.
    typed(notebook, "%graft run forward(torch.ones(4))")
    assert "'hidden' adds no more than rounding" in value(notebook, "%graft lines hidden")
    assert "hidden" in value(notebook, "session.plan.b2t")


@pytest.mark.ranks
def test_a_comparison_taps_the_models_of_an_expression_and_shows_a_figure(notebook: Kernel) -> None:
    typed(
        notebook,
        """
        %%graft both
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4))
        if gl.here().side == "target":
            model[1].eps = 0.5
        """,
    )
    reply = notebook.run("%graft compare -o compared model(torch.ones(2, 4)).detach()")
    assert any("image/png" in data for data in reply.shown), reply.error
    assert value(notebook, "compared.answer, compared.labels['*']") == "('differ', 'culprit')"
    # The models have no taps afterwards.
    typed(notebook, "%graft run -o untapped model(torch.ones(2, 4)).sum().item()")
    assert value(notebook, "len(untapped.frame)") == "0"


@pytest.mark.ranks
def test_a_comparison_that_is_stopped_leaves_the_models_as_they_were(notebook: Kernel, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    typed(
        notebook,
        f"""
        %%graft both
        repeated = 0
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
        def call():
            global repeated
            model(torch.ones(2, 4))
            repeated += 1
            if repeated > 2:
                print("repeated", flush=True)
                open({str(tmp_path / "gate")!r}).read()
        """,
    )
    cell = notebook.begin("%graft compare call()")
    notebook.finish(cell, until=lambda reply: "repeated" in reply.stdout)
    notebook.manager.interrupt_kernel()
    stopped = notebook.finish(cell)
    assert stopped.error.startswith("KeyboardInterrupt: the comparison was stopped, and its code on the ranks was int")
    typed(notebook, "%graft run -o untapped (model(torch.ones(2, 4)), model[1].num_batches_tracked.item())[1]")
    assert value(notebook, "untapped.baseline, untapped.target, len(untapped.frame)") == "([1], [1, 1], 0)"


@pytest.mark.ranks
def test_a_match_is_shown_and_kept_under_a_name(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    reply = notebook.run("%graft match -o found forward(torch.randn(4))")
    assert any("application/vnd.jupyter.widget-view+json" in data for data in reply.shown), reply.error
    assert "2 of 2 target taps have a partner" in value(notebook, "found")
    assert value(notebook, "found.pairs[0].baseline + found.pairs[0].target") == "'hidden[layer=3]hidden[layer=3]'"


@pytest.mark.ranks
def test_a_failed_run_is_assigned_with_its_rows(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    assert notebook.run("%graft run -o bad forward(torch.ones(4)) / 0").error_name == "RunError"
    assert value(notebook, "len(bad.frame), sorted(bad.failures)") == "(4, ['baseline[0]', 'target[0]', 'target[1]'])"


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ("""'single' + "double" + '$HOME {dict}'""", "'singledouble$HOME {dict}'"),
        ("""{"a": [1, 2], 'b': {3}}["a"]""", "[1, 2]"),
        ("f'{1 + 1} {{}} $PATH'", "'2 {} $PATH'"),
        ("(lambda x: -x)(3)  # a comment", "-3"),
        ("'-o name' + ' --help'", "'-o name --help'"),
        (r"'back\\slash\n'", r"'back\\slash\n'"),
    ],
)
def test_expressions_reach_the_ranks_as_they_were_typed(notebook: Kernel, expression: str, expected: str) -> None:
    typed(notebook, f"%graft run -o typed {expression}")
    assert value(notebook, "typed.baseline[0]") == expected


@pytest.mark.ranks
def test_filter_edits_the_named_filters_and_shows_the_plan(notebook: Kernel) -> None:
    typed(notebook, """%graft filter --b2t search('at{2}n', name) and layer < 4 --keep "step == 0" """)
    assert value(notebook, "session.plan.b2t, session.plan.keep, session.plan.compare, session.plan.version") == (
        "(\"search('at{2}n', name) and layer < 4\", 'step == 0', 'True', 1)"
    )
    typed(notebook, '%graft filter --compare "" --t2b=name == "$x"')
    assert value(notebook, "session.plan.b2t, session.plan.compare, session.plan.t2b") == (
        "(\"search('at{2}n', name) and layer < 4\", '', 'name == \"$x\"')"
    )
    assert "version=2" in value(notebook, "%graft filter")
    assert value(notebook, "session.plan.version") == "2"


@pytest.mark.ranks
def test_filter_reports_the_matches_and_suggests_corrections(notebook: Kernel) -> None:
    assert typed(notebook, "%graft filter --b2t nme == 'hidden'") == "b2t: no tap has been seen yet\n"
    typed(notebook, DEFINE)
    typed(notebook, "%graft filter --b2t ''")
    typed(notebook, "%graft run forward(torch.ones(4))")
    said = typed(notebook, "%graft filter --b2t nme == 'hidden' --keep True")
    assert said == "b2t: 0 of 2 seen; no tap has the tag 'nme'; did you mean 'name'?\nkeep: 2 of 2 seen\n"
    assert "b2t matched no tap in this run: nme == 'hidden'" in value(notebook, "%graft run forward(torch.ones(4))")


@pytest.mark.ranks
def test_plot_takes_a_step_or_steps_and_refuses_what_does_not_fit(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%graft run forward(torch.ones(4))")
    for line in ("%graft plot --steps all", "%graft plot --steps 0:", "%graft plot --kind over_steps"):
        reply = notebook.run(line)
        assert [set(data) for data in reply.shown] == [{"image/png", "text/html", "text/plain"}], reply
    assert "expected steps A:B, such as 0:100 or 50:, or `all`, not '3'" in notebook.run("%graft plot --steps 3").stderr
    assert "it has rows of step" in notebook.run("%graft plot --step 99").error
    assert (
        "--step goes with the kinds divergence, not with history" in notebook.run("%graft plot hidden --step 0").stderr
    )


@pytest.mark.ranks
def test_a_figure_that_ends_a_cell_is_shown_once_a_rank(notebook: Kernel) -> None:
    typed(notebook, "import matplotlib.pyplot")
    reply = notebook.run("%%graft target\nimport matplotlib.pyplot as plt\nplt.figure().add_subplot()\nplt.gcf()")
    pictures = [data for data in reply.shown if "image/png" in data]
    assert len(pictures) == 2, reply


@pytest.mark.ranks
def test_a_rename_is_suggested_if_nothing_paired_and_then_pairs(notebook: Kernel) -> None:
    for side, prefix in (("baseline", ""), ("target", "model.")):
        typed(
            notebook,
            f"""
            %%graft {side}
            import torch
            import graftlab as gl
            def prefixed():
                for layer in range(3):
                    gl.tap(f"{prefix}layers.{{layer}}", torch.ones(2))
            """,
        )
    shown = value(notebook, "%graft run prefixed()")
    assert "6 missing, 3 unmatched: target names start with 'model.'" in shown
    line = next(each for each in shown.splitlines() if "%graft rename" in each)
    typed(notebook, "%graft rename" + line.partition("%graft rename")[2].partition(" pairs")[0])
    assert "none of 6 compared rows is above" in value(notebook, "%graft run prefixed()")
    typed(notebook, "%graft rename --clear")
    assert value(notebook, "session.plan.rename") == "()"
    assert "give a regular expression" in notebook.run("%graft rename target").stderr


@pytest.mark.ranks
def test_report_writes_a_page_and_prints_its_path(notebook: Kernel, tmp_path: Path) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%graft run forward(torch.ones(4))")
    reply = notebook.run(f"%graft report {tmp_path}/found.html")
    assert f"{tmp_path}/found.html (" in reply.stdout
    assert "forward(torch.ones(4))" in (tmp_path / "found.html").read_text()


@pytest.mark.ranks
def test_help_on_a_plot_shows_its_options(notebook: Kernel) -> None:
    typed(notebook, "import inspect")
    signature = "str(inspect.signature(session.plot.divergence))"
    assert "value" in value(notebook, signature)
    assert "noise_floor" in value(notebook, signature)
    assert "frames" not in value(notebook, signature)
    assert "annotated as the first divergent one" in value(notebook, "session.plot.divergence.__doc__")


@pytest.mark.ranks
def test_filter_refuses_an_overlap_on_taps_that_were_seen(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%graft run forward(torch.ones(4))")
    reply = notebook.run("%graft filter --b2t layer == 3 --t2b name == 'hidden'")
    assert "GraftOverlapError" in reply.error
    assert "match hidden layer=3; a tap is grafted one way" in reply.error
    assert value(notebook, "session.plan.version") == "0"


@pytest.mark.ranks
def test_transform_takes_a_function_a_path_and_the_default(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "def seven(graft_input):\n    return torch.full_like(graft_input.target, 7.0)")
    plan = value(notebook, "%graft transform seven")
    assert "seven" in plan
    assert "blob" not in plan
    typed(notebook, "%graft filter --b2t name == 'hidden'\n%graft run -o mine forward(torch.ones(4))")
    assert value(notebook, "mine.baseline, mine.target") == "([8.0], [28.0, 28.0])"
    typed(notebook, "%graft transform default\n%graft run -o mine forward(torch.ones(4))")
    assert value(notebook, "mine.target, session.plan.transform") == "([8.0, 8.0], None)"
    typed(notebook, "%graft transform torch.nn.functional.relu")
    assert value(notebook, "session.plan.transform.kind") == "'path'"


@pytest.mark.ranks
def test_transform_takes_a_filter_of_the_taps_to_transform(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "def seven(graft_input):\n    return torch.full_like(graft_input.target, 7.0)")
    shown = "session.plan.transform.label, session.plan.transform.where"
    for line, where in (
        ("--where name == 'hidden' and layer is None", "name == 'hidden' and layer is None"),
        ("--where=search('a --b2t b', name)", "search('a --b2t b', name)"),
        ("--where \"name == 'hidden'\"", "name == 'hidden'"),
    ):
        typed(notebook, f"%graft transform seven {line}")
        assert value(notebook, shown) == repr(("seven", where))
    typed(notebook, "%graft run -o mine forward(torch.ones(4))")
    assert value(notebook, "set(mine.frame.loc[mine.frame.name == 'hidden', 'transform'])") == "{'seven'}"
    assert value(notebook, "set(mine.frame.loc[mine.frame.name == 'hidden', 'status'])") == "{'compared'}"
    assert value(notebook, "set(mine.frame.loc[mine.frame.name == 'hidden', 'mean_baseline'].tolist())") == "{7.0}"

    cell = "def transform(graft_input):\n    return graft_input.received_list[0]"
    typed(notebook, f"%%graft transform --where name == 'hidden'\n{cell}")
    plan = "session.plan.transform.kind, session.plan.transform.where"
    assert value(notebook, plan) == repr(("source", "name == 'hidden'"))


@pytest.mark.ranks
def test_a_transform_cell_is_the_transform_and_its_lines_show_in_errors(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%%graft transform\ndef transform(graft_input):\n    return graft_input.received_list[0] + 1")
    typed(notebook, "%graft filter --b2t name == 'hidden'\n%graft run -o mine forward(torch.ones(4))")
    assert value(notebook, "mine.target") == "[12.0, 12.0]"
    typed(notebook, "%%graft transform\ndef transform(graft_input):\n    return graft_input.received_list[99]")
    typed(notebook, "%graft run -o mine forward(torch.ones(4))")
    rows = "mine.frame[mine.frame.name == 'hidden']"
    assert value(notebook, f"set({rows}.status)") == "{'failed'}"
    assert value(notebook, f"'return graft_input.received_list[99]' in {rows}.error.iloc[0]") == "True"


@pytest.mark.ranks
def test_frame_shows_the_newest_run_that_has_rows(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%graft run forward(torch.ones(4))\n%graft run -o mine forward(torch.ones(4))")
    typed(notebook, "%%graft both\n'a cell is a run too, without rows'")
    reply = notebook.run("%graft frame -o frame")
    assert "text/html" in reply.shown[0]
    assert value(notebook, "frame.equals(mine.frame), len(frame)") == "(True, 4)"
    typed(notebook, "frame = %graft frame --all")
    assert value(notebook, "len(frame), frame.run.nunique()") == "(8, 2)"


@pytest.mark.ranks
def test_frame_is_empty_before_the_first_run(notebook: Kernel) -> None:
    typed(notebook, "frame = %graft frame")
    assert value(notebook, "len(frame), 'rel_l2' in frame") == "(0, True)"


@pytest.mark.ranks
@pytest.mark.parametrize(
    "line",
    [
        pytest.param("plot", marks=pytest.mark.soak),
        pytest.param("plot hidden", marks=pytest.mark.soak),
        "plot hidden --kind ranks",
        "plot hidden --dims 0 --tags layer=3",
        "plot --noise-floor 1e-5",
    ],
)
def test_plot_shows_a_picture(notebook: Kernel, line: str) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%graft filter --keep True\n%graft run forward(torch.ones(4, 4))")
    reply = notebook.run(f"%graft {line}")
    assert not reply.error, reply.error
    assert "image/png" in reply.shown[-1], reply.stderr


@pytest.mark.ranks
def test_the_given_noise_floor_is_drawn(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%graft run forward(torch.ones(4, 4))")
    typed(notebook, "figure = get_ipython().run_line_magic('graft', 'plot --noise-floor 0.125')")
    heights = "{float(y) for axes in figure.axes for line in axes.lines for y in line.get_ydata()}"
    assert value(notebook, f"0.125 in {heights}") == "True"


# ---- cells ----------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_cells_keep_their_names_and_show_values_and_output_with_the_rank(notebook: Kernel) -> None:
    typed(notebook, "%%graft target\nmine = gl.here().rank + 10\nprint('made', mine)")
    reply = notebook.run("%%graft target\nmine")
    assert reply.values == ["10", "11"]
    assert reply.stdout.split() == ["target[0]:", "target[1]:"]
    assert sorted(notebook.run("%%graft target\nprint('has', mine)").stdout.splitlines()) == [
        "target[0] | has 10",
        "target[1] | has 11",
    ]
    assert notebook.run("%%graft target[1]\nmine").values == ["11"]
    assert notebook.run("%%graft both\ngl.here().side").values == ["'baseline'", "'target'", "'target'"]
    missing = notebook.run("%%graft baseline\nmine")
    assert "baseline[0] raised NameError: name 'mine' is not defined" in missing.error


@pytest.mark.ranks
def test_cells_show_rich_values_richly(notebook: Kernel) -> None:
    reply = notebook.run("%%graft baseline\nimport pandas\npandas.DataFrame({'a': [1]})")
    assert "text/html" in reply.shown[0]


@pytest.mark.ranks
def test_cells_are_compiled_like_any_notebook_cell(notebook: Kernel) -> None:
    reply = notebook.run("%%graft baseline\ndef f(x: int) -> None: ...\nf.__annotations__")
    assert reply.values == ["{'x': int, 'return': None}"]


@pytest.mark.ranks
def test_tracebacks_show_the_cells_lines_once_for_ranks_that_fail_alike(notebook: Kernel) -> None:
    reply = notebook.run("%%graft target\ndef broken(x):\n    return x / 0  # here\n\nbroken(1)")
    assert reply.error_name == "RunError"
    assert "target[0], target[1] raised ZeroDivisionError: division by zero" in reply.error
    assert reply.error.count("return x / 0  # here") == 1
    assert "broken(1)" in reply.error
    assert "worker.py" not in reply.error


@pytest.mark.ranks
def test_functions_of_the_notebook_run_on_the_ranks_and_show_their_lines_there(notebook: Kernel) -> None:
    typed(notebook, "def forward(x):\n    h = gl.tap('h', x * 2)\n    return h / (x.numel() - 1)  # is one, here")
    assert value(notebook, "session.run(forward, forward, args=(torch.ones(3),)).target[1]") == "tensor([1., 1., 1.])"
    typed(
        notebook,
        "def bad(graft_input):\n    return graft_input.no_such_field  # in the transform\n"
        "%graft transform bad --where True",
    )
    typed(notebook, "run = session.run(forward, forward, args=(torch.ones(3),))")
    assert value(notebook, "'return graft_input.no_such_field  # in the transform' in run.frame.error[0]") == "True"
    reply = notebook.run("session.run(forward, forward, args=(3,))")
    assert "h / (x.numel() - 1)  # is one, here" in reply.error
    assert "AttributeError: 'int' object has no attribute 'numel'" in reply.error


@pytest.mark.ranks
def test_a_rank_that_warns_names_the_users_line(notebook: Kernel) -> None:
    printed = typed(notebook, "%%graft both\ngl.tap('words', 'not a tensor')\nNone")
    assert "GraftWarning: gl.tap('words') on target[1]" in printed
    assert "gl.tap('words', 'not a tensor')" in printed
    assert "grafter.py" not in printed


# ---- mistakes -------------------------------------------------------------------------------------------------------


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("%graft stat", "did you mean 'status'?"),
        ("%graft up 'unfinished", "No closing quotation"),
        ("%graft run", "give an expression"),
        ("%graft transform missing", "no function 'missing'"),
        ("%%graft transform --where\nx = 1", "--where needs a filter"),
        ("%%graft nowhere\n1", "target[1]"),
        ("%%graft target -o x\n1", "is not a place to run a cell"),
    ],
)
def test_mistakes_in_the_line_get_a_usage_error_without_a_traceback(untouched: Kernel, line: str, says: str) -> None:
    reply = untouched.run(line)
    assert reply.stderr.startswith("UsageError: %"), reply.error or reply.stderr
    assert says in reply.stderr
    assert not reply.error
    assert "Traceback" not in reply.stderr
    assert value(untouched, "session.closed, len(session.runs), session.plan.version") == "(False, 0, 0)"


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["status", "stacks", "interrupt", "down", "log", "run 1", "filter", "frame", "plot"])
def test_without_a_session_commands_say_how_to_start_one(bare: Kernel, line: str) -> None:
    typed(bare, "if 'session' in globals():\n    session.close()")
    reply = bare.run(f"%graft {line}")
    assert reply.stderr.startswith("UsageError: %graft: no session is open; `%graft up")
    assert ("The rows of the closed session are in" in reply.stderr) == ("'session'" in value(bare, "dir()"))
    assert bare.run("%%graft both\n1").stderr == reply.stderr


@pytest.mark.ranks
@pytest.mark.parametrize(
    ("cell", "message"),
    [
        ("%graft up --replace --device tpu", "LaunchError: device='tpu'"),
        ("%graft up --replace --backend carrier_pigeon", "LaunchError: backend='carrier_pigeon'"),
        ("%graft log nobody", "SessionError: 'nobody' names no rank"),
        ("%graft filter --b2t search('a', ", "FilterError: "),
        ("%graft filter --keep __import__('os')", "FilterError: "),
        ("%graft transform operator.neg --where name ==", "FilterError: "),
        ("%graft transform os.no_such_function", "TransformError: "),
        (
            "three = 3\n%graft transform three",
            "TransformError: a transform is a dotted path",
        ),
        ("%%graft transform\nx = 1", "TransformError: "),
        ("%graft plot --kind scatter nothing", "SessionError: no pair of tensors is kept for 'nothing'"),
        ("%graft rename target ( x", "PlanError: rename '(' -> 'x' for target is invalid"),
        ("%graft run f(", "SessionError: the expression is not valid Python, so nothing was run"),
        ("%graft verdict f(", "SessionError: the expression is not valid Python, so nothing was run"),
        ("%graft match f(", "SessionError: the expression is not valid Python, so nothing was run"),
        ("%graft check f(", "SessionError: the expression is not valid Python, so nothing was run"),
        ("%graft compiled f(", "SessionError: the expression is not valid Python, so nothing was run"),
        ("%%graft both\nif True", "SessionError: the cell is not valid Python, so nothing was run"),
        ("session.run('1', 2)", "SessionError: target= must be a function or an expression, not int"),
        ("session.close()\nsession.run('1')", "SessionClosedError: this session is closed"),
    ],
)
def test_errors_of_graftlab_show_their_message_only(untouched: Kernel, cell: str, message: str) -> None:
    reply = untouched.run(cell)
    assert reply.error.startswith(message), reply.error or reply.stderr
    assert "Traceback" not in reply.error
    assert PACKAGE not in reply.error
    assert value(untouched, "len(session.runs), session.plan.version") == "(0, 0)", "what was refused made a plan"


@pytest.mark.ranks
def test_a_mistake_in_the_code_is_shown_where_it_is_and_runs_nowhere(notebook: Kernel) -> None:
    reply = notebook.run("%%graft both\nx = 1\ndef broken(:\n    pass")
    assert "    def broken(:\n" in reply.error
    assert "^" in reply.error
    assert value(notebook, "len(session.runs)") == "0"


# ---- help and completion --------------------------------------------------------------------------------------------


@pytest.mark.ranks
def test_replay_feeds_a_file_to_the_functions_that_it_names(notebook: Kernel, tmp_path: Path) -> None:
    requests = [({"rid": f"r{i}", "input_ids": [i]}, None, 1.0, 2.0) for i in range(4)]
    dump = tmp_path / "requests of today.pkl"
    dump.write_bytes(pickle.dumps({"requests": requests}))
    typed(notebook, "%%graft both\ndef generate(requests):\n    return [r['input_ids'] for r in requests]")
    typed(notebook, "def off_by_one(batch):\n    return [[r['input_ids'][0] + (r['rid'] == 'r2')] for r in batch]")

    assert "<Replay of 4 requests: 4 replayed>" in value(notebook, f"%graft replay '{dump}' -o same")
    assert "True" in value(notebook, "bool(same.summary['same_tokens'].all())")
    typed(notebook, f"%graft replay '{dump}' --target off_by_one --batch-size 2 --limit 3 -o other")
    assert "['r2', 'r0', 'r1']" in value(notebook, "other.summary['rid'].tolist()")

    assert notebook.run("%graft replay /nowhere.pkl").error_name == "DumpError"
    reply = notebook.run(f"%graft replay '{dump}' --baseline missing")
    assert reply.error_name == "RunError"
    assert "missing" in reply.error


@pytest.mark.ranks
@pytest.mark.parametrize("line", ["%graft", "%graft -h", "%graft --help", "%%graft -h\n1", "%%graft\n1"])
def test_graft_alone_lists_all_commands(bare: Kernel, line: str) -> None:
    printed = typed(bare, line)
    for subcommand in SUBCOMMANDS:
        assert f"%graft {subcommand} " in printed
    assert "%%graft transform" in printed


@pytest.mark.ranks
def test_the_tab_key_offers_what_fits(notebook: Kernel) -> None:
    typed(notebook, DEFINE)
    typed(notebook, "%graft run forward(torch.ones(4))")
    offers: list[tuple[str, set[str]]] = [
        ("%graft ", set(SUBCOMMANDS)),
        ("%graft st", {"stacks", "status"}),
        ("%graft transform --w", {"--where"}),
        ("%graft up --", {*subcommands.COMMANDS["up"].options} - {"-b", "-t", "-o", "-h"}),
        ("%graft up --start-method ", {"forkserver", "spawn"}),
        ("%graft filter --", {"--b2t", "--t2b", "--compare", "--keep", "--help"}),
        ("%graft log ta", {"target", "target[0]", "target[1]"}),
        ("%graft log -n 3 target[", {"target[0]", "target[1]"}),
        ("%graft plot hid", {"hidden"}),
        ("%graft plot --kind h", {"heatmap", "histogram", "history"}),
        ("%%graft b", {"baseline", "both", "baseline[0]"}),
        ("%%graft tr", {"transform"}),
        ("x = 1\n%graft sta", {"stacks", "status"}),
    ]
    for typed_so_far, offered in offers:
        assert set(notebook.complete(typed_so_far)) == offered, typed_so_far


@pytest.mark.ranks
def test_the_tab_key_offers_no_ranks_without_a_session(bare: Kernel) -> None:
    typed(bare, "if 'session' in globals():\n    session.close()")
    assert set(bare.complete("%%graft t")) == {"target", "transform"}


@pytest.mark.ranks
def test_completion_elsewhere_is_unchanged(notebook: Kernel) -> None:
    # Without jedi, which reads half the environment first.
    typed(notebook, "a_name_of_mine = 1\n%config IPCompleter.use_jedi = False")
    assert "a_name_of_mine" in notebook.complete("print(a_name_of_m")
