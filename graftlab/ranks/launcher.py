"""Starting and ending the ranks: the notebook's side of the processes.

All ranks are started from one long-lived thread of the kernel, by a forkserver that has imported torch already. What
they share is made here and handed over as open descriptors: memory without a name, sockets without an address. So there
is nothing that another user could open, and nothing that could stay behind.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import multiprocessing.forkserver
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, get_args

import torch.multiprocessing

from graftlab.base.world import MAX_RANKS, Place
from graftlab.errors import LaunchError
from graftlab.exchange.arena import PAGE, create_segment
from graftlab.exchange.channel import Channel
from graftlab.exchange.whereabouts import Whereabouts, WhereaboutsPage
from graftlab.ranks.devices import Seat, assign
from graftlab.ranks.entry import enter
from graftlab.ranks.messages import Hello, Output, Shutdown, pack, unpack
from graftlab.ranks.spec import FDS_A_MESSAGE, RankSpec

logger = logging.getLogger(__name__)

StartMethod = Literal["forkserver", "spawn"]

_WORKER = "graftlab.ranks.worker"
_MEMORY_FILES = hasattr(os, "memfd_create")
# Ranks belong to the thread that started them as far as the system's parent-death signals go, so it must not end.
_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="graftlab-launcher")


@dataclass(frozen=True)
class LaunchOptions:
    """How to start the ranks; budgets are in bytes a rank, ``timeout`` in seconds."""

    baseline: int
    target: int
    device: str | None = None
    backend: str | None = None
    timeout: float = 60.0
    start_method: StartMethod = "forkserver"
    buffer_budget: int = 256 << 20
    keep_budget: int = 256 << 20


class RankProcess:
    """One rank as the notebook sees it."""

    def __init__(
        self,
        place: Place,
        seat: Seat,
        process: BaseProcess,
        channel: Channel,
        bell: socket.socket,
        lifeline: socket.socket,
        segment: int,
        log: Path,
        stacks: Path,
    ) -> None:
        self.place = place
        self.seat = seat
        self.channel = channel
        self.bell = bell
        self.log = log
        self.stacks_file = stacks
        self.pid: int | None = None
        self.alive = True
        self._process = process
        self._ended: str | None = None
        self._lifeline = lifeline
        self._map = mmap.mmap(segment, PAGE, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        self._page = WhereaboutsPage(self._map)
        self._last_look = Whereabouts()

    @property
    def label(self) -> str:
        return self.place.label

    def whereabouts(self) -> Whereabouts:
        """Where the rank is at this moment, or was when it was let go."""
        try:
            return self._page.read()
        except ValueError:
            return self._last_look

    def signal(self, number: int) -> None:
        if self.alive and self.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def join(self, timeout: float) -> bool:
        """Wait for the process to end; False when it has not within ``timeout`` seconds."""
        if self._ended is not None:
            return True
        self._process.join(timeout)
        return self._process.exitcode is not None

    def kill(self) -> None:
        self._process.kill()

    def let_go(self) -> None:
        """Close what ties the process to the notebook; a rank that were still there would end now."""
        self.alive = False
        self.channel.close()
        self.bell.close()
        self._lifeline.close()
        # Even one mapped page would keep all that the rank ever published in memory.
        self._last_look = self.whereabouts()
        self._map.close()
        if self._ended is None:
            self._ended = self.how_it_ended()
            if self.pid is not None:
                # torch counts who uses shared CUDA memory in files of such names, which only a clean exit removes.
                for left in Path("/dev/shm").glob(f"torch_{self.pid}_*"):
                    left.unlink(missing_ok=True)
            # A process that cannot be killed keeps its descriptor; any other gives it back now, not at some collection.
            with contextlib.suppress(ValueError):
                self._process.close()

    def leave_to_the_parent(self) -> None:
        """In a forked child of the notebook's process, which would keep the rank alive beyond the notebook."""
        self._lifeline.close()

    def how_it_ended(self) -> str:
        """In words, such as ``"killed by SIGKILL"``."""
        if self._ended is not None:
            return self._ended
        self._process.join(1.0)
        code = self._process.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            with contextlib.suppress(ValueError):
                return f"killed by {signal.Signals(-code).name}"
        return f"ended with exit code {code}"

    def log_tail(self, lines: int = 30) -> str:
        """The last lines that the rank wrote to its log."""
        try:
            text = self.log.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return "(nothing: the process had not come as far as its log; see what the notebook itself printed)"
        except OSError as error:
            return f"(no log: {error})"
        return "\n".join(text.splitlines()[-lines:]) or "(nothing)"


