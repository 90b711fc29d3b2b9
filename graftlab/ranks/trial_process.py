"""Trials of a draft, each in a separate process, so that a draft that loops forever or exits harms no rank."""

from __future__ import annotations

import multiprocessing.connection
import os
import pickle
import sys
from dataclasses import dataclass

import torch

from graftlab.base import shipping
from graftlab.errors import SessionError
from graftlab.grafting.trial import Trial, try_draft
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.forkserver import start_process
from graftlab.ranks.process_end import die_with_notebook, end_programs_of
from graftlab.transforms.spec import Specs

# Seconds for the process to import its modules; the draft's own time begins after that.
_START_LIMIT = 60.0


@dataclass(frozen=True)
class _TrialSpec:
    draft: Specs
    plan: GraftPlan
    kept: bytes | None
    device: str
    environ: dict[str, str]
    sys_path: list[str]
    cwd: str


def try_in_process(draft: Specs, plan: GraftPlan, kept: bytes | None, device: str, limit: float) -> Trial:
    """Run :func:`graftlab.grafting.trial.try_draft` in a fresh process, for ``limit`` seconds at most.

    ``plan`` is the one in force, ``kept`` a packed :class:`graftlab.grafting.kept.KeptPair`.
    """
    ours, theirs = multiprocessing.connection.Pipe()
    spec = _TrialSpec(draft, plan, kept, device, dict(os.environ), list(sys.path), os.getcwd())
    with ours:
        with theirs:
            process = start_process(_enter, (theirs,), "graftlab-trial")
        try:
            ours.send_bytes(pickle.dumps(spec))
            if not ours.poll(_START_LIMIT):
                raise SessionError(f"the process of the trial was not ready within {_START_LIMIT:g} s")
            ours.recv_bytes()
            if not ours.poll(limit):
                return Trial(error=f"the draft did not end within {limit:g} s and was stopped; does it loop forever?")
            trial: Trial = pickle.loads(ours.recv_bytes())
            return trial
        except (EOFError, OSError):
            process.join(5.0)
            return Trial(error=f"the draft ended its process (exit code {process.exitcode})")
        finally:
            process.kill()
            process.join(5.0)
            if process.pid is not None:
                end_programs_of(process.pid)


def _enter(connection: multiprocessing.connection.Connection) -> None:
    spec: _TrialSpec = pickle.loads(connection.recv_bytes())
    # Its own session, so that the stop button's signal reaches the notebook alone.
    os.setsid()
    os.environ.clear()
    os.environ.update(spec.environ)
    sys.path[:] = spec.sys_path
    os.chdir(spec.cwd)
    # Output of C code is dropped; output of Python code is in the result.
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    kept = None if spec.kept is None else shipping.unpack_result(spec.kept)
    connection.send_bytes(b"ready")
    # The notebook sends nothing more, so any event on the connection means that it has ended.
    die_with_notebook(connection.fileno())
    connection.send_bytes(pickle.dumps(try_draft(spec.draft, kept, device_here(spec.device), spec.plan)))


def device_here(device: str) -> str:
    """The device of a rank, or the CPU where this machine has no such device: the rank may be elsewhere."""
    wanted = torch.device(device)
    return device if wanted.type != "cuda" or (wanted.index or 0) < torch.cuda.device_count() else "cpu"
