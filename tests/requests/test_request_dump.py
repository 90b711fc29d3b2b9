"""Recording of requests: never in the way of serving, whole files, and whatever is in a request."""

from __future__ import annotations

import copy
import errno
import io
import logging
import os
import pickle
import re
import signal
import subprocess
import sys
import threading
import time
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from kit.deadline import DEADLINE
from kit.refusals import exactly

from graftlab.errors import DumpError
from graftlab.requests import (
    Dump,
    DumpSettings,
    Opaque,
    RecordedRequest,
    RequestDumper,
    RequestLogging,
    load_dump,
    pickling,
    writing,
)
from graftlab.requests import dump as dump_module
from graftlab.requests.pickling import RequestWriteError, pickle_in_steps
from graftlab.requests.writing import DumpWriter


@pytest.fixture
def dumper(tmp_path: Path) -> Iterator[RequestDumper]:
    dumper = RequestDumper(tmp_path / "dumps", threshold=1000)
    yield dumper
    dumper.close()


def folder(dumper: RequestDumper) -> Path:
    assert dumper.settings.folder is not None
    return dumper.settings.folder


def files(where: Path) -> list[Path]:
    return sorted(where.glob("*.pkl"))


def add(dumper: RequestDumper, rid: str, response: Any = None, finished: float | None = None, **request: Any) -> bool:
    now = time.time()
    return dumper.add({"rid": rid, **request}, response, now, now if finished is None else finished)


def only_dump(dumper: RequestDumper) -> Dump:
    assert dumper.flush()
    (path,) = files(folder(dumper))
    return load_dump(path)


def rids(where: Path) -> list[str | None]:
    return [record.rid for path in files(where) for record in load_dump(path)["requests"]]


def wait_until_written(dumper: RequestDumper, count: int) -> None:
    deadline = time.monotonic() + DEADLINE
    while dumper.written < count:
        assert time.monotonic() < deadline, f"{dumper.written} of {count} requests were written"
        threading.Event().wait(0.002)


def wait_until_logged() -> None:
    """Wait for the threads that log what the writer noted without an order; a flush returns before they have ended."""
    for thread in threading.enumerate():
        if thread.name == "graftlab-requests-log":
            thread.join(DEADLINE)
            assert not thread.is_alive()


# ---- files ----------------------------------------------------------------------------------------------------------


def test_a_full_buffer_becomes_a_file_automatically(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, threshold=5, server_args={"model": "m"})
    for index in range(12):
        assert add(dumper, f"r{index}", {"text": "x"})
    wait_until_written(dumper, 10)
    assert [len(load_dump(path)["requests"]) for path in files(tmp_path)] == [5, 5]
    assert dumper.waiting == 2
    assert dumper.close()
    assert rids(tmp_path) == [f"r{index}" for index in range(12)]


def test_a_file_is_a_plain_pickled_dict_of_four(dumper: RequestDumper) -> None:
    dumper.add({"rid": "a"}, {"text": "b"}, 1.0, 2.0)
    assert dumper.flush()
    (path,) = files(folder(dumper))
    found = pickle.loads(path.read_bytes())
    assert found == {
        "server_args": None,
        "requests": [({"rid": "a"}, {"text": "b"}, 1.0, 2.0)],
        "launch_command": writing.launch_command(),
        "dropped": [],
    }
    assert type(found["requests"][0]) is tuple
    assert load_dump(path) == found
    assert sys.orig_argv[-1] in found["launch_command"]


def test_secrets_of_the_command_line_stay_out_of_files(monkeypatch: pytest.MonkeyPatch) -> None:
    words = [
        "python",
        "-m",
        "serve",
        "--token",
        "s1",
        "--api-key=s2",
        "--max-new-tokens",
        "5",
        "--hf_token",
        "s3",
        "a b",
    ]
    monkeypatch.setattr(sys, "orig_argv", words)
    told = "python -m serve --token '***' '--api-key=***' --max-new-tokens 5 --hf_token '***' 'a b'"
    assert writing.launch_command() == told


def test_files_are_named_by_date_and_time_and_unique_within_the_second(tmp_path: Path) -> None:
    before = time.time()
    dumpers = [RequestDumper(tmp_path) for _ in range(3)]
    for dumper in dumpers:
        for index in range(10):
            add(dumper, str(index))
            assert dumper.flush()
        dumper.close()
    names = [path.name for path in files(tmp_path)]
    assert len(names) == 30
    stamps = [re.match(r"(\d{4}-\d\d-\d\d_\d\d-\d\d-\d\d)_", name) for name in names]
    assert all(stamps)
    first = time.mktime(time.strptime(min(names)[:19], "%Y-%m-%d_%H-%M-%S"))
    assert before - 1 <= first <= time.time()
    assert len({name[:19] for name in names}) < 30


