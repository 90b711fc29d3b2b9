"""The forkserver's first import: turns off garbage collection, which takes a tenth of torch's import.

Imported objects stay anyway. :mod:`graftlab.ranks.preload_last`, which is imported last, turns it on again.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

VARIABLE = "GRAFTLAB_FORKSERVER_OF"
"""The forkserver's environment variable with the process that starts it, and that process's temporary folder."""

on_interrupt: Any = signal.SIG_DFL
"""The original interrupt handler. The imports ignore interrupts, or the stop button would end this process, and the
next launch might find it dying.
"""

if VARIABLE in os.environ:
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    # It was started with interrupts blocked, or one would have ended it before it could ignore them.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.disable()
