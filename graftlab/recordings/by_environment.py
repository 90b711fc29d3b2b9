"""Recording requested by ``GRAFTLAB_RECORD=folder``, from the process's first tap until its end."""

from __future__ import annotations

import os
from contextlib import ExitStack
from multiprocessing.util import Finalize

from graftlab.grafting import active
from graftlab.recordings.recorder import record
from graftlab.taps import calls

FOLDER, FILTER = "GRAFTLAB_RECORD", "GRAFTLAB_RECORD_FILTER"


class FirstTapRecorder(active.FirstTap):
    """Starts the recording at the first tap or step, when the job knows which rank this process is."""

    def begin(self) -> calls.RankTapHandler | None:
        import torch

        calls.deactivate()
        # A data loader's worker is not a rank, even if it reaches taps.
        if torch.utils.data.get_worker_info() is None:
            recording = ExitStack()
            recording.enter_context(record(os.environ[FOLDER], os.environ.get(FILTER, "True")))
            # Not atexit, whose functions do not run in processes that multiprocessing has started.
            Finalize(recording, recording.close, exitpriority=100)
        return calls.grafter()


def record_by_environment() -> bool:
    """Record from the first tap on if the environment asks for it; return whether it does."""
    if not os.environ.get(FOLDER):
        return False
    if not isinstance(calls.grafter(), FirstTapRecorder):
        active.install_handler(FirstTapRecorder(), None)
    return True