def test_recorded_files_are_readable_by_their_owner_alone(dumper: RequestDumper) -> None:
    add(dumper, "a")
    dumper.flush()
    assert files(folder(dumper))[0].stat().st_mode & 0o077 == 0


def test_flush_and_close_of_nothing_write_nothing(dumper: RequestDumper) -> None:
    assert dumper.flush()
    assert dumper.dump_before_crash() is None
    assert dumper.close()
    assert dumper.close()
    assert dumper.flush()
    assert os.listdir(folder(dumper)) == []


def test_a_closed_dumper_acknowledges_nothing(dumper: RequestDumper) -> None:
    dumper.close()
    assert not add(dumper, "late")
    assert not dumper.begin({}, 0.0)
    dumper.flush()
    assert files(folder(dumper)) == []


def test_requests_of_many_threads_are_each_written_once(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, threshold=50)

    def serve(name: str) -> None:
        for index in range(300):
            request = {"rid": f"{name}-{index}"}
            assert dumper.begin(request, 0.0)
            assert dumper.add(request, None, 0.0, time.time())

    threads = [threading.Thread(target=serve, args=(name,)) for name in "abcd"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert dumper.close()
    assert sorted(map(str, rids(tmp_path))) == sorted(f"{name}-{index}" for name in "abcd" for index in range(300))
    assert dumper.written == 1200


def test_a_bad_threshold_or_folder_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=exactly("threshold is the number of requests in a file, at least 1, not 0")):
        RequestDumper(tmp_path, threshold=0)
    (tmp_path / "file").touch()
    with pytest.raises(DumpError, match="cannot be made"):
        RequestDumper(tmp_path / "file" / "dumps")
    with pytest.raises(DumpError, match="cannot be made"):
        RequestDumper(tmp_path, crash_folder=tmp_path / "file")


@pytest.mark.ranks
def test_importing_it_does_not_import_torch() -> None:
    code = "import sys, graftlab.requests; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.ranks
def test_a_normal_exit_writes_what_waits_and_what_was_never_finished(tmp_path: Path) -> None:
    code = f"""
from graftlab.requests import RequestDumper
dumper = RequestDumper({str(tmp_path)!r})
dumper.add({{"rid": "done"}}, "text", 1.0, 2.0)
open_request = {{"rid": "open"}}
dumper.begin(open_request, 3.0)
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    (path,) = files(tmp_path)
    assert load_dump(path)["requests"] == [
        ({"rid": "done"}, "text", 1.0, 2.0),
        ({"rid": "open"}, None, 3.0, None),
    ]


@pytest.mark.ranks
def test_a_forked_process_writes_its_own_requests_and_none_of_its_parents(tmp_path: Path) -> None:
    code = f"""
import os
from graftlab.requests import RequestDumper
dumper = RequestDumper({str(tmp_path)!r}, catch_crashes=True)
dumper.add({{"rid": "parent"}}, None, 1.0, 2.0)
child = os.fork()
if child == 0:
    assert dumper.waiting == 0
    dumper.add({{"rid": "child"}}, None, 1.0, 2.0)
    assert dumper.flush()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-c", code], check=True)
    assert sorted(map(str, rids(tmp_path))) == ["child", "parent"]


# ---- out of the way ------------------------------------------------------------------------------------------------


