"""Start and end the ranks, from the notebook.

Everything that the ranks share is created here and passed as open descriptors: memory without a name and sockets
without an address. So other users have nothing to open, and nothing is left behind.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import select
import socket
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import torch.multiprocessing

from graftlab.base.world import Place
from graftlab.errors import LaunchError, WaitInterrupted
from graftlab.exchange.channel import SocketChannel
from graftlab.plan.plan import GraftPlan
from graftlab.plan.wire import WirePlan, to_wire
from graftlab.ranks import forkserver
from graftlab.ranks.descriptors import MEMORY_FILES, SharedDescriptors, send_descriptors
from graftlab.ranks.devices import DeviceAssignment, assign_devices
from graftlab.ranks.entry import enter
from graftlab.ranks.handle import RankHandle
from graftlab.ranks.messages import Dispatch, Hello, Output, Shutdown, pack, unpack_from_rank
from graftlab.ranks.options import LaunchOptions, RankSpec
from graftlab.ranks.rank_process import RankProcess

logger = logging.getLogger(__name__)


def launch_ranks(options: LaunchOptions, folder: Path, plan: GraftPlan) -> Sequence[RankHandle]:
    """Start every rank under this plan, and wait until each has sent its :class:`Hello`.

    ``folder`` gets the logs. Raises :class:`LaunchError` with the end of the log when a rank dies or is not
    ready in time; then all of them have ended.
    """
    if options.on is not None:
        return options.on.start_ranks(options, folder, plan)
    places = Place("baseline", 0, options.baseline, options.target).everyone()
    assignments = assign_devices(places, options.device, options.backend)
    given_up, give_up = socket.socketpair()
    launching = forkserver.on_starter(_launch, options, folder, to_wire(plan), places, assignments, given_up)
    try:
        return launching.result()
    except KeyboardInterrupt:
        # The stop button ended only this wait. The launch on the other thread continues, and its ranks would stay.
        # They end there, too, because another press of the button would end a wait for that.
        give_up.send(b"x")
        launching.add_done_callback(_abandon_launched)
        raise WaitInterrupted("the launch was stopped, and its ranks end; no session was opened") from None
    finally:
        for end in (given_up, give_up):
            launching.add_done_callback(partial(_close, end))


def end_ranks(ranks: Sequence[RankHandle], patience: float = 2.0) -> None:
    """End every rank: ask them to end, wait ``patience`` seconds in all, and kill the rest.

    Their last messages can still be read until :meth:`RankProcess.release`.
    """
    for rank in ranks:
        rank.channel.send(pack(Shutdown()))
    deadline = time.monotonic() + patience
    left = list(ranks)
    try:
        left = [rank for rank in ranks if not rank.join(max(0.0, deadline - time.monotonic()))]
    finally:
        # Even if the stop button ended the wait. All are killed before any is waited for, or the last ones would see
        # their peers die, and raise.
        for rank in left:
            rank.kill()
    for rank in left:
        rank.join(5.0)
    for rank in ranks:
        rank.alive = False


def _launch(
    options: LaunchOptions,
    folder: Path,
    plan: WirePlan,
    places: list[Place],
    assignments: list[DeviceAssignment],
    given_up: socket.socket,
) -> list[RankProcess]:
    if options.start_method == "forkserver":
        try:
            forkserver.prepare()
        except OSError as error:
            raise LaunchError(
                f"the forkserver, which starts the ranks, cannot be started: {error}; its socket is in the folder "
                f"for temporary files, so set TMPDIR to one that exists and has a short path, or pass "
                f"start_method='spawn'"
            ) from error
    shared = SharedDescriptors(places)
    ranks: list[RankProcess] = []
    try:
        shared.make(stores=folder)
        for place, assignment in zip(places, assignments, strict=True):
            ranks.append(_start(options, folder, plan, place, assignment, shared))
        _await_hellos(ranks, options.timeout, given_up)
        return ranks
    except BaseException as error:
        _abandon(ranks)
        if isinstance(error, EOFError):
            raise LaunchError(
                "the forkserver, which starts the ranks, died; launch again to start a new one"
            ) from error
        if isinstance(error, OSError):
            raise LaunchError(f"the ranks could not be started: {error}") from error
        raise
    finally:
        shared.release()


def _close(end: socket.socket, _: object) -> None:
    end.close()


def _abandon_launched(launching: Future[list[RankProcess]]) -> None:
    if launching.exception() is None:
        _abandon(launching.result())


def _abandon(ranks: list[RankProcess]) -> None:
    end_ranks(ranks, patience=0)
    for rank in ranks:
        rank.release()


def _start(
    options: LaunchOptions,
    folder: Path,
    plan: WirePlan,
    place: Place,
    assignment: DeviceAssignment,
    shared: SharedDescriptors,
) -> RankProcess:
    log = folder / "logs" / f"{place.side}-{place.rank}.log"
    stacks = log.with_suffix(".stacks")
    spec = RankSpec(
        place=place,
        device=assignment.device,
        backend=assignment.backend,
        store="" if MEMORY_FILES else str(folder / f"{place.side}.store"),
        log=str(log),
        stacks=str(stacks),
        segment_size=shared.segment_size,
        timeout=options.timeout,
        tap_timeout=options.tap_limit,
        multiprocessing=multiprocessing.get_start_method(allow_none=True),
        buffer_budget=options.buffer_budget,
        keep_budget=options.keep_budget,
        threads=max(1, (os.cpu_count() or 1) // len(place.everyone())),
        plan=plan,
        environ=_environment(),
        sys_path=list(sys.path),
        cwd=os.getcwd(),
    )
    context: Any = torch.multiprocessing.get_context(options.start_method)
    ours, theirs = socket.socketpair()
    wake_socket, their_wake = socket.socketpair()
    death_pipe, their_death_pipe = socket.socketpair()
    with theirs, their_wake, their_death_pipe:
        try:
            with forkserver.hidden_main():
                process = context.Process(target=enter, args=(spec, theirs), name=f"graftlab-{place.label}")
                process.start()
            send_descriptors(ours, [*shared.of(place), their_wake.fileno(), their_death_pipe.fileno()])
        except BaseException:
            for mine in (ours, wake_socket, death_pipe):
                mine.close()
            raise
    segment = shared.segments[place.world_rank]
    return RankProcess(place, assignment, process, SocketChannel(ours), wake_socket, death_pipe, segment, log, stacks)


def _environment() -> dict[str, str]:
    environ = dict(os.environ)
    # All ranks are on this machine: collectives need only the loopback interface, and other machines no access.
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    return environ


def _await_hellos(ranks: list[RankProcess], timeout: float, given_up: socket.socket) -> None:
    deadline = time.monotonic() + timeout
    poller = select.poll()
    expected = {rank.channel.fileno(): rank for rank in ranks}
    for descriptor in (*expected, given_up.fileno()):
        poller.register(descriptor, select.POLLIN)

    def on_hello(hello: Hello, rank: RankProcess) -> None:
        rank.pid = hello.pid
        poller.unregister(rank.channel.fileno())
        del expected[rank.channel.fileno()]

    handle = Dispatch[[RankProcess], None]()
    handle.on(Hello, on_hello)
    handle.on(Output, lambda output, rank: logger.info("%s: %s", rank.label, output.text.rstrip()))
    while expected:
        remaining = deadline - time.monotonic()
        ready = poller.poll(max(0.0, remaining) * 1000)
        if not ready and remaining <= 0:
            late = next(iter(expected.values()))
            raise LaunchError(
                f"{', '.join(rank.label for rank in expected.values())} did not become ready within {timeout:g} s; "
                f"pass a larger timeout if that is too short. The log of {late.label} ({late.log}) ends:\n"
                f"{late.log_tail()}"
            )
        for descriptor, _ in ready:
            if descriptor == given_up.fileno():
                raise LaunchError("the launch was interrupted")
            rank = expected[descriptor]
            for frame in rank.channel.receive():
                message = unpack_from_rank(frame)
                if not isinstance(message, bytes):
                    handle(message, rank)
            if rank.channel.closed:
                raise LaunchError(
                    f"{rank.label} died while starting ({rank.how_it_ended()}). Its log ({rank.log}) ends:\n"
                    f"{rank.log_tail()}"
                )
