"""The function in which a rank's process begins.

It stands apart from the worker, which imports everything that a rank needs: the notebook imports only this module.
"""

from __future__ import annotations

import os
import socket

from graftlab.ranks.options import RankSpec
from graftlab.ranks.streams import redirect_to


def enter(spec: RankSpec, connection: socket.socket) -> None:
    """Become a rank; never returns."""
    # A new session: the stop button's SIGINT goes to the notebook's process group, and must not end the ranks.
    os.setsid()
    # Before anything that can fail: the notebook shows the end of this log when a rank dies before its hello.
    redirect_to(spec.log)
    from graftlab.ranks.worker import main

    main(spec, connection)