def test_add_does_not_wait_for_the_disk(dumper: RequestDumper, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, fsync = threading.Event(), os.fsync
    reached = threading.Event()

    def hang(descriptor: int) -> None:
        reached.set()
        assert slow.wait(DEADLINE)
        fsync(descriptor)

    monkeypatch.setattr(writing.os, "fsync", hang)
    dumper.apply(DumpSettings(folder(dumper), 2, ()))
    add(dumper, "a")
    add(dumper, "b")
    assert reached.wait(DEADLINE)
    assert all(add(dumper, f"while the disk hangs {index}") for index in range(100))
    assert not dumper.flush(timeout=0.01)
    assert dumper.written == 0
    slow.set()
    assert dumper.flush()
    assert dumper.written == 102


def test_a_disk_that_hangs_longer_than_the_end_of_the_process_waits_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumper = RequestDumper(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(dumper._writer, "wait", lambda order, timeout: None)
        assert not dumper.flush()
        assert not dumper.close()
        assert dumper.dump_before_crash() is None
    assert dumper.close()


class _Hostile(dict):  # type: ignore[type-arg]
    """A response that fails at every touch."""

    def __getattribute__(self, name: str) -> Any:
        raise RuntimeError("no")

    def __iter__(self) -> Any:
        raise RuntimeError("no")

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise SystemExit


def test_add_copes_with_any_object(dumper: RequestDumper, caplog: pytest.LogCaptureFixture) -> None:
    for request in (None, object(), _Hostile(), int, threading, float("nan"), lambda: 0):
        dumper.add(request, request, request, request)  # type: ignore[arg-type]
    dumper.add({"rid": "last"}, None, 10**400, 10**400)
    assert dumper.flush()
    assert rids(folder(dumper))[-1] == "last"


def test_the_callers_objects_are_never_changed(dumper: RequestDumper) -> None:
    request = {"rid": "a", "lock": threading.Lock(), "ids": [1, 2]}
    response = {"meta_info": {"hidden_states": [1.0], "routed_experts": [2], "cached": 3}, "text": "b"}
    shallow = {**request}, copy.deepcopy(response)
    dumper.add(request, response, 1.0, 2.0)
    record = only_dump(dumper)["requests"][0]
    assert (request, response) == shallow
    assert record.response == {"meta_info": {"cached": 3}, "text": "b"}


@pytest.mark.parametrize("meta", [None, [("hidden_states", 1)], "hidden_states", 5])
def test_meta_info_that_is_no_dict_is_left_alone(dumper: RequestDumper, meta: Any) -> None:
    dumper.add({}, {"meta_info": meta}, 1.0, 2.0)
    dumper.add({}, ["meta_info", "hidden_states"], 1.0, 2.0)
    found = only_dump(dumper)["requests"]
    assert [record.response for record in found] == [{"meta_info": meta}, ["meta_info", "hidden_states"]]


def test_no_excluded_keys_keep_every_key(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, exclude_meta_keys=())
    dumper.add({}, {"meta_info": {"hidden_states": 1}}, 1.0, 2.0)
    assert only_dump(dumper)["requests"][0].response == {"meta_info": {"hidden_states": 1}}
    dumper.close()


def test_a_field_the_server_later_removes_from_a_response_is_recorded(dumper: RequestDumper) -> None:
    response = {"text": "a", "meta_info": {"seconds": 1.0}}
    dumper.add({}, response, 1.0, 2.0)
    response["meta_info"].clear()  # type: ignore[attr-defined]
    response.clear()
    assert only_dump(dumper)["requests"][0].response == {"text": "a", "meta_info": {"seconds": 1.0}}


# ---- what cannot be pickled -----------------------------------------------------------------------------------------


class _Refuses:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error

    def __repr__(self) -> str:
        return "<refuses>"


def gone() -> Any:
    """An object of a class whose module is not there any longer."""
    module = types.ModuleType("module_that_is_gone")
    exec("class Gone:\n    def __repr__(self):\n        return '<gone>'", module.__dict__)
    return module.Gone()


def deep(levels: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


def generator() -> Iterator[int]:
    yield 1


UNPICKLABLE: dict[str, tuple[Any, str]] = {
    "class of a module that is gone": (gone(), r"<gone>"),
    "lock": (threading.Lock(), r"<unlocked _thread.lock object at 0x\w+>"),
    "generator": (generator(), r"<generator object generator at 0x\w+>"),
    "lambda": (lambda: 0, r"<function <lambda> at 0x\w+>"),
    "reduce that raises": (_Refuses(ValueError("no")), r"<refuses>"),
    "reduce that exits": (_Refuses(SystemExit(3)), r"<refuses>"),
    "reduce that interrupts": (_Refuses(KeyboardInterrupt()), r"<refuses>"),
    "too deep": (deep(100_000), r"\[+\.\.\.\]+"),
}


@pytest.mark.parametrize("name", UNPICKLABLE)
def test_an_unpicklable_object_is_replaced_by_its_repr_and_all_else_is_kept(
    dumper: RequestDumper, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    value, text = UNPICKLABLE[name]
    tensor = torch.arange(3)
    add(dumper, "before", {"t": tensor})
    add(dumper, "bad", {"text": "kept", "meta_info": {"inner": [1, (value, 2)]}}, field=value, ids=[1, 2])
    add(dumper, "after", {"t": tensor})
    dump = only_dump(dumper)
    before, bad, after = dump["requests"]
    assert (before.rid, bad.rid, after.rid) == ("before", "bad", "after")
    assert torch.equal(before.response["t"], tensor)
    assert torch.equal(after.response["t"], tensor)
    assert bad.request["ids"] == [1, 2]
    assert bad.response["text"] == "kept"
    assert bad.response["meta_info"]["inner"][1][1] == 2
    shown = _innermost(bad.request["field"])
    assert re.search(text, shown), shown
    wheres = [item["where"] for item in dump["dropped"]]
    assert all(where.startswith("requests[1].") for where in wheres)
    assert any(where.startswith("requests[1].request['field']") for where in wheres)
    assert all(item["reason"] for item in dump["dropped"])
    for item in dump["dropped"]:
        assert any(item["where"] in line and item["reason"] in line for line in caplog.messages)


def _innermost(value: Any) -> str:
    while isinstance(value, list):
        (value,) = value
    assert isinstance(value, str)
    return value


def test_a_request_that_is_an_object_keeps_its_fields(dumper: RequestDumper) -> None:
    request = gone()
    request.rid, request.ids, request.lock = "obj", [1, 2], threading.Lock()
    dumper.add(request, None, 1.0, 2.0)
    dump = only_dump(dumper)
    record = dump["requests"][0]
    assert record.rid == "obj"
    assert isinstance(record.request, Opaque)
    assert record.request.class_name.endswith("Gone")
    assert record.request.state["ids"] == [1, 2]
    assert record.request.state["lock"].startswith("<unlocked")
    assert [item["where"] for item in dump["dropped"]] == ["requests[0].request", "requests[0].request.lock"]


def test_server_args_go_first(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumper = RequestDumper(tmp_path, server_args={"lock": threading.Lock()})
    add(dumper, "a")
    dump = only_dump(dumper)
    assert dump["server_args"] is None
    assert dump["requests"][0].rid == "a"
    assert [item["where"] for item in dump["dropped"]] == ["server_args"]
    assert "lock" in dump["dropped"][0]["reason"]
    assert any("whole" in line and "lock" in line for line in caplog.messages)
    dumper.close()


def test_server_args_that_can_be_pickled_are_kept_beside_a_request_that_cannot(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, server_args={"model": "m"})
    add(dumper, "a", lock=threading.Lock())
    dump = only_dump(dumper)
    assert dump["server_args"] == {"model": "m"}
    assert [item["where"] for item in dump["dropped"]] == ["requests[0].request['lock']"]
    dumper.close()


def test_containers_that_hold_themselves_are_kept(dumper: RequestDumper) -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    add(dumper, "good", loop=loop)
    bad: dict[str, Any] = {"lock": threading.Lock()}
    bad["self"] = [bad, bad]
    add(dumper, "bad", loop=bad)
    good, salvaged = only_dump(dumper)["requests"]
    assert good.request["loop"][1] is good.request["loop"]
    found = salvaged.request["loop"]
    assert found["lock"].startswith("<unlocked")
    assert found["self"][0] is found
    assert found["self"][1] is found


def test_a_value_in_many_places_is_taken_apart_once(dumper: RequestDumper) -> None:
    value: Any = (threading.Lock(),)
    for _ in range(30):
        value = (value, value)  # 2**30 places
    add(dumper, "a", value=value)
    found = only_dump(dumper)["requests"][0].request["value"]
    for _ in range(30):
        assert found[0] is found[1]
        found = found[0]
    assert found[0].startswith("<unlocked")


def test_keys_that_cannot_be_pickled_are_replaced_too(dumper: RequestDumper) -> None:
    add(dumper, "a", by={len: 1, (lambda: 0): 2})
    dump = only_dump(dumper)
    keys = list(dump["requests"][0].request["by"].items())
    assert keys[1][1] == 2
    assert keys[1][0].startswith("<function")
    assert "the key of" in dump["dropped"][0]["where"]


class _Fickle:
    """Can be pickled every other time."""

    def __init__(self) -> None:
        self.times = 0

    def __reduce__(self) -> Any:
        self.times += 1
        if self.times % 2:
            raise ValueError("not now")
        return _Fickle, ()

    def __repr__(self) -> str:
        return "<fickle>"


def test_an_object_that_pickles_only_at_times_cannot_hold_up_the_others(dumper: RequestDumper) -> None:
    add(dumper, "a", thing=_Fickle(), other=[1, {"b": 2}])
    add(dumper, "b", ids=[3])
    dump = only_dump(dumper)
    assert [record.rid for record in dump["requests"]] == ["a", "b"]
    assert dump["requests"][0].request["other"] == [1, {"b": 2}]
    assert dump["requests"][1].request["ids"] == [3]


def test_at_last_builtin_values_alone_are_kept() -> None:
    dropped: list[Any] = []
    content = {"server_args": object(), "requests": [({"rid": "a", "thing": object(), "n": [1, 2.5]}, None, 1.0, 2.0)]}
    found = pickling._with_plain_requests(content, dropped)
    assert found["server_args"] is None
    ((request, response, *times),) = found["requests"]
    assert (request["rid"], request["n"], response, times) == ("a", [1, 2.5], None, [1.0, 2.0])
    assert isinstance(request["thing"], str)
    assert [each["where"] for each in dropped] == ["requests[0].request['thing']"]
    assert "did not pickle the same way twice" in dropped[0]["reason"]


def test_of_a_distributed_tensor_the_part_of_this_rank_is_kept(dumper: RequestDumper) -> None:
    class Sharded(torch.Tensor):
        def to_local(self) -> torch.Tensor:
            return torch.full((2,), 7.0)

    add(dumper, "a", shard=torch.zeros(4).as_subclass(Sharded))
    assert only_dump(dumper)["requests"][0].request["shard"].tolist() == [7.0, 7.0]


def test_a_repr_that_raises_or_never_ends_is_no_obstacle(dumper: RequestDumper) -> None:
    class Silent(_Refuses):
        def __repr__(self) -> str:
            raise SystemExit("no repr either")

    class Long(_Refuses):
        def __repr__(self) -> str:
            return "x" * 1_000_000

    add(dumper, "a", silent=Silent(ValueError()), long=Long(ValueError()))
    found = only_dump(dumper)["requests"][0].request
    assert "Silent" in found["silent"]
    assert "no repr either" in found["silent"]
    assert len(found["long"]) < 20_000


def test_a_tensor_without_memory_is_kept_as_one(dumper: RequestDumper) -> None:
    add(dumper, "a", shape=torch.ones(3, device="meta"))
    dump = only_dump(dumper)
    assert dump["dropped"] == []
    assert "meta" in repr(dump["requests"][0].request["shape"])


def test_a_request_that_changes_while_it_is_taken_apart_is_kept(dumper: RequestDumper) -> None:
    request: dict[str, Any] = {"rid": "a"}

    class Adds(_Refuses):
        def __repr__(self) -> str:
            request[f"more {len(request)}"] = 1
            return "<adds>"

    request["thing"] = Adds(ValueError())
    assert dumper.add(request, None, 0.0, 1.0)
    found = only_dump(dumper)["requests"][0].request
    assert (found["rid"], found["thing"]) == ("a", "<adds>")


def test_a_closed_dumper_is_not_held_until_the_process_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[Any] = []
    monkeypatch.setattr(dump_module, "atexit", types.SimpleNamespace(register=held.append, unregister=held.remove))
    dumper = RequestDumper(tmp_path)
    assert held == [dumper.close]
    assert dumper.close()
    assert held == []


def test_tensors_take_only_their_own_bytes_along(dumper: RequestDumper) -> None:
    big = torch.zeros(1_000_000)
    add(dumper, "a", view=big[:3])
    assert dumper.flush()
    assert files(folder(dumper))[0].stat().st_size < 10_000


# ---- a disk that fails ----------------------------------------------------------------------------------------------


def test_a_vanished_folder_is_made_again(dumper: RequestDumper) -> None:
    where = folder(dumper)
    where.rmdir()
    add(dumper, "a")
    assert dumper.flush()
    assert rids(where) == ["a"]


def test_where_no_folder_can_be_requests_wait_in_memory_until_one_can(
    dumper: RequestDumper, caplog: pytest.LogCaptureFixture
) -> None:
    where = folder(dumper)
    where.rmdir()
    where.write_text("in the way")
    add(dumper, "a")
    assert not dumper.flush()
    assert dumper.waiting == 1
    assert re.search(r"cannot write 1 requests .*File exists.*1 wait in memory.*20000", caplog.text)
    failed = [record for record in caplog.records if "cannot write 1 requests" in record.getMessage()]
    assert [(record.levelname, record.getMessage().count("\n")) for record in failed] == [("ERROR", 0)]
    wait_until_logged()
    assert re.search(r"the journal in .* cannot be written: .*File exists.*a process that is killed loses", caplog.text)
    add(dumper, "b")
    where.unlink()
    assert dumper.flush()
    assert dumper.waiting == 0
    assert rids(where) == ["a", "b"]


@pytest.mark.parametrize("failing", ["fsync", "rename", "open"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EIO])
def test_a_disk_that_fails_at_any_moment_leaves_nothing_behind_and_loses_nothing(
    dumper: RequestDumper, monkeypatch: pytest.MonkeyPatch, failing: str, number: int
) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(number, os.strerror(number))

    add(dumper, "a")
    with monkeypatch.context() as patch:
        patch.setattr(writing.os, failing, fail)
        assert not dumper.flush()
        assert not dumper.flush()
    assert [name for name in os.listdir(folder(dumper)) if not name.endswith(".journal")] == []
    assert dumper.flush()
    assert rids(folder(dumper)) == ["a"]
    assert os.listdir(folder(dumper)) == [files(folder(dumper))[0].name]


@pytest.mark.ranks
def test_a_full_disk_is_no_reason_to_take_a_request_apart(tmp_path: Path) -> None:
    """The limit on a file's size stands for the disk's; the process is another, since the limit is a process's."""
    code = f"""
import os, resource, sys
from graftlab.requests import RequestDumper, load_dump
from pathlib import Path
folder = Path({str(tmp_path)!r})
dumper = RequestDumper(folder, server_args={{"model": "m"}})
dumper.add({{"rid": "a", "text": os.urandom(300_000)}}, None, 1.0, 2.0)
soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
assert not dumper.flush()
assert not [name for name in os.listdir(folder) if not name.endswith(".journal")], os.listdir(folder)
resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
assert dumper.flush()
(path,) = folder.glob("*.pkl")
dump = load_dump(path)
assert dump["dropped"] == [] and dump["server_args"] == {{"model": "m"}}, dump["dropped"]
assert len(dump["requests"][0].request["text"]) == 300_000
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "File too large" in done.stderr


class _FullOnce(io.BytesIO):
    """A file on a disk that has room again right after it had none."""

    full = True

    def write(self, data: Any) -> int:
        if self.full:
            self.full = False
            raise OSError(errno.ENOSPC, "full")
        return super().write(data)


def test_a_disk_that_was_full_for_a_moment_costs_no_part_of_a_request() -> None:
    content = {"server_args": {"model": "m"}, "requests": [({"rid": "a"}, None, 1.0, 2.0)], "dropped": []}
    with pytest.raises(RequestWriteError, match="full"):
        pickle_in_steps(content, _FullOnce())


@pytest.mark.parametrize("error", [MemoryError(), SystemExit(3), KeyboardInterrupt()])
def test_requests_outlast_any_failure_of_the_writer(
    error: BaseException, dumper: RequestDumper, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    add(dumper, "a")
    with monkeypatch.context() as patch:
        patch.setattr(dumper._writer, "_take_in", Mock(side_effect=error))
        assert not dumper.flush()
    assert f"requests wait because the writer failed: {type(error).__name__}" in caplog.text
    assert dumper.flush()
    assert rids(folder(dumper)) == ["a"]


def test_a_partial_buffer_that_cannot_be_written_keeps_no_thread_busy(
    dumper: RequestDumper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "_FIRST_RETRY", 0.001)
    looks = []
    obey = writing.DumpWriter._obey
    monkeypatch.setattr(writing.DumpWriter, "_obey", lambda *args: (looks.append(1), obey(*args))[1])
    folder(dumper).rmdir()
    folder(dumper).write_text("in the way")
    add(dumper, "a")
    assert not dumper.flush()
    threading.Event().wait(0.1)  # time for thousands of looks
    assert len(looks) < 10
    folder(dumper).unlink()


def test_waiting_requests_are_bounded_and_the_next_file_counts_the_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    dumper = RequestDumper(tmp_path / "dumps", threshold=100, max_waiting=250)
    (tmp_path / "dumps").rmdir()
    (tmp_path / "dumps").write_text("in the way")
    taken = [add(dumper, str(index)) for index in range(300)]
    assert taken == [True] * 250 + [False] * 50
    assert dumper.waiting == 250
    assert not dumper.flush()
    assert "50 more were refused" in caplog.text
    (tmp_path / "dumps").unlink()
    assert dumper.flush()
    assert rids(tmp_path / "dumps") == [str(index) for index in range(250)]
    dropped = [item for path in files(tmp_path / "dumps") for item in load_dump(path)["dropped"]]
    assert dropped == [{"where": "50 requests", "reason": "refused because 250 were waiting"}]
    assert add(dumper, "again")
    dumper.close()


def test_the_bound_leaves_room_for_a_full_file(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, threshold=30, max_waiting=1)
    assert all(add(dumper, str(index)) for index in range(30))
    wait_until_written(dumper, 30)
    dumper.close()


def test_a_full_buffer_is_tried_again_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "_FIRST_RETRY", 0.01)
    failed = threading.Event()
    fsync = os.fsync

    def fail_once(descriptor: int) -> None:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.ENOSPC, "full")
        fsync(descriptor)

    monkeypatch.setattr(writing.os, "fsync", fail_once)
    dumper = RequestDumper(tmp_path, threshold=3)
    for index in range(3):
        add(dumper, str(index))
    wait_until_written(dumper, 3)
    assert failed.is_set()
    dumper.close()


def test_closing_falls_back_on_the_crash_folder(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumper = RequestDumper(tmp_path / "dumps", crash_folder=tmp_path / "crash")
    (tmp_path / "dumps").rmdir()
    (tmp_path / "dumps").write_text("in the way")
    add(dumper, "a")
    assert dumper.close()
    assert rids(tmp_path / "crash") == ["a"]


def test_lost_requests_are_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    dumper = RequestDumper(tmp_path / "dumps")
    (tmp_path / "dumps").rmdir()
    (tmp_path / "dumps").write_text("in the way")
    add(dumper, "a")
    assert not dumper.close()
    assert "1 recorded requests are lost" in caplog.text


def test_requests_that_only_the_journal_has_are_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumper = RequestDumper(tmp_path)
    add(dumper, "a")
    monkeypatch.setattr(writing, "write_whole", _full_disk)
    assert not dumper.close()
    (left,) = tmp_path.iterdir()
    assert f"1 recorded requests are in no file but the journal {left}" in caplog.text
    assert [each.rid for each in load_dump(left)["requests"]] == ["a"]


def _full_disk(*_: Any) -> Any:
    raise OSError(errno.ENOSPC, "no space left")


# ---- settings that change while it runs -----------------------------------------------------------------------------


def test_folder_threshold_and_keys_change_from_the_next_request_on(dumper: RequestDumper, tmp_path: Path) -> None:
    old = folder(dumper)
    response = {"meta_info": {"hidden_states": 1, "other": 2}}
    add(dumper, "a", response)
    assert dumper.flush()
    dumper.apply(DumpSettings(tmp_path / "new", 2, ("other",)))
    add(dumper, "b", response)
    add(dumper, "c", response)
    wait_until_written(dumper, 3)
    assert [record.response["meta_info"] for record in load_dump(files(old)[0])["requests"]] == [{"other": 2}]
    (path,) = files(tmp_path / "new")
    assert [record.response["meta_info"] for record in load_dump(path)["requests"]] == [{"hidden_states": 1}] * 2


def test_a_lower_threshold_writes_what_waits_already(dumper: RequestDumper) -> None:
    for index in range(5):
        add(dumper, str(index))
    dumper.apply(DumpSettings(folder(dumper), 5, ()))
    wait_until_written(dumper, 5)


def test_ending_the_recording_writes_what_waits_to_the_old_folder(dumper: RequestDumper) -> None:
    where = folder(dumper)
    add(dumper, "a")
    dumper.apply(DumpSettings(None, 1000, ()))
    assert not add(dumper, "b")
    wait_until_written(dumper, 1)
    assert rids(where) == ["a"]
    dumper.apply(DumpSettings(where, 1000, ()))
    assert add(dumper, "c")
    assert dumper.flush()
    assert sorted(map(str, rids(where))) == ["a", "c"]


def test_a_new_folder_gets_all_that_came_after_it(dumper: RequestDumper, tmp_path: Path) -> None:
    for index in range(100):
        dumper.apply(DumpSettings(None, 1000, ()))
        dumper.apply(DumpSettings(tmp_path / str(index), 1000, ()))
        add(dumper, str(index))
        assert dumper.flush()
        assert rids(tmp_path / str(index)) == [str(index)]


def test_impossible_settings_are_refused_and_change_nothing(dumper: RequestDumper, tmp_path: Path) -> None:
    before = dumper.settings
    (tmp_path / "file").touch()
    with pytest.raises(DumpError):
        dumper.apply(DumpSettings(tmp_path / "file" / "x", 5, ()))
    with pytest.raises(ValueError, match=exactly("threshold is the number of requests in a file, at least 1, not 0")):
        dumper.apply(DumpSettings(tmp_path / "other", 0, ()))
    assert dumper.settings == before


def test_the_log_says_where_requests_went(dumper: RequestDumper, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    add(dumper, "a")
    dumper.flush()
    assert f"wrote 1 requests to {files(folder(dumper))[0]}" in caplog.text


def test_long_messages_and_reprs_are_cut_visibly() -> None:
    def dropped(content: Any) -> tuple[Any, Any]:
        found, _ = pickle_in_steps({"server_args": None, "requests": [(content, None, 0.0, 0.0)], "dropped": []}, file)
        file.seek(0)
        return found, pickle.load(file)["requests"][0][0]

    class Fails:
        def __init__(self, said: int, shown: int = 1) -> None:
            self.said, self.shown = said, shown

        def __reduce__(self) -> Any:
            raise ValueError("x" * self.said)

        def __repr__(self) -> str:
            return "y" * self.shown

    file = io.BytesIO()
    for length in (500, 501):
        (told,), _ = dropped({"k": Fails(length)})
        assert told == {"where": "requests[0].request['k']", "reason": f"ValueError: {'x' * 500}"}
    assert dropped([Fails(1, 10_000)])[1] == ["y" * 10_000]
    assert dropped([Fails(1, 10_001)])[1] == [f"{'y' * 10_000}... (10001 characters)"]
    (told,), _ = dropped({"z" * 200: Fails(1)})
    assert told["where"] == f"requests[0].request['{'z' * 99}]"
    deep: Any = Fails(1)
    for _ in range(32):
        deep = [deep]
    (told,), _ = dropped(deep)
    assert told == {"where": f"requests[0].request{'[0]' * 32}", "reason": "ValueError: x"}
    (told,), _ = dropped([deep])
    assert told["reason"] == "nested more than 32 containers deep: ValueError: x"
    assert told["where"] == f"requests[0].request{'[0]' * 32}"


# ---- when it is tried again, and what is recent ---------------------------------------------------------------------


def test_a_full_buffer_is_retried_with_growing_pauses_up_to_a_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = writing.DumpWriter(DumpSettings(tmp_path, 1, ()), None, 300.0, None, 100)
    monkeypatch.setattr(writing.time, "monotonic", lambda: 1000.0)
    writer._held.append(writing.QueuedRequest(RecordedRequest({"rid": "a"}, None, 0.0, 0.0), None, False, 1))
    pauses = []
    with monkeypatch.context() as patch:
        patch.setattr(writer, "_write", lambda *given: None)
        for _ in range(8):
            assert not writer._write_held([tmp_path], 1, [])
            assert writer._retry_at is not None
            pauses.append(writer._retry_at - 1000.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60]
    # Not before its time, and then at once; after a success it begins anew.
    writer._write_full([])
    assert writer.waiting == 1
    monkeypatch.setattr(writing.time, "monotonic", lambda: 1060.0)
    writer._write_full([])
    assert (writer.waiting, writer.written, writer._retry_at, writer._failures) == (0, 1, None, 0)


def test_requests_finished_within_the_crash_window_are_recent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = writing.DumpWriter(DumpSettings(tmp_path, 1, ()), None, 300.0, None, 100)
    monkeypatch.setattr(writing.time, "time", lambda: 1000.0)
    monkeypatch.setattr(writing.time, "monotonic", lambda: 5000.0)
    for finished, is_recent in ((1000.0, True), (700.0, True), (699.0, False), (None, True), ("x", True), (2e9, True)):
        record = RecordedRequest({"rid": "a"}, None, 0.0, finished)  # type: ignore[arg-type]
        at = writing._finished_at(record)
        assert writer._is_recent(writing.QueuedRequest(record, None, True, 1, at)) == is_recent


@pytest.mark.parametrize("jump", [3600.0, -3600.0, 1e9])
def test_setting_the_clock_while_requests_wait_does_not_change_a_crash_file(
    tmp_path: Path, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumper = RequestDumper(None, crash_folder=tmp_path, crash_window=100.0)
    now = time.time()
    for rid, ago in (("old", 500.0), ("new", 1.0)):
        assert dumper.add({"rid": rid}, None, now - ago, now - ago)
    monkeypatch.setattr(writing.time, "time", lambda: now + jump)
    assert dumper.flush()
    path = dumper.dump_before_crash()
    assert path is not None
    assert [record.request["rid"] for record in load_dump(path)["requests"]] == ["new"]
    assert dumper.close()


def test_a_wait_for_an_ended_writer_ends_at_once(dumper: RequestDumper) -> None:
    writer = dumper._writer
    assert dumper.close()
    answer = writer.wait(writing._Order("flush", "", None, False), None)
    assert answer == writing.Answer(True, None, [])
    assert writer.wait(writing._Order("flush", "", None, False), 0) is None


def test_a_file_that_cannot_be_filled_leaves_nothing_behind(tmp_path: Path) -> None:
    def fails(file: Any) -> None:
        file.write(b"half")
        raise KeyError("content")

    with pytest.raises(KeyError):
        writing.write_whole(tmp_path / "a.pkl", fails)
    assert list(tmp_path.iterdir()) == []
    assert writing.write_whole(tmp_path / "a.pkl", lambda file: file.write(b"whole")) == 5
    assert (tmp_path / "a.pkl").read_bytes() == b"whole"
    assert (tmp_path / "a.pkl").stat().st_mode & 0o777 == 0o600


def test_a_dumpers_default_sizes_are_those_of_its_page(tmp_path: Path) -> None:
    before = signal.getsignal(signal.SIGTERM)
    dumper = RequestDumper(tmp_path)
    assert signal.getsignal(signal.SIGTERM) == before
    assert dumper.settings == DumpSettings(tmp_path, 1000, ("routed_experts", "hidden_states"))
    writer = dumper._writer
    assert (writer.limit, writer._crash_window) == (20_000, 300.0)
    settings = RequestLogging(dumper).settings
    assert (settings.log_requests, settings.log_requests_level) == (False, 0)
    assert dumper.close()


def test_requests_that_are_open_are_counted_against_the_limit(tmp_path: Path) -> None:
    dumper = RequestDumper(tmp_path, crash_folder=tmp_path, threshold=1, max_waiting=2)
    limit = dumper._writer.limit
    requests = [{"rid": str(n)} for n in range(limit + 1)]
    try:
        assert [dumper.begin(each, 1.0) for each in requests] == [*[True] * limit, False]
        dumper.forget(requests[0])
        assert dumper.begin(requests[-1], 1.0)
    finally:
        dumper.close()


def test_a_writer_that_could_not_start_its_thread_starts_it_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumper = RequestDumper(tmp_path)
    writer: Any = DumpWriter(dumper._writer.settings, *dumper._rest)
    with monkeypatch.context() as patch:

        def refuse() -> None:
            raise RuntimeError("can't start new thread")

        patch.setattr(writer._thread, "start", refuse)
        with pytest.raises(RuntimeError, match="start new thread"):
            writer.start()
    writer.start()
    writer.start()
    assert writer._thread.is_alive()
    writer.wait(writer.order("close"), DEADLINE)
    dumper.close()