def launch_ranks(options: LaunchOptions, folder: Path) -> list[RankProcess]:
    """Start every rank and wait until each has said hello.

    ``folder`` gets the logs. Raises :class:`LaunchError` with the log's tail when a rank dies or is not ready in
    time; then none is left.
    """
    for side, count in (("baseline", options.baseline), ("target", options.target)):
        if not isinstance(count, int) or count < 1:
            raise LaunchError(f"{side}={count!r}: each side needs a whole number of ranks, at least one")
    if options.baseline + options.target > MAX_RANKS:
        raise LaunchError(
            f"baseline={options.baseline}, target={options.target}: a graft world has at most {MAX_RANKS} ranks, both "
            f"sides together"
        )
    if options.start_method not in get_args(StartMethod):
        raise LaunchError(f"start_method={options.start_method!r}: ranks start by 'forkserver' or 'spawn'")
    if not options.timeout > 0:
        raise LaunchError(f"timeout={options.timeout!r}: give seconds, more than 0")
    places = Place("baseline", 0, options.baseline, options.target).everyone()
    seats = assign(places, options.device, options.backend)
    given_up, give_up = socket.socketpair()
    with given_up, give_up:
        launching = _starter.submit(_launch, options, folder, places, seats, given_up)
        try:
            return launching.result()
        except BaseException:
            # The stop button ends the wait here, not the launch over there; nobody would ever end those ranks.
            give_up.send(b"x")
            wait([launching])
            if launching.exception() is None:
                end_ranks(launching.result(), patience=0)
                for rank in launching.result():
                    rank.let_go()
            raise


def warm_up() -> None:
    """Start the forkserver, which imports torch, before the first launch needs it. Returns at once."""
    _starter.submit(_prepare_forkserver)


def start_process(target: Callable[..., None], args: tuple[Any, ...], name: str) -> BaseProcess:
    """Start another process the way ranks are started, from the same thread and the same warm forkserver."""

    def start() -> BaseProcess:
        _prepare_forkserver()
        process = torch.multiprocessing.get_context("forkserver").Process(target=target, args=args, name=name)
        with _hidden_main():
            process.start()
        return process

    return _starter.submit(start).result()


def _prepare_forkserver() -> None:
    torch.multiprocessing.get_context("forkserver").set_forkserver_preload([_WORKER])
    with _hidden_main(), _same_import_path():
        multiprocessing.forkserver.ensure_running()


