"""Replay: recorded requests reach both sides, and the summary tells which of them diverge."""

from __future__ import annotations

import math
import pickle
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from kit.deadline import DEADLINE
from kit.support import wait_until

import graftlab as gl
from graftlab.control.replay import Replay
from graftlab.control.run import Run
from graftlab.errors import DumpError, WaitInterrupted

pytestmark = pytest.mark.ranks


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> Iterator[gl.Session]:
    with gl.launch(1, 1, timeout=20, folder=tmp_path_factory.mktemp("replay")) as open_session:
        yield open_session


def recorded(rid: str, *prompt: int, output: list[int] | None = None) -> tuple[Any, ...]:
    response = None if output is None else {"output_ids": output, "meta_info": {}}
    return ({"rid": rid, "input_ids": list(prompt)}, response, 1.0, 2.0)


def write(path: Path, requests: list[Any], **more: Any) -> Path:
    content = {"server_args": None, "requests": requests, "launch_command": "", "dropped": [], **more}
    path.write_bytes(pickle.dumps(content))
    return path


def good(requests: list[Any]) -> list[Any]:
    """Each request's tokens, summed up; nothing is wrong here."""
    for request in requests:
        x = gl.tap("hidden", torch.tensor(request["input_ids"], dtype=torch.float32))
        gl.tap("logits", x * 2)
    return [{"output_ids": [sum(request["input_ids"])]} for request in requests]


def wrong_above_ten(requests: list[Any]) -> list[Any]:
    """As `good`, but for requests with tokens above 10: slightly wrong from the second tap on, and above 20 visibly."""
    outputs = []
    for request in requests:
        x = gl.tap("hidden", torch.tensor(request["input_ids"], dtype=torch.float32))
        largest = max(request["input_ids"])
        gl.tap("logits", x * (2 + (largest > 10) * largest / 100))
        outputs.append({"output_ids": [sum(request["input_ids"]) + (largest > 20)]})
    return outputs


def by_rid(replay: Replay) -> Any:
    return replay.summary.set_index("rid")


def good_logits(requests: list[Any]) -> list[Any]:
    """As `good`, with logits beside the tokens."""
    xs = [gl.tap("hidden", torch.tensor(each["input_ids"], dtype=torch.float32)) for each in requests]
    return [{"output_ids": [int(x.sum())], "logits": gl.tap("logits", x * 2)} for x in xs]


def nan_above_ten(requests: list[Any]) -> list[Any]:
    """As `good_logits`, but the logit of a token above 10 is a NaN."""
    xs = [gl.tap("hidden", torch.tensor(each["input_ids"], dtype=torch.float32)) for each in requests]
    return [
        {"output_ids": [int(x.sum())], "logits": gl.tap("logits", torch.where(x > 10, torch.nan, x * 2))} for x in xs
    ]


@pytest.mark.parametrize("baseline", [good, good_logits], ids=["logits are tapped", "logits are returned"])
def test_a_nan_is_the_worst_difference_and_not_the_least(baseline: Any, session: gl.Session, tmp_path: Path) -> None:
    path = write(tmp_path / "dump.pkl", [recorded("fine", 1, 2), recorded("nan", 1, 11), recorded("fine too", 5)])
    replay = session.replay(path, baseline, nan_above_ten)
    assert replay.summary["rid"].tolist() == ["nan", "fine", "fine too"]
    assert replay.summary["first_divergent"].fillna("").tolist() == ["logits", "", ""]
    assert replay.summary["first_rel_l2"].tolist()[0] == math.inf
    assert replay.summary["final_difference"].tolist() == [math.inf, 0.0, 0.0]
    assert replay.summary["same_tokens"].tolist() == [True] * 3


def test_a_replay_has_one_row_per_request_the_worst_first(session: gl.Session, tmp_path: Path) -> None:
    path = write(
        tmp_path / "dump.pkl",
        [
            recorded("fine", 1, 2, output=[3]),
            recorded("visible", 1, 30, output=[31]),
            recorded("hidden", 1, 11, output=[12]),
            recorded("also fine", 5, output=[99]),
        ],
    )
    replay = session.replay(path, good, wrong_above_ten)

    assert replay.summary["rid"].tolist() == ["visible", "hidden", "fine", "also fine"]
    assert replay.summary["same_tokens"].tolist() == [False, True, True, True]
    assert replay.summary["first_divergent"].fillna("").tolist() == ["logits", "logits", "", ""]
    assert replay.summary["status"].unique().tolist() == ["replayed"]
    table = by_rid(replay)
    assert math.isclose(table.loc["visible", "final_difference"], 0.15, rel_tol=1e-5)
    assert table.loc["fine", "final_difference"] == 0
    assert table["baseline_as_recorded"].to_dict() == {
        "visible": True,
        "hidden": True,
        "fine": True,
        "also fine": False,
    }
    assert table["target_as_recorded"].to_dict() == {"visible": False, "hidden": True, "fine": True, "also fine": False}


