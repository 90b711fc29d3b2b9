"""Imported first by the forkserver alone: torch is imported in nine tenths of the time without garbage collections.

What is imported is there to stay. :mod:`graftlab.ranks.tidying`, which is imported last, turns them on again.
"""

from __future__ import annotations

import gc
import os

VARIABLE = "GRAFTLAB_FORKSERVER_OF"
"""Set for the forkserver: the process that starts it, and that one's folder for temporary files."""

if VARIABLE in os.environ:
    gc.disable()
