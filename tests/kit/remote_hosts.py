"""A cluster for tests: each rank has its supervisor in this process, and reaches the notebook over TCP."""

from __future__ import annotations

import signal
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotYet
from pathlib import Path

from graftlab.base.world import Place
from graftlab.plan.plan import GraftPlan
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.options import LaunchOptions
from graftlab.remote.launcher import launch_remote_ranks
from graftlab.remote.rank_supervisor import HostFacts, RankEnd, RankSupervisor


class LocalProcess:
    def __init__(self, supervisor: RankSupervisor) -> None:
        self.supervisor = supervisor
        self.ended = Future[RankEnd]()

    def start(self, spec: bytes) -> None:
        def run() -> None:
            # As the threads of Ray's actors.
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                self.ended.set_result(self.supervisor.run(spec))
            except BaseException as error:
                self.ended.set_exception(error)

        threading.Thread(target=run, daemon=True).start()

    def end(self, timeout: float) -> RankEnd | str | None:
        try:
            return self.ended.result(timeout)
        except NotYet:
            return None

    def log_tail(self, timeout: float) -> bytes:
        return self.supervisor.log_tail()

    def signal(self, number: int) -> None:
        self.supervisor.signal(number)

    def release_in_child(self) -> None:
        """The supervisor's own descriptors are closed by the programs that it starts."""


class LocalHosts:
    """``on=LocalHosts()``. ``facts_of`` replaces what its one machine says of itself."""

    host, port, uses_folder, threads, gpus = "127.0.0.1", 0, True, 1, 0.0

    def __init__(self, facts_of: HostFacts | None = None) -> None:
        self.facts_of = facts_of
        self.processes: dict[int, LocalProcess] = {}
        self.released = 0

    def start_ranks(self, options: LaunchOptions, folder: Path, plan: GraftPlan) -> Sequence[RankHandle]:
        return launch_remote_ranks(options, folder, plan, self)

    def reserve(self, options: LaunchOptions, folder: Path) -> LocalHosts:
        self.processes = {n: LocalProcess(RankSupervisor()) for n in range(options.baseline + options.target)}
        return self

    def facts(self) -> list[HostFacts]:
        return [self.facts_of or each.supervisor.facts() for each in self.processes.values()]

    def process(self, place: Place) -> LocalProcess:
        return self.processes[place.world_rank]

    def release(self) -> None:
        self.released += 1