def test_rows_carry_the_request_id_and_a_step_is_a_batch(session: gl.Session, tmp_path: Path) -> None:
    path = write(tmp_path / "dump.pkl", [recorded(f"r{i}", i, i + 1) for i in range(5)])
    frame = session.replay(path, good, good).frame
    assert frame["rid"].tolist() == [f"r{i}" for i in range(5) for _ in range(2)]
    assert frame["step"].diff().dropna().tolist() == [0, 1] * 4 + [0]
    assert (frame["status"] == "compared").all()

    replay = session.replay(path, good, good, batch_size=2, limit=3)
    assert replay.frame["rid"].unique().tolist() == ["r0,r1", "r2"]
    assert replay.summary["step"].nunique() == 2
    assert sorted(replay.summary["rid"]) == ["r0", "r1", "r2"]


def a_step_a_token(requests: list[Any]) -> list[Any]:
    """As `wrong_above_ten`, where each token is a step, as in an engine's loop; the target ends fewer above 50."""
    me = gl.here()
    assert me is not None
    for request in requests:
        for token in request["input_ids"]:
            wrong = me.side == "target" and token > 10
            gl.tap("logits", torch.tensor([1.0, float(token)]) + wrong)
            if not (wrong and token > 50):
                gl.step()
    return [{"output_ids": [sum(request["input_ids"])]} for request in requests]


def test_rows_belong_to_their_batch_where_the_function_ends_steps_itself(session: gl.Session, tmp_path: Path) -> None:
    path = write(tmp_path / "dump.pkl", [recorded("a", 1, 2, 3), recorded("b", 4, 11, 5), recorded("c", 11)])
    replay = session.replay(path, a_step_a_token, a_step_a_token)
    table = by_rid(replay)
    assert table["first_divergent"].fillna("").to_dict() == {"a": "", "b": "logits", "c": "logits"}
    assert (table["final_difference"] > 0).to_dict() == {"a": False, "b": False, "c": True}
    first = replay.run.first_step
    assert table["step"].to_dict() == {"a": first, "b": first + 4, "c": first + 8}
    assert table["error"].isna().all()


def test_a_batch_after_another_number_of_steps_is_not_compared(session: gl.Session, tmp_path: Path) -> None:
    path = write(tmp_path / "dump.pkl", [recorded("a", 51), recorded("b", 1)])
    table = by_rid(session.replay(path, a_step_a_token, a_step_a_token))
    assert table.loc["a", "first_divergent"] == "logits"
    assert table["error"].isna().to_dict() == {"a": True, "b": False}
    assert math.isnan(table.loc["b", "final_difference"])
    assert "after another number of steps this batch begins in step" in table.loc["b", "error"]


def test_returned_numbers_are_compared(session: gl.Session, tmp_path: Path) -> None:
    def logits(requests: list[Any]) -> list[torch.Tensor]:
        me = gl.here()
        assert me is not None
        return [torch.ones(4) * (1.5 if me.side == "target" else 1.0) for _ in requests]

    replay = session.replay(write(tmp_path / "dump.pkl", [recorded("a", 1)]), logits, logits)
    assert replay.summary.loc[0, "final_difference"] == 0.5
    assert replay.summary.loc[0, "same_tokens"] is None


def test_only_the_request_at_which_a_function_raises_fails(session: gl.Session, tmp_path: Path) -> None:
    def picky(requests: list[Any]) -> list[Any]:
        if requests[0]["input_ids"] == [2]:
            raise ValueError("no twos, please")
        return good(requests)

    path = write(tmp_path / "dump.pkl", [recorded(f"r{i}", i) for i in range(4)])
    replay = session.replay(path, good, picky)
    assert replay.summary["rid"].tolist()[0] == "r2"
    assert replay.summary["status"].tolist() == ["failed", "replayed", "replayed", "replayed"]
    assert replay.summary.loc[0, "error"].startswith("target: ValueError: no twos, please\nTraceback")
    assert 'raise ValueError("no twos, please")' in replay.summary.loc[0, "error"]


