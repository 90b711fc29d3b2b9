"""All exchanges, for the tests of the contract; a new exchange adds an entry here."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

import pytest
import torch

from kit.gpus import a_world_of_gpus, on_gpu, processes_with_gpus, to_cuda
from kit.mailboxes import Processes, World, a_world, processes

MakeWorld = Callable[..., AbstractContextManager[World]]
"""Makes a graft world of these numbers of baseline and target ranks in this process; options are ``World``'s."""

MakeProcesses = Callable[..., AbstractContextManager[Processes]]
"""Makes one of real processes that run these scripts; arguments are those of ``Processes``."""

WORLDS = [
    pytest.param(a_world, id="shared memory"),
    pytest.param(partial(a_world, tcp=True), id="tcp"),
    pytest.param(partial(a_world_of_gpus, put=on_gpu), id="device"),
]

PROCESSES = [
    pytest.param(processes, id="shared memory"),
    pytest.param(partial(processes, tcp=True), id="tcp"),
    pytest.param(processes_with_gpus, id="device"),
    # A process cannot open its own memory by CUDA IPC, so these ranks are always processes; they share one GPU.
    pytest.param(
        partial(processes, put=to_cuda, proves_ipc=True),
        id="cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
    ),
]
