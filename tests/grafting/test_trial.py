"""A transform's draft is tried on kept tensors in a separate process, so it cannot affect ranks or the plan."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from kit import warm
from kit.kernels import kernel
from kit.processes import family, still_there, watch
from kit.support import own_value, reset, run_cell, wait_for_file, wait_until

import graftlab as gl
from graftlab.grafting.trial import PRINTED_LIMIT, Trial

RANKS = 1, 2

pytestmark = pytest.mark.ranks

# Only bounds how long a draft that ought to end at once may take on a busy machine.
PLENTY = 60.0


@pytest.fixture
def session(launched: gl.Session) -> gl.Session:
    """Both target ranks keep a pair of `x`: 10 from the baseline, and their own 20 and 21."""
    reset(launched).edit(keep="name == 'x'")
    launched.run(tap_x, tap_x)
    return launched


def tap_x() -> list[float]:
    return gl.tap("x", torch.full((2, 3), own_value()), layer=4).tolist()


def source(*lines: str) -> str:
    """A transform with this body, which begins in line 2."""
    return "\n".join(["def transform(graft_input):", *(f"    {line}" for line in lines)])


def tried(session: gl.Session, *lines: str, **options: Any) -> Trial:
    return session.try_transform(source(*lines), "x", **{"limit": PLENTY, **options})


def assert_unharmed(session: gl.Session, before: list[int | None]) -> None:
    assert [rank.pid for rank in session.ranks] == before
    assert all(rank.alive for rank in session.ranks)
    assert session.run(tap_x, tap_x).frame["status"].tolist() == ["compared"] * 2


# ---- what a trial tells ---------------------------------------------------------------------------------------------


def test_good_draft_reports_shapes_and_the_difference_before_and_after(session: gl.Session) -> None:
    trial = tried(
        session, "print('seen', graft_input.tags['layer'])", "return 2 * graft_input.received_list[0]", rank=0
    )
    assert trial.ok
    assert trial.error_line is None
    assert (trial.received, trial.target, trial.result) == (["float32[2, 3]"], "float32[2, 3]", "float32[2, 3]")
    assert trial.tags["name"] == "x"
    assert (trial.tags["side"], trial.tags["rank"], trial.tags["layer"]) == ("target", 0, 4)
    assert trial.before is not None
    assert trial.after is not None
    assert (trial.before.max_abs, trial.after.max_abs) == (10.0, 0.0)
    assert (trial.before.mean_baseline, trial.after.mean_baseline) == (10.0, 20.0)
    assert trial.before.mean_target == trial.after.mean_target == 20.0
    assert trial.seconds is not None
    assert trial.seconds >= 0
    assert trial.printed == "seen 4\n"


def test_the_rank_and_the_tags_choose_the_pair(session: gl.Session) -> None:
    returns_received = "return graft_input.received_list[0]"
    by_rank = [tried(session, returns_received, rank=rank).before for rank in (0, 1)]
    assert [stats.mean_target for stats in by_rank if stats] == [20.0, 21.0]
    step = session.kept()[-1]["step"]
    assert tried(session, returns_received, step=step).tags["step"] == step
    with pytest.raises(gl.SessionError, match=r"no pair of tensors is kept for 'x', layer=5; kept are \['x'\]"):
        tried(session, returns_received, layer=5)


def test_a_draft_that_goes_the_other_way_is_measured_in_the_same_order(session: gl.Session) -> None:
    session.edit(t2b="name == 'back'", keep="name == 'back'")
    session.run(lambda: gl.tap("back", torch.full((2,), 1.0)), lambda: gl.tap("back", torch.full((2,), own_value())))
    trial = session.try_transform(source("return graft_input.received_list[1]"), "back", limit=PLENTY)
    assert trial.received == ["float32[2]"] * 2
    assert trial.after is not None
    assert (trial.after.mean_baseline, trial.after.mean_target) == (1.0, 21.0)
    assert trial.tags["side"] == "baseline"


def test_different_dtype_is_converted_and_noted_in_the_trial(session: gl.Session) -> None:
    trial = tried(session, "return graft_input.received_list[0].double()")
    assert (trial.ok, trial.result, trial.cast) == (True, "float64[2, 3]", "float64 -> float32")


def test_without_a_name_the_draft_is_only_loaded(session: gl.Session) -> None:
    trial = session.try_transform(source("raise ValueError('not called')"), limit=PLENTY)
    assert (trial.ok, trial.received, trial.after, trial.seconds) == (True, [], None, None)
    assert not session.try_transform("x = 1", limit=PLENTY).ok


def test_functions_of_the_notebook_and_dotted_paths_are_drafts_too(
    session: gl.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = run_cell(
        """
        import torch
        factor = 2

        def doubled(graft_input):
            return factor * graft_input.received_list[0]

        def fails(graft_input):
            return graft_input.no_such_field
        """
    )
    (tmp_path / "found_by_path.py").write_text(
        "def halved(graft_input):\n    return graft_input.received_list[0] / 2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for draft, mean in ((cell["doubled"], 20.0), ("found_by_path.halved", 5.0)):
        trial = session.try_transform(draft, "x", limit=PLENTY)
        assert trial.ok, trial.error
        assert trial.after is not None
        assert trial.after.mean_baseline == mean
    assert "found_by_path" not in sys.modules  # not even imported here
    failed = session.try_transform(cell["fails"], "x", limit=PLENTY)
    assert failed.error is not None
    assert "return graft_input.no_such_field" in failed.error
    nowhere = session.try_transform("no_such_module.f", "x", limit=PLENTY)
    assert "module 'no_such_module' cannot be imported" in str(nowhere.error)


def test_trial_notes_where_the_draft_would_not_be_applied(session: gl.Session) -> None:
    # The plan of these tests grafts nothing.
    doubles = source("return 2 * graft_input.received_list[0]")
    trial = session.try_transform(doubles, "x", limit=PLENTY)
    assert trial.ok
    assert "the plan does not graft this tap" in str(trial.note)
    trial = session.try_transform(("layer == 5", doubles), "x", limit=PLENTY)
    assert trial.ok
    assert "its filter does not match this tap" in str(trial.note)
    assert trial.after is not None
    trial = session.try_transform(("layer == 4", doubles), "x", limit=PLENTY)
    assert (trial.ok, trial.note) == (True, None)
    session.edit(b2t="layer == 4")
    assert session.try_transform(doubles, "x", limit=PLENTY).note is None


def test_matching_draft_of_several_is_tried(session: gl.Session) -> None:
    doubles = source("return 2 * graft_input.received_list[0]")
    several = [("layer == 5", source("return 1 / 0")), ("layer == 4", doubles)]
    trial = session.try_transform(several, "x", limit=PLENTY)
    assert trial.after is not None
    assert (trial.after.mean_baseline, trial.note) == (20.0, None)
    trial = session.try_transform(several[:1] * 2, "x", limit=PLENTY)
    assert "none of these transforms matches this tap" in str(trial.error)
    assert not trial.ok
    # Without a tap each of them is loaded.
    assert session.try_transform(several, limit=PLENTY).ok
    assert not session.try_transform([*several, "x = 1"], limit=PLENTY).ok
    with pytest.raises(gl.FilterError, match="layer =="):
        session.try_transform(("layer ==", doubles), "x")
    with pytest.raises(gl.TransformError, match="the default transform is not tried"):
        session.try_transform(None, "x")


# ---- what is wrong with a draft -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lines", "line", "message"),
    [
        (("x = 1", "return x +"), 3, "does not compile, line 3: invalid syntax"),
        (("x = 1", "", "return graft_input.received_list[7]"), 4, "IndexError: list index out of range"),
        (("def inner():", "    return 1 / 0", "return inner()"), 3, "ZeroDivisionError"),
        (("return torch.zeros(2)",), 2, r"returned shape \[2\]"),
        (("return 3",), 2, "returned int; it must return a tensor of shape"),
        (("graft_input.target.add_(1)", "return None if 0 else 3"), 3, "returned int; it must return a tensor"),
    ],
    ids=["syntax", "runtime", "inner function", "shape", "no tensor", "written and no tensor"],
)
def test_error_is_reported_with_its_line(
    lines: tuple[str, ...], line: int | None, message: str, session: gl.Session
) -> None:
    trial = tried(session, *lines)
    assert not trial.ok
    assert trial.error_line == line
    assert trial.error is not None
    assert re.search(message, trial.error), trial.error
    assert trial.after is None
    assert trial.target == "float32[2, 3]"  # its input is reported all the same


def test_error_while_loading_the_draft_is_reported_with_its_line(session: gl.Session) -> None:
    trial = session.try_transform("import torch\nnumber = 1 / 0\n" + source("return 1"), "x", limit=PLENTY)
    assert trial.error_line == 2
    assert "failed while it was loaded" in str(trial.error)
    assert "number = 1 / 0" in str(trial.error)


def test_a_loop_ends_at_the_limit_and_the_ranks_are_unharmed(session: gl.Session) -> None:
    pids = [rank.pid for rank in session.ranks]
    looping = tried(session, "while True:", "    pass", limit=0.3)
    assert looping.error == "the draft did not end within 0.3 s and was stopped; does it loop forever?"
    stuck = session.try_transform("import threading\nthreading.Event().wait()\n" + source("return 1"), limit=0.3)
    assert stuck.error == looping.error
    assert_unharmed(session, pids)


@pytest.mark.parametrize(
    ("line", "message", "error_line"),
    [
        ("exit()", r"the draft called exit\(None\)", 2),
        ("raise SystemExit(3)", r"the draft called exit\(3\)", 2),
        ("import os; os._exit(7)", r"the draft ended its process \(exit code 7\)", None),
        ("import os; os.kill(os.getpid(), 9)", r"the draft ended its process \(exit code -9\)", None),
        ("raise KeyboardInterrupt", r"the draft ended its process \(exit code 1\)", None),
    ],
)
def test_a_draft_that_ends_its_process_ends_nothing_else(
    line: str, message: str, error_line: int | None, session: gl.Session
) -> None:
    pids = [rank.pid for rank in session.ranks]
    trial = tried(session, line)
    assert re.search(message, str(trial.error)), trial.error
    assert trial.error_line == error_line
    assert_unharmed(session, pids)


def test_a_megabyte_that_is_printed_is_cut_and_counted(session: gl.Session) -> None:
    trial = tried(
        session, "import sys", "print('é' * 2**20)", "sys.stderr.write('end')", "return graft_input.received_list[0]"
    )
    assert trial.ok, trial.error
    assert trial.printed == "é" * PRINTED_LIMIT + f"\n... and {2**20 + 1 + 3 - PRINTED_LIMIT} more characters"


def test_an_error_of_many_megabytes_arrives_cut(session: gl.Session) -> None:
    trial = tried(session, "raise ValueError('begin' + 'x' * 2**23 + 'end')")
    assert trial.error is not None
    assert "raise ValueError('begin' + 'x' * 2**23 + 'end')" in trial.error
    assert trial.error.endswith("xend")
    assert len(trial.error) < 2 * PRINTED_LIMIT
    assert trial.error_line == 2


def test_thread_left_by_a_draft_does_not_delay_the_trial(session: gl.Session) -> None:
    trial = tried(
        session,
        "import threading",
        "threading.Thread(target=threading.Event().wait).start()",
        "return graft_input.received_list[0]",
    )
    assert trial.ok, trial.error


# ---- what a trial leaves alone --------------------------------------------------------------------------------------


def test_trial_runs_neither_in_a_rank_nor_in_the_notebook(session: gl.Session) -> None:
    trial = tried(
        session, "import os, torch", "print(os.getpid())", "torch.ones = None", "return graft_input.received_list[0]"
    )
    assert int(trial.printed) not in {os.getpid(), *(rank.pid for rank in session.ranks)}
    assert session.run(target=lambda: torch.ones(1).item()).target == [1.0, 1.0]


def test_trial_changes_neither_plan_nor_kept_pairs_nor_rows(session: gl.Session) -> None:
    before = session.plan, session.plans, session.kept(), session.row_count
    assert tried(session, "return graft_input.received_list[0]").ok
    assert tried(session, "graft_input.target.zero_()", "return graft_input.received_list[0]").ok
    assert (session.plan, session.plans, session.kept(), session.row_count) == before
    assert session.tensors("x", rank=1)[1].tolist() == [[21.0] * 3] * 2


def test_draft_can_be_tried_during_a_run(session: gl.Session, tmp_path: Path) -> None:
    def holds(folder: str) -> float:
        wait_for_file(f"{folder}/release")
        return own_value()

    run = session.start(target=holds, args=(str(tmp_path),))
    assert tried(session, "return graft_input.received_list[0]").ok
    assert not run.done
    (tmp_path / "release").touch()
    assert run.wait().target == [20.0, 21.0]


def test_without_a_kept_pair_the_error_explains_how_to_keep_one() -> None:
    with gl.launch(1, 1) as session:
        session.run(tap_x, tap_x)
        assert session.kept() == []
        with pytest.raises(gl.SessionError, match=r"kept for 'x', nor for any other tap.*session.edit\(keep=\.\.\.\)"):
            tried(session, "return 1")
    with pytest.raises(gl.SessionClosedError):
        tried(session, "return 1")
    with pytest.raises(gl.SessionClosedError):
        session.kept()


def test_a_function_that_cannot_be_sent_is_refused(session: gl.Session) -> None:
    lock = threading.Lock()
    with pytest.raises(gl.ShippingError, match="lock"):
        session.try_transform(lambda graft_input: lock, "x")


# ---- what is kept to try on -----------------------------------------------------------------------------------------


def test_where_the_transform_in_force_failed_the_next_one_can_be_tried(session: gl.Session) -> None:
    def wide_and_tall() -> None:
        me = gl.here()
        assert me is not None
        gl.tap("w", torch.full((4, 2) if me.side == "baseline" else (2, 5), own_value()))

    session.edit(b2t="name == 'w'", keep="name == 'w'")
    assert set(session.run(wide_and_tall, wide_and_tall).frame["status"]) == {"failed"}
    assert "w" not in [tags["name"] for tags in session.kept()]
    assert [tags["rank"] for tags in session.kept(failed=True) if tags["name"] == "w"] == [0, 1]
    with pytest.raises(gl.SessionError, match=r"the pair of w at step \d+ was not kept: its transform failed"):
        session.tensors("w")

    fits = source("return graft_input.received_list[0].mean() + torch.zeros(2, 5)")
    trial = session.try_transform(fits, "w", rank=1, limit=PLENTY)
    assert trial.ok, trial.error
    assert (trial.received, trial.target, trial.before) == (["float32[4, 2]"], "float32[2, 5]", None)
    assert trial.after is not None
    assert (trial.after.mean_baseline, trial.after.mean_target) == (10.0, 21.0)
    session.edit(transform=fits)
    assert set(session.run(wide_and_tall, wide_and_tall).frame["status"]) == {"grafted"}
    assert session.tensors("w")[0].tolist() == [[10.0] * 5] * 2


# ---- no process stays -----------------------------------------------------------------------------------------------


def test_a_trial_leaves_no_process(session: gl.Session) -> None:
    before = family(os.getpid())
    for line in ("while True: pass", "return graft_input.received_list[0]", "import os; os._exit(1)"):
        tried(session, line, limit=0.3)
    wait_until(lambda: family(os.getpid()) <= before, "the end of every trial")


TRIES = """
import threading
import graftlab as gl
session = gl.launch(1, 1)
trying = threading.Thread(target=session.try_transform, args=({draft!r},), kwargs=dict(limit=600.0), daemon=True)
trying.start()
"""
# The second never lets go of the interpreter.
HANGS = ("while True: pass", "sum(range(10**15))")


@pytest.mark.parametrize("hang", HANGS)
def test_a_killed_kernel_leaves_no_trial_process(hang: str, tmp_path: Path) -> None:
    told = tmp_path / "pid"
    draft = f"import os, pathlib\npathlib.Path({str(told)!r}).write_text(str(os.getpid()))\n{hang}"
    with kernel() as notebook:
        reply = notebook.run(TRIES.format(draft=draft))
        assert not reply.error, reply.error
        wait_until(lambda: told.exists() and told.read_text(), "the trial's process")
        everyone = watch(family(notebook.pid))
        assert int(told.read_text()) in everyone
        os.kill(notebook.pid, signal.SIGKILL)
        assert still_there(everyone) == []


WITHOUT_A_KERNEL = """
import torch
from graftlab.grafting.kept import KeptPair
from graftlab.grafting.trial import try_draft
from graftlab.transforms import GraftTransformInput, TransformSpec

given = GraftTransformInput({"name": "x"}, [torch.ones(2)], [None], target=torch.zeros(2))
draft = "def transform(graft_input):\\n    print('mine')\\n    return graft_input.received_list[0]"
trial = try_draft(TransformSpec.draft(draft), KeptPair(given, torch.ones(2)), "cpu")
print(repr(trial.printed), trial.ok)
"""


def test_graftlabs_own_messages_are_not_in_the_drafts_output() -> None:
    done = warm.run("-c", WITHOUT_A_KERNEL, env={**os.environ, "GRAFTLAB_KERNEL": "fallback"})
    assert done.stdout == "'mine\\n' True\n"
    assert "tensors are measured by torch operations" in done.stderr
