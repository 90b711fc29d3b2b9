"""The messages of the package in a rank's log."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock, call

import pytest
import torch
from torch.distributed import HashStore

from graftlab.base.world import Place
from graftlab.ranks import process_setup


def test_each_message_in_a_log_has_the_time_at_which_it_was_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, package = io.StringIO(), logging.Logger("graftlab")
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(process_setup, "_PACKAGE", package)
    process_setup.log_to_stderr()
    expected = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    lines = []
    for created in (0.0, 0.25, 0.75, 61.5, 61.999, 3600.0, 0.5):
        record = logging.LogRecord("graftlab.x", logging.INFO, "", 0, "graft %d", (7,), None)
        record.created, record.msecs = created, created % 1 * 1000
        package.handle(record)
        lines.append(expected.format(record))
    assert shown.getvalue().splitlines() == lines
    package.debug("left out")
    package.info("logged")
    assert shown.getvalue().endswith(" INFO graftlab: logged\n")
    assert len(shown.getvalue().splitlines()) == len(lines) + 1
    assert not package.propagate


def test_a_rank_has_the_notebooks_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec: Any = Mock(environ={"A": "1"}, sys_path=["x"], cwd=str(tmp_path), multiprocessing="spawn", device="cpu")
    spec.place, spec.backend, spec.timeout, spec.threads = Place("target", 1, 2, 1), "gloo", 2.5, 6
    done = Mock()
    monkeypatch.setattr(process_setup.os, "environ", {"OLD": "1", "A": "0"})
    monkeypatch.setattr(sys, "path", ["old"])
    monkeypatch.chdir("/")
    monkeypatch.setattr(process_setup.multiprocessing, "set_start_method", done.start)
    monkeypatch.setattr(process_setup, "FileStore", done.store)
    monkeypatch.setattr(process_setup, "join_process_group", done.join)
    monkeypatch.setattr(process_setup, "log_to_stderr", done.log)
    process_setup.set_up_process(spec, "store")
    assert (process_setup.os.environ, sys.path, Path.cwd()) == ({"A": "1"}, ["x"], tmp_path)
    more = {"timeout": 2.5, "threads": 6, "local": (1, 2)}
    assert done.mock_calls == [
        call.start("spawn", force=True),
        call.store("store", 2),
        call.join(spec.place, torch.device("cpu"), "gloo", done.store.return_value, **more),
        call.log(),
    ]


def test_a_rank_of_a_job_on_several_machines_has_its_number_on_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    joined: dict[str, Any] = {}
    monkeypatch.setattr(process_setup.os, "environ", {"RANK": "7", "OWN": "x"})
    monkeypatch.setattr(process_setup.torch, "set_num_threads", lambda count: joined.update(threads=count))
    monkeypatch.setattr(
        process_setup.dist, "init_process_group", lambda *args, **options: joined.update(options, backend=args[0])
    )
    place, store, device = Place("target", 3, 4, 2), HashStore(), torch.device("cpu")
    process_setup.join_process_group(place, device, "gloo", store, timeout=2.5, threads=6, local=(1, 2))
    assert process_setup.os.environ == {
        **{"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"},
        "OWN": "x",
    }
    assert joined["timeout"].total_seconds() == 2.5
    assert {name: joined[name] for name in ("backend", "rank", "world_size", "threads")} == {
        **{"backend": "gloo", "rank": 3, "world_size": 4},
        "threads": 6,
    }
    assert joined["store"] is store
