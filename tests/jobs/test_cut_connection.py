"""A job whose TCP connection to its session is cut while both live on."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit.deadline import DEADLINE
from kit.job_scripts import end, start, variables
from kit.support import wait_until

import graftlab as gl
from graftlab.exchange.keys import new_token

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]


class Cable:
    """Forwards TCP connections from its port to another."""

    def __init__(self, port: int) -> None:
        self.far_port = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._accepting = threading.Thread(target=self._accept, daemon=True)
        self._accepting.start()
        self._forwarding: list[threading.Thread] = []

    def cut(self) -> None:
        """End every connection; new ones are forwarded."""
        for each in list(self._ends):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        # Ends the accept that the thread waits in, as closing does not.
        self._listener.shutdown(socket.SHUT_RDWR)
        self._accepting.join()
        self.cut()
        for thread in self._forwarding:
            thread.join()
        for each in (self._listener, *self._ends):
            each.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                self._ends.append(near)
                far = socket.create_connection(("127.0.0.1", self.far_port))
                self._ends.append(far)
                for source, sink in ((near, far), (far, near)):
                    self._forwarding.append(threading.Thread(target=self._forward, args=(source, sink), daemon=True))
                    self._forwarding[-1].start()

    @staticmethod
    def _forward(source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def cable() -> Iterator[Cable]:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    made = Cable(port)
    yield made
    made.close()


def test_a_job_whose_connection_is_cut_joins_the_same_session_and_run_again(tmp_path: Path, cable: Cable) -> None:
    stop, token = tmp_path / "stop", new_token()
    address, via_cable = f"tcp://127.0.0.1:{cable.far_port}", f"tcp://127.0.0.1:{cable.port}"
    with gl.listen(1, 1, address=address, token=token, folder=tmp_path / "run", timeout=2 * DEADLINE) as session:
        settings = {"token": token, "timeout": 2 * DEADLINE}
        given = variables("baseline", 1, 1, address=address, run_dir=tmp_path / "baseline", **settings)
        jobs = [start("goes_on.py", stop, 1.0, **given)]
        given = variables("target", 1, 1, address=via_cable, run_dir=tmp_path / "target", **settings)
        jobs.append(start("goes_on.py", stop, 1.0, **given))
        wait_until(lambda: session.row_count > 4, "rows")
        cable.cut()
        log = tmp_path / "target" / "logs" / "target-0.log"
        wait_until(lambda: "target[0] has joined its session again" in log.read_text(), "the job's return")
        before = session.row_count
        wait_until(lambda: session.row_count > before + 4, "rows after the cut")
        assert session.status()["note"].str.contains("rows were made while no session listened, and are lost").any()
        assert session.edit(keep="layer == 0").keep == "layer == 0"
        assert len(session.runs) == 1
        assert session.runs[-1].failures == {}
        stop.touch()
        assert [end(job)[:2] for job in jobs] == [(0, "went on True\n")] * 2
