"""The agent of a host, with real jobs: who starts it, what it carries, and what ends when it does, or a job."""

from __future__ import annotations

import os
import re
import select
import shutil
import signal
import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from kit import warm
from kit.deadline import DEADLINE
from kit.job_scripts import end, start, variables
from kit.support import wait_until

import graftlab as gl
from graftlab.base.world import Place
from graftlab.config import GraftConfig
from graftlab.exchange.keys import derive_keys, new_token
from graftlab.exchange.tcp import RouterSocket
from graftlab.jobs.entering import Entrance
from graftlab.jobs.greeting import Refused, pack
from graftlab.jobs.trunk import HELLO, HOST

pytestmark = [pytest.mark.ranks, pytest.mark.timeout(600)]

ESTABLISHED = "01"


class Meeting:
    """Where jobs of this host meet that join a session at a port of it, as if it were another host's."""

    def __init__(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.address = f"tcp://127.0.0.1:{self.port}"
        self.token = new_token()
        self.folder = Path("/tmp") / f"graftlab-{os.getuid()}" / f"graftlab-{self.port}"

    def told(self, **settings: object) -> dict[str, object]:
        return {"address": self.address, "token": self.token, "timeout": 2 * DEADLINE, **settings}

    @property
    def log(self) -> str:
        path = self.folder / "agent.log"
        return path.read_text() if path.exists() else ""

    @property
    def agents(self) -> list[int]:
        """The processes that began, the first one first."""
        return [int(pid) for pid in re.findall(r"agent (\d+) for 127\.0\.0\.1:\d+ begins", self.log)]

    @property
    def sockets(self) -> list[Path]:
        return list((self.folder / ".meeting").glob("agent-*"))

    @property
    def connections(self) -> int:
        """How many there are at the session's port."""
        tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
        lines = [line.split() for line in tables.splitlines() if "local_address" not in line]
        return sum(int(each[1].rpartition(":")[2], 16) == self.port and each[3] == ESTABLISHED for each in lines)


@pytest.fixture
def meeting() -> Iterator[Meeting]:
    made = Meeting()
    yield made
    for pid in made.agents:
        if is_running(pid):
            os.kill(pid, signal.SIGKILL)
    shutil.rmtree(made.folder, ignore_errors=True)


@pytest.fixture
def stop(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "stop"
    yield path
    path.touch()


def is_running(pid: int) -> bool:
    try:
        return b"graftlab.jobs.agent" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def until_in_stderr(job: warm.Running, what: str) -> str:
    """All that the job says up to a line in which this stands."""
    said = ""
    assert job.stderr is not None
    for line in job.stderr:
        said += line
        if what in line:
            return said
    raise AssertionError(f"{what!r} is not in {said!r}")


def all_go_on(session: gl.Session, ranks: int = 3) -> bool:
    return int(session.status()["state"].isin(["running", "waiting"]).sum()) == ranks


def goes_through(session: gl.Session) -> set[int]:
    """The agents of all ranks; none while a rank has none."""
    found = [re.match(r"agent (\d+) on ", line) for line in session.status()["line"]]
    return {int(each[1]) for each in found if each} if all(found) else set()


def test_the_jobs_of_a_host_share_one_agent_and_outlive_it(tmp_path: Path, meeting: Meeting, stop: Path) -> None:
    folder = tmp_path / "run"

    def listen(append: bool = False) -> gl.Session:
        return gl.listen(
            1, 2, address=meeting.address, token=meeting.token, folder=folder, append=append, timeout=2 * DEADLINE
        )

    def begin(role: str, rank: int = 0, size: int = 1) -> warm.Running:
        ranked = {"RANK": str(rank), "WORLD_SIZE": str(size)}
        own = variables(role, 1, 2, **meeting.told(run_dir=tmp_path / f"{role} {rank}"))
        return start("goes_on.py", stop, 1.0, **own, **ranked)

    session = listen()
    jobs = [begin("baseline"), begin("target", 0, 2), begin("target", 1, 2)]
    wait_until(lambda: session.row_count > 4 and all_go_on(session), "rows")
    # They began at once, and one of them started it for all.
    first = meeting.agents
    assert len(first) == 1
    assert meeting.connections == 1
    log = tmp_path / "target 1" / "logs" / "target-1.log"
    said = f"target[1]: what it says goes through agent {first[0]} of this host"
    wait_until(lambda: said in log.read_text(), "word of the agent")
    # No word of the token, nothing of the jobs' memory, no torch; and it is no child of a job's.
    process = Path(f"/proc/{first[0]}")
    assert meeting.token.encode() not in (process / "environ").read_bytes() + (process / "cmdline").read_bytes()
    maps = (process / "maps").read_text()
    assert "torch" not in maps
    assert "memfd:graftlab" not in maps
    assert os.getsid(first[0]) not in [os.getsid(job.pid) for job in jobs]
    assert set(session.status()["line"]) == {f"agent {first[0]} on {socket.gethostname()}"}
    assert session.stacks().keys() == {"baseline[0]", "target[0]", "target[1]"}

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(first[0], number)
    before = session.row_count
    wait_until(lambda: session.row_count > before + 3 * 2 * 10, "rows after signals that it ignores")
    assert is_running(first[0])

    os.kill(first[0], signal.SIGKILL)
    for job in jobs:
        told = until_in_stderr(job, f"agent {first[0]}, which carried what the jobs of this host say, ended")
        assert "went away" not in told
    wait_until(lambda: goes_through(session) - {first[0]} and all_go_on(session), "the jobs' return")
    before = session.row_count
    wait_until(lambda: session.row_count > before, "rows through the next agent")
    second = meeting.agents[1:]
    assert len(second) == 1
    assert goes_through(session) == set(second)
    assert session.runs[-1].failures == {}
    assert session.status()["note"].str.contains("rows were made while nobody listened, and are lost").any()
    assert session.edit(keep="layer == 0").keep == "layer == 0"

    session.close()
    for job in jobs:
        until_in_stderr(job, "whoever held the session went away")
    session = listen(append=True)
    wait_until(lambda: all_go_on(session), "the jobs at the next notebook")
    # The agent of before, unless it had ended by then.
    assert goes_through(session) == {meeting.agents[-1]}

    # One is killed: its line ends, and the others do not notice.
    jobs[2].kill()
    wait_until(lambda: session.status()["state"][2].startswith("gone"), "the end of the killed one's line")
    assert all_go_on(session, 2)
    before = session.row_count
    wait_until(lambda: session.row_count > before, "rows of the others")
    stop.touch()
    for job in jobs[:2]:
        code, out, err = end(job)
        assert (code, out) == (0, "went on True\n"), err
        assert "rejoin" not in err
    end(jobs[2])
    wait_until(lambda: not any(map(is_running, meeting.agents)), "the end of the agent")
    assert meeting.sockets == []
    assert meeting.log.rstrip().endswith("ends: it has had no line for 2 s")
    session.close()


def test_without_an_agent_each_job_has_a_connection_of_its_own_and_says_why(tmp_path: Path, meeting: Meeting) -> None:
    # Where its log cannot be written it does not begin; and one of the jobs wants none.
    (meeting.folder / "agent.log").mkdir(parents=True, mode=0o700)
    told = meeting.told(run_dir=tmp_path / "run")
    with gl.listen(address=meeting.address, token=meeting.token, folder=tmp_path / "notebook") as session:
        jobs = [
            start("trusted_model.py", **variables("baseline", 1, 1, **told)),
            start("trusted_model.py", **variables("target", 1, 1, **told, agent=0)),
        ]
        assert [end(job)[:2] for job in jobs] == [(0, "done True\n")] * 2
        wait_until(lambda: session.runs[-1].done, "the end of the run")
        assert set(session.status()["line"]) == {"TCP"}
        assert session.row_count == 9
    logs = [(tmp_path / "run" / "logs" / f"{side}-0.log").read_text() for side in ("baseline", "target")]
    assert "baseline[0]: what it says goes on a connection of its own: [Errno 21] Is a directory" in logs[0]
    assert (
        "target[0]: what it says goes on a connection of its own: agent is switched off (GRAFTLAB_AGENT=0)" in logs[1]
    )
    (meeting.folder / "agent.log").rmdir()


def test_a_holder_that_takes_no_lines_of_agents_is_asked_directly(meeting: Meeting) -> None:
    refused = pack(Refused("what it said is no greeting", settings=False))
    post = RouterSocket(derive_keys(meeting.token), HOST, "127.0.0.1", (meeting.port,))
    said: list[bytes] = []

    def answer() -> None:
        while not said or said[-1].startswith(HELLO):
            select.select([post], [], [], DEADLINE)
            for channel, frames in post.collect():
                said.extend(frames)
                for _ in frames:
                    channel.send(refused)

    older = threading.Thread(target=answer)
    older.start()
    config = GraftConfig(
        role="baseline", baseline_world_size=1, target_world_size=1, address=meeting.address, token=meeting.token
    )
    entrance = Entrance(Place("baseline", 0, 1, 1), config)
    with pytest.raises(gl.SessionError, match="what it said is no greeting"):
        entrance.enter()
    older.join(DEADLINE)
    post.close()
    assert entrance.why_no_agent == "whoever holds the session takes no lines of agents"
    assert [frame.startswith(HELLO) for frame in said] == [True, False]
    assert len(meeting.agents) == 1
