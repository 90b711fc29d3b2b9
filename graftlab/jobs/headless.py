"""The headless session server: a process that serves the session of jobs without a notebook, and ends with them.

The first job starts it, and gives it a socket that already listens, so that no job connects too early.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from pathlib import Path

import msgspec

from graftlab.base import wire
from graftlab.config import PREFIX, Endpoint, GraftConfig
from graftlab.jobs.rendezvous import Rendezvous
from graftlab.plan.wire import WirePlan, from_wire, to_wire
from graftlab.ranks.options import LaunchOptions

logger = logging.getLogger(__name__)


class ServerOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The server's orders, which the job that starts it writes to its standard input."""

    rendezvous: str
    run_dir: str | None
    listener: int
    baseline: int
    target: int
    timeout: float
    buffer_budget: int
    keep_budget: int
    plan: WirePlan
    endpoint: tuple[str, int] | None
    token: str | None


_decoder = wire.Decoder(ServerOrder)


def start_headless_server(
    config: GraftConfig, rendezvous: Rendezvous, listener: socket.socket, token: str | None
) -> subprocess.Popen[bytes]:
    """Start the session server of these jobs as a separate process, which outlives this one.

    With a ``token`` it also listens at the config's address, for jobs of other machines.
    """
    order = ServerOrder(
        rendezvous=str(rendezvous.folder),
        run_dir=config.run_dir,
        listener=listener.fileno(),
        baseline=config.world_size("baseline"),
        target=config.world_size("target"),
        timeout=config.timeout,
        buffer_budget=config.buffer_budget,
        keep_budget=config.keep_budget,
        plan=to_wire(config.plan()),
        endpoint=config.endpoint if token is not None else None,
        token=token,
    )
    environ = {name: value for name, value in os.environ.items() if not name.startswith((PREFIX, "DUMPER_"))}
    if home := os.environ.get(f"{PREFIX}HOME"):
        environ[f"{PREFIX}HOME"] = home
    environ["PYTHONPATH"] = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str))
    log = os.open(
        rendezvous.folder / "session-server.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600
    )
    try:
        process = subprocess.Popen(
            [sys.executable, "-P" if sys.version_info >= (3, 11) else "-B", "-m", "graftlab.jobs.headless"],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            env=environ,
            pass_fds=[listener.fileno()],
            # A signal to the job's process group must not end the other jobs' session.
            start_new_session=True,
        )
    finally:
        os.close(log)
    assert process.stdin is not None
    with process.stdin as stdin:
        stdin.write(wire.encode(order))
    return process


def main() -> int:
    """Serve the session until the last job is gone."""
    # Imported here, because a job imports this module to start the server, and needs nothing of the notebook's side.
    from graftlab.control.core import SessionCore
    from graftlab.control.run_folder import make_run_folder
    from graftlab.jobs.session_server import open_session_server

    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    order: ServerOrder = _decoder.decode(sys.stdin.buffer.read())
    listener = socket.socket(fileno=order.listener)
    listener.set_inheritable(False)
    folder = make_run_folder(order.run_dir)
    options = LaunchOptions(
        order.baseline,
        order.target,
        timeout=order.timeout,
        buffer_budget=order.buffer_budget,
        keep_budget=order.keep_budget,
    )
    session, server = open_session_server(
        SessionCore,
        options,
        from_wire(order.plan),
        folder,
        Rendezvous(Path(order.rendezvous)),
        listener,
        # Jobs that are started again append to their folder, with a new run each time.
        append=True,
        agreed=True,
        listen_at=None if order.endpoint is None else (Endpoint(*order.endpoint), order.token),
    )
    logger.info("rows go to %s", folder)
    with session:
        # The job that started this may have died before it joined.
        while not server.over.wait(order.timeout):
            if server.is_empty:
                logger.error("no job has joined within %g s", order.timeout)
                return 1
    logger.info("all jobs are gone; %d rows", session.row_count)
    return 0


if __name__ == "__main__":
    sys.exit(main())
