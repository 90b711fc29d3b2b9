"""The commands for a session of jobs, and the token with which jobs of other machines join."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import stat
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
from kit.job_scripts import end, start, variables
from kit.rows import row
from kit.support import wait_until

import graftlab as gl
from graftlab.__main__ import main
from graftlab.exchange.keys import new_token, read_token
from graftlab.jobs import status_query
from graftlab.jobs.handshake import StatusQuery
from graftlab.jobs.status_query import answer_status_query, format_stacks, format_status, query_status


def test_status_shows_a_session_that_waits_for_its_jobs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gl.listen(baseline=1, target=2, folder=tmp_path):
        capsys.readouterr()
        assert main(["status", str(tmp_path)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert lines[0].startswith("<Session 1+2: 0 ranks alive, 0 runs, 0 rows, plan 0")
        assert lines[2].split()[:2] == ["side", "rank"]
        assert [line.split()[:2] for line in lines[3:]] == [["baseline", "0"], ["target", "0"], ["target", "1"]]
        assert all("not joined yet" in line for line in lines[3:])
        assert main(["stacks", str(tmp_path)]) == 0
        assert capsys.readouterr().out.count("(no process)") == 3


def test_status_shows_taps_with_tags_and_leaves_out_empty_columns() -> None:
    rows = [row("hidden", own={"layer": layer}, rel_l2=0.1 / (layer + 1)) for layer in range(2)]
    status = pd.DataFrame([{"side": "target", "rank": 0, "awaits": "", "note": "alone"}])
    session: Any = SimpleNamespace(ranks=[SimpleNamespace(label="target[0]")], status=lambda: status, row_count=2)
    taps: Any = SimpleNamespace(look=lambda: rows, behind=0)
    lines = format_status(answer_status_query(session, taps, stacks=False)).splitlines()
    assert [line.split()[:2] for line in lines[-2:]] == [["hidden", "layer=0"], ["hidden", "layer=1"]]
    assert lines[2].split() == ["side", "rank", "note"]
    # Values that are not finite are the furthest apart, and a row without a pair of finite numbers is in no order.
    assert [tap.rel_l2 for tap in answer_status_query(session, taps, stacks=False).taps] == [0.1, 0.05]
    rows.append(row("equal", rel_l2=0.0))
    assert answer_status_query(session, taps, stacks=False).taps[-1].name == "equal"
    rows += [row(f"m{n}", rel_l2=0.2 + n, order=n) for n in range(20)]
    rows += [row("one nan", rel_l2=0.0, nonfinite_differ=1), row("lost", rel_l2=None, status="missing")]
    rows.insert(3, row("nan", rel_l2=math.nan))
    reply = answer_status_query(session, taps, stacks=False)
    assert [tap.name for tap in reply.taps] == ["one nan", *(f"m{n}" for n in range(19, 8, -1))]
    assert reply.taps[0].rel_l2 == math.inf


def test_watch_ends_with_the_session(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    session = gl.listen(folder=tmp_path)
    capsys.readouterr()
    codes: list[int] = []
    watching = threading.Thread(target=lambda: codes.append(main(["watch", str(tmp_path), "--every", "0.05"])))
    watching.start()
    shown = ""

    def looks() -> int:
        nonlocal shown
        shown += capsys.readouterr().out
        return shown.count("<Session 1+1")

    wait_until(lambda: looks() > 1, "two looks")
    session.close()
    watching.join(60)
    assert codes == [0]
    assert capsys.readouterr().out.endswith("the session has ended\n")


def test_status_of_a_folder_without_an_open_session_of_jobs_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["status", str(tmp_path)]) == 2
    assert "is not a run folder" in capsys.readouterr().err
    gl.listen(folder=tmp_path).close()
    for command in ("status", "watch", "stacks"):
        assert main([command, str(tmp_path)]) == 1
        err = capsys.readouterr().err
        assert "no session of jobs is open" in err
        assert "gl.load_run reads the rows of a session that has ended" in err
    assert query_status(tmp_path) is None


def test_the_token_command_writes_a_file_for_this_user_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "token"
    assert main(["token", str(path)]) == 0
    token = read_token(path)
    assert capsys.readouterr().out == ""
    assert main(["token", str(path)]) == 2
    assert "already exists; use that token, or remove the file first" in capsys.readouterr().err
    assert read_token(path) == token


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ("role=target", "baseline_world_size (GRAFTLAB_BASELINE_WORLD_SIZE) is not given"),
        ("rule=target", "'rule=target' is not a setting"),
        ("role=target baseline_world_size=1 target_world_size=1 run_dir=/tmp/x", "nowhere.py does not exist"),
    ],
)
def test_an_attach_command_that_cannot_run_prints_one_line(
    settings: str, said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # It writes its options into the environment.
    monkeypatch.setattr(os, "environ", {**os.environ})
    assert main(["attach", *(f"--set={each}" for each in settings.split()), "nowhere.py"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"graftlab attach: {said}")


@pytest.mark.parametrize("code", ["", "raise SystemExit(3)"])
def test_attach_warns_about_a_script_that_reaches_no_tap(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("argv", [*sys.argv]), ("path", [*sys.path])):
        monkeypatch.setattr(sys, name, value)
    # The environment's settings win.
    monkeypatch.setattr(os, "environ", {**os.environ, "GRAFTLAB_TIMEOUT": "7"})
    script = tmp_path / "script.py"
    script.write_text(f"import os\nassert os.environ['GRAFTLAB_TIMEOUT'] == '7'\n{code}")
    settings = ("role=target", "baseline_world_size=1", "target_world_size=1", f"run_dir={tmp_path}", "timeout=9")
    ends = pytest.raises(SystemExit) if code else contextlib.nullcontext()
    with pytest.warns(gl.GraftWarning, match=r"script.py ended before it reached a tap .* GRAFTLAB_WATCH=True"), ends:
        assert main(["attach", *(f"--set={each}" for each in settings), str(script)]) == 0
    assert gl.tap("x", 1) == 1


def test_attach_runs_a_module_of_the_folder_with_its_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("argv", [*sys.argv]), ("path", [each for each in sys.path if os.path.isabs(each)])):
        monkeypatch.setattr(sys, name, value)
    monkeypatch.setattr(os, "environ", {**os.environ})
    monkeypatch.chdir(tmp_path)
    (tmp_path / "module_of_a_job.py").write_text("import sys\nraise SystemExit([__name__, *sys.argv[1:]])")
    settings = ("role=target", "baseline_world_size=1", "target_world_size=1", f"run_dir={tmp_path}")
    with pytest.warns(gl.GraftWarning, match="module_of_a_job ended before"), pytest.raises(SystemExit) as ended:
        main(["attach", *(f"--set={each}" for each in settings), "-m", "module_of_a_job", "--fast", "7"])
    assert ended.value.code == ["__main__", "--fast", "7"]


@pytest.mark.ranks
def test_a_job_armed_by_the_environment_warns_once_if_it_reaches_no_tap(tmp_path: Path) -> None:
    code, out, err = end(start("taps_nothing.py", **variables("target", 1, 1, run_dir=tmp_path)))
    assert (code, out) == (0, "[[0, 1], [2, 3]] None\n")
    assert err.count("GraftWarning: taps_nothing.py ended before it reached a tap or gl.step(), so it never") == 1


# ---- what listens ---------------------------------------------------------------------------------------------------


def listening() -> set[str]:
    """The addresses at which this process listens on TCP, as the system has them."""
    sockets = {os.readlink(f"/proc/self/fd/{each}") for each in os.listdir("/proc/self/fd") if _is_open(each)}
    found = set()
    for kind in ("tcp", "tcp6"):
        for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                found.add(fields[1])
    return found


def _is_open(descriptor: str) -> bool:
    return os.path.lexists(f"/proc/self/fd/{descriptor}")


def test_nothing_listens_on_a_network_by_default(tmp_path: Path) -> None:
    before = listening()
    with gl.listen(folder=tmp_path / "one"):
        assert listening() == before
    with gl.listen(folder=tmp_path / "two", address="tcp://127.0.0.1:0") as session:
        (added,) = listening() - before
        assert "0100007F:" in added  # 127.0.0.1
        token = session.folder / ".rendezvous" / "token"
        assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert listening() == before


@pytest.mark.parametrize(
    "address", ["tcp://0.0.0.0:1", "tcp://[::]:1", "here", "/tmp/x", "tcp://203.0.113.1:29500", 29500]
)
def test_an_address_at_which_nothing_can_listen_is_refused(address: Any, tmp_path: Path) -> None:
    before = set(threading.enumerate())
    with pytest.raises(gl.LaunchError, match="address"):
        gl.listen(folder=tmp_path, address=address if address != "here" else "a b")
    assert set(threading.enumerate()) <= before
    # And the folder is free for another.
    gl.listen(folder=tmp_path).close()


def test_listening_at_a_taken_port_is_an_error(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        where = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(gl.LaunchError, match=f"port {taken.getsockname()[1]}"):
            gl.listen(folder=tmp_path, address=where)


@pytest.mark.ranks
@pytest.mark.timeout(600)
def test_a_job_with_a_different_token_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with gl.listen(folder=tmp_path, address="tcp://127.0.0.1:0") as session:
        said = capsys.readouterr().out
        address = said.partition("GRAFTLAB_ADDRESS=")[2].split()[0]
        assert (tmp_path / ".rendezvous" / "token").read_text().strip() in said
        # The connection itself needs no answer, so the time that passes here may be short.
        told = {"address": address, "timeout": 3, "token": new_token()}
        code, out, err = end(start("trusted_model.py", **variables("baseline", 1, 1, **told)))
        assert (code, out) == (0, "done False\n")
        # At once, and again where it gives up.
        assert err.count("a different token") == 2
        assert err.index("This job keeps trying") < err.index("no session with this token answered")
        assert told["token"] not in err
        assert session.status()["state"].tolist() == ["not joined yet"] * 2


def test_a_run_folder_whose_jobs_have_no_rendezvous_has_no_status(tmp_path: Path) -> None:
    for text, said in (("{", "cannot be read"), ("[" * 100_000, "cannot be read")):
        (tmp_path / "session.json").write_text(text)
        with pytest.raises(gl.SessionError, match=said):
            query_status(tmp_path)
    for described in ({}, [], {"rendezvous": None}, {"rendezvous": 5}, {"rendezvous": str(tmp_path / "gone")}):
        (tmp_path / "session.json").write_text(json.dumps(described))
        assert query_status(tmp_path) is None


@pytest.mark.parametrize("stacks", [True, False])
def test_stacks_are_asked_for_only_where_they_are_shown(
    stacks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    rendezvous: Any = contextlib.nullcontext(SimpleNamespace(connect=lambda limit: ours))
    asked: list[object] = []
    monkeypatch.setattr(status_query, "_rendezvous_of", lambda folder: folder)
    monkeypatch.setattr(status_query, "Rendezvous", lambda folder: rendezvous)
    monkeypatch.setattr(status_query, "send_handshake", lambda connection, message: asked.append(message))
    monkeypatch.setattr(status_query, "receive_handshake", lambda connection: None)
    with theirs:
        assert query_status(tmp_path, stacks=stacks) is None
    assert asked == [StatusQuery(stacks)]
    assert ours.fileno() == -1


def test_a_status_lists_the_farthest_taps_first_and_leaves_blank_what_is_unknown() -> None:
    lines = [{"rank": "baseline[0]", "state": None, "step": pd.NA}, {"rank": "t", "state": "3", "step": 4}]
    columns = pd.DataFrame(lines, dtype=object)
    ranks = [SimpleNamespace(label=label) for label in ("baseline[0]", "target[0]")]
    session: Any = SimpleNamespace(
        ranks=ranks, status=lambda: columns, stacks=lambda: {"target[0]": "stack"}, row_count=9
    )
    rows = [row(f"t{n}", rel_l2=float(n)) for n in range(20)]
    taps: Any = SimpleNamespace(look=lambda: [*rows, row("unmeasured", rel_l2=None)], behind=2)
    reply = answer_status_query(session, taps, stacks=True)
    assert [each.columns for each in reply.ranks] == [
        {"rank": "baseline[0]", "state": "", "step": ""},
        {"rank": "t", "state": "3", "step": "4"},
    ]
    assert [each.stacks for each in reply.ranks] == ["", "stack"]
    assert [each.name for each in reply.taps] == [f"t{n}" for n in range(19, 7, -1)]
    assert format_stacks(reply) == "--- baseline[0]\n(no process)\n--- target[0]\nstack"
    assert "(2 rows not read yet)" in format_status(reply)
    assert answer_status_query(session, taps, stacks=False).ranks[1].stacks == ""
