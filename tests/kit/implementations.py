"""Every exchange that there is, for the tests of what they all promise: a new one is one more entry here."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch

from kit.gpus import a_world_of_gpus, on_gpu, processes_with_gpus, to_cuda
from kit.mailboxes import Processes, World, a_world, processes
from kit.wire_gpus import WIRES, nccl_of_rank, processes_with_wires

MakeWorld = Callable[..., AbstractContextManager[World]]
"""Makes a graft world of so many baseline and target ranks, all in this process; options are ``World``'s."""

MakeProcesses = Callable[..., AbstractContextManager[Processes]]
"""Makes one of real processes that run these scripts; arguments are those of ``Processes``."""

WORLDS = [
    pytest.param(a_world, id="shared memory"),
    pytest.param(partial(a_world, tcp=True), id="tcp"),
    pytest.param(partial(a_world_of_gpus, put=on_gpu), id="device"),
    pytest.param(WIRES, id="wires"),
]

PROCESSES = [
    pytest.param(processes, id="shared memory"),
    pytest.param(partial(processes, tcp=True), id="tcp"),
    pytest.param(processes_with_gpus, id="device"),
    pytest.param(processes_with_wires, id="wires"),
    # CUDA gives no process a second view of its own memory, so its ranks are always processes; they share one GPU.
    pytest.param(
        partial(processes, put=to_cuda, opens_the_way=True),
        id="cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
    # NCCL joins no GPU to itself.
    pytest.param(
        partial(processes, tcp=True, wire=nccl_of_rank, put=to_cuda),
        id="nccl",
        marks=pytest.mark.skipif(
            torch.cuda.device_count() < 2 or importlib.util.find_spec("nccl") is None,
            reason="needs two GPUs and nccl4py",
        ),
    ),
]