@contextlib.contextmanager
def _same_import_path() -> Iterator[None]:
    """Let a process that starts meanwhile import what this one imports.

    Left alone, the forkserver of older Pythons looks into the current folder first, and nowhere that was put on
    ``sys.path`` later: it would preload another graftlab than the notebook's, or none.
    """
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str))
    wanted = {"PYTHONPATH": path, "PYTHONSAFEPATH": "1"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _launch(
    options: LaunchOptions,
    folder: Path,
    places: list[Place],
    seats: list[Seat],
    given_up: socket.socket,
) -> list[RankProcess]:
    if options.start_method == "forkserver":
        try:
            _prepare_forkserver()
        except OSError as error:
            raise LaunchError(
                f"the forkserver, which starts the ranks, cannot be started: {error}; its socket lies in the folder "
                f"for temporary files, so set TMPDIR to one that exists and has a short path, or pass "
                f"start_method='spawn'"
            ) from error
    context: Any = torch.multiprocessing.get_context(options.start_method)
    segments: list[int] = []
    stores: dict[str, int] = {}
    links: dict[tuple[int, int], socket.socket] = {}
    ranks: list[RankProcess] = []
    try:
        try:
            sizes = []
            for _ in places:
                descriptor, size = create_segment()
                segments.append(descriptor)
                sizes.append(size)
            for side in ("baseline", "target"):
                stores[side] = _make_store(folder / f"{side}.store")
            for one in range(len(places)):
                for other in range(one):
                    links[one, other], links[other, one] = socket.socketpair()
        except OSError as error:
            raise LaunchError(
                f"shared memory and sockets for {len(places)} ranks cannot be made: {error}; "
                f"fewer ranks, or higher limits (ulimit -n, -f, -v), may help"
            ) from error
        threads = max(1, (os.cpu_count() or 1) // len(places))
        for place, seat in zip(places, seats, strict=True):
            log = folder / "logs" / f"{place.side}-{place.rank}.log"
            stacks = log.with_suffix(".stacks")
            spec = RankSpec(
                place=place,
                device=seat.device,
                backend=seat.backend,
                notes=seat.notes,
                store="" if _MEMORY_FILES else str(folder / f"{place.side}.store"),
                log=str(log),
                stacks=str(stacks),
                segment_size=sizes[0],
                timeout=options.timeout,
                buffer_budget=options.buffer_budget,
                keep_budget=options.keep_budget,
                threads=threads,
                environ=_environment(),
                sys_path=list(sys.path),
                cwd=os.getcwd(),
            )
            ours, theirs = socket.socketpair()
            bell, their_bell = socket.socketpair()
            lifeline, their_lifeline = socket.socketpair()
            with theirs, their_bell, their_lifeline:
                with _hidden_main():
                    process = context.Process(target=enter, args=(spec, theirs), name=f"graftlab-{place.label}")
                    process.start()
                me = place.world_rank
                handed = [*segments, *(links[me, other].fileno() for other in range(len(places)) if other != me)]
                _send_descriptors(ours, [*handed, stores[place.side], their_bell.fileno(), their_lifeline.fileno()])
            ranks.append(RankProcess(place, seat, process, Channel(ours), bell, lifeline, segments[me], log, stacks))
        _await_hellos(ranks, options.timeout, given_up)
        return ranks
    except BaseException as error:
        end_ranks(ranks, patience=0)
        for rank in ranks:
            rank.let_go()
        if isinstance(error, OSError):
            raise LaunchError(f"the ranks could not be started: {error}") from error
        raise
    finally:
        for descriptor in (*segments, *stores.values()):
            os.close(descriptor)
        for link in links.values():
            link.close()


def _make_store(path: Path) -> int:
    """The file through which the ranks of a side find each other: without a name where the system has such files."""
    if _MEMORY_FILES:
        return os.memfd_create("graftlab-store", os.MFD_CLOEXEC)
    return os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)


def _environment() -> dict[str, str]:
    environ = dict(os.environ)
    # One host: collectives need no more than the loopback interface, and nobody else should reach them.
    loopback = "lo" if sys.platform.startswith("linux") else "lo0"
    environ.setdefault("GLOO_SOCKET_IFNAME", loopback)
    environ.setdefault("NCCL_SOCKET_IFNAME", loopback)
    return environ


def _send_descriptors(connection: socket.socket, descriptors: list[int]) -> None:
    for start in range(0, len(descriptors), FDS_A_MESSAGE):
        socket.send_fds(connection, [b"d"], descriptors[start : start + FDS_A_MESSAGE])


@contextlib.contextmanager
def _hidden_main() -> Iterator[None]:
    """Keep multiprocessing from importing the user's script anew in every rank.

    Functions travel by value, so ranks never need it; without this, a script that has no main guard launches itself.
    """
    main_module = sys.modules.get("__main__")
    hidden = {name: getattr(main_module, name) for name in ("__spec__", "__file__") if hasattr(main_module, name)}
    try:
        if "__spec__" in hidden:
            main_module.__spec__ = None  # type: ignore[union-attr]
        if "__file__" in hidden:
            del main_module.__file__  # type: ignore[union-attr]
        yield
    finally:
        for name, value in hidden.items():
            setattr(main_module, name, value)


def _await_hellos(ranks: list[RankProcess], timeout: float, given_up: socket.socket) -> None:
    deadline = time.monotonic() + timeout
    poller = select.poll()
    expected = {rank.channel.fileno(): rank for rank in ranks}
    for descriptor in (*expected, given_up.fileno()):
        poller.register(descriptor, select.POLLIN)
    while expected:
        remaining = deadline - time.monotonic()
        ready = poller.poll(max(0.0, remaining) * 1000)
        if not ready and remaining <= 0:
            late = next(iter(expected.values()))
            raise LaunchError(
                f"{', '.join(rank.label for rank in expected.values())} not ready within {timeout:g} s; "
                f"pass a larger timeout if that is too short. The log of {late.label} ({late.log}) ends:\n"
                f"{late.log_tail()}"
            )
        for descriptor, _ in ready:
            if descriptor == given_up.fileno():
                raise LaunchError("nobody waits for these ranks any more")
            rank = expected[descriptor]
            for frame in rank.channel.receive():
                message = unpack(frame)
                if isinstance(message, Hello):
                    rank.pid = message.pid
                    poller.unregister(descriptor)
                    del expected[descriptor]
                elif isinstance(message, Output):
                    logger.info("%s: %s", rank.label, message.text.rstrip())
            if rank.channel.closed:
                raise LaunchError(
                    f"{rank.label} died while starting ({rank.how_it_ended()}). Its log ({rank.log}) ends:\n"
                    f"{rank.log_tail()}"
                )


def end_ranks(ranks: list[RankProcess], patience: float = 2.0) -> None:
    """End every rank: ask, wait ``patience`` seconds in all, then kill what is left.

    What they sent last can still be read; see :meth:`RankProcess.let_go` for the rest.
    """
    for rank in ranks:
        rank.channel.send(pack(Shutdown()))
    deadline = time.monotonic() + patience
    left = ranks
    try:
        left = [rank for rank in ranks if not rank.join(max(0.0, deadline - time.monotonic()))]
    finally:
        # Also when the stop button ends the wait. All before the first is waited for: the last ones would see their
        # peers die, and raise for it.
        for rank in left:
            rank.kill()
    for rank in left:
        rank.join(5.0)
    for rank in ranks:
        rank.alive = False
