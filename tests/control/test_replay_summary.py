"""The summary of a replay, from what both sides returned and from the rows of the run."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from kit.in_process import a_row
from kit.refusals import exactly

from graftlab.control.replay import Replay, SkippedRequest, _with_skipped, replay
from graftlab.errors import DumpError, RequestError
from graftlab.requests.records import RecordedRequest
from graftlab.rows.schema import Row
from graftlab.rows.store import to_frame

FIRST_STEP = 10
X = torch.ones(4)


def recorded(rid: str, *prompt: int, output: list[int] | None = None) -> tuple[Any, ...]:
    response = None if output is None else {"output_ids": output, "meta_info": {}}
    return ({"rid": rid, "input_ids": list(prompt)}, response, 1.0, 2.0)


def write(path: Path, requests: list[Any]) -> Path:
    path.write_bytes(pickle.dumps({"server_args": None, "requests": requests, "launch_command": "", "dropped": []}))
    return path


class Session:
    """Runs both functions here, one after the other, and has the rows that it is given."""

    def __init__(self, rows: Sequence[Row] = ()) -> None:
        self.rows = rows

    def start(self, baseline: Callable[..., Any], target: Callable[..., Any], args: Any) -> Any:
        run = SimpleNamespace(done=True, failing={}, steps=0, first_step=FIRST_STEP, frame=to_frame(list(self.rows)))
        run.baseline, run.target = [baseline(*args)], [target(*args)]
        run.where = str
        run.wait = lambda bar: None
        return run


def summary_of(
    path: Path, requests: list[Any], ours: Callable[..., Any], theirs: Callable[..., Any], *rows: Row, **more: Any
) -> pd.DataFrame:
    session: Any = Session(rows)
    return replay(session, write(path / "dump.pkl", requests), ours, theirs, **more).summary


def each(answer: Callable[[list[int]], Any]) -> Callable[[list[Any]], list[Any]]:
    """A function that answers each request by its tokens."""
    return lambda requests: [answer(request["input_ids"]) for request in requests]


def tap(step: int, name: str, order: int, rel_l2: float, **tags: Any) -> Row:
    tags = {"name": name, "rid": "r", **tags}
    return a_row(step=FIRST_STEP + step, name=name, order=order, rel_l2=rel_l2, nonfinite_differ=0, tags=tags)


def test_a_request_has_the_first_and_the_last_tap_of_its_batch(tmp_path: Path) -> None:
    rows = (
        *(tap(0, "hidden", 0, 1e-7), tap(0, "logits", 1, 1e-7)),
        *(tap(1, "hidden", 2, 0.1, layer=3), tap(1, "hidden", 3, 0.3, layer=4), tap(1, "logits", 4, 0.2)),
    )
    requests = [recorded(f"r{n}", n) for n in range(3)]
    found = summary_of(tmp_path, requests, each(sum), each(sum), *rows, batch_size=2).set_index("rid")
    assert found["step"].to_dict() == {"r0": 10, "r1": 10, "r2": 11}
    assert found["first_divergent"].fillna("").to_dict() == {"r0": "", "r1": "", "r2": "hidden (layer=3)"}
    assert found.loc["r2", "first_rel_l2"] == 0.1
    assert found["final_difference"].to_dict() == {"r0": 1e-7, "r1": 1e-7, "r2": 0.2}
    coarse = summary_of(tmp_path, requests, each(sum), each(sum), *rows, batch_size=2, noise_floor=0.2)
    assert coarse.set_index("rid").loc["r2", "first_divergent"] == "hidden (layer=4)"


def test_rounding_in_16_bits_is_not_divergent(tmp_path: Path) -> None:
    rows = [
        a_row(
            step=FIRST_STEP + n, name="h", dtype=dtype, rel_l2=4e-3, nonfinite_differ=0, tags={"name": "h", "rid": rid}
        )
        for n, (rid, dtype) in enumerate((("r0", "bfloat16"), ("r1", "float32")))
    ]
    requests = [recorded(f"r{n}", n) for n in range(2)]
    found = summary_of(tmp_path, requests, each(sum), each(sum), *rows).set_index("rid")
    assert found["first_divergent"].fillna("").to_dict() == {"r0": "", "r1": "h"}
    with pytest.raises(
        ValueError,
        match=exactly(
            "noise_floor must be a number of at least 0, the largest difference that counts as rounding, not -1"
        ),
    ):
        summary_of(tmp_path, requests, each(sum), each(sum), *rows, noise_floor=-1)


def test_the_repr_counts_the_requests_that_differ(tmp_path: Path) -> None:
    session: Any = Session([tap(0, "hidden", 0, 0.1)])
    requests = write(tmp_path / "dump.pkl", [recorded(f"r{n}", n) for n in range(3)])
    found = replay(session, requests, each(lambda ids: [*ids, 0]), each(lambda ids: [*ids, ids[0] // 2]))
    assert repr(found) == "<Replay of 3 requests: 3 replayed, 1 with different tokens, 1 with a divergent tap>"


def test_a_tap_of_one_request_counts_for_no_other_of_its_batch(tmp_path: Path) -> None:
    rows = (
        *(tap(0, "hidden", 0, 1e-7, rid="r0"), tap(0, "hidden", 1, 0.1, rid="r1"), tap(0, "hidden", 2, 1e-7, rid="r2")),
        tap(0, "logits", 3, 1e-7, rid="r0,r1,r2"),
        *(tap(0, "token", 4, 0.0, rid="r0"), tap(0, "token", 5, 0.5, rid="r1")),
    )
    requests = [recorded(f"r{n}", n) for n in range(3)]
    found = summary_of(tmp_path, requests, each(sum), each(sum), *rows, batch_size=3).set_index("rid")
    assert found["first_divergent"].fillna("").to_dict() == {"r1": "hidden", "r0": "", "r2": ""}
    assert found["final_difference"].to_dict() == {"r1": 0.5, "r0": 0.0, "r2": 1e-7}


def test_the_last_tap_that_was_measured_counts_where_later_ones_were_not(tmp_path: Path) -> None:
    lost = a_row(step=FIRST_STEP, name="token", order=2, status="missing", tags={"name": "token", "rid": "r0"})
    rows = (tap(0, "hidden", 0, 0.3, rid="r0"), tap(0, "logits", 1, 0.2, rid="r0"), lost)
    found = summary_of(tmp_path, [recorded("r0", 0)], each(sum), each(sum), *rows)
    assert found["final_difference"].tolist() == [0.2]


def test_returned_logits_are_compared_in_place_of_the_last_tap(tmp_path: Path) -> None:
    answers = {0: X * 1.5, 1: {"logits": X * 1.25}, 2: X * math.nan, 3: torch.ones(5)}
    found = summary_of(
        tmp_path,
        [recorded(f"r{n}", n) for n in answers],
        each(lambda tokens: {"logits": X} if tokens == [1] else X),
        each(lambda tokens: answers[tokens[0]]),
        *(tap(n, "logits", n, 0.125) for n in answers),
    ).set_index("rid")
    assert found["final_difference"].to_dict() == {"r0": 0.5, "r1": 0.25, "r2": math.inf, "r3": 0.125}


@pytest.mark.parametrize(
    ("ours", "theirs", "same"),
    [
        ([1, 2], [1, 2], True),
        ([1, 2], [1, 3], False),
        ((1, 2), torch.tensor([[1, 2]]), True),
        ({"output_ids": [1]}, {"token_ids": [1]}, True),
        ({"output_ids": None, "text": "a"}, {"text": "b"}, False),
        ([np.int64(1), 2], [1, 2], True),
        (np.array([1, 2]), [1, 3], False),
        (np.array([0.5]), [1], None),
        ("a", "a", True),
        ("a", [1], None),
        ({"other": [1]}, [1], None),
        (X, X, None),
        (X + 0j, X + 0j, None),
        (torch.tensor([True]), [1], True),
        ([1.0], [1.0], None),
        # A list with a number that is not whole has no tokens.
        ([1, 2.5], [1, 2.7], None),
    ],
)
def test_tokens_are_compared_in_each_common_form(ours: Any, theirs: Any, same: bool | None, tmp_path: Path) -> None:
    found = summary_of(tmp_path, [recorded("r", 1)], each(lambda tokens: ours), each(lambda tokens: theirs))
    (said,) = found["same_tokens"].tolist()
    assert said is same
    assert math.isnan(found.loc[0, "final_difference"]) or ours is X


def test_each_side_is_compared_with_what_was_recorded(tmp_path: Path) -> None:
    requests = [recorded("known", 1, 2, output=[3]), recorded("unknown", 4)]
    found = summary_of(tmp_path, requests, each(lambda tokens: [sum(tokens)]), each(lambda tokens: [9]))
    table = found.set_index("rid")
    assert table["baseline_as_recorded"].to_dict() == {"known": True, "unknown": None}
    assert table["target_as_recorded"].to_dict() == {"known": False, "unknown": None}


def test_a_request_that_was_not_kept_whole_is_skipped_unless_its_attributes_were(tmp_path: Path) -> None:
    dropped = [
        {"where": "requests[1].request['x']", "reason": "too large"},
        {"where": "the key of requests[2].request", "reason": "no text"},
        {"where": "requests[3].request", "reason": "kept by its attributes: it is an object"},
        {"where": "requests[0].response", "reason": "too large"},
    ]
    requests = [recorded(f"r{n}", n) for n in range(4)]
    content = {"server_args": None, "requests": requests, "launch_command": "", "dropped": dropped}
    (tmp_path / "dump.pkl").write_bytes(pickle.dumps(content))
    session: Any = Session()
    found = replay(session, tmp_path / "dump.pkl", each(sum), each(sum))
    assert found.summary["status"].tolist() == ["replayed", "replayed", "skipped", "skipped"]
    assert [(skipped.rid, skipped.index) for skipped in found.skipped] == [("r1", 1), ("r2", 2)]
    assert found.skipped[0].reason == "requests[1].request['x'] was not kept when it was recorded: too large"


def test_a_batch_in_which_a_function_raises_fails_alone_and_comes_first(tmp_path: Path) -> None:
    def picky(requests: list[Any]) -> list[Any]:
        if requests[0]["input_ids"] == [2]:
            raise ValueError("no twos, please")
        return each(sum)(requests)

    found = summary_of(tmp_path, [recorded(f"r{n}", n) for n in range(4)], picky, picky)
    assert found["rid"].tolist() == ["r2", "r0", "r1", "r3"]
    assert found["status"].tolist() == ["failed", "replayed", "replayed", "replayed"]
    error = found.loc[0, "error"]
    assert error.count("no twos, please") >= 2
    assert error.startswith("baseline: ")
    assert "\ntarget: " in error


def test_differing_tokens_rank_before_any_numeric_difference() -> None:
    def line(rid: str, index: int, same: bool | None, difference: float) -> dict[str, Any]:
        found = {"same_tokens": same, "first_divergent": "h", "final_difference": difference}
        return {"rid": rid, "index": index, "status": "replayed", **found}

    lines = [line("far", 0, True, 0.9), line("other", 1, False, 0.1), line("unknown", 2, None, 0.5)]
    assert _with_skipped(lines, [])["rid"].tolist() == ["other", "far", "unknown"]
    # Behind them those that were measured, then those in which a tap diverges, in the order of the requests.
    none = [line(f"n{n}", n, None, math.nan) for n in range(3)]
    none[0]["first_divergent"] = none[1]["first_divergent"] = None
    none += [line("bad", 7, True, math.inf), {**line("failed", 8, None, math.nan), "status": "failed"}]
    skipped = SkippedRequest("skipped", 0, "lost")
    assert _with_skipped(none, [skipped])["rid"].tolist() == ["failed", "bad", "n2", "n0", "n1", "skipped"]


def test_a_replay_of_many_requests_is_shown_in_part() -> None:
    run: Any = None
    summary = pd.DataFrame(
        {"rid": [f"r{i}" for i in range(500)], "status": "compared", "same_tokens": True, "first_divergent": None}
    )
    shown = Replay(run, summary, [])._repr_mimebundle_()
    assert shown["text/plain"].startswith("<Replay of 500 requests: 500 compared>\n")
    assert shown["text/html"].count("<tr>") + shown["text/html"].count("<tr ") < 30
    assert all(len(text.splitlines()) < 200 for text in shown.values())


def test_a_file_without_anything_to_replay_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="no request that can be replayed: it is empty"):
        summary_of(tmp_path, [], each(sum), each(sum))
    with pytest.raises(RequestError, match="this is a int"):
        summary_of(tmp_path, [7], each(sum), each(sum))
    (tmp_path / "other").write_bytes(b"something else")
    session: Any = Session()
    with pytest.raises(DumpError):
        replay(session, tmp_path / "other", each(sum), each(sum))


@pytest.mark.parametrize("bad", [{"batch_size": 0}, {"batch_size": True}, {"limit": 0}, {"limit": 1.5}])
def test_counts_are_whole_numbers_from_one_on(tmp_path: Path, bad: dict[str, Any]) -> None:
    (name,) = bad
    with pytest.raises(RequestError, match=f"replay: {name} must be a whole number of at least 1"):
        summary_of(tmp_path, [recorded("a", 1)], each(sum), each(sum), **bad)


def test_a_noise_floor_that_cannot_be_one_is_refused_before_anything_runs(tmp_path: Path) -> None:
    nothing: Any = None
    with pytest.raises(
        ValueError,
        match=exactly(
            "noise_floor must be a number of at least 0, the largest difference that counts as rounding, not -1"
        ),
    ):
        replay(nothing, tmp_path / "not read", each(sum), each(sum), noise_floor=-1)


def test_a_limit_counts_requests_from_the_first(tmp_path: Path) -> None:
    found = summary_of(tmp_path, [recorded(f"r{n}", n) for n in range(5)], each(sum), each(sum), limit=2)
    assert found["rid"].tolist() == ["r0", "r1"]


def test_a_damaged_request_before_the_end_of_a_torn_file_is_not_replayed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "dump.pkl").touch()

    def torn(*_: object) -> None:
        raise DumpError("it is cut short", 9, [RecordedRequest("no fields")])

    monkeypatch.setattr("graftlab.control.replay.load_dump", torn)
    session: Any = SimpleNamespace()
    with pytest.raises(RequestError, match="no request that can be replayed: #0: a request has named fields, and this"):
        replay(session, tmp_path / "dump.pkl", str, str)
