"""Imported first by the forkserver alone: torch is imported in nine tenths of the time without garbage collections.

What is imported is there to stay. :mod:`graftlab.ranks.preload_last`, which is imported last, turns them on again.
"""

from __future__ import annotations

import gc
import os
import signal
from typing import Any

VARIABLE = "GRAFTLAB_FORKSERVER_OF"
"""Set for the forkserver: the process that starts it, and that one's folder for temporary files."""

on_interrupt: Any = signal.SIG_DFL
"""What an interrupt did before. Ignored meanwhile: the stop button would end this process, and the next launch meet it
while it dies."""

if VARIABLE in os.environ:
    on_interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    gc.disable()