def test_too_few_outputs_are_reported(session: gl.Session, tmp_path: Path) -> None:
    path = write(tmp_path / "dump.pkl", [recorded("a", 1), recorded("b", 2)])
    replay = session.replay(path, good, lambda requests: good(requests)[:1], batch_size=2)
    assert replay.summary["status"].tolist() == ["failed", "failed"]
    assert replay.summary["error"].str.contains("returned 1 output for 2 requests").all()


def test_damaged_requests_are_reported_and_skipped(
    session: gl.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lost = {"where": "requests[1].request['input_ids']", "reason": "TypeError: cannot pickle 'generator' object"}
    harmless = {"where": "requests[3].response['meta_info']['lock']", "reason": "TypeError: cannot pickle a lock"}
    path = write(
        tmp_path / "dump.pkl",
        [recorded("fine", 1), recorded("lost", 2), "not a request at all", recorded("also fine", 3)],
        dropped=[lost, harmless],
    )
    replay = session.replay(path, good, good)
    assert replay.summary["rid"].tolist() == ["fine", "also fine", "lost", "#2"]
    assert replay.summary["status"].tolist() == ["replayed", "replayed", "skipped", "skipped"]
    assert [each.index for each in replay.skipped] == [1, 2]
    assert "cannot pickle 'generator' object" in replay.skipped[0].reason
    assert "a request has named fields, and this is a str" in replay.skipped[1].reason
    assert "request 1 (lost) is skipped" in caplog.text
    assert "2 replayed, 2 skipped" in repr(replay)


def test_complete_requests_of_a_truncated_file_are_replayed(
    session: gl.Session, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = write(tmp_path / "dump.pkl", [recorded(f"r{i}", i, *range(50)) for i in range(20)])
    path.write_bytes(path.read_bytes()[:-600])
    replay = session.replay(path, good, good)
    assert 0 < len(replay.summary) < 20
    assert "whole requests before it" in caplog.text


def test_a_folder_is_replayed_file_by_file(session: gl.Session, tmp_path: Path) -> None:
    write(tmp_path / "2026-11-21_04.pkl", [recorded("second", 2)])
    write(tmp_path / "2026-11-21_03.pkl", [recorded("first", 1), "damaged"])
    write(tmp_path / ".half.pkl.tmp", [recorded("never", 3)])
    replay = session.replay(tmp_path, good, good)
    assert replay.frame["rid"].unique().tolist() == ["first", "second"]
    assert replay.summary[["rid", "index"]].values.tolist() == [["first", 0], ["second", 2], ["#1", 1]]
    (tmp_path / "none").mkdir()
    with pytest.raises(DumpError, match="there are no recorded requests in the folder"):
        session.replay(tmp_path / "none", good, good)


def test_functions_of_the_ranks_own_cells_are_found_by_name(session: gl.Session, tmp_path: Path) -> None:
    session.execute("def generate(requests):\n    return [[len(request['input_ids'])] for request in requests]")
    path = write(tmp_path / "dump.pkl", [recorded("a", 1, 2, 3, output=[3])])
    replay = session.replay(path, "generate", "generate")
    assert replay.summary.loc[0, "same_tokens"]
    assert replay.summary.loc[0, "target_as_recorded"]


def test_a_replay_that_is_stopped_interrupts_its_code_and_keeps_its_rows(
    session: gl.Session, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hangs_at_the_second(requests: list[Any]) -> list[Any]:
        gl.tap("x", torch.ones(2))
        while requests[0]["rid"] == "b":
            time.sleep(0.01)
        return [{"output_ids": [1]}]

    def stop(run: Run, *_: object, **__: object) -> None:
        run.wait_steps(1)
        wait_until(lambda: len(run.frame) > 1, "the row of the second request")
        raise KeyboardInterrupt

    path = write(tmp_path / "dump.pkl", [recorded("a", 1), recorded("b", 2)])
    with monkeypatch.context() as patch:
        patch.setattr(Run, "wait", stop)
        with pytest.raises(WaitInterrupted, match=r"stopped after 1 of 2 batches, and its code .* has the rows until"):
            session.replay(path, hangs_at_the_second, hangs_at_the_second)
    assert session.runs[-1].wait_steps(10**9, timeout=DEADLINE).done
    assert session.runs[-1].frame["rid"].tolist() == ["a", "b"]
