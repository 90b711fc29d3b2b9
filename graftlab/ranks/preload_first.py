"""Imported first, by the forkserver alone: turns off garbage collection, a tenth of torch's import time.

Imported objects stay anyway. :mod:`graftlab.ranks.preload_last`, which is imported last, turns it on again.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

VARIABLE = "GRAFTLAB_FORKSERVER_OF"
"""The environment variable of the forkserver: the process that starts it, and the temporary folder of that process."""

on_interrupt: Any = signal.SIG_DFL
"""The original interrupt handler. Interrupts are ignored during the imports, or the stop button would end this process,
and the next launch might find it dying."""

if VARIABLE in os.environ:
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
